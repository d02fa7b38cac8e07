// SPDX-License-Identifier: Apache-2.0
//
// PEERS: what programs do without the library, on the same gradients and with as many threads. Each
// figure is a peer's time over the library's. PyTorch and DeepSpeed are in peers.py.
#include <algorithm>
#include <cmath>

#include "peers_plain.h"
#include "program.hpp"
#ifdef GA_BENCH_GGML
#include <ggml-cpu.h>
#include <ggml.h>
#endif

namespace bench {
namespace {

// The arrays of a window. A peer takes the first gradient as its accumulator and adds the other one
// once for each further micro-batch.
struct Arrays {
  float *p, *first, *other;
};

class Peer {
 public:
  virtual ~Peer() = default;
  virtual void window(int micros) = 0;
};
using MakePeer = std::function<std::unique_ptr<Peer>(const Arrays&)>;

// The defaults of AdamW, which the library's contexts use.
plain_adamw defaults() {
  ga_optimizer from;
  check(ga_optimizer_init(&from, sizeof from, GA_OPTIMIZER_ADAMW, GA_FLAVOR_TORCH));
  return {static_cast<float>(kLr),
          static_cast<float>(from.beta1),
          static_cast<float>(from.beta2),
          static_cast<float>(from.eps),
          static_cast<float>(from.weight_decay),
          0};
}

Block make_zeros(int64_t n, int number, int threads) {
  Block block = make_block(n, number, threads);
  std::fill_n(block.get(), n, 0.0f);
  return block;
}

// ---- Plain loops, on one thread -----------------------------------------------------------------

class Plain : public Peer {
 public:
  Plain(const Layout& layout, const Arrays& arrays, const plain_loops& loops, plain_update* update,
        bool clips)
      : layout_(layout), arrays_(arrays), loops_(loops), update_(update), clips_(clips) {}

  void window(int micros) override {
    for (int micro = 1; micro < micros; ++micro) {
      each(
          [this](int64_t at, int64_t n) { loops_.add(arrays_.first + at, arrays_.other + at, n); });
    }
    if (clips_) {
      float squares = 0;
      each([&](int64_t at, int64_t n) { squares += loops_.squares(arrays_.first + at, n); });
      const float factor = std::min(1.0f, static_cast<float>(kMaxNorm) / std::sqrt(squares));
      each([&](int64_t at, int64_t n) { loops_.scale(arrays_.first + at, factor, n); });
    }
    ++adamw_.step;
    each([this](int64_t at, int64_t n) {
      update_(arrays_.p + at, m_.get() + at, v_.get() + at, arrays_.first + at, n, &adamw_);
    });
  }

 private:
  template <class Loop>
  void each(Loop loop) {
    for (size_t k = 0; k < layout_.shapes.size(); ++k) {
      loop(layout_.offsets[k], elements(layout_.shapes[k]));
    }
  }

  const Layout layout_;
  const Arrays arrays_;
  const plain_loops& loops_;
  plain_update* const update_;
  const bool clips_;
  plain_adamw adamw_ = defaults();
  const Block m_ = make_zeros(layout_.n, 5, 1), v_ = make_zeros(layout_.n, 6, 1);
};

// ---- ggml ---------------------------------------------------------------------------------------

#ifdef GA_BENCH_GGML

// A graph of the operations that ggml-opt adds behind backward: sums of gradients in place, then the
// step. ggml-opt does not clip.
class Ggml : public Peer {
 public:
  Ggml(const Layout& layout, const Arrays& arrays, int micros, int threads)
      : m_(make_zeros(layout.n, 5, threads)), v_(make_zeros(layout.n, 6, threads)) {
    const size_t count = layout.shapes.size() * static_cast<size_t>(6 + micros) + 1;
    context_.reset(
        ggml_init({count * ggml_tensor_overhead() + ggml_graph_overhead_custom(count, false),
                   nullptr, true}));
    if (!context_) throw std::bad_alloc();
    graph_ = ggml_new_graph_custom(context_.get(), count, false);
    ggml_tensor* const with = tensor({7}, with_);
    for (size_t k = 0; k < layout.shapes.size(); ++k) {
      const auto view = [&](float* block) {
        return tensor(layout.shapes[k], block + layout.offsets[k]);
      };
      ggml_tensor *gradient = view(arrays.first), *other = view(arrays.other);
      for (int micro = 1; micro < micros; ++micro) {
        gradient = ggml_add_inplace(context_.get(), gradient, other);
      }
      ggml_tensor* const p = view(arrays.p);
      ggml_set_param(p);
      ggml_build_forward_expand(graph_, ggml_opt_step_adamw(context_.get(), p, gradient,
                                                            view(m_.get()), view(v_.get()), with));
    }
    plan_ = ggml_graph_plan(graph_, threads, nullptr);
    work_.resize(plan_.work_size);
    plan_.work_data = work_.data();
  }

