// SPDX-License-Identifier: Apache-2.0
// What the optimizer keeps for a parameter, by name: in the host's memory for the program, which may read it, write it
// and put it back to the beginning.
#pragma once

#include <vector>

#include "model/model.hpp"

namespace ga {

class Copies;
class Preparation;

class NamedState {
 public:
  NamedState(Model& model, Preparation& preparation, Copies& copies)
      : model_(model), preparation_(preparation), copies_(copies) {}

  int32_t count(ga_param param) const;
  ga_state_info info(ga_param param, int32_t index) const;
  void get(ga_param param, const char* name, void* out, int32_t dtype, int64_t count);
  void set(ga_param param, const char* name, const void* data, int32_t dtype, int64_t count);
  void reset(ga_param param);

 private:
  std::vector<StateArray> states_of(size_t param) const;
  StateArray state_for(ga_param id, const char* name, int32_t dtype, int64_t count,
                       const char* what);
  bool is_signed(ga_param id, const StateArray& s) const;
  void check_numbers(ga_param id, const StateArray& s, int32_t dtype, const void* data) const;
  void read_whole(ga_param id, const StateArray& s, void* out);
  void write_own(ga_param id, const StateArray& s, const void* data);
  void read_codes(ga_param id, const StateArray& s, float* out);
  void write_codes(ga_param id, const StateArray& s, const float* data);

  Model& model_;
  Preparation& preparation_;
  Copies& copies_;
};

}  // namespace ga
