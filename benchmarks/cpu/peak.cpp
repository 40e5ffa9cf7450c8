// The most 8-bit multiply-adds that this machine does: dot products of registers with registers, a thread per core.
//   peak THREADS  ->  {"gops": ..., "instruction": "..."}; one multiply-add is two operations
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {
constexpr int kChains = 12;  // independent sums: more than latency times throughput of the cores in question
constexpr long kRounds = 2000000;

// Written in assembly, so that a compiler neither shares equal sums nor moves them about.
#if defined(__AVX512VNNI__)
constexpr const char* kName = "vpdpbusd, 512 bits";
using Vec = __m512i;
inline void dot(Vec& sum, const Vec& u, const Vec& s) { asm volatile("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u), "v"(s)); }
#elif defined(__AVXVNNI__)
constexpr const char* kName = "vpdpbusd, 256 bits";
using Vec = __m256i;
inline void dot(Vec& sum, const Vec& u, const Vec& s) { asm volatile("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(u), "x"(s)); }
#elif defined(__AVX2__)
constexpr const char* kName = "vpmaddubsw and vpaddw, 256 bits";
using Vec = __m256i;
inline void dot(Vec& sum, const Vec& u, const Vec& s) {
  Vec pairs;
  asm volatile("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sum), "=&x"(pairs) : "x"(u), "x"(s));
}
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr const char* kName = "sdot, 128 bits";
using Vec = int32x4_t;
inline void dot(Vec& sum, const Vec& u, const Vec& s) { asm volatile("sdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(u), "w"(s)); }
#else
#error "no byte dot product known for this machine"
#endif

void work() {
  Vec sums[kChains] = {}, u = {}, s = {};
  for (long i = 0; i < kRounds; i++) {
#pragma GCC unroll 16
    for (int c = 0; c < kChains; c++) dot(sums[c], u, s);
  }
}
}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  double best = 0;
  for (int repeat = 0; repeat < 8; repeat++) {
    const auto begin = std::chrono::steady_clock::now();
    std::vector<std::thread> running;
    for (int t = 0; t < threads; t++) running.emplace_back(work);
    for (auto& t : running) t.join();
    const double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    const double gops = 2.0 * sizeof(Vec) * kChains * kRounds * threads / s / 1e9;
    best = gops > best ? gops : best;
  }
  std::printf("{\"gops\": %.1f, \"instruction\": \"%s\", \"threads\": %d}\n", best, kName, threads);
}
