// Whether this machine's bf16 dot products are worth using: one multiplies twice what an FMA does, but an Emerald Rapids Xeon begins
// one where it begins four FMAs.
#include <algorithm>
#include <chrono>
#include <limits>

#include "kernel_table.h"

// 100 times the instruction for each of 12 sums, enough to hide that each is a chain. In assembly, so that no compiler moves the
// sums to memory.
#define HYBRID_SPARSE_TURNS(INSTRUCTION)                                                                               \
  asm volatile("vpxor %%xmm12, %%xmm12, %%xmm12\n\t"                                                                   \
               "mov $100, %%ecx\n"                                                                                     \
               "1:\n\t" INSTRUCTION(0) INSTRUCTION(1) INSTRUCTION(2) INSTRUCTION(3) INSTRUCTION(4) INSTRUCTION(5)      \
                   INSTRUCTION(6) INSTRUCTION(7) INSTRUCTION(8) INSTRUCTION(9) INSTRUCTION(10) INSTRUCTION(11)         \
               "dec %%ecx\n\t"                                                                                         \
               "jnz 1b\n\t"                                                                                            \
               "vzeroupper"                                                                                            \
               :                                                                                                       \
               :                                                                                                       \
               : "cc", "ecx", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", \
                 "xmm11", "xmm12")
#define HYBRID_SPARSE_DOT(SUM) "vdpbf16ps %%zmm12, %%zmm12, %%zmm" #SUM "\n\t"
#define HYBRID_SPARSE_FMA(SUM) "vfmadd231ps %%zmm12, %%zmm12, %%zmm" #SUM "\n\t"

namespace hybrid_sparse {
namespace {

// The least of some tries, so that one during which the thread loses its core does not count.
template <class Turns>
double least_seconds(Turns turns) {
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 32; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    turns();
    least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return least;
}

}  // namespace

bool bf16_dot_is_fast() {
  const double fma = least_seconds([] { HYBRID_SPARSE_TURNS(HYBRID_SPARSE_FMA); });
  const double dot = least_seconds([] { HYBRID_SPARSE_TURNS(HYBRID_SPARSE_DOT); });
  return dot < 2.0 * fma;
}

}  // namespace hybrid_sparse
