// Trains a small network on Fashion-MNIST twice, from the same weights and over the same samples in
// the same order: with whole batches, and with the same batches accumulated from micro-batches. A
// third run, the control, shows that the two differ by rounding only: it trains on whole batches
// again, with the samples of each batch in reverse order.
//
// With --save, only the run with micro-batches is trained. It saves its state now and then and at
// Ctrl-C; with --resume, it goes on from there, and ends with the weights of a run never stopped.
// SPDX-License-Identifier: Apache-2.0
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "../common/data.hpp"
#include "report.hpp"
#include "train.hpp"

namespace {

// ---- Options ------------------------------------------------------------------------------------

struct NamedOptimizer {
  const char* name;
  ga_optimizer_kind kind;
  double lr, momentum;  // values that suit this network
};
constexpr NamedOptimizer kOptimizers[] = {
    {"sgd", GA_OPTIMIZER_SGD, 0.01, 0.9},
    {"adam", GA_OPTIMIZER_ADAM, 1e-3, 0},
    {"adamw", GA_OPTIMIZER_ADAMW, 1e-3, 0},
    {"rmsprop", GA_OPTIMIZER_RMSPROP, 1e-3, 0},
    {"adagrad", GA_OPTIMIZER_ADAGRAD, 1e-2, 0},
    {"adadelta", GA_OPTIMIZER_ADADELTA, 1, 0},
    {"adamax", GA_OPTIMIZER_ADAMAX, 2e-3, 0},
    {"nadam", GA_OPTIMIZER_NADAM, 1e-3, 0},
    {"radam", GA_OPTIMIZER_RADAM, 2e-3, 0},
    {"lion", GA_OPTIMIZER_LION, 3e-4, 0},
    {"lamb", GA_OPTIMIZER_LAMB, 1e-2, 0},
    {"lars", GA_OPTIMIZER_LARS, 0.1, 0.9},
    {"adafactor", GA_OPTIMIZER_ADAFACTOR, 1e-2, 0},
    {"muon", GA_OPTIMIZER_MUON, 5e-3, 0.95},
    {"adopt", GA_OPTIMIZER_ADOPT, 1e-3, 0},
    {"ademamix", GA_OPTIMIZER_ADEMAMIX, 1e-3, 0},
    {"schedule_free_adamw", GA_OPTIMIZER_SCHEDULE_FREE_ADAMW, 2.5e-3, 0},
    {"schedule_free_sgd", GA_OPTIMIZER_SCHEDULE_FREE_SGD, 0.5, 0},
    {"rowwise_adagrad", GA_OPTIMIZER_ROWWISE_ADAGRAD, 1e-2, 0}};

template <typename Value>
struct Named {
  const char* name;
  Value value;
};
constexpr Named<ga_flavor> kFlavors[] = {
    {"torch", GA_FLAVOR_TORCH}, {"keras", GA_FLAVOR_KERAS}, {"bert", GA_FLAVOR_BERT}};
constexpr Named<ga_schedule_kind> kSchedules[] = {{"constant", GA_SCHEDULE_CONSTANT},
                                                  {"linear", GA_SCHEDULE_LINEAR},
                                                  {"cosine", GA_SCHEDULE_COSINE}};
constexpr Named<ga_device> kDevices[] = {{"cpu", GA_DEVICE_CPU}, {"cuda", GA_DEVICE_CUDA}};
constexpr Named<ga_clip_scope> kClipScopes[] = {
    {"global", GA_CLIP_GLOBAL}, {"per-tensor", GA_CLIP_PER_TENSOR}, {"agc", GA_CLIP_AGC}};
constexpr Named<ga_dtype> kDtypes[] = {
    {"f32", GA_F32}, {"f64", GA_F64}, {"bf16", GA_BF16}, {"f16", GA_F16}};
constexpr Named<ga_dtype> kAccumulators[] = {{"f32", GA_F32}, {"bf16", GA_BF16}, {"f16", GA_F16}};
constexpr Named<ga_dtype> kStates[] = {{"f32", 0}, {"bf16", GA_BF16}, {"8bit", GA_STATE_8BIT}};
constexpr Named<ga_accumulation> kAccumulations[] = {{"plain", GA_ACCUMULATE_PLAIN},
                                                     {"running-mean", GA_ACCUMULATE_RUNNING_MEAN},
                                                     {"compensated", GA_ACCUMULATE_COMPENSATED},
                                                     {"stochastic", GA_ACCUMULATE_STOCHASTIC}};

template <typename Table>
std::vector<std::string> names(const Table& table) {
  std::vector<std::string> all;
  for (const auto& entry : table) all.emplace_back(entry.name);
  return all;
}

// The command line has been checked: the name is in the table.
template <typename Table>
const auto& named(const Table& table, const std::string& name) {
  return *std::find_if(std::begin(table), std::end(table),
                       [&name](const auto& entry) { return entry.name == name; });
}

// Checks combinations of options. The library itself refuses other invalid ones, with a message.
void check_together(const Options& options, bool has_momentum) {
  const auto refuse = [](const char* option, const char* why) {
    throw CLI::ValidationError(option, why);
  };
  const Precision& precision = options.precision;
  const std::int32_t kind = options.weights.kind;
  const bool is_16_bit = precision.accumulators == GA_F16 || precision.accumulators == GA_BF16;
  if (has_momentum && kind != GA_OPTIMIZER_SGD && kind != GA_OPTIMIZER_RMSPROP &&
      kind != GA_OPTIMIZER_LARS && kind != GA_OPTIMIZER_MUON) {
    refuse("--momentum", "only sgd, rmsprop, lars and muon have it");
  }
  if (kind == GA_OPTIMIZER_MUON && precision.parameters == GA_F64) {
    refuse("--params", "muon has no f64");
  }
  if (precision.gradients == GA_F64 && precision.parameters != GA_F64) {
    refuse("--dtype", "f64 gradients need --params f64");
  }
  if (precision.accumulators != 0 && precision.parameters == GA_F64) {
    refuse("--accumulator", "f64 parameters have f64 accumulators");
  }
  if (!is_16_bit && (precision.accumulation == GA_ACCUMULATE_COMPENSATED ||
                     precision.accumulation == GA_ACCUMULATE_STOCHASTIC)) {
    refuse("--accumulation-mode", "this mode needs --accumulator bf16 or f16");
  }
}

// The weights get the chosen optimizer. Biases have no weight decay, which in torch's flavor also
// excludes them from the trust ratios of lars and lamb. muon takes matrices only, so the biases get
// AdamW then.
void set_optimizers(Options& options, const NamedOptimizer& chosen, ga_flavor flavor) {
  options.weights = gradaccum::default_optimizer(chosen.kind, flavor);
  options.weights.lr = chosen.lr;
  options.weights.momentum = chosen.momentum;
  if (chosen.kind == GA_OPTIMIZER_LARS) {
    options.weights.trust_coefficient = 0.02;  // so that one lr suits weights and biases
    options.weights.weight_decay = 1e-4;
  }
  options.biases = options.weights;
  if (chosen.kind == GA_OPTIMIZER_MUON) {
    options.weights.adjust_lr = GA_ADJUST_MATCH_RMS;  // so that one lr suits weights and biases
    options.biases = gradaccum::default_optimizer(GA_OPTIMIZER_ADAMW);
    options.biases.lr = chosen.lr;
  }
  options.biases.weight_decay = 0;
}

// Ends the program after --help and after an invalid command line.
Options parse(int argc, char** argv) {
  Options options;
  std::string optimizer = "sgd", flavor = "torch", schedule = "cosine", clip_scope = "global";
  std::string dtype = "f32", params = "f32", accumulator = "f32", accumulation = "plain";
  std::string state = "f32";
  std::string loss_scale = "1", device = "cpu";
  double lr = 0, momentum = 0, weight_decay = 0, clip = 0;
  options.clip = gradaccum::default_clip();

  CLI::App app{
      "Trains an MLP (784-512-512-10) on Fashion-MNIST twice, with whole batches and with the "
      "same batches accumulated from micro-batches, and compares the two runs."};
  app.get_formatter()->column_width(28);
  const auto choice = [&app](const char* option, std::string& value, const char* text,
                             const auto& table) {
    return app.add_option(option, value, text)
        ->check(CLI::IsMember(names(table)))
        ->capture_default_str();
  };
  choice("--device", device, "Device of the network and the library", kDevices);
  choice("--optimizer", optimizer, "Optimizer", kOptimizers);
  choice("--flavor", flavor, "Framework that defines the optimizer", kFlavors);
  const CLI::Option* has_lr =
      app.add_option("--lr", lr, "Peak learning rate; default: one that suits the optimizer");
  const CLI::Option* has_momentum = app.add_option(
      "--momentum", momentum, "Momentum; default: sgd and lars 0.9, muon 0.95, rmsprop 0");
  const CLI::Option* has_weight_decay =
      app.add_option("--weight-decay", weight_decay,
                     "Weight decay of the weights, not of the biases; default: the optimizer's");
  choice("--schedule", schedule, "Schedule of the learning rate", kSchedules);
  app.add_option("--warmup", options.schedule.warmup_steps, "Steps of linear warm-up");
  CLI::Option* has_clip = app.add_option(
      "--clip", clip,
      "Clip the gradient to this 2-norm; with agc, each neuron's to this part of its weights'");
  choice("--clip-scope", clip_scope, "Norm that --clip limits", kClipScopes)->needs(has_clip);
  app.add_option("--clip-value", options.clip.max_value,
                 "Clip each element of the gradient to this magnitude");
  choice("--dtype", dtype, "Dtype of the gradients", kDtypes);
  choice("--params", params, "Dtype of the parameters; 16-bit ones have f32 master weights",
         kDtypes);
  const CLI::Option* has_accumulator =
      choice("--accumulator", accumulator, "Dtype of the accumulators", kAccumulators);
  choice("--accumulation-mode", accumulation, "How gradients add up", kAccumulations);
  choice("--state", state, "State of the weights' optimizer; the biases' is f32", kStates);
  app.add_option("--loss-scale", loss_scale,
                 "Factor of the loss in the backward pass: a number or dynamic")
      ->check([](const std::string& value) {
        return value == "dynamic" || CLI::Number(value).empty() ? std::string()
                                                                : value + " is not a number";
      })
      ->capture_default_str();
  app.add_option("--ema", options.ema,
                 "Also test with the exponential moving average of the parameters, of this decay")
      ->check(CLI::Range(0.0, 1.0));
  app.add_option("--batch", options.batch, "Samples per step")
      ->check(CLI::Range(1, 60000))
      ->capture_default_str();
  app.add_option("--accumulation", options.accumulation, "Micro-batches per step in the second run")
      ->check(CLI::Range(1, 60000))
      ->capture_default_str();
  app.add_option("--epochs", options.epochs, "Epochs")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  app.add_option("--samples", options.samples,
                 "Train on this many samples only; default: all 60000")
      ->check(CLI::Range(1, 60000));
  app.add_option("--test-samples", options.test_samples,
                 "Test on this many samples only; default: all 10000")
      ->check(CLI::Range(1, 10000));
  app.add_option("--threads", options.threads, "CPU threads; default: what OpenMP would use")
      ->check(CLI::Range(1, 4096));
  app.add_flag("--control,!--no-control", options.control,
               "Train a third time with each batch's samples reversed, to show the effect of "
               "rounding alone; default: on");
  app.add_option("--seed", options.seed, "Seed of the weights and of the order of samples")
      ->capture_default_str();
  app.add_option("--data", options.data, "Folder of the four .gz files; default: Debian's");
  app.add_option("--out", options.out, "Folder for the CSV and the picture")
      ->take_last()
      ->capture_default_str();
  CLI::Option* has_save =
      app.add_option("--save", options.save,
                     "Train the second run alone, and save its state to this file, at Ctrl-C too");
  app.add_option("--every", options.every, "Windows from save to save")
      ->check(CLI::Range(1, 1000000000))
      ->needs(has_save)
      ->capture_default_str();
  app.add_flag("--resume", options.resume, "Go on from the file of --save, if there is one")
      ->needs(has_save);
  try {
    app.parse(argc, argv);
    set_optimizers(options, named(kOptimizers, optimizer), named(kFlavors, flavor).value);
    options.weights.state_dtype = named(kStates, state).value;
    options.device = named(kDevices, device).value;
    options.precision.parameters = named(kDtypes, params).value;
    options.precision.gradients = named(kDtypes, dtype).value;
    options.precision.accumulation = named(kAccumulations, accumulation).value;
    if (has_accumulator->count()) {
      options.precision.accumulators = named(kAccumulators, accumulator).value;
    }
    check_together(options, has_momentum->count() > 0);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }

  if (has_lr->count()) options.weights.lr = options.biases.lr = lr;
  if (has_momentum->count()) options.weights.momentum = options.biases.momentum = momentum;
  if (has_weight_decay->count()) options.weights.weight_decay = weight_decay;
  options.dynamic_loss_scale = loss_scale == "dynamic";
  if (!options.dynamic_loss_scale) options.loss_scale = std::stod(loss_scale);
  const std::int64_t warmup = options.schedule.warmup_steps;
  options.schedule = gradaccum::default_schedule(named(kSchedules, schedule).value);
  options.schedule.warmup_steps = warmup;
  if (has_clip->count()) {
    options.clip.scope = named(kClipScopes, clip_scope).value;
    options.clip.max_norm = options.clip.agc_factor = clip;
    options.clip.agc_units = GA_AGC_TORCH;  // weights are [out, in]
  }
  return options;
}

// ---- A run in a process of its own --------------------------------------------------------------

// A run has a process of its own so that the peak memory reported by the system is this run's
// alone. It sends its results through a pipe as messages: a head, then bytes.
enum class Kind : std::int32_t { kLoss, kEpoch, kParameters, kSummary };
struct Head {
  Kind kind{};
  std::int64_t step = 0;
  std::uint64_t bytes = 0;
};

class PipeSink : public Sink {
 public:
  explicit PipeSink(int file) : file_(file) {}

