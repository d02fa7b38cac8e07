// SPDX-License-Identifier: Apache-2.0
#include "data.hpp"

#include <zlib.h>

#include <cstdlib>
#include <filesystem>
#include <limits>
#include <memory>
#include <sstream>
#include <stdexcept>

namespace {

constexpr char kSubfolder[] = "datasets/fashion-mnist";

std::string images_file(const std::string& which) { return which + "-images-idx3-ubyte.gz"; }
std::string labels_file(const std::string& which) { return which + "-labels-idx1-ubyte.gz"; }

bool is_complete(const std::filesystem::path& folder) {
  std::error_code ignored;
  for (const char* which : {"train", "t10k"}) {
    if (!std::filesystem::exists(folder / images_file(which), ignored)) return false;
    if (!std::filesystem::exists(folder / labels_file(which), ignored)) return false;
  }
  return true;
}

// An IDX file: the big-endian number 0x08RR (bytes in RR dimensions), the dimensions, the bytes.
class IdxFile {
 public:
  IdxFile(const std::string& path, std::size_t rank)
      : path_(path), file_(gzopen(path.c_str(), "rb"), &gzclose) {
    if (!file_) throw std::runtime_error("cannot open " + path);
    if (read_number() != 0x800 + rank) {
      fail("is not an IDX file of bytes in " + std::to_string(rank) + " dimensions");
    }
    for (std::size_t i = 0; i < rank; ++i) dimensions_.push_back(read_number());
  }

  const std::vector<std::int64_t>& dimensions() const { return dimensions_; }

  std::vector<std::uint8_t> read_all(std::int64_t count) {
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(count));
    read(bytes.data(), bytes.size());
    return bytes;
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error(path_ + " " + what);
  }

 private:
  std::uint32_t read_number() {
    std::uint8_t b[4];
    read(b, sizeof b);
    return std::uint32_t{b[0]} << 24 | std::uint32_t{b[1]} << 16 | std::uint32_t{b[2]} << 8 | b[3];
  }

  void read(std::uint8_t* out, std::size_t size) {
    if (size > std::numeric_limits<int>::max()) fail("claims to be larger than 2 GiB");
    if (gzread(file_.get(), out, static_cast<unsigned>(size)) != static_cast<int>(size)) {
      fail("is corrupt or truncated");
    }
  }

  std::string path_;
  std::unique_ptr<gzFile_s, decltype(&gzclose)> file_;
  std::vector<std::int64_t> dimensions_;
};

}  // namespace

void Dataset::image_to(std::int64_t index, float* out) const {
  // Of the training set, for pixels in [0, 1].
  constexpr float kMean = 0.2860F, kDeviation = 0.3530F;
  const std::uint8_t* image = images.data() + index * pixels;
  for (std::int64_t i = 0; i < pixels; ++i) {
    out[i] = (static_cast<float>(image[i]) / 255.0F - kMean) / kDeviation;
  }
}

std::string find_fashion_mnist(const std::string& folder) {
  std::vector<std::string> places;
  if (!folder.empty()) {
    places = {folder};
  } else {
    const char* data_dirs = std::getenv("XDG_DATA_DIRS");
    std::istringstream dirs(std::string(data_dirs ? data_dirs : "") +
                            ":/usr/local/share:/usr/share");
    for (std::string dir; std::getline(dirs, dir, ':');) {
      if (!dir.empty()) places.push_back((std::filesystem::path(dir) / kSubfolder).string());
    }
  }
  std::string looked_in;
  for (const std::string& place : places) {
    if (is_complete(place)) return place;
    looked_in += "\n  " + place;
  }
  throw std::runtime_error(
      "Fashion-MNIST was not found. Install the package dataset-fashion-mnist, or name the folder "
      "of its four .gz files with --data. Looked in:" +
      looked_in);
}

Dataset load_fashion_mnist(const std::string& folder, const std::string& which) {
  IdxFile images((std::filesystem::path(folder) / images_file(which)).string(), 3);
  IdxFile labels((std::filesystem::path(folder) / labels_file(which)).string(), 1);
  Dataset data;
  data.count = images.dimensions()[0];
  data.pixels = images.dimensions()[1] * images.dimensions()[2];
  if (data.pixels != 28 * 28) images.fail("does not hold images of 28 x 28 pixels");
  if (labels.dimensions()[0] != data.count) labels.fail("does not have one label for each image");
  data.images = images.read_all(data.count * data.pixels);
  data.labels = labels.read_all(data.count);
  for (const std::uint8_t label : data.labels) {
    if (label > 9) labels.fail("has a label greater than 9");
  }
  return data;
}
