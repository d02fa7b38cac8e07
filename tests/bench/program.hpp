// SPDX-License-Identifier: Apache-2.0
//
// Programs that use the library, which the benchmark times.
#ifndef GRADACCUM_TESTS_BENCH_PROGRAM_HPP_
#define GRADACCUM_TESTS_BENCH_PROGRAM_HPP_

#include <gradaccum/gradaccum.h>
#include <omp.h>

#include <algorithm>
#include <memory>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "harness.hpp"
#include "layout.hpp"
#include "yardsticks.hpp"

namespace bench {

struct Options {
  bool quick = false;
  std::set<std::string> only;
  int threads = std::min(omp_get_max_threads(), omp_get_num_procs());
  std::string json = "bench.json";

  bool wants(const char* id) const { return only.empty() || only.count(id) != 0; }
  int rounds() const { return quick ? 7 : 15; }
};

// ---- Programs that use the library --------------------------------------------------------------

struct FreeBlock {
  void operator()(float* block) const { yard_free(block); }
};
using Block = std::unique_ptr<float, FreeBlock>;

inline Block make_block(int64_t n, int number, int threads) {
  Block block(yard_alloc(n, number, threads));
  if (!block) throw std::bad_alloc();
  return block;
}

constexpr double kLr = 1e-5, kMaxNorm = 1e-3;

struct Setting {
  int threads = 1;
  int32_t life = GA_GRADIENTS_CONSUMED;
  int32_t optimizer = GA_OPTIMIZER_ADAMW;
  int32_t scope = GA_CLIP_GLOBAL;
  int32_t units = GA_AGC_TF;
  int32_t dtype = GA_F32;  // of parameters
  int32_t gradient_dtype = GA_F32;
  int32_t state_dtype = 0;
  int32_t noise_scale = 0;
  int32_t rows = GA_ROWS_NONE;
  int32_t reduce = GA_REDUCE_MEAN;
  int32_t nonfinite = GA_NONFINITE_SKIP_STEP;
  int32_t follow_data = 0;
};

// A context over the parameters in a block, with clipping by the global norm unless the setting says
// otherwise.
class Context {
 public:
  Context(const Layout& layout, void* parameters, const Setting& setting) {
    ga_config config;
    check(ga_config_init(&config, sizeof config));
    config.num_threads = setting.threads;
    config.gradient_life = setting.life;
    config.noise_scale = setting.noise_scale;
    config.reduce = setting.reduce;
    config.nonfinite = setting.nonfinite;
    ga_context* made = nullptr;
    check(ga_context_create(&config, &made));
    ctx_.reset(made);
    ga_optimizer optimizer;
    check(ga_optimizer_init(&optimizer, sizeof optimizer, setting.optimizer, GA_FLAVOR_TORCH));
    optimizer.lr = kLr;
    optimizer.state_dtype = setting.state_dtype;
    optimizer.max_grad_norm = 0;
    ga_group group = 0;
    check(ga_group_add(made, &optimizer, &group));
    ga_clip clip;
    check(ga_clip_init(&clip, sizeof clip));
    clip.scope = setting.scope;
    clip.agc_units = setting.units;
    clip.max_norm = kMaxNorm;
    check(ga_context_set_clip(made, &clip));
    ga_param_options options{};
    options.struct_size = sizeof options;
    options.gradient_dtype = setting.gradient_dtype;
    options.rows = setting.rows;
    options.follow_data = setting.follow_data;
    const int64_t size = setting.dtype == GA_F32 ? 4 : 2;
    for (size_t k = 0; k < layout.shapes.size(); ++k) {
      const Shape& shape = layout.shapes[k];
      check(ga_param_add(made, group, ("tensor" + std::to_string(k)).c_str(),
                         static_cast<char*>(parameters) + layout.offsets[k] * size, setting.dtype,
                         static_cast<int32_t>(shape.size()), shape.data(), &options, nullptr));
    }
  }

  void accumulate(const Pointers& gradients, double weight = 1.0) {
    check(ga_accumulate(get(), gradients.data(), gradients.size(), weight, nullptr));
  }

  // Throws if the step was skipped, because a skipped step is fast. Returns the norm.
  double step() {
    ga_step_result result;
    result.struct_size = sizeof result;
    check(ga_step(get(), &result));
    if (result.outcome != GA_STEP_APPLIED) throw std::runtime_error("a step was skipped");
    return result.norm;
  }

  void discard() { check(ga_discard(get())); }

  ga_context* get() const { return ctx_.get(); }

 private:
  struct Destroy {
    void operator()(ga_context* ctx) const { ga_context_destroy(ctx); }
  };
  std::unique_ptr<ga_context, Destroy> ctx_;
};

// One of the two places where passes are measured.
struct Place {
  bool cached;  // inside L2, else beyond the caches
  Layout layout;
  int times;  // calls per round

  std::string figure(const char* id) const { return std::string(id) + (cached ? "_l2" : ""); }
};

inline double rate(int passes_over, int64_t n, const Times& seconds) {
  return 1e-9 * passes_over * static_cast<double>(n) * sizeof(float) / median(seconds);
}
inline double rate(int passes_over, const Layout& layout, const Times& seconds) {
  return rate(passes_over, layout.n, seconds);
}

// Figures of 16-bit arrays, layer-wise optimizers, clipping by units, the noise scale and rows.
void variant_figures(const Options& options, Report& report, const Place& place);
// S1-S3.
void state_figures(const Options& options, Report& report, const Place& place);
// E1-E4.
void eager_figures(const Options& options, Report& report);
// B1-B3.
void batch_norm_figures(const Options& options, Report& report);
// PEERS; `cached` is the place inside L2.
void peer_figures(const Options& options, Report& report, const Place& cached);

}  // namespace bench

#endif  // GRADACCUM_TESTS_BENCH_PROGRAM_HPP_
