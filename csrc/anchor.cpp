// Observing an anchor: everything that Fluxion's features take from one query and from the whole host segment, including the
// least budgets (predictor/features.py, observe_anchor, and predictor/labels.py do the same in Python).
#include <algorithm>
#include <cmath>

#include "engine.h"

namespace hybrid_sparse {
namespace {

// The states of an anchor's heads at one KV head: one for each segment, one for sink and local together, one for all three.
enum AnchorState : int { kSink, kHost, kLocal, kKept, kAll, kAnchorStates };

// Writes the population mean, variance, skewness and kurtosis of a sample to four consecutive columns.
void put_moments(const std::vector<float>& sample, float* out) {
  const double count = static_cast<double>(sample.size());
  double sums[4] = {};
  for (const float x : sample) sums[0] += x;
  const double mean = sums[0] / count;
  for (const float x : sample) sums[1] += (x - mean) * (x - mean);
  const double deviation = std::max(std::sqrt(sums[1] / count), static_cast<double>(kTinyNorm));
  const double factor = 1.0 / deviation;
  for (const float x : sample) {
    const double standard = (x - mean) * factor;
    const double cube = standard * standard * standard;
    sums[2] += cube;
    sums[3] += cube * standard;
  }
  out[0] = static_cast<float>(mean);
  for (int i = 1; i < 4; ++i) out[i] = static_cast<float>(sums[i] / count);
}

float norm(const std::vector<double>& vector) {
  double squares = 0.0;
  for (const double x : vector) squares += x * x;
  return static_cast<float>(std::sqrt(squares));
}

// The number of pages in the fewest best blocks that bring a head's output within the tolerance.
// parts: [pages][1 + head_dim], weight and deviation of each page; kept: those of the retained set.
int least_pages(RankedPages& rank, const float* parts, const std::vector<float>& kept, int pages, int block_pages,
                float tolerance) {
  constexpr int kRankedAtOnce = 16;
  const size_t head_dim = kept.size() - 1;
  double weight = kept[0];
  std::vector<double> deviation(kept.begin() + 1, kept.end());
  const auto meets = [&] { return weight > 0.0 && norm(deviation) <= tolerance * weight; };
  if (meets()) return 0;
  int taken = 0;
  std::vector<int32_t> order;
  for (size_t next = 0; next < order.size() || rank.next(kRankedAtOnce, order) > 0; ++next) {
    const int first = order[next] * block_pages;
    const int end = std::min(first + block_pages, pages);
    for (int p = first; p < end; ++p) {
      const float* part = parts + p * static_cast<int64_t>(1 + head_dim);
      weight += part[0];
      for (size_t d = 0; d < head_dim; ++d) deviation[d] += part[1 + d];
    }
    taken += end - first;
    if (meets()) return taken;
  }
  return pages;
}

}  // namespace

// The prepared operands of the anchor's rows at one KV head; valid until the thread asks for others.
const void* const* Engine::anchor_queries(const Anchor& anchor, int head) const {
  const int group = geometry_.group();
  const int64_t row_bytes = int64_t{geometry_.layout.head_dim} * element_bytes(geometry_.layout.dtype);
  return operands(group, [&](int g) { return anchor.state->query.data() + (int64_t{head} * group + g) * row_bytes; });
}

void Engine::observe_anchors(const LayerCall& call, const Batch& batch, const FluxionLayer& layer) {
  if (anchors_.empty()) return;
  const int heads = static_cast<int>(anchors_.size()) * geometry_.kv_heads;
  for (Anchor& anchor : anchors_) {
    const int count = geometry_.q_heads * geometry_.layout.head_dim;
    anchor.state->features.assign(int64_t{geometry_.q_heads} * feature::count, 0.0f);
    anchor.state->key_mean.resize(geometry_.kv_heads * geometry_.layout.head_dim);
    anchor.state->query_floats.resize(count);
    kernels_.to_float(anchor.state->query.data(), count, anchor.state->query_floats.data());
    anchor.output_norms.assign(geometry_.q_heads, 0.0f);
  }
  reserve_states(heads * kAnchorStates);
  pool_.for_each(heads, [&](int i) { attend_anchor(call, batch, layer, i); });
  for (Anchor& anchor : anchors_) {
    anchor.tolerance = layer.rule().tau * *std::max_element(anchor.output_norms.begin(), anchor.output_norms.end());
    float* column = anchor.state->features.data() + feature::anchor_largest_output_norm;
    float largest = 0.0f;
    for (int h = 0; h < geometry_.q_heads; ++h) largest = std::max(largest, column[h * feature::count]);
    for (int h = 0; h < geometry_.q_heads; ++h) column[h * feature::count] = largest;
  }
  pool_.for_each(heads, [&](int i) { observe_host(call, batch, i); });
  for (const Anchor& anchor : anchors_) {
    anchor.state->observed = true;
    anchor.state->anchor_tokens = anchor.tokens;
    stats_.anchor_pages += int64_t{geometry_.kv_heads} * (anchor.pages() + anchor.candidates.end);
  }
}

// Attends with the anchor to each segment and writes the features that follow from it. Each head leaves its own norm over the
// retained set in anchor_largest_output_norm, where the largest belongs; observe_anchors puts it there.
void Engine::attend_anchor(const LayerCall& call, const Batch& batch, const FluxionLayer& layer, int index) {
  Anchor& anchor = anchors_[index / geometry_.kv_heads];
  const int head = index % geometry_.kv_heads;
  const int group = geometry_.group();
  const int head_dim = geometry_.layout.head_dim;
  const std::vector<int32_t> visible(group, anchor.tokens);
  const auto of = [&](AnchorState which) { return state(index * kAnchorStates + which); };
  const auto attend = [&](AnchorState which, int begin, int end) {
    kernels_.attend({anchor_queries(anchor, head), visible.data(), group, nullptr, begin, end - begin,
                     page_table(call, batch, anchor.request, head), head_dim, geometry_.scale, of(which), of(which) + group,
                     of(which) + 3 * group, nullptr});
  };
  attend(kSink, 0, anchor.candidates.begin);
  attend(kHost, anchor.candidates.begin, anchor.candidates.end);
  attend(kLocal, anchor.candidates.end, anchor.pages());
  std::copy_n(of(kSink), state_floats(group), of(kKept));
  merge_state(of(kKept), of(kLocal), group);
  std::copy_n(of(kKept), state_floats(group), of(kAll));
  merge_state(of(kAll), of(kHost), group);
  for (int g = 0; g < group; ++g) {
    const int q_head = head * group + g;
    float* row = anchor.state->features.data() + int64_t{q_head} * feature::count;
    const float* query = anchor.state->query_floats.data() + int64_t{q_head} * head_dim;
    const float sink_lse = lse(of(kSink), g);
    row[feature::layer] = static_cast<float>(layer.rule().layer);
    row[feature::head] = static_cast<float>(q_head);
    row[feature::anchor_sink_lse] = std::isfinite(sink_lse) ? sink_lse : 0.0f;  // 0 for an empty sink
    row[feature::anchor_host_lse] = lse(of(kHost), g);
    row[feature::anchor_local_lse] = lse(of(kLocal), g);
    row[feature::anchor_sink_output_norm] = output_norm(of(kSink), g);
    row[feature::anchor_host_output_norm] = output_norm(of(kHost), g);
    row[feature::anchor_local_output_norm] = output_norm(of(kLocal), g);
    row[feature::anchor_query_norm] = norm(std::vector<double>(query, query + head_dim));
    row[feature::anchor_largest_output_norm] = output_norm(of(kKept), g);
    anchor.output_norms[q_head] = output_norm(of(kAll), g);
  }
}

// Writes the moments of the host segment's keys, values and scores at one KV head, and the least budgets of its query heads.
void Engine::observe_host(const LayerCall& call, const Batch& batch, int index) {
  const Anchor& anchor = anchors_[index / geometry_.kv_heads];
  const int head = index % geometry_.kv_heads;
  const int group = geometry_.group();
  const int head_dim = geometry_.layout.head_dim;
  const int pages = anchor.candidates.count();
  const PageTable table = page_table(call, batch, anchor.request, head);
  const auto row = [&](int g) { return anchor.state->features.data() + (int64_t{head} * group + g) * feature::count; };
  const auto put_all = [&](int column, float value) {
    for (int g = 0; g < group; ++g) row(g)[column] = value;
  };

  std::vector<float> key_sum(head_dim), value_sum(head_dim), squares(2 * kPageTokens);
  const auto look_at = [&](int page) {
    kernels_.page_norms(table.page(page), head_dim, squares.data(), squares.data() + kPageTokens, key_sum.data(),
                        value_sum.data());
    for (float& square : squares) square = std::sqrt(square);
  };
  double sink_norms[2] = {};
  for (int p = 0; p < anchor.candidates.begin; ++p) {
    look_at(p);
    for (int i = 0; i < 2 * kPageTokens; ++i) sink_norms[i / kPageTokens] += squares[i];
  }
  const int sink_tokens = std::max(1, anchor.candidates.begin * kPageTokens);
  put_all(feature::sink_key_norm, static_cast<float>(sink_norms[0] / sink_tokens));
  put_all(feature::sink_value_norm, static_cast<float>(sink_norms[1] / sink_tokens));

  std::vector<double> mean_key(head_dim), mean_value(head_dim);
  std::vector<float> key_norms, value_norms;
  observe_budgets(call, batch, index, [&](int page) {
    look_at(page);
    key_norms.insert(key_norms.end(), squares.begin(), squares.begin() + kPageTokens);
    value_norms.insert(value_norms.end(), squares.begin() + kPageTokens, squares.end());
    for (int d = 0; d < head_dim; ++d) {
      mean_key[d] += key_sum[d] / (double{kPageTokens} * pages);
      mean_value[d] += value_sum[d] / (double{kPageTokens} * pages);
    }
  });
  std::copy(mean_key.begin(), mean_key.end(), anchor.state->key_mean.begin() + int64_t{head} * head_dim);
  put_all(feature::mean_key_norm, norm(mean_key));
  put_all(feature::mean_value_norm, norm(mean_value));
  put_moments(key_norms, row(0) + feature::key_norm_mean);
  put_moments(value_norms, row(0) + feature::value_norm_mean);
  for (int g = 1; g < group; ++g) std::copy_n(row(0) + feature::key_norm_mean, 8, row(g) + feature::key_norm_mean);
}

// Eq. 2 with weights w_i = exp(s_i - lse): the output over a set S is o + (sum over S of w_i (v_i - o)) / (sum over S of w_i).
// So both sums are gathered in the order of each head's own ranking until the deviation is within the tolerance. `look_at(page)`
// is called for each candidate just before it is attended, so that one read of the page serves both.
template <class LookAt>
void Engine::observe_budgets(const LayerCall& call, const Batch& batch, int index, const LookAt& look_at) {
  const Anchor& anchor = anchors_[index / geometry_.kv_heads];
  const int head = index % geometry_.kv_heads;
  const int group = geometry_.group();
  const int head_dim = geometry_.layout.head_dim;
  const int pages = anchor.candidates.count();
  const int64_t tokens = int64_t{pages} * kPageTokens;
  const PageTable table = page_table(call, batch, anchor.request, head);
  const float* all = state(index * kAnchorStates + kAll);
  const std::vector<int32_t> visible(group, anchor.tokens);
  const void* const* queries = anchor_queries(anchor, head);

  // Writes a state's weight and then its deviation [head_dim] from the head's output.
  const auto deviation = [&](const float* of_state, int g, float* weight_and_deviation) {
    const float factor = std::exp(of_state[g] - lse(all, g));
    const float weight = of_state[group + g] * factor;
    const float* out = of_state + 3 * group + int64_t{g} * head_dim;
    const float* full = all + 3 * group + int64_t{g} * head_dim;  // not normalised: times the sum of its weights
    const float share = weight / all[group + g];
    weight_and_deviation[0] = weight;
    for (int d = 0; d < head_dim; ++d) weight_and_deviation[1 + d] = out[d] * factor - share * full[d];
  };
  std::vector<float> scores(group * tokens), page_state(state_floats(group));
  std::vector<float> parts(int64_t{group} * pages * (1 + head_dim));  // [group][pages] weight and deviation
  const auto part = [&](int g, int p) { return parts.data() + (int64_t{g} * pages + p) * (1 + head_dim); };
  for (int p = 0; p < pages; ++p) {
    look_at(anchor.candidates.begin + p);
    kernels_.attend_keeping_scores({queries, visible.data(), group, nullptr, anchor.candidates.begin + p, 1, table, head_dim,
                                    geometry_.scale, page_state.data(), page_state.data() + group,
                                    page_state.data() + 3 * group, nullptr, scores.data() + int64_t{p} * kPageTokens, tokens});
    for (int g = 0; g < group; ++g) deviation(page_state.data(), g, part(g, p));
  }

  std::vector<char> operands(group * block_operand_bytes());
  std::vector<const void*> operand_rows(group);
  std::vector<float> block_scores, kept(1 + head_dim);
  for (int g = 0; g < group; ++g) {
    float* features = anchor.state->features.data() + (int64_t{head} * group + g) * feature::count;
    const float divisor = std::max(features[feature::anchor_query_norm], kTinyNorm);
    std::vector<float> similarity(scores.begin() + g * tokens, scores.begin() + (g + 1) * tokens);
    for (float& z : similarity) z /= divisor;
    put_moments(similarity, features + feature::anchor_similarity_mean);
    char* row = operands.data() + g * block_operand_bytes();
    const int64_t element = (int64_t{head} * group + g) * head_dim;
    prepare_block_query(anchor.state->query.data() + element * element_bytes(geometry_.layout.dtype),
                        anchor.state->query_floats.data() + element, row);
    operand_rows[g] = row;
  }
  for (size_t i = 0; i < kGranularities.size(); ++i) {
    const int block_pages = kGranularities[i] / kPageTokens;
    const int blocks = (pages + block_pages - 1) / block_pages;
    block_scores.resize(int64_t{group} * blocks);
    score_blocks(table, operand_rows.data(), group, anchor.candidates, block_pages, false, block_scores.data(), blocks);
    for (int g = 0; g < group; ++g) {
      deviation(state(index * kAnchorStates + kKept), g, kept.data());
      RankedPages rank;
      rank.build(kernels_, block_scores.data() + int64_t{g} * blocks, blocks, 0);
      const int needed = least_pages(rank, part(g, 0), kept, pages, block_pages, anchor.tolerance);
      anchor.state->features[(int64_t{head} * group + g) * feature::count + feature::anchor_budget_16 + static_cast<int>(i)] =
          static_cast<float>(needed) / static_cast<float>(pages);
    }
  }
}

}  // namespace hybrid_sparse
