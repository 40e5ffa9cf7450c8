// 16 lanes as four 128-bit registers.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace headrace::HR_ISA {

struct F {
  float32x4_t v[4];
};
#define HR_QUARTERS for (int i = 0; i < 4; i++)
constexpr int kManyPairs = 8, kSums = 6, kPairSums = 4;  // see isa_avx2.h
inline F set1(float x) { return {{vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}}; }
inline F zero() { return set1(0.0f); }
inline F load(const float* p) { return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}}; }
inline void store(float* p, F x) { HR_QUARTERS vst1q_f32(p + 4 * i, x.v[i]); }
inline F load_f16(const void* p) {
  F r;
  HR_QUARTERS r.v[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)p + 4 * i)));
  return r;
}
inline void store_f16(void* p, F x) { HR_QUARTERS vst1_u16((uint16_t*)p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.v[i]))); }
inline F load_bf16(const void* p) {
  F r;
  HR_QUARTERS r.v[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t*)p + 4 * i), 16));
  return r;
}
inline F load_s8(const void* p) {
  const int8x16_t b = vld1q_s8((const int8_t*)p);
  const int16x8_t low = vmovl_s8(vget_low_s8(b)), high = vmovl_high_s8(b);
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)), vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
           vcvtq_f32_s32(vmovl_high_s16(high))}};
}
inline F load_u4(const void* p) {  // 16 numbers in 8 bytes, the first eight low
  const uint8x8_t b = vld1_u8((const uint8_t*)p);
  const uint16x8_t low = vmovl_u8(vand_u8(b, vdup_n_u8(15))), high = vmovl_u8(vshr_n_u8(b, 4));
  return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_high_u16(low)), vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))),
           vcvtq_f32_u32(vmovl_high_u16(high))}};
}
inline F load_e4m3(const void* p) {
  const uint8x16_t b = vld1q_u8((const uint8_t*)p);
  const uint16x8_t wide[2] = {vmovl_u8(vget_low_u8(b)), vmovl_high_u8(b)};
  F r;
  for (int i = 0; i < 2; i++) {
    const uint16x8_t sign = vshlq_n_u16(vandq_u16(wide[i], vdupq_n_u16(0x80)), 8);
    const uint16x8_t half = vorrq_u16(sign, vshlq_n_u16(vandq_u16(wide[i], vdupq_n_u16(0x7f)), 7));
    r.v[2 * i] = vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(half))), 256.0f);
    r.v[2 * i + 1] = vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(half))), 256.0f);
  }
  return r;
}
inline F load_u8(const void* p) {
  const uint8x16_t b = vld1q_u8((const uint8_t*)p);
  const uint16x8_t low = vmovl_u8(vget_low_u8(b)), high = vmovl_high_u8(b);
  return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_high_u16(low)), vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))),
           vcvtq_f32_u32(vmovl_high_u16(high))}};
}
inline F add(F a, F b) { HR_QUARTERS a.v[i] = vaddq_f32(a.v[i], b.v[i]); return a; }
inline F sub(F a, F b) { HR_QUARTERS a.v[i] = vsubq_f32(a.v[i], b.v[i]); return a; }
inline F mul(F a, F b) { HR_QUARTERS a.v[i] = vmulq_f32(a.v[i], b.v[i]); return a; }
inline F div(F a, F b) { HR_QUARTERS a.v[i] = vdivq_f32(a.v[i], b.v[i]); return a; }
inline F fma(F a, F b, F c) { HR_QUARTERS c.v[i] = vfmaq_f32(c.v[i], a.v[i], b.v[i]); return c; }
inline F max(F a, F b) { HR_QUARTERS a.v[i] = vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); return a; }  // b where either is NaN
inline F abs(F a) { HR_QUARTERS a.v[i] = vabsq_f32(a.v[i]); return a; }
inline F round(F a) { HR_QUARTERS a.v[i] = vrndnq_f32(a.v[i]); return a; }
inline F scale2(F a, F n) {  // a * 2^n for n in [-126, 127]
  HR_QUARTERS a.v[i] = vmulq_f32(a.v[i], vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.v[i]), vdupq_n_s32(127)), 23)));
  return a;
}
inline F zero_below(F x, float limit, F value) {
  HR_QUARTERS value.v[i] = vbslq_f32(vcltq_f32(x.v[i], vdupq_n_f32(limit)), vdupq_n_f32(0.0f), value.v[i]);
  return value;
}
inline F keep_lanes(F a, int lo, int hi, float other) {
  static const int32_t lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  HR_QUARTERS {
    const int32x4_t at = vld1q_s32(lanes + 4 * i);
    const uint32x4_t inside = vandq_u32(vcgeq_s32(at, vdupq_n_s32(lo)), vcltq_s32(at, vdupq_n_s32(hi)));
    a.v[i] = vbslq_f32(inside, a.v[i], vdupq_n_f32(other));
  }
  return a;
}
inline void store_s8(int8_t* p, F x) {
  const int16x8_t low = vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(x.v[0])), vqmovn_s32(vcvtnq_s32_f32(x.v[1])));
  const int16x8_t high = vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(x.v[2])), vqmovn_s32(vcvtnq_s32_f32(x.v[3])));
  vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
}
// Sixteen pairs of bf16, the lower half first.
struct P {
  uint32x4_t v[4];
};
inline P load_pairs(const void* p) {
  P r;
  HR_QUARTERS r.v[i] = vreinterpretq_u32_u8(vld1q_u8((const uint8_t*)p + 16 * i));
  return r;
}
inline P set_pairs(const void* p) {
  uint32_t pair;
  std::memcpy(&pair, p, 4);
  return {{vdupq_n_u32(pair), vdupq_n_u32(pair), vdupq_n_u32(pair), vdupq_n_u32(pair)}};
}
inline P mask_pairs(P a, uint32_t mask) { HR_QUARTERS a.v[i] = vandq_u32(a.v[i], vdupq_n_u32(mask)); return a; }
inline float32x4_t second(uint32x4_t x) { return vreinterpretq_f32_u32(vandq_u32(x, vdupq_n_u32(0xffff0000u))); }
inline float32x4_t first(uint32x4_t x) { return vreinterpretq_f32_u32(vshlq_n_u32(x, 16)); }
inline F dot2(P a, P b, F c) {
  HR_QUARTERS c.v[i] = vfmaq_f32(vfmaq_f32(c.v[i], second(a.v[i]), second(b.v[i])), first(a.v[i]), first(b.v[i]));
  return c;
}
inline void store_bf16(void* p, F a) {
  HR_QUARTERS {
    const uint32x4_t x = vreinterpretq_u32_f32(a.v[i]), top = vshrq_n_u32(x, 16);
    uint32x4_t r = vshrq_n_u32(vaddq_u32(vaddq_u32(x, vdupq_n_u32(0x7fff)), vandq_u32(top, vdupq_n_u32(1))), 16);
    r = vbslq_u32(vceqq_f32(a.v[i], a.v[i]), r, vorrq_u32(top, vdupq_n_u32(0x40)));
    r = vbslq_u32(vtstq_u32(x, vdupq_n_u32(0x7f800000)), r, vandq_u32(top, vdupq_n_u32(0x8000)));
    vst1_u16((uint16_t*)p + 4 * i, vmovn_u32(r));
  }
}
// a * 2^n where the lowest bits of `n`, taken as an integer, are n.
inline F add_exponent(F a, F n) {
  HR_QUARTERS a.v[i] = vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(a.v[i]), vshlq_n_u32(vreinterpretq_u32_f32(n.v[i]), 23)));
  return a;
}
inline float sum_lanes(F a) {
  const float32x4_t q = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
  const float32x2_t h = vadd_f32(vget_low_f32(q), vget_high_f32(q));
  return vget_lane_f32(h, 0) + vget_lane_f32(h, 1);
}
inline float max_lanes(F a) {
  float v[16], top;
  store(v, a);
  top = v[0];
  for (int i = 1; i < 16; i++) top = top > v[i] ? top : v[i];
  return top;
}
inline bool has_nan(F a) {
  uint32x4_t ordered = vceqq_f32(a.v[0], a.v[0]);
  for (int i = 1; i < 4; i++) ordered = vandq_u32(ordered, vceqq_f32(a.v[i], a.v[i]));
  return vminvq_u32(ordered) == 0;
}
inline int32_t sum_s8(const int8_t* p) { return vaddlvq_s8(vld1q_s8(p)); }
#undef HR_QUARTERS

inline int32_t paired(const int8_t*) { return 0; }  // see isa_avx512.h

}  // namespace headrace::HR_ISA
