/* libgradaccum: several ranks that hold one window. A part of gradaccum.h, which includes it and has the
 * conventions.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef GRADACCUM_COMM_H_
#define GRADACCUM_COMM_H_

#include "gradaccum.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Several ranks --------------------------------------------------------------------------- */

/* Needed to train on several devices or machines at once, data-parallel: each thread or process, a
   rank, has a context of its own with a copy of the parameters, and all ranks together hold one
   window. What they bring to it, however unequal, gives what one batch of all samples would have
   given. Parameters and state end every step with the same bits on every rank.

     ga_comm_config config;
     ga_comm_config_init(&config, sizeof config, GA_COMM_MPI);
     config.mpi_comm = MPI_Comm_c2f(MPI_COMM_WORLD);
     ga_comm* comm;
     ga_comm_create(&config, &comm);
     ... groups and parameters, the same on every rank ...
     ga_context_set_comm(ctx, comm, NULL);
     ... training as ever: ga_step adds up over the ranks ...

   docs/devices.md has how to choose, how to launch, and what travels. */

typedef struct ga_comm ga_comm;

/* Who the ranks are, and how they are connected. */
typedef int32_t ga_comm_kind;
enum {
  GA_COMM_LOCAL = 0, /* threads of one process, each with a context */
  GA_COMM_MPI = 1,   /* processes of an MPI program, by libgradaccum_mpi.so */
  GA_COMM_TABLE = 2, /* by functions of the program: ga_comm_table */
  GA_COMM_NCCL = 3   /* threads or processes with one GPU each, by libgradaccum_nccl.so and the
                        libnccl.so.2 of the machine; contexts on GA_DEVICE_CUDA alone */
};

/* How a transport adds up; see all_reduce below. */
typedef int32_t ga_comm_op;
enum { GA_COMM_SUM = 0, GA_COMM_MAX = 1 };

/* A transport of the program's own. Every rank calls the same functions in the same order, with the
   same count, stride, dtype and root, and each function returns when this rank may use its result
   and overwrite what it sent. A block is count elements of dtype, any ga_dtype; of [ranks] blocks,
   rank 0's comes first, and block q begins stride elements behind block q - 1, stride >= count.
   Functions return 0, or a number of their own for a failure, after which no other but abort and
   error_text is called. They keep their own time limit and run in the program's floating-point mode.
   Memory is the host's and stream is NULL, unless on_stream is 1: then memory is that of the context's
   device, and the functions queue their work on stream and return. */
typedef struct ga_comm_table {
  size_t struct_size;
  void* user; /* passed to each function */
  /* Block q of send, [ranks] blocks a stride apart, becomes block `rank` of recv on rank q, where
     [ranks] blocks lie one behind the other. */
  int32_t (*all_to_all)(void* user, const void* send, int64_t stride, void* recv, int64_t count,
                        ga_dtype dtype, void* stream);
  /* send, one block, becomes block `rank` of recv, [ranks] blocks a stride apart, on every rank.
     send may be that block of recv. */
  int32_t (*all_gather)(void* user, const void* send, void* recv, int64_t stride, int64_t count,
                        ga_dtype dtype, void* stream);
  /* Rank root's data, count elements, becomes that of every rank. */
  int32_t (*broadcast)(void* user, void* data, int64_t count, ga_dtype dtype, int32_t root,
                       void* stream);
  /* Has the functions that wait on this rank return a failure soon; from any thread. May be NULL. */
  void (*abort)(void* user);
  /* What a failure means: a sentence that stays until the next call; may be NULL, as the function
     may. */
  const char* (*error_text)(void* user, int32_t failure);
  /* For GA_COMM_ADDER_TRANSPORT alone; else NULL. dtype: GA_F32 or GA_F64. Results have the same
     bits on all ranks. all_reduce: data, count elements, becomes the sum or the maximum of all
     ranks'. reduce_scatter: recv becomes that of block `rank` of send, [ranks] blocks one behind
     the other. The library asks for sums; it takes maxima itself, since MPI and NCCL lose a NaN in
     them. */
  int32_t (*all_reduce)(void* user, void* data, int64_t count, ga_dtype dtype, ga_comm_op op,
                        void* stream);
  int32_t (*reduce_scatter)(void* user, const void* send, void* recv, int64_t count, ga_dtype dtype,
                            ga_comm_op op, void* stream);
  int32_t any_thread; /* 1: the library may call the functions from a thread of its own, while
                         the program goes on; needed for ga_comm_options.overlap; default 0 */
  int32_t on_stream;  /* 1: for contexts on a device, see above; default 0 */
} ga_comm_table;

