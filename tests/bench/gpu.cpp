// SPDX-License-Identifier: Apache-2.0
//
// The figures G1, G2, G3, G5 and G6 on a CUDA device. The yardstick of G1 and G6 is a device-to-device
// copy in the same rounds; the targets are fractions of the copy's bytes per second. G4 is in
// torch_cuda.py. `run --gpu` in this folder builds and starts both.
#include <cuda_runtime.h>
#include <gradaccum/gradaccum.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "contiguous.hpp"
#include "cublas.hpp"
#include "harness.hpp"
#include "layout.hpp"
#ifdef GA_SIMULATED
#include "simulator.hpp"
#else
#include <cuda.h>
#include <cuda_profiler_api.h>
#endif

namespace bench {
namespace {

using bench::check;

constexpr int kSkipped = 77;

struct Options {
  bool quick = false;
  bool check = false;
  std::set<std::string> only;
  std::string profile;
  std::string json = "bench_gpu.json";

  bool wants(const char* id) const { return only.empty() || only.count(id) != 0; }
  bool wants_pass(const char* name) const { return profile.empty() || profile == name; }
  int rounds() const { return check ? 1 : quick ? 7 : 15; }
};

void check(cudaError_t error, const char* doing) {
  if (error != cudaSuccess) {
    throw std::runtime_error(
        format("%s: %s: %s", doing, cudaGetErrorName(error), cudaGetErrorString(error)));
  }
}

void check(cublasStatus_t status, const char* doing) {
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw std::runtime_error(format("%s: cuBLAS status %d", doing, static_cast<int>(status)));
  }
}

// ---- The device ---------------------------------------------------------------------------------

class Memory {
 public:
  explicit Memory(size_t bytes) : bytes_(bytes) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes), format("%zu MiB of device memory", bytes >> 20).c_str());
    memory_.reset(memory);
  }

  template <class T = float>
  T* as() const {
    return static_cast<T*>(memory_.get());
  }
  size_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(void* memory) const { cudaFree(memory); }
  };
  size_t bytes_;
  std::unique_ptr<void, Free> memory_;
};

struct DestroyStream {
  void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
};
using Stream = std::unique_ptr<std::remove_pointer_t<cudaStream_t>, DestroyStream>;

// Makes a stream, because the default stream cannot be captured.
Stream make_stream() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
  return Stream(stream);
}

void wait(const Stream& stream) { check(cudaStreamSynchronize(stream.get()), "the stream's work"); }

// Fills memory with small numbers of both signs, which depend on seed. size: 4 (f32) or 2 (bf16).
void fill(const Memory& memory, size_t size, uint32_t seed) {
  const size_t count = std::min(memory.bytes() / size, size_t{1} << 22);
  std::vector<char> pattern(count * size);
  uint32_t state = 2654435761u * (seed + 1);
  for (size_t k = 0; k < count; ++k) {
    state = state * 1664525u + 1013904223u;
    const float value = 1e-3f * (static_cast<float>(state >> 8) / 8388608.0f - 1.0f);
    uint32_t bits = 0;
    memcpy(&bits, &value, sizeof bits);
    if (size == 4) {
      memcpy(&pattern[4 * k], &bits, 4);
    } else {
      const auto upper = static_cast<uint16_t>(bits >> 16);
      memcpy(&pattern[2 * k], &upper, 2);
    }
  }
  for (size_t at = 0; at < memory.bytes(); at += pattern.size()) {
    check(cudaMemcpy(memory.as<char>() + at, pattern.data(),
                     std::min(pattern.size(), memory.bytes() - at), cudaMemcpyHostToDevice),
          "filling device memory");
  }
}

std::vector<float> read(const Memory& memory) {
  std::vector<float> result(memory.bytes() / sizeof(float));
  check(cudaMemcpy(result.data(), memory.as(), memory.bytes(), cudaMemcpyDeviceToHost), "a copy");
  return result;
}

// As many blocks as the device holds, which is what the library launches.
int64_t blocks_at_a_time() {
  int device = 0, multiprocessors = 0, threads = 0;
  check(cudaGetDevice(&device), "the device");
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
        "the multiprocessors");
  check(cudaDeviceGetAttribute(&threads, cudaDevAttrMaxThreadsPerMultiProcessor, device),
        "the threads");
  return int64_t{multiprocessors} * (threads / 256);
}

// ---- Races on the device ------------------------------------------------------------------------

struct Events {
  Events() {
    check(cudaEventCreate(&start), "an event");
    check(cudaEventCreate(&end), "an event");
  }
  ~Events() {
    cudaEventDestroy(start);
    cudaEventDestroy(end);
  }
  cudaEvent_t start{}, end{};
};

// As race(), but measures the seconds between two events on the stream. The fill before the first
// event lets the host run ahead of the device, and evicts the buffers from the cache.
std::vector<Times> race_on(const Stream& stream, int rounds, const std::vector<Side>& sides) {
  const Memory lead(size_t{256} << (rounds > 1 ? 20 : 10));
  const Events events;
  std::vector<Times> result(sides.size());
  for (int round = -1; round < rounds; ++round) {
    for (size_t k = 0; k < sides.size(); ++k) {
      const size_t side = (k + static_cast<size_t>(round + 1)) % sides.size();
      if (sides[side].prepare) sides[side].prepare();
      check(cudaMemsetAsync(lead.as(), 0, lead.bytes(), stream.get()), "a fill");
      check(cudaEventRecord(events.start, stream.get()), "an event");
      sides[side].run();
      check(cudaEventRecord(events.end, stream.get()), "an event");
      check(cudaEventSynchronize(events.end), "a race");
      float milliseconds = 0;
      check(cudaEventElapsedTime(&milliseconds, events.start, events.end), "a race");
      if (round >= 0) result[side].push_back(1e-3 * static_cast<double>(milliseconds));
    }
  }
  return result;
}

