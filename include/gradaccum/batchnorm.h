/* libgradaccum: batch normalisation. A part of gradaccum.h, which includes it and has the
 * conventions.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef GRADACCUM_BATCHNORM_H_
#define GRADACCUM_BATCHNORM_H_

#include "gradaccum.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Batch normalisation --------------------------------------------------------------------- */

/* Needed if the network has batch normalisation, y = gamma (x - mean) / sqrt(variance + eps) + beta
 * for each channel (Ioffe & Szegedy 2015), because the statistics of micro-batches are not those of
 * their batch. Each layer chooses whose mean and variance it takes:
 *
 *   MICRO       Those of the micro-batch, as frameworks do. Of the results, only the running
 *               statistics are those of one batch.
 *   WINDOW      Those of the whole window, on all ranks: y, dx, dgamma and dbeta are those of one
 *               batch. The network is computed layer by layer, each in two passes over the
 *               micro-batches, forward and backward, so the program keeps the activations of the
 *               window.
 *   CUMULATIVE  Those of the window's micro-batches so far: one pass, and later micro-batches come
 *               close to the window's. Gradients are exact for what was computed.
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
 *                                                   ga_bn_backward_finalize  over several ranks
 *                                                   for each k: the same with ga_bn_backward
 *
 * In all modes the running statistics are exact; they move in ga_step, if it is applied. The
 * backward calls contribute the gradients of gamma and beta as ga_accumulate_part would, with the
 * weight and the loss scale of the micro-batch.
 *
 * ga_bn_accumulate, ga_bn_accumulate_stats and ga_bn_forward are about the open micro-batch, or
 * else about the next one: the one to come (MICRO, CUMULATIVE), or the next of the pass (WINDOW).
 * The backward calls are about the open one. Tensors x, y, dx and dy are [samples, channels,
 * positions] or [samples, positions, channels], positions being the product of the spatial
 * dimensions, 1 without any. x is read again by the backward calls. y may be x; dx may be dy or x;
 * else outputs overlap neither a parameter nor anything that the call reads.
 *
 * docs/batch-normalization.md has the protocol in full, what it costs, and how micro-batches are
 * visited again. */
typedef int32_t ga_bn; /* 0, 1, 2, ... in the order they were added */

/* Whose statistics a layer normalises by. */
typedef int32_t ga_bn_mode;
enum {
  GA_BN_MICRO = 0,     /* those of the micro-batch */
  GA_BN_WINDOW = 1,    /* those of the whole window, in two passes over its micro-batches */
  GA_BN_CUMULATIVE = 2 /* those of the micro-batches of the window so far */
};

/* The order of the axes of activations. */
typedef int32_t ga_bn_layout;
enum {
  GA_BN_CHANNELS_FIRST = 0, /* [samples, channels, positions] (NCHW) */
  GA_BN_CHANNELS_LAST = 1   /* [samples, positions, channels] (NHWC) */
};

/* Options of a layer of batch normalisation. */
typedef struct ga_bn_options {
  size_t struct_size;
  ga_bn_mode mode;     /* whose statistics the layer normalises by; default GA_BN_MICRO */
  ga_bn_layout layout; /* the order of axes; default GA_BN_CHANNELS_FIRST, Keras
                          GA_BN_CHANNELS_LAST */
  ga_dtype dtype;      /* dtype of x, y and their gradients; default GA_F32. Computed in f32, or
                          in f64 for GA_F64 */
  int32_t biased;      /* 0 or 1: whether the running variance averages biased variances, which
                          divide the sum of squared deviations of n elements by n, as in Keras;
                          unbiased ones divide by n - 1, as in torch: for n = 1 there is none, and
                          the running variance stays */
  double momentum;     /* running += momentum (window's - running); [0, 1]; default 0.1, Keras
                          0.01, which Keras itself calls 0.99 */
  double eps;          /* added to the variance; > 0; default 1e-5, Keras 1e-3 */
} ga_bn_options;

/* Writes the defaults of GA_FLAVOR_TORCH or GA_FLAVOR_KERAS. */
GA_API ga_status ga_bn_options_init(ga_bn_options* out, size_t struct_size, ga_flavor flavor);

