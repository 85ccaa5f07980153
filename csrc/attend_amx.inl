// Attention of query rows by AMX, for bf16. Keys lie in memory as tiles, values as tiles of one page, and 16 rows are multiplied by
// them at a time. Vector code computes the softmax between the two products. Weighted values are summed in the tiles themselves.
// Included inside the namespace and target region of one instruction set, after attend.inl and amx_tiles.inl.

struct Bf16Amx {
  using Element = uint16_t;
  struct Op { uint32_t pair; };
  static constexpr int pack = 2;
  static inline vf exp2(vf x) { return exp2_bf16(x); }
  static inline void store_weights(Op* out, vf weights) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), (__m256i)_mm512_cvtneps_pbh(weights));
  }
};

inline constexpr int kPackedRows = 96;  // rows whose queries lie one after another; more rows are attended in parts

struct AmxBuffers {
  alignas(64) char queries[int64_t{kPackedRows + kTileRows} * kMaxHeadDim * 2];
  alignas(64) char values[int64_t{kChunkTokens} * kMaxHeadDim * 2];  // of a chunk; zeros after the tokens that some row sees
  alignas(64) float scores[kTileRows * kChunkTokens];
  alignas(64) uint16_t weights[kTileRows * kChunkTokens];
  alignas(64) float sums[int64_t{kPackedRows} * kMaxHeadDim];  // of weighted values: row tile after row tile, as `sums_of` says
};

// Where the sums of a row tile begin: for each 16 dims a tile of 16 rows x 16. Row tiles have at most 16 rows, of an even division,
// so this is the row tile's number.
static inline float* sums_of(AmxBuffers& buffers, int first_row, int head_dim) {
  return buffers.sums + int64_t{tiles_of(first_row, kTileRows)} * kTileRows * head_dim;
}

// Unscaled scores of the tile's rows. Fetches chunk.soon, a line of each page in turn.
[[gnu::always_inline]]
static inline void score_tiles(const char* queries, int head_dim, const Chunk<Bf16Amx>& chunk, bool fetch, float* scores) {
  const int64_t query_bytes = int64_t{head_dim} * 2;
  for (int page = 0; page < chunk.pages; page += kTileColumns) {
    for_columns([&]<int J>() __attribute__((always_inline)) { clear_tile<J>(); });
    int dim = 0;
    for (; dim + 32 <= head_dim; dim += 32) {
      for (int line = 0; fetch && line < 16; ++line)
        for (int j = 0; j < kTileColumns; ++j) prefetch(chunk.soon[page + j] + (dim / 2 + line) * 64);
      load_tile<kWideLeft>(queries + dim * 2, query_bytes);
      for_columns([&]<int J>() __attribute__((always_inline)) {
        load_tile<kWideRight>(chunk.keys[page + J] + dim * 32, 64);
        multiply_tiles<J, kWideLeft, kWideRight>();
      });
    }
    if (dim < head_dim) {
      for (int line = 0; fetch && line < 8; ++line)
        for (int j = 0; j < kTileColumns; ++j) prefetch(chunk.soon[page + j] + (dim / 2 + line) * 64);
      load_tile<kHalfLeft>(queries + dim * 2, query_bytes);
      for_columns([&]<int J>() __attribute__((always_inline)) {
        load_tile<kHalfRight>(chunk.keys[page + J] + dim * 32, 64);
        multiply_tiles<J, kHalfLeft, kHalfRight>();
      });
    }
    for_columns([&]<int J>() __attribute__((always_inline)) {
      store_tile<J>(scores + (page + J) * kPageTokens, kChunkTokens * sizeof(float));
    });
  }
}

// sums += weights times the values of `Columns` runs of 16 dims from first_dim on, two pages at a time.
template <int Columns>
[[gnu::always_inline]]
static inline void value_tiles(const AmxBuffers& buffers, int head_dim, const Chunk<Bf16Amx>& chunk, int first_dim, int ahead,
                               float* sums) {
  constexpr int kLines = kPageTokens / 2 / kChunkPages;  // to fetch from a page of next keys, per page and column of values
  const int64_t pair_bytes = int64_t{head_dim} * 4;
  const auto columns = [](const auto& f) __attribute__((always_inline)) {
    for_columns([&]<int J>() __attribute__((always_inline)) {
      if constexpr (J < Columns) f.template operator()<J>();
    });
  };
  columns([&]<int J>() __attribute__((always_inline)) { load_tile<J>(sums + J * kTileRows * 16, 64); });
  for (int page = 0; page < chunk.pages; page += 2) {
    for (int line = 0; line < 2 * Columns * kLines; ++line)
      for (int i = 0; i < ahead; ++i)
        prefetch(chunk.next[chunk.first_ahead + i] + (first_dim / 16 * kPageTokens / 2 + page * Columns * kLines + line) * 64);
    const char* values = buffers.values + page * kPageTokens / 2 * pair_bytes + first_dim * 4;
    load_tile<kWideLeft>(buffers.weights + page * kPageTokens, kChunkTokens * sizeof(uint16_t));
    columns([&]<int J>() __attribute__((always_inline)) {
      load_tile<kWideRight>(values + J * 64, pair_bytes);
      multiply_tiles<J, kWideLeft, kWideRight>();
    });
  }
  columns([&]<int J>() __attribute__((always_inline)) { store_tile<J>(sums + J * kTileRows * 16, 64); });
}