  void window(int) override {
    ++adamw_.step;
    const float correction1 = 1 / (1 - std::pow(adamw_.beta1, static_cast<float>(adamw_.step)));
    const float correction2 = 1 / (1 - std::pow(adamw_.beta2, static_cast<float>(adamw_.step)));
    const float with[7] = {adamw_.lr,           adamw_.beta1, adamw_.beta2, adamw_.eps,
                           adamw_.weight_decay, correction1,  correction2};
    std::copy_n(with, 7, with_);
    if (ggml_graph_compute(graph_, &plan_) != GGML_STATUS_SUCCESS) {
      throw std::runtime_error("ggml_graph_compute failed");
    }
  }

 private:
  ggml_tensor* tensor(const Shape& shape, float* data) {
    const Shape reversed(shape.rbegin(), shape.rend());
    ggml_tensor* const made = ggml_new_tensor(context_.get(), GGML_TYPE_F32,
                                              static_cast<int>(shape.size()), reversed.data());
    made->data = data;
    return made;
  }

  struct Free {
    void operator()(ggml_context* context) const { ggml_free(context); }
  };
  std::unique_ptr<ggml_context, Free> context_;
  ggml_cgraph* graph_ = nullptr;
  ggml_cplan plan_;
  std::vector<uint8_t> work_;
  plain_adamw adamw_ = defaults();
  float with_[7] = {};
  const Block m_, v_;
};

#endif  // GA_BENCH_GGML

// ---- Whole windows ------------------------------------------------------------------------------

struct Row {
  std::string id, peer;
  int micros;
  bool clips;
  int threads;
  bool small;     // many short rounds, for a window that others on the machine interrupt easily
  double target;  // 0 for none
  bool checks = true;  // the library checks that gradients are finite
};

// The peer against the library, to which the first gradient is lent, as the peer takes it. The text has the ratios
// for gradients that live until the step, which the library does not write to, and for consumed ones.
void window_figure(const Options& options, Report& report, const Layout& layout, const Row& row,
                   const MakePeer& make_peer) {
  const int64_t n = layout.n;
  const Block first = make_block(n, 0, row.threads), other = make_block(n, 1, row.threads);
  const Block p[4] = {make_block(n, 2, row.threads), make_block(n, 3, row.threads),
                      make_block(n, 4, row.threads), make_block(n, 7, row.threads)};
  for (int k : {1, 2, 3}) std::copy_n(p[0].get(), n, p[k].get());
  Setting setting;
  setting.threads = row.threads;
  setting.scope = row.clips ? GA_CLIP_GLOBAL : GA_CLIP_NONE;
  setting.reduce = GA_REDUCE_SUM;
  if (!row.checks) setting.nonfinite = GA_NONFINITE_IGNORE;
  const auto with = [&setting](int32_t life) {
    setting.life = life;
    return setting;
  };
  Context lent(layout, p[1].get(), with(GA_GRADIENTS_LENT));
  Context live(layout, p[2].get(), with(GA_GRADIENTS_LIVE));
  Context consumed(layout, p[3].get(), with(GA_GRADIENTS_CONSUMED));
  const Pointers gradients[2] = {layout.pointers(first.get()), layout.pointers(other.get())};
  const auto window = [&](Context& context) {
    return [&context, &gradients, &row] {
      for (int micro = 0; micro < row.micros; ++micro) context.accumulate(gradients[micro > 0]);
      context.step();
    };
  };
  const std::unique_ptr<Peer> peer = make_peer({p[0].get(), first.get(), other.get()});

  // First check that all do the same, with the same first gradient.
  const std::vector<float> kept(first.get(), first.get() + n);
  window(consumed)();
  window(live)();
  window(lent)();
  std::copy(kept.begin(), kept.end(), first.get());
  peer->window(row.micros);
  for (int64_t i = 0; i < n; ++i) {
    // The first step of AdamW is of the size of the learning rate.
    float worst = 0;
    for (int k : {1, 2, 3}) worst = std::max(worst, std::fabs(p[k].get()[i] - p[0].get()[i]));
    if (!(worst <= 0.01f * static_cast<float>(kLr))) {
      throw std::runtime_error(format("%s: element %lld differs by %g from the library's",
                                      row.id.c_str(), static_cast<long long>(i),
                                      static_cast<double>(worst)));
    }
  }
  const std::vector<Times> t = race(options.rounds() * (row.small ? 7 : 1), row.small ? 40 : 1,
                                    {{[&] { peer->window(row.micros); }, {}},
                                     {window(lent), {}},
                                     {window(live), {}},
                                     {window(consumed), {}}});
  report.figure(
      row.id, t[0] / t[1], row.target > 0 ? Sense::kAtLeast : Sense::kNone, row.target,
      format("%s %.4g ms / %.4g ms, N = %d, %s%s, threads: %d, live: %.3f, consumed: %.3f",
             row.peer.c_str(), 1e3 * median(t[0]), 1e3 * median(t[1]), row.micros,
             row.clips ? "clipped" : "not clipped", row.checks ? "" : ", not checked", row.threads,
             median(t[0] / t[2]), median(t[0] / t[3])));
}

void plain_windows(const Options& options, Report& report) {
  const Layout mlp({{784, 128}, {128}, {128, 10}, {10}});
  const Layout many(std::vector<Shape>(400, Shape{512}));
  struct Flags {
    const char *id, *text;
    const plain_loops& loops;
    bool clips;
    double mlp, many;  // targets
  };
  for (const Flags& flags : {Flags{"plain", "-O3", plain_o3, false, 0.95, 0.9},
                             Flags{"plain_clip", "-O3", plain_o3, true, 0, 0},
                             Flags{"ofast_clip", "-Ofast", plain_ofast, true, 1.2, 1.1}}) {
    for (const Layout* layout : {&mlp, &many}) {
      const bool is_mlp = layout == &mlp;
      window_figure(options, report, *layout,
                    {format("PEERS_%s_%s", is_mlp ? "mlp" : "400", flags.id),
                     format("plain loops, %s,", flags.text), 4, flags.clips, 1, true,
                     is_mlp ? flags.mlp : flags.many},
                    [&](const Arrays& arrays) {
                      return std::make_unique<Plain>(*layout, arrays, flags.loops,
                                                     flags.loops.adamw, flags.clips);
                    });
    }
  }
}

void model_windows(const Options& options, Report& report) {
  const Layout layout = gpt2(options.quick ? 3 : 12);
  const Layout flat(std::vector<Shape>{Shape{layout.n}});  // llm.c keeps its parameters so
  const auto against_llmc = [&](const char* id, int micros, bool clips, bool checks,
                                double target) {
    window_figure(
        options, report, layout, {id, "llm.c's update", micros, clips, 1, false, target, checks},
        [&](const Arrays& arrays) {
          return std::make_unique<Plain>(flat, arrays, plain_ofast, plain_ofast.llmc_update, clips);
        });
  };
  against_llmc("PEERS_llmc_n1", 1, false, true, 1.0);
  against_llmc("PEERS_llmc_n1_unchecked", 1, false, false, 0);  // as llm.c, which checks nothing
  against_llmc("PEERS_llmc_n4", 4, false, true, 0);
  against_llmc("PEERS_llmc_n1_clip", 1, true, true, 0);
  against_llmc("PEERS_llmc_n4_clip", 4, true, true, 0);
#ifdef GA_BENCH_GGML
  for (const int micros : {1, 4}) {
    window_figure(options, report, layout,
                  {format("PEERS_ggml_n%d", micros), format("ggml %s", ggml_version()), micros,
                   false, options.threads, false, 0},
                  [&](const Arrays& arrays) {
                    return std::make_unique<Ggml>(layout, arrays, micros, options.threads);
                  });
  }
#else
  printf("PEERS_ggml: skipped; this build has no ggml\n");
#endif
}

// ---- Single passes ------------------------------------------------------------------------------

// Half of a core's L2 for four streams.
void passes_inside_l2(const Options& options, Report& report, int64_t n) {
  const int rounds = 7 * options.rounds(), times = 200;
  const Layout layout(std::vector<Shape>{Shape{n}});
  const Block p = make_block(n, 0, 1), g = make_block(n, 1, 1), q = make_block(n, 2, 1),
              a = make_block(n, 3, 1), m = make_zeros(n, 4, 1), v = make_zeros(n, 5, 1);
  const Pointers gradients = layout.pointers(g.get());
  Setting setting;
  setting.scope = GA_CLIP_NONE;
  Context context(layout, p.get(), setting);
  plain_adamw adamw = defaults();
  const auto add = [&] { plain_o3.add(a.get(), g.get(), n); };
  const auto update = [&] {
    ++adamw.step;
    plain_o3.adamw(q.get(), m.get(), v.get(), a.get(), n, &adamw);
  };
  const auto accumulate = [&] { context.accumulate(gradients); };

  // An accumulate lies between two steps of the library, and is not timed. The plain update runs
  // with an addition between, and alone.
  const std::vector<Times> step =
      race(rounds, times, {{update, add}, {update, {}}, {[&] { context.step(); }, accumulate}});
  const char* const figures[2] = {"PEERS_adamw_l2", "PEERS_adamw_l2_alone"};
  for (size_t k = 0; k < 2; ++k) {
    report.figure(figures[k], step[k] / step[2], k == 0 ? Sense::kAtLeast : Sense::kNone, 0.95,
                  format("plain AdamW, -O3%s, %.2f us / ga_step %.2f us, %lld elements, threads: 1",
                         k == 0 ? "" : ", called alone", 1e6 * median(step[k]),
                         1e6 * median(step[2]), static_cast<long long>(n)));
  }

  accumulate();
  const std::vector<Times> sum = race(rounds, times, {{add, {}}, {accumulate, {}}});
  report.figure("PEERS_accumulate_l2", sum[0] / sum[1], Sense::kAtLeast, 0.85,
                format("plain addition, -O3, %.2f us / ga_accumulate %.2f us, %lld elements, "
                       "threads: 1",
                       1e6 * median(sum[0]), 1e6 * median(sum[1]), static_cast<long long>(n)));
}

// What the memory gives, by which machines can be compared.
void memory(const Options& options, Report& report) {
  const int64_t n = gpt2(options.quick ? 3 : 12).n;
  const Block a = make_block(n, 0, options.threads), g = make_block(n, 1, options.threads);
  const auto mix = [&](int threads) {
    return Side{[&, threads] { yard_mix_2_1(a.get(), g.get(), n, threads); }, {}};
  };
  const std::vector<Times> t = race(options.rounds(), 1, {mix(1), mix(options.threads)});
  report.yardstick("PEERS_mix_2_1_one_thread", rate(3, n, t[0]));
  report.yardstick("PEERS_mix_2_1", rate(3, n, t[1]));
}

}  // namespace

void peer_figures(const Options& options, Report& report, const Place& cached) {
  memory(options, report);
  passes_inside_l2(options, report, cached.layout.n / options.threads);
  plain_windows(options, report);
  model_windows(options, report);
}

}  // namespace bench
