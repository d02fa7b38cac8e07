// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.io.IOException;
import java.io.OutputStream;
import java.lang.ref.Cleaner;
import java.lang.ref.Reference;
import java.nio.Buffer;
import java.nio.ByteBuffer;
import java.nio.channels.SeekableByteChannel;
import java.nio.channels.WritableByteChannel;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.function.Consumer;

/**
 * Adds up the gradients of micro-batches and makes optimizer steps on parameters in the program's
 * own memory.
 *
 * <pre>{@code
 * try (Context context = new Context()) {
 *   Group group = context.addGroup(Optimizer.builder(Optimizer.Kind.ADAMW).lr(3e-4).build());
 *   Param w = context.addParam(group, "fc1.weight", weight, 512, 784);
 *   Param b = context.addParam(group, "fc1.bias", bias, 512);
 *   for (each window) {
 *     for (each micro-batch of the window) {
 *       backward();                           // writes dw and db: means over the micro-batch
 *       context.accumulate(samples, dw, db);
 *     }
 *     context.step();                         // updates weight and bias in place
 *   }
 * }
 * }</pre>
 *
 * <p>Memory: tensors are direct buffers or {@linkplain Tensor#ofAddress addresses}. The context
 * keeps the buffers of parameters reachable until they are bound anew or it is closed, and those of
 * gradients as long as the library reads them, which is to say for the call, but with {@link
 * Config.GradientLife#LIVE}, {@link Config.Nonfinite#DROP_MICRO} and {@link Clip.When#MICRO}. An
 * address is the program's to keep valid for as long.
 *
 * <p>Threads: one thread at a time uses a context. A call while another one runs is an {@link
 * IllegalStateException} and changes nothing, with {@link Config#eager} too, but {@link #close},
 * which waits. A context may move between threads. Different contexts are independent.
 *
 * <p>Every method throws a {@link GradAccumException} if the library refuses the call, an {@link
 * IllegalArgumentException} for memory of the wrong kind or length, an {@link
 * IllegalStateException} once the context is closed, and a {@link NullPointerException} that names
 * the parameter for null where it is not said to be legal. A call that fails has changed nothing,
 * unless the status is {@link Status#FAULT}.
 */
public final class Context implements AutoCloseable {
  private static final Cleaner CLEANER = Cleaner.create();
  private static final int RESULT_FIELDS = StepResult.class.getRecordComponents().length;

  private final Handle handle;
  private final Cleaner.Cleanable cleanable;
  private final Callback log;
  private final Callback done;
  private final List<Param> params = new ArrayList<>();
  private final List<Slot> slots = new ArrayList<>();
  private final long[] result = new long[RESULT_FIELDS];
  private long[] addresses = {};
  private long moves;

  /** Creates a context with the default configuration. */
  public Context() {
    this(Config.builder().build());
  }

  /**
   * Creates a context.
   *
   * @param config its configuration
   * @throws GradAccumException {@link Status#UNSUPPORTED}: the device cannot be used; the message
   *     says why
   */
  public Context(Config config) {
    Check.notNull(config, "config");
    log = config.log() == null ? null : Callback.ofLog(config.log());
    done = config.onParamDone() == null ? null : ofParamDone(config.onParamDone());
    handle =
        new Handle(config, log == null ? 0 : log.relay(), done == null ? 0 : done.relay());
    cleanable = CLEANER.register(this, handle);
    Reference.reachabilityFence(log);
    Reference.reachabilityFence(done);
  }

  private Callback ofParamDone(Consumer<Param> listener) {
    return Callback.ofParamDone(id -> listener.accept(params.get(id)));
  }

  // ---- Calls

  /** Begins a call; every one ends with {@link #exit}. Returns the context of C. */
  long enter() {
    if (done != null && done.isDoneOnThisThread()) {
      throw new IllegalStateException("a callback used the context that it was called for");
    }
    if (!handle.lock.tryLock()) {
      throw new IllegalStateException(
          "the context is in use by a call of another thread; one thread at a time uses a context");
    }
    if (handle.lock.getHoldCount() > 1) {
      handle.lock.unlock();
      throw new IllegalStateException("a callback used the context whose call it was called from");
    }
    if (handle.context == 0) {
      handle.lock.unlock();
      throw new IllegalStateException("the context is closed");
    }
    return handle.context;
  }

