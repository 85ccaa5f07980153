// What HGCA keeps of each request beside its KV cache, layer by layer: the moving average of the attention weight of every
// entry of the dense window, and the salient entries of the host side, packed.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "layout.h"

namespace hybrid_sparse {

struct HgcaRule {
  float beta;         // salient: a weight above beta / entries; > 0
  float alpha;        // share of the latest weights in the moving average; in (0, 1]
  int sink_tokens;    // dense window: the first tokens and the latest, multiples of 16
  int window_tokens;
};

// Which pages of a request lie where. The dense window is the sink and the recent pages, the host side what is between.
struct HgcaPages {
  int pages;         // of the request, the last one may be partly filled
  int sink_end;      // sink: [0, sink_end)
  int recent_begin;  // host side: [sink_end, recent_begin); recent: [recent_begin, pages)
  HgcaPages(const HgcaRule& rule, int seq_len);
  int host_pages() const { return recent_begin - sink_end; }
  int window_tokens(int seq_len) const { return seq_len - host_pages() * kPageTokens; }
};

// Pages of one KV head in a piece, 16 tokens each in the order they came; grown by whole pages.
class PackedPages {
 public:
  char* page(int index) { return memory_.get() + index * page_bytes_; }
  int tokens() const { return static_cast<int>(positions_.size()); }
  int pages() const { return (tokens() + kPageTokens - 1) / kPageTokens; }
  int64_t bytes() const { return capacity_ * page_bytes_; }
  const std::vector<int32_t>& positions() const { return positions_; }  // where the tokens lie in the request
  PageTable table() const;
  // Empty, with room for so many tokens and for no more than twice as many.
  void begin(int tokens, int64_t page_bytes);
  // Room for so many tokens; what is there stays.
  void reserve(int tokens, int64_t page_bytes);
  // The next token's position; its place, of which there must be one, is the caller's to fill.
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
  std::vector<float> averages;  // [group][ring pages][16]; page p of the request is page p % ring pages
  PackedPages packed;
};

// One request in one layer.
struct HgcaRequest {
  int tokens = 0;  // of the sequence the state is for; a decode row that follows has one more
  std::vector<HgcaHead> heads;
  // The rows that judge at the next re-evaluation if more are appended before a decode step: queries of the latest rows, of the
  // sequence's last page. [judge_rows][q_heads][head_dim] in the KV's dtype.
  std::vector<char> judges;
  int judge_rows = 0;
  // A decode step has brought the state to a sequence of so many tokens.
  void attended(int seq_len);
};

// The requests of one layer by slot. Written by the engine's call alone, a (slot, KV head) by one task at a time.
class HgcaLayer {
 public:
  HgcaLayer(int group, int kv_heads, const HgcaRule& rule);
  HgcaLayer(const HgcaLayer&) = delete;
  HgcaLayer& operator=(const HgcaLayer&) = delete;

  const HgcaRule& rule() const { return rule_; }
  int group() const { return group_; }
  int ring_pages() const { return rule_.window_tokens / kPageTokens + 1; }
  int64_t ring_tokens() const { return int64_t{ring_pages()} * kPageTokens; }
  // The slot's state, empty where it is new; stays where it is until it is released.
  HgcaRequest& request(int slot);
  // Gives the slot's memory back; one without a state has none.
  void release(int slot);
  int64_t packed_bytes() const;
  // For tests: positions of the packed tokens, and [group][entries] the moving averages of the recent pages' entries.
  std::vector<int32_t> salient(int slot, int kv_head) const;
  std::vector<float> averages(int slot, int kv_head) const;

  // The average of query head g of the token at a position; those of a page lie one after another.
  float* average(HgcaHead& head, int g, int position) const {
    return head.averages.data() + g * ring_tokens() + position % ring_tokens();
  }

 private:
  HgcaRule rule_;
  int group_;
  int kv_heads_;
  std::vector<std::unique_ptr<HgcaRequest>> slots_;
};

}  // namespace hybrid_sparse
