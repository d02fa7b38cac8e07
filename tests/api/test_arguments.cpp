// SPDX-License-Identifier: Apache-2.0
//
// Every wrong argument: the call returns the right status, the message names what was wrong, and
// the context goes on as if the call had not been made.
#include <deque>
#include <functional>
#include <new>
#include <stdexcept>
#include <thread>

#include "core/error.hpp"
#include "files/safetensors.hpp"
#include "ranks.hpp"
#include "support.hpp"

namespace ga::test {
namespace {

constexpr int64_t kCount = 70001;

// A context in use, and its twin, which gets no wrong calls.
class Bench {
 public:
  Bench() {
    ga_config c = config();
    c.gradient_life = GA_GRADIENTS_LIVE;
    EXPECT_OK(ga_context_create(&c, &ctx));
    const ga_optimizer adamw = optimizer(GA_OPTIMIZER_ADAMW);
    EXPECT_OK(ga_group_add(ctx, &adamw, nullptr));
    EXPECT_OK(ga_param_add(ctx, 0, "first", first.data(), GA_F32, 1, &kCount, nullptr, nullptr));
    const int64_t shape[] = {2, 3};
    const ga_flat_entry entries[] = {flat_entry("second", 0, 2, shape, 1),
                                     flat_entry("third", 0, 0, nullptr, 9)};
    EXPECT_OK(ga_params_add_flat(ctx, flat.data(), GA_F32, entries, 2, nullptr, nullptr));
  }
  ~Bench() { ga_context_destroy(ctx); }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  void window() {
    const void* a[] = {g.data(), flat_g.data()};
    const void* b[] = {h.data(), nullptr};
    EXPECT_OK(ga_accumulate(ctx, a, 2, 3, nullptr));
    EXPECT_OK(ga_accumulate(ctx, b, 2, 1, nullptr));
    EXPECT_OK(ga_micro_begin(ctx, 2, 1, nullptr));
    EXPECT_OK(ga_accumulate_part(ctx, 1, h.data()));
    EXPECT_OK(ga_micro_end(ctx));
    EXPECT_OK(ga_step(ctx, nullptr));
  }

  ga_context* ctx = nullptr;
  ga_accumulator out = {sizeof out, nullptr, 0, 0, 0, 0, 0, 0, 0};
  Block first = Block(kCount, 1), flat = Block(10, 2);
  Block g = Block(kCount, 0.5f), h = Block(kCount, -0.75f), flat_g = Block(10, 0.25f);
};

using Words = std::vector<std::string>;

struct Bad {
  std::string what;
  std::function<ga_status(Bench&)> call;
  ga_status status;
  Words words;  // each must be in the message
};

void expect_refused(const Bad& bad, Bench& bench) {
  SCOPED_TRACE(bad.what);
  const ga_window_info before = window(bench.ctx);
  const ga_memory memory_before = memory(bench.ctx);
  EXPECT_EQ(bad.call(bench), bad.status);
  const std::string text = ga_last_error();
  EXPECT_FALSE(text.empty());
  for (const std::string& word : bad.words) {
    EXPECT_NE(text.find(word), std::string::npos) << '"' << text << "\" lacks \"" << word << '"';
  }
  const ga_window_info after = window(bench.ctx);
  const ga_memory memory_after = memory(bench.ctx);
  EXPECT_EQ(0, memcmp(&before, &after, sizeof before)) << "the window moved";
  EXPECT_EQ(0, memcmp(&memory_before, &memory_after, sizeof memory_before)) << "memory changed";
}

// prepare brings the context to a state in which only the arguments of the calls of list are wrong;
// finish ends the window.
void expect_all_refused(const std::vector<Bad>& list, const std::function<void(Bench&)>& prepare,
                        const std::function<void(Bench&)>& finish) {
  Bench bench, twin;
  for (Bench* b : {&bench, &twin}) {
    b->window();
    prepare(*b);
  }
  for (const Bad& bad : list) expect_refused(bad, bench);
  for (Bench* b : {&bench, &twin}) {
    finish(*b);
    b->window();
  }
  EXPECT_TRUE(same_bits(bench.first, twin.first)) << "a refused call left a trace";
  EXPECT_TRUE(same_bits(bench.flat, twin.flat)) << "a refused call left a trace";
}

const auto kNothing = [](Bench&) {};

template <class T>
T* off_by_one(T* p) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(p) + 1);
}

constexpr ga_status kInvalidArgument = GA_ERROR_INVALID_ARGUMENT;
constexpr ga_status kUnsupported = GA_ERROR_UNSUPPORTED;

// ---- Parameters ---------------------------------------------------------------------------------

TEST(BadArguments, OfParameters) {
  static Block room(100, 0);
  const auto add = [](const char* name, float* data, int32_t dtype, int32_t rank,
                      std::vector<int64_t> shape, ga_group group = 0,
                      const ga_param_options* options = nullptr) {
    return [=](Bench& b) {
      ga_param out = -7;
      const ga_status status = ga_param_add(b.ctx, group, name, data, dtype, rank,
                                            shape.empty() ? nullptr : shape.data(), options, &out);
      EXPECT_EQ(out, -7) << "written by a call that failed";
      return status;
    };
  };
  float* const data = room.data();
  const auto options = [](auto change) {
    static std::deque<ga_param_options> kept;
    ga_param_options o = {};
    o.struct_size = sizeof o;
    change(o);
    kept.push_back(o);
    return &kept.back();
  };
  using O = ga_param_options&;
  const auto* f64 = options([](O o) { o.gradient_dtype = GA_F64; });
  const auto* unknown = options([](O o) { o.gradient_dtype = 77; });
  const int64_t huge = int64_t{1} << 31;
  std::vector<Bad> list = {
      {"no name", add(nullptr, data, GA_F32, 1, {3}), kInvalidArgument, {"name"}},
      {"empty name", add("", data, GA_F32, 1, {3}), kInvalidArgument, {"name", "empty"}},
      {"name in use", add("third", data, GA_F32, 1, {3}), kInvalidArgument, {"\"third\""}},
      {"group 1", add("new", data, GA_F32, 1, {3}, 1), kInvalidArgument, {"group", "1"}},
      {"group -1", add("new", data, GA_F32, 1, {3}, -1), kInvalidArgument, {"group", "-1"}},
      {"dtype 0", add("new", data, 0, 1, {3}), kInvalidArgument, {"\"new\"", "dtype", "0"}},
      {"dtype 9", add("new", data, 9, 1, {3}), kInvalidArgument, {"\"new\"", "dtype", "9"}},
      {"i32", add("new", data, GA_I32, 1, {3}), kInvalidArgument, {"\"new\"", "dtype", "i32"}},
      {"i64", add("new", data, GA_I64, 1, {3}), kInvalidArgument, {"\"new\"", "dtype", "i64"}},
      {"f64 gradients", add("new", data, GA_F32, 1, {3}, 0, f64), kUnsupported, {"\"new\"", "f64"}},
      {"gradients of dtype 77",
       add("new", data, GA_F32, 1, {3}, 0, unknown),
       kInvalidArgument,
       {"\"new\"", "77"}},
      {"f64 accumulator",
       add("new", data, GA_F32, 1, {3}, 0, options([](O o) { o.accumulator_dtype = GA_F64; })),
       kUnsupported,
       {"\"new\"", "accumulator_dtype", "f64"}},
      {"f32 accumulator of f64",
       add("new", data, GA_F64, 1, {3}, 0, options([](O o) { o.accumulator_dtype = GA_F32; })),
       kUnsupported,
       {"\"new\"", "accumulator_dtype", "f64"}},
      {"accumulator of i64",
       add("new", data, GA_F32, 1, {3}, 0, options([](O o) { o.accumulator_dtype = GA_I64; })),
       kInvalidArgument,
       {"\"new\"", "accumulator_dtype", "i64"}},
      {"master 2",
       add("new", data, GA_F32, 1, {3}, 0, options([](O o) { o.master = 2; })),
       kInvalidArgument,
       {"\"new\"", "master", "2"}},
      {"rounding -1",
       add("new", data, GA_F32, 1, {3}, 0, options([](O o) { o.rounding = -1; })),
       kInvalidArgument,
       {"\"new\"", "rounding", "-1"}},
      {"rows 3",
       add("new", data, GA_F32, 1, {3}, 0, options([](O o) { o.rows = 3; })),
       kInvalidArgument,
       {"\"new\"", "rows", "3"}},
      {"rows of a scalar",
       add("new", data, GA_F32, 0, {}, 0, options([](O o) { o.rows = GA_ROWS_DENSE; })),
       kUnsupported,
       {"\"new\"", "rows", "rank"}},
      {"axis 1 of a vector",
       add("new", data, GA_F32, 1, {3}, 0, options([](O o) { o.agc_axes = 2; })),
       kInvalidArgument,
       {"\"new\"", "agc_axes", "0x2"}},
      {"rank -1", add("new", data, GA_F32, -1, {3}), kInvalidArgument, {"\"new\"", "rank", "-1"}},
      {"no shape", add("new", data, GA_F32, 2, {}), kInvalidArgument, {"\"new\"", "shape"}},
      {"extent -4", add("new", data, GA_F32, 2, {3, -4}), kInvalidArgument, {"\"new\"", "-4"}},
      {"extent -1 beside 0",
       add("new", data, GA_F32, 2, {0, -1}),
       kInvalidArgument,
       {"\"new\"", "-1"}},
      {"2^62 elements", add("new", data, GA_F32, 2, {huge, huge}), kInvalidArgument, {"\"new\""}},
      {"2^93 elements",
       add("new", data, GA_F32, 3, {huge, huge, huge}),
       kInvalidArgument,
       {"\"new\""}},
      {"INT64_MAX elements",
       add("new", data, GA_F32, 1, {INT64_MAX}),
       kInvalidArgument,
       {"\"new\""}},
      {"past the end of memory",
       add("new", data, GA_F32, 1, {int64_t{1} << 60}),
       kInvalidArgument,
       {"\"new\""}},
      {"no data", add("new", nullptr, GA_F32, 1, {3}), kInvalidArgument, {"\"new\"", "data"}},
      {"no data, scalar",
       add("new", nullptr, GA_F32, 0, {}),
       kInvalidArgument,
       {"\"new\"", "data"}},
      {"odd address",
       add("new", off_by_one(data), GA_F32, 1, {3}),
       kInvalidArgument,
       {"\"new\"", "address"}},
      {"no context",
       [](Bench&) {
         return ga_param_add(nullptr, 0, "new", room.data(), GA_F32, 0, nullptr, nullptr, nullptr);
       },
       kInvalidArgument,
       {"ctx"}},
  };
  // Overlaps with the first parameter: at its start, inside, at its last element, around it.
  for (const int64_t start : {int64_t{0}, int64_t{5}, kCount - 1, int64_t{-2}}) {
    list.push_back({"overlap at " + std::to_string(start),
                    [start](Bench& b) {
                      const int64_t four = 4;
                      return ga_param_add(b.ctx, 0, "new", b.first.data() + start, GA_F32, 1, &four,
                                          nullptr, nullptr);
                    },
                    kInvalidArgument,
                    {"\"new\"", "\"first\""}});
  }
  expect_all_refused(list, kNothing, kNothing);
  // Adjacent memory is legal, and refused calls have used no ids.
  Block three(3, 0);
  Bench bench;
  ga_param out = -1;
  EXPECT_OK(ga_param_add(bench.ctx, 0, "new", three.data(), GA_F32, 0, nullptr, nullptr, &out));
  EXPECT_EQ(out, 3);
  EXPECT_OK(
      ga_param_add(bench.ctx, 0, "next", three.data() + 1, GA_F32, 0, nullptr, nullptr, &out));
  EXPECT_EQ(out, 4);
}

