// SPDX-License-Identifier: Apache-2.0
//
// Row-sparse gradients: compared with the same gradients as dense ones, lazy updates compared with
// a model of single elements, and their cost.
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <deque>
#include <functional>
#include <set>

#include "formats.hpp"

namespace ga::test {
namespace {

using Indices = std::vector<int64_t>;

ga_param_options with_rows(int32_t rows, int32_t gradient_dtype = 0) {
  ga_param_options o = options(gradient_dtype);
  o.rows = rows;
  return o;
}

ga_status accumulate_rows(ga_context* ctx, ga_param param, const Indices& indices,
                          int32_t index_dtype, const void* values) {
  // Kept as long as any micro-batch of these tests is open. The array has one element more, so that
  // an empty list has an address too; 32-bit indices lie at an odd multiple of their size.
  static std::deque<std::pair<std::vector<int32_t>, Indices>> kept;
  if (kept.size() > 64) kept.pop_front();
  kept.emplace_back(std::vector<int32_t>(indices.size() + 2), indices);
  auto& [narrow, wide] = kept.back();
  wide.push_back(0);
  for (size_t i = 0; i < indices.size(); ++i) narrow[i + 1] = static_cast<int32_t>(indices[i]);
  const void* data = index_dtype == GA_I32 ? static_cast<const void*>(&narrow[1]) : wide.data();
  return ga_accumulate_rows(ctx, param, data, index_dtype, static_cast<int64_t>(indices.size()),
                            values);
}

int64_t product(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (const int64_t extent : shape) n *= extent;
  return n;
}

// Small integers: their sums and weighted sums are exact, in any order and in any dtype.
Tensor integers(int32_t dtype, int64_t count, uint64_t seed) {
  Random random(seed);
  Tensor t(dtype, count);
  for (int64_t i = 0; i < count; ++i) t.set(i, static_cast<double>(random.below(9) - 4));
  return t;
}

// ---- Against the same gradients as dense ones ---------------------------------------------------

struct Case {
  std::string name;
  std::vector<int64_t> shape;
  int32_t dtype, gradient_dtype, index_dtype;
};

std::vector<Case> cases() {
  return {{"one_column", {50, 1}, GA_F32, GA_F32, GA_I32},
          {"ten_columns", {50, 10}, GA_F32, GA_F32, GA_I64},
          {"sixty_four_columns", {1000, 64}, GA_F32, GA_F32, GA_I32},
          {"columns_beyond_a_chunk", {6, 70000}, GA_F32, GA_F32, GA_I64},
          {"a_vector", {50}, GA_F32, GA_F32, GA_I32},
          {"three_axes", {50, 3, 5}, GA_F32, GA_F32, GA_I32},
          {"one_row", {1, 17}, GA_F32, GA_F32, GA_I64},
          {"f64", {50, 10}, GA_F64, GA_F64, GA_I32},
          {"f64_from_bf16", {50, 64}, GA_F64, GA_BF16, GA_I32},
          {"bf16_values", {50, 64}, GA_F32, GA_BF16, GA_I64},
          {"f16_values", {50, 33}, GA_F32, GA_F16, GA_I32},
          {"bf16_with_a_master", {50, 64}, GA_BF16, GA_BF16, GA_I32},
          {"f16_with_a_master", {50, 7}, GA_F16, GA_F32, GA_I32},
          {"without_rows", {0, 7}, GA_F32, GA_F32, GA_I32}};
}

// A context that gets rows, and one that gets the same gradients as dense ones. Both have another
// parameter, whose gradients are dense.
class Pair {
 public:
  Pair(const Case& which, const ga_optimizer& o, const ga_config& c, int32_t rows)
      : which_(which),
        p(integers(which.dtype, product(which.shape), 1)),
        q(p),
        sparse(c),
        dense(c) {
    for (Context* ctx : {&sparse, &dense}) ctx->group(o);
    add(sparse, 0, p, which.shape, with_rows(rows, which.gradient_dtype));
    add(dense, 0, q, which.shape, options(which.gradient_dtype));
    add(sparse, 0, beside_p_);
    add(dense, 0, beside_q_);
    kept_.reserve(1000);
  }

  void micro(double weight, const std::function<void()>& body) {
    for (Context* ctx : {&sparse, &dense}) {
      EXPECT_OK(ga_micro_begin(*ctx, window(*ctx).micro_batches, weight, nullptr));
    }
    body();
    for (Context* ctx : {&sparse, &dense}) EXPECT_OK(ga_micro_end(*ctx));
  }

  void rows(Indices indices) {
    if (which_.shape[0] == 0) indices.clear();
    const int64_t columns = product(which_.shape) / std::max<int64_t>(which_.shape[0], 1);
    for (int64_t& index : indices) index %= which_.shape[0];
    const auto count = static_cast<int64_t>(indices.size());
    kept_.push_back(integers(which_.gradient_dtype, count * columns, ++seed_));
    const Tensor& values = kept_.back();
    EXPECT_OK(accumulate_rows(sparse, 0, indices, which_.index_dtype, values.data()));
    kept_.emplace_back(which_.gradient_dtype, product(which_.shape));
    Tensor& whole = kept_.back();
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = indices[static_cast<size_t>(i)] * columns;
      for (int64_t j = 0; j < columns; ++j) {
        whole.set(row + j, whole.get(row + j) + values.get(i * columns + j));
      }
    }
    EXPECT_OK(ga_accumulate_part(dense, 0, whole.data()));
  }

  void whole() {
    kept_.push_back(integers(which_.gradient_dtype, product(which_.shape), ++seed_));
    for (Context* ctx : {&sparse, &dense}) {
      EXPECT_OK(ga_accumulate_part(*ctx, 0, kept_.back().data()));
    }
  }

  void beside() {
    kept_.push_back(integers(GA_F32, beside_p_.count(), ++seed_));
    for (Context* ctx : {&sparse, &dense}) {
      EXPECT_OK(ga_accumulate_part(*ctx, 1, kept_.back().data()));
    }
  }

