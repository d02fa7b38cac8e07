/* libgradaccum: gradient accumulation and optimizer steps for programs that compute their own
 * gradients.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The library does everything between backward() and the next forward(): it adds up the gradients
 * of micro-batches, undoes the loss scale, checks for infinities and NaN, clips, and updates the
 * optimizer state, the parameters and the learning rate. The program keeps its tensors and hands
 * over pointers.
 *
 *   ga_context* ctx;
 *   ga_context_create(NULL, &ctx);
 *
 *   ga_optimizer adamw;                     1. A group: an optimizer and its hyper-parameters.
 *   ga_optimizer_init(&adamw, sizeof adamw, GA_OPTIMIZER_ADAMW, GA_FLAVOR_TORCH);
 *   adamw.lr = 3e-4;
 *   ga_group group;
 *   ga_group_add(ctx, &adamw, &group);
 *
 *   const int64_t shape[2] = {512, 784};    2. Its parameters: w and b are arrays of the program.
 *   ga_param_add(ctx, group, "fc1.weight", w, GA_F32, 2, shape, NULL, NULL);
 *   ga_param_add(ctx, group, "fc1.bias", b, GA_F32, 1, shape, NULL, NULL);
 *
 *   const void* gradients[2] = {dw, db};    3. Training: one gradient for each ga_param_add.
 *   for (each window) {
 *     for (each micro-batch of the window) {
 *       forward(); backward();              overwrites dw and db: means over the micro-batch
 *       ga_accumulate(ctx, gradients, 2, samples_in_this_micro_batch, NULL);
 *     }
 *     ga_step(ctx, NULL);                   updates w and b in place
 *   }
 *   ga_context_destroy(ctx);
 *
 * docs/install.md lists the systems that the library is built for.
 *
 * THE PROMISE. N micro-batches give what one batch of all their samples would have given, to
 * rounding.
 *
 * THE WINDOW. The micro-batches between two steps form a window:
 *
 *           ga_accumulate (1) ... ga_accumulate (K)            ga_step
 *   EMPTY ────────────────► OPEN ────────────────► OPEN / FULL ───────► EMPTY
 *     ▲                       └─────────── ga_discard ──────────────────►│
 *     └──────────────────────────────────────────────────────────────────┘
 *
 *   - The program ends a window, by calling ga_step. ga_step applies whatever the window holds, so
 *     a short last window of an epoch is divided by what it really holds. If K is set
 *     (ga_config.accum_steps), the window is FULL after K micro-batches and accepts no more.
 *   - Each micro-batch has a weight: its number of samples, or of tokens, or 1. ga_step divides the
 *     accumulated gradient by the sum of the weights, so micro-batches of different sizes average
 *     as they would have in one batch.
 *   - The first gradient of a parameter in a window overwrites what the previous window left.
 *     Nothing needs to be zeroed, and no NaN survives a window.
 *   - A step is applied or skipped. A window with an infinite or NaN gradient is skipped (unless
 *     configured otherwise): parameters and state keep every bit, and counters, schedules, bias
 *     corrections and weight decay do not move.
 *
 * CONVENTIONS in short; "Conventions in full" is at the end.
 *   Errors     Every function that can fail returns a ga_status: GA_OK, or a failure. A call that
 *              fails has changed nothing, and ga_last_error() returns the message. The library
 *              never prints, exits or lets an exception out.
 *   Pointers   Buffers are borrowed for the call, except the data of a parameter, which stays in
 *              use until ga_context_destroy. Pointers that the library returns stay its own.
 *   Tensors    Dense, row-major, at any address that is a multiple of the element size.
 *   Structs    An _init function fills a struct with defaults; then the program sets fields.
 *   Threads    One thread at a time uses a context, but see ga_params_ready. Different contexts are
 *              independent.
 *
 * examples/minimal.c is a complete program; cc minimal.c $(pkg-config --cflags --libs gradaccum)
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

/* ---- Status ---------------------------------------------------------------------------------- */

/* Functions below name only the statuses beyond the three that any of them may return:
   INVALID_ARGUMENT, INVALID_STATE and OUT_OF_MEMORY. */

/* How a call has ended. Treat an unknown status as a failure: later versions may add some. */
typedef int32_t ga_status;
enum {
  GA_OK = 0,                     /* the call has succeeded */
  GA_ERROR_INVALID_ARGUMENT = 1, /* an argument is not legal: missing, an unknown id, a number
                                    out of range, memory that is too small */
  GA_ERROR_INVALID_STATE = 2,    /* the call is not legal now */
  GA_ERROR_OUT_OF_MEMORY = 3,    /* there is not enough memory */
  GA_ERROR_UNSUPPORTED = 4,      /* not in this build, on this machine or with these options */
  GA_ERROR_NONFINITE = 5,        /* the window holds infinities or NaN, under GA_NONFINITE_FAIL */
  GA_ERROR_FAULT = 6,            /* failed half-way: the message says what is legal now */
  GA_ERROR_INTERNAL = 7,         /* a defect of the library: please report the message */
  GA_ERROR_WINDOW_FULL = 8,      /* the window holds K micro-batches: ga_step must be called next */
  GA_ERROR_IO = 9,               /* a file could not be read or written */
  GA_ERROR_FORMAT = 10,          /* a file or buffer is not a state of this library, or is
                                    damaged */
  GA_ERROR_COMMUNICATION = 11,   /* other ranks did not take part, failed, or differ from this
                                    one */
  GA_ERROR_CANCELLED = 12        /* a callback of the program asked to stop */
};

/* The message of this thread's last failed call, with the names and values involved, in UTF-8; "" if
   there was none. Belongs to the thread; valid until its next failed call. */
GA_API const char* ga_last_error(void);

/* "GA_ERROR_UNSUPPORTED" and so on; "unknown status" for any other number. Static. */
GA_API const char* ga_status_name(ga_status status);

/* ---- Create and destroy ---------------------------------------------------------------------- */

/* Everything below belongs to a context. */
typedef struct ga_context ga_context;

/* Options and results, defined further below. A first program passes NULL. */
typedef struct ga_config ga_config;
typedef struct ga_param_options ga_param_options;
typedef struct ga_micro_options ga_micro_options;
typedef struct ga_step_result ga_step_result;

/* Creates a context. config may be NULL. *out belongs to the caller, who ends it with
   ga_context_destroy. GA_ERROR_UNSUPPORTED: the device cannot be used; the message says why. */
GA_API ga_status ga_context_create(const ga_config* config, ga_context** out);

/* Frees what the context owns; parameters and gradients are the program's. NULL is legal. */
GA_API void ga_context_destroy(ga_context* ctx);

/* ---- A group and its optimizer --------------------------------------------------------------- */

/* The rule by which parameters are updated. docs/reference.md has the defaults, the fields that each
   optimizer reads, and the counterparts in PyTorch, Keras, timm and other programs. */
typedef int32_t ga_optimizer_kind;
enum {
  GA_OPTIMIZER_SGD = 0,              /* stochastic gradient descent; Nesterov: Sutskever et al.
                                        2013 */
  GA_OPTIMIZER_ADAM = 1,             /* Adam: Kingma & Ba 2015, algorithm 1; AMSGrad: Reddi et al.
                                        2018 */
  GA_OPTIMIZER_ADAMW = 2,            /* Adam with decoupled weight decay: Loshchilov & Hutter
                                        2019, algorithm 2 */
  GA_OPTIMIZER_EXTERNAL = 3,         /* the program's own, which reads ga_gradient */
  GA_OPTIMIZER_RMSPROP = 4,          /* RMSProp: Tieleman & Hinton 2012; centered: Graves 2013 */
  GA_OPTIMIZER_ADAGRAD = 5,          /* Adagrad: Duchi et al. 2011 */
  GA_OPTIMIZER_ADADELTA = 6,         /* Adadelta: Zeiler 2012 */
  GA_OPTIMIZER_ADAMAX = 7,           /* AdaMax: Kingma & Ba 2015, algorithm 2 */
  GA_OPTIMIZER_NADAM = 8,            /* NAdam: Dozat 2016 */
  GA_OPTIMIZER_RADAM = 9,            /* RAdam: Liu et al. 2020 */
  GA_OPTIMIZER_LION = 10,            /* Lion: Chen et al. 2023 */
  GA_OPTIMIZER_LAMB = 11,            /* LAMB: You et al. 2020, as in timm */
  GA_OPTIMIZER_LARS = 12,            /* LARS: You et al. 2017, as in timm */
  GA_OPTIMIZER_ADAFACTOR = 13,       /* Adafactor: Shazeer & Stern 2018, as torch.optim.Adafactor */
  GA_OPTIMIZER_MUON = 14,            /* Muon: Jordan et al. 2024, as torch.optim.Muon; for matrices,
                                        and what ga_param_options.cut_matrices cuts into some; needs
                                        cuBLAS on a device */
  GA_OPTIMIZER_ADOPT = 15,           /* ADOPT: Taniguchi et al. 2024, algorithm 2; step 1 moves
                                        nothing */
  GA_OPTIMIZER_ADEMAMIX = 16,        /* AdEMAMix: Pagliardini et al. 2024: ADAMW and a slow moving
                                        average */
  GA_OPTIMIZER_ROWWISE_ADAGRAD = 17, /* Adagrad by rows: FBGEMM's EXACT_ROWWISE_ADAGRAD, for
                                        embeddings: one sum of squares for each row */
  GA_OPTIMIZER_SCHEDULE_FREE_ADAMW = 18, /* Schedule-Free AdamW: Defazio et al. 2024; see "EMA" for
                                            the average, which is what to evaluate */
  GA_OPTIMIZER_SCHEDULE_FREE_SGD = 19    /* Schedule-Free SGD, by the same */
};

/* Whose definition, where frameworks differ. */
typedef int32_t ga_flavor;
enum {
  GA_FLAVOR_TORCH = 0, /* PyTorch's and timm's */
  GA_FLAVOR_KERAS = 1, /* Keras's */
  GA_FLAVOR_BERT = 2   /* ADAMW only: that of AdamWeightDecay in the BERT release */
};

/* The type of elements. */
typedef int32_t ga_dtype;
enum {
  GA_F32 = 1,  /* IEEE binary32 */
  GA_F64 = 2,  /* IEEE binary64 */
  GA_F16 = 3,  /* IEEE binary16, as 16 bits */
  GA_BF16 = 4, /* bfloat16: the upper half of an f32, as 16 bits */
  GA_I32 = 5,  /* integers of 32 bits, for indices */
  GA_I64 = 6,  /* integers of 64 bits, for indices */
  GA_U8 = 7,   /* bytes: codes of GA_STATE_8BIT */
  /* Only as ga_optimizer.state_dtype. Each block of 256 elements of a parameter (or fewer, see
     ga_rows and ga_param_set_part) has a scale in f32, the largest magnitude in the block, and an
     8-bit float for each element, as a fraction of the scale. Zero and the largest element are exact. An octave has eight codes, over 31.7 octaves
     where state is never negative and over 15.7 where it has a sign. A step rounds
     stochastically. */
  GA_STATE_8BIT = 16
};

