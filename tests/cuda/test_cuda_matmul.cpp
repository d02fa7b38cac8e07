// SPDX-License-Identifier: Apache-2.0
//
// Results of cuBLAS: gradients that are matrix products, and Newton-Schulz for Muon. They are
// compared with float64, because cuBLAS chooses the order of its sums.
#include "device.hpp"

namespace ga::test {
namespace {

class Matmul : public OnDevice<> {};

// A matrix as it is stored, with ld elements from row to row and NaN between the rows.
Tensor matrix(int32_t dtype, int64_t rows, int64_t columns, int64_t ld, uint64_t seed) {
  const Tensor values = numbers(dtype, rows * columns, seed);
  Tensor result(dtype, std::max<int64_t>(0, rows - 1) * ld + (rows > 0 ? columns : 0));
  result.fill(NAN);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) result.set(i * ld + j, values.get(i * columns + j));
  return result;
}

// A sum of products in float64, with the sum of their magnitudes.
struct Expected {
  std::vector<double> sum, magnitude;
  explicit Expected(int64_t count)
      : sum(static_cast<size_t>(count)), magnitude(static_cast<size_t>(count)) {}

  void add(double alpha, int64_t m, int64_t n, int64_t k, const Tensor& a, int64_t lda, bool ta,
           const Tensor& b, int64_t ldb, bool tb) {
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j)
        for (int64_t l = 0; l < k; ++l) {
          const double x = a.get(ta ? l * lda + i : i * lda + l);
          const double y = b.get(tb ? j * ldb + l : l * ldb + j);
          at(i * n + j, alpha * x * y);
        }
  }
  void add(double alpha, const Tensor& g) {
    for (int64_t i = 0; i < g.count(); ++i) at(i, alpha * g.get(i));
  }
  void at(int64_t i, double x) {
    sum[static_cast<size_t>(i)] += x;
    magnitude[static_cast<size_t>(i)] += std::abs(x);
  }
};

// Compares the gradient that ga_gradient returns, and its norm in the result.
void expect_gradient(Machine& m, ga_param id, const Expected& expected, double divisor, int64_t k) {
  const auto count = static_cast<int64_t>(expected.sum.size());
  const void* data = nullptr;
  int32_t dtype = 0;
  ASSERT_OK(ga_gradient(m, id, &data, &dtype, nullptr));
  ASSERT_EQ(dtype, GA_F32);
  const Tensor got = m.read(data, dtype, count);
  for (int64_t i = 0; i < count; ++i) {
    const auto j = static_cast<size_t>(i);
    const double tolerance =
        static_cast<double>(k + 8) * 0x1p-23 * expected.magnitude[j] / divisor + 1e-37;
    ASSERT_NEAR(got.get(i), expected.sum[j] / divisor, tolerance) << i;
  }
}

double norm_of(const Expected& expected, double divisor) {
  double squares = 0;
  for (const double x : expected.sum) squares += x * x;
  return std::sqrt(squares) / divisor;
}

TEST_F(Matmul, OfEveryDtypeAndTransposition) {
  for (const int32_t dtype : {GA_F32, GA_BF16, GA_F16}) {
    for (const bool ta : {false, true}) {
      for (const bool tb : {false, true}) {
        SCOPED_TRACE(testing::Message() << format(dtype).name << " " << ta << tb);
        const int64_t m = 19, n = 33, k = 21, pad = dtype == GA_BF16 ? 0 : 5;
        const int64_t lda = (ta ? m : k) + pad, ldb = (tb ? k : n) + pad;
        Machine machine(GA_DEVICE_CUDA);
        const ga_group g = machine.group(optimizer(GA_OPTIMIZER_EXTERNAL));
        const ga_param id = machine.add(g, Tensor(GA_F32, m * n), {m, n});
        Expected expected(m * n);
        for (int64_t micro = 0; micro < 2; ++micro) {
          const double weight = micro == 0 ? 2 : 0.5, scale = micro == 0 ? 1 : 64;
          EXPECT_OK(ga_micro_begin(machine, micro, weight, MicroOptions(scale)));
          for (uint64_t twice = 0; twice < 2; ++twice) {
            const uint64_t seed = 10 * static_cast<uint64_t>(micro) + twice;
            const Tensor a = matrix(dtype, ta ? k : m, ta ? m : k, lda, seed);
            const Tensor b = matrix(dtype, tb ? n : k, tb ? k : n, ldb, seed + 100);
            EXPECT_OK(ga_accumulate_matmul(machine, id, k, machine.put(a), lda, ta, machine.put(b),
                                           ldb, tb, dtype));
            expected.add(weight / scale, m, n, k, a, lda, ta, b, ldb, tb);
          }
          if (micro == 1) {
            const Tensor dense = numbers(GA_F32, m * n, 55);
            EXPECT_OK(ga_accumulate_part(machine, id, machine.put(dense)));
            expected.add(weight / scale, dense);
          }
          EXPECT_OK(ga_micro_end(machine));
        }
        EXPECT_OK(ga_step(machine, nullptr));
        const ga_step_result r = result_of(machine);
        EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
        EXPECT_NEAR(r.norm, norm_of(expected, 2.5), 1e-5 * r.norm);
        expect_gradient(machine, id, expected, 2.5, 4 * k);
      }
    }
  }
}

