// SPDX-License-Identifier: Apache-2.0
// Updates ahead of ga_step (ga_config.eager), as the parts and stages of a context see them. step/eager.hpp is the
// real one; what stands here makes none.
#pragma once

#include <cstdint>

#include "backend/backend.hpp"
#include "core/concurrent_calls.hpp"

namespace ga {

class Speculation {
 public:
  virtual ~Speculation() = default;

  virtual bool active() const { return false; }

  // ---- Arrays ----

  virtual void set_tables(const ScalarTables&, const TaskTables&) {}
  // Parameters, their arrays, or options that decide about the shadow arrays may have changed.
  virtual void look_again() {}
  virtual void make_shadow() {}
  virtual void forget(size_t param) { (void)param; }                     // which is removed
  virtual int64_t bytes(int64_t& written) const { return written = 0; }  // of the shadow arrays
  virtual int64_t list_bytes(size_t) const { return 0; }

  // ---- A window ----

  virtual void note(ga_param) {}  // it has become ready
  // What was noted may be updated. Lets go of the lock while it is. Nothing over ranks: there, sums are updated.
  virtual void release(ConcurrentCalls::Lock&) {}
  // Where gradients are exchanged in the background, in place of release():
  virtual void open() {}                         // the exchange begins
  virtual void await(ga_param, const Array&) {}  // in the order in which the sums will be there
  virtual size_t begun() const { return 0; }     // how many of these will be updated
  // From the thread that exchanges: the weight of the window over all ranks, once; then, that the sums of so
  // many begun are there.
  virtual void agreed(double weight) { (void)weight; }
  virtual void arrived(size_t end) { (void)end; }
  virtual void run_arrived() {}  // updates these, where no thread of the library does
  virtual bool has_begun() const { return false; }
  // For calls that would read or change what is updated in place, or what that was computed with.
  virtual void check_not_in_place(const char*) const {}
  // Waits for the parameter that the library's threads update. Those behind it are left to ga_step, for
  // which all threads of the context work; after an exchange has begun, all others too.
  virtual void join() {}
  virtual void recall() {
  }  // options change: has ga_step compute anew what was computed with those of before
  // Whether the parameter may hold what an update ahead has made of it.
  virtual bool is_written_early(ga_param) const { return false; }

  // ---- The end of a window ----

  // After the decision: if the step is applied, takes over what was computed as decided.
  virtual void settle(bool applied) { (void)applied; }
  virtual void discard() {}
  virtual void report_done() {}  // calls on_param_done for what it was not called for yet
  virtual void end_window() {}
  virtual void check_callbacks() {}  // throws if one has thrown an exception
};

}  // namespace ga
