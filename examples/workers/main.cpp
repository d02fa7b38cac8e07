// Trains a small network on Fashion-MNIST as one of several workers, the ranks of an MPI program: each
// takes its share of every batch, in one micro-batch or in several. Whatever the number of workers and of
// micro-batches, the curve of the test loss is that of whole batches.
//
//   mpirun -n 2 workers --out FOLDER --micro-batches 4     writes the curve of one run
//   workers --out FOLDER --compare                         compares the curves in the folder
//
// `examples/run workers` does all of that. With --shard, each worker keeps only a part of Adam's state.
// SPDX-License-Identifier: Apache-2.0
#include <mpi.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "../common/data.hpp"
#include "../common/figures.hpp"
#include "gradaccum/gradaccum.h"

namespace {

constexpr std::int64_t kPixels = 784, kHidden = 64, kClasses = 10;
constexpr std::int64_t kBatch = 120;         // divided evenly by up to 6 workers
constexpr std::int64_t kMeasured = 20;       // the test loss is taken every so many steps,
constexpr std::int64_t kTestSamples = 2000;  // over so many samples

struct Options {
  std::string data, out = ".";
  std::int64_t micro_batches = 1, steps = 500;
  bool shard = false, compare = false;
};

void check(ga_status status) {
  if (status != GA_OK) throw std::runtime_error(ga_last_error());
}

// Two dense layers: y = W2 relu(W1 x + b1) + b2, softmax and cross-entropy.
struct Network {
  std::vector<float> w1 = std::vector<float>(kHidden * kPixels), b1 = std::vector<float>(kHidden);
  std::vector<float> w2 = std::vector<float>(kClasses * kHidden), b2 = std::vector<float>(kClasses);

  std::array<std::vector<float>*, 4> tensors() { return {&w1, &b1, &w2, &b2}; }

  void fill() {
    std::uint64_t state = 1;
    for (std::vector<float>* t : {&w1, &w2})
      for (float& x : *t) {
        state = state * 6364136223846793005U + 1442695040888963407U;
        x = static_cast<float>((static_cast<double>(state >> 40) / 16777216 - 0.5) *
                               (t == &w1 ? 0.1 : 0.3));
      }
  }

