// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import static org.gradaccum.Buffers.floats;
import static org.gradaccum.Buffers.sgd;
import static org.gradaccum.Buffers.values;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.DoubleBuffer;
import java.nio.FloatBuffer;
import java.util.List;
import org.junit.jupiter.api.Test;

/** Layers with batch normalisation; expected values are computed by hand. */
class BatchNormTest {
  @Test
  void batchNormalisationOfAWindow() {
    FloatBuffer gamma = floats(2);
    FloatBuffer beta = floats(1);
    try (Context context = new Context()) {
      Group group = context.addGroup(sgd(0.5));
      BatchNorm bn =
          context.addBatchNorm(
              "bn",
              1,
              context.addParam(group, "gamma", gamma, 1),
              context.addParam(group, "beta", beta, 1));
      FloatBuffer x = floats(1, 3);
      FloatBuffer y = floats(0, 0);
      bn.forward(x, 2, 1, y);
      // mean 2, variance 1
      assertEquals(1 - 2, y.get(0), 1e-4);
      assertEquals(1 + 2, y.get(1), 1e-4);
      FloatBuffer mean = floats(0);
      FloatBuffer variance = floats(0);
      assertEquals(2, bn.statistics(mean, variance));
      assertEquals(2f, mean.get(0));
      assertEquals(1f, variance.get(0));
      try (MicroBatch micro = context.beginMicroBatch(1)) {
        FloatBuffer dx = floats(0, 0);
        micro.backward(bn, x, floats(1, 0), 2, 1, dx);
        assertEquals(0, dx.get(0) + dx.get(1), 1e-6);
        micro.end();
      }
      context.step();
      // dgamma = sum dy xhat = -1, dbeta = sum dy = 1
      assertEquals(2.5f, gamma.get(0), 1e-4);
      assertEquals(0.5f, beta.get(0), 1e-6);
      assertEquals(1, bn.running(mean, variance));
      assertEquals(0.2f, mean.get(0), 1e-6);
      assertEquals(0.9f + 0.1f * 2, variance.get(0), 1e-6);
      bn.setRunning(floats(0), floats(1), 5);
      assertEquals(5, bn.running(mean, variance));
      bn.infer(x, 2, 1, y);
      assertEquals(2.5f + 0.5f, y.get(0), 1e-4);
      bn.setFrozen(true);
      assertThrows(GradAccumException.class, () -> bn.statistics(mean, variance));
      assertThrows(IllegalArgumentException.class, () -> bn.infer(x, 3, 1, y));
      assertThrows(IllegalArgumentException.class, () -> bn.infer(x, -1, 1, y));
    }
  }

  @Test
  void layersAreDescribedAndFoundByName() {
    try (Context context = new Context();
        Context other = new Context()) {
      Group group = context.addGroup(sgd(1));
      Param gamma = context.addParam(group, "gamma", floats(1, 1, 1), 3);
      Param beta = context.addParam(group, "beta", floats(0, 0, 0), 3);
      assertEquals(0, context.batchNormCount());
      BatchNormOptions options =
          new BatchNormOptions(
              BatchNormOptions.Mode.CUMULATIVE,
              BatchNormOptions.Layout.CHANNELS_LAST,
              Dtype.F64,
              true,
              0.25,
              0.5);
      BatchNorm first = context.addBatchNorm("first", 3, gamma, beta, options);
      BatchNorm second = context.addBatchNorm("second", 2, null, null);
      assertEquals(2, context.batchNormCount());
      assertEquals(info(options, gamma, beta, false), first.info());
      first.setFrozen(true);
      assertEquals(info(options, gamma, beta, true), first.info());
      first.setFrozen(false);
      assertEquals(
          new BatchNormInfo(
              "second",
              2,
              -1,
              -1,
              BatchNormOptions.Mode.MICRO,
              BatchNormOptions.Layout.CHANNELS_FIRST,
              Dtype.F32,
              false,
              false,
              0.1,
              1e-5),
          second.info());

      BatchNorm found = context.findBatchNorm("first");
      assertEquals(first, found);
      assertEquals(first.hashCode(), found.hashCode());
      assertEquals(first.toString(), found.toString());
      assertNotEquals(second, found);
      assertNotEquals(first, other.addBatchNorm("first", 3, null, null));
      // A layer that was found knows what its tensors are.
      DoubleBuffer x = Buffers.bytes(48).asDoubleBuffer().put(new double[] {1, 2, 3, 3, 6, 9});
      DoubleBuffer y = Buffers.bytes(48).asDoubleBuffer();
      found.forward(x.flip(), 2, 1, y);
      assertEquals(1 / Math.sqrt(1.5), y.get(3), 1e-12);
      assertThrows(IllegalArgumentException.class, () -> found.infer(x, 3, 1, y));
      assertThrows(
          IllegalArgumentException.class, () -> found.infer(floats(new float[6]), 2, 1, y));
      for (String absent : List.of("third", "gamma", "")) {
        GradAccumException e =
            assertThrows(GradAccumException.class, () -> context.findBatchNorm(absent));
        assertEquals(Status.INVALID_ARGUMENT, e.status());
        String message = "the context has no layer \"" + absent + "\"";
        assertTrue(e.getMessage().contains(message), e.getMessage());
      }
    }
  }

  private static BatchNormInfo info(
      BatchNormOptions options, Param gamma, Param beta, boolean frozen) {
    return new BatchNormInfo(
        "first",
        3,
        gamma.id(),
        beta.id(),
        options.mode(),
        options.layout(),
        options.dtype(),
        options.biased(),
        frozen,
        options.momentum(),
        options.eps());
  }

  @Test
  void batchNormalisationInPasses() {
    try (Context context = new Context()) {
      Group group = context.addGroup(sgd(0.5));
      FloatBuffer gamma = floats(1);
      BatchNorm bn =
          context.addBatchNorm(
              "bn",
              1,
              context.addParam(group, "gamma", gamma, 1),
              null,
              BatchNormOptions.builder(Flavor.TORCH)
                  .mode(BatchNormOptions.Mode.WINDOW)
                  .build());
      FloatBuffer[] x = {floats(1), floats(3)};
      bn.accumulate(x[0], 1, 1);
      // The mean and the sum of squared deviations of one element.
      bn.accumulateStats(1, floats(3), floats(0), BatchNorm.Spread.M2);
      bn.finalizeStats();
      FloatBuffer y = floats(0);
      for (int k = 0; k < 2; ++k) {
        bn.forward(x[k], 1, 1, y);
        assertEquals(2 * k - 1, y.get(0), 1e-4);
      }
      for (int pass = 0; pass < 2; ++pass) {
        for (int k = 0; k < 2; ++k) {
          try (MicroBatch micro = context.beginMicroBatch(k, 1, null)) {
            if (pass == 0) {
              micro.backwardAccumulate(bn, x[k], floats(k), 1, 1);
            } else {
              micro.backward(bn, x[k], floats(k), 1, 1, y);
            }
            micro.end();
          }
        }
      }
      assertTrue(context.step().applied());
      // dgamma is the mean over two micro-batches of 0 and 1 xhat = 1.
      assertEquals(1 - 0.5f * 0.5f, gamma.get(0), 1e-4);
    }
  }
}
