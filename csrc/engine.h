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
#include "layer_call.h"
#include "layout.h"
#include "rank.h"
#include "thread_pool.h"

namespace hybrid_sparse {

inline constexpr int kSpansPerThread = 3;  // parts that a call's reading is cut into: enough to even out, few enough to merge
inline constexpr int kMinScoreSpan = 64;  // a scoring task takes at least the summaries of this many pages
inline constexpr int kFewestSharedPages = 16;  // of several requests; fewer are not worth a task of their own
inline constexpr int kMinSpanPages = 16;  // an attention task takes at least this many pages, if threads share the work

inline constexpr double kMostLogShare = 600.0;  // of the logarithm of a share, so that it stays finite

// log(exp(a) + exp(b)).
inline double log_add(double a, double b) {
  const double high = std::max(a, b);
  return std::isfinite(high) ? high + std::log(std::exp(a - high) + std::exp(b - high)) : high;
}

class Engine {
 public:
  Engine(const Geometry& geometry, const Isa& isa, ThreadPool& pool);

  // `hgca`, `fluxion`: the layer's state, or null; at most one is given. It then decides what decode rows read, and needs
  // batch.slots. Fluxion takes only the retained set and `attributed` from the selection.
  void forward(const LayerCall& call, const Batch& batch, const Selection& selection, HgcaLayer* hgca, FluxionLayer* fluxion);
  // Summarises every page of some blocks again, because something else has written their keys. The blocks of sequence s are
  // blocks[starts[s]] to blocks[starts[s + 1] - 1], from the beginning of the sequence on.
  void summarize(char* kv, int64_t block_stride, const int32_t* blocks, const int32_t* starts, int sequences);
  // The parts of a decode row, one at a time, for a runtime that decides in between (host_tasks.cpp). Stats do not count them.
  // Scores the summaries of pages [page_begin, page_begin + count) of one request for a token's query heads:
  // scores [q_heads][count].
  void score_pages(const RequestPages& of, const char* query, int page_begin, int count, float* scores);
  // Attends with the query heads of one group to some pages of one request that has seq_len tokens: normalised rows
  // out [group][head_dim], their log-sum-exp (-inf where no token was seen), and that of each row's lightest page.
  // `token_scores` [group][count][16], if not null, receives the scaled score of every token; those of tokens from seq_len
  // on are undefined.
  void attend_pages(const RequestPages& of, const char* query, int head, const int32_t* pages, int count, int seq_len,
                    float* out, float* lse, float* lightest_lse, float* token_scores);
  // Decode rows of the page policies if a device attends (page_tasks.cpp). The batch has only decode rows, and their keys and
  // values are stored. The first call scores all candidates; the scores stay until the next call other than the parts above.
  void score_candidates(const LayerCall& call, const Batch& batch, const Selection& selection);
  // The second call orders what each group may read, best first; describe_orders() and copy_orders() return it. A group reads
  // nothing if its retained set is estimated to be enough, and everything if it needs no scores. retained_lse [rows][q_heads].
  // Stats count nothing. Returns false, and does nothing, if another number of rows was scored last.
  bool order_candidates(const Selection& selection, int rows, const float* retained_lse);
  struct OrderSizes {  // of one group
    int32_t pages;     // pages that it may read
    int32_t scored;    // candidates whose summaries were scored
    int32_t expected;  // how many of `pages`, in whole microbatches, are enough if the estimates hold, or all; 0: not asked
    int32_t unread;    // how many numbers copy_orders() writes to its `unread`
    float share;       // P_acc before any candidate is read; 1 if nothing is estimated
  };
  // For the rows ordered last: sizes [rows][kv_heads].
  void describe_orders(OrderSizes* sizes) const;
  // Group after group, the pages in reading order, and the estimated log weight of the candidates still unread after each
  // microbatch, [microbatches][group]; nothing for a group that does not ask for it.
  void copy_orders(int64_t* pages, float* unread) const;
  // HGCA's decode rows if a device attends the dense window (hgca_tasks.cpp). Stats do not count them.
  // Judges the entries that leave a row's window. Returns false, and does nothing, if the state is not for the tokens before it.
  bool begin_hgca_row(const RequestPages& of, HgcaLayer& layer, int slot, int seq_len);
  // Attends with rows of [q_heads][head_dim] to the packed tokens of each: normalised out [rows][q_heads][head_dim], lse
  // [rows][q_heads], zeros and -inf where nothing is packed. Returns the number of pages read.
  int64_t attend_packed(HgcaLayer& layer, const int32_t* slots, int rows, const char* query, float* out, float* lse);
  // Updates the moving averages from the scores [q_heads][stride] of the window's tokens, page after page, and their
  // log-sum-exp [q_heads].
  void end_hgca_row(HgcaLayer& layer, int slot, int seq_len, const float* scores, int64_t stride, const float* lse);
  // Fluxion's decode rows if a device attends (fluxion_tasks.cpp): everything that forward() does except the attention. The
  // batch has only decode rows; their keys and values are stored and their retained sets attended. last_plan(), last_budgets()
  // and last_unread() say what they read in addition. Stats count the rows.
  void choose_fluxion_pages(const LayerCall& call, const Batch& batch, const Selection& selection, FluxionLayer& layer,
                            const SegmentStates& segments);
  // What forward() does for a row that attends to everything. query [q_heads][head_dim]: of the last of `tokens` tokens.
  void keep_fluxion_query(FluxionLayer& layer, int slot, const char* query, int tokens);
  // Re-evaluates the host side of requests. The batch has their latest rows; only the queries of these are read.
  void reevaluate_rows(const LayerCall& call, const Batch& batch, HgcaLayer& layer);