float room[100];

TEST(BadArguments, OfFlatBlocks) {
  static const int64_t four = 4, negative = -1;
  const auto add = [](std::vector<ga_flat_entry> entries, float* data = room) {
    return [=](Bench& b) {
      ga_param first = -7;
      const ga_status status =
          ga_params_add_flat(b.ctx, data, GA_F32, entries.data(), entries.size(), nullptr, &first);
      EXPECT_EQ(first, -7) << "written by a call that failed";
      return status;
    };
  };
  const ga_flat_entry good = flat_entry("good", 0, 1, &four, 0);
  const std::vector<Bad> list = {
      {"no name", add({good, flat_entry(nullptr, 0, 1, &four, 4)}), kInvalidArgument, {"name"}},
      {"empty name", add({good, flat_entry("", 0, 1, &four, 4)}), kInvalidArgument, {"name"}},
      {"name in use",
       add({good, flat_entry("first", 0, 1, &four, 4)}),
       kInvalidArgument,
       {"\"first\""}},
      {"the same name twice",
       add({good, flat_entry("good", 0, 1, &four, 4)}),
       kInvalidArgument,
       {"\"good\""}},
      {"group 3", add({good, flat_entry("bad", 3, 1, &four, 4)}), kInvalidArgument, {"group", "3"}},
      {"extent -1",
       add({good, flat_entry("bad", 0, 1, &negative, 4)}),
       kInvalidArgument,
       {"\"bad\"", "-1"}},
      {"no shape",
       add({good, flat_entry("bad", 0, 1, nullptr, 4)}),
       kInvalidArgument,
       {"\"bad\"", "shape"}},
      {"offset -1",
       add({good, flat_entry("bad", 0, 1, &four, -1)}),
       kInvalidArgument,
       {"\"bad\"", "offset", "-1"}},
      {"offset 2^62",
       add({good, flat_entry("bad", 0, 1, &four, int64_t{1} << 62)}),
       kInvalidArgument,
       {"\"bad\"", "offset"}},
      {"overlap within",
       add({good, flat_entry("bad", 0, 1, &four, 3)}),
       kInvalidArgument,
       {"\"bad\"", "\"good\""}},
      {"no data", add({good}, nullptr), kInvalidArgument, {"\"good\"", "data"}},
      {"odd address", add({good}, off_by_one(room)), kInvalidArgument, {"\"good\"", "address"}},
      {"no entries",
       [](Bench& b) {
         return ga_params_add_flat(b.ctx, room, GA_F32, nullptr, 2, nullptr, nullptr);
       },
       kInvalidArgument,
       {"entries"}},
      {"no context",
       [=](Bench&) {
         return ga_params_add_flat(nullptr, room, GA_F32, &good, 1, nullptr, nullptr);
       },
       kInvalidArgument,
       {"ctx"}},
      {"overlap with another",
       [=](Bench& b) {
         return ga_params_add_flat(b.ctx, b.flat.data() + 8, GA_F32, &good, 1, nullptr, nullptr);
       },
       kInvalidArgument,
       {"\"good\"", "\"third\""}},
  };
  expect_all_refused(list, kNothing, kNothing);
  // The size of each entry, its options, and those of all entries of one block.
  ga_flat_entry sizes[] = {good, flat_entry("bad", 0, 1, &four, 4)};
  const auto sized = [&](size_t first, size_t second) {
    return [=](Bench& b) mutable {
      sizes[0].struct_size = first, sizes[1].struct_size = second;
      return ga_params_add_flat(b.ctx, room, GA_F32, sizes, 2, nullptr, nullptr);
    };
  };
  ga_param_options no_size = {}, halves = {};
  EXPECT_OK(ga_param_options_init(&halves, sizeof halves));
  halves.gradient_dtype = GA_BF16;
  const auto with = [&](const ga_param_options* options) {
    return [=](Bench& b) mutable {
      sizes[1].options = options;
      return ga_params_add_flat(b.ctx, room, GA_F32, sizes, 2, nullptr, nullptr);
    };
  };
  const ga_flat_entry zeros[1] = {};
  expect_all_refused({{"entries of zeros",
                       [&](Bench& b) {
                         return ga_params_add_flat(b.ctx, room, GA_F32, zeros, 1, nullptr, nullptr);
                       },
                       kInvalidArgument,
                       {"struct_size", "ga_flat_entry", "0"}},
                      {"entries of two sizes",
                       sized(sizeof good, sizeof good + 8),
                       kInvalidArgument,
                       {"struct_size", "entries[1]"}},
                      {"options of no size",
                       with(&no_size),
                       kInvalidArgument,
                       {"struct_size", "ga_param_options"}},
                      {"gradients of two dtypes",
                       with(&halves),
                       GA_ERROR_UNSUPPORTED,
                       {"\"bad\"", "gradient_dtype", "bf16", "\"good\"", "f32"}}},
                     kNothing, kNothing);
  // All or none: the names and addresses of the valid entries are still free.
  Bench bench;
  const ga_flat_entry bad[] = {good, flat_entry("bad", 3, 1, &four, 4)};
  EXPECT_EQ(ga_params_add_flat(bench.ctx, room, GA_F32, bad, 2, nullptr, nullptr),
            kInvalidArgument);
  ga_param id = -1;
  EXPECT_OK(ga_params_add_flat(bench.ctx, room, GA_F32, &good, 1, nullptr, &id));
  EXPECT_EQ(id, 3);
}

