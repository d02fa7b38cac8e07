// SPDX-License-Identifier: Apache-2.0
//
// Muon of tensors that are cut into matrices (ga_param_options.cut_matrices), and its tables of
// coefficients. The reference takes the elements of a tensor one by one: it finds the matrix, the output
// and the input of each from its indices, and makes every matrix orthogonal in float64.
#include <algorithm>
#include <map>
#include <utility>

#include "small_run.hpp"
#include "support.hpp"

namespace ga::test {
namespace {

using ref::Matrix;

ga_param_options cut(int32_t batch_axes, int32_t output_axis, int32_t split_axis = 0,
                     int32_t parts = 0) {
  ga_param_options o;
  EXPECT_OK(ga_param_options_init(&o, sizeof o));
  o.cut_matrices = 1;
  o.batch_axes = batch_axes;
  o.output_axis = output_axis;
  o.split_axis = split_axis;
  o.matrix_parts = parts;
  return o;
}

struct Place {
  std::vector<int64_t> matrix;  // indices of the axes of the batch, and the part
  int64_t output = 0, input = 0;
};

Place place_of(int64_t element, const ref::Shape& shape, const ga_param_options& o) {
  const size_t rank = shape.size();
  std::vector<int64_t> index(rank), extent(shape.begin(), shape.end());
  for (size_t d = rank; d-- > 0; element /= shape[d]) index[d] = element % shape[d];
  Place place;
  for (size_t d = 0; d < static_cast<size_t>(o.batch_axes); ++d) place.matrix.push_back(index[d]);
  if (o.matrix_parts > 1) {
    const auto s = static_cast<size_t>(o.split_axis);
    extent[s] /= o.matrix_parts;
    place.matrix.push_back(index[s] / extent[s]);
    index[s] %= extent[s];
  }
  const auto output = static_cast<size_t>(o.output_axis);
  place.output = index[output];
  for (size_t d = static_cast<size_t>(o.batch_axes); d < rank; ++d)
    if (d != output) place.input = place.input * extent[d] + index[d];
  return place;
}

// The sums of the squares of all rows.
std::vector<double> row_squares(const Matrix& x) {
  std::vector<double> squares(x.rows);
  for (size_t i = 0; i < x.data.size(); ++i) squares[i / x.columns] += x.data[i] * x.data[i];
  return squares;
}

// MuonEq.
Matrix equilibrated(Matrix x, const ga_optimizer& o) {
  const std::vector<double> outputs = row_squares(x), inputs = row_squares(ref::transpose(x));
  for (size_t i = 0; i < x.data.size(); ++i) {
    if ((o.equilibrate & GA_EQUILIBRATE_OUTPUTS) != 0)
      x.data[i] /= std::max(std::sqrt(outputs[i / x.columns]), o.eps);
    if ((o.equilibrate & GA_EQUILIBRATE_INPUTS) != 0)
      x.data[i] /= std::max(std::sqrt(inputs[i % x.columns]), o.eps);
  }
  return x;
}

// NorMuon. variances: of the outputs of this matrix.
Matrix with_equal_outputs(Matrix x, const ga_optimizer& o, std::vector<double>& variances) {
  const double before = x.frobenius();
  const std::vector<double> squares = row_squares(x);
  variances.resize(x.rows);
  for (size_t r = 0; r < x.rows; ++r) {
    const double mean = squares[r] / static_cast<double>(x.columns);
    variances[r] = o.beta2 * variances[r] + (1 - o.beta2) * mean;
    for (size_t c = 0; c < x.columns; ++c) x.at(r, c) /= std::sqrt(std::max(variances[r], 1e-10));
  }
  const double after = x.frobenius();
  for (double& e : x.data) e *= after > 0 ? before / after : 0;
  return x;
}

// O for a matrix [outputs, inputs].
Matrix orthogonalized(const Matrix& given, const ga_optimizer& o) {
  const Matrix gradient = equilibrated(given, o);
  const bool tall = gradient.rows > gradient.columns;
  Matrix x = tall ? ref::transpose(gradient) : gradient;
  const double least = o.equilibrate == GA_EQUILIBRATE_BOTH ? 1e-290 : o.eps;
  const double size = std::max(x.frobenius(), least);
  for (double& e : x.data) e /= size;
  for (int32_t step = 0; step < o.ns_steps; ++step) {
    const auto [a, b, c] = ref::coefficients(o, step);
    const Matrix gram = x * ref::transpose(x);
    x = combine(a, x, 1, combine(b, gram, c, gram * gram) * x);
  }
  return tall ? ref::transpose(x) : x;
}

double adjusted(const Matrix& x, const ga_optimizer& o) {
  const auto r = static_cast<double>(x.rows), c = static_cast<double>(x.columns);
  return o.adjust_lr == GA_ADJUST_ORIGINAL    ? std::sqrt(std::max(1.0, r / c))
         : o.adjust_lr == GA_ADJUST_MATCH_RMS ? 0.2 * std::sqrt(std::max(r, c))
                                              : 1;
}

using Variances = std::map<std::vector<int64_t>, std::vector<double>>;  // of each matrix

// s O of each matrix, in the places of the tensor.
std::vector<double> update_of(const std::vector<double>& x, const ref::Shape& shape,
                              const ga_param_options& options, const ga_optimizer& o,
                              Variances& variances) {
  std::map<std::vector<int64_t>, std::vector<std::pair<Place, size_t>>> matrices;
  for (size_t i = 0; i < x.size(); ++i) {
    const Place place = place_of(static_cast<int64_t>(i), shape, options);
    matrices[place.matrix].emplace_back(place, i);
  }
  std::vector<double> update(x.size());
  for (const auto& [key, elements] : matrices) {
    int64_t outputs = 0, inputs = 0;
    for (const auto& [place, i] : elements) {
      outputs = std::max(outputs, place.output + 1);
      inputs = std::max(inputs, place.input + 1);
    }
    Matrix m(static_cast<size_t>(outputs), static_cast<size_t>(inputs));
    EXPECT_EQ(m.data.size(), elements.size());
    const auto at = [&](const Place& p) {
      return static_cast<size_t>(p.output * inputs + p.input);
    };
    for (const auto& [place, i] : elements) m.data[at(place)] = x[i];
    Matrix result = orthogonalized(m, o);
    if (o.beta2 > 0) result = with_equal_outputs(result, o, variances[key]);
    for (const auto& [place, i] : elements) update[i] = adjusted(m, o) * result.data[at(place)];
  }
  return update;
}

Block random_block(size_t count, uint64_t seed) {
  Block block(count);
  Random random(seed);
  for (float& x : block) x = static_cast<float>(random.signed_unit());
  return block;
}

size_t count_of(const ref::Shape& shape) {
  size_t count = 1;
  for (const int64_t extent : shape) count *= static_cast<size_t>(extent);
  return count;
}

double norm_of(const std::vector<double>& x) {
  double squares = 0;
  for (const double e : x) squares += e * e;
  return std::sqrt(squares);
}

// Two windows of two micro-batches each, beside float64. docs/reference.md states the error.
void follows(const ref::Shape& shape, const ga_param_options& options, const ga_optimizer& o,
             const ga_config& c = config()) {
  const size_t count = count_of(shape);
  const Block start = random_block(count, 1);
  Block p = start;
  std::vector<double> want(p.begin(), p.end()), momentum(count);
  Variances variances;
  Context ctx(c);
  ctx.param(ctx.group(o), "p", p.data(), shape, &options);
  for (uint64_t window = 0; window < 2; ++window) {
    const Block g[2] = {random_block(count, 10 * window + 2), random_block(count, 10 * window + 3)};
    for (const Block& micro : g) ctx.accumulate({micro.data()});
    step(ctx);
    std::vector<double> x(count);
    for (size_t i = 0; i < count; ++i) {
      const double mean = (double{g[0][i]} + double{g[1][i]}) / 2;
      momentum[i] = o.momentum * momentum[i] + (1 - o.momentum) * mean;
      x[i] = o.nesterov ? o.momentum * momentum[i] + (1 - o.momentum) * mean : momentum[i];
    }
    const std::vector<double> update = update_of(x, shape, options, o, variances);
    std::vector<double> off(count);
    const double small = 1e-4 * norm_of(update) / std::sqrt(static_cast<double>(count));
    for (size_t i = 0; i < count; ++i) {
      bool away = o.cautious && want[i] * update[i] < 0;
      const double decayed = (1 - o.lr * o.weight_decay) * want[i];
      if (o.cautious && std::abs(update[i]) < small)  // whose sign may be another in float32
        away = std::abs(p[i] - want[i]) < std::abs(p[i] - decayed);
      want[i] = (away ? want[i] : decayed) - o.lr * update[i];
      off[i] = double{p[i]} - want[i];
      want[i] = double{p[i]};  // errors are of one step
    }
    EXPECT_LE(norm_of(off), 5e-5 * o.lr * norm_of(update)) << "window " << window;
    EXPECT_GT(norm_of(update), 0);
  }
}

ga_optimizer muon() {
  has_onednn();  // whose products are used if it is there
  ga_optimizer o = optimizer(GA_OPTIMIZER_MUON);
  o.lr = 0.5;
  o.weight_decay = 0.25;
  return o;
}

struct Case {
  const char* name;
  ref::Shape shape;
  ga_param_options options;
};

std::vector<Case> cases() {
  return {{"ConvolutionOfTorch", {8, 3, 5, 5}, cut(0, 0)},
          {"ConvolutionOfKeras", {3, 3, 4, 10}, cut(0, 3)},
          {"DenseOfKeras", {20, 6}, cut(0, 1)},
          {"Experts", {5, 12, 7}, cut(1, 1)},
          {"ExpertsOfKeras", {5, 12, 7}, cut(1, 2)},
          {"ManyExperts", {3, 4, 9, 8}, cut(2, 2)},
          {"HeadsOfOutputs", {24, 10}, cut(0, 0, 0, 4)},
          {"HeadsOfInputs", {10, 24}, cut(0, 0, 1, 4)},
          {"HeadsOfExperts", {3, 8, 24}, cut(1, 1, 2, 4)},
          {"OutputsInTheMiddle", {4, 9, 6}, cut(0, 1)},
          {"OutputsInTheMiddleOfEach", {2, 4, 9, 6}, cut(1, 2)},
          {"PartsOfOutputsInTheMiddle", {4, 8, 6}, cut(0, 1, 1, 2)},
          {"PartsOfInputsBefore", {3, 4, 8, 5}, cut(0, 2, 1, 2)},
          {"PartsOfInputsBehind", {3, 8, 4, 6}, cut(0, 1, 3, 3)},
          {"Groups", {12, 4, 3, 3}, cut(0, 0, 0, 3)},
          {"OneColumn", {6, 1, 5}, cut(1, 2)},
          {"SizesOfOne", {1, 1, 5, 1}, cut(1, 2)},
          {"OneElementEach", {4, 3, 2}, cut(1, 1, 1, 3)},
          {"Pieces", {3, 130, 190}, cut(1, 1)},
          {"PackedPieces", {100, 3, 90}, cut(0, 1)},
          {"LargeAndPacked", {160, 2, 160}, cut(0, 0, 1, 2)}};
}

class MuonCut : public testing::TestWithParam<size_t> {
 protected:
  const Case case_ = cases()[GetParam()];
};

INSTANTIATE_TEST_SUITE_P(All, MuonCut, testing::Range<size_t>(0, cases().size()),
                         [](const testing::TestParamInfo<size_t>& info) {
                           return cases()[info.param].name;
                         });

TEST_P(MuonCut, FollowsFloat64) {
  for (const int32_t adjust : {GA_ADJUST_ORIGINAL, GA_ADJUST_MATCH_RMS, GA_ADJUST_NONE})
    for (const int32_t steps : {4, 5}) {  // whose results come about in different places
      SCOPED_TRACE(testing::Message() << "adjust_lr " << adjust << ", " << steps << " steps");
      ga_optimizer o = muon();
      o.adjust_lr = adjust;
      o.ns_steps = steps;
      follows(case_.shape, case_.options, o);
    }
}

TEST_P(MuonCut, WithOtherOptions) {
  for (const int32_t preset : {GA_NS_YOU, GA_NS_POLAR_EXPRESS}) {
    SCOPED_TRACE(preset);
    ga_optimizer o = muon();
    o.ns_preset = preset;
    o.cautious = 1;
    o.nesterov = 0;
    follows(case_.shape, case_.options, o);
  }
}

TEST_P(MuonCut, NorMuonAndMuonEq) {
  for (const int32_t equilibrate :
       {GA_EQUILIBRATE_NONE, GA_EQUILIBRATE_OUTPUTS, GA_EQUILIBRATE_INPUTS, GA_EQUILIBRATE_BOTH})
    for (const double beta2 : {0.0, 0.75}) {
      SCOPED_TRACE(testing::Message() << "equilibrate " << equilibrate << ", beta2 " << beta2);
      ga_optimizer o = muon();
      o.equilibrate = equilibrate;
      o.beta2 = beta2;
      o.cautious = beta2 > 0;
      follows(case_.shape, case_.options, o);
    }
}

// With as many threads as matrices, fewer and more.
TEST_P(MuonCut, OnThreads) {
  for (const int32_t threads : {1, 2, 3, 5}) {
    SCOPED_TRACE(threads);
    ga_config c = config();
    c.num_threads = threads;
    ga_optimizer o = muon();
    o.equilibrate = GA_EQUILIBRATE_BOTH;
    o.beta2 = 0.5;
    follows(case_.shape, case_.options, o, c);
  }
}

// The emitted matrix has a place of its own where the accumulator has 16 bits.
TEST_P(MuonCut, WithAnAccumulatorOf16Bits) {
  const size_t count = count_of(case_.shape);
  Block p(count), q(count);
  ga_param_options narrow = case_.options;
  narrow.accumulator_dtype = GA_BF16;
  Block g = random_block(count, 5);
  for (float& x : g) x = std::round(x * 64) / 64;  // what bf16 holds
  Context ctx;
  const ga_group group = ctx.group(muon());
  ctx.param(group, "p", p.data(), case_.shape, &case_.options);
  ctx.param(group, "q", q.data(), case_.shape, &narrow);
  ctx.accumulate({g.data(), g.data()});
  step(ctx);
  EXPECT_EQ(p, q);
}

TEST(MuonCuts, RandomCutsFollowFloat64) {
  Random random(11);
  for (int k = 0; k < 150; ++k) {
    const auto rank = static_cast<int32_t>(2 + random.below(4));
    ref::Shape shape;
    for (int32_t d = 0; d < rank; ++d) shape.push_back(1 + random.below(7));
    ga_param_options o = cut(static_cast<int32_t>(random.below(rank - 1)), 0);
    const int32_t left = rank - o.batch_axes;
    o.output_axis = o.batch_axes + static_cast<int32_t>(random.below(left));
    o.split_axis = o.batch_axes + static_cast<int32_t>(random.below(left));
    o.matrix_parts = static_cast<int32_t>(random.below(4));
    if (o.matrix_parts == 0) o.split_axis = 0;
    if (o.matrix_parts > 1) shape[static_cast<size_t>(o.split_axis)] *= o.matrix_parts;
    SCOPED_TRACE(testing::Message()
                 << testing::PrintToString(shape) << " batch " << o.batch_axes << " output "
                 << o.output_axis << " split " << o.split_axis << " parts " << o.matrix_parts);
    ga_optimizer m = muon();
    m.ns_steps = 2 + k % 2;  // more would raise singular values that float32 has not
    m.equilibrate = static_cast<int32_t>(random.below(4));
    m.beta2 = static_cast<double>(random.below(2)) / 2;
    follows(shape, o, m);
    if (testing::Test::HasFailure()) return;
  }
}

// Longer than what one pass sums up at a time.
TEST(MuonCuts, LongLines) {
  for (const ref::Shape& shape : {ref::Shape{2, 66000}, {300, 3}})
    for (const int32_t output : {0, 1}) {
      ga_optimizer o = muon();
      o.ns_steps = 1;
      o.equilibrate = GA_EQUILIBRATE_BOTH;
      o.beta2 = 0.5;
      follows(shape, cut(0, output), o);
    }
}

// Of a symmetric product from 256 rows on, one half is computed, in blocks: by all threads, or by one for each matrix.
TEST(MuonCuts, LargeMatrices) {
  for (const ref::Shape& shape : {ref::Shape{270, 300}, {300, 270}, {2, 270, 280}}) {
    ga_config c = config();
    c.num_threads = 2;
    ga_optimizer o = muon();
    o.ns_steps = 2;
    const auto batch_axes = static_cast<int32_t>(shape.size()) - 2;
    follows(shape, cut(batch_axes, batch_axes), o, c);
  }
}

// In loops of no more items than there is room for.
TEST(MuonCuts, OnTheProgramsThreads) {
  for (const ref::Shape& shape : {ref::Shape{192, 640}, {64, 10000}, {10000, 24}, {253, 1300}})
    for (const int32_t output : {0, 1}) {
      ga_config c = config();
      c.num_threads = 2;
      c.parallel_for = [](void*, int64_t count, ga_task task, void* data) {
        for (int64_t i = count; i-- > 0;) task(data, i);
      };
      ga_optimizer o = muon();
      o.ns_steps = 1;
      o.equilibrate = GA_EQUILIBRATE_BOTH;
      o.beta2 = 0.5;
      follows(shape, cut(0, output), o, c);
    }
}

// Norms and their products may lie outside of what float32 has.
TEST(MuonCuts, OfAnySize) {
  const Block g = random_block(60, 2);
  for (const int32_t equilibrate :
       {GA_EQUILIBRATE_NONE, GA_EQUILIBRATE_OUTPUTS, GA_EQUILIBRATE_INPUTS, GA_EQUILIBRATE_BOTH}) {
    ga_optimizer o = muon();
    o.equilibrate = equilibrate;
    o.eps = 0;
    Block updates[3];
    for (const int k : {0, 1, 2}) {
      updates[k].resize(60);
      Block scaled = g;
      for (float& x : scaled) x *= std::pow(10.0f, static_cast<float>(25 * (k - 1)));
      Context ctx;
      const ga_param_options options = cut(1, 1);
      ctx.param(ctx.group(o), "p", updates[k].data(), {3, 4, 5}, &options);
      ctx.accumulate({scaled.data()});
      step(ctx);
    }
    for (size_t i = 0; i < 60; ++i)
      for (const int k : {0, 2})
        EXPECT_NEAR(updates[k][i], updates[1][i], 1e-4)
            << "equilibrate " << equilibrate << " " << k;
  }
}

TEST(MuonCuts, OfNothing) {
  for (const ref::Shape& shape : {ref::Shape{0, 4, 4}, {4, 0, 4}, {4, 4, 0}}) {
    Context ctx;
    const ga_param_options o = cut(1, 1, 2, 2);
    ctx.param(ctx.group(muon()), "p", static_cast<float*>(nullptr), shape, &o);
    ctx.accumulate({nullptr});
    step(ctx);
  }
}

// A matrix without a gradient does not move, whatever its neighbours do: one norm for all would divide
// zero by theirs, and an eps that is added would let it walk.
TEST(MuonCuts, AZeroMatrixStays) {
  for (const double beta2 : {0.0, 0.5}) {
    ga_optimizer o = muon();
    o.beta2 = beta2;
    o.equilibrate = beta2 > 0 ? GA_EQUILIBRATE_BOTH : GA_EQUILIBRATE_NONE;
    o.weight_decay = 0;
    Block p = random_block(3 * 20, 1);
    const Block start = p;
    Block g = random_block(3 * 20, 2);
    std::fill(g.begin() + 20, g.begin() + 40, 0.0f);
    Context ctx;
    const ga_param_options options = cut(1, 1);
    ctx.param(ctx.group(o), "p", p.data(), {3, 4, 5}, &options);
    for (int k = 0; k < 3; ++k) {
      ctx.accumulate({g.data()});
      step(ctx);
    }
    EXPECT_TRUE(std::equal(p.begin() + 20, p.begin() + 40, start.begin() + 20));
    EXPECT_FALSE(std::equal(p.begin(), p.begin() + 20, start.begin()));
  }
}

// A matrix is scaled by its own norm: gradients 2^k times as large give the bits of small ones.
TEST(MuonCuts, EachMatrixHasItsOwnNorm) {
  Block p(3 * 20), g = random_block(20, 2);
  g.insert(g.end(), g.begin(), g.begin() + 20);
  g.insert(g.end(), g.begin(), g.begin() + 20);
  for (size_t i = 20; i < 40; ++i) g[i] *= 1024;
  Context ctx;
  const ga_param_options options = cut(1, 1);
  ctx.param(ctx.group(muon()), "p", p.data(), {3, 4, 5}, &options);
  ctx.accumulate({g.data()});
  step(ctx);
  EXPECT_TRUE(std::equal(p.begin(), p.begin() + 20, p.begin() + 20));
  EXPECT_TRUE(std::equal(p.begin(), p.begin() + 20, p.begin() + 40));
}

// What the iterations write over is never the state, without Nesterov either, and with products of bf16.
TEST(MuonCuts, LeaveTheMomentumAlone) {
  for (const ga_precision precision : {GA_PRECISION_F32, GA_PRECISION_BF16})
    for (const bool nesterov : {false, true})
      for (const bool whole : {false, true}) {
        ga_optimizer o = muon();
        o.nesterov = nesterov;
        o.momentum = 0.5;
        o.ns_precision = precision;
        Block p(24), g = random_block(24, 2), b(24);
        Context ctx;
        if (ga_group_add(ctx, &o, nullptr) == GA_ERROR_UNSUPPORTED) continue;  // this processor
        const ga_param_options options = cut(1, 2);
        ctx.param(0, "p", p.data(), whole ? ref::Shape{4, 6} : ref::Shape{4, 3, 2},
                  whole ? nullptr : &options);
        ctx.accumulate({g.data()});
        step(ctx);
        EXPECT_OK(ga_state_get(ctx, 0, "momentum_buffer", b.data(), GA_F32, 24));
        for (size_t i = 0; i < b.size(); ++i) EXPECT_EQ(b[i], 0.5f * g[i]);
      }
}

TEST(MuonCuts, WrongOnesAreRefused) {
  Context ctx;
  const ga_group group = ctx.group(muon());
  Block p(64);
  const auto refused = [&](const ref::Shape& shape, const ga_param_options& o, ga_status status,
                           const std::vector<const char*>& words) {
    ga_param out = -7;
    EXPECT_EQ(ga_param_add(ctx, group, "name", p.data(), GA_F32, static_cast<int32_t>(shape.size()),
                           shape.data(), &o, &out),
              status);
    EXPECT_EQ(out, -7);
    const std::string text = ga_last_error();
    for (const char* const word : words)
      EXPECT_NE(text.find(word), std::string::npos) << word << " in " << text;
  };
  constexpr ga_status kWrong = GA_ERROR_INVALID_ARGUMENT;
  refused({8}, cut(0, 0), kWrong, {"\"name\"", "cut_matrices", "rank is 1"});
  refused({}, cut(0, 0), kWrong, {"cut_matrices", "rank is 0"});
  refused({4, 4}, cut(1, 1), kWrong, {"batch_axes was 1", "0 to 0"});
  refused({4, 4}, cut(-1, 0), kWrong, {"batch_axes was -1"});
  refused({4, 4}, cut(0, 2), kWrong, {"output_axis was 2", "0 to 1"});
  refused({2, 4, 4}, cut(1, 0), kWrong, {"output_axis was 0", "1 to 2"});
  refused({2, 4, 4}, cut(1, 1, 0, 2), kWrong, {"split_axis was 0", "1 to 2"});
  refused({2, 4, 4}, cut(1, 1, 3, 2), kWrong, {"split_axis was 3"});
  refused({2, 4, 4}, cut(1, 1, 1, -1), kWrong, {"matrix_parts was -1"});
  refused({2, 4, 4}, cut(1, 1, 2, 0), kWrong, {"split_axis was 2", "matrix_parts was 0"});
  refused({2, 4, 4}, cut(1, 1, 0, 1), kWrong, {"split_axis was 0", "1 to 2"});
  refused({2, 4, 4}, cut(1, 1, 2, 3), kWrong, {"matrix_parts was 3", "axis 2", "4 elements"});
  ga_param_options o = cut(1, 1, 2, 2);
  o.cut_matrices = 0;
  refused({2, 4, 4}, o, kWrong, {"cut_matrices was 0", "1, 1, 2 and 2"});
  o.cut_matrices = 2;
  refused({2, 4, 4}, o, kWrong, {"cut_matrices was 2"});
  EXPECT_OK(ga_param_options_init(&o, sizeof o));
  refused({2, 4, 4}, o, GA_ERROR_UNSUPPORTED, {"rank is 3", "cut_matrices"});
  // A program of before has a shorter struct, and no cut.
  o.cut_matrices = 7;
  o.struct_size = offsetof(ga_param_options, cut_matrices);
  EXPECT_EQ(ctx.param(group, "p", p.data(), ref::Shape{4, 4}, &o), 0);
}

// Others than MUON do not read it, and do what they would do without it.
TEST(MuonCuts, OtherOptimizersIgnoreThem) {
  for (const int32_t kind : {GA_OPTIMIZER_ADAMW, GA_OPTIMIZER_ADAFACTOR, GA_OPTIMIZER_LAMB}) {
    Block p = random_block(60, 1), q = p;
    const Block g = random_block(60, 2);
    Context ctx;
    const ga_group group = ctx.group(optimizer(kind));
    const ga_param_options options = cut(1, 2, 2, 5);
    ctx.param(group, "p", p.data(), {3, 4, 5}, &options);
    ctx.param(group, "q", q.data(), {3, 4, 5});
    ctx.accumulate({g.data(), g.data()});
    step(ctx);
    EXPECT_EQ(p, q) << kind;
  }
}

// ---- State ----------------------------------------------------------------------------------------

struct Training {
  Block p = random_block(60, 1);
  Context ctx;

