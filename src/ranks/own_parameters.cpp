// SPDX-License-Identifier: Apache-2.0
#include "ranks/own_parameters.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <tuple>

#include "batchnorm/batchnorm.hpp"
#include "core/error.hpp"
#include "core/tensor.hpp"
#include "model/table_writer.hpp"

namespace ga {
namespace {

constexpr const char* kMode = "GA_SHARD_PARAMETERS";

[[noreturn]] void refuse(const char* option) {
  fail(GA_ERROR_UNSUPPORTED, "%s does not go together with %s", option, kMode);
}

}  // namespace

OwnParameters::OwnParameters(const Stages& stages, RankState& state, std::shared_ptr<Comm> comm,
                             const ga_comm_options& options)
    : Agreement(std::move(comm)),
      stages_(stages),
      model_(stages.model),
      state_(state),
      options_(options),
      reduced_over_(options.reduced == GA_REDUCED_MEAN ? data_ranks() : 1) {
  comm_->take(nullptr, model_.config.device_ordinal);
}

OwnParameters::~OwnParameters() { comm_->give_back(); }

int64_t OwnParameters::bytes() const {
  return static_cast<int64_t>((sent_.capacity() + gathered_.capacity()) * sizeof(uint64_t) +
                              (tasks_.capacity() + ahead_.capacity()) * sizeof(BinnedTask) +
                              (chunks_.capacity() + sums_.capacity()) * sizeof(BinnedSum));
}

// ---- What goes together with it ---------------------------------------------------------------------

void OwnParameters::check_comm_settings() const {
  if (model_.config.device != GA_DEVICE_CPU)
    fail(GA_ERROR_UNSUPPORTED, "%s is for contexts on the CPU, as of parameters that are offloaded",
         kMode);
  if (options_.wire != GA_COMM_WIRE_EXACT) refuse("ga_comm_options.wire");
  if (options_.hand_out != 0) refuse("ga_comm_options.hand_out");
  if (options_.check_every != 0) refuse("ga_comm_options.check_every");
  if (options_.overlap != 0) refuse("ga_comm_options.overlap");
  if (options_.data_ranks < 0 || comm_->ranks() % data_ranks() != 0)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "data_ranks was %d, expected a divisor of the number of ranks, %d, or 0 for all of them",
         options_.data_ranks, comm_->ranks());
  if (options_.data_rank < -1 || options_.data_rank >= data_ranks())
    fail(GA_ERROR_INVALID_ARGUMENT, "data_rank was %d, expected 0 to %d, or -1", options_.data_rank,
         data_ranks() - 1);
}

void OwnParameters::check() const {
  const ga_config& c = model_.config;
  if (c.gradient_kind != GA_GRADIENT_SUM)
    fail(GA_ERROR_UNSUPPORTED,
         "gradient_kind was GA_GRADIENT_MEAN, but with %s gradients arrive with the weights of "
         "their losses: GA_GRADIENT_SUM",
         kMode);
  if (c.accumulation == GA_ACCUMULATE_RUNNING_MEAN) refuse("GA_ACCUMULATE_RUNNING_MEAN");
  if (c.noise_scale != 0) refuse("ga_config.noise_scale");
  if (c.nonfinite == GA_NONFINITE_DROP_MICRO) refuse("GA_NONFINITE_DROP_MICRO");
  if (model_.options.clip_micro()) refuse("GA_CLIP_WHEN_MICRO");
  if (stages_.layers.count() > 0) refuse("a layer with batch normalisation");
  for (const Group& g : model_.params.groups) {
    if (std::isfinite(model_.params.clip_of(g).max_value)) refuse("ga_clip.max_value");
    if (g.info->limits_norm && g.optimizer.max_grad_norm > 0) refuse("ga_optimizer.max_grad_norm");
  }
  for (size_t i = 0; i < model_.params.size(); ++i)
    if (!model_.params.tensor(i).removed) check_param(i);
}

