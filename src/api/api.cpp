// SPDX-License-Identifier: Apache-2.0
// Every exported function: checks its pointers and the structs it is given, and calls the context, or the
// part of the library that does the work, inside guard().
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

#include "backend/cpu/kernels.hpp"
#include "checkpoint/checkpoint.hpp"
#include "context/context.hpp"
#include "core/callback.hpp"
#include "core/environment.hpp"
#include "core/error.hpp"
#include "files/disk.hpp"
#include "numbers/optimizer.hpp"
#include "numbers/schedule.hpp"

struct ga_context final : ga::Context {
  using Context::Context;
};
struct ga_comm final {
  std::shared_ptr<ga::Comm> comm;  // which contexts may keep longer
};

namespace {

using ga::Checkpoint;
using ga::Context;
using ga::fail;
using ga::guard;

constexpr size_t kLargestStruct = 1 << 16;  // a larger struct_size is garbage

// Sizes of the structs in the first release: no program was compiled with a smaller one.
template <class T>
constexpr size_t first_size(const T*) {
  return sizeof(T);
}
constexpr size_t first_size(const ga_config*) { return offsetof(ga_config, seed); }
constexpr size_t first_size(const ga_memory*) { return offsetof(ga_memory, masters); }
constexpr size_t first_size(const ga_optimizer*) { return offsetof(ga_optimizer, rho); }
constexpr size_t first_size(const ga_schedule*) { return offsetof(ga_schedule, first_step); }
constexpr size_t first_size(const ga_clip*) { return offsetof(ga_clip, agc_factor); }
constexpr size_t first_size(const ga_param_options*) { return offsetof(ga_param_options, master); }
constexpr size_t first_size(const ga_step_result*) { return offsetof(ga_step_result, skipped); }

template <class T>
void require(const T* pointer, const char* name) {
  if (!pointer) fail(GA_ERROR_INVALID_ARGUMENT, "%s was NULL", name);
}

template <class T>
void check_size(size_t size, const char* type) {
  constexpr size_t first = first_size(static_cast<const T*>(nullptr));
  if (size < first || size > kLargestStruct)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "struct_size of %s was %zu, expected sizeof(%s), at least %zu (%zu in this version of the "
         "library)",
         type, size, type, first, sizeof(T));
}

// The library's defaults, overwritten by the struct that the caller filled, unless that is NULL.
template <class T>
T read_struct(const T* given, T defaults, const char* type) {
  if (!given) return defaults;
  const size_t size = given->struct_size;
  check_size<T>(size, type);
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  if (std::any_of(bytes + std::min(size, sizeof(T)), bytes + size,
                  [](unsigned char b) { return b != 0; }))
    fail(
        GA_ERROR_UNSUPPORTED,
        "%s of %zu bytes has fields set that this version of the library (%zu bytes) does not know",
        type, size, sizeof(T));
  std::memcpy(&defaults, given, std::min(size, sizeof(T)));
  defaults.struct_size = sizeof(T);
  return defaults;
}

// set(NULL), or set() with a struct as read_struct() returns it.
template <class T, class Set>
void set_struct(const T* given, T (*defaults)(), const char* type, Set&& set) {
  if (!given) return set(nullptr);
  const T s = read_struct(given, defaults(), type);
  set(&s);
}

// A struct that the library fills: fields that only the caller knows become 0.
template <class T>
void check_out(const T* out, const char* type) {
  require(out, type);
  check_size<T>(out->struct_size, type);
}

template <class T>
void write_struct(T* out, const T& value) {
  const size_t size = out->struct_size;
  std::memset(static_cast<void*>(out), 0, size);
  std::memcpy(static_cast<void*>(out), &value, std::min(size, sizeof(T)));
  out->struct_size = size;
}

// Writes the defaults to a struct of the caller, but no byte after the fields that the library
// knows.
template <class T>
void init_struct(T* out, size_t size, T defaults, const char* type) {
  require(out, type);
  check_size<T>(size, type);
  defaults.struct_size = std::min(size, sizeof(T));
  std::memcpy(static_cast<void*>(out), &defaults, defaults.struct_size);
}

void check_reserved(const char* type, int32_t value) {
  if (value != 0) fail(GA_ERROR_INVALID_ARGUMENT, "%s: reserved was %d, expected 0", type, value);
}

// A struct whose defaults are zeros.
template <class T>
T zeros() {
  T t = {};
  t.struct_size = sizeof t;
  return t;
}

template <class T>
ga_status init_zeros(T* out, size_t size, const char* type) {
  return guard([&] { init_struct(out, size, zeros<T>(), type); });
}

ga_micro_options read_micro(const ga_micro_options* options) {
  const auto o = read_struct(options, zeros<ga_micro_options>(), "ga_micro_options");
  check_reserved("ga_micro_options", o.reserved);
  return o;
}

ga_param_options read_param_options(const ga_param_options* options) {
  const auto o = read_struct(options, zeros<ga_param_options>(), "ga_param_options");
  check_reserved("ga_param_options", o.reserved);
  return o;
}

ga_flat_entry default_flat_entry() {
  auto e = zeros<ga_flat_entry>();
  e.group = -1;
  return e;
}

