#include "slot_table.h"

#include <algorithm>
#include <bit>
#include <stdexcept>

namespace hybrid_sparse {

PageMap::PageMap(int entries) : entries_(std::bit_ceil(static_cast<size_t>(std::max(entries, 1)) * 2)) {}

size_t PageMap::home(int64_t page) const {
  // Fibonacci hashing (Knuth, TAOCP vol. 3, 6.4): a product with 2^64 / golden ratio, its upper half folded into the lower.
  const uint64_t mixed = static_cast<uint64_t>(page) * 0x9E3779B97F4A7C15u;
  return (mixed ^ (mixed >> 32)) & (entries_.size() - 1);
}

int32_t PageMap::find(int64_t page) const {
  for (size_t at = home(page); entries_[at].slot >= 0; at = (at + 1) & (entries_.size() - 1))
    if (entries_[at].page == page) return entries_[at].slot;
  return -1;
}

void PageMap::insert(int64_t page, int32_t slot) {
  size_t at = home(page);
  while (entries_[at].slot >= 0) at = (at + 1) & (entries_.size() - 1);
  entries_[at] = {page, slot};
  ++size_;
}

void PageMap::erase(int64_t page) {
  const size_t mask = entries_.size() - 1;
  size_t hole = home(page);
  while (entries_[hole].page != page || entries_[hole].slot < 0) hole = (hole + 1) & mask;
  // An entry after the hole moves into it, unless that would put it before its home. So no marks of erased entries are left.
  for (size_t at = (hole + 1) & mask; entries_[at].slot >= 0; at = (at + 1) & mask) {
    if (((at - home(entries_[at].page)) & mask) < ((at - hole) & mask)) continue;
    entries_[hole] = entries_[at];
    hole = at;
  }
  entries_[hole].slot = -1;
  --size_;
}

SlotTable::SlotTable(int shares, int every, Order order, int layer_shift)
    : every_(every), layer_shift_(layer_shift), order_(order), map_(shares * every), shares_(shares),
      slots_(static_cast<size_t>(shares) * every + shares) {
  for (int share = 0; share < shares; ++share) {
    for (int slot = every; slot-- > 0;) shares_[share].free.push_back(share * every + slot);
    slots_[end_of(share)].before = slots_[end_of(share)].behind = end_of(share);
  }
}

int SlotTable::share_of(int64_t page) const {
  const int64_t share = shares_count() == 1 ? 0 : layer_of(page);
  if (page < 0 || share >= shares_count())
    throw std::invalid_argument("page=" + std::to_string(page) + ": is of no layer of the pool");
  return static_cast<int>(share);
}

void SlotTable::link_last(int32_t slot, int share) {
  const int32_t end = end_of(share), last = slots_[end].before;
  slots_[slot].before = last;
  slots_[slot].behind = end;
  slots_[last].behind = slots_[end].before = slot;
}

void SlotTable::unlink(int32_t slot) {
  slots_[slots_[slot].before].behind = slots_[slot].behind;
  slots_[slots_[slot].behind].before = slots_[slot].before;
}

void SlotTable::use(int32_t slot, int64_t page) {
  if (order_ != Order::cyclic) return;
  const int64_t layer = layer_of(page);
  if (layer >= static_cast<int64_t>(turns_.size())) turns_.resize(layer + 1);
  if (layer != turn_layer_) ++turns_[turn_layer_ = layer];
  slots_[slot].turn = turns_[layer];
}

// The turn under way does not count.
bool SlotTable::had_no_use(const Slot& slot) const {
  const int64_t layer = layer_of(slot.page);
  return turns_[layer] - slot.turn > (layer == turn_layer_ ? 1 : 0);
}

// Makes room for a part. Passes only once over the pages that stay because they are pinned or wanted.
bool SlotTable::fit(const int64_t* pages, int count, int share, Refused& refused) {
  ++calls_;
  missing_.clear();
  int found = 0;
  for (int i = 0; i < count; ++i) {
    const int32_t slot = map_.find(pages[i]);
    if (slot < 0) {
      missing_.push_back(pages[i]);
    } else if (slots_[slot].wanted != calls_) {
      slots_[slot].wanted = calls_;
      ++found;
    }
  }
  Share& of = shares_[share];
  if (missing_.size() <= of.free.size()) return true;
  std::sort(missing_.begin(), missing_.end());
  missing_.erase(std::unique(missing_.begin(), missing_.end()), missing_.end());
  if (missing_.size() <= of.free.size()) return true;
  const size_t needed = missing_.size() - of.free.size();
  victims_.clear();
  const int32_t end = end_of(share);
  int32_t at = slots_[end].behind;
  for (; at != end && victims_.size() < needed; at = slots_[at].behind) {
    if (order_ == Order::cyclic && !had_no_use(slots_[at])) break;
    if (may_go(slots_[at])) victims_.push_back(at);
  }
  if (at != end && victims_.size() < needed)  // cyclic: `at` is the first page that its layer had a use for
    for (int32_t last = slots_[end].before; victims_.size() < needed; last = slots_[last].before) {
      if (may_go(slots_[last])) victims_.push_back(last);
      if (last == at) break;
    }
  if (victims_.size() < needed) {
    refused.wanted = found + static_cast<int>(missing_.size());
    refused.pinned = of.pinned;
    return false;
  }
  for (const int32_t victim : victims_) free_slot(victim);
  evictions_ += static_cast<int64_t>(needed);
  return true;
}

void SlotTable::take_part(const int64_t* pages, int count, int share, int32_t* slots, uint8_t* fresh) {
  for (int i = 0; i < count; ++i) {
    int32_t slot = map_.find(pages[i]);
    if (slot < 0) {
      slot = shares_[share].free.back();
      shares_[share].free.pop_back();
      map_.insert(pages[i], slot);
      slots_[slot].page = pages[i];
      link_last(slot, share);
      fresh[i] = 1;
    } else if (order_ != Order::fifo) {
      unlink(slot);
      link_last(slot, share);
    }
    use(slot, pages[i]);
    if (slots_[slot].pins++ == 0) ++shares_[share].pinned;
    slots[i] = slot;
  }
}

std::vector<SlotTable::Refused> SlotTable::take(const int64_t* pages, const uint8_t* wanted, int parts, int width,
                                                int32_t* slots, uint8_t* fresh) {
  std::vector<Refused> all_refused;
  std::fill_n(slots, static_cast<int64_t>(parts) * width, -1);
  std::fill_n(fresh, static_cast<int64_t>(parts) * width, 0);
  for (int part = 0; part < parts; ++part) {
    const int64_t offset = static_cast<int64_t>(part) * width;
    const int64_t* of_part = pages + offset;
    const int count = static_cast<int>(std::find_if(of_part, of_part + width, [](int64_t page) { return page < 0; }) -
                                       of_part);
    if (!wanted[part] || count == 0) continue;
    const int share = share_of(of_part[0]);
    Refused refused{part, 0, 0};
    if (fit(of_part, count, share, refused))
      take_part(of_part, count, share, slots + offset, fresh + offset);
    else
      all_refused.push_back(refused);
  }
  return all_refused;
}

void SlotTable::unpin(const int64_t* pages, int count) {
  for (int i = 0; i < count; ++i) {
    const int32_t slot = map_.find(pages[i]);
    if (slot < 0 || slots_[slot].pins == 0)
      throw std::invalid_argument("page=" + std::to_string(pages[i]) + ": is not pinned");
    if (--slots_[slot].pins == 0) --shares_[share_of(pages[i])].pinned;
  }
}

void SlotTable::free_slot(int32_t slot) {
  Share& share = shares_[slot / every_];
  if (slots_[slot].pins > 0) --share.pinned;
  map_.erase(slots_[slot].page);
  unlink(slot);
  slots_[slot] = Slot{};
  share.free.push_back(slot);
}

int SlotTable::drop(const int64_t* pages, int count) {
  int dropped = 0;
  for (int i = 0; i < count; ++i)
    if (const int32_t slot = map_.find(pages[i]); slot >= 0) {
      free_slot(slot);
      ++dropped;
    }
  return dropped;
}

void SlotTable::slots_of(const int64_t* pages, int count, int32_t* slots) const {
  for (int i = 0; i < count; ++i) slots[i] = map_.find(pages[i]);
}

bool SlotTable::is_idle_run(int32_t first, int length) const {
  if (first < 0 || length < 0 || first + int64_t{length} > int64_t{shares_count()} * every_)
    throw std::out_of_range("slots " + std::to_string(first) + " to " + std::to_string(first + int64_t{length}) + ": there are " +
                            std::to_string(int64_t{shares_count()} * every_));
  return std::all_of(slots_.begin() + first, slots_.begin() + first + length,
                     [](const Slot& slot) { return slot.pins == 0 && !slot.aside; });
}

void SlotTable::set_aside(const int32_t* firsts, int runs, int length, uint8_t* taken) {
  for (int run = 0; run < runs; ++run) {
    taken[run] = is_idle_run(firsts[run], length);
    for (int32_t slot = firsts[run]; taken[run] && slot < firsts[run] + length; ++slot) {
      if (slots_[slot].page >= 0) {
        free_slot(slot);
        ++evictions_;
      }
      slots_[slot].aside = true;
    }
  }
  for (Share& share : shares_) std::erase_if(share.free, [this](int32_t slot) { return slots_[slot].aside; });
}

void SlotTable::give_back(const int32_t* firsts, int runs, int length) {
  for (int run = 0; run < runs; ++run)  // before any is free
    for (int32_t slot = firsts[run] + length; slot-- > firsts[run];)
      if (!slots_.at(slot).aside) throw std::invalid_argument("slot=" + std::to_string(slot) + ": is in use");
  for (int run = 0; run < runs; ++run)
    for (int32_t slot = firsts[run] + length; slot-- > firsts[run];) {
      slots_[slot].aside = false;
      shares_[slot / every_].free.push_back(slot);
    }
}

int SlotTable::pinned() const {
  int pages = 0;
  for (const Share& share : shares_) pages += share.pinned;
  return pages;
}

std::vector<int64_t> SlotTable::pages() const {
  std::vector<int64_t> result;
  for (int slot = 0; slot < shares_count() * every_; ++slot)
    if (slots_[slot].page >= 0) result.push_back(slots_[slot].page);
  return result;
}

std::string SlotTable::contradiction() const {
  int held = 0;
  for (int share = 0; share < shares_count(); ++share) {
    std::vector<bool> seen(every_);  // slots of the share that are free or in its order
    const auto saw = [&](int32_t slot) -> bool {
      if (slot / every_ != share || seen[slot - share * every_]) return false;
      return seen[slot - share * every_] = true;
    };
    for (const int32_t slot : shares_[share].free)
      if (!saw(slot) || slots_[slot].page >= 0 || slots_[slot].pins) return "a slot is lost or held twice";
    int pinned = 0;
    for (int32_t at = slots_[end_of(share)].behind; at != end_of(share); at = slots_[at].behind) {
      if (!saw(at)) return "a page stands twice in the order";
      if (slots_[slots_[at].behind].before != at) return "the order is torn";
      const int64_t page = slots_[at].page;
      if (page < 0 || map_.find(page) != at) return "the order and the slots hold different pages";
      if (share_of(page) != share) return "a page lies in another layer's share";
      if (slots_[at].pins < 0) return "a pin count is below 0";
      pinned += slots_[at].pins > 0;
      ++held;
    }
    for (int32_t slot = share * every_; slot < (share + 1) * every_; ++slot)
      if (slots_[slot].aside && (slots_[slot].pins || !saw(slot))) return "a slot that is set aside is in use";
    if (std::find(seen.begin(), seen.end(), false) != seen.end()) return "a slot is lost or held twice";
    if (pinned != shares_[share].pinned) return "the number of pinned pages is wrong";
  }
  return held == map_.size() ? "" : "the order and the slots hold different pages";
}

}  // namespace hybrid_sparse
