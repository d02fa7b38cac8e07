// SPDX-License-Identifier: Apache-2.0
//
// Rounds, medians, the load of others, and the report.
#ifndef GRADACCUM_TESTS_BENCH_HARNESS_HPP_
#define GRADACCUM_TESTS_BENCH_HARNESS_HPP_

#include <stdarg.h>
#include <stdio.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace bench {

// ---- Rounds -------------------------------------------------------------------------------------

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A participant of a race. Each turn calls prepare, which is not timed, and run, which is, `times`
// times.
struct Side {
  std::function<void()> run;
  std::function<void()> prepare;
};

using Times = std::vector<double>;  // seconds per call, one value for each round

// All sides take turns in each round, and another one is first each time. One round more, at the
// start, is not counted.
inline std::vector<Times> race(int rounds, int times, const std::vector<Side>& sides) {
  std::vector<Times> result(sides.size());
  for (int round = -1; round < rounds; ++round) {
    for (size_t k = 0; k < sides.size(); ++k) {
      const size_t side = (k + static_cast<size_t>(round + 1)) % sides.size();
      double total = 0;
      // Without prepare, the clock is read only twice per round.
      if (!sides[side].prepare) {
        const double start = now();
        for (int time = 0; time < times; ++time) sides[side].run();
        total = now() - start;
      } else {
        for (int time = 0; time < times; ++time) {
          sides[side].prepare();
          const double start = now();
          sides[side].run();
          total += now() - start;
        }
      }
      if (round >= 0) result[side].push_back(total / times);
    }
  }
  return result;
}

inline double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  const double at = q * static_cast<double>(values.size() - 1);
  const size_t low = static_cast<size_t>(at);
  const size_t high = std::min(low + 1, values.size() - 1);
  return values[low] + (at - static_cast<double>(low)) * (values[high] - values[low]);
}

inline double median(const std::vector<double>& values) { return quantile(values, 0.5); }

// Applies combine(a, b) to each round.
template <class Combine>
Times by_round(const Times& a, const Times& b, Combine combine) {
  Times result;
  for (size_t k = 0; k < a.size(); ++k) result.push_back(combine(a[k], b[k]));
  return result;
}

inline Times operator/(const Times& a, const Times& b) {
  return by_round(a, b, [](double x, double y) { return x / y; });
}
inline Times operator+(const Times& a, const Times& b) {
  return by_round(a, b, [](double x, double y) { return x + y; });
}
inline Times operator-(const Times& a, const Times& b) {
  return by_round(a, b, [](double x, double y) { return x - y; });
}
inline Times operator*(double factor, const Times& a) {
  return by_round(a, a, [factor](double x, double) { return factor * x; });
}

// ---- Load of other processes --------------------------------------------------------------------

struct Ticks {
  double all = 0, busy = 0, steal = 0, own = 0;
};

// Times since boot, in processor seconds; `own` is the time of this process and its children.
inline Ticks ticks() {
  Ticks result;
  if (FILE* file = fopen("/proc/stat", "r")) {
    long long user = 0, nice = 0, system = 0, idle = 0, wait = 0, irq = 0, soft = 0, steal = 0;
    if (fscanf(file, "cpu %lld %lld %lld %lld %lld %lld %lld %lld", &user, &nice, &system, &idle,
               &wait, &irq, &soft, &steal) == 8) {
      const double hertz = static_cast<double>(sysconf(_SC_CLK_TCK));
      result.busy = static_cast<double>(user + nice + system + irq + soft) / hertz;
      result.steal = static_cast<double>(steal) / hertz;
      result.all = result.busy + result.steal + static_cast<double>(idle + wait) / hertz;
    }
    fclose(file);
  }
  for (int who : {RUSAGE_SELF, RUSAGE_CHILDREN}) {
    rusage usage;
    getrusage(who, &usage);
    for (const timeval& time : {usage.ru_utime, usage.ru_stime}) {
      result.own += static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
    }
  }
  return result;
}

