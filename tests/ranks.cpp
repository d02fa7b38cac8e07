// SPDX-License-Identifier: Apache-2.0
#include "ranks.hpp"

#include <algorithm>
#include <string>

namespace ga::test {

ga_comm_config comm_config(int32_t kind) {
  ga_comm_config c;
  EXPECT_OK(ga_comm_config_init(&c, sizeof c, kind));
  return c;
}

ga_comm_options comm_options() {
  ga_comm_options o;
  EXPECT_OK(ga_comm_options_init(&o, sizeof o));
  return o;
}

void each_rank(int32_t kind, int32_t ranks, double timeout,
               const std::function<void(const ga_comm_config&)>& body) {
  unsigned char id[GA_COMM_ID_SIZE];
  EXPECT_OK(ga_comm_unique_id(kind, id, sizeof id));
  std::vector<std::thread> threads;
  for (int32_t r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      ga_comm_config config = comm_config(kind);
      config.rank = r;
      config.ranks = ranks;
      config.timeout = timeout;
      config.id = id;
      body(config);
    });
  for (std::thread& t : threads) t.join();
}

void on_ranks(int32_t ranks, const std::function<void(int32_t, ga_comm*)>& body, double timeout) {
  each_rank(GA_COMM_LOCAL, ranks, timeout, [&](const ga_comm_config& config) {
    const Comm comm(config);
    body(config.rank, comm);
  });
}

void expect_failure(ga_status status, const char* words, ga_status expected) {
  EXPECT_EQ(status, expected);
  EXPECT_NE(std::string(ga_last_error()).find(words), std::string::npos) << ga_last_error();
}

int32_t OneRank::move(const void* send, void* recv, int64_t count, int32_t dtype) {
  thread = std::this_thread::get_id();
  if (calls++ == fail_at) return 42;
  bytes += count * size_of(dtype);
  if (send != recv) memcpy(recv, send, static_cast<size_t>(count * size_of(dtype)));
  return 0;
}

const ga_comm_table& OneRank::fill(Adder adder) {
  ga_comm_table& t = table_;
  t = {};
  t.struct_size = sizeof t;
  t.user = this;
  t.any_thread = 1;
  t.all_to_all = [](void* user, const void* send, int64_t, void* recv, int64_t count,
                    ga_dtype dtype, void*) { return of(user).move(send, recv, count, dtype); };
  t.all_gather = [](void* user, const void* send, void* recv, int64_t, int64_t count,
                    ga_dtype dtype, void*) { return of(user).move(send, recv, count, dtype); };
  t.broadcast = [](void* user, void*, int64_t count, ga_dtype dtype, int32_t, void*) {
    of(user).bytes += count * size_of(dtype);
    return 0;
  };
  t.error_text = [](void*, int32_t code) { return code == 42 ? "the cable is out" : "?"; };
  if (adder == kMoves) return t;
  t.all_reduce = [](void* user, void* data, int64_t count, ga_dtype dtype, ga_comm_op, void*) {
    ++of(user).added;
    return of(user).move(data, data, count, dtype);
  };
  t.reduce_scatter = [](void* user, const void* send, void* recv, int64_t count, ga_dtype dtype,
                        ga_comm_op, void*) {
    ++of(user).added;
    return of(user).move(send, recv, count, dtype);
  };
  return t;
}

ga_comm_config OneRank::config(const ga_comm_table& table) {
  ga_comm_config c = comm_config(GA_COMM_TABLE);
  c.ranks = 1;
  c.table = &table;
  return c;
}

