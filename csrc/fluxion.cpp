// Fluxion's decode rows: the features of every head from the states of the retained set and the anchor, a budget for each head
// from the predictor, and a granularity for each group (Fluxion, sections 5.2 and 5.3). fluxion_blocks.cpp goes on from there.
#include <algorithm>
#include <cmath>

#include "engine.h"

namespace hybrid_sparse {
namespace {

constexpr int kMinPredictRows = 3;  // heads that a task predicts at least, since every task reads the whole network

double dot(const float* a, const float* b, int count) {
  double sum = 0.0;
  for (int i = 0; i < count; ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

float finite(float lse) { return std::isfinite(lse) ? lse : 0.0f; }

}  // namespace

void Engine::attend_fluxion(const LayerCall& call, const Batch& batch, const Selection& selection, FluxionLayer& layer) {
  collect_items(batch, selection);
  choose_anchors(call, batch, selection, layer);
  observe_anchors(call, batch, layer);
  attend_segments(call, batch);
  predict_budgets(layer);
  choose_blocks(call, batch);
  attend_selected(call, batch);
  keep_last_queries(call, batch, layer);
  if (item_count_ > 0) count_stats();
}

// Gives each sparse row its request's state, and lists the anchors to observe first. An anchor is the prompt's last query, or the
// row's own query if that one is unknown or too far behind.
void Engine::choose_anchors(const LayerCall& call, const Batch& batch, const Selection& selection, FluxionLayer& layer) {
  anchors_.clear();
  int rows = 0;
  for (int i = 0; i < item_count_; i += geometry_.kv_heads) {
    const Item& first = items_[i];
    const int r = first.request;
    if (!batch.decode[r] || batch.slots[r] < 0 || first.candidate_begin == first.candidate_end) continue;
    if (first.seq_len <= layer.rule().dense_tokens) continue;
    FluxionRequest& state = layer.request(batch.slots[r]);
    const int before = first.seq_len - 1;
    const bool follows = state.tokens == before && !state.query.empty();
    if (follows && !state.observed && selection.candidates(before).count() > 0) {
      anchors_.push_back({r, before, selection.candidates(before), &state});
    } else if (!follows || !state.observed || first.seq_len - state.anchor_tokens > kAnchorRows) {
      keep_query(query_row(call, first.token, 0), state);
      anchors_.push_back({r, first.seq_len, selection.candidates(first.seq_len), &state});
    }
    for (int head = 0; head < geometry_.kv_heads; ++head) {
      Item& item = items_[i + head];
      set_ranked(item);
      item.anchor = &state;
      item.first_row = rows;
      rows += geometry_.group();
    }
  }
  const auto grow = [](auto& buffer, int64_t count) {
    if (static_cast<int64_t>(buffer.size()) < count) buffer.resize(count);
  };
  grow(head_features_, int64_t{rows} * feature::count);
  grow(block_operands_, rows * block_operand_bytes());
  grow(head_properties_, rows);
  grow(head_blocks_, rows);
  predicted_rows_ = rows;
}

// Makes the row's queries, which are consecutive, the anchor to observe.
void Engine::keep_query(const char* row, FluxionRequest& state) const {
  const int64_t bytes = int64_t{geometry_.q_heads} * geometry_.layout.head_dim * element_bytes(geometry_.layout.dtype);
  state.query.assign(row, row + bytes);
  state.observed = false;
}

// Keeps the last query of rows that attended to everything: the next decode row makes it the anchor.
void Engine::keep_last_queries(const LayerCall& call, const Batch& batch, FluxionLayer& layer) {
  int i = 0;
  for (int r = 0; r < batch.requests; ++r) {
    const int end = batch.query_start[r + 1];
    const bool attended = end > batch.query_start[r] && batch.seq_lens[r] > 0;  // otherwise its token was only stored
    if (!attended || batch.slots[r] < 0) continue;
    while (i < item_count_ && items_[i].request < r) i += geometry_.kv_heads;
    const bool sparse = i < item_count_ && items_[i].request == r && items_[i].anchor;
    FluxionRequest& state = layer.request(batch.slots[r]);
    if (!sparse) keep_query(query_row(call, end - 1, 0), state);
    state.tokens = batch.seq_lens[r];
  }
}

// Attends the sink and the recent window, each into its own state, and then describes the heads by them.
void Engine::attend_segments(const LayerCall& call, const Batch& batch) {
  spans_.clear();
  for (int i = 0; i < item_count_; ++i) {
    Item& item = items_[i];
    if (!item.anchor) continue;
    const int sink = item.candidate_begin;
    item.pending = 2;
    spans_.push_back({i, item.retained.data(), 0, sink, i});
    spans_.push_back({i, item.retained.data() + sink, 0, static_cast<int>(item.retained.size()) - sink, item_count_ + i});
  }
  if (spans_.empty()) return;
  run_spans(call, batch, [&](int index) { describe_heads(call, items_[index], index); });
  share_largest_norms();
}

// Replaces each head's own norm, as describe_heads leaves it, with the largest one of the row.
void Engine::share_largest_norms() {
  for (int i = 0; i < item_count_; i += geometry_.kv_heads) {
    if (!items_[i].anchor) continue;
    float* features = head_features_.data() + int64_t{items_[i].first_row} * feature::count;
    float largest = 0.0f;
    for (int h = 0; h < geometry_.q_heads; ++h)
      largest = std::max(largest, features[h * feature::count + feature::largest_output_norm]);
    for (int h = 0; h < geometry_.q_heads; ++h) features[h * feature::count + feature::largest_output_norm] = largest;
  }
}

// Writes the features of the item's heads. The largest norm needs all heads of the row, so each head leaves its own norm in its
// place. Merges the item's states.
void Engine::describe_heads(const LayerCall& call, Item& item, int index) {
  const int group = geometry_.group();
  const int head_dim = geometry_.layout.head_dim;
  const FluxionRequest& anchor = *item.anchor;
  const int host_tokens = item.candidates() * kPageTokens;
  const float* sink = state(index);
  const float* local = state(item_count_ + index);
  static thread_local std::vector<float> query;
  query.resize(head_dim);
  for (int g = 0; g < group; ++g) {
    const int head = item.head * group + g;
    kernels_.to_float(query_row(call, item.token, head), head_dim, query.data());
    prepare_block_query(query_row(call, item.token, head), query.data(),
                        block_operands_.data() + (item.first_row + g) * block_operand_bytes());
    float* row = head_features_.data() + int64_t{item.first_row + g} * feature::count;
    std::copy_n(anchor.features.data() + int64_t{head} * feature::count, feature::count, row);
    const float norm = static_cast<float>(std::sqrt(dot(query.data(), query.data(), head_dim)));
    const float divisor = std::max(norm, kTinyNorm);
    const float* anchor_query = anchor.query_floats.data() + int64_t{head} * head_dim;
    const float* key_mean = anchor.key_mean.data() + int64_t{item.head} * head_dim;
    const double similarity = geometry_.scale * dot(query.data(), key_mean, head_dim) / divisor;
    row[feature::host_tokens] = static_cast<float>(host_tokens);
    row[feature::retained_tokens] = static_cast<float>(item.seq_len - host_tokens);
    row[feature::similarity_mean] = static_cast<float>(similarity);
    row[feature::sink_lse] = finite(lse(sink, g));
    row[feature::host_lse] = static_cast<float>(
        std::log(host_tokens) + norm * similarity + 0.5 * norm * norm * row[feature::anchor_similarity_variance]);
    row[feature::local_lse] = finite(lse(local, g));
    row[feature::sink_output_norm] = output_norm(sink, g);
    row[feature::local_output_norm] = output_norm(local, g);
    row[feature::query_norm] = norm;
    row[feature::query_cosine] = static_cast<float>(
        dot(query.data(), anchor_query, head_dim) / divisor / std::max(row[feature::anchor_query_norm], kTinyNorm));
  }
  merge_state(state(index), local, group);
  for (int g = 0; g < group; ++g)
    head_features_[int64_t{item.first_row + g} * feature::count + feature::largest_output_norm] = output_norm(state(index), g);
}

// The norm of a row's output; 0 if the row has read nothing.
float Engine::output_norm(const float* of_state, int row) const {
  const int group = geometry_.group();
  const int head_dim = geometry_.layout.head_dim;
  const float* out = of_state + 3 * group + int64_t{row} * head_dim;
  const float sum = of_state[group + row];
  return sum > 0.0f ? static_cast<float>(std::sqrt(dot(out, out, head_dim)) / sum) : 0.0f;
}

void Engine::predict_budgets(const FluxionLayer& layer) {
  if (predicted_rows_ == 0) return;
  const int tasks = std::clamp(predicted_rows_ / kMinPredictRows, 1, pool_.size());
  pool_.for_each(tasks, [&](int task) {
    const int begin = static_cast<int>(int64_t{predicted_rows_} * task / tasks);
    const int end = static_cast<int>(int64_t{predicted_rows_} * (task + 1) / tasks);
    layer.predictor().predict(kernels_, head_features_.data() + int64_t{begin} * feature::count, end - begin,
                              head_properties_.data() + begin);
  });
  for (int i = 0; i < item_count_; ++i) {
    Item& item = items_[i];
    if (!item.anchor) continue;
    item.granularity = select_budgets(head_properties_.data() + item.first_row, geometry_.group(),
                                      item.candidates() * kPageTokens, layer.rule().granularity,
                                      head_blocks_.data() + item.first_row);
    item.budget = 0;
  }
}

std::vector<float> Engine::last_features(int request, int kv_head) const {
  const Item* item = find_item(request, kv_head);
  if (!item || !item->anchor) return {};
  const float* rows = head_features_.data() + int64_t{item->first_row} * feature::count;
  return {rows, rows + geometry_.group() * feature::count};
}

std::vector<int32_t> Engine::last_budgets(int request, int kv_head) const {
  const Item* item = find_item(request, kv_head);
  if (!item || !item->anchor) return {};
  std::vector<int32_t> result{item->granularity};
  const auto first = head_blocks_.begin() + item->first_row;
  result.insert(result.end(), first, first + geometry_.group());
  return result;
}

}  // namespace hybrid_sparse
