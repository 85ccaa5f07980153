// The tiles of AMX: what each holds, and the instructions on them. These are in assembly, since GCC's intrinsics take no tile as a
// parameter.
// Included inside the namespace and target region of one instruction set.

inline constexpr int kTileRows = 16;
inline constexpr int kTileColumns = 4;  // results at once: enough to hide that each is a chain of dependent products
// Tiles 0 to 3 are results, rows x 16 floats. A tile of keys has 32 dims of a page's 16 tokens (16 lines of 64 bytes), a tile of
// values has 16 dims of two pages' tokens (8 lines each). Pages lie in memory as tiles need them (layout.h). Half tiles are for the
// last 16 dims of keys if 32 does not divide their number.
inline constexpr int kWideLeft = 4;   // rows x 32 bf16
inline constexpr int kWideRight = 5;  // 16 pairs x 16
inline constexpr int kHalfLeft = 6;   // rows x 16 bf16
inline constexpr int kHalfRight = 7;  // 8 pairs x 16

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t column_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles for results of `rows` rows and `columns` columns, for the lifetime of this object. What runs next on the thread, oneDNN for
// one, finds no tiles of ours.
class Tiles {
 public:
  explicit Tiles(int rows, int columns = 16) {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      config.column_bytes[tile] = static_cast<uint16_t>(tile == kHalfLeft ? 32 : tile == kWideLeft ? 64 : columns * 4);
      config.rows[tile] = static_cast<uint8_t>(tile == kWideRight ? 16 : tile == kHalfRight ? 8 : rows);
    }
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

template <int Tile>
[[gnu::always_inline]] static inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(Tile));
}
template <int Tile>
[[gnu::always_inline]] static inline void load_tile(const void* rows, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(stride), "i"(Tile) : "memory");
}
template <int Tile>
[[gnu::always_inline]] static inline void store_tile(void* rows, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(rows), "r"(stride), "i"(Tile) : "memory");
}
// result += left x right, bf16 products summed in pairs.
template <int Result, int Left, int Right>
[[gnu::always_inline]] static inline void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Result), "i"(Left), "i"(Right));
}

// Calls f<Column>() for each of the results.
template <class F>
[[gnu::always_inline]] static inline void for_columns(const F& f) {
  f.template operator()<0>();
  f.template operator()<1>();
  f.template operator()<2>();
  f.template operator()<3>();
}
