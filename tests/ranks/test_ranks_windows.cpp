// SPDX-License-Identifier: Apache-2.0
//
// Open windows of several ranks in one file: as many ranks go on with the same bits, any other number with
// the same sums. Three ranks save in the third of four windows, when the first has brought one micro-batch of
// three, the second none of one and the third three of four.
#include <cstdio>
#include <list>
#include <optional>

#include "batchnorm.hpp"
#include "files.hpp"
#include "ranks.hpp"
#include "state_parts.hpp"

namespace ga::test {
namespace {

constexpr int32_t kShares = 3;
constexpr size_t kWindows = 4, kOpen = 2;
constexpr size_t kCounts[kWindows][kShares] = {{1, 2, 0}, {2, 1, 3}, {3, 1, 4}, {1, 0, 2}};
constexpr size_t kSaved[kShares] = {1, 0, 3};  // micro-batches of window kOpen

// ---- A run that may be stopped --------------------------------------------------------------------

struct Case {
  const char* name = "";
  ga_config config = test::config();
  ga_optimizer optimizer = test::optimizer(GA_OPTIMIZER_ADAMW);
  std::optional<ga_clip> clip;
  int32_t half = 0;   // the accumulator's dtype of one parameter
  bool rows = false;  // with two parameters whose gradients have rows
  bool scaler = false, ema = false, cumulative = true;
  bool drops = false;    // some gradients are NaN
  int64_t largest = 8;   // gradients are integers up to this one
  double fraction = 0;   // and a random part of it
  double tolerance = 0;  // of parameters on another number of ranks, in units of the largest
  ga_comm_options options = comm_options();

  Case with(int32_t shard) const {
    Case s = *this;
    s.options.shard = shard;
    return s;
  }
};

using Tensors = std::vector<std::vector<float>>;

class Net {
 public:
  enum { kLarge, kHalf, kLate, kGamma, kBeta, kRows, kMixed };

  explicit Net(const Case& s, ga_comm* comm = nullptr) : setup_(s), ctx(s.config) {
    const ga_group group = ctx.group(s.optimizer);
    if (s.clip) {
      EXPECT_OK(ga_context_set_clip(ctx, &*s.clip));
    }
    if (s.scaler) {
      ga_loss_scaler scaler;
      EXPECT_OK(ga_loss_scaler_init(&scaler, sizeof scaler));
      scaler.initial_scale = 16;
      scaler.growth_interval = 2;
      EXPECT_OK(ga_context_set_loss_scaler(ctx, &scaler));
    }
    if (s.ema) {
      ga_ema ema;
      EXPECT_OK(ga_ema_init(&ema, sizeof ema));
      EXPECT_OK(ga_context_set_ema(ctx, &ema));
    }
    shapes_ = {{90001}, {33, 5}, {5}, {3}, {3}};
    if (s.rows) shapes_.insert(shapes_.end(), {{60, 7}, {40, 3}});
    shapes_.push_back({311});  // of maxima
    maxima_ = static_cast<ga_param>(shapes_.size()) - 1;
    const ga_group external = ctx.group(test::optimizer(GA_OPTIMIZER_EXTERNAL));
    Random random(7);
    for (size_t i = 0; i < shapes_.size(); ++i) {
      params.emplace_back(static_cast<size_t>(ref::count_of(shapes_[i])));
      for (float& x : params.back()) x = static_cast<float>(random.signed_unit());
      ga_param_options o;
      EXPECT_OK(ga_param_options_init(&o, sizeof o));
      const bool maxima = i + 1 == shapes_.size();
      if (i == kHalf || maxima) o.accumulator_dtype = s.half;
      if (i >= kRows && !maxima) o.rows = GA_ROWS_DENSE;
      if (maxima) o.reduce = GA_REDUCE_MAX;
      ctx.param(maxima ? external : group, "p" + std::to_string(i), params.back().data(),
                shapes_[i], &o);
    }
    ga_bn_options o = bn_options(GA_BN_MICRO);
    EXPECT_OK(ga_bn_add(ctx, "norm", 3, kGamma, kBeta, &o, nullptr));
    o.mode = GA_BN_CUMULATIVE;
    if (s.cumulative) {
      EXPECT_OK(ga_bn_add(ctx, "sums", 2, -1, -1, &o, nullptr));
    }
    if (comm) {
      EXPECT_OK(ga_context_set_comm(ctx, comm, &s.options));
    }
  }

  // Micro-batch k of a share of a window.
  void contribute(size_t w, int32_t share, size_t k, uint32_t flags = 0) {
    Random random(1000 * w + 100 * static_cast<uint64_t>(share) + k);
    double scale = 1;
    EXPECT_OK(ga_loss_scale(ctx, &scale, nullptr));
    const auto numbers = [&](int64_t count) {
      std::vector<float>& g = kept_.emplace_back(static_cast<size_t>(count));
      for (float& x : g)
        x = static_cast<float>(
            scale * (static_cast<double>(random.below(2 * setup_.largest + 1) - setup_.largest) +
                     setup_.fraction * random.signed_unit()));
      return g.data();
    };
    ASSERT_OK(
        ga_micro_begin(ctx, -1, static_cast<double>(1 + (k + w) % 3), MicroOptions(0, flags)));
    const bool drops = setup_.drops && (w + k + static_cast<size_t>(share)) % 3 == 0;
    for (ga_param id = 0; id < static_cast<ga_param>(shapes_.size()); ++id) {
      const int64_t count = ref::count_of(shapes_[static_cast<size_t>(id)]);
      if ((id == kLate && share != 2) || id == kGamma || id == kBeta) continue;
      if (id != maxima_ && (id == kMixed ? share == 0 : id == kRows)) {
        std::vector<int64_t> rows;
        for (int j = 0; j < 9; ++j)
          rows.push_back(random.below(shapes_[static_cast<size_t>(id)][0]));
        ASSERT_OK(ga_accumulate_rows(ctx, id, kept_rows_.emplace_back(rows).data(), GA_I64, 9,
                                     numbers(9 * shapes_[static_cast<size_t>(id)][1])));
        continue;
      }
      float* const g = numbers(count);
      if (drops && id == kHalf) g[3] = NAN;
      ASSERT_OK(ga_accumulate_part(ctx, id, g));
    }
    const auto samples = static_cast<int64_t>(2 + k % 2);
    std::vector<float> x, y(static_cast<size_t>(3 * samples)), dy;
    for (float& unused : y) {
      (void)unused;
      x.push_back(static_cast<float>(3 + random.signed_unit()));
      dy.push_back(static_cast<float>(scale * random.signed_unit()));
    }
    ASSERT_OK(ga_bn_forward(ctx, 0, x.data(), samples, 1, y.data()));
    ASSERT_OK(ga_bn_backward(ctx, 0, x.data(), dy.data(), samples, 1, y.data()));
    if (setup_.cumulative) {
      ASSERT_OK(ga_bn_forward(ctx, 1, x.data(), samples, 1, y.data()));
    }
    ASSERT_OK(ga_micro_end(ctx));
  }

  void step() {
    results.push_back(test::step(ctx));
    const void* data = nullptr;
    ga_dtype dtype = 0;
    int64_t count = 0;
    ASSERT_OK(ga_gradient(ctx, maxima_, &data, &dtype, &count));
    const auto bytes = from_library<char>(data, count * (dtype == GA_F32 ? 4 : 2));
    maxima.emplace_back(bytes.begin(), bytes.end());
    for (ga_bn bn = 0; bn < (setup_.cumulative ? 2 : 1); ++bn)
      running.emplace_back(ctx, bn, 3 - bn);
    kept_.clear();
    kept_rows_.clear();
  }

