// SPDX-License-Identifier: Apache-2.0
#include "core/fork.hpp"

#include <new>

#include "core/os/system.hpp"

namespace ga {
namespace {

void in_child() { fork_generation.fetch_add(1, std::memory_order_relaxed); }

[[gnu::constructor]] void at_load() {
  try {
    watch_forks();
  } catch (const std::bad_alloc&) {  // the first context tries again
  }
}

}  // namespace

std::atomic<uint32_t> fork_generation{0};

void watch_forks() {
  static const bool watched = [] {
    os::at_fork(in_child);
    return true;
  }();
  static_cast<void>(watched);
}

}  // namespace ga
