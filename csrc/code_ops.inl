// Key codes: one or two bits a dimension of every key, rotated and minus its page's mean. They give an unbiased estimate of each
// token's score (RaBitQ: Gao and Long, 2024, and its extension to more bits), and the scores give the page's weight.
// Included inside the namespace and target region of one instruction set, before score_ops.inl and page_ops.inl. Its vec_*.inl
// defines the products of bytes: vb (64 bytes) and vs (their products summed by token).

inline constexpr int kScorePages = 4;  // pages scored together,
inline constexpr int kScoreRows = 4;   // with as many rows: 16 sums across lanes at a time
inline constexpr int kMeanLevels = 15;

// A token counts 2^(score - mean's score - kAboveMean), an exponent of at most kMostExponent either way: scores up to 220 powers of
// two above their page's mean are told apart. Those more than 20 below it are not; a page's best token is never among them.
inline constexpr float kAboveMean = 100.0f;
inline constexpr float kMostExponent = 120.0f;

// A query row q as scoring needs it: rotated and rounded to 8 bits. Scores are in units of log 2. The elements of codes and mean
// are the odd numbers 2 c - top for c = 0 ... top, so <q, element> = a * (sum of q c) - top * sum.
struct CodeQuery {
  float a;
  float sum;
  char padding[56];
  int8_t dims[kMaxHeadDim];        // for the codes; zeros after the last
  int8_t halves[kMaxHeadDim + 64];  // for the mean: of every 64 dims the even ones, then the odd ones, as `half_bytes` orders them
  float query[kMaxHeadDim];         // before the rotation, times the softmax scale: for the common key
};

// The arguments that all tiles of a call share.
struct CodeTileArgs {
  int head_dim;
  int code_bits;
  int64_t page_bytes;  // from the codes of a page to those of the next
};

// Where a tile fetches summaries of a later block ahead, one for each of its pages: for its even pages from one run of bytes, for
// its odd ones from another, so that the first lines of both runs are waited for together.
struct SummariesAhead {
  const char* even;  // null: nothing to fetch
  const char* odd;
  int64_t stride;
  explicit operator bool() const { return even != nullptr; }
  const char* page(int p) const { return (p % 2 == 0 ? even : odd) + p / 2 * stride; }
};

// The rotation: random signs, then a Hadamard transform of each piece: the largest powers of two that the dims split into.
template <int Width>
static void rotate(float (*x)[Width], int head_dim) {
  for (int begin = 0; begin < head_dim;) {
    int piece = 1;
    while (2 * piece <= head_dim - begin) piece *= 2;
    const float norm = 1.0f / std::sqrt(static_cast<float>(piece));
    for (int d = begin; d < begin + piece; ++d) {
      const float factor = rotation_is_negative(d) ? -norm : norm;
      for (int t = 0; t < Width; ++t) x[d][t] *= factor;
    }
    for (int half = 1; half < piece; half *= 2) {
      for (int d = begin; d < begin + piece; d += 2 * half) {
        for (int i = d; i < d + half; ++i) {
          for (int t = 0; t < Width; ++t) {
            const float low = x[i][t];
            const float high = x[i + half][t];
            x[i][t] = low + high;
            x[i + half][t] = low - high;
          }
        }
      }
    }
    begin += piece;
  }
}

