// Quantized GEMM on 256-bit registers: a tile is two halves of 8 outputs. Without VNNI, products of unsigned codes of b bits and
// signed activations are summed in 16-bit lanes as long as they cannot overflow: 8 lines for 4 bits (8*2*15*127 = 30,480), 4 for
// 5 bits, 2 for 6 bits; signed 8-bit codes take |w| * (sign(w) x), one line at a time (2*128*127 = 32,512).
template <Codes C>
inline void load_half(const uint8_t* q, int half, __m256i* w) {
  q += 32 * half;
  if constexpr (C == Codes::s8) {
    for (int j = 0; j < 8; j++) w[j] = _mm256_loadu_si256((const __m256i*)(q + 64 * j));
    return;
  }
  const __m256i nibble = _mm256_set1_epi8(15);
  for (int j = 0; j < 4; j++) {
    const __m256i v = _mm256_loadu_si256((const __m256i*)(q + 64 * j));
    w[j] = _mm256_and_si256(v, nibble);
    w[j + 4] = _mm256_and_si256(_mm256_srli_epi16(v, 4), nibble);
  }
  if constexpr (C == Codes::u5) {
    const __m256i high = _mm256_loadu_si256((const __m256i*)(q + 256)), sixteen = _mm256_set1_epi8(16);
    for (int j = 0; j < 8; j++) {
      const __m256i bit = _mm256_set1_epi8((char)(1 << j));
      const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(high, bit), bit);
      w[j] = _mm256_or_si256(w[j], _mm256_and_si256(set, sixteen));
    }
  }
  if constexpr (C == Codes::u6) {
    const __m256i pair = _mm256_set1_epi8(3);
    for (int p = 0; p < 2; p++) {
      const __m256i high = _mm256_loadu_si256((const __m256i*)(q + 256 + 64 * p));
      for (int i = 0; i < 4; i++) {
        const __m256i two = _mm256_and_si256(_mm256_srli_epi16(high, 2 * i), pair);
        w[4 * p + i] = _mm256_or_si256(w[4 * p + i], _mm256_slli_epi16(two, 4));
      }
    }
  }
}

inline __m256i broadcast4(const int8_t* x) {
  int32_t v;
  std::memcpy(&v, x, 4);
  return _mm256_set1_epi32(v);
}

// How many lines of products can be summed before the sums are widened, a line's products added to a sum, and widening.
#ifdef HR_VNNI256
template <Codes C>
constexpr int kLines = 8;
template <Codes C>
inline void add_line(__m256i& sum, __m256i w, __m256i x, bool first) {
  if (first) sum = _mm256_setzero_si256();
  sum = C == Codes::s8 ? HR_VNNI256(sum, _mm256_abs_epi8(w), _mm256_sign_epi8(x, w)) : HR_VNNI256(sum, w, x);
}
inline __m256i widen(__m256i sum) { return sum; }
#else
template <Codes C>
constexpr int kLines = C == Codes::u4 ? 8 : C == Codes::u5 ? 4 : C == Codes::u6 ? 2 : 1;
template <Codes C>
inline void add_line(__m256i& sum, __m256i w, __m256i x, bool first) {
  const __m256i p = C == Codes::s8 ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)) : _mm256_maddubs_epi16(w, x);
  sum = first ? p : _mm256_add_epi16(sum, p);
}
inline __m256i widen(__m256i sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
#endif

inline __m256 half_f16(const uint8_t* p, int half) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 16 * half))); }
inline __m256 half_u8(const uint8_t* p, int half) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8 * half)))); }
inline __m256 half_s8(const uint8_t* p, int half) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8 * half)))); }

// A half's scales: `d`, of k16 for the first 16 inputs; `other` is what k16 has for the second, and the minimum of min and kmin.
struct HalfScales {
  __m256 d, other;
};
template <Scales S>
inline HalfScales load_scales(const Matrix& m, const uint8_t* tile, int64_t g, int half) {
  const uint8_t* s = m.group(tile, g);
  if constexpr (S == Scales::plain) return {half_f16(s, half), _mm256_setzero_ps()};
  if constexpr (S == Scales::min) return {half_f16(s, half), half_f16(s + 32, half)};
  const uint8_t* top = m.super(tile, g);
  const __m256 d = half_f16(top, half);
  if constexpr (S == Scales::kmin) {
    const __m256 minimum = _mm256_mul_ps(half_f16(top + 32, half), half_u8(s + 16, half));
    return {_mm256_mul_ps(d, half_u8(s, half)), _mm256_sub_ps(_mm256_setzero_ps(), minimum)};
  }
  return {_mm256_mul_ps(d, half_s8(s, half)), _mm256_mul_ps(d, half_s8(s + 16, half))};
}