// ---- Programs that use the library --------------------------------------------------------------

struct Setting {
  int32_t optimizer = GA_OPTIMIZER_ADAMW;
  double momentum = 0;
  int32_t gradient_dtype = GA_F32;
  int32_t dtype = GA_F32;  // of the parameters; or GA_BF16
  ga_master master = GA_MASTER_F32;
  int32_t state_dtype = 0;
  ga_precision precision = GA_PRECISION_F32;
  ga_clip_scope clip = GA_CLIP_GLOBAL;
  ga_gradient_life gradient_life = GA_GRADIENTS_CONSUMED;
};

// A context over the parameters in a block, with clipping, by the global norm unless the setting says otherwise.
class Context {
 public:
  Context(const Layout& layout, void* parameters, const Stream& stream,
          const Setting& setting = {}) {
    ga_config config;
    check(ga_config_init(&config, sizeof config));
    config.device = GA_DEVICE_CUDA;
    config.stream = stream.get();
    config.gradient_life = setting.gradient_life;
    ga_context* made = nullptr;
    check(ga_context_create(&config, &made));
    ctx_.reset(made);
    ga_optimizer optimizer;
    check(ga_optimizer_init(&optimizer, sizeof optimizer, setting.optimizer, GA_FLAVOR_TORCH));
    optimizer.lr = 1e-5;
    optimizer.momentum = setting.momentum;
    optimizer.max_grad_norm = 0;
    optimizer.state_dtype = setting.state_dtype;
    optimizer.ns_precision = setting.precision;
    ga_group group = 0;
    check(ga_group_add(made, &optimizer, &group));
    ga_clip clip;
    check(ga_clip_init(&clip, sizeof clip));
    clip.scope = setting.clip;
    if (setting.clip == GA_CLIP_GLOBAL) clip.max_norm = 1e-3;
    check(ga_context_set_clip(made, &clip));
    ga_param_options options{};
    options.struct_size = sizeof options;
    options.gradient_dtype = setting.gradient_dtype;
    options.master = setting.master;
    const size_t size = setting.dtype == GA_F32 ? 4 : 2;
    for (size_t k = 0; k < layout.shapes.size(); ++k) {
      const Shape& shape = layout.shapes[k];
      check(ga_param_add(
          made, group, ("tensor" + std::to_string(k)).c_str(),
          static_cast<char*>(parameters) + size * static_cast<size_t>(layout.offsets[k]),
          setting.dtype, static_cast<int32_t>(shape.size()), shape.data(), &options, nullptr));
    }
  }

  void accumulate(const Pointers& gradients) {
    check(ga_accumulate(get(), gradients.data(), gradients.size(), 1.0, nullptr));
  }
  void step() { check(ga_step(get(), nullptr)); }
  void discard() { check(ga_discard(get())); }

  void window(const Pointers& gradients, int micros) {
    for (int micro = 0; micro < micros; ++micro) accumulate(gradients);
    step();
  }

  // Returns the result of the last window; waits.
  ga_step_result result() {
    ga_step_result result;
    result.struct_size = sizeof result;
    check(ga_step_result_get(get(), 0, 1, &result));
    return result;
  }

  // Throws if a step was skipped, because a skipped step is fast.
  void require_applied() {
    if (result().skipped != 0) throw std::runtime_error("a step was skipped");
  }

  ga_context* get() const { return ctx_.get(); }

 private:
  struct Destroy {
    void operator()(ga_context* ctx) const { ga_context_destroy(ctx); }
  };
  std::unique_ptr<ga_context, Destroy> ctx_;
};

// ---- G1: single passes ----------------------------------------------------------------------------

// Copies as many bytes as a pass moves, half of them read and half written, but at least 1 GiB.
class Copy {
 public:
  Copy(const Options& options, const Stream& stream, size_t most)
      : stream_(stream),
        least_(options.check ? 4096 : size_t{1} << 30),
        from_(std::max(most / 2, least_)),
        to_(from_.bytes()) {
    fill(from_, 4, 9);
  }

  size_t moved(size_t bytes) const { return 2 * std::max(bytes / 2, least_); }

  std::function<void()> like(size_t bytes) const {
    return [this, size = moved(bytes) / 2] {
      check(cudaMemcpyAsync(to_.as(), from_.as(), size, cudaMemcpyDeviceToDevice, stream_.get()),
            "a copy");
    };
  }

 private:
  const Stream& stream_;
  size_t least_;
  Memory from_, to_;
};

struct Pass {
  const char* name;
  size_t bytes;   // per parameter
  double target;  // 0: none
  const char* text;
  std::function<void()> run, prepare;
};

// Runs a pass twice, the second time between marks for a profiler.
void profile(const Stream& stream, const Pass& pass) {
  for (const bool marked : {false, true}) {
    if (pass.prepare) pass.prepare();
    wait(stream);
#ifndef GA_SIMULATED
    if (marked) check(cudaProfilerStart(), "a profiler");
#endif
    pass.run();
    wait(stream);
#ifndef GA_SIMULATED
    if (marked) check(cudaProfilerStop(), "a profiler");
#endif
    if (marked) printf("profiled: %s\n", pass.name);
  }
}

