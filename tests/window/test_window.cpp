// SPDX-License-Identifier: Apache-2.0
//
// The window: which call is legal when, what counts, and that a discarded or skipped window leaves
// nothing behind.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>

#include "formats.hpp"

namespace ga::test {
namespace {

// Protected memory. A gradient there proves that the library does not read it.
class Forbidden {
 public:
  Forbidden() : data_(mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {}
  ~Forbidden() { munmap(data_, kBytes); }
  const void* data() const { return data_; }

 private:
  static constexpr size_t kBytes = 1 << 20;
  void* data_;
};

// A parallel_for that fails in mid-work on demand.
struct Unreliable {
  enum Fault { kNone, kLeavesOneOut, kRunsOneTwice, kOutOfRange, kNothing, kThrows };
  Fault fault = kNone;
  int calls = 0;

  static void run(void* user, int64_t count, ga_task task, void* data) {
    auto& self = *static_cast<Unreliable*>(user);
    ++self.calls;
    if (self.fault == kNothing) return;
    for (int64_t i = 0; i < count; ++i) {
      if (self.fault == kLeavesOneOut && i == count / 2) continue;
      if (self.fault == kThrows && i == 1) throw std::runtime_error("out of threads");
      task(data, i);
      if (self.fault == kRunsOneTwice && i == 0) task(data, i);
    }
    if (self.fault == kOutOfRange) task(data, count);
  }
};

constexpr int64_t kLarge = 2 * 65536 + 11;  // several chunks: not run inline

// ---- Which call is legal when -------------------------------------------------------------------

enum State { kEmpty, kOpen, kFull, kMicro, kAcquired, kResumed, kFailed, kInvalid, kStates };
const char* const kStateNames[] = {"empty",    "open",    "full",   "micro-batch open",
                                   "acquired", "resumed", "failed", "invalid"};

// A context in one of the states. Parameter 0 is large, 1 small, 2 external.
class Stage {
 public:
  // count: elements of parameter 0; the invalid state needs several chunks.
  explicit Stage(State state, int64_t count = kLarge)
      : big(static_cast<size_t>(count), 1),
        gradient(static_cast<size_t>(count), 0.5f),
        other(static_cast<size_t>(count), 0.25f),
        state_(state) {
    ga_config c = config();
    c.accum_steps = state == kFull ? 1 : 3;
    c.nonfinite = state == kFailed ? GA_NONFINITE_FAIL : GA_NONFINITE_SKIP_STEP;
    c.num_threads = 4;
    c.parallel_for = Unreliable::run;
    c.parallel_for_user = &threads;
    EXPECT_OK(ga_context_create(&c, &ctx));
    const ga_optimizer adamw = optimizer(GA_OPTIMIZER_ADAMW);
    const ga_optimizer external = optimizer(GA_OPTIMIZER_EXTERNAL);
    EXPECT_OK(ga_group_add(ctx, &adamw, nullptr));
    EXPECT_OK(ga_group_add(ctx, &external, nullptr));
    EXPECT_OK(add("big", 0, big.data(), count));
    EXPECT_OK(add("small", 0, &small, 1));
    EXPECT_OK(add("external", 1, &loose, 1));
    accumulator_.struct_size = sizeof accumulator_;
    if (state == kOpen || state == kFull) {
      EXPECT_OK(whole());
    }
    if (state == kMicro || state == kAcquired) {
      EXPECT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
    }
    if (state == kAcquired) {
      EXPECT_OK(ga_accumulator_acquire(ctx, 1, &accumulator_));
    }
    if (state == kResumed) {
      for (int k : {0, 1}) {
        EXPECT_OK(ga_micro_begin(ctx, k, 1, nullptr));
        EXPECT_OK(ga_accumulate_part(ctx, 0, k == 0 ? gradient.data() : other.data()));
        EXPECT_OK(ga_micro_end(ctx));
      }
      EXPECT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
    }
    if (state == kFailed) {
      gradient[3] = NAN;
      EXPECT_OK(whole());
      gradient[3] = 0.5f;
      EXPECT_EQ(ga_step(ctx, nullptr), GA_ERROR_NONFINITE);
    }
    if (state == kInvalid) {
      threads.fault = Unreliable::kLeavesOneOut;
      EXPECT_EQ(whole(), GA_ERROR_FAULT);
      threads.fault = Unreliable::kNone;
    }
  }
  ~Stage() { ga_context_destroy(ctx); }
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;

  ga_status add(const char* name, ga_group group, float* data, int64_t count) {
    return ga_param_add(ctx, group, name, data, GA_F32, 1, &count, nullptr, nullptr);
  }
  ga_status whole() {
    const void* list[] = {gradient.data(), &other[0], &other[1]};
    return ga_accumulate(ctx, list, 3, 1, nullptr);
  }
  ga_status ready(ga_param id) { return ga_params_ready(ctx, &id, 1); }

