// SPDX-License-Identifier: Apache-2.0
//
// Batch normalisation: which call is legal when, and every wrong argument. A refused call gives the
// reason, and the window goes on bit for bit as if it had not been made.
#include <functional>
#include <stdexcept>

#include "batchnorm.hpp"

namespace ga::test {
namespace {

constexpr int32_t kModes[] = {GA_BN_MICRO, GA_BN_WINDOW, GA_BN_CUMULATIVE};
constexpr ga_status kArgument = GA_ERROR_INVALID_ARGUMENT;
constexpr ga_status kState = GA_ERROR_INVALID_STATE;
const ref::BnShape kShape{3, 7, GA_BN_CHANNELS_FIRST};

std::string mode_name(int32_t mode) {
  return mode == GA_BN_MICRO ? "Micro" : mode == GA_BN_WINDOW ? "Window" : "Cumulative";
}

// A window of three micro-batches, call by call, and another window after it.
class Script {
 public:
  explicit Script(int32_t mode, const ga_config& c = config())
      : net(kShape, bn_options(mode), c),
        data(bn_window(kShape, GA_F32, {2, 3, 1})),
        out(bn_output(data)) {
    const auto calls = [&](const char* what, void (Script::*call)(size_t)) {
      for (size_t k = 0; k < 3; ++k)
        steps_.push_back({what + (" " + std::to_string(k)), [=] { (this->*call)(k); }});
    };
    if (mode == GA_BN_WINDOW) {
      calls("take", &Script::take);
      steps_.push_back({"finalize", [this] { EXPECT_OK(ga_bn_finalize(net.ctx, net.bn)); }});
      calls("forward", &Script::forward);
    }
    for (size_t k = 0; k < 3; ++k) {
      const std::string number = " " + std::to_string(k);
      if (mode != GA_BN_WINDOW) steps_.push_back({"forward" + number, [=] { forward(k); }});
      steps_.push_back({"begin" + number, [=] { begin(k); }});
      steps_.push_back({"sum" + number, [=] { net.sum(data[k]); }});
      if (mode != GA_BN_WINDOW) steps_.push_back({"backward" + number, [=] { backward(k); }});
      steps_.push_back({"end" + number, [=] { EXPECT_OK(ga_micro_end(net.ctx)); }});
    }
    for (size_t k = 0; k < 3 && mode == GA_BN_WINDOW; ++k) {
      const std::string number = " " + std::to_string(k);
      steps_.push_back({"begin again" + number, [=] { begin(k); }});
      steps_.push_back({"backward" + number, [=] { backward(k); }});
      steps_.push_back({"end again" + number, [=] { EXPECT_OK(ga_micro_end(net.ctx)); }});
    }
  }

  size_t size() const { return steps_.size(); }
  bool done() const { return next_ == steps_.size(); }
  void go() { steps_[next_++].second(); }
  // Makes all calls up to and including this one; "": none.
  void to(const std::string& name) {
    if (name.empty()) return;
    const auto is = [&](const auto& step) { return step.first == name; };
    const auto at = std::find_if(steps_.begin(), steps_.end(), is);
    ASSERT_NE(at, steps_.end()) << name;
    while (next_ <= static_cast<size_t>(at - steps_.begin())) go();
  }
  // Makes the remaining calls and returns all results.
  std::vector<BnOutput> finish() {
    while (!done()) go();
    EXPECT_EQ(step(net.ctx).outcome, GA_STEP_APPLIED);
    out.dgamma = external_gradient(net.ctx, net.gamma, 3);
    out.dbeta = external_gradient(net.ctx, net.beta, 3);
    std::vector<BnOutput> all = {out, net.step(bn_window(kShape, GA_F32, {4, 1}, 9))};
    const Running running(net.ctx, net.bn, 3);
    all.push_back({{}, {}, running.mean, running.variance});
    return all;
  }

  BnNet net;
  BnWindow data;
  BnOutput out;

 private:
  void take(size_t k) { net.take(data[k]); }
  void forward(size_t k) { net.forward(data[k], out.y[k]); }
  void backward(size_t k) { net.backward(data[k], out.dx[k]); }
  void begin(size_t k) { EXPECT_OK(ga_micro_begin(net.ctx, static_cast<int64_t>(k), 1, nullptr)); }

  std::vector<std::pair<std::string, std::function<void()>>> steps_;
  size_t next_ = 0;
};

std::vector<BnOutput> undisturbed(int32_t mode, const ga_config& c = config()) {
  return Script(mode, c).finish();
}

using Words = std::vector<std::string>;

struct Refusal {
  std::string what;
  std::vector<int32_t> modes;
  std::string after;  // the call before the refused one
  std::function<ga_status(Script&)> call;
  ga_status status;
  Words words;
};

void expect_refused(const Refusal& r, Script& s) {
  SCOPED_TRACE(r.what);
  const ga_window_info before = window(s.net.ctx);
  const ga_memory memory_before = memory(s.net.ctx);
  const Running running(s.net.ctx, s.net.bn, 3);
  EXPECT_TRUE(refused(r.call(s), r.status, r.words));
  EXPECT_TRUE(same_window(before, window(s.net.ctx)));
  const ga_memory memory_after = memory(s.net.ctx);
  EXPECT_EQ(0, memcmp(&memory_before, &memory_after, sizeof memory_before));
  EXPECT_EQ(Running(s.net.ctx, s.net.bn, 3), running);
}

// Makes each call alone in a window, then twice in one window.
void expect_all_refused(const std::vector<Refusal>& list) {
  for (const int32_t mode : kModes) {
    const std::vector<BnOutput> want = undisturbed(mode);
    for (const Refusal& r : list) {
      if (std::find(r.modes.begin(), r.modes.end(), mode) == r.modes.end()) continue;
      SCOPED_TRACE(mode_name(mode) + ", after \"" + r.after + "\": " + r.what);
      Script s(mode);
      s.to(r.after);
      expect_refused(r, s);
      expect_refused(r, s);
      EXPECT_TRUE(s.finish() == want) << "a refused call left a trace";
    }
  }
}

const std::vector<int32_t> kAll(kModes, kModes + 3);
const std::vector<int32_t> kWindow = {GA_BN_WINDOW};
const std::vector<int32_t> kOthers = {GA_BN_MICRO, GA_BN_CUMULATIVE};

float* at(Tensor& t, int64_t i = 0) { return static_cast<float*>(t.at(i)); }
template <class T>
T* off_by_one(T* p) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(p) + 1);
}

// ---- Order --------------------------------------------------------------------------------------

ga_status take(Script& s, size_t k = 0) {
  return ga_bn_accumulate(s.net.ctx, s.net.bn, s.data[k].x.data(), s.data[k].samples, 7);
}
ga_status take_stats(Script& s) {
  const float mean[3] = {}, spread[3] = {1, 1, 1};
  return ga_bn_accumulate_stats(s.net.ctx, s.net.bn, 14, mean, spread, GA_BN_M2, GA_F32);
}
ga_status finalize(Script& s) { return ga_bn_finalize(s.net.ctx, s.net.bn); }
ga_status forward(Script& s, size_t k, int64_t samples = -1) {
  Tensor y = s.data[k].x;
  return ga_bn_forward(s.net.ctx, s.net.bn, s.data[k].x.data(),
                       samples < 0 ? s.data[k].samples : samples, 7, y.data());
}
ga_status sum(Script& s, size_t k, int64_t samples = -1) {
  return ga_bn_backward_accumulate(s.net.ctx, s.net.bn, s.data[k].x.data(), s.data[k].dy.data(),
                                   samples < 0 ? s.data[k].samples : samples, 7);
}
ga_status backward_finalize(Script& s) { return ga_bn_backward_finalize(s.net.ctx, s.net.bn); }
ga_status backward(Script& s, size_t k, int64_t samples = -1) {
  Tensor dx = s.data[k].x;
  return ga_bn_backward(s.net.ctx, s.net.bn, s.data[k].x.data(), s.data[k].dy.data(),
                        samples < 0 ? s.data[k].samples : samples, 7, dx.data());
}
ga_status statistics(Script& s) {
  double mean[3];
  return ga_bn_statistics(s.net.ctx, s.net.bn, mean, nullptr, GA_F64, nullptr);
}
ga_status set_running(Script& s) {
  const double mean[3] = {1, 1, 1};
  return ga_bn_running_set(s.net.ctx, s.net.bn, mean, mean, GA_F64, 3);
}
ga_status freeze(Script& s) { return ga_bn_set_frozen(s.net.ctx, s.net.bn, 1); }
ga_status add_layer(Script& s) { return ga_bn_add(s.net.ctx, "late", 3, -1, -1, nullptr, nullptr); }

