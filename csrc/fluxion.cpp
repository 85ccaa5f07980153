// Fluxion's decode rows: features of every head from the retained set's states and the anchor, a budget for each from the
// predictor, a granularity for each group, and its heads' best logical blocks (Fluxion, sections 5.2 and 5.3).
#include <algorithm>
#include <cmath>

#include "engine.h"

namespace hybrid_sparse {
namespace {

constexpr int kMinPredictRows = 3;        // heads that one task predicts at least: all of them read the whole network
constexpr int kMinBlockScorePages = 128;  // pages whose summaries a task scores at least

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

// Gives each sparse row the request's state, and lists those whose anchor is to be observed first: the prompt's last query, or,
// where that is unknown or lies too far behind, the row's own.
void Engine::choose_anchors(const LayerCall& call, const Batch& batch, const Selection& selection, FluxionLayer& layer) {
  anchors_.clear();
  int rows = 0;
  for (int i = 0; i < item_count_; i += geometry_.kv_heads) {
    const Item& first = items_[i];
    const int r = first.request;
    if (!batch.decode[r] || batch.slots[r] < 0 || first.candidate_begin == first.candidate_end) continue;
    FluxionRequest& state = layer.request(batch.slots[r]);
    const int before = first.seq_len - 1;
    const bool follows = state.tokens == before && !state.query.empty();
    if (follows && !state.observed && selection.candidates(before).count() > 0) {
      anchors_.push_back({r, before, selection.candidates(before), &state});
    } else if (!follows || !state.observed || first.seq_len - state.anchor_tokens > kAnchorRows) {
      keep_query(call, first.token, state);
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
  grow(bound_operands_, int64_t{rows} * 2 * geometry_.layout.head_dim);
  grow(head_properties_, rows);
  grow(head_blocks_, rows);
  predicted_rows_ = rows;
}

// The row's queries become the anchor that is to be observed.
void Engine::keep_query(const LayerCall& call, int token, FluxionRequest& state) const {
  const int64_t bytes = int64_t{geometry_.q_heads} * geometry_.layout.head_dim * element_bytes(geometry_.layout.dtype);
  const char* row = query_row(call, token, 0);
  state.query.assign(row, row + bytes);
  state.observed = false;
}

// Rows that attended to everything leave their last query: a decode row that follows makes it the anchor.
void Engine::keep_last_queries(const LayerCall& call, const Batch& batch, FluxionLayer& layer) {
  int i = 0;
  for (int r = 0; r < batch.requests; ++r) {
    const int end = batch.query_start[r + 1];
    if (end == batch.query_start[r] || batch.slots[r] < 0) continue;
    while (i < item_count_ && items_[i].request < r) i += geometry_.kv_heads;
    const bool sparse = i < item_count_ && items_[i].request == r && items_[i].anchor;
    FluxionRequest& state = layer.request(batch.slots[r]);
    if (!sparse) keep_query(call, end - 1, state);
    state.tokens = batch.seq_lens[r];
  }
}

// The sink and the recent window, each with a state of its own; then what they say of the heads.
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
  for (int i = 0; i < item_count_; i += geometry_.kv_heads) {
    if (!items_[i].anchor) continue;
    float* features = head_features_.data() + int64_t{items_[i].first_row} * feature::count;
    float largest = 0.0f;
    for (int h = 0; h < geometry_.q_heads; ++h)
      largest = std::max(largest, features[h * feature::count + feature::largest_output_norm]);
    for (int h = 0; h < geometry_.q_heads; ++h) features[h * feature::count + feature::largest_output_norm] = largest;
  }
}

// The features of the item's heads, but for the one that takes all heads: each leaves its own norm there. Merges the item's states.
void Engine::describe_heads(const LayerCall& call, Item& item, int index) {
  const int group = geometry_.group();
  const int head_dim = geometry_.layout.head_dim;
  const FluxionRequest& anchor = *item.anchor;
  const int host_tokens = (item.candidate_end - item.candidate_begin) * kPageTokens;
  const float* sink = state(index);
  const float* local = state(item_count_ + index);
  static thread_local std::vector<float> query;
  query.resize(head_dim);
  for (int g = 0; g < group; ++g) {
    const int head = item.head * group + g;
    kernels_.to_float(query_row(call, item.token, head), head_dim, query.data());
    float* operands = bound_operands_.data() + int64_t{item.first_row + g} * 2 * head_dim;
    split_by_sign(query.data(), head_dim, operands);
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

// Of a row's output; 0 where it has read nothing.
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
                                      (item.candidate_end - item.candidate_begin) * kPageTokens, layer.rule().granularity,
                                      head_blocks_.data() + item.first_row);
    item.budget = 0;
  }
}

// Ranks the logical blocks for every head that selects some.
void Engine::choose_blocks(const LayerCall& call, const Batch& batch) {
  spans_.clear();
  int64_t scores = 0;
  for (int i = 0; i < item_count_; ++i) {
    Item& item = items_[i];
    if (!item.anchor || item.granularity == 0) continue;
    const int blocks = num_blocks(item);
    const int parts = pool_.size() == 1 ? 1
                                        : std::clamp((item.candidate_end - item.candidate_begin) / kMinBlockScorePages, 1,
                                                     std::min(blocks, pool_.size()));
    item.score_offset = scores;
    item.pending = parts;
    scores += int64_t{geometry_.group()} * blocks;
    for (int p = 0; p < parts; ++p) {
      const int first = static_cast<int>(int64_t{blocks} * p / parts);
      const int last = static_cast<int>(int64_t{blocks} * (p + 1) / parts);
      spans_.push_back({i, nullptr, first, last - first, 0});
    }
  }
  if (spans_.empty()) return;
  if (static_cast<int64_t>(scores_.size()) < scores) scores_.resize(scores);
  pool_.for_each(static_cast<int>(spans_.size()), [&](int s) {
    Item& item = items_[spans_[s].item];
    score_block_span(call, batch, spans_[s]);
    std::atomic_ref<int> pending(item.pending);
    if (pending.fetch_sub(1, std::memory_order_acq_rel) == 1) take_blocks(item);
  });
}

int Engine::num_blocks(const Item& item) const {
  const int block_pages = item.granularity / kPageTokens;
  return (item.candidate_end - item.candidate_begin + block_pages - 1) / block_pages;
}

// The heads that select something have rows of scores, one after another; the others have none.
void Engine::score_block_span(const LayerCall& call, const Batch& batch, const Span& span) {
  const Item& item = items_[span.item];
  const int block_pages = item.granularity / kPageTokens;
  const int blocks = num_blocks(item);
  static thread_local std::vector<const float*> queries;
  queries.clear();
  for (int g = 0; g < geometry_.group(); ++g)
    if (head_blocks_[item.first_row + g] > 0)
      queries.push_back(bound_operands_.data() + int64_t{item.first_row + g} * 2 * geometry_.layout.head_dim);
  kernels_.score_blocks({queries.data(), static_cast<int>(queries.size()), page_table(call, batch, item.request, item.head),
                         item.candidate_begin + span.page_begin * block_pages, item.candidate_end, block_pages, span.count,
                         geometry_.layout.head_dim, scores_.data() + item.score_offset + span.page_begin, blocks});
}

// The union of the heads' best blocks, as pages in sequence order.
void Engine::take_blocks(Item& item) {
  const int blocks = num_blocks(item);
  const int block_pages = item.granularity / kPageTokens;
  static thread_local std::vector<uint8_t> taken;
  static thread_local std::vector<int32_t> best;
  taken.assign(blocks, 0);
  const float* scores = scores_.data() + item.score_offset;
  for (int g = 0; g < geometry_.group(); ++g) {
    const int wanted = head_blocks_[item.first_row + g];
    if (wanted == 0) continue;
    best.resize(wanted);
    select_best(kernels_, scores, blocks, wanted, 0, best.data());
    for (const int32_t block : best) taken[block] = 1;
    scores += blocks;
  }
  for (int b = 0; b < blocks; ++b) {
    if (!taken[b]) continue;
    const int first = item.candidate_begin + b * block_pages;
    for (int p = first; p < std::min(first + block_pages, item.candidate_end); ++p) item.order.push_back(p);
  }
  item.budget = static_cast<int>(item.order.size());
}

std::vector<float> Engine::last_features(int request, int kv_head) const {
  for (int i = 0; i < item_count_; ++i) {
    const Item& item = items_[i];
    if (item.request != request || item.head != kv_head || !item.anchor) continue;
    const float* rows = head_features_.data() + int64_t{item.first_row} * feature::count;
    return {rows, rows + geometry_.group() * feature::count};
  }
  return {};
}

std::vector<int32_t> Engine::last_budgets(int request, int kv_head) const {
  for (int i = 0; i < item_count_; ++i) {
    const Item& item = items_[i];
    if (item.request != request || item.head != kv_head || !item.anchor) continue;
    std::vector<int32_t> result{item.granularity};
    const auto first = head_blocks_.begin() + item.first_row;
    result.insert(result.end(), first, first + geometry_.group());
    return result;
  }
  return {};
}

}  // namespace hybrid_sparse