  const Isa& isa() const { return isa_; }
  const Stats& stats() const { return stats_; }
  void reset_stats() { stats_ = {}; }
  // Candidate pages that the request's decode row of the last call read for the KV head, in reading order.
  std::vector<int32_t> last_plan(int request, int kv_head) const;
  // The same row under Fluxion: features [group][feature::count]; granularity, then blocks [group]. Empty if it read everything.
  std::vector<float> last_features(int request, int kv_head) const;
  std::vector<int32_t> last_budgets(int request, int kv_head) const;
  // Likewise the log weight of the blocks left out, [group], as their codes estimate it; empty if nothing is estimated.
  std::vector<float> last_unread(int request, int kv_head) const;

  // How many requests must begin with the same pages for rows that select to attend to these together; 0: no number.
  int prefix_sharers(const Selection& selection) const;

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
  struct FilledPage {  // a page that a step fills
    int request;
    int page;  // of the sequence; -1 if the batch does not say
    int64_t slot;  // of its last token
  };
  struct Item {  // decode row of one request, one KV head
    int request;
    int head;
    int token;
    int seq_len;
    int first_page;  // the first that the row sees; 0 without a sliding window
    int pages;       // end of the pages that it sees
    int first_candidate;
    int candidate_begin;  // of the candidates that are left to the selection
    int candidate_end;
    int prefix_run;    // among `prefix_runs_`; -1: none
    int prefix_row;    // the item's first among the rows of a KV head in that run
    int prefix_pages;  // pages [0, prefix_pages) are read for all requests of the run; 0: no run
    bool ranked;
    bool progressive;
    int first_state;  // of its `states`; a ranked item's retained set has another state, at the item's own index
    int states;
    int pending;  // unfinished tasks of the current phase; the last one to finish takes the item's next step
    int budget;
    int64_t score_offset;
    std::vector<int32_t> retained;  // ranked: pages of the retained set, ascending
    std::vector<int32_t> order;     // ranked: candidate pages read so far; progressive in rank order, else ascending
    RankedPages rank;
    bool open;                      // progressive: not stopped yet
    int left;                       // progressive: candidates not counted as read yet
    int wasted;
    int round_first;                // progressive: position in `order` of this round's first page
    int first_span;                 // progressive: this round's first
    int microbatches;               // progressive: verified so far
    float kept;
    std::vector<float> lse_min;     // [group]
    std::vector<float> error_bounds;   // [group] of estimated scores; empty: the order does not allow for errors
    std::vector<float> estimated_lse;  // [group] of candidates unread when last weighed: first all; with an anchor, those left out
    std::vector<double> unread;        // [group] share of that estimate that `order` leaves out; empty: unknown
    std::vector<float> unread_after;   // [microbatches][group] log weight still left out after each microbatch
    int expected;                      // pages of `order`, in whole microbatches, that the estimates call enough; 0: unknown
    FluxionRequest* anchor;            // Fluxion's state of the request; null: the row reads what the selection says
    int first_row;                     // anchor: in head_features_ and the arrays with the same rows
    int granularity;                   // anchor: tokens of a logical block; 0: all heads stream
    int fine_parts;                    // anchor: pages whose split codes were read whole

