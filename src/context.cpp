// SPDX-License-Identifier: Apache-2.0
#include "context.hpp"

#include <algorithm>
#include <climits>
#include <cmath>

#include "error.hpp"
#include "tensor.hpp"

namespace ga {
namespace {

// Every array the library owns begins on a cache line and is padded to whole ones: the loops may
// run over the end of optimizer state, to the end of the line.
constexpr size_t kAlign = 64;

size_t align_up(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

void check_choice(const char* name, int32_t value, int32_t last, const char* type) {
  if (value < 0 || value > last)
    fail(GA_ERROR_INVALID_ARGUMENT, "%s was %d, expected 0 to %d (%s)", name, value, last, type);
}

void check_rate(const char* name, double value) {
  if (!(value >= 0) || !std::isfinite(value))
    fail(GA_ERROR_INVALID_ARGUMENT, "%s was %g, expected a finite number >= 0", name, value);
}

// Elements of a tensor; throws when the shape is no shape or larger than an address space.
int64_t element_count(const ga_flat_entry& e, int32_t element_size) {
  if (e.rank < 0)
    fail(GA_ERROR_INVALID_ARGUMENT, "parameter \"%s\": rank was %d, expected >= 0", e.name, e.rank);
  if (e.rank > 0 && !e.shape)
    fail(GA_ERROR_INVALID_ARGUMENT, "parameter \"%s\": shape was NULL, but rank is %d", e.name,
         e.rank);
  int64_t count = 1;
  bool too_large = false;
  for (int32_t d = 0; d < e.rank; ++d) {
    if (e.shape[d] < 0)
      fail(GA_ERROR_INVALID_ARGUMENT, "parameter \"%s\": extent %d was %lld, expected >= 0", e.name,
           d, static_cast<long long>(e.shape[d]));
    too_large = too_large || __builtin_mul_overflow(count, e.shape[d], &count);
  }
  if (std::find(e.shape, e.shape + e.rank, 0) != e.shape + e.rank) return 0;
  int64_t bytes;
  if (too_large || __builtin_mul_overflow(count, element_size, &bytes))
    fail(GA_ERROR_INVALID_ARGUMENT,
         "parameter \"%s\": its shape has more elements than memory can hold", e.name);
  return count;
}

int32_t check_dtype(const char* name, const char* what, int32_t dtype) {
  const DtypeInfo info = dtype_info(dtype);
  if (info.size == 0)
    fail(GA_ERROR_INVALID_ARGUMENT, "parameter \"%s\": %s was %d, expected a ga_dtype", name, what,
         dtype);
  if (!info.floating)
    fail(GA_ERROR_INVALID_ARGUMENT, "parameter \"%s\": %s was %s, which is for indices", name, what,
         info.name);
  return info.size;
}

// The axes that a unit of adaptive clipping is reduced over: see ga_agc_units.
uint32_t agc_axes(int32_t units, const std::vector<int64_t>& shape) {
  constexpr uint32_t kAll = ~0u;
  const auto rank = static_cast<int32_t>(shape.size());
  int32_t counted = rank;
  if (units == GA_AGC_NFNETS)
    counted = static_cast<int32_t>(
        std::count_if(shape.begin(), shape.end(), [](int64_t extent) { return extent != 1; }));
  if (counted <= 1) return kAll;
  if (units == GA_AGC_TORCH) return kAll & ~1u;
  return rank <= 3 ? 1u : (1u << std::min(rank - 1, 31)) - 1;
}

}  // namespace

ga_config default_config() {
  ga_config c = {};
  c.struct_size = sizeof c;
  c.loss_scale = 1;
  c.noise_smoothing = 0.9;
  return c;
}

void check_config(const ga_config& c) {
  if (c.device == GA_DEVICE_CUDA)
    fail(GA_ERROR_UNSUPPORTED, "device was GA_DEVICE_CUDA, but this version has no CUDA backend");
  check_choice("device", c.device, GA_DEVICE_CUDA, "ga_device");
  if (c.num_threads < 0 || c.num_threads > 4096)
    fail(GA_ERROR_INVALID_ARGUMENT, "num_threads was %d, expected 0 to 4096", c.num_threads);
  if (c.accum_steps < 0)
    fail(GA_ERROR_INVALID_ARGUMENT, "accum_steps was %lld, expected >= 0",
         static_cast<long long>(c.accum_steps));
  check_choice("gradient_kind", c.gradient_kind, GA_GRADIENT_SUM, "ga_gradient_kind");
  check_choice("reduce", c.reduce, GA_REDUCE_SUM, "ga_reduce");
  check_choice("missing", c.missing, GA_MISSING_ZERO, "ga_missing");
  check_choice("nonfinite", c.nonfinite, GA_NONFINITE_IGNORE, "ga_nonfinite");
  check_choice("gradient_life", c.gradient_life, GA_GRADIENTS_LIVE, "ga_gradient_life");
  check_choice("accumulation", c.accumulation, GA_ACCUMULATE_STOCHASTIC, "ga_accumulation");
  if (c.accumulation == GA_ACCUMULATE_RUNNING_MEAN &&
      (c.gradient_kind != GA_GRADIENT_MEAN || c.reduce != GA_REDUCE_MEAN))
    fail(GA_ERROR_INVALID_ARGUMENT,
         "accumulation was GA_ACCUMULATE_RUNNING_MEAN, which needs GA_GRADIENT_MEAN and "
         "GA_REDUCE_MEAN, but gradient_kind was %d and reduce %d",
         c.gradient_kind, c.reduce);
  check_choice("noise_scale", c.noise_scale, 1, "0 or 1");
  check_choice("ga_config.reserved", c.reserved, 0, "reserved");
  if (!(c.noise_smoothing >= 0 && c.noise_smoothing < 1))
    fail(GA_ERROR_INVALID_ARGUMENT, "noise_smoothing was %g, expected a number in [0, 1)",
         c.noise_smoothing);
  if (!std::isfinite(c.loss_scale) || c.loss_scale == 0)
    fail(GA_ERROR_INVALID_ARGUMENT, "loss_scale was %g, expected a finite number other than 0",
         c.loss_scale);
}

ga_clip default_clip() {
  ga_clip c = {};
  c.struct_size = sizeof c;
  c.max_value = HUGE_VAL;
  c.agc_factor = 0.01;
  c.agc_eps = 1e-3;
  return c;
}

ga_ema default_ema() {
  ga_ema e = {};
  e.struct_size = sizeof e;
  e.decay = 0.999;
  e.gamma = 6.94;
  return e;
}

void check_ema(const ga_ema& e) {
  check_choice("ema: kind", e.kind, GA_EMA_KARRAS, "ga_ema_kind");
  if (e.dtype != 0 && e.dtype != GA_F32 && e.dtype != GA_BF16)
    fail(GA_ERROR_INVALID_ARGUMENT, "ema: dtype was %d, expected 0, GA_F32 or GA_BF16", e.dtype);
  if (!(e.decay >= 0 && e.decay <= 1))
    fail(GA_ERROR_INVALID_ARGUMENT, "ema: decay was %g, expected a number in [0, 1]", e.decay);
  check_rate("ema: gamma", e.gamma);
}

void check_clip(const ga_clip& c) {
  check_choice("clip: scope", c.scope, GA_CLIP_AGC, "ga_clip_scope");
  check_choice("clip: flavor", c.flavor, GA_FLAVOR_KERAS, "GA_FLAVOR_TORCH or GA_FLAVOR_KERAS");
  check_choice("clip: agc_units", c.agc_units, GA_AGC_TORCH, "ga_agc_units");
  check_choice("clip: when", c.when, GA_CLIP_MICRO, "ga_clip_when");
  if (c.scope == GA_CLIP_GLOBAL || c.scope == GA_CLIP_PER_TENSOR)
    check_rate("clip: max_norm", c.max_norm);
  if (!(c.max_value > 0))
    fail(GA_ERROR_INVALID_ARGUMENT, "clip: max_value was %g, expected > 0", c.max_value);
  if (!(c.agc_factor > 0) || !std::isfinite(c.agc_factor))
    fail(GA_ERROR_INVALID_ARGUMENT, "clip: agc_factor was %g, expected a finite number > 0",
         c.agc_factor);
  if (!(c.agc_eps > 0) || !std::isfinite(c.agc_eps))
    fail(GA_ERROR_INVALID_ARGUMENT, "clip: agc_eps was %g, expected a finite number > 0",
         c.agc_eps);
}

Context::Context(const ga_config& config)
    : config_(config), backend_(make_cpu_backend(config)), clip_(default_clip()) {
  window_.set_accum_steps(config.accum_steps);
  choose_path();
}

void Context::choose_path() {
  const auto micro = [](const ga_clip& c) {
    return c.when == GA_CLIP_MICRO && (c.scope != GA_CLIP_NONE || std::isfinite(c.max_value));
  };
  const auto units = [](const ga_clip& c) {
    return c.when == GA_CLIP_STEP && c.scope == GA_CLIP_AGC;
  };
  clip_micro_ = micro(clip_);
  clip_units_ = units(clip_);
  for (const Group& g : groups_) {
    clip_micro_ = clip_micro_ || (g.own_clip && micro(g.clip));
    clip_units_ = clip_units_ || (g.own_clip && units(g.clip));
  }
  plain_ = config_.accumulation == GA_ACCUMULATE_PLAIN && !config_.noise_scale;
  adopts_ = plain_ && !deferring() && config_.gradient_life == GA_GRADIENTS_LIVE;
}

Context::~Context() {
  for (Tensor& t : tensors_)
    for (auto* units : {&t.units, &t.factor_rows, &t.factor_columns}) free_units(*units);
  for (const Arena& a : arenas_) backend_->free(a.data, a.bytes);
  backend_->free(scratch_, scratch_bytes_);
}

Context::Use::Use(const Context& context) : context_(context) {
  if (context.in_use_.exchange(true, std::memory_order_acquire))
    fail(GA_ERROR_INVALID_STATE,
         "the context is in another call; one thread may use it at a time, and a parallel_for may "
         "not");
  if (context.broken_) {
    context.in_use_.store(false, std::memory_order_release);
    throw *context.broken_;
  }
}

void Context::require_empty(const char* what) const {
  if (!window_.empty())
    fail(GA_ERROR_INVALID_STATE,
         "%s was called within a window; it is legal while the window is empty", what);
}

const Context::Group& Context::group(ga_group id) const {
  if (id < 0 || static_cast<size_t>(id) >= groups_.size())
    fail(GA_ERROR_INVALID_ARGUMENT, "group was %d, but the context has %zu", id, groups_.size());
  return groups_[static_cast<size_t>(id)];
}

Context::Group& Context::group(ga_group id) {
  return const_cast<Group&>(static_cast<const Context*>(this)->group(id));
}

const Context::Param& Context::param(ga_param id) const {
  if (id < 0 || static_cast<size_t>(id) >= params_.size())
    fail(GA_ERROR_INVALID_ARGUMENT, "parameter was %d, but the context has %zu", id,
         params_.size());
  return params_[static_cast<size_t>(id)];
}

Context::Param& Context::param(ga_param id) {
  return const_cast<Param&>(static_cast<const Context*>(this)->param(id));
}

// ---- Window length ------------------------------------------------------------------------------

void Context::update_accum_steps() {
  int64_t k = config_.accum_steps;
  for (const ga_accum_phase& phase : phases_)
    if (phase.from_step <= steps_) k = phase.accum_steps;
  window_.set_accum_steps(k);
}

void Context::set_accum_steps(int64_t k) {
  require_empty("ga_context_set_accum_steps");
  if (k < 0)
    fail(GA_ERROR_INVALID_ARGUMENT, "accum_steps was %lld, expected >= 0",
         static_cast<long long>(k));
  config_.accum_steps = k;
  phases_.clear();
  update_accum_steps();
}

void Context::set_accum_schedule(const ga_accum_phase* phases, size_t count) {
  require_empty("ga_context_set_accum_schedule");
  if (count > 0 && !phases)
    fail(GA_ERROR_INVALID_ARGUMENT, "phases was NULL, but count is %zu", count);
  for (size_t i = 0; i < count; ++i) {
    const bool ordered =
        i == 0 ? phases[i].from_step == 0 : phases[i].from_step > phases[i - 1].from_step;
    if (!ordered)
      fail(GA_ERROR_INVALID_ARGUMENT,
           "phase %zu: from_step was %lld; the first is 0 and each is larger than the one before",
           i, static_cast<long long>(phases[i].from_step));
    if (phases[i].accum_steps < 0)
      fail(GA_ERROR_INVALID_ARGUMENT, "phase %zu: accum_steps was %lld, expected >= 0", i,
           static_cast<long long>(phases[i].accum_steps));
  }
  std::vector<ga_accum_phase> copy(phases, phases + count);
  phases_.swap(copy);
  update_accum_steps();
}

// ---- Groups -------------------------------------------------------------------------------------

ga_group Context::add_group(const ga_optimizer& o) {
  require_empty("ga_group_add");
  check_optimizer(o);
  if (groups_.size() >= INT32_MAX) fail(GA_ERROR_INVALID_ARGUMENT, "too many groups");
  const OptimizerInfo& info = optimizer_info(o.kind, o.flavor);
  Group g = {o, Schedule(), Clock(), {info.op(o, false), info.op(o, true)}, false, default_clip()};
  if (g.op[1] >= 0 && op_info(g.op[1]).orthogonal) backend_->prepare_matmul(0);
  for (int64_t s = 0; s < steps_; ++s) info.advance(o, g.clock);
  groups_.push_back(std::move(g));
  return static_cast<ga_group>(groups_.size()) - 1;
}

void Context::set_lr(ga_group id, double lr) {
  Group& g = group(id);
  check_rate("lr", lr);
  g.optimizer.lr = lr;
}

void Context::set_weight_decay(ga_group id, double weight_decay) {
  Group& g = group(id);
  check_rate("weight_decay", weight_decay);
  g.optimizer.weight_decay = weight_decay;
  const OptimizerInfo& info = optimizer_info(g.optimizer.kind, g.optimizer.flavor);
  for (int matrix = 0; matrix < 2; ++matrix) g.op[matrix] = info.op(g.optimizer, matrix);
}

void Context::set_schedule(ga_group id, const ga_schedule* schedule) {
  Group& g = group(id);
  g.schedule = schedule ? Schedule(*schedule) : Schedule();
}

void Context::set_clip(const ga_clip* clip) { change_clip(clip, clip_, nullptr); }

void Context::set_group_clip(ga_group id, const ga_clip* clip) {
  Group& g = group(id);
  change_clip(clip, g.clip, &g.own_clip);
}

// What a clip of the context or of a group becomes, with the arrays that it needs. All or nothing.
void Context::change_clip(const ga_clip* clip, ga_clip& slot, bool* own) {
  if (clip) check_clip(*clip);
  const ga_clip next = clip ? *clip : default_clip();
  if (next.when == GA_CLIP_MICRO || clip_micro_)
    require_empty("a change of a clipping of micro-batches (GA_CLIP_MICRO)");
  const ga_clip before = slot;
  const bool before_own = own && *own;
  slot = next;
  if (own) *own = clip != nullptr;
  try {
    const bool units = before.scope == GA_CLIP_AGC || next.scope == GA_CLIP_AGC ||
                       clip_.scope == GA_CLIP_AGC;  // perhaps another group's, now or before
    if (prepared_ > 0 && units) prepare_units();
    for (size_t i = prepared_; i < params_.size(); ++i)
      if (clip_of(params_[i]).scope == GA_CLIP_AGC) units_axes(i);
  } catch (...) {
    slot = before;
    if (own) *own = before_own;
    throw;
  }
  choose_path();
}

// The axes that the units of a parameter under GA_CLIP_AGC are reduced over.
uint32_t Context::units_axes(size_t i) const {
  const Tensor& t = tensors_[i];
  if (t.options.agc_axes != 0) return t.options.agc_axes;
  const int32_t units = clip_of(params_[i]).agc_units;
  if (units == GA_AGC_NFNETS && t.shape.size() > 4)
    fail(GA_ERROR_UNSUPPORTED,
         "parameter \"%s\": its rank is %zu, but GA_AGC_NFNETS has units up to rank 4; "
         "ga_param_options.agc_axes names them",
         t.name.c_str(), t.shape.size());
  return agc_axes(units, t.shape);
}

std::unique_ptr<Context::Units> Context::new_units(const std::vector<int64_t>& shape,
                                                   uint32_t reduced, bool both) const {
  auto units = std::make_unique<Units>();
  units->pattern = make_units(static_cast<int32_t>(shape.size()), shape.data(), reduced);
  const auto sums = static_cast<size_t>(units->pattern.sums());
  units->bytes = sums * sizeof(double) * (both ? 2 : 1);
  units->gradient = static_cast<double*>(backend_->allocate(units->bytes));
  if (both) units->param = units->gradient + sums;
  return units;
}

void Context::free_units(std::unique_ptr<Units>& units) noexcept {
  if (units) backend_->free(units->gradient, units->bytes);
  units.reset();
}

// Gives every parameter under GA_CLIP_AGC that has its arrays those of its units. All or nothing.
void Context::prepare_units() {
  std::vector<std::unique_ptr<Units>> made(prepared_);
  try {
    for (size_t i = 0; i < prepared_; ++i)
      if (clip_of(params_[i]).scope == GA_CLIP_AGC) {
        const uint32_t axes = units_axes(i);
        if (params_[i].count > 0) made[i] = new_units(tensors_[i].shape, axes, true);
      }
  } catch (...) {
    for (auto& units : made) free_units(units);
    throw;
  }
  for (size_t i = 0; i < prepared_; ++i) {
    std::swap(tensors_[i].units, made[i]);
    free_units(made[i]);
  }
}

double Context::lr(ga_group id) const {
  const Group& g = group(id);
  return g.schedule.rate(g.optimizer.lr, steps_);
}

void Context::set_loss_scaler(const ga_loss_scaler* scaler) {
  require_empty("ga_context_set_loss_scaler");
  if (scaler)
    scaler_ = LossScaler(*scaler);
  else
    scaler_.reset();
}

void Context::set_ema(const ga_ema* ema) {
  if (prepared_ > 0 || !window_.empty())
    fail(GA_ERROR_INVALID_STATE,
         "ga_context_set_ema was called after the first contribution to a window; it is legal "
         "before");
  if (ema) {
    check_ema(*ema);
    for (size_t i = 0; i < params_.size(); ++i)
      if (ema->dtype == GA_BF16 && params_[i].f64)
        fail(GA_ERROR_UNSUPPORTED, "parameter \"%s\": its dtype is f64, but that of averages bf16",
             tensors_[i].name.c_str());
    ema_ = *ema;
  } else {
    ema_.reset();
  }
}

// ---- Parameters ---------------------------------------------------------------------------------

const Context::Range* Context::overlap(const void* data, int64_t bytes, ga_param except) const {
  if (bytes == 0) return nullptr;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t end = begin + static_cast<uintptr_t>(bytes);
  // The ranges lie apart, so their ends are sorted as their beginnings are.
  auto it = std::upper_bound(ranges_.begin(), ranges_.end(), begin,
                             [](uintptr_t value, const Range& r) { return value < r.end; });
  for (; it != ranges_.end() && it->begin < end; ++it)
    if (it->param != except || except < 0) return &*it;
  return nullptr;
}

void Context::add_range(const Range& range) {
  if (range.begin == range.end) return;
  const auto at = std::upper_bound(ranges_.begin(), ranges_.end(), range.begin,
                                   [](uintptr_t value, const Range& r) { return value < r.begin; });
  ranges_.insert(at, range);
}

void Context::check_data(const char* tensor, const void* data, int64_t count, int32_t size,
                         ga_param self) const {
  if (count == 0) return;
  if (!data)
    fail(GA_ERROR_INVALID_ARGUMENT, "parameter \"%s\": data was NULL, but it has %lld elements",
         tensor, static_cast<long long>(count));
  const auto address = reinterpret_cast<uintptr_t>(data);
  if (address % static_cast<uintptr_t>(size) != 0)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "parameter \"%s\": data was at address %p, expected a multiple of its element, %d bytes",
         tensor, data, size);
  const int64_t bytes = count * size;
  if (static_cast<uintptr_t>(bytes) > UINTPTR_MAX - address)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "parameter \"%s\": its %lld elements at address %p reach past the end of memory", tensor,
         static_cast<long long>(count), data);
  if (const Range* r = overlap(data, bytes, self))
    fail(GA_ERROR_INVALID_ARGUMENT, "parameter \"%s\": its data at %p overlaps %s%s%s", tensor,
         data, r->param < 0 ? "memory of the library" : "parameter \"",
         r->param < 0 ? "" : name(r->param), r->param < 0 ? "" : "\"");
}

