// One layer of a small network for a few rows: weights in panels of 16 outputs, each read once per tile of rows.
// Included inside the namespace and target region of one instruction set, after its vec_*.inl.

template <int Rows, int Panels>
static inline void dense_tile(const DenseArgs& args, int first_row, int first_panel) {
  const float* in = args.in + first_row * args.in_stride;
  const int64_t panel_floats = int64_t{args.inputs} * 16;
  const float* panel = args.panels + first_panel * panel_floats;
  vf acc[Rows][Panels];
  for (int p = 0; p < Panels; ++p) {
    const vf bias = load(args.bias + (first_panel + p) * 16);
    for (int r = 0; r < Rows; ++r) acc[r][p] = bias;
  }
  for (int k = 0; k < args.inputs; ++k) {
    vf weights[Panels];
    for (int p = 0; p < Panels; ++p) weights[p] = load(panel + p * panel_floats + k * 16);
    for (int r = 0; r < Rows; ++r) {
      const vf x = set1(in[r * args.in_stride + k]);
      for (int p = 0; p < Panels; ++p) acc[r][p] = fma(weights[p], x, acc[r][p]);
    }
  }
  for (int r = 0; r < Rows; ++r) {
    float* out = args.out + int64_t{first_row + r} * args.outputs + first_panel * 16;
    for (int p = 0; p < Panels; ++p) store(out + p * 16, args.relu ? max(acc[r][p], zero()) : acc[r][p]);
  }
}

template <int Rows, int Panels>
static inline void dense_row_tile(const DenseArgs& args, int first_row, int rows, int first_panel) {
  if (rows == Rows) {
    dense_tile<Rows, Panels>(args, first_row, first_panel);
  } else if constexpr (Rows > 1) {
    dense_row_tile<Rows - 1, Panels>(args, first_row, rows, first_panel);
  }
}

static void dense_layer(const DenseArgs& args) {
  const int panels = args.outputs / 16;
  for (int row = 0; row < args.rows; row += kRowTile) {
    const int rows = args.rows - row < kRowTile ? args.rows - row : kRowTile;
    int panel = 0;
    for (; panel + kColumnTile <= panels; panel += kColumnTile) dense_row_tile<kRowTile, kColumnTile>(args, row, rows, panel);
    for (; panel < panels; ++panel) dense_row_tile<kRowTile, 1>(args, row, rows, panel);
  }
}
