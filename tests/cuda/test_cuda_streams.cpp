// SPDX-License-Identifier: Apache-2.0
//
// ga_context_set_stream: what the context does on one stream stays in order with what it does on the next one,
// in captures too. Simulated devices run the work of a stream when something waits for it, so that a stream which
// does not wait for the one before it computes with numbers that are not there yet.
#include "device.hpp"

namespace ga::test {
namespace {

class Streams : public OnDevice<> {
 protected:
  void SetUp() override {
    OnDevice<>::SetUp();
#ifdef GA_SIMULATED
    configure([](sim::Config& c) { c.deferred = true; });
#endif
  }
};

cudaStream_t raw(const Stream& stream) { return stream; }

// Gives a machine on a device one stream after the other, the legacy default stream among them.
class Turns {
 public:
  explicit Turns(Machine& m) : m_(m) {
    if (m.cuda()) others_.resize(2);
    for (auto& stream : others_) stream = std::make_unique<Stream>();
  }
  // The context stays on its machine's stream, to which its tensors are written and from which they are read.
  ~Turns() { home(); }
  Turns(const Turns&) = delete;
  Turns& operator=(const Turns&) = delete;

  void next() {
    if (!m_.cuda()) return;
    const size_t k = count_++ % (others_.size() + 1);
    EXPECT_OK(ga_context_set_stream(m_, k < others_.size() ? raw(*others_[k]) : nullptr));
  }
  void home() {
    if (!m_.cuda()) return;
    EXPECT_OK(ga_context_set_stream(m_, raw(m_.stream())));
  }

