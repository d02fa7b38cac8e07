// SPDX-License-Identifier: Apache-2.0
//
// Every allocation that can fail fails once: alone, and together with all later ones. Allocations
// are also counted: they must match ga_context_memory, leave no leaks, and not happen in windows
// after the first.
//
// This program replaces malloc, its family and mmap, for the library too.
#include <errno.h>
#include <malloc.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <optional>
#include <set>

#include "posix_files.hpp"
#include "ranks.hpp"
#include "small_run.hpp"
#include "state_parts.hpp"

#if defined(__SANITIZE_ADDRESS__) && !defined(GA_ASAN)
#define GA_ASAN 1
#endif
#if defined(__SANITIZE_THREAD__)
#define GA_TSAN 1
#endif
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define GA_ASAN 1
#endif
#if __has_feature(thread_sanitizer)
#define GA_TSAN 1
#endif
#endif

#ifdef GA_TSAN

TEST(Memory, All) { GTEST_SKIP() << "ThreadSanitizer keeps malloc to itself"; }

#else

#ifdef GA_ASAN  // our functions call the sanitizer's
#define GA_REAL(name) __interceptor_##name
#else
#define GA_REAL(name) __libc_##name
#endif

extern "C" {
void* GA_REAL(malloc)(size_t);
void GA_REAL(free)(void*);
void* GA_REAL(calloc)(size_t, size_t);
void* GA_REAL(realloc)(void*, size_t);
void* GA_REAL(memalign)(size_t, size_t);
}

namespace {

// Static and trivial, because they are used before main and after it.
std::atomic<bool> counting{false};
std::atomic<int64_t> allocations{0};  // while counting
std::atomic<int64_t> live_bytes{0};   // allocated while counting, not freed
std::atomic<int64_t> fail_from{-1}, fail_to{-1};

bool is_counting() { return counting.load(std::memory_order_relaxed); }

// Returns true if this allocation must fail.
bool refuse() {
  if (!is_counting()) return false;
  const int64_t number = allocations.fetch_add(1);
  return number >= fail_from && number < fail_to;
}

void count(int64_t bytes) {
  if (is_counting()) live_bytes.fetch_add(bytes);
}

// Called only while counting: before main a sanitizer cannot answer yet.
int64_t usable_size(void* p) {
  return p && is_counting() ? static_cast<int64_t>(malloc_usable_size(p)) : 0;
}

void* counted(void* p) {
  count(usable_size(p));
  return p;
}

void* no_memory() {
  errno = ENOMEM;
  return nullptr;
}

}  // namespace

extern "C" {

void* malloc(size_t size) { return refuse() ? no_memory() : counted(GA_REAL(malloc)(size)); }

void free(void* p) {
  count(-usable_size(p));
  GA_REAL(free)(p);
}

void* calloc(size_t n, size_t size) {
  return refuse() ? no_memory() : counted(GA_REAL(calloc)(n, size));
}

void* realloc(void* p, size_t size) {
  if (refuse()) return no_memory();
  const int64_t before = usable_size(p);
  void* const q = GA_REAL(realloc)(p, size);
  if (q || size == 0) count(-before);
  return counted(q);
}

void* memalign(size_t alignment, size_t size) {
  return refuse() ? no_memory() : counted(GA_REAL(memalign)(alignment, size));
}

void* aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void** out, size_t alignment, size_t size) {
  void* const p = memalign(alignment, size);
  if (!p) return ENOMEM;
  *out = p;
  return 0;
}

void* mmap(void* address, size_t length, int protection, int flags, int fd, off_t offset) {
  if (refuse()) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  const long result = syscall(SYS_mmap, address, length, protection, flags, fd, offset);
  if (result == -1) return MAP_FAILED;
  count(static_cast<int64_t>(length));
  return reinterpret_cast<void*>(result);
}

void* mmap64(void* address, size_t length, int protection, int flags, int fd, off_t offset) {
  return mmap(address, length, protection, flags, fd, offset);
}

int munmap(void* address, size_t length) {
  count(-static_cast<int64_t>(length));
  return static_cast<int>(syscall(SYS_munmap, address, length));
}

}  // extern "C"

