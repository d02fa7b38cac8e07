/* SPDX-License-Identifier: Apache-2.0 */
/* Included before every source of a test for Windows (tests/CMakeLists.txt): what its C library has of POSIX under
   another name, or on demand. */
#pragma once

#define _USE_MATH_DEFINES /* M_PI */
#include <stdlib.h>

static inline int setenv(const char* name, const char* value, int overwrite) {
  return overwrite || !getenv(name) ? _putenv_s(name, value) : 0;
}

static inline int unsetenv(const char* name) { return _putenv_s(name, ""); }
