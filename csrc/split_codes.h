// Key codes of two bits in two parts, so that the signs of many pages can be read and scored without the rest, and the rest only
// for a few pages.
//   coarse part  laid out as codes of one bit (CodeLayout): the higher bits, which are signs; the mean; the factors; the units. The
//                factors' unit there is for signs alone. Their unit for both bits follows, in bytes that would be zeros
//   fine part    the lower bits, in lines like those of the signs
// If head_dim is a multiple of 32, the two take as many bytes as the codes in one piece.
#pragma once

#include <cstdint>

namespace hybrid_sparse {

inline constexpr int64_t kMaxCodeBytes = 2368;  // of a page's two-bit codes, at kMaxHeadDim

// The factor of an estimate by signs alone, divided by that of one by two bits. With two bits an element beyond the root mean
// square counts three times; if elements are normally distributed, such elements have the share e^(-1/2) of the sum of lengths.
inline constexpr float kSignFactor = 2.2130613f;  // 1 + 2 e^(-1/2)

void split_codes(const char* codes, int head_dim, char* coarse, char* fine);
void join_codes(const char* coarse, const char* fine, int head_dim, char* codes);

}  // namespace hybrid_sparse
