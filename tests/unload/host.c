/* SPDX-License-Identifier: Apache-2.0
 *
 * host <plugin> <name> <1: the module for oneDNN is there>: opens the plugin, trains in it
 * on several threads, closes it and waits, 50 times. What has to stay in memory is looked for by <name>, a part of
 * the path of the object that holds the library's code. Exits with 1 if something is wrong, unless it crashes.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { kRounds = 50, kThreads = 3 };

static int (*run)(int);

static void* train(void* unused) {
  (void)unused;
  return run(0) ? NULL : (void*)"failed";
}

static int is_named(struct dl_phdr_info* info, size_t size, void* name) {
  (void)size;
  return strstr(info->dlpi_name, name) != NULL;
}

static int is_mapped(const char* name) { return dl_iterate_phdr(is_named, (void*)name); }

int main(int argc, char** argv) {
  int round, i, failed = 0;
  if (argc < 4) return 2;
  for (round = 0; round < kRounds; round++) {
    pthread_t threads[kThreads];
    void* const plugin = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!plugin) {
      printf("%s\n", dlerror());
      return 1;
    }
    *(void**)&run = dlsym(plugin, "plugin_run");
    for (i = 0; i < kThreads; i++) {
      if (pthread_create(&threads[i], NULL, train, NULL) != 0) return 1;
    }
    failed |= !run(0); /* and with a thread that goes on after the plugin */
    if (round % 10 == 0 && argv[3][0] == '1') failed |= !run(1);
    for (i = 0; i < kThreads; i++) {
      void* result;
      pthread_join(threads[i], &result);
      failed |= result != NULL;
    }
    if (round % 10 == 0) failed |= !run(2);
    dlclose(plugin);
    usleep(20000); /* threads that spin go to sleep, and those of the library end their work */
    if (!is_mapped(argv[2])) {
      printf("round %d: %s is not in memory any more\n", round, argv[2]);
      failed = 1;
    }
  }
  printf("%d rounds\n", round);
  return failed;
}
