// SPDX-License-Identifier: Apache-2.0
// A context's matrix engine: oneDNN, in a side module that is opened by the first product.
#pragma once

#include "backend/backend.hpp"
#include "error.hpp"

namespace ga::cpu {

class MatmulEngine {
 public:
  void open() { fail(GA_ERROR_UNSUPPORTED, "the oneDNN module is being written"); }
  void run(const MatmulTask&, int) {}
};

}  // namespace ga::cpu
