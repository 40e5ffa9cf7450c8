// Memory that a later loop reads, brought near while products of several rows wait for multipliers.
#pragma once
#include <immintrin.h>

#include <algorithm>

#include "packed.h"

namespace headrace::HR_ISA {

// Brings what `QRows::ahead` names to the second-level cache, some lines with each group of weights.
class Bringer {
 public:
  Bringer(const Ahead& a, int64_t groups)
      : piece_(a.pieces), piece_bytes_(a.piece_bytes), at_(a.from), left_(a.lines), each_((a.lines + groups - 1) / groups) {}
  void step() {
    const int64_t count = std::min(each_, left_);
    left_ -= count;
    for (int64_t i = 0; i < count; i++) {
      _mm_prefetch((const char*)*piece_ + at_, _MM_HINT_T1);
      at_ += 64;
      if (at_ >= piece_bytes_) at_ = 0, piece_++;
    }
  }

 private:
  const uint8_t* const* piece_;
  int64_t piece_bytes_, at_, left_, each_;
};

}  // namespace headrace::HR_ISA
