// SPDX-License-Identifier: Apache-2.0
#include "context/averages.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "core/tensor.hpp"
#include "model/copies.hpp"
#include "model/pieces.hpp"
#include "model/table_writer.hpp"

namespace ga {

void Averages::set(const ga_ema* ema) {
  if (model_.tables.params() > 0)
    fail(GA_ERROR_INVALID_STATE,
         "ga_context_set_ema was called after the library has made its arrays (in ga_prepare, for "
         "state by name, or with the first contribution to a window); it is legal only before");
  if (ema) {
    check_ema(*ema);
    for (size_t i = 0; i < model_.params.size(); ++i)
      if (ema->dtype == GA_BF16 && model_.params[i].f64 && !model_.params.tensor(i).removed)
        model_.params.subject(i).fail(GA_ERROR_UNSUPPORTED,
                                      "its dtype is f64, but the dtype of the EMA is bf16");
    model_.options.ema = *ema;
  } else {
    model_.options.ema.reset();
  }
  writer_.write_settings();
}

void Averages::check_kept(const char* what) const {
  for (const Group& g : model_.params.groups)
    if (g.share_of_average() > 0) return;
  if (!model_.options.ema)
    fail(GA_ERROR_INVALID_STATE,
         "%s: the context keeps no EMA; ga_context_set_ema makes it keep one, and Schedule-Free "
         "optimizers have an average",
         what);
}

// Whether the average follows from the parameter and a state of a Schedule-Free optimizer.
bool Averages::is_computed(const Param& p) const {
  return !model_.options.ema && model_.params.group_of(p).share_of_average() > 0;
}

// Whether there is one yet, of which this rank may have a part alone.
bool Averages::has_average(const Param& p, const ParamState& state) const {
  return is_computed(p) ? p.owns && state.clock.step > 0 : state.averaged;
}

// Whether this rank has some of it, or what it is computed from.
bool Averages::is_here(const Param& p) const {
  return is_computed(p) ? p.owns && p.shard.count > 0 : p.average != nullptr;
}

// Whether a parameter and its average change places as they are; else the parameter is overwritten.
bool Averages::swaps_in_place(const Param& p) const {
  return !is_computed(p) && p.dtype == model_.arrays.average_of(p).format;
}

// out <- the average, for this rank's share. y: the parameter as it was trained; out is another array. partials:
// room for partials_bytes().
void Averages::compute(const Param& p, const Array& y, const Array& out, const Buffer& partials) {
  if (p.shard.count == 0) return;
  const double share = model_.params.group_of(p).share_of_average();
  AccumulateTask task = {};
  task.target = out;
  task.count = p.shard.count;
  task.partials = static_cast<Partial*>(partials.data());
  task.source[0] = {y.data, y.format, 1 / share, nullptr};
  const Array z = model_.arrays.state_of(p, 0);
  task.source[1] = {z.data, z.format, 1 - 1 / share, nullptr};
  task.sources = 2;
  task.param = -1;
  model_.backend->accumulate({&task, 1});
}

void Averages::copy_to(ga_param id, void* out, int32_t dtype) {
  const Param& p = model_.params.get(id);
  check_kept("ga_ema_copy_to");
  model_.speculation->check_not_in_place("ga_ema_copy_to");
  const DtypeInfo info = dtype_info(dtype);
  if (!info.floating)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "ga_ema_copy_to: dtype was %d, expected GA_F32, GA_F64, GA_F16 or GA_BF16", dtype);
  if (p.count == 0) return;
  if (!out) fail(GA_ERROR_INVALID_ARGUMENT, "ga_ema_copy_to: out was NULL");
  model_.ranges.check(model_.params.subject(id), "out", out, p.count, info.size);
  begin_pieces(model_, id, "ga_ema_copy_to", "ema");
  if (!swapped_) copies_.follow_data(id);
  const bool averaged = has_average(p, model_.progress.param_state(static_cast<size_t>(id)));
  model_.arrays.reserve(std::max(model_.arrays.chunks(), chunk_count(p.count)),
                        model_.params.size());
  const bool exchanged = averaged && swapped_;
  Buffer computed;
  Array from = p.current();
  if (exchanged && (swaps_in_place(p) || (is_computed(p) && !p.master))) {
    from = p.shard_data();
  } else if (averaged && is_computed(p)) {
    computed = Buffer(*model_.backend, static_cast<size_t>(p.shard.count) *
                                           static_cast<size_t>(dtype_info(p.real()).size));
    from = {computed.data(), p.real()};
    compute(p, p.current(), from, Buffer(*model_.backend, partials_bytes(p)));
  } else if (averaged) {
    from = model_.arrays.average_of(p);
  }
  if (!model_.ranks->divides(id)) return model_.arrays.copy(p, from, {out, dtype}, p.count);
  const int64_t size = dtype_info(from.format).size;
  auto* to = static_cast<char*>(out);
  Buffer there;  // of a piece, on a device
  each_piece(model_, id, {from, p.count}, [&](const void* piece, size_t bytes) {
    const int64_t count = static_cast<int64_t>(bytes) / size;
    if (model_.config.device != GA_DEVICE_CPU) {
      if (there.bytes() < bytes) there = Buffer(*model_.backend, bytes);
      model_.backend->write(there.data(), piece, bytes);
      piece = there.data();
    }
    model_.arrays.copy(p, {const_cast<void*>(piece), from.format}, {to, dtype}, count);
    to += count * info.size;
  });
}

