// AMX for attention and for scores of bounds and centres, in bf16; for everything else the kernels for AVX-512 with products of
// bytes.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "isa.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")
namespace hybrid_sparse {
namespace {
#include "vec_avx512.inl"
#include "traits.inl"
#include "narrow_pages.inl"
#include "attend.inl"
#include "amx_tiles.inl"
#include "attend_amx.inl"
#include "blocks_ahead.inl"
#include "score_amx.inl"
}  // namespace
}  // namespace hybrid_sparse
#pragma GCC pop_options

namespace hybrid_sparse {

static int64_t query_bytes(int) { return 0; }
static const void* query_itself(const void* query, int, void*) { return query; }

// Asks Linux for permission to use the tiles. From then on Linux saves them with the process's threads.
static bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr unsigned long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

static bool runs_here() {
  static const bool result = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!avx512_bf16().runs_here() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
    return (d & kAmxBf16) && (d & kAmxTile) && may_use_tiles();
  }();
  return result;
}

Isa amx_bf16() {
  Isa isa = avx512_vnni();
  isa.name = "amx_bf16";
  isa.runs_here = runs_here;
  for (const DType dtype : {DType::bf16, DType::e4m3}) {
    Kernels& kernels = isa.by_dtype[static_cast<int>(dtype)];
    kernels.query_bytes = query_bytes;
    kernels.prepare_query = query_itself;
    kernels.attend = attend_amx<false>;
    kernels.attend_keeping_scores = attend_amx<true>;
    kernels.score = score_amx;
  }
  isa.by_dtype[static_cast<int>(DType::bf16)].prefix_sharers = 6;
  return isa;
}

}  // namespace hybrid_sparse
