// Scoring the summaries of candidate pages.
#include <algorithm>

#include "engine.h"

namespace hybrid_sparse {
namespace {

constexpr int kSerialQueryRows = 32;  // up to this many, handing out tasks costs more than making operands

}  // namespace

// Makes the scoring operands of every query row once; all tasks that score a request's pages share them.
void Engine::prepare_summary_queries(const LayerCall& call) {
  const int group = geometry_.group();
  const int rows = item_count_ * group;  // an item's rows are those of its KV head; items go head by head
  const int64_t row_bytes = kernels_.summary_query_bytes(geometry_.layout);
  if (static_cast<int64_t>(summary_queries_.size()) < rows * row_bytes) summary_queries_.resize(rows * row_bytes);
  query_pointers_.resize(rows);
  auto prepare = [&](int index) {
    const Item& item = items_[index];
    for (int g = 0; item.ranked && g < group; ++g) {
      const int row = index * group + g;
      char* operands = summary_queries_.data() + row * row_bytes;
      kernels_.prepare_summary_query(query_row(call, item.token, item.head * group + g), geometry_.layout, geometry_.scale,
                                     operands);
      query_pointers_[row] = operands;
    }
  };
  if (rows > kSerialQueryRows) return pool_.for_each(item_count_, prepare);
  for (int i = 0; i < item_count_; ++i) prepare(i);
}

// Adds the tasks that score the candidates' summaries, for all heads together. What a run of sharers has in common is scored once
// for all of its rows, the rest of each sharer's candidates by itself.
void Engine::add_score_spans() {
  score_spans_.clear();
  choose_scoring_runs();
  for (int end = static_cast<int>(sharers_.size()); end > 0; end = run_begin_[end]) {
    const int begin = run_begin_[end];
    const Item& first = items_[sharers_[begin].item];
    int shared_end = first.candidate_begin;
    if (end - begin > 1) {
      shared_end += run_pages_[end];
      add_score_spans(begin, end - begin, first.candidate_begin, shared_end);
    }
    for (int s = begin; s < end; ++s) {
      const Item& item = items_[sharers_[s].item];
      if (item.ranked) add_score_spans(s, 1, std::max(item.candidate_begin, shared_end), item.candidate_end);
    }
  }
}

void Engine::add_score_spans(int sharer, int sharers, int page_begin, int page_end) {
  const int pages = page_end - page_begin;
  if (pages <= 0) return;
  const int parts = pool_.size() == 1 ? 1 : std::clamp(pages / kMinScoreSpan, 1, kSpansPerThread * pool_.size());
  for (int p = 0; p < parts; ++p) {
    const int begin = score_cut(page_begin, pages, p, parts);
    score_spans_.push_back({sharer, sharers, begin, score_cut(page_begin, pages, p + 1, parts) - begin});
  }
}

// Where part `part` of some pages begins. Only whole tiles lie between two cuts.
int Engine::score_cut(int page_begin, int pages, int part, int parts) {
  constexpr int kCutPages = 8;
  const int cut = page_begin + static_cast<int>(int64_t{pages} * part / parts);
  return part == 0 || part == parts ? cut : cut / kCutPages * kCutPages;
}

void Engine::score_span(const LayerCall& call, const Batch& batch, const ScoreSpan& span) {
  const int group = geometry_.group();
  const int heads = geometry_.kv_heads;
  const Sharer* sharers = sharers_.data() + span.sharer;
  static thread_local std::vector<const void*> queries;  // [heads][sharers][group], as are the scores
  static thread_local std::vector<float*> scores;
  queries.clear();
  scores.clear();
  for (int head = 0; head < heads; ++head) {
    for (int s = 0; s < span.sharers; ++s) {
      const int index = sharers[s].item + head;
      Item& item = items_[index];
      const int first = span.page_begin - item.candidate_begin;
      if (first == 0 && !item.error_bounds.empty()) bound_errors(call, batch, item);
      for (int g = 0; g < group; ++g) {
        queries.push_back(query_pointers_[index * group + g]);
        scores.push_back(scores_.data() + item.score_offset + int64_t{g} * item.candidates() + first);
      }
    }
  }
  score_summaries(queries.data(), heads, span.sharers * group, page_table(call, batch, items_[sharers[0].item].request, 0),
                  span.page_begin, span.count, scores.data());
}

// Scores rows of some KV heads against the summaries of pages (see ScoreArgs), or against the coarse parts of split codes.
void Engine::score_summaries(const void* const* queries, int heads, int rows, const PageTable& table, int page_begin, int count,
                             float* const* scores) const {
  const Layout& layout = geometry_.layout;
  const int code_bits = layout.summary == Summary::split_codes ? 1 : layout.has_codes() ? layout.code_bits : 0;
  run_score(queries, heads, rows, table, code_bits, page_begin, count, scores);
}

void Engine::run_score(const void* const* queries, int heads, int rows, const PageTable& table, int code_bits, int page_begin,
                       int count, float* const* scores) const {
  const Layout& layout = geometry_.layout;
  static thread_local std::vector<float> scratch;
  if (code_bits > 0) scratch.resize(int64_t{heads} * (2 * rows + 1) * kScoreChunkPages);
  kernels_.score({queries, heads, rows, page_begin, count, table, layout.summary_elements(), layout.head_dim, code_bits,
                  geometry_.scale, scores, scratch.data()});
  if (takes_common_keys()) add_common(queries, heads, rows, table, page_begin, count, scores);
}

}  // namespace hybrid_sparse