// Copies the values of a chunk one page after another, so that a tile takes the pairs of two pages. What follows the tokens that
// some row sees may be NaN, which a weight of 0 does not cancel: zeros are put there.
static void copy_values(const Chunk<Bf16Amx>& chunk, int head_dim, char* out) {
  const int64_t pair_bytes = int64_t{head_dim} * 4;
  const int64_t page_bytes = kPageTokens / 2 * pair_bytes;
  for (int page = 0; page < (chunk.pages + 1) / 2 * 2; ++page, out += page_bytes) {
    const bool filler = page >= chunk.pages;
    const int64_t whole = filler ? 0 : chunk.value_steps[page] * pair_bytes;
    int64_t at = 0;
    for (; at < whole; at += 64) _mm512_store_si512(out + at, _mm512_loadu_si512(chunk.values[page] + at));
    for (; !filler && chunk.half_step[page] && at < whole + pair_bytes; at += 64)
      _mm512_store_si512(out + at, _mm512_and_si512(_mm512_loadu_si512(chunk.values[page] + at), _mm512_set1_epi32(0xffff)));
    std::memset(out + at, 0, page_bytes - at);
  }
}

template <bool Keep>
static void attend_tile(const AttendArgs& args, const Chunk<Bf16Amx>& chunk, int first_row, int rows, int ahead,
                        AmxBuffers& buffers) {
  const int head_dim = args.head_dim;
  score_tiles(buffers.queries + int64_t{first_row} * head_dim * 2, head_dim, chunk, first_row == 0, buffers.scores);
  if constexpr (Keep) {
    keep_scores(args, chunk, first_row, rows, buffers.scores);
    if (!args.out) return;
  }
  if (first_row == 0) copy_values(chunk, head_dim, buffers.values);
  vf added[kTileRows + 3];
  float rescale[kTileRows];
  for (int r = 0; r < rows; ++r) {
    const int row = first_row + r;
    rescale[r] = softmax_row<Bf16Amx>(buffers.scores + r * kChunkTokens, chunk, args.scale, args.visible[row],
                                      args.hidden ? args.hidden + row : nullptr, args.row_max + row,
                                      args.page_lse_min ? args.page_lse_min + row : nullptr,
                                      reinterpret_cast<Bf16Amx::Op*>(buffers.weights + r * kChunkTokens), added[r]);
  }
  add_to_sums(added, rows, rescale, args.row_sum + first_row);
  float* sums = sums_of(buffers, first_row, head_dim);
  for (int r = 0; r < rows; ++r) {
    if (rescale[r] == 1.0f) continue;
    for (int dim = 0; dim < head_dim; dim += 16) {
      float* of_row = sums + dim * kTileRows + r * 16;
      store(of_row, mul(load(of_row), set1(rescale[r])));
    }
  }
  int dim = 0;
  for (; dim + 16 * kTileColumns <= head_dim; dim += 16 * kTileColumns)
    value_tiles<kTileColumns>(buffers, head_dim, chunk, dim, ahead, sums + dim * kTileRows);
  for (; dim < head_dim; dim += 16) value_tiles<1>(buffers, head_dim, chunk, dim, ahead, sums + dim * kTileRows);
}

static void clear_sums(int rows, int head_dim, AmxBuffers& buffers) {
  std::memset(buffers.sums, 0, tiles_of(rows, kTileRows) * kTileRows * head_dim * sizeof(float));
}
static void copy_sums(AmxBuffers& buffers, int rows, int head_dim, float* out) {
  const int tiles = tiles_of(rows, kTileRows);
  for (int tile = 0; tile < tiles; ++tile) {
    const int first_row = tile_begin(rows, tiles, tile);
    const float* sums = sums_of(buffers, first_row, head_dim);
    for (int row = first_row; row < tile_begin(rows, tiles, tile + 1); ++row)
      for (int dim = 0; dim < head_dim; dim += 16)
        store(out + int64_t{row} * head_dim + dim, load(sums + dim * kTileRows + (row - first_row) * 16));
  }
}

inline constexpr int kFewestRows = 8;  // fewer are bound by memory even with vectors

template <bool Keep>
static void attend_few(const AttendArgs& rows) {
  static const Kernels vectors = avx512().by_dtype[static_cast<int>(DType::bf16)];
  alignas(64) float prepared[kFewestRows * kMaxHeadDim];
  const void* queries[kFewestRows];
  AttendArgs args = rows;
  for (int r = 0; r < args.rows; ++r)
    queries[r] = vectors.prepare_query(rows.queries[r], args.head_dim, prepared + r * args.head_dim);
  args.queries = queries;
  (Keep ? vectors.attend_keeping_scores : vectors.attend)(args);
}

template <bool Keep>
static void attend_amx(const AttendArgs& all) {
  if (all.rows < kFewestRows) return attend_few<Keep>(all);
  const int64_t query_bytes = int64_t{all.head_dim} * 2;
  AmxBuffers buffers;
  const Tiles tiles(all.rows < kTileRows ? all.rows : kTileRows);
  for (int first = 0; first < all.rows; first += kPackedRows) {
    AttendArgs args = all;
    args.rows = all.rows - first < kPackedRows ? all.rows - first : kPackedRows;
    args.queries += first;
    args.visible += first;
    if (args.hidden) args.hidden += first;
    args.row_max += first;
    args.row_sum += first;
    if (args.out) args.out += int64_t{first} * args.head_dim;
    if (args.page_lse_min) args.page_lse_min += first;
    if (args.token_scores) args.token_scores += first * args.token_scores_stride;
    for (int r = 0; r < args.rows; ++r) std::memcpy(buffers.queries + r * query_bytes, args.queries[r], query_bytes);
    if (args.out) clear_sums(args.rows, args.head_dim, buffers);
    attend_chunks<Bf16Amx, Keep>(args, kTileRows, [&](const Chunk<Bf16Amx>& chunk, int first_row, int rows, int ahead) {
      attend_tile<Keep>(args, chunk, first_row, rows, ahead, buffers);
    });
    if (args.out) copy_sums(buffers, args.rows, args.head_dim, args.out);
  }
}
