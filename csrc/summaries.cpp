// Summaries are made of whole pages: of those that a batch fills, when all of its keys are stored, and of those that others wrote.
#include <unordered_set>

#include "engine.h"
#include "split_codes.h"

namespace hybrid_sparse {
namespace {

constexpr int kSerialSummaries = 16;  // pages of heads below which handing out tasks costs more than summarising

}  // namespace

// Summarises the pages that the batch has filled. The first page of a stretch, which may be among them, must be stored before any.
void Engine::summarize_filled(const LayerCall& call, const Batch& batch) {
  const Layout& layout = geometry_.layout;
  if (layout.summary == Summary::none) return;
  filled_.clear();
  for (int r = 0; r < batch.requests; ++r) {
    const int end = batch.query_start[r + 1];
    for (int t = batch.query_start[r]; t < end; ++t) {
      const int64_t slot = batch.slot_mapping[t];
      if (slot >= 0 && slot % kPageTokens == kPageTokens - 1) filled_.push_back({r, (batch.seq_lens[r] - (end - t)) / kPageTokens, slot});
    }
  }
  auto summarize = [&](int i) {
    const FilledPage& filled = filled_[i / geometry_.kv_heads];
    const int head = i % geometry_.kv_heads;
    char* block = call.kv + filled.slot / layout.block_tokens * call.block_stride;
    const int page = static_cast<int>(filled.slot % layout.block_tokens / kPageTokens);
    summarize_page(block, head, page, page_table(call, batch, filled.request, head), filled.page);
  };
  const int tasks = static_cast<int>(filled_.size()) * geometry_.kv_heads;
  if (tasks > kSerialSummaries) return pool_.for_each(tasks, summarize);
  for (int i = 0; i < tasks; ++i) summarize(i);
}

void Engine::summarize(char* kv, int64_t block_stride, const int32_t* blocks, const int32_t* starts, int sequences) {
  const int per_block = geometry_.layout.pages_per_block();
  std::unordered_set<int32_t> met;
  std::vector<int> fresh;  // blocks of the sequence that none before it has
  pool_.session([&] {
    for (int s = 0; s < sequences; ++s) {
      const RequestPages of = {kv, block_stride, blocks + starts[s]};
      fresh.clear();
      for (int index = 0; index < starts[s + 1] - starts[s]; ++index)
        if (met.insert(of.block_table[index]).second) fresh.push_back(index);
      pool_.for_each(static_cast<int>(fresh.size()) * geometry_.kv_heads, [&](int i) {
        const int index = fresh[i / geometry_.kv_heads], head = i % geometry_.kv_heads;
        char* block = kv + of.block_table[index] * block_stride;
        for (int page = 0; page < per_block; ++page) summarize_page(block, head, page, page_table(of, head), index * per_block + page);
      });
    }
  });
}

// Of a page of the block, which is page `page_of_sequence` of the sequence whose pages are `sequence`.
void Engine::summarize_page(char* block, int head, int page, const PageTable& sequence, int page_of_sequence) {
  const Layout& layout = geometry_.layout;
  if (layout.summary == Summary::none) return;
  alignas(64) float memory[kMaxHeadDim];
  const float* common = takes_common_keys() && common_key(sequence, page_of_sequence, memory) ? memory : nullptr;
  const char* content = block + head * layout.head_pages_bytes() + page * layout.page_bytes();
  char* summaries = block + geometry_.kv_heads * layout.head_pages_bytes();
  char* summary = summaries + head * layout.head_summaries_bytes() + page * layout.coarse_bytes();
  if (layout.summary != Summary::split_codes) {
    kernels_.summarize(content, summary, layout, common);
    return;
  }
  alignas(64) char codes[kMaxCodeBytes];
  kernels_.summarize(content, codes, layout, common);
  char* fine = summaries + geometry_.kv_heads * layout.head_summaries_bytes() + head * layout.head_fine_bytes() +
               page * layout.fine_bytes();
  split_codes(codes, layout.head_dim, summary, fine);
}

}  // namespace hybrid_sparse
