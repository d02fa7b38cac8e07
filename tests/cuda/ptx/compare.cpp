// SPDX-License-Identifier: Apache-2.0
#include "compare.hpp"

#include <cxxabi.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
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
        const auto [at, is_new] = entries_.emplace(demangled(entry), Entry{modules_.back().get(), entry, {}});
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
    return find("void ga::cuda::run<" + argument + (argument.back() == '>' ? " >(" : ">(") + argument + ")", argument);
  }

  const Kernel& find(const std::string& name, const std::string& shown) {
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
      entry.kernel->name = shown;
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

// The memory of a device and that of the host which CUDA knows.
class Memory {
 public:
  explicit Memory(int device) : allocations_(sim::Engine::get().accessible(device)) {
    for (const sim::Allocation& a : allocations_) copies_.emplace_back(a.begin, a.begin + a.size);
  }

  void restore() const {
    for (size_t k = 0; k < allocations_.size(); ++k)
      std::memcpy(allocations_[k].begin, copies_[k].data(), copies_[k].size());
  }

  // Whether it is what the memory holds now; otherwise says where it is not.
  bool is_current(std::string& where) const {
    for (size_t k = 0; k < allocations_.size(); ++k) {
      const char* now = allocations_[k].begin;
      const std::vector<char>& then = copies_[k];
      if (std::memcmp(now, then.data(), then.size()) == 0) continue;
      for (size_t at = 0; at < then.size(); ++at) {
        if (now[at] == then[at]) continue;
        if (const size_t end = nan_around(now, then.data(), at, then.size())) {
          at = end - 1;
          continue;
        }
        char text[200];
        const size_t word = at / 8 * 8;
        std::snprintf(text, sizeof text, "byte %zu of %zu, of %016llx: %016llx", at, then.size(),
                      static_cast<unsigned long long>(read<uint64_t>(then.data(), word, then.size())),
                      static_cast<unsigned long long>(read<uint64_t>(now, word, then.size())));
        where = text;
        return false;
      }
    }
    return true;
  }

 private:
  template <class T>
  static T read(const char* p, size_t at, size_t size) {
    T x = 0;
    std::memcpy(&x, p + at, std::min(sizeof x, size - at));
    return x;
  }

  // Any NaN is another one's equal: where the number ends that has this byte, if both are NaN, or 0.
  static size_t nan_around(const char* a, const char* b, size_t at, size_t size) {
    const auto both = [&]<class T>(T infinity) -> size_t {
      const size_t begin = at / sizeof(T) * sizeof(T);
      if (begin + sizeof(T) > size) return 0;
      const auto is_nan = [&](const char* p) {
        const T most = static_cast<T>(~T{0}) >> 1;
        return static_cast<T>(read<T>(p, begin, size) & most) > infinity;
      };
      return is_nan(a) && is_nan(b) ? begin + sizeof(T) : 0;
    };
    size_t end = both(uint32_t{0x7f800000});
    if (end == 0) end = both(uint64_t{0x7ff} << 52);
    if (end == 0) end = both(uint16_t{0x7c00});
    if (end == 0) end = both(uint16_t{0x7f80});
    return end;
  }

  std::vector<sim::Allocation> allocations_;
  std::vector<std::vector<char>> copies_;
};

void interpret(const Kernel& kernel, const std::vector<char>& bytes, unsigned blocks, int approximation) {
  static std::mutex mutex;  // arguments() are one thread's
  const std::lock_guard<std::mutex> lock(mutex);
  std::memcpy(arguments(), bytes.data(), bytes.size());
  set_approximation(approximation);
  try {
    run(kernel, blocks);
  } catch (const Error& error) {
    die(error.what());
  }
}

}  // namespace

bool is_wanted() {
  static const bool is = std::getenv("GA_SIM_PTX") != nullptr;
  return is;
}

std::function<void()> compared(const std::type_info& type, const void* arguments, size_t bytes, int64_t blocks,
                               std::function<void()> simulated, int device) {
  const Kernel* kernel = &Kernels::get().find(type);
  if (kernel->argument_bytes != bytes) die(kernel->name + " has arguments of another size");
  const char* begin = static_cast<const char*>(arguments);
  return [=, copy = std::vector<char>(begin, begin + bytes), simulated = std::move(simulated)] {
    if (sim::Engine::get().config.pageable_access) die("plain memory of the host is not compared");
    const Memory before(device);
    interpret(*kernel, copy, static_cast<unsigned>(blocks), 0);
    const Memory after(device);
    std::string where;
    for (int approximation : {-1, 1}) {
      if (!kernel->approximate) break;
      before.restore();
      interpret(*kernel, copy, static_cast<unsigned>(blocks), approximation);
      if (!after.is_current(where)) die(kernel->name + " depends on an approximation: " + where);
    }
    before.restore();
    simulated();
    if (!after.is_current(where)) die(kernel->name + ": the PTX and the simulation differ: " + where);
    if (const char* log = std::getenv("GA_SIM_PTX_LOG")) std::ofstream(log, std::ios::app) << kernel->name << '\n';
  };
}

double device_function(const char* name, double x, double y, int units) {
  double result = 0;
  const struct {
    double x, y;
    double* to;
  } arguments = {x, y, &result};
  const char* begin = reinterpret_cast<const char*>(&arguments);
  interpret(Kernels::get().find(name, name), std::vector<char>(begin, begin + sizeof arguments), 1, units);
  return result;
}

}  // namespace ga::ptx