template <class T>
static void encode_query(const void* query, int head_dim, float scale, void* out) {
  alignas(64) float x[kMaxHeadDim][1];
  alignas(64) int8_t rounded[kMaxHeadDim + 64] = {};
  const char* in = static_cast<const char*>(query);
  CodeQuery& result = *static_cast<CodeQuery*>(out);
  for (int d = 0; d < head_dim; d += 16) {
    const vf elements = T::load_elements(in + d * sizeof(typename T::Element));
    store(&x[d][0], elements);
    store(result.query + d, mul(elements, set1(scale)));
  }
  rotate<1>(x, head_dim);
  float largest = 0.0f;
  for (int d = 0; d < head_dim; ++d) largest = std::fabs(x[d][0]) > largest ? std::fabs(x[d][0]) : largest;
  const float factor = largest > 0.0f ? 127.0f / largest : 0.0f;
  int sum = 0;
  for (int d = 0; d < head_dim; ++d) {
    rounded[d] = static_cast<int8_t>(std::nearbyint(x[d][0] * factor));
    sum += rounded[d];
  }
  const float unit = largest / 127.0f * scale * kLog2E;
  result.a = 2.0f * unit;
  result.sum = unit * static_cast<float>(sum);
  std::memcpy(result.dims, rounded, sizeof(result.dims));
  for (int d = 0; d < head_dim; d += 64) {
    for (int i = 0; i < 32; ++i) {
      result.halves[d + i] = rounded[d + 2 * i];
      result.halves[d + 32 + i] = rounded[d + 2 * i + 1];
    }
  }
}

// The scaled product of a query row with a vector [head_dim], unrounded.
[[maybe_unused]] static float query_product(const void* operands, const float* vector, int head_dim) {
  const float* query = static_cast<const CodeQuery*>(operands)->query;
  vf sum = zero();
  for (int d = 0; d < head_dim; d += 16) sum = fma(load(query + d), load(vector + d), sum);
  return reduce_add(sum);
}

// Encodes the keys of a full page, minus `common` [head_dim] if it is not null; layout.h has the layout.
template <class T>
static void encode_page(const char* page, char* out, const Layout& layout, const float* common) {
  using Element = typename T::Element;
  const int head_dim = layout.head_dim, code_bits = layout.code_bits;
  alignas(64) float x[kMaxHeadDim][kPageTokens];
  float mean[kMaxHeadDim];
  const Element* keys = reinterpret_cast<const Element*>(page);
  for (int d = 0; d < head_dim; ++d) {
    const Element* lane = keys + int64_t{d / T::pack} * T::pack * kPageTokens + d % T::pack;
    const float less = common ? common[d] : 0.0f;
    for (int t = 0; t < kPageTokens; ++t) x[d][t] = T::to_float(lane[t * T::pack]) - less;
  }
  rotate<kPageTokens>(x, head_dim);
  float largest = 0.0f;
  for (int d = 0; d < head_dim; ++d) {
    mean[d] = reduce_add(load(x[d])) * (1.0f / kPageTokens);
    largest = std::fabs(mean[d]) > largest ? std::fabs(mean[d]) : largest;
  }
  const uint16_t step_bits = float_to_bf16(largest / kMeanLevels);
  const float step = bf16_to_float(step_bits);
  const CodeLayout at(head_dim, code_bits, element_bytes(layout.dtype));
  for (int d = 0; d < head_dim; d += 2) {
    int level[2];
    for (int i = 0; i < 2; ++i) {
      const float exact = step > 0.0f ? (mean[d + i] / step + kMeanLevels) * 0.5f : 0.0f;
      level[i] = static_cast<int>(std::nearbyint(exact < 0.0f ? 0.0f : exact > kMeanLevels ? kMeanLevels : exact));
      const vf centre = set1(step * static_cast<float>(2 * level[i] - kMeanLevels));
      store(x[d + i], sub(load(x[d + i]), centre));
    }
    out[at.mean + d / 2] = static_cast<char>(level[0] | level[1] << 4);
  }
  // With two bits, an element beyond the token's root mean square is 3 units long, any other 1.
  vf squares = zero();
  for (int d = 0; d < head_dim; ++d) squares = fma(load(x[d]), load(x[d]), squares);
  const vf limit = mul(squares, set1(1.0f / static_cast<float>(head_dim)));
  vf products = zero();
  const int fields_per_line = 8 / code_bits;
  for (int line = 0; line < at.lines; ++line) {
    uint32_t tokens[kPageTokens] = {};
    for (int field = 0; field < fields_per_line; ++field) {
      for (int j = 0; j < kCodeDims; ++j) {
        const int d = (line * fields_per_line + field) * kCodeDims + j;
        if (d >= head_dim) break;
        const vf v = load(x[d]);
        const vf length = max(v, sub(zero(), v));
        const uint32_t positive = mask_at_least_zero(v);
        products = add(products, length);
        uint32_t low = positive;
        uint32_t high = 0;
        if (code_bits == 2) {  // codes 0 to 3: far below, below, above, far above
          const uint32_t far = mask_at_least_zero(sub(mul(v, v), limit));
          products = add(products, keep_mask(far, add(length, length)));
          low = ~(positive ^ far);
          high = positive;
        }
        for (int t = 0; t < kPageTokens; ++t)
          tokens[t] |= ((low >> t & 1u) | (high >> t & 1u) << 1) << (8 * j + field * code_bits);
      }
    }
    std::memcpy(out + int64_t{64} * line, tokens, sizeof(tokens));
  }
  alignas(64) float numerator[kPageTokens], denominator[kPageTokens];
  store(numerator, squares);
  store(denominator, products);
  float most = 0.0f;
  for (int t = 0; t < kPageTokens; ++t) {
    numerator[t] = denominator[t] > 0.0f ? numerator[t] / denominator[t] : 0.0f;
    most = numerator[t] > most ? numerator[t] : most;
  }
  const uint16_t unit_bits = float_to_bf16(most / 255.0f);
  const float unit = bf16_to_float(unit_bits);
  for (int t = 0; t < kPageTokens; ++t) {
    const float exact = unit > 0.0f ? std::nearbyint(numerator[t] / unit) : 0.0f;
    out[at.factors + t] = static_cast<char>(static_cast<uint8_t>(exact < 255.0f ? exact : 255.0f));
  }
  std::memcpy(out + at.units, &unit_bits, sizeof(unit_bits));
  std::memcpy(out + at.units + sizeof(unit_bits), &step_bits, sizeof(step_bits));
  std::memset(out + at.units + 2 * sizeof(unit_bits), 0, at.bytes - at.units - 2 * sizeof(unit_bits));
  out[at.less_common] = common != nullptr;
}

