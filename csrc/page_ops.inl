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
static int64_t summary_query_bytes(const Layout& layout) {
  const int64_t bytes = layout.has_codes()
                            ? static_cast<int64_t>(sizeof(CodeQuery))
                            : layout.summary_elements() * static_cast<int64_t>(sizeof(typename T::Operand));
  return (bytes + 63) / 64 * 64;
}

template <class T>
static void prepare_summary_query(const void* query, const Layout& layout, float scale, void* result) {
  const int head_dim = layout.head_dim;
  if (layout.has_codes()) return encode_query<T>(query, head_dim, scale, result);
  typename T::Operand* out = static_cast<typename T::Operand*>(result);
  const char* in = static_cast<const char*>(query);
  for (int d = 0; d < head_dim; d += 16) {
    const vf q = T::load_elements(in + d * sizeof(typename T::Element));
    if (layout.summary == Summary::minmax) {
      T::store_operands(out + d, max(q, zero()));
      T::store_operands(out + head_dim + d, min(q, zero()));
    } else {
      T::store_operands(out + d, q);
    }
  }
}

// A run of dims of `Pages` summaries from the tile's `first_page` on, times the rows' operands; `Last` is half of one.
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

// Rows against `Pages` summaries that lie one after another, in whole runs but for the `Last`. As many at once as leave the sums in
// registers; a choice of variant at run time inside the loop makes GCC store them in memory, too, in every turn.
template <class T, int Rows, int Pages, bool Last>
static inline void score_tile(const ScoreArgs& args, const void* const* rows, const char* summaries, const SummariesAhead& ahead,
                              float* scores) {
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
  sum_lanes<Rows, Pages>(by_lane, args.scale, scores, args.row_stride);
}

template <class T, int Rows, int Pages>
static inline void score_row_tile(const ScoreArgs& args, const void* const* queries, int rows, const char* summaries,
                                  const SummariesAhead& ahead, float* scores) {
  if (rows == Rows) {
    if (args.summary_elements % T::run_elements == 0)
      score_tile<T, Rows, Pages, false>(args, queries, summaries, ahead, scores);
    else if constexpr (T::run_elements > 16)
      score_tile<T, Rows, Pages, true>(args, queries, summaries, ahead, scores);
  } else if constexpr (Rows > 1) {
    score_row_tile<T, Rows - 1, Pages>(args, queries, rows, summaries, ahead, scores);
  }
}

// The pages [first_page, first_page + num_pages) of a call; `means` and `steps` as in ScoreArgs::scratch. Of the block that is
// fetched ahead both halves at a time, where tiles fill it; and the first lines of the one after it, for their addresses.
template <class T>
static void score_chunk(const ScoreArgs& args, int first_page, int num_pages, float* means, float* steps) {
  constexpr int64_t kBytesAhead = 8192;
  const PageTable& table = args.table;
  const CodeTileArgs code_args = {args.head_dim, args.code_bits, args.row_stride};
  const int per_block = table.pages_per_block;
  const int64_t head_bytes = per_block * table.summary_bytes;
  const int64_t half_block = args.heads * head_bytes / 2;
  const bool by_halves = per_block % kScorePages == 0;
  const int blocks_ahead = static_cast<int>((kBytesAhead - 1) / (2 * half_block)) + 1;
  const int last_block = (args.page_begin + args.num_pages - 1) / per_block;
  const auto summaries_of = [&](int block) { return table.summaries + table.block_table[block] * table.block_stride; };
  int done = 0;
  int first = first_page % per_block;
  for (int block = first_page / per_block; done < num_pages; ++block, first = 0) {
    const char* here = summaries_of(block);
    const char* soon = block + blocks_ahead <= last_block ? summaries_of(block + blocks_ahead) : nullptr;
    if (block + blocks_ahead < last_block) {
      const char* later = summaries_of(block + blocks_ahead + 1);
      prefetch(later);
      prefetch(later + half_block);
    }
    const int count = per_block - first < num_pages - done ? per_block - first : num_pages - done;
    for (int head = 0; head < args.heads; ++head) {
      for (int i = 0; i < count;) {
        const bool whole = count - i >= kScorePages;
        const int64_t at = head * head_bytes + (first + i) * table.summary_bytes;
        float* out = args.scores + head * args.head_stride + (first_page - args.page_begin) + done + i;
        SummariesAhead ahead = {};
        if (soon && by_halves)
          ahead = {soon + at / 2, soon + half_block + at / 2, table.summary_bytes};
        else if (soon)
          ahead = {soon + at, soon + at + table.summary_bytes, 2 * table.summary_bytes};
        for (int row = 0; row < args.rows; row += kScoreRows) {
          const int rows = args.rows - row < kScoreRows ? args.rows - row : kScoreRows;
          const void* const* queries = args.queries + head * args.rows + row;
          const SummariesAhead next = row == 0 ? ahead : SummariesAhead{};
          float* row_scores = out + row * args.row_stride;
          if (args.code_bits > 0)
            score_codes(code_args, queries, rows, whole, here + at, next, row_scores,
                        means + (head * args.rows + row) * kScoreChunkPages + done + i,
                        steps + head * kScoreChunkPages + done + i);
          else if (whole)
            score_row_tile<T, kScoreRows, kScorePages>(args, queries, rows, here + at, next, row_scores);
          else
            score_row_tile<T, kScoreRows, 1>(args, queries, rows, here + at, next, row_scores);
        }
        i += whole ? kScorePages : 1;
      }
    }
    done += count;
  }
}