TEST(BadArguments, OfBindAndFreeze) {
  const std::vector<Bad> list = {
      {"parameter 3",
       [](Bench& b) { return ga_param_bind(b.ctx, 3, b.g.data()); },
       kInvalidArgument,
       {"3"}},
      {"parameter -1",
       [](Bench& b) { return ga_param_bind(b.ctx, -1, b.g.data()); },
       kInvalidArgument,
       {"-1"}},
      {"NULL",
       [](Bench& b) { return ga_param_bind(b.ctx, 2, nullptr); },
       kInvalidArgument,
       {"\"third\""}},
      {"odd address",
       [](Bench& b) { return ga_param_bind(b.ctx, 2, off_by_one(b.g.data())); },
       kInvalidArgument,
       {"\"third\"", "address"}},
      {"onto another",
       [](Bench& b) { return ga_param_bind(b.ctx, 2, b.first.data() + 9); },
       kInvalidArgument,
       {"\"third\"", "\"first\""}},
      {"no context",
       [](Bench& b) { return ga_param_bind(nullptr, 2, b.g.data()); },
       kInvalidArgument,
       {"ctx"}},
      {"frozen 2",
       [](Bench& b) { return ga_param_set_frozen(b.ctx, 0, 2); },
       kInvalidArgument,
       {"frozen", "2"}},
      {"freeze 3",
       [](Bench& b) { return ga_param_set_frozen(b.ctx, 3, 1); },
       kInvalidArgument,
       {"3"}},
      {"freeze, no context",
       [](Bench&) { return ga_param_set_frozen(nullptr, 0, 1); },
       kInvalidArgument,
       {"ctx"}},
  };
  expect_all_refused(list, kNothing, kNothing);
}

// ---- Gradients ----------------------------------------------------------------------------------

TEST(BadArguments, OfAccumulate) {
  const auto whole = [](const void* a, const void* b, double weight, double scale) {
    return [=](Bench& bench) {
      const void* list[] = {a ? a : bench.g.data(), b};
      return ga_accumulate(bench.ctx, list, 2, weight, MicroOptions(scale));
    };
  };
  const double inf = INFINITY, nan = NAN;
  std::vector<Bad> list = {
      {"weight -1", whole(nullptr, nullptr, -1, 1), kInvalidArgument, {"weight", "-1"}},
      {"weight NaN", whole(nullptr, nullptr, nan, 1), kInvalidArgument, {"weight", "nan"}},
      {"weight inf", whole(nullptr, nullptr, inf, 1), kInvalidArgument, {"weight", "inf"}},
      {"scale NaN", whole(nullptr, nullptr, 1, nan), kInvalidArgument, {"scale", "nan"}},
      {"scale -inf", whole(nullptr, nullptr, 1, -inf), kInvalidArgument, {"scale", "-inf"}},
      {"count 3",
       [](Bench& b) {
         const void* list[] = {b.g.data(), nullptr, nullptr};
         return ga_accumulate(b.ctx, list, 3, 1, nullptr);
       },
       kInvalidArgument,
       {"count", "3", "2"}},
      {"count 0",
       [](Bench& b) { return ga_accumulate(b.ctx, nullptr, 0, 1, nullptr); },
       kInvalidArgument,
       {"count", "0", "2"}},
      {"no list",
       [](Bench& b) { return ga_accumulate(b.ctx, nullptr, 2, 1, nullptr); },
       kInvalidArgument,
       {"gradients"}},
      {"no context",
       [](Bench& b) {
         const void* list[] = {b.g.data(), nullptr};
         return ga_accumulate(nullptr, list, 2, 1, nullptr);
       },
       kInvalidArgument,
       {"ctx"}},
      {"odd address",
       [](Bench& b) {
         const void* list[] = {off_by_one(b.g.data()), nullptr};
         return ga_accumulate(b.ctx, list, 2, 1, nullptr);
       },
       kInvalidArgument,
       {"\"first\"", "address"}},
      {"odd address of the second, the first being right",
       [](Bench& b) {
         const void* list[] = {b.g.data(), off_by_one(b.flat_g.data())};
         return ga_accumulate(b.ctx, list, 2, 1, nullptr);
       },
       kInvalidArgument,
       {"\"second\"", "address"}},
      {"its own parameter",
       [](Bench& b) {
         const void* list[] = {b.first.data(), nullptr};
         return ga_accumulate(b.ctx, list, 2, 1, nullptr);
       },
       kInvalidArgument,
       {"\"first\""}},
      {"the last element of another parameter",
       [](Bench& b) {
         const void* list[] = {nullptr, b.first.data() + kCount - 2};
         return ga_accumulate(b.ctx, list, 2, 1, nullptr);
       },
       kInvalidArgument,
       {"\"second\"", "\"first\""}},
      {"a block with a parameter in its gap and under one of its elements",
       [](Bench& b) {
         const void* list[] = {nullptr, b.flat.data()};
         return ga_accumulate(b.ctx, list, 2, 1, nullptr);
       },
       kInvalidArgument,
       {"\"second\""}},
      {"begin, index 1",
       [](Bench& b) { return ga_micro_begin(b.ctx, 7, 1, nullptr); },
       kInvalidArgument,
       {"7"}},
      {"begin, index -2",
       [](Bench& b) { return ga_micro_begin(b.ctx, -2, 1, nullptr); },
       kInvalidArgument,
       {"-2", "-1 to"}},
      {"begin, weight -2",
       [](Bench& b) { return ga_micro_begin(b.ctx, 0, -2, nullptr); },
       kInvalidArgument,
       {"weight", "-2"}},
      {"begin, scale NaN",
       [](Bench& b) { return ga_micro_begin(b.ctx, -1, 1, MicroOptions(NAN)); },
       kInvalidArgument,
       {"loss_scale", "nan"}},
      {"flags 2",
       [](Bench& b) { return ga_micro_begin(b.ctx, -1, 1, MicroOptions(0, 2)); },
       kInvalidArgument,
       {"flags", "0x2"}},
      {"options of no size",
       [](Bench& b) {
         const ga_micro_options zeros = {};
         return ga_micro_begin(b.ctx, -1, 1, &zeros);
       },
       kInvalidArgument,
       {"struct_size", "ga_micro_options"}},
      {"options with a reserved field set",
       [](Bench& b) {
         ga_micro_options o = *MicroOptions(0);
         o.reserved = 7;
         return ga_micro_begin(b.ctx, -1, 1, &o);
       },
       kInvalidArgument,
       {"ga_micro_options", "reserved", "7"}},
      {"begin, no context",
       [](Bench&) { return ga_micro_begin(nullptr, 0, 1, nullptr); },
       kInvalidArgument,
       {"ctx"}},
  };
  expect_all_refused(list, kNothing, kNothing);

  // In an open window the same calls are wrong, and so is the address of a live first gradient.
  list.push_back({"the buffer of a live gradient",
                  [](Bench& b) {
                    const void* list[] = {b.h.data(), nullptr};
                    return ga_accumulate(b.ctx, list, 2, 1, nullptr);
                  },
                  kInvalidArgument,
                  {"\"first\""}});
  list.push_back({"the block of a live gradient, the other gradient being right",
                  [](Bench& b) {
                    const void* list[] = {b.g.data(), b.flat_g.data()};
                    return ga_accumulate(b.ctx, list, 2, 1, nullptr);
                  },
                  kInvalidArgument,
                  {"\"second\""}});
  expect_all_refused(
      list,
      [](Bench& b) {
        const void* both[] = {b.h.data(), b.flat_g.data()};
        EXPECT_OK(ga_accumulate(b.ctx, both, 2, 2, nullptr));
      },
      [](Bench& b) {
        const void* other[] = {b.g.data(), b.g.data()};
        EXPECT_OK(ga_accumulate(b.ctx, other, 2, 1, nullptr));
        EXPECT_OK(ga_step(b.ctx, nullptr));
      });
}

