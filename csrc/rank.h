// Candidate pages by score: the best few of them, or all in descending order, sorted only as far as asked for.
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
    const bool nan = score != score;  // NaN ranks after all numbers, so that there is an order even if a model has gone astray
    const bool other_nan = other.score != other.score;
    return nan != other_nan ? other_nan : page < other.page;
  }
};

// Writes the best `wanted` pages in ascending page order to out[0, wanted); 0 <= wanted <= count. scores[i] belongs to page
// first_page + i. If scores are equal, the lower page is better. If scores are not finite because a model has overflowed, it
// writes arbitrary pages.
void select_best(const Kernels& kernels, const float* scores, int count, int wanted, int first_page, int32_t* out);

// Counting sort into score buckets; a bucket is sorted when it is reached. Reading the best k of n pages costs O(n + k log k)
// with a small constant, whereas a full sort of 8192 pages would take half a millisecond.
class RankedPages {
 public:
  // scores[i] belongs to page first_page + i. Equal scores rank by page number; scores that are not finite get some rank.
  void build(const Kernels& kernels, const float* scores, int count, int first_page);
  // Appends the next `count` pages in rank order to `out`, fewer at the end. Returns how many.
  int next(int count, std::vector<int32_t>& out);
  // Appends the pages that are still to come to `out`, in any order.
  void rest(std::vector<int32_t>& out) const;

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
