/* libgradaccum: gradient accumulation and optimizer steps for programs that compute their own
 * gradients.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The library does everything between backward() and the next forward(): it accumulates
 * micro-batches, undoes the loss scale, checks for infinities and NaN, clips, updates optimizer
 * state and parameters, and moves the learning-rate schedule. One promise holds for all of it: N
 * micro-batches give what one batch N times as large would have given, to rounding.
 *
 * LIFE CYCLE
 *
 *     ga_context* ctx;                          (every call returns a ga_status, see Errors below)
 *     ga_context_create(NULL, &ctx);
 *
 *     ga_optimizer adamw;                       1. a group: an optimizer and its numbers
 *     ga_optimizer_init(&adamw, sizeof adamw, GA_OPTIMIZER_ADAMW, GA_FLAVOR_TORCH);
 *     adamw.lr = 3e-4;
 *     ga_group group;
 *     ga_group_add(ctx, &adamw, &group);
 *
 *     int64_t shape[2] = {512, 784};            2. the parameters: the program keeps them, the
 *     ga_param_add(ctx, group, "fc1.weight", w1, GA_F32, 2, shape, NULL, NULL);     library borrows
 *     ...
 *     for (each window) {                       3. train
 *         for (each micro-batch of the window) {
 *             forward(); backward();            writes the gradients
 *             ga_accumulate(ctx, gradients, count, samples_in_this_micro_batch, NULL);
 *         }
 *         ga_step(ctx, NULL);                   updates the parameters in place
 *     }
 *     ga_context_destroy(ctx);
 *
 * THE WINDOW. The micro-batches between two steps form a window:
 *
 *           ga_accumulate (1) ... ga_accumulate (K)            ga_step
 *   EMPTY ────────────────► OPEN ────────────────► OPEN / FULL ───────► EMPTY
 *     ▲                       └─────────── ga_discard ──────────────────►│
 *     └──────────────────────────────────────────────────────────────────┘
 *
 *   - The program says where a window ends, by calling ga_step. ga_config.accum_steps = K > 0 makes
 *     the window report FULL after K micro-batches and refuse more; 0 leaves its length to the
 *     program. ga_step applies whatever the window holds: a short last window of an epoch is
 *     divided by what it really holds.
 *   - Every micro-batch has a weight w: its number of samples, or of tokens, or 1. The accumulated
 *     gradient is divided by the sum of the weights once, in ga_step. So micro-batches of different
 *     sizes average as they would have in one batch.
 *   - A parameter's first contribution in a window overwrites its accumulator, so nothing is zeroed
 *     and nothing of a former window, a NaN for instance, survives.
 *   - A step is APPLIED or SKIPPED. Steps, schedules, bias corrections and weight decay move only
 *     when it is applied; a skipped step leaves parameters and optimizer state bit for bit as they
 *     were.
 *   - A window with a non-finite gradient is skipped (default) or reported, see ga_nonfinite.
 *
 * GRADIENTS BY PART. A program that produces gradients layer by layer opens a micro-batch itself,
 * with ga_micro_begin, contributes with ga_accumulate_part, ga_accumulate_rows,
 * ga_accumulate_matmul or ga_accumulator_acquire, and closes it with ga_micro_end. Several
 * contributions to one parameter in one micro-batch add up (tied weights).
 *
 * PROGRAMS THAT ADD UP THEMSELVES. A backward pass that does gradient += ... has three ways:
 *   - Over the whole window in the program's own buffers, with GA_GRADIENT_SUM and
 *     GA_GRADIENTS_LIVE: no pass of the library over gradients before ga_step, and on the CPU no
 *     memory for accumulators.
 *     Each micro-batch but the last is counted, with its weight, by ga_micro_begin(ctx, -1, weight,
 *     NULL) and ga_micro_end with nothing between them; ga_accumulate brings the buffers with the
 *     last one. The program zeroes them after ga_step. ga_step divides by the sum of the weights,
 *     so gradients are sums over the samples (or tokens) that the weights count; where each
 *     micro-batch adds a mean, all have the same size and the weight 1.
 *   - Into the library's accumulators, by ga_accumulator_acquire: each is at an address that stays
 *     the same.
 *   - Into buffers that are zeroed before each micro-batch, with ga_accumulate for each: the only
 *     one of the three under which GA_NONFINITE_DROP_MICRO and GA_CLIP_WHEN_MICRO look at single
 *     micro-batches.
 *
 * BATCH NORMALISATION. Its statistics are of a batch, so cutting that into micro-batches changes
 * them. The ga_bn_ functions keep them right: see there, at the end.
 *
 * DEVICES. With ga_config.device = GA_DEVICE_CUDA everything above happens on a GPU: parameters,
 * gradients, indices and matrices are in its memory, and never copied. Calls queue their work on
 * ga_config.stream and return; in a window nothing waits for the GPU, so ga_step may not know its
 * result yet (GA_STEP_PENDING): ga_step_result_get asks again. The program's own work on other
 * streams is its own to order. What it writes on that stream comes before, what it reads after.
 * A window may be captured in a CUDA graph, once one like it has run, and replayed: gradients are
 * then read where they were in the capture; counters, schedules and scales move on with every
 * replay, but ga_window knows nothing of it. The graph ends with the parameters, groups, addresses
 * and clipping that it was captured with: after a change of these, capture anew. Calls that wait
 * say so, and so does whatever needs more memory than before; in a capture they are
 * GA_ERROR_INVALID_STATE. A schedule of window lengths waits when a window opens. Parameters come
 * out with the bits of the CPU, but for matrix products and functions of the mathematical library.
 *
 * CONVENTIONS, which hold unless a function says otherwise
 *   Errors      Every function returns a ga_status. A call that does not return GA_OK has changed
 *               nothing, and ga_last_error() has a sentence with the names and values involved. A
 *               null required pointer, an id that was never given out, or a number outside its
 *               range is GA_ERROR_INVALID_ARGUMENT; a call at the wrong moment is
 *               GA_ERROR_INVALID_STATE; failed memory is GA_ERROR_OUT_OF_MEMORY. Functions below
 *               name only the statuses beyond these three. The library never prints, exits or lets
 *               an exception out.
 *   Threads     A context is used by one thread at a time; different contexts are independent.
 *   Processes   After fork() the contexts of the parent are of no use in the child: every call on
 *               one is GA_ERROR_INVALID_STATE, and ga_context_destroy returns and frees nothing.
 *               The child may make contexts of its own. If the parent had the library loaded, they
 *               use one thread, whatever num_threads says, unless they have a parallel_for: gcc's
 *               OpenMP would wait for threads that only the parent has. CUDA works in the child
 *               only if the parent has not used it.
 *   Ownership   Every pointer is borrowed for the call. Two outlive it: the data of a parameter
 *               (until ga_param_bind or ga_context_destroy) and, by option, gradients
 *               (ga_gradient_life). What a function returns through an out parameter belongs to the
 *               context, but for a ga_context, which is the caller's to destroy.
 *   Alignment   Data may lie at any address that is a multiple of its element.
 *   Sizes       Counts are elements, 64 bits wide. Tensors are dense and row-major.
 *   Rounding    The library computes in a floating-point mode of its own, on every thread: it
 *               rounds to nearest, keeps subnormal numbers and does not trap. The mode of the
 *               program (torch.set_flush_denormal, fesetround, ...) changes no bit, and a call
 *               leaves the mode and the exception flags of its thread as it found them.
 *   Structs     A struct starts with struct_size, its sizeof in the program. The _init functions
 *               take it and write the defaults of the fields that this library knows, nothing
 *               behind them, and struct_size, the size of what they have written. For a struct that
 *               a function fills, the caller sets struct_size. Programs and libraries of different
 *               versions then understand each other: fields unknown to the older side keep their
 *               default. A program that is newer than the library finds struct_size smaller than
 *               its sizeof, and its last fields are not read. If it zeroes the struct first and
 *               sets struct_size to its sizeof again, they are looked at, and one that is set is
 *               GA_ERROR_UNSUPPORTED.
 *   out = NULL  An out parameter that says "may be NULL" is not written.
 */
#ifndef GRADACCUM_GRADACCUM_H_
#define GRADACCUM_GRADACCUM_H_

#include <stddef.h>
#include <stdint.h>

#if defined(SWIG) || defined(GA_STATIC)
#define GA_API
#elif defined(_WIN32) && defined(GA_BUILDING_LIBRARY)
#define GA_API __declspec(dllexport)
#elif defined(_WIN32)
#define GA_API __declspec(dllimport)
#elif defined(__GNUC__)
#define GA_API __attribute__((visibility("default")))
#else
#define GA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Version --------------------------------------------------------------------------------- */

#define GA_VERSION_MAJOR 0
#define GA_VERSION_MINOR 1
#define GA_VERSION_PATCH 0
/* Version of this header, to compare with ga_version(). */
#define GA_VERSION (10000 * GA_VERSION_MAJOR + 100 * GA_VERSION_MINOR + GA_VERSION_PATCH)

/* Version of the library that is loaded: 10000 * major + 100 * minor + patch. */
GA_API int32_t ga_version(void);

/* One line that names version, compiler, CPU loops, threads and the modules this build knows.
   Static. */
GA_API const char* ga_build_info(void);

/* ---- Errors ---------------------------------------------------------------------------------- */

/* Later versions may return statuses beyond these: treat an unknown one as a failure. */
typedef int32_t ga_status;
enum {
  GA_OK = 0,
  GA_ERROR_INVALID_ARGUMENT = 1, /* a null pointer, a number out of range, an unknown id, ... */
  GA_ERROR_INVALID_STATE = 2,    /* not legal now: no micro-batch is open, ... */
  GA_ERROR_OUT_OF_MEMORY = 3,
  GA_ERROR_UNSUPPORTED = 4, /* not in this build or on this machine; the sentence says what */
  GA_ERROR_NONFINITE = 5,   /* the window holds infinities or NaN, under GA_NONFINITE_FAIL */
  GA_ERROR_FAULT = 6,       /* a device, a matrix engine or the program's parallel_for failed in
                               mid-work. From a call that accumulates: the window is invalid, or
                               still empty where the library's arrays were being made; parameters
                               and state are as they were, ga_discard is the way on. From
                               ga_step: the parameters may be half updated and only
                               ga_context_destroy is legal; all else answers this status again */
  GA_ERROR_INTERNAL = 7,    /* a defect of the library: please report the message */
  GA_ERROR_WINDOW_FULL = 8, /* the window has all its micro-batches: ga_step must be called next */
  /* Reserved; no function returns them yet. */
  GA_ERROR_IO = 9,             /* a file could not be read or written */
  GA_ERROR_FORMAT = 10,        /* a file or buffer is not a state of this library, or is damaged */
  GA_ERROR_COMMUNICATION = 11, /* another rank or the transport failed */
  GA_ERROR_CANCELLED = 12      /* a callback of the program asked to stop */
};

