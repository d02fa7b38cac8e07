// SPDX-License-Identifier: Apache-2.0
//
// Measures the figures C1-C4 and C6-C10, each a ratio to a yardstick that ran in the same rounds.
// `run` in this folder builds and starts this program; C5 and PyTorch's side of C10 are in
// torch_window.py.
#include <errno.h>
#include <gradaccum/gradaccum.h>
#include <omp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "harness.hpp"
#include "program.hpp"
#include "yardsticks.hpp"
#ifdef GA_BENCH_ONEDNN
#include "stack.hpp"
#endif

// ---- These functions count every allocation of this process, the library's included --------------

static std::atomic<int64_t> allocations{0};

extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

void* malloc(size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_calloc(count, bytes);
}
void* realloc(void* block, size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_realloc(block, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_memalign(alignment, bytes);
}
int posix_memalign(void** block, size_t alignment, size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  *block = __libc_memalign(alignment, bytes);
  return *block ? 0 : ENOMEM;
}
void* mmap(void* address, size_t bytes, int protection, int flags, int file,
           off_t offset) noexcept {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return reinterpret_cast<void*>(
      syscall(SYS_mmap, address, bytes, protection, flags, file, offset));
}
}

namespace bench {
namespace {

// ---- Yardsticks, C1-C4: single passes -----------------------------------------------------------

void yardsticks(const Options& options, Report& report, const Place& place) {
  const int threads = options.threads;
  const int64_t n = place.layout.n;
  const Block block_a = make_block(n, 0, threads), block_b = make_block(n, 1, threads);
  const Block block_c = make_block(n, 2, threads), block_d = make_block(n, 3, threads);
  float *a = block_a.get(), *b = block_b.get(), *c = block_c.get(), *d = block_d.get();
  volatile float sink = 0;
  struct Row {
    const char* name;
    int passes;
    std::function<void()> run;
  };
  const std::vector<Row> rows = {
      {"mix_1_0", 1, [&] { sink = yard_mix_1_0(a, n, threads); }},
      {"mix_1_1", 2, [&] { yard_mix_1_1(a, n, threads); }},
      {"mix_2_1", 3, [&] { yard_mix_2_1(a, b, n, threads); }},
      {"mix_2_1_prefetching", 3, [&] { yard_mix_2_1_prefetch(a, b, n, threads); }},
      {"mix_4_3", 7, [&] { yard_mix_4_3(a, b, c, d, n, threads); }},
      {"mix_4_3_prefetching", 7, [&] { yard_mix_4_3_prefetch(a, b, c, d, n, threads); }},
      {"copy", 2, [&] { yard_copy(a, b, n, threads); }},
      {"copy_nontemporal", 2, [&] { yard_copy_nt(a, b, n, threads); }},
      {"add_nontemporal", 3, [&] { yard_add_nt(a, b, c, n, threads); }},
  };
  std::vector<Side> sides;
  for (const Row& row : rows) sides.push_back({row.run, {}});
  report.heading(format("Yardsticks %s, %.4g M elements a stream",
                        place.cached ? "inside L2" : "beyond the caches",
                        1e-6 * static_cast<double>(n)));
  const std::vector<Times> times = race(options.rounds(), place.times, sides);
  for (size_t k = 0; k < rows.size(); ++k) {
    report.yardstick(place.figure(rows[k].name), rate(rows[k].passes, place.layout, times[k]));
  }
}

void accumulate_figures(const Options& options, Report& report, const Place& place) {
  const int threads = options.threads;
  const int64_t n = place.layout.n;
  const Block p = make_block(n, 0, threads), g = make_block(n, 1, threads),
              a = make_block(n, 2, threads);
  const Pointers gradients = place.layout.pointers(g.get());
  Context context(place.layout, p.get(), {threads});
  const auto accumulate = [&] { context.accumulate(gradients); };

  // C1 and C2: a contribution to an open window, which includes the norm and the finite check.
  if (options.wants("C1") || options.wants("C2")) {
    accumulate();
    const std::vector<Times> t =
        race(options.rounds(), place.times,
             {{[&] { yard_mix_2_1(a.get(), g.get(), n, threads); }, {}},
              {accumulate, {}},
              {[&] { yard_accumulate(a.get(), g.get(), 1.0f, n, threads); }, {}}});
    report.figure(place.figure("C1_f32"), t[0] / t[1], Sense::kAtLeast, 0.95,
                  format("accumulate %.1f, mix(2,1) %.1f GB/s", rate(3, place.layout, t[1]),
                         rate(3, place.layout, t[0])));
    report.figure(
        place.figure("C2"), t[1] / t[2], Sense::kAtMost, 1.05,
        format("time of accumulate with norm and finite check / of a bare a += alpha g (%.1f GB/s)",
               rate(3, place.layout, t[2])));
  }

  // C4: the first contribution to a window. Inside the cache the yardstick is the same loop with
  // plain stores.
  if (options.wants("C4")) {
    const auto base = [&] {
      if (place.cached) {
        yard_overwrite(a.get(), g.get(), 1.0f, n, threads);
      } else {
        yard_copy_nt(a.get(), g.get(), n, threads);
      }
    };
    const std::vector<Times> t = race(options.rounds(), place.times,
                                      {{base, [] {}}, {accumulate, [&] { context.discard(); }}});
    report.figure(
        place.figure("C4"), t[0] / t[1], Sense::kAtLeast, place.cached ? 1.0 : 0.95,
        format("first micro-batch %.1f, %s %.1f GB/s", rate(2, place.layout, t[1]),
               place.cached ? "plain stores" : "non-temporal copy", rate(2, place.layout, t[0])));
  }
}

// C3: ga_step, AdamW with the clip factor. The norm comes from the accumulate before it, which is
// not timed.
void step_figure(const Options& options, Report& report, const Place& place) {
  const int threads = options.threads;
  const int64_t n = place.layout.n;
  const Block p = make_block(n, 0, threads), g = make_block(n, 1, threads);
  const Block a = make_block(n, 2, threads), b = make_block(n, 3, threads),
              c = make_block(n, 4, threads);
  const Pointers gradients = place.layout.pointers(g.get());
  Context context(place.layout, p.get(), {threads});
  const std::vector<Times> t =
      race(options.rounds(), place.times,
           {{[&] { yard_mix_4_3(a.get(), b.get(), c.get(), g.get(), n, threads); }, [] {}},
            {[&] { context.step(); }, [&] { context.accumulate(gradients); }}});
  report.figure(place.figure("C3_f32"), t[0] / t[1], Sense::kAtLeast, 0.95,
                format("AdamW step %.1f, mix(4,3) %.1f GB/s", rate(7, place.layout, t[1]),
                       rate(7, place.layout, t[0])));
}

// Accumulate and step with the program's tensors at every cache line of a page: a core may believe
// that a load depends on an earlier store to another array whose address has the same low 12 bits.
// The worst of the 64 offsets is reported without a target.
void offset_figures(const Options& options, Report& report) {
  const int threads = options.threads;
  const int64_t n = int64_t{16} << 20, line = 64 / sizeof(float);
  const Layout layout(std::vector<Shape>{Shape{n}});
  const Block tensor = make_block(n + 4096, 0, threads), other = make_block(n, 1, threads);
  const Block a = make_block(n, 2, threads), b = make_block(n, 3, threads),
              c = make_block(n, 4, threads);
  struct Worst {
    Times ratios = {1e9};
    int64_t at = 0;
    void take(const Times& candidate, int64_t offset) {
      if (median(candidate) < median(ratios)) ratios = candidate, at = offset;
    }
  } worst_gradient, worst_parameter;
  for (int64_t offset = 0; offset < 64; ++offset) {
    float* moved = tensor.get() + offset * line;
    const Pointers there = {moved}, elsewhere = {other.get()};
    Context adding(layout, other.get(), {threads}), updating(layout, moved, {threads});
    adding.accumulate(there);
    const std::vector<Times> t =
        race(7, 1,
             {{[&] { yard_mix_2_1(a.get(), b.get(), n, threads); }, {}},
              {[&] { adding.accumulate(there); }, {}},
              {[&] { yard_mix_4_3(a.get(), b.get(), c.get(), other.get(), n, threads); }, {}},
              {[&] { updating.step(); }, [&] { updating.accumulate(elsewhere); }}});
    worst_gradient.take(t[0] / t[1], offset);
    worst_parameter.take(t[2] / t[3], offset);
  }
  report.figure("C1_f32_worst_offset", worst_gradient.ratios, Sense::kNone, 0,
                format("as C1, gradient on cache line %d of its page",
                       static_cast<int>(worst_gradient.at) + 1));
  report.figure("C3_f32_worst_offset", worst_parameter.ratios, Sense::kNone, 0,
                format("as C3, parameter on cache line %d of its page",
                       static_cast<int>(worst_parameter.at) + 1));
}

// ---- C6: whole windows --------------------------------------------------------------------------

void window_figures(const Options& options, Report& report, const Place& place) {
  const int threads = options.threads;
  const int64_t n = place.layout.n;
  const Block p = make_block(n, 0, threads), g0 = make_block(n, 1, threads),
              g1 = make_block(n, 2, threads);
  const Block a = make_block(n, 3, threads), b = make_block(n, 4, threads),
              c = make_block(n, 5, threads);
  const Pointers gradients[2] = {place.layout.pointers(g0.get()), place.layout.pointers(g1.get())};
  Setting consuming, keeping;
  consuming.threads = keeping.threads = threads;
  keeping.life = GA_GRADIENTS_LIVE;
  Context consumed(place.layout, p.get(), consuming), live(place.layout, p.get(), keeping);
  const auto window = [&](Context& context, int micros) {
    return [&context, &gradients, micros] {
      for (int micro = 0; micro < micros; ++micro) context.accumulate(gradients[micro % 2]);
      context.step();
    };
  };

  volatile float sink = 0;
  const int counts[] = {1, 4, 8};
  std::vector<Side> sides = {
      {[&] { sink = yard_mix_1_0(g0.get(), n, threads); }, {}},
      {[&] { yard_mix_2_1(a.get(), g0.get(), n, threads); }, {}},
      {[&] { yard_mix_4_3(a.get(), b.get(), c.get(), g0.get(), n, threads); }, {}},
      {[&] {
         if (place.cached) {
           yard_copy(a.get(), g0.get(), n, threads);
         } else {
           yard_copy_nt(a.get(), g0.get(), n, threads);
         }
       },
       {}},
      {[&] {
         if (place.cached) {
           yard_mix_2_1(a.get(), g0.get(), n, threads);
         } else {
           yard_add_nt(a.get(), g0.get(), g1.get(), n, threads);
         }
       },
       {}}};
  for (int micros : counts) sides.push_back({window(consumed, micros), {}});
  for (int micros : counts) sides.push_back({window(live, micros), {}});
  const std::vector<Times> t = race(options.rounds(), place.times, sides);
  const Times &norm = t[0], &add = t[1], &step = t[2], &copy = t[3], &first_add = t[4];

  Times worst(norm.size(), 1e9);
  for (size_t k = 0; k < 6; ++k) {
    const bool is_live = k >= 3;
    const int micros = counts[k % 3];
    Times passes = step;
    if (!is_live) {
      passes = passes + copy + (micros - 1.0) * add;
    } else if (micros == 1) {
      passes = passes + norm;
    } else {
      passes = passes + first_add + (micros - 2.0) * add;
    }
    const int bytes = is_live ? (micros == 1 ? 32 : 16 + 12 * micros) : 24 + 12 * micros;
    const Times ratios = passes / t[5 + k];
    if (median(ratios) < median(worst)) worst = ratios;
    report.figure(
        place.figure(format("C6_f32_%s_n%d", is_live ? "live" : "consumed", micros).c_str()),
        ratios, Sense::kAtLeast, 0.92,
        format("%d bytes a parameter, %.1f GB/s, %.2f ms", bytes,
               rate(1, place.layout, t[5 + k]) * bytes / 4, 1e3 * median(t[5 + k])));
  }
  report.figure(place.figure("C6_f32"), worst, Sense::kAtLeast, 0.92,
                "sum of the passes / time, the worst of the six");
}

// ---- C7: the same bits --------------------------------------------------------------------------

// The parameters after windows of several micro-batches, and the norms of their steps.
struct Bits {
  std::vector<float> parameters;
  std::vector<double> norms;

