// AVX-512 with products of bytes; bf16 is widened before it is multiplied. Only `score`, which multiplies bytes, is made here. The
// rest are the kernels for AVX-512.
#include "isa.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
#define HYBRID_SPARSE_VNNI
namespace hybrid_sparse {
namespace {
#include "vec_avx512.inl"
#include "traits.inl"
#include "code_ops.inl"
#include "blocks_ahead.inl"
#include "score_ops.inl"
}  // namespace
}  // namespace hybrid_sparse
#pragma GCC pop_options

namespace hybrid_sparse {
static bool runs_here() {
  return has_avx512() && __builtin_cpu_supports("avx512vnni");
}
Isa avx512_vnni() {
  Isa isa = avx512();
  isa.name = "avx512_vnni";
  isa.runs_here = runs_here;
  isa.by_dtype[static_cast<int>(DType::bf16)].score = score<Bf16>;
  isa.by_dtype[static_cast<int>(DType::e4m3)].score = score<Bf16>;
  isa.by_dtype[static_cast<int>(DType::f16)].score = score<F16>;
  isa.by_dtype[static_cast<int>(DType::f32)].score = score<F32>;
  return isa;
}
}  // namespace hybrid_sparse
