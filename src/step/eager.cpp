// SPDX-License-Identifier: Apache-2.0
#include "step/eager.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "core/fp_mode.hpp"
#include "core/tensor.hpp"
#include "model/preparation.hpp"
#include "model/table_writer.hpp"
#include "window/accumulator.hpp"

namespace ga {
namespace {

thread_local const Model* telling = nullptr;

// Else ga_step may skip the window for its weight.
bool is_usual(double weight) { return weight >= 0x1p-126 && weight <= 0x1p127; }

}  // namespace

Eager::Eager(const Stages& stages)
    : stages_(stages),
      model_(stages.model),
      shadow_(model_.config, *model_.backend, model_.params, model_.arrays, model_.ranges) {
  stages.preparation.add(*this);
  ga_config config = model_.config;
  if (config.eager_threads == 0) return;
  config.num_threads = config.eager_threads;
  config.parallel_for = nullptr;
  backend_ = make_cpu_backend(config);
  thread_ = std::make_unique<Background>([this](size_t item) {
    const FpMode mode;
    run({&begun_[item], 1});
  });
}

void Eager::reserve(size_t params) {
  int64_t chunks = 0;
  for (const Param& p : model_.params) chunks += chunk_count(p.count);
  join();
  for (auto* list : {&waiting_, &ready_, &early_}) list->reserve(params);
  begun_.reserve(params);
  moves_.reserve(params);
  if (backend_) backend_->reserve(chunks, static_cast<int64_t>(params), 0);
}

void Eager::make_shadow() {
  shadow_.make([this](size_t i) { return needs_shadow(i); });
}

int64_t Eager::bytes(int64_t& written) const {
  return shadow_.bytes([this](size_t i) { return needs_shadow(i); }, written);
}

int64_t Eager::list_bytes(size_t params) const {
  Backend& backend = backend_ ? *backend_ : *model_.backend;
  return static_cast<int64_t>(params *
                              (3 * sizeof(ga_param) + sizeof(ReadyParam) + sizeof(FinishTask))) +
         backend.host()->ahead_bytes(params);
}

// Whether a parameter's update reads nothing but the parameter's own gradient, and runs on any thread.
bool Eager::may_go_ahead(size_t i) const {
  const ParamList& params = model_.params;
  const Param& p = params[i];
  const int op = params.op_of(p);
  if (op < 0 || p.shard.count == 0 || p.frozen) return false;
  const OpInfo& info = op_info(op);
  if (info.orthogonal) return false;  // products of matrices take all threads of the context
  // In place, what a first pass emits takes the place of the gradient, or scratch that all parameters share.
  if (info.emits && is_settled(i) && !p.fits_accumulator()) return false;
  // max_grad_norm limits the norm after clipping by units, which is known only after ga_step has decided.
  if (params.is_bounded(p) && params.clips_units()) return false;
  if (model_.ranks->alone()) return true;
  // Norms of pieces on several ranks are added up in ga_step, which also knows those of summed gradients.
  return model_.ranks->is_early(i) && !info.reads_gradient_norm &&
         !params.is_layered_over_ranks(i) && !params.is_clipped_in_parts(i);
}

// Whether a parameter's update takes passes over its units, rows and columns, or the parameter first.
bool Eager::is_in_passes(size_t i) const {
  const ParamList& params = model_.params;
  const OpInfo& op = op_info(params.op_of(params[i]));
  return op.norms > 0 || op.factored || op.row_state || params.by_units(i);
}

// Whether all that ga_step will decide about the parameter is known before.
bool Eager::is_settled(size_t i) const {
  const ParamList& params = model_.params;
  const Param& p = params[i];
  const ga_clip& clip = params.clip_of(p);
  return model_.ranks->alone() && model_.config.nonfinite == GA_NONFINITE_IGNORE &&
         !(clip.scope == GA_CLIP_GLOBAL && clip.when == GA_CLIP_WHEN_STEP) && !params.is_bounded(p);
}

// Not for parameters in double, which wait for ga_step: kernels for them would be as large again.
bool Eager::needs_shadow(size_t i) const {
  return may_go_ahead(i) && !is_settled(i) && !model_.params[i].f64;
}

void Eager::release(ConcurrentCalls::Lock& lock) {
  const double weight = model_.ranks->weight_ahead(model_.window.weight());
  if (!is_usual(weight)) return;
  make_shadow();
  const size_t first = begun_.size();
  for (const ga_param id : waiting_) {
    ready_.push_back(id);
    const Held held = model_.params[id].held();
    if (held == Held::kStored || held == Held::kBorrowed) begin(id, nullptr);
  }
  waiting_.clear();
  const Span<const ReadyParam> begun = {begun_.data() + first, begun_.size() - first};
  if (begun.size == 0) return;
  if (first == 0) {
    totals_ = stages_.accumulator.totals();  // which the threads read that work already
    totals_.weight = weight;
  }
  if (thread_) return thread_->release(begun_.size());
  done_ = begun_.size();
  try {
    const Unlocked unlocked(lock);
    run(begun);
  } catch (const Error& e) {
    bool in_place = false;
    for (size_t k = 0; k < begun.size; ++k)
      in_place = in_place || model_.params[begun.data[k].param].ahead == Ahead::kInPlace;
    if (in_place) {  // half updated
      model_.health.end(e);
      throw;
    }
    for (size_t k = 0; k < begun.size; ++k) forget(begun.data[k]);  // ga_step does it anew
  }
}

// Has the update of a parameter begin, if it may. sum: over the ranks; NULL: it reads the gradient that the
// parameter holds.
void Eager::begin(ga_param id, const Array* sum) {
  const auto i = static_cast<size_t>(id);
  Param& p = model_.params[i];
  const bool early = model_.params.tensor(i).options.write_early != 0;
  if (!may_go_ahead(i) || (early && p.unrounded)) return;
  // Ranks compare the parameter and its master weights first.
  if ((early || model_.params.follows(i)) && sum && model_.ranks->is_check_due()) return;
  const Targets* targets = nullptr;
  if (!is_settled(i)) {
    if (!needs_shadow(i)) return;
    targets = shadow_.give(i);
    if (!targets) {
      ++waited_;
      return;
    }
    if (early) early_.push_back(id);
  }
  if (sum)
    stages_.writer.write_sum(i, *sum);
  else
    stages_.writer.write_param(i);
  model_.tables.plans.at(i)->targets = targets;
  p.ahead = targets ? Ahead::kOutOfPlace : Ahead::kInPlace;
  in_place_ = in_place_ || !targets;
  begun_.push_back({id, !sum && stages_.writer.needs_norm(i), is_in_passes(i),
                    sum ? nullptr : model_.ranks->sum_ahead(id)});
}

void Eager::open() {
  forget_begun(0);
  totals_ = stages_.accumulator.totals();
  const std::lock_guard<std::mutex> lock(mutex_);
  open_ = true;
  arrived_ = 0;
}

void Eager::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  open_ = false;
}

