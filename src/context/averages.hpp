// SPDX-License-Identifier: Apache-2.0
// Averages of the parameters: an EMA, which the pass that updates a parameter moves too, or the average of a
// Schedule-Free optimizer, which is computed when it is asked for.
#pragma once

#include "model/model.hpp"

namespace ga {

class Copies;
class TableWriter;

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
  bool is_computed(const Param& p) const;
  bool has_average(const Param& p, const ParamState& state) const;
  bool is_here(const Param& p) const;
  bool swaps_in_place(const Param& p) const;
  static size_t partials_bytes(const Param& p) {
    return static_cast<size_t>(chunk_count(p.shard.count)) * sizeof(Partial);
  }
  void compute(const Param& p, const Array& y, const Array& out, const Buffer& partials);

  Model& model_;
  TableWriter& writer_;
  Copies& copies_;
  bool swapped_ = false;
  Buffer kept_;  // parameters that were overwritten by their averages
};

}  // namespace ga
