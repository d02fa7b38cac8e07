// SPDX-License-Identifier: Apache-2.0
// Contributions to a window. Every function first checks all its arguments, then makes its pass
// over the data, then records what has changed, so a call that fails has changed nothing. Only a
// pass that fails half-way leaves unknown values in the accumulators, and then the window is
// invalid.
#include "window/accumulator.hpp"

#include <algorithm>
#include <cmath>

#include "core/error.hpp"
#include "core/tensor.hpp"
#include "model/preparation.hpp"
#include "model/table_writer.hpp"

namespace ga {

Accumulator::Accumulator(Model& model, TableWriter& writer, Preparation& preparation,
                         ConcurrentCalls* callers, const uint64_t& calls)
    : model_(model), writer_(writer), preparation_(preparation), callers_(callers), calls_(calls) {
  preparation.add(*this);
}

void Accumulator::reserve(size_t params) {
  tasks_.reserve(params);
  repetition_.reserve(params);
  borrowed_.reserve(params);
}

int64_t Accumulator::bytes() const {
  return micro_partials_.bytes() + micro_plans_.bytes() +
         static_cast<int64_t>(contributions_.capacity() *
                              (sizeof(Contribution) + sizeof(MicroInput) + sizeof(NormTask)));
}

Micro Accumulator::make_micro(double weight, const ga_micro_options& o) const {
  const bool own = o.loss_scale != 0;
  const bool late =
      !own && model_.options.late_scale();  // only the device knows the scale, so 0 stands for it
  const Micro m = {weight,
                   own    ? o.loss_scale
                   : late ? 0
                          : model_.loss_scale(),
                   o.flags == GA_MICRO_LAST, own};
  if (!(m.weight >= 0) || !std::isfinite(m.weight))
    fail(GA_ERROR_INVALID_ARGUMENT, "weight was %g, expected a finite number >= 0", m.weight);
  if (!std::isfinite(o.loss_scale))
    fail(GA_ERROR_INVALID_ARGUMENT,
         "loss_scale was %g, expected a finite number, or 0 for that of the context", o.loss_scale);
  if (o.flags & ~uint32_t{GA_MICRO_LAST})
    fail(GA_ERROR_INVALID_ARGUMENT, "flags was 0x%x, expected GA_MICRO_LAST or 0", o.flags);
  return m;
}

Source Accumulator::contribution(const void* data, int32_t dtype, const Micro& m) const {
  const double weight = model_.config.gradient_kind == GA_GRADIENT_MEAN ? m.weight : 1;
  if (m.loss_scale == 0) return {data, dtype, weight, &model_.tables.control.at()->scaler.scale};
  return {data, dtype, weight / m.loss_scale, nullptr};
}

// Refuses a call for what is no sum, and under the options that need every gradient as a whole and unchanged.
// adds_elsewhere: a matrix product or the program writes the accumulator.
void Accumulator::refuse(ga_param id, const char* what, bool adds_elsewhere) const {
  const auto refused = [&](const char* option) {
    fail(GA_ERROR_UNSUPPORTED, "%s for parameter \"%s\" is not supported with %s", what,
         model_.params.name(id), option);
  };
  if (const Reduction r = model_.params[id].reduction; !is_sum(r)) refused(name_of(r));
  if (model_.config.noise_scale) refused("ga_config.noise_scale");
  if (model_.options.clip_micro()) refused("GA_CLIP_WHEN_MICRO");
  if (model_.config.accumulation != GA_ACCUMULATE_PLAIN) refused("ga_config.accumulation");
  if (adds_elsewhere && model_.config.nonfinite == GA_NONFINITE_DROP_MICRO)
    refused("GA_NONFINITE_DROP_MICRO");
}

// Checks that data of a further contribution does not overlap the first one if that is still read.
void Accumulator::check_alive(ga_param id, const char* what, const void* data,
                              int64_t bytes) const {
  const Param& p = model_.params[id];
  if (p.held() != Held::kBorrowed || p.count == 0 || bytes == 0) return;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const auto first = reinterpret_cast<uintptr_t>(p.borrowed);
  const auto size = static_cast<uintptr_t>(p.count * dtype_info(p.gradient_dtype).size);
  if (begin < first + size && first < begin + static_cast<uintptr_t>(bytes))
    model_.params.subject(id).fail(
        GA_ERROR_INVALID_ARGUMENT,
        "%s, at %p, overlaps its first gradient in this window, at %p, which %s", what, data,
        p.borrowed,
        model_.options.lends() ? "was lent (GA_GRADIENTS_LENT)"
                               : "still lives (GA_GRADIENTS_LIVE)");
}

// Checks that no other parameter has lent the buffer of a parameter's first gradient.
void Accumulator::check_lent(ga_param id, const void* gradient) {
  const Param& p = model_.params[id];
  if (!p.may_lend() || p.count == 0) return;
  const int64_t bytes = p.count * dtype_info(p.gradient_dtype).size;
  lent_.reserve(model_.params.size());
  const ga_param other = lent_.take(id, gradient, bytes, calls_, [&](ga_param q) {
    return model_.params[q].held() == Held::kBorrowed;
  });
  if (other < 0) return;
  model_.params.subject(id).fail(
      GA_ERROR_INVALID_ARGUMENT,
      "its gradient, at %p, overlaps the buffer that was lent for parameter \"%s\" in this window "
      "(GA_GRADIENTS_LENT)",
      gradient, model_.params.name(other));
}

// Inlined, as add_task(), because a call takes longer than what they do for a small tensor.
inline void Accumulator::check_gradient(ga_param id, const void* gradient) {
  Param& p = model_.params[id];
  if (gradient != p.checked && gradient != p.checked_before) check_new_gradient(id, gradient);
  if (p.held() == Held::kBorrowed)
    check_alive(id, "its second gradient", gradient, p.count * dtype_info(p.gradient_dtype).size);
  else if (model_.options.lends() && p.held() == Held::kNothing)
    check_lent(id, gradient);
}

void Accumulator::check_new_gradient(ga_param id, const void* gradient) {
  Param& p = model_.params[id];
  model_.ranges.check(model_.params.subject(id), "its gradient", gradient, p.count,
                      dtype_info(p.gradient_dtype).size);
  p.checked_before = p.checked;
  p.checked = gradient;
  checked_ = true;
}

void Accumulator::forget_checks() {
  if (!checked_) return;
  for (Param& p : model_.params) p.checked = p.checked_before = nullptr;
  checked_ = false;
}

inline void Accumulator::borrow(ga_param id, int64_t number, const Source& given) {
  Param& p = model_.params[id];
  p.hold(Held::kBorrowed);
  p.borrowed = given.data;
  p.borrowed_scale = is_sum(p.reduction) ? given.scale : unweighted();
  p.window.borrowed_late = given.divisor != nullptr;
  Borrowed& entry = borrowed_.emplace_back();  // in place, as tasks are (TaskList)
  entry.number = number;
  entry.param = id;
}

// Adds the task of a contribution that has been checked, and records what the parameter holds after
// the pass: if the pass fails, the window is invalid and the record is not read any more. Returns
// NULL if the gradient is borrowed in place of a task.
inline AccumulateTask* Accumulator::add_task(ga_param id, int64_t number, const Source& given,
                                             bool may_borrow) {
  Param& p = model_.params[id];
  if (model_.options.borrows() && may_borrow && p.held() == Held::kNothing &&
      p.fits_accumulator()) {
    borrow(id, number, given);
    return nullptr;
  }
  added_ = true;
  AccumulateTask& task = tasks_.add();
  task.count = p.count;
  task.partials = p.partials;
  task.noise = 0;
  task.plan = nullptr;
  task.param = id;
  task.counter = nullptr;
  add_to_held(p, task, given);
  if (!model_.options.plain_path() && !p.window.lent)
    refine(id, task, task.source[task.sources - 1]);
  return &task;
}

// Has a task add a gradient to what the window has brought to the parameter before.
inline void Accumulator::add_to_held(Param& p, AccumulateTask& task, const Source& given) {
  task.sources = 1;
  Source* source = &task.source[0];
  if (p.held() == Held::kBorrowed) {
    if (model_.options.lends() && p.may_lend() && p.borrowed_scale > 0) {
      *source = given;
      return lend(p, task);
    }
    *source++ = writer_.borrowed_of(p);
    task.sources = 2;
  }
  *source = given;
  task.target = {p.accumulator, p.accumulator_dtype};
  task.keep = p.held() == Held::kStored ? 1 : 0;
  p.hold(Held::kStored);
  p.window.stale = false;  // the pass stores the partials too
}

// Has the buffer with the first gradient become the accumulator: a task adds to it there.
void Accumulator::lend(Param& p, AccumulateTask& task) const {
  task.target = {const_cast<void*>(p.borrowed), p.accumulator_dtype};
  task.keep = p.borrowed_scale;  // of the first gradient, and 1 of a sum
  p.borrowed_scale = 1;
  p.window.lent = true;
  p.window.stale = false;
}

// The rest of a task that does more than add.
void Accumulator::refine(ga_param id, AccumulateTask& task, Source& source) {
  Param& p = model_.params[id];
  if (!is_sum(p.reduction)) {
    source.scale = unweighted();
    if (task.keep != 0 || task.sources == 2) task.keep = keep_of(p.reduction);
    task.param = -1;
    return;
  }
  task.target = writer_.target_of(id);
  if (model_.config.accumulation == GA_ACCUMULATE_RUNNING_MEAN) {
    task.keep *= p.held_weight / micro_.window_weight;
    // Divided by the loss scale last, as on a device, where only the device knows it.
    source.scale = micro_.weight / micro_.window_weight;
    if (micro_.loss_scale != 0) source.scale /= micro_.loss_scale;
    p.held_weight = micro_.window_weight;
  }
  if (model_.config.accumulation == GA_ACCUMULATE_STOCHASTIC) {
    task.counter = &model_.tables.control.at()->windows;
    task.seed = model_.config.seed ^ rank_key();
    task.contribution = p.contributions.count;
    task.key = model_.params.tensor(id).key;
  }
  if (model_.config.noise_scale) {
    // With c = b g of a micro-batch of weight b: b |g|^2 = |c|^2 / b, see noise_scale.hpp.
    task.noise = 1 / micro_.weight;
    if (model_.config.accumulation ==
        GA_ACCUMULATE_RUNNING_MEAN)  // c is divided by the window's weight
      task.noise *= micro_.window_weight * micro_.window_weight;
  }
  count_contribution(p);
}

// The scale of a contribution to what is no sum, but for a loss scale that only the device knows.
double Accumulator::unweighted() const {
  return micro_.loss_scale != 0 ? 1 / micro_.loss_scale : 1;
}

// Counts contributions of dropped micro-batches too, because a device learns of the drop too late.
void Accumulator::count_contribution(Param& p) {
  if (!is_sum(p.reduction)) return;
  noise_repeated_ = noise_repeated_ || micro_.index <= p.contributions.last_micro;
  p.contributions.last_micro = micro_.index;
  ++p.contributions.count;
}

// Runs body(id, gradient, number) for each gradient that a ga_accumulate reads, after latest_ has counted them.
template <class Body>
inline void Accumulator::each_gradient(const void* const* gradients, Body&& body) {
  const std::vector<Block>& blocks = model_.params.blocks();
  const int64_t before = latest_ - static_cast<int64_t>(blocks.size());
  for (size_t b = 0; b < blocks.size(); ++b) {
    if (!gradients[b]) continue;
    const Block block = blocks[b];
    for (ga_param id = block.first; id < block.first + block.count; ++id) {
      const Param& p = model_.params[id];
      if (p.frozen) continue;
      const char* gradient = static_cast<const char*>(gradients[b]);
      if (p.offset != 0) gradient += p.offset * dtype_info(p.gradient_dtype).size;
      body(id, gradient, before + 1 + static_cast<int64_t>(b));
    }
  }
}

void Accumulator::accumulate(const void* const* gradients, size_t count, double weight,
                             const ga_micro_options& options) {
  model_.check_device();
  model_.length.find();
  const Micro micro = make_micro(weight, options);
  model_.window.check_whole();
  if (const size_t blocks = model_.params.blocks().size(); count != blocks)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "count was %zu, but the context has %zu: one gradient pointer for each ga_param_add and "
         "each ga_params_add_flat",
         count, blocks);
  const bool read = reads(micro);
  if (count > 0 && !gradients && read) fail(GA_ERROR_INVALID_ARGUMENT, "gradients was NULL");
  model_.window.reserve_one();
  contributions_.clear();
  latest_ += static_cast<int64_t>(count);
  using Call = Repetition::Call;
  const Source like = contribution(nullptr, GA_F32, micro);
  const bool opens = model_.window.empty();
  const Call repeated =
      repetition_.find(calls_, opens, model_.options.borrows(), read ? gradients : nullptr, count);
  Call made = Call::kOther;
  if (repeated == Call::kBorrows)
    borrow_again(gradients, like);
  else if (repeated == Call::kAdds)
    change_tasks(like);
  else if (tasks_.clear(); read)
    made = list_tasks(gradients, micro, like, opens);
  model_.params.forget_delivered();
  if (!model_.options.deferring() && repeated != Call::kBorrows)
    model_.window.or_invalidate([&] {
      writer_.send_moved();
      model_.backend->accumulate(tasks_.span());
    });
  model_.window.add(micro);
  model_.backend->set_window_open(true);
  if (repeated != Call::kOther)
    repetition_.repeat(calls_, repeated, like.scale);
  else
    repetition_.keep(calls_, made, opens, gradients, count);
  if (model_.options.deferring() && read) settle(model_.window.size() - 1);
}

