// SPDX-License-Identifier: Apache-2.0
//
// The NCCL module, by its own table, over a library of NCCL's name on simulated devices: host/nccl.h. Each
// rank is a thread with a device and a stream.
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "../support.hpp"
#include "core/module.hpp"
#include "host/nccl.h"
#include "host/simulator.hpp"
#include "ranks/comm/nccl_module.h"

namespace ga::test {
namespace {

constexpr ga_dtype kDtypes[] = {GA_F32, GA_F64, GA_F16, GA_BF16, GA_I32, GA_I64};

size_t size_of(ga_dtype dtype) {
  return dtype == GA_F64 || dtype == GA_I64 ? 8 : dtype == GA_F16 || dtype == GA_BF16 ? 2 : 4;
}

const ga_nccl_module& module() {
  static const void* const table = open_module("nccl", GA_NCCL_ABI);
  return *static_cast<const ga_nccl_module*>(table);
}

struct Id {
  Id() {
    char error[256] = "";
    EXPECT_OK(module().unique_id(bytes, error, sizeof error)) << error;
  }
  unsigned char bytes[GA_COMM_ID_SIZE];
};

ga_comm_config nccl_config(const Id& id, int32_t rank, int32_t ranks, double timeout = 60) {
  ga_comm_config c;
  EXPECT_OK(ga_comm_config_init(&c, sizeof c, GA_COMM_NCCL));
  c.id = id.bytes;
  c.rank = rank;
  c.ranks = ranks;
  c.timeout = timeout;
  return c;
}

// Memory of the current device.
class Memory {
 public:
  explicit Memory(size_t size) : size_(size) { EXPECT_EQ(cudaMalloc(&data_, size), cudaSuccess); }
  explicit Memory(const std::vector<char>& bytes) : Memory(bytes.size()) {
    sim::poke(data_, bytes.data(), bytes.size());
  }
  ~Memory() { EXPECT_EQ(cudaFree(data_), cudaSuccess); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* at(size_t offset = 0) const { return static_cast<char*>(data_) + offset; }
  std::vector<char> bytes() const {
    std::vector<char> result(size_);
    sim::peek(result.data(), data_, size_);
    return result;
  }

 private:
  const size_t size_;
  void* data_ = nullptr;
};

// A rank's end and its stream. join(): with the failure, if that is what a test wants.
class Rank {
 public:
  Rank(const Id& id, int32_t rank, int32_t ranks, double timeout = 60)
      : Rank(nccl_config(id, rank, ranks, timeout)) {}
  explicit Rank(const ga_comm_config& config) {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    status = module().join(&config, &end, error, sizeof error);
  }
  ~Rank() {
    if (status == GA_OK) module().leave(end.table.user);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  const ga_comm_table& table() const { return end.table; }
  int32_t poll() const { return module().poll(end.table.user); }
  std::string text(int32_t failure) const { return table().error_text(end.table.user, failure); }
  void wait() const { EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess); }

  cudaStream_t stream = nullptr;
  ga_nccl_end end = {};
  char error[1024] = "";
  ga_status status = GA_ERROR_INTERNAL;
};

// Runs body(rank, id) in a thread for each rank, with a device for each.
template <class Body>
void on_threads(int32_t ranks, Body&& body) {
  const Id id;
  std::vector<std::thread> threads;
  for (int32_t r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      EXPECT_EQ(cudaSetDevice(r), cudaSuccess);
      body(r, id);
    });
  for (std::thread& t : threads) t.join();
}

// Runs body(rank) as each of these ranks, which have joined.
template <class Body>
void on_ranks(int32_t ranks, Body&& body, double timeout = 60) {
  on_threads(ranks, [&](int32_t r, const Id& id) {
    Rank rank(id, r, ranks, timeout);
    ASSERT_EQ(rank.status, GA_OK) << rank.error;
    EXPECT_EQ(rank.end.rank, r);
    EXPECT_EQ(rank.end.ranks, ranks);
    EXPECT_EQ(rank.end.device, r);
    body(rank);
  });
  EXPECT_EQ(ga_fake_nccl_communicators(), 0);
}

// Bytes that tell by their place, and by whom they are from.
std::vector<char> pattern(size_t size, int32_t rank) {
  std::vector<char> result(size);
  for (size_t i = 0; i < size; ++i)
    result[i] = static_cast<char>(i * 7 + static_cast<size_t>(rank) * 31 + i / 251);
  return result;
}

std::vector<char> part(const std::vector<char>& bytes, size_t at, size_t size) {
  const auto begin = bytes.begin() + static_cast<ptrdiff_t>(at);
  return {begin, begin + static_cast<ptrdiff_t>(size)};
}

template <class T>
std::vector<char> as_bytes(const std::vector<T>& values) {
  std::vector<char> result(values.size() * sizeof(T));
  std::memcpy(result.data(), values.data(), result.size());
  return result;
}
template <class T>
std::vector<T> as_values(const std::vector<char>& bytes) {
  std::vector<T> result(bytes.size() / sizeof(T));
  std::memcpy(result.data(), bytes.data(), bytes.size());
  return result;
}

// What a case of the tests below varies.
struct Way {
  bool deferred;
  int64_t in_progress;
};

class NcclModule : public testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    ga_fake_nccl_reset();
    sim::reset();
    sim::Config config = sim::config();
    config.devices = 4;
    config.deferred = GetParam().deferred;
    sim::configure(config);
    ga_fake_nccl_in_progress(GetParam().in_progress);
  }
  void TearDown() override {
    ga_fake_nccl_reset();
    sim::reset();
  }
};

