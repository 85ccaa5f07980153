// Query rows against the summaries of a range of pages.
// Included inside the namespace and target region of one instruction set, after code_ops.inl and blocks_ahead.inl.

// Multiplies one run of dims of `Pages` summaries, from the tile's `first_page` on, by the rows' operands. `Last`: half a run.
template <class T, int Rows, int Pages, bool Last>
[[gnu::always_inline]]
static inline void add_run(const char* summaries, int64_t bytes, const typename T::Operand* const* queries, int element,
                           const SummariesAhead& ahead, int first_page, vf (&acc)[Rows][Pages]) {
  const int64_t at = element * static_cast<int64_t>(sizeof(typename T::Element));
  typename T::Run run[Pages];
  for (int p = 0; p < Pages; ++p) {
    const char* from = summaries + (first_page + p) * bytes + at;
    if constexpr (Last)
      run[p] = T::load_half_run(from);
    else
      run[p] = T::load_run(from);
    if (ahead) prefetch(ahead.page(first_page + p) + at);
  }
  for (int r = 0; r < Rows; ++r) {
    typename T::Run q;
    if constexpr (Last)
      q = T::load_half_operands(queries[r] + element);
    else
      q = T::load_operands(queries[r] + element);
    for (int p = 0; p < Pages; ++p) acc[r][p] = T::multiply_run(acc[r][p], run[p], q);
  }
}

// Rows against `Pages` summaries that lie one after another; row r's scores go to scores[r] + `first_page`. `Last`: half a run
// follows the whole ones. It takes as many pages at once as leave the sums in registers. If the loop chose the variant at run time,
// GCC would store them in memory in every turn.
template <class T, int Rows, int Pages, bool Last>
static inline void score_tile(const ScoreArgs& args, const void* const* rows, const char* summaries, const SummariesAhead& ahead,
                              float* const* scores, int first_page) {
  using Operand = typename T::Operand;
  constexpr int kAtOnce = Pages < kPagesAtOnce ? Pages : kPagesAtOnce;
  const int64_t bytes = args.table.summary_bytes;
  const int whole = args.summary_elements / T::run_elements * T::run_elements;
  const Operand* queries[Rows];
  for (int r = 0; r < Rows; ++r) queries[r] = static_cast<const Operand*>(rows[r]);
  vf by_lane[kScoreRows][kScorePages];
  for (int r = 0; r < kScoreRows; ++r)
    for (int p = r < Rows ? Pages : 0; p < kScorePages; ++p) by_lane[r][p] = zero();
  for (int page = 0; page < Pages; page += kAtOnce) {
    vf acc[Rows][kAtOnce];
    for (int r = 0; r < Rows; ++r)
      for (int p = 0; p < kAtOnce; ++p) acc[r][p] = zero();
    for (int element = 0; element < whole; element += T::run_elements)
      add_run<T, Rows, kAtOnce, false>(summaries, bytes, queries, element, ahead, page, acc);
    if constexpr (Last) add_run<T, Rows, kAtOnce, true>(summaries, bytes, queries, whole, ahead, page, acc);
    for (int r = 0; r < Rows; ++r)
      for (int p = 0; p < kAtOnce; ++p) by_lane[r][page + p] = acc[r][p];
  }
  sum_lanes<Rows, Pages>(by_lane, args.scale, [&](int r) { return scores[r] + first_page; });
}

template <class T, int Rows, int Pages>
static inline void score_row_tile(const ScoreArgs& args, const void* const* queries, int rows, const char* summaries,
                                  const SummariesAhead& ahead, float* const* scores, int first_page) {
  if (rows == Rows) {
    if (args.summary_elements % T::run_elements == 0)
      score_tile<T, Rows, Pages, false>(args, queries, summaries, ahead, scores, first_page);
    else if constexpr (T::run_elements > 16)
      score_tile<T, Rows, Pages, true>(args, queries, summaries, ahead, scores, first_page);
  } else if constexpr (Rows > 1) {
    score_row_tile<T, Rows - 1, Pages>(args, queries, rows, summaries, ahead, scores, first_page);
  }
}

