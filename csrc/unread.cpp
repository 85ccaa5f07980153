// What the candidates that were not read weigh by their key codes, and what is made of it.
#include <algorithm>
#include <cmath>
#include <limits>

#include "engine.h"

namespace hybrid_sparse {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();  // the logarithm of no weight

// What subtracting leaves of an estimate is mostly rounding if it is little: a float32 logarithm below 64 is off by up to 4e-6,
// which is 5e-4 of this share. Below it the unread candidates are summed anew, page by page.
constexpr double kLeastDifference = 1.0 / 128;

}  // namespace

// The candidates that `order` leaves out, ascending. Valid until the thread's next call.
const std::vector<int32_t>& Engine::unread_pages(const Item& item) const {
  static thread_local std::vector<uint8_t> taken;
  static thread_local std::vector<int32_t> unread;
  const int candidates = item.candidates();
  taken.assign(candidates, 0);
  unread.resize(candidates);
  uint8_t* is_taken = taken.data();  // found once: thread_local names are looked up at each use
  int32_t* out = unread.data();
  for (const int32_t page : item.order) is_taken[page - item.candidate_begin] = 1;
  int count = 0;
  for (int i = 0; i < candidates; ++i) {
    out[count] = item.candidate_begin + i;  // overwritten if taken
    count += !is_taken[i];
  }
  unread.resize(count);
  return unread;
}

// Copies the scores of some candidates into `out`.
const float* Engine::gather_scores(const Item& item, int g, const int32_t* pages, size_t count, std::vector<float>& out) const {
  const int candidates = item.candidates();
  const float* scores = scores_.data() + item.score_offset + int64_t{g} * candidates - item.candidate_begin;
  if (out.size() < count) out.resize(count);
  float* to = out.data();
  for (size_t p = 0; p < count; ++p) to[p] = scores[pages[p]];
  return to;
}

// What some candidates are estimated to weigh together, in the unit of `estimated_lse`.
double Engine::estimate(const Item& item, int g, const int32_t* pages, size_t count) const {
  static thread_local std::vector<float> logs;
  static thread_local std::vector<float> weights;
  const float* gathered = gather_scores(item, g, pages, count, logs);
  weights.assign(count, 0.0f);  // of which blend_weights() keeps nothing, but what is not finite would stay
  float* out = weights.data();
  kernels_.blend_weights(gathered, static_cast<int>(count), item.estimated_lse[g], 0.0f, 1.0f, out);
  double sum = 0.0;
  for (size_t p = 0; p < count; ++p) sum += out[p];
  return sum;
}

// The logarithm of what some candidates are estimated to weigh together.
double Engine::log_weight(const Item& item, int g, const int32_t* pages, size_t count) const {
  static thread_local std::vector<float> logs;
  return kernels_.log_sum_exp(gather_scores(item, g, pages, count, logs), static_cast<int>(count), kNothing);
}

// Whether some head has too little left to tell by subtracting.
bool Engine::little_left(const Item& item) const {
  return *std::min_element(item.unread.begin(), item.unread.begin() + geometry_.group()) < kLeastDifference;
}

// Sums the estimates of the unread candidates, `pages`, anew for such heads. The unit of `unread` is then this sum; `read`
// [group], if given, has the same unit and follows it.
void Engine::weigh_unread(Item& item, const std::vector<int32_t>& pages, double* read) {
  for (int g = 0; g < geometry_.group(); ++g) {
    if (item.unread[g] >= kLeastDifference) continue;
    const double log_unread = log_weight(item, g, pages.data(), pages.size());
    item.unread[g] = log_unread == kNothing ? 0.0 : 1.0;
    if (log_unread == kNothing) continue;
    if (read) read[g] *= std::exp(std::min(kMostLogShare, item.estimated_lse[g] - log_unread));
    item.estimated_lse[g] = static_cast<float>(log_unread);
  }
}

// Estimates the share of the candidates left out, if the stopping rule has not.
void Engine::estimate_unread(Item& item) {
  item.unread.clear();
  for (int g = 0; g < geometry_.group(); ++g)
    item.unread.push_back(1.0 - estimate(item, g, item.order.data(), item.order.size()));
  if (little_left(item)) weigh_unread(item, unread_pages(item), nullptr);
}

// Estimates what is unread after each microbatch of the order, from the last one to the first.
void Engine::list_unread(Item& item, int microbatch_pages) {
  const int group = geometry_.group();
  const int ordered = static_cast<int>(item.order.size());
  const int microbatches = (ordered + microbatch_pages - 1) / microbatch_pages;
  const std::vector<int32_t>& never = unread_pages(item);
  item.unread_after.resize(int64_t{microbatches} * group);
  for (int g = 0; g < group; ++g) {
    double unread = log_weight(item, g, never.data(), never.size());
    for (int m = microbatches - 1; m >= 0; --m) {
      item.unread_after[int64_t{m} * group + g] = static_cast<float>(unread);
      const int first = m * microbatch_pages;
      unread = log_add(unread, log_weight(item, g, item.order.data() + first, std::min(microbatch_pages, ordered - first)));
    }
  }
}

// Gives part of the unread candidates' estimated weight to the candidates read. Let r, m and u be the weights of the retained
// set, of the candidates read and of the unread ones. The output becomes that of everything read, plus u / (r + m + u) times
// attributed * (mean of the candidates read - mean of everything read). This is the candidates' state times a factor.
void Engine::attribute_unread(Item& item, const float* retained, float* read) {
  const bool all = static_cast<int>(item.order.size()) == item.candidates();
  if (all || item.order.empty() || !geometry_.layout.has_codes()) return;
  if (item.unread.empty()) estimate_unread(item);
  const int group = geometry_.group();
  for (int g = 0; g < group; ++g) {
    if (read[group + g] <= 0.0f) continue;
    const double of_read = lse(read, g);
    const double r = std::exp(std::min(kMostLogShare, lse(retained, g) - of_read));  // in units of m
    const double u = item.unread[g] * std::exp(std::min(kMostLogShare, item.estimated_lse[g] - of_read));
    read[g] += static_cast<float>(std::log1p(attributed_ / (1.0 / u + (1.0 - attributed_) / (r + 1.0))));
  }
}

}  // namespace hybrid_sparse
