// SPDX-License-Identifier: Apache-2.0
//
// gradaccum.hpp: what it adds to the C functions. Numbers are easy to follow by hand: the optimizer
// is p -= lr * g, unless a test says otherwise. That every C function can be reached is the test
// cpp.every_function.
//
// This program replaces operator new, to count allocations.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>
#if __has_include(<span>)
#include <span>
#endif

#include "build.hpp"
#include "gradaccum/gradaccum.hpp"

namespace {

std::atomic<std::int64_t> allocations{0};  // since the program started
std::atomic<std::int64_t> live{0};         // allocated and not yet freed

void* try_allocate(std::size_t size) noexcept {
  void* const p = std::malloc(size ? size : 1);
  ++allocations;
  if (p) ++live;
  return p;
}

void* allocate(std::size_t size) {
  if (void* p = try_allocate(size)) return p;
  throw std::bad_alloc();
}

void* allocate(std::size_t size, std::align_val_t alignment) {
  ++allocations;
  ++live;
  const auto unit = static_cast<std::size_t>(alignment);
  if (void* p = std::aligned_alloc(unit, (size + unit - 1) / unit * unit)) return p;
  throw std::bad_alloc();
}

void release(void* p) {
  if (p) --live;
  std::free(p);
}

}  // namespace

void* operator new(std::size_t size) { return allocate(size); }
void* operator new[](std::size_t size) { return allocate(size); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return allocate(size, alignment);
}
void* operator new[](std::size_t size, std::align_val_t alignment) {
  return allocate(size, alignment);
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept { return try_allocate(size); }
void* operator new[](std::size_t size, const std::nothrow_t&) noexcept {
  return try_allocate(size);
}
void operator delete(void* p) noexcept { release(p); }
void operator delete[](void* p) noexcept { release(p); }
void operator delete(void* p, std::size_t) noexcept { release(p); }
void operator delete[](void* p, std::size_t) noexcept { release(p); }
void operator delete(void* p, std::align_val_t) noexcept { release(p); }
void operator delete[](void* p, std::align_val_t) noexcept { release(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { release(p); }
void operator delete[](void* p, std::size_t, std::align_val_t) noexcept { release(p); }

// A program's own bfloat16: the upper half of a float.
namespace my {

struct bfloat16 {
  std::uint16_t bits;
};

}  // namespace my

template <>
struct gradaccum::DtypeOf<my::bfloat16> {
  static constexpr ga_dtype value = GA_BF16;
};

namespace {

using gradaccum::BatchNorm;
using gradaccum::Config;
using gradaccum::Context;
using gradaccum::EmaScope;
using gradaccum::Error;
using gradaccum::Group;
using gradaccum::MicroBatch;
using gradaccum::Param;
using gradaccum::Task;
using Floats = std::vector<float>;

Config one_thread() {
  Config config;
  config.num_threads = 1;
  return config;
}

ga_optimizer sgd(double lr = 1) {
  ga_optimizer optimizer = gradaccum::default_optimizer(GA_OPTIMIZER_SGD);
  optimizer.lr = lr;
  return optimizer;
}

// The status of the Error that call() throws; GA_OK if it throws none.
template <typename Call>
ga_status status_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.status();
  }
  return GA_OK;
}

// Two parameters under p -= g.
struct Two {
  Floats a{0, 0}, b{0};
  const Floats da{1, 2}, db{4};
  Context context{one_thread()};
  Group group = context.add_group(sgd());
  Param pa = context.add_param(group, "a", a.data(), {2});
  Param pb = context.add_param(group, "b", b.data(), {1});

  void contribute(MicroBatch& micro) const {
    micro.accumulate_part(pa, da.data());
    micro.accumulate_part(pb, db.data());
  }
  // The parameters after one step of the mean gradient.
  void expect_stepped() const {
    EXPECT_EQ(a, (Floats{-1, -2}));
    EXPECT_EQ(b, (Floats{-4}));
  }
};

// ---- Types --------------------------------------------------------------------------------------

template <typename Id, typename = void>
constexpr bool has_lr = false;
template <typename Id>
constexpr bool
    has_lr<Id, std::void_t<decltype(std::declval<Context&>().set_lr(std::declval<Id>(), 0.1))>> =
        true;
static_assert(has_lr<Group>);
static_assert(!has_lr<Param> && !has_lr<BatchNorm> && !has_lr<ga_group>);

template <typename Id, typename = void>
constexpr bool has_contributions = false;
template <typename Id>
constexpr bool
    has_contributions<Id, std::void_t<decltype(std::declval<MicroBatch&>().accumulate_part(
                              std::declval<Id>(), nullptr))>> = true;
static_assert(has_contributions<Param>);
static_assert(!has_contributions<Group> && !has_contributions<BatchNorm> &&
              !has_contributions<ga_param>);

static_assert(!std::is_convertible_v<Group, ga_group> && !std::is_convertible_v<Group, Param>);

static_assert(!std::is_copy_constructible_v<Context> && !std::is_copy_assignable_v<Context>);
static_assert(std::is_nothrow_move_constructible_v<Context>);
static_assert(std::is_nothrow_move_assignable_v<Context>);
static_assert(!std::is_copy_constructible_v<MicroBatch> && !std::is_move_assignable_v<MicroBatch>);

static_assert(gradaccum::dtype_of<const float> == GA_F32);
static_assert(gradaccum::dtype_of<double> == GA_F64);
static_assert(gradaccum::dtype_of<my::bfloat16> == GA_BF16);

TEST(Types, IdsCountUp) {
  Two two;
  EXPECT_EQ(id(two.group), 0);
  EXPECT_EQ(id(two.pb), 1);
  EXPECT_EQ(two.context.find_param("b"), two.pb);
  EXPECT_EQ(two.context.param_info(two.pb).group, id(two.group));
}

// 16-bit numbers: 0x4040 is 3, 0x3f80 is 1, 0x4020 is 2.5.
TEST(Types, OwnBfloat16) {
  std::vector<my::bfloat16> p = {{0x4040}}, g = {{0x3f80}}, average = {{0}};
  Context context(one_thread());
  context.set_ema(gradaccum::default_ema());
  const Param param = context.add_param(context.add_group(sgd(0.5)), "p", p.data(), {1});
  EXPECT_EQ(context.param_info(param).dtype, GA_BF16);
  context.accumulate(std::vector<my::bfloat16*>{g.data()});
  context.step();
  EXPECT_EQ(p[0].bits, 0x4020);
  context.ema_copy_to(param, average.data());
  EXPECT_EQ(average[0].bits, 0x4020);
}

// ---- Whole micro-batches ------------------------------------------------------------------------

// Accumulates the gradients of Two, of weight 3, and steps.
template <typename Gradients>
void expect_accepted(const char* what, const Gradients& gradients) {
  SCOPED_TRACE(what);
  Two two;
  two.context.accumulate(gradients, 3);
  EXPECT_EQ(two.context.step().weight, 3);
  two.expect_stepped();
}

TEST(Accumulate, Containers) {
  Floats a{1, 2}, b{4};
  float* const array[] = {a.data(), b.data()};
  expect_accepted("vector of float*", std::vector<float*>{a.data(), b.data()});
  expect_accepted("vector of const float*", std::vector<const float*>{a.data(), b.data()});
  expect_accepted("vector of void*", std::vector<void*>{a.data(), b.data()});
  expect_accepted("vector of const void*", std::vector<const void*>{a.data(), b.data()});
  expect_accepted("std::array", std::array<const float*, 2>{a.data(), b.data()});
  expect_accepted("array", array);
}

TEST(Accumulate, Span) {
#ifdef __cpp_lib_span
  Floats a{1, 2}, b{4};
  std::vector<float*> pointers = {a.data(), b.data()};
  expect_accepted("span of float*", std::span<float*>(pointers));
  expect_accepted("span of float* const", std::span<float* const>(pointers));
#else
  GTEST_SKIP() << "the standard library has no std::span";
#endif
}

TEST(Accumulate, PointerAndCount) {
  Two two;
  Floats a{1, 2}, b{4};
  float* pointers[] = {a.data(), b.data()};
  float** const gradients = pointers;
  two.context.accumulate(gradients, 2, 3.0);
  EXPECT_EQ(two.context.step().weight, 3);
  two.expect_stepped();
}

TEST(Accumulate, Braces) {
  Two two;
  two.context.accumulate({two.da.data(), two.db.data()}, 3);
  EXPECT_EQ(two.context.step().weight, 3);
  two.expect_stepped();
}

TEST(Accumulate, NullIsNoGradient) {
  Two two;
  Floats b{4};
  two.context.accumulate(std::vector<float*>{nullptr, b.data()});
  two.context.step();
  EXPECT_EQ(two.a, (Floats{0, 0}));
  EXPECT_EQ(two.b, (Floats{-4}));
}

TEST(Accumulate, ParametersAddedLater) {
  Two two;
  Floats c{0}, dc{8};
  std::vector<const float*> gradients = {two.da.data(), two.db.data()};
  two.context.accumulate(gradients);
  two.context.step();
  two.context.add_param(two.group, "c", c.data(), {1});
  gradients.push_back(dc.data());
  two.context.accumulate(gradients);
  two.context.step();
  EXPECT_EQ(c, (Floats{-8}));
  gradients.pop_back();
  EXPECT_EQ(status_of([&] { two.context.accumulate(gradients); }), GA_ERROR_INVALID_ARGUMENT);
}

TEST(Accumulate, Options) {
  Two two;
  ga_micro_options options = gradaccum::default_micro_options();
  options.loss_scale = 0.5;
  two.context.accumulate({two.da.data(), two.db.data()}, 1, &options);
  two.context.step();
  EXPECT_EQ(two.a, (Floats{-2, -4}));
}

TEST(Accumulate, NoAllocationAfterTheFirstWindow) {
  Two two;
  Floats da{1, 2}, db{4};
  const std::vector<float*> gradients = {da.data(), db.data()};
  const auto window = [&] {
    two.context.accumulate(gradients, 2);
    two.context.accumulate({da.data(), db.data()}, 2);
    {
      MicroBatch micro = two.context.micro_begin(-1, 2);
      two.contribute(micro);
    }
    {
      MicroBatch micro = two.context.micro_begin(-1, 2);
      gradaccum::Accumulator a = micro.acquire(two.pa);
      for (std::size_t i = 0; i < 2; ++i) {
        a.data<float>()[i] += static_cast<float>(a->alpha) * da[i];
      }
      micro.accumulate_part(two.pb, db.data());
    }
    two.context.params_ready({two.pa, two.pb});
    const ga_step_result result = two.context.step();
    return result.outcome == GA_STEP_APPLIED && two.context.step_result().steps == result.steps &&
           two.context.window().state == GA_WINDOW_EMPTY && two.context.lr(two.group) == 1;
  };
  EXPECT_TRUE(window());
  const std::int64_t before = allocations;
  const bool applied = window();
  EXPECT_EQ(allocations - before, 0);
  EXPECT_TRUE(applied);
  EXPECT_EQ(two.a, (Floats{-2, -4}));
}

// ---- Micro-batches by part ----------------------------------------------------------------------

TEST(MicroBatchScope, EndsTheMicroBatch) {
  Two two;
  for (int i = 0; i < 2; ++i) {
    MicroBatch micro = two.context.micro_begin(-1);
    two.contribute(micro);
    EXPECT_EQ(two.context.window().open_micro, i);
  }
  EXPECT_EQ(two.context.window().open_micro, -1);
  EXPECT_EQ(two.context.window().micro_batches, 2);
  EXPECT_EQ(two.context.step().outcome, GA_STEP_APPLIED);
  two.expect_stepped();
}

TEST(MicroBatchScope, LeftByReturn) {
  Two two;
  const auto contribute = [&two] {
    MicroBatch micro = two.context.micro_begin(-1);
    two.contribute(micro);
    return 1;
  };
  contribute();
  two.context.step();
  two.expect_stepped();
}

TEST(MicroBatchScope, ExceptionDiscardsTheWindow) {
  Two two;
  two.context.accumulate({two.da.data(), two.db.data()});
  try {
    MicroBatch micro = two.context.micro_begin(-1);
    micro.accumulate_part(two.pa, two.da.data());
    throw std::runtime_error("backward() failed");
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "backward() failed");
  }
  EXPECT_EQ(two.context.window().state, GA_WINDOW_EMPTY);
  EXPECT_EQ(two.context.step().outcome, GA_STEP_SKIPPED_EMPTY);
  EXPECT_EQ(two.a, (Floats{0, 0}));
  two.context.accumulate({two.da.data(), two.db.data()});
  two.context.step();
  two.expect_stepped();
}

TEST(MicroBatchScope, CaughtExceptionDoesNotDiscard) {
  Two two;
  {
    MicroBatch micro = two.context.micro_begin(-1);
    two.contribute(micro);
    try {
      throw 1;
    } catch (int) {
    }
  }
  two.context.step();
  two.expect_stepped();
}

// A micro-batch that begins and ends in a destructor, which runs because of an exception.
TEST(MicroBatchScope, WithinUnwinding) {
  Two two;
  struct Contributes {
    Two& two;
    ~Contributes() {
      MicroBatch micro = two.context.micro_begin(-1);
      two.contribute(micro);
    }
  };
  try {
    const Contributes contributes{two};
    throw 1;
  } catch (int) {
  }
  EXPECT_EQ(two.context.window().micro_batches, 1);
  two.context.step();
  two.expect_stepped();
}

TEST(MicroBatchScope, Move) {
  Two two;
  {
    MicroBatch first = two.context.micro_begin(-1);
    first.accumulate_part(two.pa, two.da.data());
    {
      MicroBatch second = std::move(first);
      second.accumulate_part(two.pb, two.db.data());
      EXPECT_EQ(two.context.window().open_micro, 0);
    }
    EXPECT_EQ(two.context.window().open_micro, -1);
    EXPECT_EQ(status_of([&] { first.accumulate_part(two.pa, two.da.data()); }),
              GA_ERROR_INVALID_ARGUMENT);
  }
  EXPECT_EQ(two.context.window().micro_batches, 1);
  two.context.step();
  two.expect_stepped();
}

// The exception passes through the function that the micro-batch was moved to.
TEST(MicroBatchScope, MoveAndException) {
  Two two;
  const auto fail = [](MicroBatch) { throw 1; };
  MicroBatch micro = two.context.micro_begin(-1);
  EXPECT_THROW(fail(std::move(micro)), int);
  EXPECT_EQ(two.context.window().state, GA_WINDOW_EMPTY);
}

TEST(MicroBatchScope, ContextMoves) {
  Two two;
  {
    MicroBatch micro = two.context.micro_begin(-1);
    Context moved = std::move(two.context);
    two.contribute(micro);
    two.context = std::move(moved);
  }
  two.context.step();
  two.expect_stepped();
}

TEST(MicroBatchScope, OpenedAgain) {
  Two two;
  for (const Param param : {two.pa, two.pb}) {
    for (std::int64_t i = 0; i < 2; ++i) {
      MicroBatch micro = two.context.micro_begin(i, 2);
      micro.accumulate_part(param, param == two.pa ? two.da.data() : two.db.data());
    }
  }
  EXPECT_EQ(two.context.window().weight, 4);
  two.context.step();
  two.expect_stepped();
}

// An accumulator that C has acquired and not released: ga_micro_end fails.
TEST(MicroBatchScope, FailedEnd) {
  Two two;
  auto accumulator = ga_accumulator{};
  accumulator.struct_size = sizeof accumulator;
  const auto acquire = [&](Param param) {
    gradaccum::check(ga_accumulator_acquire(two.context.get(), id(param), &accumulator));
  };

  // At the end of the scope: an exception, and the window is discarded.
  const auto leave = [&] {
    MicroBatch micro = two.context.micro_begin(-1);
    acquire(two.pa);
  };
  EXPECT_EQ(status_of(leave), GA_ERROR_INVALID_STATE);
  EXPECT_EQ(two.context.window().state, GA_WINDOW_EMPTY);

  // Called: an exception, and the micro-batch is still open.
  {
    MicroBatch micro = two.context.micro_begin(-1);
    acquire(two.pa);
    EXPECT_EQ(status_of([&] { micro.end(); }), GA_ERROR_INVALID_STATE);
    gradaccum::check(ga_accumulator_release(two.context.get(), id(two.pa)));
    micro.end();
    EXPECT_EQ(two.context.window().open_micro, -1);
  }
  EXPECT_EQ(two.context.window().micro_batches, 1);
  two.context.discard();

  // Called, and the exception leaves the scope: the window is discarded.
  const auto end = [&] {
    MicroBatch micro = two.context.micro_begin(-1);
    acquire(two.pa);
    micro.end();
  };
  EXPECT_EQ(status_of(end), GA_ERROR_INVALID_STATE);
  EXPECT_EQ(two.context.window().state, GA_WINDOW_EMPTY);
}

TEST(MicroBatchScope, Discard) {
  Two two;
  two.context.accumulate({two.da.data(), two.db.data()});
  {
    MicroBatch micro = two.context.micro_begin(-1);
    two.contribute(micro);
    micro.discard();
  }
  EXPECT_EQ(two.context.window().state, GA_WINDOW_EMPTY);
}

TEST(MicroBatchScope, Abort) {
  Two two;
  two.context.accumulate({two.da.data(), two.db.data()});
  {
    MicroBatch micro = two.context.micro_begin(-1, 9);
    micro.abort();
  }
  EXPECT_EQ(two.context.window().micro_batches, 1);
  {
    MicroBatch micro = two.context.micro_begin(-1);
    two.contribute(micro);
    EXPECT_EQ(status_of([&] { micro.abort(); }), GA_ERROR_INVALID_STATE);
    EXPECT_EQ(two.context.window().open_micro, 1);
  }
  EXPECT_EQ(two.context.step().weight, 2);
  two.expect_stepped();
}

TEST(MicroBatchParts, Rows) {
  Floats table(6), values{1, 2, 4, 8};
  Context context(one_thread());
  ga_param_options options = gradaccum::default_param_options();
  options.rows = GA_ROWS_DENSE;
  const Param param =
      context.add_param(context.add_group(sgd()), "table", table.data(), {3, 2}, &options);
  const std::int32_t narrow[] = {2, 0};
  const std::int64_t wide[] = {2};
  {
    MicroBatch micro = context.micro_begin(-1);
    micro.accumulate_rows(param, narrow, 2, values.data());
    micro.accumulate_rows(param, wide, 1, values.data());
  }
  context.step();
  EXPECT_EQ(table, (Floats{-4, -8, 0, 0, -2, -4}));
}

TEST(MicroBatchParts, Matmul) {
  if (!ga::test::has_onednn()) GTEST_SKIP() << "this build has no oneDNN";
  Floats w(2);
  const float dy[] = {1, 2}, x[] = {4};
  const my::bfloat16 dy16[] = {{0x3f80}, {0x4000}}, x16[] = {{0x4080}};  // the same numbers
  Context context(one_thread());
  const Param param = context.add_param(context.add_group(sgd()), "w", w.data(), {2, 1});
  {
    MicroBatch micro = context.micro_begin(-1);
    micro.accumulate_matmul(param, 1, dy, 2, GA_TRANSPOSE, x, 1, GA_NO_TRANSPOSE);
    micro.accumulate_matmul(param, 1, dy16, 2, GA_TRANSPOSE, x16, 1, GA_NO_TRANSPOSE);
    const void *a = dy, *b = x;
    micro.accumulate_matmul(param, 1, a, 2, GA_TRANSPOSE, b, 1, GA_NO_TRANSPOSE, GA_F32);
  }
  context.step();
  EXPECT_EQ(w, (Floats{-12, -24}));
}

TEST(MicroBatchParts, Accumulator) {
  Two two;
  for (int i = 0; i < 2; ++i) {
    MicroBatch micro = two.context.micro_begin(-1, 3);
    {
      gradaccum::Accumulator a = micro.acquire(two.pa);
      EXPECT_EQ(a->alpha, 3);
      EXPECT_EQ((*a).beta, i);
      for (std::size_t j = 0; j < 2; ++j) {
        const float old = i == 0 ? 0 : a.data<float>()[j];
        a.data<float>()[j] = 3 * two.da[j] + old;
      }
      EXPECT_EQ(status_of([&] { a.data<double>(); }), GA_ERROR_INVALID_ARGUMENT);
      EXPECT_EQ(status_of([&] { micro.end(); }), GA_ERROR_INVALID_STATE);  // not released yet
    }
    gradaccum::Accumulator first = micro.acquire(two.pb);
    gradaccum::Accumulator b = std::move(first);
    *b.data<float>() = 3 * two.db[0] + (i == 0 ? 0 : *b.data<float>());
    b.release();
    EXPECT_EQ(status_of([&] { b.release(); }), GA_ERROR_INVALID_ARGUMENT);
  }
  two.context.step();
  two.expect_stepped();
}

// The kernel failed in mid-work: what it has left in the accumulator does not count.
TEST(MicroBatchParts, AccumulatorAndException) {
  Two two;
  {
    MicroBatch micro = two.context.micro_begin(-1);
    try {
      gradaccum::Accumulator a = micro.acquire(two.pa);
      a.data<float>()[0] = 100;
      throw 1;
    } catch (int) {
    }
    EXPECT_EQ(status_of([&] { micro.end(); }), GA_ERROR_INVALID_STATE);
    micro.discard();
  }
  two.context.accumulate({two.da.data(), two.db.data()});
  two.context.step();
  two.expect_stepped();
}

// What is ready takes no more contributions in this window.
template <typename Params>
void expect_ready(const char* what, const Params& params) {
  SCOPED_TRACE(what);
  Two two;
  {
    MicroBatch micro = two.context.micro_begin(-1);
    two.contribute(micro);
    two.context.params_ready(params);
    for (const Param param : {two.pa, two.pb}) {
      EXPECT_EQ(status_of([&] { micro.accumulate_part(param, two.da.data()); }),
                GA_ERROR_INVALID_STATE);
    }
  }
  two.context.step();
  two.expect_stepped();
}

TEST(MicroBatchParts, ReadyParameters) {
  const Param a{0}, b{1}, both[] = {a, b};
  expect_ready("vector", std::vector<Param>{a, b});
  expect_ready("std::array", std::array<Param, 2>{b, a});
  expect_ready("array", both);
  expect_ready("initializer list", std::initializer_list<Param>{a, b});
#ifdef __cpp_lib_span
  expect_ready("span", std::span<const Param>(both));
#endif
  Two two;
  two.context.params_ready({});
  two.context.params_ready({two.pa});
  const Param unknown[] = {two.pb, Param{2}};
  EXPECT_EQ(status_of([&] { two.context.params_ready(unknown); }), GA_ERROR_INVALID_ARGUMENT);
  const std::vector<const float*> late = {two.da.data(), nullptr};
  EXPECT_EQ(status_of([&] { two.context.accumulate(late); }), GA_ERROR_INVALID_STATE);
  two.context.accumulate({nullptr, two.db.data()});
  two.context.step();
  EXPECT_EQ(two.a, Floats(2, 0));
  EXPECT_EQ(two.b, Floats(1, -4));
}

TEST(MicroBatchParts, BatchNorm) {
  const float x[] = {1, 3}, dy[] = {1, 1};
  Floats y(2), dx(2, 9), gamma{2}, beta{0};
  Context context(one_thread());
  const Group group = context.add_group(sgd());
  const Param pg = context.add_param(group, "gamma", gamma.data(), {1});
  const Param pb = context.add_param(group, "beta", beta.data(), {1});
  const BatchNorm bn = context.add_batch_norm("bn", 1, pg, pb);
  const BatchNorm plain =
      context.add_batch_norm("plain", 1, gradaccum::no_param, gradaccum::no_param);
  EXPECT_EQ(id(plain), 1);
  EXPECT_EQ(context.batch_norm_count(), 2);
  EXPECT_EQ(context.find_batch_norm("plain"), plain);
  EXPECT_EQ(context.batch_norm_info(bn).gamma, id(pg));
  context.bn_forward(bn, x, 2, 1, y.data());
  EXPECT_NEAR(y[0], -2, 1e-4);
  EXPECT_NEAR(y[1], 2, 1e-4);
  {
    MicroBatch micro = context.micro_begin(-1);
    micro.bn_backward_accumulate(bn, x, dy, 2, 1);
    micro.bn_backward(bn, x, dy, 2, 1, dx.data());
  }
  double mean = 0, variance = 0;
  EXPECT_EQ(context.bn_statistics(bn, &mean, &variance), 2);
  EXPECT_EQ(mean, 2);
  EXPECT_EQ(variance, 1);
  context.step();
  EXPECT_EQ(beta[0], -2);  // the sum of dy
  EXPECT_NEAR(dx[0], 0, 1e-6);
  EXPECT_EQ(context.bn_running(bn, &mean, &variance), 1);
  EXPECT_NEAR(mean, 0.2, 1e-12);
  context.set_frozen(bn, true);
  context.bn_set_running(bn, &mean, &variance, 7);
  EXPECT_EQ(context.bn_running<double>(bn, nullptr, &variance), 7);
}

TEST(MicroBatchParts, BatchNormOverAWindow) {
  const float x[] = {1, 3, 5, 7}, dy[] = {1, 0, 0, 1};
  Floats y(4), dx(4, 9);
  Context context(one_thread());
  context.add_group(sgd());
  ga_bn_options options = gradaccum::default_bn_options();
  options.mode = GA_BN_WINDOW;
  const BatchNorm bn =
      context.add_batch_norm("bn", 1, gradaccum::no_param, gradaccum::no_param, options);
  for (int k = 0; k < 2; ++k) context.bn_accumulate(bn, x + 2 * k, 2, 1);
  context.bn_finalize(bn);
  for (int k = 0; k < 2; ++k) context.bn_forward(bn, x + 2 * k, 2, 1, y.data() + 2 * k);
  EXPECT_THROW(context.bn_backward_finalize(bn), gradaccum::Error);
  for (int k = 0; k < 2; ++k)
    context.micro_begin(k).bn_backward_accumulate(bn, x + 2 * k, dy + 2 * k, 2, 1);
  context.bn_backward_finalize(bn);
  for (int k = 0; k < 2; ++k)
    context.micro_begin(k).bn_backward(bn, x + 2 * k, dy + 2 * k, 2, 1, dx.data() + 2 * k);
  // The sums of dy and of dy times the normalised x are 2 and 0, so dx = (dy - 1 / 2) / sqrt(5).
  EXPECT_NEAR(dx[0], 0.2236068, 1e-5);
  EXPECT_NEAR(dx[1], -0.2236068, 1e-5);
}

// ---- Several ranks ------------------------------------------------------------------------------

TEST(Cpp, ThreadsAsRanks) {
  const gradaccum::Communicator::Id id = gradaccum::Communicator::unique_id();
  Floats ended[2] = {{0, 0}, {0, 0}};
  std::vector<std::thread> threads;
  for (std::int32_t rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      gradaccum::Communicator comm = gradaccum::Communicator::local(id, rank, 2, 60);
      gradaccum::Communicator moved = std::move(comm);
      EXPECT_EQ(moved.rank(), rank);
      EXPECT_EQ(moved.ranks(), 2);
      Context context;
      context.add_param(context.add_group(sgd()), "p", ended[rank].data(), {2});
      context.set_communicator(moved);
      const Floats g(2, rank == 0 ? 1.0f : 4.0f);
      context.accumulate({g.data()}, rank == 0 ? 2 : 1);
      EXPECT_EQ(context.step().weight, 3);
      context.clear_communicator();
    });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(ended[0], Floats(2, -2));
  EXPECT_EQ(ended[1], ended[0]);
}

