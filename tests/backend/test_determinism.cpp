// SPDX-License-Identifier: Apache-2.0
//
// The bits are the same for any number of threads, OpenMP's or the program's, in any order of
// execution, on every instruction set level, and for consumed and live gradients at any address.
#include <atomic>
#include <functional>
#include <thread>

#include "support.hpp"

namespace ga::test {
namespace {

// All results of a training run: parameters, external gradients, norms, factors.
struct Trace {
  Block block;
  std::vector<float> external;
  std::vector<double> numbers;

  bool operator==(const Trace& other) const {
    return same_bits(block, other.block) && same_bits(external, other.external) &&
           numbers.size() == other.numbers.size() &&
           memcmp(numbers.data(), other.numbers.data(), numbers.size() * sizeof(double)) == 0;
  }
};

// A run through all kernels: every optimizer, every clip, every way to contribute.
Trace run(const ga_config& c) {
  const auto all = good_optimizers();
  std::vector<int64_t> counts;
  for (size_t i = 0; i < all.size(); ++i) {
    counts.push_back(static_cast<int64_t>(i % 6 == 0 ? 2 * 65536 + i : 300 * i + 17));
  }
  counts.push_back(65536 + 1);  // the external parameter
  const Layout layout(counts);
  Trace trace;
  trace.block = parameters(layout, 1);
  Context ctx(c);
  for (size_t i = 0; i < layout.size(); ++i) {
    ctx.group(i < all.size() ? all[i].optimizer : optimizer(GA_OPTIMIZER_EXTERNAL));
    ctx.param(static_cast<ga_group>(i), std::to_string(i), trace.block.data() + layout.offsets[i],
              layout.counts[i]);
  }
  const ga_clip clips[] = {clip(GA_CLIP_GLOBAL, 3), clip(GA_CLIP_PER_TENSOR, 0.5, GA_FLAVOR_KERAS),
                           clip(GA_CLIP_GLOBAL, 7, GA_FLAVOR_TORCH, 0.75), clip(GA_CLIP_NONE, 0)};
  const auto external = static_cast<ga_param>(all.size());
  for (uint64_t t = 0; t < 4; ++t) {
    EXPECT_OK(ga_context_set_clip(ctx, &clips[t]));
    const Block a = gradients(layout, 2, 3 * t), b = gradients(layout, 2, 3 * t + 1),
                d = gradients(layout, 2, 3 * t + 2);
    ctx.accumulate(pointers(layout, a), 3);
    if (t != 1) ctx.accumulate(pointers(layout, b), 0.7);
    if (t == 2) {
      EXPECT_OK(ga_micro_begin(ctx, 2, 1.9, nullptr));
      for (ga_param i = 0; i <= external; i += 2) {
        const float* g = d.data() + layout.offsets[static_cast<size_t>(i)];
        EXPECT_OK(ga_accumulate_part(ctx, i, g));
        ga_accumulator out;
        out.struct_size = sizeof out;
        EXPECT_OK(ga_accumulator_acquire(ctx, i, &out));
        for (int64_t j = 0; j < out.columns * out.rows; ++j) {
          static_cast<float*>(out.data)[j] += static_cast<float>(out.alpha) * g[j];
        }
        EXPECT_OK(ga_accumulator_release(ctx, i));
      }
      EXPECT_OK(ga_micro_end(ctx));
    }
    const ga_step_result r = step(ctx);
    EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
    trace.numbers.push_back(r.norm);
    trace.numbers.push_back(r.clip_factor);
    const void* data = nullptr;
    EXPECT_OK(ga_gradient(ctx, external, &data, nullptr, nullptr));
    const auto* g = static_cast<const float*>(data);
    trace.external.insert(trace.external.end(), g, g + counts.back());
  }
  return trace;
}

const Trace& baseline() {
  static const Trace trace = [] {
    const Isa scalar("scalar");
    return run(config());
  }();
  return trace;
}

TEST(Determinism, SameProgramTwice) {
  const Isa scalar("scalar");
  EXPECT_TRUE(run(config()) == baseline());
}

TEST(Determinism, NumberOfThreads) {
  for (const int32_t threads : {2, 3, 4, 0}) {
    ga_config c = config();
    c.num_threads = threads;
    EXPECT_TRUE(run(c) == baseline()) << threads << " threads";
  }
}

TEST(Determinism, MoreThreadsThanWork) {
  ga_config c = config();
  c.num_threads = 64;
  EXPECT_TRUE(run(c) == baseline());
}

TEST(Determinism, LifetimeOfGradients) {
  ga_config c = config();
  c.gradient_life = GA_GRADIENTS_LIVE;
  EXPECT_TRUE(run(c) == baseline());
  c.num_threads = 3;
  EXPECT_TRUE(run(c) == baseline());
}

class IsaLevels : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Determinism, IsaLevels, testing::ValuesIn(kIsaLevels),
                         [](const testing::TestParamInfo<const char*>& info) {
                           return identifier(info.param);
                         });

TEST_P(IsaLevels, SameBitsAsScalar) {
  const Isa isa(GetParam());
  if (!Isa::available()) GTEST_SKIP() << "this build or this processor has no " << GetParam();
  for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
    ga_config c = config();
    c.num_threads = 2;
    c.gradient_life = life;
    EXPECT_TRUE(run(c) == baseline());
  }
}