// at(r)[p] = scale * the sum of the lanes of x[r][p], for the first `Rows` rows and `Pages` pages. Lanes are added in the same order
// whatever the tile, so that a page's score does not depend on what it is scored together with.
template <int Rows, int Pages, class At>
static inline void sum_lanes(const vf (&x)[kScoreRows][kScorePages], float scale, At at) {
  if constexpr (Pages < kScorePages) {
    for (int r = 0; r < Rows; ++r) {
      alignas(16) float sums[kScorePages];
      reduce_add4(x[r], scale, sums);
      for (int p = 0; p < Pages; ++p) at(r)[p] = sums[p];
    }
  } else if constexpr (Rows == 1) {
    reduce_add4(x[0], scale, at(0));
  } else {
    reduce_add4x4(x, scale, Rows, at);
  }
}

// Rows against the means of `Pages` pages: out[r * kScoreChunkPages + p] = sum of q c.
template <int Rows, int Pages>
[[gnu::always_inline]] static inline void mean_tile(const CodeQuery* const* queries, int head_dim, const char* means,
                                                    int64_t stride, float* out) {
  vs sums[Rows][Pages];
  for (int r = 0; r < Rows; ++r)
    for (int p = 0; p < Pages; ++p) sums[r][p] = no_products();
  for (int d = 0; d < head_dim; d += 64) {
    for (int p = 0; p < Pages; ++p) {
      const vb levels = half_bytes(means + p * stride + d / 2);  // what follows the mean is multiplied by zeros
      for (int r = 0; r < Rows; ++r)
        sums[r][p] = add_products(sums[r][p], levels, load_vb(reinterpret_cast<const char*>(queries[r]->halves + d)));
    }
  }
  vf by_lane[kScoreRows][kScorePages];
  for (int r = 0; r < kScoreRows; ++r)
    for (int p = 0; p < kScorePages; ++p) by_lane[r][p] = r < Rows && p < Pages ? product_sums(sums[r][p]) : zero();
  sum_lanes<Rows, Pages>(by_lane, 1.0f, [&](int r) { return out + r * kScoreChunkPages; });
}

