// Fluxion's ranking with split codes: the signs of all pages decide which blocks are listed, and only the codes of these blocks
// are read whole.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>

#include "engine.h"
#include "split_codes.h"

namespace hybrid_sparse {
namespace {

// With split codes, a head's best blocks by signs are scored again by both bits: this many times the number that it selects, and
// then this many more (benchmarks/TRIED.md says what fewer lose).
constexpr int kListedBlocks = 4;
constexpr int kListedMore = 8;
constexpr int kPagesAhead = 4;  // how far ahead fine parts are prefetched

}  // namespace

// What pages are estimated to weigh by both bits of their split codes, as logarithms. The parts of each page's codes are joined in
// the thread's own memory and scored as codes in one piece. Row r's scores lie at scores + r * stride.
void Engine::weigh_listed(const PageTable& table, const void* const* queries, int rows, const int32_t* pages, int count,
                          float* scores, int64_t stride) const {
  const Layout& layout = geometry_.layout;
  const int64_t bytes = layout.summary_bytes();
  static thread_local std::vector<char> joined;
  joined.resize(kScoreChunkPages * bytes + 64);
  char* codes = joined.data() + (-reinterpret_cast<uintptr_t>(joined.data()) & 63u);
  const int32_t block = 0;
  for (int done = 0; done < count; done += kScoreChunkPages) {
    const int chunk = std::min(kScoreChunkPages, count - done);
    for (int i = 0; i < chunk; ++i) {
      if (done + i + kPagesAhead < count) {
        const char* ahead = table.fine_part(pages[done + i + kPagesAhead]);
        for (int64_t byte = 0; byte < table.fine_bytes; byte += 64) __builtin_prefetch(ahead + byte);
      }
      join_codes(table.summary(pages[done + i]), table.fine_part(pages[done + i]), layout.head_dim, codes + i * bytes);
    }
    const PageTable one_block = {nullptr, codes, &block, 0, layout.page_bytes(), bytes, chunk};
    run_score(queries, 1, rows, one_block, layout.code_bits, 0, chunk, rows_at(scores + done, rows, stride));
  }
}

void Engine::weigh_pages(const PageTable& table, const void* const* queries, int rows, CandidatePages pages, float* scores,
                         int64_t stride) const {
  std::vector<int32_t> listed(pages.count());
  std::iota(listed.begin(), listed.end(), pages.begin);
  weigh_listed(table, queries, rows, listed.data(), pages.count(), scores, stride);
}

// Lists, in ascending order, the blocks that are among some head's best by their signs.
void Engine::list_blocks(const Item& item, std::vector<int32_t>& listed) const {
  const int blocks = num_blocks(item);
  static thread_local std::vector<uint8_t> marked;
  static thread_local std::vector<int32_t> best;
  marked.assign(blocks, 0);
  const float* scores = scores_.data() + item.score_offset;
  for (int g = 0; g < geometry_.group(); ++g) {
    const int wanted = head_blocks_[item.first_row + g];
    if (wanted == 0) continue;
    best.resize(std::min(blocks, kListedBlocks * wanted + kListedMore));
    select_best(kernels_, scores, blocks, static_cast<int>(best.size()), 0, best.data());
    for (const int32_t block : best) marked[block] = 1;
    scores += blocks;
  }
  listed.clear();
  for (int b = 0; b < blocks; ++b)
    if (marked[b]) listed.push_back(b);
}

// Scores the listed blocks anew by both bits.
void Engine::score_listed(Item& item, const PageTable& table, const std::vector<int32_t>& listed) {
  const int blocks = num_blocks(item);
  const int block_pages = item.granularity / kPageTokens;
  const std::vector<const void*>& queries = block_queries(item);
  static thread_local std::vector<int32_t> pages;
  static thread_local std::vector<float> weights;
  const auto end_page = [&](int32_t block) { return std::min(item.candidate_begin + (block + 1) * block_pages, item.candidate_end); };
  pages.clear();
  for (const int32_t block : listed)
    for (int p = item.candidate_begin + block * block_pages; p < end_page(block); ++p) pages.push_back(p);
  item.fine_parts = static_cast<int>(pages.size());
  const int64_t stride = item.fine_parts;
  weights.resize(queries.size() * stride);
  weigh_listed(table, queries.data(), static_cast<int>(queries.size()), pages.data(), item.fine_parts, weights.data(), stride);
  for (size_t r = 0; r < queries.size(); ++r) {
    float* scores = scores_.data() + item.score_offset + r * blocks;
    const float* of_block = weights.data() + r * stride;
    for (const int32_t block : listed) {
      const int count = end_page(block) - item.candidate_begin - block * block_pages;
      scores[block] = count == 1 ? *of_block : kernels_.log_sum_exp(of_block, count, -std::numeric_limits<float>::infinity());
      of_block += count;
    }
  }
}

}  // namespace hybrid_sparse
