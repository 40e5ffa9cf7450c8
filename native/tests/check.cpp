// What can be checked without Python, so that it runs under sanitizers, emulators and on machines that have nothing else:
// every kernel set of this machine against the scalar one, whole models in random steps on many threads, the pool itself.
// Prints what it ran; exits with 1 at the first difference.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sched.h>
#endif

#include "model.h"
#include "pack.h"
#include "sample.h"

using namespace headrace;

namespace {
std::mt19937 rng(1);
std::normal_distribution<float> bell(0, 1);

float normal() { return bell(rng); }
int64_t between(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(rng); }
std::vector<float> normals(size_t n, float scale = 1) {
  std::vector<float> v(n);
  for (float& x : v) x = normal() * scale;
  return v;
}

void fail(const char* what, const char* kernels, double found, double expected) {
  std::printf("FAILED %s (%s): %.9g where %.9g belongs\n", what, kernels, found, expected);
  std::exit(1);
}
void near(const char* what, const char* kernels, const float* found, const float* expected, size_t n, double relative, double absolute) {
  for (size_t i = 0; i < n; i++)
    if (!(std::fabs((double)found[i] - expected[i]) <= absolute + relative * std::fabs(expected[i]))) fail(what, kernels, found[i], expected[i]);
}
void same(const char* what, const char* kernels, const float* found, const float* expected, size_t n) {
  for (size_t i = 0; i < n; i++)
    if (std::memcmp(found + i, expected + i, 4) != 0) fail(what, kernels, found[i], expected[i]);
}

std::vector<const Kernels*> runnable_sets() {
  std::vector<const Kernels*> found;
  for (const Kernels* k : kernel_sets())
    if (k != nullptr && select_kernels(k->name) == k) found.push_back(k);
  return found;
}

const Format kFormats[] = {{Codes::f32, Scales::none, 0},  {Codes::f16, Scales::none, 0},  {Codes::bf16, Scales::none, 0}, {Codes::u4, Scales::plain, 8},
                           {Codes::u4, Scales::min, 0},    {Codes::u5, Scales::plain, 16}, {Codes::u5, Scales::min, 0},    {Codes::s8, Scales::plain, 0},
                           {Codes::u4, Scales::kmin, 0},   {Codes::u5, Scales::kmin, 0},   {Codes::u6, Scales::k16, 32}};

// A matrix of random codes with finite scales.
struct Made {
  std::vector<uint8_t> bytes;
  Matrix m;
};
Made random_matrix(Format f, int64_t n, int64_t k) {
  Made made;
  made.m = shape(f, n, k);
  made.bytes.resize(made.m.bytes());
  for (auto& b : made.bytes) b = (uint8_t)rng();
  made.m.data = made.bytes.data();
  uint8_t* base = made.bytes.data();
  const auto put = [](uint8_t* p, float v) {
    const uint16_t h = float_to_half(v);
    std::memcpy(p, &h, 2);
  };
  for (int64_t t = 0; t < made.m.tiles; t++) {
    uint8_t* tile = base + t * made.m.tile_bytes;
    if (!made.m.quantized()) {
      for (int64_t i = 0; i < made.m.groups * kGroup * kTile; i++) {
        const float v = normal();
        if (f.codes == Codes::f32) std::memcpy(tile + 4 * i, &v, 4);
        if (f.codes == Codes::f16) put(tile + 2 * i, v);
        if (f.codes == Codes::bf16) std::memcpy(tile + 2 * i, (const uint8_t*)&v + 2, 2);
      }
      continue;
    }
    for (int64_t g = 0; g < made.m.groups; g++) {
      uint8_t* s = tile + (made.m.group(tile, g) - tile);
      uint8_t* top = tile + (made.m.super(tile, g) - tile);
      for (int lane = 0; lane < kTile; lane++) {
        if (f.scales == Scales::plain || f.scales == Scales::min) put(s + 2 * lane, normal() * 0.02f);
        if (f.scales == Scales::min) put(s + 32 + 2 * lane, normal() * 0.1f);
        if (f.scales == Scales::kmin || f.scales == Scales::k16) put(top + 2 * lane, normal() * 0.001f);
        if (f.scales == Scales::kmin) put(top + 32 + 2 * lane, normal() * 0.001f);
      }
    }
  }
  return made;
}

void products(const Kernels& k, const Kernels& reference) {
  for (const Format& f : kFormats)
    for (const int64_t width : {32, 256, 576, 300}) {
      if (f.scales >= Scales::kmin && width % 256 != 0) continue;
      const int64_t rows = between(1, 50);
      const int64_t tiles = between(1, 5);  // at once, two at a time or not
      const Made a = random_matrix(f, tiles * kTile, width);
      const auto x = normals(rows * width);
      const int64_t groups = a.m.groups;
      std::vector<QGroup> q(rows * groups), expected_q(rows * groups);
      const QRows qr{rows, groups, q.data(), {}};
      for (int64_t r = 0; r < rows; r++) {
        k.quantize(x.data() + r * width, width, qr.row(r));
        reference.quantize(x.data() + r * width, width, expected_q.data() + r * groups);
      }
      // `paired` is there only for sets that use it; products show whether it is right.
      for (int64_t i = 0; i < rows * groups; i++)
        if (std::memcmp(&q[i], &expected_q[i], offsetof(QGroup, paired)) != 0) fail("quantize", k.name, 0, 0);
      const bool broken_too = between(0, 1) == 1;  // what is not finite spoils its own group alone
      auto other = x;
      if (broken_too) other[between(0, rows - 1) * width] = std::numeric_limits<float>::infinity();
      std::vector<QGroup> column(rows * groups);
      for (int64_t g = 0; g < width / kGroup; g++) k.quantize_groups(other.data() + g * kGroup, width, rows, column.data() + g, groups);
      for (int64_t i = 0; i < rows * groups; i++) {
        if (i % groups >= width / kGroup) continue;
        const bool spoilt = !std::isfinite(other[i / groups * width + i % groups * kGroup]);
        if (spoilt ? column[i].scale == column[i].scale : std::memcmp(&column[i], &q[i], sizeof(QGroup)) != 0) fail("quantize a column", k.name, column[i].scale, q[i].scale);
      }
      std::vector<float> found(rows * kTile), expected(rows * kTile), alone(kTile), together(rows * tiles * kTile);
      if (a.m.quantized()) k.gemm_q(a.m, 0, tiles, qr, 0, rows, together.data(), tiles * kTile);
      for (int64_t t = 0; t < a.m.tiles; t++) {
        for (const bool exact : {false, true}) {
          if (!exact && !a.m.quantized()) continue;
          if (exact) {
            k.gemm_f(a.m, t, x.data(), width, rows, found.data(), kTile);
            reference.gemm_f(a.m, t, x.data(), width, rows, expected.data(), kTile);
          } else {
            k.gemm_q(a.m, t, 1, qr, 0, rows, found.data(), kTile);
            reference.gemm_q(a.m, t, 1, qr, 0, rows, expected.data(), kTile);
          }
          same("product", k.name, found.data(), expected.data(), found.size());
          const int64_t r = between(0, rows - 1);
          if (exact)
            k.gemm_f(a.m, t, x.data() + r * width, width, 1, alone.data(), kTile);
          else
            k.gemm_q(a.m, t, 1, qr, r, 1, alone.data(), kTile);
          for (int64_t i = 0; !exact && i < rows; i++)
            same("product of several tiles", k.name, together.data() + (i * tiles + t) * kTile, found.data() + i * kTile, kTile);
          same("product of one row", k.name, alone.data(), found.data() + r * kTile, kTile);
        }
      }
    }
}

void row_operations(const Kernels& k, const Kernels& reference) {
  for (const int64_t n : {1, 15, 16, 17, 64, 100, 576}) {
    const auto x = normals(n, 3), w = normals(n);
    std::vector<float> a(n), b(n);
    k.rms_norm(x.data(), w.data(), 1.0f, n, 1e-6f, a.data());
    reference.rms_norm(x.data(), w.data(), 1.0f, n, 1e-6f, b.data());
    same("norm", k.name, a.data(), b.data(), n);
    for (int act = 0; act < 5; act++) {
      a = b = x;
      k.gated((Activation)act, a.data(), w.data(), n);
      reference.gated((Activation)act, b.data(), w.data(), n);
      same("activation", k.name, a.data(), b.data(), n);
    }
    k.exponentials(x.data(), n, 2.0f, 0.7f, a.data());
    for (int64_t i = 0; i < n; i++) b[i] = std::exp((x[i] - 2.0f) * 0.7f);
    near("exponential", k.name, a.data(), b.data(), n, 1e-6, 1e-30);
    float low, top;
    if (!k.extremes(x.data(), n, &low, &top)) fail("extremes", k.name, 0, 1);
    if (top != *std::max_element(x.begin(), x.end()) || low != *std::min_element(x.begin(), x.end())) fail("extremes", k.name, top, low);
    auto bad = x;
    for (const float wrong : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      bad[between(0, n - 1)] = wrong;
      if (k.extremes(bad.data(), n, &low, &top)) fail("extremes of what is not finite", k.name, 1, 0);
    }
  }
}

// One KV head's attention by its definition, in double, from what was stored in fp32.
void attend_plainly(const AttentionItem& a, int head_dim, int value_dim, const std::vector<float>& keys, const std::vector<float>& values, std::vector<double>& out) {
  out.assign(a.rows * a.group * value_dim, 0);
  for (int i = 0; i < a.rows * a.group; i++) {
    const int row = i / a.group, h = i % a.group;
    const int64_t position = a.first_position + row, first = a.window > 0 ? std::max<int64_t>(0, position + 1 - a.window) : 0;
    std::vector<double> weights;
    double top = -std::numeric_limits<double>::infinity(), total = 0;
    for (int64_t t = first; t <= position; t++) {
      double s = 0;
      for (int d = 0; d < head_dim; d++) s += (double)a.q[row * a.q_stride + h * head_dim + d] * keys[t * head_dim + d];
      if (a.softcap > 0) s = a.softcap * std::tanh(s / a.softcap);
      weights.push_back(s);
      top = std::max(top, s);
    }
    for (double& w : weights) total += w = std::exp(w - top);
    if (a.sinks != nullptr) total += std::exp((double)a.sinks[h] - top);
    for (size_t t = 0; t < weights.size(); t++)
      for (int d = 0; d < value_dim; d++) out[i * value_dim + d] += weights[t] / total * values[(first + t) * value_dim + d];
  }
}

// The kernel itself: all cache types but u4 (whose own keys a model stages), dimensions, groups, windows, caps, sinks, and
// contexts of several segments, whose parts are merged; the scalar set's bits, and with fp32 the definition.
void attentions(const Kernels& k, const Kernels& reference) {
  for (int round = 0; round < 60; round++) {
    KvPool kv;
    kv.type = round % 5 == 4 ? KvType::bf16 : (KvType)(round % 5);
    kv.block_tokens = 16 * (int)between(1, 2);
    kv.kv_heads = (int)between(1, 3);
    kv.head_dim = 16 * (int)between(1, 9);
    kv.value_dim = 16 * (int)between(1, 9);
    if (round % 7 == 0) kv.head_dim = kv.value_dim = 64;
    if (round == 30 || round == 34) kv.head_dim = 512;  // more than the copy of the queries holds
    kv.block_stride = kv.block_bytes() + 64 * between(0, 3);
    AttentionItem a;
    a.group = (int)between(1, 5);
    a.rows = (int)between(1, 16);
    a.first_position = between(0, round % 3 == 0 ? 700 : 100);
    a.window = round % 2 == 0 ? 0 : between(1, 600);
    a.softcap = round % 6 == 1 ? 3.0f : 0.0f;
    a.head = (int)between(0, kv.kv_heads - 1);
    const int64_t tokens = a.first_position + a.rows, blocks = (tokens + kv.block_tokens - 1) / kv.block_tokens;
    std::vector<int32_t> table(blocks);
    for (int64_t i = 0; i < blocks; i++) table[i] = (int32_t)i;
    std::shuffle(table.begin(), table.end(), rng);
    a.table = table.data();
    std::vector<uint8_t> pool(blocks * kv.block_stride, 0xff), other = pool;
    std::vector<float> own_keys, own_values;
    for (int64_t t = 0; t < tokens; t++) {
      const auto key = normals(kv.kv_heads * kv.head_dim), value = normals(kv.kv_heads * kv.value_dim);
      kv.base = pool.data();
      k.store_kv(kv, table[t / kv.block_tokens], (int)(t % kv.block_tokens), key.data(), value.data());
      kv.base = other.data();
      reference.store_kv(kv, table[t / kv.block_tokens], (int)(t % kv.block_tokens), key.data(), value.data());
      own_keys.insert(own_keys.end(), key.begin() + a.head * kv.head_dim, key.begin() + (a.head + 1) * kv.head_dim);
      own_values.insert(own_values.end(), value.begin() + a.head * kv.value_dim, value.begin() + (a.head + 1) * kv.value_dim);
    }
    if (pool != other) fail("stored keys and values", k.name, 0, 0);
    const auto q = normals(a.rows * a.group * kv.head_dim, 1.0f / std::sqrt((float)kv.head_dim)), sinks = normals(a.group);
    a.q = q.data();
    a.q_stride = a.group * kv.head_dim;
    a.out_stride = a.group * kv.value_dim;
    if (round % 4 >= 2) a.sinks = sinks.data();
    const int64_t first = a.window > 0 ? std::max<int64_t>(0, a.first_position + 1 - a.window) / kSegment : 0;
    const int64_t segments = (tokens - 1) / kSegment - first + 1, width = kv.value_dim + 16;
    const int pairs = a.rows * a.group;
    const auto whole = [&](const Kernels& set) {
      std::vector<float> out(pairs * kv.value_dim), scratch(kAttentionScratch, std::nanf("")), partial(pairs * segments * width);
      AttentionItem item = a;
      item.out = out.data();
      for (int64_t s = first; s < first + segments; s++) {
        item.from = s * kSegment;
        item.to = item.from + kSegment;
        item.partial = segments > 1 ? partial.data() + (s - first) * width : nullptr;
        item.partial_stride = segments * width;
        set.attention(kv, item, scratch.data());
      }
      for (int i = 0; segments > 1 && i < pairs; i++)
        set.merge_segments(partial.data() + i * segments * width, width, segments, kv.value_dim, a.sinks == nullptr ? nullptr : a.sinks + i % a.group,
                           out.data() + i * kv.value_dim);
      return out;
    };
    const auto found = whole(k), expected = whole(reference);
    same("attention", k.name, found.data(), expected.data(), found.size());
    if (kv.type != KvType::f32 && kv.type != KvType::bf16) continue;
    std::vector<double> exact;
    attend_plainly(a, kv.head_dim, kv.value_dim, own_keys, own_values, exact);
    const std::vector<float> rounded(exact.begin(), exact.end());
    near("attention against its definition", k.name, found.data(), rounded.data(), found.size(), kv.type == KvType::f32 ? 1e-4 : 0.03, kv.type == KvType::f32 ? 1e-5 : 0.03);
  }
  // More segments than a merge keeps factors of.
  const int64_t segments = 80, width = 48;
  auto partial = normals(segments * width);
  for (int64_t s = 0; s < segments; s++) partial[s * width + 33] = 1.0f + std::fabs(partial[s * width + 33]);
  std::vector<float> found(32), expected(32);
  const float sink = 0.5f;
  k.merge_segments(partial.data(), width, segments, 32, &sink, found.data());
  reference.merge_segments(partial.data(), width, segments, 32, &sink, expected.data());
  same("merge of many segments", k.name, found.data(), expected.data(), 32);
}

// What a network has beside plain layers.
struct Traits {
  const char* name;
  Format first{Codes::u4, Scales::min, 0}, second{Codes::s8, Scales::plain, 0};  // of its matrices
  bool exact_activations = false, softcap = false, sinks = false, bias = false, post_norms = false, interleaved = false;
  int qk_norm = 0;  // 1: each head, 2: all heads together
  Activation activation = Activation::silu;
};
const Traits kPlainly{"plain"};
const Traits kTraits[] = {
    {"fp16", {Codes::f16, Scales::none, 0}, {Codes::f16, Scales::none, 0}, false, true, false, true, false, false, 0, Activation::gelu_tanh},
    {"bf16 and 8-bit", {Codes::bf16, Scales::none, 0}, {Codes::s8, Scales::plain, 0}, false, false, true, false, true, true, 1, Activation::relu2},
    {"fp32", {Codes::f32, Scales::none, 0}, {Codes::f32, Scales::none, 0}, false, true, true, true, true, false, 2, Activation::gelu},
    {"exact activations", {Codes::u4, Scales::min, 0}, {Codes::u5, Scales::plain, 16}, true, false, false, true, false, true, 1, Activation::relu},
    {"capped, with sinks and norms", {Codes::u5, Scales::min, 0}, {Codes::s8, Scales::plain, 0}, false, true, true, true, true, true, 2, Activation::silu},
};

// A small random model, its weights and its cache.
struct Network {
  std::vector<std::unique_ptr<Made>> matrices;
  std::vector<std::vector<float>> vectors;
  std::vector<uint8_t> pool;
  std::vector<float> staging;
  static constexpr int kSlots = 4;
  std::unique_ptr<Model> model;
  int vocab = 70, hidden = 64, head_dim = 32, blocks = 300;