// Checks gradients and lists the tasks that add them, or defers that. like: a gradient of the micro-batch. Returns what a
// later call may repeat.
Repetition::Call Accumulator::list_tasks(const void* const* gradients, const Micro& micro,
                                         const Source& like, bool opens) {
  using Call = Repetition::Call;
  bool contributes = false;
  each_gradient(gradients, [&](ga_param id, const void* gradient, int64_t) {
    if (model_.params[id].window.ready) refuse_ready(id);
    check_gradient(id, gradient);
    contributes = true;
  });
  if (contributes) preparation_.prepare();
  if (model_.options.deferring()) {
    each_gradient(gradients, [&](ga_param id, const void* gradient, int64_t number) {
      const Param& p = model_.params[id];
      defer({number, id, p.gradient_dtype, gradient, p.count});
    });
    return Call::kOther;
  }
  if (rows_held_ > 0)
    each_gradient(gradients, [&](ga_param id, const void*, int64_t) {
      if (model_.params[id].held() == Held::kRows) make_dense(id);
    });
  set_micro(micro, model_.window.size(), model_.window.weight() + micro.weight);
  Source source = like;
  bool borrowed = false;
  each_gradient(gradients, [&](ga_param id, const void* gradient, int64_t number) {
    source.data = gradient;
    source.format = model_.params[id].gradient_dtype;
    if (add_task(id, number, source)) return;
    writer_.move_gradient(static_cast<size_t>(id));
    borrowed = true;
  });
  if (!model_.options.plain_path()) return Call::kOther;
  if (!borrowed) return Call::kAdds;
  const bool all = opens && tasks_.span().size == 0 && model_.config.device == GA_DEVICE_CPU;
  return all ? Call::kBorrows : Call::kOther;
}

