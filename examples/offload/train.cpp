// SPDX-License-Identifier: Apache-2.0
#include "train.hpp"

#include <algorithm>
#include <chrono>
#include <memory>
#include <stdexcept>

#include "gradaccum/gradaccum.h"

namespace {

void check(ga_status status) {
  if (status != GA_OK) throw std::runtime_error(ga_last_error());
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Destroy {
  void operator()(ga_context* ctx) const { ga_context_destroy(ctx); }
};
using Context = std::unique_ptr<ga_context, Destroy>;

// Called by ga_step, or for an update in place by a thread of the library, each for an element of its
// own.
void note_done(void* times, ga_param param) {
  (*static_cast<std::vector<double>*>(times))[static_cast<std::size_t>(param)] = now();
}

Context make_context(const Model& model, const Way& way, std::vector<std::uint16_t>& p,
                     std::vector<double>& done) {
  ga_config config;
  check(ga_config_init(&config, sizeof config));
  config.num_threads = way.threads;
  config.gradient_life = GA_GRADIENTS_LIVE;
  config.nonfinite = way.clip > 0 ? GA_NONFINITE_SKIP_STEP : GA_NONFINITE_IGNORE;
  config.eager = way.eager;
  config.eager_threads = way.eager;
  config.on_param_done = note_done;
  config.on_param_done_user = &done;
  ga_context* created = nullptr;
  check(ga_context_create(&config, &created));
  Context ctx(created);

  ga_optimizer adamw;
  check(ga_optimizer_init(&adamw, sizeof adamw, GA_OPTIMIZER_ADAMW, GA_FLAVOR_TORCH));
  adamw.lr = way.lr;
  ga_group group = -1;
  check(ga_group_add(ctx.get(), &adamw, &group));
  if (way.clip > 0) {
    ga_clip clip;
    check(ga_clip_init(&clip, sizeof clip));
    clip.scope = GA_CLIP_GLOBAL;
    clip.max_norm = way.clip;
    check(ga_context_set_clip(ctx.get(), &clip));
  }
  ga_param_options options;
  check(ga_param_options_init(&options, sizeof options));
  options.write_early = 1;
  for (const Tensor& t : model.tensors())
    check(ga_param_add(ctx.get(), group, t.name.c_str(), &p[t.offset], GA_BF16,
                       static_cast<int>(t.shape.size()), t.shape.data(), &options, nullptr));
  check(ga_prepare(ctx.get()));
  return ctx;
}

// Backward delivers the layers from the last to the first, each after the share of its time that the
// elements up to it have. done: of the tensors, by the clock, which note_done writes.
Window run_window(ga_context* ctx, const Model& model, const Way& way,
                  const std::vector<std::uint16_t>& p, std::vector<std::uint16_t>& gradient,
                  std::vector<double>& done) {
  Window window;
  window.arrived.resize(model.layers().size());
  ga_micro_options options;
  check(ga_micro_options_init(&options, sizeof options));
  options.flags = GA_MICRO_LAST;
  check(ga_micro_begin(ctx, -1, 1, &options));
  const double start = now();
  for (std::size_t k = model.layers().size(); k-- > 0;) {
    const Layer& layer = model.layers()[k];
    window.loss += model.backward(layer, p.data(), gradient.data());
    const double share =
        static_cast<double>(model.size() - layer.first) / static_cast<double>(model.size());
    while (now() < start + way.backward * share)
      ;
    window.arrived[k] = now() - start;
    std::vector<ga_param> ids;
    for (std::size_t t = layer.first_tensor; t < layer.end_tensor; ++t) {
      ids.push_back(static_cast<ga_param>(t));
      check(ga_accumulate_part(ctx, ids.back(), &gradient[model.tensors()[t].offset]));
    }
    if (way.eager) check(ga_params_ready(ctx, ids.data(), ids.size()));
  }
  window.last = window.arrived.front();
  check(ga_micro_end(ctx));
  ga_step_result result;
  check(ga_step_result_init(&result, sizeof result));
  check(ga_step(ctx, &result));
  window.end = now() - start;
  if (result.outcome != GA_STEP_APPLIED) throw std::runtime_error("a step was skipped");
  window.norm = result.norm;
  window.tensors = static_cast<std::int64_t>(model.tensors().size());
  window.ahead = result.eager;
  window.redone = result.eager_redone;
  for (const Layer& layer : model.layers()) {
    const auto last = std::max_element(&done[layer.first_tensor], done.data() + layer.end_tensor);
    window.done.push_back(way.eager ? *last - start : window.end);
  }
  return window;
}

}  // namespace

std::vector<Window> train(const Model& model, const Way& way, int windows,
                          std::vector<std::uint16_t>& p) {
  std::vector<std::uint16_t> gradient(model.size());
  std::vector<double> done(model.tensors().size());
  const Context ctx = make_context(model, way, p, done);
  std::vector<Window> result;
  for (int i = 0; i < windows; ++i)
    result.push_back(run_window(ctx.get(), model, way, p, gradient, done));
  return result;
}
