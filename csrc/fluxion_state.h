// What Fluxion keeps of each request beside its KV cache, layer by layer: the anchor, a query at which the host segment was
// observed as a whole, and what its heads' features are from then on.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "head_predictor.h"

namespace hybrid_sparse {

// An anchor serves so many rows that follow it: the predictor's samples lie no further behind theirs.
inline constexpr int kAnchorRows = 256;

struct FluxionRule {
  int layer;        // of the model, from 0
  float tau;        // error of the budgets among the anchor's features (eq. 2); > 0
  int granularity;  // tokens of a logical block; 0: of the least volume
  int dense_tokens;  // sequences of so many tokens or fewer attend to everything
};

// One request in one layer.
struct FluxionRequest {
  int tokens = 0;                // of the sequence the state is for; a decode row that follows has one more
  int anchor_tokens = 0;         // of the sequence that ends with the anchor
  bool observed = false;         // whether what follows the query is the anchor's
  std::vector<char> query;       // [q_heads][head_dim] of the KV's dtype; empty where nothing is known
  std::vector<float> query_floats;
  std::vector<float> features;   // [q_heads][feature::count], those of a decode step unset
  std::vector<float> key_mean;   // [kv_heads][head_dim] of the host segment
};

// The requests of one layer by slot. Written by the engine's call alone, and the KV heads of a slot by one task each.
class FluxionLayer {
 public:
  FluxionLayer(const HeadPredictor& predictor, const FluxionRule& rule) : predictor_(predictor), rule_(rule) {}
  FluxionLayer(const FluxionLayer&) = delete;
  FluxionLayer& operator=(const FluxionLayer&) = delete;

  const HeadPredictor& predictor() const { return predictor_; }
  const FluxionRule& rule() const { return rule_; }
  // The slot's state, empty where it is new; stays where it is until it is released.
  FluxionRequest& request(int slot);
  // Gives the slot's memory back; one without a state has none.
  void release(int slot);
  // For tests: the anchor's features, empty where none was observed, and the tokens of the sequence that ends with it.
  std::vector<float> anchor(int slot) const;
  int anchor_tokens(int slot) const;

 private:
  bool has(int slot) const { return slot < static_cast<int>(slots_.size()) && slots_[slot]; }

  const HeadPredictor& predictor_;
  FluxionRule rule_;
  std::vector<std::unique_ptr<FluxionRequest>> slots_;
};

}  // namespace hybrid_sparse
