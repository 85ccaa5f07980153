#include "rank.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace hybrid_sparse {
namespace {

constexpr int kBuckets = 1024;

}  // namespace

void RankedPages::build(const float* scores, int count, int first_page) {
  entries_.resize(count);
  bucket_of_.resize(count);
  bucket_end_.assign(kBuckets, 0);
  position_ = sorted_end_ = bucket_ = 0;
  if (count == 0) return;

  float low = std::numeric_limits<float>::infinity();
  float high = -low;
  for (int i = 0; i < count; ++i) {
    if (!(std::abs(scores[i]) < std::numeric_limits<float>::infinity())) continue;
    low = std::min(low, scores[i]);
    high = std::max(high, scores[i]);
  }
  const float width = high > low ? high - low : 1.0f;
  const float factor = (kBuckets - 2) / width;
  for (int i = 0; i < count; ++i) {
    const float score = scores[i];
    int bucket = kBuckets - 1;  // -inf and NaN
    if (score > high) {
      bucket = 0;  // +inf
    } else if (score >= low) {
      bucket = std::clamp(static_cast<int>((high - score) * factor), 0, kBuckets - 2);
    }
    bucket_of_[i] = static_cast<uint16_t>(bucket);
    ++bucket_end_[bucket];
  }
  int begin = 0;
  for (int32_t& slot : bucket_end_) {
    const int size = slot;
    slot = begin;
    begin += size;
  }
  for (int i = 0; i < count; ++i) {
    const float score = std::isnan(scores[i]) ? -std::numeric_limits<float>::infinity() : scores[i];
    entries_[bucket_end_[bucket_of_[i]]++] = {score, first_page + i};
  }
}

void RankedPages::sort_bucket() {
  const int end = bucket_end_[bucket_++];
  if (end - sorted_end_ > 1) {
    std::sort(entries_.begin() + sorted_end_, entries_.begin() + end, [](const Entry& a, const Entry& b) {
      return a.score != b.score ? a.score > b.score : a.page < b.page;
    });
  }
  sorted_end_ = end;
}

int RankedPages::next(int count, std::vector<int32_t>& out) {
  const int end = std::min(position_ + count, static_cast<int>(entries_.size()));
  while (sorted_end_ < end) sort_bucket();
  for (int i = position_; i < end; ++i) out.push_back(entries_[i].page);
  const int taken = end - position_;
  position_ = end;
  return taken;
}

}  // namespace hybrid_sparse
