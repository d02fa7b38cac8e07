// SPDX-License-Identifier: Apache-2.0
#include "files/safetensors.hpp"

#include <algorithm>
#include <functional>
#include <iterator>
#include <limits>

#define JSON_NO_IO  // without <iostream>, which takes a fifth of the time to compile
#include <nlohmann/json.hpp>

#include "core/error.hpp"
#include "core/utf8.hpp"

namespace ga::safetensors {
namespace {

constexpr char kMetadata[] = "__metadata__";
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

// Text of a file for a message: what is long is cut, and what is not printable replaced.
std::string shown(std::string_view text, size_t most = 100) {
  std::string result(text.substr(0, most));
  // Not within a character: a first byte is not of the form 10xxxxxx.
  if (text.size() > most) {
    while (!result.empty() && (text[result.size()] & 0xC0) == 0x80) result.pop_back();
  }
  const bool utf8 = is_utf8(result);
  for (char& c : result) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < ' ' || byte == 0x7F || (byte > 0x7F && !utf8)) c = '?';
  }
  return text.size() > most ? result + "..." : result;
}

// What a message is about, named as in the file.
struct About {
  const std::string name;
  const Subject subject;

  About(const char* kind, std::string_view text) : name(shown(text)), subject{kind, name.c_str()} {}
  About(const About&) = delete;
};

const std::string& key(const Tensor& tensor) { return tensor.name; }
const std::string& key(const std::pair<std::string, std::string>& entry) { return entry.first; }

// Sorts by hashes first, because comparing strings takes several times as long.
template <class Entries>
void check_unique(ga_status status, const char* kind, const Entries& entries) {
  std::vector<std::pair<size_t, std::string_view>> keys;
  keys.reserve(entries.size());
  for (const auto& entry : entries)
    keys.emplace_back(std::hash<std::string_view>()(key(entry)), key(entry));
  std::sort(keys.begin(), keys.end());
  const auto twice = std::adjacent_find(keys.begin(), keys.end());
  if (twice != keys.end())
    About(kind, twice->second).subject.fail(status, "the name occurred twice");
}

void check_unique(ga_status status, const Header& header) {
  check_unique(status, "metadata", header.metadata);
  check_unique(status, "tensor", header.tensors);
}

void check_length(ga_status status, size_t bytes, int64_t most) {
  if (bytes > static_cast<size_t>(most))
    fail(status, "the header had %zu bytes, expected at most %lld", bytes, ll(most));
}

void check_name_length(ga_status status, const std::string& name) {
  if (name.size() > kMostName)
    About("tensor", name)
        .subject.fail(status, "the name had %zu bytes, expected at most %lld", name.size(),
                      ll(kMostName));
}

// ---- Writing -----------------------------------------------------------------------------------

void append_string(std::string& to, std::string_view text) {
  constexpr char kHex[] = "0123456789abcdef";
  to += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      to += '\\';
      to += c;
    } else if (static_cast<unsigned char>(c) < ' ') {
      to += "\\u00";
      to += kHex[c >> 4];
      to += kHex[c & 15];
    } else {
      to += c;
    }
  }
  to += '"';
}

void check_writable(const Header& header) {
  constexpr ga_status kStatus = GA_ERROR_UNSUPPORTED;
  for (const auto& [name, value] : header.metadata) {
    if (!is_utf8(name) || !is_utf8(value))
      About("metadata", name).subject.fail(kStatus, "the name or the value was not UTF-8");
  }
  for (const Tensor& tensor : header.tensors) {
    if (!is_utf8(tensor.name))
      About("tensor", tensor.name).subject.fail(kStatus, "the name was not UTF-8");
    if (tensor.name == kMetadata)
      About("tensor", tensor.name)
          .subject.fail(kStatus, "the name is reserved in safetensors files");
    check_name_length(kStatus, tensor.name);
  }
  check_unique(kStatus, header);
}

// ---- Parsing -----------------------------------------------------------------------------------

