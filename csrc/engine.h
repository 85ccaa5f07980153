// One attention layer call over a batch: append, then exact prefill rows and sparse decode rows.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <vector>

#include "fluxion_state.h"
#include "hgca_state.h"
#include "kernel_table.h"
#include "layout.h"
#include "rank.h"
#include "thread_pool.h"

namespace hybrid_sparse {

inline constexpr int kSpansPerThread = 3;  // parts a call's reading is cut into: enough to even out, few enough to merge
inline constexpr int kMinScoreSpan = 64;  // pages whose summaries a task scores at least
inline constexpr int kMinSpanPages = 16;  // pages a task attends at least, where threads share

// log(exp(a) + exp(b)).
inline double log_add(double a, double b) {
  const double high = std::max(a, b);
  return std::isfinite(high) ? high + std::log(std::exp(a - high) + std::exp(b - high)) : high;
}

struct Geometry {
  Layout layout;
  int q_heads;
  int kv_heads;
  float scale;
  int sliding_window = 0;  // the latest tokens that a row sees, its own included; 0: all of them
  bool common_keys = false;  // key codes are of keys less what those of a stretch of pages have in common (common_keys.cpp)
  int group() const { return q_heads / kv_heads; }
  // Of a row at the end of so many tokens the first that it sees.
  int first_seen(int tokens) const { return sliding_window ? std::max(0, tokens - sliding_window) : 0; }
};

// The requests of one step. Request r owns query tokens [query_start[r], query_start[r + 1]), the last of its
// seq_lens[r] tokens. Pointers stay valid while the step lasts.
struct Batch {
  int requests = 0;
  const int32_t* query_start = nullptr;   // [requests + 1]
  const int32_t* seq_lens = nullptr;      // [requests]
  const int32_t* block_table = nullptr;   // [requests, block_table_stride]
  int64_t block_table_stride = 0;
  const int64_t* slot_mapping = nullptr;  // [tokens]; negative: not stored
  const uint8_t* decode = nullptr;        // [requests]; 1: one query token, sparse; 0: exact
  const int32_t* slots = nullptr;         // [requests]; where a layer keeps the request's state, if it does; null: nowhere
};

// The pages of a sequence outside the retained set: [begin, end).
struct CandidatePages {
  int begin;
  int end;
  int count() const { return end - begin; }
};

// Which candidate pages a decode row reads: an order and rules for where to stop. Every policy is one of these
// (vllm_hybrid_sparse/values.py, SelectionSpec).
struct Selection {
  bool ranked = false;        // by summary score; otherwise every candidate, in sequence order
  double budget_ratio = 1.0;  // at most this share of the candidates, rounded up
  int max_pages = 0;          // and at most this many; 0: no such limit
  float threshold = 1.0f;     // stop once this share of the mass is exceeded; 1: never
  int microbatch_pages = 8;   // pages between two looks at the threshold
  // What the unread pages are taken to weigh: the sum of their estimates (key codes), or each as much as the lightest page
  // read so far (PSA, Algorithm 1).
  bool estimated_remainder = false;
  // How much of the weight that key codes estimate of the unread candidates goes to the candidates read; the rest is left out.
  float attributed = 0.0f;
  int sink_tokens = 0;        // retained set, always attended densely
  int window_tokens = kPageTokens;

