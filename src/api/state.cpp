// SPDX-License-Identifier: Apache-2.0
// State on disk, in memory, and where the program keeps it.
#include <string>

#include "api/call.hpp"
#include "checkpoint/checkpoint.hpp"
#include "checkpoint/rank_files.hpp"
#include "core/callback.hpp"
#include "files/disk.hpp"

using namespace ga::api;
using ga::fail;
using ga::guard;

namespace {

ga_state_options read_state_options(const ga_state_options* options) {
  const auto o = read_struct(options, zeros<ga_state_options>(), "ga_state_options");
  check_reserved("ga_state_options", o.reserved);
  ga::check_choice("parts", o.parts, GA_STATE_PARAMETERS, "ga_state_parts");
  ga::check_choice("settings", o.settings, GA_SETTINGS_KEEP, "ga_state_settings");
  ga::check_choice("allow_missing", o.allow_missing, 1, "0 or 1");
  ga::check_choice("allow_extra", o.allow_extra, 1, "0 or 1");
  ga::check_choice("unmarked", o.unmarked, 1, "0 or 1");
  if (o.note && !ga::safetensors::is_utf8(o.note))
    fail(GA_ERROR_INVALID_ARGUMENT, "note was not UTF-8");
  return o;
}

// The name of a call that saves, which tells the ranks apart that save different parts.
std::string call_of(const char* function, const ga_state_options& o) {
  static constexpr const char* parts[] = {"", " (GA_STATE_LIBRARY)", " (GA_STATE_PARAMETERS)"};
  return std::string(function) + parts[o.parts];
}

template <class Function>
void require_function(Function* function, const char* name) {
  if (!function) fail(GA_ERROR_INVALID_ARGUMENT, "%s was NULL", name);
}

void check_capacity(size_t capacity, size_t size, const char* what) {
  if (capacity < size)
    fail(GA_ERROR_INVALID_ARGUMENT, "capacity was %zu, but %s takes %zu bytes", capacity, what,
         size);
}

// The functions of a program that stores state itself.
ga::WriteAt write_by(ga_write_fn write, void* user) {
  return [=](int64_t offset, const void* data, size_t size) {
    const int32_t result =
        ga::call_program("write function", [&] { return write(user, offset, data, size); });
    if (result != 0)
      fail(GA_ERROR_IO, "write returned %d for %zu bytes at offset %lld", result, size,
           static_cast<long long>(offset));
  };
}
ga::ReadAt read_by(ga_read_fn read, void* user) {
  return [=](int64_t offset, void* data, size_t size) {
    const int32_t result =
        ga::call_program("read function", [&] { return read(user, offset, data, size); });
    if (result != 0)
      fail(GA_ERROR_IO, "read returned %d for %zu bytes at offset %lld", result, size,
           static_cast<long long>(offset));
  };
}

// Runs load(), and names the file in the message where it is damaged or no state.
template <class Load>
void naming_file(const char* function, const char* path, Load&& load) {
  try {
    load();
  } catch (const ga::Error& e) {
    if (e.status() != GA_ERROR_FORMAT) throw;
    ga::Subject{"file", ga::shown(path).c_str(), function}.fail(GA_ERROR_FORMAT, "%s", e.what());
  }
}

}  // namespace

