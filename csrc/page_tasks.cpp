// The page policies' decode rows if a device attends, in two calls. The first scores the candidates of all rows, which needs
// nothing from the device. The second orders them for each group, which may need to know what its retained set weighs.
#include <algorithm>
#include <cmath>

#include "engine.h"

namespace hybrid_sparse {

void Engine::score_candidates(const LayerCall& call, const Batch& batch, const Selection& selection) {
  collect_items(batch, selection);
  add_score_spans();
  if (score_spans_.empty()) return;
  pool_.session([&] {
    prepare_summary_queries(call);
    pool_.for_each(static_cast<int>(score_spans_.size()), [&](int s) { score_span(call, batch, score_spans_[s]); });
  });
}

bool Engine::order_candidates(const Selection& selection, int rows, const float* retained_lse) {
  if (item_count_ != rows * geometry_.kv_heads) return false;
  pool_.session([&] {
    pool_.for_each(item_count_, [&](int i) {
      Item& item = items_[i];
      const int64_t row = int64_t{item.token} * geometry_.q_heads + item.head * geometry_.group();
      if (item.ranked) order_item(item, selection, retained_lse + row);
    });
  });
  return true;
}

void Engine::order_item(Item& item, const Selection& selection, const float* retained_lse) {
  const bool weighs = geometry_.layout.has_codes();
  const float* grouped = group_item_scores(item, weighs ? retained_lse : nullptr);
  const bool estimates = selection.stops_by_estimates();
  for (int g = 0; estimates && g < geometry_.group(); ++g) {
    const double share = 1.0 / (1.0 + std::exp(static_cast<double>(item.estimated_lse[g]) - retained_lse[g]));
    item.kept = std::min(item.kept, std::isnan(share) ? 0.0f : static_cast<float>(share));
  }
  if (estimates && item.kept > selection.threshold) return;  // the retained set is enough
  item.rank.build(kernels_, grouped, item.candidates(), item.candidate_begin);
  item.rank.next(item.budget, item.order);
  if (estimates || (weighs && selection.attributed > 0.0f)) list_unread(item, selection.microbatch_pages);
  if (estimates) expect(item, selection, retained_lse);
}

// Sets how much of the order is enough if every page weighs as much as estimated.
void Engine::expect(Item& item, const Selection& selection, const float* retained_lse) {
  const int group = geometry_.group();
  const auto is_enough = [&](int microbatch) {
    for (int g = 0; g < group; ++g) {
      const double all = log_add(retained_lse[g], item.estimated_lse[g]);
      const double unread = std::exp(item.unread_after[int64_t{microbatch} * group + g] - all);
      if (!(1.0 - unread > selection.threshold)) return false;
    }
    return true;
  };
  const int ordered = static_cast<int>(item.order.size());
  int microbatch = 0;
  while ((microbatch + 1) * selection.microbatch_pages < ordered && !is_enough(microbatch)) ++microbatch;
  item.expected = std::min(ordered, (microbatch + 1) * selection.microbatch_pages);
}

void Engine::describe_orders(OrderSizes* sizes) const {
  for (int i = 0; i < item_count_; ++i) {
    const Item& item = items_[i];
    const int candidates = item.candidates();
    sizes[i] = {item.ranked ? static_cast<int32_t>(item.order.size()) : candidates, item.ranked ? candidates : 0, item.expected,
                static_cast<int32_t>(item.unread_after.size()), item.kept};
  }
}

void Engine::copy_orders(int64_t* pages, float* unread) const {
  for (int i = 0; i < item_count_; ++i) {
    const Item& item = items_[i];
    if (item.ranked)
      pages = std::copy(item.order.begin(), item.order.end(), pages);
    else
      for (int page = item.candidate_begin; page < item.candidate_end; ++page) *pages++ = page;
    unread = std::copy(item.unread_after.begin(), item.unread_after.end(), unread);
  }
}

}  // namespace hybrid_sparse
