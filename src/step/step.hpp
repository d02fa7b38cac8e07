// SPDX-License-Identifier: Apache-2.0
// The end of a window: reduce, check, clip, update, in this order. Norms are sums of the partials that the accumulating
// passes left; only gradients without partials take a pass of their own (see write_window). The backend makes the
// decisions (decide.hpp), and no function here waits for them.
#pragma once

#include <vector>

#include "model/has_lists.hpp"
#include "model/model.hpp"
#include "ranks/stages.hpp"
#include "step/update.hpp"

namespace ga {

class Step final : HasLists {
 public:
  explicit Step(const Stages& stages);

  // The functions of the ABI.
  ga_window_info window();
  ga_step_result step();
  bool result(int64_t window, bool wait, ga_step_result& out) const {
    return model_.backend->result(window, wait, out);
  }
  void discard();
  const void* gradient(ga_param param, int32_t* dtype, int64_t* count) const;

  static ga_step_result pending();  // the result of a window that a device has yet to end

  void reserve(size_t params) override { norms_.reserve(params); }

 private:
  // How a window ends: it is decided whether it is applied; it has nothing to apply; it is discarded.
  enum class End { kDecided, kEmpty, kDiscarded };

  void check_step() const;
  bool is_written(size_t param) const;
  bool repeats_window() const;
  void write_params(bool discards);
  StepSums write_window(bool discards);
  StepSums send_window(End end);
  bool decide(const WindowTotals& totals, const StepSums& sums);
  void apply();
  ga_step_result end_applied(const WindowTotals& totals);
  ga_step_result end_discarded();
  [[noreturn]] void fail_nonfinite(const Control& c) const;
  void empty_window();
  void discard_over_devices();
  void drop_window();

  const Stages stages_;
  Model& model_;
  Update update_;
  std::vector<ga_param> norms_;  // of StepSums
  bool flags_set_ = false;       // apply() has set all flags of parameters that it would set again
};

}  // namespace ga
