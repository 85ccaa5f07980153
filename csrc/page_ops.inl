// Operations on single pages (write, summarise) and on page scores; conversions of query and output rows.
// Included inside the namespace and target region of one instruction set, after code_ops.inl.

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

static void group_scores(const float* scores, int64_t stride, int rows, int count, const float* retained,
                         float* lse_out, const float* bounds, float* out) {
  const float minus_infinity = -__builtin_inff();
  const int whole = count / 16 * 16;
  alignas(64) float last[16];
  for (int r = 0; r < rows; ++r) {
    const float* row = scores + r * stride;
    float lse = 0.0f;  // a single row keeps its scores
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
    if (bounds) lse -= bounds[r];
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
  for (int i = 0; i < whole; i += 16) {  // if a score is NaN, min and max take their second argument
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

// Stored: type of a page's elements; uint8_t for e4m3, whose rows are bf16.
template <class T, class Stored = typename T::Element>
static void write_page(char* page, int offset, int count, int head_dim, const void* key, int64_t key_stride,
                       const void* value, int64_t value_stride) {
  using Element = typename T::Element;
  const uint8_t* narrowed = sizeof(Stored) == 1 ? narrowed_bf16() : nullptr;
  const auto stored = [&](Element x) -> Stored {
    if constexpr (sizeof(Stored) == 1)
      return narrowed[x];
    else
      return x;
  };
  Stored* k_out = reinterpret_cast<Stored*>(page);
  Stored* v_out = k_out + int64_t{kPageTokens} * head_dim;
  const Element* k_in = static_cast<const Element*>(key);
  const Element* v_in = static_cast<const Element*>(value);
  for (int d = 0; d < head_dim; d += T::pack) {
    Stored* step = k_out + int64_t{d} * kPageTokens;
    for (int t = 0; t < count; ++t)
      for (int i = 0; i < T::pack; ++i) step[(offset + t) * T::pack + i] = stored(k_in[t * key_stride + d + i]);
  }
  for (int t = 0; t < count; ++t) {
    const int token = offset + t;
    Stored* row = v_out + int64_t{token / T::pack} * head_dim * T::pack + token % T::pack;
    for (int d = 0; d < head_dim; ++d) row[d * T::pack] = stored(v_in[t * value_stride + d]);
  }
}

template <class T>
static void summarize(const char* page, char* out, const Layout& layout, const float* common) {
  const int head_dim = layout.head_dim;
  if (layout.has_codes()) return encode_page<T>(page, out, layout, common);
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
static void summarize_narrow(const char* page, char* out, const Layout& layout, const float* common) {
  summarize<T>(widened(page, kPageTokens * layout.head_dim), out, layout, common);
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
