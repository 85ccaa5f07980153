// The kernels for AVX2 with FMA and F16C.
#include "isa.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace hybrid_sparse {
namespace {
#include "vec_avx2.inl"
#include "kernels.inl"
}  // namespace
}  // namespace hybrid_sparse
#pragma GCC pop_options

namespace hybrid_sparse {
static bool runs_here() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
Isa avx2() {
  return {"avx2", runs_here, {kKernels<Bf16>, kKernels<F16>, kKernels<F32>, kNarrowKernels<Bf16>}};
}
}  // namespace hybrid_sparse
