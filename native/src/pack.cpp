#include "pack.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace headrace {
namespace {

// One group of 32 of one row: raw codes (signed ones as two's complement bytes) and its scales in the packed form's terms.
struct Group {
  uint8_t code[kGroup];
  uint16_t d = 0, m = 0;       // fp16: scale, minimum (plain and min formats), or the super-block's d and dmin
  uint8_t sc[2] = {0, 0}, mn = 0;
};

void k_scale(const uint8_t* s, int j, uint8_t* sc, uint8_t* mn) {  // six-bit scales and minimums of Q4_K and Q5_K
  if (j < 4) {
    *sc = s[j] & 63;
    *mn = s[j + 4] & 63;
  } else {
    *sc = (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4);
    *mn = (s[j + 4] >> 4) | ((s[j] >> 6) << 4);
  }
}

void nibbles(const uint8_t* qs, uint8_t* code) {
  for (int i = 0; i < 16; i++) {
    code[i] = qs[i] & 15;
    code[i + 16] = qs[i] >> 4;
  }
}
void fifth_bits(const uint8_t* qh, uint8_t* code) {
  uint32_t bits;
  std::memcpy(&bits, qh, 4);
  for (int i = 0; i < 32; i++) code[i] |= ((bits >> i) & 1) << 4;
}

float source_float(Source s, const uint8_t* row, int64_t i) {
  if (s == Source::f32) {
    float v;
    std::memcpy(&v, row + 4 * i, 4);
    return v;
  }
  const uint16_t raw = read_u16(row + 2 * i);
  return s == Source::f16 ? half_to_float(raw) : bf16_to_float(raw);
}

void read_group(Source s, const uint8_t* row, int64_t k, int64_t g, const Format& f, Group& out) {
  switch (s) {
    case Source::q4_0:
      row += g * 18;
      out.d = read_u16(row);
      nibbles(row + 2, out.code);
      return;
    case Source::q4_1:
      row += g * 20;
      out.d = read_u16(row);
      out.m = read_u16(row + 2);
      nibbles(row + 4, out.code);
      return;
    case Source::q5_0:
      row += g * 22;
      out.d = read_u16(row);
      nibbles(row + 6, out.code);
      fifth_bits(row + 2, out.code);
      return;
    case Source::q5_1:
      row += g * 24;
      out.d = read_u16(row);
      out.m = read_u16(row + 2);
      nibbles(row + 8, out.code);
      fifth_bits(row + 4, out.code);
      return;
    case Source::q8_0:
      row += g * 34;
      out.d = read_u16(row);
      std::memcpy(out.code, row + 2, 32);
      return;
    case Source::q4_k:
    case Source::q5_k: {
      const bool five = s == Source::q5_k;
      row += (g >> 3) * (five ? 176 : 144);
      const int j = g & 7;
      out.d = read_u16(row);
      out.m = read_u16(row + 2);
      k_scale(row + 4, j, &out.sc[0], &out.mn);
      const uint8_t* qh = row + 16;
      const uint8_t* qs = row + (five ? 48 : 16) + (j >> 1) * 32;
      for (int i = 0; i < 32; i++) {
        out.code[i] = (qs[i] >> (4 * (j & 1))) & 15;
        if (five) out.code[i] |= ((qh[i] >> j) & 1) << 4;
      }
      return;
    }
    case Source::q6_k: {
      row += (g >> 3) * 210;
      const int j = g & 7, part = j >> 2, lane = j & 3;  // halves of 128, then four interleaved runs of 32
      const uint8_t *ql = row + part * 64 + (lane & 1) * 32, *qh = row + 128 + part * 32;
      for (int i = 0; i < 32; i++) out.code[i] = ((ql[i] >> (lane >= 2 ? 4 : 0)) & 15) | (((qh[i] >> (2 * lane)) & 3) << 4);
      out.sc[0] = row[192 + part * 8 + lane * 2];
      out.sc[1] = row[192 + part * 8 + lane * 2 + 1];
      out.d = read_u16(row + 208);
      return;
    }
    default: break;
  }
  // A float source, quantized here.
  float x[kGroup], low = INFINITY, high = -INFINITY, top = 0;
  for (int i = 0; i < kGroup; i++) {
    x[i] = g * kGroup + i < k ? source_float(s, row, g * kGroup + i) : 0.0f;
    low = std::min(low, x[i]);
    high = std::max(high, x[i]);
    top = std::max(top, std::fabs(x[i]));
  }
  if (f.codes == Codes::s8) {
    out.d = float_to_half(top / 127.0f);
    const float d = half_to_float(out.d), inverse = d > 0 ? 1.0f / d : 0.0f;
    for (int i = 0; i < kGroup; i++) out.code[i] = (uint8_t)(int8_t)std::clamp<long>(std::lrintf(x[i] * inverse), -127, 127);
  } else {
    out.d = float_to_half((high - low) / 15.0f);
    out.m = float_to_half(low);
    const float d = half_to_float(out.d), m = half_to_float(out.m), inverse = d > 0 ? 1.0f / d : 0.0f;
    for (int i = 0; i < kGroup; i++) out.code[i] = (uint8_t)std::clamp<long>(std::lrintf((x[i] - m) * inverse), 0, 15);
  }
}

void put16(uint8_t* p, uint16_t v) { std::memcpy(p, &v, 2); }

void pack_tile(Source s, const uint8_t* src, size_t row_bytes, const Matrix& m, int64_t t, uint8_t* out) {
  const int64_t lanes = std::min<int64_t>(kTile, m.n - t * kTile);
  uint8_t* tile = out + t * m.tile_bytes;
  std::memset(tile, 0, m.tile_bytes);
  const Format& f = m.format;
  if (!m.quantized()) {
    for (int64_t lane = 0; lane < lanes; lane++) {
      const uint8_t* row = src + (t * kTile + lane) * row_bytes;
      for (int64_t i = 0; i < m.k; i++) {
        if (f.codes == Codes::f32) {
          const float v = source_float(s, row, i);
          std::memcpy(tile + (i * kTile + lane) * 4, &v, 4);
        } else if ((s == Source::f16 && f.codes == Codes::f16) || (s == Source::bf16 && f.codes == Codes::bf16)) {
          std::memcpy(tile + (i * kTile + lane) * 2, row + 2 * i, 2);
        } else if (f.codes == Codes::f16) {
          put16(tile + (i * kTile + lane) * 2, float_to_half(source_float(s, row, i)));
        } else {
          const float v = source_float(s, row, i);
          uint32_t bits;
          std::memcpy(&bits, &v, 4);
          const uint32_t nan = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
          put16(tile + (i * kTile + lane) * 2, (uint16_t)nan);
        }
      }
    }
    return;
  }
  Group group;
  uint8_t lines[512];
  for (int64_t g = 0; g < m.groups; g++) {
    uint8_t* scales = const_cast<uint8_t*>(m.group(tile, g));
    uint8_t* super = const_cast<uint8_t*>(m.super(tile, g));
    uint8_t* q = scales + group_scale_bytes(f.scales);
    std::memset(lines, 0, sizeof lines);
    for (int64_t lane = 0; lane < lanes; lane++) {
      read_group(s, src + (t * kTile + lane) * row_bytes, m.k, g, f, group);
      for (int j = 0; j < 8; j++) std::memcpy(lines + j * 64 + lane * 4, group.code + 4 * j, 4);
      switch (f.scales) {
        case Scales::plain: put16(scales + 2 * lane, group.d); break;
        case Scales::min:
          put16(scales + 2 * lane, group.d);
          put16(scales + 32 + 2 * lane, group.m);
          break;
        case Scales::kmin:
          scales[lane] = group.sc[0];
          scales[16 + lane] = group.mn;
          put16(super + 2 * lane, group.d);
          put16(super + 32 + 2 * lane, group.m);
          break;
        case Scales::k16:
          scales[lane] = group.sc[0];
          scales[16 + lane] = group.sc[1];
          put16(super + 2 * lane, group.d);
          break;
        default: break;
      }
    }
    if (f.codes == Codes::s8) {
      std::memcpy(q, lines, 512);
      continue;
    }
    for (int j = 0; j < 4; j++)
      for (int b = 0; b < 64; b++) q[j * 64 + b] = (lines[j * 64 + b] & 15) | ((lines[(j + 4) * 64 + b] & 15) << 4);
    if (f.codes == Codes::u5)
      for (int j = 0; j < 8; j++)
        for (int b = 0; b < 64; b++) q[256 + b] |= ((lines[j * 64 + b] >> 4) & 1) << j;
    if (f.codes == Codes::u6)
      for (int j = 0; j < 8; j++)
        for (int b = 0; b < 64; b++) q[256 + (j >> 2) * 64 + b] |= ((lines[j * 64 + b] >> 4) & 3) << (2 * (j & 3));
  }
}

}  // namespace