void OwnParameters::check_param(size_t i) const {
  const Param& p = model_.params[i];
  const Tensor& t = model_.params.tensor(i);
  const Subject of = model_.params.subject(i);
  const auto refuse = [&](const char* what, const char* then) {
    of.fail(GA_ERROR_UNSUPPORTED, "it has %s, which %s %s", what, then, kMode);
  };
  constexpr const char* kNever = "does not go together with";
  if (t.options.rows != GA_ROWS_NONE) refuse("rows", kNever);
  if (!is_sum(p.reduction)) refuse("GA_REDUCE_MAX", kNever);
  const int32_t scope = model_.params.clip_of(p).scope;
  if (scope == GA_CLIP_AGC) refuse("GA_CLIP_AGC", kNever);
  if (!t.part.is_cut(t.shape)) return;
  constexpr const char* kWhole = "needs whole parameters, and this is a part, under";
  if (model_.params.is_coded(p) && !t.part.has_whole(p.code_block, t.shape))
    of.fail(GA_ERROR_UNSUPPORTED,
            "its state is GA_STATE_8BIT, and its part of %s is cut within blocks of %d elements of "
            "a row",
            text_of(t.part.whole).c_str(), p.code_block);
  const int op = model_.params.op_of(p);
  if (op >= 0 && (op_info(op).norms > 0 || op_info(op).factored || op_info(op).row_state))
    refuse(("the optimizer " + std::string(model_.params.group_of(p).info->name)).c_str(), kWhole);
  if (scope == GA_CLIP_PER_TENSOR) refuse("GA_CLIP_PER_TENSOR", kWhole);
}

// ---- Messages ---------------------------------------------------------------------------------------

// Ranks that update ahead meet once more in a window.
Agreement::Items OwnParameters::items() const {
  Items items = context_items(options_, state_);
  items.emplace_back("updates", "eager=" + std::to_string(model_.config.eager));
  return items;
}

uint64_t OwnParameters::settings_digest() {
  if (!settings_known_) {
    settings_ = digest_of(items());
    settings_known_ = true;
  }
  return settings_;
}

bool OwnParameters::is_fresh() {
  if (!parts_known_) {
    parts_ = digest_of(own_parts().text());
    parts_known_ = true;
  }
  return !has_agreed_ || parts_ != agreed_parts_;
}

bool OwnParameters::is_anyone_fresh() const {
  bool fresh = false;
  for (int32_t q = 0; q < comm_->ranks(); ++q) fresh = fresh || message_of(q).fresh != 0;
  return fresh;
}

OwnParameters::Message OwnParameters::message(Call call, const char* function) {
  Message m = {};
  m.call = call;
  m.number = calls_;
  m.name = digest_of(std::string(call == kDiscard ? "ga_step" : function));
  m.settings = settings_digest();
  m.fresh = is_fresh();
  m.data_rank = data_rank();
  return m;
}

const OwnParameters::Message& OwnParameters::message_of(int32_t rank) const {
  return *reinterpret_cast<const Message*>(&gathered_[static_cast<size_t>(rank * kWords)]);
}

BinnedSum OwnParameters::sum_of(int32_t rank, size_t group) const {
  if (group >= kSums)
    return rest_[static_cast<size_t>(rank) * (sums_.size() - kSums) + group - kSums];
  BinnedSum sum;
  std::memcpy(static_cast<void*>(&sum),
              &gathered_[static_cast<size_t>(rank * kWords + kMessageWords) +
                         group * static_cast<size_t>(kSumWords)],
              sizeof sum);
  return sum;
}

void OwnParameters::gather(const Message& own, const std::optional<Error>& failure,
                           const char* function) {
  comm_->check();
  const auto ranks = static_cast<size_t>(comm_->ranks());
  sent_.assign(static_cast<size_t>(kWords), 0);
  gathered_.resize(ranks * static_cast<size_t>(kWords));
  std::memcpy(sent_.data(), &own, sizeof own);
  if (!sums_.empty())
    std::memcpy(sent_.data() + kMessageWords, sums_.data(),
                std::min(kSums, sums_.size()) * sizeof(BinnedSum));
  comm_->all_gather("what each rank brings", sent_.data(), gathered_.data(), kWords, GA_I64);
  ++calls_;
  bool failed = false, alike = true, steps = true;
  for (int32_t q = 0; q < comm_->ranks(); ++q) {
    const Message& other = message_of(q);
    failed = failed || other.failed != 0;
    alike = alike && other.settings == message_of(0).settings;
    steps = steps && other.call == kStep;
    if (other.name != message_of(0).name || other.number != message_of(0).number)
      fail_call(function, q);
  }
  if (failed) vote(function, failure ? &*failure : nullptr);
  if (failure) throw *failure;
  if (!alike) explain("the settings", items());
  if (!steps || sums_.size() <= kSums)
    return;  // groups are as many on all ranks, by their settings
  const size_t rest = sums_.size() - kSums;
  rest_.resize(ranks * rest);
  comm_->all_gather("sums of more groups", &sums_[kSums], rest_.data(),
                    static_cast<int64_t>(rest) * kSumWords, GA_I64);
}

