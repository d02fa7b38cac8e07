// SPDX-License-Identifier: Apache-2.0
#include "train.hpp"

#include <omp.h>

#include <algorithm>
#include <ctime>
#include <numeric>
#include <random>

#include "../common/console.hpp"
#include "cnn.hpp"
#include "variance.hpp"

namespace {

double test_accuracy(const Dataset& data, std::int64_t slice, Cnn& network,
                     gradaccum::Context& context) {
  std::int64_t correct = 0;
  for (std::int64_t first = 0; first < data.count; first += slice) {
    const Micro all = {0, 0, std::min(slice, data.count - first)};
    for (std::int64_t i = 0; i < all.samples; ++i) data.image_to(first + i, network.input(i));
    network.infer(all.samples, context);
    correct += network.score(all, data.labels.data() + first).correct;
  }
  return static_cast<double>(correct) / static_cast<double>(data.count);
}

// The micro-batches of a window, grouped into sweeps: all of them in one sweep in WINDOW mode, else
// each in a sweep of its own, which uses the same tensors as the one before.
std::vector<std::vector<Micro>> sweeps(const Setup& setup, std::int64_t samples) {
  const bool together = setup.mode == GA_BN_WINDOW;
  std::vector<std::vector<Micro>> all;
  for (std::int64_t first = 0; first < samples; first += setup.micro) {
    const Micro micro = {first / setup.micro, together ? first : 0,
                         std::min(setup.micro, samples - first)};
    if (all.empty() || !together) all.emplace_back();
    all.back().push_back(micro);
  }
  return all;
}

bool is_snapshot(std::int64_t step) {
  return step == 1 || step == 10 || step == 100 || step == 1000;
}

}  // namespace

Run train(const Options& options, const Setup& setup, const Dataset& training,
          const Dataset& test) {
  if (options.threads > 0) omp_set_num_threads(options.threads);
  const std::int64_t count =
      options.samples > 0 ? std::min(options.samples, training.count) : training.count;
  const std::int64_t windows =
      (count + options.batch - 1) / options.batch;  // the last may be short
  const std::int64_t room = setup.mode == GA_BN_WINDOW ? options.batch : setup.micro;

  Cnn network(options.seed, setup.mode, room);
  ga_config config = gradaccum::default_config();
  config.num_threads = options.threads;
  gradaccum::Context context(config);
  ga_optimizer sgd = gradaccum::default_optimizer(GA_OPTIMIZER_SGD);
  sgd.lr = options.lr;
  sgd.momentum = 0.9;
  const gradaccum::Group group = context.add_group(sgd);
  ga_schedule schedule = gradaccum::default_schedule(GA_SCHEDULE_COSINE);
  schedule.total_steps = options.epochs * windows;
  context.set_schedule(group, schedule);
  network.add_to(context, group);

  Run run{setup, {}, {}, {}, {}};
  RunningVariances variances(network);
  Progress progress(setup.name, options.epochs, count);
  std::mt19937_64 random(options.seed);
  std::vector<std::int64_t> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  std::vector<std::uint8_t> labels;
  std::int64_t step = 0;

  for (std::int64_t epoch = 1; epoch <= options.epochs; ++epoch) {
    const std::clock_t start = std::clock();
    std::shuffle(order.begin(), order.end(), random);
    for (std::int64_t first = 0; first < count; first += options.batch) {
      const std::int64_t in_window = std::min(options.batch, count - first);
      std::vector<std::int64_t> window(order.begin() + first, order.begin() + first + in_window);
      if (setup.reversed) std::reverse(window.begin(), window.end());
      Cnn::Score score;
      for (const std::vector<Micro>& sweep : sweeps(setup, in_window)) {
        labels.clear();
        for (const Micro& micro : sweep) {
          for (std::int64_t i = 0; i < micro.samples; ++i) {
            const auto sample = static_cast<std::size_t>(micro.index * setup.micro + i);
            training.image_to(window[sample], network.input(micro.first + i));
            labels.push_back(training.labels[static_cast<std::size_t>(window[sample])]);
          }
        }
        network.forward(sweep, context);
        for (const Micro& micro : sweep) {
          variances.add(network, micro);
          const Cnn::Score part = network.score(micro, labels.data() + micro.first);
          score.loss += part.loss;
          score.correct += part.correct;
        }
        network.backward(sweep, context);
      }
      context.step();
      variances.step();

      run.losses.push_back(score.loss / static_cast<double>(in_window));
      progress.window(in_window, score.loss, score.correct);
      if (is_snapshot(++step)) run.parameters[step] = network.parameters();
    }
    run.seconds += static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
    run.epochs.push_back({step, test_accuracy(test, room, network, context)});
    progress.epoch(run.epochs.back().test_accuracy);
  }

  run.parameters[step] = network.parameters();
  run.variances = variances.compare(network, setup.micro, context);
  run.activation_bytes = network.activation_bytes();
  run.statistics_bytes = context.memory().batch_norm;
  return run;
}