TEST(Cpp, ARankThatDoesNotCome) {
  const auto id = gradaccum::Communicator::unique_id();
  const auto comm = gradaccum::Communicator::local(id, 0, 2, 0.2);
  Context context;
  context.add_group(sgd());
  try {
    context.set_communicator(comm);
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), GA_ERROR_COMMUNICATION);
  }
  comm.abort();
  EXPECT_THROW(gradaccum::Communicator::local({1, 2}, 0, 1), std::invalid_argument);
  EXPECT_THROW(gradaccum::Communicator::local(id, 0, 3), Error);
  EXPECT_THROW(gradaccum::Communicator::mpi(0), Error);  // no module, or no MPI_Init
  EXPECT_THROW(gradaccum::Communicator::nccl({1, 2}, 0, 1), std::invalid_argument);
  EXPECT_THROW(gradaccum::Communicator::nccl(id, 2, 2), Error);
  int no_comm = 0;
  EXPECT_THROW(gradaccum::Communicator::nccl(&no_comm), Error);  // no module, or no NCCL is loaded
  EXPECT_THROW(gradaccum::Communicator::unique_id(GA_COMM_MPI), Error);
}

// What a rank has after two windows.
struct Ended {
  Floats large = Floats(70000, 1), small = Floats(3, 1), average = Floats(70000);
  std::int64_t state_bytes = 0;
};

