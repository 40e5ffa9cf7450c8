// How fast single kernels are on one core, for who changes them: `cmake --build … --target headrace_speed`, then
//   headrace_speed [kernel set [repeats]]
// Every item of a layer's loops is timed by itself and its shortest time counts, so other programs on the machine disturb
// little; what is printed is the sum over items. SmolLM2-135M's shapes, codes as Q4_1, KV in fp16.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "kernels.h"

using namespace headrace;

namespace {
std::mt19937 rng(1);
int repeats = 9;

std::vector<float> normal(size_t n, float scale = 1) {
  std::normal_distribution<float> d(0, scale);
  std::vector<float> x(n);
  for (auto& v : x) v = d(rng);
  return x;
}

template <class F>
double seconds(size_t items, F&& body) {
  std::vector<double> best(items, 1e9);
  for (int r = 0; r < repeats; r++)
    for (size_t i = 0; i < items; i++) {
      const auto begin = std::chrono::steady_clock::now();
      body(i);
      best[i] = std::min(best[i], std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
  double sum = 0;
  for (double b : best) sum += b;
  return sum;
}

void products(const Kernels& k, int64_t outputs, int64_t inputs, int64_t rows) {
  constexpr int64_t chunk = 64;
  Matrix m = shape({Codes::u4, Scales::min, 0}, outputs, inputs);
  std::vector<uint8_t> data(m.bytes());
  for (auto& b : data) b = rng() & 0x3b;  // as scales: small positive numbers
  m.data = data.data();
  const std::vector<float> x = normal(rows * inputs);
  std::vector<QGroup> codes(rows * m.groups);
  const QRows q{rows, m.groups, codes.data(), {}};
  for (int64_t r = 0; r < rows; r++) k.quantize(x.data() + r * inputs, inputs, q.row(r));
  std::vector<float> out(rows * outputs);
  const int64_t pairs = m.tiles / 2;
  const double s = seconds((rows + chunk - 1) / chunk * pairs, [&](size_t i) {
    const int64_t row = i / pairs * chunk, tile = i % pairs * 2;
    k.gemm_q(m, tile, 2, q, row, std::min(chunk, rows - row), out.data() + row * outputs + tile * kTile, outputs);
  });
  std::printf("product %4ld x %4ld, %3ld rows: %.1f GOP/s\n", (long)inputs, (long)outputs, (long)rows, 2e-9 * rows * m.tiles * kTile * inputs / s);
}

void attention(const Kernels& k, KvType type, int64_t tokens, bool decode) {
  constexpr int64_t heads = 9, kv_heads = 3, dim = 64, group = heads / kv_heads, chunk = 16, width = dim + 16;
  KvPool kv;
  kv.type = type;
  kv.kv_heads = kv_heads;
  kv.head_dim = kv.value_dim = dim;
  kv.block_stride = kv.block_tokens * kv_heads * 2 * dim * 2 * 30;  // as if 30 layers shared the block
  std::vector<int32_t> table(tokens / kv.block_tokens);
  for (size_t i = 0; i < table.size(); i++) table[i] = (int32_t)i;
  std::shuffle(table.begin(), table.end(), rng);
  std::vector<uint8_t> pool(table.size() * kv.block_stride);
  kv.base = pool.data();
  for (int64_t t = 0; t < tokens; t++) k.store_kv(kv, table[t / kv.block_tokens], (int)(t % kv.block_tokens), normal(kv_heads * dim).data(), normal(kv_heads * dim).data());
  const std::vector<float> q = normal(tokens * heads * dim, 0.3f);
  std::vector<float> out(q.size()), scratch(kAttentionScratch), partial(chunk * group * width);
  struct Item {
    int64_t row, rows, segment, head;
  };
  std::vector<Item> items;
  for (int64_t row = decode ? tokens - 1 : 0; row < tokens; row += chunk)
    for (int64_t segment = 0; segment <= std::min(row + chunk - 1, tokens - 1) / kSegment; segment++)
      for (int64_t head = 0; head < kv_heads; head++) items.push_back({row, decode ? 1 : chunk, segment, head});
  const double s = seconds(items.size(), [&](size_t i) {
    const Item& at = items[i];
    AttentionItem a;
    a.q = q.data() + (at.row * heads + at.head * group) * dim;
    a.out = out.data() + (at.row * heads + at.head * group) * dim;
    a.q_stride = a.out_stride = heads * dim;
    a.rows = (int)at.rows;
    a.group = group;
    a.first_position = at.row;
    a.table = table.data();
    a.head = (int)at.head;
    a.from = at.segment * kSegment;
    a.to = a.from + kSegment;
    if ((at.row + at.rows - 1) / kSegment > 0) {
      a.partial = partial.data();
      a.partial_stride = width;
    }
    k.attention(kv, a, scratch.data());
  });
  const double flop = 4.0 * heads * dim * (decode ? (double)tokens : 0.5 * tokens * (tokens + 1));
  std::printf("attention over %4ld tokens of %s, %s: %.4f ms a layer, %.1f GFLOP/s\n", (long)tokens, type == KvType::f16 ? "fp16" : "bf16", decode ? "one row" : "all rows", 1e3 * s, 1e-9 * flop / s);
}

void rows(const Kernels& k) {
  constexpr int64_t n = 1536, count = 64;
  const std::vector<float> x = normal(n * count), ones(n, 1.0f);
  std::vector<float> y(n);
  std::vector<QGroup> codes(n / kGroup), spread(8 * n / kGroup);
  const auto print = [&](const char* name, double s) { std::printf("%s: %.2f ns per 32 numbers\n", name, 1e9 * s / count / n * kGroup); };
  print("rounding to codes", seconds(count, [&](size_t r) { k.quantize(x.data() + r * n, n, codes.data()); }));
  print("rounding rows of 32", seconds(count / 8, [&](size_t i) {
          for (int64_t g = 0; g < n / kGroup; g++) k.quantize_groups(x.data() + i * 8 * n + g * kGroup, n, 8, spread.data() + g, n / kGroup);
        }));
  print("norm", seconds(count, [&](size_t r) { k.rms_norm(x.data() + r * n, ones.data(), 0, n, 1e-6f, y.data()); }));
  print("gated SiLU, with a copy", seconds(count, [&](size_t r) {
          std::copy_n(x.data() + r * n, n, y.data());
          k.gated(Activation::silu, y.data(), x.data() + r * n, n);
        }));
  print("exp", seconds(count, [&](size_t r) { k.exponentials(x.data() + r * n, n, 3.0f, 1.0f, y.data()); }));
}
}  // namespace

int main(int argc, char** argv) {
  const Kernels* k = select_kernels(argc > 1 ? argv[1] : "auto");
  if (argc > 2) repeats = std::atoi(argv[2]);
  if (k == nullptr || repeats < 1) {
    std::fprintf(stderr, "headrace_speed: no such kernel set here, or no repeats\n");
    return 2;
  }
  std::printf("%s\n", k->name);
  for (int64_t count : {1, 4, 8, 16, 64, 512}) products(*k, 960, 576, count);
  for (int64_t count : {8, 64, 512}) products(*k, 576, 1536, count);
  for (KvType type : {KvType::f16, KvType::bf16})
    for (int64_t tokens : {256, 1024})
      for (bool decode : {false, true}) attention(*k, type, tokens, decode);
  rows(*k);
}
