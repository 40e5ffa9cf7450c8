#include <cstring>

#include "kernels.h"

namespace headrace {
namespace {
bool runs(const Kernels* k) {
  if (k == nullptr) return false;
  if (k == kernels_scalar()) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (k == kernels_avx2()) return avx2;
  if (k == kernels_avxvnni()) return avx2 && __builtin_cpu_supports("avxvnni");
  if (k == kernels_avx512())
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
#endif
  return false;
}
}  // namespace

const Kernels* select_kernels(const char* name) {
  const Kernels* best_first[] = {kernels_avx512(), kernels_avxvnni(), kernels_avx2(), kernels_scalar()};
  const bool any = name == nullptr || *name == 0 || std::strcmp(name, "auto") == 0;
  for (const Kernels* k : best_first)
    if (runs(k) && (any || std::strcmp(k->name, name) == 0)) return k;
  return nullptr;
}
}  // namespace headrace