void pass_figures(const Options& options, Report& report, const Stream& stream, const Copy& copy,
                  const Layout& layout, const std::vector<Pass>& passes) {
  if (!options.profile.empty()) {
    for (const Pass& pass : passes) {
      if (options.wants_pass(pass.name)) profile(stream, pass);
    }
    return;
  }
  const auto n = static_cast<size_t>(layout.n);
  std::vector<Side> sides;
  for (const Pass& pass : passes) {
    sides.push_back({copy.like(n * pass.bytes), {}});
    sides.push_back({pass.run, pass.prepare});
  }
  const std::vector<Times> t = race_on(stream, options.rounds(), sides);
  for (size_t k = 0; k < passes.size(); ++k) {
    const Pass& pass = passes[k];
    if (options.check) {
      printf("%s: ran\n", pass.name);
      continue;
    }
    const auto moved = static_cast<double>(n * pass.bytes);
    const auto copied = static_cast<double>(copy.moved(n * pass.bytes));
    const Times &base = t[2 * k], &mine = t[2 * k + 1];
    report.figure(pass.name, (moved / copied) * (base / mine),
                  pass.target > 0 ? Sense::kAtLeast : Sense::kNone, pass.target,
                  format("%s: %zu bytes per parameter, %.3f ms, %.0f GB/s; copy %.0f GB/s",
                         pass.text, pass.bytes, 1e3 * median(mine), 1e-9 * moved / median(mine),
                         1e-9 * copied / median(base)));
  }
}

// Accumulates the gradients twice and compares the sums and their squares with the host's. Throws if they differ.
void check_contiguous(const Memory& gradients, const Memory& target, const Memory& squares,
                      const std::function<void()>& accumulate, const Stream& stream) {
  check(cudaMemset(target.as(), 0, target.bytes()), "a fill");
  for (int time = 0; time < 2; ++time) accumulate();
  wait(stream);
  const std::vector<float> g = read(gradients), a = read(target);
  std::vector<double> sums(squares.bytes() / sizeof(double));
  check(cudaMemcpy(sums.data(), squares.as(), squares.bytes(), cudaMemcpyDeviceToHost), "a copy");
  double want = 0, got = 0;
  for (size_t k = 0; k < g.size(); ++k) {
    if (a[k] != g[k] + g[k]) throw std::runtime_error("G1_accumulate_contiguous: a wrong sum");
    want += static_cast<double>(a[k]) * static_cast<double>(a[k]);
  }
  for (const double sum : sums) got += sum;
  if (!(std::fabs(got - want) <= 1e-5 * want))
    throw std::runtime_error("G1_accumulate_contiguous: wrong sums of squares");
}

void g1(const Options& options, Report& report) {
  const Layout layout = options.check   ? Layout({{17}, {300, 30}, {1000, 70}, {}})
                        : options.quick ? gpt2(12)
                                        : gpt2(24);
  const auto n = static_cast<size_t>(layout.n);
  const Stream stream = make_stream();
  report.heading(format("G1: passes over %zu tensors, %.4g M parameters, relative to a copy's GB/s",
                        layout.shapes.size(), 1e-6 * static_cast<double>(n)));
  const Memory p(4 * n), g(4 * n), halves(2 * n);
  fill(p, 4, 1);
  fill(g, 4, 2);
  fill(halves, 2, 3);
  const Copy copy(options, stream, 40 * n);
  const Pointers gradients = layout.pointers(g.as());
  {
    Setting with_halves;
    with_halves.gradient_dtype = GA_BF16;
    Context open(layout, p.as(), stream), first(layout, p.as(), stream),
        open_halves(layout, p.as(), stream, with_halves);
    const Pointers half_gradients = layout.pointers(halves.as<uint16_t>());
    open.accumulate(gradients);
    open_halves.accumulate(half_gradients);
    const auto accumulate = [&] { open.accumulate(gradients); };
    const Memory target(4 * n), squares(8 * ((n + kContiguousChunk - 1) / kContiguousChunk));
    const int64_t blocks = blocks_at_a_time();
    const auto contiguous = [&] {
      accumulate_contiguous(target.as(), g.as(), layout.n, 1, squares.as<double>(), blocks,
                            stream.get());
    };
    if (options.check) check_contiguous(g, target, squares, contiguous, stream);
    pass_figures(options, report, stream, copy, layout,
                 {{"G1_accumulate_f32", 12, 0.93, "A += alpha g", accumulate, {}},
                  {"G1_accumulate_norm",
                   12,
                   0.92,
                   "the same again, which includes norm and finite check",
                   accumulate,
                   {}},
                  {"G1_accumulate_contiguous",
                   12,
                   0,
                   "the same in one piece of memory a block, which the library does not do",
                   contiguous,
                   {}},
                  {"G1_accumulate_bf16",
                   10,
                   0.93,
                   "bf16 gradients into f32",
                   [&] { open_halves.accumulate(half_gradients); },
                   {}},
                  {"G1_overwrite", 8, 0.93, "the first micro-batch of a window",
                   [&] { first.accumulate(gradients); }, [&] { first.discard(); }}});
  }
  Setting agc;
  agc.clip = GA_CLIP_AGC;
  struct Step {
    Pass pass;
    Setting setting;
  };
  for (const Step& step :
       {Step{{"G1_adamw", 28, 0.90, "step, clip factor included", {}, {}}, {}},
        Step{{"G1_sgd_momentum", 20, 0.92, "step, clip factor included", {}, {}},
             {GA_OPTIMIZER_SGD, 0.9}},
        Step{{"G1_adamw_agc", 36, 0, "step, after the norms of units of p and g", {}, {}}, agc},
        Step{{"G1_lamb", 40, 0.85, "step, two passes", {}, {}}, {GA_OPTIMIZER_LAMB}}}) {
    if (!options.wants_pass(step.pass.name)) continue;
    Context context(layout, p.as(), stream, step.setting);
    Pass pass = step.pass;
    pass.run = [&] { context.step(); };
    pass.prepare = [&] { context.accumulate(gradients); };
    pass_figures(options, report, stream, copy, layout, {pass});
    context.require_applied();
  }
}

