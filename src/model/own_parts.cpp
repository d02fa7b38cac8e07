// SPDX-License-Identifier: Apache-2.0
#include "model/own_parts.hpp"

#include <algorithm>
#include <sstream>

#include "core/error.hpp"
#include "core/tensor.hpp"
#include "model/param.hpp"

namespace ga {

int64_t OwnPart::count() const { return count_of(shape); }

bool OwnPart::overlaps(const OwnPart& other) const {
  if (count() == 0 || other.count() == 0) return false;
  for (size_t axis = 0; axis < shape.size(); ++axis)
    if (first[axis] + shape[axis] <= other.first[axis] ||
        other.first[axis] + other.shape[axis] <= first[axis])
      return false;
  return true;
}

OwnParts OwnParts::of(const ParamList& params, const Samples& samples) {
  OwnParts own = {samples, {}};
  for (size_t i = 0; i < params.size(); ++i) {
    const Tensor& t = params.tensor(i);
    const Param& p = params[i];
    if (t.removed) continue;
    const bool whole = t.part.whole.empty();
    own.parts[t.name] = {p.dtype,
                         p.group,
                         t.part.copies,
                         whole ? t.shape : t.part.whole,
                         whole ? std::vector<int64_t>(t.shape.size()) : t.part.first,
                         t.shape};
  }
  return own;
}

OwnParts OwnParts::whole() const {
  OwnParts whole = {{}, parts};
  for (auto& entry : whole.parts) {
    OwnPart& p = entry.second;
    p.shape = p.whole;
    p.first.assign(p.whole.size(), 0);
    p.copies = 1;
  }
  return whole;
}

// The samples in one line, then a line for each part. The length of a name comes before it.
std::string OwnParts::text() const {
  std::ostringstream text;
  text << samples.data_ranks << ' ' << samples.data_rank << ' '
       << static_cast<int64_t>(samples.reduced_over) << '\n';
  for (const auto& [name, p] : parts) {
    text << name.size() << ' ' << name << ' ' << p.dtype << ' ' << p.group << ' ' << p.copies << ' '
         << p.shape.size();
    for (const std::vector<int64_t>* list : {&p.whole, &p.first, &p.shape})
      for (const int64_t x : *list) text << ' ' << x;
    text << '\n';
  }
  return text.str();
}

OwnParts OwnParts::from(const std::string& whole_text) {
  constexpr size_t kLongest = size_t{1} << 16, kMostAxes = 64;
  constexpr int64_t kMost = int64_t{1} << 53;
  const auto refuse = [] { fail(GA_ERROR_FORMAT, "its list of parts is damaged"); };
  std::istringstream text(whole_text);
  OwnParts own;
  Samples& s = own.samples;
  int64_t over = 0;
  text >> s.data_ranks >> s.data_rank >> over;
  s.reduced_over = static_cast<double>(over);
  if (!text || s.data_rank < 0 || s.data_rank >= s.data_ranks || over < 1) refuse();
  for (size_t length; text >> length;) {
    if (length > kLongest) refuse();
    std::string name(length, '\0');
    OwnPart p = {};
    size_t axes = 0;
    text.get();
    text.read(name.data(), static_cast<std::streamsize>(length));
    text >> p.dtype >> p.group >> p.copies >> axes;
    if (!text || axes > kMostAxes || dtype_info(p.dtype).size == 0) refuse();
    for (std::vector<int64_t>* list : {&p.whole, &p.first, &p.shape}) {
      list->resize(axes);
      for (int64_t& x : *list) text >> x;
    }
    int64_t room = kMost;  // for the elements of the whole
    for (size_t axis = 0; axis < axes; ++axis) {
      const int64_t whole = p.whole[axis], first = p.first[axis], extent = p.shape[axis];
      if (!text || first < 0 || extent < 0 || whole < 0 || whole > room || first > whole ||
          extent > whole - first)
        refuse();
      room /= std::max<int64_t>(whole, 1);
    }
    if (!own.parts.emplace(std::move(name), std::move(p)).second) refuse();
  }
  if (!text.eof()) refuse();
  return own;
}

bool OwnParts::has_parts_of(const OwnParts& other) const {
  return std::equal(parts.begin(), parts.end(), other.parts.begin(), other.parts.end(),
                    [](const auto& a, const auto& b) {
                      return a.first == b.first && a.second.whole == b.second.whole &&
                             a.second.is_same(b.second);
                    });
}

}  // namespace ga
