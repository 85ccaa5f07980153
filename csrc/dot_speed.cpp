// Whether this machine's bf16 dot products are worth using. One does twice the work of an FMA, but an Emerald Rapids Xeon begins
// one in the time of four FMAs.
#include <algorithm>
#include <chrono>
#include <limits>

#include "kernel_table.h"

// Runs the instruction 100 times for each of 12 sums, enough to hide that each sum is a chain. In assembly, so that no compiler
// moves the sums to memory. Sums begin at zero: what a register held before, such as denormals, may slow only one of the two
// instructions.
#define HYBRID_SPARSE_TURNS(INSTRUCTION)                                                                               \
  asm volatile(HYBRID_SPARSE_CLEAR(0) HYBRID_SPARSE_CLEAR(1) HYBRID_SPARSE_CLEAR(2) HYBRID_SPARSE_CLEAR(3)             \
               HYBRID_SPARSE_CLEAR(4) HYBRID_SPARSE_CLEAR(5) HYBRID_SPARSE_CLEAR(6) HYBRID_SPARSE_CLEAR(7)             \
               HYBRID_SPARSE_CLEAR(8) HYBRID_SPARSE_CLEAR(9) HYBRID_SPARSE_CLEAR(10) HYBRID_SPARSE_CLEAR(11)           \
               HYBRID_SPARSE_CLEAR(12)                                                                                 \
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
#define HYBRID_SPARSE_CLEAR(SUM) "vpxor %%xmm" #SUM ", %%xmm" #SUM ", %%xmm" #SUM "\n\t"
#define HYBRID_SPARSE_DOT(SUM) "vdpbf16ps %%zmm12, %%zmm12, %%zmm" #SUM "\n\t"
#define HYBRID_SPARSE_FMA(SUM) "vfmadd231ps %%zmm12, %%zmm12, %%zmm" #SUM "\n\t"

namespace hybrid_sparse {
namespace {

// The least time of some tries, so that a try in which the thread loses its core does not count.
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