TEST(BatchNormRules, Order) {
  using S = Script&;
  expect_all_refused({
      // Before any other call.
      {"finalize", kWindow, "", finalize, kState, {"ga_bn_finalize", "\"bn\"", "no statistics"}},
      {"finalize", kOthers, "", finalize, kState, {"\"bn\"", "WINDOW"}},
      {"statistics", kAll, "", statistics, kState, {"ga_bn_statistics", "\"bn\""}},
      {"forward",
       kWindow,
       "",
       [](S s) { return forward(s, 0); },
       kState,
       {"ga_bn_finalize", "due"}},
      {"sum",
       kAll,
       "",
       [](S s) { return sum(s, 0); },
       kState,
       {"ga_bn_backward_accumulate", "no micro-batch open"}},
      {"backward",
       kAll,
       "",
       [](S s) { return backward(s, 0); },
       kState,
       {"ga_bn_backward", "no micro-batch open"}},
      {"sums are final",
       kWindow,
       "",
       backward_finalize,
       kState,
       {"ga_bn_backward_finalize", "\"bn\"", "ga_bn_finalize must be called first"}},
      {"sums are final", kOthers, "", backward_finalize, kState, {"\"bn\"", "WINDOW"}},

      // The first pass.
      {"forward",
       kWindow,
       "take 1",
       [](S s) { return forward(s, 0); },
       kState,
       {"\"bn\"", "2 micro-batches", "ga_bn_finalize", "due"}},
      {"statistics", kWindow, "take 1", statistics, kState, {"ga_bn_finalize", "due"}},
      {"running_set", kWindow, "take 0", set_running, kState, {"ga_bn_running_set", "\"bn\""}},
      {"set_frozen", kWindow, "take 0", freeze, kState, {"ga_bn_set_frozen", "\"bn\""}},
      {"step wants no micro-batch, the pass is over",
       kWindow,
       "finalize",
       take_stats,
       kState,
       {"ga_bn_accumulate_stats", "\"bn\"", "final", "3 micro-batches"}},
      {"a fourth",
       kWindow,
       "finalize",
       [](S s) { return take(s); },
       kState,
       {"ga_bn_accumulate", "\"bn\"", "final"}},
      {"finalize twice",
       kWindow,
       "finalize",
       finalize,
       kState,
       {"ga_bn_finalize", "final already"}},

      // The second pass.
      {"other shape",
       kWindow,
       "finalize",
       [](S s) { return forward(s, 1, 1); },
       kState,
       {"ga_bn_forward", "micro-batch 0", "14", "7"}},
      {"other order",
       kWindow,
       "finalize",
       [](S s) { return forward(s, 1); },
       kState,
       {"ga_bn_forward", "micro-batch 0", "14", "21"}},
      {"more of them",
       kWindow,
       "forward 2",
       [](S s) { return forward(s, 0); },
       kState,
       {"ga_bn_forward", "micro-batch 3", "3"}},
      {"take", kWindow, "forward 2", [](S s) { return take(s); }, kState, {"final"}},

      // Backward sums.
      {"other shape",
       kWindow,
       "begin 0",
       [](S s) { return sum(s, 2); },
       kState,
       {"ga_bn_backward_accumulate", "micro-batch 0", "14", "7"}},
      {"other micro-batch",
       kWindow,
       "begin 1",
       [](S s) { return sum(s, 0); },
       kState,
       {"micro-batch 1", "21", "14"}},
      {"twice",
       kWindow,
       "sum 1",
       [](S s) { return sum(s, 1); },
       kState,
       {"ga_bn_backward_accumulate", "\"bn\"", "micro-batch 1", "already"}},
      {"backward too early",
       kWindow,
       "begin 0",
       [](S s) { return backward(s, 0); },
       kState,
       {"ga_bn_backward", "0 of 3", "ga_bn_backward_accumulate"}},
      {"backward too early",
       kWindow,
       "sum 1",
       [](S s) { return backward(s, 1); },
       kState,
       {"ga_bn_backward", "2 of 3"}},
      {"forward in the open one, other shape",
       kWindow,
       "begin 1",
       [](S s) { return forward(s, 0); },
       kState,
       {"ga_bn_forward", "micro-batch 1"}},

      // dx.
      {"twice, later",
       kWindow,
       "begin again 1",
       [](S s) { return sum(s, 1); },
       kState,
       {"already"}},
      {"other shape",
       kWindow,
       "begin again 2",
       [](S s) { return backward(s, 1); },
       kState,
       {"ga_bn_backward", "micro-batch 2", "7", "21"}},
      {"none is open",
       kWindow,
       "end again 1",
       [](S s) { return backward(s, 1); },
       kState,
       {"no micro-batch open"}},

      // MICRO and CUMULATIVE.
      {"sum without a forward pass",
       {GA_BN_MICRO, GA_BN_CUMULATIVE},
       "end 0",
       [](S s) { return sum(s, 0); },
       kState,
       {"no micro-batch open"}},
      {"other shape",
       kOthers,
       "begin 0",
       [](S s) { return backward(s, 1); },
       kState,
       {"ga_bn_backward", "micro-batch 0", "14", "21"}},
      {"sum of another shape",
       kOthers,
       "begin 1",
       [](S s) { return sum(s, 2); },
       kState,
       {"ga_bn_backward_accumulate", "micro-batch 1", "21", "7"}},
      {"sums are final too early",
       kWindow,
       "sum 1",
       backward_finalize,
       kState,
       {"ga_bn_backward_finalize", "2 of 3 micro-batches", "ga_bn_backward_accumulate"}},
      {"sum twice", kOthers, "sum 0", [](S s) { return sum(s, 0); }, kState, {"already"}},
      {"sum after backward",
       kOthers,
       "backward 0",
       [](S s) { return sum(s, 0); },
       kState,
       {"already"}},
      {"finalize", kOthers, "forward 1", finalize, kState, {"WINDOW"}},
      {"running_set", kOthers, "forward 0", set_running, kState, {"ga_bn_running_set"}},
      {"set_frozen", kOthers, "forward 0", freeze, kState, {"ga_bn_set_frozen"}},

      // Calls that are legal only while the window is empty.
      {"running_set", kAll, "begin 1", set_running, kState, {"ga_bn_running_set", "empty"}},
      {"set_frozen", kAll, "end 0", freeze, kState, {"ga_bn_set_frozen", "empty"}},
      {"add", kAll, "begin 0", add_layer, kState, {"ga_bn_add", "empty"}},
      {"add", kAll, "end 2", add_layer, kState, {"ga_bn_add", "empty"}},
  });
}

// The backward call of a micro-batch that had no forward pass, or that the pass does not have. The
// micro-batch stays open after the refused call, so these cases have windows of their own.
TEST(BatchNormRules, BackwardOfAnotherMicroBatchThanTheForward) {
  for (const int32_t mode : kOthers) {
    Script s(mode);
    EXPECT_OK(ga_micro_begin(s.net.ctx, 0, 1, nullptr));
    EXPECT_TRUE(refused(sum(s, 0), kState, {"\"bn\"", "no ga_bn_forward"}));
    EXPECT_TRUE(refused(backward(s, 0), kState, {"\"bn\"", "no ga_bn_forward"}));
    EXPECT_OK(ga_discard(s.net.ctx));
    s.to("end 0");
    EXPECT_OK(ga_micro_begin(s.net.ctx, 1, 1, nullptr));
    EXPECT_TRUE(refused(backward(s, 0), kState, {"\"bn\"", "micro-batch 0", "1 is open"}));
    EXPECT_TRUE(refused(sum(s, 0), kState, {"\"bn\"", "micro-batch 0", "1 is open"}));
    s.net.forward(s.data[1], s.out.y[1]);
    s.net.backward(s.data[1], s.out.dx[1]);
    EXPECT_OK(ga_micro_end(s.net.ctx));
    s.net.forward(s.data[2], s.out.y[2]);
    EXPECT_OK(ga_micro_begin(s.net.ctx, 0, 1, nullptr));
    EXPECT_TRUE(refused(backward(s, 0), kState, {"\"bn\"", "micro-batch 2", "0 is open"}));
    EXPECT_OK(ga_micro_end(s.net.ctx));
    s.net.in_micro(2, s.data[2], [&] { s.net.backward(s.data[2], s.out.dx[2]); });
    EXPECT_EQ(step(s.net.ctx).outcome, GA_STEP_APPLIED);
    const std::vector<BnOutput> want = undisturbed(mode);
    EXPECT_EQ(external_gradient(s.net.ctx, s.net.gamma, 3), want[0].dgamma);
    EXPECT_TRUE(s.out.y == want[0].y && s.out.dx == want[0].dx);
  }
}