TEST(BadArguments, OfParts) {
  const std::vector<Bad> list = {
      {"parameter 3",
       [](Bench& b) { return ga_accumulate_part(b.ctx, 3, b.g.data()); },
       kInvalidArgument,
       {"3"}},
      {"parameter -1",
       [](Bench& b) { return ga_accumulate_part(b.ctx, -1, b.g.data()); },
       kInvalidArgument,
       {"-1"}},
      {"no gradient",
       [](Bench& b) { return ga_accumulate_part(b.ctx, 0, nullptr); },
       kInvalidArgument,
       {"\"first\"", "gradient"}},
      {"odd address",
       [](Bench& b) { return ga_accumulate_part(b.ctx, 0, off_by_one(b.g.data())); },
       kInvalidArgument,
       {"\"first\"", "address"}},
      {"a parameter",
       [](Bench& b) { return ga_accumulate_part(b.ctx, 2, b.flat.data() + 9); },
       kInvalidArgument,
       {"\"third\""}},
      {"the buffer of a live gradient",
       [](Bench& b) { return ga_accumulate_part(b.ctx, 1, b.h.data()); },
       kInvalidArgument,
       {"\"second\""}},
      {"its own accumulator",
       [](Bench& b) { return ga_accumulate_part(b.ctx, 2, b.out.data); },
       kInvalidArgument,
       {"\"third\""}},
      {"another's accumulator",
       [](Bench& b) { return ga_accumulate_part(b.ctx, 1, b.out.data); },
       kInvalidArgument,
       {"\"second\""}},
      {"no context",
       [](Bench& b) { return ga_accumulate_part(nullptr, 0, b.g.data()); },
       kInvalidArgument,
       {"ctx"}},
      {"acquire, parameter 3",
       [](Bench& b) {
         ga_accumulator a;
         a.struct_size = sizeof a;
         return ga_accumulator_acquire(b.ctx, 3, &a);
       },
       kInvalidArgument,
       {"3"}},
      {"acquire into nothing",
       [](Bench& b) { return ga_accumulator_acquire(b.ctx, 0, nullptr); },
       kInvalidArgument,
       {}},
      {"acquire, no context",
       [](Bench&) {
         ga_accumulator a;
         a.struct_size = sizeof a;
         return ga_accumulator_acquire(nullptr, 0, &a);
       },
       kInvalidArgument,
       {"ctx"}},
      {"release, parameter -1",
       [](Bench& b) { return ga_accumulator_release(b.ctx, -1); },
       kInvalidArgument,
       {"-1"}},
      {"release, not acquired",
       [](Bench& b) { return ga_accumulator_release(b.ctx, 0); },
       GA_ERROR_INVALID_STATE,
       {"\"first\""}},
      {"release, no context",
       [](Bench&) { return ga_accumulator_release(nullptr, 0); },
       kInvalidArgument,
       {"ctx"}},
      {"end, no context", [](Bench&) { return ga_micro_end(nullptr); }, kInvalidArgument, {"ctx"}},
      {"ready, parameter 3 after 1",
       [](Bench& b) {
         const ga_param list[] = {1, 3};
         return ga_params_ready(b.ctx, list, 2);
       },
       kInvalidArgument,
       {"3"}},
      {"ready, parameter -1",
       [](Bench& b) {
         const ga_param id = -1;
         return ga_params_ready(b.ctx, &id, 1);
       },
       kInvalidArgument,
       {"-1"}},
      {"ready, no list",
       [](Bench& b) { return ga_params_ready(b.ctx, nullptr, 1); },
       kInvalidArgument,
       {"params"}},
      {"ready, no context",
       [](Bench&) {
         const ga_param id = 0;
         return ga_params_ready(nullptr, &id, 1);
       },
       kInvalidArgument,
       {"ctx"}},
  };
  expect_all_refused(
      list,
      [&](Bench& b) {
        EXPECT_OK(ga_micro_begin(b.ctx, 0, 2, nullptr));
        EXPECT_OK(ga_accumulate_part(b.ctx, 1, b.h.data()));
        EXPECT_OK(ga_accumulator_acquire(b.ctx, 2, &b.out));
        *static_cast<float*>(b.out.data) = 1;
        EXPECT_OK(ga_accumulator_release(b.ctx, 2));
      },
      [](Bench& b) {
        EXPECT_OK(ga_accumulate_part(b.ctx, 0, b.g.data()));
        EXPECT_OK(ga_accumulate_part(b.ctx, 1, b.g.data()));
        EXPECT_OK(ga_micro_end(b.ctx));
        EXPECT_OK(ga_step(b.ctx, nullptr));
      });
}

// ga_gradient returns memory of the library; as a gradient it would be read while it is written.
TEST(BadArguments, AGradientThatIsTheLibrarys) {
  float p = 0;
  const float g = 1;
  Context ctx;
  ctx.param(ctx.group(optimizer(GA_OPTIMIZER_EXTERNAL)), "p", &p, 1);
  ctx.accumulate({&g});
  step(ctx);
  const void* data = nullptr;
  ASSERT_OK(ga_gradient(ctx, 0, &data, nullptr, nullptr));
  const void* list[] = {data};
  EXPECT_EQ(ga_accumulate(ctx, list, 1, 1, nullptr), kInvalidArgument);
  EXPECT_OK(ga_gradient(ctx, 0, &data, nullptr, nullptr));
  EXPECT_EQ(*static_cast<const float*>(data), 1);
}

// ---- The rest -----------------------------------------------------------------------------------

TEST(BadArguments, OfTheRest) {
  const std::vector<Bad> list = {
      {"wait 2",
       [](Bench& b) {
         ga_step_result r;
         r.struct_size = sizeof r;
         return ga_step_result_get(b.ctx, 0, 2, &r);
       },
       kInvalidArgument,
       {"wait", "2"}},
      {"K -1",
       [](Bench& b) { return ga_context_set_accum_steps(b.ctx, -1); },
       kInvalidArgument,
       {"accum_steps", "-1"}},
      {"K, no context",
       [](Bench&) { return ga_context_set_accum_steps(nullptr, 1); },
       kInvalidArgument,
       {"ctx"}},
      {"phases missing",
       [](Bench& b) { return ga_context_set_accum_schedule(b.ctx, nullptr, nullptr, 1); },
       kInvalidArgument,
       {"from_steps"}},
      {"phases, no context",
       [](Bench&) { return ga_context_set_accum_schedule(nullptr, nullptr, nullptr, 0); },
       kInvalidArgument,
       {"ctx"}},
      {"group_add, no optimizer",
       [](Bench& b) { return ga_group_add(b.ctx, nullptr, nullptr); },
       kInvalidArgument,
       {"optimizer"}},
      {"group_add, no context",
       [](Bench&) {
         const ga_optimizer o = plain_sgd();
         return ga_group_add(nullptr, &o, nullptr);
       },
       kInvalidArgument,
       {"ctx"}},
      {"lr, no context",
       [](Bench&) { return ga_group_set_lr(nullptr, 0, 1); },
       kInvalidArgument,
       {"ctx"}},
      {"decay, no context",
       [](Bench&) { return ga_group_set_weight_decay(nullptr, 0, 1); },
       kInvalidArgument,
       {"ctx"}},
      {"lr of group 4",
       [](Bench& b) { return ga_group_set_lr(b.ctx, 4, 1); },
       kInvalidArgument,
       {"group", "4"}},
      {"group_lr of group 4",
       [](Bench& b) {
         double lr;
         return ga_group_lr(b.ctx, 4, &lr);
       },
       kInvalidArgument,
       {"group", "4"}},
      {"group_lr to nowhere",
       [](Bench& b) { return ga_group_lr(b.ctx, 0, nullptr); },
       kInvalidArgument,
       {"out"}},
      {"group_lr, no context",
       [](Bench&) {
         double lr;
         return ga_group_lr(nullptr, 0, &lr);
       },
       kInvalidArgument,
       {"ctx"}},
      {"window to nowhere",
       [](Bench& b) { return ga_window(b.ctx, nullptr); },
       kInvalidArgument,
       {}},
      {"memory to nowhere",
       [](Bench& b) { return ga_context_memory(b.ctx, nullptr); },
       kInvalidArgument,
       {}},
      {"step, no context",
       [](Bench&) { return ga_step(nullptr, nullptr); },
       kInvalidArgument,
       {"ctx"}},
      {"discard, no context",
       [](Bench&) { return ga_discard(nullptr); },
       kInvalidArgument,
       {"ctx"}},
      {"synchronize, no context",
       [](Bench&) { return ga_synchronize(nullptr); },
       kInvalidArgument,
       {"ctx"}},
      {"set stream, no context",
       [](Bench&) { return ga_context_set_stream(nullptr, nullptr); },
       kInvalidArgument,
       {"ctx"}},
      {"gradient, no context",
       [](Bench&) {
         const void* data;
         return ga_gradient(nullptr, 0, &data, nullptr, nullptr);
       },
       kInvalidArgument,
       {"ctx"}},
      {"devices of kind 5",
       [](Bench&) {
         int32_t count;
         return ga_device_count(5, &count);
       },
       kInvalidArgument,
       {"5"}},
      {"devices to nowhere",
       [](Bench&) { return ga_device_count(0, nullptr); },
       kInvalidArgument,
       {"out"}},
  };
  expect_all_refused(list, kNothing, kNothing);
  ga_context_destroy(nullptr);  // legal
}