  ga_step_result step_both() {
    const ga_step_result a = step(sparse), b = step(dense);
    EXPECT_EQ(a.outcome, b.outcome);
    EXPECT_EQ(a.weight, b.weight);
    if (std::isfinite(b.norm)) {
      EXPECT_NEAR(a.norm, b.norm, ref::kUsualNorm * b.norm);
    }
    EXPECT_NEAR(a.clip_factor, b.clip_factor, 2 * ref::kUsualNorm);
    return a;
  }

  // relative: tolerance, for factors that may be rounded differently.
  testing::AssertionResult equal(double relative = 0) const {
    for (int64_t i = 0; i < p.count(); ++i) {
      if (std::abs(p.get(i) - q.get(i)) <= relative * std::abs(q.get(i))) continue;
      return testing::AssertionFailure()
             << "element " << i << " is " << p.get(i) << ", not " << q.get(i);
    }
    if (!p.canaries()) return testing::AssertionFailure() << "wrote outside the parameter";
    if (beside_p_ != beside_q_) return testing::AssertionFailure() << "the other parameter";
    return testing::AssertionSuccess();
  }

 private:
  Case which_;
  std::vector<Tensor> kept_;
  uint64_t seed_ = 100;

 public:
  Tensor p, q;

 private:
  Tensor beside_p_{GA_F32, 5, 1}, beside_q_{GA_F32, 5, 1};

 public:
  Context sparse, dense;
};

class AgainstDense : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Rows, AgainstDense, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

// Windows in which rows come in every possible way. Weights add up to powers of two, so the means
// are exact too.
void every_way(Pair& pair, const std::function<void()>& after_step) {
  const auto finish = [&] {
    EXPECT_EQ(pair.step_both().outcome, GA_STEP_APPLIED);
    after_step();
  };
  // Repeated rows, several calls, several micro-batches.
  pair.micro(1, [&] { pair.rows({3, 1, 3, 0, 3}); });
  pair.micro(3, [&] {
    pair.rows({1, 2});
    pair.rows({2, 49, 49});
    pair.beside();
  });
  finish();
  // Other rows: the accumulator must hold nothing of the first window.
  pair.micro(2, [&] { pair.rows({7}); });
  finish();
  // A whole gradient after rows, before them, and between them.
  pair.micro(1, [&] {
    pair.rows({5, 9});
    pair.whole();
  });
  finish();
  pair.micro(4, [&] {
    pair.whole();
    pair.rows({5, 9, 5});
    pair.beside();
  });
  finish();
  pair.micro(1, [&] { pair.rows({0}); });
  pair.micro(6, [&] { pair.whole(); });
  pair.micro(0.5, [&] {
    pair.rows({0, 11});
    pair.rows({12});
  });
  pair.micro(0.5, [&] { pair.whole(); });
  finish();
  // Rows alone after a dense window.
  pair.micro(1, [&] { pair.rows({13, 2}); });
  finish();
  // A micro-batch of weight 0 is not read.
  pair.micro(2, [&] { pair.rows({1}); });
  pair.micro(0, [&] { pair.rows({2}); });
  finish();
  // Discarded, and the same rows again.
  pair.micro(1, [&] { pair.rows({4, 5}); });
  for (Context* ctx : {&pair.sparse, &pair.dense}) EXPECT_OK(ga_discard(*ctx));
  pair.micro(1, [&] { pair.rows({4}); });
  finish();
  // Micro-batches in turns.
  for (const int turn : {0, 1, 0, 1}) {
    for (Context* ctx : {&pair.sparse, &pair.dense}) {
      EXPECT_OK(ga_micro_begin(*ctx, turn, turn == 0 ? 1 : 3, nullptr));
    }
    pair.rows({turn, 7, 8});
    for (Context* ctx : {&pair.sparse, &pair.dense}) EXPECT_OK(ga_micro_end(*ctx));
  }
  finish();
  // All rows, backwards.
  Indices all;
  for (int64_t i = 50; i-- > 0;) all.push_back(i);
  pair.micro(1, [&] { pair.rows(all); });
  finish();
}

TEST_P(AgainstDense, EveryWayToContribute) {
  ga_optimizer momentum = optimizer(GA_OPTIMIZER_SGD);
  momentum.momentum = 0.9;
  momentum.lr = 0.1;
  for (const ga_optimizer& o : {momentum, optimizer(GA_OPTIMIZER_ADAMW)}) {
    for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
      if (o.kind == GA_OPTIMIZER_SGD && life == GA_GRADIENTS_CONSUMED) continue;
      ga_config c = config();
      c.gradient_life = life;
      Pair pair(GetParam(), o, c, GA_ROWS_DENSE);
      int window = 0;
      every_way(pair, [&] {
        ASSERT_TRUE(pair.equal()) << "window " << window << ", life " << life;
        ++window;
      });
    }
  }
}

// If every row of the parameter has a gradient, a lazy update equals a dense one; a window with a
// whole gradient is always dense.
void expect_lazy_with_all_rows(const Case& which, int32_t kind, const ga_clip& clip) {
  Pair pair(which, optimizer(kind), config(), GA_ROWS_LAZY);
  for (Context* ctx : {&pair.sparse, &pair.dense}) EXPECT_OK(ga_context_set_clip(*ctx, &clip));
  Indices all;
  for (int64_t i = 0; i < which.shape[0]; ++i) all.push_back((i * 7 + 3) % which.shape[0]);
  std::set<int64_t> distinct(all.begin(), all.end());
  for (int64_t i = 0; i < which.shape[0]; ++i) {
    if (distinct.insert(i).second) all.push_back(i);
  }
  for (int t = 0; t < 3; ++t) {
    pair.micro(1, [&] { pair.rows(all); });
    pair.step_both();
    ASSERT_TRUE(pair.equal());
    pair.micro(1, [&] {
      pair.rows({3, 3, 4});
      pair.whole();
    });
    pair.step_both();
    ASSERT_TRUE(pair.equal());
    pair.micro(1, [&] {
      pair.whole();
      pair.rows({3, 3, 4});
    });
    pair.step_both();
    ASSERT_TRUE(pair.equal());
  }
}