/* Adds a layer. Between windows. name: as in ga_param_add, unique among layers. channels: >= 1.
   gamma, beta: parameters [channels], in any group; -1: none, as with 1 and 0. Two layers may share
   them. options: may be NULL: torch's defaults. out may be NULL. The running mean begins with 0,
   the variance with 1. GA_ERROR_UNSUPPORTED: WINDOW or CUMULATIVE with GA_NONFINITE_DROP_MICRO,
   because the micro-batches that stay were normalised with the dropped one; WINDOW with
   GA_CLIP_WHEN_MICRO, because its passes open micro-batches again. */
GA_API ga_status ga_bn_add(ga_context* ctx, const char* name, int64_t channels, ga_param gamma,
                           ga_param beta, const ga_bn_options* options, ga_bn* out);

/* *out: the number of layers of batch normalisation; their ids count up from 0. */
GA_API ga_status ga_bn_count(const ga_context* ctx, int32_t* out);

/* *out: the id of the layer of that name. GA_ERROR_INVALID_ARGUMENT: there is none. */
GA_API ga_status ga_bn_find(const ga_context* ctx, const char* name, ga_bn* out);

/* What is known of a layer. name points to memory of the context that stays as it is until
   ga_context_destroy. */
typedef struct ga_bn_info {
  size_t struct_size;
  const char* name;    /* its name */
  int64_t channels;    /* its channels */
  ga_param gamma;      /* the id of the parameter that scales; -1: none */
  ga_param beta;       /* the id of the parameter that shifts; -1: none */
  ga_bn_mode mode;     /* whose statistics it normalises by */
  ga_bn_layout layout; /* the order of the axes of its input */
  ga_dtype dtype;      /* dtype of its input */
  int32_t biased;      /* 0 or 1: whether the running variance averages biased variances */
  int32_t frozen;      /* 0 or 1: whether it is frozen */
  int32_t reserved;
  double momentum; /* how far the running statistics move to those of a window */
  double eps;      /* what is added to the variance */
} ga_bn_info;

/* Prepares *out to be filled. */
GA_API ga_status ga_bn_info_init(ga_bn_info* out, size_t struct_size);

/* *out: what is known of a layer. */
GA_API ga_status ga_bn_describe(const ga_context* ctx, ga_bn bn, ga_bn_info* out);

/* Freezes or unfreezes the layer. A frozen one normalises by its running statistics, which do not
   move, and the functions that take statistics check what they are given, do nothing, and wait for
   no other rank. gamma and beta still get gradients (see ga_param_set_frozen). Between windows.
   frozen: 1 freezes it, 0 unfreezes it. */
GA_API ga_status ga_bn_set_frozen(ga_context* ctx, ga_bn bn, int32_t frozen);

/* Takes the statistics of a micro-batch. WINDOW: the first pass, each micro-batch once, in order,
   before ga_bn_finalize. MICRO, CUMULATIVE: for programs that do not call ga_bn_forward, which does
   it itself. */
GA_API ga_status ga_bn_accumulate(ga_context* ctx, ga_bn bn, const void* x, int64_t samples,
                                  int64_t positions);

/* What describes the spread of given statistics. */
typedef int32_t ga_bn_spread;
enum {
  GA_BN_VARIANCE = 0, /* the mean squared deviation from the mean */
  GA_BN_M2 = 1        /* the sum of squared deviations */
};

/* Takes statistics that the program has computed itself, in place of ga_bn_accumulate. count:
   elements of each channel, >= 0. mean, spread: [channels] of dtype, GA_F32 or GA_F64. A negative
   spread is GA_ERROR_INVALID_ARGUMENT; on a device it gives NaN. */
GA_API ga_status ga_bn_accumulate_stats(ga_context* ctx, ga_bn bn, int64_t count, const void* mean,
                                        const void* spread, ga_bn_spread kind, ga_dtype dtype);

/* Ends the first pass of a layer with GA_BN_WINDOW. With a communicator (ga_context_set_comm) every
   rank makes the call, also one without micro-batches, and the layer normalises by the statistics
   of all ranks. If the call fails on one rank it fails on all of them, and the statistics are as
   they were. On a device it waits. Over a transport of the device (on_stream) it waits only where
   ga_step would, see ga_context_set_comm, and fails on that rank alone, which makes the call again
   or ends the window, while the devices of the others wait. GA_ERROR_INVALID_STATE: nothing was
   accumulated (with a communicator: on any rank; over a transport of the device the statistics then
   have count 0), it is final already, or the layer is in another mode. */