// A group of a tile as products of many rows want it: codes a byte each (8-bit ones signed), scales as floats.
struct alignas(64) Unpacked {
  __m256i lines[2][8];
  HalfScales scales[2];
};
template <Codes C, Scales S>
static void unpack(const Matrix& m, const uint8_t* tile, int64_t g, Unpacked& u) {
  const uint8_t* q = m.group(tile, g) + group_scale_bytes(S);
  for (int half = 0; half < 2; half++) {
    load_half<C>(q, half, u.lines[half]);
    u.scales[half] = load_scales<S>(m, tile, g, half);
  }
}

// One group into the sums of R rows by H halves. A row's activations are broadcast once for all halves.
template <Codes C, Scales S, int R, int H, class Line, class HalfScalesOf>
inline void add_group(Line line, HalfScalesOf scales_of, const QGroup* x, int64_t stride, __m256 (&acc)[R][H]) {
  constexpr int kAtOnce = S == Scales::k16 ? std::min(kLines<C>, 4) : kLines<C>;
  const auto number = [](__m256i sum, int32_t codes) {  // without what the zero point adds
    if constexpr (zero_shift(C, S) < 0) return _mm256_cvtepi32_ps(sum);
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(sum, _mm256_slli_epi32(_mm256_set1_epi32(codes), std::max(zero_shift(C, S), 0))));
  };
  __m256i total[R][H], before[R][H];  // `before`: of k16, the first 16 inputs
#pragma GCC unroll 8
  for (int from = 0; from < 8; from += kAtOnce) {
    __m256i sum[R][H];
#pragma GCC unroll 8
    for (int i = from; i < from + kAtOnce; i++) {
      const int j = kAtOnce == 8 ? i / 2 + i % 2 * 4 : i;  // two lines that are stored in the same bytes one after the other
      __m256i w[H];
      for (int h = 0; h < H; h++) w[h] = line(h, j);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const __m256i x4 = broadcast4(x[r * stride].codes + 4 * j);
        for (int h = 0; h < H; h++) add_line<C>(sum[r][h], w[h], x4, i == from);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
      for (int h = 0; h < H; h++) {
        const bool second = S == Scales::k16 && from == 4;
        if (second) before[r][h] = total[r][h];
        total[r][h] = from == 0 || second ? widen(sum[r][h]) : _mm256_add_epi32(total[r][h], widen(sum[r][h]));
      }
  }
  HalfScales scales[H];  // not before: registers are short
  for (int h = 0; h < H; h++) scales[h] = scales_of(h);
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    const QGroup& xg = x[r * stride];
    const __m256 xs = _mm256_set1_ps(xg.scale);
    for (int h = 0; h < H; h++) {
      __m256& a = acc[r][h];
      const auto [d, other] = scales[h];
      if constexpr (S == Scales::k16) {
        a = _mm256_fmadd_ps(number(before[r][h], xg.half_sum), _mm256_mul_ps(d, xs), a);
        a = _mm256_fmadd_ps(number(total[r][h], xg.sum - xg.half_sum), _mm256_mul_ps(other, xs), a);
      } else {
        a = _mm256_fmadd_ps(number(total[r][h], xg.sum), _mm256_mul_ps(d, xs), a);
        if constexpr (S == Scales::min || S == Scales::kmin) a = _mm256_fmadd_ps(other, _mm256_set1_ps(xg.weighted), a);
      }
    }
  }
}

// Has a group brought near that is multiplied soon: to the second-level cache, while others wait for the multipliers.
template <Codes C, Scales S>
inline void ask(const uint8_t* next) {
  for (int b = 0; b < code_bytes(C) + group_scale_bytes(S); b += 64) _mm_prefetch((const char*)next + b, _MM_HINT_T1);
}