TEST_P(AgainstDense, LazyWithAllRows) {
  expect_lazy_with_all_rows(GetParam(), GA_OPTIMIZER_ADAM, clip(GA_CLIP_NONE, 0));
}

TEST_P(AgainstDense, LazyWithAllRowsAndStateByRows) {
  for (const ga_clip& mode : {clip(GA_CLIP_NONE, 0), clip(GA_CLIP_AGC, 0),
                              clip(GA_CLIP_NONE, 0, GA_FLAVOR_TORCH, 0.75)}) {
    SCOPED_TRACE(testing::Message() << mode.scope << ", " << mode.max_value);
    expect_lazy_with_all_rows(GetParam(), GA_OPTIMIZER_ROWWISE_ADAGRAD, mode);
  }
}

// Untouched rows count as zeros in norms; the factors agree, and with them the step.
TEST_P(AgainstDense, NormsAndClipping) {
  const ga_clip modes[] = {clip(GA_CLIP_GLOBAL, 1), clip(GA_CLIP_PER_TENSOR, 2, GA_FLAVOR_KERAS),
                           clip(GA_CLIP_NONE, 0, GA_FLAVOR_TORCH, 0.75),
                           clip(GA_CLIP_GLOBAL, 1, GA_FLAVOR_KERAS, 1.5), clip(GA_CLIP_AGC, 0)};
  // The factor may differ in the last bit of a double, and so a gradient in the last bit of an f32.
  // The update is subtracted from numbers of order 1 on a grid of 1/8, then rounded to 16 bits.
  const double relative =
      format(GetParam().dtype).size == 2 ? 2 * format(GetParam().dtype).roundoff() : 0x1p-19;
  for (const ga_clip& mode : modes) {
    SCOPED_TRACE(mode.scope);
    ga_optimizer o = optimizer(GA_OPTIMIZER_SGD);
    o.lr = 0x1p-6;
    Pair pair(GetParam(), o, config(), GA_ROWS_DENSE);
    for (Tensor* t : {&pair.p, &pair.q}) {
      for (int64_t i = 0; i < t->count(); ++i) t->set(i, i % 2 ? 3 : -3);
    }
    for (Context* ctx : {&pair.sparse, &pair.dense}) EXPECT_OK(ga_context_set_clip(*ctx, &mode));
    pair.micro(2, [&] { pair.rows({3, 1, 3}); });
    pair.micro(2, [&] {
      pair.rows({1, 4});
      pair.beside();
    });
    pair.step_both();
    EXPECT_TRUE(pair.equal(relative));
    pair.micro(1, [&] {
      pair.rows({3, 1, 3});
      pair.whole();
    });
    pair.step_both();
    EXPECT_TRUE(pair.equal(2 * relative));
    pair.micro(1, [&] { pair.rows({2}); });
    pair.step_both();
    EXPECT_TRUE(pair.equal(3 * relative));
  }
}

TEST_P(AgainstDense, ExternalGradient) {
  const Case& which = GetParam();
  if (which.dtype == GA_BF16 || which.dtype == GA_F16) return;  // same gradient as f32
  Pair pair(which, optimizer(GA_OPTIMIZER_EXTERNAL), config(), GA_ROWS_DENSE);
  every_way(pair, [&] {
    const auto a = external_gradient(pair.sparse, 0, pair.p.count());
    const auto b = external_gradient(pair.dense, 0, pair.p.count());
    ASSERT_TRUE(a == b);
  });
}

// ---- Non-finite ---------------------------------------------------------------------------------

TEST(Rows, NonfiniteInARow) {
  for (const int32_t policy :
       {GA_NONFINITE_SKIP_STEP, GA_NONFINITE_FAIL, GA_NONFINITE_DROP_MICRO}) {
    SCOPED_TRACE(policy);
    for (const int64_t columns : {int64_t{1}, int64_t{10}, int64_t{70000}}) {
      ga_config c = config();
      c.nonfinite = policy;
      Tensor p(GA_F32, 20 * columns), good(GA_F32, columns, 1), bad(GA_F32, 2 * columns, 1);
      bad.set(2 * columns - 1, NAN);
      Context ctx(c);
      ctx.group(plain_sgd());
      add(ctx, 0, p, {20, columns}, with_rows(GA_ROWS_DENSE));
      for (int round = 0; round < 2; ++round) {
        p.fill(0);
        EXPECT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
        EXPECT_OK(accumulate_rows(ctx, 0, {3}, GA_I32, good.data()));
        EXPECT_OK(ga_micro_end(ctx));
        EXPECT_OK(ga_micro_begin(ctx, 1, 1, nullptr));
        EXPECT_OK(accumulate_rows(ctx, 0, {5, 19}, GA_I32, bad.data()));
        EXPECT_OK(ga_micro_end(ctx));
        if (policy == GA_NONFINITE_FAIL) {
          EXPECT_EQ(ga_step(ctx, nullptr), GA_ERROR_NONFINITE);
          EXPECT_OK(ga_discard(ctx));
        } else {
          const ga_step_result r = step(ctx);
          const bool drop = policy == GA_NONFINITE_DROP_MICRO;
          EXPECT_EQ(r.outcome, drop ? GA_STEP_APPLIED : GA_STEP_SKIPPED_NONFINITE);
          EXPECT_EQ(r.window_dropped, drop);
          EXPECT_EQ(p.get(3 * columns), drop ? -1 : 0);
        }
        EXPECT_EQ(p.get(5 * columns), 0);
        EXPECT_EQ(p.get(20 * columns - 1), 0);
        // The NaN left in the accumulator must not affect later windows.
        p.fill(0);
        EXPECT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
        EXPECT_OK(accumulate_rows(ctx, 0, {5}, GA_I32, good.data()));
        EXPECT_OK(ga_micro_end(ctx));
        EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
        EXPECT_EQ(p.get(5 * columns), -1);
        EXPECT_EQ(p.get(20 * columns - 1), 0);
      }
    }
  }
}

