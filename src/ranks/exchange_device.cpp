// SPDX-License-Identifier: Apache-2.0
// The end of a window on a device. Its host knows neither what other ranks bring nor whether the window is
// applied, and does not wait to learn it: every rank exchanges all gradients of all windows, zeros where it
// has none, and the device decides by the ranks' records (ranks.hpp).
#include <algorithm>
#include <string>

#include "batchnorm/batchnorm.hpp"
#include "core/error.hpp"
#include "core/tensor.hpp"
#include "model/table_writer.hpp"
#include "ranks/exchange.hpp"
#include "window/accumulator.hpp"

namespace ga {
namespace {

[[noreturn]] void refuse_capture(const char* why) {
  fail(GA_ERROR_INVALID_STATE, "%s, which is not possible while the stream is being captured", why);
}

}  // namespace

Range Exchange::own_piece(ga_param id) const {
  return parts_.divisions[static_cast<size_t>(id)].measured(rank(), model_.params[id].count);
}

bool Exchange::on_device() const { return model_.config.device != GA_DEVICE_CPU; }

void Exchange::check_options(const Subject& of, const ga_param_options& o) const {
  if (o.rows == GA_ROWS_LAZY && on_device())
    of.fail(GA_ERROR_UNSUPPORTED,
            "rows was GA_ROWS_LAZY, which a context on a device that has a communicator does not "
            "take");
}

void Exchange::check_tensors_of_device() const {
  for (size_t i = 0; i < model_.params.size(); ++i)
    if (has_rows(i) && model_.params.tensor(i).options.rows == GA_ROWS_LAZY)
      model_.params.subject(i).fail(
          GA_ERROR_UNSUPPORTED,
          "gradients of some rows are exchanged between devices as gradients of all rows, which an "
          "optimizer with GA_ROWS_LAZY would take for its own; GA_ROWS_DENSE is supported");
}

// A checksum of what decides how much is exchanged, which changes between windows alone.
uint64_t Exchange::shape_digest() const {
  uint64_t digest = model_.params.size();
  const auto add = [&](uint64_t x) { digest = (digest ^ x) * 0x100000001b3; };
  for (const Param& p : model_.params) add(p.frozen ? 0 : static_cast<uint64_t>(p.count) + 1);
  const Table<BnInput>& layers = model_.tables.layers;
  for (size_t l = 0; l < layers.size(); ++l)
    add(2 * static_cast<uint64_t>(layers[l].channels) + layers[l].frozen);
  return digest;
}

// Throws if the hosts would have to meet while the stream is being captured.
void Exchange::check_capturing(const char* what) const {
  if (!model_.backend->capturing()) return;
  if (!comm_->on_stream())
    refuse_capture((std::string(what) + " are exchanged by way of the host").c_str());
  if (shape_digest() != agreed_on_)
    refuse_capture("the ranks have to agree on parameters or layers that have changed");
}

int64_t Exchange::longest_record() const {
  int64_t most = 0;
  const Table<BnInput>& layers = model_.tables.layers;
  for (size_t l = 0; l < layers.size(); ++l) most = std::max(most, layers[l].channels);
  return BnSweepEnd{0, false}.words(most);
}

// Where the hosts do not meet, a rank cannot know that another one has left out the end of a sweep, or
// discards the window. So each window takes two exchanges for every layer that is not frozen, all of the same
// length. A rank that has made fewer makes the others here: they meet those of the other ranks, whose devices
// see that the records do not fit, and fail the window.
void Exchange::end_open_sweeps() {
  if (!comm_->on_stream()) return;
  const int64_t words = longest_record();
  room_for_records(words);  // which may fail, and then can be tried again
  for (int64_t left = stages_.layers.close_sweeps(); left > 0; --left)
    exchange_records({}, {-1, false}, words);
}

bool Exchange::hold_all(bool discards) {
  comm_->check();
  moved_ = begun_;
  const bool due = is_check_due();
  if (!discards) check_tensors();
  stages_.writer.write_checksum();
  const uint64_t digest = shape_digest();
  check_capturing("gradients");
  if (due && model_.backend->capturing())
    refuse_capture("the ranks compare parameters and state (ga_comm_options.check_every)");
  // Over a transport that makes the host wait, the ranks ask each other every time, before anything moves.
  if (digest != agreed_on_ || !comm_->on_stream()) {
    gather_headers(header(discards ? kDiscard : kBegin, "ga_step"), {});
    check_calls("ga_step");
    for (int32_t q = 0; q < comm_->ranks(); ++q)
      if (header_of(q).call == kDiscard) return false;
    check_settings();
    share_arrays("ga_step");
    agreed_on_ = digest;
  }
  end_open_sweeps();
  if (due) check_state();

  if (!begun_) begin_on_device();
  begun_ = false;
  for (size_t i = 0; i < touched_.size(); ++i) {
    if (!touched_[i]) continue;
    Param& p = model_.params[i];
    const auto id = static_cast<ga_param>(i);
    stages_.accumulator.make_dense(id);
    brought_[i] = p.held() != Held::kNothing;
    p.hold(Held::kReduced);
    p.reduced = reduced_range(id).count > 0 ? reduced(id).data : nullptr;
    p.window.stale = true;  // its partials are those of what this rank has brought
  }
  return true;
}

// Sends which parameters this rank has a gradient of, if that is new; a graph sends it with every replay,
// and may have been replayed since.
const uint64_t* Exchange::send_brought() {
  Backend& backend = *model_.backend;
  std::vector<uint64_t> bits((brought_.size() + 63) / 64 + 1, 0);
  for (size_t i = 0; i < brought_.size(); ++i)
    bits[i / 64] |= static_cast<uint64_t>(brought_[i] != 0) << (i % 64);
  const size_t bytes = bits.size() * sizeof(uint64_t);
  captured_ = captured_ || backend.capturing();
  if (device_bits_.bytes() < bytes)
    device_bits_ = Buffer(backend, bytes);
  else if (bits == brought_bits_ && !captured_)
    return static_cast<uint64_t*>(device_bits_.data());
  brought_bits_ = bits;
  backend.write(device_bits_.data(), bits.data(), bytes);
  return static_cast<uint64_t*>(device_bits_.data());
}

// On a second stream, in the order that is the same on every rank; what is not ready yet, ga_step exchanges.
void Exchange::release_on_device() {
  if (!begun_) {
    if (is_check_due() || shape_digest() != agreed_on_) return;  // ga_step asks all ranks first
    begin_on_device();
    begun_ = true;
  }
  model_.backend->device()->aside([&] {
    while (released_ < buckets_.list().size() && is_ready(buckets_.list()[released_]))
      released_ = run(released_);
  });
}

// Makes the buckets of a window.
void Exchange::begin_on_device() {
  touched_.assign(model_.tables.params(), 0);
  brought_.assign(model_.tables.params(), 0);
  for (size_t i = 0; i < touched_.size(); ++i) {
    const Param& p = model_.params[i];
    touched_[i] = !p.frozen && p.owns;
  }
  make_buckets([&](ga_param id) {
    const auto i = static_cast<size_t>(id);
    return i < touched_.size() && touched_[i] != 0;
  });
  released_ = 0;
  moved_ = true;
}

void Exchange::put_sums(const WindowTotals& totals, Params measured, Params units) {
  Backend& backend = *model_.backend;
  DeviceWork& device = *backend.device();
  const auto ranks = static_cast<size_t>(comm_->ranks());
  int64_t channels = 0;
  const Table<BnInput>& layers = model_.tables.layers;
  for (size_t l = 0; l < layers.size(); ++l) channels += layers[l].channels;
  const int64_t words = record_words(static_cast<int64_t>(model_.tables.params()), channels);
  double* const own = room_for_records(words);
  double* const all = own + words;

  device.sum_rank(totals, send_brought(), own);
  const auto run_rest = [&] {
    while (released_ < buckets_.list().size()) released_ = run(released_);
  };
  if (released_ > 0) {  // behind those that have gone before, with which they share buffers
    device.aside(run_rest);
    device.join_aside();
  } else {
    run_rest();
  }
  comm_->all_gather_arrays("what each rank brings", own, all, words, words, GA_F64);
  device.add_ranks(all, words, comm_->ranks());

  norms_.clear();
  for (size_t m = 0; m < measured.size; ++m) {
    const ga_param id = measured.data[m];
    const auto i = static_cast<size_t>(id);
    const Param& p = model_.params[id];
    const Range own = own_piece(id);
    if (own.count == 0) continue;
    NormTask task = {};
    task.gradient = identity({offset(reduced(id), own.first).data, p.real(), 1, nullptr});
    if (model_.tables.param_inputs[i].clamped)
      task.gradient.numbers = &model_.tables.plans.at(i)->raw;  // see add_ranks()
    task.f64 = p.f64;
    task.count = own.count;
    task.partials = p.partials;
    norms_.push_back(task);
  }
  backend.norm({norms_.data(), norms_.size()});
  backend.clip_units(units);
  const int64_t numbers = kPieceWords * static_cast<int64_t>(model_.tables.params());
  if (numbers == 0) return;
  const size_t size = (ranks + 1) * static_cast<size_t>(numbers) * sizeof(double);
  if (pieces_.bytes() < size) pieces_ = Buffer(backend, size);
  auto* const sums = static_cast<double*>(pieces_.data());
  device.sum_pieces(sums);
  comm_->all_gather_arrays("norms", sums, sums + numbers, numbers, numbers, GA_F64);
  device.add_pieces(sums + numbers, comm_->ranks());
}

}  // namespace ga
