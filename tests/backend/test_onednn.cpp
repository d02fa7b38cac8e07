// SPDX-License-Identifier: Apache-2.0
//
// Matrix products, compared with float64: the oneDNN module by itself, and ga_accumulate_matmul on
// top of it. onednn/host.c tests a missing module and a second oneDNN, which need processes of
// their own.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "backend/cpu/kernels.hpp"
#include "core/error.hpp"
#include "core/module.hpp"
#include "formats.hpp"
#include "matrices.hpp"

namespace ga::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

// ---- The module itself --------------------------------------------------------------------------

// A table of products.
class Table : public testing::Test {
 protected:
  void open_onednn() {
    if (!has_onednn()) GTEST_SKIP() << "this build has no oneDNN";
    module_ = static_cast<const ga_matmul_module*>(open_module("onednn", GA_MATMUL_ABI));
  }

  void multiply(int64_t m, int64_t n, int64_t k, float alpha, const Factor& a, const Factor& b,
                float beta, Matrix& c) {
    const char* error = module_->multiply(m, n, k, alpha, a.stored.data(), a.stored.ld(),
                                          a.transposed, b.stored.data(), b.stored.ld(),
                                          b.transposed, beta, c.data(), c.ld(), workspace());
    ASSERT_EQ(error, nullptr) << error;
  }

  // Checks every element of one product of new data, and that nothing outside the result was
  // written.
  void check(int64_t m, int64_t n, int64_t k, bool transpose_a, bool transpose_b, int64_t padding,
             float alpha, float beta, uint64_t seed) {
    SCOPED_TRACE(testing::Message()
                 << m << " x " << n << " x " << k << " transposed " << transpose_a << transpose_b
                 << " padding " << padding << " alpha " << alpha << " beta " << beta);
    const Factor a(m, k, transpose_a, padding, seed), b(k, n, transpose_b, 2 * padding, seed + 1);
    Matrix c(m, n, n + padding, seed + 2);
    const Matrix before = c;
    if (beta == 0)
      for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) c.at(i, j) = (i + j) % 2 == 0 ? kNan : kInf;
    multiply(m, n, k, alpha, a, b, beta, c);
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) {
        Sum want = dot(a, b, k, i, j, alpha);
        want.add(beta == 0 ? 0.0 : before.at(i, j));
        ASSERT_TRUE(want.holds(c.at(i, j)))
            << "c[" << i << "][" << j << "] is " << c.at(i, j) << ", not " << want.value
            << "; tolerance " << want.tolerance();
        c.at(i, j) = before.at(i, j);
      }
    ASSERT_TRUE(same_bits(c.all(), Matrix(before).all())) << "wrote outside c";
  }

  float* workspace() {
    workspace_.resize(static_cast<size_t>(module_->workspace));
    return workspace_.data();
  }

  const ga_matmul_module* module_ = nullptr;
  std::vector<float> workspace_;
};

class OneDnn : public Table {
 protected:
  void SetUp() override { open_onednn(); }
};

// oneDNN's, or the library's own of an ISA level.
class Products : public Table, public testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    if (GetParam() == std::string("oneDNN")) return open_onednn();
    const Isa isa(GetParam());
    if (!Isa::available()) GTEST_SKIP() << "this build or this processor has no " << GetParam();
    module_ = &cpu::choose_isa().products();
  }
};

std::vector<const char*> tables() {
  std::vector<const char*> result(std::begin(kIsaLevels), std::end(kIsaLevels));
  result.push_back("oneDNN");
  return result;
}
INSTANTIATE_TEST_SUITE_P(By, Products, testing::ValuesIn(tables()),
                         [](const auto& tested) { return identifier(tested.param); });

TEST_F(OneDnn, NamesItsVersion) {
  int major = 0, minor = -1, patch = -1;
  ASSERT_EQ(sscanf(module_->version, "oneDNN %d.%d.%d", &major, &minor, &patch), 3)
      << module_->version;
  EXPECT_TRUE(major == 2 || major == 3) << module_->version;
}

TEST_F(OneDnn, IsOpenedOnce) { EXPECT_EQ(open_module("onednn", GA_MATMUL_ABI), module_); }

