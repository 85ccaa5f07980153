// Requests that begin with the same blocks, because vLLM's prefix cache has the tokens that their prompts have in common: in which
// order their pages are read, and whose summaries are scored together.
#include <algorithm>
#include <limits>

#include "engine.h"

namespace hybrid_sparse {
namespace {

constexpr int kMostSharedRows = 24;     // of a KV head that are scored together; their operands stay in the L1 cache

}  // namespace

// Brings the requests into the order of their block tables, so that those with the longest common prefixes are neighbours.
void Engine::order_sharers(const Batch& batch) {
  sharers_.clear();
  for (int i = 0; i < item_count_; i += geometry_.kv_heads) {
    const int32_t* blocks = batch.block_table + items_[i].request * batch.block_table_stride;
    sharers_.push_back({i, blocks, items_[i].seq_len / geometry_.layout.block_tokens, 0, false});
  }
  const auto common = [](const Sharer& a, const Sharer& b) {
    const int32_t* end = a.blocks + std::min(a.full_blocks, b.full_blocks);
    return static_cast<int>(std::mismatch(a.blocks, end, b.blocks).first - a.blocks);
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

// The end of the candidate pages that all sharers of [begin, end) have in common; 0 if one of them ranks none.
int Engine::common_pages(int begin, int end) const {
  const int per_block = geometry_.layout.pages_per_block();
  int blocks = std::numeric_limits<int>::max();
  for (int s = begin; s < end; ++s) {
    const Item& item = items_[sharers_[s].item];
    blocks = std::min(blocks, item.ranked ? item.candidate_end / per_block : 0);
    if (s > begin) blocks = std::min(blocks, sharers_[s].common_blocks);
  }
  return blocks * per_block;
}

// Divides the sharers into runs whose common pages are scored once for all of their rows, so that as many scorings as possible are
// saved. Rows of one request share a page's codes anyway; further ones save unpacking them, and tiles of rows are filled.
void Engine::choose_runs() {
  const int count = static_cast<int>(sharers_.size());
  const int most = geometry_.layout.has_codes() ? std::max(1, kMostSharedRows / geometry_.group()) : 1;
  run_begin_.assign(count + 1, 0);
  run_saved_.assign(count + 1, 0);
  for (int end = 1; end <= count; ++end) {
    run_begin_[end] = end - 1;
    run_saved_[end] = run_saved_[end - 1];
    for (int begin = end - 2; begin >= 0 && end - begin <= most; --begin) {
      const int first = items_[sharers_[begin].item].candidate_begin;
      const int pages = common_pages(begin, end) - first;
      if (pages < kFewestSharedPages || first != items_[sharers_[begin + 1].item].candidate_begin) break;
      const int64_t saved = run_saved_[begin] + int64_t{end - begin - 1} * pages;
      if (saved <= run_saved_[end]) continue;
      run_begin_[end] = begin;
      run_saved_[end] = saved;
    }
  }
}

}  // namespace hybrid_sparse