template <class T>
static void score(const ScoreArgs& args) {
  if (args.code_bits == 0) return score_chunk<T>(args, args.page_begin, args.num_pages, nullptr, nullptr);
  float* means = args.scratch;
  float* steps = means + args.heads * args.rows * kScoreChunkPages;
  for (int done = 0; done < args.num_pages; done += kScoreChunkPages) {
    const int count = args.num_pages - done < kScoreChunkPages ? args.num_pages - done : kScoreChunkPages;
    score_chunk<T>(args, args.page_begin + done, count, means, steps);
    for (int row = 0; row < args.heads * args.rows; ++row) {
      const int head = row / args.rows;
      finish_codes(*static_cast<const CodeQuery*>(args.queries[row]), means + row * kScoreChunkPages,
                   steps + head * kScoreChunkPages, count,
                   args.scores + head * args.head_stride + (row % args.rows) * args.row_stride + done);
    }
  }
}

static void group_scores(const float* scores, int64_t stride, int rows, int count, const float* retained,
                         float* lse_out, float* out) {
  const float minus_infinity = -__builtin_inff();
  const int whole = count / 16 * 16;
  alignas(64) float last[16];
  for (int r = 0; r < rows; ++r) {
    const float* row = scores + r * stride;
    float lse = 0.0f;  // one row alone keeps its scores
    if (rows > 1 || retained) {
      for (int i = 0; i < 16; ++i) last[i] = whole + i < count ? row[whole + i] : minus_infinity;
      vf highest = load(last);
      for (int i = 0; i < whole; i += 16) highest = max(highest, load(row + i));
      const float high = reduce_max(highest);
      const vf shift = set1(-high);
      vf sum = exp_nonpositive(add(load(last), shift));
      for (int i = 0; i < whole; i += 16) sum = add(sum, exp_nonpositive(add(load(row + i), shift)));
      lse = high + natural_log(reduce_add(sum));
    }
    if (retained) {
      lse_out[r] = lse;
      const float high = lse > retained[r] ? lse : retained[r];
      lse = high + natural_log(natural_exp(lse - high) + natural_exp(retained[r] - high));
    }
    const vf shift = set1(-lse);
    for (int i = 0; i < whole; i += 16) {
      const vf share = add(load(row + i), shift);
      store(out + i, r == 0 ? share : max(load(out + i), share));
    }
    for (int i = whole; i < count; ++i) {
      const float share = row[i] - lse;
      out[i] = r == 0 || share > out[i] ? share : out[i];
    }
  }
}

static ScoreBuckets bucket_scores(const float* scores, int count, int buckets, uint16_t* out) {
  const int whole = count / 16 * 16;
  vf low = set1(__builtin_inff());
  vf high = set1(-__builtin_inff());
  for (int i = 0; i < whole; i += 16) {  // of a score that is not a number, min and max take their second argument
    low = min(load(scores + i), low);
    high = max(load(scores + i), high);
  }
  float lowest = reduce_min(low);
  float highest = reduce_max(high);
  for (int i = whole; i < count; ++i) {
    lowest = scores[i] < lowest ? scores[i] : lowest;
    highest = scores[i] > highest ? scores[i] : highest;
  }
  const float spread = highest - lowest;
  const float factor = spread > 0.0f ? static_cast<float>(buckets - 1) / spread : 0.0f;
  for (int i = 0; i < count; ++i) {
    const int bucket = static_cast<int>((highest - scores[i]) * factor);
    out[i] = static_cast<uint16_t>(bucket < 0 ? 0 : bucket < buckets ? bucket : buckets - 1);
  }
  return {highest, spread / static_cast<float>(buckets - 1)};
}

static int take_near(const float* scores, int count, float highest, float below, int32_t* out) {
  const int whole = count / 16 * 16;
  int taken = 0;
  for (int i = 0; i < whole; i += 16) {
    const vf distance = sub(set1(highest), load(scores + i));
    for (uint32_t mask = mask_at_least_zero(sub(set1(below), distance)); mask != 0; mask &= mask - 1)
      out[taken++] = i + __builtin_ctz(mask);
  }
  for (int i = whole; i < count; ++i)
    if (highest - scores[i] <= below) out[taken++] = i;
  return taken;
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
}

template <class T>
static void summarize(const char* page, char* out, const Layout& layout) {
  const int head_dim = layout.head_dim;
  if (layout.has_codes()) return encode_page<T>(page, out, head_dim, layout.code_bits);
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
      if (layout.summary == Summary::minmax) {
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

static float stream(const char* bytes, int64_t size, const char* next) {
  vf acc[8];
  for (int i = 0; i < 8; ++i) acc[i] = zero();
  for (int64_t at = 0; at + 512 <= size; at += 512) {
    for (int i = 0; i < 8 && next; ++i) prefetch(next + at + 64 * i);
    for (int i = 0; i < 8; ++i) acc[i] = add(acc[i], load(reinterpret_cast<const float*>(bytes + at + 64 * i)));
  }
  for (int i = 1; i < 8; ++i) acc[0] = add(acc[0], acc[i]);
  return reduce_add(acc[0]);
}

template <class T>
inline constexpr Kernels kKernels = {
    query_bytes<T>, prepare_query<T>, summary_query_bytes<T>, prepare_summary_query<T>, attend<T, false>, attend<T, true>,
    score<T>,       group_scores,     bucket_scores,          take_near,                write_page<T>,    summarize<T>,
    copy_token<T>,  log_sum_exp,      blend_weights,          store_row<T>,             stream,           score_blocks<T>,
    dense_layer,    to_float<T>,      page_norms<T>};
