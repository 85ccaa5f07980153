#include "split_codes.h"

#include <cstring>

#include "convert.h"
#include "layout.h"

namespace hybrid_sparse {
namespace {

// gather_bits moves bits 0, 2, 4 and 6 of every byte into its lower half, side by side; scatter_bits moves them back.
uint64_t gather_bits(uint64_t x) {
  x &= 0x5555555555555555u;
  x = (x | x >> 1) & 0x3333333333333333u;
  return (x | x >> 2) & 0x0f0f0f0f0f0f0f0fu;
}

uint64_t scatter_bits(uint64_t x) {
  x &= 0x0f0f0f0f0f0f0f0fu;
  x = (x | x << 2) & 0x3333333333333333u;
  return (x | x << 1) & 0x5555555555555555u;
}

constexpr int kWords = 8;  // in a line

// Lines are 64 bytes. Two lines with four two-bit fields a byte become one line with eight bits a byte in each part.
void load_line(const char* from, uint64_t (&words)[kWords]) { std::memcpy(words, from, sizeof(words)); }
void store_line(char* to, const uint64_t (&words)[kWords]) { std::memcpy(to, words, sizeof(words)); }

}  // namespace

void split_codes(const char* codes, int head_dim, char* coarse, char* fine) {
  const CodeLayout from(head_dim, 2), to(head_dim, 1);
  for (int line = 0; line < to.lines; ++line) {
    uint64_t first[kWords], second[kWords], signs[kWords], rest[kWords];
    load_line(codes + int64_t{128} * line, first);
    load_line(codes + int64_t{128} * line + 64, second);
    for (int i = 0; i < kWords; ++i) {
      rest[i] = gather_bits(first[i]) | gather_bits(second[i]) << 4;
      signs[i] = gather_bits(first[i] >> 1) | gather_bits(second[i] >> 1) << 4;
    }
    store_line(coarse + int64_t{64} * line, signs);
    store_line(fine + int64_t{64} * line, rest);
  }
  std::memcpy(coarse + to.mean, codes + from.mean, from.units - from.mean);
  uint16_t units[3];  // of the factors for signs, of the mean, of the factors for both bits
  std::memcpy(&units[2], codes + from.units, sizeof(uint16_t));
  std::memcpy(&units[1], codes + from.units + sizeof(uint16_t), sizeof(uint16_t));
  units[0] = float_to_bf16(bf16_to_float(units[2]) * kSignFactor);
  std::memcpy(coarse + to.units, units, sizeof(units));
  std::memset(coarse + to.units + sizeof(units), 0, to.bytes - to.units - sizeof(units));
}

void join_codes(const char* coarse, const char* fine, int head_dim, char* codes) {
  const CodeLayout from(head_dim, 1), to(head_dim, 2);
  for (int line = 0; line < from.lines; ++line) {
    uint64_t first[kWords], second[kWords], signs[kWords], rest[kWords];
    load_line(coarse + int64_t{64} * line, signs);
    load_line(fine + int64_t{64} * line, rest);
    for (int i = 0; i < kWords; ++i) {
      first[i] = scatter_bits(signs[i]) << 1 | scatter_bits(rest[i]);
      second[i] = scatter_bits(signs[i] >> 4) << 1 | scatter_bits(rest[i] >> 4);
    }
    store_line(codes + int64_t{128} * line, first);
    store_line(codes + int64_t{128} * line + 64, second);
  }
  std::memcpy(codes + to.mean, coarse + from.mean, to.units - to.mean);
  std::memcpy(codes + to.units, coarse + from.units + 2 * sizeof(uint16_t), sizeof(uint16_t));
  std::memcpy(codes + to.units + sizeof(uint16_t), coarse + from.units + sizeof(uint16_t), sizeof(uint16_t));
  std::memset(codes + to.units + 2 * sizeof(uint16_t), 0, to.bytes - to.units - 2 * sizeof(uint16_t));
}

}  // namespace hybrid_sparse
