// SPDX-License-Identifier: Apache-2.0
// A context's matrix engine: oneDNN, in a side module that is opened by the first product.
#pragma once

#include "backend/backend.hpp"
#include "backend/cpu/matmul_module.h"
#include "backend/cpu/threads.hpp"

namespace ga::cpu {

class MatmulEngine {
 public:
  explicit MatmulEngine(Threads& threads) : threads_(threads) {}

  // Throws GA_ERROR_UNSUPPORTED, or std::bad_alloc; nothing to do from the second time on.
  void open();
  // After open(). Throws GA_ERROR_FAULT.
  void run(const MatmulTask& task);

 private:
  Threads& threads_;
  const ga_matmul_module* module_ = nullptr;
};

}  // namespace ga::cpu
