// SPDX-License-Identifier: Apache-2.0
//
// ga_gradients_kept: which gradients the library may still read. Random programs that overwrite each gradient as soon
// as the library lets go of it are in test_sequences.cpp.
#include <algorithm>
#include <deque>
#include <thread>

#include "support.hpp"

namespace ga::test {
namespace {

ga_kept_info kept(ga_context* ctx, int64_t from = 0) {
  auto info = to_fill<ga_kept_info>();
  EXPECT_OK(ga_gradients_kept(ctx, from, &info));
  EXPECT_EQ(info.queued, info.oldest);
  EXPECT_EQ(info.reserved, 0);
  return info;
}

// A program with parameters of one element, which notes what it has brought.
class Kept : public ::testing::Test {
 protected:
  static constexpr size_t kParams = 3;

  void create(const ga_config& c) {
    ctx_ = std::make_unique<Context>(c);
    const ga_group group = ctx_->group(plain_sgd());
    for (size_t i = 0; i < kParams; ++i) ctx_->param(group, "p" + std::to_string(i), &p_[i], 1);
  }
  static ga_config live() {
    ga_config c = config();
    c.gradient_life = GA_GRADIENTS_LIVE;
    return c;
  }

  const float* gradient() { return &gradients_.emplace_back(1.0f); }
  int64_t latest() { return kept(*ctx_).latest; }
  // Both return the number of the gradient, or of the first one.
  int64_t part(ga_param p) {
    EXPECT_OK(ga_accumulate_part(*ctx_, p, gradient()));
    return latest();
  }
  int64_t whole(std::vector<bool> has, double weight = 1) {
    std::vector<const void*> list;
    for (const bool given : has) list.push_back(given ? gradient() : nullptr);
    ctx_->accumulate(list, weight);
    return latest() + 1 - static_cast<int64_t>(has.size());
  }
  void begin(int64_t index = -1, double weight = 1) {
    EXPECT_OK(ga_micro_begin(*ctx_, index, weight, nullptr));
  }
  void end() { EXPECT_OK(ga_micro_end(*ctx_)); }
  void step() { EXPECT_OK(ga_step(*ctx_, nullptr)); }

  // The numbers of all gradients that are kept.
  using Numbers = std::vector<int64_t>;
  Numbers all() {
    Numbers list;
    for (ga_kept_info info = kept(*ctx_); info.oldest <= info.latest;
         info = kept(*ctx_, info.oldest + 1))
      list.push_back(info.oldest);
    return list;
  }