// Entry i of an array whose elements have the size that the first one says.
ga_flat_entry read_entry(const ga_flat_entry* entries, size_t i) {
  const size_t size = entries->struct_size;
  check_size<ga_flat_entry>(size, "ga_flat_entry");
  const auto* const entry =
      reinterpret_cast<const ga_flat_entry*>(reinterpret_cast<const char*>(entries) + i * size);
  if (entry->struct_size != size)
    fail(GA_ERROR_INVALID_ARGUMENT,
         "struct_size of entries[%zu] was %zu, but that of entries[0] is %zu", i,
         entry->struct_size, size);
  return read_struct(entry, default_flat_entry(), "ga_flat_entry");
}

ga_optimizer default_optimizer(int32_t kind, int32_t flavor) {
  auto o = zeros<ga_optimizer>();
  o.kind = kind;
  o.flavor = flavor;
  ga::optimizer_info(kind, flavor).defaults(o);
  return o;
}

ga_optimizer read_optimizer(const ga_optimizer* optimizer) {
  require(optimizer, "optimizer");
  check_size<ga_optimizer>(optimizer->struct_size, "ga_optimizer");
  const ga_optimizer o =
      read_struct(optimizer, default_optimizer(optimizer->kind, optimizer->flavor), "ga_optimizer");
  check_reserved("ga_optimizer", o.reserved);
  return o;
}

// A flag of the caller's.
bool flag(const char* name, int32_t value) {
  ga::check_choice(name, value, 1, "0 or 1");
  return value != 0;
}

// An id for the caller, who may not want it.
template <class Id>
void give(Id* out, Id id) {
  if (out) *out = id;
}

// Runs body() as a call of that function on ctx. changing: whether it does more than ask.
template <class Use, class Body>
ga_status call(const ga_context* ctx, bool changing, const char* function, Body& body) {
  ga_status status = GA_OK;
  const ga_status refused = guard([&] {
    require(ctx, "ctx");
    const Use use(*ctx, function, changing);
    if (ga::Log* const log = ctx->log())
      status = log->call(function, body);
    else
      body();
  });
  return refused != GA_OK ? refused : status;
}

// function: the name of the caller, an exported function.
template <class Body>
ga_status on(ga_context* ctx, Body&& body, const char* function = __builtin_FUNCTION()) {
  return call<Context::Use>(ctx, true, function, body);
}

// As on(), for the functions that several threads may call at once with ga_config.eager.
template <class Body>
ga_status contribute(ga_context* ctx, Body&& body, const char* function = __builtin_FUNCTION()) {
  if (ctx && ctx->callers()) return call<Context::SharedUse>(ctx, true, function, body);
  return call<Context::Use>(ctx, true, function, body);
}

// As on(), for functions that only ask: they are legal while parameters and EMA are exchanged.
template <class Body>
ga_status ask(const ga_context* ctx, Body&& body, const char* function = __builtin_FUNCTION()) {
  return call<Context::Use>(ctx, false, function, body);
}

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

void note_shape(const Context* ctx, ga_bn bn, int64_t samples, int64_t positions) {
  ctx->note("bn", bn);
  ctx->note("samples", static_cast<double>(samples));
  ctx->note("positions", static_cast<double>(positions));
}

}  // namespace

#ifndef GA_MODULES  // that were built with the library
#define GA_MODULES "none"
#endif
#define GA_STRING_(x) #x
#define GA_STRING(x) GA_STRING_(x)
#ifdef __clang__
#define GA_COMPILER "clang " __clang_version__
#else
#define GA_COMPILER "gcc " __VERSION__
#endif