  // The shares of a rank, from micro-batch begin[share] on.
  void contribute_from(size_t w, const size_t (&begin)[kShares], const size_t (&end)[kShares],
                       int32_t rank, int32_t ranks) {
    for (int32_t share = rank; share < kShares; share += ranks)
      for (size_t k = begin[share]; k < end[share]; ++k) contribute(w, share, k);
  }

  std::string saved(const ga_state_options* o = nullptr) {
    size_t size = 0;
    EXPECT_OK(ga_save_to_memory(ctx, o, nullptr, 0, &size));
    std::string bytes(size, '\0');
    EXPECT_OK(ga_save_to_memory(ctx, o, bytes.data(), bytes.size(), &size));
    return bytes;
  }
  ga_status load(const std::string& bytes, const ga_state_options* o = nullptr) {
    return ga_load_from_memory(ctx, bytes.data(), bytes.size(), o);
  }

 private:
  const Case setup_;
  std::vector<ref::Shape> shapes_;
  ga_param maxima_ = -1;
  std::list<std::vector<float>> kept_;  // until the end of the window
  std::list<std::vector<int64_t>> kept_rows_;

 public:
  Tensors params;
  Context ctx;
  std::vector<ga_step_result> results;
  std::vector<Running> running;
  std::vector<std::string> maxima;  // the bytes of each window's
};

constexpr size_t kNone[kShares] = {0, 0, 0};

struct Ended {
  Tensors params;
  std::vector<ga_step_result> results;  // of the windows from kOpen on
  std::vector<Running> running;
  std::vector<std::string> maxima;
  std::string file;  // what is saved at the end
};

Ended end_of(Net& net) {
  const auto last = [](auto& list, size_t count) {
    list.erase(list.begin(), list.end() - static_cast<std::ptrdiff_t>(count));
    return list;
  };
  const size_t layers = net.running.size() / net.results.size();
  Ended e = {net.params, last(net.results, kWindows - kOpen),
             last(net.running, layers * (kWindows - kOpen)), last(net.maxima, kWindows - kOpen),
             ""};
  e.file = net.saved();
  return e;
}

// Runs body as each of these ranks; a context that is alone has no communicator.
void as_ranks(int32_t ranks, const std::function<void(int32_t, ga_comm*)>& body) {
  if (ranks == 1)
    body(0, nullptr);
  else
    on_ranks(ranks, body);
}

// The first two windows.
void begin(Net& net, int32_t rank, int32_t ranks) {
  for (size_t w = 0; w < kOpen; ++w) {
    net.contribute_from(w, kNone, kCounts[w], rank, ranks);
    net.step();
  }
  net.contribute_from(kOpen, kNone, kSaved, rank, ranks);
}

void go_on(Net& net, int32_t rank, int32_t ranks) {
  net.contribute_from(kOpen, kSaved, kCounts[kOpen], rank, ranks);
  net.step();
  for (size_t w = kOpen + 1; w < kWindows; ++w) {
    net.contribute_from(w, kNone, kCounts[w], rank, ranks);
    net.step();
  }
}

// A run that is never stopped; if `file`, it saves on its way.
std::vector<Ended> whole(const Case& s, int32_t ranks = kShares, std::string* file = nullptr) {
  std::vector<Ended> ended(static_cast<size_t>(ranks));
  as_ranks(ranks, [&](int32_t r, ga_comm* comm) {
    Net net(s, comm);
    begin(net, r, ranks);
    if (file) {
      const std::string bytes = net.saved();
      EXPECT_TRUE(net.saved() == bytes);  // saving twice gives the same bytes
      if (r == 0) *file = bytes;
    }
    go_on(net, r, ranks);
    ended[static_cast<size_t>(r)] = end_of(net);
  });
  return ended;
}

// What ranks that load the file go on to.
std::vector<Ended> resumed(const Case& s, const std::string& file, int32_t ranks) {
  std::vector<Ended> ended(static_cast<size_t>(ranks));
  as_ranks(ranks, [&](int32_t r, ga_comm* comm) {
    Net net(s, comm);
    for (auto& p : net.params) std::fill(p.begin(), p.end(), -77.0f);
    ASSERT_OK(net.load(file));
    go_on(net, r, ranks);
    ended[static_cast<size_t>(r)] = end_of(net);
  });
  return ended;
}

void expect_same(const Ended& got, const Ended& want) {
  for (size_t i = 0; i < want.params.size(); ++i)
    EXPECT_TRUE(same_bits(got.params[i], want.params[i])) << "parameter " << i;
  ASSERT_EQ(got.results.size(), want.results.size());
  for (size_t w = 0; w < want.results.size(); ++w)
    EXPECT_EQ(memcmp(&got.results[w], &want.results[w], sizeof(ga_step_result)), 0) << w;
  for (size_t k = 0; k < want.running.size(); ++k)
    EXPECT_TRUE(got.running[k] == want.running[k]) << k;
  EXPECT_TRUE(got.maxima == want.maxima);
  EXPECT_TRUE(got.file == want.file);
}

void expect_close(const std::vector<double>& got, const std::vector<double>& want,
                  double tolerance) {
  ASSERT_EQ(got.size(), want.size());
  double largest = 0, most = 0;
  for (size_t j = 0; j < want.size(); ++j) {
    largest = std::max(largest, std::abs(want[j]));
    const double distance = std::abs(got[j] - want[j]);
    most = distance <= most ? most : distance;  // keeps a NaN
  }
  EXPECT_LE(most, tolerance * largest);
}

void expect_close(const Ended& got, const Ended& want, double tolerance) {
  for (size_t i = 0; i < want.params.size(); ++i) {
    SCOPED_TRACE("parameter " + std::to_string(i));
    const bool rounds = i == Net::kGamma || i == Net::kBeta;  // also where all others are exact
    expect_close({got.params[i].begin(), got.params[i].end()},
                 {want.params[i].begin(), want.params[i].end()},
                 rounds ? std::max(tolerance, 2e-6) : tolerance);
  }
  ASSERT_EQ(got.results.size(), want.results.size());
  for (size_t w = 0; w < want.results.size(); ++w) {
    SCOPED_TRACE("window " + std::to_string(w));
    const ga_step_result &a = got.results[w], &b = want.results[w];
    const double close = std::max(tolerance, 1e-6);
    EXPECT_EQ(a.outcome, b.outcome);
    EXPECT_EQ(a.weight, b.weight);
    EXPECT_EQ(a.micro_batches, b.micro_batches);
    EXPECT_EQ(a.window_dropped, b.window_dropped);
    EXPECT_EQ(a.dropped, b.dropped);
    EXPECT_EQ(a.steps, b.steps);
    EXPECT_EQ(a.loss_scale, b.loss_scale);
    EXPECT_NEAR(a.norm, b.norm, close * b.norm);
    EXPECT_NEAR(a.clip_factor, b.clip_factor, close);
    EXPECT_EQ(std::isnan(a.noise_scale), std::isnan(b.noise_scale));
    if (!std::isnan(b.noise_scale)) {
      EXPECT_NEAR(a.noise_trace, b.noise_trace, 1e-5 * std::abs(b.noise_trace));
      EXPECT_NEAR(a.noise_signal, b.noise_signal, 1e-5 * std::abs(b.noise_trace));
    }
  }
  EXPECT_TRUE(got.maxima == want.maxima);
  ASSERT_EQ(got.running.size(), want.running.size());
  for (size_t k = 0; k < want.running.size(); ++k) {
    EXPECT_EQ(got.running[k].steps, want.running[k].steps);
    expect_close(got.running[k].mean, want.running[k].mean, 1e-12);
    expect_close(got.running[k].variance, want.running[k].variance, 1e-12);
  }
}

// ---- Ways to accumulate ---------------------------------------------------------------------------

class RanksWindows : public testing::TestWithParam<Case> {};

// Gradients with a fraction, so that sums round.
TEST_P(RanksWindows, AsManyRanksGoOnWithTheSameBits) {
  Case s = GetParam();
  s.fraction = 0.5;
  std::string files[2];
  for (const int32_t shard : {GA_SHARD_NONE, GA_SHARD_OPTIMIZER}) {
    SCOPED_TRACE(shard == GA_SHARD_NONE ? "whole" : "sharded");
    const std::vector<Ended> want = whole(s.with(shard));
    std::string& file = files[shard == GA_SHARD_NONE ? 0 : 1];
    const std::vector<Ended> saving = whole(s.with(shard), kShares, &file);
    const std::vector<Ended> got = resumed(s.with(shard), file, kShares);
    for (size_t r = 0; r < kShares; ++r) {
      SCOPED_TRACE("rank " + std::to_string(r));
      for (size_t i = 0; i < want[0].params.size(); ++i)
        EXPECT_TRUE(same_bits(want[r].params[i], want[0].params[i])) << "parameter " << i;
      {
        SCOPED_TRACE("saved on its way");
        expect_same(saving[r], want[r]);
      }
      expect_same(got[r], want[r]);
    }
    EXPECT_NE(file.find("\"gradaccum.ranks\":\"3\""), std::string::npos);
    EXPECT_NE(want[0].file.find("\"gradaccum.ranks\":\"1\""), std::string::npos);
  }
  EXPECT_TRUE(files[0] == files[1]);
}

// Integers, whose sums are exact in any order, unless the way to accumulate divides.
TEST_P(RanksWindows, AnyOtherNumberGoesOnWithTheSameSums) {
  const Case& s = GetParam();
  std::string file;
  const std::vector<Ended> want = whole(s, kShares, &file);
  for (const int32_t ranks : {1, 2, 4})
    for (const int32_t shard : {GA_SHARD_NONE, GA_SHARD_OPTIMIZER}) {
      if (ranks == 1 && shard != GA_SHARD_NONE) continue;
      SCOPED_TRACE(std::to_string(ranks) + (shard == GA_SHARD_NONE ? " whole" : " sharded"));
      const std::vector<Ended> got = resumed(s.with(shard), file, ranks);
      for (size_t r = 0; r < got.size(); ++r) {
        SCOPED_TRACE("rank " + std::to_string(r));
        expect_close(got[r], want[0], s.tolerance);
        for (size_t i = 0; i < want[0].params.size(); ++i)
          EXPECT_TRUE(same_bits(got[r].params[i], got[0].params[i]));
      }
    }
}

// From one context to several, and back from several to one.
TEST_P(RanksWindows, AloneAndBack) {
  const Case& s = GetParam();
  std::string file, again;
  const std::vector<Ended> want = whole(s, 1, &file);
  EXPECT_NE(file.find("\"gradaccum.ranks\":\"1\""), std::string::npos);
  const std::vector<Ended> got = resumed(s, file, 2);
  expect_close(got[0], want[0], s.tolerance);
  expect_close(got[1], want[0], s.tolerance);
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Net net(s, comm);
    ASSERT_OK(net.load(file));
    const std::string bytes = net.saved();
    if (r == 0) again = bytes;
  });
  expect_close(resumed(s, again, 1)[0], want[0], s.tolerance);
}

