#include "sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

namespace headrace {
namespace {

// Largest weights looked at first for top-p; a row whose mass is not among them is sorted whole.
constexpr int64_t kCandidates = 1024;

// The smallest weight that top-k, then top-p of what top-k left, keep. A token is kept by top-p if the mass before it is
// below p of the total; tokens tied with the last one kept are kept.
float least_kept(const std::vector<float>& weights, int64_t top_k, double top_p) {
  const int64_t n = (int64_t)weights.size(), k = top_k > 0 ? std::min(top_k, n) : n;
  static thread_local std::vector<float> best;
  for (int64_t width = std::min(n, std::max(kCandidates, top_k > 0 ? k : 0));; width = n) {
    best.assign(weights.begin(), weights.end());
    if (width < n) std::nth_element(best.begin(), best.begin() + width - 1, best.end(), std::greater<float>());
    std::sort(best.begin(), best.begin() + width, std::greater<float>());
    const int64_t within = std::min(k, width);
    if (top_p >= 1.0) {
      if (k <= width) return k == n ? 0.0f : best[k - 1];
      continue;
    }
    double total = 0;
    if (k < n)
      for (int64_t i = 0; i < within; i++) total += best[i];
    else
      for (int64_t i = 0; i < n; i++) total += weights[i];
    double mass = 0;
    int64_t kept = 0;
    while (kept < within && (kept == 0 || mass < top_p * total)) mass += best[kept++];
    if (kept < width || k <= width || width == n) return best[kept - 1];
  }
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
