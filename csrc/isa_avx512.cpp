// The kernels for AVX-512.
#include "isa.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
namespace hybrid_sparse {
namespace {
#include "vec_avx512.inl"
#include "kernels.inl"
}  // namespace
}  // namespace hybrid_sparse
#pragma GCC pop_options

namespace hybrid_sparse {
static bool runs_here() {
  return has_avx512();
}
Isa avx512() {
  return {"avx512", runs_here, {kKernels<Bf16>, kKernels<F16>, kKernels<F32>, kNarrowKernels<Bf16>}};
}
}  // namespace hybrid_sparse