  void exit() {
    handle.lock.unlock();
    Reference.reachabilityFence(this);
    if (log != null) {
      log.rethrow();
    }
    if (done != null) {
      done.rethrow();
    }
  }

  /**
   * Frees what the library owns for the context, and lets go of its buffers. Waits for a call of
   * another thread. A second call does nothing.
   */
  @Override
  public void close() {
    if (done != null && done.isDoneOnThisThread()) {
      throw new IllegalStateException("a callback closed the context that it was called for");
    }
    if (handle.lock.isHeldByCurrentThread()) {
      throw new IllegalStateException(
          "a callback closed the context whose call it was called from");
    }
    handle.lock.lock();
    try {
      cleanable.clean();
    } finally {
      exit();
    }
  }

  boolean isClosed() {
    handle.lock.lock();
    try {
      return handle.context == 0;
    } finally {
      handle.lock.unlock();
    }
  }

  void checkOwn(Group group) {
    checkOwn(group.context(), group);
  }

  void checkOwn(Param param) {
    checkOwn(param.context(), param);
  }

  void checkOwn(BatchNorm layer) {
    checkOwn(layer.context(), layer);
  }

  private void checkOwn(Context other, Object what) {
    if (other != this) {
      throw new IllegalArgumentException(what + " belongs to another context");
    }
  }

  Kept kept() {
    return handle.kept;
  }

  Slot slotOf(Param param) {
    for (Slot slot : slots) {
      if (slot.params().contains(param)) {
        return slot;
      }
    }
    throw new IllegalStateException(param + " has no slot");
  }

  // Views of gradients and accumulators live as long as this number stays.
  long moves() {
    return moves;
  }

  void move() {
    ++moves;
  }

  void checkMoves(long then, String what) {
    if (moves != then) {
      throw new IllegalStateException(
          "the " + what + " is no longer alive: the context has moved on since it was handed out");
    }
  }

  void checkHost(String what) {
    if (handle.onDevice) {
      throw new IllegalStateException(
          "the " + what + " is in the memory of a device, which Java cannot read; use address()");
    }
  }

  // ---- Groups

  /**
   * Adds a group: parameters that share an optimizer. Legal while the window is empty.
   *
   * @param optimizer the optimizer and its hyper-parameters
   * @return the group
   * @throws GradAccumException {@link Status#UNSUPPORTED}: no such flavor, or MUON without a
   *     library for matrix products
   */
  public Group addGroup(Optimizer optimizer) {
    Check.notNull(optimizer, "optimizer");
    long c = enter();
    try (ga_optimizer fields = new ga_optimizer(0, 0)) {
      optimizer.write(fields);
      int[] id = new int[1];
      Raw.ga_group_add(c, fields, id);
      return new Group(this, id[0]);
    } finally {
      exit();
    }
  }

  /**
   * The number of groups.
   *
   * @return their number
   */
  public int groupCount() {
    long c = enter();
    try {
      int[] count = new int[1];
      Raw.ga_group_count(c, count);
      return count[0];
    } finally {
      exit();
    }
  }

  // ---- Parameters

  /**
   * Adds a parameter. Legal while the window is empty.
   *
   * @param group its group
   * @param name not empty, unique in the context
   * @param data the tensor, read and written in place by {@link #step}: a direct {@link
   *     java.nio.FloatBuffer} or {@link java.nio.DoubleBuffer}. {@link Tensor} has other dtypes
   * @param shape its dimensions, row-major; none for a scalar
   * @return the parameter
   */
  public Param addParam(Group group, String name, Buffer data, long... shape) {
    return addParam(group, name, Tensor.of("data", data), null, shape);
  }

