#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#define HR_ISA neon
#include "isa_neon.h"
#include "kernels_impl.h"

namespace headrace::neon {

// The 8 lines of 4 of a tile's 16 outputs. All codes fit into signed bytes: unsigned ones have at most 6 bits.
template <Codes C>
inline void load_quarter(const uint8_t* q, int quarter, int8x16_t* w) {
  q += 16 * quarter;
  if constexpr (C == Codes::s8) {
    for (int j = 0; j < 8; j++) w[j] = vld1q_s8((const int8_t*)q + 64 * j);
    return;
  }
  const uint8x16_t nibble = vdupq_n_u8(15);
  uint8x16_t u[8];
  for (int j = 0; j < 4; j++) {
    const uint8x16_t v = vld1q_u8(q + 64 * j);
    u[j] = vandq_u8(v, nibble);
    u[j + 4] = vshrq_n_u8(v, 4);
  }
  if constexpr (C == Codes::u5) {
    const uint8x16_t high = vld1q_u8(q + 256);
    for (int j = 0; j < 8; j++) u[j] = vorrq_u8(u[j], vandq_u8(vtstq_u8(high, vdupq_n_u8((uint8_t)(1 << j))), vdupq_n_u8(16)));
  }
  if constexpr (C == Codes::u6) {
    const uint8x16_t pair = vdupq_n_u8(3);
    for (int p = 0; p < 2; p++) {
      const uint8x16_t high = vld1q_u8(q + 256 + 64 * p);
      for (int i = 0; i < 4; i++) u[4 * p + i] = vorrq_u8(u[4 * p + i], vshlq_n_u8(vandq_u8(vshlq_u8(high, vdupq_n_s8((int8_t)(-2 * i))), pair), 4));
    }
  }
  for (int j = 0; j < 8; j++) w[j] = vreinterpretq_s8_u8(u[j]);
}

inline float32x4_t quarter_f16(const uint8_t* p, int quarter) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)p + 4 * quarter))); }
inline float32x4_t quarter_u8(const uint8_t* p, int quarter) {
  uint32_t four;
  std::memcpy(&four, p + 4 * quarter, 4);
  return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four)))));
}
inline float32x4_t quarter_s8(const uint8_t* p, int quarter) {
  uint32_t four;
  std::memcpy(&four, p + 4 * quarter, 4);
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four)))));
}

template <Codes C, Scales S, int R>
static void rows_of(const Matrix& m, const uint8_t* tile, int quarter, const QRows& x, int64_t row0, float* out, int64_t ldo) {
  float32x4_t acc[R];
  for (auto& a : acc) a = vdupq_n_f32(0.0f);
  const auto shifted = [](int32_t sum) { return vdupq_n_s32((int32_t)((uint32_t)sum << std::max(zero_shift(C, S), 0))); };
  const int64_t groups = m.groups;
  const QGroup* first = x.row(row0);
  for (int64_t g = 0; g < groups; g++) {
    const uint8_t* s = m.group(tile, g);
    int8x16_t w[8];
    load_quarter<C>(s + group_scale_bytes(S), quarter, w);
    float32x4_t d, d1 = vdupq_n_f32(0.0f), mn = vdupq_n_f32(0.0f);
    if constexpr (S == Scales::plain) d = quarter_f16(s, quarter);
    if constexpr (S == Scales::min) {
      d = quarter_f16(s, quarter);
      mn = quarter_f16(s + 32, quarter);
    }
    if constexpr (S == Scales::kmin) {
      const uint8_t* top = m.super(tile, g);
      d = vmulq_f32(quarter_f16(top, quarter), quarter_u8(s, quarter));
      mn = vnegq_f32(vmulq_f32(quarter_f16(top + 32, quarter), quarter_u8(s + 16, quarter)));
    }
    if constexpr (S == Scales::k16) {
      const float32x4_t top = quarter_f16(m.super(tile, g), quarter);
      d = vmulq_f32(top, quarter_s8(s, quarter));
      d1 = vmulq_f32(top, quarter_s8(s + 16, quarter));
    }
    for (int r = 0; r < R; r++) {
      const QGroup& xg = first[r * groups + g];
      const int8x16_t low = vld1q_s8(xg.codes), high = vld1q_s8(xg.codes + 16);
      const float32x4_t xs = vdupq_n_f32(xg.scale);
      int32x4_t a = vdupq_n_s32(0), b = a;
      a = vdotq_laneq_s32(a, w[0], low, 0);
      a = vdotq_laneq_s32(a, w[1], low, 1);
      a = vdotq_laneq_s32(a, w[2], low, 2);
      a = vdotq_laneq_s32(a, w[3], low, 3);
      b = vdotq_laneq_s32(b, w[4], high, 0);
      b = vdotq_laneq_s32(b, w[5], high, 1);
      b = vdotq_laneq_s32(b, w[6], high, 2);
      b = vdotq_laneq_s32(b, w[7], high, 3);
      if constexpr (S == Scales::k16) {
        a = vsubq_s32(a, shifted(xg.half_sum));
        b = vsubq_s32(b, shifted(xg.sum - xg.half_sum));
        acc[r] = vfmaq_f32(acc[r], vcvtq_f32_s32(a), vmulq_f32(d, xs));
        acc[r] = vfmaq_f32(acc[r], vcvtq_f32_s32(b), vmulq_f32(d1, xs));
      } else {
        a = vaddq_s32(a, b);
        if constexpr (zero_shift(C, S) >= 0) a = vsubq_s32(a, shifted(xg.sum));
        acc[r] = vfmaq_f32(acc[r], vcvtq_f32_s32(a), vmulq_f32(d, xs));
        if constexpr (S == Scales::min || S == Scales::kmin) acc[r] = vfmaq_n_f32(acc[r], mn, xg.weighted);
      }
    }
  }
  for (int r = 0; r < R; r++) vst1q_f32(out + r * ldo + 4 * quarter, acc[r]);
}

template <Codes C, Scales S>
static void tile_of(const Matrix& m, int64_t t, const QRows& x, int64_t row0, int64_t rows, float* out, int64_t ldo) {
  const uint8_t* tile = m.tile(t);
  for (int64_t r = 0; r < rows;) {
    const int step = (int)std::min<int64_t>(rows - r, 8);
    const int taken = step >= 8 ? 8 : step >= 4 ? 4 : step >= 2 ? 2 : 1;
    for (int quarter = 0; quarter < 4; quarter++) switch (taken) {
        case 8: rows_of<C, S, 8>(m, tile, quarter, x, row0 + r, out + r * ldo, ldo); break;
        case 4: rows_of<C, S, 4>(m, tile, quarter, x, row0 + r, out + r * ldo, ldo); break;
        case 2: rows_of<C, S, 2>(m, tile, quarter, x, row0 + r, out + r * ldo, ldo); break;
        default: rows_of<C, S, 1>(m, tile, quarter, x, row0 + r, out + r * ldo, ldo); break;
      }
    r += taken;
  }
}
#include "dispatch_q.h"

}  // namespace headrace::neon

namespace headrace {
const Kernels* kernels_neon() {
  using namespace neon;
  static const Kernels table{"neon", quantize, quantize_groups, gemm_q, gemm_f, rms_norm, gated, attention, merge_segments, extremes, exponentials, store_kv};
  return &table;
}
}  // namespace headrace
#else
#include "kernels.h"
namespace headrace {
const Kernels* kernels_neon() { return nullptr; }
}  // namespace headrace
#endif
