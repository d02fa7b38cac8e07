// SPDX-License-Identifier: Apache-2.0
#include "build.hpp"

#include <stdlib.h>

#if defined(__has_feature)
#define GA_HAS_FEATURE(name) __has_feature(name)
#else
#define GA_HAS_FEATURE(name) 0
#endif

namespace ga::test {

bool has_onednn() {
#if defined(GA_TEST_MODULE_PATH)
  setenv("GA_MODULE_PATH", GA_TEST_MODULE_PATH, 0);
  return true;
#else
  return false;
#endif
}

bool is_sanitized() {
#if defined(GA_ASAN) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || \
    GA_HAS_FEATURE(address_sanitizer) || GA_HAS_FEATURE(thread_sanitizer) ||             \
    GA_HAS_FEATURE(memory_sanitizer)
  return true;
#else
  return false;
#endif
}

bool refuses_undefined_behaviour() {
#if defined(GA_UBSAN) || GA_HAS_FEATURE(undefined_behavior_sanitizer)
  return true;
#else
  return false;
#endif
}

}  // namespace ga::test