// Trains two parameters, the first of which ranks divide, in two micro-batches a window. Backward comes
// to the second parameter first.
void train(Ended& ended, const gradaccum::Communicator& comm, const ga_comm_options& options) {
  Context context(one_thread());
  const Group group = context.add_group(gradaccum::default_optimizer(GA_OPTIMIZER_ADAM));
  const Param large = context.add_param(group, "large", ended.large.data(), {70000});
  const Param small = context.add_param(group, "small", ended.small.data(), {3});
  context.set_communicator(comm, options);
  Floats gradient(70000);
  for (int k = 0; k < 4; ++k) {
    for (std::size_t j = 0; j < gradient.size(); ++j)
      gradient[j] = static_cast<float>(static_cast<int>(j % 7) - 3 + k + comm.rank());
    ga_micro_options micro_options = gradaccum::default_micro_options();
    micro_options.flags = k % 2 == 1 ? GA_MICRO_LAST : 0;
    MicroBatch micro = context.micro_begin(-1, 1 + comm.rank(), &micro_options);
    for (const Param param : {small, large}) {
      micro.accumulate_part(param, gradient.data());
      if (k % 2 == 1) context.params_ready({param});
    }
    micro.end();
    if (k % 2 == 0) continue;
    if (options.overlap) {
      EXPECT_EQ(status_of([&] { context.save_to_memory(); }), GA_ERROR_INVALID_STATE)
          << "nothing is being exchanged";
    }
    EXPECT_EQ(context.step().outcome, GA_STEP_APPLIED);
  }
  ended.average = context.state_get<float>(large, "exp_avg");
  ended.state_bytes = context.memory().optimizer_state;
}