  Unreliable threads;
  Block big;
  float small = 1, loose = 1, fresh = 1, moved = 1;
  Block gradient, other;
  ga_context* ctx = nullptr;
  const State state_;
  ga_accumulator accumulator_{};
};

struct Call {
  const char* name;
  std::function<ga_status(Stage&)> run;
  ga_status expected[kStates];  // in the order of State
};

std::vector<Call> calls() {
  const ga_status o = GA_OK, s = GA_ERROR_INVALID_STATE, n = GA_ERROR_NONFINITE,
                  f = GA_ERROR_WINDOW_FULL;
  using S = Stage&;
  return {
      // expected when: empty, open, full, micro-batch open, acquired, resumed, failed, invalid
      {"ga_accumulate", [](S t) { return t.whole(); }, {o, o, f, s, s, s, s, s}},
      {"ga_micro_begin, a new one",
       [](S t) { return ga_micro_begin(t.ctx, window(t.ctx).micro_batches, 1, nullptr); },
       {o, o, f, s, s, s, s, s}},
      {"ga_micro_begin, the next one",
       [](S t) { return ga_micro_begin(t.ctx, -1, 1, nullptr); },
       {o, o, f, s, s, s, s, s}},
      {"ga_micro_begin, number 0 again",
       [](S t) { return ga_micro_begin(t.ctx, 0, 1, nullptr); },
       {o, o, o, s, s, s, s, s}},
      {"ga_accumulate_part",
       [](S t) { return ga_accumulate_part(t.ctx, 0, t.other.data()); },
       {s, s, s, o, o, o, s, s}},
      {"ga_accumulate_part, of the acquired",
       [](S t) { return ga_accumulate_part(t.ctx, 1, t.other.data()); },
       {s, s, s, o, s, o, s, s}},
      {"ga_accumulator_acquire",
       [](S t) { return ga_accumulator_acquire(t.ctx, 2, &t.accumulator_); },
       {s, s, s, o, o, o, s, s}},
      {"ga_accumulator_acquire, of the acquired",
       [](S t) { return ga_accumulator_acquire(t.ctx, 1, &t.accumulator_); },
       {s, s, s, o, s, o, s, s}},
      {"ga_accumulator_release",
       [](S t) { return ga_accumulator_release(t.ctx, 1); },
       {s, s, s, s, o, s, s, s}},
      {"ga_micro_end", [](S t) { return ga_micro_end(t.ctx); }, {s, s, s, o, s, o, s, s}},
      {"ga_micro_abort", [](S t) { return ga_micro_abort(t.ctx); }, {s, s, s, o, s, s, s, s}},
      {"ga_params_ready", [](S t) { return t.ready(0); }, {o, o, o, o, o, o, s, s}},
      {"ga_params_ready, of the acquired",
       [](S t) { return t.ready(1); },
       {o, o, o, o, s, o, s, s}},
      {"ga_prepare", [](S t) { return ga_prepare(t.ctx); }, {o, o, o, o, o, o, o, o}},
      {"ga_group_set_optimizer",
       [](S t) {
         ga_optimizer same = optimizer(GA_OPTIMIZER_ADAMW);
         same.struct_size = sizeof same;
         EXPECT_OK(ga_group_optimizer(t.ctx, 0, &same));
         return ga_group_set_optimizer(t.ctx, 0, &same);
       },
       {o, o, o, o, o, o, o, o}},
      {"ga_param_set_lr_scale",
       [](S t) { return ga_param_set_lr_scale(t.ctx, 0, 1); },
       {o, o, o, o, o, o, o, o}},
      {"ga_param_set_weight_decay_scale",
       [](S t) { return ga_param_set_weight_decay_scale(t.ctx, 0, 1); },
       {o, o, o, o, o, o, o, o}},
      {"ga_group_set_frozen",
       [](S t) { return ga_group_set_frozen(t.ctx, 0, 1); },
       {o, s, s, s, s, s, s, s}},
      {"ga_param_remove", [](S t) { return ga_param_remove(t.ctx, 1); }, {o, s, s, s, s, s, s, s}},
      {"ga_state_get",
       [](S t) {
         int64_t steps;
         return ga_state_get(t.ctx, 0, "step", &steps, GA_I64, 1);
       },
       {o, s, s, s, s, s, s, s}},
      {"ga_state_set",
       [](S t) {
         const int64_t steps = 4;
         return ga_state_set(t.ctx, 0, "step", &steps, GA_I64, 1);
       },
       {o, s, s, s, s, s, s, s}},
      {"ga_save_to_memory",
       [](S t) {
         size_t size;
         return ga_save_to_memory(t.ctx, nullptr, nullptr, 0, &size);
       },
       {o, o, o, s, s, s, o, s}},
      {"ga_state_write",
       [](S t) {
         return ga_state_write(
             t.ctx, [](void*, int64_t, const void*, size_t) -> int32_t { return 0; }, nullptr,
             nullptr);
       },
       {o, o, o, s, s, s, o, s}},
      {"ga_load_from_memory",
       [](S t) { return ga_load_from_memory(t.ctx, "too short", 4, nullptr); },
       {GA_ERROR_FORMAT, s, s, s, s, s, s, s}},
      {"ga_load_from_memory, of its own state",
       [](S t) {
         std::vector<char> bytes;
         size_t size = 0;
         if (const ga_status status = ga_save_to_memory(t.ctx, nullptr, nullptr, 0, &size))
           return status;
         bytes.resize(size);
         EXPECT_OK(ga_save_to_memory(t.ctx, nullptr, bytes.data(), size, &size));
         return ga_load_from_memory(t.ctx, bytes.data(), size, nullptr);
       },
       {o, s, s, s, s, s, s, s}},
      {"ga_state_reset", [](S t) { return ga_state_reset(t.ctx, 0); }, {o, s, s, s, s, s, s, s}},
      {"ga_context_set_steps",
       [](S t) { return ga_context_set_steps(t.ctx, 3); },
       {o, s, s, s, s, s, s, s}},
      {"ga_state_count",
       [](S t) {
         int32_t count;
         return ga_state_count(t.ctx, 0, &count);
       },
       {o, o, o, o, o, o, o, o}},
      {"ga_group_last_lr",
       [](S t) {
         double lr;
         return ga_group_last_lr(t.ctx, 0, &lr);
       },
       {o, o, o, o, o, o, o, o}},
      {"ga_step", [](S t) { return ga_step(t.ctx, nullptr); }, {o, o, o, s, s, s, n, s}},
      {"ga_discard", [](S t) { return ga_discard(t.ctx); }, {o, o, o, o, o, o, o, o}},
      {"ga_gradient",
       [](S t) {
         const void* data;
         return ga_gradient(t.ctx, 2, &data, nullptr, nullptr);
       },
       {s, s, s, s, s, s, s, s}},
      {"ga_group_add",
       [](S t) {
         const ga_optimizer sgd = optimizer(GA_OPTIMIZER_SGD);
         return ga_group_add(t.ctx, &sgd, nullptr);
       },
       {o, s, s, s, s, s, s, s}},
      {"ga_param_add",
       [](S t) { return t.add("fresh", 0, &t.fresh, 1); },
       {o, s, s, s, s, s, s, s}},
      {"ga_params_add_flat",
       [](S t) {
         const ga_flat_entry entry = flat_entry("fresh", 0, 0, nullptr, 0);
         return ga_params_add_flat(t.ctx, &t.fresh, GA_F32, &entry, 1, nullptr, nullptr);
       },
       {o, s, s, s, s, s, s, s}},
      {"ga_param_bind",
       [](S t) { return ga_param_bind(t.ctx, 1, &t.moved); },
       {o, s, s, s, s, s, s, s}},
      {"ga_param_set_frozen",
       [](S t) { return ga_param_set_frozen(t.ctx, 1, 1); },
       {o, s, s, s, s, s, s, s}},
      {"ga_context_set_accum_steps",
       [](S t) { return ga_context_set_accum_steps(t.ctx, 7); },
       {o, s, s, s, s, s, s, s}},
      {"ga_context_set_accum_schedule",
       [](S t) {
         const int64_t from = 0, steps = 9;
         return ga_context_set_accum_schedule(t.ctx, &from, &steps, 1);
       },
       {o, s, s, s, s, s, s, s}},
      {"ga_group_set_lr",
       [](S t) { return ga_group_set_lr(t.ctx, 0, 0.5); },
       {o, o, o, o, o, o, o, o}},
      {"ga_group_set_weight_decay",
       [](S t) { return ga_group_set_weight_decay(t.ctx, 0, 0.5); },
       {o, o, o, o, o, o, o, o}},
      {"ga_group_set_schedule",
       [](S t) { return ga_group_set_schedule(t.ctx, 0, nullptr); },
       {o, o, o, o, o, o, o, o}},
      {"ga_context_set_clip",
       [](S t) { return ga_context_set_clip(t.ctx, nullptr); },
       {o, o, o, o, o, o, o, o}},
      {"ga_group_set_clip",
       [](S t) { return ga_group_set_clip(t.ctx, 0, nullptr); },
       {o, o, o, o, o, o, o, o}},
      {"ga_group_clip",
       [](S t) {
         ga_clip c = clip(GA_CLIP_GLOBAL, 1);
         EXPECT_OK(ga_context_clip(t.ctx, &c));
         return ga_group_clip(t.ctx, 0, &c);
       },
       {o, o, o, o, o, o, o, o}},
      {"ga_group_lr",
       [](S t) {
         double lr;
         return ga_group_lr(t.ctx, 0, &lr);
       },
       {o, o, o, o, o, o, o, o}},
      {"ga_param_describe",
       [](S t) {
         ga_param_info info;
         EXPECT_OK(ga_param_info_init(&info, sizeof info));
         return ga_param_describe(t.ctx, 0, &info);
       },
       {o, o, o, o, o, o, o, o}},
      {"ga_param_find",
       [](S t) {
         ga_param id;
         return ga_param_find(t.ctx, "small", &id);
       },
       {o, o, o, o, o, o, o, o}},
      {"ga_bn_count",
       [](S t) {
         int32_t count;
         return ga_bn_count(t.ctx, &count);
       },
       {o, o, o, o, o, o, o, o}},
      {"ga_group_optimizer",
       [](S t) {
         ga_optimizer adamw = optimizer(GA_OPTIMIZER_ADAMW);
         return ga_group_optimizer(t.ctx, 0, &adamw);
       },
       {o, o, o, o, o, o, o, o}},
      {"ga_window", [](S t) { return window(t.ctx), GA_OK; }, {o, o, o, o, o, o, o, o}},
      {"ga_context_memory", [](S t) { return memory(t.ctx), GA_OK; }, {o, o, o, o, o, o, o, o}},
      {"ga_synchronize", [](S t) { return ga_synchronize(t.ctx); }, {o, o, o, o, o, o, o, o}},
      {"ga_context_set_stream",
       [](S t) {
         const ga_status status = ga_context_set_stream(t.ctx, nullptr);
         return !std::getenv("GA_TEST_DEVICE") && status == GA_ERROR_UNSUPPORTED ? GA_OK : status;
       },
       {o, o, o, o, o, o, o, o}},
  };
}

class Orders : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(State, Orders, testing::Range(0, static_cast<int>(kStates)),
                         [](const testing::TestParamInfo<int>& info) {
                           return identifier(kStateNames[info.param]);
                         });

TEST_P(Orders, EveryCall) {
  const State state = static_cast<State>(GetParam());
  for (const Call& call : calls()) {
    SCOPED_TRACE(call.name);
    Stage stage(state);
    const ga_window_info before = window(stage.ctx);
    EXPECT_EQ(before.state, state == kEmpty     ? GA_WINDOW_EMPTY
                            : state == kFull    ? GA_WINDOW_FULL
                            : state == kInvalid ? GA_WINDOW_INVALID
                                                : GA_WINDOW_OPEN);
    const ga_status status = call.run(stage);
    EXPECT_EQ(status, call.expected[state]) << ga_last_error();
    if (status == GA_OK) continue;
    EXPECT_STRNE(ga_last_error(), "");
    const ga_window_info after = window(stage.ctx);
    EXPECT_EQ(0, memcmp(&before, &after, sizeof before)) << "a failed call moved the window";
  }
}

// Makes the calls one after the other. Each returns a status that it may return, and leaves the window
// alone if it fails. Then the window can be dropped, and the state saved and loaded.
void expect_orderly(State state, const std::vector<const Call*>& list, const Call& own_state) {
  Stage stage(state, state == kInvalid ? kLarge / 2 : 33);
  for (const Call* call : list) {
    const ga_window_info before = window(stage.ctx);
    const ga_status status = call->run(stage);
    if (status == GA_OK) continue;
    // Parameters may have become frozen, removed or more by an earlier call.
    const bool known = status == GA_ERROR_INVALID_ARGUMENT || status == GA_ERROR_INVALID_STATE ||
                       std::count(std::begin(call->expected), std::end(call->expected), status) > 0;
    EXPECT_TRUE(known) << call->name << " returned " << status << ": " << ga_last_error();
    EXPECT_STRNE(ga_last_error(), "");
    const ga_window_info after = window(stage.ctx);
    EXPECT_EQ(0, memcmp(&before, &after, sizeof before)) << call->name << " moved the window";
  }
  EXPECT_OK(ga_discard(stage.ctx));
  EXPECT_EQ(window(stage.ctx).state, GA_WINDOW_EMPTY);
  EXPECT_OK(own_state.run(stage));
}

const Call& own_state_of(const std::vector<Call>& all) {
  return *std::find_if(all.begin(), all.end(), [](const Call& call) {
    return strcmp(call.name, "ga_load_from_memory, of its own state") == 0;
  });
}

TEST_P(Orders, EveryTwoCalls) {
  const std::vector<Call> all = calls();
  for (const Call& a : all) {
    for (const Call& b : all) {
      SCOPED_TRACE(testing::Message() << a.name << ", then " << b.name);
      expect_orderly(static_cast<State>(GetParam()), {&a, &b}, own_state_of(all));
      if (HasFailure()) return;
    }
  }
}

// One in 97 of all orders of three calls, or all of them, which takes ten minutes.
TEST_P(Orders, SomeThreeCalls) {
  const size_t stride = getenv("GA_TEST_EVERY_ORDER") ? 1 : 97;  // shares no factor with calls()
  const std::vector<Call> all = calls();
  const size_t n = all.size();
  for (size_t k = static_cast<size_t>(GetParam()) % stride; k < n * n * n; k += stride) {
    const Call &a = all[k / n / n], &b = all[k / n % n], &c = all[k % n];
    SCOPED_TRACE(testing::Message() << a.name << ", then " << b.name << ", then " << c.name);
    expect_orderly(static_cast<State>(GetParam()), {&a, &b, &c}, own_state_of(all));
    if (HasFailure()) return;
  }
}

// A failed call changes nothing: the program goes on bit for bit as if it had not been made.
// (Invalid windows are tested below.)
class Failures : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(State, Failures, testing::Range(0, static_cast<int>(kInvalid)),
                         [](const testing::TestParamInfo<int>& info) {
                           return identifier(kStateNames[info.param]);
                         });

TEST_P(Failures, ChangeNothing) {
  const State state = static_cast<State>(GetParam());
  const auto finish = [&](Stage& t) {
    if (state == kAcquired) {
      to_library(t.accumulator_.data, Block{static_cast<float>(t.accumulator_.alpha) * 2});
      EXPECT_OK(ga_accumulator_release(t.ctx, 1));
    }
    if (state == kMicro || state == kAcquired || state == kResumed) {
      EXPECT_OK(ga_accumulate_part(t.ctx, 0, t.other.data()));
      EXPECT_OK(ga_micro_end(t.ctx));
    }
    if (state == kFailed) {
      EXPECT_EQ(ga_step(t.ctx, nullptr), GA_ERROR_NONFINITE);
      EXPECT_OK(ga_discard(t.ctx));
    }
    if (state != kFull) {
      EXPECT_OK(t.whole());
    }
    step(t.ctx);
    EXPECT_OK(t.whole());
    step(t.ctx);
  };
  Stage twin(state);
  finish(twin);
  Stage stage(state);
  for (const Call& call : calls()) {
    if (call.expected[state] == GA_OK) continue;
    // A call may overwrite the caller's struct, but the rest needs what the stage's own acquire
    // wrote.
    const ga_accumulator kept = stage.accumulator_;
    EXPECT_NE(call.run(stage), GA_OK) << call.name;
    EXPECT_EQ(0, memcmp(&kept, &stage.accumulator_, sizeof kept)) << call.name;
  }
  finish(stage);
  EXPECT_TRUE(same_bits(stage.big, twin.big));
  EXPECT_EQ(stage.small, twin.small);
  const void *a = nullptr, *b = nullptr;
  EXPECT_OK(ga_gradient(stage.ctx, 2, &a, nullptr, nullptr));
  EXPECT_OK(ga_gradient(twin.ctx, 2, &b, nullptr, nullptr));
  EXPECT_EQ(from_library(a, 1), from_library(b, 1));
}

// ---- Counting -----------------------------------------------------------------------------------

TEST(Window, CountsFromEmptyToFull) {
  ga_config c = config();
  c.accum_steps = 3;
  float p = 0;
  const float g = 1;
  Context ctx(c);
  ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
  for (int w = 0; w < 3; ++w) {
    ga_window_info info = window(ctx);
    EXPECT_EQ(info.struct_size, sizeof info);
    EXPECT_EQ(info.state, GA_WINDOW_EMPTY);
    EXPECT_EQ(info.reserved, 0);
    EXPECT_EQ(info.micro_batches, 0);
    EXPECT_EQ(info.open_micro, -1);
    EXPECT_EQ(info.accum_steps, 3);
    EXPECT_EQ(info.weight, 0);
    EXPECT_EQ(info.windows, 2 * w);
    EXPECT_EQ(info.steps, w);
    for (int k = 0; k < 3; ++k) {
      ctx.accumulate({&g}, k + 0.5);
      info = window(ctx);
      EXPECT_EQ(info.state, k == 2 ? GA_WINDOW_FULL : GA_WINDOW_OPEN);
      EXPECT_EQ(info.micro_batches, k + 1);
      EXPECT_EQ(info.open_micro, -1);
    }
    EXPECT_EQ(info.weight, 4.5);
    const void* list[] = {&g};
    EXPECT_EQ(ga_accumulate(ctx, list, 1, 1, nullptr), GA_ERROR_WINDOW_FULL);
    ga_step_result r = step(ctx);
    EXPECT_EQ(r.struct_size, sizeof r);
    EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
    EXPECT_EQ(r.reserved, 0);
    EXPECT_EQ(r.windows, 2 * w + 1);
    EXPECT_EQ(r.steps, w + 1);
    EXPECT_EQ(r.micro_batches, 3);
    EXPECT_EQ(r.weight, 4.5);
    EXPECT_FLOAT_EQ(static_cast<float>(r.norm), 1);
    EXPECT_EQ(r.clip_factor, 1);
    EXPECT_EQ(r.lr, 1);
    EXPECT_EQ(r.loss_scale, 1);
    r = step(ctx);
    EXPECT_EQ(r.outcome, GA_STEP_SKIPPED_EMPTY);
    EXPECT_EQ(r.windows, 2 * w + 2);
    EXPECT_EQ(r.steps, w + 1);
    EXPECT_EQ(r.micro_batches, 0);
    EXPECT_EQ(r.weight, 0);
    EXPECT_EQ(r.norm, 0);
    EXPECT_EQ(r.clip_factor, 1);
    EXPECT_EQ(r.lr, 0);
  }
}

TEST(Window, TheProgramDecidesWhereKIsZero) {
  float p = 0;
  const float g = 1;
  Context ctx;
  ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
  for (int k = 0; k < 1000; ++k) {
    ctx.accumulate({&g});
    ASSERT_EQ(window(ctx).state, GA_WINDOW_OPEN);
  }
  EXPECT_EQ(step(ctx).micro_batches, 1000);
  EXPECT_EQ(p, -1);
}

TEST(Window, KChangesBetweenWindows) {
  float p = 0;
  const float g = 1;
  Context ctx;
  ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
  for (const int64_t k : {3, 1, 0, 2}) {
    ASSERT_OK(ga_context_set_accum_steps(ctx, k));
    EXPECT_EQ(window(ctx).accum_steps, k);
    for (int64_t i = 0; i < (k ? k : 5); ++i) ctx.accumulate({&g});
    EXPECT_EQ(window(ctx).state, k ? GA_WINDOW_FULL : GA_WINDOW_OPEN);
    step(ctx);
  }
  EXPECT_EQ(ga_context_set_accum_steps(ctx, -2), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(window(ctx).accum_steps, 2);
}

// GA_MICRO_LAST ends a window of any K, and tells nothing of the next one.
TEST(Window, LastMicroBatch) {
  for (const int64_t k : {0, 2, 5}) {
    float p = 0;
    const float g = 1;
    const void* list[] = {&g};
    ga_config c = config();
    c.accum_steps = k;
    Context ctx(c);
    ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
    const MicroOptions last(0, GA_MICRO_LAST);
    for (int w = 0; w < 2; ++w) {
      ctx.accumulate({&g});
      EXPECT_EQ(window(ctx).state, GA_WINDOW_OPEN);
      ASSERT_OK(ga_accumulate(ctx, list, 1, 1, last));
      EXPECT_EQ(window(ctx).state, GA_WINDOW_FULL);
      EXPECT_TRUE(refused(ga_accumulate(ctx, list, 1, 1, nullptr), GA_ERROR_WINDOW_FULL, {"full"}));
      EXPECT_TRUE(refused(ga_micro_begin(ctx, -1, 1, last), GA_ERROR_WINDOW_FULL, {"full"}));
      EXPECT_TRUE(refused(ga_micro_begin(ctx, 0, 1, last), GA_ERROR_INVALID_ARGUMENT,
                          {"micro-batch 0", "GA_MICRO_LAST", "2"}));
      ASSERT_OK(ga_micro_begin(ctx, 0, 1, nullptr));  // what is there may be filled further
      ASSERT_OK(ga_accumulate_part(ctx, 0, &g));
      ASSERT_OK(ga_micro_end(ctx));
      EXPECT_EQ(step(ctx).micro_batches, 2);
      EXPECT_EQ(p, static_cast<float>(-1.5 * (w + 1)));
    }
    ASSERT_OK(ga_accumulate(ctx, list, 1, 1, last));
    ASSERT_OK(ga_discard(ctx));
    ASSERT_OK(ga_accumulate(ctx, list, 1, 1, nullptr));
    // The newest micro-batch may say so when it is opened again.
    ASSERT_OK(ga_micro_begin(ctx, 0, 1, last));
    ASSERT_OK(ga_micro_end(ctx));
    EXPECT_EQ(window(ctx).state, GA_WINDOW_FULL);
  }
}

TEST(Window, KBySchedule) {
  float p = 0;
  const float g = 1, nan = NAN;
  Context ctx;
  ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
  {
    int64_t from[] = {0, 3, 4, 6}, steps[] = {2, 5, 0, 1};
    ASSERT_OK(ga_context_set_accum_schedule(ctx, from, steps, 4));
    memset(from, 0xff, sizeof from);  // the library has a copy
    memset(steps, 0xff, sizeof steps);
  }
  const int64_t expected[] = {2, 2, 2, 5, 0, 0, 1, 1};
  for (size_t t = 0; t < 8; ++t) {
    EXPECT_EQ(window(ctx).accum_steps, expected[t]) << "before step " << t;
    // Skipped and discarded windows are not steps.
    step(ctx);
    ctx.accumulate({&nan});
    EXPECT_EQ(step(ctx).outcome, GA_STEP_SKIPPED_NONFINITE);
    ctx.accumulate({&g});
    ASSERT_OK(ga_discard(ctx));
    const int64_t k = expected[t] ? expected[t] : 3;
    for (int64_t i = 0; i < k; ++i) {
      ctx.accumulate({&g});
      EXPECT_EQ(window(ctx).accum_steps, expected[t]);
    }
    EXPECT_EQ(window(ctx).state, expected[t] ? GA_WINDOW_FULL : GA_WINDOW_OPEN);
    EXPECT_EQ(step(ctx).steps, static_cast<int64_t>(t + 1));
  }
  ASSERT_OK(ga_context_set_accum_schedule(ctx, nullptr, nullptr, 0));
  EXPECT_EQ(window(ctx).accum_steps, 0);  // that of ga_config again
}

// K may not be set while a schedule of K is set.
TEST(Window, KIsNotSetBesideASchedule) {
  Context ctx;
  const int64_t from[] = {0, 3}, steps[] = {2, 5};
  ASSERT_OK(ga_context_set_accum_schedule(ctx, from, steps, 2));
  EXPECT_TRUE(refused(ga_context_set_accum_steps(ctx, 7), GA_ERROR_INVALID_STATE,
                      {"ga_context_set_accum_steps", "ga_context_set_accum_schedule"}));
  EXPECT_EQ(window(ctx).accum_steps, 2);
  ASSERT_OK(ga_context_set_accum_schedule(ctx, nullptr, nullptr, 0));
  ASSERT_OK(ga_context_set_accum_steps(ctx, 7));
  EXPECT_EQ(window(ctx).accum_steps, 7);
}

// gradients[] has one pointer for each call that added parameters, not one for each parameter.
TEST(Window, Slots) {
  float a = 0, block[3] = {}, b = 0;
  Context ctx;
  size_t slots = 7;
  ASSERT_OK(ga_slot_count(ctx, &slots));
  EXPECT_EQ(slots, 0u);
  ctx.group(plain_sgd());
  ctx.param(0, "a", &a, 1);
  const ga_flat_entry entries[] = {flat_entry("x", 0, 0, nullptr, 0),
                                   flat_entry("y", 0, 0, nullptr, 2)};
  ASSERT_OK(ga_params_add_flat(ctx, block, GA_F32, entries, 2, nullptr, nullptr));
  ASSERT_OK(ga_params_add_flat(ctx, block, GA_F32, nullptr, 0, nullptr, nullptr));
  ctx.param(0, "b", &b, 1);
  ASSERT_OK(ga_slot_count(ctx, &slots));
  EXPECT_EQ(slots, 4u);
  const size_t expected[] = {0, 1, 1, 3};
  for (ga_param p = 0; p < 4; ++p) {
    ASSERT_OK(ga_param_slot(ctx, p, &slots));
    EXPECT_EQ(slots, expected[p]) << p;
  }
  EXPECT_TRUE(refused(ga_param_slot(ctx, 4, &slots), GA_ERROR_INVALID_ARGUMENT, {"4"}));
  EXPECT_TRUE(refused(ga_param_slot(ctx, 0, nullptr), GA_ERROR_INVALID_ARGUMENT, {"out"}));
  EXPECT_TRUE(refused(ga_slot_count(ctx, nullptr), GA_ERROR_INVALID_ARGUMENT, {"out"}));
  EXPECT_TRUE(refused(ga_slot_count(nullptr, &slots), GA_ERROR_INVALID_ARGUMENT, {"ctx"}));
}

// What a context says of its groups and parameters; pointers in it stay when others are added.
TEST(Window, Queries) {
  uint16_t half[6] = {};
  double scalar = 0;
  const int64_t shape[] = {2, 3};
  Context ctx;
  int32_t count = -1;
  ASSERT_OK(ga_param_count(ctx, &count));
  EXPECT_EQ(count, 0);
  ASSERT_OK(ga_group_count(ctx, &count));
  EXPECT_EQ(count, 0);
  ctx.group(plain_sgd());
  const ga_group adam = ctx.group(optimizer(GA_OPTIMIZER_ADAM));
  ga_param_options o;
  ASSERT_OK(ga_param_options_init(&o, sizeof o));
  o.gradient_dtype = GA_F32;
  o.accumulator_dtype = GA_BF16;
  ga_flat_entry entries[] = {flat_entry("empty", 0, 0, nullptr, 0),
                             flat_entry("half", adam, 2, shape, 0)};
  const int64_t none = 0;
  entries[0].rank = 1, entries[0].shape = &none;
  ASSERT_OK(ga_params_add_flat(ctx, half, GA_F16, entries, 2, &o, nullptr));
  ga_param id = -7;
  ASSERT_OK(ga_param_find(ctx, "half", &id));
  EXPECT_EQ(id, 1);
  ga_param_info info;
  ASSERT_OK(ga_param_info_init(&info, sizeof info));
  ASSERT_OK(ga_param_describe(ctx, id, &info));
  double data[100];
  for (int i = 0; i < 100; ++i) ctx.param(0, "p" + std::to_string(i), &data[i], ref::Shape{});
  EXPECT_STREQ(info.name, "half");
  EXPECT_EQ(info.group, adam);
  EXPECT_EQ(info.dtype, GA_F16);
  EXPECT_EQ(info.gradient_dtype, GA_F32);
  EXPECT_EQ(info.accumulator_dtype, GA_BF16);
  EXPECT_EQ(info.rank, 2);
  EXPECT_EQ(std::vector<int64_t>(info.shape, info.shape + 2),
            std::vector<int64_t>(shape, shape + 2));
  EXPECT_EQ(info.count, 6);
  EXPECT_EQ(info.data, half);
  EXPECT_EQ(info.frozen, 0);
  EXPECT_EQ(info.slot, 0u);
  ASSERT_OK(ga_param_set_frozen(ctx, 3, 1));
  ASSERT_OK(ga_param_bind(ctx, 3, &scalar));
  ASSERT_OK(ga_param_describe(ctx, 3, &info));
  EXPECT_STREQ(info.name, "p1");
  EXPECT_EQ(info.frozen, 1);
  EXPECT_EQ(info.rank, 0);
  EXPECT_EQ(info.count, 1);
  EXPECT_EQ(info.data, &scalar);
  EXPECT_EQ(info.accumulator_dtype, GA_F64);
  EXPECT_EQ(info.slot, 2u);
  ASSERT_OK(ga_param_count(ctx, &count));
  EXPECT_EQ(count, 102);

  ASSERT_OK(ga_group_set_lr(ctx, adam, 0.25));
  ASSERT_OK(ga_group_set_weight_decay(ctx, adam, 0.5));
  ga_optimizer expected = optimizer(GA_OPTIMIZER_ADAM), got;
  expected.lr = 0.25, expected.weight_decay = 0.5;
  got.struct_size = sizeof got;
  ASSERT_OK(ga_group_optimizer(ctx, adam, &got));
  EXPECT_EQ(0, memcmp(&expected, &got, sizeof got));

  const ga_status wrong = GA_ERROR_INVALID_ARGUMENT;
  EXPECT_TRUE(refused(ga_param_find(ctx, "nobody", &id), wrong, {"nobody"}));
  EXPECT_EQ(id, 1) << "written by a call that failed";
  EXPECT_TRUE(refused(ga_param_find(ctx, nullptr, &id), wrong, {"name"}));
  EXPECT_TRUE(refused(ga_param_find(ctx, "half", nullptr), wrong, {"out"}));
  EXPECT_TRUE(refused(ga_param_describe(ctx, 102, &info), wrong, {"102"}));
  EXPECT_TRUE(refused(ga_param_describe(ctx, 0, nullptr), wrong, {"ga_param_info"}));
  EXPECT_TRUE(refused(ga_param_count(ctx, nullptr), wrong, {"out"}));
  EXPECT_TRUE(refused(ga_group_count(ctx, nullptr), wrong, {"out"}));
  EXPECT_TRUE(refused(ga_group_optimizer(ctx, 2, &got), wrong, {"2"}));
  EXPECT_TRUE(refused(ga_group_optimizer(ctx, 0, nullptr), wrong, {"ga_optimizer"}));
}

// A name that was refused with its block is free, and not found.
TEST(Window, NamesOfRefusedBlocks) {
  float block[4] = {};
  Context ctx;
  ctx.group(plain_sgd());
  const ga_flat_entry entries[] = {flat_entry("a", 0, 0, nullptr, 0),
                                   flat_entry("b", 7, 0, nullptr, 1)};
  EXPECT_EQ(ga_params_add_flat(ctx, block, GA_F32, entries, 2, nullptr, nullptr),
            GA_ERROR_INVALID_ARGUMENT);
  ga_param id = -7;
  EXPECT_EQ(ga_param_find(ctx, "a", &id), GA_ERROR_INVALID_ARGUMENT);
  ASSERT_OK(ga_params_add_flat(ctx, block, GA_F32, entries, 1, nullptr, nullptr));
  ASSERT_OK(ga_param_find(ctx, "a", &id));
  EXPECT_EQ(id, 0);
}

// An entry's own options stand in place of those of the call.
TEST(Window, OptionsOfOneFlatEntry) {
  float block[4] = {};
  const int64_t shape[] = {2, 1};
  Context ctx;
  ctx.group(plain_sgd());
  ga_param_options rows;
  ASSERT_OK(ga_param_options_init(&rows, sizeof rows));
  rows.rows = GA_ROWS_DENSE;
  ga_flat_entry entries[] = {flat_entry("table", 0, 2, shape, 0), flat_entry("w", 0, 2, shape, 2)};
  entries[0].options = &rows;
  ASSERT_OK(ga_params_add_flat(ctx, block, GA_F32, entries, 2, nullptr, nullptr));
  const int32_t index = 1;
  const float value = 3;
  ASSERT_OK(ga_micro_begin(ctx, -1, 1, nullptr));
  EXPECT_OK(ga_accumulate_rows(ctx, 0, &index, GA_I32, 1, &value));
  EXPECT_EQ(ga_accumulate_rows(ctx, 1, &index, GA_I32, 1, &value), GA_ERROR_INVALID_ARGUMENT);
  ASSERT_OK(ga_micro_end(ctx));
  step(ctx);
  EXPECT_EQ(block[1], -3);
}

TEST(Window, WrongKSchedules) {
  ga_config c = config();
  c.accum_steps = 4;
  Context ctx(c);
  using Numbers = std::vector<int64_t>;
  const std::vector<std::pair<Numbers, Numbers>> wrong = {
      {{1}, {2}},              // does not begin at 0
      {{-1}, {2}},             //
      {{0, 0}, {2, 3}},        // not ascending
      {{0, 5, 4}, {2, 3, 1}},  //
      {{0}, {-1}},             // no K
      {{0, 5}, {2, -7}},
  };
  for (const auto& [from, steps] : wrong) {
    EXPECT_EQ(ga_context_set_accum_schedule(ctx, from.data(), steps.data(), from.size()),
              GA_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(window(ctx).accum_steps, 4);
  }
  const int64_t zeros[2] = {};
  EXPECT_EQ(ga_context_set_accum_schedule(ctx, nullptr, zeros, 2), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(ga_context_set_accum_schedule(ctx, zeros, nullptr, 2), GA_ERROR_INVALID_ARGUMENT);
}

// ---- Weight 0, no weight, nothing at all --------------------------------------------------------

TEST(Window, WeightZeroReadsNothing) {
  const Forbidden forbidden;
  const float g = 6;
  for (const int where : {0, 1, 2}) {
    for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
      ga_config c = config();
      c.accum_steps = 3;
      c.gradient_life = life;
      float p = 0;
      Context ctx(c);
      ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
      const float a = g, b = g;
      const float* good[] = {&a, &b};
      int next = 0;
      for (int k = 0; k < 3; ++k) {
        if (k == where) {
          ctx.accumulate({forbidden.data()}, 0);
        } else {
          ctx.accumulate({good[next++]}, 2);
        }
      }
      EXPECT_EQ(window(ctx).state, GA_WINDOW_FULL) << "weight 0 counts toward K";
      const ga_step_result r = step(ctx);
      EXPECT_EQ(r.micro_batches, 3);
      EXPECT_EQ(r.weight, 4);
      EXPECT_EQ(p, -6);
    }
  }
  // By part: nothing is read or written.
  float p = 0;
  Context ctx;
  ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
  ASSERT_OK(ga_micro_begin(ctx, 0, 0, nullptr));
  EXPECT_OK(ga_accumulate_part(ctx, 0, forbidden.data()));
  EXPECT_OK(ga_accumulate_part(ctx, 0, nullptr));
  ga_accumulator a;
  a.struct_size = sizeof a;
  ASSERT_OK(ga_accumulator_acquire(ctx, 0, &a));
  EXPECT_EQ(a.data, nullptr);
  ASSERT_OK(ga_accumulator_release(ctx, 0));
  ASSERT_OK(ga_micro_end(ctx));
  EXPECT_OK(ga_accumulate(ctx, nullptr, 1, 0, nullptr));
  EXPECT_EQ(step(ctx).outcome, GA_STEP_SKIPPED_EMPTY);
  EXPECT_EQ(p, 0);
}

// A gradient in a micro-batch of weight 0 does not count as a gradient.
TEST(Window, WeightZeroIsNoGradient) {
  ga_optimizer o = optimizer(GA_OPTIMIZER_ADAMW);
  o.weight_decay = 0.5;
  float p[2] = {1, 1};
  const float g = 1;
  Context ctx;
  ctx.group(o);
  ctx.param(0, "a", &p[0], 1);
  ctx.param(0, "b", &p[1], 1);
  ctx.accumulate({&g, nullptr}, 1);
  ctx.accumulate({nullptr, &g}, 0);
  step(ctx);
  EXPECT_NE(p[0], 1);
  EXPECT_EQ(p[1], 1);
}

TEST(Window, SumOfWeightsZeroIsSkipped) {
  for (const int32_t missing : {GA_MISSING_SKIP, GA_MISSING_ZERO}) {
    for (const int32_t reduce : {GA_REDUCE_MEAN, GA_REDUCE_SUM}) {
      ga_config c = config();
      c.missing = missing;
      c.reduce = reduce;
      float p = 1;
      const float g = NAN;
      Context ctx(c);
      ctx.param(ctx.group(optimizer(GA_OPTIMIZER_ADAMW)), "p", &p, 1);
      for (int k = 0; k < 3; ++k) ctx.accumulate({&g}, 0);
      const ga_step_result r = step(ctx);
      EXPECT_EQ(r.outcome, GA_STEP_SKIPPED_EMPTY);
      EXPECT_EQ(r.micro_batches, 3);
      EXPECT_EQ(r.norm, 0);
      EXPECT_EQ(r.lr, 0);
      EXPECT_EQ(r.windows, 1);
      EXPECT_EQ(r.steps, 0);
      EXPECT_EQ(p, 1);
    }
  }
}

TEST(Window, NoGroupsAndNoParameters) {
  Context ctx;
  EXPECT_EQ(step(ctx).outcome, GA_STEP_SKIPPED_EMPTY);
  EXPECT_OK(ga_accumulate(ctx, nullptr, 0, 1, nullptr));
  EXPECT_EQ(window(ctx).micro_batches, 1);
  const ga_step_result r = step(ctx);
  EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
  EXPECT_EQ(r.norm, 0);
  float empty = 0;
  ctx.param(ctx.group(optimizer(GA_OPTIMIZER_ADAMW)), "no elements", nullptr, 0);
  ctx.param(0, "some address, no elements", &empty, 0);
  ctx.accumulate({nullptr, &empty});
  EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
}

// ---- Skipped, failed and discarded windows leave no trace ---------------------------------------

// Runs good windows with bad ones in between and compares parameters with a run without bad
// windows. Equal bits in later windows prove that state, counters and schedules did not change
// either.
class NoTrace : public testing::TestWithParam<size_t> {};
INSTANTIATE_TEST_SUITE_P(All, NoTrace, testing::Range<size_t>(0, good_optimizers().size()),
                         [](const testing::TestParamInfo<size_t>& info) {
                           return good_optimizers()[info.param].name;
                         });

TEST_P(NoTrace, OfWindowsThatWereNotApplied) {
  const ga_optimizer o = good_optimizers()[GetParam()].optimizer;
  const Layout layout({17, 70001});
  ga_schedule s = schedule(GA_SCHEDULE_COSINE);
  s.total_steps = 9;
  const ga_clip norm = clip(GA_CLIP_GLOBAL, 5);
  const auto run = [&](const ga_config& c, bool disturbed) {
    Block block = parameters(layout, 1);
    Context ctx(c);
    ctx.group(o);
    EXPECT_OK(ga_group_set_schedule(ctx, 0, &s));
    EXPECT_OK(ga_context_set_clip(ctx, &norm));
    for (size_t i = 0; i < layout.size(); ++i) {
      ctx.param(0, std::to_string(i), block.data() + layout.offsets[i], layout.counts[i]);
    }
    for (uint64_t t = 0; t < 6; ++t) {
      const Block a = gradients(layout, 2, 2 * t), b = gradients(layout, 2, 2 * t + 1);
      if (disturbed) {
        const Block before = block;
        Block bad = b;
        bad[static_cast<size_t>(layout.offsets[t % 2]) + t] = t % 3 ? NAN : INFINITY;
        step(ctx);                                 // empty
        ctx.accumulate(pointers(layout, a));       // discarded
        EXPECT_OK(ga_discard(ctx));                //
        ctx.accumulate(pointers(layout, bad), 0);  // of weight 0
        step(ctx);                                 //
        ctx.accumulate(pointers(layout, a));       // not finite
        ctx.accumulate(pointers(layout, bad));     //
        if (c.nonfinite == GA_NONFINITE_FAIL) {
          for (int again = 0; again < 2; ++again) {
            EXPECT_EQ(ga_step(ctx, nullptr), GA_ERROR_NONFINITE);
            EXPECT_EQ(window(ctx).micro_batches, 2) << "the window is kept";
          }
          EXPECT_OK(ga_discard(ctx));
        } else {
          const ga_step_result r = step(ctx);
          EXPECT_EQ(r.outcome, GA_STEP_SKIPPED_NONFINITE);
          EXPECT_FALSE(std::isfinite(r.norm));
          EXPECT_EQ(r.lr, 0);
        }
        EXPECT_OK(ga_micro_begin(ctx, 0, 1, nullptr));  // discarded while open and acquired
        EXPECT_OK(ga_accumulate_part(ctx, 1, bad.data() + layout.offsets[1]));
        ga_accumulator handed;
        handed.struct_size = sizeof handed;
        EXPECT_OK(ga_accumulator_acquire(ctx, 0, &handed));
        to_library(handed.data, Block{NAN});
        EXPECT_OK(ga_discard(ctx));
        EXPECT_TRUE(same_bits(before, block));
        EXPECT_EQ(window(ctx).state, GA_WINDOW_EMPTY);
      }
      ctx.accumulate(pointers(layout, a), 3);
      ctx.accumulate(pointers(layout, b), 1);
      const ga_step_result r = step(ctx);
      EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
      EXPECT_EQ(r.steps, static_cast<int64_t>(t + 1));
    }
    return block;
  };
  ga_config c = config();
  const Block undisturbed = run(c, false);
  for (const int32_t policy : {GA_NONFINITE_SKIP_STEP, GA_NONFINITE_FAIL}) {
    for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
      c.nonfinite = policy;
      c.gradient_life = life;
      EXPECT_TRUE(same_bits(undisturbed, run(c, true))) << policy << ", " << life;
    }
  }
}

TEST(Window, ResultIsNotWrittenWhereStepFails) {
  ga_config c = config();
  c.nonfinite = GA_NONFINITE_FAIL;
  float p = 0;
  const float nan = NAN;
  Context ctx(c);
  ctx.param(ctx.group(plain_sgd()), "weights", &p, 1);
  ctx.accumulate({&nan});
  ga_step_result r, before;
  memset(&r, 0x5a, sizeof r);
  r.struct_size = sizeof r;
  before = r;
  EXPECT_EQ(ga_step(ctx, &r), GA_ERROR_NONFINITE);
  EXPECT_EQ(0, memcmp(&r, &before, sizeof r));
  EXPECT_NE(std::string(ga_last_error()).find("weights"), std::string::npos) << ga_last_error();
  EXPECT_EQ(window(ctx).windows, 0) << "ga_step did not return GA_OK";
  EXPECT_OK(ga_discard(ctx));
}

// Clipping by value must not turn a NaN or an infinity into a number.
TEST(Window, NonfiniteIsSeenUnderEveryClip) {
  for (const ga_clip& mode : {clip(GA_CLIP_NONE, 0, GA_FLAVOR_TORCH, 1), clip(GA_CLIP_GLOBAL, 1),
                              clip(GA_CLIP_GLOBAL, 1, GA_FLAVOR_KERAS, 1),
                              clip(GA_CLIP_PER_TENSOR, 1, GA_FLAVOR_TORCH, 1)}) {
    for (const float bad : {NAN, INFINITY}) {
      for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
        ga_config c = config();
        c.gradient_life = life;
        float p = 3;
        Context ctx(c);
        ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
        EXPECT_OK(ga_context_set_clip(ctx, &mode));
        ctx.accumulate({&bad});
        EXPECT_EQ(step(ctx).outcome, GA_STEP_SKIPPED_NONFINITE);
        EXPECT_EQ(p, 3);
      }
    }
  }
}

// ---- Micro-batches by part ----------------------------------------------------------------------

// Filling all micro-batches layer by layer, as exact batch normalisation does, gives what whole
// micro-batches give.
TEST(Micro, ResumedInAnyOrder) {
  const Layout layout({5, 70000, 33});
  for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
    ga_config c = config();
    c.accum_steps = 3;
    c.gradient_life = life;
    Block whole = parameters(layout, 1), turns = whole;
    Context a(c), b(c);
    a.group(optimizer(GA_OPTIMIZER_ADAMW));
    b.group(optimizer(GA_OPTIMIZER_ADAMW));
    for (size_t i = 0; i < layout.size(); ++i) {
      a.param(0, std::to_string(i), whole.data() + layout.offsets[i], layout.counts[i]);
      b.param(0, std::to_string(i), turns.data() + layout.offsets[i], layout.counts[i]);
    }
    const double scale = 4, weights[] = {2, 0.5, 7};
    for (uint64_t t = 0; t < 3; ++t) {
      std::vector<Block> g;
      for (uint64_t k = 0; k < 3; ++k) g.push_back(gradients(layout, 2, 3 * t + k));
      for (size_t k = 0; k < 3; ++k) {
        const auto list = pointers(layout, g[k]);
        ASSERT_OK(ga_accumulate(a, list.data(), list.size(), weights[k], MicroOptions(scale)));
      }
      for (size_t k = 0; k < 3; ++k) {  // all three are opened once, in order
        ASSERT_OK(ga_micro_begin(b, static_cast<int64_t>(k), weights[k], MicroOptions(scale)));
        EXPECT_EQ(window(b).open_micro, static_cast<int64_t>(k));
        EXPECT_EQ(window(b).micro_batches, static_cast<int64_t>(k + 1));
        ASSERT_OK(ga_micro_end(b));
        EXPECT_EQ(window(b).open_micro, -1);
      }
      EXPECT_EQ(window(b).state, GA_WINDOW_FULL);
      for (size_t i = layout.size(); i-- > 0;) {  // then filled layer by layer, in a full window
        for (size_t k = 0; k < 3; ++k) {
          ASSERT_OK(ga_micro_begin(b, static_cast<int64_t>(k), weights[k], MicroOptions(scale)));
          ASSERT_OK(
              ga_accumulate_part(b, static_cast<ga_param>(i), g[k].data() + layout.offsets[i]));
          ASSERT_OK(ga_micro_end(b));
        }
      }
      EXPECT_EQ(window(b).weight, 9.5) << "weights count once";
      step(a);
      EXPECT_EQ(step(b).micro_batches, 3);
    }
    EXPECT_TRUE(same_bits(whole, turns));
  }
}

TEST(Micro, ResumingAsAnotherIsRefused) {
  float p = 0;
  const float g = 1, other = 3;
  Context ctx;
  ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
  const double two = 2, four = 4;
  ASSERT_OK(ga_micro_begin(ctx, 0, 1.5, MicroOptions(two)));
  ASSERT_OK(ga_accumulate_part(ctx, 0, &g));
  ASSERT_OK(ga_micro_end(ctx));
  EXPECT_EQ(ga_micro_begin(ctx, 0, 2.5, MicroOptions(two)), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(std::string(ga_last_error()).find("2.5"), std::string::npos) << ga_last_error();
  EXPECT_EQ(ga_micro_begin(ctx, 0, 1.5, MicroOptions(four)), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(ga_micro_begin(ctx, 0, 1.5, nullptr), GA_ERROR_INVALID_ARGUMENT) << "NULL is scale 1";
  EXPECT_EQ(ga_micro_begin(ctx, 0, 0, MicroOptions(two)), GA_ERROR_INVALID_ARGUMENT);
  for (const int64_t index : {int64_t{2}, int64_t{-2}, INT64_MAX, INT64_MIN}) {
    EXPECT_EQ(ga_micro_begin(ctx, index, 1.5, MicroOptions(two)), GA_ERROR_INVALID_ARGUMENT)
        << index;
  }
  EXPECT_EQ(window(ctx).open_micro, -1);
  ASSERT_OK(ga_micro_begin(ctx, 0, 1.5, MicroOptions(two)));
  ASSERT_OK(ga_accumulate_part(ctx, 0, &other));
  ASSERT_OK(ga_micro_end(ctx));
  EXPECT_EQ(step(ctx).weight, 1.5);
  EXPECT_EQ(p, -2);
}

TEST(Micro, WholeAndByPartMix) {
  float p = 0;
  const float g[] = {1, 2, 3};
  Context ctx;
  ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
  ctx.accumulate({&g[0]});
  ASSERT_OK(ga_micro_begin(ctx, 1, 1, nullptr));
  ASSERT_OK(ga_accumulate_part(ctx, 0, &g[1]));
  ASSERT_OK(ga_micro_end(ctx));
  ctx.accumulate({&g[2]});
  EXPECT_EQ(step(ctx).micro_batches, 3);
  EXPECT_EQ(p, -2);
}

// A micro-batch without gradients is legal and counts with its weight.
TEST(Micro, WithoutAnyGradient) {
  float p = 0;
  const float g = 4;
  Context ctx;
  ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
  ASSERT_OK(ga_micro_begin(ctx, 0, 3, nullptr));
  ASSERT_OK(ga_micro_end(ctx));
  ctx.accumulate({&g}, 1);
  EXPECT_EQ(step(ctx).weight, 4);
  EXPECT_EQ(p, -1);
  ctx.accumulate({nullptr}, 1);
  EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  EXPECT_EQ(p, -1);
}

TEST(Micro, AcquireDescribesTheAccumulator) {
  Block p(24, 0);
  float scalar = 0;
  const int64_t shape[] = {2, 3, 4};
  ga_config c = config();
  c.loss_scale = 8;
  for (const int32_t kind : {GA_GRADIENT_MEAN, GA_GRADIENT_SUM}) {
    c.gradient_kind = kind;
    Context ctx(c);
    ctx.group(plain_sgd());
    ASSERT_OK(ga_param_add(ctx, 0, "cube", p.data(), GA_F32, 3, shape, nullptr, nullptr));
    ASSERT_OK(ga_param_add(ctx, 0, "scalar", &scalar, GA_F32, 0, nullptr, nullptr, nullptr));
    for (int window = 0; window < 2; ++window) {
      for (int k = 0; k < 2; ++k) {
        ASSERT_OK(ga_micro_begin(ctx, k, 5, nullptr));
        auto a = to_fill<ga_accumulator>();
        ASSERT_OK(ga_accumulator_acquire(ctx, 0, &a));
        EXPECT_EQ(a.struct_size, sizeof a);
        EXPECT_NE(a.data, nullptr);
        EXPECT_EQ(a.dtype, GA_F32);
        EXPECT_EQ(a.rows, 2);
        EXPECT_EQ(a.columns, 12);
        EXPECT_GE(a.leading_dimension, 12);
        EXPECT_FLOAT_EQ(static_cast<float>(a.alpha), kind == GA_GRADIENT_MEAN ? 0.625f : 0.125f);
        EXPECT_EQ(a.beta, k == 0 ? 0 : 1) << "the first contribution of a window overwrites";
        Block all = from_library(a.data, (a.rows - 1) * a.leading_dimension + a.columns);
        for (int64_t r = 0; r < a.rows; ++r) {
          for (int64_t col = 0; col < a.columns; ++col) {
            float& x = all[static_cast<size_t>(r * a.leading_dimension + col)];
            x = static_cast<float>(a.alpha) + (k == 0 ? 0 : x);
          }
        }
        to_library(a.data, all);
        EXPECT_EQ(ga_micro_end(ctx), GA_ERROR_INVALID_STATE);
        ASSERT_OK(ga_accumulator_release(ctx, 0));
        EXPECT_EQ(ga_accumulator_release(ctx, 0), GA_ERROR_INVALID_STATE) << "twice";
        ASSERT_OK(ga_accumulator_acquire(ctx, 1, &a));
        EXPECT_EQ(a.rows * a.columns, 1);
        to_library(a.data, Block{0});
        ASSERT_OK(ga_accumulator_release(ctx, 1));
        ASSERT_OK(ga_micro_end(ctx));
      }
      p.assign(24, 0);
      step(ctx);
      EXPECT_FLOAT_EQ(p[23], kind == GA_GRADIENT_MEAN ? -0.125f : -0.025f);
    }
  }
}

// ---- Missing, frozen, moved and new parameters --------------------------------------------------

// Before its first contribution a micro-batch can be dropped, and the window is as it was.
TEST(MicroAbort, LeavesNoTrace) {
  enum { kNothing, kAdopted, kDeferred, kClipped, kWays };
  for (int way = 0; way < kWays; ++way) {
    SCOPED_TRACE(way);
    ga_config c = config();
    c.accum_steps = 3;
    if (way == kAdopted) c.gradient_life = GA_GRADIENTS_LIVE;
    if (way == kDeferred) c.nonfinite = GA_NONFINITE_DROP_MICRO;
    const ga_clip each = [] {
      ga_clip x = clip(GA_CLIP_GLOBAL, 1);
      x.when = GA_CLIP_WHEN_MICRO;
      return x;
    }();
    float p[2] = {1, 1}, q[2] = {1, 1};
    const float g[3][2] = {{0.5f, 0.25f}, {1, 2}, {-3, 0.5f}};
    float aborted[2] = {NAN, NAN};
    Context ctx(c), twin(c);
    for (const auto& [x, data] : {std::make_pair(&ctx, p), std::make_pair(&twin, q)}) {
      x->group(optimizer(GA_OPTIMIZER_ADAM));
      for (int i = 0; i < 2; ++i) x->param(0, std::to_string(i), &data[i], ref::Shape{});
      if (way == kClipped) {
        ASSERT_OK(ga_context_set_clip(*x, &each));
      }
    }
    const auto abort = [&](bool first) {
      ASSERT_OK(ga_micro_begin(ctx, -1, 7, nullptr));
      if (way != kNothing) {
        ASSERT_OK(ga_accumulate_part(ctx, 1, &aborted[1]));
        if (first) {
          ASSERT_OK(ga_accumulate_part(ctx, 0, &aborted[0]));
        }
      }
      const int64_t before = window(ctx).micro_batches;
      ASSERT_OK(ga_micro_abort(ctx));
      EXPECT_EQ(window(ctx).micro_batches, before - 1);
      EXPECT_EQ(window(ctx).open_micro, -1);
    };
    for (int t = 0; t < 2; ++t) {
      abort(true);
      EXPECT_EQ(window(ctx).state, GA_WINDOW_EMPTY);
      EXPECT_EQ(window(ctx).weight, 0);
      ctx.accumulate({&g[0][0], nullptr}, 3);
      abort(false);
      EXPECT_EQ(window(ctx).weight, 3);
      aborted[0] = aborted[1] = 1e30f;
      ctx.accumulate({&g[1][0], &g[1][1]}, 2);
      ctx.accumulate({&g[2][0], &g[2][1]}, 2);
      EXPECT_EQ(window(ctx).state, GA_WINDOW_FULL) << "three micro-batches count";
      twin.accumulate({&g[0][0], nullptr}, 3);
      twin.accumulate({&g[1][0], &g[1][1]}, 2);
      twin.accumulate({&g[2][0], &g[2][1]}, 2);
      const ga_step_result a = step(ctx), b = step(twin);
      EXPECT_EQ(0, memcmp(&a, &b, sizeof a));
    }
    EXPECT_EQ(0, memcmp(p, q, sizeof p));
  }
}

// Something that was added stays, and the micro-batch stays open.
TEST(MicroAbort, IsRefusedWhereSomethingWasAdded) {
  float p[2] = {};
  const float g[2] = {1, 1};
  ga_accumulator acquired;
  ASSERT_OK(ga_accumulator_init(&acquired, sizeof acquired));
  Context ctx;
  ctx.group(plain_sgd());
  ga_param_options rows = options();
  rows.rows = GA_ROWS_DENSE;
  ctx.param(0, "p", p, ref::Shape{2}, &rows);
  const int32_t row = 1;
  const std::function<void()> ways[] = {
      [&] { ASSERT_OK(ga_accumulate_part(ctx, 0, g)); },
      [&] { ASSERT_OK(ga_accumulate_rows(ctx, 0, &row, GA_I32, 1, g)); },
      [&] { ASSERT_OK(ga_accumulator_acquire(ctx, 0, &acquired)); },
      [&] {
        ASSERT_OK(ga_micro_end(ctx));
        ASSERT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
      },
  };
  for (const auto& way : ways) {
    ASSERT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
    way();
    EXPECT_TRUE(refused(ga_micro_abort(ctx), GA_ERROR_INVALID_STATE, {"ga_discard", "0"}));
    EXPECT_EQ(window(ctx).open_micro, 0);
    ASSERT_OK(ga_discard(ctx));
    EXPECT_TRUE(refused(ga_micro_abort(ctx), GA_ERROR_INVALID_STATE, {"ga_micro_abort"}));
  }
  ctx.accumulate({g});
  step(ctx);
  EXPECT_EQ(p[0], -1);
}

// A ga_micro_begin that is refused says nothing of the micro-batch that is open.
TEST(MicroAbort, AfterABeginThatWasRefused) {
  float p = 0;
  const float g = 1;
  Context ctx;
  ctx.group(plain_sgd());
  ctx.param(0, "p", &p, ref::Shape{});
  ctx.accumulate({&g});
  ASSERT_OK(ga_micro_begin(ctx, -1, 1, nullptr));
  EXPECT_EQ(ga_micro_begin(ctx, 0, 1, nullptr), GA_ERROR_INVALID_STATE);
  ASSERT_OK(ga_micro_abort(ctx));
  ASSERT_OK(ga_micro_begin(ctx, -1, 1, nullptr));
  ASSERT_OK(ga_accumulate_part(ctx, 0, &g));
  EXPECT_EQ(ga_micro_begin(ctx, -1, 1, nullptr), GA_ERROR_INVALID_STATE);
  EXPECT_TRUE(refused(ga_micro_abort(ctx), GA_ERROR_INVALID_STATE, {"ga_discard"}));
  ASSERT_OK(ga_micro_end(ctx));
  step(ctx);
  EXPECT_EQ(p, -1);
}

// GA_MICRO_LAST goes with the micro-batch that had it.
TEST(MicroAbort, OfTheLastMicroBatch) {
  float p = 0;
  const float g = 1;
  Context ctx;
  ctx.group(plain_sgd());
  ctx.param(0, "p", &p, ref::Shape{});
  ctx.accumulate({&g});
  ASSERT_OK(ga_micro_begin(ctx, -1, 1, MicroOptions(0, GA_MICRO_LAST)));
  EXPECT_EQ(window(ctx).state, GA_WINDOW_FULL);
  ASSERT_OK(ga_micro_abort(ctx));
  EXPECT_EQ(window(ctx).state, GA_WINDOW_OPEN);
}

TEST(Parameters, FrozenAreNeitherReadNorWritten) {
  const Forbidden forbidden;
  for (const int32_t missing : {GA_MISSING_SKIP, GA_MISSING_ZERO}) {
    ga_config c = config();
    c.missing = missing;
    ga_optimizer o = optimizer(GA_OPTIMIZER_ADAMW);
    o.weight_decay = 0.5;
    float p[2] = {1, 1}, twin = 1;
    const float g = 0.5f, nan = NAN;
    Context ctx(c), alone(c);
    ctx.group(o);
    alone.param(alone.group(o), "a", &twin, 1);
    ctx.param(0, "a", &p[0], 1);
    ctx.param(0, "b", &p[1], 1);
    ASSERT_OK(ga_param_set_frozen(ctx, 1, 1));
    for (int t = 0; t < 3; ++t) {
      ctx.accumulate({&g, t == 0 ? &nan : forbidden.data()});
      alone.accumulate({&g});
      EXPECT_EQ(step(ctx).norm, step(alone).norm) << "a frozen parameter is in the norm";
      EXPECT_EQ(p[0], twin);
      EXPECT_EQ(p[1], 1);
    }
    ASSERT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
    EXPECT_OK(ga_accumulate_part(ctx, 1, forbidden.data()));
    ASSERT_OK(ga_micro_end(ctx));
    ASSERT_OK(ga_discard(ctx));
    ASSERT_OK(ga_param_set_frozen(ctx, 1, 0));
    ctx.accumulate({&g, &g});
    step(ctx);
    EXPECT_NE(p[1], 1) << "not unfrozen";
    EXPECT_EQ(ga_param_set_frozen(ctx, 1, 2), GA_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(ga_param_set_frozen(ctx, 1, -1), GA_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(ga_param_set_frozen(ctx, 2, 1), GA_ERROR_INVALID_ARGUMENT);
  }
}

// A frozen parameter keeps its state.
TEST(Parameters, UnfreezingContinuesWithTheState) {
  const ga_optimizer o = optimizer(GA_OPTIMIZER_ADAMW);
  float p = 1, twin = 1;
  const float g = 0.5f;
  Context ctx, never;
  ctx.param(ctx.group(o), "p", &p, 1);
  never.param(never.group(o), "p", &twin, 1);
  for (int t = 0; t < 9; ++t) {
    const bool frozen = t >= 3 && t < 6;
    ASSERT_OK(ga_param_set_frozen(ctx, 0, frozen));
    ctx.accumulate({&g});
    step(ctx);
    if (frozen) continue;
    never.accumulate({&g});
    step(never);
    EXPECT_EQ(p, twin);
  }
}

TEST(Parameters, BoundToAnotherPlace) {
  const Layout layout({70000, 5});
  Block here = parameters(layout, 1), twin = here;
  Block there(here.size(), kCanary);
  Context ctx, fixed;
  ctx.group(optimizer(GA_OPTIMIZER_ADAMW));
  fixed.group(optimizer(GA_OPTIMIZER_ADAMW));
  for (size_t i = 0; i < 2; ++i) {
    ctx.param(0, std::to_string(i), here.data() + layout.offsets[i], layout.counts[i]);
    fixed.param(0, std::to_string(i), twin.data() + layout.offsets[i], layout.counts[i]);
  }
  for (uint64_t t = 0; t < 6; ++t) {
    if (t % 2 == 1) {
      there = here;
      std::fill(here.begin(), here.end(), NAN);
      for (size_t i = 0; i < 2; ++i) {
        ASSERT_OK(ga_param_bind(ctx, static_cast<ga_param>(i), there.data() + layout.offsets[i]));
      }
      here.swap(there);  // swaps the memory, so that the names stay correct
    }
    const Block g = gradients(layout, 2, t);
    ctx.accumulate(pointers(layout, g));
    fixed.accumulate(pointers(layout, g));
    step(ctx);
    step(fixed);
    ASSERT_TRUE(same_bits(here, twin)) << t;
  }
  // Binding to the same or to overlapping memory is legal; binding onto another parameter is not.
  EXPECT_OK(ga_param_bind(ctx, 0, here.data() + layout.offsets[0]));
  EXPECT_OK(ga_param_bind(ctx, 0, here.data() + layout.offsets[0] - 1));
  EXPECT_EQ(ga_param_bind(ctx, 0, here.data() + layout.offsets[1] - 1), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(ga_param_bind(ctx, 0, nullptr), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(ga_param_bind(ctx, 2, here.data()), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(ga_param_bind(ctx, 1, reinterpret_cast<char*>(here.data()) + 1),
            GA_ERROR_INVALID_ARGUMENT);
  // The old memory is free again, for a gradient and for another parameter.
  const Block g = gradients(layout, 2, 9);
  there = g;
  ctx.accumulate(pointers(layout, there));
  EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
}

TEST(Parameters, AddedBetweenWindows) {
  const Layout layout({70000, 9});
  Block block = parameters(layout, 1), twin = block;
  ga_optimizer o = optimizer(GA_OPTIMIZER_ADAMW);
  Context ctx, early;
  ctx.group(o);
  early.group(o);
  ctx.param(0, "0", block.data() + layout.offsets[0], layout.counts[0]);
  for (size_t i = 0; i < 2; ++i) {
    early.param(0, std::to_string(i), twin.data() + layout.offsets[i], layout.counts[i]);
  }
  for (uint64_t t = 0; t < 8; ++t) {
    if (t == 4) {
      EXPECT_EQ(ctx.param(0, "1", block.data() + layout.offsets[1], layout.counts[1]), 1);
    }
    const Block g = gradients(layout, 2, t);
    auto list = pointers(layout, g);
    if (t < 4) {
      ctx.accumulate({list[0]});
      list[1] = nullptr;
    } else {
      ctx.accumulate(list);
    }
    early.accumulate(list);
    step(ctx);
    step(early);
  }
  EXPECT_TRUE(same_bits(block, twin));
}

TEST(Parameters, FlatBlockBesideOthers) {
  Block flat(20, kCanary);
  for (int i : {2, 3, 4, 8, 15}) flat[static_cast<size_t>(i)] = 0;
  float alone = 0, last = 0;
  const int64_t three = 3, none = 0;
  Context ctx;
  ctx.group(plain_sgd(1));
  ctx.group(plain_sgd(2));
  EXPECT_EQ(ctx.param(0, "alone", &alone, 1), 0);
  const ga_flat_entry entries[] = {
      flat_entry("scalar", 1, 0, nullptr, 15),  // in any order, with gaps
      flat_entry("three", 0, 1, &three, 2), flat_entry("nothing", 0, 1, &none, 19),
      flat_entry("one", 1, 0, nullptr, 8)};
  ga_param first = -1;
  ASSERT_OK(ga_params_add_flat(ctx, flat.data(), GA_F32, entries, 4, nullptr, &first));
  EXPECT_EQ(first, 1);
  EXPECT_EQ(ctx.param(0, "last", &last, 1), 5);
  Block g(20, NAN);  // gaps are not read
  for (int i : {2, 3, 4, 8, 15}) g[static_cast<size_t>(i)] = static_cast<float>(i);
  const float one = 1;
  ctx.accumulate({&one, g.data(), &one});
  EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  for (int i = 0; i < 20; ++i) {
    const bool inside = i == 2 || i == 3 || i == 4 || i == 8 || i == 15;
    const float want = !inside ? kCanary : static_cast<float>(-i * (i >= 8 ? 2 : 1));
    EXPECT_EQ(flat[static_cast<size_t>(i)], want) << i;
  }
  EXPECT_EQ(alone, -1);
  EXPECT_EQ(last, -1);
  ctx.accumulate({&one, nullptr, &one});  // a whole block may be missing
  step(ctx);
  EXPECT_EQ(flat[15], -30);
  ASSERT_OK(ga_micro_begin(ctx, 0, 1, nullptr));  // a block's parameters may come by part
  ASSERT_OK(ga_accumulate_part(ctx, 1, &one));
  ASSERT_OK(ga_micro_end(ctx));
  step(ctx);
  EXPECT_EQ(flat[15], -32);
}

TEST(Parameters, GradientsMayOverlapEachOther) {
  float p[3] = {0, 0, 0};
  const float g[3] = {1, 2, 3};
  Context ctx;
  ctx.group(plain_sgd());
  ctx.param(0, "a", &p[0], 2);
  ctx.param(0, "b", &p[2], 1);
  ctx.accumulate({&g[0], &g[1]});
  ctx.accumulate({&g[1], &g[1]});
  step(ctx);
  EXPECT_EQ(p[0], -1.5);
  EXPECT_EQ(p[1], -2.5);
  EXPECT_EQ(p[2], -2);
}

// ---- Faults in mid-work -------------------------------------------------------------------------

class Fault : public testing::TestWithParam<int> {
 protected:
  void make(int32_t life) {
    ga_config c = config();
    c.num_threads = 4;
    c.gradient_life = life;
    c.parallel_for = Unreliable::run;
    c.parallel_for_user = &threads_;
    ctx_ = std::make_unique<Context>(c);
    ctx_->param(ctx_->group(optimizer(GA_OPTIMIZER_ADAMW)), "p", p_.data(), kLarge);
  }
  Unreliable::Fault fault() const { return static_cast<Unreliable::Fault>(GetParam()); }

  Unreliable threads_;
  Block p_ = Block(kLarge, 1), g_ = Block(kLarge, 0.5f), h_ = Block(kLarge, 0.25f);
  std::unique_ptr<Context> ctx_;
};
INSTANTIATE_TEST_SUITE_P(Kind, Fault, testing::Range(1, 6));

TEST_P(Fault, WhileAccumulatingIsOverAfterDiscard) {
  Block twin(kLarge, 1);
  Context calm;
  calm.param(calm.group(optimizer(GA_OPTIMIZER_ADAMW)), "p", twin.data(), kLarge);
  make(GA_GRADIENTS_CONSUMED);
  for (int t = 0; t < 3; ++t) {
    ctx_->accumulate({g_.data()});
    EXPECT_GT(threads_.calls, 0) << "the program's parallel_for was not called";
    const Block before = p_;
    threads_.fault = fault();
    const void* list[] = {h_.data()};
    EXPECT_EQ(ga_accumulate(*ctx_, list, 1, 1, nullptr), GA_ERROR_FAULT);
    EXPECT_STRNE(ga_last_error(), "");
    threads_.fault = Unreliable::kNone;
    EXPECT_EQ(window(*ctx_).state, GA_WINDOW_INVALID);
    EXPECT_EQ(ga_accumulate(*ctx_, list, 1, 1, nullptr), GA_ERROR_INVALID_STATE);
    EXPECT_EQ(ga_step(*ctx_, nullptr), GA_ERROR_INVALID_STATE);
    EXPECT_TRUE(same_bits(before, p_));
    EXPECT_OK(ga_discard(*ctx_));
    EXPECT_EQ(window(*ctx_).state, GA_WINDOW_EMPTY);
    ctx_->accumulate({g_.data()});
    ctx_->accumulate({h_.data()});
    step(*ctx_);
    calm.accumulate({g_.data()});
    calm.accumulate({h_.data()});
    step(calm);
    EXPECT_TRUE(same_bits(p_, twin));
  }
}

TEST_P(Fault, WhileSteppingIsSticky) {
  for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
    make(life);
    ctx_->accumulate({g_.data()});
    threads_.fault = fault();
    EXPECT_EQ(ga_step(*ctx_, nullptr), GA_ERROR_FAULT);
    threads_.fault = Unreliable::kNone;
    const void* list[] = {g_.data()};
    ga_window_info info;
    info.struct_size = sizeof info;
    EXPECT_EQ(ga_step(*ctx_, nullptr), GA_ERROR_FAULT);
    EXPECT_EQ(ga_discard(*ctx_), GA_ERROR_FAULT);
    EXPECT_EQ(ga_accumulate(*ctx_, list, 1, 1, nullptr), GA_ERROR_FAULT);
    EXPECT_EQ(ga_group_set_lr(*ctx_, 0, 1), GA_ERROR_FAULT);
    EXPECT_EQ(ga_window(*ctx_, &info), GA_ERROR_FAULT);
    EXPECT_EQ(ga_synchronize(*ctx_), GA_ERROR_FAULT);
    EXPECT_STRNE(ga_last_error(), "");
  }
}

// A parallel_for that calls the library on the same context gets an error, and nothing breaks.
TEST(FaultCallback, MayNotCallBack) {
  struct Callback {
    ga_context* ctx = nullptr;
    ga_status seen = GA_OK;
    static void run(void* user, int64_t count, ga_task task, void* data) {
      auto& self = *static_cast<Callback*>(user);
      ga_window_info info;
      info.struct_size = sizeof info;
      self.seen = ga_window(self.ctx, &info);
      for (int64_t i = 0; i < count; ++i) task(data, i);
    }
  } callback;
  ga_config c = config();
  c.num_threads = 2;
  c.parallel_for = Callback::run;
  c.parallel_for_user = &callback;
  Block p(kLarge, 0), g(kLarge, 1);
  Context ctx(c);
  callback.ctx = ctx;
  ctx.param(ctx.group(plain_sgd()), "p", p.data(), kLarge);
  ctx.accumulate({g.data()});
  EXPECT_EQ(callback.seen, GA_ERROR_INVALID_STATE);
  step(ctx);
  EXPECT_EQ(p[kLarge - 1], -1);
}

// ---- Numbers at the ends of their ranges --------------------------------------------------------

// For any weights and loss scales, parameters are right or unchanged, never NaN.
TEST(Window, ExtremeWeightsAndScales) {
  const double extremes[] = {5e-324, 1e-300, 1e-50, 1e-40, 1e-20, 1e20, 1e40, 1e200, 1e308};
  for (const int32_t kind : {GA_GRADIENT_MEAN, GA_GRADIENT_SUM}) {
    for (const double weight : extremes) {
      for (const double scale : {1.0, 1e-30, 1e30, -1.0}) {
        for (const int n : {1, 3}) {
          ga_config c = config();
          c.gradient_kind = kind;
          float p = 0;
          const float g = 0.75f;
          Context ctx(c);
          ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
          const void* list[] = {&g};
          ga_status status = GA_OK;
          for (int k = 0; k < n && status == GA_OK; ++k) {
            status = ga_accumulate(ctx, list, 1, weight, MicroOptions(scale));
          }
          SCOPED_TRACE(testing::Message() << "kind " << kind << ", weight " << weight << ", scale "
                                          << scale << ", " << n << " micro-batches");
          if (status != GA_OK) {
            EXPECT_EQ(status, GA_ERROR_INVALID_ARGUMENT);
            EXPECT_EQ(p, 0);
            continue;
          }
          const ga_step_result r = step(ctx);
          ASSERT_FALSE(std::isnan(p));
          if (r.outcome != GA_STEP_APPLIED) {
            EXPECT_EQ(p, 0);
            continue;
          }
          const double want = -0.75 / scale / (kind == GA_GRADIENT_SUM ? weight : 1);
          // Beyond these limits, float32 has too few digits for a factor or for the result.
          const double factor = std::abs((kind == GA_GRADIENT_MEAN ? weight : 1) / scale);
          const auto fits = [](double x) { return x > 1e-35 && x < 1e35; };
          if (fits(factor) && fits(weight) && fits(std::abs(want))) {
            EXPECT_NEAR(p, want, 16 * ref::kHalfUlp * std::abs(want));
          }
        }
      }
    }
  }
}

// A sum of weights that the type of the computation cannot divide by skips the step with an outcome
// of its own, under every policy. It does not depend on the gradients, so the loss scale stays.
TEST(Window, WeightsThatCannotBeDividedBy) {
  const struct {
    std::vector<double> weights;
    bool f32, f64;  // whether a step can be applied
  } cases[] = {{{1e308, 1e308}, false, false},    {{1e-200}, false, false},
               {{0x1p-126}, true, true},          {{0x1.fffffffffffffp-127}, false, true},
               {{0x1p127}, true, true},           {{0x1p126, 0x1p126}, true, true},
               {{0x1p127, 0x1p100}, false, true}, {{0x1p-400}, false, true},
               {{0x1p-401}, false, false},        {{5e-324, 5e-324}, false, false},
               {{0x1p400}, false, true},          {{0x1p400, 0x1p390}, false, false},
               {{0, 1e-40, 0}, false, true}};
  for (const auto& test : cases) {
    for (const int32_t policy : {GA_NONFINITE_SKIP_STEP, GA_NONFINITE_FAIL, GA_NONFINITE_DROP_MICRO,
                                 GA_NONFINITE_IGNORE}) {
      for (const int32_t dtype : {GA_F32, GA_F64}) {
        SCOPED_TRACE(testing::Message()
                     << test.weights[0] << ", policy " << policy << ", dtype " << dtype);
        ga_config c = config();
        c.nonfinite = policy;
        c.gradient_kind = GA_GRADIENT_SUM;  // so that gradients are not multiplied by weights
        Context ctx(c);
        const ga_group group = ctx.group(plain_sgd());
        Tensor p(dtype, 3, 1.0), g(dtype, 3), untouched(GA_F32, 2, 1.0);
        add(ctx, group, p);
        add(ctx, group, untouched);  // f32, but without a gradient
        ga_loss_scaler scaler;
        EXPECT_OK(ga_loss_scaler_init(&scaler, sizeof scaler));
        scaler.initial_scale = 1;
        scaler.growth_interval = 1;
        EXPECT_OK(ga_context_set_loss_scaler(ctx, &scaler));
        for (const double w : test.weights) accumulate(ctx, {&g, nullptr}, w);
        const ga_step_result r = step(ctx);
        const bool applied = dtype == GA_F64 ? test.f64 : test.f32;
        EXPECT_EQ(r.outcome, applied ? GA_STEP_APPLIED : GA_STEP_SKIPPED_WEIGHT);
        EXPECT_EQ(r.norm, 0);
        EXPECT_EQ(r.steps, applied ? 1 : 0);
        EXPECT_EQ(r.windows, 1);
        EXPECT_EQ(r.skipped, applied ? 0 : 1);
        EXPECT_EQ(p.get(0), 1);
        double scale = 0;
        EXPECT_OK(ga_loss_scale(ctx, &scale, nullptr));
        EXPECT_EQ(scale, applied ? 2 : 1);
        EXPECT_EQ(window(ctx).state, GA_WINDOW_EMPTY);
      }
    }
  }
}

// With GA_REDUCE_SUM any sum of weights is legal, and non-finite gradients are still found.
TEST(Window, WeightsThatNothingIsDividedBy) {
  ga_config c = config();
  c.reduce = GA_REDUCE_SUM;
  c.gradient_kind = GA_GRADIENT_SUM;
  c.noise_scale = 1;
  Context ctx(c);
  Tensor p(GA_F32, 3), g(GA_F32, 3, 1.0), bad(GA_F32, 3, INFINITY);
  add(ctx, ctx.group(plain_sgd()), p);
  for (const double w : {1e308, 1e-300, 1e-200}) {
    for (int k = 0; k < 2; ++k) accumulate(ctx, {&g}, w);
    const ga_step_result r = step(ctx);
    EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
    EXPECT_TRUE(std::isnan(r.noise_scale)) << "such weights bring no estimate";
  }
  EXPECT_EQ(p.get(0), -6);
  accumulate(ctx, {&bad}, 1e308);
  EXPECT_EQ(step(ctx).outcome, GA_STEP_SKIPPED_NONFINITE);
  for (int k = 0; k < 2; ++k) accumulate(ctx, {&g}, k + 1);
  EXPECT_TRUE(std::isfinite(step(ctx).noise_trace));
}

// ---- Live gradients -----------------------------------------------------------------------------

// A second contribution must not overlap a live first one anywhere; a refused contribution changes
// nothing.
TEST(Live, SecondContributionsMayNotOverlap) {
  constexpr int64_t kCount = 12;
  ga_config c = config();
  c.gradient_life = GA_GRADIENTS_LIVE;
  for (const int64_t shift : {-12, -11, -1, 0, 1, 11, 12}) {
    SCOPED_TRACE(shift);
    const bool apart = std::abs(shift) >= kCount;
    Context ctx(c);
    Tensor block(GA_F32, 4 * kCount, 1.0), p(GA_F32, kCount), first(GA_F32, 1);
    ga_param_options rows = options();
    rows.rows = GA_ROWS_DENSE;
    const ga_param id = add(ctx, ctx.group(plain_sgd()), p, {3, 4}, rows);
    const void* const one = block.at(kCount);
    const void* const two = block.at(kCount + shift);
    EXPECT_OK(ga_accumulate(ctx, &one, 1, 1, nullptr));
    const ga_status expected = apart ? GA_OK : GA_ERROR_INVALID_ARGUMENT;
    EXPECT_EQ(ga_accumulate(ctx, &two, 1, 1, nullptr), expected);
    if (apart) continue;
    EXPECT_NE(std::string(ga_last_error()).find("still lives"), std::string::npos);
    EXPECT_OK(ga_micro_begin(ctx, 1, 1, nullptr));
    EXPECT_TRUE(refused(ga_accumulate_part(ctx, id, two), expected, {"still lives"}));
    const int64_t row = 1;
    EXPECT_TRUE(refused(ga_accumulate_rows(ctx, id, &row, GA_I64, 1, block.at(kCount + 11)),
                        expected, {"values", "still lives"}));
    EXPECT_TRUE(refused(ga_accumulate_rows(ctx, id, block.at(kCount + 10), GA_I32, 1, block.at(0)),
                        expected, {"indices", "still lives"}));
    if (has_onednn()) {
      EXPECT_TRUE(refused(ga_accumulate_matmul(ctx, id, 1, block.at(kCount + 10), 3, GA_TRANSPOSE,
                                               block.at(0), 4, GA_NO_TRANSPOSE, GA_F32),
                          expected, {"still lives"}));
    }
    EXPECT_OK(ga_accumulate_rows(ctx, id, &row, GA_I64, 1, block.at(3 * kCount)));
    EXPECT_OK(ga_micro_end(ctx));
    EXPECT_EQ(step(ctx).weight, 2);
    EXPECT_EQ(p.get(0), -0.5);
    EXPECT_EQ(p.get(4), -1);
  }
}

// A norm that nothing needs is not measured: it is NaN if it would take an extra pass, unless the
// program asks for it.
TEST(Live, NormsAreComputedWhenNeeded) {
  const auto run = [](const ga_config& c, const ga_optimizer& o, const ga_clip* clip, int count,
                      bool acquire) {
    Context ctx(c);
    Tensor p(GA_F32, 4, 1.0), g(GA_F32, 4, 2.0), h(GA_F32, 4, 2.0);
    const ga_param id = add(ctx, ctx.group(o), p, {2, 2});
    EXPECT_OK(ga_context_set_clip(ctx, clip));
    if (acquire) {
      EXPECT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
      ga_accumulator a;
      a.struct_size = sizeof a;
      EXPECT_OK(ga_accumulator_acquire(ctx, id, &a));
      to_library(a.data, Block(4, 2));
      EXPECT_OK(ga_accumulator_release(ctx, id));
      EXPECT_OK(ga_micro_end(ctx));
    } else {
      accumulate(ctx, {&g});
      if (count == 2) accumulate(ctx, {&h});
    }
    const ga_step_result r = step(ctx);
    EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
    return std::pair(r.norm, p.get(0));
  };
  ga_config ignoring = config();
  ignoring.nonfinite = GA_NONFINITE_IGNORE;
  ignoring.gradient_life = GA_GRADIENTS_LIVE;
  ga_config measuring = ignoring;
  measuring.measure_norm = 1;
  const ga_optimizer sgd = plain_sgd(0.25);
  for (const bool acquire : {false, true}) {
    EXPECT_TRUE(std::isnan(run(ignoring, sgd, nullptr, 1, acquire).first));
    EXPECT_EQ(run(ignoring, sgd, nullptr, 1, acquire).second, 0.5);
    EXPECT_EQ(run(measuring, sgd, nullptr, 1, acquire).first, 4);
    const ga_clip value = clip(GA_CLIP_NONE, 0, GA_FLAVOR_TORCH, 1);
    EXPECT_TRUE(std::isnan(run(ignoring, sgd, &value, 1, acquire).first));
    EXPECT_EQ(run(ignoring, sgd, &value, 1, acquire).second, 0.75);
    for (const int32_t scope : {GA_CLIP_GLOBAL, GA_CLIP_PER_TENSOR}) {
      const ga_clip norm = clip(scope, 1, GA_FLAVOR_KERAS);
      EXPECT_EQ(run(ignoring, sgd, &norm, 1, acquire).first, 4);
      EXPECT_EQ(run(ignoring, sgd, &norm, 1, acquire).second, 1 - 0.25 * 0.5);
    }
    for (const int32_t kind : {GA_OPTIMIZER_LAMB, GA_OPTIMIZER_LARS}) {
      EXPECT_EQ(run(ignoring, optimizer(kind), nullptr, 1, acquire).first, 4);
      EXPECT_EQ(run(ignoring, optimizer(kind), nullptr, 1, acquire).second,
                run(measuring, optimizer(kind), nullptr, 1, acquire).second);
    }
    ga_config checking = ignoring;
    checking.nonfinite = GA_NONFINITE_SKIP_STEP;
    EXPECT_EQ(run(checking, sgd, nullptr, 1, acquire).first, 4) << "the check's pass measures it";
  }
  EXPECT_EQ(run(ignoring, sgd, nullptr, 2, false).first, 4) << "an accumulating pass measures it";
}

// A micro-batch late in a long window costs no more than one at its beginning.
TEST(Window, AccumulatingDoesNotCostTheWindow) {
  if (is_sanitized()) GTEST_SKIP() << "times mean nothing under a sanitizer";
  constexpr int kMicros = 60000, kPart = 500;
  float p = 0;
  const float g = 1;
  Context ctx;
  ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
  const void* list[] = {&g};
  double first = INFINITY, last = INFINITY;
  for (int k = 0; k < kMicros; k += kPart) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kPart; ++i) ga_accumulate(ctx, list, 1, 1 + k % 3, nullptr);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    if (k < kMicros / 10) first = std::min(first, taken.count());
    if (k >= kMicros / 2) last = std::min(last, taken.count());
  }
  EXPECT_LT(last / first, 3) << first << " s, then " << last << " s for " << kPart << " calls";
  const ga_step_result r = step(ctx);
  EXPECT_EQ(r.micro_batches, kMicros);
  EXPECT_EQ(p, -1);
}

// A ga_accumulate that gets the arrays of earlier calls is a short one, and so is the ga_step of a window that has
// brought what the one before did. They have to do what calls with other arrays of the same values do, whatever came
// between them.
struct RepeatsCase {
  const char* name;
  void (*change)(ga_config& c);
};
const RepeatsCase kRepeats[] = {
    {"Consumed", [](ga_config&) {}},
    {"Live", [](ga_config& c) { c.gradient_life = GA_GRADIENTS_LIVE; }},
    {"LiveMissingZero",
     [](ga_config& c) {
       c.gradient_life = GA_GRADIENTS_LIVE;
       c.missing = GA_MISSING_ZERO;
     }},
    {"LiveUnchecked",
     [](ga_config& c) {
       c.gradient_life = GA_GRADIENTS_LIVE;
       c.nonfinite = GA_NONFINITE_IGNORE;
     }},
    {"Lent", [](ga_config& c) { c.gradient_life = GA_GRADIENTS_LENT; }},
    {"LentEager",
     [](ga_config& c) {
       c.gradient_life = GA_GRADIENTS_LENT;
       c.eager = std::getenv("GA_TEST_DEVICE") == nullptr;  // which is for the CPU alone
     }},
    {"RunningMean", [](ga_config& c) { c.accumulation = GA_ACCUMULATE_RUNNING_MEAN; }},
    {"DropMicro", [](ga_config& c) { c.nonfinite = GA_NONFINITE_DROP_MICRO; }},
    {"NoiseScale", [](ga_config& c) { c.noise_scale = 1; }},
};
class Repeats : public testing::TestWithParam<RepeatsCase> {};

TEST_P(Repeats, AreLikeOtherArrays) {
  constexpr int kSets = 28, kFirst = 4;
  const Layout layout({1, 40, 3000});
  ga_config c = config();
  GetParam().change(c);
  struct Run {
    const Layout& layout;
    Context ctx;
    Block p;
    std::vector<Block> g;  // the first ones alike, and the others
    std::vector<ga_param> ids;
    Run(const Layout& with, const ga_config& cfg)
        : layout(with), ctx(cfg), p(parameters(with, 1)), g(kSets, Block()) {
      const ga_group adamw = ctx.group(optimizer(GA_OPTIMIZER_ADAMW));
      for (size_t i = 0; i < with.size(); ++i)
        ids.push_back(ctx.param(adamw, "p" + std::to_string(i), at(p, i), with.counts[i]));
    }
    float* at(Block& block, size_t i) { return block.data() + layout.offsets[i]; }
    // In place, also of those that were lent. overflows: some sums of them are not finite.
    void write_gradients(const Block (&values)[2], float factor, bool overflows) {
      for (size_t k = 0; k < g.size(); ++k) {
        const Block& from = values[k < kFirst ? 0 : 1];
        g[k].resize(from.size());
        std::transform(from.begin(), from.end(), g[k].begin(), [&](float x) { return x * factor; });
        if (overflows && k >= kFirst) at(g[k], 1)[7] = INFINITY;
      }
    }
    ga_status accumulate(int set, int absent, double weight, const ga_micro_options* o) {
      std::vector<const void*> list;
      for (size_t i = 0; i < layout.size(); ++i)
        list.push_back(static_cast<int>(i) == absent ? nullptr
                                                     : at(g[static_cast<size_t>(set)], i));
      return ga_accumulate(ctx, list.data(), list.size(), weight, o);
    }
  };
  const Block values[] = {gradients(layout, 2, 4), gradients(layout, 2, 3)};
  Run same(layout, c), other(layout, c);
  Random random(7);
  int calls = 0, micros = 0, absent = -1, applied = 0, skipped = 0;
  double weight = 1;
  for (int k = 0; k < 4000; ++k) {
    const auto both = [&](auto&& call) {
      const ga_status one = call(same), two = call(other);
      ASSERT_EQ(one, two) << ga_last_error();
    };
    if (micros == 0) {
      const bool overflows = random.below(10) == 0;
      const auto factor = static_cast<float>(1 + random.below(5));
      for (Run* r : {&same, &other}) r->write_gradients(values, factor, overflows);
    }
    const int64_t what = random.below(k % 200 < 100 ? 24 : 19);   // for a while, these calls alone
    const int fresh = kFirst + 1 + calls % (kSets - kFirst - 1);  // not in this window yet
    if (what < 12 && micros < 22) {
      if (random.below(6) == 0) weight = static_cast<double>(random.below(4));
      if (random.below(20) == 0) absent = static_cast<int>(random.below(4)) - 1;
      const MicroOptions scaled(random.below(8) == 0 ? 4 : 0);
      // A first gradient that lives until the window ends cannot be given twice.
      const bool keeps = c.gradient_life != GA_GRADIENTS_CONSUMED, first = keeps && micros == 0;
      float& unread = same.at(same.g[kFirst], 0)[0];
      const float value = unread;
      if (weight == 0) unread = NAN;
      if (same.accumulate(first ? 0 : kFirst, absent, weight, scaled) != GA_OK) {
        ASSERT_TRUE(keeps) << ga_last_error();
        ASSERT_OK(same.accumulate(fresh, absent, weight, scaled));
      }
      if (weight == 0) unread = value;
      ASSERT_OK(other.accumulate(first ? calls % kFirst : fresh, absent, weight, scaled));
      ++calls;
      ++micros;
    } else if (what < 19) {
      const ga_step_result a = step(same.ctx), b = step(other.ctx);
      EXPECT_EQ(memcmp(&a, &b, sizeof a), 0) << k;
      ASSERT_TRUE(same_bits(same.p, other.p)) << k;
      applied += a.outcome == GA_STEP_APPLIED;
      skipped += a.outcome == GA_STEP_SKIPPED_NONFINITE;
      micros = 0;
    } else if (what == 19) {
      const auto id = static_cast<ga_param>(random.below(3));
      const auto frozen = static_cast<int32_t>(random.below(2));
      both([&](Run& r) { return ga_param_set_frozen(r.ctx, id, frozen); });
    } else if (what == 20) {
      const ga_clip limit = clip(GA_CLIP_GLOBAL, random.below(2) == 0 ? 0.1 : 1e6);
      both([&](Run& r) { return ga_context_set_clip(r.ctx, &limit); });
    } else if (what == 21) {
      both([&](Run& r) { return ga_discard(r.ctx); });
      micros = 0;
    } else if (what == 22 && micros < 22) {
      both([&](Run& r) {
        const float* const g = r.at(r.g[static_cast<size_t>(fresh)], 1);
        EXPECT_OK(ga_micro_begin(r.ctx, -1, 2, nullptr));
        EXPECT_OK(ga_accumulate_part(r.ctx, r.ids[1], g));
        return ga_micro_end(r.ctx);
      });
      ++calls;
      ++micros;
    } else {
      window(same.ctx);  // which only asks
    }
  }
  EXPECT_GT(applied, 200);
  const bool skips = c.nonfinite == GA_NONFINITE_SKIP_STEP;
  EXPECT_EQ(skips, skipped > 10) << skipped;
  EXPECT_TRUE(gaps_untouched(layout, same.p));
}
INSTANTIATE_TEST_SUITE_P(Window, Repeats, testing::ValuesIn(kRepeats),
                         [](const auto& param) { return std::string(param.param.name); });

// Whatever a program repeats: calls with the same arrays as before are refused if they would be refused in a context that
// knows of no calls before, and else they do the same. Some of the arrays overlap.
TEST(Window, RepeatedCallsAreRefusedLikeOthers) {
  constexpr int64_t kCount = 48;
  struct Run {
    Context ctx;
    Block p = Block(2 * kCount, 1), g = Block(6 * kCount);
    explicit Run(const ga_config& c) : ctx(c) {
      const ga_group group = ctx.group(optimizer(GA_OPTIMIZER_ADAMW));
      for (const int i : {0, 1}) ctx.param(group, "p" + std::to_string(i), &p[i * kCount], kCount);
    }
    void write_gradients(double factor) {
      for (size_t i = 0; i < g.size(); ++i)
        g[i] = static_cast<float>(factor * std::sin(static_cast<double>(i)));
    }
  };
  struct Call {
    int array[2];  // -1: NULL
    double weight;
  };
  for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE, GA_GRADIENTS_LENT}) {
    ga_config c = config();
    c.gradient_life = life;
    Run chained(c), other(c);
    Random random(static_cast<uint64_t>(3 + life));
    // So few that windows repeat parts of each other.
    const Call calls[] = {{{0, 1}, 1}, {{2, 4}, 1},   {{0, -1}, 1}, {{-1, 0}, 1},
                          {{3, 4}, 1}, {{-1, -1}, 1}, {{0, 1}, 0},  {{1, 0}, 2}};
    const auto any_call = [&] { return calls[random.below(std::size(calls))]; };
    const auto accumulate = [](Run& r, const Call& call, size_t count) {
      const void* list[3] = {};
      for (const size_t i : {0, 1}) {
        constexpr int64_t kAt[] = {0, kCount, 2 * kCount, kCount / 2,
                                   3 * kCount};  // the fourth overlaps two
        if (call.array[i] >= 0) list[i] = &r.g[static_cast<size_t>(kAt[call.array[i]])];
      }
      return ga_accumulate(r.ctx, list, count, call.weight, nullptr);
    };
    int refused = 0, applied = 0;
    std::vector<Call> window;
    for (int w = 0; w < 20000; ++w) {
      const double factor = static_cast<double>(1 + w % 7);
      chained.write_gradients(factor);
      other.write_gradients(factor);
      const auto at = window.begin() + random.below(static_cast<int64_t>(window.size()) + 1);
      switch (random.below(6)) {
        case 0:
          window.resize(static_cast<size_t>(random.below(4)));
          for (Call& call : window) call = any_call();
          break;
        case 1:
          if (at != window.end()) window.erase(at);
          break;
        case 2:
          if (window.size() < 4) window.insert(at, any_call());
          break;
        default:  // the window before once more
          break;
      }
      for (const Call& call : window) {
        ASSERT_EQ(accumulate(other, call, 3), GA_ERROR_INVALID_ARGUMENT) << "a call between";
        const ga_status one = accumulate(chained, call, 2);
        ASSERT_EQ(one, accumulate(other, call, 2)) << "window " << w << ": " << ga_last_error();
        refused += one != GA_OK;
      }
      const ga_step_result a = step(chained.ctx), b = step(other.ctx);
      ASSERT_EQ(memcmp(&a, &b, sizeof a), 0) << "window " << w;
      ASSERT_TRUE(same_bits(chained.p, other.p)) << "window " << w;
      applied += a.outcome == GA_STEP_APPLIED;
    }
    EXPECT_GT(applied, 1000);
    EXPECT_EQ(refused > 100, life != GA_GRADIENTS_CONSUMED) << refused;
  }
}

// A scale may be so small that it is 0.
TEST(Window, ABorrowedGradientOfScaleZeroIsNoRepetition) {
  Block p(16, 1);
  const Block g(16, 1);
  ga_config c = config();
  c.gradient_life = GA_GRADIENTS_LIVE;
  c.reduce = GA_REDUCE_SUM;
  Context ctx(c);
  ctx.param(ctx.group(plain_sgd()), "p", p.data(), 16);
  const void* list[] = {g.data()};
  ASSERT_OK(ga_accumulate(ctx, list, 1, 1, nullptr));
  EXPECT_EQ(step(ctx).norm, 4);
  EXPECT_EQ(step(ctx).outcome, GA_STEP_SKIPPED_EMPTY);
  ASSERT_OK(ga_accumulate(ctx, list, 1, 1e-20, MicroOptions(1e306)));
  EXPECT_EQ(step(ctx).norm, 0);
  EXPECT_EQ(p[0], 0);
}

// An overflow in one window must not be found in the next, whoever writes the accumulator first,
// and not even in the padding after its last element.
TEST(Window, NothingOfAnOverflowSurvives) {
  for (const int64_t n : {1, 3, 17, 65, 65537}) {
    const auto size = static_cast<size_t>(n);
    Block p(size, 0), g(size, 1), zero(size, 0);
    Context ctx;
    ctx.param(ctx.group(plain_sgd()), "p", p.data(), n);
    const double tiny = 1e-300;
    for (const Block* gradient : {&g, &zero}) {
      const void* list[] = {gradient->data()};
      ASSERT_OK(ga_accumulate(ctx, list, 1, 1, MicroOptions(tiny)));
      EXPECT_NE(step(ctx).outcome, GA_STEP_SKIPPED_EMPTY);
      p.assign(size, 0);
      ASSERT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
      ga_accumulator a;
      a.struct_size = sizeof a;
      ASSERT_OK(ga_accumulator_acquire(ctx, 0, &a));
      to_library(a.data, Block(size, 1));
      ASSERT_OK(ga_accumulator_release(ctx, 0));
      ASSERT_OK(ga_accumulate_part(ctx, 0, g.data()));
      ASSERT_OK(ga_micro_end(ctx));
      EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED) << n << " elements";
      EXPECT_EQ(p.back(), -2);
    }
  }
}

}  // namespace
}  // namespace ga::test