  float p_[kParams] = {};
  std::deque<float> gradients_;  // none of which moves
  std::unique_ptr<Context> ctx_;
};

TEST_F(Kept, NothingOfConsumedGradients) {
  create(config());
  whole({true, true, true});
  EXPECT_EQ(all(), Numbers{});
  begin();
  part(0);
  EXPECT_EQ(all(), Numbers{});
  EXPECT_EQ(kept(*ctx_).until_micro_end, 0);
  end();
  step();
  EXPECT_EQ(all(), Numbers{});
}

TEST_F(Kept, NumbersCountGradients) {
  create(config());
  EXPECT_EQ(latest(), 0);
  EXPECT_EQ(whole({true, false, true}), 1);
  EXPECT_EQ(latest(), 3);
  EXPECT_EQ(whole({true, true, true}), 4);
  begin();
  EXPECT_EQ(part(1), 7);
  EXPECT_EQ(part(1), 8);
  end();
  step();
  EXPECT_EQ(latest(), 8);
  whole({true, true, true}, 0);
  EXPECT_EQ(latest(), 11) << "also if they are not read";
  EXPECT_EQ(kept(*ctx_, 100).oldest, 12);
}

TEST_F(Kept, LiveGradientsUntilTheSecond) {
  create(live());
  const int64_t first = whole({true, true, false});
  EXPECT_EQ(all(), (Numbers{first, first + 1}));
  const int64_t second = whole({true, false, true});
  EXPECT_EQ(all(), (Numbers{first + 1, second + 2}));
  whole({false, true, false});
  EXPECT_EQ(all(), Numbers{second + 2});
  begin();
  part(2);
  EXPECT_EQ(all(), Numbers{});
  end();
  step();
  const int64_t next = whole({true, true, true});
  EXPECT_EQ(all(), (Numbers{next, next + 1, next + 2}));
  step();
  EXPECT_EQ(all(), Numbers{});
  whole({true, true, true});
  EXPECT_OK(ga_discard(*ctx_));
  EXPECT_EQ(all(), Numbers{});
}

TEST_F(Kept, PartsOfAnyOrder) {
  create(live());
  begin();
  Numbers first(kParams);
  for (const ga_param p : {2, 0, 1}) first[static_cast<size_t>(p)] = part(p);
  end();
  EXPECT_EQ(all(), (Numbers{first[2], first[0], first[1]}));
  begin();
  part(0);
  EXPECT_EQ(all(), (Numbers{first[2], first[1]}));
  part(2);
  EXPECT_EQ(all(), Numbers{first[1]});
  end();
  step();
  EXPECT_EQ(all(), Numbers{});
}

TEST_F(Kept, NotWhatIsNotRead) {
  create(live());
  EXPECT_OK(ga_param_set_frozen(*ctx_, 1, 1));
  whole({true, true, true}, 0);
  EXPECT_EQ(all(), Numbers{});
  begin();
  part(1);
  EXPECT_EQ(all(), Numbers{});
  const int64_t read = part(0);
  EXPECT_EQ(all(), Numbers{read});
}

TEST_F(Kept, NotWhatWasAborted) {
  create(live());
  const int64_t before = whole({true, false, false});
  begin();
  part(1);
  part(2);
  EXPECT_OK(ga_micro_abort(*ctx_));
  EXPECT_EQ(all(), Numbers{before});
  const int64_t after = whole({false, true, false});
  EXPECT_EQ(all(), (Numbers{before, after + 1}));
}

// A micro-batch that is checked as a whole is read when it ends.
TEST_F(Kept, PartsUntilTheMicroBatchEnds) {
  for (const bool drops : {true, false}) {
    for (const bool lives : {false, true}) {
      SCOPED_TRACE(drops ? "dropped" : "clipped");
      ga_config c = lives ? live() : config();
      if (drops) c.nonfinite = GA_NONFINITE_DROP_MICRO;
      create(c);
      EXPECT_EQ(kept(*ctx_).until_micro_end, drops);
      if (!drops) {
        ga_clip micro = clip(GA_CLIP_GLOBAL, 1);
        micro.when = GA_CLIP_WHEN_MICRO;
        EXPECT_OK(ga_context_set_clip(*ctx_, &micro));
      }
      EXPECT_EQ(kept(*ctx_).until_micro_end, 1);
      whole({true, true, true});
      EXPECT_EQ(all(), Numbers{}) << "read when the call returns";
      begin();
      const int64_t first = part(0), second = part(1);
      EXPECT_EQ(all(), (Numbers{first, second}));
      end();
      EXPECT_EQ(all(), Numbers{});
      begin();
      part(0);
      EXPECT_OK(ga_micro_abort(*ctx_));
      EXPECT_EQ(all(), Numbers{});
      begin();
      part(0);
      EXPECT_OK(ga_discard(*ctx_));
      EXPECT_EQ(all(), Numbers{});
      EXPECT_OK(ga_context_set_clip(*ctx_, nullptr));
      EXPECT_EQ(kept(*ctx_).until_micro_end, drops);
    }
  }
}

// The gradients of a layer lie in its own memory: they keep none that came before them.
TEST_F(Kept, NotWhatCameBeforeALayer) {
  ga_config c = config();
  c.nonfinite = GA_NONFINITE_DROP_MICRO;
  create(c);
  ga_bn layer = -1;
  EXPECT_OK(ga_bn_add(*ctx_, "layer", 1, 0, 1, nullptr, &layer));
  const float x[] = {1, 2, 4, 3}, dy[] = {1, -1, 2, 1};
  float y[4];
  const int64_t before = whole({true, true, true}) + 2;
  begin();
  EXPECT_OK(ga_bn_forward(*ctx_, layer, x, 4, 1, y));
  EXPECT_OK(ga_bn_backward_accumulate(*ctx_, layer, x, dy, 4, 1));
  EXPECT_GT(kept(*ctx_).oldest, before);
  const int64_t after = part(2);
  EXPECT_EQ(all().back(), after);
  end();
  EXPECT_EQ(all(), Numbers{});
}

// What is saved with the window is a copy.
TEST_F(Kept, NotWhatWasSaved) {
  create(live());
  const int64_t first = whole({true, false, false});
  EXPECT_EQ(all(), Numbers{first});
  size_t size = 0;
  EXPECT_OK(ga_save_to_memory(*ctx_, nullptr, nullptr, 0, &size));
  std::vector<char> state(size);
  EXPECT_OK(ga_save_to_memory(*ctx_, nullptr, state.data(), state.size(), &size));
  EXPECT_EQ(all(), Numbers{});
}

TEST_F(Kept, NumbersOfSeveralThreads) {
  ga_config c = live();
  c.eager = 1;
  create(c);
  for (int window = 0; window < 20; ++window) {
    const int64_t before = latest();
    begin();
    std::vector<const float*> own;
    for (size_t i = 0; i < kParams; ++i) own.push_back(gradient());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < kParams; ++i)
      threads.emplace_back(
          [&, i] { EXPECT_OK(ga_accumulate_part(*ctx_, static_cast<ga_param>(i), own[i])); });
    for (std::thread& t : threads) t.join();
    EXPECT_EQ(all(), (Numbers{before + 1, before + 2, before + 3}));
    end();
    step();
    EXPECT_EQ(all(), Numbers{});
  }
}

TEST_F(Kept, NothingThatComputesOtherwise) {
  ga_config c = live();
  c.accumulation = GA_ACCUMULATE_RUNNING_MEAN;
  create(c);
  whole({true, true, true});
  EXPECT_EQ(all(), Numbers{}) << "gradients are read at once";
}

TEST_F(Kept, RefusesNegativeNumbers) {
  create(config());
  ga_kept_info info;
  ASSERT_OK(ga_kept_info_init(&info, sizeof info));
  EXPECT_EQ(ga_gradients_kept(*ctx_, -1, &info), GA_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(std::string(ga_last_error()).find("since was -1, expected >= 0"), std::string::npos);
  EXPECT_EQ(info.latest, 0);
}

// A queue as the header describes it: each gradient is overwritten when its number is below `oldest`.
TEST_F(Kept, AQueueOfBuffers) {
  for (const int32_t nonfinite : {GA_NONFINITE_SKIP_STEP, GA_NONFINITE_DROP_MICRO}) {
    ga_config c = live();
    c.nonfinite = nonfinite;
    create(c);
    std::fill(std::begin(p_), std::end(p_), 0.0f);
    struct Buffer {
      int64_t number;
      float value;
    };
    std::deque<Buffer> queue;  // which does not move what it holds
    float want = 0;
    for (int window = 0; window < 3; ++window) {
      float sum = 0;
      for (int micro = 0; micro < 4; ++micro) {
        begin();
        for (size_t i = 0; i < kParams; ++i) {
          const auto value = static_cast<float>(1 << micro);
          queue.push_back({0, value});
          EXPECT_OK(ga_accumulate_part(*ctx_, static_cast<ga_param>(i), &queue.back().value));
          const ga_kept_info info = kept(*ctx_, std::max<int64_t>(queue.front().number, 0));
          queue.back().number = info.latest;
          while (!queue.empty() && queue.front().number < info.oldest) {
            queue.front().value = NAN;
            queue.pop_front();
          }
        }
        sum += static_cast<float>(1 << micro);
        end();
        EXPECT_LE(queue.size(), kParams);
      }
      step();
      want -= sum / 4;
      for (const float p : p_) EXPECT_EQ(p, want);
      EXPECT_EQ(kept(*ctx_).oldest, latest() + 1);
      queue.clear();
    }
  }
}

}  // namespace
}  // namespace ga::test
