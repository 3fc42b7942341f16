// Two float32 kernels that a server of small batches lives on: a GEMM for few rows over packed weights, and attention of single
// rows over a block-paged KV pool. Plain C interface, no PyTorch headers: it builds in seconds and does not depend on an ABI.
// Vectors are the compiler's own (GCC/Clang), so the same source serves AVX-512, AVX2 and NEON.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int PANEL = 2 * LANES;     // output columns of one packed panel
constexpr int ROWS = LANES == 16 ? 12 : 6;      // rows of the micro-kernel: 2 * ROWS accumulators fit the register file
constexpr int64_t DEPTH = 4096 / PANEL;         // panel rows at once: 16 KiB stay in the first-level cache
constexpr int64_t ROW_BLOCK = 48;    // rows that a thread works on at once when there are many

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));

static inline Vec load(const float* p) { Vec v; std::memcpy(&v, p, sizeof v); return v; }
static inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
static inline Vec splat(float x) { return Vec{} + x; }

static inline float sum(Vec v) {
  typedef float Half __attribute__((vector_size(LANES * 2)));
  typedef float Quarter __attribute__((vector_size(LANES)));
  Half low, high;
  std::memcpy(&low, &v, sizeof low);
  std::memcpy(&high, reinterpret_cast<char*>(&v) + sizeof low, sizeof high);
  low += high;
  Quarter first, second;
  std::memcpy(&first, &low, sizeof first);
  std::memcpy(&second, reinterpret_cast<char*>(&low) + sizeof first, sizeof second);
  first += second;
  float total = 0;
  for (int i = 0; i < LANES / 4; i++) total += first[i];
  return total;
}

// exp for x <= 0: Cephes' expf, a polynomial after range reduction; relative error below 2e-7.
static inline Vec exp_of(Vec x) {
  x = x < -87.0f ? splat(-87.0f) : x;
  Vec n = x * 1.44269504088896341f - 0.5f;
  IntVec k = __builtin_convertvector(n, IntVec);  // rounds towards zero: n <= 0, so to nearest of x / ln 2
  Vec r = __builtin_convertvector(k, Vec);
  x = x - r * 0.693359375f;
  x = x + r * 2.12194440e-4f;
  Vec y = splat(1.9875691500E-4f);
  y = y * x + 1.3981999507E-3f;
  y = y * x + 8.3334519073E-3f;
  y = y * x + 4.1665795894E-2f;
  y = y * x + 1.6666665459E-1f;
  y = y * x + 5.0000001201E-1f;
  y = y * (x * x) + x + 1.0f;
  IntVec bits = (k + 127) << 23;
  Vec scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return y * scale;
}

// --- y = x W^T (+ bias) -------------------------------------------------------------------------------------------
// W [n, k] is packed as [ceil(n / PANEL)][k][PANEL], zero padded.