TEST_P(NcclModule, AllToAll) {
  for (int32_t ranks = 1; ranks <= 4; ++ranks)
    for (const ga_dtype dtype : kDtypes)
      for (const size_t gap : {size_t{0}, size_t{3}}) {
        const size_t size = size_of(dtype), count = 37, stride = count + gap;
        const size_t all = static_cast<size_t>(ranks) * stride * size;
        on_ranks(ranks, [&](const Rank& rank) {
          const Memory send(pattern(all, rank.end.rank)),
              recv(count * size * static_cast<size_t>(ranks));
          EXPECT_EQ(
              rank.table().all_to_all(rank.table().user, send.at(), static_cast<int64_t>(stride),
                                      recv.at(), count, dtype, rank.stream),
              0);
          rank.wait();
          std::vector<char> expected;
          for (int32_t q = 0; q < ranks; ++q) {
            const std::vector<char> block = part(
                pattern(all, q), static_cast<size_t>(rank.end.rank) * stride * size, count * size);
            expected.insert(expected.end(), block.begin(), block.end());
          }
          EXPECT_EQ(recv.bytes(), expected) << ranks << ' ' << dtype << ' ' << gap;
        });
      }
}

// In place and from elsewhere, the gaps between blocks untouched.
TEST_P(NcclModule, AllGather) {
  for (int32_t ranks = 1; ranks <= 4; ++ranks)
    for (const ga_dtype dtype : kDtypes)
      for (const size_t gap : {size_t{0}, size_t{5}})
        for (const bool in_place : {false, true}) {
          const size_t size = size_of(dtype), count = 19, stride = count + gap;
          const size_t all = static_cast<size_t>(ranks) * stride * size;
          on_ranks(ranks, [&](const Rank& rank) {
            const size_t own = static_cast<size_t>(rank.end.rank) * stride * size;
            const Memory send(pattern(count * size, rank.end.rank)),
                recv(std::vector<char>(all, 9));
            if (in_place) sim::poke(recv.at(own), send.bytes().data(), count * size);
            EXPECT_EQ(rank.table().all_gather(
                          rank.table().user, in_place ? recv.at(own) : send.at(), recv.at(),
                          static_cast<int64_t>(stride), count, dtype, rank.stream),
                      0);
            rank.wait();
            std::vector<char> expected(all, 9);
            for (int32_t q = 0; q < ranks; ++q) {
              const std::vector<char> block = pattern(count * size, q);
              std::copy(block.begin(), block.end(),
                        expected.begin() +
                            static_cast<ptrdiff_t>(static_cast<size_t>(q) * stride * size));
            }
            EXPECT_EQ(recv.bytes(), expected) << ranks << ' ' << dtype << ' ' << gap << in_place;
          });
        }
}

TEST_P(NcclModule, Broadcast) {
  for (int32_t ranks = 1; ranks <= 4; ++ranks)
    for (const ga_dtype dtype : kDtypes) {
      const size_t count = 41, bytes = count * size_of(dtype);
      on_ranks(ranks, [&](const Rank& rank) {
        for (int32_t root = 0; root < ranks; ++root) {
          const Memory data(pattern(bytes, rank.end.rank));
          EXPECT_EQ(
              rank.table().broadcast(rank.table().user, data.at(), count, dtype, root, rank.stream),
              0);
          rank.wait();
          EXPECT_EQ(data.bytes(), pattern(bytes, root)) << ranks << ' ' << dtype << ' ' << root;
        }
      });
    }
}

template <class Real>
Real number(int32_t rank, size_t i) {
  return static_cast<Real>(rank + 1) * static_cast<Real>(0.1) - static_cast<Real>(i % 5) +
         (rank == static_cast<int32_t>(i % 3) ? static_cast<Real>(100) : static_cast<Real>(0));
}

// The ranks' values, added from the last to the first, or their maximum.
template <class Real>
Real total(int32_t ranks, size_t i, ga_comm_op op) {
  Real x = number<Real>(ranks - 1, i);
  for (int32_t r = ranks - 2; r >= 0; --r)
    x = op == GA_COMM_MAX ? std::fmax(x, number<Real>(r, i)) : x + number<Real>(r, i);
  return x;
}

