// SPDX-License-Identifier: Apache-2.0
//
// State on disk: a run that is stopped anywhere goes on with the same bits, and a file that does not fit,
// or is damaged, changes nothing.
#include <atomic>
#include <fstream>
#include <functional>
#include <iterator>
#include <list>
#include <sstream>
#include <thread>

#include "batchnorm.hpp"
#include "core/error.hpp"
#include "files.hpp"
#include "files/fields.hpp"
#include "pairs.hpp"
#include "state_parts.hpp"

namespace ga::test {
namespace {

using Bytes = std::vector<char>;

ga_state_options state_options() {
  ga_state_options o;
  EXPECT_OK(ga_state_options_init(&o, sizeof o));
  return o;
}

Bytes saved(ga_context* ctx, const ga_state_options* options = nullptr) {
  size_t size = 0;
  EXPECT_OK(ga_save_to_memory(ctx, options, nullptr, 0, &size));
  Bytes bytes(size);
  EXPECT_OK(ga_save_to_memory(ctx, options, bytes.data(), bytes.size(), &size));
  EXPECT_EQ(size, bytes.size());
  return bytes;
}

ga_status load(ga_context* ctx, const Bytes& bytes, const ga_state_options* options = nullptr) {
  return ga_load_from_memory(ctx, bytes.data(), bytes.size(), options);
}

// ---- Going on with the same bits ----------------------------------------------------------------

// The bits of a window in two trainings, as Trial::bits() has them.
testing::AssertionResult same(const std::vector<uint8_t>& a, const std::vector<uint8_t>& b) {
  if (a == b) return testing::AssertionSuccess();
  const auto at = std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin();
  return testing::AssertionFailure() << "byte " << at << " of " << a.size() << " and " << b.size()
                                     << " differs; the result has " << sizeof(ga_step_result);
}

TEST(Resume, EveryPairOfOptionsGoesOnWithTheSameBits) {
  int wrong = 0, once = 0;
  for (const Case& c : cases(2)) {
    SCOPED_TRACE(describe(c));
    const Trial whole(c), always(c, Stops::kAlways);
    once = (once + 1) % whole.occasions();
    const Trial stopped(c, Stops::kOnce, once);
    for (const Trial* trial : {&always, &stopped}) {
      SCOPED_TRACE(trial == &always ? "always" : "after occasion " + std::to_string(once));
      EXPECT_EQ(trial->status(), GA_OK) << trial->sentence();
      EXPECT_EQ(whole.bits().size(), trial->bits().size());
      for (size_t k = 0; k < std::min(whole.bits().size(), trial->bits().size()); ++k)
        EXPECT_TRUE(same(whole.bits()[k], trial->bits()[k])) << "window " << k;
    }
    if (HasFailure() && ++wrong == 5) break;  // enough failures to read
  }
}

// A layer in two windows of three micro-batches, as a list of calls.
class BnRun {
 public:
  BnRun(int32_t mode, bool frozen, int32_t policy) : mode_(mode), frozen_(frozen), policy_(policy) {
    open();
    for (int64_t w = 0; w < 2; ++w) {
      window_.push_back(bn_window(shape_, GA_F32, {4, 1, 3}, 5 + static_cast<uint64_t>(w)));
      outputs_.push_back(bn_output(window_.back()));
    }
    window_[0][1].weight = 2.5;
    for (size_t w = 0; w < 2; ++w) list_window(w);
  }
  ~BnRun() { ga_context_destroy(ctx_); }
  BnRun(const BnRun&) = delete;
  BnRun& operator=(const BnRun&) = delete;

  size_t calls() const { return calls_.size(); }
  // Makes all calls, and stops after those for which stops(number) is true.
  template <class Stops>
  std::vector<double> run(Stops stops) {
    for (size_t k = 0; k < calls_.size(); ++k) {
      calls_[k]();
      if (stops(k)) stop_and_go();
    }
    std::vector<double> all = numbers(gamma_);
    const auto add = [&](const std::vector<double>& list) {
      all.insert(all.end(), list.begin(), list.end());
    };
    add(numbers(beta_));
    for (const BnOutput& o : outputs_)
      for (size_t k = 0; k < o.y.size(); ++k) add(numbers(o.y[k])), add(numbers(o.dx[k]));
    const Running running(ctx_, bn_, shape_.channels);
    add(running.mean);
    add(running.variance);
    all.push_back(static_cast<double>(running.steps));
    return all;
  }

 private:
  void open() {
    ga_config c = config();
    c.nonfinite = policy_;
    EXPECT_OK(ga_context_create(&c, &ctx_));
    ga_optimizer o = plain_sgd(0.25);
    o.momentum = 0.5;
    EXPECT_OK(ga_group_add(ctx_, &o, nullptr));
    EXPECT_OK(try_add(ctx_, 0, "bn.weight", gamma_.data(), GA_F32, {shape_.channels},
                      options(GA_F32, GA_F32), nullptr));
    EXPECT_OK(try_add(ctx_, 0, "bn.bias", beta_.data(), GA_F32, {shape_.channels},
                      options(GA_F32, GA_F32), nullptr));
    const ga_bn_options bn = bn_options(mode_);
    EXPECT_OK(ga_bn_add(ctx_, "bn", shape_.channels, 0, 1, &bn, &bn_));
    if (frozen_) {
      EXPECT_OK(ga_bn_set_frozen(ctx_, bn_, 1));
    }
  }

  void stop_and_go() {
    const Bytes bytes = saved(ctx_);
    ga_context_destroy(ctx_);
    gamma_.fill(-77);
    beta_.fill(-77);
    open();
    EXPECT_OK(load(ctx_, bytes));
  }

  // A micro-batch that is opened and ended is one call here.
  void list_window(size_t w) {
    const auto call = [&](auto body) { calls_.push_back(body); };
    const auto forward = [this, w](size_t k) {
      const BnData& m = window_[w][k];
      EXPECT_OK(ga_bn_forward(ctx_, bn_, m.x.data(), m.samples, shape_.positions,
                              outputs_[w].y[k].data()));
    };
    const auto in_micro = [this, w](size_t k, bool sums, bool backward) {
      const BnData& m = window_[w][k];
      EXPECT_OK(ga_micro_begin(ctx_, static_cast<int64_t>(k), m.weight, nullptr));
      if (sums) {
        EXPECT_OK(ga_bn_backward_accumulate(ctx_, bn_, m.x.data(), m.dy.data(), m.samples,
                                            shape_.positions));
      }
      if (backward) {
        EXPECT_OK(ga_bn_backward(ctx_, bn_, m.x.data(), m.dy.data(), m.samples, shape_.positions,
                                 outputs_[w].dx[k].data()));
      }
      EXPECT_OK(ga_micro_end(ctx_));
    };
    const size_t n = window_[w].size();
    if (mode_ == GA_BN_WINDOW) {
      for (size_t k = 0; k < n; ++k)
        call([this, w, k] {
          const BnData& m = window_[w][k];
          EXPECT_OK(ga_bn_accumulate(ctx_, bn_, m.x.data(), m.samples, shape_.positions));
        });
      if (!frozen_) call([this] { EXPECT_OK(ga_bn_finalize(ctx_, bn_)); });
      for (size_t k = 0; k < n; ++k) call([=] { forward(k); });
      for (size_t k = 0; k < n; ++k) call([=] { in_micro(k, true, false); });
      for (size_t k = 0; k < n; ++k) call([=] { in_micro(k, false, true); });
    } else {
      for (size_t k = 0; k < n; ++k) {
        call([=] { forward(k); });
        call([=] { in_micro(k, k == 1, true); });
      }
      if (policy_ != GA_NONFINITE_DROP_MICRO) {  // visits the first one again
        call([=] {
          const BnData& m = window_[w][0];
          EXPECT_OK(ga_micro_begin(ctx_, 0, m.weight, nullptr));
          forward(0);
          EXPECT_OK(ga_bn_backward(ctx_, bn_, m.x.data(), m.dy.data(), m.samples, shape_.positions,
                                   outputs_[w].dx[0].data()));
          EXPECT_OK(ga_micro_end(ctx_));
        });
      }
    }
    call([this] { EXPECT_EQ(step(ctx_).outcome, GA_STEP_APPLIED); });
  }

  const int32_t mode_;
  const bool frozen_;
  const int32_t policy_;
  const ref::BnShape shape_ = {3, 2, GA_BN_CHANNELS_FIRST};
  Tensor gamma_{GA_F32, 3, 1}, beta_{GA_F32, 3, 0.5};
  std::vector<BnWindow> window_;
  std::vector<BnOutput> outputs_;
  std::vector<std::function<void()>> calls_;
  ga_context* ctx_ = nullptr;
  ga_bn bn_ = -1;
};

TEST(Resume, BatchNormalisationGoesOnBetweenAllItsCalls) {
  for (const int32_t mode : {GA_BN_MICRO, GA_BN_WINDOW, GA_BN_CUMULATIVE}) {
    for (const bool frozen : {false, true}) {
      for (const int32_t policy : {GA_NONFINITE_SKIP_STEP, GA_NONFINITE_DROP_MICRO}) {
        if (policy == GA_NONFINITE_DROP_MICRO && mode != GA_BN_MICRO) continue;
        SCOPED_TRACE(testing::Message() << mode << (frozen ? " frozen" : "") << ", " << policy);
        const auto whole = BnRun(mode, frozen, policy).run([](size_t) { return false; });
        BnRun always(mode, frozen, policy);
        ASSERT_TRUE(same_bits(whole, always.run([](size_t) { return true; })));
        for (size_t at = 0; at < always.calls(); ++at) {
          BnRun once(mode, frozen, policy);
          ASSERT_TRUE(same_bits(whole, once.run([=](size_t k) { return k == at; }))) << at;
        }
      }
    }
  }
}

// ---- What fits, and what does not ---------------------------------------------------------------

// A context with a few parameters and a layer, which tests change in one point.
struct Plan {
  ga_config config = test::config();
  ga_optimizer optimizer = test::optimizer(GA_OPTIMIZER_ADAMW);
  std::optional<ga_clip> clip;
  std::optional<ga_schedule> schedule;
  std::optional<ga_loss_scaler> scaler;
  std::optional<ga_ema> ema;
  std::vector<std::string> names = {"w", "b"};
  std::vector<int64_t> shape = {3, 2};
  int32_t dtype = GA_F32;
  ga_param_options options = test::options(GA_F32, GA_F32);
  std::string layer = "bn";
  ga_bn_options bn = bn_options(GA_BN_MICRO);
  double lr_scale = 1;
};

class Net {
 public:
  explicit Net(const Plan& plan = {}) : plan_(plan) {
    ga_config c = plan.config;
    EXPECT_OK(ga_context_create(&c, &ctx));
    EXPECT_OK(ga_group_add(ctx, &plan.optimizer, nullptr));
    EXPECT_OK(ga_context_set_clip(ctx, plan.clip ? &*plan.clip : nullptr));
    EXPECT_OK(ga_group_set_schedule(ctx, 0, plan.schedule ? &*plan.schedule : nullptr));
    EXPECT_OK(ga_context_set_loss_scaler(ctx, plan.scaler ? &*plan.scaler : nullptr));
    EXPECT_OK(ga_context_set_ema(ctx, plan.ema ? &*plan.ema : nullptr));
    data.reserve(plan.names.size());
    for (const std::string& name : plan.names) {
      data.emplace_back(plan.dtype, ref::count_of(plan.shape), 0.5);
      EXPECT_OK(
          try_add(ctx, 0, name.c_str(), data.back().data(), plan.dtype, plan.shape, plan.options));
    }
    EXPECT_OK(ga_param_set_lr_scale(ctx, 0, plan.lr_scale));
    EXPECT_OK(ga_bn_add(ctx, plan.layer.c_str(), 2, -1, -1, &plan.bn, nullptr));
  }
  ~Net() { ga_context_destroy(ctx); }
  Net(const Net&) = delete;
  Net& operator=(const Net&) = delete;