bool Context::has_master(size_t i) const {
  const Param& p = params_[i];
  return dtype_info(p.dtype).size == 2 && tensors_[i].options.master == GA_MASTER_F32 &&
         op_of(p) >= 0;
}

// Whether dtypes and options go together, and with the group's optimizer.
void Context::check_options(const ga_flat_entry& e, int32_t dtype,
                            const ga_param_options& o) const {
  const Group& g = group(e.group);
  const OptimizerInfo& info = optimizer_info(g.optimizer.kind, g.optimizer.flavor);
  const auto choice = [&](const char* field, int32_t value, int32_t last, const char* type) {
    if (value < 0 || value > last)
      fail(GA_ERROR_INVALID_ARGUMENT, "parameter \"%s\": %s was %d, expected 0 to %d (%s)", e.name,
           field, value, last, type);
  };
  const auto refuse = [&](const char* what) {
    fail(GA_ERROR_UNSUPPORTED, "parameter \"%s\": %s", e.name, what);
  };
  choice("master", o.master, GA_MASTER_NONE, "ga_master");
  choice("rounding", o.rounding, GA_ROUND_STOCHASTIC, "ga_rounding");
  choice("rows", o.rows, GA_ROWS_LAZY, "ga_rows");
  if (e.rank < 32 && o.agc_axes >> std::max(e.rank, 0) != 0)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "parameter \"%s\": agc_axes was 0x%x, but its rank is %d: it has axes 0 to %d", e.name,
         o.agc_axes, e.rank, e.rank - 1);
  const bool f64 = dtype == GA_F64;
  if (!f64 && o.gradient_dtype == GA_F64)
    refuse("gradient_dtype was f64, which is for f64 parameters");
  if (f64 ? o.accumulator_dtype != 0 && o.accumulator_dtype != GA_F64
          : o.accumulator_dtype == GA_F64)
    refuse(f64 ? "accumulator_dtype was not f64, but its dtype is f64"
               : "accumulator_dtype was f64, which is for f64 parameters");
  if (f64 && g.optimizer.state_dtype != 0)
    refuse("its dtype is f64, but its group has a state_dtype");
  if (f64 && ema_ && ema_->dtype == GA_BF16) refuse("its dtype is f64, but that of averages bf16");
  if (info.matrices_only && (e.rank != 2 || f64))
    fail(GA_ERROR_UNSUPPORTED,
         "parameter \"%s\": %s is for matrices, but its rank is %d and its dtype %s; a group of "
         "another optimizer may take it",
         e.name, info.name, e.rank, dtype_info(dtype).name);
  if (o.rows == GA_ROWS_NONE) return;
  if (e.rank < 1) refuse("rows was set, but its rank is 0");
  if (o.accumulator_dtype == GA_F16 || o.accumulator_dtype == GA_BF16)
    refuse("rows was set, but its accumulator has 16 bits");
  if (config_.accumulation != GA_ACCUMULATE_PLAIN)
    refuse("rows was set, but ga_config.accumulation is not GA_ACCUMULATE_PLAIN");
  if (o.rows == GA_ROWS_LAZY && !info.lazy(g.optimizer))
    fail(GA_ERROR_UNSUPPORTED,
         "parameter \"%s\": rows was GA_ROWS_LAZY, but its group's optimizer, %s%s, moves "
         "every element in every step",
         e.name, info.name, g.optimizer.dampening != 0 ? " with dampening" : "");
  if (e.shape && e.shape[0] > static_cast<int64_t>(UINT32_MAX))
    refuse("rows was set, but it has more than 2^32 - 1 rows");
}

