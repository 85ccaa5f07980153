// Attention of query rows to pages: scores, online softmax, values. It goes through chunks of kChunkPages pages, as flash attention
// does. All rows attend to a chunk before the next, so a page is read from memory once, whatever the number of rows. Memory is busy
// all the time: while keys are scored, their values are fetched; while values are added up, the next chunk's keys are. Fetches take
// a line of each page in turn. A page's first lines wait for address translation and for the hardware's prefetcher to start; this
// way four pages wait together.
// Included inside the namespace and target region of one instruction set, after traits.inl.

inline constexpr int kChunkTokens = kChunkPages * kPageTokens;

template <class T>
struct Chunk {
  const char* keys[kChunkPages];
  const char* values[kChunkPages];
  const char* soon[kChunkPages];  // fetched while the keys are scored: their values, or the next keys if no values are read
  const char* next[kChunkPages];  // keys of the following chunk, fetched while values are added up
  int first_ahead;                // the first page of `next` that this row tile fetches
  int first_token[kChunkPages];
  int value_steps[kChunkPages];  // steps whose tokens are all seen by some row; 0 for a filler page
  bool half_step[kChunkPages];   // one more step that has only its first token; the second must not be read
  int pages;
  int whole_at;  // a row that sees this many tokens sees the whole chunk; INT_MAX if it is not full or has hidden tokens
  int position;  // of its first page in reading order
};

// Columns (pages of scores, or runs of 16 dims of values) in a tile of `Rows` rows, so that its sums stay in registers.
template <int Rows>
inline constexpr int kColumns = Rows > kRowTile ? kColumnTile / 2 : kColumnTile;

// acc[r][j] += the step at column(j) times the operand at operand(r).
template <class T, int Rows, int Columns, class Column, class Operand>
[[gnu::always_inline]]
static inline void multiply_step(vf (&acc)[Rows][Columns], const Column& column, const Operand& operand) {
  if constexpr (T::template by_halves<Rows>) {
    multiply_halves(acc, column, operand);
  } else {
    typename T::Step x[Columns];
    for (int j = 0; j < Columns; ++j) {
      x[j] = T::load_step(column(j));
      T::pin(x[j]);
    }
    for (int r = 0; r < Rows; ++r) {
      const typename T::Broadcast q = T::broadcast(operand(r));
      for (int j = 0; j < Columns; ++j) acc[r][j] = T::multiply_add(acc[r][j], x[j], q);
    }
  }
}

template <class T, int Rows, bool Fetch>
[[gnu::always_inline]]
static inline void score_tile(const typename T::Op* const* queries, const Chunk<T>& chunk, int first_page, int steps,
                              float* scores) {
  constexpr int kStepBytes = kPageTokens * T::pack * static_cast<int>(sizeof(typename T::Element));
  constexpr int Columns = kColumns<Rows>;
  vf acc[Rows][Columns];
  for (int r = 0; r < Rows; ++r)
    for (int j = 0; j < Columns; ++j) acc[r][j] = zero();
  for (int s = 0; s < steps; ++s) {
    for (int j = 0; Fetch && j < Columns; ++j) prefetch(chunk.soon[first_page + j] + s * kStepBytes);
    multiply_step<T>(
        acc, [&](int j) { return chunk.keys[first_page + j] + s * kStepBytes; }, [&](int r) { return queries[r] + s; });
  }
  for (int r = 0; r < Rows; ++r)
    for (int j = 0; j < Columns; ++j) store(scores + r * kChunkTokens + (first_page + j) * kPageTokens, acc[r][j]);
}