TEST(BadArguments, OfMatrices) {
  const auto multiply = [](ga_param param, int64_t k, const float* a, int64_t lda, int32_t ta,
                           const float* b, int64_t ldb, int32_t tb, int32_t dtype = GA_F32) {
    return [=](Bench& bench) {
      return ga_accumulate_matmul(bench.ctx, param, k, a, lda, ta, b, ldb, tb, dtype);
    };
  };
  static const Block m(64, 1);
  const float* const d = m.data();
  // Parameter 1 is 2 x 3.
  const std::vector<Bad> list = {
      {"parameter 9", multiply(9, 4, d, 4, 0, d, 3, 0), kInvalidArgument, {"9"}},
      {"k -1", multiply(1, -1, d, 4, 0, d, 3, 0), kInvalidArgument, {"\"second\"", "k", "-1"}},
      {"lda 3", multiply(1, 4, d, 3, 0, d, 3, 0), kInvalidArgument, {"\"second\"", "lda", "3"}},
      {"lda 1, transposed",
       multiply(1, 4, d, 1, 1, d, 3, 0),
       kInvalidArgument,
       {"\"second\"", "lda", "1"}},
      {"ldb 2", multiply(1, 4, d, 4, 0, d, 2, 0), kInvalidArgument, {"\"second\"", "ldb", "2"}},
      {"ldb 3, transposed",
       multiply(1, 4, d, 4, 0, d, 3, 1),
       kInvalidArgument,
       {"\"second\"", "ldb", "3"}},
      {"transpose_a 2", multiply(1, 4, d, 4, 2, d, 3, 0), kInvalidArgument, {"transpose_a", "2"}},
      {"transpose_b -1",
       multiply(1, 4, d, 4, 0, d, 3, -1),
       kInvalidArgument,
       {"transpose_b", "-1"}},
      {"no a", multiply(1, 4, nullptr, 4, 0, d, 3, 0), kInvalidArgument, {"\"second\"", "a"}},
      {"no b", multiply(1, 4, d, 4, 0, nullptr, 3, 0), kInvalidArgument, {"\"second\"", "b"}},
      {"odd a",
       multiply(1, 4, off_by_one(d), 4, 0, d, 3, 0),
       kInvalidArgument,
       {"\"second\"", "address"}},
      {"dtype 0", multiply(1, 4, d, 4, 0, d, 3, 0, 0), kInvalidArgument, {"dtype", "0"}},
      {"dtype f64", multiply(1, 4, d, 4, 0, d, 3, 0, GA_F64), kUnsupported, {"f64"}},
      {"dtype i32", multiply(1, 4, d, 4, 0, d, 3, 0, GA_I32), kUnsupported, {"i32"}},
      {"k 2^62",
       multiply(1, int64_t{1} << 62, d, int64_t{1} << 62, 0, d, 3, 0),
       kInvalidArgument,
       {"\"second\""}},
      {"a is a parameter",
       [](Bench& b) {
         return ga_accumulate_matmul(b.ctx, 1, 4, b.first.data(), 4, 0, m.data(), 3, 0, GA_F32);
       },
       kInvalidArgument,
       {"\"second\""}},
      {"b is a parameter",
       [](Bench& b) {
         return ga_accumulate_matmul(b.ctx, 1, 4, m.data(), 4, 0, b.first.data(), 3, 0, GA_F32);
       },
       kInvalidArgument,
       {"\"second\""}},
      {"no context",
       [](Bench&) {
         return ga_accumulate_matmul(nullptr, 1, 4, m.data(), 4, 0, m.data(), 3, 0, GA_F32);
       },
       kInvalidArgument,
       {"ctx"}},
  };
  expect_all_refused(
      list, [](Bench& b) { EXPECT_OK(ga_micro_begin(b.ctx, 0, 1, nullptr)); },
      [](Bench& b) {
        EXPECT_OK(ga_micro_end(b.ctx));
        EXPECT_OK(ga_step(b.ctx, nullptr));
      });
}

TEST(BadArguments, OfConfig) {
  struct BadConfig {
    const char* what;
    void (*spoil)(ga_config&);
    ga_status status;
    Words words;
  };
  using C = ga_config&;
  const BadConfig list[] = {
      {"device 7", [](C c) { c.device = 7; }, kInvalidArgument, {"device", "7"}},
      {"device -1", [](C c) { c.device = -1; }, kInvalidArgument, {"device", "-1"}},
      {"CUDA device 999",
       [](C c) {
         c.device = GA_DEVICE_CUDA;
         c.device_ordinal = 999;
       },
       kUnsupported,
       {}},
      {"CPU 1", [](C c) { c.device_ordinal = 1; }, kInvalidArgument, {"device_ordinal", "1"}},
      {"ordinal -1",
       [](C c) { c.device_ordinal = -1; },
       kInvalidArgument,
       {"device_ordinal", "-1"}},
      {"a stream on the CPU", [](C c) { c.stream = &c; }, kInvalidArgument, {"stream"}},
      {"threads -1", [](C c) { c.num_threads = -1; }, kInvalidArgument, {"num_threads", "-1"}},
      {"K -1", [](C c) { c.accum_steps = -1; }, kInvalidArgument, {"accum_steps", "-1"}},
      {"kind 2", [](C c) { c.gradient_kind = 2; }, kInvalidArgument, {"gradient_kind", "2"}},
      {"reduce -1", [](C c) { c.reduce = -1; }, kInvalidArgument, {"reduce", "-1"}},
      {"missing 9", [](C c) { c.missing = 9; }, kInvalidArgument, {"missing", "9"}},
      {"nonfinite 4", [](C c) { c.nonfinite = 4; }, kInvalidArgument, {"nonfinite", "4"}},
      {"life 3", [](C c) { c.gradient_life = 3; }, kInvalidArgument, {"gradient_life", "3"}},
      {"scale 0", [](C c) { c.loss_scale = 0; }, kInvalidArgument, {"loss_scale", "0"}},
      {"scale NaN", [](C c) { c.loss_scale = NAN; }, kInvalidArgument, {"loss_scale", "nan"}},
      {"scale inf", [](C c) { c.loss_scale = INFINITY; }, kInvalidArgument, {"loss_scale", "inf"}},
      {"measure_norm 2", [](C c) { c.measure_norm = 2; }, kInvalidArgument, {"measure_norm", "2"}},
      {"reserved2 1", [](C c) { c.reserved2 = 1; }, kInvalidArgument, {"reserved2", "1"}},
  };
  int marker = 0;
  for (const BadConfig& bad : list) {
    SCOPED_TRACE(bad.what);
    ga_config c = config();
    bad.spoil(c);
    auto* out = reinterpret_cast<ga_context*>(&marker);
    EXPECT_EQ(ga_context_create(&c, &out), bad.status);
    EXPECT_EQ(static_cast<void*>(out), &marker) << "written by a call that failed";
    const std::string text = ga_last_error();
    for (const std::string& word : bad.words) {
      EXPECT_NE(text.find(word), std::string::npos) << '"' << text << "\" lacks " << word;
    }
  }
  EXPECT_EQ(ga_context_create(nullptr, nullptr), kInvalidArgument);
}

TEST(BadArguments, OfCommOptions) {
  on_ranks(1, [](int32_t, ga_comm* comm) {
    const auto set = [comm](auto change) {
      ga_comm_options o = comm_options();
      change(o);
      return [=](Bench& b) { return ga_context_set_comm(b.ctx, comm, &o); };
    };
    using O = ga_comm_options&;
    const std::vector<Bad> list = {
        {"wire 2", set([](O o) { o.wire = 2; }), kInvalidArgument, {"wire", "2"}},
        {"hand_out 2", set([](O o) { o.hand_out = 2; }), kInvalidArgument, {"hand_out", "2"}},
        {"check_every -1",
         set([](O o) { o.check_every = -1; }),
         kInvalidArgument,
         {"check_every", "-1"}},
        {"shard 3", set([](O o) { o.shard = 3; }), kInvalidArgument, {"shard", "3"}},
        {"reduced", set([](O o) { o.reduced = 2; }), kInvalidArgument, {"reduced", "2"}},
        {"data_ranks", set([](O o) { o.data_ranks = 2; }), kInvalidArgument, {"data_ranks", "2"}},
        {"data_rank", set([](O o) { o.data_rank = 0; }), kInvalidArgument, {"data_rank", "0"}},
        {"reserved2", set([](O o) { o.reserved2 = 1; }), kInvalidArgument, {"reserved2", "1"}},
        {"shard -1", set([](O o) { o.shard = -1; }), kInvalidArgument, {"shard", "-1"}},
        {"adder 3", set([](O o) { o.adder = 3; }), kInvalidArgument, {"adder", "3"}},
        {"adder of a transport that adds nothing",
         set([](O o) { o.adder = GA_COMM_ADDER_TRANSPORT; }),
         kUnsupported,
         {"adder"}},
        {"overlap 2", set([](O o) { o.overlap = 2; }), kInvalidArgument, {"overlap", "2"}},
        {"reserved 1",
         set([](O o) { o.reserved = 1; }),
         kInvalidArgument,
         {"ga_comm_options", "reserved", "1"}},
        {"options of no size",
         set([](O o) { o.struct_size = 0; }),
         kInvalidArgument,
         {"struct_size", "ga_comm_options"}},
        {"no context",
         [comm](Bench&) { return ga_context_set_comm(nullptr, comm, nullptr); },
         kInvalidArgument,
         {"ctx"}},
    };
    expect_all_refused(list, kNothing, kNothing);
    Context ctx;
    EXPECT_OK(ga_context_set_comm(ctx, comm, nullptr)) << "a refused call took the communicator";
  });
}

