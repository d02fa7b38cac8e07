// SPDX-License-Identifier: Apache-2.0
// Plans of parameters that are updated before their window is decided: what follows from all that is known
// by then, and whether the decision has come to the same.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/cpu/crew.hpp"
#include "backend/decide.hpp"

namespace ga::cpu {

class Ahead {
 public:
  void reserve(size_t params) {
    if (params <= states_.size()) return;
    states_.resize(params);
    grounds_.resize(params);
    measured_.resize(params);
  }

  static int64_t bytes(size_t params) {
    return static_cast<int64_t>(params * (sizeof(ParamState) + sizeof(Grounds) + sizeof(char)));
  }

  // Writes the plans of these parameters.
  void plan(const ScalarTables& tables, const WindowTotals& totals, Params params) {
    control_ = *tables.control;
    groups_.assign(tables.group_states, tables.group_states + tables.groups);
    ScalarTables copies = tables;
    copies.control = &control_;
    copies.group_states = groups_.data();
    copies.param_states = states_.data();
    Crew crew;
    foresee_window(crew, copies, totals);
    for (size_t k = 0; k < params.size; ++k) {
      const auto i = static_cast<size_t>(params.data[k]);
      states_[i] = tables.param_states[i];
      foresee_param(crew, copies, params.data[k]);
      grounds_[i] = grounds_of(copies, params.data[k]);
    }
  }

  bool came_true(const ScalarTables& tables, ga_param param) const {
    return same(grounds_[static_cast<size_t>(param)], grounds_of(tables, param));
  }

  // Whether the norm of a parameter is taken in the pass that updates it.
  char& measured(ga_param param) { return measured_[static_cast<size_t>(param)]; }

 private:
  Control control_ = {};
  std::vector<GroupState> groups_;
  std::vector<ParamState> states_;  // by parameter, as the next two
  std::vector<Grounds> grounds_;
  std::vector<char> measured_;
};

}  // namespace ga::cpu