std::array<Ended, 2> train_two_ranks(const ga_comm_options& options) {
  const auto id = gradaccum::Communicator::unique_id();
  std::array<Ended, 2> ended;
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      train(ended[rank], gradaccum::Communicator::local(id, static_cast<std::int32_t>(rank), 2, 60),
            options);
    });
  for (std::thread& t : threads) t.join();
  return ended;
}

TEST(Cpp, RanksThatShardAndOverlap) {
  ga_comm_options options = gradaccum::default_comm_options();
  const Ended plain = train_two_ranks(options)[0];
  EXPECT_NE(plain.large, Ended().large);
  options.shard = GA_SHARD_OPTIMIZER;
  options.overlap = 1;
  for (const Ended& ended : train_two_ranks(options)) {
    EXPECT_EQ(ended.large, plain.large);
    EXPECT_EQ(ended.small, plain.small);
    EXPECT_EQ(ended.average, plain.average);
    EXPECT_LT(ended.state_bytes, plain.state_bytes * 3 / 5);
  }
  options.adder = GA_COMM_ADDER_TRANSPORT;
  const auto id = gradaccum::Communicator::unique_id();
  const auto comm = gradaccum::Communicator::local(id, 0, 1);
  Context context(one_thread());
  EXPECT_EQ(status_of([&] { context.set_communicator(comm, options); }), GA_ERROR_UNSUPPORTED);
}