// Dimensions at and next to the steps of the kernels, in random triples.
TEST_P(Products, MatchesFloat64) {
  const int64_t extents[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 47, 48, 49, 64, 65, 96, 97, 130};
  const float alphas[] = {1, -1, 0.37f, -0x1p-16f, 65536, 1.0f / 3};
  Random random(1);
  const auto pick = [&](const auto& list) {
    return list[random.below(static_cast<int64_t>(std::size(list)))];
  };
  for (uint64_t round = 0; round < 400; ++round) {
    const int64_t m = pick(extents), n = pick(extents), k = pick(extents);
    check(m, n, k, round & 1, round & 2, round & 4 ? 3 : 0, pick(alphas), round & 8 ? 1.0f : 0.0f,
          10 * round);
    if (HasFatalFailure()) return;
  }
}

// Weight gradients of small and large micro-batches, larger than the blocks of the kernels.
// Larger ones. Of the library's own levels one, since OwnProducts.SameBits compares the others with it.
class LayerProducts : public Products {};
INSTANTIATE_TEST_SUITE_P(By, LayerProducts,
                         testing::Values(kIsaLevels[std::size(kIsaLevels) > 1 ? 1 : 0], "oneDNN"),
                         [](const auto& tested) { return identifier(tested.param); });

TEST_P(LayerProducts, MatchesFloat64OnLayers) {
  const int64_t shapes[][3] = {{512, 784, 4},  {10, 512, 64},   {256, 128, 64},  {64, 64, 3000},
                               {1, 700, 129},  {700, 1, 129},   {1, 1, 5000},    {3, 500, 1},
                               {385, 37, 700}, {129, 257, 400}, {37, 1025, 513}, {1025, 33, 65}};
  for (const auto& s : shapes)
    for (const bool transpose_a : {true, false})
      for (const float beta : {0.0f, 1.0f}) {
        check(s[0], s[1], s[2], transpose_a, false, 0, 0.37f, beta, 99);
        if (HasFatalFailure()) return;
      }
}

// Factors of bf16, whose products are exact in f32, so that only sums round.
TEST_F(OneDnn, ProductsOfBf16MatchFloat64) {
  if (!module_->multiply_bf16) GTEST_SKIP() << module_->version << " has none on this processor";
  const int64_t shapes[][3] = {{1, 1, 1},    {3, 5, 7},      {16, 16, 32},   {17, 33, 65},
                               {64, 48, 64}, {130, 97, 300}, {1, 700, 129},  {700, 1, 129},
                               {48, 48, 3},  {257, 129, 40}, {128, 384, 128}};
  for (const auto& [m, n, k] : shapes)
    for (int way = 0; way < 8; ++way) {
      SCOPED_TRACE(testing::Message() << m << " x " << n << " x " << k << " way " << way);
      const int64_t padding = way & 4 ? 3 : 0;
      Factor a(m, k, way & 1, padding, 5), b(k, n, way & 2, 2 * padding, 6);
      const auto narrow = [](Factor& f) {
        std::vector<uint16_t> result;
        for (float& x : f.stored.all()) {
          uint32_t bits;
          memcpy(&bits, &x, sizeof bits);
          bits &= 0xffff0000;  // towards zero: these numbers are of bf16
          memcpy(&x, &bits, sizeof x);
          result.push_back(static_cast<uint16_t>(bits >> 16));
        }
        return result;
      };
      const std::vector<uint16_t> a16 = narrow(a), b16 = narrow(b);
      Matrix c(m, n, n + padding, 7);
      const Matrix before = c;
      for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) c.at(i, j) = kNan;
      const char* const error =
          module_->multiply_bf16(m, n, k, a16.data() + 1, a.stored.ld(), way & 1, b16.data() + 1,
                                 b.stored.ld(), way >> 1 & 1, c.data(), c.ld());
      ASSERT_EQ(error, nullptr) << error;
      for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) {
          const Sum want = dot(a, b, k, i, j, 1);
          ASSERT_TRUE(want.holds(c.at(i, j)))
              << "c[" << i << "][" << j << "] is " << c.at(i, j) << ", not " << want.value
              << "; tolerance " << want.tolerance();
          c.at(i, j) = before.at(i, j);
        }
      ASSERT_TRUE(same_bits(c.all(), Matrix(before).all())) << "wrote outside c";
    }
}

