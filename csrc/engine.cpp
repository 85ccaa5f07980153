#include "engine.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

namespace hybrid_sparse {
namespace {

constexpr int kExactRows = 96;         // query rows that share one pass over the keys: 16 register tiles of 6
constexpr int kMinExactSplitPages = 64;  // keys of an exact row block are split over threads no finer than this
constexpr int kSerialAppendRows = 64;  // up to this many (token, head) rows, handing out tasks costs more than writing

}  // namespace

int Selection::budget(int candidates) const {
  if (candidates <= 0) return 0;
  // A share that is a whole number of pages must not round up past it: 0.07 * 100 is 7.000000000000001.
  const int share = std::max(1, static_cast<int>(std::ceil(budget_ratio * candidates - 1e-9)));
  const int limit = max_pages > 0 ? max_pages : candidates;
  return std::min({share, limit, candidates});
}

CandidatePages Selection::candidates(int seq_len) const {
  const int begin = sink_tokens / kPageTokens;
  const int end = std::max(0, seq_len - window_tokens) / kPageTokens;
  return end < begin ? CandidatePages{0, 0} : CandidatePages{begin, end};
}

Engine::Engine(const Geometry& geometry, const Isa& isa, ThreadPool& pool)
    : geometry_(geometry), isa_(isa), kernels_(isa.by_dtype[static_cast<int>(geometry.layout.dtype)]), pool_(pool) {}

void Engine::forward(const LayerCall& call, const Batch& batch, const Selection& selection, HgcaLayer* hgca,
                     FluxionLayer* fluxion) {
  pool_.session([&] {
    if (call.key) {
      append(call, batch);
      summarize_filled(call, batch);
    }
    attend_exact(call, batch);
    if (hgca) {
      attend_hgca(call, batch, *hgca);
      reevaluate(call, batch, *hgca);
    } else if (fluxion) {
      attend_fluxion(call, batch, selection, *fluxion);
    } else {
      attend_decode(call, batch, selection);
    }
  });
}

PageTable Engine::page_table(const LayerCall& call, const Batch& batch, int request, int head) const {
  return page_table({call.kv, call.block_stride, batch.block_table + request * batch.block_table_stride}, head);
}

PageTable Engine::page_table(const RequestPages& of, int head) const {
  const Layout& layout = geometry_.layout;
  return {of.kv + head * layout.head_pages_bytes(),
          of.kv + geometry_.kv_heads * layout.head_pages_bytes() + head * layout.head_summaries_bytes(),
          of.block_table,
          of.block_stride,
          layout.page_bytes(),
          layout.coarse_bytes(),
          layout.pages_per_block(),
          of.kv + geometry_.kv_heads * (layout.head_pages_bytes() + layout.head_summaries_bytes()) + head * layout.head_fine_bytes(),
          layout.fine_bytes()};
}

const char* Engine::query_row(const LayerCall& call, int token, int q_head) const {
  const int64_t element = token * call.query_stride + int64_t{q_head} * geometry_.layout.head_dim;
  return call.query + element * element_bytes(geometry_.layout.dtype);
}

// Writes the batch's keys and values where slot_mapping says, a page at a time.
void Engine::append(const LayerCall& call, const Batch& batch) {
  const Layout& layout = geometry_.layout;
  const int tokens = batch.query_start[batch.requests];
  const int bytes = element_bytes(layout.dtype);
  const auto write = [&](int head, int begin, int end) {
    for (int t = begin; t < end;) {
      const int64_t slot = batch.slot_mapping[t];
      if (slot < 0) {
        ++t;
        continue;
      }
      const int offset = static_cast<int>(slot % kPageTokens);
      int count = 1;
      while (t + count < end && offset + count < kPageTokens && batch.slot_mapping[t + count] == slot + count) ++count;
      char* block = call.kv + slot / layout.block_tokens * call.block_stride;
      const int page = static_cast<int>(slot % layout.block_tokens / kPageTokens);
      char* target = block + head * layout.head_pages_bytes() + page * layout.page_bytes();
      const int64_t column = int64_t{head} * layout.head_dim;
      kernels_.write_page(target, offset, count, layout.head_dim, call.key + (t * call.key_stride + column) * bytes,
                          call.key_stride, call.value + (t * call.value_stride + column) * bytes, call.value_stride);
      t += count;
    }
  };
  if (tokens * geometry_.kv_heads <= kSerialAppendRows) {
    for (int head = 0; head < geometry_.kv_heads; ++head) write(head, 0, tokens);
    return;
  }
  // A task must not share a page with another: cut where a token starts a page or does not follow its predecessor.
  constexpr int kTokensPerTask = 256;
  std::vector<int> cuts{0};
  for (int t = 1; t < tokens; ++t) {
    const int64_t slot = batch.slot_mapping[t];
    const bool fresh = slot < 0 || slot % kPageTokens == 0 || batch.slot_mapping[t - 1] != slot - 1;
    if (fresh && t - cuts.back() >= kTokensPerTask) cuts.push_back(t);
  }
  cuts.push_back(tokens);
  const int chunks = static_cast<int>(cuts.size()) - 1;
  pool_.for_each(chunks * geometry_.kv_heads,
                 [&](int i) { write(i / chunks, cuts[i % chunks], cuts[i % chunks + 1]); });
}

// Prefill: every row attends to all tokens up to its own.
void Engine::attend_exact(const LayerCall& call, const Batch& batch) {
  row_blocks_.clear();
  const int group = geometry_.group();
  const int tokens_per_block = std::max(1, kExactRows / group);
  for (int r = 0; r < batch.requests; ++r) {
    const int begin = batch.query_start[r];
    const int tokens = batch.query_start[r + 1] - begin;
    if (tokens <= 1) continue;  // single rows are decode rows, dense ones if need be
    const int first_position = batch.seq_lens[r] - tokens;
    for (int t = 0; t < tokens; t += tokens_per_block) {
      const int count = std::min(tokens_per_block, tokens - t);
      const int page_begin = geometry_.first_seen(first_position + t + 1) / kPageTokens;
      const int page_end = (first_position + t + count + kPageTokens - 1) / kPageTokens;
      for (int head = 0; head < geometry_.kv_heads; ++head)
        row_blocks_.push_back({r, head, begin + t, count, first_position + t, page_begin, page_end, 0, 1});
    }
  }
  if (row_blocks_.empty()) return;
  // Longest first, so that the last task to finish is a short one.
  std::sort(row_blocks_.begin(), row_blocks_.end(),
            [](const RowBlock& a, const RowBlock& b) { return a.pages() * a.tokens > b.pages() * b.tokens; });

  int states = 0;
  if (pool_.size() > 1 && static_cast<int>(row_blocks_.size()) < 4 * pool_.size()) {
    const int wanted = (4 * pool_.size() + static_cast<int>(row_blocks_.size()) - 1) / static_cast<int>(row_blocks_.size());
    for (RowBlock& block : row_blocks_) {
      block.splits = std::clamp(block.pages() / kMinExactSplitPages, 1, wanted);
      block.first_state = states;
      if (block.splits > 1) states += block.splits;
    }
  }
  const int64_t state_size = state_floats(kExactRows + group);
  if (static_cast<int64_t>(row_states_.size()) < states * state_size) row_states_.resize(states * state_size);

  std::vector<std::pair<int, int>> tasks;
  for (int b = 0; b < static_cast<int>(row_blocks_.size()); ++b)
    for (int s = 0; s < row_blocks_[b].splits; ++s) tasks.emplace_back(b, s);
  pool_.for_each(static_cast<int>(tasks.size()),
                 [&](int i) { run_row_block(call, batch, row_blocks_[tasks[i].first], tasks[i].second); });
  if (states == 0) return;
  pool_.for_each(static_cast<int>(row_blocks_.size()), [&](int i) {
    if (row_blocks_[i].splits > 1) run_row_block(call, batch, row_blocks_[i], -1);
  });
}

// One split of a row block; split -1 merges the splits and stores the rows.
void Engine::run_row_block(const LayerCall& call, const Batch& batch, const RowBlock& block, int split) {
  const Layout& layout = geometry_.layout;
  const int group = geometry_.group();
  const int rows = block.tokens * group;
  const int64_t state_size = state_floats(kExactRows + group);
  static thread_local std::vector<float> own_state;
  float* target;
  if (block.splits == 1) {
    own_state.resize(std::max<int64_t>(own_state.size(), state_size));
    target = own_state.data();
  } else {
    target = row_states_.data() + (block.first_state + std::max(split, 0)) * state_size;
  }
  if (split >= 0) {
    static thread_local std::vector<int32_t> visible;
    static thread_local std::vector<int32_t> hidden;
    visible.resize(rows);
    hidden.resize(rows);
    for (int row = 0; row < rows; ++row) {
      visible[row] = block.first_position + row / group + 1;
      hidden[row] = geometry_.first_seen(visible[row]);
    }
    const void* const* queries = operands(rows, [&](int row) {
      return query_row(call, block.first_token + row / group, block.head * group + row % group);
    });
    const int begin = block.page_begin + static_cast<int>(int64_t{block.pages()} * split / block.splits);
    const int end = block.page_begin + static_cast<int>(int64_t{block.pages()} * (split + 1) / block.splits);
    AttendArgs args{queries, visible.data(), rows, nullptr, begin, end - begin,
                    page_table(call, batch, block.request, block.head), layout.head_dim, geometry_.scale, target,
                    target + rows, target + 3 * rows, nullptr};
    if (geometry_.sliding_window) args.hidden = hidden.data();
    kernels_.attend(args);
    if (block.splits > 1) return;
  } else {
    for (int s = 1; s < block.splits; ++s) merge_state(target, target + s * state_size, rows);
  }
  add_sinks(call, target, rows, block.head);
  for (int t = 0; t < block.tokens; ++t) {
    for (int g = 0; g < group; ++g) {
      const int row = t * group + g;
      const int64_t element = (block.first_token + t) * call.out_stride + int64_t{block.head * group + g} * layout.head_dim;
      const float sum = target[rows + row];
      kernels_.store_row(call.out + element * element_bytes(layout.dtype), target + 3 * rows + int64_t{row} * layout.head_dim,
                         sum > 0.0f ? 1.0f / sum : 0.0f, layout.head_dim);
    }
  }
}

// Adds the learned sinks of a KV head's query heads: each is one more token, with that score and no value.
void Engine::add_sinks(const LayerCall& call, float* of_state, int rows, int head) const {
  if (!call.sinks) return;
  const int group = geometry_.group();
  const int head_dim = geometry_.layout.head_dim;
  for (int r = 0; r < rows; ++r) {
    const float sink = call.sinks[head * group + r % group];
    const float high = std::max(of_state[r], sink);
    const float keep = std::exp(of_state[r] - high);
    of_state[r] = high;
    of_state[rows + r] = of_state[rows + r] * keep + std::exp(sink - high);
    float* out = of_state + 3 * rows + int64_t{r} * head_dim;
    for (int d = 0; d < head_dim; ++d) out[d] *= keep;
  }
}

// into <- state over the union of both states' keys (HGCA, section 3.3), unnormalised.
void Engine::merge_rows(float* into, int rows, const float* from, int from_rows, int first) const {
  const int head_dim = geometry_.layout.head_dim;
  for (int r = 0; r < rows; ++r) {
    const float a = into[r];
    const float b = from[first + r];
    const float high = std::max(a, b);
    if (high == -std::numeric_limits<float>::infinity()) continue;
    const float keep = std::exp(a - high);
    const float take = std::exp(b - high);
    into[r] = high;
    into[rows + r] = into[rows + r] * keep + from[from_rows + first + r] * take;
    float* out = into + 3 * rows + int64_t{r} * head_dim;
    const float* other = from + 3 * from_rows + int64_t{first + r} * head_dim;
    for (int d = 0; d < head_dim; ++d) out[d] = out[d] * keep + other[d] * take;
  }
}

}  // namespace hybrid_sparse