// Windows that have come together are saved and spread once more.
TEST_P(RanksWindows, OnceMoreFromAnotherNumber) {
  const Case& s = GetParam();
  std::string file, next;
  const std::vector<Ended> want = whole(s, kShares, &file);
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Net net(s, comm);
    ASSERT_OK(net.load(file));
    const std::string bytes = net.saved();
    if (r == 0) next = bytes;
    Net other(s);
    EXPECT_OK(other.load(bytes));
  });
  EXPECT_NE(next.find("\"gradaccum.ranks\":\"2\""), std::string::npos);
  expect_close(resumed(s, next, kShares)[1], want[0], s.tolerance);
  expect_close(resumed(s, next, 2)[1], want[0], s.tolerance);
}

std::vector<Case> setups() {
  std::vector<Case> list;
  const auto add = [&](const char* name, auto set) {
    Case s;
    s.name = name;
    set(s);
    list.push_back(s);
  };
  add("plain", [](Case& s) { s.rows = s.ema = s.scaler = true; });
  add("checked", [](Case& s) {
    s.config.nonfinite = GA_NONFINITE_DROP_MICRO;
    s.drops = s.rows = s.scaler = true;
    s.cumulative = false;
  });
  add("sums", [](Case& s) {
    s.config.gradient_kind = GA_GRADIENT_SUM;
    s.config.reduce = GA_REDUCE_SUM;
    s.rows = true;
  });
  add("live", [](Case& s) {
    s.config.gradient_life = GA_GRADIENTS_LIVE;
    s.scaler = true;
  });
  add("compensated", [](Case& s) {
    s.config.accumulation = GA_ACCUMULATE_COMPENSATED;
    s.half = GA_BF16;
    s.largest = 1000;  // sums need both halves of a pair
    s.ema = true;
  });
  add("narrow", [](Case& s) { s.half = GA_F16; });
  add("stochastic", [](Case& s) {
    s.config.accumulation = GA_ACCUMULATE_STOCHASTIC;
    s.config.seed = 3;
    s.half = GA_BF16;
  });
  add("running_mean", [](Case& s) {
    s.config.accumulation = GA_ACCUMULATE_RUNNING_MEAN;
    s.optimizer = plain_sgd(0.01);
    s.tolerance = 1e-6;
  });
  add("checked_running_mean", [](Case& s) {
    s.config.accumulation = GA_ACCUMULATE_RUNNING_MEAN;
    s.config.nonfinite = GA_NONFINITE_DROP_MICRO;
    s.optimizer = plain_sgd(0.01);
    s.drops = true;
    s.cumulative = false;
    s.tolerance = 1e-6;
  });
  add("noise_scale", [](Case& s) { s.config.noise_scale = 1; });
  add("noise_scale_of_running_means", [](Case& s) {
    s.config.noise_scale = 1;
    s.config.accumulation = GA_ACCUMULATE_RUNNING_MEAN;
    s.optimizer = plain_sgd(0.01);
    s.tolerance = 1e-6;
  });
  add("clipped", [](Case& s) {
    s.clip = clip(GA_CLIP_GLOBAL, 0.5, GA_FLAVOR_TORCH, 4);
    s.optimizer = plain_sgd(0.1);
    s.rows = true;
    s.tolerance = 1e-6;
  });
  add("clipped_micro_batches", [](Case& s) {
    s.clip = clip(GA_CLIP_GLOBAL, 0.5);
    s.clip->when = GA_CLIP_WHEN_MICRO;
    s.optimizer = plain_sgd(0.1);
    s.tolerance = 1e-6;
  });
  return list;
}

INSTANTIATE_TEST_SUITE_P(All, RanksWindows, testing::ValuesIn(setups()),
                         [](const auto& info) { return info.param.name; });

// ---- Files as a test changes them ------------------------------------------------------------------

// A file with another header, whose checksums are right.
std::string edited(const std::string& file,
                   const std::function<void(safetensors::Header&)>& change) {
  StateParts parts;
  safetensors::Header header;
  EXPECT_TRUE(parts.read(file.data(), file.size()) && parts.parse(header));
  change(header);
  parts.text = safetensors::write(header).substr(safetensors::kLengthBytes);
  parts.repair();
  std::string result;
  parts.write(result);
  return result;
}

