// SPDX-License-Identifier: Apache-2.0
//
// Fuzzes ga_load_from_memory. An input is four bytes and a file: the context that loads the file, the
// options of the load, and a seed for the calls that follow a load.
//
// Whatever the file, the load succeeds or returns a documented status. A load that failed has changed
// nothing. After a load that succeeded, the context goes on, with an open window too, and what it saves
// makes a second context that goes on with the same bits.
//
// A changed byte would end most loads at a checksum, so the program repairs the checksums of a file
// before the load, unless a bit of the options forbids it. The program's own mutator changes the
// metadata, the tensors, or the data of a file, and leaves the rest of the file as valid as it was.
//
//   fuzz_state --write-corpus <folder>   writes a few files of each context, as inputs
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <new>

#include "../state_parts.hpp"
#include "core/error.hpp"
#include "gradaccum/gradaccum.h"

namespace {

using ga::safetensors::Header;
using ga::safetensors::kLengthBytes;
using Bytes = std::vector<uint8_t>;
using File = ga::test::StateParts;

// Ends the run: libFuzzer keeps the input.
[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "%s; the last error: %s\n", what, ga_last_error());
  std::abort();
}

// splitmix64 (Steele et al. 2014)
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  size_t below(size_t n) {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return static_cast<size_t>((z ^ (z >> 31)) % n);
  }

 private:
  uint64_t state_;
};

// ---- Contexts -----------------------------------------------------------------------------------

enum Kind { kPlain, kAverage, kMasters, kRows, kLayers, kChecked, kChance, kGroups, kCut, kKinds };

size_t size_of(ga_dtype dtype) {
  return dtype == GA_F64 || dtype == GA_I64 ? 8 : dtype == GA_F32 || dtype == GA_I32 ? 4 : 2;
}