// ---- G2 and G3: the host, and graphs ----------------------------------------------------------------

struct DestroyGraph {
  void operator()(cudaGraph_t graph) const { cudaGraphDestroy(graph); }
  void operator()(cudaGraphExec_t graph) const { cudaGraphExecDestroy(graph); }
};
using Graph = std::unique_ptr<std::remove_pointer_t<cudaGraph_t>, DestroyGraph>;
using Executable = std::unique_ptr<std::remove_pointer_t<cudaGraphExec_t>, DestroyGraph>;

// Captures in a mode in which any call that waits, on this thread or another, ends the capture.
Graph capture(const Stream& stream, const std::function<void()>& work) {
  check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal), "a capture");
  cudaGraph_t graph = nullptr;
  try {
    work();
  } catch (...) {
    cudaStreamEndCapture(stream.get(), &graph);
    if (graph) cudaGraphDestroy(graph);
    throw;
  }
  check(cudaStreamEndCapture(stream.get(), &graph), "a capture");
  return Graph(graph);
}

Executable instantiate(const Graph& graph) {
  cudaGraphExec_t made = nullptr;
  check(cudaGraphInstantiate(&made, graph.get(), 0), "a graph");
  return Executable(made);
}

struct Kernels {
  double work = 0, uploads = 0;
};

bool is_upload(const std::string& name) { return name.find("Upload") != std::string::npos; }

// Counts the kernels that a window launches. Kernels that write tables are counted separately: a
// captured window brings its tables along, while a window outside a graph writes tables only after
// a change.
#ifdef GA_SIMULATED
Kernels kernels_of(const Stream& stream, const std::function<void()>& window) {
  window();
  wait(stream);
  ga::sim::reset_counters();
  window();
  wait(stream);
  Kernels result;
  for (const auto& [name, count] : ga::sim::counters().by_kernel) {
    (is_upload(name) ? result.uploads : result.work) += static_cast<double>(count);
  }
  return result;
}
#else
// Returns null if the driver does not have the function.
template <class Function>
Function driver_function(const char* name) {
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<Function>(driver ? dlsym(driver, name) : nullptr);
}

// Asks the driver, because the kernels belong to another copy of the runtime. Empty if the driver
// knows no names.
std::string name_of(cudaGraphNode_t node) {
  static const auto params_of =
      driver_function<decltype(&cuGraphKernelNodeGetParams)>("cuGraphKernelNodeGetParams_v2");
  // The headers have these two from CUDA 12.3 on.
  static const auto function_name =
      driver_function<CUresult (*)(const char**, CUfunction)>("cuFuncGetName");
  static const auto kernel_name =
      driver_function<CUresult (*)(const char**, CUkernel)>("cuKernelGetName");
  CUDA_KERNEL_NODE_PARAMS params{};
  const char* name = nullptr;
  if (params_of && params_of(node, &params) == CUDA_SUCCESS) {
    if (params.func && function_name) {
      function_name(&name, params.func);
    } else if (params.kern && kernel_name) {
      kernel_name(&name, params.kern);
    }
  }
  return name ? name : "";
}

Kernels kernels_of(const Stream& stream, const std::function<void()>& window) {
  window();
  wait(stream);
  const Graph graph = capture(stream, window);
  size_t count = 0;
  check(cudaGraphGetNodes(graph.get(), nullptr, &count), "the nodes of a graph");
  std::vector<cudaGraphNode_t> nodes(count);
  check(cudaGraphGetNodes(graph.get(), nodes.data(), &count), "the nodes of a graph");
  Kernels result;
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    check(cudaGraphNodeGetType(node, &type), "a node of a graph");
    if (type != cudaGraphNodeTypeKernel) continue;
    const std::string name = name_of(node);
    if (name.empty()) {
      throw std::runtime_error("the driver gives no kernel names; CUDA 12.3 or later is needed");
    }
    ++(is_upload(name) ? result.uploads : result.work);
  }
  return result;
}
#endif