  int budget(int candidates) const;
  CandidatePages candidates(int seq_len) const;
  // Reads in microbatches: with a threshold, and where nothing limits the reading (PSA with a threshold of 1).
  bool progressive() const { return ranked && (threshold < 1.0f || (budget_ratio >= 1.0 && max_pages == 0)); }
};

struct LayerCall {
  char* kv;
  int64_t block_stride;  // bytes
  const char* query;     // strides in elements of the KV dtype, one token to the next
  int64_t query_stride;
  const char* key;       // null: nothing to append
  int64_t key_stride;
  const char* value;
  int64_t value_stride;
  char* out;
  int64_t out_stride;
  const float* sinks = nullptr;  // [q_heads] scores of learned sinks; null: there are none
};

// Where the KV of one request in one layer lies.
struct RequestPages {
  char* kv;
  int64_t block_stride;  // bytes
  const int32_t* block_table;
};

// Partial attention of decode rows to the segments of their retained sets, normalised: out [rows][q_heads][head_dim], lse
// [rows][q_heads], zeros and -inf where nothing was seen.
struct SegmentStates {
  const float* sink_out;
  const float* sink_lse;
  const float* local_out;
  const float* local_lse;
};

// Sums over calls, decode rows only.
struct Stats {
  int64_t calls = 0;
  int64_t items = 0;              // (request, KV head) pairs
  int64_t pages_total = 0;        // a full read of the context
  int64_t pages_candidate = 0;
  int64_t pages_read = 0;         // retained and selected
  int64_t pages_wasted = 0;       // read ahead of a stop and dropped
  int64_t summaries_scored = 0;
  int64_t summary_bytes = 0;      // of them; of split codes the coarse parts, and the fine parts read
  int64_t microbatches = 0;
  int64_t judged = 0;             // items of progressive selection: those with an estimate of the kept mass
  double kept_mass = 0.0;         // sum over them of the estimate at the stop, lowest head of the group
  int64_t stopped_early = 0;      // items
  int64_t streaming = 0;          // items that Fluxion lets read nothing beside the retained set
  int64_t anchor_pages = 0;       // read to observe anchors (Fluxion), beside pages_read
};

class Engine {
 public:
  Engine(const Geometry& geometry, const Isa& isa, ThreadPool& pool);

  // `hgca`, `fluxion`: null, or the layer's state, one of them at most, which then decides what decode rows read; needs
  // batch.slots. Fluxion takes the retained set from the selection, and nothing else.
  void forward(const LayerCall& call, const Batch& batch, const Selection& selection, HgcaLayer* hgca, FluxionLayer* fluxion);
  // Summarises every page of some blocks anew, for keys that something else has written: blocks of sequences from their beginnings,
  // those of sequence s from starts[s] to starts[s + 1].
  void summarize(char* kv, int64_t block_stride, const int32_t* blocks, const int32_t* starts, int sequences);
  // The parts of a decode row one at a time, for a runtime that decides in between (host_tasks.cpp). They count nothing.
  // Scores the summaries of pages [page_begin, page_begin + count) of one request for a token's query heads:
  // scores [q_heads][count].
  void score_pages(const RequestPages& of, const char* query, int page_begin, int count, float* scores);
  // Attends with the query heads of one group to some pages of one request, of which seq_len tokens are there: normalised
  // rows out [group][head_dim], their log-sum-exp (-inf where no token was seen), and that of each row's lightest page.
  // With `token_scores` [group][count][16], which may be null, also the scaled score of every token; of those that are not
  // there anything.
  void attend_pages(const RequestPages& of, const char* query, int head, const int32_t* pages, int count, int seq_len,
                    float* out, float* lse, float* lightest_lse, float* token_scores);
  // The page policies' decode rows where a device attends (page_tasks.cpp): the batch has decode rows alone, whose keys and values
  // are stored. First the scores of all candidates; they stay until the next call that is not one of the parts above.
  void score_candidates(const LayerCall& call, const Batch& batch, const Selection& selection);
  // Then what each group may read, best first: describe_orders(), copy_orders(). Nothing where the retained set is estimated to be
  // enough; a group that needs no scores reads everything. retained_lse [rows][q_heads]. Nothing is counted. False, and nothing
  // is done, where other rows were scored last.
  bool order_candidates(const Selection& selection, int rows, const float* retained_lse);
  struct OrderSizes {  // of one group
    int32_t pages;     // that it may read
    int32_t scored;    // candidates whose summaries were scored
    int32_t expected;  // of `pages` the first, by whole microbatches, that are enough if the estimates hold, or all; 0: not asked
    int32_t unread;    // numbers of copy_orders()
    float share;       // P_acc before any candidate is read; 1 where nothing is estimated
  };
  // [rows][kv_heads] of the rows ordered last.
  void describe_orders(OrderSizes* sizes) const;
  // One group behind the other its pages in the order of reading, and what the candidates left unread after each microbatch are
  // estimated to weigh, [microbatches][group] logarithms, nothing where that is not asked for.
  void copy_orders(int64_t* pages, float* unread) const;
  // HGCA's decode rows where a device attends the dense window (hgca_tasks.cpp). They count nothing.
  // What leaves the window of a row is judged; false, and nothing is done, where the state is not for the tokens before it.
  bool begin_hgca_row(const RequestPages& of, HgcaLayer& layer, int slot, int seq_len);
  // Attends with rows of [q_heads][head_dim] to what is packed of each: normalised out [rows][q_heads][head_dim], lse
  // [rows][q_heads], zeros and -inf where nothing is. The pages read.
  int64_t attend_packed(HgcaLayer& layer, const int32_t* slots, int rows, const char* query, float* out, float* lse);
  // Brings the moving averages up to date: scores [q_heads][stride] of the window's tokens, page after page, and their
  // log-sum-exp [q_heads].
  void end_hgca_row(HgcaLayer& layer, int slot, int seq_len, const float* scores, int64_t stride, const float* lse);
  // Fluxion's decode rows where a device attends (fluxion_tasks.cpp). Everything of forward() but the attention: the batch has
  // decode rows alone, whose keys and values are stored and whose retained sets are attended. What they read beside them:
  // last_plan(), last_budgets(), last_unread(). The rows are counted.
  void choose_fluxion_pages(const LayerCall& call, const Batch& batch, const Selection& selection, FluxionLayer& layer,
                            const SegmentStates& segments);
  // What forward() does for a row that attends to everything: query [q_heads][head_dim] of the last of so many tokens.
  void keep_fluxion_query(FluxionLayer& layer, int slot, const char* query, int tokens);
  // Judges the host side of requests anew; the batch has their latest rows, of which nothing but the queries is looked at.
  void reevaluate_rows(const LayerCall& call, const Batch& batch, HgcaLayer& layer);