ga_param Context::add_params(void* data, int32_t dtype, const ga_flat_entry* entries, size_t count,
                             const ga_param_options& options) {
  require_empty("adding a parameter");
  if (count > static_cast<size_t>(INT32_MAX) - params_.size())
    fail(GA_ERROR_INVALID_ARGUMENT, "the context would have more than %d parameters", INT32_MAX);
  const size_t old_params = params_.size();
  const size_t old_ranges = ranges_.size();
  const auto undo = [&] {
    for (size_t i = old_params; i < tensors_.size(); ++i)
      names_.erase(tensors_[i].name);  // or was never in
    params_.resize(old_params, Param{});
    tensors_.erase(tensors_.begin() + static_cast<std::ptrdiff_t>(old_params), tensors_.end());
    ranges_.erase(std::remove_if(
                      ranges_.begin(), ranges_.end(),
                      [&](const Range& r) { return r.param >= static_cast<ga_param>(old_params); }),
                  ranges_.end());
  };
  try {
    params_.reserve(old_params + count);
    tensors_.reserve(old_params + count);
    ranges_.reserve(old_ranges + count);
    blocks_.reserve(blocks_.size() + 1);
    for (size_t i = 0; i < count; ++i) {
      const ga_flat_entry& e = entries[i];
      if (!e.name || !*e.name)
        fail(GA_ERROR_INVALID_ARGUMENT, "parameter %zu: its name was %s", old_params + i,
             e.name ? "empty" : "NULL");
      if (names_.count(e.name) > 0)
        fail(GA_ERROR_INVALID_ARGUMENT,
             "parameter \"%s\": the context has one of that name already", e.name);
      group(e.group);
      const int32_t size = check_dtype(e.name, "dtype", dtype);
      const int32_t gradient_dtype = options.gradient_dtype ? options.gradient_dtype : dtype;
      check_dtype(e.name, "gradient_dtype", gradient_dtype);
      if (options.accumulator_dtype)
        check_dtype(e.name, "accumulator_dtype", options.accumulator_dtype);
      const int64_t elements = element_count(e, std::max(size, 4));
      check_options(e, dtype, options);
      if (e.offset < 0 || e.offset > INT64_MAX / size - elements)
        fail(GA_ERROR_INVALID_ARGUMENT, "parameter \"%s\": offset was %lld, expected >= 0", e.name,
             static_cast<long long>(e.offset));
      char* const at = data ? static_cast<char*>(data) + e.offset * size : nullptr;
      check_data(e.name, at, elements, size, -1);
      Tensor t = {};
      t.name = e.name;
      t.shape.assign(e.shape, e.shape + e.rank);
      t.options = options;
      t.rows = e.rank > 0 ? e.shape[0] : 1;
      tensors_.push_back(std::move(t));
      names_.insert(e.name);
      Param p = {};
      p.data = at;
      p.count = elements;
      p.offset = e.offset;
      p.group = e.group;
      p.matrix = e.rank >= 2;
      p.f64 = dtype == GA_F64;
      p.dtype = static_cast<unsigned char>(dtype);
      p.gradient_dtype = static_cast<unsigned char>(gradient_dtype);
      p.accumulator_dtype = static_cast<unsigned char>(
          options.accumulator_dtype ? options.accumulator_dtype : (p.f64 ? GA_F64 : GA_F32));
      params_.push_back(p);
      if (clip_of(p).scope == GA_CLIP_AGC) units_axes(params_.size() - 1);
      const auto begin = reinterpret_cast<uintptr_t>(at);
      add_range({begin, begin + static_cast<uintptr_t>(elements * size),
                 static_cast<ga_param>(old_params + i)});
    }
  } catch (...) {
    undo();
    throw;
  }
  blocks_.push_back({static_cast<ga_param>(old_params), static_cast<ga_param>(count)});
  for (Param& p : params_) p.checked = nullptr;
  return static_cast<ga_param>(old_params);
}

