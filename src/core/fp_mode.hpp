// SPDX-License-Identifier: Apache-2.0
// The floating-point mode of the library's arithmetic: round to nearest, keep subnormal numbers, no
// traps. A program may use another mode: torch.set_flush_denormal and the start-up code of
// libraries linked with -ffast-math flush subnormal numbers, fesetround changes the rounding. Every
// thread has its own mode, and OpenMP's threads keep the one that they were created in. So an
// FpMode encloses everything that computes: a call on its thread (Context::Use), the share of a
// thread in a loop, and each task that the program's parallel_for runs. Its destructor
// restores the thread's environment bit for bit, exception flags included.
//
// The program's parallel_for is called in the program's mode (ProgramFpMode). Changes that it makes
// to the mode of the calling thread last until it returns.
//
// A compiler does not know that arithmetic depends on the mode, and may move it across these
// objects. So functions that compute are in another file, or called through a pointer.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace ga {

// A thread's control bits and exception flags.
#if defined(__x86_64__)

class FpEnvironment {  // MXCSR: the flags are in the six lowest bits
 public:
  static FpEnvironment now() { return FpEnvironment(_mm_getcsr()); }
  static constexpr FpEnvironment library() { return FpEnvironment(0x1f80); }
  bool has_mode_of(FpEnvironment other) const { return ((bits_ ^ other.bits_) & ~0x3fu) == 0; }
  void load() const {
    if (_mm_getcsr() != bits_) _mm_setcsr(bits_);
  }

 private:
  explicit constexpr FpEnvironment(uint32_t bits) : bits_(bits) {}
  uint32_t bits_;
};

#elif defined(__aarch64__)

class FpEnvironment {  // FPCR and FPSR
 public:
  static FpEnvironment now() {
    FpEnvironment e;
    asm volatile("mrs %0, fpcr\n\tmrs %1, fpsr" : "=r"(e.control_), "=r"(e.flags_));
    return e;
  }
  static constexpr FpEnvironment library() { return FpEnvironment(); }
  bool has_mode_of(FpEnvironment other) const { return control_ == other.control_; }
  void load() const {
    const FpEnvironment is = now();
    if (is.control_ != control_) asm volatile("msr fpcr, %0" : : "r"(control_) : "memory");
    if (is.flags_ != flags_) asm volatile("msr fpsr, %0" : : "r"(flags_) : "memory");
  }

 private:
  uint64_t control_ = 0, flags_ = 0;
};

#elif defined(__ARM_FP)

class FpEnvironment {  // FPSCR: the flags of exceptions, of saturation and of the last comparison
 public:
  static FpEnvironment now() {
    FpEnvironment e;
    asm volatile("vmrs %0, fpscr" : "=r"(e.bits_));
    return e;
  }
  static constexpr FpEnvironment library() { return FpEnvironment(); }
  bool has_mode_of(FpEnvironment other) const {
    return ((bits_ ^ other.bits_) & ~0xf800009fu) == 0;
  }
  void load() const {
    if (now().bits_ != bits_) asm volatile("vmsr fpscr, %0" : : "r"(bits_) : "memory");
  }

 private:
  uint32_t bits_ = 0;
};

#else

class FpEnvironment {
 public:
  static FpEnvironment now() { return {}; }
  static constexpr FpEnvironment library() { return {}; }
  bool has_mode_of(FpEnvironment) const { return true; }
  void load() const {}
};

#endif

class FpMode {
 public:
  FpMode() : program_(FpEnvironment::now()) {
    if (!program_.has_mode_of(FpEnvironment::library())) enter();
  }
  ~FpMode() {
    if (!program_.has_mode_of(FpEnvironment::library())) hidden_ = outer_;
    program_.load();
  }
  FpMode(const FpMode&) = delete;
  FpMode& operator=(const FpMode&) = delete;

 private:
  friend class ProgramFpMode;

  void enter() {
    outer_ = hidden_;
    hidden_ = program_;
    FpEnvironment::library().load();
  }

  // The program's environment on this thread; the library's if the modes are the same.
  static inline thread_local FpEnvironment hidden_ = FpEnvironment::library();

  const FpEnvironment program_;
  FpEnvironment outer_ = FpEnvironment::library();
};

// Restores the program's mode within an FpMode, while a function of the program is called.
class ProgramFpMode {
 public:
  ProgramFpMode() : library_(FpEnvironment::now()), program_(FpMode::hidden_) {
    FpMode::hidden_ = FpEnvironment::library();
    if (!program_.has_mode_of(library_)) program_.load();
  }
  ~ProgramFpMode() {
    FpMode::hidden_ = program_;
    library_.load();
  }
  ProgramFpMode(const ProgramFpMode&) = delete;
  ProgramFpMode& operator=(const ProgramFpMode&) = delete;

 private:
  const FpEnvironment library_, program_;
};

}  // namespace ga
