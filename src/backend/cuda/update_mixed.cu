// SPDX-License-Identifier: Apache-2.0
// The update of parameters with arrays of bf16, or with arrays that begin at any address. It has kernels of its own,
// because the loops of a kernel share its registers: Update's loops over aligned floats need all of them.
#include "backend/cuda/update.hpp"

namespace ga::cuda {
namespace {

// Whether an Op has such a kernel: one of a single pass, with at most two state values for an element. Update's general
// loop serves the others.
template <class Op>
constexpr bool kIsMixed = Op::norms == 0 && Op::slots <= 2 && !Op::factored && !Op::row_state;

constexpr int kEach = 8;  // elements that a thread updates at a time
constexpr int kRound = kEach * kThreads;

// Eight elements of an array of floats or of bf16, as they are stored. kWhole: neighbours, in accesses of 16 bytes.
// Otherwise elements kThreads apart, each for itself: neighbouring threads then access neighbours, at any address.
template <bool kWhole>
struct Eight {
  static constexpr int kApart = kWhole ? 1 : kThreads;
  uint32_t word[kEach];  // one for each element, or for two neighbours of bf16

  // Of a thread, in the first kRound elements.
  GA_DEVICE static int first(int thread) { return kWhole ? kEach * thread : thread; }

  template <int32_t kFormat>
  GA_DEVICE void load(const void* data, int i) {
    using Stored = typename Dtype<kFormat>::Stored;
    const Stored* const at = global(static_cast<const Stored*>(data) + i);
    if constexpr (kWhole) {
      const auto* const from = global(reinterpret_cast<const Packed<uint32_t>*>(at));
      for (int w = 0; w < words(kFormat); w += 4) {
        const Packed<uint32_t> four = from[w / 4];
        for (int k = 0; k < 4; ++k) word[w + k] = four.x[k];
      }
    } else {
      for (int l = 0; l < kEach; ++l) {
        if constexpr (kFormat == GA_F32)
          word[l] = bits_of(at[l * kApart]);
        else
          word[l] = at[l * kApart];
      }
    }
  }

  template <int32_t kFormat>
  GA_DEVICE void store(void* data, int i) const {
    using Stored = typename Dtype<kFormat>::Stored;
    Stored* const at = global(static_cast<Stored*>(data) + i);
    if constexpr (kWhole) {
      auto* const to = reinterpret_cast<Packed<uint32_t>*>(at);
      for (int w = 0; w < words(kFormat); w += 4) {
        const Packed<uint32_t> four = {{word[w], word[w + 1], word[w + 2], word[w + 3]}};
#ifdef __CUDACC__
        store_global(&to[w / 4], four.x);
#else
        to[w / 4] = four;
#endif
      }
    } else {
      for (int l = 0; l < kEach; ++l) {
        if constexpr (kFormat == GA_F32)
          at[l * kApart] = float_of(word[l]);
        else
          at[l * kApart] = static_cast<uint16_t>(word[l]);
      }
    }
  }

  template <int32_t kFormat>
  GA_DEVICE float get(int l) const {
    if constexpr (kFormat == GA_F32)
      return float_of(word[l]);
    else if constexpr (kWhole)
      return float_of(l % 2 == 0 ? word[l / 2] << 16 : word[l / 2] & 0xffff0000);
    else
      return from_bf16(static_cast<uint16_t>(word[l]));
  }

  // random: rounds to bf16.
  template <int32_t kFormat>
  GA_DEVICE void set(int l, float x, uint32_t random) {
    if constexpr (kFormat == GA_F32) {
      word[l] = bits_of(x);
    } else {
      const uint32_t bits = to_bf16(x, random);
      if constexpr (!kWhole)
        word[l] = bits;
      else if (l % 2 == 0)
        word[l / 2] = (word[l / 2] & 0xffff0000) | bits;
      else
        word[l / 2] = (word[l / 2] & 0xffff) | bits << 16;
    }
  }

  // From one of two formats, as floats.
  GA_DEVICE void load_floats(const void* data, bool is_bf16, int i) {
    if (!is_bf16) return load<GA_F32>(data, i);
    Eight low;
    low.template load<GA_BF16>(data, i);
    for (int l = 0; l < kEach; ++l) word[l] = bits_of(low.template get<GA_BF16>(l));
  }

