// SPDX-License-Identifier: Apache-2.0
//
// Gradients that are lent (GA_GRADIENTS_LENT): the buffer of the first one becomes the accumulator. That they give the
// bits of consumed ones is in test_promise.cpp too, and random programs are in test_sequences.cpp.
#include <cmath>
#include <deque>

#include "small_run.hpp"
#include "support.hpp"

namespace ga::test {
namespace {

ga_config lending() {
  ga_config c = config();
  c.gradient_life = GA_GRADIENTS_LENT;
  return c;
}

// A program with buffers for its gradients.
class Lent : public testing::Test {
 protected:
  static constexpr int64_t kCount = 1000;

  void create(const ga_config& c, size_t params = 2) {
    values_.assign(params, Block(kCount, 1));
    ctx_ = std::make_unique<Context>(c);
    const ga_group group = ctx_->group(optimizer(GA_OPTIMIZER_ADAMW));
    for (size_t i = 0; i < params; ++i)
      ctx_->param(group, "p" + std::to_string(i), values_[i].data(), kCount);
  }
  float* gradient(uint64_t seed) {
    Random random(seed);
    Block& g = buffers_.emplace_back(kCount);
    for (float& x : g) x = static_cast<float>(random.signed_unit());
    return g.data();
  }
  testing::AssertionResult accumulated(ga_status expected, std::vector<const void*> gradients,
                                       const std::vector<std::string>& words = {}) {
    return refused(ga_accumulate(*ctx_, gradients.data(), gradients.size(), 1, nullptr), expected,
                   words);
  }

  std::vector<Block> values_;
  std::deque<Block> buffers_;  // none of which moves
  std::unique_ptr<Context> ctx_;
};

// What the buffer holds is undefined to programs. Here it shows where the gradients were added up.
TEST_F(Lent, TheBufferBecomesTheAccumulator) {
  create(lending());
  float* const a = gradient(1);
  float* const b = gradient(2);
  const Block first(a, a + kCount), second(b, b + kCount);
  ctx_->accumulate({a, nullptr}, 3);
  EXPECT_EQ(Block(a, a + kCount), first) << "a single gradient is read where it is";
  ctx_->accumulate({b, nullptr}, 0.5);
  for (int64_t i = 0; i < kCount; ++i) {
    const auto at = static_cast<size_t>(i);
    const float product = first[at] * 3, other = second[at] * 0.5f;
    ASSERT_EQ(a[i], product + other);
  }
  EXPECT_EQ(Block(b, b + kCount), second) << "only one buffer is lent";
  ctx_->accumulate({gradient(3), gradient(4)});
  EXPECT_EQ(step(*ctx_).outcome, GA_STEP_APPLIED);
  const ga_memory m = memory(*ctx_);
  EXPECT_EQ(m.accumulators, 0);
}

// In windows of all lengths, with factors that round, a negative loss scale among them, one after the other in the
// same buffers.
TEST_F(Lent, TheBitsOfConsumedGradients) {
  for (const double scale : {1.0, 3.0, -7.0, 1e-30}) {
    for (const bool clipped : {false, true}) {
      std::vector<Block> results[2];
      std::vector<double> norms[2];
      for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LENT}) {
        ga_config c = config();
        c.gradient_life = life;
        create(c);
        const ga_clip mode = clip(GA_CLIP_GLOBAL, 0.5);
        if (clipped) {
          EXPECT_OK(ga_context_set_clip(*ctx_, &mode));
        }
        uint64_t seed = 1;
        for (const int micros : {1, 2, 5, 3}) {
          for (int k = 0; k < micros; ++k) {
            const std::vector<const void*> list = {gradient(seed),
                                                   k == 1 ? nullptr : gradient(seed + 100)};
            ++seed;
            EXPECT_OK(ga_accumulate(*ctx_, list.data(), 2, 1 + 0.3 * k, MicroOptions(scale)));
          }
          norms[life != 0].push_back(step(*ctx_).norm);
        }
        results[life != 0] = values_;
      }
      EXPECT_TRUE(same_bits(results[0][0], results[1][0])) << scale;
      EXPECT_TRUE(same_bits(results[0][1], results[1][1])) << scale;
      EXPECT_EQ(norms[0], norms[1]) << scale;
    }
  }
}

// Nothing that this context does needs the norm: it is not measured of a single gradient, but the pass that adds a second
// one measures the sum.
TEST_F(Lent, TheNormIsKnownFromTheSecondGradientOn) {
  ga_config c = lending();
  c.nonfinite = GA_NONFINITE_IGNORE;
  create(c, 1);
  ctx_->accumulate({gradient(1)});
  EXPECT_TRUE(std::isnan(step(*ctx_).norm));
  ctx_->accumulate({gradient(2)});
  ctx_->accumulate({gradient(3)});
  EXPECT_GT(step(*ctx_).norm, 0);
}

