// The kernels, written once with the compiler's vector types. Each kernels_*.cpp defines
//
//   PDSERVE_SET      name of the instruction set, also of the namespace
//   PDSERVE_LANES    floats in one vector register
//   PDSERVE_ROWS     rows of a tile: 2 * rows accumulators must fit the registers
//   PDSERVE_DOT2     1 if bfloat16 pairs are multiplied and added by one instruction
//
// and is compiled with that set's options. Only builtins and static functions below: an inline
// function of a library header, compiled here, could replace the portable one at link time.
#include <stddef.h>
#include <stdint.h>

#include "pdserve/cpu/kernels.hpp"

#if PDSERVE_DOT2
#include <immintrin.h>
#endif

namespace pdserve::cpu {
namespace {

constexpr int kLanes = PDSERVE_LANES;
constexpr int kPanel = 2 * kLanes;
constexpr int kTileRows = PDSERVE_ROWS;
constexpr int kMaxRows = 8 * kTileRows;
// Columns multiplied before the next rows have their turn: that piece of a panel stays near.
constexpr int kDepthFloat = 12288 / kPanel;
constexpr int kDepthBfloat = 2 * kDepthFloat;

typedef float Vec __attribute__((vector_size(4 * PDSERVE_LANES)));
typedef int32_t Ivec __attribute__((vector_size(4 * PDSERVE_LANES)));
typedef uint32_t Uvec __attribute__((vector_size(4 * PDSERVE_LANES)));
typedef uint16_t Hvec __attribute__((vector_size(2 * PDSERVE_LANES)));
// The same without alignment, for memory.
typedef float VecAt __attribute__((vector_size(4 * PDSERVE_LANES), aligned(4), may_alias));
typedef uint32_t UvecAt __attribute__((vector_size(4 * PDSERVE_LANES), aligned(2), may_alias));
typedef uint8_t BytesAt __attribute__((vector_size(PDSERVE_LANES), aligned(1), may_alias));
typedef uint16_t HvecAt __attribute__((vector_size(2 * PDSERVE_LANES), aligned(2), may_alias));
typedef uint32_t PairAt __attribute__((aligned(2), may_alias));

#define PDSERVE_INLINE static inline __attribute__((always_inline))

PDSERVE_INLINE Vec load(const float* p) { return *reinterpret_cast<const VecAt*>(p); }
PDSERVE_INLINE void store(float* p, Vec v) { *reinterpret_cast<VecAt*>(p) = v; }
PDSERVE_INLINE Uvec load_pairs(const uint16_t* p) { return *reinterpret_cast<const UvecAt*>(p); }
// x - 0 is x for every x, so this is a plain broadcast.
PDSERVE_INLINE Vec splat(float x) { return x - Vec{}; }
PDSERVE_INLINE float as_float(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}
PDSERVE_INLINE uint32_t as_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}
PDSERVE_INLINE Vec low_half(Uvec pairs) { return (Vec)(pairs << 16); }
PDSERVE_INLINE Vec high_half(Uvec pairs) { return (Vec)(pairs & 0xffff0000u); }
PDSERVE_INLINE Vec maximum(Vec a, Vec b) { return a > b ? a : b; }

// The lanes with bit S of their number flipped.
template <int S>
PDSERVE_INLINE Vec flipped(Vec v) {
#if defined(__clang__)
  Vec out;
#pragma GCC unroll 16
  for (int e = 0; e < kLanes; ++e) out[e] = v[e ^ S];
  return out;
#else
  Ivec from;
#pragma GCC unroll 16
  for (int e = 0; e < kLanes; ++e) from[e] = e ^ S;
  return __builtin_shuffle(v, from);
#endif
}
// All lanes together, in one order for all callers.
template <int S = kLanes / 2>
PDSERVE_INLINE float sum_lanes(Vec v) {
  v += flipped<S>(v);
  if constexpr (S > 1)
    return sum_lanes<S / 2>(v);
  else
    return v[0];
}
template <int S = kLanes / 2>
PDSERVE_INLINE float max_lanes(Vec v) {
  v = maximum(v, flipped<S>(v));
  if constexpr (S > 1)
    return max_lanes<S / 2>(v);
  else
    return v[0];
}

// ------------------------------------------------------------------ bfloat16

// Round to nearest, ties to even; a NaN stays one.
PDSERVE_INLINE uint16_t to_bfloat(float x) {
  const uint32_t bits = as_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
PDSERVE_INLINE float from_bfloat(uint16_t x) { return as_float(static_cast<uint32_t>(x) << 16); }

PDSERVE_INLINE void store_bfloat(uint16_t* p, Vec v) {
  const Uvec bits = (Uvec)v;
  const Uvec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Uvec nan = (bits >> 16) | 0x40u;
  const Uvec chosen = (bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded;
  *reinterpret_cast<HvecAt*>(p) = __builtin_convertvector(chosen, Hvec);
}
PDSERVE_INLINE Vec load_bfloat(const uint16_t* p) {
  const Hvec half = *reinterpret_cast<const HvecAt*>(p);
  return (Vec)(__builtin_convertvector(half, Uvec) << 16);
}

static void convert(const float* x, int n, Type type, void* out) {
  if (type == Type::kFloat32) {
    __builtin_memcpy(out, x, sizeof(float) * static_cast<size_t>(n));
    return;
  }
  uint16_t* y = static_cast<uint16_t*>(out);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store_bfloat(y + i, load(x + i));
  for (; i < n; ++i) y[i] = to_bfloat(x[i]);
}

static void widen(Type type, const void* x, int n, float* out) {
  if (type == Type::kFloat32) {
    __builtin_memcpy(out, x, sizeof(float) * static_cast<size_t>(n));
    return;
  }
  const uint16_t* from = static_cast<const uint16_t*>(x);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load_bfloat(from + i));
  for (; i < n; ++i) out[i] = from_bfloat(from[i]);
}

// ------------------------------------------------------------------ products

// c[R][panel] (+)= a[R][depth] . b[depth][panel]
template <int R>
static void tile(const float* a, size_t lda, const float* b, size_t ldb, int depth, float* c,
                 size_t ldc, bool add) {
  Vec acc[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    acc[r][0] = add ? load(c + r * ldc) : Vec{};
    acc[r][1] = add ? load(c + r * ldc + kLanes) : Vec{};
  }
  for (int i = 0; i < depth; ++i, b += ldb) {
    const Vec b0 = load(b), b1 = load(b + kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec x = splat(a[r * lda + i]);
      acc[r][0] += x * b0;
      acc[r][1] += x * b1;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    store(c + r * ldc, acc[r][0]);
    store(c + r * ldc + kLanes, acc[r][1]);
  }
}

PDSERVE_INLINE Vec multiply_pairs(Vec acc, uint32_t x, Uvec w) {
#if PDSERVE_DOT2
  return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(static_cast<int>(x)),
                               (__m512bh)w);
#else
  acc += splat(as_float(x << 16)) * low_half(w);
  return acc + splat(as_float(x & 0xffff0000u)) * high_half(w);
#endif
}

// The same for bfloat16: a[R][2 * pairs], b[pairs][panel][2].
template <int R>
static void tile_pairs(const uint16_t* a, size_t lda, const uint16_t* b, size_t ldb, int pairs,
                       float* c, size_t ldc, bool add) {
  Vec acc[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    acc[r][0] = add ? load(c + r * ldc) : Vec{};
    acc[r][1] = add ? load(c + r * ldc + kLanes) : Vec{};
  }
  for (int i = 0; i < pairs; ++i, b += ldb) {
    const Uvec b0 = load_pairs(b), b1 = load_pairs(b + 2 * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const uint32_t x = *reinterpret_cast<const PairAt*>(a + r * lda + 2 * i);
      acc[r][0] = multiply_pairs(acc[r][0], x, b0);
      acc[r][1] = multiply_pairs(acc[r][1], x, b1);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    store(c + r * ldc, acc[r][0]);
    store(c + r * ldc + kLanes, acc[r][1]);
  }
}

template <int R>
PDSERVE_INLINE void run_tile(int rows, const float* a, size_t lda, const float* b, size_t ldb,
                             int depth, float* c, size_t ldc, bool add) {
  if (rows == R) return tile<R>(a, lda, b, ldb, depth, c, ldc, add);
  if constexpr (R > 1) run_tile<R - 1>(rows, a, lda, b, ldb, depth, c, ldc, add);
}
template <int R>
PDSERVE_INLINE void run_tile(int rows, const uint16_t* a, size_t lda, const uint16_t* b,
                             size_t ldb, int pairs, float* c, size_t ldc, bool add) {
  if (rows == R) return tile_pairs<R>(a, lda, b, ldb, pairs, c, ldc, add);
  if constexpr (R > 1) run_tile<R - 1>(rows, a, lda, b, ldb, pairs, c, ldc, add);
}

// c[m][panel] (+)= a[m][depth] . b, in tiles of nearly equal height. `depth` counts floats, or
// pairs of bfloat16.
template <class Item>
static void run_tiles(int m, const Item* a, size_t lda, const Item* b, size_t ldb, int depth,
                      float* c, size_t ldc, bool add) {
  int tiles = (m + kTileRows - 1) / kTileRows;
  while (m > 0) {
    const int rows = (m + tiles - 1) / tiles;
    run_tile<kTileRows>(rows, a, lda, b, ldb, depth, c, ldc, add);
    a += static_cast<size_t>(rows) * lda;
    c += static_cast<size_t>(rows) * ldc;
    m -= rows;
    --tiles;
  }
}

// c[m][panel] = a[m][cols] . one packed panel
static void multiply(Type type, const void* a, size_t lda, int m, const uint8_t* panel, int cols,
                     float* c) {
  if (type == Type::kFloat32) {
    const float* x = static_cast<const float*>(a);
    const float* w = reinterpret_cast<const float*>(panel);
    for (int k = 0; k < cols; k += kDepthFloat) {
      const int depth = cols - k < kDepthFloat ? cols - k : kDepthFloat;
      run_tiles(m, x + k, lda, w + static_cast<size_t>(k) * kPanel, kPanel, depth, c, kPanel, k > 0);
    }
    return;
  }
  const uint16_t* x = static_cast<const uint16_t*>(a);
  const uint16_t* w = reinterpret_cast<const uint16_t*>(panel);
  for (int k = 0; k < cols; k += kDepthBfloat) {
    const int depth = cols - k < kDepthBfloat ? cols - k : kDepthBfloat;
    run_tiles(m, x + k, lda, w + static_cast<size_t>(k) * kPanel, 2 * kPanel, depth / 2, c, kPanel,
              k > 0);
  }
}

// ------------------------------------------------------------------ elementwise

// e^x by 2^n * e^r, |r| <= ln 2 / 2; exactly 1 at 0 and exactly 0 below -87.3.
PDSERVE_INLINE Vec exponential(Vec x) {
  const Vec low = splat(-87.3f), high = splat(88.0f), magic = splat(12582912.0f);
  const Vec clamped = x < low ? low : (x > high ? high : x);
  const Vec shifted = clamped * splat(1.44269504f) + magic;
  const Vec n = shifted - magic;
  const Vec r = clamped - n * splat(0.693359375f) + n * splat(2.12194440e-4f);
  Vec p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * r * r + r + splat(1.0f);
  const Ivec exponent = ((Ivec)shifted - (Ivec)magic) << 23;
  const Vec result = (Vec)((Ivec)p + exponent);
  return x < low ? Vec{} : result;
}

// x * sigmoid(y)
PDSERVE_INLINE Vec times_sigmoid(Vec x, Vec y) { return x / (splat(1.0f) + exponential(-y)); }

PDSERVE_INLINE Vec hyperbolic_tangent(Vec x) {
  return splat(1.0f) - splat(2.0f) / (exponential(x + x) + splat(1.0f));
}

PDSERVE_INLINE Vec gelu(Vec x) {
  // (1 + tanh(u)) / 2 is sigmoid(2 u), and u is sqrt(2 / pi) * (x + 0.044715 x^3).
  return times_sigmoid(x, splat(1.5957691216f) * (x + splat(0.044715f) * x * x * x));
}

PDSERVE_INLINE Vec gated(const Gate& gate, Vec x, Vec up) {
  if (gate.activation == Activation::kSilu) return times_sigmoid(x, x) * up;
  if (gate.activation == Activation::kGelu) return gelu(x) * up;
  const Vec high = splat(gate.limit), low = -high;
  const Vec g = x > high ? high : x;
  const Vec u = up > high ? high : (up < low ? low : up);
  return times_sigmoid(g, splat(gate.alpha) * g) * (u + splat(1.0f));
}

static int argmax(const float* x, int n) {
  Vec best = splat(-__builtin_inff());
  Ivec where = Ivec{}, here;
  for (int e = 0; e < kLanes; ++e) here[e] = e;
  int i = 0;
  for (; i + kLanes <= n; i += kLanes, here += kLanes) {
    const Vec v = load(x + i);
    where = v > best ? here : where;
    best = v > best ? v : best;
  }
  float most = best[0];
  int found = where[0];
  for (int e = 1; e < kLanes; ++e) {
    if (best[e] > most || (best[e] == most && where[e] < found)) {
      most = best[e];
      found = where[e];
    }
  }
  for (; i < n; ++i) {
    if (x[i] > most) {
      most = x[i];
      found = i;
    }
  }
  return most > -__builtin_inff() ? found : -1;
}

PDSERVE_INLINE float sum_of(const float* x, int n) {
  Vec a = Vec{}, b = Vec{};
  float rest = 0.0f;
  int i = 0;
  for (; i + kPanel <= n; i += kPanel) {
    a += load(x + i);
    b += load(x + i + kLanes);
  }
  for (; i < n; ++i) rest += x[i];
  return sum_lanes(a + b) + rest;
}

PDSERVE_INLINE float squares_of(const float* x, int n, float middle) {
  Vec a = Vec{}, b = Vec{};
  float rest = 0.0f;
  int i = 0;
  for (; i + kPanel <= n; i += kPanel) {
    const Vec x0 = load(x + i) - splat(middle), x1 = load(x + i + kLanes) - splat(middle);
    a += x0 * x0;
    b += x1 * x1;
  }
  for (; i < n; ++i) rest += (x[i] - middle) * (x[i] - middle);
  return sum_lanes(a + b) + rest;
}

PDSERVE_INLINE void scale_row(const float* x, const float* weight, int n, float middle,
                              float epsilon, Type type, void* out) {
  const float mean = squares_of(x, n, middle) / static_cast<float>(n);
  const float scale = 1.0f / __builtin_sqrtf(mean + epsilon);
  float* y = static_cast<float*>(out);
  uint16_t* half = static_cast<uint16_t*>(out);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec v = (load(x + i) - splat(middle)) * splat(scale) * load(weight + i);
    if (type == Type::kFloat32)
      store(y + i, v);
    else
      store_bfloat(half + i, v);
  }
  for (; i < n; ++i) {
    const float v = (x[i] - middle) * scale * weight[i];
    if (type == Type::kFloat32)
      y[i] = v;
    else
      half[i] = to_bfloat(v);
  }
}

static void norm(const float* x, const float* weight, int n, float epsilon, Type type, void* out) {
  scale_row(x, weight, n, 0.0f, epsilon, type, out);
}

static void layer_norm(const float* x, const float* weight, int n, float epsilon, Type type,
                       void* out) {
  scale_row(x, weight, n, sum_of(x, n) / static_cast<float>(n), epsilon, type, out);
}

static void rotate(float* head, const float* table, int dim, float scale) {
  const int half = dim / 2;
  const float* cosines = table;
  const float* sines = table + half;
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Vec a = load(head + i), b = load(head + half + i);
    const Vec c = load(cosines + i), s = load(sines + i);
    store(head + i, (a * c - b * s) * splat(scale));
    store(head + half + i, (b * c + a * s) * splat(scale));
  }
  for (; i < half; ++i) {
    const float a = head[i], b = head[half + i];
    head[i] = (a * cosines[i] - b * sines[i]) * scale;
    head[half + i] = (b * cosines[i] + a * sines[i]) * scale;
  }
}

// ------------------------------------------------------------------ linear layers

static void add_bias(float* c, int m, const float* bias, int count) {
  if (bias == nullptr) return;
  for (int r = 0; r < m; ++r)
    for (int j = 0; j < count; ++j) c[r * kPanel + j] += bias[j];
}

static void finish_store(const Linear& job, const float* c, int row, int m, int column, int count) {
  float* out = static_cast<float*>(job.out) + static_cast<size_t>(row) * job.out_stride + column;
  for (int r = 0; r < m; ++r, out += job.out_stride, c += kPanel) {
    if (job.output == Output::kAdd)
      for (int j = 0; j < count; ++j) out[j] += c[j];
    else
      for (int j = 0; j < count; ++j) out[j] = c[j];
  }
}

static void finish_gated(const Linear& job, float* gate, const float* up, int row, int m,
                         int column, int count) {
  const size_t at = static_cast<size_t>(row) * job.out_stride + static_cast<size_t>(column);
  uint8_t* out = static_cast<uint8_t*>(job.out) + at * item_size(job.type);
  for (int r = 0; r < m; ++r) {
    for (int j = 0; j < kPanel; j += kLanes) 
      store(gate + j, gated(job.gate, load(gate + j), load(up + j)));
    convert(gate, count, job.type, out);
    gate += kPanel;
    up += kPanel;
    out += job.out_stride * item_size(job.type);
  }
}

static void linear(const Linear& job, int row, int rows, int first, int last, float* scratch) {
  const size_t bytes = job.weight.panel_bytes(kPanel, job.type);
  const uint8_t* operand = static_cast<const uint8_t*>(job.operand);
  const size_t stride = job.operand_stride * item_size(job.type);
  const int end = row + rows;
  for (; row < end; row += kMaxRows) {
    const int m = end - row < kMaxRows ? end - row : kMaxRows;
    const void* a = operand + static_cast<size_t>(row) * stride;
    for (int p = first; p < last; ++p) {
      const int column = p * kPanel;
      const int left = job.weight.rows - column;
      const int count = left < kPanel ? left : kPanel;
      const size_t offset = static_cast<size_t>(p) * bytes;
      multiply(job.type, a, job.operand_stride, m, job.weight.data + offset, job.weight.cols,
               scratch);
      add_bias(scratch, m, job.bias ? job.bias + column : nullptr, count);
      if (job.output == Output::kGated) {
        float* up = scratch + kMaxRows * kPanel;
        multiply(job.type, a, job.operand_stride, m, job.second.data + offset, job.second.cols, up);
        add_bias(up, m, job.second_bias ? job.second_bias + column : nullptr, count);
        finish_gated(job, scratch, up, row, m, column, count);
      } else {
        finish_store(job, scratch, row, m, column, count);
      }
    }
  }
}

// ------------------------------------------------------------------ packing

// One panel's lanes [begin, end) from as many rows of `source`; reads run along the rows, writes
// along the panel.
template <class Item, int Pair>
static void pack_panel(const Item* source, int cols, int begin, int end, Item* panel) {
  for (int k = 0; k < cols; ++k) {
    Item* out = panel + static_cast<size_t>(k / Pair) * (Pair * kPanel) + k % Pair;
    for (int lane = begin; lane < end; ++lane)
      out[lane * Pair] = source[static_cast<size_t>(lane - begin) * static_cast<size_t>(cols) + k];
  }
}

static void pack(Type type, const void* source, int rows, int cols, int at, uint8_t* packed) {
  const size_t row_bytes = static_cast<size_t>(cols) * item_size(type);
  const uint8_t* from = static_cast<const uint8_t*>(source);
  for (int row = at; row < at + rows;) {
    const int begin = row % kPanel;
    const int left = at + rows - row;
    const int end = begin + left < kPanel ? begin + left : kPanel;
    uint8_t* panel = packed + static_cast<size_t>(row / kPanel) * kPanel * row_bytes;
    if (type == Type::kFloat32)
      pack_panel<float, 1>(reinterpret_cast<const float*>(from), cols, begin, end,
                           reinterpret_cast<float*>(panel));
    else
      pack_panel<uint16_t, 2>(reinterpret_cast<const uint16_t*>(from), cols, begin, end,
                              reinterpret_cast<uint16_t*>(panel));
    from += static_cast<size_t>(end - begin) * row_bytes;
    row += end - begin;
  }
}

static void unpack_row(Type type, const Packed& matrix, int row, float* out) {
  const uint8_t* panel =
      matrix.data + static_cast<size_t>(row / kPanel) * matrix.panel_bytes(kPanel, type);
  const size_t lane = static_cast<size_t>(row % kPanel);
  if (type == Type::kFloat32) {
    const float* x = reinterpret_cast<const float*>(panel) + lane;
    for (int k = 0; k < matrix.cols; ++k) out[k] = x[static_cast<size_t>(k) * kPanel];
  } else {
    const uint16_t* x = reinterpret_cast<const uint16_t*>(panel) + 2 * lane;
    for (int k = 0; k < matrix.cols; ++k)
      out[k] = from_bfloat(x[static_cast<size_t>(k / 2) * 2 * kPanel + (k & 1)]);
  }
}

// ------------------------------------------------------------------ attention

// One stage of the transpose: swaps the halves of a and b that lane bit S separates.
template <int S>
PDSERVE_INLINE void butterfly(Uvec& a, Uvec& b) {
  Uvec x, y;
#if defined(__clang__)
#pragma GCC unroll 16
  for (int e = 0; e < kLanes; ++e) {
    x[e] = (e & S) ? b[e - S] : a[e];
    y[e] = (e & S) ? b[e] : a[e + S];
  }
#else
  Uvec first, second;
#pragma GCC unroll 16
  for (unsigned e = 0; e < kLanes; ++e) {
    first[e] = (e & S) ? kLanes + e - S : e;
    second[e] = (e & S) ? kLanes + e : e + S;
  }
  x = __builtin_shuffle(a, b, first);
  y = __builtin_shuffle(a, b, second);
#endif
  a = x;
  b = y;
}
template <int S>
PDSERVE_INLINE void transpose_stages(Uvec (&v)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i)
    if (!(i & S)) butterfly<S>(v[i], v[i + S]);
  if constexpr (S * 2 < kLanes) transpose_stages<S * 2>(v);
}

