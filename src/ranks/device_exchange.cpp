// SPDX-License-Identifier: Apache-2.0
#include "ranks/device_exchange.hpp"

#include "batchnorm/batchnorm.hpp"
#include "core/error.hpp"
#include "core/tensor.hpp"
#include "model/table_writer.hpp"
#include "ranks/bits.hpp"
#include "ranks/comm/comm.hpp"
#include "window/accumulator.hpp"

namespace ga {

DeviceExchange::~DeviceExchange() {
  keep_late_memory();
  if (!comm_->on_stream()) return;
  try {
    if (begun_) model_.backend->device()->join_aside();
    model_.backend->wait();  // while somebody watches
  } catch (const Error&) {   // the context has it
  }
  watch(false);
}

void DeviceExchange::agree() {
  Exchange::agree();
  agreed_on_ = shape_digest();
  if (overlaps()) model_.backend->device()->aside([] {});  // makes the second stream
}

void DeviceExchange::watch(bool on) {
  if (on && comm_->on_stream()) {
    model_.backend->device()->set_watch(
        [comm = comm_.get()](double seconds) { comm->watch(seconds); });
    watching_ = true;
  } else if (watching_) {
    model_.backend->device()->set_watch({});
    watching_ = false;
  }
}

int64_t DeviceExchange::bytes() const {
  return Exchange::bytes() + static_cast<int64_t>(device_bits_.bytes() + pieces_.bytes());
}

void DeviceExchange::check_options(const Subject& of, const ga_param_options& o) const {
  if (o.rows == GA_ROWS_LAZY)
    of.fail(GA_ERROR_UNSUPPORTED,
            "rows was GA_ROWS_LAZY, which a context on a device that has a communicator does not "
            "take");
}

void DeviceExchange::check_tensors() const {
  for (size_t i = 0; i < model_.params.size(); ++i)
    if (model_.params.takes_rows(i) && model_.params.tensor(i).options.rows == GA_ROWS_LAZY)
      model_.params.subject(i).fail(
          GA_ERROR_UNSUPPORTED,
          "gradients of some rows are exchanged between devices as gradients of all rows, which an "
          "optimizer with GA_ROWS_LAZY would take for its own; GA_ROWS_DENSE is supported");
}

void DeviceExchange::check_queued() {
  model_.health.or_end([this] {
    if (comm_->on_stream() && !has_failed()) comm_->watch(0);
  });
}

bool DeviceExchange::brings(ga_param id) const {
  const Held held = model_.params[id].held();
  return held == Held::kReduced ? brought_[static_cast<size_t>(id)] != 0 : held != Held::kNothing;
}

bool DeviceExchange::begin_end(WindowTotals&, bool discards) {
  check_queued();
  bool goes_on = false;
  or_lose_window([&] { goes_on = hold_all(discards); });
  return goes_on;
}

StepSums DeviceExchange::reduce(const WindowTotals& totals, Params units,
                                const WriteWindow& write) {
  StepSums sums = write();
  model_.health.or_break([&] { or_lose_window([&] { put_sums(totals, sums.norms, units); }); });
  sums.norms = {};
  return sums;
}

bool DeviceExchange::hold_all(bool discards) {
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
  end_open_passes();
  if (due) check_state();

  if (!begun_) begin_window();
  begun_ = false;
  for (size_t i = 0; i < touched_.size(); ++i) {
    if (!touched_[i]) continue;
    Param& p = model_.params[i];
    const auto id = static_cast<ga_param>(i);
    stages_.accumulator.make_dense(id);
    brought_[i] = p.held() != Held::kNothing;
    p.hold(Held::kReduced);
    p.reduced = divisions_.reduced_range(id).count > 0 ? transfer_.reduced(id).data : nullptr;
    p.window.stale = true;  // its partials are those of what this rank has brought
  }
  return true;
}

// Sends which parameters this rank has a gradient of, if that is new; a graph sends it with every replay,
// and may have been replayed since.
const uint64_t* DeviceExchange::send_brought() {
  Backend& backend = *model_.backend;
  std::vector<uint64_t> bits(words_for_bits(brought_.size()) + 1, 0);
  for (size_t i = 0; i < brought_.size(); ++i)
    if (brought_[i]) set_bit(bits.data(), i);
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
void DeviceExchange::run_ready() {
  if (!overlaps()) return;
  if (!begun_) {
    if (is_check_due() || shape_digest() != agreed_on_) return;  // ga_step asks all ranks first
    begin_window();
    begun_ = true;
  }
  const std::vector<Bucket>& list = transfer_.buckets().list();
  model_.backend->device()->aside([&] {
    while (released_ < list.size() && is_ready(list[released_])) released_ = run(released_);
  });
}

// Makes the buckets of a window, and room for what is measured.
void DeviceExchange::begin_window() {
  touched_.assign(model_.tables.params(), 0);
  brought_.assign(model_.tables.params(), 0);
  for (size_t i = 0; i < touched_.size(); ++i) {
    const Param& p = model_.params[i];
    touched_[i] = !p.frozen && p.owns;
  }
  transfer_.make_buckets([&](ga_param id) {
    const auto i = static_cast<size_t>(id);
    return i < touched_.size() && touched_[i] != 0;
  });
  norms_.reserve(touched_.size());
  released_ = 0;
  moved_ = true;
}

// Where the hosts do not meet, a rank cannot know that another one has left out the end of a pass, or
// discards the window. So each window takes two exchanges for every layer that is not frozen, all of the same
// length. A rank that has made fewer makes the others here: they meet those of the other ranks, whose devices
// see that the records do not fit, and fail the window.
void DeviceExchange::end_open_passes() {
  if (!comm_->on_stream()) return;
  const int64_t words = longest_record();
  room_for_records(words);  // which may fail, and then can be tried again
  for (int64_t left = stages_.layers.close_passes(); left > 0; --left)
    exchange_records({}, {-1, false}, words);
}

void DeviceExchange::put_sums(const WindowTotals& totals, Params measured, Params units) {
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
    while (released_ < transfer_.buckets().list().size()) released_ = run(released_);
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
    const Range own = divisions_.measured(id);
    if (own.count == 0) continue;
    NormTask task = {};
    task.gradient = identity({offset(transfer_.reduced(id), own.first).data, p.real(), 1, nullptr});
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
