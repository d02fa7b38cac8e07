// SPDX-License-Identifier: Apache-2.0
// Updates, and first passes, of parameters with state in 8 bits. They have kernels of their own, because the codes of
// a block of state can be written only when its largest magnitude is known: threads that share a block work in two
// phases. The other arrays may have any format.
#include "backend/cuda/codes.hpp"
#include "backend/cuda/update.hpp"

namespace ga::cuda {
namespace {

// Whether a pass of an Op works on state that may be in 8 bits.
template <class Op, bool kMeasuring>
constexpr bool kIsCoded = std::is_same_v<typename Op::Real, float>&& has_codes(Op::codes) &&
                          kSlotsOf<Op, kMeasuring> > 0 && (!kMeasuring || Op::norms > 0);

template <class Op>
constexpr bool is_coded_slot(int slot) {
  return Op::codes.of[slot] != Code::kNone;
}
template <class Op>
constexpr bool is_signed_slot(int slot) {
  return Op::codes.of[slot] == Code::kSigned;
}

// f(slot) for each of the slots of a pass, where slot is a constant.
template <class Op, bool kMeasuring, class F>
GA_DEVICE void each_slot(F f) {
  constexpr int kSlots = kSlotsOf<Op, kMeasuring>;
  if constexpr (kSlots > 0) f(std::integral_constant<int, 0>());
  if constexpr (kSlots > 1) f(std::integral_constant<int, 1>());
  if constexpr (kSlots > 2) f(std::integral_constant<int, 2>());
}

// The state of a pass from element `first` of the parameter on, which begins a block. Slots that are not in 8 bits are
// aligned floats.
template <class Op, bool kMeasuring>
class CodedState {
 public:
  static constexpr Pass pass = pass_of<Op, kMeasuring>;
  static constexpr int kSlots = kSlotsOf<Op, kMeasuring>;
  static_assert(!Op::factored && !Op::row_state && pass.writes_state);

  // Four elements, as they are stored.
  struct Raw {
    Four<float> floats[kSlots];
    uint32_t codes[kSlots];
  };
  struct Scales {
    float of[kSlots];
  };

  GA_DEVICE CodedState(const UpdateTask& task, const ParamPlan& plan, int64_t first)
      : index_(static_cast<uint64_t>(task.first + first)),
        key_(plan.state_key),
        chance_{Chance(key_, index_ >> 32), Chance(key_ + 2, index_ >> 32)} {
    each_slot<Op, kMeasuring>([&](auto slot) {
      if constexpr (is_coded_slot<Op>(slot))
        coded_[slot] = CodedArray(task.state[slot], task.scales[slot], first, task.code_block);
      else
        floats_[slot] = static_cast<float*>(task.state[slot].data) + first;
    });
  }

  // The scales of a block, counted from the first.
  GA_DEVICE Scales fetch_scales(int of_block) const {
    Scales scales = {};
    each_slot<Op, kMeasuring>([&](auto slot) {
      if constexpr (is_coded_slot<Op>(slot)) scales.of[slot] = *coded_[slot].scale_at(of_block);
    });
    return scales;
  }

  GA_DEVICE Raw fetch(int i, int count) const {
    Raw raw = {};
    each_slot<Op, kMeasuring>([&](auto slot) {
      if constexpr (is_coded_slot<Op>(slot))
        raw.codes[slot] = coded_[slot].load(i, count);
      else
        raw.floats[slot] = load_some<float, GA_F32>(floats_[slot], true, i, count);
    });
    return raw;
  }

  GA_DEVICE static void unpack(const Raw& raw, const Scales& scales, Four<float>* s) {
    each_slot<Op, kMeasuring>([&](auto slot) {
      if constexpr (is_coded_slot<Op>(slot))
        s[slot] = read_codes<is_signed_slot<Op>(slot)>(raw.codes[slot], scales.of[slot]);
      else
        s[slot] = raw.floats[slot];
    });
  }