// Allocates all that it needs before it changes anything. Where the optimizer is sharded, each rank
// exchanges its share, and then the parameters are gathered.
void Averages::swap(bool on) {
  model_.window.check_empty("ga_ema_swap");
  check_kept("ga_ema_swap");
  model_.check_no_capture("ga_ema_swap");
  model_.ranks->begin_sharded_call(on ? "ga_ema_swap to the EMA" : "ga_ema_swap back");
  if (on == swapped_) return;
  constexpr size_t kLine = 64, kPiece = size_t{4} << 20;
  const std::vector<ParamState> states = model_.progress.param_states();
  size_t kept = 0, piece = 0, partial = 0;
  const auto each = [&](auto&& f) {
    for (size_t i = 0; i < model_.tables.params(); ++i)
      if (const Param& p = model_.params[i]; is_here(p) && has_average(p, states[i])) f(p);
  };
  const auto shard_bytes = [](const Param& p) {
    return static_cast<size_t>(p.shard.count * dtype_info(p.dtype).size);
  };
  each([&](const Param& p) {
    if (swaps_in_place(p))
      piece = std::max(piece, std::min(shard_bytes(p), kPiece));
    else
      kept += (shard_bytes(p) + kLine - 1) / kLine * kLine;
    if (is_computed(p)) partial = std::max(partial, partials_bytes(p));
  });
  Buffer copies, scratch, partials;
  if (on && partial > 0) partials = Buffer(*model_.backend, partial);
  if (on && kept > 0) copies = Buffer(*model_.backend, kept);
  if (piece > 0) scratch = Buffer(*model_.backend, piece);
  if (on) {
    for (size_t i = 0; i < model_.tables.params(); ++i)
      if (is_computed(model_.params[i])) copies_.follow_data(static_cast<ga_param>(i));
    kept_.swap(copies);
  }

  model_.health.or_break([&] {
    char* original = static_cast<char*>(kept_.data());
    each([&](const Param& p) {
      const size_t bytes = shard_bytes(p);
      char* const shared = static_cast<char*>(p.shard_data().data);
      if (swaps_in_place(p)) {
        for (size_t at = 0; at < bytes; at += piece) {
          const size_t size = std::min(piece, bytes - at);
          char* const data = shared + at;
          char* const average = static_cast<char*>(p.average) + at;
          model_.backend->copy(scratch.data(), data, size);
          model_.backend->copy(data, average, size);
          model_.backend->copy(average, scratch.data(), size);
        }
        return;
      }
      if (on) {
        model_.backend->copy(original, shared, bytes);
        if (is_computed(p))
          compute(p, p.master ? p.current() : Array{original, p.dtype}, {shared, p.dtype},
                  partials);
        else
          model_.arrays.copy(p, model_.arrays.average_of(p), {shared, p.dtype}, p.shard.count);
      } else {
        model_.backend->copy(shared, original, bytes);
      }
      original += (bytes + kLine - 1) / kLine * kLine;
    });
  });
  const auto changed = [&](ga_param id) {
    const auto i = static_cast<size_t>(id);
    return i < model_.tables.params() && model_.params[i].owns &&
                   has_average(model_.params[i], states[i])
               ? Ranks::Changed::kElements
               : Ranks::Changed::kNothing;
  };
  model_.ranks->gather_parameters(changed);
  swapped_ = on;
  if (!on) kept_ = Buffer();
}

}  // namespace ga
