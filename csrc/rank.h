// Candidate pages by score: the best so many of them, or all in descending order, sorted only as far as asked for.
#pragma once

#include <cstdint>
#include <vector>

#include "kernel_table.h"

namespace hybrid_sparse {

struct ScoredPage {
  float score;
  int32_t page;
  bool operator<(const ScoredPage& other) const {  // ranks before
    if (score > other.score) return true;
    if (score < other.score) return false;
    const bool nan = score != score;  // after all numbers: an order at all, where a model has gone astray
    const bool other_nan = other.score != other.score;
    return nan != other_nan ? other_nan : page < other.page;
  }
};

// The best `wanted` pages, in ascending page order: scores[i] belongs to page first_page + i, and of equal scores the lower page
// is better. Writes to out[0, wanted); 0 <= wanted <= count. Where scores are not finite, since a model has overflowed, some
// pages.
void select_best(const Kernels& kernels, const float* scores, int count, int wanted, int first_page, int32_t* out);

// Counting sort into score buckets, each sorted when it is reached: reading the best k of n pages costs
// O(n + k log k) with a small constant, where a full sort of 8192 pages would take half a millisecond.
class RankedPages {
 public:
  // scores[i] belongs to page first_page + i. Equal scores rank by page number; those that are not finite rank somewhere.
  void build(const Kernels& kernels, const float* scores, int count, int first_page);
  // The next `count` pages in rank order, fewer at the end; appended to `out`. Returns how many.
  int next(int count, std::vector<int32_t>& out);

 private:
  void sort_bucket();

  std::vector<ScoredPage> entries_;
  std::vector<int32_t> bucket_end_;
  std::vector<uint16_t> bucket_of_;
  int position_ = 0;
  int sorted_end_ = 0;
  int bucket_ = 0;
};

}  // namespace hybrid_sparse