// ---- Lazy ---------------------------------------------------------------------------------------

// The optimizers that can leave rows without a gradient alone, or those that cannot.
std::vector<NamedOptimizer> lazy_optimizers(bool can) {
  return named_optimizers([can](const OptimizerRow& row, const ga_optimizer& o) {
    return row.lazy(o) == can && !row.matrices_only;
  });
}

class Lazy : public testing::TestWithParam<NamedOptimizer> {};
INSTANTIATE_TEST_SUITE_P(Rows, Lazy, testing::ValuesIn(lazy_optimizers(true)),
                         [](const auto& info) { return info.param.name; });

// Rows with a gradient move as those of a dense matrix do; the other rows and their state stay bit for bit
// as they are.
TEST_P(Lazy, OnlyTouchedRowsMove) {
  const ga_optimizer& o = GetParam().optimizer;
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{200, 10}, {200, 64}, {3, 66000}, {200}, {200, 1}}) {
    const int64_t n = product(shape), columns = n / shape[0];
    if (n > 65536 && GetParam().name != row_of(o).good[0].name) continue;  // one of each is enough
    Tensor p = random_tensor(GA_F32, n, 3);
    ref::Tensor model = {shape, std::vector<ref::Element>(static_cast<size_t>(n)), {}, {}};
    for (int64_t i = 0; i < n; ++i) model.elements[static_cast<size_t>(i)].p = ref::exact(p.get(i));
    Context ctx;
    ctx.group(o);
    ctx.group(plain_sgd());
    float other = 0;
    const float other_gradient = 1;
    add(ctx, 0, p, shape, with_rows(GA_ROWS_LAZY));
    ctx.param(1, "other", &other, 1);
    Random random(9);
    int64_t updates = 0;
    for (int t = 1; t <= 8; ++t) {
      const Tensor before = p;
      std::vector<double> sum(static_cast<size_t>(n), 0);
      std::vector<bool> touched(static_cast<size_t>(shape[0]), false);
      for (int k = 0; k < 2; ++k) {
        EXPECT_OK(ga_micro_begin(ctx, k, 2, nullptr));
        EXPECT_OK(ga_accumulate_part(ctx, 1, &other_gradient));
        // The fourth window has no gradient for this parameter, the fifth and the sixth have the
        // same rows, the other windows random rows.
        Indices indices;
        for (int i = 0; i < 12 && t != 4; ++i) {
          indices.push_back(t == 5 || t == 6 ? i % 3 : random.below(shape[0]));
        }
        const Tensor values =
            integers(GA_F32, static_cast<int64_t>(indices.size()) * columns, random.bits());
        if (t != 4) {
          EXPECT_OK(accumulate_rows(ctx, 0, indices, GA_I64, values.data()));
        }
        EXPECT_OK(ga_micro_end(ctx));
        for (size_t i = 0; i < indices.size(); ++i) {
          touched[static_cast<size_t>(indices[i])] = true;
          for (int64_t j = 0; j < columns; ++j) {
            sum[static_cast<size_t>(indices[i] * columns + j)] +=
                2 * values.get(static_cast<int64_t>(i) * columns + j);
          }
        }
      }
      EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
      if (t != 4) ++updates;
      for (int64_t row = 0; row < shape[0]; ++row) {
        if (!touched[static_cast<size_t>(row)]) continue;
        std::vector<ref::Real> g;
        for (int64_t i = row * columns; i < (row + 1) * columns; ++i)
          g.push_back(ref::exact(sum[static_cast<size_t>(i)] / 4));
        ref::update_row(o, o.lr, o.flavor == GA_FLAVOR_TORCH ? updates : t, g, model, row);
      }
      int wrong = 0;
      for (int64_t i = 0; i < n && wrong < 3; ++i) {
        const ref::Real& want = model.elements[static_cast<size_t>(i)].p;
        if (touched[static_cast<size_t>(i / columns)]) {
          if (ref::agrees(static_cast<float>(p.get(i)), want)) continue;
        } else if (p.get(i) == before.get(i)) {
          continue;
        }
        ++wrong;
        ADD_FAILURE() << "row " << i / columns
                      << (touched[static_cast<size_t>(i / columns)] ? "" : " untouched")
                      << ", window " << t << ": " << p.get(i) << ", not " << want.value;
      }
      if (wrong > 0) return;
      EXPECT_TRUE(p.canaries());
    }
  }
}

// A lazily updated 16-bit parameter equals its rounded f32 twin.
TEST(Rows, LazyWithMasterWeights) {
  for (const int32_t dtype : {GA_F16, GA_BF16}) {
    Tensor p = integers(dtype, 100 * 8, 1), wide(GA_F32, 100 * 8);
    for (int64_t i = 0; i < p.count(); ++i) wide.set(i, p.get(i));
    Context ctx;
    ctx.group(optimizer(GA_OPTIMIZER_ADAM));
    add(ctx, 0, p, {100, 8}, with_rows(GA_ROWS_LAZY, GA_F32));
    add(ctx, 0, wide, {100, 8}, with_rows(GA_ROWS_LAZY, GA_F32));
    for (int t = 0; t < 20; ++t) {
      const Indices indices = {t, 99 - t, 7};
      const Tensor values = integers(GA_F32, 3 * 8, static_cast<uint64_t>(t));
      EXPECT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
      for (const ga_param i : {0, 1}) {
        EXPECT_OK(accumulate_rows(ctx, i, indices, GA_I32, values.data()));
      }
      EXPECT_OK(ga_micro_end(ctx));
      step(ctx);
    }
    for (int64_t i = 0; i < p.count(); ++i) {
      ASSERT_EQ(p.get(i), to_nearest(wide.get(i), format(dtype))) << i;
    }
  }
}