// Leaves gradients where the window before found them too. They are among the lent buffers still: that window has
// lent no others.
void Accumulator::borrow_again(const void* const* gradients, const Source& like) {
  Source source = like;
  each_gradient(gradients, [&](ga_param id, const void* gradient, int64_t number) {
    source.data = gradient;
    source.format = model_.params[id].gradient_dtype;
    borrow(id, number, source);
  });
}

// Makes the listed tasks add the same arrays once more: to what the window has brought before, for the first time in
// a window, and to what they have written, after that.
void Accumulator::change_tasks(const Source& like) {
  const bool again = repetition_.has_added();
  for (AccumulateTask& task : tasks_) {
    const Source& before = task.source[task.sources - 1];
    const Source given = {before.data, before.format, like.scale, like.divisor};
    if (!again) {
      add_to_held(model_.params[task.param], task, given);
      continue;
    }
    task.source[0] = given;
    task.sources = 1;
    task.keep = 1;
  }
}

// The parameter of a call that contributes to the open micro-batch; throws if the call is not legal
// now.
Param& Accumulator::part(ga_param id, const char* what) {
  model_.check_device();
  model_.window.check_part(what);
  Param& p = model_.params.get(id);
  if (p.window.acquired || p.window.busy) refuse_taken(id, what);
  // As in ga_accumulate(), a call that brings nothing is legal.
  if (p.window.ready && !p.frozen && reads(model_.window.open_micro())) refuse_ready(id);
  return p;
}

