// SPDX-License-Identifier: Apache-2.0
//
// All pairs of options (pairs.hpp): those that the library supports follow float64, and the others
// must be refused with the status that the header names.
#include "pairs.hpp"

namespace ga::test {
namespace {

// With several, some case probably also shows a mistake that depends on three or four options.
constexpr int kTimes = 8;

TEST(Pairs, EverySupportedPairIsInSeveralCases) {
  std::map<Pair, int> covered;
  for (const Case& c : cases(kTimes)) {
    for (const Pair& pair : pairs_of(c)) ++covered[pair];
  }
  const std::set<Pair> supported = supported_pairs();
  for (const Pair& pair : supported) EXPECT_GE(covered[pair], kTimes) << describe(pair);
  EXPECT_EQ(covered.size(), supported.size()) << "a case contains an unsupported pair";
  EXPECT_EQ(supported.size() + refusals().size(), all_pairs().size());
  // Counts the pairs in another way: the product of the two numbers of choices for each pair of
  // options.
  size_t choices = 0, squares = 0;
  for (const Choices& option : kChoices) {
    choices += option.names.size();
    squares += option.names.size() * option.names.size();
  }
  EXPECT_EQ(all_pairs().size(), (choices * choices - squares) / 2);
}

TEST(Pairs, EveryCaseFollowsFloat64) {
  double vague = 0, sharp = 0;
  int wrong = 0;
  for (const Case& c : cases(kTimes)) {
    SCOPED_TRACE(describe(c));
    const Trial trial(c);
    EXPECT_EQ(trial.status(), GA_OK) << trial.sentence();
    if (HasFailure()) ++wrong;
    if (wrong == 5) break;  // enough failures to read
    if (!trial.is_sharp()) continue;
    vague += trial.vague();
    ++sharp;
  }
  if (wrong > 0) return;
  EXPECT_GE(sharp, 150);
  EXPECT_LE(vague, 0.01 * sharp) << "too many tolerances are too wide to prove anything";
}

TEST(Pairs, UnsupportedPairsAreRefused) {
  for (const auto& [pair, refusal] : refusals()) {
    SCOPED_TRACE(describe(pair));
    Case c = {};
    c[static_cast<size_t>(pair.a)] = pair.x;
    c[static_cast<size_t>(pair.b)] = pair.y;
    const Trial trial(c);
    EXPECT_EQ(trial.status(), refusal.status) << trial.sentence();
    EXPECT_NE(trial.sentence().find(refusal.word), std::string::npos) << trial.sentence();
  }
}

}  // namespace
}  // namespace ga::test