TEST(BadArguments, OfCommTable) {
  struct BadTable {
    const char* what;
    void (*spoil)(ga_comm_table&);
    Words words;
  };
  using T = ga_comm_table&;
  const BadTable list[] = {
      {"no all_to_all", [](T t) { t.all_to_all = nullptr; }, {"all_to_all"}},
      {"no all_gather", [](T t) { t.all_gather = nullptr; }, {"all_gather"}},
      {"no broadcast", [](T t) { t.broadcast = nullptr; }, {"broadcast"}},
      {"any_thread 2", [](T t) { t.any_thread = 2; }, {"any_thread", "2"}},
      {"on_stream 2", [](T t) { t.on_stream = 2; }, {"on_stream", "2"}},
  };
  const OneRank one;
  for (const BadTable& bad : list) {
    SCOPED_TRACE(bad.what);
    ga_comm_table table = one.table();
    bad.spoil(table);
    ga_comm_config c = comm_config(GA_COMM_TABLE);
    c.ranks = 1;
    c.table = &table;
    ga_comm* comm = nullptr;
    EXPECT_EQ(ga_comm_create(&c, &comm), kInvalidArgument);
    EXPECT_EQ(comm, nullptr) << "written by a call that failed";
    const std::string text = ga_last_error();
    for (const std::string& word : bad.words) {
      EXPECT_NE(text.find(word), std::string::npos) << '"' << text << "\" lacks " << word;
    }
  }
}

// Memory that holds no context, be it that the context was destroyed or that there never was one.
TEST(BadArguments, NotAContext) {
  if (refuses_undefined_behaviour())
    GTEST_SKIP() << "the sanitizer of undefined behaviour ends the call before the library sees it";
  alignas(64) static char memory[1 << 14] = {};
  for (const int fill : {0, 0x5a}) {
    memset(memory, fill, sizeof memory);
    auto* const ctx = reinterpret_cast<ga_context*>(memory);
    EXPECT_EQ(ga_step(ctx, nullptr), kInvalidArgument);
    EXPECT_NE(std::string(ga_last_error()).find("is not a context"), std::string::npos)
        << ga_last_error();
    ga_context_destroy(ctx);
    EXPECT_EQ(std::count(memory, memory + sizeof memory, fill),
              static_cast<std::ptrdiff_t>(sizeof memory));
  }
}

// What a table's function throws costs the communicator, as a failure that it returns does.
TEST(BadArguments, ATableThatThrows) {
  const OneRank one;
  ga_comm_table table = one.table();
  table.all_gather = [](void*, const void*, void*, int64_t, int64_t, ga_dtype, void*) -> int32_t {
    throw std::runtime_error("the cable is out");
  };
  ga_comm_config c = comm_config(GA_COMM_TABLE);
  c.ranks = 1;
  c.table = &table;
  ga_comm* comm = nullptr;
  ASSERT_OK(ga_comm_create(&c, &comm));
  {
    Context ctx;
    float p = 0;
    ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
    EXPECT_EQ(ga_context_set_comm(ctx, comm, nullptr), GA_ERROR_COMMUNICATION);
    EXPECT_NE(
        std::string(ga_last_error()).find("ga_comm_table threw an exception: the cable is out"),
        std::string::npos)
        << ga_last_error();
  }
  ga_comm_destroy(comm);
}

// A reserved field must be 0, because a later version may give it a meaning.
TEST(BadArguments, ReservedFields) {
  Context ctx;
  ctx.group(plain_sgd());
  float data = 0;
  ctx.param(0, "p", &data, 1);
  for (const int32_t value : {1, -1, INT32_MIN, 256}) {
    SCOPED_TRACE(value);
    const auto invalid = [&](ga_status status) {
      const std::string text = ga_last_error();
      return status == kInvalidArgument && text.find("reserved") != std::string::npos &&
             text.find(std::to_string(value)) != std::string::npos;
    };
    ga_config c = config();
    c.reserved2 = value;
    ga_context* none = nullptr;
    EXPECT_TRUE(invalid(ga_context_create(&c, &none)));
    EXPECT_EQ(none, nullptr);

    ga_optimizer o = plain_sgd();
    o.reserved = value;
    ga_group group = -1;
    EXPECT_TRUE(invalid(ga_group_add(ctx, &o, &group)));
    EXPECT_EQ(group, -1);

    ga_schedule s = schedule(GA_SCHEDULE_CONSTANT);
    s.reserved = value;
    EXPECT_TRUE(invalid(ga_group_set_schedule(ctx, 0, &s)));

    ga_loss_scaler l;
    EXPECT_OK(ga_loss_scaler_init(&l, sizeof l));
    l.reserved = value;
    EXPECT_TRUE(invalid(ga_context_set_loss_scaler(ctx, &l)));
    double scale = 0;
    EXPECT_OK(ga_loss_scale(ctx, &scale, nullptr));
    EXPECT_EQ(scale, 1);

    ga_comm_options options = comm_options();
    options.reserved = value;
    EXPECT_TRUE(invalid(ga_context_set_comm(ctx, nullptr, &options)));
  }
  // The library writes zeros to the reserved fields of structs that it fills.
  EXPECT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
  auto out = to_fill<ga_accumulator>();
  EXPECT_OK(ga_accumulator_acquire(ctx, 0, &out));
  EXPECT_EQ(out.reserved, 0);
}

TEST(BadArguments, OfGaCpuIsa) {
  for (const char* level : {"avx9000", "x86-64-v5", "Scalar", " scalar", "x86-64-v"}) {
    const Isa isa(level);
    ga_context* ctx = nullptr;
    EXPECT_EQ(ga_context_create(nullptr, &ctx), kUnsupported) << level;
    EXPECT_EQ(ctx, nullptr);
    EXPECT_NE(std::string(ga_last_error()).find(level), std::string::npos) << ga_last_error();
  }
}

TEST(BadArguments, DevicesOfThisMachine) {
  int32_t count = -1;
  EXPECT_OK(ga_device_count(GA_DEVICE_CPU, &count));
  EXPECT_EQ(count, 1);
  // No device is an answer, not an error. The message is the one that ga_context_create would give.
  count = -1;
  EXPECT_EQ(ga_discard(nullptr), kInvalidArgument);
  const std::string before = ga_last_error();
  EXPECT_OK(ga_device_count(GA_DEVICE_CUDA, &count));
  EXPECT_GE(count, 0);
  const std::string reason = ga_last_error();
  if (count > 0) {
    EXPECT_EQ(reason, before);
    return;
  }
  EXPECT_NE(reason, before);
  ga_config c = config();
  c.device = GA_DEVICE_CUDA;
  ga_context* ctx = nullptr;
  EXPECT_EQ(ga_context_create(&c, &ctx), kUnsupported);
  EXPECT_EQ(ga_last_error(), reason);
  // Wrong arguments are still refused, and nothing is written.
  count = -7;
  EXPECT_EQ(ga_device_count(2, &count), kInvalidArgument);
  EXPECT_EQ(count, -7);
}

// An address that a gradient has had, in the last micro-batch or before it, is memory of a parameter
// from now on.
TEST(BadArguments, OldGradientsThatHaveBecomeParameters) {
  for (const auto& [bound, before] :
       {std::pair(false, false), {false, true}, {true, false}, {true, true}}) {
    float p[2] = {1, 1}, q[2] = {1, 1}, g[2] = {1, 1}, h[2] = {1, 1},
          others[2][2] = {{1, 1}, {1, 1}};
    Context ctx;
    ctx.param(ctx.group(plain_sgd()), "p", p, 2);
    if (bound) ctx.param(0, "q", q, 2);
    const void *list[] = {g, h}, *later[] = {others[0], others[1]};
    EXPECT_OK(ga_accumulate(ctx, list, bound ? 2 : 1, 1, nullptr));
    if (before) {
      EXPECT_OK(ga_accumulate(ctx, later, bound ? 2 : 1, 1, nullptr));
    }
    step(ctx);
    if (bound) {
      EXPECT_OK(ga_param_bind(ctx, 1, g));
    } else {
      ctx.param(0, "q", g, 2);
    }
    EXPECT_EQ(ga_accumulate(ctx, list, 2, 1, nullptr), kInvalidArgument);
    EXPECT_NE(std::string(ga_last_error()).find("overlaps parameter \"q\""), std::string::npos);
    EXPECT_EQ(window(ctx).state, GA_WINDOW_EMPTY);
  }
}

// ---- struct_size --------------------------------------------------------------------------------

// A struct with more fields at its end, as in a program of a later version.
template <class T>
struct Later {
  T known;
  unsigned char unknown[24];
};