void Accumulator::refuse_taken(ga_param id, const char* what) const {
  if (model_.params[id].window.busy)
    fail(GA_ERROR_INVALID_STATE,
         "%s: another thread adds a gradient to parameter \"%s\" at the same time; calls that "
         "overlap must be for different parameters",
         what, model_.params.name(id));
  fail(GA_ERROR_INVALID_STATE,
       "%s: the accumulator of parameter \"%s\" is acquired; ga_accumulator_release must be called "
       "first",
       what, model_.params.name(id));
}

void Accumulator::refuse_ready(ga_param id) const {
  model_.params.subject(id).fail(
      GA_ERROR_INVALID_STATE,
      "it has got a contribution after ga_params_ready had been called for it in this window");
}

void Accumulator::params_ready(Span<const ga_param> ids) {
  ConcurrentCalls::Lock lock = lock_callers();
  model_.check_device();
  model_.window.check_takes_more();
  for (size_t k = 0; k < ids.size; ++k) {
    const Param& p = model_.params.get(ids.data[k]);
    if (p.window.acquired || p.window.busy) refuse_taken(ids.data[k], "ga_params_ready");
  }
  model_.ranks->prepare_release();
  for (size_t k = 0; k < ids.size; ++k) {
    Param& p = model_.params[ids.data[k]];
    if (!p.window.ready) model_.speculation->note(ids.data[k]);
    p.window.ready = true;
    any_ready_ = true;
  }
  release_ready(std::move(lock));
  model_.speculation->check_callbacks();
}