void Eager::await(ga_param id, const Array& sum) {
  if (open_ && model_.params[id].held() == Held::kStored) begin(id, &sum);
}

void Eager::arrived(size_t end) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!open_ || !is_usual(totals_.weight)) return;
  arrived_ = end;
  if (thread_) thread_->release(end);
}

void Eager::run_arrived() {
  size_t end = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (open_) end = arrived_;
  }
  if (thread_ || end <= done_) return;
  try {
    run({begun_.data() + done_, end - done_});
    done_ = end;
  } catch (const Error&) {
    close();
    forget_begun(done_);  // ga_step does it anew
  }
}

void Eager::run(Span<const ReadyParam> params) {
  Backend& backend = backend_ ? *backend_ : *model_.backend;
  backend.host()->update_ahead(totals_, params);
  for (size_t k = 0; k < params.size; ++k)
    if (model_.params[params.data[k].param].ahead == Ahead::kInPlace) tell(params.data[k].param);
}

void Eager::check_not_in_place(const char* what) const {
  if (in_place_)
    fail(GA_ERROR_INVALID_STATE,
         "%s was called after ga_params_ready had updated parameters of this window in place "
         "(ga_config.eager); ga_step ends the window first",
         what);
}

bool Eager::has_failed(const ReadyParam& begun) const {
  return model_.params[begun.param].ahead == Ahead::kNot;
}

bool Eager::has_begun() const {
  return !std::all_of(begun_.begin(), begun_.end(), [this](auto& b) { return has_failed(b); });
}