// The statistics of a micro-batch that is aborted go with it, whether they came before it was opened or
// after, and another one may take its place, or none.
TEST(BatchNormRules, StatisticsOfAnAbortedMicroBatch) {
  const BnWindow other = bn_window(kShape, GA_F32, {5}, 77);
  for (const int32_t mode : kOthers) {
    const std::vector<BnOutput> want = undisturbed(mode);
    for (const char* after : {"", "end 0", "end 1", "end 2"}) {
      for (const bool open_first : {false, true}) {
        SCOPED_TRACE(mode_name(mode) + ", after \"" + after + '"');
        Script s(mode);
        s.to(after);
        Tensor y = other[0].x;
        if (open_first) {
          EXPECT_OK(ga_micro_begin(s.net.ctx, -1, 1, nullptr));
        }
        s.net.forward(other[0], y);
        if (!open_first) {
          EXPECT_OK(ga_micro_begin(s.net.ctx, -1, 1, nullptr));
        }
        EXPECT_OK(ga_micro_abort(s.net.ctx));
        EXPECT_TRUE(refused(statistics(s), kState, {"\"bn\""}));
        EXPECT_TRUE(s.finish() == want);
      }
    }
    // Nothing is left that would keep a layer from what an unused one may do.
    Script s(mode);
    Tensor y = other[0].x;
    EXPECT_OK(ga_micro_begin(s.net.ctx, -1, 1, nullptr));
    s.net.forward(other[0], y);
    EXPECT_OK(ga_micro_abort(s.net.ctx));
    EXPECT_OK(freeze(s));
  }
  // What a pass has added up cannot be taken out again.
  Script s(GA_BN_WINDOW);
  s.to("forward 2");
  EXPECT_OK(ga_micro_begin(s.net.ctx, 0, 1, nullptr));
  EXPECT_TRUE(refused(ga_micro_abort(s.net.ctx), kState, {"ga_discard"}));
  EXPECT_OK(ga_micro_end(s.net.ctx));
}

TEST(BatchNormRules, MoreMicroBatchesThanTheFirstPassHad) {
  Script s(GA_BN_WINDOW);
  s.to("end 2");
  EXPECT_OK(ga_micro_begin(s.net.ctx, 3, 1, nullptr));
  EXPECT_TRUE(refused(sum(s, 0), kState, {"micro-batch 3", "had 3"}));
  EXPECT_TRUE(refused(backward(s, 0), kState, {"micro-batch 3", "had 3"}));
  EXPECT_TRUE(refused(forward(s, 0), kState, {"micro-batch 3", "had 3"}));
  EXPECT_OK(ga_discard(s.net.ctx));

  // In a pass over open micro-batches, each comes once, in order.
  EXPECT_OK(ga_micro_begin(s.net.ctx, 0, 1, nullptr));
  EXPECT_OK(take(s, 0));
  EXPECT_TRUE(refused(take(s, 0), kState, {"number 1", "0 is open"}));
  EXPECT_OK(ga_micro_end(s.net.ctx));
  EXPECT_OK(ga_micro_begin(s.net.ctx, 1, 1, nullptr));
  EXPECT_OK(ga_micro_end(s.net.ctx));
  EXPECT_OK(ga_micro_begin(s.net.ctx, 2, 1, nullptr));
  EXPECT_TRUE(refused(take(s, 2), kState, {"number 1", "2 is open"}));
  EXPECT_OK(ga_discard(s.net.ctx));
  EXPECT_TRUE(s.net.step(bn_window(kShape, GA_F32, {2, 1})) ==
              BnNet(kShape, bn_options(GA_BN_WINDOW)).step(bn_window(kShape, GA_F32, {2, 1})));
}

// With accum_steps the window has a fixed number of micro-batches.
TEST(BatchNormRules, NoMoreThanTheWindowHolds) {
  ga_config c = config();
  c.accum_steps = 3;
  for (const int32_t mode : kModes) {
    Script s(mode, c);
    if (mode == GA_BN_WINDOW) {
      s.to("take 2");
      EXPECT_TRUE(refused(take(s), kState, {"\"bn\"", "all 3 micro-batches"}));
      EXPECT_TRUE(refused(take_stats(s), kState, {"\"bn\"", "all 3 micro-batches"}));
      s.to("forward 2");
      EXPECT_TRUE(refused(forward(s, 0), kState, {"\"bn\"", "all 3 micro-batches"}));
    } else {
      s.to("end 2");
      EXPECT_TRUE(refused(forward(s, 0), GA_ERROR_WINDOW_FULL, {"full"}));
      EXPECT_TRUE(refused(take(s), GA_ERROR_WINDOW_FULL, {"full"}));
      EXPECT_TRUE(refused(take_stats(s), GA_ERROR_WINDOW_FULL, {"full"}));
    }
  }
}

// x of ga_bn_forward must have the shape of the x that ga_bn_accumulate got.
TEST(BatchNormRules, ForwardOfAnotherShapeThanItsStatistics) {
  for (const int32_t mode : kOthers) {
    Script s(mode);
    EXPECT_OK(take(s, 0));
    EXPECT_TRUE(refused(forward(s, 1), kState, {"ga_bn_forward", "14", "21"}));
    EXPECT_TRUE(s.finish() == undisturbed(mode));
  }
}

TEST(BatchNormRules, DroppingIsForMicroAlone) {
  ga_config c = config();
  c.nonfinite = GA_NONFINITE_DROP_MICRO;
  BnNet net(kShape, bn_options(GA_BN_MICRO), c);
  for (const int32_t mode : {GA_BN_WINDOW, GA_BN_CUMULATIVE}) {
    const ga_bn_options o = bn_options(mode);
    EXPECT_TRUE(refused(
        ga_bn_add(net.ctx, "other", 3, net.gamma, net.beta, &o, nullptr), GA_ERROR_UNSUPPORTED,
        {"\"other\"", "GA_NONFINITE_DROP_MICRO", mode == GA_BN_WINDOW ? "WINDOW" : "CUMULATIVE"}));
  }
  EXPECT_OK(ga_bn_add(net.ctx, "other", 3, net.gamma, net.beta, nullptr, nullptr));
}

// The two passes of WINDOW mode open micro-batches again, which GA_CLIP_WHEN_MICRO does not allow. The
// layer or the clip is refused, whichever comes second.
TEST(BatchNormRules, NoPassesOverClippedMicroBatches) {
  ga_clip micro = clip(GA_CLIP_GLOBAL, 1);
  micro.when = GA_CLIP_WHEN_MICRO;
  ga_clip idle = clip(GA_CLIP_NONE, 0);  // clips nothing
  idle.when = GA_CLIP_WHEN_MICRO;
  ga_clip value = clip(GA_CLIP_NONE, 0, GA_FLAVOR_TORCH, 1);
  value.when = GA_CLIP_WHEN_MICRO;
  const ga_bn_options windowed = bn_options(GA_BN_WINDOW), plain = bn_options(GA_BN_MICRO);
  for (const bool of_group : {false, true}) {
    Context ctx;
    const ga_group group = ctx.group(plain_sgd());
    const auto set = [&](const ga_clip* c) {
      return of_group ? ga_group_set_clip(ctx, group, c) : ga_context_set_clip(ctx, c);
    };
    for (const ga_clip* c : {&micro, &value}) {
      EXPECT_OK(set(c));
      EXPECT_TRUE(refused(ga_bn_add(ctx, "late", 3, -1, -1, &windowed, nullptr),
                          GA_ERROR_UNSUPPORTED, {"\"late\"", "WINDOW", "GA_CLIP_WHEN_MICRO"}));
    }
    EXPECT_OK(ga_bn_add(ctx, "micro", 3, -1, -1, &plain, nullptr));
    EXPECT_OK(set(&idle));
    EXPECT_OK(ga_bn_add(ctx, "early", 3, -1, -1, &windowed, nullptr));
    for (const ga_clip* c : {&micro, &value})
      EXPECT_TRUE(
          refused(set(c), GA_ERROR_UNSUPPORTED, {"\"early\"", "WINDOW", "GA_CLIP_WHEN_MICRO"}));
    EXPECT_OK(set(&idle));
  }
}