// Keys of kPanel tokens as one panel: out[unit][token], a unit being a float or a bfloat16 pair.
static void transpose_keys(const uint8_t* const* rows, int units, uint32_t* out) {
  int u = 0;
  for (; u + kLanes <= units; u += kLanes) {
    for (int half = 0; half < kPanel; half += kLanes) {
      Uvec v[kLanes];
#pragma GCC unroll 16
      for (int t = 0; t < kLanes; ++t)
        v[t] = *reinterpret_cast<const UvecAt*>(rows[half + t] + 4 * static_cast<size_t>(u));
      transpose_stages<1>(v);
#pragma GCC unroll 16
      for (int t = 0; t < kLanes; ++t)
        *reinterpret_cast<UvecAt*>(out + static_cast<size_t>(u + t) * kPanel + half) = v[t];
    }
  }
  for (; u < units; ++u)
    for (int t = 0; t < kPanel; ++t)
      out[static_cast<size_t>(u) * kPanel + t] =
          *reinterpret_cast<const PairAt*>(rows[t] + 4 * static_cast<size_t>(u));
}

static inline int padded(int dim) { return (dim + kPanel - 1) / kPanel * kPanel; }

// Scratch of one attention call, all in floats. `rows` are all of the call's, `at_once` those of one
// KV head.
struct Scratch {
  float* queries;  // [rows][dim]: in the KV's type
  float* keys[2];  // [dim][panel]: in the KV's type; this panel and the next
  float* values;   // [panel][padded dim]: rows of heads that do not fill panels, or that were FP8
  float* weights;  // [at once][panel]: scores, then probabilities
  float* output;   // [rows][padded dim]
  float* largest;  // [rows]
  float* total;    // [rows]

