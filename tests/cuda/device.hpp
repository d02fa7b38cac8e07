// SPDX-License-Identifier: Apache-2.0
//
// What the tests of CUDA contexts share: streams, tensors in device memory, and a context with its
// tensors that is on the CPU or on a device, so that one program can run on both. The devices
// belong to NVIDIA's runtime or to the simulated one (GA_SIMULATED).
#pragma once

#include <cuda_runtime.h>

#include <functional>
#include <map>
#include <memory>

#include "formats.hpp"
#ifdef GA_SIMULATED
#include "simulator.hpp"
#endif

#define EXPECT_CUDA(call) EXPECT_EQ(call, cudaSuccess)
#define ASSERT_CUDA(call) ASSERT_EQ(call, cudaSuccess)

namespace ga::test {

inline bool simulated() {
#ifdef GA_SIMULATED
  return true;
#else
  return false;
#endif
}

class Stream {
 public:
  explicit Stream(int device = 0) : device_(device) {
    EXPECT_CUDA(cudaSetDevice(device));
    EXPECT_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    EXPECT_CUDA(cudaSetDevice(0));
  }
  ~Stream() {
    if (stream_) cudaStreamDestroy(stream_);
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }
  int device() const { return device_; }
  void wait() const { EXPECT_CUDA(cudaStreamSynchronize(stream_)); }

 private:
  int device_;
  cudaStream_t stream_ = nullptr;
};

// Like random_tensor, but copied in pieces from a tensor that is generated once, to save time.
inline Tensor numbers(int32_t dtype, int64_t count, uint64_t seed) {
  constexpr int64_t kMost = 1 << 15;
  static std::map<int32_t, Tensor> made;
  auto found = made.find(dtype);
  if (found == made.end()) found = made.emplace(dtype, random_tensor(dtype, kMost, 1)).first;
  const Tensor& all = found->second;
  Tensor result(dtype, count);
  Random random(seed);
  constexpr int64_t kPiece = 10000;
  for (int64_t i = 0; i < count; i += kPiece) {
    const int64_t n = std::min(kPiece, count - i);
    memcpy(result.at(i), all.at(random.below(kMost - n)), static_cast<size_t>(n) * result.size());
  }
  return result;
}

// A tensor in device memory, between canaries, at an address that is a multiple of 256 plus shift
// elements.
class DeviceTensor {
 public:
  DeviceTensor(const Tensor& values, const Stream& stream, int64_t shift = 1)
      : stream_(stream),
        shape_(values),
        before_(kMargin + static_cast<size_t>(shift) * values.size()),
        after_(kMargin) {
    EXPECT_CUDA(cudaSetDevice(stream.device()));
    EXPECT_CUDA(cudaMalloc(reinterpret_cast<void**>(&base_), before_ + bytes() + after_));
    EXPECT_CUDA(cudaSetDevice(0));
    if (!base_) return;
    EXPECT_CUDA(cudaMemsetAsync(base_, kCanaryByte, before_ + bytes() + after_, stream));
    put(values);
  }
  ~DeviceTensor() {
    if (base_) cudaFree(base_);
  }
  DeviceTensor(const DeviceTensor&) = delete;
  DeviceTensor& operator=(const DeviceTensor&) = delete;

  void* data() const { return base_ + before_; }
  int32_t dtype() const { return shape_.dtype(); }
  int64_t count() const { return shape_.count(); }
  size_t bytes() const { return static_cast<size_t>(shape_.count()) * shape_.size(); }

  // Copies to the device, in the order of the stream.
  void put(const Tensor& values) {
    if (bytes() == 0) return;
    EXPECT_CUDA(cudaMemcpyAsync(data(), values.data(), bytes(), cudaMemcpyHostToDevice, stream_));
    if (!simulated()) stream_.wait();  // values may be freed after this call
  }
  // Copies to the host after all work on the stream.
  Tensor get() const {
    Tensor result(dtype(), count());
    std::vector<uint8_t> all(before_ + bytes() + after_);
    EXPECT_CUDA(cudaMemcpyAsync(all.data(), base_, all.size(), cudaMemcpyDeviceToHost, stream_));
    stream_.wait();
    if (bytes() > 0) memcpy(result.data(), all.data() + before_, bytes());
    const auto bad = [](uint8_t byte) { return byte != kCanaryByte; };
    const auto begin = all.begin() + static_cast<ptrdiff_t>(before_);
    const bool clean = std::none_of(all.begin(), begin, bad) &&
                       std::none_of(begin + static_cast<ptrdiff_t>(bytes()), all.end(), bad);
    EXPECT_TRUE(clean) << "memory beside a tensor was written";
    return result;
  }

