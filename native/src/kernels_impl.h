// Everything written once over 16-lane vectors. Included after an isa_*.h by each kernels_*.cpp, in namespace HR_ISA;
// that file supplies `gemm_q` and exports the table.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "attention_impl.h"
#include "exponential.h"
#include "kernels.h"

namespace headrace::HR_ISA {

// Groups of 32 at x, x + stride, … into out, out + out_stride, …; several at once, so that none waits for the maximum of another.
static void quantize_groups(const float* x, int64_t stride, int64_t count, QGroup* out, int64_t out_stride) {
  constexpr int kAtOnce = 16;
  for (int64_t from = 0; from < count; from += kAtOnce, x += kAtOnce * stride, out += kAtOnce * out_stride) {
    const int n = (int)std::min<int64_t>(kAtOnce, count - from);
    float scale[kAtOnce] = {0}, inverse[kAtOnce];
    bool broken = false;
    for (int i = 0; i < n; i++) {
      const F a = load(x + i * stride), b = load(x + i * stride + 16);
      scale[i] = max_lanes(max(abs(a), abs(b)));
      broken |= has_nan(fma(a, zero(), mul(b, zero())));  // 0 * infinity is NaN too
    }
    const F top = load(scale);
    store(scale, div(top, set1((float)kMostCode)));
    store(inverse, div(set1((float)kMostCode), top));
    for (int i = 0; i < n; i++)
      if (!(scale[i] > 0) || inverse[i] > std::numeric_limits<float>::max()) inverse[i] = 0;  // below 4e-37 all codes are 0
    if (broken)
      for (int i = 0; i < n; i++) {
        const F a = load(x + i * stride), b = load(x + i * stride + 16);
        if (!has_nan(fma(a, zero(), mul(b, zero())))) continue;
        scale[i] = std::numeric_limits<float>::quiet_NaN();
        inverse[i] = 0;
      }
    for (int i = 0; i < n; i++) {
      QGroup& o = out[i * out_stride];
      const F v = set1(inverse[i]);
      store_s8(o.codes, round(mul(load(x + i * stride), v)));
      store_s8(o.codes + 16, round(mul(load(x + i * stride + 16), v)));
      o.scale = scale[i];
    }
    for (int i = 0; i < n; i++) {
      QGroup& o = out[i * out_stride];
      const int32_t s0 = sum_s8(o.codes), s1 = sum_s8(o.codes + 16);
      o.weighted = o.scale * (float)(s0 + s1);
      o.sum = s0 + s1;
      o.half_sum = s0;
      o.paired = paired(o.codes);
    }
  }
}

static void quantize(const float* x, int64_t k, QGroup* out) {
  const int64_t whole = k / kGroup;
  quantize_groups(x, kGroup, whole, out, 1);
  if (k % kGroup == 0) return;
  float tail[kGroup] = {0};
  std::memcpy(tail, x + whole * kGroup, (k - whole * kGroup) * sizeof(float));
  quantize_groups(tail, kGroup, 1, out + whole, 1);
}

// ---- float activations

// The 32 inputs of one group as exact floats, [32][16 outputs].
static void dequantize_group(const Matrix& m, const uint8_t* tile, int64_t g, float* out) {
  const uint8_t* s = m.group(tile, g);
  const uint8_t* q = s + group_scale_bytes(m.format.scales);
  uint8_t line[64];
  F d0 = zero(), d1 = zero(), mn = zero();
  float zero_point = (float)m.format.zero;
  switch (m.format.scales) {
    case Scales::plain: d0 = d1 = load_f16(s); break;
    case Scales::min: d0 = d1 = load_f16(s); mn = load_f16(s + 32); break;
    case Scales::kmin: {
      const uint8_t* top = m.super(tile, g);
      d0 = d1 = mul(load_f16(top), load_u8(s));
      mn = sub(zero(), mul(load_f16(top + 32), load_u8(s + 16)));
      break;
    }
    case Scales::k16: {
      const F top = load_f16(m.super(tile, g));
      d0 = mul(top, load_s8(s));
      d1 = mul(top, load_s8(s + 16));
      zero_point = 32.0f;
      break;
    }
    default: break;
  }
  for (int j = 0; j < 8; j++) {
    const F d = j < 4 ? d0 : d1;
    if (m.format.codes == Codes::s8) {
      std::memcpy(line, q + j * 64, 64);
    } else {
      for (int b = 0; b < 64; b++) line[b] = (q[(j & 3) * 64 + b] >> (j >= 4 ? 4 : 0)) & 15;
      if (m.format.codes == Codes::u5)
        for (int b = 0; b < 64; b++) line[b] |= ((q[256 + b] >> j) & 1) << 4;
      if (m.format.codes == Codes::u6)
        for (int b = 0; b < 64; b++) line[b] |= ((q[256 + (j >> 2) * 64 + b] >> (2 * (j & 3))) & 3) << 4;
    }
    for (int i = 0; i < 4; i++) {
      float code[16];
      if (m.format.codes == Codes::s8)
        for (int o = 0; o < 16; o++) code[o] = (float)(int8_t)line[o * 4 + i];
      else
        for (int o = 0; o < 16; o++) code[o] = (float)line[o * 4 + i];
      F v = sub(load(code), set1(zero_point));
      v = m.format.scales == Scales::min || m.format.scales == Scales::kmin ? fma(d, load(code), mn) : mul(d, v);
      store(out + (j * 4 + i) * kTile, v);
    }
  }
}

template <int R>
static void dense_rows(const float* w, int64_t k, const float* x, int64_t ldx, F* acc) {
  for (int64_t i = 0; i < k; i++) {
    const F v = load(w + i * kTile);
    for (int r = 0; r < R; r++) acc[r] = fma(v, set1(x[r * ldx + i]), acc[r]);
  }
}

template <Codes C, int R>
static void float_rows(const uint8_t* w, int64_t k, const float* x, int64_t ldx, float* out, int64_t ldo) {
  F acc[R];
  for (int r = 0; r < R; r++) acc[r] = zero();
  for (int64_t i = 0; i < k; i++) {
    F v;
    if constexpr (C == Codes::f32) v = load((const float*)w + i * kTile);
    if constexpr (C == Codes::f16) v = load_f16(w + i * kTile * 2);
    if constexpr (C == Codes::bf16) v = load_bf16(w + i * kTile * 2);
    for (int r = 0; r < R; r++) acc[r] = fma(v, set1(x[r * ldx + i]), acc[r]);
  }
  for (int r = 0; r < R; r++) store(out + r * ldo, acc[r]);
}

template <Codes C>
static void float_tile(const uint8_t* w, int64_t k, const float* x, int64_t ldx, int64_t rows, float* out, int64_t ldo) {
  int64_t r = 0;
  for (; r + 8 <= rows; r += 8) float_rows<C, 8>(w, k, x + r * ldx, ldx, out + r * ldo, ldo);
  for (; r + 4 <= rows; r += 4) float_rows<C, 4>(w, k, x + r * ldx, ldx, out + r * ldo, ldo);
  for (; r < rows; r++) float_rows<C, 1>(w, k, x + r * ldx, ldx, out + r * ldo, ldo);
}

static void gemm_f(const Matrix& m, int64_t t, const float* x, int64_t ldx, int64_t rows, float* out, int64_t ldo) {
  const uint8_t* tile = m.tile(t);
  switch (m.format.codes) {
    case Codes::f32: return float_tile<Codes::f32>(tile, m.k, x, ldx, rows, out, ldo);
    case Codes::f16: return float_tile<Codes::f16>(tile, m.k, x, ldx, rows, out, ldo);
    case Codes::bf16: return float_tile<Codes::bf16>(tile, m.k, x, ldx, rows, out, ldo);
    default: break;
  }
  float w[kGroup * kTile];
  for (int64_t r = 0; r < rows; r++) store(out + r * ldo, zero());
  for (int64_t g = 0; g < m.groups; g++) {
    dequantize_group(m, tile, g, w);
    const int64_t k = std::min<int64_t>(kGroup, m.k - g * kGroup);
    const float* xg = x + g * kGroup;
    int64_t r = 0;
    for (; r + 8 <= rows; r += 8) {
      F acc[8];
      for (int i = 0; i < 8; i++) acc[i] = load(out + (r + i) * ldo);
      dense_rows<8>(w, k, xg + r * ldx, ldx, acc);
      for (int i = 0; i < 8; i++) store(out + (r + i) * ldo, acc[i]);
    }
    for (; r < rows; r++) {
      F acc[1] = {load(out + r * ldo)};
      dense_rows<1>(w, k, xg + r * ldx, ldx, acc);
      store(out + r * ldo, acc[0]);
    }
  }
}

// ---- row operations

static void rms_norm(const float* x, const float* weight, float offset, int64_t n, float eps, float* out) {
  F acc = zero();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const F v = load(x + i);
    acc = fma(v, v, acc);
  }
  float sum = sum_lanes(acc);
  for (; i < n; i++) sum += x[i] * x[i];
  const float r = 1.0f / std::sqrt(sum / (float)n + eps);
  const F rv = set1(r), off = set1(offset);
  for (i = 0; i + 16 <= n; i += 16) store(out + i, mul(mul(load(x + i), rv), add(load(weight + i), off)));
  for (; i < n; i++) out[i] = x[i] * r * (weight[i] + offset);
}

