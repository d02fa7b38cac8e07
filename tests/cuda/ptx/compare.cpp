// SPDX-License-Identifier: Apache-2.0
#include "compare.hpp"

#include <cxxabi.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <mutex>
#include <sstream>

#include "engine.hpp"
#include "ptx.hpp"

namespace ga::ptx {
namespace {

std::string demangled(const std::string& name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  std::string result = status == 0 ? text : name;
  std::free(text);
  return result;
}

[[noreturn]] void die(const std::string& what) {
  std::fprintf(stderr, "ptx: %s\n", what.c_str());
  std::fflush(stderr);
  _exit(66);
}

std::vector<std::string> list(const char* text, char separator) {
  std::vector<std::string> parts;
  std::stringstream stream(text ? text : "");
  for (std::string part; std::getline(stream, part, separator);)
    if (!part.empty()) parts.push_back(part);
  return parts;
}

// The kernels of all files, by the types of their arguments.
class Kernels {
 public:
  Kernels() {
    std::map<std::string, std::string> changes;
    for (const std::string& change : list(std::getenv("GA_SIM_PTX_CHANGE"), ',')) {
      const size_t at = change.find('=');
      if (at == change.npos) die("GA_SIM_PTX_CHANGE is not a list of instructions");
      changes[change.substr(0, at)] = change.substr(at + 1);
    }
    const std::filesystem::path folder = std::getenv("GA_SIM_PTX");
    std::error_code error;
    for (const auto& found : std::filesystem::directory_iterator(folder, error)) {
      if (found.path().extension() != ".ptx") continue;
      std::ifstream file(found.path());
      std::stringstream text;
      text << file.rdbuf();
      modules_.push_back(std::make_unique<Module>(text.str(), changes));
      for (const std::string& entry : modules_.back()->entries()) {
        const auto [at, is_new] =
            entries_.emplace(demangled(entry), Entry{modules_.back().get(), entry, {}});
        if (!is_new && at->first.find("ga::cuda::") != std::string::npos)
          die("two files have the kernel " + at->first);
      }
    }
    if (modules_.empty()) die("there are no PTX files in " + folder.string());
  }

  static Kernels& get() {
    static Kernels kernels;
    return kernels;
  }

  const Kernel& find(const std::type_info& type) {
    const std::string argument = demangled(type.name());
    const std::string name =
        "void ga::cuda::run<" + argument + (argument.back() == '>' ? " >(" : ">(") + argument + ")";
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = entries_.find(name);
    if (found == entries_.end()) die("the PTX has no kernel " + name);
    Entry& entry = found->second;
    if (!entry.kernel) {
      try {
        entry.kernel = entry.module->kernel(entry.name);
      } catch (const Error& error) {
        die(error.what());
      }
      entry.kernel->name = argument;
    }
    return *entry.kernel;
  }