extern "C" {

int32_t ga_version(void) {
  return 10000 * GA_VERSION_MAJOR + 100 * GA_VERSION_MINOR + GA_VERSION_PATCH;
}

const char* ga_build_info(void) {
  return "libgradaccum " GA_STRING(GA_VERSION_MAJOR) "." GA_STRING(GA_VERSION_MINOR) "." GA_STRING(
      GA_VERSION_PATCH) "; " GA_COMPILER "; cpu loops: " GA_CPU_ISA_NAMES
                        "; threads: "
#ifdef _OPENMP
                        "OpenMP " GA_STRING(_OPENMP)
#else
                        "one, or the program's own"
#endif
                            "; modules: " GA_MODULES;
}

const char* ga_status_name(ga_status status) {
  static constexpr const char* names[] = {"GA_OK",
                                          "GA_ERROR_INVALID_ARGUMENT",
                                          "GA_ERROR_INVALID_STATE",
                                          "GA_ERROR_OUT_OF_MEMORY",
                                          "GA_ERROR_UNSUPPORTED",
                                          "GA_ERROR_NONFINITE",
                                          "GA_ERROR_FAULT",
                                          "GA_ERROR_INTERNAL",
                                          "GA_ERROR_WINDOW_FULL",
                                          "GA_ERROR_IO",
                                          "GA_ERROR_FORMAT",
                                          "GA_ERROR_COMMUNICATION",
                                          "GA_ERROR_CANCELLED"};
  constexpr int32_t count = sizeof names / sizeof *names;
  return status >= 0 && status < count ? names[status] : "unknown status";
}

const char* ga_last_error(void) { return ga::last_error(); }

ga_status ga_build_init(ga_build* out, size_t struct_size) {
  return init_zeros(out, struct_size, "ga_build");
}

ga_status ga_build_describe(ga_build* out) {
  return guard([&] {
    check_out(out, "ga_build");
    auto b = zeros<ga_build>();
    b.version = ga_version();
    b.onednn = ga::onednn_version();
    ga::cuda_versions(b.cuda_runtime, b.cuda_driver);
#ifdef _OPENMP
    b.openmp = _OPENMP;
#endif
    b.compiler = GA_COMPILER;
    b.cpu_loops = GA_CPU_ISA_NAMES;
    write_struct(out, b);
  });
}

ga_status ga_config_init(ga_config* out, size_t struct_size) {
  return guard([&] { init_struct(out, struct_size, ga::default_config(), "ga_config"); });
}

ga_status ga_context_create(const ga_config* config, ga_context** out) {
  return guard([&] {
    require(out, "out");
    const ga::FpMode mode;
    const ga_config c = read_struct(config, ga::default_config(), "ga_config");
    ga::check_config(c);
    ga::watch_forks();
    const auto start = std::chrono::steady_clock::now();
    auto context = std::make_unique<ga_context>(c);
    if (ga::Log* const log = context->log())
      log->call(
          "ga_context_create",
          [&] {
            log->note("build", ga_build_info());
            ga::each_ignored_variable([&](const char* name, const char* value,
                                          const char* expected) {
              log->note("ignored",
                        (std::string(name) + "=" + value + " (expected " + expected + ")").c_str());
            });
          },
          start);
    *out = context.release();
  });
}

void ga_context_destroy(ga_context* ctx) {
  if (ctx && ctx->is_of_this_process()) delete ctx;
}

ga_status ga_device_count(ga_device device, int32_t* out) {
  return guard([&] {
    require(out, "out");
    ga::check_choice("device", device, GA_DEVICE_CUDA, "ga_device");
    *out = device == GA_DEVICE_CUDA ? ga::cuda_device_count() : 1;
  });
}

ga_status ga_synchronize(ga_context* ctx) {
  return ask(ctx, [&] { ctx->synchronize(); });
}

ga_status ga_context_set_stream(ga_context* ctx, void* stream) {
  return ask(ctx, [&] { ctx->set_stream(stream); });
}

ga_status ga_memory_init(ga_memory* out, size_t struct_size) {
  return init_zeros(out, struct_size, "ga_memory");
}

ga_status ga_context_memory(const ga_context* ctx, ga_memory* out) {
  return ask(ctx, [&] {
    check_out(out, "ga_memory");
    write_struct(out, ctx->memory());
  });
}

ga_status ga_context_set_accum_steps(ga_context* ctx, int64_t accum_steps) {
  return on(ctx, [&] {
    ctx->note("accum_steps", static_cast<double>(accum_steps));
    ctx->set_accum_steps(accum_steps);
  });
}

ga_status ga_context_set_accum_schedule(ga_context* ctx, const int64_t* from_steps,
                                        const int64_t* accum_steps, size_t count) {
  return on(ctx, [&] { ctx->set_accum_schedule(from_steps, accum_steps, count); });
}

ga_status ga_optimizer_init(ga_optimizer* out, size_t struct_size, ga_optimizer_kind kind,
                            ga_flavor flavor) {
  return guard(
      [&] { init_struct(out, struct_size, default_optimizer(kind, flavor), "ga_optimizer"); });
}

ga_status ga_group_add(ga_context* ctx, const ga_optimizer* optimizer, ga_group* out) {
  return on(ctx, [&] { give(out, ctx->add_group(read_optimizer(optimizer))); });
}

ga_status ga_group_set_optimizer(ga_context* ctx, ga_group group, const ga_optimizer* optimizer) {
  return on(ctx, [&] { ctx->set_optimizer(group, read_optimizer(optimizer)); });
}

ga_status ga_group_set_frozen(ga_context* ctx, ga_group group, int32_t frozen) {
  return on(ctx, [&] { ctx->set_group_frozen(group, flag("frozen", frozen)); });
}

ga_status ga_group_set_lr(ga_context* ctx, ga_group group, double lr) {
  return on(ctx, [&] {
    ctx->note("group", group);
    ctx->note("lr", lr);
    ctx->set_lr(group, lr);
  });
}

ga_status ga_state_options_init(ga_state_options* out, size_t struct_size) {
  return init_zeros(out, struct_size, "ga_state_options");
}

ga_status ga_state_write(ga_context* ctx, ga_write_fn write, void* user,
                         const ga_state_options* options) {
  return on(ctx, [&] {
    require_function(write, "write");
    const ga_state_options o = read_state_options(options);
    const std::string call = call_of("ga_state_write", o);
    ctx->on_all_ranks(call.c_str(), false, [&](const Context::Ready& ready) {
      Checkpoint checkpoint(*ctx, o, "ga_state_write");
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
    ctx->on_all_ranks("ga_state_read", false, [&](const Context::Ready& ready) {
      Checkpoint(*ctx, o, "ga_state_read").load(size, read_by(read, user), ready);
    });
  });
}

ga_status ga_save(ga_context* ctx, const char* path, const ga_state_options* options) {
  return on(ctx, [&] {
    ctx->note("path", path);
    require(path, "path");
    const ga_state_options o = read_state_options(options);
    const std::string call = call_of("ga_save", o);
    ctx->on_all_ranks(call.c_str(), true, [&](const Context::Ready& ready) {
      Checkpoint checkpoint(*ctx, o, "ga_save");
      checkpoint.gather(ready);
      if (ctx->rank() != 0) return checkpoint.save({}, ready);
      ga::FileWriter file(path);
      file.reserve(checkpoint.file_bytes());
      checkpoint.save(
          [&](int64_t offset, const void* data, size_t size) { file.write(offset, data, size); },
          ready);
      file.commit();
    });
  });
}

ga_status ga_load(ga_context* ctx, const char* path, const ga_state_options* options) {
  return on(ctx, [&] {
    ctx->note("path", path);
    require(path, "path");
    const ga_state_options o = read_state_options(options);
    ctx->on_all_ranks("ga_load", false, [&](const Context::Ready& ready) {
      Checkpoint checkpoint(*ctx, o, "ga_load");
      checkpoint.check_load();
      const ga::FileReader file(path);
      naming_file("ga_load", path, [&] {
        checkpoint.load(
            file.size(),
            [&](int64_t offset, void* data, size_t size) { file.read(offset, data, size); }, ready);
      });
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
    ctx->on_all_ranks(call.c_str(), false, [&](const Context::Ready& ready) {
      Checkpoint checkpoint(*ctx, o, "ga_save_to_memory");
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
    ctx->on_all_ranks("ga_load_from_memory", false, [&](const Context::Ready& ready) {
      Checkpoint checkpoint(*ctx, o, "ga_load_from_memory");
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
    const ga::FileReader file(path);
    std::string note;
    bool found = false;
    naming_file("ga_state_note", path, [&] {
      found = ga::read_note(
          file.size(),
          [&](int64_t offset, void* data, size_t size) { file.read(offset, data, size); }, note);
    });
    *out_size = found ? note.size() + 1 : 0;
    if (!found || (!out && capacity == 0)) return;
    require(out, "out");
    check_capacity(capacity, *out_size, "the note");
    std::memcpy(out, note.c_str(), *out_size);
  });
}

ga_status ga_group_set_weight_decay(ga_context* ctx, ga_group group, double weight_decay) {
  return on(ctx, [&] { ctx->set_weight_decay(group, weight_decay); });
}

ga_status ga_group_count(const ga_context* ctx, int32_t* out) {
  return ask(ctx, [&] {
    require(out, "out");
    *out = static_cast<int32_t>(ctx->params().groups.size());
  });
}

ga_status ga_group_optimizer(const ga_context* ctx, ga_group group, ga_optimizer* out) {
  return ask(ctx, [&] {
    check_out(out, "ga_optimizer");
    write_struct(out, ctx->params().group(group).optimizer);
  });
}

ga_status ga_schedule_init(ga_schedule* out, size_t struct_size, ga_schedule_kind kind) {
  return guard([&] { init_struct(out, struct_size, ga::default_schedule(kind), "ga_schedule"); });
}

ga_status ga_group_set_schedule(ga_context* ctx, ga_group group, const ga_schedule* schedule) {
  return on(ctx, [&] {
    if (!schedule) return ctx->set_schedule(group, nullptr);
    check_size<ga_schedule>(schedule->struct_size, "ga_schedule");
    const ga_schedule s =
        read_struct(schedule, ga::default_schedule(schedule->kind), "ga_schedule");
    check_reserved("ga_schedule", s.reserved);
    ctx->set_schedule(group, &s);
  });
}

ga_status ga_group_lr(const ga_context* ctx, ga_group group, double* out) {
  return ask(ctx, [&] {
    require(out, "out");
    *out = ctx->lr(group);
  });
}

ga_status ga_group_last_lr(const ga_context* ctx, ga_group group, double* out) {
  return ask(ctx, [&] {
    require(out, "out");
    *out = ctx->last_lr(group);
  });
}

ga_status ga_context_set_steps(ga_context* ctx, int64_t steps) {
  return on(ctx, [&] { ctx->set_steps(steps); });
}

ga_status ga_clip_init(ga_clip* out, size_t struct_size) {
  return guard([&] { init_struct(out, struct_size, ga::default_clip(), "ga_clip"); });
}

ga_status ga_context_set_clip(ga_context* ctx, const ga_clip* clip) {
  return on(ctx, [&] {
    set_struct(clip, ga::default_clip, "ga_clip", [&](const ga_clip* c) { ctx->set_clip(c); });
  });
}

ga_status ga_group_set_clip(ga_context* ctx, ga_group group, const ga_clip* clip) {
  return on(ctx, [&] {
    set_struct(clip, ga::default_clip, "ga_clip",
               [&](const ga_clip* c) { ctx->set_group_clip(group, c); });
  });
}

ga_status ga_context_clip(const ga_context* ctx, ga_clip* out) {
  return ask(ctx, [&] {
    check_out(out, "ga_clip");
    write_struct(out, ctx->params().clip);
  });
}

ga_status ga_group_clip(const ga_context* ctx, ga_group group, ga_clip* out) {
  return ask(ctx, [&] {
    check_out(out, "ga_clip");
    write_struct(out, ctx->params().clip_of(ctx->params().group(group)));
  });
}

ga_status ga_loss_scaler_init(ga_loss_scaler* out, size_t struct_size) {
  return guard([&] { init_struct(out, struct_size, ga::default_loss_scaler(), "ga_loss_scaler"); });
}

ga_status ga_context_set_loss_scaler(ga_context* ctx, const ga_loss_scaler* scaler) {
  return on(ctx, [&] {
    set_struct(scaler, ga::default_loss_scaler, "ga_loss_scaler", [&](const ga_loss_scaler* s) {
      if (s) check_reserved("ga_loss_scaler", s->reserved);
      ctx->set_loss_scaler(s);
    });
  });
}

ga_status ga_loss_scale(const ga_context* ctx, double* out_scale, const void** out_device) {
  return ask(ctx, [&] {
    if (!out_device || !ctx->device_loss_scale()) require(out_scale, "out_scale");
    if (out_scale) *out_scale = ctx->loss_scale();
    give(out_device, ctx->device_loss_scale());
  });
}

ga_status ga_ema_init(ga_ema* out, size_t struct_size) {
  return guard([&] { init_struct(out, struct_size, ga::default_ema(), "ga_ema"); });
}

ga_status ga_context_set_ema(ga_context* ctx, const ga_ema* ema) {
  return on(ctx, [&] {
    set_struct(ema, ga::default_ema, "ga_ema", [&](const ga_ema* e) { ctx->set_ema(e); });
  });
}

ga_status ga_param_options_init(ga_param_options* out, size_t struct_size) {
  return init_zeros(out, struct_size, "ga_param_options");
}

ga_status ga_param_add(ga_context* ctx, ga_group group, const char* name, void* data,
                       ga_dtype dtype, int32_t rank, const int64_t* shape,
                       const ga_param_options* options, ga_param* out) {
  return on(ctx, [&] {
    ctx->note("name", name);
    ctx->note("group", group);
    ctx->note("dtype", dtype);
    const ga::NewParam entry = {name, group, rank, shape, 0, read_param_options(options)};
    give(out, ctx->add_params(data, dtype, {&entry, 1}));
  });
}

ga_status ga_flat_entry_init(ga_flat_entry* out, size_t struct_size) {
  return guard([&] { init_struct(out, struct_size, default_flat_entry(), "ga_flat_entry"); });
}

ga_status ga_params_add_flat(ga_context* ctx, void* data, ga_dtype dtype,
                             const ga_flat_entry* entries, size_t count,
                             const ga_param_options* options, ga_param* out) {
  return on(ctx, [&] {
    const auto common = read_param_options(options);
    if (count > 0) require(entries, "entries");
    std::vector<ga::NewParam> list;
    for (size_t i = 0; i < count; ++i) {
      const ga_flat_entry e = read_entry(entries, i);
      list.push_back({e.name, e.group, e.rank, e.shape, e.offset,
                      e.options ? read_param_options(e.options) : common});
    }
    give(out, ctx->add_params(data, dtype, {list.data(), list.size()}));
  });
}

ga_status ga_param_count(const ga_context* ctx, int32_t* out) {
  return ask(ctx, [&] {
    require(out, "out");
    *out = static_cast<int32_t>(ctx->params().size());
  });
}

ga_status ga_param_find(const ga_context* ctx, const char* name, ga_param* out) {
  return ask(ctx, [&] {
    require(name, "name");
    require(out, "out");
    const ga_param param = ctx->params().find(name);
    if (param < 0) fail(GA_ERROR_INVALID_ARGUMENT, "the context has no parameter \"%s\"", name);
    *out = param;
  });
}

ga_status ga_param_info_init(ga_param_info* out, size_t struct_size) {
  return init_zeros(out, struct_size, "ga_param_info");
}

ga_status ga_param_describe(const ga_context* ctx, ga_param param, ga_param_info* out) {
  return ask(ctx, [&] {
    check_out(out, "ga_param_info");
    write_struct(out, ctx->params().info(param));
  });
}

ga_status ga_slot_count(const ga_context* ctx, size_t* out) {
  return ask(ctx, [&] {
    require(out, "out");
    *out = ctx->params().blocks().size();
  });
}

ga_status ga_param_slot(const ga_context* ctx, ga_param param, size_t* out) {
  return ask(ctx, [&] {
    require(out, "out");
    *out = ctx->params().slot(param);
  });
}

ga_status ga_param_bind(ga_context* ctx, ga_param param, void* data) {
  return on(ctx, [&] {
    ctx->note("param", param);
    ctx->bind(param, data);
  });
}

ga_status ga_param_changed(ga_context* ctx, ga_param param) {
  return on(ctx, [&] {
    ctx->note("param", param);
    ctx->changed(param);
  });
}

ga_status ga_ema_copy_to(ga_context* ctx, ga_param param, void* out, ga_dtype dtype) {
  return ask(ctx, [&] { ctx->ema_copy_to(param, out, dtype); });
}

ga_status ga_param_set_frozen(ga_context* ctx, ga_param param, int32_t frozen) {
  return on(ctx, [&] {
    ctx->note("param", param);
    ctx->note("frozen", frozen);
    ctx->set_frozen(param, flag("frozen", frozen));
  });
}

ga_status ga_ema_swap(ga_context* ctx, int32_t on) {
  return ask(ctx, [&] {
    ctx->note("on", on);
    ctx->ema_swap(flag("on", on));
  });
}

ga_status ga_param_set_lr_scale(ga_context* ctx, ga_param param, double lr_scale) {
  return on(ctx, [&] { ctx->set_scale(param, "lr_scale", &ga::Tensor::lr_scale, lr_scale); });
}

ga_status ga_param_set_weight_decay_scale(ga_context* ctx, ga_param param,
                                          double weight_decay_scale) {
  return on(ctx, [&] {
    ctx->set_scale(param, "weight_decay_scale", &ga::Tensor::weight_decay_scale,
                   weight_decay_scale);
  });
}

ga_status ga_param_remove(ga_context* ctx, ga_param param) {
  return on(ctx, [&] {
    ctx->note("param", param);
    ctx->remove(param);
  });
}

ga_status ga_prepare(ga_context* ctx) {
  return on(ctx, [&] { ctx->make_arrays(); });
}

ga_status ga_state_info_init(ga_state_info* out, size_t struct_size) {
  return init_zeros(out, struct_size, "ga_state_info");
}

ga_status ga_state_count(const ga_context* ctx, ga_param param, int32_t* out) {
  return ask(ctx, [&] {
    require(out, "out");
    *out = ctx->state_count(param);
  });
}

ga_status ga_state_describe(const ga_context* ctx, ga_param param, int32_t index,
                            ga_state_info* out) {
  return ask(ctx, [&] {
    check_out(out, "ga_state_info");
    write_struct(out, ctx->state_info(param, index));
  });
}

ga_status ga_state_get(ga_context* ctx, ga_param param, const char* name, void* out, ga_dtype dtype,
                       int64_t count) {
  return on(ctx, [&] {
    ctx->note("param", param);
    ctx->note("name", name);
    ctx->get_state(param, name, out, dtype, count);
  });
}

ga_status ga_state_set(ga_context* ctx, ga_param param, const char* name, const void* data,
                       ga_dtype dtype, int64_t count) {
  return on(ctx, [&] {
    ctx->note("param", param);
    ctx->note("name", name);
    ctx->set_state(param, name, data, dtype, count);
  });
}

ga_status ga_state_reset(ga_context* ctx, ga_param param) {
  return on(ctx, [&] {
    ctx->note("param", param);
    ctx->reset_state(param);
  });
}

ga_status ga_micro_options_init(ga_micro_options* out, size_t struct_size) {
  return init_zeros(out, struct_size, "ga_micro_options");
}

ga_status ga_accumulate(ga_context* ctx, const void* const* gradients, size_t count, double weight,
                        const ga_micro_options* options) {
  return on(ctx, [&] {
    ctx->note("count", static_cast<double>(count));
    ctx->note("weight", weight);
    ctx->accumulate(gradients, count, weight, read_micro(options));
  });
}

ga_status ga_micro_begin(ga_context* ctx, int64_t index, double weight,
                         const ga_micro_options* options) {
  return on(ctx, [&] {
    ctx->note("index", static_cast<double>(index));
    ctx->note("weight", weight);
    ctx->micro_begin(index, weight, read_micro(options));
  });
}

ga_status ga_accumulate_part(ga_context* ctx, ga_param param, const void* gradient) {
  return contribute(ctx, [&] {
    ctx->note("param", param);
    ctx->accumulate_part(param, gradient);
  });
}

ga_status ga_accumulate_rows(ga_context* ctx, ga_param param, const void* indices,
                             ga_dtype index_dtype, int64_t count, const void* values) {
  return on(ctx, [&] {
    ctx->note("param", param);
    ctx->note("count", static_cast<double>(count));
    ctx->accumulate_rows(param, indices, index_dtype, count, values);
  });
}

ga_status ga_accumulate_matmul(ga_context* ctx, ga_param param, int64_t k, const void* a,
                               int64_t lda, ga_transpose transpose_a, const void* b, int64_t ldb,
                               ga_transpose transpose_b, ga_dtype dtype) {
  return on(ctx, [&] {
    ctx->note("param", param);
    ctx->note("k", static_cast<double>(k));
    const bool turn_a = flag("transpose_a", transpose_a), turn_b = flag("transpose_b", transpose_b);
    ctx->accumulate_matmul(param, k, a, lda, turn_a, b, ldb, turn_b, dtype);
  });
}

ga_status ga_accumulator_init(ga_accumulator* out, size_t struct_size) {
  return init_zeros(out, struct_size, "ga_accumulator");
}

ga_status ga_accumulator_acquire(ga_context* ctx, ga_param param, ga_accumulator* out) {
  return on(ctx, [&] {
    check_out(out, "ga_accumulator");
    write_struct(out, ctx->acquire_accumulator(param));
  });
}

ga_status ga_accumulator_release(ga_context* ctx, ga_param param) {
  return on(ctx, [&] {
    ctx->note("param", param);
    ctx->release_accumulator(param);
  });
}

ga_status ga_micro_end(ga_context* ctx) {
  return on(ctx, [&] { ctx->micro_end(); });
}

ga_status ga_params_ready(ga_context* ctx, const ga_param* params, size_t count) {
  return contribute(ctx, [&] {
    ctx->note("count", static_cast<double>(count));
    if (count > 0) require(params, "params");
    ctx->params_ready({params, count});
  });
}

ga_status ga_micro_abort(ga_context* ctx) {
  return on(ctx, [&] { ctx->micro_abort(); });
}

ga_status ga_window_info_init(ga_window_info* out, size_t struct_size) {
  return init_zeros(out, struct_size, "ga_window_info");
}

ga_status ga_window(const ga_context* ctx, ga_window_info* out) {
  return ask(ctx, [&] {
    check_out(out, "ga_window_info");
    write_struct(out, const_cast<ga_context*>(ctx)->window());  // which may look up K
  });
}

ga_status ga_step_result_init(ga_step_result* out, size_t struct_size) {
  return init_zeros(out, struct_size, "ga_step_result");
}

ga_status ga_step(ga_context* ctx, ga_step_result* out) {
  return on(ctx, [&] {
    if (out) check_out(out, "ga_step_result");
    const ga_step_result r = ctx->step();
    ctx->note("outcome", r.outcome);
    ctx->note("micro_batches", static_cast<double>(r.micro_batches));
    ctx->note("weight", r.weight);
    ctx->note("norm", r.norm);
    ctx->note("lr", r.lr);
    if (out) write_struct(out, r);
  });
}

ga_status ga_step_result_get(ga_context* ctx, int64_t window, int32_t wait, ga_step_result* out) {
  return ask(ctx, [&] {
    check_out(out, "ga_step_result");
    ga_step_result r = {};
    if (!ctx->result(window, flag("wait", wait), r)) r = Context::pending();
    write_struct(out, r);
  });
}

ga_status ga_discard(ga_context* ctx) {
  return on(ctx, [&] { ctx->discard(); });
}

ga_status ga_comm_config_init(ga_comm_config* out, size_t struct_size, ga_comm_kind kind) {
  return guard([&] {
    ga::check_choice("kind", kind, GA_COMM_NCCL, "ga_comm_kind");
    init_struct(out, struct_size, ga::default_comm_config(kind), "ga_comm_config");
  });
}

ga_status ga_comm_unique_id(ga_comm_kind kind, void* out, size_t size) {
  return guard([&] {
    require(out, "out");
    if (size != GA_COMM_ID_SIZE)
      fail(GA_ERROR_INVALID_ARGUMENT, "size was %zu, expected GA_COMM_ID_SIZE, %d", size,
           GA_COMM_ID_SIZE);
    ga::make_unique_id(kind, out);
  });
}

ga_status ga_comm_create(const ga_comm_config* config, ga_comm** out) {
  return guard([&] {
    require(config, "config");
    require(out, "out");
    check_size<ga_comm_config>(config->struct_size, "ga_comm_config");
    ga_comm_config c = read_struct(config, ga::default_comm_config(config->kind), "ga_comm_config");
    ga_comm_table table = {};
    if (c.table) {
      table = read_struct(c.table, zeros<ga_comm_table>(), "ga_comm_table");
      c.table = &table;
    }
    auto made = std::make_unique<ga_comm>();
    made->comm = ga::Comm::make(c);
    *out = made.release();
  });
}

ga_status ga_comm_size(const ga_comm* comm, int32_t* out_rank, int32_t* out_ranks) {
  return guard([&] {
    require(comm, "comm");
    if (out_rank) *out_rank = comm->comm->rank();
    if (out_ranks) *out_ranks = comm->comm->ranks();
  });
}

ga_status ga_comm_abort(ga_comm* comm) {
  return guard([&] {
    require(comm, "comm");
    comm->comm->abort();
  });
}

void ga_comm_destroy(ga_comm* comm) { delete comm; }

ga_status ga_comm_options_init(ga_comm_options* out, size_t struct_size) {
  return guard(
      [&] { init_struct(out, struct_size, ga::default_comm_options(), "ga_comm_options"); });
}

ga_status ga_context_set_comm(ga_context* ctx, ga_comm* comm, const ga_comm_options* options) {
  return on(ctx, [&] {
    const auto o = read_struct(options, ga::default_comm_options(), "ga_comm_options");
    ga::check_comm_options(o);
    ctx->set_comm(comm ? comm->comm : nullptr, o);
  });
}

ga_status ga_gradient(ga_context* ctx, ga_param param, const void** out_data, ga_dtype* out_dtype,
                      int64_t* out_count) {
  return ask(ctx, [&] {
    require(out_data, "out_data");
    *out_data = ctx->gradient(param, out_dtype, out_count);
  });
}

ga_status ga_bn_options_init(ga_bn_options* out, size_t struct_size, ga_flavor flavor) {
  return guard(
      [&] { init_struct(out, struct_size, ga::default_bn_options(flavor), "ga_bn_options"); });
}

ga_status ga_bn_add(ga_context* ctx, const char* name, int64_t channels, ga_param gamma,
                    ga_param beta, const ga_bn_options* options, ga_bn* out) {
  return on(ctx, [&] {
    const ga_bn_options defaults = ga::default_bn_options(GA_FLAVOR_TORCH);
    const ga_bn_options o = read_struct(options, defaults, "ga_bn_options");
    give(out, ctx->batch_norms().add(name, channels, gamma, beta, o));
  });
}

ga_status ga_bn_count(const ga_context* ctx, int32_t* out) {
  return ask(ctx, [&] {
    require(out, "out");
    *out = ctx->batch_norms().count();
  });
}

ga_status ga_bn_find(const ga_context* ctx, const char* name, ga_bn* out) {
  return ask(ctx, [&] {
    require(name, "name");
    require(out, "out");
    const ga_bn bn = ctx->batch_norms().find(name);
    if (bn < 0) fail(GA_ERROR_INVALID_ARGUMENT, "the context has no layer \"%s\"", name);
    *out = bn;
  });
}

ga_status ga_bn_info_init(ga_bn_info* out, size_t struct_size) {
  return init_zeros(out, struct_size, "ga_bn_info");
}

ga_status ga_bn_describe(const ga_context* ctx, ga_bn bn, ga_bn_info* out) {
  return ask(ctx, [&] {
    check_out(out, "ga_bn_info");
    write_struct(out, ctx->batch_norms().info(bn));
  });
}

ga_status ga_bn_set_frozen(ga_context* ctx, ga_bn bn, int32_t frozen) {
  return on(ctx, [&] { ctx->batch_norms().set_frozen(bn, flag("frozen", frozen)); });
}

ga_status ga_bn_accumulate(ga_context* ctx, ga_bn bn, const void* x, int64_t samples,
                           int64_t positions) {
  return on(ctx, [&] {
    note_shape(ctx, bn, samples, positions);
    ctx->batch_norms().accumulate(bn, x, samples, positions);
  });
}

ga_status ga_bn_accumulate_stats(ga_context* ctx, ga_bn bn, int64_t count, const void* mean,
                                 const void* spread, ga_bn_spread kind, ga_dtype dtype) {
  return on(ctx,
            [&] { ctx->batch_norms().accumulate_stats(bn, count, mean, spread, kind, dtype); });
}

ga_status ga_bn_finalize(ga_context* ctx, ga_bn bn) {
  return on(ctx, [&] { ctx->batch_norms().finalize(bn); });
}

ga_status ga_bn_forward(ga_context* ctx, ga_bn bn, const void* x, int64_t samples,
                        int64_t positions, void* y) {
  return on(ctx, [&] {
    note_shape(ctx, bn, samples, positions);
    ctx->batch_norms().forward(bn, x, samples, positions, y);
  });
}

ga_status ga_bn_backward_accumulate(ga_context* ctx, ga_bn bn, const void* x, const void* dy,
                                    int64_t samples, int64_t positions) {
  return on(ctx, [&] {
    note_shape(ctx, bn, samples, positions);
    ctx->batch_norms().backward_accumulate(bn, x, dy, samples, positions);
  });
}

ga_status ga_bn_backward_finalize(ga_context* ctx, ga_bn bn) {
  return on(ctx, [&] { ctx->batch_norms().backward_finalize(bn); });
}

ga_status ga_bn_backward(ga_context* ctx, ga_bn bn, const void* x, const void* dy, int64_t samples,
                         int64_t positions, void* dx) {
  return on(ctx, [&] {
    note_shape(ctx, bn, samples, positions);
    ctx->batch_norms().backward(bn, x, dy, samples, positions, dx);
  });
}

ga_status ga_bn_infer(ga_context* ctx, ga_bn bn, const void* x, int64_t samples, int64_t positions,
                      void* y) {
  return ask(ctx, [&] {
    note_shape(ctx, bn, samples, positions);
    ctx->batch_norms().infer(bn, x, samples, positions, y);
  });
}

ga_status ga_bn_running(ga_context* ctx, ga_bn bn, void* out_mean, void* out_variance,
                        ga_dtype dtype, int64_t* out_steps) {
  return ask(ctx,
             [&] { ctx->batch_norms().running(bn, out_mean, out_variance, dtype, out_steps); });
}

ga_status ga_bn_running_set(ga_context* ctx, ga_bn bn, const void* mean, const void* variance,
                            ga_dtype dtype, int64_t steps) {
  return on(ctx, [&] { ctx->batch_norms().set_running(bn, mean, variance, dtype, steps); });
}

ga_status ga_bn_statistics(ga_context* ctx, ga_bn bn, void* out_mean, void* out_variance,
                           ga_dtype dtype, int64_t* out_count) {
  return ask(ctx,
             [&] { ctx->batch_norms().statistics(bn, out_mean, out_variance, dtype, out_count); });
}

}  // extern "C"
