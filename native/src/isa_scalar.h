// 16 lanes as an array: the portable reference, and what a compiler vectorizes as well as it can.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "packed.h"

namespace headrace::HR_ISA {

struct F {
  float v[16];
};
#define HR_LANES for (int i = 0; i < 16; i++)
constexpr int kManyPairs = 8, kSums = 24, kPairSums = 24;  // see isa_avx2.h
inline F set1(float x) { F r; HR_LANES r.v[i] = x; return r; }
inline F zero() { return set1(0.0f); }
inline F load(const float* p) { F r; std::memcpy(r.v, p, 64); return r; }
inline void store(float* p, F x) { std::memcpy(p, x.v, 64); }
inline F load_f16(const void* p) { F r; HR_LANES r.v[i] = half_to_float(read_u16((const uint8_t*)p + 2 * i)); return r; }
inline void store_f16(void* p, F x) { HR_LANES { const uint16_t h = float_to_half(x.v[i]); std::memcpy((uint8_t*)p + 2 * i, &h, 2); } }
inline F load_bf16(const void* p) { F r; HR_LANES r.v[i] = bf16_to_float(read_u16((const uint8_t*)p + 2 * i)); return r; }
inline F load_s8(const void* p) { F r; HR_LANES r.v[i] = (float)((const int8_t*)p)[i]; return r; }
inline F load_u4(const void* p) { F r; HR_LANES r.v[i] = (float)(((const uint8_t*)p)[i % 8] >> (i / 8 * 4) & 15); return r; }  // 16 numbers in 8 bytes
inline F load_e4m3(const void* p) { F r; HR_LANES r.v[i] = e4m3_to_float(((const uint8_t*)p)[i]); return r; }
inline F load_u8(const void* p) { F r; HR_LANES r.v[i] = (float)((const uint8_t*)p)[i]; return r; }
inline F add(F a, F b) { HR_LANES a.v[i] += b.v[i]; return a; }
inline F sub(F a, F b) { HR_LANES a.v[i] -= b.v[i]; return a; }
inline F mul(F a, F b) { HR_LANES a.v[i] *= b.v[i]; return a; }
inline F div(F a, F b) { HR_LANES a.v[i] /= b.v[i]; return a; }
inline F fma(F a, F b, F c) { HR_LANES c.v[i] = std::fma(a.v[i], b.v[i], c.v[i]); return c; }  // rounded once, as in hardware
inline F max(F a, F b) { HR_LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }  // b where either is NaN
inline F abs(F a) { HR_LANES a.v[i] = std::fabs(a.v[i]); return a; }
inline F round(F a) { HR_LANES a.v[i] = std::nearbyint(a.v[i]); return a; }
inline F scale2(F a, F n) { HR_LANES a.v[i] = std::isfinite(n.v[i]) ? std::ldexp(a.v[i], (int)n.v[i]) : n.v[i]; return a; }
inline F zero_below(F x, float limit, F value) { HR_LANES value.v[i] = x.v[i] < limit ? 0.0f : value.v[i]; return value; }
inline F keep_lanes(F a, int lo, int hi, float other) { HR_LANES a.v[i] = i >= lo && i < hi ? a.v[i] : other; return a; }
inline void store_s8(int8_t* p, F a) { HR_LANES { const float x = std::nearbyint(a.v[i]); p[i] = (int8_t)(x > 127 ? 127 : x < -128 ? -128 : x == x ? x : 0); } }
// Sixteen pairs of bf16, the lower half first.
struct P {
  uint32_t v[16];
};
inline P load_pairs(const void* p) { P r; std::memcpy(r.v, p, 64); return r; }
inline P set_pairs(const void* p) { P r; HR_LANES std::memcpy(r.v + i, p, 4); return r; }
inline P mask_pairs(P a, uint32_t mask) { HR_LANES a.v[i] &= mask; return a; }
inline F dot2(P a, P b, F c) {
  HR_LANES {
    c.v[i] = std::fma(bf16_to_float((uint16_t)(a.v[i] >> 16)), bf16_to_float((uint16_t)(b.v[i] >> 16)), c.v[i]);
    c.v[i] = std::fma(bf16_to_float((uint16_t)a.v[i]), bf16_to_float((uint16_t)b.v[i]), c.v[i]);
  }
  return c;
}
inline void store_bf16(void* p, F a) { HR_LANES { const uint16_t h = float_to_bf16(a.v[i]); std::memcpy((uint8_t*)p + 2 * i, &h, 2); } }
// a * 2^n where the lowest bits of `n`, taken as an integer, are n.
inline F add_exponent(F a, F n) {
  HR_LANES {
    uint32_t x, by;
    std::memcpy(&x, a.v + i, 4);
    std::memcpy(&by, n.v + i, 4);
    x += by << 23;
    std::memcpy(a.v + i, &x, 4);
  }
  return a;
}
inline float sum_lanes(F a) {
  for (int w = 8; w > 0; w >>= 1)
    for (int i = 0; i < w; i++) a.v[i] += a.v[i + w];
  return a.v[0];
}
inline float max_lanes(F a) {
  for (int w = 8; w > 0; w >>= 1)
    for (int i = 0; i < w; i++) a.v[i] = a.v[i] > a.v[i + w] ? a.v[i] : a.v[i + w];
  return a.v[0];
}
inline bool has_nan(F a) { bool found = false; HR_LANES found |= a.v[i] != a.v[i]; return found; }
inline int32_t sum_s8(const int8_t* p) { int32_t s = 0; HR_LANES s += p[i]; return s; }
#undef HR_LANES

inline int32_t paired(const int8_t*) { return 0; }  // see isa_avx512.h

}  // namespace headrace
