// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.nio.Buffer;
import java.nio.ByteBuffer;
import java.util.List;

/**
 * One of the gradients of {@link Context#accumulate}: that of a parameter, or of a flat block, as
 * the library describes the parameters that have it.
 */
final class Slot {
  private final List<Param> params;
  private final boolean flat;
  private boolean isRead;
  private Dtype dtype;
  private long count;

  Slot(List<Param> params, boolean flat) {
    this.params = params;
    this.flat = flat;
    update();
  }

  List<Param> params() {
    return params;
  }

  /** After a parameter was added or removed. */
  void update() {
    long bytes = 0;
    isRead = false;
    dtype = params.get(0).gradientDtype();
    for (Param param : params) {
      if (!param.isRemoved()) {
        isRead = true;
        bytes =
            Math.max(bytes, (param.offset() + param.count()) * param.gradientDtype().bytes());
      }
    }
    count = (bytes + dtype.bytes() - 1) / dtype.bytes();
  }

  long address(Buffer gradient) {
    if (!isRead) {
      return 0;
    }
    // A block may be longer than its parameters.
    long expected = flat ? Math.max(count, Tensor.bytes(gradient) / dtype.bytes()) : count;
    return Tensor.address(gradient, dtype, expected, false, "gradient", params.get(0));
  }

  /** Of a copy of a float[]. */
  long addressOfFloats(ByteBuffer gradient) {
    if (isRead && dtype != Dtype.F32) {
      throw Tensor.refuse(
          "gradient", params.get(0), "a float[] does not hold elements of " + dtype);
    }
    return address(gradient);
  }

  long address(Tensor gradient) {
    if (!isRead) {
      return 0;
    }
    long expected = flat ? Math.max(count, gradient.elements(dtype)) : count;
    return gradient.address(dtype, expected, false, "gradient", params.get(0));
  }
}
