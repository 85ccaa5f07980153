// Products with key codes where no instruction multiplies bytes: four dims of a row are a table of the sums of their 16 subsets,
// looked up by each token's four bits. Included by vec_*.inl, which bring Fours, load_fours, look_up and four_values.

inline constexpr int kCodeGroupBytes = 64;
struct CodeBits {
  Fours planes[2];
};
using CodeSum = vf;
static inline void store_code_group(const int8_t* dims, char* out) { store_subset_sums(dims, out); }
template <int Bits>
static inline CodeBits load_codes(const char* p) {
  CodeBits codes;
  for (int bit = 0; bit < Bits; ++bit) codes.planes[bit] = load_fours(p + bit * sizeof(uint64_t));
  return codes;
}
static inline CodeSum no_codes() { return zero(); }
template <int Bits>
static inline CodeSum add_codes(CodeSum sum, const CodeBits& codes, const char* group) {
  sum = add(sum, look_up(group, codes.planes[0]));
  if constexpr (Bits == 2) sum = fma(look_up(group, codes.planes[1]), set1(2.0f), sum);
  return sum;
}
static inline vf code_sums(CodeSum sum) { return sum; }

inline constexpr int kMeanDims = 16;
inline constexpr int kMeanQueryBytes = 64;
using MeanBits = vf;
using MeanSum = vf;
static inline void store_mean_query(const int8_t* dims, char* out) {
  float values[16];
  for (int i = 0; i < 16; ++i) values[i] = static_cast<float>(dims[i]);
  std::memcpy(out, values, sizeof(values));
}
static inline MeanBits load_mean(const char* p, int) { return four_values(load_fours(p)); }
static inline MeanSum no_mean() { return zero(); }
static inline MeanSum add_mean(MeanSum sum, MeanBits mean, const char* query) {
  return fma(mean, load(reinterpret_cast<const float*>(query)), sum);
}
static inline vf mean_sums(MeanSum sum) { return sum; }