TEST(Rows, LazyIsRefusedWhereStateOfAllRowsMoves) {
  Tensor p(GA_F32, 12);
  Context ctx;
  for (const NamedOptimizer& named : lazy_optimizers(false)) {
    SCOPED_TRACE(named.name);
    const ga_group group = ctx.group(named.optimizer);
    EXPECT_TRUE(
        refused(try_add(ctx, group, "embedding", p.data(), GA_F32, {4, 3}, with_rows(GA_ROWS_LAZY)),
                GA_ERROR_UNSUPPORTED, {"\"embedding\"", "GA_ROWS_LAZY"}));
  }
  // All of them support dense rows, and the refused calls added nothing.
  ga_param id = -1;
  EXPECT_OK(try_add(ctx, 0, "embedding", p.data(), GA_F32, {4, 3}, with_rows(GA_ROWS_DENSE), &id));
  EXPECT_EQ(id, 0);
}

// ---- Wrong calls --------------------------------------------------------------------------------

// All arguments are checked before anything changes: the window goes on as that of its twin.
TEST(Rows, WrongIndicesChangeNothing) {
  const int64_t rows = 1000, columns = 10;
  for (const int32_t how : {GA_ROWS_DENSE, GA_ROWS_LAZY}) {
    Tensor p(GA_F32, rows * columns), q(GA_F32, rows * columns);
    const Tensor values = random_tensor(GA_F32, 100 * columns, 1);
    Context ctx, twin;
    for (Context* c : {&ctx, &twin}) {
      c->group(optimizer(GA_OPTIMIZER_ADAM));
      add(*c, 0, c == &ctx ? p : q, {rows, columns}, with_rows(how));
    }
    Indices good;
    for (int64_t i = 0; i < 100; ++i) good.push_back((i * 37) % rows);
    for (int t = 0; t < 3; ++t) {
      for (Context* c : {&ctx, &twin}) {
        EXPECT_OK(ga_micro_begin(*c, 0, 1, nullptr));
        if (t > 0) {
          EXPECT_OK(accumulate_rows(*c, 0, good, GA_I64, values.data()));
        }
      }
      const ga_window_info before = window(ctx);
      for (const int32_t index_dtype : {GA_I32, GA_I64}) {
        for (const int64_t bad : {int64_t{-1}, rows, int64_t{INT32_MAX}, int64_t{INT32_MIN},
                                  (int64_t{1} << 32) + 1, INT64_MAX, INT64_MIN}) {
          if (index_dtype == GA_I32 && bad != static_cast<int32_t>(bad)) continue;
          for (const size_t where : {size_t{0}, size_t{57}, size_t{99}}) {
            Indices indices = good;
            indices[where] = bad;
            EXPECT_TRUE(refused(accumulate_rows(ctx, 0, indices, index_dtype, values.data()),
                                GA_ERROR_INVALID_ARGUMENT,
                                {std::to_string(bad), std::to_string(where), "999"}));
          }
        }
      }
      EXPECT_TRUE(same_window(window(ctx), before));
      for (Context* c : {&ctx, &twin}) {
        EXPECT_OK(accumulate_rows(*c, 0, {5, 6, 7}, GA_I32, values.data()));
        EXPECT_OK(ga_micro_end(*c));
        step(*c);
      }
      EXPECT_TRUE(p == q) << t;
    }
  }
}

TEST(Rows, WrongCalls) {
  Tensor p(GA_F32, 12), plain(GA_F32, 12), values(GA_F32, 12, 1);
  Context ctx;
  ctx.group(plain_sgd());
  add(ctx, 0, p, {4, 3}, with_rows(GA_ROWS_DENSE));
  add(ctx, 0, plain, {4, 3});
  const int32_t index[2] = {1, 0};
  const auto rows = [&](ga_context* c, ga_param param, const void* indices, int32_t dtype,
                        int64_t count, const void* data) {
    return ga_accumulate_rows(c, param, indices, dtype, count, data);
  };
  EXPECT_EQ(rows(ctx, 0, index, GA_I32, 1, values.data()), GA_ERROR_INVALID_STATE);
  EXPECT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
  const ga_window_info before = window(ctx);
  const ga_status invalid = GA_ERROR_INVALID_ARGUMENT;
  EXPECT_TRUE(refused(rows(nullptr, 0, index, GA_I32, 1, values.data()), invalid, {"ctx"}));
  EXPECT_TRUE(refused(rows(ctx, 2, index, GA_I32, 1, values.data()), invalid, {"2"}));
  EXPECT_TRUE(refused(rows(ctx, -1, index, GA_I32, 1, values.data()), invalid, {"-1"}));
  EXPECT_TRUE(refused(rows(ctx, 0, nullptr, GA_I32, 1, values.data()), invalid, {"indices"}));
  EXPECT_TRUE(refused(rows(ctx, 0, index, GA_I32, 1, nullptr), invalid, {"values"}));
  EXPECT_TRUE(refused(rows(ctx, 0, index, GA_I32, -1, values.data()), invalid, {"count", "-1"}));
  EXPECT_TRUE(refused(rows(ctx, 0, index, GA_F32, 1, values.data()), invalid, {"index_dtype"}));
  EXPECT_TRUE(refused(rows(ctx, 0, index, 0, 1, values.data()), invalid, {"index_dtype", "0"}));
  const auto* odd = reinterpret_cast<const uint8_t*>(index) + 1;
  EXPECT_TRUE(refused(rows(ctx, 0, odd, GA_I32, 1, values.data()), invalid, {"indices"}));
  odd = static_cast<const uint8_t*>(values.data()) + 1;
  EXPECT_TRUE(refused(rows(ctx, 0, index, GA_I32, 1, odd), invalid, {"values"}));
  // The parameter itself as values, and more rows than the address space can hold.
  EXPECT_NE(rows(ctx, 0, index, GA_I32, 1, p.data()), GA_OK);
  EXPECT_NE(rows(ctx, 0, index, GA_I32, INT64_MAX / 8, values.data()), GA_OK);
  const ga_status status = rows(ctx, 1, index, GA_I32, 1, values.data());
  EXPECT_TRUE(refused(status, GA_ERROR_INVALID_ARGUMENT, {"rows"})) << "rows is GA_ROWS_NONE";
  EXPECT_TRUE(same_window(window(ctx), before));
  EXPECT_OK(rows(ctx, 0, index, GA_I32, 2, values.data()));
  EXPECT_OK(ga_micro_end(ctx));
  step(ctx);
  EXPECT_EQ(p.get(0), -1);
  EXPECT_EQ(p.get(3), -1);
  EXPECT_EQ(p.get(6), 0);
  EXPECT_EQ(plain.get(0), 0);
}

