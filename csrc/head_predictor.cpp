#include "head_predictor.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace hybrid_sparse {
namespace {

constexpr int kPanel = 16;
constexpr float kFeatureLimit = 10.0f;  // standard deviations; what lies beyond was never seen in training
constexpr double kSlackBlocks = 1e-6;   // budget * blocks may exceed a whole number by this much without costing a block

int panels(int outputs) { return (outputs + kPanel - 1) / kPanel; }

double budget_of(const HeadProperties& head, int granularity) {  // eq. 1
  return std::clamp(head.base_budget + static_cast<double>(head.growth) * std::log2(granularity), 0.0, 1.0);
}

}  // namespace

HeadPredictor::HeadPredictor(const float* feature_mean, const float* feature_std, const float* target_mean,
                             const float* target_std, const std::vector<const float*>& weights,
                             const std::vector<const float*>& biases) {
  std::copy_n(feature_mean, feature::count, feature_mean_.begin());
  std::transform(feature_std, feature_std + feature::count, feature_scale_.begin(), [](float std) { return 1.0f / std; });
  std::copy_n(target_mean, 2, target_mean_.begin());
  std::copy_n(target_std, 2, target_std_.begin());
  for (int i = 0; i < kLayers; ++i) {
    const int inputs = kSizes[i];
    const int outputs = kSizes[i + 1];
    panels_[i].assign(int64_t{panels(outputs)} * inputs * kPanel, 0.0f);
    biases_[i].assign(panels(outputs) * kPanel, 0.0f);
    std::copy_n(biases[i], outputs, biases_[i].begin());
    for (int o = 0; o < outputs; ++o)
      for (int k = 0; k < inputs; ++k)
        panels_[i][(int64_t{o / kPanel} * inputs + k) * kPanel + o % kPanel] = weights[i][int64_t{o} * inputs + k];
  }
}

void HeadPredictor::predict(const Kernels& kernels, const float* features, int rows, HeadProperties* out) const {
  constexpr int kWidest = *std::max_element(kSizes.begin(), kSizes.end());
  static thread_local std::vector<float> in;
  static thread_local std::vector<float> result;
  in.resize(std::max<size_t>(in.size(), int64_t{rows} * kWidest));
  result.resize(in.size());
  for (int r = 0; r < rows; ++r)
    for (int f = 0; f < feature::count; ++f)
      in[r * feature::count + f] = std::clamp((features[int64_t{r} * feature::count + f] - feature_mean_[f]) * feature_scale_[f],
                                              -kFeatureLimit, kFeatureLimit);
  int width = feature::count;
  for (int i = 0; i < kLayers; ++i) {
    const int outputs = panels(kSizes[i + 1]) * kPanel;
    kernels.dense_layer({in.data(), width, rows, kSizes[i], panels_[i].data(), biases_[i].data(), outputs, i + 1 < kLayers,
                         result.data()});
    std::swap(in, result);
    width = outputs;
  }
  for (int r = 0; r < rows; ++r) {
    const float* row = in.data() + int64_t{r} * width;
    out[r] = {row[0] * target_std_[0] + target_mean_[0], row[1] * target_std_[1] + target_mean_[1], row[2] >= 0.0f};
  }
}

int select_budgets(const HeadProperties* heads, int group, int host_tokens, int only, int32_t* blocks) {
  std::fill_n(blocks, group, 0);
  if (host_tokens == 0 || std::all_of(heads, heads + group, [](const HeadProperties& head) { return head.streaming; }))
    return 0;
  int chosen = only;
  double least = std::numeric_limits<double>::infinity();
  for (int i = static_cast<int>(kGranularities.size()) - 1; i >= 0 && only == 0; --i) {
    double budgets = 0.0;
    for (int h = 0; h < group; ++h) budgets += heads[h].streaming ? 0.0 : budget_of(heads[h], kGranularities[i]);
    const double volume = 2.0 * host_tokens / kGranularities[i] + 2.0 * host_tokens * budgets;  // eq. 3
    if (volume >= least) continue;
    least = volume;
    chosen = kGranularities[i];
  }
  const int all = (host_tokens + chosen - 1) / chosen;
  for (int h = 0; h < group; ++h) {
    if (heads[h].streaming) continue;
    const double wanted = std::ceil(budget_of(heads[h], chosen) * host_tokens / chosen - kSlackBlocks);
    blocks[h] = wanted >= all ? all : wanted > 1.0 ? static_cast<int>(wanted) : 1;  // 1 of what is not a number, too
  }
  return chosen;
}

}  // namespace hybrid_sparse
