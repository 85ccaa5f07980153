// Included inside the namespace and target region of one instruction set.

// The blocks of a call that scores summaries, as the scoring of one of them sees those that follow. One is fetched. A line of each
// of the next few after it is touched, for their address translations, which then overlap.
class BlocksAhead {
 public:
  explicit BlocksAhead(const ScoreArgs& args)
      : table_(args.table), distance_(static_cast<int>((kBytesAhead - 1) / block_bytes(args)) + 1),
        last_((args.page_begin + args.num_pages - 1) / args.table.pages_per_block) {}

  const char* summaries(int block) const { return table_.summaries + table_.block_table[block] * table_.block_stride; }
  // The summaries to fetch while those of `block` are scored; null: none are left.
  const char* soon(int block) const { return block + distance_ <= last_ ? summaries(block + distance_) : nullptr; }
  // Always inlined, as `prefetch` is: GCC drops calls that only fetch ahead.
  [[gnu::always_inline]] void touch_later(int block) const {
    if (block % kTouchedBlocks != 0) return;
    const int most = block + distance_ + kTouchedBlocks;
    const int end = most < last_ ? most : last_;
    for (int later = block + distance_ + 1; later <= end; ++later) prefetch(summaries(later));
  }

 private:
  static constexpr int64_t kBytesAhead = 8192;
  static constexpr int kTouchedBlocks = 4;
  static int64_t block_bytes(const ScoreArgs& args) {
    return int64_t{args.heads} * args.table.pages_per_block * args.table.summary_bytes;
  }

  const PageTable& table_;
  int distance_;
  int last_;
};
