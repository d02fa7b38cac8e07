// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.lang.ref.Reference;
import java.nio.Buffer;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;

/** The window: its gradients, its length and its step. */
abstract class ContextWindow extends ContextState {
  final List<Param> params = new ArrayList<>();
  final List<Slot> slots = new ArrayList<>();
  private final long[] result = new long[StepResult.WORDS];
  private long[] addresses = {};

  ContextWindow(Config config) {
    super(config);
  }

  @Override
  Param param(int id) {
    return params.get(id);
  }

  Slot slotOf(Param param) {
    for (Slot slot : slots) {
      if (slot.params().contains(param)) {
        return slot;
      }
    }
    throw new IllegalStateException(param + " has no slot");
  }

  /**
   * Adds a micro-batch to the window.
   *
   * @param options may be null
   * @param weight samples, tokens, or 1; finite, &gt;= 0
   * @param gradients one for each parameter and flat block in the order they were added, direct
   *     buffers of the shape and gradient dtype of their parameter; null: none in this micro-batch
   * @throws GradAccumException {@link Status#WINDOW_FULL}: {@link #step} must be called next
   */
  public void accumulate(MicroOptions options, double weight, Buffer... gradients) {
    Check.notNull(gradients, "gradients");
    long c = enter();
    try {
      long[] to = addresses(gradients.length);
      for (int slot = 0; slot < gradients.length; ++slot) {
        Buffer gradient = gradients[slot];
        to[slot] = gradient == null || skips(slot) ? 0 : slots.get(slot).address(gradient);
      }
      accumulate(c, to, gradients, false, weight, options);
    } finally {
      exit();
      Reference.reachabilityFence(gradients);
    }
  }

  /**
   * Adds a micro-batch to the window, from a list.
   *
   * @param weight samples, tokens, or 1; finite, &gt;= 0
   * @param gradients one for each parameter and flat block in the order they were added; null: none
   *     in this micro-batch
   */
  public void accumulate(double weight, List<? extends Buffer> gradients) {
    Check.notNull(gradients, "gradients");
    accumulate(null, weight, gradients.toArray(new Buffer[0]));
  }

  /**
   * Adds a micro-batch to the window, by addresses too.
   *
   * @param options may be null
   * @param weight samples, tokens, or 1; finite, &gt;= 0
   * @param gradients one for each parameter and flat block in the order they were added; null: none
   *     in this micro-batch
   */
  public void accumulate(MicroOptions options, double weight, Tensor... gradients) {
    Check.notNull(gradients, "gradients");
    long c = enter();
    try {
      long[] to = addresses(gradients.length);
      for (int slot = 0; slot < gradients.length; ++slot) {
        Tensor gradient = gradients[slot];
        to[slot] = gradient == null || skips(slot) ? 0 : slots.get(slot).address(gradient);
      }
      accumulate(c, to, gradients, false, weight, options);
    } finally {
      exit();
      Reference.reachabilityFence(gradients);
    }
  }

  /**
   * Adds a micro-batch to the window, from arrays, which are copied through buffers of the
   * context's own, as large as all gradients.
   *
   * @param options may be null
   * @param weight samples, tokens, or 1; finite, &gt;= 0
   * @param gradients one for each parameter and flat block in the order they were added, whose
   *     gradients are F32; null: none in this micro-batch
   */
  public void accumulate(MicroOptions options, double weight, float[]... gradients) {
    Check.notNull(gradients, "gradients");
    long c = enter();
    try {
      long[] to = addresses(gradients.length);
      ByteBuffer[] copies = new ByteBuffer[gradients.length];
      for (int slot = 0; slot < gradients.length; ++slot) {
        if (gradients[slot] == null || skips(slot)) {
          to[slot] = 0;
        } else {
          copies[slot] = kept().copy(gradients[slot]);
          to[slot] = slots.get(slot).addressOfFloats(copies[slot]);
        }
      }
      accumulate(c, to, copies, true, weight, options);
    } finally {
      exit();
    }
  }

  private void accumulate(
      long c,
      long[] to,
      Object[] memory,
      boolean areCopies,
      double weight,
      MicroOptions options) {
    Raw.ga_accumulate(c, to, weight, micro(options));
    kept().addedAll(c, memory, areCopies);
    move();
  }

  // The library refuses another number of gradients than there are slots.
  private boolean skips(int slot) {
    return slot >= slots.size();
  }

  private long[] addresses(int count) {
    if (addresses.length != count) {
      addresses = new long[count];
    }
    return addresses;
  }

  private ga_micro_options micro(MicroOptions options) {
    if (options == null) {
      return null;
    }
    options.write(handle.micro);
    return handle.micro;
  }