std::string& text_of(safetensors::Header& header, const std::string& key) {
  for (auto& [name, text] : header.metadata)
    if (name == "gradaccum." + key) return text;
  ADD_FAILURE() << "no text " << key;
  return header.metadata[0].second;
}
safetensors::Tensor& tensor_of(safetensors::Header& header, const std::string& name) {
  for (auto& t : header.tensors)
    if (t.name == name) return t;
  ADD_FAILURE() << "no tensor " << name;
  return header.tensors[0];
}

// ---- What a window is on another number of ranks ----------------------------------------------------

// A context of one parameter.
struct Small {
  explicit Small(const ga_config& c = config(), int32_t accumulator = 0, int64_t count = 1)
      : ctx(c), p(static_cast<size_t>(count)) {
    ga_param_options o;
    EXPECT_OK(ga_param_options_init(&o, sizeof o));
    o.accumulator_dtype = accumulator;
    ctx.param(ctx.group(plain_sgd()), "p", p.data(), ref::Shape{count}, &o);
  }
  void contribute(float g, double weight = 1, uint32_t flags = 0) {
    const std::vector<float> all(p.size(), g);
    const void* list[] = {all.data()};
    EXPECT_OK(ga_accumulate(ctx, list, 1, weight, MicroOptions(0, flags)));
  }
  std::string saved() {
    size_t size = 0;
    EXPECT_OK(ga_save_to_memory(ctx, nullptr, nullptr, 0, &size));
    std::string bytes(size, '\0');
    EXPECT_OK(ga_save_to_memory(ctx, nullptr, bytes.data(), bytes.size(), &size));
    return bytes;
  }
  ga_status load(const std::string& bytes, const ga_state_options* o = nullptr) {
    return ga_load_from_memory(ctx, bytes.data(), bytes.size(), o);
  }

  Context ctx;
  std::vector<float> p;
};

// What ranks have saved, of which each has made these calls.
std::string saved_by(int32_t ranks, const ga_config& c,
                     const std::function<void(Small&, int32_t)>& body, int32_t accumulator = 0,
                     int64_t count = 1) {
  std::string file;
  on_ranks(ranks, [&](int32_t r, ga_comm* comm) {
    Small s(c, accumulator, count);
    ASSERT_OK(ga_context_set_comm(s.ctx, comm, nullptr));
    body(s, r);
    const std::string bytes = s.saved();
    if (r == 0) file = bytes;
  });
  return file;
}

TEST(RanksWindow, KMustAllowWhatComesTogether) {
  const std::string file = saved_by(3, config(), [](Small& s, int32_t r) {
    for (int k = 0; k < (r == 1 ? 0 : r + 2); ++k) s.contribute(1);
  });
  for (const int64_t k : {5, 6}) {  // micro-batches 0 and 1 are rank 0's, the others rank 2's
    ga_config c = config();
    c.accum_steps = k;
    Small alone(c);
    EXPECT_EQ(alone.load(file), k < 6 ? GA_ERROR_INVALID_ARGUMENT : GA_OK);
    if (k < 6) {
      EXPECT_NE(std::string(ga_last_error())
                    .find("windows of 3 ranks, which come together on this "
                          "one, hold 6 micro-batches, but K (accum_steps) is 5"),
                std::string::npos)
          << ga_last_error();
      EXPECT_EQ(window(alone.ctx).state, GA_WINDOW_EMPTY);
    } else {
      EXPECT_EQ(window(alone.ctx).state, GA_WINDOW_FULL);
      EXPECT_EQ(window(alone.ctx).weight, 6);
    }
    on_ranks(2, [&](int32_t r, ga_comm* comm) {
      Small s(c);
      ASSERT_OK(ga_context_set_comm(s.ctx, comm, nullptr));
      const ga_status status = s.load(file);
      EXPECT_EQ(status, k == 6   ? GA_OK
                        : r == 0 ? GA_ERROR_INVALID_ARGUMENT
                                 : GA_ERROR_COMMUNICATION);
      EXPECT_EQ(window(s.ctx).micro_batches, k == 6 && r == 0 ? 6 : 0);
    });
  }
}

// A window is full where all of its parts were.
TEST(RanksWindow, TheLastMicroBatchIsThatOfEveryRank) {
  for (const bool all : {false, true}) {
    const std::string file = saved_by(3, config(), [&](Small& s, int32_t r) {
      if (r == 1) return;
      s.contribute(1);
      s.contribute(1, 1, r == 2 || all ? GA_MICRO_LAST : 0);
    });
    Small alone;
    ASSERT_OK(alone.load(file));
    EXPECT_EQ(window(alone.ctx).state, all ? GA_WINDOW_FULL : GA_WINDOW_OPEN);
    on_ranks(3, [&](int32_t r, ga_comm* comm) {
      Small s;
      ASSERT_OK(ga_context_set_comm(s.ctx, comm, nullptr));
      ASSERT_OK(s.load(file));
      const ga_window_state want = r == 1          ? GA_WINDOW_EMPTY
                                   : all || r == 2 ? GA_WINDOW_FULL
                                                   : GA_WINDOW_OPEN;
      EXPECT_EQ(window(s.ctx).state, want) << r;
    });
  }
}

TEST(RanksWindow, DroppedMicroBatchesHaveTheirNumbers) {
  ga_config c = config();
  c.nonfinite = GA_NONFINITE_DROP_MICRO;
  const std::string file = saved_by(2, c, [](Small& s, int32_t r) {
    s.contribute(2);
    s.contribute(r == 0 ? 4 : NAN);
    s.contribute(r == 0 ? NAN : 6, 2);
  });
  Small alone(c);
  ASSERT_OK(alone.load(file));
  alone.contribute(NAN);
  const ga_step_result r = step(alone.ctx);
  EXPECT_EQ(r.dropped_micros, 1u << 2 | 1u << 4 | 1u << 6);
  EXPECT_EQ(r.window_dropped, 3);
  EXPECT_EQ(r.micro_batches, 7);
  EXPECT_EQ(r.weight, 5);
  EXPECT_EQ(alone.p[0], -(2 + 4 + 2 + 2 * 6) / 5.0f);
}

ga_step_result last_result(ga_context* ctx) {
  ga_step_result r;
  EXPECT_OK(ga_step_result_init(&r, sizeof r));
  EXPECT_OK(ga_step_result_get(ctx, 0, 1, &r));
  return r;
}

// A result that was loaded is that of the rank, where as many ranks load it as have saved it; else that of
// rank 0, of whose micro-batches only rank 0 is told which were dropped.
TEST(RanksWindow, ResultsHaveTheirOwnDroppedMicroBatches) {
  const Folder folder;
  ga_config c = config();
  c.nonfinite = GA_NONFINITE_DROP_MICRO;
  for (const bool shard : {false, true}) {
    ga_comm_options o = comm_options();
    o.shard = shard ? GA_SHARD_OPTIMIZER : GA_SHARD_NONE;
    std::vector<ga_step_result> before(3);
    on_ranks(3, [&](int32_t r, ga_comm* comm) {
      Small s(c);
      ASSERT_OK(ga_context_set_comm(s.ctx, comm, &o));
      for (int32_t k = 0; k < 5; ++k) s.contribute(k == r + 1 ? NAN : 1);
      step(s.ctx);
      before[static_cast<size_t>(r)] = last_result(s.ctx);
      EXPECT_EQ(before[static_cast<size_t>(r)].dropped_micros, 2u << r);
      ASSERT_OK(ga_save(s.ctx, (folder / "state").c_str(), nullptr));
      const std::string bytes = s.saved();
      EXPECT_TRUE(bytes == contents(folder / "state"));
    });
    const auto loaded = [&](Small& s) {
      EXPECT_OK(ga_load(s.ctx, (folder / "state").c_str(), nullptr));
      return last_result(s.ctx);
    };
    for (const int32_t ranks : {2, 3})
      on_ranks(ranks, [&](int32_t r, ga_comm* comm) {
        Small s(c);
        ASSERT_OK(ga_context_set_comm(s.ctx, comm, &o));
        const ga_step_result after = loaded(s);
        ga_step_result want = before[static_cast<size_t>(r)];
        if (ranks == 2) want.dropped_micros = r == 0 ? 2 : 0;
        EXPECT_EQ(memcmp(&after, &want, sizeof want), 0) << r << " of " << ranks;
      });
    Small alone(c);
    EXPECT_EQ(loaded(alone).dropped_micros, 2u);
    // As one context has saved it.
    ASSERT_OK(ga_save(alone.ctx, (folder / "state").c_str(), nullptr));
    on_ranks(2, [&](int32_t r, ga_comm* comm) {
      Small s(c);
      ASSERT_OK(ga_context_set_comm(s.ctx, comm, &o));
      EXPECT_EQ(loaded(s).dropped_micros, r == 0 ? 2u : 0u);
    });
  }
}