    int seen_pages() const { return pages - first_page; }
    // Of these, what is not read with others.
    int own_begin() const { return std::max(first_page, prefix_pages); }
    int own_pages() const { return pages - own_begin(); }
    int candidates() const { return candidate_end - candidate_begin; }
  };
  struct Span {  // one task: attention for one item, or scoring of its logical blocks (Fluxion)
    int item;
    const int32_t* pages;  // null: a range
    int page_begin;  // scoring: this and `count` are logical blocks
    int count;
    int state;
    bool ends_microbatch = false;  // progressive
  };
  struct Sharer {  // a request with a decode row, in the order of block tables
    int item;  // its first
    const int32_t* blocks;
    int full_blocks;
    int common_blocks;  // full ones that its table begins with like that of the sharer before it
    bool same_request;  // as the sharer before it: both are rows of one request, whose drafts have rows of their own
  };
  struct PrefixRun {  // sharers whose first pages are read once for all of them
    int sharer;  // the first of `sharers`
    int sharers;
    int pages;
    int first_span;  // of the first KV head; the spans of a KV head lie together
    int parts;       // spans of a KV head
  };
  struct PrefixSpan {  // one task: some of a run's pages, one KV head
    int run;
    int head;
    int page_begin;
    int count;
    int64_t state;  // where its state begins, of all the rows that the run has for the KV head
  };
  struct ScoreSpan {  // one task: scores pages for all items of some sharers, which have them in common
    int sharer;  // the first of `sharers`
    int sharers;
    int page_begin;
    int count;
  };
  struct HgcaItem {  // the only row of one request, one KV head
    int request;
    int head;
    int token;
    int seq_len;
    HgcaPages pages;
    HgcaHead* state;  // null: the row attends to everything
    int first_state;
    int window_states;  // of the dense window; they come first among `states`
    int states;
    int pending;
    int64_t score_offset;         // of the window's scores, [group][window.size()][16]
    std::vector<int32_t> window;  // pages of the dense window, ascending
  };
  struct HgcaSpan {  // one task
    enum class Part { window, packed, everything };
    int item;
    Part part;
    int begin;  // first page. window: an index into the item's; else a page number
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
    int parts;  // of the host side, each one task
    int64_t lse_offset;     // [parts][group][rows]
    int64_t weight_offset;  // [group][tokens of the host side]
  };

