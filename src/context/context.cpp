// SPDX-License-Identifier: Apache-2.0
#include "context/context.hpp"

#include "batchnorm/batchnorm.hpp"
#include "checkpoint/checkpoint.hpp"
#include "checkpoint/state.hpp"
#include "context/averages.hpp"
#include "context/configuration.hpp"
#include "context/parameters.hpp"
#include "core/error.hpp"
#include "model/copies.hpp"
#include "model/preparation.hpp"
#include "model/table_writer.hpp"
#include "ranks/connect.hpp"
#include "step/eager.hpp"
#include "step/step.hpp"

namespace ga {

Context::Context(const ga_config& config)
    : callers_(config.eager ? new ConcurrentCalls : nullptr),
      log_(Log::of(config)),
      model(config),
      writer_(std::make_unique<TableWriter>(model)),
      copies_(std::make_unique<Copies>(model, *writer_)),
      preparation_(std::make_unique<Preparation>(model, *writer_)),
      layers(std::make_unique<BatchNorms>(model, *writer_, accumulator)),
      configuration(std::make_unique<Configuration>(stages)),
      parameters(std::make_unique<Parameters>(stages)),
      averages(std::make_unique<Averages>(model, *writer_, *copies_)),
      state(std::make_unique<NamedState>(model, *preparation_, *copies_)),
      step(std::make_unique<Step>(stages)),
      rank_state_(std::make_unique<RankCheckpoint>(stages)) {
  if (config.eager) model.speculation = std::make_unique<Eager>(stages);
  model.tables = model.tables.grown(*model.backend, ContextTables::kContext, 1);
  model.options.choose_path(model.params);
  writer_->write_settings();
  writer_->write_scaler();
  writer_->set_tables();
}

Context::~Context() {
  // The thread of the exchange gives work to those of the speculation, and neither asks the model for the other: it has
  // none while one of them ends.
  model.ranks.reset();
  model.speculation.reset();
  for (const Tensor& t : model.params.tensors()) model.backend->free_rows(t.set);
  mark_.store(0, std::memory_order_relaxed);
}

// ---- The lock -----------------------------------------------------------------------------------

// Throws where no thread, or not this one, can use the context.
inline void Context::check_thread(const char* function) const {
  if (!is_of_this_process()) fail_foreign();
  if (Eager::is_telling(model))
    fail(GA_ERROR_INVALID_STATE, "%s was called by on_param_done, which must not use the context",
         function);
}

void Context::fail_foreign() const {
  if (mark_.load(std::memory_order_relaxed) >> 32 != kMark >> 32)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "ctx, %p, is not a context: it has been destroyed, or never was one",
         static_cast<const void*>(this));
  fail(GA_ERROR_INVALID_STATE,
       "the context was created before fork() by the parent of this process and cannot be used in "
       "the child; the child may create contexts of its own");
}

Context::Use::Use(const Context& context, const char* function, bool changing) : context_(context) {
  context.check_thread(function);
  if (context.in_use_.exchange(true, std::memory_order_acquire)) fail_in_use();
  try {
    context.check_usable(function, changing);
  } catch (...) {
    context.in_use_.store(false, std::memory_order_release);
    throw;
  }
  context.calls_ += changing;
}

thread_local const Context::SharedUse* Context::SharedUse::innermost_ = nullptr;

Context::SharedUse::SharedUse(const Context& context, const char* function, bool changing)
    : context_(context), outer_(innermost_) {
  context.check_thread(function);
  // A callback of a call may run on the thread of the call, which then would wait for itself.
  for (const SharedUse* use = outer_; use; use = use->outer_)
    if (&use->context_ == &context) fail_in_use();
  const ConcurrentCalls::Lock lock = context.callers_->lock();
  if (!context.callers_->enter(context.in_use_)) fail_in_use();
  try {
    context.check_usable(function, changing);
  } catch (...) {
    context.callers_->leave(context.in_use_);
    throw;
  }
  context.calls_ += changing;
  innermost_ = this;
}

Context::SharedUse::~SharedUse() {
  innermost_ = outer_;
  const ConcurrentCalls::Lock lock = context_.callers_->lock();
  context_.callers_->leave(context_.in_use_);
}

void Context::fail_in_use() {
  fail(GA_ERROR_INVALID_STATE,
       "the context is in another call; one thread may use it at a time, and the program's "
       "callbacks (parallel_for, allocate, free, log, on_param_done) must not use it");
}

inline void Context::check_usable(const char* function, bool changing) const {
  model.health.check();
  if (changing && averages->swapped())
    fail(GA_ERROR_INVALID_STATE,
         "%s was called while the parameters and their averages are exchanged; ga_ema_swap(ctx, 0) "
         "takes that back",
         function);
}

// ---- What concerns several stages ---------------------------------------------------------------

void Context::micro_abort() {
  const int64_t index = model.window.open_index();
  const bool taken = index >= 0 && layers->has_statistics_of(index);
  accumulator.check_abort(taken ? "a layer in WINDOW mode has the statistics of" : nullptr);
  layers->forget(index);
  accumulator.micro_abort();
}

void Context::set_comm(std::shared_ptr<Comm> comm, const ga_comm_options& options) {
  connect(stages, *rank_state_, std::move(comm), options);
}

void Context::make_arrays() { preparation_->make_arrays(); }

ga_memory Context::memory() const {
  ga_memory m = {};
  model.ranks->divide();
  const bool borrowing =
      model.options.borrows() && model.config.accum_steps == 1 && model.length.is_fixed();
  const size_t params = model.params.size(), prepared = model.tables.params();
  const auto bytes = [this](size_t groups, size_t n) {
    return preparation_->bytes_of_lists(n) + ContextTables::bytes(groups, n);
  };
  const int64_t planned =  // not resident yet
      model.arrays.count(m, borrowing, model.options.lends()) + bytes(0, params) -
      bytes(0, prepared);
  m.workspace += bytes(model.params.groups.size(), params);
  for (const Group& g : model.params.groups) m.workspace += g.rates.bytes();
  m.workspace += accumulator.bytes();
  m.rows += model.backend->row_bytes();
  m.averages += averages->bytes();
  int64_t written = 0;
  m.eager = model.speculation->bytes(written);
  m.workspace += model.ranks->bytes();
  m.batch_norm = layers->bytes();
  m.workspace += model.backend->bn_bytes() + model.tables.layers.bytes();
  for (const int64_t part : {m.accumulators, m.optimizer_state, m.workspace, m.masters, m.averages,
                             m.rows, m.batch_norm, m.eager})
    if (__builtin_add_overflow(m.total, part, &m.total)) m.total = INT64_MAX;
  m.resident = m.total - planned - (m.eager - written);
  return m;
}

}  // namespace ga