/* "GA_ERROR_UNSUPPORTED" and so on; "unknown status" for any other number. Static. */
GA_API const char* ga_status_name(ga_status status);

/* What went wrong in this thread's last call that failed, or why ga_device_count has found nothing
   since: one sentence, "" if there was neither. Belongs to the thread, valid until the next such
   call. */
GA_API const char* ga_last_error(void);

/* The build in parts. Versions are 10000 * major + 100 * minor + patch, and 0 where the module could
   not be loaded; strings are static. */
typedef struct ga_build {
  size_t struct_size;
  int32_t version;       /* as ga_version() */
  int32_t onednn;        /* of the oneDNN that multiplies matrices on the CPU */
  int32_t cuda_runtime;  /* of the CUDA that libgradaccum_cuda.so was built with */
  int32_t cuda_driver;   /* the newest CUDA that the driver of this machine runs; 0: no driver */
  int32_t openmp;        /* _OPENMP, a date such as 201511; 0: built without OpenMP */
  int32_t reserved;      /* 0 */
  const char* compiler;  /* "gcc 12.2.0" */
  const char* cpu_loops; /* names for GA_CPU_ISA, with spaces between them */
} ga_build;

/* Zeros, and struct_size: sizeof(ga_build). */
GA_API ga_status ga_build_init(ga_build* out, size_t struct_size);

/* Loads the modules that can be loaded. */
GA_API ga_status ga_build_describe(ga_build* out);

/* ---- Types ----------------------------------------------------------------------------------- */

typedef struct ga_context ga_context; /* everything below belongs to one of these */

/* Ids count up from 0 in the order of the calls that gave them out, so that they can index the
   program's own arrays. The one struct with an id in it, ga_flat_entry, is refused when it is all
   zeros. */
typedef int32_t ga_group;
typedef int32_t ga_param;

/* GA_F16 is IEEE binary16, GA_BF16 the upper half of an f32. The integers are for row indices. */
typedef int32_t ga_dtype;
enum { GA_F32 = 1, GA_F64 = 2, GA_F16 = 3, GA_BF16 = 4, GA_I32 = 5, GA_I64 = 6 };

typedef int32_t ga_device;
enum { GA_DEVICE_CPU = 0, GA_DEVICE_CUDA = 1 };

/* What the program's gradients are: means over their micro-batch (each is multiplied by its
   weight), or sums (each is taken as it is). */
typedef int32_t ga_gradient_kind;
enum { GA_GRADIENT_MEAN = 0, GA_GRADIENT_SUM = 1 };

/* What the optimizer sees: the sum over the window, divided by the sum of the weights or not. */
typedef int32_t ga_reduce;
enum { GA_REDUCE_MEAN = 0, GA_REDUCE_SUM = 1 };

/* What happens to a parameter that received no gradient in the window: nothing at all, or a step
   with a gradient of zero (its momentum and weight decay then still move it). */
typedef int32_t ga_missing;
enum { GA_MISSING_SKIP = 0, GA_MISSING_ZERO = 1 };

/* What happens when a gradient is infinite or NaN.
   SKIP_STEP: ga_step judges the accumulated gradients and skips (outcome GA_STEP_SKIPPED_NONFINITE,
   the window is emptied).
   FAIL: ga_step returns GA_ERROR_NONFINITE, and the window is kept until ga_discard.
   DROP_MICRO: every micro-batch is judged before it is added (a pass of its own over its
   gradients), and one that is not finite counts toward K with weight 0: the step is that of the
   others. Contributions by part are then read in ga_micro_end, so gradients, indices and values
   must live until it returns; ga_accumulate_matmul, ga_accumulator_acquire and opening a
   micro-batch again are GA_ERROR_UNSUPPORTED. Should the sum overflow, ga_step skips.
   IGNORE: nobody looks; the step is made with what there is. */
typedef int32_t ga_nonfinite;
enum {
  GA_NONFINITE_SKIP_STEP = 0,
  GA_NONFINITE_FAIL = 1,
  GA_NONFINITE_DROP_MICRO = 2,
  GA_NONFINITE_IGNORE = 3
};

/* How contributions add up in an accumulator.
   PLAIN: A + c, rounded to the accumulator's dtype.
   RUNNING_MEAN: A is the mean of what came so far, so |A| never exceeds the largest |g| and no
   16-bit accumulator overflows by their number. Not more accurate. Needs GA_GRADIENT_MEAN and
   GA_REDUCE_MEAN.
   COMPENSATED: a 16-bit accumulator becomes a pair, the sum and what its rounding lost: twice the
   memory, 16 (bf16) or 22 (f16; fewer where the sum is below 1/8) bits in place of 8 or 11.
   STOCHASTIC: a 16-bit accumulator is rounded up or down by chance, so that small terms are not
   lost on average. The chances come from a counter (ga_config.seed, window, micro-batch,
   contribution, parameter, element): the same run gives the same bits with any threads.
   The last two leave accumulators of f32 and f64 as in PLAIN. With any but PLAIN,
   ga_accumulate_matmul, ga_accumulator_acquire and ga_accumulate_rows are GA_ERROR_UNSUPPORTED, and
   gradients are read at once, GA_GRADIENTS_LIVE or not. */
typedef int32_t ga_accumulation;
enum {
  GA_ACCUMULATE_PLAIN = 0,
  GA_ACCUMULATE_RUNNING_MEAN = 1,
  GA_ACCUMULATE_COMPENSATED = 2,
  GA_ACCUMULATE_STOCHASTIC = 3
};

/* How long the program leaves a gradient in place.
   CONSUMED: the library has read it when the call returns.
   LIVE: the buffer of a parameter's first contribution in a window stays as it is until the call
   that brings the second one has returned, else until ga_step or ga_discard. The library then reads
   it there in place of copying it: fewer bytes, the same bits. It never writes it. A second
   contribution must come in a buffer that does not overlap that one. */
typedef int32_t ga_gradient_life;
enum { GA_GRADIENTS_CONSUMED = 0, GA_GRADIENTS_LIVE = 1 };

/* Runs task(data, i) for every i in [0, count), each once, on any threads, and returns when all are
   done. It is called in the floating-point mode of the program, and task leaves that of its thread
   as it was. */
typedef void (*ga_task)(void* data, int64_t index);
typedef void (*ga_parallel_for)(void* user, int64_t count, ga_task task, void* data);

/* Returns bytes of memory where the context computes, at a multiple of 64, on the device for work on
   stream (ga_config.stream); NULL if there is none. It need not be zeroed. Called by the thread that
   has called the library. */
typedef void* (*ga_allocate)(void* user, size_t bytes, ga_device device, void* stream);
/* Takes back what ga_allocate has returned. */
typedef void (*ga_free)(void* user, void* data, size_t bytes, ga_device device, void* stream);

/* Receives a line for each call of the library, without a newline at its end; valid for the call. */
typedef void (*ga_log)(void* user, const char* line);

/* ---- Context --------------------------------------------------------------------------------- */

typedef struct ga_config {
  size_t struct_size;
  ga_device device;    /* default GA_DEVICE_CPU */
  int32_t num_threads; /* threads of the CPU loops, up to 4096; 0, the default: as many as OpenMP
                             would use, or 1 without it */
  int64_t accum_steps; /* K, micro-batches to a full window; 0, the default: the program says */
  ga_gradient_kind gradient_kind; /* default GA_GRADIENT_MEAN */
  ga_reduce reduce;               /* default GA_REDUCE_MEAN */
  ga_missing missing;             /* default GA_MISSING_SKIP */
  ga_nonfinite nonfinite;         /* default GA_NONFINITE_SKIP_STEP */
  ga_gradient_life gradient_life; /* default GA_GRADIENTS_CONSUMED */
  ga_accumulation accumulation;   /* default GA_ACCUMULATE_PLAIN */
  double loss_scale; /* what the loss was multiplied by, divided out again; any finite number
                             but 0, a negative one for gradients stored negated; default 1. See also
                             ga_context_set_loss_scaler */
  ga_parallel_for parallel_for; /* the program's own threads in place of OpenMP's; NULL, the
                             default: OpenMP's. It must not throw. num_threads then only says into
                             how many pieces a matrix product is cut. */
  void* parallel_for_user;      /* handed to parallel_for */
  uint64_t seed;                /* of stochastic rounding; default 0 */
  int32_t noise_scale;    /* 1: estimate the gradient noise scale, see ga_step_result; default 0 */
  int32_t measure_norm;   /* 1: ga_step_result.norm is measured in every window. 0, the default:
                             unless only a pass over gradients made for it alone would tell. That is
                             so under GA_NONFINITE_IGNORE, for parameters without GA_CLIP_GLOBAL or
                             GA_CLIP_PER_TENSOR whose gradient is a single one that lives on
                             (GA_GRADIENTS_LIVE), has rows added to a whole one, or was last written
                             by the program (ga_accumulator_acquire) or by a matrix engine; the norm
                             is NaN then. GA_OPTIMIZER_LARS and LAMB, with its max_grad_norm, and
                             noise_scale measure it for themselves */
  double noise_smoothing; /* of that estimate over steps; [0, 1); default 0.9 */
  int32_t device_ordinal; /* which of the devices of that kind; default 0 */
  int32_t reserved2;      /* 0 */
  void* stream;           /* GA_DEVICE_CUDA: the cudaStream_t that all work goes to, which lives as
                             long as the context; NULL, the default: the legacy default stream */
  ga_allocate allocate;   /* the program's allocator for the library's arrays: accumulators, state,
                             masters, averages, their workspace; NULL, the default: the library's
                             own. Tables that the host shares with a device stay the library's.
                             Returning NULL is GA_ERROR_OUT_OF_MEMORY */
  ga_free free;           /* set with allocate, and only then */
  void* allocator_user;   /* handed to both */
  ga_log log;             /* a line when a call on the context ends: "gradaccum,cpu,ga_step,
                             outcome:0 norm:1.5,GA_OK,0.042", with the milliseconds that the call
                             took; on a device not those of the work. NULL, the default: none, or to
                             stderr where the environment variable GA_VERBOSE is 1 when the context
                             is made. Must not use the context */
  void* log_user;         /* handed to log */
} ga_config;

