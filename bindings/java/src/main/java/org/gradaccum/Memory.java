// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.nio.Buffer;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;

/** Copies between memory of the library and buffers of the program. */
final class Memory {
  private Memory() {}

  /** Copies the bytes of from, between position and limit, to an address. */
  static void write(long address, Tensor from, Dtype dtype, long count, String role) {
    copy(address, from.address(dtype, count, false, role, null), count * dtype.bytes());
  }

  /** Copies bytes from an address into to, between position and limit. */
  static void read(long address, Tensor to, Dtype dtype, long count, String role) {
    copy(to.address(dtype, count, true, role, null), address, count * dtype.bytes());
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

  /** How many elements of the dtype a buffer has between position and limit. */
  static long elements(Buffer buffer, Dtype dtype) {
    return Tensor.bytes(buffer) / dtype.bytes();
  }
}
