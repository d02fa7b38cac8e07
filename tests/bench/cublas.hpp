// SPDX-License-Identifier: Apache-2.0
//
// Loads cuBLAS when it is needed: it has 500 MB, and the machine that runs the benchmark may have
// another version than the machine that built it, or none.
#ifndef GRADACCUM_TESTS_BENCH_CUBLAS_HPP_
#define GRADACCUM_TESTS_BENCH_CUBLAS_HPP_

#include <cublas_v2.h>
#include <dlfcn.h>

#include <string>

namespace bench {

struct Cublas {
  decltype(&cublasCreate) create = nullptr;
  decltype(&cublasDestroy) destroy = nullptr;
  decltype(&cublasSetStream) set_stream = nullptr;
  decltype(&cublasSetWorkspace) set_workspace = nullptr;
  decltype(&cublasGemmEx_64) gemm = nullptr;
};

// Returns null if no cuBLAS was found, with the loader's messages in missing.
inline const Cublas* open_cublas(std::string& missing) {
  static Cublas functions;
#ifdef GA_SIMULATED  // linked
  missing.clear();
  functions = {&cublasCreate, &cublasDestroy, &cublasSetStream, &cublasSetWorkspace,
               &cublasGemmEx_64};
  return &functions;
#else
  for (const int major : {CUDART_VERSION / 1000, 13, 12}) {
    const std::string file = "libcublas.so." + std::to_string(major);
    void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
      missing += std::string(missing.empty() ? "" : "; ") + dlerror();
      continue;
    }
    const auto find = [library](const char* name, auto& function) {
      function =
          reinterpret_cast<std::remove_reference_t<decltype(function)> >(dlsym(library, name));
      return function != nullptr;
    };
    if (find("cublasCreate_v2", functions.create) && find("cublasDestroy_v2", functions.destroy) &&
        find("cublasSetStream_v2", functions.set_stream) &&
        find("cublasSetWorkspace_v2", functions.set_workspace) &&
        find("cublasGemmEx_64", functions.gemm)) {
      return &functions;
    }
    missing += std::string(missing.empty() ? "" : "; ") + file + " is too old";
  }
  return nullptr;
#endif
}

}  // namespace bench

#endif  // GRADACCUM_TESTS_BENCH_CUBLAS_HPP_
