// SPDX-License-Identifier: Apache-2.0
#include "ranks/agreement.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "files/fields.hpp"
#include "files/state_file.hpp"

namespace ga {
namespace {

// The owner of an item, for a message: parameter "w" of both "parameter w" (what it is) and "parameter.w" (its
// settings). other: the key in the same place on another rank. Items of what parameters are come first, so
// where only one of two is of that, the other rank's list of them has ended.
std::string text_of_item(std::string_view key, std::string_view other) {
  const auto owner_in = [](std::string_view k, char separator) {
    for (const std::string_view kind : {"parameter", "layer"})
      if (begins_with(k, kind) && k.size() > kind.size() && k[kind.size()] == separator)
        return kind;
    return std::string_view();
  };
  const std::string_view owner = owner_in(key, ' ');
  if (key.empty() || (owner.empty() && !owner_in(other, ' ').empty())) return "none";
  const std::string_view kind = owner.empty() ? owner_in(key, '.') : owner;
  if (kind.empty()) return '"' + std::string(key) + '"';
  return std::string(kind) + " \"" + std::string(key.substr(kind.size() + 1)) + '"';
}

// A line for each key and one for its text.
std::string text_of(const std::vector<std::pair<std::string, std::string>>& items) {
  std::string text;
  for (const auto& [key, value] : items) text += key + "\n" + value + "\n";
  return text;
}

}  // namespace

uint64_t Agreement::digest_of(const std::string& text) {
  Checksum sum;
  sum.add(text.data(), text.size());
  return sum.value();
}

uint64_t Agreement::digest_of(const Items& items) { return digest_of(text_of(items)); }

Agreement::Items Agreement::context_items(const ga_comm_options& options, const RankState& state) {
  Items items;
  items.emplace_back("version", "version=" + std::to_string(GA_VERSION));
  items.emplace_back("communication", "wire=" + std::to_string(options.wire) +
                                          " check_every=" + std::to_string(options.check_every) +
                                          " shard=" + std::to_string(options.shard) +
                                          " adder=" + std::to_string(options.adder) +
                                          " overlap=" + std::to_string(options.overlap) +
                                          " reduced=" + std::to_string(options.reduced) +
                                          " data_ranks=" + std::to_string(options.data_ranks));
  for (const auto& [key, fields] : state.settings_of_context())
    items.emplace_back(key, fields.text());
  return items;
}

void Agreement::vote(const char* what, const Error* failure) const {
  constexpr size_t kWords = 64;
  struct Ballot {
    int64_t status;
    char text[(kWords - 1) * sizeof(uint64_t)];
  };
  static_assert(sizeof(Ballot) == kWords * sizeof(uint64_t));
  Ballot own = {};
  if (failure) {
    own.status = failure->status();
    std::snprintf(own.text, sizeof own.text, "%.500s", failure->what());
  }
  std::vector<Ballot> all(static_cast<size_t>(comm_->ranks()));
  comm_->all_gather("whether the call has failed", &own, all.data(), kWords, GA_I64);
  if (failure) return;
  for (size_t q = 0; q < all.size(); ++q)
    if (all[q].status != GA_OK)
      fail(GA_ERROR_COMMUNICATION, "%s: rank %zu failed, so no rank goes on: %.480s", what, q,
           all[q].text);
}

void Agreement::all_or_none(const char* what, bool works, bool alone,
                            const std::function<void(const std::function<void()>&)>& work) const {
  bool given_up = false;  // by all ranks
  const std::function<void()> ready = [&] {
    try {
      vote(what, nullptr);
    } catch (...) {
      given_up = true;
      throw;
    }
  };
  try {
    if (works) work(alone ? [] {} : ready);
  } catch (const Error& e) {
    if (!given_up) vote(what, &e);
    throw;
  } catch (const std::exception& e) {
    const Error error(GA_ERROR_INTERNAL, e.what());
    if (!given_up) vote(what, &error);
    throw;
  }
  ready();
}

std::vector<std::string> Agreement::gather_texts(const char* what, std::string own) const {
  const auto ranks = static_cast<size_t>(comm_->ranks());
  std::vector<int64_t> sizes(ranks);
  const auto size = static_cast<int64_t>(own.size());
  comm_->all_gather("the size of a text", &size, sizes.data(), 1, GA_I64);
  const auto most = static_cast<size_t>(*std::max_element(sizes.begin(), sizes.end()));
  const size_t padded = (most + 7) / 8 * 8;
  std::string all;
  agree_on(what, [&] {
    own.resize(padded);
    all.resize(ranks * padded);
  });
  comm_->all_gather(what, own.data(), all.data(), static_cast<int64_t>(padded / 8), GA_I64);
  std::vector<std::string> texts;
  for (size_t q = 0; q < ranks; ++q)
    texts.push_back(all.substr(q * padded, static_cast<size_t>(sizes[q])));
  return texts;
}

void Agreement::explain(const char* what, const Items& own) const {
  const std::vector<std::string> texts = gather_texts("the settings", text_of(own));
  const size_t ranks = texts.size();
  const auto items_of = [&](size_t q) {
    Items items;
    size_t at = 0;
    const auto line = [&] {
      const size_t stop = texts[q].find('\n', at);
      const std::string found = texts[q].substr(at, stop - at);
      at = stop + 1;
      return found;
    };
    while (at < texts[q].size()) {
      std::string key = line();
      items.emplace_back(std::move(key), line());
    }
    return items;
  };
  const Items first = items_of(0);
  for (size_t q = 1; q < ranks; ++q) {
    const Items theirs = items_of(q);
    for (size_t k = 0; k < std::max(first.size(), theirs.size()); ++k) {
      if (k < first.size() && k < theirs.size() && first[k] == theirs[k]) continue;
      const char* const key = k < theirs.size() ? theirs[k].first.c_str() : "";
      const char* const here = k < first.size() ? first[k].first.c_str() : "";
      if (std::strcmp(key, here) != 0)
        fail(GA_ERROR_COMMUNICATION, "%s differ: rank %zu has %.200s where rank 0 has %.200s", what,
             q, text_of_item(key, here).c_str(), text_of_item(here, key).c_str());
      Fields(first[k].second, key)
          .each_difference(Fields(theirs[k].second, key), [&](const char* field, const char* other,
                                                              const char* ours) {
            if (std::strcmp(field, "xxh3") == 0)
              fail(GA_ERROR_COMMUNICATION,
                   "%s differ: the values of \"%.200s\" on rank %zu are not those of "
                   "rank 0",
                   what, key, q);
            fail(GA_ERROR_COMMUNICATION,
                 "%s differ: of \"%.200s\", %s is %s on rank %zu, but %s on rank 0", what, key,
                 field, readable(other).c_str(), q, ours ? readable(ours).c_str() : "not there");
          });
      fail(GA_ERROR_COMMUNICATION, "%s differ: \"%.200s\" of rank %zu is not that of rank 0", what,
           key, q);
    }
  }
  fail(GA_ERROR_INTERNAL, "%s have different checksums, but no difference was found", what);
}

void Agreement::fail_call(const char* function, int32_t q) const {
  fail(GA_ERROR_COMMUNICATION,
       "%s: rank %d makes another call than rank 0 does: all ranks make the same collective "
       "calls in the same order; this one is rank %d",
       function, q, comm_->rank());
}

}  // namespace ga