  const Isa& isa() const { return isa_; }
  const Geometry& geometry() const { return geometry_; }
  const Stats& stats() const { return stats_; }
  void reset_stats() { stats_ = {}; }
  // Candidate pages read by the last call's decode row of the request and KV head, in reading order.
  std::vector<int32_t> last_plan(int request, int kv_head) const;
  // Fluxion's, of the same: [group][feature::count]; granularity and then [group] blocks. Empty for a row that read everything.
  std::vector<float> last_features(int request, int kv_head) const;
  std::vector<int32_t> last_budgets(int request, int kv_head) const;
  // Likewise what the codes of the blocks left out are estimated to weigh, [group] logarithms; empty where nothing is estimated.
  std::vector<float> last_unread(int request, int kv_head) const;

 private:
  struct RowBlock {  // exact rows: query tokens of one request against one KV head
    int request;
    int head;
    int first_token;  // in the batch
    int tokens;
    int first_position;
    int page_begin;
    int page_end;
    int first_state;
    int splits;
    int pages() const { return page_end - page_begin; }
  };
  struct FilledPage {  // in a step
    int request;
    int page;  // of the sequence
  };
  struct Item {  // decode row of one request, one KV head
    int request;
    int head;
    int token;
    int seq_len;
    int first_page;  // that is read, if the row has a sliding window
    int pages;       // up to here
    int candidate_begin;
    int candidate_end;
    bool ranked;
    bool progressive;
    int first_state;  // of what is read beside the retained set; ranked: that of the retained set is the item's own index
    int states;
    int pending;  // tasks of the current phase not finished yet; the one that finishes last takes the item's next step
    int budget;
    int64_t score_offset;
    std::vector<int32_t> retained;  // ranked: pages of the retained set, ascending
    std::vector<int32_t> order;     // ranked: candidate pages read so far; progressive in rank order, else ascending
    RankedPages rank;
    bool open;                      // progressive: not stopped yet
    int left;                       // progressive: candidates not yet counted
    int wasted;
    int round_first;                // progressive: position in `order` of this round's first page
    int first_span;                 // progressive: of this round
    int microbatches;               // progressive: verified so far
    float kept;
    std::vector<float> lse_min;     // [group]
    std::vector<float> estimated_lse;  // [group] of all candidates; with an anchor of those that `order` leaves out
    std::vector<double> unread;        // [group] share of that estimate which `order` leaves out; empty: unknown
    std::vector<float> unread_after;   // [microbatches][group] log weight that `order` leaves out after each
    int expected;                      // pages of `order`, by whole microbatches, that are enough by estimate; 0: unknown
    FluxionRequest* anchor;            // Fluxion's state of the request; null: the row reads what the selection says
    int first_row;                     // anchor: of head_features_ and what goes with them
    int granularity;                   // anchor: tokens of a logical block, 0 where all heads stream
    int fine_parts;                    // anchor: pages whose split codes were read whole

