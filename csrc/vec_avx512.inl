// 16 floats in one AVX-512 register. Included inside the namespace and target region of its instruction set.

inline constexpr int kRowTile = 6;    // rows x key pages (or 16-dim columns) held in registers: 24 of 32
inline constexpr int kColumnTile = 4;
inline constexpr int kWideRowTile = 8;  // with half the columns: 16 registers
inline constexpr bool kFewRegisters = false;

using vf = __m512;

static inline vf zero() { return _mm512_setzero_ps(); }
static inline vf set1(float x) { return _mm512_set1_ps(x); }
static inline vf load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
static inline vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf max(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf min(vf a, vf b) { return _mm512_min_ps(a, b); }
static inline void pin_register(vf& x) { asm("" : "+v"(x)); }
static inline float reduce_add(vf x) { return _mm512_reduce_add_ps(x); }
static inline float reduce_max(vf x) { return _mm512_reduce_max_ps(x); }
static inline float reduce_min(vf x) { return _mm512_reduce_min_ps(x); }
static inline bool any_above(vf x, float y) { return _mm512_cmp_ps_mask(x, set1(y), _CMP_GT_OQ) != 0; }

// In each quarter of the result: the sums of that quarter of x[0] to x[3].
static inline __m512 quarter_sums(const vf* x) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
  const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  return _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
}
// out[i] = scale * sum of the lanes of x[i]. Lanes are added in the same order as in `reduce_add4x4`.
static inline void reduce_add4(const vf* x, float scale, float* out) {
  const __m512 quarters = quarter_sums(x);
  const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(quarters), _mm512_extractf32x8_ps(quarters, 1));
  const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
  _mm_storeu_ps(out, _mm_mul_ps(sums, _mm_set1_ps(scale)));
}
// reduce_add4 of each of the first `rows` rows, a row's results at `at(row)`.
template <class At>
static inline void reduce_add4x4(const vf (&x)[4][4], float scale, int rows, At at) {
  const __m512 a = quarter_sums(x[0]), b = quarter_sums(x[1]), c = quarter_sums(x[2]), d = quarter_sums(x[3]);
  const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
  const __m512 sums = _mm512_mul_ps(
      set1(scale), _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd)));
  _mm_storeu_ps(at(0), _mm512_castps512_ps128(sums));
  if (rows > 1) _mm_storeu_ps(at(1), _mm512_extractf32x4_ps(sums, 1));
  if (rows > 2) _mm_storeu_ps(at(2), _mm512_extractf32x4_ps(sums, 2));
  if (rows > 3) _mm_storeu_ps(at(3), _mm512_extractf32x4_ps(sums, 3));
}

// Lanes from `count` on become `fill`.
static inline vf keep_first(vf x, int count, float fill) {
  const __mmask16 kept = static_cast<__mmask16>((1u << count) - 1u);
  return _mm512_mask_blend_ps(kept, _mm512_set1_ps(fill), x);
}

