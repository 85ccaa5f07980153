// Operations on single pages: write, summarise, score; and the conversions of query and output rows.
// Included inside the namespace and target region of one instruction set, after traits.inl.

template <class T>
static int64_t query_bytes(int head_dim) {
  return static_cast<int64_t>(sizeof(typename T::Op)) * (head_dim / T::pack);
}

template <class T>
static const void* prepare_query(const void* query, int head_dim, void* scratch) {
  if constexpr (sizeof(typename T::Op) == T::pack * sizeof(typename T::Element)) {
    return query;  // the operands are the row itself
  } else {
    float* out = static_cast<float*>(scratch);
    const char* in = static_cast<const char*>(query);
    for (int d = 0; d < head_dim; d += 16) store(out + d, T::load_elements(in + d * sizeof(typename T::Element)));
    return scratch;
  }
}

template <class T>
static void prepare_summary_query(const void* query, int head_dim, Summary summary, void* scratch) {
  float* out = static_cast<float*>(scratch);
  const char* in = static_cast<const char*>(query);
  for (int d = 0; d < head_dim; d += 16) {
    const vf q = T::load_elements(in + d * sizeof(typename T::Element));
    if (summary == Summary::minmax) {
      store(out + d, max(q, zero()));
      store(out + head_dim + d, min(q, zero()));
    } else {
      store(out + d, q);
    }
  }
}

template <class T, int Rows>
static inline void score_page(const ScoreArgs& args, int first_row, const char* summary, const char* ahead, int index) {
  constexpr int kBytes = 16 * static_cast<int>(sizeof(typename T::Element));
  vf acc[Rows][2];
  for (int r = 0; r < Rows; ++r) acc[r][0] = acc[r][1] = zero();
  int e = 0;
  for (; e + 32 <= args.summary_elements; e += 32) {
    const vf s0 = T::load_elements(summary + e / 16 * kBytes);
    const vf s1 = T::load_elements(summary + e / 16 * kBytes + kBytes);
    prefetch(ahead + e / 16 * kBytes);
    for (int r = 0; r < Rows; ++r) {
      const float* q = static_cast<const float*>(args.queries[first_row + r]) + e;
      acc[r][0] = fma(s0, load(q), acc[r][0]);
      acc[r][1] = fma(s1, load(q + 16), acc[r][1]);
    }
  }
  if (e < args.summary_elements) {
    const vf s0 = T::load_elements(summary + e / 16 * kBytes);
    for (int r = 0; r < Rows; ++r)
      acc[r][0] = fma(s0, load(static_cast<const float*>(args.queries[first_row + r]) + e), acc[r][0]);
  }
  for (int r = 0; r < Rows; ++r)
    args.scores[(first_row + r) * args.score_stride + index] = reduce_add(add(acc[r][0], acc[r][1])) * args.scale;
}

template <class T, int Rows>
static inline void score_page_tile(const ScoreArgs& args, int first_row, int rows, const char* summary,
                                   const char* ahead, int index) {
  if (rows == Rows) {
    score_page<T, Rows>(args, first_row, summary, ahead, index);
  } else if constexpr (Rows > 1) {
    score_page_tile<T, Rows - 1>(args, first_row, rows, summary, ahead, index);
  }
}

template <class T>
static void score(const ScoreArgs& args) {
  constexpr int kPagesAhead = 16;
  const int last = args.page_begin + args.num_pages - 1;
  for (int i = 0; i < args.num_pages; ++i) {
    const int page = args.page_begin + i;
    const char* summary = args.table.summary(page);
    const char* ahead = args.table.summary(page + kPagesAhead < last ? page + kPagesAhead : last);
    for (int row = 0; row < args.rows; row += 4)
      score_page_tile<T, 4>(args, row, args.rows - row < 4 ? args.rows - row : 4, summary, ahead, i);
  }
}

