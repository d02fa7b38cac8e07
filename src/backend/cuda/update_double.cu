// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/update.hpp"

namespace ga::cuda {

UpdateLaunches double_launches() { return launches<double>(); }

}  // namespace ga::cuda
