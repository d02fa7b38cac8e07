// SPDX-License-Identifier: Apache-2.0
// What the optimizer keeps for a parameter, by name: in the host's memory for the program, which may
// read it, write it and put it back to the beginning.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>

#include "context/context.hpp"
#include "core/error.hpp"
#include "core/tensor.hpp"
#include "ranks/exchange.hpp"

namespace ga {

// A negative kind: a number of the parameter's clock.
constexpr int kStep = -1, kProduct = -2;

constexpr int64_t kMostSteps = int64_t{1} << 53;

std::vector<StateArray> Context::states_of(size_t i) const {
  std::vector<StateArray> states;
  const Param& p = params_[i];
  const auto take = [&](int first, int last) {
    for (const OwnedArray& a : arrays_.whole_of(i))
      if (a.name && a.kind >= first && a.kind <= last)
        states.push_back({a.name, a.format ? a.format : p.real(), a.count, a.kind});
  };
  take(kState, kMaster - 1);
  const Group& g = params_.group_of(p);
  if (params_.op_of(p) >= 0 && g.optimizer.flavor == GA_FLAVOR_TORCH) {
    if (g.info->product) states.push_back({g.info->product, GA_F64, 1, kProduct});
    states.push_back({"step", GA_I64, 1, kStep});
  }
  take(kMaster, kAverage);
  return states;
}

int32_t Context::state_count(ga_param id) const {
  params_.get(id);
  return static_cast<int32_t>(states_of(static_cast<size_t>(id)).size());
}

ga_state_info Context::state_info(ga_param id, int32_t index) const {
  params_.get(id);
  const std::vector<StateArray> states = states_of(static_cast<size_t>(id));
  if (index < 0 || static_cast<size_t>(index) >= states.size())
    params_.subject(id).fail(GA_ERROR_INVALID_ARGUMENT,
                             "index was %d, but it has %zu arrays of state", index, states.size());
  const StateArray& s = states[static_cast<size_t>(index)];
  ga_state_info info = {};
  info.struct_size = sizeof info;
  info.name = s.name;
  info.dtype = s.dtype;
  info.count = s.count;
  return info;
}

// The array of a call that reads or writes one, which may have to be made yet.
StateArray Context::state_for(ga_param id, const char* name, int32_t dtype, int64_t count,
                              const char* what) {
  window_.check_empty(what);
  const Param& p = params_.get(id);
  const Subject of = {"parameter", params_.name(id), what};
  if (!name) of.fail(GA_ERROR_INVALID_ARGUMENT, "name was NULL");
  StateArray found = {};
  std::string names;
  for (const StateArray& s : states_of(static_cast<size_t>(id))) {
    if (std::strcmp(s.name, name) == 0) found = s;
    names += std::string(names.empty() ? "" : ", ") + s.name;
  }
  if (!found.name)
    of.fail(GA_ERROR_INVALID_ARGUMENT, "it has no state \"%s\"; it has: %s", name,
            names.empty() ? "none" : names.c_str());
  if (dtype != found.dtype)
    of.fail(GA_ERROR_INVALID_ARGUMENT, "dtype was %s, but that of \"%s\" is %s",
            dtype_info(dtype).name, name, dtype_info(found.dtype).name);
  if (count != found.count)
    of.fail(GA_ERROR_INVALID_ARGUMENT, "count was %lld, but \"%s\" has %lld elements", ll(count),
            name, ll(found.count));
  if (p.frozen && !p.owns)
    of.fail(GA_ERROR_INVALID_STATE, "it has always been frozen and has no state yet");
  check_no_capture(what);
  return found;
}

ParamState Context::param_state(size_t i) const {
  ParamState state = {};
  if (i < prepared_) backend_->read(&state, tables_.param_states.at(i), sizeof state);
  return state;
}

std::vector<ParamState> Context::param_states() const {
  std::vector<ParamState> states(prepared_);
  if (prepared_ > 0)
    backend_->read(states.data(), tables_.param_states.at(), prepared_ * sizeof(ParamState));
  return states;
}

void Context::set_param_state(size_t i, const ParamState& state) {
  backend_->write(tables_.param_states.at(i), &state, sizeof state);
}

void Context::get_state(ga_param id, const char* name, void* out, int32_t dtype, int64_t count) {
  const StateArray s = state_for(id, name, dtype, count, "ga_state_get");
  const auto i = static_cast<size_t>(id);
  Param& p = params_[id];
  if (!out && count > 0) params_.subject(id).fail(GA_ERROR_INVALID_ARGUMENT, "out was NULL");
  begin_piece(id, "ga_state_get", name);
  prepare();
  if (s.kind == kMaster || s.kind == kAverage) follow_data(id);
  const ParamState state = param_state(i);
  if (s.kind == kStep) {
    std::memcpy(out, &state.clock.step, sizeof state.clock.step);
  } else if (s.kind == kProduct) {
    const double product = state.clock.step == 0 ? 1 : state.clock.product;
    std::memcpy(out, &product, sizeof product);
  } else {
    const bool none = s.kind == kAverage && !state.averaged;  // yet: that of the parameter
    if (none) arrays_.copy(p, p.values(), arrays_.average_of(p), p.share.count);
    auto* to = static_cast<char*>(out);
    each_piece(id, {arrays_.data(p, s.kind), s.dtype}, s.count,
               [&](const void* piece, size_t bytes) {
                 std::memcpy(to, piece, bytes);
                 to += bytes;
               });
    if (none) arrays_.clear_average(p);
  }
}

// take() gets the whole of an array of state, of which this rank may have a part: all ranks call it then.
void Context::each_piece(ga_param id, const Array& own, int64_t count, const TakePiece& take) {
  if (shards() && params_.keeper(id) != Keeper::kAll)
    return exchange_->each_piece(id, own, count, take);
  const Region whole = {own.data, static_cast<size_t>(count * dtype_info(own.format).size)};
  backend_->read_pieces({&whole, 1}, take);
}

// Where the optimizer is sharded: checks that all ranks make this call about the same array.
void Context::begin_piece(ga_param id, const char* what, const char* name) {
  if (!shards()) return;
  char text[512];
  std::snprintf(text, sizeof text, "%s of \"%.200s\" (%.100s)", what, params_.name(id), name);
  exchange_->begin_call(text);
  exchange_->check_empty(text);
}

void Context::set_state(ga_param id, const char* name, const void* data, int32_t dtype,
                        int64_t count) {
  const StateArray s = state_for(id, name, dtype, count, "ga_state_set");
  const auto i = static_cast<size_t>(id);
  Param& p = params_[id];
  const Subject of = params_.subject(id);
  if (!data && count > 0) of.fail(GA_ERROR_INVALID_ARGUMENT, "data was NULL");
  int64_t step = 0;
  double product = 1;
  if (s.kind == kStep) {
    std::memcpy(&step, data, sizeof step);
    if (step < 0 || step > kMostSteps)
      of.fail(GA_ERROR_INVALID_ARGUMENT, "step was %lld, expected 0 to 2^53", ll(step));
  } else if (s.kind == kProduct) {
    std::memcpy(&product, data, sizeof product);
    if (!(product >= 0 && product <= 1))
      of.fail(GA_ERROR_INVALID_ARGUMENT, "%s was %g, expected a number in [0, 1]", name, product);
  }
  begin_piece(id, "ga_state_set", name);
  prepare();
  ParamState state = param_state(i);
  if (s.kind == kStep) {
    if (state.clock.step == 0) state.clock.product = 1;
    state.clock.step = step;
  } else if (s.kind == kProduct) {
    state.clock.product = product;
  } else {
    const Range part = arrays_.part_of(p, s.count);
    const auto size = static_cast<size_t>(dtype_info(s.dtype).size);
    const char* const from =
        static_cast<const char*>(data) + static_cast<size_t>(part.first) * size;
    if (part.count > 0)
      backend_->write(arrays_.data(p, s.kind), from, static_cast<size_t>(part.count) * size);
    if (s.kind == kAverage) state.averaged = p.average_written = true;
    if (s.kind < kMaster) p.state_written = true;
    if (s.kind == kMaster) p.unrounded = !params_.follows(id);
  }
  if (s.kind < kMaster && s.kind != kStep && state.clock.step == 0) {
    state.clock.step = 1;
    if (s.kind != kProduct) state.clock.product = 1;
  }
  set_param_state(i, state);
  if (s.kind == kMaster) write_copies([&](ga_param other) { return other == id; });
}

// Has the master weights be what the program has written to the parameter since, if they follow it.
void Context::follow_data(ga_param id) {
  const auto i = static_cast<size_t>(id);
  const Param& p = params_[id];
  if (!p.master || !params_.follows(id) || p.master_due || p.share.count == 0) return;
  // An update that has begun does so, and writes the parameter early maybe.
  if (eager_ && (p.ahead != Ahead::kNot || eager_->is_written_early(id))) return;
  flush();
  const Array followed = {tables_.updates.at(i), kFollowed};
  arrays_.copy(p, followed, {p.master, GA_F32}, p.share.count);
}

void Context::follow_data() {
  for (size_t i = 0; i < params_.size(); ++i) follow_data(static_cast<ga_param>(i));
}

// Rounds those parameters from the master weights that the library has written, if these follow the program: what
// the parameters held before would look as if the program had written it since. All ranks call it, where the
// optimizer is sharded. ready: throws on every rank if it was not called on all, before parameters are gathered.
void Context::write_copies(const std::function<bool(ga_param)>& written, const Ready& ready) {
  const auto is_due = [&](ga_param id) { return params_.follows(id) && written(id); };
  bool any = false;
  for (size_t i = 0; i < params_.size(); ++i) {
    const auto id = static_cast<ga_param>(i);
    if (!is_due(id)) continue;
    const Param& p = params_[id];
    any = true;
    if (p.master && p.share.count > 0)
      or_break([&] { arrays_.copy(p, {p.master, GA_F32}, p.shared_data(), p.share.count); });
  }
  if (!any || !shards()) return;
  or_end([&] {
    if (ready) ready();
    exchange_->gather_parameters([&](ga_param id) {
      return is_due(id) ? Exchange::Changed::kElements : Exchange::Changed::kNothing;
    });
  });
}

void Context::reset_state(ga_param id) {
  window_.check_empty("ga_state_reset");
  Param& p = params_.get(id);
  check_no_capture("ga_state_reset");
  if (!p.owns) return;
  const auto i = static_cast<size_t>(id);
  ParamState state = param_state(i);
  state.clock = {};
  state.averaged = false;
  or_break([&] {
    set_param_state(i, state);
    arrays_.reset_state(i);
    if (p.average) arrays_.clear_average(p);
  });
  p.state_due = false;
  p.state_written = true;
  arrays_.renew_master(p);
}

Clock clock_after(const OptimizerInfo& info, const ga_optimizer& o, int64_t steps) {
  Clock clock = {};
  if (o.flavor == GA_FLAVOR_TORCH) clock.step = steps;  // nobody reads its product
  while (clock.step < steps) {
    info.advance(o, clock);
    if (clock.product == 0) clock.step = steps;  // the product stays 0
  }
  return clock;
}

void Context::set_steps(int64_t steps) {
  window_.check_empty("ga_context_set_steps");
  if (steps < 0 || steps > kMostSteps)
    fail(GA_ERROR_INVALID_ARGUMENT, "steps was %lld, expected 0 to 2^53", ll(steps));
  check_no_capture("ga_context_set_steps");
  const Control now = control();
  backend_->write(&tables_.control.at()->steps, &steps, sizeof steps);
  for (size_t k = 0; k < params_.groups.size(); ++k) {
    const Clock clock = clock_after(*params_.groups[k].info, params_.groups[k].optimizer, steps);
    backend_->write(&tables_.group_states.at(k)->clock, &clock, sizeof clock);
  }
  steps_set_ = steps;
  steps_set_after_ = now.windows;
  look_up_accum_steps();
}

}  // namespace ga