void Context::bind(ga_param id, void* data) {
  require_empty("ga_param_bind");
  Param& p = param(id);
  check_data(name(id), data, p.count, dtype_info(p.dtype).size, id);
  p.data = data;
  ranges_.erase(
      std::remove_if(ranges_.begin(), ranges_.end(), [&](const Range& r) { return r.param == id; }),
      ranges_.end());
  const auto begin = reinterpret_cast<uintptr_t>(data);
  add_range(
      {begin,
       begin + static_cast<uintptr_t>(p.count) * static_cast<uintptr_t>(dtype_info(p.dtype).size),
       id});
  for (Param& other : params_) other.checked = nullptr;
}

void Context::set_frozen(ga_param id, bool frozen) {
  require_empty("ga_param_set_frozen");
  param(id).frozen = frozen;
}

void Context::changed(ga_param id) {
  require_empty("ga_param_changed");
  Param& p = param(id);
  if (static_cast<size_t>(id) < filled_ && p.master) take_master(p);
}

void Context::take_master(Param& p) {
  FinishTask task = {};
  task.gradient = {{p.data, p.dtype, 1}, 1, HUGE_VAL, 1};
  task.target = {p.master, GA_F32};
  task.count = p.count;
  backend_->finish({&task, 1});
}

void Context::ema_copy_to(ga_param id, void* out, int32_t dtype) {
  const Param& p = param(id);
  if (!ema_)
    fail(GA_ERROR_INVALID_STATE,
         "ga_ema_copy_to: the context keeps no averages; ga_context_set_ema begins them");
  const DtypeInfo info = dtype_info(dtype);
  if (!info.floating)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "ga_ema_copy_to: dtype was %d, expected GA_F32, GA_F64, GA_F16 or GA_BF16", dtype);
  if (p.count == 0) return;
  if (!out) fail(GA_ERROR_INVALID_ARGUMENT, "ga_ema_copy_to: out was NULL");
  check_values(id, out, p.count, info.size, "out");
  FinishTask task = {};
  Source& source = task.gradient.source;
  const Array from = p.averaged ? average_of(p) : param_of(p);
  source = {from.data, from.format, 1};
  task.gradient = {source, 1, HUGE_VAL, 1};
  task.f64 = p.f64;
  task.target = {out, dtype};
  task.count = p.count;
  backend_->reserve(std::max(owned_.chunks, chunk_count(p.count)),
                    static_cast<int64_t>(owned_.bytes[kAccumulator]));
  backend_->finish({&task, 1});
}