  Scratch(float* base, int rows, int at_once, int dim) {
    const size_t r = static_cast<size_t>(rows), d = static_cast<size_t>(padded(dim));
    queries = base;
    keys[0] = queries + r * d;
    keys[1] = keys[0] + d * kPanel;
    values = keys[1] + d * kPanel;
    weights = values + kPanel * d;
    output = weights + static_cast<size_t>(at_once) * kPanel;
    largest = output + r * d;
    total = largest + r;
  }
};

// Where the tokens of one panel are, relative to the first head's keys or values.
struct Places {
  int panel = -1;
  size_t offset[kPanel];
};

// Unwritten slots may hold anything: zeros are read instead.
constexpr size_t kUnwritten = ~static_cast<size_t>(0);
alignas(64) const uint32_t kZeros[kMaxHeadDim] = {};

static void locate(const Attention& job, int panel, Places& places) {
  if (places.panel == panel) return;
  places.panel = panel;
  const KvView& kv = *job.kv;
  const size_t token_bytes = kv.token_bytes();
  const size_t first_head = static_cast<size_t>(job.first_head) * kv.head_stride;
  const int start = panel * kPanel;
  int block = start / kv.block_size, slot = start % kv.block_size;
  for (int t = 0; t < kPanel; ++t) {
    if (start + t >= job.written) {
      places.offset[t] = kUnwritten;
      continue;
    }
    places.offset[t] = static_cast<size_t>(job.table[block]) * kv.block_stride + first_head +
                       static_cast<size_t>(slot) * token_bytes;
    if (++slot == kv.block_size) {
      slot = 0;
      ++block;
    }
  }
}