template <class T, int Rows, int Columns, int Ahead>
[[gnu::always_inline]]
static inline void value_tile(const typename T::Op* weights, const Chunk<T>& chunk, int head_dim, int first_dim,
                              const float* rescale, float* out) {
  constexpr int kOpsPerRow = kChunkTokens / T::pack;
  constexpr int kOpsPerPage = kPageTokens / T::pack;
  constexpr int kColumnBytes = 16 * T::pack * static_cast<int>(sizeof(typename T::Element));
  constexpr int kAheadBytes = Columns * kColumnBytes / kChunkPages;  // a step's, from each page: they last for the whole chunk
  constexpr int kStepsPerLine = 64 / kAheadBytes;
  const int64_t step_bytes = int64_t{head_dim} * T::pack * static_cast<int>(sizeof(typename T::Element));
  vf acc[Rows][Columns];
  for (int r = 0; r < Rows; ++r)
    for (int j = 0; j < Columns; ++j)
      acc[r][j] = mul(load(out + r * head_dim + first_dim + 16 * j), set1(rescale[r]));
  for (int page = 0; page < chunk.pages; ++page) {
    const char* value = chunk.values[page] + first_dim / 16 * kColumnBytes;
    const int64_t ahead = int64_t{first_dim} / 16 * kColumnBytes * kOpsPerPage + int64_t{page} * kOpsPerPage * kAheadBytes;
    for (int s = 0; s < chunk.value_steps[page]; ++s) {
      for (int i = 0; i < Ahead && s % kStepsPerLine == 0; ++i)
        prefetch(chunk.next[chunk.first_ahead + i] + ahead + s * kAheadBytes);
      multiply_step<T>(
          acc, [&](int j) { return value + s * step_bytes + j * kColumnBytes; },
          [&](int r) { return weights + r * kOpsPerRow + page * kOpsPerPage + s; });
    }
    if constexpr (T::pack == 2) {
      if (!chunk.half_step[page]) continue;
      const int s = chunk.value_steps[page];
      for (int j = 0; j < Columns; ++j) {
        const typename T::Step v = T::load_half_step(value + s * step_bytes + j * kColumnBytes);
        for (int r = 0; r < Rows; ++r)
          acc[r][j] = T::multiply_add(acc[r][j], v, T::broadcast(weights + r * kOpsPerRow + page * kOpsPerPage + s));
      }
    }
  }
  asm("" : "+r"(out), "+r"(head_dim));  // compute the addresses again: kept, they would push sums out of registers
  for (int r = 0; r < Rows; ++r)
    for (int j = 0; j < Columns; ++j) store(out + r * head_dim + first_dim + 16 * j, acc[r][j]);
}

// Sets a row's scores of tokens [0, hidden) to -inf. Out of line, since few chunks have such tokens.
template <class T>
[[gnu::noinline]]
static void hide_tokens(const Chunk<T>& chunk, int hidden, float* scores) {
  for (int page = 0; page < chunk.pages; ++page)
    for (int token = 0; token < kPageTokens && chunk.first_token[page] + token < hidden; ++token)
      scores[page * kPageTokens + token] = -__builtin_inff();
}

// Turns one row's scores into weights and updates the row's running maximum and lightest page. Returns the factor by which the
// row's output and sum so far must shrink; `added` receives what the lanes add to the sum. The maximum nearly always stays the
// same, which costs one comparison.
template <class T>
[[gnu::always_inline]]
static inline float softmax_row(float* scores, const Chunk<T>& chunk, float scale, int visible, const int32_t* hidden,
                                float* row_max, float* lightest_page, typename T::Op* weights, vf& added) {
  constexpr int kOpsPerPage = kPageTokens / T::pack;
  const float minus_infinity = -__builtin_inff();
  vf x[kChunkPages];
  for (int page = 0; page < kChunkPages; ++page) x[page] = load(scores + page * kPageTokens);
  if (visible < chunk.whole_at) {
    if (hidden) {
      hide_tokens(chunk, *hidden, scores);
      for (int page = 0; page < kChunkPages; ++page) x[page] = load(scores + page * kPageTokens);
    }
    for (int page = 0; page < kChunkPages; ++page) {
      const int seen = page < chunk.pages ? visible - chunk.first_token[page] : 0;
      if (seen < kPageTokens) x[page] = keep_first(x[page], seen > 0 ? seen : 0, minus_infinity);
    }
  }
  const vf highest = mul(max(max(x[0], x[1]), max(x[2], x[3])), set1(scale));
  float rescale = 1.0f;
  if (any_above(highest, *row_max)) {
    const float new_max = reduce_max(highest);
    if (*row_max == minus_infinity) {
      rescale = 0.0f;
    } else {
      rescale = natural_exp(*row_max - new_max);
      if (lightest_page) *lightest_page *= rescale;
    }
    *row_max = new_max;
  } else if (*row_max == minus_infinity) {  // this row has seen nothing yet
    for (int page = 0; page < kChunkPages; ++page) T::store_weights(weights + page * kOpsPerPage, zero());
    added = zero();
    return rescale;
  }
  const vf factor = set1(scale * kLog2E), shift = set1(-*row_max * kLog2E);
  for (int page = 0; page < kChunkPages; ++page) {
    x[page] = T::exp2(fma(x[page], factor, shift));
    T::store_weights(weights + page * kOpsPerPage, x[page]);
  }
  added = add(add(x[0], x[1]), add(x[2], x[3]));
  if (lightest_page) {
    float sums[kChunkPages];
    reduce_add4(x, 1.0f, sums);
    for (int page = 0; page < chunk.pages; ++page)
      if (sums[page] < *lightest_page) *lightest_page = sums[page];
  }
  return rescale;
}