void g2(const Options& options, Report& report) {
  const Layout layout(std::vector<Shape>(400, Shape{options.check ? 40 : 1024}));
  const auto n = static_cast<size_t>(layout.n);
  report.heading(format("G2: host time, %zu tensors, AdamW, clipped by the global norm",
                        layout.shapes.size()));
  const Stream stream = make_stream();
  const Memory p(4 * n), g(4 * n);
  fill(p, 4, 1);
  fill(g, 4, 2);
  const Pointers gradients = layout.pointers(g.as());
  Context context(layout, p.as(), stream);

  const int micros = 4, windows = options.check ? 1 : 50;
  context.window(gradients, micros);
  wait(stream);
  Times accumulates, steps;
  for (int round = 0; round < options.rounds(); ++round) {
    double accumulating = 0, stepping = 0;
    for (int window = 0; window < windows; ++window) {
      const double start = now();
      for (int micro = 0; micro < micros; ++micro) context.accumulate(gradients);
      const double middle = now();
      context.step();
      stepping += now() - middle;
      accumulating += middle - start;
      wait(stream);  // so that the queue never fills up
    }
    accumulates.push_back(1e6 * accumulating / (windows * micros));
    steps.push_back(1e6 * stepping / windows);
  }
  context.require_applied();
  if (!options.check) {
    report.figure("G2_host_step", steps, Sense::kAtMost, 20, "us of host time of ga_step");
    report.figure("G2_host_accumulate", accumulates, Sense::kNone, 0,
                  "us of host time of ga_accumulate");
  }

  // A window of five has four accumulates more than a window of one.
  const auto kernels = [&](int count) {
    return kernels_of(stream, [&] { context.window(gradients, count); });
  };
  const Kernels one = kernels(1), five = kernels(5);
  const double each = (five.work - one.work) / 4;
  report.figure("G2_launches_accumulate", {each}, Sense::kAtMost, 1,
                "kernels of ga_accumulate with 400 tensors");
  report.figure(
      "G2_launches_step", {one.work - each}, Sense::kAtMost, 3,
      format("kernels of ga_step; the counted window had %.0f more to write tables", one.uploads));
}

// Blocks a stream until let_go() is called or half a minute has passed.
class Barrier {
 public:
  explicit Barrier(const Stream& stream) : stream_(stream) {
    check(cudaLaunchHostFunc(stream.get(), hold, this), "a host function");
  }
  ~Barrier() {
    let_go();
    cudaStreamSynchronize(stream_.get());
  }
  void let_go() { open_ = true; }
  bool timed_out() const { return timed_out_; }

 private:
  static void hold(void* self) {
    auto* const barrier = static_cast<Barrier*>(self);
    const double start = now();
    while (!barrier->open_ && !barrier->timed_out_) {
      usleep(100);
      if (now() - start > 30) barrier->timed_out_ = true;
    }
  }

  const Stream& stream_;
  std::atomic<bool> open_{false}, timed_out_{false};
};

void g3(const Options& options, Report& report) {
  const Layout layout({{1031, 257}, {3}, {}, {65536}, {65537}, {17, 15}, {300007}});
  const auto n = static_cast<size_t>(layout.n);
  report.heading("G3: no waiting, and graphs");
  const Stream stream = make_stream();
  const Memory g(4 * n), other(4 * n);
  fill(g, 4, 2);
  fill(other, 4, 3);
  const Pointers gradients = layout.pointers(g.as());
  const int micros = 4, windows = options.check ? 3 : 20;

  const Memory free_running(4 * n);
  fill(free_running, 4, 1);
  Context context(layout, free_running.as(), stream);
  for (const int count : {micros, 1}) context.window(gradients, count);
  wait(stream);  // a kernel's first launch may wait until it is loaded
  Barrier barrier(stream);
  for (const int count : {micros, 1}) context.window(gradients, count);
  barrier.let_go();
  wait(stream);
  report.figure("G3_no_waiting", {barrier.timed_out() ? 0.0 : 1.0}, Sense::kAtLeast, 1,
                "1: windows of 4 and of 1 were queued while the stream was blocked");

  // Runs the windows once outside a graph and once as replays, with other gradients in each window.
  std::vector<float> ends[2];
  ga_step_result results[2];
  for (const bool replayed : {false, true}) {
    const Memory p(4 * n), held(4 * n);
    fill(p, 4, 1);
    fill(held, 4, 2);
    const Pointers there = layout.pointers(held.as());
    Context trained(layout, p.as(), stream);
    trained.window(there, micros);
    wait(stream);
    Executable executable;
    if (replayed) {
      executable = instantiate(capture(stream, [&] { trained.window(there, micros); }));
    }
    for (int window = 0; window < windows; ++window) {
      check(cudaMemcpyAsync(held.as(), (window % 2 ? g : other).as(), held.bytes(),
                            cudaMemcpyDeviceToDevice, stream.get()),
            "a copy");
      if (replayed) {
        check(cudaGraphLaunch(executable.get(), stream.get()), "a graph");
      } else {
        trained.window(there, micros);
      }
    }
    wait(stream);
    results[replayed] = trained.result();
    trained.require_applied();
    ends[replayed] = read(p);
  }
  const bool same = memcmp(ends[0].data(), ends[1].data(), 4 * n) == 0 &&
                    results[0].steps == results[1].steps &&
                    memcmp(&results[0].norm, &results[1].norm, sizeof(double)) == 0;
  report.figure(
      "G3_replay", {same ? 1.0 : 0.0}, Sense::kAtLeast, 1,
      format("1: %d replays of a captured window gave the parameters, norm and step number "
             "of as many windows outside a graph, bit for bit (steps: %lld and %lld)",
             windows, static_cast<long long>(results[1].steps),
             static_cast<long long>(results[0].steps)));

  // Windows of so little data that launching them takes the time.
  const Layout many(std::vector<Shape>(400, Shape{options.check ? 40 : 1024}));
  const Memory p(4 * static_cast<size_t>(many.n)), small(p.bytes());
  fill(p, 4, 1);
  fill(small, 4, 2);
  const Pointers small_gradients = many.pointers(small.as());
  Context launched(many, p.as(), stream), captured(many, p.as(), stream);
  for (Context* const each : {&launched, &captured}) each->window(small_gradients, micros);
  wait(stream);
  const Executable graph =
      instantiate(capture(stream, [&] { captured.window(small_gradients, micros); }));
  const auto each = [&](const std::function<void()>& window) {
    return [=] {
      for (int k = 0; k < windows; ++k) window();
    };
  };
  const std::vector<Times> t =
      race_on(stream, options.rounds(),
              {{each([&] { launched.window(small_gradients, micros); }), {}},
               {each([&] { check(cudaGraphLaunch(graph.get(), stream.get()), "a graph"); }), {}}});
  for (Context* const each : {&launched, &captured}) each->require_applied();
  if (options.check) {
    printf("G3_graph: ran\n");
    return;
  }
  report.figure(
      "G3_graph", t[0] / t[1], Sense::kNone, 0,
      format("windows of 4 with 400 tensors of 1024 elements, one after the other: %.1f us "
             "each / replayed %.1f us",
             1e6 * median(t[0]) / windows, 1e6 * median(t[1]) / windows));
}