// With GA_CLIP_WHEN_MICRO a parameter gets one contribution per micro-batch. A second layer that shares
// a parameter is refused and leaves no trace: neither dx nor the gradient of the parameter that it
// does not share.
TEST(BatchNormRules, SharedParametersAreNotClippedByMicroBatch) {
  ga_clip clipping = clip(GA_CLIP_GLOBAL, 1e6);
  clipping.when = GA_CLIP_WHEN_MICRO;
  const BnWindow data = bn_window(kShape, GA_F32, {2});
  const auto window = [&](bool twice) {
    BnNet net(kShape, bn_options(GA_BN_MICRO));
    Tensor own(GA_F32, 3, 1);
    const ga_param gamma = add(net.ctx, 0, own);
    ga_bn second = -1;
    EXPECT_OK(ga_bn_add(net.ctx, "second", 3, gamma, net.beta, nullptr, &second));
    EXPECT_OK(ga_context_set_clip(net.ctx, &clipping));
    BnOutput out = bn_output(data);
    net.forward(data[0], out.y[0]);
    Tensor y = out.y[0], dx = out.dx[0];
    EXPECT_OK(ga_bn_forward(net.ctx, second, data[0].x.data(), 2, 7, y.data()));
    const Tensor before = dx;
    net.in_micro(0, data[0], [&] {
      net.backward(data[0], out.dx[0]);
      if (!twice) return;
      const auto* x = data[0].x.data();
      const auto* dy = data[0].dy.data();
      EXPECT_TRUE(refused(ga_bn_backward(net.ctx, second, x, dy, 2, 7, dx.data()),
                          GA_ERROR_UNSUPPORTED, {"GA_CLIP_WHEN_MICRO"}));
      EXPECT_TRUE(refused(ga_bn_backward_accumulate(net.ctx, second, x, dy, 2, 7),
                          GA_ERROR_UNSUPPORTED, {"GA_CLIP_WHEN_MICRO"}));
      EXPECT_EQ(dx, before) << "written by a call that failed";
    });
    EXPECT_EQ(step(net.ctx).outcome, GA_STEP_APPLIED);
    out.dgamma = external_gradient(net.ctx, net.gamma, 3);
    out.dbeta = external_gradient(net.ctx, net.beta, 3);
    const void* at = nullptr;
    EXPECT_EQ(ga_gradient(net.ctx, gamma, &at, nullptr, nullptr), kState)
        << "gamma has no gradient";
    return out;
  };
  EXPECT_TRUE(window(true) == window(false));
}

// If micro-batches are checked when they end, the last one's statistics are available after its
// end.
TEST(BatchNormRules, StatisticsOfADeferredMicroBatch) {
  for (const bool dropping : {false, true}) {
    ga_config c = config();
    c.nonfinite = dropping ? GA_NONFINITE_DROP_MICRO : GA_NONFINITE_SKIP_STEP;
    BnNet net(kShape, bn_options(GA_BN_MICRO), c);
    ga_clip clipping = clip(GA_CLIP_GLOBAL, 1);
    clipping.when = GA_CLIP_WHEN_MICRO;
    if (!dropping) {
      EXPECT_OK(ga_context_set_clip(net.ctx, &clipping));
    }
    net.run(bn_window(kShape, GA_F32, {2, 3}));
    int64_t count = -1;
    double mean[3] = {};
    EXPECT_OK(ga_bn_statistics(net.ctx, net.bn, mean, nullptr, GA_F64, &count));
    EXPECT_EQ(count, 21);
    EXPECT_NE(mean[0], 0);
  }
}

// ---- Arguments ----------------------------------------------------------------------------------

