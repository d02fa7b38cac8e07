// Training with LibTorch: windows of 39 samples, in one batch and in micro-batches of 16, 16 and 7,
// end with the same parameters. The norm of a window's gradient is clipped, a schedule of torch's
// halves the learning rate, and each window stops before its last micro-batch, is saved, and goes
// on. In CMake, with GA_TORCH_ROOT or GA_TORCH_PYTHON set:
//   find_package(gradaccum REQUIRED COMPONENTS torch)
//   target_link_libraries(libtorch PRIVATE gradaccum::torch)
// SPDX-License-Identifier: Apache-2.0
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <sstream>
#include <vector>

#include "gradaccum/torch.hpp"

static std::vector<torch::Tensor> train(std::int64_t micro_batch) {
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(8, 16), torch::nn::Tanh(),
                              torch::nn::Linear(16, 1));
  gradaccum::torch::Options options;
  options.clip = gradaccum::default_clip();
  options.clip->scope = GA_CLIP_GLOBAL;
  options.clip->max_norm = 0.5;
  gradaccum::torch::Optimizer optimizer(model->named_parameters(), torch::optim::AdamWOptions(1e-2),
                                        options);
  torch::optim::StepLR schedule(optimizer, /*step_size=*/20, /*gamma=*/0.5);
  for (int step = 0; step < 60; ++step) {
    const torch::Tensor batch = torch::randn({39, 8});
    for (const torch::Tensor& x : batch.split(micro_batch)) {
      if (x.size(0) < micro_batch) {
        std::stringstream file;
        torch::save(optimizer, file);
        optimizer.discard();
        torch::load(optimizer, file);
      }
      const torch::Tensor y = x.sin().sum(1, /*keepdim=*/true);
      const auto samples = static_cast<double>(x.size(0));  // that the loss is the mean of
      optimizer.backward(torch::mse_loss(model->forward(x), y), samples);
    }
    optimizer.step();
    schedule.step();
  }
  return model->parameters();
}

int main() {
  const std::vector<torch::Tensor> whole = train(39), parts = train(16);
  double apart = 0;
  for (std::size_t i = 0; i < whole.size(); ++i) {
    apart = std::max(apart, (whole[i] - parts[i]).abs().max().item<double>());
  }
  std::cout << "The parameters are at most " << apart << " apart.\n";
  return apart < 1e-4 ? 0 : 1;
}