/* Fills config with the defaults. struct_size: sizeof(ga_config). */
GA_API ga_status ga_config_init(ga_config* out, size_t struct_size);

/* Makes a context. config may be NULL: the defaults. *out belongs to the caller, who ends it with
   ga_context_destroy. The environment variable GA_CPU_ISA (scalar, x86-64-v2, x86-64-v3, x86-64-v4)
   picks the CPU loops for tests; all give the same bits. GA_ERROR_UNSUPPORTED: no such device, no
   driver or one that is too old, libgradaccum_cuda.so could not be loaded (it is looked for beside
   the library, or only in the folder that the environment variable GA_MODULE_PATH names), or
   GA_CPU_ISA names loops that this build or this processor does not have. */
GA_API ga_status ga_context_create(const ga_config* config, ga_context** out);

/* Ends a context and frees what it owns; parameters and gradients are the program's. NULL is legal.
   */
GA_API void ga_context_destroy(ga_context* ctx);

/* Devices of a kind (ga_device) that contexts can be made on; 1 for GA_DEVICE_CPU. None is an
   answer and not an error: *out is 0, and ga_last_error() has the reason, the sentence that
   ga_context_create would refuse with (no module, no driver or one that is too old, no device). */
GA_API ga_status ga_device_count(ga_device device, int32_t* out);

/* Waits until all work of the context is done. The CPU backend has none outstanding.
   GA_ERROR_FAULT: some of it failed on the device; every later call answers this again. */
GA_API ga_status ga_synchronize(ga_context* ctx);

/* Bytes the library owns for this context, by purpose, as registered so far. Those of a parameter
   are allocated by the first contribution to a window that comes while it is not frozen, or by the
   first ga_step that moves it without one; ask before to plan. A call that fails and a micro-batch
   of weight 0 allocate nothing. Parameters and gradients are not in here: they are yours. */
typedef struct ga_memory {
  size_t struct_size;
  int64_t accumulators; /* with GA_GRADIENTS_LIVE and accum_steps 1 on the CPU, those that have been
                           written: the others take addresses, but no memory */
  int64_t optimizer_state;
  int64_t workspace; /* partial norms and tables; from the first matrix product on, its scratch */
  int64_t total;
  int64_t masters;  /* f32 copies of 16-bit parameters */
  int64_t averages; /* ga_context_set_ema */
  int64_t rows;     /* 4 bytes for each row of a parameter with ga_param_options.rows, and room for
                       the rows of the largest window so far, 40 bytes each; as much again is in
                       workspace */
  int64_t batch_norm; /* 120 bytes a channel, 128 in f64, from ga_bn_add on; in MICRO and CUMULATIVE
                         mode also room for the micro-batches of the largest window so far, which
                         grows by doubling from 4: 24 bytes a channel and micro-batch */
  int64_t resident;   /* of total, what has been written so far; on a device, what is allocated. The
                         rest is planned: not allocated yet, or memory that the system only gives
                         when it is written */
} ga_memory;

/* Zeros, and struct_size: sizeof(ga_memory). */
GA_API ga_status ga_memory_init(ga_memory* out, size_t struct_size);

GA_API ga_status ga_context_memory(const ga_context* ctx, ga_memory* out);

/* K of the windows to come: as ga_config.accum_steps. Legal while the window is empty and no
   schedule of K is set. */
GA_API ga_status ga_context_set_accum_steps(ga_context* ctx, int64_t accum_steps);

/* K as a function of applied steps: from applied step from_steps[i] on, windows have accum_steps[i]
   micro-batches (0: the program decides). from_steps: strictly ascending, the first 0. Both arrays
   have count elements and are copied. count = 0 removes the schedule. Legal while the window is
   empty. */
GA_API ga_status ga_context_set_accum_schedule(ga_context* ctx, const int64_t* from_steps,
                                               const int64_t* accum_steps, size_t count);

/* ---- Groups: an optimizer, its numbers, a schedule, clipping --------------------------------- */

typedef int32_t ga_optimizer_kind;
enum {
  GA_OPTIMIZER_SGD = 0,        /* momentum, dampening, Nesterov; Sutskever et al. 2013 */
  GA_OPTIMIZER_ADAM = 1,       /* Kingma & Ba 2015, algorithm 1; AMSGrad: Reddi et al. 2018 */
  GA_OPTIMIZER_ADAMW = 2,      /* Loshchilov & Hutter 2019, algorithm 2 */
  GA_OPTIMIZER_EXTERNAL = 3,   /* the program updates the parameters itself, from ga_gradient */
  GA_OPTIMIZER_RMSPROP = 4,    /* Tieleman & Hinton 2012; centered: Graves 2013 */
  GA_OPTIMIZER_ADAGRAD = 5,    /* Duchi et al. 2011 */
  GA_OPTIMIZER_ADADELTA = 6,   /* Zeiler 2012 */
  GA_OPTIMIZER_ADAMAX = 7,     /* Kingma & Ba 2015, algorithm 2 */
  GA_OPTIMIZER_NADAM = 8,      /* Dozat 2016 */
  GA_OPTIMIZER_RADAM = 9,      /* Liu et al. 2020 */
  GA_OPTIMIZER_LION = 10,      /* Chen et al. 2023 */
  GA_OPTIMIZER_LAMB = 11,      /* You et al. 2020, as timm has it. Two passes: 28 and 12 bytes an
                                 element (f32), against AdamW's 28 */
  GA_OPTIMIZER_LARS = 12,      /* You et al. 2017, as timm has it. A pass of 4 bytes before the
                                 update's 20 */
  GA_OPTIMIZER_ADAFACTOR = 13, /* Shazeer & Stern 2018, as torch.optim.Adafactor: for rank >= 2 the
                                 second moment is a product of a row and a column (of the last two
                                 axes). Three passes, 8, 12 and 12 bytes */
  GA_OPTIMIZER_MUON = 14,      /* Jordan et al. 2024, as torch.optim.Muon, with the Newton-Schulz
                                 iteration in f32 through libgradaccum_onednn.so. Matrices only
                                 (rank 2, not f64); give the other parameters a group of their own.
                                 Two passes, 16 and 12 bytes, and the products between */
  GA_OPTIMIZER_ADOPT = 15,     /* Taniguchi et al. 2024, algorithm 2: its first step moves nothing.
                                 Defaults: lr 1e-3, beta1 0.9, beta2 0.9999, eps 1e-6 */
  GA_OPTIMIZER_ADEMAMIX = 16,  /* Pagliardini et al. 2024: ADAMW and a slow average of gradients.
                                 Defaults: ADAM's, beta3 0.9999, alpha 5, no warm-ups */
  GA_OPTIMIZER_ROWWISE_ADAGRAD = 17 /* as FBGEMM's EXACT_ROWWISE_ADAGRAD: ADAGRAD with one number of
                                 state for each index of the first axis, to which the mean of the
                                 squares of its gradient is added. For embeddings, also with
                                 GA_ROWS_LAZY. Defaults: lr 1e-2, eps 1e-10 */
};

/* Whose definition, where frameworks differ. t counts a parameter's own updates in TORCH, the
   context's applied steps in the others.
             TORCH                                  KERAS
   decay     is added to the gradient (L2), but is  is decoupled everywhere: p -= lr weight_decay p
             decoupled, p -= lr weight_decay p, in
             ADAMW, LION, ADAFACTOR, MUON,
             ADEMAMIX, ROWWISE_ADAGRAD, and in NADAM,
             RADAM and ADOPT by option
   SGD       b = mu b + (1 - dampening) g, first    v = mu v - lr g; p += v
             b = g; p -= lr b
   ADAM...   eps added to sqrt(v / (1 - beta2^t))   eps added to sqrt(v)
   RMSPROP   eps outside of the root; b = mu b +    eps within; b = mu b + lr g / d; p -= b
             g / d; p -= lr b
   ADAGRAD   g / (sqrt(s) + eps), lr decays with    g / sqrt(s + eps)
             t by lr_decay
   ADAMAX    u = max(beta2 u, |g| + eps); m / u     u = max(beta2 u, |g|); m / (u + eps)
   NADAM     momentum_decay 4e-3                    momentum_decay 1
   LAMB      weight_decay p is part of the layer's  decoupled; the ratio always applies
             update and of its norm; the ratio
             applies where weight_decay is not 0,
             or by always_adapt; max_grad_norm
   others    ADADELTA and LION differ in their defaults only
   RADAM, LARS, ADAFACTOR, MUON, ADOPT, ADEMAMIX and ROWWISE_ADAGRAD have TORCH alone.
   BERT      ADAMW only, as AdamWeightDecay of the BERT release: no bias correction,
             p -= lr (m / (sqrt(v) + eps) + weight_decay p) */
typedef int32_t ga_flavor;
enum { GA_FLAVOR_TORCH = 0, GA_FLAVOR_KERAS = 1, GA_FLAVOR_BERT = 2 };

/* What MUON's learning rate is multiplied by, for a matrix of R rows and C columns. */
typedef int32_t ga_adjust_lr;
enum {
  GA_ADJUST_ORIGINAL = 0,  /* sqrt(max(1, R / C)) */
  GA_ADJUST_MATCH_RMS = 1, /* 0.2 sqrt(max(R, C)): steps as large as AdamW's */
  GA_ADJUST_NONE = 2
};