  void append(const LayerCall& call, const Batch& batch);
  void summarize_filled(const LayerCall& call, const Batch& batch);
  void summarize_page(const PageTable& table, int page, const float* common);
  bool takes_common_keys() const { return geometry_.common_keys && geometry_.layout.summary == Summary::key_codes; }
  bool common_key(const PageTable& table, int page, float* common) const;
  void add_common(const void* const* queries, int heads, int rows, const PageTable& table, int page_begin, int count,
                  float* const* scores) const;
  void attend_exact(const LayerCall& call, const Batch& batch);
  void run_row_block(const LayerCall& call, const Batch& batch, const RowBlock& block, int split);
  void attend_decode(const LayerCall& call, const Batch& batch, const Selection& selection);
  void collect_items(const Batch& batch, const Selection& selection);
  void set_ranked(Item& item) const;
  const Item* find_item(int request, int head) const;  // of the last call; null: it has none
  void order_sharers(const Batch& batch);
  void order_visits();
  void choose_scoring_runs();
  // Divides the sharers into runs of neighbours so that, over all runs, (sharers - 1) times the pages that they have in common is
  // largest. grow_from(last) gives a function of a run that ends with that sharer: asked for one beginning after the other, each
  // one sharer earlier, it says how many pages the run has in common; 0: no such run; kEndsRun: nor a longer one.
  template <class GrowFrom>
  void choose_runs(const GrowFrom& grow_from) {
    const int count = static_cast<int>(sharers_.size());
    run_begin_.assign(count + 1, 0);
    run_pages_.assign(count + 1, 0);
    run_saved_.assign(count + 1, 0);
    for (int end = 1; end <= count; ++end) {
      run_begin_[end] = end - 1;
      run_saved_[end] = run_saved_[end - 1];
      auto grow = grow_from(end - 1);
      for (int begin = end - 2; begin >= 0; --begin) {
        const int pages = grow(begin);
        if (pages == kEndsRun) break;
        const int64_t saved = run_saved_[begin] + int64_t{end - begin - 1} * pages;
        if (pages == 0 || saved <= run_saved_[end]) continue;
        run_begin_[end] = begin;
        run_pages_[end] = pages;
        run_saved_[end] = saved;
      }
    }
  }
  static constexpr int kEndsRun = -1;
  void share_prefixes(const Selection& selection);
  void choose_prefix_runs(const Selection& selection);
  void leave_to_run(int run, int sharer);
  void add_prefix_spans();
  void attend_prefix(const LayerCall& call, const Batch& batch, const PrefixSpan& span);
  void merge_prefix(const Item& item, float* into) const;
  void prepare_summary_queries(const LayerCall& call);
  void add_score_spans();
  void add_score_spans(int sharer, int sharers, int page_begin, int page_end);
  static int score_cut(int page_begin, int pages, int part, int parts);
  void score_and_attend_retained(const LayerCall& call, const Batch& batch);
  void rank(const Selection& selection);
  void score_span(const LayerCall& call, const Batch& batch, const ScoreSpan& span);
  void score_summaries(const void* const* queries, int heads, int rows, const PageTable& table, int page_begin, int count,
                       float* const* scores) const;
  void run_score(const void* const* queries, int heads, int rows, const PageTable& table, int code_bits, int page_begin,
                 int count, float* const* scores) const;
  // Sets how far each head's shares may exceed their estimates.
  void bound_errors(const LayerCall& call, const Batch& batch, Item& item) const;
  const float* group_item_scores(Item& item, const float* retained_lse);
  void rank_item(Item& item, int index, const Selection& selection);
  void order_item(Item& item, const Selection& selection, const float* retained_lse);
  void expect(Item& item, const Selection& selection, const float* retained_lse);
  void share_round(int open, const Selection& selection);
  void add_round_spans(int index, const Selection& selection, int& next_state);
  void end_round(const LayerCall& call, const Selection& selection, int index);
  void take_next(Item& item, int index, const Selection& selection);
  double read_share(const Item& item, int index, int g) const;
  double read_lse(int index, int g) const;
  const float* gather_scores(const Item& item, int g, const int32_t* pages, size_t count, std::vector<float>& out) const;
  double estimate(const Item& item, int g, const int32_t* pages, size_t count) const;
  const std::vector<int32_t>& unread_pages(const Item& item) const;
  double log_weight(const Item& item, int g, const int32_t* pages, size_t count) const;
  bool little_left(const Item& item) const;
  void weigh_unread(Item& item, const std::vector<int32_t>& pages, double* read);
  void estimate_unread(Item& item);
  void list_unread(Item& item, int microbatch_pages);
  void attribute_unread(Item& item, const float* retained, float* read);
  void attend_selected(const LayerCall& call, const Batch& batch);
  void attend_progressive(const LayerCall& call, const Batch& batch, const Selection& selection);
  void verify(Item& item, int index, const Selection& selection, int pages_read);
  // Attends every span. The task that finishes an item's last span, counted by `pending`, then calls last_done(item).
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
  template <class LookAt>
  void observe_budgets(const LayerCall& call, const Batch& batch, int index, const LookAt& look_at);
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
  // The operands of query rows for `Kernels::attend`; row r is `row_of(r)`. Valid until the thread comes to the same call again.
  template <class RowOf>
  const void* const* operands(int rows, RowOf row_of) const {
    static thread_local std::vector<const void*> pointers;
    static thread_local std::vector<char> prepared;
    const int64_t bytes = kernels_.query_bytes(geometry_.layout.head_dim);
    pointers.resize(rows);
    prepared.resize(rows * bytes);
    for (int r = 0; r < rows; ++r)
      pointers[r] = kernels_.prepare_query(row_of(r), geometry_.layout.head_dim, prepared.data() + r * bytes);
    return pointers.data();
  }

