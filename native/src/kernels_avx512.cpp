#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define HR_ISA avx512
#include "isa_avx512.h"
#include "bringer.h"
#include "kernels_impl.h"

namespace headrace::avx512 {

// The 8 lines of a group as unsigned bytes; the offset that makes them so goes into `zero_of`.
template <Codes C>
inline void load_lines(const uint8_t* q, __m512i* w) {
  if constexpr (C == Codes::s8) {
    const __m512i flip = _mm512_set1_epi8((char)0x80);
    for (int j = 0; j < 8; j++) w[j] = _mm512_xor_si512(_mm512_loadu_si512(q + 64 * j), flip);
    return;
  }
  const __m512i nibble = _mm512_set1_epi8(15);
  for (int j = 0; j < 4; j++) {
    const __m512i v = _mm512_loadu_si512(q + 64 * j);
    w[j] = _mm512_and_si512(v, nibble);
    w[j + 4] = _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble);
  }
  if constexpr (C == Codes::u5) {
    const __m512i high = _mm512_loadu_si512(q + 256), bit = _mm512_set1_epi8(16);
    for (int j = 0; j < 8; j++) {
      const __mmask64 set = _mm512_test_epi8_mask(high, _mm512_set1_epi8((char)(1 << j)));
      w[j] = _mm512_mask_or_epi64(w[j], 0xff, w[j], _mm512_maskz_mov_epi8(set, bit));
    }
  }
  if constexpr (C == Codes::u6) {
    const __m512i pair = _mm512_set1_epi8(3);
    for (int p = 0; p < 2; p++) {
      const __m512i high = _mm512_loadu_si512(q + 256 + 64 * p);
      for (int i = 0; i < 4; i++) {
        const __m512i two = _mm512_and_si512(_mm512_srli_epi16(high, 2 * i), pair);
        w[4 * p + i] = _mm512_or_si512(w[4 * p + i], _mm512_slli_epi16(two, 4));
      }
    }
  }
}

// 4-bit products in pairs (S. Winograd, 1968). With x and w of the first 16 inputs and x' and w' of the second, weights less 8,
//   x w + x' w' = (x + w') (x' + w + 128) - x (x' + 128) - w' (w + 128),
// so half as many products do, for two additions of bytes each, which other pipes than the multiplying ones take; what is subtracted
// belongs to a row (`paired`) or to a tile alone. All of it is exact: codes of activations end at kMostCode, so both factors are bytes.
// Three lines of each half are taken so, which leaves all pipes the same work. Fewer rows than these do not make up for what a tile then needs.
constexpr int kPairedRows = 8, kPairedLines = 3;

// Lines of w + 128 and of w', those left over as they are, and what is subtracted of the tile.
inline void load_pairs_of_lines(const uint8_t* q, __m512i* w, __m512i& own) {
  load_lines<Codes::u4>(q, w);
  own = _mm512_setzero_si512();
  for (int j = 0; j < kPairedLines; j++) {
    w[j] = _mm512_add_epi8(w[j], _mm512_set1_epi8(120));
    w[j + 4] = _mm512_sub_epi8(w[j + 4], _mm512_set1_epi8(8));
    own = _mm512_dpbusd_epi32(own, w[j], w[j + 4]);
  }
}

// Bytes of look-ahead of one tile. Weights come from memory once a step, and the hardware's own look-ahead stops at every page; with
// several rows there is arithmetic to hide it behind. A single row is bound by memory anyway and only loses issue slots.
// Two tiles at once are two streams, which memory serves worse than one. So they ask for the next two from the first byte to the last,
// as one stream to the second-level cache: looking ahead in each took a step of 4 rows 1.3 times as long.
constexpr int kAhead = 3072;