// ---- Context ------------------------------------------------------------------------------------

TEST(ContextOwnership, Move) {
  Two two;
  Context moved = std::move(two.context);
  EXPECT_EQ(two.context.get(), nullptr);
  EXPECT_EQ(status_of([&] { two.context.step(); }), GA_ERROR_INVALID_ARGUMENT);
  moved.accumulate({two.da.data(), two.db.data()});
  moved.step();
  two.expect_stepped();
}

ga_context* create() {
  const ga_config config = one_thread();
  ga_context* context = nullptr;
  EXPECT_EQ(ga_context_create(&config, &context), GA_OK);
  return context;
}

TEST(ContextOwnership, AdoptBorrowRelease) {
  ga_context_destroy(create());  // what the library allocates once
  const std::int64_t before = live;
  {
    Context adopted = Context::adopt(create());
    EXPECT_GT(live, before);
    adopted.add_group(sgd());
    EXPECT_EQ(adopted.group_count(), 1);
  }
  EXPECT_EQ(live, before);

  ga_context* const mine = create();
  const std::int64_t with_mine = live;
  {
    Context borrowed = Context::borrow(mine);
    EXPECT_EQ(borrowed.get(), mine);
    Context moved = std::move(borrowed);
    EXPECT_EQ(moved.window().state, GA_WINDOW_EMPTY);
  }
  EXPECT_EQ(live, with_mine);

  Context owner;
  owner = Context::adopt(mine);
  EXPECT_EQ(owner.release(), mine);
  EXPECT_EQ(owner.get(), nullptr);
  EXPECT_EQ(ga_synchronize(mine), GA_OK);
  ga_context_destroy(mine);
  EXPECT_EQ(live, before);
}