  /**
   * Opens the next micro-batch of the window, whose gradients come by part.
   *
   * @param weight samples, tokens, or 1; finite, &gt;= 0
   * @return the micro-batch
   * @throws GradAccumException {@link Status#WINDOW_FULL}: {@link #step} must be called next
   */
  public MicroBatch beginMicroBatch(double weight) {
    return beginMicroBatch(-1, weight, null);
  }

  /**
   * Opens a micro-batch of the window, whose gradients come by part, or opens it again.
   *
   * @param index 0, 1, 2, ...; -1: the next one
   * @param weight samples, tokens, or 1; finite, &gt;= 0
   * @param options may be null
   * @return the micro-batch
   */
  public MicroBatch beginMicroBatch(long index, double weight, MicroOptions options) {
    return call(c -> {
      Raw.ga_micro_begin(c, index, weight, micro(options));
      move();
      kept().opened(c);
      return new MicroBatch(this);
    });
  }

  /**
   * Tells that nothing more comes to these parameters in this window: contributions to them are
   * refused until it has ended. With {@link Config#eager} their update begins as soon as the last
   * micro-batch has begun; {@link #step} makes those that are left, with the same bits. Parameters
   * that are updated in place ({@link Config.Nonfinite#IGNORE}, and no {@link Clip.Scope#GLOBAL})
   * leave no way but {@link #step}: to discard the window, to set an option and to read or save
   * state are refused.
   *
   * <p>With {@link CommunicatorOptions#overlap} their gradients are exchanged by a thread of the
   * library, as soon as the last micro-batch has begun, while the program goes on; {@link #step}
   * exchanges what is left, with the same bits. Ranks need not call it alike.
   *
   * @param params any number of the context's parameters
   * @throws GradAccumException {@link Status#INVALID_STATE}: the window is invalid, or the
   *     accumulator of one is acquired
   */
  public void ready(Param... params) {
    ready(Arrays.asList(Check.notNull(params, "params")));
  }

  /**
   * Tells that nothing more comes to these parameters in this window, as {@link #ready(Param...)}
   * does.
   *
   * @param params any number of the context's parameters
   */
  public void ready(List<Param> params) {
    Check.notNull(params, "params");
    run(c -> {
      long[] ids = new long[params.size()];
      for (int i = 0; i < ids.length; ++i) {
        Param param = Check.notNull(params.get(i), "params", i);
        checkOwn(param);
        ids[i] = param.id();
      }
      Raw.ga_params_ready(c, ids);
    });
  }

  /**
   * Ends the window: averages, checks and clips its gradient, and updates state and parameters in
   * place. An empty window is legal and skipped.
   *
   * @return whether the step was applied, the gradient norm and more
   * @throws GradAccumException {@link Status#NONFINITE}: under {@link Config.Nonfinite#FAIL};
   *     {@link #discard} must be called next
   */
  public StepResult step() {
    long c = enter();
    try {
      Raw.ga_step(c, handle.result);
      kept().release(c);
      move();
      handle.result.copy(result);
      return StepResult.of(result);
    } finally {
      exit();
    }
  }

  /**
   * The result of a window. The last 64 are kept.
   *
   * @param window its number in {@link StepResult#windows}; 0: the last one
   * @param wait whether to wait for a device; else the outcome may be pending
   * @return the result
   */
  public StepResult stepResult(long window, boolean wait) {
    return call(c -> {
      Raw.ga_step_result_get(c, window, wait ? 1 : 0, handle.result);
      return StepResult.read(handle.result);
    });
  }

  /** Drops the window, an open micro-batch included. */
  public void discard() {
    run(c -> {
      Raw.ga_discard(c);
      kept().release(c);
      move();
    });
  }

  /**
   * Makes K a function of applied steps: from applied step {@code fromSteps[i]} on, K is {@code
   * accumSteps[i]}. Empty arrays remove the schedule. Between windows.
   *
   * @param fromSteps ascending, the first 0
   * @param accumSteps as many; 0: any number of micro-batches
   */
  public void setAccumSchedule(long[] fromSteps, long[] accumSteps) {
    Check.notNull(fromSteps, "fromSteps");
    Check.notNull(accumSteps, "accumSteps");
    if (fromSteps.length != accumSteps.length) {
      throw new IllegalArgumentException(
          "there are %s fromSteps and %s accumSteps, expected as many"
              .formatted(fromSteps.length, accumSteps.length));
    }
    run(c -> Raw.ga_context_set_accum_schedule(c, fromSteps, accumSteps, fromSteps.length));
  }
}
