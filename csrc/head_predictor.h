// Fluxion's head-property predictor and its selector: the first turns a head's features into its budget, the second a group's
// budgets into the granularity that moves the least data (Fluxion, sections 5.2 and 5.3). predictor/model.py and policy/budget.py
// do the same in Python.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kernel_table.h"

namespace hybrid_sparse {

// The features of a query head, in the order of predictor/features.py, which documents them.
#define HYBRID_SPARSE_FEATURES(X)                                                                                          \
  X(layer) X(head) X(host_tokens) X(retained_tokens)                                                                       \
  X(sink_key_norm) X(sink_value_norm) X(mean_key_norm) X(mean_value_norm)                                                  \
  X(key_norm_mean) X(key_norm_variance) X(key_norm_skewness) X(key_norm_kurtosis)                                          \
  X(value_norm_mean) X(value_norm_variance) X(value_norm_skewness) X(value_norm_kurtosis)                                  \
  X(similarity_mean)                                                                                                       \
  X(anchor_similarity_mean) X(anchor_similarity_variance) X(anchor_similarity_skewness) X(anchor_similarity_kurtosis)      \
  X(sink_lse) X(host_lse) X(local_lse) X(anchor_sink_lse) X(anchor_host_lse) X(anchor_local_lse)                           \
  X(sink_output_norm) X(local_output_norm)                                                                                 \
  X(anchor_sink_output_norm) X(anchor_host_output_norm) X(anchor_local_output_norm)                                        \
  X(query_norm) X(anchor_query_norm) X(query_cosine)                                                                       \
  X(anchor_budget_16) X(anchor_budget_32) X(anchor_budget_64) X(anchor_budget_128)                                         \
  X(largest_output_norm) X(anchor_largest_output_norm)

namespace feature {
#define HYBRID_SPARSE_FEATURE(name) name,
enum Column : int { HYBRID_SPARSE_FEATURES(HYBRID_SPARSE_FEATURE) count };
#undef HYBRID_SPARSE_FEATURE
}  // namespace feature

inline constexpr float kTinyNorm = 1e-30f;                             // prevents 0 / 0
inline constexpr std::array<int, 4> kGranularities = {16, 32, 64, 128};  // tokens of a logical block

struct HeadProperties {
  float base_budget;  // bgt_0, a share of the host segment
  float growth;       // k of eq. 1
  bool streaming;
};

class HeadPredictor {
 public:
  static constexpr std::array<int, 5> kSizes = {feature::count, 256, 256, 128, 3};
  static constexpr int kLayers = static_cast<int>(kSizes.size()) - 1;

  // weights[i] is [kSizes[i + 1]][kSizes[i]] and biases[i] is [kSizes[i + 1]], as torch keeps them; everything is copied.
  HeadPredictor(const float* feature_mean, const float* feature_std, const float* target_mean, const float* target_std,
                const std::vector<const float*>& weights, const std::vector<const float*>& biases);

  // features [rows][feature::count], not standardised -> out [rows].
  void predict(const Kernels& kernels, const float* features, int rows, HeadProperties* out) const;

 private:
  std::array<float, feature::count> feature_mean_;
  std::array<float, feature::count> feature_scale_;
  std::array<float, 2> target_mean_;
  std::array<float, 2> target_std_;
  std::array<std::vector<float>, kLayers> panels_;  // [outputs / 16][inputs][16] (DenseArgs)
  std::array<std::vector<float>, kLayers> biases_;  // padded with 0 to whole panels, as the weights are
};

// The query's positive elements, then its negative ones, 0 elsewhere (BlockScoreArgs).
inline void split_by_sign(const float* query, int head_dim, float* out) {
  for (int d = 0; d < head_dim; ++d) {
    out[d] = query[d] > 0.0f ? query[d] : 0.0f;
    out[head_dim + d] = query[d] < 0.0f ? query[d] : 0.0f;
  }
}

// Decides what a group reads of its host segment. blocks[h] receives the number of logical blocks that head h selects, 0 for a
// streaming head. Returns the tokens of a block, 0 if all heads stream. `only`: the granularity to use; 0 chooses the one with the
// least volume, and the coarser of two equal ones.
int select_budgets(const HeadProperties* heads, int group, int host_tokens, int only, int32_t* blocks);

}  // namespace hybrid_sparse