typedef struct ga_optimizer {
  size_t struct_size;
  ga_optimizer_kind kind;
  ga_flavor flavor;
  double lr;            /* learning rate, or its peak where a schedule is set; >= 0 */
  double weight_decay;  /* >= 0 */
  double momentum;      /* SGD, RMSPROP, LARS, MUON; >= 0 */
  double dampening;     /* SGD, LARS; TORCH only; [0, 1] */
  double beta1;         /* ADAM..., LION, LAMB, ADOPT, ADEMAMIX; [0, 1) */
  double beta2;         /* ADAM..., LION, LAMB, ADOPT, ADEMAMIX; [0, 1) */
  double eps;           /* >= 0; ADAFACTOR: eps1; MUON: the least norm to divide by */
  int32_t nesterov;     /* SGD, LARS: 0 or 1; needs momentum > 0 and dampening 0. MUON: 0 or 1 */
  int32_t amsgrad;      /* ADAM, ADAMW: 0 or 1; not BERT */
  int32_t maximize;     /* 0 or 1: ascend, with the sign of the gradient turned */
  ga_dtype state_dtype; /* of the state: 0, the default: f32 (f64 for f64 parameters); or
                          GA_BF16, always rounded stochastically. Not ADAFACTOR, not
                          ROWWISE_ADAGRAD, not f64 */
  double rho;           /* RMSPROP (alpha in torch), ADADELTA; [0, 1) */
  double lr_decay;      /* ADAGRAD, TORCH: lr / (1 + (t - 1) lr_decay); >= 0 */
  double initial_accumulator; /* (ROWWISE_)ADAGRAD: what the sum of squares begins with; >= 0 */
  double momentum_decay;      /* NADAM: beta1 (1 - 0.96^(t momentum_decay) / 2); >= 0 */
  double trust_coefficient;   /* LARS; > 0 */
  double max_grad_norm;       /* LAMB, TORCH: the gradient is first divided by max(1, n /
                                 max_grad_norm), n the norm over all LAMB groups, also those where
                                 it is 0: is not */
  double eps2;                /* ADAFACTOR: least root mean square of p in the step size; >= 0 */
  double beta2_decay;         /* ADAFACTOR: beta2 = 1 - t^beta2_decay; <= 0 */
  double clip_threshold;      /* ADAFACTOR: largest root mean square of an update; > 0 */
  double ns_coefficients[3];  /* MUON: X <- a X + b (X X') X + c (X X')^2 X; finite */
  int32_t ns_steps;           /* MUON: iterations; 1 to 99 */
  ga_adjust_lr adjust_lr;     /* MUON */
  int32_t centered;           /* RMSPROP: 0 or 1: by the variance, not by the mean square */
  int32_t decoupled;          /* NADAM, RADAM, ADOPT; TORCH: 0 or 1: decoupled weight decay */
  int32_t always_adapt;       /* LAMB, LARS; TORCH: 0 or 1: the ratio also without weight_decay */
  int32_t reserved;           /* 0 */
  double beta3;               /* ADEMAMIX: of the slow average; [0, 1) */
  double alpha;               /* ADEMAMIX: what the slow average is multiplied by; >= 0 */
  int64_t alpha_warmup;       /* ADEMAMIX: steps in which alpha grows from 0; >= 0 */
  int64_t beta3_warmup;       /* ADEMAMIX: steps in which the slow average slows down to it; >= 0 */
} ga_optimizer;

/* Fills optimizer with that framework's defaults for that optimizer. struct_size:
   sizeof(ga_optimizer). GA_ERROR_UNSUPPORTED: the optimizer has no such flavor. */
GA_API ga_status ga_optimizer_init(ga_optimizer* out, size_t struct_size, ga_optimizer_kind kind,
                                   ga_flavor flavor);

/* Adds a group of parameters that share one optimizer. out may be NULL. Legal while the window is
   empty. GA_ERROR_UNSUPPORTED: the optimizer has no such flavor. */
GA_API ga_status ga_group_add(ga_context* ctx, const ga_optimizer* optimizer, ga_group* out);

/* Sets the learning rate, or its peak where a schedule is set; finite, >= 0. At any time; the next
   ga_step uses it. */
GA_API ga_status ga_group_set_lr(ga_context* ctx, ga_group group, double lr);

/* Sets the weight decay; finite, >= 0. At any time. */
GA_API ga_status ga_group_set_weight_decay(ga_context* ctx, ga_group group, double weight_decay);

/* Groups of the context. Their ids are 0 to *out - 1. */
GA_API ga_status ga_group_count(const ga_context* ctx, int32_t* out);

/* The optimizer of a group, with the learning rate and the weight decay that were set last. */
GA_API ga_status ga_group_optimizer(const ga_context* ctx, ga_group group, ga_optimizer* out);

/* Gives a group other numbers: learning rate, betas, momentum, eps, and so on. At any time; the next
   ga_step uses them. What says which state there is may not change: kind, flavor, state_dtype,
   amsgrad, centered, initial_accumulator, whether momentum is 0 (SGD, RMSPROP). Bias corrections go
   by the betas of now, as those of PyTorch and Keras do: 1 - beta^t with the new beta.
   GA_ERROR_UNSUPPORTED: such a field differs, or the optimizer would then move rows that
   GA_ROWS_LAZY leaves. */
GA_API ga_status ga_group_set_optimizer(ga_context* ctx, ga_group group,
                                        const ga_optimizer* optimizer);

/* ga_param_set_frozen for each parameter that the group has now. */
GA_API ga_status ga_group_set_frozen(ga_context* ctx, ga_group group, int32_t frozen);

/* The learning rate as a function of the context's applied steps. With s = 0 for step first_step and
   those before it, counted from 0, W = warmup_steps, T = total_steps, x = (s - W) / (T - W) within [0, 1], and end =
   end_factor * lr:
     s < W (linear warm-up)    lr (s + 1) / W            all kinds but TABLE and BERT
     CONSTANT                  lr
     LINEAR                    end + (lr - end) (1 - x)
     COSINE                    end + (lr - end) (1 + cos(pi x)) / 2
     POLYNOMIAL                end + (lr - end) (1 - x)^power
     INVERSE_SQRT              lr sqrt(c / (c + s - W)), c = max(W, 1)
     STEP                      lr gamma^floor((s - W) / step_size)
     EXPONENTIAL               lr gamma^(s - W)
     TABLE                     table[s]; beyond its end the last value
     BERT                      lr s / W for s < W, else lr (1 - min(s, T) / T): the first lr is 0 */
typedef int32_t ga_schedule_kind;
enum {
  GA_SCHEDULE_CONSTANT = 0,
  GA_SCHEDULE_LINEAR = 1,
  GA_SCHEDULE_COSINE = 2,
  GA_SCHEDULE_POLYNOMIAL = 3,
  GA_SCHEDULE_INVERSE_SQRT = 4,
  GA_SCHEDULE_STEP = 5,
  GA_SCHEDULE_EXPONENTIAL = 6,
  GA_SCHEDULE_TABLE = 7,
  GA_SCHEDULE_BERT = 8
};

typedef struct ga_schedule {
  size_t struct_size;
  ga_schedule_kind kind;
  int32_t reserved;     /* 0 */
  int64_t warmup_steps; /* W >= 0; default 0 */
  int64_t total_steps;  /* T; LINEAR, COSINE, POLYNOMIAL: > W; BERT: >= max(W, 1); else not read */
  double end_factor;    /* >= 0; default 0 */
  double power;         /* POLYNOMIAL; >= 0; default 1 */
  double gamma;         /* STEP, EXPONENTIAL; >= 0; default 0.1 for STEP, 1 for EXPONENTIAL */
  int64_t step_size;    /* STEP; > 0 */
  const double* table;  /* TABLE: learning rates, finite, >= 0; copied */
  int64_t table_size;   /* TABLE; > 0 */
  int64_t first_step; /* applied steps before the schedule begins, such as ga_window_info.steps for
                           a group that is added later; >= 0; default 0 */
} ga_schedule;

/* Fills schedule with the defaults of its kind. struct_size: sizeof(ga_schedule). */
GA_API ga_status ga_schedule_init(ga_schedule* out, size_t struct_size, ga_schedule_kind kind);

/* Sets the schedule of a group; NULL takes it away. The schedule is copied. At any time. */
GA_API ga_status ga_group_set_schedule(ga_context* ctx, ga_group group,
                                       const ga_schedule* schedule);

/* The learning rate that the next applied step of this group will use. Waits. */
GA_API ga_status ga_group_lr(const ga_context* ctx, ga_group group, double* out);

/* The learning rate of this group in the last applied step; 0 before the first. Waits. */
GA_API ga_status ga_group_last_lr(const ga_context* ctx, ga_group group, double* out);

/* Sets the number of applied steps, for a run that goes on from elsewhere: schedules, averages and
   optimizers whose t is the context's (see ga_flavor) go on from there, as if steps had been made with
   the numbers of now. Counters of parameters are state: see ga_state_set. steps: >= 0. Legal while
   the window is empty. */
GA_API ga_status ga_context_set_steps(ga_context* ctx, int64_t steps);

/* Clipping of the reduced gradient (unscaled, averaged), first by value, then by norm. */
typedef int32_t ga_clip_scope;
enum {
  GA_CLIP_NONE = 0,
  GA_CLIP_GLOBAL = 1,     /* one norm over all parameters of the groups without a clipping of their
                            own; in ga_group_set_clip, over those of the group */
  GA_CLIP_PER_TENSOR = 2, /* each parameter by its own norm */
  GA_CLIP_AGC = 3         /* adaptive gradient clipping (Brock et al. 2021): each unit of a
                             parameter, a filter or a neuron, by its norm against the parameter's:
                             with M = agc_factor max(|p|, agc_eps), g <- g M / max(|g|, 1e-6) where
                             |g| > M. Costs a pass over gradients and parameters, 8 bytes an
                             element; none where units are rows (axis 0 is kept) and the optimizer
                             is not layer-wise: it is then made on the way */
};

/* The units of GA_CLIP_AGC: the axes that a unit's norm is taken over, by the rank of the
   parameter. ga_param_options.agc_axes says otherwise for one parameter.
     rank                  0, 1     2             3             4             5
     GA_AGC_TF             all      0             0             0, 1, 2       0 to 3
     GA_AGC_NFNETS         all      0             0             0, 1, 2       (none)
     GA_AGC_TORCH          all      all but 0     all but 0     all but 0     all but 0
   TF and NFNETS are for weights [in, out] and [height, width, in, out], TORCH for [out, in] and
   [out, in, height, width], and higher ranks alike. NFNETS leaves extents of 1 out of the count for
   ranks 0 and 1: [1, n] is a vector. */
typedef int32_t ga_agc_units;
enum { GA_AGC_TF = 0, GA_AGC_NFNETS = 1, GA_AGC_TORCH = 2 };