typedef struct ga_comm_config {
  size_t struct_size;
  ga_comm_kind kind;
  int32_t rank;               /* LOCAL, TABLE, NCCL: of this one, in [0, ranks) */
  int32_t ranks;              /* LOCAL, TABLE, NCCL: how many there are; >= 1 */
  int32_t mpi_comm;           /* MPI: MPI_Comm_c2f of a communicator of the program's, which is
                                 duplicated and stays its own */
  double timeout;             /* LOCAL, MPI, NCCL: seconds that a call waits for other ranks, or
                                 for a device on which no window ends; > 0, may be infinite;
                                 default 600 */
  const void* id;             /* LOCAL, NCCL: [GA_COMM_ID_SIZE] bytes of ga_comm_unique_id, which
                                 are copied */
  const ga_comm_table* table; /* TABLE; copied */
  void* nccl_comm;            /* NCCL: a ncclComm_t of the program's, which stays its own and
                                 must outlive the ga_comm; its rank and ranks count. A failure
                                 that leaves the ga_comm of no further use, and ga_comm_abort,
                                 end it with ncclCommAbort: the program neither uses nor destroys
                                 it then. Default NULL: rank, ranks and id make a new one */
} ga_comm_config;

/* Writes the defaults of a kind. */
GA_API ga_status ga_comm_config_init(ga_comm_config* out, size_t struct_size, ga_comm_kind kind);

/* Fills out, [size] bytes, with what tells one set of ranks from any other: LOCAL ranks in this
   process, NCCL ranks on all machines. One rank calls it and gives the bytes to the others, and
   stays alive until all have joined; NCCL: for one communicator alone. size: GA_COMM_ID_SIZE.
   GA_ERROR_UNSUPPORTED: as for ga_comm_create. */
enum { GA_COMM_ID_SIZE = 128 };
GA_API ga_status ga_comm_unique_id(ga_comm_kind kind, void* out, size_t size);

/* Joins a communicator as one of its ranks. MPI and NCCL wait for the other ranks; LOCAL and TABLE do
   not. *out belongs to the caller, who ends it with ga_comm_destroy. NCCL: the rank gets the calling
   thread's current CUDA device, which is NCCL's own rule and must be the context's.
   GA_ERROR_UNSUPPORTED: libgradaccum_mpi.so or libgradaccum_nccl.so could not be loaded; the program
   runs another MPI; there is no libnccl.so.2, or one before NCCL 2.18; nccl_comm was given, but the
   process has not loaded libnccl.so.2.
   GA_ERROR_COMMUNICATION: other ranks did not join in time, or NCCL failed. */
GA_API ga_status ga_comm_create(const ga_comm_config* config, ga_comm** out);

/* This rank's number and the number of ranks. Each out may be NULL. */
GA_API ga_status ga_comm_size(const ga_comm* comm, int32_t* out_rank, int32_t* out_ranks);

/* Has calls that wait for other ranks on comm fail with GA_ERROR_COMMUNICATION now, and all later
   ones at once; LOCAL and MPI: on every rank. NCCL: also ends what is queued on streams, by
   ncclCommAbort. May be called from any thread, while others are in a call. */
GA_API ga_status ga_comm_abort(ga_comm* comm);

/* Leaves. A context that uses comm keeps it until ga_context_destroy or ga_context_set_comm. LOCAL
   and MPI: when that context is gone, calls of other ranks that wait for it, and later ones, fail
   at once with GA_ERROR_COMMUNICATION and name the rank; ranks that make no more calls notice
   nothing, and comm may get another context on every rank. Other ranks wait for a thread that ends
   without that, until ga_comm_config.timeout, since another thread may go on with its context. NULL
   is legal. MPI: before MPI_Finalize. NCCL: waits for what is queued on streams. */
GA_API void ga_comm_destroy(ga_comm* comm);

/* What travels from rank to rank. Either way 16-bit accumulators travel as they are, f64 ones as f64,
   and sums as f32 or f64. */
typedef int32_t ga_comm_wire;
enum {
  GA_COMM_WIRE_EXACT = 0, /* gradients as the accumulators have them */
  GA_COMM_WIRE_BF16 = 1   /* f32 gradients are rounded to bf16 on their way to where they are
                             added, which is in f32: 3/4 of the bytes */
};