TEST_P(Products, EmptyProducts) {
  Matrix c(3, 5, 7, 1);
  Matrix before = c;
  for (const float beta : {0.0f, 1.0f}) {
    EXPECT_EQ(
        module_->multiply(0, 5, 4, 1, nullptr, 4, 0, nullptr, 5, 0, beta, nullptr, 5, nullptr),
        nullptr);
    EXPECT_EQ(
        module_->multiply(3, 0, 4, 1, nullptr, 4, 0, nullptr, 1, 0, beta, c.data(), 7, nullptr),
        nullptr);
  }
  EXPECT_EQ(module_->multiply(3, 5, 0, 2, nullptr, 0, 0, nullptr, 5, 0, 1, c.data(), 7, nullptr),
            nullptr);
  EXPECT_TRUE(same_bits(c.all(), before.all()));
  c.at(1, 2) = kNan;
  EXPECT_EQ(module_->multiply(3, 5, 0, 2, nullptr, 0, 0, nullptr, 5, 0, 0, c.data(), 7, nullptr),
            nullptr);
  for (int64_t i = 0; i < 3; ++i)
    for (int64_t j = 0; j < 5; ++j) before.at(i, j) = 0;
  EXPECT_TRUE(same_bits(c.all(), before.all()));
}

TEST_P(Products, SaysWhatItRefuses) {
  float x[4] = {};
  EXPECT_NE(module_->multiply(2, 2, 2, 1, x, 1, 0, x, 2, 0, 0, x, 2, nullptr), nullptr);  // lda < k
  EXPECT_NE(module_->multiply(-1, 2, 2, 1, x, 2, 0, x, 2, 0, 0, x, 2, nullptr), nullptr);
}

// A non-finite element affects its row or column only.
TEST_P(Products, NonfiniteSpreadsAsInArithmetic) {
  for (const bool transposed : {false, true}) {
    Factor a(50, 33, transposed, 0, 1), b(33, 70, transposed, 0, 2);
    (transposed ? a.stored.at(5, 20) : a.stored.at(20, 5)) = kNan;
    (transposed ? b.stored.at(60, 7) : b.stored.at(7, 60)) = kInf;
    Matrix c(50, 70, 70, 3);
    multiply(50, 70, 33, 0.5f, a, b, 0, c);
    if (HasFatalFailure()) return;
    for (int64_t i = 0; i < 50; ++i)
      for (int64_t j = 0; j < 70; ++j) {
        if (i == 20) {
          EXPECT_TRUE(std::isnan(c.at(i, j)));
        } else if (j == 60) {
          EXPECT_FALSE(std::isfinite(c.at(i, j)));  // NaN where a is 0
        } else {
          EXPECT_TRUE(std::isfinite(c.at(i, j)));
        }
      }
  }
}

// Offsets of rows beyond 32 bits, in bytes and in elements.
TEST_P(Products, CountsIn64Bits) {
  const int64_t ld = (int64_t{1} << 30) + 5, rows = 3, columns = 20;
  const size_t bytes = static_cast<size_t>(rows * ld) * sizeof(float);
  void* map = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) GTEST_SKIP() << "13 GB of address space could not be reserved";
  float* const far = static_cast<float*>(map);
  const Factor a(rows, columns, false, 0, 1), b(rows, columns, false, 0, 2);
  for (int64_t i = 0; i < rows; ++i)
    std::copy_n(&a.stored.data()[i * columns], columns, far + i * ld);
  Matrix c(columns, columns, columns, 3);
  EXPECT_EQ(module_->multiply(columns, columns, rows, 1, far, ld, 1, b.stored.data(), columns, 0, 0,
                              c.data(), columns, workspace()),
            nullptr);
  for (int64_t i = 0; i < columns; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      Sum want;
      want.roundings = 5;
      for (int64_t p = 0; p < rows; ++p) want.add(double{a.at(p, i)} * b.at(p, j));
      EXPECT_TRUE(want.holds(c.at(i, j)));
    }
  munmap(map, bytes);
}