// ---- Memory -------------------------------------------------------------------------------------

Array Context::average_of(const Param& p) const {
  return {p.average, p.f64 ? GA_F64 : ema_ && ema_->dtype == GA_BF16 ? GA_BF16 : GA_F32};
}

// The last two axes of a tensor as matrices.
Context::Matrices Context::matrices_of(const Tensor& t) const {
  const size_t rank = t.shape.size();
  Matrices m = {t.shape[rank - 2], t.shape[rank - 1], 1};
  for (size_t d = 0; d + 2 < rank; ++d) m.count *= t.shape[d];
  return m;
}

size_t Context::bytes_of(size_t i, int kind) const {
  const Param& p = params_[i];
  const Tensor& t = tensors_[i];
  if (p.count == 0) return 0;
  const auto count = static_cast<size_t>(p.count);
  const size_t real = p.f64 ? 8 : 4;
  const auto size = [](int32_t dtype) { return static_cast<size_t>(dtype_info(dtype).size); };
  switch (kind) {
    case kAccumulator:
      return count * size(p.accumulator_dtype);
    case kLow: {
      const bool pair =
          config_.accumulation == GA_ACCUMULATE_COMPENSATED && size(p.accumulator_dtype) == 2;
      return pair ? count * 2 : 0;
    }
    case kMaster:
      return has_master(i) ? count * 4 : 0;
    case kAverage:
      return ema_ ? count * size(average_of(p).format) : 0;
    case kRowSlots:
      return t.options.rows != GA_ROWS_NONE ? static_cast<size_t>(t.rows) * sizeof(uint32_t) : 0;
    default:
      break;
  }
  const int slot = kind - kState, op = op_of(p);
  if (op < 0) return 0;
  if (op_info(op).factored) {
    const Matrices m = matrices_of(t);
    const int64_t lengths[] = {m.count * m.rows, m.count * m.columns, m.count};
    return static_cast<size_t>(lengths[slot]) * real;
  }
  if (slot >= op_info(op).slots) return 0;
  const bool bf16 = groups_[static_cast<size_t>(p.group)].optimizer.state_dtype == GA_BF16;
  // Loops in double go by groups of two cache lines.
  return bf16 ? count * 2 : p.f64 ? (count * 8 + 127) / 128 * 128 : count * 4;
}

