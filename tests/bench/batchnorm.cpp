// SPDX-License-Identifier: Apache-2.0
//
// B1-B3: passes of batch normalisation, compared with loops that move the same bytes.
#include <gradaccum/gradaccum.h>

#include <memory>
#include <string>

#include "program.hpp"

namespace bench {
namespace {

struct BatchNormShape {
  const char* name;
  int32_t layout;
  int64_t channels, positions;
};

// A context with one layer of a mode.
class BatchNormLayer {
 public:
  BatchNormLayer(const BatchNormShape& shape, int32_t mode, int threads) {
    ga_config config;
    check(ga_config_init(&config, sizeof config));
    config.num_threads = threads;
    ga_context* made = nullptr;
    check(ga_context_create(&config, &made));
    ctx_.reset(made);
    ga_bn_options options;
    check(ga_bn_options_init(&options, sizeof options, GA_FLAVOR_TORCH));
    options.mode = mode;
    options.layout = shape.layout;
    check(ga_bn_add(made, "layer", shape.channels, -1, -1, &options, nullptr));
  }
  ga_context* get() const { return ctx_.get(); }

 private:
  struct Destroy {
    void operator()(ga_context* ctx) const { ga_context_destroy(ctx); }
  };
  std::unique_ptr<ga_context, Destroy> ctx_;
};

void shape_figures(const Options& options, Report& report, const BatchNormShape& shape) {
  const int threads = options.threads;
  const int64_t sample = shape.channels * shape.positions;
  const int64_t samples = (options.quick ? 16'000'000 : 48'000'000) / sample, n = samples * sample;
  // One block for x and dy, so that a yardstick reads both as one stream.
  const Block both = make_block(2 * n, 0, threads);
  float* const x = both.get();
  float* const dy = both.get() + n;
  const Block out = make_block(n, 1, threads);
  // The deviation is about 1 and stays so when the data is normalised in place again and again.
  const BatchNormLayer scale(shape, GA_BN_MICRO, threads);
  for (float* data : {x, dy}) {
    check(ga_bn_forward(scale.get(), 0, data, samples, shape.positions, data));
    check(ga_discard(scale.get()));
  }
  const BatchNormLayer window(shape, GA_BN_WINDOW, threads), micro(shape, GA_BN_MICRO, threads);
  const auto discard = [&] { check(ga_discard(window.get())); };
  const auto accumulate = [&] {
    check(ga_bn_accumulate(window.get(), 0, x, samples, shape.positions));
  };
  const auto figure = [&](const char* id) { return std::string(id) + "_" + shape.name; };

  const std::vector<Times> sums = race(
      options.rounds(), 1, {{[&] { yard_mix_1_0(x, n, threads); }, {}}, {accumulate, discard}});
  report.figure(figure("B1"), sums[0] / sums[1], Sense::kAtLeast, 0.85,
                format("statistics / mix(1,0): %.1f GB/s", rate(1, n, sums[1])));

  discard();
  accumulate();
  check(ga_bn_finalize(window.get(), 0));
  const auto forward = [&](float* y) {
    // With an explicit index, so that the pass may be repeated.
    check(ga_micro_begin(window.get(), 0, 1, nullptr));
    check(ga_bn_forward(window.get(), 0, x, samples, shape.positions, y));
    check(ga_micro_end(window.get()));
  };
  const std::vector<Times> normalise = race(options.rounds(), 1,
                                            {{[&] { yard_mix_1_1(out.get(), n, threads); }, {}},
                                             {[&] { forward(x); }, {}},
                                             {[&] { yard_copy_nt(out.get(), x, n, threads); }, {}},
                                             {[&] { forward(out.get()); }, {}}});
  report.figure(figure("B2"), normalise[0] / normalise[1], Sense::kAtLeast, 0.85,
                format("normalise in place / mix(1,1): %.1f GB/s", rate(2, n, normalise[1])));
  report.figure(figure("B2_apart"), normalise[2] / normalise[3], Sense::kNone, 0,
                format("y is not x / non-temporal copy: %.1f GB/s", rate(2, n, normalise[3])));

  const auto again = [&] {
    discard();
    accumulate();
    check(ga_bn_finalize(window.get(), 0));
    check(ga_micro_begin(window.get(), 0, 1, nullptr));
  };
  const auto backward_sums = [&] {
    check(ga_bn_backward_accumulate(window.get(), 0, x, dy, samples, shape.positions));
  };
  const auto backward = [&](float* dx) {
    check(ga_bn_backward(window.get(), 0, x, dy, samples, shape.positions, dx));
  };
  const std::vector<Times> first =
      race(options.rounds(), 1,
           {{[&] { yard_mix_1_0(both.get(), 2 * n, threads); }, {}}, {backward_sums, again}});
  report.figure(figure("B3_sums"), first[0] / first[1], Sense::kAtLeast, 0.80,
                format("backward, sums / mix(2,0): %.1f GB/s", rate(2, n, first[1])));
  const std::vector<Times> second = race(options.rounds(), 1,
                                         {{[&] { yard_mix_2_1(dy, x, n, threads); }, {}},
                                          {[&] { backward(dy); }, {}},
                                          {[&] { backward(out.get()); }, {}}});
  report.figure(figure("B3_dx"), second[0] / second[1], Sense::kAtLeast, 0.80,
                format("backward, dx / mix(2,1): %.1f GB/s", rate(3, n, second[1])));
  report.figure(figure("B3_dx_apart"), second[0] / second[2], Sense::kNone, 0,
                format("backward, dx is not dy / mix(2,1): %.1f GB/s", rate(3, n, second[2])));

  // One call for a whole micro-batch, statistics included: a channel that fits the cache is read
  // once.
  const auto micro_forward = [&] {
    check(ga_bn_forward(micro.get(), 0, x, samples, shape.positions, out.get()));
  };
  const auto micro_backward = [&] {
    check(ga_bn_backward(micro.get(), 0, x, dy, samples, shape.positions, dy));
  };
  const auto begin = [&] {
    check(ga_discard(micro.get()));
    micro_forward();
    check(ga_micro_begin(micro.get(), 0, 1, nullptr));
  };
  const std::vector<Times> whole = race(options.rounds(), 1,
                                        {{[&] { yard_mix_1_0(x, n, threads); }, {}},
                                         {[&] { yard_mix_1_1(out.get(), n, threads); }, {}},
                                         {micro_forward, [&] { check(ga_discard(micro.get())); }},
                                         {[&] { yard_mix_1_0(both.get(), 2 * n, threads); }, {}},
                                         {[&] { yard_mix_2_1(dy, x, n, threads); }, {}},
                                         {micro_backward, begin}});
  report.figure(figure("B2_micro"), (whole[0] + whole[1]) / whole[2], Sense::kNone, 0,
                "statistics and normalise in one call / mix(1,0) + mix(1,1)");
  report.figure(figure("B3_micro"), (whole[3] + whole[4]) / whole[5], Sense::kNone, 0,
                "backward in one call / mix(2,0) + mix(2,1)");
}

}  // namespace

void batch_norm_figures(const Options& options, Report& report) {
  const BatchNormShape shapes[] = {{"nhwc64", GA_BN_CHANNELS_LAST, 64, 56 * 56},
                                   {"nhwc2048", GA_BN_CHANNELS_LAST, 2048, 49},
                                   {"nchw49", GA_BN_CHANNELS_FIRST, 2048, 49},
                                   {"nchw3136", GA_BN_CHANNELS_FIRST, 64, 56 * 56}};
  for (const BatchNormShape& shape : shapes) shape_figures(options, report, shape);
}

}  // namespace bench
