// How far the scores that key codes estimate may be off. Progressive selection takes each head's shares at the upper end when it
// orders a group's pages: a page that a head underrates would otherwise come behind all those of heads that attend evenly.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "convert.h"
#include "engine.h"

namespace hybrid_sparse {
namespace {

constexpr float kDeviations = 3.0f;
constexpr int kSampledPages = 16;  // whose factors say how long keys are
constexpr int kSums = 16;          // side by side, none of which waits for another

// An estimated score's standard deviation by bits of the code, for a query and a factor of 1: sqrt(E[e^2] - E[x e]^2) with e the
// code's element for x, an element of a rotated key, normally distributed. The element is the sign of x, or with two bits three
// times that if |x| > 1. See `score_deviation` (vllm_hybrid_sparse/kernels/key_codes/reference.py).
constexpr float kDeviationOfBits[] = {0.0f, 0.60281f, 0.64850f};

}  // namespace

void Engine::bound_errors(const LayerCall& call, const Batch& batch, Item& item) const {
  const Layout& layout = geometry_.layout;
  const CodeLayout at(layout.head_dim, layout.code_bits);
  const PageTable table = page_table(call, batch, item.request, item.head);
  const int pages = std::min(kSampledPages, item.candidates());
  float factors = 0.0f;
  for (int p = 0; p < pages; ++p) {
    const char* summary = table.summary(item.candidate_begin + p);
    int of_page = 0;
    for (int t = 0; t < kPageTokens; ++t) of_page += static_cast<uint8_t>(summary[at.factors + t]);
    uint16_t unit;
    std::memcpy(&unit, summary + at.units, sizeof(unit));
    factors += bf16_to_float(unit) * static_cast<float>(of_page);
  }
  const float of_length =
      kDeviations * kDeviationOfBits[layout.code_bits] * geometry_.scale * factors / static_cast<float>(pages * kPageTokens);
  alignas(64) float query[kMaxHeadDim];
  for (int g = 0; g < geometry_.group(); ++g) {
    kernels_.to_float(query_row(call, item.token, item.head * geometry_.group() + g), layout.head_dim, query);
    float squares[kSums] = {};
    for (int d = 0; d < layout.head_dim; d += kSums)
      for (int i = 0; i < kSums; ++i) squares[i] += query[d + i] * query[d + i];
    item.error_bounds[g] = of_length * std::sqrt(std::accumulate(squares, squares + kSums, 0.0f));
  }
}

}  // namespace hybrid_sparse
