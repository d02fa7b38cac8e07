// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/state.hpp"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>

#include "backend/codes.hpp"
#include "core/error.hpp"
#include "core/tensor.hpp"
#include "model/copies.hpp"
#include "model/pieces.hpp"
#include "model/preparation.hpp"

namespace ga {

// A negative kind: a number of the parameter's clock.
constexpr int kStep = -1, kNumber = -2;  // kNumber - k: number k

namespace {

// Codes, whose scales are of `block` elements.
struct Coded {
  Coded(int64_t count, int64_t block)
      : block(static_cast<size_t>(block)),
        codes(static_cast<size_t>(count)),
        scales(static_cast<size_t>(block_count(count, block))) {}

  // Calls f(scale, first, end) for the elements of each block.
  template <class F>
  void each_block(F&& f) {
    for (size_t first = 0; first < codes.size(); first += block)
      f(scales[first / block], first, std::min(first + block, codes.size()));
  }

  const size_t block;
  std::vector<uint8_t> codes;
  std::vector<float> scales;
};

template <bool kSigned>
void read_numbers(Coded& s, float* numbers) {
  s.each_block([&](float scale, size_t first, size_t end) {
    for (size_t i = first; i < end; ++i) numbers[i] = Codes<kSigned>::read(s.codes[i], scale);
  });
}

template <bool kSigned>
void write_numbers(const float* numbers, Coded& s) {
  s.each_block([&](float& scale, size_t first, size_t end) {
    float largest = 0;
    for (size_t i = first; i < end; ++i) largest = larger(largest, absolute(numbers[i]));
    scale = scale_of_block(largest);
    if (scale == 0) return;
    const float per_scale = inverse_of(scale);
    for (size_t i = first; i < end; ++i)
      s.codes[i] = static_cast<uint8_t>(Codes<kSigned>::write(numbers[i], per_scale));
  });
}

// An array and how it is read or written, for ranks that have to do the same.
std::string text_of(const char* name, int32_t dtype) {
  return std::string(name) + ", " + dtype_info(dtype).name;
}

StateArray scales_of(const StateArray& s, int64_t count) {
  return {scale_name(s.name), GA_F32, count, s.kind + kMaxSlots};
}

}  // namespace

std::vector<StateArray> NamedState::states_of(size_t i) const {
  std::vector<StateArray> states;
  const Param& p = model_.params[i];
  const auto take = [&](int first, int last) {
    for (const OwnedArray& a : model_.arrays.whole_of(i))
      if (a.name && a.kind >= first && a.kind <= last)
        states.push_back({a.name, a.format ? a.format : p.real(), a.count, a.kind});
  };
  take(kState, kMaster - 1);
  const Group& g = model_.params.group_of(p);
  if (model_.params.op_of(p) >= 0 && g.optimizer.flavor == GA_FLAVOR_TORCH) {
    for (int k = 0; k < kClockNumbers; ++k)
      if (const char* const name = g.info->clock_numbers[k].name)
        states.push_back({name, GA_F64, 1, kNumber - k});
    states.push_back({"step", GA_I64, 1, kStep});
  }
  take(kMaster, kAverage);
  return states;
}

int32_t NamedState::count(ga_param id) const {
  model_.params.get(id);
  return static_cast<int32_t>(states_of(static_cast<size_t>(id)).size());
}

ga_state_info NamedState::info(ga_param id, int32_t index) const {
  model_.params.get(id);
  const std::vector<StateArray> states = states_of(static_cast<size_t>(id));
  if (index < 0 || static_cast<size_t>(index) >= states.size())
    model_.params.subject(id).fail(GA_ERROR_INVALID_ARGUMENT,
                                   "index was %d, but it has %zu arrays of state", index,
                                   states.size());
  const StateArray& s = states[static_cast<size_t>(index)];
  ga_state_info info = {};
  info.struct_size = sizeof info;
  info.name = s.name;
  info.dtype = s.dtype;
  info.count = s.count;
  return info;
}

// The array of a call that reads or writes one, which may have to be made yet.
StateArray NamedState::state_for(ga_param id, const char* name, int32_t dtype, int64_t count,
                                 const char* what) {
  model_.window.check_empty(what);
  const Param& p = model_.params.get(id);
  const Subject of = {"parameter", model_.params.name(id), what};
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
  const bool coded = found.dtype == GA_U8;
  if (dtype != found.dtype && !(coded && dtype == GA_F32))
    of.fail(GA_ERROR_INVALID_ARGUMENT, "dtype was %s, but that of \"%s\" is %s%s",
            dtype_info(dtype).name, name, dtype_info(found.dtype).name,
            coded ? ", or f32 for the numbers that its codes stand for" : "");
  if (count != found.count)
    of.fail(GA_ERROR_INVALID_ARGUMENT, "count was %lld, but \"%s\" has %lld elements", ll(count),
            name, ll(found.count));
  if (p.frozen && !p.owns)
    of.fail(GA_ERROR_INVALID_STATE, "it has always been frozen and has no state yet");
  model_.check_no_capture(what);
  return found;
}

bool NamedState::is_signed(ga_param id, const StateArray& s) const {
  return model_.params.code_of(model_.params[id], s.kind - kState) == Code::kSigned;
}

// Checks numbers for a slot of codes, or for its scales.
void NamedState::check_numbers(ga_param id, const StateArray& s, int32_t dtype,
                               const void* data) const {
  const bool scales = ParamArrays::is_scales(s.kind), codes = s.dtype == GA_U8;
  if (!scales && !(codes && dtype == GA_F32)) return;
  const bool negative = codes && is_signed(id, s);
  for (int64_t i = 0; i < s.count; ++i) {
    const auto x = static_cast<double>(static_cast<const float*>(data)[i]);
    if (scales ? is_scale(x) : std::isfinite(x) && (negative || x >= 0)) continue;
    model_.params.subject(id).fail(GA_ERROR_INVALID_ARGUMENT,
                                   "element %lld of \"%s\" was %g, expected %s", ll(i), s.name, x,
                                   scales     ? "0 or a positive normal number"
                                   : negative ? "a finite number"
                                              : "a finite number >= 0");
  }
}

// Reads the whole of an array of state.
void NamedState::read_whole(ga_param id, const StateArray& s, void* out) {
  const Param& p = model_.params[id];
  auto* to = static_cast<char*>(out);
  const Array own = {model_.arrays.data(p, s.kind), s.dtype};
  each_piece(model_, id, {own, s.count, ParamArrays::each_of(p, s.kind, s.count)},
             [&](const void* piece, size_t bytes) {
               std::memcpy(to, piece, bytes);
               to += bytes;
             });
}

// Writes what this rank has of such an array.
void NamedState::write_own(ga_param id, const StateArray& s, const void* data) {
  const Param& p = model_.params[id];
  const Range part = ParamArrays::part_of(p, s.kind, s.count);
  const auto size = static_cast<size_t>(dtype_info(s.dtype).size);
  if (part.count > 0)
    model_.backend->write(model_.arrays.data(p, s.kind),
                          static_cast<const char*>(data) + static_cast<size_t>(part.first) * size,
                          static_cast<size_t>(part.count) * size);
}

// The numbers of a slot of codes, and the codes nearest to numbers.
void NamedState::read_codes(ga_param id, const StateArray& s, float* out) {
  Coded coded(s.count, model_.params[id].code_block);
  read_whole(id, s, coded.codes.data());
  read_whole(id, scales_of(s, static_cast<int64_t>(coded.scales.size())), coded.scales.data());
  const auto read = is_signed(id, s) ? read_numbers<true> : read_numbers<false>;
  read(coded, out);
}

void NamedState::write_codes(ga_param id, const StateArray& s, const float* data) {
  Coded coded(s.count, model_.params[id].code_block);
  const auto write = is_signed(id, s) ? write_numbers<true> : write_numbers<false>;
  write(data, coded);
  write_own(id, s, coded.codes.data());
  write_own(id, scales_of(s, static_cast<int64_t>(coded.scales.size())), coded.scales.data());
}

void NamedState::get(ga_param id, const char* name, void* out, int32_t dtype, int64_t count) {
  const StateArray s = state_for(id, name, dtype, count, "ga_state_get");
  const auto i = static_cast<size_t>(id);
  Param& p = model_.params[id];
  if (!out && count > 0) model_.params.subject(id).fail(GA_ERROR_INVALID_ARGUMENT, "out was NULL");
  begin_pieces(model_, id, "ga_state_get", text_of(name, dtype).c_str());
  preparation_.prepare();
  if (s.kind == kMaster || s.kind == kAverage) copies_.follow_data(id);
  const ParamState state = model_.progress.param_state(i);
  if (s.kind == kStep) {
    std::memcpy(out, &state.clock.step, sizeof state.clock.step);
  } else if (s.kind <= kNumber) {
    const double number = model_.params.group_of(p).info->number_of(state.clock, kNumber - s.kind);
    std::memcpy(out, &number, sizeof number);
  } else {
    const bool none = s.kind == kAverage && !state.averaged;  // yet: that of the parameter
    if (none) model_.arrays.copy(p, p.values(), model_.arrays.average_of(p), p.shard.count);
    if (s.dtype == dtype)
      read_whole(id, s, out);
    else
      read_codes(id, s, static_cast<float*>(out));
    if (none) model_.arrays.clear_average(p);
  }
}

void NamedState::set(ga_param id, const char* name, const void* data, int32_t dtype,
                     int64_t count) {
  const StateArray s = state_for(id, name, dtype, count, "ga_state_set");
  const auto i = static_cast<size_t>(id);
  Param& p = model_.params[id];
  const Subject of = model_.params.subject(id);
  if (!data && count > 0) of.fail(GA_ERROR_INVALID_ARGUMENT, "data was NULL");
  const OptimizerInfo& optimizer = *model_.params.group_of(p).info;
  int64_t step = 0;
  double number = 0;
  if (s.kind == kStep) {
    std::memcpy(&step, data, sizeof step);
    if (step < 0 || step > kMostSteps)
      of.fail(GA_ERROR_INVALID_ARGUMENT, "step was %lld, expected 0 to 2^53", ll(step));
  } else if (s.kind <= kNumber) {
    std::memcpy(&number, data, sizeof number);
    const double most = optimizer.clock_numbers[kNumber - s.kind].most;
    if (!(number >= 0 && number <= most && std::isfinite(number)))
      of.fail(GA_ERROR_INVALID_ARGUMENT, "%s was %g, expected a finite number in [0, %g]", name,
              number, most);
  }
  if (s.kind >= 0) check_numbers(id, s, dtype, data);
  begin_pieces(model_, id, "ga_state_set", text_of(name, dtype).c_str());
  preparation_.prepare();
  ParamState state = model_.progress.param_state(i);
  const bool begins = s.kind < kMaster && state.clock.step == 0;
  if (begins) state.clock = optimizer.initial_clock();
  if (s.kind == kStep) {
    state.clock.step = step;
  } else if (s.kind <= kNumber) {
    state.clock.numbers[kNumber - s.kind] = number;
  } else {
    if (s.dtype == dtype)
      write_own(id, s, data);
    else
      write_codes(id, s, static_cast<const float*>(data));
    if (s.kind == kAverage) state.averaged = p.average_written = true;
    if (s.kind < kMaster) p.state_written = true;
    if (s.kind == kMaster) p.unrounded = !model_.params.follows(id);
  }
  if (begins && s.kind != kStep) state.clock.step = 1;
  model_.progress.set_param_state(i, state);
  if (s.kind == kMaster) copies_.write([&](ga_param other) { return other == id; });
}

void NamedState::reset(ga_param id) {
  model_.window.check_empty("ga_state_reset");
  Param& p = model_.params.get(id);
  model_.check_no_capture("ga_state_reset");
  if (!p.owns) return;
  const auto i = static_cast<size_t>(id);
  ParamState state = model_.progress.param_state(i);
  state.clock = {};
  state.averaged = false;
  model_.health.or_break([&] {
    model_.progress.set_param_state(i, state);
    model_.arrays.reset_state(i);
    if (p.average) model_.arrays.clear_average(p);
  });
  p.state_due = false;
  p.state_written = true;
  model_.arrays.renew_master(p);
}

}  // namespace ga
