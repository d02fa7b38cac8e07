// SPDX-License-Identifier: Apache-2.0
// Each launch of a simulated device twice: by the interpreter of PTX, with the code that nvcc has made of the
// kernel, and as any other; from the same memory, which must be the same afterwards, to the bit. A NaN is equal to
// every other, because processors make different ones. Where a device can
// access all memory of the host, only what the interpreter has written there is compared of it.
//
//   GA_SIM_PTX         the folder of the PTX files; without it nothing is compared
//   GA_SIM_PTX_LOG     a file to which the kernels are written that were compared, a line for each launch
//   GA_SIM_PTX_CHANGE  `add.rn.f32=sub.rn.f32,...`: instructions that are replaced, to see the comparison fail
//
// A difference is printed, and the process ends with status 66.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <typeinfo>

namespace ga::ptx {

bool is_wanted();
std::function<void()> compared(const std::type_info& kernel, const void* arguments, size_t bytes,
                               int64_t blocks, std::function<void()> simulated, int device);

}  // namespace ga::ptx
