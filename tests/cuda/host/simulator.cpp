// SPDX-License-Identifier: Apache-2.0
#include <cxxabi.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../ptx/compare.hpp"
#include "engine.hpp"
#include "fibres.hpp"

namespace ga::sim {
namespace {

constexpr size_t kArenaBytes = size_t{256} << 30;  // of address space
constexpr size_t kWindow = size_t{1} << 30;        // the range of one second-level page table
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kAlignment = 256;
constexpr size_t kMostFilled = size_t{64} << 20;
constexpr unsigned char kFresh = 0xff;  // NaN, whatever the format
constexpr unsigned char kSlack = 0xa5;
constexpr int kInstallGuard = 102;  // MADV_GUARD_INSTALL, which older headers lack

size_t page_size() {
  static const auto size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

[[noreturn]] void die(const char* text) {
  std::fprintf(stderr, "simulated CUDA: %s\n", text);
  std::abort();
}

void check(bool ok, const char* what) {
  if (!ok) {
    std::perror(what);
    die("the operating system refused");
  }
}

int64_t number(const char* variable, int64_t otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr && *text != '\0' ? std::strtoll(text, nullptr, 10) : otherwise;
}

Config initial_config() {
  Config config;
  config.deferred = number("GA_SIM_DEFERRED", config.deferred) != 0;
  config.protect = number("GA_SIM_PROTECT", config.protect) != 0;
  config.reverse_blocks = number("GA_SIM_REVERSE_BLOCKS", config.reverse_blocks) != 0;
  config.pageable_access = number("GA_SIM_PAGEABLE_ACCESS", config.pageable_access) != 0;
  config.memory_pools = number("GA_SIM_MEMORY_POOLS", config.memory_pools) != 0;
  config.devices = static_cast<int>(number("GA_SIM_DEVICES", config.devices));
  config.driver = static_cast<int>(number("GA_SIM_DRIVER", config.driver));
  if (config.driver == cudaErrorInsufficientDriver) config.driver_version = 0;
  config.multiprocessors =
      static_cast<int>(number("GA_SIM_MULTIPROCESSORS", config.multiprocessors));
  return config;
}

// Reserves addresses that cannot be accessed.
char* reserve(size_t size, int flags, int file) {
  void* base = mmap(nullptr, size, PROT_NONE, flags | MAP_NORESERVE, file, 0);
  check(base != MAP_FAILED, "mmap");
  return static_cast<char*>(base);
}

// Counts n down and returns true when the n-th operation is reached.
bool strikes(int64_t& n) { return n > 0 && --n == 0; }

}  // namespace

// ---- Memory ----------------------------------------------------------------------------------------

// There are two ways to make the arena inaccessible, and the gaps between allocations in any case.
// With the processor's protection keys, and on a Linux before 6.13, each allocation is a mapping
// over an empty file. Accesses beyond the end of the file fail (SIGSEGV or SIGBUS) whatever the
// protection is, so one call can change the protection of the whole arena. Without keys, that call
// visits all pages of all mappings. Otherwise guard pages lie between allocations in windows of the
// address space. The page tables of a window move to other addresses when the arena is closed and
// back when it is opened, which costs the same for one page and for a million.
void Arena::create() {
  if (number("GA_SIM_PROTECTION_KEYS", 1) != 0) {
    key_ = pkey_alloc(0, open_ ? 0 : PKEY_DISABLE_ACCESS);
  }
  if (key_ < 0 && number("GA_SIM_GUARD_PAGES", 1) != 0 && create_windows()) return;
  file_ = memfd_create("simulated device", MFD_CLOEXEC);
  check(file_ >= 0, "memfd_create");
  base_ = reserve(kArenaBytes, MAP_SHARED, file_);
}

bool Arena::create_windows() {
  char* base = reserve(2 * kArenaBytes + kWindow, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  if (madvise(base, page_size(), kInstallGuard) != 0) {
    check(munmap(base, 2 * kArenaBytes + kWindow) == 0, "munmap");
    return false;
  }
  base_ = base + (kWindow - reinterpret_cast<uintptr_t>(base) % kWindow);
  away_ = base_ + kArenaBytes;
  return true;
}

// Begins a new window, even if the last one is not full.
bool Arena::add_window(size_t size) {
  const size_t begin = windows_.empty() ? round_up(used_, kWindow) : windows_.back().end();
  if (size > kArenaBytes - begin) return false;
  if (!windows_.empty() && windows_.back().allocations == 0) remove_window(windows_.end() - 1);
  windows_.push_back({begin, size});
  // Huge pages are for large allocations only, because guard pages lie between small ones. Windows
  // have other attributes than their neighbours, so that the kernel need not join and split
  // mappings.
  for (char* addresses : {base_, away_}) madvise(addresses + begin, size, MADV_HUGEPAGE);
  char* pages = unseal(base_ + begin, size);
  check(mprotect(pages, size, PROT_READ | PROT_WRITE) == 0, "mprotect");
  check(madvise(pages, page_size(), kInstallGuard) == 0, "madvise");
  used_ = begin + page_size();
  return true;
}

void Arena::remove_window(std::vector<Window>::iterator window) {
  for (char* addresses : {base_, away_}) {
    check(mmap(addresses + window->begin, window->size, PROT_NONE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) != MAP_FAILED,
          "mmap");
  }
  windows_.erase(window);
}

void Arena::move(const Window& window, bool here) {
  char* const near = base_ + window.begin;
  char* const far = away_ + window.begin;
  // The old addresses stay reserved, so that nothing else is mapped there.
  check(mremap(here ? far : near, window.size, window.size,
               MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, here ? near : far) != MAP_FAILED,
        "mremap");
  if (!here) check(mprotect(near, window.size, PROT_NONE) == 0, "mprotect");
}

void Arena::protect(bool on) {
  if (on == protect_) return;
  protect_ = on;
  if (away_ == nullptr) {
    if (used_ > 0) seal_mappings(base_, used_);
  } else if (!open_) {
    for (const Window& window : windows_) move(window, !protect_);
  }
}

void Arena::open(bool on) {
  if (on == open_) return;
  open_ = on;
  if (used_ == 0 || !protect_) return;
  if (key_ >= 0) {
    check(pkey_set(key_, on ? 0 : PKEY_DISABLE_ACCESS) == 0, "pkey_set");
  } else if (away_ == nullptr) {
    seal_mappings(base_, used_);
  } else {
    for (const Window& window : windows_) move(window, open_);
  }
}

void Arena::seal_mappings(char* pages, size_t size) {
  constexpr int all = PROT_READ | PROT_WRITE;
  const int result = key_ >= 0 ? pkey_mprotect(pages, size, all, protect_ ? key_ : 0)
                               : mprotect(pages, size, open_ || !protect_ ? all : PROT_NONE);
  check(result == 0, "mprotect");
}

void Arena::seal(char* pages, size_t size) {
  if (away_ == nullptr) seal_mappings(pages, size);
}

char* Arena::unseal(char* pages, size_t size) {
  if (away_ != nullptr) return open_ || !protect_ ? pages : pages - base_ + away_;
  constexpr int all = PROT_READ | PROT_WRITE;
  const int result = key_ >= 0 ? pkey_mprotect(pages, size, all, 0) : mprotect(pages, size, all);
  check(result == 0, "mprotect");
  return pages;
}

char* Arena::take(size_t size) {
  if (base_ == nullptr) create();
  if (size > kArenaBytes - page_size()) return nullptr;
  if (away_ == nullptr) {
    if (size > kArenaBytes - used_ - page_size()) return nullptr;
    char* result = base_ + used_;
    check(mmap(result, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1,
               0) == result,
          "mmap");
    used_ += size + page_size();
    return result;
  }
  const auto place =
      [&] {  // a large allocation ends at the end of a huge page, so that it consists of huge pages
        return size < kHugePage ? used_ : round_up(used_ + size, kHugePage) - size;
      };
  if (windows_.empty() || place() + size + page_size() > windows_.back().end()) {
    if (!add_window(round_up(size + 2 * kHugePage, kWindow))) return nullptr;
  }
  char* result = base_ + place();
  used_ = place() + size + page_size();
  ++windows_.back().allocations;
  check(madvise(unseal(result + size, page_size()), page_size(), kInstallGuard) == 0, "madvise");
  return result;
}

void Arena::give_back(char* pages, size_t size) {
  if (away_ == nullptr) {
    check(mmap(pages, size, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file_,
               pages - base_) == pages,
          "mmap");
    return;
  }
  check(madvise(unseal(pages, size), size, kInstallGuard) == 0, "madvise");
  const auto offset = static_cast<size_t>(pages - base_);
  const auto window = std::find_if(windows_.begin(), windows_.end(),
                                   [=](const Window& w) { return offset < w.end(); });
  if (--window->allocations == 0 && window != windows_.end() - 1) remove_window(window);
}

bool Arena::contains(const void* pointer) const {
  const auto* p = static_cast<const char*>(pointer);
  return base_ != nullptr && p >= base_ && p < base_ + kArenaBytes;
}

namespace {

// Allocates pinned or managed memory, followed by a page without access. What is large gets huge pages: page faults would
// take most of the time in which a context is created. The addresses are not used again after the memory is freed.
char* take_host_pages(size_t pages) {
  const size_t unit = pages < kHugePage ? page_size() : kHugePage;
  void* base = mmap(nullptr, unit + pages + page_size(), PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  auto* result = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(base), unit));
  if (unit == kHugePage) madvise(result, pages, MADV_HUGEPAGE);  // a kernel may have none
  check(mprotect(result, pages, PROT_READ | PROT_WRITE) == 0, "mprotect");
  return result;
}

void give_back_host_pages(char* pages, size_t size) {
  check(mmap(pages, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1,
             0) == pages,
        "mmap");
}

// pages: the address at which the pages of the allocation can be read.
void check_slack(const Allocation& a, const char* pages) {
  const auto untouched = [](const char* begin, const char* end) {
    return std::all_of(begin, end, [](char c) { return static_cast<unsigned char>(c) == kSlack; });
  };
  const char* begin = pages + (a.begin - a.pages);
  if (!untouched(pages, begin) || !untouched(begin + a.size, pages + a.page_bytes)) {
    die("memory beside an allocation was written");
  }
}

}  // namespace

cudaError_t Engine::allocate(void** pointer, size_t size, Memory memory, int device, bool pooled) {
  ++counters.allocations;
  if (strikes(fail_allocation)) return cudaErrorMemoryAllocation;
  if (size == 0) {
    *pointer = nullptr;
    return cudaSuccess;
  }
  const bool on_device = memory != Memory::kPinned;
  if (size > config.memory || (on_device && devices[device].bytes > config.memory - size)) {
    return cudaErrorMemoryAllocation;
  }
  Arena& arena = devices[device].arena;
  const size_t page_bytes = round_up(size, page_size());
  char* pages = memory == Memory::kDevice ? arena.take(page_bytes) : take_host_pages(page_bytes);
  if (pages == nullptr) return cudaErrorMemoryAllocation;
  char* begin = pages + (page_bytes - round_up(size, kAlignment));
  char* fill = memory == Memory::kDevice ? arena.unseal(pages, page_bytes) : pages;
  const auto before = static_cast<size_t>(begin - pages);
  std::memset(fill, kSlack, before);
  if (size <= kMostFilled) std::memset(fill + before, kFresh, size);
  std::memset(fill + before + size, kSlack, page_bytes - before - size);
  if (memory == Memory::kDevice) arena.seal(pages, page_bytes);
  if (on_device) {
    devices[device].bytes += size;
    counters.device_bytes += static_cast<int64_t>(size);
    counters.device_bytes_peak = std::max(counters.device_bytes_peak, counters.device_bytes);
  } else {
    counters.pinned_bytes += static_cast<int64_t>(size);
  }
  allocations_[reinterpret_cast<uintptr_t>(begin)] = {begin,  size,  memory,    device,
                                                      pooled, pages, page_bytes};
  *pointer = begin;
  return cudaSuccess;
}

cudaError_t Engine::register_host(void* pointer, size_t size, int device) {
  if (pointer == nullptr || size == 0) return cudaErrorInvalidValue;
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  const auto next = allocations_.lower_bound(address);
  if (find(pointer) != nullptr || (next != allocations_.end() && next->first < address + size)) {
    return cudaErrorHostMemoryAlreadyRegistered;
  }
  Allocation& a = allocations_[address];
  a.begin = static_cast<char*>(pointer);
  a.size = size;
  a.memory = Memory::kRegistered;
  a.device = device;
  return cudaSuccess;
}

cudaError_t Engine::release(char* begin) {
  const auto found = allocations_.find(reinterpret_cast<uintptr_t>(begin));
  if (found == allocations_.end()) return cudaErrorInvalidValue;
  const Allocation a = found->second;
  allocations_.erase(found);
  if (a.memory == Memory::kRegistered) return cudaSuccess;
  ++counters.frees;
  if (a.memory == Memory::kDevice) {
    Arena& arena = devices[a.device].arena;
    check_slack(a, arena.unseal(a.pages, a.page_bytes));
    arena.give_back(a.pages, a.page_bytes);
  } else {
    check_slack(a, a.pages);
    give_back_host_pages(a.pages, a.page_bytes);
  }
  if (a.memory == Memory::kPinned) {
    counters.pinned_bytes -= static_cast<int64_t>(a.size);
  } else {
    devices[a.device].bytes -= a.size;
    counters.device_bytes -= static_cast<int64_t>(a.size);
  }
  return cudaSuccess;
}

void Engine::release_everything() {
  while (!allocations_.empty()) release(allocations_.begin()->second.begin);
}

const Allocation* Engine::find(const void* pointer) const {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  auto next = allocations_.upper_bound(address);
  if (next == allocations_.begin()) return nullptr;
  const Allocation& a = std::prev(next)->second;
  return address - reinterpret_cast<uintptr_t>(a.begin) < a.size ? &a : nullptr;
}

std::vector<Allocation> Engine::accessible(int device) const {
  std::vector<Allocation> found;
  for (const auto& [address, a] : allocations_) {
    bool elsewhere = false;
    for (int i = 0; i < kMaxDevices; ++i)
      elsewhere = elsewhere || (i != device && devices[i].arena.contains(a.begin));
    if (!elsewhere) found.push_back(a);
  }
  return found;
}

bool Engine::valid(const void* pointer, size_t size) const {
  const Allocation* a = find(pointer);
  if (a != nullptr) {
    const auto* p = static_cast<const char*>(pointer);
    return a->memory == Memory::kRegistered || size <= static_cast<size_t>(a->begin + a->size - p);
  }
  return pointer != nullptr &&
         std::none_of(std::begin(devices), std::end(devices),
                      [&](const Device& device) { return device.arena.contains(pointer); });
}

void Engine::open_only(int device) {
  for (int i = 0; i < kMaxDevices; ++i) {
    devices[i].arena.protect(config.protect);
    devices[i].arena.open(device == kEveryDevice || device == i);
  }
}

// ---- Work ------------------------------------------------------------------------------------------

ThreadState& thread_state() {
  static thread_local ThreadState state;
  return state;
}

Engine& Engine::get() {
  static auto* engine = new Engine;  // never destroyed: needed to the very end of the process
  return *engine;
}

Engine::Engine() : config(initial_config()) {
  for (int i = 0; i < kMaxDevices; ++i) {
    devices[i].primary.device = i;
    devices[i].legacy = std::make_shared<CUstream_st>(CUstream_st{i, cudaStreamDefault, true});
    streams.push_back(devices[i].legacy);
  }
  close_all();
}

int current_device() {
  const ThreadState& state = thread_state();
  return state.context ? state.context->device : state.device;
}

void need_context() {
  ThreadState& state = thread_state();
  if (!state.context) state.context = &Engine::get().devices[state.device].primary;
  state.context->exists = true;
}

cudaError_t entry_error() {
  Engine& engine = Engine::get();
  if (thread_state().in_host_function) return cudaErrorNotPermitted;
  if (engine.config.driver != cudaSuccess) return static_cast<cudaError_t>(engine.config.driver);
  if (engine.config.devices == 0) return cudaErrorNoDevice;
  return engine.devices[current_device()].fault;
}

std::shared_ptr<CUstream_st> Engine::stream(cudaStream_t handle) {
  Device& device = devices[current_device()];
  if (handle == nullptr || handle == cudaStreamLegacy) return device.legacy;
  if (handle == cudaStreamPerThread) {
    std::shared_ptr<CUstream_st>& stream = device.per_thread[std::this_thread::get_id()];
    if (stream == nullptr) {
      stream = std::make_shared<CUstream_st>(CUstream_st{current_device(), cudaStreamDefault});
      stream->context = thread_state().context;
      streams.push_back(stream);
    }
    return stream;
  }
  for (const auto& stream : streams) {
    if (stream.get() == handle && !stream->destroyed) return stream;
  }
  return nullptr;
}

Mark Engine::end_of(const std::shared_ptr<CUstream_st>& stream) const {
  return {stream, stream->end()};
}

cudaError_t prepare(Engine& engine, cudaStream_t handle, bool current_context,
                    std::shared_ptr<CUstream_st>* stream) {
  *stream = engine.stream(handle);
  if (*stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (current_context && (*stream)->context && (*stream)->context != thread_state().context) {
    return cudaErrorInvalidResourceHandle;
  }
  if (engine.devices[(*stream)->device].fault != cudaSuccess) {
    return engine.devices[(*stream)->device].fault;
  }
  if (engine.implicit_capture(**stream)) {
    for (const auto& capture : engine.captures) capture->invalid = true;
    return cudaErrorStreamCaptureImplicit;
  }
  const std::shared_ptr<Capture> capture = engine.capture_of(stream->get());
  if (capture != nullptr && capture->invalid) return cudaErrorStreamCaptureInvalidated;
  if (strikes(engine.fail_call)) return engine.fail_call_error;
  return cudaSuccess;
}

cudaError_t Engine::enqueue(const std::shared_ptr<CUstream_st>& stream, Work work) {
  return enqueue(stream, std::make_shared<const Work>(std::move(work)), {});
}

cudaError_t Engine::enqueue(const std::shared_ptr<CUstream_st>& stream,
                            std::shared_ptr<const Work> work, std::vector<Mark> after) {
  if (const std::shared_ptr<Capture> capture = capture_of(stream.get())) {
    capture->works.push_back(std::move(work));
    ++capture->streams[stream.get()][stream.get()];
    return cudaSuccess;
  }
  // The legacy stream and streams that were not created as non-blocking wait for each other.
  if (stream->legacy) {
    for (const auto& other : streams) {
      if (other != stream && other->device == stream->device &&
          (other->flags & cudaStreamNonBlocking) == 0) {
        after.push_back(end_of(other));
      }
    }
  } else if ((stream->flags & cudaStreamNonBlocking) == 0) {
    after.push_back(end_of(devices[stream->device].legacy));
  }
  stream->items.push_back({std::move(work), std::move(after)});
  if (!config.deferred) advance(end_of(stream));
  return cudaSuccess;
}

void Engine::execute(const CUstream_st& stream, const Work& work) {
  if (work.kind == Kind::kFree) {  // even after a fault
    work.run();
    return;
  }
  Device& device = devices[stream.device];
  if (device.fault != cudaSuccess) return;
  if (work.kind == Kind::kHostFunction) {
    close_all();
    thread_state().in_host_function = true;
    work.run();
    thread_state().in_host_function = false;
    return;
  }
  if (strikes(fail_execution)) {
    device.fault = cudaErrorIllegalAddress;
    return;
  }
  if (work.kind == Kind::kKernel) ++counters.executed;
  open_only(work.device);
  work.run();
}

bool Engine::run_item(CUstream_st& stream) {
  const Item item = stream.items.front();
  for (const Mark& mark : item.after) {
    if (!advance(mark)) return false;
  }
  if (item.work != nullptr) {
    const bool faulty = devices[stream.device].fault != cudaSuccess;
    if (item.work->ready && !faulty && !item.work->ready()) return false;
    execute(stream, *item.work);
  }
  stream.items.pop_front();
  ++stream.done;
  return true;
}

bool Engine::advance(const Mark& upto) {
  if (upto.stream == nullptr) return true;
  ++depth_;
  while (upto.stream->done < upto.index && run_item(*upto.stream)) {
  }
  const bool reached = upto.stream->done >= upto.index;
  if (--depth_ > 0) return reached;
  close_all();
  if (upto.stream->destroyed && upto.stream->items.empty()) {
    streams.erase(std::remove(streams.begin(), streams.end(), upto.stream), streams.end());
  }
  return reached;
}

void Engine::run(const Mark& upto) {
  while (!advance(upto)) {
    advance_to_waiting();
    if (advance(upto)) return;
    mutex.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    mutex.lock();
  }
}

// Runs every stream up to the first work that may wait for others, and that work if it is ready.
void Engine::advance_to_waiting() {
  const std::vector<std::shared_ptr<CUstream_st>> all = streams;
  for (const auto& stream : all) {
    int64_t index = stream->done;
    for (const Item& item : stream->items) {
      ++index;
      if (item.work == nullptr || !item.work->ready) continue;
      advance({stream, index});
      break;
    }
  }
}

bool Engine::run_one(const Mark& upto) {
  if (upto.stream == nullptr || upto.stream->done >= upto.index) return false;
  for (const Mark& mark : upto.stream->items.front().after) {
    if (run_one(mark)) return true;
  }
  if (!advance({upto.stream, upto.stream->done + 1})) advance_to_waiting();
  return true;
}

void Engine::run_device(int device) {
  const std::vector<std::shared_ptr<CUstream_st>> all = streams;
  for (const auto& stream : all) {
    if (device == kEveryDevice || stream->device == device) run(end_of(stream));
  }
}

void Engine::run_everything() { run_device(kEveryDevice); }

// ---- Captures ----------------------------------------------------------------------------------------

std::shared_ptr<Capture> Engine::capture_of(const CUstream_st* stream) const {
  for (const auto& capture : captures) {
    if (capture->streams.count(const_cast<CUstream_st*>(stream)) != 0) return capture;
  }
  return nullptr;
}

bool Engine::unsafe_call() {
  const ThreadState& thread = thread_state();
  if (thread.mode == cudaStreamCaptureModeRelaxed) return false;
  bool forbidden = false;
  for (const auto& capture : captures) {
    const bool own = capture->thread == std::this_thread::get_id();
    if ((own && capture->mode != cudaStreamCaptureModeRelaxed) ||
        (capture->mode == cudaStreamCaptureModeGlobal &&
         thread.mode == cudaStreamCaptureModeGlobal)) {
      capture->invalid = true;
      forbidden = true;
    }
  }
  return forbidden;
}

bool Engine::implicit_capture(const CUstream_st& stream) const {
  if (!stream.legacy) return false;
  for (const auto& capture : captures) {
    for (const auto& [captured, clock] : capture->streams) {
      if (captured->device == stream.device && (captured->flags & cudaStreamNonBlocking) == 0) {
        return true;
      }
    }
  }
  return false;
}

void Engine::end_capture(const std::shared_ptr<Capture>& capture) {
  const std::shared_ptr<Capture> kept = capture;
  captures.erase(kept);
  for (CUevent_st* event : events) {
    if (event->capture == kept) event->capture = nullptr;
  }
}

// ---- For tests -----------------------------------------------------------------------------------------

namespace {

std::string type_name(const std::type_info& type) {
  int status = 0;
  char* text = abi::__cxa_demangle(type.name(), nullptr, nullptr, &status);
  const std::string result = status == 0 ? text : type.name();
  std::free(text);
  return result;
}

constexpr size_t kMostArguments = 4096, kMostLargeArguments = 32764;  // bytes

// Some blocks of a grid run at a time, a phase of one and then a phase of another. Sanitizers take stacks that they
// do not know for errors: with them a block runs to its end.
Fibres* blocks_at_a_time = nullptr;

void run_grid(int64_t blocks, const std::function<void(int64_t, int64_t)>& block) {
  const bool reverse = Engine::get().config.reverse_blocks;
  const auto run = [&](int64_t i) { block(reverse ? blocks - 1 - i : i, blocks); };
#ifdef GA_SANITIZED
  for (int64_t i = 0; i < blocks; ++i) run(i);
#else
  if (blocks == 1) return run(0);
  constexpr unsigned kTogether = 4;
  static auto* const fibres = new Fibres(kTogether, size_t{1} << 20);
  bool ended[kTogether];
  int64_t index[kTogether];
  const std::function<void()> body = [&] {
    const unsigned f = fibres->current();
    run(index[f]);
    ended[f] = true;
  };
  int64_t begun = 0;
  std::vector<unsigned> running;
  for (unsigned f = 0; f < kTogether; ++f) running.push_back(f);
  std::fill_n(ended, kTogether, true);
  blocks_at_a_time = fibres;
  while (!running.empty()) {
    const size_t r = draw() % running.size();
    const unsigned f = running[r];
    if (ended[f] && begun == blocks) {
      running.erase(running.begin() + static_cast<ptrdiff_t>(r));
      continue;
    }
    if (ended[f]) {
      index[f] = begun++;
      ended[f] = false;
    }
    fibres->run(f, body);
  }
  blocks_at_a_time = nullptr;
#endif
}

cudaError_t queue_grid(const std::type_info& kernel, const void* arguments, size_t bytes,
                       int64_t blocks, std::function<void()> grid, cudaStream_t handle) {
  return call([&](Engine& engine) {
    std::shared_ptr<CUstream_st> stream;
    if (blocks <= 0 || blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
    const bool large = engine.config.driver_version >= 12010 && engine.config.major >= 7;
    if (bytes > (large ? kMostLargeArguments : kMostArguments)) return cudaErrorInvalidValue;
    const cudaError_t error = prepare(engine, handle, true, &stream);
    if (error != cudaSuccess) return error;
    if (thread_state().context->kernels.count(kernel.name()) == 0) {
      if (engine.unsafe_call()) return cudaErrorStreamCaptureUnsupported;
      thread_state().context->kernels.insert(kernel.name());
      ++engine.counters.late_loads;
      engine.run_device(stream->device);
    }
    ++engine.counters.launches;
    ++engine.counters.by_kernel[type_name(kernel)];
    if (arguments && ptx::is_wanted())
      grid = ptx::compared(kernel, arguments, bytes, blocks, std::move(grid), stream->device);
    return engine.enqueue(stream, {Kind::kKernel, stream->device, std::move(grid)});
  });
}

std::lock_guard<std::recursive_mutex> lock() {
  return std::lock_guard<std::recursive_mutex>(Engine::get().mutex);
}

}  // namespace

cudaError_t launch(const std::type_info& kernel, const void* arguments, size_t bytes,
                   int64_t blocks, std::function<void(int64_t, int64_t)> block,
                   cudaStream_t handle) {
  return queue_grid(
      kernel, arguments, bytes, blocks,
      [blocks, block = std::move(block)] { run_grid(blocks, block); }, handle);
}

cudaError_t launch_grid(const std::type_info& kernel, size_t bytes, int64_t blocks,
                        std::function<void()> grid, cudaStream_t handle) {
  return queue_grid(kernel, nullptr, bytes, blocks, std::move(grid), handle);
}

uint64_t draw() {
  static uint64_t state = static_cast<uint64_t>(number("GA_SIM_SEED", 1));
  // As in Blackman and Vigna's SplitMix64.
  uint64_t x = state += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

void end_phase() {
  if (blocks_at_a_time) blocks_at_a_time->pause();
}

cudaError_t load(const std::type_info& kernel) {
  return call([&](Engine& engine) {
    need_context();
    if (thread_state().context->kernels.count(kernel.name()) != 0) return cudaSuccess;
    if (engine.unsafe_call()) return cudaErrorStreamCaptureUnsupported;
    thread_state().context->kernels.insert(kernel.name());
    return cudaSuccess;
  });
}

cudaError_t library_call(const char* name, std::function<void()> work, cudaStream_t handle) {
  return call([&](Engine& engine) {
    std::shared_ptr<CUstream_st> stream;
    const cudaError_t error = prepare(engine, handle, true, &stream);
    if (error != cudaSuccess) return error;
    ++engine.counters.library_calls;
    ++engine.counters.by_library[name];
    return engine.enqueue(stream, {Kind::kLibrary, stream->device, std::move(work)});
  });
}

Config config() {
  const auto guard = lock();
  return Engine::get().config;
}

void configure(const Config& config) {
  const auto guard = lock();
  if (config.devices < 0 || config.devices > kMaxDevices) die("so many devices are not simulated");
  Engine::get().config = config;
  Engine::get().close_all();
}

void fail_allocation(int64_t n) {
  const auto guard = lock();
  Engine::get().fail_allocation = n;
}

void fail_call(int64_t n, cudaError_t error) {
  const auto guard = lock();
  Engine::get().fail_call = n;
  Engine::get().fail_call_error = error;
}

void fail_execution(int64_t n) {
  const auto guard = lock();
  Engine::get().fail_execution = n;
}

int64_t Counters::launches_of(std::string_view part) const {
  int64_t count = 0;
  for (const auto& [name, launched] : by_kernel) {
    if (name.find(part) != std::string::npos) count += launched;
  }
  return count;
}

Counters counters() {
  const auto guard = lock();
  return Engine::get().counters;
}

void reset_counters() {
  const auto guard = lock();
  Counters fresh;
  fresh.device_bytes = fresh.device_bytes_peak = Engine::get().counters.device_bytes;
  fresh.pinned_bytes = Engine::get().counters.pinned_bytes;
  Engine::get().counters = fresh;
}

void finish() {
  const auto guard = lock();
  Engine::get().run_everything();
}

int64_t queued() {
  const auto guard = lock();
  int64_t count = 0;
  for (const auto& stream : Engine::get().streams) {
    count += static_cast<int64_t>(stream->items.size());
  }
  return count;
}

void reset() {
  const auto guard = lock();
  Engine& engine = Engine::get();
  engine.fail_allocation = engine.fail_call = engine.fail_execution = engine.fail_switch = 0;
  engine.run_everything();
  while (!engine.captures.empty()) engine.end_capture(*engine.captures.begin());
  for (CUevent_st* event : engine.events) delete event;
  engine.events.clear();
  engine.streams.clear();
  for (Device& device : engine.devices) {
    device.fault = cudaSuccess;
    device.primary.exists = false;
    device.primary.kernels.clear();
    device.per_thread.clear();
    engine.streams.push_back(device.legacy);
  }
  engine.release_everything();
  engine.contexts.clear();
  thread_state() = ThreadState{};
  configure(initial_config());
  reset_counters();
}

CUcontext make_context(int device) {
  const auto guard = lock();
  auto& contexts = Engine::get().contexts;
  contexts.push_back(std::make_unique<CUctx_st>());
  contexts.back()->device = device;
  contexts.back()->exists = true;
  return contexts.back().get();
}

bool has_primary_context(int device) {
  const auto guard = lock();
  return Engine::get().devices[device].primary.exists;
}

CUcontext current_context() { return thread_state().context; }

void set_current_context(CUcontext context) { thread_state().context = context; }

void fail_switch(int64_t n) {
  const auto guard = lock();
  Engine::get().fail_switch = n;
}

namespace {

void copy_now(void* to, const void* from, size_t size) {
  const auto guard = lock();
  Engine::get().open_only(kEveryDevice);
  if (size > 0) std::memcpy(to, from, size);
  Engine::get().close_all();
}

}  // namespace

void peek(void* to, const void* device, size_t size) { copy_now(to, device, size); }
void poke(void* device, const void* from, size_t size) { copy_now(device, from, size); }

}  // namespace ga::sim
