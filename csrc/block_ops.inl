// Bounds of logical blocks from the min/max summaries of their pages; and the norms and sums that Fluxion takes from a page.
// Included inside the namespace and target region of one instruction set, after traits.inl.

inline constexpr int kBoundRows = 4;

// Bounds of one block for `Rows` query rows: the maxima and minima of each dim over the block's pages, times the rows' operands.
template <class T, int Rows>
static inline void bound_block(const BlockScoreArgs& args, const char* const* summaries, int pages, const void* const* queries,
                               float* scores) {
  constexpr int64_t kBytes = sizeof(typename T::Element);
  const int64_t minima = args.head_dim * kBytes;
  vf acc[Rows];
  for (int r = 0; r < Rows; ++r) acc[r] = zero();
  for (int d = 0; d < args.head_dim; d += 16) {
    vf upper = T::load_elements(summaries[0] + d * kBytes);
    vf lower = T::load_elements(summaries[0] + minima + d * kBytes);
    for (int p = 1; p < pages; ++p) {
      upper = max(upper, T::load_elements(summaries[p] + d * kBytes));
      lower = min(lower, T::load_elements(summaries[p] + minima + d * kBytes));
    }
    for (int r = 0; r < Rows; ++r) {
      const float* query = static_cast<const float*>(queries[r]);
      const vf positive = load(query + d);
      const vf negative = load(query + args.head_dim + d);
      acc[r] = fma(upper, positive, fma(lower, negative, acc[r]));
    }
  }
  for (int r = 0; r < Rows; ++r) scores[r * args.row_stride] = reduce_add(acc[r]);
}

template <class T, int Rows>
static inline void bound_block_rows(const BlockScoreArgs& args, const char* const* summaries, int pages,
                                    const void* const* queries, int rows, float* scores) {
  if (rows == Rows) {
    bound_block<T, Rows>(args, summaries, pages, queries, scores);
  } else if constexpr (Rows > 1) {
    bound_block_rows<T, Rows - 1>(args, summaries, pages, queries, rows, scores);
  }
}

template <class T>
static void score_blocks(const BlockScoreArgs& args) {
  constexpr int kPagesAhead = 16;
  const char* summaries[kMaxBlockPages];
  for (int b = 0; b < args.num_blocks; ++b) {
    const int first = args.page_begin + b * args.block_pages;
    const int pages = args.page_end - first < args.block_pages ? args.page_end - first : args.block_pages;
    for (int p = 0; p < pages; ++p) {
      summaries[p] = args.table.summary(first + p);
      if (first + p + kPagesAhead >= args.page_end) continue;
      const char* ahead = args.table.summary(first + p + kPagesAhead);
      for (int64_t byte = 0; byte < args.table.summary_bytes; byte += 64) prefetch(ahead + byte);
    }
    for (int row = 0; row < args.rows; row += kBoundRows) {
      const int rows = args.rows - row < kBoundRows ? args.rows - row : kBoundRows;
      bound_block_rows<T, kBoundRows>(args, summaries, pages, args.queries + row, rows, args.scores + row * args.row_stride + b);
    }
  }
}

template <class T>
static void to_float(const void* in, int count, float* out) {
  const char* elements = static_cast<const char*>(in);
  for (int i = 0; i < count; i += 16) store(out + i, T::load_elements(elements + i * sizeof(typename T::Element)));
}

// Loads one register of a page: a dim of 16 tokens (K) or 16 dims of a token (V). With pack 2, `second` is the next dim or token.
template <class T>
static inline void load_pair(const char* p, vf& first, vf& second) {
  if constexpr (T::pack == 2) {
    load_bf16_pairs(p, first, second);
  } else {
    first = T::load_elements(p);
    second = zero();
  }
}

template <class T>
static void key_norms(const char* page, int head_dim, float* key_squares, float* key_sum) {
  constexpr int64_t kRegisterBytes = 16 * T::pack * sizeof(typename T::Element);
  vf squares = zero();
  for (int d = 0; d < head_dim; d += T::pack) {
    vf x[2];
    load_pair<T>(page + d / T::pack * kRegisterBytes, x[0], x[1]);
    for (int i = 0; i < T::pack; ++i) {
      squares = fma(x[i], x[i], squares);
      key_sum[d + i] = reduce_add(x[i]);
    }
  }
  store(key_squares, squares);
}

template <class T>
static void page_norms(const char* page, int head_dim, float* key_squares, float* value_squares, float* key_sum,
                       float* value_sum) {
  constexpr int64_t kRegisterBytes = 16 * T::pack * sizeof(typename T::Element);
  key_norms<T>(page, head_dim, key_squares, key_sum);
  const char* values = page + int64_t{kPageTokens} * head_dim * sizeof(typename T::Element);
  for (int d = 0; d < head_dim; d += 16) store(value_sum + d, zero());
  for (int t = 0; t < kPageTokens; t += T::pack) {
    vf of_token[2] = {zero(), zero()};
    for (int d = 0; d < head_dim; d += 16) {
      vf x[2];
      load_pair<T>(values + (t / T::pack * int64_t{head_dim} + d) / 16 * kRegisterBytes, x[0], x[1]);
      vf sum = load(value_sum + d);
      for (int i = 0; i < T::pack; ++i) {
        of_token[i] = fma(x[i], x[i], of_token[i]);
        sum = add(sum, x[i]);
      }
      store(value_sum + d, sum);
    }
    for (int i = 0; i < T::pack; ++i) value_squares[t + i] = reduce_add(of_token[i]);
  }
}

template <class T>
static void narrow_key_norms(const char* page, int head_dim, float* key_squares, float* key_sum) {
  key_norms<T>(widened(page, kPageTokens * head_dim), head_dim, key_squares, key_sum);
}

template <class T>
static void narrow_page_norms(const char* page, int head_dim, float* key_squares, float* value_squares, float* key_sum,
                              float* value_sum) {
  page_norms<T>(widened(page, 2 * kPageTokens * head_dim), head_dim, key_squares, value_squares, key_sum, value_sum);
}