constexpr int64_t kUnpackedFrom = 12;  // rows: for fewer it does not pay
// `look`: the first rows over a tile, for which it comes from memory, ask for the next one as they go. Without that a step of 8 rows
// took 1.3 times as long. A single row is bound by memory, which is read fastest along one stream.
template <Codes C, Scales S, int R, int H>
static void few_rows(const Matrix& m, const uint8_t* tile, int half, const QGroup* x, bool look, Bringer& ahead, float* out, int64_t ldo) {
  __m256 acc[R][H];
  for (auto& a : acc)
    for (auto& b : a) b = _mm256_setzero_ps();
  for (int64_t g = 0; g < m.groups; g++) {
    const uint8_t* q = m.group(tile, g) + group_scale_bytes(S);
    if constexpr (R > 1) {
      if (look) ask<C, S>(m.group(tile, g) + m.tile_bytes);
      ahead.step();
    }
    __m256i w[H][8];
    if constexpr (C != Codes::u4)
      for (int h = 0; h < H; h++) load_half<C>(q, half + h, w[h]);
    const auto line = [&](int h, int j) {  // 4-bit codes are unpacked when they are wanted
      if constexpr (C != Codes::u4) return w[h][j];
      const __m256i v = _mm256_loadu_si256((const __m256i*)(q + 64 * (j % 4) + 32 * (half + h)));
      return _mm256_and_si256(j < 4 ? v : _mm256_srli_epi16(v, 4), _mm256_set1_epi8(15));
    };
    add_group<C, S, R, H>(line, [&](int h) { return load_scales<S>(m, tile, g, half + h); }, x + g, m.groups, acc);
  }
  for (int r = 0; r < R; r++)
    for (int h = 0; h < H; h++) _mm256_storeu_ps(out + r * ldo + 8 * (half + h), acc[r][h]);
}

// Four rows over some groups; they go on from what is in `out` unless these are the first.
template <Codes C, Scales S>
static void four_rows(const Unpacked* u, int64_t groups, const QGroup* x, int64_t stride, bool first, float* out, int64_t ldo) {
  __m256 acc[4][2];
  for (int r = 0; r < 4; r++)
    for (int h = 0; h < 2; h++) acc[r][h] = first ? _mm256_setzero_ps() : _mm256_loadu_ps(out + r * ldo + 8 * h);
  for (int64_t g = 0; g < groups; g++, u++)
    add_group<C, S, 4, 2>([&](int h, int j) { return u->lines[h][j]; }, [&](int h) { return u->scales[h]; }, x + g, stride, acc);
  for (int r = 0; r < 4; r++)
    for (int h = 0; h < 2; h++) _mm256_storeu_ps(out + r * ldo + 8 * h, acc[r][h]);
}

template <Codes C, Scales S>
static void tile_of(const Matrix& m, const uint8_t* tile, const QRows& x, int64_t row0, int64_t rows, Bringer& ahead, float* out, int64_t ldo) {
  constexpr int64_t kAtOnce = 16;  // groups: unpacked they stay in the first cache beside the rows' codes
  int64_t r = 0;
  if (rows >= kUnpackedFrom) {
    Unpacked u[kAtOnce];
    for (int64_t g = 0; g < m.groups; g += kAtOnce) {
      const int64_t n = std::min(kAtOnce, m.groups - g);
      for (int64_t i = 0; i < n; i++) {
        // What is unpacked next, in this tile or the one after it, comes from memory while these are multiplied.
        ask<C, S>(m.group(tile, g + i) + kAtOnce * m.group_stride);
        ahead.step();
        unpack<C, S>(m, tile, g + i, u[i]);
      }
      for (r = 0; r + 4 <= rows; r += 4) four_rows<C, S>(u, n, x.row(row0 + r) + g, m.groups, g == 0, out + r * ldo, ldo);
    }
  }
  for (; r + 4 <= rows; r += 4) few_rows<C, S, 4, 2>(m, tile, 0, x.row(row0 + r), r == 0, ahead, out + r * ldo, ldo);
  switch (rows - r) {
    case 3: return few_rows<C, S, 3, 2>(m, tile, 0, x.row(row0 + r), r == 0, ahead, out + r * ldo, ldo);
    case 2: return few_rows<C, S, 2, 2>(m, tile, 0, x.row(row0 + r), r == 0, ahead, out + r * ldo, ldo);
    case 1:
      for (int half = 0; half < 2; half++) few_rows<C, S, 1, 1>(m, tile, half, x.row(row0 + r), false, ahead, out + r * ldo, ldo);
      return;
    default: return;
  }
}

template <Codes C, Scales S>
static void tiles_of(const Matrix& m, int64_t first, int64_t tiles, const QRows& x, int64_t row0, int64_t rows, float* out, int64_t ldo) {
  Bringer ahead(x.ahead, tiles * m.groups * (rows >= kUnpackedFrom ? 1 : std::max<int64_t>(rows / 4, 1)));
  for (int64_t t = 0; t < tiles; t++) tile_of<C, S>(m, m.tile(first + t), x, row0, rows, ahead, out + t * kTile, ldo);
}
#define HR_SEVERAL_TILES
#include "dispatch_q.h"
