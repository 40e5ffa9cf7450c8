// 16 lanes as two 256-bit registers.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace headrace::HR_ISA {

struct F {
  __m256 a, b;
};
// (Row, head) pairs of a prompt that attention takes together, and how many sums of theirs stay in registers beside their operands:
// of numbers, and of pairs of bf16, which are widened first.
constexpr int kManyPairs = 24, kSums = 6, kPairSums = 4;
inline F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline F load_f16(const void* p) {
  const __m128i* h = (const __m128i*)p;
  return {_mm256_cvtph_ps(_mm_loadu_si128(h)), _mm256_cvtph_ps(_mm_loadu_si128(h + 1))};
}
inline void store_f16(void* p, F x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)p + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
inline __m256 bf16_half(const __m128i* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
}
inline F load_bf16(const void* p) { return {bf16_half((const __m128i*)p), bf16_half((const __m128i*)p + 1)}; }
inline F load_s8(const void* p) {
  const __m128i v = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(v, 8)))};
}
inline F load_u4(const void* p) {  // 16 numbers in 8 bytes, the first eight low
  const __m128i b = _mm_loadl_epi64((const __m128i*)p), low = _mm_set1_epi8(15);
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_and_si128(b, low))), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_and_si128(_mm_srli_epi16(b, 4), low)))};
}
inline F load_e4m3(const void* p) {
  const __m256i w = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0x80)), 8);
  const __m256i half = _mm256_or_si256(sign, _mm256_slli_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0x7f)), 7));
  const __m256 up = _mm256_set1_ps(256.0f);
  return {_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), up), _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)), up)};
}
inline F load_u8(const void* p) {
  const __m128i v = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(v)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(v, 8)))};
}
inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }  // y where either is NaN
inline F abs(F x) {
  const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}
inline F round(F x) {
  return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline __m256 pow2(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline F scale2(F x, F n) { return {_mm256_mul_ps(x.a, pow2(n.a)), _mm256_mul_ps(x.b, pow2(n.b))}; }
inline F zero_below(F x, float limit, F value) {
  const __m256 l = _mm256_set1_ps(limit);
  return {_mm256_and_ps(_mm256_cmp_ps(x.a, l, _CMP_NLT_UQ), value.a), _mm256_and_ps(_mm256_cmp_ps(x.b, l, _CMP_NLT_UQ), value.b)};
}
inline F keep_lanes(F x, int lo, int hi, float other) {
  const __m256i i0 = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), i1 = _mm256_add_epi32(i0, _mm256_set1_epi32(8));
  const __m256i l = _mm256_set1_epi32(lo - 1), h = _mm256_set1_epi32(hi);
  const __m256 o = _mm256_set1_ps(other);
  const __m256i m0 = _mm256_and_si256(_mm256_cmpgt_epi32(i0, l), _mm256_cmpgt_epi32(h, i0));
  const __m256i m1 = _mm256_and_si256(_mm256_cmpgt_epi32(i1, l), _mm256_cmpgt_epi32(h, i1));
  return {_mm256_blendv_ps(o, x.a, _mm256_castsi256_ps(m0)), _mm256_blendv_ps(o, x.b, _mm256_castsi256_ps(m1))};
}
inline void store_s8(int8_t* p, F x) {
  const __m256i p16 = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));  // a0-3 b0-3 | a4-7 b4-7
  const __m256i ordered = _mm256_permute4x64_epi64(p16, 0xD8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
}

// Sixteen pairs of bf16, the lower half first.
struct P {
  __m256i a, b;
};
inline P load_pairs(const void* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)}; }
inline P set_pairs(const void* p) {
  int32_t pair;
  std::memcpy(&pair, p, 4);
  return {_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)};
}
inline P mask_pairs(P x, uint32_t mask) {
  const __m256i m = _mm256_set1_epi32((int32_t)mask);
  return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
inline __m256 second(__m256i x) { return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int32_t)0xffff0000))); }
inline __m256 first(__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
inline F dot2(P x, P y, F z) {
  z.a = _mm256_fmadd_ps(second(x.a), second(y.a), z.a);
  z.b = _mm256_fmadd_ps(second(x.b), second(y.b), z.b);
  return {_mm256_fmadd_ps(first(x.a), first(y.a), z.a), _mm256_fmadd_ps(first(x.b), first(y.b), z.b)};
}
inline __m256i bf16_bits(__m256 v) {  // in 32 bits each
  const __m256i x = _mm256_castps_si256(v), top = _mm256_srli_epi32(x, 16);
  __m256i r = _mm256_add_epi32(_mm256_add_epi32(x, _mm256_set1_epi32(0x7fff)), _mm256_and_si256(top, _mm256_set1_epi32(1)));
  r = _mm256_srli_epi32(r, 16);
  const __m256i none = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  r = _mm256_blendv_epi8(r, _mm256_or_si256(top, _mm256_set1_epi32(0x40)), none);
  const __m256i tiny = _mm256_cmpeq_epi32(_mm256_and_si256(x, _mm256_set1_epi32(0x7f800000)), _mm256_setzero_si256());
  return _mm256_blendv_epi8(r, _mm256_and_si256(top, _mm256_set1_epi32(0x8000)), tiny);
}
inline void store_bf16(void* p, F x) {
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(_mm256_packus_epi32(bf16_bits(x.a), bf16_bits(x.b)), 0xD8));
}
// x * 2^n where the lowest bits of `n`, taken as an integer, are n.
inline __m256 add_exponent(__m256 x, __m256 n) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_castps_si256(n), 23)));
}
inline F add_exponent(F x, F n) { return {add_exponent(x.a, n.a), add_exponent(x.b, n.b)}; }

inline float sum_lanes(F a) {
  const __m256 h = _mm256_add_ps(a.a, a.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
inline float max_lanes(F a) {
  const __m256 h = _mm256_max_ps(a.a, a.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}
inline bool has_nan(F x) {
  return (_mm256_movemask_ps(_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q)) | _mm256_movemask_ps(_mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q))) != 0;
}
inline int32_t sum_s8(const int8_t* p) {  // of 16
  const __m128i shifted = _mm_xor_si128(_mm_loadu_si128((const __m128i*)p), _mm_set1_epi8((char)0x80));
  const __m128i s = _mm_sad_epu8(shifted, _mm_setzero_si128());
  return _mm_cvtsi128_si32(s) + _mm_extract_epi16(s, 4) - 16 * 128;
}

inline int32_t paired(const int8_t*) { return 0; }  // see isa_avx512.h

}  // namespace headrace
