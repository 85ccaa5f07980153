// The kernels for AVX-512.
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include <immintrin.h>

#include "convert.h"
#include "kernel_table.h"

static inline float natural_log(float x) { return std::log(x); }
static inline float natural_exp(float x) { return std::exp(x); }

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
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq");
}
extern const Isa isa_avx512;
const Isa isa_avx512 = {"avx512", runs_here, {&kKernels<Bf16>, &kKernels<F16>, &kKernels<F32>}};
}  // namespace hybrid_sparse
