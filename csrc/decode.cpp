// The decode rows of a layer call: retained set and selected pages, per request and KV head.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "engine.h"

namespace hybrid_sparse {

void Engine::attend_decode(const LayerCall& call, const Batch& batch, const Selection& selection) {
  collect_items(batch, selection);
  if (item_count_ == 0) return;
  share_prefixes(selection);
  score_and_attend_retained(call, batch);
  rank(selection);
  attend_selected(call, batch);
  attend_progressive(call, batch, selection);
  count_stats();
}

void Engine::collect_items(const Batch& batch, const Selection& selection) {
  item_count_ = 0;
  attributed_ = selection.attributed;
  int64_t scores = 0;
  const int group = geometry_.group();
  for (int r = 0; r < batch.requests; ++r) {
    const int token = batch.query_start[r];
    if (batch.query_start[r + 1] - token != 1) continue;
    const int seq_len = batch.seq_lens[r];
    if (seq_len <= 0) continue;
    const int pages = (seq_len + kPageTokens - 1) / kPageTokens;
    const int first_page = geometry_.first_seen(seq_len) / kPageTokens;
    const auto [begin, end] = geometry_.sliding_window ? CandidatePages{0, 0} : selection.candidates(seq_len);
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
      item.first_page = first_page;
      item.pages = pages;
      item.first_candidate = begin;
      item.candidate_begin = begin;
      item.candidate_end = end;
      item.prefix_run = -1;
      item.prefix_pages = 0;
      item.ranked = false;
      item.anchor = nullptr;
      item.progressive = progressive;
      item.budget = ranked ? budget : candidates;
      item.score_offset = scores;
      item.order.clear();
      item.retained.clear();
      item.unread.clear();
      item.unread_after.clear();
      item.error_bounds.assign(sparse && selection.stops_by_estimates() && group > 1 ? group : 0, 0.0f);
      item.expected = 0;
      item.fine_parts = 0;
      if (ranked) set_ranked(item);
      item.open = progressive;
      item.left = candidates;
      item.wasted = 0;
      item.round_first = 0;
      item.microbatches = 0;
      item.kept = 1.0f;
      item.states = 0;
      if (ranked) scores += int64_t{group + 1} * candidates;
    }
  }
  if (static_cast<int64_t>(scores_.size()) < scores) scores_.resize(scores);
  order_sharers(batch);
  order_visits();
}

// Makes the item ranked: it chooses candidates by rank, and attends its retained set separately.
void Engine::set_ranked(Item& item) const {
  item.ranked = true;
  for (int p = item.prefix_pages; p < item.candidate_begin; ++p) item.retained.push_back(p);
  for (int p = item.candidate_end; p < item.pages; ++p) item.retained.push_back(p);
}

// Scores the candidates' summaries for each query head, and attends common prefixes and the retained sets at the same time.
void Engine::score_and_attend_retained(const LayerCall& call, const Batch& batch) {
  add_score_spans();
  if (score_spans_.empty() && prefix_spans_.empty()) return;
  if (!score_spans_.empty()) prepare_summary_queries(call);
  spans_.clear();
  for (int i : visits_) {
    const Item& item = items_[i];
    if (item.ranked) spans_.push_back({i, item.retained.data(), 0, static_cast<int>(item.retained.size()), i});
  }
  reserve_states(2 * item_count_);
  const int prefixes = static_cast<int>(prefix_spans_.size());
  const int scoring = static_cast<int>(score_spans_.size());
  pool_.for_each(prefixes + scoring + static_cast<int>(spans_.size()), [&](int task) {
    if (task < prefixes) return attend_prefix(call, batch, prefix_spans_[task]);
    if (task < prefixes + scoring) return score_span(call, batch, score_spans_[task - prefixes]);
    const Span& span = spans_[task - prefixes - scoring];
    attend_span(call, batch, span);
    add_sinks(call, state(span.state), geometry_.group(), items_[span.item].head);
  });
}

void Engine::rank(const Selection& selection) {
  int ranked = 0;
  for (int i = 0; i < item_count_; ++i) ranked += items_[i].ranked;
  if (ranked == 0) return;
  share_round(ranked, selection);
  pool_.for_each(item_count_, [&](int i) {
    if (items_[i].ranked) rank_item(items_[i], i, selection);
  });
}