/* MUON's factor of the learning rate for a matrix [R, C]. */
typedef int32_t ga_adjust_lr;
enum {
  GA_ADJUST_ORIGINAL = 0,  /* sqrt(max(1, R / C)) */
  GA_ADJUST_MATCH_RMS = 1, /* 0.2 sqrt(max(R, C)), which makes steps as large as ADAMW's */
  GA_ADJUST_NONE = 2       /* the factor is 1 */
};

/* What the factors of MUON's matrix products are rounded to. Products and sums are of f32. */
typedef int32_t ga_precision;
enum {
  GA_PRECISION_F32 = 0,  /* not at all */
  GA_PRECISION_TF32 = 1, /* 11 significant bits: on GPUs */
  GA_PRECISION_BF16 = 2  /* 8 significant bits: on GPUs, and on CPUs with AVX-512 BF16 or AMX */
};

/* The coefficients a, b, c of MUON's iterations, X <- a X + (b G + c G G) X with G = X X'.
   Iterations beyond the last row of a table use its last row. */
typedef int32_t ga_newton_schulz;
enum {
  GA_NS_OWN = 0,          /* those of ns_table, or without one ns_coefficients, which by default are
                             those of Jordan et al. 2024 */
  GA_NS_YOU = 1,          /* five rows by You Jiacheng, as in modded-nanogpt */
  GA_NS_POLAR_EXPRESS = 2 /* Polar Express, Amsel et al. 2025, arXiv 2505.16932: five rows for a
                             safety factor of 1.02, as in modded-nanogpt, where the norm of the
                             matrix is multiplied by it, too */
};

/* What MUON divides by its norm, at least eps, before a matrix is orthogonalized: MuonEq, Chang et
   al. 2026, arXiv 2603.28254. */
typedef int32_t ga_equilibrate;
enum {
  GA_EQUILIBRATE_NONE = 0,    /* the whole matrix alone */
  GA_EQUILIBRATE_OUTPUTS = 1, /* what belongs to an output: a row of [outputs, inputs] */
  GA_EQUILIBRATE_INPUTS = 2,  /* what belongs to an input */
  GA_EQUILIBRATE_BOTH = 3     /* each element by the norms of its output and of its input */
};

/* An optimizer and its hyper-parameters. Filled by ga_optimizer_init; then the program sets what is
   to be different. */
typedef struct ga_optimizer {
  size_t struct_size;
  ga_optimizer_kind kind;     /* the rule */
  ga_flavor flavor;           /* whose definition of it */
  double lr;                  /* learning rate, or its peak under a schedule; >= 0 */
  double weight_decay;        /* weight decay; >= 0 */
  double momentum;            /* SGD, RMSPROP, LARS, MUON; >= 0. SCHEDULE_FREE_SGD: the share of the
                                 average in the parameter; (0, 1) */
  double dampening;           /* SGD, LARS; [0, 1] */
  double beta1;               /* decay of the first moment: ADAM and its kin, LION; [0, 1).
                                 SCHEDULE_FREE_ADAMW: as momentum of SCHEDULE_FREE_SGD; (0, 1) */
  double beta2;               /* decay of the second moment, for LION of the momentum; [0, 1). MUON:
                                 of the mean square of each output's update, which divides it:
                                 NorMuon, Li et al. 2025, arXiv 2510.05491; default 0: no division */
  double eps;                 /* added to denominators; >= 0 */
  int32_t nesterov;           /* 0 or 1: SGD, LARS (momentum > 0, dampening 0), MUON */
  int32_t amsgrad;            /* 0 or 1: ADAM, ADAMW: the largest second moment so far in place
                                 of the current one */
  int32_t maximize;           /* 0 or 1: ascend; undone by a negative loss scale */
  ga_dtype state_dtype;       /* dtype of the state; default 0: f32, or f64 for f64 parameters; or
                                 GA_BF16, or GA_STATE_8BIT, with which these stay f32: the state of
                                 parameters of at most 4096 elements, both second moments of
                                 amsgrad, the slow average of ADEMAMIX, both averages of centered,
                                 and the variances of MUON's beta2 */
  double rho;                 /* RMSPROP (torch's alpha), ADADELTA; [0, 1) */
  double lr_decay;            /* ADAGRAD; >= 0 */
  double initial_accumulator; /* ADAGRAD, ROWWISE_ADAGRAD: initial sum of squares; >= 0 */
  double momentum_decay;      /* NADAM; >= 0 */
  double trust_coefficient;   /* LARS; > 0 */
  double max_grad_norm;       /* LAMB; >= 0; 0: no limit */
  double eps2;                /* ADAFACTOR; >= 0 */
  double beta2_decay;         /* ADAFACTOR; <= 0 */
  double clip_threshold;      /* ADAFACTOR; > 0 */
  double ns_coefficients[3];  /* MUON: a, b, c of a Newton-Schulz iteration */
  int32_t ns_steps;           /* MUON: iterations; 1 to 99 */
  ga_adjust_lr adjust_lr;     /* MUON: how the learning rate follows the shape of a matrix */
  int32_t centered;           /* 0 or 1: RMSPROP: divide by the standard deviation */
  int32_t decoupled;          /* 0 or 1: NADAM, RADAM, ADOPT: decoupled weight decay */
  int32_t always_adapt;       /* 0 or 1: LAMB, LARS: adapt also without weight decay */
  int32_t reserved;           /* 0 */
  double beta3;               /* ADEMAMIX: decay of the slow moving average; [0, 1) */
  double alpha;               /* ADEMAMIX: weight of the slow moving average; >= 0 */
  int64_t alpha_warmup;       /* ADEMAMIX: steps until alpha has grown from 0; >= 0 */
  int64_t beta3_warmup;       /* ADEMAMIX: steps until beta3 has grown from beta1; >= 0 */
  double clip_exponent;       /* ADOPT: step t clips to (t - 1)^clip_exponent; >= 0 */
  ga_precision ns_precision;  /* MUON: of the products of an iteration; default GA_PRECISION_F32 */
  int32_t reserved2;          /* 0 */
  const double* ns_table;     /* MUON: [ns_rows][3], a, b and c of each iteration; copied; default
                                 NULL: ns_coefficients every time */
  int32_t ns_rows;            /* MUON: rows of ns_table, at most 99 */
  ga_newton_schulz ns_preset; /* MUON: coefficients of the library's in place of one's own; default
                                 GA_NS_OWN */
  int32_t cautious;           /* 0 or 1: MUON: only elements that the step does not move away from
                                 zero decay: Chen et al. 2025, arXiv 2510.12402 */
  ga_equilibrate equilibrate; /* MUON: default GA_EQUILIBRATE_NONE */
  double average_power;       /* SCHEDULE_FREE: step t weighs t^average_power in the average, the
                                 package's r; >= 0; default 0 */
  double average_lr_power;    /* SCHEDULE_FREE: times the largest learning rate so far to this
                                 power, the package's weight_lr_power; >= 0; default 2 */
} ga_optimizer;

/* Fills *out with that framework's defaults for that optimizer. struct_size: sizeof(ga_optimizer).
   GA_ERROR_UNSUPPORTED: the optimizer has no such flavor. */
GA_API ga_status ga_optimizer_init(ga_optimizer* out, size_t struct_size, ga_optimizer_kind kind,
                                   ga_flavor flavor);

/* Ids count up from 0 in the order of the calls: they can index arrays of the program. */
typedef int32_t ga_group;
typedef int32_t ga_param;

/* Adds a group: parameters that share an optimizer. Legal while the window is empty. out: may be
   NULL. GA_ERROR_UNSUPPORTED: no such flavor, MUON on a device without cuBLAS, or an ns_precision
   for which the device has no products. */
GA_API ga_status ga_group_add(ga_context* ctx, const ga_optimizer* optimizer, ga_group* out);

/* ---- Parameters ------------------------------------------------------------------------------ */

/* Adds a parameter. Legal while the window is empty. name: UTF-8, not empty, unique in the context
   and not that of another one's state (see "State on disk"); copied. data: the tensor, read and
   written by ga_step; must not overlap another parameter; may be NULL if it has no elements.
   shape: [rank] dimensions >= 0, at most 64; may be NULL if rank is 0, a scalar. options, out: may
   be NULL. GA_ERROR_UNSUPPORTED: dtypes or options that do not go together, or not with the
   optimizer. */
GA_API ga_status ga_param_add(ga_context* ctx, ga_group group, const char* name, void* data,
                              ga_dtype dtype, int32_t rank, const int64_t* shape,
                              const ga_param_options* options, ga_param* out);

/* ---- Accumulate and step --------------------------------------------------------------------- */

/* Adds a micro-batch to the window. gradients: [count] pointers, one for each ga_param_add in the
   order of these calls; each gradient has the shape and the dtype of its parameter; NULL: none in
   this micro-batch. Gradients may overlap each other, but no parameter. weight: samples, tokens, or
   1; finite, >= 0. A micro-batch of weight 0 counts toward K, but none of its gradients is read.
   options may be NULL. GA_ERROR_WINDOW_FULL: ga_step must be called next. */
GA_API ga_status ga_accumulate(ga_context* ctx, const void* const* gradients, size_t count,
                               double weight, const ga_micro_options* options);

/* Ends the window: averages, checks and clips its gradient, and updates state and parameters in
   place. An empty window is legal and skipped. out: whether the step was applied, the gradient norm
   and more; may be NULL. GA_ERROR_INVALID_STATE: a micro-batch is open, or the window is
   invalid. GA_ERROR_NONFINITE: under GA_NONFINITE_FAIL; ga_discard must be called next. */
GA_API ga_status ga_step(ga_context* ctx, ga_step_result* out);

/* ==============================================================================================
 *  A first program needs no more. The rest is for looking up what a program needs:
 *
 *    Configuration           of a context: means or sums, non-finite gradients, precision, threads
 *    Windows                 their length and state, results of steps, options of a micro-batch
 *    Gradients by part       layer by layer, rows of embeddings, products, a kernel of your own
 *    Gradients that are kept when their memory may go
 *    Programs that add up    whose backward pass does gradient += ...
 *    Learning rate           schedules
 *    Clipping                by value, by norm, by unit
 *    Loss scale              for f16
 *    EMA                     moving averages of the parameters
 *    Parameters              options, flat blocks, queries, freezing, removing
 *    Groups                  new hyper-parameters, queries, an optimizer of your own
 *    Devices, Memory, Build
 *    Errors in detail
 *    Conventions in full     structs, memory, threads, fork(), rounding
 *
 *  in this file, and in parts of it, which it includes:
 *
 *    batchnorm.h             batch normalisation
 *    comm.h                  several ranks: one window over threads or processes
 *    state.h                 state by name, to carry over what an optimizer keeps; state on disk, to
 *                            stop a run and go on
 *
 *  "Between windows" marks a call that is legal only while the window is empty; others are legal at
 *  any time, and what they set holds from the next ga_step on. "Waits" marks a call that blocks
 *  until a device has done its work; on the CPU there is nothing to wait for. An out parameter that
 *  may be NULL is then not written. docs/reference.md has the tables.
 * ============================================================================================== */