  // Writes the slots that are not in 8 bits.
  GA_DEVICE void store_floats(int i, int count, const Four<float>* s) const {
    each_slot<Op, kMeasuring>([&](auto slot) {
      if constexpr (!is_coded_slot<Op>(slot))
        store_some<float, GA_F32>(floats_[slot], true, i, count, s[slot]);
    });
  }

  // Adds four elements to the largest magnitudes of their block, one for each slot.
  GA_DEVICE static void add_magnitudes(uint32_t* largest, const Four<float>* s, int count) {
    each_slot<Op, kMeasuring>([&](auto slot) {
      if constexpr (is_coded_slot<Op>(slot))
        largest[slot] = larger_magnitude(largest[slot], s[slot], count);
    });
  }

  // A block of each slot.
  struct Blocks {
    BlockScale of[kSlots];
  };
  GA_DEVICE static Blocks blocks_of(const uint32_t* largest) {
    Blocks block = {};
    each_slot<Op, kMeasuring>([&](auto slot) {
      if constexpr (is_coded_slot<Op>(slot)) block.of[slot] = BlockScale(largest[slot]);
    });
    return block;
  }

  // Writes the scales of a block, counted from the first.
  GA_DEVICE void store_scales(int of_block, const Blocks& block) const {
    each_slot<Op, kMeasuring>([&](auto slot) {
      if constexpr (is_coded_slot<Op>(slot))
        *coded_[slot].scale_at(of_block) = block.of[slot].scale;
    });
  }

  // Writes the codes of elements [i, i + count) of a block.
  GA_DEVICE void store_codes(int i, int count, const Four<float>* s, const Blocks& block) const {
    store_pair<0>(i, count, s, block);
    if constexpr (kSlots > 2) store_pair<2>(i, count, s, block);
  }

 private:
  // Slots kFirst and kFirst + 1, which share random bits.
  template <int kFirst>
  GA_DEVICE void store_pair(int i, int count, const Four<float>* s, const Blocks& block) const {
    constexpr bool kFirstIs = is_coded_slot<Op>(kFirst);
    constexpr bool kSecondIs = kFirst + 1 < kSlots && is_coded_slot<Op>(kFirst + 1);
    if constexpr (kFirstIs || kSecondIs) {
      // A share of a parameter consists of whole blocks, so that the indices of four elements have the same upper half.
      const uint64_t index = index_ + static_cast<uint64_t>(i);
      const Chance chance =
          index >> 32 == index_ >> 32 ? chance_[kFirst / 2] : Chance(key_ + kFirst, index >> 32);
      Four<uint32_t> random;
      for (int l = 0; l < 4; ++l)
        random.x[l] = chance(static_cast<uint32_t>(index) + static_cast<uint32_t>(l));
      if constexpr (kFirstIs) store_slot<kFirst>(i, count, s, block, random);
      if constexpr (kSecondIs) store_slot<kFirst + 1>(i, count, s, block, random);
    }
  }
  template <int kSlot>
  GA_DEVICE void store_slot(int i, int count, const Four<float>* s, const Blocks& block,
                            const Four<uint32_t>& random) const {
    coded_[kSlot].store(
        i, count,
        write_codes<is_signed_slot<Op>(kSlot), kSlot % 2>(s[kSlot], block.of[kSlot], random));
  }

  CodedArray coded_[kSlots];
  float* floats_[kSlots];
  uint64_t index_;  // of the first element in the random bits
  uint64_t key_;
  Chance chance_[2];  // of slots 0 and 1, and of slot 2, at that index
};

// The state, and the other arrays that a pass reads, which may have any format.
template <class Op, bool kMeasuring>
class CodedArrays : public CodedState<Op, kMeasuring> {
 public:
  using State = CodedState<Op, kMeasuring>;
  struct Raw {
    typename State::Raw state;
    typename Reader<float>::Raw gradient, param;
  };

  // source: the gradient's.
  GA_DEVICE CodedArrays(const UpdateTask& task, const ParamPlan& plan, const Source& source,
                        int64_t first)
      : State(task, plan, first),
        gradient_(source, task.first + first),
        param_(task.param, first) {}

