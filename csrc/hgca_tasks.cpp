// The host's part of HGCA's decode rows if a device attends the dense window: the host judges what leaves the window, attends
// the packed entries meanwhile, and adds the window's weights to the averages (HGCA, Algorithms 1 and 2).
#include <algorithm>

#include "engine.h"

namespace hybrid_sparse {

bool Engine::begin_hgca_row(const RequestPages& of, HgcaLayer& layer, int slot, int seq_len) {
  HgcaRequest& request = layer.request(slot, seq_len);
  if (request.tokens != seq_len - 1) return false;
  if (HgcaPages(layer.rule(), seq_len - 1).recent_begin == HgcaPages(layer.rule(), seq_len).recent_begin) return true;
  for (int head = 0; head < geometry_.kv_heads; ++head) evict(page_table(of, head), layer, request.heads[head], seq_len);
  return true;
}

// Cuts the packed entries of all rows and heads into tasks together, because one head has few (section 3.3).
int64_t Engine::attend_packed(HgcaLayer& layer, const int32_t* slots, int rows, const char* query, float* out, float* lse_out) {
  struct Task {
    int group;  // index among the groups of all rows
    PageTable pages;
    int tokens;
    int begin;
    int count;
  };
  const Layout& layout = geometry_.layout;
  const int group = geometry_.group();
  const int groups = rows * geometry_.kv_heads;
  const int64_t query_bytes = int64_t{layout.head_dim} * element_bytes(layout.dtype);
  const auto packed = [&](int index) -> const PackedPages& {
    return layer.request(slots[index / geometry_.kv_heads]).heads[index % geometry_.kv_heads].packed;
  };
  int64_t pages = 0;
  for (int i = 0; i < groups; ++i) pages += packed(i).pages();
  const int64_t task_pages = std::max<int64_t>(kMinSpanPages, pages / (kSpansPerThread * pool_.size()));
  std::vector<Task> tasks;
  std::vector<int> first_task(groups + 1, 0);
  for (int i = 0; i < groups; ++i) {
    const int count = packed(i).pages();
    const int parts = static_cast<int>((count + task_pages - 1) / task_pages);
    for (int part = 0; part < parts; ++part) {
      const int begin = static_cast<int>(int64_t{count} * part / parts);
      const int end = static_cast<int>(int64_t{count} * (part + 1) / parts);
      tasks.push_back({i, packed(i).table(), packed(i).tokens(), begin, end - begin});
    }
    first_task[i + 1] = static_cast<int>(tasks.size());
  }
  reserve_states(static_cast<int>(tasks.size()) + 1);
  const int nothing = static_cast<int>(tasks.size());  // the state of a group without packed entries
  clear_state(state(nothing));
  pool_.session([&] {
    pool_.for_each(static_cast<int>(tasks.size()), [&](int i) {
      const Task& task = tasks[i];
      static thread_local std::vector<int32_t> visible;
      visible.assign(group, task.tokens);
      const void* const* queries =
          operands(group, [&](int g) { return query + (int64_t{task.group} * group + g) * query_bytes; });
      float* target = state(i);
      kernels_.attend({queries, visible.data(), group, nullptr, task.begin, task.count, task.pages, layout.head_dim,
                       geometry_.scale, target, target + group, target + 3 * group, nullptr});
    });
  });
  for (int i = 0; i < groups; ++i) {
    const bool any = first_task[i] < first_task[i + 1];
    float* whole = state(any ? first_task[i] : nothing);
    for (int t = first_task[i] + 1; t < first_task[i + 1]; ++t) merge_state(whole, state(t), group);
    normalise_state(whole, out + int64_t{i} * group * layout.head_dim, lse_out + int64_t{i} * group);
  }
  return pages;
}

void Engine::end_hgca_row(HgcaLayer& layer, int slot, int seq_len, const float* scores, int64_t stride, const float* lse) {
  HgcaRequest& request = layer.request(slot);
  const int group = geometry_.group();
  for (int head = 0; head < geometry_.q_heads; ++head)
    average_weights(layer, request.heads[head / group], head % group, seq_len, scores + head * stride, lse[head]);
  request.attended(seq_len);
}

void Engine::reevaluate_rows(const LayerCall& call, const Batch& batch, HgcaLayer& layer) {
  hgca_items_.clear();  // no row of the batch decodes
  pool_.session([&] { reevaluate(call, batch, layer); });
}

}  // namespace hybrid_sparse
