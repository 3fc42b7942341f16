// A decoder layer of the Llama family: norm, attention, residual, norm, gated feed-forward, residual. Gemma's norms after attention and
// after the feed-forward, and norms of queries and keys, are optional.
#pragma once

#include "attention.h"

struct Norm {
  const float* scale;  // null: no norm here
  float eps;
};

struct Layer {
  int64_t hidden, heads, kv_heads, dim, inner;
  Norm before_attention, after_attention, before_mlp, after_mlp;  // scales [hidden]
  Norm query, key;                                                // scales [dim]
  Linear qkv;      // rows: queries of all heads, keys, values
  Linear out;      // attention's output projection
  Linear gate_up;  // panels of gate and up in turns: n is twice the inner size, rounded up to panels
  Linear down;
  float scale, softcap;  // of scores; softcap 0: none
  int64_t activation;    // 0: SiLU, 1: GELU by tanh
};

static void rms_norm(const float* x, const Norm& norm, int64_t size, float* out) {
  Vec a{}, b{};
  float squares = 0;
  int64_t i = 0;
  for (; i + PANEL <= size; i += PANEL) {
    a += load(x + i) * load(x + i);
    b += load(x + i + LANES) * load(x + i + LANES);
  }
  for (; i < size; i++) squares += x[i] * x[i];
  float factor = 1.0f / std::sqrt((sum(a + b) + squares) / size + norm.eps);
  for (i = 0; i + LANES <= size; i += LANES) store(out + i, load(x + i) * factor * load(norm.scale + i));
  for (; i < size; i++) out[i] = x[i] * factor * norm.scale[i];
}

// x [dim] in place; cos and sin [dim]. Halves are rotated against each other.
static void rotate(float* x, const float* cos, const float* sin, int64_t dim) {
  int64_t half = dim / 2, i = 0;
  for (; i + LANES <= half; i += LANES) {
    Vec a = load(x + i), b = load(x + half + i);
    store(x + i, a * load(cos + i) - b * load(sin + i));
    store(x + half + i, b * load(cos + half + i) + a * load(sin + half + i));
  }
  for (; i < half; i++) {
    float a = x[i], b = x[half + i];
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = b * cos[half + i] + a * sin[half + i];
  }
}

// One row of projections [heads + 2 * kv_heads, dim]: norms, rotation, and its key and value into the pool.
static void place(const Layer& l, float* row, const float* cos, const float* sin, float* key, float* value) {
  for (int64_t h = 0; h < l.heads + l.kv_heads; h++) {
    const Norm& norm = h < l.heads ? l.query : l.key;
    if (norm.scale != nullptr) rms_norm(row + h * l.dim, norm, l.dim, row + h * l.dim);
    rotate(row + h * l.dim, cos, sin, l.dim);
  }
  std::memcpy(key, row + l.heads * l.dim, l.kv_heads * l.dim * 4);
  std::memcpy(value, row + (l.heads + l.kv_heads) * l.dim, l.kv_heads * l.dim * 4);
}

// to = x + made, with the optional norm of what was made. `to` may be x.
static void add_to(const float* x, float* made, const Norm& norm, int64_t size, float* to) {
  if (norm.scale != nullptr) rms_norm(made, norm, size, made);
  for (int64_t i = 0; i < size; i++) to[i] = x[i] + made[i];
}

// x [m, hidden] times gate and up: columns [first * PANEL, last * PANEL) of out [m, inner] = act(gate) * up.
static void gated(const Layer& l, const float* x, int64_t m, int64_t first, int64_t last, float* out) {
  static thread_local std::vector<float> tile;
  tile.resize(std::max<size_t>(tile.size(), m * 2 * PANEL));
  float *gate = tile.data(), *up = gate + m * PANEL;
  for (int64_t p = first; p < last; p++) {
    const float* panel = l.gate_up.packed + 2 * p * l.gate_up.k * PANEL;
    const float* bias = l.gate_up.bias == nullptr ? nullptr : l.gate_up.bias + 2 * p * PANEL;
    panel_product(x, m, l.gate_up.k, panel, gate, PANEL);
    panel_product(x, m, l.gate_up.k, panel + l.gate_up.k * PANEL, up, PANEL);
    int64_t columns = std::min<int64_t>(PANEL, l.inner - p * PANEL);
    for (int64_t i = 0; i < m; i++)
      for (int64_t j = 0; j < columns; j += LANES) {
        Vec g = load(gate + i * PANEL + j), u = load(up + i * PANEL + j);
        if (bias != nullptr) g += load(bias + j), u += load(bias + PANEL + j);
        Vec made = (l.activation == 0 ? silu(g) : gelu_tanh(g)) * u;
        std::memcpy(out + i * l.inner + p * PANEL + j, &made, std::min<int64_t>(LANES, columns - j) * 4);
      }
  }
}

static float* room(std::vector<float>& buffer, int64_t size) {
  if (static_cast<int64_t>(buffer.size()) < size) buffer.resize(size);
  return buffer.data();
}

