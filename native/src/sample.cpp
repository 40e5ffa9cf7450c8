#include "sample.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

namespace headrace {
namespace {

// Weights are at most 1. Bucket b holds those in [2^-(b+1)/4 .. 2^-b/4) roughly: the exponent and two bits of the mantissa,
// so that larger weights come first; everything below 2^-30 shares the last one.
constexpr int kBuckets = 128;
int bucket_of(float w) {
  uint32_t bits;
  std::memcpy(&bits, &w, 4);
  const int quarter = (int)(bits >> 21);  // grows with w; that of 1.0f is 127 * 4
  return std::clamp(127 * 4 - quarter, 0, kBuckets - 1);
}

// The smallest weight that top-k, then top-p of what top-k left, keep. A token is kept by top-p if the mass before it is
// below p of the total; tokens tied with the last one kept are kept. Buckets tell how many of the largest weights decide
// that; only those are sorted.
float least_kept(const std::vector<float>& weights, int64_t top_k, double top_p) {
  const int64_t n = (int64_t)weights.size(), k = top_k > 0 ? std::min(top_k, n) : n;
  int64_t count[kBuckets] = {0};
  double mass[kBuckets] = {0}, all = 0;
  for (const float w : weights) {
    const int b = bucket_of(w);
    count[b]++;
    mass[b] += w;
  }
  for (const double m : mass) all += m;
  // Enough buckets for the first k, or, if k does not bind, for a mass safely above p of the total.
  const double enough = k < n || top_p >= 1.0 ? std::numeric_limits<double>::infinity() : top_p * all * (1 + 1e-9) + 1e-300;
  int last = 0;
  int64_t taken = count[0];
  double held = mass[0];
  while (last + 1 < kBuckets && taken < k && held < enough) {
    last++;
    taken += count[last];
    held += mass[last];
  }
  static thread_local std::vector<float> best;
  best.clear();
  for (const float w : weights)
    if (bucket_of(w) <= last) best.push_back(w);
  std::sort(best.begin(), best.end(), std::greater<float>());
  const int64_t within = std::min<int64_t>(k, (int64_t)best.size());
  if (top_p >= 1.0) return k == n ? 0.0f : best[within - 1];
  double total = all;
  if (k < n) {
    total = 0;
    for (int64_t i = 0; i < within; i++) total += best[i];
  }
  double before = 0;
  int64_t kept = 0;
  while (kept < within && (kept == 0 || before < top_p * total)) before += best[kept++];
  return best[kept - 1];
}

}  // namespace

int64_t choose(const Kernels& k, const float* logits, int64_t vocab, const Rule& rule, uint8_t* state) {
  *state = 0;
  float top, low;
  if (!k.extremes(logits, vocab, &low, &top) || (rule.untouched && low == -std::numeric_limits<float>::infinity())) {
    *state = 1;
    return 0;
  }
  if (top == -std::numeric_limits<float>::infinity()) {
    *state = 2;
    return 0;
  }
  if (rule.greedy) return std::find(logits, logits + vocab, top) - logits;
  static thread_local std::vector<float> weights;
  weights.resize(vocab);
  k.exponentials(logits, vocab, top, 1.0f / rule.temperature, weights.data());
  float floor = rule.min_p;
  if (rule.top_k > 0 || rule.top_p < 1.0) floor = std::max(floor, least_kept(weights, rule.top_k, rule.top_p));
  double total = 0;
  for (int64_t i = 0; i < vocab; i++) {
    if (weights[i] < floor) weights[i] = 0;
    total += weights[i];
  }
  const double target = rule.uniform * total;
  double mass = 0;
  int64_t last = 0;
  for (int64_t i = 0; i < vocab; i++) {
    if (weights[i] == 0) continue;
    last = i;
    mass += weights[i];
    if (mass > target) return i;
  }
  return last;
}

void log_probabilities(const Kernels& k, const float* logits, int64_t vocab, int64_t id, int64_t wanted, double* own, int64_t* rank, int64_t* top_ids, double* top_values) {
  const float top = *std::max_element(logits, logits + vocab);
  static thread_local std::vector<float> weights;
  weights.resize(vocab);
  k.exponentials(logits, vocab, top, 1.0f, weights.data());
  double total = 0;
  for (float w : weights) total += w;
  const double normalizer = (double)top + std::log(total);
  *own = (double)logits[id] - normalizer;
  *rank = 1 + std::count_if(logits, logits + vocab, [&](float x) { return x > logits[id]; });
  if (wanted == 0) return;
  static thread_local std::vector<int32_t> order;
  order.resize(vocab);
  std::iota(order.begin(), order.end(), 0);
  const auto better = [&](int32_t a, int32_t b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); };
  std::partial_sort(order.begin(), order.begin() + wanted, order.end(), better);
  for (int64_t i = 0; i < wanted; i++) {
    top_ids[i] = order[i];
    top_values[i] = (double)logits[order[i]] - normalizer;
  }
}

}  // namespace headrace