static void point(const Places& places, const uint8_t* base, const uint8_t** rows) {
  for (int t = 0; t < kPanel; ++t)
    rows[t] = places.offset[t] == kUnwritten ? reinterpret_cast<const uint8_t*>(kZeros)
                                             : base + places.offset[t];
}

// Asks for keys and values that will be read two panels from now: they lie too scattered for the
// hardware to guess.
static void prefetch(const Places& places, const KvView& kv, int head) {
  const size_t bytes = kv.token_bytes();
  const size_t shift = static_cast<size_t>(head) * kv.head_stride;
  for (int t = 0; t < kPanel; ++t) {
    if (places.offset[t] == kUnwritten) return;
    for (size_t line = 0; line < bytes; line += 64) {
      __builtin_prefetch(kv.keys + places.offset[t] + shift + line);
      __builtin_prefetch(kv.values + places.offset[t] + shift + line);
    }
  }
}

// FP8 to the numbers that are meant. The exponent is 4 bits of a float's 8, which 2^120 makes good;
// numbers below 2^-6 are floats' smallest ones before.
PDSERVE_INLINE Vec from_fp8(Uvec x, Vec scale) {
  const Uvec magnitude = x & 0x7fu;
  const Vec number = (Vec)(magnitude << 20) * splat(as_float((127u + 120u) << 23));
  const Uvec bits = magnitude == 0x7fu ? (Uvec)splat(__builtin_nanf("")) : (Uvec)number;
  return (Vec)(bits | (x & 0x80u) << 24) * scale;
}

