// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.nio.Buffer;

/**
 * Where a kernel of the program writes a gradient: {@code alpha * gradient + beta * data}. Made by
 * {@link MicroBatch#acquire}. It lives until {@link #release}, or until the context moves on; after
 * that, its methods throw an {@link IllegalStateException} and touch no memory.
 */
public final class Accumulator {
  private final Context context;
  private final Param param;
  private final long moves;
  private final long data;
  private final Dtype dtype;
  private final long rows;
  private final long columns;
  private final long leadingDimension;
  private final double alpha;
  private final double beta;
  private boolean released;

  // Within a call of the context c.
  Accumulator(Param param, long c) {
    this.context = param.context();
    this.param = param;
    this.moves = context.moves();
    try (ga_accumulator fields = new ga_accumulator()) {
      Raw.ga_accumulator_acquire(c, param.id(), fields);
      data = fields.getData();
      dtype = Dtype.of(fields.getDtype());
      rows = fields.getRows();
      columns = fields.getColumns();
      leadingDimension = fields.getLeading_dimension();
      alpha = fields.getAlpha();
      beta = fields.getBeta();
    }
  }

  /**
   * Whether there is something to write: not in a micro-batch of weight 0, nor for a frozen
   * parameter.
   *
   * @return true if every element is to be written
   */
  public boolean isWritten() {
    return data != 0;
  }

  /**
   * The type of the elements.
   *
   * @return the dtype of the accumulator
   */
  public Dtype dtype() {
    return dtype;
  }

  /**
   * The first dimension of the parameter.
   *
   * @return the number of rows
   */
  public long rows() {
    return rows;
  }

  /**
   * The product of the other dimensions of the parameter.
   *
   * @return the number of columns
   */
  public long columns() {
    return columns;
  }

  /**
   * Elements from row to row.
   *
   * @return the number of columns
   */
  public long leadingDimension() {
    return leadingDimension;
  }

  /**
   * The factor of the gradient.
   *
   * @return weight / loss scale, or 1 / loss scale for sums
   */
  public double alpha() {
    return alpha;
  }

  /**
   * The factor of what is there.
   *
   * @return 0 for the first contribution in a window, when nothing may be read, else 1
   */
  public double beta() {
    return beta;
  }

  /**
   * Copies elements out. Only where {@link #beta} is not 0 have they been written.
   *
   * @param from the first element, in the order of rows
   * @param out a direct buffer, filled from its position to its limit, which do not move
   */
  public void get(long from, Buffer out) {
    Check.notNull(out, "out");
    context.run(c -> Memory.read(at(from, out), Tensor.of(out), dtype, Memory.elements(out, dtype), "out"), out);
  }

  /**
   * Writes elements.
   *
   * @param from the first element, in the order of rows
   * @param values a direct buffer of the dtype of the accumulator, whose position and limit do not
   *     move
   */
  public void put(long from, Buffer values) {
    Check.notNull(values, "values");
    context.run(
        c -> Memory.write(at(from, values), Tensor.of(values), dtype, Memory.elements(values, dtype), "values"), values);
  }

  private long at(long from, Buffer buffer) {
    checkAlive();
    context.checkHost("accumulator");
    long elements = Memory.elements(buffer, dtype);
    long count = data == 0 ? 0 : rows * columns;
    if (from < 0 || from > count - elements) {
      throw new IndexOutOfBoundsException(
          "elements " + from + " to " + (from + elements) + " of an accumulator of " + count);
    }
    return data + from * dtype.bytes();
  }

  private void checkAlive() {
    context.checkMoves(moves, "accumulator");
    if (released) {
      throw new IllegalStateException("the accumulator of " + param + " was released");
    }
  }

  /**
   * The address of the first element, for a kernel that is not Java. Nothing but this call checks
   * that the accumulator is alive.
   *
   * @return the address, in the memory of the device of the context; 0: write nothing
   */
  public long address() {
    return context.call(c -> {
      checkAlive();
      return data;
    });
  }

  /** Makes what was written a part of the micro-batch. */
  public void release() {
    context.run(c -> {
      checkAlive();
      Raw.ga_accumulator_release(c, param.id());
      released = true;
    });
  }
}
