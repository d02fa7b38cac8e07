// SPDX-License-Identifier: Apache-2.0
// Linux, by glibc or musl, and macOS.
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <system_error>
#include <thread>

#include "core/os/system.hpp"

#if defined(__linux__)
#include <link.h>
#include <sched.h>

#include <fstream>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace ga::os {

// ---- Memory -------------------------------------------------------------------------------------

namespace {

// munmap() takes whole pages only: of 4 KiB on x86-64, and of 4, 16 or 64 KiB on AArch64.
size_t whole_pages(size_t bytes) {
  static const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

}  // namespace

void* allocate_aligned(size_t bytes, size_t alignment) {
  void* data = nullptr;
  if (posix_memalign(&data, alignment, std::max<size_t>(bytes, 1)) != 0) throw std::bad_alloc();
  return data;
}

void free_aligned(void* data) noexcept { std::free(data); }

void* map_pages(size_t bytes) {
  if (bytes > SIZE_MAX / 2) throw std::bad_alloc();
  const size_t length = whole_pages(bytes);
  void* const mapped =
      mmap(nullptr, length + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(mapped) % kHugePage) % kHugePage;
  char* const data = static_cast<char*>(mapped) + before;
  if (before > 0) munmap(mapped, before);
  munmap(data + length, kHugePage - before);
#ifdef MADV_HUGEPAGE
  madvise(data, length, MADV_HUGEPAGE);
#endif
  return data;
}

void unmap_pages(void* data, size_t bytes) noexcept { munmap(data, whole_pages(bytes)); }

// ---- Processors ---------------------------------------------------------------------------------

#if defined(__linux__)

namespace {

// f(level, bytes) for each cache of the first processor that the kernel tells of. sysconf() tells of AMD's processors
// how much all caches of a package have together, which no processor sees; musl's tells of none.
template <class F>
void each_cache(F&& f) {
  for (int index = 0; index < 8; ++index) {
    const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index);
    std::ifstream of_level(folder + "/level"), of_size(folder + "/size");
    int level = 0;
    int64_t size = 0;
    char unit = 0;
    if (of_level >> level && of_size >> size >> unit)
      f(level, size << (unit == 'M' ? 20 : unit == 'K' ? 10 : 0));
  }
}

#ifdef _SC_LEVEL2_CACHE_SIZE
int64_t told(int name) { return std::max<int64_t>(0, sysconf(name)); }
#endif

}  // namespace

int64_t second_level_cache() {
  int64_t size = 0;
  each_cache([&](int level, int64_t bytes) {
    if (level == 2) size = bytes;
  });
#ifdef _SC_LEVEL2_CACHE_SIZE
  if (size == 0) size = told(_SC_LEVEL2_CACHE_SIZE);
#endif
  return size;
}

int64_t last_level_cache() {
  int64_t size = 0;
  each_cache([&](int, int64_t bytes) { size = std::max(size, bytes); });
#ifdef _SC_LEVEL2_CACHE_SIZE
  for (const int name : {_SC_LEVEL4_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE, _SC_LEVEL2_CACHE_SIZE})
    if (size == 0) size = told(name);
#endif
  return size;
}

int usable_processors() {
  cpu_set_t few;  // 1024 of them
  if (sched_getaffinity(0, sizeof few, &few) == 0) return CPU_COUNT(&few);
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

#else

namespace {

int64_t told(const char* name) {
  int64_t value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 ? value : 0;
}

}  // namespace

// hw.perflevel0 is of the fast cores.
int64_t second_level_cache() {
  const int64_t fast = told("hw.perflevel0.l2cachesize");
  return fast > 0 ? fast : told("hw.l2cachesize");
}

int64_t last_level_cache() { return std::max(told("hw.l3cachesize"), second_level_cache()); }

int usable_processors() {
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

#endif

// ---- Libraries ----------------------------------------------------------------------------------

namespace {

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "" : path.substr(0, slash + 1);
}

}  // namespace

std::string own_folder() {
  Dl_info info;
  std::string path;
#ifdef __GLIBC__  // dladdr() names a program as it was called
  void* map = nullptr;
  if (dladdr1(reinterpret_cast<void*>(&own_folder), &info, &map, RTLD_DL_LINKMAP) != 0)
    path = static_cast<link_map*>(map)->l_name;
#else
  if (dladdr(reinterpret_cast<void*>(&own_folder), &info) != 0 && info.dli_fname)
    path = info.dli_fname;
#endif
#ifdef __linux__
  if (path.find('/') == std::string::npos) {  // the program itself
    char program[4096];
    const ssize_t length = readlink("/proc/self/exe", program, sizeof program);
    if (length > 0 && length < static_cast<ssize_t>(sizeof program))
      path.assign(program, static_cast<size_t>(length));
  }
#endif
  return folder_of(path);
}

std::string library_file(const char* name) { return std::string("lib") + name + ".so"; }

bool file_exists(const char* path) { return access(path, F_OK) == 0; }

void* open_library(const char* path) { return dlopen(path, RTLD_NOW | RTLD_LOCAL); }

void* find_symbol(void* library, const char* name) { return dlsym(library, name); }

const char* library_error() { return dlerror(); }

// ---- Threads ------------------------------------------------------------------------------------

bool start_thread(void (*run)(void*), void* data) {
  // A thread begins with the mask of the one that starts it. Signals of its own faults stay, for whoever reports them.
  sigset_t hidden, before;
  sigfillset(&hidden);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT})
    sigdelset(&hidden, fault);
  pthread_sigmask(SIG_SETMASK, &hidden, &before);
  bool started = true;
  try {
    std::thread(run, data).detach();
  } catch (const std::system_error&) {
    started = false;
  } catch (const std::bad_alloc&) {
    started = false;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

// ---- The process --------------------------------------------------------------------------------

int64_t process_id() { return getpid(); }

const char* trusted_variable(const char* name) {
#ifdef __linux__
  return secure_getenv(name);
#else
  return issetugid() ? nullptr : std::getenv(name);
#endif
}

void at_fork(void (*in_child)()) {
  if (pthread_atfork(nullptr, nullptr, in_child) != 0) throw std::bad_alloc();
}

}  // namespace ga::os
