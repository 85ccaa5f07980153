// Fluxion's logical blocks: their scores by the summaries of their pages, and the pages of each head's best blocks.
#include <algorithm>
#include <limits>

#include "engine.h"

namespace hybrid_sparse {
namespace {

constexpr int kMinBlockScorePages = 128;  // pages whose summaries a task scores at least

}  // namespace

// Bytes of a query row's operand for `score_blocks`.
int64_t Engine::block_operand_bytes() const {
  const Layout& layout = geometry_.layout;
  return layout.has_codes() ? kernels_.summary_query_bytes(layout)
                            : int64_t{2} * layout.head_dim * static_cast<int64_t>(sizeof(float));
}

// Takes the row both in the KV's dtype and as floats.
void Engine::prepare_block_query(const char* query, const float* floats, char* out) const {
  const Layout& layout = geometry_.layout;
  if (layout.has_codes())
    kernels_.prepare_summary_query(query, layout, geometry_.scale, out);
  else
    split_by_sign(floats, layout.head_dim, reinterpret_cast<float*>(out));
}

// Scores the logical blocks of some pages of one KV head; the last block may be shorter. With min/max a score is the unscaled
// bound over all pages of a block (Quest). With key codes it is the logarithm of what these pages are estimated to weigh together;
// split codes give that from both bits, or from the signs alone.
// queries: [rows] operands of prepare_block_query; row r's scores lie at scores + r * stride.
void Engine::score_blocks(const PageTable& table, const void* const* queries, int rows, CandidatePages pages, int block_pages,
                          bool signs_alone, float* scores, int64_t stride) const {
  const Layout& layout = geometry_.layout;
  const int blocks = (pages.count() + block_pages - 1) / block_pages;
  if (layout.summary == Summary::minmax) {
    kernels_.score_blocks({queries, rows, table, pages.begin, pages.end, block_pages, blocks, layout.head_dim, scores, stride});
    return;
  }
  static thread_local std::vector<float> weights;
  float* of_pages = scores;
  int64_t row_pages = stride;
  if (block_pages > 1) {
    row_pages = pages.count();
    weights.resize(rows * row_pages);
    of_pages = weights.data();
  }
  if (layout.summary == Summary::split_codes && !signs_alone)
    weigh_pages(table, queries, rows, pages, of_pages, row_pages);
  else
    score_summaries(queries, 1, rows, table, pages.begin, pages.count(), rows_at(of_pages, rows, row_pages));
  if (block_pages == 1) return;
  for (int r = 0; r < rows; ++r) {
    for (int b = 0; b < blocks; ++b) {
      const int first = b * block_pages;
      scores[r * stride + b] = kernels_.log_sum_exp(of_pages + r * row_pages + first, std::min(block_pages, pages.count() - first),
                                                    -std::numeric_limits<float>::infinity());
    }
  }
}

// Ranks the logical blocks for every head that selects some.
void Engine::choose_blocks(const LayerCall& call, const Batch& batch) {
  spans_.clear();
  int64_t scores = 0;
  for (int i = 0; i < item_count_; ++i) {
    Item& item = items_[i];
    if (!item.anchor || item.granularity == 0) continue;
    const int blocks = num_blocks(item);
    const int parts = pool_.size() == 1 ? 1
                                        : std::clamp(item.candidates() / kMinBlockScorePages, 1,
                                                     std::min(blocks, pool_.size()));
    item.score_offset = scores;
    item.pending = parts;
    scores += int64_t{geometry_.group()} * blocks;
    for (int p = 0; p < parts; ++p) {
      const int first = static_cast<int>(int64_t{blocks} * p / parts);
      const int last = static_cast<int>(int64_t{blocks} * (p + 1) / parts);
      spans_.push_back({i, nullptr, first, last - first, 0});
    }
  }
  if (spans_.empty()) return;
  if (static_cast<int64_t>(scores_.size()) < scores) scores_.resize(scores);
  pool_.for_each(static_cast<int>(spans_.size()), [&](int s) {
    Item& item = items_[spans_[s].item];
    score_block_span(call, batch, spans_[s]);
    std::atomic_ref<int> pending(item.pending);
    if (pending.fetch_sub(1, std::memory_order_acq_rel) == 1)
      take_blocks(item, page_table(call, batch, item.request, item.head));
  });
}

int Engine::num_blocks(const Item& item) const {
  const int block_pages = item.granularity / kPageTokens;
  return (item.candidates() + block_pages - 1) / block_pages;
}

// Only heads that select something have a row of scores; these rows are consecutive.
void Engine::score_block_span(const LayerCall& call, const Batch& batch, const Span& span) {
  const Item& item = items_[span.item];
  const int block_pages = item.granularity / kPageTokens;
  const std::vector<const void*>& queries = block_queries(item);
  const int first = item.candidate_begin + span.page_begin * block_pages;
  const int end = std::min(first + span.count * block_pages, item.candidate_end);
  score_blocks(page_table(call, batch, item.request, item.head), queries.data(), static_cast<int>(queries.size()), {first, end},
               block_pages, true, scores_.data() + item.score_offset + span.page_begin, num_blocks(item));
}

// The operands of the heads that select something; valid until the thread asks for others.
const std::vector<const void*>& Engine::block_queries(const Item& item) const {
  static thread_local std::vector<const void*> queries;
  queries.clear();
  for (int g = 0; g < geometry_.group(); ++g)
    if (head_blocks_[item.first_row + g] > 0)
      queries.push_back(block_operands_.data() + (item.first_row + g) * block_operand_bytes());
  return queries;
}

// Takes the union of the heads' best blocks, as pages in sequence order. With split codes only listed blocks can be among them.
void Engine::take_blocks(Item& item, const PageTable& table) {
  const int blocks = num_blocks(item);
  const int block_pages = item.granularity / kPageTokens;
  static thread_local std::vector<uint8_t> taken;
  static thread_local std::vector<int32_t> best;
  static thread_local std::vector<int32_t> listed;
  static thread_local std::vector<float> of_listed;
  taken.assign(blocks, 0);
  const bool split = geometry_.layout.summary == Summary::split_codes;
  if (split) {
    list_blocks(item, listed);
    score_listed(item, table, listed);
    of_listed.resize(listed.size());
  }
  const float* scores = scores_.data() + item.score_offset;
  for (int g = 0; g < geometry_.group(); ++g) {
    const int wanted = head_blocks_[item.first_row + g];
    if (wanted == 0) continue;
    best.resize(wanted);
    if (split) {
      for (size_t i = 0; i < listed.size(); ++i) of_listed[i] = scores[listed[i]];
      select_best(kernels_, of_listed.data(), static_cast<int>(listed.size()), wanted, 0, best.data());
      for (int32_t& block : best) block = listed[block];
    } else {
      select_best(kernels_, scores, blocks, wanted, 0, best.data());
    }
    for (const int32_t block : best) taken[block] = 1;
    scores += blocks;
  }
  if (attributed_ > 0.0f && geometry_.layout.has_codes()) estimate_unread_blocks(item, taken);
  for (int b = 0; b < blocks; ++b) {
    if (!taken[b]) continue;
    const int first = item.candidate_begin + b * block_pages;
    for (int p = first; p < std::min(first + block_pages, item.candidate_end); ++p) item.order.push_back(p);
  }
  item.budget = static_cast<int>(item.order.size());
}

// Estimates from the codes what the blocks left out weigh, for the heads that select some. The other heads are assumed to lack
// nothing.
void Engine::estimate_unread_blocks(Item& item, const std::vector<uint8_t>& taken) {
  const int group = geometry_.group();
  const int blocks = static_cast<int>(taken.size());
  const float nothing = -std::numeric_limits<float>::infinity();
  static thread_local std::vector<float> left;
  item.estimated_lse.assign(group, nothing);
  item.unread.assign(group, 0.0);
  const float* scores = scores_.data() + item.score_offset;
  for (int g = 0; g < group; ++g) {
    if (head_blocks_[item.first_row + g] == 0) continue;
    left.clear();
    for (int b = 0; b < blocks; ++b)
      if (!taken[b]) left.push_back(scores[b]);
    item.estimated_lse[g] = kernels_.log_sum_exp(left.data(), static_cast<int>(left.size()), nothing);
    item.unread[g] = 1.0;
    scores += blocks;
  }
}

}  // namespace hybrid_sparse
