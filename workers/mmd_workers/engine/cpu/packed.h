// Rows of KV in 8 bits, byte for byte as in packing.py: the codes of one head of one token, then their unit as a bfloat16.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "vectors.h"

enum Format : int64_t { EXACT, INT8, FP8 };  // unchanged float32, integers up to 127, e4m3 without infinity

constexpr int64_t UNIT_BYTES = 2;

typedef int8_t CodeVec __attribute__((vector_size(LANES)));

static inline IntVec bits_of(Vec v) { IntVec b; std::memcpy(&b, &v, sizeof b); return b; }
static inline Vec vec_of(IntVec b) { Vec v; std::memcpy(&v, &b, sizeof v); return v; }

ALWAYS_INLINE IntVec load_codes(const uint8_t* p) {  // sign-extended
#if defined(__AVX512F__)
  return reinterpret_cast<IntVec>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return reinterpret_cast<IntVec>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  CodeVec codes;
  std::memcpy(&codes, p, sizeof codes);
  return __builtin_convertvector(codes, IntVec);
#endif
}

ALWAYS_INLINE Vec of_e4m3(IntVec code) {
  IntVec size = code & 0x7f, low = size < 8;  // low: all bits set where the number is subnormal
  Vec v = vec_of((size << 20) + (120 << 23) + (low & (1 << 23)));
  v -= vec_of(low & (121 << 23));  // the 2^-6 that a normal number has before its fraction
  return vec_of(bits_of(v) | (code & INT32_MIN));
}

ALWAYS_INLINE IntVec to_e4m3(Vec v) {  // for at most 448; rounds to nearest even
  IntVec bits = bits_of(v), size = bits & INT32_MAX;
  IntVec low = bits_of(vec_of(size) + 16384.0f) - (141 << 23);
  IntVec normal = (size - (120 << 23) + 0x7ffff + ((size >> 20) & 1)) >> 20;
  return (size < (121 << 23) ? low : normal) | ((bits >> 24) & 0x80);
}

// Unpacks `tokens` rows of `dim` codes, `stride` bytes apart, to floats [tokens, dim].
template <bool INTEGERS>
static void unpack_as(const uint8_t* row, int64_t stride, int64_t dim, int64_t tokens, float* to) {
  for (int64_t j = 0; j < tokens; j++, row += stride, to += dim) {
    uint16_t half;
    std::memcpy(&half, row + dim, UNIT_BYTES);
    uint32_t whole = static_cast<uint32_t>(half) << 16;
    float unit;
    std::memcpy(&unit, &whole, sizeof unit);
    for (int64_t d = 0; d < dim; d += LANES) {
      IntVec code = load_codes(row + d);
      store(to + d, (INTEGERS ? __builtin_convertvector(code, Vec) : of_e4m3(code)) * unit);
    }
  }
}

static void unpack(int64_t format, const uint8_t* row, int64_t stride, int64_t dim, int64_t tokens, float* to) {
  (format == INT8 ? unpack_as<true> : unpack_as<false>)(row, stride, dim, tokens, to);
}

// Packs one head of one token, x [dim]. A value that is not finite makes the unit NaN.
static void pack(int64_t format, const float* x, int64_t dim, uint8_t* row) {
  Vec most{}, invalid{};
  for (int64_t d = 0; d < dim; d += LANES) {
    Vec v = load(x + d);
    most = larger(vec_of(bits_of(v) & INT32_MAX), most);
    invalid += v * 0.0f;
  }
  float reach = sum(invalid);  // 0 or NaN
  for (int i = 0; i < LANES; i++) reach = most[i] > reach ? most[i] : reach;
  float largest = format == INT8 ? 127.0f : 448.0f, wanted = reach / largest, unit;
  uint32_t bits = 0x7fc00000;
  if (wanted == wanted) std::memcpy(&bits, &wanted, sizeof bits);
  uint16_t half = static_cast<uint16_t>((bits + 0xffff) >> 16);
  bits = static_cast<uint32_t>(half) << 16;
  std::memcpy(&unit, &bits, sizeof unit);
  for (int64_t d = 0; d < dim; d += LANES) {
    Vec v = load(x + d) / unit;
    v = v == v ? v : Vec{};
    v = v > largest ? splat(largest) : v < -largest ? splat(-largest) : v;
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: a sum with it has no fraction
    IntVec code = format == INT8 ? __builtin_convertvector((v + ROUND) - ROUND, IntVec) : to_e4m3(v);
    CodeVec codes = __builtin_convertvector(code, CodeVec);
    std::memcpy(row + d, &codes, sizeof codes);
  }
  std::memcpy(row + dim, &half, UNIT_BYTES);
}