TEST_F(Lent, OneBufferIsLentOnce) {
  create(lending());
  float* const a = buffers_.emplace_back(3 * kCount, 0.5f).data() + kCount;
  float* const b = gradient(2);
  const Block before(a, a + kCount);
  constexpr ga_status expected = GA_ERROR_INVALID_ARGUMENT;
  for (const int64_t shift : {-1, 0, 1}) {
    Block& block = buffers_.emplace_back(3 * kCount, 1.0f);
    const float* const at = block.data() + kCount;
    EXPECT_TRUE(accumulated(expected, {at, at + shift * (kCount - 1)},
                            {"\"p1\"", "was lent for parameter \"p0\""}));
    EXPECT_TRUE(accumulated(GA_OK, {at, at + shift * kCount + (shift == 0 ? kCount : 0)}));
    EXPECT_OK(ga_discard(*ctx_));
  }
  EXPECT_TRUE(accumulated(expected, {a, a}, {"\"p1\"", "was lent"}));
  // A refused call has lent nothing: the other parameter may have the buffer.
  EXPECT_OK(ga_micro_begin(*ctx_, -1, 1, nullptr));
  EXPECT_OK(ga_accumulate_part(*ctx_, 1, a));
  EXPECT_TRUE(refused(ga_accumulate_part(*ctx_, 0, a + 1 - kCount), expected,
                      {"\"p0\"", "was lent for parameter \"p1\""}));
  EXPECT_TRUE(refused(ga_accumulate_part(*ctx_, 1, a + 1), expected, {"\"p1\"", "was lent"}));
  EXPECT_EQ(Block(a, a + kCount), before);
  EXPECT_OK(ga_accumulate_part(*ctx_, 0, b));
  EXPECT_OK(ga_micro_end(*ctx_));
  EXPECT_EQ(step(*ctx_).outcome, GA_STEP_APPLIED);
  // In another window, buffers change hands, in one call or by part.
  EXPECT_TRUE(accumulated(GA_OK, {b, a}));
  EXPECT_EQ(step(*ctx_).outcome, GA_STEP_APPLIED);
  EXPECT_TRUE(accumulated(GA_OK, {a, b}));
  EXPECT_OK(ga_discard(*ctx_));
  EXPECT_TRUE(accumulated(GA_OK, {b, a}));
  EXPECT_EQ(step(*ctx_).outcome, GA_STEP_APPLIED);
}

// Buffers of thousands of parameters that move in each window, half of them to where another's was.
TEST(LentBuffers, ManyThatMove) {
  constexpr int kParams = 2000;
  Block p(kParams), memory(2 * kParams);
  Context ctx(lending());
  const ga_group group = ctx.group(plain_sgd());
  for (int i = 0; i < kParams; ++i)
    ctx.param(group, "p" + std::to_string(i), &p[static_cast<size_t>(i)], 1);
  Random random(1);
  std::vector<size_t> places(memory.size());
  for (size_t i = 0; i < places.size(); ++i) places[i] = i;
  double sum = 0;
  for (int w = 0; w < 20; ++w) {
    for (size_t i = 0; i < places.size(); ++i)
      std::swap(places[i], places[i + random.below(places.size() - i)]);
    for (const size_t from : {size_t{0}, size_t{kParams}}) {
      std::vector<const void*> list;
      for (size_t i = 0; i < kParams; ++i) {
        memory[places[from + i]] = 1;
        list.push_back(&memory[places[from + i]]);
      }
      ctx.accumulate(list);
    }
    sum += 1;
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  }
  for (const float x : p) ASSERT_EQ(x, -sum);
}

// A window that was saved half-way goes on with the same bits, where it was saved and where it was loaded.
TEST_F(Lent, AnOpenWindowIsSaved) {
  const auto first_half = [&] {
    ctx_->accumulate({gradient(1), gradient(2)}, 3);
    ctx_->accumulate({gradient(3), nullptr});
  };
  const auto second_half = [&] {
    ctx_->accumulate({gradient(4), gradient(5)}, 0.3);
    EXPECT_EQ(step(*ctx_).outcome, GA_STEP_APPLIED);
    return values_;
  };
  create(lending());
  first_half();
  const auto expected = second_half();
  create(lending());
  first_half();
  const Bytes bytes = saved(*ctx_);
  EXPECT_EQ(second_half(), expected);
  create(lending());
  EXPECT_OK(load(*ctx_, bytes));
  EXPECT_EQ(second_half(), expected);
}

TEST(LentOptions, AreRefusedByName) {
  ga_config c = lending();
  c.nonfinite = GA_NONFINITE_DROP_MICRO;
  ga_context* none = nullptr;
  EXPECT_TRUE(refused(ga_context_create(&c, &none), GA_ERROR_UNSUPPORTED,
                      {"GA_GRADIENTS_LENT", "GA_NONFINITE_DROP_MICRO"}));
  EXPECT_EQ(none, nullptr);

  c = lending();
  c.accumulation = GA_ACCUMULATE_COMPENSATED;
  Context ctx(c);
  const ga_group group = ctx.group(plain_sgd());
  uint16_t half[4] = {};
  float single[4] = {};
  const int64_t shape[] = {2, 2};
  ga_param_options o = options();
  o.accumulator_dtype = GA_BF16;
  EXPECT_TRUE(refused(ga_param_add(ctx, group, "half", half, GA_BF16, 2, shape, &o, nullptr),
                      GA_ERROR_UNSUPPORTED, {"\"half\"", "compensated", "GA_GRADIENTS_LENT"}));
  o = options();
  EXPECT_OK(ga_param_add(ctx, group, "half", half, GA_BF16, 2, shape, &o, nullptr));
  o.rows = GA_ROWS_DENSE;
  EXPECT_TRUE(refused(ga_param_add(ctx, group, "rows", single, GA_F32, 2, shape, &o, nullptr),
                      GA_ERROR_UNSUPPORTED, {"\"rows\"", "GA_GRADIENTS_LENT"}));

  ga_clip micro = clip(GA_CLIP_GLOBAL, 1);
  micro.when = GA_CLIP_WHEN_MICRO;
  EXPECT_TRUE(refused(ga_context_set_clip(ctx, &micro), GA_ERROR_UNSUPPORTED,
                      {"GA_CLIP_WHEN_MICRO", "GA_GRADIENTS_LENT"}));
  EXPECT_TRUE(refused(ga_group_set_clip(ctx, group, &micro), GA_ERROR_UNSUPPORTED,
                      {"GA_CLIP_WHEN_MICRO", "GA_GRADIENTS_LENT"}));
}

}  // namespace
}  // namespace ga::test
