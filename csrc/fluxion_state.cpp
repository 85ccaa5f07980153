#include "fluxion_state.h"

namespace hybrid_sparse {

FluxionRequest& FluxionLayer::request(int slot) {
  if (static_cast<int>(slots_.size()) <= slot) slots_.resize(slot + 1);
  if (!slots_[slot]) slots_[slot] = std::make_unique<FluxionRequest>();
  return *slots_[slot];
}

void FluxionLayer::release(int slot) {
  if (has(slot)) slots_[slot].reset();
}

std::vector<float> FluxionLayer::anchor(int slot) const {
  return has(slot) && slots_[slot]->observed ? slots_[slot]->features : std::vector<float>();
}

int FluxionLayer::anchor_tokens(int slot) const { return has(slot) ? slots_[slot]->anchor_tokens : 0; }

}  // namespace hybrid_sparse
