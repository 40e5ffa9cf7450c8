// Packed weight matrices: the one layout that every instruction set reads.
//
// A matrix of N outputs by K inputs is cut into tiles of 16 outputs, and each tile into groups of 32 inputs. Within a
// (tile, group) the codes are stored in 8 lines of 64 code bytes, line j holding inputs 4j..4j+3 of the 16 outputs:
// byte (output * 4 + input % 4). One line is thus one 512-bit (or two 256-bit) operand of a 4-way byte dot product whose
// 16 lanes are the 16 outputs, and a row's 4 activations are broadcast to all lanes.
//   4-bit: lines j and j + 4 share bytes: low nibble is line j, high nibble line j + 4 (256 bytes a group)
//   5-bit: as 4-bit, then 64 bytes of fifth bits: bit j of byte b belongs to byte b of line j (320 bytes)
//   6-bit: as 4-bit, then 128 bytes of upper bit pairs: byte b of plane p holds 2 bits for lines 4p..4p+3 (384 bytes)
//   8-bit: 512 bytes, signed
// Scales come before the codes they scale, so that a matrix-vector product reads memory strictly forward.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace headrace {

constexpr int kTile = 16;   // outputs per tile
constexpr int kGroup = 32;  // inputs per group

enum class Codes : int { f32 = 0, f16 = 1, bf16 = 2, u4 = 3, u5 = 4, u6 = 5, s8 = 6 };

// How codes become values.
//   plain: value = d * (code - zero)                 d fp16 per group
//   min:   value = d * code + m                      d, m fp16 per group
//   kmin:  value = d * sc * code - dmin * mn         d, dmin fp16 per 8 groups; sc, mn u8 per group   (Q4_K, Q5_K)
//   k16:   value = d * sc * (code - 32)              d fp16 per 8 groups; sc s8 per half group of 16  (Q6_K)
enum class Scales : int { none = 0, plain = 1, min = 2, kmin = 3, k16 = 4 };

struct Format {
  Codes codes;
  Scales scales;
  int zero;
};

// Zero points are powers of two, so that kernels shift sums of activations instead of multiplying them. log2, -1 for none.
constexpr int zero_shift(Codes c, Scales s) {
  if (s == Scales::k16) return 5;
  if (s != Scales::plain || c == Codes::s8) return -1;
  return c == Codes::u4 ? 3 : 4;
}
constexpr int zero_of(Codes c, Scales s) { return zero_shift(c, s) < 0 ? 0 : 1 << zero_shift(c, s); }

constexpr int code_bytes(Codes c) {  // per (tile, group)
  switch (c) {
    case Codes::u4: return 256;
    case Codes::u5: return 320;
    case Codes::u6: return 384;
    case Codes::s8: return 512;
    case Codes::f32: return kTile * kGroup * 4;
    default: return kTile * kGroup * 2;
  }
}
constexpr int group_scale_bytes(Scales s) {  // in front of each group's codes
  switch (s) {
    case Scales::plain: return 32;
    case Scales::min: return 64;
    case Scales::kmin: return 32;
    case Scales::k16: return 32;
    default: return 0;
  }
}
constexpr int super_scale_bytes(Scales s) {  // in front of every eighth group
  switch (s) {
    case Scales::kmin: return 64;
    case Scales::k16: return 32;
    default: return 0;
  }
}

// Floating formats store a tile as [K][16] values; K needs no padding to whole groups in value, but is stored padded.
struct Matrix {
  Format format{Codes::f32, Scales::none, 0};
  int64_t n = 0, k = 0;   // logical outputs and inputs
  int64_t tiles = 0, groups = 0;
  size_t group_stride = 0, super_stride = 0, tile_bytes = 0;
  const uint8_t* data = nullptr;