 private:
  Machine& m_;
  std::vector<std::unique_ptr<Stream>> others_;
  size_t count_ = 0;
};

// ---- What is queued ------------------------------------------------------------------------------

// The device reads gradients after the calls that bring them; the library says of which it has.
TEST_F(Streams, KeepGradientsUntilTheWorkIsDone) {
  for (const bool live : {false, true}) {
    ga_config c = config();
    c.gradient_life = live ? GA_GRADIENTS_LIVE : GA_GRADIENTS_CONSUMED;
    Machine m(GA_DEVICE_CUDA, c);
    m.add(m.group(plain_sgd()), numbers(GA_F32, 100, 1));
    const auto kept = [&] {
      ga_kept_info info;
      info.struct_size = sizeof info;
      EXPECT_OK(ga_gradients_kept(m, 0, &info));
      return info;
    };
    void* const gradients[] = {m.put(numbers(GA_F32, 100, 2)), m.put(numbers(GA_F32, 100, 3))};
    for (int64_t window = 0; window < 3; ++window) {
      const int64_t first = 2 * window + 1;
      m.accumulate({gradients[0]});
      EXPECT_EQ(kept().latest, first);
      m.stream().wait();
      EXPECT_EQ(kept().oldest, live ? first : first + 1);
      EXPECT_EQ(kept().queued, kept().oldest);
      m.accumulate({gradients[1]});
      const ga_kept_info both = kept();
      EXPECT_EQ(both.oldest, first + 2) << "in the order of the stream, both have been read";
      if (simulated()) {
        EXPECT_EQ(both.queued, live ? first : first + 1);
      }
      m.stream().wait();
      EXPECT_EQ(kept().queued, first + 2);
      EXPECT_OK(ga_step(m, nullptr));
    }
    m.accumulate({gradients[0]});
    m.stream().wait();
    EXPECT_EQ(kept().queued, live ? 7 : 8);
    EXPECT_OK(ga_step(m, nullptr));  // which reads a gradient that lives
    const ga_kept_info stepped = kept();
    EXPECT_EQ(stepped.oldest, 8);
    if (simulated() && live) {
      EXPECT_EQ(stepped.queued, 7);
    }
    Graph graph;
    graph.capture(m.stream(), [&] {
      m.accumulate({gradients[0]});
      EXPECT_EQ(kept().latest, 8);
      EXPECT_LE(kept().queued, 8) << "nothing can be asked within a capture";
      EXPECT_OK(ga_step(m, nullptr));
    });
    m.stream().wait();
    EXPECT_EQ(kept().queued, 9);
  }
}

// ---- The order of work ---------------------------------------------------------------------------

// A training with everything that lies in arrays of its own, which changes its stream before each call.
void train(Machine& m, int32_t kind, bool turning) {
  const ga_clip c = clip(GA_CLIP_GLOBAL, 0.5);
  EXPECT_OK(ga_context_set_clip(m, &c));
  ga_ema e;
  EXPECT_OK(ga_ema_init(&e, sizeof e));
  EXPECT_OK(ga_context_set_ema(m, &e));
  Training t;
  t.add(m, m.group(optimizer(kind)));
  Turns turns(m);
  const auto turn = [&] {
    if (turning) turns.next();
  };
  for (uint64_t w = 0; w < 3; ++w) {
    std::vector<std::vector<const void*>> lists;
    for (uint64_t k = 0; k < 3; ++k) lists.push_back(t.gradients(m, 3 * w + k));
    if (m.cuda()) m.stream().wait();  // they are there for every stream
    turn();
    m.accumulate(lists[0], 2);
    turn();
    EXPECT_OK(ga_micro_begin(m, 1, 1, nullptr));
    for (size_t i = 0; i < t.ids.size(); ++i) {
      turn();
      EXPECT_OK(ga_accumulate_part(m, t.ids[i], lists[1][i]));
    }
    turn();
    EXPECT_OK(ga_micro_end(m));
    turn();
    m.accumulate(lists[2], 1);
    turn();
    EXPECT_OK(ga_step(m, nullptr));
    turn();
    m.note_result(result_of(m), 0);
    turn();
    EXPECT_OK(ga_group_set_lr(m, 0, 1e-3 * static_cast<double>(w + 1)));
    turns.home();
    m.note_params();
    m.note_averages();
  }
}

TEST_F(Streams, EveryCallOnAnother) {
  for (const int32_t kind : {GA_OPTIMIZER_ADAMW, GA_OPTIMIZER_LAMB}) {
    SCOPED_TRACE(kind);
    expect_same([&](Machine& m) { train(m, kind, true); });
  }
}

// A stream may be destroyed as soon as another has replaced it, with work left.
TEST_F(Streams, TheOneBeforeIsDestroyed) {
  expect_same([](Machine& m) {
    Training t;
    t.add(m, m.group(optimizer(GA_OPTIMIZER_ADAMW)));
    const auto first = t.gradients(m, 0), second = t.gradients(m, 1);
    if (m.cuda()) m.stream().wait();
    auto passing = std::make_unique<Turns>(m);
    passing->next();
    m.accumulate(first);
    passing.reset();
    m.accumulate(second);
    m.step();
  });
}

// Products of cuBLAS in the first window open its handle, and those in the second are on another stream.
std::vector<float> multiplied(int32_t kind, bool turning) {
  Machine m(GA_DEVICE_CUDA);
  const ga_param id = m.add(m.group(optimizer(kind)), numbers(GA_F32, 20, 3), {4, 5}, options(), 0);
  auto before = std::make_unique<Stream>();
  Stream after;
  if (turning) {
    EXPECT_OK(ga_context_set_stream(m, raw(*before)));
  }
  for (uint64_t w = 0; w < 2; ++w) {
    const void* const a = m.put(numbers(GA_F32, 12, 4 + w));
    const void* const b = m.put(numbers(GA_F32, 15, 15 + w));
    const std::vector<const void*> whole = {m.put(numbers(GA_F32, 20, 7 + w))};
    m.stream().wait();
    if (turning && w == 1) {
      EXPECT_OK(ga_context_set_stream(m, raw(after)));
      before.reset();
    }
    if (kind == GA_OPTIMIZER_MUON) {
      m.accumulate(whole, 1);
    } else {
      EXPECT_OK(ga_micro_begin(m, -1, 1, nullptr));
      EXPECT_OK(
          ga_accumulate_matmul(m, id, 3, a, 3, GA_NO_TRANSPOSE, b, 5, GA_NO_TRANSPOSE, GA_F32));
      EXPECT_OK(ga_micro_end(m));
    }
    EXPECT_OK(ga_step(m, nullptr));
  }
  if (turning) {
    EXPECT_OK(ga_context_set_stream(m, raw(m.stream())));
  }
  EXPECT_OK(ga_synchronize(m));
  const Tensor value = m.value(id);
  std::vector<float> values(20);
  memcpy(values.data(), value.data(), sizeof(float) * values.size());
  return values;
}

TEST_F(Streams, OfProducts) {
  for (const int32_t kind : {GA_OPTIMIZER_SGD, GA_OPTIMIZER_MUON})
    EXPECT_EQ(multiplied(kind, true), multiplied(kind, false)) << kind;
}

// The results of windows on a stream before, with and without waiting.
TEST_F(Streams, ResultsOfTheOneBefore) {
  Machine m(GA_DEVICE_CUDA);
  Training t;
  t.add(m, m.group(optimizer(GA_OPTIMIZER_ADAMW)));
  const Stream other;
  for (const cudaStream_t stream : {raw(other), raw(m.stream())}) {
    const auto list = t.gradients(m, 0);
    m.stream().wait();
    m.accumulate(list);
    EXPECT_OK(ga_step(m, nullptr));
    EXPECT_OK(ga_context_set_stream(m, stream));
  }
  EXPECT_EQ(result_of(m, 1).windows, 1);
  EXPECT_EQ(result_of(m).windows, 2);
}

// A state is saved and loaded while work is pending on several streams.
TEST_F(Streams, StateWaitsForBoth) {
  std::vector<std::vector<uint8_t>> files;
  for (const bool turning : {false, true}) {
    Machine m(GA_DEVICE_CUDA);
    Training t;
    t.add(m, m.group(optimizer(GA_OPTIMIZER_ADAMW)));
    const auto list = t.gradients(m, 0);
    m.stream().wait();
    Turns turns(m);
    for (int w = 0; w < 2; ++w) {
      m.accumulate(list);
      EXPECT_OK(ga_step(m, nullptr));
      if (turning) turns.next();
    }
    size_t size = 0;
    EXPECT_OK(ga_save_to_memory(m, nullptr, nullptr, 0, &size));
    files.emplace_back(size);
    EXPECT_OK(ga_save_to_memory(m, nullptr, files.back().data(), size, &size));
    if (turning) turns.next();
    EXPECT_OK(ga_load_from_memory(m, files.back().data(), size, nullptr));
  }
  EXPECT_EQ(files[0], files[1]);
}

// The program's allocator gets the stream of the time.
TEST_F(Streams, OfTheAllocator) {
  struct Seen {
    std::vector<void*> allocated, freed;
  } seen;
  ga_config c = config();
  c.allocator_user = &seen;
  c.allocate = [](void* user, size_t bytes, ga_device, void* stream) -> void* {
    static_cast<Seen*>(user)->allocated.push_back(stream);
    void* data = nullptr;
    return cudaMalloc(&data, bytes) == cudaSuccess ? data : nullptr;
  };
  c.free = [](void* user, void* data, size_t, ga_device, void* stream) {
    static_cast<Seen*>(user)->freed.push_back(stream);
    EXPECT_CUDA(cudaFree(data));
  };
  const Stream other;
  {
    Machine m(GA_DEVICE_CUDA, c);
    m.add(m.group(optimizer(GA_OPTIMIZER_ADAMW)), numbers(GA_F32, 500, 1));
    EXPECT_EQ(seen.allocated.back(), raw(m.stream()));
    const void* const g = m.put(numbers(GA_F32, 500, 2));
    m.stream().wait();
    EXPECT_OK(ga_context_set_stream(m, raw(other)));
    m.accumulate({g});
    EXPECT_EQ(seen.allocated.back(), raw(other));
    EXPECT_TRUE(seen.freed.empty() || seen.freed.back() == raw(other));
  }
  EXPECT_EQ(seen.freed.back(), raw(other));
  EXPECT_EQ(seen.freed.size(), seen.allocated.size());
}

// ---- Arguments -----------------------------------------------------------------------------------

TEST_F(Streams, RefusedArguments) {
  Machine m(GA_DEVICE_CUDA);
  const ga_param p = m.add(m.group(plain_sgd()), numbers(GA_F32, 300, 1));
  m.accumulate({m.put(numbers(GA_F32, 300, 2))});
  const auto refuse = [&](cudaStream_t stream, std::vector<std::string> words) {
    EXPECT_TRUE(
        refused(ga_context_set_stream(m, stream), GA_ERROR_INVALID_ARGUMENT, std::move(words)));
  };
  refuse(cudaStreamPerThread, {"cudaStreamPerThread", "another stream in each thread"});
  int devices = 0;
  EXPECT_CUDA(cudaGetDeviceCount(&devices));
  if (devices > 1) {
    const Stream other(1);
    refuse(raw(other), {"stream is of CUDA device 1", "of device 0"});
  }
#ifdef GA_SIMULATED
  sim::set_current_context(sim::make_context(0));
  cudaStream_t other = nullptr;
  EXPECT_CUDA(cudaStreamCreate(&other));
  refuse(other, {"another driver context of CUDA device 0"});
  EXPECT_CUDA(cudaStreamDestroy(other));
  refuse(other, {"no stream of CUDA"});
  EXPECT_CUDA(cudaSetDevice(0));
#endif
  // The context has kept its stream and its window.
  const Tensor before = m.value(p);
  EXPECT_OK(ga_step(m, nullptr));
  m.stream().wait();
  EXPECT_EQ(result_of(m, 1, 0).outcome, GA_STEP_APPLIED);
  EXPECT_FALSE(m.value(p) == before);
}

TEST_F(Streams, OfACpu) {
  Context ctx;
  const Stream stream;
  for (const cudaStream_t given : {cudaStream_t(nullptr), raw(stream)})
    EXPECT_TRUE(refused(ga_context_set_stream(ctx, given), GA_ERROR_UNSUPPORTED, {"on the CPU"}));
}

// The call is legal while parameters and EMA are exchanged.
TEST_F(Streams, WhileExchanged) {
  expect_same([](Machine& m) {
    ga_ema e;
    EXPECT_OK(ga_ema_init(&e, sizeof e));
    EXPECT_OK(ga_context_set_ema(m, &e));
    Training t;
    t.add(m, m.group(optimizer(GA_OPTIMIZER_ADAMW)));
    m.accumulate(t.gradients(m, 0));
    m.step();
    Turns turns(m);
    EXPECT_OK(ga_ema_swap(m, 1));
    turns.next();
    EXPECT_OK(ga_ema_swap(m, 0));
    turns.home();
    m.note_params();
  });
}

#ifdef GA_SIMULATED

// A fault of the device stays the context's answer.
TEST_F(Streams, AfterAFault) {
  Machine m(GA_DEVICE_CUDA);
  m.add(m.group(plain_sgd()), numbers(GA_F32, 300, 1));
  m.accumulate({m.put(numbers(GA_F32, 300, 2))});
  sim::fail_execution(1);
  EXPECT_EQ(ga_synchronize(m), GA_ERROR_FAULT);
  EXPECT_EQ(ga_context_set_stream(m, nullptr), GA_ERROR_FAULT);
  m.destroy();
  sim::reset();
}

#endif

// ---- Captures ------------------------------------------------------------------------------------

// Windows of one parameter in graphs, and the same number of them without graphs to compare with.
class Captures : public Streams {
 protected:
  struct Net {
    Machine m{GA_DEVICE_CUDA};
    ga_param p = -1;
    std::vector<const void*> gradients;
    Stream other;

