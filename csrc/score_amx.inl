// Page scores by AMX, for bounds and centres in bf16. In blocks of eight pages the summaries of a head's pages lie in memory as the
// rows of a left tile. A right tile has the operands of the head's query rows, packed once a call.
// Included inside the namespace and target region of one instruction set, after amx_tiles.inl and blocks_ahead.inl.

inline constexpr int kTilePages = 8;
inline constexpr int kTileElements = 32;  // of a summary
// Fewer rows are bound by memory, which is slower for a millisecond now and then if scores are by AMX and attention is not
// (TRIED.md).
inline constexpr int kFewestScoredRows = 4;
inline constexpr int kMostScoredRows = 16;
inline constexpr int kFewestScoredPages = 32;   // fewer are not worth the packing
inline constexpr int64_t kPackedPairs = 16384;  // of bf16 operands: 64 KB, two heads at least. More may take several rounds

// Columns of right tiles, one a row. More than needed would fill the L1 cache: 16 do with four heads and 512 bytes a summary.
static int tile_columns(int rows) { return rows <= 4 ? 4 : rows <= 8 ? 8 : 16; }

struct ScoreBuffers {
  alignas(64) uint32_t queries[kPackedPairs];  // [heads][elements / 2][columns]; columns of no row keep what they had
  alignas(64) float products[2][kTilePages * kMostScoredRows];
};

// Operands as a column of right tiles. They are bf16 numbers, so nothing is rounded. Subnormal ones become 0, as in all of AMX.
static void pack_operands(const float* operands, int elements, int columns, uint32_t* column) {
  const __m512i numbers = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i places = _mm512_mullo_epi32(numbers, _mm512_set1_epi32(columns));
  for (int element = 0; element < elements; element += kTileElements) {
    const __m512bh pairs = _mm512_cvtne2ps_pbh(load(operands + element + 16), load(operands + element));
    _mm512_i32scatter_epi32(column + element / 2 * columns, places, (__m512i)pairs, 4);
  }
}

// Products of a head's pages in a block, [pages][columns]. Fetches as many lines as it reads in two runs that begin at `soon`, unless
// that is null, and `half` bytes later.
static inline void multiply_pages(const char* summaries, int64_t bytes, const uint32_t* queries, int columns, const char* soon,
                                  int64_t half, float* products) {
  clear_tile<0>();
  for (int64_t at = 0; at < bytes; at += 64) {
    for (int line = 0; soon && line < kTilePages / 2; ++line) {
      const char* next = soon + at * (kTilePages / 2) + line * 64;
      prefetch(next);
      prefetch(next + half);
    }
    load_tile<kWideLeft>(summaries + at, bytes);
    load_tile<kWideRight>(queries + at / 4 * columns, columns * 4);
    multiply_tiles<0, kWideLeft, kWideRight>();
  }
  store_tile<0>(products, columns * 4);
}

// Writes the scores of up to four rows and the pages of `mask`, row r's to scores[r] + `page`; the rows' products are columns from
// `products` on.
static inline void write_rows(const float* products, int columns, int rows, float scale, __mmask8 mask, float* const* scores,
                              int page) {
  __m256 of_pages[4];  // p and p + 4
  for (int p = 0; p < 4; ++p) {
    const __m256 low = _mm256_castps128_ps256(_mm_load_ps(products + p * columns));
    of_pages[p] = _mm256_insertf128_ps(low, _mm_load_ps(products + (p + 4) * columns), 1);
  }
  const __m256d low01 = _mm256_castps_pd(_mm256_unpacklo_ps(of_pages[0], of_pages[1]));
  const __m256d low23 = _mm256_castps_pd(_mm256_unpacklo_ps(of_pages[2], of_pages[3]));
  const __m256d high01 = _mm256_castps_pd(_mm256_unpackhi_ps(of_pages[0], of_pages[1]));
  const __m256d high23 = _mm256_castps_pd(_mm256_unpackhi_ps(of_pages[2], of_pages[3]));
  const __m256d of_row[4] = {_mm256_unpacklo_pd(low01, low23), _mm256_unpackhi_pd(low01, low23),
                             _mm256_unpacklo_pd(high01, high23), _mm256_unpackhi_pd(high01, high23)};
  for (int r = 0; r < 4; ++r) {
    const __m256 scaled = _mm256_mul_ps(_mm256_castpd_ps(of_row[r]), _mm256_set1_ps(scale));
    if (r < rows) _mm256_mask_storeu_ps(scores[r] + page, mask, scaled);
  }
}