  // A micro-batch of gradients that depend on its number alone; of two rows, where there are rows. In
  // WINDOW mode, also its part of the layer's first pass.
  void accumulate(uint64_t number) {
    const int32_t dtype = plan_.options.gradient_dtype ? plan_.options.gradient_dtype : plan_.dtype;
    const int32_t row[] = {2, static_cast<int32_t>(number % 2)};
    EXPECT_OK(ga_micro_begin(ctx, -1, 1, nullptr));
    for (size_t i = 0; i < data.size(); ++i) {
      kept_.push_back(random_tensor(dtype, data[i].count(), 100 + number));
      const Tensor& g = kept_.back();
      const auto id = static_cast<ga_param>(i);
      if (plan_.options.rows == GA_ROWS_NONE) {
        EXPECT_OK(ga_accumulate_part(ctx, id, g.data()));
      } else {
        EXPECT_OK(ga_accumulate_rows(ctx, id, row, GA_I32, 2, g.data()));
      }
    }
    EXPECT_OK(ga_micro_end(ctx));
    kept_.clear();
    if (plan_.bn.mode != GA_BN_WINDOW) return;
    const Tensor x = random_tensor(GA_F32, 3 * 2, 200 + number);
    EXPECT_OK(ga_bn_accumulate(ctx, 0, x.data(), 3, 1));
  }
  ga_step_result step() { return test::step(ctx); }
  // Two windows, and half of one.
  void train() {
    for (uint64_t k = 0; k < 4; ++k) {
      accumulate(k);
      if (k % 2 == 1) step();
    }
    accumulate(9);
  }
  std::vector<double> values() const {
    std::vector<double> all;
    for (const Tensor& p : data) {
      const std::vector<double> list = numbers(p);
      all.insert(all.end(), list.begin(), list.end());
    }
    const Running running(ctx, 0, 2);
    for (const auto* list : {&running.mean, &running.variance})
      all.insert(all.end(), list->begin(), list->end());
    return all;
  }

  ga_context* ctx = nullptr;
  std::vector<Tensor> data;

