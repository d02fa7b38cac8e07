// SPDX-License-Identifier: Apache-2.0
// The library as a whole: its version, its build, its devices, the last error.
#include "api/call.hpp"
#include "backend/cpu/kernels.hpp"

using namespace ga::api;
using ga::guard;

#ifndef GA_MODULES  // that were built with the library
#define GA_MODULES "none"
#endif
#define GA_STRING_(x) #x
#define GA_STRING(x) GA_STRING_(x)
#ifdef __clang__
#define GA_COMPILER "clang " __clang_version__
#else
#define GA_COMPILER "gcc " __VERSION__
#endif

extern "C" {

int32_t ga_version(void) {
  return 10000 * GA_VERSION_MAJOR + 100 * GA_VERSION_MINOR + GA_VERSION_PATCH;
}

const char* ga_build_info(void) {
  return "libgradaccum " GA_STRING(GA_VERSION_MAJOR) "." GA_STRING(GA_VERSION_MINOR) "." GA_STRING(
      GA_VERSION_PATCH) "; " GA_COMPILER "; cpu loops: " GA_CPU_ISA_NAMES
                        "; threads: "
#ifdef _OPENMP
                        "OpenMP " GA_STRING(_OPENMP)
#else
                        "the library's own"
#endif
                            "; modules: " GA_MODULES;
}

const char* ga_status_name(ga_status status) {
  static constexpr const char* names[] = {"GA_OK",
                                          "GA_ERROR_INVALID_ARGUMENT",
                                          "GA_ERROR_INVALID_STATE",
                                          "GA_ERROR_OUT_OF_MEMORY",
                                          "GA_ERROR_UNSUPPORTED",
                                          "GA_ERROR_NONFINITE",
                                          "GA_ERROR_FAULT",
                                          "GA_ERROR_INTERNAL",
                                          "GA_ERROR_WINDOW_FULL",
                                          "GA_ERROR_IO",
                                          "GA_ERROR_FORMAT",
                                          "GA_ERROR_COMMUNICATION",
                                          "GA_ERROR_CANCELLED"};
  constexpr int32_t count = sizeof names / sizeof *names;
  return status >= 0 && status < count ? names[status] : "unknown status";
}

const char* ga_last_error(void) { return ga::last_error(); }

ga_status ga_build_init(ga_build* out, size_t struct_size) {
  return init_zeros(out, struct_size, "ga_build");
}

ga_status ga_build_describe(ga_build* out) {
  return guard([&] {
    check_out(out, "ga_build");
    auto b = zeros<ga_build>();
    b.version = ga_version();
    b.onednn = ga::onednn_version();
    ga::cuda_versions(b.cuda_runtime, b.cuda_driver);
#ifdef _OPENMP
    b.openmp = _OPENMP;
#endif
    b.compiler = GA_COMPILER;
    b.cpu_loops = GA_CPU_ISA_NAMES;
    write_struct(out, b);
  });
}

ga_status ga_device_count(ga_device device, int32_t* out) {
  return guard([&] {
    require(out, "out");
    ga::check_choice("device", device, GA_DEVICE_CUDA, "ga_device");
    *out = device == GA_DEVICE_CUDA ? ga::cuda_device_count() : 1;
  });
}

}  // extern "C"
