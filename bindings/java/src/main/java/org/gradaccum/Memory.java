// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;

/** Copies between memory of the library and buffers of the program. */
final class Memory {
  private Memory() {}

  /** Copies the elements of a tensor to an address. */
  static void write(long address, Tensor from, Dtype dtype, String role) {
    long count = from.elements(dtype);
    copy(address, from.address(dtype, count, false, role, null), count * dtype.bytes());
  }

  /** Copies elements from an address into a tensor, which they fill. */
  static void read(long address, Tensor to, Dtype dtype, String role) {
    long count = to.elements(dtype);
    copy(to.address(dtype, count, true, role, null), address, count * dtype.bytes());
  }

  /** Refuses elements that are not among those of what is named. */
  static void check(long from, long elements, long count, String what) {
    if (from < 0 || from > count - elements) {
      throw new IndexOutOfBoundsException(
          "elements " + from + " to " + (from + elements) + " of " + what + " of " + count);
    }
  }

  private static void copy(long to, long from, long bytes) {
    final long largest = 1 << 30;
    for (long done = 0; done < bytes; done += largest) {
      long piece = Math.min(largest, bytes - done);
      at(to + done, piece).put(at(from + done, piece));
    }
  }

  static ByteBuffer at(long address, long bytes) {
    return ((ByteBuffer) Raw.buffer_at(address, bytes)).order(ByteOrder.nativeOrder());
  }
}