// x, out [rows, hidden]; cos, sin [rows, dim]; visible [rows][first, last).
static void run_layer(const Layer& l, const Step& step, const Pool& pool, float* keys, float* values, const float* cos,
                      const float* sin, const int32_t* visible, const float* x, float* out, int threads) {
  static thread_local std::vector<float> buffers[5];
  int64_t rows = step.rows, kv = l.kv_heads * l.dim;
  float *projected = room(buffers[0], rows * l.qkv.n), *attended = room(buffers[1], rows * l.heads * l.dim);
  bool by_panels = few(rows, threads);
  int64_t size = by_panels ? rows : block_rows(rows, threads), inner_panels = (l.inner + PANEL - 1) / PANEL;
  float *normed = by_panels ? room(buffers[2], rows * l.hidden) : nullptr;
  float *made = by_panels ? room(buffers[3], rows * l.hidden) : nullptr;
  float *inner = by_panels ? room(buffers[4], rows * l.inner) : nullptr;
  std::vector<Span> work = spans(step, l.heads / l.kv_heads);
  auto place_row = [&](int64_t r) {
    place(l, projected + r * l.qkv.n, cos + r * l.dim, sin + r * l.dim, keys + step.slots[r] * kv,
          values + step.slots[r] * kv);
  };
#pragma omp parallel num_threads(threads)
  {
    if (by_panels) {
#pragma omp for schedule(static)
      for (int64_t r = 0; r < rows; r++) rms_norm(x + r * l.hidden, l.before_attention, l.hidden, normed + r * l.hidden);
      int64_t panels = l.qkv.panels();
#pragma omp for schedule(static)
      for (int t = 0; t < threads; t++)
        multiply(l.qkv, normed, rows, panels * t / threads, panels * (t + 1) / threads, projected);
#pragma omp for schedule(static)
      for (int64_t r = 0; r < rows; r++) place_row(r);
      attend(step, work, pool, visible, projected, l.qkv.n, l.heads, l.scale, l.softcap, attended);
      panels = l.out.panels();
#pragma omp for schedule(static)
      for (int t = 0; t < threads; t++)
        multiply(l.out, attended, rows, panels * t / threads, panels * (t + 1) / threads, made);
#pragma omp for schedule(static)
      for (int64_t r = 0; r < rows; r++) {
        add_to(x + r * l.hidden, made + r * l.hidden, l.after_attention, l.hidden, out + r * l.hidden);
        rms_norm(out + r * l.hidden, l.before_mlp, l.hidden, normed + r * l.hidden);
      }
#pragma omp for schedule(static)
      for (int t = 0; t < threads; t++)
        gated(l, normed, rows, inner_panels * t / threads, inner_panels * (t + 1) / threads, inner);
      panels = l.down.panels();
#pragma omp for schedule(static)
      for (int t = 0; t < threads; t++)
        multiply(l.down, inner, rows, panels * t / threads, panels * (t + 1) / threads, made);
#pragma omp for schedule(static)
      for (int64_t r = 0; r < rows; r++)
        add_to(out + r * l.hidden, made + r * l.hidden, l.after_mlp, l.hidden, out + r * l.hidden);
    } else {
      static thread_local std::vector<float> own[3];  // a block's values, which stay in this thread's cache
      float *a = room(own[0], size * l.hidden), *b = room(own[1], size * l.hidden), *c = room(own[2], size * l.inner);
#pragma omp for schedule(dynamic, 1)
      for (int64_t start = 0; start < rows; start += size) {
        int64_t m = std::min(size, rows - start);
        for (int64_t r = 0; r < m; r++)
          rms_norm(x + (start + r) * l.hidden, l.before_attention, l.hidden, a + r * l.hidden);
        multiply(l.qkv, a, m, 0, l.qkv.panels(), projected + start * l.qkv.n);
        for (int64_t r = start; r < start + m; r++) place_row(r);
      }
      attend(step, work, pool, visible, projected, l.qkv.n, l.heads, l.scale, l.softcap, attended);
#pragma omp for schedule(dynamic, 1)
      for (int64_t start = 0; start < rows; start += size) {
        int64_t m = std::min(size, rows - start);
        float* to = out + start * l.hidden;
        multiply(l.out, attended + start * l.heads * l.dim, m, 0, l.out.panels(), a);
        for (int64_t r = 0; r < m; r++) {
          add_to(x + (start + r) * l.hidden, a + r * l.hidden, l.after_attention, l.hidden, to + r * l.hidden);
          rms_norm(to + r * l.hidden, l.before_mlp, l.hidden, b + r * l.hidden);
        }
        gated(l, b, m, 0, inner_panels, c);
        multiply(l.down, c, m, 0, l.down.panels(), a);
        for (int64_t r = 0; r < m; r++)
          add_to(to + r * l.hidden, a + r * l.hidden, l.after_mlp, l.hidden, to + r * l.hidden);
      }
    }
  }
}