/* STEP: the reduced gradient, as the full batch would have been clipped. MICRO: every micro-batch's
   own gradient, unscaled, before it is added, as some wrappers do. Then gradients are read twice,
   those by part in ga_micro_end (they must live until it returns), a second contribution to one
   parameter in one micro-batch, opening a micro-batch again, ga_accumulate_rows,
   ga_accumulate_matmul and ga_accumulator_acquire are GA_ERROR_UNSUPPORTED. */
typedef int32_t ga_clip_when;
enum { GA_CLIP_WHEN_STEP = 0, GA_CLIP_WHEN_MICRO = 1 };

typedef struct ga_clip {
  size_t struct_size;
  ga_clip_scope scope; /* default GA_CLIP_NONE */
  ga_flavor flavor;    /* the factor, for norm n and max_norm C. GA_FLAVOR_TORCH, the default:
                       min(1, C / (n + 1e-6)); GA_FLAVOR_KERAS, TensorFlow's: C / max(n, C) */
  double max_norm;     /* C >= 0; read for GA_CLIP_GLOBAL and GA_CLIP_PER_TENSOR */
  double max_value;  /* each element to [-max_value, max_value]; > 0; default infinity: as it is */
  double agc_factor; /* > 0; default 0.01 */
  double agc_eps;    /* > 0; default 1e-3 */
  ga_agc_units agc_units; /* default GA_AGC_TF */
  ga_clip_when when;      /* default GA_CLIP_WHEN_STEP */
} ga_clip;

/* Fills clip with the defaults. struct_size: sizeof(ga_clip). */
GA_API ga_status ga_clip_init(ga_clip* out, size_t struct_size);

/* Sets the clipping of the context; NULL takes it away. At any time; the next ga_step uses it. To
   and from GA_CLIP_WHEN_MICRO: while the window is empty. GA_ERROR_UNSUPPORTED: GA_AGC_NFNETS and a
   parameter of rank 5 or more without agc_axes; GA_CLIP_WHEN_MICRO and a batch-normalisation layer
   in WINDOW mode. */
GA_API ga_status ga_context_set_clip(ga_context* ctx, const ga_clip* clip);

/* Gives one group a clipping of its own in place of the context's, with its own norm; NULL: the
   context's again. Otherwise as ga_context_set_clip. */
GA_API ga_status ga_group_set_clip(ga_context* ctx, ga_group group, const ga_clip* clip);

/* ---- Loss scale and averages ----------------------------------------------------------------- */

/* A loss scale that follows the gradients (Micikevicius et al. 2018, with the rule of PyTorch's
   GradScaler). It moves in ga_step only: one scale holds for a whole window. A step that is skipped
   for a non-finite gradient, or a window with a dropped micro-batch, backs it off: scale *=
   backoff_factor. Under GA_NONFINITE_FAIL the ga_discard of such a window does so. growth_interval
   applied steps in a row without one: scale *= growth_factor. */
typedef struct ga_loss_scaler {
  size_t struct_size;
  double initial_scale;    /* within the two below; default 65536 */
  double growth_factor;    /* > 1; default 2 */
  double backoff_factor;   /* (0, 1); default 0.5 */
  double min_scale;        /* the scale stays at or above it; > 0; default 2^-126 */
  double max_scale;        /* and at or below it; finite as an f32; default 2^127 */
  int64_t growth_interval; /* > 0; default 2000 */
  int32_t hysteresis;      /* > 0; default 1: that many non-finite windows since the scale last grew
                              until one backs it off, and so does each one after that */
  int32_t reserved;        /* 0 */
} ga_loss_scaler;

/* Fills scaler with the defaults. struct_size: sizeof(ga_loss_scaler). */
GA_API ga_status ga_loss_scaler_init(ga_loss_scaler* out, size_t struct_size);

/* Gives the context a dynamic loss scale in place of ga_config.loss_scale, beginning with
   initial_scale; NULL takes it away. Legal while the window is empty. */
GA_API ga_status ga_context_set_loss_scaler(ga_context* ctx, const ga_loss_scaler* scaler);

/* The factor that the program multiplies its loss by until the next ga_step. out_scale: the number;
   the call waits for the device where there is a loss scaler. out_device: where the number lies on
   the device as an f32, for work on the context's stream; *out_device is NULL for a context on the
   CPU. One of the two may be NULL, out_scale only on a device. */
GA_API ga_status ga_loss_scale(const ga_context* ctx, double* out_scale, const void** out_device);

/* An exponential moving average of every parameter, moved once per applied step, in the pass that
   updates it: e <- e + (1 - d) (p - e), after the context's t-th step. In the first, e = p.
     TORCH     d = decay, as torch.optim.swa_utils.get_ema_avg_fn
     KARRAS    d = (1 - 1 / t)^(gamma + 1): the window grows with t (Karras et al. 2024, eq. 6)
   p is the master where there is one. One that is added later begins with its first step.
   Parameters without a gradient in a window, frozen ones and lazily updated ones take part; a pass
   of its own then moves theirs. One that has always been frozen has no average yet. Those of
   GA_OPTIMIZER_EXTERNAL are taken as ga_step finds them. */
typedef int32_t ga_ema_kind;
enum { GA_EMA_TORCH = 0, GA_EMA_KARRAS = 1 };

typedef struct ga_ema {
  size_t struct_size;
  ga_ema_kind kind; /* default GA_EMA_TORCH */
  ga_dtype dtype;   /* of the averages; 0, the default: f32 (f64 for f64 parameters); or GA_BF16,
                    always rounded stochastically, not for f64 parameters */
  double decay;     /* TORCH; [0, 1]; default 0.999 */
  double gamma;     /* KARRAS; >= 0; default 6.94 */
} ga_ema;

/* Fills ema with the defaults. struct_size: sizeof(ga_ema). */
GA_API ga_status ga_ema_init(ga_ema* out, size_t struct_size);

/* Keeps averages from now on; NULL: does not. Legal until the first contribution to a window. */
GA_API ga_status ga_context_set_ema(ga_context* ctx, const ga_ema* ema);

/* ---- Parameters ------------------------------------------------------------------------------ */

/* Whether a 16-bit parameter has a master: a copy in f32, owned by the library, that the optimizer
   updates and the parameter is rounded from. Without one, the optimizer reads and rounds the
   parameter itself. Masters of two contexts over the same memory would drift apart: the call that
   would make the second one, or move one there, is GA_ERROR_INVALID_STATE. */
typedef int32_t ga_master;
enum { GA_MASTER_F32 = 0, GA_MASTER_NONE = 1 };

/* How a 16-bit parameter is rounded. STOCHASTIC: up or down by chance (ga_config.seed, step,
   parameter, element). */
typedef int32_t ga_rounding;
enum { GA_ROUND_NEAREST = 0, GA_ROUND_STOCHASTIC = 1 };

/* Whether ga_accumulate_rows is for a parameter. DENSE: a row without a gradient counts as zeros.
   LAZY: rows without a gradient are left as they are, their state with them, also under
   GA_MISSING_ZERO: SGD (dampening 0), ADAM, ADAMW, ADAGRAD and ROWWISE_ADAGRAD. */
typedef int32_t ga_rows;
enum { GA_ROWS_NONE = 0, GA_ROWS_DENSE = 1, GA_ROWS_LAZY = 2 };

typedef struct ga_param_options {
  size_t struct_size;
  ga_dtype gradient_dtype;    /* of its gradients; 0, the default: the parameter's own. f64
                                only for f64 parameters, which take any */
  ga_dtype accumulator_dtype; /* of its accumulator; 0, the default: f32, or f64 for f64
                                parameters, which have no other; else GA_F32, GA_F16 or GA_BF16 */
  ga_master master;           /* default GA_MASTER_F32 */
  ga_rounding rounding;       /* default GA_ROUND_NEAREST */
  ga_rows rows;               /* default GA_ROWS_NONE; needs rank >= 1, an f32 or f64
                                accumulator and GA_ACCUMULATE_PLAIN */
  uint32_t agc_axes;          /* bit d: a unit's norm is taken over axis d; 0, the default: by
                                ga_clip.agc_units */
} ga_param_options;

/* Fills out with the defaults. struct_size: sizeof(ga_param_options). */
GA_API ga_status ga_param_options_init(ga_param_options* out, size_t struct_size);

/* Adds a parameter. Legal while the window is empty. name: not empty, unique in the context. data:
   the tensor itself, read and written by ga_step; NULL only when it has no elements; it may not
   overlap another parameter. rank and shape: extents >= 0; rank 0 (shape may be NULL) is a scalar.
   options may be NULL: the defaults. out may be NULL. GA_ERROR_UNSUPPORTED: dtypes or options that
   do not go together, or not with the group's optimizer; the sentence says which. */
GA_API ga_status ga_param_add(ga_context* ctx, ga_group group, const char* name, void* data,
                              ga_dtype dtype, int32_t rank, const int64_t* shape,
                              const ga_param_options* options, ga_param* out);

/* One parameter within a flat block. The entries of an array all have the struct_size of the first
   one, which is the distance from one to the next. */
typedef struct ga_flat_entry {
  size_t struct_size;
  const char* name;
  ga_group group;
  int32_t rank;
  const int64_t* shape;
  int64_t offset; /* elements from the start of the block, of parameters and gradients alike */
  const ga_param_options* options; /* NULL, the default: those of ga_params_add_flat */
} ga_flat_entry;

/* Fills out with the defaults: group -1, which is no group, so that it must be set. struct_size:
   sizeof(ga_flat_entry). */
GA_API ga_status ga_flat_entry_init(ga_flat_entry* out, size_t struct_size);

/* Adds the parameters that lie in one block of memory, for programs that keep all of them together;
   gaps between them are legal. All are added or none. *out, which may be NULL, is the id of
   entries[0]; the others follow. Otherwise as ga_param_add. In ga_accumulate the block is one
   pointer. */
GA_API ga_status ga_params_add_flat(ga_context* ctx, void* data, ga_dtype dtype,
                                    const ga_flat_entry* entries, size_t count,
                                    const ga_param_options* options, ga_param* out);

/* Parameters of the context. Their ids are 0 to *out - 1. */
GA_API ga_status ga_param_count(const ga_context* ctx, int32_t* out);

/* The id of the parameter with this name. GA_ERROR_INVALID_ARGUMENT: there is none. */
GA_API ga_status ga_param_find(const ga_context* ctx, const char* name, ga_param* out);

