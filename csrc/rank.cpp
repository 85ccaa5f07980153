#include "rank.h"

#include <algorithm>

namespace hybrid_sparse {
namespace {

constexpr int kBuckets = 1024;

}  // namespace

void RankedPages::build(const Kernels& kernels, const float* scores, int count, int first_page) {
  entries_.resize(count);
  bucket_of_.resize(count);
  bucket_end_.assign(kBuckets, 0);
  position_ = sorted_end_ = bucket_ = 0;
  kernels.bucket_scores(scores, count, kBuckets, bucket_of_.data());
  for (int i = 0; i < count; ++i) ++bucket_end_[bucket_of_[i]];
  int begin = 0;
  for (int32_t& slot : bucket_end_) {
    const int size = slot;
    slot = begin;
    begin += size;
  }
  for (int i = 0; i < count; ++i) entries_[bucket_end_[bucket_of_[i]]++] = {scores[i], first_page + i};
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