// A result that has been stored.
struct HeadProducts {
  const float* products;  // null: none yet
  int head;
  int block;
};

static inline void write_scores(const ScoreArgs& args, int columns, const HeadProducts& of) {
  if (!of.products) return;
  const int before = of.block * kTilePages - args.page_begin;  // pages of the call before the block; below 0 in its first one
  const int begin = before < 0 ? -before : 0;
  const int end = args.num_pages - before < kTilePages ? args.num_pages - before : kTilePages;
  const __mmask8 mask = static_cast<__mmask8>((1u << end) - (1u << begin));
  for (int row = 0; row < args.rows; row += 4)
    write_rows(of.products + row, columns, args.rows - row, args.scale, mask, args.scores + of.head * args.rows + row, before);
}

// A result is read again after the next one's products, so that no load waits for its store.
static void score_by_tiles(const ScoreArgs& args, int columns, ScoreBuffers& buffers) {
  const int64_t head_bytes = kTilePages * args.table.summary_bytes;
  const int64_t half_block = args.heads * head_bytes / 2;
  const int64_t head_pairs = int64_t{args.summary_elements} / 2 * columns;
  const int end_page = args.page_begin + args.num_pages;
  const BlocksAhead blocks(args);
  HeadProducts stored = {};
  for (int block = args.page_begin / kTilePages, tile = 0; block * kTilePages < end_page; ++block) {
    const char* here = blocks.summaries(block);
    const char* soon = blocks.soon(block);
    blocks.touch_later(block);
    for (int head = 0; head < args.heads; ++head, ++tile) {
      float* products = buffers.products[tile % 2];
      multiply_pages(here + head * head_bytes, args.table.summary_bytes, buffers.queries + head * head_pairs, columns,
                     soon ? soon + head * head_bytes / 2 : nullptr, half_block, products);
      write_scores(args, columns, stored);
      stored = {products, head, block};
    }
  }
  write_scores(args, columns, stored);
}

static bool fits_tiles(const ScoreArgs& args) {
  return args.code_bits == 0 && args.rows >= kFewestScoredRows && args.rows <= kMostScoredRows &&
         args.num_pages >= kFewestScoredPages && args.table.pages_per_block == kTilePages &&
         args.summary_elements % kTileElements == 0;
}

static void score_amx(const ScoreArgs& all) {
  static const auto score_by_vectors = avx512_vnni().by_dtype[static_cast<int>(DType::bf16)].score;
  if (!fits_tiles(all)) return score_by_vectors(all);
  const int columns = tile_columns(all.rows);
  const Tiles tiles(kTilePages, columns);
  ScoreBuffers buffers;
  const int64_t head_pairs = int64_t{all.summary_elements} / 2 * columns;
  const int most_heads = static_cast<int>(kPackedPairs / head_pairs);
  for (int head = 0; head < all.heads; head += most_heads) {
    ScoreArgs args = all;
    args.heads = all.heads - head < most_heads ? all.heads - head : most_heads;
    args.queries += head * all.rows;
    args.table.summaries += head * kTilePages * all.table.summary_bytes;
    args.scores += head * all.rows;
    for (int row = 0; row < args.heads * args.rows; ++row)
      pack_operands(static_cast<const float*>(args.queries[row]), args.summary_elements, columns,
                    buffers.queries + row / args.rows * head_pairs + row % args.rows);
    score_by_tiles(args, columns, buffers);
  }
}
