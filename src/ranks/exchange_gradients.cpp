// SPDX-License-Identifier: Apache-2.0
// Gradients: they travel to where they are added, in ga_step or before, and their sums back.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "batchnorm/batchnorm.hpp"
#include "core/error.hpp"
#include "core/tensor.hpp"
#include "model/preparation.hpp"
#include "ranks/exchange.hpp"
#include "window/accumulator.hpp"

namespace ga {
namespace {

constexpr size_t kGroupBytes = size_t{64} << 20;  // of memory for a group of buckets

int64_t size_of(int32_t dtype) { return dtype_info(dtype).size; }

int32_t added_in(int32_t wire) { return wire == GA_F64 ? GA_F64 : GA_F32; }

}  // namespace

// ---- Buckets -------------------------------------------------------------------------------------

// Whether the sum of a gradient stays where it is added, since nobody else updates the parameter.
bool Exchange::stays(ga_param id) const {
  const auto i = static_cast<size_t>(id);
  return shards() && (parts_.keepers[i] == Keeper::kPieces ||
                      (parts_.keepers[i] == Keeper::kOwner && parts_.divisions[i].piece == 0));
}

// What this rank has of the sum of a gradient in the end.
Range Exchange::reduced_range(ga_param id) const {
  const Param& p = model_.params[id];
  return stays(id) ? p.shard : Range{0, p.count};
}

// The dtype in which a gradient travels to where it is added.
int32_t Exchange::wire_of(const Param& p) const {
  if (p.f64) return GA_F64;
  if (p.pair || adds_there(p.reduction)) return GA_F32;
  if (size_of(p.accumulator_dtype) == 2)
    return model_.config.accumulation == GA_ACCUMULATE_RUNNING_MEAN ? int32_t{GA_F32}
                                                                    : p.accumulator_dtype;
  return options_.wire == GA_COMM_WIRE_BF16 && is_sum(p.reduction) ? GA_BF16 : GA_F32;
}

// Where the sum of a gradient lies: in the accumulator, or in an array of f32.
Array Exchange::reduced(ga_param id) const {
  const Param& p = model_.params[id];
  if (p.fits_accumulator() && !p.pair) return {p.accumulator, p.accumulator_dtype};
  return whole_of({wide_[static_cast<size_t>(id)].data(), GA_F32}, reduced_range(id).first);
}

// Makes groups of the buckets, which move gradients or else gather parameters, and room for a group. Groups have to be
// the same on every rank, so each bucket is one of its own where ranks tell differently which gradients are ready.
void Exchange::reserve(bool gradients) {
  const int64_t ranks = comm_->ranks();
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
  const bool together = comm_->groups() && !(gradients && overlaps());
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
  if (on_device()) {
    grow(device_partials_, chunks * sizeof(Partial));
    grow(device_pairs_, tasks * sizeof(Pair));
  } else {
    partials_.resize(std::max(partials_.size(), chunks));
  }
  tasks_.reserve(tasks);
  moves_.reserve(tasks);
  pairs_.reserve(tasks);
  norms_.reserve(tasks);
  numbers_.reserve(tasks);
}

// Makes the arrays for sums that do not fit their accumulator.
void Exchange::reserve_sums() {
  wide_.resize(touched_.size());
  for (size_t i = 0; i < touched_.size(); ++i) {
    const Param& p = model_.params[i];
    const bool needed = touched_[i] && (!p.fits_accumulator() || p.pair);
    const int64_t count = needed ? reduced_range(static_cast<ga_param>(i)).count : 0;
    if (model_.params.tensor(i).removed) wide_[i] = Buffer();
    if (count > 0 && !wide_[i].data())
      wide_[i] = Buffer(*model_.backend, static_cast<size_t>(count) * sizeof(float));
  }
}

void Exchange::run_moves() { adder_->finish({moves_.data(), moves_.size()}); }

// ---- Gradients ----------------------------------------------------------------------------------

// The buckets of those parameters which(id) picks.
void Exchange::make_buckets(const std::function<bool(ga_param)>& which) {
  buckets_.clear();
  const bool running = model_.config.accumulation == GA_ACCUMULATE_RUNNING_MEAN;
  const auto add = [&](int32_t wire, bool gathered, Reduction reduction) {
    buckets_.add(parts_.divisions, parts_.counts, wire, gathered, reduction, [&](ga_param id) {
      const Param& p = model_.params[id];
      if (p.count == 0 || wire_of(p) != wire || gathered == stays(id) || p.reduction != reduction ||
          !which(id))
        return Travel::kNot;
      const bool as_it_lies =
          wire == p.accumulator_dtype && !p.pair && !(running && is_sum(p.reduction));
      if (!as_it_lies || (adds_there(p.reduction) && stays(id))) return Travel::kPacked;
      return adds_there(p.reduction) ? Travel::kAsAWhole : Travel::kInPlace;
    });
  };
  for (const int32_t wire : kFloats) {
    for (const Reduction r : kReductions) add(wire, true, r);
    add(wire, false, Reduction::kSum);
  }
  reserve(true);
  reserve_sums();
}

void Exchange::sum_gradients() {
  moved_ = true;
  if (!overlaps()) param_sums_.assign(touched_.size(), ParamSums());
  if (!exchanged_) return;
  gather_rows();
  // In the background, gradients that may consist of rows have not been exchanged yet.
  make_buckets([&](ga_param id) {
    const auto i = static_cast<size_t>(id);
    return touched_[i] && model_.params[id].held() != Held::kRows && (!overlaps() || has_rows(i));
  });
  for (size_t k = 0; k < buckets_.list().size();) k = run(k);
  hold_sums();
  measure_own();
}

void Exchange::hold_sums() {
  for (size_t i = 0; i < touched_.size(); ++i) {
    Param& p = model_.params[i];
    if (!touched_[i] || p.held() == Held::kRows) continue;
    if (p.held() == Held::kNothing)  // the partials are those of an earlier window
      for (int64_t k = 0; k < chunk_count(p.count); ++k) p.partials[k].noise = 0;
    p.hold(Held::kReduced);
    const auto id = static_cast<ga_param>(i);
    p.reduced = reduced_range(id).count > 0 ? reduced(id).data : nullptr;
    p.window.stale = false;
  }
}

// Exchanges the gradients of a group of buckets; returns the first bucket of the next group.
size_t Exchange::run(size_t first) {
  moved_ = true;
  const Bucket& like = buckets_.list()[first];
  each_of_group(
      first, [&](const Bucket& b) { b.packed ? pack(b, in_room(b.at.sent, b.dtype)) : clear(b); });
  comm_->together("gradients", [&] { each_of_group(first, [&](const Bucket& b) { send(b); }); });
  if (!adds_there(like.reduction)) {
    each_of_group(first, [&](const Bucket& b) { add_blocks(b); });
    if (like.gathered)
      comm_->together("sums of gradients",
                      [&] { each_of_group(first, [&](const Bucket& b) { gather_sums(b); }); });
  }
  return each_of_group(first, [&](const Bucket& b) { unpack(b); });
}

// Sends a bucket to where it is added; where the transport adds, the sums come back.
void Exchange::send(const Bucket& bucket) {
  const char* const what = "gradients";
  const Segment& only = buckets_.segments()[bucket.first];
  const Array from = bucket.packed ? in_room(bucket.at.sent, bucket.dtype)
                                   : offset(accumulator_of(only.param), only.first);
  void* const received = in_room(bucket.at.received, bucket.dtype).data;
  if (!adds_there(bucket.reduction))
    comm_->all_to_all(what, from.data, bucket.stride, received, bucket.block, bucket.dtype);
  else if (bucket.packed && !bucket.gathered)
    comm_->reduce_scatter(what, from.data, received, bucket.block, bucket.dtype, GA_COMM_SUM);
  else
    comm_->all_reduce(what, from.data, bucket.block * (bucket.packed ? comm_->ranks() : 1),
                      bucket.dtype, GA_COMM_SUM);
}

void Exchange::gather_sums(const Bucket& bucket) {
  const Segment& only = buckets_.segments()[bucket.first];
  const Array all = bucket.packed ? in_room(bucket.at.added, added_in(bucket.dtype))
                                  : offset(reduced(only.param), only.first);
  comm_->all_gather_arrays("sums of gradients", offset(all, rank() * bucket.stride).data, all.data,
                           bucket.stride, bucket.block, all.format);
}

// The accumulator of a gradient that travels as it lies.
Array Exchange::accumulator_of(ga_param id) const {
  const Param& p = model_.params[id];
  return {p.accumulator, p.accumulator_dtype};
}

// Whether this rank has a gradient. Where micro-batches are checked, the host of a device does not know: if
// all are dropped, the kernels leave zeros, which is right for sums; of others, contributed_to() tells kernels.
bool Exchange::brings(ga_param id) const {
  const Held held = model_.params[id].held();
  if (on_device() && held == Held::kReduced) return brought_[static_cast<size_t>(id)] != 0;
  return held != Held::kNothing;
}
const int64_t* Exchange::contributed_to(ga_param id) const {
  if (!on_device() || !model_.options.deferring() || is_sum(model_.params[id].reduction))
    return nullptr;
  return &model_.tables.param_states.at(static_cast<size_t>(id))->contributed;
}

// Writes neutral_of() to a bucket that travels as it lies, where this rank has no gradient.
void Exchange::clear(const Bucket& bucket) {
  const Segment& s = buckets_.segments()[bucket.first];
  const Param& p = model_.params[s.param];
  const int64_t* const contributed = contributed_to(s.param);
  const bool brought = brings(s.param);
  if (brought && !contributed) return;
  moves_.clear();
  for (int64_t q = 0; q < (bucket.stride > 0 ? comm_->ranks() : 1); ++q) {
    const Array at = offset(accumulator_of(s.param), q * bucket.stride + s.first);
    moves_.push_back(move(brought ? at : Array{nullptr, p.real()}, at, s.count));
    moves_.back().constant = neutral_of(p.reduction);
    moves_.back().contributed = contributed;
  }
  run_moves();
}

// Copies what this rank has of a bucket; neutral_of() where it has nothing.
void Exchange::pack(const Bucket& bucket, const Array& to) {
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
    if (brings(s.param)) {
      Source& source = task.gradient.source;
      source = {offset({p.accumulator, p.accumulator_dtype}, s.first).data, p.accumulator_dtype, 1,
                nullptr};
      if (p.pair) {
        const Tensor& t = model_.params.tensor(s.param);
        pairs_.push_back({const_cast<void*>(source.data),
                          offset({t.low, p.accumulator_dtype}, s.first).data, p.accumulator_dtype});
        source.data = on_device() ? static_cast<Pair*>(device_pairs_.data()) + pairs_.size() - 1
                                  : &pairs_.back();
        source.format = kPair;
      }
      const auto i = static_cast<size_t>(s.param);
      if (running && is_sum(p.reduction)) {
        if (on_device() && model_.options.deferring())
          task.gradient.numbers = &model_.tables.plans.at(i)->gradient;  // see sum_rank()
        else
          source.scale = model_.options.deferring() ? model_.progress.param_state(i).held_weight
                                                    : p.held_weight;
      }
    }
    moves_.push_back(task);
  }
  if (on_device() && !pairs_.empty())
    model_.backend->write(device_pairs_.data(), pairs_.data(), pairs_.size() * sizeof(Pair));
  run_moves();
}