// Has the exchange begin of what is ready, or the update, if it may.
void Accumulator::release_ready(ConcurrentCalls::Lock lock) {
  if (!any_ready_ || model_.window.state() != GA_WINDOW_FULL || model_.options.deferring()) return;
  model_.ranks->release_ready();
  model_.speculation->run_arrived();
  model_.speculation->release(lock);
}

// Checks a contribution, before the first of which arrays are made. Returns false if it is not read.
inline bool Accumulator::take_part(ga_param id, const void* gradient) {
  Param& p = part(id, "ga_accumulate_part");
  ++latest_;
  if (!reads(model_.window.open_micro()) || p.frozen) return false;
  if (!gradient && p.count > 0)
    model_.params.subject(id).fail(GA_ERROR_INVALID_ARGUMENT, "its gradient was NULL");
  check_gradient(id, gradient);
  check_single(id);
  preparation_.prepare();
  return true;
}

void Accumulator::accumulate_part(ga_param id, const void* gradient) {
  if (callers_) return accumulate_among_callers(id, gradient);
  if (!take_part(id, gradient)) return;
  const Whole whole = {id, gradient, model_.params[id].gradient_dtype};
  add({&whole, 1}, true, nullptr);
}

// A function of its own: a lock in the function above, taken or not, would cost small parts a nanosecond (3 % of one with 16
// elements).
void Accumulator::accumulate_among_callers(ga_param id, const void* gradient) {
  ConcurrentCalls::Lock lock = callers_->lock();
  if (!take_part(id, gradient)) return;
  const Whole whole = {id, gradient, model_.params[id].gradient_dtype};
  add({&whole, 1}, true, &lock);
}

// Checks that the parameter has no contribution in the open micro-batch yet, if only one is
// supported.
void Accumulator::check_single(ga_param id) const {
  if (!model_.options.clip_micro() || !is_sum(model_.params[id].reduction)) return;
  for (const Contribution& c : contributions_)
    if (c.param == id)
      model_.params.subject(id).fail(
          GA_ERROR_UNSUPPORTED,
          "a second contribution in one micro-batch is not supported with GA_CLIP_WHEN_MICRO");
}

