// SPDX-License-Identifier: Apache-2.0
// Chooses the kernels for this processor, from the ISA levels that kernels.cpp is compiled for.
// Each level includes the ones before it.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <iterator>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "backend/cpu/kernels.hpp"
#include "core/environment.hpp"
#include "core/error.hpp"

namespace ga::cpu {

// GA_EACH_ISA_LEVEL(X) of the build is X(scalar), and X of each other level, from the lowest up.
#define GA_DECLARE(level)                       \
  const Kernels& kernels_##level();             \
  const BnKernels& batchnorm_kernels_##level(); \
  const ga_matmul_module& products_##level();
GA_EACH_ISA_LEVEL(GA_DECLARE)
#undef GA_DECLARE

namespace {

struct Processor {
  const char* level;
  bool (*has)();
};

bool always() { return true; }

constexpr Processor scalar = {"scalar", always};

#if defined(__x86_64__)

struct Cpuid {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  Cpuid(unsigned leaf, unsigned subleaf) {
    __get_cpuid_count(leaf, subleaf, &eax, &ebx, &ecx, &edx);
  }
};

constexpr bool has(unsigned reg, std::initializer_list<int> bits) {
  for (int bit : bits)
    if (!(reg >> bit & 1u)) return false;
  return true;
}

// XCR0: the registers that the operating system saves; 0 without XSAVE.
unsigned saved_registers() {
  if (!has(Cpuid(1, 0).ecx, {27})) return 0;
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

// The levels of the x86-64 psABI, section 3.1.1.
bool has_v2() {
  // SSE3, SSSE3, CMPXCHG16B, SSE4.1, SSE4.2, POPCNT; LAHF
  return has(Cpuid(1, 0).ecx, {0, 9, 13, 19, 20, 23}) && has(Cpuid(0x80000001u, 0).ecx, {0});
}

bool has_v3() {
  // FMA, MOVBE, AVX, F16C; BMI1, AVX2, BMI2; LZCNT; the XMM and YMM state
  return has_v2() && has(Cpuid(1, 0).ecx, {12, 22, 28, 29}) && has(Cpuid(7, 0).ebx, {3, 5, 8}) &&
         has(Cpuid(0x80000001u, 0).ecx, {5}) && has(saved_registers(), {1, 2});
}

bool has_v4() {
  // AVX512F, DQ, CD, BW, VL; the mask and ZMM state
  return has_v3() && has(Cpuid(7, 0).ebx, {16, 17, 28, 30, 31}) &&
         has(saved_registers(), {5, 6, 7});
}

[[maybe_unused]] constexpr Processor x86_64_v2 = {"x86-64-v2", has_v2};
[[maybe_unused]] constexpr Processor x86_64_v3 = {"x86-64-v3", has_v3};
[[maybe_unused]] constexpr Processor x86_64_v4 = {"x86-64-v4", has_v4};

#elif defined(__aarch64__)

[[maybe_unused]] constexpr Processor neon = {"neon", always};

#endif

#define GA_LEVEL(name) \
  {name.level, name.has, kernels_##name, batchnorm_kernels_##name, products_##name},
constexpr Isa levels[] = {GA_EACH_ISA_LEVEL(GA_LEVEL)};
#undef GA_LEVEL

// Prefetching instructions made AdamW and norms 12 to 15 % faster on memory with an Intel processor
// (Sapphire Rapids). With AMD's family 25, model 17, they made nearly all passes slower: f32 by about a tenth,
// 16-bit gradients by up to 45 %; with its family 26, model 2, what is in a cache by about a tenth, and AGC by
// rows 13 % faster. No other processors were measured.
bool is_prefetching_faster() {
#if defined(__x86_64__)
  return Cpuid(0, 0).ebx != 0x68747541;  // "Auth", of "AuthenticAMD"
#else
  return true;
#endif
}

// The first of the levels that this processor lacks. Asked once, because CPUID is slow in a virtual machine: it took
// 0.25 ms for all levels.
const Isa* end_of_supported() {
  static const Isa* const end = std::find_if_not(
      std::begin(levels), std::end(levels), [](const Isa& level) { return level.supported(); });
  return end;
}

bool chooses_prefetching(bool unless_told) {
  return flag_variable("GA_CPU_PREFETCH").value_or(unless_told);
}

}  // namespace

const bool prefetching = chooses_prefetching(is_prefetching_faster());
// Passes over planes and rows jump where the hardware prefetcher does not follow: with AMD's family 26 they are
// 1.1 to 1.7 times as fast. Its family 25 was not measured.
const bool bn_prefetching = chooses_prefetching(true);

const Isa& choose_isa() {
  const char* const wanted = std::getenv("GA_CPU_ISA");
  if (!wanted || !*wanted) return end_of_supported()[-1];
  const Isa* const found =
      std::find_if(std::begin(levels), std::end(levels),
                   [&](const Isa& level) { return std::strcmp(wanted, level.name) == 0; });
  if (found == std::end(levels))
    fail(GA_ERROR_UNSUPPORTED, "GA_CPU_ISA was \"%s\", expected one of: " GA_CPU_ISA_NAMES, wanted);
  if (found >= end_of_supported())
    fail(GA_ERROR_UNSUPPORTED, "GA_CPU_ISA was \"%s\", but this processor does not have it",
         wanted);
  return *found;
}

}  // namespace ga::cpu
