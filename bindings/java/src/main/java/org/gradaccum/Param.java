// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.nio.Buffer;
import java.util.ArrayList;
import java.util.List;

/** A parameter. Made by {@link Context#addParam} and {@link Context#addFlat}. */
public final class Param extends ParamMembers {
  // What never changes, as the library describes it.
  private final ParamInfo info;

  private boolean removed;

  // Within a call of the context c.
  Param(Context context, long c, int id, Buffer data) {
    super(context, id);
    this.info = describe(c);
    context.kept().setParameter(id, data);
  }

  private ParamInfo describe(long c) {
    try (ga_param_info fields = new ga_param_info()) {
      Raw.ga_param_describe(c, id, fields);
      return ParamInfo.read(fields);
    }
  }

  /**
   * The context of the parameter.
   *
   * @return the context
   */
  public Context context() {
    return context;
  }

  /**
   * The name of the parameter.
   *
   * @return the name
   */
  public String name() {
    return info.name();
  }

  Dtype gradientDtype() {
    return info.gradientDtype();
  }

  long count() {
    return info.count();
  }

  long offset() {
    return info.offset();
  }

  List<Long> shape() {
    return info.shape();
  }

  boolean isRemoved() {
    return removed;
  }

  /**
   * What the library knows of the parameter.
   *
   * @return its name, shape, dtypes and so on, as they are now
   */
  public ParamInfo info() {
    return context.call(c -> describe(c));
  }

  /**
   * Tells that the parameter has moved: the tensor holds its values now. Between windows.
   *
   * @param data as many elements; a buffer is kept reachable until the parameter moves again or the
   *     context is closed
   */
  public void bind(Tensor data) {
    Check.notNull(data, "data");
    context.run(c -> {
      Raw.ga_param_bind(c, id, data.address(info.dtype(), info.count(), true, "data", this));
      context.kept().setParameter(id, data.buffer());
    }, data);
  }

  /**
   * Says where the parameter lies in one that ranks have in parts, with {@link
   * CommunicatorOptions.Shard#PARAMETERS}. Between windows.
   *
   * @param wholeShape the shape of the whole, as many numbers as this part has axes
   * @param first where this part begins, on each axis
   * @param copies how many ranks have the same part; &gt;= 1
   */
  public void setPart(long[] wholeShape, long[] first, int copies) {
    Check.notNull(wholeShape, "wholeShape");
    Check.notNull(first, "first");
    if (wholeShape.length != shape().size() || first.length != shape().size()) {
      throw new IllegalArgumentException(
          "the parameter has %s axes, but wholeShape has %s numbers and first %s"
              .formatted(shape().size(), wholeShape.length, first.length));
    }
    context.run(c -> Raw.ga_param_set_part(c, id, wholeShape, first, copies));
  }

  /** Removes the parameter: the library does not touch its memory any more. Between windows. */
  public void remove() {
    context.run(c -> {
      Raw.ga_param_remove(c, id);
      removed = true;
      context.kept().removeParameter(id);
      context.slotOf(this).update();
    });
  }

  /**
   * The arrays of state that the library keeps for the parameter, or will keep once it is not
   * frozen.
   *
   * @return their names, dtypes and sizes
   */
  public List<StateInfo> state() {
    return context.call(c -> state(c));
  }

  private List<StateInfo> state(long c) {
    int[] count = new int[1];
    Raw.ga_state_count(c, id, count);
    List<StateInfo> arrays = new ArrayList<>();
    try (ga_state_info fields = new ga_state_info()) {
      for (int i = 0; i < count[0]; ++i) {
        Raw.ga_state_describe(c, id, i, fields);
        arrays.add(StateInfo.read(fields));
      }
    }
    return arrays;
  }

  /**
   * Reads an array of state whole. Between windows; with {@link
   * CommunicatorOptions.Shard#OPTIMIZER}, on every rank. State under {@link Dtype#STATE_8BIT} is
   * read as codes, bytes of {@link Dtype#U8}, or as the numbers that these stand for, of {@link
   * Dtype#F32}.
   *
   * @param name such as "exp_avg"
   * @param out as many elements as {@link #state} says, in the host's memory; where these are codes,
   *     as many numbers of F32, such as a FloatBuffer has, will do too
   */
  public void getState(String name, Tensor out) {
    Check.notNull(name, "name");
    Check.notNull(out, "out");
    transfer(Raw::ga_state_get, name, out, true);
  }

  /**
   * Writes an array of state whole. Between windows; "step" last; with {@link
   * CommunicatorOptions.Shard#OPTIMIZER}, on every rank. State under {@link Dtype#STATE_8BIT} is
   * written by codes, bytes of {@link Dtype#U8}, with the scales of their blocks under a name of
   * their own; or by numbers of {@link Dtype#F32}, whose scales and nearest codes are written.
   *
   * @param name such as "exp_avg"
   * @param data as many elements as {@link #state} says, in the host's memory; where these are codes,
   *     as many numbers of F32, such as a FloatBuffer has, will do too
   */
  public void setState(String name, Tensor data) {
    Check.notNull(name, "name");
    Check.notNull(data, "data");
    transfer(Raw::ga_state_set, name, data, false);
  }

  /** A function of C that reads or writes an array of state. */
  private interface StateCall {
    void call(long c, int id, String name, long address, int dtype, long count);
  }

  private void transfer(StateCall call, String name, Tensor tensor, boolean written) {
    context.run(c -> {
      StateInfo array = find(c, name);
      if (array == null) {
        // The library refuses the name, and lists those that there are.
        call.call(c, id, name, 0, Dtype.F32.value(), 0);
        return;
      }
      Dtype dtype = tensor.dtypeOf(array);
      long address = tensor.address(dtype, array.count(), written, "state " + name, this);
      call.call(c, id, name, address, dtype.value(), array.count());
    }, tensor);
  }

  private StateInfo find(long c, String name) {
    for (StateInfo array : state(c)) {
      if (array.name().equals(name)) {
        return array;
      }
    }
    return null;
  }

  /**
   * Writes the moving average of the parameter, rounded to the dtype of the tensor; with {@link
   * CommunicatorOptions.Shard#OPTIMIZER}, on every rank.
   *
   * @param out as many elements
   */
  public void copyEmaTo(Tensor out) {
    Check.notNull(out, "out");
    context.run(c -> {
      Dtype dtype = out.dtype("out");
      long address = out.address(dtype, info.count(), true, "out", this);
      Raw.ga_ema_copy_to(c, id, address, dtype.value());
    }, out);
  }

  /**
   * The reduced, clipped gradient of a parameter of a group with {@link Optimizer.Kind#EXTERNAL},
   * after an applied step.
   *
   * @return a view that is dead once the context has moved on
   */
  public Gradient gradient() {
    return context.call(c -> {
      long[] data = new long[1];
      int[] dtype = new int[1];
      long[] count = new long[1];
      Raw.ga_gradient(c, id, data, dtype, count);
      return new Gradient(context, data[0], Dtype.of(dtype[0]), count[0]);
    });
  }

  @Override
  public String toString() {
    return "parameter \"" + name() + "\"";
  }
}
