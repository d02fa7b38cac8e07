// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/rank_files.hpp"

#include <algorithm>
#include <charconv>

#include "core/error.hpp"

namespace ga {
namespace {

std::string key_of_file(size_t rank) { return "file." + std::to_string(rank); }

// The part of a path up to its last separator, and what is behind it.
std::pair<std::string, std::string> split(const std::string& path) {
  std::string folder, name;
  os::split(path, &folder, &name);
  return {path.substr(0, path.size() - name.size()), name};
}

int64_t number_in(const std::string& text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() ? number : -1;
}

struct Index {
  int64_t number = 0;  // in the names of its files
  std::vector<std::string> files;
};

Index index_in(const StateReader& file) {
  Index index;
  const int64_t count = number_in(*file.find("files"));
  const std::string* const number = file.find("number");
  if (number) index.number = number_in(*number);
  for (int64_t q = 0; q < count; ++q) {
    const std::string* const name = file.find(key_of_file(static_cast<size_t>(q)));
    if (!name || name->empty() || name->find_first_of("/\\:") != std::string::npos)
      fail(GA_ERROR_FORMAT, "the name of file %lld is \"%.200s\", expected one beside the index",
           ll(q), name ? name->c_str() : "");
    index.files.push_back(*name);
  }
  if (index.number < 1 || index.files.empty())
    fail(GA_ERROR_FORMAT, "it is an index, but it has no files");
  return index;
}

// What stands at the path, if it is an index.
Index index_at(const char* path) noexcept {
  try {
    int64_t size = 0;
    const ReadAt read = reading_of(path, size);
    const StateReader file(size, read, false);
    return is_index(file) ? index_in(file) : Index();
  } catch (...) {
    return {};
  }
}

std::string name_of_file(const std::string& path_name, const std::string& number, size_t rank) {
  return path_name + "." + number + ".rank" + std::to_string(rank);
}

// headers: what the header of each file has as its checksum; parts: which parts it has.
void write_index(const char* path, const std::string& number, std::vector<std::string> headers,
                 std::vector<std::string> parts, const char* note) {
  Metadata list;
  const auto add = [&](const std::string& key, std::string text) {
    list.emplace_back(std::string(kOurs) + key, std::move(text));
  };
  add("files", std::to_string(headers.size()));
  add("number", number);
  if (note) add("note", note);
  const std::string name = split(path).second;
  for (size_t q = 0; q < headers.size(); ++q) {
    add(key_of_file(q), name_of_file(name, number, q));
    add(key_of_file(q) + ".header", std::move(headers[q]));
    add(key_of_file(q) + ".own_parts", std::move(parts[q]));
  }
  StateWriter writer(std::move(list), {});
  FileWriter file(path);
  writer.finish(
      [&](int64_t offset, const void* data, size_t size) { file.write(offset, data, size); });
  file.commit();
}

}  // namespace

ReadAt reading_of(const std::string& path, int64_t& size) {
  const auto file = std::make_shared<FileReader>(path.c_str());
  size = file->size();
  return [file](int64_t offset, void* data, size_t bytes) { file->read(offset, data, bytes); };
}

OpenBeside beside(const std::string& path) {
  return [folder = split(path).first](const std::string& name, int64_t& size) {
    return reading_of(folder + name, size);
  };
}

void save_rank_files(Ranks& ranks, const OwnParts& own, const char* path, const char* note,
                     const Ranks::Ready& ready, const std::function<void(FileWriter&)>& save) {
  const size_t rank = ranks.place();
  const auto [folder, name] = split(path);
  if (name.empty())
    fail(GA_ERROR_IO, "ga_save: \"%.200s\" is the path of a folder, not of a file", path);
  const Index before = rank == 0 ? index_at(path) : Index();
  ready();
  const std::string number =
      ranks.gather_texts("the number of the files", std::to_string(before.number + 1))[0];
  const std::string own_path = folder + name_of_file(name, number, rank);
  std::vector<std::string> headers, parts;
  try {
    FileWriter file(own_path.c_str());
    save(file);
    file.commit();
    int64_t size = 0;
    const ReadAt read = reading_of(own_path, size);
    const std::string header = *StateReader(size, read, false).find("header");
    ready();
    headers = ranks.gather_texts("the checksums of the files", header);
    parts = ranks.gather_texts("the parts in the files", own.text());
  } catch (...) {
    remove_file(own_path.c_str());
    throw;
  }
  // From here on, an index may be in place that names the file.
  if (rank == 0) write_index(path, number, std::move(headers), std::move(parts), note);
  ready();
  for (const std::string& old : before.files) remove_file((folder + old).c_str());
}

std::vector<AssembledFile::Source> open_rank_files(const StateReader& index,
                                                   const OpenBeside& open) {
  std::vector<AssembledFile::Source> sources;
  const std::vector<std::string> files = index_in(index).files;
  for (size_t q = 0; q < files.size(); ++q) {
    const auto text_at = [&](const char* end) -> const std::string& {
      const std::string* const text = index.find(key_of_file(q) + end);
      if (!text) fail(GA_ERROR_FORMAT, "it lacks file.%zu%s", q, end);
      return *text;
    };
    AssembledFile::Source& s = sources.emplace_back();
    s.own = OwnParts::from(text_at(".own_parts"));
    int64_t size = 0;
    s.read = open(files[q], size);
    s.file = std::make_unique<StateReader>(size, s.read, false);
    const std::string* const header = s.file->find("header");
    if (!header || *header != text_at(".header"))
      fail(GA_ERROR_FORMAT, "\"%.200s\" is not the file that was saved with this index",
           files[q].c_str());
  }
  return sources;
}

}  // namespace ga
