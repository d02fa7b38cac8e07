// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.nio.Buffer;

/**
 * Where a kernel of the program writes a gradient: {@code alpha * gradient + beta * data}. Made by
 * {@link MicroBatch#acquire}. It lives until {@link #release}, or until the context moves on; after
 * that, its methods throw an {@link IllegalStateException} and touch no memory.
 */
public final class Accumulator extends AccumulatorMembers {
  private final Context context;
  private final Param param;
  private final long moves;
  private final long data;
  private boolean released;

  // Within a call of the context.
  Accumulator(Param param, ga_accumulator fields) {
    super(fields);
    this.context = param.context();
    this.param = param;
    this.moves = context.moves();
    this.data = fields.getData();
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
   * Copies elements out. Only where {@link #beta} is not 0 have they been written.
   *
   * @param from the first element, in the order of rows
   * @param out a direct buffer, filled from its position to its limit, which do not move
   */
  public void get(long from, Buffer out) {
    Tensor to = Tensor.of("out", out);
    context.run(c -> Memory.read(at(from, to), to, dtype(), "out"), to);
  }

  /**
   * Writes elements.
   *
   * @param from the first element, in the order of rows
   * @param values a direct buffer of the dtype of the accumulator, whose position and limit do not
   *     move
   */
  public void put(long from, Buffer values) {
    Tensor source = Tensor.of("values", values);
    context.run(c -> Memory.write(at(from, source), source, dtype(), "values"), source);
  }

  private long at(long from, Tensor elements) {
    checkAlive();
    context.checkHost("accumulator");
    Memory.check(from, elements.elements(dtype()), data == 0 ? 0 : rows() * columns(), "an accumulator");
    return data + from * dtype().bytes();
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
