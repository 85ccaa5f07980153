// The parts of a decode row, one call for each, for a runtime that decides in between because a device shares the work.
#include <algorithm>
#include <limits>

#include "engine.h"

namespace hybrid_sparse {

void Engine::score_pages(const RequestPages& of, const char* query, int page_begin, int count, float* scores) {
  const Layout& layout = geometry_.layout;
  const int64_t row_bytes = kernels_.summary_query_bytes(layout);
  const int64_t query_bytes = int64_t{layout.head_dim} * element_bytes(layout.dtype);
  if (static_cast<int64_t>(summary_queries_.size()) < geometry_.q_heads * row_bytes)
    summary_queries_.resize(geometry_.q_heads * row_bytes);
  query_pointers_.resize(geometry_.q_heads);
  for (int row = 0; row < geometry_.q_heads; ++row) {
    char* operands = summary_queries_.data() + row * row_bytes;
    kernels_.prepare_summary_query(query + row * query_bytes, layout, geometry_.scale, operands);
    query_pointers_[row] = operands;
  }
  const int parts = std::clamp(count / kMinScoreSpan, 1, kSpansPerThread * pool_.size());
  pool_.session([&] {
    pool_.for_each(parts, [&](int part) {
      const int first = score_cut(page_begin, count, part, parts) - page_begin;
      const int last = score_cut(page_begin, count, part + 1, parts) - page_begin;
      const int group = geometry_.group();
      if (layout.summary != Summary::split_codes) {
        score_summaries(query_pointers_.data(), geometry_.kv_heads, group, page_table(of, 0), page_begin + first, last - first,
                        rows_at(scores + first, geometry_.q_heads, count));
        return;
      }
      for (int head = 0; head < geometry_.kv_heads; ++head)
        weigh_pages(page_table(of, head), query_pointers_.data() + head * group, group, {page_begin + first, page_begin + last},
                    scores + int64_t{head} * group * count + first, count);
    });
  });
}

void Engine::attend_pages(const RequestPages& of, const char* query, int head, const int32_t* pages, int count,
                          int seq_len, float* out, float* lse_out, float* lightest_lse, float* token_scores) {
  const Layout& layout = geometry_.layout;
  const int group = geometry_.group();
  const int64_t query_bytes = int64_t{layout.head_dim} * element_bytes(layout.dtype);
  const std::vector<int32_t> visible(group, seq_len);
  const void* const* queries = operands(group, [&](int g) { return query + g * query_bytes; });
  const int parts = std::clamp(count / kMinSpanPages, 1, kSpansPerThread * pool_.size());
  reserve_states(parts);
  pool_.session([&] {
    pool_.for_each(parts, [&](int part) {
      const int first = static_cast<int>(int64_t{count} * part / parts);
      const int last = static_cast<int>(int64_t{count} * (part + 1) / parts);
      float* target = state(part);
      AttendArgs args{queries, visible.data(), group, pages + first, 0, last - first, page_table(of, head),
                      layout.head_dim, geometry_.scale, target, target + group, target + 3 * group, target + 2 * group};
      if (!token_scores) return kernels_.attend(args);
      args.token_scores = token_scores + int64_t{first} * kPageTokens;
      args.token_scores_stride = int64_t{count} * kPageTokens;
      kernels_.attend_keeping_scores(args);
    });
  });
  float* whole = state(0);
  for (int part = 1; part < parts; ++part) {
    merge_state(whole, state(part), group);
    for (int g = 0; g < group; ++g) whole[2 * group + g] = std::min(whole[2 * group + g], state(part)[2 * group + g]);
  }
  normalise_state(whole, out, lse_out);
  std::copy_n(whole + 2 * group, group, lightest_lse);
}

void Engine::normalise_state(const float* of_state, float* out, float* lse_out) const {
  const int group = geometry_.group();
  const int head_dim = geometry_.layout.head_dim;
  for (int g = 0; g < group; ++g) {
    const float sum = of_state[group + g];
    lse_out[g] = sum > 0.0f ? lse(of_state, g) : -std::numeric_limits<float>::infinity();
    const float factor = sum > 0.0f ? 1.0f / sum : 0.0f;
    const float* row = of_state + 3 * group + int64_t{g} * head_dim;
    for (int d = 0; d < head_dim; ++d) out[int64_t{g} * head_dim + d] = row[d] * factor;
  }
}

}  // namespace hybrid_sparse