// Rows against the codes of `Pages` pages, which begin at the tile's page `first_page`: out[r][p] = sums of q c by token.
template <int Bits, int Rows, int Pages>
[[gnu::always_inline]] static inline void token_tile(const CodeQuery* const* queries, int lines, const char* codes,
                                                     int64_t stride, const SummariesAhead& ahead, int first_page, vf (*out)[kScorePages]) {
  constexpr int kFields = 8 / Bits;
  for (int begin = 0; begin < lines; begin += kLinesPerSum) {
    const int end = lines - begin < kLinesPerSum ? lines : begin + kLinesPerSum;
    vs sums[Rows][Pages];
    for (int r = 0; r < Rows; ++r)
      for (int p = 0; p < Pages; ++p) sums[r][p] = no_products();
    for (int line = begin; line < end; ++line) {
      vb packed[Pages];
      for (int p = 0; p < Pages; ++p) {
        packed[p] = load_vb(codes + p * stride + int64_t{64} * line);
        if (ahead) prefetch(ahead.page(first_page + p) + int64_t{64} * line);
      }
#pragma GCC unroll 8
      for (int field = 0; field < kFields; ++field) {
        vb values[Pages];
        for (int p = 0; p < Pages; ++p) values[p] = fields<Bits>(packed[p], field * Bits);
        for (int r = 0; r < Rows; ++r) {
          const vb dims = repeat4(reinterpret_cast<const char*>(queries[r]->dims + (line * kFields + field) * kCodeDims));
          for (int p = 0; p < Pages; ++p) sums[r][p] = add_products(sums[r][p], values[p], dims);
        }
      }
    }
    for (int r = 0; r < Rows; ++r)
      for (int p = 0; p < Pages; ++p)
        out[r][p] = begin == 0 ? product_sums(sums[r][p]) : add(out[r][p], product_sums(sums[r][p]));
  }
}

// Rows against the codes of `Pages` pages, first half: sums[r * kScoreChunkPages + p] is the sum over the page's tokens of
// 2^(score - mean's score - kAboveMean), means[r * kScoreChunkPages + p] the product with the mean's levels, steps[p] their unit.
// `finish_codes` takes the logarithms later, so that no tile waits for them.
template <int Bits, int Rows, int Pages, int HeadDim>
static inline void code_tile(const CodeTileArgs& args, const void* const* rows, const char* summaries, const SummariesAhead& ahead,
                             float* sums, float* means, float* steps) {
  constexpr float kTop = (1 << Bits) - 1;
  const int head_dim = HeadDim > 0 ? HeadDim : args.head_dim;
  const CodeLayout at(head_dim, Bits);
  const int64_t bytes = HeadDim > 0 ? at.bytes : args.page_bytes;
  const CodeQuery* queries[Rows];
  for (int r = 0; r < Rows; ++r) queries[r] = static_cast<const CodeQuery*>(rows[r]);
  if (ahead)  // what follows the codes; the codes are fetched a line at a time, so that requests to memory never queue up
    for (int p = 0; p < Pages; ++p)
      for (int64_t byte = at.mean; byte < bytes; byte += 64) prefetch(ahead.page(p) + byte);
  mean_tile<Rows, Pages>(queries, head_dim, summaries + at.mean, bytes, means);
  vf weights[kScoreRows][kScorePages];
  for (int r = 0; r < kScoreRows; ++r)
    for (int p = r < Rows ? Pages : 0; p < kScorePages; ++p) weights[r][p] = zero();
  constexpr int kAtOnce = Pages < kPagesAtOnce ? Pages : kPagesAtOnce;
  for (int p = 0; p < Pages; p += kAtOnce) {
    vf products[Rows][kScorePages];
    token_tile<Bits, Rows, kAtOnce>(queries, at.lines, summaries + p * bytes, bytes, ahead, p, products);
    for (int i = 0; i < kAtOnce; ++i) {
      const char* page = summaries + (p + i) * bytes;
      uint16_t units[2];
      std::memcpy(units, page + at.units, sizeof(units));
      const vf factors = mul(load_bytes(page + at.factors), set1(bf16_to_float(units[0])));
      steps[p + i] = bf16_to_float(units[1]);
      for (int r = 0; r < Rows; ++r) {
        const vf product = fma(products[r][i], set1(queries[r]->a), set1(-kTop * queries[r]->sum));
        weights[r][p + i] = exp2_estimate(limit(fma(product, factors, set1(-kAboveMean)), kMostExponent));
      }
    }
  }
  sum_lanes<Rows, Pages>(weights, 1.0f, [&](int r) { return sums + r * kScoreChunkPages; });
}