// One rank has a gradient of all rows, one of some: their sum is measured, and leaves nothing behind.
TEST(RanksWindow, RowsBesideAWholeGradient) {
  for (const int32_t whole : {0, 1, 2}) {  // the rank that has all rows; 2: none
    SCOPED_TRACE(whole);
    std::string file;
    float p[2][6] = {};
    const auto make = [](Context& ctx, float* data) {
      ga_param_options o;
      EXPECT_OK(ga_param_options_init(&o, sizeof o));
      o.rows = GA_ROWS_DENSE;
      ctx.param(ctx.group(plain_sgd()), "e", data, ref::Shape{3, 2}, &o);
    };
    const int64_t row = 1;
    const float values[] = {3, 4, 3, 4, 3, 4};
    on_ranks(2, [&](int32_t r, ga_comm* comm) {
      Context ctx;
      make(ctx, p[r]);
      ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
      ASSERT_OK(ga_micro_begin(ctx, -1, 1, nullptr));
      if (r == whole) {
        ASSERT_OK(ga_accumulate_part(ctx, 0, values));
      } else {
        ASSERT_OK(ga_accumulate_rows(ctx, 0, &row, GA_I64, 1, values));
      }
      ASSERT_OK(ga_micro_end(ctx));
      size_t size = 0;
      ASSERT_OK(ga_save_to_memory(ctx, nullptr, nullptr, 0, &size));
      std::string bytes(size, '\0');
      ASSERT_OK(ga_save_to_memory(ctx, nullptr, bytes.data(), size, &size));
      if (r == 0) file = bytes;
    });
    Context ctx;
    float q[6] = {};
    make(ctx, q);
    ASSERT_OK(ga_load_from_memory(ctx, file.data(), file.size(), nullptr));
    const ga_step_result r = step(ctx);
    const float others = whole == 2 ? 0.0f : 0.5f;
    const std::vector<float> want = {-3 * others, -4 * others, -3, -4, -3 * others, -4 * others};
    EXPECT_EQ(std::vector<float>(q, q + 6), want);
    EXPECT_NEAR(r.norm, 5 * std::sqrt(1 + 2 * others * others), 1e-6);
    ASSERT_OK(ga_micro_begin(ctx, -1, 1, nullptr));
    const int64_t last = 2;
    ASSERT_OK(ga_accumulate_rows(ctx, 0, &last, GA_I64, 1, values));
    ASSERT_OK(ga_micro_end(ctx));
    EXPECT_NEAR(step(ctx).norm, 5, 1e-6);
    EXPECT_EQ(q[2], -3);
  }
}

// The sum of two accumulators of 16 bits is rounded at random, by bits that the same load has again.
TEST(RanksWindow, SumsAreRoundedByChance) {
  ga_config c = config();
  c.accumulation = GA_ACCUMULATE_STOCHASTIC;
  c.reduce = GA_REDUCE_SUM;
  c.seed = 11;
  constexpr int64_t kCount = 4000;
  const std::string file = saved_by(
      3, c, [](Small& s, int32_t r) { s.contribute(r == 0   ? 1
                                                   : r == 1 ? 0x1p-9f
                                                            : 0x1p-10f); },
      GA_BF16, kCount);
  std::vector<float> first;
  for (int k = 0; k < 2; ++k) {
    Small alone(c, GA_BF16, kCount);
    ASSERT_OK(alone.load(file));
    // Later contributions round by other bits than the three and the two sums of them.
    StateParts parts;
    safetensors::Header header;
    const std::string again = alone.saved();
    ASSERT_TRUE(parts.read(again.data(), again.size()) && parts.parse(header));
    double contributions = 0;
    memcpy(&contributions,
           parts.data.data() + tensor_of(header, "p.grad_accum.window").begin + 2 * 8, 8);
    EXPECT_EQ(contributions, 5);
    ASSERT_EQ(step(alone.ctx).outcome, GA_STEP_APPLIED);
    int up = 0;
    for (const float p : alone.p) {
      ASSERT_TRUE(p == -1 || p == -1 - 0x1p-7f || p == -1 - 0x1p-6f) << p;
      up += p < -1;
    }
    // 1/4 of the elements go up with the second rank's, of the others 1/8 with the third's.
    EXPECT_NEAR(up, kCount * (1 - 0.75 * 0.875), 5 * std::sqrt(kCount * 0.25));
    if (k == 1) {
      EXPECT_EQ(alone.p, first);
    }
    first = alone.p;
  }
}

// A step was rejected: where the state of one context is handed to several, each lowers its loss scale.
TEST(RanksWindow, ARejectedWindowIsDiscardedByAll) {
  ga_config c = config();
  c.nonfinite = GA_NONFINITE_FAIL;
  ga_loss_scaler scaler;
  ASSERT_OK(ga_loss_scaler_init(&scaler, sizeof scaler));
  scaler.initial_scale = 16;
  Small alone(c);
  ASSERT_OK(ga_context_set_loss_scaler(alone.ctx, &scaler));
  alone.contribute(NAN);
  EXPECT_EQ(ga_step(alone.ctx, nullptr), GA_ERROR_NONFINITE);
  const std::string file = alone.saved();
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Small s(c);
    ASSERT_OK(ga_context_set_loss_scaler(s.ctx, &scaler));
    ASSERT_OK(ga_context_set_comm(s.ctx, comm, nullptr));
    ASSERT_OK(s.load(file));
    EXPECT_EQ(window(s.ctx).micro_batches, r == 0 ? 1 : 0);
    ASSERT_OK(ga_discard(s.ctx));
    double scale = 0;
    ASSERT_OK(ga_loss_scale(s.ctx, &scale, nullptr));
    EXPECT_EQ(scale, 8);
    // Over ranks, the gradients of a rejected window are added up already.
    s.contribute(r == 0 ? NAN : 1.0f);
    EXPECT_EQ(ga_step(s.ctx, nullptr), GA_ERROR_NONFINITE);
    size_t size = 0;
    expect_failure(ga_save_to_memory(s.ctx, nullptr, nullptr, 0, &size),
                   "ga_discard must be called", GA_ERROR_INVALID_STATE);
    ASSERT_OK(ga_discard(s.ctx));
    s.saved();
    s.contribute(1);
    EXPECT_EQ(step(s.ctx).outcome, GA_STEP_APPLIED);
  });
}

// ---- Batch normalisation ----------------------------------------------------------------------------