template <class Real>
void adds(ga_dtype dtype) {
  for (int32_t ranks = 1; ranks <= 4; ++ranks)
    for (const ga_comm_op op : {GA_COMM_SUM, GA_COMM_MAX})
      on_ranks(ranks, [&](const Rank& rank) {
        const size_t count = 23, all = count * static_cast<size_t>(ranks);
        std::vector<Real> values(all), sums(all);
        for (size_t i = 0; i < all; ++i) {
          values[i] = number<Real>(rank.end.rank, i);
          sums[i] = total<Real>(ranks, i, op);
        }
        const Memory data(as_bytes(values)), send(as_bytes(values)), recv(count * sizeof(Real));
        const ga_comm_table& t = rank.table();
        EXPECT_EQ(
            t.all_reduce(t.user, data.at(), static_cast<int64_t>(all), dtype, op, rank.stream), 0);
        EXPECT_EQ(t.reduce_scatter(t.user, send.at(), recv.at(), count, dtype, op, rank.stream), 0);
        rank.wait();
        EXPECT_EQ(data.bytes(), as_bytes(sums)) << ranks << ' ' << op;
        EXPECT_EQ(recv.bytes(),
                  part(as_bytes(sums), static_cast<size_t>(rank.end.rank) * count * sizeof(Real),
                       count * sizeof(Real)))
            << ranks << ' ' << op;
        EXPECT_EQ(send.bytes(), as_bytes(values));
      });
}

TEST_P(NcclModule, Adds) {
  adds<float>(GA_F32);
  adds<double>(GA_F64);
}

// Work before and after an exchange on its stream, and several exchanges in a row.
TEST_P(NcclModule, IsOrderedOnTheStream) {
  on_ranks(3, [](const Rank& rank) {
    const ga_comm_table& t = rank.table();
    const Memory data(4), copy(4);
    EXPECT_EQ(cudaMemsetAsync(data.at(), 0, 4, rank.stream), cudaSuccess);
    float one = static_cast<float>(rank.end.rank + 1);
    void* pinned = nullptr;
    ASSERT_EQ(cudaHostAlloc(&pinned, 4, 0), cudaSuccess);
    std::memcpy(pinned, &one, 4);
    EXPECT_EQ(cudaMemcpyAsync(data.at(), pinned, 4, cudaMemcpyHostToDevice, rank.stream),
              cudaSuccess);
    EXPECT_EQ(t.all_reduce(t.user, data.at(), 1, GA_F32, GA_COMM_SUM, rank.stream), 0);
    EXPECT_EQ(t.all_reduce(t.user, data.at(), 1, GA_F32, GA_COMM_SUM, rank.stream), 0);
    EXPECT_EQ(cudaMemcpyAsync(copy.at(), data.at(), 4, cudaMemcpyDeviceToDevice, rank.stream),
              cudaSuccess);
    EXPECT_EQ(cudaMemsetAsync(data.at(), 0, 4, rank.stream), cudaSuccess);
    rank.wait();
    EXPECT_EQ(as_values<float>(copy.bytes()), std::vector<float>{18});
    EXPECT_EQ(as_values<float>(data.bytes()), std::vector<float>{0});
    EXPECT_EQ(cudaFreeHost(pinned), cudaSuccess);
  });
}

// The functions return while no other rank has called, and an event or a query of the stream tells when the
// exchange is done.
TEST_P(NcclModule, ReturnsAtOnce) {
  std::atomic<bool> asked{false};
  on_ranks(2, [&](const Rank& rank) {
    const ga_comm_table& t = rank.table();
    const Memory data(as_bytes(std::vector<float>{1}));
    if (rank.end.rank == 1)
      while (!asked) std::this_thread::yield();
    EXPECT_EQ(t.all_reduce(t.user, data.at(), 1, GA_F32, GA_COMM_SUM, rank.stream), 0);
    if (rank.end.rank == 0) {
      for (int i = 0; i < 10; ++i) EXPECT_EQ(cudaStreamQuery(rank.stream), cudaErrorNotReady);
      asked = true;
    }
    while (cudaStreamQuery(rank.stream) == cudaErrorNotReady) std::this_thread::yield();
    EXPECT_EQ(cudaStreamQuery(rank.stream), cudaSuccess);
    EXPECT_EQ(as_values<float>(data.bytes()), std::vector<float>{2});
  });
}

// Captured in a graph on every rank, and launched several times, by each rank when it likes.
TEST_P(NcclModule, IsCaptured) {
  on_ranks(2, [](const Rank& rank) {
    const ga_comm_table& t = rank.table();
    const Memory data(as_bytes(std::vector<float>{1, 2}));
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    EXPECT_EQ(t.all_reduce(t.user, data.at(), 2, GA_F32, GA_COMM_SUM, rank.stream), 0);
    ASSERT_EQ(cudaStreamEndCapture(rank.stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&exec, graph), cudaSuccess);
    EXPECT_EQ(as_values<float>(data.bytes()), (std::vector<float>{1, 2}));
    for (int i = 0; i < 3; ++i) EXPECT_EQ(cudaGraphLaunch(exec, rank.stream), cudaSuccess);
    rank.wait();
    EXPECT_EQ(as_values<float>(data.bytes()), (std::vector<float>{8, 16}));
    EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  });
}

