// From a row of logits to a token. Penalties, biases and masks have been applied before.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace headrace {

struct Rule {
  bool greedy;
  bool untouched;  // nothing was masked, so -inf is as wrong as NaN
  float temperature;
  int64_t top_k;  // 0: off
  double top_p;   // 1: off
  float min_p;    // 0: off
  double uniform;  // in [0, 1)
};

// state: 0 chosen, 1 logits not finite, 2 nothing allowed.
int64_t choose(const Kernels& k, const float* logits, int64_t vocab, const Rule& rule, uint8_t* state);

void log_probabilities(const Kernels& k, const float* logits, int64_t vocab, int64_t id, int64_t wanted, double* own, int64_t* rank, int64_t* top_ids, double* top_values);

}  // namespace headrace