// ---- G5: matrix products ----------------------------------------------------------------------------

// The steps of Muon over the matrices of some layers of GPT-2, with each precision of its products.
void muon_figures(const Options& options, Report& report, const Stream& stream) {
  std::vector<Shape> shapes;
  for (int layer = 0; layer < (options.check ? 1 : 4); ++layer) {
    const int64_t d = options.check ? 24 : 768;
    for (const Shape& shape : {Shape{3 * d, d}, Shape{d, d}, Shape{4 * d, d}, Shape{d, 4 * d}})
      shapes.push_back(shape);
  }
  const Layout layout(shapes);
  const auto bytes = 4 * static_cast<size_t>(layout.n);
  const Memory g(bytes);
  fill(g, 4, 2);
  const Pointers gradients = layout.pointers(g.as());
  std::vector<Memory> parameters;
  std::vector<std::unique_ptr<Context>> contexts;
  std::vector<Side> sides;
  for (const ga_precision precision : {GA_PRECISION_F32, GA_PRECISION_TF32, GA_PRECISION_BF16}) {
    parameters.emplace_back(bytes);
    fill(parameters.back(), 4, 1);
    Setting setting;
    setting.optimizer = GA_OPTIMIZER_MUON;
    setting.precision = precision;
    contexts.push_back(std::make_unique<Context>(layout, parameters.back().as(), stream, setting));
    Context* const context = contexts.back().get();
    sides.push_back({[=] { context->step(); }, [=] { context->accumulate(gradients); }});
  }
  const std::vector<Times> t = race_on(stream, options.rounds(), sides);
  for (const auto& context : contexts) context->require_applied();
  for (const size_t k : {size_t{1}, size_t{2}}) {
    const char* const name = k == 1 ? "G5_muon_tf32" : "G5_muon_bf16";
    if (options.check)
      printf("%s: ran\n", name);
    else
      report.figure(
          name, t[0] / t[k], Sense::kNone, 0,
          format("a step of Muon over %.0f M elements: f32 %.2f ms / %.2f ms",
                 1e-6 * static_cast<double>(layout.n), 1e3 * median(t[0]), 1e3 * median(t[k])));
  }
}

void g5(const Options& options, Report& report) {
  std::string missing;
  const Cublas* const cublas = open_cublas(missing);
  if (!cublas) {
    printf("G5: skipped: cuBLAS was not found: %s\n", missing.c_str());
    return;
  }
  report.heading("G5: ga_accumulate_matmul against cuBLAS's product alone, beta = 0");
  const Stream stream = make_stream();
  const Memory workspace(size_t{32} << 20);  // as large as the library's
  cublasHandle_t handle = nullptr;
  check(cublas->create(&handle), "a cuBLAS handle");
  const std::unique_ptr<std::remove_pointer_t<cublasHandle_t>, decltype(cublas->destroy)> keep(
      handle, cublas->destroy);
  check(cublas->set_stream(handle, stream.get()), "cuBLAS's stream");
  check(cublas->set_workspace(handle, workspace.as(), workspace.bytes()), "cuBLAS's workspace");

  struct Product {
    const char* name;
    int64_t out, in, samples;
    int32_t dtype;
  };
  std::vector<Product> products = {
      {"G5_bf16_4096x4096_k8192", 4096, 4096, 8192, GA_BF16},
      {"G5_bf16_3072x768_k8192", 3072, 768, 8192, GA_BF16},
      {"G5_f32_4096x4096_k4096", 4096, 4096, 4096, GA_F32},
  };
  if (options.check) products = {{"G5", 48, 32, 20, GA_BF16}, {"G5", 48, 32, 20, GA_F32}};
  for (const Product& product : products) {
    const size_t size = product.dtype == GA_F32 ? 4 : 2;
    const auto count = [](int64_t rows, int64_t columns) {
      return static_cast<size_t>(rows * columns);
    };
    const Memory w(4 * count(product.out, product.in)), scratch(w.bytes());
    const Memory dy(size * count(product.samples, product.out));
    const Memory x(size * count(product.samples, product.in));
    fill(w, 4, 1);
    fill(dy, size, 2);
    fill(x, size, 3);
    const Layout layout({{product.out, product.in}});
    Context context(layout, w.as(), stream);
    check(ga_micro_begin(context.get(), 0, 1.0, nullptr));
    const auto mine = [&] {
      check(ga_accumulate_matmul(context.get(), 0, product.samples, dy.as(), product.out,
                                 GA_TRANSPOSE, x.as(), product.in, GA_NO_TRANSPOSE, product.dtype));
    };
    mine();  // the first contribution, whose beta is 0
    const float one = 1, zero = 0;
    const cudaDataType type = product.dtype == GA_F32 ? CUDA_R_32F : CUDA_R_16BF;
    const auto theirs = [&] {
      check(cublas->gemm(handle, CUBLAS_OP_N, CUBLAS_OP_T, product.in, product.out, product.samples,
                         &one, x.as(), type, product.in, dy.as(), type, product.out, &zero,
                         scratch.as(), CUDA_R_32F, product.in, CUBLAS_COMPUTE_32F,
                         CUBLAS_GEMM_DEFAULT),
            "a product");
    };
    const std::vector<Times> t = race_on(stream, options.rounds(), {{theirs, {}}, {mine, {}}});
    if (options.check) {
      printf("%s: ran\n", product.name);
      continue;
    }
    const double work = 2e-12 * static_cast<double>(product.out * product.in * product.samples);
    report.figure(product.name, t[0] / t[1], Sense::kAtLeast, 0.97,
                  format("cuBLAS %.3f ms, %.0f TFLOP/s / ga_accumulate_matmul %.3f ms",
                         1e3 * median(t[0]), work / median(t[0]), 1e3 * median(t[1])));
  }
  muon_figures(options, report, stream);
}

