// SPDX-License-Identifier: Apache-2.0
#include "ranks/exchange.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <optional>

#include "batchnorm/batchnorm.hpp"
#include "core/error.hpp"
#include "core/fp_mode.hpp"
#include "files/fields.hpp"
#include "files/state_file.hpp"
#include "model/preparation.hpp"
#include "ranks/bits.hpp"

namespace ga {
namespace {

uint64_t hash_of(const std::string& text) {
  Checksum sum;
  sum.add(text.data(), text.size());
  return sum.value();
}

// The owner of an item, for a message: parameter "w" of both "parameter w" (what it is) and "parameter.w" (its
// settings). other: the key in the same place on another rank. Items of what parameters are come first, so
// where only one of two is of that, the other rank's list of them has ended.
std::string text_of_item(std::string_view key, std::string_view other) {
  const auto owner_in = [](std::string_view k, char separator) {
    for (const std::string_view kind : {"parameter", "layer"})
      if (begins_with(k, kind) && k.size() > kind.size() && k[kind.size()] == separator)
        return kind;
    return std::string_view();
  };
  const std::string_view owner = owner_in(key, ' ');
  if (key.empty() || (owner.empty() && !owner_in(other, ' ').empty())) return "none";
  const std::string_view kind = owner.empty() ? owner_in(key, '.') : owner;
  if (kind.empty()) return '"' + std::string(key) + '"';
  return std::string(kind) + " \"" + std::string(key.substr(kind.size() + 1)) + '"';
}

// A line for each key and one for its text.
std::string text_of(const std::vector<std::pair<std::string, std::string>>& items) {
  std::string text;
  for (const auto& [key, value] : items) text += key + "\n" + value + "\n";
  return text;
}

}  // namespace

Exchange::Exchange(const Stages& stages, RankState& state, std::shared_ptr<Comm> comm,
                   const ga_comm_options& options)
    : stages_(stages),
      model_(stages.model),
      state_(state),
      comm_(std::move(comm)),
      options_(options),
      buckets_(comm_->ranks()),
      adder_(model_.backend.get()) {
  if (options_.adder == GA_COMM_ADDER_AUTO)
    options_.adder = options_.wire == GA_COMM_WIRE_EXACT ? comm_->default_adder()
                                                         : int32_t{GA_COMM_ADDER_LIBRARY};
  if (options_.adder == GA_COMM_ADDER_TRANSPORT && !comm_->adds())
    fail(
        GA_ERROR_UNSUPPORTED,
        "adder was GA_COMM_ADDER_TRANSPORT, but this communicator adds nothing up: MPI does, and a "
        "ga_comm_table with all_reduce and reduce_scatter");
  if (overlaps() && !on_device() && comm_->any_thread()) {
    ga_config config = model_.config;
    config.num_threads = 1;
    config.parallel_for = nullptr;
    own_backend_ = make_cpu_backend(config);
    background_ = std::make_unique<Background>([this](size_t item) {
      const FpMode mode;
      run_item(item, *own_backend_);
    });
  }
  comm_->take(on_device() ? model_.backend.get() : nullptr, model_.config.device_ordinal);
  model_.params.sharded = shards();
  model_.params.whole_layers = on_device();
}

Exchange::~Exchange() {
  // Also where agree() has failed: an exchange that was given up may go on.
  if (may_write_late()) model_.backend->keep_memory();
  if (background_ && background_->close()) comm_->abort();
  background_.reset();
  if (comm_->on_stream()) {
    try {
      if (begun_) model_.backend->device()->join_aside();
      model_.backend->wait();  // while somebody watches
    } catch (const Error&) {   // the context has it
    }
    watch(false);
  }
  comm_->give_back();
}

void Exchange::watch(bool on) {
  if (on && comm_->on_stream()) {
    model_.backend->device()->set_watch(
        [comm = comm_.get()](double seconds) { comm->watch(seconds); });
    watching_ = true;
  } else if (watching_) {
    model_.backend->device()->set_watch({});
    watching_ = false;
  }
}

int64_t Exchange::bytes() const {
  size_t bytes =
      room_.bytes() + device_bits_.bytes() + records_.bytes() + pieces_.bytes() +
      device_partials_.bytes() + device_pairs_.bytes() +
      (sent_.capacity() + gathered_.capacity() + payloads_.capacity()) * sizeof(uint64_t);
  for (const Buffer& wide : wide_) bytes += wide.bytes();
  return static_cast<int64_t>(bytes);
}

// ---- What every collective call begins with -----------------------------------------------------

Exchange::Header Exchange::header(Call call, const char* function) {
  Header h = {};
  h.call = call;
  h.number = calls_;
  h.name = call == kDiscard ? hash_of("ga_step") : hash_of(function);
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
    fail(GA_ERROR_COMMUNICATION,
         "%s: rank %d makes another call than rank 0 does: all ranks make the same collective "
         "calls in "
         "the same order; this one is rank %d",
         function, q, rank());
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

void Exchange::vote(const char* what, const Error* failure) {
  constexpr size_t kWords = 64;
  struct Ballot {
    int64_t status;
    char text[(kWords - 1) * sizeof(uint64_t)];
  };
  static_assert(sizeof(Ballot) == kWords * sizeof(uint64_t));
  Ballot own = {};
  if (failure) {
    own.status = failure->status();
    std::snprintf(own.text, sizeof own.text, "%.500s", failure->what());
  }
  std::vector<Ballot> all(static_cast<size_t>(comm_->ranks()));
  comm_->all_gather("whether the call has failed", &own, all.data(), kWords, GA_I64);
  if (failure) return;
  for (size_t q = 0; q < all.size(); ++q)
    if (all[q].status != GA_OK)
      fail(GA_ERROR_COMMUNICATION, "%s: rank %zu failed, so no rank goes on: %.480s", what, q,
           all[q].text);
}

void Exchange::on_all_ranks(const char* what, bool by_one,
                            const std::function<void(const Ready&)>& work) {
  begin_call(what);
  by_one = by_one && !shards() && !has_open_window();
  bool given_up = false;  // by all ranks
  const Ready ready = [&] {
    try {
      vote(what, nullptr);
    } catch (...) {
      given_up = true;
      throw;
    }
  };
  try {
    if (!by_one || rank() == 0) work(by_one ? Ready([] {}) : ready);
  } catch (const Error& e) {
    if (!given_up) vote(what, &e);
    throw;
  } catch (const std::exception& e) {
    const Error error(GA_ERROR_INTERNAL, e.what());
    if (!given_up) vote(what, &error);
    throw;
  }
  ready();
}

void Exchange::begin_sharded_call(const char* what) {
  if (!shards()) return;
  begin_call(what);
  check_empty(what);
}

// Runs work as this rank's part of a call; throws on every rank if it has failed on any.
template <class Work>
void Exchange::agree_on(const char* what, Work&& work) {
  std::optional<Error> failure;
  try {
    work();
  } catch (const Error& e) {
    failure = e;
  } catch (const std::exception& e) {
    failure.emplace(GA_ERROR_OUT_OF_MEMORY, e.what());
  }
  vote(what, failure ? &*failure : nullptr);
  if (failure) throw *failure;
}

void Exchange::end_sweep(const Subject& of, const BnTask& task, const BnSweepEnd& end,
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
    agree_on_sweep(of, micro_batches, all_ready);
    agreed_on_ = digest;
  } else {
    all_ready();
  }
  exchange_records(task, end, words);
}

// Asks all ranks what they are about to do; see end_sweep().
void Exchange::agree_on_sweep(const Subject& of, int64_t micro_batches,
                              const std::function<void()>& ready) {
  const std::string what = std::string(of.function) + " of layer \"" + of.name + "\"";
  std::optional<Error> failure;
  try {
    ready();
  } catch (const Error& e) {
    failure = e;
  } catch (const std::exception& e) {
    failure.emplace(GA_ERROR_OUT_OF_MEMORY, e.what());
  }
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

// For this rank's record and those of all ranks, of so many words each.
double* Exchange::room_for_records(int64_t words) {
  const size_t bytes =
      (static_cast<size_t>(comm_->ranks()) + 1) * static_cast<size_t>(words) * sizeof(double);
  if (records_.bytes() < bytes) records_ = Buffer(*model_.backend, bytes);
  return static_cast<double*>(records_.data());
}

void Exchange::exchange_records(const BnTask& task, const BnSweepEnd& end, int64_t words) {
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

// All that changes numbers, by key: of the context and its groups.
Exchange::Items Exchange::context_items() const {
  Items items;
  items.emplace_back("version", "version=" + std::to_string(GA_VERSION));
  items.emplace_back("communication", "wire=" + std::to_string(options_.wire) +
                                          " check_every=" + std::to_string(options_.check_every) +
                                          " shard=" + std::to_string(options_.shard) +
                                          " adder=" + std::to_string(options_.adder) +
                                          " overlap=" + std::to_string(options_.overlap));
  for (const auto& [key, fields] : state_.settings_of_context())
    items.emplace_back(key, fields.text());
  return items;
}

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
    f.add("piece", parts_.divisions[i].piece);
    f.add("owner", parts_.divisions[i].owner);
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
  Items items = context_items();
  for (auto& item : tensor_items()) items.push_back(std::move(item));
  return items;
}

// Throws if there is a parameter that this exchange cannot have.
void Exchange::check_tensors() const {
  if (on_device()) check_tensors_of_device();
}

uint64_t Exchange::tensors_digest() {
  if (!tensors_known_) {
    divide();
    tensors_ = hash_of(text_of(tensor_items()));
    tensors_known_ = true;
  }
  return tensors_;
}

uint64_t Exchange::settings_digest() {
  const uint64_t tensors = tensors_digest();
  if (!settings_known_) {
    settings_ = hash_of(text_of(context_items()));
    settings_known_ = true;
  }
  return settings_ * 31 + tensors;
}

void Exchange::check_settings() {
  for (int32_t q = 1; q < comm_->ranks(); ++q)
    if (header_of(q).settings != header_of(0).settings) explain("the settings", settings_items());
}

uint64_t Exchange::arrays_digest() const {
  uint64_t digest = model_.params.size();
  for (const Param& p : model_.params) digest = (digest ^ p.owns) * 0x100000001b3;
  return digest;
}

// A parameter has arrays on all ranks or on none, for state that is there is compared, saved and averaged. A rank
// may have made them alone, in ga_prepare or for a window that was discarded, before the parameter was frozen.
void Exchange::share_arrays(const char* what) {
  bool same = true;
  for (int32_t q = 1; q < comm_->ranks(); ++q)
    same = same && header_of(q).arrays == header_of(0).arrays;
  if (same) return;
  const size_t n = model_.params.size(), words = words_for_bits(n);
  std::vector<uint64_t> own(words), all(static_cast<size_t>(comm_->ranks()) * words);
  for (size_t i = 0; i < n; ++i)
    if (model_.params[i].owns) set_bit(own.data(), i);
  comm_->all_gather("which parameters have arrays", own.data(), all.data(),
                    static_cast<int64_t>(words), GA_I64);
  for (size_t k = 0; k < all.size(); ++k) own[k % words] |= all[k];
  for (size_t i = 0; i < n; ++i) {
    Param& p = model_.params[i];
    p.wanted = p.wanted || bit(own.data(), i);
    model_.arrays.look_for(p);
  }
  agree_on(what, [&] { stages_.preparation.make_own(); });
}

std::vector<std::string> Exchange::gather_texts(const char* what, std::string own) {
  const auto ranks = static_cast<size_t>(comm_->ranks());
  std::vector<int64_t> sizes(ranks);
  const auto size = static_cast<int64_t>(own.size());
  comm_->all_gather("the size of a text", &size, sizes.data(), 1, GA_I64);
  const auto most = static_cast<size_t>(*std::max_element(sizes.begin(), sizes.end()));
  const size_t padded = (most + 7) / 8 * 8;
  std::string all;
  agree_on(what, [&] {
    own.resize(padded);
    all.resize(ranks * padded);
  });
  comm_->all_gather(what, own.data(), all.data(), static_cast<int64_t>(padded / 8), GA_I64);
  std::vector<std::string> texts;
  for (size_t q = 0; q < ranks; ++q)
    texts.push_back(all.substr(q * padded, static_cast<size_t>(sizes[q])));
  return texts;
}

void Exchange::hand_round_bytes(int32_t q, int64_t bytes, std::vector<int64_t>& piece,
                                const std::function<void(const TakePiece&)>& read,
                                const TakePiece& take) {
  const size_t most = piece.size() * sizeof(int64_t);
  const auto hand_round = [&](size_t size) {
    comm_->broadcast("windows", piece.data(), static_cast<int64_t>((size + 7) / 8), GA_I64, q);
    take(piece.data(), size);
  };
  if (q != rank()) {
    for (auto left = static_cast<size_t>(bytes); left > 0;) {
      const size_t size = std::min(left, most);
      hand_round(size);
      left -= size;
    }
    return;
  }
  size_t filled = 0;
  read([&](const void* data, size_t size) {
    for (const char* from = static_cast<const char*>(data); size > 0;) {
      const size_t n = std::min(size, most - filled);
      std::memcpy(reinterpret_cast<char*>(piece.data()) + filled, from, n);
      from += n;
      size -= n;
      filled += n;
      if (filled < most) continue;
      hand_round(filled);
      filled = 0;
    }
  });
  if (filled > 0) hand_round(filled);
}

// Throws, on every rank, the first item in which some rank differs from rank 0.
void Exchange::explain(const char* what, const Items& own) {
  const std::vector<std::string> texts = gather_texts("the settings", text_of(own));
  const size_t ranks = texts.size();
  const auto items_of = [&](size_t q) {
    Items items;
    size_t at = 0;
    const auto line = [&] {
      const size_t stop = texts[q].find('\n', at);
      const std::string found = texts[q].substr(at, stop - at);
      at = stop + 1;
      return found;
    };
    while (at < texts[q].size()) {
      std::string key = line();
      items.emplace_back(std::move(key), line());
    }
    return items;
  };
  const Items first = items_of(0);
  for (size_t q = 1; q < ranks; ++q) {
    const Items theirs = items_of(q);
    for (size_t k = 0; k < std::max(first.size(), theirs.size()); ++k) {
      if (k < first.size() && k < theirs.size() && first[k] == theirs[k]) continue;
      const char* const key = k < theirs.size() ? theirs[k].first.c_str() : "";
      const char* const here = k < first.size() ? first[k].first.c_str() : "";
      if (std::strcmp(key, here) != 0)
        fail(GA_ERROR_COMMUNICATION, "%s differ: rank %zu has %.200s where rank 0 has %.200s", what,
             q, text_of_item(key, here).c_str(), text_of_item(here, key).c_str());
      Fields(first[k].second, key)
          .each_difference(Fields(theirs[k].second, key), [&](const char* field, const char* other,
                                                              const char* ours) {
            if (std::strcmp(field, "xxh3") == 0)
              fail(GA_ERROR_COMMUNICATION,
                   "%s differ: the values of \"%.200s\" on rank %zu are not those of "
                   "rank 0",
                   what, key, q);
            fail(GA_ERROR_COMMUNICATION,
                 "%s differ: of \"%.200s\", %s is %s on rank %zu, but %s on rank 0", what, key,
                 field, readable(other).c_str(), q, ours ? readable(ours).c_str() : "not there");
          });
      fail(GA_ERROR_COMMUNICATION, "%s differ: \"%.200s\" of rank %zu is not that of rank 0", what,
           key, q);
    }
  }
  fail(GA_ERROR_INTERNAL, "%s have different checksums, but no difference was found", what);
}

// Before anything moves: all ranks cut the same parameters into buckets.
void Exchange::agree_on_tensors() {
  Header h = {};
  h.call = kBegin;
  h.number = calls_;
  h.name = hash_of("ga_step");
  h.settings = begun_with_;
  h.sums.weight = begun_weight_;
  gather_headers(h, {});
  check_calls("ga_step");
  for (int32_t q = 1; q < comm_->ranks(); ++q)
    if (header_of(q).settings != header_of(0).settings) explain("the settings", tensor_items());
  if (!model_.speculation->active()) return;
  WindowSums sums = {};
  for (int32_t q = 0; q < comm_->ranks(); ++q) add(sums, header_of(q).sums);
  model_.speculation->agreed(sums.weight);
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
  if (!on_device()) return;
  agreed_on_ = shape_digest();
  if (overlaps()) model_.backend->device()->aside([] {});  // makes the second stream
}

bool Exchange::is_check_due() const {
  return options_.check_every > 0 && model_.progress.windows() % options_.check_every == 0;
}

// Throws, on every rank, the first difference of parameters and state.
void Exchange::check_state() {
  const Items own = state_.items();
  const uint64_t digest = hash_of(text_of(own));
  std::vector<uint64_t> all(static_cast<size_t>(comm_->ranks()));
  comm_->all_gather("the checksum of parameters and state", &digest, all.data(), 1, GA_I64);
  if (std::any_of(all.begin(), all.end(), [&](uint64_t d) { return d != all[0]; }))
    explain("parameters and state", own);
}

// Rank 0's parameters and state, as a state file in memory, for all ranks.
void Exchange::hand_out() {
  const char* const what = "ga_context_set_comm";
  int64_t size = 0;
  std::vector<uint64_t> bytes;
  agree_on(what, [&] {
    if (rank() == 0) bytes = state_.write(what, size);
  });
  comm_->broadcast("the size of rank 0's state", &size, 1, GA_I64, 0);
  const size_t words = (static_cast<size_t>(size) + 7) / 8;
  agree_on(what, [&] { bytes.resize(words); });
  comm_->broadcast("rank 0's state", bytes.data(), static_cast<int64_t>(words), GA_I64, 0);
  agree_on(what, [&] {
    if (rank() != 0) state_.read(what, bytes, size);
  });
}

}  // namespace ga
