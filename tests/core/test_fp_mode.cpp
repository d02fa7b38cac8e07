// SPDX-License-Identifier: Apache-2.0
//
// The program's floating-point mode (subnormal numbers flushed, another rounding, traps) does not
// change a bit of the library's results, and the library does not change the mode.
#include <atomic>
#include <functional>
#include <thread>

#include "support.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace ga::test {
namespace {

// ---- Modes of this processor --------------------------------------------------------------------

struct Mode {
  const char* name;
  uint64_t bits;
};

void PrintTo(const Mode& mode, std::ostream* out) { *out << mode.name; }

#if defined(__x86_64__)

// MXCSR: flush to zero 0x8000, subnormal operands are zero 0x40, rounding upward 0x4000; a cleared
// mask bit lets an exception trap: overflow 0x400, division by zero 0x200, invalid 0x80.
constexpr Mode kPlain = {"Plain", 0x1f80};
constexpr Mode kModes[] = {{"Flush", 0x1f80 | 0x8040},
                           {"Upward", 0x1f80 | 0x4000},
                           {"Traps", 0x1f80 & ~(0x400 | 0x200 | 0x80)},
                           {"All", (0x1f80 & ~(0x400 | 0x200 | 0x80)) | 0x8040 | 0x6000}};

// The mode and the exception flags.
uint64_t environment() { return _mm_getcsr(); }
void set_environment(uint64_t bits) { _mm_setcsr(static_cast<unsigned>(bits)); }
constexpr uint64_t kFlags = 0x3f;

#elif defined(__aarch64__)

// FPCR: flush to zero bit 24, rounding upward 22, default NaN 25. Not every processor has traps.
constexpr Mode kPlain = {"Plain", 0};
constexpr Mode kModes[] = {
    {"Flush", 1 << 24}, {"Upward", 1 << 22}, {"All", 1 << 24 | 3 << 22 | 1 << 25}};

uint64_t environment() {
  uint64_t control, status;
  asm volatile("mrs %0, fpcr\n\tmrs %1, fpsr" : "=r"(control), "=r"(status));
  return control << 32 | status;
}
void set_environment(uint64_t bits) {
  asm volatile("msr fpcr, %0\n\tmsr fpsr, %1" : : "r"(bits), "r"(uint64_t{0}));
}
constexpr uint64_t kFlags = 0xffffffff;

#elif defined(__ARM_FP)

// FPSCR: flush to zero bit 24, rounding upward 22, default NaN 25. The four highest bits are those of the last
// comparison, which any function changes. Not every processor has traps.
constexpr Mode kPlain = {"Plain", 0};
constexpr Mode kModes[] = {
    {"Flush", 1 << 24}, {"Upward", 1 << 22}, {"All", 1 << 24 | 3 << 22 | 1 << 25}};

uint64_t environment() {
  uint32_t bits;
  asm volatile("vmrs %0, fpscr" : "=r"(bits));
  return bits & 0xfffffff;
}
void set_environment(uint64_t bits) {
  asm volatile("vmsr fpscr, %0" : : "r"(static_cast<uint32_t>(bits)));
}
constexpr uint64_t kFlags = 0x800009f;

#else

constexpr Mode kPlain = {"Plain", 0};
constexpr Mode kModes[] = {{"Plain", 0}};
uint64_t environment() { return 0; }
void set_environment(uint64_t) {}
constexpr uint64_t kFlags = 0;

#endif

void set(const Mode& mode) { set_environment(mode.bits); }

// Sets the mode of this thread for the lifetime of the object.
class With {
 public:
  explicit With(const Mode& mode) : before_(environment()) { set(mode); }
  ~With() {
#if defined(__aarch64__)
    before_ >>= 32;
#endif
    set_environment(before_);
  }
  With(const With&) = delete;
  With& operator=(const With&) = delete;