// Runs body() as a group of the rank.
template <class Body>
int32_t as_group(const Rank& rank, Body body) {
  return module().group(
      rank.table().user, [](void* b) { (*static_cast<Body*>(b))(); }, &body);
}

// What a group is made of begins when it ends, together: the stream gets one collective, and NCCL is waited for once.
TEST_P(NcclModule, AGroupIsOneCollective) {
  on_ranks(3, [](const Rank& rank) {
    const ga_comm_table& t = rank.table();
    const auto one = static_cast<float>(rank.end.rank + 1);
    const Memory data(as_bytes(std::vector<float>{one, -one})),
        sent(as_bytes(std::vector<float>(3, one))), received(12), gathered(24), sum(4);
    EXPECT_EQ(
        as_group(
            rank,
            [&] {
              for (const size_t at : {0, 4})
                EXPECT_EQ(t.all_reduce(t.user, data.at(at), 1, GA_F32, GA_COMM_SUM, rank.stream),
                          0);
              EXPECT_EQ(t.all_to_all(t.user, sent.at(), 1, received.at(), 1, GA_F32, rank.stream),
                        0);
              EXPECT_EQ(t.all_gather(t.user, sent.at(), gathered.at(), 2, 1, GA_F32, rank.stream),
                        0);
              EXPECT_EQ(t.reduce_scatter(t.user, sent.at(), sum.at(), 1, GA_F32, GA_COMM_SUM,
                                         rank.stream),
                        0);
              EXPECT_EQ(cudaStreamQuery(rank.stream), cudaSuccess) << "nothing has begun";
            }),
        0);
    rank.wait();
    EXPECT_EQ(as_values<float>(data.bytes()), (std::vector<float>{6, -6}));
    EXPECT_EQ(as_values<float>(received.bytes()), (std::vector<float>{1, 2, 3}));
    for (size_t q = 0; q < 3; ++q)
      EXPECT_EQ(as_values<float>(gathered.bytes())[2 * q], static_cast<float>(q + 1));
    EXPECT_EQ(as_values<float>(sum.bytes()), std::vector<float>{6});
    EXPECT_EQ(as_group(rank, [] {}), 0);
  });
  EXPECT_EQ(ga_fake_nccl_collectives(), 3);
}

// ---- Failures --------------------------------------------------------------------------------------

using Function = int32_t (*)(const Rank&, const Memory&);
struct Named {
  const char* nccl;  // the function of NCCL that it calls
  Function call;
};
const Named kFunctions[] = {
    {"ncclSend",
     [](const Rank& r, const Memory& m) {
       return r.table().all_to_all(r.table().user, m.at(), 4, m.at(64), 4, GA_F32, r.stream);
     }},
    {"ncclRecv",
     [](const Rank& r, const Memory& m) {
       return r.table().all_to_all(r.table().user, m.at(), 4, m.at(64), 4, GA_F32, r.stream);
     }},
    {"ncclGroupStart",
     [](const Rank& r, const Memory& m) {
       return r.table().all_to_all(r.table().user, m.at(), 4, m.at(64), 4, GA_F32, r.stream);
     }},
    {"ncclGroupEnd",
     [](const Rank& r, const Memory& m) {
       return r.table().all_gather(r.table().user, m.at(), m.at(64), 5, 4, GA_F32, r.stream);
     }},
    {"ncclAllGather",
     [](const Rank& r, const Memory& m) {
       return r.table().all_gather(r.table().user, m.at(), m.at(64), 4, 4, GA_F32, r.stream);
     }},
    {"ncclBroadcast",
     [](const Rank& r, const Memory& m) {
       return r.table().broadcast(r.table().user, m.at(), 4, GA_F32, 0, r.stream);
     }},
    {"ncclAllReduce",
     [](const Rank& r, const Memory& m) {
       return r.table().all_reduce(r.table().user, m.at(), 4, GA_F32, GA_COMM_SUM, r.stream);
     }},
    {"ncclReduceScatter",
     [](const Rank& r, const Memory& m) {
       return r.table().reduce_scatter(r.table().user, m.at(), m.at(64), 4, GA_F32, GA_COMM_SUM,
                                       r.stream);
     }},
};

void expect_words(const std::string& text, const char* words) {
  EXPECT_NE(text.find(words), std::string::npos) << text;
}