    int seen_pages() const { return pages - first_page; }
  };
  struct Span {  // one task: of attention for one item, of scoring for all items of a request
    int item;    // scoring: the first
    const int32_t* pages;  // null: a range
    int page_begin;
    int count;
    int state;
    bool ends_microbatch = false;  // progressive
  };
  struct HgcaItem {  // row of one request that has one, one KV head
    int request;
    int head;
    int token;
    int seq_len;
    HgcaPages pages;
    HgcaHead* state;  // null: the row attends to everything
    int first_state;
    int window_states;  // the first of `states`
    int states;
    int pending;
    int64_t score_offset;         // of the window's scores, [group][window.size()][16]
    std::vector<int32_t> window;  // pages of the dense window, ascending
  };
  struct HgcaSpan {  // one task
    enum class Part { window, packed, everything };
    int item;
    Part part;
    int begin;  // pages: window: index into the item's; else page number
    int count;
    int state;
  };
  struct Anchor {  // of one request, to be observed
    int request;
    int tokens;  // of the sequence that ends with it
    CandidatePages candidates;
    FluxionRequest* state;
    std::vector<float> output_norms = {};  // [q_heads] of full attention
    float tolerance = 0.0f;                // tau times the largest
    int pages() const { return (tokens + kPageTokens - 1) / kPageTokens; }
  };
  struct Reevaluation {  // of one request with new rows, one KV head
    int request;
    int head;
    const char* judges;  // queries of the rows that judge
    int rows;
    int seq_len;
    HgcaPages pages;
    HgcaHead* state;
    int parts;  // that the host side is cut into
    int64_t lse_offset;     // [parts][group][rows]
    int64_t weight_offset;  // [group][tokens of the host side]
  };

