// Reading in rounds until enough of the weight is gathered: PSA's Algorithm 1, batched, and the same with the remainder that
// key codes estimate.
#include <algorithm>
#include <cmath>

#include "engine.h"

namespace hybrid_sparse {

// How a round's reading is cut over the threads. With fewer items than threads a microbatch is cut into parts, and an item whose
// microbatches are too small for that reads several of them a round; those behind its stop are dropped and counted as
// wasted. With an estimated remainder a round is one microbatch, as large as the estimates say.
void Engine::share_round(int open, const Selection& selection) {
  const int tasks = pool_.size() == 1 ? 1 : (2 * pool_.size() + open - 1) / open;  // of an item
  most_parts_ = selection.estimated_remainder ? tasks : std::clamp(selection.microbatch_pages / kMinSpanPages, 1, tasks);
  microbatches_ahead_ = (tasks + most_parts_ - 1) / most_parts_;
}

void Engine::attend_progressive(const LayerCall& call, const Batch& batch, const Selection& selection) {
  for (int i = 0; i < item_count_; ++i)
    if (items_[i].progressive && !items_[i].open) finish_item(call, items_[i], i);
  for (;;) {
    int open = 0;
    for (int i = 0; i < item_count_; ++i) open += items_[i].open;
    if (open == 0) return;
    spans_.clear();
    int next_state = 2 * item_count_;  // those of the items, which accumulate, lie first
    for (int i = 0; i < item_count_; ++i) {
      if (items_[i].open) add_round_spans(i, selection, next_state);
    }
    share_round(open, selection);  // for the pages that the items take at this round's end
    run_spans(call, batch, [&](int index) { end_round(call, selection, index); });
  }
}

// One span a part of a microbatch, from what the item has taken for this round.
void Engine::add_round_spans(int index, const Selection& selection, int& next_state) {
  Item& item = items_[index];
  const int taken = static_cast<int>(item.order.size()) - item.round_first;
  const int microbatch = selection.estimated_remainder ? taken : selection.microbatch_pages;
  item.first_span = static_cast<int>(spans_.size());
  for (int first = 0; first < taken; first += microbatch) {
    const int count = std::min(microbatch, taken - first);
    const int parts = selection.estimated_remainder ? std::clamp(count / kMinSpanPages, 1, most_parts_) : most_parts_;
    const int32_t* pages = item.order.data() + item.round_first + first;
    for (int part = 0; part < parts; ++part) {
      const int begin = count * part / parts;
      const int end = count * (part + 1) / parts;
      if (begin < end) spans_.push_back({index, pages + begin, 0, end - begin, next_state++, part + 1 == parts});
    }
  }
  item.pending = static_cast<int>(spans_.size()) - item.first_span;
}

// Takes the item's microbatches of this round in their order until one is the last that is needed; then its rows are stored,
// else its next pages taken.
void Engine::end_round(const LayerCall& call, const Selection& selection, int index) {
  Item& item = items_[index];
  const int group = geometry_.group();
  int accepted = 0;
  for (size_t s = item.first_span; s < spans_.size() && spans_[s].item == index; ++s) {
    if (!item.open) {
      item.wasted += spans_[s].count;
      continue;
    }
    const float* part = state(spans_[s].state);
    merge_state(state(read_state(index)), part, group);
    for (int g = 0; g < group; ++g) item.lse_min[g] = std::min(item.lse_min[g], part[2 * group + g]);
    item.left -= spans_[s].count;
    accepted += spans_[s].count;
    if (!spans_[s].ends_microbatch) continue;
    ++item.microbatches;
    verify(item, index, selection, item.round_first + accepted);
  }
  if (item.open) {
    take_next(item, index, selection);
  } else {
    item.order.resize(item.round_first + accepted);
    finish_item(call, item, index);
  }
}

// Puts the pages of the item's next round into its order: some microbatches, or, with an estimated remainder, pages by whole
// microbatches until the threshold is reached if the estimates hold.
void Engine::take_next(Item& item, int index, const Selection& selection) {
  item.round_first = static_cast<int>(item.order.size());
  if (!selection.estimated_remainder) {
    item.rank.next(std::min(microbatches_ahead_ * selection.microbatch_pages, item.budget - item.round_first), item.order);
    return;
  }
  const int group = geometry_.group();
  static thread_local std::vector<double> expected;  // weight read, once the pages taken here are
  expected.resize(group);
  for (int g = 0; g < group; ++g) expected[g] = read_share(item, index, g);
  for (bool enough = false; !enough && static_cast<int>(item.order.size()) < item.budget;) {
    const size_t first = item.order.size();
    item.rank.next(std::min(selection.microbatch_pages, item.budget - static_cast<int>(first)), item.order);
    enough = true;
    for (int g = 0; g < group; ++g) {
      double taken = 0.0;
      for (size_t p = first; p < item.order.size(); ++p) taken += estimate(item, g, item.order[p]);
      item.unread[g] = std::max(0.0, item.unread[g] - taken);
      expected[g] += taken;
      enough = enough && expected[g] > selection.threshold * (expected[g] + item.unread[g]);
    }
  }
}

// The page's estimated weight as a share of all candidates'.
double Engine::estimate(const Item& item, int g, int page) const {
  const int candidates = item.candidate_end - item.candidate_begin;
  const float log_weight = scores_[item.score_offset + int64_t{g} * candidates + page - item.candidate_begin];
  return std::exp(log_weight - item.estimated_lse[g]);
}

// The weight read so far in the same unit.
double Engine::read_share(const Item& item, int index, int g) const {
  return std::exp(std::min(600.0, read_lse(index, g) - item.estimated_lse[g]));
}

// Log-sum-exp of everything read so far: the retained set and candidates.
double Engine::read_lse(int index, int g) const {
  return log_add(lse(state(index), g), lse(state(read_state(index)), g));
}

// Whether enough has been read. PSA (Algorithm 1, lines 13 to 18): the unread pages are taken to weigh as much as the lightest
// page read so far; with an estimated remainder, what their key codes say. The group goes on until every one of its heads has
// reached the threshold.
void Engine::verify(Item& item, int index, const Selection& selection, int pages_read) {
  const int group = geometry_.group();
  double lowest = 1.0;
  for (int g = 0; g < group; ++g) {
    double rest;
    if (selection.estimated_remainder) {
      const bool everything = pages_read == item.candidate_end - item.candidate_begin;
      rest = everything ? 0.0 : item.unread[g] / read_share(item, index, g);
    } else {
      rest = static_cast<double>(item.left) * std::exp(item.lse_min[g] - read_lse(index, g));
    }
    lowest = std::min(lowest, 1.0 / (1.0 + rest));
  }
  item.kept = static_cast<float>(lowest);
  if (lowest > selection.threshold || pages_read == item.budget) item.open = false;
}

}  // namespace hybrid_sparse
