// SPDX-License-Identifier: Apache-2.0
#include "exchange.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <optional>

#include "checkpoint.hpp"
#include "context.hpp"
#include "error.hpp"
#include "fields.hpp"
#include "state_file.hpp"
#include "tensor.hpp"

namespace ga {
namespace {

constexpr int64_t kSliceBytes = int64_t{8} << 20;     // on the wire, of one slice
constexpr int64_t kPackedBytes = int64_t{256} << 10;  // smaller parameters are packed

uint64_t hash_of(const std::string& text) {
  Checksum sum;
  sum.add(text.data(), text.size());
  return sum.value();
}

// A line for each key and one for its text.
std::string text_of(const std::vector<std::pair<std::string, std::string>>& items) {
  std::string text;
  for (const auto& [key, value] : items) text += key + "\n" + value + "\n";
  return text;
}

size_t words_for_bits(size_t bits) { return (bits + 63) / 64; }
bool bit(const uint64_t* words, size_t i) { return (words[i / 64] >> (i % 64) & 1) != 0; }
void set_bit(uint64_t* words, size_t i) { words[i / 64] |= uint64_t{1} << (i % 64); }

constexpr uint64_t kDense = ~uint64_t{0};  // in place of a number of rows

int64_t size_of(int32_t dtype) { return dtype_info(dtype).size; }

Array offset(const Array& a, int64_t elements) {
  return {static_cast<char*>(a.data) + elements * size_of(a.format), a.format};
}

// What a rank without a gradient brings, which changes nothing on the others.
double of_none(const Param& p) { return p.maximum ? -HUGE_VAL : 0; }

void add(WindowSums& sums, const WindowSums& more) {
  sums.weight += more.weight;
  sums.micro_batches += more.micro_batches;
  sums.weighted += more.weighted;
  sums.dropped += more.dropped;
  sums.failed += more.failed;
  sums.unestimated += more.unestimated;
}

}  // namespace

Exchange::Exchange(Context& context, std::shared_ptr<Comm> comm, const ga_comm_options& options)
    : context_(context), comm_(std::move(comm)), options_(options) {
  comm_->take();
}

Exchange::~Exchange() { comm_->give_back(); }

int64_t Exchange::bytes() const {
  return static_cast<int64_t>(send_.bytes() + received_.bytes() + added_.bytes() + wide_.bytes() +
                              (sent_.capacity() + gathered_.capacity() + payloads_.capacity()) *
                                  sizeof(uint64_t));
}

// ---- What every collective call begins with -----------------------------------------------------

Exchange::Header Exchange::header(Call call, const char* function) {
  Header h = {};
  h.call = call;
  h.number = calls_;
  h.name = call == kDiscard ? hash_of("ga_step") : hash_of(function);
  h.params = static_cast<int64_t>(context_.params_.size());
  h.open = !context_.window_.empty() || context_.batch_norms_.has_statistics();
  if (call != kDiscard) h.settings = settings_digest();
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

// Throws on every rank, since all compare the same headers, if one of them makes another call.
void Exchange::check_calls(const char* function) const {
  const Header& first = header_of(0);
  for (int32_t q = 1; q < comm_->ranks(); ++q) {
    const Header& other = header_of(q);
    if (other.name == first.name && other.number == first.number) continue;
    fail(GA_ERROR_COMMUNICATION,
         "%s: rank %d makes another call than rank 0 does: all ranks make the same collective "
         "calls in "
         "the same order; this one is rank %d",
         function, q, rank());
  }
}

void Exchange::begin_call(const char* what) {
  comm_->check();
  gather_headers(header(kOther, what), {});
  check_calls(what);
  check_settings();
  for (int32_t q = 0; q < comm_->ranks(); ++q)
    if (header_of(q).open != 0)
      fail(GA_ERROR_UNSUPPORTED,
           "%s: the window of rank %d is not empty; over several ranks, state is saved and loaded "
           "between windows",
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

// ---- Settings -----------------------------------------------------------------------------------

void Exchange::check_supported() const {
  if (const char* const layer = context_.batch_norms_.name_of_windowed())
    Subject{"layer", layer}.fail(GA_ERROR_UNSUPPORTED,
                                 "GA_BN_WINDOW is not supported over several ranks");
}

// All that changes numbers, by key: of the context and its groups.
Exchange::Items Exchange::context_items() const {
  Items items;
  items.emplace_back("version", "version=" + std::to_string(GA_VERSION));
  items.emplace_back("communication", "wire=" + std::to_string(options_.wire) +
                                          " check_every=" + std::to_string(options_.check_every));
  ga_state_options whole = {};
  whole.struct_size = sizeof whole;
  for (const auto& [key, fields] : Checkpoint(context_, whole, "ga_step").settings_of_context())
    items.emplace_back(key, fields.text());
  return items;
}

// Of parameters and layers, and their shapes.
Exchange::Items Exchange::tensor_items() const {
  Items items;
  for (size_t i = 0; i < context_.params_.size(); ++i) {
    const Param& p = context_.params_[i];
    const Tensor& t = context_.params_.tensor(i);
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
    items.emplace_back("parameter " + std::string(t.name), f.text());
  }
  for (ga_bn id = 0; id < context_.batch_norms_.count(); ++id) {
    const ga_bn_info layer = context_.batch_norms_.info(id);
    Fields f;
    f.add("channels", layer.channels);
    f.add("gamma", layer.gamma);
    f.add("beta", layer.beta);
    items.emplace_back("layer " + std::string(layer.name), f.text());
  }
  ga_state_options whole = {};
  whole.struct_size = sizeof whole;
  for (const auto& [key, fields] : Checkpoint(context_, whole, "ga_step").settings_of_tensors())
    items.emplace_back(key, fields.text());
  return items;
}

Exchange::Items Exchange::settings_items() const {
  Items items = context_items();
  for (auto& item : tensor_items()) items.push_back(std::move(item));
  return items;
}

uint64_t Exchange::settings_digest() {
  if (!tensors_known_) {
    check_supported();
    tensors_ = hash_of(text_of(tensor_items()));
    tensors_known_ = true;
  }
  if (!settings_known_) {
    settings_ = hash_of(text_of(context_items()));
    settings_known_ = true;
  }
  return settings_ * 31 + tensors_;
}

void Exchange::check_settings() {
  for (int32_t q = 1; q < comm_->ranks(); ++q)
    if (header_of(q).settings != header_of(0).settings) explain("the settings", settings_items());
}

// Throws, on every rank, the first item in which some rank differs from rank 0.
void Exchange::explain(const char* what, const Items& own) {
  std::string text = text_of(own);
  const auto ranks = static_cast<size_t>(comm_->ranks());
  std::vector<int64_t> sizes(ranks);
  const auto size = static_cast<int64_t>(text.size());
  comm_->all_gather("the size of the settings", &size, sizes.data(), 1, GA_I64);
  const auto most = static_cast<size_t>(*std::max_element(sizes.begin(), sizes.end()));
  const size_t padded = (most + 7) / 8 * 8;
  text.resize(padded);
  std::string all(ranks * padded, '\0');
  comm_->all_gather("the settings", text.data(), all.data(), static_cast<int64_t>(padded / 8),
                    GA_I64);
  const auto items_of = [&](size_t q) {
    Items items;
    size_t at = q * padded;
    const size_t end = at + static_cast<size_t>(sizes[q]);
    const auto line = [&] {
      const size_t stop = all.find('\n', at);
      const std::string found = all.substr(at, stop - at);
      at = stop + 1;
      return found;
    };
    while (at < end) {
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
      const char* const key = k < theirs.size() ? theirs[k].first.c_str() : "nothing";
      const char* const here = k < first.size() ? first[k].first.c_str() : "nothing";
      if (k >= first.size() || k >= theirs.size() || first[k].first != theirs[k].first)
        fail(GA_ERROR_COMMUNICATION,
             "%s differ: rank %zu has \"%.200s\" where rank 0 has \"%.200s\"", what, q, key, here);
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
                 field, Checkpoint::readable(other).c_str(), q,
                 ours ? Checkpoint::readable(ours).c_str() : "not there");
          });
      fail(GA_ERROR_COMMUNICATION, "%s differ: \"%.200s\" of rank %zu is not that of rank 0", what,
           key, q);
    }
  }
  fail(GA_ERROR_INTERNAL, "%s have different checksums, but no difference was found", what);
}

// ---- ga_context_set_comm ------------------------------------------------------------------------

void Exchange::agree() {
  comm_->check();
  gather_headers(header(kSetComm, "ga_context_set_comm"), {});
  check_calls("ga_context_set_comm");
  check_settings();
  context_.prepare();
  if (options_.hand_out != 0) hand_out();
  const Items own = Checkpoint::state_items(context_);
  const uint64_t digest = hash_of(text_of(own));
  std::vector<uint64_t> all(static_cast<size_t>(comm_->ranks()));
  comm_->all_gather("the checksum of parameters and state", &digest, all.data(), 1, GA_I64);
  if (std::any_of(all.begin(), all.end(), [&](uint64_t d) { return d != all[0]; }))
    explain("parameters and state", own);
}

// Rank 0's parameters and state, as a state file in memory, for all ranks.
void Exchange::hand_out() {
  const char* const what = "ga_context_set_comm";
  ga_state_options whole = {};
  whole.struct_size = sizeof whole;
  int64_t size = 0;
  std::vector<uint64_t> bytes;
  const auto words = [&] { return (static_cast<size_t>(size) + 7) / 8; };
  agree_on(what, [&] {
    if (rank() != 0) return;
    Checkpoint checkpoint(context_, whole, what);
    size = checkpoint.file_bytes();
    bytes.resize(words());
    checkpoint.save([&](int64_t offset, const void* data, size_t n) {
      std::memcpy(reinterpret_cast<char*>(bytes.data()) + offset, data, n);
    });
  });
  comm_->broadcast("the size of rank 0's state", &size, 1, GA_I64, 0);
  agree_on(what, [&] { bytes.resize(words()); });
  comm_->broadcast("rank 0's state", bytes.data(), static_cast<int64_t>(words()), GA_I64, 0);
  agree_on(what, [&] {
    if (rank() == 0) return;
    Checkpoint(context_, whole, what).load(size, [&](int64_t offset, void* to, size_t n) {
      std::memcpy(to, reinterpret_cast<const char*>(bytes.data()) + offset, n);
    });
  });
}

// ---- The end of a window: what the ranks bring ---------------------------------------------------

bool Exchange::begin_step(WindowTotals& totals) {
  comm_->check();
  const auto ranks = comm_->ranks();
  const size_t n = context_.params_.size();
  Header own = header(kStep, "ga_step");
  const Control& c = *context_.backend_->known();
  const bool checked = context_.deferring();
  own.sums.weight = checked ? c.weight : totals.weight;
  own.sums.micro_batches = static_cast<double>(totals.micro_batches);
  own.sums.weighted = static_cast<double>(checked ? c.weighted : totals.weighted);
  own.sums.dropped = static_cast<double>(c.window_dropped);
  own.sums.failed = c.failed;
  own.sums.unestimated = totals.weighted > 0 && !totals.noise_wanted;
  micro_batches_ = totals.micro_batches;
  std::vector<uint64_t> payload(words_for_bits(n));  // which parameters have a gradient
  for (size_t i = 0; i < n; ++i) {
    const Param& p = context_.params_[i];
    const bool held = !p.frozen && p.held() != Held::kNothing;
    if (held) set_bit(payload.data(), i);
    if (!has_rows(i)) continue;  // else how many rows, or that all have a gradient
    const bool rows = held && p.held() == Held::kRows;
    const RowSet* const set = context_.params_.tensor(i).set;
    payload.push_back(rows && set ? static_cast<uint64_t>(set->size) : held ? kDense : 0);
  }
  const bool due = options_.check_every > 0 && context_.windows_ % options_.check_every == 0;
  Items state;
  if (due) {
    state = Checkpoint::state_items(context_);
    own.state = hash_of(text_of(state));
  }
  payloads_.clear();
  gather_headers(own, payload);
  check_calls("ga_step");
  for (int32_t q = 0; q < ranks; ++q)
    if (header_of(q).call == kDiscard) return false;
  check_settings();
  for (int32_t q = 1; due && q < ranks; ++q)
    if (header_of(q).state != header_of(0).state) explain("parameters and state", state);

  sums_ = {};
  for (int32_t q = 0; q < ranks; ++q) add(sums_, header_of(q).sums);
  if (payload.size() > capacity_) {  // on every rank, since they agree on the parameters
    payloads_.resize(static_cast<size_t>(ranks) * payload.size());
    comm_->all_gather("which parameters have gradients", payload.data(), payloads_.data(),
                      static_cast<int64_t>(payload.size()), GA_I64);
  }
  touched_.assign(n, 0);
  for (int32_t q = 0; q < ranks; ++q)
    for (size_t i = 0; i < n; ++i) touched_[i] = touched_[i] || bit(payload_of(q), i);
  row_counts_.clear();
  size_t word = words_for_bits(n);
  for (size_t i = 0; i < n; ++i) {
    if (!has_rows(i)) continue;
    for (int32_t q = 0; q < ranks; ++q) row_counts_.push_back(payload_of(q)[word]);
    ++word;
  }
  if (!payloads_.empty()) {
    capacity_ = payload.size();
    payloads_.clear();
  }
  exchanged_ = sums_.weight > 0 && sums_.failed == 0;
  totals.micro_batches = static_cast<int64_t>(sums_.micro_batches);
  totals.weight = sums_.weight;
  totals.weighted = static_cast<int64_t>(sums_.weighted);
  return true;
}

void Exchange::discard() {
  gather_headers(header(kDiscard, "ga_discard"), {});
  check_calls("ga_discard");
}

// ---- The end of a window: gradients --------------------------------------------------------------

// The dtype in which a gradient travels to where it is added.
int32_t Exchange::wire_of(const Param& p) const {
  if (p.f64) return GA_F64;
  if (p.pair) return GA_F32;
  if (size_of(p.accumulator_dtype) == 2)
    return context_.config_.accumulation == GA_ACCUMULATE_RUNNING_MEAN ? int32_t{GA_F32}
                                                                       : p.accumulator_dtype;
  return options_.wire == GA_COMM_WIRE_BF16 && !p.maximum ? GA_BF16 : GA_F32;
}

// Where the sum of a gradient lies: in the accumulator, or in an array of f32.
Array Exchange::summed(ga_param id) const {
  const Param& p = context_.params_[id];
  if (p.fits_accumulator() && !p.pair) return {p.accumulator, p.accumulator_dtype};
  const int64_t at = wide_at_[static_cast<size_t>(id)];
  return {static_cast<float*>(wide_.data()) + at, GA_F32};
}

// The same on every rank: a function of the parameters and of which of them are touched.
void Exchange::make_slices() {
  slices_.clear();
  segments_.clear();
  const int64_t ranks = comm_->ranks();
  const bool running = context_.config_.accumulation == GA_ACCUMULATE_RUNNING_MEAN;
  const auto close = [&](int32_t wire, bool packed, size_t first, int64_t elements) {
    if (elements == 0) return;
    slices_.push_back({wire, packed, first, segments_.size(), (elements + ranks - 1) / ranks});
  };
  for (const int32_t wire : {GA_F32, GA_F64, GA_F16, GA_BF16}) {
    const int64_t most = std::max(kSliceBytes / size_of(wire) / ranks, int64_t{1}) * ranks;
    std::vector<Segment> rest;
    for (size_t i = 0; i < touched_.size(); ++i) {
      const auto id = static_cast<ga_param>(i);
      const Param& p = context_.params_[id];
      if (!touched_[i] || p.count == 0 || wire_of(p) != wire || p.held() == Held::kRows) continue;
      const bool as_it_lies = wire == p.accumulator_dtype && !p.pair && !running;
      int64_t first = 0;
      if (as_it_lies && p.count * size_of(wire) >= kPackedBytes)
        for (; p.count - first >= ranks;) {
          const int64_t count = std::min(most, (p.count - first) / ranks * ranks);
          segments_.push_back({id, first, count, 0});
          close(wire, false, segments_.size() - 1, count);
          first += count;
        }
      if (first < p.count) rest.push_back({id, first, p.count - first, 0});
    }
    size_t begin = segments_.size();
    int64_t filled = 0;
    for (Segment s : rest) {
      while (s.count > 0) {
        const int64_t count = std::min(s.count, most - filled);
        segments_.push_back({s.param, s.first, count, filled});
        s.first += count;
        s.count -= count;
        filled += count;
        if (filled < most) continue;
        close(wire, true, begin, filled);
        begin = segments_.size();
        filled = 0;
      }
    }
    close(wire, true, begin, filled);
  }
}

// Makes room for the slices, and for sums that do not fit their accumulator.
void Exchange::reserve() {
  const int64_t ranks = comm_->ranks();
  size_t received = 0, send = 0, added = 0, chunks = 0, tasks = 0;
  for (const Slice& s : slices_) {
    const auto bytes = static_cast<size_t>(s.piece * ranks * size_of(s.wire));
    received = std::max(received, bytes);
    if (s.packed) {
      send = std::max(send, bytes);
      added = std::max(added, static_cast<size_t>(s.piece * ranks * (s.wire == GA_F64 ? 8 : 4)));
    }
    chunks = std::max(chunks, s.end - s.first + static_cast<size_t>(chunk_count(s.piece)));
    tasks = std::max(tasks, s.end - s.first);
  }
  Backend& backend = *context_.backend_;
  const auto grow = [&](Buffer& buffer, size_t bytes) {
    if (buffer.bytes() < bytes) buffer = Buffer(backend, bytes);
  };
  grow(received_, received);
  grow(send_, send);
  grow(added_, added);
  partials_.resize(std::max(partials_.size(), chunks));
  tasks_.reserve(tasks);
  moves_.reserve(tasks);
  pairs_.reserve(tasks);
  starts_.reserve(tasks);
  norms_.reserve(tasks);
  numbers_.reserve(tasks);
  wide_at_.assign(touched_.size(), -1);
  int64_t wide = 0;
  for (size_t i = 0; i < touched_.size(); ++i) {
    const Param& p = context_.params_[i];
    if (context_.params_.tensor(i).removed || p.frozen || (p.fits_accumulator() && !p.pair))
      continue;
    wide_at_[i] = wide;
    wide += (p.count + 15) / 16 * 16;
  }
  grow(wide_, static_cast<size_t>(wide) * sizeof(float));
}

void Exchange::add_gradients() {
  param_sums_.assign(touched_.size(), ParamSums());
  if (!exchanged_) return;
  gather_rows();
  make_slices();
  reserve();
  for (const Slice& s : slices_) exchange(s);
  for (size_t i = 0; i < touched_.size(); ++i) {
    Param& p = context_.params_[i];
    if (!touched_[i] || p.held() == Held::kRows) continue;
    p.hold(Held::kSummed);
    p.summed = p.count > 0 ? summed(static_cast<ga_param>(i)).data : nullptr;
    p.stale = false;
  }
}

// ---- The end of a window: gradients of some rows -------------------------------------------------

bool Exchange::has_rows(size_t i) const {
  const Tensor& t = context_.params_.tensor(i);
  return t.options.rows != GA_ROWS_NONE && !t.removed;
}

// Every rank adds the rows of all ranks to an empty set, in the order of the ranks, and so has the same
// sums; a parameter of which some rank has a gradient of all rows is made dense on every rank.
void Exchange::gather_rows() {
  const auto ranks = static_cast<size_t>(comm_->ranks());
  const uint64_t* counts = row_counts_.data();
  for (size_t i = 0; i < touched_.size(); ++i) {
    if (!has_rows(i)) continue;
    const uint64_t* const of_ranks = counts;
    counts += ranks;
    if (!touched_[i] || context_.params_[i].frozen) continue;
    const auto id = static_cast<ga_param>(i);
    if (std::find(of_ranks, of_ranks + ranks, kDense) != of_ranks + ranks)
      context_.make_dense(id);
    else
      gather_rows_of(id, of_ranks);
  }
}

void Exchange::gather_rows_of(ga_param id, const uint64_t* counts) {
  Backend& backend = *context_.backend_;
  Param& p = context_.params_[id];
  const Tensor& t = context_.params_.tensor(id);
  p.hold(Held::kRows);
  const auto ranks = static_cast<size_t>(comm_->ranks());
  const auto most = static_cast<size_t>(*std::max_element(counts, counts + ranks));
  if (p.count == 0 || most == 0) return;
  const auto columns = static_cast<size_t>(p.count / t.rows);
  const auto size = static_cast<size_t>(size_of(p.accumulator_dtype));
  const size_t row_bytes = columns * size;

  std::vector<int64_t> indices(most, 0), all(ranks * most);
  std::vector<char> values(most * row_bytes);
  for (int64_t k = 0; k < t.set->size; ++k) {
    const int64_t row = t.set->entries[k].row;
    indices[static_cast<size_t>(k)] = row;
    std::memcpy(&values[static_cast<size_t>(k) * row_bytes],
                static_cast<char*>(p.accumulator) + static_cast<size_t>(row) * row_bytes,
                row_bytes);
  }
  comm_->all_gather("rows of gradients", indices.data(), all.data(), static_cast<int64_t>(most),
                    GA_I64);
  backend.clear_rows({&context_.params_.tensor(id).set, 1});
  RowsTask task = {};
  task.target = {p.accumulator, p.accumulator_dtype};
  task.rows = t.rows;
  task.columns = static_cast<int64_t>(columns);
  task.set = t.set;
  task.index_dtype = GA_I64;
  for (size_t q = 0; q < ranks; ++q) task.count += static_cast<int64_t>(counts[q]);
  backend.prepare_rows(task, 0);
  context_.rows_held_ += task.count;

  const size_t slice = std::max<size_t>(1, static_cast<size_t>(kSliceBytes) / (ranks * row_bytes));
  std::vector<char> gathered(ranks * std::min(slice, most) * row_bytes);
  for (size_t at = 0; at < most; at += slice) {
    const size_t rows = std::min(slice, most - at);
    comm_->all_gather("rows of gradients", &values[at * row_bytes], gathered.data(),
                      static_cast<int64_t>(rows * columns), p.accumulator_dtype);
    for (size_t q = 0; q < ranks; ++q) {
      if (counts[q] <= at) continue;
      task.count = static_cast<int64_t>(std::min<size_t>(counts[q] - at, rows));
      task.indices = &all[q * most + at];
      task.values = {&gathered[q * rows * row_bytes], p.accumulator_dtype, 1, nullptr};
      backend.accumulate_rows(task);
    }
  }
}

// ---- The end of a window: gradients, slice by slice -----------------------------------------------

void Exchange::exchange(const Slice& slice) {
  const Segment& only = segments_[slice.first];
  const Param& p = context_.params_[only.param];
  const void* send = send_.data();
  if (slice.packed) {
    pack(slice);
  } else {
    const Array at = offset({p.accumulator, p.accumulator_dtype}, only.first);
    if (p.held() == Held::kNothing) {
      FinishTask none = {};
      none.constant = of_none(p);
      none.f64 = p.f64;
      none.target = at;
      none.count = only.count;
      context_.backend_->finish({&none, 1});
    }
    send = at.data;
  }
  comm_->all_to_all("gradients", send, received_.data(), slice.piece, slice.wire);
  add_pieces(slice);
  const int32_t real = slice.wire == GA_F64 ? GA_F64 : GA_F32;
  const Array all =
      slice.packed ? Array{added_.data(), real} : offset(summed(only.param), only.first);
  comm_->all_gather_arrays("sums of gradients", offset(all, rank() * slice.piece).data, all.data,
                           slice.piece, real);
  if (!slice.packed) return;
  moves_.clear();
  for (size_t k = slice.first; k < slice.end; ++k) {
    const Segment& s = segments_[k];
    FinishTask task = {};
    task.gradient = identity({offset(all, s.at).data, real, 1, nullptr});
    task.f64 = real == GA_F64;
    task.target = offset(summed(s.param), s.first);
    task.count = s.count;
    moves_.push_back(task);
  }
  context_.backend_->finish({moves_.data(), moves_.size()});
}

// Copies what this rank has of a slice one behind the other; of_none() where it has nothing.
void Exchange::pack(const Slice& slice) {
  const bool running = context_.config_.accumulation == GA_ACCUMULATE_RUNNING_MEAN;
  const Array to = {send_.data(), slice.wire};
  moves_.clear();
  pairs_.clear();
  for (size_t k = slice.first; k < slice.end; ++k) {
    const Segment& s = segments_[k];
    const Param& p = context_.params_[s.param];
    FinishTask task = {};
    task.f64 = p.f64;
    task.target = offset(to, s.at);
    task.count = s.count;
    task.constant = of_none(p);
    if (p.held() != Held::kNothing) {
      Source& source = task.gradient.source;
      source = {offset({p.accumulator, p.accumulator_dtype}, s.first).data, p.accumulator_dtype, 1,
                nullptr};
      if (p.pair) {
        const Tensor& t = context_.params_.tensor(s.param);
        pairs_.push_back({const_cast<void*>(source.data),
                          offset({t.low, p.accumulator_dtype}, s.first).data, p.accumulator_dtype});
        source.data = &pairs_.back();
        source.format = kPair;
      }
      if (running && !p.maximum)
        source.scale = context_.deferring()
                           ? context_.param_state(static_cast<size_t>(s.param)).held_weight
                           : p.held_weight;
    }
    moves_.push_back(task);
  }
  context_.backend_->finish({moves_.data(), moves_.size()});
}

// Adds what has come of this rank's piece, or takes the maximum, in the order of the ranks, and measures
// the sums.
void Exchange::add_pieces(const Slice& slice) {
  const int64_t begin = rank() * slice.piece, end = begin + slice.piece;
  const int32_t real = slice.wire == GA_F64 ? GA_F64 : GA_F32;
  const Array received = {received_.data(), slice.wire};
  tasks_.clear();
  starts_.clear();
  norms_.clear();
  numbers_.clear();
  size_t chunks = 0;
  const double mean = context_.config_.reduce == GA_REDUCE_MEAN ? 1 / sums_.weight : 1;
  for (size_t k = slice.first; k < slice.end; ++k) {
    const Segment& s = segments_[k];
    const int64_t first = std::max(s.at, begin), last = std::min(s.at + s.count, end);
    if (first >= last) continue;
    const Param& p = context_.params_[s.param];
    const Array target = slice.packed ? offset({added_.data(), real}, first)
                                      : offset(summed(s.param), s.first + first - s.at);
    AccumulateTask task = {};
    task.target = target;
    task.count = last - first;
    task.partials = &partials_[chunks];
    task.param = s.param;
    tasks_.push_back(task);
    starts_.push_back(first - begin);
    chunks += static_cast<size_t>(chunk_count(task.count));
    const ParamInput& in = context_.tables_.param_inputs[static_cast<size_t>(s.param)];
    if (!in.clamped) continue;
    const GroupInput& g = context_.tables_.group_inputs[static_cast<size_t>(in.group)];
    numbers_.push_back({g.optimizer.maximize ? -mean : mean, g.clip.max_value, 1});
    norms_.push_back(
        {{{target.data, real, 1, nullptr}, &numbers_.back()}, p.f64, task.count, task.partials});
  }
  if (tasks_.empty()) return;
  Backend& backend = *context_.backend_;
  // The first pass adds two ranks' pieces, each further one that of one more.
  for (int64_t q = 0; q < comm_->ranks(); q += q == 0 ? 2 : 1) {
    for (size_t k = 0; k < tasks_.size(); ++k) {
      AccumulateTask& task = tasks_[k];
      task.sources = q == 0 && comm_->ranks() > 1 ? 2 : 1;
      const bool maximum = context_.params_[task.param].maximum;
      task.keep = maximum && comm_->ranks() > 1 ? kMaximum : q == 0 ? 0 : 1;
      for (int64_t j = 0; j < task.sources; ++j)
        task.source[j] = {offset(received, (q + j) * slice.piece + starts_[k]).data, slice.wire, 1,
                          nullptr};
    }
    backend.accumulate({tasks_.data(), tasks_.size()});
  }
  if (!norms_.empty()) backend.norm({norms_.data(), norms_.size()});
  for (const AccumulateTask& task : tasks_) {
    ParamSums& sums = param_sums_[static_cast<size_t>(task.param)];
    const bool clamped = context_.tables_.param_inputs[static_cast<size_t>(task.param)].clamped;
    for (int64_t k = 0; k < chunk_count(task.count); ++k) {
      sums.squares += task.partials[k].sum_squares;
      if (clamped) sums.clamped += task.partials[k].second_squares;
      sums.nonfinite += task.partials[k].nonfinite != 0;
    }
  }
}

void Exchange::hand_round(float* data, int64_t count, ga_param id) {
  comm_->broadcast("an update of Newton-Schulz iterations", data, count, GA_F32, maker(id));
}

// ---- The end of a window: sums -------------------------------------------------------------------

// The statistics that this rank's window has of each channel, to `out`.
void Exchange::merge_statistics(std::vector<double>& out) {
  const Table<BnInput>& layers = context_.batch_norms_.inputs();
  for (size_t l = 0; l < layers.size(); ++l)
    for (int64_t k = 0; k < layers[l].channels; ++k) {
      BnChannel& c = layers[l].state[k];
      merge_up_to(c, {layers[l].history, layers[l].channels, k}, micro_batches_);
      c.taken = c.merged;  // so that commit() merges nothing more
      for (const double x : {c.window.count, c.window.mean, c.window.m2}) out.push_back(x);
    }
}

void Exchange::add_sums() {
  // Sent: for each touched parameter the sums of this rank, then statistics.
  std::vector<double> own;
  const bool noise = context_.config_.noise_scale != 0;
  const auto in_pieces = [&](size_t i) {  // else every rank has measured it
    return touched_[i] && context_.params_[i].held() != Held::kRows;
  };
  for (size_t i = 0; i < touched_.size(); ++i) {
    if (!in_pieces(i)) continue;
    const ParamSums& s = param_sums_[i];
    own.push_back(s.squares);
    own.push_back(s.nonfinite);
    if (context_.tables_.param_inputs[i].clamped) own.push_back(s.clamped);
    if (noise) own.push_back((*context_.tables_.param_states.at(i)).sums.noise);
  }
  merge_statistics(own);
  const auto ranks = static_cast<size_t>(comm_->ranks());
  std::vector<double> all(ranks * own.size());
  if (!own.empty())
    comm_->all_gather("norms and statistics", own.data(), all.data(),
                      static_cast<int64_t>(own.size()), GA_F64);
  size_t at = 0;
  const auto total = [&] {
    double sum = 0;
    for (size_t q = 0; q < ranks; ++q) sum += all[q * own.size() + at];
    ++at;
    return sum;
  };
  for (size_t i = 0; i < touched_.size(); ++i) {
    ParamSums sums = {};
    if (touched_[i] && !in_pieces(i)) sums = (*context_.tables_.param_states.at(i)).sums;
    if (in_pieces(i)) {
      sums.squares = total();
      sums.nonfinite = total();
      if (context_.tables_.param_inputs[i].clamped) sums.clamped = total();
      if (noise) sums.noise = total();
      sums.gradients = sums.dense = 1;
    }
    if (i < context_.prepared_) {
      (*context_.tables_.param_states.at(i)).sums = sums;
      (*context_.tables_.param_states.at(i)).held_weight =
          1;  // the sum is one of gradients, not a mean
    }
  }
  context_.tables_.control.at()->sums = sums_;
  const Table<BnInput>& layers = context_.batch_norms_.inputs();
  for (size_t l = 0; l < layers.size(); ++l)
    for (int64_t k = 0; k < layers[l].channels; ++k) {
      Moments merged = {};
      for (size_t q = 0; q < ranks; ++q) {
        const double* const m = &all[q * own.size() + at];
        merged = merge(merged, {m[0], m[1], m[2]});
      }
      layers[l].state[k].window = merged;
      at += 3;
    }
}

}  // namespace ga
