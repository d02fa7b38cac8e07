// SPDX-License-Identifier: Apache-2.0
// Moving averages of the parameters. The pass that updates a parameter moves its average too.
#include <algorithm>

#include "context/context.hpp"
#include "core/error.hpp"
#include "core/tensor.hpp"
#include "ranks/exchange.hpp"

namespace ga {
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

void Context::set_ema(const ga_ema* ema) {
  if (prepared_ > 0)
    fail(GA_ERROR_INVALID_STATE,
         "ga_context_set_ema was called after the library has made its arrays (in ga_prepare, for "
         "state by name, or with the first contribution to a window); it is legal only before");
  if (ema) {
    check_ema(*ema);
    for (size_t i = 0; i < params_.size(); ++i)
      if (ema->dtype == GA_BF16 && params_[i].f64 && !params_.tensor(i).removed)
        params_.subject(i).fail(GA_ERROR_UNSUPPORTED,
                                "its dtype is f64, but the dtype of the EMA is bf16");
    ema_ = *ema;
  } else {
    ema_.reset();
  }
  tell_settings();
}

void Context::check_ema_kept(const char* what) const {
  if (!ema_)
    fail(GA_ERROR_INVALID_STATE,
         "%s: the context keeps no EMA; ga_context_set_ema makes it keep one", what);
}

// Whether a parameter and its average change places as they are; else the parameter is overwritten.
bool Context::swaps_in_place(const Param& p) const {
  return p.dtype == arrays_.average_of(p).format;
}

void Context::ema_copy_to(ga_param id, void* out, int32_t dtype) {
  const Param& p = params_.get(id);
  check_ema_kept("ga_ema_copy_to");
  check_not_in_place("ga_ema_copy_to");
  const DtypeInfo info = dtype_info(dtype);
  if (!info.floating)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "ga_ema_copy_to: dtype was %d, expected GA_F32, GA_F64, GA_F16 or GA_BF16", dtype);
  if (p.count == 0) return;
  if (!out) fail(GA_ERROR_INVALID_ARGUMENT, "ga_ema_copy_to: out was NULL");
  check_values(id, "out", out, p.count, info.size);
  begin_piece(id, "ga_ema_copy_to", "ema");
  if (!ema_swapped_) follow_data(id);
  const bool averaged = param_state(static_cast<size_t>(id)).averaged;
  const bool elsewhere = averaged && ema_swapped_ && swaps_in_place(p);
  const Array from = elsewhere ? p.shared_data() : averaged ? arrays_.average_of(p) : p.current();
  arrays_.reserve(std::max(arrays_.chunks(), chunk_count(p.count)), params_.size());
  if (!shards()) return arrays_.copy(p, from, {out, dtype}, p.count);
  const int64_t size = dtype_info(from.format).size;
  auto* to = static_cast<char*>(out);
  Buffer there;  // of a piece, on a device
  each_piece(id, from, p.count, [&](const void* piece, size_t bytes) {
    const int64_t count = static_cast<int64_t>(bytes) / size;
    if (config_.device != GA_DEVICE_CPU) {
      if (there.bytes() < bytes) there = Buffer(*backend_, bytes);
      backend_->write(there.data(), piece, bytes);
      piece = there.data();
    }
    arrays_.copy(p, {const_cast<void*>(piece), from.format}, {to, dtype}, count);
    to += count * info.size;
  });
}

// Allocates all that it needs before it changes anything. Where the optimizer is sharded, each rank
// exchanges its share, and then the parameters are gathered.
void Context::ema_swap(bool on) {
  window_.check_empty("ga_ema_swap");
  check_ema_kept("ga_ema_swap");
  check_no_capture("ga_ema_swap");
  if (shards()) {
    const char* const call = on ? "ga_ema_swap to the EMA" : "ga_ema_swap back";
    exchange_->begin_call(call);
    exchange_->check_empty(call);
  }
  if (on == ema_swapped_) return;
  constexpr size_t kLine = 64, kPiece = size_t{4} << 20;
  const std::vector<ParamState> states = param_states();
  size_t kept = 0, piece = 0;
  const auto each = [&](auto&& f) {
    for (size_t i = 0; i < prepared_; ++i)
      if (const Param& p = params_[i]; p.average && states[i].averaged) f(p);
  };
  const auto share_bytes = [](const Param& p) {
    return static_cast<size_t>(p.share.count * dtype_info(p.dtype).size);
  };
  each([&](const Param& p) {
    if (swaps_in_place(p))
      piece = std::max(piece, std::min(share_bytes(p), kPiece));
    else
      kept += (share_bytes(p) + kLine - 1) / kLine * kLine;
  });
  Buffer copies, scratch;
  if (on && kept > 0) copies = Buffer(*backend_, kept);
  if (piece > 0) scratch = Buffer(*backend_, piece);
  if (on) ema_kept_.swap(copies);

  or_break([&] {
    char* original = static_cast<char*>(ema_kept_.data());
    each([&](const Param& p) {
      const size_t bytes = share_bytes(p);
      char* const shared = static_cast<char*>(p.shared_data().data);
      if (swaps_in_place(p)) {
        for (size_t at = 0; at < bytes; at += piece) {
          const size_t size = std::min(piece, bytes - at);
          char* const data = shared + at;
          char* const average = static_cast<char*>(p.average) + at;
          backend_->copy(scratch.data(), data, size);
          backend_->copy(data, average, size);
          backend_->copy(average, scratch.data(), size);
        }
        return;
      }
      if (on) {
        backend_->copy(original, shared, bytes);
        arrays_.copy(p, arrays_.average_of(p), {shared, p.dtype}, p.share.count);
      } else {
        backend_->copy(shared, original, bytes);
      }
      original += (bytes + kLine - 1) / kLine * kLine;
    });
  });
  const auto changed = [&](ga_param id) {
    const auto i = static_cast<size_t>(id);
    return i < prepared_ && params_[i].owns && states[i].averaged ? Exchange::Changed::kElements
                                                                  : Exchange::Changed::kNothing;
  };
  if (shards()) or_end([&] { exchange_->gather_parameters(changed); });
  ema_swapped_ = on;
  if (!on) ema_kept_ = Buffer();
}

}  // namespace ga