  bool quantized() const { return format.scales != Scales::none; }
  const uint8_t* tile(int64_t t) const { return data + t * tile_bytes; }
  // Address of a group's scales; its codes follow them.
  const uint8_t* group(const uint8_t* tile, int64_t g) const {
    return tile + (g >> 3) * super_stride + super_scale_bytes(format.scales) + (g & 7) * group_stride;
  }
  const uint8_t* super(const uint8_t* tile, int64_t g) const { return tile + (g >> 3) * super_stride; }
  size_t bytes() const { return tiles * tile_bytes; }
};

inline Matrix shape(Format f, int64_t n, int64_t k) {
  Matrix m;
  m.format = f;
  m.n = n;
  m.k = k;
  m.tiles = (n + kTile - 1) / kTile;
  m.groups = (k + kGroup - 1) / kGroup;
  m.group_stride = group_scale_bytes(f.scales) + code_bytes(f.codes);
  m.super_stride = 8 * m.group_stride + super_scale_bytes(f.scales);
  const int64_t supers = (m.groups + 7) / 8;
  m.tile_bytes = m.groups * m.group_stride + supers * super_scale_bytes(f.scales);
  return m;
}

// ---- small conversions used by the scalar code paths
inline float half_to_float(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, mag = h & 0x7fff;
  uint32_t bits;
  if (mag >= 0x7c00) {
    bits = sign | 0x7f800000u | ((mag & 0x3ff) << 13);
  } else if (mag >= 0x0400) {
    bits = sign | ((mag << 13) + (112u << 23));
  } else {  // subnormal: exact in float
    float f = (float)mag * 5.9604644775390625e-08f;
    std::memcpy(&bits, &f, 4);
    bits |= sign;
  }
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
inline uint16_t float_to_half(float f) {  // round to nearest even
  uint32_t x;
  std::memcpy(&x, &f, 4);
  const uint16_t sign = (x >> 16) & 0x8000;
  x &= 0x7fffffff;
  if (x > 0x7f800000) return sign | 0x7e00;
  if (x >= 0x477ff000) return sign | 0x7c00;
  if (x < 0x38800000) {  // subnormal half or zero
    float a;
    std::memcpy(&a, &x, 4);
    const float r = a * 16777216.0f;  // 2^24, exact
    uint32_t m = (uint32_t)r;
    const float rest = r - (float)m;
    if (rest > 0.5f || (rest == 0.5f && (m & 1))) m++;
    return sign | (uint16_t)m;
  }
  const uint32_t rounded = x + 0xfff + ((x >> 13) & 1);
  return sign | (uint16_t)((rounded - (112u << 23)) >> 13);
}
// E4M3: bias 7, no infinity. Its bits shifted into a half are that number over 256, subnormal ones too.
inline float e4m3_to_float(uint8_t b) { return half_to_float((uint16_t)((b & 0x80) << 8 | (b & 0x7f) << 7)) * 256.0f; }
inline uint8_t float_to_e4m3(float f) {  // round to nearest even; beyond 448 it is 448
  uint32_t x;
  std::memcpy(&x, &f, 4);
  const uint8_t sign = (x >> 24) & 0x80;
  x &= 0x7fffffff;
  if (x > 0x7f800000) return sign | 0x7f;
  if (x >= 0x43e00000) return sign | 0x7e;
  if (x < 0x3c800000) {  // below 2^-6: multiples of 2^-9
    float a;
    std::memcpy(&a, &x, 4);
    const float r = a * 512.0f;
    uint32_t m = (uint32_t)r;
    const float rest = r - (float)m;
    if (rest > 0.5f || (rest == 0.5f && (m & 1))) m++;
    return sign | (uint8_t)m;
  }
  const uint32_t rounded = x + 0x7ffff + ((x >> 20) & 1);
  return sign | (uint8_t)((rounded - (120u << 23)) >> 20);
}
inline float bf16_to_float(uint16_t b) {
  const uint32_t bits = (uint32_t)b << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
inline uint16_t float_to_bf16(float f) {  // round to nearest even; below 2^-126 it is zero, as the instructions that do it have it
  uint32_t x;
  std::memcpy(&x, &f, 4);
  if ((x & 0x7f800000) == 0) return (x >> 16) & 0x8000;
  if ((x & 0x7fffffff) > 0x7f800000) return (x >> 16) | 0x40;
  return (x + 0x7fff + ((x >> 16) & 1)) >> 16;
}
inline uint16_t read_u16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

// Raw code of (output lane, input i) inside a group's code bytes.
inline int read_code(Codes c, const uint8_t* q, int lane, int i) {
  const int line = i >> 2, byte = lane * 4 + (i & 3);
  switch (c) {
    case Codes::s8: return (int8_t)q[line * 64 + byte];
    default: break;
  }
  int v = (q[(line & 3) * 64 + byte] >> (line >= 4 ? 4 : 0)) & 15;
  if (c == Codes::u5) v |= ((q[256 + byte] >> line) & 1) << 4;
  if (c == Codes::u6) v |= ((q[256 + (line >> 2) * 64 + byte] >> (2 * (line & 3))) & 3) << 4;
  return v;
}

// Exact value of weight (output, input); the slow reference of everything else.
inline float weight_at(const Matrix& m, int64_t out, int64_t in) {
  const uint8_t* tile = m.tile(out / kTile);
  const int lane = out % kTile;
  if (!m.quantized()) {
    const int64_t at = in * kTile + lane;
    if (m.format.codes == Codes::f32) {
      float v;
      std::memcpy(&v, tile + at * 4, 4);
      return v;
    }
    const uint16_t raw = read_u16(tile + at * 2);
    return m.format.codes == Codes::f16 ? half_to_float(raw) : bf16_to_float(raw);
  }
  const int64_t g = in / kGroup;
  const int i = in % kGroup;
  const uint8_t* s = m.group(tile, g);
  const int code = read_code(m.format.codes, s + group_scale_bytes(m.format.scales), lane, i);
  switch (m.format.scales) {
    case Scales::plain: return half_to_float(read_u16(s + 2 * lane)) * (float)(code - m.format.zero);
    case Scales::min: return half_to_float(read_u16(s + 2 * lane)) * (float)code + half_to_float(read_u16(s + 32 + 2 * lane));
    case Scales::kmin: {
      const uint8_t* top = m.super(tile, g);
      return half_to_float(read_u16(top + 2 * lane)) * (float)s[lane] * (float)code -
             half_to_float(read_u16(top + 32 + 2 * lane)) * (float)s[16 + lane];
    }
    case Scales::k16: {
      const uint8_t* top = m.super(tile, g);
      return half_to_float(read_u16(top + 2 * lane)) * (float)(int8_t)s[(i >> 4) * 16 + lane] * (float)(code - 32);
    }
    default: return 0;
  }
}

// 32 inputs of one row quantized to int8 (value = scale * code) with what products need of them, side by side: a kernel then
// needs one address per row. `sum` is that of the codes, which zero points need, `half_sum` that of the first 16,
// `weighted` is scale * sum, which minimums need.
struct QGroup {
  int8_t codes[kGroup];
  float scale, weighted;
  int32_t sum, half_sum;
  int32_t paired;  // what products in pairs add of a row, in a kernel set that takes them (AVX-512)
};
// Codes reach from -kMostCode to kMostCode, so that the sum of one and of a 4-bit weight's distance from 8 fits in a byte.
constexpr int kMostCode = 120;

// A hint: memory that a later loop reads, for products of several rows to bring near, since these wait for multipliers and not
// for memory. `lines` lines of 64 bytes out of pieces of `piece_bytes` each, from byte `from` of the first piece on.
struct Ahead {
  const uint8_t* const* pieces = nullptr;
  int64_t piece_bytes = 0, from = 0, lines = 0;
};

// Activations of `rows` rows, [rows][groups]; inputs are padded with zeros to whole groups.
struct QRows {
  int64_t rows = 0, groups = 0;
  QGroup* data = nullptr;
  Ahead ahead;
  QGroup* row(int64_t r) const { return data + r * groups; }
};

}  // namespace headrace