bool source_known(int type) {
  switch ((Source)type) {
    case Source::f32: case Source::f16: case Source::bf16: case Source::q4_0: case Source::q4_1: case Source::q5_0:
    case Source::q5_1: case Source::q8_0: case Source::q4_k: case Source::q5_k: case Source::q6_k: return true;
  }
  return false;
}

size_t source_row_bytes(Source s, int64_t k) {
  switch (s) {
    case Source::f32: return k * 4;
    case Source::f16: case Source::bf16: return k * 2;
    case Source::q4_0: return k / 32 * 18;
    case Source::q4_1: return k / 32 * 20;
    case Source::q5_0: return k / 32 * 22;
    case Source::q5_1: return k / 32 * 24;
    case Source::q8_0: return k / 32 * 34;
    case Source::q4_k: return k / 256 * 144;
    case Source::q5_k: return k / 256 * 176;
    case Source::q6_k: return k / 256 * 210;
  }
  return 0;
}

Format natural_format(Source s) {
  switch (s) {
    case Source::f16: return {Codes::f16, Scales::none, 0};
    case Source::bf16: return {Codes::bf16, Scales::none, 0};
    case Source::q4_0: return {Codes::u4, Scales::plain, 8};
    case Source::q4_1: return {Codes::u4, Scales::min, 0};
    case Source::q5_0: return {Codes::u5, Scales::plain, 16};
    case Source::q5_1: return {Codes::u5, Scales::min, 0};
    case Source::q8_0: return {Codes::s8, Scales::plain, 0};
    case Source::q4_k: return {Codes::u4, Scales::kmin, 0};
    case Source::q5_k: return {Codes::u5, Scales::kmin, 0};
    case Source::q6_k: return {Codes::u6, Scales::k16, 32};
    default: return {Codes::f32, Scales::none, 0};
  }
}

