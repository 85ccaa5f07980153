// All kernels, for the instruction set whose vec_*.inl comes before. Included inside its namespace and target region.
#include "traits.inl"
#include "attend.inl"
#include "salience.inl"
#include "code_ops.inl"
#include "block_ops.inl"
#include "dense_layer.inl"
#include "page_ops.inl"
