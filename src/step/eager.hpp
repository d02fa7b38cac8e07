// SPDX-License-Identifier: Apache-2.0
// Updates ahead of ga_step (ga_config.eager): of parameters to which nothing more comes, as soon as the
// weight of the window is known. Where the step is bound to be applied, and no norm over several parameters
// clips it, they are updated in place. Else shadow arrays take what is computed, and ga_step
// swaps them in if its decision has come out as predicted, and else computes the update anew.
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
#include "core/concurrent_calls.hpp"
#include "model/has_lists.hpp"
#include "model/model.hpp"
#include "model/shadow_arrays.hpp"
#include "ranks/stages.hpp"

namespace ga {

class Eager final : public Speculation, HasLists {
 public:
  explicit Eager(const Stages& stages);

  // See model/speculation.hpp.
  bool active() const override { return true; }
  void set_tables(const ScalarTables& tables, const TaskTables& tasks) override {
    if (backend_) backend_->set_tables(tables, tasks);
  }
  void look_again() override { shadow_.look_again(); }
  void make_shadow() override;
  void forget(size_t param) override { shadow_.forget(param); }
  int64_t bytes(int64_t& written) const override;
  int64_t list_bytes(size_t params) const override;
  void note(ga_param param) override { waiting_.push_back(param); }
  void release(ConcurrentCalls::Lock& lock) override;
  void open() override;
  void await(ga_param param, const Array& sum) override;
  size_t begun() const override { return begun_.size(); }
  void agreed(double weight) override { totals_.weight = weight; }
  void arrived(size_t end) override;
  void run_arrived() override;
  bool has_begun() const override;
  void check_not_in_place(const char* what) const override;
  void join() override;
  void recall() override;
  bool is_written_early(ga_param id) const override {
    return std::find(early_.begin(), early_.end(), id) != early_.end();
  }
  void settle(bool applied) override;
  void discard() override;
  void report_done() override;
  void end_window() override;
  void check_callbacks() override;

  // Whether this thread runs on_param_done of the context with that model.
  static bool is_telling(const Model& model);

  void reserve(size_t params) override;

 private:
  bool may_go_ahead(size_t param) const;
  bool is_in_passes(size_t param) const;
  bool is_settled(size_t param) const;
  bool needs_shadow(size_t param) const;
  void begin(ga_param id, const Array* sum);
  void run(Span<const ReadyParam> params);
  void close();
  bool has_failed(const ReadyParam& begun) const;
  void forget(const ReadyParam& begun);
  void forget_begun(size_t first);
  void restore_early();
  void add_move(const Param& p, const Array& from);
  void tell(ga_param param) noexcept;

  const Stages stages_;
  Model& model_;
  ShadowArrays shadow_;
  std::unique_ptr<Backend> backend_;  // of ga_config.eager_threads; NULL: the context's

  std::vector<ga_param> waiting_, ready_;
  std::vector<ReadyParam> begun_;  // in this window; of these, Ahead::kNot: an update that failed
  size_t done_ = 0;                // without threads of the library: how many of these are updated
  std::vector<ga_param> early_;    // of these, those that are written early
  WindowTotals totals_ = {};
  bool in_place_ = false;                             // some are updated in place
  int64_t count_ = 0, waited_ = 0, rolled_back_ = 0;  // see ga_step_result
  std::atomic<bool> threw_{false};

  std::mutex mutex_;  // of the next two, which the thread that exchanges reads and writes
  bool open_ = false;
  size_t arrived_ = 0;

  // Working list.
  TaskList<FinishTask> moves_;

  std::unique_ptr<Background> thread_;  // with backend_; last: it uses the others
};

}  // namespace ga
