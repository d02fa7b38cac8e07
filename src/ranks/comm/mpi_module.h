/* SPDX-License-Identifier: Apache-2.0
 * What libgradaccum_mpi.so offers the core: ranks of an MPI program. Plain C: the two may be built by
 * different compilers. */
#ifndef GA_COMM_MPI_MODULE_H_
#define GA_COMM_MPI_MODULE_H_

#include <stddef.h>

#include "gradaccum/gradaccum.h"

/* Goes up with every change of the table. */
#define GA_MPI_ABI 3

typedef struct ga_mpi_end {
  ga_comm_table table;
  int32_t rank, ranks;
} ga_mpi_end;

typedef struct ga_mpi_module {
  int32_t abi; /* GA_MPI_ABI */
  /* Duplicates the communicator, for which every rank calls it. timeout: seconds that a call waits for
     the other ranks. On failure returns a status, and writes a sentence to error. */
  ga_status (*join)(int32_t comm, double timeout, ga_mpi_end* out, char* error, size_t error_size);
  void (*leave)(void* user); /* table.user */
  /* A context is about to make its first call, 1, or makes no more, 0; see Transport::attend. */
  void (*attend)(void* user, int32_t comes);
} ga_mpi_module;

#endif