  void append(const LayerCall& call, const Batch& batch);
  void summarize_filled(const LayerCall& call, const Batch& batch);
  void summarize_page(const PageTable& table, int page);
  bool takes_common_keys() const { return geometry_.common_keys && geometry_.layout.summary == Summary::key_codes; }
  bool common_key(const PageTable& table, int page, float* common) const;
  void add_common(const void* const* queries, int heads, int rows, const PageTable& table, int page_begin, int count, float* scores,
                  int64_t head_stride, int64_t row_stride) const;
  void attend_exact(const LayerCall& call, const Batch& batch);
  void run_row_block(const LayerCall& call, const Batch& batch, const RowBlock& block, int split);
  void attend_decode(const LayerCall& call, const Batch& batch, const Selection& selection);
  void collect_items(const Batch& batch, const Selection& selection);
  void set_ranked(Item& item) const;
  const Item* find_item(int request, int head) const;  // of the last call; null: it has none
  void prepare_summary_queries(const LayerCall& call);
  void add_scoring_spans();
  void score_and_attend_retained(const LayerCall& call, const Batch& batch);
  void rank(const Selection& selection);
  void score_span(const LayerCall& call, const Batch& batch, const Span& span);
  void score_summaries(const void* const* queries, int heads, int rows, const PageTable& table, int page_begin, int count,
                       float* scores, int64_t head_stride, int64_t row_stride) const;
  void run_score(const void* const* queries, int heads, int rows, const PageTable& table, int code_bits, int page_begin,
                 int count, float* scores, int64_t head_stride, int64_t row_stride) const;
  const float* group_item_scores(Item& item, const float* retained_lse);
  void rank_item(Item& item, int index, const Selection& selection);
  void order_item(Item& item, const Selection& selection, const float* retained_lse);
  void list_unread(Item& item, int microbatch_pages);
  void expect(Item& item, const Selection& selection, const float* retained_lse);
  void share_round(int open, const Selection& selection);
  void add_round_spans(int index, const Selection& selection, int& next_state);
  void end_round(const LayerCall& call, const Selection& selection, int index);
  void take_next(Item& item, int index, const Selection& selection);
  double estimate(const Item& item, int g, int page) const;
  double read_share(const Item& item, int index, int g) const;
  double read_lse(int index, int g) const;
  void estimate_unread(Item& item);
  void attribute_unread(Item& item, const float* retained, float* read);
  void attend_selected(const LayerCall& call, const Batch& batch);
  void attend_progressive(const LayerCall& call, const Batch& batch, const Selection& selection);
  void verify(Item& item, int index, const Selection& selection, int pages_read);
  // Attends every span; the task that attends an item's last one, counted by `pending`, goes on with last_done(item).
  template <class F>
  void run_spans(const LayerCall& call, const Batch& batch, const F& last_done) {
    int states = 0;
    for (const Span& span : spans_) states = std::max(states, span.state + 1);
    reserve_states(states);
    pool_.for_each(static_cast<int>(spans_.size()), [&](int i) {
      attend_span(call, batch, spans_[i]);
      std::atomic_ref<int> pending(items_[spans_[i].item].pending);
      if (pending.fetch_sub(1, std::memory_order_acq_rel) == 1) last_done(spans_[i].item);
    });
  }
  void attend_span(const LayerCall& call, const Batch& batch, const Span& span);
  void finish_item(const LayerCall& call, Item& item, int index);
  void store_rows(const LayerCall& call, const float* of_state, int token, int head);
  void add_sinks(const LayerCall& call, float* of_state, int rows, int head) const;
  void attend_hgca(const LayerCall& call, const Batch& batch, HgcaLayer& layer);
  void collect_hgca_items(const Batch& batch, HgcaLayer& layer);
  void evict(const PageTable& table, const HgcaLayer& layer, HgcaHead& state, int seq_len);
  void pack(HgcaHead& state, const PageTable& from, int position);
  void add_hgca_spans();
  void attend_hgca_span(const LayerCall& call, const Batch& batch, const HgcaSpan& span);
  void finish_hgca_item(const LayerCall& call, const HgcaLayer& layer, HgcaItem& item);
  void average_weights(const HgcaLayer& layer, HgcaHead& state, int g, int seq_len, const float* scores, float of_window) const;
  void count_hgca_stats();
  void reevaluate(const LayerCall& call, const Batch& batch, HgcaLayer& layer);
  void collect_reevaluations(const LayerCall& call, const Batch& batch, HgcaLayer& layer);
  void keep_judges(const LayerCall& call, const Batch& batch, int request, HgcaRequest& state);
  template <class F>
  void score_part(const LayerCall& call, const Batch& batch, const Reevaluation& of, int part, const F& f);
  void choose_salient(const LayerCall& call, const Batch& batch, const HgcaLayer& layer, const Reevaluation& of);
  void begin_averages(const LayerCall& call, const Batch& batch, const HgcaLayer& layer, const Reevaluation& of);
  void score_tokens(const PageTable& table, const Reevaluation& of, int g, const int32_t* pages, int page_begin, int count,
                    float* scores, int64_t stride);
  void attend_fluxion(const LayerCall& call, const Batch& batch, const Selection& selection, FluxionLayer& layer);
  void choose_anchors(const LayerCall& call, const Batch& batch, const Selection& selection, FluxionLayer& layer);
  void keep_query(const char* row, FluxionRequest& state) const;
  void keep_last_queries(const LayerCall& call, const Batch& batch, FluxionLayer& layer);
  void observe_anchors(const LayerCall& call, const Batch& batch, const FluxionLayer& layer);
  const void* const* anchor_queries(const Anchor& anchor, int head) const;
  void attend_anchor(const LayerCall& call, const Batch& batch, const FluxionLayer& layer, int index);
  void observe_host(const LayerCall& call, const Batch& batch, int index);
  void observe_budgets(const LayerCall& call, const Batch& batch, int index);
  void attend_segments(const LayerCall& call, const Batch& batch);
  void take_segments(const LayerCall& call, const SegmentStates& segments);
  void describe_heads(const LayerCall& call, Item& item, int index);
  void share_largest_norms();
  float output_norm(const float* of_state, int row) const;
  void predict_budgets(const FluxionLayer& layer);
  int64_t block_operand_bytes() const;
  void prepare_block_query(const char* query, const float* floats, char* out) const;
  void score_blocks(const PageTable& table, const void* const* queries, int rows, CandidatePages pages, int block_pages,
                    bool signs_alone, float* scores, int64_t stride) const;
  void weigh_pages(const PageTable& table, const void* const* queries, int rows, CandidatePages pages, float* scores,
                   int64_t stride) const;
  void weigh_listed(const PageTable& table, const void* const* queries, int rows, const int32_t* pages, int count, float* scores,
                    int64_t stride) const;
  void choose_blocks(const LayerCall& call, const Batch& batch);
  int num_blocks(const Item& item) const;
  void score_block_span(const LayerCall& call, const Batch& batch, const Span& span);
  const std::vector<const void*>& block_queries(const Item& item) const;
  void list_blocks(const Item& item, std::vector<int32_t>& listed) const;
  void score_listed(Item& item, const PageTable& table, const std::vector<int32_t>& listed);
  void take_blocks(Item& item, const PageTable& table);
  void estimate_unread_blocks(Item& item, const std::vector<uint8_t>& taken);
  void count_stats();

