// SPDX-License-Identifier: Apache-2.0
//
// Parameters computed by PyTorch, timm, pytorch_optimizer, schedulefree, torchrec and Keras,
// written by oracle/make_vectors.py. The reference must agree with them to the last digits of float64, and the
// library within the reference's bounds.
#include "oracle/vectors.hpp"
#include "support.hpp"

namespace ga::test {
namespace {

class Vectors : public testing::TestWithParam<size_t> {
 protected:
  Vectors() : case_(oracle::cases()[GetParam()]), layout_({}) {
    optimizer_ = optimizer(case_.kind, case_.flavor);
    case_.set(optimizer_);
    layout_ = Layout::of(
        {oracle::kShapes.begin(), oracle::kShapes.begin() + static_cast<ptrdiff_t>(case_.tensors)});
  }

  // Copies the numbers of all tensors to their places in the layout.
  template <class T>
  std::vector<T> block(const std::vector<float>& numbers) const {
    std::vector<T> result(static_cast<size_t>(layout_.total), kCanary);
    size_t next = 0;
    for (size_t i = 0; i < layout_.size(); ++i) {
      for (int64_t j = 0; j < layout_.counts[i]; ++j) {
        result[static_cast<size_t>(layout_.offsets[i] + j)] = numbers[next++];
      }
    }
    return result;
  }

  // The distance of numbers in the layout from the recorded ones, in units of the model's bounds.
  template <class Get>
  void compare(const Model& model, const std::vector<double>& want, Get get) const {
    size_t next = 0;
    for (size_t i = 0; i < layout_.size(); ++i) {
      double squares = 0, bounds = 0;
      for (size_t j = 0; j < static_cast<size_t>(layout_.counts[i]); ++j, ++next) {
        const double distance = std::abs(get(i, j) - want[next]);
        const double tolerance = model.tolerance(i, j);
        squares += distance * distance;
        bounds += tolerance * tolerance;
        if (model.tensor(i).spread == 0) {
          EXPECT_LE(distance, tolerance)
              << "tensor " << i << "[" << j << "] is " << get(i, j) << ", not " << want[next];
        }
      }
      EXPECT_LE(std::sqrt(squares), std::sqrt(bounds) + model.tensor(i).spread) << "tensor " << i;
    }
    EXPECT_EQ(next, want.size());
  }

  // Computes in the arithmetic of T; compares the library only if it takes part.
  template <class T>
  void replay(bool library) {
    std::vector<T> p = block<T>(oracle::kStart);
    Model model(layout_, {optimizer_}, config(), p);
    Context ctx;
    if (library) add_all(ctx, ctx.group(optimizer_), layout_, p);
    size_t kept = 0;
    for (size_t t = 0; t < oracle::kGradients.size(); ++t) {
      const double lr = optimizer_.lr * oracle::kLr[t % std::size(oracle::kLr)];
      const std::vector<T> g = block<T>(oracle::kGradients[t]);
      model.accumulate(g, 1);
      model.step(lr);
      if (library) {
        EXPECT_OK(ga_group_set_lr(ctx, 0, lr));
        ctx.accumulate(pointers(layout_, g));
        EXPECT_EQ(step(ctx).outcome, GA_STEP_APPLIED);
      }
      if (static_cast<int64_t>(t + 1) != oracle::kKept[kept]) continue;
      SCOPED_TRACE(testing::Message() << "step " << t + 1);
      compare(model, case_.p[kept++], [&](size_t i, size_t j) {
        return library ? p[static_cast<size_t>(layout_.offsets[i]) + j]
                       : model.element(i, j).p.value;
      });
    }
    EXPECT_EQ(kept, std::size(oracle::kKept));
  }

  const oracle::Case case_;
  ga_optimizer optimizer_{};
  Layout layout_;
};

INSTANTIATE_TEST_SUITE_P(All, Vectors, testing::Range<size_t>(0, oracle::cases().size()),
                         [](const testing::TestParamInfo<size_t>& info) {
                           return identifier(oracle::cases()[info.param].name);
                         });

TEST_P(Vectors, TheReference) { replay<double>(false); }

TEST_P(Vectors, Float32) {
  has_onednn();  // whose products are used if it is there
  replay<float>(true);
}

TEST_P(Vectors, Float64) {
  replay<double>(case_.kind != GA_OPTIMIZER_MUON);  // Muon does not support f64
}

}  // namespace
}  // namespace ga::test