// A product after a whole gradient, after rows, and in a window with live gradients.
TEST_F(Matmul, AfterOtherContributions) {
  for (const int32_t life : {GA_GRADIENTS_CONSUMED, GA_GRADIENTS_LIVE}) {
    ga_config c = config();
    c.gradient_life = life;
    const int64_t m = 40, n = 9, k = 70;
    Machine machine(GA_DEVICE_CUDA, c);
    ga_param_options o = options();
    o.rows = GA_ROWS_DENSE;
    const ga_group group = machine.group(optimizer(GA_OPTIMIZER_EXTERNAL));
    const ga_param id = machine.add(group, Tensor(GA_F32, m * n), {m, n}, o);
    const Tensor a = matrix(GA_F32, m, k, k, 1), b = matrix(GA_F32, k, n, n, 2);
    const Tensor dense = numbers(GA_F32, m * n, 3), rows = numbers(GA_F32, 2 * n, 4);
    for (int window = 0; window < 2; ++window) {
      Expected expected(m * n);
      EXPECT_OK(ga_micro_begin(machine, 0, 1, nullptr));
      if (window == 0) {
        EXPECT_OK(ga_accumulate_part(machine, id, machine.put(dense)));
        expected.add(1, dense);
      } else {
        Tensor indices(GA_F32, 2);
        const int32_t list[] = {39, 3};
        memcpy(indices.data(), list, sizeof list);
        EXPECT_OK(
            ga_accumulate_rows(machine, id, machine.put(indices), GA_I32, 2, machine.put(rows)));
        for (int64_t j = 0; j < n; ++j) {
          expected.at(39 * n + j, rows.get(j));
          expected.at(3 * n + j, rows.get(n + j));
        }
      }
      EXPECT_OK(ga_accumulate_matmul(machine, id, k, machine.put(a), k, GA_NO_TRANSPOSE,
                                     machine.put(b), n, GA_NO_TRANSPOSE, GA_F32));
      expected.add(1, m, n, k, a, k, false, b, n, false);
      EXPECT_OK(ga_micro_end(machine));
      EXPECT_OK(ga_step(machine, nullptr));
      const double norm = norm_of(expected, 1);
      EXPECT_NEAR(result_of(machine).norm, norm, 1e-5 * norm);
      expect_gradient(machine, id, expected, 1, k);
    }
  }
}

// A loss scale that only the device knows, and a product that overflows.
TEST_F(Matmul, WithALossScaler) {
  const int64_t m = 16, n = 12, k = 30;
  Machine machine(GA_DEVICE_CUDA);
  ga_loss_scaler s;
  EXPECT_OK(ga_loss_scaler_init(&s, sizeof s));
  s.initial_scale = 48;
  s.growth_factor = 3;
  s.growth_interval = 1;
  s.backoff_factor = 0.5;
  EXPECT_OK(ga_context_set_loss_scaler(machine, &s));
  const ga_group group = machine.group(optimizer(GA_OPTIMIZER_EXTERNAL));
  const ga_param id = machine.add(group, Tensor(GA_F32, m * n), {m, n});
  const double scales[] = {48, 144, 432, 216};
  for (int window = 0; window < 4; ++window) {
    Expected expected(m * n);
    for (int64_t micro = 0; micro < 2; ++micro) {
      EXPECT_OK(ga_micro_begin(machine, micro, 3, nullptr));
      Tensor a = matrix(GA_F16, m, k, k, 7), b = matrix(GA_F16, k, n, n, 8);
      if (window == 2 && micro == 1) a.set(5, INFINITY);
      EXPECT_OK(ga_accumulate_matmul(machine, id, k, machine.put(a), k, GA_NO_TRANSPOSE,
                                     machine.put(b), n, GA_NO_TRANSPOSE, GA_F16));
      expected.add(3 / scales[window], m, n, k, a, k, false, b, n, false);
      EXPECT_OK(ga_micro_end(machine));
    }
    EXPECT_OK(ga_step(machine, nullptr));
    const ga_step_result r = result_of(machine);
    EXPECT_EQ(r.loss_scale, scales[window]);
    if (window == 2) {
      EXPECT_EQ(r.outcome, GA_STEP_SKIPPED_NONFINITE);
      continue;
    }
    EXPECT_EQ(r.outcome, GA_STEP_APPLIED);
    expect_gradient(machine, id, expected, 6, 2 * k);
  }
}