// Each code in each function: it stays, its text stays, and the communicator has been ended once.
TEST_P(NcclModule, FailuresOfFunctions) {
  for (const Named& function : kFunctions)
    for (int code = ncclUnhandledCudaError; code <= ncclRemoteError; ++code) {
      SCOPED_TRACE(std::string(function.nccl) + ' ' + std::to_string(code));
      const int64_t aborts = ga_fake_nccl_calls("ncclCommAbort");
      on_ranks(1, [&](const Rank& rank) {
        const Memory memory(256);
        const auto result = static_cast<ncclResult_t>(code);
        ga_fake_nccl_fail(function.nccl, 1, result);
        EXPECT_EQ(function.call(rank, memory), code);
        for (const int32_t failure : {code, rank.poll()}) {
          expect_words(rank.text(failure), ncclGetErrorString(result));
          expect_words(rank.text(failure), ("NCCL returned " + std::to_string(code)).c_str());
          expect_words(rank.text(failure), function.nccl);  // of ncclGetLastError
        }
        EXPECT_EQ(kFunctions[6].call(rank, memory), code);
        rank.table().abort(rank.table().user);
        EXPECT_EQ(rank.poll(), code);
      });
      EXPECT_EQ(ga_fake_nccl_calls("ncclCommAbort"), aborts + 1);
    }
  EXPECT_EQ(ga_fake_nccl_calls("ncclCommFinalize"), 0);
}

// A group that fails is ended all the same: the next one of this thread, with another communicator, works.
TEST_P(NcclModule, AFailedGroupIsEnded) {
  for (const char* function : {"ncclSend", "ncclRecv"}) {
    on_ranks(1, [&](const Rank& rank) {
      const Memory memory(256);
      ga_fake_nccl_fail(function, 1, ncclInternalError);
      EXPECT_EQ(kFunctions[0].call(rank, memory), ncclInternalError);
      const Id id;
      const Rank another(id, 0, 1);
      EXPECT_EQ(kFunctions[6].call(another, memory), 0);
      EXPECT_EQ(cudaMemsetAsync(memory.at(), 1, 16, another.stream), cudaSuccess);
      EXPECT_EQ(kFunctions[0].call(another, memory), 0);
      another.wait();
      EXPECT_EQ(part(memory.bytes(), 64, 16), std::vector<char>(16, 1));
    });
  }
}

// The first failure in a group is that of the group, which ends the communicator; calls that follow are left out.
TEST_P(NcclModule, FailuresInAGroup) {
  for (const Named& function : kFunctions)
    for (const int64_t n : {1, 2}) {
      SCOPED_TRACE(function.nccl);
      const int64_t aborts = ga_fake_nccl_calls("ncclCommAbort");
      on_ranks(1, [&](const Rank& rank) {
        const Memory memory(256);
        ga_fake_nccl_fail(function.nccl, n, ncclSystemError);
        EXPECT_EQ(as_group(rank,
                           [&] {
                             for (int i = 0; i < 2; ++i) EXPECT_EQ(function.call(rank, memory), 0);
                             EXPECT_EQ(kFunctions[6].call(rank, memory), 0);
                           }),
                  ncclSystemError);
        expect_words(rank.text(ncclSystemError), "NCCL returned 2");
        expect_words(rank.text(ncclSystemError), function.nccl);
        EXPECT_EQ(rank.poll(), ncclSystemError);
        EXPECT_EQ(as_group(rank, [] { ADD_FAILURE() << "after a failure"; }), ncclSystemError);
        const Id id;
        const Rank another(id, 0, 1);
        EXPECT_EQ(kFunctions[0].call(another, memory), 0) << "the group has not ended";
        another.wait();
      });
      EXPECT_EQ(ga_fake_nccl_calls("ncclCommAbort"), aborts + 1);
    }
}

// ga_comm_abort of another thread waits for the group, and ends what has come of it.
TEST_P(NcclModule, AGroupIsAborted) {
  ga_fake_nccl_hang(1);
  on_ranks(1, [](const Rank& rank) {
    const ga_comm_table& t = rank.table();
    const Memory memory(256);
    std::thread other;
    as_group(rank, [&] {
      EXPECT_EQ(kFunctions[6].call(rank, memory), 0);
      other = std::thread([&] { t.abort(t.user); });
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      EXPECT_EQ(kFunctions[4].call(rank, memory), 0);
    });
    other.join();
    rank.wait();
    EXPECT_EQ(rank.text(rank.poll()), "ga_comm_abort was called");
  });
  EXPECT_EQ(ga_fake_nccl_calls("ncclCommAbort"), 1);
}

