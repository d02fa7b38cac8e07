// SPDX-License-Identifier: Apache-2.0
//
// E: updates ahead of ga_step. E1, a window of one gradient that is updated in place, against one that is
// accumulated. E2 to E4, what is left to do after the last gradient, when layers come one after the other from
// a backward pass that keeps one processor busy for as long as the step takes: over the same step without
// ga_config.eager. E5, the same for one of eight ranks on a network of a given speed, with overlap, and with eager
// as well. E6 and E7, E3 and the step itself where ranks have parameters of their own (GA_SHARD_PARAMETERS).
#include <atomic>
#include <cstring>
#include <thread>

#include "program.hpp"

namespace bench {
namespace {

struct Way {
  int32_t dtype = GA_F32;
  bool eager = false;
  int eager_threads = 0;
  int32_t nonfinite = GA_NONFINITE_SKIP_STEP;
  int32_t life = GA_GRADIENTS_LIVE;
  double max_norm = 0;  // 0: no clip
  ga_comm* comm = nullptr;
  std::string name = "layer";  // of each, with its number
  bool overlap = false;
  bool own = false;  // GA_SHARD_PARAMETERS
};

class Layers {
 public:
  Layers(const Layout& layout, void* parameters, int threads, const Way& way)
      : layout_(layout), way_(way) {
    ga_config config;
    check(ga_config_init(&config, sizeof config));
    config.num_threads = threads;
    config.gradient_life = way.life;
    config.nonfinite = way.nonfinite;
    config.eager = way.eager;
    config.eager_threads = way.eager_threads;
    if (way.own) config.gradient_kind = GA_GRADIENT_SUM;
    check(ga_context_create(&config, &ctx_));
    ga_optimizer optimizer;
    check(ga_optimizer_init(&optimizer, sizeof optimizer, GA_OPTIMIZER_ADAMW, GA_FLAVOR_TORCH));
    optimizer.lr = kLr;
    check(ga_group_add(ctx_, &optimizer, nullptr));
    if (way.max_norm > 0) {
      ga_clip clip;
      check(ga_clip_init(&clip, sizeof clip));
      clip.scope = GA_CLIP_GLOBAL;
      clip.max_norm = way.max_norm;
      check(ga_context_set_clip(ctx_, &clip));
    }
    ga_param_options options;
    check(ga_param_options_init(&options, sizeof options));
    options.write_early = way.dtype == GA_BF16;
    size_ = way.dtype == GA_F32 ? 4 : 2;
    for (size_t k = 0; k < layout.shapes.size(); ++k)
      check(ga_param_add(ctx_, 0, (way.name + std::to_string(k)).c_str(),
                         static_cast<char*>(parameters) + layout.offsets[k] * size_, way.dtype, 2,
                         layout.shapes[k].data(), &options, nullptr));
    if (!way.comm) return;
    ga_comm_options over;
    check(ga_comm_options_init(&over, sizeof over));
    over.overlap = way.overlap;
    if (way.own) over.shard = GA_SHARD_PARAMETERS;
    check(ga_context_set_comm(ctx_, way.comm, &over));
  }
  ~Layers() { ga_context_destroy(ctx_); }
  Layers(const Layers&) = delete;
  Layers& operator=(const Layers&) = delete;

  // A window whose gradients come evenly within so many seconds, which the calling thread computes.
  // Returns the seconds from the last gradient to the end of the step.
  double window(const void* gradients, double seconds) {
    ga_micro_options options;
    check(ga_micro_options_init(&options, sizeof options));
    options.flags = GA_MICRO_LAST;
    check(ga_micro_begin(ctx_, -1, 1, &options));
    const double start = now();
    const size_t layers = layout_.shapes.size();
    double last = start;
    for (size_t k = layers; k-- > 0;) {
      while (now() <
             start + seconds * static_cast<double>(layers - k) / static_cast<double>(layers))
        ;
      last = now();
      const auto id = static_cast<ga_param>(k);
      check(ga_accumulate_part(ctx_, id,
                               static_cast<const char*>(gradients) + layout_.offsets[k] * size_));
      if (way_.eager || way_.overlap) check(ga_params_ready(ctx_, &id, 1));
    }
    check(ga_micro_end(ctx_));
    ga_step_result result;
    result.struct_size = sizeof result;
    check(ga_step(ctx_, &result));
    if (result.outcome != GA_STEP_APPLIED) throw std::runtime_error("a step was skipped");
    redone += result.eager_redone;
    ahead += result.eager;
    return now() - last;
  }

