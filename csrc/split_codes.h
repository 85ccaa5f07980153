// Key codes of two bits in two parts, so that the signs of many pages can be read and scored without the rest, and the rest of few.
//   coarse part  what one-bit codes are (CodeLayout of one bit): the higher bits, which are signs, the mean, the factors, and units
//                of which the factors' is for signs alone; then the factors' own, in what would be zeros
//   fine part    the lower bits, in lines as those of the signs
// Together they take as many bytes as the codes in one piece, where head_dim is a multiple of 32.
#pragma once

#include <cstdint>

namespace hybrid_sparse {

inline constexpr int kSplitHeadDim = 32;  // heads of whole multiples of it
inline constexpr int64_t kMaxCodeBytes = 2368;  // of a page's two-bit codes, at kMaxHeadDim

// What the factor of an estimate by signs alone is to that by two bits: an element beyond the root mean square counts three times in
// the latter, and of normally distributed elements the share of those in the sum of lengths is e^(-1/2).
inline constexpr float kSignFactor = 2.2130613f;  // 1 + 2 e^(-1/2)

void split_codes(const char* codes, int head_dim, char* coarse, char* fine);
void join_codes(const char* coarse, const char* fine, int head_dim, char* codes);

}  // namespace hybrid_sparse