TEST_P(NcclModule, FailuresOfCreation) {
  for (int code = ncclUnhandledCudaError; code <= ncclRemoteError; ++code)
    for (const char* function : {"ncclCommInitRankConfig", "ncclCommGetAsyncError"}) {
      // An immediate success is not asked about.
      if (function[8] == 'G' && GetParam().in_progress == 0) continue;
      const auto result = static_cast<ncclResult_t>(code);
      const Id id;
      ga_fake_nccl_fail(function, 1, result);
      const Rank rank(id, 0, 1);
      EXPECT_EQ(rank.status, GA_ERROR_COMMUNICATION) << function << code;
      expect_words(rank.error, ncclGetErrorString(result));
      expect_words(rank.error, function);
      EXPECT_EQ(ga_fake_nccl_communicators(), 0);
    }
  ga_fake_nccl_fail("ncclGetUniqueId", 1, ncclSystemError);
  unsigned char bytes[GA_COMM_ID_SIZE];
  EXPECT_EQ(ga_comm_unique_id(GA_COMM_NCCL, bytes, sizeof bytes), GA_ERROR_COMMUNICATION);
  expect_words(ga_last_error(), "unhandled system error");
}

// What NCCL meets after the functions have returned.
TEST_P(NcclModule, LateErrors) {
  on_ranks(2, [](const Rank& rank) {
    const Memory memory(256);
    EXPECT_EQ(rank.poll(), 0);
    EXPECT_EQ(kFunctions[6].call(rank, memory), 0);
    rank.wait();
    if (rank.end.rank == 0) return;
    ga_fake_nccl_async_error(1, ncclRemoteError);
    EXPECT_EQ(rank.poll(), ncclRemoteError);
    expect_words(rank.text(ncclRemoteError), "remote process exited");
    ga_fake_nccl_async_error(1, ncclSuccess);
    EXPECT_EQ(rank.poll(), ncclRemoteError) << "not sticky";
    EXPECT_EQ(kFunctions[6].call(rank, memory), ncclRemoteError);
  });
}

TEST_P(NcclModule, ARankThatNeverJoins) {
  EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
  const Id id;
  const auto start = std::chrono::steady_clock::now();
  const Rank rank(id, 1, 2, 0.2);
  EXPECT_EQ(rank.status, GA_ERROR_COMMUNICATION);
  EXPECT_STREQ(rank.error, "rank 1 waited 0.2 s for the other ranks");
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(200));
  EXPECT_EQ(ga_fake_nccl_calls("ncclCommAbort"), 1);
  EXPECT_EQ(ga_fake_nccl_communicators(), 0);
}

TEST_P(NcclModule, IsInProgressForEver) {
  on_ranks(
      1,
      [](const Rank& rank) {
        const Memory memory(256);
        ga_fake_nccl_in_progress(-1);
        const int32_t failure = kFunctions[6].call(rank, memory);
        EXPECT_NE(failure, 0);
        EXPECT_EQ(rank.text(failure), "rank 0 waited 0.2 s for the other ranks");
        ga_fake_nccl_in_progress(0);
      },
      0.2);
  EXPECT_EQ(ga_fake_nccl_calls("ncclCommAbort"), 1);
}

TEST_P(NcclModule, AHangingExchangeIsAborted) {
  ga_fake_nccl_hang(1);
  on_ranks(2, [](const Rank& rank) {
    const ga_comm_table& t = rank.table();
    const Memory memory(256);
    EXPECT_EQ(kFunctions[6].call(rank, memory), 0);
    for (int i = 0; i < 20; ++i) EXPECT_EQ(cudaStreamQuery(rank.stream), cudaErrorNotReady);
    std::thread other([&] {
      t.abort(t.user);
      t.abort(t.user);
    });
    rank.wait();
    other.join();
    EXPECT_NE(rank.poll(), 0);
    EXPECT_EQ(rank.text(rank.poll()), "ga_comm_abort was called");
    EXPECT_EQ(kFunctions[6].call(rank, memory), rank.poll());
  });
  EXPECT_EQ(ga_fake_nccl_calls("ncclCommAbort"), 2) << "not once for each rank";
}

// A call that waits until the other ranks join in is ended by another thread.
TEST_P(NcclModule, ACallInProgressIsAborted) {
  on_ranks(1, [](const Rank& rank) {
    const ga_comm_table& t = rank.table();
    const Memory memory(256);
    ga_fake_nccl_in_progress(-1);
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      t.abort(t.user);
    });
    const int32_t failure = kFunctions[6].call(rank, memory);
    other.join();
    EXPECT_EQ(rank.text(failure), "ga_comm_abort was called");
  });
  EXPECT_EQ(ga_fake_nccl_calls("ncclCommAbort"), 1);
}

