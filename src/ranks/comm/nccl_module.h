/* SPDX-License-Identifier: Apache-2.0
 * What libgradaccum_nccl.so offers the core: ranks with a GPU each, connected by NCCL. Plain C: the two may
 * be built by different compilers. */
#ifndef GA_COMM_NCCL_MODULE_H_
#define GA_COMM_NCCL_MODULE_H_

#include <stddef.h>

#include "gradaccum/gradaccum.h"

/* Goes up with every change of the table. */
#define GA_NCCL_ABI 3

typedef struct ga_nccl_end {
  ga_comm_table table; /* its functions queue their work on stream and return */
  int32_t rank, ranks;
  int32_t device; /* whose memory it moves, as CUDA counts them in this process */
} ga_nccl_end;

typedef struct ga_nccl_module {
  int32_t abi; /* GA_NCCL_ABI */
  /* On failure, the first two return a status and write a sentence to error. GA_ERROR_UNSUPPORTED: there
     is no libnccl.so.2 that the module can use. */

  /* Fills out, [GA_COMM_ID_SIZE] bytes, with an id for one set of ranks. */
  ga_status (*unique_id)(void* out, char* error, size_t error_size);
  /* Joins as the rank of the calling thread's current device, and waits for the other ranks for at most
     config->timeout seconds. The core has checked what kind GA_COMM_NCCL reads of config. */
  ga_status (*join)(const ga_comm_config* config, ga_nccl_end* out, char* error, size_t error_size);
  /* Returns 0, or the failure that NCCL has met since in work that the functions queued. From any thread. */
  int32_t (*poll)(void* user);
  /* Runs body(arg), and makes one group of NCCL of the calls that it makes of the table's functions: these return 0,
     and the first failure is returned here. */
  int32_t (*group)(void* user, void (*body)(void* arg), void* arg);
  /* Waits for queued work, unless there was a failure. No other thread may be in a call. */
  void (*leave)(void* user);

  /* user: table.user. Every failure of a function, of poll or of group ends the communicator with ncclCommAbort, as
     table.abort does, so that nothing of it stays on a stream; it is returned by all later calls. */
} ga_nccl_module;

#endif
