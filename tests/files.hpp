// SPDX-License-Identifier: Apache-2.0
//
// What the suites about files have in common.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "files/disk.hpp"

namespace ga::test {

namespace fs = std::filesystem;

// ---- Files and folders --------------------------------------------------------------------------

inline std::string contents(const std::string& path) {
  std::ifstream file(fs::u8path(path), std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline void put(const std::string& path, const std::string& text) {
  std::ofstream file(fs::u8path(path), std::ios::binary);
  file << text;
  ASSERT_TRUE(file.flush()) << path;
}

// A folder that is removed with all that is in it.
class Folder {
 public:
  explicit Folder(const std::string& in = testing::TempDir()) {
    std::random_device random;
    std::error_code error;
    do {
      path_ = in + "/gradaccum_" + std::to_string(random()) + "_" + std::to_string(random());
    } while (!fs::create_directory(path_, error) && !error);
    if (error) ADD_FAILURE() << "no folder in " << in << ": " << error.message();
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

  std::set<std::string> names() const {
    std::set<std::string> result;
    for (const auto& entry : fs::directory_iterator(path_))
      result.insert(entry.path().filename().u8string());
    return result;
  }
  std::set<std::string> temporaries() const {
    std::set<std::string> result;
    for (const std::string& name : names())
      if (name.compare(0, 11, ".gradaccum-") == 0) result.insert(name);
    return result;
  }

 private:
  std::string path_;
};

// ---- Writers and readers ------------------------------------------------------------------------

// The second half first. Reserves, so that all functions are used.
inline void save(const std::string& path, const std::string& text) {
  FileWriter writer(path.c_str());
  writer.reserve(static_cast<int64_t>(text.size()));
  const size_t half = text.size() / 2;
  writer.write(static_cast<int64_t>(half), text.data() + half, text.size() - half);
  writer.write(0, text.data(), half);
  writer.commit();
}

inline std::string load(const std::string& path) {
  const FileReader reader(path.c_str());
  std::string text(static_cast<size_t>(reader.size()), '?');
  reader.read(0, text.data(), text.size());
  return text;
}

// The error that body throws, or GA_OK.
struct Result {
  ga_status status = GA_OK;
  std::string text;
  bool has(const std::string& part) const { return text.find(part) != std::string::npos; }
};
template <class Body>
Result result_of(Body&& body) {
  try {
    body();
    return {};
  } catch (const Error& error) {
    return {error.status(), error.what()};
  }
}

// Expects GA_ERROR_IO, with a message that has these parts.
template <class Body>
void expect_io_error(const std::vector<std::string>& parts, Body&& body) {
  const Result result = result_of(body);
  EXPECT_EQ(result.status, GA_ERROR_IO) << result.text;
  for (const std::string& part : parts)
    EXPECT_TRUE(result.has(part)) << "no \"" << part << "\" in: " << result.text;
}

// A content that tells by itself whether it is whole.
inline std::string version(int number) {
  const std::string head = std::to_string(number) + "\n";
  return head + std::string(static_cast<size_t>(1000 + number * 7919 % 60000),
                            static_cast<char>('a' + number % 26));
}

inline bool is_whole(const std::string& text) {
  return !text.empty() && text.find('\n') != std::string::npos &&
         text == version(atoi(text.c_str()));
}

// The beginning of the temporary names for a target.
inline std::string prefix_of(const Folder& folder, const std::string& name) {
  const FileWriter writer((folder / name).c_str());
  const std::string temporary = *folder.temporaries().begin();
  return temporary.substr(0, temporary.find('-', 11) + 1);
}

}  // namespace ga::test
