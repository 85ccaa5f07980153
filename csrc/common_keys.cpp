// Common keys. What the keys of a stretch of pages have in common is subtracted before they are encoded, and its product with the
// query is added to their scores. Softmax over a sequence does not see this part, but it would take up bits of every dim. Some
// models have keys that are much longer than the differences between them (a bias of k_proj: Qwen2, Qwen2.5), and a page's mean
// keeps only four bits a dim.
//
// The common key is the mean key of the stretch's first page, which is full before any other page of the stretch. It is computed
// from the keys whenever it is needed. So nothing of it is kept but a byte in each summary, and pages that requests share have the
// same one. Rotary embeddings turn the long part of keys (slow dims, mostly) only a little over a stretch.
#include <algorithm>

#include "engine.h"

namespace hybrid_sparse {
namespace {

constexpr float kLeastRatio = 5.0f;  // of the mean's length to the deviation; only above it is the mean subtracted

}  // namespace

// The mean key of the first page of `page`'s stretch. Returns false if it is not long enough to matter, or these codes take none.
bool Engine::common_key(const PageTable& table, int page, float* common) const {
  if (!takes_common_keys()) return false;
  alignas(64) float squares[kPageTokens];
  const int head_dim = geometry_.layout.head_dim;
  kernels_.key_norms(table.page(page / kCommonKeyPages * kCommonKeyPages), head_dim, squares, common);
  double squared = 0.0;  // squared length of a key, on average
  for (const float square : squares) squared += square / kPageTokens;
  double length = 0.0;  // of the mean, squared too
  for (int d = 0; d < head_dim; ++d) {
    common[d] *= 1.0f / kPageTokens;
    length += double{common[d]} * common[d];
  }
  return length > double{kLeastRatio} * kLeastRatio * (squared - length);
}

// Adds the rows' products with the common keys that were subtracted to the scores of pages. Arguments as in ScoreArgs.
void Engine::add_common(const void* const* queries, int heads, int rows, const PageTable& table, int page_begin, int count,
                        float* const* scores) const {
  const Layout& layout = geometry_.layout;
  const int64_t less_common = CodeLayout(layout.head_dim, layout.code_bits).less_common;
  alignas(64) float common[kMaxHeadDim];
  for (int head = 0; head < heads; ++head) {
    PageTable of_head = table;
    of_head.base += head * layout.head_pages_bytes();
    of_head.summaries += head * layout.head_summaries_bytes();
    for (int first = page_begin; first < page_begin + count;) {
      const int stretch = first / kCommonKeyPages * kCommonKeyPages;
      const int end = std::min(page_begin + count, stretch + kCommonKeyPages);
      if (of_head.summary(stretch)[less_common]) {
        common_key(of_head, stretch, common);
        for (int r = 0; r < rows; ++r) {
          const float product = kernels_.query_product(queries[head * rows + r], common, layout.head_dim);
          float* of_row = scores[head * rows + r];
          for (int page = first; page < end; ++page) of_row[page - page_begin] += product;
        }
      }
      first = end;
    }
  }
}

}  // namespace hybrid_sparse
