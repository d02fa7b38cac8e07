// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;

/** Threads as ranks. */
class CommunicatorTest {
  private static FloatBuffer floats(float... values) {
    ByteBuffer bytes =
        ByteBuffer.allocateDirect(4 * values.length).order(ByteOrder.nativeOrder());
    return bytes.asFloatBuffer().put(values).flip();
  }

  private static float[] values(FloatBuffer buffer) {
    float[] values = new float[buffer.capacity()];
    buffer.get(0, values);
    return values;
  }

  /** Trains with SGD of learning rate 1 as one of two ranks. */
  private static float[] train(byte[] id, int rank, boolean comes) {
    FloatBuffer p = floats(0, 0);
    try (Communicator comm = Communicator.local(id, rank, 2, comes ? 60 : 0.5);
        Context context = new Context()) {
      assertEquals(rank, comm.rank());
      assertEquals(2, comm.ranks());
      Group group =
          context.addGroup(Optimizer.builder(Optimizer.Kind.SGD).lr(1).build());
      context.addParam(group, "p", p, 2);
      CommunicatorOptions options =
          CommunicatorOptions.builder()
              .wire(CommunicatorOptions.Wire.BF16)
              .checkEvery(1)
              .handOut(true)
              .build();
      assertEquals(CommunicatorOptions.Shard.NONE, options.shard());
      assertEquals(CommunicatorOptions.Adder.AUTO, options.adder());
      context.setCommunicator(comm, options.toBuilder().build());
      if (!comes && rank == 1) {
        return values(p);
      }
      context.accumulate(rank == 0 ? 1 : 3, floats(4, 8));
      if (rank == 0) {
        context.accumulate(0, floats(0, 0));
      }
      StepResult result = context.step();
      assertEquals(4.0, result.weight());
      context.setCommunicator(null, null);
      return values(p);
    }
  }

  private static <T> Future<T> start(ExecutorService threads, Callable<T> body) {
    return threads.submit(body);
  }

  @Test
  void twoThreadsAreTwoRanks() throws Exception {
    byte[] id = Communicator.newId();
    ExecutorService threads = Executors.newFixedThreadPool(2);
    Future<float[]> first = start(threads, () -> train(id, 0, true));
    Future<float[]> second = start(threads, () -> train(id, 1, true));
    assertArrayEquals(new float[] {-4, -8}, first.get(60, TimeUnit.SECONDS));
    assertArrayEquals(new float[] {-4, -8}, second.get(60, TimeUnit.SECONDS));
    threads.shutdown();
  }

  /** dx of a layer over the window of two ranks, which have x = 1, 3 and x = 5, 7. */
  private static float[] normalise(byte[] id, int rank) {
    try (Communicator comm = Communicator.local(id, rank, 2, 60);
        Context context = new Context()) {
      context.addGroup(Optimizer.builder(Optimizer.Kind.SGD).build());
      BatchNorm bn =
          context.addBatchNorm(
              "bn",
              1,
              null,
              null,
              BatchNormOptions.builder(Flavor.TORCH).mode(BatchNormOptions.Mode.WINDOW).build());
      context.setCommunicator(comm, null);
      FloatBuffer x = rank == 0 ? floats(1, 3) : floats(5, 7);
      FloatBuffer dy = rank == 0 ? floats(1, 0) : floats(0, 1);
      FloatBuffer y = floats(0, 0);
      bn.accumulate(x, 2, 1);
      bn.finalizeStats();
      bn.forward(x, 2, 1, y);
      // The mean is 4 and the variance 5.
      assertEquals((x.get(0) - 4) / Math.sqrt(5), y.get(0), 1e-4);
      try (MicroBatch micro = context.beginMicroBatch(0, 1, null)) {
        micro.backwardAccumulate(bn, x, dy, 2, 1);
        micro.end();
      }
      bn.backwardFinalize();
      try (MicroBatch micro = context.beginMicroBatch(0, 1, null)) {
        micro.backward(bn, x, dy, 2, 1, dy);
        micro.end();
      }
      assertTrue(context.step().applied());
      return values(dy);
    }
  }

  @Test
  void batchNormalisationOverTheWindowOfTwoRanks() throws Exception {
    byte[] id = Communicator.newId();
    ExecutorService threads = Executors.newFixedThreadPool(2);
    Future<float[]> first = start(threads, () -> normalise(id, 0));
    Future<float[]> second = start(threads, () -> normalise(id, 1));
    // The sums of dy and of dy times the normalised x are 2 and 0: dx = (dy - 1 / 2) / sqrt(5).
    float half = (float) (0.5 / Math.sqrt(5));
    assertArrayEquals(new float[] {half, -half}, first.get(60, TimeUnit.SECONDS), 1e-4f);
    assertArrayEquals(new float[] {-half, half}, second.get(60, TimeUnit.SECONDS), 1e-4f);
    threads.shutdown();
  }