// Memory of exactly this many numbers, so that AddressSanitizer finds the first byte beyond them. The
// alignment is the same in all contexts.
class Array {
 public:
  Array(ga_dtype dtype, size_t count, double first, double step)
      : data_(static_cast<uint8_t*>(::operator new(count* size_of(dtype), kAlignment))) {
    for (size_t i = 0; i < count; ++i) {
      const double x = first + step * static_cast<double>(i % 7);
      const auto f = static_cast<float>(x);
      uint32_t bits;
      std::memcpy(&bits, &f, sizeof bits);
      // Exact in bf16, whose bits are the upper half of the f32, and in f16.
      const uint32_t exponent = bits >> 23 & 255;
      const uint32_t half =
          exponent == 0 ? 0 : (bits >> 16 & 0x8000) | (exponent - 112) << 10 | (bits >> 13 & 0x3ff);
      const auto half_bits = static_cast<uint16_t>(dtype == GA_BF16 ? bits >> 16 : half);
      const void* const from = dtype == GA_F64   ? static_cast<const void*>(&x)
                               : dtype == GA_F32 ? static_cast<const void*>(&f)
                                                 : &half_bits;
      std::memcpy(data_ + i * size_of(dtype), from, size_of(dtype));
    }
  }
  Array(Array&& other) noexcept : data_(other.data_) { other.data_ = nullptr; }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { ::operator delete(data_, kAlignment); }
  void* data() const { return data_; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  uint8_t* data_;
};

// A context of one kind, with its parameters and their gradients.
class Training {
 public:
  explicit Training(Kind kind) {
    ga_config c;
    ga_config_init(&c, sizeof c);
    c.num_threads = 1;
    if (kind == kAverage) c.accum_steps = 3;
    if (kind == kMasters) c.accumulation = GA_ACCUMULATE_COMPENSATED;
    if (kind == kRows || kind == kChecked) c.noise_scale = 1;
    if (kind == kChecked) c.nonfinite = GA_NONFINITE_DROP_MICRO;
    if (kind == kChecked) c.accumulation = GA_ACCUMULATE_RUNNING_MEAN;
    if (kind == kChance) c.accumulation = GA_ACCUMULATE_STOCHASTIC;
    if (kind == kChance) c.seed = 7;
    if (kind == kGroups) {
      c.gradient_life = GA_GRADIENTS_LIVE;
      c.gradient_kind = GA_GRADIENT_SUM;
      c.nonfinite = GA_NONFINITE_FAIL;
      c.missing = GA_MISSING_ZERO;
    }
    if (ga_context_create(&c, &ctx_) != GA_OK) fail("no context");
    switch (kind) {
      case kPlain:
        group(GA_OPTIMIZER_SGD);
        param("w", GA_F32, {2, 3});
        param("b", GA_F32, {3});
        break;
      case kAverage: {
        group(GA_OPTIMIZER_NADAM);
        param("w", GA_F32, {2, 3});
        param("b", GA_F64, {});
        ga_ema ema;
        ga_ema_init(&ema, sizeof ema);
        must(ga_context_set_ema(ctx_, &ema));
        break;
      }
      case kMasters: {
        group(GA_OPTIMIZER_ADAMW);
        param("w", GA_BF16, {2, 3}, [](ga_param_options& o) { o.accumulator_dtype = GA_BF16; });
        param("b", GA_F16, {3});
        ga_loss_scaler scaler;
        ga_loss_scaler_init(&scaler, sizeof scaler);
        scaler.initial_scale = 4;
        must(ga_context_set_loss_scaler(ctx_, &scaler));
        break;
      }
      case kRows: {
        group(GA_OPTIMIZER_ADAGRAD);
        group(GA_OPTIMIZER_ROWWISE_ADAGRAD);
        param("table", GA_F32, {5, 2}, [](ga_param_options& o) { o.rows = GA_ROWS_LAZY; });
        group_ = 0;
        param("dense", GA_F32, {4, 2}, [](ga_param_options& o) { o.rows = GA_ROWS_DENSE; });
        ga_schedule schedule;
        ga_schedule_init(&schedule, sizeof schedule, GA_SCHEDULE_STEP);
        schedule.step_size = 2;
        must(ga_group_set_schedule(ctx_, 0, &schedule));
        break;
      }
      case kLayers: {
        ga_optimizer o = optimizer(GA_OPTIMIZER_SGD);
        o.momentum = 0.5;
        group(o);
        param("gamma", GA_F32, {kChannels});
        param("beta", GA_F32, {kChannels});
        static constexpr const char* names[] = {"micro", "window", "cumulative"};
        for (const ga_bn_mode mode : {GA_BN_MICRO, GA_BN_WINDOW, GA_BN_CUMULATIVE}) {
          ga_bn_options bn;
          ga_bn_options_init(&bn, sizeof bn, GA_FLAVOR_TORCH);
          bn.mode = mode;
          must(ga_bn_add(ctx_, names[mode], kChannels, mode == GA_BN_MICRO ? -1 : 0,
                         mode == GA_BN_MICRO ? -1 : 1, &bn, nullptr));
          ++layers_;
        }
        break;
      }
      case kChecked:
        group(GA_OPTIMIZER_ADAM);
        param("w", GA_F16, {2, 3}, [](ga_param_options& o) { o.accumulator_dtype = GA_F16; });
        param("b", GA_F32, {3});
        clip(GA_CLIP_PER_TENSOR);
        must(ga_bn_add(ctx_, "layer", kChannels, -1, 1, nullptr, nullptr));
        ++layers_;
        break;
      case kChance: {
        ga_optimizer o = optimizer(GA_OPTIMIZER_ADAFACTOR);
        group(o);
        param("w", GA_BF16, {2, 3}, [](ga_param_options& p) {
          p.accumulator_dtype = GA_BF16;
          p.master = GA_MASTER_NONE;
          p.rounding = GA_ROUND_STOCHASTIC;
        });
        o = optimizer(GA_OPTIMIZER_ADEMAMIX);
        o.state_dtype = GA_BF16;
        group(o);
        param("b", GA_F32, {3});
        ga_schedule schedule;
        ga_schedule_init(&schedule, sizeof schedule, GA_SCHEDULE_TABLE);
        static constexpr double rates[] = {0.5, 0.25, 0.125};
        schedule.table = rates;
        schedule.table_size = 3;
        must(ga_group_set_schedule(ctx_, 1, &schedule));
        ga_ema ema;
        ga_ema_init(&ema, sizeof ema);
        ema.dtype = GA_BF16;
        must(ga_context_set_ema(ctx_, &ema));
        break;
      }
      case kCut: {
        group(GA_OPTIMIZER_ADAMW);
        param("w", GA_BF16, {2, 3});
        param("b", GA_F32, {3});
        static constexpr int64_t whole[] = {4, 5}, first[] = {2, 1}, three = 3, zero = 0;
        must(ga_param_set_part(ctx_, 0, whole, first, 1));
        must(ga_param_set_part(ctx_, 1, &three, &zero, 2));
        break;
      }
      default:
        group(GA_OPTIMIZER_LARS);
        param("m", GA_F32, {2, 2});
        group(GA_OPTIMIZER_LAMB);
        param("w", GA_F64, {2, 3});
        param("frozen", GA_F32, {2});
        must(ga_param_set_frozen(ctx_, 2, 1));
        param("empty", GA_F32, {0, 2});
        param("removed", GA_F32, {1});
        must(ga_param_remove(ctx_, 4));
        group(GA_OPTIMIZER_EXTERNAL);
        param("external", GA_F32, {2});
        clip(GA_CLIP_AGC);
    }
  }
  ~Training() { ga_context_destroy(ctx_); }
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  ga_context* context() const { return ctx_; }