static bool extremes(const float* x, int64_t n, float* low, float* top) {
  const float inf = std::numeric_limits<float>::infinity();
  // Several accumulators, since a maximum takes four cycles; `bad` gathers x * 0, which is NaN for what is not finite,
  // except that -inf is let through by looking at max(x, 0).
  F high[4], deep[4], bad[4];
  for (int j = 0; j < 4; j++) high[j] = deep[j] = set1(-inf), bad[j] = zero();
  int64_t i = 0;
  for (; i + 64 <= n; i += 64)
    for (int j = 0; j < 4; j++) {
      const F v = load(x + i + 16 * j);
      high[j] = max(v, high[j]);
      deep[j] = max(sub(zero(), v), deep[j]);
      bad[j] = fma(max(zero(), v), zero(), bad[j]);
    }
  float most = max_lanes(max(max(high[0], high[1]), max(high[2], high[3])));
  float least = -max_lanes(max(max(deep[0], deep[1]), max(deep[2], deep[3])));
  float wrong = sum_lanes(add(add(bad[0], bad[1]), add(bad[2], bad[3])));
  for (; i < n; i++) {
    most = x[i] > most ? x[i] : most;
    least = x[i] < least ? x[i] : least;
    if (!(x[i] <= std::numeric_limits<float>::max())) wrong = inf;
  }
  *top = most;
  *low = least;
  return wrong == 0;
}