// Every shape is new, so anything kept for each shape would accumulate.
TEST_P(Products, KeepsNothing) {
  if (is_sanitized()) GTEST_SKIP() << "the sanitizer's allocator does not count";
  const Factor a(64, 64, true, 0, 1), b(64, 128, false, 0, 2);
  Matrix c(64, 128, 128, 3);
  const auto some = [&] {
    for (int64_t m = 1; m <= 64; ++m)
      for (int64_t n = 1; n <= 128; n += 3)
        if (module_->multiply(m, n, 64, 0.5f, a.stored.data(), 64, 1, b.stored.data(), 128, 0, 1,
                              c.data(), 128, workspace()))
          return false;
    return true;
  };
  const auto held = [] {
    const struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
  };
  multiply(64, 128, 64, 1, a, b, 0, c);
  const size_t before = held();
  ASSERT_TRUE(some());
  EXPECT_LE(held(), before + 4096);
}

// The library's own have the same bits at every level, and however a product is cut.
TEST(OwnProducts, SameBits) {
  Random random(5);
  for (int round = 0; round < 60; ++round) {
    const int64_t m = 1 + random.below(150), n = 1 + random.below(600), k = 1 + random.below(600);
    const Factor a(m, k, round & 1, 3, 1), b(k, n, round & 2, 0, 2);
    const float beta = round & 4 ? 1.0f : 0.0f;
    const Matrix before(m, n, n, 3);
    const auto run = [&](const ga_matmul_module& table, int64_t row, int64_t rows, Matrix& c) {
      const float* const from = a.stored.data() + row * (a.transposed ? 1 : a.stored.ld());
      std::vector<float> workspace(static_cast<size_t>(table.workspace), -7.0f);
      EXPECT_EQ(table.multiply(rows, n, k, 0.3f, from, a.stored.ld(), a.transposed, b.stored.data(),
                               b.stored.ld(), b.transposed, beta, c.data() + row * n, n,
                               workspace.data()),
                nullptr);
    };
    Matrix expected = before;
    {
      const Isa isa("scalar");
      run(cpu::choose_isa().products(), 0, m, expected);
    }
    for (const char* level : kIsaLevels) {
      const Isa isa(level);
      if (!Isa::available()) continue;
      Matrix c = before;
      const int64_t cut = random.below(m);
      run(cpu::choose_isa().products(), 0, cut, c);
      run(cpu::choose_isa().products(), cut, m - cut, c);
      ASSERT_TRUE(same_bits(c.all(), expected.all())) << level << " " << m << " " << n << " " << k;
    }
  }
}

// A product uses the calling thread and restores the program's number of OpenMP threads.
TEST_F(OneDnn, LeavesOpenMpAlone) {
  // The program's OpenMP, or else the one that oneDNN has loaded.
  void* const brought = dlopen("libgomp.so.1", RTLD_NOW | RTLD_NOLOAD);
  const auto find = [&](const char* name) {
    void* const own = dlsym(RTLD_DEFAULT, name);
    return own || !brought ? own : dlsym(brought, name);
  };
  const auto set = reinterpret_cast<void (*)(int)>(find("omp_set_num_threads"));
  const auto get = reinterpret_cast<int (*)()>(find("omp_get_max_threads"));
  if (!set || !get) GTEST_SKIP() << "there is no OpenMP in this process";
  const auto threads = [] {
    using Folder = std::filesystem::directory_iterator;
    return std::distance(Folder("/proc/self/task"), Folder());
  };
  const int before = get();
  set(5);
  const auto threads_before = threads();
  const Factor a(300, 300, true, 0, 1), b(300, 300, false, 0, 2);
  Matrix c(300, 300, 300, 3);
  multiply(300, 300, 300, 1, a, b, 0, c);
  EXPECT_EQ(get(), 5);
  EXPECT_EQ(threads(), threads_before);
  set(before);
}

// ---- Opening modules ----------------------------------------------------------------------------

