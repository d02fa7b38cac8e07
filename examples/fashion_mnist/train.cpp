// SPDX-License-Identifier: Apache-2.0
#include "train.hpp"

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <numeric>
#include <random>

#include "../common/console.hpp"
#include "../common/data.hpp"

namespace {

using Clock = std::chrono::steady_clock;

// Copies samples to the network's input and their labels to labels.
void load(const Dataset& data, const std::int64_t* indices, std::int64_t samples, Mlp& model,
          std::vector<std::uint8_t>& labels) {
  labels.resize(static_cast<std::size_t>(samples));
  float* const input = model.input();
  for (std::int64_t i = 0; i < samples; ++i) {
    data.image_to(indices[i], input + i * data.pixels);
    labels[static_cast<std::size_t>(i)] = data.labels[static_cast<std::size_t>(indices[i])];
  }
}

// Tests in slices of the micro-batches' size, so that testing needs no more memory than training.
double test_accuracy(const Dataset& data, std::int64_t slice, Mlp& model) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(data.count));
  std::iota(order.begin(), order.end(), 0);
  std::vector<std::uint8_t> labels;
  for (std::int64_t first = 0; first < data.count; first += slice) {
    const std::int64_t samples = std::min(slice, data.count - first);
    load(data, order.data() + first, samples, model, labels);
    model.forward(samples, labels.data(), nullptr);
  }
  return static_cast<double>(model.take_score().correct) / static_cast<double>(data.count);
}

bool is_snapshot(std::int64_t step) {
  return step == 1 || step == 3 || step == 10 || step == 30 || step == 100 || step == 300;
}

}  // namespace

std::string Cut::name() const {
  if (micro == batch) return std::to_string(batch) + (reversed ? " reversed" : "");
  return std::to_string((batch + micro - 1) / micro) + " x " + std::to_string(micro);
}

Summary train(const Options& options, const Cut& cut, const std::string& data_folder, Sink& sink) {
  if (options.threads > 0) omp_set_num_threads(options.threads);
  const Dataset training = load_fashion_mnist(data_folder, "train");
  Dataset test = load_fashion_mnist(data_folder, "t10k");
  if (options.test_samples > 0) test.count = std::min(options.test_samples, test.count);
  const std::int64_t count =
      options.samples > 0 ? std::min(options.samples, training.count) : training.count;
  const std::int64_t windows = (count + cut.batch - 1) / cut.batch;  // the last one may be short

  const std::unique_ptr<Mlp> network = make_mlp(options.device, {training.pixels, 512, 512, 10},
                                                cut.micro, options.seed, options.precision);
  Mlp& model = *network;
  ga_config config = gradaccum::default_config();
  config.device = options.device;
  config.num_threads = options.threads;
  config.accumulation = options.precision.accumulation;
  config.loss_scale = options.loss_scale;
  config.seed = options.seed;
  gradaccum::Context context(config);
  const gradaccum::Group weights = context.add_group(options.weights);
  const gradaccum::Group biases = context.add_group(options.biases);
  ga_schedule schedule = options.schedule;
  schedule.total_steps = options.epochs * windows;
  context.set_schedule(weights, schedule);
  context.set_schedule(biases, schedule);
  context.set_clip(options.clip);
  if (options.dynamic_loss_scale) context.set_loss_scaler(gradaccum::default_loss_scaler());
  if (options.ema > 0) {
    ga_ema ema = gradaccum::default_ema();
    ema.decay = options.ema;
    context.set_ema(ema);
  }
  model.add_to(context, weights, biases);

  // The state of the library is all that a run goes on from, but for its place in the data: the number
  // of windows, which the note in the file keeps.
  const auto save = [&](std::int64_t windows_done) {
    const std::string note = std::to_string(windows_done);
    ga_state_options state = gradaccum::default_state_options();
    state.note = note.c_str();
    context.save(options.save, &state);
  };
  std::int64_t resumed = 0;
  if (options.resume && std::filesystem::exists(options.save)) {
    context.load(options.save);
    resumed = std::stoll(gradaccum::state_note(options.save));
    model.read_parameters();
  }
  sink.parameters(resumed, model.parameters());

  Summary summary;
  Progress progress(cut.name(), options.epochs, count);
  std::mt19937_64 random(options.seed);
  std::vector<std::int64_t> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  std::vector<std::uint8_t> labels;
  std::int64_t step = 0;

  for (std::int64_t epoch = 1; epoch <= options.epochs; ++epoch) {
    const Clock::time_point start = Clock::now();
    std::shuffle(order.begin(), order.end(), random);
    for (std::int64_t first = 0; first < count && !summary.stopped; first += cut.batch) {
      if (step < resumed) {
        ++step;
        continue;
      }
      const std::int64_t in_window = std::min(cut.batch, count - first);
      std::vector<std::int64_t> window(order.begin() + first, order.begin() + first + in_window);
      if (cut.reversed) std::reverse(window.begin(), window.end());
      std::int64_t index = 0;
      for (std::int64_t done = 0; done < in_window; done += cut.micro, ++index) {
        const std::int64_t samples = std::min(cut.micro, in_window - done);
        load(training, window.data() + done, samples, model, labels);
        model.forward(samples, labels.data(), &context);
        // The weight is the number of samples, so a short micro-batch counts for what it holds.
        gradaccum::MicroBatch micro = context.micro_begin(index, static_cast<double>(samples));
        model.backward(samples, micro);
      }
      context.step();
      model.read_parameters();

      ++step;
      const Mlp::Score score = model.take_score();
      sink.window(score.loss / static_cast<double>(in_window));
      progress.window(in_window, score.loss, score.correct);
      if (is_snapshot(step)) sink.parameters(step, model.parameters());
      summary.stopped = sink.stops();
      const bool due = step % options.every == 0 || step == options.epochs * windows;
      if (!options.save.empty() && (due || summary.stopped)) save(step);
    }
    if (summary.stopped) break;
    if (step < resumed || (step == resumed && epoch < options.epochs)) continue;
    summary.seconds += std::chrono::duration<double>(Clock::now() - start).count();
    Epoch ended{step, test_accuracy(test, cut.micro, model)};
    if (options.ema > 0) {
      Mlp::Values averages = model.averages(context);
      model.exchange(averages);
      ended.average_accuracy = test_accuracy(test, cut.micro, model);
      model.exchange(averages);  // swaps the parameters back
    }
    sink.epoch(ended);
    sink.parameters(step, model.parameters());
    progress.epoch(ended.test_accuracy);
  }

  summary.skipped_steps = context.step_result().skipped;
  const ga_memory memory = context.memory();
  summary.samples = count * options.epochs;
  summary.data_bytes = static_cast<std::int64_t>(training.images.size() + test.images.size());
  summary.parameter_bytes = model.parameter_bytes();
  summary.activation_bytes = model.activation_bytes();
  summary.accumulator_bytes = memory.accumulators;
  summary.state_bytes = memory.optimizer_state;
  summary.workspace_bytes = memory.workspace;
  summary.master_bytes = memory.masters;
  summary.average_bytes = memory.averages;
  summary.loss_scale = context.loss_scale();
  return summary;
}