// Second half: turns a page's sum over tokens into its estimated weight: the logarithm of the sum of exp(score) over its tokens.
static inline void finish_codes(const CodeQuery& query, const float* sums, const float* means, const float* steps, int count,
                                float* scores) {
  const vf a = set1(query.a * kLn2);
  const vf shift = set1(-kMeanLevels * query.sum * kLn2);
  const auto finish = [&](vf sum, const float* mean, const float* step) {
    return fma(add(log2_positive(sum), set1(kAboveMean)), set1(kLn2), mul(load(step), fma(load(mean), a, shift)));
  };
  int i = 0;
  for (; i + 16 <= count; i += 16) store(scores + i, finish(load(sums + i), means + i, steps + i));
  if (i == count) return;
  alignas(64) float last[16];
  for (int n = 0; n < 16; ++n) last[n] = i + n < count ? sums[i + n] : 1.0f;
  store(last, finish(load(last), means + i, steps + i));
  for (int n = 0; i + n < count; ++n) scores[i + n] = last[n];
}

template <int Bits, int Rows, int Pages, int HeadDim>
static inline void code_row_tile(const CodeTileArgs& args, const void* const* queries, int rows, const char* summaries,
                                 const SummariesAhead& ahead, float* sums, float* means, float* steps) {
  if (rows == Rows) {
    code_tile<Bits, Rows, Pages, HeadDim>(args, queries, summaries, ahead, sums, means, steps);
  } else if constexpr (Rows > 1) {
    code_row_tile<Bits, Rows - 1, Pages, HeadDim>(args, queries, rows, summaries, ahead, sums, means, steps);
  }
}

// The usual head sizes have their own code: their loops have a known length, and nothing goes through memory between them.
template <int Bits>
static void score_codes_of(const CodeTileArgs& args, const void* const* queries, int rows, bool four_pages,
                           const char* summaries, const SummariesAhead& ahead, float* sums, float* means, float* steps) {
  if (!four_pages)
    code_row_tile<Bits, kScoreRows, 1, 0>(args, queries, rows, summaries, ahead, sums, means, steps);
  else if (args.head_dim == 64)
    code_row_tile<Bits, kScoreRows, kScorePages, 64>(args, queries, rows, summaries, ahead, sums, means, steps);
  else if (args.head_dim == 128)
    code_row_tile<Bits, kScoreRows, kScorePages, 128>(args, queries, rows, summaries, ahead, sums, means, steps);
  else
    code_row_tile<Bits, kScoreRows, kScorePages, 0>(args, queries, rows, summaries, ahead, sums, means, steps);
}

static void score_codes(const CodeTileArgs& args, const void* const* queries, int rows, bool four_pages, const char* summaries,
                        const SummariesAhead& ahead, float* sums, float* means, float* steps) {
  if (args.code_bits == 1)
    score_codes_of<1>(args, queries, rows, four_pages, summaries, ahead, sums, means, steps);
  else
    score_codes_of<2>(args, queries, rows, four_pages, summaries, ahead, sums, means, steps);
}
