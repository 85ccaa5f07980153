// The decode rows of a layer call: retained set and selected pages, per request and KV head.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <numeric>

#include "engine.h"

namespace hybrid_sparse {
namespace {

constexpr int kSpansPerThread = 3;   // parts a call's reading is cut into: enough to even out, few enough to merge
constexpr int kMinSpanPages = 16;
constexpr int kMinScoreSpan = 128;   // summaries a task scores at least

// Counts one task down; true for the one that was last. What the others wrote is visible to it.
bool was_last(int& pending) { return std::atomic_ref<int>(pending).fetch_sub(1, std::memory_order_acq_rel) == 1; }

}  // namespace

void Engine::attend_decode(const LayerCall& call, const Batch& batch, const Selection& selection) {
  collect_items(batch, selection);
  if (item_count_ == 0) return;
  score_and_rank(call, batch);
  attend_selected(call, batch);
  attend_progressive(call, batch, selection);
  count_stats();
}

void Engine::collect_items(const Batch& batch, const Selection& selection) {
  item_count_ = 0;
  int64_t scores = 0;
  const int group = geometry_.group();
  for (int r = 0; r < batch.requests; ++r) {
    const int token = batch.query_start[r];
    if (batch.query_start[r + 1] - token != 1) continue;
    const int seq_len = batch.seq_lens[r];
    if (seq_len <= 0) continue;
    const int pages = (seq_len + kPageTokens - 1) / kPageTokens;
    int begin = selection.sink_tokens / kPageTokens;
    int end = std::max(0, seq_len - selection.window_tokens) / kPageTokens;
    if (end < begin) begin = end = 0;
    const int candidates = end - begin;
    const int budget = selection.budget(candidates);
    const bool sparse = batch.decode[r] && candidates > 0;
    const bool progressive = sparse && selection.progressive();
    const bool ranked = progressive || (sparse && budget < candidates);
    for (int head = 0; head < geometry_.kv_heads; ++head) {
      if (item_count_ == static_cast<int>(items_.size())) items_.emplace_back();
      Item& item = items_[item_count_++];
      item.request = r;
      item.head = head;
      item.token = token;
      item.seq_len = seq_len;
      item.pages = pages;
      item.candidate_begin = begin;
      item.candidate_end = end;
      item.ranked = ranked;
      item.progressive = progressive;
      item.budget = ranked ? budget : candidates;
      item.score_offset = scores;
      item.order.clear();
      item.open = progressive;
      item.left = candidates;
      item.wasted = 0;
      item.kept = 1.0f;
      item.states = 0;
      if (ranked) scores += int64_t{group + 1} * candidates;
    }
  }
  if (static_cast<int64_t>(scores_.size()) < scores) scores_.resize(scores);
}

// Scores the candidates' summaries for each query head, then ranks them for each group.
void Engine::score_and_rank(const LayerCall& call, const Batch& batch) {
  spans_.clear();
  for (int i = 0; i < item_count_; i += geometry_.kv_heads) {
    const Item& item = items_[i];
    if (!item.ranked) continue;
    const int candidates = item.candidate_end - item.candidate_begin;
    const int parts = pool_.size() == 1 ? 1 : std::clamp(candidates / kMinScoreSpan, 1, kSpansPerThread * pool_.size());
    for (int p = 0; p < parts; ++p) {
      const int first = static_cast<int>(int64_t{candidates} * p / parts);
      const int last = static_cast<int>(int64_t{candidates} * (p + 1) / parts);
      spans_.push_back({i, nullptr, item.candidate_begin + first, last - first, 0});
    }
  }
  if (spans_.empty()) return;
  pool_.for_each(static_cast<int>(spans_.size()), [&](int s) { score_span(call, batch, spans_[s]); });
  pool_.for_each(item_count_, [&](int i) {
    if (items_[i].ranked) rank_item(items_[i]);
  });
}

void Engine::score_span(const LayerCall& call, const Batch& batch, const Span& span) {
  const Layout& layout = geometry_.layout;
  const int group = geometry_.group();
  const Item& item = items_[span.item];
  const int candidates = item.candidate_end - item.candidate_begin;
  static thread_local std::vector<float> prepared;  // room for the widest operands
  static thread_local std::vector<const void*> queries;
  prepared.resize(int64_t{geometry_.q_heads} * layout.summary_elements());
  queries.resize(geometry_.q_heads);
  for (int h = 0; h < geometry_.q_heads; ++h) {
    float* row = prepared.data() + int64_t{h} * layout.summary_elements();
    kernels_.prepare_summary_query(query_row(call, item.token, h), layout.head_dim, layout.summary, row);
    queries[h] = row;
  }
  kernels_.score({queries.data(), geometry_.kv_heads, group, span.page_begin, span.count,
                  page_table(call, batch, item.request, 0), layout.summary_elements(), geometry_.scale,
                  scores_.data() + item.score_offset + (span.page_begin - item.candidate_begin),
                  int64_t{group + 1} * candidates, candidates});
}

// Ranks the candidates for the group; where the budget is all that limits the reading, puts the chosen ones between the
// two parts of the retained set. In sequence order: neighbours in memory are read one after the other.
void Engine::rank_item(Item& item) {
  const int group = geometry_.group();
  const int candidates = item.candidate_end - item.candidate_begin;
  float* scores = scores_.data() + item.score_offset;
  float* grouped = group > 1 ? scores + int64_t{group} * candidates : scores;
  if (group > 1) kernels_.group_scores(scores, candidates, group, candidates, grouped);
  const int chosen = item.progressive ? 0 : item.budget;
  item.reading.resize(item.candidate_begin + chosen + (item.pages - item.candidate_end));
  int32_t* out = item.reading.data();
  for (int p = 0; p < item.candidate_begin; ++p) *out++ = p;
  if (item.progressive)
    item.rank.build(kernels_, grouped, candidates, item.candidate_begin);
  else
    select_best(kernels_, grouped, candidates, chosen, item.candidate_begin, out);
  out += chosen;
  for (int p = item.candidate_end; p < item.pages; ++p) *out++ = p;
}

// Items whose pages are known before any is read: dense and fixed budgets; and the retained set of progressive ones.
void Engine::attend_selected(const LayerCall& call, const Batch& batch) {
  int64_t total = 0;
  for (int i = 0; i < item_count_; ++i) {
    Item& item = items_[i];
    if (!item.ranked) {
      total += item.pages;
      continue;
    }
    total += static_cast<int64_t>(item.reading.size());
  }
  const int64_t parts = pool_.size() == 1 ? 1 : int64_t{kSpansPerThread} * pool_.size();
  const int span_pages =
      pool_.size() == 1 ? std::numeric_limits<int>::max()
                        : static_cast<int>(std::max<int64_t>(kMinSpanPages, (total + parts - 1) / parts));
  spans_.clear();
  int states = 0;
  for (int i = 0; i < item_count_; ++i) {
    Item& item = items_[i];
    const int pages = item.ranked ? static_cast<int>(item.reading.size()) : item.pages;
    item.first_state = states;
    item.states = (pages - 1) / span_pages + 1;
    item.pending = item.states;
    for (int s = 0; s < item.states; ++s) {
      const int begin = static_cast<int>(int64_t{pages} * s / item.states);
      const int end = static_cast<int>(int64_t{pages} * (s + 1) / item.states);
      spans_.push_back({i, item.ranked ? item.reading.data() + begin : nullptr, begin, end - begin, states++});
    }
  }
  run_spans(call, batch, true);
}

// Attends every span; with `finish`, the task that attends the last span of an item that needs no more stores its rows.
void Engine::run_spans(const LayerCall& call, const Batch& batch, bool finish) {
  int states = 0;
  for (const Span& span : spans_) states = std::max(states, span.state + 1);
  const int64_t floats = states * state_floats(geometry_.group());
  if (static_cast<int64_t>(states_.size()) < floats) states_.resize(floats);
  pool_.for_each(static_cast<int>(spans_.size()), [&](int i) {
    attend_span(call, batch, spans_[i]);
    Item& item = items_[spans_[i].item];
    if (finish && !item.progressive && was_last(item.pending)) finish_item(call, item);
  });
}

void Engine::attend_span(const LayerCall& call, const Batch& batch, const Span& span) {
  const Layout& layout = geometry_.layout;
  const int group = geometry_.group();
  const Item& item = items_[span.item];
  static thread_local std::vector<const void*> queries;
  static thread_local std::vector<int32_t> visible;
  static thread_local std::vector<char> prepared;
  const int64_t operand_bytes = kernels_.query_bytes(layout.head_dim);
  queries.resize(group);
  visible.assign(group, item.seq_len);
  prepared.resize(group * operand_bytes);
  for (int g = 0; g < group; ++g)
    queries[g] = kernels_.prepare_query(query_row(call, item.token, item.head * group + g), layout.head_dim,
                                        prepared.data() + g * operand_bytes);
  float* target = state(span.state);
  kernels_.attend({queries.data(), visible.data(), group, span.pages, span.page_begin, span.count,
                   page_table(call, batch, item.request, item.head), layout.head_dim, geometry_.scale, target,
                   target + group, target + 3 * group, item.progressive ? target + 2 * group : nullptr});
}

// PSA, Algorithm 1, batched: all open items read their next microbatch, then each is verified. With fewer items than
// threads a microbatch is cut into parts, and an item whose microbatches are too small for that reads several of them a
// round; those behind its stop are dropped and counted as wasted.
void Engine::attend_progressive(const LayerCall& call, const Batch& batch, const Selection& selection) {
  const int group = geometry_.group();
  int open = 0;
  for (int i = 0; i < item_count_; ++i) {
    Item& item = items_[i];
    if (!item.open) continue;
    ++open;
    item.lse_min.assign(group, std::numeric_limits<float>::infinity());
  }
  if (open == 0) return;
  // The items' accumulated states lie first; a round's microbatches follow.
  int base = 0;
  for (int i = 0; i < item_count_; ++i) base = std::max(base, items_[i].first_state + items_[i].states);
  for (int i = 0; i < item_count_; ++i) {
    Item& item = items_[i];
    if (!item.open) continue;
    for (int s = 1; s < item.states; ++s) merge_state(state(item.first_state), state(item.first_state + s), group);
    item.states = 1;
  }
  while (open > 0) {
    const int tasks = pool_.size() == 1 ? 1 : (2 * pool_.size() + open - 1) / open;  // of an item
    const int parts = std::clamp(selection.microbatch_pages / kMinSpanPages, 1, tasks);
    const int ahead = (tasks + parts - 1) / parts;
    spans_.clear();
    int next_state = base;
    for (int i = 0; i < item_count_; ++i) {
      Item& item = items_[i];
      if (!item.open) continue;
      item.round_first = static_cast<int>(item.order.size());
      item.rank.next(std::min(ahead * selection.microbatch_pages, item.budget - item.round_first), item.order);
      const int taken = static_cast<int>(item.order.size()) - item.round_first;
      for (int first = 0; first < taken; first += selection.microbatch_pages) {
        const int count = std::min(selection.microbatch_pages, taken - first);
        const int32_t* pages = item.order.data() + item.round_first + first;
        for (int part = 0; part < parts; ++part) {
          const int begin = count * part / parts;
          const int end = count * (part + 1) / parts;
          if (begin < end) spans_.push_back({i, pages + begin, 0, end - begin, next_state++, part + 1 == parts});
        }
      }
    }
    run_spans(call, batch, false);
    for (size_t s = 0; s < spans_.size();) {
      Item& item = items_[spans_[s].item];
      size_t end = s;
      int accepted = 0;
      for (; end < spans_.size() && spans_[end].item == spans_[s].item; ++end) {
        if (!item.open) {
          item.wasted += spans_[end].count;
          continue;
        }
        const float* part = state(spans_[end].state);
        merge_state(state(item.first_state), part, group);
        for (int g = 0; g < group; ++g) item.lse_min[g] = std::min(item.lse_min[g], part[2 * group + g]);
        item.left -= spans_[end].count;
        accepted += spans_[end].count;
        if (!spans_[end].ends_microbatch) continue;
        ++stats_.microbatches;
        verify(item, selection, item.round_first + accepted);
      }
      if (!item.open) {
        --open;
        item.order.resize(item.round_first + accepted);
        finish_item(call, item);
      }
      s = end;
    }
  }
}

// PSA's verifying step (Algorithm 1, lines 13 to 18): the unread pages are taken to weigh as much as the lightest page
// read so far. The group goes on until every one of its heads has reached the threshold.
void Engine::verify(Item& item, const Selection& selection, int pages_read) {
  const int group = geometry_.group();
  const float* acc = state(item.first_state);
  float lowest = 1.0f;
  for (int g = 0; g < group; ++g) {
    const float lse = acc[g] + std::log(acc[group + g]);
    const float rest = static_cast<float>(item.left) * std::exp(item.lse_min[g] - lse);
    lowest = std::min(lowest, 1.0f / (1.0f + rest));
  }
  item.kept = lowest;
  if (lowest > selection.threshold || pages_read == item.budget) item.open = false;
}

void Engine::finish_item(const LayerCall& call, Item& item) {
  const Layout& layout = geometry_.layout;
  const int group = geometry_.group();
  float* acc = state(item.first_state);
  for (int s = 1; s < item.states; ++s) merge_state(acc, state(item.first_state + s), group);
  for (int g = 0; g < group; ++g) {
    const int64_t element = item.token * call.out_stride + int64_t{item.head * group + g} * layout.head_dim;
    const float sum = acc[group + g];
    kernels_.store_row(call.out + element * element_bytes(layout.dtype), acc + 3 * group + int64_t{g} * layout.head_dim,
                       sum > 0.0f ? 1.0f / sum : 0.0f, layout.head_dim);
  }
}

void Engine::count_stats() {
  ++stats_.calls;
  stats_.items += item_count_;
  for (int i = 0; i < item_count_; ++i) {
    const Item& item = items_[i];
    const int candidates = item.candidate_end - item.candidate_begin;
    const int selected = item.progressive ? static_cast<int>(item.order.size()) : item.budget;
    stats_.pages_total += item.pages;
    stats_.pages_candidate += candidates;
    stats_.pages_read += item.pages - candidates + selected;
    stats_.pages_wasted += item.wasted;
    stats_.summaries_scored += item.ranked ? candidates : 0;
    if (item.progressive) {
      stats_.kept_mass += item.kept;
      stats_.stopped_early += selected < candidates;
    }
  }
}

std::vector<int32_t> Engine::last_plan(int request, int kv_head) const {
  for (int i = 0; i < item_count_; ++i) {
    const Item& item = items_[i];
    if (item.request != request || item.head != kv_head) continue;
    if (item.progressive) return item.order;
    if (item.ranked) {
      const auto first = item.reading.begin() + item.candidate_begin;
      return {first, first + item.budget};
    }
    std::vector<int32_t> all(item.candidate_end - item.candidate_begin);
    std::iota(all.begin(), all.end(), item.candidate_begin);
    return all;
  }
  return {};
}

}  // namespace hybrid_sparse
