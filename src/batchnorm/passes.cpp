// SPDX-License-Identifier: Apache-2.0
// What is done in a window: statistics, and the passes forward and backward.
#include <algorithm>
#include <cstring>

#include "batchnorm/layer.hpp"
#include "core/error.hpp"
#include "core/tensor.hpp"

namespace ga {

void BatchNorms::check_array(const Layer& b, const char* what, const void* data, int64_t count,
                             int32_t dtype) const {
  if (count == 0) return;
  if (!data) b.subject().fail(GA_ERROR_INVALID_ARGUMENT, "%s was NULL", what);
  model_.ranges.check_readable(b.subject(), what, data, count, dtype_info(dtype).size);
}

void BatchNorms::check_output(const Layer& b, const char* what, const void* data,
                              int64_t count) const {
  check_array(b, what, data, count, b.options.dtype);
  model_.ranges.check_disjoint(b.subject(), what, data, count * dtype_info(b.options.dtype).size);
}

void BatchNorms::Layer::check_overlap(const char* what, const void* in, const char* out_name,
                                      const void* out, int64_t count) const {
  const auto bytes = static_cast<uintptr_t>(count * dtype_info(options.dtype).size);
  const auto i = reinterpret_cast<uintptr_t>(in), o = reinterpret_cast<uintptr_t>(out);
  if (i != o && i < o + bytes && o < i + bytes)
    subject().fail(GA_ERROR_INVALID_ARGUMENT, "%s at %p overlaps %s at %p in part", out_name, out,
                   what, in);
}

void BatchNorms::Layer::check_pass(const char* what, int64_t micro, int64_t count) const {
  const Subject of = subject(what);
  if (!final)
    of.fail(GA_ERROR_INVALID_STATE,
            "it has seen %lld micro-batches, but ga_bn_finalize is still due", ll(seen()));
  if (micro >= seen())
    of.fail(GA_ERROR_INVALID_STATE,
            "micro-batch %lld was not in its first pass, which had %lld micro-batches", ll(micro),
            ll(seen()));
  if (const int64_t first = taken_of(micro).count; count != first)
    of.fail(GA_ERROR_INVALID_STATE,
            "micro-batch %lld had %lld elements a channel in the first pass, but %lld now",
            ll(micro), ll(first), ll(count));
}

BnTask BatchNorms::task_of(const Layer& b, int64_t samples, int64_t positions) const {
  int64_t count;
  if (samples < 0 || positions < 0 || __builtin_mul_overflow(samples, positions, &count) ||
      __builtin_mul_overflow(count, b.channels, &count) || count > INTPTR_MAX / 8)
    b.subject().fail(GA_ERROR_INVALID_ARGUMENT,
                     "the shape was %lld samples of %lld positions in %lld channels", ll(samples),
                     ll(positions), ll(b.channels));
  const auto array_of = [&](ga_param id) {
    return id < 0 ? Array{nullptr, GA_F32} : Array{model_.params[id].data, model_.params[id].dtype};
  };
  BnTask t = {};
  t.state = b.state;
  t.input = model_.tables.layers.at(b.input);
  t.channels = b.channels;
  t.samples = samples;
  t.positions = positions;
  t.channels_last = b.options.layout == GA_BN_CHANNELS_LAST;
  t.mode = b.options.mode;
  t.dtype = b.options.dtype;
  t.frozen = b.frozen;
  t.eps = b.options.eps;
  t.gamma = array_of(b.gamma);
  t.beta = array_of(b.beta);
  t.dgamma = b.dgamma;
  t.dbeta = b.dbeta;
  t.weight = 1;
  return t;
}

// The index of the micro-batch that a call of the forward pass works on. next: the next one of a
// pass in WINDOW mode.
int64_t BatchNorms::index_of(const Layer& b, int64_t next) const {
  model_.window.check_takes_more();
  if (model_.window.open_index() >= 0) return model_.window.open_index();
  if (!b.windowed()) {
    model_.window.check_whole();
    return model_.window.size();
  }
  const int64_t most = model_.length.known();
  if (most > 0 && next >= most)
    b.subject().fail(GA_ERROR_INVALID_STATE,
                     "its pass has been over all %lld micro-batches of the window", ll(most));
  return next;
}

// The index of the micro-batch whose statistics a call brings; throws if the call is not legal now.
int64_t BatchNorms::index_of_statistics(const Layer& b, const char* what) const {
  const Subject of = b.subject(what);
  const int64_t seen = b.seen(), index = index_of(b, seen);
  if (!b.windowed()) return index;
  if (b.final)
    of.fail(
        GA_ERROR_INVALID_STATE,
        "its statistics are final, of %lld micro-batches; ga_step or ga_discard ends the window",
        ll(seen));
  if (index != seen)
    of.fail(GA_ERROR_INVALID_STATE,
            "in its first pass, micro-batch number %lld is expected next, but %lld is open",
            ll(seen), ll(index));
  return index;
}

// Makes room in the history, by doubling, and keeps what the history holds.
void BatchNorms::make_room(Layer& b, int64_t micro_batches) {
  if (micro_batches <= b.history_size) return;
  constexpr int64_t kFew = 4;
  const int64_t size = std::max({micro_batches, 2 * b.history_size, kFew});
  State<Moments> larger = b.history.grown(*model_.backend, static_cast<size_t>(size * b.channels));
  model_.ranges.reserve_more(1);
  model_.tables.layers.edit(b.input).history = larger.at();
  try {
    model_.tables.layers.flush(*model_.backend);
  } catch (...) {
    model_.tables.layers.edit(b.input).history = b.history.at();
    throw;
  }
  model_.ranges.remove(b.history.at());
  model_.ranges.add(larger.at(), static_cast<size_t>(larger.bytes()));
  b.history.swap(larger);
  b.history_size = size;
}

// Takes the statistics of micro-batch `index`: work() is the pass that stores them, `taken` says of
// how many elements they are. A micro-batch that is not open may be given the same statistics
// twice, but not others, because the statistics of several micro-batches would then pass for those
// of one.
template <class Work>
void BatchNorms::take(Layer& b, const char* what, int64_t index, const Taken& taken, BnTask& task,
                      Work&& work) {
  const auto at = static_cast<size_t>(index);
  if (at >= b.taken.capacity()) b.taken.reserve(std::max(at + 1, 2 * b.taken.capacity()));
  const bool twice = !b.windowed() && model_.window.open_index() < 0 && b.has(index);
  if (!b.windowed()) make_room(b, index + (twice ? 2 : 1));
  task.index = index;
  task.aside = twice;
  model_.window.or_invalidate(work);
  if (twice) {
    const auto n = static_cast<size_t>(b.channels);
    std::vector<Moments> both(2 * n);
    model_.backend->read(both.data(), b.history.at(static_cast<size_t>(index * b.channels)),
                         both.size() * sizeof(Moments));
    if (std::memcmp(&both[0], &both[n], n * sizeof(Moments)) != 0)
      b.subject(what).fail(
          GA_ERROR_INVALID_STATE,
          "it was given statistics of other data for micro-batch %lld, which has not been opened; "
          "ga_micro_begin and ga_micro_end tell micro-batches apart, even with nothing between "
          "them",
          ll(index));
    return;
  }
  if (at >= b.taken.size()) b.taken.resize(at + 1);
  b.taken[at] = taken;
  b.index = index;
  b.sums_of = -1;
}

void BatchNorms::accumulate(ga_bn id, const void* x, int64_t samples, int64_t positions) {
  Layer& b = layer_for_work(id);
  BnTask task = task_of(b, samples, positions);
  const int64_t index = index_of_statistics(b, "ga_bn_accumulate");
  check_array(b, "x", x, task.count(), b.options.dtype);
  if (b.frozen) return;
  task.x = x;
  take(b, "ga_bn_accumulate", index, {task.elements(), true}, task,
       [&] { model_.backend->bn_statistics(task); });
}

void BatchNorms::accumulate_stats(ga_bn id, int64_t count, const void* mean, const void* spread,
                                  int32_t kind, int32_t dtype) {
  Layer& b = layer_for_work(id);
  BnTask task = task_of(b, 0, 0);
  check_choice("kind", kind, GA_BN_M2, "ga_bn_spread");
  const Subject of = b.subject();
  check_statistics_dtype(of, dtype);
  if (count < 0) of.fail(GA_ERROR_INVALID_ARGUMENT, "count was %lld, expected >= 0", ll(count));
  const int64_t index = index_of_statistics(b, "ga_bn_accumulate_stats");
  check_array(b, "mean", mean, b.channels, dtype);
  check_array(b, "spread", spread, b.channels, dtype);
  if (model_.config.device == GA_DEVICE_CPU)
    for (int64_t c = 0; c < b.channels; ++c)
      if (element(spread, dtype, c) < 0)
        of.fail(GA_ERROR_INVALID_ARGUMENT, "spread[%lld] was %g, expected >= 0", ll(c),
                element(spread, dtype, c));
  if (b.frozen) return;
  const BnGiven given = {count,
                         {const_cast<void*>(mean), dtype},
                         {const_cast<void*>(spread), dtype},
                         kind == GA_BN_M2,
                         false};
  take(b, "ga_bn_accumulate_stats", index, {count, true}, task,
       [&] { model_.backend->bn_take(task, given); });
}

void BatchNorms::finalize(ga_bn id) {
  Layer& b = layer_for_work(id);
  const Subject of = b.subject("ga_bn_finalize");
  const bool alone = model_.ranks->alone();
  if (alone || b.frozen) model_.window.check_valid();
  if (!b.windowed()) of.fail(GA_ERROR_INVALID_STATE, "it is not in WINDOW mode");
  if (b.frozen) return;
  if (alone && b.taken.empty())
    of.fail(GA_ERROR_INVALID_STATE, "it has no statistics; ga_bn_accumulate brings them");
  if (b.final) of.fail(GA_ERROR_INVALID_STATE, "its statistics are final already");
  b.check_not_closed(of);
  const BnTask task = task_of(b, 0, 0);
  const auto make_room = [&] { b.summed.reserve(b.taken.size()); };
  if (alone) {
    make_room();
    model_.window.or_invalidate([&] { model_.backend->bn_finalize(task); });
  } else {
    model_.ranks->end_pass(of, task, {id, false}, b.seen(), make_room);
  }
  b.final = true;
  b.forwarded = b.sums = 0;
}

void BatchNorms::forward(ga_bn id, const void* x, int64_t samples, int64_t positions, void* y) {
  Layer& b = layer_for_work(id);
  BnTask task = task_of(b, samples, positions);
  const int64_t index = index_of(b, b.forwarded);
  const bool own = !b.frozen && !b.windowed();  // by this micro-batch's statistics
  const bool given = own && b.has(index) && b.taken_of(index).given;
  if (!b.frozen && b.windowed()) b.check_pass("ga_bn_forward", index, task.elements());
  if (given && task.elements() != b.taken_of(index).count)
    b.subject("ga_bn_forward")
        .fail(GA_ERROR_INVALID_STATE,
              "the statistics of micro-batch %lld are of %lld elements a channel, but x has %lld",
              ll(index), ll(b.taken_of(index).count), ll(task.elements()));
  set_forward(b, task, x, y);
  task.index = index;
  bool normalised = false;
  if (own && !given) {
    // Statistics that are only compared are taken alone, so that a call that fails does not write
    // y.
    const auto pass = [&] {
      normalised = !task.aside;
      normalised ? model_.backend->bn_forward(task, true) : model_.backend->bn_statistics(task);
    };
    take(b, "ga_bn_forward", index, {task.elements(), false}, task, pass);
    task.aside = false;
  }
  if (own && b.index != index) {  // another micro-batch was visited in between
    BnGiven known = {};
    known.known = true;
    model_.window.or_invalidate([&] { model_.backend->bn_take(task, known); });
    b.index = index;
    b.sums_of = -1;
  }
  if (!normalised) model_.window.or_invalidate([&] { model_.backend->bn_forward(task, false); });
  if (model_.window.open_index() < 0) ++b.forwarded;
}

void BatchNorms::infer(ga_bn id, const void* x, int64_t samples, int64_t positions, void* y) {
  const Layer& b = layer_for_work(id);
  BnTask task = task_of(b, samples, positions);
  set_forward(b, task, x, y);
  task.frozen = true;
  model_.backend->bn_forward(task, false);
}

void BatchNorms::set_forward(const Layer& b, BnTask& task, const void* x, void* y) const {
  check_array(b, "x", x, task.count(), b.options.dtype);
  check_output(b, "y", y, task.count());
  b.check_overlap("x", x, "y", y, task.count());
  task.x = x;
  task.out = y;
}

// Checks the arguments that both backward calls have, and makes their task.
BnTask BatchNorms::backward_task(const Layer& b, const char* what, const void* x, const void* dy,
                                 int64_t samples, int64_t positions) const {
  model_.window.check_part(what);
  BnTask task = task_of(b, samples, positions);
  const int64_t index = model_.window.open_index();
  const Micro& micro = model_.window.open_micro();
  const Subject of = b.subject(what);
  if (!b.frozen && b.windowed()) {
    b.check_pass(what, index, task.elements());
  } else if (!b.frozen) {
    if (b.index < 0) of.fail(GA_ERROR_INVALID_STATE, "it has had no ga_bn_forward in this window");
    if (b.index != index)
      of.fail(GA_ERROR_INVALID_STATE, "it has the statistics of micro-batch %lld, but %lld is open",
              ll(b.index), ll(index));
    if (const int64_t count = b.taken_of(index).count; task.elements() != count)
      of.fail(GA_ERROR_INVALID_STATE,
              "micro-batch %lld had %lld elements a channel in the forward pass, but %lld now",
              ll(index), ll(count), ll(task.elements()));
  }
  const bool read = micro.weight > 0;
  if (read) {
    check_array(b, "x", x, task.count(), b.options.dtype);
    check_array(b, "dy", dy, task.count(), b.options.dtype);
  }
  task.x = x;
  task.dy = dy;
  const Source share = accumulator_.contribution(nullptr, GA_F32, micro);
  task.weight = read ? share.scale : 0;
  task.divisor = share.divisor;
  return task;
}

// Whether the backward sums of the open micro-batch are in the window. Makes room in b.summed.
bool BatchNorms::is_summed(Layer& b) {
  const auto index = static_cast<size_t>(model_.window.open_index());
  if (index >= b.summed.size()) b.summed.resize(std::max(index + 1, 2 * b.summed.size()));
  return b.summed[index] != 0;
}

// Adds the backward sums of the open micro-batch to the window.
void BatchNorms::add_sums(Layer& b) {
  b.summed[static_cast<size_t>(model_.window.open_index())] = 1;
  ++b.sums;
  const Span<const Whole> gradients = b.gradients();
  if (gradients.size > 0)
    model_.window.or_invalidate([&] { accumulator_.contribute(gradients, false); });
}

void BatchNorms::backward_accumulate(ga_bn id, const void* x, const void* dy, int64_t samples,
                                     int64_t positions) {
  Layer& b = layer_for_work(id);
  const char* const what = "ga_bn_backward_accumulate";
  const BnTask task = backward_task(b, what, x, dy, samples, positions);
  if (is_summed(b))
    b.subject(what).fail(GA_ERROR_INVALID_STATE, "it has the sums of micro-batch %lld already",
                         ll(model_.window.open_index()));
  accumulator_.prepare_parts(b.gradients(), what);
  if (task.weight != 0)
    model_.window.or_invalidate([&] { model_.backend->bn_backward_sums(task); });
  b.sums_of = model_.window.open_index();
  add_sums(b);
}

void BatchNorms::Layer::check_sums(const char* what) const {
  if (sums < seen())
    subject(what).fail(GA_ERROR_INVALID_STATE,
                       "it has the sums of %lld of %lld micro-batches; ga_bn_backward_accumulate "
                       "is due for the others",
                       ll(sums), ll(seen()));
}

void BatchNorms::backward_finalize(ga_bn id) {
  Layer& b = layer_for_work(id);
  const char* const what = "ga_bn_backward_finalize";
  const Subject of = b.subject(what);
  const bool alone = model_.ranks->alone();
  if (alone || b.frozen) model_.window.check_valid();
  if (!b.windowed()) of.fail(GA_ERROR_INVALID_STATE, "it is not in WINDOW mode");
  if (b.frozen) return;
  b.check_not_closed(of);
  if (!b.final) of.fail(GA_ERROR_INVALID_STATE, "ga_bn_finalize must be called first");
  if (b.sums_final) of.fail(GA_ERROR_INVALID_STATE, "its sums are those of all ranks already");
  if (alone) return b.check_sums(what);
  // Ranks exchange the sums that dx is computed from. b.dgamma and b.dbeta keep what this rank alone has summed: they
  // are gradients, which ga_step adds up over the ranks.
  model_.ranks->end_pass(of, task_of(b, 0, 0), {id, true}, b.seen(), [&] { b.check_sums(what); });
  b.sums_final = true;
}

void BatchNorms::backward(ga_bn id, const void* x, const void* dy, int64_t samples,
                          int64_t positions, void* dx) {
  Layer& b = layer_for_work(id);
  const char* const what = "ga_bn_backward";
  BnTask task = backward_task(b, what, x, dy, samples, positions);
  const bool windowed = b.windowed() && !b.frozen;
  // The sums of a micro-batch are added to gamma and beta once; dx needs the sums of its own x and
  // dy.
  const int64_t index = model_.window.open_index();
  const bool adding = !is_summed(b) && !windowed;
  const bool summing = adding || (!windowed && !b.frozen && b.sums_of != index);
  if (summing && !adding && model_.options.deferring())
    b.subject(what).fail(
        GA_ERROR_INVALID_STATE,
        "its sums over micro-batch %lld are kept to be judged with it at its end "
        "(GA_NONFINITE_DROP_MICRO, GA_CLIP_WHEN_MICRO) and cannot be computed again",
        ll(index));
  if (windowed) b.check_sums(what);
  if (windowed && !b.sums_final && !model_.ranks->alone())
    b.subject(what).fail(GA_ERROR_INVALID_STATE,
                         "ga_bn_backward_finalize must be called first, on every rank: it adds up "
                         "the sums of all ranks");
  check_output(b, "dx", dx, task.count());
  if (task.weight != 0) {
    b.check_overlap("x", x, "dx", dx, task.count());
    b.check_overlap("dy", dy, "dx", dx, task.count());
  }
  if (adding) accumulator_.prepare_parts(b.gradients(), what);
  task.out = dx;
  model_.window.or_invalidate(
      [&] { model_.backend->bn_backward(task, summing && task.weight != 0); });
  b.sums_of = -1;
  if (adding) add_sums(b);
}

}  // namespace ga
