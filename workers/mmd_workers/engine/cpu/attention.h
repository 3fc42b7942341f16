// Attention over a block-paged KV pool. Pools are [blocks, block_tokens, kv_heads, dim] with dim a multiple of 16, or have rows of
// packed.h in place of dim. Each query row sees the positions [first, last) of its sequence's context. For a single row nothing
// outside them is read; for a chunk nothing after the last.
#pragma once

#include <vector>

#include "linear.h"
#include "packed.h"

struct Pool {
  uint8_t *keys, *values;
  int64_t block_tokens, kv_heads, dim, format;
  int64_t row() const { return format == EXACT ? dim * 4 : dim + UNIT_BYTES; }  // bytes per head
};

struct Rows {  // keys or values of one head; successive tokens are `stride` apart
  const float* at;
  int64_t stride;
};

// One batch: sequence s has rows [starts[s], starts[s + 1]) and blocks table[s * columns ...]; visible is [rows][first, last).
struct Step {
  int64_t rows, sequences, columns;
  const int32_t *starts, *table;
  const int64_t* slots;  // where each row's key and value are stored
};

struct Span {  // rows [first, first + rows) of one sequence, and their groups [head, head + heads)
  int64_t sequence, first, rows, head, heads;
};

constexpr int64_t QUERIES = 48;  // rows * heads of a group, processed at once
constexpr int64_t TILE = 64;     // positions of a context, processed at once
constexpr int64_t LINE = 16;     // floats per cache line

static float* aligned(float* p) {  // rounds up to a cache line, less than LINE floats further
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(p) + 63) / 64 * 64);
}

// Returns the keys or values of a head from a slot on: in place, or unpacked to `room` [TILE, dim].
static Rows rows_of(const Pool& pool, const uint8_t* base, int64_t slot, int64_t head, int64_t tokens, float* room) {
  const uint8_t* at = base + (slot * pool.kv_heads + head) * pool.row();
  if (pool.format == EXACT) return {reinterpret_cast<const float*>(at), pool.kv_heads * pool.dim};
  unpack(pool.format, at, pool.kv_heads * pool.row(), pool.dim, tokens, room);
  return {room, pool.dim};
}

// Writes all heads of one token, x [kv_heads, dim].
static void put(const Pool& pool, uint8_t* base, int64_t slot, const float* x) {
  uint8_t* at = base + slot * pool.kv_heads * pool.row();
  if (pool.format == EXACT) {
    std::memcpy(at, x, pool.kv_heads * pool.row());
    return;
  }
  for (int64_t h = 0; h < pool.kv_heads; h++) pack(pool.format, x + h * pool.dim, pool.dim, at + h * pool.row());
}

// Divides the batch into units of work for threads. A single row is processed for all heads at once, as they are adjacent in the
// pool, unless there are too few rows for the threads. Chunks are processed by head; its keys and values then stay in the cache.
static std::vector<Span> spans(const Step& step, int64_t heads, int64_t kv_heads, int threads) {
  std::vector<Span> made;
  int64_t most = std::max<int64_t>(1, QUERIES * kv_heads / heads);
  int64_t alone = std::max<int64_t>(1, std::min(kv_heads, kv_heads * step.sequences / (2 * threads)));
  for (int64_t s = 0; s < step.sequences; s++)
    for (int64_t row = step.starts[s]; row < step.starts[s + 1]; row += most) {
      int64_t rows = std::min<int64_t>(most, step.starts[s + 1] - row), count = rows == 1 ? alone : 1;
      for (int64_t head = 0; head < kv_heads; head += count)
        made.push_back({s, row, rows, head, std::min(count, kv_heads - head)});
    }
  return made;
}

// Calls f(position, tokens, slot) for runs of positions that are adjacent in a block, no longer than a tile.
template <class F>
ALWAYS_INLINE void each_run(const int32_t* blocks, int64_t size, int64_t first, int64_t last, F f) {
  for (int64_t position = first; position < last;) {
    int64_t offset = position % size, count = std::min({TILE, size - offset, last - position});
    f(position, count, blocks[position / size] * size + offset);
    position += count;
  }
}