  void window(double mean_loss) override { send(Kind::kLoss, mean_loss); }
  void epoch(const Epoch& epoch) override { send(Kind::kEpoch, epoch); }
  void summary(const Summary& summary) { send(Kind::kSummary, summary); }
  void parameters(std::int64_t step, const Mlp::Values& tensors) override {
    Head head{Kind::kParameters, step, 0};
    for (const auto& tensor : tensors) head.bytes += tensor.size() * sizeof(float);
    write_all(&head, sizeof head);
    for (const auto& tensor : tensors) write_all(tensor.data(), tensor.size() * sizeof(float));
  }

 private:
  template <typename T>
  void send(Kind kind, const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    const Head head{kind, 0, sizeof value};
    write_all(&head, sizeof head);
    write_all(&value, sizeof value);
  }

  void write_all(const void* data, std::size_t size) {
    for (const char* at = static_cast<const char*>(data); size > 0;) {
      const ssize_t written = write(file_, at, size);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) throw std::system_error(errno, std::generic_category(), "pipe");
      at += written;
      size -= static_cast<std::size_t>(written);
    }
  }

  int file_;
};

// False at the end of the pipe.
bool read_all(int file, void* data, std::size_t size) {
  for (char* at = static_cast<char*>(data); size > 0;) {
    const ssize_t got = read(file, at, size);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    at += got;
    size -= static_cast<std::size_t>(got);
  }
  return true;
}

