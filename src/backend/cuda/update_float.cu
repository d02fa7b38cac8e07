// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/update.hpp"

namespace ga::cuda {

UpdateLaunches float_launches() { return launches<float>(); }

}  // namespace ga::cuda
