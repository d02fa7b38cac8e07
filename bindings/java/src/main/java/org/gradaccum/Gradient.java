// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.lang.ref.Reference;
import java.nio.Buffer;

/**
 * A view of a gradient that belongs to the library; made by {@link Param#gradient}. It lives until
 * the context accumulates, discards, steps, loads or is closed; after that, its methods throw an
 * {@link IllegalStateException} and read nothing.
 */
public final class Gradient {
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
   * Copies elements out.
   *
   * @param from the first element
   * @param out a direct buffer, filled from its position to its limit, which do not move
   */
  public void copyTo(long from, Buffer out) {
    copyTo(from, Tensor.of("out", out));
  }

  /**
   * Copies elements out, on the CPU.
   *
   * @param from the first element
   * @param out filled whole
   */
  public void copyTo(long from, Tensor out) {
    Check.notNull(out, "out");
    context.enter();
    try {
      context.checkMoves(moves, "gradient");
      long elements = out.elements(dtype);
      context.checkHost("gradient");
      if (from < 0 || from > count - elements) {
        throw new IndexOutOfBoundsException(
            "elements " + from + " to " + (from + elements) + " of a gradient of " + count);
      }
      Memory.read(address + from * dtype.bytes(), out, dtype, elements, "out");
    } finally {
      context.exit();
      Reference.reachabilityFence(out);
    }
  }

  /**
   * The address of the first element, for a kernel that is not Java. Nothing but this call checks
   * that the view is alive.
   *
   * @return the address, in the memory of the device of the context
   */
  public long address() {
    context.enter();
    try {
      context.checkMoves(moves, "gradient");
      return address;
    } finally {
      context.exit();
    }
  }
}