  int64_t ahead = 0, redone = 0;

 private:
  const Layout& layout_;
  const Way way_;
  ga_context* ctx_ = nullptr;
  int64_t size_;
};

void in_place(const Options& options, Report& report, const Layout& layout) {
  const int threads = options.threads;
  const Block p = make_block(layout.n, 0, threads), q = make_block(layout.n, 0, threads),
              g = make_block(layout.n, 1, threads);
  Way way;
  way.nonfinite = GA_NONFINITE_IGNORE;
  way.life = GA_GRADIENTS_CONSUMED;
  Layers consumed(layout, p.get(), threads, way);
  way.life = GA_GRADIENTS_LIVE;
  way.eager = true;
  Layers eager(layout, q.get(), threads, way);
  const std::vector<Times> t =
      race(options.rounds(), 1,
           {{[&] { consumed.window(g.get(), 0); }, {}}, {[&] { eager.window(g.get(), 0); }, {}}});
  report.figure("E1", t[0] / t[1], Sense::kAtLeast, 1.25,
                format("a window of one gradient, in place %.1f ms, accumulated %.1f ms",
                       1e3 * median(t[1]), 1e3 * median(t[0])));
}

// A rank of so many that are threads.
class Local {
 public:
  Local(const unsigned char* id, int32_t rank, int32_t ranks) {
    ga_comm_config config;
    check(ga_comm_config_init(&config, sizeof config, GA_COMM_LOCAL));
    config.id = id;
    config.rank = rank;
    config.ranks = ranks;
    check(ga_comm_create(&config, &comm_));
  }
  ~Local() { ga_comm_destroy(comm_); }
  Local(const Local&) = delete;
  Local& operator=(const Local&) = delete;
  operator ga_comm*() const { return comm_; }

  static std::vector<unsigned char> id() {
    std::vector<unsigned char> id(GA_COMM_ID_SIZE);
    check(ga_comm_unique_id(GA_COMM_LOCAL, id.data(), id.size()));
    return id;
  }