TEST(OpenModule, SaysWhereItLookedBesideTheProgram) {
  unsetenv("GA_MODULE_PATH");
  const std::string folder = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  try {
    open_module("nobody_has_this", 1);
    FAIL() << "it was opened";
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), GA_ERROR_UNSUPPORTED);
    const std::string text = e.what();
    EXPECT_NE(text.find(folder + "/libgradaccum_nobody_has_this.so"), std::string::npos) << text;
    EXPECT_NE(text.find("cannot open shared object file"), std::string::npos) << text;
  }
}

// ---- ga_accumulate_matmul -----------------------------------------------------------------------

// A parameter whose reduced gradient can be read, and its expected value.
class Layer {
 public:
  Layer(int64_t rows, int64_t columns, const ga_config& config = test::config())
      : rows_(rows),
        columns_(columns),
        context_(config),
        sums_(static_cast<size_t>(rows * columns)) {
    data_.resize(sums_.size() + 1);
    const int64_t shape[] = {rows, columns};
    const ga_group group = context_.group(optimizer(GA_OPTIMIZER_EXTERNAL));
    EXPECT_OK(
        ga_param_add(context_, group, "w", data_.data() + 1, GA_F32, 2, shape, nullptr, &param_));
  }

  // Adds a parameter whose accumulator does not fit the caches, so that targets are in memory.
  void fill_caches() {
    int64_t bytes = int64_t{32} << 20;
    for (const int name : {_SC_LEVEL2_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE, _SC_LEVEL4_CACHE_SIZE})
      bytes = std::max<int64_t>(bytes, sysconf(name));
    filling_.resize(static_cast<size_t>(bytes) / sizeof(float));
    const int64_t count = static_cast<int64_t>(filling_.size());
    const ga_group group = context_.group(optimizer(GA_OPTIMIZER_EXTERNAL));
    EXPECT_OK(ga_param_add(context_, group, "filling", filling_.data(), GA_F32, 1, &count, nullptr,
                           nullptr));
  }

  // One micro-batch of one product.
  void micro(int64_t k, double weight, double loss_scale, uint64_t seed, bool transpose_a = true,
             bool transpose_b = false) {
    begin(weight, loss_scale);
    matmul(k, seed, transpose_a, transpose_b);
    EXPECT_OK(ga_micro_end(context_));
  }

  void begin(double weight, double loss_scale = 1) {
    weight_ = weight, loss_scale_ = loss_scale;
    weights_ += weight;
    EXPECT_OK(
        ga_micro_begin(context_, window(context_).micro_batches, weight, MicroOptions(loss_scale)));
  }

  void matmul(int64_t k, uint64_t seed, bool transpose_a = true, bool transpose_b = false) {
    const Factor a(rows_, k, transpose_a, seed % 3, seed),
        b(k, columns_, transpose_b, seed % 2, seed + 1);
    ASSERT_OK(ga_accumulate_matmul(context_, param_, k, a.stored.data(), a.stored.ld(),
                                   a.transposed, b.stored.data(), b.stored.ld(), b.transposed,
                                   GA_F32));
    for (int64_t i = 0; i < rows_; ++i)
      for (int64_t j = 0; j < columns_; ++j) {
        const Sum product = dot(a, b, k, i, j, weight_ / loss_scale_);
        Sum& sum = sums_[static_cast<size_t>(i * columns_ + j)];
        sum.value += product.value;
        sum.magnitude += product.magnitude;
        sum.roundings += product.roundings + 1;  // alpha itself is rounded
      }
  }

  void part(uint64_t seed) {
    const Matrix g(rows_, columns_, columns_, seed);
    EXPECT_OK(ga_accumulate_part(context_, param_, g.data()));
    for (size_t i = 0; i < sums_.size(); ++i) {
      sums_[i].add(weight_ / loss_scale_ * g.data()[i]);
      sums_[i].roundings += 3;
    }
  }

