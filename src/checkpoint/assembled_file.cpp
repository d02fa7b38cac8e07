// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/assembled_file.hpp"

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "core/error.hpp"
#include "core/tensor.hpp"
#include "files/names.hpp"

namespace ga {
namespace {

constexpr size_t kReadAtOnce = size_t{1} << 20;

std::string micro_batches_name() { return std::string(kOurs) + "window.micro_batches"; }

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

}  // namespace

AssembledFile::AssembledFile(const OwnParts& here, std::vector<Source> sources,
                             const std::function<bool(const std::string&)>& knows)
    : here_(here), sources_(std::move(sources)), blocks_(sources_.size()) {
  for (const Source& s : sources_) {
    auto& names = names_.emplace_back();
    for (size_t k = 0; k < s.file->tensors().size(); ++k) names[s.file->tensors()[k].name] = k;
  }
  for (const auto& [name, part] : here_.parts) add_param(name, part);
  add_others(knows);
  add_micro_batches();
  add_metadata();
}

std::unique_ptr<StateReader> AssembledFile::reader() const {
  return std::make_unique<StateReader>(header_, sources_[0].file->is_ours());
}

// ---- What is in it ------------------------------------------------------------------------------

void AssembledFile::add(std::string name, std::string dtype, std::vector<int64_t> shape,
                        Made made) {
  const int64_t begin = header_.tensors.empty() ? 0 : header_.tensors.back().end;
  const int64_t bytes = safetensors::element_size(dtype) * count_of(shape);
  header_.tensors.push_back(
      {std::move(name), std::move(dtype), std::move(shape), begin, begin + bytes});
  made_.push_back(std::move(made));
}

// How many elements of a part have one of its tensor: blocks of state in 8 bits have a scale each, which lies in the part
// as its first element does. 0: the tensor is of no elements. to: the part that is to be made of it and of others.
int64_t AssembledFile::elements_for_each(size_t source, const safetensors::Tensor& t,
                                         const OwnPart& part, const OwnPart& to) const {
  if (t.shape == part.shape) return 1;
  constexpr std::string_view kScale = "_scale";
  if (!ends_with(t.name, kScale) || t.shape.size() != 1) return 0;
  const std::string_view codes = std::string_view(t.name).substr(0, t.name.size() - kScale.size());
  const auto found = names_[source].find(codes);
  if (found == names_[source].end() ||
      tensor_of({source, found->second, nullptr}).shape != part.shape || to.is_same(part))
    return 0;
  const int64_t scales = t.shape[0], block = scales > 0 ? part.count() / scales : 0;
  if (block == 0 || block * scales != part.count() || to.count() % block != 0)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "the codes of \"%.200s\" in the file have blocks that lie in more than one part here",
         std::string(codes).c_str());
  return block;
}

