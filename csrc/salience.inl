// What HGCA needs in addition to attention: copying tokens between pages, and attention weights from kept scores.
// Included inside the namespace and target region of one instruction set, after traits.inl.

template <class T, class Stored = typename T::Element>
static void copy_token(char* to, int to_token, const char* from, int from_token, int head_dim) {
  Stored* k_out = reinterpret_cast<Stored*>(to);
  const Stored* k_in = reinterpret_cast<const Stored*>(from);
  for (int d = 0; d < head_dim; d += T::pack) {
    const int64_t step = int64_t{d} * kPageTokens;
    for (int i = 0; i < T::pack; ++i) k_out[step + to_token * T::pack + i] = k_in[step + from_token * T::pack + i];
  }
  const auto value_row = [&](int token) {
    return (int64_t{kPageTokens} + token / T::pack * T::pack) * head_dim + token % T::pack;
  };
  Stored* v_out = k_out + value_row(to_token);
  const Stored* v_in = k_in + value_row(from_token);
  for (int d = 0; d < head_dim; ++d) v_out[d * T::pack] = v_in[d * T::pack];
}

// The first `count` (below 16) elements of `from`, and `fill` after them.
static inline vf load_part(const float* from, int count, float fill) {
  alignas(64) float part[16];
  for (int i = 0; i < 16; ++i) part[i] = i < count ? from[i] : fill;
  return load(part);
}

static float log_sum_exp(const float* scores, int count, float so_far) {
  const float minus_infinity = -__builtin_inff();
  const int whole = count / 16 * 16;
  const vf rest = load_part(scores + whole, count - whole, minus_infinity);
  vf highest = rest;
  for (int i = 0; i < whole; i += 16) highest = max(highest, load(scores + i));
  const float high = reduce_max(highest);
  if (high == minus_infinity) return so_far;
  const vf shift = set1(-high);
  vf sum = exp_nonpositive(add(rest, shift));
  for (int i = 0; i < whole; i += 16) sum = add(sum, exp_nonpositive(add(load(scores + i), shift)));
  const float lse = high + natural_log(reduce_add(sum));
  const float top = lse > so_far ? lse : so_far;
  return top + natural_log(natural_exp(lse - top) + natural_exp(so_far - top));
}

static void blend_weights(const float* scores, int count, float lse, float keep, float take, float* out) {
  const vf shift = set1(-lse);
  const int whole = count / 16 * 16;
  for (int i = 0; i < whole; i += 16) {
    const vf weights = exp_nonpositive(add(load(scores + i), shift));
    store(out + i, fma(weights, set1(take), mul(load(out + i), set1(keep))));
  }
  alignas(64) float last[16];
  store(last, exp_nonpositive(add(load_part(scores + whole, count - whole, lse), shift)));
  for (int i = whole; i < count; ++i) out[i] = keep * out[i] + take * last[i - whole];
}