 private:
  static constexpr int words(int32_t format) { return format == GA_BF16 ? kEach / 2 : kEach; }
};

// In place of random bits: rounds to the nearest bf16.
GA_DEVICE uint32_t to_nearest(float x) { return 0x7fff + (bits_of(x) >> 16 & 1); }

// The arrays of an update from an element of the parameter on. kParam and kState are the formats of the parameter and
// of its state, GA_F32 or GA_BF16. The gradient has either format, and a rounded copy is of bf16.
template <class Op, int32_t kParam, int32_t kState, bool kWhole>
class MixedArrays {
 public:
  using Elements = Eight<kWhole>;
  static constexpr int kSlots = kSlotsOf<Op, false>;
  static_assert(kSlots <= 2, "a random number rounds two slots");

  GA_DEVICE MixedArrays(const UpdateTask& task, const ParamPlan& plan, int64_t first)
      : gradient_(
            advanced(task.gradient.source.data, task.gradient.source.format, task.first + first)),
        param_(advanced(task.param.data, kParam, first)),
        copy_(task.copy.data ? advanced(task.copy.data, GA_BF16, first) : nullptr),
        index_(static_cast<uint32_t>(task.first + first)),
        of_copy_(plan.copy_key, high(task.first + first)),
        of_state_(plan.state_key, high(task.first + first)),
        stochastic_(task.stochastic),
        is_bf16_(task.gradient.source.format == GA_BF16) {
    for (int k = 0; k < kSlots; ++k) state_[k] = advanced(task.state[k].data, kState, first);
  }

  // Whether the arrays are so, and the indices of the n elements from `first` on differ in the lower half alone.
  GA_DEVICE bool fits(const UpdateTask& task, int64_t first, int n) const {
    const Source& g = task.gradient.source;
    bool good = high(task.first + first) == high(task.first + first + n - 1) && g.data &&
                (g.format == GA_F32 || g.format == GA_BF16) && task.param.format == kParam &&
                is_whole(gradient_) && is_whole(param_);
    if (copy_) good = good && kParam == GA_F32 && task.copy.format == GA_BF16 && is_whole(copy_);
    for (int k = 0; k < kSlots; ++k)
      good = good && task.state[k].format == kState && is_whole(state_[k]);
    return good;
  }

  // Updates Elements from element i on.
  GA_DEVICE void update(const Op& op, const View<float>& view, int i) const {
    Elements g, p, s[kSlots + 1], c;
    p.template load<kParam>(param_, i);
    for (int k = 0; k < kSlots; ++k) s[k].template load<kState>(state_[k], i);
    g.load_floats(gradient_, is_bf16_, i);  // last, because it waits
    for (int l = 0; l < kEach; ++l) {
      const uint32_t index = index_ + static_cast<uint32_t>(i + l * Elements::kApart);
      float slots[kSlots + 1];
      for (int k = 0; k < kSlots; ++k) slots[k] = s[k].template get<kState>(l);
      const float x = op(p.template get<kParam>(l), view(g.template get<GA_F32>(l)), slots);
      const uint32_t random = kState == GA_BF16 ? of_state_(index) : 0;
      for (int k = 0; k < kSlots; ++k) s[k].template set<kState>(l, slots[k], random >> 16 * k);
      const uint32_t rounding = stochastic_ ? of_copy_(index) : to_nearest(x);
      p.template set<kParam>(l, x, rounding);
      c.template set<GA_BF16>(l, x, rounding);
    }
    for (int k = 0; k < kSlots; ++k) s[k].template store<kState>(state_[k], i);
    p.template store<kParam>(param_, i);
    if (kParam == GA_F32 && copy_) c.template store<GA_BF16>(copy_, i);
  }

 private:
  GA_DEVICE static uint64_t high(int64_t index) { return static_cast<uint64_t>(index) >> 32; }
  GA_DEVICE static bool is_whole(const void* at) { return !kWhole || is_aligned(at, GA_F32); }

  const void* gradient_;
  void* param_;
  void* state_[kSlots + 1];
  void* copy_;
  uint32_t index_;  // of the first element in the random bits; its lower half
  Chance of_copy_, of_state_;
  bool stochastic_, is_bf16_;
};

template <class Op>
struct UpdateMixed {
  static constexpr int kBlocks = Op::slots == 0 ? 3 : 2;
  const UpdateTask* tasks;
  ListPart list;
  Pieces pieces;

