// HGCA's decode rows. They attend exactly to the dense window and to the packed copies of the host side's salient entries, and
// merge the two. The moving averages are updated, and entries are judged when their page leaves the window (HGCA, Algorithms 1
// and 2).
#include <algorithm>
#include <cmath>

#include "engine.h"

namespace hybrid_sparse {

void Engine::attend_hgca(const LayerCall& call, const Batch& batch, HgcaLayer& layer) {
  collect_hgca_items(batch, layer);
  if (hgca_items_.empty()) return;
  const bool evicts = std::any_of(hgca_items_.begin(), hgca_items_.end(), [&](const HgcaItem& item) {
    return item.state && HgcaPages(layer.rule(), item.seq_len - 1).recent_begin < item.pages.recent_begin;
  });
  if (evicts)
    pool_.for_each(static_cast<int>(hgca_items_.size()), [&](int i) {
      const HgcaItem& item = hgca_items_[i];
      if (item.state) evict(page_table(call, batch, item.request, item.head), layer, *item.state, item.seq_len);
    });
  add_hgca_spans();
  pool_.for_each(static_cast<int>(hgca_spans_.size()), [&](int i) {
    attend_hgca_span(call, batch, hgca_spans_[i]);
    HgcaItem& item = hgca_items_[hgca_spans_[i].item];
    std::atomic_ref<int> pending(item.pending);
    if (pending.fetch_sub(1, std::memory_order_acq_rel) == 1) finish_hgca_item(call, layer, item);
  });
  for (const HgcaItem& item : hgca_items_) {
    if (!item.state) continue;
    layer.request(batch.slots[item.request]).attended(item.seq_len);
  }
  count_hgca_stats();
}

// A row is sparse if the request's state is for the tokens before it. Otherwise (a prompt's single row, a resumed request) it
// attends to everything, and `reevaluate` makes the state.
void Engine::collect_hgca_items(const Batch& batch, HgcaLayer& layer) {
  hgca_items_.clear();
  for (int r = 0; r < batch.requests; ++r) {
    const int token = batch.query_start[r];
    const int seq_len = batch.seq_lens[r];
    if (batch.query_start[r + 1] - token != 1 || seq_len <= 0) continue;
    HgcaRequest* request = batch.decode[r] && batch.slots[r] >= 0 ? &layer.request(batch.slots[r], seq_len) : nullptr;
    const bool sparse = request && request->tokens == seq_len - 1;
    for (int head = 0; head < geometry_.kv_heads; ++head)
      hgca_items_.push_back({r, head, token, seq_len, HgcaPages(layer.rule(), seq_len),
                             sparse ? &request->heads[head] : nullptr, 0, 0, 0, 0, 0, {}});
  }
}

// Lines 10 to 14 and 23 to 25: an entry that leaves the window is salient if some head's average is above beta / (entries of
// the window). The heads of the group share the packed tokens.
void Engine::evict(const PageTable& table, const HgcaLayer& layer, HgcaHead& state, int seq_len) {
  const int before = seq_len - 1;
  const HgcaPages old(layer.rule(), before);
  const HgcaPages now(layer.rule(), seq_len);
  const float limit = layer.rule().beta / static_cast<float>(old.window_tokens(before));
  for (int p = std::max(old.recent_begin, now.sink_end) * kPageTokens; p < now.recent_begin * kPageTokens; ++p) {
    bool salient = false;
    for (int g = 0; g < layer.group(); ++g) salient = salient || *layer.average(state, g, p) > limit;
    if (salient) pack(state, table, p);
  }
}

void Engine::pack(HgcaHead& state, const PageTable& from, int position) {
  const Layout& layout = geometry_.layout;
  PackedPages& packed = state.packed;
  const int index = packed.tokens();
  packed.reserve(index + 1, layout.page_bytes());
  kernels_.copy_token(packed.page(index / kPageTokens), index % kPageTokens, from.page(position / kPageTokens),
                      position % kPageTokens, layout.head_dim);
  packed.add(position);
}

// Cuts each item's reading into enough pieces to keep the threads busy, each with its own state.
void Engine::add_hgca_spans() {
  hgca_spans_.clear();
  int64_t pages = 0;
  int64_t scores = 0;
  for (HgcaItem& item : hgca_items_) {
    if (!item.state) {
      pages += item.pages.pages;
      continue;
    }
    for (int p = 0; p < item.pages.sink_end; ++p) item.window.push_back(p);
    for (int p = item.pages.recent_begin; p < item.pages.pages; ++p) item.window.push_back(p);
    item.score_offset = scores;
    scores += static_cast<int64_t>(item.window.size()) * kPageTokens * geometry_.group();
    pages += static_cast<int64_t>(item.window.size()) + item.state->packed.pages();
  }
  if (static_cast<int64_t>(window_scores_.size()) < scores) window_scores_.resize(scores);
  const int64_t span_pages = pool_.size() == 1 ? pages : std::max<int64_t>(kMinSpanPages, pages / (kSpansPerThread * pool_.size()));
  int states = 0;
  const auto add = [&](int item, HgcaSpan::Part part, int count) {
    const int pieces = static_cast<int>((count + span_pages - 1) / span_pages);
    for (int s = 0; s < pieces; ++s) {
      const int begin = static_cast<int>(int64_t{count} * s / pieces);
      const int end = static_cast<int>(int64_t{count} * (s + 1) / pieces);
      hgca_spans_.push_back({item, part, begin, end - begin, states++});
    }
  };
  for (int i = 0; i < static_cast<int>(hgca_items_.size()); ++i) {
    HgcaItem& item = hgca_items_[i];
    item.first_state = states;
    if (item.state) {
      add(i, HgcaSpan::Part::window, static_cast<int>(item.window.size()));
      item.window_states = states - item.first_state;
      add(i, HgcaSpan::Part::packed, item.state->packed.pages());
    } else {
      add(i, HgcaSpan::Part::everything, item.pages.pages);
    }
    item.states = item.pending = states - item.first_state;
  }
  reserve_states(states);
}

void Engine::attend_hgca_span(const LayerCall& call, const Batch& batch, const HgcaSpan& span) {
  const Layout& layout = geometry_.layout;
  const int group = geometry_.group();
  const HgcaItem& item = hgca_items_[span.item];
  const bool packed = span.part == HgcaSpan::Part::packed;
  static thread_local std::vector<int32_t> visible;
  visible.assign(group, packed ? item.state->packed.tokens() : item.seq_len);
  const void* const* queries = operands(group, [&](int g) { return query_row(call, item.token, item.head * group + g); });
  float* target = state(span.state);
  AttendArgs args{queries, visible.data(), group, nullptr, span.begin, span.count,
                  packed ? item.state->packed.table() : page_table(call, batch, item.request, item.head),
                  layout.head_dim, geometry_.scale, target, target + group, target + 3 * group, nullptr};
  if (span.part != HgcaSpan::Part::window) return kernels_.attend(args);
  args.pages = item.window.data() + span.begin;
  args.token_scores_stride = static_cast<int64_t>(item.window.size()) * kPageTokens;
  args.token_scores = window_scores_.data() + item.score_offset + int64_t{span.begin} * kPageTokens;
  kernels_.attend_keeping_scores(args);
}

void Engine::finish_hgca_item(const LayerCall& call, const HgcaLayer& layer, HgcaItem& item) {
  const int group = geometry_.group();
  float* acc = state(item.first_state);
  for (int s = 1; s < item.window_states; ++s) merge_state(acc, state(item.first_state + s), group);
  if (item.state) {
    const int64_t stride = static_cast<int64_t>(item.window.size()) * kPageTokens;
    for (int g = 0; g < group; ++g)
      average_weights(layer, *item.state, g, item.seq_len, window_scores_.data() + item.score_offset + g * stride, lse(acc, g));
  }
  for (int s = std::max(1, item.window_states); s < item.states; ++s) merge_state(acc, state(item.first_state + s), group);
  store_rows(call, acc, item.token, item.head);
}

// Line 8 for one query head. Only recent entries have averages, because the sink never leaves the window. `scores` are those of
// the window's pages, and `of_window` is their log-sum-exp.
void Engine::average_weights(const HgcaLayer& layer, HgcaHead& state, int g, int seq_len, const float* scores,
                             float of_window) const {
  const HgcaPages pages(layer.rule(), seq_len);
  const float alpha = layer.rule().alpha;
  scores += pages.sink_end * kPageTokens;
  if (seq_len % kPageTokens == 1)  // the token begins a page, in the place of a page that has left the window
    std::fill_n(layer.average(state, g, seq_len - 1), kPageTokens, 0.0f);
  for (int p = pages.recent_begin * kPageTokens; p < seq_len;) {
    const int to_wrap = static_cast<int>(layer.ring_tokens() - p % layer.ring_tokens());
    const int count = std::min(seq_len - p, to_wrap);
    kernels_.blend_weights(scores, count, of_window, 1.0f - alpha, alpha, layer.average(state, g, p));
    scores += count;
    p += count;
  }
}

void Engine::count_hgca_stats() {
  ++stats_.calls;
  stats_.items += static_cast<int64_t>(hgca_items_.size());
  for (const HgcaItem& item : hgca_items_) {
    stats_.pages_total += item.pages.pages;
    stats_.pages_candidate += item.pages.host_pages();
    stats_.pages_read += item.state ? static_cast<int64_t>(item.window.size()) + item.state->packed.pages() : item.pages.pages;
  }
}

}  // namespace hybrid_sparse