 private:
  uint64_t before_;
};

// Returns the result of a call, which must not change the environment, exception flags included.
template <class Call>
ga_status kept(const char* what, Call&& call) {
  const uint64_t before = environment();
  const ga_status status = call();
  const uint64_t after = environment();
  EXPECT_EQ(after, before) << what << " changed the program's floating-point environment";
  return status;
}

#define KEPT_OK(call) EXPECT_EQ(kept(#call, [&] { return call; }), GA_OK) << ga_last_error()

// ---- A run that every mode would affect ---------------------------------------------------------

constexpr int64_t kLarge = 4 * 65536 + 5, kSmall = 300;
constexpr int64_t kChannels = 8, kSamples = 4100;

struct Data {
  std::vector<NamedOptimizer> optimizers = good_optimizers();
  Layout layout = Layout(counts());
  Block start = parameters(layout, 1);
  std::vector<Block> rounds;
  Block x = even_gradients(Layout({kChannels * kSamples}), 5, 0);
  double decay = 0.3, tiny = 4e-310, lr = 0.1;

  Data() {
    // Adam with gradients of 1e-19, whose squares are subnormal: the update shows whether anything
    // was flushed.
    ga_optimizer o = optimizer(GA_OPTIMIZER_ADAM);
    o.eps = 1e-25;
    optimizers.push_back({"AdamTiny", o});
    for (uint64_t r = 0; r < 6; ++r) {
      rounds.push_back(gradients(layout, 2, r));
      const auto last = static_cast<size_t>(layout.offsets.back());
      for (size_t j = last; j < last + kLarge; ++j) rounds.back()[j] = r % 2 == 0 ? 1e-19f : 3e-20f;
    }
  }

  static const Data& get() {
    static const Data data;
    return data;
  }

