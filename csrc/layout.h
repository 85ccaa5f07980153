// The layout of one layer's KV memory: the one place in C++ that defines it, as memory/layout.py does in Python (documented for
// readers in ARCHITECTURE.md).
//
// A block has the pages of its KV heads, head by head, then the summaries of these pages, head by head, because scoring
// reads the summaries of a block in one piece.
//   block    [head][page], [head][summary]; split codes: [head][page], [head][coarse part], [head][fine part]
//   page     K part, V part; 16 tokens each
//   K part   bf16, e4m3: [head_dim/2][16 tokens][2 dims]      f16, f32: [head_dim][16 tokens]
//   V part   bf16, e4m3: [8 token pairs][head_dim][2 tokens]  f16, f32: [16 tokens][head_dim]
//   summary  minmax: [max: head_dim][min: head_dim]     cuboid_mean: [centre: head_dim]
//            key_codes: the same for every dtype, but for the padding. Lines of 64 bytes [16 tokens][4 bytes], a byte holding
//            8 / code_bits dims from its lowest bits on; then the page's mean with four bits a dim, a byte a token, two bf16, the
//            units of these bytes and of the mean, and a byte that says whether a common key was subtracted from the keys
//            (CodeLayout)
//            split_codes: key codes of two bits in two parts, so that their signs can be read alone (split_codes.h)
//            none: nothing
// One bf16 dot-product instruction then gives 16 token scores (K) or 16 output dims (V) with no horizontal sum.
// Summaries live in the block, so whatever copies a block (copy-on-write, a KV connector) copies them too.
#pragma once

#include <cstdint>

namespace hybrid_sparse {

inline constexpr int kPageTokens = 16;

enum class DType : int { bf16 = 0, f16 = 1, f32 = 2, e4m3 = 3 };
enum class Summary : int { minmax = 0, cuboid_mean = 1, key_codes = 2, none = 3, split_codes = 4 };

inline constexpr int kMaxHeadDim = 512;
inline constexpr int kMaxBlockPages = 8;  // of a logical block (Fluxion)
inline constexpr int kCodeDims = 4;  // dims of one token that lie side by side
inline constexpr int kCommonKeyPages = 32;  // pages of a stretch, whose first page gives the common key (common_keys.cpp)

// Bytes an element of queries, incoming keys and values, outputs, bounds and centres. These are bf16 if pages hold e4m3.
inline constexpr int element_bytes(DType dtype) { return dtype == DType::f32 ? 4 : 2; }
// Bytes an element of keys and values in pages.
inline constexpr int stored_bytes(DType dtype) { return dtype == DType::e4m3 ? 1 : element_bytes(dtype); }

// Where the parts of a page's key codes lie, in bytes from their start; lines of codes come first.
struct CodeLayout {
  int lines;
  int64_t mean;     // [head_dim / 2], the lower dim in the lower four bits
  int64_t factors;  // [16 tokens] uint8
  int64_t units;    // bf16 of the factors, bf16 of the mean
  int64_t less_common;  // one byte, with key codes
  // Whole cache lines; with elements of two bytes half lines where whole ones would be more than 8 % of keys and values, which
  // take 64 * head_dim bytes.
  int64_t bytes;
  CodeLayout(int head_dim, int code_bits, int element_bytes = 4)
      : lines((head_dim * code_bits + 31) / 32), mean(int64_t{64} * lines), factors(mean + head_dim / 2),
        units(factors + kPageTokens), less_common(units + 4), bytes((less_common + 64) / 64 * 64) {
    if (element_bytes == 2 && 100 * bytes > 8 * int64_t{64} * head_dim) bytes = (less_common + 32) / 32 * 32;
  }
};

struct Layout {
  DType dtype;
  Summary summary;
  int head_dim;
  int block_tokens;
  int code_bits = 0;  // key_codes: bits a dim, 1 or 2; split_codes: 2

  int pages_per_block() const { return block_tokens / kPageTokens; }
  int64_t page_bytes() const { return int64_t{2} * kPageTokens * head_dim * stored_bytes(dtype); }
  bool has_codes() const { return summary == Summary::key_codes || summary == Summary::split_codes; }
  int summary_elements() const { return summary == Summary::minmax ? 2 * head_dim : head_dim; }
  int64_t summary_bytes() const {
    if (summary == Summary::none) return 0;
    if (summary == Summary::split_codes) return CodeLayout(head_dim, code_bits).bytes;  // both parts in whole lines
    if (summary == Summary::key_codes) return CodeLayout(head_dim, code_bits, element_bytes(dtype)).bytes;
    return int64_t{summary_elements()} * element_bytes(dtype);
  }
  // With split codes, those of summary_bytes that the fine part takes; else 0.
  int64_t fine_bytes() const { return summary == Summary::split_codes ? int64_t{64} * CodeLayout(head_dim, 1).lines : 0; }
  int64_t coarse_bytes() const { return summary_bytes() - fine_bytes(); }
  // A KV head's part of a block: its pages and its summaries.
  int64_t head_pages_bytes() const { return pages_per_block() * page_bytes(); }
  int64_t head_summaries_bytes() const { return pages_per_block() * coarse_bytes(); }
  int64_t head_fine_bytes() const { return pages_per_block() * fine_bytes(); }
  int64_t head_block_bytes() const { return head_pages_bytes() + head_summaries_bytes() + head_fine_bytes(); }
};

// Whether the rotation of key codes flips the sign of a dim: one bit of a fixed random sequence (SplitMix64).
inline bool rotation_is_negative(int dim) {
  uint64_t x = (static_cast<uint64_t>(dim) + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return (x ^ (x >> 31)) >> 63;
}

// Where the pages of one request and KV head lie: page p of the sequence is page p % pages_per_block of block p / pages_per_block.
struct PageTable {
  char* base;                  // the layer's KV memory plus the offset of the head's pages in a block
  char* summaries;             // likewise for its summaries; split codes: their coarse parts
  const int32_t* block_table;  // [blocks of the request]
  int64_t block_stride;        // bytes
  int64_t page_bytes;
  int64_t summary_bytes;
  int pages_per_block;
  char* fine_parts = nullptr;  // likewise for the fine parts of split codes
  int64_t fine_bytes = 0;

  char* page(int index) const {
    return base + block_table[index / pages_per_block] * block_stride + (index % pages_per_block) * page_bytes;
  }
  char* summary(int index) const {
    return summaries + block_table[index / pages_per_block] * block_stride + (index % pages_per_block) * summary_bytes;
  }
  char* fine_part(int index) const {
    return fine_parts + block_table[index / pages_per_block] * block_stride + (index % pages_per_block) * fine_bytes;
  }
};

}  // namespace hybrid_sparse
