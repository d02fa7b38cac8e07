// SPDX-License-Identifier: Apache-2.0
// Runs a suite on another device. With GA_TEST_DEVICE=cuda in the environment, contexts that the
// tests make for the CPU are made for CUDA instead; with cuda:<folder>, on a simulated device, by
// the module in that folder. The device must have finished its work when a call returns
// (CUDA_LAUNCH_BLOCKING=1 on a GPU). Linked with --wrap=ga_context_create.
//
// What a test hands to the library is then in memory of the host that CUDA has registered, which
// every device can access: what operator new returns, and the stacks of the main thread and of each
// thread that makes a context. What is static is not. With memory or memory:<folder>, contexts are
// made as the tests say, and this is all that is done. Simulated devices that read all memory of
// the host (GA_SIM_PAGEABLE_ACCESS=1) get memory of malloc, which AddressSanitizer guards.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <string>

#include "gradaccum/gradaccum.h"
#include "support.hpp"

extern "C" ga_status __real_ga_context_create(const ga_config* config, ga_context** out);
extern "C" ga_status __wrap_ga_context_create(const ga_config* config, ga_context** out);

namespace {

void require(bool ok, const char* what, const char* why = "") {
  if (ok) return;
  std::fprintf(stderr, "tests/device.cpp: %s failed %s\n", what, why);
  std::abort();
}

// Functions of CUDA: of the simulated devices of a module, or of this program, which need not have
// them.
struct Cuda {
  bool chosen = false;     // contexts are made for CUDA
  bool registers = false;  // memory of the host is registered
  int (*copy)(void* to, const void* from, size_t bytes, int kind) = nullptr;
  int (*add)(void* memory, size_t bytes, unsigned flags) = nullptr;
  int (*remove)(void* memory) = nullptr;
};

Cuda found() {
  Cuda c;
  std::string module;
  const char* const device = std::getenv("GA_TEST_DEVICE");
  if (device) {
    const std::string all = device, kind = all.substr(0, all.find(':'));
    require(kind == "cuda" || kind == "memory", "choosing the device", device);
    c.chosen = kind == "cuda";
    std::printf("on device %s\n", device);  // the suite would pass on the CPU too
    const char* const reads_all = std::getenv("GA_SIM_PAGEABLE_ACCESS");
    c.registers = !reads_all || std::strcmp(reads_all, "1") != 0;
    if (all != kind) {
      module = all.substr(kind.size() + 1);
      setenv("GA_MODULE_PATH", module.c_str(), 1);
      module += "/libgradaccum_cuda.so";
    }
  }
  void* const library = dlopen(module.empty() ? nullptr : module.c_str(), RTLD_NOW | RTLD_LOCAL);
  const auto find = [&](const char* name, auto& function) {
    void* const symbol = library ? dlsym(library, name) : nullptr;
    require(symbol || !device, name, symbol ? "" : dlerror());
    function = reinterpret_cast<std::decay_t<decltype(function)>>(symbol);
  };
  find("cudaMemcpy", c.copy);
  find("cudaHostRegister", c.add);
  find("cudaHostUnregister", c.remove);
  return c;
}
const Cuda& cuda() {
  static const Cuda c = found();
  return c;
}

// ---- The heap ------------------------------------------------------------------------------------

// Registered memory, in blocks whose sizes are powers of two. Constant-initialized, so that
// constructors of static objects may allocate.
class Heap {
 public:
  // From now on, memory is taken from here. Before, and when nothing is left, it is malloc's.
  void open() {
    void* const memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    require(memory != MAP_FAILED, "mmap");
    require(cuda().add(memory, kBytes, 0) == 0, "cudaHostRegister");
    unused_ = begin_ = static_cast<char*>(memory);
  }
  void* take(size_t bytes) {
    if (!begin_) return nullptr;
    size_t kind = 5;
    while ((size_t{1} << kind) < bytes + sizeof(Header)) ++kind;
    const std::lock_guard<std::mutex> lock(mutex_);
    Header* block = freed_[kind];
    if (block) {
      freed_[kind] = block->next;
    } else {
      if ((size_t{1} << kind) > static_cast<size_t>(begin_ + kBytes - unused_)) return nullptr;
      block = reinterpret_cast<Header*>(unused_);
      unused_ += size_t{1} << kind;
    }
    block->kind = kind;
    return block + 1;
  }
  bool give_back(void* data) {
    auto* const at = static_cast<char*>(data);
    if (!begin_ || at < begin_ || at >= begin_ + kBytes) return false;
    const std::lock_guard<std::mutex> lock(mutex_);
    Header* const block = static_cast<Header*>(data) - 1;
    block->next = freed_[block->kind];
    freed_[block->kind] = block;
    return true;
  }