 private:
  static constexpr size_t kMargin = 256;
  static constexpr uint8_t kCanaryByte = 0xa5;
  const Stream& stream_;
  Tensor shape_;
  size_t before_, after_;
  uint8_t* base_ = nullptr;
};

// The work that was captured from a stream, which can be replayed.
class Graph {
 public:
  Graph() = default;
  ~Graph() {
    if (exec_) cudaGraphExecDestroy(exec_);
    if (graph_) cudaGraphDestroy(graph_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  template <class Work>
  void capture(const Stream& stream, Work&& work) {
    ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    work();
    ASSERT_CUDA(cudaStreamEndCapture(stream, &graph_));
    ASSERT_CUDA(cudaGraphInstantiate(&exec_, graph_, 0));
  }
  void replay(const Stream& stream) { EXPECT_CUDA(cudaGraphLaunch(exec_, stream)); }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

inline ga_config cuda_config(const Stream& stream) {
  ga_config c = config();
  c.device = GA_DEVICE_CUDA;
  c.device_ordinal = stream.device();
  c.stream = static_cast<cudaStream_t>(stream);
  return c;
}

inline ga_step_result result_of(ga_context* ctx, int64_t window = 0, int32_t wait = 1) {
  auto r = to_fill<ga_step_result>();
  EXPECT_OK(ga_step_result_get(ctx, window, wait, &r));
  return r;
}

// Sets a variable of the environment for its own lifetime, or unsets it if value is NULL.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* old = getenv(name)) old_ = std::make_unique<std::string>(old);
    set(value);
  }
  ~Variable() { set(old_ ? old_->c_str() : nullptr); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  void set(const char* value) {
    if (value)
      setenv(name_, value, 1);
    else
      unsetenv(name_);
  }
  const char* name_;
  std::unique_ptr<std::string> old_;
};

// ---- A program that runs on the CPU and on a device ----------------------------------------------

// One result of a program.
struct Record {
  std::string what;
  int32_t dtype;  // 0: a status or a count
  std::vector<uint8_t> bytes;
  double tolerance;  // relative; 0: the same bits
};

// A context on the CPU or on a device, with its tensors and the records of its results.
class Machine {
 public:
  explicit Machine(int32_t device, ga_config c = config()) : device_(device) {
    if (device == GA_DEVICE_CUDA) {
      stream_ = std::make_unique<Stream>();
      c.device = device;
      c.stream = static_cast<cudaStream_t>(*stream_);
    }
    EXPECT_OK(ga_context_create(&c, &ctx_));
  }
  ~Machine() { destroy(); }
  void destroy() {
    ga_context_destroy(ctx_);
    ctx_ = nullptr;
  }
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  operator ga_context*() const { return ctx_; }
  bool cuda() const { return device_ == GA_DEVICE_CUDA; }
  const Stream& stream() const { return *stream_; }

  ga_group group(const ga_optimizer& o) {
    ga_group id = -1;
    EXPECT_OK(ga_group_add(ctx_, &o, &id));
    return id;
  }

  // Stores a tensor for the lifetime of the context and returns its address.
  void* keep(const Tensor& values, int64_t shift = 1) { return place(kept_, values, shift); }
  // Stores a tensor until the end of the window.
  void* put(const Tensor& values, int64_t shift = 1) { return place(passing_, values, shift); }

  // Adds a parameter and records the status. Returns -1 if the library refuses the parameter.
  ga_param add(ga_group group, const Tensor& start, std::vector<int64_t> shape = {},
               const ga_param_options& o = options(), int64_t shift = 1) {
    void* const data = keep(start, shift);
    if (shape.empty()) shape = {start.count()};
    const std::string name = "p" + std::to_string(names_++);
    ga_param id = -1;
    const ga_status status = try_add(ctx_, group, name.c_str(), data, start.dtype(), shape, o, &id);
    note("adding " + name, status);
    if (status != GA_OK) {
      kept_.pop_back();
      return -1;
    }
    EXPECT_EQ(static_cast<size_t>(id), params_.size());
    params_.push_back(kept_.size() - 1);
    return id;
  }
  size_t params() const { return params_.size(); }
  Tensor value(ga_param param) const { return kept_[params_[static_cast<size_t>(param)]].get(); }
  void* data(ga_param param) const { return kept_[params_[static_cast<size_t>(param)]].data(); }
  void set(ga_param param, const Tensor& values) {
    kept_[params_[static_cast<size_t>(param)]].set(values);
  }

  Tensor kept(size_t i) const { return kept_[i].get(); }
  // Moves a parameter to another address, with new values.
  ga_status move(ga_param param, const Tensor& values) {
    void* const data = keep(values, 2);
    const ga_status status = ga_param_bind(ctx_, param, data);
    params_[static_cast<size_t>(param)] = kept_.size() - 1;
    return status;
  }

  void accumulate(const std::vector<const void*>& gradients, double weight = 1, double scale = 0) {
    note("accumulate",
         ga_accumulate(ctx_, gradients.data(), gradients.size(), weight, MicroOptions(scale)));
  }

  // Ends the window and records the result and the parameters.
  ga_step_result step(double norm_tolerance = 0) {
    ga_step_result r = {};
    r.struct_size = sizeof r;
    const ga_status status = ga_step(ctx_, &r);
    note("step", status);
    if (status == GA_OK) {
      r = result_of(ctx_);
      note_result(r, norm_tolerance);
    }
    note_params();
    passing_.clear();
    return r;
  }

  void note(const std::string& what, ga_status status) { note(what, int64_t{status}); }
  void note(const std::string& what, int64_t number) { note_bytes(what, 0, number); }
  void note(const std::string& what, double number, double tolerance = 0) {
    note_bytes(what, GA_F64, number, tolerance);
  }
  void note(const std::string& what, const Tensor& t, double tolerance = 0) {
    Record r = {what, t.dtype(), {}, tolerance};
    const auto* bytes = static_cast<const uint8_t*>(t.data());
    r.bytes.assign(bytes, bytes + static_cast<size_t>(t.count()) * t.size());
    records_.push_back(std::move(r));
  }
  void note_result(const ga_step_result& r, double tolerance) {
    const std::string of = "result.";
    note(of + "outcome", int64_t{r.outcome});
    note(of + "windows", r.windows);
    note(of + "steps", r.steps);
    note(of + "micro_batches", r.micro_batches);
    note(of + "weight", r.weight);
    note(of + "norm", r.norm, tolerance);
    note(of + "clip_factor", r.clip_factor, tolerance);
    note(of + "lr", r.lr);
    note(of + "loss_scale", r.loss_scale);
    note(of + "skipped", r.skipped);
    note(of + "dropped", r.dropped);
    note(of + "window_dropped", r.window_dropped);
    note(of + "noise_scale", r.noise_scale, tolerance);
    note(of + "noise_trace", r.noise_trace, tolerance);
    note(of + "noise_signal", r.noise_signal, tolerance);
  }
  // Records the parameters, with params_tolerance.
  void note_params() {
    for (size_t i = 0; i < params_.size(); ++i)
      note("parameter " + std::to_string(i), value(static_cast<ga_param>(i)), params_tolerance);
  }
  void note_averages() {
    for (size_t i = 0; i < params_.size(); ++i) {
      const auto id = static_cast<ga_param>(i);
      const Tensor like = value(id);
      for (const int32_t dtype : {GA_F32, GA_F64, GA_BF16, GA_F16}) {
        Place out(this, Tensor(dtype, like.count()), 1);
        note("copying", ga_ema_copy_to(ctx_, id, out.data(), dtype));
        note("average " + std::to_string(i), out.get());
      }
    }
  }
  // Records the gradient that ga_gradient returns.
  void note_gradient(ga_param param) {
    const void* data = nullptr;
    int32_t dtype = 0;
    const ga_status status = ga_gradient(ctx_, param, &data, &dtype, nullptr);
    note("gradient", status);
    if (status != GA_OK) return;
    note("gradient " + std::to_string(param), read(data, dtype, value(param).count()));
  }
  // Reads numbers from memory that the library owns.
  Tensor read(const void* data, int32_t dtype, int64_t count) const {
    Tensor result(dtype, count);
    const size_t bytes = static_cast<size_t>(count) * result.size();
    if (bytes == 0) return result;
    if (!cuda()) {
      memcpy(result.data(), data, bytes);
      return result;
    }
    EXPECT_CUDA(cudaMemcpyAsync(result.data(), data, bytes, cudaMemcpyDeviceToHost, *stream_));
    stream_->wait();
    return result;
  }
  // Writes numbers to memory that the library handed out.
  void write(void* data, const Tensor& values) const {
    const size_t bytes = static_cast<size_t>(values.count()) * values.size();
    if (bytes == 0) return;
    if (!cuda()) {
      memcpy(data, values.data(), bytes);
      return;
    }
    EXPECT_CUDA(cudaMemcpyAsync(data, values.data(), bytes, cudaMemcpyHostToDevice, *stream_));
    stream_->wait();
  }

  const std::vector<Record>& records() const { return records_; }
  double params_tolerance = 0;

 private:
  // A tensor in the memory of the context's device.
  class Place {
   public:
    Place(const Machine* machine, const Tensor& values, int64_t shift) {
      if (machine->cuda())
        device_ = std::make_unique<DeviceTensor>(values, *machine->stream_, shift);
      else
        host_ = std::make_unique<Tensor>(values);
    }
    void* data() const { return device_ ? device_->data() : host_->data(); }
    Tensor get() const {
      if (device_) return device_->get();
      EXPECT_TRUE(host_->canaries());
      return *host_;
    }
    void set(const Tensor& values) {
      if (device_) {
        device_->put(values);
      } else {
        memcpy(host_->data(), values.data(), static_cast<size_t>(values.count()) * values.size());
      }
    }

   private:
    std::unique_ptr<Tensor> host_;
    std::unique_ptr<DeviceTensor> device_;
  };

  void* place(std::vector<Place>& list, const Tensor& values, int64_t shift) {
    list.emplace_back(this, values, shift);
    return list.back().data();
  }
  template <class T>
  void note_bytes(const std::string& what, int32_t dtype, T value, double tolerance = 0) {
    Record r = {what, dtype, std::vector<uint8_t>(sizeof value), tolerance};
    memcpy(r.bytes.data(), &value, sizeof value);
    records_.push_back(std::move(r));
  }

  int32_t device_;
  std::unique_ptr<Stream> stream_;
  ga_context* ctx_ = nullptr;
  std::vector<Place> kept_, passing_;
  std::vector<size_t> params_;  // index in kept_
  int names_ = 0;
  std::vector<Record> records_;
};

inline testing::AssertionResult same_record(const Record& a, const Record& b) {
  const auto describe = [&] { return testing::AssertionFailure() << a.what; };
  if (a.what != b.what || a.dtype != b.dtype || a.bytes.size() != b.bytes.size())
    return describe() << " here, " << b.what << " there";
  if (a.bytes == b.bytes) return testing::AssertionSuccess();
  if (a.dtype == 0) {
    int64_t x, y;
    memcpy(&x, a.bytes.data(), sizeof x);
    memcpy(&y, b.bytes.data(), sizeof y);
    return describe() << ": " << x << " on the CPU, " << y << " on the device";
  }
  const size_t size = format(a.dtype).size, n = a.bytes.size() / size;
  size_t wrong = 0, first = 0;
  for (size_t i = n; i-- > 0;) {
    const double x = Tensor::read(&a.bytes[i * size], a.dtype);
    const double y = Tensor::read(&b.bytes[i * size], a.dtype);
    if (memcmp(&a.bytes[i * size], &b.bytes[i * size], size) == 0) continue;
    // The sign and payload of a NaN depend on the processor.
    if (std::isnan(x) && std::isnan(y)) continue;
    if (a.tolerance > 0 && std::abs(x - y) <= a.tolerance * std::max(std::abs(x), std::abs(y)))
      continue;
    ++wrong;
    first = i;
  }
  if (wrong == 0) return testing::AssertionSuccess();
  char text[200];
  snprintf(text, sizeof text,
           " (%s): %zu of %zu differ, first [%zu]: %.17g on the CPU, %.17g on the device",
           format(a.dtype).name, wrong, n, first, Tensor::read(&a.bytes[first * size], a.dtype),
           Tensor::read(&b.bytes[first * size], a.dtype));
  return describe() << text;
}

inline void expect_same_records(const std::vector<Record>& a, const std::vector<Record>& b) {
  ASSERT_EQ(a.size(), b.size());
  int shown = 0;
  for (size_t i = 0; i < a.size() && shown < 8; ++i) {
    const testing::AssertionResult same = same_record(a[i], b[i]);
    if (!same) ++shown;
    EXPECT_TRUE(same) << "record " << i;
  }
}

// Runs a program on the CPU and on a device; the records must be the same.
inline void expect_same(const ga_config& c, const std::function<void(Machine&)>& program) {
  std::vector<Record> records;
  {
    Machine cpu(GA_DEVICE_CPU, c);
    program(cpu);
    records = cpu.records();
  }
  Machine device(GA_DEVICE_CUDA, c);
  program(device);
  expect_same_records(records, device.records());
}

inline void expect_same(const std::function<void(Machine&)>& program) {
  expect_same(config(), program);
}

// ---- A training of a few parameters --------------------------------------------------------------

inline ga_param_options with(int32_t master, int32_t rounding, int32_t gradient_dtype = 0) {
  ga_param_options o = options(gradient_dtype);
  o.master = master;
  o.rounding = rounding;
  return o;
}

// The dtype, shape and options of a parameter.
struct Param {
  int32_t dtype;
  std::vector<int64_t> shape;
  ga_param_options options;
  int64_t count() const {
    int64_t n = 1;
    for (const int64_t extent : shape) n *= extent;
    return n;
  }
  int32_t gradient_dtype() const { return options.gradient_dtype ? options.gradient_dtype : dtype; }
};

// Parameters of the usual kinds: small ones, and some of several chunks.
inline std::vector<Param> some_params(bool wide = true) {
  std::vector<Param> list = {{GA_F32, {70000}, options()},
                             {GA_F32, {}, options()},
                             {GA_F32, {31, 33}, options(GA_BF16)},
                             {GA_BF16, {1023}, with(GA_MASTER_F32, GA_ROUND_STOCHASTIC)},
                             {GA_BF16, {3, 5, 7, 2}, with(GA_MASTER_NONE, GA_ROUND_STOCHASTIC)},
                             {GA_F16, {64, 20}, with(GA_MASTER_F32, GA_ROUND_NEAREST)},
                             {GA_F32, {0}, options()}};
  if (wide) {
    list.push_back({GA_F64, {2, 3, 300}, options()});
    list.push_back({GA_F64, {66000}, options(GA_F32)});
  }
  return list;
}

struct Training {
  std::vector<Param> params = some_params();
  std::vector<ga_param> ids = {};
  double weight(uint64_t micro) const { return micro == 1 ? 2.5 : 1; }

  void add(Machine& m, ga_group group) {
    for (size_t i = 0; i < params.size(); ++i) {
      const Param& p = params[i];
      ids.push_back(m.add(group, numbers(p.dtype, p.count(), 50 + i), p.shape, p.options,
                          static_cast<int64_t>(i % 3)));
      ASSERT_GE(ids.back(), 0);
    }
  }
  Tensor gradient(size_t i, uint64_t round) const {
    return numbers(params[i].gradient_dtype(), params[i].count(), 1000 * (round + 1) + i);
  }
  std::vector<const void*> gradients(Machine& m, uint64_t round) const {
    std::vector<const void*> list;
    for (size_t i = 0; i < params.size(); ++i)
      list.push_back(m.put(gradient(i, round), static_cast<int64_t>((i + round) % 3)));
    return list;
  }
  void windows(Machine& m, int count = 3, uint64_t micros = 3) const {
    for (int w = 0; w < count; ++w) {
      for (uint64_t k = 0; k < micros; ++k)
        m.accumulate(gradients(m, static_cast<uint64_t>(w) * micros + k), weight(k));
      m.step();
    }
  }
};

// ---- Suites --------------------------------------------------------------------------------------

// Skips the test if there is no device. In a simulation, each test starts with new devices and must
// leave no memory allocated.
template <class Base = testing::Test>
class OnDevice : public Base {
 protected:
  void SetUp() override {
#ifdef GA_SIMULATED
    sim::reset();
#else
    int32_t count = 0;
    ASSERT_OK(ga_device_count(GA_DEVICE_CUDA, &count));
    if (count == 0) GTEST_SKIP() << ga_last_error();
#endif
  }
  void TearDown() override {
#ifdef GA_SIMULATED
    EXPECT_EQ(sim::counters().late_loads, 0);
    EXPECT_EQ(sim::counters().device_bytes, 0);
    EXPECT_EQ(sim::counters().pinned_bytes, 0);
    sim::reset();
#endif
  }
#ifdef GA_SIMULATED
  template <class Change>
  void configure(Change change) {
    sim::Config c = sim::config();
    change(c);
    sim::configure(c);
  }
#endif
};

}  // namespace ga::test
