// Writing a KV pool of 4-bit codes: value vectors token by token, keys by groups of kKeyGroup tokens and channel. Plain code
// that every kernel set shares, since a step writes little of it.
#pragma once
#include <algorithm>
#include <cmath>

#include "kernels.h"

namespace headrace {

constexpr float kLevels = 15;

struct Grid4 {
  uint16_t step_bits, least_bits;
  float step, least;
};

// The grid of numbers from `low` to `high`, as it is stored.
inline Grid4 grid4(float low, float high) {
  Grid4 g;
  g.least_bits = float_to_half(low);
  g.least = half_to_float(g.least_bits);
  g.step_bits = float_to_half(std::max(high - g.least, 0.0f) / kLevels);
  g.step = half_to_float(g.step_bits);
  return g;
}

// The code of x: rounded to nearest even by adding what leaves no room for fractions.
inline uint8_t code4(float x, const Grid4& g) {
  const float at = (x - g.least) / (g.step == 0 ? 1.0f : g.step);
  const float rounded = (std::min(std::max(at, 0.0f), kLevels) + 12582912.0f) - 12582912.0f;
  return (uint8_t)rounded;
}

// 16 numbers at `numbers`, `stride` apart, as 8 bytes.
inline void pack4(const float* numbers, int64_t stride, const Grid4& g, uint8_t* out) {
  for (int i = 0; i < 8; i++) out[i] = code4(numbers[i * stride], g) | code4(numbers[(i + 8) * stride], g) << 4;
}

// Values [kv_heads * value_dim] of one token at (block, offset). What is not a number makes the grid none, so that whoever
// looks at the token sees it.
inline void store_values4(const KvPool& kv, int64_t block, int offset, const float* v) {
  const int dv = kv.value_dim;
  for (int h = 0; h < kv.kv_heads; h++) {
    const float* x = v + (int64_t)h * dv;
    float low = x[0], high = x[0], bad = 0;
    for (int d = 0; d < dv; d++) {
      low = std::min(low, x[d]);
      high = std::max(high, x[d]);
      bad += x[d] * 0.0f;
    }
    const Grid4 g = grid4(low + bad, high + bad);
    uint16_t* scales = kv.value_scales(block, h) + offset;
    scales[0] = g.step_bits;
    scales[kv.block_tokens] = g.least_bits;
    uint8_t* out = kv.values(block, h) + (int64_t)offset * dv / 2;
    for (int d = 0; d < dv; d += 16) {
      if (bad == 0)
        pack4(x + d, 1, g, out + d / 2);
      else
        std::fill_n(out + d / 2, 8, (uint8_t)0);
    }
  }
}

// Keys [head_dim][kKeyGroup] of one head as a group of the pool. A key that is not a number is taken as 0: one token must not
// spoil the others' grid.
inline void store_group4(const KvPool& kv, int64_t block, int group, int head, const float* keys) {
  uint16_t* scales = kv.group_scales(block, group, head);
  uint8_t* out = kv.keys(block, head) + (int64_t)group * kKeyGroup / 2;
  const float largest = 65504.0f;
  for (int d = 0; d < kv.head_dim; d++) {
    float x[kKeyGroup];
    for (int i = 0; i < kKeyGroup; i++) {
      const float k = keys[d * kKeyGroup + i];
      x[i] = k == k ? std::min(std::max(k, -largest), largest) : 0.0f;
    }
    float low = x[0], high = x[0];
    for (int i = 1; i < kKeyGroup; i++) {
      low = std::min(low, x[i]);
      high = std::max(high, x[i]);
    }
    const Grid4 g = grid4(low, high);
    scales[d] = g.step_bits;
    scales[kv.head_dim + d] = g.least_bits;
    for (int i = 0; i < kKeyGroup; i += 16) pack4(x + i, 1, g, out + ((int64_t)d * kv.block_tokens + i) / 2);
  }
}

// The same group read back.
inline void load_group4(const KvPool& kv, int64_t block, int group, int head, float* keys) {
  const uint16_t* scales = kv.group_scales(block, group, head);
  const uint8_t* codes = kv.keys(block, head) + (int64_t)group * kKeyGroup / 2;
  for (int d = 0; d < kv.head_dim; d++) {
    const float step = half_to_float(scales[d]), least = half_to_float(scales[kv.head_dim + d]);
    for (int i = 0; i < kKeyGroup; i++) {
      const uint8_t byte = codes[((int64_t)d * kv.block_tokens + i / 16 * 16) / 2 + i % 8];
      keys[d * kKeyGroup + i] = std::fma((float)(byte >> (i / 8 % 2 * 4) & 15), step, least);
    }
  }
}

}  // namespace headrace
