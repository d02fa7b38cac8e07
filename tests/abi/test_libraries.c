/* SPDX-License-Identifier: Apache-2.0 */
/* test_libraries <library>: two libraries in one process, as two plugins of a host may bring them, each of which
   works, although the program has a function of another version itself; and neither is unloaded, because threads may
   still run in it. */
#include <gradaccum/gradaccum.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
typedef HMODULE Module;
static Module open_module(const char* path) { return LoadLibraryA(path); }
static Module opened_module(const char* path) { return GetModuleHandleA(path); }
static void* find(Module module, const char* name) { return (void*)GetProcAddress(module, name); }
static void close_module(Module module) { FreeLibrary(module); }
static const char* explain(void) {
  static char text[32];
  snprintf(text, sizeof text, "error %lu", GetLastError());
  return text;
}
#else
#include <dlfcn.h>
typedef void* Module;
/* The functions of the first library are found before those of the second, and the program's before both. */
static Module open_module(const char* path) { return dlopen(path, RTLD_NOW | RTLD_GLOBAL); }
static Module opened_module(const char* path) { return dlopen(path, RTLD_NOW | RTLD_NOLOAD); }
static void* find(Module module, const char* name) { return dlsym(module, name); }
static void close_module(Module module) { dlclose(module); }
static const char* explain(void) {
  const char* const text = dlerror();
  return text ? text : "no error";
}
int32_t ga_version(void) { return 907; }
#endif

#define REQUIRE(condition)                                                  \
  do {                                                                      \
    if (!(condition)) {                                                     \
      printf("%s:%d: %s, %s\n", __FILE__, __LINE__, #condition, explain()); \
      exit(1);                                                              \
    }                                                                       \
  } while (0)

typedef struct Library {
  Module module;
#define FUNCTION(name) __typeof__(&ga_##name) name;
#define FUNCTIONS           \
  FUNCTION(context_create)  \
  FUNCTION(context_destroy) \
  FUNCTION(optimizer_init)  \
  FUNCTION(group_add)       \
  FUNCTION(param_add)       \
  FUNCTION(accumulate)      \
  FUNCTION(step) FUNCTION(last_error) FUNCTION(version) FUNCTION(build_describe)
  FUNCTIONS
#undef FUNCTION
} Library;

static Library opened(const char* path) {
  Library library;
  library.module = open_module(path);
  REQUIRE(library.module);
#define FUNCTION(name)                                                      \
  library.name = (__typeof__(&ga_##name))find(library.module, "ga_" #name); \
  REQUIRE(library.name);
  FUNCTIONS
#undef FUNCTION
  return library;
}

static void copy_file(const char* from, const char* to) {
  static char bytes[1 << 16];
  size_t count;
  FILE *const in = fopen(from, "rb"), *const out = fopen(to, "wb");
  REQUIRE(in && out);
  while ((count = fread(bytes, 1, sizeof bytes, in)) > 0)
    REQUIRE(fwrite(bytes, 1, count, out) == count);
  REQUIRE(!ferror(in) && fclose(out) == 0);
  fclose(in);
}

typedef struct Run {
  ga_context* ctx;
  float data[1000];
} Run;

static void start(const Library* library, Run* run) {
  ga_optimizer adam;
  ga_group group;
  ga_param param;
  const int64_t count = 1000;
  memset(run->data, 0, sizeof run->data);
  REQUIRE(library->context_create(NULL, &run->ctx) == GA_OK);
  REQUIRE(library->optimizer_init(&adam, sizeof adam, GA_OPTIMIZER_ADAM, GA_FLAVOR_TORCH) == GA_OK);
  REQUIRE(library->group_add(run->ctx, &adam, &group) == GA_OK);
  REQUIRE(library->param_add(run->ctx, group, "w", run->data, GA_F32, 1, &count, NULL, &param) ==
          GA_OK);
}

static void train(const Library* library, Run* run) {
  float gradient[1000];
  const void* gradients[] = {gradient};
  for (int i = 0; i < 1000; ++i) gradient[i] = (float)(i - 500) / 64;
  REQUIRE(library->accumulate(run->ctx, gradients, 1, 1, NULL) == GA_OK);
  REQUIRE(library->step(run->ctx, NULL) == GA_OK);
}

int main(int argc, char** argv) {
  char copy[4096];
  Library libraries[2];
  Run runs[2];
  REQUIRE(argc == 2);
  REQUIRE(snprintf(copy, sizeof copy, "%s.copy", argv[1]) < (int)sizeof copy);
  copy_file(argv[1], copy);
  libraries[0] = opened(argv[1]);
  libraries[1] = opened(copy);
  REQUIRE(libraries[0].module != libraries[1].module);
  for (int i = 0; i < 2; ++i) {
    ga_build build;
    build.struct_size = sizeof build;
    REQUIRE(libraries[i].build_describe(&build) == GA_OK);
    REQUIRE(build.version == libraries[i].version() && build.version != 907);
    start(&libraries[i], &runs[i]);
  }
  for (int k = 0; k < 3; ++k)
    for (int i = 0; i < 2; ++i) train(&libraries[i], &runs[i]);
  REQUIRE(runs[0].data[0] != 0);
  REQUIRE(memcmp(runs[0].data, runs[1].data, sizeof runs[0].data) == 0);

  /* An error is that of its own library. */
  REQUIRE(libraries[0].step(NULL, NULL) == GA_ERROR_INVALID_ARGUMENT);
  REQUIRE(*libraries[0].last_error() && !*libraries[1].last_error());

  libraries[0].context_destroy(runs[0].ctx);
  for (int i = 0; i < 2; ++i) {
    for (int k = 0; k < 3; ++k) close_module(libraries[i].module);
    REQUIRE(opened_module(i == 0 ? argv[1] : copy) == libraries[i].module);
  }
  train(&libraries[1], &runs[1]);
  libraries[1].context_destroy(runs[1].ctx);
  printf("both work, and stay\n");
  return 0;
}