  GA_DEVICE Raw fetch(int i, int count) const {
    Raw raw = {};
    raw.state = State::fetch(i, count);
    if (State::pass.parameter) raw.param = param_.fetch(i, count);
    if (State::pass.gradient) raw.gradient = gradient_.fetch(i, count);
    return raw;
  }

  GA_DEVICE void unpack(const Raw& raw, const typename State::Scales& scales, int count,
                        Four<float>& g, Four<float>& p, Four<float>* s) const {
    g = p = {};
    if (State::pass.gradient) g = gradient_.unpack(raw.gradient, count);
    if (State::pass.parameter) p = param_.unpack(raw.param, count);
    State::unpack(raw.state, scales, s);
  }

 private:
  Reader<float> gradient_, param_;
};

// A block of state of CodedArrays: which it is, and its elements [begin, begin + count).
struct CodedPart {
  int number, begin, count;

  // Of blocks of `size` elements, of which the last may have fewer, up to element `end`.
  GA_DEVICE CodedPart(int of_block, int size, int end)
      : number(of_block), begin(of_block * size), count(end - begin < size ? end - begin : size) {}

  // Of four elements at i, how many belong to it.
  GA_DEVICE int of_four(int i) const {
    const int left = count - i;
    return left < 0 ? 0 : left < 4 ? left : 4;
  }
};

// ---- Updates ------------------------------------------------------------------------------------

constexpr int kWarps = kThreads / kLanes;
constexpr int kRound = kWarps * kCodeBlock;  // a warp has a block
constexpr int kFours = kCodeBlock / (4 * kLanes);

// The arrays of an update beside its state, if they are aligned: a parameter of kParam, which is GA_F32 or GA_BF16, a
// gradient of f32 or bf16, and a rounded copy of bf16, or none.
template <int32_t kParam>
class AlignedArrays {
 public:
  GA_DEVICE AlignedArrays(const UpdateTask& task, const ParamPlan& plan, int64_t first)
      : gradient_(
            advanced(task.gradient.source.data, task.gradient.source.format, task.first + first)),
        param_(advanced(task.param.data, kParam, first)),
        copy_(task.copy.data ? advanced(task.copy.data, GA_BF16, first) : nullptr),
        index_(static_cast<uint64_t>(task.first + first)),
        key_(plan.copy_key),
        chance_(key_, index_ >> 32),
        stochastic_(task.stochastic),
        is_bf16_(task.gradient.source.format == GA_BF16) {}

  // Whether the arrays are so.
  GA_DEVICE bool fits(const UpdateTask& task) const {
    const Source& g = task.gradient.source;
    return task.code_block == kCodeBlock && g.data && (g.format == GA_F32 || is_bf16_) &&
           is_aligned(gradient_, g.format) && task.param.format == kParam &&
           is_aligned(param_, kParam) &&
           (!copy_ ||
            (kParam == GA_F32 && task.copy.format == GA_BF16 && is_aligned(copy_, GA_BF16)));
  }

  GA_DEVICE Four<float> gradient(int i) const {
    return is_bf16_ ? load_whole<float, GA_BF16>(gradient_, i)
                    : load_whole<float, GA_F32>(gradient_, i);
  }
  GA_DEVICE Four<float> param(int i) const { return load_whole<float, kParam>(param_, i); }

  GA_DEVICE void store(int i, const Four<float>& p) const {
    if constexpr (kParam == GA_F32) {
      store_whole<float, GA_F32>(param_, i, p);
      if (copy_) store_rounded(copy_, i, p);
    } else {
      store_rounded(param_, i, p);
    }
  }

 private:
  GA_DEVICE void store_rounded(void* at, int i, const Four<float>& p) const {
    if (!stochastic_) return store_whole<float, GA_BF16>(at, i, p);
    const uint64_t index = index_ + static_cast<uint64_t>(i);
    const Chance chance = index >> 32 == index_ >> 32 ? chance_ : Chance(key_, index >> 32);
    Packed<uint16_t> bits;
    for (int l = 0; l < 4; ++l)
      bits.x[l] = to_bf16(p.x[l], chance(static_cast<uint32_t>(index) + static_cast<uint32_t>(l)));
    auto* const to = global(reinterpret_cast<Packed<uint16_t>*>(static_cast<uint16_t*>(at) + i));
#ifdef __CUDACC__
    store_global(to, bits.x);
#else
    *to = bits;
#endif
  }