#ifdef SWIG /* Setters of strings would leak; a binding that needs one brings its own by %extend. */
/* clang-format off */
%immutable ga_flat_entry::name;
%immutable ga_param_info::name;
%immutable ga_bn_info::name;
%immutable ga_state_info::name;
%immutable ga_state_options::note;
%immutable ga_build::compiler;
%immutable ga_build::cpu_loops;
/* clang-format on */
#endif

/* ---- Configuration --------------------------------------------------------------------------- */

/* Needed if gradients are sums, if a non-finite gradient should not just skip the step, if windows
   have a fixed length, for a static loss scale, a GPU, or threads and memory of the program's own.
   A context keeps its configuration, but K and the loss scale may be set anew. */

/* Where a context computes. */
typedef int32_t ga_device;
enum {
  GA_DEVICE_CPU = 0, /* on the processor; tensors are in the memory of the host */
  GA_DEVICE_CUDA = 1 /* on an NVIDIA GPU; tensors are addresses of its memory */
};

/* What gradients are. */
typedef int32_t ga_gradient_kind;
enum {
  GA_GRADIENT_MEAN = 0, /* means over their micro-batch, each then multiplied by its weight */
  GA_GRADIENT_SUM = 1   /* sums, taken as they are */
};

/* What the optimizer sees of a window. */
typedef int32_t ga_reduce;
enum {
  GA_REDUCE_MEAN = 0, /* the sum, divided by the sum of the weights */
  GA_REDUCE_SUM = 1,  /* the sum */
  GA_REDUCE_MAX = 2   /* the largest number that each element has had in the window; for single
                         parameters alone, see ga_param_options.reduce */
};

/* What happens to a parameter without a gradient in the window. */
typedef int32_t ga_missing;
enum {
  GA_MISSING_SKIP = 0, /* nothing */
  GA_MISSING_ZERO = 1  /* a step with a gradient of zero, in which momentum and weight decay
                          still move it */
};

/* What happens if a gradient is infinite or NaN. */
typedef int32_t ga_nonfinite;
enum {
  /* ga_step checks the accumulated gradients, skips the step (GA_STEP_SKIPPED_NONFINITE) and empties
     the window. */
  GA_NONFINITE_SKIP_STEP = 0,
  /* ga_step fails with GA_ERROR_NONFINITE, and the window is kept until ga_discard. */
  GA_NONFINITE_FAIL = 1,
  /* Every micro-batch is checked, in a pass of its own, before it is added. One that is not finite
     counts toward K with weight 0: the step is that of the others. If the sum overflows, ga_step
     skips the step.

     Gradients by part are then read in ga_micro_end: gradients, indices and values must stay in
     place until it returns. A backward hook that frees a gradient right after ga_accumulate_part
     would make the library read freed memory. */
  GA_NONFINITE_DROP_MICRO = 2,
  /* Nothing is checked; the step is made with what there is. */
  GA_NONFINITE_IGNORE = 3
};

/* How gradients add up in an accumulator. COMPENSATED and STOCHASTIC matter for 16-bit accumulators
   (ga_param_options.accumulator_dtype) alone; others then add up as in PLAIN. */
typedef int32_t ga_accumulation;
enum {
  GA_ACCUMULATE_PLAIN = 0,        /* A + g, rounded to the accumulator's dtype */
  GA_ACCUMULATE_RUNNING_MEAN = 1, /* A is the mean so far, so that no 16-bit accumulator
                                     overflows. Not more accurate. Needs GA_GRADIENT_MEAN and
                                     GA_REDUCE_MEAN */
  GA_ACCUMULATE_COMPENSATED = 2,  /* a pair: the sum and what its rounding lost. Twice the memory */
  GA_ACCUMULATE_STOCHASTIC = 3    /* rounded up or down at random, so that small terms are not
                                     lost on average. The same seed gives the same bits, with any
                                     number of threads */
};

/* How long the program leaves a gradient in place. */
typedef int32_t ga_gradient_life;
enum {
  /* The library has read it when the call returns. */
  GA_GRADIENTS_CONSUMED = 0,
  /* The buffer of a parameter's first gradient in a window stays unchanged until the call that
     brings the second one has returned, else until ga_step or ga_discard. The library reads it there
     in place of copying it: less traffic, the same bits. It never writes to it. The second gradient
     must not overlap the first. */
  GA_GRADIENTS_LIVE = 1,
  /* The buffer of a parameter's first gradient in a window is the library's from then on, until
     ga_step or ga_discard has returned: it becomes the accumulator, so that no other is written,
     and what is in it afterwards is undefined. The same bits. No other gradient of the window may
     overlap it. This holds on the CPU, for gradients of the accumulator's dtype; all others, and
     all gradients on a device or over ranks, are read as under GA_GRADIENTS_LIVE or before the call
     returns. GA_ERROR_UNSUPPORTED with GA_NONFINITE_DROP_MICRO, GA_CLIP_WHEN_MICRO,
     ga_param_options.rows, and 16-bit accumulators of GA_ACCUMULATE_COMPENSATED. */
  GA_GRADIENTS_LENT = 2
};

/* Runs task(data, i) for every i in [0, count), each exactly once, and returns when all are done.
   It may use any threads, the calling one included, and any order, but it must run every task (else
   GA_ERROR_FAULT), must not use the context (GA_ERROR_INVALID_STATE) and must not throw. It runs in
   the program's floating-point mode, and a task leaves that of its thread as it was. Small work is
   not passed to it. */
typedef void (*ga_task)(void* data, int64_t index);
typedef void (*ga_parallel_for)(void* user, int64_t count, ga_task task, void* data);

/* Returns memory where the context computes, at a multiple of 64 bytes, on a device for work on
   stream (ga_config.stream); NULL if there is none, which becomes GA_ERROR_OUT_OF_MEMORY. The
   memory need not be zeroed. Called on the thread that has called the library. */
typedef void* (*ga_allocate)(void* user, size_t bytes, ga_device device, void* stream);
/* Takes back what ga_allocate has returned. */
typedef void (*ga_free)(void* user, void* data, size_t bytes, ga_device device, void* stream);

/* Receives a line for each call that the context has taken up, when it ends:
   "gradaccum,cpu,ga_step,outcome:0 norm:1.5,GA_OK,0.042", with the milliseconds that the call took
   (not those of work on a device). The line has no newline and is valid for the call. Must not use
   the context. */
typedef void (*ga_log)(void* user, const char* line);

/* Tells that a parameter which ga_params_ready has named is up to date, whether or not the step was
   applied, and that its gradient is not read any more: once in a window that ga_step ends. If the
   parameter was updated in place, it is called by ga_params_ready, or by the call that begins the
   last micro-batch, or on a thread of the library with ga_config.eager_threads; else by ga_step.
   Must not use the context (GA_ERROR_INVALID_STATE). It must not throw. It runs in the program's
   floating-point mode, and leaves it as it was. */
typedef void (*ga_param_done)(void* user, ga_param param);

/* How a context works. */
struct ga_config {
  size_t struct_size;
  ga_device device;               /* where the context computes; default GA_DEVICE_CPU */
  int32_t num_threads;            /* threads of the CPU kernels, up to 4096; default 0: as many
                                     as OpenMP would use: what OMP_NUM_THREADS says, or one for
                                     each processor that the thread may run on. Small work stays
                                     on the calling thread */
  int64_t accum_steps;            /* K, micro-batches of a full window; default 0: any number */
  ga_gradient_kind gradient_kind; /* what gradients are; default GA_GRADIENT_MEAN */
  ga_reduce reduce;               /* what the optimizer sees; default GA_REDUCE_MEAN; or
                                     GA_REDUCE_SUM */
  ga_missing missing;             /* what happens without a gradient; default GA_MISSING_SKIP */
  ga_nonfinite nonfinite;         /* what happens with infinities and NaN; default
                                     GA_NONFINITE_SKIP_STEP */
  ga_gradient_life gradient_life; /* how long gradients stay in place; default
                                     GA_GRADIENTS_CONSUMED */
  ga_accumulation accumulation;   /* how gradients add up; default GA_ACCUMULATE_PLAIN */
  double loss_scale;              /* what the loss was multiplied by, divided out again; finite,
                                     not 0; negative for gradients that are stored negated;
                                     default 1 */
  ga_parallel_for parallel_for;   /* the program's threads; default NULL: OpenMP's, or the
                                     library's own in a build without OpenMP. num_threads then
                                     only says into how many pieces a matrix product is cut */
  void* parallel_for_user;        /* passed to parallel_for */
  uint64_t seed;                  /* seed of stochastic rounding; default 0 */
  int32_t noise_scale;            /* 0 or 1: whether the gradient noise scale is estimated, see
                                     ga_step_result.noise_scale; default 0 */
  int32_t measure_norm;           /* 0 or 1: whether every ga_step_result has the norm; default 0:
                                     not where that would take an extra pass, see
                                     docs/reference.md */
  double noise_smoothing;         /* smoothing of the noise scale over steps; [0, 1); default 0.9 */
  int32_t device_ordinal;         /* which device of that kind; default 0 */
  int32_t reserved2;              /* 0 */
  void* stream;                   /* the cudaStream_t that all work is queued on, which must
                                     outlive the context, unless ga_context_set_stream replaces
                                     it; default NULL: the legacy default stream; not
                                     cudaStreamPerThread, which is another in each thread */
  ga_allocate allocate;           /* for accumulators, optimizer state, master weights, EMA and
                                     whatever else the library keeps on a device; its tables and
                                     lists in host memory stay its own. GA_GRADIENTS_LIVE then
                                     saves traffic, but no memory. Default NULL: the library's */
  ga_free free;                   /* set if and only if allocate is set */
  void* allocator_user;           /* passed to allocate and free */
  ga_log log;                     /* default NULL: none, or lines to stderr if the environment
                                     has GA_VERBOSE=1 when the context is created */
  void* log_user;                 /* passed to log */
  int32_t eager;                  /* 0 or 1: whether ga_params_ready begins the update, in place of
                                     ga_step; see ga_params_ready. On the CPU; default 0 */
  int32_t eager_threads;          /* threads of the library that do this while the program goes
                                     on, up to 4096; they run on the processors that the thread
                                     which creates the context may use. Default 0:
                                     ga_params_ready does it */
  int64_t eager_bytes;            /* most bytes for the shadow arrays that this may take;
                                     default 0: as many as it takes */
  ga_param_done on_param_done;    /* default NULL: none */
  void* on_param_done_user;       /* passed to on_param_done */
};

/* Writes the defaults. struct_size, here and in every _init function: the sizeof of the struct. */
GA_API ga_status ga_config_init(ga_config* out, size_t struct_size);

/* ---- Windows --------------------------------------------------------------------------------- */

/* Needed to let the library count micro-batches, to vary their number, to drop a window, or to see
   what a step did: whether it was applied, with what norm, clip factor and learning rate. */

/* Sets K of the windows to come, as ga_config.accum_steps. Between windows, and only without a
   schedule of K. accum_steps: micro-batches of a full window; 0: any number. */
