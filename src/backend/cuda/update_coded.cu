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

constexpr int kBlockSize = static_cast<int>(kCodeBlock);

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

// The arrays of a pass from element `first` of the parameter on, which begins a block. Slots that are not in 8 bits
// are aligned floats.
template <class Op, bool kMeasuring>
class CodedArrays {
 public:
  static constexpr Pass pass = pass_of<Op, kMeasuring>;
  static constexpr int kSlots = kSlotsOf<Op, kMeasuring>;
  static_assert(!Op::factored && !Op::row_state && pass.writes_state);

  // Four elements, as they are stored.
  struct Raw {
    typename Reader<float>::Raw gradient, param;
    Four<float> floats[kSlots];
    uint32_t codes[kSlots];
  };
  struct Scales {
    float of[kSlots];
  };

  // source: the gradient's.
  GA_DEVICE CodedArrays(const UpdateTask& task, const ParamPlan& plan, const Source& source,
                        int64_t first)
      : gradient_(source, task.first + first),
        param_(task.param, first),
        index_(static_cast<uint64_t>(task.first + first)),
        key_(plan.state_key) {
    each_slot<Op, kMeasuring>([&](auto slot) {
      if constexpr (is_coded_slot<Op>(slot))
        coded_[slot] = CodedArray(task.state[slot], task.state[kMaxSlots + slot], first);
      else
        floats_[slot] = static_cast<float*>(task.state[slot].data) + first;
    });
  }