  const void* gradient_;
  void* param_;
  void* copy_;
  uint64_t index_;  // of the first element in the random bits
  uint64_t key_;
  Chance chance_;  // at that index
  bool stochastic_, is_bf16_;
};

template <class Op>
struct UpdateCoded {
  static constexpr int kBlocks = 2;
  static constexpr int kSlots = kSlotsOf<Op, false>;
  using Arrays = CodedArrays<Op, false>;
  using State = CodedState<Op, false>;
  const UpdateTask* tasks;
  ListPart list;
  Pieces pieces;
  bool rows;

  GA_DEVICE void operator()(Block& block) const {
    if (rows) return update_rows(block);
    each_piece(block, tasks, list, pieces, kUpdate | kFollow,
               [&](const UpdateTask& task, const ParamPlan& plan, int64_t first, int n) {
                 if ((plan.actions & kUpdate) != 0)
                   update_piece(block, task, plan, first, n);
                 else
                   follow_piece<float>(block, task, plan, first, n);
               });
  }

 private:
  // State of a thread's elements between the two phases.
  struct Kept {
    Four<float> s[kFours][kSlots];
  };

  GA_DEVICE static void update_piece(Block& block, const UpdateTask& task, const ParamPlan& plan,
                                     int64_t first, int n) {
    follow_data(block, task, first, n);
    int done = update_aligned<GA_F32>(task, plan, first, n);
    if (done == 0) done = update_aligned<GA_BF16>(task, plan, first, n);
    if (done > 0 && task.average.data)
      block.each([&](int thread) {
        move_average<float>(task, plan, first, done, 4 * thread, 4 * kThreads);
      });
    const Op op = op_of<Op>(plan);
    const View<float> view(task.gradient);
    const Arrays arrays(task, plan, task.gradient.source, first);
    const int size = task.code_block;
    GA_ROLLED
    for (int round = done / size; round * size < n; round += kWarps) {
      const auto part_of = [&](int thread) { return CodedPart(round + thread / kLanes, size, n); };
      PerThread<Kept> kept;
      with_largest<kLanes, kSlots>(
          [&](int thread, uint32_t* largest) {
            update_part(task, plan, op, view, false, arrays, first, part_of(thread), thread,
                        kept[thread], largest);
          },
          [&](int thread, const uint32_t* largest) {
            store_part(arrays, part_of(thread), thread, kept[thread], largest);
          });
    }
  }

  // Returns how many elements are updated, from `first` on, but for averages: none if the arrays are not
  // AlignedArrays.
  template <int32_t kParam>
  GA_DEVICE static int update_aligned(const UpdateTask& task, const ParamPlan& plan, int64_t first,
                                      int n) {
    const AlignedArrays<kParam> at(task, plan, first);
    if (!at.fits(task)) return 0;
    const Op op = op_of<Op>(plan);
    const View<float> view(task.gradient);
    const State state(task, plan, first);
    const int done = n / kRound * kRound;
    GA_ROLLED
    for (int round = 0; round < done; round += kRound) {
      const auto begin_of = [&](int thread) { return round + thread / kLanes * kCodeBlock; };
      PerThread<Kept> kept;
      with_largest<kLanes, kSlots>(
          [&](int thread, uint32_t* largest) {
            const int begin = begin_of(thread);
            const typename State::Scales scales = state.fetch_scales(begin / kCodeBlock);
            typename State::Raw raw[kFours];
            Four<float> g[kFours], p[kFours];
            GA_UNROLLED
            for (int f = 0; f < kFours; ++f) {
              raw[f] = state.fetch(begin + element(thread, f), 4);
              p[f] = at.param(begin + element(thread, f));
            }
            GA_UNROLLED
            for (int f = 0; f < kFours; ++f) g[f] = at.gradient(begin + element(thread, f));
            GA_UNROLLED
            for (int f = 0; f < kFours; ++f) {
              const int i = begin + element(thread, f);
              Four<float>* const s = kept[thread].s[f];
              State::unpack(raw[f], scales, s);
              update_four(op, view, g[f], p[f], s);
              state.store_floats(i, 4, s);
              State::add_magnitudes(largest, s, 4);
              at.store(i, p[f]);
            }
          },
          [&](int thread, const uint32_t* largest) {
            const int begin = begin_of(thread);
            const typename State::Blocks block = State::blocks_of(largest);
            if (thread % kLanes == 0) state.store_scales(begin / kCodeBlock, block);
            GA_UNROLLED
            for (int f = 0; f < kFours; ++f)
              state.store_codes(begin + element(thread, f), 4, kept[thread].s[f], block);
          });
    }
    return done;
  }