// The places in which the parser can be. There are no others, so nothing is nested deeper.
enum class Place { kFile, kHeader, kMetadata, kTensor, kShape, kOffsets };

enum Field { kDtypeField = 1, kShapeField = 2, kOffsetsField = 4 };

struct FieldInfo {
  const char* name;
  Field field;
  const char* expected;
};
constexpr FieldInfo kFields[] = {
    {"dtype", kDtypeField, "a string"},
    {"shape", kShapeField, "an array"},
    {"data_offsets", kOffsetsField, "an array"},
};

// Takes the parser's calls, and throws at the first that the format does not allow.
class Reader {
 public:
  using Json = nlohmann::json;

  Header header;

  bool null() { refuse("null"); }
  bool boolean(bool) { refuse("a boolean"); }
  bool number_integer(Json::number_integer_t) { refuse("a negative number"); }
  bool number_float(Json::number_float_t, const std::string&) {
    refuse("a number with a fraction or an exponent, or too large a number");
  }
  bool binary(Json::binary_t&) { refuse("binary data"); }

  bool number_unsigned(Json::number_unsigned_t value) {
    if (place_ != Place::kShape && place_ != Place::kOffsets) refuse("a number");
    if (value > static_cast<uint64_t>(kMost)) refuse("too large a number");
    const auto number = static_cast<int64_t>(value);
    Tensor& tensor = header.tensors.back();
    if (place_ == Place::kShape) {
      if (tensor.shape.size() == kMostDimensions)
        here().subject.fail(GA_ERROR_FORMAT, "shape had more than %lld dimensions",
                            ll(kMostDimensions));
      tensor.shape.push_back(number);
    } else {
      if (offsets_ == 2)
        here().subject.fail(GA_ERROR_FORMAT, "data_offsets had more than two numbers");
      (offsets_ == 0 ? tensor.begin : tensor.end) = number;
      ++offsets_;
    }
    return true;
  }

  // Strings are copied, because the parser's own may have far more capacity than they need.
  bool string(const std::string& value) {
    if (place_ == Place::kMetadata)
      header.metadata.back().second = value;
    else if (place_ == Place::kTensor && field_->field == kDtypeField)
      header.tensors.back().dtype = value;
    else
      refuse("a string");
    return true;
  }

  bool key(const std::string& name) {
    if (place_ == Place::kHeader)
      begin_entry(name);
    else if (place_ == Place::kMetadata)
      header.metadata.emplace_back(name, "");
    else
      begin_field(name);
    return true;
  }

  bool start_object(size_t) {
    if (place_ == Place::kFile) {
      place_ = Place::kHeader;
    } else if (place_ != Place::kHeader) {
      refuse("an object");
    } else if (in_metadata_) {
      place_ = Place::kMetadata;
    } else {
      place_ = Place::kTensor;
      found_ = 0;
    }
    return true;
  }

  bool end_object() {
    if (place_ == Place::kTensor) end_tensor();
    place_ = place_ == Place::kHeader ? Place::kFile : Place::kHeader;
    return true;
  }

  bool start_array(size_t) {
    if (place_ != Place::kTensor || field_->field == kDtypeField) refuse("an array");
    place_ = field_->field == kShapeField ? Place::kShape : Place::kOffsets;
    offsets_ = 0;
    return true;
  }

  bool end_array() {
    if (place_ == Place::kOffsets && offsets_ != 2)
      here().subject.fail(GA_ERROR_FORMAT, "data_offsets had %d numbers, expected two", offsets_);
    place_ = Place::kTensor;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const Json::exception& error) {
    std::string_view text = error.what();
    // In front of the message are the name of the exception and, if there is one, the position.
    for (const char* end : {"] ", ": "}) {
      const size_t found = text.find(end);
      if (found != text.npos) text.remove_prefix(found + 2);
    }
    fail(GA_ERROR_FORMAT, "the header was not JSON at byte %zu: %s", position,
         shown(text, 300).c_str());
  }

