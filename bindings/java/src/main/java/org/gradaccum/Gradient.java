// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

/**
 * A view of a gradient that belongs to the library; made by {@link Param#gradient}. It lives until
 * the context accumulates, discards, steps, loads or is closed; after that, its methods throw an
 * {@link IllegalStateException} and read nothing.
 */
public final class Gradient extends GradientMembers {
  private final Context context;
  private final long moves;
  private final long address;
  private final Dtype dtype;
  private final long count;

  // Within a call of the context.
  Gradient(Context context, long address, Dtype dtype, long count) {
    this.context = context;
    this.moves = context.moves();
    this.address = address;
    this.dtype = dtype;
    this.count = count;
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
   * The number of elements.
   *
   * @return those of the parameter
   */
  public long count() {
    return count;
  }

  /**
   * Copies elements out, on the CPU.
   *
   * @param from the first element
   * @param out filled whole; the position of a buffer and its limit do not move
   */
  public void copyTo(long from, Tensor out) {
    Check.notNull(out, "out");
    context.run(c -> {
      context.checkMoves(moves, "gradient");
      context.checkHost("gradient");
      Memory.check(from, out.elements(dtype), count, "a gradient");
      Memory.read(address + from * dtype.bytes(), out, dtype, "out");
    }, out);
  }

  /**
   * The address of the first element, for a kernel that is not Java. Nothing but this call checks
   * that the view is alive.
   *
   * @return the address, in the memory of the device of the context
   */
  public long address() {
    return context.call(c -> {
      context.checkMoves(moves, "gradient");
      return address;
    });
  }
}
