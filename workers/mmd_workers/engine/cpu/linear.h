// y = x W^T (+ bias) for float32. W [n, k] is packed as panels [ceil(n / PANEL)][k][PANEL], zero padded.
#pragma once

#include <vector>

#include "vectors.h"

constexpr int PANEL = 2 * LANES;            // output columns of one packed panel
constexpr int ROWS = LANES == 16 ? 12 : 6;  // rows of the micro-kernel: 2 * ROWS accumulators fit the register file
constexpr int64_t DEPTH = 4096 / PANEL;     // panel rows at once: 16 KiB stay in the first-level cache
constexpr int64_t ROW_BLOCK = 48;           // rows per block of a thread when there are many
constexpr int64_t NEAR = 512, FAR = 4096;   // prefetch distances in floats, to the first- and the second-level cache

struct Linear {
  const float* packed;
  const float* bias;  // null: none
  int64_t n, k;
  int64_t panels() const { return (n + PANEL - 1) / PANEL; }
};

static inline void fetch(const float* panel) {
  __builtin_prefetch(panel + NEAR);
  __builtin_prefetch(panel + FAR, 0, 2);
}

// out [R, W * LANES] (+)= x [R, depth] * panel [depth, W * LANES]. Row i of x begins at x + i * row_step, and its elements are
// depth_step apart; rows of the panel are panel_step apart.
template <int R, int W>
ALWAYS_INLINE void micro(const float* x, int64_t row_step, int64_t depth_step, const float* panel, int64_t panel_step,
                         int64_t depth, float* out, int64_t ldo, bool add) {
  Vec a[R][W];
#pragma GCC unroll 12
  for (int i = 0; i < R; i++)
#pragma GCC unroll 2
    for (int j = 0; j < W; j++) a[i][j] = add ? load(out + i * ldo + j * LANES) : Vec{};
  for (int64_t k = 0; k < depth; k++) {
    Vec w[W];
#pragma GCC unroll 2
    for (int j = 0; j < W; j++) {
      if (panel_step == PANEL) fetch(panel + k * PANEL + j * LANES);
      w[j] = load(panel + k * panel_step + j * LANES);
    }
#pragma GCC unroll 12
    for (int i = 0; i < R; i++) {
      Vec value = splat(x[i * row_step + k * depth_step]);
#pragma GCC unroll 2
      for (int j = 0; j < W; j++) a[i][j] += value * w[j];
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < R; i++)
#pragma GCC unroll 2
    for (int j = 0; j < W; j++) store(out + i * ldo + j * LANES, a[i][j]);
}

// Multiplies one row by a packed panel. Four accumulators hide the latency of the multiply-add.
static void micro_row(const float* x, const float* panel, int64_t depth, float* out, bool add) {
  Vec a0 = add ? load(out) : Vec{}, b0 = add ? load(out + LANES) : Vec{}, a1{}, b1{};
  int64_t k = 0;
  for (; k + 1 < depth; k += 2) {
    const float* w = panel + k * PANEL;
    for (int64_t ahead = 0; ahead < 2 * PANEL; ahead += LANES) fetch(w + ahead);
    Vec first = splat(x[k]), second = splat(x[k + 1]);
    a0 += first * load(w);
    b0 += first * load(w + LANES);
    a1 += second * load(w + PANEL);
    b1 += second * load(w + PANEL + LANES);
  }
  if (k < depth) {
    Vec last = splat(x[k]);
    a0 += last * load(panel + k * PANEL);
    b0 += last * load(panel + k * PANEL + LANES);
  }
  store(out, a0 + a1);
  store(out + LANES, b0 + b1);
}

template <int R>
static void packed_rows(int64_t rows, const float* x, int64_t ldx, const float* panel, int64_t depth, float* out,
                        int64_t ldo, bool add) {
  if constexpr (R == 1) {
    micro_row(x, panel, depth, out, add);
  } else if (rows == R) {
    micro<R, 2>(x, ldx, 1, panel, PANEL, depth, out, ldo, add);
  } else {
    packed_rows<R - 1>(rows, x, ldx, panel, depth, out, ldo, add);
  }
}

// Multiplies x [m, k] by one panel: out [m, PANEL].
static void panel_product(const float* x, int64_t m, int64_t k, const float* panel, float* out, int64_t ldo) {
  int64_t groups = (m + ROWS - 1) / ROWS;
  for (int64_t k0 = 0; k0 < k; k0 += DEPTH) {
    int64_t depth = std::min(DEPTH, k - k0);
    for (int64_t g = 0, row = 0; g < groups; g++) {
      int64_t rows = (m - row + groups - g - 1) / (groups - g);
      packed_rows<ROWS>(rows, x + row * k + k0, k, panel + k0 * PANEL, depth, out + row * ldo, ldo, k0 > 0);
      row += rows;
    }
  }
}

// Multiplies x [m, k] by panels [first, last): columns from first * PANEL on of out [m, n]. A narrower last panel goes through `tile`.
static void multiply(const Linear& w, const float* x, int64_t m, int64_t first, int64_t last, float* out) {
  static thread_local std::vector<float> tile;
  for (int64_t p = first; p < last; p++) {
    int64_t columns = std::min<int64_t>(PANEL, w.n - p * PANEL);
    const float* panel = w.packed + p * w.k * PANEL;
    float* to = out + p * PANEL;
    if (columns == PANEL) {
      panel_product(x, m, w.k, panel, to, w.n);
    } else {
      tile.resize(std::max<size_t>(tile.size(), m * PANEL));
      panel_product(x, m, w.k, panel, tile.data(), PANEL);
      for (int64_t i = 0; i < m; i++) std::memcpy(to + i * w.n, tile.data() + i * PANEL, columns * 4);
    }
    if (w.bias != nullptr)
      for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < columns; j++) to[i * w.n + j] += w.bias[p * PANEL + j];
  }
}

// Decides how threads divide `m` rows. Few rows: each thread takes panels, so that weights are read once. Many rows: each takes
// blocks of rows, whose intermediate values stay in its cache.
static bool few(int64_t m, int threads) { return m <= std::max<int64_t>(32, threads * ROW_BLOCK / 3); }

// Number of rows in a block, a multiple of the micro-kernel's.
static int64_t block_rows(int64_t m, int threads) {
  int64_t blocks = threads * ((m + threads * ROW_BLOCK - 1) / (threads * ROW_BLOCK));
  return ((m + blocks - 1) / blocks + ROWS - 1) / ROWS * ROWS;
}
