// Key codes: one or two bits a dimension of every key, rotated and less its page's mean, from which each token's score is
// estimated without bias (RaBitQ: Gao and Long, 2024, and its extension to more bits), and from these the page's weight.
// Included inside the namespace and target region of one instruction set, before page_ops.inl. From its vec_*.inl come the
// integer products: CodeBits and CodeSum (4 dims of 16 tokens a step), MeanBits and MeanSum (kMeanDims dims of a page's mean).

inline constexpr int kScorePages = 4;  // pages scored together,
inline constexpr int kScoreRows = 4;   // with as many rows: 16 sums across lanes are taken together
inline constexpr int kMeanLevels = 15;
inline constexpr float kLeastMass = 1e-37f;  // of a page against the heaviest token of its tile
inline constexpr float kLog2E = 1.44269504088896341f;
inline constexpr float kLn2 = 0.693147180559945309f;

// What a query row q, rotated and rounded to 8 bits, is turned into. Scores are in units of log 2. The elements of codes and
// mean are the odd numbers 2 c - top for c = 0 ... top: <q, element> = a * (sum of q c) - top * sum.
struct CodeQuery {
  float a;
  float sum;
  char padding[56];
  char operands[];  // mean_query_bytes(head_dim), then [head_dim / 4][kCodeGroupBytes]
};

static int64_t mean_query_bytes(int head_dim) { return (head_dim + kMeanDims - 1) / kMeanDims * kMeanQueryBytes; }

static int64_t code_query_bytes(int head_dim) {
  return static_cast<int64_t>(sizeof(CodeQuery)) + mean_query_bytes(head_dim) + head_dim / kCodeDims * kCodeGroupBytes;
}

// The rotation: random signs, then a Hadamard transform of each piece, the largest powers of two that the dims split into.
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
  for (int d = 0; d < head_dim; d += 16) store(&x[d][0], T::load_elements(in + d * sizeof(typename T::Element)));
  rotate<1>(x, head_dim);
  float largest = 0.0f;
  for (int d = 0; d < head_dim; ++d) largest = std::fabs(x[d][0]) > largest ? std::fabs(x[d][0]) : largest;
  const float factor = largest > 0.0f ? 127.0f / largest : 0.0f;
  int sum = 0;
  for (int d = 0; d < head_dim; ++d) {
    rounded[d] = static_cast<int8_t>(std::nearbyint(x[d][0] * factor));
    sum += rounded[d];
  }
  CodeQuery& result = *static_cast<CodeQuery*>(out);
  const float unit = largest / 127.0f * scale * kLog2E;
  result.a = 2.0f * unit;
  result.sum = unit * static_cast<float>(sum);
  for (int d = 0; d < head_dim; d += kMeanDims)
    store_mean_query(rounded + d, result.operands + d / kMeanDims * kMeanQueryBytes);
  char* groups = result.operands + mean_query_bytes(head_dim);
  for (int g = 0; g < head_dim / kCodeDims; ++g) store_code_group(rounded + g * kCodeDims, groups + g * kCodeGroupBytes);
}

