// SPDX-License-Identifier: Apache-2.0
#include "model/masters.hpp"

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "core/error.hpp"
#include "core/fork.hpp"

namespace ga {
namespace {

struct Claim {
  uintptr_t end;
  const MasterClaims* owner;
};

// No claims overlap: parameters of one context do not, and those of two contexts are refused if
// they do.
struct Registry {
  std::mutex mutex;
  std::map<uintptr_t, Claim> claims;  // by their first address
  const uint32_t generation = process_generation();
};

// The registry of this process. A child of fork() gets its own: the contexts of its parent are not
// used there, and a thread of the parent may have held the mutex. It is never destroyed, because a
// context may outlive the library's static objects.
Registry& registry() {
  static std::atomic<Registry*> current{nullptr};
  Registry* known = current.load(std::memory_order_acquire);
  if (known && known->generation == process_generation()) return *known;
  auto fresh = std::make_unique<Registry>();
  if (current.compare_exchange_strong(known, fresh.get(), std::memory_order_acq_rel))
    return *fresh.release();
  return *known;  // another thread was first
}

}  // namespace

void MasterClaims::add(const void* data, size_t bytes, const char* name) {
  if (bytes == 0) return;
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  const auto begin = reinterpret_cast<uintptr_t>(data), end = begin + bytes;
  const auto next = r.claims.lower_bound(end);  // the first claim after the memory
  for (auto at = next; at != r.claims.begin();) {
    const auto& [other, claim] = *--at;
    if (claim.end <= begin) break;
    if (claim.owner != this)
      fail(GA_ERROR_INVALID_STATE,
           "parameter \"%s\": another context has a master of the parameter at %p, which is the "
           "same memory; destroy that context first, or give one of the two GA_MASTER_NONE",
           name, reinterpret_cast<void*>(other));
  }
  r.claims.insert(next, {begin, {end, this}});
  any_ = true;
}

void MasterClaims::remove(const void* data) noexcept {
  if (!any_) return;
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  const auto at = r.claims.find(reinterpret_cast<uintptr_t>(data));
  if (at != r.claims.end() && at->second.owner == this) r.claims.erase(at);
}

void MasterClaims::clear() noexcept {
  if (!any_) return;
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  for (auto at = r.claims.begin(); at != r.claims.end();)
    at = at->second.owner == this ? r.claims.erase(at) : std::next(at);
}

}  // namespace ga
