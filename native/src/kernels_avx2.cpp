#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define HR_ISA avx2
#include "isa_avx2.h"
#include "bringer.h"
#include "kernels_impl.h"

namespace headrace::avx2 {
#include "gemm_avx2.h"
}

namespace headrace {
const Kernels* kernels_avx2() {
  using namespace avx2;
  static const Kernels table{"avx2", quantize, quantize_groups, gemm_q, gemm_f, rms_norm, gated, attention, merge_segments, extremes, exponentials, store_kv};
  return &table;
}
}  // namespace headrace
#else
#include "kernels.h"
namespace headrace {
const Kernels* kernels_avx2() { return nullptr; }
}  // namespace headrace
#endif