  explicit Training(const ga_optimizer& o, const ga_param_options& options = cut(1, 1)) {
    ctx.param(ctx.group(o), "p", p.data(), {3, 4, 5}, &options);
  }
  void train(uint64_t first, uint64_t last) {
    for (uint64_t k = first; k < last; ++k) {
      const Block g = random_block(60, 100 + k);
      ctx.accumulate({g.data()});
      step(ctx);
    }
  }
};

TEST(MuonState, ResumesToTheBit) {
  for (const double beta2 : {0.0, 0.5}) {
    ga_optimizer o = muon();
    o.beta2 = beta2;
    o.equilibrate = GA_EQUILIBRATE_OUTPUTS;
    Training whole(o), first(o), second(o);
    whole.train(0, 6);
    first.train(0, 3);
    EXPECT_OK(load(second.ctx, saved(first.ctx)));
    second.train(3, 6);
    EXPECT_EQ(second.p, whole.p);
  }
}

// A step that is not applied leaves them as they are.
TEST(MuonState, VariancesAreThoseOfAppliedSteps) {
  ga_optimizer o = muon();
  o.beta2 = 0.5;
  Training run(o, cut(1, 2));
  run.train(0, 2);
  const auto variances = [&] {
    Block v(15);
    EXPECT_OK(ga_state_get(run.ctx, 0, "second_momentum_buffer", v.data(), GA_F32, 15));
    return v;
  };
  const Block before = variances();
  EXPECT_GT(before[0], 0);
  Block g = random_block(60, 7);
  g[30] = NAN;
  run.ctx.accumulate({g.data()});
  EXPECT_EQ(step(run.ctx).outcome, GA_STEP_SKIPPED_NONFINITE);
  EXPECT_EQ(variances(), before);
  run.train(2, 3);
  EXPECT_NE(variances(), before);
}

TEST(MuonState, WhetherThereAreVariancesStays) {
  ga_optimizer o = muon();
  o.beta2 = 0.5;
  Training run(o);
  o.beta2 = 0.75;
  EXPECT_OK(ga_group_set_optimizer(run.ctx, 0, &o));
  o.beta2 = 0;
  EXPECT_EQ(ga_group_set_optimizer(run.ctx, 0, &o), GA_ERROR_UNSUPPORTED);
  EXPECT_NE(std::string(ga_last_error()).find("beta2"), std::string::npos) << ga_last_error();
}

TEST(MuonState, AnotherCutIsRefused) {
  Training run(muon());
  run.train(0, 2);
  const Bytes bytes = saved(run.ctx);
  ga_param_options last = cut(1, 2), parts = cut(1, 1, 2, 5);
  for (const ga_param_options& options : {last, parts, cut(0, 0)}) {
    Training other(muon(), options);
    const Block before = other.p;
    for (const int32_t settings : {GA_SETTINGS_COMPARE, GA_SETTINGS_TAKE, GA_SETTINGS_KEEP}) {
      ga_state_options how;
      EXPECT_OK(ga_state_options_init(&how, sizeof how));
      how.settings = settings;
      EXPECT_EQ(load(other.ctx, bytes, &how), GA_ERROR_INVALID_ARGUMENT) << settings;
      const std::string text = ga_last_error();
      EXPECT_TRUE(text.find("output_axis") != text.npos || text.find("matrix_parts") != text.npos ||
                  text.find("batch_axes") != text.npos)
          << text;
      EXPECT_EQ(other.p, before);
    }
  }
}

const double kTable[2][3] = {{3, -3.5, 1.25}, {1.875, -1.25, 0.375}};

ga_optimizer with_table(const double* table, int32_t rows) {
  ga_optimizer o = muon();
  o.ns_table = table;
  o.ns_rows = rows;
  return o;
}

TEST(MuonState, TheTableIsCopied) {
  double table[6];
  std::copy_n(kTable[0], 6, table);
  Training run(with_table(table, 2)), want(with_table(kTable[0], 2));
  std::fill_n(table, 6, NAN);
  run.train(0, 3);
  want.train(0, 3);
  EXPECT_EQ(run.p, want.p);
  // What the context returns may be given to it again, and changed.
  ga_optimizer o;
  o.struct_size = sizeof o;
  EXPECT_OK(ga_group_optimizer(run.ctx, 0, &o));
  EXPECT_EQ(o.ns_rows, 2);
  EXPECT_TRUE(std::equal(o.ns_table, o.ns_table + 6, kTable[0]));
  EXPECT_OK(ga_group_set_weight_decay(run.ctx, 0, 0.5));  // does not end the life of o.ns_table
  EXPECT_OK(ga_group_set_optimizer(run.ctx, 0, &o));
  EXPECT_OK(ga_group_set_lr(run.ctx, 0, 0.25));
  EXPECT_OK(ga_group_set_weight_decay(run.ctx, 0, 0));
  EXPECT_OK(ga_group_set_lr(want.ctx, 0, 0.25));
  EXPECT_OK(ga_group_set_weight_decay(want.ctx, 0, 0));
  run.train(3, 5);
  want.train(3, 5);
  EXPECT_EQ(run.p, want.p);
  EXPECT_OK(ga_group_optimizer(run.ctx, 0, &o));
  o.ns_rows = 1;
  EXPECT_OK(ga_group_set_optimizer(run.ctx, 0, &o));
  const ga_optimizer one = with_table(kTable[0], 1);
  EXPECT_OK(ga_group_set_optimizer(want.ctx, 0, &one));
  EXPECT_OK(ga_group_set_lr(want.ctx, 0, 0.25));
  EXPECT_OK(ga_group_set_weight_decay(want.ctx, 0, 0));
  run.train(5, 7);
  want.train(5, 7);
  EXPECT_EQ(run.p, want.p);
}

TEST(MuonState, TheTableIsCompared) {
  Training run(with_table(kTable[0], 2));
  run.train(0, 2);
  const Bytes bytes = saved(run.ctx);
  Training same(with_table(kTable[0], 2));
  EXPECT_OK(load(same.ctx, bytes));
  const double other[2][3] = {{3, -3.5, 1.25}, {1.875, -1.25, 0.5}};
  ga_optimizer preset = muon();
  preset.ns_preset = GA_NS_YOU;
  const std::pair<ga_optimizer, const char*> others[] = {{with_table(other[0], 2), "ns_table_2_c"},
                                                         {with_table(kTable[0], 1), "ns_rows"},
                                                         {muon(), "ns_rows"},
                                                         {preset, "ns_preset"}};
  for (const auto& [o, word] : others) {
    Training refusing(o);
    EXPECT_EQ(load(refusing.ctx, bytes), GA_ERROR_INVALID_ARGUMENT);
    const std::string text = ga_last_error();
    EXPECT_NE(text.find(word), text.npos) << text;
    // The other way round.
    Training plain(o);
    plain.train(0, 1);
    EXPECT_EQ(load(run.ctx, saved(plain.ctx)), GA_ERROR_INVALID_ARGUMENT);
    // A load that takes settings takes the table.
    ga_state_options take;
    EXPECT_OK(ga_state_options_init(&take, sizeof take));
    take.settings = GA_SETTINGS_TAKE;
    Training taking(o);
    EXPECT_OK(load(taking.ctx, bytes, &take));
    Training want(with_table(kTable[0], 2));
    want.train(0, 4);
    taking.train(2, 4);
    EXPECT_EQ(taking.p, want.p);
  }
}

}  // namespace
}  // namespace ga::test