  PageTable page_table(const LayerCall& call, const Batch& batch, int request, int head) const;
  PageTable page_table(const RequestPages& of, int head) const;
  const char* query_row(const LayerCall& call, int token, int q_head) const;

  // A state is group rows of [max, sum, page_lse_min] and then the rows' outputs.
  int64_t state_floats(int rows) const { return int64_t{rows} * (3 + geometry_.layout.head_dim); }
  float* state(int index) { return states_.data() + index * state_floats(geometry_.group()); }
  const float* state(int index) const { return states_.data() + index * state_floats(geometry_.group()); }
  // Of a ranked item the retained set's state is its own index's, of the candidates read so far (progressive) this one's.
  int read_state(int index) const { return item_count_ + index; }
  void clear_state(float* of_state) const;
  void reserve_states(int count);
  float lse(const float* of_state, int row) const;  // of what the state has read
  void merge_state(float* into, const float* from, int rows) const;
  // A group's state as normalised rows [group][head_dim] and their log-sum-exp; zeros and -inf where nothing was read.
  void normalise_state(const float* of_state, float* out, float* lse_out) const;

  Geometry geometry_;
  const Isa& isa_;
  const Kernels& kernels_;
  ThreadPool& pool_;
  Stats stats_;

  std::vector<FilledPage> filled_;
  std::vector<RowBlock> row_blocks_;
  std::vector<float> row_states_;
  std::vector<Item> items_;  // grows only; the first item_count_ are in use
  int item_count_ = 0;
  std::vector<Span> spans_;
  int most_parts_ = 1;          // of a microbatch in a round
  int microbatches_ahead_ = 1;  // that an item reads in a round
  float attributed_ = 0.0f;     // Selection's, of the call
  std::vector<float> states_;
  std::vector<float> scores_;
  std::vector<char> summary_queries_;        // operands of scoring of every item's rows
  std::vector<const void*> query_pointers_;  // to them
  std::vector<HgcaItem> hgca_items_;
  std::vector<HgcaSpan> hgca_spans_;
  std::vector<float> window_scores_;
  std::vector<Reevaluation> reevaluations_;
  std::vector<float> part_lse_;
  std::vector<float> host_weights_;
  std::vector<Anchor> anchors_;
  int predicted_rows_ = 0;  // query heads of the call that have a budget predicted; what follows grows only
  std::vector<float> head_features_;             // [rows][feature::count]
  std::vector<char> block_operands_;             // of every row (prepare_block_query)
  std::vector<HeadProperties> head_properties_;  // [rows]
  std::vector<int32_t> head_blocks_;             // [rows] logical blocks to select
};

}  // namespace hybrid_sparse
