// What a layer call takes and counts: the layer's shape, the step's requests, what they read, and where everything lies.
#pragma once

#include <algorithm>
#include <cstdint>

#include "layout.h"

namespace hybrid_sparse {

struct Geometry {
  Layout layout;
  int q_heads;
  int kv_heads;
  float scale;
  int sliding_window = 0;  // a row sees only this many latest tokens, its own included; 0: all tokens
  bool common_keys = false;  // key codes encode keys minus the common key of their stretch of pages (common_keys.cpp)
  int group() const { return q_heads / kv_heads; }
  // The first token that the last of `tokens` tokens sees.
  int first_seen(int tokens) const { return sliding_window ? std::max(0, tokens - sliding_window) : 0; }
};

// The requests of one step. Request r owns query tokens [query_start[r], query_start[r + 1]), the last ones of its
// seq_lens[r] tokens. Pointers stay valid while the step lasts.
struct Batch {
  int requests = 0;
  const int32_t* query_start = nullptr;   // [requests + 1]
  const int32_t* seq_lens = nullptr;      // [requests]
  const int32_t* block_table = nullptr;   // [requests, block_table_stride]
  int64_t block_table_stride = 0;
  const int64_t* slot_mapping = nullptr;  // [tokens]; negative: not stored
  const uint8_t* decode = nullptr;        // [requests]; 1: sparse if it has one query token, else exact; 0: exact
  const int32_t* slots = nullptr;         // [requests]; where a layer keeps the request's state; null: no layer keeps any
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
  bool ranked = false;        // ordered by summary score; otherwise every candidate, in sequence order
  double budget_ratio = 1.0;  // at most this share of the candidates, rounded up
  int max_pages = 0;          // and at most this many; 0: no such limit
  double threshold = 1.0;     // stop once this share of the mass is exceeded; 1: never
  int microbatch_pages = 8;   // pages between two checks of the threshold
  // The assumed weight of the unread pages. True: the sum of their estimates (key codes). False: each weighs as much as the
  // lightest page read so far (PSA, Algorithm 1).
  bool estimated_remainder = false;
  // Share of the unread candidates' estimated weight (key codes) that goes to the candidates read; the rest is left out.
  float attributed = 0.0f;
  // How many requests must have pages at their beginning in common for these to be read once and attended to exactly, instead of
  // as each request selects; kAsFast: where that takes less time. Two are enough if none selects. 0: never, whoever reads.
  int prefix_sharers = kAsFast;
  static constexpr int kAsFast = -1;
  int sink_tokens = 0;        // retained set, always attended densely
  int window_tokens = kPageTokens;

  int budget(int candidates) const;
  CandidatePages candidates(int seq_len) const;
  // Whether it reads in microbatches. A threshold of 1 never stops: everything is read, so nothing needs scoring.
  bool progressive() const { return ranked && threshold < 1.0; }
  // Whether a threshold ends the reading by what is estimated to be unread. The pages' order then allows for errors of estimates.
  bool stops_by_estimates() const { return progressive() && estimated_remainder; }
};

struct LayerCall {
  char* kv;
  int64_t block_stride;  // bytes
  const char* query;     // strides: elements of the KV dtype from one token to the next
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

// Sums over calls, single rows only: decode rows, and a prompt's last token if a step computes it alone.
struct Stats {
  int64_t calls = 0;
  int64_t items = 0;              // (request, KV head) pairs
  int64_t pages_total = 0;        // a full read of the context
  int64_t pages_candidate = 0;
  int64_t pages_read = 0;         // retained and selected, but for those of the next row
  int64_t pages_shared = 0;       // attended to, but read for another request of the same step (prefix_attention.cpp)
  int64_t pages_wasted = 0;       // read past the stop and dropped
  int64_t summaries_scored = 0;
  int64_t summary_bytes = 0;      // of these; with split codes, the coarse parts and the fine parts read
  int64_t microbatches = 0;
  int64_t judged = 0;             // items of progressive selection: only they estimate the kept mass
  double kept_mass = 0.0;         // sum over judged items: the estimate at the stop, lowest head of the group
  int64_t stopped_early = 0;      // items
  int64_t streaming = 0;          // items for which Fluxion reads nothing but the retained set
  int64_t anchor_pages = 0;       // read to observe anchors (Fluxion), not in pages_read
};

}  // namespace hybrid_sparse
