// SPDX-License-Identifier: Apache-2.0
// Updates ahead of ga_step (ga_config.eager): of parameters to which nothing more comes, as soon as the
// weight of the window is known. Where the step is bound to be applied, and no norm over several parameters
// clips it, they are updated in place. Else a second set of arrays takes what is computed, and ga_step
// exchanges the sets if its decision has come out as foreseen, and else computes the update from the first.
//
// Where gradients are exchanged in the background, a parameter is updated once its sum over the ranks is there,
// and never in place, since another rank may end the window otherwise.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/background.hpp"
#include "core/callers.hpp"
#include "model/second_set.hpp"

namespace ga {

class Context;

class Eager {
 public:
  explicit Eager(Context& context);

  // Makes room for so many parameters with so many chunks, so that no later call allocates.
  void reserve(size_t params, int64_t chunks);
  void set_tables(const ScalarTables& tables, const TaskTables& tasks) {
    if (backend_) backend_->set_tables(tables, tasks);
  }
  // Parameters, their arrays, or options that decide about the second set may have changed.
  void look_again() { second_set_.look_again(); }
  void make_second_set();
  void forget(size_t param) { second_set_.forget(param); }  // which is removed
  int64_t bytes(int64_t& written) const;                    // of the second set
  int64_t list_bytes(size_t params) const;

  // In a window:
  void note(ga_param param) { waiting_.push_back(param); }  // it has become ready
  // What was noted may be updated. Lets go of the lock while it is.
  void release(Callers::Lock& lock);
  // Where gradients are exchanged in the background, in place of release():
  void open();                                    // the exchange begins
  void await(ga_param param, const Array& sum);   // in the order in which the sums will be there
  size_t begun() const { return begun_.size(); }  // how many of these will be updated
  // From the thread that exchanges: the weight of the window over all ranks, once; then, that the sums of so
  // many begun are there.
  void agreed(double weight) { totals_.weight = weight; }
  void arrived(size_t end);
  void run_arrived();  // updates these, where no thread of the library does
  bool has_begun() const;
  // For calls that would read or change what is updated in place, or what that was computed with.
  void check_not_in_place(const char* what) const;
  // Waits for the parameter that the library's threads update. Those behind it are left to ga_step, for
  // which all threads of the context work; after an exchange has begun, all others too.
  void join();
  void recall();  // options change: has ga_step compute anew what was computed with those of before

  // After the decision: if the step is applied, takes over what was computed as decided.
  void settle(bool applied);
  void discard();
  // Calls on_param_done for what it was not called for yet.
  void tell_done();
  void end_window();
  void check_callbacks();  // throws if one has thrown an exception
  // Whether the parameter may hold what an update ahead has made of it.
  bool is_written_early(ga_param id) const {
    return std::find(early_.begin(), early_.end(), id) != early_.end();
  }
  // Whether this thread runs on_param_done of that context.
  static bool is_telling(const Context& context);

 private:
  bool may_go_ahead(size_t param) const;
  bool is_in_passes(size_t param) const;
  bool is_settled(size_t param) const;
  bool needs_second_set(size_t param) const;
  void begin(ga_param id, const Array* sum);
  void run(Span<const ReadyParam> params);
  void close();
  bool has_failed(const ReadyParam& begun) const;
  void forget(const ReadyParam& begun);
  void forget_begun(size_t first);
  void restore_early();
  void add_move(const Param& p, const Array& from);
  void tell(ga_param param) noexcept;

  Context& context_;
  SecondSet second_set_;
  std::unique_ptr<Backend> backend_;  // of ga_config.eager_threads; NULL: the context's

  std::vector<ga_param> waiting_, ready_;
  std::vector<ReadyParam> begun_;  // in this window; of these, Ahead::kNot: an update that failed
  size_t done_ = 0;                // without threads of the library: how many of these are updated
  std::vector<ga_param> early_;    // of these, those that are written early
  WindowTotals totals_ = {};
  bool in_place_ = false;                        // some are updated in place
  int64_t count_ = 0, waited_ = 0, redone_ = 0;  // see ga_step_result
  std::atomic<bool> threw_{false};

  std::mutex mutex_;  // of the next two, which the thread that exchanges reads and writes
  bool open_ = false;
  size_t arrived_ = 0;

  // Working list.
  TaskList<FinishTask> moves_;

  std::unique_ptr<Background> thread_;  // with backend_; last: it uses the others
};

}  // namespace ga