TEST(Rows, WrongOptions) {
  Tensor p(GA_F32, 12), half(GA_BF16, 12);
  Context ctx;
  ctx.group(plain_sgd());
  const auto expect = [&](Tensor& t, const std::vector<int64_t>& shape, const ga_param_options& o,
                          ga_status status, std::vector<std::string> words) {
    words.push_back("\"e\"");
    EXPECT_TRUE(refused(try_add(ctx, 0, "e", t.data(), t.dtype(), shape, o), status, words));
  };
  expect(p, {4, 3}, with_rows(3), GA_ERROR_INVALID_ARGUMENT, {"rows", "3"});
  expect(p, {4, 3}, with_rows(-1), GA_ERROR_INVALID_ARGUMENT, {"rows", "-1"});
  expect(p, {}, with_rows(GA_ROWS_DENSE), GA_ERROR_UNSUPPORTED, {"rows"});
  for (const int32_t dtype : {GA_F16, GA_BF16}) {
    ga_param_options o = with_rows(GA_ROWS_DENSE);
    o.accumulator_dtype = dtype;
    expect(half, {4, 3}, o, GA_ERROR_UNSUPPORTED, {"rows", "16 bits"});
  }
}

TEST(Rows, NoRowsAreNoGradient) {
  ga_config c = config();
  c.nonfinite = GA_NONFINITE_DROP_MICRO;
  Context ctx(c);
  Block p(6, 1.0f), values(6, 5.0f);
  const std::vector<int64_t> shape = {3, 2};
  const ga_param_options o = with_rows(GA_ROWS_LAZY);
  EXPECT_OK(ga_param_add(ctx, ctx.group(plain_sgd()), "p", p.data(), GA_F32, 2, shape.data(), &o,
                         nullptr));
  for (const void* data :
       {static_cast<const void*>(values.data()), static_cast<const void*>(nullptr)}) {
    EXPECT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
    EXPECT_OK(ga_accumulate_rows(ctx, 0, nullptr, GA_I32, 0, data));
    EXPECT_OK(ga_micro_end(ctx));
    step(ctx);
    EXPECT_EQ(p, Block(6, 1.0f));
  }
}

// A micro-batch that is checked as a whole keeps its contributions until it ends, and then needs
// room for all their rows. Here each of many calls brings new rows.
TEST(Rows, ManyCallsInADeferredMicroBatch) {
  const int64_t rows = 64000, columns = 2, calls = 64, each = rows / calls;
  for (const int64_t bad_micro : {0, 1}) {
    const int32_t kind = bad_micro == 0 ? GA_ROWS_DENSE : GA_ROWS_LAZY;
    ga_config c = config();
    c.nonfinite = GA_NONFINITE_DROP_MICRO;
    Tensor p(GA_F32, rows * columns), bad(GA_F32, each * columns, NAN);
    Context ctx(c);
    ctx.group(plain_sgd());
    add(ctx, 0, p, {rows, columns}, with_rows(kind));
    std::vector<Indices> indices(static_cast<size_t>(calls));
    std::vector<Tensor> values;
    values.reserve(static_cast<size_t>(calls));
    for (int64_t k = 0; k < calls; ++k) {
      for (int64_t i = 0; i < each; ++i) {
        indices[static_cast<size_t>(k)].push_back(i * calls + k);
      }
      values.emplace_back(GA_F32, each * columns, 1 + static_cast<double>(k));
    }
    for (int64_t micro = 0; micro < 2; ++micro) {
      EXPECT_OK(ga_micro_begin(ctx, micro, 1, nullptr));
      for (size_t k = 0; k < indices.size(); ++k) {
        const bool dropped = micro == bad_micro && k == 3;
        EXPECT_OK(
            accumulate_rows(ctx, 0, indices[k], GA_I64, dropped ? bad.data() : values[k].data()));
      }
      EXPECT_OK(ga_micro_end(ctx));
    }
    EXPECT_EQ(step(ctx).window_dropped, 1);
    for (int64_t i = 0; i < rows * columns; ++i) {
      ASSERT_EQ(p.get(i), -(1 + static_cast<double>(i / columns % calls))) << i;
    }
  }
}

TEST(Rows, LazyRowsStayInAWindowWithoutContributions) {
  ga_config c = config();
  c.missing = GA_MISSING_ZERO;
  Context ctx(c);
  ga_optimizer decaying = optimizer(GA_OPTIMIZER_ADAMW);
  decaying.lr = 0.1;
  decaying.weight_decay = 0.5;
  Block p(6, 1.0f), values(2, 5.0f);
  const std::vector<int64_t> shape = {3, 2};
  const ga_param_options o = with_rows(GA_ROWS_LAZY);
  EXPECT_OK(
      ga_param_add(ctx, ctx.group(decaying), "p", p.data(), GA_F32, 2, shape.data(), &o, nullptr));
  EXPECT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
  EXPECT_OK(accumulate_rows(ctx, 0, {1}, GA_I32, values.data()));
  EXPECT_OK(ga_micro_end(ctx));
  step(ctx);
  EXPECT_LT(p[2], 1.0f);
  const Block after = p;
  EXPECT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
  EXPECT_OK(ga_micro_end(ctx));
  EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  EXPECT_EQ(p, after);
}

