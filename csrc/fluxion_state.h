// What each layer keeps of a request for Fluxion, in addition to the KV cache: the anchor, which is a query for which the whole
// host segment was observed, and the features that the heads have from then on.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "head_predictor.h"

namespace hybrid_sparse {

// An anchor serves this many of the rows that follow it: the predictor's samples are no further from their anchors.
inline constexpr int kAnchorRows = 256;

struct FluxionRule {
  int layer;        // of the model, from 0
  float tau;        // error of the budgets in the anchor's features (eq. 2); > 0
  int granularity;  // tokens of a logical block; 0: those of the least volume
  int dense_tokens;  // sequences of at most this many tokens attend to everything
};

// One request in one layer.
struct FluxionRequest {
  int tokens = 0;                // of the sequence that the state is for; the next decode row has one more
  int anchor_tokens = 0;         // of the sequence that ends with the anchor
  bool observed = false;         // whether the fields after `query` are the anchor's
  std::vector<char> query;       // [q_heads][head_dim] of the KV's dtype; empty if unknown
  std::vector<float> query_floats;
  std::vector<float> features;   // [q_heads][feature::count]; those of a decode step are unset
  std::vector<float> key_mean;   // [kv_heads][head_dim] of the host segment
};

// The requests of one layer, by slot. Only the engine's call writes them, and one task writes each KV head of a slot.
class FluxionLayer {
 public:
  FluxionLayer(const HeadPredictor& predictor, const FluxionRule& rule) : predictor_(predictor), rule_(rule) {}
  FluxionLayer(const FluxionLayer&) = delete;
  FluxionLayer& operator=(const FluxionLayer&) = delete;

  const HeadPredictor& predictor() const { return predictor_; }
  const FluxionRule& rule() const { return rule_; }
  // The slot's state, empty if it is new. Its address stays the same until it is released.
  FluxionRequest& request(int slot);
  // Frees the slot's memory; a slot without a state has none.
  void release(int slot);
  // For tests: the anchor's features, empty if none was observed, and the tokens of the sequence that ends with it.
  std::vector<float> anchor(int slot) const;
  int anchor_tokens(int slot) const;

 private:
  bool has(int slot) const { return slot < static_cast<int>(slots_.size()) && slots_[slot]; }

  const HeadPredictor& predictor_;
  FluxionRule rule_;
  std::vector<std::unique_ptr<FluxionRequest>> slots_;
};

}  // namespace hybrid_sparse