// Leaving waits for what is queued, within the timeout.
TEST_P(NcclModule, LeavesAfterItsWork) {
  on_ranks(2, [](Rank& rank) {
    const Memory memory(256);
    EXPECT_EQ(kFunctions[6].call(rank, memory), 0);
    module().leave(rank.table().user);
    rank.status = GA_ERROR_INVALID_STATE;  // has left
    EXPECT_EQ(cudaStreamQuery(rank.stream), cudaSuccess);
  });
  EXPECT_EQ(ga_fake_nccl_calls("ncclCommAbort"), 0);
  EXPECT_EQ(ga_fake_nccl_calls("ncclCommFinalize"), 2);
  EXPECT_EQ(ga_fake_nccl_calls("ncclCommDestroy"), 2);
  ga_fake_nccl_hang(1);
  on_ranks(
      1,
      [](const Rank& rank) {
        const Memory memory(256);
        EXPECT_EQ(kFunctions[6].call(rank, memory), 0);
        module().leave(rank.table().user);
        const_cast<Rank&>(rank).status = GA_ERROR_INVALID_STATE;
        rank.wait();
      },
      0.2);
  EXPECT_EQ(ga_fake_nccl_calls("ncclCommAbort"), 1);
}

// ---- The program's communicator --------------------------------------------------------------------

ncclComm_t make_comm(const Id& id, int32_t rank, int32_t ranks, int blocking) {
  ncclUniqueId its;
  std::memcpy(its.internal, id.bytes, sizeof its.internal);
  ncclConfig_t config = {sizeof config, 0xcafebeef, 23000, blocking};
  ncclComm_t comm = nullptr;
  const ncclResult_t result = ncclCommInitRankConfig(&comm, ranks, its, rank, &config);
  EXPECT_TRUE(result == ncclSuccess || result == ncclInProgress) << result;
  return comm;
}

TEST_P(NcclModule, TheProgramsCommunicatorStaysItsOwn) {
  for (const int blocking : {0, 1})
    on_threads(3, [&](int32_t r, const Id& id) {
      const ncclComm_t comm = make_comm(id, r, 3, blocking);
      {
        ga_comm_config config;
        EXPECT_OK(ga_comm_config_init(&config, sizeof config, GA_COMM_NCCL));
        config.nccl_comm = comm;
        const Rank rank(config);
        ASSERT_EQ(rank.status, GA_OK) << rank.error;
        EXPECT_EQ(rank.end.rank, r);
        EXPECT_EQ(rank.end.ranks, 3);
        EXPECT_EQ(rank.end.device, r);
        const Memory data(as_bytes(std::vector<float>{1}));
        EXPECT_EQ(rank.table().all_reduce(rank.table().user, data.at(), 1, GA_F32, GA_COMM_SUM,
                                          rank.stream),
                  0);
        rank.wait();
        EXPECT_EQ(as_values<float>(data.bytes()), std::vector<float>{3});
      }
      int ranks = 0;
      EXPECT_EQ(ncclCommCount(comm, &ranks), ncclSuccess);
      EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
    });
  EXPECT_EQ(ga_fake_nccl_calls("ncclCommDestroy"), 6);
  EXPECT_EQ(ga_fake_nccl_calls("ncclCommAbort"), 0);
  EXPECT_EQ(ga_fake_nccl_calls("ncclCommFinalize"), 0);
}

// A communicator that cannot be used is refused, and stays.
TEST_P(NcclModule, TheProgramsCommunicatorHasFailed) {
  EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
  const Id id;
  const ncclComm_t comm = make_comm(id, 0, 1, 1);
  ga_comm_config config;
  EXPECT_OK(ga_comm_config_init(&config, sizeof config, GA_COMM_NCCL));
  config.nccl_comm = comm;
  ga_fake_nccl_async_error(0, ncclRemoteError);
  {
    const Rank rank(config);
    EXPECT_EQ(rank.status, GA_ERROR_COMMUNICATION);
    expect_words(rank.error, "remote process exited");
  }
  ga_fake_nccl_async_error(0, ncclInProgress);
  config.timeout = 0.1;
  {
    const Rank rank(config);
    EXPECT_EQ(rank.status, GA_ERROR_COMMUNICATION);
    expect_words(rank.error, "waited 0.1 s for the other ranks");
  }
  ga_fake_nccl_async_error(0, ncclSuccess);
  for (const char* function : {"ncclCommCount", "ncclCommUserRank", "ncclCommCuDevice"}) {
    ga_fake_nccl_fail(function, 1, ncclInternalError);
    const Rank rank(config);
    EXPECT_EQ(rank.status, GA_ERROR_COMMUNICATION);
    expect_words(rank.error, function);
  }
  EXPECT_EQ(ga_fake_nccl_calls("ncclCommAbort"), 0);
  EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
}

TEST_P(NcclModule, AbortEndsTheProgramsCommunicator) {
  EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
  const Id id;
  ga_comm_config config;
  EXPECT_OK(ga_comm_config_init(&config, sizeof config, GA_COMM_NCCL));
  config.nccl_comm = make_comm(id, 0, 1, 1);
  const Rank rank(config);
  ASSERT_EQ(rank.status, GA_OK) << rank.error;
  rank.table().abort(rank.table().user);
  EXPECT_EQ(ga_fake_nccl_communicators(), 0);
}

// ---- By the public API -----------------------------------------------------------------------------