// The codes of a full page, as laid out in layout.h.
template <class T>
static void encode_page(const char* page, char* out, int head_dim, int code_bits) {
  using Element = typename T::Element;
  alignas(64) float x[kMaxHeadDim][kPageTokens];
  float mean[kMaxHeadDim];
  const Element* keys = reinterpret_cast<const Element*>(page);
  for (int d = 0; d < head_dim; ++d) {
    const Element* lane = keys + int64_t{d / T::pack} * T::pack * kPageTokens + d % T::pack;
    for (int t = 0; t < kPageTokens; ++t) x[d][t] = T::to_float(lane[t * T::pack]);
  }
  rotate<kPageTokens>(x, head_dim);
  float largest = 0.0f;
  for (int d = 0; d < head_dim; ++d) {
    mean[d] = reduce_add(load(x[d])) * (1.0f / kPageTokens);
    largest = std::fabs(mean[d]) > largest ? std::fabs(mean[d]) : largest;
  }
  const uint16_t step_bits = float_to_bf16(largest / kMeanLevels);
  const float step = bf16_to_float(step_bits);
  const CodeLayout at(head_dim, code_bits);
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
  // With two bits an element beyond the token's root mean square is 3 units long, else 1.
  vf squares = zero();
  for (int d = 0; d < head_dim; ++d) squares = fma(load(x[d]), load(x[d]), squares);
  const vf limit = mul(squares, set1(1.0f / static_cast<float>(head_dim)));
  vf products = zero();
  for (int d = 0; d < head_dim; d += kCodeDims) {
    uint64_t bits[2] = {};
    for (int j = 0; j < kCodeDims; ++j) {
      const vf v = load(x[d + j]);
      const vf length = max(v, sub(zero(), v));
      const uint32_t positive = mask_at_least_zero(v);
      products = add(products, length);
      if (code_bits == 1) {
        bits[0] |= every_fourth_bit(positive) << j;
        continue;
      }
      const uint32_t far = mask_at_least_zero(sub(mul(v, v), limit));  // codes 0 to 3: far below, below, above, far above
      const vf twice = add(length, length);
      products = add(products, keep_mask(far, twice));
      bits[0] |= every_fourth_bit(~(positive ^ far) & 0xffffu) << j;
      bits[1] |= every_fourth_bit(positive) << j;
    }
    std::memcpy(out + d / kCodeDims * code_bits * sizeof(uint64_t), bits, code_bits * sizeof(uint64_t));
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
}

// Rows against the codes of `Pages` pages: scores[r * row_stride + p] is the page's estimated weight, the logarithm of the sum
// of exp(score) over its tokens. `ahead`: where the same pages of a later block lie.
template <int Bits, int Rows, int Pages>
static inline void code_tile(const ScoreArgs& args, const void* const* rows, const char* summaries, const char* ahead,
                             float* scores) {
  const int64_t bytes = args.table.summary_bytes;
  const CodeLayout at(args.head_dim, Bits);
  const int groups = args.head_dim / kCodeDims;
  const int64_t groups_at = mean_query_bytes(args.head_dim);
  const CodeQuery* queries[Rows];
  for (int r = 0; r < Rows; ++r) queries[r] = static_cast<const CodeQuery*>(rows[r]);
  if (ahead)
    for (int64_t byte = 0; byte < Pages * bytes; byte += 64) prefetch(ahead + byte);

  vf base[kScoreRows][kScorePages];
  for (int r = 0; r < kScoreRows; ++r)
    for (int p = 0; p < kScorePages; ++p) base[r][p] = zero();
  {
    MeanSum sums[Rows][Pages];
    for (int r = 0; r < Rows; ++r)
      for (int p = 0; p < Pages; ++p) sums[r][p] = no_mean();
    for (int d = 0; d < args.head_dim; d += kMeanDims) {
      for (int p = 0; p < Pages; ++p) {
        const MeanBits mean = load_mean(summaries + p * bytes + at.mean + d / 2, args.head_dim - d);
        for (int r = 0; r < Rows; ++r)
          sums[r][p] = add_mean(sums[r][p], mean, queries[r]->operands + d / kMeanDims * kMeanQueryBytes);
      }
    }
    for (int r = 0; r < Rows; ++r)
      for (int p = 0; p < Pages; ++p) base[r][p] = mean_sums(sums[r][p]);
  }
  alignas(64) float means[kScoreRows * kScorePages];
  if constexpr (Pages == kScorePages)
    reduce_add4x4(base, 1.0f, Rows, means, kScorePages);
  else
    for (int r = 0; r < Rows; ++r)
      for (int p = 0; p < Pages; ++p) means[r * kScorePages + p] = reduce_add(base[r][p]);

  CodeSum sums[Rows][Pages];
  for (int r = 0; r < Rows; ++r)
    for (int p = 0; p < Pages; ++p) sums[r][p] = no_codes();
  for (int g = 0; g < groups; ++g) {
    CodeBits codes[Pages];
    for (int p = 0; p < Pages; ++p)
      codes[p] = load_codes<Bits>(summaries + p * bytes + g * Bits * static_cast<int64_t>(sizeof(uint64_t)));
    for (int r = 0; r < Rows; ++r)
      for (int p = 0; p < Pages; ++p)
        sums[r][p] = add_codes<Bits>(sums[r][p], codes[p], queries[r]->operands + groups_at + g * kCodeGroupBytes);
  }

  constexpr float kTop = (1 << Bits) - 1;
  float steps[Pages];
  vf factors[Pages];
  for (int p = 0; p < Pages; ++p) {
    uint16_t units[2];
    std::memcpy(units, summaries + p * bytes + at.units, sizeof(units));
    factors[p] = mul(load_bytes(summaries + p * bytes + at.factors), set1(bf16_to_float(units[0])));
    steps[p] = bf16_to_float(units[1]);
  }
  vf weights[kScoreRows][kScorePages];
  for (int r = 0; r < kScoreRows; ++r)
    for (int p = 0; p < kScorePages; ++p) weights[r][p] = zero();
  float highest[Rows];
  for (int r = 0; r < Rows; ++r) {
    const float a = queries[r]->a;
    const float sum = queries[r]->sum;
    for (int p = 0; p < Pages; ++p) {
      const vf product = fma(code_sums(sums[r][p]), set1(a), set1(-kTop * sum));
      weights[r][p] = fma(product, factors[p], set1(steps[p] * (a * means[r * kScorePages + p] - kMeanLevels * sum)));
    }
    vf peak = weights[r][0];
    for (int p = 1; p < Pages; ++p) peak = max(peak, weights[r][p]);
    highest[r] = reduce_max(peak);
    for (int p = 0; p < Pages; ++p) weights[r][p] = exp2_nonpositive(sub(weights[r][p], set1(highest[r])));
  }
  if constexpr (Pages == kScorePages) {
    alignas(64) float mass[kScoreRows * kScorePages];
    store(mass, set1(1.0f));
    reduce_add4x4(weights, 1.0f, Rows, mass, kScorePages);
    store(mass, log2_positive(max(load(mass), set1(kLeastMass))));
    for (int r = 0; r < Rows; ++r)
      for (int p = 0; p < Pages; ++p)
        scores[r * args.row_stride + p] = (highest[r] + mass[r * kScorePages + p]) * kLn2;
  } else {
    for (int r = 0; r < Rows; ++r) {
      for (int p = 0; p < Pages; ++p) {
        const float mass = reduce_add(weights[r][p]);
        scores[r * args.row_stride + p] = highest[r] * kLn2 + natural_log(mass > kLeastMass ? mass : kLeastMass);
      }
    }
  }
}

template <int Bits, int Rows, int Pages>
static inline void code_row_tile(const ScoreArgs& args, const void* const* queries, int rows, const char* summaries,
                                 const char* ahead, float* scores) {
  if (rows == Rows) {
    code_tile<Bits, Rows, Pages>(args, queries, summaries, ahead, scores);
  } else if constexpr (Rows > 1) {
    code_row_tile<Bits, Rows - 1, Pages>(args, queries, rows, summaries, ahead, scores);
  }
}

static void score_codes(const ScoreArgs& args, const void* const* queries, int rows, bool four_pages, const char* summaries,
                        const char* ahead, float* scores) {
  if (args.code_bits == 1) {
    if (four_pages)
      code_row_tile<1, kScoreRows, kScorePages>(args, queries, rows, summaries, ahead, scores);
    else
      code_row_tile<1, kScoreRows, 1>(args, queries, rows, summaries, ahead, scores);
  } else {
    if (four_pages)
      code_row_tile<2, kScoreRows, kScorePages>(args, queries, rows, summaries, ahead, scores);
    else
      code_row_tile<2, kScoreRows, 1>(args, queries, rows, summaries, ahead, scores);
  }
}
