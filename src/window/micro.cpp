// SPDX-License-Identifier: Apache-2.0
// Micro-batches: their beginning and end, those that are checked or clipped as a whole, and the end of a window.
#include <algorithm>
#include <type_traits>

#include "core/error.hpp"
#include "core/tensor.hpp"
#include "model/table_writer.hpp"
#include "window/accumulator.hpp"

namespace ga {

void Accumulator::micro_begin(int64_t index, double weight, const ga_micro_options& options) {
  model_.check_device();
  if (index == -1) index = model_.window.size();
  model_.length.find();
  const Micro micro = make_micro(weight, options);
  if (model_.options.deferring() && model_.window.open_index() < 0 && index >= 0 &&
      index < model_.window.size())
    fail(GA_ERROR_UNSUPPORTED,
         "micro-batch %lld cannot be opened again: with GA_NONFINITE_DROP_MICRO and "
         "GA_CLIP_WHEN_MICRO it is checked as a whole when it ends",
         ll(index));
  model_.window.reserve_one();
  const bool again = index < model_.window.size();
  model_.window.begin(index, micro);
  try {
    if (model_.speculation->active() && model_.window.state() == GA_WINDOW_FULL)
      model_.ranks->meet_ahead(model_.window.weight());
  } catch (...) {
    again ? model_.window.end() : model_.window.abort();
    throw;
  }
  added_ = again;
  contributions_.clear();
  borrowed_before_ = borrowed_.size();
  model_.params.forget_delivered();
  release_ready(ConcurrentCalls::Lock());  // no other call runs
}

void Accumulator::micro_end() {
  model_.check_device();
  model_.window.check_part("ga_micro_end");
  for (size_t i = 0; i < model_.params.size(); ++i)
    if (model_.params[i].window.acquired)
      fail(GA_ERROR_INVALID_STATE,
           "ga_micro_end: the accumulator of parameter \"%s\" is still acquired; "
           "ga_accumulator_release must be called first",
           model_.params.tensor(i).name);
  if (model_.options.deferring() && model_.window.open_micro().weight > 0)
    settle(model_.window.open_index());
  model_.window.end();
  model_.backend->set_window_open(true);
}

void Accumulator::check_abort(const char* kept_by) const {
  model_.check_device();
  model_.window.check_part("ga_micro_abort");
  const bool travels = model_.ranks->has_begun() || model_.speculation->has_begun();
  const char* const why = added_    ? "the window already holds something of"
                          : travels ? "ga_params_ready has been called in"
                                    : kept_by;
  if (why)
    fail(GA_ERROR_INVALID_STATE,
         "ga_micro_abort: %s micro-batch %lld; only ga_discard takes that back, with the whole "
         "window",
         why, ll(model_.window.open_index()));
}

void Accumulator::micro_abort() {
  for (const Contribution& c : contributions_) rows_held_ -= c.rows;
  for (size_t i = borrowed_before_; i < borrowed_.size(); ++i)
    model_.params[borrowed_[i].param].hold(Held::kNothing);
  borrowed_.resize(borrowed_before_);
  for (Param& p : model_.params) p.window.acquired = false;
  contributions_.clear();
  model_.window.abort();
}

// ---- What is still to be read -------------------------------------------------------------------

// The lowest number, not below `since`, of a gradient that a later call may read.
int64_t Accumulator::oldest(int64_t since) const {
  const auto first = [since](const auto& list) {
    const auto before = [](const auto& entry, int64_t number) { return entry.number < number; };
    return std::lower_bound(list.begin(), list.end(), since, before);
  };
  const auto c = first(contributions_);
  const auto b = std::find_if(first(borrowed_), borrowed_.end(), [&](const Borrowed& entry) {
    return model_.params[entry.param].held() == Held::kBorrowed;
  });
  return std::min(c != contributions_.end() ? c->number : latest_ + 1,
                  b != borrowed_.end() ? b->number : latest_ + 1);
}

ga_kept_info Accumulator::kept(int64_t since) const {
  if (since < 0) fail(GA_ERROR_INVALID_ARGUMENT, "since was %lld, expected >= 0", ll(since));
  ga_kept_info out = {};
  out.struct_size = sizeof out;
  out.latest = latest_;
  out.oldest = out.queued = oldest(since);
  out.until_micro_end = model_.options.deferring();
  if (DeviceWork* const device = model_.backend->device()) {
    // All that reads what lies below the lowest of all has been queued.
    const int64_t done = device->done(oldest(0) - 1);
    out.queued = std::min(out.oldest, std::max(done + 1, since));
  }
  return out;
}

// ---- Micro-batches that are checked or clipped as a whole ---------------------------------------

// Puts a contribution on the list of the open micro-batch, and makes room for all that its end
// takes.
void Accumulator::defer(Contribution c) {
  if (contributions_.empty()) micro_chunks_ = 0;
  const size_t n = contributions_.size() + 1;
  const size_t chunks = micro_chunks_ + static_cast<size_t>(chunk_count(c.count));
  if (n > contributions_.capacity()) contributions_.reserve(2 * n + 16);
  norm_tasks_.reserve(contributions_.capacity());
  tasks_.reserve(contributions_.capacity());
  micro_inputs_.reserve(contributions_.capacity());
  micro_units_.reserve(contributions_.capacity());
  const auto room = [&](auto& state, size_t size) {
    if (static_cast<size_t>(state.bytes()) < size * sizeof(*state.at()))
      state = std::decay_t<decltype(state)>().grown(*model_.backend, 2 * size);
  };
  room(micro_plans_, contributions_.capacity());
  room(micro_partials_, chunks);
  // By doubling, lest each of thousands of contributions has the backend allocate its lists anew.
  const size_t params = std::max(model_.params.size(), contributions_.capacity());
  if (const auto most = model_.arrays.chunks() + static_cast<int64_t>(chunks);
      most > reserved_chunks_ || params > reserved_params_) {
    const auto wanted = std::max(reserved_chunks_, most + static_cast<int64_t>(chunks));
    model_.arrays.reserve(wanted, params);
    reserved_chunks_ = wanted;
    reserved_params_ = params;
  }
  c.partials = micro_chunks_;
  micro_chunks_ = chunks;
  contributions_.push_back(c);
}

// Reads the contributions of a micro-batch, then adds them, clipped, or drops them.
void Accumulator::settle(int64_t index) {
  const Micro micro = model_.window.micro(index);
  list_contributions(micro);
  bool added = true;
  model_.window.or_invalidate([&] {
    const Span<const MicroInput> inputs = {micro_inputs_.data(), micro_inputs_.size()};
    writer_.flush();
    model_.backend->open_micro(inputs, micro_plans_.at());
    model_.backend->norm(norm_tasks_.span());
    model_.backend->decide_micro(inputs, micro_plans_.at(), micro, index);
    const Control* const known = model_.backend->known();
    added = !known || known->micro_finite || model_.config.nonfinite != GA_NONFINITE_DROP_MICRO;
    if (added) model_.backend->clip_units(params_of(micro_units_));
  });
  set_micro(micro, index, model_.window.weight());
  if (added) {
    add_contributions(micro);
  } else {
    for (const Contribution& c : contributions_)
      if (c.index_dtype == 0) count_contribution(model_.params[c.param]);
    model_.window.drop_last();  // this one, because such micro-batches are never opened again
  }
  contributions_.clear();
}

// Lists the norms of the contributions, and writes the tables of the units that are clipped.
void Accumulator::list_contributions(const Micro& micro) {
  micro_inputs_.clear();
  micro_units_.clear();
  norm_tasks_.clear();
  for (size_t k = 0; k < contributions_.size(); ++k) {
    const Contribution& c = contributions_[k];
    const auto i = static_cast<size_t>(c.param);
    Param& p = model_.params[i];
    Partial* const partials = micro_partials_.at(c.partials);
    micro_inputs_.push_back({partials, chunk_count(c.count), c.param, p.contributions.pending});
    p.contributions.pending = true;
    NormTask& task = norm_tasks_.add();
    task.gradient = {contribution(c.gradient, c.format, {1, micro.loss_scale}),
                     &micro_plans_.at(k)->view};
    task.f64 = p.f64;
    task.count = c.count;
    task.partials = partials;
    if (!model_.options.clip_micro() || !model_.params.clips_micro(p)) continue;
    const Units* const made = model_.params.tensor(i).units[Tensor::kClipUnits].get();
    const bool units = model_.params.clip_of(p).scope == GA_CLIP_AGC && made;
    model_.tables.composites.edit(i).clipped = {task.gradient, units ? made->pattern.at() : nullptr,
                                                units ? made->factors : nullptr};
    if (!units) continue;
    model_.tables.units.edit(i).gradient = task.gradient;
    micro_units_.push_back(c.param);
  }
  for (const Contribution& c : contributions_) model_.params[c.param].contributions.pending = false;
}

// ---- The end of a window ------------------------------------------------------------------------

WindowTotals Accumulator::totals() const {
  WindowTotals totals = {};
  totals.ticket = model_.progress.next_ticket();
  totals.micro_batches = model_.window.size();
  totals.weight = model_.window.weight();
  totals.weighted = model_.window.weighted();
  totals.noise_wanted = model_.config.noise_scale && !noise_repeated_;
  totals.over_ranks = totals.reduced = model_.ranks->on_device();
  return totals;
}

void Accumulator::restore(int64_t rows_held, bool noise_repeated) {
  rows_held_ = rows_held;
  noise_repeated_ = noise_repeated;
}

void Accumulator::end_window() {
  for (Param& p : model_.params) {
    const bool written =
        p.held() == Held::kStored || p.held() == Held::kRows || p.held() == Held::kReduced;
    p.accumulator_written = p.accumulator_written || written;
    p.window = {};
    p.contributions = {};
  }
  if (rows_held_ > 0)
    for (const Tensor& t : model_.params.tensors())
      if (t.set) model_.backend->clear_rows({&t.set, 1});
  rows_held_ = 0;
  noise_repeated_ = any_ready_ = false;
  contributions_.clear();
  borrowed_.clear();
}

}  // namespace ga