// The percentages of the machine's time that other processes used and the hypervisor took since
// `start`.
struct Load {
  double others = 0, steal = 0;
};

inline Load load_since(const Ticks& start) {
  const Ticks end = ticks();
  const double all = end.all - start.all;
  if (all <= 0) return {};
  return {100 * std::max(0.0, end.busy - start.busy - (end.own - start.own)) / all,
          100 * (end.steal - start.steal) / all};
}

// ---- Report -------------------------------------------------------------------------------------

enum class Sense { kAtLeast, kAtMost, kNone };

inline std::string format(const char* text, ...) __attribute__((format(printf, 1, 2)));
inline std::string format(const char* text, ...) {
  char line[512];
  va_list arguments;
  va_start(arguments, text);
  vsnprintf(line, sizeof line, text, arguments);
  va_end(arguments);
  return line;
}

class Report {
 public:
  void figure(const std::string& id, const Times& ratios, Sense sense, double target,
              const std::string& text) {
    // The figures of one race are reported together and share its load.
    if (ticks().all - mark_.all > 0.1) {
      load_ = load_since(mark_);
      mark_ = ticks();
    }
    const double ratio = median(ratios);
    const bool met = sense == Sense::kAtLeast ? ratio >= target : ratio <= target;
    if (sense != Sense::kNone && !met) ++missed_;
    const char* sign = sense == Sense::kAtLeast ? ">=" : "<=";
    std::string goal = "          ";
    if (sense != Sense::kNone) goal = format("%s %-7.4g", sign, target);
    printf("%-30s %9.3f  %s %-6s  %s [%.3f-%.3f], others %.0f %%, steal %.0f %%\n", id.c_str(),
           ratio, goal.c_str(),
           sense == Sense::kNone ? ""
           : met                 ? "met"
                                 : "missed",
           text.c_str(), quantile(ratios, 0.25), quantile(ratios, 0.75), load_.others, load_.steal);
    fflush(stdout);
    std::string entry = format("\"%s\": {\"ratio\": %.6g, ", id.c_str(), ratio);
    if (sense != Sense::kNone) {
      entry += format("\"target\": %.6g, \"sense\": \"%s\", \"met\": %s, ", target, sign,
                      met ? "true" : "false");
    }
    entry += format(
        "\"quartiles\": [%.6g, %.6g], \"rounds\": %d, \"others_percent\": %.1f, "
        "\"steal_percent\": %.1f, \"text\": \"%s\"}",
        quantile(ratios, 0.25), quantile(ratios, 0.75), static_cast<int>(ratios.size()),
        load_.others, load_.steal, text.c_str());
    entries_.push_back(entry);
  }

  int missed() const { return missed_; }

  void heading(const std::string& text) {
    printf("\n%s\n", text.c_str());
    mark_ = ticks();
  }

  void yardstick(const std::string& name, double gigabytes_per_second) {
    printf("  %-28s %8.1f GB/s\n", name.c_str(), gigabytes_per_second);
    entries_.push_back(format("\"yardstick_%s\": {\"gigabytes_per_second\": %.4g}", name.c_str(),
                              gigabytes_per_second));
  }

  void write(const std::string& path, const std::string& machine) const {
    FILE* file = fopen(path.c_str(), "w");
    if (!file) throw std::runtime_error("cannot write " + path);
    fprintf(file, "{\n\"machine\": {\"text\": \"%s\"}", machine.c_str());
    for (const std::string& entry : entries_) fprintf(file, ",\n%s", entry.c_str());
    fprintf(file, "\n}\n");
    if (fclose(file) != 0) throw std::runtime_error("cannot write " + path);
  }

 private:
  Ticks mark_ = ticks();
  Load load_;
  int missed_ = 0;
  std::vector<std::string> entries_;
};

}  // namespace bench

#endif  // GRADACCUM_TESTS_BENCH_HARNESS_HPP_