  // Those of the block at element i.
  GA_DEVICE Scales fetch_scales(int i) const {
    Scales scales = {};
    each_slot<Op, kMeasuring>([&](auto slot) {
      if constexpr (is_coded_slot<Op>(slot)) scales.of[slot] = *coded_[slot].scale_at(i);
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
    if (pass.parameter) raw.param = param_.fetch(i, count);
    if (pass.gradient) raw.gradient = gradient_.fetch(i, count);
    return raw;
  }

  GA_DEVICE void unpack(const Raw& raw, const Scales& scales, int count, Four<float>& g,
                        Four<float>& p, Four<float>* s) const {
    g = p = {};
    if (pass.gradient) g = gradient_.unpack(raw.gradient, count);
    if (pass.parameter) p = param_.unpack(raw.param, count);
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

  // Writes the scales of the block at element i.
  GA_DEVICE void store_scales(int i, const uint32_t* largest) const {
    each_slot<Op, kMeasuring>([&](auto slot) {
      if constexpr (is_coded_slot<Op>(slot))
        *coded_[slot].scale_at(i) = scale_of_block(float_of(largest[slot]));
    });
  }

  // Writes the codes of elements [i, i + count) of a block with these largest magnitudes.
  GA_DEVICE void store_codes(int i, int count, const Four<float>* s,
                             const uint32_t* largest) const {
    store_pair<0>(i, count, s, largest);
    if constexpr (kSlots > 2) store_pair<2>(i, count, s, largest);
  }

 private:
  // Slots kFirst and kFirst + 1, which share random bits.
  template <int kFirst>
  GA_DEVICE void store_pair(int i, int count, const Four<float>* s, const uint32_t* largest) const {
    constexpr bool kFirstIs = is_coded_slot<Op>(kFirst);
    constexpr bool kSecondIs = kFirst + 1 < kSlots && is_coded_slot<Op>(kFirst + 1);
    if constexpr (kFirstIs || kSecondIs) {
      const uint64_t index = index_ + static_cast<uint64_t>(i);
      Random random_of(key_ + kFirst, index);
      Four<uint32_t> random;
      for (int l = 0; l < 4; ++l) random.x[l] = random_of(index + static_cast<uint64_t>(l));
      if constexpr (kFirstIs) store_slot<kFirst>(i, count, s, largest, random);
      if constexpr (kSecondIs) store_slot<kFirst + 1>(i, count, s, largest, random);
    }
  }
  template <int kSlot>
  GA_DEVICE void store_slot(int i, int count, const Four<float>* s, const uint32_t* largest,
                            const Four<uint32_t>& random) const {
    const CodeWriter<is_signed_slot<Op>(kSlot), kSlot % 2> write(largest[kSlot]);
    coded_[kSlot].store(i, count, write(s[kSlot], random));
  }

  Reader<float> gradient_, param_;
  CodedArray coded_[kSlots];
  float* floats_[kSlots];
  uint64_t index_;  // of the first element in the random bits
  uint64_t key_;
};

// At most a block of state: elements [begin, begin + count) of CodedArrays.
struct CodedPart {
  int begin, count;

  // Of four elements at i, how many belong to it.
  GA_DEVICE int of_four(int i) const {
    const int left = count - i;
    return left < 0 ? 0 : left < 4 ? left : 4;
  }
};

// ---- Updates ------------------------------------------------------------------------------------

constexpr int kWarps = kThreads / kLanes;
constexpr int kRound = kWarps * kBlockSize;  // a warp has a block
constexpr int kFours = kBlockSize / (4 * kLanes);

template <class Op>
struct UpdateCoded {
  static constexpr int kBlocks = 2;
  static constexpr int kSlots = kSlotsOf<Op, false>;
  using Arrays = CodedArrays<Op, false>;
  const UpdateTask* tasks;
  ListPart list;
  Pieces pieces;
  bool rows;

  GA_DEVICE void operator()(Block& block) const {
    if (rows) return update_rows(block);
    each_piece(block, tasks, list, pieces, kUpdate | kFollow,
               [&](const UpdateTask& task, const ParamPlan& plan, int64_t first, int n) {
                 if ((plan.actions & kUpdate) != 0)
                   update_piece(task, plan, first, n);
                 else
                   follow_piece<float>(block, task, plan, first, n);
               });
  }

 private:
  // State of a thread's elements between the two phases.
  struct Kept {
    Four<float> s[kFours][kSlots];
  };

  GA_DEVICE static void update_piece(const UpdateTask& task, const ParamPlan& plan, int64_t first,
                                     int n) {
    const Op op = op_of<Op>(plan);
    const View<float> view(task.gradient);
    const Arrays arrays(task, plan, task.gradient.source, first);
    GA_ROLLED
    for (int round = 0; round < n; round += kRound) {
      const auto part_of = [&](int thread) {
        const int begin = round + thread / kLanes * kBlockSize;
        return CodedPart{begin, n - begin < kBlockSize ? n - begin : kBlockSize};
      };
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
      const int64_t of_row = task.columns / kCodeBlock, parts = task.rows->size * of_row;
      GA_ROLLED
      for (int64_t r = block.index() * kWarps; r < parts; r += block.count() * kWarps) {
        const auto first_of = [&](int thread) {
          const int64_t part = smaller(r + thread / kLanes, parts - 1),
                        row = quotient(part, of_row);
          return task.rows->entries[row].row * task.columns + (part - row * of_row) * kCodeBlock;
        };
        const auto part_of = [&](int thread) {
          return CodedPart{0, r + thread / kLanes < parts ? kBlockSize : 0};
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
  GA_DEVICE static void update_part(const UpdateTask& task, const ParamPlan& plan, const Op& op,
                                    const View<float>& view, bool rows, const Arrays& at,
                                    int64_t first, const CodedPart& part, int thread, Kept& kept,
                                    uint32_t* largest) {
    if (part.count <= 0) return;
    if (task.follows)
      follow_data(task, first + part.begin, part.count, element(thread, 0), 4 * kLanes);
    const typename Arrays::Scales scales = at.fetch_scales(part.begin);
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

  GA_DEVICE static void store_part(const Arrays& at, const CodedPart& part, int thread,
                                   const Kept& kept, const uint32_t* largest) {
    if (part.count > 0 && thread % kLanes == 0) at.store_scales(part.begin, largest);
    for (int f = 0; f < kFours; ++f) {
      const int i = element(thread, f), count = part.of_four(i);
      if (count > 0) at.store_codes(part.begin + i, count, kept.s[f], largest);
    }
  }
};

// ---- First passes -------------------------------------------------------------------------------

// As Measure. A lane group has a tile, since that is the order of the sums, and the blocks of the tile one after the
// other. A thread measures its elements twice: first for the largest magnitudes, since so many numbers would not
// stay in registers, and then for all else.
template <class Op>
struct MeasureCoded {
  static constexpr int kBlocks = 3;
  static constexpr int kSlots = kSlotsOf<Op, true>;
  using Arrays = CodedArrays<Op, true>;
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
    const int tiles = (n + kTile - 1) / kTile;
    GA_ROLLED
    for (int round = 0; round < tiles; round += kLaneGroups) {
      PerThread<Sums> squares;
      PerThread<Scales> scales;
      PerThread<Quad> lanes[Op::norms];
      GA_ROLLED
      for (int of_tile = 0; of_tile < kTile; of_tile += kBlockSize) {
        const auto part_of = [&](int thread) {
          const int begin = (round + thread / kGroup) * kTile + of_tile;
          return CodedPart{begin, n - begin < kBlockSize ? n - begin : kBlockSize};
        };
        with_largest<kGroup, kSlots>(
            [&](int thread, uint32_t* largest) {
              const CodedPart part = part_of(thread);
              if (of_tile == 0) squares[thread] = {};
              if (part.count > 0) scales[thread] = arrays.fetch_scales(part.begin);
              each_measured(op, view, arrays, scales[thread], part, thread,
                            [&](int, int count, const Four<float>* s, const Four<float>*) {
                              arrays.add_magnitudes(largest, s, count);
                            });
            },
            [&](int thread, const uint32_t* largest) {
              const CodedPart part = part_of(thread);
              Sums& sum = squares[thread];
              each_measured(op, view, arrays, scales[thread], part, thread,
                            [&](int i, int count, const Four<float>* s, const Four<float>* x) {
                              arrays.store_floats(i, count, s);
                              arrays.store_codes(i, count, s, largest);
                              for (int k = 0; k < Op::norms; ++k) sum.of[k].add(x[k], count);
                              if (Op::emits) emit(task, offset, i, count, x[0]);
                            });
              if (part.count > 0 && thread % kGroup == 0) arrays.store_scales(part.begin, largest);
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

  // f(i, count, state, x) for the elements of a thread, as measured.
  template <class F>
  GA_DEVICE static void each_measured(const Op& op, const View<float>& view, const Arrays& at,
                                      const Scales& scales, const CodedPart& part, int thread,
                                      F f) {
    GA_ROLLED
    for (int i = 4 * (thread % kGroup); i < part.count; i += kLanes) {
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