  // A warp updates a block of a row.
  GA_DEVICE void update_rows(Block& block) const {
    for (int64_t k = 0; k < list.param_count; ++k) {
      const UpdateTask& task = tasks[list.params[k]];
      const ParamPlan& plan = *task.plan;
      if ((plan.actions & kUpdateRows) == 0 || !task.rows) continue;
      const Op op = op_of<Op>(plan);
      const View<float> view(task.gradient);
      Source source = task.gradient.source;
      if (source.format == kSparse) {  // the rows are held
        source.data = static_cast<const SparseRows*>(source.data)->data;
        source.format = GA_F32;
      }
      const int size = task.code_block;
      const int64_t of_row = task.columns / size, parts = task.rows->size * of_row;
      GA_ROLLED
      for (int64_t r = block.index() * kWarps; r < parts; r += block.count() * kWarps) {
        const auto first_of = [&](int thread) {
          const int64_t part = smaller(r + thread / kLanes, parts - 1),
                        row = quotient(part, of_row);
          return task.rows->entries[row].row * task.columns + (part - row * of_row) * size;
        };
        const auto part_of = [&](int thread) {
          return CodedPart(0, size, r + thread / kLanes < parts ? size : 0);
        };
        PerThread<Kept> kept;
        with_largest<kLanes, kSlots>(
            [&](int thread, uint32_t* largest) {
              const int64_t first = first_of(thread);
              update_part(task, plan, op, view, true, Arrays(task, plan, source, first), first,
                          part_of(thread), thread, kept[thread], largest);
            },
            [&](int thread, const uint32_t* largest) {
              store_part(Arrays(task, plan, source, first_of(thread)), part_of(thread), thread,
                         kept[thread], largest);
            });
      }
    }
  }

  GA_DEVICE static int element(int thread, int four) {
    return 4 * (thread % kLanes) + 4 * kLanes * four;
  }

  // The first phase: everything but codes and scales. first: the element of the parameter where `at` begins. rows:
  // the average is updated elsewhere.
  GA_APART static void update_part(const UpdateTask& task, const ParamPlan& plan, const Op& op,
                                   const View<float>& view, bool rows, const Arrays& at,
                                   int64_t first, const CodedPart& part, int thread, Kept& kept,
                                   uint32_t* largest) {
    if (part.count <= 0) return;
    if (rows && task.follows)
      follow_data(task, first + part.begin, part.count, element(thread, 0), 4 * kLanes);
    const typename Arrays::Scales scales = at.fetch_scales(part.number);
    typename Arrays::Raw raw[kFours] = {};
    for (int f = 0; f < kFours; ++f) {
      const int i = element(thread, f), count = part.of_four(i);
      if (count > 0) raw[f] = at.fetch(part.begin + i, count);
    }
    const Writer<float> store(task.param, first, {task.stochastic, plan.copy_key},
                              task.first + first);
    for (int f = 0; f < kFours; ++f) {
      const int i = element(thread, f), count = part.of_four(i);
      if (count == 0) continue;
      Four<float> g, p;
      Four<float>* const s = kept.s[f];
      at.unpack(raw[f], scales, count, g, p, s);
      update_four(op, view, g, p, s);
      at.store_floats(part.begin + i, count, s);
      at.add_magnitudes(largest, s, count);
      const Four<float> stored = store(part.begin + i, count, p);
      if (task.copy.data || task.average.data) {  // the average follows the parameter as stored
        const bool averaged = task.average.data && !rows;
        follow<float>(task, plan, true, averaged, first, part.begin + i, count,
                      averaged ? stored : p);
      }
    }
  }

