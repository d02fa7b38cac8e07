// SPDX-License-Identifier: Apache-2.0
#include "ranks/transfer.hpp"

#include <algorithm>
#include <cstring>

#include "core/tensor.hpp"
#include "ranks/comm/comm.hpp"

namespace ga {
namespace {

constexpr size_t kGroupBytes = size_t{64} << 20;  // of memory for a group of buckets
constexpr int32_t kFloats[] = {GA_F32, GA_F64, GA_F16, GA_BF16};

int64_t size_of(int32_t dtype) { return dtype_info(dtype).size; }

int32_t added_in(int32_t wire) { return wire == GA_F64 ? GA_F64 : GA_F32; }

FinishTask move(const Array& from, const Array& to, int64_t count) {
  FinishTask task = {};
  task.gradient = identity({from.data, from.format, 1, nullptr});
  task.f64 = from.format == GA_F64;
  task.target = to;
  task.count = count;
  return task;
}

}  // namespace

Transfer::Transfer(Model& model, Comm& comm, const Divisions& divisions,
                   const ga_comm_options& options, std::function<bool(ga_param)> brings)
    : model_(model),
      comm_(comm),
      divisions_(divisions),
      options_(options),
      on_device_(model.config.device != GA_DEVICE_CPU),
      brings_(std::move(brings)),
      buckets_(comm.ranks()),
      adder_(model.backend.get()) {}

int64_t Transfer::bytes() const {
  size_t bytes = room_.bytes() + device_partials_.bytes() + device_pairs_.bytes();
  for (const Buffer& wide : wide_) bytes += wide.bytes();
  return static_cast<int64_t>(bytes);
}

template <class F>
void Transfer::each_own(const Bucket& bucket, F&& f) const {
  for (size_t k = bucket.first; k < bucket.end; ++k)
    if (buckets_.segments()[k].rank == comm_.rank()) f(buckets_.segments()[k]);
}

template <class F>
size_t Transfer::each_of_group(size_t first, F&& f) const {
  const size_t end = buckets_.end_of_group(first);
  for (size_t k = first; k < end; ++k) f(buckets_.list()[k]);
  return end;
}

// ---- Gradients ----------------------------------------------------------------------------------

// The dtype in which a gradient travels to where it is added.
int32_t Transfer::wire_of(const Param& p) const {
  if (p.f64) return GA_F64;
  if (p.pair || adds_there(p.reduction)) return GA_F32;
  if (size_of(p.accumulator_dtype) == 2)
    return model_.config.accumulation == GA_ACCUMULATE_RUNNING_MEAN ? int32_t{GA_F32}
                                                                    : p.accumulator_dtype;
  return options_.wire == GA_COMM_WIRE_BF16 && is_sum(p.reduction) ? GA_BF16 : GA_F32;
}

// Where the sum of a gradient lies: in the accumulator, or in an array of f32.
Array Transfer::reduced(ga_param id) const {
  const Param& p = model_.params[id];
  if (p.fits_accumulator() && !p.pair) return {p.accumulator, p.accumulator_dtype};
  return whole_of({wide_[static_cast<size_t>(id)].data(), GA_F32},
                  divisions_.reduced_range(id).first);
}

// The accumulator of a gradient that travels as it lies.
Array Transfer::accumulator_of(ga_param id) const {
  const Param& p = model_.params[id];
  return {p.accumulator, p.accumulator_dtype};
}

const int64_t* Transfer::contributed_to(ga_param id) const {
  if (!on_device_ || !model_.options.deferring() || is_sum(model_.params[id].reduction))
    return nullptr;
  return &model_.tables.param_states.at(static_cast<size_t>(id))->contributed;
}

// The buckets of those parameters which(id) picks.
void Transfer::make_buckets(const std::function<bool(ga_param)>& which) {
  buckets_.clear();
  const bool running = model_.config.accumulation == GA_ACCUMULATE_RUNNING_MEAN;
  const auto add = [&](int32_t wire, bool gathered, Reduction reduction) {
    buckets_.add(divisions_.list(), divisions_.counts(), wire, gathered, reduction,
                 [&](ga_param id) {
                   const Param& p = model_.params[id];
                   if (p.count == 0 || wire_of(p) != wire || gathered == divisions_.stays(id) ||
                       p.reduction != reduction || !which(id))
                     return Travel::kNot;
                   const bool as_it_lies =
                       wire == p.accumulator_dtype && !p.pair && !(running && is_sum(p.reduction));
                   if (!as_it_lies || (adds_there(p.reduction) && divisions_.stays(id)))
                     return Travel::kPacked;
                   return adds_there(p.reduction) ? Travel::kAsAWhole : Travel::kInPlace;
                 });
  };
  for (const int32_t wire : kFloats) {
    for (const Reduction r : kReductions) add(wire, true, r);
    add(wire, false, Reduction::kSum);
  }
  reserve(true);
  reserve_sums(which);
}

// Makes groups of the buckets, which move gradients or else gather parameters, and room for a group. Groups have to be
// the same on every rank, so each bucket is one of its own where ranks tell differently which gradients are ready.
void Transfer::reserve(bool gradients) {
  const int64_t ranks = comm_.ranks();
  const auto needs_of = [&](const Bucket& s) -> Needs {
    const auto bytes = [&](int32_t dtype) { return static_cast<size_t>(s.block * size_of(dtype)); };
    const auto n = static_cast<size_t>(ranks);
    const size_t block = bytes(s.dtype);
    if (s.stride == 0) return {{0, 0, 0}, 1};  // as a whole, where it lies
    if (!gradients) return {{s.packed ? block : 0, n * block, 0}, 1};
    if (adds_there(s.reduction)) return {{n * block, s.gathered ? 0 : block, 0}, 1};
    const size_t sums = s.packed && s.gathered ? n * bytes(added_in(s.dtype)) : 0;
    return {{s.packed ? n * block : 0, n * block, sums}, 2 * n};
  };
  const bool together = comm_.groups() && !(gradients && options_.overlap != 0);
  const size_t room =
      buckets_.group(together ? kGroupBytes : 0, together ? Comm::kMostTogether : 1, needs_of);
  size_t chunks = 0, tasks = 0;
  for (const Bucket& s : buckets_.list()) {
    const size_t segments = s.end - s.first;
    chunks = std::max(chunks, segments + static_cast<size_t>(chunk_count(s.block)));
    tasks = std::max(tasks, segments + static_cast<size_t>(ranks));
  }
  const auto grow = [&](Buffer& buffer, size_t bytes) {
    if (buffer.bytes() < bytes) buffer = Buffer(*model_.backend, bytes);
  };
  grow(room_, room);
  if (on_device_) {
    grow(device_partials_, chunks * sizeof(Partial));
    grow(device_pairs_, tasks * sizeof(Pair));
  } else {
    partials_.resize(std::max(partials_.size(), chunks));
    norms_.reserve(tasks);
    numbers_.reserve(tasks);
  }
  tasks_.reserve(tasks);
  moves_.reserve(tasks);
  pairs_.reserve(tasks);
}

// Makes the arrays for sums that do not fit their accumulator.
void Transfer::reserve_sums(const std::function<bool(ga_param)>& which) {
  wide_.resize(model_.params.size());
  for (size_t i = 0; i < wide_.size(); ++i) {
    const Param& p = model_.params[i];
    const auto id = static_cast<ga_param>(i);
    const bool needed = (!p.fits_accumulator() || p.pair) && which(id);
    const int64_t count = needed ? divisions_.reduced_range(id).count : 0;
    if (model_.params.tensor(i).removed) wide_[i] = Buffer();
    if (count > 0 && !wide_[i].data())
      wide_[i] = Buffer(*model_.backend, static_cast<size_t>(count) * sizeof(float));
  }
}

// Exchanges the gradients of a group of buckets; returns the first bucket of the next group.
size_t Transfer::run(size_t first) {
  const Bucket& like = buckets_.list()[first];
  each_of_group(
      first, [&](const Bucket& b) { b.packed ? pack(b, in_room(b.at.sent, b.dtype)) : clear(b); });
  comm_.together("gradients", [&] { each_of_group(first, [&](const Bucket& b) { send(b); }); });
  if (!adds_there(like.reduction)) {
    each_of_group(first, [&](const Bucket& b) { add_blocks(b); });
    if (like.gathered)
      comm_.together("sums of gradients",
                     [&] { each_of_group(first, [&](const Bucket& b) { gather_sums(b); }); });
  }
  return each_of_group(first, [&](const Bucket& b) { unpack(b); });
}

// Sends a bucket to where it is added; where the transport adds, the sums come back.
void Transfer::send(const Bucket& bucket) {
  const char* const what = "gradients";
  const Segment& only = buckets_.segments()[bucket.first];
  const Array from = bucket.packed ? in_room(bucket.at.sent, bucket.dtype)
                                   : offset(accumulator_of(only.param), only.first);
  void* const received = in_room(bucket.at.received, bucket.dtype).data;
  if (!adds_there(bucket.reduction))
    comm_.all_to_all(what, from.data, bucket.stride, received, bucket.block, bucket.dtype);
  else if (bucket.packed && !bucket.gathered)
    comm_.reduce_scatter(what, from.data, received, bucket.block, bucket.dtype, GA_COMM_SUM);
  else
    comm_.all_reduce(what, from.data, bucket.block * (bucket.packed ? comm_.ranks() : 1),
                     bucket.dtype, GA_COMM_SUM);
}

void Transfer::gather_sums(const Bucket& bucket) {
  const Segment& only = buckets_.segments()[bucket.first];
  const Array all = bucket.packed ? in_room(bucket.at.added, added_in(bucket.dtype))
                                  : offset(reduced(only.param), only.first);
  comm_.all_gather_arrays("sums of gradients", offset(all, comm_.rank() * bucket.stride).data,
                          all.data, bucket.stride, bucket.block, all.format);
}

// Writes neutral_of() to a bucket that travels as it lies, where this rank has no gradient.
void Transfer::clear(const Bucket& bucket) {
  const Segment& s = buckets_.segments()[bucket.first];
  const Param& p = model_.params[s.param];
  const int64_t* const contributed = contributed_to(s.param);
  const bool brought = brings_(s.param);
  if (brought && !contributed) return;
  moves_.clear();
  for (int64_t q = 0; q < (bucket.stride > 0 ? comm_.ranks() : 1); ++q) {
    const Array at = offset(accumulator_of(s.param), q * bucket.stride + s.first);
    moves_.push_back(move(brought ? at : Array{nullptr, p.real()}, at, s.count));
    moves_.back().constant = neutral_of(p.reduction);
    moves_.back().contributed = contributed;
  }
  run_moves();
}

// Copies what this rank has of a bucket; neutral_of() where it has nothing.
void Transfer::pack(const Bucket& bucket, const Array& to) {
  const bool running = model_.config.accumulation == GA_ACCUMULATE_RUNNING_MEAN;
  moves_.clear();
  pairs_.clear();
  for (size_t k = bucket.first; k < bucket.end; ++k) {
    const Segment& s = buckets_.segments()[k];
    const Param& p = model_.params[s.param];
    FinishTask task = {};
    task.f64 = p.f64;
    task.target = offset(to, s.at);
    task.count = s.count;
    task.constant = neutral_of(p.reduction);
    task.contributed = contributed_to(s.param);
    if (brings_(s.param)) {
      Source& source = task.gradient.source;
      source = {offset({p.accumulator, p.accumulator_dtype}, s.first).data, p.accumulator_dtype, 1,
                nullptr};
      if (p.pair) {
        const Tensor& t = model_.params.tensor(s.param);
        pairs_.push_back({const_cast<void*>(source.data),
                          offset({t.low, p.accumulator_dtype}, s.first).data, p.accumulator_dtype});
        source.data = on_device_ ? static_cast<Pair*>(device_pairs_.data()) + pairs_.size() - 1
                                 : &pairs_.back();
        source.format = kPair;
      }
      const auto i = static_cast<size_t>(s.param);
      if (running && is_sum(p.reduction)) {
        if (on_device_ && model_.options.deferring())
          task.gradient.numbers = &model_.tables.plans.at(i)->gradient;  // see sum_rank()
        else
          source.scale = model_.options.deferring() ? model_.progress.param_state(i).held_weight
                                                    : p.held_weight;
      }
    }
    moves_.push_back(task);
  }
  if (on_device_ && !pairs_.empty())
    model_.backend->write(device_pairs_.data(), pairs_.data(), pairs_.size() * sizeof(Pair));
  run_moves();
}

// Copies sums from a packed bucket to where they are held, unless they have been added there.
void Transfer::unpack(const Bucket& bucket) {
  const bool there = adds_there(bucket.reduction);
  if (!bucket.packed || (!there && !bucket.gathered)) return;
  moves_.clear();
  const auto take = [&](const Segment& s, const Array& from, int64_t at) {
    moves_.push_back(move(offset(from, at), offset(reduced(s.param), s.first), s.count));
  };
  if (bucket.gathered) {
    const Array all = there ? in_room(bucket.at.sent, bucket.dtype)
                            : in_room(bucket.at.added, added_in(bucket.dtype));
    for (size_t k = bucket.first; k < bucket.end; ++k)
      take(buckets_.segments()[k], all, buckets_.segments()[k].at);
  } else {
    const Array own = in_room(bucket.at.received, bucket.dtype);
    each_own(bucket, [&](const Segment& s) { take(s, own, s.at - comm_.rank() * bucket.block); });
  }
  run_moves();
}

// Adds the blocks that have come, or reduces them otherwise, in the order of the ranks, and measures the sums.
void Transfer::add_blocks(const Bucket& bucket) {
  tasks_.clear();
  starts_.clear();
  const auto add = [&](const Segment& s, const Array& target, int64_t start) {
    AccumulateTask task = {};
    task.target = target;
    task.count = s.count;
    // Launches that parameters share have tables, which the second stream has to leave alone.
    task.param = on_device_ ? -1 : s.param;
    tasks_.push_back(task);
    starts_.push_back(start);
  };
  if (bucket.packed) {
    const Array added = in_room(bucket.at.added, added_in(bucket.dtype));
    each_own(bucket, [&](const Segment& s) {
      add(s, bucket.gathered ? offset(added, s.at) : offset(reduced(s.param), s.first),
          s.at - comm_.rank() * bucket.block);
    });
  } else {
    const Segment& s = buckets_.segments()[bucket.first];
    add(s, offset(reduced(s.param), comm_.rank() * bucket.stride + s.first), 0);
  }
  if (tasks_.empty()) return;
  size_t chunks = 0;
  Partial* const partials =
      on_device_ ? static_cast<Partial*>(device_partials_.data()) : partials_.data();
  for (AccumulateTask& task : tasks_) {
    task.partials = partials + chunks;
    chunks += static_cast<size_t>(chunk_count(task.count));
  }
  const Array received = in_room(bucket.at.received, bucket.dtype);
  // The first pass adds two ranks' blocks, each further one that of one more.
  for (int64_t q = 0; q < comm_.ranks(); q += q == 0 ? 2 : 1) {
    for (size_t k = 0; k < tasks_.size(); ++k) {
      AccumulateTask& task = tasks_[k];
      task.sources = q == 0 && comm_.ranks() > 1 ? 2 : 1;
      const bool first = q == 0 && (task.sources == 1 || is_sum(bucket.reduction));
      task.keep = first ? 0 : keep_of(bucket.reduction);
      for (int64_t j = 0; j < task.sources; ++j)
        task.source[j] = {offset(received, (q + j) * bucket.block + starts_[k]).data, bucket.dtype,
                          1, nullptr};
    }
    adder_->accumulate({tasks_.data(), tasks_.size()});
  }
  if (on_device_) return;  // the sums are measured where they have been gathered
  for (const AccumulateTask& task : tasks_) {
    const auto i = static_cast<size_t>(task.param);
    if (!is_unmeasured(i)) add_partials(task.partials, task.count, param_sums_[i]);
  }
}

void Transfer::add_partials(const Partial* partials, int64_t count, ParamSums& sums) {
  for (int64_t k = 0; k < chunk_count(count); ++k) {
    sums.squares += partials[k].sum_squares;
    sums.nonfinite += partials[k].nonfinite != 0;
  }
}

// Whether measure_rest() measures the sums of a gradient, in place of adding it up.
bool Transfer::is_unmeasured(size_t i) const {
  return adds_there(model_.params[i].reduction) || divisions_.of(i).measured_separately;
}

void Transfer::reserve_for(Backend& adder) const {
  adder.reserve(static_cast<int64_t>(partials_.size() + tasks_.capacity()), 0, 0);
}

// ---- What a host has measured of its pieces --------------------------------------------------

void Transfer::measure_rest(const std::vector<char>& touched, double weight) {
  measured_.clear();
  size_t chunks = 0;
  for (size_t i = 0; i < touched.size(); ++i) {
    const Param& p = model_.params[i];
    if (!touched[i] || p.held() != Held::kReduced) continue;
    if (!is_unmeasured(i) && !model_.tables.param_inputs[i].clamped) continue;
    const auto id = static_cast<ga_param>(i);
    const int64_t count = divisions_.measured(id).count;
    if (count == 0) continue;
    measured_.push_back(id);
    chunks += static_cast<size_t>(chunk_count(count));
  }
  if (measured_.empty()) return;
  partials_.resize(std::max(partials_.size(), chunks));
  norms_.clear();
  numbers_.clear();
  numbers_.reserve(measured_.size());
  const double mean = model_.config.reduce == GA_REDUCE_MEAN ? 1 / weight : 1;
  chunks = 0;
  for (const ga_param id : measured_) {
    const Param& p = model_.params[id];
    const ParamInput& in = model_.tables.param_inputs[static_cast<size_t>(id)];
    const Range own = divisions_.measured(id);
    NormTask task = {};
    task.gradient = identity({offset(reduced(id), own.first).data, p.real(), 1, nullptr});
    task.f64 = p.f64;
    task.count = own.count;
    task.partials = &partials_[chunks];
    chunks += static_cast<size_t>(chunk_count(own.count));
    if (in.clamped) {
      const GroupInput& g = model_.tables.group_inputs[static_cast<size_t>(in.group)];
      numbers_.push_back({g.optimizer.maximize ? -mean : mean, g.clip.max_value, 1});
      task.gradient.numbers = &numbers_.back();
    }
    norms_.push_back(task);
  }
  model_.backend->norm({norms_.data(), norms_.size()});
  for (size_t m = 0; m < measured_.size(); ++m) {
    const NormTask& task = norms_[m];
    const auto i = static_cast<size_t>(measured_[m]);
    ParamSums& sums = param_sums_[i];
    if (is_unmeasured(i)) add_partials(task.partials, task.count, sums);
    for (int64_t k = 0; task.gradient.numbers && k < chunk_count(task.count); ++k)
      sums.clamped += task.partials[k].second_squares;
  }
}

// ---- Updated parameters ----------------------------------------------------------------------------

// In the dtype of each parameter.
void Transfer::gather_parameters(const std::function<Ranks::Changed(ga_param)>& changed) {
  using Changed = Ranks::Changed;
  buckets_.clear();
  const auto is_in_buckets = [&](ga_param id) {
    return divisions_.of(id).piece == 0 || model_.params.keeper(id) == Keeper::kPieces;
  };
  for (const int32_t dtype : kFloats)
    buckets_.add(
        divisions_.list(), divisions_.counts(), dtype, true, Reduction::kSum, [&](ga_param id) {
          const Param& p = model_.params[id];
          if (p.dtype != dtype || p.count == 0 || model_.params.keeper(id) == Keeper::kAll ||
              !is_in_buckets(id) || changed(id) != Changed::kElements)
            return Travel::kNot;
          return Travel::kInPlace;
        });
  reserve(false);
  for (size_t k = 0; k < buckets_.list().size();) k = gather(k);
  std::vector<ga_param> whole;
  for (size_t i = 0; i < divisions_.list().size(); ++i) {
    const auto id = static_cast<ga_param>(i);
    if (model_.params[id].count == 0 || model_.params.keeper(id) == Keeper::kAll) continue;
    const Changed what = changed(id);
    if (what == Changed::kRows)
      hand_out_rows(id);
    else if (what == Changed::kElements && !is_in_buckets(id))
      whole.push_back(id);
  }
  for (size_t k = 0; k < whole.size();)
    comm_.together("updated parameters", [&] {
      for (const size_t end = std::min(whole.size(), k + Comm::kMostTogether); k < end; ++k) {
        const Param& p = model_.params[whole[k]];
        comm_.broadcast_array("updated parameters", p.data, p.count, p.dtype,
                              divisions_.owner(whole[k]));
      }
    });
}

// By way of a buffer: a transport that fails may write to it later, and the parameters are the program's.
size_t Transfer::gather(size_t first) {
  const auto data = [&](const Segment& s, int64_t element) {
    const Param& p = model_.params[s.param];
    return offset({p.data, p.dtype}, element);
  };
  each_of_group(first, [&](const Bucket& bucket) {
    if (!bucket.packed) return;
    const Array own = in_room(bucket.at.sent, bucket.dtype);
    moves_.clear();
    each_own(bucket, [&](const Segment& s) {
      moves_.push_back(
          move(data(s, s.first), offset(own, s.at - comm_.rank() * bucket.block), s.count));
    });
    run_moves();
  });
  comm_.together("updated parameters", [&] {
    each_of_group(first, [&](const Bucket& bucket) {
      const Segment& only = buckets_.segments()[bucket.first];
      const Array own = bucket.packed ? in_room(bucket.at.sent, bucket.dtype)
                                      : data(only, comm_.rank() * bucket.stride + only.first);
      comm_.all_gather_arrays("updated parameters", own.data,
                              in_room(bucket.at.received, bucket.dtype).data, bucket.block,
                              bucket.block, bucket.dtype);
    });
  });
  return each_of_group(first, [&](const Bucket& bucket) {
    const Segment& only = buckets_.segments()[bucket.first];
    const Array all = in_room(bucket.at.received, bucket.dtype);
    moves_.clear();
    for (size_t k = bucket.first; bucket.packed && k < bucket.end; ++k) {
      const Segment& s = buckets_.segments()[k];
      if (s.rank != comm_.rank())
        moves_.push_back(move(offset(all, s.at), data(s, s.first), s.count));
    }
    for (int32_t q = 0; !bucket.packed && q < comm_.ranks(); ++q)
      if (q != comm_.rank())
        moves_.push_back(move(offset(all, q * bucket.block),
                              data(only, q * bucket.stride + only.first), bucket.block));
    run_moves();
  });
}

// The rows that each rank has updated of its part: every rank knows which.
void Transfer::hand_out_rows(ga_param id) {
  const Param& p = model_.params[id];
  const Tensor& t = model_.params.tensor(id);
  const Division& d = divisions_.of(id);
  const bool pieces = d.piece > 0 && model_.params.keeper(id) == Keeper::kPieces;
  const int64_t columns = p.count / t.rows;
  const auto row_bytes = static_cast<size_t>(columns * dtype_info(p.dtype).size);
  std::vector<std::vector<char*>> rows(static_cast<size_t>(comm_.ranks()));
  for (int64_t k = 0; k < t.set->size; ++k) {
    const int64_t row = t.set->entries[k].row;
    const int64_t owner = pieces ? row * columns / d.piece : d.owner;
    rows[static_cast<size_t>(owner)].push_back(static_cast<char*>(p.data) +
                                               static_cast<size_t>(row) * row_bytes);
  }
  size_t longest = 0;
  for (const auto& list : rows) longest = std::max(longest, list.size());
  const size_t most = std::max<size_t>(1, static_cast<size_t>(kRowBytes) / rows.size() / row_bytes);
  std::vector<char> send(std::min(most, longest) * row_bytes), all(send.size() * rows.size());
  for (size_t first = 0; first < longest; first += most) {
    const size_t block = std::min(most, longest - first) * row_bytes;
    // f(row, at) for the rows of a rank in this bucket, which begin at `from`.
    const auto each = [&](size_t q, char* from, auto&& f) {
      for (size_t k = first; k < std::min(first + most, rows[q].size()); ++k, from += row_bytes)
        f(rows[q][k], from);
    };
    const auto own = static_cast<size_t>(comm_.rank());
    each(own, send.data(), [&](char* row, char* at) { std::memcpy(at, row, row_bytes); });
    comm_.all_gather("updated rows", send.data(), all.data(),
                     static_cast<int64_t>(block) / dtype_info(p.dtype).size, p.dtype);
    for (size_t q = 0; q < rows.size(); ++q)
      if (q != own)
        each(q, all.data() + q * block,
             [&](char* row, char* at) { std::memcpy(row, at, row_bytes); });
  }
}

}  // namespace ga