static void group_scores(const float* scores, int64_t stride, int rows, int count, float* out) {
  const float minus_infinity = -__builtin_inff();
  alignas(64) float last[16];
  const int whole = count / 16 * 16;
  for (int r = 0; r < rows; ++r) {
    const float* row = scores + r * stride;
    for (int i = 0; i < 16; ++i) last[i] = whole + i < count ? row[whole + i] : minus_infinity;
    if (rows == 1) {
      for (int i = 0; i < count; ++i) out[i] = row[i];
      return;
    }
    vf highest = load(last);
    for (int i = 0; i < whole; i += 16) highest = max(highest, load(row + i));
    const float high = reduce_max(highest);
    const vf shift = set1(-high);
    vf sum = exp_nonpositive(add(load(last), shift));
    for (int i = 0; i < whole; i += 16) sum = add(sum, exp_nonpositive(add(load(row + i), shift)));
    const float lse = high + natural_log(reduce_add(sum));
    for (int i = 0; i < count; ++i) {
      const float share = row[i] - lse;
      out[i] = r == 0 || share > out[i] ? share : out[i];
    }
  }
}

template <class T>
static void write_page(char* page, int offset, int count, int head_dim, const void* key, int64_t key_stride,
                       const void* value, int64_t value_stride) {
  using Element = typename T::Element;
  Element* k_out = reinterpret_cast<Element*>(page);
  Element* v_out = k_out + int64_t{kPageTokens} * head_dim;
  const Element* k_in = static_cast<const Element*>(key);
  const Element* v_in = static_cast<const Element*>(value);
  for (int d = 0; d < head_dim; d += T::pack) {
    Element* step = k_out + int64_t{d} * kPageTokens;
    for (int t = 0; t < count; ++t)
      for (int i = 0; i < T::pack; ++i) step[(offset + t) * T::pack + i] = k_in[t * key_stride + d + i];
  }
  for (int t = 0; t < count; ++t) {
    const int token = offset + t;
    Element* row = v_out + int64_t{token / T::pack} * head_dim * T::pack + token % T::pack;
    for (int d = 0; d < head_dim; ++d) row[d * T::pack] = v_in[t * value_stride + d];
  }
  // A token that shares its pair with one not written yet is multiplied along with it, weight 0: no NaN may lie there.
  if constexpr (T::pack == 2) {
    const int next = offset + count;
    if (next % 2 == 1) {
      Element* row = v_out + int64_t{next / 2} * head_dim * 2 + 1;
      for (int d = 0; d < head_dim; ++d) row[d * 2] = 0;
    }
  }
}

template <class T>
static void summarize(const char* page, char* out, int head_dim, Summary summary) {
  using Element = typename T::Element;
  const Element* keys = reinterpret_cast<const Element*>(page);
  Element* result = reinterpret_cast<Element*>(out);
  for (int d = 0; d < head_dim; d += T::pack) {
    for (int i = 0; i < T::pack; ++i) {
      const Element* lane = keys + int64_t{d} * kPageTokens + i;
      float low = T::to_float(lane[0]);
      float high = low;
      for (int t = 1; t < kPageTokens; ++t) {
        const float x = T::to_float(lane[t * T::pack]);
        low = x < low ? x : low;
        high = x > high ? x : high;
      }
      if (summary == Summary::minmax) {
        result[d + i] = T::from_float(high);
        result[head_dim + d + i] = T::from_float(low);
      } else {
        result[d + i] = T::from_float((low + high) * 0.5f);
      }
    }
  }
}

template <class T>
static void store_row(void* out, const float* values, float factor, int head_dim) {
  typename T::Element* result = static_cast<typename T::Element*>(out);
  for (int d = 0; d < head_dim; ++d) result[d] = T::from_float(values[d] * factor);
}

static float stream(const char* bytes, int64_t size) {
  vf acc[8];
  for (int i = 0; i < 8; ++i) acc[i] = zero();
  for (int64_t at = 0; at + 512 <= size; at += 512)
    for (int i = 0; i < 8; ++i) acc[i] = add(acc[i], load(reinterpret_cast<const float*>(bytes + at + 64 * i)));
  for (int i = 1; i < 8; ++i) acc[0] = add(acc[0], acc[i]);
  return reduce_add(acc[0]);
}

template <class T>
inline constexpr Kernels kKernels = {query_bytes<T>, prepare_query<T>, prepare_summary_query<T>, attend<T>,    score<T>,
                                     group_scores,   write_page<T>,    summarize<T>,             store_row<T>, stream};
