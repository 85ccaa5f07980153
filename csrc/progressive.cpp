// Reading in rounds until enough of the attention weight is gathered: PSA's Algorithm 1, batched, or the same with a remainder
// that is estimated from key codes.
#include <algorithm>
#include <cmath>

#include "engine.h"

namespace hybrid_sparse {

// Decides how a round's reading is shared by the threads. If there are fewer than two open items per thread, a microbatch is cut
// into parts. If microbatches are too small for that, an item reads several of them in a round; those after its stop are dropped
// and counted as wasted. With an estimated remainder a round counts as one microbatch, as large as the estimates say.
void Engine::share_round(int open, const Selection& selection) {
  const int tasks = pool_.size() == 1 ? 1 : (2 * pool_.size() + open - 1) / open;  // per item
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
    int next_state = 2 * item_count_;  // the items' own states, which accumulate, come first
    for (int i : visits_) {
      if (items_[i].open) add_round_spans(i, selection, next_state);
    }
    share_round(open, selection);  // for the pages that the items take at this round's end
    run_spans(call, batch, [&](int index) { end_round(call, selection, index); });
  }
}

// Adds one span for each part of a microbatch, over the pages that the item has taken for this round.
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

// Accepts the item's microbatches of this round in order, up to the last one that is needed. If the item is then done, its rows
// are stored; otherwise it takes its next pages.
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

// Appends the pages of the item's next round to its order: `microbatches_ahead_` microbatches, or, with an estimated remainder,
// as many whole microbatches as reach the threshold if the estimates hold.
void Engine::take_next(Item& item, int index, const Selection& selection) {
  item.round_first = static_cast<int>(item.order.size());
  if (!selection.estimated_remainder) {
    item.rank.next(std::min(microbatches_ahead_ * selection.microbatch_pages, item.budget - item.round_first), item.order);
    return;
  }
  const int group = geometry_.group();
  static thread_local std::vector<double> expected;  // weight read once the pages taken here are read, as read_share() has it
  static thread_local std::vector<int32_t> unread;
  expected.resize(group);
  for (int g = 0; g < group; ++g) expected[g] = read_share(item, index, g);
  for (bool enough = false; !enough && static_cast<int>(item.order.size()) < item.budget;) {
    const size_t first = item.order.size();
    item.rank.next(std::min(selection.microbatch_pages, item.budget - static_cast<int>(first)), item.order);
    for (int g = 0; g < group; ++g) {
      const double taken = estimate(item, g, item.order.data() + first, item.order.size() - first);
      item.unread[g] -= taken;
      expected[g] += taken;
    }
    if (little_left(item)) {
      unread.clear();
      item.rank.rest(unread);
      weigh_unread(item, unread, expected.data());
    }
    enough = true;
    const double lacking = 1.0 - selection.threshold;
    for (int g = 0; g < group; ++g) enough = enough && lacking * expected[g] > selection.threshold * item.unread[g];
  }
}

// The weight read so far, in the unit of `estimated_lse`.
double Engine::read_share(const Item& item, int index, int g) const {
  return std::exp(std::min(kMostLogShare, read_lse(index, g) - item.estimated_lse[g]));
}

// Log-sum-exp of everything read so far: the retained set and candidates.
double Engine::read_lse(int index, int g) const {
  return log_add(lse(state(index), g), lse(state(read_state(index)), g));
}

// Closes the item if enough has been read or its budget is used up. PSA (Algorithm 1, lines 13 to 18) assumes that each unread
// page weighs as much as the lightest page read so far; with an estimated remainder the key codes say what they weigh. The group
// goes on until every head has reached the threshold.
void Engine::verify(Item& item, int index, const Selection& selection, int pages_read) {
  const int group = geometry_.group();
  double lowest = 1.0;
  for (int g = 0; g < group; ++g) {
    double rest;
    if (selection.estimated_remainder) {
      rest = item.unread[g] == 0.0 ? 0.0 : item.unread[g] / read_share(item, index, g);
    } else {
      rest = static_cast<double>(item.left) * std::exp(item.lse_min[g] - read_lse(index, g));
    }
    lowest = std::min(lowest, 1.0 / (1.0 + rest));
  }
  item.kept = static_cast<float>(lowest);
  if (lowest > selection.threshold || pages_read == item.budget) item.open = false;
}

}  // namespace hybrid_sparse