// Statistics of a micro-batch that is not opened yet are kept by as many ranks alone.
TEST(RanksWindow, StatisticsOfTheNextMicroBatch) {
  const float x[2][4] = {{1, 2, 3, 4}, {0, 2, 0, 6}}, other[] = {1, 1, 5, 7};
  float y[4];
  std::string file;
  const auto make = [](Context& ctx, ga_comm* comm) {
    ga_bn bn = -1;
    EXPECT_OK(ga_bn_add(ctx, "bn", 2, -1, -1, nullptr, &bn));
    if (comm) {
      EXPECT_OK(ga_context_set_comm(ctx, comm, nullptr));
    }
  };
  const auto micro = [](Context& ctx) {
    EXPECT_OK(ga_micro_begin(ctx, -1, 1, nullptr));
    EXPECT_OK(ga_micro_end(ctx));
  };
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Context ctx;
    make(ctx, comm);
    float out[4];
    if (r == 0) {  // the second rank's window has no micro-batch
      ASSERT_OK(ga_bn_forward(ctx, 0, x[0], 2, 1, out));
      micro(ctx);
    }
    ASSERT_OK(ga_bn_forward(ctx, 0, x[1], 2, 1, out));
    size_t size = 0;
    ASSERT_OK(ga_save_to_memory(ctx, nullptr, nullptr, 0, &size));
    std::string bytes(size, '\0');
    ASSERT_OK(ga_save_to_memory(ctx, nullptr, bytes.data(), size, &size));
    if (r == 0) file = bytes;
  });
  on_ranks(2, [&](int32_t, ga_comm* comm) {
    Context ctx;
    make(ctx, comm);
    ASSERT_OK(ga_load_from_memory(ctx, file.data(), file.size(), nullptr));
    float out[4];
    EXPECT_EQ(ga_bn_forward(ctx, 0, other, 2, 1, out), GA_ERROR_INVALID_STATE);
    ASSERT_OK(ga_bn_forward(ctx, 0, x[1], 2, 1, out));
  });
  Context ctx;
  make(ctx, nullptr);
  ASSERT_OK(ga_load_from_memory(ctx, file.data(), file.size(), nullptr));
  EXPECT_EQ(window(ctx).micro_batches, 1);
  ASSERT_OK(ga_bn_forward(ctx, 0, other, 2, 1, y));
  micro(ctx);
  // The first one can be visited again, as it was.
  ASSERT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
  ASSERT_OK(ga_bn_forward(ctx, 0, x[0], 2, 1, y));
  double mean[2];
  ASSERT_OK(ga_bn_statistics(ctx, 0, mean, nullptr, GA_F64, nullptr));
  EXPECT_EQ(mean[0], 2);
  ASSERT_OK(ga_micro_end(ctx));
  step(ctx);
  const Running running(ctx, 0, 2);
  for (int c = 0; c < 2; ++c)
    EXPECT_NEAR(running.mean[static_cast<size_t>(c)],
                0.1 * (x[0][c] + x[0][c + 2] + other[c] + other[c + 2]) / 4, 1e-15);
}

// A layer in WINDOW mode, saved after any call of its passes.
TEST(RanksWindow, PassesGoOnWithTheSameBits) {
  const ref::BnShape shape = {3, 2, GA_BN_CHANNELS_FIRST};
  const BnWindow all = bn_window(shape, GA_F32, {4, 1, 3}, 5);
  const std::vector<BnWindow> shares = {{all[0], all[1]}, {}, {all[2]}};
  constexpr int kStages = 8;
  struct RankEnd {
    BnOutput out;
    std::vector<double> running;
  };
  // Stages [begin, end).
  const auto run = [&](int begin, int end, std::vector<RankEnd>& ended, std::string& file) {
    on_ranks(3, [&](int32_t r, ga_comm* comm) {
      const BnWindow& window = shares[static_cast<size_t>(r)];
      RankEnd& e = ended[static_cast<size_t>(r)];
      BnNet net(shape, bn_options(GA_BN_WINDOW));
      ASSERT_OK(ga_context_set_comm(net.ctx, comm, nullptr));
      if (begin > 0) {
        ASSERT_OK(ga_load_from_memory(net.ctx, file.data(), file.size(), nullptr));
      } else {
        e.out = bn_output(window);
      }
      const auto each = [&](auto&& f) {
        for (size_t k = 0; k < window.size(); ++k) f(k);
      };
      for (int stage = begin; stage < end; ++stage) {
        if (stage == 0 && r == 0) net.take(window[0]);
        if (stage == 1)
          each([&](size_t k) {
            if (r != 0 || k > 0) net.take(window[k]);
          });
        if (stage == 2) {
          ASSERT_OK(ga_bn_finalize(net.ctx, net.bn));
        }
        if (stage == 3) each([&](size_t k) { net.forward(window[k], e.out.y[k]); });
        if (stage == 4)
          each([&](size_t k) { net.in_micro(k, window[k], [&] { net.sum(window[k]); }); });
        if (stage == 5) {
          ASSERT_OK(ga_bn_backward_finalize(net.ctx, net.bn));
        }
        if (stage == 6)
          each([&](size_t k) {
            net.in_micro(k, window[k], [&] { net.backward(window[k], e.out.dx[k]); });
          });
        if (stage == 7) {
          EXPECT_EQ(step(net.ctx).outcome, GA_STEP_APPLIED);
          e.out.dgamma = external_gradient(net.ctx, net.gamma, shape.channels);
          e.out.dbeta = external_gradient(net.ctx, net.beta, shape.channels);
          const Running running(net.ctx, net.bn, shape.channels);
          e.running = running.mean;
          e.running.insert(e.running.end(), running.variance.begin(), running.variance.end());
        }
      }
      if (end == kStages) return;
      size_t size = 0;
      ASSERT_OK(ga_save_to_memory(net.ctx, nullptr, nullptr, 0, &size));
      std::string bytes(size, '\0');
      ASSERT_OK(ga_save_to_memory(net.ctx, nullptr, bytes.data(), size, &size));
      if (r == 0) file = bytes;
    });
  };
  std::string file;
  std::vector<RankEnd> whole(3);
  run(0, kStages, whole, file);
  for (int stop = 1; stop < kStages; ++stop) {
    SCOPED_TRACE("stopped before " + std::to_string(stop));
    std::vector<RankEnd> ended(3);
    run(0, stop, ended, file);
    BnNet alone(shape, bn_options(GA_BN_WINDOW));
    EXPECT_EQ(ga_load_from_memory(alone.ctx, file.data(), file.size(), nullptr),
              GA_ERROR_UNSUPPORTED);
    EXPECT_NE(std::string(ga_last_error()).find("\"bn\" is in the middle of its passes"),
              std::string::npos)
        << ga_last_error();
    run(stop, kStages, ended, file);
    for (size_t r = 0; r < 3; ++r) {
      EXPECT_TRUE(ended[r].out == whole[r].out) << r;
      EXPECT_TRUE(same_bits(ended[r].running, whole[r].running)) << r;
    }
  }
}

// ---- Calls that fail --------------------------------------------------------------------------------