    Net() {
      p = m.add(m.group(optimizer(GA_OPTIMIZER_ADAMW)), numbers(GA_F32, 70000, 1));
      for (uint64_t k = 0; k < 2; ++k) gradients.push_back(m.keep(numbers(GA_F32, 70000, 2 + k)));
      m.stream().wait();
      window();
      EXPECT_OK(ga_synchronize(m));
    }
    ga_status set(cudaStream_t stream) { return ga_context_set_stream(m, stream); }
    void accumulate(size_t k) { EXPECT_OK(ga_accumulate(m, &gradients[k], 1, 1, nullptr)); }
    void window() {
      accumulate(0);
      accumulate(1);
      EXPECT_OK(ga_step(m, nullptr));
    }
    Tensor value() {
      EXPECT_OK(ga_synchronize(m));
      return m.value(p);
    }
  };

  // After so many windows.
  static Tensor expected(int windows) {
    Net net;
    for (int w = 1; w < windows; ++w) net.window();
    return net.value();
  }
  static void drop_capture(cudaStream_t stream) {
    cudaGraph_t graph = nullptr;
    EXPECT_CUDA(cudaStreamEndCapture(stream, &graph));
    EXPECT_CUDA(cudaGraphDestroy(graph));
  }
};

// The stream that is captured belongs to another part of the program, as torch.cuda.graph has one of its own.
TEST_F(Captures, BegunOnTheNewStream) {
  const Tensor want = expected(4);
  Net net;
  EXPECT_OK(net.set(nullptr));
  EXPECT_OK(ga_synchronize(net.m));
  Graph graph;
  graph.capture(net.other, [&] {
    EXPECT_OK(net.set(net.other));
    net.window();
  });
  EXPECT_OK(net.set(net.m.stream()));
  net.window();
  for (int k = 0; k < 2; ++k) graph.replay(net.m.stream());
  EXPECT_TRUE(net.value() == want);
  EXPECT_EQ(result_of(net.m).steps, 4);
}

// Streams that are forked and joined within one capture.
TEST_F(Captures, OfBothStreams) {
  const Tensor want = expected(3);
  Net net;
  cudaEvent_t fork = nullptr;
  EXPECT_CUDA(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
  Graph graph;
  graph.capture(net.m.stream(), [&] {
    net.accumulate(0);
    EXPECT_CUDA(cudaEventRecord(fork, net.m.stream()));
    EXPECT_CUDA(cudaStreamWaitEvent(net.other, fork, 0));
    EXPECT_OK(net.set(net.other));
    net.accumulate(1);
    EXPECT_OK(net.set(net.m.stream()));
    EXPECT_OK(ga_step(net.m, nullptr));
  });
  for (int k = 0; k < 2; ++k) graph.replay(net.m.stream());
  EXPECT_TRUE(net.value() == want);
  EXPECT_CUDA(cudaEventDestroy(fork));
}

// What cannot be joined is refused, and neither breaks the capture nor changes the window.
TEST_F(Captures, BegunWithWorkPending) {
  const Tensor want = expected(2);
  for (const bool on_default : {false, true}) {
    Net net;
    EXPECT_OK(net.set(on_default ? nullptr : raw(net.m.stream())));
    net.accumulate(0);
    EXPECT_CUDA(cudaStreamBeginCapture(net.other, cudaStreamCaptureModeGlobal));
    if (simulated()) {  // a real device may have finished
      EXPECT_TRUE(refused(net.set(net.other), GA_ERROR_INVALID_STATE,
                          {"stream is being captured", "work from before the capture",
                           "ga_context_set_stream", "ga_synchronize"}));
    }
    drop_capture(net.other);
    net.accumulate(1);
    EXPECT_EQ(window(net.m).micro_batches, 2);
    EXPECT_OK(ga_step(net.m, nullptr));
    EXPECT_TRUE(net.value() == want);
  }
}

TEST_F(Captures, OfTheOldStreamAlone) {
  const Tensor want = expected(2);
  Net net;
  Graph graph;
  graph.capture(net.m.stream(), [&] {
    net.accumulate(0);
    for (const cudaStream_t stream : {raw(net.other), cudaStream_t(nullptr)})
      EXPECT_TRUE(refused(net.set(stream), GA_ERROR_INVALID_STATE,
                          {"the context's stream is being captured", "no part of that capture"}));
    net.accumulate(1);
    EXPECT_OK(ga_step(net.m, nullptr));
  });
  graph.replay(net.m.stream());
  EXPECT_TRUE(net.value() == want);
}

TEST_F(Captures, OfTwoGraphs) {
  const Tensor want = expected(2);
  Net net;
  EXPECT_CUDA(cudaStreamBeginCapture(net.other, cudaStreamCaptureModeThreadLocal));
  Graph graph;
  graph.capture(net.m.stream(), [&] {
    EXPECT_TRUE(refused(net.set(net.other), GA_ERROR_INVALID_STATE, {"into another graph"}));
    net.window();
  });
  drop_capture(net.other);
  graph.replay(net.m.stream());
  EXPECT_TRUE(net.value() == want);
}

TEST_F(Captures, ThatIsBroken) {
  const Tensor want = expected(2);
  Net net;
  EXPECT_CUDA(cudaStreamBeginCapture(net.other, cudaStreamCaptureModeGlobal));
  void* memory = nullptr;
  EXPECT_NE(cudaMalloc(&memory, 64), cudaSuccess);
  EXPECT_TRUE(
      refused(net.set(net.other), GA_ERROR_INVALID_STATE, {"the capture of stream is broken"}));
  cudaGraph_t graph = nullptr;
  EXPECT_NE(cudaStreamEndCapture(net.other, &graph), cudaSuccess);
  cudaGetLastError();
  net.window();
  EXPECT_TRUE(net.value() == want);
}

// While a stream that waits for the default stream is captured, nothing can be asked of that one.
TEST_F(Captures, BesideTheDefaultStream) {
  const Tensor want = expected(3);
  Net net;
  cudaStream_t blocking = nullptr;
  EXPECT_CUDA(cudaStreamCreate(&blocking));
  EXPECT_CUDA(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeThreadLocal));
  EXPECT_TRUE(refused(net.set(nullptr), GA_ERROR_INVALID_STATE,
                      {"a stream of the program is being captured", "default stream"}));
  drop_capture(blocking);
  EXPECT_OK(net.set(nullptr));
  net.window();
  EXPECT_OK(ga_synchronize(net.m));
  EXPECT_CUDA(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeThreadLocal));
  EXPECT_TRUE(refused(net.set(blocking), GA_ERROR_INVALID_STATE,
                      {"a stream of the program is being captured", "default stream"}));
  drop_capture(blocking);
  EXPECT_OK(net.set(blocking));
  net.window();
  EXPECT_TRUE(net.value() == want);
  EXPECT_OK(net.set(net.m.stream()));
  EXPECT_CUDA(cudaStreamDestroy(blocking));
}

}  // namespace
}  // namespace ga::test
