// SPDX-License-Identifier: Apache-2.0
//
// A C++17 program outside the tree, with gradaccum.hpp: a window of training, compared with numbers
// computed by hand, and an error that is thrown as an exception. Exits with 1 if a check fails.
#include <cstdio>
#include <gradaccum/gradaccum.hpp>
#include <string>
#include <vector>

int main() {
  std::vector<float> p = {1, 2, 3};
  const std::vector<float> g1 = {1, 0, -1};
  const std::vector<float> g2 = {5, 2, 3};

  gradaccum::Context context;
  ga_optimizer sgd = gradaccum::default_optimizer(GA_OPTIMIZER_SGD);
  sgd.lr = 0.5;
  const gradaccum::Param param = context.add_param(context.add_group(sgd), "p", p.data(), {3});
  context.accumulate({g1.data()}, 3);
  {
    gradaccum::MicroBatch micro = context.micro_begin(-1, 1);
    micro.accumulate_part(param, g2.data());
  }
  const ga_step_result result = context.step();
  if (result.outcome != GA_STEP_APPLIED || p != std::vector<float>{0, 1.75f, 3}) {
    std::printf("p is %g %g %g, expected 0 1.75 3\n", p[0], p[1], p[2]);
    return 1;
  }

  try {
    context.accumulate({g1.data()}, -1);
  } catch (const gradaccum::Error& error) {
    const bool good = error.status() == GA_ERROR_INVALID_ARGUMENT && error.what() != std::string();
    return good ? 0 : 1;
  }
  std::printf("a negative weight was accepted\n");
  return 1;
}