  // Makes the step, compares the gradient, and starts a new window.
  void check() {
    const ga_step_result result = step(context_);
    ASSERT_EQ(result.outcome, GA_STEP_APPLIED);
    const void* data = nullptr;
    ASSERT_OK(ga_gradient(context_, param_, &data, nullptr, nullptr));
    double squares = 0, square_error = 0;
    for (size_t i = 0; i < sums_.size(); ++i) {
      Sum& want = sums_[i];
      want.value /= weights_;
      want.magnitude /= weights_;
      want.roundings += 2;  // 1 / weights, and the product with it
      const float got = static_cast<const float*>(data)[i];
      ASSERT_TRUE(want.holds(got)) << "element " << i << " is " << got << ", not " << want.value
                                   << "; tolerance " << want.tolerance();
      squares += want.value * want.value;
      square_error += want.tolerance() * want.tolerance();
    }
    // The tolerance: the norm of the elements' bounds, and the last digits of the norm itself.
    EXPECT_NEAR(result.norm, std::sqrt(squares), std::sqrt(square_error) + 1e-12 * result.norm);
    std::fill(sums_.begin(), sums_.end(), Sum());
    weights_ = 0;
  }

  ga_context* context() const { return context_; }
  ga_param param() const { return param_; }

 private:
  int64_t rows_, columns_;
  Context context_;
  ga_param param_ = -1;
  double weight_ = 0, loss_scale_ = 1, weights_ = 0;
  std::vector<float> data_, filling_;
  std::vector<Sum> sums_;
};

class AccumulateMatmul : public testing::Test {
 protected:
  void SetUp() override { has_onednn(); }  // whose products are used if it is there
};

ga_config with_threads(int32_t threads) {
  ga_config c = config();
  c.num_threads = threads;
  return c;
}

// Products cut into bands of rows, of columns, of both, and not at all.
TEST_F(AccumulateMatmul, AnyNumberOfThreads) {
  const int64_t shapes[][3] = {
      {512, 784, 4}, {40, 1000, 64}, {96, 600, 300}, {200, 300, 50}, {9, 11, 3}};
  for (const auto& s : shapes)
    for (const int32_t threads : {1, 2, 3, 7}) {
      SCOPED_TRACE(testing::Message() << s[0] << " x " << s[1] << " threads " << threads);
      Layer layer(s[0], s[1], with_threads(threads));
      layer.micro(s[2], 1, 1, 1);
      layer.micro(s[2], 1, 1, 2, false, true);
      layer.check();
      if (HasFatalFailure()) return;
    }
}

// Where targets are in memory, products are computed in bands and added.
TEST_F(AccumulateMatmul, TargetsBeyondTheCaches) {
  const int64_t shapes[][3] = {{512, 784, 4}, {700, 1000, 64}, {2100, 300, 50}};
  for (const auto& s : shapes)
    for (const int32_t threads : {1, 3}) {
      SCOPED_TRACE(testing::Message() << s[0] << " x " << s[1] << " threads " << threads);
      Layer layer(s[0], s[1], with_threads(threads));
      layer.fill_caches();
      for (int window = 0; window < 2; ++window) {
        layer.micro(s[2], 1, 1, 1);
        layer.micro(s[2], 2, 16, 2, false, true);
        layer.check();
      }
      if (HasFatalFailure()) return;
    }
}

