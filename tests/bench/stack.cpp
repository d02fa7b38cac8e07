// SPDX-License-Identifier: Apache-2.0
#include "stack.hpp"

#include <gradaccum/gradaccum.h>

#include <memory>
#include <oneapi/dnnl/dnnl.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "yardsticks.hpp"

namespace {

thread_local std::string last_error;

const dnnl::engine& cpu() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

dnnl::memory::desc matrix(int64_t rows, int64_t columns, bool transposed) {
  using memory = dnnl::memory;
  return {{rows, columns},
          memory::data_type::f32,
          transposed ? memory::dims{1, rows} : memory::dims{columns, 1}};
}

}  // namespace

struct stack_matmul {
  stack_matmul(int64_t m, int64_t k, int64_t n, bool a_transposed, bool b_transposed, bool relu)
      : stream(cpu()),
        a(matrix(m, k, a_transposed), cpu(), nullptr),
        b(matrix(k, n, b_transposed), cpu(), nullptr),
        c(matrix(m, n, false), cpu(), nullptr) {
    dnnl::primitive_attr attributes;
    if (relu) {
      dnnl::post_ops operations;
#if DNNL_VERSION_MAJOR >= 3
      operations.append_eltwise(dnnl::algorithm::eltwise_relu, 0.0f, 0.0f);
#else
      operations.append_eltwise(1.0f, dnnl::algorithm::eltwise_relu, 0.0f, 0.0f);
#endif
      attributes.set_post_ops(operations);
    }
#if DNNL_VERSION_MAJOR >= 3
    primitive = dnnl::matmul({cpu(), a.get_desc(), b.get_desc(), c.get_desc(), attributes});
#else
    primitive = dnnl::matmul({{a.get_desc(), b.get_desc(), c.get_desc()}, attributes, cpu()});
#endif
  }

  void run(const float* a_data, const float* b_data, float* c_data) {
    a.set_data_handle(const_cast<float*>(a_data));
    b.set_data_handle(const_cast<float*>(b_data));
    c.set_data_handle(c_data);
    primitive.execute(stream, {{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, b}, {DNNL_ARG_DST, c}});
    stream.wait();
  }

  dnnl::stream stream;
  dnnl::memory a, b, c;
  dnnl::matmul primitive;
};

namespace {

struct Free {
  void operator()(float* block) const { yard_free(block); }
};
using Block = std::unique_ptr<float, Free>;

struct Destroy {
  void operator()(ga_context* ctx) const { ga_context_destroy(ctx); }
};

void check(ga_status status) {
  if (status != GA_OK) throw std::runtime_error(ga_last_error());
}

}  // namespace

struct stack {
  stack(int layers_, int64_t width_, int64_t batch_, int micros_, float* const* weights_,
        const float* inputs_, const float* targets_, double lr, double max_norm, int way_,
        int threads_)
      : layers(layers_),
        micros(micros_),
        threads(threads_),
        way(way_),
        width(width_),
        batch(batch_),
        weights(weights_, weights_ + layers_),
        inputs(inputs_),
        targets(targets_),
        forward(batch, width, width, false, true, true),
        forward_last(batch, width, width, false, true, false),
        backward(batch, width, width, false, false, false),
        product(width, batch, width, true, false, false) {
    for (int layer = 0; layer < layers; ++layer) outputs.push_back(block(batch * width));
    for (Block& side : errors) side = block(batch * width);

    ga_config config;
    check(ga_config_init(&config, sizeof config));
    config.num_threads = threads;
    config.accum_steps = micros;
    ga_context* created = nullptr;
    check(ga_context_create(&config, &created));
    ctx.reset(created);
    ga_optimizer adamw;
    check(ga_optimizer_init(&adamw, sizeof adamw, GA_OPTIMIZER_ADAMW, GA_FLAVOR_TORCH));
    adamw.lr = lr;
    ga_group group;
    check(ga_group_add(ctx.get(), &adamw, &group));
    ga_clip clip;
    check(ga_clip_init(&clip, sizeof clip));
    clip.scope = GA_CLIP_GLOBAL;
    clip.max_norm = max_norm;
    check(ga_context_set_clip(ctx.get(), &clip));
    const int64_t shape[2] = {width, width};
    for (int layer = 0; layer < layers; ++layer) {
      const std::string name = "layer" + std::to_string(layer) + ".weight";
      check(ga_param_add(ctx.get(), group, name.c_str(), weights[static_cast<size_t>(layer)],
                         GA_F32, 2, shape, nullptr, nullptr));
      if (way == STACK_WRITTEN) {
        gradients.push_back(block(width * width));
        gradient_pointers.push_back(gradients.back().get());
      }
    }
  }