/* What each rank keeps of optimizer state, master weights and EMA. */
typedef int32_t ga_shard;
enum {
  GA_SHARD_NONE = 0,      /* all of it */
  GA_SHARD_OPTIMIZER = 1, /* a part of about 1 / ranks: the rank updates that part of the
                             parameters and gets the others' (ZeRO-1, Rajbhandari et al. 2020).
                             Calls that read or write state are then made by every rank in the
                             same order, see ga_context_set_comm */
  GA_SHARD_PARAMETERS = 2 /* all of its own parameters, which are not those of other ranks, or are
                             other parts of them; see "Parameters of ranks of their own" */
};

/* How the program has reduced gradients, under GA_SHARD_PARAMETERS. */
typedef int32_t ga_reduced;
enum {
  GA_REDUCED_MEAN = 0, /* the mean over data_ranks ranks, as by FSDP and DDP */
  GA_REDUCED_SUM = 1   /* the sum */
};

/* Who adds gradients up. Maxima are always taken by the library. */
typedef int32_t ga_comm_adder;
enum {
  /* The library, in the order of the ranks, with the same bits on every transport; every rank
     exchanges a piece with every other. */
  GA_COMM_ADDER_LIBRARY = 0,
  /* MPI, NCCL or the program's table, in an order of its own, so that bits are those of the
     transport; what travels is f32, or f64 for f64 parameters. Local ranks have no such
     transport. */
  GA_COMM_ADDER_TRANSPORT = 1,
  /* TRANSPORT with GA_COMM_NCCL and GA_COMM_WIRE_EXACT, LIBRARY with all others. */
  GA_COMM_ADDER_AUTO = 2
};

/* What ranks exchange and check. */
typedef struct ga_comm_options {
  size_t struct_size;
  ga_comm_wire wire;   /* what travels from rank to rank; default GA_COMM_WIRE_EXACT */
  int32_t hand_out;    /* 0 or 1: rank 0's parameters and state become those of every rank;
                          default 0: they must agree already */
  int64_t check_every; /* every so many windows, ga_step compares parameters, and state that
                          every rank has, over the ranks, bit for bit; default 0: never */
  ga_shard shard;      /* what each rank keeps of optimizer state, master weights and EMA;
                          default GA_SHARD_NONE. It is chosen before the library makes its
                          arrays, and holds until the context ends */
  ga_comm_adder adder; /* who adds gradients up; default GA_COMM_ADDER_AUTO */
  int32_t overlap;     /* 0 or 1: ga_params_ready has gradients exchanged while backward goes on,
                          by a thread of the library or in a second stream; every window
                          exchanges all parameters then. With an MPI that was not initialised
                          with MPI_THREAD_MULTIPLE, ga_step exchanges all, with the same bits;
                          default 0 */
  int32_t reserved;    /* 0 */
  ga_reduced reduced;  /* GA_SHARD_PARAMETERS: what gradients are; default GA_REDUCED_MEAN */
  int32_t data_ranks;  /* GA_SHARD_PARAMETERS: over how many ranks, with samples of their own each,
                          the program reduces a gradient; a divisor of the number of ranks;
                          default 0: all of them */
  int32_t data_rank;   /* GA_SHARD_PARAMETERS: which of these samples are this rank's, in
                          [0, data_ranks); default -1: rank modulo data_ranks */
  int32_t reserved2;   /* 0 */
} ga_comm_options;

/* Writes the defaults. */
GA_API ga_status ga_comm_options_init(ga_comm_options* out, size_t struct_size);

/* Makes the context one of comm's ranks. Every rank calls it, between windows, with the same
   groups, parameters and options, K and threads excepted; the first difference is named in an
   error. NULL makes it a context without other ranks again. options: may be NULL.

   From then on these are collective, called by every rank in the same order: ga_step, ga_discard,
   ga_bn_finalize and ga_bn_backward_finalize of layers that are not frozen, all that saves or
   loads, and under GA_SHARD_OPTIMIZER ga_state_get, ga_state_set, ga_ema_copy_to and ga_ema_swap. A
   rank may bring any number of micro-batches to a window, also none. Each is checked and clipped
   (DROP_MICRO, GA_CLIP_WHEN_MICRO) by the rank that brings it; ga_step checks the sum. A parameter
   has a gradient if it has one on some rank.

   A change of an option holds when every rank has made it: otherwise the next of these calls names
   the difference. If other ranks fail or do not come in time, the call returns
   GA_ERROR_COMMUNICATION; parameters and state are untouched, the window is GA_WINDOW_INVALID if
   gradients were on their way, and comm cannot be used any more: call ga_discard, and
   ga_context_set_comm with NULL or another comm. Where updated parameters were on their way (MUON,
   GA_SHARD_OPTIMIZER), only ga_context_destroy is legal, and ranks may differ by a step.

   docs/devices.md has what travels and when, who keeps which state, what differs on a device, and
   what happens where something fails.

   GA_ERROR_UNSUPPORTED: GA_COMM_ADDER_TRANSPORT with LOCAL, or a table without the functions for it;
   on a device, GA_ROWS_LAZY, and overlap with a transport of the host's memory; a transport of
   devices in a context on the CPU. GA_ERROR_INVALID_ARGUMENT: an NCCL communicator is of another
   CUDA device. GA_ERROR_INVALID_STATE: another context has comm, the window is not empty, or it is
   too late to shard. GA_ERROR_COMMUNICATION: ranks differ, or did not come. */
