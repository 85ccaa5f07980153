// Pages whose elements take a byte lie as those of bf16 do, and are widened to it before anything is computed of them.
// Included inside the namespace and target region of one instruction set, after its vec_*.inl.

static inline bool is_narrow(const PageTable& table, int head_dim) {
  return table.page_bytes == int64_t{2} * kPageTokens * head_dim;
}

// K or V of a page, [16 tokens x head_dim]; `ahead`: as many bytes that are fetched meanwhile, or null.
static inline void widen_part(const char* part, int head_dim, const char* ahead, char* out) {
  const Widening widening;
  for (int at = 0; at < kPageTokens * head_dim; at += 64) {
    if (ahead) prefetch(ahead + at);
    widening.widen(part + at, out + 2 * at);
    widening.widen(part + at + 32, out + 2 * at + 64);
  }
}

static inline const char* widened_keys(const char* page, int head_dim) {
  char* out = widened_pages();
  widen_part(page, head_dim, nullptr, out);
  return out;
}

static inline const char* widened_page(const char* page, int head_dim) {
  char* out = widened_pages();
  widen_part(page, 2 * head_dim, nullptr, out);
  return out;
}
