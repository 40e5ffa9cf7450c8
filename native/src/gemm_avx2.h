// Quantized GEMM on 256-bit registers: a tile is two halves of 8 outputs, done one after the other so that the 8 lines of
// a half stay in registers for a block of rows. Without VNNI, products of unsigned codes of b bits and signed activations
// are summed in 16-bit lanes as long as they cannot overflow: 8 lines for 4 bits (8*2*15*127 = 30,480), 4 for 5 bits,
// 2 for 6 bits; signed 8-bit codes take |w| * (sign(w) x), one line at a time (2*128*127 = 32,512).
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

// Integer dot products of lines [from, to) with a row's activations.
template <Codes C>
inline __m256i dot(const __m256i* w, const int8_t* x, int from, int to) {
#ifdef HR_VNNI256
  if constexpr (C != Codes::s8) {
    __m256i acc = _mm256_setzero_si256();
    for (int j = from; j < to; j++) acc = HR_VNNI256(acc, w[j], broadcast4(x + 4 * j));
    return acc;
  } else {
    __m256i acc = _mm256_setzero_si256();
    for (int j = from; j < to; j++) acc = HR_VNNI256(acc, _mm256_abs_epi8(w[j]), _mm256_sign_epi8(broadcast4(x + 4 * j), w[j]));
    return acc;
  }
#else
  const __m256i ones = _mm256_set1_epi16(1);
  constexpr int safe = C == Codes::u4 ? 8 : C == Codes::u5 ? 4 : C == Codes::u6 ? 2 : 1;
  __m256i acc = _mm256_setzero_si256();
  for (int j = from; j < to; j += safe) {
    __m256i s;
    if constexpr (C == Codes::s8)
      s = _mm256_maddubs_epi16(_mm256_abs_epi8(w[j]), _mm256_sign_epi8(broadcast4(x + 4 * j), w[j]));
    else
      s = _mm256_maddubs_epi16(w[j], broadcast4(x + 4 * j));
    for (int i = 1; i < safe && j + i < to; i++) s = _mm256_add_epi16(s, _mm256_maddubs_epi16(w[j + i], broadcast4(x + 4 * (j + i))));
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(s, ones));
  }
  return acc;
#endif
}

inline __m256 half_f16(const uint8_t* p, int half) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 16 * half))); }
inline __m256 half_u8(const uint8_t* p, int half) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8 * half)))); }
inline __m256 half_s8(const uint8_t* p, int half) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8 * half)))); }

template <Codes C, Scales S, int R>
static void rows_of(const Matrix& m, const uint8_t* tile, int half, const QRows& x, int64_t row0, float* out, int64_t ldo) {
  const auto shifted = [](int32_t sum) { return _mm256_slli_epi32(_mm256_set1_epi32(sum), std::max(zero_shift(C, S), 0)); };
  __m256 acc[R];
  for (auto& a : acc) a = _mm256_setzero_ps();
  const int64_t groups = m.groups;
  const QGroup* first = x.row(row0);
  for (int64_t g = 0; g < groups; g++) {
    const uint8_t* s = m.group(tile, g);
    const uint8_t* q = s + group_scale_bytes(S);
    __m256i w[8];
    load_half<C>(q, half, w);
    __m256 d, d1 = _mm256_setzero_ps(), mn = _mm256_setzero_ps();
    if constexpr (S == Scales::plain) d = half_f16(s, half);
    if constexpr (S == Scales::min) {
      d = half_f16(s, half);
      mn = half_f16(s + 32, half);
    }
    if constexpr (S == Scales::kmin) {
      const uint8_t* top = m.super(tile, g);
      d = _mm256_mul_ps(half_f16(top, half), half_u8(s, half));
      mn = _mm256_sub_ps(_mm256_setzero_ps(), _mm256_mul_ps(half_f16(top + 32, half), half_u8(s + 16, half)));
    }
    if constexpr (S == Scales::k16) {
      const __m256 top = half_f16(m.super(tile, g), half);
      d = _mm256_mul_ps(top, half_s8(s, half));
      d1 = _mm256_mul_ps(top, half_s8(s + 16, half));
    }
    for (int r = 0; r < R; r++) {
      const QGroup& xg = first[r * groups + g];
      const int8_t* xr = xg.codes;
      const __m256 xs = _mm256_set1_ps(xg.scale);
      if constexpr (S == Scales::k16) {
        const __m256i a = _mm256_sub_epi32(dot<C>(w, xr, 0, 4), shifted(xg.half_sum));
        const __m256i b = _mm256_sub_epi32(dot<C>(w, xr, 4, 8), shifted(xg.sum - xg.half_sum));
        acc[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(a), _mm256_mul_ps(d, xs), acc[r]);
        acc[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(b), _mm256_mul_ps(d1, xs), acc[r]);
      } else {
        __m256i a = dot<C>(w, xr, 0, 8);
        if constexpr (zero_shift(C, S) >= 0) a = _mm256_sub_epi32(a, shifted(xg.sum));
        acc[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(a), _mm256_mul_ps(d, xs), acc[r]);
        if constexpr (S == Scales::min || S == Scales::kmin) acc[r] = _mm256_fmadd_ps(mn, _mm256_set1_ps(xg.weighted), acc[r]);
      }
    }
  }
  for (int r = 0; r < R; r++) _mm256_storeu_ps(out + r * ldo + 8 * half, acc[r]);
}

template <Codes C, Scales S>
static void tile_of(const Matrix& m, int64_t t, const QRows& x, int64_t row0, int64_t rows, float* out, int64_t ldo) {
  const uint8_t* tile = m.tile(t);
  for (int64_t r = 0; r < rows;) {
    const int64_t left = rows - r;
    const int step = left >= 4 ? 4 : (int)left;
    for (int half = 0; half < 2; half++) switch (step) {
        case 4: rows_of<C, S, 4>(m, tile, half, x, row0 + r, out + r * ldo, ldo); break;
        case 3: rows_of<C, S, 3>(m, tile, half, x, row0 + r, out + r * ldo, ldo); break;
        case 2: rows_of<C, S, 2>(m, tile, half, x, row0 + r, out + r * ldo, ldo); break;
        default: rows_of<C, S, 1>(m, tile, half, x, row0 + r, out + r * ldo, ldo); break;
      }
    r += step;
  }
}
#include "dispatch_q.h"