// Finds a place for each of a parameter's arrays, behind what l holds. One loop walks them all
// together with the parameter. Where the addresses of two streams are nearly alike in their low 12
// bits, a core takes the load of one for depending on the store to the other (measured: half the
// speed), so the arrays of a large parameter lie 17 cache lines apart within a page, counted from
// it.
void Context::place(size_t i, Layout& l, std::array<size_t, kArrays>& offset) const {
  constexpr size_t kPage = 4096, kApart = 17 * kAlign, kLarge = size_t{1} << 20;
  const Param& p = params_[i];
  size_t apart = 0;
  for (int a = 0; a < kArrays; ++a) {
    const size_t kind = static_cast<size_t>(a);
    const size_t bytes = align_up(bytes_of(i, a));
    offset[kind] = l.bytes[kind];
    if (bytes == 0) continue;
    apart += kApart;
    if (bytes >= kLarge) {
      const size_t wanted = reinterpret_cast<uintptr_t>(p.data) / kAlign * kAlign + apart;
      offset[kind] += (wanted - offset[kind]) % kPage;
    }
    l.bytes[kind] = offset[kind] + bytes;
  }
  l.chunks += chunk_count(p.count);
  const int op = op_of(p);
  if (op < 0 || !op_info(op).emits || p.count == 0) return;
  int64_t elements = 0;
  if (p.accumulator_dtype != (p.f64 ? GA_F64 : GA_F32)) elements = p.count;
  if (op_info(op).orthogonal)
    elements += OrthogonalizeTask::scratch_size(tensors_[i].rows, p.count / tensors_[i].rows);
  l.scratch = std::max(l.scratch, static_cast<size_t>(elements) * (p.f64 ? 8 : 4));
}

