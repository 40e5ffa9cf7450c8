#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && defined(__AVXVNNI__)
#define HR_ISA avxvnni
#include "isa_avx2.h"
#include "kernels_impl.h"

#define HR_VNNI256 _mm256_dpbusd_avx_epi32
namespace headrace::avxvnni {
#include "gemm_avx2.h"
}

namespace headrace {
const Kernels* kernels_avxvnni() {
  using namespace avxvnni;
  static const Kernels table{"avx-vnni", quantize, gemm_q, gemm_f, rms_norm, gated, attention, merge_segments, extremes, exponentials, store_kv};
  return &table;
}
}  // namespace headrace
#else
#include "kernels.h"
namespace headrace {
const Kernels* kernels_avxvnni() { return nullptr; }
}  // namespace headrace
#endif