void OwnParameters::agree() {
  comm_->attend();
  sums_.clear();
  Message own = message(kSetComm, "ga_context_set_comm");
  const std::optional<Error> failure = failure_of([this] {
    check_comm_settings();
    check();
  });
  own.failed = failure.has_value();
  gather(own, failure, "ga_context_set_comm");
  agree_on_parts("ga_context_set_comm");
}

void OwnParameters::on_all_ranks(const char* what, bool,
                                 const std::function<void(const Ready&)>& work) {
  sums_.clear();
  gather(message(kOther, what), {}, what);
  if (is_anyone_fresh()) agree_on_parts(what);
  all_or_none(what, true, false, work);
}

bool OwnParameters::has_one_path(const char* what, const char* path) {
  const std::vector<std::string> paths = gather_texts("paths", path);
  if (std::all_of(paths.begin(), paths.end(), [&](const auto& p) { return p == paths[0]; }))
    return paths.size() > 1;
  for (size_t b = 0; b < paths.size(); ++b)
    for (size_t a = 0; a < b; ++a)
      if (paths[a] == paths[b])
        fail(GA_ERROR_INVALID_ARGUMENT,
             "%s: ranks %zu and %zu gave the same path, \"%.200s\", and others gave other ones; "
             "with "
             "%s all ranks give one path, or each a path of its own",
             what, a, b, paths[a].c_str(), kMode);
  return false;
}

// ---- Parts of parameters ----------------------------------------------------------------------------

void OwnParameters::agree_on_parts(const char* what) {
  const OwnParts own = own_parts();
  const std::vector<std::string> texts = gather_texts("parts of parameters", own.text());
  std::map<std::string, std::vector<PartOfRank>> all;
  for (size_t q = 0; q < texts.size(); ++q)
    for (auto& [name, part] : OwnParts::from(texts[q]).parts)
      all[name].push_back({part, static_cast<int32_t>(q)});
  for (const auto& [name, parts] : all) check_whole(what, name, parts);
  counts_.assign(model_.params.size(), 0);
  for (size_t i = 0; i < model_.params.size(); ++i) {
    const Tensor& t = model_.params.tensor(i);
    if (t.removed) continue;
    // The first rank that has it counts what several have.
    const std::vector<PartOfRank>& parts = all[t.name];
    const auto first = std::find_if(parts.begin(), parts.end(), [&](const PartOfRank& p) {
      return p.is_same(own.parts.at(t.name));
    });
    counts_[i] = first->rank == comm_->rank();
  }
  names_.clear();
  for (const auto& entry : all) names_.insert(entry.first);
  is_fresh();
  agreed_parts_ = parts_;
  has_agreed_ = true;
}

// That on which most parts begin at different places.
size_t OwnParameters::most_cut_axis(const std::vector<PartOfRank>& parts) {
  size_t most = 0, axis = 0;
  for (size_t a = 0; a < parts[0].whole.size(); ++a) {
    std::set<int64_t> begins;
    for (const PartOfRank& p : parts) begins.insert(p.first[a]);
    if (begins.size() > most) most = begins.size(), axis = a;
  }
  return axis;
}