void Eager::join() {
  close();
  const auto failed = [this](auto& b) { return has_failed(b); };
  begun_.erase(std::remove_if(begun_.begin(), begun_.end(), failed), begun_.end());
  done_ = std::min(done_, begun_.size());
  if (begun_.empty()) return;
  if (!thread_) return forget_begun(done_);
  try {
    forget_begun(thread_->stop());
  } catch (const Error& e) {
    if (in_place_) {
      model_.health.end(e);
      throw;
    }
    forget_begun(0);
  }
}

void Eager::recall() {
  if (begun_.empty() || in_place_) return;
  join();
  count_ += static_cast<int64_t>(begun_.size());
  rolled_back_ += static_cast<int64_t>(begun_.size());
  forget_begun(0);
}

void Eager::forget(const ReadyParam& begun) {
  model_.params[begun.param].ahead = Ahead::kNot;
  model_.tables.plans.at(static_cast<size_t>(begun.param))->targets = nullptr;
}

// From the one with this number on.
void Eager::forget_begun(size_t first) {
  for (size_t k = first; k < begun_.size(); ++k) forget(begun_[k]);
  begun_.resize(first);
  done_ = std::min(done_, first);
}

void Eager::settle(bool applied) {
  Backend& backend = backend_ ? *backend_ : *model_.backend;
  moves_.clear();
  count_ += static_cast<int64_t>(begun_.size());
  if (!applied) {
    forget_begun(0);
    restore_early();
  } else {
    // What was written early in vain would look as if the program had written it.
    for (const ga_param id : early_)
      if (model_.params[id].ahead == Ahead::kNot && model_.params.follows(id))
        add_move(model_.params[id], {model_.params[id].master, GA_F32});
  }
  for (const ReadyParam& b : begun_) {
    const auto i = static_cast<size_t>(b.param);
    Param& p = model_.params[i];
    model_.tables.plans.at(i)->targets = nullptr;
    const bool matches = backend.host()->matches(b.param);
    if (p.ahead == Ahead::kInPlace) {
      if (!matches)
        fail(GA_ERROR_FAULT,
             "parameter \"%s\" was updated in place by ga_params_ready, but ga_step has decided "
             "otherwise",
             model_.params.name(b.param));
    } else if (matches) {
      const Array next = shadow_.exchange(i);
      stages_.writer.set_arrays(i);
      if (next.data) add_move(p, next);
    } else {
      ++rolled_back_;
      if (is_written_early(b.param) && model_.params.follows(i)) add_move(p, {p.master, GA_F32});
    }
  }
  model_.backend->finish(moves_.span());
  ga_step_result& result = model_.tables.control.at()->result;
  result.eager = count_;
  result.eager_waited = waited_;
  result.eager_redone = rolled_back_;
}

void Eager::discard() {
  join();
  forget_begun(0);
  moves_.clear();
  restore_early();
  model_.backend->finish(moves_.span());
  early_.clear();
}

// What was written early becomes what the master weights round to, as it was before.
void Eager::restore_early() {
  for (const ga_param id : early_) {
    const Param& p = model_.params[id];
    add_move(p, {p.master, GA_F32});
  }
}

void Eager::add_move(const Param& p, const Array& from) {
  FinishTask& move = moves_.add();
  move = {};
  move.gradient = identity({from.data, from.format, 1, nullptr});
  move.f64 = p.f64;
  move.target = p.shard_data();
  move.count = p.shard.count;
}

void Eager::tell(ga_param id) noexcept {
  const ga_config& config = model_.config;
  if (!config.on_param_done) return;
  telling = &model_;
  try {
    const ProgramFpMode programs;
    config.on_param_done(config.on_param_done_user, id);
  } catch (...) {
    threw_.store(true, std::memory_order_relaxed);
  }
  telling = nullptr;
}

bool Eager::is_telling(const Model& model) { return telling == &model; }

void Eager::report_done() {
  if (!model_.config.on_param_done) return;
  for (const auto* list : {&ready_, &waiting_})
    for (const ga_param id : *list)
      if (model_.params[id].ahead != Ahead::kInPlace) tell(id);
}

void Eager::check_callbacks() {
  if (threw_.exchange(false, std::memory_order_relaxed))
    fail(GA_ERROR_FAULT, "on_param_done threw an exception; nothing else is wrong");
}

void Eager::end_window() {
  forget_begun(0);
  ready_.clear();
  waiting_.clear();
  early_.clear();
  in_place_ = false;
  count_ = waited_ = rolled_back_ = 0;
}

}  // namespace ga