  bool operator==(const Bits& other) const {
    return memcmp(parameters.data(), other.parameters.data(), parameters.size() * sizeof(float)) ==
               0 &&
           memcmp(norms.data(), other.norms.data(), norms.size() * sizeof(double)) == 0;
  }
};

Bits train(const Layout& layout, const Setting& setting) {
  const Block p = make_block(layout.n, 0, 1), g0 = make_block(layout.n, 1, 1),
              g1 = make_block(layout.n, 2, 1);
  const Pointers gradients[2] = {layout.pointers(g0.get()), layout.pointers(g1.get())};
  Context context(layout, p.get(), setting);
  Bits bits;
  for (int micros : {1, 2, 5}) {
    for (int micro = 0; micro < micros; ++micro)
      context.accumulate(gradients[micro % 2], 1.0 + 0.3 * micro);
    bits.norms.push_back(context.step());
  }
  bits.parameters.assign(p.get(), p.get() + layout.n);
  return bits;
}

void bits_figure(const Options&, Report& report) {
  const Layout layout({{1031, 257}, {3}, {}, {65536}, {65537}, {17, 15}, {300007}});
  double runs = 0, equal = 0;
  std::string levels, absent;
  for (int32_t optimizer : {GA_OPTIMIZER_SGD, GA_OPTIMIZER_ADAM, GA_OPTIMIZER_ADAMW}) {
    levels.clear(), absent.clear();
    setenv("GA_CPU_ISA", "scalar", 1);
    const Bits reference = train(layout, {1, GA_GRADIENTS_CONSUMED, optimizer});
    for (const char* level : {"scalar", "x86-64-v2", "x86-64-v3", "x86-64-v4"}) {
      setenv("GA_CPU_ISA", level, 1);
      ga_context* probe = nullptr;
      const ga_status status = ga_context_create(nullptr, &probe);
      ga_context_destroy(probe);
      if (status == GA_ERROR_UNSUPPORTED) {
        absent += std::string(" ") + level;
        continue;
      }
      check(status);
      levels += std::string(" ") + level;
      for (int threads = 1; threads <= 4; ++threads) {
        for (int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
          runs += 1;
          equal += train(layout, {threads, life, optimizer}) == reference;
        }
      }
    }
  }
  unsetenv("GA_CPU_ISA");
  report.figure("C7", {equal / runs}, Sense::kAtLeast, 1.0,
                format("%.0f of %.0f runs gave the bits of the first: threads 1-4, consumed and "
                       "live gradients, 3 optimizers,%s%s%s",
                       equal, runs, levels.c_str(),
                       absent.empty() ? "" : "; not on this machine:", absent.c_str()));
}

// ---- C8: overhead -------------------------------------------------------------------------------

// The microseconds that a window of one micro-batch takes beyond bare loops, on bare_threads, that
// do the same work on one block.
void overhead(const Options& options, Report& report, const char* id, const Layout& layout,
              int threads, int bare_threads, int times, double target) {
  const int64_t n = layout.n;
  const Block a = make_block(n, 0, threads), m = make_block(n, 1, threads),
              v = make_block(n, 2, threads);
  const Block q = make_block(n, 3, threads), g = make_block(n, 4, threads),
              p = make_block(n, 5, threads);
  std::fill(v.get(), v.get() + n, 1e-6f);
  const Pointers gradients = layout.pointers(g.get());
  Context context(layout, p.get(), {threads});
  const auto bare = [&] {
    const double norm = std::sqrt(yard_overwrite_norm(a.get(), g.get(), 1.0f, n, bare_threads));
    const float scale = static_cast<float>(std::min(1.0, 1e-3 / (norm + 1e-6)));
    yard_adamw(q.get(), m.get(), v.get(), a.get(), scale, n, bare_threads);
  };
  const auto window = [&] {
    context.accumulate(gradients);
    context.step();
  };
  const std::vector<Times> t = race(options.rounds(), times, {{bare, {}}, {window, {}}});
  report.figure(
      id, 1e6 * (t[1] - t[0]), Sense::kAtMost, target,
      format("us beyond the bare loops' %.2f us: %zu tensors, %lld elements, threads: %d",
             1e6 * median(t[0]), layout.shapes.size(), static_cast<long long>(n), threads));

  const int64_t before = allocations.load();
  for (int k = 0; k < 100; ++k) {
    window();
    for (int micro = 0; micro < 3; ++micro) context.accumulate(gradients);
    context.step();
  }
  const double per_step = static_cast<double>(allocations.load() - before) / 200;
  report.figure(std::string(id) + "_allocations", {per_step}, Sense::kAtMost, 0,
                "allocations a step, over 200 steps after warm-up");
}

// A process that keeps one processor busy and can be stopped and continued.
class Neighbour {
 public:
  Neighbour() {
    child_ = fork();
    if (child_ < 0) throw std::runtime_error("fork failed");
    if (child_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      cpu_set_t all, one;
      CPU_ZERO(&one);
      if (sched_getaffinity(0, sizeof all, &all) == 0) {
        for (int cpu = CPU_SETSIZE - 1; cpu >= 0; --cpu) {
          if (!CPU_ISSET(cpu, &all)) continue;
          CPU_SET(cpu, &one);
          break;
        }
        sched_setaffinity(0, sizeof one, &one);
      }
      for (volatile int k = 0;; k = k + 1) {
      }
    }
    stop();
  }
  ~Neighbour() {
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
  }
  void stop() {
    kill(child_, SIGSTOP);
    waitpid(child_, nullptr, WUNTRACED);
  }
  void go_on() { kill(child_, SIGCONT); }

