// The operations that exist once per instruction set and KV dtype, and the list of instruction sets.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "layout.h"

namespace hybrid_sparse {

// Attention of query rows to pages of one KV head. A row is one query head of one token.
struct AttendArgs {
  const void* const* queries;  // [rows] prepared operands of each row (see prepare_query)
  const int32_t* visible;      // [rows] the row sees tokens [0, visible)
  int rows;
  const int32_t* pages;  // page numbers in reading order, or null for page_begin, page_begin + 1, …
  int page_begin;
  int num_pages;
  PageTable table;
  int head_dim;
  float scale;          // above 0: a row's highest score is found before scaling
  float* row_max;       // [rows]            state: maximum score, -inf where no key was seen
  float* row_sum;       // [rows]            state: sum of exp(score - row_max)
  float* out;           // [rows, head_dim]  state: sum of exp(score - row_max) * value
  float* page_lse_min;  // [rows] or null: smallest log-sum-exp of one page (PSA's AS_min, as a logarithm)
  // For `attend_keeping_scores`: receives each token's scaled score, whether the row sees it or not. Row r's lie at
  // token_scores + r * stride, page after page in reading order. Without `out` only they are computed.
  float* token_scores = nullptr;
  int64_t token_scores_stride = 0;
  const int32_t* hidden = nullptr;  // [rows] nor does the row see tokens [0, hidden); null: none is hidden
};

inline constexpr int kChunkPages = 4;        // pages that rows attend to at once
inline constexpr int kScoreChunkPages = 128;  // pages whose key codes are scored before the logarithms are taken

// Query rows against the summaries of a range of pages, for all KV heads, since a block's summaries lie together. The rows are of one
// request, or of several that have these pages in common.
struct ScoreArgs {
  const void* const* queries;  // [heads * rows] prepared summary operands (see prepare_summary_query)
  int heads;
  int rows;  // per head
  int page_begin;
  int num_pages;
  PageTable table;  // of the first head
  int summary_elements;
  int head_dim;
  int code_bits;  // of key codes; 0: another summary
  float scale;
  float* const* scores;  // [heads * rows] where each row's scores go, page after page
  float* scratch;        // [heads * (2 * rows + 1)][kScoreChunkPages], for key codes
};

// Query rows against logical blocks of whole pages of one KV head: bounds from the min/max summaries of a block's pages (Quest).
// Block b has the pages [page_begin + b * block_pages, … + block_pages), cut off at page_end.
struct BlockScoreArgs {
  const void* const* queries;  // [rows] floats: the row's positive elements, then its negative ones, 0 elsewhere
  int rows;
  PageTable table;
  int page_begin;
  int page_end;
  int block_pages;  // at most kMaxBlockPages
  int num_blocks;
  int head_dim;
  float* scores;  // unscaled; row r's at scores + r * row_stride
  int64_t row_stride;
};

// out = in * weights + bias; with `relu`, negative results become 0.
struct DenseArgs {
  const float* in;  // [rows], `in_stride` floats apart
  int64_t in_stride;
  int rows;
  int inputs;
  const float* panels;  // [outputs / 16][inputs][16]
  const float* bias;    // [outputs]
  int outputs;          // a multiple of 16
  bool relu;
  float* out;  // [rows][outputs]
};

struct ScoreBuckets {
  float highest;  // score
  float width;    // of a bucket
};

struct Kernels {
  // Bytes of one row's prepared operands.
  int64_t (*query_bytes)(int head_dim);
  // Query row in the KV's dtype -> operands of `attend`. May return `query` itself; `scratch` has room for query_bytes.
  const void* (*prepare_query)(const void* query, int head_dim, void* scratch);
  // Bytes of one row's operands of `score`, whole cache lines.
  int64_t (*summary_query_bytes)(const Layout& layout);
  // Query row -> operands of `score`: minmax [relu(q), -relu(-q)] (Quest), cuboid_mean [q] (ArkVale), key_codes a CodeQuery
  // (code_ops.inl), which includes the softmax scale.
  void (*prepare_summary_query)(const void* query, const Layout& layout, float scale, void* out);
  // State of the rows over the pages; overwrites row_max, row_sum, out and page_lse_min.
  void (*attend)(const AttendArgs& args);
  void (*attend_keeping_scores)(const AttendArgs& args);
  void (*score)(const ScoreArgs& args);
  // Page scores of a group's rows (row r at scores + r * stride) -> group scores: the logarithm of the page's estimated share
  // of a row's weight, for the row in which this share is largest.
  // `retained`: [rows] log-sum-exp of what is read anyway; shares are then of both together. Null: shares are of the
  // candidates alone, and a single row keeps its scores. `lse`: [rows] receives the candidates' log-sum-exp; null if `retained` is.
  // `bounds`: [rows] how far a row's shares may exceed these, as logarithms: they are raised by it. Null: they are not.
  void (*group_scores)(const float* scores, int64_t stride, int rows, int count, const float* retained, float* lse,
                       const float* bounds, float* out);
  // out[i] = the bucket of scores[i]: 0 for the highest to buckets - 1 for the lowest, evenly over their range. Scores that are not
  // finite fall into some bucket.
  ScoreBuckets (*bucket_scores)(const float* scores, int count, int buckets, uint16_t* out);
  // Writes the indices, ascending, of the scores that are at most `below` under `highest`; returns their number.
  int (*take_near)(const float* scores, int count, float highest, float below, int32_t* out);
  // Writes K and V of `count` tokens into one page from token `offset` on; strides in elements.
  void (*write_page)(char* page, int offset, int count, int head_dim, const void* key, int64_t key_stride,
                     const void* value, int64_t value_stride);
  // Summarises a full page. Key codes encode its keys minus `common` [head_dim], or its keys if that is null.
  void (*summarize)(const char* page, char* out, const Layout& layout, const float* common);
  // Copies K and V of token `from_token` of page `from` to token `to_token` of page `to`.
  void (*copy_token)(char* to, int to_token, const char* from, int from_token, int head_dim);
  // Log-sum-exp of `count` scores and of `so_far` (-inf: nothing).
  float (*log_sum_exp)(const float* scores, int count, float so_far);
  // out[i] = keep * out[i] + take * exp(scores[i] - lse): attention weights into a mean or a moving average.
  void (*blend_weights)(const float* scores, int count, float lse, float keep, float take, float* out);
  // out[i] = values[i] * factor, rounded to the dtype.
  void (*store_row)(void* out, const float* values, float factor, int head_dim);
  // Sum of the bytes as floats: a plain read, for the measured ceiling. `next`: bytes read afterwards, fetched meanwhile; or null.
  float (*stream)(const char* bytes, int64_t size, const char* next);
  void (*score_blocks)(const BlockScoreArgs& args);
  void (*dense_layer)(const DenseArgs& args);
  // Converts `count` elements, a multiple of 16, to floats.
  void (*to_float)(const void* in, int count, float* out);
  // Of a full page's keys: the squared norm of each [16], and their sum [head_dim].
  void (*key_norms)(const char* page, int head_dim, float* key_squares, float* key_sum);
  // Of a full page's tokens: the squared norm of each key and value [16], and the sums of keys and values [head_dim].
  void (*page_norms)(const char* page, int head_dim, float* key_squares, float* value_squares, float* key_sum,
                     float* value_sum);
  // The scaled product of a row with a vector [head_dim]. `operands`: the row's for `score` by key codes.
  float (*query_product)(const void* operands, const float* vector, int head_dim);
  // How many requests must select pages of a common prefix, by a threshold, for `attend` to take less time for all of its pages at
  // once; 0: no number of them. Measured with SmolLM2 at 7168 tokens (benchmarks/TRIED.md).
  int prefix_sharers = 0;
};

struct Isa {
  const char* name;
  bool (*runs_here)();
  Kernels by_dtype[4];  // indexed by DType
};

// For pages whose elements take a byte (e4m3), in `narrow_pages.cpp`.
// The calling thread's buffer for the pages of a chunk as bf16.
char* widened_pages();
// The e4m3 of every bf16, by its bits: the nearest, the even one of two, and the largest for all that is larger.
const uint8_t* narrowed_bf16();
// The bf16 of every e4m3, by its bits.
const uint16_t* widened_e4m3();

// One per isa_*.cpp.
Isa amx_bf16();
Isa avx512_bf16();
Isa avx512_vnni();
Isa avx512();
Isa avx2();
Isa scalar();

// Whether a bf16 dot product takes less time than the two FMAs that would do its work. Measures it, in less than 0.1 ms; the CPU
// must have the instruction.
bool bf16_dot_is_fast();
// Best first.
const std::vector<Isa>& isas();
// "auto" or a name; throws std::invalid_argument naming the valid ones.
const Isa& find_isa(const std::string& name);

}  // namespace hybrid_sparse