GA_API ga_status ga_context_set_comm(ga_context* ctx, ga_comm* comm,
                                     const ga_comm_options* options);

/* ---- Parameters of ranks of their own -------------------------------------------------------- */

/* Needed where a framework shards the model itself: FSDP and ZeRO-3, tensor parallelism, experts. With
   GA_SHARD_PARAMETERS each rank's context has what this rank has of the parameters, and gradients come
   reduced by the framework. A window is then clipped by norms over all ranks, skipped and counted as
   that of one process would be, for which each rank's ga_step sends one message of 1,360 bytes, and 64
   bytes more for each group beyond the 20th.

   Losses are multiplied by their weight before backward: a rank whose micro-batch is b samples
   gives ga_accumulate the gradient of b times its mean loss, and the weight b, with
   ga_config.gradient_kind = GA_GRADIENT_SUM. If the framework has taken the mean over data_ranks
   ranks, ga_step multiplies by data_ranks again, and divides by the sum of all weights. Weights may
   differ between ranks; one of 0 brings a gradient, too, which is that of the others. Ranks with
   the same samples (the same data_rank, as in tensor parallelism) give the same weights.

   The squares of a norm are added by a sum whose bits depend neither on the order nor on which rank has
   which part (binned, Demmel & Nguyen 2015). So parameters are those of one process in this mode, to the
   bit, if the reduced gradients are the same; a context without a communicator comes to a norm that may
   differ in the last digits.

   A parameter that a rank has a part of is added in the shape of the part, under the name of the whole;
   ga_param_set_part says where it lies. Parts of a name make up the whole, and do not overlap.

   For contexts on the CPU. GA_ERROR_UNSUPPORTED on all ranks with clipping by value, of units or of
   micro-batches, GA_ROWS, GA_REDUCE_MAX, GA_NONFINITE_DROP_MICRO, GA_ACCUMULATE_RUNNING_MEAN,
   noise_scale, layers with batch normalisation, or max_grad_norm of LAMB. GA_CLIP_PER_TENSOR and
   optimizers that need whole tensors (LAMB, LARS, ADAFACTOR, MUON, ROWWISE_ADAGRAD) are for
   parameters that are not cut.

   With ga_config.eager, on all ranks or none, ga_micro_begin of the last micro-batch (GA_MICRO_LAST, or the
   K-th) is collective too: the ranks tell each other their weights. Then ga_params_ready updates a
   parameter and sums the squares of its gradient, once the program has reduced it.

   Where all ranks give ga_save one path, it becomes an index, and each rank writes a file beside it;
   other numbers of ranks, with other parts, and a context alone load it from there: see ga_save. */

/* Where the elements of a parameter lie in the whole, [first, first + shape) of each axis.
   whole_shape, first: [rank] numbers, copied; may be NULL if rank is 0. copies: ranks that have the
   same part, >= 1, the lowest of which counts its squares. Without this call, the rank has all of
   the parameter, and no other rank has it. Between windows, on every rank.
   After it, blocks of state in 8 bits lie in rows of the whole (indices of the first axis): they have
   the largest power of two of elements, up to 256, that divides a row, and where that is less than 16,
   the state is f32. GA_ERROR_UNSUPPORTED in ga_context_set_comm: the part is cut within such a block.
   GA_ERROR_INVALID_STATE: the parameter has state in other blocks already.
   GA_ERROR_INVALID_ARGUMENT: the part is not within the whole. Ranks that leave holes or overlap
   are GA_ERROR_COMMUNICATION in ga_context_set_comm, or in the next ga_step. */
GA_API ga_status ga_param_set_part(ga_context* ctx, ga_param param, const int64_t* whole_shape,
                                   const int64_t* first, int32_t copies);

#ifdef __cplusplus
}
#endif

#endif /* GRADACCUM_COMM_H_ */