  GA_APART static void store_part(const State& at, const CodedPart& part, int thread,
                                  const Kept& kept, const uint32_t* largest) {
    const typename State::Blocks block = State::blocks_of(largest);
    if (part.count > 0 && thread % kLanes == 0) at.store_scales(part.number, block);
    for (int f = 0; f < kFours; ++f) {
      const int i = element(thread, f), count = part.of_four(i);
      if (count > 0) at.store_codes(part.begin + i, count, kept.s[f], block);
    }
  }
};

// ---- First passes -------------------------------------------------------------------------------

// The first pass of a layer-wise Op, as Measure. A lane group sums a tile, in the order of all sums, and so has the
// blocks of the tile one after the other. A thread measures its elements of a block twice, first for the largest
// magnitudes and then for everything else: they are too many to be kept in registers.
template <class Op>
struct MeasureCoded {
  static constexpr int kBlocks = 2;
  static constexpr int kSlots = kSlotsOf<Op, true>;
  using Arrays = CodedArrays<Op, true>;
  using State = CodedState<Op, true>;
  const UpdateTask* tasks;
  ListPart list;
  ScalarTables tables;
  unsigned* counter;

  GA_DEVICE void operator()(Block& block) const {
    GA_SHARED ChunkTotals<Op::norms> sums;
    GA_ROLLED
    for (int64_t k = block.index(); k < list.chunk_count; k += block.count()) {
      const ChunkRef at = list.chunks[k];
      const UpdateTask& task = tasks[at.item];
      if ((task.plan->actions & kUpdate) != 0)
        measure_chunk(block, task, *task.plan, at.chunk, sums);
    }
    if (block.last(counter)) fold_measured(block, tables, tasks, list);
  }

 private:
  static constexpr int kGroup = 8;  // threads that have a tile
  using Sums = SquaresOf<float, Op::norms, double>;
  using Scales = typename Arrays::Scales;

  GA_DEVICE static void measure_chunk(Block& block, const UpdateTask& task, const ParamPlan& plan,
                                      int64_t chunk, ChunkTotals<Op::norms>& sums) {
    const int64_t offset = chunk * kChunk;
    const int n = chunk_length(task.count, chunk);
    if (Op::measuring.parameter) follow_data(block, task, offset, n);
    const Op op = op_of<Op>(plan);
    const View<float> view(task.gradient);
    const Arrays arrays(task, plan, task.gradient.source, offset);
    const int tiles = (n + kTile - 1) / kTile, size = task.code_block;
    GA_ROLLED
    for (int round = 0; round < tiles; round += kLaneGroups) {
      PerThread<Sums> squares;
      PerThread<Scales> scales;
      PerThread<Quad> lanes[Op::norms];
      GA_ROLLED
      for (int of_tile = 0; of_tile < kTile; of_tile += size) {
        const auto part_of = [&](int thread) {
          return CodedPart(((round + thread / kGroup) * kTile + of_tile) / size, size, n);
        };
        with_largest<kGroup, kSlots>(
            [&](int thread, uint32_t* largest) {
              const CodedPart part = part_of(thread);
              if (of_tile == 0) squares[thread] = {};
              scales[thread] = part.count > 0 ? arrays.fetch_scales(part.number) : Scales();
              each_measured(op, view, arrays, scales[thread], part, thread,
                            [&](int, int count, const Four<float>* s, const Four<float>*) {
                              arrays.add_magnitudes(largest, s, count);
                            });
            },
            [&](int thread, const uint32_t* largest) {
              const CodedPart part = part_of(thread);
              const typename State::Blocks scale = State::blocks_of(largest);
              Sums& sum = squares[thread];
              each_measured(op, view, arrays, scales[thread], part, thread,
                            [&](int i, int count, const Four<float>* s, const Four<float>* x) {
                              arrays.store_floats(i, count, s);
                              arrays.store_codes(i, count, s, scale);
                              for (int k = 0; k < Op::norms; ++k) sum.of[k].add(x[k], count);
                              if (Op::emits) emit(task, offset, i, count, x[0]);
                            });
              if (part.count > 0 && thread % kGroup == 0) arrays.store_scales(part.number, scale);
              for (int k = 0; k < Op::norms; ++k)
                for (int l = 0; l < 4; ++l) lanes[k][thread].lane[l] = sum.of[k].lane(l);
            });
      }
      for (int k = 0; k < Op::norms; ++k) {
        block.lane_group_totals(lanes[k], [&](int lane_group, double total) {
          if (round + lane_group < tiles) sums.totals[k][round + lane_group] = total;
        });
      }
    }
    take_totals<float>(block, n, Op::norms, sums, [&](const double* total, bool) {
      Partial& partial = task.partials[chunk];
      partial.sum_squares = total[0];
      partial.second_squares = Op::norms == 2 ? total[Op::norms - 1] : 0;
    });
  }

