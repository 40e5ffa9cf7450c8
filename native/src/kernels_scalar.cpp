#define HR_ISA scalar
#include "isa_scalar.h"
#include "kernels_impl.h"

namespace headrace::scalar {

// The plain definition: integer dot products per group, scaled and added in ascending order of groups.
template <Codes C, Scales S>
static void tile_of(const Matrix& m, int64_t t, const QRows& x, int64_t row0, int64_t rows, float* out, int64_t ldo) {
  const uint8_t* tile = m.tile(t);
  const int64_t groups = m.groups;
  for (int64_t r = 0; r < rows; r++)
    for (int lane = 0; lane < kTile; lane++) {
      float acc = 0;
      for (int64_t g = 0; g < groups; g++) {
        const uint8_t* s = m.group(tile, g);
        const uint8_t* q = s + group_scale_bytes(S);
        const QGroup& xg = x.row(row0 + r)[g];
        const int8_t* xr = xg.codes;
        int32_t a = 0, b = 0;
        for (int k = 0; k < 16; k++) a += read_code(C, q, lane, k) * xr[k];
        for (int k = 16; k < 32; k++) b += read_code(C, q, lane, k) * xr[k];
        if constexpr (S == Scales::k16) {
          const float d = half_to_float(read_u16(m.super(tile, g) + 2 * lane));
          a -= zero_of(C, S) * xg.half_sum;
          b -= zero_of(C, S) * (xg.sum - xg.half_sum);
          acc = std::fma((float)a, d * (float)(int8_t)s[lane] * xg.scale, acc);
          acc = std::fma((float)b, d * (float)(int8_t)s[16 + lane] * xg.scale, acc);
        } else {
          a += b;
          float d, mn = 0;
          if constexpr (S == Scales::kmin) {
            const uint8_t* top = m.super(tile, g);
            d = half_to_float(read_u16(top + 2 * lane)) * (float)s[lane];
            mn = -(half_to_float(read_u16(top + 32 + 2 * lane)) * (float)s[16 + lane]);
          } else {
            d = half_to_float(read_u16(s + 2 * lane));
            if constexpr (S == Scales::min) mn = half_to_float(read_u16(s + 32 + 2 * lane));
          }
          if constexpr (S == Scales::plain) a -= zero_of(C, S) * xg.sum;
          acc = std::fma((float)a, d * xg.scale, acc);
          if constexpr (S == Scales::min || S == Scales::kmin) acc = std::fma(mn, xg.weighted, acc);
        }
      }
      out[r * ldo + lane] = acc;
    }
}
#include "dispatch_q.h"

}  // namespace headrace::scalar

namespace headrace {
const Kernels* kernels_scalar() {
  using namespace scalar;
  static const Kernels table{"scalar", quantize, quantize_groups, gemm_q, gemm_f, rms_norm, gated, attention, merge_segments, extremes, exponentials, store_kv};
  return &table;
}
}  // namespace headrace
