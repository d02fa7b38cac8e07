// SPDX-License-Identifier: Apache-2.0
//
// What may be on a disk after a loss of power, by the record that faults.hpp makes of a writer.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "faults.hpp"

namespace ga::test {

// A disk that promises no more than POSIX does. Of what is not synchronized, any part may survive:
// any of the writes to a file, whole or in part, or the size alone, and any of the changes to a
// folder.
class ModelDisk {
 public:
  ModelDisk(int64_t folder, int64_t inode, const std::string& name, const std::string& text)
      : folder_(folder) {
    if (inode < 0) return;
    names_[name] = inode;
    files_[inode].text = text;
  }

  void apply(const DiskEvent& event) {
    switch (event.call) {
      case Call::kPwrite:
        files_[event.inode].pending.push_back(event);
        break;
      case Call::kFsync:
        if (event.inode == folder_) {
          for (const DiskEvent& change : pending_) rename(names_, change);
          pending_.clear();
        } else {
          File& file = files_[event.inode];
          for (const DiskEvent& write : file.pending) put(file.text, write, write.data.size());
          file.pending.clear();
        }
        break;
      default:
        pending_.push_back(event);
    }
  }

  // f(content) with all contents that the file of this name may have after a loss of power now;
  // without a value if it may be missing.
  template <class F>
  void each_outcome(const std::string& name, F&& f) const {
    for (unsigned kept = 0; kept < 1u << pending_.size(); ++kept) {
      auto names = names_;
      for (size_t i = 0; i < pending_.size(); ++i)
        if (kept >> i & 1) rename(names, pending_[i]);
      const auto found = names.find(name);
      if (found == names.end()) {
        f(std::optional<std::string>());
        continue;
      }
      const auto file = files_.find(found->second);
      if (file == files_.end()) {
        f(std::optional<std::string>(""));  // nothing was ever written
        continue;
      }
      each_content(file->second, f);
    }
  }

 private:
  struct File {
    std::string text;                // synchronized
    std::vector<DiskEvent> pending;  // writes that are not
  };

  static void put(std::string& text, const DiskEvent& write, size_t size) {
    const auto offset = static_cast<size_t>(write.offset);
    if (size > 0 && text.size() < offset + size) text.resize(offset + size);
    text.replace(offset, size, write.data, 0, size);
  }

  static void rename(std::map<std::string, int64_t>& names, const DiskEvent& change) {
    if (change.call == Call::kOpenat) names[change.name] = change.inode;
    if (change.call == Call::kUnlinkat) names.erase(change.name);
    if (change.call == Call::kRenameat) {
      names[change.new_name] = change.inode;
      names.erase(change.name);
    }
  }

  template <class F>
  static void each_content(const File& file, F&& f) {
    const std::vector<DiskEvent>& writes = file.pending;
    const auto kept = [&](auto&& size_of) {
      std::string text = file.text;
      for (size_t i = 0; i < writes.size(); ++i)
        if (const size_t size = size_of(i)) put(text, writes[i], size);
      f(std::optional<std::string>(text));
      return text.size();
    };
    const auto size = [&](size_t i) { return writes[i].data.size(); };
    const size_t all = kept(size);
    if (writes.empty()) return;
    kept([](size_t) { return size_t{0}; });
    for (size_t one = 0; one < writes.size(); ++one) {
      kept([&](size_t i) { return i == one ? size(i) : 0; });
      kept([&](size_t i) { return i == one ? 0 : size(i); });
      kept([&](size_t i) { return i == one ? size(i) / 2 : size(i); });
    }
    std::string zeros = file.text;
    zeros.resize(all);
    f(std::optional<std::string>(zeros));
  }

  int64_t folder_;
  std::map<std::string, int64_t> names_;  // synchronized
  std::vector<DiskEvent> pending_;        // changes of the folder that are not
  std::map<int64_t, File> files_;
};

// How many outcomes, at all moments of the record, are neither the old nor the new file, and how
// many are not the new one although the writer has ended.
struct Losses {
  int64_t outcomes = 0, broken = 0, lost = 0;
};
inline Losses losses(const std::vector<DiskEvent>& events, ModelDisk disk, const std::string& name,
                     const std::optional<std::string>& old, const std::string& text) {
  Losses result;
  for (size_t i = 0; i <= events.size(); ++i) {
    disk.each_outcome(name, [&](const std::optional<std::string>& found) {
      ++result.outcomes;
      result.broken += found != old && found != text;
      result.lost += i == events.size() && found != text;
    });
    if (i < events.size()) disk.apply(events[i]);
  }
  return result;
}
}  // namespace ga::test
