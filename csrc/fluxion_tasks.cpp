// Fluxion's decode rows if a device attends: takes the states of their segments, and says what each group reads.
#include <algorithm>
#include <limits>

#include "engine.h"

namespace hybrid_sparse {

void Engine::choose_fluxion_pages(const LayerCall& call, const Batch& batch, const Selection& selection, FluxionLayer& layer,
                                  const SegmentStates& segments) {
  collect_items(batch, selection);
  if (item_count_ == 0) return;
  pool_.session([&] {
    choose_anchors(call, batch, selection, layer);
    observe_anchors(call, batch, layer);
    take_segments(call, segments);
    predict_budgets(layer);
    choose_blocks(call, batch);
    keep_last_queries(call, batch, layer);
  });
  count_stats();
}

void Engine::keep_fluxion_query(FluxionLayer& layer, int slot, const char* query, int tokens) {
  FluxionRequest& request = layer.request(slot);
  keep_query(query, request);
  request.tokens = tokens;
}

// Takes the place of attend_segments.
void Engine::take_segments(const LayerCall& call, const SegmentStates& segments) {
  const int group = geometry_.group();
  const int head_dim = geometry_.layout.head_dim;
  const auto take = [&](const float* out, const float* lse, const Item& item, float* target) {
    const int64_t row = int64_t{item.token} * geometry_.q_heads + item.head * group;
    std::copy_n(lse + row, group, target);
    for (int g = 0; g < group; ++g) target[group + g] = target[g] == -std::numeric_limits<float>::infinity() ? 0.0f : 1.0f;
    std::copy_n(out + row * head_dim, int64_t{group} * head_dim, target + 3 * group);
  };
  reserve_states(2 * item_count_);
  pool_.for_each(item_count_, [&](int i) {
    Item& item = items_[i];
    if (!item.anchor) return;
    take(segments.sink_out, segments.sink_lse, item, state(i));
    take(segments.local_out, segments.local_lse, item, state(item_count_ + i));
    describe_heads(call, item, i);
  });
  share_largest_norms();
}

std::vector<float> Engine::last_unread(int request, int kv_head) const {
  const Item* item = find_item(request, kv_head);
  return item && item->anchor && !item->unread.empty() ? item->estimated_lse : std::vector<float>();
}

}  // namespace hybrid_sparse