  /** What a rank has after two windows. */
  private record Ended(float[] large, float[] small, float[] average, long stateBytes) {}

  /**
   * Trains two parameters, the first of which ranks divide, in two micro-batches a window. Backward
   * comes to the second parameter first.
   */
  private static Ended trainInParts(byte[] id, int rank, CommunicatorOptions options) {
    float[] ones = new float[70000];
    Arrays.fill(ones, 1);
    FloatBuffer large = floats(ones);
    FloatBuffer small = floats(1, 1, 1);
    FloatBuffer average = floats(ones);
    try (Communicator comm = Communicator.local(id, rank, 2, 60);
        Context context = new Context()) {
      Group group = context.addGroup(Optimizer.builder(Optimizer.Kind.ADAM).build());
      Param first = context.addParam(group, "large", large, 70000);
      Param second = context.addParam(group, "small", small, 3);
      context.setCommunicator(comm, options);
      FloatBuffer gradient = floats(ones);
      for (int k = 0; k < 4; ++k) {
        for (int j = 0; j < ones.length; ++j) {
          gradient.put(j, j % 7 - 3 + k + rank);
        }
        boolean last = k % 2 == 1;
        try (MicroBatch micro =
            context.beginMicroBatch(-1, 1 + rank, last ? MicroOptions.LAST : null)) {
          micro.accumulate(second, gradient.slice(0, 3));
          if (last) {
            context.ready(second);
          }
          micro.accumulate(first, gradient);
          if (last) {
            context.ready(List.of(first, second));
            assertThrows(GradAccumException.class, () -> micro.accumulate(first, gradient));
          }
          micro.end();
        }
        if (last && options.overlap()) {
          GradAccumException e =
              assertThrows(
                  GradAccumException.class,
                  () -> context.saveToBuffer(StateOptions.builder().build()));
          assertTrue(e.getMessage().contains("being exchanged"), e.getMessage());
        }
        if (last) {
          assertTrue(context.step().applied());
        }
      }
      first.getState("exp_avg", average);
      return new Ended(
          values(large), values(small), values(average), context.memory().optimizerState());
    }
  }

  private static List<Ended> trainInParts(CommunicatorOptions options) throws Exception {
    byte[] id = Communicator.newId();
    ExecutorService threads = Executors.newFixedThreadPool(2);
    Future<Ended> first = start(threads, () -> trainInParts(id, 0, options));
    Future<Ended> second = start(threads, () -> trainInParts(id, 1, options));
    List<Ended> ended =
        List.of(first.get(60, TimeUnit.SECONDS), second.get(60, TimeUnit.SECONDS));
    threads.shutdown();
    return ended;
  }

  @Test
  void ranksThatShardAndOverlap() throws Exception {
    CommunicatorOptions options = CommunicatorOptions.builder().build();
    Ended plain = trainInParts(options).get(0);
    assertNotEquals(1, plain.large()[0]);
    CommunicatorOptions divided =
        options.toBuilder().shard(CommunicatorOptions.Shard.OPTIMIZER).overlap(true).build();
    for (Ended ended : trainInParts(divided)) {
      assertArrayEquals(plain.large(), ended.large());
      assertArrayEquals(plain.small(), ended.small());
      assertArrayEquals(plain.average(), ended.average());
      assertTrue(ended.stateBytes() < plain.stateBytes() * 3 / 5, ended.stateBytes() + " bytes");
    }
  }

  /** Trains a row of a matrix of two, whose gradient the program has reduced. */
  private static float[] trainARow(byte[] id, int rank) {
    FloatBuffer row = floats(0, 0);
    try (Communicator comm = Communicator.local(id, rank, 2, 60);
        Context context =
            new Context(
                Config.builder().gradientKind(Config.GradientKind.SUM).build())) {
      Group group = context.addGroup(Optimizer.builder(Optimizer.Kind.SGD).lr(1).build());
      Param param = context.addParam(group, "p", row, 1, 2);
      assertThrows(
          IllegalArgumentException.class, () -> param.setPart(new long[] {2}, new long[] {0}, 1));
      param.setPart(new long[] {2, 2}, new long[] {rank, 0}, 1);
      context.setCommunicator(
          comm,
          CommunicatorOptions.builder()
              .shard(CommunicatorOptions.Shard.PARAMETERS)
              .reduced(CommunicatorOptions.Reduced.SUM)
              .build());
      context.accumulate(1 + 2 * rank, floats(4 + 8 * rank, 8 + 8 * rank));
      StepResult result = context.step();
      assertEquals(4, result.weight());
      assertEquals(Math.sqrt(1 + 4 + 9 + 16), result.norm(), 1e-12);
      return values(row);
    }
  }

