// Requests that begin with the same blocks, because vLLM's prefix cache has the tokens that their prompts have in common: in which
// order their pages are read, and whose summaries are scored together.
#include <algorithm>
#include <cstring>

#include "engine.h"

namespace hybrid_sparse {
namespace {

constexpr int kMostSharedRows = 24;  // of a KV head that are scored together; their operands stay in the L1 cache

// How many of the first `count` entries of two block tables are alike. `memcmp` compares vectors, `mismatch` one entry after another.
int common_beginning(const int32_t* a, const int32_t* b, int count) {
  constexpr int kPiece = 64;
  int at = 0;
  while (at + kPiece <= count && std::memcmp(a + at, b + at, kPiece * sizeof(int32_t)) == 0) at += kPiece;
  return static_cast<int>(std::mismatch(a + at, a + count, b + at).first - a);
}

}  // namespace

// Brings the requests into the order of their block tables, so that those with the longest common prefixes are neighbours.
void Engine::order_sharers(const Batch& batch) {
  sharers_.clear();
  for (int i = 0; i < item_count_; i += geometry_.kv_heads) {
    const int32_t* blocks = batch.block_table + items_[i].request * batch.block_table_stride;
    sharers_.push_back({i, blocks, items_[i].seq_len / geometry_.layout.block_tokens, 0, false});
  }
  const auto common = [](const Sharer& a, const Sharer& b) {
    return common_beginning(a.blocks, b.blocks, std::min(a.full_blocks, b.full_blocks));
  };
  std::sort(sharers_.begin(), sharers_.end(), [&](const Sharer& a, const Sharer& b) {
    const int place = common(a, b);
    if (place < a.full_blocks && place < b.full_blocks) return a.blocks[place] < b.blocks[place];
    return std::pair(a.full_blocks, a.item) < std::pair(b.full_blocks, b.item);
  });
  for (size_t s = 1; s < sharers_.size(); ++s) {
    const Sharer& before = sharers_[s - 1];
    Sharer& sharer = sharers_[s];
    sharer.common_blocks = common(before, sharer);
    // Requests share no block that one of them still writes to.
    const int last = (std::min(items_[before.item].seq_len, items_[sharer.item].seq_len) - 1) / geometry_.layout.block_tokens;
    sharer.same_request = sharer.common_blocks >= last && before.blocks[last] == sharer.blocks[last];
  }
}

// Items of one KV head whose requests share blocks read one after another, while a core's cache has the shared pages.
void Engine::order_visits() {
  visits_.clear();
  for (size_t begin = 0, end; begin < sharers_.size(); begin = end) {
    for (end = begin + 1; end < sharers_.size() && sharers_[end].common_blocks > 0;) ++end;
    for (int head = 0; head < geometry_.kv_heads; ++head)
      for (size_t s = begin; s < end; ++s) visits_.push_back(sharers_[s].item + head);
  }
}

// Divides the sharers into runs whose common candidate pages are scored once for all of their rows. Rows of one request share a page's
// codes anyway; further ones save unpacking them, and tiles of rows are filled.
void Engine::choose_scoring_runs() {
  const int most = geometry_.layout.has_codes() ? std::max(1, kMostSharedRows / geometry_.group()) : 1;
  const int per_block = geometry_.layout.pages_per_block();
  const auto item_of = [this](int sharer) -> const Item& { return items_[sharers_[sharer].item]; };
  const auto candidate_blocks = [&](int sharer) { return item_of(sharer).ranked ? item_of(sharer).candidate_end / per_block : 0; };
  choose_runs([&](int last) {
    return [&, last, blocks = candidate_blocks(last)](int begin) mutable {
      blocks = std::min({blocks, candidate_blocks(begin), sharers_[begin + 1].common_blocks});
      const int first = item_of(begin).candidate_begin;
      const int pages = blocks * per_block - first;
      const bool joins = last - begin < most && pages >= kFewestSharedPages && first == item_of(begin + 1).candidate_begin;
      return joins ? pages : kEndsRun;
    };
  });
}

}  // namespace hybrid_sparse
