// SPDX-License-Identifier: Apache-2.0
// Shadow arrays, a second one for each that an update writes, for parameters that are updated before their window is
// decided: the update reads an array and writes its shadow, and ga_step swaps the two or forgets what was written.
#pragma once

#include <cstdint>
#include <vector>

#include "model/arrays.hpp"

namespace ga {

class ShadowArrays {
 public:
  ShadowArrays(const ga_config& config, Backend& backend, ParamList& params,
               const ParamArrays& arrays, MemoryRanges& ranges)
      : config_(config), backend_(backend), params_(params), arrays_(arrays), ranges_(ranges) {}

  // The parameters or their arrays may be others than before.
  void look_again() { due_ = true; }
  // Allocates for the parameters that `wanted` names, up to ga_config.eager_bytes. If there is no memory,
  // their updates wait, which is no error.
  template <class Wanted>
  void make(Wanted&& wanted) {
    if (!due_) return;
    size_t bytes = 0;
    for (size_t i = 0; i < params_.size(); ++i)
      if (params_[i].owns && wanted(i) && !has(i)) bytes += bytes_of(i);
    grow(bytes);
    due_ = false;
  }
  // The arrays of a parameter, given to it now if there is room; else NULL.
  const Targets* give(size_t param);
  // Makes what was written the parameter's state; TableWriter::set_arrays() is to follow. Returns what the parameter
  // itself is to become; without data: it is that already.
  Array exchange(size_t param);
  void forget(size_t param);  // which is removed

  // Bytes for the parameters that `wanted` names; `written`: those that are there.
  template <class Wanted>
  int64_t bytes(Wanted&& wanted, int64_t& written) const {
    size_t more = 0;
    for (size_t i = 0; i < params_.size(); ++i)
      if ((params_[i].owns || !params_[i].frozen) && wanted(i) && !has(i)) more += bytes_of(i);
    written = static_cast<int64_t>(allocated_);
    size_t unused = 0;
    for (const Pool& pool : pools_) unused += pool.memory.bytes() - pool.taken;
    return static_cast<int64_t>(allocated_ + within_limit(more > unused ? more - unused : 0));
  }

 private:
  struct Set {
    Targets targets = {};
    size_t pool = 0;  // number of the pool that it lies in, from 1 on; 0: none
  };
  struct Pool {
    Buffer memory;
    size_t taken = 0, users = 0;
  };

  bool has(size_t i) const { return i < sets_.size() && sets_[i].pool != 0; }
  // f(array, bytes) for each shadow array.
  template <class F>
  void each(size_t param, Targets& targets, F&& f) const;
  bool writes_early(size_t param) const;
  bool place(size_t param);
  size_t bytes_of(size_t param) const;
  size_t within_limit(size_t more) const;
  void grow(size_t bytes);

  const ga_config& config_;
  Backend& backend_;
  ParamList& params_;
  const ParamArrays& arrays_;
  MemoryRanges& ranges_;
  std::vector<Set> sets_;  // by parameter
  std::vector<Pool> pools_;
  size_t allocated_ = 0;  // bytes
  bool due_ = true;
};

}  // namespace ga