template <int R>
static void micro(const float* x, int64_t ldx, const float* panel, int64_t depth, float* out, int64_t ldo, bool add) {
  Vec a[R], b[R];
#pragma GCC unroll 12
  for (int i = 0; i < R; i++) {
    a[i] = add ? load(out + i * ldo) : Vec{};
    b[i] = add ? load(out + i * ldo + LANES) : Vec{};
  }
  for (int64_t k = 0; k < depth; k++) {
    Vec w0 = load(panel + k * PANEL), w1 = load(panel + k * PANEL + LANES);
#pragma GCC unroll 12
    for (int i = 0; i < R; i++) {
      Vec value = splat(x[i * ldx + k]);
      a[i] += value * w0;
      b[i] += value * w1;
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < R; i++) {
    store(out + i * ldo, a[i]);
    store(out + i * ldo + LANES, b[i]);
  }
}

// One row: four accumulators hide the latency of the multiply-add.
static void micro_row(const float* x, const float* panel, int64_t depth, float* out, bool add) {
  Vec a0 = add ? load(out) : Vec{}, b0 = add ? load(out + LANES) : Vec{}, a1{}, b1{};
  int64_t k = 0;
  for (; k + 1 < depth; k += 2) {
    const float* w = panel + k * PANEL;
    __builtin_prefetch(w + 8 * PANEL);
    __builtin_prefetch(w + 9 * PANEL);
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
static void micro_rows(int64_t rows, const float* x, int64_t ldx, const float* panel, int64_t depth, float* out,
                       int64_t ldo, bool add) {
  if constexpr (R == 1) {
    micro_row(x, panel, depth, out, add);
  } else if (rows == R) {
    micro<R>(x, ldx, panel, depth, out, ldo, add);
  } else {
    micro_rows<R - 1>(rows, x, ldx, panel, depth, out, ldo, add);
  }
}

// Rows [0, m) times panels [first, last); the last panel may be narrower than PANEL and goes through a scratch tile.
static void multiply(const float* x, int64_t m, int64_t k, const float* packed, int64_t n, int64_t first, int64_t last,
                     const float* bias, float* out) {
  alignas(64) float tile[ROWS * PANEL];
  int64_t groups = (m + ROWS - 1) / ROWS;
  for (int64_t p = first; p < last; p++) {
    int64_t columns = std::min<int64_t>(PANEL, n - p * PANEL);
    for (int64_t k0 = 0; k0 < k; k0 += DEPTH) {
      int64_t depth = std::min(DEPTH, k - k0);
      const float* panel = packed + (p * k + k0) * PANEL;
      for (int64_t g = 0, row = 0; g < groups; g++) {
        int64_t rows = (m - row + groups - g - 1) / (groups - g);
        const float* from = x + row * k + k0;
        float* to = out + row * n + p * PANEL;
        if (columns == PANEL) {
          micro_rows<ROWS>(rows, from, k, panel, depth, to, n, k0 > 0);
        } else {
          for (int64_t i = 0; k0 > 0 && i < rows; i++) std::memcpy(tile + i * PANEL, to + i * n, columns * 4);
          micro_rows<ROWS>(rows, from, k, panel, depth, tile, PANEL, k0 > 0);
          for (int64_t i = 0; i < rows; i++) std::memcpy(to + i * n, tile + i * PANEL, columns * 4);
        }
        row += rows;
      }
    }
    if (bias != nullptr)
      for (int64_t i = 0; i < m; i++)
        for (int64_t j = p * PANEL; j < p * PANEL + columns; j++) out[i * n + j] += bias[j];
  }
}

extern "C" {

int mmd_panel() { return PANEL; }

// x [m, k] contiguous, out [m, n] contiguous.
void mmd_linear(const float* x, int64_t m, int64_t k, const float* packed, int64_t n, const float* bias, float* out,
                int threads) {
  int64_t panels = (n + PANEL - 1) / PANEL;
  if (m <= 32) {  // few rows: the weights are read once, each thread takes its panels
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int t = 0; t < threads; t++)
      multiply(x, m, k, packed, n, panels * t / threads, panels * (t + 1) / threads, bias, out);
    return;
  }
  int64_t blocks = threads * ((m + threads * ROW_BLOCK - 1) / (threads * ROW_BLOCK));
  int64_t size = ((m + blocks - 1) / blocks + ROWS - 1) / ROWS * ROWS;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t start = 0; start < m; start += size)
    multiply(x + start * k, std::min(size, m - start), k, packed, n, 0, panels, bias, out + start * n);
}

// --- attention of single rows -------------------------------------------------------------------------------------
// q, out [rows, heads, dim]; pools [blocks, block_tokens, kv_heads, dim]; dim a multiple of 16; window 0: none; softcap 0: none.
void mmd_attend_rows(const float* q, int64_t rows, int64_t heads, int64_t dim, const float* keys, const float* values,
                     int64_t kv_heads, int64_t block_tokens, const int32_t* table, int64_t columns,
                     const int32_t* lengths, float scale, int64_t window, float softcap, float* out, int threads) {
  int64_t groups = heads / kv_heads, stride = kv_heads * dim;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> scores, total(groups);
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < rows * kv_heads; item++) {
      int64_t row = item / kv_heads, head = item % kv_heads;
      int64_t length = lengths[row], first = window > 0 ? std::max<int64_t>(0, length - window) : 0;
      int64_t count = length - first, width = (count + LANES - 1) / LANES * LANES;
      const int32_t* blocks = table + row * columns;
      const float* query = q + (row * heads + head * groups) * dim;
      float* result = out + (row * heads + head * groups) * dim;
      scores.assign(groups * width, -INFINITY);
      for (int64_t j = 0; j < count; j++) {
        int64_t position = first + j;
        const float* key =
            keys + (blocks[position / block_tokens] * block_tokens + position % block_tokens) * stride + head * dim;
        __builtin_prefetch(key + stride);
        for (int64_t g = 0; g < groups; g++) {
          Vec a{}, b{};
          int64_t d = 0;
          for (; d + PANEL <= dim; d += PANEL) {
            a += load(query + g * dim + d) * load(key + d);
            b += load(query + g * dim + d + LANES) * load(key + d + LANES);
          }
          for (; d < dim; d += LANES) a += load(query + g * dim + d) * load(key + d);
          float score = sum(a + b) * scale;
          scores[g * width + j] = softcap > 0 ? std::tanh(score / softcap) * softcap : score;
        }
      }
      for (int64_t g = 0; g < groups; g++) {
        float* s = scores.data() + g * width;
        float highest = *std::max_element(s, s + count);
        Vec added{};
        for (int64_t j = 0; j < width; j += LANES) {
          Vec e = exp_of(load(s + j) - highest);
          store(s + j, e);
          added += e;
        }
        float sum_all = sum(added);
        for (int64_t j = count; j < width; j++) sum_all -= s[j];  // the padding's e^-87
        total[g] = 1.0f / sum_all;
      }
      std::fill(result, result + groups * dim, 0.0f);
      for (int64_t j = 0; j < count; j++) {
        int64_t position = first + j;
        const float* value =
            values + (blocks[position / block_tokens] * block_tokens + position % block_tokens) * stride + head * dim;
        __builtin_prefetch(value + stride);
        for (int64_t g = 0; g < groups; g++) {
          Vec p = splat(scores[g * width + j]);
          for (int64_t d = 0; d < dim; d += LANES)
            store(result + g * dim + d, load(result + g * dim + d) + p * load(value + d));
        }
      }
      for (int64_t g = 0; g < groups; g++)
        for (int64_t d = 0; d < dim; d++) result[g * dim + d] *= total[g];
    }
  }
}

}  // extern "C"