// The candidates' scores for the group as a whole. With `retained_lse` (key codes, whose scores estimate weights) they are
// relative to the retained set, and the estimated weight of all candidates is kept.
const float* Engine::group_item_scores(Item& item, const float* retained_lse) {
  const int group = geometry_.group();
  const int candidates = item.candidates();
  float* scores = scores_.data() + item.score_offset;
  if (group == 1 && !retained_lse) return scores;
  float* grouped = scores + int64_t{group} * candidates;
  if (retained_lse) item.estimated_lse.resize(group);
  kernels_.group_scores(scores, candidates, group, candidates, retained_lse, retained_lse ? item.estimated_lse.data() : nullptr,
                        item.error_bounds.empty() ? nullptr : item.error_bounds.data(), grouped);
  return grouped;
}

// Ranks the candidates for the group. If only the budget limits the reading, chooses the best in sequence order, so that
// neighbours in memory are read one after the other.
void Engine::rank_item(Item& item, int index, const Selection& selection) {
  const int group = geometry_.group();
  const int candidates = item.candidates();
  const bool weighs = geometry_.layout.has_codes();
  merge_prefix(item, state(index));
  static thread_local std::vector<float> retained;
  if (weighs) {
    retained.resize(group);
    for (int g = 0; g < group; ++g) retained[g] = lse(state(index), g);
  }
  const float* grouped = group_item_scores(item, weighs ? retained.data() : nullptr);
  if (!item.progressive) {
    item.order.resize(item.budget);
    select_best(kernels_, grouped, candidates, item.budget, item.candidate_begin, item.order.data());
    return;
  }
  item.rank.build(kernels_, grouped, candidates, item.candidate_begin);
  item.lse_min.assign(group, std::numeric_limits<float>::infinity());
  clear_state(state(read_state(index)));
  if (selection.estimated_remainder) {
    item.unread.assign(group, 1.0);
    verify(item, index, selection, 0);  // the retained set may be enough
  }
  if (item.open) take_next(item, index, selection);
}

// Attends the items whose pages are known before any is read: dense, fixed and predicted budgets. An item without pages gets an
// empty span, so that its rows are stored.
void Engine::attend_selected(const LayerCall& call, const Batch& batch) {
  int64_t total = 0;
  for (int i = 0; i < item_count_; ++i) {
    const Item& item = items_[i];
    if (!item.progressive) total += item.ranked ? item.budget : item.own_pages();
  }
  const int64_t parts = pool_.size() == 1 ? 1 : int64_t{kSpansPerThread} * pool_.size();
  const int span_pages =
      pool_.size() == 1 ? std::numeric_limits<int>::max()
                        : static_cast<int>(std::max<int64_t>(kMinSpanPages, (total + parts - 1) / parts));
  spans_.clear();
  int states = 2 * item_count_;
  for (int i : visits_) {
    Item& item = items_[i];
    if (item.progressive) continue;
    const int pages = item.ranked ? item.budget : item.own_pages();
    item.first_state = states;
    item.states = std::max(pages - 1, 0) / span_pages + 1;
    item.pending = item.states;
    for (int s = 0; s < item.states; ++s) {
      const int begin = static_cast<int>(int64_t{pages} * s / item.states);
      const int end = static_cast<int>(int64_t{pages} * (s + 1) / item.states);
      const int32_t* named = item.ranked ? item.order.data() + begin : nullptr;
      spans_.push_back({i, named, item.own_begin() + begin, end - begin, states++});
    }
  }
  if (spans_.empty()) return;
  run_spans(call, batch, [&](int index) { finish_item(call, items_[index], index); });
}

void Engine::reserve_states(int count) {
  const int64_t floats = count * state_floats(geometry_.group());
  if (static_cast<int64_t>(states_.size()) < floats) states_.resize(floats);
}

float Engine::lse(const float* of_state, int row) const {
  return of_state[row] + std::log(of_state[geometry_.group() + row]);
}

