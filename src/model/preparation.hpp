// SPDX-License-Identifier: Apache-2.0
// Gives the parameters of a model their arrays and their entries in the tables, before the first call that needs them:
// all of them or, if there is no memory, none.
#pragma once

#include <vector>

#include "model/has_lists.hpp"
#include "model/model.hpp"

namespace ga {

class TableWriter;

class Preparation {
 public:
  Preparation(Model& model, TableWriter& writer) : model_(model), writer_(writer) {}

  void add(HasLists& stage) { stages_.push_back(&stage); }

  // Called after the last check of a call that contributes, so that no other call leaves arrays behind.
  void prepare() {
    make_arrays();
    model_.arrays.fill_new();
  }
  // Gives every parameter that is not frozen its arrays, if it has none yet.
  void make_arrays() {
    if (model_.arrays.lacking()) make_lacking();
    if (model_.config.eager) model_.speculation->make_shadow();
  }
  // Not what updates ahead take, which depend on an exchange that the context may have yet to get.
  void make_own() {
    if (model_.arrays.lacking()) make_lacking();
    model_.arrays.fill_new();
  }
  // Bytes of the working lists for so many parameters, and of what the host knows of them.
  int64_t bytes_of_lists(size_t params) const;

 private:
  void make_lacking();

  Model& model_;
  TableWriter& writer_;
  std::vector<HasLists*> stages_;
};

}  // namespace ga
