// The kernels for AVX-512 with products of bytes and bf16 dot products.
#include "isa.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")
#define HYBRID_SPARSE_BF16_DOT
#define HYBRID_SPARSE_VNNI
namespace hybrid_sparse {
namespace {
#include "vec_avx512.inl"
#include "kernels.inl"
}  // namespace
}  // namespace hybrid_sparse
#pragma GCC pop_options

namespace hybrid_sparse {
static bool runs_here() {
  return has_avx512() && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}
Isa avx512_bf16() {
  return {"avx512_bf16", runs_here, {kKernels<Bf16Dot>, kKernels<F16>, kKernels<F32>, kNarrowKernels<Bf16Dot>}};
}
}  // namespace hybrid_sparse