TEST(ContextOwnership, ConfigOfC) {
  ga_config config = gradaccum::default_config();
  config.accum_steps = 1;
  Context context(config);
  EXPECT_EQ(context.window().accum_steps, 1);
}

TEST(ContextErrors, CarryStatusAndMessage) {
  Two two;
  EXPECT_EQ(status_of([&] { two.context.set_lr(Group{7}, 0.1); }), GA_ERROR_INVALID_ARGUMENT);
  try {
    two.context.accumulate({two.da.data(), two.db.data()}, -1);
    FAIL() << "a negative weight was accepted";
  } catch (const std::runtime_error& error) {
    EXPECT_EQ(std::string(error.what()),
              std::string("GA_ERROR_INVALID_ARGUMENT: ") + ga_last_error());
  }
  EXPECT_EQ(status_of([&] {
              two.context.set_accum_schedule({0, 4}, {2});
            }),
            GA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(status_of([&] { two.context.device_loss_scale(); }), GA_ERROR_INVALID_ARGUMENT);
}

TEST(ContextErrors, TypeOfGradient) {
  Floats p{1}, g{2};
  Context context(one_thread());
  const Group external = context.add_group(gradaccum::default_optimizer(GA_OPTIMIZER_EXTERNAL));
  const Param param = context.add_param(external, "p", p.data(), {1});
  context.accumulate({g.data()});
  context.step();
  EXPECT_EQ(*context.gradient<float>(param), 2);
  EXPECT_EQ(status_of([&] { context.gradient<double>(param); }), GA_ERROR_INVALID_ARGUMENT);
}

TEST(ContextSettings, Groups) {
  Two two;
  two.context.set_lr(two.group, 0.5);
  EXPECT_EQ(two.context.lr(two.group), 0.5);
  ga_optimizer faster = two.context.optimizer(two.group);
  faster.lr = 8;
  two.context.set_optimizer(two.group, faster);
  ga_schedule halves = gradaccum::default_schedule(GA_SCHEDULE_EXPONENTIAL);
  halves.gamma = 0.5;
  two.context.set_schedule(two.group, halves);
  two.context.set_steps(3);
  EXPECT_EQ(two.context.last_lr(two.group), 0);
  two.context.accumulate({two.da.data(), two.db.data()});
  EXPECT_EQ(two.context.step().steps, 4);
  EXPECT_EQ(two.context.last_lr(two.group), 1);
  two.expect_stepped();
  two.context.set_frozen(two.group, true);
  EXPECT_EQ(two.context.param_info(two.pb).frozen, 1);
}

TEST(ContextSettings, Parameters) {
  Two two;
  two.context.set_weight_decay(two.group, 0.5);
  two.b[0] = 2;
  two.context.set_lr_scale(two.pa, 0.25);
  two.context.set_weight_decay_scale(two.pb, 0);
  two.context.set_part(two.pa, {5}, {3});
  EXPECT_THROW(two.context.set_part(two.pa, {5, 1}, {3, 0}), gradaccum::Error);
  EXPECT_THROW(two.context.set_part(two.pa, {5}, {4}), gradaccum::Error);
  two.context.accumulate({two.da.data(), two.db.data()});
  two.context.step();
  EXPECT_EQ(two.a, (Floats{-0.25, -0.5}));
  EXPECT_EQ(two.b, (Floats{-2}));
  EXPECT_EQ(two.context.param_info(two.pa).lr_scale, 0.25);

  two.context.remove(two.pa);
  EXPECT_EQ(status_of([&] { two.context.param_info(two.pa); }), GA_ERROR_INVALID_ARGUMENT);
  two.context.accumulate({nullptr, two.db.data()});
  two.context.step();
  EXPECT_EQ(two.a, (Floats{-0.25, -0.5}));
  EXPECT_EQ(two.b, (Floats{-6}));
}

TEST(Library, Build) {
  EXPECT_EQ(gradaccum::version(), GA_VERSION);
  EXPECT_EQ(gradaccum::build().version, GA_VERSION);
  EXPECT_NE(std::string_view(gradaccum::build_info()).find(gradaccum::build().compiler),
            std::string_view::npos);
  EXPECT_EQ(gradaccum::device_count(GA_DEVICE_CPU), 1);
}

// ---- State and EMA ------------------------------------------------------------------------------

TEST(State, ByName) {
  Floats p{1, 1}, g{1, 2};
  Context context(one_thread());
  const Param param = context.add_param(
      context.add_group(gradaccum::default_optimizer(GA_OPTIMIZER_ADAM)), "p", p.data(), {2});
  std::vector<std::string> names;
  for (const ga_state_info& array : context.state(param)) names.push_back(array.name);
  EXPECT_EQ(names, (std::vector<std::string>{"exp_avg", "exp_avg_sq", "step"}));

  context.accumulate({g.data()});
  context.step();
  EXPECT_EQ(context.state_get<std::int64_t>(param, "step"), (std::vector<std::int64_t>{1}));
  const Floats average = context.state_get<float>(param, "exp_avg");
  ASSERT_EQ(average.size(), 2U);
  EXPECT_NEAR(average[1], 0.2, 1e-7);

  context.state_set(param, "exp_avg", Floats{3, 4});
  EXPECT_EQ(context.state_get<float>(param, "exp_avg"), (Floats{3, 4}));
  context.state_set(param, "exp_avg", std::array<float, 2>{5, 6});
  EXPECT_EQ(context.state_get<float>(param, "exp_avg"), (Floats{5, 6}));
  const std::int64_t steps[] = {41};
  context.state_set(param, "step", steps);
  EXPECT_EQ(context.state_get<std::int64_t>(param, "step").front(), 41);
#ifdef __cpp_lib_span
  context.state_set(param, "exp_avg", std::span<const float>(g));
  EXPECT_EQ(context.state_get<float>(param, "exp_avg"), g);
#endif

  EXPECT_EQ(status_of([&] { context.state_get<double>(param, "exp_avg"); }),
            GA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(status_of([&] { context.state_set(param, "exp_avg", Floats{1}); }),
            GA_ERROR_INVALID_ARGUMENT);
  try {
    context.state_get<float>(param, "momentum_buffer");
    FAIL() << "Adam has no momentum_buffer";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), GA_ERROR_INVALID_ARGUMENT);
    EXPECT_NE(std::string(error.what()).find("exp_avg_sq"), std::string::npos) << error.what();
  }

  context.state_reset(param);
  EXPECT_EQ(context.state_get<float>(param, "exp_avg"), (Floats{0, 0}));
  EXPECT_EQ(context.state_get<std::int64_t>(param, "step").front(), 0);
}