Context::Layout Context::layout_of_new() const {
  Layout l;
  std::array<size_t, kArrays> offset;
  for (size_t i = prepared_; i < params_.size(); ++i) place(i, l, offset);
  return l;
}

ga_memory Context::memory() const {
  const Layout fresh = layout_of_new();
  const auto bytes = [&](int kind) {
    return static_cast<int64_t>(owned_.bytes[static_cast<size_t>(kind)] +
                                fresh.bytes[static_cast<size_t>(kind)]);
  };
  ga_memory m = {};
  m.accumulators = bytes(kAccumulator) + bytes(kLow);
  for (int k = 0; k < kMaxSlots; ++k) m.optimizer_state += bytes(kState + k);
  m.masters = bytes(kMaster);
  m.averages = bytes(kAverage);
  m.rows = bytes(kRowSlots);
  const int64_t chunks = owned_.chunks + fresh.chunks;
  m.workspace = chunks * static_cast<int64_t>(sizeof(Partial)) + backend_->table_bytes(chunks) +
                static_cast<int64_t>(std::max(scratch_bytes_, fresh.scratch)) +
                static_cast<int64_t>(params_.size() * (sizeof(Param) + sizeof(Tensor)) +
                                     params_.size() * bytes_of_lists());
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const Tensor& t = tensors_[i];
    m.rows += static_cast<int64_t>(t.set.entries.capacity() * sizeof(RowEntry));
    if (i < prepared_) {
      for (const auto* units : {&t.units, &t.factor_rows, &t.factor_columns})
        if (*units) m.workspace += static_cast<int64_t>((*units)->bytes);
    } else if (clip_of(params_[i]).scope == GA_CLIP_AGC && params_[i].count > 0) {
      const UnitPattern p =
          make_units(static_cast<int32_t>(t.shape.size()), t.shape.data(), units_axes(i));
      m.workspace += 2 * p.sums() * static_cast<int64_t>(sizeof(double));
    }
  }
  m.total = m.accumulators + m.optimizer_state + m.workspace + m.masters + m.averages + m.rows;
  return m;
}

// Bytes of the working lists for each parameter.
size_t Context::bytes_of_lists() {
  return sizeof(AccumulateTask) + sizeof(NormTask) + sizeof(UpdateTask) + sizeof(FinishTask) +
         2 * sizeof(OpBytes) + 2 * sizeof(ga_param) + 2 * sizeof(UnitTask) + sizeof(AgcTask) +
         sizeof(FactorTask);
}

