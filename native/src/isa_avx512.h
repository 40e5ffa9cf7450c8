// 16 lanes as one 512-bit register.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace headrace::HR_ISA {

struct F {
  __m512 v;
};
constexpr int kManyPairs = 24, kSums = 24, kPairSums = 24;  // see isa_avx2.h
inline F set1(float a) { return {_mm512_set1_ps(a)}; }
inline F zero() { return {_mm512_setzero_ps()}; }
inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
inline F load_f16(const void* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
inline void store_f16(void* p, F a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
inline F load_bf16(const void* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
inline F load_s8(const void* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))}; }
inline F load_u4(const void* p) {  // 16 numbers in 8 bytes, the first eight low
  const __m128i b = _mm_loadl_epi64((const __m128i*)p), low = _mm_set1_epi8(15);
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_unpacklo_epi64(_mm_and_si128(b, low), _mm_and_si128(_mm_srli_epi16(b, 4), low))))};
}
inline F load_e4m3(const void* p) {
  const __m256i w = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0x80)), 8);
  const __m256i rest = _mm256_slli_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0x7f)), 7);
  return {_mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(sign, rest)), _mm512_set1_ps(256.0f))};
}
inline F load_u8(const void* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)))}; }
inline F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where either is NaN
inline F abs(F a) { return {_mm512_abs_ps(a.v)}; }
inline F round(F a) { return {_mm512_roundscale_ps(a.v, 0)}; }
inline F scale2(F a, F n) { return {_mm512_scalef_ps(a.v, n.v)}; }  // a * 2^n, n integral
inline F zero_below(F x, float limit, F value) {  // value, but 0 where x < limit
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_NLT_UQ), value.v)};
}
inline F keep_lanes(F a, int lo, int hi, float other) {  // lanes in [lo, hi), `other` elsewhere
  const unsigned up = hi >= 16 ? 0xffffu : hi <= 0 ? 0u : (1u << hi) - 1u;
  const unsigned down = lo <= 0 ? 0u : lo >= 16 ? 0xffffu : (1u << lo) - 1u;
  return {_mm512_mask_mov_ps(_mm512_set1_ps(other), (__mmask16)(up & ~down), a.v)};
}
inline void store_s8(int8_t* p, F a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v))); }

// Sixteen pairs of bf16, the lower half first.
struct P {
  __m512i v;
};
inline P load_pairs(const void* p) { return {_mm512_loadu_si512(p)}; }
inline P set_pairs(const void* p) {
  int32_t pair;
  std::memcpy(&pair, p, 4);
  return {_mm512_set1_epi32(pair)};
}
inline P mask_pairs(P a, uint32_t mask) { return {_mm512_and_si512(a.v, _mm512_set1_epi32((int32_t)mask))}; }
#ifdef __AVX512BF16__
inline F dot2(P a, P b, F c) { return {_mm512_dpbf16_ps(c.v, (__m512bh)a.v, (__m512bh)b.v)}; }
inline void store_bf16(void* p, F a) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a.v)); }
#else
inline F dot2(P a, P b, F c) {
  const __m512i high = _mm512_set1_epi32((int32_t)0xffff0000);
  c.v = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a.v, high)), _mm512_castsi512_ps(_mm512_and_si512(b.v, high)), c.v);
  return {_mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b.v, 16)), c.v)};
}
inline void store_bf16(void* p, F a) {
  const __m512i x = _mm512_castps_si512(a.v), top = _mm512_srli_epi32(x, 16);
  __m512i r = _mm512_add_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(0x7fff)), _mm512_and_si512(top, _mm512_set1_epi32(1)));
  r = _mm512_srli_epi32(r, 16);
  r = _mm512_mask_or_epi32(r, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), top, _mm512_set1_epi32(0x40));
  r = _mm512_mask_and_epi32(r, _mm512_testn_epi32_mask(x, _mm512_set1_epi32(0x7f800000)), top, _mm512_set1_epi32(0x8000));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(r));
}
#endif
// a * 2^n where the lowest bits of `n`, taken as an integer, are n.
inline F add_exponent(F a, F n) { return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), _mm512_slli_epi32(_mm512_castps_si512(n.v), 23)))}; }

// One fixed reduction tree for every instruction set: halves are added, then halves of what is left.
inline float sum_lanes(F a) {
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
inline float max_lanes(F a) {
  const __m256 h = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}
inline bool has_nan(F a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q) != 0; }
inline int32_t sum_s8(const int8_t* p) {  // of 16
  const __m128i shifted = _mm_xor_si128(_mm_loadu_si128((const __m128i*)p), _mm_set1_epi8((char)0x80));
  const __m128i s = _mm_sad_epu8(shifted, _mm_setzero_si128());
  return _mm_cvtsi128_si32(s) + _mm_extract_epi16(s, 4) - 16 * 128;
}

// What `kernels_avx512.cpp` adds of a row where it takes products in pairs: of codes x of a group, the sum of
// 8 (x[i] + x[16 + i]) - x[i] (x[16 + i] + 128) over i < 12.
inline int32_t paired(const int8_t* x) {
  const __m128i first = _mm_maskz_loadu_epi8(0x0fff, x), second = _mm_maskz_loadu_epi8(0x0fff, x + 16), eight = _mm_set1_epi8(8);
  const __m128i products = _mm_dpbusd_epi32(_mm_setzero_si128(), _mm_xor_si128(second, _mm_set1_epi8((char)0x80)), first);
  __m128i p = _mm_sub_epi32(_mm_dpbusd_epi32(_mm_dpbusd_epi32(_mm_setzero_si128(), eight, first), eight, second), products);
  p = _mm_add_epi32(p, _mm_unpackhi_epi64(p, p));
  return _mm_cvtsi128_si32(_mm_add_epi32(p, _mm_shuffle_epi32(p, 1)));
}

}  // namespace headrace::HR_ISA