// Copies sums from a packed bucket to where they are held, unless they have been added there.
void Exchange::unpack(const Bucket& bucket) {
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
    each_own(bucket, [&](const Segment& s) { take(s, own, s.at - rank() * bucket.block); });
  }
  run_moves();
}

// Adds the blocks that have come, or reduces them otherwise, in the order of the ranks, and measures the sums.
void Exchange::add_blocks(const Bucket& bucket) {
  tasks_.clear();
  starts_.clear();
  const auto add = [&](const Segment& s, const Array& target, int64_t start) {
    AccumulateTask task = {};
    task.target = target;
    task.count = s.count;
    // Launches that parameters share have tables, which the second stream has to leave alone.
    task.param = on_device() ? -1 : s.param;
    tasks_.push_back(task);
    starts_.push_back(start);
  };
  if (bucket.packed) {
    const Array added = in_room(bucket.at.added, added_in(bucket.dtype));
    each_own(bucket, [&](const Segment& s) {
      add(s, bucket.gathered ? offset(added, s.at) : offset(reduced(s.param), s.first),
          s.at - rank() * bucket.block);
    });
  } else {
    const Segment& s = buckets_.segments()[bucket.first];
    add(s, offset(reduced(s.param), rank() * bucket.stride + s.first), 0);
  }
  if (tasks_.empty()) return;
  size_t chunks = 0;
  Partial* const partials =
      on_device() ? static_cast<Partial*>(device_partials_.data()) : partials_.data();
  for (AccumulateTask& task : tasks_) {
    task.partials = partials + chunks;
    chunks += static_cast<size_t>(chunk_count(task.count));
  }
  const Array received = in_room(bucket.at.received, bucket.dtype);
  // The first pass adds two ranks' blocks, each further one that of one more.
  for (int64_t q = 0; q < comm_->ranks(); q += q == 0 ? 2 : 1) {
    for (size_t k = 0; k < tasks_.size(); ++k) {
      AccumulateTask& task = tasks_[k];
      task.sources = q == 0 && comm_->ranks() > 1 ? 2 : 1;
      const bool first = q == 0 && (task.sources == 1 || is_sum(bucket.reduction));
      task.keep = first ? 0 : keep_of(bucket.reduction);
      for (int64_t j = 0; j < task.sources; ++j)
        task.source[j] = {offset(received, (q + j) * bucket.block + starts_[k]).data, bucket.dtype,
                          1, nullptr};
    }
    adder_->accumulate({tasks_.data(), tasks_.size()});
  }
  if (on_device()) return;  // the sums are measured where they have been gathered
  for (const AccumulateTask& task : tasks_) {
    const auto i = static_cast<size_t>(task.param);
    if (!is_unmeasured(i)) add_partials(task.partials, task.count, param_sums_[i]);
  }
}