 private:
  pid_t child_;
};

// Runs in a process of its own, which was started with the wait policy to be measured. Prints a
// ratio for each round.
int contended_rounds(const Options& options) {
  const Layout layout({{1024, 1024}, {1024, 1024}, {1024, 1024}, {1024, 1024}});
  const Block g = make_block(layout.n, 0, options.threads),
              p = make_block(layout.n, 1, options.threads);
  const Pointers gradients = layout.pointers(g.get());
  Context context(layout, p.get(), {options.threads});
  // Long enough for many time slices of the scheduler: returns the mean over the calls.
  const auto window_seconds = [&] {
    const double start = now();
    int calls = 0;
    while (now() - start < 0.25) {
      context.accumulate(gradients);
      context.step();
      ++calls;
    }
    return (now() - start) / calls;
  };
  Neighbour neighbour;
  window_seconds();
  for (int round = 0; round < options.rounds(); ++round) {
    const double quiet = window_seconds();
    neighbour.go_on();
    const double busy = window_seconds();
    neighbour.stop();
    printf("%.9g\n", busy / quiet);
  }
  return 0;
}

void contended_figures(const Options& options, Report& report) {
  if (options.threads < 2) return;
  for (const char* policy : {"", "passive"}) {
    const std::string command =
        format("exec env %s%s /proc/%d/exe --contended-rounds %s --threads %d",
               *policy ? "OMP_WAIT_POLICY=" : "", policy, static_cast<int>(getpid()),
               options.quick ? "--quick" : "", options.threads);
    FILE* pipe = popen(command.c_str(), "r");
    if (!pipe) throw std::runtime_error("popen failed");
    Times ratios;
    double ratio = 0;
    while (fscanf(pipe, "%lf", &ratio) == 1) ratios.push_back(ratio);
    if (pclose(pipe) != 0 || ratios.empty())
      throw std::runtime_error("the contended rounds failed");
    report.figure(
        *policy ? "C8_contended_passive" : "C8_contended", ratios, Sense::kAtMost, 2.0,
        format("time with a busy process on one core / idle, wait policy %s, 4 M parameters",
               *policy ? policy : "default"));
  }
}

void overhead_figures(const Options& options, Report& report) {
  const Layout small({{32, 32}, {32}});
  const int threads = options.threads, times = options.quick ? 5000 : 20000;
  overhead(options, report, "C8_small", small, 1, 1, times, 2.0);
  // A context with several threads, which runs work as small as this on one.
  overhead(options, report, "C8_small_in_threaded_context", small, threads, 1, times, 2.0);
  for (const int64_t n : {128, 512}) {
    overhead(options, report, n == 128 ? "C8_400" : "C8_400_larger",
             Layout(std::vector<Shape>(400, Shape{n})), threads, threads, times / 50, 10.0);
  }
  contended_figures(options, report);
}

// ---- C9 and C10: weight gradients by oneDNN -----------------------------------------------------

#ifdef GA_BENCH_ONEDNN

float largest_difference(const float* a, const float* b, int64_t n) {
  float largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::fabs(a[i] - b[i]));
  return largest;
}

float largest(const float* a, int64_t n) {
  float result = 0;
  for (int64_t i = 0; i < n; ++i) result = std::max(result, std::fabs(a[i]));
  return result;
}

void matmul_figure(const Options& options, Report& report) {
  const int64_t width = 1024, batch = 64;
  const double weight = 0.5;  // alpha
  const Layout layout(std::vector<Shape>{Shape{width, width}});
  const Block dy = make_block(batch * width, 0, options.threads),
              x = make_block(batch * width, 1, options.threads);
  const Block dw = make_block(layout.n, 2, options.threads),
              p = make_block(layout.n, 3, options.threads);
  const Pointers gradients = layout.pointers(dw.get());
  const std::unique_ptr<stack_matmul, void (*)(stack_matmul*)> product(
      stack_matmul_create(width, batch, width, 1, 0), stack_matmul_destroy);
  if (!product) throw std::runtime_error(stack_error());
  Context fused(layout, p.get(), {options.threads, GA_GRADIENTS_CONSUMED, GA_OPTIMIZER_EXTERNAL});
  Context separate(layout, p.get(),
                   {options.threads, GA_GRADIENTS_CONSUMED, GA_OPTIMIZER_EXTERNAL});

  int64_t micro = 0;
  const auto plain = [&] { stack_matmul_run(product.get(), dy.get(), x.get(), dw.get()); };
  const auto into_accumulator = [&] {
    check(ga_micro_begin(fused.get(), micro++, weight, nullptr));
    check(ga_accumulate_matmul(fused.get(), 0, batch, dy.get(), width, GA_TRANSPOSE, x.get(), width,
                               GA_NO_TRANSPOSE, GA_F32));
    check(ga_micro_end(fused.get()));
  };
  const auto then_accumulate = [&] {
    plain();
    separate.accumulate(gradients, weight);
  };

  // First check that both ways give the same gradient. Four micro-batches, so that products are
  // added and not only stored.
  for (int k = 0; k < 4; ++k) {
    into_accumulator();
    then_accumulate();
  }
  fused.step();
  separate.step();
  const void *one = nullptr, *other = nullptr;
  check(ga_gradient(fused.get(), 0, &one, nullptr, nullptr));
  check(ga_gradient(separate.get(), 0, &other, nullptr, nullptr));
  const float* expected = static_cast<const float*>(other);
  // The tolerance allows for sums of 4 x 64 terms in another order.
  if (!(largest_difference(static_cast<const float*>(one), expected, layout.n) <=
        1e-5f * largest(expected, layout.n))) {
    throw std::runtime_error("C9: ga_accumulate_matmul and matmul with ga_accumulate differ");
  }

  micro = 0;
  into_accumulator();
  then_accumulate();
  const std::vector<Times> t = race(options.rounds(), options.quick ? 50 : 200,
                                    {{plain, {}}, {into_accumulator, {}}, {then_accumulate, {}}});
  report.figure(
      "C9", t[1] / t[0], Sense::kAtMost, 1.10,
      format("time / oneDNN's plain matmul into a scratch buffer, %.0f us", 1e6 * median(t[0])));
  report.figure("C9_vs_separate", t[2] / t[1], Sense::kAtLeast, 1.1,
                format("plain matmul and ga_accumulate, %.0f us / ga_accumulate_matmul, %.0f us",
                       1e6 * median(t[2]), 1e6 * median(t[1])));
}

void stack_figure(const Options& options, Report& report) {
  const int layers = 8, micros = 8, threads = options.threads;
  const int64_t width = 1024, batch = 64, n = width * width;
  const Block inputs = make_block(micros * batch * width, 0, threads);
  const Block targets = make_block(micros * batch * width, 1, threads);
  for (int64_t i = 0; i < micros * batch * width; ++i) {
    inputs.get()[i] *= 1e3f;
    targets.get()[i] *= 1e3f;
  }
  std::vector<Block> blocks;
  std::vector<float*> weights[2];
  for (std::vector<float*>& side : weights) {
    for (int layer = 0; layer < layers; ++layer) {
      blocks.push_back(make_block(n, 2 + layer, threads));
      side.push_back(blocks.back().get());
      for (int64_t i = 0; i < n; ++i) side.back()[i] *= 60.0f;  // uniform in +-0.05
    }
  }
  using Stack = std::unique_ptr<stack, void (*)(stack*)>;
  const auto make = [&](int way) {
    Stack made(stack_create(layers, width, batch, micros, weights[way].data(), inputs.get(),
                            targets.get(), 1e-4, 1.0, way, threads),
               stack_destroy);
    if (!made) throw std::runtime_error(std::string("C10: ") + stack_error());
    return made;
  };
  const Stack written = make(STACK_WRITTEN), fused = make(STACK_MATMUL);
  const auto step = [](const Stack& which) {
    return [&which] {
      if (stack_step(which.get()) != 0)
        throw std::runtime_error(std::string("C10: ") + stack_error());
    };
  };
  step(written)();
  step(fused)();
  // Adam's first step is the sign of every gradient that is not tiny, so compare the second loss.
  step(written)();
  step(fused)();
  const double loss = stack_loss(written.get());
  if (!(std::fabs(loss - stack_loss(fused.get())) <= 1e-3 * loss)) {
    throw std::runtime_error(
        format("C10: losses differ: %.9g and %.9g", loss, stack_loss(fused.get())));
  }
  const std::vector<Times> t = race(options.rounds(), 1, {{step(written), {}}, {step(fused), {}}});
  report.figure(
      "C10_vs_written", t[0] / t[1], Sense::kAtLeast, 1.0,
      format("a step with gradients written out, %.1f ms / with ga_accumulate_matmul, %.1f ms",
             1e3 * median(t[0]), 1e3 * median(t[1])));
}

#endif  // GA_BENCH_ONEDNN

// ---- Main ---------------------------------------------------------------------------------------

std::string processor() {
  std::string name = "unknown processor";
  if (FILE* file = fopen("/proc/cpuinfo", "r")) {
    char line[256];
    while (fgets(line, sizeof line, file)) {
      const char* colon = strchr(line, ':');
      if (strncmp(line, "model name", 10) != 0 || !colon) continue;
      name.assign(colon + 2, strcspn(colon + 2, "\n"));
      break;
    }
    fclose(file);
  }
  return name;
}

void measure(const Options& options) {
  const Ticks start = ticks();
  Report report;
  const int64_t l2 = std::max(sysconf(_SC_LEVEL2_CACHE_SIZE), 256L << 10);
  const int64_t l3 = std::max(sysconf(_SC_LEVEL3_CACHE_SIZE), 0L);
  std::string machine =
      format("%s, %d processors, %d threads, L2 %lld KiB, L3 %lld MiB; %s", processor().c_str(),
             omp_get_num_procs(), options.threads, static_cast<long long>(l2 >> 10),
             static_cast<long long>(l3 >> 20), ga_build_info());
  printf("%s\n", machine.c_str());

  // Half of the cores' L2 for four streams, in whole chunks per thread if a chunk fits.
  int64_t share = l2 / 2 / 16;
  if (share > 65536) share = share / 65536 * 65536;
  const std::vector<Place> places = {
      {false, gpt2(options.quick ? 3 : 12), 1},
      {true, Layout(std::vector<Shape>{Shape{share * options.threads}}),
       options.quick ? 300 : 1000}};
  for (const Place& place : places) {
    if (options.only.empty() || options.wants("yardsticks")) yardsticks(options, report, place);
  }
  for (const Place& place : places) {
    report.heading(format("%s, %zu tensors, %.4g M elements",
                          place.cached ? "Inside L2" : "Beyond the caches",
                          place.layout.shapes.size(), 1e-6 * static_cast<double>(place.layout.n)));
    if (options.wants("C1") || options.wants("C2") || options.wants("C4")) {
      accumulate_figures(options, report, place);
    }
    if (options.wants("C3")) step_figure(options, report, place);
    if (options.wants("C6")) window_figures(options, report, place);
  }
  report.heading("16 bits, layers, rows; beyond the caches");
  variant_figures(options, report, places[0]);
  if (options.wants("S")) {
    report.heading("State on disk");
    state_figures(options, report, places[0]);
  }
  if (options.wants("E")) {
    report.heading("Updates ahead of the step");
    eager_figures(options, report);
  }
  if (options.wants("B")) {
    report.heading("Batch normalisation");
    batch_norm_figures(options, report);
  }
  if (options.only.count("PEERS") != 0) {
    report.heading("Peers: their time / the library's");
    peer_figures(options, report, places[1]);
  }
  report.heading("Offsets within a page, bits, overhead, matrix products");
  if (options.only.empty() ? !options.quick : options.wants("offsets"))
    offset_figures(options, report);
  if (options.wants("C7")) bits_figure(options, report);
  if (options.wants("C8")) overhead_figures(options, report);
#ifdef GA_BENCH_ONEDNN
  if (options.wants("C9")) matmul_figure(options, report);
  if (options.wants("C10")) stack_figure(options, report);
#else
  if (options.wants("C9") || options.wants("C10"))
    printf("C9, C10: skipped; this build has no oneDNN\n");
#endif
  const Load load = load_since(start);
  const std::string others =
      format("other processes used %.1f %% of the processors meanwhile, and the hypervisor %.1f %%",
             load.others, load.steal);
  printf("\n%s\n", others.c_str());
  report.write(options.json, machine + "; " + others);
}

int run(int argc, char** argv) {
  Options options;
  bool contended = false;
  for (int k = 1; k < argc; ++k) {
    const std::string name = argv[k];
    const auto value = [&]() -> std::string {
      if (k + 1 >= argc) throw std::runtime_error(name + " needs a value");
      return argv[++k];
    };
    if (name == "--quick") {
      options.quick = true;
    } else if (name == "--threads") {
      options.threads = std::max(1, atoi(value().c_str()));
    } else if (name == "--json") {
      options.json = value();
    } else if (name == "--contended-rounds") {
      contended = true;
    } else if (name == "--only") {
      std::string ids = value();
      for (size_t comma; !ids.empty();
           ids.erase(0, comma == std::string::npos ? comma : comma + 1)) {
        comma = ids.find(',');
        options.only.insert(ids.substr(0, comma));
      }
    } else {
      throw std::runtime_error("unknown option " + name);
    }
  }
  omp_set_num_threads(options.threads);
  if (contended) return contended_rounds(options);
  measure(options);
  return 0;
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  try {
    return bench::run(argc, argv);
  } catch (const std::exception& error) {
    fprintf(stderr, "gradaccum_bench: %s\n", error.what());
    return 1;
  }
}
