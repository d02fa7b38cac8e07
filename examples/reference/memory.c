/* How much memory a context takes, and which devices there are.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "example.h"

/* example: ga_device_count */
static ga_device best_device(void) {
  int32_t count = 0;
  ga_device_count(GA_DEVICE_CUDA, &count);
  if (count > 0) return GA_DEVICE_CUDA;
  fprintf(stderr, "on the CPU, because %s\n", ga_last_error());
  return GA_DEVICE_CPU;
}
/* end */

int main(void) {
  static float w[1000];
  ga_context* ctx = context_of(NULL, w, 1000);
  /* example: ga_context_memory */
  ga_memory memory; /* legal before anything is allocated */
  ga_memory_init(&memory, sizeof memory);
  ga_context_memory(ctx, &memory);
  printf("%lld bytes: accumulators %lld, state %lld\n", (long long)memory.total,
         (long long)memory.accumulators, (long long)memory.optimizer_state);
  /* end */
  /* example: ga_prepare */
  if (ga_prepare(ctx) == GA_ERROR_OUT_OF_MEMORY)
    return EXIT_FAILURE; /* better now than in a window */
  /* end */
  const int right = memory.accumulators >= 4000 && memory.optimizer_state == 0;
  ga_context_destroy(ctx);
  if (result(right) != EXIT_SUCCESS) return EXIT_FAILURE;

  int32_t count = 0;
  return ga_device_count(GA_DEVICE_CUDA, &count) == GA_OK &&
                 (best_device() == GA_DEVICE_CUDA) == (count > 0)
             ? EXIT_SUCCESS
             : EXIT_FAILURE;
}