// Before NCCL is asked, which would wait for ranks that never come.
TEST(NcclConfigurations, BadOnesAreRefused) {
  const Id id;
  const auto expect = [&](ga_comm_config c, const char* words) {
    ga_comm* comm = nullptr;
    EXPECT_EQ(ga_comm_create(&c, &comm), GA_ERROR_INVALID_ARGUMENT);
    EXPECT_NE(std::string(ga_last_error()).find(words), std::string::npos) << ga_last_error();
    EXPECT_EQ(comm, nullptr);
  };
  expect(nccl_config(id, 0, 0), "ranks was 0");
  expect(nccl_config(id, -1, 2), "rank was -1, but ranks is 2");
  expect(nccl_config(id, 2, 2), "rank was 2, but ranks is 2");
  ga_comm_config none = nccl_config(id, 0, 1);
  none.id = nullptr;
  expect(none, "id was NULL");
}

TEST_P(NcclModule, CommunicatorsOfTheApi) {
  unsigned char id[GA_COMM_ID_SIZE];
  ASSERT_OK(ga_comm_unique_id(GA_COMM_NCCL, id, sizeof id));
  std::vector<std::thread> threads;
  for (int32_t r = 0; r < 3; ++r)
    threads.emplace_back([&, r] {
      EXPECT_EQ(cudaSetDevice(r), cudaSuccess);
      ga_comm_config c;
      EXPECT_OK(ga_comm_config_init(&c, sizeof c, GA_COMM_NCCL));
      c.id = id;
      c.rank = r;
      c.ranks = 3;
      ga_comm* comm = nullptr;
      ASSERT_OK(ga_comm_create(&c, &comm)) << ga_last_error();
      int32_t rank = -1, ranks = -1;
      EXPECT_OK(ga_comm_size(comm, &rank, &ranks));
      EXPECT_EQ(rank, r);
      EXPECT_EQ(ranks, 3);
      if (r == 2) {
        EXPECT_OK(ga_comm_abort(comm));
      }
      ga_comm_destroy(comm);
    });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(ga_fake_nccl_communicators(), 0);
  EXPECT_EQ(ga_fake_nccl_calls("ncclCommDestroy"), 2);
  EXPECT_EQ(ga_fake_nccl_calls("ncclCommAbort"), 1);

  ga_comm_config c;
  EXPECT_OK(ga_comm_config_init(&c, sizeof c, GA_COMM_NCCL));
  c.id = id;
  c.ranks = 2;
  c.rank = 1;
  c.timeout = 0.1;
  ASSERT_OK(ga_comm_unique_id(GA_COMM_NCCL, id, sizeof id));
  ga_comm* comm = nullptr;
  EXPECT_EQ(ga_comm_create(&c, &comm), GA_ERROR_COMMUNICATION);
  EXPECT_STREQ(ga_last_error(), "ga_comm_create: rank 1 waited 0.1 s for the other ranks");
  EXPECT_EQ(comm, nullptr);
}

// ---- The library of NCCL's name --------------------------------------------------------------------

// Ranks that do not call the same never get on.
TEST_P(NcclModule, DifferentCallsHang) {
  on_ranks(2, [](const Rank& rank) {
    const ga_comm_table& t = rank.table();
    const Memory data(as_bytes(std::vector<float>{1, 2}));
    int32_t failure =
        t.all_reduce(t.user, data.at(), 1 + rank.end.rank, GA_F32, GA_COMM_SUM, rank.stream);
    while (failure == 0) {
      ASSERT_NE(cudaStreamQuery(rank.stream), cudaSuccess);
      failure = rank.poll();
    }
    EXPECT_EQ(failure, ncclInvalidUsage);
    rank.wait();
    EXPECT_EQ(as_values<float>(data.bytes()), (std::vector<float>{1, 2}));
  });
}

// Memory of the host or of another device, or too little of it.
TEST_P(NcclModule, RefusesOtherMemory) {
  float host = 0;
  void* far = nullptr;
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  ASSERT_EQ(cudaMalloc(&far, 64), cudaSuccess);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  void* near = nullptr;
  ASSERT_EQ(cudaMalloc(&near, 64), cudaSuccess);
  for (void* data :
       {static_cast<void*>(&host), far, static_cast<void*>(static_cast<char*>(near) + 32)})
    on_ranks(1, [&](const Rank& rank) {
      const ga_comm_table& t = rank.table();
      EXPECT_EQ(t.broadcast(t.user, data, 16, GA_F32, 0, rank.stream), ncclInvalidArgument);
    });
}

INSTANTIATE_TEST_SUITE_P(Ways, NcclModule,
                         testing::Values(Way{false, 0}, Way{true, 0}, Way{false, 3}, Way{true, 3}),
                         [](const testing::TestParamInfo<Way>& info) {
                           return std::string(info.param.deferred ? "deferred" : "eager") +
                                  (info.param.in_progress ? "_in_progress" : "");
                         });

}  // namespace
}  // namespace ga::test
