// SPDX-License-Identifier: Apache-2.0
//
// Steps of bitsandbytes and torchao with state in 8 bits, written by oracle/make_low_bit.py. Each step begins with
// their codes and scales of the step before, so that rounding to codes does not separate the two.
#include <cstdlib>

#include "oracle/low_bit.hpp"
#include "support.hpp"

namespace ga::test {
namespace {

constexpr int64_t kBlock = 256,
                  kFiller = 16 * kBlock;  // zeros before the elements, in blocks of their own

std::vector<uint32_t> numbers_of(const std::string& digits, size_t width) {
  std::vector<uint32_t> list;
  for (size_t k = 0; k < digits.size(); k += width)
    list.push_back(static_cast<uint32_t>(std::stoul(digits.substr(k, width), nullptr, 16)));
  return list;
}

std::vector<float> floats_of(const char* digits) {
  const std::vector<uint32_t> bits = numbers_of(digits, 8);
  std::vector<float> list(bits.size());
  memcpy(list.data(), bits.data(), bits.size() * sizeof(float));
  return list;
}

// With the filler before them.
std::vector<float> filled(const char* digits, int64_t elements) {
  std::vector<float> list(kFiller);
  const std::vector<float> numbers = floats_of(digits);
  list.insert(list.end(), numbers.begin(), numbers.begin() + elements);
  return list;
}

// What a state is after step t, counted from 0.
struct Written {
  std::vector<float> map, scales;
  std::vector<uint32_t> codes;

  Written(const oracle::LowBitState& state, int t)
      : map(floats_of(state.has_sign ? oracle::kSignedMap : oracle::kUnsignedMap)),
        scales(floats_of(state.scales[t])),
        codes(numbers_of(state.codes[t], 2)) {}

  std::vector<float> numbers() const {
    std::vector<float> list(kFiller);
    for (size_t i = 0; i < codes.size(); ++i) list.push_back(map[codes[i]] * scales[i / kBlock]);
    return list;
  }
};

class LowBit : public testing::TestWithParam<size_t> {};
INSTANTIATE_TEST_SUITE_P(All, LowBit, testing::Range<size_t>(0, oracle::low_bit_cases().size()),
                         [](const testing::TestParamInfo<size_t>& info) {
                           return identifier(oracle::low_bit_cases()[info.param].name);
                         });

// With state in f32: the numbers are those that they round to codes.
TEST_P(LowBit, StepsAreTheirs) {
  const oracle::LowBitCase c = oracle::low_bit_cases()[GetParam()];
  ga_optimizer o = optimizer(c.kind);
  c.set(o);
  std::vector<float> p = filled(oracle::kLowBitStart, c.elements);
  Context ctx;
  const ga_param id = ctx.param(ctx.group(o), "p", p.data(), static_cast<int64_t>(p.size()));
  for (int t = 0; t < oracle::kLowBitSteps; ++t) {
    SCOPED_TRACE(testing::Message() << "step " << t + 1);
    for (const oracle::LowBitState& state : c.states) {
      if (t == 0) break;
      const std::vector<float> x = Written(state, t - 1).numbers();
      ASSERT_OK(
          ga_state_set(ctx, id, state.name, x.data(), GA_F32, static_cast<int64_t>(x.size())));
    }
    const std::vector<float> g = filled(oracle::kLowBitGradients[t], c.elements), before = p;
    ctx.accumulate({g.data()});
    ASSERT_EQ(step(ctx).outcome, GA_STEP_APPLIED);

    const std::vector<float> theirs = filled(c.parameters[t], c.elements);
    for (size_t i = 0; i < p.size(); ++i) {
      // Two roundings of each side to the parameter's last place, for its decay and its move, and four of the move.
      const double is = double{theirs[i]}, moved = std::abs(is - double{before[i]});
      ASSERT_NEAR(p[i], is, 0x1p-22 * std::abs(is) + 0x1p-21 * moved) << i;
    }
    for (const oracle::LowBitState& state : c.states) {
      SCOPED_TRACE(state.name);
      std::vector<float> x(p.size());
      ASSERT_OK(
          ga_state_get(ctx, id, state.name, x.data(), GA_F32, static_cast<int64_t>(x.size())));
      Written written(state, t);
      for (const uint32_t pair : numbers_of(state.nearest[t], 5))
        written.codes[pair >> 8] = pair & 255;
      for (size_t b = 0; b < written.scales.size(); ++b) {
        const size_t begin = kFiller + b * kBlock, end = std::min<size_t>(begin + kBlock, x.size());
        const double scale = written.scales[b];
        double largest = 0;
        for (size_t i = begin; i < end; ++i) largest = std::max(largest, std::abs(double{x[i]}));
        ASSERT_NEAR(largest, scale, 0x1p-22 * scale + 1e-12) << b;  // torchao's least scale
        if (largest == 0) continue;
        for (size_t i = begin; i < end; ++i) {
          // Between the midpoints beside the code that is nearest.
          const double share = x[i] / scale;
          const uint32_t code = written.codes[i - kFiller];
          if (code > 0) {
            const double below = (double{written.map[code - 1]} + double{written.map[code]}) / 2;
            ASSERT_GE(share, below - 1e-6 * std::abs(below)) << i;
          }
          if (code < 255) {
            const double above = (double{written.map[code]} + double{written.map[code + 1]}) / 2;
            ASSERT_LE(share, above + 1e-6 * std::abs(above)) << i;
          }
        }
      }
    }
    p = theirs;
  }
}

}  // namespace
}  // namespace ga::test