 private:
  ga_comm* comm_ = nullptr;
};

// slower: how many times as long as the step the backward pass takes. own: of the only rank, which has all parameters.
void hidden(const Options& options, Report& report, const Layout& layout, const char* id,
            int32_t dtype, double max_norm, double slower, double most, const char* what,
            bool own = false) {
  const int threads = options.threads;
  const Block p = make_block(layout.n, 0, threads), q = make_block(layout.n, 0, threads),
              g = make_block(layout.n, 1, threads);
  if (dtype == GA_BF16)
    for (float* block : {p.get(), q.get(), g.get()})
      std::fill_n(reinterpret_cast<uint16_t*>(block), layout.n, uint16_t{0x3a80});
  Way way;
  way.dtype = dtype;
  way.max_norm = max_norm;
  way.own = own;
  const std::vector<unsigned char> first = Local::id(), second = Local::id();
  const Local of_plain(first.data(), 0, 1), of_eager(second.data(), 0, 1);
  if (own) way.comm = of_plain;
  Layers plain(layout, p.get(), threads, way);
  way.eager = true;
  way.eager_threads = 1;
  if (own) way.comm = of_eager;
  Layers eager(layout, q.get(), threads, way);
  Times whole, left;
  for (int round = -2; round < options.rounds(); ++round) {
    const double step = plain.window(g.get(), 0);
    const double rest = eager.window(g.get(), slower * step);
    if (round < 0) continue;
    whole.push_back(step);
    left.push_back(rest);
  }
  const double windows = options.rounds() + 2, layers = static_cast<double>(layout.shapes.size());
  report.figure(
      id, left / whole, slower == 1 ? Sense::kAtMost : Sense::kNone, most,
      format("%s: %.1f ms after the last gradient, %.1f ms without; of %.0f layers %.1f ahead, "
             "%.1f of them redone",
             what, 1e3 * median(left), 1e3 * median(whole), layers,
             static_cast<double>(eager.ahead) / windows,
             static_cast<double>(eager.redone) / windows));
}

// Eight ranks with a million elements each, in 16 tensors, on the processors that there are: how long a step takes
// until all have made theirs, for a million elements and rank.
void own_parameters(const Options& options, Report& report) {
  constexpr int32_t kRanks = 8;
  const Layout layout(std::vector<Shape>(16, Shape{250, 250}));
  const std::vector<unsigned char> id = Local::id();
  Times times;
  std::vector<Times> of_ranks(kRanks);
  std::atomic<int> arrived{0};
  std::vector<std::thread> threads;
  for (int32_t r = 0; r < kRanks; ++r)
    threads.emplace_back([&, r] {
      const Block p = make_block(layout.n, 0, 1), g = make_block(layout.n, 1, 1);
      const Local comm(id.data(), r, kRanks);
      Way way;
      way.max_norm = kMaxNorm;
      way.own = true;
      way.comm = comm;
      way.name = "rank" + std::to_string(r) + ".";
      Layers layers(layout, p.get(), 1, way);
      for (int round = -2; round < 4 * options.rounds(); ++round) {
        ++arrived;
        while (arrived.load() < (round + 3) * kRanks) std::this_thread::yield();
        const double begin = now();
        layers.window(g.get(), 0);
        if (round >= 0) of_ranks[static_cast<size_t>(r)].push_back(now() - begin);
      }
    });
  for (std::thread& t : threads) t.join();
  for (size_t k = 0; k < of_ranks[0].size(); ++k) {
    double longest = 0;
    for (const Times& of_rank : of_ranks) longest = std::max(longest, of_rank[k]);
    times.push_back(longest);
  }
  report.figure("E7", 1e3 / kRanks * times, Sense::kAtMost, 5,
                format("8 ranks of a million elements each, clipped: %.1f ms for all, in ms for a "
                       "million and rank",
                       1e3 * median(times)));
}

// One of several ranks, whose network takes as long as the bytes say that it sends to the others, and no
// processor. What comes from them is what they would send if they had the same gradients.
class Network {
 public:
  static constexpr int64_t kRanks = 8;

  explicit Network(double bytes_per_second) : rate_(bytes_per_second) {
    table_.struct_size = sizeof table_;
    table_.user = this;
    table_.any_thread = 1;
    table_.all_to_all = [](void* user, const void* send, int64_t, void* recv, int64_t count,
                           ga_dtype dtype,
                           void*) { return of(user).move(send, recv, count, count, dtype); };
    table_.all_gather = [](void* user, const void* send, void* recv, int64_t stride, int64_t count,
                           ga_dtype dtype,
                           void*) { return of(user).move(send, recv, stride, count, dtype); };
    table_.broadcast = [](void*, void*, int64_t, ga_dtype, int32_t, void*) { return 0; };
    ga_comm_config config;
    check(ga_comm_config_init(&config, sizeof config, GA_COMM_TABLE));
    config.ranks = kRanks;
    config.table = &table_;
    check(ga_comm_create(&config, &comm_));
  }
  ~Network() { ga_comm_destroy(comm_); }
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;
  operator ga_comm*() const { return comm_; }