  /**
   * Adds a parameter. Legal while the window is empty.
   *
   * @param group its group
   * @param name not empty, unique in the context
   * @param data the tensor, read and written in place by {@link #step}
   * @param options may be null
   * @param shape its dimensions, row-major; none for a scalar
   * @return the parameter
   * @throws GradAccumException {@link Status#UNSUPPORTED}: dtypes or options that do not go
   *     together, or not with the optimizer
   */
  public Param addParam(
      Group group, String name, Tensor data, ParamOptions options, long... shape) {
    checkOwn(Check.notNull(group, "group"));
    Check.notNull(name, "name");
    Check.notNull(data, "data");
    Check.notNull(shape, "shape");
    long c = enter();
    try (ga_param_options fields = options == null ? null : new ga_param_options()) {
      if (options != null) {
        options.write(fields);
      }
      String role = "data of parameter \"" + name + "\"";
      Dtype dtype = data.dtype(role);
      long address =
          data.address(dtype, Tensor.elements(role, null, shape), true, role, null);
      int[] id = new int[1];
      Raw.ga_param_add(c, group.id(), name, address, dtype.value(), shape, fields, id);
      Param param = new Param(this, c, id[0], data.buffer());
      params.add(param);
      slots.add(new Slot(List.of(param), false));
      return param;
    } finally {
      exit();
      Reference.reachabilityFence(data);
    }
  }

  /**
   * Adds the parameters in one block of memory, which may have gaps: all of them or none. The block
   * has one gradient in {@link #accumulate}: a block with the same offsets.
   *
   * @param data the block: a direct {@link java.nio.FloatBuffer} or {@link java.nio.DoubleBuffer}
   * @param entries the parameters
   * @return the parameters
   */
  public List<Param> addFlat(Buffer data, List<FlatEntry> entries) {
    return addFlat(Tensor.of("data", data), null, entries);
  }

  /**
   * Adds the parameters in one block of memory, which may have gaps: all of them or none. The block
   * has one gradient in {@link #accumulate}: a block with the same offsets.
   *
   * @param data the block
   * @param options of the entries that have none of their own; may be null
   * @param entries the parameters
   * @return the parameters
   */
  public List<Param> addFlat(Tensor data, ParamOptions options, List<FlatEntry> entries) {
    Check.notNull(data, "data");
    Check.notNull(entries, "entries");
    long c = enter();
    List<AutoCloseable> structs = new ArrayList<>();
    try {
      Dtype dtype = data.dtype("data");
      long end = 0;
      long[] proxies = new long[entries.size()];
      for (int i = 0; i < proxies.length; ++i) {
        FlatEntry entry = Check.notNull(entries.get(i), "entries", i);
        checkOwn(entry.group());
        ga_flat_entry fields = new ga_flat_entry();
        structs.add(fields);
        proxies[i] = ga_flat_entry.getCPtr(fields);
        fields.set_name(entry.name());
        fields.setGroup(entry.group().id());
        fields.set_shape(entry.shape());
        fields.setOffset(entry.offset());
        if (entry.options() != null) {
          ga_param_options own = new ga_param_options();
          structs.add(own);
          entry.options().write(own);
          fields.setOptions(own);
        }
        String role = "data of parameter \"" + entry.name() + "\"";
        long count = Tensor.elements(role, null, entry.shape());
        if (entry.offset() < 0 || entry.offset() > Long.MAX_VALUE - count) {
          throw Tensor.refuse(role, null, "offset was " + entry.offset());
        }
        end = Math.max(end, entry.offset() + count);
      }
      ga_param_options fields = null;
      if (options != null) {
        fields = new ga_param_options();
        structs.add(fields);
        options.write(fields);
      }
      long address =
          data.address(dtype, Math.max(end, data.elements(dtype)), true, "data", null);
      int[] first = new int[1];
      Raw.ga_params_add_flat(c, address, dtype.value(), proxies, fields, first);
      List<Param> added = new ArrayList<>();
      for (int i = 0; i < proxies.length; ++i) {
        added.add(new Param(this, c, first[0] + i, data.buffer()));
      }
      params.addAll(added);
      slots.add(new Slot(added, true));
      return Collections.unmodifiableList(added);
    } finally {
      closeAll(structs);
      exit();
      Reference.reachabilityFence(data);
    }
  }