void Exchange::add_partials(const Partial* partials, int64_t count, ParamSums& sums) {
  for (int64_t k = 0; k < chunk_count(count); ++k) {
    sums.squares += partials[k].sum_squares;
    sums.nonfinite += partials[k].nonfinite != 0;
  }
}

// Whether measure_own() measures the sums of a gradient, in place of adding it up.
bool Exchange::is_unmeasured(size_t i) const {
  return adds_there(model_.params[i].reduction) || parts_.divisions[i].measured_separately;
}

// What the adding has not measured for this rank: squares of gradients clipped by value, which take the
// weight of the window; all squares of what the transport has added, or of other pieces.
void Exchange::measure_own() {
  measured_.clear();
  size_t chunks = 0;
  for (size_t i = 0; i < touched_.size(); ++i) {
    const Param& p = model_.params[i];
    if (!touched_[i] || p.held() != Held::kReduced) continue;
    if (!is_unmeasured(i) && !model_.tables.param_inputs[i].clamped) continue;
    const int64_t count = parts_.divisions[i].measured(rank(), p.count).count;
    if (count == 0) continue;
    measured_.push_back(static_cast<ga_param>(i));
    chunks += static_cast<size_t>(chunk_count(count));
  }
  if (measured_.empty()) return;
  partials_.resize(std::max(partials_.size(), chunks));
  norms_.clear();
  numbers_.clear();
  numbers_.reserve(measured_.size());
  const double mean = model_.config.reduce == GA_REDUCE_MEAN ? 1 / sums_.weight : 1;
  chunks = 0;
  for (const ga_param id : measured_) {
    const Param& p = model_.params[id];
    const ParamInput& in = model_.tables.param_inputs[static_cast<size_t>(id)];
    const Range own = parts_.divisions[static_cast<size_t>(id)].measured(rank(), p.count);
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

// ---- In the background ----------------------------------------------------------------------------

// Has the buckets run whose parameters are ready, in their order, which is the same on every rank.
void Exchange::run_ready() {
  // What layers exchange comes first: all ranks make these calls together, so that all go on in one order.
  if (has_failed() || stages_.layers.awaits_sums()) return;
  if (on_device() && overlaps()) return release_on_device();
  if (!background_) return;
  if (!begun_) begin_buckets();
  const size_t before = released_;
  const std::vector<Bucket>& list = buckets_.list();
  for (; released_ < list.size() && is_ready(list[released_]); ++released_)
    if (model_.speculation->active()) await(1 + released_);
  if (released_ > before) background_->release(1 + released_);
}

bool Exchange::is_ready(const Bucket& bucket) const {
  for (size_t k = bucket.first; k < bucket.end; ++k) {
    const Param& p = model_.params[buckets_.segments()[k].param];
    if (!p.window.ready || p.held() == Held::kRows) return false;
  }
  return true;
}

// Has the parameters updated that are summed when this item has run.
void Exchange::await(size_t item) {
  const Bucket& bucket = buckets_.list()[item - 1];
  for (size_t k = bucket.first; k < bucket.end; ++k) {
    const ga_param id = buckets_.segments()[k].param;
    size_t& last = last_items_[static_cast<size_t>(id)];
    if (last != item) continue;
    last = 0;  // it may have further segments in the bucket
    model_.speculation->await(id, reduced(id));
  }
  begun_by_[item] = model_.speculation->begun();
}

// Makes the buckets of a window, of which nobody knows yet what other ranks bring: they are of all
// parameters but those of which a gradient may be rows.
void Exchange::begin_buckets() {
  stages_.preparation.prepare();
  check_tensors();
  begun_with_ = tensors_digest();
  touched_.assign(model_.params.size(), 0);
  for (size_t i = 0; i < touched_.size(); ++i)
    touched_[i] = !model_.params[i].frozen && !has_rows(i);
  make_buckets([&](ga_param id) { return touched_[static_cast<size_t>(id)] != 0; });
  param_sums_.assign(touched_.size(), ParamSums());
  if (own_backend_)
    own_backend_->reserve(static_cast<int64_t>(partials_.size() + tasks_.capacity()), 0, 0);
  begun_weight_ = model_.window.weight();
  if (model_.speculation->active()) {
    last_items_.assign(touched_.size(), 0);
    begun_by_.assign(1 + buckets_.list().size(), 0);
    for (size_t item = 1; item < begun_by_.size(); ++item) {
      const Bucket& bucket = buckets_.list()[item - 1];
      for (size_t k = bucket.first; k < bucket.end; ++k)
        last_items_[static_cast<size_t>(buckets_.segments()[k].param)] = item;
    }
    model_.speculation->open();
  }
  moved_ = false;
  begun_ = true;
  released_ = 0;
}

// On one thread or the other, each with a backend of its own.
void Exchange::run_item(size_t item, Backend& adder) {
  adder_ = &adder;
  if (item == 0)
    agree_on_tensors();
  else
    run(item - 1);
  if (model_.speculation->active() && begun_by_[item] > 0)
    model_.speculation->arrived(begun_by_[item]);
}

// Runs what has not run in the background.
void Exchange::finish_buckets() {
  if (!begun_) begin_buckets();
  begun_ = false;
  size_t item = background_ ? background_->stop() : 0;
  for (; item < 1 + buckets_.list().size(); ++item) run_item(item, *model_.backend);
  adder_ = model_.backend.get();
}

// ---- Gradients of some rows -----------------------------------------------------------------------

bool Exchange::has_rows(size_t i) const {
  const Tensor& t = model_.params.tensor(i);
  return t.options.rows != GA_ROWS_NONE && !t.removed;
}

// Every rank adds the rows of all ranks to an empty set, in the order of the ranks, and so has the same
// sums; a parameter of which some rank has a gradient of all rows is made dense on every rank.
void Exchange::gather_rows() {
  const auto ranks = static_cast<size_t>(comm_->ranks());
  const uint64_t* counts = row_counts_.data();
  for (size_t i = 0; i < touched_.size(); ++i) {
    if (!has_rows(i)) continue;
    const uint64_t* const of_ranks = counts;
    counts += ranks;
    if (!touched_[i] || model_.params[i].frozen) continue;
    const auto id = static_cast<ga_param>(i);
    if (std::find(of_ranks, of_ranks + ranks, kDense) != of_ranks + ranks)
      stages_.accumulator.make_dense(id);
    else
      gather_rows_of(id, of_ranks);
  }
}

void Exchange::gather_rows_of(ga_param id, const uint64_t* counts) {
  Backend& backend = *model_.backend;
  Param& p = model_.params[id];
  const Tensor& t = model_.params.tensor(id);
  p.hold(Held::kRows);
  (*model_.tables.param_states.at(static_cast<size_t>(id))).contributed = 1;  // by some rank
  const auto ranks = static_cast<size_t>(comm_->ranks());
  const auto most = static_cast<size_t>(*std::max_element(counts, counts + ranks));
  if (p.count == 0 || most == 0) return;
  const auto columns = static_cast<size_t>(p.count / t.rows);
  const auto size = static_cast<size_t>(size_of(p.accumulator_dtype));
  const size_t row_bytes = columns * size;

  std::vector<int64_t> indices(most, 0), all(ranks * most);
  std::vector<char> values(most * row_bytes);
  for (int64_t k = 0; k < t.set->size; ++k) {
    const int64_t row = t.set->entries[k].row;
    indices[static_cast<size_t>(k)] = row;
    std::memcpy(&values[static_cast<size_t>(k) * row_bytes],
                static_cast<char*>(p.accumulator) + static_cast<size_t>(row) * row_bytes,
                row_bytes);
  }
  comm_->all_gather("rows of gradients", indices.data(), all.data(), static_cast<int64_t>(most),
                    GA_I64);
  backend.clear_rows({&model_.params.tensor(id).set, 1});
  RowsTask task = {};
  task.target = {p.accumulator, p.accumulator_dtype};
  task.rows = t.rows;
  task.columns = static_cast<int64_t>(columns);
  task.set = t.set;
  task.index_dtype = GA_I64;
  for (size_t q = 0; q < ranks; ++q) task.count += static_cast<int64_t>(counts[q]);
  backend.prepare_rows(task, 0);
  stages_.accumulator.hold_rows(task.count);

  const size_t bucket = std::max<size_t>(1, static_cast<size_t>(kRowBytes) / (ranks * row_bytes));
  std::vector<char> gathered(ranks * std::min(bucket, most) * row_bytes);
  for (size_t at = 0; at < most; at += bucket) {
    const size_t rows = std::min(bucket, most - at);
    comm_->all_gather("rows of gradients", &values[at * row_bytes], gathered.data(),
                      static_cast<int64_t>(rows * columns), p.accumulator_dtype);
    for (size_t q = 0; q < ranks; ++q) {
      if (counts[q] <= at) continue;
      task.count = static_cast<int64_t>(std::min<uint64_t>(counts[q] - at, rows));
      task.indices = &all[q * most + at];
      task.values = {&gathered[q * rows * row_bytes], p.accumulator_dtype, 1, nullptr};
      backend.accumulate_rows(task);
    }
  }
}

}  // namespace ga
