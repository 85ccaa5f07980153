// 16 floats in plain C++: correct everywhere, fast nowhere. Included inside the namespace of its instruction set.

inline constexpr int kRowTile = 2;
inline constexpr int kColumnTile = 1;
inline constexpr int kWideRowTile = kRowTile;
inline constexpr bool kFewRegisters = false;

struct vf {
  float v[16];
};

#define HYBRID_SPARSE_LANES for (int i = 0; i < 16; ++i)
static inline vf zero() { return vf{}; }
static inline vf set1(float x) { vf r; HYBRID_SPARSE_LANES r.v[i] = x; return r; }
static inline vf load(const float* p) { vf r; HYBRID_SPARSE_LANES r.v[i] = p[i]; return r; }
static inline void store(float* p, vf x) { HYBRID_SPARSE_LANES p[i] = x.v[i]; }
static inline vf add(vf a, vf b) { HYBRID_SPARSE_LANES a.v[i] += b.v[i]; return a; }
static inline vf sub(vf a, vf b) { HYBRID_SPARSE_LANES a.v[i] -= b.v[i]; return a; }
static inline vf mul(vf a, vf b) { HYBRID_SPARSE_LANES a.v[i] *= b.v[i]; return a; }
static inline vf fma(vf a, vf b, vf c) { HYBRID_SPARSE_LANES c.v[i] += a.v[i] * b.v[i]; return c; }
static inline vf max(vf a, vf b) { HYBRID_SPARSE_LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
static inline vf min(vf a, vf b) { HYBRID_SPARSE_LANES a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
static inline void pin_register(vf&) {}
static inline float reduce_add(vf x) { float r = 0; HYBRID_SPARSE_LANES r += x.v[i]; return r; }
static inline float reduce_max(vf x) { float r = x.v[0]; HYBRID_SPARSE_LANES r = r > x.v[i] ? r : x.v[i]; return r; }
static inline float reduce_min(vf x) { float r = x.v[0]; HYBRID_SPARSE_LANES r = r < x.v[i] ? r : x.v[i]; return r; }
static inline bool any_above(vf x, float y) { bool r = false; HYBRID_SPARSE_LANES r |= x.v[i] > y; return r; }

// out[i] = scale * sum of the lanes of x[i].
static inline void reduce_add4(const vf* x, float scale, float* out) {
  for (int i = 0; i < 4; ++i) out[i] = reduce_add(x[i]) * scale;
}
// reduce_add4 of each of the first `rows` rows, a row's results at `at(row)`.
template <class At>
static inline void reduce_add4x4(const vf (&x)[4][4], float scale, int rows, At at) {
  for (int r = 0; r < rows; ++r) reduce_add4(x[r], scale, at(r));
}

// Lanes from `count` on become `fill`.
static inline vf keep_first(vf x, int count, float fill) {
  for (int i = count < 0 ? 0 : count; i < 16; ++i) x.v[i] = fill;
  return x;
}
static inline vf exp2_float(vf x) { HYBRID_SPARSE_LANES x.v[i] = std::exp2(x.v[i]); return x; }
static inline vf exp2_bf16(vf x) { return exp2_float(x); }
static inline vf exp_nonpositive(vf x) { HYBRID_SPARSE_LANES x.v[i] = std::exp(x.v[i]); return x; }

static inline void load_bf16_pairs(const char* p, vf& even, vf& odd) {
  HYBRID_SPARSE_LANES {
    uint32_t raw;
    std::memcpy(&raw, p + 4 * i, 4);
    even.v[i] = std::bit_cast<float>(raw << 16);
    odd.v[i] = std::bit_cast<float>(raw & 0xffff0000u);
  }
}
static inline vf load_bf16(const char* p) {
  vf r;
  HYBRID_SPARSE_LANES r.v[i] = bf16_to_float(reinterpret_cast<const uint16_t*>(p)[i]);
  return r;
}
// Widens 32 e4m3 to bf16.
struct Widening {
  const uint16_t* table = widened_e4m3();
  void widen(const char* in, char* out) const {
    for (int i = 0; i < 32; ++i) std::memcpy(out + 2 * i, table + static_cast<uint8_t>(in[i]), 2);
  }
};
static inline vf load_f16(const char* p) {
  vf r;
  HYBRID_SPARSE_LANES r.v[i] = f16_to_float(reinterpret_cast<const uint16_t*>(p)[i]);
  return r;
}
static inline void prefetch(const char*) {}

static inline vf log2_positive(vf x) { HYBRID_SPARSE_LANES x.v[i] = std::log2(x.v[i]); return x; }
static inline vf limit(vf x, float magnitude) { return max(min(x, set1(magnitude)), set1(-magnitude)); }
static inline vf exp2_estimate(vf x) { return exp2_float(x); }
static inline uint32_t mask_at_least_zero(vf x) {
  uint32_t mask = 0;
  HYBRID_SPARSE_LANES mask |= (x.v[i] >= 0.0f ? 1u : 0u) << i;
  return mask;
}
static inline vf keep_mask(uint32_t mask, vf x) { HYBRID_SPARSE_LANES x.v[i] = mask >> i & 1 ? x.v[i] : 0.0f; return x; }
static inline vf load_bytes(const char* p) {
  vf r;
  HYBRID_SPARSE_LANES r.v[i] = static_cast<float>(static_cast<uint8_t>(p[i]));
  return r;
}

#undef HYBRID_SPARSE_LANES

// vb: 64 bytes. vs: sums of products of unsigned bytes with signed ones; in the end all products of each of 16 tokens are added up.
struct vb {
  uint8_t v[64];
};
struct vs {
  int32_t v[16];
};
static inline vb load_vb(const char* p) {
  vb r;
  std::memcpy(r.v, p, sizeof(r.v));
  return r;
}
static inline vb repeat4(const char* p) {
  vb r;
  for (int i = 0; i < 64; i += 4) std::memcpy(r.v + i, p, 4);
  return r;
}
template <int Bits>
static inline vb fields(vb x, int lowest_bit) {
  for (uint8_t& byte : x.v) byte = static_cast<uint8_t>(byte >> lowest_bit & ((1 << Bits) - 1));
  return x;
}
// The lower halves of 32 bytes, then their upper halves.
static inline vb half_bytes(const char* p) {
  vb r;
  for (int i = 0; i < 32; ++i) {
    r.v[i] = static_cast<uint8_t>(p[i] & 15);
    r.v[32 + i] = static_cast<uint8_t>(static_cast<uint8_t>(p[i]) >> 4);
  }
  return r;
}
inline constexpr int kLinesPerSum = kMaxHeadDim;
static inline vs no_products() { return vs{}; }
static inline vs add_products(vs sum, vb a, vb b) {
  for (int i = 0; i < 64; ++i) sum.v[i / 4] += a.v[i] * static_cast<int8_t>(b.v[i]);
  return sum;
}
static inline vf product_sums(vs sum) {
  vf r;
  for (int i = 0; i < 16; ++i) r.v[i] = static_cast<float>(sum.v[i]);
  return r;
}
inline constexpr int kPagesAtOnce = 1;
