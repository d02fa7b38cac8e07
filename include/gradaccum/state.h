/* libgradaccum: state by name and state on disk. A part of gradaccum.h, which includes it and has the
 * conventions.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef GRADACCUM_STATE_H_
#define GRADACCUM_STATE_H_

#include "gradaccum.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- State by name --------------------------------------------------------------------------- */

/* Needed to carry a run from or to another framework, or to look at what an optimizer keeps. Every
   array of a parameter has a name and is read or written in the host's memory, also with a device:

     "exp_avg", ...   optimizer state, under its name in torch.optim, or in timm if torch lacks the
                      optimizer, whatever the flavor; docs/reference.md has the list
     "exp_avg_scale"  and so on: with GA_STATE_8BIT, the scales of the codes in "exp_avg"; f32, one
                      for every 256 elements of the parameter from its first on, or for fewer with
                      GA_ROWS_LAZY and after ga_param_set_part
     "step"           GA_I64, the updates of this parameter. GA_FLAVOR_TORCH; other flavors count
                      the context's steps, see ga_context_set_steps
     "mu_product"     GA_F64. GA_OPTIMIZER_NADAM, GA_FLAVOR_TORCH
     "weight_sum", "lr_max"  GA_F64. The Schedule-Free optimizers: the sum of the weights in the
                      average, and the largest learning rate of this parameter's steps
     "master"         master weights; the parameter itself is the program's to set along with them
     "ema"            the EMA; before its first move, the parameter itself */

/* An array of state of a parameter. Its name is a static string. */
typedef struct ga_state_info {
  size_t struct_size;
  const char* name; /* its name, such as "exp_avg" */
  ga_dtype dtype;   /* dtype of its elements */
  int32_t reserved; /* 0 */
  int64_t count;    /* how many elements it has */
} ga_state_info;

/* Prepares *out to be filled. */
GA_API ga_status ga_state_info_init(ga_state_info* out, size_t struct_size);

/* *out: how many arrays of state a parameter has, or will have once it is not frozen. */
GA_API ga_status ga_state_count(const ga_context* ctx, ga_param param, int32_t* out);

/* *out: array number index of these, in an order that stays the same. */
GA_API ga_status ga_state_describe(const ga_context* ctx, ga_param param, int32_t index,
                                   ga_state_info* out);

/* Read or write a whole array of state. out, data: [count] of dtype, both as ga_state_describe
   says: nothing is rounded. Codes (GA_U8) may also be read and written as the numbers that they
   stand for (GA_F32): data is then rounded to the nearest codes, and the scales are written too.
   Both allocate as ga_prepare does. Between windows. Wait. Optimizer state that is written counts
   as that of at least one update: a "step" of 0 becomes 1. So write "step" last.
   GA_ERROR_INVALID_ARGUMENT: the parameter has no state of that name, dtype and count; the message
   lists what there is. Also: a scale is neither 0 nor a positive normal number; a number for codes
   is not finite, or is negative where state never is. GA_ERROR_INVALID_STATE: the parameter has
   always been frozen. */
GA_API ga_status ga_state_get(ga_context* ctx, ga_param param, const char* name, void* out,
                              ga_dtype dtype, int64_t count);
GA_API ga_status ga_state_set(ga_context* ctx, ga_param param, const char* name, const void* data,
                              ga_dtype dtype, int64_t count);

/* Puts all state of the parameter back to the beginning: the optimizer's and its counts, master
   weights and EMA (the parameter itself). Between windows. */
GA_API ga_status ga_state_reset(ga_context* ctx, ga_param param);

/* ---- State on disk --------------------------------------------------------------------------- */