// R rows by T neighbouring tiles. Two tiles share each load of a row's activations: a core loads once or twice a cycle at this width, and
// with one tile that is what few rows wait for.
template <Codes C, Scales S, int R, int T>
static void rows_of(const Matrix& m, const uint8_t* tile, const QRows& x, int64_t row0, Bringer& ahead, float* out, int64_t ldo) {
  // Added to the codes by the format or by load_lines.
  constexpr int shift = C == Codes::s8 ? 7 : std::max(zero_shift(C, S), 0);
  constexpr bool in_pairs = C == Codes::u4 && R >= kPairedRows;
  constexpr bool zeroed = C == Codes::s8 || zero_shift(C, S) >= 0;
  const auto shifted = [](int32_t sum) { return _mm512_slli_epi32(_mm512_set1_epi32(sum), shift); };
  __m512 acc[R][T];
  for (auto& a : acc)
    for (auto& b : a) b = _mm512_setzero_ps();
  const int64_t groups = m.groups;
  const QGroup* first = x.row(row0);
  for (int64_t g = 0; g < groups; g++) {
    if constexpr (R > 1) ahead.step();
    __m512i w[T][8];
    __m512 d[T], d1[T], mn[T];
    __m512i own_products[T];
    for (int t = 0; t < T; t++) {
      const uint8_t *own = tile + t * m.tile_bytes, *s = m.group(own, g);
      if constexpr (R > 1) {
        constexpr int size = code_bytes(C) + group_scale_bytes(S);
        const uint8_t* next = T == 1 ? s + kAhead : tile + 2 * m.tile_bytes + (2 * g + t) * size;
        for (int i = 0; i < size; i += 64) _mm_prefetch((const char*)next + i, T == 1 ? _MM_HINT_T0 : _MM_HINT_T1);
      }
      if constexpr (in_pairs)
        load_pairs_of_lines(s + group_scale_bytes(S), w[t], own_products[t]);
      else
        load_lines<C>(s + group_scale_bytes(S), w[t]);
      d1[t] = mn[t] = _mm512_setzero_ps();
      if constexpr (S == Scales::plain) d[t] = load_f16(s).v;
      if constexpr (S == Scales::min) {
        d[t] = load_f16(s).v;
        mn[t] = load_f16(s + 32).v;
      }
      if constexpr (S == Scales::kmin) {
        const uint8_t* top = m.super(own, g);
        d[t] = mul(load_f16(top), load_u8(s)).v;
        mn[t] = sub(zero(), mul(load_f16(top + 32), load_u8(s + 16))).v;
      }
      if constexpr (S == Scales::k16) {
        const F top = load_f16(m.super(own, g));
        d[t] = mul(top, load_s8(s)).v;
        d1[t] = mul(top, load_s8(s + 16)).v;
      }
    }
    const auto row = [&](int r) {
      const QGroup& xg = first[r * groups + g];
      const __m512 xs = _mm512_set1_ps(xg.scale);
      // With one tile, each four activations are broadcast by the instruction that uses them.
      const auto line = [&](int j) {
        int32_t x4;
        std::memcpy(&x4, xg.codes + 4 * j, 4);
        return _mm512_set1_epi32(x4);
      };
      __m512i a[T], b[T];
      if constexpr (in_pairs) {
        for (int t = 0; t < T; t++) a[t] = _mm512_sub_epi32(_mm512_set1_epi32(xg.paired), own_products[t]);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
          const __m512i first = line(j), second = line(j + 4);
          for (int t = 0; t < T; t++) {
            if (j < kPairedLines)
              a[t] = _mm512_dpbusd_epi32(a[t], _mm512_add_epi8(second, w[t][j]), _mm512_add_epi8(first, w[t][j + 4]));
            else
              a[t] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(a[t], w[t][j], first), w[t][j + 4], second);
          }
        }
      } else {
        for (int t = 0; t < T; t++) a[t] = b[t] = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
          const __m512i x4 = line(j);
          for (int t = 0; t < T; t++) {
            __m512i& sum = S == Scales::k16 && j >= 4 ? b[t] : a[t];
            sum = _mm512_dpbusd_epi32(sum, w[t][j], x4);
          }
        }
      }
      for (int t = 0; t < T; t++) {
        if constexpr (S == Scales::k16) {
          a[t] = _mm512_sub_epi32(a[t], shifted(xg.half_sum));
          b[t] = _mm512_sub_epi32(b[t], shifted(xg.sum - xg.half_sum));
          acc[r][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(a[t]), _mm512_mul_ps(d[t], xs), acc[r][t]);
          acc[r][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(b[t]), _mm512_mul_ps(d1[t], xs), acc[r][t]);
        } else {
          if constexpr (zeroed) a[t] = _mm512_sub_epi32(a[t], shifted(xg.sum));
          acc[r][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(a[t]), _mm512_mul_ps(d[t], xs), acc[r][t]);
          if constexpr (S == Scales::min || S == Scales::kmin) acc[r][t] = _mm512_fmadd_ps(mn[t], _mm512_set1_ps(xg.weighted), acc[r][t]);
        }
      }
    };
    if constexpr (R * T < 8) {
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) row(r);
    } else {  // not unrolled, with the sums in memory: otherwise there is a pointer per row, and they are spilled
#pragma GCC unroll 1
      for (int r = 0; r < R; r++) row(r);
    }
  }
  for (int r = 0; r < R; r++)
    for (int t = 0; t < T; t++) _mm512_storeu_ps(out + r * ldo + t * kTile, acc[r][t]);
}