void Accumulator::prepare_parts(Span<const Whole> parts, const char* what) {
  bool contributes = false;
  for (size_t k = 0; k < parts.size; ++k) {
    const ga_param id = parts.data[k].param;
    const Param& p = part(id, what);
    check_single(id);
    contributes = contributes || !p.frozen;
  }
  if (contributes && reads(model_.window.open_micro())) preparation_.prepare();
}

void Accumulator::contribute(Span<const Whole> given, bool may_borrow) {
  ++latest_;  // of all of them, whose memory is the layer's
  if (reads(model_.window.open_micro())) add(given, may_borrow, nullptr);
}

// lock: NULL, or what the pass over one contribution lets go of.
void Accumulator::add(Span<const Whole> given, bool may_borrow, ConcurrentCalls::Lock* lock) {
  const Micro& micro = model_.window.open_micro();
  tasks_.clear();
  set_micro(micro, model_.window.open_index(), model_.window.weight());
  for (size_t k = 0; k < given.size; ++k) {
    const Whole& g = given.data[k];
    const Param& p = model_.params[g.param];
    if (p.frozen) continue;
    if (model_.options.deferring()) {
      defer({latest_, g.param, g.format, g.gradient, p.count});
      continue;
    }
    make_dense(g.param);
    add_task(g.param, latest_, contribution(g.gradient, g.format, micro), may_borrow);
  }
  if (lock) return add_unlocked(model_.params[given.data[0].param], *lock);
  model_.window.or_invalidate([&] { model_.backend->accumulate(tasks_.span()); });
}

// Makes the pass of the one task that has been listed, if there is one, beside those of other threads.
void Accumulator::add_unlocked(Param& p, ConcurrentCalls::Lock& lock) {
  if (tasks_.span().size == 0) return;
  const AccumulateTask task = tasks_.span().data[0];  // the next caller uses the list
  struct Busy {
    Param& p;
    explicit Busy(Param& p) : p(p) { p.window.busy = true; }
    ~Busy() { p.window.busy = false; }
  };
  model_.window.or_invalidate([&] {
    const Busy busy(p);
    const Unlocked unlocked(lock);
    model_.backend->accumulate({&task, 1});
  });
}

void Accumulator::store_borrowed(ga_param id) {
  Param& p = model_.params[id];
  if (p.held() != Held::kBorrowed) return;
  AccumulateTask task = {};
  task.target = writer_.target_of(id);
  task.count = p.count;
  task.partials = p.partials;
  task.source[0] = writer_.borrowed_of(p);
  task.sources = 1;
  task.param = id;
  model_.window.or_invalidate([&] { model_.backend->accumulate({&task, 1}); });
  p.hold(Held::kStored);
  p.window.stale = p.window.lent = false;
}

// Adds all contributions in one pass, or several where a parameter has two, and around rows.
void Accumulator::add_contributions(const Micro& micro) {
  tasks_.clear();
  const auto run = [&] {
    model_.window.or_invalidate([&] { model_.backend->accumulate(tasks_.span()); });
    tasks_.clear();
    for (const Contribution& c : contributions_)
      model_.params[c.param].contributions.pending = false;
  };
  for (size_t k = 0; k < contributions_.size(); ++k) {
    const Contribution& c = contributions_[k];
    Param& p = model_.params[c.param];
    Source source = contribution(c.gradient, c.format, micro);
    if (c.index_dtype != 0) {
      run();
      add_rows(c, source, micro_plans_.at(k));
      continue;
    }
    if (p.contributions.pending) run();  // one pass writes an accumulator once
    make_dense(c.param);
    if (model_.options.clip_micro() && model_.params.clips_micro(p))
      source = {&model_.tables.composites.at(static_cast<size_t>(c.param))->clipped, kClipped, 1,
                nullptr};
    const bool stale = p.window.stale;
    add_task(c.param, c.number, source)->plan = micro_plans_.at(k);
    // A device may have dropped the micro-batch: then the pass stores no partials.
    if (!model_.backend->known() && model_.config.nonfinite == GA_NONFINITE_DROP_MICRO)
      p.window.stale = stale;
    p.contributions.pending = true;
  }
  run();
}

}  // namespace ga