static void widen_fp8(const uint8_t* x, int n, float scale, Type type, void* out) {
  alignas(64) float row[kMaxHeadDim + kLanes];
  for (int i = 0; i < n; i += kLanes) {
    Uvec lanes = {};
    const int count = n - i < kLanes ? n - i : kLanes;
    if (count == kLanes)
      lanes = __builtin_convertvector(*reinterpret_cast<const BytesAt*>(x + i), Uvec);
    else
      for (int e = 0; e < count; ++e) lanes[e] = x[i + e];
    store(row + i, from_fp8(lanes, splat(scale)));
  }
  convert(row, n, type, out);
}

// Rows of FP8, widened into scratch, which the pointers name afterwards.
static void widen_rows(const KvView& kv, float scale, const uint8_t** rows, float* scratch) {
  for (int t = 0; t < kPanel; ++t) {
    float* copy = scratch + t * padded(kv.head_dim);
    widen_fp8(rows[t], kv.head_dim, scale, kv.type, copy);
    rows[t] = reinterpret_cast<const uint8_t*>(copy);
  }
}

PDSERVE_INLINE Vec load_item(const float* p) { return load(p); }
PDSERVE_INLINE Vec load_item(const uint16_t* p) { return load_bfloat(p); }

// out[R][C vectors] += weights[R][panel] . the same columns of the panel's value rows
template <int R, int C, class Item>
static void tile_values(const float* weights, const uint8_t* const* rows, size_t column, float* out,
                        size_t ldo) {
  Vec acc[R][C];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) acc[r][c] = load(out + r * ldo + c * kLanes);
  for (int t = 0; t < kPanel; ++t) {
    const Item* row = reinterpret_cast<const Item*>(rows[t]) + column;
    Vec v[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) v[c] = load_item(row + c * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec x = splat(weights[r * kPanel + t]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) acc[r][c] += x * v[c];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) store(out + r * ldo + c * kLanes, acc[r][c]);
}