// Gives the parameters added since the last window their arrays. All or nothing.
void Context::prepare() {
  if (prepared_ == params_.size()) {
    if (filled_ < prepared_) fill_new();
    return;
  }
  const size_t n = params_.size();
  const Layout fresh = layout_of_new();
  accumulate_tasks_.reserve(n);
  norm_tasks_.reserve(n);
  update_tasks_.reserve(n + static_cast<size_t>(row_tasks_));
  finish_tasks_.reserve(n);
  folded_.reserve(2 * n);  // layer-wise optimizers fold twice
  touched_.reserve(n);
  layers_.reserve(n);
  unit_tasks_.reserve(2 * n);
  agc_tasks_.reserve(n);
  factor_tasks_.reserve(n);
  backend_->reserve(owned_.chunks + fresh.chunks + row_tasks_,
                    static_cast<int64_t>(owned_.bytes[kAccumulator] + fresh.bytes[kAccumulator]));

  constexpr size_t kPartials = kArrays;
  std::array<size_t, kArrays + 1> bytes;
  std::copy(fresh.bytes.begin(), fresh.bytes.end(), bytes.begin());
  bytes[kPartials] = static_cast<size_t>(fresh.chunks) * sizeof(Partial);
  std::array<char*, kArrays + 1> base = {};
  std::vector<std::unique_ptr<Units>> made(3 * (n - prepared_));
  void* scratch = nullptr;
  arenas_.reserve(arenas_.size() + kArrays + 1);
  ranges_.reserve(ranges_.size() + kArrays + 1);
  try {
    for (size_t a = 0; a <= kPartials; ++a)
      if (bytes[a] > 0) base[a] = static_cast<char*>(backend_->allocate(bytes[a]));
    if (fresh.scratch > scratch_bytes_) scratch = backend_->allocate(fresh.scratch);
    for (size_t i = prepared_; i < n; ++i) {
      const Tensor& t = tensors_[i];
      auto* const units = &made[3 * (i - prepared_)];
      if (params_[i].count == 0) continue;
      if (clip_of(params_[i]).scope == GA_CLIP_AGC)
        units[0] = new_units(t.shape, units_axes(i), true);
      const int op = op_of(params_[i]);
      if (op < 0 || !op_info(op).factored) continue;
      const Matrices m = matrices_of(t);
      const std::vector<int64_t> shape = {m.count, m.rows, m.columns};
      units[1] = new_units(shape, 4, false);
      units[2] = new_units(shape, 2, false);
    }
  } catch (const std::bad_alloc&) {
    for (size_t a = 0; a <= kPartials; ++a) backend_->free(base[a], bytes[a]);
    backend_->free(scratch, fresh.scratch);
    for (auto& units : made) free_units(units);
    fail(
        GA_ERROR_OUT_OF_MEMORY,
        "%zu bytes for accumulators and %zu for optimizer state of %zu parameters could not be had",
        bytes[kAccumulator], bytes[kState] + bytes[kState + 1] + bytes[kState + 2], n - prepared_);
  }
  if (scratch) {
    backend_->free(scratch_, scratch_bytes_);
    scratch_ = scratch;
    scratch_bytes_ = fresh.scratch;
  }
  for (size_t a = 0; a <= kPartials; ++a) {
    if (!base[a]) continue;
    arenas_.push_back({base[a], bytes[a]});
    const auto begin = reinterpret_cast<uintptr_t>(base[a]);
    add_range({begin, begin + bytes[a], -1});
  }
  auto* partials = reinterpret_cast<Partial*>(base[kPartials]);
  Layout l;
  for (size_t first = prepared_; prepared_ < n; ++prepared_) {
    Param& p = params_[prepared_];
    Tensor& t = tensors_[prepared_];
    std::array<size_t, kArrays> offset = {};
    place(prepared_, l, offset);
    if (p.count == 0) continue;
    const auto at = [&](int kind) -> void* {
      const auto k = static_cast<size_t>(kind);
      return bytes_of(prepared_, kind) > 0 ? base[k] + offset[k] : nullptr;
    };
    p.accumulator = at(kAccumulator);
    for (int k = 0; k < kMaxSlots; ++k) p.state[k] = at(kState + k);
    p.master = at(kMaster);
    p.average = at(kAverage);
    p.partials = partials;
    partials += chunk_count(p.count);
    t.pair = {p.accumulator, at(kLow), p.accumulator_dtype};
    t.set.slots = static_cast<uint32_t*>(at(kRowSlots));
    auto* const units = &made[3 * (prepared_ - first)];
    t.units = std::move(units[0]);
    t.factor_rows = std::move(units[1]);
    t.factor_columns = std::move(units[2]);
  }
  for (size_t a = 0; a < kArrays; ++a) owned_.bytes[a] += fresh.bytes[a];
  owned_.chunks += fresh.chunks;
  fill_new();
}

// What new arrays begin with, where that is not zero. May be done again after it has failed.
void Context::fill_new() {
  for (; filled_ < prepared_; ++filled_) {
    Param& p = params_[filled_];
    if (p.count == 0) continue;
    if (p.master) take_master(p);
    const ga_optimizer& o = groups_[static_cast<size_t>(p.group)].optimizer;
    for (int k = 0; k < kMaxSlots; ++k) {
      const double initial = optimizer_info(o.kind, o.flavor).initial(o, k);
      if (!p.state[k] || initial == 0) continue;
      FinishTask task = {};
      task.gradient = {{nullptr, GA_F32, 1}, 1, HUGE_VAL, 1};
      task.constant = initial;
      task.f64 = p.f64;
      task.target = state_of(p, k);
      task.count = p.count;
      backend_->finish({&task, 1});
    }
  }
}

Array Context::state_of(const Param& p, int slot) const {
  const ga_optimizer& o = groups_[static_cast<size_t>(p.group)].optimizer;
  return {p.state[slot], p.f64 ? GA_F64 : o.state_dtype == GA_BF16 ? GA_BF16 : GA_F32};
}

Array Context::param_of(const Param& p) const {
  if (p.master) return {p.master, GA_F32};
  return {p.data, p.dtype};
}

// A key for random bits: splitmix64 over all that tells one use from another.
uint64_t Context::key(Purpose purpose, int64_t a, int64_t b, int64_t c) const {
  uint64_t z = config_.seed;
  for (const uint64_t part : {static_cast<uint64_t>(purpose), static_cast<uint64_t>(a),
                              static_cast<uint64_t>(b), static_cast<uint64_t>(c)}) {
    z += 0x9e3779b97f4a7c15 + part;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    z ^= z >> 31;
  }
  return z;
}

}  // namespace ga
