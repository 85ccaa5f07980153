// 16 floats in two AVX2 registers. Included inside the namespace and target region of its instruction set.

inline constexpr int kRowTile = 3;  // 3 rows x 2 pages x 2 registers: 12 of 16
inline constexpr int kColumnTile = 2;
inline constexpr int kWideRowTile = kRowTile;
inline constexpr bool kFewRegisters = true;

struct vf {
  __m256 a, b;
};

static inline vf zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline vf set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline vf load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, vf x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
static inline vf add(vf x, vf y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline vf sub(vf x, vf y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline vf mul(vf x, vf y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline vf fma(vf x, vf y, vf z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline vf max(vf x, vf y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline vf min(vf x, vf y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }

static inline void pin_register(vf&) {}  // 16 registers do not hold a tile's sums and steps
static inline float reduce_add(vf x) {
  const __m256 s = _mm256_add_ps(x.a, x.b);
  __m128 h = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  h = _mm_add_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h)));
}
static inline float reduce_max(vf x) {
  const __m256 s = _mm256_max_ps(x.a, x.b);
  __m128 h = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  h = _mm_max_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
}
static inline float reduce_min(vf x) {
  const __m256 s = _mm256_min_ps(x.a, x.b);
  __m128 h = _mm_min_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  h = _mm_min_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_min_ss(h, _mm_movehdup_ps(h)));
}
static inline bool any_above(vf x, float y) {
  const __m256 limit = _mm256_set1_ps(y);
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(x.a, limit, _CMP_GT_OQ), _mm256_cmp_ps(x.b, limit, _CMP_GT_OQ))) != 0;
}

static inline __m128 halves(vf x) {
  const __m256 s = _mm256_add_ps(x.a, x.b);
  return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}
// out[i] = scale * sum of the lanes of x[i].
static inline void reduce_add4(const vf* x, float scale, float* out) {
  const __m128 s = _mm_hadd_ps(_mm_hadd_ps(halves(x[0]), halves(x[1])), _mm_hadd_ps(halves(x[2]), halves(x[3])));
  _mm_storeu_ps(out, _mm_mul_ps(s, _mm_set1_ps(scale)));
}
// reduce_add4 of each of the first `rows` rows, a row's results at `at(row)`.
template <class At>
static inline void reduce_add4x4(const vf (&x)[4][4], float scale, int rows, At at) {
  for (int r = 0; r < rows; ++r) reduce_add4(x[r], scale, at(r));
}

// Lanes from `count` on become `fill`.
static inline vf keep_first(vf x, int count, float fill) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256 low = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count), lanes));
  const __m256 high = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count - 8), lanes));
  const __m256 f = _mm256_set1_ps(fill);
  return {_mm256_blendv_ps(f, x.a, low), _mm256_blendv_ps(f, x.b, high)};
}

// 2^f for |f| <= 0.5 (relative error below 2e-7).
static inline __m256 exp2_fraction(__m256 f) {
  __m256 p = _mm256_set1_ps(1.5403530e-4f);
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.33335581e-3f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(9.61812911e-3f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(5.55041087e-2f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(2.40226507e-1f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(6.93147181e-1f));
  return _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0f));
}
// x * 2^n for a whole n, if the result is normal.
static inline __m256 times_exp2(__m256 x, __m256 n) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
}
static inline __m256 exp_half(__m256 x) {
  const __m256 lowest = _mm256_set1_ps(-87.0f);
  const __m256 alive = _mm256_cmp_ps(x, lowest, _CMP_GE_OQ);
  x = _mm256_max_ps(x, lowest);
  const __m256 log2e = _mm256_set1_ps(kLog2E);
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, log2e), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm256_and_ps(alive, times_exp2(exp2_fraction(_mm256_fmsub_ps(x, log2e, n)), n));
}
static inline __m256 exp2_float_half(__m256 x) {
  const __m256 lowest = _mm256_set1_ps(-125.0f);
  const __m256 alive = _mm256_cmp_ps(x, lowest, _CMP_GE_OQ);
  x = _mm256_max_ps(x, lowest);
  const __m256 n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm256_and_ps(alive, times_exp2(exp2_fraction(_mm256_sub_ps(x, n)), n));
}
// 2^x for x <= 127 (relative error below 3e-7); 0 below -125.
static inline vf exp2_float(vf x) { return {exp2_float_half(x.a), exp2_float_half(x.b)}; }
static inline __m256 exp2_bf16_half(__m256 x) {
  const __m256 lowest = _mm256_set1_ps(-125.0f);
  const __m256 alive = _mm256_cmp_ps(x, lowest, _CMP_GE_OQ);
  x = _mm256_max_ps(x, lowest);
  const __m256 n = _mm256_floor_ps(x);
  const __m256 f = _mm256_sub_ps(x, n);
  __m256 p = _mm256_fmadd_ps(f, _mm256_set1_ps(0.0135341678f), _mm256_set1_ps(0.0520114601f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0.241442755f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0.693003833f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.00000262f));
  return _mm256_and_ps(alive, times_exp2(p, n));
}
// The same with a relative error below 3e-6, less than a hundredth of bf16's rounding error.
static inline vf exp2_bf16(vf x) { return {exp2_bf16_half(x.a), exp2_bf16_half(x.b)}; }
// e^x for x <= 0 (relative error below 3e-7); 0 below -87.
static inline vf exp_nonpositive(vf x) { return {exp_half(x.a), exp_half(x.b)}; }

