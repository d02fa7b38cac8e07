// SPDX-License-Identifier: Apache-2.0
// Master weights and the parameters of 16 bits that are copies of them, where the program may write to those
// (ga_param_options.follow_data).
#pragma once

#include <functional>

#include "model/model.hpp"

namespace ga {

class TableWriter;

class Copies {
 public:
  Copies(Model& model, TableWriter& writer) : model_(model), writer_(writer) {}

  // Has the master weights be what the program has written to the parameter since, if they follow it.
  void follow_data(ga_param id);
  void follow_data();  // of all parameters
  // Rounds those parameters from the master weights that the library has written, if these follow the program: what
  // the parameters held before would look as if the program had written it since. All ranks call it, where the
  // optimizer is sharded. ready: throws on every rank if it was not called on all, before parameters are gathered.
  void write(const std::function<bool(ga_param)>& written, const Ranks::Ready& ready = {});

 private:
  Model& model_;
  TableWriter& writer_;
};

}  // namespace ga