void AssembledFile::add_param(const std::string& name, const OwnPart& part) {
  struct Has {
    size_t source;
    const OwnPart* part;
  };
  std::vector<Has> all;  // each part once
  std::set<std::pair<std::vector<int64_t>, std::vector<int64_t>>> seen;
  for (size_t s = 0; s < sources_.size(); ++s) {
    const OwnPart* const theirs = sources_[s].own.find(name);
    if (!theirs) continue;
    if (theirs->whole != part.whole)
      fail(GA_ERROR_INVALID_ARGUMENT,
           "parameter \"%.200s\" is a part of one of shape %s in the file, but of shape %s here",
           name.c_str(), text_of(theirs->whole).c_str(), text_of(part.whole).c_str());
    if (seen.insert({theirs->first, theirs->shape}).second) all.push_back({s, theirs});
  }
  if (all.empty()) return;  // which the load finds
  // An empty part may have no state: what there is tells one that is not.
  const auto first =
      std::find_if(all.begin(), all.end(), [](const Has& h) { return h.part->count() > 0; });
  const Has& like = first == all.end() ? all[0] : *first;
  const StateReader& file = *sources_[like.source].file;
  const auto& names = names_[like.source];
  if (const std::string* const text = file.find("parameter." + name))
    settings_["parameter." + name] = *text;
  for (auto at = names.lower_bound(name); at != names.end() && begins_with(at->first, name); ++at) {
    const safetensors::Tensor& t = file.tensors()[at->second];
    if ((t.name != name && !is_state_of(t.name, name)) || ends_with(t.name, ".grad_accum.partials"))
      continue;
    const int64_t each = elements_for_each(like.source, t, *like.part, part);
    if (each == 0 || ends_with(t.name, ".grad_accum.window")) {
      add(t.name, t.dtype, t.shape, {nullptr, {{like.source, at->second, nullptr}}, {}});
      continue;
    }
    if (part.count() == 0 && t.name != name) continue;  // no elements, no arrays
    const auto shape_in = [&](const OwnPart& of) {
      return each == 1 ? of.shape : std::vector<int64_t>{of.count() / each};
    };
    Made made = {&part, {}, {}, each};
    for (const Has& h : all) {
      if (!h.part->overlaps(part)) continue;
      const auto found = names_[h.source].find(t.name);
      if (found == names_[h.source].end())
        fail(GA_ERROR_FORMAT, "\"%.200s\" is there in the file of one rank, but not of another",
             t.name.c_str());
      made.places.push_back({h.source, found->second, h.part});
      const safetensors::Tensor& other = tensor_of(made.places.back());
      if (other.dtype != t.dtype || other.shape != shape_in(*h.part))
        fail(GA_ERROR_FORMAT, "\"%.200s\" is %s %s in the file of one rank, but %s of another",
             t.name.c_str(), other.dtype.c_str(), text_of(other.shape).c_str(), t.dtype.c_str());
    }
    add(t.name, t.dtype, shape_in(part), std::move(made));
  }
}

// What is of no parameter that some rank has: settings that are arrays, and what a load has no place for.
void AssembledFile::add_others(const std::function<bool(const std::string&)>& knows) {
  const std::string micro_batches = micro_batches_name();
  const auto is_param = [&](std::string_view view) {
    const std::string name(view);
    return here_.find(name) || knows(name);
  };
  std::map<std::string_view, bool> added;
  for (size_t s = 0; s < sources_.size(); ++s)
    for (const auto& [key, k] : names_[s]) {
      const safetensors::Tensor& t = sources_[s].file->tensors()[k];
      const bool is_setting = begins_with(key, kOurs);
      if (is_setting ? s > 0 || t.name == micro_batches
                     : is_param(key) || !owner_of(key, is_param).empty())
        continue;
      if (!std::exchange(added[key], true))
        add(t.name, t.dtype, t.shape, {nullptr, {{s, k, nullptr}}, {}});
    }
}

// The micro-batches of a data rank's open window: four numbers for each.
std::vector<double> AssembledFile::micro_batches_of(int32_t data_rank) {
  for (size_t s = 0; s < sources_.size(); ++s) {
    if (sources_[s].own.samples.data_rank != data_rank) continue;
    const auto found = names_[s].find(micro_batches_name());
    if (found == names_[s].end()) return {};
    const safetensors::Tensor& t = tensor_of({s, found->second, nullptr});
    if (t.dtype != "F64" || t.shape.size() != 2 || t.shape[1] != 4)
      fail(GA_ERROR_FORMAT, "the micro-batches of its window have the shape %s",
           text_of(t.shape).c_str());
    std::vector<double> numbers(static_cast<size_t>(count_of(t.shape)));
    read_source(s, sources_[s].file->data_begin() + t.begin,
                reinterpret_cast<char*>(numbers.data()), numbers.size() * sizeof(double));
    return numbers;
  }
  fail(GA_ERROR_INVALID_ARGUMENT,
       "it has nothing of data rank %d of %d, and an open window needs all of them: the index of "
       "these files has",
       data_rank, sources_[0].own.samples.data_ranks);
}