// Two steps, to -1 and to -2. The average is -1 after the first, and then half way to -2.
struct Averaged {
  Floats p{0}, g{1};
  Context context{one_thread()};

  Averaged() {
    ga_ema ema = gradaccum::default_ema();
    ema.decay = 0.5;
    context.set_ema(ema);
    context.add_param(context.add_group(sgd()), "p", p.data(), {1});
    for (int i = 0; i < 2; ++i) {
      context.accumulate({g.data()});
      context.step();
    }
  }
};

TEST(Ema, Scope) {
  Averaged averaged;
  {
    EmaScope scope = averaged.context.ema_scope();
    const EmaScope moved = std::move(scope);
    EXPECT_EQ(averaged.p, (Floats{-1.5}));
    EXPECT_EQ(status_of([&] { averaged.context.step(); }), GA_ERROR_INVALID_STATE);
  }
  EXPECT_EQ(averaged.p, (Floats{-2}));
  try {
    const EmaScope scope = averaged.context.ema_scope();
    EXPECT_EQ(averaged.p, (Floats{-1.5}));
    throw 1;
  } catch (int) {
  }
  EXPECT_EQ(averaged.p, (Floats{-2}));
  EmaScope scope = averaged.context.ema_scope();
  scope.end();
  EXPECT_EQ(averaged.p, (Floats{-2}));
}

TEST(Ema, Swap) {
  Averaged averaged;
  averaged.context.ema_swap(true);
  EXPECT_EQ(averaged.p, (Floats{-1.5}));
  averaged.context.ema_swap(false);
  EXPECT_EQ(averaged.p, (Floats{-2}));
  Two without;
  EXPECT_EQ(status_of([&] { const EmaScope none = without.context.ema_scope(); }),
            GA_ERROR_INVALID_STATE);
}

// ---- Callables ----------------------------------------------------------------------------------

constexpr std::size_t kLarge = 3 << 16;  // elements; so many are cut into several tasks

// Counts its calls and the objects that are alive. It can be moved, but not copied.
class Backwards {
 public:
  struct Counts {
    int calls = 0, objects = 0;
    std::int64_t tasks = 0;
  };
  explicit Backwards(Counts& counts) : counts_(&counts) { ++counts.objects; }
  Backwards(Backwards&& other) noexcept : counts_(std::exchange(other.counts_, nullptr)) {}
  ~Backwards() {
    if (counts_) --counts_->objects;
  }
  void operator()(std::int64_t count, Task task) {
    ++counts_->calls;
    counts_->tasks += count;
    for (std::int64_t i = count; i-- > 0;) task(i);
  }

 private:
  Counts* counts_;
};

TEST(Callables, ParallelFor) {
  Backwards::Counts counts;
  Floats p(kLarge, 0), g(kLarge, 1);
  {
    Config config = one_thread();
    config.set_parallel_for(Backwards(counts));
    Context first(config);
    Context second(config);
    config = Config();
    EXPECT_EQ(counts.objects, 1);

    first.add_param(first.add_group(sgd()), "p", p.data(), {kLarge});
    Context moved;
    moved = std::move(first);
    first = Context();
    moved.accumulate({g.data()});
    moved.step();
    EXPECT_EQ(p, Floats(kLarge, -1));
    EXPECT_GE(counts.calls, 2);
    EXPECT_GT(counts.tasks, counts.calls);

    // The context would outlive its callable.
    EXPECT_EQ(status_of([&] { moved.release(); }), GA_ERROR_INVALID_STATE);
    EXPECT_NE(moved.get(), nullptr);
    moved = Context();
    EXPECT_EQ(counts.objects, 1);  // of the second context
  }
  EXPECT_EQ(counts.objects, 0);
}

TEST(Callables, ParallelForThatThrows) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto run = [] {
    Floats p(kLarge, 0), g(kLarge, 1);
    Config config = one_thread();
    config.set_parallel_for([](std::int64_t, Task) { throw std::runtime_error("no threads"); });
    Context context(config);
    context.add_param(context.add_group(sgd()), "p", p.data(), {kLarge});
    context.accumulate({g.data()});
  };
  EXPECT_DEATH(run(), "no threads");
}

TEST(Callables, Log) {
  std::vector<std::string> lines;
  Config config = one_thread();
  config.set_log([&lines](std::string_view line) { lines.emplace_back(line); });
  {
    Context first(config);
    Context context = std::move(first);
    config = Config();
    lines.clear();
    context.step();
    ASSERT_EQ(lines.size(), 1U);
    EXPECT_EQ(lines[0].rfind("gradaccum,cpu,ga_step,", 0), 0U) << lines[0];
    EXPECT_EQ(status_of([&] { context.release(); }), GA_ERROR_INVALID_STATE);
  }
}