GA_API ga_status ga_context_set_accum_steps(ga_context* ctx, int64_t accum_steps);

/* Makes K a function of applied steps: from applied step from_steps[i] on, K is accum_steps[i] (0:
   any number). from_steps: [count], ascending, the first 0. accum_steps: [count]. Both are copied.
   count 0 removes the schedule. Between windows. On a device, the call that opens a window
   waits. */
GA_API ga_status ga_context_set_accum_schedule(ga_context* ctx, const int64_t* from_steps,
                                               const int64_t* accum_steps, size_t count);

/* Flags of a micro-batch. */
enum { GA_MICRO_LAST = 1 /* it ends the window, which then is FULL whatever K is */ };

/* Options of a micro-batch. */
struct ga_micro_options {
  size_t struct_size;
  double loss_scale; /* what its loss was multiplied by; finite; 0, the default: the loss
                        scaler's scale if there is one (see ga_context_set_loss_scaler), else
                        ga_config.loss_scale. NULL options mean the same */
  uint32_t flags;    /* GA_MICRO_LAST; default 0 */
  int32_t reserved;  /* 0 */
};

/* Writes the defaults. */
GA_API ga_status ga_micro_options_init(ga_micro_options* out, size_t struct_size);

/* The state of the window. */
typedef int32_t ga_window_state;
enum {
  GA_WINDOW_EMPTY = 0,  /* there is no micro-batch */
  GA_WINDOW_OPEN = 1,   /* there are micro-batches, and room for more */
  GA_WINDOW_FULL = 2,   /* there are K micro-batches: ga_step must be called next */
  GA_WINDOW_INVALID = 3 /* accumulating failed half-way: ga_discard must be called next */
};

/* The window: its state and what it holds. */
typedef struct ga_window_info {
  size_t struct_size;
  ga_window_state state; /* whether there is room for a micro-batch */
  int32_t reserved;
  int64_t micro_batches; /* micro-batches of this window, the open one included */
  int64_t open_micro;    /* index of the open micro-batch; -1: none is open */
  int64_t accum_steps;   /* K of this window; 0: any number */
  double weight;         /* sum of the weights so far; on a device, dropped micro-batches count */
  int64_t windows;       /* calls of ga_step that succeeded, since the context was created */
  int64_t steps;         /* applied steps: of these calls, unless ga_context_set_steps has set
                            it; on a device, as far as results are known */
} ga_window_info;

/* Prepares *out to be filled, as every _init function of a result does: zeros, and struct_size. */
GA_API ga_status ga_window_info_init(ga_window_info* out, size_t struct_size);

/* *out: the state of the window, and what it holds. Waits if a window under a schedule of K is
   about to open. */
GA_API ga_status ga_window(const ga_context* ctx, ga_window_info* out);

/* Drops the window, an open micro-batch included. Parameters, state and counters stay as they are;
   only a loss scaler moves, if ga_step has returned GA_ERROR_NONFINITE for this window. */
GA_API ga_status ga_discard(ga_context* ctx);

/* Whether a step was applied, or why not. */
typedef int32_t ga_step_outcome;
enum {
  GA_STEP_APPLIED = 0,           /* parameters and state were updated */
  GA_STEP_SKIPPED_EMPTY = 1,     /* no micro-batch, or the sum of the weights is 0 */
  GA_STEP_SKIPPED_NONFINITE = 2, /* an accumulated gradient is infinite or NaN */
  GA_STEP_SKIPPED_ERROR = 3,     /* on a device: indices of ga_accumulate_rows were out of range,
                                    and the rows of that call were left out; or ranks have
                                    different settings, or have ended different passes of batch
                                    normalisation, see ga_context_set_comm */
  GA_STEP_PENDING = 4,           /* on a device: not known yet, see ga_step_result_get */
  GA_STEP_SKIPPED_WEIGHT = 5,    /* the sum of the weights is too small or too large to divide
                                    by, see docs/reference.md. Does not move a loss scaler by
                                    itself */
  GA_STEP_SKIPPED_DISCARD = 6    /* another rank has discarded the window, and so has this call; it
                                    is counted over NCCL only; see ga_context_set_comm */
};

/* What a step did. */
struct ga_step_result {
  size_t struct_size;
  ga_step_outcome outcome; /* whether the step was applied, or why not */
  int32_t reserved;
  int64_t windows;         /* windows so far, as in ga_window_info, this one included */
  int64_t steps;           /* applied steps, as in ga_window_info, this one included if applied */
  int64_t micro_batches;   /* micro-batches of this window */
  double weight;           /* sum of the weights of this window */
  double norm;             /* 2-norm of the whole reduced gradient before clipping (after it, with
                              GA_CLIP_WHEN_MICRO). NaN or infinite if the step was skipped for that,
                              0 if it was skipped as empty or for its weight. NaN if nothing
                              measured it: see ga_config.measure_norm. Its relative error is less
                              than 1e-6, usually 1e-8, 3e-7 where all elements are alike; where all
                              is in float64, 4e-12 */
  double clip_factor;      /* the least factor of a clip by norm on the reduced gradient; else 1 */
  double lr;               /* learning rate of group 0 in this step; 0 if skipped */
  double loss_scale;       /* what ga_loss_scale returned in this window */
  int64_t skipped;         /* windows that were not applied, since the context was created */
  int64_t dropped;         /* micro-batches that DROP_MICRO dropped, since the context was
                              created */
  int64_t window_dropped;  /* micro-batches that it dropped in this window */
  double noise_scale;      /* with ga_config.noise_scale: tr(S) / |G|^2, the simple noise scale
                              of McCandlish et al. 2018 (appendix A.1), in units of the weight.
                              Windows of much less weight waste steps, of much more, samples. NaN
                              before the first estimate; windows without one: see
                              docs/reference.md */
  double noise_trace;      /* tr(S): the variance of one sample's gradient */
  double noise_signal;     /* |G|^2: the squared norm of the gradient of the whole data. All
                              three are smoothed */
  uint64_t dropped_micros; /* bit i: micro-batch i of this window was dropped; i < 64 */
  int64_t eager;           /* with ga_config.eager: parameters that were updated before ga_step;
                              like the next two, of this rank alone */
  int64_t eager_waited;    /* those that waited for ga_step because there was no memory for their
                              shadow arrays */
  int64_t eager_redone;    /* of eager, those that ga_step updated once more, since the step was
                              clipped or an option has changed */
};

/* Prepares *out to be filled. */
GA_API ga_status ga_step_result_init(ga_step_result* out, size_t struct_size);

/* The result of a window: of the one with this number in ga_step_result.windows, or 0: of the last
   one, replays of a CUDA graph included. wait: 1: waits; 0: the outcome may be GA_STEP_PENDING, on
   a device also of a window that is still to come. The last 64 results are kept.
   GA_ERROR_INVALID_ARGUMENT: there is no such result, or not any more. */
GA_API ga_status ga_step_result_get(ga_context* ctx, int64_t window, int32_t wait,
                                    ga_step_result* out);

/* ---- Gradients by part ----------------------------------------------------------------------- */

/* Needed if gradients do not all exist at once: a backward pass that hands over layer by layer and
   frees as it goes, an embedding that has a gradient for some rows only, a weight gradient that is
   better never written out, a kernel that can add into the accumulator.

     ga_micro_begin(ctx, -1, weight, NULL);
     ga_accumulate_part(ctx, w2, dw2);        in any order; several for one parameter add up
     ga_accumulate_part(ctx, w1, dw1);        (tied weights)
     ga_micro_end(ctx);

   A contribution that fails has added nothing and leaves its micro-batch open: repeat it, go on
   without it, or, if nothing was added before, drop the micro-batch with ga_micro_abort. (After
   GA_ERROR_FAULT only ga_discard is legal.) Contributions to a frozen parameter or in a micro-batch
   of weight 0 are not read.

   Gradients are read when the call returns, but under GA_NONFINITE_DROP_MICRO and
   GA_CLIP_WHEN_MICRO in ga_micro_end, and under GA_GRADIENTS_LIVE as said there. docs/reference.md
   has a table of what cannot be combined; such a call is GA_ERROR_UNSUPPORTED. */

/* Opens micro-batch number index of the window (0, 1, 2, ...; -1: the next one), or opens it again:
   until ga_step, micro-batches may be filled in turns, each with the weight and the loss scale of
   its first opening. GA_MICRO_LAST is legal for the newest one only. weight, options: as in
   ga_accumulate. GA_ERROR_WINDOW_FULL: the window has no room for a new micro-batch. */
GA_API ga_status ga_micro_begin(ga_context* ctx, int64_t index, double weight,
                                const ga_micro_options* options);

/* Adds a gradient [the parameter's shape] to one parameter. With ga_config.eager, several threads may
   do so at once for different parameters: see ga_params_ready. */
GA_API ga_status ga_accumulate_part(ga_context* ctx, ga_param param, const void* gradient);

/* Adds a gradient that has only some rows: values[i] to row indices[i] of the parameter, a row
   being what shape[0] counts. indices: [count], of index_dtype, GA_I32 or GA_I64, in [0, shape[0]),
   in any order; repeated ones add up. values: [count rows], of the parameter's gradient dtype; what
   a whole gradient would hold in these rows, so with GA_GRADIENT_MEAN parts of the mean over the
   micro-batch, not means over the occurrences of a row. Needs ga_param_options.rows. Costs what its
   rows cost; so does ga_step with GA_ROWS_LAZY, but for EMA, GA_CLIP_AGC, and max_value before a
   norm, which pass over the whole parameter. A parameter may receive rows and whole gradients in
   one window and one micro-batch (tied embeddings): that step then updates all its rows, also with
   GA_ROWS_LAZY. */
GA_API ga_status ga_accumulate_rows(ga_context* ctx, ga_param param, const void* indices,
                                    ga_dtype index_dtype, int64_t count, const void* values);

/* Whether a matrix is used as stored or transposed. */
typedef int32_t ga_transpose;
enum {
  GA_NO_TRANSPOSE = 0, /* as stored */
  GA_TRANSPOSE = 1     /* transposed */
};

/* Adds the matrix product A B to one parameter: the weight gradient of a dense layer, which then is
   never in memory as a whole. The parameter is taken as a matrix [m = shape[0], n = the rest].
   A: [m, k], B: [k, n], both after transposition; lda, ldb: elements from row to row as stored.
   dtype: of A and B, GA_F32, GA_F16 or GA_BF16; the accumulator must be f32. A and B must not
   overlap a parameter. For y = x W^T with W [out, in], x [batch, in], dy [batch, out], the gradient
   is dy^T x:
     ga_accumulate_matmul(ctx, W, batch, dy, out, GA_TRANSPOSE, x, in, GA_NO_TRANSPOSE, GA_F32)
   Sums are in f32, in the order of the GEMM library, which depends on threads and processor:
   oneDNN, or cuBLAS on a device. Where there is no libgradaccum_onednn.so, products are the
   library's own, whose sums do not depend on threads. GA_ERROR_UNSUPPORTED: that file is there, but
   oneDNN could not be loaded; cuBLAS could not be loaded; or the program has loaded another major
   version of oneDNN. Everything else keeps working. GA_ERROR_FAULT: the GEMM library failed
   half-way. */
