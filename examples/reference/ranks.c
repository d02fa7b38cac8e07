/* Two threads as ranks, with unequal shares of one window.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <pthread.h>

#include "example.h"

enum { RANKS = 2 };

static unsigned char id[GA_COMM_ID_SIZE];

typedef struct Rank {
  int32_t number;
  int samples;    /* of its micro-batch */
  float gradient; /* the mean over them */
  float w;
  int status;
} Rank;

static void* train(void* argument) {
  Rank* rank = argument;
  ga_context* ctx = context_of(NULL, &rank->w, 1);

  /* example: ga_comm_create ga_context_set_comm */
  ga_comm_config config; /* on each thread */
  ga_comm_config_init(&config, sizeof config, GA_COMM_LOCAL);
  config.rank = rank->number;
  config.ranks = RANKS;
  config.id = id; /* made once, by ga_comm_unique_id */
  ga_comm* comm;
  ga_comm_create(&config, &comm);
  ga_context_set_comm(ctx, comm, NULL); /* after groups and parameters were added */
  /* end */

  ga_accumulate(ctx, (const void*[]){&rank->gradient}, 1, rank->samples, NULL);
  ga_step(ctx, NULL);
  ga_context_destroy(ctx);
  ga_comm_destroy(comm);
  rank->status = result(1); /* messages belong to the thread */
  return NULL;
}

int main(void) {
  /* example: ga_comm_unique_id */
  ga_comm_unique_id(GA_COMM_LOCAL, id, sizeof id); /* one rank, before others join */
  /* end */
  Rank ranks[RANKS] = {{0, 3, 1, 0, 1}, {1, 1, 5, 0, 1}};
  pthread_t threads[RANKS];
  for (int i = 0; i < RANKS; ++i) {
    if (pthread_create(&threads[i], NULL, train, &ranks[i]) != 0) return EXIT_FAILURE;
  }
  for (int i = 0; i < RANKS; ++i) pthread_join(threads[i], NULL);
  int right = 1; /* the mean of 3 samples with slope 1 and one with 5 is 2 */
  for (int i = 0; i < RANKS; ++i)
    right &= ranks[i].status == EXIT_SUCCESS && near(ranks[i].w, -0.2);
  return result(right);
}