template <int R, int C, class Item>
PDSERVE_INLINE void run_values(int count, const float* weights, const uint8_t* const* rows,
                               size_t column, float* out, size_t ldo) {
  if (count == R) return tile_values<R, C, Item>(weights, rows, column, out, ldo);
  if constexpr (R > 1) run_values<R - 1, C, Item>(count, weights, rows, column, out, ldo);
}

// Few rows take four vectors of columns at a time, for enough independent sums; more rows take two.
template <class Item>
static void gather_values(int count, const float* weights, const uint8_t* const* rows, float* out,
                          int width) {
  constexpr int kFew = kTileRows / 4 > 0 ? kTileRows / 4 : 1;
  const size_t ldo = static_cast<size_t>(width);
  if (count <= kFew) {
    int column = 0;
    for (; column + 2 * kPanel <= width; column += 2 * kPanel)
      run_values<kFew, 4, Item>(count, weights, rows, static_cast<size_t>(column), out + column,
                                ldo);
    if (column < width)
      run_values<kFew, 2, Item>(count, weights, rows, static_cast<size_t>(column), out + column,
                                ldo);
    return;
  }
  int tiles = (count + kTileRows - 1) / kTileRows;
  for (int r = 0; r < count; --tiles) {
    const int height = (count - r + tiles - 1) / tiles;
    for (int column = 0; column < width; column += kPanel)
      run_values<kTileRows, 2, Item>(height, weights + r * kPanel, rows,
                                     static_cast<size_t>(column), out + r * width + column, ldo);
    r += height;
  }
}