TEST(Rows, FrozenAndOfWeightZeroAreNotRead) {
  Tensor p(GA_F32, 12, 1), bad(GA_F32, 12, NAN);
  Context ctx;
  ctx.group(plain_sgd());
  add(ctx, 0, p, {4, 3}, with_rows(GA_ROWS_DENSE));
  EXPECT_OK(ga_param_set_frozen(ctx, 0, 1));
  EXPECT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
  EXPECT_OK(accumulate_rows(ctx, 0, {1, 2}, GA_I32, bad.data()));
  EXPECT_OK(ga_micro_end(ctx));
  EXPECT_EQ(step(ctx).norm, 0);
  EXPECT_OK(ga_param_set_frozen(ctx, 0, 0));
  EXPECT_OK(ga_micro_begin(ctx, 0, 0, nullptr));
  EXPECT_OK(accumulate_rows(ctx, 0, {1, 2}, GA_I32, bad.data()));
  EXPECT_OK(ga_micro_end(ctx));
  EXPECT_EQ(step(ctx).outcome, GA_STEP_SKIPPED_EMPTY);
  for (int64_t i = 0; i < 12; ++i) EXPECT_EQ(p.get(i), 1);
}

// Loss scale, gradient kind and reduction apply as for whole gradients.
TEST(Rows, AreScaledLikeWholeGradients) {
  for (const int32_t kind : {GA_GRADIENT_MEAN, GA_GRADIENT_SUM}) {
    for (const int32_t reduce : {GA_REDUCE_MEAN, GA_REDUCE_SUM}) {
      ga_config c = config();
      c.gradient_kind = kind;
      c.reduce = reduce;
      c.loss_scale = 16;
      const Case which = {"", {20, 10}, GA_F32, GA_F32, GA_I32};
      ga_optimizer o = optimizer(GA_OPTIMIZER_SGD);
      o.lr = 1;
      Pair pair(which, o, c, GA_ROWS_DENSE);
      pair.micro(3, [&] { pair.rows({1, 2, 1}); });
      pair.micro(5, [&] { pair.rows({2}); });
      pair.step_both();
      EXPECT_TRUE(pair.equal());
    }
  }
}

// ---- The same bits ------------------------------------------------------------------------------

std::vector<Tensor> shared_rows(int32_t threads, ga_parallel_for loops) {
  static const Tensor pool = random_tensor(GA_BF16, 500000, 5);  // all values are parts of it
  ga_config c = config();
  c.num_threads = threads;
  c.parallel_for = loops;
  std::vector<Tensor> p;
  p.reserve(10);
  Context ctx(c);
  ga_optimizer adam = optimizer(GA_OPTIMIZER_ADAM);
  ctx.group(adam);
  const std::vector<int64_t> shapes[] = {{300, 64}, {300, 1}, {300}, {3, 70000}, {5000, 64}};
  const ga_clip global = clip(GA_CLIP_GLOBAL, 0.5);
  EXPECT_OK(ga_context_set_clip(ctx, &global));
  for (const auto& shape : shapes) {
    p.push_back(random_tensor(GA_F32, product(shape), 1));
    add(ctx, 0, p.back(), shape, with_rows(p.size() % 2 ? GA_ROWS_LAZY : GA_ROWS_DENSE, GA_BF16));
  }
  Random random(3);
  for (int t = 0; t < 3; ++t) {
    for (int k = 0; k < 2; ++k) {
      EXPECT_OK(ga_micro_begin(ctx, k, 0.7, nullptr));
      for (size_t i = 0; i < p.size(); ++i) {
        const int64_t columns = product(shapes[i]) / shapes[i][0];
        Indices indices;
        for (int n = 0; n < (columns > 1000 ? 7 : 2000); ++n) {
          indices.push_back(random.below(shapes[i][0]));
        }
        const void* values = pool.at(random.below(10000));
        EXPECT_OK(accumulate_rows(ctx, static_cast<ga_param>(i), indices, GA_I32, values));
        if (t == 1 && k == 1) {
          EXPECT_OK(ga_accumulate_part(ctx, static_cast<ga_param>(i), pool.data()));
        }
      }
      EXPECT_OK(ga_micro_end(ctx));
    }
    EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
  }
  return p;
}

void backwards(void*, int64_t count, ga_task task, void* data) {
  for (int64_t i = count; i-- > 0;) task(data, i);
}

TEST(Rows, SameBitsForAnyThreadsAndIsa) {
  const std::vector<Tensor> one = shared_rows(1, nullptr);
  const auto same = [&](const std::vector<Tensor>& other) {
    for (size_t i = 0; i < one.size(); ++i) {
      EXPECT_TRUE(one[i] == other[i]) << "tensor " << i;
    }
  };
  for (const int32_t threads : {2, 3, 8}) same(shared_rows(threads, nullptr));
  same(shared_rows(4, backwards));
  on_every_isa([&] { same(shared_rows(2, nullptr)); });
}

// ---- What they cost -----------------------------------------------------------------------------

TEST(Rows, AreCountedAsMemory) {
  Tensor p(GA_F32, 100000 * 8), q(GA_F32, 8);
  Context ctx;
  ctx.group(plain_sgd());
  add(ctx, 0, q);
  EXPECT_EQ(memory(ctx).rows, 0);
  add(ctx, 0, p, {100000, 8}, with_rows(GA_ROWS_LAZY));
  const ga_memory m = memory(ctx);
  EXPECT_GE(m.rows, 4 * 100000);
  EXPECT_LE(m.rows, 4 * 100000 + 8192);
  EXPECT_EQ(m.total,
            m.accumulators + m.optimizer_state + m.workspace + m.masters + m.averages + m.rows);
  const Tensor values(GA_F32, 80, 1);
  EXPECT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
  EXPECT_OK(accumulate_rows(ctx, 1, {9, 1, 9, 3, 5, 7, 11, 13, 2, 4}, GA_I32, values.data()));
  EXPECT_OK(ga_micro_end(ctx));
  EXPECT_LE(memory(ctx).rows, 4 * 100000 + 8192 + 40 * 10 + 65536);
  step(ctx);
}

