// All kernels for the instruction set whose vec_*.inl is included before. Included inside its namespace and target region.
#include "traits.inl"
#include "narrow_pages.inl"
#include "attend.inl"
#include "salience.inl"
#include "code_ops.inl"
#include "blocks_ahead.inl"
#include "score_ops.inl"
#include "block_ops.inl"
#include "dense_layer.inl"
#include "page_ops.inl"

template <class T>
inline constexpr Kernels kKernels = {
    query_bytes<T>, prepare_query<T>, summary_query_bytes<T>, prepare_summary_query<T>, attend<T, false>, attend<T, true>,
    score<T>,       group_scores,     bucket_scores,          take_near,                write_page<T>,    summarize<T>,
    copy_token<T>,  log_sum_exp,      blend_weights,          store_row<T>,             stream,           score_blocks<T>,
    dense_layer,    to_float<T>,      key_norms<T>,           page_norms<T>,    query_product};

// The same for pages of e4m3 with rows of bf16; T is a trait of bf16. `attend` widens such pages itself.
template <class T>
inline constexpr Kernels kNarrowKernels = [] {
  Kernels kernels = kKernels<T>;
  kernels.write_page = write_page<T, uint8_t>;
  kernels.copy_token = copy_token<T, uint8_t>;
  kernels.summarize = summarize_narrow<T>;
  kernels.key_norms = narrow_key_norms<T>;
  kernels.page_norms = narrow_page_norms<T>;
  return kernels;
}();