// The C++ runtime's operator new calls malloc, but a sanitizer's does not, so these replace both.
void* operator new(size_t size) {
  if (void* p = malloc(size ? size : 1)) return p;
  throw std::bad_alloc();
}
void* operator new[](size_t size) { return operator new(size); }
void* operator new(size_t size, const std::nothrow_t&) noexcept { return malloc(size ? size : 1); }
void* operator new[](size_t size, const std::nothrow_t&) noexcept {
  return malloc(size ? size : 1);
}
void* operator new(size_t size, std::align_val_t alignment) {
  if (void* p = memalign(static_cast<size_t>(alignment), size ? size : 1)) return p;
  throw std::bad_alloc();
}
void* operator new[](size_t size, std::align_val_t alignment) {
  return operator new(size, alignment);
}
void operator delete(void* p) noexcept { free(p); }
void operator delete[](void* p) noexcept { free(p); }
void operator delete(void* p, size_t) noexcept { free(p); }
void operator delete[](void* p, size_t) noexcept { free(p); }
void operator delete(void* p, std::align_val_t) noexcept { free(p); }
void operator delete[](void* p, std::align_val_t) noexcept { free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { free(p); }
void operator delete[](void* p, size_t, std::align_val_t) noexcept { free(p); }

namespace ga::test {
namespace {

// Counts allocations during its lifetime.
class Count {
 public:
  // The allocations with numbers in [from, to) fail.
  explicit Count(int64_t from = -1, int64_t to = -1) {
    allocations = 0;
    live_bytes = 0;
    fail_from = from;
    fail_to = to;
    counting = true;
  }
  ~Count() { stop(); }
  void stop() {
    counting = false;
    fail_from = fail_to = -1;
  }
  static int64_t calls() { return allocations; }
  static int64_t bytes() { return live_bytes; }
};

TEST(Interposer, Works) {
  {
    const Count all(0, INT64_MAX);
    void* volatile p = malloc(10);
    EXPECT_EQ(p, nullptr);
    EXPECT_EQ(mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), MAP_FAILED);
    bool thrown = false;
    try {
      delete new int;
      auto* volatile bytes = new char[100];
      delete[] bytes;
    } catch (const std::bad_alloc&) {
      thrown = true;
    }
    EXPECT_TRUE(thrown);
  }
  const Count some;
  auto* volatile bytes = new char[1000];
  EXPECT_GE(Count::bytes(), 1000);
  EXPECT_EQ(Count::calls(), 1);
  delete[] bytes;
  EXPECT_EQ(Count::bytes(), 0);
}

// ---- Every allocation fails ---------------------------------------------------------------------

// Small tensors, and one so large that its memory comes from mmap.
constexpr int64_t kCounts[] = {3, 70001, 1 << 19};

// A context whose life is a list of steps, so that a failed step can be repeated.
class Life {
 public:
  explicit Life(int32_t gradient_life) {
    for (const int64_t n : kCounts) {
      p.emplace_back(static_cast<size_t>(n), 1.0f);
      g.emplace_back(static_cast<size_t>(n), 0.25f);
    }
    flat = Block(1000, 2);
    config_ = config();
    config_.gradient_life = gradient_life;
    schedule_ = schedule(GA_SCHEDULE_TABLE);
    schedule_.table = table_.data();
    schedule_.table_size = static_cast<int64_t>(table_.size());
    optimizer_ = optimizer(GA_OPTIMIZER_ADAMW);
    optimizer_.amsgrad = 1;
    clip_ = clip(GA_CLIP_GLOBAL, 1);
    EXPECT_OK(ga_ema_init(&ema_, sizeof ema_));
  }
  ~Life() { ga_context_destroy(ctx); }
  Life(const Life&) = delete;
  Life& operator=(const Life&) = delete;

  static constexpr int kSteps = 22;

  // Makes no allocation of its own.
  ga_status step(int number) {
    const void* list[] = {g[0].data(), g[1].data(), g[2].data(), g[2].data()};
    switch (number) {
      case 0:
        return ga_context_create(&config_, &ctx);
      case 1:
        return ga_group_add(ctx, &optimizer_, nullptr);
      case 2:
        return ga_group_set_schedule(ctx, 0, &schedule_);
      case 3:
        return ga_context_set_accum_schedule(ctx, from_steps_, accum_steps_, 2);
      case 4:
        if (const ga_status status = ga_context_set_ema(ctx, &ema_)) return status;
        return ga_context_set_clip(ctx, &clip_);
      case 5:
        return add(0, "a parameter with a name too long to be kept in place, number 0");
      case 6:
        return add(1, "a parameter with a name too long to be kept in place, number 1");
      case 7:
        return add(2, "2");
      case 8:
        return ga_params_add_flat(ctx, flat.data(), GA_F32, entries_, 3, nullptr, nullptr);
      case 9:
        return ga_accumulate(ctx, list, 4, 1, nullptr);
      case 10:
        return ga_accumulate(ctx, second(), 4, 1, nullptr);
      case 11:
        return ga_step(ctx, nullptr);
      case 12:
        return ga_micro_begin(ctx, 0, 1, nullptr);
      case 13:
        return ga_accumulate_part(ctx, 1, g[1].data());
      case 14:
        return ga_accumulator_acquire(ctx, 0, &accumulator_);
      case 15: {
        for (int i = 0; i < 3; ++i) static_cast<float*>(accumulator_.data)[i] = 0.5f;
        return ga_accumulator_release(ctx, 0);
      }
      case 16:
        return ga_micro_end(ctx);
      case 17:
        return ga_step(ctx, nullptr);
      case 18:
        return ga_ema_swap(ctx, 1);
      case 19:
        return ga_ema_swap(ctx, 0);
      case 20:
        return ga_state_get(ctx, 0, "max_exp_avg_sq", state_, GA_F32, kCounts[0]);
      default:
        return ga_param_remove(ctx, 0);
    }
  }

  std::vector<Block> p, g;
  Block flat;
  ga_context* ctx = nullptr;

 private:
  ga_status add(size_t i, const char* name) {
    return ga_param_add(ctx, 0, name, p[i].data(), GA_F32, 1, &kCounts[i], nullptr, nullptr);
  }
  const void* const* second() {
    second_[0] = g[1].data();
    second_[1] = nullptr;
    second_[2] = nullptr;
    second_[3] = g[1].data();
    return second_;
  }

  ga_config config_;
  ga_schedule schedule_;
  ga_optimizer optimizer_;
  ga_clip clip_;
  ga_ema ema_;
  float state_[kCounts[0]];
  std::vector<double> table_ = std::vector<double>(50, 0.125);
  int64_t from_steps_[2] = {0, 1}, accum_steps_[2] = {2, 0};
  int64_t shape_[1] = {10};
  ga_flat_entry entries_[3] = {
      flat_entry("a long name within the flat block, long enough to be allocated", 0, 1, shape_, 5),
      flat_entry("z", 0, 1, shape_, 100), flat_entry("y", 0, 0, nullptr, 999)};
  ga_accumulator accumulator_ = {sizeof(ga_accumulator), nullptr, 0, 0, 0, 0, 0, 0, 0};
  const void* second_[4] = {};
};

// The life of gradients, and whether one allocation fails alone or together with all later ones.
class FailingMemory : public testing::TestWithParam<std::tuple<int32_t, bool> > {};
INSTANTIATE_TEST_SUITE_P(All, FailingMemory,
                         testing::Combine(testing::Values(GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE),
                                          testing::Bool()));

// For each step of a life and each k, the k-th allocation of the step fails. Then the step returns
// the error, nothing has changed, the step succeeds when repeated, and the life ends with the bits
// of an undisturbed one.
TEST_P(FailingMemory, AtEveryPoint) {
  const auto [life, once] = GetParam();
  Life calm(life);
  for (int s = 0; s < Life::kSteps; ++s) ASSERT_OK(calm.step(s)) << "step " << s;

  std::set<int> could_fail;
  for (int failing = 0; failing < Life::kSteps; ++failing) {
    for (int64_t k = 0;; ++k) {
      ASSERT_LT(k, 1000) << "no end of allocations";
      SCOPED_TRACE(testing::Message() << "step " << failing << ", allocation " << k);
      Life t(life);
      for (int s = 0; s < failing; ++s) ASSERT_OK(t.step(s)) << s;
      const std::vector<Block> before = t.p;
      ga_window_info window_before{};
      ga_memory memory_before{};
      if (t.ctx) {
        window_before = window(t.ctx);
        memory_before = memory(t.ctx);
      }
      ga_status status;
      int64_t leaked, calls;
      {
        const Count count(k, once ? k + 1 : INT64_MAX);
        status = t.step(failing);
        leaked = Count::bytes();
        calls = Count::calls();
      }
      if (status == GA_OK) {
        // Either there are fewer than k allocations, or the step succeeds without this one.
        for (int s = failing + 1; s < Life::kSteps; ++s) ASSERT_OK(t.step(s)) << s;
        ASSERT_EQ(t.p, calm.p);
        if (calls <= k) break;
        continue;
      }
      could_fail.insert(failing);
      ASSERT_EQ(status, GA_ERROR_OUT_OF_MEMORY) << ga_last_error();
      ASSERT_STRNE(ga_last_error(), "");
      if (failing == 0) {
        ASSERT_EQ(t.ctx, nullptr);
        ASSERT_EQ(leaked, 0);
      } else {
        const ga_window_info window_after = window(t.ctx);
        const ga_memory memory_after = memory(t.ctx);
        ASSERT_EQ(0, memcmp(&window_before, &window_after, sizeof window_after));
        ASSERT_EQ(0, memcmp(&memory_before, &memory_after, sizeof memory_after));
      }
      ASSERT_EQ(t.p, before);
      for (int s = failing; s < Life::kSteps; ++s) ASSERT_OK(t.step(s)) << s;
      ASSERT_EQ(t.p, calm.p);
      ASSERT_EQ(t.flat, calm.flat);
    }
  }
  // The steps that must allocate have done so; otherwise the test would have tested nothing.
  for (const int s : {0, 1, 2, 3, 5, 6, 8, 9, 18, 20, 21})
    EXPECT_TRUE(could_fail.count(s)) << "step " << s;
}

// A context that was filled, used and hit by failures frees everything.
TEST_P(FailingMemory, NothingLeaks) {
  const auto [life, once] = GetParam();
  {
    Life warm(life);  // makes the allocations that the process keeps
    for (int s = 0; s < Life::kSteps; ++s) ASSERT_OK(warm.step(s));
  }
  for (int64_t k = 0; k < 60; ++k) {
    Life t(life);
    Count count(k, once ? k + 1 : INT64_MAX);
    for (int s = 0; s < Life::kSteps; ++s) {
      if (t.step(s) == GA_OK) continue;
      fail_from = fail_to = -1;
      if (t.step(s) != GA_OK) break;
    }
    ga_context_destroy(t.ctx);
    t.ctx = nullptr;
    const int64_t left = Count::bytes();
    count.stop();
    ASSERT_EQ(left, 0) << "allocation " << k;
  }
}

// For a parameter larger than memory, the call that allocates returns an error instead of crashing.
TEST(Memory, MoreThanThereIs) {
  // Address space without memory, which nothing touches.
  const int64_t count = int64_t{1} << 42;
  void* const data = mmap(nullptr, static_cast<size_t>(count) * 4, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) GTEST_SKIP() << "no 16 TiB of address space";
  float p = 0;
  const float g = 1;
  Context ctx;
  ctx.param(ctx.group(optimizer(GA_OPTIMIZER_ADAMW)), "small", &p, 1);
  ASSERT_OK(ga_param_add(ctx, 0, "huge", data, GA_F32, 1, &count, nullptr, nullptr));
  EXPECT_GE(memory(ctx).total, 12 * count) << "planning works before anything is allocated";
  const void* list[] = {&g, nullptr};
  ga_status status;
  {
    // Some systems would overcommit, so make the allocations fail. (The first one is the window's.)
    const Count all(1, INT64_MAX);
    status = ga_accumulate(ctx, list, 2, 1, nullptr);
  }
  EXPECT_TRUE(refused(status, GA_ERROR_OUT_OF_MEMORY, {"\"huge\"", std::to_string(12 * count)}));
  EXPECT_EQ(window(ctx).state, GA_WINDOW_EMPTY);
  munmap(data, static_cast<size_t>(count) * 4);
}

// ---- Counting -----------------------------------------------------------------------------------

struct Sizes {
  const char* name;
  std::vector<int64_t> counts;
};

TEST(Memory, ReportedIsAllocated) {
  struct Case {
    const char* name;
    ga_optimizer optimizer;
    int64_t state;  // bytes per element
  };
  ga_optimizer momentum = plain_sgd();
  momentum.momentum = 0.9;
  ga_optimizer amsgrad = optimizer(GA_OPTIMIZER_ADAM);
  amsgrad.amsgrad = 1;
  const Case cases[] = {{"SGD", plain_sgd(), 0},
                        {"momentum", momentum, 4},
                        {"AdamW", optimizer(GA_OPTIMIZER_ADAMW), 8},
                        {"AMSGrad", amsgrad, 12},
                        {"external", optimizer(GA_OPTIMIZER_EXTERNAL), 0}};
  const Sizes models[] = {{"one large", {4 << 20}},
                          {"some of all sizes", {1 << 20, 999999, 300000, 65537, 1, 0, 12345}},
                          {"400 middling", std::vector<int64_t>(400, 10007)}};
  for (const Case& test : cases) {
    for (const Sizes& model : models) {
      SCOPED_TRACE(std::string(test.name) + ", " + model.name);
      int64_t elements = 0;
      for (const int64_t n : model.counts) elements += n;
      const Layout layout(model.counts);
      Block p(static_cast<size_t>(layout.total), 0), g(p.size(), 0.5f);
      std::vector<std::string> names;
      for (size_t i = 0; i < layout.size(); ++i) names.push_back(std::to_string(i));
      const auto list = pointers(layout, g);

      ga_context* ctx = nullptr;
      const ga_config c = config();
      Count count;
      ASSERT_OK(ga_context_create(&c, &ctx));
      ASSERT_OK(ga_group_add(ctx, &test.optimizer, nullptr));
      for (size_t i = 0; i < layout.size(); ++i) {
        ASSERT_OK(ga_param_add(ctx, 0, names[i].c_str(), p.data() + layout.offsets[i], GA_F32, 1,
                               &layout.counts[i], nullptr, nullptr));
      }
      ga_memory planned;
      planned.struct_size = sizeof planned;
      ASSERT_OK(ga_context_memory(ctx, &planned));
      const int64_t before = Count::bytes();
      for (int w = 0; w < 2; ++w) {
        for (int k = 0; k < 3; ++k) {
          ASSERT_OK(ga_accumulate(ctx, list.data(), list.size(), 1, nullptr));
        }
        ASSERT_OK(ga_step(ctx, nullptr));
      }
      const int64_t allocated = Count::bytes();
      ga_memory used;
      used.struct_size = sizeof used;
      ASSERT_OK(ga_context_memory(ctx, &used));
      ga_context_destroy(ctx);
      const int64_t left = Count::bytes();
      count.stop();

      EXPECT_LT(planned.resident, allocated / 20);
      EXPECT_EQ(used.resident, used.total);
      planned.resident = used.resident;
      EXPECT_EQ(0, memcmp(&planned, &used, sizeof used)) << "the planned sizes were different";
      EXPECT_EQ(used.total, used.accumulators + used.optimizer_state + used.workspace);
      const auto near = [](int64_t got, int64_t want, const char* what) {
        EXPECT_NEAR(static_cast<double>(got), static_cast<double>(want),
                    0.01 * static_cast<double>(want))
            << what;
      };
      near(used.accumulators, 4 * elements, "accumulators");
      near(used.optimizer_state, test.state * elements, "state");
      near(allocated, used.total, "total against what was allocated");
      EXPECT_LT(before, allocated / 20) << "most memory comes with the first contribution";
      EXPECT_EQ(left, 0) << "ga_context_destroy must free everything";
    }
  }
}

// A load allocates what the windows of the saved context have, and no more is left of the load itself.
TEST(Memory, AfterALoadReportedIsAllocated) {
  constexpr int64_t kCount = 1 << 20;
  Tensor p(GA_BF16, kCount, 1);
  const Tensor g(GA_BF16, kCount, 0.5);
  const void* const list[] = {g.data()};
  ga_param_options master = {};
  EXPECT_OK(ga_param_options_init(&master, sizeof master));
  master.master = GA_MASTER_F32;
  ga_ema ema;
  EXPECT_OK(ga_ema_init(&ema, sizeof ema));
  const ga_optimizer adamw = optimizer(GA_OPTIMIZER_ADAMW);
  const auto make = [&] {
    const ga_config c = config();
    ga_context* ctx = nullptr;
    EXPECT_OK(ga_context_create(&c, &ctx));
    EXPECT_OK(ga_group_add(ctx, &adamw, nullptr));
    EXPECT_OK(ga_context_set_ema(ctx, &ema));
    EXPECT_OK(ga_param_add(ctx, 0, "p", p.data(), GA_BF16, 1, &kCount, &master, nullptr));
    return ctx;
  };
  ga_context* const first = make();
  EXPECT_OK(ga_accumulate(first, list, 1, 1, nullptr));
  EXPECT_OK(ga_step(first, nullptr));
  EXPECT_OK(ga_accumulate(first, list, 1, 1, nullptr));
  const std::vector<char> bytes = saved(first);
  const ga_memory expected = memory(first);
  ga_context_destroy(first);

  Count count;
  ga_context* const ctx = make();
  EXPECT_OK(load(ctx, bytes));
  const int64_t allocated = Count::bytes();
  const ga_memory used = memory(ctx);
  ga_context_destroy(ctx);
  const int64_t left = Count::bytes();
  count.stop();

  const auto near = [](int64_t got, int64_t want, const char* what) {
    EXPECT_NEAR(static_cast<double>(got), static_cast<double>(want),
                0.01 * static_cast<double>(want))
        << what;
  };
  near(used.accumulators, 4 * kCount, "accumulators");
  near(used.optimizer_state, 8 * kCount, "state");
  near(used.masters, 4 * kCount, "master weights");
  near(used.averages, 4 * kCount, "averages");
  near(allocated, used.total, "total against what was allocated");
  EXPECT_EQ(used.resident, used.total);
  EXPECT_EQ(used.total, expected.total);
  EXPECT_EQ(left, 0) << "ga_context_destroy must free everything";
}

// Windows after the first allocate nothing, whatever the program does in them.
TEST(Memory, WindowsAllocateNothing) {
  const Layout layout({3, 70001, 200000, 0});
  for (const int32_t threads : {1, 2}) {
    for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
      ga_config c = config();
      c.num_threads = threads;
      c.gradient_life = life;
      Block p = parameters(layout, 1), flat(100, 1);
      const Block g = gradients(layout, 2, 0), h = gradients(layout, 2, 1), fg(100, 1);
      Block bad = g;
      bad[static_cast<size_t>(layout.offsets[1])] = NAN;
      Context ctx(c);
      ctx.group(optimizer(GA_OPTIMIZER_ADAMW));
      ctx.group(optimizer(GA_OPTIMIZER_EXTERNAL));
      for (size_t i = 0; i < layout.size(); ++i) {
        ctx.param(i == 1 ? 1 : 0, std::to_string(i), p.data() + layout.offsets[i],
                  layout.counts[i]);
      }
      const int64_t ten = 10;
      const ga_flat_entry entries[] = {flat_entry("x", 0, 1, &ten, 0),
                                       flat_entry("y", 1, 1, &ten, 50)};
      ASSERT_OK(ga_params_add_flat(ctx, flat.data(), GA_F32, entries, 2, nullptr, nullptr));
      const auto list = [&](const Block& block) {
        auto result = pointers(layout, block);
        result.push_back(&block == &g ? fg.data() : nullptr);
        return result;
      };
      const auto lg = list(g), lh = list(h), lb = list(bad);
      const ga_clip norm = clip(GA_CLIP_GLOBAL, 1, GA_FLAVOR_TORCH, 0.5);
      ga_schedule table = schedule(GA_SCHEDULE_COSINE);
      table.total_steps = 1000;
      ASSERT_OK(ga_group_set_schedule(ctx, 0, &table));
      int64_t warm = -1;
      for (int w = 0; w < 40; ++w) {
        const Count count;
        int64_t k = 0;
        ASSERT_OK(ga_context_set_clip(ctx, w % 3 ? &norm : nullptr));
        for (const auto* gradients : {&lg, w % 2 ? &lh : nullptr, w % 5 == 1 ? &lb : nullptr}) {
          if (!gradients) continue;
          ASSERT_OK(ga_accumulate(ctx, gradients->data(), gradients->size(), 2, nullptr));
          ++k;
        }
        ASSERT_OK(ga_micro_begin(ctx, k, 1, nullptr));
        ASSERT_OK(ga_accumulate_part(ctx, 2, h.data() + layout.offsets[2]));
        ga_accumulator a;
        a.struct_size = sizeof a;
        ASSERT_OK(ga_accumulator_acquire(ctx, 0, &a));
        ASSERT_OK(ga_accumulator_release(ctx, 0));
        ASSERT_OK(ga_micro_end(ctx));
        if (w % 7 == 3) {
          ASSERT_OK(ga_discard(ctx));
        } else {
          ga_step_result r;
          r.struct_size = sizeof r;
          ASSERT_OK(ga_step(ctx, &r));
          const void* data;
          if (r.outcome == GA_STEP_APPLIED) {  // (an error allocates its exception)
            ASSERT_OK(ga_gradient(ctx, 1, &data, nullptr, nullptr));
          }
        }
        if (w >= 3) {
          ASSERT_EQ(Count::calls(), 0)
              << "window " << w << ", " << threads << " threads, life " << life;
        } else {
          warm = Count::calls();
        }
      }
      EXPECT_GE(warm, 0);
    }
  }
}

// A program may freeze the same parameters before every window without allocations.
TEST(Memory, FreezingWhatIsFrozenAllocatesNothing) {
  Block p(200, 1), g(100, 0.5f);
  Context ctx;
  ctx.group(optimizer(GA_OPTIMIZER_ADAMW));
  const ga_param frozen = ctx.param(0, "frozen", p.data(), 100);
  ctx.param(0, "trained", p.data() + 100, 100);
  const void* list[] = {g.data(), g.data()};
  for (int w = 0; w < 4; ++w) {
    const Count count;
    ASSERT_OK(ga_param_set_frozen(ctx, frozen, 1));
    ASSERT_OK(ga_accumulate(ctx, list, 2, 1, nullptr));
    ASSERT_OK(ga_step(ctx, nullptr));
    if (w > 0) {
      ASSERT_EQ(Count::calls(), 0) << "window " << w;
    }
  }
}

// Long windows need no more memory than short ones, and many windows no more than few.
TEST(Memory, LengthOfTheWindowChangesNothing) {
  Block p(70001, 1), g(70001, 0.5f);
  ga_context* ctx = nullptr;
  const ga_config c = config();
  Count count;
  ASSERT_OK(ga_context_create(&c, &ctx));
  const ga_optimizer o = optimizer(GA_OPTIMIZER_ADAMW);
  const int64_t n = 70001;
  ASSERT_OK(ga_group_add(ctx, &o, nullptr));
  ASSERT_OK(ga_param_add(ctx, 0, "p", p.data(), GA_F32, 1, &n, nullptr, nullptr));
  const void* list[] = {g.data()};
  ga_memory first{}, last{};
  first.struct_size = last.struct_size = sizeof first;
  ASSERT_OK(ga_context_memory(ctx, &first));
  int64_t after_short = 0;
  for (const int length : {1, 2, 1000}) {
    for (int k = 0; k < length; ++k) ASSERT_OK(ga_accumulate(ctx, list, 1, 1, nullptr));
    ASSERT_OK(ga_step(ctx, nullptr));
    if (length == 2) after_short = Count::bytes();
  }
  ASSERT_OK(ga_context_memory(ctx, &last));
  const int64_t after_long = Count::bytes();
  ga_context_destroy(ctx);
  count.stop();
  EXPECT_EQ(last.resident, last.total);
  first.resident = last.resident;
  EXPECT_EQ(0, memcmp(&first, &last, sizeof first));
  EXPECT_LT(after_long - after_short, 1 << 16) << "more than a list of weights";
}

// ---- Batch normalisation ------------------------------------------------------------------------

// Two layers of one mode that share beta, through a window; as in Life, a list of steps without
// allocations of their own.
class BnLife {
 public:
  BnLife(int32_t mode, int32_t policy, int32_t threads = 1) : mode_(mode) {
    config_ = config();
    config_.nonfinite = policy;
    config_.num_threads = threads;
    sgd_ = plain_sgd();
    EXPECT_OK(ga_bn_options_init(&options_, sizeof options_, GA_FLAVOR_TORCH));
    options_.mode = mode;
    for (Block* x : {&x_[0], &x_[1]}) {
      Random random(x == &x_[0] ? 1 : 2);
      for (float& number : *x) number = static_cast<float>(random.signed_unit());
    }
  }
  ~BnLife() { ga_context_destroy(ctx); }
  BnLife(const BnLife&) = delete;
  BnLife& operator=(const BnLife&) = delete;

  static constexpr int kAdds = 5;           // steps before the first layer
  static constexpr int kFirst = kAdds + 2;  // steps before the first window
  int steps() const { return kFirst + window_steps(); }
  int window_steps() const { return mode_ == GA_BN_WINDOW ? 22 : 16; }

  ga_status step(int number) {
    switch (number) {
      case 0:
        return ga_context_create(&config_, &ctx);
      case 1:
        return ga_group_add(ctx, &sgd_, nullptr);
      case 2:
      case 3:
      case 4:
        return ga_param_add(ctx, 0, kNames[number - 2], p[number - 2].data(), GA_F32, 1, &kChannels,
                            nullptr, nullptr);
      case 5:
      case 6:
        return ga_bn_add(ctx,
                         number == 5 ? "a layer with a name too long to be kept in place" : "b",
                         kChannels, number == 5 ? 0 : 2, 1, &options_, nullptr);
      default:
        return window(number - kFirst);
    }
  }

  // A step of a window of two micro-batches.
  ga_status window(int number) {
    if (number == window_steps() - 1) return ga_step(ctx, nullptr);
    if (mode_ == GA_BN_WINDOW) {
      if (number < 4) return accumulate(number % 2, number / 2);
      if (number < 6) return ga_bn_finalize(ctx, number - 4);
      if (number < 8) return forward(0, number - 6);
      number -= 8;
      if (number >= 12) return GA_OK;
      const bool second = number >= 6;
      const int k = number % 6 / 3;
      switch (number % 3) {
        case 0:
          return ga_micro_begin(ctx, k, 1, nullptr);
        case 1: {
          const ga_status status = second ? backward(0, k) : sum(0, k);
          return status == GA_OK ? (second ? backward(1, k) : sum(1, k)) : status;
        }
        default:
          return ga_micro_end(ctx);
      }
    }
    const int k = number / 7;
    if (number >= 14) return GA_OK;
    switch (number % 7) {
      case 0:
      case 1:
        return forward(number % 7, k);
      case 2:
        return ga_micro_begin(ctx, k, 1, nullptr);
      case 3:
        return backward(0, k);
      case 4:
        return sum(1, k);
      case 5:
        return backward(1, k);
      default:
        return ga_micro_end(ctx);
    }
  }
  ga_status accumulate(ga_bn bn, int k) {
    return ga_bn_accumulate(ctx, bn, x_[k].data(), kSamples, 1);
  }
  ga_status forward(ga_bn bn, int k) {
    return ga_bn_forward(ctx, bn, x_[k].data(), kSamples, 1, y[k].data());
  }
  ga_status sum(ga_bn bn, int k) {
    return ga_bn_backward_accumulate(ctx, bn, x_[k].data(), x_[1 - k].data(), kSamples, 1);
  }
  ga_status backward(ga_bn bn, int k) {
    return ga_bn_backward(ctx, bn, x_[k].data(), x_[1 - k].data(), kSamples, 1, dx[k].data());
  }

  static constexpr int64_t kChannels = 2000, kSamples = 3;  // so large that memory is mapped
  static constexpr size_t kCount = kChannels * kSamples;
  ga_context* ctx = nullptr;
  Block p[3] = {Block(kChannels, 1), Block(kChannels, 0), Block(kChannels, 1)};
  Block y[2] = {Block(kCount), Block(kCount)}, dx[2] = {Block(kCount), Block(kCount)};

 private:
  static constexpr const char* kNames[] = {"gamma", "beta", "another gamma"};
  const int32_t mode_;
  ga_config config_;
  ga_optimizer sgd_;
  ga_bn_options options_;
  Block x_[2] = {Block(kCount), Block(kCount)};
};

// The k-th allocation of each step fails, alone or together with all later ones.
TEST(Memory, BatchNormAtEveryPoint) {
  std::set<int> could_fail;
  for (const auto& [mode, policy] :
       {std::pair<int32_t, int32_t>(GA_BN_MICRO, GA_NONFINITE_SKIP_STEP),
        {GA_BN_MICRO, GA_NONFINITE_DROP_MICRO},
        {GA_BN_WINDOW, GA_NONFINITE_SKIP_STEP}}) {
    BnLife calm(mode, policy);
    for (int s = 0; s < calm.steps(); ++s) ASSERT_OK(calm.step(s)) << "step " << s;
    for (const bool once : {true, false}) {
      for (int failing = BnLife::kAdds; failing < calm.steps(); ++failing) {
        for (int64_t k = 0;; ++k) {
          ASSERT_LT(k, 1000) << "no end of allocations";
          SCOPED_TRACE(testing::Message() << "mode " << mode << ", policy " << policy << ", step "
                                          << failing << ", allocation " << k);
          BnLife t(mode, policy);
          for (int s = 0; s < failing; ++s) ASSERT_OK(t.step(s)) << s;
          const ga_window_info window_before = window(t.ctx);
          const ga_memory memory_before = memory(t.ctx);
          ga_status status;
          int64_t calls;
          {
            const Count count(k, once ? k + 1 : INT64_MAX);
            status = t.step(failing);
            calls = Count::calls();
          }
          int next = failing + 1;
          if (status == GA_ERROR_FAULT) {  // no memory for the gradient of gamma, half-way
            could_fail.insert(failing);
            ASSERT_EQ(policy, GA_NONFINITE_DROP_MICRO);
            ASSERT_EQ(window(t.ctx).state, GA_WINDOW_INVALID);
            ASSERT_OK(ga_discard(t.ctx));
            next = BnLife::kFirst;
          } else if (status != GA_OK) {
            could_fail.insert(failing);
            ASSERT_EQ(status, GA_ERROR_OUT_OF_MEMORY) << ga_last_error();
            const ga_window_info window_after = window(t.ctx);
            const ga_memory memory_after = memory(t.ctx);
            ASSERT_EQ(0, memcmp(&window_before, &window_after, sizeof window_after));
            ASSERT_EQ(0, memcmp(&memory_before, &memory_after, sizeof memory_after));
            next = failing;
          }
          for (int s = next; s < t.steps(); ++s) ASSERT_OK(t.step(s)) << s;
          for (int i = 0; i < 3; ++i) ASSERT_EQ(t.p[i], calm.p[i]);
          for (int i = 0; i < 2; ++i) ASSERT_TRUE(t.y[i] == calm.y[i] && t.dx[i] == calm.dx[i]);
          if (status == GA_OK && calls <= k) break;
        }
      }
    }
  }
  for (const int s : {5, 6}) EXPECT_TRUE(could_fail.count(s)) << "step " << s;
}

// ga_context_memory includes what ga_bn_add allocates, and windows allocate nothing more.
TEST(Memory, BatchNormIsCounted) {
  for (const int32_t dtype : {GA_F32, GA_BF16, GA_F64}) {
    ga_context* ctx = nullptr;
    const ga_config c = config();
    ga_bn_options o;
    ASSERT_OK(ga_bn_options_init(&o, sizeof o, GA_FLAVOR_TORCH));
    o.dtype = dtype;
    Count count;
    ASSERT_OK(ga_context_create(&c, &ctx));
    ga_memory before{}, after{};
    before.struct_size = after.struct_size = sizeof before;
    ASSERT_OK(ga_context_memory(ctx, &before));
    const int64_t live = Count::bytes();
    ASSERT_OK(ga_bn_add(ctx, "first", 100000, -1, -1, &o, nullptr));
    ASSERT_OK(ga_bn_add(ctx, "second", 50000, -1, -1, &o, nullptr));
    const int64_t taken = Count::bytes() - live;
    ASSERT_OK(ga_context_memory(ctx, &after));
    ga_context_destroy(ctx);
    const int64_t left = Count::bytes();
    count.stop();
    EXPECT_EQ(before.batch_norm, 0);
    EXPECT_EQ(after.batch_norm, 150000 * (dtype == GA_F64 ? 128 : 120));
    EXPECT_EQ(after.total - before.total, after.batch_norm + after.workspace - before.workspace);
    EXPECT_NEAR(static_cast<double>(taken), static_cast<double>(after.total - before.total),
                0.01 * static_cast<double>(taken));
    EXPECT_EQ(left, 0) << "ga_context_destroy must free everything";
  }
}

TEST(Memory, WindowsOfBatchNormAllocateNothing) {
  for (const int32_t mode : {GA_BN_MICRO, GA_BN_WINDOW, GA_BN_CUMULATIVE}) {
    for (const int32_t threads : {1, 2}) {
      for (const int32_t policy : {GA_NONFINITE_SKIP_STEP, GA_NONFINITE_DROP_MICRO}) {
        if (policy == GA_NONFINITE_DROP_MICRO && mode != GA_BN_MICRO) continue;
        BnLife life(mode, policy, threads);
        for (int s = 0; s < BnLife::kFirst; ++s) ASSERT_OK(life.step(s));
        for (int w = 0; w < 12; ++w) {
          const Count count;
          for (int s = 0; s < life.window_steps(); ++s) {
            if (w % 5 == 3 && s + 1 == life.window_steps()) {
              ASSERT_OK(ga_discard(life.ctx));
            } else {
              ASSERT_OK(life.window(s)) << s;
            }
          }
          if (w >= 2) {
            ASSERT_EQ(Count::calls(), 0) << "window " << w << ", mode " << mode;
          }
        }
      }
    }
  }
}

// ---- Saving and loading -------------------------------------------------------------------------

// A store of the program's own, which allocates nothing.
struct Store {
  Bytes bytes;
  static int32_t write(void* user, int64_t offset, const void* data, size_t size) {
    Bytes& bytes = static_cast<Store*>(user)->bytes;
    if (static_cast<size_t>(offset) + size > bytes.size()) return 1;
    memcpy(bytes.data() + offset, data, size);
    return 0;
  }
  static int32_t read(void* user, int64_t offset, void* data, size_t size) {
    memcpy(data, static_cast<Store*>(user)->bytes.data() + offset, size);
    return 0;
  }
};

struct Attempt {
  const char* name;
  std::function<ga_status(ga_context*)> run;
};

// Makes the call with its k-th allocation failing, for each k until there are no more, alone or
// together with all later ones. on_failure() is called after each failed call, on_success() after each
// other one. Returns how many calls failed.
template <class OnFailure, class OnSuccess>
int64_t at_every_allocation(bool once, const std::function<ga_status()>& call,
                            OnFailure&& on_failure, OnSuccess&& on_success) {
  int64_t failures = 0;
  for (int64_t k = 0; k < 5000; ++k) {
    SCOPED_TRACE(testing::Message() << "allocation " << k << (once ? "" : " and all later ones"));
    ga_status status;
    int64_t calls;
    {
      const Count count(k, once ? k + 1 : INT64_MAX);
      status = call();
      calls = Count::calls();
    }
    if (status == GA_OK) {
      on_success();
      if (calls <= k) return failures;
    } else {
      ++failures;
      EXPECT_EQ(status, GA_ERROR_OUT_OF_MEMORY) << ga_last_error();
      on_failure();
    }
    if (testing::Test::HasFailure()) return failures;
  }
  ADD_FAILURE() << "no end of allocations";
  return failures;
}

class FailingState : public testing::TestWithParam<std::tuple<With, bool> > {};
INSTANTIATE_TEST_SUITE_P(All, FailingState,
                         testing::Combine(testing::ValuesIn(kRuns), testing::Bool()));

// A save that runs out of memory changes neither the context nor the file.
TEST_P(FailingState, SavesAtEveryPoint) {
  const auto [with, once] = GetParam();
  SmallRun calm(with);
  calm.train();
  const Bytes bytes = saved(calm.ctx);
  calm.go_on();

  const Folder folder(in_memory());
  const std::string path = folder / "x";
  Store store;
  const Attempt attempts[] = {
      {"ga_save_to_memory",
       [&](ga_context* ctx) {
         size_t size;
         return ga_save_to_memory(ctx, nullptr, store.bytes.data(), store.bytes.size(), &size);
       }},
      {"ga_save", [&](ga_context* ctx) { return ga_save(ctx, path.c_str(), nullptr); }},
      {"ga_state_write",
       [&](ga_context* ctx) { return ga_state_write(ctx, Store::write, &store, nullptr); }},
  };
  for (const Attempt& attempt : attempts) {
    SCOPED_TRACE(attempt.name);
    const bool to_file = strcmp(attempt.name, "ga_save") == 0;
    SmallRun t(with);
    t.train();
    const std::vector<double> values = t.values();
    const ga_window_info window_before = window(t.ctx);
    const ga_memory memory_before = memory(t.ctx);
    const auto unchanged = [&] {
      const ga_window_info window_after = window(t.ctx);
      const ga_memory memory_after = memory(t.ctx);
      ASSERT_EQ(0, memcmp(&window_before, &window_after, sizeof window_after));
      ASSERT_EQ(0, memcmp(&memory_before, &memory_after, sizeof memory_after));
      ASSERT_EQ(t.values(), values);
      if (to_file) put(path, "old");
      store.bytes.assign(bytes.size(), '?');
    };
    unchanged();
    const std::set<int> open_before = descriptors();
    const int64_t failures = at_every_allocation(
        once, [&] { return attempt.run(t.ctx); },
        [&] {
          if (to_file) {
            ASSERT_EQ(contents(path), "old");
            ASSERT_EQ(folder.names(), std::set<std::string>{"x"});
            ASSERT_EQ(descriptors(), open_before);
          }
          unchanged();
        },
        [&] {
          if (to_file) {
            const std::string text = contents(path);
            store.bytes.assign(text.begin(), text.end());
            ASSERT_EQ(folder.names(), std::set<std::string>{"x"});
          }
          ASSERT_EQ(store.bytes, bytes);
          unchanged();
        });
    EXPECT_GT(failures, 20);
    t.go_on();
    EXPECT_EQ(t.values(), calm.values());
    if (HasFailure()) return;
  }
}

// A load that runs out of memory changes nothing, and never returns GA_ERROR_FAULT: all memory is
// there before the context is changed.
TEST_P(FailingState, LoadsAtEveryPoint) {
  const auto [with, once] = GetParam();
  SmallRun calm(with);
  calm.train();
  Store store = {saved(calm.ctx)};
  const Bytes& bytes = store.bytes;
  calm.go_on();

  const Folder folder(in_memory());
  const std::string path = folder / "x";
  put(path, std::string(bytes.begin(), bytes.end()));
  ga_state_options take;
  ASSERT_OK(ga_state_options_init(&take, sizeof take));
  take.settings = GA_SETTINGS_TAKE;
  const auto from_memory = [&](ga_context* ctx) { return load(ctx, bytes); };
  const auto from_file = [&](ga_context* ctx) { return ga_load(ctx, path.c_str(), nullptr); };
  const auto by_function = [&](ga_context* ctx) {
    return ga_state_read(ctx, Store::read, &store, static_cast<int64_t>(bytes.size()), nullptr);
  };
  const auto with_settings = [&](ga_context* ctx) { return load(ctx, bytes, &take); };
  struct Load {
    const char* name;
    std::function<ga_status(ga_context*)> run;
    bool other, trained;
  };
  const Load loads[] = {
      {"ga_load_from_memory", from_memory, false, true},
      {"ga_load_from_memory into a new context", from_memory, false, false},
      {"ga_load", from_file, false, true},
      {"ga_state_read", by_function, false, true},
      {"GA_SETTINGS_TAKE", with_settings, true, true},
      {"GA_SETTINGS_TAKE into a new context", with_settings, true, false},
  };
  for (const Load& l : loads) {
    SCOPED_TRACE(l.name);
    std::optional<SmallRun> t;
    Bytes before;
    std::vector<double> values;
    ga_window_info window_before = {};
    ga_memory memory_before = {};
    const auto prepare = [&] {
      t.emplace(with, l.other);
      if (l.trained) t->windows(7, 10);
      before = saved(t->ctx);
      values = t->values();
      window_before = window(t->ctx);
      memory_before = memory(t->ctx);
    };
    prepare();
    const int64_t failures = at_every_allocation(
        once, [&] { return l.run(t->ctx); },
        [&] {
          const ga_window_info window_after = window(t->ctx);
          const ga_memory memory_after = memory(t->ctx);
          ASSERT_EQ(0, memcmp(&window_before, &window_after, sizeof window_after));
          if (l.trained) {  // a new context may have got its arrays
            ASSERT_EQ(0, memcmp(&memory_before, &memory_after, sizeof memory_after));
          }
          ASSERT_EQ(t->values(), values);
          ASSERT_EQ(saved(t->ctx), before);
        },
        [&] {
          ASSERT_EQ(saved(t->ctx), bytes);
          prepare();
        });
    EXPECT_GT(failures, 50);
    if (HasFailure()) return;
    EXPECT_OK(l.run(t->ctx));
    t->go_on();
    EXPECT_EQ(t->values(), calm.values());
    if (HasFailure()) return;
  }
}

// The windows of two ranks, which come together on one context.
TEST_P(FailingState, WindowsComeTogetherAtEveryPoint) {
  const auto [with, once] = GetParam();
  std::vector<Bytes> files;
  for (const uint64_t micro : {4, 5}) {
    SmallRun run(with);
    run.windows(0, 2);
    run.accumulate(micro);
    files.push_back(saved(run.ctx));
  }
  const Bytes bytes = file_of_ranks(files);
  SmallRun calm(with);
  ASSERT_OK(load(calm.ctx, bytes));
  const Bytes joined = saved(calm.ctx);
  std::optional<SmallRun> t;
  Bytes before;
  const auto prepare = [&] {
    t.emplace(with);
    t->windows(7, 10);
    before = saved(t->ctx);
  };
  prepare();
  const int64_t failures = at_every_allocation(
      once, [&] { return load(t->ctx, bytes); }, [&] { ASSERT_EQ(saved(t->ctx), before); },
      [&] {
        ASSERT_EQ(saved(t->ctx), joined);
        prepare();
      });
  EXPECT_GT(failures, 50);
}

// A load that would have taken settings from the file and runs out of memory leaves those of the context,
// and all that depends on them.
TEST_P(FailingState, SettingsAreNotTakenHalfWay) {
  const auto [with, once] = GetParam();
  SmallRun source(with);
  source.train();
  const Bytes bytes = saved(source.ctx);
  ga_state_options take;
  ASSERT_OK(ga_state_options_init(&take, sizeof take));
  take.settings = GA_SETTINGS_TAKE;
  for (const bool trained : {true, false}) {
    const auto make = [&](std::optional<SmallRun>& run) {
      run.emplace(with, true);
      if (trained) run->windows(7, 9);
    };
    std::optional<SmallRun> calm, t;
    make(calm);
    calm->windows(9, 11);
    ga_status status = GA_ERROR_OUT_OF_MEMORY;
    for (int64_t k = 0; status != GA_OK; ++k) {
      SCOPED_TRACE(testing::Message() << "allocation " << k << (trained ? ", trained" : ""));
      make(t);
      int64_t calls;
      {
        const Count count(k, once ? k + 1 : INT64_MAX);
        status = load(t->ctx, bytes, &take);
        calls = Count::calls();
      }
      if (status == GA_OK && calls > k) {
        status = GA_ERROR_OUT_OF_MEMORY;  // succeeds without this allocation
        continue;
      }
      if (status == GA_OK) break;
      t->windows(9, 11);
      ASSERT_EQ(t->values(), calm->values());
    }
  }
}

TEST(Memory, ANoteAtEveryPoint) {
  const Folder folder(in_memory());
  const std::string path = folder / "x", note(200, 'n');
  SmallRun t(With::kRows);
  t.train();
  ga_state_options o;
  ASSERT_OK(ga_state_options_init(&o, sizeof o));
  o.note = note.c_str();
  ASSERT_OK(ga_save(t.ctx, path.c_str(), &o));
  for (const bool once : {true, false}) {
    char text[300] = "";
    size_t size = 0;
    const std::set<int> open_before = descriptors();
    const int64_t failures = at_every_allocation(
        once, [&] { return ga_state_note(path.c_str(), text, sizeof text, &size); },
        [&] {
          ASSERT_STREQ(text, "");
          ASSERT_EQ(descriptors(), open_before);
        },
        [&] {
          ASSERT_EQ(text, note);
          text[0] = '\0';
        });
    EXPECT_GT(failures, 20);
  }
}

// ---- Several ranks ------------------------------------------------------------------------------

// Layers that ranks have in pieces, and what becomes of them in a window: clipped by units, or not.
struct Pieces {
  Pieces() {
    std::fill_n(g.begin(), kRows, 100.0f);  // one row is clipped more than others
    ga_optimizer lars = optimizer(GA_OPTIMIZER_LARS);
    lars.weight_decay = 0.01;
    group = ctx.group(lars);
    add(0);
    const ga_comm_options options = comm_options();
    EXPECT_OK(ga_context_set_comm(ctx, comm, &options));
    EXPECT_OK(ga_prepare(ctx));
  }
  void add(size_t i) {
    EXPECT_EQ(ctx.param(group, std::to_string(i), p[i].data(), ref::Shape{kRows, kRows}),
              static_cast<ga_param>(i));
  }
  ga_status clip_by_units() {
    const ga_clip by_units = clip(GA_CLIP_AGC, 0);
    return ga_context_set_clip(ctx, &by_units);
  }
  // One for each parameter that has been added.
  void window(size_t params) {
    ctx.accumulate(std::vector<const void*>(params, g.data()));
    step(ctx);
  }

  static constexpr int64_t kRows = 300;
  OneRank comm;
  Context ctx;
  ga_group group;
  Block p[2] = {Block(kRows * kRows, 0.5f), Block(kRows*kRows, -0.25f)}, g = p[0];
};

TEST(Memory, PiecesAtEveryPoint) {
  Pieces unclipped, clipped, both;
  unclipped.window(1);
  EXPECT_OK(clipped.clip_by_units());
  clipped.window(1);
  both.add(1);
  both.window(2);
  EXPECT_NE(unclipped.p[0], clipped.p[0]);
  for (const bool once : {true, false}) {
    std::optional<Pieces> t(std::in_place);
    int64_t failures = at_every_allocation(
        once, [&] { return t->clip_by_units(); },
        [&] {
          t->window(1);
          ASSERT_EQ(t->p[0], unclipped.p[0]);
          t.emplace();
        },
        [&] {
          t->window(1);
          ASSERT_EQ(t->p[0], clipped.p[0]);
          t.emplace();
        });
    EXPECT_GT(failures, 5);
    const auto with_another = [&] {
      t.emplace();
      t->add(1);
    };
    with_another();
    failures = at_every_allocation(
        once, [&] { return ga_prepare(t->ctx); },
        [&] {
          t->window(2);
          ASSERT_TRUE(t->p[0] == both.p[0] && t->p[1] == both.p[1]);
          with_another();
        },
        [&] {
          t->window(2);
          ASSERT_TRUE(t->p[0] == both.p[0] && t->p[1] == both.p[1]);
          with_another();
        });
    EXPECT_GT(failures, 5);
  }
}

// ---- A million windows --------------------------------------------------------------------------

// Memory of this process that is resident, in bytes.
int64_t resident() {
  long pages = 0, all = 0;
  FILE* const file = fopen("/proc/self/statm", "r");
  if (!file || fscanf(file, "%ld %ld", &all, &pages) != 2) ADD_FAILURE() << "no statm";
  if (file) fclose(file);
  return int64_t{pages} * sysconf(_SC_PAGESIZE);
}

// Contexts that update ahead have the memory of both sets of arrays when ga_prepare returns; that of others comes when
// it is written. What has come counts as resident.
TEST(Memory, PreparedContextsThatUpdateAheadHaveTheirArrays) {
  if (on_device()) GTEST_SKIP() << "updates ahead are for the CPU";
  constexpr int64_t kCount = 4 << 20;
  constexpr int64_t kArray = kCount * 4;
  for (const bool eager : {false, true}) {
    ga_config c = config();
    c.eager = eager;
    Context ctx(c);
    std::vector<float> p(kCount, 1);
    ctx.param(ctx.group(optimizer(GA_OPTIMIZER_ADAMW)), "p", p.data(), kCount);
    ga_ema average;
    ASSERT_OK(ga_ema_init(&average, sizeof average));
    ASSERT_OK(ga_context_set_ema(ctx, &average));
    const int64_t before = resident();
    ASSERT_OK(ga_prepare(ctx));
    const int64_t come = resident() - before;
    ga_memory m;
    m.struct_size = sizeof m;
    ASSERT_OK(ga_context_memory(ctx, &m));
    const int64_t awaited = m.total - m.resident;
    if (eager) {  // but for the accumulator: three arrays, and four of the second set
      EXPECT_GT(come, 7 * kArray - kArray / 2);
      EXPECT_LT(awaited, kArray + kArray / 2);
    } else {
      EXPECT_LT(come, kArray / 2);
      EXPECT_GT(awaited, 4 * kArray - kArray / 2);
    }
  }
}

// One parameter of four elements, with what a case adds.
struct Tiny {
  Tiny() {
    ctx.group(optimizer(GA_OPTIMIZER_ADAMW));
    ctx.param(0, "p", p.data(), 4);
  }
  explicit Tiny(const ga_config& config) : ctx(config) {
    ctx.group(optimizer(GA_OPTIMIZER_ADAMW));
    ctx.param(0, "p", p.data(), 4);
  }

  // A window of one or two micro-batches.
  ga_status window(int64_t number) {
    for (int64_t k = 0; k <= number % 2; ++k) {
      const float sign = (number + k) % 3 == 0 ? -0.5f : 0.25f;
      const float gradient[] = {sign, -sign, 1, sign};
      const void* list[] = {gradient, nullptr, nullptr};
      if (layer >= 0) {
        if (const ga_status status = ga_micro_begin(ctx, -1, 1, nullptr)) return status;
        if (const ga_status status = ga_accumulate_part(ctx, 0, gradient)) return status;
        float y[4], dx[4];
        if (const ga_status status = ga_bn_forward(ctx, layer, gradient, 2, 1, y)) return status;
        if (const ga_status status = ga_bn_backward(ctx, layer, gradient, y, 2, 1, dx))
          return status;
        if (const ga_status status = ga_micro_end(ctx)) return status;
      } else if (const ga_status status = ga_accumulate(ctx, list, 1, 1, nullptr)) {
        return status;
      }
    }
    return ga_step(ctx, nullptr);
  }

  Block p = Block(4, 0.5f), affine = Block(4, 1);
  Context ctx;
  ga_bn layer = -1;
};

// Runs so many windows, and saves and loads after every thousand of them. Memory does not grow, and
// windows allocate nothing but soon after the start or a load.
void soak(Tiny& tiny, int64_t windows) {
  Bytes bytes;
  int64_t warm = 0;
  size_t size = 0;
  for (int64_t w = 0; w < windows; ++w) {
    {
      const Count count;
      ASSERT_OK(tiny.window(w)) << "window " << w;
      if (w % 1000 > 3) {
        ASSERT_EQ(Count::calls(), 0) << "window " << w;
      }
    }
    if (w % 1000 != 999) continue;
    // In the middle of a window, every other time.
    const bool open = w % 2000 == 999;
    if (open) {
      ASSERT_OK(ga_micro_begin(tiny.ctx, -1, 1, nullptr));
      ASSERT_OK(ga_micro_end(tiny.ctx));
    }
    ASSERT_OK(ga_save_to_memory(tiny.ctx, nullptr, nullptr, 0, &size));
    bytes.resize(size);
    ASSERT_OK(ga_save_to_memory(tiny.ctx, nullptr, bytes.data(), size, &size));
    ASSERT_OK(ga_discard(tiny.ctx));
    ASSERT_OK(load(tiny.ctx, bytes));
    if (open) {
      ASSERT_OK(ga_discard(tiny.ctx));
    }
    if (w + 1 == windows / 10) warm = resident();
  }
  const int64_t end = resident();
  EXPECT_NEAR(static_cast<double>(end), static_cast<double>(warm),
              std::max(0.01 * static_cast<double>(warm), 256.0 * 1024));
  ga_window_info info = window(tiny.ctx);
  EXPECT_EQ(info.windows, windows);
}

constexpr int64_t kWindows = 1000000;

TEST(Memory, AMillionWindowsOfAnEma) {
  Tiny tiny;
  ga_ema ema;
  ASSERT_OK(ga_ema_init(&ema, sizeof ema));
  ASSERT_OK(ga_context_set_ema(tiny.ctx, &ema));
  const ga_clip norm = clip(GA_CLIP_GLOBAL, 0.5);
  ASSERT_OK(ga_context_set_clip(tiny.ctx, &norm));
  soak(tiny, kWindows);
}

TEST(Memory, AMillionWindowsOfAScalerAndTheNoiseScale) {
  ga_config c = config();
  c.noise_scale = 1;
  Tiny tiny(c);
  ga_loss_scaler scaler;
  ASSERT_OK(ga_loss_scaler_init(&scaler, sizeof scaler));
  scaler.growth_interval = 1 << 20;
  ASSERT_OK(ga_context_set_loss_scaler(tiny.ctx, &scaler));
  soak(tiny, kWindows);
}

TEST(Memory, AMillionWindowsOfBatchNormalisation) {
  Tiny tiny;
  const ga_param gamma = tiny.ctx.param(0, "gamma", tiny.affine.data(), 2);
  const ga_param beta = tiny.ctx.param(0, "beta", tiny.affine.data() + 2, 2);
  const ga_bn_options o = bn_options(GA_BN_MICRO);
  ASSERT_OK(ga_bn_add(tiny.ctx, "bn", 2, gamma, beta, &o, &tiny.layer));
  soak(tiny, kWindows);
}

}  // namespace
}  // namespace ga::test

#endif  // GA_TSAN
