// Attention of one item, for every type of keys and values. Included after an isa_*.h, in namespace HR_ISA.
#pragma once
#include <algorithm>
#include <limits>
#include <type_traits>

#include "exponential.h"
#include "kernels.h"

namespace headrace::HR_ISA {

// Vectors of tokens or of dimensions that few pairs take at a time: several where registers hold all sums, or where one pair's products
// would wait for each other.
template <int R>
constexpr int kAtOnce = kSums >= 16 || R == 1 ? 4 : 1;

template <KvType T>
inline F load_kv(const uint8_t* p, int64_t element) {
  if constexpr (T == KvType::f16) return load_f16(p + element * 2);
  if constexpr (T == KvType::f32) return load((const float*)p + element);
  if constexpr (T == KvType::e4m3) return load_e4m3(p + element);
  if constexpr (T == KvType::u4) return load_u4(p + element / 2);
  return load_s8(p + element);
}

// Scores of R (row, head) pairs over B times 16 tokens: few rows need several vectors of tokens in flight, or each product
// would wait for the one before it.
template <KvType T, int R, int B>
static void score_blocks(const uint8_t* const* keys, int block_tokens, int head_dim, const float* const* q, F* s) {
  F acc[R * B];
#pragma GCC unroll 32
  for (auto& a : acc) a = zero();
  for (int d = 0; d < head_dim; d++) {
    F k[B];
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) k[b] = load_kv<T>(keys[b], (int64_t)d * block_tokens);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const F v = set1(q[r][d]);
#pragma GCC unroll 4
      for (int b = 0; b < B; b++) acc[b * R + r] = fma(k[b], v, acc[b * R + r]);
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < R * B; i++) s[i] = acc[i];
}

// The same for the many pairs of a prompt, whose queries were copied to one place: then a register holds all their addresses.
template <KvType T, int R>
static void score_many(const uint8_t* keys, int block_tokens, int head_dim, const float* q, F* s) {
  F acc[R];
#pragma GCC unroll 32
  for (auto& a : acc) a = zero();
  for (int d = 0; d < head_dim; d++) {
    const F k = load_kv<T>(keys, (int64_t)d * block_tokens);
#pragma GCC unroll 32
    for (int r = 0; r < R; r++) acc[r] = fma(k, set1(q[r * kQueryStride + d]), acc[r]);
  }
#pragma GCC unroll 32
  for (int r = 0; r < R; r++) s[r] = acc[r];
}