 private:
  static constexpr size_t kBytes = size_t{1} << 30;
  struct alignas(16) Header {
    Header* next;
    size_t kind;
  };
  std::mutex mutex_;
  char *begin_ = nullptr, *unused_ = nullptr;
  Header* freed_[64] = {};
};
Heap heap;

// ---- The stacks ----------------------------------------------------------------------------------

// Registers the stack of a thread for as long as the thread lives, and some more of it than is used
// now.
class Stack {
 public:
  Stack() {
    constexpr size_t kMore = 512 << 10;
    volatile char more[kMore];
    for (size_t i = kMore; i > 0; i -= 1024) more[i - 1] = 0;  // the system maps it downwards
    pthread_attr_t attributes;
    void* begin = nullptr;
    size_t bytes = 0;
    require(pthread_getattr_np(pthread_self(), &attributes) == 0, "pthread_getattr_np");
    pthread_attr_getstack(&attributes, &begin, &bytes);
    pthread_attr_destroy(&attributes);
    begin_ = const_cast<char*>(more);
    bytes = static_cast<size_t>(static_cast<char*>(begin) + bytes - begin_);
    require(cuda().add(begin_, bytes, 0) == 0, "cudaHostRegister");
  }
  ~Stack() { cuda().remove(begin_); }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  static void of_this_thread() {
    if (cuda().registers) static thread_local const Stack stack;
  }

 private:
  char* begin_;
};

// Before main().
const struct Start {
  Start() {
    if (cuda().registers) heap.open();
    Stack::of_this_thread();
  }
} start;

}  // namespace

#ifndef GA_ASAN  // whose own operators tell new from new[]
// Weak: some suites have operators of their own.
__attribute__((weak)) void* operator new(size_t bytes) {
  void* data = heap.take(bytes);
  if (!data) data = std::malloc(bytes ? bytes : 1);
  if (!data) throw std::bad_alloc();
  return data;
}
__attribute__((weak)) void operator delete(void* data) noexcept {
  if (!heap.give_back(data)) std::free(data);
}
__attribute__((weak)) void operator delete(void* data, size_t) noexcept { operator delete(data); }
#endif

void ga::test::copy(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  if (!cuda().copy) {
    std::memcpy(to, from, bytes);
    return;
  }
  constexpr int kDefault = 4;  // cudaMemcpyDefault
  require(cuda().copy(to, from, bytes, kDefault) == 0, "cudaMemcpy");
}

extern "C" ga_status __wrap_ga_context_create(const ga_config* config, ga_context** out) {
  if (!cuda().chosen) return __real_ga_context_create(config, out);
  Stack::of_this_thread();
  ga_config c;
  ga_config_init(&c, sizeof c);
  // A config of another version, or for another device, goes to the library unchanged.
  if (config && (config->struct_size != sizeof c || config->device != GA_DEVICE_CPU))
    return __real_ga_context_create(config, out);
  if (config) c = *config;
  c.device = GA_DEVICE_CUDA;
  return __real_ga_context_create(&c, out);
}