static inline void load_bf16_pairs(const char* p, vf& even, vf& odd) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const __m256i r0 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i r1 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32));
  even = {_mm256_castsi256_ps(_mm256_slli_epi32(r0, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(r1, 16))};
  odd = {_mm256_castsi256_ps(_mm256_and_si256(r0, high)), _mm256_castsi256_ps(_mm256_and_si256(r1, high))};
}
// The even or the odd ones of 16 bf16 elements. The elements are loaded for each half, and the mask is read from memory: kept, they
// would take registers that sums need.
alignas(32) static const uint32_t kOddElements[8] = {0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u,
                                                     0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};
template <int Odd>
static inline __m256 load_bf16_half(const char* p) {
  if constexpr (Odd) asm("" : "+r"(p));
  __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  if constexpr (Odd)
    asm("vpand %1, %0, %0" : "+x"(raw) : "m"(kOddElements));
  else
    raw = _mm256_slli_epi32(raw, 16);
  return _mm256_castsi256_ps(raw);
}
// acc[r][j] += the step at column(j), of 32 bf16 elements, times the pair at operand(r): even elements first, a register at a time.
template <int Rows, int Columns, class Column, class Operand>
[[gnu::always_inline]]
static inline void multiply_halves(vf (&acc)[Rows][Columns], const Column& column, const Operand& operand) {
  const auto half = [&]<int Odd>() __attribute__((always_inline)) {
    __m256 q[Rows];
    for (int r = 0; r < Rows; ++r) q[r] = _mm256_set1_ps(Odd ? operand(r)->odd : operand(r)->even);
    for (int j = 0; j < Columns; ++j) {
      const __m256 low = load_bf16_half<Odd>(column(j));
      for (int r = 0; r < Rows; ++r) acc[r][j].a = _mm256_fmadd_ps(low, q[r], acc[r][j].a);
      const __m256 high = load_bf16_half<Odd>(column(j) + 32);
      for (int r = 0; r < Rows; ++r) acc[r][j].b = _mm256_fmadd_ps(high, q[r], acc[r][j].b);
    }
  };
  half.template operator()<0>();
  half.template operator()<1>();
}
static inline vf load_bf16(const char* p) {
  const __m128i r0 = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i r1 = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(r0), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(r1), 16))};
}
// Widens 32 e4m3 to bf16. Magnitudes from 2^-6 on keep their bits, shifted, with another bias; the eight smaller ones are looked
// up by byte.
struct Widening {
  __m256i small_low, small_high;
  Widening() {
    alignas(16) uint8_t low[16] = {}, high[16] = {};
    for (int i = 0; i < 8; ++i) {
      low[i] = static_cast<uint8_t>(widened_e4m3()[i]);
      high[i] = static_cast<uint8_t>(widened_e4m3()[i] >> 8);
    }
    small_low = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(low)));
    small_high = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(high)));
  }
  __m256i widen_half(__m128i bytes) const {
    const __m256i bits = _mm256_cvtepu8_epi16(bytes);
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi16(0x7f));
    const __m256i large = _mm256_add_epi16(_mm256_slli_epi16(magnitude, 4), _mm256_set1_epi16(120 << 7));
    const __m256i index = _mm256_or_si256(magnitude, _mm256_set1_epi16(static_cast<short>(0x8000)));  // the upper byte looks up 0
    const __m256i small = _mm256_or_si256(_mm256_shuffle_epi8(small_low, index),
                                          _mm256_slli_epi16(_mm256_shuffle_epi8(small_high, index), 8));
    const __m256i is_small = _mm256_cmpgt_epi16(_mm256_set1_epi16(8), magnitude);
    const __m256i is_nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
    const __m256i finite = _mm256_blendv_epi8(large, small, is_small);
    const __m256i result = _mm256_blendv_epi8(finite, _mm256_set1_epi16(0x7fc0), is_nan);
    return _mm256_or_si256(result, _mm256_and_si256(_mm256_slli_epi16(bits, 8), _mm256_set1_epi16(static_cast<short>(0x8000))));
  }
  void widen(const char* in, char* out) const {
    for (int i = 0; i < 2; ++i)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out) + i,
                          widen_half(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in) + i)));
  }
};
static inline vf load_f16(const char* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
}
// Always inlined: GCC assumes that a call that only fetches ahead has no effect, and drops it.
[[gnu::always_inline]] static inline void prefetch(const char* p) { _mm_prefetch(p, _MM_HINT_T1); }