GA_API ga_status ga_bn_finalize(ga_context* ctx, ga_bn bn);

/* Normalises x of a micro-batch to y. GA_BN_MICRO, GA_BN_CUMULATIVE: takes the statistics of x
   first, unless ga_bn_accumulate or ga_bn_accumulate_stats has. GA_BN_WINDOW: after ga_bn_finalize;
   x must have as many elements as in the first pass. */
GA_API ga_status ga_bn_forward(ga_context* ctx, ga_bn bn, const void* x, int64_t samples,
                               int64_t positions, void* y);

/* Sums over dy and x of the open micro-batch: the gradients of gamma and beta, and with
   GA_BN_WINDOW what the dx of all micro-batches needs: then to be called for each micro-batch, those
   of weight 0 included (dy is not read then), before any ga_bn_backward. Otherwise ga_bn_backward
   does it, unless it was called. */
GA_API ga_status ga_bn_backward_accumulate(ga_context* ctx, ga_bn bn, const void* x, const void* dy,
                                           int64_t samples, int64_t positions);

/* Ends the pass of ga_bn_backward_accumulate of a layer with GA_BN_WINDOW. With a communicator the
   call is required before ga_bn_backward, on every rank, also on those without micro-batches, waits
   and fails as ga_bn_finalize does, and adds up over all ranks the sums that dx needs. The
   gradients of gamma and beta stay the rank's own, and are added up by ga_step. Without a
   communicator the call may be left out: it checks that no sums are missing, and changes nothing.
   GA_ERROR_INVALID_STATE: sums of some micro-batch of this rank are missing, ga_bn_finalize has not
   been called, the sums are those of all ranks already, or the layer is in another mode. */
GA_API ga_status ga_bn_backward_finalize(ga_context* ctx, ga_bn bn);

/* Writes dx of the open micro-batch; zeros if its weight is 0. GA_ERROR_INVALID_STATE: the layer's
   last forward pass was that of another micro-batch or shape; with GA_BN_WINDOW, sums of some
   micro-batch are missing, or ga_bn_backward_finalize has not been called, with a communicator; under
   GA_NONFINITE_DROP_MICRO or GA_CLIP_WHEN_MICRO: the micro-batch has had its dx. */
GA_API ga_status ga_bn_backward(ga_context* ctx, ga_bn bn, const void* x, const void* dy,
                                int64_t samples, int64_t positions, void* dx);

/* Normalises by the running statistics, at any time. Nothing is counted. */
GA_API ga_status ga_bn_infer(ga_context* ctx, ga_bn bn, const void* x, int64_t samples,
                             int64_t positions, void* y);

/* The running statistics. out_mean, out_variance: [channels] of dtype, GA_F32 or GA_F64 (which
   loses nothing), in the host's memory also with a device. *out_steps: how often they have moved,
   torch's num_batches_tracked. Each may be NULL. Waits. */
GA_API ga_status ga_bn_running(ga_context* ctx, ga_bn bn, void* out_mean, void* out_variance,
                               ga_dtype dtype, int64_t* out_steps);

/* Sets the running statistics, in the shapes of ga_bn_running; finite, variance >= 0, steps >= 0.
   Between windows, and before any statistics of the next window are taken. Waits. */
GA_API ga_status ga_bn_running_set(ga_context* ctx, ga_bn bn, const void* mean,
                                   const void* variance, ga_dtype dtype, int64_t steps);

/* The statistics that the layer normalises by now, with the biased variance, for programs with
   normalising kernels of their own; in the shapes of ga_bn_running. *out_count: the elements of a
   channel that they are computed from. Waits. GA_ERROR_INVALID_STATE: none were taken in this
   window, in WINDOW mode ga_bn_finalize must be called first, or the layer is frozen. */
GA_API ga_status ga_bn_statistics(ga_context* ctx, ga_bn bn, void* out_mean, void* out_variance,
                                  ga_dtype dtype, int64_t* out_count);

#ifdef __cplusplus
}
#endif

#endif /* GRADACCUM_BATCHNORM_H_ */
