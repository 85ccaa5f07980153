// Converts between bf16 and elements of one byte (e4m3: a sign, four bits of exponent, three of mantissa; no infinity, one NaN).
// bf16 holds every e4m3 exactly.
#include <array>
#include <cmath>

#include "convert.h"
#include "kernel_table.h"

namespace hybrid_sparse {
namespace {

constexpr int kMagnitudes = 127;  // finite magnitudes, in the order of their bits; the last is 448
constexpr uint8_t kNan = 0x7f;

float magnitude(int bits) {
  const int exponent = bits >> 3, mantissa = bits & 7;
  return exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9) : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
}

uint8_t nearest(float x) {
  if (std::isnan(x)) return kNan;
  int low = 0, high = kMagnitudes - 1;
  if (x >= magnitude(high)) return static_cast<uint8_t>(high);
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (magnitude(middle) <= x ? low : high) = middle;
  }
  const float below = x - magnitude(low), above = magnitude(high) - x;
  return static_cast<uint8_t>(below < above || (below == above && low % 2 == 0) ? low : high);
}

}  // namespace

char* widened_pages() {
  alignas(64) static thread_local char memory[2 * kChunkPages * kPageTokens * kMaxHeadDim * sizeof(uint16_t)];
  return memory;
}

const uint8_t* narrowed_bf16() {
  static const auto table = [] {
    std::array<uint8_t, 1 << 16> result;
    for (int bits = 0; bits < 1 << 15; ++bits) {
      result[bits] = nearest(bf16_to_float(static_cast<uint16_t>(bits)));
      result[bits | 0x8000] = static_cast<uint8_t>(result[bits] | 0x80);
    }
    return result;
  }();
  return table.data();
}

const uint16_t* widened_e4m3() {
  static const auto table = [] {
    std::array<uint16_t, 1 << 8> result;
    for (int bits = 0; bits < 1 << 7; ++bits) {
      result[bits] = bits == kNan ? 0x7fc0 : float_to_bf16(magnitude(bits));
      result[bits | 0x80] = static_cast<uint16_t>(result[bits] | 0x8000);
    }
    return result;
  }();
  return table.data();
}

}  // namespace hybrid_sparse