static void exponentials(const float* x, int64_t n, float top, float factor, float* out) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, exp(mul(sub(load(x + i), set1(top)), set1(factor))));
  if (i < n) {
    float tail[16] = {0};
    std::memcpy(tail, x + i, (n - i) * 4);
    store(tail, exp(mul(sub(load(tail), set1(top)), set1(factor))));
    std::memcpy(out + i, tail, (n - i) * 4);
  }
}

inline F activate(Activation act, F g) {
  switch (act) {
    case Activation::silu: return div(g, add(set1(1.0f), exp(sub(zero(), g))));
    case Activation::gelu_tanh: {
      const F inner = mul(set1(0.7978845608f), fma(mul(set1(0.044715f), mul(g, g)), g, g));
      return mul(mul(set1(0.5f), g), add(set1(1.0f), tanh(inner)));
    }
    case Activation::gelu: {
      float v[16];
      store(v, g);
      for (float& x : v) x = 0.5f * x * (1.0f + std::erf(x * 0.70710678118f));
      return load(v);
    }
    case Activation::relu: return max(zero(), g);
    case Activation::relu2: {
      const F r = max(zero(), g);
      return mul(r, r);
    }
  }
  return g;
}

static void gated(Activation act, float* gate, const float* up, int64_t n) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(gate + i, mul(activate(act, load(gate + i)), load(up + i)));
  if (i < n) {
    float g[16] = {0}, u[16] = {0};
    std::memcpy(g, gate + i, (n - i) * 4);
    std::memcpy(u, up + i, (n - i) * 4);
    store(g, mul(activate(act, load(g)), load(u)));
    std::memcpy(gate + i, g, (n - i) * 4);
  }
}

// ---- attention

static void attention(const KvPool& kv, const AttentionItem& it, float* scratch) {
  switch (kv.type) {
    case KvType::f16: return attention_of<KvType::f16>(kv, it, scratch);
    case KvType::f32: return attention_of<KvType::f32>(kv, it, scratch);
    case KvType::s8: return attention_of<KvType::s8>(kv, it, scratch);
    case KvType::e4m3: return attention_of<KvType::e4m3>(kv, it, scratch);
    case KvType::u4: return attention_of<KvType::u4>(kv, it, scratch);
    case KvType::bf16: return attention_of<KvType::bf16>(kv, it, scratch);
  }
}

