// SPDX-License-Identifier: Apache-2.0
// The settings of a context in a file of state: written, compared, and taken from it.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <iterator>

#include "backend/codes.hpp"
#include "batchnorm/batchnorm.hpp"
#include "checkpoint/checkpoint.hpp"
#include "core/error.hpp"
#include "core/tensor.hpp"
#include "ops/muon.hpp"

namespace ga {
namespace {

// Whether the key is that of a group's optimizer, not of its clip or schedule.
bool is_optimizer(std::string_view key) {
  return begins_with(key, "group.") && key.find('.', std::strlen("group.")) == key.npos;
}

// The names of the numbers of ga_optimizer.ns_table in a group's text.
std::vector<std::string> ns_numbers(int32_t rows) {
  std::vector<std::string> names;
  for (int32_t i = 1; i <= rows; ++i)
    for (const char* const letter : {"_a", "_b", "_c"})
      names.push_back("ns_table_" + std::to_string(i) + letter);
  return names;
}

// Reads an optimizer; its ns_table is put into `table`.
void read_optimizer(const Fields& f, ga_optimizer& o, std::vector<double>& table) {
  f.get_fields(o);
  if (o.ns_rows < 0 || o.ns_rows > Muon::kMostRows)
    fail(GA_ERROR_FORMAT, "its ns_rows was %d", o.ns_rows);
  for (const std::string& name : ns_numbers(o.ns_rows)) f.get(name.c_str(), table.emplace_back());
  o.ns_table = table.empty() ? nullptr : table.data();
}

}  // namespace

// Whether some array of the parameter is rounded by keys that depend on its number (Tensor::key).
bool Checkpoint::is_stochastic(size_t i) const {
  const Param& p = model_.params[i];
  const bool average = model_.options.ema && model_.arrays.average_of(p).format == GA_BF16;
  return model_.params.tensor(i).options.rounding == GA_ROUND_STOCHASTIC || average ||
         rounds_state(model_.params.group_of(p).optimizer) ||
         (model_.config.accumulation == GA_ACCUMULATE_STOCHASTIC && is_sum(p.reduction) &&
          dtype_info(p.accumulator_dtype).size == 2);
}

Fields Checkpoint::param_settings(size_t i, bool with_key) const {
  const Param& p = model_.params[i];
  const Tensor& t = model_.params.tensor(i);
  ga_param_options options = t.options;
  if (!model_.params.has_master(i)) options.master = GA_MASTER_NONE;
  Fields f;
  f.add("group", p.group);
  f.add_fields(options);
  f.add("accumulator_dtype", int32_t{p.accumulator_dtype});
  f.add("lr_scale", t.lr_scale);
  f.add("weight_decay_scale", t.weight_decay_scale);
  f.add("frozen", p.frozen);
  if (model_.params.is_coded(p)) f.add("code_block", int32_t{p.code_block}, kCodeBlock);
  if (with_key && is_stochastic(i)) f.add("index", t.key);
  return f;
}

// All that changes numbers, by key.
Checkpoint::Settings Checkpoint::settings() const {
  Settings list = settings_of_context();
  Settings more = settings_of_tensors();
  std::move(more.begin(), more.end(), std::back_inserter(list));
  return list;
}

Checkpoint::Settings Checkpoint::settings_of_context() const {
  Settings list;
  const auto add = [&](std::string key, const auto& fields) {
    Fields f;
    f.add_fields(fields);
    list.emplace_back(std::move(key), std::move(f));
  };
  const ga_config& config = model_.config;
  Fields context;
  context.add("gradient_kind", config.gradient_kind);
  context.add("reduce", config.reduce);
  context.add("missing", config.missing);
  context.add("nonfinite", config.nonfinite);
  context.add("accumulation", config.accumulation);
  context.add("noise_scale", config.noise_scale);
  context.add("noise_smoothing", config.noise_smoothing);
  context.add("loss_scale", config.loss_scale);
  context.add("seed", config.seed);
  list.emplace_back("context", std::move(context));
  add("clip", model_.params.clip);
  if (model_.options.scaled) add("loss_scaler", model_.options.scaler);
  if (model_.options.ema) add("ema", *model_.options.ema);
  for (size_t k = 0; k < model_.params.groups.size(); ++k) {
    const Group& g = model_.params.groups[k];
    const std::string key = "group." + std::to_string(k);
    Fields optimizer;
    optimizer.add_fields(g.optimizer);
    const std::vector<std::string> names = ns_numbers(g.optimizer.ns_rows);
    for (size_t i = 0; i < names.size(); ++i) optimizer.add(names[i].c_str(), (*g.ns_table)[i]);
    list.emplace_back(key, std::move(optimizer));
    if (g.own_clip) add(key + ".clip", g.clip);
    if (g.schedule.struct_size == 0) continue;
    Fields schedule;
    schedule.add_fields(g.schedule);
    schedule.add("table_size", g.schedule.table_size);
    Checksum sum;
    sum.add(g.rates.host_data(), static_cast<size_t>(g.schedule.table_size) * sizeof(double));
    schedule.add("table_xxh3", sum.value());
    list.emplace_back(key + ".schedule", std::move(schedule));
  }
  return list;
}

Checkpoint::Settings Checkpoint::settings_of_tensors(bool with_keys) const {
  Settings list;
  for (size_t i = 0; i < model_.params.size(); ++i)
    if (!model_.params.tensor(i).removed)
      list.emplace_back("parameter." + std::string(model_.params.tensor(i).name),
                        param_settings(i, with_keys));
  for (ga_bn id = 0; id < stages_.layers.count(); ++id) {
    const ga_bn_info layer = stages_.layers.info(id);
    Fields f;
    f.add_fields(stages_.layers.options(id));
    f.add("frozen", layer.frozen != 0);
    list.emplace_back("layer." + std::string(layer.name), std::move(f));
  }
  return list;
}

// What the contents of an open window depend on.
Fields Checkpoint::window_settings() const {
  const ga_config& config = model_.config;
  Fields f;
  f.add("accumulation", config.accumulation);
  f.add("nonfinite", config.nonfinite);
  f.add("gradient_kind", config.gradient_kind);
  f.add("noise_scale", config.noise_scale);
  f.add("clip_micro", next_options().clip_micro());
  f.add("scaled", next_options().scaled);
  return f;
}

// ---- Comparing -----------------------------------------------------------------------------------

// Whether GA_SETTINGS_TAKE takes it from the file.
bool Checkpoint::may_be_taken(std::string_view key, std::string_view field) const {
  if (key == "context") return field == "seed" || field == "loss_scale";
  if (begins_with(key, "parameter."))
    return field == "lr_scale" || field == "weight_decay_scale" || field == "frozen";
  if (begins_with(key, "layer.")) return field == "frozen";
  if (is_optimizer(key)) return field != "kind" && field != "flavor";
  if (begins_with(key, "group.")) return true;
  return key == "clip" || key == "loss_scaler";
}

// Whether the state of a parameter means something else with another value: that of MUON belongs to matrices, and that in
// 8 bits to blocks.
bool Checkpoint::is_cut(std::string_view key, std::string_view field) const {
  constexpr std::string_view kParameter = "parameter.";
  const std::string_view fields[] = {"cut_matrices", "batch_axes", "output_axis", "split_axis",
                                     "matrix_parts"};
  if (!begins_with(key, kParameter)) return false;
  if (field == "code_block") return true;
  if (std::find(std::begin(fields), std::end(fields), field) == std::end(fields)) return false;
  const ga_param id = model_.params.find(key.substr(kParameter.size()));
  return id >= 0 && model_.params.group_of(model_.params[id]).info->matrices_only;
}

void Checkpoint::compare_settings() const {
  if (!file_->is_ours()) return;
  Problems problems;
  const bool keeps = options_.settings == GA_SETTINGS_KEEP;
  const bool takes = options_.settings == GA_SETTINGS_TAKE;
  const Settings ours = settings();
  std::map<std::string_view, const Fields*> known;
  for (const auto& setting : ours) {
    const std::string& key = setting.first;
    const Fields& fields = setting.second;
    known[key] = &fields;
    const std::string* const text = file_->find(key);
    const bool optional = !begins_with(key, "parameter.") && !begins_with(key, "layer.");
    if (!text) {
      if (optional && !keeps && !(takes && may_be_taken(key, "")))
        problems.add("the file has no " + key);
      continue;
    }
    fields.each_difference(
        Fields(*text, key.c_str()),
        [&, &key = key](const char* field, const char* theirs, const char* here) {
          if ((keeps && !is_cut(key, field)) || (takes && may_be_taken(key, field))) return;
          if (begins_with(key, "parameter.") && std::strcmp(field, "index") == 0 && here) return;
          const bool kind = std::strcmp(field, "kind") == 0 && is_optimizer(key);
          const auto text_of = [&](const char* number) {
            return kind ? optimizer_name(number) : readable(number);
          };
          problems.add(key + ": " + field + " is " + text_of(theirs) + " in the file, but " +
                       (here ? text_of(here) : "not known") + " here");
        });
  }
  for (const auto& [whole_key, text] : file_->metadata()) {
    if (!begins_with(whole_key, kOurs)) continue;
    const std::string_view key = std::string_view(whole_key).substr(kOurs.size());
    const bool setting = key == "loss_scaler" || key == "ema" ||
                         (begins_with(key, "group.") && key.substr(key.rfind('.') + 1) != "state");
    if (!setting || known.count(key) > 0 || keeps) continue;
    if (!(takes && (key == "loss_scaler" || key.find(".clip") != std::string_view::npos ||
                    key.find(".schedule") != std::string_view::npos)))
      problems.add("the context has no " + std::string(key));
  }
  problems.fail_if_any("the settings in the file are not those of the context");
}

// Which key each parameter is to have: that in the file, so that a run goes on with its random bits whatever
// was added and removed before it was saved. One of which the file has none gets another if its own is given
// away.
void Checkpoint::read_keys() {
  constexpr int64_t kLargest = kLeastNameKey - (1 << 20);  // with room for parameters to come
  const ParamList& params = model_.params;
  keys_.clear();
  next_key_ = params.next_key();
  const bool of_ranks = assembled_ && !assembled_->is_of_one();  // each has given keys of its own
  if (const std::string* const text = of_ranks ? nullptr : file_->find("keys")) {
    int64_t next = 0;
    Fields(*text, "keys").get("next", next);
    next_key_ = std::max(
        next_key_, static_cast<int32_t>(whole(static_cast<double>(next), 0, kLargest, "next")));
  }
  std::vector<std::pair<int32_t, size_t>> known;
  std::vector<char> is_known(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    keys_.push_back(params.tensor(i).key);
    if (params.tensor(i).removed || !is_stochastic(i)) continue;
    const std::string* const text = file_->find("parameter." + std::string(params.name(i)));
    if (!text) continue;
    const Fields f(*text, params.name(i));
    if (!f.has("index")) continue;
    int64_t key = 0;
    f.get("index", key);
    const bool of_name = key >= kLeastNameKey;
    if (of_ranks && !of_name && params.tensor(i).part.whole.empty()) continue;
    keys_[i] = static_cast<int32_t>(
        whole(static_cast<double>(key), 0, of_name ? INT32_MAX : kLargest, "index"));
    is_known[i] = true;
    if (of_name || of_ranks) continue;
    known.emplace_back(keys_[i], i);
    next_key_ = std::max(next_key_, keys_[i] + 1);
  }
  std::sort(known.begin(), known.end());
  const auto of_key = [](const auto& a, const auto& b) { return a.first < b.first; };
  for (size_t k = 1; k < known.size(); ++k)
    if (known[k].first == known[k - 1].first)
      fail(GA_ERROR_FORMAT, "\"%.200s\" and \"%.200s\" have the same index, %d",
           params.name(known[k - 1].second), params.name(known[k].second), known[k].first);
  for (size_t i = 0; i < params.size(); ++i)
    if (!is_known[i] && !params.tensor(i).removed &&
        std::binary_search(known.begin(), known.end(), std::pair(keys_[i], i), of_key))
      keys_[i] = next_key_++;
}

// ---- Taking --------------------------------------------------------------------------------------

// Reads the settings that are taken from the file, and checks them.
void Checkpoint::read_settings() {
  const auto read = [&](const std::string& key, auto& fields) {
    const std::string* const text = file_->find(key);
    if (text) Fields(*text, key.c_str()).get_fields(fields);
    return text != nullptr;
  };
  const ParamList& params = model_.params;
  auto taken = std::make_unique<Taken>(Taken{
      {}, params.clip, model_.options, model_.config.seed, model_.config.loss_scale, {}, {}, {}});
  Taken& t = *taken;
  read("clip", t.clip);
  check_clip(t.clip, model_.config);
  stages_.layers.check_no_passes(t.clip);
  t.options.scaler = {};
  t.options.scaled = read("loss_scaler", t.options.scaler);
  if (t.options.scaled) check_loss_scaler(t.options.scaler);
  if (const std::string* const text = file_->find("context")) {
    const Fields f(*text, "context");
    f.get("seed", t.seed);
    f.get("loss_scale", t.loss_scale);
    if (!std::isfinite(t.loss_scale) || t.loss_scale == 0)
      fail(GA_ERROR_FORMAT, "its loss_scale was %g", t.loss_scale);
  }
  for (size_t k = 0; k < params.groups.size(); ++k) {
    const Group& now = params.groups[k];
    const std::string key = "group." + std::to_string(k);
    Group g = {now.optimizer, now.info, {}, false, default_clip(), {}, {}, nullptr};
    std::vector<double> table;
    if (const std::string* const text = file_->find(key))
      read_optimizer(Fields(*text, key.c_str()), g.optimizer, table);
    check_optimizer(g.optimizer);
    check_same_state(now.optimizer, g.optimizer);
    g.set_optimizer(g.optimizer);
    now.prepare_products(*model_.backend, g.optimizer);
    for (int matrix = 0; matrix < 2; ++matrix) g.op[matrix] = g.info->op(g.optimizer, matrix != 0);
    g.own_clip = read(key + ".clip", g.clip);
    check_clip(g.clip, model_.config);
    if (g.own_clip) stages_.layers.check_no_passes(g.clip);
    if (read(key + ".schedule", g.schedule)) read_schedule(key, g);
    t.groups.push_back(std::move(g));
  }
  for (size_t i = 0; i < params.size(); ++i) {
    const Tensor& tensor = params.tensor(i);
    Taken::OfParam of = {tensor.lr_scale, tensor.weight_decay_scale, params[i].frozen};
    if (const std::string* const text = file_->find("parameter." + std::string(tensor.name));
        text && !tensor.removed) {
      const Fields f(*text, tensor.name);
      f.get("lr_scale", of.lr_scale);
      f.get("weight_decay_scale", of.weight_decay_scale);
      f.get("frozen", of.frozen);
      check_rate("lr_scale", of.lr_scale);
      check_rate("weight_decay_scale", of.weight_decay_scale);
    }
    t.params.push_back(of);
  }
  for (ga_bn id = 0; id < stages_.layers.count(); ++id) {
    const ga_bn_info layer = stages_.layers.info(id);
    bool frozen = layer.frozen != 0;
    if (const std::string* const text = file_->find("layer." + std::string(layer.name)))
      Fields(*text, layer.name).get("frozen", frozen);
    t.frozen_layers.push_back(frozen);
  }
  t.options.choose_path(params, t.rules());
  taken_ = std::move(taken);
}

void Checkpoint::read_schedule(const std::string& key, Group& g) const {
  ga_schedule& s = g.schedule;
  s.struct_size = sizeof s;
  std::vector<double> table;
  const auto rates = names_.find(std::string(kOurs) + key + ".rates");
  if (s.kind == GA_SCHEDULE_TABLE && rates != names_.end())
    table = numbers(static_cast<int64_t>(rates->second));
  s.table = table.data();
  s.table_size = static_cast<int64_t>(table.size());
  check_schedule(s);
  s.table = nullptr;
  if (table.empty()) return;
  g.rates = Table<double>(*model_.backend, table.size());
  std::copy(table.begin(), table.end(), &g.rates.edit(0));
  g.rates.edit_all();
  g.rates.flush(*model_.backend);
}

void Checkpoint::take_settings() {
  const std::unique_ptr<Taken> t = std::move(taken_);
  ParamList& params = model_.params;
  params.groups = std::move(t->groups);
  params.clip = t->clip;
  model_.options = t->options;
  model_.config.seed = t->seed;
  model_.config.loss_scale = t->loss_scale;
  for (size_t i = 0; i < t->params.size(); ++i) {
    params.tensor(i).lr_scale = t->params[i].lr_scale;
    params.tensor(i).weight_decay_scale = t->params[i].weight_decay_scale;
    params[i].frozen = t->params[i].frozen;
  }
  model_.arrays.take_clip_units(std::move(t->clip_units));
  for (ga_bn id = 0; id < stages_.layers.count(); ++id)
    if (const bool frozen = t->frozen_layers[static_cast<size_t>(id)] != 0;
        frozen != (stages_.layers.info(id).frozen != 0))
      stages_.layers.set_frozen(id, frozen);
}

}  // namespace ga