// All ranks compare the same, so each throws what the others do.
void OwnParameters::check_whole(const char* what, const std::string& name,
                                const std::vector<PartOfRank>& parts) const {
  const PartOfRank& a = parts[0];
  const auto wrong = [&](const std::string& text) {
    fail(GA_ERROR_COMMUNICATION, "%s: parameter \"%.200s\": %.700s", what, name.c_str(),
         text.c_str());
  };
  const auto rank_of = [](const PartOfRank& p) { return "rank " + std::to_string(p.rank); };
  const auto differ = [&](const PartOfRank& b, const char* field, const std::string& of_b,
                          const std::string& of_a) {
    wrong(std::string(field) + " is " + of_b + " on " + rank_of(b) + ", but " + of_a + " on " +
          rank_of(a));
  };
  for (const PartOfRank& b : parts) {
    if (b.whole != a.whole) differ(b, "the whole shape", text_of(b.whole), text_of(a.whole));
    if (b.dtype != a.dtype)
      differ(b, "its dtype", dtype_info(b.dtype).name, dtype_info(a.dtype).name);
    if (b.group != a.group)
      differ(b, "its group", std::to_string(b.group), std::to_string(a.group));
  }
  // Parts that are the same follow each other, and one that overlaps others is compared with those that have not ended
  // where it begins: R log R steps for R ranks where one axis is cut.
  const size_t axis = most_cut_axis(parts);
  const auto begin_of = [axis](const PartOfRank& p) { return p.first.empty() ? 0 : p.first[axis]; };
  std::vector<const PartOfRank*> order, open;
  for (const PartOfRank& b : parts)
    if (b.count() > 0) order.push_back(&b);
  std::stable_sort(order.begin(), order.end(), [&](const PartOfRank* p, const PartOfRank* q) {
    return std::tuple(begin_of(*p), std::tie(p->first, p->shape)) <
           std::tuple(begin_of(*q), std::tie(q->first, q->shape));
  });
  int64_t held = 0;
  for (size_t k = 0, end = 0; k < order.size(); k = end) {
    const PartOfRank& b = *order[k];
    while (end < order.size() && order[end]->is_same(b)) ++end;
    for (size_t j = k; j < end; ++j)
      if (const PartOfRank& same = *order[j]; same.copies != static_cast<int64_t>(end - k))
        wrong(std::to_string(end - k) + (end - k == 1 ? " rank has" : " ranks have") +
              " the part " + text_of(b.shape) + " from " + text_of(b.first) + ", but " +
              rank_of(same) + " said that " + std::to_string(same.copies) + " would (copies)");
    const auto has_ended = [&](const PartOfRank* p) {
      return !p->first.empty() && p->first[axis] + p->shape[axis] <= b.first[axis];
    };
    open.erase(std::remove_if(open.begin(), open.end(), has_ended), open.end());
    for (const PartOfRank* other : open)
      if (other->overlaps(b))
        wrong("the parts of " + rank_of(*other) + ", " + text_of(other->shape) + " from " +
              text_of(other->first) + ", and of " + rank_of(b) + ", " + text_of(b.shape) +
              " from " + text_of(b.first) + ", overlap");
    open.push_back(&b);
    held += b.count();
  }
  if (held != count_of(a.whole))
    wrong("the ranks have " + std::to_string(held) + " of its " +
          std::to_string(count_of(a.whole)) + " elements, whose shape is " + text_of(a.whole));
}

// ---- The end of a window ----------------------------------------------------------------------------

Source OwnParameters::gradient_of(size_t i) const {
  const Param& p = model_.params[i];
  if (p.held() == Held::kBorrowed) return stages_.writer.borrowed_of(p);
  const Array sums = stages_.writer.target_of(static_cast<ga_param>(i));
  return {sums.data, sums.format, 1, nullptr};
}

void OwnParameters::lay_out_sums() {
  if (laid_out_) return;
  first_chunks_.clear();
  size_t chunks = 0;
  for (const Param& p : model_.params) {
    first_chunks_.push_back(chunks);
    chunks += static_cast<size_t>(chunk_count(p.count));
  }
  chunks_.resize(chunks);
  ahead_.resize(model_.params.size());
  model_.arrays.reserve(std::max(static_cast<int64_t>(chunks), model_.arrays.chunks()),
                        model_.params.size());
  laid_out_ = true;
}

BinnedTask OwnParameters::task_of(size_t i) {
  const Param& p = model_.params[i];
  return {gradient_of(i), p.f64, p.count, &chunks_[first_chunks_[i]]};
}

const BinnedTask* OwnParameters::sum_ahead(ga_param id) {
  const auto i = static_cast<size_t>(id);
  ahead_[i] = task_of(i);
  return &ahead_[i];
}

void OwnParameters::sum_squares() {
  tasks_.clear();
  lay_out_sums();
  const auto has_gradient = [](const Param& p) {
    return !p.frozen && p.held() != Held::kNothing && p.count > 0;
  };
  for (size_t i = 0; i < model_.params.size(); ++i)
    if (const Param& p = model_.params[i]; has_gradient(p) && p.ahead == Ahead::kNot)
      tasks_.push_back(task_of(i));
  model_.backend->host()->sum_binned({tasks_.data(), tasks_.size()});
  nonfinite_at_ = -1;
  for (size_t i = 0; i < model_.params.size(); ++i) {
    const Param& p = model_.params[i];
    if (!has_gradient(p)) continue;
    BinnedSum sum;
    for (int64_t c = 0; c < chunk_count(p.count); ++c)
      sum.add(chunks_[first_chunks_[i] + static_cast<size_t>(c)]);
    if (sum.nonfinite != 0 && nonfinite_at_ < 0) nonfinite_at_ = static_cast<int64_t>(i);
    BinnedSum& group = sums_[static_cast<size_t>(p.group)];
    if (i >= counts_.size() || counts_[i])
      group.add(sum);
    else
      group.nonfinite |= sum.nonfinite;
  }
}

