// SPDX-License-Identifier: Apache-2.0
// Contributions to a window. Every function first checks all its arguments, then makes its pass
// over the data, then records what has changed, so a call that fails has changed nothing. Only a
// pass that fails half-way leaves unknown values in the accumulators, and then the window is
// invalid.
#include <algorithm>
#include <cmath>

#include "context/context.hpp"
#include "core/error.hpp"
#include "core/tensor.hpp"
#include "ranks/exchange.hpp"

namespace ga {

Micro Context::make_micro(double weight, const ga_micro_options& o) const {
  const bool own = o.loss_scale != 0;
  const bool late = !own && late_scale();  // only the device knows the scale, so 0 stands for it
  const Micro m = {weight,
                   own    ? o.loss_scale
                   : late ? 0
                          : loss_scale(),
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

Source Context::contribution(const void* data, int32_t dtype, const Micro& m) const {
  const double weight = config_.gradient_kind == GA_GRADIENT_MEAN ? m.weight : 1;
  if (m.loss_scale == 0) return {data, dtype, weight, &tables_.control.at()->scaler.scale};
  return {data, dtype, weight / m.loss_scale, nullptr};
}

// Refuses a call under the options that need every gradient as a whole and unchanged, and for maxima.
// adds_elsewhere: a matrix product or the program writes the accumulator.
void Context::refuse(ga_param id, const char* what, bool adds_elsewhere) const {
  const auto refused = [&](const char* option) {
    fail(GA_ERROR_UNSUPPORTED, "%s for parameter \"%s\" is not supported with %s", what,
         params_.name(id), option);
  };
  if (params_[id].maximum) refused("GA_REDUCE_MAX");
  if (config_.noise_scale) refused("ga_config.noise_scale");
  if (clip_micro_) refused("GA_CLIP_WHEN_MICRO");
  if (config_.accumulation != GA_ACCUMULATE_PLAIN) refused("ga_config.accumulation");
  if (adds_elsewhere && config_.nonfinite == GA_NONFINITE_DROP_MICRO)
    refused("GA_NONFINITE_DROP_MICRO");
}

// Checks an array of a contribution.
void Context::check_values(ga_param id, const char* what, const void* data, int64_t count,
                           int32_t size) const {
  ranges_.check_readable(params_.subject(id), what, data, count, size);
  ranges_.check_apart(params_.subject(id), what, data, count * size);
}

// Checks that data of a further contribution does not overlap the first one if that is still read.
void Context::check_alive(ga_param id, const char* what, const void* data, int64_t bytes) const {
  const Param& p = params_[id];
  if (p.held() != Held::kAdopted || p.count == 0 || bytes == 0) return;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const auto first = reinterpret_cast<uintptr_t>(p.adopted);
  const auto size = static_cast<uintptr_t>(p.count * dtype_info(p.gradient_dtype).size);
  if (begin < first + size && first < begin + static_cast<uintptr_t>(bytes))
    params_.subject(id).fail(
        GA_ERROR_INVALID_ARGUMENT,
        "%s, at %p, overlaps its first gradient in this window, at %p, which still "
        "lives (GA_GRADIENTS_LIVE)",
        what, data, p.adopted);
}

// Inlined, as add_task(), because a call takes longer than what they do for a small tensor.
inline void Context::check_gradient(ga_param id, const void* gradient) {
  Param& p = params_[id];
  if (gradient != p.checked && gradient != p.checked_before) check_new_gradient(id, gradient);
  if (p.held() == Held::kAdopted)
    check_alive(id, "its second gradient", gradient, p.count * dtype_info(p.gradient_dtype).size);
}

void Context::check_new_gradient(ga_param id, const void* gradient) {
  Param& p = params_[id];
  check_values(id, "its gradient", gradient, p.count, dtype_info(p.gradient_dtype).size);
  p.checked_before = p.checked;
  p.checked = gradient;
  checked_ = true;
}

Array Context::target_of(ga_param id) const {
  const Param& p = params_[id];
  if (p.pair) return {&tables_.composites.at(static_cast<size_t>(id))->pair, kPair};
  return {p.accumulator, p.accumulator_dtype};
}

// Adds the task of a contribution that has been checked, and records what the parameter holds after
// the pass: if the pass fails, the window is invalid and the record is not read any more. Returns
// NULL if the gradient is adopted in place of a task.
inline AccumulateTask* Context::add_task(ga_param id, const Source& given, bool may_adopt) {
  Param& p = params_[id];
  if (adopts_ && may_adopt && p.held() == Held::kNothing && p.fits_accumulator()) {
    p.hold(Held::kAdopted);
    p.adopted = given.data;
    p.adopted_scale = p.maximum ? unweighted() : given.scale;
    p.adopted_late = given.divisor != nullptr;
    return nullptr;
  }
  added_ = true;
  AccumulateTask& task = accumulate_tasks_.add();
  task.target = {p.accumulator, p.accumulator_dtype};
  task.count = p.count;
  task.partials = p.partials;
  task.keep = p.held() == Held::kStored ? 1 : 0;
  task.sources = 1;
  task.noise = 0;
  task.plan = nullptr;
  task.param = id;
  task.counter = nullptr;
  Source* source = &task.source[0];
  if (p.held() == Held::kAdopted) {
    *source++ = adopted_of(p);
    task.sources = 2;
  }
  *source = given;
  p.hold(Held::kStored);
  p.stale = false;  // the pass stores the partials too
  if (!plain_path_) refine(id, task, *source);
  return &task;
}

// The rest of a task that does more than add.
void Context::refine(ga_param id, AccumulateTask& task, Source& source) {
  Param& p = params_[id];
  if (p.maximum) {
    source.scale = unweighted();
    if (task.keep != 0 || task.sources == 2) task.keep = kMaximum;
    task.param = -1;
    return;
  }
  task.target = target_of(id);
  if (config_.accumulation == GA_ACCUMULATE_RUNNING_MEAN) {
    task.keep *= p.held_weight / micro_.window_weight;
    // Divided by the loss scale last, as on a device, where only the device knows it.
    source.scale = micro_.weight / micro_.window_weight;
    if (micro_.loss_scale != 0) source.scale /= micro_.loss_scale;
    p.held_weight = micro_.window_weight;
  }
  if (config_.accumulation == GA_ACCUMULATE_STOCHASTIC) {
    task.counter = &tables_.control.at()->windows;
    task.seed = config_.seed ^ rank_key_;
    task.contribution = p.contributions;
    task.key = params_.tensor(id).key;
  }
  if (config_.noise_scale) {
    // With c = b g of a micro-batch of weight b: b |g|^2 = |c|^2 / b, see noise_scale.hpp.
    task.noise = 1 / micro_.weight;
    if (config_.accumulation == GA_ACCUMULATE_RUNNING_MEAN)  // c is divided by the window's weight
      task.noise *= micro_.window_weight * micro_.window_weight;
  }
  count_contribution(p);
}

// The scale of a contribution to a maximum, but for a loss scale that only the device knows.
double Context::unweighted() const { return micro_.loss_scale != 0 ? 1 / micro_.loss_scale : 1; }

// Counts contributions of dropped micro-batches too, because a device learns of the drop too late.
void Context::count_contribution(Param& p) {
  if (p.maximum) return;
  noise_repeated_ = noise_repeated_ || micro_.index <= p.last_micro;
  p.last_micro = micro_.index;
  ++p.contributions;
}

void Context::accumulate(const void* const* gradients, size_t count, double weight,
                         const ga_micro_options& options) {
  check_device();
  if (accum_due_) update_accum_steps();
  const Micro micro = make_micro(weight, options);
  window_.check_whole();
  const std::vector<Block>& blocks = params_.blocks();
  if (count != blocks.size())
    fail(GA_ERROR_INVALID_ARGUMENT,
         "count was %zu, but the context has %zu: one gradient pointer for each ga_param_add and "
         "each ga_params_add_flat",
         count, blocks.size());
  if (count > 0 && !gradients && micro.weight > 0)
    fail(GA_ERROR_INVALID_ARGUMENT, "gradients was NULL");
  window_.reserve_one();
  contributions_.clear();
  const bool again = repeats(gradients, count) && micro.weight > 0;
  listed_by_ = 0;
  bool listed = false;
  if (again) {
    change_tasks(contribution(nullptr, GA_F32, micro));
    listed = true;
  } else if (accumulate_tasks_.clear(); micro.weight > 0) {
    const auto each = [&](auto&& body) {
      for (size_t b = 0; b < count; ++b) {
        if (!gradients[b]) continue;
        const Block block = blocks[b];
        for (ga_param id = block.first; id < block.first + block.count; ++id) {
          const Param& p = params_[id];
          if (p.frozen) continue;
          const char* gradient = static_cast<const char*>(gradients[b]);
          if (p.offset != 0) gradient += p.offset * dtype_info(p.gradient_dtype).size;
          body(id, p, gradient);
        }
      }
    };
    bool contributes = false;
    each([&](ga_param id, const Param& p, const void* gradient) {
      if (p.ready) refuse_ready(id);
      check_gradient(id, gradient);
      contributes = true;
    });
    if (contributes) prepare();
    if (deferring()) {
      each([&](ga_param id, const Param& p, const void* gradient) {
        defer({id, gradient, p.gradient_dtype, nullptr, 0, p.count, 0, 0});
      });
    } else {
      if (rows_held_ > 0)
        each([&](ga_param id, const Param& p, const void*) {
          if (p.held() == Held::kRows) make_dense(id);
        });
      set_micro(micro, window_.size(), window_.weight() + micro.weight);
      Source source = contribution(nullptr, GA_F32, micro);
      listed = plain_path_ && count <= listed_.capacity();
      each([&](ga_param id, const Param& p, const void* gradient) {
        source.data = gradient;
        source.format = p.gradient_dtype;
        if (add_task(id, source)) return;
        move_gradient(static_cast<size_t>(id));
        listed = false;
      });
      if (listed) listed_.assign(gradients, gradients + count);
    }
  }
  forget_delivered();
  if (!deferring())
    window_.or_invalidate([&] {
      tell_moved();
      backend_->accumulate(accumulate_tasks_.span());
    });
  window_.add(micro);
  backend_->set_window_open(true);
  if (listed) listed_by_ = calls_;
  if (deferring() && micro.weight > 0) settle(window_.size() - 1);
}

// Whether ga_accumulate gets the arrays that it got in the call before, with at most a ga_step between them.
// Then nothing is to be checked again, and the list has the tasks that it needs.
bool Context::repeats(const void* const* gradients, size_t count) const {
  return listed_by_ > 0 && listed_by_ + 1 == calls_ &&
         std::equal(gradients, gradients + count, listed_.begin(), listed_.end());
}

// Makes the listed tasks, each of which has written its accumulator, add the same arrays once more; or
// begin with them, in a new window.
void Context::change_tasks(const Source& like) {
  const bool first = window_.empty();
  for (AccumulateTask& task : accumulate_tasks_) {
    if (task.sources == 2) task.source[0] = task.source[1];
    task.sources = 1;
    task.keep = first ? 0 : 1;
    task.source[0].scale = like.scale;
    task.source[0].divisor = like.divisor;
    if (first) params_[task.param].hold(Held::kStored);
  }
}

void Context::micro_begin(int64_t index, double weight, const ga_micro_options& options) {
  check_device();
  if (index == -1) index = window_.size();
  if (accum_due_) update_accum_steps();
  const Micro micro = make_micro(weight, options);
  if (deferring() && window_.open_index() < 0 && index >= 0 && index < window_.size())
    fail(GA_ERROR_UNSUPPORTED,
         "micro-batch %lld cannot be opened again: with GA_NONFINITE_DROP_MICRO and "
         "GA_CLIP_WHEN_MICRO it is checked as a whole when it ends",
         ll(index));
  window_.reserve_one();
  const bool again = index < window_.size();
  window_.begin(index, micro);
  added_ = again;
  contributions_.clear();
  noted_.clear();
  forget_delivered();
  release_ready(Callers::Lock());  // no other call runs
}

// The parameter of a call that contributes to the open micro-batch; throws if the call is not legal
// now.
Param& Context::part(ga_param id, const char* what) {
  check_device();
  window_.check_part(what);
  Param& p = params_.get(id);
  if (p.acquired || p.busy) refuse_taken(id, what);
  // As in ga_accumulate(), a call that brings nothing is legal.
  if (p.ready && !p.frozen && window_.open_micro().weight > 0) refuse_ready(id);
  return p;
}

void Context::refuse_taken(ga_param id, const char* what) const {
  if (params_[id].busy)
    fail(GA_ERROR_INVALID_STATE,
         "%s: another thread adds a gradient to parameter \"%s\" at the same time; calls that "
         "overlap must be for different parameters",
         what, params_.name(id));
  fail(GA_ERROR_INVALID_STATE,
       "%s: the accumulator of parameter \"%s\" is acquired; ga_accumulator_release must be called "
       "first",
       what, params_.name(id));
}

void Context::refuse_ready(ga_param id) const {
  params_.subject(id).fail(
      GA_ERROR_INVALID_STATE,
      "it has got a contribution after ga_params_ready had been called for it in this window");
}

void Context::params_ready(Span<const ga_param> ids) {
  Callers::Lock lock = lock_callers();
  check_device();
  window_.check_takes_more();
  for (size_t k = 0; k < ids.size; ++k) {
    const Param& p = params_.get(ids.data[k]);
    if (p.acquired || p.busy) refuse_taken(ids.data[k], "ga_params_ready");
  }
  if (exchange_ && exchange_->overlaps()) prepare();
  for (size_t k = 0; k < ids.size; ++k) {
    Param& p = params_[ids.data[k]];
    if (eager_ && !p.ready) eager_->note(ids.data[k]);
    p.ready = true;
    any_ready_ = true;
  }
  release_ready(std::move(lock));
  if (eager_) eager_->check_callbacks();
}

// Has the exchange begin of what is ready, or the update, if it may.
void Context::release_ready(Callers::Lock lock) {
  if (!any_ready_ || window_.state() != GA_WINDOW_FULL || deferring()) return;
  if (exchange_) {
    or_lose_window([&] { exchange_->release_ready(); });
    if (eager_) eager_->run_arrived();
  } else if (eager_) {
    eager_->release(lock);
  }
}

// Checks a contribution, before the first of which arrays are made. Returns false if it is not read.
inline bool Context::take_part(ga_param id, const void* gradient) {
  Param& p = part(id, "ga_accumulate_part");
  if (window_.open_micro().weight == 0 || p.frozen) return false;
  if (!gradient && p.count > 0)
    params_.subject(id).fail(GA_ERROR_INVALID_ARGUMENT, "its gradient was NULL");
  check_gradient(id, gradient);
  check_single(id);
  prepare();
  return true;
}

void Context::accumulate_part(ga_param id, const void* gradient) {
  if (callers_) return accumulate_among_callers(id, gradient);
  if (!take_part(id, gradient)) return;
  const Whole whole = {id, gradient, params_[id].gradient_dtype};
  add({&whole, 1}, true, nullptr);
}

// Apart: a lock in the function above, taken or not, would cost small parts a nanosecond (3 % of one with 16
// elements).
void Context::accumulate_among_callers(ga_param id, const void* gradient) {
  Callers::Lock lock = callers_->lock();
  if (!take_part(id, gradient)) return;
  const Whole whole = {id, gradient, params_[id].gradient_dtype};
  add({&whole, 1}, true, &lock);
}

// Checks that the parameter has no contribution in the open micro-batch yet, if only one is
// supported.
void Context::check_single(ga_param id) const {
  if (!clip_micro_ || params_[id].maximum) return;
  for (const Contribution& c : contributions_)
    if (c.param == id)
      params_.subject(id).fail(
          GA_ERROR_UNSUPPORTED,
          "a second contribution in one micro-batch is not supported with GA_CLIP_WHEN_MICRO");
}

void Context::prepare_parts(Span<const Whole> parts, const char* what) {
  bool contributes = false;
  for (size_t k = 0; k < parts.size; ++k) {
    const ga_param id = parts.data[k].param;
    const Param& p = part(id, what);
    check_single(id);
    contributes = contributes || !p.frozen;
  }
  if (contributes && window_.open_micro().weight > 0) prepare();
}

void Context::contribute(Span<const Whole> given, bool may_adopt) {
  if (window_.open_micro().weight > 0) add(given, may_adopt, nullptr);
}

// lock: NULL, or what the pass over one contribution lets go of.
void Context::add(Span<const Whole> given, bool may_adopt, Callers::Lock* lock) {
  const Micro& micro = window_.open_micro();
  accumulate_tasks_.clear();
  set_micro(micro, window_.open_index(), window_.weight());
  for (size_t k = 0; k < given.size; ++k) {
    const Whole& g = given.data[k];
    const Param& p = params_[g.param];
    if (p.frozen) continue;
    if (deferring()) {
      defer({g.param, g.gradient, g.format, nullptr, 0, p.count, 0, 0});
      continue;
    }
    make_dense(g.param);
    if (!add_task(g.param, contribution(g.gradient, g.format, micro), may_adopt))
      noted_.push_back(g.param);
  }
  if (lock) return add_apart(params_[given.data[0].param], *lock);
  window_.or_invalidate([&] { backend_->accumulate(accumulate_tasks_.span()); });
}

// Makes the pass of the one task that has been listed, if there is one, beside those of other threads.
void Context::add_apart(Param& p, Callers::Lock& lock) {
  if (accumulate_tasks_.span().size == 0) return;
  const AccumulateTask task = accumulate_tasks_.span().data[0];  // the next caller uses the list
  struct Busy {
    Param& p;
    explicit Busy(Param& p) : p(p) { p.busy = true; }
    ~Busy() { p.busy = false; }
  };
  window_.or_invalidate([&] {
    const Busy busy(p);
    const Apart apart(lock);
    backend_->accumulate({&task, 1});
  });
}

// Copies an adopted gradient into the accumulator, before something other than add_task adds to it.
void Context::store_adopted(ga_param id) {
  Param& p = params_[id];
  if (p.held() != Held::kAdopted) return;
  AccumulateTask task = {};
  task.target = target_of(id);
  task.count = p.count;
  task.partials = p.partials;
  task.source[0] = adopted_of(p);
  task.sources = 1;
  task.param = id;
  window_.or_invalidate([&] { backend_->accumulate({&task, 1}); });
  p.hold(Held::kStored);
  p.stale = false;
}

// ---- Micro-batches that are checked or clipped as a whole ---------------------------------------

// Puts a contribution on the list of the open micro-batch, and makes room for all that its end
// takes.
void Context::defer(Contribution c) {
  if (contributions_.empty()) micro_chunks_ = 0;
  const size_t n = contributions_.size() + 1;
  const size_t chunks = micro_chunks_ + static_cast<size_t>(chunk_count(c.count));
  if (n > contributions_.capacity()) contributions_.reserve(2 * n + 16);
  norm_tasks_.reserve(contributions_.capacity());
  accumulate_tasks_.reserve(contributions_.capacity());
  micro_inputs_.reserve(contributions_.capacity());
  micro_units_.reserve(contributions_.capacity());
  const auto room = [&](auto& state, size_t size) {
    if (static_cast<size_t>(state.bytes()) < size * sizeof(*state.at()))
      state = std::decay_t<decltype(state)>().grown(*backend_, 2 * size);
  };
  room(micro_plans_, contributions_.capacity());
  room(micro_partials_, chunks);
  // By doubling, lest each of thousands of contributions has the backend allocate its lists anew.
  const size_t params = std::max(params_.size(), contributions_.capacity());
  if (const auto most = arrays_.chunks() + static_cast<int64_t>(chunks);
      most > reserved_chunks_ || params > reserved_params_) {
    const auto wanted = std::max(reserved_chunks_, most + static_cast<int64_t>(chunks));
    arrays_.reserve(wanted, params);
    reserved_chunks_ = wanted;
    reserved_params_ = params;
  }
  c.partials = micro_chunks_;
  micro_chunks_ = chunks;
  contributions_.push_back(c);
}

// Reads the contributions of a micro-batch, then adds them, clipped, or drops them.
void Context::settle(int64_t index) {
  const Micro micro = window_.micro(index);
  list_contributions(micro);
  bool added = true;
  window_.or_invalidate([&] {
    const Span<const MicroInput> inputs = {micro_inputs_.data(), micro_inputs_.size()};
    flush();
    backend_->open_micro(inputs, micro_plans_.at());
    backend_->norm(norm_tasks_.span());
    backend_->judge_micro(inputs, micro_plans_.at(), micro, index);
    const Control* const known = backend_->known();
    added = !known || known->micro_finite || config_.nonfinite != GA_NONFINITE_DROP_MICRO;
    if (added) backend_->clip_units(params_of(micro_units_));
  });
  set_micro(micro, index, window_.weight());
  if (added) {
    add_contributions(micro);
  } else {
    for (const Contribution& c : contributions_)
      if (c.index_dtype == 0) count_contribution(params_[c.param]);
    window_.drop_last();  // this one, because such micro-batches are never opened again
  }
  contributions_.clear();
}

// Lists the norms of the contributions, and writes the tables of the units that are clipped.
void Context::list_contributions(const Micro& micro) {
  micro_inputs_.clear();
  micro_units_.clear();
  norm_tasks_.clear();
  for (size_t k = 0; k < contributions_.size(); ++k) {
    const Contribution& c = contributions_[k];
    const auto i = static_cast<size_t>(c.param);
    Param& p = params_[i];
    Partial* const partials = micro_partials_.at(c.partials);
    micro_inputs_.push_back({partials, chunk_count(c.count), c.param, p.pending});
    p.pending = true;
    NormTask& task = norm_tasks_.add();
    task.gradient = {contribution(c.gradient, c.format, {1, micro.loss_scale}),
                     &micro_plans_.at(k)->view};
    task.f64 = p.f64;
    task.count = c.count;
    task.partials = partials;
    if (!clip_micro_ || !params_.clips_micro(p)) continue;
    const Units* const made = params_.tensor(i).units[Tensor::kClipUnits].get();
    const bool units = params_.clip_of(p).scope == GA_CLIP_AGC && made;
    tables_.composites.edit(i).clipped = {task.gradient, units ? made->pattern.at() : nullptr,
                                          units ? made->factors : nullptr};
    if (!units) continue;
    tables_.units.edit(i).gradient = task.gradient;
    micro_units_.push_back(c.param);
  }
  for (const Contribution& c : contributions_) params_[c.param].pending = false;
}

// Adds all contributions in one pass, or several where a parameter has two, and around rows.
void Context::add_contributions(const Micro& micro) {
  accumulate_tasks_.clear();
  const auto run = [&] {
    window_.or_invalidate([&] { backend_->accumulate(accumulate_tasks_.span()); });
    accumulate_tasks_.clear();
    for (const Contribution& c : contributions_) params_[c.param].pending = false;
  };
  for (size_t k = 0; k < contributions_.size(); ++k) {
    const Contribution& c = contributions_[k];
    Param& p = params_[c.param];
    Source source = contribution(c.gradient, c.format, micro);
    if (c.index_dtype != 0) {
      run();
      add_rows(c, source, micro_plans_.at(k));
      continue;
    }
    if (p.pending) run();  // one pass writes an accumulator once
    make_dense(c.param);
    if (clip_micro_ && params_.clips_micro(p))
      source = {&tables_.composites.at(static_cast<size_t>(c.param))->clipped, kClipped, 1,
                nullptr};
    const bool stale = p.stale;
    add_task(c.param, source)->plan = micro_plans_.at(k);
    // A device may have dropped the micro-batch: then the pass stores no partials.
    if (!backend_->known() && config_.nonfinite == GA_NONFINITE_DROP_MICRO) p.stale = stale;
    p.pending = true;
  }
  run();
}

void Context::micro_end() {
  check_device();
  window_.check_part("ga_micro_end");
  for (size_t i = 0; i < params_.size(); ++i)
    if (params_[i].acquired)
      fail(GA_ERROR_INVALID_STATE,
           "ga_micro_end: the accumulator of parameter \"%s\" is still acquired; "
           "ga_accumulator_release must be called first",
           params_.tensor(i).name);
  if (deferring() && window_.open_micro().weight > 0) settle(window_.open_index());
  window_.end();
  backend_->set_window_open(true);
}

void Context::micro_abort() {
  check_device();
  window_.check_part("ga_micro_abort");
  const int64_t index = window_.open_index();
  const bool travels = (exchange_ && exchange_->has_begun()) || (eager_ && eager_->has_begun());
  if (added_ || travels || batch_norms_.is_swept(index))
    fail(GA_ERROR_INVALID_STATE,
         "ga_micro_abort: %s micro-batch %lld; only ga_discard takes that back, with the whole "
         "window",
         added_    ? "the window already holds something of"
         : travels ? "ga_params_ready has been called in"
                   : "a layer in WINDOW mode has the statistics of",
         ll(index));
  batch_norms_.forget(index);
  for (const Contribution& c : contributions_) rows_held_ -= c.rows;
  for (const ga_param id : noted_) params_[id].hold(Held::kNothing);
  for (Param& p : params_) p.acquired = false;
  contributions_.clear();
  window_.abort();
}

}  // namespace ga
