// SPDX-License-Identifier: Apache-2.0
#include "files/state_file.hpp"

#include <algorithm>
#include <cstring>
#include <new>

#define XXH_INLINE_ALL
#include <xxhash.h>
static_assert(XXH_VERSION_NUMBER >= 800, "XXH3 has kept its values since 0.8.0");

#include "core/error.hpp"

namespace ga {
namespace {

using safetensors::kLengthBytes;
using safetensors::Tensor;

constexpr char kFormat[] = "gradaccum.format", kHeaderSum[] = "gradaccum.header",
               kSums[] = "gradaccum.xxh3";
constexpr std::string_view kMark = "1 xxh3", kMarkOfOthers = "1 unchecked", kMarkOfTwo = "2 xxh3";
// What the text of our files begins with: the digits of the header's checksum follow.
constexpr std::string_view kBegin =
    "{\"__metadata__\":{\"gradaccum.format\":\"1 xxh3\",\"gradaccum.header\":\"";
constexpr std::string_view kBeginOfTwo =
    "{\"__metadata__\":{\"gradaccum.format\":\"2 xxh3\",\"gradaccum.header\":\"";
static_assert(kBegin.size() == kBeginOfTwo.size());
constexpr char kData[] = "gradaccum.data", kIndex[] = "gradaccum.index";  // of format 2
constexpr size_t kDigits = 16;
// Pieces of less bytes are gathered, or read ahead, up to this number of bytes.
constexpr size_t kGathered = size_t{64} << 10;
const std::string kNoDigits(kDigits, '0');

std::string digits_of(uint64_t sum) {
  std::string digits = kNoDigits;
  for (size_t k = kDigits; k-- > 0; sum >>= 4) digits[k] = "0123456789abcdef"[sum & 15];
  return digits;
}

// The checksum of a header, as if its own digits were zeros.
uint64_t sum_of_header(std::string_view text) {
  Checksum sum;
  sum.add(text.data(), kBegin.size());  // of either format
  sum.add(kNoDigits.data(), kDigits);
  const std::string_view rest = text.substr(kBegin.size() + kDigits);
  sum.add(rest.data(), rest.size());
  return sum.value();
}

bool is_header_of_ours(std::string_view text) {
  return text.size() >= kBegin.size() + kDigits &&
         text.substr(kBegin.size(), kDigits) == digits_of(sum_of_header(text));
}

// Writes the checksum into a header whose digits are zeros.
void sign(std::string& text) {
  const std::string digits = digits_of(sum_of_header(std::string_view(text).substr(kLengthBytes)));
  text.replace(kLengthBytes + kBegin.size(), kDigits, digits);
}

// The header of a file of format 2.
std::string header_of_two(int64_t data_bytes, int64_t index_bytes) {
  return safetensors::write(
      {{{kFormat, std::string(kMarkOfTwo)}, {kHeaderSum, kNoDigits}},
       {{kData, "U8", {data_bytes}, 0, data_bytes},
        {kIndex, "U8", {index_bytes}, data_bytes, data_bytes + index_bytes}}});
}

uint64_t length_in(const unsigned char (&bytes)[kLengthBytes]) {
  uint64_t length = 0;
  for (int64_t k = kLengthBytes; k-- > 0;) length = length << 8 | bytes[k];
  return length;
}

}  // namespace

Checksum::Checksum() : state_(XXH3_createState()) {
  if (!state_) throw std::bad_alloc();
  restart();
}
Checksum::~Checksum() { XXH3_freeState(static_cast<XXH3_state_t*>(state_)); }
void Checksum::restart() { XXH3_64bits_reset(static_cast<XXH3_state_t*>(state_)); }
void Checksum::add(const void* data, size_t size) {
  if (size > 0) XXH3_64bits_update(static_cast<XXH3_state_t*>(state_), data, size);
}
uint64_t Checksum::value() const {
  return XXH3_64bits_digest(static_cast<const XXH3_state_t*>(state_));
}

// ---- Writing ------------------------------------------------------------------------------------

StateWriter::StateWriter(Metadata metadata, std::vector<Tensor> tensors) {
  sums_.assign(tensors.size(), sum_.value());  // that of no bytes
  gathered_.reserve(kGathered);
  header_.metadata = {{kFormat, std::string(kMark)}, {kHeaderSum, kNoDigits}, {kSums, ""}};
  for (auto& entry : metadata) header_.metadata.push_back(std::move(entry));
  header_.tensors = std::move(tensors);
  for (Tensor& t : header_.tensors) {
    int64_t bytes = safetensors::element_size(t.dtype);
    for (const int64_t extent : t.shape) bytes *= extent;
    t.begin = data_bytes_;
    t.end = data_bytes_ += bytes;
  }
  auto size = static_cast<int64_t>(text().size());
  if (size - kLengthBytes > safetensors::kMostHeader) {
    index_bytes_ = size - kLengthBytes;
    size = static_cast<int64_t>(header_of_two(data_bytes_, index_bytes_).size());
  }
  data_begin_ = size;
}

std::string StateWriter::text() const {
  safetensors::Header header = header_;
  std::string& sums = header.metadata[2].second;
  sums.reserve(sums_.size() * (kDigits + 1));
  for (const uint64_t sum : sums_) sums += (sums.empty() ? "" : " ") + digits_of(sum);
  return safetensors::write(header, kMostIndex);
}

void StateWriter::put(const WriteAt& write, const void* data, size_t size) {
  for (const char* at = static_cast<const char*>(data); size > 0;) {
    while (header_.tensors[tensor_].end == done_) ++tensor_;  // has no bytes
    const size_t n =
        std::min(size, static_cast<size_t>(header_.tensors[tensor_].end - done_));  // of the tensor
    put_some(write, at, n);
    at += n;
    size -= n;
  }
}

// Writes bytes of one tensor.
void StateWriter::put_some(const WriteAt& write, const void* data, size_t size) {
  sum_.add(data, size);
  if (gathered_.size() + size > kGathered) flush(write);
  if (size >= kGathered) {
    write(data_begin_ + done_, data, size);
  } else {
    const auto* const bytes = static_cast<const char*>(data);
    gathered_.insert(gathered_.end(), bytes, bytes + size);
  }
  done_ += static_cast<int64_t>(size);
  if (done_ < header_.tensors[tensor_].end) return;
  sums_[tensor_++] = sum_.value();
  sum_.restart();
}

void StateWriter::flush(const WriteAt& write) {
  const auto size = static_cast<int64_t>(gathered_.size());
  if (size > 0) write(data_begin_ + done_ - size, gathered_.data(), gathered_.size());
  gathered_.clear();
}

void StateWriter::finish(const WriteAt& write) {
  flush(write);
  std::string text = this->text();
  sign(text);
  if (index_bytes_ > 0) {
    write(data_begin_ + data_bytes_, text.data() + kLengthBytes, static_cast<size_t>(index_bytes_));
    text = header_of_two(data_bytes_, index_bytes_);
    sign(text);
  }
  write(0, text.data(), text.size());
}

// ---- Reading ------------------------------------------------------------------------------------

StateReader::StateReader(int64_t size, const ReadAt& read, bool unmarked) {
  unsigned char length_bytes[kLengthBytes];
  if (size < kLengthBytes)
    fail(GA_ERROR_FORMAT, "it has %lld bytes, less than the length of a safetensors header",
         static_cast<long long>(size));
  read(0, length_bytes, sizeof length_bytes);
  const uint64_t length = length_in(length_bytes);
  if (length > static_cast<uint64_t>(std::min(size - kLengthBytes, safetensors::kMostHeader)))
    fail(GA_ERROR_FORMAT,
         "it is not a safetensors file, or damaged: its header would have %llu bytes, of %lld in "
         "all",
         static_cast<unsigned long long>(length), static_cast<long long>(size));
  std::string text(static_cast<size_t>(length), ' ');
  if (length > 0) read(kLengthBytes, text.data(), text.size());
  data_begin_ = kLengthBytes + static_cast<int64_t>(length);
  data_bytes_ = size - data_begin_;
  const bool of_two = begins_with(text, kBeginOfTwo);
  ours_ = of_two || begins_with(text, kBegin);
  if (ours_ && !is_header_of_ours(text))
    fail(GA_ERROR_FORMAT, "its header is damaged: it does not match its checksum");
  header_ = safetensors::parse(text, data_bytes_);
  if (of_two) {
    const std::string index = read_index(read);
    data_bytes_ = header_.tensors[0].end;
    header_ = safetensors::parse(index, data_bytes_, kMostIndex);
  }
  make_room();
  check_mark(unmarked);
  if (ours_) take_sums();
}

StateReader::StateReader(safetensors::Header header, bool is_ours)
    : ours_(is_ours), header_(std::move(header)) {
  if (!tensors().empty()) data_bytes_ = tensors().back().end;
  make_room();
}

void StateReader::make_room() {
  for (const auto& [key, value] : header_.metadata)
    if (begins_with(key, kOurs)) keys_[std::string_view(key).substr(kOurs.size())] = &value;
  sums_.resize(tensors().size());
  known_.resize(tensors().size());
  ahead_.reserve(kGathered);  // so that no reading allocates
}

// The header of format 1 in a file of format 2, whose own header_ is.
std::string StateReader::read_index(const ReadAt& read) const {
  const auto is = [&](size_t k, const char* name) {
    return tensors().size() == 2 && tensors()[k].name == name && tensors()[k].dtype == "U8";
  };
  if (!is(0, kData) || !is(1, kIndex))
    fail(GA_ERROR_FORMAT, "its format is \"%s\", but its tensors are not %s and %s",
         kMarkOfTwo.data(), kData, kIndex);
  const Tensor& index = tensors()[1];
  const int64_t bytes = index.end - index.begin;
  if (bytes > kMostIndex)
    fail(GA_ERROR_FORMAT, "its index had %lld bytes, expected at most %lld", ll(bytes),
         ll(kMostIndex));
  std::string text(static_cast<size_t>(bytes), ' ');
  if (bytes > 0) read(data_begin_ + index.begin, text.data(), text.size());
  if (!begins_with(text, kBegin) || !is_header_of_ours(text))
    fail(GA_ERROR_FORMAT, "its index is damaged: it does not match its checksum");
  return text;
}

// Every key of ours begins with kOurs, and there are several, so that no change of one bit makes a file
// of ours one without a mark.
void StateReader::check_mark(bool unmarked) {
  const std::string* const mark = find("format");
  if (ours_ || (mark && *mark == kMarkOfOthers)) return;
  if (mark) {
    if (*mark == kMark || *mark == kMarkOfTwo)
      fail(GA_ERROR_FORMAT,
           "its mark gradaccum.format says \"%s\", but it was not written by this library, or is "
           "damaged; other programs write \"%s\"",
           mark->c_str(), kMarkOfOthers.data());
    fail(GA_ERROR_FORMAT,
         "its format is \"%.40s\", but this version of the library reads the formats 1 and 2 "
         "(\"%s\", "
         "\"%s\", or \"%s\" of other programs)",
         mark->c_str(), kMark.data(), kMarkOfTwo.data(), kMarkOfOthers.data());
  }
  if (!keys_.empty())
    fail(GA_ERROR_FORMAT, "it is damaged: it has settings of this library, but no format mark");
  if (!unmarked)
    fail(
        GA_ERROR_FORMAT,
        "it has no format mark, so it is not a state of this library; if it is a plain model file, "
        "ga_state_options.unmarked allows it");
}

void StateReader::take_sums() {
  const std::string* const sums = find("xxh3");
  const size_t count = tensors().size();
  if (!sums || sums->size() != (count > 0 ? count * (kDigits + 1) - 1 : 0))
    fail(GA_ERROR_FORMAT, "its header does not have a checksum for each of %zu tensors", count);
  for (size_t k = 0; k < count; ++k) {
    uint64_t sum = 0;
    for (size_t d = 0; d < kDigits; ++d) {
      const char c = (*sums)[k * (kDigits + 1) + d];
      const bool digit = c >= '0' && c <= '9';
      if (!digit && !(c >= 'a' && c <= 'f'))
        fail(GA_ERROR_FORMAT, "checksum %zu of its header is not a number", k);
      sum = sum << 4 | static_cast<uint64_t>(digit ? c - '0' : c - 'a' + 10);
    }
    sums_[k] = sum;
    known_[k] = true;
  }
}

const std::string* StateReader::find(std::string_view key) const {
  const auto found = keys_.find(key);
  return found == keys_.end() ? nullptr : found->second;
}

void StateReader::seek(size_t tensor) {
  tensor_ = tensor;
  done_ = 0;
  sum_.restart();
}

void StateReader::read_small(const ReadAt& read, int64_t at, void* to, size_t size) {
  const auto wanted = static_cast<int64_t>(size);
  if (at < ahead_begin_ || at + wanted > ahead_begin_ + static_cast<int64_t>(ahead_.size())) {
    ahead_.clear();
    ahead_.resize(static_cast<size_t>(std::min<int64_t>(kGathered, data_bytes_ - at)));
    ahead_begin_ = at;
    try {
      read(data_begin_ + at, ahead_.data(), ahead_.size());
    } catch (...) {
      ahead_.clear();
      throw;
    }
  }
  std::memcpy(to, ahead_.data() + (at - ahead_begin_), size);
}

void StateReader::next(const ReadAt& read, void* to, size_t size) {
  const Tensor& t = tensors()[tensor_];
  const int64_t at = t.begin + done_;
  if (size >= kGathered)
    read(data_begin_ + at, to, size);
  else if (size > 0)
    read_small(read, at, to, size);
  sum_.add(to, size);
  done_ += static_cast<int64_t>(size);
  if (done_ < t.end - t.begin) return;
  if (known_[tensor_] && sums_[tensor_] != sum_.value())
    fail(GA_ERROR_FORMAT, "tensor \"%.200s\" is damaged: it does not match its checksum",
         t.name.c_str());
  sums_[tensor_] = sum_.value();
  known_[tensor_] = true;
}

}  // namespace ga