  Matrix matrix(Format f, int64_t n, int64_t k) {
    matrices.push_back(std::make_unique<Made>(random_matrix(f, n, k)));
    return matrices.back()->m;
  }
  const float* vector(int64_t n) {
    vectors.push_back(normals(n));
    return vectors.back().data();
  }
  Network(const Kernels* k, int threads, KvType kv, bool experts, unsigned seed, const Traits& traits = kPlainly) {
    rng.seed(seed);
    bell.reset();  // it keeps every second value
    ModelConfig c;
    c.hidden = hidden;
    c.vocab = vocab;
    c.exact_activations = traits.exact_activations;
    c.activation = traits.activation;
    if (traits.softcap) c.logit_softcap = 5;
    model = std::make_unique<Model>(c, k, std::make_shared<Pool>(threads));
    const Format four = traits.first, eight = traits.second, plain{Codes::f32, Scales::none, 0};
    for (int i = 0; i < 2; i++) {
      LayerWeights l;
      l.heads = 4;
      l.kv_heads = 2;
      l.head_dim = l.value_dim = head_dim;
      l.scale = 0.1f;
      l.window = i == 0 ? 0 : 530;
      l.rope = 0;
      l.rope_dim = head_dim;
      l.slot = i;
      l.qkv.parts = {matrix(four, 128, hidden), matrix(four, 64, hidden), matrix(eight, 64, hidden)};
      l.out.parts = {matrix(four, hidden, 128)};
      l.rope_interleaved = traits.interleaved;
      if (traits.softcap) l.softcap = 2;
      if (traits.sinks) l.sinks = vector(4);
      if (traits.qk_norm > 0) {
        l.full_qk_norm = traits.qk_norm == 2;
        l.q_norm = vector(l.full_qk_norm ? 128 : head_dim);
        l.k_norm = vector(l.full_qk_norm ? 64 : head_dim);
      }
      if (traits.bias) {
        l.qkv.bias = vector(256);
        l.out.bias = vector(hidden);
        l.gate_up.bias = vector(200);
        l.down.bias = vector(hidden);
      }
      if (traits.post_norms) {
        l.post_attention_norm = vector(hidden);
        l.post_mlp_norm = vector(hidden);
      }
      l.attention_norm = vector(hidden);
      l.mlp_norm = vector(hidden);
      if (experts && i == 1) {
        l.experts.count = 5;
        l.experts.top_k = 2;
        l.experts.router = matrix(plain, 5, hidden);
        for (int e = 0; e < 5; e++) {
          l.experts.gate.push_back(matrix(four, 80, hidden));
          l.experts.up.push_back(matrix(four, 80, hidden));
          l.experts.down.push_back(matrix(eight, hidden, 80));
        }
      } else {
        l.gate_up.parts = {matrix(four, 100, hidden), matrix(four, 100, hidden)};
        l.down.parts = {matrix(eight, hidden, 100)};
      }
      model->layers.push_back(l);
    }
    model->embedding = model->head = matrix(eight, vocab, hidden);
    model->final_norm = vector(hidden);
    KvPool p;
    p.type = kv;
    p.kv_heads = 2;
    p.head_dim = p.value_dim = head_dim;
    if (kv == KvType::u4) p.block_tokens = kKeyGroup;
    p.block_stride = p.bytes(2 * p.block_tokens * 2 * head_dim) + p.scale_bytes();
    pool.assign(p.block_stride * blocks * 2, 0xff);  // NaN, should anything be read that was not written
    for (int s = 0; s < 2; s++) {
      p.base = pool.data() + s * blocks * p.block_stride;
      model->kv.push_back(p);
    }
    model->kv_blocks = blocks;
    staging.assign(2 * kSlots * p.kv_heads * head_dim * kKeyGroup, std::nanf(""));
    model->staging = staging.data();
    model->staging_slots = kSlots;
  }