  Bytes saved(ga_state_parts parts = GA_STATE_ALL) const {
    ga_state_options options;
    ga_state_options_init(&options, sizeof options);
    options.parts = parts;
    size_t size = 0;
    if (ga_save_to_memory(ctx_, &options, nullptr, 0, &size) != GA_OK) fail("no size");
    Bytes bytes(size);
    if (ga_save_to_memory(ctx_, &options, bytes.data(), size, &size) != GA_OK) fail("not saved");
    return bytes;
  }

  ga_window_info window() const {
    ga_window_info info;
    ga_window_info_init(&info, sizeof info);
    must(ga_window(ctx_, &info));
    return info;
  }

  // One of several calls or short lists of calls. Each status is legal but those of defects.
  enum Act { kWhole, kParts, kStep, kDiscard, kSweep, kFinalize, kBackward, kAgain, kActs };
  uint64_t act(Act act) {
    statuses_ = 1;
    const int64_t micros = window().micro_batches;
    switch (act) {
      case kWhole:
        note(ga_accumulate(ctx_, gradients_.data(), gradients_.size(), 1.5, nullptr));
        break;
      case kParts:
        note(ga_micro_begin(ctx_, micros, 0.5, nullptr));
        for (ga_param p = 0; p < static_cast<ga_param>(arrays_.size() / 2); ++p) {
          static constexpr int32_t rows[] = {3, 0, 3};
          const void* const gradient = arrays_[2 * static_cast<size_t>(p) + 1].data();
          if (note(ga_accumulate_rows(ctx_, p, rows, GA_I32, 3, gradient)) != GA_OK)
            note(ga_accumulate_part(ctx_, p, gradient));
        }
        end_micro();
        break;
      case kStep: {
        ga_step_result result;
        ga_step_result_init(&result, sizeof result);
        note(ga_step(ctx_, &result));
        statuses_ = statuses_ * 8 + static_cast<uint64_t>(result.outcome);
        break;
      }
      case kDiscard:
        note(ga_discard(ctx_));
        break;
      case kSweep:
        for (ga_bn k = 0; k < layers_; ++k) note(ga_bn_accumulate(ctx_, k, x_.data(), kSamples, 1));
        break;
      case kFinalize:
        for (ga_bn k = 0; k < layers_; ++k) note(ga_bn_finalize(ctx_, k));
        break;
      case kBackward:
      default:
        if (act == kBackward)
          for (ga_bn k = 0; k < layers_; ++k)
            note(ga_bn_forward(ctx_, k, x_.data(), kSamples, 1, y_.data()));
        note(ga_micro_begin(ctx_, act == kAgain ? 0 : micros, 1, nullptr));
        if (act == kAgain)
          for (ga_bn k = 0; k < layers_; ++k)
            note(ga_bn_forward(ctx_, k, x_.data(), kSamples, 1, y_.data()));
        for (ga_bn k = 0; k < layers_; ++k) {
          note(ga_bn_backward_accumulate(ctx_, k, x_.data(), x_.data(), kSamples, 1));
          note(ga_bn_backward_finalize(ctx_, k));
          note(ga_bn_backward(ctx_, k, x_.data(), x_.data(), kSamples, 1, y_.data()));
        }
        end_micro();
    }
    return statuses_;
  }

