#include "isa.h"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if CHAIRLIFT_X86
#include <cpuid.h>
#elif CHAIRLIFT_ARM && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace chairlift {
namespace {

struct Cpu {
  bool has_avx2 = false;    // AVX2, FMA and F16C, with the registers enabled by the system
  bool has_avx512 = false;  // AVX-512 F, BW, DQ, VL, likewise
  bool has_neon = false;
  bool has_int8_dot = false;  // AVX-512 VNNI; SDOT

  bool supports(Isa isa) const {
    switch (isa) {
      case Isa::generic: return true;
      case Isa::avx2: return has_avx2;
      case Isa::avx512: return has_avx512;
      case Isa::neon: return has_neon;
    }
    return false;
  }

  Isa best() const {
    for (Isa isa : {Isa::avx512, Isa::avx2, Isa::neon}) {
      if (supports(isa)) return isa;
    }
    return Isa::generic;
  }
};

#if CHAIRLIFT_X86

bool bit(uint32_t word, int position) { return ((word >> position) & 1u) != 0; }

// XCR0: which register sets the operating system saves.
uint32_t enabled_registers() {
  uint32_t low = 0;
  uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

Cpu detect() {
  Cpu cpu;
  uint32_t a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return cpu;
  const bool has_osxsave = bit(c, 27);
  const bool has_fma_f16c = bit(c, 12) && bit(c, 28) && bit(c, 29);  // FMA, AVX, F16C
  const uint32_t enabled = has_osxsave ? enabled_registers() : 0;
  const bool has_ymm = (enabled & 0x6u) == 0x6u;
  const bool has_zmm = (enabled & 0xe6u) == 0xe6u;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return cpu;
  cpu.has_avx2 = has_ymm && has_fma_f16c && bit(b, 5);
  cpu.has_avx512 = cpu.has_avx2 && has_zmm && bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31);  // F DQ BW VL
  cpu.has_int8_dot = cpu.has_avx512 && bit(c, 11);
  return cpu;
}

#elif CHAIRLIFT_ARM

Cpu detect() {
  Cpu cpu;
  cpu.has_neon = true;  // part of every AArch64 processor
#if defined(__linux__)
  cpu.has_int8_dot = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#elif defined(__APPLE__)
  cpu.has_int8_dot = true;
#endif
  return cpu;
}

#else

Cpu detect() { return Cpu{}; }

#endif

const Cpu& cpu() {
  static const Cpu detected = detect();
  return detected;
}

std::atomic<Isa>& active() {
  static std::atomic<Isa> isa{cpu().best()};
  return isa;
}

struct IsaName {
  const char* name;
  Isa isa;
};
constexpr IsaName kNames[] = {
    {"generic", Isa::generic}, {"avx2", Isa::avx2}, {"avx512", Isa::avx512}, {"neon", Isa::neon}};

}  // namespace

Isa active_isa() { return active().load(std::memory_order_relaxed); }

bool has_int8_dot() { return cpu().has_int8_dot; }

}  // namespace chairlift

#define CHAIRLIFT_EXPORT extern "C" __attribute__((visibility("default")))

// Choose "generic", "avx2", "avx512", "neon", or "auto" for the best one. 0 when set, -1 when this machine has no such
// set or the name is unknown (then nothing changes).
CHAIRLIFT_EXPORT int chairlift_set_isa(const char* name) {
  using namespace chairlift;
  if (name == nullptr) return -1;
  if (std::strcmp(name, "auto") == 0) {
    active().store(cpu().best(), std::memory_order_relaxed);
    return 0;
  }
  for (const IsaName& entry : kNames) {
    if (std::strcmp(name, entry.name) != 0) continue;
    if (!cpu().supports(entry.isa)) return -1;
    active().store(entry.isa, std::memory_order_relaxed);
    return 0;
  }
  return -1;
}

// The name of the set in use.
CHAIRLIFT_EXPORT const char* chairlift_isa() {
  const chairlift::Isa isa = chairlift::active_isa();
  for (const chairlift::IsaName& entry : chairlift::kNames) {
    if (entry.isa == isa) return entry.name;
  }
  return "generic";
}
