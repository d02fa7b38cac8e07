/* A message for each call that fails.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <string.h>

#include "example.h"

/* example: ga_last_error */
static void check(ga_status status) {
  if (status == GA_OK) return;
  fprintf(stderr, "%s: %s\n", ga_status_name(status), ga_last_error());
  exit(EXIT_FAILURE);
}
/* end */

int main(void) {
  ga_context* ctx;
  check(ga_context_create(NULL, &ctx));
  if (result(1) != EXIT_SUCCESS) return EXIT_FAILURE;

  float w[2] = {0};
  const ga_status status =
      ga_param_add(ctx, 7, "w", w, GA_F32, 1, (int64_t[]){2}, NULL, NULL); /* no such group */
  const int is_named = strcmp(ga_status_name(status), "GA_ERROR_INVALID_ARGUMENT") == 0 &&
                       strstr(ga_last_error(), "7") != NULL;
  ga_context_destroy(ctx);
  return is_named ? EXIT_SUCCESS : EXIT_FAILURE;
}