 private:
  static std::vector<int64_t> counts() {
    std::vector<int64_t> list(good_optimizers().size(), kSmall);
    list.push_back(kLarge);
    return list;
  }
};

struct Trace {
  Block block, y, averages;
  std::vector<double> numbers;
  bool operator==(const Trace& other) const {
    return same_bits(block, other.block) && same_bits(y, other.y) &&
           same_bits(averages, other.averages) && numbers.size() == other.numbers.size() &&
           memcmp(numbers.data(), other.numbers.data(), numbers.size() * sizeof(double)) == 0;
  }
};

// Everything that computes: optimizers, clipping, schedules, EMA, batch normalisation, a skipped
// window, and calls that fail.
Trace run(const ga_config& given) {
  const Data& d = Data::get();
  Trace trace;
  trace.block = d.start;
  trace.y.resize(d.x.size());
  trace.averages.resize(kLarge);
  ga_config c = given;
  c.noise_scale = 1;
  ga_context* ctx = nullptr;
  c.loss_scale = d.tiny;  // would be 0 if subnormal operands were zero
  KEPT_OK(ga_context_create(&c, &ctx));
  KEPT_OK((ga_context_destroy(ctx), GA_OK));
  c.loss_scale = 1;
  KEPT_OK(ga_context_create(&c, &ctx));
  ga_ema ema;
  KEPT_OK(ga_ema_init(&ema, sizeof ema));
  ema.decay = d.decay;
  KEPT_OK(ga_context_set_ema(ctx, &ema));
  ga_schedule cosine;
  KEPT_OK(ga_schedule_init(&cosine, sizeof cosine, GA_SCHEDULE_COSINE));
  cosine.total_steps = 7;
  for (size_t i = 0; i < d.layout.size(); ++i) {
    const auto id = static_cast<ga_param>(i);
    const std::string name = std::to_string(i);
    KEPT_OK(ga_group_add(ctx, &d.optimizers[i].optimizer, nullptr));
    if (i % 2 == 0) {
      KEPT_OK(ga_group_set_schedule(ctx, id, &cosine));
    }
    KEPT_OK(ga_param_add(ctx, id, name.c_str(), trace.block.data() + d.layout.offsets[i], GA_F32, 1,
                         &d.layout.counts[i], nullptr, nullptr));
  }
  KEPT_OK(ga_group_set_lr(ctx, 0, d.lr));
  KEPT_OK(ga_bn_add(ctx, "bn", kChannels, -1, -1, nullptr, nullptr));
  const ga_clip norm = clip(GA_CLIP_GLOBAL, 3);
  const ga_param last = static_cast<ga_param>(d.layout.size()) - 1;
  const float inf = INFINITY;
  for (size_t t = 0; t < 3; ++t) {
    if (t == 2) {  // earlier, it would make zero of what should be subnormal
      KEPT_OK(ga_context_set_clip(ctx, &norm));
    }
    for (size_t k = 0; k < 2; ++k) {
      const auto list = pointers(d.layout, d.rounds[2 * t + k]);
      KEPT_OK(ga_bn_forward(ctx, 0, d.x.data(), kSamples, 1, trace.y.data()));
      const double weight = k == 0 ? 3 : d.lr;
      KEPT_OK(ga_accumulate(ctx, list.data(), list.size(), weight, nullptr));
      EXPECT_EQ(kept("a call that fails",
                     [&] { return ga_accumulate(ctx, list.data(), 1, weight, nullptr); }),
                GA_ERROR_INVALID_ARGUMENT);
    }
    ga_step_result r;
    r.struct_size = sizeof r;
    KEPT_OK(ga_step(ctx, &r));
    EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
    double lr = 0;
    KEPT_OK(ga_group_lr(ctx, 0, &lr));
    trace.numbers.insert(trace.numbers.end(), {r.norm, r.clip_factor, r.noise_trace, lr});
  }
  std::vector<const void*> none(d.layout.size(), nullptr);
  const Block bad(kLarge, inf);
  none.back() = bad.data();
  KEPT_OK(ga_accumulate(ctx, none.data(), none.size(), 1, nullptr));
  KEPT_OK(ga_step(ctx, nullptr));
  KEPT_OK(ga_ema_copy_to(ctx, last, trace.averages.data(), GA_F32));
  std::vector<double> running(2 * kChannels);
  KEPT_OK(ga_bn_running(ctx, 0, running.data(), running.data() + kChannels, GA_F64, nullptr));
  trace.numbers.insert(trace.numbers.end(), running.begin(), running.end());
  KEPT_OK((ga_context_destroy(ctx), GA_OK));
  return trace;
}

const Trace& baseline() {
  static const Trace trace = run(config());
  return trace;
}

// Returns true if this thread's environment is that mode, exception flags aside.
bool is(const Mode& mode) {
#if defined(__aarch64__)
  return environment() >> 32 == mode.bits;
#else
  return (environment() & ~kFlags) == mode.bits;
#endif
}

// Runs body in a new thread, for which OpenMP creates new threads when they are first needed.
void in_a_new_thread(const std::function<void()>& body) { std::thread(body).join(); }

class FpModes : public testing::TestWithParam<Mode> {};
INSTANTIATE_TEST_SUITE_P(FpMode, FpModes, testing::ValuesIn(kModes),
                         [](const testing::TestParamInfo<Mode>& info) { return info.param.name; });

TEST_P(FpModes, BeforeThereAreThreads) {
  baseline();
  for (const int32_t threads : {1, 2, 4}) {
    in_a_new_thread([&] {
      ga_config c = config();
      c.num_threads = threads;
      {
        const With mode(GetParam());
        EXPECT_TRUE(run(c) == baseline()) << threads << " threads";
      }
      EXPECT_TRUE(run(c) == baseline()) << threads << " threads, afterwards";
    });
  }
}

TEST_P(FpModes, AfterThereAreThreads) {
  baseline();
  for (const int32_t threads : {1, 2, 4}) {
    in_a_new_thread([&] {
      ga_config c = config();
      c.num_threads = threads;
      EXPECT_TRUE(run(c) == baseline()) << threads << " threads, before";
      const With mode(GetParam());
      EXPECT_TRUE(run(c) == baseline()) << threads << " threads";
    });
  }
}

#ifdef _OPENMP
// OpenMP's threads belong to the program too: each keeps its mode.
TEST_P(FpModes, OfOpenMpsThreads) {
  baseline();
  in_a_new_thread([&] {
    ga_config c = config();
    c.num_threads = 4;
    std::atomic<int> kept{0};
#pragma omp parallel num_threads(4)
    set(GetParam());
    set(kPlain);
    EXPECT_TRUE(run(c) == baseline());
    set(GetParam());
    EXPECT_TRUE(run(c) == baseline());
#pragma omp parallel num_threads(4)
    kept += is(GetParam()) ? 1 : 0;
    EXPECT_EQ(kept, 4);
  });
}
#endif

// ---- The program's own threads ------------------------------------------------------------------

struct Pool {
  Mode mode;
  std::atomic<int> loops{0}, wrong{0};