GA_API ga_status ga_accumulate_matmul(ga_context* ctx, ga_param param, int64_t k, const void* a,
                                      int64_t lda, ga_transpose transpose_a, const void* b,
                                      int64_t ldb, ga_transpose transpose_b, ga_dtype dtype);

/* Where a kernel of the program writes a gradient: alpha * gradient + beta * data. With beta 0, a
   kernel that can only do += zeroes data first. */
typedef struct ga_accumulator {
  size_t struct_size;
  void* data;     /* NULL: write nothing (weight 0, or the parameter is frozen) */
  ga_dtype dtype; /* the type of the elements of the accumulator */
  int32_t reserved;
  int64_t rows;              /* the first dimension of the parameter */
  int64_t columns;           /* the product of the parameter's other dimensions */
  int64_t leading_dimension; /* elements from row to row: the number of columns */
  double alpha; /* the factor of the gradient: weight / loss scale, or 1 / loss scale for
                   GA_GRADIENT_SUM */
  double beta;  /* the factor of what is there: 0 for the first contribution in a window, when
                   nothing may be read, else 1 */
} ga_accumulator;

/* Prepares *out to be filled. */
GA_API ga_status ga_accumulator_init(ga_accumulator* out, size_t struct_size);

/* Hands out a parameter's accumulator, whose every element is then to be written.
   ga_accumulator_release makes that part of the micro-batch; until then no other call for this
   parameter is legal, nor ga_micro_end. out->data is the same address in every window until
   ga_context_destroy. On a device, waits under a loss scaler. */
GA_API ga_status ga_accumulator_acquire(ga_context* ctx, ga_param param, ga_accumulator* out);
GA_API ga_status ga_accumulator_release(ga_context* ctx, ga_param param);

/* Closes the open micro-batch. */
GA_API ga_status ga_micro_end(ga_context* ctx);

/* Drops the open micro-batch as if it had never been opened, as long as nothing of it is in an
   accumulator: before its first contribution; under GA_GRADIENTS_LIVE, GA_NONFINITE_DROP_MICRO and
   GA_CLIP_WHEN_MICRO also later, while its gradients are only noted. Statistics that ga_bn_forward
   took of it go with it. GA_ERROR_INVALID_STATE: something has been added, an accumulator was
   acquired, the micro-batch was opened before, or a pass in WINDOW mode has its statistics; ga_discard
   drops the window. */
GA_API ga_status ga_micro_abort(ga_context* ctx);

/* Tells the library that no more gradients come to these parameters in this window; contributions
   to them are GA_ERROR_INVALID_STATE until it has ended, but for those that are ignored anyway
   (weight 0, frozen). A second call does nothing. params: [count] ids; may be NULL if count is 0.
   Parameters and results of ga_step are the same as without this call, bit for bit.

   With ga_config.eager their update begins here, while the rest of backward has yet to run: as soon
   as the last micro-batch has begun (GA_MICRO_LAST, or the K-th). The call returns when they are
   updated, or with ga_config.eager_threads at once.
   - Under GA_NONFINITE_IGNORE, with neither GA_CLIP_GLOBAL nor LAMB's max_grad_norm, a parameter is
     updated in place. Its gradient may go when the call returns, or with ga_config.eager_threads
     when ga_config.on_param_done comes. From then on until ga_step, ga_discard and functions that
     set options or read or save state are GA_ERROR_INVALID_STATE, and after GA_ERROR_FAULT the
     context cannot be used any more.
   - Else ga_step decides. The update reads parameter and state, and writes shadow arrays, one
     for each of these (ga_memory.eager), which ga_step takes, drops if it skips the window, or writes again if
     it clips by the norm or options have changed (ga_step_result.eager_redone). Gradients that live
     must do so until ga_step.
   Several threads may then be in ga_accumulate_part and ga_params_ready at once, for different
   parameters; no other function may overlap with them. With a communicator and
   ga_comm_options.overlap, the exchange of gradients begins here, and an update when the sum over the
   ranks is there, never in place. docs/eager.md has what waits for ga_step, what threads share, and
   how it goes on several ranks.

   GA_ERROR_INVALID_STATE: the window is invalid, the accumulator of one of the parameters is
   acquired, or another thread adds to one of them.
   GA_ERROR_FAULT: an update in place stopped half-way (ga_step repeats any other); or on_param_done
   threw an exception. */
GA_API ga_status ga_params_ready(ga_context* ctx, const ga_param* params, size_t count);

/* ---- Gradients that are kept ----------------------------------------------------------------- */

/* Needed by a program that frees gradients, or uses their memory again, as soon as it may: the
   library tells which of them it may still read, whatever the options are.

   Gradients have numbers: 1, 2, 3, ... in the order in which they come. Each pointer of
   ga_accumulate has one, NULL too; so has each gradient by part, with its indices or as a product
   of two matrices. A program keeps number and memory in a queue, and frees what has a lower number
   than `oldest`. To find out which of the later ones may go before that one, it asks again, from
   the next number on. */
typedef struct ga_kept_info {
  size_t struct_size;
  int64_t latest; /* of the gradient that came last; pointer i of a ga_accumulate just made has the
                     number latest - count + 1 + i */
  int64_t oldest; /* the lowest number, not below `since`, of a gradient that a later call may read;
                     latest + 1: there is none */
  int64_t queued; /* on a device: as oldest, but also of a gradient that queued work may still read,
                     for a program that does not free memory in the order of the stream. Asks
                     without a wait, so it lags behind. What a CUDA graph reads again is not counted */
  int32_t until_micro_end; /* 1: ga_micro_end reads gradients by part; clips decide this too */
  int32_t reserved;
} ga_kept_info;

/* Prepares *out to be filled. */
GA_API ga_status ga_kept_info_init(ga_kept_info* out, size_t struct_size);

/* since: the lowest number to look at, >= 0; 0: all. */
GA_API ga_status ga_gradients_kept(const ga_context* ctx, int64_t since, ga_kept_info* out);

/* ---- Programs that add up themselves --------------------------------------------------------- */

/* A backward pass that does gradient += ... (llm.c, darknet, ggml) has three ways:

   - Over the whole window, in its own buffers, with GA_GRADIENT_SUM and GA_GRADIENTS_LIVE. The
     library then makes no pass over gradients before ga_step, and on the CPU takes no memory for
     accumulators. Every micro-batch but the last is only counted: ga_micro_begin(ctx, -1, weight,
     NULL) and ga_micro_end, with nothing between. ga_accumulate brings the buffers with the last
     one, and the program zeroes them after ga_step. Gradients are sums over the samples (or tokens)
     that the weights count; if each micro-batch adds a mean, use the weight 1 and equal sizes.
   - Into the library's accumulators: ga_accumulator_acquire. Each keeps its address.
   - Into buffers that are zeroed before each micro-batch, with ga_accumulate for each. Only so do
     GA_NONFINITE_DROP_MICRO and GA_CLIP_WHEN_MICRO see single micro-batches. */

/* ---- Learning rate --------------------------------------------------------------------------- */

/* Needed if the learning rate follows a schedule. Setting it by hand before a step is as good:
   ga_group_set_lr. */

/* The learning rate as a function of the context's applied steps. With s: steps since
   first_step, 0 up to that one; W = warmup_steps, T = total_steps; x = (s - W) / (T - W), clamped
   to [0, 1]; end = end_factor lr. While s < W, all kinds but TABLE and BERT warm up: lr (s + 1) / W;
   from then on: */
typedef int32_t ga_schedule_kind;
enum {
  GA_SCHEDULE_CONSTANT = 0,     /* constant: lr */
  GA_SCHEDULE_LINEAR = 1,       /* linear decay: end + (lr - end) (1 - x) */
  GA_SCHEDULE_COSINE = 2,       /* half a cosine: end + (lr - end) (1 + cos(pi x)) / 2 */
  GA_SCHEDULE_POLYNOMIAL = 3,   /* a power of linear decay: end + (lr - end) (1 - x)^power */
  GA_SCHEDULE_INVERSE_SQRT = 4, /* the inverse root: lr sqrt(c / (c + s - W)), c = max(W, 1) */
  GA_SCHEDULE_STEP = 5,         /* by gamma every step_size steps: lr gamma^floor((s - W) /
                                   step_size) */
  GA_SCHEDULE_EXPONENTIAL = 6,  /* by gamma every step: lr gamma^(s - W) */
  GA_SCHEDULE_TABLE = 7,        /* read from a table: table[s]; beyond its end the last value */
  GA_SCHEDULE_BERT = 8          /* as the BERT release: lr s / W for s < W, the first being 0,
                                   else lr (1 - min(s, T) / T) */
};

/* A schedule of the learning rate. */
typedef struct ga_schedule {
  size_t struct_size;
  ga_schedule_kind kind; /* the formula */
  int32_t reserved;      /* 0 */
  int64_t warmup_steps;  /* W, the steps of the warm-up; >= 0; default 0 */
  int64_t total_steps;   /* T, warm-up included; LINEAR, COSINE, POLYNOMIAL: > W; BERT: >= max(W,
                            1); else not read */
  double end_factor;     /* the last learning rate, as a factor of lr; >= 0; default 0 */
  double power;          /* POLYNOMIAL; >= 0; default 1 */
  double gamma;          /* STEP, EXPONENTIAL: the factor; >= 0; default 0.1 for STEP, 1 for
                            EXPONENTIAL */
  int64_t step_size;     /* STEP: after how many steps gamma is multiplied in; > 0 */
  const double* table;   /* TABLE: [table_size] learning rates, finite, >= 0; copied */
  int64_t table_size;    /* TABLE; > 0 */
  int64_t first_step;    /* applied steps before the schedule begins: ga_window_info.steps, for a
                            group that is added later; >= 0; default 0 */
} ga_schedule;

/* Writes the defaults of a kind. */
GA_API ga_status ga_schedule_init(ga_schedule* out, size_t struct_size, ga_schedule_kind kind);

/* Sets the schedule of the group's learning rate. schedule: how the learning rate moves; copied;
   NULL removes the schedule of the learning rate. */
GA_API ga_status ga_group_set_schedule(ga_context* ctx, ga_group group,
                                       const ga_schedule* schedule);

/* Sets the learning rate, or its peak under a schedule. lr: finite, >= 0. */
GA_API ga_status ga_group_set_lr(ga_context* ctx, ga_group group, double lr);

/* *out: the learning rate of the next applied step. Waits. */
GA_API ga_status ga_group_lr(const ga_context* ctx, ga_group group, double* out);

/* *out: the learning rate of the last applied step; 0 before the first. Waits. */
GA_API ga_status ga_group_last_lr(const ga_context* ctx, ga_group group, double* out);

/* Sets the number of applied steps, for a run that goes on from elsewhere: schedules, EMA and
   optimizers that count the context's steps go on from there, as if these steps had been made with
   the current hyper-parameters. Counts of a single parameter are state: ga_state_set. The number of
   windows, by which GA_ACCUMULATE_STOCHASTIC rounds, stays. Between windows. Waits. steps: >= 0. */
