// HGCA's re-evaluation after rows were appended: the attention weights of the latest rows decide anew which entries of the host
// side are salient, and the moving averages start again (HGCA, Algorithm 1, lines 19 to 22).
#include <algorithm>
#include <cstring>
#include <limits>

#include "engine.h"

namespace hybrid_sparse {
namespace {

constexpr int kPiecePages = 32;    // pages whose scores are kept at a time
constexpr int kMinPartPages = 64;  // pages of the host side that a task takes at least

}  // namespace

void Engine::reevaluate(const LayerCall& call, const Batch& batch, HgcaLayer& layer) {
  collect_reevaluations(call, batch, layer);
  if (reevaluations_.empty()) return;
  const int group = layer.group();
  std::vector<std::pair<int, int>> tasks;
  for (int i = 0; i < static_cast<int>(reevaluations_.size()); ++i)
    for (int part = 0; part < reevaluations_[i].parts; ++part) tasks.emplace_back(i, part);
  // First each row's log-sum-exp over the host side, then the weights computed with it.
  pool_.for_each(static_cast<int>(tasks.size()), [&](int i) {
    const Reevaluation& of = reevaluations_[tasks[i].first];
    float* lse = part_lse_.data() + of.lse_offset + int64_t{tasks[i].second} * group * of.rows;
    std::fill_n(lse, group * of.rows, -std::numeric_limits<float>::infinity());
    score_part(call, batch, of, tasks[i].second, [&](int g, int row, int, int count, const float* scores) {
      lse[g * of.rows + row] = kernels_.log_sum_exp(scores, count, lse[g * of.rows + row]);
    });
  });
  pool_.for_each(static_cast<int>(tasks.size()), [&](int i) {
    const Reevaluation& of = reevaluations_[tasks[i].first];
    static thread_local std::vector<float> lse;
    static thread_local std::vector<float> parts;
    lse.resize(group * of.rows);
    parts.resize(of.parts);
    for (int row = 0; row < group * of.rows; ++row) {
      for (int part = 0; part < of.parts; ++part)
        parts[part] = part_lse_[of.lse_offset + int64_t{part} * group * of.rows + row];
      lse[row] = kernels_.log_sum_exp(parts.data(), of.parts, -std::numeric_limits<float>::infinity());
    }
    const int64_t host_tokens = int64_t{of.pages.host_pages()} * kPageTokens;
    score_part(call, batch, of, tasks[i].second, [&](int g, int row, int first, int count, const float* scores) {
      float* weights = host_weights_.data() + of.weight_offset + g * host_tokens + first;
      if (row == 0) std::fill_n(weights, count, 0.0f);
      kernels_.blend_weights(scores, count, lse[g * of.rows + row], 1.0f, 1.0f / static_cast<float>(of.rows), weights);
    });
  });
  pool_.for_each(static_cast<int>(reevaluations_.size()), [&](int i) {
    choose_salient(call, batch, layer, reevaluations_[i]);
    begin_averages(call, batch, layer, reevaluations_[i]);
  });
  for (const Reevaluation& of : reevaluations_) layer.request(batch.slots[of.request]).tokens = of.seq_len;
}

// Collects the requests of the batch whose state is behind their last token. The state of sparse decode rows is not:
// `attend_hgca` has brought it up to date.
void Engine::collect_reevaluations(const LayerCall& call, const Batch& batch, HgcaLayer& layer) {
  reevaluations_.clear();
  int64_t lses = 0;
  int64_t weights = 0;
  auto item = hgca_items_.begin();  // the items are in the order of the requests
  const auto decodes = [&](int r) {
    while (item != hgca_items_.end() && item->request < r) ++item;
    return item != hgca_items_.end() && item->request == r && item->state;
  };
  for (int r = 0; r < batch.requests; ++r) {
    const int seq_len = batch.seq_lens[r];
    const int tokens = batch.query_start[r + 1] - batch.query_start[r];
    if (tokens == 0 || seq_len <= 0 || batch.slots[r] < 0 || decodes(r)) continue;
    HgcaRequest& request = layer.request(batch.slots[r], seq_len);
    keep_judges(call, batch, r, request);
    const HgcaPages pages(layer.rule(), seq_len);
    const int host_pages = pages.host_pages();
    const int parts = host_pages == 0 ? 0 : pool_.size() == 1 ? 1 : std::clamp(host_pages / kMinPartPages, 1, 4 * pool_.size());
    for (int head = 0; head < geometry_.kv_heads; ++head) {
      reevaluations_.push_back({r, head, request.judges.data(), request.judge_rows, seq_len, pages, &request.heads[head], parts,
                                lses, weights});
      lses += int64_t{parts} * layer.group() * request.judge_rows;
      weights += int64_t{layer.group()} * host_pages * kPageTokens;
    }
  }
  if (static_cast<int64_t>(part_lse_.size()) < lses) part_lse_.resize(lses);
  if (static_cast<int64_t>(host_weights_.size()) < weights) host_weights_.resize(weights);
}

// The rows that judge are the appended rows in the sequence's last page, even if they came in several calls. They are so few
// that each sees the whole host side, and a prefix cache never holds them, because it holds whole pages.
void Engine::keep_judges(const LayerCall& call, const Batch& batch, int request, HgcaRequest& state) {
  const Layout& layout = geometry_.layout;
  const int64_t row_bytes = int64_t{geometry_.q_heads} * layout.head_dim * element_bytes(layout.dtype);
  const int seq_len = batch.seq_lens[request];
  const int tokens = batch.query_start[request + 1] - batch.query_start[request];
  const int of_page = (seq_len - 1) % kPageTokens + 1;
  const bool goes_on = tokens < of_page && state.tokens == seq_len - tokens;
  const int kept = goes_on ? std::min(state.judge_rows, of_page - tokens) : 0;
  const int added = std::min(tokens, of_page);
  state.judges.resize(kPageTokens * row_bytes);
  for (int row = 0; row < added; ++row)
    std::memcpy(state.judges.data() + (kept + row) * row_bytes, query_row(call, batch.query_start[request + 1] - added + row, 0),
                row_bytes);
  state.judge_rows = kept + added;
}

// Scaled scores of a query head's judging rows against pages; row r's lie at scores + r * stride.
void Engine::score_tokens(const PageTable& table, const Reevaluation& of, int g, const int32_t* pages, int page_begin,
                          int count, float* scores, int64_t stride) {
  const Layout& layout = geometry_.layout;
  const int64_t head_bytes = int64_t{layout.head_dim} * element_bytes(layout.dtype);
  static thread_local std::vector<int32_t> visible;
  visible.assign(of.rows, 0);  // only the value side reads it
  const void* const* queries = operands(
      of.rows, [&](int r) { return of.judges + (r * geometry_.q_heads + of.head * geometry_.group() + g) * head_bytes; });
  kernels_.attend_keeping_scores({queries, visible.data(), of.rows, pages, page_begin, count, table, layout.head_dim,
                   geometry_.scale, nullptr, nullptr, nullptr, nullptr, scores, stride});
}

// Scores a part piece by piece and calls f(query head of the group, row, first token, tokens, their scores) for each. Tokens
// count from the beginning of the host side.
template <class F>
void Engine::score_part(const LayerCall& call, const Batch& batch, const Reevaluation& of, int part, const F& f) {
  const int group = geometry_.group();
  const int host_pages = of.pages.host_pages();
  const int begin = static_cast<int>(int64_t{host_pages} * part / of.parts);
  const int end = static_cast<int>(int64_t{host_pages} * (part + 1) / of.parts);
  const PageTable table = page_table(call, batch, of.request, of.head);
  static thread_local std::vector<float> scores;
  constexpr int64_t kStride = int64_t{kPiecePages} * kPageTokens;
  scores.resize(kPageTokens * kStride);
  for (int first = begin; first < end; first += kPiecePages) {
    const int count = std::min(kPiecePages, end - first);
    for (int g = 0; g < group; ++g) {
      score_tokens(table, of, g, nullptr, of.pages.sink_end + first, count, scores.data(), kStride);
      for (int row = 0; row < of.rows; ++row)
        f(g, row, first * kPageTokens, count * kPageTokens, scores.data() + row * kStride);
    }
  }
}

// Line 20: an entry is salient if some head of the group gives it more weight than beta / (entries of the host side).
void Engine::choose_salient(const LayerCall& call, const Batch& batch, const HgcaLayer& layer, const Reevaluation& of) {
  const int host_tokens = of.pages.host_pages() * kPageTokens;
  const float limit = layer.rule().beta / static_cast<float>(host_tokens);
  const float* weights = host_weights_.data() + of.weight_offset;
  static thread_local std::vector<int32_t> chosen;
  chosen.clear();
  for (int t = 0; t < host_tokens; ++t) {
    bool salient = false;
    for (int g = 0; g < layer.group(); ++g) salient = salient || weights[int64_t{g} * host_tokens + t] > limit;
    if (salient) chosen.push_back(of.pages.sink_end * kPageTokens + t);
  }
  const PageTable table = page_table(call, batch, of.request, of.head);
  of.state->packed.begin(static_cast<int>(chosen.size()), geometry_.layout.page_bytes());
  for (const int32_t position : chosen) pack(*of.state, table, position);
}

// The average of a recent entry starts as the mean of the weights that the judging rows give it within the dense window. A row
// gives no weight to later entries.
void Engine::begin_averages(const LayerCall& call, const Batch& batch, const HgcaLayer& layer, const Reevaluation& of) {
  static thread_local std::vector<int32_t> window;
  static thread_local std::vector<float> scores;
  window.clear();
  for (int p = 0; p < of.pages.sink_end; ++p) window.push_back(p);
  for (int p = of.pages.recent_begin; p < of.pages.pages; ++p) window.push_back(p);
  const int64_t stride = static_cast<int64_t>(window.size()) * kPageTokens;
  scores.resize(of.rows * stride);
  std::fill(of.state->averages.begin(), of.state->averages.end(), 0.0f);
  const PageTable table = page_table(call, batch, of.request, of.head);
  const int sink_tokens = of.pages.sink_end * kPageTokens;
  const int recent_begin = of.pages.recent_begin * kPageTokens;
  for (int g = 0; g < layer.group(); ++g) {
    score_tokens(table, of, g, window.data(), 0, static_cast<int>(window.size()), scores.data(), stride);
    for (int row = 0; row < of.rows; ++row) {
      const int seen = of.seq_len - of.rows + row + 1;  // tokens that the row sees, including the whole host side
      const float* of_row = scores.data() + row * stride;
      const float lse = kernels_.log_sum_exp(of_row, of.pages.window_tokens(seen), -std::numeric_limits<float>::infinity());
      for (int p = recent_begin; p < seen;) {
        const int to_wrap = static_cast<int>(layer.ring_tokens() - p % layer.ring_tokens());
        const int count = std::min(seen - p, to_wrap);
        kernels_.blend_weights(of_row + sink_tokens + p - recent_begin, count, lse, 1.0f,
                               1.0f / static_cast<float>(of.rows), layer.average(*of.state, g, p));
        p += count;
      }
    }
  }
}

}  // namespace hybrid_sparse
