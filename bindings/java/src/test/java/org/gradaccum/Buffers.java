// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;

/** Direct buffers for tests. */
final class Buffers {
  private Buffers() {}

  static ByteBuffer bytes(int size) {
    return ByteBuffer.allocateDirect(size).order(ByteOrder.nativeOrder());
  }

  static FloatBuffer floats(float... values) {
    FloatBuffer buffer = bytes(4 * values.length).asFloatBuffer();
    return buffer.put(values).flip();
  }

  static float[] values(FloatBuffer buffer) {
    float[] values = new float[buffer.remaining()];
    buffer.duplicate().get(values);
    return values;
  }

  static Optimizer sgd(double lr) {
    return Optimizer.builder(Optimizer.Kind.SGD).lr(lr).build();
  }
}