GA_API ga_status ga_context_set_steps(ga_context* ctx, int64_t steps);

/* ---- Clipping -------------------------------------------------------------------------------- */

/* Needed against exploding gradients. Clips the reduced gradient (unscaled and averaged), as the
   one large batch would have been clipped: first by value, then by norm.

     ga_clip clip;
     ga_clip_init(&clip, sizeof clip);
     clip.scope = GA_CLIP_GLOBAL;
     clip.max_norm = 1;
     ga_context_set_clip(ctx, &clip); */

/* Whose norm a gradient is clipped by. */
typedef int32_t ga_clip_scope;
enum {
  GA_CLIP_NONE = 0,       /* none: only max_value counts */
  GA_CLIP_GLOBAL = 1,     /* by one norm over all parameters of the groups without a clip of
                             their own; in ga_group_set_clip, over those of the group */
  GA_CLIP_PER_TENSOR = 2, /* each parameter by its own norm */
  GA_CLIP_AGC = 3         /* adaptive gradient clipping (Brock et al. 2021): each unit of a
                             parameter, a filter or a neuron, by its norm against the
                             parameter's: with M = agc_factor max(|p|, agc_eps), g <- g M /
                             max(|g|, 1e-6) where |g| > M. Costs a pass, see docs/reference.md */
};

/* Which axes a unit of GA_CLIP_AGC spans; docs/reference.md has the table by rank.
   ga_param_options.agc_axes overrides this for one parameter. */
typedef int32_t ga_agc_units;
enum {
  GA_AGC_TF = 0,     /* for weights [in, out] and [height, width, in, out] */
  GA_AGC_NFNETS = 1, /* for the same weights, as the NFNets release has it */
  GA_AGC_TORCH = 2   /* for weights [out, in] and [out, in, height, width] */
};

/* What is clipped. */
typedef int32_t ga_clip_when;
enum {
  GA_CLIP_WHEN_STEP = 0, /* the reduced gradient, as that of the one large batch */
  GA_CLIP_WHEN_MICRO = 1 /* the gradient of every micro-batch, unscaled, before it is added, as
                            some wrappers do. Gradients are then read twice, and gradients by
                            part in ga_micro_end: as under GA_NONFINITE_DROP_MICRO, they must
                            stay in place until it returns */
};

/* How gradients are clipped: first by value, then by norm. */
typedef struct ga_clip {
  size_t struct_size;
  ga_clip_scope scope;    /* which gradients share a norm; default GA_CLIP_NONE */
  ga_flavor flavor;       /* the factor, for norm n and max_norm C. GA_FLAVOR_TORCH, the default:
                             min(1, C / (n + 1e-6)); GA_FLAVOR_KERAS, TensorFlow's: C / max(n, C) */
  double max_norm;        /* C >= 0; must be set for GA_CLIP_GLOBAL and GA_CLIP_PER_TENSOR:
                             default -1, which these refuse */
  double max_value;       /* clamps elements to [-max_value, max_value]; > 0; default infinity */
  double agc_factor;      /* AGC: the factor; > 0; default 0.01 */
  double agc_eps;         /* AGC: the least norm of a parameter; > 0; default 1e-3 */
  ga_agc_units agc_units; /* AGC: which axes a unit spans; default GA_AGC_TF */
  ga_clip_when when;      /* what is clipped; default GA_CLIP_WHEN_STEP */
} ga_clip;

/* Writes the defaults. */
GA_API ga_status ga_clip_init(ga_clip* out, size_t struct_size);

/* Clips the gradients of all groups without a clip of their own. Between windows if the clip is or
   becomes GA_CLIP_WHEN_MICRO. clip: NULL clips no more, but groups with a clip of their own.
   GA_ERROR_UNSUPPORTED: GA_AGC_NFNETS and a parameter of rank 5 or more without
   ga_param_options.agc_axes; GA_CLIP_WHEN_MICRO and a batch-normalisation layer in WINDOW mode;
   under GA_SHARD_OPTIMIZER, once the library has made its arrays, a GA_CLIP_AGC that comes, goes or
   has other units, where the state of some parameter would then lie on other ranks. */
GA_API ga_status ga_context_set_clip(ga_context* ctx, const ga_clip* clip);

/* Gives the group a clip of its own, with its own norm, in place of the context's. Otherwise as
   ga_context_set_clip. clip: NULL clips the group as the context says. */
GA_API ga_status ga_group_set_clip(ga_context* ctx, ga_group group, const ga_clip* clip);

/* *out: the clip of the context, as it was set or loaded; the defaults if it has none. */
GA_API ga_status ga_context_clip(const ga_context* ctx, ga_clip* out);

/* *out: what the group is clipped by: a clip of its own, or the context's. */
GA_API ga_status ga_group_clip(const ga_context* ctx, ga_group group, ga_clip* out);

/* ---- Loss scale ------------------------------------------------------------------------------ */

/* Needed for f16, whose small gradients would vanish (bf16 has the range of f32). The program
   multiplies the loss of every micro-batch by ga_loss_scale, which a loss scaler keeps in f32, and
   the library divides that out again.

   The scale follows the gradients (Micikevicius et al. 2018, with the rule of PyTorch's
   GradScaler). It moves in ga_step only, so one scale holds for a whole window. A step that is
   skipped for a non-finite gradient, a window with a dropped micro-batch, and under
   GA_NONFINITE_FAIL the ga_discard of such a window back it off: scale *= backoff_factor.
   growth_interval applied steps in a row without one: scale *= growth_factor. */

/* A loss scale that follows the gradients, for f16. */
typedef struct ga_loss_scaler {
  size_t struct_size;
  double initial_scale;    /* the first scale, in [min_scale, max_scale]; default 65536 */
  double growth_factor;    /* what the scale grows by; > 1; default 2 */
  double backoff_factor;   /* what the scale backs off by; (0, 1); default 0.5 */
  double min_scale;        /* the least scale; > 0; default 2^-126 */
  double max_scale;        /* the largest scale; finite as an f32; default 2^127 */
  int64_t growth_interval; /* applied steps in a row after which the scale grows; > 0; default
                              2000 */
  int32_t hysteresis;      /* > 0; default 1: this many non-finite windows since the scale last
                              grew until one backs it off, and so does each one after that */
  int32_t reserved;        /* 0 */
} ga_loss_scaler;

/* Writes the defaults. */
GA_API ga_status ga_loss_scaler_init(ga_loss_scaler* out, size_t struct_size);

/* Gives the context a dynamic loss scale, beginning with initial_scale, in place of
   ga_config.loss_scale. Between windows. scaler: how the scale moves; NULL removes the dynamic loss
   scale. */
GA_API ga_status ga_context_set_loss_scaler(ga_context* ctx, const ga_loss_scaler* scaler);

/* The factor that the program multiplies its loss by until the next ga_step. *out_scale: the
   number; waits if there is a loss scaler. *out_device: the address of that number, an f32 on the
   device, for work on the context's stream; NULL for a context on the CPU. One of the two may be
   NULL, out_scale only on a device. */
GA_API ga_status ga_loss_scale(const ga_context* ctx, double* out_scale, const void** out_device);

/* ---- EMA ------------------------------------------------------------------------------------- */

/* Needed to evaluate or ship a moving average of the parameters. The average moves once per applied
   step, in the pass that updates the parameter: e <- e + (1 - d) (p - e) after the context's t-th
   step; e = p in the first. p is the master weights if there are any. A parameter that is added
   later begins with its first step. Parameters without a gradient, frozen and lazily updated ones
   take part, in a pass of their own; those of GA_OPTIMIZER_EXTERNAL as ga_step finds them. A
   parameter that has always been frozen has no EMA yet.

   The Schedule-Free optimizers have an average of their own, x = y + (1 - 1 / beta) (z - y), where
   y is the parameter, z its state of that name and beta SCHEDULE_FREE_ADAMW's beta1 or
   SCHEDULE_FREE_SGD's momentum. Gradients are taken at y, and x is what to evaluate and to ship.
   ga_ema_copy_to and ga_ema_swap take it for an EMA, unless the context keeps one, and leave
   parameters of other groups as they are. It is computed by these calls and costs memory only while
   exchanged. */

/* What the decay d of step t is. */
typedef int32_t ga_ema_kind;
enum {
  GA_EMA_TORCH = 0, /* d = decay, as torch.optim.swa_utils.get_ema_avg_fn. The average remembers
                       1 / (1 - decay) steps, some thousand with 0.999 */
  GA_EMA_KARRAS = 1 /* d = (1 - 1 / t)^(gamma + 1), Karras et al. 2024, eq. 6. The average
                       remembers a part of the run, however short */
};

/* A moving average of every parameter. */
typedef struct ga_ema {
  size_t struct_size;
  ga_ema_kind kind; /* what the decay is; default GA_EMA_TORCH */
  ga_dtype dtype;   /* dtype of the average; default 0: f32, or f64 for f64 parameters; or
                       GA_BF16, rounded stochastically, not for f64 parameters */
  double decay;     /* of TORCH; [0, 1]; default 0.999 */
  double gamma;     /* of KARRAS; >= 0; default 6.94 */
} ga_ema;

/* Writes the defaults. */
GA_API ga_status ga_ema_init(ga_ema* out, size_t struct_size);

/* Keeps an EMA, a moving average, of every parameter. Legal until the library makes its arrays: in
   ga_prepare, for state by name, or with the first contribution of all. ema: how the average moves;
   NULL keeps no moving averages. */
GA_API ga_status ga_context_set_ema(ga_context* ctx, const ga_ema* ema);

/* Writes the EMA of a parameter to out, as many elements, of dtype, rounded to nearest; before the
   first applied step, the parameter itself. out must not overlap a parameter. On a device, waits
   for the work before it, and writes out in the order of the stream. GA_ERROR_INVALID_STATE: there
   is no EMA, and no group with an average of its own. GA_ERROR_FAULT: out is half written. */
GA_API ga_status ga_ema_copy_to(ga_context* ctx, ga_param param, void* out, ga_dtype dtype);

/* Exchanges parameters and EMA, to evaluate with the EMA, or takes that back. A parameter of
   another dtype than its EMA is set to the EMA, rounded, and a copy is kept meanwhile
   (ga_memory.averages). A second call with the same value does nothing. While exchanged, only
   queries, ga_bn_infer, ga_synchronize, ga_context_set_stream and ga_context_destroy, which leaves
   parameters as they are, are legal; the rest is GA_ERROR_INVALID_STATE. Between windows; under
   GA_SHARD_OPTIMIZER, on every rank. Waits. on: 1 exchanges them, 0 takes that back, to the last
   bit. GA_ERROR_INVALID_STATE: there is no EMA, and no group with an average of its own. */
GA_API ga_status ga_ema_swap(ga_context* ctx, int32_t on);

/* ---- Parameters in detail -------------------------------------------------------------------- */

/* Needed for 16-bit training, embeddings, parameters in one block of memory, transfer learning, or
   learning rates by layer. */