// ---- G6: steps over other arrays than f32 --------------------------------------------------------

// One element after aligned memory, as tensors of a flat block may be. (Gradients are the library's.)
constexpr size_t kShift = 1;

// Both ways through a layer of batch normalisation over images, by the statistics of the micro-batch.
void batch_norm_figures(const Options& options, Report& report, const Stream& stream) {
  const int64_t samples = options.check ? 3 : 64, channels = options.check ? 5 : 256;
  const int64_t positions = options.check ? 7 : 56 * 56;
  const Layout layout({{samples, channels, positions}});
  const auto bytes = 4 * static_cast<size_t>(layout.n);
  const Memory x(bytes), y(bytes), dy(bytes), dx(bytes), none(4);
  fill(x, 4, 1);
  fill(dy, 4, 2);
  const Copy copy(options, stream, 20 * static_cast<size_t>(layout.n));
  Context context(Layout({Shape{1}}), none.as(), stream);
  ga_bn layer = 0;
  check(ga_bn_add(context.get(), "layer", channels, -1, -1, nullptr, &layer));
  const auto begin = [&] {
    context.discard();
    check(ga_micro_begin(context.get(), 0, 1.0, nullptr));
  };
  const auto forward = [&] {
    check(ga_bn_forward(context.get(), layer, x.as(), samples, positions, y.as()));
  };
  pass_figures(
      options, report, stream, copy, layout,
      {{"G6_bn_forward", 12, 0, "statistics, then y; for each element of x", forward, begin},
       {"G6_bn_backward", 20, 0, "sums, then dx; for each element of x",
        [&] {
          check(ga_bn_backward(context.get(), layer, x.as(), dy.as(), samples, positions, dx.as()));
        },
        [&] {
          begin();
          forward();
        }}});
  context.discard();
}