namespace over_ranks {

Shares make_shares(const Layout& l, int32_t ranks, size_t windows, size_t first) {
  Shares shares(windows);
  uint64_t round = 0;
  for (size_t w = 0; w < windows; ++w)
    for (int32_t r = 0; r < ranks; ++r) {
      shares[w].emplace_back();
      const size_t count = (static_cast<size_t>(r) + first + w + 1) % 4;
      for (size_t k = 0; k < count; ++k)
        shares[w].back().push_back({gradients(l, 5, round++),
                                    static_cast<double>(1 + (k + w) % 3),
                                    {r == 0 ? size_t{3} : size_t{0}}});
    }
  return shares;
}

void contribute(ga_context* ctx, const Layout& l, const std::vector<Micro>& micros) {
  for (const Micro& m : micros) {
    auto list = pointers(l, m.gradients);
    for (const size_t i : m.missing) list[i] = nullptr;
    ASSERT_OK(ga_accumulate(ctx, list.data(), list.size(), m.weight, nullptr));
  }
}

void contribute_ready(ga_context* ctx, const Layout& l, const std::vector<Micro>& micros,
                      int32_t rank) {
  const auto ready = [&](ga_param id) { ASSERT_OK(ga_params_ready(ctx, &id, 1)); };
  for (const Micro& m : micros) {
    const bool last = &m == &micros.back();
    const auto list = pointers(l, m.gradients);
    ASSERT_OK(ga_micro_begin(ctx, -1, m.weight, MicroOptions(0, last ? GA_MICRO_LAST : 0)));
    for (size_t i = list.size(); i-- > 0;) {
      const bool missing = std::find(m.missing.begin(), m.missing.end(), i) != m.missing.end();
      if (!missing) {
        ASSERT_OK(ga_accumulate_part(ctx, static_cast<ga_param>(i), list[i]));
      }
      if (last && rank % 3 == 0) ready(static_cast<ga_param>(i));
    }
    ASSERT_OK(ga_micro_end(ctx));
  }
  for (size_t i = 0; i < l.size() && rank % 3 == 1; ++i) ready(static_cast<ga_param>(i));
}

void build(Context& ctx, const Layout& l, const Options& s, Block& block) {
  const ga_group group = ctx.group(s.optimizer);
  for (size_t i = 0; i < l.size(); ++i) {
    ga_param_options options;
    ASSERT_OK(ga_param_options_init(&options, sizeof options));
    options.agc_axes = l.agc_axes[i];
    if (s.optimizer.kind == GA_OPTIMIZER_MUON && l.shapes[i].size() > 2) {
      options.cut_matrices = 1;
      options.batch_axes = options.output_axis = static_cast<int32_t>(l.shapes[i].size()) - 2;
    }
    ctx.param(group, "p" + std::to_string(i), block.data() + l.offsets[i], l.shapes[i], &options);
  }
  if (s.clip.scope != GA_CLIP_NONE || std::isfinite(s.clip.max_value)) {
    ASSERT_OK(ga_context_set_clip(ctx, &s.clip));
  }
}

std::vector<Ended> run(const Layout& l, const Options& s, const Shares& shares,
                       const Block& start) {
  const auto ranks = static_cast<int32_t>(shares[0].size());
  std::vector<Ended> ended(shares[0].size());
  on_ranks(ranks, [&](int32_t r, ga_comm* comm) {
    Ended& e = ended[static_cast<size_t>(r)];
    e.parameters = start;
    Context ctx(s.config);
    build(ctx, l, s, e.parameters);
    ASSERT_OK(ga_context_set_comm(ctx, comm, &s.options));
    for (const auto& window : shares) {
      if (s.options.overlap)
        contribute_ready(ctx, l, window[static_cast<size_t>(r)], r);
      else
        contribute(ctx, l, window[static_cast<size_t>(r)]);
      e.results.push_back(step(ctx));
    }
  });
  return ended;
}

Ended run_alone(const Layout& l, const Options& s, const Shares& shares, const Block& start) {
  Ended e;
  e.parameters = start;
  Context ctx(s.config);
  build(ctx, l, s, e.parameters);
  for (const auto& window : shares) {
    for (const auto& micros : window) contribute(ctx, l, micros);
    e.results.push_back(step(ctx));
  }
  return e;
}

void expect_alike(const Ended& a, const Ended& b) {
  EXPECT_TRUE(same_bits(a.parameters, b.parameters));
  for (size_t w = 0; w < a.results.size(); ++w)
    EXPECT_EQ(memcmp(&a.results[w], &b.results[w], sizeof(ga_step_result)), 0) << "window " << w;
}

void expect_alike(const std::vector<Ended>& ended, const std::vector<Ended>& more) {
  for (const auto* ranks : {&ended, &more})
    for (size_t r = 0; r < ranks->size(); ++r) {
      SCOPED_TRACE("rank " + std::to_string(r) + (ranks == &more ? " of more" : ""));
      expect_alike((*ranks)[r], ended[0]);
    }
}

void expect_the_bits(const std::vector<Ended>& ended, const Layout& l, Options s,
                     const Shares& shares, const Block& start) {
  expect_alike(ended);
  for (const bool shards : {false, true})
    for (const bool overlaps : {false, true}) {
      if ((!shards && !overlaps) || (overlaps && on_device())) continue;
      SCOPED_TRACE(std::string(shards ? "sharded" : "whole") + (overlaps ? ", overlapped" : ""));
      s.options.shard = shards ? GA_SHARD_OPTIMIZER : GA_SHARD_NONE;
      s.options.overlap = overlaps;
      expect_alike(ended, run(l, s, shares, start));
    }
}

double distance(const Layout& l, const Block& a, const Block& b) {
  double most = 0, largest = 0;
  for (size_t i = 0; i < l.size(); ++i)
    for (int64_t j = 0; j < l.counts[i]; ++j) {
      const auto at = static_cast<size_t>(l.offsets[i] + j);
      most = std::max(most, std::abs(static_cast<double>(a[at]) - b[at]));
      largest = std::max(largest, std::abs(static_cast<double>(b[at])));
    }
  return most / largest;
}

}  // namespace over_ranks

}  // namespace ga::test