 private:
  static Network& of(void* user) { return *static_cast<Network*>(user); }
  // Of this rank's blocks the first is its own, since it is rank 0.
  int32_t move(const void* send, void* recv, int64_t stride, int64_t count, ga_dtype dtype) {
    const auto begin = std::chrono::steady_clock::now();
    const int64_t size = dtype == GA_F64 || dtype == GA_I64 ? 8 : dtype == GA_F32 ? 4 : 2;
    const auto bytes = static_cast<size_t>(count * size);
    for (int64_t q = 0; q < kRanks; ++q) {
      char* const to = static_cast<char*>(recv) + q * stride * size;
      if (to != send) std::memcpy(to, send, bytes);
    }
    const std::chrono::duration<double> takes(static_cast<double>((kRanks - 1) * count * size) /
                                              rate_);
    std::this_thread::sleep_until(
        begin + std::chrono::duration_cast<std::chrono::steady_clock::duration>(takes));
    return 0;
  }

  const double rate_;
  ga_comm_table table_ = {};
  ga_comm* comm_ = nullptr;
};

// The backward pass takes as long as the step does that begins with all of the exchange.
void over_a_network(const Options& options, Report& report, const Layout& layout, const char* id,
                    double bytes_per_second, const char* what) {
  constexpr int kWays = 3;
  const Block g = make_block(layout.n, 1, options.threads);
  std::vector<Block> p;
  std::vector<std::unique_ptr<Network>> networks;
  std::vector<std::unique_ptr<Layers>> ways;
  for (int k = 0; k < kWays; ++k) {
    p.push_back(make_block(layout.n, 0, options.threads));
    networks.push_back(std::make_unique<Network>(bytes_per_second));
    Way way;
    way.comm = *networks.back();
    way.overlap = k > 0;
    way.eager = k == 2;
    way.eager_threads = 1;
    ways.push_back(std::make_unique<Layers>(layout, p.back().get(), options.threads, way));
  }
  for (const auto& way : ways) way->window(g.get(), 0);
  Times left[kWays];
  for (int round = -2; round < options.rounds(); ++round) {
    const double step = ways[0]->window(g.get(), 0);
    if (round >= 0) left[0].push_back(step);
    for (int k = 1; k < kWays; ++k) {
      const double rest = ways[k]->window(g.get(), step);
      if (round >= 0) left[k].push_back(rest);
    }
  }
  for (int k = 1; k < kWays; ++k)
    report.figure(
        format("%s_%s", id, k == 1 ? "overlap" : "eager"), left[k] / left[0], Sense::kNone, 0,
        format("%s: %.1f ms after the last gradient, %.1f ms if all is done then; %.1f "
               "of %zu layers ahead",
               what, 1e3 * median(left[k]), 1e3 * median(left[0]),
               static_cast<double>(ways[k]->ahead) / (options.rounds() + 3), layout.shapes.size()));
}

}  // namespace

void eager_figures(const Options& options, Report& report) {
  const Layout layout(std::vector<Shape>(24, Shape{2048, options.quick ? 1024 : 2048}));
  in_place(options, report, layout);
  for (const double slower : {1.0, 2.0, 3.0}) {
    const auto id = [&](const char* name) {
      return slower == 1 ? std::string(name) : format("%s_%.0fx", name, slower);
    };
    hidden(options, report, layout, id("E2").c_str(), GA_BF16, 1e9, slower, 0.15,
           "bf16 with master weights, not clipped");
    hidden(options, report, layout, id("E3").c_str(), GA_F32, 1e9, slower, 0.45,
           "f32, not clipped");
    hidden(options, report, layout, id("E4").c_str(), GA_BF16, kMaxNorm, slower, 1.15,
           "bf16 with master weights, clipped");
    hidden(options, report, layout, id("E6").c_str(), GA_F32, 1e9, slower, 0.45,
           "f32, not clipped, GA_SHARD_PARAMETERS", true);
  }
  own_parameters(options, report);
  over_a_network(options, report, layout, "E5_1GB", 1.25e9, "f32, 8 ranks, 1.25 GB/s");
  over_a_network(options, report, layout, "E5_10GB", 12.5e9, "f32, 8 ranks, 12.5 GB/s");
}

}  // namespace bench