 private:
  static constexpr int64_t kChannels = 3, kSamples = 2;

  static void must(ga_status status) {
    if (status != GA_OK) fail("a call that is always legal failed");
  }
  ga_status note(ga_status status) {
    if (status == GA_ERROR_INTERNAL || status == GA_ERROR_FAULT) fail("a defect");
    statuses_ = statuses_ * 31 + static_cast<uint64_t>(status);
    return status;
  }
  void end_micro() {
    if (note(ga_micro_end(ctx_)) != GA_OK) note(ga_micro_abort(ctx_));
  }

  static ga_optimizer optimizer(ga_optimizer_kind kind) {
    ga_optimizer o;
    must(ga_optimizer_init(&o, sizeof o, kind, GA_FLAVOR_TORCH));
    return o;
  }
  void group(const ga_optimizer& o) { must(ga_group_add(ctx_, &o, &group_)); }
  void group(ga_optimizer_kind kind) { group(optimizer(kind)); }
  void clip(ga_clip_scope scope) {
    ga_clip clip;
    must(ga_clip_init(&clip, sizeof clip));
    clip.scope = scope;
    if (scope != GA_CLIP_AGC) clip.max_norm = 0.5;
    must(ga_context_set_clip(ctx_, &clip));
  }

  static void leave(ga_param_options&) {}
  template <class Change = decltype(&leave)>
  void param(const char* name, ga_dtype dtype, const std::vector<int64_t>& shape,
             Change change = leave) {
    size_t count = 1;
    for (const int64_t n : shape) count *= static_cast<size_t>(n);
    ga_param_options options;
    ga_param_options_init(&options, sizeof options);
    change(options);
    arrays_.emplace_back(dtype, count, -0.5, 0.25);
    arrays_.emplace_back(dtype, count, 1, -0.5);
    must(ga_param_add(ctx_, group_, name, arrays_[arrays_.size() - 2].data(), dtype,
                      static_cast<int32_t>(shape.size()), shape.data(), &options, nullptr));
    gradients_.push_back(arrays_.back().data());
  }

  ga_context* ctx_ = nullptr;
  ga_group group_ = 0;
  ga_bn layers_ = 0;
  std::vector<Array> arrays_;  // of each parameter, its values and its gradient
  std::vector<const void*> gradients_;
  Array x_{GA_F32, kSamples*kChannels, -1, 0.5}, y_{GA_F32, kSamples*kChannels, 0, 0};
  uint64_t statuses_ = 1;  // of an act, as one number
};

// ---- Files --------------------------------------------------------------------------------------

// The four bytes in front of a file.
struct Choices {
  static constexpr size_t kBytes = 4;
  Kind kind;
  ga_state_options options;
  bool stepped;   // the context has made a step before
  bool repaired;  // the checksums are repaired
  bool open;      // the window is open when the file is loaded
  uint64_t seed;  // of the calls that follow the load

