// A decoder layer of the Llama family: norm, attention, residual, norm, gated feed-forward, residual. Optional: Gemma's norms after
// attention and after the feed-forward, and norms of queries and keys.
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
  Linear gate_up;  // alternating panels of gate and up: n is twice the inner size, rounded up to panels
  Linear down;
  float scale, softcap;  // applied to scores; softcap 0: none
  int64_t activation;    // 0: SiLU, 1: GELU with tanh
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

// Rotates x [dim] in place by cos and sin [dim]; dimension i is paired with i + dim / 2.
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

// Applies norms and rotation to one row of projections [heads + 2 * kv_heads, dim], and writes its key and value to the pool.
static void place(const Layer& l, const Pool& pool, int64_t slot, float* row, const float* cos, const float* sin) {
  for (int64_t h = 0; h < l.heads + l.kv_heads; h++) {
    const Norm& norm = h < l.heads ? l.query : l.key;
    if (norm.scale != nullptr) rms_norm(row + h * l.dim, norm, l.dim, row + h * l.dim);
    rotate(row + h * l.dim, cos, sin, l.dim);
  }
  put(pool, pool.keys, slot, row + l.heads * l.dim);
  put(pool, pool.values, slot, row + (l.heads + l.kv_heads) * l.dim);
}

// to = x + made, with an optional norm of `made`. `to` may be x.
static void add_to(const float* x, float* made, const Norm& norm, int64_t size, float* to) {
  if (norm.scale != nullptr) rms_norm(made, norm, size, made);
  for (int64_t i = 0; i < size; i++) to[i] = x[i] + made[i];
}

// Multiplies x [m, hidden] by gate and up: columns [first * PANEL, last * PANEL) of out [m, inner] = act(gate) * up.
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

struct Batch {  // inputs that all layers of a call share
  const Step& step;
  const std::vector<Span>& work;
  const float *cos, *sin;  // [rows, dim]
  int threads;
};

struct Buffers {  // shared by the threads; the last three are used only for few rows
  float *projected, *attended, *normed, *made, *inner;
};

// Rotates a row of `projected`, and writes its key and value to the pool.
static void place_row(const Layer& l, const Pool& pool, const Batch& b, float* projected, int64_t r) {
  place(l, pool, b.step.slots[r], projected + r * l.qkv.n, b.cos + r * l.dim, b.sin + r * l.dim);
}

// Every thread of a parallel region calls the functions below. x, out [rows, hidden]; `out` may be x.

static void multiply_shared(const Linear& w, const float* x, int64_t rows, float* out, int threads) {
  int64_t panels = w.panels();
#pragma omp for schedule(static)
  for (int t = 0; t < threads; t++) multiply(w, x, rows, panels * t / threads, panels * (t + 1) / threads, out);
}

// For few rows: the threads divide each product by columns.
static void layer_by_panels(const Layer& l, const Pool& pool, const int32_t* visible, const Batch& b, const Buffers& at,
                            const float* x, float* out) {
  int64_t rows = b.step.rows, size = l.hidden, panels = (l.inner + PANEL - 1) / PANEL;
#pragma omp for schedule(static)
  for (int64_t r = 0; r < rows; r++) rms_norm(x + r * size, l.before_attention, size, at.normed + r * size);
  multiply_shared(l.qkv, at.normed, rows, at.projected, b.threads);
#pragma omp for schedule(static)
  for (int64_t r = 0; r < rows; r++) place_row(l, pool, b, at.projected, r);
  attend(b.step, b.work, pool, visible, at.projected, l.qkv.n, l.heads, l.scale, l.softcap, at.attended);
  multiply_shared(l.out, at.attended, rows, at.made, b.threads);
#pragma omp for schedule(static)
  for (int64_t r = 0; r < rows; r++) {
    add_to(x + r * size, at.made + r * size, l.after_attention, size, out + r * size);
    rms_norm(out + r * size, l.before_mlp, size, at.normed + r * size);
  }
#pragma omp for schedule(static)
  for (int t = 0; t < b.threads; t++)
    gated(l, at.normed, rows, panels * t / b.threads, panels * (t + 1) / b.threads, at.inner);
  multiply_shared(l.down, at.inner, rows, at.made, b.threads);
#pragma omp for schedule(static)
  for (int64_t r = 0; r < rows; r++) add_to(out + r * size, at.made + r * size, l.after_mlp, size, out + r * size);
}

// For many rows: a thread takes blocks of rows, whose values stay in its cache from product to product.
static void layer_by_rows(const Layer& l, const Pool& pool, const int32_t* visible, const Batch& b, const Buffers& at,
                          const float* x, float* out) {
  static thread_local std::vector<float> own[3];
  int64_t rows = b.step.rows, size = l.hidden, block = block_rows(rows, b.threads);
  float *one = room(own[0], block * size), *other = room(own[1], block * size), *inner = room(own[2], block * l.inner);
#pragma omp for schedule(dynamic, 1)
  for (int64_t start = 0; start < rows; start += block) {
    int64_t m = std::min(block, rows - start);
    for (int64_t r = 0; r < m; r++) rms_norm(x + (start + r) * size, l.before_attention, size, one + r * size);
    multiply(l.qkv, one, m, 0, l.qkv.panels(), at.projected + start * l.qkv.n);
    for (int64_t r = start; r < start + m; r++) place_row(l, pool, b, at.projected, r);
  }
  attend(b.step, b.work, pool, visible, at.projected, l.qkv.n, l.heads, l.scale, l.softcap, at.attended);
#pragma omp for schedule(dynamic, 1)
  for (int64_t start = 0; start < rows; start += block) {
    int64_t m = std::min(block, rows - start);
    const float* from = x + start * size;
    float* to = out + start * size;
    multiply(l.out, at.attended + start * l.heads * l.dim, m, 0, l.out.panels(), one);
    for (int64_t r = 0; r < m; r++) {
      add_to(from + r * size, one + r * size, l.after_attention, size, to + r * size);
      rms_norm(to + r * size, l.before_mlp, size, other + r * size);
    }
    gated(l, other, m, 0, (l.inner + PANEL - 1) / PANEL, inner);
    multiply(l.down, inner, m, 0, l.down.panels(), one);
    for (int64_t r = 0; r < m; r++) add_to(to + r * size, one + r * size, l.after_mlp, size, to + r * size);
  }
}

// Number of floats in the buffers that threads share.
static int64_t shared_floats(const Layer& l, int64_t rows, int threads) {
  int64_t width = l.qkv.n + l.heads * l.dim;
  return rows * (few(rows, threads) ? width + 2 * l.hidden + l.inner : width);
}

// Runs consecutive layers of one geometry: layers, pools and visible [count]; shared [shared_floats].
static void run_layers(const Layer* layers, const Pool* pools, const int32_t* const* visible, int64_t count,
                       const Step& step, const float* cos, const float* sin, const float* x, float* out, float* shared,
                       int threads) {
  const Layer& l = layers[0];
  int64_t rows = step.rows;
  Buffers at{};
  at.projected = shared, at.attended = at.projected + rows * l.qkv.n, at.normed = at.attended + rows * l.heads * l.dim;
  at.made = at.normed + rows * l.hidden, at.inner = at.made + rows * l.hidden;
  auto run = few(rows, threads) ? layer_by_panels : layer_by_rows;
  std::vector<Span> work = spans(step, l.heads, l.kv_heads, threads);
  Batch batch{step, work, cos, sin, threads};
#pragma omp parallel num_threads(threads)
  for (int64_t i = 0; i < count; i++) run(layers[i], pools[i], visible[i], batch, at, i == 0 ? x : out, out);
}