  private static void closeAll(List<AutoCloseable> structs) {
    for (AutoCloseable struct : structs) {
      try {
        struct.close();
      } catch (Exception e) {
        throw new AssertionError(e);  // a proxy does not throw
      }
    }
  }

  /**
   * The number of parameters, removed ones included.
   *
   * @return their number
   */
  public int paramCount() {
    long c = enter();
    try {
      int[] count = new int[1];
      Raw.ga_param_count(c, count);
      return count[0];
    } finally {
      exit();
    }
  }

  /**
   * The parameter of a name.
   *
   * @param name the name
   * @return the parameter
   * @throws GradAccumException {@link Status#INVALID_ARGUMENT}: there is none
   */
  public Param findParam(String name) {
    Check.notNull(name, "name");
    long c = enter();
    try {
      int[] id = new int[1];
      Raw.ga_param_find(c, name, id);
      return params.get(id[0]);
    } finally {
      exit();
    }
  }

  /**
   * How many gradients {@link #accumulate} takes: one for each parameter and each flat block that
   * was added, also of parameters that were removed.
   *
   * @return their number
   */
  public long slotCount() {
    long c = enter();
    try {
      long[] count = new long[1];
      Raw.ga_slot_count(c, count);
      return count[0];
    } finally {
      exit();
    }
  }

  // ---- Accumulate and step

  /**
   * Adds a micro-batch to the window.
   *
   * @param weight samples, tokens, or 1; finite, &gt;= 0
   * @param gradients one for each parameter and flat block in the order they were added, direct
   *     buffers of the shape and gradient dtype of their parameter; null: none in this micro-batch
   * @throws GradAccumException {@link Status#WINDOW_FULL}: {@link #step} must be called next
   */
  public void accumulate(double weight, Buffer... gradients) {
    accumulate(null, weight, gradients);
  }

