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
  if (!info.supported)
    fail(GA_ERROR_UNSUPPORTED, "parameter \"%s\": %s was %s, this version has f32", name, what,
         info.name);
  return info.size;
}

}  // namespace

ga_config default_config() {
  ga_config c = {};
  c.struct_size = sizeof c;
  c.loss_scale = 1;
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
  check_choice("nonfinite", c.nonfinite, GA_NONFINITE_FAIL, "ga_nonfinite");
  check_choice("gradient_life", c.gradient_life, GA_GRADIENTS_LIVE, "ga_gradient_life");
  check_choice("ga_config.reserved", c.reserved, 0, "reserved");
  if (!std::isfinite(c.loss_scale) || c.loss_scale == 0)
    fail(GA_ERROR_INVALID_ARGUMENT, "loss_scale was %g, expected a finite number other than 0",
         c.loss_scale);
}

ga_clip default_clip() {
  ga_clip c = {};
  c.struct_size = sizeof c;
  c.max_value = HUGE_VAL;
  return c;
}

void check_clip(const ga_clip& c) {
  check_choice("clip: scope", c.scope, GA_CLIP_PER_TENSOR, "ga_clip_scope");
  check_choice("clip: flavor", c.flavor, GA_FLAVOR_KERAS, "GA_FLAVOR_TORCH or GA_FLAVOR_KERAS");
  if (c.scope != GA_CLIP_NONE) check_rate("clip: max_norm", c.max_norm);
  if (!(c.max_value > 0))
    fail(GA_ERROR_INVALID_ARGUMENT, "clip: max_value was %g, expected > 0", c.max_value);
}

Context::Context(const ga_config& config)
    : config_(config), backend_(make_cpu_backend(config)), clip_(default_clip()) {
  window_.set_accum_steps(config.accum_steps);
}

Context::~Context() {
  for (const Arena& a : arenas_) backend_->free(a.data, a.bytes);
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
  const int op = optimizer_info(o.kind, o.flavor).op(o);
  Group g = {o, Schedule(), Clock(), op, op < 0 ? 0 : op_info(op).slots, false, default_clip()};
  for (int64_t s = 0; s < steps_; ++s) g.clock.advance(o);
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
  g.op = optimizer_info(g.optimizer.kind, g.optimizer.flavor).op(g.optimizer);
}

void Context::set_schedule(ga_group id, const ga_schedule* schedule) {
  Group& g = group(id);
  g.schedule = schedule ? Schedule(*schedule) : Schedule();
}

void Context::set_clip(const ga_clip* clip) {
  if (clip) check_clip(*clip);
  clip_ = clip ? *clip : default_clip();
}

void Context::set_group_clip(ga_group id, const ga_clip* clip) {
  Group& g = group(id);
  if (clip) check_clip(*clip);
  g.own_clip = clip != nullptr;
  g.clip = clip ? *clip : default_clip();
}

double Context::lr(ga_group id) const {
  const Group& g = group(id);
  return g.schedule.rate(g.optimizer.lr, steps_);
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

void Context::check_data(const char* tensor, const void* data, int64_t count, ga_param self) const {
  if (count == 0) return;
  if (!data)
    fail(GA_ERROR_INVALID_ARGUMENT, "parameter \"%s\": data was NULL, but it has %lld elements",
         tensor, static_cast<long long>(count));
  const auto address = reinterpret_cast<uintptr_t>(data);
  if (address % sizeof(float) != 0)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "parameter \"%s\": data was at address %p, expected a multiple of its element, %zu bytes",
         tensor, data, sizeof(float));
  const int64_t bytes = count * static_cast<int64_t>(sizeof(float));
  if (static_cast<uintptr_t>(bytes) > UINTPTR_MAX - address)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "parameter \"%s\": its %lld elements at address %p reach past the end of memory", tensor,
         static_cast<long long>(count), data);
  if (const Range* r = overlap(data, bytes, self))
    fail(GA_ERROR_INVALID_ARGUMENT, "parameter \"%s\": its data at %p overlaps %s%s%s", tensor,
         data, r->param < 0 ? "memory of the library" : "parameter \"",
         r->param < 0 ? "" : name(r->param), r->param < 0 ? "" : "\"");
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
    tensors_.resize(old_params);
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
      const int64_t elements = element_count(e, size);
      if (e.offset < 0 || e.offset > INT64_MAX / size - elements)
        fail(GA_ERROR_INVALID_ARGUMENT, "parameter \"%s\": offset was %lld, expected >= 0", e.name,
             static_cast<long long>(e.offset));
      float* const at = data ? static_cast<float*>(data) + e.offset : nullptr;
      check_data(e.name, at, elements, -1);
      tensors_.push_back({e.name, e.rank > 0 ? e.shape[0] : 1});
      names_.insert(e.name);
      Param p = {};
      p.data = at;
      p.count = elements;
      p.offset = e.offset;
      p.group = e.group;
      p.gradient_dtype = gradient_dtype;
      params_.push_back(p);
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
  check_data(name(id), data, p.count, id);
  p.data = static_cast<float*>(data);
  ranges_.erase(
      std::remove_if(ranges_.begin(), ranges_.end(), [&](const Range& r) { return r.param == id; }),
      ranges_.end());
  const auto begin = reinterpret_cast<uintptr_t>(data);
  add_range({begin, begin + static_cast<uintptr_t>(p.count) * sizeof(float), id});
  for (Param& other : params_) other.checked = nullptr;
}