static inline Vec capped(Vec scores, float softcap) {
  return softcap > 0 ? tanh_of(scores * (1.0f / softcap)) * softcap : scores;
}

// Scores one group's queries [groups, dim] with `tokens` keys that are `stride` apart. Query g and key j: to[g * width + j].
static void score(const float* query, int64_t groups, int64_t dim, const float* key, int64_t stride, int64_t tokens,
                  float scale, float* to, int64_t width) {
  int64_t j = 0;
  for (; j + LANES <= tokens; j += LANES)
    for (int64_t g = 0; g < groups; g++) {
      Vec part[LANES] = {};
      for (int64_t d = 0; d < dim; d += LANES) {
        Vec q = load(query + g * dim + d);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) part[i] += q * load(key + (j + i) * stride + d);
      }
      store(to + g * width + j, sums(part) * scale);
    }
  for (; j < tokens; j++)
    for (int64_t g = 0; g < groups; g++) {
      Vec part{};
      for (int64_t d = 0; d < dim; d += LANES) part += load(query + g * dim + d) * load(key + j * stride + d);
      to[g * width + j] = sum(part) * scale;
    }
}

// Turns scores [width], of which the first `count` are valid, into probabilities, followed by zeros.
static void softmax(float* s, int64_t count, int64_t width, float softcap) {
  for (int64_t j = 0; softcap > 0 && j < width; j += LANES) store(s + j, capped(load(s + j), softcap));
  for (int64_t j = count; j < width; j++) s[j] = -INFINITY;
  Vec most = splat(-INFINITY), added{};
  for (int64_t j = 0; j < width; j += LANES) most = larger(load(s + j), most);
  float highest = most[0];
  for (int i = 1; i < LANES; i++) highest = std::max(highest, most[i]);
  for (int64_t j = 0; j < width; j += LANES) {
    Vec e = exp_of(load(s + j) - highest);
    store(s + j, e);
    added += e;
  }
  float whole = 1.0f / sum(added);
  for (int64_t j = 0; j < width; j += LANES) store(s + j, load(s + j) * whole);
}

// to [groups, dim] += probabilities [groups][width] times `tokens` values that are `stride` apart.
static void weigh(const float* p, int64_t width, int64_t groups, int64_t dim, const float* value, int64_t stride,
                  int64_t tokens, float* to) {
  for (int64_t g = 0; g < groups; g++, p += width, to += dim) {
    int64_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES) {
      Vec a = load(to + d), b = load(to + d + LANES), c = load(to + d + 2 * LANES), e = load(to + d + 3 * LANES);
      for (int64_t j = 0; j < tokens; j++) {
        const float* v = value + j * stride + d;
        Vec weight = splat(p[j]);
        a += weight * load(v);
        b += weight * load(v + LANES);
        c += weight * load(v + 2 * LANES);
        e += weight * load(v + 3 * LANES);
      }
      store(to + d, a), store(to + d + LANES, b), store(to + d + 2 * LANES, c), store(to + d + 3 * LANES, e);
    }
    for (; d < dim; d += LANES) {
      Vec a = load(to + d);
      for (int64_t j = 0; j < tokens; j++) a += splat(p[j]) * load(value + j * stride + d);
      store(to + d, a);
    }
  }
}