// Norms only, bit for bit and for all lengths of the last group of lanes.
std::vector<double> norms() {
  std::vector<double> result;
  for (int64_t n = 1; n < 65600; n += n < 200 ? 1 : n / 3 + 7) {
    const Layout layout({n});
    Block p = parameters(layout, 3);
    for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
      ga_config c = config();
      c.gradient_life = life;
      Context ctx(c);
      ctx.param(ctx.group(plain_sgd()), "p", p.data() + layout.offsets[0], n);
      for (const ga_clip& mode : {clip(GA_CLIP_NONE, 0), clip(GA_CLIP_GLOBAL, 2, 0, 0.6)}) {
        EXPECT_OK(ga_context_set_clip(ctx, &mode));
        Random random(static_cast<uint64_t>(n));
        Block g(static_cast<size_t>(n));
        for (float& x : g) x = static_cast<float>(random.signed_unit());
        ctx.accumulate({g.data()}, 0.3);
        const ga_step_result r = step(ctx);
        result.push_back(r.norm);
        result.push_back(r.clip_factor);
      }
    }
  }
  return result;
}

TEST_P(IsaLevels, SameNormsAsScalar) {
  const Isa isa(GetParam());
  if (!Isa::available()) GTEST_SKIP() << "this build or this processor has no " << GetParam();
  const auto scalar = [] {
    const Isa level("scalar");
    return norms();
  }();
  const auto got = norms();
  ASSERT_EQ(got.size(), scalar.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], scalar[i]) << "norm " << i;
}

// ---- The program's own threads ------------------------------------------------------------------

struct Calls {
  std::atomic<int> loops{0};
};

void forward(void* user, int64_t count, ga_task task, void* data) {
  ++static_cast<Calls*>(user)->loops;
  for (int64_t i = 0; i < count; ++i) task(data, i);
}

void backward(void* user, int64_t count, ga_task task, void* data) {
  ++static_cast<Calls*>(user)->loops;
  for (int64_t i = count; i-- > 0;) task(data, i);
}

void shuffled(void* user, int64_t count, ga_task task, void* data) {
  const int loop = ++static_cast<Calls*>(user)->loops;
  std::vector<int64_t> order;
  for (int64_t i = 0; i < count; ++i) order.push_back(i);
  Random random(static_cast<uint64_t>(loop));
  for (size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1], order[static_cast<size_t>(random.below(static_cast<int64_t>(i)))]);
  }
  for (const int64_t i : order) task(data, i);
}

void threads(void* user, int64_t count, ga_task task, void* data) {
  ++static_cast<Calls*>(user)->loops;
  std::atomic<int64_t> next{0};
  std::vector<std::thread> pool;
  for (int t = 0; t < 3; ++t) {
    pool.emplace_back([&] {
      for (int64_t i; (i = next++) < count;) task(data, i);
    });
  }
  for (std::thread& thread : pool) thread.join();
}

TEST(Determinism, ProgramsOwnThreads) {
  for (const ga_parallel_for loop : {forward, backward, shuffled, threads}) {
    for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
      Calls calls;
      ga_config c = config();
      c.num_threads = 3;
      c.gradient_life = life;
      c.parallel_for = loop;
      c.parallel_for_user = &calls;
      EXPECT_TRUE(run(c) == baseline());
      EXPECT_GT(calls.loops, 8) << "the callback was not used";
    }
  }
}

// Contexts in different threads are independent; the last error belongs to the thread.
TEST(Determinism, ContextsInDifferentThreads) {
  std::vector<Trace> traces(3);
  std::vector<std::string> errors(3);
  std::vector<std::thread> pool;
  for (size_t i = 0; i < traces.size(); ++i) {
    pool.emplace_back([&, i] {
      EXPECT_STREQ(ga_last_error(), "");
      float p = 0;
      Context ctx;
      ctx.param(ctx.group(plain_sgd()), "name" + std::to_string(i), &p, 1);
      const std::string name = "name" + std::to_string(i);
      EXPECT_EQ(ga_param_add(ctx, 0, name.c_str(), &p, GA_F32, 0, nullptr, nullptr, nullptr),
                GA_ERROR_INVALID_ARGUMENT);
      traces[i] = run(config());
      errors[i] = ga_last_error();
    });
  }
  for (std::thread& thread : pool) thread.join();
  for (size_t i = 0; i < traces.size(); ++i) {
    EXPECT_TRUE(traces[i] == baseline());
    EXPECT_NE(errors[i].find("name" + std::to_string(i)), std::string::npos) << errors[i];
  }
}

// The addresses of tensors do not change the bits either.
TEST(Determinism, Addresses) {
  const Layout layout({70001});
  const Block start = parameters(layout, 5);
  Block first;
  for (const int64_t shift : {0, 1, 2, 3, 5, 16}) {
    Block p(70001 + 32), g(p.size());
    memcpy(p.data() + shift, start.data() + 1, 70001 * sizeof(float));
    Context ctx;
    ctx.param(ctx.group(optimizer(GA_OPTIMIZER_ADAMW)), "p", p.data() + shift, 70001);
    double norm = 0;
    for (uint64_t t = 0; t < 3; ++t) {
      const Block source = gradients(layout, 6, t);
      memcpy(g.data() + 7 - shift % 7, source.data() + 1, 70001 * sizeof(float));
      ctx.accumulate({g.data() + 7 - shift % 7}, 3);
      norm += step(ctx).norm;
    }
    Block result(p.begin() + shift, p.begin() + shift + 70001);
    result.push_back(static_cast<float>(norm));
    if (first.empty()) first = result;
    EXPECT_TRUE(same_bits(first, result)) << "shifted by " << shift;
  }
}

}  // namespace
}  // namespace ga::test