// Calls in which only the arguments are wrong.
std::vector<Refusal> wrong_arguments() {
  using S = Script&;
  std::vector<Refusal> list;
  static const float* const f32 = new float[3]{1, 1, 1};
  static const double *const f64 = new double[3]{1, 1, 1}, *const nan = new double[3]{1, NAN, 1},
                             *const inf = new double[3]{1, 1, INFINITY},
                             *const negative = new double[3]{1, 1, -1e-300};

  // Layers that do not exist.
  for (const ga_bn id : {-1, 1, INT32_MAX}) {
    const Words words = {"bn was " + std::to_string(id), "1 layers"};
    const std::vector<std::function<ga_status(Script&, ga_bn)>> calls = {
        [](S s, ga_bn b) { return ga_bn_accumulate(s.net.ctx, b, s.data[0].x.data(), 2, 7); },
        [](S s, ga_bn b) {
          return ga_bn_accumulate_stats(s.net.ctx, b, 1, f32, f32, GA_BN_M2, GA_F32);
        },
        [](S s, ga_bn b) { return ga_bn_finalize(s.net.ctx, b); },
        [](S s, ga_bn b) {
          return ga_bn_forward(s.net.ctx, b, s.data[0].x.data(), 2, 7, s.out.y[0].data());
        },
        [](S s, ga_bn b) {
          return ga_bn_backward_accumulate(s.net.ctx, b, s.data[0].x.data(), s.data[0].dy.data(), 2,
                                           7);
        },
        [](S s, ga_bn b) { return ga_bn_backward_finalize(s.net.ctx, b); },
        [](S s, ga_bn b) {
          return ga_bn_backward(s.net.ctx, b, s.data[0].x.data(), s.data[0].dy.data(), 2, 7,
                                s.out.dx[0].data());
        },
        [](S s, ga_bn b) {
          return ga_bn_infer(s.net.ctx, b, s.data[0].x.data(), 2, 7, s.out.y[0].data());
        },
        [](S s, ga_bn b) { return ga_bn_running(s.net.ctx, b, nullptr, nullptr, GA_F32, nullptr); },
        [](S s, ga_bn b) {
          return ga_bn_statistics(s.net.ctx, b, nullptr, nullptr, GA_F32, nullptr);
        }};
    for (const auto& call : calls)
      list.push_back({"layer " + std::to_string(id), kAll, "*", [=](S s) { return call(s, id); },
                      kArgument, words});
    list.push_back({"set_frozen", kAll, "", [=](S s) { return ga_bn_set_frozen(s.net.ctx, id, 1); },
                    kArgument, words});
    list.push_back({"running_set", kAll, "",
                    [=](S s) { return ga_bn_running_set(s.net.ctx, id, f32, f32, GA_F32, 0); },
                    kArgument, words});
  }

  // Tensors and shapes of each call; after: the call after which only they are wrong.
  struct Given {
    const void* x;
    const void* dy;
    void* out;
    int64_t samples = 2, positions = 7;
  };
  struct Function {
    const char* name;
    const char* out;  // NULL: the call has no output
    bool dy;
    std::vector<std::pair<std::vector<int32_t>, std::string>> after;
    std::function<ga_status(Script&, const Given&)> call;
  };
  const std::vector<Function> functions = {
      {"ga_bn_accumulate",
       nullptr,
       false,
       {{kAll, ""}},
       [](S s, const Given& g) {
         return ga_bn_accumulate(s.net.ctx, s.net.bn, g.x, g.samples, g.positions);
       }},
      {"ga_bn_forward",
       "y",
       false,
       {{kOthers, ""}, {kWindow, "finalize"}},
       [](S s, const Given& g) {
         return ga_bn_forward(s.net.ctx, s.net.bn, g.x, g.samples, g.positions, g.out);
       }},
      {"ga_bn_infer",
       "y",
       false,
       {{kAll, "*"}},
       [](S s, const Given& g) {
         return ga_bn_infer(s.net.ctx, s.net.bn, g.x, g.samples, g.positions, g.out);
       }},
      {"ga_bn_backward_accumulate",
       nullptr,
       true,
       {{kAll, "begin 0"}},
       [](S s, const Given& g) {
         return ga_bn_backward_accumulate(s.net.ctx, s.net.bn, g.x, g.dy, g.samples, g.positions);
       }},
      {"ga_bn_backward",
       "dx",
       true,
       {{kOthers, "begin 0"}, {kOthers, "sum 0"}, {kWindow, "begin again 0"}},
       [](S s, const Given& g) {
         return ga_bn_backward(s.net.ctx, s.net.bn, g.x, g.dy, g.samples, g.positions, g.out);
       }}};
  for (const Function& f : functions) {
    for (const auto& place : f.after) {
      const auto& modes = place.first;
      const auto& after = place.second;
      const auto add = [&, call = f.call](const std::string& what,
                                          std::function<void(Script&, Given&)> change, Words words,
                                          ga_status status = kArgument) {
        words.push_back("\"bn\"");
        list.push_back({std::string(f.name) + ": " + what, modes, after,
                        [=](S s) {
                          Tensor out(GA_F32, 42, 7), untouched = out;
                          Given g = {s.data[0].x.data(), s.data[0].dy.data(), out.data()};
                          change(s, g);
                          const ga_status result = call(s, g);
                          EXPECT_EQ(out, untouched) << "written by a call that failed";
                          return result;
                        },
                        status, words});
      };
      add("no x", [](S, Given& g) { g.x = nullptr; }, {" x ", "NULL"});
      add("x off by one", [](S, Given& g) { g.x = off_by_one(static_cast<const char*>(g.x)); },
          {" x ", "address", "4 bytes"});
      add("samples -1", [](S, Given& g) { g.samples = -1; }, {"-1 samples"});
      add("positions -7", [](S, Given& g) { g.positions = -7; }, {"-7 positions"});
      add("both negative", [](S, Given& g) { g.samples = g.positions = -3; }, {"-3"});
      for (const int64_t n : {INT64_MAX, int64_t{1} << 32, int64_t{1} << 31})
        add("2^62 elements and more", [=](S, Given& g) { g.samples = g.positions = n; },
            {std::to_string(n)});
      add("2^63 / 3 elements", [](S, Given& g) { g.samples = INT64_MAX / 3, g.positions = 1; },
          {std::to_string(INT64_MAX / 3)});
      if (f.dy) {
        add("no dy", [](S, Given& g) { g.dy = nullptr; }, {" dy ", "NULL"});
        add("dy off by one", [](S, Given& g) { g.dy = off_by_one(static_cast<const char*>(g.dy)); },
            {" dy ", "address", "4 bytes"});
      }
      if (!f.out) continue;
      const std::string name = std::string(" ") + f.out + " ";
      add("no " + name, [](S, Given& g) { g.out = nullptr; }, {name, "NULL"});
      add("off by one", [](S, Given& g) { g.out = off_by_one(static_cast<char*>(g.out)); },
          {name, "address", "4 bytes"});
      for (const bool after_it : {false, true}) {
        add("over a part of x",
            [=](S, Given& g) {
              g.out = static_cast<float*>(const_cast<void*>(g.x)) + (after_it ? 1 : -1);
            },
            {name, "overlaps x", "in part"});
        if (f.dy)
          add("over a part of dy",
              [=](S, Given& g) {
                g.out = static_cast<float*>(const_cast<void*>(g.dy)) + (after_it ? 1 : -1);
              },
              {name, "overlaps dy", "in part"});
      }
      add("over gamma", [](S s, Given& g) { g.out = at(s.net.gamma_data()); },
          {name, "overlaps", "parameter"});
      add("with its end over beta", [](S s, Given& g) { g.out = at(s.net.beta_data()) - 41; },
          {name, "overlaps", "parameter"});
    }
  }

  // Statistics that the program has.
  const auto stats = [&](const char* what, int64_t count, const void* mean, const void* spread,
                         int32_t kind, int32_t dtype, Words words) {
    list.push_back({what, kAll, "",
                    [=](S s) {
                      return ga_bn_accumulate_stats(s.net.ctx, s.net.bn, count, mean, spread, kind,
                                                    dtype);
                    },
                    kArgument, words});
  };
  stats("count -1", -1, f32, f32, 0, GA_F32, {"\"bn\"", "count", "-1"});
  stats("no mean", 3, nullptr, f32, 0, GA_F32, {"\"bn\"", "mean", "NULL"});
  stats("no spread", 3, f32, nullptr, 0, GA_F32, {"\"bn\"", "spread", "NULL"});
  stats("no spread of nothing", 0, f32, nullptr, 0, GA_F32, {"\"bn\"", "spread", "NULL"});
  stats("mean off by one", 3, off_by_one(f32), f32, 0, GA_F32, {"\"bn\"", "mean", "4 bytes"});
  stats("spread off by one", 3, f64, off_by_one(f64), 0, GA_F64, {"\"bn\"", "spread", "8 bytes"});
  stats("kind 2", 3, f32, f32, 2, GA_F32, {"kind", "2"});
  stats("kind -1", 3, f32, f32, -1, GA_F32, {"kind", "-1"});
  for (const int32_t dtype : std::initializer_list<int32_t>{0, GA_F16, GA_BF16, GA_I32, GA_I64, 99})
    stats("dtype", 3, f32, f32, 0, dtype, {"\"bn\"", "dtype", std::to_string(dtype)});

  // Running statistics.
  const auto set = [&](const char* what, const void* mean, const void* variance, int32_t dtype,
                       int64_t steps, Words words) {
    list.push_back(
        {what, kAll, "",
         [=](S s) { return ga_bn_running_set(s.net.ctx, s.net.bn, mean, variance, dtype, steps); },
         kArgument, words});
  };
  set("no mean", nullptr, f64, GA_F64, 0, {"\"bn\"", "mean", "NULL"});
  set("no variance", f64, nullptr, GA_F64, 0, {"\"bn\"", "variance", "NULL"});
  set("mean NaN", nan, f64, GA_F64, 0, {"\"bn\"", "mean[1]", "nan"});
  set("mean infinite", inf, f64, GA_F64, 0, {"\"bn\"", "mean[2]", "inf"});
  set("variance NaN", f64, nan, GA_F64, 0, {"\"bn\"", "variance[1]", "nan"});
  set("variance infinite", f64, inf, GA_F64, 0, {"\"bn\"", "variance[2]", "inf"});
  set("negative variance", f64, negative, GA_F64, 0, {"\"bn\"", "variance[2]", "-1e-300"});
  set("steps -1", f64, f64, GA_F64, -1, {"\"bn\"", "steps", "-1"});
  for (const int32_t dtype : std::initializer_list<int32_t>{0, GA_F16, GA_BF16, GA_I32, 99}) {
    const Words words = {"\"bn\"", "dtype", std::to_string(dtype)};
    set("dtype", f64, f64, dtype, 0, words);
    list.push_back(
        {"dtype", kAll, "*",
         [=](S s) { return ga_bn_running(s.net.ctx, s.net.bn, nullptr, nullptr, dtype, nullptr); },
         kArgument, words});
    list.push_back({"dtype", kAll, "*",
                    [=](S s) {
                      return ga_bn_statistics(s.net.ctx, s.net.bn, nullptr, nullptr, dtype,
                                              nullptr);
                    },
                    kArgument, words});
  }
  for (const int32_t frozen : {-1, 2})
    list.push_back({"frozen",
                    kAll,
                    "*",
                    [=](S s) { return ga_bn_set_frozen(s.net.ctx, s.net.bn, frozen); },
                    kArgument,
                    {"frozen", std::to_string(frozen)}});
  return list;
}

// If only the arguments are wrong, each call is refused for its own reason. "*": at the start, or
// anywhere.
TEST(BatchNormRules, Arguments) {
  std::vector<Refusal> list = wrong_arguments();
  for (Refusal& r : list)
    if (r.after == "*") r.after = "";
  expect_all_refused(list);
}

// At any other moment these calls are refused too, for whatever reason comes first.
TEST(BatchNormRules, ArgumentsAtAnyMoment) {
  const std::vector<Refusal> list = wrong_arguments();
  for (const int32_t mode : kModes) {
    const std::vector<BnOutput> want = undisturbed(mode);
    Script s(mode);
    for (bool more = true; more;) {
      for (const Refusal& r : list) {
        const ga_status status = r.call(s);
        ASSERT_TRUE(status == kState || status == kArgument) << r.what;
        if (r.after == "*") {
          ASSERT_TRUE(refused(status, kArgument, r.words)) << r.what;
        }
      }
      more = !s.done();
      if (more) s.go();
    }
    EXPECT_TRUE(s.finish() == want) << mode_name(mode);
  }
}