/* What is known of a parameter. name and shape point to memory of the context that stays as it is
   until ga_context_destroy. */
typedef struct ga_param_info {
  size_t struct_size;
  const char* name;
  ga_group group;
  ga_dtype dtype;
  ga_dtype gradient_dtype;
  ga_dtype accumulator_dtype;
  void* data;           /* as given to ga_param_add or ga_param_bind */
  const int64_t* shape; /* rank numbers */
  int32_t rank;
  int32_t frozen; /* 0 or 1 */
  int64_t count;  /* elements */
  int64_t offset; /* elements from the start of its flat block; else 0 */
  size_t slot;    /* as ga_param_slot */
  double lr_scale, weight_decay_scale;
} ga_param_info;

/* Zeros, and struct_size: sizeof(ga_param_info). */
GA_API ga_status ga_param_info_init(ga_param_info* out, size_t struct_size);

GA_API ga_status ga_param_describe(const ga_context* ctx, ga_param param, ga_param_info* out);

/* Pointers that ga_accumulate takes: one for each ga_param_add and each ga_params_add_flat. */
GA_API ga_status ga_slot_count(const ga_context* ctx, size_t* out);

/* Which of these pointers brings the gradient of a parameter; the parameters of a flat block share
   one. */
GA_API ga_status ga_param_slot(const ga_context* ctx, ga_param param, size_t* out);

/* Tells that the parameter has moved: data holds its values now. A master stays as it is. Legal
   while the window is empty. */
GA_API ga_status ga_param_bind(ga_context* ctx, ga_param param, void* data);

/* Tells that the program has written the parameter, which has a master: the next contribution takes
   the master from it anew. Needed only after the first contribution to a window, which makes the
   masters; without a master nothing needs to be told. Legal while the window is empty. */
GA_API ga_status ga_param_changed(ga_context* ctx, ga_param param);

/* Writes the moving average of a parameter to out: as many elements, of dtype, rounded to nearest.
   out must not overlap a parameter. Before the first applied step it is the parameter itself.
   On a device the call waits for the work before it, and out is written in the order of the stream.
   GA_ERROR_INVALID_STATE: the context keeps no averages. GA_ERROR_FAULT: out is half written. */
GA_API ga_status ga_ema_copy_to(ga_context* ctx, ga_param param, void* out, ga_dtype dtype);

/* Exchanges parameters and averages, to evaluate with the averages; 0 takes that back, to the last
   bit. Where a parameter is not of the dtype of its average, it is set to the average, rounded, and a
   copy is kept meanwhile (ga_memory.averages). While they are exchanged, all that does not merely ask
   is GA_ERROR_INVALID_STATE, except ga_bn_infer, ga_synchronize and ga_context_destroy, which leaves
   the parameters as they are. Legal while the window is empty. GA_ERROR_INVALID_STATE: the context
   keeps no averages. GA_ERROR_OUT_OF_MEMORY: nothing has changed. */
GA_API ga_status ga_ema_swap(ga_context* ctx, int32_t on);

/* Freezes a parameter (its gradients are not read, it is not updated) or unfreezes it. One that is
   frozen from the start owns nothing, neither accumulator nor state, master or average, until a
   contribution comes after it is unfrozen. Legal while the window is empty. */
GA_API ga_status ga_param_set_frozen(ga_context* ctx, ga_param param, int32_t frozen);

/* Multiplies the learning rate of the group, or its weight decay, for one parameter; finite, >= 0;
   1 until then. A weight decay of 0 also counts as none where that matters (LAMB, LARS). At any
   time; the next ga_step uses it. */
GA_API ga_status ga_param_set_lr_scale(ga_context* ctx, ga_param param, double lr_scale);
GA_API ga_status ga_param_set_weight_decay_scale(ga_context* ctx, ga_param param,
                                                 double weight_decay_scale);

/* Removes a parameter: the library does not touch it any more, and every call with its id is
   GA_ERROR_INVALID_ARGUMENT. No other parameter gets the id; the name is free. Its pointer in
   ga_accumulate stays where it is and is not read. The library's arrays are freed once all are
   removed that were allocated by the same call, else with the context. Legal while the window is
   empty, unless a batch-normalisation layer has it. */
GA_API ga_status ga_param_remove(ga_context* ctx, ga_param param);

/* ---- State ----------------------------------------------------------------------------------- */

/* What the optimizer keeps for a parameter has a name and can be read and written, in the host's
 * memory also with a device: to carry it between frameworks, to look at it, to save it.
 *
 *   "exp_avg", ...   the state of the optimizer, under the names of torch.optim, timm where torch
 *                    lacks the optimizer, whatever the flavor
 *   "step"           a GA_I64, the updates of this parameter. GA_FLAVOR_TORCH; the others count
 *                    the context's steps, see ga_context_set_steps
 *   "mu_product"     a GA_F64. GA_OPTIMIZER_NADAM, GA_FLAVOR_TORCH
 *   "master"         the f32 copy of a 16-bit parameter
 *   "ema"            its moving average; before the first one, the parameter itself
 */

/* Allocates the library's arrays for all parameters that are not frozen now, where the first
   contribution to a window would. Masters are copied from their parameters no earlier than by that
   contribution, or by the first ga_state_get or ga_state_set. */
GA_API ga_status ga_prepare(ga_context* ctx);

typedef struct ga_state_info {
  size_t struct_size;
  const char* name; /* static */
  ga_dtype dtype;
  int32_t reserved; /* 0 */
  int64_t count;    /* elements */
} ga_state_info;

/* Zeros, and struct_size: sizeof(ga_state_info). */
GA_API ga_status ga_state_info_init(ga_state_info* out, size_t struct_size);

/* How many arrays of state a parameter has, or will have once it is not frozen. */
GA_API ga_status ga_state_count(const ga_context* ctx, ga_param param, int32_t* out);

/* Array number index of these, in an order that stays the same. */
GA_API ga_status ga_state_describe(const ga_context* ctx, ga_param param, int32_t index,
                                   ga_state_info* out);

/* Reads or writes an array of state whole. dtype and count are those of ga_state_describe: nothing
   is rounded. Both allocate as ga_prepare does, are legal while the window is empty, and wait.
   GA_ERROR_INVALID_ARGUMENT: the parameter has no state of that name, dtype or count; the sentence
   lists what there is. GA_ERROR_INVALID_STATE: it has always been frozen. */
GA_API ga_status ga_state_get(ga_context* ctx, ga_param param, const char* name, void* out,
                              ga_dtype dtype, int64_t count);
GA_API ga_status ga_state_set(ga_context* ctx, ga_param param, const char* name, const void* data,
                              ga_dtype dtype, int64_t count);

/* Puts a parameter's state back to the beginning: that of the optimizer, its counters, the master
   (the parameter itself) and the average. Legal while the window is empty. */
GA_API ga_status ga_state_reset(ga_context* ctx, ga_param param);

/* ---- Accumulate ------------------------------------------------------------------------------ */

/* GA_MICRO_LAST: this micro-batch ends the window, which is FULL after it whatever K is. */
enum { GA_MICRO_LAST = 1 };

/* What may be said of a micro-batch. */
typedef struct ga_micro_options {
  size_t struct_size;
  double loss_scale; /* what the micro-batch's loss was multiplied by; finite; 0, the default: the
                        context's, which is the loss scaler's where there is one, else
                        ga_config.loss_scale */
  uint32_t flags;    /* GA_MICRO_... or 0, the default */
  int32_t reserved;  /* 0 */
} ga_micro_options;

/* Fills out with the defaults. struct_size: sizeof(ga_micro_options). */
GA_API ga_status ga_micro_options_init(ga_micro_options* out, size_t struct_size);

/* Adds a whole micro-batch to the window. gradients[slot] (see ga_param_slot): one pointer for each
   ga_param_add and each ga_params_add_flat, in the order of those calls; for a flat block, the
   start of a block with the same offsets. NULL: no gradient in this micro-batch. Gradients may
   overlap each other, but no parameter. count: how many pointers, for checking. weight: samples,
   tokens, or 1; finite, >= 0. With weight 0 the micro-batch counts toward K and no gradient is
   read. options may be NULL: the defaults. Opens the window when it is empty.
   GA_ERROR_WINDOW_FULL: ga_step must be called next. GA_ERROR_INVALID_STATE: the window is invalid,
   or a micro-batch is open. */
GA_API ga_status ga_accumulate(ga_context* ctx, const void* const* gradients, size_t count,
                               double weight, const ga_micro_options* options);

/* Opens micro-batch number index of the window (0, 1, 2, ...; -1: the next one), to be filled by
   the calls below, or opens it again: micro-batches may be filled in turns until ga_step, each with
   the weight and the loss scale of its first opening. GA_MICRO_LAST is legal for the newest
   micro-batch only. weight, options: as in ga_accumulate. GA_ERROR_WINDOW_FULL: the window has no
   room for a new micro-batch. */
GA_API ga_status ga_micro_begin(ga_context* ctx, int64_t index, double weight,
                                const ga_micro_options* options);

/* Adds a gradient to one parameter, within the open micro-batch. Several calls for one parameter
   add up. */
GA_API ga_status ga_accumulate_part(ga_context* ctx, ga_param param, const void* gradient);

/* Adds a gradient that has only some rows, within the open micro-batch: values[i] is added to row
   indices[i] of the parameter, for i in [0, count). A row is what shape[0] counts. values: count
   rows, dense, of the parameter's gradient dtype. indices: index_dtype, GA_I32 or GA_I64, in
   [0, shape[0]), in any order; repeated ones add up. Needs ga_param_options.rows, and costs what
   its rows cost; so does ga_step with GA_ROWS_LAZY, but for averages, GA_CLIP_AGC, and max_value
   before a norm, which take passes over the whole parameter. Rows and whole gradients may come to
   one parameter in one window; it is then dense. GA_ERROR_UNSUPPORTED: with ga_config.noise_scale
   or GA_CLIP_WHEN_MICRO. */
GA_API ga_status ga_accumulate_rows(ga_context* ctx, ga_param param, const void* indices,
                                    ga_dtype index_dtype, int64_t count, const void* values);

/* Whether a matrix is used as stored or transposed. */
typedef int32_t ga_transpose;
enum { GA_NO_TRANSPOSE = 0, GA_TRANSPOSE = 1 };