// Calls f<Ahead>(). `ahead`: pages that a row tile fetches ahead, as `attend_chunks` shares them out.
template <class F>
[[gnu::always_inline]]
static inline void with_ahead(int ahead, const F& f) {
  switch (ahead) {
    case 4: return f.template operator()<4>();
    case 2: return f.template operator()<2>();
    case 1: return f.template operator()<1>();
    default: return f.template operator()<0>();
  }
}

template <class T>
static inline void keep_scores(const AttendArgs& args, const Chunk<T>& chunk, int first_row, int rows, const float* scores) {
  for (int r = 0; r < rows; ++r) {
    float* kept = args.token_scores + (first_row + r) * args.token_scores_stride + int64_t{chunk.position} * kPageTokens;
    for (int token = 0; token < chunk.pages * kPageTokens; token += kPageTokens)
      store(kept + token, mul(load(scores + r * kChunkTokens + token), set1(args.scale)));
  }
}

// Adds the lanes of `rows` registers to the rows' sums, four rows at a time. Sets the next three registers to zero for that.
[[gnu::always_inline]]
static inline void add_to_sums(vf* added, int rows, const float* rescale, float* row_sum) {
  for (int r = rows; r < rows + 3; ++r) added[r] = zero();
  for (int r = 0; r < rows; r += 4) {
    float sums[4];
    reduce_add4(added + r, 1.0f, sums);
    for (int i = r; i < rows && i < r + 4; ++i) row_sum[i] = row_sum[i] * rescale[i] + sums[i - r];
  }
}

template <class T, bool Keep, int Rows>
static void attend_rows(const AttendArgs& args, const Chunk<T>& chunk, int first_row, int ahead) {
  using Op = typename T::Op;
  alignas(64) float scores[Rows * kChunkTokens];
  alignas(64) Op weights[Rows * (kChunkTokens / T::pack)];
  float rescale[Rows];
  const Op* queries[Rows];
  for (int r = 0; r < Rows; ++r) queries[r] = static_cast<const Op*>(args.queries[first_row + r]);
  const int steps = args.head_dim / T::pack;
  constexpr int Columns = kColumns<Rows>;
  for (int page = 0; page < chunk.pages; page += Columns) {
    if (first_row == 0)
      score_tile<T, Rows, true>(queries, chunk, page, steps, scores);
    else
      score_tile<T, Rows, false>(queries, chunk, page, steps, scores);
  }
  if constexpr (Keep) {
    keep_scores(args, chunk, first_row, Rows, scores);
    if (!args.out) return;
  }
  vf added[Rows + 3];
  for (int r = 0; r < Rows; ++r) {
    const int row = first_row + r;
    rescale[r] = softmax_row<T>(scores + r * kChunkTokens, chunk, args.scale, args.visible[row],
                                args.hidden ? args.hidden + row : nullptr, args.row_max + row,
                                args.page_lse_min ? args.page_lse_min + row : nullptr, weights + r * (kChunkTokens / T::pack), added[r]);
  }
  add_to_sums(added, Rows, rescale, args.row_sum + first_row);
  float* out = args.out + int64_t{first_row} * args.head_dim;
  with_ahead(ahead, [&]<int Ahead>() __attribute__((always_inline)) {
    int dim = 0;
    for (; dim + 16 * Columns <= args.head_dim; dim += 16 * Columns)
      value_tile<T, Rows, Columns, Ahead>(weights, chunk, args.head_dim, dim, rescale, out);
    for (; dim < args.head_dim; dim += 16)
      value_tile<T, Rows, 1, Ahead>(weights, chunk, args.head_dim, dim, rescale, out);
  });
}

