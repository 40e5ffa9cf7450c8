#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && (defined(__AVXVNNI__) || defined(HEADRACE_VNNI_EVEX))
#define HR_ISA avxvnni
#include "isa_avx2.h"
#include "bringer.h"
#include "kernels_impl.h"

#ifdef HEADRACE_VNNI_EVEX  // a test build: the same instruction as AVX-512 encodes it, for machines that have only that
#define HR_VNNI256 _mm256_dpbusd_epi32
#else
#define HR_VNNI256 _mm256_dpbusd_avx_epi32
#endif
namespace headrace::avxvnni {
#include "gemm_avx2.h"
}

namespace headrace {
const Kernels* kernels_avxvnni() {
  using namespace avxvnni;
  static const Kernels table{"avx-vnni", quantize, quantize_groups, gemm_q, gemm_f, rms_norm, gated, attention, merge_segments, extremes, exponentials, store_kv};
  return &table;
}
}  // namespace headrace
#else
#include "kernels.h"
namespace headrace {
const Kernels* kernels_avxvnni() { return nullptr; }
}  // namespace headrace
#endif
