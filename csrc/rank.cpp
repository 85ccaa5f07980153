#include "rank.h"

#include <algorithm>
#include <bit>
#include <numeric>

namespace hybrid_sparse {
namespace {

constexpr int kBuckets = 1024;
constexpr int kLeastBuckets = 64;
constexpr int kFewEntries = 12;  // up to this many are sorted by insertion

// The pages to read if scores that are not finite have spoilt the buckets.
void first_pages(int wanted, int first_page, int32_t* out) { std::iota(out, out + wanted, first_page); }

}  // namespace

// A histogram over score buckets finds the bucket of the last wanted page; only pages in that bucket are compared.
void select_best(const Kernels& kernels, const float* scores, int count, int wanted, int first_page, int32_t* out) {
  if (wanted <= 0) return;
  static thread_local std::vector<uint16_t> buckets;
  static thread_local std::vector<int32_t> indices;
  static thread_local std::vector<ScoredPage> pages;
  buckets.resize(count);
  indices.resize(count);
  const uint16_t* bucket_of = buckets.data();  // found once: thread_local names are looked up at each use
  int32_t* found = indices.data();
  std::vector<ScoredPage>& last_bucket = pages;
  last_bucket.clear();

  const ScoreBuckets edges = kernels.bucket_scores(scores, count, kBuckets, buckets.data());
  constexpr int kTables = 4;  // several, since neighbouring scores often fall into one bucket
  int32_t sizes[kTables][kBuckets] = {};
  int i = 0;
  for (; i + kTables <= count; i += kTables)
    for (int table = 0; table < kTables; ++table) ++sizes[table][bucket_of[i + table]];
  for (; i < count; ++i) ++sizes[0][bucket_of[i]];
  int bucket = 0;
  int above = 0;
  for (;; ++bucket) {
    int size = 0;
    for (int table = 0; table < kTables; ++table) size += sizes[table][bucket];
    if (above + size >= wanted) break;
    above += size;
  }
  // Everything down to the bucket's lower edge, and a little more because edges are rounded.
  const float below = (static_cast<float>(bucket) + 1.01f) * edges.width;
  const int near = kernels.take_near(scores, count, edges.highest, below, found);
  for (int n = 0; n < near; ++n)
    if (bucket_of[found[n]] == bucket) last_bucket.push_back({scores[found[n]], found[n]});
  if (static_cast<int>(last_bucket.size()) < wanted - above) return first_pages(wanted, first_page, out);
  const auto last = last_bucket.begin() + (wanted - above - 1);
  std::nth_element(last_bucket.begin(), last, last_bucket.end());
  const ScoredPage cut = *last;
  int taken = 0;
  for (int n = 0; n < near; ++n) {
    const ScoredPage here = {scores[found[n]], found[n]};
    const bool take = bucket_of[here.page] < bucket || (bucket_of[here.page] == bucket && !(cut < here));
    if (taken < wanted) out[taken] = first_page + here.page;  // overwritten unless taken
    taken += take;
  }
  if (taken < wanted) first_pages(wanted, first_page, out);
}

void RankedPages::build(const Kernels& kernels, const float* scores, int count, int first_page) {
  entries_.resize(count);
  bucket_of_.resize(count);
  const int buckets = std::clamp(static_cast<int>(std::bit_ceil(static_cast<unsigned>(count)) / 2), kLeastBuckets, kBuckets);
  bucket_end_.assign(buckets, 0);
  position_ = sorted_end_ = bucket_ = 0;
  kernels.bucket_scores(scores, count, buckets, bucket_of_.data());
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
  if (end - sorted_end_ > kFewEntries) {
    std::sort(entries_.begin() + sorted_end_, entries_.begin() + end);
  } else {
    for (int i = sorted_end_ + 1; i < end; ++i) {
      const ScoredPage entry = entries_[i];
      int place = i;
      for (; place > sorted_end_ && entry < entries_[place - 1]; --place) entries_[place] = entries_[place - 1];
      entries_[place] = entry;
    }
  }
  sorted_end_ = end;
}

int RankedPages::next(int count, std::vector<int32_t>& out) {
  const int end = std::min(position_ + count, static_cast<int>(entries_.size()));
  while (sorted_end_ < end) sort_bucket();
  const size_t first = out.size();
  out.resize(first + std::max(0, end - position_));
  for (int i = position_; i < end; ++i) out[first + i - position_] = entries_[i].page;
  const int taken = end - position_;
  position_ = end;
  return taken;
}

void RankedPages::rest(std::vector<int32_t>& out) const {
  for (size_t i = position_; i < entries_.size(); ++i) out.push_back(entries_[i].page);
}

}  // namespace hybrid_sparse
