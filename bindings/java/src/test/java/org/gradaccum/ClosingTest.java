// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import static org.gradaccum.Buffers.floats;
import static org.gradaccum.Buffers.sgd;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import java.io.IOException;
import java.lang.ref.WeakReference;
import java.nio.FloatBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.concurrent.atomic.AtomicInteger;
import org.junit.jupiter.api.Test;

/** Closing, leaving to the collector, and threads. */
class ClosingTest {
  private static Context withParam() {
    Context context = new Context();
    context.addParam(context.addGroup(sgd(1)), "w", floats(1), 1);
    return context;
  }

  @Test
  void closedTwiceAndUsedAfterwards() {
    Context context = new Context();
    Group group = context.addGroup(sgd(1));
    Param param = context.addParam(group, "w", floats(1), 1);
    BatchNorm bn = context.addBatchNorm("bn", 1, param, null);
    MicroBatch micro = context.beginMicroBatch(1);
    Accumulator accumulator = micro.acquire(param);
    context.close();
    context.close();
    FloatBuffer one = floats(1);
    Runnable[] uses = {
      context::step,
      context::window,
      context::discard,
      () -> context.accumulate(1, one),
      () -> context.addGroup(sgd(1)),
      () -> group.setLr(1),
      () -> param.info(),
      () -> bn.finalizeStats(),
      () -> bn.backwardFinalize(),
      () -> context.ready(param),
      () -> micro.accumulate(param, one),
      () -> accumulator.put(0, one),
      micro::end,
    };
    for (Runnable use : uses) {
      Exception e = assertThrows(IllegalStateException.class, use::run);
      assertEquals("the context is closed", e.getMessage());
    }
    micro.close();
  }

  /** A context that is in a call, a save, until the latch is counted down. */
  private static final class Busy implements AutoCloseable {
    final Context context = withParam();
    final CountDownLatch running = new CountDownLatch(1);
    final CountDownLatch release = new CountDownLatch(1);
    final ExecutorService executor = Executors.newSingleThreadExecutor();
    final Future<?> save;
    final Path file;

    Busy() throws Exception {
      file = Files.createTempFile("gradaccum", ".safetensors");
      StateOptions options =
          StateOptions.builder()
              .progress(
                  (done, total) -> {
                    running.countDown();
                    await(release);
                  })
              .build();
      save = executor.submit(() -> context.save(file, options));
      assertTrue(running.await(20, TimeUnit.SECONDS));
    }

    private static void await(CountDownLatch latch) {
      try {
        assertTrue(latch.await(20, TimeUnit.SECONDS));
      } catch (InterruptedException e) {
        throw new AssertionError(e);
      }
    }

    @Override
    public void close() throws IOException {
      release.countDown();
      executor.shutdown();
      context.close();
      Files.delete(file);
    }
  }

  @Test
  void twoThreadsAtOnce() throws Exception {
    try (Busy busy = new Busy()) {
      Exception e = assertThrows(IllegalStateException.class, busy.context::step);
      assertTrue(e.getMessage().contains("in use by a call of another thread"), e.getMessage());
      busy.release.countDown();
      busy.save.get(20, TimeUnit.SECONDS);
      assertEquals(StepResult.Outcome.SKIPPED_EMPTY, busy.context.step().outcome());
    }
  }

  @Test
  void closeWaitsForACall() throws Exception {
    try (Busy busy = new Busy()) {
      ExecutorService other = Executors.newSingleThreadExecutor();
      Future<?> close = other.submit(busy.context::close);
      assertThrows(TimeoutException.class, () -> close.get(200, TimeUnit.MILLISECONDS));
      busy.release.countDown();
      busy.save.get(20, TimeUnit.SECONDS);
      close.get(20, TimeUnit.SECONDS);
      other.shutdown();
      assertTrue(Files.size(busy.file) > 0);
      assertThrows(IllegalStateException.class, busy.context::step);
    }
  }

  @Test
  void contextsMayBeHandedOver() throws Exception {
    ExecutorService executor = Executors.newFixedThreadPool(4);
    try (Context context = withParam()) {
      for (int i = 0; i < 50; ++i) {
        executor.submit(() -> context.accumulate(1, floats(1))).get();
        executor.submit(context::step).get();
      }
      assertEquals(50, context.window().steps());
    } finally {
      executor.shutdown();
    }
  }

  @Test
  void manyThreadsCollideAndNothingBreaks() throws Exception {
    int threads = 4;
    int calls = 2000;
    AtomicInteger added = new AtomicInteger();
    ExecutorService executor = Executors.newFixedThreadPool(threads);
    try (Context context = withParam()) {
      Future<?>[] futures = new Future<?>[threads];
      for (int t = 0; t < threads; ++t) {
        futures[t] =
            executor.submit(
                () -> {
                  FloatBuffer gradient = floats(1);
                  for (int i = 0; i < calls; ++i) {
                    try {
                      context.accumulate(1, gradient);
                      added.incrementAndGet();
                    } catch (IllegalStateException e) {
                      // Another thread was in a call.
                    }
                  }
                });
      }
      for (Future<?> future : futures) {
        future.get(30, TimeUnit.SECONDS);
      }
      assertEquals(added.get(), context.window().microBatches());
    } finally {
      executor.shutdown();
    }
  }