  Block block(int64_t n) {
    Block made(yard_alloc(n, blocks_made++, threads));
    if (!made) throw std::bad_alloc();
    return made;
  }

  void step() {
    double total = 0;
    for (int micro = 0; micro < micros; ++micro) total += micro_batch(micro);
    check(ga_step(ctx.get(), nullptr));
    loss = total / micros;
  }

  double micro_batch(int micro) {
    const float* input = inputs + micro * batch * width;
    const float* target = targets + micro * batch * width;
    const auto output = [&](int layer) {
      return layer < 0 ? input : outputs[static_cast<size_t>(layer)].get();
    };
    for (int layer = 0; layer < layers; ++layer) {
      stack_matmul& dense = layer + 1 < layers ? forward : forward_last;
      dense.run(output(layer - 1), weights[static_cast<size_t>(layer)],
                outputs[static_cast<size_t>(layer)].get());
    }

    // The loss is the mean over batch x width elements.
    const int64_t n = batch * width;
    const float* last = output(layers - 1);
    float* error = errors[0].get();
    double squares = 0;
    const float twice = 2.0f / static_cast<float>(n);
#pragma omp parallel for simd num_threads(threads) reduction(+ : squares)
    for (int64_t i = 0; i < n; ++i) {
      const float difference = last[i] - target[i];
      squares += static_cast<double>(difference) * static_cast<double>(difference);
      error[i] = twice * difference;
    }

    if (way == STACK_MATMUL) check(ga_micro_begin(ctx.get(), micro, 1.0, nullptr));
    for (int layer = layers - 1; layer >= 0; --layer) {
      const float* x = output(layer - 1);
      float* dy = errors[(layers - 1 - layer) % 2].get();
      float* dx = errors[(layers - layer) % 2].get();
      if (way == STACK_MATMUL) {
        check(ga_accumulate_matmul(ctx.get(), layer, batch, dy, width, GA_TRANSPOSE, x, width,
                                   GA_NO_TRANSPOSE, GA_F32));
      } else {
        product.run(dy, x, gradients[static_cast<size_t>(layer)].get());
      }
      if (layer == 0) break;
      backward.run(dy, weights[static_cast<size_t>(layer)], dx);
#pragma omp parallel for simd num_threads(threads)
      for (int64_t i = 0; i < n; ++i) dx[i] = x[i] > 0.0f ? dx[i] : 0.0f;
    }
    if (way == STACK_MATMUL) {
      check(ga_micro_end(ctx.get()));
    } else {
      check(ga_accumulate(ctx.get(), gradient_pointers.data(), gradient_pointers.size(), 1.0,
                          nullptr));
    }
    return squares / static_cast<double>(n);
  }

  const int layers, micros, threads, way;
  const int64_t width, batch;
  const std::vector<float*> weights;
  const float* const inputs;
  const float* const targets;
  stack_matmul forward, forward_last, backward, product;
  int blocks_made = 0;
  std::vector<Block> outputs, gradients;
  Block errors[2];
  std::vector<const void*> gradient_pointers;
  std::unique_ptr<ga_context, Destroy> ctx;
  double loss = 0;
};

namespace {

// No exception may reach a caller in C or Python.
template <class Body>
auto guarded(Body body) -> decltype(body()) {
  try {
    return body();
  } catch (const std::exception& error) {
    last_error = error.what();
    return {};
  }
}

}  // namespace

const char* stack_error(void) { return last_error.c_str(); }

int stack_onednn_version(void) {
  const dnnl_version_t* version = dnnl_version();
  return 100 * version->major + version->minor;
}

stack_matmul* stack_matmul_create(int64_t m, int64_t k, int64_t n, int a_transposed,
                                  int b_transposed) {
  return guarded(
      [&] { return new stack_matmul(m, k, n, a_transposed != 0, b_transposed != 0, false); });
}

void stack_matmul_run(stack_matmul* product, const float* a, const float* b, float* c) {
  product->run(a, b, c);
}

void stack_matmul_destroy(stack_matmul* product) { delete product; }

stack* stack_create(int layers, int64_t width, int64_t batch, int micros, float* const* weights,
                    const float* inputs, const float* targets, double lr, double max_norm, int way,
                    int threads) {
  return guarded([&] {
    return new stack(layers, width, batch, micros, weights, inputs, targets, lr, max_norm, way,
                     threads);
  });
}

int stack_step(stack* s) {
  last_error.clear();
  return guarded([&] {
    s->step();
    return true;
  })
             ? 0
             : 1;
}

double stack_loss(const stack* s) { return s->loss; }

void stack_destroy(stack* s) { delete s; }