// Softmax weights of one row over one panel of keys, of which [begin, end) count: at least one.
// Rescales what the row has gathered so far.
PDSERVE_INLINE void weigh_row(float* scores, int begin, int end, float softcap, float* largest,
                              float* total, float* output, int width) {
  const Vec none = splat(-__builtin_inff());
  Vec s0 = load(scores), s1 = load(scores + kLanes);
  if (softcap > 0.0f) {
    const Vec cap = splat(softcap);
    s0 = cap * hyperbolic_tangent(s0 / cap);
    s1 = cap * hyperbolic_tangent(s1 / cap);
  }
  if (begin > 0 || end < kPanel) {
    Ivec lane;
    for (int e = 0; e < kLanes; ++e) lane[e] = e;
    const Ivec from = begin - Ivec{}, to = end - Ivec{};
    s0 = (lane >= from) & (lane < to) ? s0 : none;
    s1 = (lane + kLanes >= from) & (lane + kLanes < to) ? s1 : none;
  }
  const float peak = max_lanes(maximum(s0, s1));
  const float before = *largest;
  const float after = peak > before ? peak : before;
  const Vec p0 = exponential(s0 - splat(after)), p1 = exponential(s1 - splat(after));
  store(scores, p0);
  store(scores + kLanes, p1);
  const float sum = sum_lanes(p0 + p1);
  if (after == before) {
    *total += sum;
    return;
  }
  const float fade = exponential(splat(before - after))[0];
  *largest = after;
  *total = *total * fade + sum;
  for (int i = 0; i < width; i += kLanes) store(output + i, load(output + i) * splat(fade));
}

// One call's rows in order: KV head, token, query head of the group.
static void begin_rows(const Attention& job, const Scratch& s, int per_head, int width) {
  const int dim = job.kv->head_dim, rows = job.heads * per_head;
  const size_t bytes = static_cast<size_t>(dim) * item_size(job.kv->type);
  for (int r = 0; r < rows; ++r) {
    const int head = r / per_head, token = r % per_head / job.groups, group = r % job.groups;
    const float* query = job.queries + static_cast<size_t>(token) * job.query_stride +
                         static_cast<size_t>(head * job.groups + group) * static_cast<size_t>(dim);
    uint8_t* copy = reinterpret_cast<uint8_t*>(s.queries) + static_cast<size_t>(r) * bytes;
    convert(query, dim, job.kv->type, copy);
    for (int i = 0; i < width; i += kLanes) store(s.output + r * width + i, Vec{});
    // A sink is one more key with this score and a value of zeros.
    s.largest[r] = job.sinks ? job.sinks[head * job.groups + group] : -__builtin_inff();
    s.total[r] = job.sinks ? 1.0f : 0.0f;
  }
}

static void end_rows(const Attention& job, const Scratch& s, int per_head, int width) {
  const int dim = job.kv->head_dim, rows = job.heads * per_head;
  const size_t item = item_size(job.kv->type);
  for (int r = 0; r < rows; ++r) {
    const int head = r / per_head, token = r % per_head / job.groups, group = r % job.groups;
    float* from = s.output + r * width;
    const Vec scale = splat(1.0f / s.total[r]);
    for (int i = 0; i < width; i += kLanes) store(from + i, load(from + i) * scale);
    const size_t at = static_cast<size_t>(token) * job.out_stride +
                      static_cast<size_t>(head * job.groups + group) * static_cast<size_t>(dim);
    convert(from, dim, job.kv->type, static_cast<uint8_t*>(job.out) + at * item);
  }
}