  GA_DEVICE void operator()(Block& block) const {
    each_piece(block, tasks, list, pieces, kUpdate | kFollow,
               [&](const UpdateTask& task, const ParamPlan& plan, int64_t first, int n) {
                 if ((plan.actions & kUpdate) != 0)
                   update_piece(block, task, plan, first, n);
                 else
                   follow_piece<float>(block, task, plan, first, n);
               });
  }

 private:
  GA_DEVICE static void update_piece(Block& block, const UpdateTask& task, const ParamPlan& plan,
                                     int64_t first, int n) {
    follow_data(block, task, first, n);
    const int done = update_fitting(block, task, plan, first, n);
    block.each([&](int thread) {
      update_any<Op>(task, plan, false, first + done, n - done, 4 * thread, 4 * kThreads);
      if (task.average.data)  // update_any() has moved those of its elements
        move_average<float>(task, plan, first, done, 4 * thread, 4 * kThreads);
    });
  }

  // Returns how many elements are updated, from `first` on: none if the arrays are not MixedArrays.
  GA_DEVICE static int update_fitting(Block& block, const UpdateTask& task, const ParamPlan& plan,
                                      int64_t first, int n) {
    const bool low = task.param.format == GA_BF16;
    if constexpr (Op::slots > 0) {
      if (task.state[0].format == GA_BF16)
        return low ? update_as<GA_BF16, GA_BF16>(block, task, plan, first, n)
                   : update_as<GA_F32, GA_BF16>(block, task, plan, first, n);
    }
    return low ? update_as<GA_BF16, GA_F32>(block, task, plan, first, n)
               : update_by<GA_F32, GA_F32, false>(block, task, plan, first, n);
  }

  template <int32_t kParam, int32_t kState>
  GA_DEVICE static int update_as(Block& block, const UpdateTask& task, const ParamPlan& plan,
                                 int64_t first, int n) {
    const int done = update_by<kParam, kState, true>(block, task, plan, first, n);
    return done > 0 ? done : update_by<kParam, kState, false>(block, task, plan, first, n);
  }

  template <int32_t kParam, int32_t kState, bool kWhole>
  GA_DEVICE static int update_by(Block& block, const UpdateTask& task, const ParamPlan& plan,
                                 int64_t first, int n) {
    using Elements = Eight<kWhole>;
    const MixedArrays<Op, kParam, kState, kWhole> arrays(task, plan, first);
    if (!arrays.fits(task, first, n)) return 0;
    const Op op = op_of<Op>(plan);
    const View<float> view(task.gradient);
    const int done = n / kRound * kRound;
    block.each([&](int thread) {
      GA_ROLLED
      for (int i = Elements::first(thread); i < done; i += kRound) arrays.update(op, view, i);
    });
    return done;
  }
};

}  // namespace

bool is_mixed(const UpdateTask& task) {
  if (task.op < 0 || task.f64 || task.rows || task.count < kRound) return false;
  bool mixed = false;
  with_op(AllOps<float>(), task.op, [&](auto tag) {
    using Op = typename decltype(tag)::type;
    if constexpr (kIsMixed<Op>) {
      const bool copied = task.copy.data != nullptr;
      const auto is_known = [](const Array& a) {
        return a.format == GA_F32 || a.format == GA_BF16;
      };
      const auto is_float = [](const Array& a) {
        return a.format == GA_F32 && is_aligned(a.data, GA_F32);
      };
      bool known = is_known(task.param) &&
                   (!copied || (task.param.format == GA_F32 && task.copy.format == GA_BF16));
      bool floats = is_float(task.param) && (!task.average.data || is_float(task.average)) &&
                    (!copied || (is_aligned(task.copy.data, GA_BF16) && !task.stochastic));
      for (int k = 0; k < Op::slots; ++k) {
        known = known && is_known(task.state[k]);
        floats = floats && is_float(task.state[k]);
      }
      mixed = known && !floats;
    }
  });
  return mixed;
}

void update_mixed(const Queue& queue, const UpdateTask* tasks, const ListPart& list) {
  with_op(AllOps<float>(), list.op, [&](auto tag) {
    using Op = typename decltype(tag)::type;
    if constexpr (kIsMixed<Op>) {
      using Kernel = UpdateMixed<Op>;
      with_pieces<Kernel>(queue, list, [&](const Pieces& pieces, int64_t blocks) {
        launch(Kernel{tasks, list, pieces}, blocks, queue.stream);
      });
    }
  });
}

}  // namespace ga::cuda