// 2^f for |f| <= 0.5 (relative error below 2e-7).
static inline vf exp2_fraction(vf f) {
  vf p = set1(1.5403530e-4f);
  p = fma(p, f, set1(1.33335581e-3f));
  p = fma(p, f, set1(9.61812911e-3f));
  p = fma(p, f, set1(5.55041087e-2f));
  p = fma(p, f, set1(2.40226507e-1f));
  p = fma(p, f, set1(6.93147181e-1f));
  return fma(p, f, set1(1.0f));
}
// e^x for x <= 0 (relative error below 3e-7); 0 below -150.
static inline vf exp_nonpositive(vf x) {
  x = max(x, set1(-150.0f));
  const vf log2e = set1(kLog2E);
  const vf n = _mm512_roundscale_ps(mul(x, log2e), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm512_scalef_ps(exp2_fraction(_mm512_fmsub_ps(x, log2e, n)), n);
}
// 2^x (relative error below 3e-7); 0 for minus infinity, whose fraction is 0.
static inline vf exp2_float(vf x) {
  const vf f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm512_scalef_ps(exp2_fraction(f), sub(x, f));
}
// The same with a relative error below 3e-6, less than a hundredth of bf16's rounding error.
static inline vf exp2_bf16(vf x) {
  const vf f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  vf p = fma(f, set1(0.0135341678f), set1(0.0520114601f));
  p = fma(p, f, set1(0.241442755f));
  p = fma(p, f, set1(0.693003833f));
  p = fma(p, f, set1(1.00000262f));
  return _mm512_scalef_ps(p, x);  // times 2^floor(x)
}

static inline void load_bf16_pairs(const char* p, vf& even, vf& odd) {
  const __m512i raw = _mm512_loadu_si512(p);
  even = _mm512_castsi512_ps(_mm512_slli_epi32(raw, 16));
  odd = _mm512_castsi512_ps(_mm512_and_si512(raw, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
static inline vf load_bf16(const char* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
// Widens 32 e4m3 to bf16. Bits 0 to 5 look up each half of the table of magnitudes; bit 6 says which half.
struct Widening {
  __m512i low[2], high[2];
  Widening() {
    const uint16_t* table = widened_e4m3();
    for (int i = 0; i < 2; ++i) {
      low[i] = _mm512_loadu_si512(table + 32 * i);
      high[i] = _mm512_loadu_si512(table + 64 + 32 * i);
    }
  }
  void widen(const char* in, char* out) const {
    const __m512i bits = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in)));
    const __m512i of_high = _mm512_permutex2var_epi16(high[0], bits, high[1]);
    const __m512i magnitude = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(bits, _mm512_set1_epi16(0x40)),
                                                      _mm512_permutex2var_epi16(low[0], bits, low[1]), of_high);
    const __m512i sign = _mm512_slli_epi16(bits, 8);
    _mm512_storeu_si512(out, _mm512_ternarylogic_epi32(magnitude, sign, _mm512_set1_epi16(static_cast<short>(0x8000)), 0xf8));
  }
};
static inline vf load_f16(const char* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// Fetches into the L2 cache if bf16 dot products are used (Zen 4 then has more lines on their way), else into the L1 cache, which
// spares Skylake a second line buffer. Always inlined: GCC assumes that a call that only fetches ahead has no effect, and drops it.
#ifdef HYBRID_SPARSE_BF16_DOT
inline constexpr auto kFetchHint = _MM_HINT_T1;
#else
inline constexpr auto kFetchHint = _MM_HINT_T0;
#endif
[[gnu::always_inline]] static inline void prefetch(const char* p) { _mm_prefetch(p, kFetchHint); }

// Base 2 logarithm of positive normal numbers (absolute error below 1e-5, enough for an estimate). That of the mantissa is a
// polynomial, since the two divisions of a quickly converging series take longer than all the rest.
static inline vf log2_positive(vf x) {
  const vf f = _mm512_sub_ps(_mm512_getmant_ps(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero), set1(1.0f));
  vf p = fma(f, set1(-3.45952112e-2f), set1(1.46433615e-1f));
  p = fma(p, f, set1(-3.03389668e-1f));
  p = fma(p, f, set1(4.69301687e-1f));
  p = fma(p, f, set1(-7.20442370e-1f));
  p = fma(p, f, set1(1.44268325f));
  return fma(p, f, _mm512_getexp_ps(x));
}

// x with its magnitude limited to `magnitude`.
static inline vf limit(vf x, float magnitude) { return _mm512_range_ps(x, set1(magnitude), 2); }

// 2^x for |x| <= 120 (relative error below 8e-5, enough for an estimate).
static inline vf exp2_estimate(vf x) {
  const vf f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
  vf p = fma(f, set1(0.07802452f), set1(0.22606724f));
  p = fma(p, f, set1(0.69583347f));
  p = fma(p, f, set1(0.99992523f));
  return _mm512_scalef_ps(p, x);  // times 2^floor(x)
}

static inline uint32_t mask_at_least_zero(vf x) { return _mm512_cmp_ps_mask(x, zero(), _CMP_GE_OQ); }
static inline vf keep_mask(uint32_t mask, vf x) { return _mm512_maskz_mov_ps(static_cast<__mmask16>(mask), x); }
static inline vf load_bytes(const char* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

// vb: 64 bytes. vs: sums of products of unsigned bytes with signed ones; in the end all products of each of 16 tokens are added up.
using vb = __m512i;
using vs = __m512i;
static inline vb load_vb(const char* p) { return _mm512_loadu_si512(p); }
static inline vb repeat4(const char* p) {
  int bytes;
  std::memcpy(&bytes, p, sizeof(bytes));
  return _mm512_set1_epi32(bytes);
}
template <int Bits>
static inline vb fields(vb x, int lowest_bit) {
  return _mm512_and_si512(_mm512_srli_epi16(x, lowest_bit), _mm512_set1_epi8((1 << Bits) - 1));
}
// The lower halves of 32 bytes, then their upper halves.
static inline vb half_bytes(const char* p) {
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return fields<4>(_mm512_inserti64x4(_mm512_castsi256_si512(both), _mm256_srli_epi16(both, 4), 1), 0);
}
static inline vs no_products() { return _mm512_setzero_si512(); }
#ifdef HYBRID_SPARSE_VNNI
inline constexpr int kLinesPerSum = kMaxHeadDim;  // sums of 32 bits hold any number
static inline vs add_products(vs sum, vb a, vb b) { return _mm512_dpbusd_epi32(sum, a, b); }
static inline vf product_sums(vs sum) { return _mm512_cvtepi32_ps(sum); }
#else
inline constexpr int kLinesPerSum = 8;  // sums of 16 bits hold 8 x 4 x 2 products of at most 3 x 127
static inline vs add_products(vs sum, vb a, vb b) {
  sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16(a, b));
  asm("" : "+v"(sum));  // add it here: GCC would gather the products first and run out of registers
  return sum;
}
static inline vf product_sums(vs sum) { return _mm512_cvtepi32_ps(_mm512_madd_epi16(sum, _mm512_set1_epi16(1))); }
#endif
inline constexpr int kPagesAtOnce = 4;  // pages of a tile: 16 sums and 4 pages' bytes