static void score(const Attention& job, const float* queries, const float* keys, int first,
                  int count, float* weights) {
  const size_t dim = static_cast<size_t>(job.kv->head_dim), panel = static_cast<size_t>(kPanel);
  const size_t at = static_cast<size_t>(first) * dim;
  if (job.kv->type == Type::kFloat32)
    run_tiles(count, queries + at, dim, keys, panel, static_cast<int>(dim), weights, panel, false);
  else
    run_tiles(count, reinterpret_cast<const uint16_t*>(queries) + at, dim,
              reinterpret_cast<const uint16_t*>(keys), 2 * panel, static_cast<int>(dim / 2),
              weights, panel, false);
}

// Tokens of the call that see a key of one panel, and the panels that some token sees.
struct Sight {
  int position, tokens, window;

  explicit Sight(const Attention& job)
      : position(job.position), tokens(job.tokens), window(job.window) {}

  // The first key that the token sees, counted from the sequence's first.
  int oldest(int token) const {
    const int key = position + token + 1 - window;
    return window > 0 && key > 0 ? key : 0;
  }
  int first_panel() const { return oldest(0) / kPanel; }
  int last_panel() const { return (position + tokens - 1) / kPanel; }
  // Tokens [first, last) see a key of the panel that begins with key `start`.
  int first_token(int start) const { return start > position ? start - position : 0; }
  int last_token(int start) const {
    const int last = start + kPanel - 1 + window - position;
    return window > 0 && last < tokens ? last : tokens;
  }
};

// Panel by panel, in each all heads: so memory is read in the order in which it lies. The next
// panel's keys are transposed between scoring this one and using the scores, which wait for each
// other and leave room.
static void attend(const Attention& job, float* base) {
  const KvView& kv = *job.kv;
  const int dim = kv.head_dim, width = padded(dim), per_head = job.groups * job.tokens;
  const int units = dim * static_cast<int>(item_size(kv.type)) / 4;
  const Scratch s(base, job.heads * per_head, per_head, dim);
  begin_rows(job, s, per_head, width);
  const Sight sight(job);
  const int first_panel = sight.first_panel();
  const int steps = (sight.last_panel() + 1 - first_panel) * job.heads;
  Places places[4];
  const uint8_t* rows[kPanel];
  const auto place = [&](int step) -> const Places& {
    Places& found = places[step / job.heads % 4];
    locate(job, first_panel + step / job.heads, found);
    return found;
  };
  const auto turn_keys = [&](int step) {
    point(place(step), kv.keys + static_cast<size_t>(step % job.heads) * kv.head_stride, rows);
    if (kv.fp8) widen_rows(kv, kv.key_scale, rows, s.values);
    transpose_keys(rows, units, reinterpret_cast<uint32_t*>(s.keys[step & 1]));
  };
  turn_keys(0);
  for (int step = 0; step < steps; ++step) {
    const int head = step % job.heads, start = (first_panel + step / job.heads) * kPanel;
    // Rows are in token order; the others look at nothing in this panel.
    const int token = sight.first_token(start);
    const int first = head * per_head + token * job.groups;
    const int count = (sight.last_token(start) - token) * job.groups;
    score(job, s.queries, s.keys[step & 1], first, count, s.weights);
    if (job.tokens == 1 && step + 2 < steps) prefetch(place(step + 2), kv, (step + 2) % job.heads);
    if (step + 1 < steps) turn_keys(step + 1);
    for (int r = 0; r < count; ++r) {
      const int row = first + r, own = token + r / job.groups;
      weigh_row(s.weights + r * kPanel, sight.oldest(own) - start, job.position + own - start + 1,
                job.softcap, s.largest + row, s.total + row, s.output + row * width, width);
    }
    point(place(step), kv.values + static_cast<size_t>(head) * kv.head_stride, rows);
    float* output = s.output + first * width;
    if (kv.fp8) {
      widen_rows(kv, kv.value_scale, rows, s.values);
    } else if (width != dim) {
      for (int t = 0; t < kPanel; ++t) {
        float* copy = s.values + t * width;
        widen(kv.type, rows[t], dim, copy);
        rows[t] = reinterpret_cast<const uint8_t*>(copy);
      }
    }
    if (kv.type == Type::kFloat32 || (!kv.fp8 && width != dim)) {
      gather_values<float>(count, s.weights, rows, output, width);
    } else {
      gather_values<uint16_t>(count, s.weights, rows, output, width);
    }
  }
  end_rows(job, s, per_head, width);
}

#define PDSERVE_TEXT_(x) #x
#define PDSERVE_TEXT(x) PDSERVE_TEXT_(x)

}  // namespace

extern const Kernels PDSERVE_SET;
const Kernels PDSERVE_SET = {
    PDSERVE_TEXT(PDSERVE_SET), kPanel,     kMaxRows, pack,    unpack_row, linear,
    norm,                      layer_norm, rotate,   convert, widen,      attend,
    argmax,
};

}  // namespace pdserve::cpu
