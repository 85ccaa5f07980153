// Included before the target region of every isa_*.cpp: nothing that other files share may be compiled inside the region.
#pragma once

#include <immintrin.h>

#include <bit>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "convert.h"
#include "kernel_table.h"

static inline float natural_log(float x) { return std::log(x); }
static inline float natural_exp(float x) { return std::exp(x); }

namespace hybrid_sparse {

inline constexpr float kLog2E = 1.44269504088896341f;
inline constexpr float kLn2 = 0.693147180559945309f;

// Whether the CPU has the parts of AVX-512 that all kernels for it use.
[[maybe_unused]] static inline bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq");
}

}  // namespace hybrid_sparse
