// Batch normalisation under accumulation. Trains a small convolutional network on Fashion-MNIST
// several times from the same weights, over the same samples in the same order: with whole batches,
// and with the same batches cut into micro-batches, once in each mode of libgradaccum's batch
// normalisation. The losses of WINDOW equal those of whole batches to rounding. A last run, the
// control, shows the effect of rounding alone: whole batches again, with the samples of each batch
// in reverse order.
// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>

#include "gradaccum/gradaccum.hpp"
#include "report.hpp"
#include "train.hpp"

namespace {

// Ends the program after --help and after an invalid command line.
Options parse(int argc, char** argv) {
  Options options;
  CLI::App app{
      "Trains a convolutional network with batch normalisation on Fashion-MNIST, with whole "
      "batches and with micro-batches in all modes, and compares the runs."};
  app.get_formatter()->column_width(28);
  app.add_option("--batch", options.batch, "Samples per step")
      ->check(CLI::Range(2, 60000))
      ->capture_default_str();
  app.add_option("--accumulation", options.accumulation, "Micro-batches per step")
      ->check(CLI::Range(1, 60000))
      ->capture_default_str();
  app.add_option("--lr", options.lr, "Peak learning rate")->capture_default_str();
  app.add_option("--epochs", options.epochs, "Epochs")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  app.add_option("--samples", options.samples,
                 "Train on this many samples only; default: all 60000")
      ->check(CLI::Range(2, 60000));
  app.add_option("--test-samples", options.test_samples,
                 "Test on this many samples only; default: all 10000")
      ->check(CLI::Range(1, 10000));
  app.add_option("--threads", options.threads, "CPU threads; default: what OpenMP would use")
      ->check(CLI::Range(1, 4096));
  app.add_flag("--control,!--no-control", options.control,
               "Train once more with each batch's samples reversed, to show the effect of rounding "
               "alone; default: on");
  app.add_option("--seed", options.seed, "Seed of the weights and of the order of samples")
      ->capture_default_str();
  app.add_option("--data", options.data, "Folder of the four .gz files; default: Debian's");
  app.add_option("--out", options.out, "Folder for the CSV and the picture")
      ->take_last()
      ->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) try {
  const Options options = parse(argc, argv);
  const std::string data_folder = find_fashion_mnist(options.data);
  std::filesystem::create_directories(options.out);  // before the training, because it may fail
  std::printf("%s\n\n", ga_build_info());
  const Dataset training = load_fashion_mnist(data_folder, "train");
  Dataset test = load_fashion_mnist(data_folder, "t10k");
  if (options.test_samples > 0) test.count = std::min(options.test_samples, test.count);

  const std::int64_t batch = options.batch;
  const std::int64_t micro = (batch + options.accumulation - 1) / options.accumulation;
  // With one micro-batch all modes are the same.
  std::vector<Setup> setups = {{"one batch", GA_BN_MICRO, batch, false},
                               {"MICRO", GA_BN_MICRO, micro, false},
                               {"CUMULATIVE", GA_BN_CUMULATIVE, micro, false},
                               {"WINDOW", GA_BN_WINDOW, micro, false}};
  if (options.control) setups.push_back({"reversed", GA_BN_MICRO, batch, true});
  std::vector<Run> runs;
  for (const Setup& setup : setups) runs.push_back(train(options, setup, training, test));

  print_comparison(runs);
  write_report(options.out, runs);
  const Run& window = runs[3];
  double error = 0;
  for (const LayerVariance& layer : window.variances) error = std::max(error, layer.error);
  std::printf(
      "parity: loss_diff_10=%.3g loss_diff=%.3g acc_full=%.4f acc_window=%.4f var_error=%.3g\n",
      loss_difference(runs, window, 10), loss_difference(runs, window, window.losses.size()),
      runs[0].epochs.back().test_accuracy, window.epochs.back().test_accuracy, error);
  return EXIT_SUCCESS;
} catch (const std::exception& error) {
  std::fprintf(stderr, "batchnorm_cnn: %s\n", error.what());
  return EXIT_FAILURE;
}