  @Test
  void ranksWithParametersOfTheirOwn() throws Exception {
    byte[] id = Communicator.newId();
    ExecutorService threads = Executors.newFixedThreadPool(2);
    Future<float[]> first = start(threads, () -> trainARow(id, 0));
    Future<float[]> second = start(threads, () -> trainARow(id, 1));
    assertArrayEquals(new float[] {-1, -2}, first.get(60, TimeUnit.SECONDS));
    assertArrayEquals(new float[] {-3, -4}, second.get(60, TimeUnit.SECONDS));
    threads.shutdown();
  }

  @Test
  void localRanksDoNotAdd() {
    try (Communicator comm = Communicator.local(Communicator.newId(), 0, 1);
        Context context = new Context()) {
      CommunicatorOptions options =
          CommunicatorOptions.builder().adder(CommunicatorOptions.Adder.TRANSPORT).build();
      GradAccumException e =
          assertThrows(
              GradAccumException.class, () -> context.setCommunicator(comm, options));
      assertEquals(Status.UNSUPPORTED, e.status());
    }
  }

  @Test
  void whatIsReadyTakesNoMoreGradients() {
    FloatBuffer p = floats(1);
    try (Context context = new Context()) {
      Group group = context.addGroup(Optimizer.builder(Optimizer.Kind.SGD).lr(1).build());
      Param param = context.addParam(group, "p", p, 1);
      context.ready();
      context.accumulate(1, floats(2));
      context.ready(param);
      GradAccumException e =
          assertThrows(GradAccumException.class, () -> context.accumulate(1, floats(2)));
      assertEquals(Status.INVALID_STATE, e.status());
      assertTrue(e.getMessage().contains("\"p\""), e.getMessage());
      context.step();
      context.accumulate(1, floats(2));
      context.step();
      assertEquals(-3, p.get(0));
    }
  }

  @Test
  void aRankThatDoesNotComeIsATimeout() throws Exception {
    byte[] id = Communicator.newId();
    try (Communicator alone = Communicator.local(id, 0, 2, 0.2);
        Context context = new Context()) {
      context.addGroup(Optimizer.builder(Optimizer.Kind.SGD).build());
      GradAccumException e =
          assertThrows(
              GradAccumException.class, () -> context.setCommunicator(alone, null));
      assertEquals(Status.COMMUNICATION, e.status());
      assertTrue(e.getMessage().contains("for rank 1"), e.getMessage());
    }
  }

  @Test
  void abortFreesAThreadThatWaits() throws Exception {
    byte[] id = Communicator.newId();
    ExecutorService threads = Executors.newSingleThreadExecutor();
    try (Communicator comm = Communicator.local(id, 0, 2)) {
      Future<Status> waiting =
          start(
              threads,
              () -> {
                try (Context context = new Context()) {
                  context.addGroup(Optimizer.builder(Optimizer.Kind.SGD).build());
                  return assertThrows(
                          GradAccumException.class, () -> context.setCommunicator(comm, null))
                      .status();
                }
              });
      Thread.sleep(100);
      comm.abort();
      assertEquals(Status.COMMUNICATION, waiting.get(60, TimeUnit.SECONDS));
    }
    threads.shutdown();
  }

  @Test
  void closedTwiceAndUsedAfterwards() {
    byte[] id = Communicator.newId();
    Communicator comm = Communicator.local(id, 0, 1);
    try (Context context = new Context()) {
      context.addGroup(Optimizer.builder(Optimizer.Kind.SGD).build());
      context.setCommunicator(comm, null);
      comm.close();
      comm.close();
      assertThrows(IllegalStateException.class, comm::rank);
      assertThrows(IllegalStateException.class, comm::abort);
      context.step();  // the context keeps what it needs
      assertThrows(
          IllegalStateException.class, () -> context.setCommunicator(comm, null));
    }
    assertThrows(IllegalArgumentException.class, () -> Communicator.local(new byte[3], 0, 1));
    assertThrows(GradAccumException.class, () -> Communicator.local(id, 2, 2));
    assertThrows(GradAccumException.class, () -> Communicator.local(id, 0, 2, Double.NaN));
    assertThrows(IllegalArgumentException.class, () -> Communicator.nccl(new byte[3], 0, 1, 1));
    assertThrows(GradAccumException.class, () -> Communicator.nccl(id, 2, 2, 1));
    assertThrows(IllegalArgumentException.class, () -> Communicator.nccl(0, 1));
    assertThrows(GradAccumException.class, () -> Communicator.nccl(8, 1)); // no module, or no NCCL is loaded
  }
}
