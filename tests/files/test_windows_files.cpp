// SPDX-License-Identifier: Apache-2.0
//
// Files on Windows, which test_disk.cpp asks of POSIX: names in Unicode, long paths, and files that other programs
// have open, which Windows lets nobody replace.
#include <windows.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "files.hpp"

namespace ga::test {
namespace {

using Clock = std::chrono::steady_clock;

std::wstring wide(const std::string& path) { return fs::u8path(path).wstring(); }

// Another program's open file.
class Opened {
 public:
  Opened(const std::string& path, DWORD access, DWORD share)
      : handle_(
            CreateFileW(wide(path).c_str(), access, share, nullptr, OPEN_EXISTING, 0, nullptr)) {
    EXPECT_NE(handle_, INVALID_HANDLE_VALUE) << path << ": error " << GetLastError();
  }
  ~Opened() { close(); }
  void close() {
    if (handle_ != INVALID_HANDLE_VALUE) CloseHandle(handle_);
    handle_ = INVALID_HANDLE_VALUE;
  }

 private:
  HANDLE handle_;
};

// What the system says of a file that is open elsewhere, in its words.
std::string in_use() { return os::explain(ERROR_SHARING_VIOLATION); }

// Wine 8 knows no renaming onto a file that is open, as Windows before version 10 did not.
bool replaces_open_files() {
  return !GetProcAddress(GetModuleHandleW(L"ntdll.dll"), "wine_get_version");
}

DWORD handles() {
  DWORD count = 0;
  GetProcessHandleCount(GetCurrentProcess(), &count);
  return count;
}

TEST(WindowsFiles, NothingIsReplacedWithoutCommit) {
  const Folder folder;
  put(folder / "old", "old");
  for (const char* name : {"old", "new"}) {
    auto writer = std::make_unique<FileWriter>((folder / name).c_str());
    writer->write(0, "half", 4);
    EXPECT_EQ(folder.temporaries().size(), 1u);
    EXPECT_EQ(contents(folder / "old"), "old");
    SetLastError(1234);
    writer.reset();
    EXPECT_EQ(GetLastError(), 1234u);
    EXPECT_EQ(folder.names(), std::set<std::string>{"old"});
  }
  EXPECT_EQ(contents(folder / "old"), "old");
}

TEST(WindowsFiles, NoHandleIsLeft) {
  const Folder folder;
  const std::string path = folder / "x";
  save(path, "first");
  load(path);
  const DWORD before = handles();
  for (int i = 0; i < 20; ++i) {
    save(path, version(i));
    load(path);
    expect_io_error({}, [&] { load(folder / "missing"); });
    expect_io_error({}, [&] { save(folder / "missing/x", "new"); });
    expect_io_error({}, [&] { FileWriter(path.c_str()).write(-1, "a", 1); });
  }
  EXPECT_EQ(handles(), before);
}

// ---- Names --------------------------------------------------------------------------------------

TEST(WindowsFiles, NamesInUnicode) {
  const Folder folder;
  fs::create_directory(fs::u8path(folder / "M\u00fcller \u2013 \u8a13\u7df4"));
  const std::string name = "gr\u00f6\u00dfe \u03b1\u03b2 \u65e5\u672c \U0001f40d.safetensors";
  for (const std::string& path :
       {folder / name, folder / ("M\u00fcller \u2013 \u8a13\u7df4/" + name)}) {
    save(path, "old");
    save(path, "new");
    EXPECT_EQ(load(path), "new");
    EXPECT_EQ(contents(path), "new");
    EXPECT_TRUE(fs::exists(fs::path(wide(path)))) << "the file has another name";
  }
  EXPECT_TRUE(folder.names().count(name));
  EXPECT_TRUE(folder.temporaries().empty());
  expect_io_error({"\u00e4\u00f6\u00fc", "could not be opened"},
                  [&] { load(folder / "\u00e4\u00f6\u00fc"); });
}

TEST(WindowsFiles, NamesThatAreNotUtf8) {
  const Folder folder;
  const auto before = folder.names();
  for (const char* name : {"gr\xf6\xdf", "\xff", "a\xc3"}) {
    expect_io_error({os::explain(ERROR_NO_UNICODE_TRANSLATION)},
                    [&] { save(folder / name, "new"); });
    expect_io_error({os::explain(ERROR_NO_UNICODE_TRANSLATION)}, [&] { load(folder / name); });
  }
  EXPECT_EQ(folder.names(), before);
}

// Of 300 characters and more, whose folders a program makes by names that begin with "\\?\".
TEST(WindowsFiles, LongPaths) {
  const Folder folder;
  const std::string start =
      fs::absolute(fs::u8path(folder.path())).lexically_normal().make_preferred().u8string();
  std::string path = start;
  while (path.size() < 300) {
    path += "\\folder \u00fc of a name that has some length";
    ASSERT_TRUE(CreateDirectoryW(wide("\\\\?\\" + path).c_str(), nullptr)) << GetLastError();
  }
  for (const std::string& file :
       {path + "\\x", path + "/x", path + "/../" + fs::u8path(path).filename().u8string() + "/x",
        "\\\\?\\" + path + "\\x"}) {
    save(file, "old " + file);
    save(file, "new " + file);
    EXPECT_EQ(load(file), "new " + file);
    EXPECT_EQ(load(path + "/x"), "new " + file);
  }
  save(path + "/" + std::string(255, 'n'), "the longest name");
  EXPECT_EQ(load(path + "/" + std::string(255, 'n')), "the longest name");
  for (const size_t size : {256u, 40000u}) {
    expect_io_error({"n\""}, [&] { save(folder / std::string(size, 'n'), "new"); });
    expect_io_error({"n\""}, [&] { load(folder / std::string(size, 'n')); });
  }
  std::error_code error;
  fs::remove_all(fs::path(wide("\\\\?\\" + start)), error);
}

TEST(WindowsFiles, RelativePaths) {
  const Folder folder;
  fs::create_directory(folder / "sub");
  fs::create_directory(folder / "other");
  const fs::path before = fs::current_path();
  fs::current_path(folder.path());
  for (const std::string path : {"x", "./y", "sub/z", "sub\\v", "sub/../w", "sub//u"}) {
    save(path, "old");
    save(path, path);
    EXPECT_EQ(load(path), path);
  }
  {  // the current folder matters no more
    FileWriter writer("sub/x");
    writer.write(0, "new", 3);
    fs::current_path("other");
    writer.commit();
  }
  fs::current_path(before);
  EXPECT_EQ(contents(folder / "sub/x"), "new");
  EXPECT_TRUE(fs::is_empty(folder / "other"));
  EXPECT_EQ(folder.names(), (std::set<std::string>{"x", "y", "w", "sub", "other"}));
}

TEST(WindowsFiles, WhatIsNotAFile) {
  const Folder folder;
  fs::create_directory(folder / "folder");
  put(folder / "file", "old");
  const auto before = folder.names();
  const auto refused = [](const std::string& path, const std::string& why,
                          const std::string& reader_why) {
    SCOPED_TRACE(path);
    expect_io_error({why}, [&] { save(path, "new"); });
    expect_io_error({reader_why}, [&] { load(path); });
  };
  for (const char* path : {"/folder", "/."})
    refused(folder.path() + path, "folder", "it is a folder");
  refused(folder / "folder/", "that of a folder", "it is a folder");
  for (const char* path : {"/", ".", "..", "./"}) refused(path, "folder", "folder");
  for (const char* path : {"NUL", "nul", "\\\\.\\NUL"})
    refused(path, "it is a device", "it is a device");
  refused(folder / "missing/x", "its folder could not be opened", "could not be opened");
  refused(folder / "file/x", "its folder could not be opened", "could not be opened");
  for (const char* name : {"a:b", "file:stream", "a?", "a*", "a|b", "a<", "\"a\""})
    expect_io_error({}, [&] { save(folder / name, "new"); });
  EXPECT_EQ(folder.names(), before);
  EXPECT_EQ(contents(folder / "file"), "old");
  for (const char* path : {static_cast<const char*>(nullptr), ""}) {
    EXPECT_EQ(result_of([&] { FileWriter writer(path); }).status, GA_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(result_of([&] { FileReader reader(path); }).status, GA_ERROR_INVALID_ARGUMENT);
  }
}

// ---- Permissions --------------------------------------------------------------------------------

TEST(WindowsFiles, FilesThatAreReadOnlyStay) {
  const Folder folder;
  put(folder / "x", "old");
  ASSERT_TRUE(SetFileAttributesW(wide(folder / "x").c_str(), FILE_ATTRIBUTE_READONLY));
  expect_io_error({"could not be opened for writing", "denied"},
                  [&] { save(folder / "x", "new"); });
  EXPECT_EQ(load(folder / "x"), "old");
  EXPECT_EQ(folder.names(), std::set<std::string>{"x"});
  ASSERT_TRUE(SetFileAttributesW(wide(folder / "x").c_str(), FILE_ATTRIBUTE_NORMAL));
  save(folder / "x", "new");
  EXPECT_EQ(load(folder / "x"), "new");
}

// ---- Files that others have open ----------------------------------------------------------------

// A reader of ours has the old contents for as long as it lives.
TEST(WindowsFiles, ReplacedWhileItIsRead) {
  const Folder folder;
  const std::string path = folder / "x";
  save(path, version(1));
  const FileReader reader(path.c_str());
  if (replaces_open_files())
    save(path, version(2));
  else
    expect_io_error({"could not be replaced", in_use()}, [&] { save(path, version(2)); });
  std::string text(static_cast<size_t>(reader.size()), '?');
  reader.read(0, text.data(), text.size());
  EXPECT_EQ(text, version(1));
  EXPECT_EQ(load(path), version(replaces_open_files() ? 2 : 1));
  EXPECT_EQ(folder.names(), std::set<std::string>{"x"});
}

// As a scanner for viruses has it: without sharing, or without the right to remove it.
TEST(WindowsFiles, HeldForAMoment) {
  const Folder folder;
  const std::string path = folder / "x";
  for (const DWORD share :
       {DWORD{0}, DWORD{FILE_SHARE_READ}, DWORD{FILE_SHARE_READ | FILE_SHARE_WRITE}}) {
    SCOPED_TRACE(share);
    put(path, "old");
    Opened other(path, GENERIC_READ, share);
    std::thread closes([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      other.close();
    });
    save(path, "new");
    closes.join();
    EXPECT_EQ(load(path), "new");
    EXPECT_EQ(folder.names(), std::set<std::string>{"x"});
  }
  Opened other(path, GENERIC_READ, 0);
  std::thread closes([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    other.close();
  });
  EXPECT_EQ(load(path), "new");
  closes.join();
}

TEST(WindowsFiles, HeldForGood) {
  const Folder folder;
  const std::string path = folder / "x";
  put(path, "old");
  for (const DWORD share :
       {DWORD{0}, DWORD{FILE_SHARE_READ}, DWORD{FILE_SHARE_READ | FILE_SHARE_WRITE}}) {
    SCOPED_TRACE(share);
    Opened other(path, GENERIC_READ, share);
    const auto start = Clock::now();
    expect_io_error({path, "could not be replaced", in_use()}, [&] { save(path, "new"); });
    EXPECT_LT(Clock::now() - start, std::chrono::seconds(10));
    if (share == 0) expect_io_error({path, "could not be opened", in_use()}, [&] { load(path); });
    other.close();
    EXPECT_EQ(load(path), "old");
    EXPECT_EQ(folder.names(), std::set<std::string>{"x"}) << "the temporary file was left";
  }
}

// ---- Several writers ----------------------------------------------------------------------------

TEST(WindowsFiles, WritersDoNotDisturbEachOther) {
  const Folder folder;
  const std::string path = folder / "x";
  FileWriter first(path.c_str()), second(path.c_str()), third(path.c_str());
  EXPECT_EQ(folder.temporaries().size(), 3u);
  first.write(0, "first", 5);
  second.write(0, "second", 6);
  second.commit();
  EXPECT_EQ(contents(path), "second");
  first.commit();
  EXPECT_EQ(contents(path), "first");
  EXPECT_EQ(folder.temporaries().size(), 1u);
}

TEST(WindowsFiles, WritersAndReadersAtATime) {
  const Folder folder;
  const std::string path = folder / "x";
  save(path, version(1));
  std::atomic<bool> stop{false};
  std::atomic<int> saved{0}, loaded{0}, broken{0};
  const auto repeat = [&](auto&& body) {
    return std::thread([&stop, body] {
      for (int i = 0; !stop; ++i) body(i);
    });
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t)
    threads.push_back(repeat([&, t](int i) {
      save(path, version(1 + t * 500 + i % 500));
      ++saved;
    }));
  for (int t = 0; t < 2; ++t)
    threads.push_back(repeat([&](int) {
      broken += !is_whole(load(path));
      ++loaded;
      std::this_thread::sleep_for(
          std::chrono::milliseconds(2));  // or Wine's would never get their turn
    }));
  std::this_thread::sleep_for(std::chrono::seconds(2));
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(saved, 2);
  EXPECT_GT(loaded, 2);
  EXPECT_EQ(broken, 0);
  EXPECT_EQ(folder.names(), std::set<std::string>{"x"});
}

// What a killed process leaves is removed by the next writer, and what somebody writes is not.
TEST(WindowsFiles, AbandonedFilesAreRemoved) {
  const Folder folder;
  const std::string path = folder / "x", prefix = prefix_of(folder, "x");
  for (const char* number : {"1-0", "77-12"}) put(folder / (prefix + number + ".tmp"), "half");
  put(folder / "other.tmp", "stays");
  FileWriter writer(path.c_str());
  EXPECT_EQ(folder.temporaries().size(), 1u);
  save(path, "new");
  EXPECT_EQ(folder.temporaries().size(), 1u);
  writer.write(0, "newer", 5);
  writer.commit();
  EXPECT_EQ(load(path), "newer");
  EXPECT_EQ(folder.names(), (std::set<std::string>{"x", "other.tmp"}));
}

// ---- A disk that is full ------------------------------------------------------------------------

// tests/windows/session makes one.
TEST(WindowsFiles, FullDisk) {
  const char* const disk = getenv("GA_TEST_SMALL_DISK");
  if (!disk) GTEST_SKIP() << "there is no small disk (only root may mount one)";
  const Folder folder(disk);
  const std::string path = folder / "x";
  const std::string small(20000, 's'), large(100000, 'l');
  save(path, small);
  const auto unchanged = [&] {
    EXPECT_EQ(load(path), small);
    EXPECT_EQ(folder.names(), std::set<std::string>{"x"});
  };
  expect_io_error({path, os::explain(ERROR_DISK_FULL)}, [&] { save(path, large); });
  unchanged();
  expect_io_error({path, "could not be written", os::explain(ERROR_DISK_FULL)}, [&] {
    FileWriter writer(path.c_str());
    for (int64_t at = 0; at < 100000; at += 1000) writer.write(at, large.data(), 1000);
    writer.commit();
  });
  unchanged();
  save(path, std::string(20000, 't'));
  EXPECT_EQ(load(path), std::string(20000, 't'));
}

}  // namespace
}  // namespace ga::test
