// SPDX-License-Identifier: Apache-2.0
//
// Contexts on missing or unsuitable devices, wrong memory, running out of memory, faults of a
// device, and the independence of contexts.
#include <thread>

#include "child.hpp"
#include "device.hpp"

namespace ga::test {
namespace {

class Errors : public OnDevice<> {
 protected:
  void SetUp() override {
    OnDevice<>::SetUp();
    cudaGetDeviceCount(&devices_);
  }
  int devices_ = 0;
};

ga_status create(const ga_config& c) {
  ga_context* ctx = nullptr;
  const ga_status status = ga_context_create(&c, &ctx);
  EXPECT_EQ(ctx != nullptr, status == GA_OK);
  ga_context_destroy(ctx);
  return status;
}

ga_config on_device(int32_t ordinal, void* stream = nullptr) {
  ga_config c = config();
  c.device = GA_DEVICE_CUDA;
  c.device_ordinal = ordinal;
  c.stream = stream;
  return c;
}

// Expects that there is no device and that the messages of both calls contain the words.
void expect_none(const std::vector<std::string>& words) {
  int32_t count = -1;
  EXPECT_OK(ga_device_count(GA_DEVICE_CUDA, &count));
  EXPECT_EQ(count, 0);
  const std::string reason = ga_last_error();
  EXPECT_TRUE(refused(create(on_device(0)), GA_ERROR_UNSUPPORTED, words));
  EXPECT_EQ(ga_last_error(), reason);
}

// ---- Devices -------------------------------------------------------------------------------------

TEST_F(Errors, DeviceCount) {
  int32_t count = -1;
  EXPECT_OK(ga_device_count(GA_DEVICE_CUDA, &count));
  EXPECT_EQ(count, devices_);
  EXPECT_OK(ga_device_count(GA_DEVICE_CPU, &count));
  EXPECT_EQ(count, 1);
}

TEST_F(Errors, OrdinalsOutOfRange) {
  const std::string there_are = "there are " + std::to_string(devices_);
  for (const int32_t ordinal : {devices_, devices_ + 100, -1}) {
    EXPECT_TRUE(refused(create(on_device(ordinal)), GA_ERROR_INVALID_ARGUMENT,
                        {"device_ordinal was " + std::to_string(ordinal)}));
  }
  EXPECT_TRUE(refused(create(on_device(devices_)), GA_ERROR_INVALID_ARGUMENT, {there_are}));
  EXPECT_OK(create(on_device(devices_ - 1)));
}

TEST_F(Errors, StreamOfAnotherDevice) {
  if (devices_ < 2) GTEST_SKIP() << "there is one device only";
  const Stream stream(1);
  EXPECT_TRUE(refused(create(on_device(0, static_cast<cudaStream_t>(stream))),
                      GA_ERROR_INVALID_ARGUMENT, {"stream is of CUDA device 1", "was 0"}));
  EXPECT_OK(create(on_device(1, static_cast<cudaStream_t>(stream))));
}

TEST_F(Errors, NoModule) {
  const Variable path("GA_MODULE_PATH", "/nowhere/at/all");
  expect_none({"libgradaccum_cuda.so", "/nowhere/at/all"});
}

#ifdef GA_SIMULATED

TEST_F(Errors, NoDriverOrDevice) {
  const auto with = [&](int driver, int version, const std::vector<std::string>& words) {
    sim::reset();
    configure([&](sim::Config& c) {
      c.driver = driver;
      c.driver_version = version;
    });
    expect_none(words);
  };
  with(cudaErrorInsufficientDriver, 0, {"no CUDA driver", "libcuda.so.1"});
  with(cudaErrorInsufficientDriver, 11040, {"driver", "too old", "11.4", "13.0"});
  with(cudaSuccess, 12000, {"driver", "too old", "12.0", "12.1"});  // would fail at a first launch
  with(cudaErrorNoDevice, 13000, {"shows no device", "13.0", "CUDA_VISIBLE_DEVICES"});
  with(cudaErrorUnknown, 12030, {"12.3", "does not work", "cudaErrorUnknown"});
  {
    const Variable hidden("CUDA_VISIBLE_DEVICES", "-1");
    with(cudaErrorNoDevice, 13000, {"CUDA_VISIBLE_DEVICES is -1"});
  }
  sim::reset();
  configure([](sim::Config& c) { c.devices = 0; });
  expect_none({"no device"});
  // The CPU still works.
  EXPECT_OK(create(config()));
  sim::reset();
}

// ---- Contexts of the driver: a thread keeps its own, and none comes to be on another device.

// Runs a context's life on a device. check() is called after each part of it.
template <class Check>
void live(const ga_config& c, Check&& check) {
  ga_context* ctx = nullptr;
  ASSERT_OK(ga_context_create(&c, &ctx));
  check("create");
  ga_optimizer sgd;
  ga_optimizer_init(&sgd, sizeof sgd, GA_OPTIMIZER_SGD, GA_FLAVOR_TORCH);
  ga_group group = -1;
  EXPECT_OK(ga_group_add(ctx, &sgd, &group));
  float *data = nullptr, *gradient = nullptr;
  {
    std::thread other([&] {  // the memory, without a context of this thread's
      EXPECT_CUDA(cudaSetDevice(c.device_ordinal));
      EXPECT_CUDA(cudaMalloc(&data, sizeof(float)));
      EXPECT_CUDA(cudaMalloc(&gradient, sizeof(float)));
      EXPECT_CUDA(cudaMemset(data, 0, sizeof(float)));
      EXPECT_CUDA(cudaMemset(gradient, 0, sizeof(float)));
    });
    other.join();
  }
  const int64_t shape[] = {1};
  ga_param param = -1;
  EXPECT_OK(ga_param_add(ctx, group, "p", data, GA_F32, 1, shape, nullptr, &param));
  check("add");
  const void* const gradients[] = {gradient};
  EXPECT_OK(ga_accumulate(ctx, gradients, 1, 1.0, nullptr));
  check("accumulate");
  EXPECT_OK(ga_step(ctx, nullptr));
  check("step");
  ga_step_result result;
  EXPECT_OK(ga_step_result_init(&result, sizeof result));
  EXPECT_OK(ga_step_result_get(ctx, 0, 1, &result));
  check("result");
  ga_context_destroy(ctx);
  check("destroy");
  std::thread other([&] {
    EXPECT_CUDA(cudaSetDevice(c.device_ordinal));
    EXPECT_CUDA(cudaFree(data));
    EXPECT_CUDA(cudaFree(gradient));
  });
  other.join();
}

TEST_F(Errors, ThreadsWithoutAContextGetNone) {
  for (const int32_t ordinal : {1, 0}) {
    sim::reset();
    std::thread thread([&] {
      live(on_device(ordinal), [&](const char* call) {
        EXPECT_EQ(sim::current_context(), nullptr) << call;
        EXPECT_FALSE(sim::has_primary_context(1 - ordinal)) << call;
      });
    });
    thread.join();
  }
}

TEST_F(Errors, ThreadsKeepTheContextOfTheDriver) {
  for (const int32_t ordinal : {1, 0}) {
    sim::reset();
    const CUcontext own = sim::make_context(0);
    std::thread thread([&] {
      sim::set_current_context(own);
      live(on_device(ordinal),
           [&](const char* call) { EXPECT_EQ(sim::current_context(), own) << call; });
    });
    thread.join();
    EXPECT_EQ(sim::has_primary_context(0), ordinal == 0);  // by the thread that made the memory
  }
}

// The stream knows in which context it works.
TEST_F(Errors, StreamsOfAContextOfTheDriver) {
  sim::reset();
  std::thread thread([] {
    cudaStream_t stream = nullptr;
    sim::set_current_context(sim::make_context(1));
    EXPECT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    sim::set_current_context(nullptr);
    EXPECT_OK(create(on_device(1, stream)));
    EXPECT_TRUE(refused(create(on_device(0, stream)), GA_ERROR_INVALID_ARGUMENT,
                        {"stream is of CUDA device 1", "was 0"}));
    EXPECT_FALSE(sim::has_primary_context(0));
    EXPECT_FALSE(sim::has_primary_context(1));
    EXPECT_EQ(sim::current_context(), nullptr);
    live(on_device(1, stream), [](const char* call) {
      EXPECT_EQ(sim::current_context(), nullptr) << call;
      EXPECT_EQ(sim::counters().late_loads, 0) << call;
    });
  });
  thread.join();
}

// Neither does another driver context of the same device take the work of a default stream.
TEST_F(Errors, DefaultStreamOfAContextOfTheDriver) {
  sim::reset();
  std::thread thread([] {
    const CUcontext own = sim::make_context(1);
    sim::set_current_context(own);
    ga_context* ctx = nullptr;
    const ga_config c = on_device(1);
    ASSERT_OK(ga_context_create(&c, &ctx));
    sim::set_current_context(nullptr);
    EXPECT_FALSE(sim::has_primary_context(1));
    ga_context_destroy(ctx);
    EXPECT_FALSE(sim::has_primary_context(1));
    EXPECT_EQ(sim::current_context(), nullptr);
  });
  thread.join();
}

// A program may make a context of the library while another stream is being captured: its kernels are loaded
// without breaking the capture.
TEST_F(Errors, MadeDuringACapture) {
  for (const cudaStreamCaptureMode mode :
       {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal}) {
    sim::reset();
    cudaStream_t captured = nullptr;
    EXPECT_CUDA(cudaStreamCreateWithFlags(&captured, cudaStreamNonBlocking));
    cudaStream_t own = nullptr;
    EXPECT_CUDA(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking));
    EXPECT_CUDA(cudaStreamBeginCapture(captured, mode));
    EXPECT_OK(create(on_device(0, own)));
    cudaGraph_t graph = nullptr;
    EXPECT_CUDA(cudaStreamEndCapture(captured, &graph));
    EXPECT_CUDA(cudaGraphDestroy(graph));
    EXPECT_EQ(sim::counters().late_loads, 0);
  }
}

TEST_F(Errors, SwitchingThatFails) {
  sim::reset();
  std::thread thread([] {
    ga_context* ctx = nullptr;
    const ga_config c = on_device(1);
    ASSERT_OK(ga_context_create(&c, &ctx));
    sim::fail_switch();
    EXPECT_TRUE(refused(ga_step(ctx, nullptr), GA_ERROR_FAULT,
                        {"choosing the device", "cudaErrorUnknown"}));
    EXPECT_EQ(sim::current_context(), nullptr);
    ga_context_destroy(ctx);
  });
  thread.join();
}

// The second switch of a call is the one back: the call has succeeded.
TEST_F(Errors, SwitchingBackThatFails) {
  sim::reset();
  std::thread thread([] {
    ga_context* ctx = nullptr;
    const ga_config c = on_device(1);
    ASSERT_OK(ga_context_create(&c, &ctx));
    sim::fail_switch(2);
    EXPECT_OK(ga_step(ctx, nullptr));
    EXPECT_EQ(sim::current_context(), nullptr);
    EXPECT_OK(ga_step(ctx, nullptr));
    ga_context_destroy(ctx);
  });
  thread.join();
}

// A context may be destroyed by a destructor of the program's that runs after the driver's: nothing is left to
// give back then, and cuBLAS must not be called.
TEST_F(Errors, DestroyedAfterTheDriver) {
  Machine m(GA_DEVICE_CUDA);
  const ga_param matrix =
      m.add(m.group(optimizer(GA_OPTIMIZER_SGD)), numbers(GA_F32, 12, 1), {3, 4});
  EXPECT_OK(ga_micro_begin(m, 0, 1, nullptr));
  EXPECT_OK(ga_accumulate_matmul(m, matrix, 2, m.put(numbers(GA_F32, 6, 2)), 2, 0,
                                 m.put(numbers(GA_F32, 8, 3)), 4, 0, GA_F32));
  EXPECT_OK(ga_micro_end(m));
  m.step();
  configure([](sim::Config& c) { c.driver = cudaErrorCudartUnloading; });
  m.destroy();
  sim::reset();
}

// A device that this build has no code for.
TEST_F(Errors, NoCodeForTheDevice) {
  sim::fail_call(2, cudaErrorNoKernelImageForDevice);
  EXPECT_TRUE(refused(create(on_device(0)), GA_ERROR_UNSUPPORTED,
                      {"device 0", "compute capability 9.0", "cudaErrorNoKernelImageForDevice"}));
}

#endif

// ---- Other processes -----------------------------------------------------------------------------

// CUDA does not work in a child of fork(). Contexts of the parent refuse all calls there.
TEST_F(Errors, ContextsOfTheParentAfterFork) {
  const auto run = [](bool forks) {
    Machine m(GA_DEVICE_CUDA);
    m.group(optimizer(GA_OPTIMIZER_ADAMW));
    m.add(0, numbers(GA_F32, 1000, 1));
    m.accumulate({m.put(numbers(GA_F32, 1000, 2))});
    if (forks) {
      in_child([&] {
#ifdef GA_SIMULATED
        sim::reset_counters();
#endif
        EXPECT_TRUE(refused(ga_step(m, nullptr), GA_ERROR_INVALID_STATE, {"fork"}));
        EXPECT_TRUE(refused(ga_synchronize(m), GA_ERROR_INVALID_STATE, {"fork"}));
        EXPECT_TRUE(refused(ga_discard(m), GA_ERROR_INVALID_STATE, {"fork"}));
        ga_context_destroy(m);
#ifdef GA_SIMULATED
        const sim::Counters c = sim::counters();
        EXPECT_EQ(c.launches + c.copies + c.fills + c.synchronizations + c.queries + c.frees, 0);
        EXPECT_GT(c.device_bytes, 0);
#endif
        EXPECT_OK(create(config()));
      });
    }
    m.step();
    return m.value(0);
  };
  EXPECT_TRUE(run(true) == run(false)) << "the parent's context was changed";
}

// ---- Memory of the host and of other devices -----------------------------------------------------

// An allocation of one kind of memory, in floats.
class Memory {
 public:
  enum Kind { kHost, kPinned, kRegistered, kManaged, kPool, kDevice, kOtherDevice };
  explicit Memory(Kind kind, size_t floats = 64) : kind_(kind) {
    const size_t bytes = 4 * floats;
    switch (kind) {
      case kHost:
        data_ = calloc(floats, 4);
        break;
      case kPinned:
        EXPECT_CUDA(cudaMallocHost(&data_, bytes));
        memset(data_, 0, bytes);
        break;
      case kRegistered:
        data_ = calloc(floats, 4);
        EXPECT_CUDA(cudaHostRegister(data_, bytes, cudaHostRegisterMapped));
        break;
      case kManaged:
        EXPECT_CUDA(cudaMallocManaged(&data_, bytes));
        memset(data_, 0, bytes);
        break;
      case kPool:
        EXPECT_CUDA(cudaMallocAsync(&data_, bytes, nullptr));
        EXPECT_CUDA(cudaMemset(data_, 0, bytes));
        break;
      default:
        EXPECT_CUDA(cudaSetDevice(kind == kOtherDevice ? 1 : 0));
        EXPECT_CUDA(cudaMalloc(&data_, bytes));
        EXPECT_CUDA(cudaMemset(data_, 0, bytes));
        EXPECT_CUDA(cudaSetDevice(0));
    }
  }
  ~Memory() {
    if (kind_ == kHost)
      free(data_);
    else if (kind_ == kPinned)
      cudaFreeHost(data_);
    else if (kind_ == kRegistered)
      cudaHostUnregister(data_), free(data_);
    else
      cudaFree(data_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* data() const { return data_; }

 private:
  Kind kind_;
  void* data_ = nullptr;
};

// Calls every function that takes an address of the program.
class Places {
 public:
  Places() {
    ga_config c = cuda_config(stream_);
    EXPECT_OK(ga_context_create(&c, &ctx_));
    const ga_optimizer o = plain_sgd();
    EXPECT_OK(ga_group_add(ctx_, &o, nullptr));
    ga_ema e;
    EXPECT_OK(ga_ema_init(&e, sizeof e));
    EXPECT_OK(ga_context_set_ema(ctx_, &e));
    ga_param_options p = options();
    p.rows = GA_ROWS_DENSE;
    const int64_t shape[] = {8, 8};
    EXPECT_OK(ga_param_add(ctx_, 0, "p", own_.data(), GA_F32, 2, shape, &p, nullptr));
  }
  ~Places() { ga_context_destroy(ctx_); }
  operator ga_context*() const { return ctx_; }

  void each(void* data, const std::function<void(const char*, ga_status)>& f) {
    static int number = 0;
    const int64_t shape[] = {64};
    const std::string name = "q" + std::to_string(number++);
    f("ga_param_bind", ga_param_bind(ctx_, 0, data));
    EXPECT_OK(ga_param_bind(ctx_, 0, own_.data()));
    EXPECT_OK(ga_micro_begin(ctx_, 0, 1, nullptr));
    f("ga_accumulate_part", ga_accumulate_part(ctx_, 0, data));
    f("values", ga_accumulate_rows(ctx_, 0, own_indices_.data(), GA_I32, 2, data));
    f("indices", ga_accumulate_rows(ctx_, 0, data, GA_I32, 2, other_.data()));
    for (const bool a : {true, false})
      f("a product", ga_accumulate_matmul(ctx_, 0, 8, a ? data : other_.data(), 8, GA_NO_TRANSPOSE,
                                          a ? other_.data() : data, 8, GA_NO_TRANSPOSE, GA_F32));
    EXPECT_OK(ga_micro_end(ctx_));
    f("ga_accumulate", ga_accumulate(ctx_, &data, 1, 1, nullptr));
    EXPECT_OK(ga_discard(ctx_));
    f("ga_ema_copy_to", ga_ema_copy_to(ctx_, 0, data, GA_F32));
    f("ga_param_add",
      ga_param_add(ctx_, 0, name.c_str(), data, GA_F32, 1, shape, nullptr, nullptr));
  }

 private:
  Stream stream_;
  Memory own_{Memory::kDevice}, other_{Memory::kDevice}, own_indices_{Memory::kDevice};
  ga_context* ctx_ = nullptr;
};

TEST_F(Errors, MemoryThatTheDeviceCannotRead) {
  int reads_host = 0;
  EXPECT_CUDA(
      cudaDeviceGetAttribute(&reads_host, cudaDevAttrPageableMemoryAccessUsesHostPageTables, 0));
  Places places;
  if (reads_host == 0) {
    const Memory host(Memory::kHost);
    places.each(host.data(), [](const char* what, ga_status status) {
      EXPECT_TRUE(refused(status, GA_ERROR_INVALID_ARGUMENT, {"is host memory", "CUDA device 0"}))
          << what;
    });
  }
  if (devices_ > 1) {
    const Memory there(Memory::kOtherDevice);
    places.each(there.data(), [](const char* what, ga_status status) {
      EXPECT_TRUE(refused(status, GA_ERROR_INVALID_ARGUMENT,
                          {"memory of CUDA device 1", "expected memory of CUDA device 0"}))
          << what;
    });
  }
  const ga_window_info w = window(places);
  EXPECT_EQ(w.state, GA_WINDOW_EMPTY);
}

TEST_F(Errors, MemoryThatTheDeviceReads) {
  for (const Memory::Kind kind :
       {Memory::kPinned, Memory::kRegistered, Memory::kManaged, Memory::kPool, Memory::kDevice}) {
    const Memory memory(kind);
    Places places;
    places.each(memory.data(),
                [](const char* what, ga_status status) { EXPECT_EQ(status, GA_OK) << what; });
    EXPECT_OK(ga_synchronize(places));
  }
}

#ifdef GA_SIMULATED
// Devices that cannot use the host's addresses of registered memory.
TEST_F(Errors, RegisteredMemoryAtAnotherAddress) {
  configure([](sim::Config& c) { c.registered_apart = true; });
  const Memory memory(Memory::kRegistered);
  {
    Places places;
    places.each(memory.data(), [](const char* what, ga_status status) {
      EXPECT_TRUE(
          refused(status, GA_ERROR_INVALID_ARGUMENT, {"pinned host memory", "another address"}))
          << what;
    });
  }
  configure([](sim::Config& c) { c.pageable_access = true; });
  Places places;
  places.each(memory.data(),
              [](const char* what, ga_status status) { EXPECT_EQ(status, GA_OK) << what; });
}

// Drivers that answer with an error for memory that they do not know.
TEST_F(Errors, MemoryThatTheDriverDoesNotKnow) {
  configure([](sim::Config& c) { c.known_only = true; });
  const Memory memory(Memory::kHost);
  {
    Places places;
    places.each(memory.data(), [](const char* what, ga_status status) {
      EXPECT_TRUE(refused(status, GA_ERROR_INVALID_ARGUMENT, {"is host memory"})) << what;
      EXPECT_EQ(cudaGetLastError(), cudaSuccess) << what;
    });
  }
  configure([](sim::Config& c) { c.pageable_access = true; });
  Places places;
  places.each(memory.data(),
              [](const char* what, ga_status status) { EXPECT_EQ(status, GA_OK) << what; });
}

// By the page tables of the host, not by heterogeneous memory management.
TEST_F(Errors, MemoryThatADeviceReadsThroughThePagesOfTheHost) {
  const Memory memory(Memory::kHost);
  for (const bool host_page_tables : {true, false}) {
    configure([&](sim::Config& c) {
      c.pageable_access = true;
      c.host_page_tables = host_page_tables;
    });
    Places places;
    places.each(memory.data(), [&](const char* what, ga_status status) {
      if (host_page_tables) {
        EXPECT_EQ(status, GA_OK) << what;
      } else {
        EXPECT_TRUE(refused(status, GA_ERROR_INVALID_ARGUMENT, {"is host memory"})) << what;
      }
    });
  }
}
#endif

// ---- Failures of single calls --------------------------------------------------------------------

// A sequence of calls, each of which may fail, with its results.
class Scenario {
 public:
  // on_failure(status) returns whether to repeat the call.
  explicit Scenario(std::function<bool(ga_status)> on_failure = nullptr)
      : on_failure_(std::move(on_failure)), stream_(0) {
    for (int64_t i = 0; i < 4; ++i) {
      const auto seed = static_cast<uint64_t>(i);
      params_.push_back(std::make_unique<DeviceTensor>(numbers(GA_F32, kCount, seed), stream_, 0));
      gradients_.push_back(
          std::make_unique<DeviceTensor>(numbers(GA_F32, kCount, 10 + seed), stream_, 0));
    }
    indices_ = std::make_unique<DeviceTensor>(Tensor(GA_F32, 12), stream_, 0);
    stream_.wait();
  }
  ~Scenario() { ga_context_destroy(ctx_); }

  bool products = true;  // include matrix products, which take much memory
  // Makes all calls. Returns false if a call failed and was not repeated.
  bool run() {
    ga_config c = cuda_config(stream_);
    if (!make([&] { return ga_context_create(&c, &ctx_); })) return false;
    ga_ema ema;
    EXPECT_OK(ga_ema_init(&ema, sizeof ema));
    if (!make([&] { return ga_context_set_ema(ctx_, &ema); })) return false;
    const ga_clip agc = clip(GA_CLIP_AGC, 0);
    const std::pair<int32_t, bool> groups[] = {
        {GA_OPTIMIZER_ADAMW, false}, {GA_OPTIMIZER_LAMB, false}, {GA_OPTIMIZER_SGD, true}};
    for (const auto& [kind, clipped] : groups) {
      const ga_optimizer o = optimizer(kind);
      ga_group g = -1;
      if (!make([&] { return ga_group_add(ctx_, &o, &g); })) return false;
      if (clipped && !make([&] { return ga_group_set_clip(ctx_, g, &agc); })) return false;
    }
    ga_schedule schedule = test::schedule(GA_SCHEDULE_TABLE);
    const double rates[] = {0.5, 0.25, 0.125};
    schedule.table = rates;
    schedule.table_size = 3;
    if (!make([&] { return ga_group_set_schedule(ctx_, 0, &schedule); })) return false;
    const ga_loss_scaler scaler = [] {
      ga_loss_scaler s;
      EXPECT_OK(ga_loss_scaler_init(&s, sizeof s));
      s.initial_scale = 8;
      return s;
    }();
    if (!make([&] { return ga_context_set_loss_scaler(ctx_, &scaler); })) return false;
    for (int i = 0; i < 3; ++i)
      if (!add(i, i)) return false;
    for (int w = 0; w < 2; ++w)
      if (!window()) return false;
    // A parameter that is added late, for which all tables grow, on another stream.
    if (!make([&] { return ga_context_set_stream(ctx_, static_cast<cudaStream_t>(other_)); }))
      return false;
    if (!add(3, 0) || !window()) return false;
    for (int i = 0; i < 4; ++i)
      if (!make([&] { return ga_ema_copy_to(ctx_, i, gradients_[0]->data(), GA_F32); }))
        return false;
    double number = 0;
    ga_step_result r = {};
    r.struct_size = sizeof r;
    if (!make([&] { return ga_loss_scale(ctx_, &number, nullptr); })) return false;
    if (!make([&] { return ga_group_lr(ctx_, 0, &number); })) return false;
    if (!make([&] { return ga_step_result_get(ctx_, 0, 1, &r); })) return false;
    return make([&] { return ga_synchronize(ctx_); });
  }

  std::vector<Tensor> values() const {
    std::vector<Tensor> result;
    for (const auto& p : params_) result.push_back(p->get());
    return result;
  }
  void destroy() {
    ga_context_destroy(ctx_);
    ctx_ = nullptr;
  }
  ga_context* context() const { return ctx_; }
  int64_t failures() const { return failures_; }

  // Whether the context works again after ga_discard.
  bool can_continue() {
    ga_window_info w = {};
    w.struct_size = sizeof w;
    if (ga_window(ctx_, &w) != GA_OK || w.state != GA_WINDOW_INVALID) return false;
    if (ga_synchronize(ctx_) != GA_OK) return false;
    EXPECT_OK(ga_discard(ctx_));
    EXPECT_TRUE(window()) << ga_last_error();
    return true;
  }

  // Expects that every call that needs the device returns the fault.
  void expect_faults() {
    const std::string why = ga_last_error();
    const auto faulty = [&](ga_status status) { return refused(status, GA_ERROR_FAULT, {why}); };
    double number = 0;
    ga_step_result r = {};
    r.struct_size = sizeof r;
    EXPECT_TRUE(faulty(ga_synchronize(ctx_)));
    EXPECT_TRUE(faulty(ga_step_result_get(ctx_, 0, 1, &r)));
    EXPECT_TRUE(faulty(ga_context_set_stream(ctx_, nullptr)));
    if (added_ > 0) {
      const void* const list[] = {gradients_[0]->data(), nullptr, nullptr, nullptr};
      EXPECT_TRUE(faulty(ga_group_lr(ctx_, 0, &number)));
      EXPECT_TRUE(faulty(ga_group_set_lr(ctx_, 0, 1)));
      EXPECT_TRUE(faulty(ga_loss_scale(ctx_, &number, nullptr)));
      EXPECT_NE(ga_accumulate(ctx_, list, static_cast<size_t>(added_), 1, nullptr), GA_OK);
      EXPECT_NE(ga_step(ctx_, nullptr), GA_OK);
    }
    EXPECT_TRUE(faulty(ga_synchronize(ctx_)));
  }

 private:
  static constexpr int64_t kRows = 12, kColumns = 10, kCount = kRows * kColumns;

  template <class Call>
  bool make(Call&& call) {
    for (int attempt = 0; attempt < 3; ++attempt) {
      const ga_status status = call();
      if (status == GA_OK) return true;
      ++failures_;
      if (!on_failure_ || !on_failure_(status)) return false;
    }
    ADD_FAILURE() << "the call failed again: " << ga_last_error();
    return false;
  }
  bool add(int i, ga_group group) {
    ga_param_options o = options();
    o.rows = i == 0 ? GA_ROWS_LAZY : 0;
    const int64_t shape[] = {kRows, kColumns};
    const std::string name = "p" + std::to_string(i);
    if (!make([&] {
          return ga_param_add(ctx_, group, name.c_str(), params_[static_cast<size_t>(i)]->data(),
                              GA_F32, 2, shape, &o, nullptr);
        }))
      return false;
    ++added_;
    return true;
  }
  bool window() {
    std::vector<const void*> list;
    for (int i = 0; i < added_; ++i) list.push_back(gradients_[static_cast<size_t>(i)]->data());
    if (!make([&] { return ga_accumulate(ctx_, list.data(), list.size(), 1, nullptr); }) ||
        !make([&] { return ga_step(ctx_, nullptr); }) ||
        !make([&] { return ga_micro_begin(ctx_, 0, 1, nullptr); }) || !make([&] {
          return ga_accumulate_rows(ctx_, 0, indices_->data(), GA_I32, 12, gradients_[1]->data());
        }) ||
        !make([&] { return ga_accumulate_part(ctx_, 2, gradients_[2]->data()); }) || !make([&] {
          return ga_accumulate_matmul(ctx_, 1, 5, gradients_[0]->data(), 5, GA_NO_TRANSPOSE,
                                      gradients_[1]->data(), kColumns, GA_NO_TRANSPOSE, GA_F32);
        }) ||
        !make([&] { return ga_micro_end(ctx_); }))
      return false;
    return make([&] { return ga_step(ctx_, nullptr); });
  }

  std::function<bool(ga_status)> on_failure_;
  Stream stream_, other_;
  std::vector<std::unique_ptr<DeviceTensor>> params_, gradients_;
  std::unique_ptr<DeviceTensor> indices_;
  ga_context* ctx_ = nullptr;
  int added_ = 0;
  int64_t failures_ = 0;
};

std::vector<Tensor> values_without_failures() {
  Scenario scenario;
  EXPECT_TRUE(scenario.run()) << ga_last_error();
  return scenario.values();
}

TEST_F(Errors, NoFailure) { values_without_failures(); }

#ifdef GA_SIMULATED

// Each allocation fails once. The call changes nothing and succeeds when it is repeated.
TEST_F(Errors, OutOfMemory) {
  const std::vector<Tensor> expected = values_without_failures();
  int64_t n = 1;
  for (;; ++n) {
    ASSERT_LT(n, 1000);
    SCOPED_TRACE(n);
    Scenario scenario([&](ga_status status) {
      EXPECT_EQ(status, GA_ERROR_OUT_OF_MEMORY) << ga_last_error();
      return status == GA_ERROR_OUT_OF_MEMORY;
    });
    const int64_t before = sim::counters().device_bytes, pinned = sim::counters().pinned_bytes;
    sim::fail_allocation(n);
    const bool completed = scenario.run();
    sim::fail_allocation(0);
    ASSERT_TRUE(completed);
    const std::vector<Tensor> got = scenario.values();
    for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(got[i] == expected[i]) << i;
    const int64_t failures = scenario.failures();
    scenario.destroy();
    EXPECT_EQ(sim::counters().device_bytes, before);
    EXPECT_EQ(sim::counters().pinned_bytes, pinned);
    if (HasFailure() || failures == 0) break;
  }
  EXPECT_GT(n, 20);
}

// The context is destroyed right after an allocation has failed.
TEST_F(Errors, OutOfMemoryThenDestroyed) {
  for (int64_t n = 1;; ++n) {
    ASSERT_LT(n, 1000);
    SCOPED_TRACE(n);
    Scenario scenario([](ga_status) { return false; });
    const int64_t before = sim::counters().device_bytes, pinned = sim::counters().pinned_bytes;
    sim::fail_allocation(n);
    const bool completed = scenario.run();
    sim::fail_allocation(0);
    scenario.destroy();
    ASSERT_EQ(sim::counters().device_bytes, before);
    ASSERT_EQ(sim::counters().pinned_bytes, pinned);
    if (completed) break;
  }
}

// Each call that queues work fails once. The fault is sticky; nothing hangs or leaks.
TEST_F(Errors, WorkThatCannotBeQueued) {
  for (const bool deferred : {false, true}) {
    configure([&](sim::Config& c) { c.deferred = deferred; });
    // Later calls repeat the earlier ones, so only some of them are made to fail.
    for (int64_t n = 1;; n += n < 70 ? 1 : deferred ? 5 : 4) {
      ASSERT_LT(n, 1000);
      SCOPED_TRACE(n);
      ga_status seen = GA_OK;
      Scenario scenario([&](ga_status status) {
        seen = status;
        return false;
      });
      const int64_t before = sim::counters().device_bytes, pinned = sim::counters().pinned_bytes;
      scenario.products = n % 3 == 0;
      sim::fail_call(n, cudaErrorLaunchOutOfResources);
      const bool completed = scenario.run();
      sim::fail_call(0, cudaSuccess);
      if (completed && scenario.products) break;
      if (completed) continue;
      if (scenario.context()) {
        EXPECT_EQ(seen, GA_ERROR_FAULT) << ga_last_error();
        scenario.expect_faults();
      } else {
        EXPECT_TRUE(seen == GA_ERROR_FAULT || seen == GA_ERROR_UNSUPPORTED) << ga_last_error();
      }
      scenario.destroy();
      ASSERT_EQ(sim::counters().device_bytes, before);
      ASSERT_EQ(sim::counters().pinned_bytes, pinned);
      if (HasFailure()) return;
    }
  }
}

// Each call that queues work fails once for lack of memory: the library's call changes nothing, or
// it reports a fault.
TEST_F(Errors, WorkThatIsOutOfMemory) {
  const std::vector<Tensor> expected = values_without_failures();
  int64_t again = 0;
  for (int64_t n = 1;; n += n < 70 ? 1 : 4) {
    ASSERT_LT(n, 1000);
    SCOPED_TRACE(n);
    Scenario scenario([&](ga_status status) { return status == GA_ERROR_OUT_OF_MEMORY; });
    sim::fail_call(n, cudaErrorMemoryAllocation);
    const bool completed = scenario.run();
    sim::fail_call(0, cudaSuccess);
    if (!completed) {
      if (!scenario.context()) continue;
      if (scenario.can_continue()) continue;
      scenario.expect_faults();
      continue;
    }
    const std::vector<Tensor> got = scenario.values();
    for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(got[i] == expected[i]) << i;
    again += scenario.failures();
    if (HasFailure() || scenario.failures() == 0) break;
  }
  EXPECT_GT(again, 10);
}

// Each piece of queued work fails once while it runs.
TEST_F(Errors, WorkThatFails) {
  int64_t faults = 0;
  for (const bool deferred : {false, true}) {
    for (int64_t n = 1;; n += n < 40 ? 1 : 7) {
      ASSERT_LT(n, 2000);
      SCOPED_TRACE(n);
      sim::reset();
      configure([&](sim::Config& c) { c.deferred = deferred; });
      ga_status seen = GA_OK;
      Scenario scenario([&](ga_status status) {
        seen = status;
        return false;
      });
      scenario.products = n % 3 == 0;
      sim::fail_execution(n);
      const bool completed = scenario.run();
      if (completed && scenario.products) break;
      if (completed) continue;
      ++faults;
      if (scenario.context()) {
        EXPECT_EQ(seen, GA_ERROR_FAULT) << ga_last_error();
        scenario.expect_faults();
      } else {
        EXPECT_TRUE(seen == GA_ERROR_FAULT || seen == GA_ERROR_UNSUPPORTED) << ga_last_error();
      }
      scenario.destroy();
      if (HasFailure()) return sim::reset();
    }
  }
  EXPECT_GT(faults, 50);
  sim::reset();
}

// ga_context_memory reports the bytes before they are allocated.
TEST_F(Errors, MemoryIsReportedBeforeAllocation) {
  Stream stream;
  const DeviceTensor p(numbers(GA_F32, 200000, 1), stream), q(numbers(GA_BF16, 5000, 2), stream);
  const DeviceTensor g(numbers(GA_F32, 200000, 3), stream), h(numbers(GA_BF16, 5000, 4), stream);
  const int64_t before = sim::counters().device_bytes;
  ga_config c = cuda_config(stream);
  ga_context* ctx = nullptr;
  ASSERT_OK(ga_context_create(&c, &ctx));
  const ga_optimizer o = optimizer(GA_OPTIMIZER_LAMB);
  EXPECT_OK(ga_group_add(ctx, &o, nullptr));
  const int64_t shape[] = {200000}, shorter[] = {5000};
  EXPECT_OK(ga_param_add(ctx, 0, "p", p.data(), GA_F32, 1, shape, nullptr, nullptr));
  EXPECT_OK(ga_param_add(ctx, 0, "q", q.data(), GA_BF16, 1, shorter, nullptr, nullptr));
  const ga_memory planned = memory(ctx);
  const void* const gradients[] = {g.data(), h.data()};
  for (int w = 0; w < 3; ++w) {
    EXPECT_OK(ga_accumulate(ctx, gradients, 2, 1, nullptr));
    EXPECT_OK(ga_step(ctx, nullptr));
  }
  const ga_memory owned = memory(ctx);
  EXPECT_EQ(planned.accumulators, owned.accumulators);
  EXPECT_EQ(planned.optimizer_state, owned.optimizer_state);
  EXPECT_EQ(planned.masters, owned.masters);
  const int64_t held = sim::counters().device_bytes - before;
  EXPECT_LE(held, owned.total);
  EXPECT_LE(owned.total, 2 * held);
  EXPECT_NEAR(static_cast<double>(planned.total), static_cast<double>(owned.total),
              0.02 * static_cast<double>(owned.total));
  ga_context_destroy(ctx);
}

#endif

// ---- Contexts beside each other ------------------------------------------------------------------

// A context with its own numbers, which runs windows one at a time.
struct Training {
  Stream stream;
  ga_context* ctx = nullptr;
  std::unique_ptr<DeviceTensor> p, g;
  uint64_t seed;

  Training(int device, int32_t kind, uint64_t seed) : stream(device), seed(seed) {
    ga_config c = cuda_config(stream);
    EXPECT_OK(ga_context_create(&c, &ctx));
    const ga_optimizer o = optimizer(kind);
    EXPECT_OK(ga_group_add(ctx, &o, nullptr));
    const ga_clip clipped = clip(GA_CLIP_GLOBAL, 0.5);
    EXPECT_OK(ga_context_set_clip(ctx, &clipped));
    p = std::make_unique<DeviceTensor>(numbers(GA_F32, 66000, seed), stream);
    g = std::make_unique<DeviceTensor>(numbers(GA_F32, 66000, seed + 1), stream);
    const int64_t shape[] = {66000};
    EXPECT_OK(ga_param_add(ctx, 0, "p", p->data(), GA_F32, 1, shape, nullptr, nullptr));
  }
  ~Training() { ga_context_destroy(ctx); }

  void step(int which) {
    const void* const list[] = {g->data()};
    if (which % 3 == 0) g->put(numbers(GA_F32, 66000, seed + static_cast<uint64_t>(which)));
    if (which % 3 < 2)
      EXPECT_EQ(ga_accumulate(ctx, list, 1, 1 + which, nullptr), GA_OK) << ga_last_error();
    else
      EXPECT_EQ(ga_step(ctx, nullptr), GA_OK) << ga_last_error();
  }
};

TEST_F(Errors, ContextsAreIndependent) {
  const std::pair<int32_t, uint64_t> kinds[] = {
      {GA_OPTIMIZER_ADAMW, 1}, {GA_OPTIMIZER_LAMB, 2}, {GA_OPTIMIZER_SGD, 3}};
  for (const bool deferred : {false, true}) {
#ifdef GA_SIMULATED
    configure([&](sim::Config& c) { c.deferred = deferred; });
#else
    if (deferred) continue;
#endif
    std::vector<Tensor> apart;
    for (size_t i = 0; i < 3; ++i) {
      const int device = devices_ > 1 ? static_cast<int>(i % 2) : 0;
      Training training(device, kinds[i].first, kinds[i].second);
      for (int k = 0; k < 9; ++k) training.step(k);
      apart.push_back(training.p->get());
    }
    std::vector<std::unique_ptr<Training>> trainings;
    for (size_t i = 0; i < 3; ++i) {
      const int device = devices_ > 1 ? static_cast<int>(i % 2) : 0;
      trainings.push_back(std::make_unique<Training>(device, kinds[i].first, kinds[i].second));
    }
    for (int k = 0; k < 9; ++k)
      for (const auto& training : trainings) training->step(k);
    for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(trainings[i]->p->get() == apart[i]) << i;

    // Each context in its own thread.
    trainings.clear();
    for (size_t i = 0; i < 3; ++i)
      trainings.push_back(std::make_unique<Training>(0, kinds[i].first, kinds[i].second));
    std::vector<std::thread> threads;
    for (const auto& training : trainings)
      threads.emplace_back([w = training.get()] {
        for (int k = 0; k < 9; ++k) w->step(k);
      });
    for (std::thread& thread : threads) thread.join();
    for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(trainings[i]->p->get() == apart[i]) << i;
  }
}

// Contexts on the legacy default stream, and none on the per-thread one, which is another in each thread.
TEST_F(Errors, DefaultStreams) {
  const auto run = [](void* stream) {
    const Stream own;  // for the tensors
    DeviceTensor p(numbers(GA_F32, 500, 1), own), g(numbers(GA_F32, 500, 2), own);
    own.wait();
    ga_config c = on_device(0, stream);
    ga_context* ctx = nullptr;
    EXPECT_OK(ga_context_create(&c, &ctx));
    const ga_optimizer o = optimizer(GA_OPTIMIZER_ADAMW);
    EXPECT_OK(ga_group_add(ctx, &o, nullptr));
    const int64_t shape[] = {500};
    EXPECT_OK(ga_param_add(ctx, 0, "p", p.data(), GA_F32, 1, shape, nullptr, nullptr));
    const void* const list[] = {g.data()};
    for (int w = 0; w < 3; ++w) {
      EXPECT_OK(ga_accumulate(ctx, list, 1, 1, nullptr));
      EXPECT_OK(ga_step(ctx, nullptr));
    }
    EXPECT_OK(ga_synchronize(ctx));
    ga_context_destroy(ctx);
    return p.get();
  };
  const Stream stream;
  const Tensor expected = run(static_cast<cudaStream_t>(stream));
  EXPECT_TRUE(run(nullptr) == expected);
  EXPECT_TRUE(run(cudaStreamLegacy) == expected);
  EXPECT_TRUE(refused(create(on_device(0, cudaStreamPerThread)), GA_ERROR_INVALID_ARGUMENT,
                      {"cudaStreamPerThread", "another stream in each thread"}));
}

// An error that the program has left in its thread is no failure of the library's, and stays for the program.
TEST_F(Errors, ErrorsOfTheProgramStayItsOwn) {
  const auto left = [] { return cudaPeekAtLastError() == cudaErrorInvalidDevice; };
  EXPECT_NE(cudaSetDevice(99), cudaSuccess);
  {
    Machine m(GA_DEVICE_CUDA);
    EXPECT_TRUE(left()) << "create";
    const ga_group group = m.group(optimizer(GA_OPTIMIZER_ADAMW));
    ga_param_options o = options();
    o.rows = GA_ROWS_LAZY;
    const ga_param table = m.add(group, numbers(GA_F32, 120, 1), {12, 10}, o);
    const ga_param dense = m.add(group, numbers(GA_F32, 50, 2));
    Tensor indices(GA_F64, 3);
    const int64_t rows[] = {4, 7, 4};
    memcpy(indices.data(), rows, sizeof rows);
    for (int w = 0; w < 2; ++w) {
      EXPECT_OK(ga_micro_begin(m, 0, 1, nullptr));
      EXPECT_OK(ga_accumulate_part(m, dense, m.put(numbers(GA_F32, 50, 3))));
      EXPECT_OK(
          ga_accumulate_rows(m, table, m.put(indices), GA_I64, 3, m.put(numbers(GA_F32, 30, 4))));
      EXPECT_TRUE(left()) << "rows";
      EXPECT_OK(ga_micro_end(m));
      EXPECT_OK(ga_step(m, nullptr));
      EXPECT_EQ(result_of(m).outcome, GA_STEP_APPLIED);
      EXPECT_TRUE(left()) << "step";
    }
  }
  EXPECT_TRUE(left()) << "destroy";
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
}

// No call changes the current device of its caller.
TEST_F(Errors, TheCurrentDeviceIsTheCallers) {
  if (devices_ < 2) GTEST_SKIP() << "there is one device only";
  const Stream stream(0);
  const DeviceTensor p(numbers(GA_F32, 120, 1), stream), g(numbers(GA_F32, 120, 2), stream);
  const DeviceTensor indices(Tensor(GA_F32, 3), stream), out(Tensor(GA_F32, 120), stream);
  stream.wait();
  EXPECT_CUDA(cudaSetDevice(1));
  const auto check = [](const char* what, ga_status status) {
    EXPECT_EQ(status, GA_OK) << what << ": " << ga_last_error();
    int now = -1;
    EXPECT_CUDA(cudaGetDevice(&now));
    EXPECT_EQ(now, 1) << what;
  };
  int32_t count = 0;
  check("count", ga_device_count(GA_DEVICE_CUDA, &count));
  ga_config c = cuda_config(stream);
  ga_context* ctx = nullptr;
  check("create", ga_context_create(&c, &ctx));
  const ga_optimizer o = optimizer(GA_OPTIMIZER_ADAMW);
  check("group", ga_group_add(ctx, &o, nullptr));
  ga_ema e;
  EXPECT_OK(ga_ema_init(&e, sizeof e));
  check("ema", ga_context_set_ema(ctx, &e));
  ga_loss_scaler s;
  EXPECT_OK(ga_loss_scaler_init(&s, sizeof s));
  check("scaler", ga_context_set_loss_scaler(ctx, &s));
  const int64_t shape[] = {12, 10};
  ga_param_options options = test::options();
  options.rows = GA_ROWS_LAZY;
  check("param", ga_param_add(ctx, 0, "p", p.data(), GA_F32, 2, shape, &options, nullptr));
  const void* const list[] = {g.data()};
  check("accumulate", ga_accumulate(ctx, list, 1, 1, nullptr));
  check("begin", ga_micro_begin(ctx, 1, 1, nullptr));
  check("part", ga_accumulate_part(ctx, 0, g.data()));
  check("rows", ga_accumulate_rows(ctx, 0, indices.data(), GA_I32, 3, g.data()));
  check("matmul", ga_accumulate_matmul(ctx, 0, 4, g.data(), 4, GA_NO_TRANSPOSE, g.data(), 10,
                                       GA_NO_TRANSPOSE, GA_F32));
  check("end", ga_micro_end(ctx));
  check("step", ga_step(ctx, nullptr));
  double number = 0;
  ga_step_result r = {};
  r.struct_size = sizeof r;
  check("scale", ga_loss_scale(ctx, &number, nullptr));
  check("lr", ga_group_lr(ctx, 0, &number));
  check("set lr", ga_group_set_lr(ctx, 0, 0.5));
  check("result", ga_step_result_get(ctx, 0, 1, &r));
  check("averages", ga_ema_copy_to(ctx, 0, out.data(), GA_F32));
  check("discard", ga_discard(ctx));
  check("synchronize", ga_synchronize(ctx));
  const int64_t flat[] = {1};
  EXPECT_NE(ga_param_add(ctx, 0, "q", &number, GA_F64, 1, flat, nullptr, nullptr), GA_OK);
  check("a refusal", GA_OK);
  ga_context_destroy(ctx);
  check("destroy", GA_OK);
  EXPECT_CUDA(cudaSetDevice(0));
}

// ---- Row indices out of range --------------------------------------------------------------------

TEST_F(Errors, RowsOutOfRange) {
  for (const int32_t rows : {GA_ROWS_DENSE, GA_ROWS_LAZY}) {
    for (const int32_t nonfinite : {GA_NONFINITE_SKIP_STEP, GA_NONFINITE_DROP_MICRO}) {
      for (const int64_t wrong : {int64_t{12}, int64_t{-1}, int64_t{1} << 40}) {
        SCOPED_TRACE(testing::Message() << rows << " " << nonfinite << " " << wrong);
        ga_config c = config();
        c.nonfinite = nonfinite;
        Machine m(GA_DEVICE_CUDA, c);
        const ga_group group = m.group(optimizer(GA_OPTIMIZER_ADAMW));
        ga_param_options o = options();
        o.rows = rows;
        const ga_param table = m.add(group, numbers(GA_F32, 120, 1), {12, 10}, o);
        const ga_param dense = m.add(group, numbers(GA_F32, 50, 2));
        const auto indices = [&](int64_t second) {
          Tensor t(GA_F64, 3);
          const int64_t list[] = {4, second, 4};
          memcpy(t.data(), list, sizeof list);
          return t;
        };
        const auto window = [&](int64_t second, bool ends) {
          EXPECT_OK(ga_micro_begin(m, 0, 1, nullptr));
          EXPECT_OK(ga_accumulate_part(m, dense, m.put(numbers(GA_F32, 50, 3))));
          for (const int64_t k : {int64_t{7}, second, int64_t{9}})
            EXPECT_OK(ga_accumulate_rows(m, table, m.put(indices(k)), GA_I64, 3,
                                         m.put(numbers(GA_F32, 30, 4))));
          EXPECT_OK(ga_micro_end(m));
          return ends ? m.step() : ga_step_result{};
        };
        EXPECT_EQ(window(5, true).outcome, GA_STEP_APPLIED);
        const Tensor before = m.value(table), other = m.value(dense);
        const ga_step_result r = window(wrong, true);
        EXPECT_EQ(r.outcome, GA_STEP_SKIPPED_ERROR);
        EXPECT_EQ(r.windows, 2);
        EXPECT_EQ(r.steps, 1);
        EXPECT_EQ(r.skipped, 1);
        EXPECT_TRUE(m.value(table) == before);
        EXPECT_TRUE(m.value(dense) == other);
        // A discarded window takes its error along.
        window(wrong, false);
        EXPECT_OK(ga_discard(m));
        const ga_step_result next = window(5, true);
        EXPECT_EQ(next.outcome, GA_STEP_APPLIED);
        EXPECT_EQ(next.windows, 3);
        EXPECT_EQ(next.steps, 2);
        EXPECT_FALSE(m.value(table) == before);
      }
    }
  }
}

// A window with wrong rows between two good ones leaves no trace.
TEST_F(Errors, RowsOutOfRangeLeaveNothing) {
  std::vector<Tensor> values;
  for (const bool bad : {false, true}) {
    Machine m(GA_DEVICE_CUDA);
    ga_param_options o = options();
    o.rows = GA_ROWS_LAZY;
    const ga_param table =
        m.add(m.group(optimizer(GA_OPTIMIZER_ADAMW)), numbers(GA_F32, 120, 1), {12, 10}, o);
    for (int w = 0; w < 3; ++w) {
      if (w == 1 && !bad) continue;
      Tensor indices(GA_F32, 3);
      const int32_t rows[] = {w, w == 1 ? 99 : 5, 11 - w};
      memcpy(indices.data(), rows, sizeof rows);
      EXPECT_OK(ga_micro_begin(m, 0, 1, nullptr));
      EXPECT_OK(ga_accumulate_rows(m, table, m.put(indices), GA_I32, 3,
                                   m.put(numbers(GA_F32, 30, static_cast<uint64_t>(w)))));
      EXPECT_OK(ga_micro_end(m));
      m.step();
    }
    values.push_back(m.value(table));
  }
  EXPECT_TRUE(values[0] == values[1]);
}

}  // namespace
}  // namespace ga::test