  struct Chunk {
    int sequence;
    int64_t start;
    std::vector<int32_t> tokens;
  };
  std::vector<float> step(const std::vector<Chunk>& chunks, const std::vector<std::vector<int32_t>>& tables) {
    std::vector<int32_t> tokens, starts{0}, context, table, outputs;
    std::vector<float> cos, sin;
    const int64_t width = (int64_t)tables[0].size();
    for (const auto& c : chunks) {
      for (size_t i = 0; i < c.tokens.size(); i++)
        for (int d = 0; d < head_dim / 2; d++) {
          const double angle = (double)(c.start + i) / std::pow(10000.0, 2.0 * d / head_dim);
          cos.push_back((float)std::cos(angle));
          sin.push_back((float)std::sin(angle));
        }
      tokens.insert(tokens.end(), c.tokens.begin(), c.tokens.end());
      starts.push_back((int32_t)tokens.size());
      context.push_back((int32_t)c.start);
      table.insert(table.end(), tables[c.sequence].begin(), tables[c.sequence].end());
    }
    for (size_t i = 0; i < tokens.size(); i++) outputs.push_back((int32_t)i);
    std::vector<uint8_t> broken(chunks.size()), restored(chunks.size());
    std::vector<int32_t> slots;
    for (const auto& c : chunks) slots.push_back(c.sequence);
    Batch b;
    b.rows = (int64_t)tokens.size();
    b.tokens = tokens.data();
    b.sequences = (int64_t)chunks.size();
    b.row_start = starts.data();
    b.context = context.data();
    b.tables = table.data();
    b.table_width = width;
    b.cos = {cos.data()};
    b.sin = {sin.data()};
    b.output_rows = outputs.data();
    b.outputs = b.rows;
    b.broken = broken.data();
    b.slots = slots.data();
    b.restored = restored.data();
    model->step(b);
    for (const uint8_t x : broken)
      if (x) fail("finite keys and values", "", x, 0);
    std::vector<float> out(b.rows * vocab);
    model->logits(0, b.rows, out.data());
    return out;
  }
};

// Random chunks of random sequences on several threads give the bits that each sequence gives alone, whole, on one thread.
void steps(const Kernels* k, KvType kv, bool experts, int64_t longest, const Traits& traits = kPlainly) {
  const std::vector<int64_t> lengths{1, 17, 70, longest};
  std::vector<std::vector<int32_t>> tokens, tables;
  std::vector<std::vector<float>> expected;
  std::mt19937 own(3);
  std::vector<int32_t> order(300);
  for (int i = 0; i < 300; i++) order[i] = i;
  std::shuffle(order.begin(), order.end(), own);
  for (size_t s = 0; s < lengths.size(); s++) {
    tokens.emplace_back();
    for (int64_t i = 0; i < lengths[s]; i++) tokens.back().push_back((int32_t)(own() % 70));
    tables.emplace_back(order.begin() + s * 75, order.begin() + (s + 1) * 75);
  }
  {
    Network alone(k, 1, kv, experts, 9, traits), scalar(kernels_scalar(), 1, kv, experts, 9, traits);
    for (size_t s = 0; s < lengths.size(); s++) {
      expected.push_back(alone.step({{(int)s, 0, tokens[s]}}, tables));
      if (k == kernels_scalar() || lengths[s] > 100) continue;
      const auto plain = scalar.step({{(int)s, 0, tokens[s]}}, tables);
      same(traits.name, k->name, expected.back().data(), plain.data(), plain.size());
    }
  }
  for (const int threads : {1, 2, 5}) {
    Network n(k, threads, kv, experts, 9, traits);
    std::vector<int64_t> done(lengths.size(), 0);
    for (bool open = true; open;) {
      std::vector<Network::Chunk> chunks;
      for (size_t s = 0; s < lengths.size(); s++) {
        if (done[s] == lengths[s] || own() % 3 == 0) continue;
        const int64_t sizes[] = {1, 1, 5, 40, 300};
        const int64_t count = std::min<int64_t>(sizes[own() % 5], lengths[s] - done[s]);
        chunks.push_back({(int)s, done[s], {tokens[s].begin() + done[s], tokens[s].begin() + done[s] + count}});
      }
      if (!chunks.empty()) {
        const auto found = n.step(chunks, tables);
        int64_t at = 0;
        for (const auto& c : chunks) {
          same("logits in a batch", k->name, found.data() + at * n.vocab, expected[c.sequence].data() + c.start * n.vocab, c.tokens.size() * n.vocab);
          at += (int64_t)c.tokens.size();
          done[c.sequence] += (int64_t)c.tokens.size();
        }
      }
      open = false;
      for (size_t s = 0; s < lengths.size(); s++) open |= done[s] < lengths[s];
    }
    n.model->copy_block(1, 2);
  }
}

void pools() {
  for (const int threads : {1, 2, 3, 8}) {
    Pool pool(threads);
    for (int round = 0; round < 3000; round++) {
      const int64_t items = between(0, 40);
      std::vector<int> seen(items);
      pool.run(items, [&](int64_t i, int thread) {
        if (thread < 0 || thread >= threads) std::abort();
        seen[i]++;
      });
      for (const int s : seen)
        if (s != 1) fail("pool", "", s, 1);
      if (round % 500 == 0) {  // let the workers fall asleep
        timespec nap{0, 2000000};
        nanosleep(&nap, nullptr);
      }
    }
  }
}

#ifdef __linux__
// Neighbours that want the core on which a worker holds an item: the caller must fetch the worker over to its own core, where it
// goes on, and it must go away from there afterwards; it may run where it was allowed to before. Waits as long as it takes, to 60 s.
void held_up_workers() {
  cpu_set_t before, allowed;
  CPU_ZERO(&allowed);
  sched_getaffinity(0, sizeof(before), &before);
  if (CPU_COUNT(&before) < 2 || std::thread::hardware_concurrency() < 2) {
    std::printf("one CPU: moving held-up workers not checked\n");
    return;
  }
  Pool pool(2);
  std::atomic<int> core{-1};
  std::atomic<bool> stop{false};
  std::vector<std::thread> neighbours;
  for (int i = 0; i < 3; i++)
    neighbours.emplace_back([&] {
      for (int here = -1; !stop.load();) {
        const int there = core.load();
        if (there == here) continue;
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(there, &set);
        if (sched_setaffinity(0, sizeof(set), &set) == 0) here = there;
      }
    });
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  const auto late = [&] { return std::chrono::steady_clock::now() > limit; };
  bool moved = false;
  while (!(moved && pool.left() > 0) && !late()) {
    std::atomic<bool> begun{false};
    pool.run(2, [&](int64_t, int thread) {
      if (thread == 0) {  // the caller's own item lasts until the worker has one, or it would take both
        for (int spins = 0; !begun.load() && spins < 10000000; spins++) continue;
        return;
      }
      const int64_t pulled = pool.pulled();
      const int from = sched_getcpu();
      core.store(from);
      begun.store(true);
      while (!late() && !(pool.pulled() > pulled && sched_getcpu() != from)) continue;
      moved = !late();
    });
  }
  stop.store(true);
  for (auto& n : neighbours) n.join();
  if (!moved) fail("held-up workers fetched", "", (double)pool.pulled(), 1);
  if (pool.left() == 0) fail("workers that left the caller's core", "", 0, 1);
  // While a worker is moved it may use one CPU only, and on a busy machine its mover may lose its own core in between: look again.
  const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!CPU_EQUAL(&before, &allowed) && std::chrono::steady_clock::now() < patience)
    pool.run(64, [&](int64_t, int thread) {
      if (thread == 1) sched_getaffinity(0, sizeof(allowed), &allowed);
    });
  if (!CPU_EQUAL(&before, &allowed)) fail("CPUs that a worker may use", "", CPU_COUNT(&allowed), CPU_COUNT(&before));
}
#else
void held_up_workers() {}
#endif