/* Needed to stop a run and to go on as if it had not stopped, with a window that is empty or open:

     ga_save(ctx, "run.safetensors", NULL);      after any micro-batch or step
     ...
     ga_load(ctx, "run.safetensors", NULL);      in a new process, with the same groups, parameters
                                                 and layers, before its first micro-batch

   The next steps then have the same bits as without the stop, on the same build, kind of device and
   processor; on others, the same values to rounding. The file is safetensors: "w" is the parameter
   of that name in its dtype, "w.exp_avg" and so on its state under the names above. It holds
   everything that a context knows but K, results of earlier windows than the last, and gradients
   that were delivered to GA_OPTIMIZER_EXTERNAL. docs/checkpoints.md describes the file, and how it
   goes to PyTorch and Keras and back.

   Saving is legal while no micro-batch is open and the window is not GA_WINDOW_INVALID (nor, over
   several ranks, one for which ga_step has returned GA_ERROR_NONFINITE); loading while the window
   is empty, on every rank. Neither is legal while a stream is captured. Both wait. The path of a
   file is in the encoding of the system. */

/* What is saved or loaded. */
typedef int32_t ga_state_parts;
enum {
  GA_STATE_ALL = 0,       /* the parameters and what the library keeps */
  GA_STATE_LIBRARY = 1,   /* not the parameters, which the program saves by itself */
  GA_STATE_PARAMETERS = 2 /* the parameters, and the running statistics of batch normalisation: a
                             plain model file. Loading it sets master weights from the parameters,
                             and leaves all other state */
};

/* What a load does about the settings in the file: hyper-parameters, schedules, clips, loss scaler,
   seed, loss scale, lr_scale, weight_decay_scale, frozen parameters and layers; and all that is set
   once: ga_config, EMA, options of parameters and layers. The random bits of parameters that are
   rounded stochastically always go on as in the file: they belong to the names, whatever the order of
   parameters, and whatever was removed before. */
typedef int32_t ga_state_settings;
enum {
  GA_SETTINGS_COMPARE = 0, /* if one differs that changes numbers, the load fails and lists what
                              differs */
  GA_SETTINGS_TAKE = 1,    /* takes them from the file, but compares what is set once */
  GA_SETTINGS_KEEP = 2     /* keeps those of the context. (What an open window depends on, and how
                              MUON cuts parameters into matrices, is compared always) */
};

/* Called now and then with the bytes that are done and the total. Another value than 0 ends the
   save, or a load that has not begun to change the context, with GA_ERROR_CANCELLED. Must not use
   the context. */
typedef int32_t (*ga_progress)(void* user, int64_t done, int64_t total);

/* Options of a save or a load. */
typedef struct ga_state_options {
  size_t struct_size;
  ga_state_parts parts;       /* what is saved or loaded; default GA_STATE_ALL */
  ga_state_settings settings; /* what a load does about settings; default GA_SETTINGS_COMPARE */
  int32_t allow_missing;      /* 0 or 1: a load leaves what the file has nothing of as it is;
                                 default 0 */
  int32_t allow_extra;        /* 0 or 1: a load skips what the context has no place for; default
                                 0 */
  int32_t unmarked;           /* 0 or 1: a load takes a safetensors file without a format mark, a
                                 model file of another program; default 0 */
  int32_t reserved;           /* 0 */
  ga_progress progress;       /* default NULL: none */
  void* progress_user;        /* passed to progress */
  const char* note;           /* of a save: a text of the program's own, in UTF-8, such as its
                                 place in the data; default NULL: none. See ga_state_note */
} ga_state_options;

/* Writes the defaults. */
GA_API ga_status ga_state_options_init(ga_state_options* out, size_t struct_size);

/* Saves to a file, as a whole or not at all: whatever happens, path is the old file or the new one,
   whole and on the disk when the call returns. (The new file is written beside the old one, then
   renamed; a link stays, and its target is replaced. What a killed save has left there, the next
   save to path removes.) A loop that counts micro-batches itself saves after the test that ends the
   window, not before it, and takes the count from ga_window after a load: docs/checkpoints.md has
   the loop. options may be NULL. GA_ERROR_IO: the message has the reason of the system.
   GA_ERROR_CANCELLED.
   GA_SHARD_PARAMETERS: if all ranks give one path, on a file system that all of them see, path is
   an index and each rank writes what it has to a file beside it, "path.1.rank0"; the number changes
   with every save, and the files of the previous save are removed once the index is the new one. If
   each rank gives a path of its own, each writes one file there. Anything between is
   GA_ERROR_INVALID_ARGUMENT. */
