// The operations that have one implementation per instruction set, as a table of functions chosen once at run time.
#pragma once
#include <array>
#include <cstdint>

#include "packed.h"

namespace headrace {

enum class Activation : int { silu = 0, gelu_tanh = 1, gelu = 2, relu = 3, relu2 = 4 };
enum class KvType : int { f16 = 0, f32 = 1, s8 = 2, e4m3 = 3, u4 = 4, bf16 = 5 };

// Tokens whose u4 keys share their scales, channel by channel.
constexpr int kKeyGroup = 32;

// One layer's part of a paged KV pool. Block b holds, for each KV head, keys [head_dim][block_tokens] (so that 16 tokens
// of one dimension are one vector) and then values [block_tokens][value_dim]. s8 keeps one fp16 scale per token and head
// for keys and one for values, after the codes of all heads; e4m3 has no scales. u4: 16 numbers are 8 bytes, the first eight in
// the low halves; after the codes of all heads come for each head, by group of kKeyGroup tokens, [head_dim] steps and
// [head_dim] minima of the keys, then for each head [block_tokens] steps and [block_tokens] minima of the values, fp16.
// bf16 lies in the pairs that a dot product of two takes: keys [head_dim / 2][block_tokens][2], values [block_tokens / 2][value_dim][2].
// Queries and weights are rounded to bf16 too. Every kernel set adds a pair's second product first, each with one rounding.
struct KvPool {
  KvType type = KvType::f16;
  uint8_t* base = nullptr;  // this layer's part of block 0
  int64_t block_stride = 0;  // bytes from a block to the next: the parts of all layers that share the pool's blocks
  int block_tokens = 16, kv_heads = 0, head_dim = 0, value_dim = 0;

