// Attention of query rows by AMX, for bf16. Keys and values lie in memory as tiles, and 16 rows are multiplied by them at a time.
// Vector code computes the softmax between the two products.
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
  alignas(64) char last_values[int64_t{kPageTokens} * kMaxHeadDim * 2];  // of a page that is not full; zeros after its tokens
  alignas(64) float scores[kTileRows * kChunkTokens];
  alignas(64) uint16_t weights[kTileRows * kChunkTokens];
  alignas(64) float sums[kTileRows * kTileColumns * 16];
};

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

// Weights times the values of `Columns` runs of 16 dims from first_dim on.
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
  columns([&]<int J>() __attribute__((always_inline)) { clear_tile<J>(); });
  for (int page = 0; page < chunk.pages; ++page) {
    const int tokens = chunk.value_steps[page] * 2 + chunk.half_step[page];
    if (tokens == 0) continue;
    for (int line = 0; line < Columns * kLines; ++line)
      for (int i = 0; i < ahead; ++i)
        prefetch(chunk.next[chunk.first_ahead + i] + (first_dim / 16 * kPageTokens / 2 + page * Columns * kLines + line) * 64);
    const char* values = tokens < kPageTokens ? buffers.last_values : chunk.values[page];
    load_tile<kHalfLeft>(buffers.weights + page * kPageTokens, kChunkTokens * sizeof(uint16_t));
    columns([&]<int J>() __attribute__((always_inline)) {
      load_tile<kHalfRight>(values + (first_dim + 16 * J) * 4, pair_bytes);
      multiply_tiles<J, kHalfLeft, kHalfRight>();
    });
  }
  columns([&]<int J>() __attribute__((always_inline)) { store_tile<J>(sums + 16 * J, kTileColumns * 64); });
}

// Copies the values of a page that is not full, since what follows its tokens may be NaN, which a weight of 0 does not cancel.
static void copy_last_values(const Chunk<Bf16Amx>& chunk, int head_dim, char* out) {
  const int64_t pair_bytes = int64_t{head_dim} * 4;
  for (int page = 0; page < chunk.pages; ++page) {
    const int steps = chunk.value_steps[page];
    if (steps * 2 == kPageTokens || (steps == 0 && !chunk.half_step[page])) continue;
    std::memset(out, 0, kPageTokens / 2 * pair_bytes);
    std::memcpy(out, chunk.values[page], steps * pair_bytes);
    for (int64_t at = steps * pair_bytes; chunk.half_step[page] && at < (steps + 1) * pair_bytes; at += 64)
      _mm512_storeu_si512(out + at, _mm512_and_si512(_mm512_loadu_si512(chunk.values[page] + at), _mm512_set1_epi32(0xffff)));
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
  if (first_row == 0) copy_last_values(chunk, head_dim, buffers.last_values);
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
  float* out = args.out + int64_t{first_row} * head_dim;
  const auto add_values = [&]<int Columns>(int dim) __attribute__((always_inline)) {
    value_tiles<Columns>(buffers, head_dim, chunk, dim, ahead, buffers.sums);
    for (int r = 0; r < rows; ++r) {
      float* of_row = out + int64_t{r} * head_dim + dim;
      for (int j = 0; j < Columns; ++j)
        store(of_row + 16 * j, fma(load(of_row + 16 * j), set1(rescale[r]), load(buffers.sums + (r * kTileColumns + j) * 16)));
    }
  };
  int dim = 0;
  for (; dim + 16 * kTileColumns <= head_dim; dim += 16 * kTileColumns) add_values.template operator()<kTileColumns>(dim);
  for (; dim < head_dim; dim += 16) add_values.template operator()<1>(dim);
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
    attend_chunks<Bf16Amx, Keep>(args, kTileRows, [&](const Chunk<Bf16Amx>& chunk, int first_row, int rows, int ahead) {
      attend_tile<Keep>(args, chunk, first_row, rows, ahead, buffers);
    });
  }
}