  /**
   * Adds a micro-batch to the window.
   *
   * @param options may be null
   * @param weight samples, tokens, or 1; finite, &gt;= 0
   * @param gradients one for each parameter and flat block in the order they were added; null: none
   *     in this micro-batch
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
   * @param weight samples, tokens, or 1; finite, &gt;= 0
   * @param gradients one for each parameter and flat block in the order they were added; null: none
   *     in this micro-batch
   */
  public void accumulate(double weight, Tensor... gradients) {
    accumulate(null, weight, gradients);
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
   * @param weight samples, tokens, or 1; finite, &gt;= 0
   * @param gradients one for each parameter and flat block in the order they were added, whose
   *     gradients are F32; null: none in this micro-batch
   */
  public void accumulate(double weight, float[]... gradients) {
    accumulate(null, weight, gradients);
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
    long c = enter();
    try {
      Raw.ga_micro_begin(c, index, weight, micro(options));
      move();
      kept().opened(c);
      return new MicroBatch(this);
    } finally {
      exit();
    }
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
    long c = enter();
    try {
      long[] ids = new long[params.size()];
      for (int i = 0; i < ids.length; ++i) {
        Param param = Check.notNull(params.get(i), "params", i);
        checkOwn(param);
        ids[i] = param.id();
      }
      Raw.ga_params_ready(c, ids);
    } finally {
      exit();
    }
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
    long c = enter();
    try {
      Raw.ga_step_result_get(c, window, wait ? 1 : 0, handle.result);
      return StepResult.read(handle.result);
    } finally {
      exit();
    }
  }

  /**
   * The state of the window.
   *
   * @return its micro-batches, weight and so on
   */
  public Window window() {
    long c = enter();
    try (ga_window_info fields = new ga_window_info()) {
      Raw.ga_window(c, fields);
      return Window.read(fields);
    } finally {
      exit();
    }
  }

  /** Drops the window, an open micro-batch included. */
  public void discard() {
    long c = enter();
    try {
      Raw.ga_discard(c);
      kept().release(c);
      move();
    } finally {
      exit();
    }
  }

  /**
   * Sets K of the windows to come. Between windows, and only without a schedule of K.
   *
   * @param accumSteps micro-batches of a full window; 0: any number
   */
  public void setAccumSteps(long accumSteps) {
    long c = enter();
    try {
      Raw.ga_context_set_accum_steps(c, accumSteps);
    } finally {
      exit();
    }
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
          "there are "
              + fromSteps.length
              + " fromSteps and "
              + accumSteps.length
              + " accumSteps, expected as many");
    }
    long c = enter();
    try {
      Raw.ga_context_set_accum_schedule(c, fromSteps, accumSteps, fromSteps.length);
    } finally {
      exit();
    }
  }

  /**
   * Sets the number of applied steps, for a run that goes on from elsewhere. Between windows.
   *
   * @param steps &gt;= 0
   */
  public void setSteps(long steps) {
    long c = enter();
    try {
      Raw.ga_context_set_steps(c, steps);
    } finally {
      exit();
    }
  }

  // ---- Clipping, loss scale, EMA

  /**
   * Clips the gradients of all groups without a clip of their own.
   *
   * @param clip the clip
   */
  public void setClip(Clip clip) {
    Check.notNull(clip, "clip");
    long c = enter();
    try (ga_clip fields = new ga_clip()) {
      clip.write(fields);
      Raw.ga_context_set_clip(c, fields);
    } finally {
      exit();
    }
  }

  /** Clips no more, but groups with a clip of their own. */
  public void clearClip() {
    long c = enter();
    try {
      Raw.ga_context_set_clip(c, null);
    } finally {
      exit();
    }
  }

  /**
   * The clip of the context, as it was set or loaded.
   *
   * @return the clip; the defaults if there is none
   */
  public Clip clip() {
    long c = enter();
    try (ga_clip fields = new ga_clip()) {
      Raw.ga_context_clip(c, fields);
      return Clip.read(fields).build();
    } finally {
      exit();
    }
  }

  /**
   * Gives the context a dynamic loss scale, in place of {@link Config#lossScale}. Between windows.
   *
   * @param scaler how the scale moves
   */
  public void setLossScaler(LossScaler scaler) {
    Check.notNull(scaler, "scaler");
    long c = enter();
    try (ga_loss_scaler fields = new ga_loss_scaler()) {
      scaler.write(fields);
      Raw.ga_context_set_loss_scaler(c, fields);
    } finally {
      exit();
    }
  }

  /** Removes the dynamic loss scale. Between windows. */
  public void clearLossScaler() {
    long c = enter();
    try {
      Raw.ga_context_set_loss_scaler(c, null);
    } finally {
      exit();
    }
  }

  /**
   * The factor that the program multiplies its loss by until the next step.
   *
   * @return the factor
   */
  public double lossScale() {
    long c = enter();
    try {
      double[] scale = new double[1];
      Raw.ga_loss_scale(c, scale, null);
      return scale[0];
    } finally {
      exit();
    }
  }

  /**
   * The address of that factor, a float in the memory of the device, for work on the stream.
   *
   * @return the address
   * @throws GradAccumException {@link Status#INVALID_ARGUMENT}: the context is on the CPU
   */
  public long deviceLossScale() {
    long c = enter();
    try {
      long[] address = new long[1];
      Raw.ga_loss_scale(c, null, address);
      return address[0];
    } finally {
      exit();
    }
  }

  /**
   * Keeps a moving average of every parameter. Legal until the first contribution of all.
   *
   * @param ema the average
   */
  public void setEma(Ema ema) {
    Check.notNull(ema, "ema");
    long c = enter();
    try (ga_ema fields = new ga_ema()) {
      ema.write(fields);
      Raw.ga_context_set_ema(c, fields);
    } finally {
      exit();
    }
  }

  /**
   * Makes the context one of the communicator's ranks. Every rank calls it, between windows, with
   * the same groups, parameters and options; the first difference is named in an exception. From
   * then on every rank calls {@link #step}, {@link #discard}, and what saves and loads, in the same
   * order; with {@link CommunicatorOptions.Shard#OPTIMIZER} also what reads and writes state and
   * moving averages. docs/devices.md has the rest.
   *
   * @param communicator null: the context is alone again
   * @param options may be null
   * @throws GradAccumException {@link Status#COMMUNICATION}: ranks differ, or did not come; {@link
   *     Status#UNSUPPORTED}: a context on a device, {@link CommunicatorOptions.Adder#TRANSPORT}
   *     with local ranks; {@link Status#INVALID_STATE}: it is too late to shard
   */
  public void setCommunicator(Communicator communicator, CommunicatorOptions options) {
    long c = enter();
    try (ga_comm_options fields = options == null ? null : new ga_comm_options()) {
      if (options != null) {
        options.write(fields);
      }
      if (communicator == null) {
        Raw.ga_context_set_comm(c, 0, fields);
        return;
      }
      long comm = communicator.enter();
      try {
        Raw.ga_context_set_comm(c, comm, fields);
      } finally {
        communicator.exit();
      }
    } finally {
      exit();
    }
  }

  /** Keeps no moving averages. Legal until the first contribution of all. */
  public void clearEma() {
    long c = enter();
    try {
      Raw.ga_context_set_ema(c, null);
    } finally {
      exit();
    }
  }

  /**
   * Exchanges parameters and their moving averages, to evaluate with the averages, or takes that
   * back. Between windows; with {@link CommunicatorOptions.Shard#OPTIMIZER}, on every rank.
   *
   * @param on true to exchange, false to take it back
   */
  public void swapEma(boolean on) {
    long c = enter();
    try {
      Raw.ga_ema_swap(c, on ? 1 : 0);
    } finally {
      exit();
    }
  }

  /**
   * Exchanges parameters and their moving averages until the scope is closed. Between windows; with
   * {@link CommunicatorOptions.Shard#OPTIMIZER}, on every rank, and so is the end of the scope.
   *
   * @return the scope
   */
  public EmaScope swapEma() {
    swapEma(true);
    return new EmaScope(this);
  }

  // ---- Batch normalisation

  /**
   * Adds a layer of batch normalisation with torch's defaults. Between windows.
   *
   * @param name unique among layers
   * @param channels &gt;= 1
   * @param gamma a parameter [channels]; null: none, as with 1
   * @param beta a parameter [channels]; null: none, as with 0
   * @return the layer
   */
  public BatchNorm addBatchNorm(String name, long channels, Param gamma, Param beta) {
    return addBatchNorm(
        name, channels, gamma, beta, BatchNormOptions.builder(Flavor.TORCH).build());
  }

  /**
   * Adds a layer of batch normalisation. Between windows.
   *
   * @param name unique among layers
   * @param channels &gt;= 1
   * @param gamma a parameter [channels]; null: none, as with 1
   * @param beta a parameter [channels]; null: none, as with 0
   * @param options mode, layout and so on
   * @return the layer
   */
  public BatchNorm addBatchNorm(
      String name, long channels, Param gamma, Param beta, BatchNormOptions options) {
    Check.notNull(name, "name");
    Check.notNull(options, "options");
    for (Param param : new Param[] {gamma, beta}) {
      if (param != null) {
        checkOwn(param);
      }
    }
    long c = enter();
    try (ga_bn_options fields = new ga_bn_options(Flavor.TORCH.value())) {
      options.write(fields);
      int[] id = new int[1];
      Raw.ga_bn_add(
          c,
          name,
          channels,
          gamma == null ? -1 : gamma.id(),
          beta == null ? -1 : beta.id(),
          fields,
          id);
      return new BatchNorm(this, c, id[0]);
    } finally {
      exit();
    }
  }

  /**
   * The number of layers of batch normalisation.
   *
   * @return their number
   */
  public int batchNormCount() {
    long c = enter();
    try {
      int[] count = new int[1];
      Raw.ga_bn_count(c, count);
      return count[0];
    } finally {
      exit();
    }
  }

  /**
   * The layer of batch normalisation of a name.
   *
   * @param name the name
   * @return the layer
   * @throws GradAccumException {@link Status#INVALID_ARGUMENT}: there is none
   */
  public BatchNorm findBatchNorm(String name) {
    Check.notNull(name, "name");
    long c = enter();
    try {
      int[] id = new int[1];
      Raw.ga_bn_find(c, name, id);
      return new BatchNorm(this, c, id[0]);
    } finally {
      exit();
    }
  }

  // ---- State on disk

  /**
   * Saves the state of the run to a file, as a whole or not at all.
   *
   * @param path the file
   */
  public void save(Path path) {
    save(path, StateOptions.builder().build());
  }

  /**
   * Saves the state of the run to a file, as a whole or not at all.
   *
   * @param path the file
   * @param options what is saved
   * @throws GradAccumException {@link Status#IO}: the message has the reason of the system
   */
  public void save(Path path, StateOptions options) {
    Check.notNull(path, "path");
    Check.notNull(options, "options");
    long c = enter();
    try (State state = new State(options)) {
      state.call(fields -> Raw.ga_save(c, path.toString(), fields));
    } finally {
      exit();
    }
  }

  /**
   * Loads what was saved to a file, as a whole or not at all. While the window is empty.
   *
   * @param path the file
   */
  public void load(Path path) {
    load(path, StateOptions.builder().build());
  }

  /**
   * Loads what was saved to a file, as a whole or not at all. While the window is empty.
   *
   * @param path the file
   * @param options what is loaded, and what about settings that differ
   * @throws GradAccumException {@link Status#INVALID_ARGUMENT}: what the file holds is not what the
   *     context has; {@link Status#FORMAT}: the file is damaged; {@link Status#IO}
   */
  public void load(Path path, StateOptions options) {
    Check.notNull(path, "path");
    Check.notNull(options, "options");
    long c = enter();
    try (State state = new State(options)) {
      state.call(fields -> Raw.ga_load(c, path.toString(), fields));
      move();
    } finally {
      exit();
    }
  }

  /**
   * Saves the state of the run to memory.
   *
   * @param options what is saved
   * @return a direct buffer with the bytes
   */
  public ByteBuffer saveToBuffer(StateOptions options) {
    Check.notNull(options, "options");
    long c = enter();
    try (State state = new State(options)) {
      long[] size = new long[1];
      state.call(fields -> Raw.ga_save_to_memory(c, fields, 0, 0, size));
      if (size[0] > Integer.MAX_VALUE) {
        throw new IllegalStateException(
            "the state takes " + size[0] + " bytes, more than a buffer; save it to a channel");
      }
      ByteBuffer bytes = ByteBuffer.allocateDirect((int) size[0]);
      long address = Raw.buffer_address(bytes);
      state.call(fields -> Raw.ga_save_to_memory(c, fields, address, bytes.capacity(), size));
      return bytes;
    } finally {
      exit();
    }
  }

  /**
   * Loads the state of a run from memory. While the window is empty.
   *
   * @param bytes a direct buffer, read from its position to its limit, which do not move
   * @param options what is loaded, and what about settings that differ
   */
  public void load(ByteBuffer bytes, StateOptions options) {
    Check.notNull(bytes, "bytes");
    Check.notNull(options, "options");
    if (!bytes.isDirect()) {
      throw Tensor.refuse(
          "bytes", null, "the ByteBuffer is on the heap of Java, expected a direct buffer");
    }
    long c = enter();
    try (State state = new State(options)) {
      long address = Raw.buffer_address(bytes) + bytes.position();
      state.call(fields -> Raw.ga_load_from_memory(c, address, bytes.remaining(), fields));
      move();
    } finally {
      exit();
      Reference.reachabilityFence(bytes);
    }
  }

  /**
   * Saves the state of the run to a channel, such as a {@link java.nio.channels.FileChannel}, from
   * its position on.
   *
   * @param channel where to write
   * @param options what is saved
   * @throws IOException that the channel has thrown
   */
  public void save(SeekableByteChannel channel, StateOptions options) throws IOException {
    Check.notNull(channel, "channel");
    Check.notNull(options, "options");
    long start = channel.position();
    write(
        options,
        (offset, bytes) -> {
          channel.position(start + offset);
          writeAll(channel, bytes);
        });
  }

  /**
   * Saves the state of the run to a stream. The library brings the header last, so it is made to
   * write the state twice, the first time to find the header out.
   *
   * @param stream where to write; it is not closed
   * @param options what is saved
   * @throws IOException that the stream has thrown
   */
  public void save(OutputStream stream, StateOptions options) throws IOException {
    Check.notNull(stream, "stream");
    Check.notNull(options, "options");
    Header header = new Header();
    write(options, header::take);
    byte[] piece = new byte[1 << 16];
    writeAll(stream, ByteBuffer.wrap(header.bytes()), piece);
    if (header.size() == 0) {
      return;  // there is nothing else
    }
    write(
        options,
        (offset, bytes) -> {
          if (offset >= header.size()) {
            writeAll(stream, bytes, piece);
          }
        });
  }

  private static void writeAll(WritableByteChannel channel, ByteBuffer bytes) throws IOException {
    while (bytes.hasRemaining()) {
      channel.write(bytes);
    }
  }

  private static void writeAll(OutputStream stream, ByteBuffer bytes, byte[] piece)
      throws IOException {
    while (bytes.hasRemaining()) {
      int size = Math.min(piece.length, bytes.remaining());
      bytes.get(piece, 0, size);
      stream.write(piece, 0, size);
    }
  }

  private void write(StateOptions options, Callback.Transfer transfer) throws IOException {
    long c = enter();
    try (State state = new State(options)) {
      state.transfer(
          transfer,
          (fields, relay) -> Raw.ga_state_write(c, Raw.write_function(), relay, fields));
    } finally {
      exit();
    }
  }

  /**
   * Loads the state of a run from a channel, from its position to its end. While the window is
   * empty.
   *
   * @param channel where to read
   * @param options what is loaded, and what about settings that differ
   * @throws IOException that the channel has thrown
   */
  public void load(SeekableByteChannel channel, StateOptions options) throws IOException {
    Check.notNull(channel, "channel");
    Check.notNull(options, "options");
    long start = channel.position();
    long size = channel.size() - start;
    long c = enter();
    try (State state = new State(options)) {
      state.transfer(
          (offset, bytes) -> {
            channel.position(start + offset);
            while (bytes.hasRemaining()) {
              if (channel.read(bytes) < 0) {
                throw new IOException(
                    "the channel ended after " + (channel.size() - start) + " bytes");
              }
            }
          },
          (fields, relay) -> Raw.ga_state_read(c, Raw.read_function(), relay, size, fields));
      move();
    } finally {
      exit();
    }
  }

  // ---- Memory and devices

  /** Allocates the library's arrays, which the first contribution would do otherwise. */
  public void prepare() {
    long c = enter();
    try {
      Raw.ga_prepare(c);
    } finally {
      exit();
    }
  }

  /**
   * Bytes that the library owns for the context.
   *
   * @return bytes by purpose
   */
  public MemoryUse memory() {
    long c = enter();
    try (ga_memory fields = new ga_memory()) {
      Raw.ga_context_memory(c, fields);
      return MemoryUse.read(fields);
    } finally {
      exit();
    }
  }

  /**
   * Gives the context another stream in place of that of its {@link Config}: later work is queued there, behind all
   * that was queued before. Waits for nothing; also legal within a window.
   *
   * @param stream the address that the program's {@code cudaStream_t} is, of the device and driver context of the
   *     stream before it; 0: the legacy default stream
   * @throws GradAccumException {@link Status#INVALID_STATE}: one of the two streams is being captured, and the other
   *     is no part of that capture; {@link Status#UNSUPPORTED}: the context is on the CPU
   */
  public void setStream(long stream) {
    long c = enter();
    try {
      Raw.ga_context_set_stream(c, stream);
    } finally {
      exit();
    }
  }

  /**
   * Waits until all work of the context is done.
   *
   * @throws GradAccumException {@link Status#FAULT}: some of it failed on the device
   */
  public void synchronize() {
    long c = enter();
    try {
      Raw.ga_synchronize(c);
    } finally {
      exit();
    }
  }
}
