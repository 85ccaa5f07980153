// The kernels for plain C++.
#include "isa.h"

namespace hybrid_sparse {
namespace {
#include "vec_scalar.inl"
#include "kernels.inl"
}  // namespace
}  // namespace hybrid_sparse

namespace hybrid_sparse {
static bool runs_here() {
  return true;
}
Isa scalar() {
  return {"scalar", runs_here, {kKernels<Bf16>, kKernels<F16>, kKernels<F32>, kNarrowKernels<Bf16>}};
}
}  // namespace hybrid_sparse