static inline __m256 log2_half(__m256 x) {
  // x = m * 2^shift, m in [0.75, 1.5): once the bits of 0.75 are subtracted, `shift` is what lies above the mantissa
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i shift = _mm256_srai_epi32(_mm256_sub_epi32(bits, _mm256_set1_epi32(0x3f400000)), 23);
  const __m256 m = _mm256_castsi256_ps(_mm256_sub_epi32(bits, _mm256_slli_epi32(shift, 23)));
  const __m256 one = _mm256_set1_ps(1.0f);
  const __m256 z = _mm256_div_ps(_mm256_sub_ps(m, one), _mm256_add_ps(m, one));
  const __m256 z2 = _mm256_mul_ps(z, z);
  __m256 p = _mm256_fmadd_ps(z2, _mm256_set1_ps(2.8853901f / 9), _mm256_set1_ps(2.8853901f / 7));
  p = _mm256_fmadd_ps(p, z2, _mm256_set1_ps(2.8853901f / 5));
  p = _mm256_fmadd_ps(p, z2, _mm256_set1_ps(2.8853901f / 3));
  p = _mm256_fmadd_ps(p, z2, _mm256_set1_ps(2.8853901f));
  return _mm256_fmadd_ps(p, z, _mm256_cvtepi32_ps(shift));
}
// Base 2 logarithm of positive normal numbers (absolute error below 1e-6), by the series of 2 atanh((m - 1) / (m + 1)).
static inline vf log2_positive(vf x) { return {log2_half(x.a), log2_half(x.b)}; }

// x with its magnitude limited to `magnitude`.
static inline vf limit(vf x, float magnitude) { return max(min(x, set1(magnitude)), set1(-magnitude)); }

static inline __m256 exp2_half(__m256 x) {
  const __m256 n = _mm256_floor_ps(x);
  const __m256 f = _mm256_sub_ps(x, n);
  __m256 p = _mm256_fmadd_ps(f, _mm256_set1_ps(0.07802452f), _mm256_set1_ps(0.22606724f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0.69583347f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0.99992523f));
  return times_exp2(p, n);
}
// 2^x for |x| <= 120 (relative error below 8e-5, enough for an estimate).
static inline vf exp2_estimate(vf x) { return {exp2_half(x.a), exp2_half(x.b)}; }

static inline uint32_t mask_at_least_zero(vf x) {
  const __m256 none = _mm256_setzero_ps();
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.a, none, _CMP_GE_OQ))) |
         static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.b, none, _CMP_GE_OQ))) << 8;
}
static inline __m256 keep_bits(uint32_t mask, __m256 x) {
  const __m256i lane_bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i kept = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(mask)), lane_bits);
  return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(kept, lane_bits)));
}
static inline vf keep_mask(uint32_t mask, vf x) { return {keep_bits(mask, x.a), keep_bits(mask >> 8, x.b)}; }
static inline vf load_bytes(const char* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
}

// vb: 64 bytes. vs: sums of products of unsigned bytes with signed ones; in the end all products of each of 16 tokens are added up.
struct vb {
  __m256i a, b;
};
using vs = vb;
static inline __m256i load_half(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
static inline vb load_vb(const char* p) { return {load_half(p), load_half(p + 32)}; }
static inline vb repeat4(const char* p) {
  int bytes;
  std::memcpy(&bytes, p, sizeof(bytes));
  return {_mm256_set1_epi32(bytes), _mm256_set1_epi32(bytes)};
}
template <int Bits>
static inline vb fields(vb x, int lowest_bit) {
  const __m256i mask = _mm256_set1_epi8((1 << Bits) - 1);
  return {_mm256_and_si256(_mm256_srli_epi16(x.a, lowest_bit), mask), _mm256_and_si256(_mm256_srli_epi16(x.b, lowest_bit), mask)};
}
// The lower halves of 32 bytes, then their upper halves.
static inline vb half_bytes(const char* p) {
  const __m256i both = load_half(p);
  return fields<4>({both, _mm256_srli_epi16(both, 4)}, 0);
}
inline constexpr int kLinesPerSum = 8;  // sums of 16 bits hold 8 x 4 x 2 products of at most 3 x 127
static inline vs no_products() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
static inline vs add_products(vs sum, vb x, vb y) {
  sum = {_mm256_add_epi16(sum.a, _mm256_maddubs_epi16(x.a, y.a)), _mm256_add_epi16(sum.b, _mm256_maddubs_epi16(x.b, y.b))};
  asm("" : "+x"(sum.a), "+x"(sum.b));  // add them here: GCC would gather the products first and run out of registers
  return sum;
}
static inline vf product_sums(vs sum) {
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_cvtepi32_ps(_mm256_madd_epi16(sum.a, ones)), _mm256_cvtepi32_ps(_mm256_madd_epi16(sum.b, ones))};
}
inline constexpr int kPagesAtOnce = 1;  // pages of a tile: 8 of 16 registers hold sums
