// Converts arrays of f64, f16 and bf16 to and from f32, the dtype that the network computes in.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "gradaccum/gradaccum.h"

std::size_t bytes_of(ga_dtype dtype);

// Rounds to nearest, ties to even.
void from_floats(const float* in, std::int64_t count, ga_dtype dtype, void* out);

void to_floats(const void* in, std::int64_t count, ga_dtype dtype, float* out);