/* Whether the library keeps master weights of a 16-bit parameter. Those of two contexts over the same
   memory would drift apart: the call that would make the second ones, or move some there, is
   GA_ERROR_INVALID_STATE. */
typedef int32_t ga_master;
enum {
  GA_MASTER_F32 = 0, /* an f32 copy, which the optimizer updates and the parameter is rounded
                        from */
  GA_MASTER_NONE = 1 /* none: the optimizer reads and rounds the parameter itself */
};

/* How a 16-bit parameter is rounded. */
typedef int32_t ga_rounding;
enum {
  GA_ROUND_NEAREST = 0,   /* to nearest, ties to even */
  GA_ROUND_STOCHASTIC = 1 /* up or down at random, by ga_config.seed */
};

/* GA_REDUCE_MAX, for what is a maximum and no gradient, such as the amax of a tensor in fp8
   training. In place of a sum, the parameter collects the largest number of each element, over the
   contributions of a window and over ranks. A contribution is divided by its loss scale, but not
   weighted; in a micro-batch of weight 0 it is not read. ga_gradient returns the maxima after an
   applied step, so the parameter needs a group with GA_OPTIMIZER_EXTERNAL. Without a contribution
   there is no maximum, under GA_MISSING_ZERO either.

   Norms, clipping, the noise scale and ga_optimizer.maximize leave maxima out. The check for
   infinities and NaN does not: a NaN remains a NaN, infinity is the largest number, and -infinity
   gives way to any other. Every ga_accumulation stores maxima as PLAIN does, and GA_COMM_WIRE_BF16
   does not round them. GA_ERROR_UNSUPPORTED: ga_accumulate_rows, ga_accumulate_matmul,
   ga_accumulator_acquire, and being the gamma or beta of a layer. */

/* What a step does to the rows of a parameter that ga_accumulate_rows has brought nothing for. */
typedef int32_t ga_rows;
enum {
  GA_ROWS_NONE = 0,  /* ga_accumulate_rows is not legal for the parameter */
  GA_ROWS_DENSE = 1, /* a step with a gradient of zeros */
  GA_ROWS_LAZY = 2   /* they and their state stay as they are, also under GA_MISSING_ZERO; for
                        SGD (dampening 0), ADAM, ADAMW, ADAGRAD and ROWWISE_ADAGRAD. With
                        GA_STATE_8BIT, a row has a multiple of 16 elements, and its own blocks of
                        the largest power of two, up to 256, that divides it */
};

/* Options of a parameter. */
struct ga_param_options {
  size_t struct_size;
  ga_dtype gradient_dtype;    /* dtype of gradients; default 0: the parameter's. f64 only for f64
                                 parameters, which take any */
  ga_dtype accumulator_dtype; /* dtype of the accumulator; default 0: f32, or f64 for f64
                                 parameters, which have no other; or GA_F32, GA_F16, GA_BF16 */
  ga_master master;           /* whether a 16-bit parameter has master weights; default
                                 GA_MASTER_F32 */
  ga_rounding rounding;       /* how a 16-bit parameter is rounded; default GA_ROUND_NEAREST */
  ga_rows rows;               /* whether gradients may come by row; default GA_ROWS_NONE; else
                                 rank >= 1, an f32 or f64 accumulator and GA_ACCUMULATE_PLAIN */
  uint32_t agc_axes;          /* bit d: a unit of GA_CLIP_AGC spans axis d; default 0: as
                                 ga_clip.agc_units says */
  ga_reduce reduce;           /* what the optimizer sees; default 0: as ga_config.reduce says; or
                                 GA_REDUCE_MAX */
  int32_t write_early;        /* 0 or 1: with ga_config.eager, the parameter, which has 16 bits
                                 and master weights and is rounded to nearest, may be written
                                 from ga_params_ready on, and holds what ga_step leaves when that
                                 has returned, so that no copy is made at the end; default 0 */
  int32_t follow_data;        /* 0 or 1: master weights follow what the program writes to the
                                 parameter: an element that is not what its master weight rounds to
                                 is taken as the new master weight by the next call that reads the
                                 master weight, so that ga_param_changed is not needed. What ga_load
                                 and ga_state_set put into master weights is rounded into the
                                 parameter in the same call. Not with GA_ROUND_STOCHASTIC; without
                                 master weights, nothing needs to be told either way. Default 0: the
                                 parameter may be freed or used otherwise between steps */
  int32_t reserved;           /* 0 */
  int32_t cut_matrices;       /* 0 or 1: the next four fields say how MUON cuts the parameter, whose
                                 rank is 2 or more, into equal matrices [outputs, inputs]. Each has
                                 norms, iterations and a factor of the learning rate of its own.
                                 Default 0: rank 2, one matrix, whose axis 0 has the outputs */
  int32_t batch_axes;         /* how many leading axes have matrices of their own for each index: 1
                                 for experts [E, outputs, inputs]; at most rank - 2 */
  int32_t output_axis;        /* the axis of the outputs, not one of batch_axes. All axes but this
                                 one and batch_axes, flattened, are the inputs. For a convolution: 0
                                 in torch, [out, in, height, width]; 3 in Keras, with out last */
  int32_t split_axis;         /* the axis that matrix_parts cut, not one of batch_axes */
  int32_t matrix_parts;       /* how many equal parts split_axis is cut into, each in a matrix of
                                 its own, as heads are; default 0: not cut */
  int32_t reserved2;          /* 0 */
};

/* Writes the defaults. */
GA_API ga_status ga_param_options_init(ga_param_options* out, size_t struct_size);

/* One parameter within a block of memory. All entries of an array have the struct_size of the
   first, which is the distance between two of them. */
typedef struct ga_flat_entry {
  size_t struct_size;
  const char* name;
  ga_group group; /* must be set: an entry of zeros is refused */
  int32_t rank;
  const int64_t* shape;            /* [rank] */
  int64_t offset;                  /* elements from the start of the block, of parameters and of
                                      gradients alike */
  const ga_param_options* options; /* default NULL: those of ga_params_add_flat */
} ga_flat_entry;

/* Writes the defaults; group is -1, which is no group. */
GA_API ga_status ga_flat_entry_init(ga_flat_entry* out, size_t struct_size);

/* Adds the parameters in one block of memory, which may have gaps: all of them or none. entries:
   [count]. *out: the id of entries[0]; the others follow. For ga_accumulate, the block has one
   pointer: to a block of gradients with the same offsets. Otherwise as ga_param_add. */
GA_API ga_status ga_params_add_flat(ga_context* ctx, void* data, ga_dtype dtype,
                                    const ga_flat_entry* entries, size_t count,
                                    const ga_param_options* options, ga_param* out);

/* *out: the number of parameters, removed ones included; their ids count up from 0. */
GA_API ga_status ga_param_count(const ga_context* ctx, int32_t* out);

/* *out: the id of the parameter of that name. GA_ERROR_INVALID_ARGUMENT: there is none. */
GA_API ga_status ga_param_find(const ga_context* ctx, const char* name, ga_param* out);

/* What is known of a parameter. name and shape point to memory of the context that stays as it is
   until ga_context_destroy. */
typedef struct ga_param_info {
  size_t struct_size;
  const char* name;           /* its name */
  ga_group group;             /* the id of its group */
  ga_dtype dtype;             /* dtype of its elements */
  ga_dtype gradient_dtype;    /* dtype of its gradients */
  ga_dtype accumulator_dtype; /* dtype of its accumulator */
  void* data;                 /* the address of its elements, as given to ga_param_add or
                                 ga_param_bind */
  const int64_t* shape;       /* [rank] its dimensions */
  int32_t rank;
  int32_t frozen;            /* 0 or 1: whether it is frozen */
  int64_t count;             /* how many elements it has */
  int64_t offset;            /* elements from the start of its flat block; else 0 */
  size_t slot;               /* its place in a list of gradients, as ga_param_slot */
  double lr_scale;           /* what its group's learning rate is multiplied by; 1 at first */
  double weight_decay_scale; /* what its group's weight decay is multiplied by; 1 at first */
} ga_param_info;

/* Prepares *out to be filled. */
GA_API ga_status ga_param_info_init(ga_param_info* out, size_t struct_size);

/* *out: what is known of a parameter. */
GA_API ga_status ga_param_describe(const ga_context* ctx, ga_param param, ga_param_info* out);

/* *out: how many gradients ga_accumulate takes: one for each ga_param_add and ga_params_add_flat,
   also of parameters that were removed. */
GA_API ga_status ga_slot_count(const ga_context* ctx, size_t* out);

/* *out: which gradient of ga_accumulate is the parameter's; parameters of a flat block share
   one. */
GA_API ga_status ga_param_slot(const ga_context* ctx, ga_param param, size_t* out);

/* Tells that the parameter has moved: data holds its values now. Master weights stay, but under
   ga_param_options.follow_data elements that differ count as written by the program. Between
   windows. */
GA_API ga_status ga_param_bind(ga_context* ctx, ga_param param, void* data);

/* Tells that the program has written a parameter that has master weights: the next contribution
   sets all of them from it again. Before the first contribution, which makes the master weights,
   for parameters without them, and under ga_param_options.follow_data, which sees what was written,
   nothing needs to be told. Between windows. */
GA_API ga_status ga_param_changed(ga_context* ctx, ga_param param);

/* Freezes or unfreezes the parameter. A frozen one is not updated, and its gradients, which may be
   NULL, are not read: no norm and no check sees them. Its state stays that of before. One that is
   frozen from the start owns nothing, neither accumulator nor state, master weights or EMA, until a
   contribution comes after it is unfrozen. Between windows. frozen: 1 freezes it, 0 unfreezes
   it. */
GA_API ga_status ga_param_set_frozen(ga_context* ctx, ga_param param, int32_t frozen);

/* Multiplies the group's learning rate for this parameter. The factor stays when the learning rate
   changes; ga_group_lr and ga_step_result.lr do not include it. Decoupled weight decay is
   multiplied by this factor too. lr_scale: finite, >= 0; 1 until then. */
GA_API ga_status ga_param_set_lr_scale(ga_context* ctx, ga_param param, double lr_scale);

/* Multiplies the group's weight decay for this parameter. The factor stays when the weight decay
   changes. With 0, LAMB and LARS treat the parameter as one without weight decay: no trust ratio,
   but by ga_optimizer.always_adapt. weight_decay_scale: finite, >= 0; 1 until then. */
GA_API ga_status ga_param_set_weight_decay_scale(ga_context* ctx, ga_param param,
                                                 double weight_decay_scale);

/* Removes a parameter. The library does not touch it any more, and every call with its id is
   GA_ERROR_INVALID_ARGUMENT. Other parameters keep their ids and pointers in ga_accumulate; its own
   pointer there is not read; its name is free. The library's arrays are freed once all parameters
   whose arrays the same call allocated are removed, else with the context. Between windows, unless
   a batch-normalisation layer has it. */
GA_API ga_status ga_param_remove(ga_context* ctx, ga_param param);

/* ---- Groups in detail ------------------------------------------------------------------------ */

