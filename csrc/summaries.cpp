// Makes the summaries of whole pages: of those that a batch fills, once all of its keys are stored, and of those that others wrote.
#include <unordered_set>

#include "engine.h"
#include "split_codes.h"

namespace hybrid_sparse {
namespace {

constexpr int kSerialSummaries = 16;  // up to this many (page, head) pairs, handing out tasks costs more than summarising

}  // namespace

// Summarises the pages that the batch has filled. All of its keys must be stored before, since the first page of a stretch may be
// one of them. The slot says where a page lies, because a row whose keys are only stored gives no length.
void Engine::summarize_filled(const LayerCall& call, const Batch& batch) {
  const Layout& layout = geometry_.layout;
  if (layout.summary == Summary::none) return;
  filled_.clear();
  for (int r = 0; r < batch.requests; ++r) {
    const int end = batch.query_start[r + 1];
    for (int t = batch.query_start[r]; t < end; ++t) {
      const int64_t slot = batch.slot_mapping[t];
      if (slot < 0 || slot % kPageTokens != kPageTokens - 1) continue;
      filled_.push_back({r, batch.seq_lens[r] ? (batch.seq_lens[r] - (end - t)) / kPageTokens : -1, slot});
    }
  }
  auto summarize = [&](int i) {
    const FilledPage& filled = filled_[i / geometry_.kv_heads];
    const int head = i % geometry_.kv_heads;
    alignas(64) float common[kMaxHeadDim];
    const bool in_common = filled.page >= 0 && common_key(page_table(call, batch, filled.request, head), filled.page, common);
    const int32_t block = static_cast<int32_t>(filled.slot / layout.block_tokens);
    const int page = static_cast<int>(filled.slot % layout.block_tokens / kPageTokens);
    summarize_page(page_table({call.kv, call.block_stride, &block}, head), page, in_common ? common : nullptr);
  };
  const int tasks = static_cast<int>(filled_.size()) * geometry_.kv_heads;
  if (tasks > kSerialSummaries) return pool_.for_each(tasks, summarize);
  for (int i = 0; i < tasks; ++i) summarize(i);
}

void Engine::summarize(char* kv, int64_t block_stride, const int32_t* blocks, const int32_t* starts, int sequences) {
  if (geometry_.layout.summary == Summary::none) return;
  const int per_block = geometry_.layout.pages_per_block();
  std::unordered_set<int32_t> met;
  std::vector<int> fresh;  // blocks of the sequence that no sequence before it has
  pool_.session([&] {
    for (int s = 0; s < sequences; ++s) {
      const RequestPages of = {kv, block_stride, blocks + starts[s]};
      fresh.clear();
      for (int index = 0; index < starts[s + 1] - starts[s]; ++index)
        if (met.insert(of.block_table[index]).second) fresh.push_back(index);
      pool_.for_each(static_cast<int>(fresh.size()) * geometry_.kv_heads, [&](int i) {
        const PageTable table = page_table(of, i % geometry_.kv_heads);
        const int first = fresh[i / geometry_.kv_heads] * per_block;
        alignas(64) float common[kMaxHeadDim];
        for (int page = first; page < first + per_block; ++page)
          summarize_page(table, page, common_key(table, page, common) ? common : nullptr);
      });
    }
  });
}

// `common`: the common key to subtract from the page's keys, or null.
void Engine::summarize_page(const PageTable& table, int page, const float* common) {
  const Layout& layout = geometry_.layout;
  if (layout.summary != Summary::split_codes) return kernels_.summarize(table.page(page), table.summary(page), layout, common);
  alignas(64) char codes[kMaxCodeBytes];
  kernels_.summarize(table.page(page), codes, layout, common);
  split_codes(codes, layout.head_dim, table.summary(page), table.fine_part(page));
}

}  // namespace hybrid_sparse
