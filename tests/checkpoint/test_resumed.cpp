// SPDX-License-Identifier: Apache-2.0
//
// Runs that go on in a program that is not a copy of the one that saved: other parameters were added and
// removed before, in another order.
#include <algorithm>
#include <string>
#include <vector>

#include "support.hpp"

namespace ga::test {
namespace {

using Bytes = std::vector<char>;

Bytes saved(ga_context* ctx) {
  size_t size = 0;
  EXPECT_OK(ga_save_to_memory(ctx, nullptr, nullptr, 0, &size));
  Bytes bytes(size);
  EXPECT_OK(ga_save_to_memory(ctx, nullptr, bytes.data(), size, &size));
  return bytes;
}

ga_status load(ga_context* ctx, const Bytes& bytes) {
  return ga_load_from_memory(ctx, bytes.data(), bytes.size(), nullptr);
}

// 16-bit parameters whose updates and accumulators are rounded stochastically, found by name.
class ByChance {
 public:
  explicit ByChance(const std::vector<std::string>& names) : ctx(config_of()) {
    ctx.group(optimizer(GA_OPTIMIZER_ADAMW));
    for (const std::string& name : names) add(name);
  }

  void add(const std::string& name) {
    ga_param_options o;
    EXPECT_OK(ga_param_options_init(&o, sizeof o));
    o.master = GA_MASTER_NONE;
    o.rounding = GA_ROUND_STOCHASTIC;
    o.gradient_dtype = GA_F32;
    o.accumulator_dtype = GA_BF16;
    // ga_context keeps the address: none of these may move.
    list_.reserve(16);
    list_.push_back({name, std::vector<uint16_t>(kCount, 0x3f80), true});
    EXPECT_OK(ga_param_add(ctx, 0, name.c_str(), list_.back().data.data(), GA_BF16, 1, &kCount, &o,
                           nullptr));
  }

  void remove(const std::string& name) {
    for (size_t i = 0; i < list_.size(); ++i)
      if (list_[i].name == name) {
        EXPECT_OK(ga_param_remove(ctx, static_cast<ga_param>(i)));
        list_[i].there = false;
      }
  }

  void micro_batch(int number) {
    std::vector<std::vector<float>> gradients;
    for (const Of& of : list_) {
      gradients.emplace_back(kCount);
      for (size_t k = 0; k < kCount; ++k)
        gradients.back()[k] = std::sin(static_cast<float>(k + 1) * static_cast<float>(number + 1) +
                                       static_cast<float>(of.name[0]));
    }
    std::vector<const void*> pointers;
    for (size_t i = 0; i < list_.size(); ++i)
      pointers.push_back(list_[i].there ? gradients[i].data() : nullptr);
    EXPECT_OK(ga_accumulate(ctx, pointers.data(), pointers.size(), 1, nullptr));
  }
  void window(int number) {
    for (int k = 0; k < 3; ++k) micro_batch(3 * number + k);
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  }

  std::vector<uint16_t> values(const std::string& name) const {
    for (const Of& of : list_)
      if (of.name == name) return of.data;
    return {};
  }

  Context ctx;

 private:
  static ga_config config_of() {
    ga_config c = config();
    c.accumulation = GA_ACCUMULATE_STOCHASTIC;
    c.seed = 7;
    return c;
  }
  static constexpr int64_t kCount = 300;
  struct Of {
    std::string name;
    std::vector<uint16_t> data;
    bool there;
  };
  std::vector<Of> list_;
};

// Whatever was removed before: within a window too, and with a parameter that is added later.
TEST(Resumed, RandomBitsGoWithTheNamesOfParameters) {
  for (const bool open : {false, true}) {
    SCOPED_TRACE(open);
    ByChance whole({"a", "b", "c", "d"});
    whole.window(0);
    whole.remove("a");
    whole.remove("d");
    if (open) whole.micro_batch(3);
    const Bytes bytes = saved(whole.ctx);

    ByChance resumed({"c", "b"});
    ASSERT_OK(load(resumed.ctx, bytes));
    for (ByChance* run : {&whole, &resumed}) {
      if (open) {
        run->micro_batch(4);
        EXPECT_EQ(step(run->ctx).outcome, GA_STEP_APPLIED);
      }
      run->window(2);
      run->add("e");
      run->window(3);
    }
    for (const char* name : {"b", "c", "e"})
      EXPECT_EQ(whole.values(name), resumed.values(name)) << name;

    // And once more: what was loaded is saved.
    ByChance again({"e", "c", "b"});
    ASSERT_OK(load(again.ctx, saved(resumed.ctx)));
    for (ByChance* run : {&whole, &again}) run->window(4);
    for (const char* name : {"b", "c", "e"})
      EXPECT_EQ(whole.values(name), again.values(name)) << name;
  }
}

}  // namespace
}  // namespace ga::test