void AssembledFile::add_micro_batches() {
  const std::string name = micro_batches_name();
  if (std::none_of(names_.begin(), names_.end(),
                   [&](const auto& names) { return names.count(name) > 0; }))
    return;
  const Samples &theirs = sources_[0].own.samples, &ours = here_.samples;
  std::vector<double> all = micro_batches_of(0);
  for (size_t k = 0; k < all.size(); k += 4) all[k] = 0;  // the weight
  for (int32_t r = 0; r < theirs.data_ranks; ++r) {
    const std::vector<double> numbers = micro_batches_of(r);
    if (numbers.size() != all.size())
      fail(GA_ERROR_INVALID_ARGUMENT,
           "its open window has %zu micro-batches on one rank and %zu on another, so that only the "
           "ranks that saved it go on with it, with the parts that they had",
           all.size() / 4, numbers.size() / 4);
    if (r % ours.data_ranks != ours.data_rank) continue;
    for (size_t k = 0; k < all.size(); k += 4) all[k] += numbers[k];
  }
  gradient_scale_ = theirs.reduced_over / ours.reduced_over;
  const auto count = static_cast<int64_t>(all.size() / 4);
  add(name, "F64", {count, 4}, {nullptr, {}, std::move(all)});
}

// Of the first file, but for settings of parameters.
void AssembledFile::add_metadata() {
  for (const auto& entry : sources_[0].file->metadata()) {
    const std::string_view key = entry.first;
    if (begins_with(key, kOurs) && begins_with(key.substr(kOurs.size()), "parameter.")) continue;
    header_.metadata.push_back(entry);
  }
  for (const auto& [key, text] : settings_)
    header_.metadata.emplace_back(std::string(kOurs) + key, text);
}

// ---- Reading ------------------------------------------------------------------------------------

int64_t AssembledFile::bytes_to_check() const {
  int64_t bytes = 0;
  for (const Made& made : made_)
    for (const Place& place : made.places) bytes += tensor_of(place).end - tensor_of(place).begin;
  return bytes;
}

void AssembledFile::check(const std::function<void(int64_t bytes)>& report) {
  std::vector<char> buffer(kReadAtOnce);
  for (const Made& made : made_)
    for (const Place& place : made.places) {
      Source& s = sources_[place.source];
      const safetensors::Tensor& t = tensor_of(place);
      s.file->seek(place.tensor);
      for (int64_t left = t.end - t.begin; left > 0;) {
        const auto size = static_cast<size_t>(std::min<int64_t>(left, kReadAtOnce));
        s.file->next(s.read, buffer.data(), size);
        left -= static_cast<int64_t>(size);
        report(static_cast<int64_t>(size));
      }
    }
}

