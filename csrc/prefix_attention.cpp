// Pages that several requests of a step begin with (vLLM's prefix cache): they are read once and attended to by the rows of all these
// requests together, exactly. A row's other pages are read as its policy says, as if the common ones belonged to its retained set.
// The idea of one matrix product for a common prefix is Hydragen's (Juravsky et al. 2024).
#include <algorithm>

#include "engine.h"

namespace hybrid_sparse {
namespace {

constexpr int kMostPrefixRows = 96;  // of a KV head that share one pass; the kernels' products take as many at once
constexpr int kMinPrefixSpan = 64;   // a task attends to at least this many pages

}  // namespace

int Engine::prefix_sharers(const Selection& selection) const {
  if (selection.prefix_sharers != Selection::kAsFast) return selection.prefix_sharers;
  return selection.progressive() ? kernels_.prefix_sharers : 0;  // other policies say which pages count
}

void Engine::share_prefixes(const Selection& selection) {
  prefix_runs_.clear();
  prefix_spans_.clear();
  if (sharers_.size() < 2 || selection.prefix_sharers == 0 || geometry_.sliding_window) return;
  choose_prefix_runs(selection);
  add_prefix_spans();
}

// Divides the sharers into runs whose common pages are read once for all of their rows.
void Engine::choose_prefix_runs(const Selection& selection) {
  const int needed = prefix_sharers(selection);
  const int most = std::max({2, kMostPrefixRows / geometry_.group(), needed});
  choose_runs([&](int last) {
    return [&, requests = 1, selects = items_[sharers_[last].item].ranked, blocks = sharers_[last].full_blocks](int begin) mutable {
      selects = selects || items_[sharers_[begin].item].ranked;
      requests += !sharers_[begin + 1].same_request;
      blocks = std::min(blocks, sharers_[begin + 1].common_blocks);
      const int pages = blocks * geometry_.layout.pages_per_block();
      if (pages < kFewestSharedPages || (selects && needed == 0) || requests > most) return kEndsRun;
      return selects && requests < needed ? 0 : pages;
    };
  });
  for (int end = static_cast<int>(sharers_.size()); end > 0; end = run_begin_[end]) {
    const int begin = run_begin_[end];
    if (end - begin == 1) continue;
    prefix_runs_.push_back({begin, end - begin, run_pages_[end], 0, 0});
    for (int s = begin; s < end; ++s) leave_to_run(static_cast<int>(prefix_runs_.size()) - 1, s);
  }
}

// The run reads its pages for a sharer's items, which keep what is left of their candidates.
void Engine::leave_to_run(int run, int sharer) {
  for (int head = 0; head < geometry_.kv_heads; ++head) {
    Item& item = items_[sharers_[sharer].item + head];
    item.prefix_run = run;
    item.prefix_row = (sharer - prefix_runs_[run].sharer) * geometry_.group();
    item.prefix_pages = prefix_runs_[run].pages;
    item.candidate_begin = std::clamp(item.prefix_pages, item.candidate_begin, item.candidate_end);
    const int left = item.candidates();
    item.left = left;
    item.budget = item.ranked ? std::min(item.budget, left) : left;  // of a ranked item: as if it were alone
    item.ranked = item.ranked && (item.progressive ? left > 0 : item.budget < left);
    item.progressive = item.progressive && item.ranked;
    item.open = item.progressive;
    item.retained.clear();
    if (item.ranked) set_ranked(item);
  }
}

void Engine::add_prefix_spans() {
  const int runs = static_cast<int>(prefix_runs_.size());
  const int wanted = pool_.size() == 1 || runs == 0 ? 1 : kSpansPerThread * pool_.size() / (runs * geometry_.kv_heads) + 1;
  int64_t floats = 0;
  for (int r = 0; r < runs; ++r) {
    PrefixRun& run = prefix_runs_[r];
    run.first_span = static_cast<int>(prefix_spans_.size());
    run.parts = std::clamp(run.pages / kMinPrefixSpan, 1, wanted);
    for (int head = 0; head < geometry_.kv_heads; ++head) {
      for (int p = 0; p < run.parts; ++p) {
        const int begin = run.pages * p / run.parts;
        prefix_spans_.push_back({r, head, begin, run.pages * (p + 1) / run.parts - begin, floats});
        floats += state_floats(run.sharers * geometry_.group());
      }
    }
  }
  if (static_cast<int64_t>(prefix_states_.size()) < floats) prefix_states_.resize(floats);
}

void Engine::attend_prefix(const LayerCall& call, const Batch& batch, const PrefixSpan& span) {
  const PrefixRun& run = prefix_runs_[span.run];
  const int group = geometry_.group();
  const int rows = run.sharers * group;
  const auto item_of = [&](int row) -> const Item& { return items_[sharers_[run.sharer + row / group].item + span.head]; };
  static thread_local std::vector<int32_t> visible;
  visible.resize(rows);
  for (int row = 0; row < rows; ++row) visible[row] = item_of(row).seq_len;
  const void* const* queries =
      operands(rows, [&](int row) { return query_row(call, item_of(row).token, span.head * group + row % group); });
  float* target = prefix_states_.data() + span.state;
  kernels_.attend({queries, visible.data(), rows, nullptr, span.page_begin, span.count,
                   page_table(call, batch, item_of(0).request, span.head), geometry_.layout.head_dim, geometry_.scale, target,
                   target + rows, target + 3 * rows, nullptr});
}

// into <- the state over its keys and the item's common pages.
void Engine::merge_prefix(const Item& item, float* into) const {
  if (item.prefix_run < 0) return;
  const PrefixRun& run = prefix_runs_[item.prefix_run];
  const int group = geometry_.group();
  for (int p = 0; p < run.parts; ++p) {
    const PrefixSpan& span = prefix_spans_[run.first_span + item.head * run.parts + p];
    merge_rows(into, group, prefix_states_.data() + span.state, run.sharers * group, item.prefix_row);
  }
}

}  // namespace hybrid_sparse