 private:
  struct Entry {
    const Module* module;
    std::string name;
    std::unique_ptr<Kernel> kernel;
  };
  std::mutex mutex_;
  std::vector<std::unique_ptr<Module>> modules_;
  std::map<std::string, Entry> entries_;
};

template <class T>
T read(const char* p) {
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// Whether two numbers are NaN. Any NaN is another one's equal.
template <class T>
bool are_nan(T a, T b, T infinity) {
  constexpr T kMost = std::numeric_limits<T>::max() >> 1;
  return (a & kMost) > infinity && (b & kMost) > infinity;
}
bool are_nan_of(size_t size, const char* a, const char* b) {
  const auto are = [&]<class T>(T infinity) { return are_nan(read<T>(a), read<T>(b), infinity); };
  return size == 8   ? are(uint64_t{0x7ff} << 52)
         : size == 4 ? are(uint32_t{0x7f800000})
         : size == 2 ? are(uint16_t{0x7c00}) || are(uint16_t{0x7f80})
                     : false;
}

// A copy of the memory of a device, and of what CUDA knows of the host's.
class Memory {
 public:
  void copy(const std::vector<sim::Allocation>& allocations) {
    allocations_ = allocations;
    if (copies_.size() < allocations_.size()) copies_.resize(allocations_.size());
    for (size_t k = 0; k < allocations_.size(); ++k)
      copies_[k].assign(allocations_[k].begin, allocations_[k].begin + allocations_[k].size);
  }

  void restore() const {
    for (size_t k = 0; k < allocations_.size(); ++k)
      std::memcpy(allocations_[k].begin, copies_[k].data(), copies_[k].size());
  }

  // Where the memory holds something else now, if anywhere.
  std::string difference() const {
    for (size_t k = 0; k < allocations_.size(); ++k) {
      const char* now = allocations_[k].begin;
      const std::vector<char>& then = copies_[k];
      if (std::memcmp(now, then.data(), then.size()) == 0) continue;
      for (size_t at = 0; at < then.size(); ++at) {
        if (now[at] == then[at]) continue;
        bool nan = false;
        for (const size_t size : {4, 8, 2}) {
          const size_t begin = at / size * size;
          nan = begin + size <= then.size() && are_nan_of(size, now + begin, then.data() + begin);
          if (!nan) continue;
          at = begin + size - 1;
          break;
        }
        if (nan) continue;
        const size_t begin = std::min(at / 4 * 4, then.size() - std::min<size_t>(4, then.size()));
        char text[200];
        std::snprintf(text, sizeof text, "byte %zu of %zu: %08x and %08x", at, then.size(),
                      then.size() < 4 ? then[at] & 0xffu : read<uint32_t>(then.data() + begin),
                      then.size() < 4 ? now[at] & 0xffu : read<uint32_t>(now + begin));
        return text;
      }
    }
    return "";
  }

 private:
  std::vector<sim::Allocation> allocations_;
  std::vector<std::vector<char>> copies_;  // kept for the next launch
};

// Memory of the host, as far as the interpreter has written to it.
class HostMemory {
 public:
  std::vector<Store> stores;

  // Keeps the stores to memory of the host alone, and what they have left.
  void keep() {
    const auto is_other = [](const Store& s) {
      const sim::Allocation* a = sim::Engine::get().find(s.at);
      return a && a->memory == sim::Memory::kDevice;
    };
    stores.erase(std::remove_if(stores.begin(), stores.end(), is_other), stores.end());
    after_.clear();
    for (const Store& s : stores) {
      after_.push_back(0);
      std::memcpy(&after_.back(), s.at, s.size);
    }
  }

  void restore() const {
    for (auto s = stores.rbegin(); s != stores.rend(); ++s) std::memcpy(s->at, &s->before, s->size);
  }

  std::string difference() const {
    for (size_t k = 0; k < stores.size(); ++k) {
      const Store& s = stores[k];
      uint64_t now = 0;
      std::memcpy(&now, s.at, s.size);
      const auto* then = reinterpret_cast<const char*>(&after_[k]);
      if (now == after_[k] || are_nan_of(s.size, s.at, then)) continue;
      char text[200];
      std::snprintf(text, sizeof text, "memory of the host: %0*llx and %0*llx",
                    static_cast<int>(2 * s.size), static_cast<unsigned long long>(after_[k]),
                    static_cast<int>(2 * s.size), static_cast<unsigned long long>(now));
      return text;
    }
    return "";
  }

 private:
  std::vector<uint64_t> after_;
};

void interpret(const Kernel& kernel, const std::vector<char>& bytes, unsigned blocks,
               std::vector<Store>* journal) {
  static std::mutex mutex;  // arguments() are one thread's
  const std::lock_guard<std::mutex> lock(mutex);
  std::memcpy(arguments(), bytes.data(), bytes.size());
  set_journal(journal);
  try {
    run(kernel, blocks);
  } catch (const Error& error) {
    die(error.what());
  }
  set_journal(nullptr);
}

// Runs a grid both ways. The engine is locked.
void compare(const Kernel& kernel, const std::vector<char>& bytes, unsigned blocks,
             const std::function<void()>& simulated, int device) {
  static Memory before, after;
  static HostMemory host;
  // Where the device reads memory of malloc, which no list has, threads of the host may write to theirs meanwhile,
  // as in the tests of ranks. Otherwise pinned memory is compared as a whole.
  const bool by_stores = sim::Engine::get().config.pageable_access;
  auto allocations = sim::Engine::get().accessible(device);
  if (by_stores) {
    const auto is_host = [](const sim::Allocation& a) { return a.memory != sim::Memory::kDevice; };
    allocations.erase(std::remove_if(allocations.begin(), allocations.end(), is_host),
                      allocations.end());
  }
  host.stores.clear();
  before.copy(allocations);
  interpret(kernel, bytes, blocks, by_stores ? &host.stores : nullptr);
  after.copy(allocations);
  host.keep();
  before.restore();
  host.restore();
  simulated();
  std::string difference = after.difference();
  if (difference.empty()) difference = host.difference();
  if (!difference.empty()) die(kernel.name + ": the PTX and the simulation differ: " + difference);
  if (const char* log = std::getenv("GA_SIM_PTX_LOG"))
    std::ofstream(log, std::ios::app) << kernel.name << '\n';
}

}  // namespace

bool is_wanted() {
  static const bool is = std::getenv("GA_SIM_PTX") != nullptr;
  return is;
}

std::function<void()> compared(const std::type_info& type, const void* arguments, size_t bytes,
                               int64_t blocks, std::function<void()> simulated, int device) {
  const Kernel* kernel = &Kernels::get().find(type);
  if (kernel->argument_bytes != bytes) die(kernel->name + " has arguments of another size");
  const char* begin = static_cast<const char*>(arguments);
  return [=, copy = std::vector<char>(begin, begin + bytes), simulated = std::move(simulated)] {
    compare(*kernel, copy, static_cast<unsigned>(blocks), simulated, device);
  };
}

}  // namespace ga::ptx