/* Adds the matrix product A B to one parameter, within the open micro-batch: the weight gradient of
   a dense layer, which then never is in memory as a whole. The parameter is taken as a matrix of
   m = shape[0] rows and n = count / m columns; A is m x k, B is k x n, both after transposition,
   row-major as stored, with lda and ldb elements from row to row. For a layer y = x W^T with
   W [out, in], x [batch, in] and the gradient dy [batch, out], the gradient of W is dy^T x:
   (k = batch, A = dy, lda = out, GA_TRANSPOSE, B = x, ldb = in, GA_NO_TRANSPOSE).
   dtype: of A and B, GA_F32, GA_F16 or GA_BF16; the parameter's accumulator is f32. A and B must
   not overlap any parameter. Sums are in f32, in the order of the matrix engine, oneDNN or on a
   device cuBLAS, which depends on threads and processor.
   GA_ERROR_UNSUPPORTED: libgradaccum_onednn.so or its oneDNN could not be loaded, or the program
   has loaded another major version of oneDNN, or there is no cuBLAS; everything else keeps working.
   The module is looked for beside the library, or only in the folder that the environment variable
   GA_MODULE_PATH names. Likewise with ga_config.noise_scale. GA_ERROR_FAULT: the engine failed in
   mid-work. */
GA_API ga_status ga_accumulate_matmul(ga_context* ctx, ga_param param, int64_t k, const void* a,
                                      int64_t lda, ga_transpose transpose_a, const void* b,
                                      int64_t ldb, ga_transpose transpose_b, ga_dtype dtype);

/* Where a program's own kernel writes a gradient: alpha * gradient + beta * data. alpha is weight /
   loss scale for GA_GRADIENT_MEAN and 1 / loss scale for GA_GRADIENT_SUM. beta is 0 for the first
   contribution in a window, else 1; with 0, data is not to be read: a kernel that can only do +=
   zeroes it first. */
typedef struct ga_accumulator {
  size_t struct_size;
  void* data;     /* NULL: write nothing; the micro-batch has weight 0 or the parameter is frozen */
  ga_dtype dtype; /* of data */
  int32_t reserved;
  int64_t rows, columns;     /* shape[0], and the product of the other dimensions */
  int64_t leading_dimension; /* elements from row to row: columns */
  double alpha, beta;
} ga_accumulator;

/* Zeros, and struct_size: sizeof(ga_accumulator). */
GA_API ga_status ga_accumulator_init(ga_accumulator* out, size_t struct_size);

/* Hands out a parameter's accumulator, within the open micro-batch, so that the program's own
   kernel adds to it. Every element is to be written. ga_accumulator_release then makes it part of
   the micro-batch; until then no other call for this parameter is legal, and ga_micro_end is not.
   out->data has the same address in every window until ga_context_destroy. GA_ERROR_UNSUPPORTED:
   with ga_config.noise_scale. */
GA_API ga_status ga_accumulator_acquire(ga_context* ctx, ga_param param, ga_accumulator* out);
GA_API ga_status ga_accumulator_release(ga_context* ctx, ga_param param);

/* Closes the open micro-batch. */
GA_API ga_status ga_micro_end(ga_context* ctx);

/* Drops the open micro-batch as if it had never been opened, where nothing of it is in an accumulator
   yet: before its first contribution, and with GA_GRADIENTS_LIVE, GA_NONFINITE_DROP_MICRO and
   GA_CLIP_WHEN_MICRO as long as its gradients are only noted. GA_ERROR_INVALID_STATE: something has
   been added, or the micro-batch was opened before; ga_discard drops the whole window. */
GA_API ga_status ga_micro_abort(ga_context* ctx);

/* ---- Step ------------------------------------------------------------------------------------ */

typedef int32_t ga_window_state;
enum {
  GA_WINDOW_EMPTY = 0,
  GA_WINDOW_OPEN = 1,
  GA_WINDOW_FULL = 2,   /* K micro-batches: ga_step is due */
  GA_WINDOW_INVALID = 3 /* a call that accumulates ended in GA_ERROR_FAULT: ga_discard is due */
};

typedef struct ga_window_info {
  size_t struct_size;
  ga_window_state state;
  int32_t reserved;
  int64_t micro_batches; /* in this window, the open one included */
  int64_t open_micro;    /* index of the open micro-batch; -1: none is open */
  int64_t accum_steps;   /* K of this window; 0: the program decides */
  double weight;         /* sum of the weights so far; on a device dropped micro-batches count */
  int64_t windows;       /* calls of ga_step that returned GA_OK, since the context was made */
  int64_t steps;         /* of these, applied; on a device, as far as the results are known */
} ga_window_info;

/* Zeros, and struct_size: sizeof(ga_window_info). */
GA_API ga_status ga_window_info_init(ga_window_info* out, size_t struct_size);

/* On a device it waits where the length of the next window depends on the steps so far. */
GA_API ga_status ga_window(const ga_context* ctx, ga_window_info* out);

typedef int32_t ga_step_outcome;
enum {
  GA_STEP_APPLIED = 0,
  GA_STEP_SKIPPED_EMPTY = 1,     /* no micro-batch, or the sum of the weights is 0 */
  GA_STEP_SKIPPED_NONFINITE = 2, /* an accumulated gradient is infinite or NaN */
  GA_STEP_SKIPPED_ERROR = 3, /* on a device: some indices of ga_accumulate_rows were out of range,
                                and that call's rows were left out */
  GA_STEP_PENDING = 4,       /* on a device: not known yet, see ga_step_result_get */
  GA_STEP_SKIPPED_WEIGHT = 5 /* with GA_REDUCE_MEAN: the sum of the weights, though not 0, is
                                outside of [2^-126, 2^127], so that f32 cannot divide by it; where
                                all parameters of the step are f64, outside of [2^-400, 2^400],
                                beyond which f64 does not hold the squares that norms are made of.
                                It says nothing of the gradients: by itself it does not move a loss
                                scale */
};

typedef struct ga_step_result {
  size_t struct_size;
  ga_step_outcome outcome;
  int32_t reserved;
  int64_t windows;       /* as in ga_window_info, this one included */
  int64_t steps;         /* as in ga_window_info, this one included if applied */
  int64_t micro_batches; /* that this window held */
  double weight;         /* sum of their weights */
  double norm;           /* 2-norm of the whole reduced gradient before clipping; NaN or infinite if
                            skipped for that, 0 if skipped for being empty or for its weight. NaN if
                            nobody has measured it: see ga_config.measure_norm */
  double clip_factor;    /* the smallest factor that a clip by norm applied to the reduced gradient;
                            1 without. With GA_CLIP_WHEN_MICRO, norm is that of clipped
                            micro-batches */
  double lr;             /* learning rate of group 0 in this step; 0 if skipped */
  double loss_scale;     /* that ga_loss_scale gave in this window */
  int64_t skipped;       /* windows that were not applied, since the context was made */
  int64_t dropped;       /* micro-batches that GA_NONFINITE_DROP_MICRO dropped, likewise */
  int64_t window_dropped;  /* of these, in this window */
  double noise_scale;      /* with ga_config.noise_scale: the simple noise scale tr(S) / |G|^2 of
                            McCandlish et al. 2018 (appendix A.1), in units of the weight, the batch
                            size: windows of much less waste steps, of much more waste samples. NaN
                            before the first estimate, and without the option */
  double noise_trace;      /* tr(S): the variance of one sample's gradient */
  double noise_signal;     /* |G|^2: of the gradient of the whole data. All three are smoothed over
                            steps, as means with weights noise_smoothing^age. A window of one
                            micro-batch, one in which a parameter was given more than one
                            contribution in a micro-batch, or some out of the order of
                            micro-batches, and one that is skipped bring no estimate */
  uint64_t dropped_micros; /* bit i: micro-batch i of the window was dropped; i < 64 */
} ga_step_result;

/* Zeros, and struct_size: sizeof(ga_step_result). */
GA_API ga_status ga_step_result_init(ga_step_result* out, size_t struct_size);

/* Ends the window: reduces, checks, clips, updates state and parameters in place. out may be NULL.
   On a device it returns before that is done, unless GA_NONFINITE_FAIL has it wait; the outcome is
   then GA_STEP_PENDING where it is not known, and of the rest only micro_batches and weight are. An
   empty window is legal and skipped. GA_ERROR_INVALID_STATE: a micro-batch is still open, or the
   window is invalid. GA_ERROR_NONFINITE: under GA_NONFINITE_FAIL; the window stays, and ga_discard
   must be called next. */
GA_API ga_status ga_step(ga_context* ctx, ga_step_result* out);

/* The result of a window: that with this number in ga_step_result.windows, or 0: of the last one,
   replays of a captured graph included. wait: 1: waits for it on a device; 0: does not, and gives
   the outcome GA_STEP_PENDING, on a device also of a window that is still to come. The last 64 are
   kept. GA_ERROR_INVALID_ARGUMENT: it is not kept any more, or there was no such window. */
GA_API ga_status ga_step_result_get(ga_context* ctx, int64_t window, int32_t wait,
                                    ga_step_result* out);

/* Drops what the window holds, an open micro-batch with it. Parameters, state and counters stay as
   they are; only a dynamic loss scale moves, where ga_step has returned GA_ERROR_NONFINITE for this
   window. */
GA_API ga_status ga_discard(ga_context* ctx);

/* The reduced, clipped gradient of a parameter of a GA_OPTIMIZER_EXTERNAL group: *out_count
   elements of *out_dtype, dense; out_dtype and out_count may be NULL. The pointer is legal after an applied
   ga_step until the next accumulate, ga_discard or ga_step. Waits. *out_dtype is that of the
   accumulator: one of 16 bits, a compensated one too, gives a gradient rounded to 16 bits.
   GA_ERROR_INVALID_STATE: not after an applied step, or the parameter received no gradient in the
   window (under GA_MISSING_ZERO it then has zeros). */
GA_API ga_status ga_gradient(ga_context* ctx, ga_param param, const void** out_data,
                             ga_dtype* out_dtype, int64_t* out_count);

/* ---- Batch normalisation --------------------------------------------------------------------- */