  // Where the rows of an array begin, `stride` floats apart. Valid until the thread calls it again.
  static float* const* rows_at(float* first, int rows, int64_t stride) {
    static thread_local std::vector<float*> pointers;
    pointers.resize(rows);
    for (int r = 0; r < rows; ++r) pointers[r] = first + r * stride;
    return pointers.data();
  }

  // A state: max [rows], sum [rows], page_lse_min [rows], output [rows][head_dim].
  int64_t state_floats(int rows) const { return int64_t{rows} * (3 + geometry_.layout.head_dim); }
  float* state(int index) { return states_.data() + index * state_floats(geometry_.group()); }
  const float* state(int index) const { return states_.data() + index * state_floats(geometry_.group()); }
  // The state of the candidates that a progressive item has read so far; a ranked item's retained set has state(index).
  int read_state(int index) const { return item_count_ + index; }
  void clear_state(float* of_state) const;
  void reserve_states(int count);
  float lse(const float* of_state, int row) const;  // log-sum-exp of what the state has read
  void merge_state(float* into, const float* from, int rows) const { merge_rows(into, rows, from, rows, 0); }
  // The same for `rows` rows of a larger state with `from_rows`, from its row `first` on.
  void merge_rows(float* into, int rows, const float* from, int from_rows, int first) const;
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
  std::vector<Item> items_;  // only grows; the first item_count_ are in use
  int item_count_ = 0;
  std::vector<Sharer> sharers_;
  // [sharers + 1] each, of the best runs that end before a sharer (choose_runs):
  std::vector<int> run_begin_;      // where the last of them begins
  std::vector<int> run_pages_;      // its common pages
  std::vector<int64_t> run_saved_;  // how many readings or scorings of a page they save
  std::vector<int> visits_;         // [item_count_] items in the order in which they read
  std::vector<PrefixRun> prefix_runs_;
  std::vector<PrefixSpan> prefix_spans_;
  std::vector<float> prefix_states_;
  std::vector<ScoreSpan> score_spans_;
  std::vector<Span> spans_;
  int most_parts_ = 1;          // that a microbatch is cut into in a round
  int microbatches_ahead_ = 1;  // that an item reads in a round
  float attributed_ = 0.0f;     // the current call's Selection::attributed
  std::vector<float> states_;
  std::vector<float> scores_;
  std::vector<char> summary_queries_;        // scoring operands of every item's rows
  std::vector<const void*> query_pointers_;  // to them
  std::vector<HgcaItem> hgca_items_;
  std::vector<HgcaSpan> hgca_spans_;
  std::vector<float> window_scores_;
  std::vector<Reevaluation> reevaluations_;
  std::vector<float> part_lse_;
  std::vector<float> host_weights_;
  std::vector<Anchor> anchors_;
  int predicted_rows_ = 0;  // query heads of the call whose budgets are predicted; what follows only grows
  std::vector<float> head_features_;             // [rows][feature::count]
  std::vector<char> block_operands_;             // of every row (prepare_block_query)
  std::vector<HeadProperties> head_properties_;  // [rows]
  std::vector<int32_t> head_blocks_;             // [rows] logical blocks to select
};

}  // namespace hybrid_sparse