  // Returns the loss of one sample and adds its gradient to `sum` unless that is NULL.
  double sample(const float* x, int label, Network* sum) const {
    std::array<float, kHidden> h;
    for (std::int64_t i = 0; i < kHidden; ++i) {
      float z = b1[static_cast<std::size_t>(i)];
      const float* const row = &w1[static_cast<std::size_t>(i * kPixels)];
      for (std::int64_t j = 0; j < kPixels; ++j) z += row[j] * x[j];
      h[static_cast<std::size_t>(i)] = std::max(z, 0.0f);
    }
    std::array<double, kClasses> y;
    for (std::int64_t c = 0; c < kClasses; ++c) {
      double z = b2[static_cast<std::size_t>(c)];
      for (std::int64_t i = 0; i < kHidden; ++i)
        z += double{w2[static_cast<std::size_t>(c * kHidden + i)]} * h[static_cast<std::size_t>(i)];
      y[static_cast<std::size_t>(c)] = z;
    }
    const double most = *std::max_element(y.begin(), y.end());
    double total = 0;
    for (const double z : y) total += std::exp(z - most);
    const double loss = std::log(total) + most - y[static_cast<std::size_t>(label)];
    if (!sum) return loss;
    std::array<float, kHidden> dh = {};
    for (std::int64_t c = 0; c < kClasses; ++c) {
      const double p = std::exp(y[static_cast<std::size_t>(c)] - most) / total;
      const auto dy = static_cast<float>(p - (c == label));
      sum->b2[static_cast<std::size_t>(c)] += dy;
      for (std::int64_t i = 0; i < kHidden; ++i) {
        const auto at = static_cast<std::size_t>(c * kHidden + i);
        sum->w2[at] += dy * h[static_cast<std::size_t>(i)];
        dh[static_cast<std::size_t>(i)] += dy * w2[at];
      }
    }
    for (std::int64_t i = 0; i < kHidden; ++i) {
      if (!(h[static_cast<std::size_t>(i)] > 0)) continue;
      const float d = dh[static_cast<std::size_t>(i)];
      sum->b1[static_cast<std::size_t>(i)] += d;
      float* const row = &sum->w1[static_cast<std::size_t>(i * kPixels)];
      for (std::int64_t j = 0; j < kPixels; ++j) row[j] += d * x[j];
    }
    return loss;
  }
};

std::string curve_name(std::int64_t workers, std::int64_t micro_batches) {
  return "workers_" + std::to_string(workers) + "x" + std::to_string(micro_batches);
}

void train(const Options& options) {
  int rank = 0, ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const std::string folder = find_fashion_mnist(options.data);
  const Dataset images = load_fashion_mnist(folder, "train");
  const Dataset test = load_fashion_mnist(folder, "t10k");

  Network network, gradient;
  network.fill();
  ga_context* ctx = nullptr;
  check(ga_context_create(nullptr, &ctx));
  ga_optimizer adam;
  check(ga_optimizer_init(&adam, sizeof adam, GA_OPTIMIZER_ADAM, GA_FLAVOR_TORCH));
  ga_group group = -1;
  check(ga_group_add(ctx, &adam, &group));
  const std::int64_t shapes[4][2] = {
      {kHidden, kPixels}, {kHidden, 1}, {kClasses, kHidden}, {kClasses, 1}};
  const char* const names[] = {"w1", "b1", "w2", "b2"};
  for (std::size_t k = 0; k < 4; ++k)
    check(ga_param_add(ctx, group, names[k], network.tensors()[k]->data(), GA_F32,
                       k % 2 == 0 ? 2 : 1, shapes[k], nullptr, nullptr));
  ga_comm_config config;
  check(ga_comm_config_init(&config, sizeof config, GA_COMM_MPI));
  config.mpi_comm = MPI_Comm_c2f(MPI_COMM_WORLD);
  ga_comm* comm = nullptr;
  check(ga_comm_create(&config, &comm));
  ga_comm_options comm_options;
  check(ga_comm_options_init(&comm_options, sizeof comm_options));
  comm_options.shard = options.shard ? GA_SHARD_OPTIMIZER : GA_SHARD_NONE;
  check(ga_context_set_comm(ctx, comm, &comm_options));

  std::ofstream csv;
  if (rank == 0) csv.open(options.out + "/" + curve_name(ranks, options.micro_batches) + ".csv");
  std::vector<float> x(kPixels);
  for (std::int64_t step = 0; step <= options.steps; ++step) {
    if (rank == 0 && step % kMeasured == 0) {
      double loss = 0;
      for (std::int64_t i = 0; i < kTestSamples; ++i) {
        test.image_to(i, x.data());
        loss += network.sample(x.data(), test.labels[static_cast<std::size_t>(i)], nullptr);
      }
      char line[64];
      std::snprintf(line, sizeof line, "%lld,%.9g\n", static_cast<long long>(step),
                    loss / kTestSamples);
      csv << line;
      if (step % (5 * kMeasured) == 0 || step == options.steps) {
        std::printf("%d worker%s x %lld micro-batch%s: step %lld of %lld, test loss %.4f\n", ranks,
                    ranks > 1 ? "s" : "", static_cast<long long>(options.micro_batches),
                    options.micro_batches > 1 ? "es" : "", static_cast<long long>(step),
                    static_cast<long long>(options.steps), loss / kTestSamples);
        std::fflush(stdout);  // mpirun reads it through a pipe
      }
    }
    if (step == options.steps) break;
    // This worker's share of the batch, cut into micro-batches.
    const std::int64_t first = kBatch * rank / ranks, end = kBatch * (rank + 1) / ranks;
    for (std::int64_t k = 0; k < options.micro_batches; ++k) {
      const std::int64_t from = first + (end - first) * k / options.micro_batches;
      const std::int64_t to = first + (end - first) * (k + 1) / options.micro_batches;
      for (std::vector<float>* t : gradient.tensors()) std::fill(t->begin(), t->end(), 0.0f);
      for (std::int64_t i = from; i < to; ++i) {
        const std::int64_t sample = (step * kBatch + i) % images.count;
        images.image_to(sample, x.data());
        network.sample(x.data(), images.labels[static_cast<std::size_t>(sample)], &gradient);
      }
      const void* gradients[4];
      for (std::size_t t = 0; t < 4; ++t) {
        for (float& g : *gradient.tensors()[t])
          g /= static_cast<float>(std::max<std::int64_t>(to - from, 1));
        gradients[t] = gradient.tensors()[t]->data();
      }
      check(ga_accumulate(ctx, gradients, 4, static_cast<double>(to - from), nullptr));
    }
    check(ga_step(ctx, nullptr));
  }
  ga_context_destroy(ctx);
  ga_comm_destroy(comm);
  if (rank == 0 && !csv.flush())
    throw std::runtime_error("the curve could not be written to " + options.out);
}

std::vector<double> read_curve(const std::string& path) {
  std::ifstream csv(path);
  std::vector<double> losses;
  std::string line;
  while (std::getline(csv, line)) losses.push_back(std::stod(line.substr(line.find(',') + 1)));
  if (losses.empty()) throw std::runtime_error(path + " has no curve");
  return losses;
}

// Prints the curves and their distances from the first one; returns whether they lie on each other.
bool compare(const Options& options) {
  const std::int64_t runs[][2] = {{1, 1}, {1, 4}, {2, 1}, {2, 4}};
  const std::vector<double> first = read_curve(options.out + "/" + curve_name(1, 1) + ".csv");
  std::ofstream plot(options.out + "/workers.gp"), csv(options.out + "/workers.csv");
  plot << "set terminal svg size 720,420 background 'white'\nset output 'workers.svg'\n"
          "set datafile separator ','\n"
          "set title 'The same batches on one and two workers, whole and in micro-batches: one "
          "curve'\n"
          "set xlabel 'step'\nset ylabel 'test loss'\nset grid\nplot ";
  double largest = 0;
  std::printf("workers  micro-batches each  test loss at the end  largest distance of the curve\n");
  for (const auto& run : runs) {
    const std::string name = curve_name(run[0], run[1]);
    const std::vector<double> losses = read_curve(options.out + "/" + name + ".csv");
    if (losses.size() != first.size()) throw std::runtime_error(name + ".csv is of another length");
    double distance = 0;
    for (std::size_t i = 0; i < losses.size(); ++i) {
      distance = std::max(distance, std::abs(losses[i] - first[i]));
      csv << static_cast<std::int64_t>(i) * kMeasured << "," << run[0] << "," << run[1] << ","
          << losses[i] << "\n";
    }
    largest = std::max(largest, distance);
    std::printf("%7lld  %18lld  %20.6f  %29.2g\n", static_cast<long long>(run[0]),
                static_cast<long long>(run[1]), losses.back(), distance);
    plot << (run[0] == 1 && run[1] == 1 ? "" : ", ") << "'" << name
         << ".csv' using 1:2 with lines lw " << 7 - (run[0] - 1) * 3 - run[1] / 2 << " title '"
         << run[0] << " worker" << (run[0] > 1 ? "s" : "") << ", " << run[1] << " micro-batch"
         << (run[1] > 1 ? "es" : "") << " each'";
  }
  plot << "\n";
  plot.close();
  csv.close();
  draw_picture(options.out, "workers");
  std::printf(largest <= 1e-3 ? "The four curves are the same, but for rounding.\n"
                              : "The curves differ by more than rounding.\n");
  return largest <= 1e-3;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{"Trains a small network on Fashion-MNIST as one of several MPI workers."};
  app.add_option("--data", options.data, "Folder of Fashion-MNIST");
  app.add_option("--out", options.out, "Folder of the curves")->capture_default_str();
  app.add_option("--micro-batches", options.micro_batches, "Micro-batches of each worker per step")
      ->check(CLI::Range(1, 60))
      ->capture_default_str();
  app.add_option("--steps", options.steps, "Steps")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  app.add_flag("--shard", options.shard,
               "Keep only a part of the optimizer's state on each worker");
  app.add_flag("--compare", options.compare,
               "Compare the curves of 1 and 2 workers, whole and in 4");
  CLI11_PARSE(app, argc, argv);
  if (!options.compare) MPI_Init(&argc, &argv);
  int status = 0;
  try {
    if (options.compare)
      status = compare(options) ? 0 : 1;
    else
      train(options);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "workers: %s\n", e.what());
    if (!options.compare) MPI_Abort(MPI_COMM_WORLD, 1);
    status = 1;
  }
  if (!options.compare) MPI_Finalize();
  return status;
}