/* y = gamma (x - mean) / sqrt(variance + eps) + beta for each channel (Ioffe & Szegedy 2015). What
 * one batch does in one go, a window must be told: whose mean and variance?
 *
 *   MICRO       Those of the micro-batch itself, as frameworks do. What one batch would have given
 *               comes out of the running statistics alone: they move once per applied step, from
 *               the exact statistics of the whole window.
 *   WINDOW      Those of the whole window: y, dx, dgamma and dbeta are those of one batch. It takes
 *               the network layer by layer, each in two sweeps over the micro-batches, forward and
 *               backward, so the program keeps the activations of the window.
 *   CUMULATIVE  Those of the window's micro-batches up to this one: one sweep, and later micro-
 *               batches come close to the window's. Gradients are exact for what was computed.
 *
 *     MICRO, CUMULATIVE: in each micro-batch     WINDOW: layer by layer
 *
 *         ga_bn_forward   where x is there          for each k: ga_bn_accumulate
 *         ...                                       ga_bn_finalize
 *         ga_micro_begin                            for each k: ga_bn_forward
 *         ga_bn_backward  where dy is there         ... the layers behind it, there and back ...
 *         ...                                       for each k: ga_micro_begin
 *         ga_micro_end                                          ga_bn_backward_accumulate
 *                                                               ga_micro_end
 *                                                   for each k: the same with ga_bn_backward
 *
 * Micro-batches. ga_bn_accumulate, ga_bn_accumulate_stats and ga_bn_forward are about the open
 * micro-batch; where none is open, about the next one: the one to come (MICRO, CUMULATIVE), or the
 * next of the layer's sweep (WINDOW). The backward calls are about the open one. They give the
 * gradients of gamma and beta to the window as ga_accumulate_part would, with the micro-batch's
 * weight and loss scale; in WINDOW mode these also weigh its share in the dx of all others. With
 * weight 0 dx is zero. To the statistics every element counts the same, whatever the weight.
 *
 * A micro-batch may be visited again, in any order: in MICRO and CUMULATIVE mode its statistics are
 * kept, and new ones replace them; CUMULATIVE normalises micro-batch k by those of 0 to k. For a
 * micro-batch that has not been opened yet, the same statistics may come twice, of x at the same
 * address or as well aligned, but others are GA_ERROR_INVALID_STATE: they would be those of another
 * micro-batch, and be lost. (The comparison waits on a device.) A program that adds up its
 * gradients itself opens and closes each micro-batch all the same, with nothing between. Statistics
 * of a micro-batch that is never opened do not count, nor do those of one that
 * GA_NONFINITE_DROP_MICRO drops.
 *
 * Tensors are [samples, channels, positions] or [samples, positions, channels], positions being the
 * product of the spatial extents, 1 without any. x is read again by the backward calls. y may be x,
 * dx may be dy or x; outputs must not overlap anything else that the call reads, nor a parameter.
 *
 * Numbers. Sums over x and dy are in double, those over x of deviations from an element of the
 * channel, so a mean that is large beside the deviation costs nothing; it is subtracted in two
 * parts, to the same end. On the CPU all bits are the same for any number of threads and any
 * processor; on a device they are the same in every run, but not those of the CPU.
 *
 * The running statistics move in ga_step, when it is applied: a skipped or discarded window leaves
 * them as they were, and a channel whose statistics are not finite does so too. They belong to the
 * context; ga_bn_running and ga_bn_running_set take them from layer to layer. */
typedef int32_t ga_bn; /* 0, 1, 2, ... in the order they were added */

typedef int32_t ga_bn_mode;
enum { GA_BN_MICRO = 0, GA_BN_WINDOW = 1, GA_BN_CUMULATIVE = 2 };

/* [samples, channels, positions] (NCHW) or [samples, positions, channels] (NHWC). */
typedef int32_t ga_bn_layout;
enum { GA_BN_CHANNELS_FIRST = 0, GA_BN_CHANNELS_LAST = 1 };

typedef struct ga_bn_options {
  size_t struct_size;
  ga_bn_mode mode;     /* default GA_BN_MICRO */
  ga_bn_layout layout; /* default GA_BN_CHANNELS_FIRST, Keras GA_BN_CHANNELS_LAST */
  ga_dtype dtype;      /* of x, y and their gradients; default GA_F32. Computed in f32, or in
                      f64 for GA_F64 */
  int32_t biased;  /* what the running variance averages: 0, torch: the sum of squared deviations
                      / (n - 1); 1, Keras: / n; n: elements of a channel in the window. With n = 1
                      the former is not known, and the running variance stays */
  double momentum; /* running += momentum (window's - running); [0, 1]; default 0.1, Keras 0.01,
                      which Keras itself calls 0.99 */
  double eps;      /* > 0; default 1e-5, Keras 1e-3 */
} ga_bn_options;

/* Fills options with the defaults of a flavor: GA_FLAVOR_TORCH or GA_FLAVOR_KERAS. */
GA_API ga_status ga_bn_options_init(ga_bn_options* out, size_t struct_size, ga_flavor flavor);

/* Adds a layer. Legal while the window is empty. name: not empty, unique among layers. channels:
   >= 1. gamma, beta: parameters of that many elements, in any group; -1: none, as with 1 and 0. Two
   layers may share them. options may be NULL: torch's. out may be NULL. The running mean begins
   with 0, the variance with 1. GA_ERROR_UNSUPPORTED: WINDOW or CUMULATIVE with
   GA_NONFINITE_DROP_MICRO: the micro-batches that stay were normalised with the one that is
   dropped. WINDOW with GA_CLIP_WHEN_MICRO: its two sweeps open micro-batches again. */
GA_API ga_status ga_bn_add(ga_context* ctx, const char* name, int64_t channels, ga_param gamma,
                           ga_param beta, const ga_bn_options* options, ga_bn* out);

/* Freezes a layer or unfreezes it. Frozen, it normalises by its running statistics, which do not
   move; ga_bn_accumulate, ga_bn_accumulate_stats and ga_bn_finalize check what they are given and
   do nothing; gamma and beta still get gradients (see ga_param_set_frozen). Legal while the window
   is empty. */
GA_API ga_status ga_bn_set_frozen(ga_context* ctx, ga_bn bn, int32_t frozen);

/* Takes the statistics of a micro-batch. In WINDOW mode this is the first sweep: each micro-batch
   once, in their order, before ga_bn_finalize. Else it is for programs that do not call
   ga_bn_forward, which does it itself. */
GA_API ga_status ga_bn_accumulate(ga_context* ctx, ga_bn bn, const void* x, int64_t samples,
                                  int64_t positions);

/* What the second array of ga_bn_accumulate_stats holds: the mean squared deviation from the mean,
   or the sum of the squared deviations. */
typedef int32_t ga_bn_spread;
enum { GA_BN_VARIANCE = 0, GA_BN_M2 = 1 };

/* The same from statistics that the program has. count: elements of each channel, >= 0. mean,
   spread: one number for each channel, of dtype, GA_F32 or GA_F64. kind: ga_bn_spread. A negative
   spread is GA_ERROR_INVALID_ARGUMENT; on a device it makes NaN. */
GA_API ga_status ga_bn_accumulate_stats(ga_context* ctx, ga_bn bn, int64_t count, const void* mean,
                                        const void* spread, ga_bn_spread kind, ga_dtype dtype);

/* Ends the first sweep of a layer in WINDOW mode. GA_ERROR_INVALID_STATE: nothing was accumulated,
   it is final already, or the layer is in another mode. */
GA_API ga_status ga_bn_finalize(ga_context* ctx, ga_bn bn);

/* Normalises x of a micro-batch to y. MICRO, CUMULATIVE: after taking the statistics of x, unless
   ga_bn_accumulate or ga_bn_accumulate_stats has brought this micro-batch's. WINDOW: after
   ga_bn_finalize; x must have as many elements as in the first sweep. */
GA_API ga_status ga_bn_forward(ga_context* ctx, ga_bn bn, const void* x, int64_t samples,
                               int64_t positions, void* y);

/* Sums over dy and x of the open micro-batch: the gradients of gamma and beta, which go to the
   window, and in WINDOW mode what the dx of all micro-batches needs: it is due for each of them,
   those of weight 0 included (dy is not read then), before any ga_bn_backward. In the other modes
   ga_bn_backward does it, unless it was called. */
GA_API ga_status ga_bn_backward_accumulate(ga_context* ctx, ga_bn bn, const void* x, const void* dy,
                                           int64_t samples, int64_t positions);

/* Writes dx of the open micro-batch. GA_ERROR_INVALID_STATE: the layer's last forward pass was that
   of another micro-batch, or of another shape; in WINDOW mode: sums of some micro-batch are due;
   with GA_NONFINITE_DROP_MICRO or GA_CLIP_WHEN_MICRO: the micro-batch has had its dx. */
GA_API ga_status ga_bn_backward(ga_context* ctx, ga_bn bn, const void* x, const void* dy,
                                int64_t samples, int64_t positions, void* dx);

/* Normalises by the running statistics, at any time. Nothing is counted. */
GA_API ga_status ga_bn_infer(ga_context* ctx, ga_bn bn, const void* x, int64_t samples,
                             int64_t positions, void* y);

/* The running statistics. mean, variance: one number for each channel, of dtype, GA_F32 or GA_F64
   (which loses nothing), in the host's memory also with a device. steps: how often they have moved,
   torch's num_batches_tracked. Each may be NULL. Waits. */
GA_API ga_status ga_bn_running(ga_context* ctx, ga_bn bn, void* out_mean, void* out_variance,
                               ga_dtype dtype, int64_t* out_steps);

/* Sets them. mean, variance: as above, finite, variance >= 0; steps >= 0. Legal while the window is
   empty and none of its statistics are taken. Waits. */
GA_API ga_status ga_bn_running_set(ga_context* ctx, ga_bn bn, const void* mean,
                                   const void* variance, ga_dtype dtype, int64_t steps);

/* The statistics that the layer normalises by now, with the biased variance, for programs with
   normalising loops of their own; arrays as in ga_bn_running. count: elements of a channel that
   they are of. GA_ERROR_INVALID_STATE: none were taken in this window, in WINDOW mode
   ga_bn_finalize is due, or the layer is frozen. Waits. */
GA_API ga_status ga_bn_statistics(ga_context* ctx, ga_bn bn, void* out_mean, void* out_variance,
                                  ga_dtype dtype, int64_t* out_count);

#ifdef __cplusplus
}
#endif

#endif /* GRADACCUM_GRADACCUM_H_ */
