#include "rank.h"

#include <algorithm>

namespace hybrid_sparse {
namespace {

constexpr int kBuckets = 1024;

}  // namespace

// A histogram over score buckets finds the bucket in which the last wanted page lies; only its pages are compared.
void select_best(const Kernels& kernels, const float* scores, int count, int wanted, int first_page, int32_t* out) {
  if (wanted <= 0) return;
  static thread_local std::vector<uint16_t> bucket_of;
  static thread_local std::vector<ScoredPage> last_bucket;
  bucket_of.resize(count);
  kernels.bucket_scores(scores, count, kBuckets, bucket_of.data());
  int32_t sizes[2][kBuckets] = {};  // two, since neighbours often fall into one bucket
  for (int i = 0; i + 1 < count; i += 2) {
    ++sizes[0][bucket_of[i]];
    ++sizes[1][bucket_of[i + 1]];
  }
  if (count % 2) ++sizes[0][bucket_of[count - 1]];
  int bucket = 0;
  int above = 0;
  for (; above + sizes[0][bucket] + sizes[1][bucket] < wanted; ++bucket) above += sizes[0][bucket] + sizes[1][bucket];
  last_bucket.clear();
  for (int i = 0; i < count; ++i)
    if (bucket_of[i] == bucket) last_bucket.push_back({scores[i], first_page + i});
  const auto last = last_bucket.begin() + (wanted - above - 1);
  std::nth_element(last_bucket.begin(), last, last_bucket.end());
  const ScoredPage cut = *last;
  int taken = 0;
  for (int i = 0; i < count; ++i) {
    const ScoredPage here = {scores[i], first_page + i};
    const bool take = bucket_of[i] < bucket || (bucket_of[i] == bucket && !(cut < here));
    if (taken < wanted) out[taken] = here.page;  // overwritten unless taken
    taken += take;
  }
}

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
    std::sort(entries_.begin() + sorted_end_, entries_.begin() + end);
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