void g6(const Options& options, Report& report) {
  const Layout layout = options.check   ? Layout({{17}, {300, 30}, {1000, 70}, {}})
                        : options.quick ? gpt2(12)
                                        : gpt2(24);
  const auto n = static_cast<size_t>(layout.n);
  const Stream stream = make_stream();
  report.heading("G6: steps by other ways than aligned f32 arrays, relative to a copy's GB/s");
  const Memory p(4 * (n + kShift)), g(4 * n), halves(2 * n), parameters(2 * n);
  fill(p, 4, 1);
  fill(g, 4, 2);
  fill(halves, 2, 3);
  fill(parameters, 2, 4);
  const Copy copy(options, stream, 32 * n);
  const Pointers gradients = layout.pointers(g.as());
  const Pointers half_gradients = layout.pointers(halves.as<uint16_t>());
  Setting live;
  live.gradient_dtype = GA_BF16;
  live.gradient_life = GA_GRADIENTS_LIVE;
  Setting live_sgd = live, live_masters = live, bare, narrow_state;
  live_sgd.optimizer = GA_OPTIMIZER_SGD;
  live_masters.dtype = bare.dtype = bare.gradient_dtype = GA_BF16;
  bare.master = GA_MASTER_NONE;
  narrow_state.state_dtype = GA_BF16;
  struct Step {
    Pass pass;
    Setting setting;
    void* parameters;
    const Pointers* gradients;
  };
  for (const Step& step :
       {Step{{"G6_sgd_live_bf16", 12, 0, "SGD, norm of bf16 gradients that live", {}, {}},
             live_sgd,
             p.as(),
             &half_gradients},
        Step{{"G6_adamw_live_bf16",
              28,
              0,
              "AdamW, f32 parameters, bf16 gradients that live",
              {},
              {}},
             live,
             p.as(),
             &half_gradients},
        Step{{"G6_adamw_masters_live_bf16",
              30,
              0,
              "AdamW, master weights, bf16 gradients that live",
              {},
              {}},
             live_masters,
             parameters.as(),
             &half_gradients},
        Step{{"G6_adamw_misaligned",
              28,
              0,
              "AdamW, f32 parameters 4 bytes after a multiple of 64",
              {},
              {}},
             {},
             p.as() + kShift,
             &gradients},
        Step{{"G6_adamw_bf16", 24, 0, "AdamW, bf16 parameters without master weights", {}, {}},
             bare,
             parameters.as(),
             &half_gradients},
        Step{{"G6_adamw_bf16_state", 20, 0, "AdamW, bf16 state", {}, {}},
             narrow_state,
             p.as(),
             &gradients}}) {
    if (!options.wants_pass(step.pass.name)) continue;
    Context context(layout, step.parameters, stream, step.setting);
    Pass pass = step.pass;
    pass.run = [&] { context.step(); };
    pass.prepare = [&] { context.accumulate(*step.gradients); };
    pass_figures(options, report, stream, copy, layout, {pass});
    context.require_applied();
  }

  batch_norm_figures(options, report, stream);
  if (!options.profile.empty()) return;
  // So little data that the time is that of the decision, and of the Ops that LAMB folds between its passes.
  const Layout small(std::vector<Shape>(400, Shape{options.check ? 40 : 1024}));
  const Pointers small_gradients = small.pointers(g.as());
  for (const auto& [name, optimizer] :
       {std::pair("G6_decide", GA_OPTIMIZER_SGD), std::pair("G6_fold_layers", GA_OPTIMIZER_LAMB)}) {
    Setting setting;
    setting.optimizer = optimizer;
    Context context(small, p.as(), stream, setting);
    const std::vector<Times> t =
        race_on(stream, options.rounds(),
                {{[&] { context.step(); }, [&] { context.accumulate(small_gradients); }}});
    context.require_applied();
    Times microseconds = t[0];
    for (double& time : microseconds) time *= 1e6;
    if (options.check)
      printf("%s: ran\n", name);
    else
      report.figure(name, microseconds, Sense::kNone, 0,
                    "us of a step over 400 tensors of 1024 elements");
  }
}

// ---- Main -------------------------------------------------------------------------------------------

std::string machine() {
  int device = 0, driver = 0, runtime = 0;
  check(cudaGetDevice(&device), "the device");
  check(cudaDriverGetVersion(&driver), "the driver");
  check(cudaRuntimeGetVersion(&runtime), "the runtime");
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "the device");
  return format(
      "%s, compute capability %d.%d, %d multiprocessors, %zu MiB, L2 %d MiB, driver for "
      "CUDA %d.%d, runtime %d.%d; %s",
      properties.name, properties.major, properties.minor, properties.multiProcessorCount,
      properties.totalGlobalMem >> 20, properties.l2CacheSize >> 20, driver / 1000,
      driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10, ga_build_info());
}

int measure(const Options& options) {
  int32_t devices = 0;
  if (ga_device_count(GA_DEVICE_CUDA, &devices) != GA_OK || devices == 0) {
    printf("skipped: no GPU: %s\n", ga_last_error());
    return kSkipped;
  }
  if (getenv("CUDA_LAUNCH_BLOCKING") && !options.check)
    throw std::runtime_error("CUDA_LAUNCH_BLOCKING is set: every launch would wait");
  Report report;
  const std::string text = machine();
  printf("%s\n", text.c_str());
  if (options.wants("G1")) g1(options, report);
  if (options.wants("G2")) g2(options, report);
  if (options.wants("G3")) g3(options, report);
  if (options.wants("G5")) g5(options, report);
  if (options.wants("G6")) g6(options, report);
  if (!options.check && options.profile.empty()) report.write(options.json, text);
  return options.check && report.missed() > 0 ? 1 : 0;
}

constexpr char kUsage[] =
    "usage: gradaccum_bench_gpu [--quick] [--check] [--only G1,G2,G3,G5,G6] [--json FILE]\n"
    "                           [--profile FIGURE]\n"
    "  --quick  fewer rounds (7) and 124 M parameters instead of 209 M\n"
    "  --check  runs everything once, small and untimed; exits with 1 if a count or bit is wrong\n"
    "  --profile FIGURE  runs the pass of a figure of G1 or G6 once, between cudaProfilerStart() "
    "and "
    "Stop()\n";

int run(int argc, char** argv) {
  Options options;
  for (int k = 1; k < argc; ++k) {
    const std::string name = argv[k];
    const auto value = [&]() -> std::string {
      if (k + 1 >= argc) throw std::runtime_error(name + " needs a value");
      return argv[++k];
    };
    if (name == "--quick") {
      options.quick = true;
    } else if (name == "--check") {
      options.check = true;
    } else if (name == "--profile") {
      options.profile = value();
    } else if (name == "--json") {
      options.json = value();
    } else if (name == "--only") {
      std::string ids = value();
      for (size_t comma; !ids.empty();
           ids.erase(0, comma == std::string::npos ? comma : comma + 1)) {
        comma = ids.find(',');
        options.only.insert(ids.substr(0, comma));
      }
    } else {
      fputs(kUsage, name == "--help" ? stdout : stderr);
      return name == "--help" ? 0 : 2;
    }
  }
  return measure(options);
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  try {
    return bench::run(argc, argv);
  } catch (const std::exception& error) {
    fprintf(stderr, "gradaccum_bench_gpu: %s\n", error.what());
    return 1;
  }
}
