// SPDX-License-Identifier: Apache-2.0
// The tables of a context: what its program has set, what the steps have made of it, and the tasks of
// its parameters, where the kernels read them. Their structs are in control.hpp and backend/tasks.hpp.
//
//   entry       one for        written by                                     read by
//   Settings    the context    the host, when an option changes               decide.hpp
//   Control     the context    decide.hpp                                     decide.hpp, the host
//   GroupInput  each group     the host, when an option changes               decide.hpp
//   GroupState  each group     decide.hpp; the host, when a group is added    decide.hpp
//                              or the steps are set
//   ParamInput  each param.    the host: describe() when an option or an      decide.hpp
//                              array changes; TableWriter in ga_step
//   ParamState  each param.    decide.hpp, per micro-batch or per step; the   decide.hpp, the host
//                              host, between windows (Progress)
//   ParamPlan   each param.    decide.hpp, per step                           the kernels
//   Composites  each param.    the host, as ParamInput                        the kernels
//   UpdateTask  each param.    the host, as ParamInput; once for the update,  the kernels
//                              once for the first pass of a layer-wise Op
//   UnitTask    each param.    the host, as ParamInput; under GA_CLIP_AGC     decide.hpp, the kernels
//   FactorTask  each param.    the host, as ParamInput; of Adafactor          decide.hpp, the kernels
//   BnInput     each layer     the host, when a layer is added or frozen      decide.hpp, the kernels
#pragma once

#include "model/table.hpp"

namespace ga {

class ContextTables {
 public:
  Table<Settings> settings;
  State<Control> control;
  Table<GroupInput> group_inputs;
  State<GroupState> group_states;
  Table<ParamInput> param_inputs;
  State<ParamState> param_states;
  State<ParamPlan> plans;
  Table<Composites> composites;
  Table<UpdateTask> updates, measures;
  Table<UnitTask> units;
  Table<FactorTask> factors;
  Table<BnInput> layers;

  size_t params() const { return param_inputs.size(); }  // so many have entries

  // What a table has an entry for. kLayer: a parameter, and only layer-wise Ops and clipping by units
  // read it. kNorm: a layer with batch normalisation.
  enum Axis { kContext, kGroup, kParam, kLayer, kNorm };

  // Copies of the tables of an axis, with room for so many groups or parameters, to be swapped in. In
  // the result, the tables of other axes are empty.
  ContextTables grown(Backend& backend, Axis axis, size_t size) const {
    ContextTables t;
    each(
        [&](Axis a, const auto& old, auto& grown) {
          if (matches(a, axis)) grown = old.grown(backend, size);
        },
        *this, t);
    return t;
  }
  void swap(ContextTables& other, Axis axis) noexcept {
    each(
        [&](Axis a, auto& mine, auto& theirs) {
          if (matches(a, axis)) mine.swap(theirs);
        },
        *this, other);
  }

  // Has flush() send every entry of every parameter again. layers: those of kLayer too.
  void edit_params(bool layers) {
    const auto edit = [&](Axis a, auto& table) {
      if (a == kParam || (layers && a == kLayer)) table.edit_all();
    };
    each(edit, *this);
  }
  void flush(Backend& backend) {
    each([&](Axis, auto& table) { table.flush(backend); }, *this);
  }

  // Bytes for so many groups and parameters, without those of layers.
  static int64_t bytes(size_t groups, size_t params) {
    size_t sum = 0;
    const auto add = [&](Axis a, const auto& table) {
      const size_t entries = a == kContext ? 1 : a == kGroup ? groups : a == kNorm ? 0 : params;
      sum += sizeof(*table.at()) * entries;
    };
    const ContextTables none;
    each(add, none);
    return static_cast<int64_t>(sum);
  }

 private:
  static bool matches(Axis a, Axis wanted) {
    return a == wanted || (a == kLayer && wanted == kParam);
  }
  // f(axis, table...) for the same table of each set, in the order in which flush() sends them.
  template <class F, class... Sets>
  static void each(F&& f, Sets&... sets) {
    f(kContext, sets.settings...);
    f(kContext, sets.control...);
    f(kGroup, sets.group_inputs...);
    f(kGroup, sets.group_states...);
    f(kParam, sets.param_inputs...);
    f(kParam, sets.param_states...);
    f(kParam, sets.plans...);
    f(kParam, sets.composites...);
    f(kParam, sets.updates...);
    f(kLayer, sets.measures...);
    f(kLayer, sets.units...);
    f(kLayer, sets.factors...);
    f(kNorm, sets.layers...);
  }
};

}  // namespace ga