// Only the pages of the touched rows are accessible; all other pages of the parameter are
// protected.
TEST(Rows, LazyStepsTouchTheirRowsAlone) {
  const int64_t rows = 200000, columns = 64;
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t bytes = static_cast<size_t>(rows * columns) * sizeof(float);
  void* map = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(map, MAP_FAILED);
  auto* table = static_cast<float*>(map);
  for (const int32_t kind : {GA_OPTIMIZER_SGD, GA_OPTIMIZER_ADAM}) {
    Context ctx;
    ga_optimizer o = optimizer(kind);
    o.lr = 1;
    o.eps = 0;
    ctx.group(o);
    const int64_t shape[] = {rows, columns};
    const ga_param_options options = with_rows(GA_ROWS_LAZY);
    ASSERT_OK(ga_param_add(ctx, 0, "table", table, GA_F32, 2, shape, &options, nullptr));
    for (int t = 0; t < 3; ++t) {
      Indices indices;
      std::set<size_t> pages;
      for (int64_t i = 0; i < 1000; ++i) {
        indices.push_back((i * 7919 + t) % rows);
        const size_t first = static_cast<size_t>(indices.back() * columns) * sizeof(float);
        pages.insert(first / page);
        pages.insert((first + static_cast<size_t>(columns) * sizeof(float) - 1) / page);
      }
      ASSERT_EQ(mprotect(map, bytes, PROT_NONE), 0);
      for (const size_t each : pages) {
        ASSERT_EQ(mprotect(static_cast<char*>(map) + each * page, page, PROT_READ | PROT_WRITE), 0);
      }
      for (const int64_t row : indices) std::fill_n(table + row * columns, columns, 0.0f);
      const Block values(static_cast<size_t>(1000 * columns), 2);
      EXPECT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
      EXPECT_OK(accumulate_rows(ctx, 0, indices, GA_I64, values.data()));
      EXPECT_OK(ga_micro_end(ctx));
      const ga_step_result r = step(ctx);
      EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
      EXPECT_NEAR(r.norm, 2 * std::sqrt(64000.0), ref::kUsualNorm * 600);
      EXPECT_LT(table[indices[999] * columns + 63], -0.5f);
      ASSERT_EQ(mprotect(map, bytes, PROT_READ | PROT_WRITE), 0);
    }
  }
  munmap(map, bytes);
}

// A lazy step does not touch the other rows of the library's arrays either: a dense step, which
// moves 200 times as many rows, takes at least 20 times as long. The rows are the same each time,
// so that their pages are present, and the fastest of several tries counts, because other processes
// may use the machine.
TEST(Rows, LazyStepsCostTheirRows) {
  if (is_sanitized()) GTEST_SKIP() << "times mean nothing under a sanitizer";
  const int64_t rows = 200000, columns = 64;
  double seconds[2] = {INFINITY, INFINITY};
  for (const bool lazy : {false, true}) {
    Block table(static_cast<size_t>(rows * columns), 1);
    Context ctx;
    ctx.group(optimizer(GA_OPTIMIZER_ADAM));
    const int64_t shape[] = {rows, columns};
    const ga_param_options options = with_rows(lazy ? GA_ROWS_LAZY : GA_ROWS_DENSE);
    ASSERT_OK(ga_param_add(ctx, 0, "table", table.data(), GA_F32, 2, shape, &options, nullptr));
    const Block values(static_cast<size_t>(1000 * columns), 0.5f);
    Indices indices;
    for (int64_t i = 0; i < 1000; ++i) indices.push_back(i * 7919 % rows);
    for (int t = 0; t < 8; ++t) {
      const auto start = std::chrono::steady_clock::now();
      EXPECT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
      EXPECT_OK(accumulate_rows(ctx, 0, indices, GA_I64, values.data()));
      EXPECT_OK(ga_micro_end(ctx));
      EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
      if (t > 0) seconds[lazy] = std::min(seconds[lazy], taken.count());  // the first allocates
    }
  }
  EXPECT_GT(seconds[0] / seconds[1], 20) << seconds[0] << " s dense, " << seconds[1] << " s lazy";
}

// Accumulating rows costs only its rows, in a dense parameter too: no pass clears the accumulator,
// which would take a third of what the whole gradient takes, or more.
TEST(Rows, AccumulatingCostsTheRows) {
  if (is_sanitized()) GTEST_SKIP() << "times mean nothing under a sanitizer";
  const int64_t rows = 200000, columns = 64;
  Block table(static_cast<size_t>(rows * columns), 1),
      whole(static_cast<size_t>(rows * columns), 1);
  Context ctx;
  ctx.group(plain_sgd());
  const int64_t shape[] = {rows, columns};
  const ga_param_options options = with_rows(GA_ROWS_DENSE);
  ASSERT_OK(ga_param_add(ctx, 0, "table", table.data(), GA_F32, 2, shape, &options, nullptr));
  const Block values(static_cast<size_t>(1000 * columns), 0.5f);
  double seconds[2] = {INFINITY, INFINITY};
  for (int t = 0; t < 12; ++t) {
    const bool sparse = t % 2 == 1;
    Indices indices;
    for (int64_t i = 0; i < 1000; ++i) indices.push_back((i * 7919 + t) % rows);
    EXPECT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
    const auto start = std::chrono::steady_clock::now();
    if (sparse) {
      EXPECT_OK(accumulate_rows(ctx, 0, indices, GA_I64, values.data()));
    } else {
      EXPECT_OK(ga_accumulate_part(ctx, 0, whole.data()));
    }
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    EXPECT_OK(ga_micro_end(ctx));
    EXPECT_OK(ga_discard(ctx));
    if (t > 1) seconds[sparse] = std::min(seconds[sparse], taken.count());
  }
  EXPECT_GT(seconds[0] / seconds[1], 6) << seconds[0] << " s whole, " << seconds[1] << " s rows";
}

}  // namespace
}  // namespace ga::test