void Engine::attend_span(const LayerCall& call, const Batch& batch, const Span& span) {
  const Layout& layout = geometry_.layout;
  const int group = geometry_.group();
  const Item& item = items_[span.item];
  static thread_local std::vector<int32_t> visible;
  visible.assign(group, item.seq_len);
  const void* const* queries = operands(group, [&](int g) { return query_row(call, item.token, item.head * group + g); });
  float* target = state(span.state);
  AttendArgs args{queries, visible.data(), group, span.pages, span.page_begin, span.count,
                  page_table(call, batch, item.request, item.head), layout.head_dim, geometry_.scale, target,
                  target + group, target + 3 * group, item.progressive ? target + 2 * group : nullptr};
  static thread_local std::vector<int32_t> hidden;
  if (geometry_.sliding_window) {
    hidden.assign(group, geometry_.first_seen(item.seq_len));
    args.hidden = hidden.data();
  }
  kernels_.attend(args);
}

void Engine::finish_item(const LayerCall& call, Item& item, int index) {
  const int group = geometry_.group();
  float* read = state(item.progressive ? read_state(index) : item.first_state);
  for (int s = 1; s < item.states; ++s) merge_state(read, state(item.first_state + s), group);
  if (item.ranked) {
    if (attributed_ > 0.0f) attribute_unread(item, state(index), read);
    merge_state(read, state(index), group);
  } else {
    merge_prefix(item, read);
    add_sinks(call, read, group, item.head);
  }
  store_rows(call, read, item.token, item.head);
}

// Makes it the state of nothing read.
void Engine::clear_state(float* of_state) const {
  const int group = geometry_.group();
  std::fill_n(of_state, group, -std::numeric_limits<float>::infinity());
  std::fill_n(of_state + group, group, 0.0f);
  std::fill_n(of_state + 2 * group, group, std::numeric_limits<float>::infinity());
  std::fill_n(of_state + 3 * group, int64_t{group} * geometry_.layout.head_dim, 0.0f);
}

// Stores the normalised output of a group's rows.
void Engine::store_rows(const LayerCall& call, const float* of_state, int token, int head) {
  const Layout& layout = geometry_.layout;
  const int group = geometry_.group();
  for (int g = 0; g < group; ++g) {
    const int64_t element = token * call.out_stride + int64_t{head * group + g} * layout.head_dim;
    const float sum = of_state[group + g];
    kernels_.store_row(call.out + element * element_bytes(layout.dtype), of_state + 3 * group + int64_t{g} * layout.head_dim,
                       sum > 0.0f ? 1.0f / sum : 0.0f, layout.head_dim);
  }
}

void Engine::count_stats() {
  ++stats_.calls;
  stats_.items += item_count_;
  for (int i = 0; i < item_count_; ++i) {
    const Item& item = items_[i];
    const int candidates = item.candidates();
    const int selected = item.ranked ? static_cast<int>(item.order.size()) : item.budget;
    const int pages = item.seen_pages();
    stats_.pages_total += pages;
    const int shared = item.prefix_run >= 0 && item.prefix_row > 0 ? item.prefix_pages : 0;  // the run's first request counts them as read
    stats_.pages_candidate += item.candidate_end - item.first_candidate;
    stats_.pages_read += pages - candidates + selected - shared;
    stats_.pages_shared += shared;
    stats_.pages_wasted += item.wasted;
    const bool streams = item.anchor && item.granularity == 0;
    const int scored = item.ranked && !streams ? candidates : 0;
    stats_.summaries_scored += scored;
    stats_.summary_bytes += scored * geometry_.layout.coarse_bytes() + item.fine_parts * geometry_.layout.fine_bytes();
    stats_.streaming += streams;
    if (item.progressive) {
      ++stats_.judged;
      stats_.kept_mass += item.kept;
      stats_.stopped_early += selected < candidates;
      stats_.microbatches += item.microbatches;
    }
  }
}

const Engine::Item* Engine::find_item(int request, int head) const {
  const auto end = items_.begin() + item_count_;  // ordered by request, then by head
  const auto found = std::lower_bound(items_.begin(), end, std::pair(request, head), [](const Item& item, const auto& wanted) {
    return std::pair(item.request, item.head) < wanted;
  });
  return found != end && found->request == request && found->head == head ? &*found : nullptr;
}

std::vector<int32_t> Engine::last_plan(int request, int kv_head) const {
  const Item* item = find_item(request, kv_head);
  if (!item) return {};
  std::vector<int32_t> plan((item->ranked ? item->candidate_begin : item->candidate_end) - item->first_candidate);
  std::iota(plan.begin(), plan.end(), item->first_candidate);
  if (item->ranked) plan.insert(plan.end(), item->order.begin(), item->order.end());
  return plan;
}

}  // namespace hybrid_sparse