/* Needed to change hyper-parameters while training, to freeze a whole group, or to update
   parameters with an optimizer of the program's own: a group with GA_OPTIMIZER_EXTERNAL does
   everything but the update.

   Networks that are trained in turns (GAN, actor and critic) are best given a context each: steps,
   schedules, EMA and loss scale are the context's, and would count the steps of both. */

/* Sets the weight decay. weight_decay: finite, >= 0. */
GA_API ga_status ga_group_set_weight_decay(ga_context* ctx, ga_group group, double weight_decay);

/* Gives the group other hyper-parameters: learning rate, betas, momentum, eps and so on. What
   decides which state there is may not change: kind, flavor, state_dtype, amsgrad, centered,
   initial_accumulator, and whether momentum (SGD, RMSPROP, LARS) or beta2 (MUON) is 0. Bias
   corrections use the new beta, 1 - beta^t, as PyTorch's and Keras's do. optimizer: the new
   hyper-parameters. GA_ERROR_UNSUPPORTED: such a field differs, the device has no products for
   ns_precision, or the optimizer would then move rows that GA_ROWS_LAZY leaves. */
GA_API ga_status ga_group_set_optimizer(ga_context* ctx, ga_group group,
                                        const ga_optimizer* optimizer);

/* Freezes or unfreezes each parameter that the group has now, as ga_param_set_frozen does. Between
   windows. frozen: 1 freezes them, 0 unfreezes them. */
GA_API ga_status ga_group_set_frozen(ga_context* ctx, ga_group group, int32_t frozen);

/* *out: the number of groups; their ids count up from 0. */
GA_API ga_status ga_group_count(const ga_context* ctx, int32_t* out);

/* *out: the optimizer of the group, with the learning rate and the weight decay that were set last.
   Its ns_table points to memory of the context that is valid until the group is given another
   table. */
GA_API ga_status ga_group_optimizer(const ga_context* ctx, ga_group group, ga_optimizer* out);

/* The reduced, clipped gradient of a parameter of a GA_OPTIMIZER_EXTERNAL group. *out_data:
   [*out_count], of *out_dtype, the accumulator's dtype (with 16 bits, also compensated, the
   gradient is rounded to 16 bits); legal after an applied ga_step until the next accumulate,
   ga_discard or ga_step. out_dtype, out_count: may be NULL. Waits. GA_ERROR_INVALID_STATE: not
   after an applied step, or the parameter had no gradient in it (under GA_MISSING_ZERO it then has
   zeros). */
GA_API ga_status ga_gradient(ga_context* ctx, ga_param param, const void** out_data,
                             ga_dtype* out_dtype, int64_t* out_count);

/* ---- Devices --------------------------------------------------------------------------------- */

/* Needed to train on an NVIDIA GPU: ga_config.device = GA_DEVICE_CUDA. Parameters, gradients,
   indices and matrices are then in its memory and are never copied. Calls queue their work on
   ga_config.stream and return, so ga_step may not know its outcome yet (GA_STEP_PENDING). Order
   work of other streams against that one: what writes gradients before, what reads parameters
   after; or give the context the stream of that work (ga_context_set_stream). docs/cuda.md says
   which calls wait, and how a window is captured in a CUDA graph. */

/* *out: devices of that kind that contexts can be made on; 1 for GA_DEVICE_CPU. 0 is an answer, not
   an error: ga_last_error() then says why, as ga_context_create would (no module, no driver or one
   that is too old, no device). */
GA_API ga_status ga_device_count(ga_device device, int32_t* out);

/* Waits until all work of the context is done. GA_ERROR_FAULT: some of it failed on the device;
   every later call fails with it again. */
GA_API ga_status ga_synchronize(ga_context* ctx);

/* Replaces the stream of the context (ga_config.stream): later calls queue their work on this one,
   behind everything that the context has queued so far. It is also passed to ga_allocate and
   ga_free. Also legal within a window. Does not wait. Work that the program has queued on other
   streams stays the program's to order. While the new stream alone is being captured, the call
   succeeds where the device has finished everything that the context has queued. After an error the
   context keeps its stream, and the window is as it was. stream: a cudaStream_t of the same device
   and driver context as the stream that it replaces, which is not used any more and may be
   destroyed; NULL: the legacy default stream; not cudaStreamPerThread. GA_ERROR_INVALID_STATE: one
   of the two streams is being captured, and the other does not belong to that capture.
   GA_ERROR_UNSUPPORTED: the context is on the CPU. */
GA_API ga_status ga_context_set_stream(ga_context* ctx, void* stream);

/* ---- Memory ---------------------------------------------------------------------------------- */

/* Needed to plan. The arrays of a parameter are allocated by the first contribution to a window
   while it is not frozen, or by the first ga_step that moves it without one; ask before. Later
   windows allocate only for work larger than any before. docs/reference.md counts bytes. */

/* Allocates the library's arrays for all parameters that are not frozen, which the first
   contribution to a window would do otherwise. Master weights are taken from their parameters no
   earlier than by that contribution, or by the first ga_state_get or ga_state_set. The system gives
   memory when it is first written; with ga_config.eager, state, averages and their shadow arrays
   are written here. */
GA_API ga_status ga_prepare(ga_context* ctx);

/* Bytes that the library owns for a context, by purpose, as registered so far; without parameters
   and gradients, which are the program's. */
typedef struct ga_memory {
  size_t struct_size;
  int64_t accumulators;    /* accumulators; with GA_GRADIENTS_LIVE and K = 1 on the CPU, only
                              those ever written */
  int64_t optimizer_state; /* state of optimizers */
  int64_t workspace;       /* partial norms and tables; after the first matrix product, its
                              scratch */
  int64_t total;           /* all of it */
  int64_t masters;         /* master weights */
  int64_t averages;        /* moving averages */
  int64_t rows;            /* what gradients by row need, see ga_param_options.rows */
  int64_t batch_norm;      /* statistics of batch normalisation */
  int64_t resident;        /* of total, what is written so far; on a device, what is allocated.
                              The rest is planned, or memory that the system gives only when it
                              is written */
  int64_t eager;           /* with ga_config.eager: shadow arrays, which updates write */
} ga_memory;

/* Prepares *out to be filled. */
GA_API ga_status ga_memory_init(ga_memory* out, size_t struct_size);

/* *out: the bytes that the library owns for the context, by purpose. */
GA_API ga_status ga_context_memory(const ga_context* ctx, ga_memory* out);

/* ---- Build ----------------------------------------------------------------------------------- */

/* Needed in bug reports, and to find out what this build on this machine can do. */

#define GA_VERSION_MAJOR 0
#define GA_VERSION_MINOR 2
#define GA_VERSION_PATCH 0
/* Version of this header, to compare with ga_version(). */
#define GA_VERSION (10000 * GA_VERSION_MAJOR + 100 * GA_VERSION_MINOR + GA_VERSION_PATCH)

/* Version of the library that is loaded: 10000 * major + 100 * minor + patch. */
GA_API int32_t ga_version(void);

/* One line: version, compiler, CPU kernels, threads, and the modules that this build knows.
   Static. */
GA_API const char* ga_build_info(void);

/* The library that is loaded, in parts. As one line: ga_build_info. Versions are 10000 * major +
   100 * minor + patch, 0 for a module that could not be loaded. Strings are static. */
typedef struct ga_build {
  size_t struct_size;
  int32_t version;       /* version of the library */
  int32_t onednn;        /* version of the oneDNN that multiplies matrices on the CPU */
  int32_t cuda_runtime;  /* version of the CUDA that libgradaccum_cuda.so was built with */
  int32_t cuda_driver;   /* the newest CUDA that this machine's driver runs; 0: no driver */
  int32_t openmp;        /* _OPENMP, a date such as 201511; 0: the threads are the library's */
  int32_t reserved;      /* 0 */
  const char* compiler;  /* the compiler, such as "gcc 12.2.0" */
  const char* cpu_loops; /* the CPU kernels: names for GA_CPU_ISA, separated by spaces */
} ga_build;

/* Prepares *out to be filled. */
GA_API ga_status ga_build_init(ga_build* out, size_t struct_size);

/* *out: the build. Loads the modules that can be loaded. */
GA_API ga_status ga_build_describe(ga_build* out);

/* ---- Errors in detail ------------------------------------------------------------------------ */

/* A call that does not return GA_OK has changed nothing: parameters, state and window are bit for
 * bit as if it had not been made. The exceptions:
 *
 *   GA_ERROR_NONFINITE   From ga_step under GA_NONFINITE_FAIL. The window is kept, and ga_discard
 *                        must be called next.
 *   GA_ERROR_FAULT       A device, a GEMM library or the program's parallel_for failed half-way.
 *                        From a call that accumulates: the window is GA_WINDOW_INVALID (or still
 *                        empty, if the library's arrays were being made); parameters and state are
 *                        as they were, and ga_discard must be called next. From ga_step: parameters
 *                        may be half updated, only ga_context_destroy is legal, and all other calls
 *                        return this status again.
 *                        From a load: the second reading failed, and the same holds.
 *                        Also, if a function of the program threw an exception (progress, write,
 *                        read; the message names it): the call has changed nothing, but for a load
 *                        in its second reading.
 *
 * The message names the parameters and values involved. A call that finds no device to count
 * (ga_device_count) leaves a message too. */

/* ---- Conventions in full --------------------------------------------------------------------- */

/* Structs      Each begins with struct_size, its sizeof in the program, so that programs and libraries
 *              of different versions understand each other. An _init function takes that size, and
 *              writes the defaults (zeros, for a struct that the library fills) and struct_size.
 *
 * Memory       Every pointer is borrowed for the call. Two outlive it: the data of a parameter,
 *              until ga_param_bind, ga_param_remove or ga_context_destroy, and gradients that the
 *              library reads later (GA_GRADIENTS_LIVE, GA_NONFINITE_DROP_MICRO,
 *              GA_CLIP_WHEN_MICRO). What an out parameter returns belongs to the context, except a
 *              ga_context.
 *
 * Threads      A call while another one runs on the same context is GA_ERROR_INVALID_STATE and
 *              changes nothing; ga_context_destroy alone cannot tell. A context may move between
 *              threads. Callbacks must not use their context.
 *
 * Processes    After fork() the child makes contexts of its own; calls on those of the parent are
 *              GA_ERROR_INVALID_STATE there.
 *
 * Rounding     The library computes in a floating-point mode of its own, on every thread: it rounds
 *              to nearest, keeps subnormal numbers and does not trap. The program's mode
 *              (torch.set_flush_denormal, fesetround, ...) changes no bit, and a call leaves the
 *              mode and the exception flags of its thread as it found them.
 *
 * Same bits    On one machine, results have the same bits for any number of threads and any CPU
 *              kernels; matrix products, and so MUON, excepted. Devices: docs/cuda.md.
 *
 * docs/reference.md has struct_size, threads and fork() in full, and the environment variables. */

#ifdef __cplusplus
}
#endif

/* The parts that have a file of their own. Each may also be included alone. */
#include "batchnorm.h"
#include "comm.h"
#include "state.h"

#endif /* GRADACCUM_GRADACCUM_H_ */
