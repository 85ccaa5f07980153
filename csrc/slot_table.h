// Which page of the host store lies in which slot of the device pool, and which slots may not be taken. It has numbers only; the
// memory is elsewhere. A page has at most one slot, and a pinned page keeps its slot until it is unpinned.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace hybrid_sparse {

// The slot of every page that has one: open addressing with linear probing, at most half full.
class PageMap {
 public:
  explicit PageMap(int entries);
  int32_t find(int64_t page) const;  // its slot; -1 if it has none
  void insert(int64_t page, int32_t slot);  // the page has no slot yet
  void erase(int64_t page);                 // the page has a slot
  int size() const { return size_; }

 private:
  struct Entry {
    int64_t page;
    int32_t slot = -1;
  };
  size_t home(int64_t page) const;

  std::vector<Entry> entries_;  // a power of two
  int size_ = 0;
};

class SlotTable {
 public:
  enum class Order {
    lru,   // the page that was used longest ago goes first (PSA, section 3.4), since queries of consecutive tokens are alike
    fifo,  // the page that was loaded first goes first, however often it is used
    // Pages that their layer did not use in its last turn go first, then the page that was used last. Layers take turns,
    // and each wants much the same pages in every step. If the pages of one step do not fit, LRU evicts those of the layer
    // whose turn comes next, and never finds any page. The page whose next use is furthest away is one that the layer
    // under way has just used. If that one goes, as many of a step's pages stay as there are slots.
    cyclic,
  };

  // There are `shares` times `every` slots: one share for all layers, or one for each layer, which may use no other.
  // The layer of a page is its number without the lower `layer_shift` bits.
  SlotTable(int shares, int every, Order order, int layer_shift);

  struct Refused {  // a part that did not fit next to the pinned pages
    int part, wanted, pinned;  // wanted and pinned: pages
  };
  // Give slots to the pages that have none, and pin each page once for each time that it is named. A part is `width` numbers:
  // pages, all of one layer, then negative numbers. A part that is not wanted or is refused, always as a whole, stays as it
  // is. slots: [parts, width], -1 where there is no page or none was taken. fresh: [parts, width], 1 where the slot still
  // holds what others left there; a page that is named twice is fresh once.
  std::vector<Refused> take(const int64_t* pages, const uint8_t* wanted, int parts, int width, int32_t* slots,
                            uint8_t* fresh);
  // Undo one pin of each page; it keeps its slot until another page needs it. Throws std::invalid_argument if a page has no pin.
  void unpin(const int64_t* pages, int count);
  // Free the slots of pages and their pins, because what lies there is not the page. Returns how many of the pages had a slot.
  int drop(const int64_t* pages, int count);
  // The slots of pages, -1 where a page has none. The order stays as it is.
  void slots_of(const int64_t* pages, int count, int32_t* slots) const;
  // Take runs of `length` slots out of use until they are given back; this evicts what lies there. taken: [runs], 0 if a slot
  // of the run is pinned or out of use, and then the run stays as it was. Throws std::out_of_range if there are no such slots.
  void set_aside(const int32_t* firsts, int runs, int length, uint8_t* taken);
  void give_back(const int32_t* firsts, int runs, int length);  // runs that were set aside

  int64_t evictions() const { return evictions_; }  // pages that made room for others
  int resident() const { return map_.size(); }      // pages that have a slot
  int pinned() const;                               // resident pages that may not be evicted
  std::vector<int64_t> pages() const;               // those that have a slot, by slot
  std::string contradiction() const;                // what is lost, held twice or out of order; empty: nothing

 private:
  struct Slot {
    int64_t page = -1;  // -1: free
    int64_t turn = 0;   // cyclic: its layer's turn at the page's last use
    int64_t wanted = 0;  // the last call of `fit` that wanted the page
    int32_t pins = 0;
    bool aside = false;  // out of use
    int32_t before = 0, behind = 0;  // neighbours in the order of the share
  };
  struct Share {
    std::vector<int32_t> free;  // the last is given first
    int pinned = 0;
  };

  int share_of(int64_t page) const;
  int64_t layer_of(int64_t page) const { return page >> layer_shift_; }
  int32_t end_of(int share) const { return shares_count() * every_ + share; }  // the first follows it, the last precedes it
  int shares_count() const { return static_cast<int>(shares_.size()); }
  void take_part(const int64_t* pages, int count, int share, int32_t* slots, uint8_t* fresh);
  bool fit(const int64_t* pages, int count, int share, Refused& refused);
  bool may_go(const Slot& slot) const { return slot.pins == 0 && slot.wanted != calls_; }
  bool had_no_use(const Slot& slot) const;
  void use(int32_t slot, int64_t page);
  void link_last(int32_t slot, int share);
  void unlink(int32_t slot);
  void free_slot(int32_t slot);
  bool is_idle_run(int32_t first, int length) const;

  int every_, layer_shift_;
  Order order_;
  PageMap map_;
  std::vector<Share> shares_;
  std::vector<Slot> slots_;     // then one for the end of each share's order
  std::vector<int64_t> turns_;  // of each layer, including the one under way
  int64_t turn_layer_ = -1;     // whose turn it is
  int64_t calls_ = 0;           // of `fit`
  int64_t evictions_ = 0;
  std::vector<int64_t> missing_;  // by `fit`
  std::vector<int32_t> victims_;
};

}  // namespace hybrid_sparse