TEST(BatchNormRules, NoContext) {
  const float x[3] = {};
  float y[3];
  EXPECT_EQ(ga_bn_add(nullptr, "bn", 3, -1, -1, nullptr, nullptr), kArgument);
  ga_bn_info info = {};
  info.struct_size = sizeof info;
  int32_t id = 0;
  EXPECT_EQ(ga_bn_count(nullptr, &id), kArgument);
  EXPECT_EQ(ga_bn_find(nullptr, "bn", &id), kArgument);
  EXPECT_EQ(ga_bn_describe(nullptr, 0, &info), kArgument);
  EXPECT_EQ(ga_bn_set_frozen(nullptr, 0, 1), kArgument);
  EXPECT_EQ(ga_bn_accumulate(nullptr, 0, x, 1, 1), kArgument);
  EXPECT_EQ(ga_bn_accumulate_stats(nullptr, 0, 1, x, x, 0, GA_F32), kArgument);
  EXPECT_EQ(ga_bn_finalize(nullptr, 0), kArgument);
  EXPECT_EQ(ga_bn_forward(nullptr, 0, x, 1, 1, y), kArgument);
  EXPECT_EQ(ga_bn_backward_accumulate(nullptr, 0, x, x, 1, 1), kArgument);
  EXPECT_EQ(ga_bn_backward_finalize(nullptr, 0), kArgument);
  EXPECT_EQ(ga_bn_backward(nullptr, 0, x, x, 1, 1, y), kArgument);
  EXPECT_EQ(ga_bn_infer(nullptr, 0, x, 1, 1, y), kArgument);
  EXPECT_EQ(ga_bn_running(nullptr, 0, y, y, GA_F32, nullptr), kArgument);
  EXPECT_EQ(ga_bn_running_set(nullptr, 0, x, x, GA_F32, 0), kArgument);
  EXPECT_EQ(ga_bn_statistics(nullptr, 0, y, y, GA_F32, nullptr), kArgument);
}

// On the CPU, a negative spread is refused.
TEST(BatchNormRules, NegativeSpread) {
  for (const int32_t mode : kModes) {
    Script s(mode);
    const float mean[3] = {0, 0, 0}, spread[3] = {1, -0.5f, 1};
    const double wide[3] = {1, 1, -1e-300};
    EXPECT_TRUE(refused(
        ga_bn_accumulate_stats(s.net.ctx, s.net.bn, 3, mean, spread, GA_BN_VARIANCE, GA_F32),
        kArgument, {"\"bn\"", "spread[1]", "-0.5"}));
    EXPECT_TRUE(
        refused(ga_bn_accumulate_stats(s.net.ctx, s.net.bn, 3, wide, wide, GA_BN_M2, GA_F64),
                kArgument, {"\"bn\"", "spread[2]", "-1e-300"}));
    EXPECT_TRUE(s.finish() == undisturbed(mode));
  }
}

// Outputs must not overlap memory of the library, such as the accumulator that ga_gradient returns.
TEST(BatchNormRules, OutputsOverMemoryOfTheLibrary) {
  BnNet net(kShape, bn_options(GA_BN_MICRO));
  const BnWindow data = bn_window(kShape, GA_F32, {2});
  net.step(data);
  const void* gradient = nullptr;
  EXPECT_OK(ga_gradient(net.ctx, net.gamma, &gradient, nullptr, nullptr));
  EXPECT_TRUE(
      refused(ga_bn_forward(net.ctx, net.bn, data[0].x.data(), 2, 7, const_cast<void*>(gradient)),
              kArgument, {"\"bn\"", " y ", "library"}));
}

// Without elements, tensors may be NULL.
TEST(BatchNormRules, EmptyInputsMayBeNull) {
  for (const int32_t mode : kModes) {
    BnNet net(kShape, bn_options(mode));
    if (mode == GA_BN_WINDOW) {
      EXPECT_OK(ga_bn_accumulate(net.ctx, net.bn, nullptr, 0, 7));
      EXPECT_OK(ga_bn_finalize(net.ctx, net.bn));
    }
    EXPECT_OK(ga_bn_forward(net.ctx, net.bn, nullptr, 0, 7, nullptr));
    EXPECT_OK(ga_bn_infer(net.ctx, net.bn, nullptr, 3, 0, nullptr));
    EXPECT_OK(ga_micro_begin(net.ctx, 0, 1, nullptr));
    EXPECT_OK(ga_bn_backward_accumulate(net.ctx, net.bn, nullptr, nullptr, 5, 0));
    EXPECT_OK(ga_bn_backward(net.ctx, net.bn, nullptr, nullptr, 0, 7, nullptr));
    EXPECT_OK(ga_micro_end(net.ctx));
    EXPECT_EQ(step(net.ctx).outcome, GA_STEP_APPLIED);
    EXPECT_EQ(external_gradient(net.ctx, net.gamma, 3), std::vector<double>(3, 0));
  }
  // In a micro-batch of weight 0 neither x nor dy is read.
  BnNet net(kShape, bn_options(GA_BN_MICRO));
  BnWindow data = bn_window(kShape, GA_F32, {2});
  BnOutput out = bn_output(data);
  net.forward(data[0], out.y[0]);
  EXPECT_OK(ga_micro_begin(net.ctx, 0, 0, nullptr));
  EXPECT_OK(ga_bn_backward_accumulate(net.ctx, net.bn, nullptr, nullptr, 2, 7));
  EXPECT_OK(ga_bn_backward(net.ctx, net.bn, nullptr, nullptr, 2, 7, out.dx[0].data()));
  EXPECT_EQ(out.dx[0], Tensor(GA_F32, 42));
}

// With weight 0 dx is set to zero; without elements it may be NULL, and nothing is written.
TEST(BatchNormRules, NoElementsOfWeightZero) {
  for (const int32_t mode : {GA_BN_MICRO, GA_BN_CUMULATIVE}) {
    BnNet net(kShape, bn_options(mode));
    EXPECT_OK(ga_bn_forward(net.ctx, net.bn, nullptr, 0, 7, nullptr));
    EXPECT_OK(ga_micro_begin(net.ctx, 0, 0, nullptr));
    EXPECT_OK(ga_bn_backward(net.ctx, net.bn, nullptr, nullptr, 0, 7, nullptr));
    EXPECT_OK(ga_micro_end(net.ctx));
    EXPECT_EQ(step(net.ctx).outcome, GA_STEP_SKIPPED_EMPTY);
  }
}

// ---- Layers -------------------------------------------------------------------------------------