 private:
  const Plan plan_;
  std::list<Tensor> kept_;  // the gradients of the open micro-batch
};

// Loading must fail with the status and a sentence that contains all of the words, and must change no byte
// of what is saved next.
void expect_refused(Net& net, const Bytes& bytes, ga_status status,
                    const std::vector<std::string>& words,
                    const ga_state_options* options = nullptr) {
  const Bytes before = saved(net.ctx);
  const ga_memory memory_before = memory(net.ctx);
  EXPECT_EQ(load(net.ctx, bytes, options), status) << ga_last_error();
  for (const std::string& word : words)
    EXPECT_NE(std::string(ga_last_error()).find(word), std::string::npos)
        << "\"" << word << "\" is not in: " << ga_last_error();
  const ga_memory memory_after = memory(net.ctx);
  EXPECT_EQ(memcmp(&memory_before, &memory_after, sizeof memory_after), 0);
  EXPECT_EQ(saved(net.ctx), before);
}

Bytes trained(const Plan& plan = {}) {
  Net net(plan);
  net.train();
  return saved(net.ctx);
}

// What single micro-batches are: with a loss scale of their own, the last one of a window, opened again.
TEST(Resume, MicroBatchesKeepTheirOptions) {
  for (const bool stops : {false, true}) {
    Plan plan;
    plan.config.noise_scale = 1;
    Net first(plan), second(plan);
    const auto part = [&](Net& net, int64_t index, const ga_micro_options* o) {
      const Tensor g(GA_F32, 6, 0.5);
      EXPECT_OK(ga_micro_begin(net.ctx, index, 2, o));
      EXPECT_OK(ga_accumulate_part(net.ctx, 0, g.data()));
      EXPECT_OK(ga_micro_end(net.ctx));
    };
    part(first, -1, MicroOptions(4));
    part(first, -1, MicroOptions(0, GA_MICRO_LAST));
    if (stops) {
      const Bytes bytes = saved(first.ctx);
      EXPECT_OK(load(second.ctx, bytes));
      EXPECT_EQ(saved(second.ctx), bytes);
    }
    Net& net = stops ? second : first;
    EXPECT_EQ(window(net.ctx).state, GA_WINDOW_FULL);
    EXPECT_EQ(ga_micro_begin(net.ctx, 0, 2, nullptr), GA_ERROR_INVALID_ARGUMENT);
    EXPECT_NE(std::string(ga_last_error()).find("opened with 4"), std::string::npos);
    part(net, 0, MicroOptions(4));  // twice in one micro-batch: no estimate of the noise
    EXPECT_TRUE(std::isnan(net.step().noise_scale));
    EXPECT_EQ(window(net.ctx).windows, 1);
  }
}

// Of a window that was rejected there is no result, so the last one is that of the window before.
TEST(Resume, TheLastResultOutlivesARejectedWindow) {
  Plan plan;
  plan.config.nonfinite = GA_NONFINITE_FAIL;
  Net net(plan), other(plan);
  net.accumulate(1);
  const ga_step_result expected = net.step();
  const Tensor bad(GA_F32, 6, NAN);
  const void* list[] = {bad.data(), bad.data()};
  EXPECT_OK(ga_accumulate(net.ctx, list, 2, 1, nullptr));
  EXPECT_EQ(ga_step(net.ctx, nullptr), GA_ERROR_NONFINITE);
  const Bytes rejected = saved(net.ctx);
  EXPECT_OK(ga_discard(net.ctx));
  for (const Bytes& bytes : {rejected, saved(net.ctx)}) {
    EXPECT_OK(load(other.ctx, bytes));
    ga_step_result last = {};
    last.struct_size = sizeof last;
    EXPECT_OK(ga_step_result_get(other.ctx, 0, 1, &last));
    EXPECT_EQ(memcmp(&last, &expected, sizeof last), 0);
    EXPECT_OK(ga_discard(other.ctx));
  }
}

// Steps that the program has set are seen before the next window, also where a device counts them.
TEST(Resume, StepsThatWereSetAreSeenAtOnce) {
  Net net, other;
  net.accumulate(1), net.step();
  EXPECT_OK(ga_context_set_steps(net.ctx, 7));
  EXPECT_OK(load(other.ctx, saved(net.ctx)));
  EXPECT_EQ(window(other.ctx).steps, 7);
  other.accumulate(2);
  EXPECT_EQ(other.step().steps, 8);
  EXPECT_EQ(window(other.ctx).steps, 8);
}

// The windows of three ranks, of which one has brought nothing, come together on one context, whatever
// device it is on.
TEST(Resume, WindowsOfSeveralRanksComeTogether) {
  std::vector<std::pair<const char*, Plan>> plans;
  const auto add = [&](const char* name, auto set) {
    Plan plan;
    set(plan);
    plans.emplace_back(name, plan);
  };
  add("plain", [](Plan&) {});
  add("rows", [](Plan& p) { p.options.rows = GA_ROWS_DENSE; });
  add("checked", [](Plan& p) { p.config.nonfinite = GA_NONFINITE_DROP_MICRO; });
  add("running_mean", [](Plan& p) { p.config.accumulation = GA_ACCUMULATE_RUNNING_MEAN; });
  add("checked_running_mean", [](Plan& p) {
    p.config.accumulation = GA_ACCUMULATE_RUNNING_MEAN;
    p.config.nonfinite = GA_NONFINITE_DROP_MICRO;
  });
  add("compensated", [](Plan& p) {
    p.options.accumulator_dtype = GA_BF16;
    p.config.accumulation = GA_ACCUMULATE_COMPENSATED;
  });
  add("noise_scale", [](Plan& p) { p.config.noise_scale = 1; });
  add("scaled", [](Plan& p) {
    p.scaler.emplace();
    EXPECT_OK(ga_loss_scaler_init(&*p.scaler, sizeof *p.scaler));
    p.scaler->initial_scale = 4;
  });
  add("f64", [](Plan& p) {
    p.dtype = GA_F64;
    p.options = options(GA_F64, GA_F64);
  });
  for (auto& [name, plan] : plans) {
    SCOPED_TRACE(name);
    plan.optimizer = plain_sgd(0.25);
    Net whole(plan), joined(plan);
    whole.accumulate(1), whole.step();
    std::vector<Bytes> files;
    for (const std::vector<uint64_t>& share : {std::vector<uint64_t>{2, 3}, {}, {4}}) {
      Net net(plan);
      net.accumulate(1), net.step();
      for (const uint64_t k : share) net.accumulate(k), whole.accumulate(k);
      files.push_back(saved(net.ctx));
    }
    ASSERT_OK(load(joined.ctx, file_of_ranks(files)));
    EXPECT_EQ(window(joined.ctx).micro_batches, 3);
    joined.accumulate(5), whole.accumulate(5);
    const ga_step_result got = joined.step(), want = whole.step();
    EXPECT_EQ(got.weight, want.weight);
    EXPECT_NEAR(got.norm, want.norm, 1e-4 * want.norm);
    if (!std::isnan(want.noise_trace)) {
      EXPECT_NEAR(got.noise_trace, want.noise_trace, 1e-4 * std::abs(want.noise_trace));
    }
    const std::vector<double> a = joined.values(), b = whole.values();
    for (size_t i = 0; i < b.size(); ++i)
      EXPECT_NEAR(a[i], b[i], plan.dtype == GA_F64 ? 1e-14 : 1e-5) << i;
  }
}

// A parameter may have state while another one has none yet, here from a file of another program.
TEST(Resume, ParametersWithoutStateStayWithoutIt) {
  StateParts parts;
  parts.text = R"({"__metadata__":{"gradaccum.format":"1 unchecked"},)"
               R"("b.step":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})";
  parts.data.assign(4, 0);
  Bytes file;
  parts.write(file);
  ga_state_options o = state_options();
  o.allow_missing = 1;
  Net net, other;
  EXPECT_OK(load(net.ctx, file, &o));
  const Bytes bytes = saved(net.ctx);
  const std::string text(bytes.begin(), bytes.end());
  EXPECT_NE(text.find("\"b.exp_avg\""), std::string::npos);
  EXPECT_EQ(text.find("\"w.exp_avg\""), std::string::npos);
  EXPECT_OK(load(other.ctx, bytes));
  EXPECT_EQ(saved(other.ctx), bytes);
  for (Net* n : {&net, &other}) n->accumulate(1), n->step();
  EXPECT_EQ(net.values(), other.values());
}

// torch's SGD saves a momentum and no step: the next step is not a first one, which would forget it.
TEST(Resume, StateWithoutAStepIsNotOfTheBeginning) {
  StateParts parts;
  parts.text = R"({"__metadata__":{"gradaccum.format":"1 unchecked"},)"
               R"("p0.momentum_buffer":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
  const float momentum = 4, gradient = 1;
  parts.data.resize(sizeof momentum);
  memcpy(parts.data.data(), &momentum, sizeof momentum);
  Bytes file;
  parts.write(file);
  ga_state_options o = state_options();
  o.allow_missing = 1;
  ga_optimizer sgd = plain_sgd();
  sgd.momentum = 0.5;
  float p = 1;
  Context ctx;
  ctx.group(sgd);
  ctx.param(0, "p0", &p, ref::Shape{1});
  EXPECT_OK(load(ctx, file, &o));
  const void* const gradients[] = {&gradient};
  EXPECT_OK(ga_accumulate(ctx, gradients, 1, 1, nullptr));
  EXPECT_OK(ga_step(ctx, nullptr));
  EXPECT_EQ(p, 1 - (0.5F * 4 + 1));
}

// K, where it depends on the step, is that of the step in the file.
TEST(Resume, AScheduleOfKGoesOn) {
  const int64_t from[] = {0, 2}, lengths[] = {1, 3};
  Net net, other;
  for (Net* n : {&net, &other}) EXPECT_OK(ga_context_set_accum_schedule(n->ctx, from, lengths, 2));
  for (uint64_t k = 0; k < 2; ++k) net.accumulate(k), net.step();
  EXPECT_OK(load(other.ctx, saved(net.ctx)));
  other.accumulate(2);
  EXPECT_EQ(window(other.ctx).accum_steps, 3);
}

// Results of windows that the loaded state knows nothing of are gone.
// What ga_step has rejected stays rejected.
TEST(Resume, ARejectedWindowTakesNothing) {
  Plan plan;
  plan.config.nonfinite = GA_NONFINITE_FAIL;
  Net net(plan), other(plan);
  const float nan[64] = {NAN};
  const void* gradients[] = {nan, nan};
  ASSERT_LE(net.data.size(), 2u);
  ASSERT_OK(ga_accumulate(net.ctx, gradients, net.data.size(), 1, nullptr));
  EXPECT_EQ(ga_step(net.ctx, nullptr), GA_ERROR_NONFINITE);
  EXPECT_OK(load(other.ctx, saved(net.ctx)));
  for (ga_context* ctx : {net.ctx, other.ctx}) {
    EXPECT_TRUE(refused(ga_accumulate(ctx, gradients, net.data.size(), 1, nullptr),
                        GA_ERROR_INVALID_STATE, {"GA_ERROR_NONFINITE", "ga_discard"}));
    EXPECT_EQ(ga_step(ctx, nullptr), GA_ERROR_NONFINITE);
    EXPECT_OK(ga_discard(ctx));
    EXPECT_OK(ga_accumulate(ctx, gradients, net.data.size(), 0, nullptr));
  }
}

// A load brings the last result alone.
TEST(Resume, EarlierResultsAreNotKept) {
  Net net, other;
  net.train();
  EXPECT_OK(load(other.ctx, saved(net.ctx)));
  ga_step_result r;
  EXPECT_OK(ga_step_result_init(&r, sizeof r));
  EXPECT_OK(ga_step_result_get(other.ctx, 2, 1, &r));
  EXPECT_TRUE(refused(ga_step_result_get(other.ctx, 1, 1, &r), GA_ERROR_INVALID_ARGUMENT,
                      {"result of window 1 is not kept", "a load"}));
  EXPECT_TRUE(refused(ga_step_result_get(other.ctx, 3, 1, &r), GA_ERROR_INVALID_ARGUMENT,
                      {"no result of window 3", "is 2"}));
}

TEST(Resume, ResultsOfAnotherPastAreForgotten) {
  Net net, other;
  for (uint64_t k = 0; k < 3; ++k) net.accumulate(k), net.step();
  for (uint64_t k = 5; k < 7; ++k) other.accumulate(k), other.step();
  EXPECT_OK(load(other.ctx, saved(net.ctx)));
  ga_step_result result;
  EXPECT_OK(ga_step_result_init(&result, sizeof result));
  EXPECT_OK(ga_step_result_get(other.ctx, 3, 1, &result));
  EXPECT_EQ(result.windows, 3);
  for (const int64_t k : {1, 2})
    EXPECT_EQ(ga_step_result_get(other.ctx, k, 1, &result), GA_ERROR_INVALID_ARGUMENT) << k;
}

// A channel with a NaN does not count the window, so the channels of a layer may count apart.
TEST(Resume, ChannelsThatCountApart) {
  Net net, other;
  Tensor x = random_tensor(GA_F32, 6, 3);
  x.set(0, NAN);
  for (int k = 0; k < 2; ++k) {
    EXPECT_OK(ga_bn_accumulate(net.ctx, 0, x.data(), 3, 1));
    net.accumulate(1), net.step();
    x.set(0, 1);
  }
  const Bytes bytes = saved(net.ctx);
  EXPECT_NE(std::string(bytes.begin(), bytes.end()).find("num_batches_tracked.channels"),
            std::string::npos);
  EXPECT_OK(load(other.ctx, bytes));
  EXPECT_EQ(saved(other.ctx), bytes);
}

TEST(Fit, NamesShapesAndDtypesAreListed) {
  const Bytes bytes = trained();
  Plan plan;
  plan.names = {"w", "c"};
  {
    Net net(plan);
    expect_refused(net, bytes, GA_ERROR_INVALID_ARGUMENT,
                   {"the file has no \"c\"", "no place for \"b\"", "\"b.exp_avg\""});
  }
  plan = {};
  plan.shape = {2, 3};
  {
    Net net(plan);
    expect_refused(net, bytes, GA_ERROR_INVALID_ARGUMENT,
                   {"\"w\" is [3, 2] in the file, but [2, 3] here", "\"w.exp_avg\""});
  }
  plan = {};
  plan.dtype = GA_F64;
  plan.options = options(GA_F64, GA_F64);
  {
    Net net(plan);
    expect_refused(net, bytes, GA_ERROR_INVALID_ARGUMENT,
                   {"\"w\" is F32 in the file, but F64 here"});
  }
  plan = {};
  plan.layer = "norm";
  {
    Net net(plan);
    expect_refused(net, bytes, GA_ERROR_INVALID_ARGUMENT,
                   {"no \"norm.running_mean\"", "no place for \"bn.running_mean\""});
  }
  plan = {};
  plan.optimizer = optimizer(GA_OPTIMIZER_SGD);
  {
    Net net(plan);
    expect_refused(net, bytes, GA_ERROR_INVALID_ARGUMENT, {"no place for \"w.exp_avg\""});
  }
  {
    Net net;
    net.accumulate(1);
    expect_refused(net, bytes, GA_ERROR_INVALID_STATE, {"within a window"});
  }
}

// The first problem is told even if it is too long to be told whole.
TEST(Fit, ALongNameIsCut) {
  Plan of_long;
  of_long.names.emplace_back(900, 'n');
  Net net;
  expect_refused(net, trained(of_long), GA_ERROR_INVALID_ARGUMENT, {"\"nnnnnnnn", "..."});
}

// A damaged file is named, also where only its note is read.
TEST(Fit, ADamagedFileIsNamed) {
  const Folder folder;
  const std::string path = folder / "damaged.safetensors";
  Bytes bytes = trained();
  bytes[9] ^= 1;
  std::ofstream(path, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  Net net;
  EXPECT_TRUE(refused(ga_load(net.ctx, path.c_str(), nullptr), GA_ERROR_FORMAT,
                      {"ga_load: file \"" + path + "\": "}));
  size_t size = 0;
  EXPECT_TRUE(refused(ga_state_note(path.c_str(), nullptr, 0, &size), GA_ERROR_FORMAT,
                      {"ga_state_note: file \"" + path + "\": "}));
}

TEST(Fit, WhatOneSideLacksIsAllowedOnRequest) {
  Plan three;
  three.names = {"w", "b", "c"};
  const Bytes bytes = trained(), of_three = trained(three);
  ga_state_options o = state_options();
  o.allow_missing = 1;
  Net more(three);
  more.train();
  EXPECT_OK(ga_discard(more.ctx));
  const std::vector<double> before = numbers(more.data[2]);
  EXPECT_OK(load(more.ctx, bytes, &o));
  EXPECT_EQ(numbers(more.data[2]), before);
  Net trained_net;
  trained_net.train();
  EXPECT_EQ(numbers(more.data[0]), numbers(trained_net.data[0]));
  more.step();

  o = state_options();
  Net less;
  expect_refused(less, of_three, GA_ERROR_INVALID_ARGUMENT, {"no place for \"c\""}, &o);
  o.allow_extra = 1;
  EXPECT_OK(load(less.ctx, of_three, &o));
  EXPECT_EQ(less.values(), trained_net.values());
}

TEST(Fit, SettingsAreComparedTakenOrKept) {
  struct Change {
    const char* word;
    std::function<void(Plan&)> set;
    bool taken;
  };
  const std::vector<Change> changes = {
      {"group.0: lr is", [](Plan& p) { p.optimizer.lr = 0.25; }, true},
      {"group.0: beta2 is", [](Plan& p) { p.optimizer.beta2 = 0.5; }, true},
      {"group.0: kind is", [](Plan& p) { p.optimizer.kind = GA_OPTIMIZER_ADAM; }, false},
      {"clip: max_norm is", [](Plan& p) { p.clip = clip(GA_CLIP_GLOBAL, 0.5); }, true},
      {"group.0.schedule",
       [](Plan& p) {
         p.schedule = schedule(GA_SCHEDULE_EXPONENTIAL);
         p.schedule->gamma = 0.5;
       },
       true},
      {"loss_scaler",
       [](Plan& p) {
         p.scaler.emplace();
         EXPECT_OK(ga_loss_scaler_init(&*p.scaler, sizeof *p.scaler));
         p.scaler->initial_scale = 4;
       },
       true},
      {"context: seed is", [](Plan& p) { p.config.seed = 99; }, true},
      {"context: reduce is", [](Plan& p) { p.config.reduce = GA_REDUCE_SUM; }, false},
      {"context: missing is", [](Plan& p) { p.config.missing = GA_MISSING_ZERO; }, false},
      {"parameter.w: lr_scale is", [](Plan& p) { p.lr_scale = 0.5; }, true},
      {"layer.bn: momentum is", [](Plan& p) { p.bn.momentum = 0.25; }, false},
      {"ema",
       [](Plan& p) {
         p.ema.emplace();
         EXPECT_OK(ga_ema_init(&*p.ema, sizeof *p.ema));
       },
       false}};
  for (const Change& change : changes) {
    for (const bool in_file : {false, true}) {
      SCOPED_TRACE(std::string(change.word) + (in_file ? " of the file" : " of the context"));
      Plan other;
      change.set(other);
      const Plan theirs = in_file ? other : Plan(), ours = in_file ? Plan() : other;
      Net source(theirs);  // with an empty window, as a loss scale cannot change within one
      for (uint64_t k = 0; k < 3; ++k) source.accumulate(k), source.step();
      const Bytes bytes = saved(source.ctx);
      ga_state_options o = state_options();
      Net net(ours);
      expect_refused(net, bytes, GA_ERROR_INVALID_ARGUMENT, {change.word}, &o);
      o.settings = GA_SETTINGS_TAKE;
      if (change.taken) {
        Net taking(ours);
        ASSERT_OK(load(taking.ctx, bytes, &o));
        for (uint64_t k = 5; k < 8; ++k) {
          for (Net* n : {&source, &taking}) n->accumulate(k), n->step();
        }
        EXPECT_EQ(taking.values(), source.values());
        EXPECT_EQ(saved(taking.ctx), saved(source.ctx));
      } else {
        expect_refused(net, bytes, GA_ERROR_INVALID_ARGUMENT, {change.word}, &o);
      }
      o.settings = GA_SETTINGS_KEEP;
      const bool average = std::string(change.word) == "ema";
      if (average && in_file) {
        expect_refused(net, bytes, GA_ERROR_INVALID_ARGUMENT, {"no place for \"w.ema\""}, &o);
      } else {
        EXPECT_OK(load(net.ctx, bytes, &o));
        net.accumulate(1);
        EXPECT_EQ(net.step().outcome, GA_STEP_APPLIED);
      }
    }
  }
}

// Also what has the same name as a setting that cannot be taken.
TEST(Fit, TheKindOfAScheduleAndTheFlavorOfAClipAreTaken) {
  Plan theirs, ours;
  theirs.schedule = schedule(GA_SCHEDULE_COSINE);
  theirs.schedule->total_steps = 9;
  ours.schedule = schedule(GA_SCHEDULE_LINEAR);
  ours.schedule->total_steps = 9;
  Net source(theirs), net(ours);
  const ga_clip keras = clip(GA_CLIP_GLOBAL, 0.5, GA_FLAVOR_KERAS),
                torch = clip(GA_CLIP_GLOBAL, 0.5);
  EXPECT_OK(ga_group_set_clip(source.ctx, 0, &keras));
  EXPECT_OK(ga_group_set_clip(net.ctx, 0, &torch));
  source.train();
  const Bytes bytes = saved(source.ctx);
  ga_state_options o = state_options();
  expect_refused(net, bytes, GA_ERROR_INVALID_ARGUMENT,
                 {"group.0.clip: flavor is 1", "group.0.schedule: kind is 2 in the file, but 1"},
                 &o);
  o.settings = GA_SETTINGS_TAKE;
  EXPECT_OK(load(net.ctx, bytes, &o));
  EXPECT_EQ(saved(net.ctx), bytes);
}

// A context that has trained with one kind of clip, or without one, and takes another from the file.
TEST(Fit, ATrainedContextTakesAnotherClip) {
  ga_state_options take = state_options();
  take.settings = GA_SETTINGS_TAKE;
  Plan none, norm, agc;
  norm.clip = clip(GA_CLIP_GLOBAL, 0.25);
  agc.clip = clip(GA_CLIP_AGC, 0);
  for (const Plan* before : {&none, &norm, &agc}) {
    for (const Plan* after : {&none, &norm, &agc}) {
      SCOPED_TRACE(testing::Message() << before - &none << " to " << after - &none);
      Net net(*before), other(*after);
      for (Net* n : {&net, &other}) {
        n->train();
        EXPECT_OK(ga_discard(n->ctx));
      }
      EXPECT_OK(load(net.ctx, saved(other.ctx), &take));
      for (Net* n : {&net, &other}) n->accumulate(5), n->step();
      EXPECT_EQ(net.values(), other.values());
    }
  }
}

TEST(Fit, SettingsAreNamedAsPeopleReadThem) {
  Plan plan;
  plan.optimizer.kind = GA_OPTIMIZER_ADAM;
  plan.optimizer.lr = 0.25;
  plan.optimizer.weight_decay = 0.1;
  Net net(plan);
  expect_refused(
      net, trained(), GA_ERROR_INVALID_ARGUMENT,
      {"group.0: kind is AdamW in the file, but Adam here",
       "lr is 0.001 in the file, but 0.25 here", "weight_decay is 0.01 in the file, but 0.1 here"});
}

// ADOPT's exponent came after the first files: a file without it means 1/4, and one of 1/4 is
// written without it, as it always was.
TEST(Fit, AnExponentThatAFileLacksIsOneQuarter) {
  Plan quarter, timm;
  for (Plan* plan : {&quarter, &timm})
    ASSERT_OK(ga_optimizer_init(&plan->optimizer, sizeof plan->optimizer, GA_OPTIMIZER_ADOPT,
                                GA_FLAVOR_TORCH));
  timm.optimizer.clip_exponent = 0.333;
  const auto file_of = [](const Plan& plan) {
    Net net(plan);
    for (uint64_t k = 0; k < 3; ++k) net.accumulate(k), net.step();
    return saved(net.ctx);
  };
  const auto names = [](const Bytes& file) {
    return std::string(file.begin(), file.end()).find("clip_exponent") != std::string::npos;
  };
  const Bytes old = file_of(quarter), later = file_of(timm);
  EXPECT_FALSE(names(old));
  EXPECT_TRUE(names(later));
  Net of_quarter(quarter), of_timm(timm);
  expect_refused(of_timm, old, GA_ERROR_INVALID_ARGUMENT,
                 {"group.0: clip_exponent is 0.25 in the file, but 0.333 here"});
  expect_refused(of_quarter, later, GA_ERROR_INVALID_ARGUMENT,
                 {"group.0: clip_exponent is 0.333 in the file, but 0.25 here"});
  EXPECT_OK(load(of_quarter.ctx, old));
  EXPECT_OK(load(of_timm.ctx, later));
  EXPECT_EQ(saved(of_timm.ctx), later);
  ga_state_options take = state_options();
  take.settings = GA_SETTINGS_TAKE;
  for (const bool back : {false, true}) {
    Net net(back ? timm : quarter), same(back ? quarter : timm);
    EXPECT_OK(load(net.ctx, back ? old : later, &take));
    EXPECT_OK(load(same.ctx, back ? old : later));
    for (uint64_t k = 3; k < 6; ++k)
      for (Net* n : {&net, &same}) n->accumulate(k), n->step();
    EXPECT_EQ(net.values(), same.values());
    EXPECT_EQ(saved(net.ctx), saved(same.ctx));
  }
}

// A parameter that was trained and then frozen has state, also in a context where it is frozen from
// the start.
TEST(Fit, AFrozenParameterGetsItsState) {
  for (const bool taken : {false, true}) {
    Net net, other;
    net.train();
    EXPECT_OK(ga_discard(net.ctx));
    EXPECT_OK(ga_param_set_frozen(net.ctx, 0, 1));
    const Bytes bytes = saved(net.ctx);
    ga_state_options o = state_options();
    if (taken) {
      o.settings = GA_SETTINGS_TAKE;
    } else {
      expect_refused(other, bytes, GA_ERROR_INVALID_ARGUMENT, {"parameter.w: frozen is 1"});
      EXPECT_OK(ga_param_set_frozen(other.ctx, 0, 1));
    }
    EXPECT_OK(load(other.ctx, bytes, &o));
    EXPECT_EQ(saved(other.ctx), bytes);
    for (Net* n : {&net, &other}) {
      n->accumulate(5), n->step();
      EXPECT_OK(ga_param_set_frozen(n->ctx, 0, 0));
      n->accumulate(6), n->step();
    }
    EXPECT_EQ(other.values(), net.values());
  }
}

TEST(Fit, KeptSettingsAreThoseOfTheContext) {
  Plan fast;
  fast.optimizer.lr = 0.25;
  Net net(fast);
  ga_state_options o = state_options();
  o.settings = GA_SETTINGS_KEEP;
  EXPECT_OK(load(net.ctx, trained(), &o));
  EXPECT_EQ(group_lr(net.ctx), 0.25);
  Net hand;
  hand.train();
  EXPECT_OK(ga_group_set_lr(hand.ctx, 0, 0.25));
  for (Net* n : {&net, &hand}) n->accumulate(3), n->step();
  EXPECT_EQ(net.values(), hand.values());
}

TEST(Fit, AnOpenWindowNeedsTheSettingsItDependsOn) {
  const Bytes bytes = trained();
  ga_state_options o = state_options();
  o.settings = GA_SETTINGS_KEEP;
  const auto refused = [&](const char* word, auto set) {
    SCOPED_TRACE(word);
    Plan plan;
    set(plan);
    Net net(plan);
    expect_refused(net, bytes, GA_ERROR_INVALID_ARGUMENT, {"open window", word}, &o);
  };
  refused("nonfinite", [](Plan& p) { p.config.nonfinite = GA_NONFINITE_DROP_MICRO; });
  refused("accumulation", [](Plan& p) { p.config.accumulation = GA_ACCUMULATE_RUNNING_MEAN; });
  refused("clip_micro", [](Plan& p) {
    p.clip = clip(GA_CLIP_GLOBAL, 1);
    p.clip->when = GA_CLIP_WHEN_MICRO;
  });
  refused("gradient_kind", [](Plan& p) { p.config.gradient_kind = GA_GRADIENT_SUM; });
  refused("noise_scale", [](Plan& p) { p.config.noise_scale = 1; });
}

// The window in the file holds one micro-batch.
// Settings that a load takes from the file are those that an open window depends on.
TEST(Fit, AnOpenWindowTakesTheSettingsItDependsOn) {
  Plan plan;
  plan.scaler.emplace();
  EXPECT_OK(ga_loss_scaler_init(&*plan.scaler, sizeof *plan.scaler));
  plan.clip = clip(GA_CLIP_GLOBAL, 1);
  plan.clip->when = GA_CLIP_WHEN_MICRO;
  const Bytes bytes = trained(plan);
  ga_state_options o = state_options();
  Net other;
  expect_refused(other, bytes, GA_ERROR_INVALID_ARGUMENT, {"loss_scaler"}, &o);
  o.settings = GA_SETTINGS_KEEP;
  expect_refused(other, bytes, GA_ERROR_INVALID_ARGUMENT, {"clip_micro is 1", "scaled is 1"}, &o);
  o.settings = GA_SETTINGS_TAKE;
  EXPECT_OK(load(other.ctx, bytes, &o));
  EXPECT_EQ(saved(other.ctx), bytes);
  Net same(plan);
  same.train();
  for (Net* net : {&same, &other}) {
    net->accumulate(10);
    net->step();
  }
  EXPECT_EQ(same.values(), other.values());

  // What cannot be taken is compared, and the settings are then as they were.
  plan.config.nonfinite = GA_NONFINITE_DROP_MICRO;
  Net third(plan);
  expect_refused(third, trained(), GA_ERROR_INVALID_ARGUMENT, {"nonfinite is"}, &o);
  plan = {};
  plan.config.accum_steps = 2;
  plan.optimizer.lr = 0.5;
  Net full(plan);
  Net longer;
  longer.train();
  for (const uint64_t k : {10, 11}) longer.accumulate(k);
  expect_refused(full, saved(longer.ctx), GA_ERROR_INVALID_ARGUMENT, {"holds 3 micro-batches"}, &o);
  EXPECT_EQ(group_lr(full.ctx), 0.5);
}

// The file with one number of a tensor of I64 or F64 changed, and with checksums that say nothing of it.
Bytes changed(const Bytes& file, const std::string& tensor, size_t element, double value) {
  StateParts parts;
  safetensors::Header header;
  EXPECT_TRUE(parts.read(file.data(), file.size()) && parts.parse(header));
  const auto t = std::find_if(header.tensors.begin(), header.tensors.end(),
                              [&](const safetensors::Tensor& x) { return x.name == tensor; });
  const size_t at =
      t == header.tensors.end() ? parts.data.size() : static_cast<size_t>(t->begin) + 8 * element;
  if (at + 8 > parts.data.size()) {
    ADD_FAILURE() << "there is no number " << element << " in " << tensor;
    return file;
  }
  const auto integer = static_cast<int64_t>(value);
  memcpy(parts.data.data() + at, t->dtype == "I64" ? static_cast<const void*>(&integer) : &value,
         8);
  parts.repair();
  Bytes result;
  parts.write(result);
  return result;
}

// A window that contradicts itself, as no context saves it, is refused before it changes anything.
TEST(Fit, NumbersThatContradictEachOtherAreRefused) {
  Plan rows, windowed, nadam;
  rows.options.rows = GA_ROWS_DENSE;
  rows.layer = windowed.layer = "layer";
  windowed.bn = bn_options(GA_BN_WINDOW);
  nadam.optimizer = optimizer(GA_OPTIMIZER_NADAM);
  struct Case {
    const Plan* plan;
    const char* tensor;
    size_t element;
    double value;
    const char* words;
  };
  const Plan plain;
  const Case cases[] = {
      {&rows, "w.grad_accum.rows", 0, 3, "one that the parameter has not"},
      {&rows, "w.grad_accum.rows", 0, -1, "one that the parameter has not"},
      {&rows, "w.grad_accum.rows", 0, -2, "a number in \"w.grad_accum.rows\""},
      {&rows, "w.grad_accum.window", 0, 1, "has no gradient"},
      {&plain, "w.grad_accum.window", 0, 2, "a gradient of some rows"},
      {&plain, "w.grad_accum.window", 0, 3, "the window of \"w\""},
      {&plain, "w.grad_accum.window", 1, 0.5, "the window of \"w\""},
      {&plain, "w.grad_accum.window", 2, -1, "the window of \"w\""},
      {&plain, "w.grad_accum.window", 3, 9007199254740994, "the window of \"w\""},
      {&plain, "w.grad_accum.window", 5, 2, "the window of \"w\""},
      {&plain, "w.grad_accum.partials", 2, 2, "the window of \"w\""},
      {&plain, "w.step", 0, -1, "w.step"},
      {&nadam, "w.mu_product", 0, 1.5, "\"w.mu_product\" was 1.5"},
      {&plain, "gradaccum.window.micro_batches", 0, -1, "micro-batch 0 of its window"},
      {&plain, "gradaccum.window.micro_batches", 1, 0, "micro-batch 0 of its window"},
      {&plain, "gradaccum.window.micro_batches", 1, NAN, "micro-batch 0 of its window"},
      {&plain, "gradaccum.window.micro_batches", 2, 2, "a micro-batch"},
      {&plain, "gradaccum.window.micro_batches", 3, -1, "a micro-batch"},
      {&plain, "bn.running_mean", 1, NAN, "\"bn\": a running mean was nan"},
      {&plain, "bn.running_var", 1, -1, "its variance -1"},
      {&plain, "bn.num_batches_tracked", 0, -1, "num_batches_tracked"},
      {&windowed, "layer.bn_window", 3, 2, "\"layer\""},
      {&windowed, "layer.bn_window.sweep", 0, 1, "\"layer\""},
      {&windowed, "layer.bn_window.sweep", 1, -2, "bn_window.sweep"},
      {&windowed, "layer.bn_window.sweep", 4, 3, "\"layer\""},
      {&windowed, "layer.bn_window.sweep", 5, 2, "\"layer\""},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(testing::Message() << c.tensor << "[" << c.element << "] = " << c.value);
    const Bytes bytes = trained(*c.plan);
    Net net(*c.plan);
    expect_refused(net, changed(bytes, c.tensor, c.element, c.value), GA_ERROR_FORMAT, {c.words});
  }
  Net sparse(rows);
  const std::string list = "w.grad_accum.rows";
  expect_refused(sparse, changed(changed(trained(rows), list, 0, 1), list, 1, 1), GA_ERROR_FORMAT,
                 {"a row twice"});
  StateParts parts;
  const Bytes with_rows = trained(rows);
  ASSERT_TRUE(parts.read(with_rows.data(), with_rows.size()));
  const size_t at = parts.text.find("rows_held=");
  ASSERT_NE(at, parts.text.npos);
  parts.text[at + 10] = '0';
  parts.repair();
  Bytes none;
  parts.write(none);
  expect_refused(sparse, none, GA_ERROR_FORMAT, {"rows, but says that it has 0"});
}

TEST(Fit, KIsFreeButNotBelowTheWindow) {
  Plan two;
  two.config.accum_steps = 2;
  Net net(two);
  net.accumulate(0), net.step();
  net.accumulate(1), net.accumulate(2);
  const Bytes bytes = saved(net.ctx);
  for (const int64_t k : {0, 2, 3}) {
    Plan plan;
    plan.config.accum_steps = k;
    Net other(plan);
    EXPECT_OK(load(other.ctx, bytes)) << k;
    EXPECT_EQ(window(other.ctx).state, k == 2 ? GA_WINDOW_FULL : GA_WINDOW_OPEN);
    EXPECT_EQ(window(other.ctx).accum_steps, k);
    EXPECT_EQ(window(other.ctx).micro_batches, 2);
  }
  Plan one;
  one.config.accum_steps = 1;
  Net other(one);
  expect_refused(other, bytes, GA_ERROR_INVALID_ARGUMENT, {"2 micro-batches", "is 1"});
}

// UndefinedBehaviorSanitizer found a NULL address of no bytes here.
TEST(Fit, AWindowMayHaveBroughtNoRows) {
  Plan plan;
  plan.options.rows = GA_ROWS_DENSE;
  Net net(plan), other(plan);
  const int64_t index = 0;
  const float values[2] = {1, 1};
  EXPECT_OK(ga_micro_begin(net.ctx, 0, 1, nullptr));
  EXPECT_OK(ga_accumulate_rows(net.ctx, 0, &index, GA_I64, 0, values));
  EXPECT_OK(ga_micro_end(net.ctx));
  const Bytes bytes = saved(net.ctx);
  EXPECT_OK(load(other.ctx, bytes));
  EXPECT_EQ(saved(other.ctx), bytes);
  net.step(), other.step();
  EXPECT_EQ(saved(other.ctx), saved(net.ctx));
}

// The text of a parameter's settings in a file.
std::string settings_of(const Bytes& bytes, const std::string& name) {
  const std::string file(bytes.begin(), bytes.end());
  const std::string key = "\"gradaccum.parameter." + name + "\":\"";
  const size_t at = file.find(key);
  EXPECT_NE(at, std::string::npos);
  return file.substr(at, file.find('"', at + key.size()) - at);
}

TEST(Fit, TheOrderOfParametersDoesNotMatter) {
  for (const bool by_chance : {false, true}) {
    Plan plan;
    plan.dtype = GA_BF16;
    plan.options = options(GA_F32, GA_F32);
    plan.options.gradient_dtype = GA_F32;
    plan.options.rounding = by_chance ? GA_ROUND_STOCHASTIC : GA_ROUND_NEAREST;
    const Bytes bytes = trained(plan);
    Plan turned = plan;
    turned.names = {"b", "w"};
    Net net(turned);
    ga_state_options o = state_options();
    o.settings = GA_SETTINGS_KEEP;
    EXPECT_OK(load(net.ctx, bytes, by_chance ? &o : nullptr));
    // The numbers in the keys of random bits go with the names.
    EXPECT_EQ(settings_of(saved(net.ctx), "b"), settings_of(bytes, "b"));
    EXPECT_EQ(settings_of(saved(net.ctx), "w"), settings_of(bytes, "w"));
  }
}

// ---- Parts, notes and callbacks -----------------------------------------------------------------

TEST(Parts, ParametersAloneAreAModelAndTheLibraryAloneIsTheRest) {
  Plan plan;
  plan.dtype = GA_BF16;
  plan.options.gradient_dtype = GA_F32;
  Net net(plan);
  net.train();
  ga_state_options model = state_options(), library = state_options();
  model.parts = GA_STATE_PARAMETERS;
  library.parts = GA_STATE_LIBRARY;
  const Bytes of_model = saved(net.ctx, &model), of_library = saved(net.ctx, &library),
              all = saved(net.ctx);
  EXPECT_LT(of_model.size(), of_library.size());
  EXPECT_LT(of_library.size(), all.size());

  // A model into a run: master weights are taken from it, and everything else stays.
  Net run(plan);
  run.accumulate(1), run.step();
  EXPECT_EQ(load(run.ctx, of_model), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_OK(load(run.ctx, of_model, &model));
  EXPECT_EQ(run.values(), net.values());
  EXPECT_EQ(window(run.ctx).steps, 1);
  std::vector<float> master(6);
  EXPECT_OK(ga_state_get(run.ctx, 0, "master", master.data(), GA_F32, 6));
  for (int64_t i = 0; i < 6; ++i) EXPECT_EQ(master[static_cast<size_t>(i)], run.data[0].get(i));
  EXPECT_OK(load(run.ctx, all, &model));  // also from a whole file
  EXPECT_EQ(window(run.ctx).steps, 1);

  // The library's part, with parameters that the program has kept by itself.
  Net rest(plan);
  for (size_t i = 0; i < 2; ++i)
    for (int64_t j = 0; j < 6; ++j) rest.data[i].set(j, net.data[i].get(j));
  EXPECT_OK(load(rest.ctx, of_library, &library));
  EXPECT_EQ(saved(rest.ctx), all);
}

TEST(Parts, ANoteIsKeptAndAskedFor) {
  const std::string path = testing::TempDir() + "note.safetensors";
  Net net;
  ga_state_options o = state_options();
  o.note = "{\"epoch\": 3, \"name\": \"\xc3\xa9\"}\n";
  EXPECT_OK(ga_save(net.ctx, path.c_str(), &o));
  size_t size = 0;
  char note[64];
  EXPECT_OK(ga_state_note(path.c_str(), note, sizeof note, &size));
  EXPECT_STREQ(note, o.note);
  EXPECT_EQ(size, strlen(o.note) + 1);
  EXPECT_EQ(ga_state_note(path.c_str(), note, size - 1, &size), GA_ERROR_INVALID_ARGUMENT);
  o.note = "\xff";
  EXPECT_EQ(ga_save(net.ctx, path.c_str(), &o), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_OK(ga_state_note(path.c_str(), note, sizeof note, &size));  // the file is as it was
  EXPECT_STREQ(note, "{\"epoch\": 3, \"name\": \"\xc3\xa9\"}\n");
  EXPECT_OK(ga_save(net.ctx, path.c_str(), nullptr));
  EXPECT_OK(ga_state_note(path.c_str(), nullptr, 0, &size));
  EXPECT_EQ(size, 0u);
  EXPECT_EQ(remove(path.c_str()), 0);
  EXPECT_EQ(ga_state_note(path.c_str(), nullptr, 0, &size), GA_ERROR_IO);
}

// A progress callback that cancels at one of its calls.
struct Progress {
  int cancel_at = -1;
  int calls = 0;
  int64_t done = 0, total = -1;

  static int32_t call(void* user, int64_t done, int64_t total) {
    auto& p = *static_cast<Progress*>(user);
    EXPECT_GE(done, p.done);
    EXPECT_LE(done, total);
    EXPECT_TRUE(p.total < 0 || p.total == total);
    p.done = done;
    p.total = total;
    return p.calls++ == p.cancel_at;
  }
};

TEST(Callbacks, ProgressEndsWithAllAndCancels) {
  Net net;
  net.train();
  ga_state_options o = state_options();
  Progress whole;
  o.progress = Progress::call;
  o.progress_user = &whole;
  const Bytes bytes = saved(net.ctx, &o);
  EXPECT_EQ(whole.done, whole.total);
  EXPECT_GT(whole.total, 0);
  for (int at = 0; at < whole.calls; ++at) {
    Progress p;
    p.cancel_at = at;
    o.progress_user = &p;
    Bytes out(bytes.size());
    size_t size = 0;
    EXPECT_EQ(ga_save_to_memory(net.ctx, &o, out.data(), out.size(), &size), GA_ERROR_CANCELLED);
    EXPECT_EQ(p.calls, at + 1);
  }
  EXPECT_EQ(saved(net.ctx), bytes);

  Progress loading;
  o.progress_user = &loading;
  Net other;
  EXPECT_OK(load(other.ctx, bytes, &o));
  EXPECT_EQ(loading.done, loading.total);
  int cancelled = 0;
  for (int at = 0; at < loading.calls; ++at) {
    Progress p;
    p.cancel_at = at;
    o.progress_user = &p;
    Net fresh;
    if (p.cancel_at == 0) expect_refused(fresh, bytes, GA_ERROR_CANCELLED, {"cancelled"}, &o);
    const ga_status status = load(fresh.ctx, bytes, &o);
    EXPECT_TRUE(status == GA_ERROR_CANCELLED || status == GA_OK) << ga_last_error();
    cancelled += status == GA_ERROR_CANCELLED;
    if (status == GA_OK) {
      EXPECT_EQ(saved(fresh.ctx), bytes);
    }
  }
  EXPECT_GT(cancelled, loading.calls / 3);
  EXPECT_LT(cancelled, loading.calls);
}

struct Pipe {
  ga_context* ctx;
  Bytes bytes;
  int fail_at = -1, calls = 0;
  bool header_seen = false;
  int64_t end = -1;

  static int32_t write(void* user, int64_t offset, const void* data, size_t size) {
    auto& p = *static_cast<Pipe*>(user);
    EXPECT_EQ(ga_step(p.ctx, nullptr), GA_ERROR_INVALID_STATE);
    if (p.calls++ == p.fail_at) return 7;
    EXPECT_FALSE(p.header_seen) << "the header must come last";
    if (offset == 0) p.header_seen = true;
    if (offset != 0 && p.end >= 0) {
      EXPECT_EQ(offset, p.end) << "a byte was left out";
    }
    if (offset != 0) p.end = offset + static_cast<int64_t>(size);
    const auto last = static_cast<size_t>(offset) + size;
    if (p.bytes.size() < last) p.bytes.resize(last);
    memcpy(p.bytes.data() + offset, data, size);
    return 0;
  }
  static int32_t read(void* user, int64_t offset, void* data, size_t size) {
    auto& p = *static_cast<Pipe*>(user);
    if (p.calls++ == p.fail_at) return 7;
    EXPECT_LE(static_cast<size_t>(offset) + size, p.bytes.size());
    memcpy(data, p.bytes.data() + offset, size);
    return 0;
  }
};

TEST(Callbacks, StoresOfTheProgramFailAndCallBackInVain) {
  Net net;
  net.train();
  Pipe whole = {net.ctx, {}};
  EXPECT_OK(ga_state_write(net.ctx, Pipe::write, &whole, nullptr));
  EXPECT_TRUE(whole.header_seen);
  EXPECT_EQ(whole.bytes, saved(net.ctx));
  for (int at = 0; at < whole.calls; ++at) {
    Pipe pipe = {net.ctx, {}, at};
    EXPECT_EQ(ga_state_write(net.ctx, Pipe::write, &pipe, nullptr), GA_ERROR_IO);
    EXPECT_NE(std::string(ga_last_error()).find("returned 7"), std::string::npos);
  }
  const auto size = static_cast<int64_t>(whole.bytes.size());
  Pipe reading = {nullptr, whole.bytes};
  Net all;
  EXPECT_OK(ga_state_read(all.ctx, Pipe::read, &reading, size, nullptr));
  int broken = 0;
  for (int at = 0; at < reading.calls; ++at) {
    Pipe pipe = {nullptr, whole.bytes, at};
    Net fresh;
    const Bytes before = saved(fresh.ctx);
    const ga_status status = ga_state_read(fresh.ctx, Pipe::read, &pipe, size, nullptr);
    // The second reading is into place: there the context is lost.
    EXPECT_TRUE(status == GA_ERROR_IO || status == GA_ERROR_FAULT) << ga_last_error();
    EXPECT_NE(std::string(ga_last_error()).find("returned 7"), std::string::npos);
    if (status == GA_ERROR_FAULT) {
      ++broken;
      EXPECT_EQ(ga_step(fresh.ctx, nullptr), GA_ERROR_FAULT);
    } else {
      EXPECT_EQ(saved(fresh.ctx), before);
    }
  }
  EXPECT_GT(broken, 0);
  EXPECT_LT(broken, reading.calls);
}

// A callback in C++ that throws has the effect of one that fails, and is named.
TEST(Callbacks, ExceptionsOfCallbacks) {
  static int throw_at, calls;
  const Bytes bytes = trained();
  ga_state_options o = state_options();
  o.progress = [](void*, int64_t, int64_t) -> int32_t {
    if (calls++ == throw_at) throw std::runtime_error("no progress");
    return 0;
  };
  int unchanged = 0, broken = 0;
  for (throw_at = 0;; ++throw_at) {
    SCOPED_TRACE(throw_at);
    calls = 0;
    Net net;
    const Bytes before = saved(net.ctx);
    const ga_status status = load(net.ctx, bytes, &o);
    if (status == GA_OK) break;
    EXPECT_EQ(status, GA_ERROR_FAULT);
    EXPECT_NE(
        std::string(ga_last_error()).find("progress function threw an exception: no progress"),
        std::string::npos)
        << ga_last_error();
    if (ga_synchronize(net.ctx) == GA_ERROR_FAULT) {
      ++broken;
      EXPECT_EQ(ga_step(net.ctx, nullptr), GA_ERROR_FAULT);
    } else {
      ++unchanged;
      EXPECT_EQ(saved(net.ctx), before);
    }
  }
  EXPECT_GT(unchanged, 0);
  EXPECT_GT(broken, 0);
}

TEST(Callbacks, ExceptionsOfStores) {
  Net net;
  net.train();
  const Bytes before = saved(net.ctx);
  EXPECT_TRUE(refused(ga_state_write(
                          net.ctx,
                          [](void*, int64_t, const void*, size_t) -> int32_t {
                            throw std::runtime_error("no paper");
                          },
                          nullptr, nullptr),
                      GA_ERROR_FAULT, {"write function threw an exception: no paper"}));
  Net other;
  EXPECT_TRUE(refused(ga_state_read(
                          other.ctx, [](void*, int64_t, void*, size_t) -> int32_t { throw 7; },
                          nullptr, static_cast<int64_t>(before.size()), nullptr),
                      GA_ERROR_FAULT, {"read function threw an exception"}));
  EXPECT_OK(load(other.ctx, before)) << "a read that failed has changed the context";
  EXPECT_EQ(saved(net.ctx), before);
}

// A store whose bytes change between the two readings.
TEST(Callbacks, ASecondReadingOfOtherBytesIsNoticed) {
  const Bytes bytes = trained();
  struct Changing {
    Bytes bytes;
    int64_t read = 0;
  } store = {bytes};
  const auto read = [](void* user, int64_t offset, void* data, size_t size) -> int32_t {
    auto& s = *static_cast<Changing*>(user);
    s.read += static_cast<int64_t>(size);
    memcpy(data, s.bytes.data() + offset, size);
    if (s.read > static_cast<int64_t>(s.bytes.size())) static_cast<char*>(data)[size / 2] ^= 1;
    return 0;
  };
  Net net;
  EXPECT_EQ(ga_state_read(net.ctx, read, &store, static_cast<int64_t>(bytes.size()), nullptr),
            GA_ERROR_FAULT);
  EXPECT_EQ(ga_step(net.ctx, nullptr), GA_ERROR_FAULT);
}

// ---- Headers beyond what safetensors allows ------------------------------------------------------

// Long names make a header of more than 100 MB of few parameters.
Plan of_long_names() {
  Plan plan;
  plan.optimizer = optimizer(GA_OPTIMIZER_SGD);
  plan.optimizer.momentum = 0.9;
  plan.shape = {};
  plan.names.clear();
  for (int i = 0; i < 8000; ++i) plan.names.push_back(std::to_string(i) + std::string(4000, 'n'));
  return plan;
}

TEST(LargeHeaders, AreTensorsOfAFileOfFormat2) {
  const Plan plan = of_long_names();
  Net net(plan);
  net.train();
  const Bytes bytes = saved(net.ctx);
  {
    // What other readers see, those of earlier versions of this library among them.
    uint64_t length = 0;
    memcpy(&length, bytes.data(), sizeof length);
    ASSERT_LT(length, 1000u);
    const safetensors::Header header = safetensors::parse(
        {bytes.data() + 8, length}, static_cast<int64_t>(bytes.size() - 8 - length));
    ASSERT_EQ(header.tensors.size(), 2u);
    EXPECT_EQ(header.tensors[0].name, "gradaccum.data");
    EXPECT_EQ(header.tensors[1].name, "gradaccum.index");
    EXPECT_GT(header.tensors[1].end - header.tensors[1].begin, safetensors::kMostHeader);
    EXPECT_EQ(header.metadata[0].first, "gradaccum.format");
    EXPECT_EQ(header.metadata[0].second, "2 xxh3");
  }
  Net other(plan);
  ASSERT_OK(load(other.ctx, bytes));
  EXPECT_EQ(saved(other.ctx), bytes);
  for (Net* n : {&net, &other}) {
    n->accumulate(10);
    n->step();
  }
  EXPECT_EQ(other.values(), net.values());

  const ga_window_info before = window(other.ctx);
  for (const size_t at :
       {size_t{20}, size_t{100}, size_t{400}, bytes.size() / 2, bytes.size() - 100}) {
    Bytes damaged = bytes;
    damaged[at] ^= 1;
    EXPECT_EQ(load(other.ctx, damaged), GA_ERROR_FORMAT) << at << ": " << ga_last_error();
  }
  const Bytes cut(bytes.begin(), bytes.end() - 1);
  EXPECT_EQ(load(other.ctx, cut), GA_ERROR_FORMAT);
  const ga_window_info after = window(other.ctx);
  EXPECT_TRUE(same_window(before, after));
}

// ---- Damage -------------------------------------------------------------------------------------

class Damage : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(All, Damage, testing::Bool());

// Also where files without a mark are legal: no damage may make one of a file of ours.
TEST_P(Damage, EveryTruncationAndEveryBitIsRefused) {
  const Bytes bytes = trained();
  ga_state_options o = state_options();
  o.unmarked = GetParam();
  o.allow_extra = o.allow_missing = GetParam();
  Net net;
  const Bytes before = saved(net.ctx);
  const auto refused = [&](const Bytes& damaged, size_t at) {
    const ga_status status = load(net.ctx, damaged, &o);
    if (status != GA_ERROR_FORMAT) ADD_FAILURE() << "at " << at << ": " << ga_last_error();
  };
  for (size_t size = 0; size < bytes.size() && !HasFailure(); ++size)
    refused(Bytes(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size)), size);
  Bytes longer = bytes;
  longer.push_back(0);
  refused(longer, longer.size());
  Bytes damaged = bytes;
  for (size_t at = 0; at < bytes.size() && !HasFailure(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      damaged[at] = static_cast<char>(bytes[at] ^ (1 << bit));
      refused(damaged, at);
    }
    damaged[at] = bytes[at];
  }
  EXPECT_EQ(saved(net.ctx), before);
  EXPECT_OK(load(net.ctx, bytes, &o));
}

// ---- Files --------------------------------------------------------------------------------------

TEST(Files, ASaveReplacesAFileAndALoadReadsIt) {
  const std::string path = testing::TempDir() + "run.safetensors";
  Net net;
  net.train();
  for (int k = 0; k < 2; ++k) EXPECT_OK(ga_save(net.ctx, path.c_str(), nullptr));
  const std::string text = contents(path);
  const Bytes bytes(text.begin(), text.end());
  EXPECT_EQ(bytes, saved(net.ctx));
  Net other;
  EXPECT_OK(ga_load(other.ctx, path.c_str(), nullptr));
  EXPECT_EQ(saved(other.ctx), bytes);
  EXPECT_EQ(remove(path.c_str()), 0);
  EXPECT_EQ(ga_load(net.ctx, path.c_str(), nullptr), GA_ERROR_INVALID_STATE);  // a window is open
  EXPECT_OK(ga_discard(net.ctx));
  EXPECT_EQ(ga_load(net.ctx, path.c_str(), nullptr), GA_ERROR_IO);
  EXPECT_EQ(ga_save(net.ctx, (testing::TempDir() + "no/folder").c_str(), nullptr), GA_ERROR_IO);
  EXPECT_EQ(ga_save(net.ctx, testing::TempDir().c_str(), nullptr), GA_ERROR_IO);
  EXPECT_EQ(ga_load(net.ctx, "/dev/null", nullptr), GA_ERROR_IO);
  EXPECT_EQ(ga_save(net.ctx, "", nullptr), GA_ERROR_INVALID_ARGUMENT);
}

// Two threads make contexts, train, save to one path and load from it, at the same time.
TEST(Threads, SaveToOnePathAndLoadFromIt) {
  const Folder folder;
  const std::string path = folder / "x.safetensors";
  Plan plan;
  plan.ema.emplace();
  EXPECT_OK(ga_ema_init(&*plan.ema, sizeof *plan.ema));
  plan.dtype = GA_BF16;
  plan.options = options(GA_F32);
  const auto train = [](Net& net, uint64_t windows) {
    for (uint64_t k = 0; k <= 2 * windows; ++k) {
      net.accumulate(k);
      if (k % 2 == 1) net.step();
    }
  };
  Bytes states[2];
  for (const uint64_t k : {0, 1}) {
    Net net(plan);
    train(net, 1 + k);
    states[k] = saved(net.ctx);
    EXPECT_OK(ga_save(net.ctx, path.c_str(), nullptr));
  }
  std::atomic<int> seen[3] = {{0}, {0}, {0}};  // the states, and what is neither
  const auto work = [&](size_t self) {
    const std::string own = path + std::to_string(self);
    for (int k = 0; k < 60; ++k) {
      Net net(plan), other(plan);
      train(net, 1 + self);
      EXPECT_OK(ga_save(net.ctx, path.c_str(), nullptr));
      EXPECT_OK(ga_save(net.ctx, own.c_str(), nullptr));
      EXPECT_OK(ga_load(other.ctx, path.c_str(), nullptr));
      const Bytes found = saved(other.ctx);
      ++seen[found == states[0] ? 0 : found == states[1] ? 1 : 2];
      EXPECT_OK(ga_discard(other.ctx));
      EXPECT_OK(ga_load(other.ctx, own.c_str(), nullptr));
      EXPECT_EQ(saved(other.ctx), states[self]);
    }
    EXPECT_EQ(remove(own.c_str()), 0);
  };
  std::thread a(work, 0), b(work, 1);
  a.join();
  b.join();
  EXPECT_GT(seen[0], 0);
  EXPECT_GT(seen[1], 0);
  EXPECT_EQ(seen[2], 0);
  EXPECT_EQ(remove(path.c_str()), 0);
}

// ---- Files of earlier versions ------------------------------------------------------------------

// A file for each kind of state, written by an earlier version of the library.
std::vector<std::pair<std::string, Plan>> golden() {
  std::vector<std::pair<std::string, Plan>> list;
  const auto add = [&](const char* name, int32_t kind, auto set, int32_t flavor = GA_FLAVOR_TORCH) {
    Plan plan;
    plan.optimizer = optimizer(kind, flavor);
    plan.optimizer.lr = 0.0625;
    set(plan);
    list.emplace_back(name, plan);
  };
  const auto narrow = [](Plan& p, int32_t dtype) {
    p.dtype = dtype;
    p.options.gradient_dtype = GA_F32;
  };
  add("sgd", GA_OPTIMIZER_SGD, [](Plan& p) { p.optimizer.momentum = 0.5; });
  add("adamw_amsgrad_ema", GA_OPTIMIZER_ADAMW, [](Plan& p) {
    p.optimizer.amsgrad = 1;
    p.ema.emplace();
    EXPECT_OK(ga_ema_init(&*p.ema, sizeof *p.ema));
  });
  add(
      "adam_keras_table", GA_OPTIMIZER_ADAM,
      [](Plan& p) {
        static const double rates[] = {0.5, 0.25, 0.125, 0.0625};
        p.schedule = schedule(GA_SCHEDULE_TABLE);
        p.schedule->table = rates;
        p.schedule->table_size = 4;
      },
      GA_FLAVOR_KERAS);
  add("nadam_bf16", GA_OPTIMIZER_NADAM, [&](Plan& p) { narrow(p, GA_BF16); });
  add("adamw_bf16_by_chance", GA_OPTIMIZER_ADAMW, [&](Plan& p) {
    narrow(p, GA_BF16);
    p.optimizer.state_dtype = GA_BF16;
    p.options.master = GA_MASTER_NONE;
    p.options.rounding = GA_ROUND_STOCHASTIC;
  });
  add("rmsprop_f16_scaler", GA_OPTIMIZER_RMSPROP, [&](Plan& p) {
    narrow(p, GA_F16);
    p.optimizer.centered = 1;
    p.optimizer.momentum = 0.5;
    p.scaler.emplace();
    EXPECT_OK(ga_loss_scaler_init(&*p.scaler, sizeof *p.scaler));
    p.scaler->initial_scale = 16;
  });
  add("adafactor_f64", GA_OPTIMIZER_ADAFACTOR, [](Plan& p) {
    p.dtype = GA_F64;
    p.options = options(GA_F64, GA_F64);
  });
  add("adagrad_rows", GA_OPTIMIZER_ADAGRAD, [](Plan& p) { p.options.rows = GA_ROWS_LAZY; });
  add("rowwise_adagrad", GA_OPTIMIZER_ROWWISE_ADAGRAD, [](Plan&) {});
  add("lamb_clipped_noise", GA_OPTIMIZER_LAMB, [](Plan& p) {
    p.clip = clip(GA_CLIP_GLOBAL, 0.5);
    p.config.noise_scale = 1;
    p.config.nonfinite = GA_NONFINITE_DROP_MICRO;
  });
  add("sgd_batch_norm_sweep", GA_OPTIMIZER_SGD, [](Plan& p) { p.bn = bn_options(GA_BN_WINDOW); });
  add("lion_compensated", GA_OPTIMIZER_LION, [&](Plan& p) {
    narrow(p, GA_BF16);
    p.options.accumulator_dtype = GA_BF16;
    p.config.accumulation = GA_ACCUMULATE_COMPENSATED;
  });
  return list;
}

// The parameters after two more micro-batches and a step.
std::vector<double> go_on(Net& net) {
  for (const uint64_t k : {20, 21}) net.accumulate(k);
  EXPECT_EQ(net.step().outcome, GA_STEP_APPLIED);
  return net.values();
}

// Each file holds what it is to lead to in its note. To write the files of a new format:
// GA_TEST_WRITE_GOLDEN=<folder> test_checkpoint --gtest_filter='Golden.*'
TEST(Golden, FilesOfEarlierVersionsLoadAndStepOn) {
  const char* const folder = getenv("GA_TEST_WRITE_GOLDEN");
  const char* const moved = getenv("GA_TEST_GOLDEN");  // on a machine without the sources
  for (const auto& [name, plan] : golden()) {
    SCOPED_TRACE(name);
    const std::string file = (folder  ? folder
                              : moved ? moved
                                      : GA_TEST_GOLDEN) +
                             ("/" + name + ".safetensors");
    if (folder) {
      Net net(plan), next(plan);
      net.train();
      EXPECT_OK(load(next.ctx, saved(net.ctx)));
      std::ostringstream note;
      note.precision(17);
      for (const double x : go_on(next)) note << x << ' ';
      ga_state_options o = state_options();
      const std::string text = note.str();
      o.note = text.c_str();
      EXPECT_OK(ga_save(net.ctx, file.c_str(), &o));
    }
    Net net(plan);
    ASSERT_OK(ga_load(net.ctx, file.c_str(), nullptr));
    size_t size = 0;
    EXPECT_OK(ga_state_note(file.c_str(), nullptr, 0, &size));
    std::string note(size, ' ');
    EXPECT_OK(ga_state_note(file.c_str(), note.data(), size, &size));
    std::istringstream expected(note);
    const std::vector<double> got = go_on(net);
    for (size_t i = 0; i < got.size(); ++i) {
      double want = NAN;
      expected >> want;
      const double rounding = format(plan.dtype).size == 2 ? format(plan.dtype).roundoff() : 0;
      EXPECT_NEAR(got[i], want, (1e-6 + rounding) * std::max(1.0, std::abs(want))) << i;
    }
  }
}

// ---- Numbers as text ----------------------------------------------------------------------------

// The bytes of a struct that each_field() does not visit, but for those of the named fields.
#define LEFT_OUT(type, field) \
  std::pair<size_t, size_t> { offsetof(type, field), sizeof(static_cast<type*>(nullptr)->field) }
template <class Struct>
size_t forgotten(std::vector<std::pair<size_t, size_t>> left_out) {
  Struct s = {};
  std::vector<char> seen(sizeof s);
  left_out.emplace_back(0, sizeof s.struct_size);
  each_field(s, [&](const char*, auto& field, auto...) {
    const auto at = reinterpret_cast<const char*>(&field) - reinterpret_cast<const char*>(&s);
    left_out.emplace_back(static_cast<size_t>(at), sizeof field);
  });
  for (const auto& [at, size] : left_out)
    std::fill_n(seen.begin() + static_cast<long>(at), size, 1);
  return static_cast<size_t>(std::count(seen.begin(), seen.end(), 0));
}

// A field that is added to a struct must not be forgotten in the files.
TEST(Text, EveryFieldOfAStructIsWritten) {
  EXPECT_EQ(
      forgotten<ga_optimizer>({LEFT_OUT(ga_optimizer, reserved), LEFT_OUT(ga_optimizer, reserved2),
                               LEFT_OUT(ga_optimizer, ns_table)}),
      0u);
  EXPECT_EQ(forgotten<ga_schedule>({LEFT_OUT(ga_schedule, reserved), LEFT_OUT(ga_schedule, table),
                                    LEFT_OUT(ga_schedule, table_size)}),
            0u);
  EXPECT_EQ(forgotten<ga_clip>({}), 0u);
  EXPECT_EQ(forgotten<ga_loss_scaler>({LEFT_OUT(ga_loss_scaler, reserved)}), 0u);
  EXPECT_EQ(forgotten<ga_ema>({}), 0u);
  EXPECT_EQ(
      forgotten<ga_bn_options>({LEFT_OUT(ga_bn_options, layout), LEFT_OUT(ga_bn_options, dtype)}),
      0u);
  EXPECT_EQ(forgotten<ga_param_options>(
                {LEFT_OUT(ga_param_options, gradient_dtype),
                 LEFT_OUT(ga_param_options, accumulator_dtype),
                 LEFT_OUT(ga_param_options, write_early), LEFT_OUT(ga_param_options, follow_data),
                 LEFT_OUT(ga_param_options, reserved), LEFT_OUT(ga_param_options, reserved2)}),
            0u);
  EXPECT_EQ(forgotten<ga_step_result>(
                {LEFT_OUT(ga_step_result, reserved), LEFT_OUT(ga_step_result, eager),
                 LEFT_OUT(ga_step_result, eager_waited), LEFT_OUT(ga_step_result, eager_redone)}),
            0u);
}

TEST(Text, NumbersComeBackToTheLastBit) {
  Random random(3);
  const auto back = [](double x) {
    Fields f;
    f.add("x", x);
    double y = 0;
    Fields(f.text(), "a test").get("x", y);
    return y;
  };
  for (int k = 0; k < 100000; ++k) {
    const uint64_t bits = random.bits() >> (k % 3 == 0 ? 12 : 0);  // subnormal ones too
    double x, y;
    memcpy(&x, &bits, sizeof x);
    y = back(x);
    EXPECT_TRUE(std::isnan(x) ? std::isnan(y) && std::signbit(x) == std::signbit(y)
                              : memcmp(&x, &y, sizeof x) == 0)
        << x;
  }
  for (const double x : {0.0, -0.0, 1.0, -2.5, HUGE_VAL, -HUGE_VAL, 5e-324, 1.7976931348623157e308})
    EXPECT_EQ(std::signbit(back(x)), std::signbit(x)) << x;
  EXPECT_EQ(back(0.1), 0.1);
  Fields f;
  f.add("x", -0.15625);
  f.add("n", int64_t{-3});
  f.add("flag", true);
  EXPECT_EQ(f.text(), "x=-0x1.4p-3 n=-3 flag=1");
}

TEST(Text, WhatIsNotANumberIsRefused) {
  for (const char* text :
       {"x=", "x=1", "x=0x", "x=0x1.8p", "x=0x1.8p+9999", "x=+0x1p+0", "x=0x-1p+0", "x=--nan",
        "x=0x1p+0 ", "x", "=0x1p+0", "y=0x1p+0", "x=0x1p+0x", " x=0x1p+0"}) {
    double x = 0;
    try {
      Fields(text, "a test").get("x", x);
      EXPECT_STREQ(text, "x=0x1p+0 ");  // a space at the end does no harm
    } catch (const Error& e) {
      EXPECT_EQ(e.status(), GA_ERROR_FORMAT) << text;
    }
  }
  int32_t n = 0;
  EXPECT_THROW(Fields("n=2147483648", "a test").get("n", n), Error);
  bool flag = false;
  EXPECT_THROW(Fields("flag=2", "a test").get("flag", flag), Error);
}

// ---- Names --------------------------------------------------------------------------------------

TEST(Names, ThatAStateFileCouldNotHoldAreRefused) {
  Net net;
  float x = 1;
  const auto add = [&](const char* name) {
    return ga_param_add(net.ctx, 0, name, &x, GA_F32, 0, nullptr, nullptr, nullptr);
  };
  const ga_bn_options bn = bn_options(GA_BN_MICRO);
  const auto add_layer = [&](const char* name) {
    return ga_bn_add(net.ctx, name, 2, -1, -1, &bn, nullptr);
  };
  const std::string long_name(5000, 'x');
  for (const char* name :
       {"\xff", "a\xc3", "\xed\xa0\x80", "\xc0\xaf", "__metadata__", "gradaccum.x", "w.exp_avg",
        "w.grad_accum", "w.grad_accum.window", "w.step", "w.master", "b.ema", "bn.running_mean",
        "bn.bn_window.sweep", long_name.c_str()}) {
    EXPECT_EQ(add(name), GA_ERROR_INVALID_ARGUMENT) << name;
    EXPECT_EQ(add_layer(name), GA_ERROR_INVALID_ARGUMENT) << name;
  }
  EXPECT_NE(std::string(ga_last_error()).find("4096"), std::string::npos);
  int32_t count = 0;
  EXPECT_OK(ga_param_count(net.ctx, &count));
  EXPECT_EQ(count, 2);
  EXPECT_EQ(add("bn"), GA_OK);  // a layer may have the name of a parameter
  EXPECT_OK(ga_param_remove(net.ctx, 2));
  EXPECT_EQ(add("x.exp_avg"), GA_OK);
  float y = 1;
  EXPECT_EQ(ga_param_add(net.ctx, 0, "x", &y, GA_F32, 0, nullptr, nullptr, nullptr),
            GA_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(std::string(ga_last_error()).find("x.exp_avg"), std::string::npos);
  EXPECT_EQ(add_layer("x"), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(ga_param_add(net.ctx, 0, "w.weight \xe2\x82\xac\n\"\\", &y, GA_F32, 0, nullptr, nullptr,
                         nullptr),
            GA_OK);
  Net other;
  EXPECT_OK(ga_param_add(other.ctx, 0, "x.exp_avg", &x, GA_F32, 0, nullptr, nullptr, nullptr));
  EXPECT_OK(ga_param_add(other.ctx, 0, "w.weight \xe2\x82\xac\n\"\\", &y, GA_F32, 0, nullptr,
                         nullptr, nullptr));
  EXPECT_OK(load(other.ctx, saved(net.ctx)));
}

}  // namespace
}  // namespace ga::test