// Scores of R pairs over B times 16 tokens whose keys are bf16, two dimensions at a time. `q`: the queries' pairs of dimensions, S apart.
template <int R, int B, int64_t S>
static void score_pairs(const uint8_t* const* keys, int block_tokens, int head_dim, const float* q, F* s) {
  F acc[R * B];
#pragma GCC unroll 32
  for (auto& a : acc) a = zero();
  for (int d = 0; d < head_dim / 2; d++) {
    P k[B];
    for (int b = 0; b < B; b++) k[b] = load_pairs(keys[b] + (int64_t)d * block_tokens * 4);
#pragma GCC unroll 32
    for (int r = 0; r < R; r++) {
      const P v = set_pairs(q + r * S + d);
      for (int b = 0; b < B; b++) acc[b * R + r] = dot2(k[b], v, acc[b * R + r]);
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < R * B; i++) s[i] = acc[i];
}

// Scores of R pairs over the 16 tokens whose u4 keys begin at `keys`, of one group with these steps and minima per channel.
template <int R>
static void score_coded(const uint8_t* keys, int block_tokens, int head_dim, const float* steps, const float* minima, const float* const* q, F* s) {
  for (int r = 0; r < R; r++) s[r] = zero();
  for (int d = 0; d < head_dim; d++) {
    const F k = fma(load_u4(keys + (int64_t)d * block_tokens / 2), set1(steps[d]), set1(minima[d]));
    for (int r = 0; r < R; r++) s[r] = fma(k, set1(q[r][d]), s[r]);
  }
}

// out[r][dims] = (base[r] + sum over tokens [from, to) of p[r][t] * V[t]) * factor[r] for R rows, N vectors of 16 dims at a
// time. Each row adds its tokens in ascending order, whoever its mates are; where it does not see a token that they see, its
// weight is zero, which changes no bit of a finite sum.
template <KvType T, int R, int N>
static void mix_rows(const KvPool& kv, const AttentionItem& it, int64_t from, int64_t to, const float* p, const float* base, const float* factor, float* const* out) {
  const int bt = kv.block_tokens, dv = kv.value_dim;
  for (int dim = 0; dim < dv; dim += 16 * N) {
    F acc[R * N];
#pragma GCC unroll 32
    for (int i = 0; i < R * N; i++) acc[i] = set1(base[i / N]);
    for (int64_t t = from; t < to;) {
      const int64_t block = t / bt;
      const int64_t end = std::min<int64_t>(to, (block + 1) * bt);
      const uint8_t* values = kv.values(it.table[block], it.head);
      if (R <= 4 && end < to && dim == 0) {
        const uint8_t* next = kv.values(it.table[block + 1], it.head);
        for (int64_t i = 0; i < kv.bytes((int64_t)bt * dv); i += 64) __builtin_prefetch(next + i);
      }
      for (; t < end; t++) {
        F v[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) v[n] = load_kv<T>(values, (t - block * bt) * dv + dim + n * 16);
#pragma GCC unroll 32
        for (int r = 0; r < R; r++) {
          const F w = set1(p[r * kScoreStride + t]);
#pragma GCC unroll 4
          for (int n = 0; n < N; n++) acc[r * N + n] = fma(w, v[n], acc[r * N + n]);
        }
      }
    }
#pragma GCC unroll 32
    for (int r = 0; r < R; r++)
      for (int n = 0; n < N; n++) store(out[r] + dim + n * 16, mul(acc[r * N + n], set1(factor[r])));
  }
}

// The same of bf16 values, two tokens at a time. `p`: weights as bf16; of a token that nobody sees the value is taken as zero.
template <int R, int N>
static void mix_pairs(const KvPool& kv, const AttentionItem& it, int64_t from, int64_t to, const uint16_t* p, const float* factor, float* const* out) {
  const int bt = kv.block_tokens, dv = kv.value_dim;
  for (int dim = 0; dim < dv; dim += 16 * N) {
    F acc[R * N];
#pragma GCC unroll 32
    for (auto& a : acc) a = zero();
    for (int64_t t = from / 2 * 2; t < to;) {
      const int64_t block = t / bt;
      const int64_t end = std::min<int64_t>(to, (block + 1) * bt);
      const uint8_t* values = kv.values(it.table[block], it.head) + dim * 4 - block * bt * dv * 2;
      if (R <= 4 && end < to && dim == 0) {
        const uint8_t* next = kv.values(it.table[block + 1], it.head);
        for (int64_t i = 0; i < kv.bytes((int64_t)bt * dv); i += 64) __builtin_prefetch(next + i);
      }
      for (; t < end; t += 2) {
        P v[N];
        for (int n = 0; n < N; n++) v[n] = load_pairs(values + t * dv * 2 + n * 64);
        if (t < from)
          for (auto& x : v) x = mask_pairs(x, 0xffff0000u);
        else if (t + 1 == to)
          for (auto& x : v) x = mask_pairs(x, 0x0000ffffu);
#pragma GCC unroll 32
        for (int r = 0; r < R; r++) {
          const P w = set_pairs(p + r * 2 * kScoreStride + t);
          for (int n = 0; n < N; n++) acc[r * N + n] = dot2(w, v[n], acc[r * N + n]);
        }
      }
    }
#pragma GCC unroll 32
    for (int r = 0; r < R; r++)
      for (int n = 0; n < N; n++) store(out[r] + dim + n * 16, mul(acc[r * N + n], set1(factor[r])));
  }
}

template <KvType T, int R>
static void attend(const KvPool& kv, const AttentionItem& it, int first_pair, float* scratch) {
  const float* q[R];
  float* out[R];
  int64_t lo[R], hi[R], own_group[R];  // the group: of u4 keys, that the row lies in
  int64_t start = std::numeric_limits<int64_t>::max(), stop = 0;
  int64_t common_from = it.from, common_to = it.to;  // tokens that all rows see
  for (int r = 0; r < R; r++) {
    const int row = (first_pair + r) / it.group, h = (first_pair + r) % it.group;
    const int64_t position = it.first_position + row;
    q[r] = it.q + row * it.q_stride + (int64_t)h * kv.head_dim;
    out[r] = it.out + row * it.out_stride + (int64_t)h * kv.value_dim;
    hi[r] = std::min(position + 1, it.to);
    own_group[r] = position / kKeyGroup;
    lo[r] = std::max(it.window > 0 ? std::max<int64_t>(0, position + 1 - it.window) : 0, it.from);
    if (lo[r] >= hi[r]) lo[r] = hi[r] = it.from;  // this row sees nothing of the segment
    common_from = std::max(common_from, lo[r]);
    common_to = std::min(common_to, hi[r]);
    if (lo[r] < hi[r]) {
      start = std::min(start, lo[r]);
      stop = std::max(stop, hi[r]);
    }
  }
  if (start > stop) start = stop = it.from;
  const int bt = kv.block_tokens;
  const int64_t seen = start;
  start = start / 16 * 16;
  float* const scores = scratch - start;  // of row r and token t: scores[r * kScoreStride + t]
  F top[R];
  const float minus_inf = -std::numeric_limits<float>::infinity();
  for (auto& t : top) t = set1(minus_inf);
  // The scores of 16 tokens from t on: scaled, capped, masked and kept.
  const auto keep = [&](int64_t t, const F* found, int first = 0, int last = R) {
    const bool all = t >= common_from && t + 16 <= common_to;
    for (int r = first; r < last; r++) {
      F s = found[r - first];
      if constexpr (T == KvType::s8) s = mul(s, load_f16(kv.key_scales(it.table[t / bt], it.head) + t % bt));
      if (it.softcap > 0) s = mul(set1(it.softcap), tanh(mul(s, set1(1.0f / it.softcap))));
      if (!all && (t < lo[r] || t + 16 > hi[r])) s = keep_lanes(s, (int)(lo[r] - t), (int)std::min<int64_t>(hi[r] - t, 16), minus_inf);
      store(scores + r * kScoreStride + t, s);
      top[r] = max(s, top[r]);
    }
  };
  const auto keys_at = [&](int64_t t) { return kv.keys(it.table[t / bt], it.head) + kv.bytes((T == KvType::bf16 ? 2 : 1) * (t % bt)); };
  // Blocks lie anywhere, so the hardware does not foresee the next one; few rows would wait for memory at each.
  const auto foresee = [&](int64_t t) {
    if (R > 4 || t >= stop) return;
    const uint8_t* next = kv.keys(it.table[t / bt], it.head);
    for (int64_t i = 0; i < kv.bytes((int64_t)bt * kv.head_dim); i += 64) __builtin_prefetch(next + i);
  };
  if constexpr (T == KvType::u4) {
    for (int64_t g = start / kKeyGroup; g * kKeyGroup < stop; g++) {
      bool own = false, coded = false;
      for (int r = 0; r < R; r++) {
        own |= g == own_group[r];
        coded |= g < own_group[r];
      }
      float steps[1024], minima[1024];
      const int32_t block = it.table[g * kKeyGroup / bt];
      if (coded) {
        foresee((g + 1) * kKeyGroup);
        const uint16_t* scales = kv.group_scales(block, (int)(g % (bt / kKeyGroup)), it.head);
        for (int d = 0; d < kv.head_dim; d += 16) {
          store(steps + d, load_f16(scales + d));
          store(minima + d, load_f16(scales + kv.head_dim + d));
        }
      }
      for (int64_t t = std::max(start, g * kKeyGroup); t < std::min(stop, (g + 1) * kKeyGroup); t += 16) {
        F s[R], o[R];
        for (auto& x : s) x = zero();
        if (coded) score_coded<R>(keys_at(t), bt, kv.head_dim, steps, minima, q, s);
        if (own) {
          const uint8_t* keys[1] = {(const uint8_t*)(it.own_keys + (g - it.own_first) * it.own_stride + t % kKeyGroup)};
          score_blocks<KvType::f32, R, 1>(keys, kKeyGroup, kv.head_dim, q, o);
          for (int r = 0; r < R; r++)
            if (g == own_group[r]) s[r] = o[r];
        }
        keep(t, s);
      }
    }
  } else if constexpr (T == KvType::bf16) {
    constexpr int64_t S = R > 8 ? kQueryStride : 512;
    static_assert(R * (kScoreStride + S) <= kAttentionScratch);
    float* const queries = scratch + R * kScoreStride;
    for (int r = 0; r < R; r++)
      for (int d = 0; d < kv.head_dim; d += 16) store_bf16(queries + r * S + d / 2, load(q[r] + d));
    // Where registers allow two vectors of tokens, so that each load of a query serves both.
    constexpr int B = R <= 4 ? 4 : kPairSums >= 16 ? 2 : 1, H = R > 8 ? kPairSums / B : std::min(R, kPairSums);
    int64_t t = start;
    for (; t + 16 * (B - 1) < stop; t += 16 * B) {
      const uint8_t* keys[B];
      for (int b = 0; b < B; b++) {
        keys[b] = keys_at(t + 16 * b);
        foresee(t + 16 * (b + B));
      }
      for (int r = 0; r < R; r += H) {
        F s[H * B];
        score_pairs<H, B, S>(keys, bt, kv.head_dim, queries + r * S, s);
        for (int b = 0; b < B; b++) keep(t + 16 * b, s + b * H, r, r + H);
      }
    }
    if constexpr (B > 1)
      for (; t < stop; t += 16) {
        const uint8_t* keys[1] = {keys_at(t)};
        F s[R];
        score_pairs<R, 1, S>(keys, bt, kv.head_dim, queries, s);
        keep(t, s);
      }
  } else if constexpr (R > 8) {
    float* const queries = scratch + R * kScoreStride;
    for (int r = 0; r < R; r++) std::memcpy(queries + r * kQueryStride, q[r], kv.head_dim * sizeof(float));
    for (int64_t t = start; t < stop; t += 16) {
      F s[R];
      for (int r = 0; r < R; r += kSums) score_many<T, kSums>(keys_at(t), bt, kv.head_dim, queries + r * kQueryStride, s + r);
      keep(t, s);
    }
  } else {
    constexpr int B = R <= 4 ? kAtOnce<R> : 1, H = R > kSums ? R / 2 : R;
    int64_t t = start;
    for (; t + 16 * (B - 1) < stop; t += 16 * B) {
      const uint8_t* keys[B];
      for (int b = 0; b < B; b++) {
        keys[b] = keys_at(t + 16 * b);
        foresee(t + 16 * (b + B));
      }
      for (int r = 0; r < R; r += H) {
        F s[H * B];
        score_blocks<T, H, B>(keys, bt, kv.head_dim, q + r, s);
        for (int b = 0; b < B; b++) keep(t + 16 * b, s + b * H, r, r + H);
      }
    }
    if constexpr (B > 1)
      for (; t < stop; t += 16) {
        const uint8_t* keys[1] = {keys_at(t)};
        F s[R];
        score_blocks<T, R, 1>(keys, bt, kv.head_dim, q, s);
        keep(t, s);
      }
  }
  float factor[R], base[R];  // base: what a row's u4 values have in common
  for (int r = 0; r < R; r++) {
    float* const p = scores + r * kScoreStride;
    const float m = max_lanes(top[r]);
    F low = zero();
    const F mv = set1(m);
    F sum = zero();
    uint16_t* const weights = (uint16_t*)(scratch + r * kScoreStride) - start;  // bf16, written over scores that were read
    // From this row's own first vector on, so that the sum does not depend on the rows beside it.
    const int64_t first = std::max(start, lo[r] / 16 * 16);
    int64_t t = start;
    const auto none = [&](int64_t t) {
      if constexpr (T == KvType::bf16)
        store_bf16(weights + t, zero());
      else
        store(p + t, zero());
    };
    const F shift = set1(-m * 1.44269504f);
    for (; t < first; t += 16) none(t);
    for (; t < hi[r]; t += 16) {
      if constexpr (T == KvType::bf16) {
        F e = exp2_coarse(fma(load(p + t), set1(1.44269504f), shift));
        if (t < lo[r] || t + 16 > hi[r]) e = keep_lanes(e, (int)(lo[r] - t), (int)std::min<int64_t>(hi[r] - t, 16), 0.0f);
        sum = add(sum, e);
        store_bf16(weights + t, e);
        continue;
      }
      F e = exp_falling(sub(load(p + t), mv));
      sum = add(sum, e);
      if constexpr (T == KvType::s8 || T == KvType::u4) {
        // What lies there for a token that the row does not see may be anyone's, and zero times it not zero.
        const auto own = [&](F x) {
          return t < lo[r] || t + 16 > hi[r] ? keep_lanes(x, (int)(lo[r] - t), (int)std::min<int64_t>(hi[r] - t, 16), 0.0f) : x;
        };
        const uint16_t* scales = kv.value_scales(it.table[t / bt], it.head) + t % bt;
        if constexpr (T == KvType::u4) low = add(low, own(mul(e, load_f16(scales + bt))));
        e = own(mul(e, load_f16(scales)));
      }
      store(p + t, e);
    }
    for (; t < stop; t += 16) none(t);
    const float total = sum_lanes(sum);
    base[r] = T == KvType::u4 ? sum_lanes(low) : 0.0f;
    if (it.partial != nullptr) {
      float* target = it.partial + (first_pair + r) * it.partial_stride;
      out[r] = target;
      target[kv.value_dim] = m;
      target[kv.value_dim + 1] = total;
      factor[r] = 1.0f;
    } else {
      const float* sink = it.sinks == nullptr ? nullptr : it.sinks + (first_pair + r) % it.group;
      factor[r] = 1.0f / (sink == nullptr ? total : total + exponential(*sink - m));
    }
  }
  const auto mix = [&](auto rows, auto vectors) {
    constexpr int M = decltype(rows)::value, N = decltype(vectors)::value;
    for (int r = 0; r < R; r += M)
      if constexpr (T == KvType::bf16)
        mix_pairs<M, N>(kv, it, seen, stop, (const uint16_t*)(scratch + r * kScoreStride) - start, factor + r, out + r);
      else
        mix_rows<T, M, N>(kv, it, seen, stop, scores + r * kScoreStride, base + r, factor + r, out + r);
  };
  using std::integral_constant;
  if constexpr (R > 8) {
    constexpr int sums = T == KvType::bf16 ? kPairSums : kSums, vectors = sums >= 16 ? 2 : 1;
    if (kv.value_dim % (16 * vectors) == 0) return mix(integral_constant<int, sums / vectors>{}, integral_constant<int, vectors>{});
  }
  constexpr int few = std::min(R, 4);
  if (kv.value_dim % (16 * kAtOnce<few>) == 0)
    mix(integral_constant<int, few>{}, integral_constant<int, kAtOnce<few>>{});
  else
    mix(integral_constant<int, few>{}, integral_constant<int, 1>{});
}

template <KvType T>
static void attention_of(const KvPool& kv, const AttentionItem& it, float* scratch) {
  const int pairs = it.rows * it.group;
  int i = 0;
  if constexpr (kManyPairs > 8 && T != KvType::u4)
    if (kv.head_dim <= kQueryStride)
      for (; i + kManyPairs <= pairs; i += kManyPairs) attend<T, kManyPairs>(kv, it, i, scratch);
  for (; i + 8 <= pairs; i += 8) attend<T, 8>(kv, it, i, scratch);
  for (; i + 4 <= pairs; i += 4) attend<T, 4>(kv, it, i, scratch);
  for (; i + 3 <= pairs; i += 3) attend<T, 3>(kv, it, i, scratch);
  for (; i < pairs; i++) attend<T, 1>(kv, it, i, scratch);
}

}  // namespace headrace::HR_ISA
