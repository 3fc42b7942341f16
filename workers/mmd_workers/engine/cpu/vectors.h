// Compiler vector types (GCC/Clang), so that one source serves AVX-512, AVX2 and NEON, and the functions that layers need.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));

static inline Vec load(const float* p) { Vec v; std::memcpy(&v, p, sizeof v); return v; }
static inline IntVec load(const int32_t* p) { IntVec v; std::memcpy(&v, p, sizeof v); return v; }
static inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
static inline Vec splat(float x) { return x - Vec{}; }  // compiles to a broadcast: x - 0 is x, but x + 0 is not for x = -0
static inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

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

// Lane i of the result is the sum of v[i]. Each of log2(LANES) rounds folds pairs of vectors into one.
// Round `Step` adds lanes that are Step apart; the masks select them from both vectors of a pair.
#if defined(__has_builtin)
#if __has_builtin(__builtin_shuffle)
template <int Step>
ALWAYS_INLINE Vec fold(Vec a, Vec b) {
  IntVec even, odd;
  for (int i = 0; i < LANES; i++) {
    int from = (i & Step) ? LANES : 0, lane = (i & ~(2 * Step - 1)) + (i & (Step - 1));
    even[i] = from + lane;
    odd[i] = from + lane + Step;
  }
  return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
}
#define MMD_FOLDS 1
#endif
#endif

ALWAYS_INLINE Vec sums(Vec* v) {
#ifdef MMD_FOLDS
#pragma GCC unroll 16
  for (int i = 0; i < LANES / 2; i++) v[i] = fold<1>(v[2 * i], v[2 * i + 1]);
#pragma GCC unroll 16
  for (int i = 0; i < LANES / 4; i++) v[i] = fold<2>(v[2 * i], v[2 * i + 1]);
  if constexpr (LANES >= 8) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES / 8; i++) v[i] = fold<4>(v[2 * i], v[2 * i + 1]);
  }
  if constexpr (LANES >= 16) v[0] = fold<8>(v[0], v[1]);
  return v[0];
#else
  Vec total;
  for (int i = 0; i < LANES; i++) total[i] = sum(v[i]);
  return total;
#endif
}

// exp(x) for x <= 0, and 0 below -87. Cephes' expf: a polynomial after range reduction, with relative error below 2e-7.
static inline Vec exp_of(Vec given) {
  Vec x = given < -87.0f ? splat(-87.0f) : given;
  Vec n = x * 1.44269504088896341f - 0.5f;
  IntVec k = __builtin_convertvector(n, IntVec);  // truncates; since n <= 0, this rounds x / ln 2 to nearest
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
  return given < -87.0f ? Vec{} : y * scale;
}

static inline Vec tanh_of(Vec x) {
  Vec e = exp_of(x > 0.0f ? x * -2.0f : x * 2.0f), t = (1.0f - e) / (1.0f + e);
  return x < 0.0f ? -t : t;
}

static inline Vec silu(Vec x) {
  Vec e = exp_of(x > 0.0f ? -x : x), s = splat(1.0f) / (1.0f + e);
  return x * (x < 0.0f ? e * s : s);
}

static inline Vec gelu_tanh(Vec x) {
  return 0.5f * x * (1.0f + tanh_of(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}