// Windows whose parameters are updated as soon as they are ready, with a callable that hears of them.
TEST(Callables, OnParamDone) {
  for (const std::int32_t threads : {0, 1}) {
    for (const ga_nonfinite nonfinite : {GA_NONFINITE_SKIP_STEP, GA_NONFINITE_IGNORE}) {
      SCOPED_TRACE(threads);
      SCOPED_TRACE(nonfinite);
      const auto owner = std::make_shared<int>(0);
      std::array<std::atomic<int>, 2> done = {};
      Floats p(kLarge, 0), q{5}, g(kLarge, 1), h{2};
      {
        Config config = one_thread();
        config.eager = 1;
        config.eager_threads = threads;
        config.nonfinite = nonfinite;
        config.set_on_param_done([owner, &done](Param param) {
          ++done[static_cast<std::size_t>(gradaccum::id(param))];
        });
        Context first(config);
        Context context = std::move(first);
        config = Config();
        const Group group = context.add_group(sgd());
        const Param large = context.add_param(group, "p", p.data(), {kLarge});
        const Param small = context.add_param(group, "q", q.data(), {1});
        const bool in_place = nonfinite == GA_NONFINITE_IGNORE;
        EXPECT_EQ(context.memory().eager == 0, in_place);
        for (int window = 1; window <= 3; ++window) {
          ga_micro_options options = gradaccum::default_micro_options();
          options.flags = GA_MICRO_LAST;
          MicroBatch micro = context.micro_begin(-1, 1, &options);
          micro.accumulate_part(small, h.data());
          context.params_ready({small});
          micro.accumulate_part(large, g.data());
          context.params_ready({large});
          if (in_place && threads == 0) {
            EXPECT_EQ(p.back(), -window);
            EXPECT_EQ(done[0], window);
          }
          micro.end();
          const ga_step_result result = context.step();
          if (threads == 0) {
            EXPECT_EQ(result.eager, 2);
          }
          EXPECT_LE(result.eager,
                    2);  // the step makes the updates that a thread has not begun with
          EXPECT_EQ(result.eager_waited, 0);
          EXPECT_EQ(result.eager_redone, 0);
          EXPECT_EQ(p, Floats(kLarge, static_cast<float>(-window)));
          EXPECT_EQ(q, Floats{static_cast<float>(5 - 2 * window)});
          EXPECT_EQ(done[0], window);
          EXPECT_EQ(done[1], window);
        }
        EXPECT_EQ(status_of([&] { context.release(); }), GA_ERROR_INVALID_STATE);
        EXPECT_EQ(owner.use_count(), 2);
      }
      EXPECT_EQ(owner.use_count(), 1);
    }
  }
}

// An allocator is set by the fields of C.
TEST(Callables, AllocatorOfC) {
  Config config = one_thread();
  std::int64_t calls = 0;
  config.allocate = [](void* user, std::size_t bytes, ga_device, void*) {
    ++*static_cast<std::int64_t*>(user);
    return std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  };
  config.free = [](void*, void* data, std::size_t, ga_device, void*) { std::free(data); };
  config.allocator_user = &calls;
  Floats p{0}, g{1};
  Context context(config);
  context.add_param(context.add_group(sgd()), "p", p.data(), {1});
  const std::int64_t before = calls;
  context.prepare();
  EXPECT_GT(calls, before);
  const std::int64_t prepared = calls;
  context.accumulate({g.data()});
  context.step();
  EXPECT_EQ(calls, prepared);
  EXPECT_EQ(p, (Floats{-1}));
}

// ---- State on disk ------------------------------------------------------------------------------

struct Trained {
  Trained() {
    context.add_param(context.add_group(sgd()), "p", p.data(), {1});
    context.accumulate({g.data()});
    context.step();
    context.accumulate({g.data()});
  }
  Floats p{5}, g{1};
  Context context{one_thread()};
};

// A context with the parameter of Trained.
struct Fresh {
  Fresh() { context.add_param(context.add_group(sgd()), "p", p.data(), {1}); }
  void expect_trained() {
    EXPECT_EQ(p, (Floats{4}));
    EXPECT_EQ(context.window().micro_batches, 1);
    context.step();
    EXPECT_EQ(p, (Floats{3}));
  }
  Floats p{0};
  Context context{one_thread()};
};

TEST(State, GoesThroughAFileAndMemory) {
  Trained trained;
  const std::string path = testing::TempDir() + "test_cpp.safetensors";
  ga_state_options options = gradaccum::default_state_options();
  options.note = "here";
  trained.context.save(path, &options);
  EXPECT_EQ(gradaccum::state_note(path), "here");
  trained.context.save(path);
  EXPECT_EQ(gradaccum::state_note(path), "");
  Fresh of_file, of_memory;
  of_file.context.load(path);
  of_file.expect_trained();
  of_memory.context.load_from_memory(trained.context.save_to_memory());
  of_memory.expect_trained();
  EXPECT_EQ(std::remove(path.c_str()), 0);
  EXPECT_EQ(status_of([&] { Fresh().context.load(path); }), GA_ERROR_IO);
}

TEST(State, GoesThroughCallables) {
  Trained trained;
  std::vector<char> bytes;
  trained.context.state_write([&](std::int64_t offset, const void* data, std::size_t size) {
    const auto end = static_cast<std::size_t>(offset) + size;
    if (bytes.size() < end) bytes.resize(end);
    std::memcpy(bytes.data() + offset, data, size);
  });
  EXPECT_EQ(bytes, trained.context.save_to_memory());
  const auto read = [&](std::int64_t offset, void* data, std::size_t size) {
    std::memcpy(data, bytes.data() + offset, size);
  };
  Fresh fresh;
  fresh.context.state_read(read, static_cast<std::int64_t>(bytes.size()));
  fresh.expect_trained();
}

// What a callable throws reaches the caller, and the context is as it was.
TEST(State, ExceptionsOfCallables) {
  Trained trained;
  struct Full {};
  EXPECT_THROW(
      trained.context.state_write([](std::int64_t, const void*, std::size_t) { throw Full(); }),
      Full);
  trained.context.step();
  EXPECT_EQ(trained.p, (Floats{3}));
  EXPECT_THROW(
      trained.context.state_read([](std::int64_t, void*, std::size_t) { throw Full(); }, 1000),
      Full);
  trained.context.accumulate({trained.g.data()});
}

}  // namespace
