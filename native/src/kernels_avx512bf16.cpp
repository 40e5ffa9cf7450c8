#if defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define HR_ISA avx512bf16
#include "isa_avx512.h"
#include "attention_impl.h"

namespace headrace::avx512bf16 {
// Beside the set without BF16 only attention over bf16 keys and values differs, and by the instruction alone.
static void attention(const KvPool& kv, const AttentionItem& it, float* scratch) {
  if (kv.type != KvType::bf16) return kernels_avx512()->attention(kv, it, scratch);
  attention_of<KvType::bf16>(kv, it, scratch);
}
}  // namespace headrace::avx512bf16

namespace headrace {
const Kernels* kernels_avx512bf16() {
  if (kernels_avx512() == nullptr) return nullptr;
  static const Kernels table = [] {
    Kernels t = *kernels_avx512();
    t.name = "avx512-bf16";
    t.attention = avx512bf16::attention;
    return t;
  }();
  return &table;
}
}  // namespace headrace
#else
#include "kernels.h"
namespace headrace {
const Kernels* kernels_avx512bf16() { return nullptr; }
}  // namespace headrace
#endif