  void expect(const Mode& wanted) { wrong += is(wanted) ? 0 : 1; }
};

// A pool whose threads each have a mode of their own; the calling thread takes part.
void threads(void* user, int64_t count, ga_task task, void* data) {
  Pool& pool = *static_cast<Pool*>(user);
  ++pool.loops;
  pool.expect(pool.mode);
  std::atomic<int64_t> next{0};
  const auto work = [&](const Mode& mode) {
    for (int64_t i; (i = next++) < count;) {
      const uint64_t before = environment();
      task(data, i);
      if (environment() != before) ++pool.wrong;
    }
    pool.expect(mode);
  };
  std::vector<std::thread> list;
  for (const Mode& mode : kModes) {
    list.emplace_back([&work, &mode] {
      set(mode);
      work(mode);
    });
  }
  work(pool.mode);
  for (std::thread& thread : list) thread.join();
}

TEST_P(FpModes, OfTheProgramsThreads) {
  baseline();
  for (const Mode& mode : {GetParam(), kPlain}) {
    Pool pool;
    pool.mode = mode;
    ga_config c = config();
    c.num_threads = 3;
    c.parallel_for = threads;
    c.parallel_for_user = &pool;
    const With here(mode);
    EXPECT_TRUE(run(c) == baseline()) << mode.name;
    EXPECT_GT(pool.loops, 8) << "the callback was not used";
    EXPECT_EQ(pool.wrong, 0) << "a thread's mode was changed";
  }
}

// A callback may use another context, in a floating-point mode that it sets itself.
TEST(FpMode, ContextsWithinACallback) {
  baseline();
  struct Nested {
    Pool inner;
    Pool outer;
    bool done = false;
    static void loop(void* user, int64_t count, ga_task task, void* data) {
      Nested& n = *static_cast<Nested*>(user);
      n.outer.expect(n.outer.mode);
      if (!n.done) {
        n.done = true;
        for (const Mode& mode : {kPlain, kModes[0]}) {
          const With here(mode);
          n.inner.mode = mode;
          ga_config c = config();
          c.parallel_for = threads;
          c.parallel_for_user = &n.inner;
          EXPECT_TRUE(run(c) == baseline());
        }
      }
      n.outer.expect(n.outer.mode);
      for (int64_t i = 0; i < count; ++i) task(data, i);
      n.outer.expect(n.outer.mode);
    }
  } nested;
  nested.outer.mode = kModes[1 % std::size(kModes)];
  ga_config c = config();
  c.parallel_for = Nested::loop;
  c.parallel_for_user = &nested;
  const With here(nested.outer.mode);
  EXPECT_TRUE(run(c) == baseline());
  EXPECT_EQ(nested.inner.wrong, 0);
  EXPECT_EQ(nested.outer.wrong, 0);
}

}  // namespace
}  // namespace ga::test
