// What each layer keeps of a request for HGCA, in addition to the KV cache: the moving averages of the attention weights of the
// dense window's recent entries, and packed copies of the host side's salient entries.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "layout.h"

namespace hybrid_sparse {

struct HgcaRule {
  float beta;         // salient: a weight above beta / entries; > 0
  float alpha;        // share of the latest weights in the moving average; in (0, 1]
  int sink_tokens;    // dense window: the first tokens and the latest ones, multiples of 16
  int window_tokens;
};

// How a request's pages are divided. The dense window is the sink and the recent pages; the host side lies between them.
struct HgcaPages {
  int pages;         // of the request; the last one may be partly filled
  int sink_end;      // sink: [0, sink_end)
  int recent_begin;  // host side: [sink_end, recent_begin); recent: [recent_begin, pages)
  HgcaPages(const HgcaRule& rule, int seq_len);
  int host_pages() const { return recent_begin - sink_end; }
  int window_tokens(int seq_len) const { return seq_len - host_pages() * kPageTokens; }
};

// Packed tokens of one KV head, in one piece of memory: pages of 16 tokens in the order they came. It grows by whole pages.
class PackedPages {
 public:
  char* page(int index) { return memory_.get() + index * page_bytes_; }
  int tokens() const { return static_cast<int>(positions_.size()); }
  int pages() const { return (tokens() + kPageTokens - 1) / kPageTokens; }
  int64_t bytes() const { return capacity_ * page_bytes_; }
  const std::vector<int32_t>& positions() const { return positions_; }  // of the tokens in the request
  PageTable table() const;
  // Starts again empty, with room for this many tokens and for at most twice as many.
  void begin(int tokens, int64_t page_bytes);
  // Makes room for this many tokens; those that are there stay.
  void reserve(int tokens, int64_t page_bytes);
  // Adds the next token's position. There must be room for the token; the caller writes the token itself.
  void add(int position) { positions_.push_back(position); }

 private:
  struct Free {
    void operator()(char* memory) const;
  };
  std::unique_ptr<char, Free> memory_;
  std::vector<int32_t> positions_;
  int64_t page_bytes_ = 0;
  int64_t capacity_ = 0;  // pages
};

struct HgcaHead {
  // [group][tokens], whole pages: the full ring, or fewer while the request is shorter. Position p is at p % ring_tokens.
  std::vector<float> averages;
  PackedPages packed;
};

// One request in one layer.
struct HgcaRequest {
  int tokens = 0;  // of the sequence that the state is for; the next decode row has one more
  std::vector<HgcaHead> heads;
  // Queries of the latest rows in the sequence's last page. If more rows are appended before a decode step, these rows judge
  // again at the next re-evaluation. [judge_rows][q_heads][head_dim] in the KV's dtype.
  std::vector<char> judges;
  int judge_rows = 0;
  // To be called when a decode step has brought the state to a sequence of this many tokens.
  void attended(int seq_len);
};

// The requests of one layer, by slot. Only the engine's call writes them, and a (slot, KV head) has one writing task at a time.
class HgcaLayer {
 public:
  HgcaLayer(int group, int kv_heads, const HgcaRule& rule);
  HgcaLayer(const HgcaLayer&) = delete;
  HgcaLayer& operator=(const HgcaLayer&) = delete;

  const HgcaRule& rule() const { return rule_; }
  int group() const { return group_; }
  int ring_pages() const { return rule_.window_tokens / kPageTokens + 1; }
  int64_t ring_tokens() const { return int64_t{ring_pages()} * kPageTokens; }
  // The slot's state, empty if it is new. Its address stays the same until it is released.
  HgcaRequest& request(int slot);
  // The same, with averages for this many tokens of the request; new ones are 0.
  HgcaRequest& request(int slot, int tokens);
  // Frees the slot's memory; a slot without a state has none.
  void release(int slot);
  int64_t packed_bytes() const;
  // For tests: positions of the packed tokens, and the moving averages [group][entries] of the recent pages' entries.
  std::vector<int32_t> salient(int slot, int kv_head) const;
  std::vector<float> averages(int slot, int kv_head) const;

  // The average of query head g for the token at a position. The averages of a page's tokens are consecutive.
  float* average(HgcaHead& head, int g, int position) const {
    return head.averages.data() + g * averaged_tokens(head) + position % ring_tokens();
  }

 private:
  int64_t averaged_tokens(const HgcaHead& head) const { return static_cast<int64_t>(head.averages.size()) / group_; }
  void reserve_averages(HgcaHead& head, int tokens) const;

  HgcaRule rule_;
  int group_;
  int kv_heads_;
  std::vector<std::unique_ptr<HgcaRequest>> slots_;
};

}  // namespace hybrid_sparse