TEST(BatchNormRules, AddingLayers) {
  using O = ga_bn_options&;
  struct Bad {
    const char* what;
    const char* name;
    int64_t channels;
    ga_param gamma, beta;
    void (*change)(O);
    ga_status status;
    Words words;
  };
  const auto same = [](O) {};
  const std::vector<Bad> list = {
      {"no name", nullptr, 3, 0, 1, same, kArgument, {"name"}},
      {"empty name", "", 3, 0, 1, same, kArgument, {"name", "empty"}},
      {"name in use", "bn", 3, 0, 1, same, kArgument, {"\"bn\""}},
      {"no channels", "new", 0, -1, -1, same, kArgument, {"\"new\"", "channels", "0"}},
      {"channels -3", "new", -3, -1, -1, same, kArgument, {"\"new\"", "channels", "-3"}},
      {"2^63 channels", "new", INT64_MAX, -1, -1, same, kArgument, {"\"new\"", "channels"}},
      {"gamma 9", "new", 3, 9, 1, same, kArgument, {"9"}},
      {"gamma -2", "new", 3, -2, 1, same, kArgument, {"-2"}},
      {"beta 3", "new", 3, 0, 3, same, kArgument, {"3"}},
      {"beta INT32_MAX", "new", 3, 0, INT32_MAX, same, kArgument, {"2147483647"}},
      {"gamma of 4", "new", 4, 0, -1, same, kArgument, {"\"new\"", "gamma", "3", "4"}},
      {"beta of 5", "new", 3, 0, 2, same, kArgument, {"\"new\"", "beta", "\"five\"", "5", "3"}},
      {"the same", "new", 3, 0, 0, same, kArgument, {"\"new\"", "gamma and beta"}},
      {"mode 3", "new", 3, 0, 1, [](O o) { o.mode = 3; }, kArgument, {"\"new\"", "mode", "3"}},
      {"mode -1", "new", 3, 0, 1, [](O o) { o.mode = -1; }, kArgument, {"\"new\"", "mode", "-1"}},
      {"layout 2",
       "new",
       3,
       0,
       1,
       [](O o) { o.layout = 2; },
       kArgument,
       {"\"new\"", "layout", "2"}},
      {"dtype 0", "new", 3, 0, 1, [](O o) { o.dtype = 0; }, kArgument, {"\"new\"", "dtype", "0"}},
      {"i32", "new", 3, 0, 1, [](O o) { o.dtype = GA_I32; }, kArgument, {"\"new\"", "dtype"}},
      {"dtype 99",
       "new",
       3,
       0,
       1,
       [](O o) { o.dtype = 99; },
       kArgument,
       {"\"new\"", "dtype", "99"}},
      {"biased 2",
       "new",
       3,
       0,
       1,
       [](O o) { o.biased = 2; },
       kArgument,
       {"\"new\"", "biased", "2"}},
      {"momentum 1.5",
       "new",
       3,
       0,
       1,
       [](O o) { o.momentum = 1.5; },
       kArgument,
       {"\"new\"", "momentum", "1.5"}},
      {"momentum -0.1",
       "new",
       3,
       0,
       1,
       [](O o) { o.momentum = -0.1; },
       kArgument,
       {"\"new\"", "momentum", "-0.1"}},
      {"momentum NaN",
       "new",
       3,
       0,
       1,
       [](O o) { o.momentum = NAN; },
       kArgument,
       {"\"new\"", "momentum", "nan"}},
      {"eps 0", "new", 3, 0, 1, [](O o) { o.eps = 0; }, kArgument, {"\"new\"", "eps", "0"}},
      {"eps -1e-5",
       "new",
       3,
       0,
       1,
       [](O o) { o.eps = -1e-5; },
       kArgument,
       {"\"new\"", "eps", "-1e-05"}},
      {"eps NaN", "new", 3, 0, 1, [](O o) { o.eps = NAN; }, kArgument, {"\"new\"", "eps", "nan"}},
      {"eps infinite",
       "new",
       3,
       0,
       1,
       [](O o) { o.eps = INFINITY; },
       kArgument,
       {"\"new\"", "eps", "inf"}},
      {"no struct_size",
       "new",
       3,
       0,
       1,
       [](O o) { o.struct_size = 0; },
       kArgument,
       {"ga_bn_options", "struct_size"}},
      {"half a struct",
       "new",
       3,
       0,
       1,
       [](O o) { o.struct_size = offsetof(ga_bn_options, eps); },
       kArgument,
       {"ga_bn_options", "struct_size"}},
  };
  Script s(GA_BN_MICRO);
  Tensor five(GA_F32, 5);
  EXPECT_OK(try_add(s.net.ctx, 0, "five", five.data(), GA_F32, {5}, options()));
  const ga_memory before = memory(s.net.ctx);
  for (const Bad& bad : list) {
    SCOPED_TRACE(bad.what);
    ga_bn_options o = bn_options(GA_BN_MICRO);
    bad.change(o);
    ga_bn out = -7;
    EXPECT_TRUE(refused(ga_bn_add(s.net.ctx, bad.name, bad.channels, bad.gamma, bad.beta, &o, &out),
                        bad.status, bad.words));
    EXPECT_EQ(out, -7) << "written by a call that failed";
    const ga_memory after = memory(s.net.ctx);
    EXPECT_EQ(0, memcmp(&before, &after, sizeof before));
  }
  ga_bn out = -7;
  EXPECT_OK(ga_bn_add(s.net.ctx, "new", 5, 2, -1, nullptr, &out));
  EXPECT_EQ(out, 1) << "a refused layer took an id";
  EXPECT_TRUE(s.finish() == undisturbed(GA_BN_MICRO));
}

// In a struct of a later version, the fields that this library does not know must be 0.
TEST(BatchNormRules, OptionsOfALaterVersion) {
  struct {
    ga_bn_options known;
    int64_t unknown;
  } later;
  EXPECT_OK(ga_bn_options_init(&later.known, sizeof later, GA_FLAVOR_TORCH));
  later.known.struct_size = sizeof later;
  later.unknown = 0;
  Context ctx;
  EXPECT_OK(ga_bn_add(ctx, "a", 3, -1, -1, &later.known, nullptr));
  later.unknown = 1;
  EXPECT_TRUE(refused(ga_bn_add(ctx, "b", 3, -1, -1, &later.known, nullptr), GA_ERROR_UNSUPPORTED,
                      {"ga_bn_options"}));

  ga_bn_options o;
  memset(&o, 0x5a, sizeof o);
  const ga_bn_options before = o;
  EXPECT_EQ(ga_bn_options_init(nullptr, sizeof o, GA_FLAVOR_TORCH), kArgument);
  for (const size_t size : {size_t{0}, size_t{7}, SIZE_MAX})
    EXPECT_EQ(ga_bn_options_init(&o, size, GA_FLAVOR_TORCH), kArgument);
  for (const int32_t flavor : {-1, int32_t{GA_FLAVOR_BERT}, 3})
    EXPECT_TRUE(refused(ga_bn_options_init(&o, sizeof o, flavor), kArgument,
                        {"flavor", std::to_string(flavor)}));
  EXPECT_EQ(0, memcmp(&o, &before, sizeof o)) << "written by a call that failed";
  EXPECT_OK(ga_bn_options_init(&o, sizeof o, GA_FLAVOR_KERAS));
  EXPECT_EQ(o.layout, GA_BN_CHANNELS_LAST);
  EXPECT_EQ(o.biased, 1);
  EXPECT_OK(ga_bn_options_init(&o, sizeof o, GA_FLAVOR_TORCH));
  EXPECT_EQ(o.mode, GA_BN_MICRO);
  EXPECT_EQ(o.layout, GA_BN_CHANNELS_FIRST);
  EXPECT_EQ(o.dtype, GA_F32);
  EXPECT_EQ(o.biased, 0);
}

TEST(BatchNormRules, LayersAreDescribed) {
  Context ctx;
  int32_t count = -7;
  EXPECT_OK(ga_bn_count(ctx, &count));
  EXPECT_EQ(count, 0);
  ctx.group(plain_sgd());
  std::vector<Tensor> gammas(30, Tensor(GA_F32, 7));
  for (Tensor& gamma : gammas) add(ctx, 0, gamma);
  ga_bn_options o;
  EXPECT_OK(ga_bn_options_init(&o, sizeof o, GA_FLAVOR_KERAS));
  o.mode = GA_BN_CUMULATIVE;
  o.dtype = GA_BF16;
  o.momentum = 0.25;
  o.eps = 0.5;
  EXPECT_OK(ga_bn_add(ctx, "short", 7, 3, -1, &o, nullptr));
  ga_bn_info info;
  EXPECT_OK(ga_bn_info_init(&info, sizeof info));
  EXPECT_OK(ga_bn_describe(ctx, 0, &info));
  const char* const name = info.name;
  // Many more layers, so that a list of them would have to move.
  for (int32_t i = 0; i < 30; ++i)
    EXPECT_OK(ga_bn_add(ctx, ("layer " + std::to_string(i)).c_str(), 7, -1, i, nullptr, nullptr));
  EXPECT_STREQ(name, "short");
  EXPECT_EQ(info.channels, 7);
  EXPECT_EQ(info.gamma, 3);
  EXPECT_EQ(info.beta, -1);
  EXPECT_EQ(info.mode, GA_BN_CUMULATIVE);
  EXPECT_EQ(info.layout, GA_BN_CHANNELS_LAST);
  EXPECT_EQ(info.dtype, GA_BF16);
  EXPECT_EQ(info.biased, 1);
  EXPECT_EQ(info.frozen, 0);
  EXPECT_EQ(info.momentum, 0.25);
  EXPECT_EQ(info.eps, 0.5);
  EXPECT_OK(ga_bn_count(ctx, &count));
  EXPECT_EQ(count, 31);

  ga_bn found = -7;
  EXPECT_OK(ga_bn_find(ctx, "layer 8", &found));
  EXPECT_EQ(found, 9);
  EXPECT_OK(ga_bn_set_frozen(ctx, found, 1));
  EXPECT_OK(ga_bn_describe(ctx, found, &info));
  EXPECT_STREQ(info.name, "layer 8");
  EXPECT_EQ(info.beta, 8);
  EXPECT_EQ(info.mode, GA_BN_MICRO);
  EXPECT_EQ(info.frozen, 1);

  const ga_bn_info before = info;
  EXPECT_TRUE(refused(ga_bn_find(ctx, "layer", &found), kArgument, {"layer \"layer\""}));
  EXPECT_EQ(found, 9) << "written by a call that failed";
  EXPECT_TRUE(refused(ga_bn_find(ctx, nullptr, &found), kArgument, {"name"}));
  EXPECT_TRUE(refused(ga_bn_find(ctx, "short", nullptr), kArgument, {"out"}));
  EXPECT_TRUE(refused(ga_bn_count(ctx, nullptr), kArgument, {"out"}));
  EXPECT_TRUE(refused(ga_bn_describe(ctx, 0, nullptr), kArgument, {"ga_bn_info"}));
  for (const ga_bn bad : {-1, 31})
    EXPECT_TRUE(refused(ga_bn_describe(ctx, bad, &info), kArgument, {std::to_string(bad)}));
  EXPECT_EQ(0, memcmp(&before, &info, sizeof info)) << "written by a call that failed";
}

