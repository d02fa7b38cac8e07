// SPDX-License-Identifier: Apache-2.0
// Adding, changing and removing parameters.
#pragma once

#include "model/model.hpp"
#include "ranks/stages.hpp"

namespace ga {

class Parameters {
 public:
  explicit Parameters(const Stages& stages) : stages_(stages), model_(stages.model) {}

  ga_param add(void* data, int32_t dtype, Span<const NewParam> entries);
  void bind(ga_param param, void* data);
  void changed(ga_param param);
  void set_frozen(ga_param param, bool frozen);
  void set_group_frozen(ga_group group, bool frozen);
  // which: lr_scale or weight_decay_scale, and that name.
  void set_scale(ga_param param, const char* name, double Tensor::*which, double scale);
  // whole, first: [rank] numbers.
  void set_part(ga_param param, const int64_t* whole, const int64_t* first, int32_t copies);
  void remove(ga_param param);

 private:
  void check_data(const char* name, const void* data, int64_t count, int32_t size,
                  ga_param self) const;
  static void check_cut(const Subject& of, const NewParam& e);
  void check_options(const NewParam& e, int32_t dtype, int64_t elements) const;
  bool is_prepared(ga_param id) const { return static_cast<size_t>(id) < model_.tables.params(); }

  const Stages stages_;
  Model& model_;
};

}  // namespace ga
