// SPDX-License-Identifier: Apache-2.0
//
// Files that are replaced as a whole, and files that are read: what holds on every system. test_disk.cpp is about POSIX,
// test_windows_files.cpp about Windows.
#include <cstdint>
#include <set>
#include <string>

#include "files.hpp"

namespace ga::test {
namespace {

TEST(WholeFiles, WritesAndReads) {
  const Folder folder;
  const std::string path = folder / "x";
  for (const size_t size : {0u, 1u, 2u, 4095u, 4096u, 100001u}) {
    std::string text(size, ' ');
    for (size_t i = 0; i < size; ++i) text[i] = static_cast<char>(i * 2654435761u >> 13);
    save(path, text);
    EXPECT_EQ(contents(path), text);
    EXPECT_EQ(load(path), text);
    const FileReader reader(path.c_str());
    EXPECT_EQ(reader.size(), static_cast<int64_t>(size));
    char byte = 0;
    for (size_t i = 0; i < size; i += 997) {
      reader.read(static_cast<int64_t>(i), &byte, 1);
      EXPECT_EQ(byte, text[i]);
    }
    reader.read(static_cast<int64_t>(size), nullptr, 0);
    expect_io_error({"ended before byte " + std::to_string(size), "1 more"},
                    [&] { reader.read(static_cast<int64_t>(size), &byte, 1); });
    expect_io_error({"could not be read"}, [&] { reader.read(-1, &byte, 1); });
  }
  EXPECT_EQ(folder.names(), std::set<std::string>{"x"});
}

TEST(WholeFiles, WritesAnywhere) {
  const Folder folder;
  FileWriter writer((folder / "x").c_str());
  writer.write(5, "fgh", 3);
  writer.write(6, "GH", 2);
  writer.write(1, "b", 1);
  writer.write(100, nullptr, 0);
  writer.reserve(50);
  writer.reserve(2);  // less than there is
  writer.reserve(0);
  writer.commit();
  EXPECT_EQ(contents(folder / "x"), std::string("\0b\0\0\0fGH", 8));
}

TEST(WholeFiles, OffsetsOutOfRange) {
  const Folder folder;
  put(folder / "x", "old");
  for (const int64_t offset : {int64_t{-1}, INT64_MIN, INT64_MAX, INT64_MAX - 1}) {
    FileWriter writer((folder / "x").c_str());
    expect_io_error({"could not be written"}, [&] { writer.write(offset, "ab", 2); });
    EXPECT_EQ(folder.names(), std::set<std::string>{"x"}) << "the temporary file was left";
  }
  EXPECT_EQ(contents(folder / "x"), "old");
}

TEST(WholeFiles, PathsWithoutAName) {
  for (const char* path : {static_cast<const char*>(nullptr), ""}) {
    EXPECT_EQ(result_of([&] { FileWriter writer(path); }).status, GA_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(result_of([&] { FileReader reader(path); }).status, GA_ERROR_INVALID_ARGUMENT);
  }
}

TEST(WholeFiles, WritersThatHaveEnded) {
  const Folder folder;
  FileWriter writer((folder / "x").c_str());
  writer.commit();
  const auto ended = [](FileWriter& w) {
    EXPECT_EQ(result_of([&] { w.write(0, "", 0); }).status, GA_ERROR_INTERNAL);
    EXPECT_EQ(result_of([&] { w.reserve(1); }).status, GA_ERROR_INTERNAL);
    EXPECT_EQ(result_of([&] { w.commit(); }).status, GA_ERROR_INTERNAL);
  };
  ended(writer);
  FileWriter failed((folder / "y").c_str());
  expect_io_error({}, [&] { failed.write(-1, "a", 1); });
  ended(failed);
  EXPECT_EQ(folder.names(), std::set<std::string>{"x"});
}

}  // namespace
}  // namespace ga::test
