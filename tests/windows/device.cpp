// SPDX-License-Identifier: Apache-2.0
// What every test program has in place of ../device.cpp where there are no other devices than the CPU.
#include <fcntl.h>
#include <io.h>

#include <cstdio>
#include <cstring>

// Lines end as tests/cases and ctest expect it.
[[maybe_unused]] static const int binary = _setmode(_fileno(stdout), _O_BINARY);

namespace ga::test {

void copy(void* to, const void* from, size_t bytes);

void copy(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace ga::test
