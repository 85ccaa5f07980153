// Pages with elements of one byte have the layout of bf16 and are widened to it before anything is computed from them.
// Included inside the namespace and target region of one instruction set, after its vec_*.inl.

static inline bool is_narrow(const PageTable& table, int head_dim) {
  return table.page_bytes == int64_t{2} * kPageTokens * head_dim;
}

// Widens `elements` elements. `ahead`: as many bytes to fetch meanwhile, or null.
static inline void widen(const char* from, int elements, const char* ahead, char* out) {
  const Widening widening;
  for (int at = 0; at < elements; at += 64) {
    if (ahead) prefetch(ahead + at);
    widening.widen(from + at, out + 2 * at);
    widening.widen(from + at + 32, out + 2 * at + 64);
  }
}

static inline const char* widened(const char* from, int elements) {
  char* out = widened_pages();
  widen(from, elements, nullptr, out);
  return out;
}
