#include "hgca_state.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <new>

namespace hybrid_sparse {
namespace {

constexpr std::align_val_t kCacheLine{64};

}  // namespace

HgcaPages::HgcaPages(const HgcaRule& rule, int seq_len)
    : pages((seq_len + kPageTokens - 1) / kPageTokens), sink_end(std::min(rule.sink_tokens / kPageTokens, pages)),
      recent_begin(std::max(sink_end, (seq_len - rule.window_tokens) / kPageTokens)) {}

void PackedPages::Free::operator()(char* memory) const { operator delete(memory, kCacheLine); }

PageTable PackedPages::table() const {
  static constexpr int32_t kOneBlock = 0;
  return {memory_.get(), nullptr, &kOneBlock, 0, page_bytes_, 0, INT_MAX};
}

void PackedPages::reserve(int tokens, int64_t page_bytes) {
  page_bytes_ = page_bytes;
  const int64_t wanted = (tokens + kPageTokens - 1) / kPageTokens;
  if (wanted <= capacity_) return;
  // A quarter more than before, so that a sequence that grows page by page is seldom copied.
  const int64_t capacity = std::max(wanted, capacity_ + (capacity_ + 3) / 4);
  std::unique_ptr<char, Free> memory(static_cast<char*>(operator new(capacity * page_bytes, kCacheLine)));
  const int64_t held = pages() * page_bytes;
  if (held > 0) std::memcpy(memory.get(), memory_.get(), held);
  std::memset(memory.get() + held, 0xff, capacity * page_bytes - held);  // NaN, so that a read of unwritten memory would show
  memory_ = std::move(memory);
  capacity_ = capacity;
}

void PackedPages::begin(int tokens, int64_t page_bytes) {
  positions_.clear();
  if (capacity_ > 2 * ((tokens + kPageTokens - 1) / kPageTokens)) {
    memory_.reset();
    capacity_ = 0;
  }
  reserve(tokens, page_bytes);
}

void HgcaRequest::attended(int seq_len) {
  tokens = seq_len;
  judge_rows = 0;
  std::vector<char>().swap(judges);
}

HgcaLayer::HgcaLayer(int group, int kv_heads, const HgcaRule& rule) : rule_(rule), group_(group), kv_heads_(kv_heads) {}

HgcaRequest& HgcaLayer::request(int slot) {
  if (static_cast<int>(slots_.size()) <= slot) slots_.resize(slot + 1);
  if (!slots_[slot]) {
    slots_[slot] = std::make_unique<HgcaRequest>();
    slots_[slot]->heads.resize(kv_heads_);
  }
  return *slots_[slot];
}

HgcaRequest& HgcaLayer::request(int slot, int tokens) {
  HgcaRequest& found = request(slot);
  for (HgcaHead& head : found.heads) reserve_averages(head, tokens);
  return found;
}

// No position wraps around before the ring has its full size, so existing averages keep their places.
void HgcaLayer::reserve_averages(HgcaHead& head, int tokens) const {
  const auto whole_pages = [](int64_t count) { return (count + kPageTokens - 1) / kPageTokens * kPageTokens; };
  const int64_t held = averaged_tokens(head);
  if (held >= std::min<int64_t>(tokens, ring_tokens())) return;
  const int64_t wanted = std::min(ring_tokens(), whole_pages(std::max<int64_t>(tokens, held + held / 4)));
  std::vector<float> averages(group_ * wanted, 0.0f);
  for (int g = 0; g < group_; ++g) std::copy_n(head.averages.data() + g * held, held, averages.data() + g * wanted);
  head.averages = std::move(averages);
}

void HgcaLayer::release(int slot) {
  if (slot < static_cast<int>(slots_.size())) slots_[slot].reset();
}

int64_t HgcaLayer::packed_bytes() const {
  int64_t bytes = 0;
  for (const auto& request : slots_) {
    if (!request) continue;
    for (const HgcaHead& head : request->heads) bytes += head.packed.bytes();
  }
  return bytes;
}

std::vector<int32_t> HgcaLayer::salient(int slot, int kv_head) const {
  if (slot >= static_cast<int>(slots_.size()) || !slots_[slot]) return {};
  return slots_[slot]->heads[kv_head].packed.positions();
}

std::vector<float> HgcaLayer::averages(int slot, int kv_head) const {
  if (slot >= static_cast<int>(slots_.size()) || !slots_[slot]) return {};
  HgcaRequest& request = *slots_[slot];
  std::vector<float> result;
  for (int g = 0; g < group_; ++g)
    for (int p = HgcaPages(rule_, request.tokens).recent_begin * kPageTokens; p < request.tokens; ++p)
      result.push_back(*average(request.heads[kv_head], g, p));
  return result;
}

}  // namespace hybrid_sparse
