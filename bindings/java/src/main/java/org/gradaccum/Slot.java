// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.lang.ref.WeakReference;
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

  // The last gradient, which programs mostly bring again: only its position and limit may have
  // changed. Not a ByteBuffer, whose byte order may change too.
  private WeakReference<Buffer> last = new WeakReference<>(null);
  private long lastStart;

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
    if (params.isEmpty()) {
      return;  // a block without parameters has a gradient too, which is not read
    }
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
    if (gradient.remaining() == count && last.refersTo(gradient)) {
      return lastStart + (long) gradient.position() * dtype.bytes();
    }
    // A block may be longer than its parameters.
    long expected = flat ? Math.max(count, Tensor.bytes(gradient) / dtype.bytes()) : count;
    long address =
        Tensor.address(gradient, dtype, expected, areLent(), "gradient", params.get(0));
    if (!(gradient instanceof ByteBuffer)) {
      last = new WeakReference<>(gradient);
      lastStart = address - (long) gradient.position() * dtype.bytes();
    }
    return address;
  }

  private boolean areLent() {
    return params.get(0).context().kept().areLent();
  }

  /** Of a copy of a float[]. */
  long addressOfFloats(ByteBuffer gradient) {
    if (isRead && dtype != Dtype.F32) {
      throw Tensor.refuseFloats(params.get(0), dtype);
    }
    return address(gradient);
  }

  long address(Tensor gradient) {
    if (!isRead) {
      return 0;
    }
    long expected = flat ? Math.max(count, gradient.elements(dtype)) : count;
    return gradient.address(dtype, expected, areLent(), "gradient", params.get(0));
  }
}