  @Test
  void closingWhileManyThreadsCall() throws Exception {
    for (int round = 0; round < 50; ++round) {
      Context context = withParam();
      CountDownLatch started = new CountDownLatch(2);
      ExecutorService executor = Executors.newFixedThreadPool(2);
      Future<?>[] futures = new Future<?>[2];
      for (int t = 0; t < futures.length; ++t) {
        futures[t] =
            executor.submit(
                () -> {
                  FloatBuffer gradient = floats(1);
                  started.countDown();
                  while (true) {
                    try {
                      context.accumulate(1, gradient);
                    } catch (IllegalStateException e) {
                      if (e.getMessage().equals("the context is closed")) {
                        return;
                      }
                    }
                  }
                });
      }
      assertTrue(started.await(20, TimeUnit.SECONDS));
      context.close();
      for (Future<?> future : futures) {
        future.get(20, TimeUnit.SECONDS);
      }
      executor.shutdown();
    }
  }

  @Test
  void virtualThreads() throws Exception {
    ExecutorService executor;
    try {
      executor =
          (ExecutorService)
              Executors.class.getMethod("newVirtualThreadPerTaskExecutor").invoke(null);
    } catch (NoSuchMethodException e) {
      assumeTrue(false, "JDK " + Runtime.version().feature() + " has no virtual threads");
      return;
    }
    try (Context context = withParam()) {
      for (int i = 0; i < 50; ++i) {
        executor.submit(() -> context.accumulate(1, floats(1))).get();
        executor.submit(context::step).get();
      }
      assertEquals(50, context.window().steps());
      // Each with a context of its own, more than there are carriers.
      Future<?>[] futures = new Future<?>[100];
      for (int i = 0; i < futures.length; ++i) {
        futures[i] =
            executor.submit(
                () -> {
                  try (Context own = withParam()) {
                    own.accumulate(1, floats(1));
                    Thread.yield();
                    assertTrue(own.step().applied());
                  }
                });
      }
      for (Future<?> future : futures) {
        future.get(30, TimeUnit.SECONDS);
      }
    } finally {
      executor.shutdown();
    }
  }

  @Test
  void aContextLeftToTheCollectorIsDestroyed() throws Exception {
    Context context = new Context(Config.builder().log(line -> {}).build());
    Handle handle = context.handle;
    WeakReference<Context> left = new WeakReference<>(context);
    context.addParam(context.addGroup(sgd(1)), "w", floats(1), 1);
    context = null;
    assertTrue(KeptTest.goes(left));
    for (int i = 0; i < 200 && handle.context != 0; ++i) {
      Thread.sleep(10);
    }
    assertEquals(0, handle.context);
  }

  // A listener that refers to its context is no reason to keep both.
  @Test
  void aListenerDoesNotKeepItsContextAlive() throws Exception {
    WeakReference<Context> left = new WeakReference<>(withListenerOfItsOwn());
    assertTrue(KeptTest.goes(left));
  }

  private static Context withListenerOfItsOwn() {
    Context[] own = new Context[1];
    own[0] = new Context(Config.builder().log(line -> own.hashCode()).build());
    own[0].step();
    return own[0];
  }

  @Test
  void groupsAndParametersKeepTheirContextAlive() throws Exception {
    Context context = new Context();
    WeakReference<Context> reference = new WeakReference<>(context);
    Param param = context.addParam(context.addGroup(sgd(1)), "w", floats(1), 1);
    context = null;
    assertFalse(KeptTest.goes(reference));
    assertEquals(1, param.info().count());
  }

  @Test
  void contextsMadeAndClosedLeaveNoMemory() throws Exception {
    // The heap and the code of Java grow too, now and then, but not in every round.
    long least = Long.MAX_VALUE;
    for (int round = 0; round < 6; ++round) {
      long before = resident();
      for (int i = 0; i < 1_000; ++i) {
        try (Context context = withParam()) {
          context.accumulate(1, floats(1));
          context.step();
        }
      }
      least = Math.min(least, resident() - before);
    }
    // A leak of one context would be some kilobytes each time.
    assertTrue(least < 1_000, least + " KiB in 1,000 contexts");
  }

  private static long resident() throws IOException {
    System.gc();
    for (String line : Files.readAllLines(Path.of("/proc/self/status"))) {
      if (line.startsWith("VmRSS:")) {
        return Long.parseLong(line.replaceAll("[^0-9]", ""));
      }
    }
    throw new AssertionError("no VmRSS");
  }
}