  int64_t bytes(int64_t numbers) const {
    if (type == KvType::f16 || type == KvType::bf16) return 2 * numbers;
    return type == KvType::f32 ? 4 * numbers : type == KvType::u4 ? numbers / 2 : numbers;
  }
  int64_t scale_bytes() const {  // of a block
    if (type == KvType::s8) return (int64_t)kv_heads * block_tokens * 4;
    if (type == KvType::u4) return (int64_t)kv_heads * (block_tokens / kKeyGroup * head_dim + block_tokens) * 4;
    return 0;
  }
  int64_t block_bytes() const { return bytes((int64_t)kv_heads * block_tokens * (head_dim + value_dim)) + scale_bytes(); }
  uint8_t* keys(int64_t block, int head) const { return base + block * block_stride + bytes((int64_t)head * block_tokens * head_dim); }
  uint8_t* values(int64_t block, int head) const {
    return base + block * block_stride + bytes((int64_t)kv_heads * block_tokens * head_dim + (int64_t)head * block_tokens * value_dim);
  }
  uint16_t* scales(int64_t block) const {
    return reinterpret_cast<uint16_t*>(base + block * block_stride + bytes((int64_t)kv_heads * block_tokens * (head_dim + value_dim)));
  }
  uint16_t* key_scales(int64_t block, int head) const {  // s8 only, fp16 [block_tokens]
    return scales(block) + (int64_t)head * block_tokens;
  }
  uint16_t* group_scales(int64_t block, int group, int head) const {  // u4 only: [head_dim] steps, then minima
    return scales(block) + ((int64_t)head * (block_tokens / kKeyGroup) + group) * 2 * head_dim;
  }
  uint16_t* value_scales(int64_t block, int head) const {  // u4: then [block_tokens] minima
    if (type == KvType::u4) return group_scales(block, 0, kv_heads) + (int64_t)head * 2 * block_tokens;
    return key_scales(block, kv_heads) + (int64_t)head * block_tokens;
  }
};

// Query rows of one sequence against one KV head. Row i has position first_position + i and sees positions
// (position - window, position]; `group` query heads share the KV head.
struct AttentionItem {
  const float* q = nullptr;  // row 0, first query head of the group; already scaled
  int64_t q_stride = 0;      // floats between rows
  float* out = nullptr;      // [rows][group * value_dim] at stride out_stride
  int64_t out_stride = 0;
  int rows = 0, group = 1;
  int64_t first_position = 0;
  int64_t window = 0;  // 0: all
  float softcap = 0;   // 0: none
  const float* sinks = nullptr;  // [group] or null
  const int32_t* table = nullptr;  // block ids by logical position
  int head = 0;
  // u4 only: keys of the groups that the step writes to, as computed, [head_dim][kKeyGroup] each, the first one being group
  // `own_first` of the sequence and the next `own_stride` floats further. A row sees its own group's there.
  const float* own_keys = nullptr;
  int64_t own_first = 0, own_stride = 0;
  // Only tokens of the segment [from, to) are looked at. With `partial`, what they give is left unnormalized for
  // `merge_segments`: per (row, head) value_dim sums, then the maximum and the sum of weights.
  int64_t from = 0, to = INT64_MAX;
  float* partial = nullptr;
  int64_t partial_stride = 0;  // floats between (row, head) pairs' partials
};

// Contexts are cut at multiples of this, whoever computes them and in whatever chunks, so that long ones can be shared out
// among threads and every cut gives the same bits.
constexpr int64_t kSegment = 512;

struct Kernels {
  const char* name;
  // x[k] -> groups of 32 (k padded with zeros to whole groups). NaN or infinity in a group makes its scale NaN, so that a
  // broken row stays visibly broken.
  void (*quantize)(const float* x, int64_t k, QGroup* out);
  // `count` whole groups at x, x + stride, … into out, out + out_stride, …: what an item of a loop made of several rows.
  void (*quantize_groups)(const float* x, int64_t stride, int64_t count, QGroup* out, int64_t out_stride);
  // out[row * ldo + output] for the 16 outputs of each of `tiles` tiles from `tile` on and `rows` rows. Each (row, output) is
  // accumulated over groups in ascending order whatever `rows` and `tiles` are: a row's result does not depend on its batch mates.
  void (*gemm_q)(const Matrix& m, int64_t tile, int64_t tiles, const QRows& x, int64_t row0, int64_t rows, float* out, int64_t ldo);
  // The same with float activations (exact weights): float formats, and quantized ones dequantized on the way.
  void (*gemm_f)(const Matrix& m, int64_t tile, const float* x, int64_t ldx, int64_t rows, float* out, int64_t ldo);
  void (*rms_norm)(const float* x, const float* weight, float offset, int64_t n, float eps, float* out);
  // gate[i] = act(gate[i]) * up[i]
  void (*gated)(Activation act, float* gate, const float* up, int64_t n);
  void (*attention)(const KvPool& kv, const AttentionItem& item, float* scratch);
  // Combine the partials of one (row, head), in ascending order of segments, into out[value_dim].
  void (*merge_segments)(const float* first, int64_t stride, int64_t segments, int value_dim, const float* sink, float* out);
  // Smallest and largest of x[n]; false if something is NaN or +inf.
  bool (*extremes)(const float* x, int64_t n, float* low, float* top);
  // out[i] = exp((x[i] - top) * factor)
  void (*exponentials)(const float* x, int64_t n, float top, float factor, float* out);
  // Store keys [kv_heads * head_dim] and values of one token at (block, offset). Not for u4 (see kv4.h).
  void (*store_kv)(const KvPool& kv, int64_t block, int offset, const float* k, const float* v);
};

// Scratch that `attention` needs, in floats: scores of a segment for at most kMostPairs (row, head) pairs, and their queries
// if these have no more dimensions than the stride.
constexpr int kMostPairs = 24;
constexpr int64_t kScoreStride = kSegment + 48, kQueryStride = 256 + 16;
constexpr int64_t kAttentionScratch = kMostPairs * (kScoreStride + kQueryStride);

const Kernels* kernels_scalar();
const Kernels* kernels_avx2();     // null where not compiled in
const Kernels* kernels_avxvnni();
const Kernels* kernels_avx512();   // AVX-512 F/BW/VL/DQ + VNNI
const Kernels* kernels_avx512bf16();  // the same and BF16
const Kernels* kernels_neon();     // dot product extension
// Of any machine, the fastest first; null where not compiled in.
inline std::array<const Kernels*, 6> kernel_sets() {
  return {kernels_avx512bf16(), kernels_avx512(), kernels_avxvnni(), kernels_avx2(), kernels_neon(), kernels_scalar()};
}

// Best for this machine, or the one called `name`; null if it cannot run here.
const Kernels* select_kernels(const char* name);

}  // namespace headrace