// Attends one row, for `heads` groups from `head` on: query, out [heads * groups, dim].
static void attend_row(const float* query, const Pool& pool, const int32_t* blocks, int64_t head, int64_t heads,
                       int64_t groups, int64_t first, int64_t last, float scale, float softcap, float* out) {
  static thread_local std::vector<float> scores, unpacked;
  int64_t dim = pool.dim, count = last - first, own = groups * dim;
  int64_t width = (count + LANES - 1) / LANES * LANES;
  scores.resize(std::max<size_t>(scores.size(), heads * groups * width));
  unpacked.resize(std::max<size_t>(unpacked.size(), TILE * dim + LINE));
  float* room = aligned(unpacked.data());
  each_run(blocks, pool.block_tokens, first, last, [&](int64_t position, int64_t tokens, int64_t slot) {
    for (int64_t h = 0; h < heads; h++) {
      Rows keys = rows_of(pool, pool.keys, slot, head + h, tokens, room);
      score(query + h * own, groups, dim, keys.at, keys.stride, tokens, scale,
            scores.data() + h * groups * width + position - first, width);
    }
  });
  for (int64_t h = 0; h < heads * groups; h++) softmax(scores.data() + h * width, count, width, softcap);
  std::fill(out, out + heads * own, 0.0f);
  each_run(blocks, pool.block_tokens, first, last, [&](int64_t position, int64_t tokens, int64_t slot) {
    for (int64_t h = 0; h < heads; h++) {
      Rows values = rows_of(pool, pool.values, slot, head + h, tokens, room);
      weigh(scores.data() + h * groups * width + position - first, width, groups, dim, values.at, values.stride, tokens,
            out + h * own);
    }
  });
}

// out [rows, W * LANES] (+)= x * panel, for any number of rows. Steps are as in `micro`.
template <int W, int R = ROWS>
static void any_rows(int64_t rows, const float* x, int64_t row_step, int64_t depth_step, const float* panel,
                     int64_t panel_step, int64_t depth, float* out, int64_t ldo, bool add) {
  for (; rows >= R; rows -= R, x += R * row_step, out += R * ldo)
    micro<R, W>(x, row_step, depth_step, panel, panel_step, depth, out, ldo, add);
  if constexpr (R > 1)
    if (rows > 0) any_rows<W, (R + 1) / 2>(rows, x, row_step, depth_step, panel, panel_step, depth, out, ldo, add);
}

template <class F>
ALWAYS_INLINE void each_panel(int64_t columns, F f) {  // f(column, vectors): panels of two vectors, then at most one of a single vector
  int64_t c = 0;
  for (; c + PANEL <= columns; c += PANEL) f(c, std::integral_constant<int, 2>());
  for (; c < columns; c += LANES) f(c, std::integral_constant<int, 1>());
}