extern "C" {

ga_status ga_state_options_init(ga_state_options* out, size_t struct_size) {
  return init_zeros(out, struct_size, "ga_state_options");
}

ga_status ga_state_write(ga_context* ctx, ga_write_fn write, void* user,
                         const ga_state_options* options) {
  return on(ctx, [&] {
    require_function(write, "write");
    const ga_state_options o = read_state_options(options);
    const std::string call = call_of("ga_state_write", o);
    ctx->model.ranks->on_all_ranks(call.c_str(), false, [&](const ga::Ranks::Ready& ready) {
      ga::Checkpoint checkpoint(ctx->stages, o, "ga_state_write");
      checkpoint.gather(ready);
      checkpoint.save(write_by(write, user), ready);
    });
  });
}

ga_status ga_state_read(ga_context* ctx, ga_read_fn read, void* user, int64_t size,
                        const ga_state_options* options) {
  return on(ctx, [&] {
    require_function(read, "read");
    if (size < 0)
      fail(GA_ERROR_INVALID_ARGUMENT, "size was %lld, expected >= 0", static_cast<long long>(size));
    const ga_state_options o = read_state_options(options);
    ctx->model.ranks->on_all_ranks("ga_state_read", false, [&](const ga::Ranks::Ready& ready) {
      ga::Checkpoint(ctx->stages, o, "ga_state_read").load(size, read_by(read, user), ready);
    });
  });
}

ga_status ga_save(ga_context* ctx, const char* path, const ga_state_options* options) {
  return on(ctx, [&] {
    ctx->note("path", path);
    require(path, "path");
    const ga_state_options o = read_state_options(options);
    const std::string call = call_of("ga_save", o);
    ctx->model.ranks->on_all_ranks(call.c_str(), true, [&](const ga::Ranks::Ready& ready) {
      const bool together = ctx->model.ranks->has_one_path("ga_save", path);
      ga::Checkpoint checkpoint(ctx->stages, o, "ga_save");
      checkpoint.gather(ready);
      const auto save = [&](ga::FileWriter& file, const ga::Ranks::Ready& votes) {
        file.reserve(checkpoint.file_bytes());
        checkpoint.save(
            [&](int64_t offset, const void* data, size_t size) { file.write(offset, data, size); },
            votes);
      };
      ga::Ranks& ranks = *ctx->model.ranks;
      if (together)
        return ga::save_rank_files(ranks, ga::OwnParts::of(ctx->model.params, ranks.samples()),
                                   path, o.note, ready,
                                   [&](ga::FileWriter& file) { save(file, {}); });
      if (ranks.rank() != 0) return checkpoint.save({}, ready);
      ga::FileWriter file(path);
      save(file, ready);
      file.commit();
    });
  });
}

ga_status ga_load(ga_context* ctx, const char* path, const ga_state_options* options) {
  return on(ctx, [&] {
    ctx->note("path", path);
    require(path, "path");
    const ga_state_options o = read_state_options(options);
    ctx->model.ranks->on_all_ranks("ga_load", false, [&](const ga::Ranks::Ready& ready) {
      ga::Checkpoint checkpoint(ctx->stages, o, "ga_load");
      checkpoint.check_load();
      int64_t size = 0;
      const ga::ReadAt read = ga::reading_of(path, size);
      naming_file("ga_load", path, [&] { checkpoint.load(size, read, ready, ga::beside(path)); });
    });
  });
}

ga_status ga_save_to_memory(ga_context* ctx, const ga_state_options* options, void* out,
                            size_t capacity, size_t* out_size) {
  return on(ctx, [&] {
    require(out_size, "out_size");
    const ga_state_options o = read_state_options(options);
    const std::string call =
        call_of(out ? "ga_save_to_memory" : "ga_save_to_memory for the size", o);
    ctx->model.ranks->on_all_ranks(call.c_str(), false, [&](const ga::Ranks::Ready& ready) {
      ga::Checkpoint checkpoint(ctx->stages, o, "ga_save_to_memory");
      checkpoint.gather(ready);
      const auto size = static_cast<size_t>(checkpoint.file_bytes());
      *out_size = size;
      if (!out) return;
      check_capacity(capacity, size, "the state");
      checkpoint.save(
          [&](int64_t offset, const void* data, size_t bytes) {
            std::memcpy(static_cast<char*>(out) + offset, data, bytes);
          },
          ready);
    });
  });
}

ga_status ga_load_from_memory(ga_context* ctx, const void* data, size_t size,
                              const ga_state_options* options) {
  return on(ctx, [&] {
    if (size > 0) require(data, "data");
    const ga_state_options o = read_state_options(options);
    ctx->model.ranks->on_all_ranks(
        "ga_load_from_memory", false, [&](const ga::Ranks::Ready& ready) {
          ga::Checkpoint checkpoint(ctx->stages, o, "ga_load_from_memory");
          checkpoint.check_load();
          checkpoint.load(
              static_cast<int64_t>(size),
              [&](int64_t offset, void* to, size_t bytes) {
                std::memcpy(to, static_cast<const char*>(data) + offset, bytes);
              },
              ready);
        });
  });
}

ga_status ga_state_note(const char* path, char* out, size_t capacity, size_t* out_size) {
  return guard([&] {
    require(path, "path");
    require(out_size, "out_size");
    int64_t size = 0;
    const ga::ReadAt read = ga::reading_of(path, size);
    std::string note;
    bool found = false;
    naming_file("ga_state_note", path, [&] { found = ga::read_note(size, read, note); });
    *out_size = found ? note.size() + 1 : 0;
    if (!found || (!out && capacity == 0)) return;
    require(out, "out");
    check_capacity(capacity, *out_size, "the note");
    std::memcpy(out, note.c_str(), *out_size);
  });
}

}  // extern "C"
