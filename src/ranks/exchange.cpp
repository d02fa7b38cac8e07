// SPDX-License-Identifier: Apache-2.0
#include "ranks/exchange.hpp"

#include <algorithm>
#include <cstring>
#include <optional>

#include "batchnorm/batchnorm.hpp"
#include "core/error.hpp"
#include "files/fields.hpp"
#include "model/preparation.hpp"

namespace ga {
namespace {

// With an adder, which the transport has.
ga_comm_options chosen(ga_comm_options options, const Comm& comm) {
  if (options.adder == GA_COMM_ADDER_AUTO)
    options.adder =
        options.wire == GA_COMM_WIRE_EXACT ? comm.default_adder() : int32_t{GA_COMM_ADDER_LIBRARY};
  if (options.adder == GA_COMM_ADDER_TRANSPORT && !comm.adds())
    fail(
        GA_ERROR_UNSUPPORTED,
        "adder was GA_COMM_ADDER_TRANSPORT, but this communicator adds nothing up: MPI does, and a "
        "ga_comm_table with all_reduce and reduce_scatter");
  return options;
}

}  // namespace

Exchange::Exchange(const Stages& stages, RankState& state, std::shared_ptr<Comm> comm,
                   const ga_comm_options& options)
    : Agreement(std::move(comm)),
      stages_(stages),
      model_(stages.model),
      state_(state),
      options_(chosen(options, *comm_)),
      divisions_(model_, *comm_, options_.shard == GA_SHARD_OPTIMIZER),
      transfer_(model_, *comm_, divisions_, options_, [this](ga_param id) { return brings(id); }) {
  comm_->take(model_.config.device == GA_DEVICE_CPU ? nullptr : model_.backend.get(),
              model_.config.device_ordinal);
}

Exchange::~Exchange() { comm_->give_back(); }

int64_t Exchange::bytes() const {
  return transfer_.bytes() +
         static_cast<int64_t>(records_.bytes() +
                              (sent_.capacity() + gathered_.capacity() + payloads_.capacity()) *
                                  sizeof(uint64_t));
}

void Exchange::prepare_release() {
  if (overlaps()) stages_.preparation.prepare();
}

// What layers exchange comes first: all ranks make these calls together, so that all go on in one order.
void Exchange::release_ready() {
  or_lose_window([this] {
    if (!has_failed() && !stages_.layers.awaits_sums()) run_ready();
  });
}

bool Exchange::is_ready(const Bucket& bucket) const {
  for (size_t k = bucket.first; k < bucket.end; ++k) {
    const Param& p = model_.params[transfer_.buckets().segments()[k].param];
    if (!p.window.ready || p.held() == Held::kRows) return false;
  }
  return true;
}

// ---- What every collective call begins with -----------------------------------------------------

Exchange::Header Exchange::header(Call call, const char* function) {
  Header h = {};
  h.call = call;
  h.number = calls_;
  h.name = call == kDiscard ? digest_of("ga_step") : digest_of(function);
  h.arrays = arrays_digest();
  h.params = static_cast<int64_t>(model_.params.size());
  h.next_key = model_.params.next_key();
  h.open = !model_.window.empty() || stages_.layers.has_statistics();
  if (call == kDiscard) return h;
  check_tensors();
  h.settings = settings_digest();
  return h;
}

// Gathers the headers of all ranks, with a payload of as many words on each: behind the header once all
// ranks have agreed on their number, else by a second exchange, which is made where that number is new.
void Exchange::gather_headers(const Header& own, const std::vector<uint64_t>& payload) {
  const auto ranks = static_cast<size_t>(comm_->ranks());
  const size_t words = static_cast<size_t>(kHeaderWords) + capacity_;
  sent_.assign(words, 0);
  gathered_.resize(ranks * words);
  std::memcpy(sent_.data(), &own, sizeof own);
  const bool fits = payload.size() <= capacity_;
  if (fits) std::copy(payload.begin(), payload.end(), sent_.begin() + kHeaderWords);
  comm_->all_gather("what each rank is about to do", sent_.data(), gathered_.data(),
                    static_cast<int64_t>(words), GA_I64);
  ++calls_;
  payload_words_ = payload.size();
}

const Exchange::Header& Exchange::header_of(int32_t rank) const {
  const size_t words = static_cast<size_t>(kHeaderWords) + capacity_;
  return *reinterpret_cast<const Header*>(&gathered_[static_cast<size_t>(rank) * words]);
}

const uint64_t* Exchange::payload_of(int32_t rank) const {
  const auto r = static_cast<size_t>(rank);
  if (!payloads_.empty()) return &payloads_[r * payload_words_];
  return &gathered_[r * (static_cast<size_t>(kHeaderWords) + capacity_) + kHeaderWords];
}

// Throws on every rank, since all compare the same headers, if one of them makes another call. The reason
// may be a layer that is frozen on one rank alone, so a difference of the settings is named first.
void Exchange::check_calls(const char* function) {
  bool comparable = true;
  for (int32_t q = 0; q < comm_->ranks(); ++q)
    comparable = comparable && header_of(q).call != kDiscard;
  const Header& first = header_of(0);
  for (int32_t q = 1; q < comm_->ranks(); ++q) {
    const Header& other = header_of(q);
    if (other.name == first.name && other.number == first.number) continue;
    if (comparable) check_settings();
    fail_call(function, q);
  }
}

void Exchange::begin_call(const char* what) {
  comm_->check();
  if (begun_)
    fail(
        GA_ERROR_INVALID_STATE,
        "%s was called while gradients are being exchanged, as ga_params_ready allowed; ga_step or "
        "ga_discard ends the window first",
        what);
  Header own = header(kOther, what);
  own.dropped = own_dropped_micros();
  gather_headers(own, {});
  check_calls(what);
  check_settings();
  share_arrays(what);
}

// Of the last window, for which a device is waited for, as for the headers that are gathered next.
uint64_t Exchange::own_dropped_micros() const {
  Backend& backend = *model_.backend;
  ga_step_result last = {};
  if (!backend.capturing() && model_.progress.control().windows > 0) backend.result(0, true, last);
  return last.dropped_micros;
}

std::vector<uint64_t> Exchange::dropped_micros() const {
  std::vector<uint64_t> of_ranks;
  for (int32_t q = 0; q < comm_->ranks(); ++q) of_ranks.push_back(header_of(q).dropped);
  return of_ranks;
}

bool Exchange::has_open_window() const {
  for (int32_t q = 0; q < comm_->ranks(); ++q)
    if (header_of(q).open != 0) return true;
  return false;
}

void Exchange::check_empty(const char* what) const {
  for (int32_t q = 0; q < comm_->ranks(); ++q)
    if (header_of(q).open != 0)
      fail(GA_ERROR_INVALID_STATE,
           "%s was called while the window of rank %d is not empty; it is legal only between "
           "windows",
           what, q);
}

void Exchange::end_pass(const Subject& of, const BnTask& task, const BnPassEnd& end,
                        int64_t micro_batches, const std::function<void()>& ready) {
  comm_->check();
  const bool queues = comm_->on_stream();
  const int64_t words = queues ? longest_record() : end.words(task.channels);
  const auto all_ready = [&] {
    if (!queues) check_capturing("statistics");
    model_.window.check_valid();
    ready();
    room_for_records(words);
  };
  if (queues) check_capturing("statistics");
  if (const uint64_t digest = shape_digest(); !queues || digest != agreed_on_) {
    agree_on_pass(of, micro_batches, all_ready);
    agreed_on_ = digest;
  } else {
    all_ready();
  }
  exchange_records(task, end, words);
}

// Asks all ranks what they are about to do; see end_pass().
void Exchange::agree_on_pass(const Subject& of, int64_t micro_batches,
                             const std::function<void()>& ready) {
  const std::string what = std::string(of.function) + " of layer \"" + of.name + "\"";
  const std::optional<Error> failure = failure_of(ready);
  Header own = header(kOther, what.c_str());
  own.failed = failure.has_value();
  own.sums.micro_batches = static_cast<double>(micro_batches);
  gather_headers(own, {});
  check_calls(what.c_str());
  check_settings();
  double all = 0;
  bool failed = false;
  for (int32_t q = 0; q < comm_->ranks(); ++q) {
    all += header_of(q).sums.micro_batches;
    failed = failed || header_of(q).failed != 0;
  }
  if (failed) vote(what.c_str(), failure ? &*failure : nullptr);
  if (failure) throw *failure;
  if (!comm_->on_stream() && !(all > 0))
    of.fail(GA_ERROR_INVALID_STATE,
            "it has no statistics on any rank; ga_bn_accumulate brings them");
}

int64_t Exchange::longest_record() const {
  int64_t most = 0;
  const Table<BnInput>& layers = model_.tables.layers;
  for (size_t l = 0; l < layers.size(); ++l) most = std::max(most, layers[l].channels);
  return BnPassEnd{0, false}.words(most);
}

uint64_t Exchange::shape_digest() const {
  uint64_t digest = model_.params.size();
  const auto add = [&](uint64_t x) { digest = (digest ^ x) * 0x100000001b3; };
  for (const Param& p : model_.params) add(p.frozen ? 0 : static_cast<uint64_t>(p.count) + 1);
  const Table<BnInput>& layers = model_.tables.layers;
  for (size_t l = 0; l < layers.size(); ++l)
    add(2 * static_cast<uint64_t>(layers[l].channels) + layers[l].frozen);
  return digest;
}

void Exchange::refuse_capture(const char* why) {
  fail(GA_ERROR_INVALID_STATE, "%s, which is not possible while the stream is being captured", why);
}

void Exchange::check_capturing(const char* what) const {
  if (!model_.backend->capturing()) return;
  if (!comm_->on_stream())
    refuse_capture((std::string(what) + " are exchanged by way of the host").c_str());
  if (shape_digest() != agreed_on_)
    refuse_capture("the ranks have to agree on parameters or layers that have changed");
}

// For this rank's record and those of all ranks, of so many words each.
double* Exchange::room_for_records(int64_t words) {
  const size_t bytes =
      (static_cast<size_t>(comm_->ranks()) + 1) * static_cast<size_t>(words) * sizeof(double);
  if (records_.bytes() < bytes) records_ = Buffer(*model_.backend, bytes);
  return static_cast<double*>(records_.data());
}

void Exchange::exchange_records(const BnTask& task, const BnPassEnd& end, int64_t words) {
  Backend& backend = *model_.backend;
  double* const own = room_for_records(words);
  double* const all = own + words;
  backend.bn_write_record(task, end, own);
  comm_->all_gather_arrays(
      end.backward ? "backward sums of batch normalisation" : "statistics of batch normalisation",
      own, all, words, words, GA_F64);
  model_.window.or_invalidate([&] {
    backend.bn_merge_records(task, end, {all, words, comm_->ranks()});
  });
}

// ---- Settings -----------------------------------------------------------------------------------

// Of parameters and layers, and their shapes.
Exchange::Items Exchange::tensor_items() const {
  Items items;
  for (size_t i = 0; i < model_.params.size(); ++i) {
    const Param& p = model_.params[i];
    const Tensor& t = model_.params.tensor(i);
    if (t.removed) {
      items.emplace_back("removed parameter " + std::to_string(i), "");
      continue;
    }
    Fields f;
    f.add("dtype", int32_t{p.dtype});
    f.add("gradient_dtype", int32_t{p.gradient_dtype});
    f.add("rank", static_cast<int64_t>(t.shape.size()));
    for (size_t d = 0; d < t.shape.size(); ++d)
      f.add(("dimension_" + std::to_string(d)).c_str(), t.shape[d]);
    f.add("piece", divisions_.of(i).piece);
    f.add("owner", divisions_.of(i).owner);
    f.add("follow_data", t.options.follow_data);
    items.emplace_back("parameter " + std::string(t.name), f.text());
  }
  for (ga_bn id = 0; id < stages_.layers.count(); ++id) {
    const ga_bn_info layer = stages_.layers.info(id);
    Fields f;
    f.add("channels", layer.channels);
    f.add("gamma", layer.gamma);
    f.add("beta", layer.beta);
    items.emplace_back("layer " + std::string(layer.name), f.text());
  }
  // The keys of random bits are state, which rank 0 may have yet to hand out (RankState::items).
  for (const auto& [key, fields] : state_.settings_of_tensors())
    items.emplace_back(key, fields.text());
  return items;
}

Exchange::Items Exchange::settings_items() const {
  Items items = context_items(options_, state_);
  for (auto& item : tensor_items()) items.push_back(std::move(item));
  return items;
}

void Exchange::check_settings() {
  for (int32_t q = 1; q < comm_->ranks(); ++q)
    if (header_of(q).settings != header_of(0).settings) explain("the settings", settings_items());
}

uint64_t Exchange::tensors_digest() {
  if (!tensors_known_ || divisions_known_ != divisions_.changes()) {
    divide();
    tensors_ = digest_of(tensor_items());
    tensors_known_ = true;
    divisions_known_ = divisions_.changes();
  }
  return tensors_;
}

uint64_t Exchange::settings_digest() {
  const uint64_t tensors = tensors_digest();
  if (!settings_known_) {
    settings_ = digest_of(context_items(options_, state_));
    settings_known_ = true;
  }
  return settings_ * 31 + tensors;
}

uint64_t Exchange::arrays_digest() const {
  uint64_t digest = model_.params.size();
  for (const Param& p : model_.params) digest = (digest ^ p.owns) * 0x100000001b3;
  return digest;
}

// ---- ga_context_set_comm ------------------------------------------------------------------------

void Exchange::agree() {
  comm_->check();
  const Header own = header(kSetComm, "ga_context_set_comm");
  comm_->attend();
  gather_headers(own, {});
  check_calls("ga_context_set_comm");
  check_settings();
  for (int32_t q = 0; q < comm_->ranks();
       ++q)  // so that parameters to come get the same on all ranks
    model_.params.set_next_key(
        std::max(model_.params.next_key(), static_cast<int32_t>(header_of(q).next_key)));
  if (!shards()) stages_.preparation.make_own();
  share_arrays("ga_context_set_comm");
  if (options_.hand_out != 0) hand_out();
  check_state();
}

bool Exchange::is_check_due() const {
  return options_.check_every > 0 && model_.progress.windows() % options_.check_every == 0;
}

}  // namespace ga