// Whatever keeps one rank from saving, all fail, and their windows go on.
TEST(RanksWindow, ASaveThatFailsIsThatOfAll) {
  for (const int32_t shard : {GA_SHARD_NONE, GA_SHARD_OPTIMIZER}) {
    const Folder folder;
    const std::string path = folder / "state";
    on_ranks(2, [&](int32_t r, ga_comm* comm) {
      Case s;
      s.options.shard = shard;
      Net net(s, comm);
      net.contribute(0, r, 0);
      const std::string before = net.saved();
      const auto expect = [&](int32_t failing, ga_status status, ga_status want,
                              const char* words) {
        if (r == failing)
          expect_failure(status, words, want);
        else
          expect_failure(status, ("rank " + std::to_string(failing) + " failed").c_str());
        EXPECT_FALSE(fs::exists(path));
        EXPECT_TRUE(net.saved() == before);
      };
      ga_state_options o;
      ASSERT_OK(ga_state_options_init(&o, sizeof o));
      const auto cancel = [](void*, int64_t done, int64_t total) {
        return done > total / 2 ? 1 : 0;
      };
      for (const int32_t failing : {0, 1}) {
        SCOPED_TRACE("rank " + std::to_string(failing) + " cancels");
        o.progress = r == failing ? +cancel : nullptr;
        expect(failing, ga_save(net.ctx, path.c_str(), &o), GA_ERROR_CANCELLED, "cancelled");
      }
      {
        SCOPED_TRACE("a store of the program fails");
        int calls = r == 1 ? 2 : 1000;
        const auto write = [](void* user, int64_t, const void*, size_t) -> int32_t {
          return (*static_cast<int*>(user))-- > 0 ? 0 : 5;
        };
        expect(1, ga_state_write(net.ctx, write, &calls, nullptr), GA_ERROR_IO, "returned 5");
      }
      {
        SCOPED_TRACE("too little room");
        std::string out(before.size(), '\0');
        size_t size = 0;
        const size_t capacity = r == 1 ? out.size() - 1 : out.size();
        expect(1, ga_save_to_memory(net.ctx, nullptr, out.data(), capacity, &size),
               GA_ERROR_INVALID_ARGUMENT, "capacity was");
      }
      {
        SCOPED_TRACE("no folder");
        expect(0, ga_save(net.ctx, (r == 0 ? folder / "no/state" : path).c_str(), nullptr),
               GA_ERROR_IO, "no/state");
      }
      {
        SCOPED_TRACE("an open micro-batch");
        if (r == 1) {
          ASSERT_OK(ga_micro_begin(net.ctx, -1, 0, nullptr));
        }
        const ga_status status = ga_save(net.ctx, path.c_str(), nullptr);
        if (r == 1) {
          expect_failure(status, "ga_micro_end must be called first", GA_ERROR_INVALID_STATE);
          ASSERT_OK(ga_micro_abort(net.ctx));
        } else {
          expect_failure(status, "rank 1 failed");
        }
        EXPECT_TRUE(net.saved() == before);
      }
      {
        SCOPED_TRACE("other parts");
        o = {};
        ASSERT_OK(ga_state_options_init(&o, sizeof o));
        o.parts = r == 1 ? GA_STATE_LIBRARY : GA_STATE_ALL;
        expect_failure(ga_save(net.ctx, path.c_str(), &o), "rank 1 makes another call");
      }
      ASSERT_OK(ga_save(net.ctx, path.c_str(), nullptr));
      EXPECT_TRUE(contents(path) == before);
      net.step();
      EXPECT_EQ(net.results[0].outcome, GA_STEP_APPLIED);
    });
  }
}

TEST(RanksWindow, ALoadNeedsAnEmptyWindowOnEveryRank) {
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Small s;
    ASSERT_OK(ga_context_set_comm(s.ctx, comm, nullptr));
    s.contribute(4);
    const std::string file = s.saved();
    ASSERT_OK(ga_discard(s.ctx));
    if (r == 1) s.contribute(8);
    const ga_status status = s.load(file);
    if (r == 1)
      expect_failure(status, "within a window", GA_ERROR_INVALID_STATE);
    else
      expect_failure(status, "rank 1 failed");
    EXPECT_EQ(window(s.ctx).micro_batches, r);
    EXPECT_EQ(step(s.ctx).weight, 1);
    EXPECT_EQ(s.p[0], -8);
    ASSERT_OK(s.load(file));
    EXPECT_EQ(step(s.ctx).weight, 2);
    EXPECT_EQ(s.p[0], -4);
  });
}

// A parameter that is younger than the communicator has arrays on one rank alone.
TEST(RanksWindow, AParameterThatCameLater) {
  std::string files[2];
  for (const int32_t ranks : {2, 3})
    on_ranks(ranks, [&](int32_t r, ga_comm* comm) {
      Context ctx;
      std::vector<float> p(90000, 1);
      const ga_group group = ctx.group(optimizer(GA_OPTIMIZER_ADAM));
      if (ranks == 2) {
        ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
      }
      ctx.param(group, "p", p.data(), 90000);
      const std::vector<float> g(90000, 2);
      if (ranks == 2) {
        if (r == 1) ctx.accumulate({g.data()});
        size_t size = 0;
        ASSERT_OK(ga_save_to_memory(ctx, nullptr, nullptr, 0, &size));
        std::string bytes(size, '\0');
        ASSERT_OK(ga_save_to_memory(ctx, nullptr, bytes.data(), size, &size));
        files[r] = bytes;
      } else {
        EXPECT_TRUE(files[0] == files[1]);
        const std::string& file = files[0];
        ASSERT_OK(ga_context_set_comm(ctx, comm, nullptr));
        ASSERT_OK(ga_load_from_memory(ctx, file.data(), file.size(), nullptr));
      }
      EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
      EXPECT_NEAR(p[0], 1 - 1e-3, 1e-6);
      EXPECT_EQ(p, std::vector<float>(90000, p[0]));
    });
}

// ---- Parts ------------------------------------------------------------------------------------------

TEST(RanksWindow, PartsOfAState) {
  Case s;
  s.rows = true;
  std::string all, library, parameters;
  Tensors values;
  on_ranks(2, [&](int32_t r, ga_comm* comm) {
    Net net(s, comm);
    net.contribute(0, r, 0);
    net.step();
    net.contribute(1, r, 0);
    ga_state_options o;
    ASSERT_OK(ga_state_options_init(&o, sizeof o));
    const std::string of_all = net.saved();
    o.parts = GA_STATE_LIBRARY;
    const std::string of_library = net.saved(&o);
    o.parts = GA_STATE_PARAMETERS;
    const std::string of_parameters = net.saved(&o);
    if (r != 0) return;
    all = of_all, library = of_library, parameters = of_parameters;
    values = net.params;
  });
  ga_state_options o;
  ASSERT_OK(ga_state_options_init(&o, sizeof o));
  EXPECT_NE(parameters.find("\"gradaccum.ranks\":\"1\""), std::string::npos);
  o.parts = GA_STATE_PARAMETERS;
  for (const std::string* file : {&parameters, &all}) {
    Net net(s);
    for (auto& p : net.params) std::fill(p.begin(), p.end(), 0.0f);
    ASSERT_OK(net.load(*file, &o));
    EXPECT_EQ(net.params, values);
    EXPECT_EQ(window(net.ctx).state, GA_WINDOW_EMPTY);
  }
  o.parts = GA_STATE_LIBRARY;
  Net net(s), whole(s);
  net.params = values;
  for (size_t i = 0; i < values.size(); ++i)
    std::copy(values[i].begin(), values[i].end(), net.params[i].begin());
  ASSERT_OK(whole.load(all));
  EXPECT_EQ(window(whole.ctx).micro_batches, 2);
  const std::string one = whole.saved();
  whole.step();
  Net rest(s);
  for (size_t i = 0; i < values.size(); ++i)
    std::copy(values[i].begin(), values[i].end(), rest.params[i].begin());
  ASSERT_OK(rest.load(library, &o));
  EXPECT_TRUE(rest.saved() == one);
  rest.step();
  EXPECT_EQ(rest.params, whole.params);
}

// ---- Files that contradict themselves ---------------------------------------------------------------

