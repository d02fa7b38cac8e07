// SPDX-License-Identifier: Apache-2.0
// What ranks tell each other before and after they exchange anything else: whether they make the same call, with the
// same settings, and whether it has failed on one of them.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "ranks/comm/comm.hpp"
#include "ranks/rank_state.hpp"

namespace ga {

class Agreement {
 public:
  using Items = RankState::Items;

  explicit Agreement(std::shared_ptr<Comm> comm) : comm_(std::move(comm)) {}

 protected:
  static uint64_t digest_of(const std::string& text);
  static uint64_t digest_of(const Items& items);
  // All that changes numbers, by key: of the context and its groups.
  static Items context_items(const ga_comm_options& options, const RankState& state);

  // Throws on every rank if any has failed, which tells why. what: the function that was called.
  void vote(const char* what, const Error* failure) const;
  // What work() throws.
  template <class Work>
  static std::optional<Error> failure_of(Work&& work) {
    std::optional<Error> failure;
    try {
      work();
    } catch (const Error& e) {
      failure = e;
    } catch (const std::exception& e) {
      failure.emplace(GA_ERROR_OUT_OF_MEMORY, e.what());
    }
    return failure;
  }
  // Runs work as this rank's part of a call; throws on every rank if it has failed on any.
  template <class Work>
  void agree_on(const char* what, Work&& work) const {
    const std::optional<Error> failure = failure_of(work);
    vote(what, failure ? &*failure : nullptr);
    if (failure) throw *failure;
  }
  // Runs work(ready) on every rank or to its end on none: see Ranks::on_all_ranks(). alone: this rank does not
  // work, or works alone.
  void all_or_none(const char* what, bool works, bool alone,
                   const std::function<void(const std::function<void()>&)>& work) const;
  // A text of each rank.
  std::vector<std::string> gather_texts(const char* what, std::string own) const;
  // Throws, on every rank, the first item in which some rank differs from rank 0.
  [[noreturn]] void explain(const char* what, const Items& own) const;
  // Throws, on every rank, since all compare the same: rank q makes another call than rank 0.
  [[noreturn]] void fail_call(const char* function, int32_t q) const;

  const std::shared_ptr<Comm> comm_;
};

}  // namespace ga