// call: uses the struct as an input.
template <class T, class Call>
void check_input_sizes(const char* type, const T& good, Call call) {
  SCOPED_TRACE(type);
  T same = good;
  EXPECT_EQ(call(&same), GA_OK) << ga_last_error();
  for (const size_t size : {size_t{0}, size_t{4}, sizeof(size_t) - 1, SIZE_MAX, SIZE_MAX / 2}) {
    T bad = good;
    bad.struct_size = size;
    EXPECT_EQ(call(&bad), kInvalidArgument) << "struct_size " << size;
    EXPECT_NE(std::string(ga_last_error()).find("struct_size"), std::string::npos)
        << ga_last_error();
  }
  Later<T> later;
  memset(&later, 0, sizeof later);
  later.known = good;
  later.known.struct_size = sizeof later;
  EXPECT_EQ(call(&later.known), GA_OK) << "no unknown field is set: " << ga_last_error();
  for (const size_t at : {size_t{0}, size_t{7}, sizeof later.unknown - 1}) {
    later.unknown[at] = 1;
    EXPECT_EQ(call(&later.known), kUnsupported) << "unknown byte " << at << " is set";
    EXPECT_STRNE(ga_last_error(), "");
    later.unknown[at] = 0;
  }
  later.known.struct_size = sizeof(T);  // the struct ends here, so later bytes do not matter
  later.unknown[0] = 1;
  EXPECT_EQ(call(&later.known), GA_OK) << ga_last_error();
}

TEST(StructSize, OfInputs) {
  float p = 0;
  Context ctx;
  ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
  check_input_sizes("ga_config", config(), [](const ga_config* c) {
    ga_context* made = nullptr;
    const ga_status status = ga_context_create(c, &made);
    EXPECT_EQ(made != nullptr, status == GA_OK);
    ga_context_destroy(made);
    return status;
  });
  check_input_sizes("ga_optimizer", plain_sgd(),
                    [&](const ga_optimizer* o) { return ga_group_add(ctx, o, nullptr); });
  check_input_sizes("ga_schedule", schedule(GA_SCHEDULE_CONSTANT),
                    [&](const ga_schedule* s) { return ga_group_set_schedule(ctx, 0, s); });
  check_input_sizes("ga_clip", clip(GA_CLIP_GLOBAL, 1),
                    [&](const ga_clip* c) { return ga_context_set_clip(ctx, c); });
  check_input_sizes("ga_clip of a group", clip(GA_CLIP_GLOBAL, 1),
                    [&](const ga_clip* c) { return ga_group_set_clip(ctx, 0, c); });
  check_input_sizes("ga_comm_options", comm_options(),
                    [&](const ga_comm_options* o) { return ga_context_set_comm(ctx, nullptr, o); });
  int added = 0;
  Block room(100, 0);
  ga_param_options options = {};
  options.struct_size = sizeof options;
  check_input_sizes("ga_param_options", options, [&](const ga_param_options* o) {
    ++added;
    return ga_param_add(ctx, 0, ("n" + std::to_string(added)).c_str(), &room[0] + added, GA_F32, 0,
                        nullptr, o, nullptr);
  });
}

// call: lets the library fill the struct.
template <class T, class Call>
void check_output_sizes(const char* type, Call call) {
  SCOPED_TRACE(type);
  for (const size_t size : {size_t{0}, size_t{4}, SIZE_MAX}) {
    T bad, before;
    memset(&bad, 0x5a, sizeof bad);
    bad.struct_size = size;
    before = bad;
    EXPECT_EQ(call(&bad), kInvalidArgument) << "struct_size " << size;
    EXPECT_EQ(0, memcmp(&bad, &before, sizeof bad)) << "written by a call that failed";
  }
  Later<T> later;
  memset(&later, 0x5a, sizeof later);
  later.known.struct_size = sizeof later - 8;
  EXPECT_EQ(call(&later.known), GA_OK) << ga_last_error();
  EXPECT_EQ(later.known.struct_size, sizeof later - 8);
  for (size_t i = sizeof later.unknown - 8; i < sizeof later.unknown; ++i) {
    EXPECT_EQ(later.unknown[i], 0x5a) << "written beyond struct_size";
  }
}

TEST(StructSize, OfOutputs) {
  float p = 0;
  Context ctx;
  ctx.param(ctx.group(plain_sgd()), "p", &p, 1);
  check_output_sizes<ga_window_info>("ga_window_info",
                                     [&](ga_window_info* w) { return ga_window(ctx, w); });
  check_output_sizes<ga_kept_info>("ga_kept_info",
                                   [&](ga_kept_info* k) { return ga_gradients_kept(ctx, 0, k); });
  check_output_sizes<ga_memory>("ga_memory",
                                [&](ga_memory* m) { return ga_context_memory(ctx, m); });
  check_output_sizes<ga_step_result>("ga_step_result",
                                     [&](ga_step_result* r) { return ga_step(ctx, r); });
  ASSERT_OK(ga_micro_begin(ctx, 0, 1, nullptr));
  check_output_sizes<ga_accumulator>(
      "ga_accumulator", [&](ga_accumulator* a) { return ga_accumulator_acquire(ctx, 0, a); });
}

// A program compiled before structs grew: fields that it does not know have their defaults and are
// not written.
TEST(StructSize, OfAnOlderProgram) {
  ga_config config;
  memset(&config, 0x5a, sizeof config);
  ASSERT_OK(ga_config_init(&config, offsetof(ga_config, seed)));
  EXPECT_EQ(config.noise_scale, 0x5a5a5a5a) << "written beyond struct_size";
  ga_context* ctx = nullptr;
  ASSERT_OK(ga_context_create(&config, &ctx));

  ga_optimizer o;
  memset(&o, 0x5a, sizeof o);
  ASSERT_OK(ga_optimizer_init(&o, offsetof(ga_optimizer, rho), GA_OPTIMIZER_LAMB, 0));
  EXPECT_OK(ga_group_add(ctx, &o, nullptr)) << "max_grad_norm is the default";

  ga_clip c;
  memset(&c, 0x5a, sizeof c);
  ASSERT_OK(ga_clip_init(&c, offsetof(ga_clip, agc_factor)));
  c.scope = GA_CLIP_AGC;
  EXPECT_OK(ga_context_set_clip(ctx, &c)) << "agc_factor is the default";

  ga_param_options options;
  memset(&options, 0, sizeof options);
  memset(&options.master, 0x5a, sizeof options - offsetof(ga_param_options, master));
  options.struct_size = offsetof(ga_param_options, master);
  float p = 1;
  const int64_t one = 1;
  EXPECT_OK(ga_param_add(ctx, 0, "p", &p, GA_F32, 1, &one, &options, nullptr));
  const float g = 1;
  const void* gradients[] = {&g};
  EXPECT_OK(ga_accumulate(ctx, gradients, 1, 1, nullptr));
  ga_step_result r;
  memset(&r, 0x5a, sizeof r);
  r.struct_size = offsetof(ga_step_result, skipped);
  EXPECT_OK(ga_step(ctx, &r));
  EXPECT_EQ(r.steps, 1);
  EXPECT_EQ(r.skipped, 0x5a5a5a5a5a5a5a5a) << "written beyond struct_size";
  ga_memory m;
  memset(&m, 0x5a, sizeof m);
  m.struct_size = offsetof(ga_memory, masters);
  EXPECT_OK(ga_context_memory(ctx, &m));
  EXPECT_EQ(m.masters, 0x5a5a5a5a5a5a5a5a) << "written beyond struct_size";
  ga_context_destroy(ctx);

  config.struct_size = offsetof(ga_config, seed) - 1;  // smaller than in any release
  EXPECT_EQ(ga_context_create(&config, &ctx), kInvalidArgument);
}

// The size of the struct in its first release, if it has grown since.
template <class T>
constexpr size_t kFirstSize = sizeof(T);
template <>
constexpr size_t kFirstSize<ga_config> = 72;
template <>
constexpr size_t kFirstSize<ga_optimizer> = 88;
template <>
constexpr size_t kFirstSize<ga_clip> = 32;
template <>
constexpr size_t kFirstSize<ga_schedule> = 80;
template <>
constexpr size_t kFirstSize<ga_param_options> = 16;
template <>
constexpr size_t kFirstSize<ga_memory> = 40;
template <>
constexpr size_t kFirstSize<ga_step_result> = 80;