// Ranks with the same samples bring the same weight, which counts once.
WindowSums OwnParameters::brought() const {
  WindowSums sums = {};
  std::vector<const Message*> of_data(static_cast<size_t>(data_ranks()));
  for (int32_t q = 0; q < comm_->ranks(); ++q) {
    const Message& m = message_of(q);
    const Message*& first = of_data[static_cast<size_t>(m.data_rank)];
    if (!first) {
      first = &m;
      sums.weight += m.weight;
      sums.micro_batches += m.micro_batches;
      sums.weighted += m.weighted;
    } else if (first->weight != m.weight || first->micro_batches != m.micro_batches) {
      fail(GA_ERROR_COMMUNICATION,
           "rank %d has brought %g micro-batches of weight %g in all, but another rank with the "
           "same samples (data_rank %d) %g of weight %g",
           q, m.micro_batches, m.weight, static_cast<int>(m.data_rank), first->micro_batches,
           first->weight);
    }
  }
  for (size_t r = 0; r < of_data.size(); ++r)
    if (!of_data[r])
      fail(GA_ERROR_COMMUNICATION, "no rank has data_rank %zu, of %zu (data_ranks)", r,
           of_data.size());
  return sums;
}

void OwnParameters::meet_ahead(double weight) {
  if (weight_ahead_ != 0) return lay_out_sums();  // the last micro-batch is opened again
  sums_.clear();
  Message own = message(kFull, "ga_micro_begin");
  own.weight = weight;
  const std::optional<Error> failure = failure_of([this] {
    if (!checked_) check();
    checked_ = true;
    lay_out_sums();
  });
  own.failed = failure.has_value();
  gather(own, failure, "ga_micro_begin");
  if (is_anyone_fresh()) agree_on_parts("ga_micro_begin");
  weight_ahead_ = brought().weight;
}

bool OwnParameters::begin_end(WindowTotals& totals, bool) {
  for (;;) {
    sums_.assign(model_.params.groups.size(), {});
    Message own = message(kStep, "ga_step");
    const std::optional<Error> failure = failure_of([&] {
      if (!checked_) check();
      checked_ = true;
      sum_squares();
    });
    own.failed = failure.has_value();
    own.weight = totals.weight;
    own.micro_batches = static_cast<double>(totals.micro_batches);
    own.weighted = static_cast<double>(totals.weighted);
    gather(own, failure, "ga_step");
    for (int32_t q = 0; q < comm_->ranks(); ++q)
      if (message_of(q).call == kDiscard) return weight_ahead_ = 0, false;
    if (!is_anyone_fresh()) break;
    agree_on_parts("ga_step");
  }
  window_ = brought();
  weight_ahead_ = 0;
  bool nonfinite = false;
  for (int32_t q = 0; q < comm_->ranks(); ++q)
    for (size_t k = 0; k < sums_.size(); ++k) nonfinite = nonfinite || sum_of(q, k).nonfinite != 0;
  if (nonfinite && nonfinite_at_ < 0)
    nonfinite_at_ = static_cast<int64_t>(model_.params.size());  // on another rank
  totals.over_ranks = true;
  totals.weight = window_.weight;
  totals.micro_batches = static_cast<int64_t>(window_.micro_batches);
  totals.weighted = static_cast<int64_t>(window_.weighted);
  return true;
}

// The program has reduced the gradients: what is added up here are sums for the decision.
StepSums OwnParameters::reduce(const WindowTotals&, Params, const WriteWindow& write) {
  Control& c = *model_.tables.control.at();
  c.sums = window_;
  c.nonfinite_at = nonfinite_at_;
  const double mean = mean_of(model_.tables.settings[0], window_.weight);
  BinnedSum all, shared;
  for (size_t k = 0; k < sums_.size(); ++k) {
    BinnedSum group;
    for (int32_t q = 0; q < comm_->ranks(); ++q) group.add(sum_of(q, k));
    all.add(group);
    if (model_.params.groups[k].own_clip)
      model_.tables.group_states.at(k)->sum_squares = group.value() * mean * mean;
    else
      shared.add(group);
  }
  c.totals.all = all.value() * mean * mean;
  c.totals.shared = shared.value() * mean * mean;
  return write();
}

void OwnParameters::discard() {
  weight_ahead_ = 0;
  if (has_failed()) return;
  sums_.assign(model_.params.groups.size(), {});
  gather(message(kDiscard, "ga_discard"), {}, "ga_discard");
}

}  // namespace ga