void pack(Source source, const uint8_t* src, const Matrix& m, uint8_t* out, Pool& pool) {
  const size_t row_bytes = source_row_bytes(source, m.k);
  const int64_t per = 8;
  pool.run((m.tiles + per - 1) / per, [&](int64_t item, int) {
    for (int64_t t = item * per; t < std::min(m.tiles, (item + 1) * per); t++) pack_tile(source, src, row_bytes, m, t, out);
  });
}

uint64_t checksum(const uint8_t* data, int64_t n, Pool& pool) {
  constexpr int64_t kPiece = 1 << 18;
  constexpr uint64_t kA = 0x9E3779B97F4A7C15u, kB = 0xC2B2AE3D27D4EB4Fu;
  const int64_t pieces = (n + kPiece - 1) / kPiece;
  std::vector<uint64_t> found(pieces);
  const auto mix = [](uint64_t h) {
    h = (h ^ (h >> 31)) * kB;
    return h ^ (h >> 29);
  };
  pool.run(pieces, [&](int64_t piece, int) {
    const uint8_t* p = data + piece * kPiece;
    const int64_t count = std::min(kPiece, n - piece * kPiece);
    uint64_t lane[8];
    for (int j = 0; j < 8; j++) lane[j] = kA * (j + 1);
    int64_t i = 0;
    for (; i + 64 <= count; i += 64)
      for (int j = 0; j < 8; j++) {
        uint64_t w;
        std::memcpy(&w, p + i + 8 * j, 8);
        lane[j] = (lane[j] ^ w) * kA;
        lane[j] ^= lane[j] >> 32;
      }
    for (; i < count; i++) lane[i & 7] = mix(lane[i & 7] ^ p[i]) + kA;
    uint64_t h = (uint64_t)count;
    for (int j = 0; j < 8; j++) h = mix(h ^ lane[j]) + kA;
    found[piece] = h;
  });
  uint64_t h = (uint64_t)n;
  for (const uint64_t f : found) h = mix(h ^ f) + kA;
  return h;
}

}  // namespace headrace