void packing() {
  Pool pool(3);
  const Source sources[] = {Source::f32, Source::f16, Source::bf16, Source::q4_0, Source::q4_1, Source::q5_0, Source::q5_1, Source::q8_0, Source::q4_k, Source::q5_k, Source::q6_k};
  for (const Source s : sources)
    for (const int64_t n : {1, 16, 50}) {
      const int64_t k = s >= Source::q4_k && s <= Source::q6_k ? 512 : 96;
      std::vector<uint8_t> raw(n * source_row_bytes(s, k));
      for (auto& b : raw) b = (uint8_t)(rng() % 120);  // finite whatever it is read as
      for (int64_t i = 0; s == Source::f32 && i < n * k; i++) {
        const float v = normal();
        std::memcpy(raw.data() + 4 * i, &v, 4);
      }
      std::vector<Format> targets{natural_format(s)};
      if (s == Source::f32 || s == Source::f16) targets.insert(targets.end(), {{Codes::s8, Scales::plain, 0}, {Codes::u4, Scales::min, 0}});
      for (const Format& f : targets) {
        Matrix m = shape(f, n, k);
        std::vector<uint8_t> out(m.bytes());
        pack(s, raw.data(), m, out.data(), pool);
        m.data = out.data();
        for (int64_t i = 0; i < n; i++)
          for (int64_t j = 0; j < k; j++)
            if (!std::isfinite(weight_at(m, i, j))) fail("packed weight", "", weight_at(m, i, j), 0);
        checksum(out.data(), (int64_t)out.size(), pool);
      }
    }
}