// Where the elements of a part lie in those of another one, as runs that are as long as they can be.
void AssembledFile::list_runs(size_t tensor) {
  runs_.clear();
  listed_ = tensor;
  const Made& made = made_[tensor];
  const safetensors::Tensor& t = header_.tensors[tensor];
  const auto bytes_of = [&](int64_t elements) {
    return elements / made.each * safetensors::element_size(t.dtype);
  };
  for (const Place& place : made.places) {
    const int64_t begin = sources_[place.source].file->data_begin() + tensor_of(place).begin;
    if (!place.part) {
      runs_.push_back({0, t.end - t.begin, place.source, begin});
      continue;
    }
    const OwnPart &to = *made.part, &from = *place.part;
    const size_t axes = to.shape.size();
    std::vector<int64_t> first(axes), extent(axes);  // of what they have in common
    for (size_t a = 0; a < axes; ++a) {
      first[a] = std::max(to.first[a], from.first[a]);
      extent[a] = std::min(to.first[a] + to.shape[a], from.first[a] + from.shape[a]) - first[a];
    }
    // Behind this axis, both have all of what the other has, so that a run goes on.
    size_t axis = axes == 0 ? 0 : axes - 1;
    while (axis > 0 && extent[axis] == to.shape[axis] && extent[axis] == from.shape[axis]) --axis;
    int64_t length = 1;
    for (size_t a = axis; a < axes; ++a) length *= extent[a];
    int64_t count = 1;
    for (size_t a = 0; a < axis; ++a) count *= extent[a];
    std::vector<int64_t> at(axes);  // of a run's first element, in what they have in common
    const auto offset_in = [&](const OwnPart& part) {
      int64_t offset = 0;
      for (size_t a = 0; a < axes; ++a)
        offset = offset * part.shape[a] + first[a] - part.first[a] + at[a];
      return bytes_of(offset);
    };
    for (int64_t k = 0; k < count; ++k) {
      runs_.push_back({offset_in(to), bytes_of(length), place.source, begin + offset_in(from)});
      for (size_t a = axis; a-- > 0;) {
        if (++at[a] < extent[a]) break;
        at[a] = 0;
      }
    }
  }
  std::sort(runs_.begin(), runs_.end(), [](const Run& a, const Run& b) { return a.to < b.to; });
  int64_t end = 0;
  bool joined = true;
  for (const Run& run : runs_) {
    joined = joined && run.to == end;
    end += run.bytes;
  }
  if (!joined || end != t.end - t.begin)
    fail(GA_ERROR_FORMAT, "the files have not all of \"%.200s\", or some of it twice",
         t.name.c_str());
}

void AssembledFile::read(int64_t offset, void* to, size_t size) {
  const auto& tensors = header_.tensors;
  auto k = static_cast<size_t>(
      std::upper_bound(tensors.begin(), tensors.end(), offset,
                       [](int64_t at, const safetensors::Tensor& t) { return at < t.end; }) -
      tensors.begin());
  for (auto* bytes = static_cast<char*>(to); size > 0; ++k) {
    const safetensors::Tensor& t = tensors.at(k);
    const size_t n = std::min(size, static_cast<size_t>(t.end - offset));
    if (n > 0) read_tensor(k, offset - t.begin, bytes, n);
    bytes += n;
    offset += static_cast<int64_t>(n);
    size -= n;
  }
}

void AssembledFile::read_tensor(size_t tensor, int64_t from, char* to, size_t size) {
  if (!made_[tensor].numbers.empty()) {
    std::memcpy(to, reinterpret_cast<const char*>(made_[tensor].numbers.data()) + from, size);
    return;
  }
  if (listed_ != tensor) list_runs(tensor);
  auto run = std::upper_bound(runs_.begin(), runs_.end(), from,
                              [](int64_t at, const Run& r) { return at < r.to + r.bytes; });
  for (; size > 0; ++run) {
    const int64_t skipped = from - run->to;
    const size_t n = std::min(size, static_cast<size_t>(run->bytes - skipped));
    read_source(run->source, run->from + skipped, to, n);
    to += n;
    from += static_cast<int64_t>(n);
    size -= n;
  }
}

// Short runs of a file often lie near each other.
void AssembledFile::read_source(size_t source, int64_t from, char* to, size_t size) {
  constexpr size_t kShort = size_t{64} << 10;
  const Source& s = sources_[source];
  if (size == 0) return;
  if (size >= kShort) return s.read(from, to, size);
  Block& block = blocks_[source];
  const auto end = [&] { return block.from + static_cast<int64_t>(block.bytes.size()); };
  if (from < block.from || from + static_cast<int64_t>(size) > end()) {
    const int64_t left = s.file->data_begin() + s.file->data_bytes() - from;
    block.from = from;
    block.bytes.resize(std::max(size, static_cast<size_t>(std::min<int64_t>(left, kReadAtOnce))));
    try {
      s.read(from, block.bytes.data(), block.bytes.size());
    } catch (...) {
      block.bytes.clear();
      throw;
    }
  }
  std::memcpy(to, block.bytes.data() + (from - block.from), size);
}

}  // namespace ga