// init calls an _init function, which must write as many bytes as given, up to the size that it
// knows.
template <class T, class Init>
void check_init_sizes(const char* type, Init init) {
  SCOPED_TRACE(type);
  EXPECT_EQ(init(static_cast<T*>(nullptr), sizeof(T)), kInvalidArgument);
  const size_t first = kFirstSize<T>;
  T whole;
  memset(&whole, 0, sizeof whole);
  ASSERT_EQ(init(&whole, sizeof whole), GA_OK) << ga_last_error();
  EXPECT_EQ(whole.struct_size, sizeof whole);
  for (const size_t size : {first, sizeof(T), sizeof(T) + 8, size_t{256}, size_t{4096}}) {
    SCOPED_TRACE(size);
    const size_t known = std::min(size, sizeof(T));
    // exact is an allocation of that size, for a sanitizer; guarded has canaries, for other builds.
    std::vector<unsigned char> exact(known, 0x5a), guarded(sizeof(T) + 4096, 0x5a);
    for (std::vector<unsigned char>* bytes : {&exact, &guarded}) {
      EXPECT_EQ(init(reinterpret_cast<T*>(bytes->data()), size), GA_OK) << ga_last_error();
      size_t told = 0;
      memcpy(&told, bytes->data(), sizeof told);
      EXPECT_EQ(told, known);
      EXPECT_EQ(0, memcmp(bytes->data() + sizeof told,
                          reinterpret_cast<const unsigned char*>(&whole) + sizeof told,
                          known - sizeof told));
    }
    for (size_t i = known; i < guarded.size(); ++i) {
      ASSERT_EQ(guarded[i], 0x5a) << "byte " << i << " was written";
    }
  }
  const std::string least = "at least " + std::to_string(first) + " ";
  const std::string now = "(" + std::to_string(sizeof(T)) + " ";
  for (const size_t size : {size_t{0}, size_t{7}, first - 1, size_t{65537}, SIZE_MAX}) {
    SCOPED_TRACE(size);
    std::vector<unsigned char> bytes(sizeof(T), 0x5a);
    EXPECT_EQ(init(reinterpret_cast<T*>(bytes.data()), size), kInvalidArgument);
    EXPECT_EQ(bytes, std::vector<unsigned char>(sizeof(T), 0x5a));
    for (const std::string& words :
         {"struct_size of " + std::string(type) + " was " + std::to_string(size), least, now}) {
      EXPECT_NE(std::string(ga_last_error()).find(words), std::string::npos)
          << ga_last_error() << " lacks " << words;
    }
  }
}

TEST(StructSize, OfInit) {
  check_init_sizes<ga_config>("ga_config", ga_config_init);
  check_init_sizes<ga_optimizer>("ga_optimizer", [](ga_optimizer* o, size_t n) {
    return ga_optimizer_init(o, n, GA_OPTIMIZER_ADAMW, GA_FLAVOR_TORCH);
  });
  check_init_sizes<ga_schedule>("ga_schedule", [](ga_schedule* s, size_t n) {
    return ga_schedule_init(s, n, GA_SCHEDULE_COSINE);
  });
  check_init_sizes<ga_clip>("ga_clip", ga_clip_init);
  check_init_sizes<ga_loss_scaler>("ga_loss_scaler", ga_loss_scaler_init);
  check_init_sizes<ga_ema>("ga_ema", ga_ema_init);
  check_init_sizes<ga_bn_options>("ga_bn_options", [](ga_bn_options* o, size_t n) {
    return ga_bn_options_init(o, n, GA_FLAVOR_KERAS);
  });
  check_init_sizes<ga_bn_info>("ga_bn_info", ga_bn_info_init);
  check_init_sizes<ga_micro_options>("ga_micro_options", ga_micro_options_init);
  check_init_sizes<ga_param_info>("ga_param_info", ga_param_info_init);
  check_init_sizes<ga_flat_entry>("ga_flat_entry", ga_flat_entry_init);
  check_init_sizes<ga_param_options>("ga_param_options", ga_param_options_init);
  check_init_sizes<ga_memory>("ga_memory", ga_memory_init);
  check_init_sizes<ga_comm_config>("ga_comm_config", [](ga_comm_config* c, size_t n) {
    return ga_comm_config_init(c, n, GA_COMM_LOCAL);
  });
  check_init_sizes<ga_comm_options>("ga_comm_options", ga_comm_options_init);
  check_init_sizes<ga_accumulator>("ga_accumulator", ga_accumulator_init);
  check_init_sizes<ga_window_info>("ga_window_info", ga_window_info_init);
  check_init_sizes<ga_kept_info>("ga_kept_info", ga_kept_info_init);
  check_init_sizes<ga_step_result>("ga_step_result", ga_step_result_init);
  ga_optimizer o;
  for (const int32_t kind : {-1, static_cast<int32_t>(optimizer_rows().size()), 1000}) {
    EXPECT_EQ(ga_optimizer_init(&o, sizeof o, kind, 0), kInvalidArgument) << kind;
  }
  for (const int32_t flavor : {-1, 3}) {
    EXPECT_EQ(ga_optimizer_init(&o, sizeof o, GA_OPTIMIZER_ADAM, flavor), kInvalidArgument);
  }
}

// ---- Errors -------------------------------------------------------------------------------------

TEST(Errors, NamesOfStatuses) {
  const std::pair<int, const char*> names[] = {
      {0, "GA_OK"},
      {1, "GA_ERROR_INVALID_ARGUMENT"},
      {2, "GA_ERROR_INVALID_STATE"},
      {3, "GA_ERROR_OUT_OF_MEMORY"},
      {4, "GA_ERROR_UNSUPPORTED"},
      {5, "GA_ERROR_NONFINITE"},
      {6, "GA_ERROR_FAULT"},
      {7, "GA_ERROR_INTERNAL"},
      {8, "GA_ERROR_WINDOW_FULL"},
      {9, "GA_ERROR_IO"},
      {10, "GA_ERROR_FORMAT"},
      {11, "GA_ERROR_COMMUNICATION"},
      {12, "GA_ERROR_CANCELLED"},
      {13, "unknown status"},
      {-1, "unknown status"},
  };
  for (const auto& [status, name] : names) {
    EXPECT_STREQ(ga_status_name(static_cast<ga_status>(status)), name);
  }
}

TEST(Errors, LastErrorBelongsToTheThread) {
  EXPECT_EQ(ga_step(nullptr, nullptr), kInvalidArgument);
  const std::string mine = ga_last_error();
  EXPECT_NE(mine, "");
  std::thread([] {
    EXPECT_STREQ(ga_last_error(), "");
    EXPECT_EQ(ga_context_create(nullptr, nullptr), kInvalidArgument);
  }).join();
  EXPECT_EQ(ga_last_error(), mine);
  Context ctx;
  step(ctx);
  EXPECT_EQ(ga_last_error(), mine) << "a successful call must not change it";
}

// No exception leaves the library; one of an unknown type becomes GA_ERROR_INTERNAL.
TEST(Errors, WhateverIsThrownBecomesAStatus) {
  EXPECT_EQ(guard([] { throw std::logic_error("words"); }), GA_ERROR_INTERNAL);
  EXPECT_STREQ(ga_last_error(), "words");
  EXPECT_EQ(guard([] { throw 42; }), GA_ERROR_INTERNAL);
  EXPECT_STRNE(ga_last_error(), "words");
  EXPECT_EQ(guard([] { throw std::bad_alloc(); }), GA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(guard([] { fail(GA_ERROR_UNSUPPORTED, "no %s", "luck"); }), GA_ERROR_UNSUPPORTED);
  EXPECT_STREQ(ga_last_error(), "no luck");
  EXPECT_EQ(guard([] {}), GA_OK);
}

// A name of any length must not overflow the buffer of the message.
TEST(Errors, VeryLongNames) {
  const std::string name(4095, 'x');
  float p = 0, q = 0;
  Context ctx;
  ctx.param(ctx.group(plain_sgd()), name, &p, 1);
  EXPECT_EQ(ga_param_add(ctx, 0, name.c_str(), &q, GA_F32, 0, nullptr, nullptr, nullptr),
            kInvalidArgument);
  EXPECT_NE(std::string(ga_last_error()).find("xxx"), std::string::npos);
  ctx.param(0, name + "y", &q, 1);
  const std::string longer = name + "yz";
  EXPECT_EQ(ga_param_add(ctx, 0, longer.c_str(), &q, GA_F32, 0, nullptr, nullptr, nullptr),
            kInvalidArgument);
  EXPECT_NE(std::string(ga_last_error()).find("4097 bytes"), std::string::npos);
}

// Where a message is cut, or a name in it, no half of a character is left, for a program may not be able to decode that.
TEST(Errors, AreCutBetweenCharacters) {
  float p = 0, q = 0;
  for (const char* const character : {"\u00e9", "\u2207", "\U0001d6c1"}) {  // of 2, 3 and 4 bytes
    for (size_t before = 0; before < 4; ++before) {
      Context ctx;
      std::string name(before, 'x');
      while (name.size() < 2000) name += character;
      ctx.param(ctx.group(plain_sgd()), name, &p, 1);
      // The message is longer than the buffer; or the name is cut in it.
      const std::string state_name = name + ".exp_avg";
      for (const std::string& added : {name, state_name}) {
        ASSERT_EQ(ga_param_add(ctx, 0, added.c_str(), &q, GA_F32, 0, nullptr, nullptr, nullptr),
                  kInvalidArgument);
        const std::string message = ga_last_error();
        EXPECT_TRUE(safetensors::is_utf8(message)) << message;
        EXPECT_NE(message.find(character), std::string::npos);
      }
    }
  }
}

}  // namespace
}  // namespace ga::test
