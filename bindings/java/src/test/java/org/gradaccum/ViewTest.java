// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import static org.gradaccum.Buffers.floats;
import static org.gradaccum.Buffers.sgd;
import static org.gradaccum.Buffers.values;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.FloatBuffer;
import java.util.Optional;
import org.junit.jupiter.api.Test;

/** Views of memory of the library live no longer than what they show. */
class ViewTest {
  private static void dead(Runnable use) {
    Exception e = assertThrows(IllegalStateException.class, use::run);
    assertTrue(
        e.getMessage().contains("moved on") || e.getMessage().contains("closed"), e.getMessage());
  }

  @Test
  void gradientsOfAnExternalOptimizer() {
    FloatBuffer w = floats(1, 2, 3);
    Context context = new Context();
    Group group = context.addGroup(Optimizer.builder(Optimizer.Kind.EXTERNAL).build());
    Param param = context.addParam(group, "w", w, 3);
    assertThrows(GradAccumException.class, param::gradient);
    FloatBuffer out = floats(0, 0);
    StateOptions all = StateOptions.builder().build();
    Runnable[] moves = {
      () -> context.accumulate(1, floats(1, 2, 3)),
      () -> context.beginMicroBatch(1).close(),
      context::discard,
      context::step,
      () -> context.load(context.saveToBuffer(all), all),
      context::close,
    };
    for (Runnable move : moves) {
      context.accumulate(2, floats(2, 4, 6));
      assertTrue(context.step().applied());
      Gradient gradient = param.gradient();
      assertEquals(3, gradient.count());
      assertEquals(Dtype.F32, gradient.dtype());
      gradient.copyTo(1, out);
      assertArrayEquals(new float[] {4, 6}, values(out));
      assertTrue(gradient.address() != 0);
      assertThrows(IndexOutOfBoundsException.class, () -> gradient.copyTo(2, out));
      assertThrows(IndexOutOfBoundsException.class, () -> gradient.copyTo(-1, out));
      assertThrows(
          IllegalArgumentException.class, () -> gradient.copyTo(0, FloatBuffer.allocate(1)));
      move.run();
      dead(() -> gradient.copyTo(0, out));
      dead(gradient::address);
      if (move != moves[5]) {
        context.discard();
      }
    }
    assertArrayEquals(new float[] {1, 2, 3}, values(w));
  }

  @Test
  void accumulatorsOfAKernel() {
    FloatBuffer w = floats(0, 0);
    try (Context context = new Context()) {
      Param param = context.addParam(context.addGroup(sgd(1)), "w", w, 1, 2);
      Accumulator kept = null;
      for (int i = 0; i < 2; ++i) {
        try (MicroBatch micro = context.beginMicroBatch(2)) {
          Accumulator accumulator = micro.acquire(param);
          assertTrue(accumulator.isWritten());
          assertEquals(1, accumulator.rows());
          assertEquals(2, accumulator.columns());
          assertEquals(2, accumulator.leadingDimension());
          assertEquals(2, accumulator.alpha());
          assertEquals(i, accumulator.beta());
          assertEquals(Dtype.F32, accumulator.dtype());
          FloatBuffer there = floats(0, 0);
          if (accumulator.beta() != 0) {
            accumulator.get(0, there);
          }
          float alpha = (float) accumulator.alpha();
          accumulator.put(0, floats(there.get(0) + alpha * 3, there.get(1) + alpha * 5));
          assertThrows(IndexOutOfBoundsException.class, () -> accumulator.put(1, floats(1, 1)));
          assertThrows(GradAccumException.class, micro::end);
          accumulator.release();
          assertThrows(IllegalStateException.class, () -> accumulator.put(0, floats(1, 1)));
          assertThrows(IllegalStateException.class, accumulator::release);
          micro.end();
          dead(() -> accumulator.get(0, there));
          dead(accumulator::address);
          kept = accumulator;
        }
      }
      context.step();
      assertArrayEquals(new float[] {-3, -5}, values(w));
      try (MicroBatch micro = context.beginMicroBatch(0)) {
        Accumulator nothing = micro.acquire(param);
        assertFalse(nothing.isWritten());
        assertEquals(0, nothing.address());
        assertThrows(IndexOutOfBoundsException.class, () -> nothing.put(0, floats(1, 1)));
      }
      Accumulator last = kept;
      dead(() -> last.put(0, floats(1, 1)));
    }
  }

  @Test
  void maximaInPlaceOfSums() {
    try (Context context = new Context()) {
      Group group = context.addGroup(Optimizer.builder(Optimizer.Kind.EXTERNAL).build());
      ParamOptions.Builder options = ParamOptions.builder();
      assertThrows(
          IllegalArgumentException.class,
          () ->
              context.addParam(
                  group,
                  "amax",
                  Tensor.of(floats(0, 0)),
                  options.reduce(Optional.of(Config.Reduce.MEAN)).build(),
                  2));
      Param param =
          context.addParam(
              group,
              "amax",
              Tensor.of(floats(0, 0)),
              options.reduce(Optional.of(Config.Reduce.MAX)).build(),
              2);
      context.accumulate(5, floats(-1, -4));
      context.accumulate(2, floats(-3, -2));
      assertTrue(context.step().applied());
      FloatBuffer out = floats(0, 0);
      param.gradient().copyTo(0, out);
      assertArrayEquals(new float[] {-1, -2}, values(out));
    }
  }
}