template <Codes C, Scales S, int T>
static void all_rows(const Matrix& m, const uint8_t* tile, const QRows& x, int64_t row0, int64_t rows, Bringer& ahead, float* out, int64_t ldo) {
  int64_t r = 0;
  if constexpr (C == Codes::u4)  // a tile takes more to prepare
    for (; r + 32 <= rows; r += 32) rows_of<C, S, 32, T>(m, tile, x, row0 + r, ahead, out + r * ldo, ldo);
  for (; r + 16 <= rows; r += 16) rows_of<C, S, 16, T>(m, tile, x, row0 + r, ahead, out + r * ldo, ldo);
  if (r + 8 <= rows) {
    rows_of<C, S, 8, T>(m, tile, x, row0 + r, ahead, out + r * ldo, ldo);
    r += 8;
  }
  if (r + 4 <= rows) {
    rows_of<C, S, 4, T>(m, tile, x, row0 + r, ahead, out + r * ldo, ldo);
    r += 4;
  }
  switch (rows - r) {
    case 3: return rows_of<C, S, 3, T>(m, tile, x, row0 + r, ahead, out + r * ldo, ldo);
    case 2: return rows_of<C, S, 2, T>(m, tile, x, row0 + r, ahead, out + r * ldo, ldo);
    case 1: return rows_of<C, S, 1, T>(m, tile, x, row0 + r, ahead, out + r * ldo, ldo);
    default: return;
  }
}

// A single row is bound by memory, which is read fastest along one stream.
template <Codes C, Scales S>
static void tiles_of(const Matrix& m, int64_t first, int64_t tiles, const QRows& x, int64_t row0, int64_t rows, float* out, int64_t ldo) {
  const int64_t passes = C == Codes::u4 ? (rows + 16) / 32 : rows / 16;  // over the tiles, by 16 rows and more
  Bringer ahead(x.ahead, std::max<int64_t>(passes, 1) * m.groups * (rows == 1 ? tiles : (tiles + 1) / 2));
  int64_t t = 0;
  if (rows > 1)
    for (; t + 2 <= tiles; t += 2) all_rows<C, S, 2>(m, m.tile(first + t), x, row0, rows, ahead, out + t * kTile, ldo);
  for (; t < tiles; t++) all_rows<C, S, 1>(m, m.tile(first + t), x, row0, rows, ahead, out + t * kTile, ldo);
}
#define HR_SEVERAL_TILES
#include "dispatch_q.h"

}  // namespace headrace::avx512

namespace headrace {
const Kernels* kernels_avx512() {
  using namespace avx512;
  static const Kernels table{"avx512-vnni", quantize, quantize_groups, gemm_q, gemm_f, rms_norm, gated, attention, merge_segments, extremes, exponentials, store_kv};
  return &table;
}
}  // namespace headrace
#else
#include "kernels.h"
namespace headrace {
const Kernels* kernels_avx512() { return nullptr; }
}  // namespace headrace
#endif