TEST_F(Matmul, OfNothing) {
  Machine machine(GA_DEVICE_CUDA);
  const ga_group group = machine.group(optimizer(GA_OPTIMIZER_EXTERNAL));
  const ga_param id = machine.add(group, Tensor(GA_F32, 12), {3, 4});
  const ga_param empty = machine.add(group, Tensor(GA_F32, 0), {0, 4});
  const Tensor a = numbers(GA_F32, 12, 1), b = numbers(GA_F32, 12, 2);
  Expected expected(12);
  EXPECT_OK(ga_micro_begin(machine, 0, 1, nullptr));
  // A product over no columns is zero and overwrites the former contents.
  EXPECT_OK(ga_accumulate_matmul(machine, id, 0, nullptr, 1, 0, nullptr, 4, 0, GA_F32));
  EXPECT_OK(ga_accumulate_matmul(machine, empty, 3, nullptr, 3, 0, machine.put(b), 4, 0, GA_F32));
  EXPECT_OK(ga_micro_end(machine));
  EXPECT_OK(ga_micro_begin(machine, 1, 0, nullptr));
  EXPECT_OK(
      ga_accumulate_matmul(machine, id, 3, machine.put(a), 3, 0, machine.put(b), 4, 0, GA_F32));
  EXPECT_OK(ga_micro_end(machine));
  EXPECT_OK(ga_step(machine, nullptr));
  EXPECT_EQ(result_of(machine).norm, 0);
  expect_gradient(machine, id, expected, 1, 0);
}

// Captured windows give the bits of eager windows.
TEST_F(Matmul, Captured) {
  std::vector<Record> eager;
  for (const bool captured : {false, true}) {
    Machine machine(GA_DEVICE_CUDA);
    ga_loss_scaler s;
    EXPECT_OK(ga_loss_scaler_init(&s, sizeof s));
    s.growth_interval = 1;
    EXPECT_OK(ga_context_set_loss_scaler(machine, &s));
    const int64_t m = 50, n = 41, k = 64;
    const ga_param id = machine.add(machine.group(optimizer(GA_OPTIMIZER_ADAMW)),
                                    numbers(GA_F32, m * n, 1), {m, n});
    DeviceTensor a(Tensor(GA_BF16, m * k), machine.stream()),
        b(Tensor(GA_BF16, k * n), machine.stream());
    const auto window = [&] {
      for (int64_t micro = 0; micro < 2; ++micro) {
        EXPECT_OK(ga_micro_begin(machine, micro, 1, nullptr));
        EXPECT_OK(ga_accumulate_matmul(machine, id, k, a.data(), m, GA_TRANSPOSE, b.data(), n,
                                       GA_NO_TRANSPOSE, GA_BF16));
        EXPECT_OK(ga_micro_end(machine));
      }
      EXPECT_OK(ga_step(machine, nullptr));
    };
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    for (uint64_t w = 0; w < 4; ++w) {
      a.put(numbers(GA_BF16, m * k, w));
      b.put(numbers(GA_BF16, k * n, 10 + w));
      if (w == 1 && captured) {
        ASSERT_CUDA(cudaStreamBeginCapture(machine.stream(), cudaStreamCaptureModeThreadLocal));
        window();
        ASSERT_CUDA(cudaStreamEndCapture(machine.stream(), &graph));
        ASSERT_CUDA(cudaGraphInstantiate(&exec, graph, 0));
      }
      if (exec)
        EXPECT_CUDA(cudaGraphLaunch(exec, machine.stream()));
      else
        window();
      machine.note_result(result_of(machine), 0);
      machine.note_params();
    }
    if (exec) {
      EXPECT_CUDA(cudaGraphExecDestroy(exec));
      EXPECT_CUDA(cudaGraphDestroy(graph));
      expect_same_records(eager, machine.records());
    } else {
      eager = machine.records();
    }
  }
}

// ---- Muon ----------------------------------------------------------------------------------------

TEST_F(Matmul, MuonFollowsFloat64) {
  for (const NamedOptimizer& o : matrix_optimizers()) {
    SCOPED_TRACE(o.name);
    const Layout layout = Layout::of({{24, 16}, {16, 24}, {1, 9}, {9, 1}, {33, 70}, {5, 5}});
    Block block = parameters(layout, 1);
    Model model(layout, {o.optimizer}, config(), block);
    Machine m(GA_DEVICE_CUDA);
    const ga_group group = m.group(o.optimizer);
    const auto piece = [&](const Block& from, size_t i) {
      Tensor t(GA_F32, layout.counts[i]);
      memcpy(t.data(), &from[static_cast<size_t>(layout.offsets[i])],
             4 * static_cast<size_t>(layout.counts[i]));
      return t;
    };
    for (size_t i = 0; i < layout.size(); ++i)
      m.add(group, piece(block, i), layout.shapes[i], options(), static_cast<int64_t>(i % 3));
    for (uint64_t t = 0; t < 6; ++t) {
      for (uint64_t k = 0; k < 2; ++k) {
        const Block g = even_gradients(layout, 2, 2 * t + k);
        std::vector<const void*> list;
        for (size_t i = 0; i < layout.size(); ++i) list.push_back(m.put(piece(g, i)));
        m.accumulate(list, 1);
        model.accumulate(g, 1);
      }
      m.step();
      model.step();
      for (size_t i = 0; i < layout.size(); ++i) {
        const Tensor p = m.value(static_cast<ga_param>(i));
        memcpy(&block[static_cast<size_t>(layout.offsets[i])], p.data(),
               4 * static_cast<size_t>(layout.counts[i]));
      }
      ASSERT_TRUE(model.matches(block)) << "step " << t + 1;
    }
  }
}

}  // namespace
}  // namespace ga::test