  // f(i, count, state, x) for the elements of a thread, as measured: every eighth four of a tile.
  template <class F>
  GA_DEVICE static void each_measured(const Op& op, const View<float>& view, const Arrays& at,
                                      const Scales& scales, const CodedPart& part, int thread,
                                      F f) {
    GA_ROLLED
    for (int i = 4 * ((thread - part.begin / 4) & (kGroup - 1)); i < part.count; i += kLanes) {
      const int count = part.of_four(i);
      Four<float> g, p, s[kSlots], x[2];
      at.unpack(at.fetch(part.begin + i, count), scales, count, g, p, s);
      measure_four(op, view, g, p, s, x);
      f(part.begin + i, count, s, x);
    }
  }

  GA_DEVICE static void emit(const UpdateTask& task, int64_t first, int i, int count,
                             const Four<float>& x) {
    float* const to = static_cast<float*>(task.emitted) + first;
    store_some<float, GA_F32>(to, is_aligned(to, GA_F32), i, count, x);
  }
};

template <bool kMeasuring>
bool works_on_codes(const UpdateTask& task) {
  if (task.op < 0 || task.f64) return false;
  bool coded = false;
  with_op(AllOps<float>(), task.op, [&](auto tag) {
    using Op = typename decltype(tag)::type;
    if constexpr (kIsCoded<Op, kMeasuring>)
      for (int k = 0; k < Op::slots; ++k) coded = coded || task.state[k].format >= kSignedCodes;
  });
  return coded;
}

}  // namespace

bool is_coded(const UpdateTask& task, bool measuring) {
  return (measuring ? works_on_codes<true> : works_on_codes<false>)(task);
}

void update_coded(const Queue& queue, const UpdateTask* tasks, const ListPart& list) {
  with_op(AllOps<float>(), list.op, [&](auto tag) {
    using Op = typename decltype(tag)::type;
    if constexpr (kIsCoded<Op, false>) {
      using Kernel = UpdateCoded<Op>;
      with_pieces<Kernel>(queue, list, [&](const Pieces& pieces, int64_t blocks) {
        if (list.param_count > 0)
          launch(Kernel{tasks, list, pieces, true}, queue.blocks, queue.stream);
        launch(Kernel{tasks, list, pieces, false}, blocks, queue.stream);
      });
    }
  });
}

void measure_coded(const Queue& queue, const UpdateTask* tasks, const ListPart& list,
                   const ScalarTables& tables) {
  with_op(AllOps<float>(), list.op, [&](auto tag) {
    using Op = typename decltype(tag)::type;
    if constexpr (kIsCoded<Op, true>) {
      using Kernel = MeasureCoded<Op>;
      const int64_t blocks = list.chunk_count > 0 ? chunk_blocks<Kernel>(queue, list.chunk_count)
                                                  : (list.param_count > 0 ? 1 : 0);
      launch(Kernel{tasks, list, tables, queue.counters}, blocks, queue.stream);
    }
  });
}

}  // namespace ga::cuda
