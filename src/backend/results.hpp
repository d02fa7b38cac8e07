// SPDX-License-Identifier: Apache-2.0
// What the backends say of results that they do not keep.
#pragma once

#include "core/error.hpp"

namespace ga {

// Refuses to return the result of `window`, where that of window `last` is the newest of `kept`.
[[noreturn]] inline void fail_unknown_result(int64_t window, int64_t last, int64_t kept) {
  if (window < 0)
    fail(GA_ERROR_INVALID_ARGUMENT, "window was %lld, expected the number of a window, or 0",
         ll(window));
  if (last == 0) fail(GA_ERROR_INVALID_ARGUMENT, "no window has been stepped yet");
  if (window > last)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "there is no result of window %lld: the last one that was stepped is %lld", ll(window),
         ll(last));
  fail(GA_ERROR_INVALID_ARGUMENT,
       "the result of window %lld is not kept any more: the last window is %lld, of %lld that are "
       "kept; a load brings the result of its last window alone",
       ll(window), ll(last), ll(kept));
}

}  // namespace ga