GA_API ga_status ga_save(ga_context* ctx, const char* path, const ga_state_options* options);

/* Loads what ga_save has saved, as a whole or not at all: the file is read once to check it, by its
   checksums and against the context, and once more into place. options may be NULL.
   GA_ERROR_INVALID_ARGUMENT: what the file holds is not what the context has (the message lists
   names that are missing, extra, or of another shape or dtype) or other settings, or K is below what
   its window holds. GA_ERROR_FORMAT: the file is damaged, not a state, or of a newer version.
   GA_ERROR_UNSUPPORTED: another number of ranks has saved it within the passes of a layer in WINDOW
   mode. GA_ERROR_IO, GA_ERROR_CANCELLED.
   GA_ERROR_FAULT: the second reading failed, or found other bytes than the first; only
   ga_context_destroy is legal.
   Where parameters are parts of others (ga_param_set_part), or path is the index of several ranks, each
   rank reads its parts out of whatever parts they were saved in, after one more reading that checks
   these. An open window goes on: its weights go from data rank q of the save to data rank q modulo
   data_ranks, and sums of means over R ranks are multiplied by R / data_ranks, which is exact where
   that is a power of two. Keys of random bits stay those of the context then. GA_ERROR_INVALID_ARGUMENT:
   the ranks had brought different numbers of micro-batches, and ranks or parts are others now.
   GA_ERROR_UNSUPPORTED: data-parallel ranks have saved it with open windows; an index comes from
   memory. */
GA_API ga_status ga_load(ga_context* ctx, const char* path, const ga_state_options* options);

/* Saves to memory. *out_size: the bytes that it takes. out: [capacity] bytes; NULL: only *out_size is
   set. GA_ERROR_INVALID_ARGUMENT: capacity is too small; *out_size is set. */
GA_API ga_status ga_save_to_memory(ga_context* ctx, const ga_state_options* options, void* out,
                                   size_t capacity, size_t* out_size);

/* Loads from memory, which must not change meanwhile. data: [size] bytes. Otherwise as ga_load. */
GA_API ga_status ga_load_from_memory(ga_context* ctx, const void* data, size_t size,
                                     const ga_state_options* options);

/* For programs that store state themselves: functions that store, or read, size bytes at an offset.
   They return 0, or another value, which ends the call with GA_ERROR_IO. They run on the calling
   thread and must not use the context. */
typedef int32_t (*ga_write_fn)(void* user, int64_t offset, const void* data, size_t size);
typedef int32_t (*ga_read_fn)(void* user, int64_t offset, void* data, size_t size);

/* As ga_save. Every byte is written once, in ascending order but for the header, at offset 0, which
   comes last. */
GA_API ga_status ga_state_write(ga_context* ctx, ga_write_fn write, void* user,
                                const ga_state_options* options);

/* As ga_load. size: of the whole state in bytes. Most of it is read twice. */
GA_API ga_status ga_state_read(ga_context* ctx, ga_read_fn read, void* user, int64_t size,
                               const ga_state_options* options);

/* The note in a file that was saved. out: [capacity] chars, with a final NUL; may be NULL if capacity
   is 0. *out_size: the chars that it takes, the NUL included; 0: the file has no note.
   GA_ERROR_INVALID_ARGUMENT: capacity is too small; *out_size is set. GA_ERROR_IO,
   GA_ERROR_FORMAT. */
GA_API ga_status ga_state_note(const char* path, char* out, size_t capacity, size_t* out_size);

#ifdef __cplusplus
}
#endif

#endif /* GRADACCUM_STATE_H_ */