// With few rows, a wide tile reads the pages only once. With many rows, a tile's loads set the limit: 6 rows by 4 columns need 10
// for 24 products, 8 by 2 need 10 for 16. By halves, tiles of two rows take less time a row than wider ones, whose sums go through
// memory.
template <class T>
static int rows_of_tile(int rows) {
  if (T::template by_halves<2> && rows > kRowTile) return 2;
  return rows > 2 * kWideRowTile ? kRowTile : kWideRowTile;
}

// Widens the chunk's pages of narrow elements to bf16, in a buffer of the thread. Such chunks fetch from memory only here: while
// keys are widened, their values; while values are widened, the next chunk's keys. A filler page is the first page again.
template <class T>
[[gnu::noinline]]
static void widen_chunk(Chunk<T>& chunk, int head_dim, bool scores_only) {
  const int part = kPageTokens * head_dim;
  const int64_t part_bytes = int64_t{part} * static_cast<int64_t>(sizeof(uint16_t));
  char* keys = widened_pages();
  char* values = keys + kChunkPages * part_bytes;
  for (int i = 0; i < chunk.pages; ++i) widen(chunk.keys[i], part, chunk.soon[i], keys + i * part_bytes);
  for (int i = 0; i < chunk.pages && !scores_only; ++i)
    widen(chunk.values[i], part, chunk.next[i], values + i * part_bytes);
  for (int i = 0; i < kChunkPages; ++i) {
    const int64_t at = (i < chunk.pages ? i : 0) * part_bytes;
    chunk.keys[i] = chunk.soon[i] = chunk.next[i] = keys + at;
    chunk.values[i] = values + at;
  }
}

template <class T, bool Keep, int Rows>
static void attend_row_tile(const AttendArgs& args, const Chunk<T>& chunk, int first_row, int rows, int ahead) {
  if (rows == Rows) {
    attend_rows<T, Keep, Rows>(args, chunk, first_row, ahead);
  } else if constexpr (Rows > 1) {
    attend_row_tile<T, Keep, Rows - 1>(args, chunk, first_row, rows, ahead);
  }
}

// How many row tiles of at most `tile_rows` rows there are.
static inline int tiles_of(int rows, int tile_rows) { return (rows + tile_rows - 1) / tile_rows; }

// The first row of one of `tiles` row tiles, which divide `rows` evenly.
static inline int tile_begin(int rows, int tiles, int tile) { return static_cast<int>(int64_t{rows} * tile / tiles); }