TEST(RanksWindow, FilesThatContradictThemselvesAreRefused) {
  const std::string file = saved_by(3, config(), [](Small& s, int32_t r) {
    for (int k = 0; k < (r == 1 ? 0 : 2); ++k) s.contribute(1);
  });
  struct Hostile {
    std::string words;
    std::function<void(safetensors::Header&)> change;
    ga_status status = GA_ERROR_FORMAT;
  };
  std::vector<Hostile> list;
  for (const char* ranks : {"0", "-1", "03", " 3", "3 ", "x", "", "99999999999"})
    list.push_back({"windows of \"" + std::string(ranks) + "\" ranks",
                    [=](auto& h) { text_of(h, "ranks") = ranks; }});
  list.push_back({"is not of one of the 2 ranks", [](auto& h) { text_of(h, "ranks") = "2"; }});
  list.push_back({"is not of one of the 1 ranks", [](auto& h) { text_of(h, "ranks") = "1"; }});
  for (const char* ranks : {"4", "2147483647"})
    list.push_back(
        {"nothing of the window of rank 3", [=](auto& h) { text_of(h, "ranks") = ranks; }});
  const auto rename_text = [&](const char* to, const char* words) {
    list.push_back({words, [=](auto& h) {
                      for (auto& entry : h.metadata)
                        if (entry.first == "gradaccum.rank.1.window") entry.first = to;
                    }});
  };
  rename_text("gradaccum.other", "nothing of the window of rank 1");
  for (const char* name : {"gradaccum.rank.2.p.grad_accum", "gradaccum.rank."})
    list.push_back({"is not of one of the 1 ranks", [=](auto& h) {
                      for (auto& entry : h.metadata)
                        if (entry.first == "gradaccum.ranks") entry.first = "gradaccum.other";
                      tensor_of(h, "gradaccum.rank.2.p.grad_accum").name = name;
                    }});
  rename_text("gradaccum.rank.7.window", "is not of one of the 3 ranks");
  const std::string accumulator = "gradaccum.rank.2.p.grad_accum";
  for (const char* name :
       {"gradaccum.rank.02.p.grad_accum", "gradaccum.rank.0.p.grad_accum",
        "gradaccum.rank.3.p.grad_accum", "gradaccum.rank.-1.p.grad_accum",
        "gradaccum.rank.99999999999.p.grad_accum", "gradaccum.rank.x.p", "gradaccum.rank.",
        "gradaccum.rank.2", "gradaccum.rank.2.", "gradaccum.rank.2.gradaccum.rank.1.p.grad_accum"})
    list.push_back(
        {"is not of one of the 3 ranks", [=](auto& h) { tensor_of(h, accumulator).name = name; }});
  list.push_back({"has no gradient", [=](auto& h) {
                    tensor_of(h, accumulator).name = "gradaccum.rank.1.p.grad_accum";
                  }});
  list.push_back(
      {"no place for \"gradaccum.rank.2.q.grad_accum\"",
       [=](auto& h) { tensor_of(h, accumulator).name = "gradaccum.rank.2.q.grad_accum"; },
       GA_ERROR_INVALID_ARGUMENT});
  list.push_back({"\"gradaccum.rank.2.p.grad_accum\" is [1, 1] in the file, but [1] here",
                  [=](auto& h) {
                    tensor_of(h, accumulator).shape = {1, 1};
                  },
                  GA_ERROR_INVALID_ARGUMENT});
  list.push_back({"gradients of a window, but no micro-batches", [](auto& h) {
                    tensor_of(h, "gradaccum.rank.2.gradaccum.window.micro_batches").name =
                        "gradaccum.rank.1.gradaccum.window.micro_batches";
                  }});
  const auto replace = [&](const char* from, const char* to, const char* words) {
    list.push_back({words, [=](auto& h) {
                      std::string& text = text_of(h, "rank.2.window");
                      const size_t at = text.find(from);
                      ASSERT_NE(at, text.npos) << text;
                      text.replace(at, strlen(from), to);
                    }});
  };
  replace("weighted=0", "weighted=-1", "a counter of its window was -1");
  replace("rows_held=0", "rows_held=-3", "a counter of its window was -3");
  replace("weight=0x0p+0", "weight=inf", "the weight of its window was inf");
  replace("failed=0", "failed=2", "failed");
  replace("micro_finite=", "micro=", "micro_finite");

  Small alone;
  alone.contribute(3);
  step(alone.ctx);
  const std::string before = alone.saved();
  for (const Hostile& hostile : list) {
    SCOPED_TRACE(hostile.words);
    const std::string bytes = edited(file, hostile.change);
    expect_failure(alone.load(bytes), hostile.words.c_str(), hostile.status);
    EXPECT_TRUE(alone.saved() == before);
    on_ranks(3, [&](int32_t, ga_comm* comm) {
      Small s;
      ASSERT_OK(ga_context_set_comm(s.ctx, comm, nullptr));
      const ga_status status = s.load(bytes);
      EXPECT_TRUE(status == hostile.status || status == GA_ERROR_COMMUNICATION) << ga_last_error();
      EXPECT_EQ(window(s.ctx).state, GA_WINDOW_EMPTY);
    });
  }
  // What each rank could have, but not one of them alone.
  const std::string large = edited(file, [](auto& h) {
    for (const char* key : {"rank.1.window", "rank.2.window"}) {
      std::string& text = text_of(h, key);
      text.replace(text.find("weighted=0"), 10, "weighted=9007199254740992");
    }
  });
  expect_failure(alone.load(large), "a counter of its window was 1.80144e+16", GA_ERROR_FORMAT);
  EXPECT_TRUE(alone.saved() == before);
  // One name twice, of which no header can be written.
  StateParts parts;
  ASSERT_TRUE(parts.read(file.data(), file.size()));
  const std::string name = "gradaccum.rank.2.p.grad_accum.";
  const size_t at = parts.text.find(name + "partials");
  ASSERT_NE(at, parts.text.npos);
  parts.text.replace(at, name.size() + 8, name + "window");
  parts.repair();
  std::string twice;
  parts.write(twice);
  expect_failure(alone.load(twice), "occurred twice", GA_ERROR_FORMAT);
  EXPECT_TRUE(alone.saved() == before);
  EXPECT_OK(alone.load(file));
}

// Running means cannot be put together without their weights.
TEST(RanksWindow, AMeanHasAWeight) {
  ga_config c = config();
  c.accumulation = GA_ACCUMULATE_RUNNING_MEAN;
  const std::string file = saved_by(2, c, [](Small& s, int32_t r) { s.contribute(1, r + 1); });
  for (const double weight : {0.0, -1.0, static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    StateParts parts;
    safetensors::Header header;
    ASSERT_TRUE(parts.read(file.data(), file.size()) && parts.parse(header));
    const auto& t = tensor_of(header, "gradaccum.rank.1.p.grad_accum.window");
    memcpy(parts.data.data() + t.begin + 4 * 8, &weight, sizeof weight);
    parts.repair();
    std::string bytes;
    parts.write(bytes);
    Small alone(c);
    expect_failure(alone.load(bytes), "is a mean over the weight", GA_ERROR_FORMAT);
  }
}

// Nobody can give a parameter the name of another rank's gradient.
TEST(RanksWindow, NamesOfWindowsAreTaken) {
  Context ctx;
  const ga_group group = ctx.group(plain_sgd());
  float x = 0;
  for (const char* name :
       {"gradaccum.rank.1.w.grad_accum", "gradaccum.rank.1.w", "gradaccum.rank."}) {
    EXPECT_EQ(ga_param_add(ctx, group, name, &x, GA_F32, 0, nullptr, nullptr, nullptr),
              GA_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(ga_bn_add(ctx, name, 1, -1, -1, nullptr, nullptr), GA_ERROR_INVALID_ARGUMENT);
  }
}

}  // namespace
}  // namespace ga::test
