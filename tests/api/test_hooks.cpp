// SPDX-License-Identifier: Apache-2.0
//
// The program's own allocator and log, and what the build says of itself.
#include <cstdio>
#include <map>
#include <mutex>
#include <stdexcept>

#include "formats.hpp"

namespace ga::test {
namespace {

// ---- Allocator ----------------------------------------------------------------------------------

// Counts, and fails or misbehaves on demand. Memory is not zeroed.
struct Pool {
  static constexpr size_t kMore = 128;
  std::map<void*, std::vector<char>> live;  // with kMore bytes that were not asked for
  int64_t calls = 0, fail_from = INT64_MAX;
  bool throws = false, misaligned = false, wrong_size = false;
  ga_device device = -1;

  static void* allocate(void* user, size_t bytes, ga_device device, void*) {
    Pool& pool = *static_cast<Pool*>(user);
    pool.device = device;
    if (pool.calls++ >= pool.fail_from) {
      if (pool.throws) throw std::runtime_error("the pool is empty");
      return nullptr;
    }
    std::vector<char> memory(bytes + kMore, '\xee');
    const auto aligned = (reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64;
    void* const given = reinterpret_cast<void*>(aligned + (pool.misaligned ? 8 : 0));
    pool.live[given] = std::move(memory);
    return given;
  }
  static void release(void* user, void* data, size_t bytes, ga_device, void*) {
    Pool& pool = *static_cast<Pool*>(user);
    const auto found = pool.live.find(data);
    pool.wrong_size =
        pool.wrong_size || found == pool.live.end() || found->second.size() != bytes + kMore;
    if (found != pool.live.end()) pool.live.erase(found);
    if (pool.throws) throw std::runtime_error("nothing is taken back");
  }

  ga_config config() {
    ga_config c = test::config();
    c.allocate = allocate;
    c.free = release;
    c.allocator_user = this;
    return c;
  }
};

void train(ga_context* ctx, const Layout& layout, int steps) {
  for (int t = 0; t < steps; ++t) {
    const Block g = gradients(layout, 3, static_cast<uint64_t>(t));
    const auto list = pointers(layout, g);
    EXPECT_OK(ga_accumulate(ctx, list.data(), list.size(), 1, nullptr));
    EXPECT_OK(ga_accumulate(ctx, list.data(), list.size(), 2, nullptr));
    EXPECT_OK(ga_step(ctx, nullptr));
  }
}

// All arrays come from it and go back, and hold what the library's own would.
TEST(Allocator, BringsAllArrays) {
  const Layout layout({5, 400000, 700});
  Block p = parameters(layout, 1), q = p;
  Pool pool;
  {
    Context ctx(pool.config()), own;
    for (const auto& [x, block] : {std::make_pair(&ctx, &p), std::make_pair(&own, &q)}) {
      x->group(optimizer(GA_OPTIMIZER_ADAM));
      ga_ema ema;
      ASSERT_OK(ga_ema_init(&ema, sizeof ema));
      ASSERT_OK(ga_context_set_ema(*x, &ema));
      add_all(*x, 0, layout, *block);
      train(*x, layout, 3);
    }
    EXPECT_TRUE(same_bits(p, q));
    const ga_memory m = memory(ctx);
    size_t given = 0;
    for (const auto& [data, block] : pool.live) given += block.size() - Pool::kMore;
    EXPECT_GE(static_cast<int64_t>(given), m.accumulators + m.optimizer_state + m.averages);
    EXPECT_GE(m.optimizer_state, 2 * 4 * 400705);
    const int64_t before = pool.calls;
    train(ctx, layout, 2);
    EXPECT_EQ(pool.calls, before) << "windows allocate nothing";
  }
  EXPECT_TRUE(pool.live.empty());
  EXPECT_FALSE(pool.wrong_size);
}

// It fails at every point, by NULL and by an exception: a status, nothing lost, and the call works
// when memory is back.
TEST(Allocator, FailsAtEveryPoint) {
  const Layout layout({5, 700});
  for (const bool throws : {false, true}) {
    bool failed_in[3] = {};
    for (int64_t k = 0;; ++k) {
      ASSERT_LT(k, 200);
      Pool pool;
      pool.throws = throws;
      pool.fail_from = k;
      Block p = parameters(layout, 1);
      const Block start = p;
      ga_context* ctx = nullptr;
      const ga_config c = pool.config();
      bool failed = false;
      const auto works = [&](int at, const auto& call) {
        ga_status status = call();
        if (status != GA_OK) {
          EXPECT_EQ(status, GA_ERROR_OUT_OF_MEMORY) << ga_last_error();
          failed = failed_in[at] = true;
          EXPECT_TRUE(same_bits(p, start));
          pool.fail_from = INT64_MAX;
          status = call();
        }
        EXPECT_OK(status);
      };
      works(0, [&] { return ga_context_create(&c, &ctx); });
      const ga_optimizer o = optimizer(GA_OPTIMIZER_ADAM);
      works(1, [&] { return ga_group_add(ctx, &o, nullptr); });
      for (size_t i = 0; i < layout.size(); ++i)
        EXPECT_OK(ga_param_add(ctx, 0, std::to_string(i).c_str(), p.data() + layout.offsets[i],
                               GA_F32, 1, &layout.counts[i], nullptr, nullptr));
      works(2, [&] { return ga_prepare(ctx); });
      train(ctx, layout, 2);
      ga_context_destroy(ctx);
      EXPECT_TRUE(pool.live.empty());
      if (!failed) break;
    }
    EXPECT_TRUE(failed_in[0] && failed_in[1] && failed_in[2]);
  }
}

// The message tells the program's allocator from memory that the library lacks.
TEST(Allocator, ItsFailureIsNamed) {
  for (const bool throws : {false, true}) {
    Pool pool;
    pool.throws = throws;
    pool.fail_from = 0;
    const ga_config c = pool.config();
    ga_context* ctx = nullptr;
    EXPECT_TRUE(refused(ga_context_create(&c, &ctx), GA_ERROR_OUT_OF_MEMORY,
                        {"ga_config.allocate", throws ? "threw an exception" : "returned NULL"}));
  }
}

TEST(Allocator, WrongOnes) {
  Pool pool;
  ga_config c = pool.config();
  ga_context* ctx = nullptr;
  c.free = nullptr;
  EXPECT_TRUE(
      refused(ga_context_create(&c, &ctx), GA_ERROR_INVALID_ARGUMENT, {"allocate", "free"}));
  c = pool.config();
  c.allocate = nullptr;
  EXPECT_TRUE(
      refused(ga_context_create(&c, &ctx), GA_ERROR_INVALID_ARGUMENT, {"free", "allocate"}));
  pool.misaligned = true;
  c = pool.config();
  EXPECT_TRUE(refused(ga_context_create(&c, &ctx), GA_ERROR_INVALID_ARGUMENT, {"64"}));
  EXPECT_TRUE(pool.live.empty());
  EXPECT_EQ(ctx, nullptr);
}

// ---- Log ----------------------------------------------------------------------------------------

struct Lines {
  std::vector<std::string> list;
  ga_context* calls_back = nullptr;
  ga_status answer = GA_OK;
  bool throws = false;

