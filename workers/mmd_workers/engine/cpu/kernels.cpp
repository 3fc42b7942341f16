// The float32 kernels that a server of small batches lives on, as a plain C interface without PyTorch's headers: it builds in seconds and
// does not depend on an ABI. linear.h: a GEMM over packed weights. attention.h: attention over block-paged KV. layer.h: a decoder layer.

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "layer.h"

extern "C" {

int mmd_panel() { return PANEL; }

// Asks for pages of 2 MiB for memory that is aligned to them: reading weights from small ones takes half as long again.
void mmd_huge_pages(float* memory, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  madvise(memory, bytes, MADV_HUGEPAGE);
#endif
}

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
  std::vector<Span> work = spans(*step, heads / pool->kv_heads);
#pragma omp parallel num_threads(threads)
  attend(*step, work, *pool, visible, q, heads * pool->dim, heads, scale, softcap, out);
}

// x, out [rows, hidden]; cos, sin [rows, dim]; visible [rows][first, last). Writes the rows' keys and values to the pool.
void mmd_layer(const Layer* layer, const Step* step, const Pool* pool, const float* cos, const float* sin,
               const int32_t* visible, const float* x, float* out, int threads) {
  run_layer(*layer, *step, *pool, const_cast<float*>(pool->keys), const_cast<float*>(pool->values), cos, sin, visible,
            x, out, threads);
}

}  // extern "C"
