#include <cstring>

#include "kernels.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#ifndef HWCAP_ASIMDDP
#define HWCAP_ASIMDDP (1 << 20)
#endif
#endif

namespace headrace {
namespace {
bool runs(const Kernels* k) {
  if (k == nullptr) return false;
  if (k == kernels_scalar()) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (k == kernels_avx2()) return avx2;
#ifdef HEADRACE_VNNI_EVEX
  if (k == kernels_avxvnni()) return avx2 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl");
#else
  if (k == kernels_avxvnni()) return avx2 && __builtin_cpu_supports("avxvnni");
#endif
  if (k == kernels_avx512bf16() && !__builtin_cpu_supports("avx512bf16")) return false;
  if (k == kernels_avx512() || k == kernels_avx512bf16())
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
#elif defined(__aarch64__) && defined(__linux__)
  if (k == kernels_neon()) return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#elif defined(__aarch64__) && defined(__APPLE__)
  if (k == kernels_neon()) return true;  // every arm64 Mac has the dot product extension
#endif
  return false;
}
}  // namespace

const Kernels* select_kernels(const char* name) {
  const bool any = name == nullptr || *name == 0 || std::strcmp(name, "auto") == 0;
  for (const Kernels* k : kernel_sets())
    if (runs(k) && (any || std::strcmp(k->name, name) == 0)) return k;
  return nullptr;
}
}  // namespace headrace