// Attends one group's heads in several rows of one sequence, tile by tile of its context, with a running softmax. No context is
// copied. Scores are stored transposed, [positions][queries], so that keys and values are read from the pool in place and the
// softmax runs along lanes. Row r has its queries at query + r * ldq and its results at out + r * ldo.
static void attend_span(const float* query, int64_t ldq, int64_t rows, const int32_t* visible, const Pool& pool,
                        const int32_t* blocks, int64_t head, int64_t groups, float scale, float softcap, float* out,
                        int64_t ldo) {
  static thread_local std::vector<float> buffer;
  static thread_local std::vector<int32_t> limits;
  int64_t dim = pool.dim, queries = rows * groups;
  int64_t lanes = (queries + LANES - 1) / LANES * LANES;
  buffer.resize(std::max<size_t>(buffer.size(), lanes * (2 * dim + TILE + 3) + TILE * dim + LINE));
  limits.assign(2 * lanes, 0);
  float *turned = buffer.data(), *scores = turned + dim * lanes, *sum_out = scores + TILE * lanes;
  float *most = sum_out + lanes * dim, *total = most + lanes, *shrink = total + lanes;
  float* unpacked = aligned(shrink + lanes);
  int32_t *from = limits.data(), *until = from + lanes;
  int32_t begin = INT32_MAX, end = 0, all_from = 0, all_until = INT32_MAX;
  std::fill(turned, turned + dim * lanes, 0.0f);
  for (int64_t r = 0; r < rows; r++) {
    begin = std::min(begin, visible[2 * r]), end = std::max(end, visible[2 * r + 1]);
    all_from = std::max(all_from, visible[2 * r]), all_until = std::min(all_until, visible[2 * r + 1]);
    for (int64_t g = 0; g < groups; g++) {
      int64_t m = r * groups + g;
      from[m] = visible[2 * r], until[m] = visible[2 * r + 1];
      for (int64_t d = 0; d < dim; d++) turned[d * lanes + m] = query[r * ldq + g * dim + d] * scale;
    }
  }
  std::fill(sum_out, sum_out + lanes * dim, 0.0f);
  std::fill(most, most + lanes, -INFINITY);
  std::fill(total, total + lanes, 0.0f);
  for (int64_t start = begin; start < end; start += TILE) {
    int64_t stop = std::min<int64_t>(start + TILE, end);
    each_run(blocks, pool.block_tokens, start, stop, [&](int64_t position, int64_t tokens, int64_t slot) {
      Rows keys = rows_of(pool, pool.keys, slot, head, tokens, unpacked);
      each_panel(lanes, [&](int64_t m, auto vectors) {
        any_rows<vectors()>(tokens, keys.at, keys.stride, 1, turned + m, lanes, dim,
                            scores + (position - start) * lanes + m, lanes, false);
      });
    });
    bool masked = start < all_from || stop > all_until, moved = false;
    for (int64_t m = 0; m < lanes; m += LANES) {
      Vec before = load(most + m), highest = before, added{};
      for (int64_t t = 0; t < stop - start; t++) {
        float* s = scores + t * lanes + m;
        Vec score = capped(load(s), softcap);
        if (masked) {
          IntVec position = IntVec{} + static_cast<int32_t>(start + t);
          score = position >= load(from + m) && position < load(until + m) ? score : splat(-INFINITY);
        }
        store(s, score);
        highest = larger(score, highest);
      }
      Vec base = highest == -INFINITY ? Vec{} : highest;  // a row that has seen nothing yet
      for (int64_t t = 0; t < stop - start; t++) {
        float* s = scores + t * lanes + m;
        Vec e = exp_of(load(s) - base);
        store(s, e);
        added += e;
      }
      Vec factor = exp_of(before - base);
      store(shrink + m, factor);
      store(total + m, load(total + m) * factor + added);
      store(most + m, highest);
      for (int i = 0; i < LANES; i++) moved |= factor[i] != 1.0f;
    }
    if (moved)
      for (int64_t m = 0; m < queries; m++)
        for (int64_t d = 0; d < dim; d += LANES)
          store(sum_out + m * dim + d, load(sum_out + m * dim + d) * shrink[m]);
    each_run(blocks, pool.block_tokens, start, stop, [&](int64_t position, int64_t tokens, int64_t slot) {
      Rows values = rows_of(pool, pool.values, slot, head, tokens, unpacked);
      each_panel(dim, [&](int64_t d, auto vectors) {
        any_rows<vectors()>(queries, scores + (position - start) * lanes, 1, lanes, values.at + d, values.stride,
                            tokens, sum_out + d, dim, true);
      });
    });
  }
  for (int64_t r = 0; r < rows; r++)
    for (int64_t g = 0; g < groups; g++) {
      int64_t m = r * groups + g;
      Vec whole = splat(1.0f / total[m]);
      for (int64_t d = 0; d < dim; d += LANES)
        store(out + r * ldo + g * dim + d, load(sum_out + m * dim + d) * whole);
    }
}

// Attends all rows of a batch. Every thread of a parallel region calls it. Rows of q are ldq apart, rows of out heads * dim.
static void attend(const Step& step, const std::vector<Span>& work, const Pool& pool, const int32_t* visible,
                   const float* q, int64_t ldq, int64_t heads, float scale, float softcap, float* out) {
  int64_t groups = heads / pool.kv_heads, width = groups * pool.dim, ldo = heads * pool.dim;
#pragma omp for schedule(dynamic, 1)
  for (int64_t item = 0; item < static_cast<int64_t>(work.size()); item++) {
    const Span& span = work[item];
    const int32_t *blocks = step.table + span.sequence * step.columns, *sees = visible + 2 * span.first;
    const float* from = q + span.first * ldq + span.head * width;
    float* to = out + span.first * ldo + span.head * width;
    if (span.rows == 1)
      attend_row(from, pool, blocks, span.head, span.heads, groups, sees[0], sees[1], scale, softcap, to);
    else
      attend_span(from, ldq, span.rows, sees, pool, blocks, span.head, groups, scale, softcap, to, ldo);
  }
}