  static void take(void* user, const char* line) {
    Lines& lines = *static_cast<Lines*>(user);
    lines.list.push_back(line);
    if (lines.calls_back) lines.answer = ga_step(lines.calls_back, nullptr);
    if (lines.throws) throw std::runtime_error("no paper");
  }
  ga_config config() {
    ga_config c = test::config();
    c.log = take;
    c.log_user = this;
    return c;
  }
};

// The parts of a line between its commas.
std::vector<std::string> parts(const std::string& line) {
  std::vector<std::string> list(1);
  for (const char c : line) {
    if (c == ',')
      list.emplace_back();
    else
      list.back() += c;
  }
  return list;
}

// Variables with a value that means nothing.
TEST(LogLines, TellOfVariablesThatAreIgnored) {
  const auto creation = [] {
    Lines lines;
    const Context ctx(lines.config());
    return lines.list.at(0);
  };
  const struct {
    const char *name, *wrong, *right;
  } variables[] = {{"GA_CPU_PREFETCH", "abc", "1"},
                   {"GA_CPU_HAND_OVER", "-3", "2e4"},
                   {"GA_CPU_HAND_OVER", "5ms", "0"},
                   {"GA_VERBOSE", "yes", "0"}};
  for (const auto& v : variables) {
    const char* const given = getenv(v.name);
    const std::string before = given ? given : "";
    setenv(v.name, v.wrong, 1);
    EXPECT_NE(creation().find(std::string(v.name) + "=" + v.wrong + " (expected"),
              std::string::npos)
        << creation();
    setenv(v.name, v.right, 1);
    EXPECT_EQ(creation().find("expected"), std::string::npos) << creation();
    given ? setenv(v.name, before.c_str(), 1) : unsetenv(v.name);
  }
}

TEST(LogLines, OneForEachCall) {
  Lines lines;
  float p = 1;
  const float g = 0.5f;
  Context ctx(lines.config());
  ASSERT_EQ(lines.list.size(), 1u);
  EXPECT_NE(lines.list[0].find("ga_context_create"), std::string::npos);
  EXPECT_NE(lines.list[0].find("libgradaccum"), std::string::npos);
  EXPECT_EQ(parts(lines.list[0]).size(), 6u);
  ctx.group(plain_sgd(0.25));
  ctx.param(0, "weight", &p, ref::Shape{});
  ctx.accumulate({&g}, 3);
  step(ctx);
  EXPECT_EQ(ga_micro_end(ctx), GA_ERROR_INVALID_STATE);
  EXPECT_EQ(ga_discard(nullptr), GA_ERROR_INVALID_ARGUMENT);  // of no context: no line
  ASSERT_EQ(lines.list.size(), 6u);
  const struct {
    const char *function, *status;
    std::vector<const char*> notes;
  } expected[] = {{"ga_group_add", "GA_OK", {}},
                  {"ga_param_add", "GA_OK", {"name:weight", "dtype:1"}},
                  {"ga_accumulate", "GA_OK", {"count:1", "weight:3"}},
                  {"ga_step", "GA_OK", {"outcome:0", "norm:0.5", "lr:0.25"}},
                  {"ga_micro_end", "GA_ERROR_INVALID_STATE", {}}};
  for (size_t k = 0; k < 5; ++k) {
    const auto p_of = parts(lines.list[k + 1]);
    SCOPED_TRACE(lines.list[k + 1]);
    ASSERT_EQ(p_of.size(), 6u);
    EXPECT_EQ(p_of[0], "gradaccum");
    EXPECT_TRUE(p_of[1] == "cpu" || p_of[1] == "cuda");
    EXPECT_EQ(p_of[2], expected[k].function);
    EXPECT_EQ(p_of[4], expected[k].status);
    EXPECT_GE(std::stod(p_of[5]), 0);
    for (const char* note : expected[k].notes)
      EXPECT_NE(p_of[3].find(note), std::string::npos) << note;
  }
}

// A log that calls back or throws disturbs nothing, and the message of the call stays.
TEST(LogLines, MayMisbehave) {
  Lines lines;
  float p = 1;
  const float g = 0.5f;
  Context ctx(lines.config());
  ctx.group(plain_sgd());
  ctx.param(0, "p", &p, ref::Shape{});
  lines.calls_back = ctx;
  ctx.accumulate({&g});
  EXPECT_EQ(lines.answer, GA_ERROR_INVALID_STATE);
  EXPECT_EQ(window(ctx).micro_batches, 1);
  lines.throws = true;
  EXPECT_TRUE(refused(ga_micro_end(ctx), GA_ERROR_INVALID_STATE, {"ga_micro_end"}));
  step(ctx);
  EXPECT_EQ(p, 0.5f);
}

TEST(LogLines, ToStderrOnlyIfAsked) {
  const auto written = [](const ga_config& c) {
    testing::internal::CaptureStderr();
    {
      Context ctx(c);
      ctx.group(plain_sgd());
    }
    return testing::internal::GetCapturedStderr();
  };
  unsetenv("GA_VERBOSE");
  EXPECT_EQ(written(config()), "");
  setenv("GA_VERBOSE", "0", 1);
  EXPECT_EQ(written(config()), "");
  setenv("GA_VERBOSE", "1", 1);
  const std::string text = written(config());
  EXPECT_EQ(text.find("gradaccum,"), 0u) << text;
  EXPECT_NE(text.find(",ga_group_add,,GA_OK,"), std::string::npos) << text;
  Lines lines;
  EXPECT_EQ(written(lines.config()), "");
  EXPECT_EQ(lines.list.size(), 2u);
  unsetenv("GA_VERBOSE");
}

TEST(LogLines, LongNamesAreCut) {
  Lines lines;
  float p = 1;
  Context ctx(lines.config());
  ctx.group(plain_sgd());
  ctx.param(0, std::string(4000, 'x'), &p, ref::Shape{});
  EXPECT_LT(lines.list.back().size(), 1000u);
  EXPECT_EQ(parts(lines.list.back()).size(), 6u);
  float q = 1;
  ctx.param(0, "a,b\n", &q, ref::Shape{});
  EXPECT_EQ(parts(lines.list.back()).size(), 6u);
  EXPECT_EQ(lines.list.back().find('\n'), std::string::npos);
}

// ---- Build --------------------------------------------------------------------------------------

TEST(Build, InParts) {
  ga_build b;
  ASSERT_OK(ga_build_init(&b, sizeof b));
  ASSERT_OK(ga_build_describe(&b));
  EXPECT_EQ(b.version, ga_version());
  EXPECT_EQ(b.version, GA_VERSION);
  const std::string line = ga_build_info();
  EXPECT_NE(line.find(b.compiler), std::string::npos);
  EXPECT_NE(line.find(b.cpu_loops), std::string::npos);
  EXPECT_EQ(b.openmp > 0, line.find("OpenMP") != std::string::npos);
  if (has_onednn()) {
    ASSERT_OK(ga_build_describe(&b));
    EXPECT_GE(b.onednn, 20600);
    EXPECT_LT(b.onednn, 40000);
  }
  EXPECT_GE(b.cuda_runtime, 0);
  EXPECT_GE(b.cuda_driver, 0);
  EXPECT_EQ(b.reserved, 0);
  EXPECT_TRUE(refused(ga_build_describe(nullptr), GA_ERROR_INVALID_ARGUMENT, {"ga_build"}));
}

}  // namespace
}  // namespace ga::test