 private:
  void begin_entry(const std::string& name) {
    in_metadata_ = name == kMetadata;
    if (in_metadata_) {
      if (had_metadata_) fail(GA_ERROR_FORMAT, "%s occurred twice", kMetadata);
      had_metadata_ = true;
    } else {
      check_name_length(GA_ERROR_FORMAT, name);
      header.tensors.push_back({name, "", {}, 0, 0});
    }
  }

  void begin_field(const std::string& name) {
    field_ = std::find_if(std::begin(kFields), std::end(kFields),
                          [&](const FieldInfo& field) { return name == field.name; });
    if (field_ == std::end(kFields))
      here().subject.fail(GA_ERROR_FORMAT, "the field \"%s\" was unknown", shown(name).c_str());
    if (found_ & field_->field)
      here().subject.fail(GA_ERROR_FORMAT, "%s occurred twice", field_->name);
    found_ |= field_->field;
  }

  void end_tensor() {
    for (const FieldInfo& field : kFields) {
      if (!(found_ & field.field))
        here().subject.fail(GA_ERROR_FORMAT, "%s was missing", field.name);
    }
    const Tensor& tensor = header.tensors.back();
    if (tensor.begin > tensor.end)
      here().subject.fail(GA_ERROR_FORMAT,
                          "data_offsets were %lld and %lld, expected the smaller one first",
                          ll(tensor.begin), ll(tensor.end));
    int64_t bytes = element_size(tensor.dtype);
    if (bytes == 0) return;
    for (const int64_t dimension : tensor.shape) {
      if (__builtin_mul_overflow(bytes, dimension, &bytes))
        here().subject.fail(GA_ERROR_FORMAT, "the bytes of its shape were more than 2^63 - 1");
    }
    if (bytes != tensor.end - tensor.begin)
      here().subject.fail(GA_ERROR_FORMAT,
                          "data_offsets held %lld bytes, expected %lld for the shape in %s",
                          ll(tensor.end - tensor.begin), ll(bytes), tensor.dtype.c_str());
  }

  // Throws, because the value that was found is not legal where it stands.
  [[noreturn]] void refuse(const char* found) {
    if (place_ == Place::kMetadata)
      About("metadata", header.metadata.back().first)
          .subject.fail(GA_ERROR_FORMAT, "the value was %s, expected a string", found);
    if (place_ == Place::kTensor)
      here().subject.fail(GA_ERROR_FORMAT, "%s was %s, expected %s", field_->name, found,
                          field_->expected);
    if (place_ == Place::kShape || place_ == Place::kOffsets)
      here().subject.fail(GA_ERROR_FORMAT, "%s held %s, expected integers from 0 to 2^63 - 1",
                          field_->name, found);
    if (in_metadata_) fail(GA_ERROR_FORMAT, "%s was %s, expected an object", kMetadata, found);
    here().subject.fail(GA_ERROR_FORMAT, "the entry was %s, expected an object", found);
  }

  About here() const { return About("tensor", header.tensors.back().name); }

  Place place_ = Place::kFile;
  bool in_metadata_ = false, had_metadata_ = false;
  unsigned found_ = 0;  // the fields of this tensor so far
  const FieldInfo* field_ = nullptr;
  int offsets_ = 0;  // the numbers in data_offsets so far
};

void check_text(std::string_view text, int64_t most) {
  check_length(GA_ERROR_FORMAT, text.size(), most);
  if (text.empty() || text.front() != '{')
    fail(GA_ERROR_FORMAT, "the header did not begin with '{'");
  if (text[text.find_last_not_of(' ')] != '}')
    fail(GA_ERROR_FORMAT, "the header did not end with '}' and spaces");
  // The parser would take a NUL for the end of the text. Its message for an error repeats the line
  // breaks in front of the error: 100 MB of them would take 3.3 GB and half a minute.
  const auto control = std::find_if(text.begin(), text.end(),
                                    [](char c) { return static_cast<unsigned char>(c) < ' '; });
  if (control != text.end())
    fail(GA_ERROR_FORMAT, "the header had the control character 0x%02x at byte %td",
         static_cast<unsigned>(*control), control - text.begin() + 1);
}