template <typename T>
T read_value(int file) {
  T value{};
  if (!read_all(file, &value, sizeof value)) throw std::runtime_error("a run ended in mid-message");
  return value;
}

void receive(int file, Run& run) {
  for (Head head; read_all(file, &head, sizeof head);) {
    switch (head.kind) {
      case Kind::kLoss:
        run.losses.push_back(read_value<double>(file));
        break;
      case Kind::kEpoch:
        run.epochs.push_back(read_value<Epoch>(file));
        break;
      case Kind::kSummary:
        run.summary = read_value<Summary>(file);
        break;
      case Kind::kParameters:
        std::vector<float>& values = run.parameters[head.step];
        values.resize(head.bytes / sizeof(float));
        if (!read_all(file, values.data(), head.bytes)) {
          throw std::runtime_error("a run ended in the middle of a message");
        }
        break;
    }
  }
}

// A forked child starts with its parent's memory, so all children are created first, while the
// parent holds little, and wait for their turn.
struct Child {
  pid_t id;
  int start, results;  // ends of pipes: a byte written to start starts the run
};

Child make_child(const Options& options, const Cut& cut, const std::string& data_folder) {
  int start[2], results[2];
  if (pipe(start) != 0 || pipe(results) != 0) {
    throw std::system_error(errno, std::generic_category(), "pipe");
  }
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child < 0) throw std::system_error(errno, std::generic_category(), "fork");
  if (child > 0) {
    close(start[0]);
    close(results[1]);
    return {child, start[1], results[0]};
  }
  close(start[1]);
  close(results[0]);
  char turn;
  if (!read_all(start[0], &turn, 1)) _exit(EXIT_FAILURE);  // the parent has ended
  try {
    PipeSink sink(results[1]);
    sink.summary(train(options, cut, data_folder, sink));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fashion_mnist: %s\n", error.what());
    _exit(EXIT_FAILURE);
  }
  std::fflush(nullptr);
  _exit(EXIT_SUCCESS);  // without the destructors and exit handlers of the parent
}