// Calls attend_tile(chunk, first row, rows, pages to fetch ahead) for all row tiles, chunk after chunk.
// Keep: also keeps the tokens' scores, and without `out` makes nothing else. It is a separate variant, so that plain attention
// does not test for it. With two variants GCC would inline the tiles into neither by itself.
template <class T, bool Keep, class AttendTile>
[[gnu::always_inline]]
static inline void attend_chunks(const AttendArgs& args, int tile_rows, const AttendTile& attend_tile) {
  const int head_dim = args.head_dim;
  const bool scores_only = Keep && !args.out;
  for (int r = 0; r < args.rows && !scores_only; ++r) {
    args.row_max[r] = -__builtin_inff();
    args.row_sum[r] = 0.0f;
    if (args.page_lse_min) args.page_lse_min[r] = __builtin_inff();
  }
  for (int64_t i = 0; i < int64_t{args.rows} * head_dim && !scores_only; i += 16) store(args.out + i, zero());
  int furthest = 0;
  for (int r = 0; r < args.rows; ++r) furthest = args.visible[r] > furthest ? args.visible[r] : furthest;
  int hidden = 0;
  for (int r = 0; args.hidden && r < args.rows; ++r) hidden = args.hidden[r] > hidden ? args.hidden[r] : hidden;

  const bool narrow = is_narrow(args.table, head_dim);
  const int64_t value_offset = args.table.page_bytes / 2;
  const int tiles = tiles_of(args.rows, tile_rows);
  const int share = tiles == 1 ? kChunkPages : tiles < kChunkPages ? kChunkPages / 2 : 1;
  const char* following[kChunkPages];
  const auto number = [&](int i) { return args.pages ? args.pages[i] : args.page_begin + i; };
  for (int i = 0; i < kChunkPages; ++i)
    following[i] = args.num_pages ? args.table.page(number(i < args.num_pages ? i : 0)) : nullptr;

  for (int begin = 0; begin < args.num_pages; begin += kChunkPages) {
    Chunk<T> chunk;
    chunk.pages = args.num_pages - begin < kChunkPages ? args.num_pages - begin : kChunkPages;
    chunk.position = begin;
    chunk.whole_at = chunk.pages < kChunkPages ? INT_MAX : 0;
    const bool more = begin + kChunkPages < args.num_pages;
    for (int i = 0; i < kChunkPages; ++i) {
      chunk.keys[i] = following[i];
      chunk.values[i] = following[i] + value_offset;
      chunk.first_token[i] = i < chunk.pages ? number(begin + i) * kPageTokens : 0;
      if (chunk.first_token[i] + kPageTokens > chunk.whole_at) chunk.whole_at = chunk.first_token[i] + kPageTokens;
      if (chunk.first_token[i] < hidden) chunk.whole_at = INT_MAX;
      const int seen = i < chunk.pages ? furthest - chunk.first_token[i] : 0;
      const int tokens = seen < 0 ? 0 : seen < kPageTokens ? seen : kPageTokens;
      chunk.value_steps[i] = tokens / T::pack;
      chunk.half_step[i] = tokens % T::pack != 0;
    }
    if (more) {
      for (int i = 0; i < kChunkPages; ++i) {
        const int next = begin + kChunkPages + i;
        following[i] = next < args.num_pages ? args.table.page(number(next)) : following[0];
      }
    }
    for (int i = 0; i < kChunkPages; ++i) {
      chunk.next[i] = following[i];
      chunk.soon[i] = scores_only ? following[i] : chunk.values[i];
    }
    if constexpr (T::pack == 2)
      if (narrow) widen_chunk(chunk, head_dim, scores_only);
    for (int tile = 0; tile < tiles; ++tile) {
      const int first_row = tile_begin(args.rows, tiles, tile);
      const int last_row = tile_begin(args.rows, tiles, tile + 1);
      // Every tile fetches its share of the next keys.
      chunk.first_ahead = tile * share;
      attend_tile(chunk, first_row, last_row - first_row, more && chunk.first_ahead < kChunkPages ? share : 0);
    }
  }
  for (int r = 0; r < args.rows && args.page_lse_min; ++r)
    if (args.row_sum[r] > 0.0f) args.page_lse_min[r] = natural_log(args.page_lse_min[r]) + args.row_max[r];
}

template <class T, bool Keep>
static void attend(const AttendArgs& args) {
  attend_chunks<T, Keep>(args, rows_of_tile<T>(args.rows), [&](const Chunk<T>& chunk, int first_row, int rows, int ahead) {
    attend_row_tile<T, Keep, kWideRowTile>(args, chunk, first_row, rows, ahead);
  });
}