// The promise: uneven micro-batches, each a mean over its samples, give what one batch gives.
TEST_F(AccumulateMatmul, UnevenMicroBatches) {
  for (const double loss_scale : {1.0, 1024.0, -3.0}) {
    Layer layer(65, 129);
    uint64_t seed = 5;
    for (int window = 0; window < 3; ++window) {
      for (const int64_t samples : {20, 20, 20, 4})
        layer.micro(samples, static_cast<double>(samples), loss_scale, ++seed);
      layer.check();
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(AccumulateMatmul, AddsToOtherContributions) {
  Layer layer(33, 50);
  layer.begin(3);  // a tied weight
  layer.matmul(7, 1);
  layer.part(2);
  layer.matmul(64, 3);
  ASSERT_OK(ga_micro_end(layer.context()));
  layer.begin(0.25, 16);
  layer.part(4);
  layer.matmul(1, 5);
  ASSERT_OK(ga_micro_end(layer.context()));
  layer.check();
}

// The first contribution is a live gradient, which is read, then copied, but never written.
TEST_F(AccumulateMatmul, AddsToALiveGradient) {
  ga_config c = config();
  c.gradient_life = GA_GRADIENTS_LIVE;
  Layer layer(3, 2, c);
  Block gradient = {1, 2, 3, 4, 5, 6};
  const Block before = gradient;
  const float a[] = {1, 10, 100}, b[] = {1, 2};
  ASSERT_OK(ga_micro_begin(layer.context(), 0, 2, nullptr));
  ASSERT_OK(ga_accumulate_part(layer.context(), layer.param(), gradient.data()));
  ASSERT_OK(ga_accumulate_matmul(layer.context(), layer.param(), 1, a, 3, GA_TRANSPOSE, b, 2,
                                 GA_NO_TRANSPOSE, GA_F32));
  ASSERT_OK(ga_micro_end(layer.context()));
  step(layer.context());
  const void* data = nullptr;
  ASSERT_OK(ga_gradient(layer.context(), layer.param(), &data, nullptr, nullptr));
  const float want[] = {2, 4, 13, 24, 105, 206};
  for (int i = 0; i < 6; ++i) EXPECT_EQ(static_cast<const float*>(data)[i], want[i]);
  EXPECT_TRUE(same_bits(gradient, before));
}

TEST_F(AccumulateMatmul, EmptySum) {
  Layer layer(4, 6);
  layer.begin(1);
  layer.matmul(0, 1);
  layer.matmul(3, 2);
  layer.matmul(0, 3);
  ASSERT_OK(ga_micro_end(layer.context()));
  layer.check();
  layer.begin(1);
  ASSERT_OK(ga_accumulate_matmul(layer.context(), layer.param(), 0, nullptr, 0, 0, nullptr, 0, 0,
                                 GA_F32));
  ASSERT_OK(ga_micro_end(layer.context()));
  layer.check();
}

TEST_F(AccumulateMatmul, NothingSurvivesAWindow) {
  Layer layer(8, 8);
  const float nan[8] = {kNan, kNan, kNan, kNan, kNan, kNan, kNan, kNan};
  ASSERT_OK(ga_micro_begin(layer.context(), 0, 1, nullptr));
  ASSERT_OK(ga_accumulate_matmul(layer.context(), layer.param(), 1, nan, 8, GA_TRANSPOSE, nan, 8,
                                 GA_NO_TRANSPOSE, GA_F32));
  ASSERT_OK(ga_micro_end(layer.context()));
  EXPECT_EQ(step(layer.context()).outcome, GA_STEP_SKIPPED_NONFINITE);
  layer.micro(5, 1, 1, 1);
  layer.check();
}

// With weight 0 the matrices are not read: they may be all NaN.
TEST_F(AccumulateMatmul, WeightZero) {
  Layer layer(2, 2);
  const float nan[] = {kNan, kNan};
  layer.micro(3, 1, 1, 1);
  ASSERT_OK(ga_micro_begin(layer.context(), 1, 0, nullptr));
  ASSERT_OK(ga_accumulate_matmul(layer.context(), layer.param(), 1, nan, 2, GA_TRANSPOSE, nan, 2,
                                 GA_NO_TRANSPOSE, GA_F32));
  ASSERT_OK(ga_micro_end(layer.context()));
  layer.check();
}

// m is the first dimension, n the product of the others.
TEST_F(AccumulateMatmul, ShapesOfAnyRank) {
  Context context;
  const ga_group group = context.group(plain_sgd());
  float scalar = 0, vector[3] = {}, cube[12] = {};
  const int64_t three[] = {3}, boxes[] = {2, 3, 2}, none[] = {0, 4};
  ga_param s, v, q, e;
  ASSERT_OK(ga_param_add(context, group, "scalar", &scalar, GA_F32, 0, nullptr, nullptr, &s));
  ASSERT_OK(ga_param_add(context, group, "vector", vector, GA_F32, 1, three, nullptr, &v));
  ASSERT_OK(ga_param_add(context, group, "cube", cube, GA_F32, 3, boxes, nullptr, &q));
  ASSERT_OK(ga_param_add(context, group, "empty", nullptr, GA_F32, 2, none, nullptr, &e));
  const float a[] = {1, 2, 3}, b[] = {1, 10, 100, 1000, 10000, 100000};
  ASSERT_OK(ga_micro_begin(context, 0, 1, nullptr));
  ASSERT_OK(ga_accumulate_matmul(context, s, 3, a, 3, 0, b, 1, 0, GA_F32));
  ASSERT_OK(ga_accumulate_matmul(context, v, 1, a, 3, 1, b, 1, 0, GA_F32));
  ASSERT_OK(ga_accumulate_matmul(context, q, 1, a, 1, 0, b, 6, 0, GA_F32));
  ASSERT_OK(ga_accumulate_matmul(context, e, 2, nullptr, 0, 1, b, 4, 0, GA_F32));
  ASSERT_OK(ga_micro_end(context));
  ASSERT_EQ(step(context).outcome, GA_STEP_APPLIED);
  EXPECT_EQ(scalar, -321);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(vector[i], -a[i]);
  for (int i = 0; i < 12; ++i) EXPECT_EQ(cube[i], -a[i / 6] * b[i % 6]);
}

// The program's own parallel_for: one with a thread for each piece, one that runs the pieces in
// reverse order on one thread.
TEST_F(AccumulateMatmul, TheProgramsThreads) {
  const ga_parallel_for loops[] = {[](void*, int64_t count, ga_task task, void* data) {
                                     std::vector<std::thread> threads;
                                     for (int64_t i = 0; i < count; ++i)
                                       threads.emplace_back(task, data, i);
                                     for (std::thread& thread : threads) thread.join();
                                   },
                                   [](void*, int64_t count, ga_task task, void* data) {
                                     for (int64_t i = count; i-- > 0;) task(data, i);
                                   }};
  for (const ga_parallel_for loop : loops) {
    ga_config c = with_threads(4);
    c.parallel_for = loop;
    Layer layer(200, 300, c);
    layer.micro(50, 1, 1, 1);
    layer.micro(50, 2, 1, 2);
    layer.check();
    // Many pieces of a parameter that is one chunk of the kernels.
    Layer small(128, 128, c);
    small.micro(300, 1, 1, 3);
    small.check();
  }
}

TEST_F(AccumulateMatmul, ContextsInSeveralThreads) {
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t)
    threads.emplace_back([t] {
      for (uint64_t round = 0; round < 5; ++round) {
        Layer layer(64 + static_cast<int64_t>(t), 100,
                    with_threads(1 + static_cast<int32_t>(t) % 2));
        layer.micro(30 + static_cast<int64_t>(round), 1, 1, 10 * t + round);
        layer.micro(7, 1, 1, 10 * t + round + 1);
        layer.check();
      }
    });
  for (std::thread& thread : threads) thread.join();
}

// Products of small integers, which no format rounds.
TEST(AccumulateMatmulOf, SixteenBits) {
  has_onednn();  // whose products are used if it is there
  const int64_t m = 5, k = 7, n = 3;
  for (const int32_t dtype : {GA_F16, GA_BF16}) {
    for (const int32_t turned : {GA_NO_TRANSPOSE, GA_TRANSPOSE}) {
      Random random(3);
      Tensor p(GA_F32, m * n), a(dtype, m * k), b(dtype, k * n);
      for (int64_t i = 0; i < a.count(); ++i) a.set(i, static_cast<double>(random.below(9) - 4));
      for (int64_t i = 0; i < b.count(); ++i) b.set(i, static_cast<double>(random.below(9) - 4));
      Context ctx;
      add(ctx, ctx.group(optimizer(GA_OPTIMIZER_EXTERNAL)), p, {m, n});
      EXPECT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
      EXPECT_OK(ga_accumulate_matmul(ctx, 0, k, a.data(), turned ? m : k, turned, b.data(),
                                     turned ? k : n, turned, dtype));
      EXPECT_OK(ga_micro_end(ctx));
      step(ctx);
      const std::vector<double> got = external_gradient(ctx, 0, m * n);
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          double want = 0;
          for (int64_t l = 0; l < k; ++l) {
            want += a.get(turned ? l * m + i : i * k + l) * b.get(turned ? j * k + l : l * n + j);
          }
          EXPECT_EQ(got[static_cast<size_t>(i * n + j)], want) << format(dtype).name;
        }
      }
    }
  }
}

}  // namespace
}  // namespace ga::test