Run run_child(const Child& child, const Cut& cut) {
  Run run(cut);
  if (write(child.start, "", 1) != 1) throw std::runtime_error("a run could not be started");
  receive(child.results, run);
  int status = 0;
  rusage usage{};
  while (wait4(child.id, &status, 0, &usage) < 0 && errno == EINTR) continue;
  if (!WIFEXITED(status) || WEXITSTATUS(status) != EXIT_SUCCESS) {
    throw std::runtime_error("the run \"" + cut.name() + "\" failed");
  }
  run.peak_bytes = std::int64_t{usage.ru_maxrss} * 1024;
  return run;
}

// ---- A run that can be stopped ------------------------------------------------------------------

std::atomic<bool> interrupted{false};

// Lets a thread of its own wait for Ctrl-C, and all other threads block it: oneDNN 2 points the stack
// pointer into its own memory while it multiplies, and a signal would then write there.
void watch_for_ctrl_c() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::thread([signals] {
    int number = 0;
    sigwait(&signals, &number);
    interrupted = true;
    sigwait(&signals, &number);  // a second one does not wait for the state to be saved
    _exit(128 + number);
  }).detach();
}

class StoppableSink : public Sink {
 public:
  void window(double) override {}
  void epoch(const Epoch& epoch) override {
    std::printf("step %lld: test accuracy %.4f\n", static_cast<long long>(epoch.last_step),
                epoch.test_accuracy);
  }
  void parameters(std::int64_t, const Mlp::Values&) override {}
  bool stops() override { return interrupted; }
};

