// Python passes only addresses and sizes: no torch headers here. The wrapper in
// vllm_hybrid_sparse/kernels/paged_attention/native.py checks every tensor before it passes its address. Of the contents of
// a batch it checks slots and lengths; the block ids in tables are trusted.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <random>

#include "engine.h"
#include "slot_table.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace hybrid_sparse;

namespace {

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// A call for rows whose keys and values are stored already; it has no output.
LayerCall stored_rows(uintptr_t kv, int64_t block_stride, uintptr_t query, int64_t query_stride) {
  return {at<char>(kv), block_stride, at<char>(query), query_stride, nullptr, 0, nullptr, 0, nullptr, 0};
}

// Bytes a second that all threads of the pool together read, from [address, address + bytes) once, in pieces of `piece`
// bytes that follow each other or come in random order.
double read_bandwidth(ThreadPool& pool, uintptr_t address, int64_t bytes, int64_t piece, bool shuffled) {
  const Kernels& kernels = find_isa("auto").by_dtype[static_cast<int>(DType::f32)];
  constexpr int64_t kTaskBytes = 1 << 20;
  constexpr int64_t kBytesAhead = 8192;  // how far ahead to fetch; farther is no faster
  std::vector<const char*> pieces;
  for (int64_t at_byte = 0; at_byte + piece <= bytes; at_byte += piece) pieces.push_back(at<char>(address) + at_byte);
  if (shuffled) std::shuffle(pieces.begin(), pieces.end(), std::mt19937_64(0));
  const size_t per_task = std::max<int64_t>(1, kTaskBytes / piece);
  const size_t ahead = std::max<int64_t>(1, kBytesAhead / piece);
  volatile float sink = 0.0f;
  const auto start = std::chrono::steady_clock::now();
  pool.session([&] {
    pool.for_each(static_cast<int>((pieces.size() + per_task - 1) / per_task), [&](int task) {
      const size_t end = std::min(pieces.size(), (task + 1) * per_task);
      for (size_t i = task * per_task; i < end; ++i)
        sink = kernels.stream(pieces[i], piece, i + ahead < pieces.size() ? pieces[i + ahead] : nullptr);
    });
  });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  return static_cast<double>(pieces.size() * piece) / seconds.count();
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // the process's runtime lives until the process ends
  m.doc() = "Native core of vllm_hybrid_sparse: paged sparse attention on the CPU.";
  m.attr("PAGE_TOKENS") = kPageTokens;

  nb::enum_<DType>(m, "DType")
      .value("bf16", DType::bf16)
      .value("f16", DType::f16)
      .value("f32", DType::f32)
      .value("e4m3", DType::e4m3);
  nb::enum_<Summary>(m, "Summary")
      .value("minmax", Summary::minmax)
      .value("cuboid_mean", Summary::cuboid_mean)
      .value("key_codes", Summary::key_codes)
      .value("none", Summary::none)
      .value("split_codes", Summary::split_codes);
  nb::enum_<ThreadPool::Helpers>(m, "Helpers")
      .value("own", ThreadPool::Helpers::own)
      .value("openmp", ThreadPool::Helpers::openmp);

  m.def("supported_isas", [] {
    std::vector<std::string> names;
    for (const Isa& isa : isas())
      if (isa.runs_here()) names.emplace_back(isa.name);
    return names;
  }, "Instruction sets that this machine runs, best first.");
  m.def("openmp_is_loaded", &ThreadPool::openmp_is_loaded);
  m.def("read_bandwidth", &read_bandwidth, "pool"_a, "address"_a, "bytes"_a, "piece"_a, "shuffled"_a = false,
        nb::call_guard<nb::gil_scoped_release>());

  nb::class_<Layout>(m, "Layout")
      .def(nb::new_([](DType dtype, int head_dim, int block_tokens, Summary summary, int code_bits) {
        return Layout{dtype, summary, head_dim, block_tokens, code_bits};
      }), "dtype"_a, "head_dim"_a, "block_tokens"_a, "summary"_a, "code_bits"_a)
      .def_prop_ro("pages_per_block", &Layout::pages_per_block)
      .def_prop_ro("page_bytes", &Layout::page_bytes)
      .def_prop_ro("summary_bytes", &Layout::summary_bytes)
      .def_prop_ro("head_block_bytes", &Layout::head_block_bytes);

  nb::class_<ThreadPool>(m, "ThreadPool")
      .def(nb::init<int, ThreadPool::Helpers, std::vector<int>>(), "num_threads"_a,
           "helpers"_a = ThreadPool::Helpers::own, "cpus"_a = std::vector<int>{})
      .def_prop_ro("size", &ThreadPool::size)
      .def_prop_ro("helpers", &ThreadPool::helpers);

  nb::class_<Batch>(m, "Batch")
      .def(nb::new_([](int requests, uintptr_t query_start, uintptr_t seq_lens, uintptr_t block_table,
                       int64_t block_table_stride, uintptr_t slot_mapping, uintptr_t decode, uintptr_t slots) {
        return Batch{requests, at<int32_t>(query_start), at<int32_t>(seq_lens), at<int32_t>(block_table),
                     block_table_stride, at<int64_t>(slot_mapping), at<uint8_t>(decode), at<int32_t>(slots)};
      }), "requests"_a, "query_start"_a, "seq_lens"_a, "block_table"_a, "block_table_stride"_a, "slot_mapping"_a,
           "decode"_a, "slots"_a = 0)
      .def_prop_ro("has_slots", [](const Batch& self) { return self.slots != nullptr; });

  nb::class_<HgcaLayer>(m, "HgcaLayer")
      .def("__init__", [](HgcaLayer* self, int group, int kv_heads, float beta, float alpha, int sink_tokens,
                          int window_tokens) {
        new (self) HgcaLayer(group, kv_heads, HgcaRule{beta, alpha, sink_tokens, window_tokens});
      }, nb::kw_only(), "group"_a, "kv_heads"_a, "beta"_a, "alpha"_a, "sink_tokens"_a, "window_tokens"_a)
      .def("release", &HgcaLayer::release, "slot"_a)
      .def_prop_ro("packed_bytes", &HgcaLayer::packed_bytes)
      .def("salient", &HgcaLayer::salient, "slot"_a, "kv_head"_a)
      .def("averages", &HgcaLayer::averages, "slot"_a, "kv_head"_a);

  m.def("features", [] {
#define HYBRID_SPARSE_NAME(name) #name,
    return std::vector<std::string>{HYBRID_SPARSE_FEATURES(HYBRID_SPARSE_NAME)};
#undef HYBRID_SPARSE_NAME
  }, "Names of the columns that HeadPredictor takes.");

  nb::class_<HeadPredictor>(m, "HeadPredictor")
      .def("__init__", [](HeadPredictor* self, uintptr_t feature_mean, uintptr_t feature_std, uintptr_t target_mean,
                          uintptr_t target_std, const std::vector<uintptr_t>& weights, const std::vector<uintptr_t>& biases) {
        const auto floats = [](const std::vector<uintptr_t>& addresses) {
          std::vector<const float*> result;
          for (const uintptr_t address : addresses) result.push_back(at<float>(address));
          return result;
        };
        new (self) HeadPredictor(at<float>(feature_mean), at<float>(feature_std), at<float>(target_mean),
                                 at<float>(target_std), floats(weights), floats(biases));
      }, nb::kw_only(), "feature_mean"_a, "feature_std"_a, "target_mean"_a, "target_std"_a, "weights"_a, "biases"_a);

  nb::class_<FluxionLayer>(m, "FluxionLayer")
      .def("__init__", [](FluxionLayer* self, const HeadPredictor& predictor, int layer, float tau, int granularity,
                          int dense_tokens) {
        new (self) FluxionLayer(predictor, FluxionRule{layer, tau, granularity, dense_tokens});
      }, nb::kw_only(), "predictor"_a, "layer"_a, "tau"_a, "granularity"_a, "dense_tokens"_a, nb::keep_alive<1, 2>())
      .def("release", &FluxionLayer::release, "slot"_a)
      .def("anchor", &FluxionLayer::anchor, "slot"_a)
      .def("anchor_tokens", &FluxionLayer::anchor_tokens, "slot"_a);

  nb::class_<Selection>(m, "Selection")
      .def(nb::new_([](bool ranked, double budget_ratio, int max_pages, double threshold, int microbatch_pages,
                       bool estimated_remainder, float attributed, int prefix_sharers, int sink_tokens, int window_tokens) {
        return Selection{ranked, budget_ratio, max_pages, threshold, microbatch_pages, estimated_remainder, attributed,
                         prefix_sharers, sink_tokens, window_tokens};
      }), nb::kw_only(), "ranked"_a, "budget_ratio"_a, "max_pages"_a, "threshold"_a, "microbatch_pages"_a,
           "estimated_remainder"_a, "attributed"_a, "prefix_sharers"_a, "sink_tokens"_a, "window_tokens"_a)
      .def_ro("ranked", &Selection::ranked)
      .def_ro("estimated_remainder", &Selection::estimated_remainder)
      .def("budget", &Selection::budget, "candidates"_a)
      .def("candidates", [](const Selection& self, int seq_len) { return self.candidates(seq_len).count(); }, "seq_len"_a);

  nb::class_<SlotTable> slot_table(m, "SlotTable");
  nb::enum_<SlotTable::Order>(slot_table, "Order")
      .value("lru", SlotTable::Order::lru)
      .value("fifo", SlotTable::Order::fifo)
      .value("cyclic", SlotTable::Order::cyclic);
  nb::class_<SlotTable::Refused>(slot_table, "Refused")
      .def_ro("part", &SlotTable::Refused::part)
      .def_ro("wanted", &SlotTable::Refused::wanted)
      .def_ro("pinned", &SlotTable::Refused::pinned);
  // All of these hold the GIL: they take microseconds, and whoever reads a count never sees a table that is being changed.
  slot_table
      .def(nb::init<int, int, SlotTable::Order, int>(), nb::kw_only(), "shares"_a, "every"_a, "order"_a, "layer_shift"_a)
      .def("take", [](SlotTable& self, uintptr_t pages, uintptr_t wanted, int parts, int width, uintptr_t slots,
                      uintptr_t fresh) {
        return self.take(at<int64_t>(pages), at<uint8_t>(wanted), parts, width, at<int32_t>(slots), at<uint8_t>(fresh));
      }, "pages"_a, "wanted"_a, "parts"_a, "width"_a, "slots"_a, "fresh"_a)
      .def("unpin", [](SlotTable& self, uintptr_t pages, int count) { self.unpin(at<int64_t>(pages), count); }, "pages"_a,
           "count"_a)
      .def("drop", [](SlotTable& self, uintptr_t pages, int count) { return self.drop(at<int64_t>(pages), count); },
           "pages"_a, "count"_a)
      .def("slots_of", [](const SlotTable& self, uintptr_t pages, int count, uintptr_t slots) {
        self.slots_of(at<int64_t>(pages), count, at<int32_t>(slots));
      }, "pages"_a, "count"_a, "slots"_a)
      .def("set_aside", [](SlotTable& self, uintptr_t firsts, int runs, int length, uintptr_t taken) {
        self.set_aside(at<int32_t>(firsts), runs, length, at<uint8_t>(taken));
      }, "firsts"_a, "runs"_a, "length"_a, "taken"_a)
      .def("give_back", [](SlotTable& self, uintptr_t firsts, int runs, int length) {
        self.give_back(at<int32_t>(firsts), runs, length);
      }, "firsts"_a, "runs"_a, "length"_a)
      .def("pages", &SlotTable::pages)
      .def("contradiction", &SlotTable::contradiction)
      .def_prop_ro("evictions", &SlotTable::evictions)
      .def_prop_ro("resident", &SlotTable::resident)
      .def_prop_ro("pinned", &SlotTable::pinned);

  nb::class_<Stats>(m, "Stats")
      .def_ro("calls", &Stats::calls)
      .def_ro("items", &Stats::items)
      .def_ro("pages_total", &Stats::pages_total)
      .def_ro("pages_candidate", &Stats::pages_candidate)
      .def_ro("pages_read", &Stats::pages_read)
      .def_ro("pages_shared", &Stats::pages_shared)
      .def_ro("pages_wasted", &Stats::pages_wasted)
      .def_ro("summaries_scored", &Stats::summaries_scored)
      .def_ro("summary_bytes", &Stats::summary_bytes)
      .def_ro("microbatches", &Stats::microbatches)
      .def_ro("judged", &Stats::judged)
      .def_ro("kept_mass", &Stats::kept_mass)
      .def_ro("stopped_early", &Stats::stopped_early)
      .def_ro("streaming", &Stats::streaming)
      .def_ro("anchor_pages", &Stats::anchor_pages);

  nb::class_<Engine>(m, "Engine")
      .def("__init__", [](Engine* self, const Layout& layout, int q_heads, int kv_heads, float scale,
                          int sliding_window, bool common_keys, const std::string& isa, ThreadPool& pool) {
        new (self) Engine(Geometry{layout, q_heads, kv_heads, scale, sliding_window, common_keys}, find_isa(isa), pool);
      }, "layout"_a, "q_heads"_a, "kv_heads"_a, "scale"_a, "sliding_window"_a, "common_keys"_a, "isa"_a, "pool"_a,
           nb::keep_alive<1, 9>())
      .def_prop_ro("isa", [](const Engine& self) { return std::string(self.isa().name); })
      .def("prefix_sharers", &Engine::prefix_sharers, "selection"_a)
      .def("forward", [](Engine& self, uintptr_t kv, int64_t block_stride, uintptr_t query, int64_t query_stride,
                         uintptr_t key, int64_t key_stride, uintptr_t value, int64_t value_stride, uintptr_t out,
                         int64_t out_stride, uintptr_t sinks, const Batch& batch, const Selection& selection,
                         HgcaLayer* hgca, FluxionLayer* fluxion) {
        self.forward({at<char>(kv), block_stride, at<char>(query), query_stride, at<char>(key), key_stride,
                      at<char>(value), value_stride, at<char>(out), out_stride, at<float>(sinks)}, batch, selection, hgca,
                     fluxion);
      }, "kv"_a, "block_stride"_a, "query"_a, "query_stride"_a, "key"_a, "key_stride"_a, "value"_a, "value_stride"_a,
           "out"_a, "out_stride"_a, "sinks"_a, "batch"_a, "selection"_a, "hgca"_a.none(), "fluxion"_a.none(),
           nb::call_guard<nb::gil_scoped_release>())
      .def("summarize", [](Engine& self, uintptr_t kv, int64_t block_stride, uintptr_t blocks, uintptr_t starts, int sequences) {
        self.summarize(at<char>(kv), block_stride, at<int32_t>(blocks), at<int32_t>(starts), sequences);
      }, "kv"_a, "block_stride"_a, "blocks"_a, "starts"_a, "sequences"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("score_pages", [](Engine& self, uintptr_t kv, int64_t block_stride, uintptr_t block_table, uintptr_t query,
                             int page_begin, int count, uintptr_t scores) {
        self.score_pages({at<char>(kv), block_stride, at<int32_t>(block_table)}, at<char>(query), page_begin, count,
                         at<float>(scores));
      }, "kv"_a, "block_stride"_a, "block_table"_a, "query"_a, "page_begin"_a, "count"_a, "scores"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("attend_pages", [](Engine& self, uintptr_t kv, int64_t block_stride, uintptr_t block_table, uintptr_t query,
                              int kv_head, uintptr_t pages, int count, int seq_len, uintptr_t out, uintptr_t lse,
                              uintptr_t lightest_lse, uintptr_t token_scores) {
        self.attend_pages({at<char>(kv), block_stride, at<int32_t>(block_table)}, at<char>(query), kv_head,
                          at<int32_t>(pages), count, seq_len, at<float>(out), at<float>(lse), at<float>(lightest_lse),
                          at<float>(token_scores));
      }, "kv"_a, "block_stride"_a, "block_table"_a, "query"_a, "kv_head"_a, "pages"_a, "count"_a, "seq_len"_a, "out"_a,
           "lse"_a, "lightest_lse"_a, "token_scores"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("score_candidates", [](Engine& self, uintptr_t kv, int64_t block_stride, uintptr_t query, int64_t query_stride,
                                  const Batch& batch, const Selection& selection) {
        self.score_candidates(stored_rows(kv, block_stride, query, query_stride), batch, selection);
      }, "kv"_a, "block_stride"_a, "query"_a, "query_stride"_a, "batch"_a, "selection"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("order_candidates", [](Engine& self, const Selection& selection, int rows, uintptr_t retained_lse) {
        return self.order_candidates(selection, rows, at<float>(retained_lse));
      }, "selection"_a, "rows"_a, "retained_lse"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("describe_orders", [](const Engine& self, uintptr_t sizes) {
        self.describe_orders(at<Engine::OrderSizes>(sizes));
      }, "sizes"_a)
      .def("copy_orders", [](const Engine& self, uintptr_t pages, uintptr_t unread) {
        self.copy_orders(at<int64_t>(pages), at<float>(unread));
      }, "pages"_a, "unread"_a)
      .def("begin_hgca_row", [](Engine& self, uintptr_t kv, int64_t block_stride, uintptr_t block_table, HgcaLayer& layer,
                                int slot, int seq_len) {
        return self.begin_hgca_row({at<char>(kv), block_stride, at<int32_t>(block_table)}, layer, slot, seq_len);
      }, "kv"_a, "block_stride"_a, "block_table"_a, "layer"_a, "slot"_a, "seq_len"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("attend_packed", [](Engine& self, HgcaLayer& layer, uintptr_t slots, int rows, uintptr_t query, uintptr_t out,
                               uintptr_t lse) {
        return self.attend_packed(layer, at<int32_t>(slots), rows, at<char>(query), at<float>(out), at<float>(lse));
      }, "layer"_a, "slots"_a, "rows"_a, "query"_a, "out"_a, "lse"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("end_hgca_row", [](Engine& self, HgcaLayer& layer, int slot, int seq_len, uintptr_t scores, int64_t stride,
                              uintptr_t lse) {
        self.end_hgca_row(layer, slot, seq_len, at<float>(scores), stride, at<float>(lse));
      }, "layer"_a, "slot"_a, "seq_len"_a, "scores"_a, "stride"_a, "lse"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("reevaluate_rows", [](Engine& self, uintptr_t kv, int64_t block_stride, uintptr_t query, int64_t query_stride,
                                 const Batch& batch, HgcaLayer& layer) {
        self.reevaluate_rows(stored_rows(kv, block_stride, query, query_stride), batch, layer);
      }, "kv"_a, "block_stride"_a, "query"_a, "query_stride"_a, "batch"_a, "layer"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("choose_fluxion_pages", [](Engine& self, uintptr_t kv, int64_t block_stride, uintptr_t query, int64_t query_stride,
                                      const Batch& batch, const Selection& selection, FluxionLayer& layer, uintptr_t sink_out,
                                      uintptr_t sink_lse, uintptr_t local_out, uintptr_t local_lse) {
        self.choose_fluxion_pages(
            stored_rows(kv, block_stride, query, query_stride), batch, selection, layer,
            {at<float>(sink_out), at<float>(sink_lse), at<float>(local_out), at<float>(local_lse)});
      }, "kv"_a, "block_stride"_a, "query"_a, "query_stride"_a, "batch"_a, "selection"_a, "layer"_a, "sink_out"_a, "sink_lse"_a,
           "local_out"_a, "local_lse"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("keep_fluxion_query", [](Engine& self, FluxionLayer& layer, int slot, uintptr_t query, int tokens) {
        self.keep_fluxion_query(layer, slot, at<char>(query), tokens);
      }, "layer"_a, "slot"_a, "query"_a, "tokens"_a)
      .def("stats", &Engine::stats, nb::rv_policy::copy)
      .def("reset_stats", &Engine::reset_stats)
      .def("last_plan", &Engine::last_plan, "request"_a, "kv_head"_a)
      .def("last_features", &Engine::last_features, "request"_a, "kv_head"_a)
      .def("last_budgets", &Engine::last_budgets, "request"_a, "kv_head"_a)
      .def("last_unread", &Engine::last_unread, "request"_a, "kv_head"_a);
}