void sampling(const Kernels& k) {
  for (int i = 0; i < 300; i++) {
    const int64_t vocab = between(1, 3000);
    const auto logits = normals(vocab, 4);
    Rule rule{i % 5 == 0, true, 0.8f, i % 3 == 0 ? between(1, 50) : 0, i % 2 == 0 ? 0.9 : 1.0, i % 7 == 0 ? 0.1f : 0.0f, 0.999999 * (i % 10) / 10};
    uint8_t state;
    const int64_t id = choose(k, logits.data(), vocab, rule, &state);
    if (state != 0 || id < 0 || id >= vocab) fail("sample", k.name, (double)id, 0);
    double own;
    int64_t rank;
    const int64_t wanted = std::min<int64_t>(vocab, 20);
    std::vector<int64_t> ids(wanted);
    std::vector<double> values(wanted);
    log_probabilities(k, logits.data(), vocab, id, wanted, &own, &rank, ids.data(), values.data());
    if (!(own <= 1e-6) || rank < 1 || rank > vocab || !std::is_sorted(values.rbegin(), values.rend())) fail("log-probability", k.name, own, 0);
  }
}
}  // namespace

int main(int argc, char** argv) {
  const bool brief = argc > 1 && std::strcmp(argv[1], "--brief") == 0;  // for emulators and sanitizers
  pools();
  held_up_workers();
  packing();
  for (const Kernels* k : runnable_sets()) {
    products(*k, *kernels_scalar());
    row_operations(*k, *kernels_scalar());
    attentions(*k, *kernels_scalar());
    sampling(*k);
    const bool slow = k == kernels_scalar();
    for (const KvType kv : {KvType::f16, KvType::f32, KvType::s8, KvType::e4m3, KvType::u4, KvType::bf16})
      for (const bool experts : {false, true}) steps(k, kv, experts, brief || slow ? 560 : 1190);
    for (const Traits& traits : kTraits) {
      const KvType kv = (KvType)((&traits - kTraits) % 6);
      steps(k, kv, true, 560, traits);
    }
    std::printf("%s: products, row operations, attention, sampling and steps agree\n", k->name);
  }
  return 0;
}