// Puts the tensors in the order of their data, which they must tile.
void order(std::vector<Tensor>& tensors, int64_t data_bytes) {
  // Empty tensors come before the one that begins at the same place.
  std::stable_sort(tensors.begin(), tensors.end(), [](const Tensor& a, const Tensor& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  int64_t end = 0;
  for (const Tensor& tensor : tensors) {
    if (tensor.begin != end)
      About("tensor", tensor.name)
          .subject.fail(GA_ERROR_FORMAT, "its data began at byte %lld, expected %lld, because %s",
                        ll(tensor.begin), ll(end),
                        tensor.begin < end ? "ranges must not overlap" : "there must be no holes");
    end = tensor.end;
  }
  if (end != data_bytes)
    fail(GA_ERROR_FORMAT, "the tensors had %lld bytes, but the file has %lld bytes of data",
         ll(end), ll(data_bytes));
}

}  // namespace

int64_t element_size(std::string_view dtype) {
  struct Size {
    std::string_view dtype;
    int64_t bytes;
  };
  static constexpr Size kSizes[] = {
      {"F64", 8},  {"F32", 4},     {"F16", 2},     {"BF16", 2}, {"I64", 8},     {"I32", 4},
      {"I16", 2},  {"I8", 1},      {"U64", 8},     {"U32", 4},  {"U16", 2},     {"U8", 1},
      {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"C64", 8},  {"F8_E8M0", 1},
  };
  for (const Size& size : kSizes) {
    if (size.dtype == dtype) return size.bytes;
  }
  return 0;
}

bool is_utf8(std::string_view text) {
  const char* const end = text.data() + text.size();
  for (const char* p = text.data(); p < end;) {
    const size_t size = utf8_character(p, end);
    if (size == 0) return false;
    p += size;
  }
  return true;
}

std::string write(const Header& header, int64_t most) {
  check_writable(header);
  std::string text(kLengthBytes, '\0');
  text += '{';
  const char* separator = "";
  if (!header.metadata.empty()) {
    append_string(text, kMetadata);
    text += ":{";
    for (const auto& [name, value] : header.metadata) {
      text += separator;
      append_string(text, name);
      text += ':';
      append_string(text, value);
      separator = ",";
    }
    text += '}';
  }
  for (const Tensor& tensor : header.tensors) {
    text += separator;
    append_string(text, tensor.name);
    text += ":{\"dtype\":";
    append_string(text, tensor.dtype);
    text += ",\"shape\":[";
    for (size_t i = 0; i < tensor.shape.size(); ++i) {
      if (i > 0) text += ',';
      text += std::to_string(tensor.shape[i]);
    }
    text += "],\"data_offsets\":[" + std::to_string(tensor.begin) + ',' +
            std::to_string(tensor.end) + "]}";
    separator = ",";
  }
  text += '}';
  constexpr auto kAligned = static_cast<size_t>(kAlignment);
  text.resize((text.size() + kAligned - 1) / kAligned * kAligned, ' ');
  const size_t length = text.size() - kLengthBytes;
  check_length(GA_ERROR_UNSUPPORTED, length, most);
  for (size_t i = 0; i < kLengthBytes; ++i) text[i] = static_cast<char>(length >> 8 * i);
  return text;
}

Header parse(std::string_view text, int64_t data_bytes, int64_t most) {
  check_text(text, most);
  Reader reader;
  nlohmann::json::sax_parse(text.begin(), text.end(), &reader);
  check_unique(GA_ERROR_FORMAT, reader.header);
  order(reader.header.tensors, data_bytes);
  return std::move(reader.header);
}

}  // namespace ga::safetensors