// What scoring by key codes has of a chunk of pages before their logarithms are taken; in ScoreArgs::scratch.
struct CodeChunk {
  float* sums;   // [heads * rows][kScoreChunkPages]
  float* means;  // likewise
  float* steps;  // [heads][kScoreChunkPages]
};

// Scores the pages [first_page, first_page + num_pages) of a call; with key codes only the first half. Both halves of a later block
// are fetched at the same time if tiles fill it.
template <class T>
static void score_chunk(const ScoreArgs& args, int first_page, int num_pages, const CodeChunk& chunk) {
  const PageTable& table = args.table;
  const CodeTileArgs code_args = {args.head_dim, args.code_bits, args.table.summary_bytes};
  const int per_block = table.pages_per_block;
  const int64_t head_bytes = per_block * table.summary_bytes;
  const int64_t half_block = args.heads * head_bytes / 2;
  const bool by_halves = per_block % kScorePages == 0;
  const BlocksAhead blocks(args);
  int done = 0;
  int first = first_page % per_block;
  for (int block = first_page / per_block; done < num_pages; ++block, first = 0) {
    const char* here = blocks.summaries(block);
    const char* soon = blocks.soon(block);
    blocks.touch_later(block);
    const int count = per_block - first < num_pages - done ? per_block - first : num_pages - done;
    for (int head = 0; head < args.heads; ++head) {
      for (int i = 0; i < count;) {
        const bool whole = count - i >= kScorePages;
        const int64_t at = head * head_bytes + (first + i) * table.summary_bytes;
        SummariesAhead ahead = {};
        if (soon && by_halves)
          ahead = {soon + at / 2, soon + half_block + at / 2, table.summary_bytes};
        else if (soon)
          ahead = {soon + at, soon + at + table.summary_bytes, 2 * table.summary_bytes};
        for (int row = 0; row < args.rows; row += kScoreRows) {
          const int rows = args.rows - row < kScoreRows ? args.rows - row : kScoreRows;
          const int first_row = head * args.rows + row;
          const void* const* queries = args.queries + first_row;
          float* const* scores = args.scores + first_row;
          const int page = first_page - args.page_begin + done + i;
          const SummariesAhead next = row == 0 ? ahead : SummariesAhead{};
          const int in_chunk = first_row * kScoreChunkPages + done + i;
          if (args.code_bits > 0)
            score_codes(code_args, queries, rows, whole, here + at, next, chunk.sums + in_chunk, chunk.means + in_chunk,
                        chunk.steps + head * kScoreChunkPages + done + i);
          else if (whole)
            score_row_tile<T, kScoreRows, kScorePages>(args, queries, rows, here + at, next, scores, page);
          else
            score_row_tile<T, kScoreRows, 1>(args, queries, rows, here + at, next, scores, page);
        }
        i += whole ? kScorePages : 1;
      }
    }
    done += count;
  }
}

template <class T>
static void score(const ScoreArgs& args) {
  if (args.code_bits == 0) return score_chunk<T>(args, args.page_begin, args.num_pages, {});
  const int rows = args.heads * args.rows;
  const int of_rows = rows * kScoreChunkPages;
  const CodeChunk chunk = {args.scratch, args.scratch + of_rows, args.scratch + 2 * of_rows};
  for (int done = 0; done < args.num_pages; done += kScoreChunkPages) {
    const int count = args.num_pages - done < kScoreChunkPages ? args.num_pages - done : kScoreChunkPages;
    score_chunk<T>(args, args.page_begin + done, count, chunk);
    for (int row = 0; row < rows; ++row)
      finish_codes(*static_cast<const CodeQuery*>(args.queries[row]), chunk.sums + row * kScoreChunkPages,
                   chunk.means + row * kScoreChunkPages, chunk.steps + row / args.rows * kScoreChunkPages, count,
                   args.scores[row] + done);
  }
}
