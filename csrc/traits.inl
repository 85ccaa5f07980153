// How each KV dtype is read and multiplied. A "step" is one register of a page: for K it holds `pack` dims of 16
// tokens, for V `pack` tokens of 16 dims. `Op` is what one row multiplies a step with, once per step. A pinned step stays
// in its register; otherwise GCC would load it again for each row.
// Included inside the namespace and target region of one instruction set, after its vec_*.inl.

struct F32 {
  using Element = float;
  struct Op { float x; };
  using Step = vf;
  using Broadcast = vf;
  static constexpr int pack = 1;
  template <int>
  static constexpr bool by_halves = false;
  static inline Step load_step(const char* p) { return load(reinterpret_cast<const float*>(p)); }
  static inline void pin(Step& s) { pin_register(s); }
  static inline Broadcast broadcast(const Op* op) { return set1(op->x); }
  static inline vf multiply_add(vf acc, Step s, Broadcast b) { return fma(s, b, acc); }
  static inline vf load_elements(const char* p) { return load(reinterpret_cast<const float*>(p)); }
  static inline float to_float(Element x) { return x; }
  static inline Element from_float(float x) { return x; }
  static inline vf exp2(vf x) { return exp2_float(x); }
  static inline void store_weights(Op* out, vf weights) { store(&out->x, weights); }
  // A run of summary elements and of prepared summary operands (float).
  using Operand = float;
  using Run = vf;
  static constexpr int run_elements = 16;
  static inline Run load_run(const char* p) { return load_elements(p); }
  static inline Run load_operands(const Operand* p) { return load(p); }
  static inline vf multiply_run(vf acc, Run a, Run b) { return fma(a, b, acc); }
  static inline void store_operands(Operand* out, vf x) { store(out, x); }
};

struct F16 {
  using Element = uint16_t;
  struct Op { float x; };
  using Step = vf;
  using Broadcast = vf;
  static constexpr int pack = 1;
  template <int>
  static constexpr bool by_halves = false;
  static inline Step load_step(const char* p) { return load_f16(p); }
  static inline void pin(Step& s) { pin_register(s); }
  static inline Broadcast broadcast(const Op* op) { return set1(op->x); }
  static inline vf multiply_add(vf acc, Step s, Broadcast b) { return fma(s, b, acc); }
  static inline vf load_elements(const char* p) { return load_f16(p); }
  static inline float to_float(Element x) { return f16_to_float(x); }
  static inline Element from_float(float x) { return float_to_f16(x); }
  static inline vf exp2(vf x) { return exp2_float(x); }
  static inline void store_weights(Op* out, vf weights) { store(&out->x, weights); }
  // A run of summary elements and of prepared summary operands (float).
  using Operand = float;
  using Run = vf;
  static constexpr int run_elements = 16;
  static inline Run load_run(const char* p) { return load_elements(p); }
  static inline Run load_operands(const Operand* p) { return load(p); }
  static inline vf multiply_run(vf acc, Run a, Run b) { return fma(a, b, acc); }
  static inline void store_operands(Operand* out, vf x) { store(out, x); }
};

struct Bf16 {
  using Element = uint16_t;
  struct Op { float even, odd; };
  struct Step { vf even, odd; };
  struct Broadcast { vf even, odd; };
  static constexpr int pack = 2;
  // Whether a tile of `Rows` rows takes the even dims (or tokens) of its columns before the odd ones, since both do not fit.
  template <int Rows>
  static constexpr bool by_halves = kFewRegisters && Rows == 2;
  static inline Step load_step(const char* p) {
    Step s;
    load_bf16_pairs(p, s.even, s.odd);
    return s;
  }
  static inline Step load_half_step(const char* p) {
    Step s = load_step(p);
    s.odd = zero();
    return s;
  }
  static inline void pin(Step& s) {
    pin_register(s.even);
    pin_register(s.odd);
  }
  static inline Broadcast broadcast(const Op* op) { return {set1(op->even), set1(op->odd)}; }
  static inline vf multiply_add(vf acc, Step s, Broadcast b) { return fma(s.odd, b.odd, fma(s.even, b.even, acc)); }
  static inline vf load_elements(const char* p) { return load_bf16(p); }
  static inline float to_float(Element x) { return bf16_to_float(x); }
  static inline Element from_float(float x) { return float_to_bf16(x); }
  static inline vf exp2(vf x) { return exp2_bf16(x); }
  static inline void store_weights(Op* out, vf weights) { store(&out->even, weights); }
  // A run of summary elements and of prepared summary operands (float).
  using Operand = float;
  using Run = vf;
  static constexpr int run_elements = 16;
  static inline Run load_run(const char* p) { return load_elements(p); }
  static inline Run load_operands(const Operand* p) { return load(p); }
  static inline vf multiply_run(vf acc, Run a, Run b) { return fma(a, b, acc); }
  static inline void store_operands(Operand* out, vf x) { store(out, x); }
};

#ifdef HYBRID_SPARSE_BF16_DOT
// bf16 products summed in pairs into float lanes by one instruction; queries and weights stay bf16.
struct Bf16Dot {
  using Element = uint16_t;
  struct Op { uint32_t pair; };
  using Step = __m512bh;
  using Broadcast = __m512bh;
  static constexpr int pack = 2;
  template <int>
  static constexpr bool by_halves = false;
  static inline Step load_step(const char* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static inline Step load_half_step(const char* p) {
    return (__m512bh)_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(0xffff));
  }
  static inline void pin(Step& s) { asm("" : "+v"(s)); }
  static inline Broadcast broadcast(const Op* op) { return (__m512bh)_mm512_set1_epi32(static_cast<int>(op->pair)); }
  static inline vf multiply_add(vf acc, Step s, Broadcast b) { return _mm512_dpbf16_ps(acc, s, b); }
  static inline vf load_elements(const char* p) { return load_bf16(p); }
  static inline float to_float(Element x) { return bf16_to_float(x); }
  static inline Element from_float(float x) { return float_to_bf16(x); }
  static inline vf exp2(vf x) { return exp2_bf16(x); }
  static inline void store_weights(Op* out, vf weights) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), (__m256i)_mm512_cvtneps_pbh(weights));
  }
  // A run of summary elements and of prepared summary operands (bf16).
  using Operand = uint16_t;
  using Run = __m512bh;
  static constexpr int run_elements = 32;
  static inline Run load_run(const char* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static inline Run load_half_run(const char* p) {
    return (__m512bh)_mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static inline Run load_operands(const Operand* p) { return load_run(reinterpret_cast<const char*>(p)); }
  static inline Run load_half_operands(const Operand* p) { return load_half_run(reinterpret_cast<const char*>(p)); }
  static inline vf multiply_run(vf acc, Run a, Run b) { return _mm512_dpbf16_ps(acc, a, b); }
  static inline void store_operands(Operand* out, vf x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), (__m256i)_mm512_cvtneps_pbh(x));
  }
};
#endif