  explicit Choices(const uint8_t* bytes)
      : kind(static_cast<Kind>(bytes[0] % kKinds)),
        stepped((bytes[0] & 0x80) != 0),
        repaired((bytes[0] & 0x60) != 0x60),
        open(bytes[1] % 16 == 15),
        seed(bytes[2] + 256u * bytes[3]) {
    ga_state_options_init(&options, sizeof options);
    options.parts = (bytes[1] & 3) % 3;
    options.settings = (bytes[1] >> 2 & 3) % 3;
    options.allow_missing = bytes[1] >> 4 & 1;
    options.allow_extra = bytes[1] >> 5 & 1;
    options.unmarked = bytes[1] >> 6 & 1;
  }
};

// ---- The property -------------------------------------------------------------------------------

// A context that has loaded what another one has saved, and saves the same.
std::unique_ptr<Training> copy_of(const Training& training, Kind kind) {
  ga_state_options options;
  ga_state_options_init(&options, sizeof options);
  options.settings = GA_SETTINGS_TAKE;
  auto copy = std::make_unique<Training>(kind);
  const Bytes bytes = training.saved();
  if (ga_load_from_memory(copy->context(), bytes.data(), bytes.size(), &options) != GA_OK)
    fail("what was saved could not be loaded");
  if (copy->saved() != bytes) fail("what was loaded was saved with other bytes");
  return copy;
}

void go_on(Training& training, const Choices& choices) {
  const std::unique_ptr<Training> copy = copy_of(training, choices.kind);
  const auto both = [&](Training::Act act) {
    if (training.act(act) != copy->act(act)) fail("a copy returned another status");
  };
  Random random(choices.seed);
  for (size_t calls = random.below(6); calls > 0; --calls)
    both(static_cast<Training::Act>(random.below(Training::kActs)));
  if (training.window().state != GA_WINDOW_EMPTY && random.below(2) == 0) {
    both(Training::kWhole);
    both(Training::kStep);
  }
  if (training.window().state != GA_WINDOW_EMPTY) both(Training::kStep);
  both(Training::kDiscard);
  both(Training::kWhole);
  both(Training::kStep);
  if (training.saved() != copy->saved()) fail("a copy went on to other numbers");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  if (size < Choices::kBytes) return -1;
  const Choices choices(bytes);
  Bytes input(bytes + Choices::kBytes, bytes + size);
  File file;
  if (choices.repaired && file.read(input.data(), input.size())) {
    file.repair();
    input.clear();
    file.write(input);
  }
  Training training(choices.kind);
  if (choices.stepped) training.act(Training::kWhole), training.act(Training::kStep);
  if (choices.open) training.act(Training::kWhole);
  const Bytes before = training.saved();
  switch (ga_load_from_memory(training.context(), input.data(), input.size(), &choices.options)) {
    case GA_OK:
      if (choices.open) fail("a file was loaded into an open window");
      go_on(training, choices);
      return 0;
    case GA_ERROR_INVALID_ARGUMENT:
    case GA_ERROR_FORMAT:
    case GA_ERROR_INVALID_STATE:
    case GA_ERROR_OUT_OF_MEMORY:
    case GA_ERROR_UNSUPPORTED:
      if (training.saved() != before) fail("a load that failed has changed the context");
      return 0;
    default:
      fail("the load returned a status that is not documented");
  }
}

// ---- Mutations ----------------------------------------------------------------------------------

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

void mutate(std::string& text) {
  Bytes bytes(text.begin(), text.end());
  bytes.resize(text.size() + 16);
  bytes.resize(LLVMFuzzerMutate(bytes.data(), text.size(), bytes.size()));
  text.assign(bytes.begin(), bytes.end());
}

// Changes a number in "name=number name=number".
void mutate_number(std::string& text, Random& random) {
  std::vector<size_t> places;
  for (size_t at = 0; (at = text.find('=', at)) != text.npos;) places.push_back(++at);
  if (places.empty()) return mutate(text);
  const size_t at = places[random.below(places.size())];
  std::string number = text.substr(at, text.find(' ', at) - at);
  const size_t old = number.size();
  static constexpr const char* numbers[] = {"0",
                                            "1",
                                            "2",
                                            "3",
                                            "4",
                                            "7",
                                            "-1",
                                            "2147483647",
                                            "-2147483648",
                                            "4294967296",
                                            "9007199254740992",
                                            "9007199254740991",
                                            "9223372036854775807",
                                            "-9223372036854775808",
                                            "18446744073709551615",
                                            "0x0p+0",
                                            "-0x0p+0",
                                            "0x1p+0",
                                            "-0x1p+0",
                                            "0x1p-1",
                                            "0x1p-1074",
                                            "0x1.fffffffffffffp+1023",
                                            "0x1p+128",
                                            "0x1p-140",
                                            "inf",
                                            "-inf",
                                            "nan"};
  if (random.below(4) == 0)
    mutate(number);
  else
    number = numbers[random.below(std::size(numbers))];
  text.replace(at, old, number);
}

// Changes some elements of the data.
void mutate_elements(Bytes& data, const ga::safetensors::Tensor& t, Random& random) {
  const auto size = static_cast<size_t>(ga::safetensors::element_size(t.dtype));
  const auto begin = static_cast<size_t>(t.begin), bytes = static_cast<size_t>(t.end - t.begin);
  if (bytes == 0) return;
  if (size != 8 || random.below(4) == 0) {
    LLVMFuzzerMutate(data.data() + begin, bytes, bytes);
    return;
  }
  static constexpr double doubles[] = {0,      -0.0,    1,       -1,  2,        3,        4,
                                       7,      0.5,     0.25,    10,  1e300,    -1e300,   1e-300,
                                       5e-324, 0x1p+53, 0x1p+31, NAN, HUGE_VAL, -HUGE_VAL};
  static constexpr int64_t integers[] = {
      0, 1, 2, 3, 4, 5, 6, 7, -1, -2, INT64_MAX, INT64_MIN, 1 << 30, int64_t{1} << 53};
  const size_t at = begin + 8 * random.below(bytes / 8);
  if (t.dtype == "F64")
    std::memcpy(data.data() + at, &doubles[random.below(std::size(doubles))], 8);
  else
    std::memcpy(data.data() + at, &integers[random.below(std::size(integers))], 8);
}

void mutate(Header& header, Bytes& data, Random& random) {
  auto& texts = header.metadata;
  auto& tensors = header.tensors;
  std::vector<Bytes> pieces;  // of the data, by tensor
  for (const auto& t : tensors) pieces.emplace_back(data.begin() + t.begin, data.begin() + t.end);
  const size_t what = random.below(16);
  if (what < 7 && texts.size() > 3) {
    auto& [key, text] = texts[3 + random.below(texts.size() - 3)];
    if (what < 5)
      mutate_number(text, random);
    else if (what == 5)
      mutate(random.below(4) == 0 ? key : text);
    else if (random.below(2) == 0)
      texts.erase(texts.begin() + static_cast<std::ptrdiff_t>(3 + random.below(texts.size() - 3)));
    else
      text = texts[3 + random.below(texts.size() - 3)].second;
  } else if (!tensors.empty()) {
    const size_t k = random.below(tensors.size());
    auto& t = tensors[k];
    const auto at = static_cast<std::ptrdiff_t>(k);
    if (what < 11) return mutate_elements(data, t, random);
    if (what == 11) {
      tensors.erase(tensors.begin() + at);
      pieces.erase(pieces.begin() + at);
    } else if (what == 12) {
      static constexpr const char* dtypes[] = {"F32", "F64", "F16", "BF16", "I32", "I64", "U8"};
      t.dtype = dtypes[random.below(std::size(dtypes))];
    } else if (what == 13 && !t.shape.empty()) {
      t.shape[random.below(t.shape.size())] = static_cast<int64_t>(random.below(9));
    } else if (what == 14) {
      if (random.below(2) == 0 || t.shape.empty())
        t.shape.push_back(1);
      else
        t.shape.pop_back();
    } else {
      static constexpr const char* ends[] = {".step",    ".master",  ".grad_accum.window",
                                             ".average", ".exp_avg", ".grad_accum.rows",
                                             "",         "_low",     ".bn_window"};
      static constexpr const char* begins[] = {"",
                                               "",
                                               "",
                                               "gradaccum.rank.1.",
                                               "gradaccum.rank.2.",
                                               "gradaccum.rank.3.",
                                               "gradaccum.rank.01.",
                                               "gradaccum.rank."};
      const size_t dot = t.name.find('.');
      t.name = begins[random.below(std::size(begins))] +
               (random.below(2) == 0 ? t.name : t.name.substr(0, dot)) +
               ends[random.below(std::size(ends))];
    }
  }
  data.clear();
  for (size_t k = 0; k < tensors.size(); ++k) {
    auto& t = tensors[k];
    int64_t bytes = ga::safetensors::element_size(t.dtype);
    for (const int64_t n : t.shape) bytes *= n;
    if (bytes > 4096) bytes = 4096;
    t.begin = static_cast<int64_t>(data.size());
    pieces[k].resize(static_cast<size_t>(bytes));
    data.insert(data.end(), pieces[k].begin(), pieces[k].end());
    t.end = static_cast<int64_t>(data.size());
  }
}

void write_corpus(const std::string& folder) {
  const auto write = [&](const std::string& name, Kind kind, uint8_t options, const Bytes& file) {
    std::ofstream out(folder + "/" + name, std::ios::binary);
    const char choices[Choices::kBytes] = {static_cast<char>(kind), static_cast<char>(options), 0,
                                           0};
    out.write(choices, sizeof choices);
    out.write(reinterpret_cast<const char*>(file.data()),
              static_cast<std::streamsize>(file.size()));
    if (!out.flush()) fail("the corpus could not be written");
  };
  static constexpr const char* names[] = {"plain",  "average", "masters", "rows",
                                          "layers", "checked", "chance",  "groups"};
  for (int k = 0; k < kKinds; ++k) {
    const auto kind = static_cast<Kind>(k);
    const std::string name = names[k];
    Training training(kind);
    training.act(Training::kWhole);
    training.act(Training::kStep);
    write(name + "_empty", kind, 0, training.saved());
    if (kind == kLayers) {
      training.act(Training::kSweep);
      write(name + "_sweep", kind, 4, training.saved());
      training.act(Training::kFinalize);
      training.act(Training::kBackward);
    } else {
      training.act(Training::kParts);
      if (kind == kChecked) training.act(Training::kBackward);
    }
    write(name + "_open", kind, 4, training.saved());
    std::vector<Bytes> files;
    for (int rank = 0; rank < 3; ++rank) {
      Training of_rank(kind);
      of_rank.act(Training::kWhole);
      of_rank.act(Training::kStep);
      if (rank != 1) of_rank.act(kind == kLayers ? Training::kBackward : Training::kParts);
      if (kind == kChecked) of_rank.act(Training::kBackward);
      files.push_back(of_rank.saved());
    }
    write(name + "_ranks", kind, 4, ga::test::file_of_ranks(files));
    if (kind == kMasters) {
      write(name + "_library", kind, 1, training.saved(GA_STATE_LIBRARY));
      write(name + "_parameters", kind, 2, training.saved(GA_STATE_PARAMETERS));
    }
  }
  Header header = {{}, {{"b", "F32", {3}, 0, 12}, {"w", "F32", {2, 3}, 12, 36}}};
  const auto write_plain = [&](const char* name, uint8_t options) {
    const std::string begin = ga::safetensors::write(header);
    Bytes file(begin.begin(), begin.end());
    file.resize(file.size() + 36);
    write(name, kPlain, options, file);
  };
  write_plain("model_file", 0x70);
  header.metadata = {{"gradaccum.format", "1 unchecked"}};
  write_plain("of_another_program", 0x10);
}

}  // namespace

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* bytes, size_t size, size_t max_size,
                                          unsigned int seed) {
  Random random(seed);
  File file;
  Header header;
  if (size < Choices::kBytes || random.below(12) == 0 ||
      !file.read(bytes + Choices::kBytes, size - Choices::kBytes))
    return LLVMFuzzerMutate(bytes, size, max_size);
  if (random.below(6) == 0) {
    bytes[random.below(Choices::kBytes)] = static_cast<uint8_t>(random.below(256));
    return size;
  }
  if (random.below(16) == 0 || !file.parse(header)) {
    mutate(file.text);
  } else {
    try {
      mutate(header, file.data, random);
      const std::string begin = ga::safetensors::write(header);
      file.text = begin.substr(kLengthBytes);
    } catch (const ga::Error&) {  // a name that is not UTF-8, for example
      return LLVMFuzzerMutate(bytes, size, max_size);
    }
  }
  file.repair();
  Bytes mutated(bytes, bytes + Choices::kBytes);
  file.write(mutated);
  if (mutated.size() > max_size) return LLVMFuzzerMutate(bytes, size, max_size);
  std::memcpy(bytes, mutated.data(), mutated.size());
  return mutated.size();
}

// Without long stacks of each allocation, a run takes half the time.
extern "C" const char* __asan_default_options() {
  return "malloc_context_size=4:quarantine_size_mb=16";
}

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  if (*argc == 3 && std::string((*argv)[1]) == "--write-corpus") {
    write_corpus((*argv)[2]);
    std::exit(0);
  }
  return 0;
}