void Context::set_frozen(ga_param id, bool frozen) {
  require_empty("ga_param_set_frozen");
  param(id).frozen = frozen;
}

// ---- Memory
// ----------------------------------------------------------------------------------------

int Context::arrays_of(const Param& p) const {
  return 1 + groups_[static_cast<size_t>(p.group)].slots;
}

// Finds a place for each of a parameter's arrays, behind what l holds. One loop walks them all
// together with the parameter. Where the addresses of two streams are nearly alike in their low 12
// bits, a core takes the load of one for depending on the store to the other (measured: half the
// speed), so the arrays of a large parameter lie 17 cache lines apart within a page, counted from
// it.
void Context::place(const Param& p, Layout& l, size_t (&offset)[kArrays]) const {
  constexpr size_t kPage = 4096, kApart = 17 * kAlign, kLarge = size_t{1} << 20;
  const size_t bytes = align_up(static_cast<size_t>(p.count) * sizeof(float));
  for (int a = 0; a < arrays_of(p); ++a) {
    offset[a] = l.bytes[a];
    if (bytes >= kLarge) {
      const size_t wanted = reinterpret_cast<uintptr_t>(p.data) / kAlign * kAlign +
                            static_cast<size_t>(a + 1) * kApart;
      offset[a] += (wanted - offset[a]) % kPage;
    }
    l.bytes[a] = offset[a] + bytes;
  }
  l.chunks += chunk_count(p.count);
}

Context::Layout Context::layout_of_new() const {
  Layout l;
  size_t offset[kArrays];
  for (size_t i = prepared_; i < params_.size(); ++i) place(params_[i], l, offset);
  return l;
}

ga_memory Context::memory() const {
  const Layout fresh = layout_of_new();
  ga_memory m = {};
  m.accumulators = static_cast<int64_t>(owned_.bytes[0] + fresh.bytes[0]);
  for (int a = 1; a < kArrays; ++a)
    m.optimizer_state += static_cast<int64_t>(owned_.bytes[a] + fresh.bytes[a]);
  const int64_t chunks = owned_.chunks + fresh.chunks;
  m.workspace = chunks * static_cast<int64_t>(sizeof(Partial)) + backend_->table_bytes(chunks) +
                static_cast<int64_t>(params_.size() *
                                     (sizeof(Param) + sizeof(Tensor) + sizeof(AccumulateTask) +
                                      sizeof(NormTask) + sizeof(UpdateTask) + sizeof(FinishTask) +
                                      sizeof(OpBytes) + sizeof(ga_param)));
  m.total = m.accumulators + m.optimizer_state + m.workspace;
  return m;
}

// Gives the parameters added since the last window their arrays. All or nothing.
void Context::prepare() {
  if (prepared_ == params_.size()) return;
  const size_t n = params_.size();
  const Layout fresh = layout_of_new();
  accumulate_tasks_.reserve(n);
  norm_tasks_.reserve(n);
  update_tasks_.reserve(n);
  finish_tasks_.reserve(n);
  folded_.reserve(n);
  touched_.reserve(n);
  backend_->reserve(owned_.chunks + fresh.chunks,
                    static_cast<int64_t>(owned_.bytes[0] + fresh.bytes[0]));

  constexpr int kPartials = kArrays;
  size_t bytes[kArrays + 1];
  std::copy(fresh.bytes, fresh.bytes + kArrays, bytes);
  bytes[kPartials] = static_cast<size_t>(fresh.chunks) * sizeof(Partial);
  char* base[kArrays + 1] = {};
  arenas_.reserve(arenas_.size() + kArrays + 1);
  ranges_.reserve(ranges_.size() + kArrays + 1);
  try {
    for (int a = 0; a <= kPartials; ++a)
      if (bytes[a] > 0) base[a] = static_cast<char*>(backend_->allocate(bytes[a]));
  } catch (const std::bad_alloc&) {
    for (int a = 0; a <= kPartials; ++a) backend_->free(base[a], bytes[a]);
    fail(
        GA_ERROR_OUT_OF_MEMORY,
        "%zu bytes for accumulators and %zu for optimizer state of %zu parameters could not be had",
        bytes[0], bytes[1] + bytes[2] + bytes[3], n - prepared_);
  }
  for (int a = 0; a <= kPartials; ++a) {
    if (!base[a]) continue;
    arenas_.push_back({base[a], bytes[a]});
    const auto begin = reinterpret_cast<uintptr_t>(base[a]);
    add_range({begin, begin + bytes[a], -1});
  }
  auto* partials = reinterpret_cast<Partial*>(base[kPartials]);
  Layout l;
  for (; prepared_ < n; ++prepared_) {
    Param& p = params_[prepared_];
    size_t offset[kArrays] = {};
    place(p, l, offset);
    if (p.count == 0) continue;
    p.accumulator = reinterpret_cast<float*>(base[0] + offset[0]);
    for (int a = 1; a < arrays_of(p); ++a)
      p.state[a - 1] = reinterpret_cast<float*>(base[a] + offset[a]);
    p.partials = partials;
    partials += chunk_count(p.count);
  }
  for (int a = 0; a < kArrays; ++a) owned_.bytes[a] += fresh.bytes[a];
  owned_.chunks += fresh.chunks;
}

}  // namespace ga