// Parameters and layers may be added between windows, in any order, without affecting each other.
TEST(BatchNormRules, LayersAddedLater) {
  for (const int32_t mode : kModes) {
    Script s(mode);
    std::vector<Tensor> more(20, Tensor(GA_F32, 2));
    for (size_t i = 0; i < more.size(); ++i) {
      add(s.net.ctx, 0, more[i]);
      EXPECT_OK(ga_bn_add(s.net.ctx, ("layer " + std::to_string(i)).c_str(),
                          static_cast<int64_t>(1000 * i + 1), -1, -1, nullptr, nullptr));
    }
    EXPECT_TRUE(s.finish() == undisturbed(mode));
  }
}

// ---- A pass that fails half-way -----------------------------------------------------------------

// The program's parallel_for, which leaves out one piece on demand.
struct Unreliable {
  bool fails = false;
  static void run(void* user, int64_t count, ga_task task, void* data) {
    const bool fails = static_cast<Unreliable*>(user)->fails;
    for (int64_t i = 0; i < count; ++i)
      if (!fails || i != count / 2) task(data, i);
  }
};

// A failed pass that has taken the statistics of some channels leaves nothing of them behind, even
// in the first call of a window. There are so many channels that finishing them is several pieces
// of work.
TEST(FaultCallback, HalfTakenStatisticsAreDiscarded) {
  constexpr int64_t kChannels = 40000;
  struct Loop {
    int fails_at = -1, calls = 0;
    static void run(void* user, int64_t count, ga_task task, void* data) {
      Loop& loop = *static_cast<Loop*>(user);
      const bool fails = loop.calls++ == loop.fails_at;
      for (int64_t i = 0; i < (fails ? count / 2 : count); ++i) task(data, i);
    }
  };
  for (const int32_t mode : kModes) {
    int failed = 0;
    for (int at = 0; at < 4; ++at) {
      SCOPED_TRACE(mode_name(mode) + ", call " + std::to_string(at));
      Loop loop;
      ga_config c = config();
      c.num_threads = 4;
      c.parallel_for = Loop::run;
      c.parallel_for_user = &loop;
      Context ctx(c);
      Tensor p(GA_F32, 1), g(GA_F32, 1, 1.0);
      add(ctx, ctx.group(plain_sgd()), p);
      ga_bn_options o = bn_options(mode);
      o.momentum = 1;
      ga_bn bn = -1;
      EXPECT_OK(ga_bn_add(ctx, "bn", kChannels, -1, -1, &o, &bn));
      const Tensor wrong(GA_F32, 2 * kChannels, 100.0), x(GA_F32, 2 * kChannels, 1.0);
      loop.fails_at = loop.calls + at;
      const ga_status status = ga_bn_accumulate(ctx, bn, wrong.data(), 2, 1);
      loop.fails_at = -1;
      failed += status == GA_ERROR_FAULT;
      EXPECT_OK(ga_discard(ctx));
      EXPECT_OK(ga_bn_accumulate(ctx, bn, x.data(), 2, 1));
      if (mode == GA_BN_WINDOW) {
        EXPECT_OK(ga_bn_finalize(ctx, bn));
      }
      accumulate(ctx, {&g});
      EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
      const Running running(ctx, bn, kChannels);
      EXPECT_EQ(running.mean, std::vector<double>(kChannels, 1.0));
    }
    EXPECT_GE(failed, 3) << "too few passes were cut short";
  }
}

// The window becomes invalid and all calls except ga_discard are refused; after ga_discard
// everything is as it was before the window.
TEST(FaultCallback, InAPassOfBatchNormalisation) {
  const ref::BnShape shape{64, 1024, GA_BN_CHANNELS_FIRST};
  const BnWindow data = bn_window(shape, GA_F32, {4, 4}),
                 later = bn_window(shape, GA_F32, {4, 1}, 3);
  for (const int32_t mode : kModes) {
    const BnOutput want = BnNet(shape, bn_options(mode)).step(later);
    for (int failing = 0; failing < 5; ++failing) {
      SCOPED_TRACE(mode_name(mode) + ", call " + std::to_string(failing));
      Unreliable threads;
      ga_config c = config();
      c.num_threads = 4;
      c.parallel_for = Unreliable::run;
      c.parallel_for_user = &threads;
      BnNet net(shape, bn_options(mode), c);
      const auto* x = data[0].x.data();
      const auto* dy = data[0].dy.data();
      Tensor out(GA_F32, data[0].x.count());
      const bool windowed = mode == GA_BN_WINDOW;
      const std::vector<std::function<ga_status()>> calls = {
          [&] { return ga_bn_accumulate(net.ctx, net.bn, x, 4, 1024); },
          [&] {
            if (windowed) {
              EXPECT_OK(ga_bn_finalize(net.ctx, net.bn));
            }
            return ga_bn_forward(net.ctx, net.bn, x, 4, 1024, out.data());
          },
          [&] {
            EXPECT_OK(ga_micro_begin(net.ctx, 0, 1, nullptr));
            return ga_bn_backward_accumulate(net.ctx, net.bn, x, dy, 4, 1024);
          },
          [&] { return ga_bn_backward(net.ctx, net.bn, x, dy, 4, 1024, out.data()); },
          [&] {
            EXPECT_OK(ga_micro_end(net.ctx));
            return ga_bn_infer(net.ctx, net.bn, x, 4, 1024, out.data());
          }};
      for (int i = 0; i < failing; ++i) EXPECT_OK(calls[static_cast<size_t>(i)]());
      threads.fails = true;
      const ga_status status = calls[static_cast<size_t>(failing)]();
      threads.fails = false;
      EXPECT_EQ(status, GA_ERROR_FAULT) << ga_last_error();
      if (failing < 4) {
        EXPECT_EQ(window(net.ctx).state, GA_WINDOW_INVALID);
        for (const auto& call :
             {calls[0], calls[3],
              std::function<ga_status()>([&] { return ga_bn_finalize(net.ctx, net.bn); }),
              std::function<ga_status()>([&] { return ga_bn_backward_finalize(net.ctx, net.bn); }),
              std::function<ga_status()>(
                  [&] { return ga_bn_forward(net.ctx, net.bn, x, 4, 1024, out.data()); })})
          EXPECT_EQ(call(), kState);
        EXPECT_TRUE(refused(ga_step(net.ctx, nullptr), kState, {"invalid"}));
      }
      EXPECT_OK(ga_discard(net.ctx));
      const Running running(net.ctx, net.bn, 64);
      EXPECT_EQ(running.steps, 0);
      EXPECT_EQ(running.mean, std::vector<double>(64, 0));
      EXPECT_TRUE(net.step(later) == want);
    }
  }
}

}  // namespace
}  // namespace ga::test
