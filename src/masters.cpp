// SPDX-License-Identifier: Apache-2.0
#include "masters.hpp"

#include <cstdint>
#include <map>
#include <mutex>

#include "error.hpp"

namespace ga {
namespace {

struct Claim {
  uintptr_t end;
  const MasterClaims* owner;
};

// Those of one context lie apart, as its parameters do, and those of several are kept apart.
struct Registry {
  std::mutex mutex;
  std::map<uintptr_t, Claim> claims;  // by their first address
};

// Never destroyed: a context may outlive the library's own static objects.
Registry& registry() {
  static Registry* const r = new Registry;
  return *r;
}

}  // namespace

void MasterClaims::add(const void* data, size_t bytes, const char* name) {
  if (bytes == 0) return;
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  const auto begin = reinterpret_cast<uintptr_t>(data), end = begin + bytes;
  const auto next = r.claims.lower_bound(end);  // the first that begins behind it
  for (auto at = next; at != r.claims.begin();) {
    const auto& [other, claim] = *--at;
    if (claim.end <= begin) break;
    if (claim.owner != this)
      fail(GA_ERROR_INVALID_STATE,
           "parameter \"%s\": another context has a master of the parameter at %p, which is the same "
           "memory; destroy that context first, or give one of the two GA_MASTER_NONE",
           name, reinterpret_cast<void*>(other));
  }
  r.claims.insert(next, {begin, {end, this}});
}

void MasterClaims::remove(const void* data) noexcept {
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  const auto at = r.claims.find(reinterpret_cast<uintptr_t>(data));
  if (at != r.claims.end() && at->second.owner == this) r.claims.erase(at);
}

void MasterClaims::clear() noexcept {
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  for (auto at = r.claims.begin(); at != r.claims.end();)
    at = at->second.owner == this ? r.claims.erase(at) : std::next(at);
}

}  // namespace ga