int train_stoppable(const Options& options, const std::string& data_folder) {
  watch_for_ctrl_c();
  StoppableSink sink;
  const Summary summary =
      train(options, Cut(options.batch, options.accumulation), data_folder, sink);
  std::printf("%s; the state is in %s\n", summary.stopped ? "stopped" : "done",
              options.save.c_str());
  return EXIT_SUCCESS;
}

}  // namespace

int main(int argc, char** argv) try {
  const Options options = parse(argc, argv);
  const std::string data_folder = find_fashion_mnist(options.data);
  if (!options.save.empty()) return train_stoppable(options, data_folder);
  std::filesystem::create_directories(options.out);  // before the training, because it may fail
  std::printf("%s\n\n", ga_build_info());

  std::vector<Cut> cuts = {Cut(options.batch, 1), Cut(options.batch, options.accumulation)};
  if (options.control) {
    cuts.emplace_back(options.batch, 1);
    cuts.back().reversed = true;
  }
  std::vector<Child> children;
  for (const Cut& cut : cuts) children.push_back(make_child(options, cut, data_folder));
  std::vector<Run> runs;
  for (std::size_t i = 0; i < cuts.size(); ++i) runs.push_back(run_child(children[i], cuts[i]));

  print_comparison(runs);
  write_report(options.out, runs);
  std::printf("parity: max_abs_diff=%.9g acc_full=%.4f acc_accum=%.4f\n",
              parameter_differences(runs[0], runs[1]).rbegin()->second,
              runs[0].epochs.back().test_accuracy, runs[1].epochs.back().test_accuracy);
  return EXIT_SUCCESS;
} catch (const std::exception& error) {
  std::fprintf(stderr, "fashion_mnist: %s\n", error.what());
  return EXIT_FAILURE;
}