constexpr int64_t kMergedAtOnce = 64;  // segments whose factors are kept; those of longer contexts are computed again
static void merge_segments(const float* first, int64_t stride, int64_t segments, int value_dim, const float* sink, float* out) {
  float m = -std::numeric_limits<float>::infinity();
  for (int64_t s = 0; s < segments; s++) m = std::max(m, first[s * stride + value_dim]);
  float total = 0;
  float factors[kMergedAtOnce];
  for (int64_t s = 0; s < segments; s++) {
    const float factor = exponential(first[s * stride + value_dim] - m);
    total += first[s * stride + value_dim + 1] * factor;
    if (s < kMergedAtOnce) factors[s] = factor;
  }
  if (sink != nullptr) total += exponential(*sink - m);
  const float inverse = 1.0f / total;
  for (int d = 0; d < value_dim; d += 16) {
    F acc = zero();
    for (int64_t s = 0; s < segments; s++) {
      const float factor = s < kMergedAtOnce ? factors[s] : exponential(first[s * stride + value_dim] - m);
      acc = fma(load(first + s * stride + d), set1(factor), acc);
    }
    store(out + d, mul(acc, set1(inverse)));
  }
}

static void store_kv(const KvPool& kv, int64_t block, int offset, const float* k, const float* v) {
  const int bt = kv.block_tokens, dk = kv.head_dim, dv = kv.value_dim;
  for (int h = 0; h < kv.kv_heads; h++) {
    uint8_t* keys = kv.keys(block, h);
    uint8_t* values = kv.values(block, h);
    const float* kh = k + (int64_t)h * dk;
    const float* vh = v + (int64_t)h * dv;
    if (kv.type == KvType::f32) {
      for (int d = 0; d < dk; d++) ((float*)keys)[d * bt + offset] = kh[d];
      std::memcpy((float*)values + (int64_t)offset * dv, vh, dv * 4);
    } else if (kv.type == KvType::f16) {
      uint16_t half[16];
      for (int d = 0; d < dk; d += 16) {
        store_f16(half, load(kh + d));
        for (int i = 0; i < 16; i++) ((uint16_t*)keys)[(d + i) * bt + offset] = half[i];
      }
      for (int d = 0; d < dv; d += 16) store_f16((uint16_t*)values + (int64_t)offset * dv + d, load(vh + d));
    } else if (kv.type == KvType::bf16) {
      // Number by number: the other token of a pair may be another thread's.
      uint16_t *const kp = (uint16_t*)keys + 2 * offset, *const vp = (uint16_t*)values + (int64_t)(offset / 2) * dv * 2 + offset % 2;
      uint16_t rounded[16];
      for (int d = 0; d < dk; d += 16) {
        store_bf16(rounded, load(kh + d));
        for (int i = 0; i < 16; i += 2) std::memcpy(kp + (int64_t)(d + i) * bt, rounded + i, 4);
      }
      for (int d = 0; d < dv; d += 16) {
        store_bf16(rounded, load(vh + d));
        for (int i = 0; i < 16; i++) vp[2 * (d + i)] = rounded[i];
      }
    } else if (kv.type == KvType::e4m3) {
      for (int d = 0; d < dk; d++) keys[d * bt + offset] = float_to_e4m3(kh[d]);
      for (int d = 0; d < dv; d++) values[(int64_t)offset * dv + d] = float_to_e4m3(vh[d]);
    } else {
      const auto code = [](const float* x, int n, uint16_t* scale, int8_t* out) {
        F top = zero(), broken = zero();
        for (int d = 0; d < n; d += 16) {
          top = max(abs(load(x + d)), top);
          broken = fma(load(x + d), zero(), broken);
        }
        const float m = max_lanes(top), bad = sum_lanes(broken);
        *scale = float_to_half(m / 127.0f + bad);
        const float rounded = half_to_float(*scale);  // codes are made for the scale that will be read back
        const F inverse = set1(rounded > 0 && bad == 0 ? 1.0f / rounded : 0.0f);
        for (int d = 0; d < n; d += 16) store_s8(out + d, round(mul(load(x + d), inverse)));
      };
      int8_t row[1024];
      code(kh, dk, kv.key_scales(block, h) + offset, row);
      for (int d = 0; d < dk; d++) ((int8_t*)keys)[d * bt + offset] = row[d];
      code(vh, dv, kv.value_scales(block, h) + offset, (int8_t*)values + (int64_t)offset * dv);
    }
  }
}

}  // namespace headrace::HR_ISA
