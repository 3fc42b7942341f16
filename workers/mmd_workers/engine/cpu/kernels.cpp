// The float32 kernels that matter for a server of small batches, as a plain C interface. Without PyTorch's headers it builds in
// seconds and depends on no ABI. linear.h: a GEMM over packed weights. attention.h: attention over block-paged KV. layer.h: a
// decoder layer.

#include "layer.h"

#include <limits>

extern "C" {

int mmd_panel() { return PANEL; }

// x [m, k] contiguous, out [m, n] contiguous.
void mmd_linear(const float* x, int64_t m, int64_t k, const float* packed, int64_t n, const float* bias, float* out,
                int threads) {
  Linear w{packed, bias, n, k};
  int64_t panels = w.panels();
  if (few(m, threads)) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int t = 0; t < threads; t++) multiply(w, x, m, panels * t / threads, panels * (t + 1) / threads, out);
    return;
  }
  int64_t size = block_rows(m, threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t start = 0; start < m; start += size)
    multiply(w, x + start * k, std::min(size, m - start), 0, panels, out + start * n);
}

// q, out [rows, heads, dim]; visible [rows][first, last).
void mmd_attend(const Step* step, const Pool* pool, const int32_t* visible, const float* q, int64_t heads, float scale,
                float softcap, float* out, int threads) {
  std::vector<Span> work = spans(*step, heads, pool->kv_heads, threads);
#pragma omp parallel num_threads(threads)
  attend(*step, work, *pool, visible, q, heads * pool->dim, heads, scale, softcap, out);
}

// Number of floats in the memory that the threads of `mmd_layers` share.
int64_t mmd_layers_floats(const Layer* layer, int64_t rows, int threads) { return shared_floats(*layer, rows, threads); }

// Runs consecutive decoder layers of one geometry, and writes the rows' keys and values to the pools. layers, pools and visible
// [count], each visible [rows][first, last); x, out [rows, hidden]; cos, sin [rows, dim].
void mmd_layers(const Layer* layers, const Pool* pools, const int32_t* const* visible, int64_t count, const Step* step,
                const float* cos, const float* sin, const float* x, float* out, float* shared, int threads) {
  run_layers(layers, pools, visible, count, *step, cos, sin, x, out, shared, threads);
}

// Sets `rows` [count] of logits [batch, vocab] to -infinity where their bits [count, words] are 0. Bit i of a row, from the lowest
// of its first word, belongs to token i. Runs on one thread: a row takes microseconds, and threads that wait for a busy core would
// take longer.
void mmd_mask(const uint32_t* bits, int64_t words, const int64_t* rows, int64_t count, float* logits, int64_t vocab) {
  constexpr float NEVER = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < count; i++) {
    float* row = logits + rows[i] * vocab;
    for (int64_t start = 0; start < vocab; start += 32) {
      uint32_t refused = ~bits[i * words + start / 32];
      int64_t size = std::min<int64_t>(32, vocab - start);
      if (refused == ~0u) {
        std::fill(row + start, row + start + size, NEVER);
        continue;
      }
      for (; refused != 0; refused &= refused - 1) {
        int64_t token = __builtin_ctz(refused);
        if (token < size) row[start + token] = NEVER;
      }
    }
  }
}

}  // extern "C"
