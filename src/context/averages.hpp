// SPDX-License-Identifier: Apache-2.0
// Moving averages of the parameters. The pass that updates a parameter moves its average too.
#pragma once

#include "model/copies.hpp"
#include "model/model.hpp"
#include "model/table_writer.hpp"

namespace ga {

class Averages {
 public:
  Averages(Model& model, TableWriter& writer, Copies& copies)
      : model_(model), writer_(writer), copies_(copies) {}

  void set(const ga_ema* ema);
  void copy_to(ga_param param, void* out, int32_t dtype);
  void swap(bool on);
  bool swapped() const { return swapped_; }  // parameters and EMA are exchanged
  int64_t bytes() const { return static_cast<int64_t>(kept_.bytes()); }

 private:
  void check_kept(const char* what) const;
  bool swaps_in_place(const Param& p) const;

  Model& model_;
  TableWriter& writer_;
  Copies& copies_;
  bool swapped_ = false;
  Buffer kept_;  // parameters that were overwritten by their averages
};

}  // namespace ga
