// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import static org.gradaccum.Buffers.floats;
import static org.gradaccum.Buffers.sgd;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.lang.ref.WeakReference;
import java.nio.ByteBuffer;
import java.nio.FloatBuffer;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;

/** Updates ahead of the step: Config.eager, and the listener of parameters that are done. */
class EagerTest {
  private static final int LARGE = 70_001;

  private static float[] numbers(int count, int seed) {
    float[] values = new float[count];
    for (int i = 0; i < count; ++i) {
      values[i] = (i * 31 + seed * 17) % 23 - 11;
    }
    return values;
  }

  /** Two parameters under momentum. The second one is ready first, as in a backward pass. */
  private static final class Training implements AutoCloseable {
    final FloatBuffer[] data = {floats(numbers(LARGE, 1)), floats(numbers(5, 2))};
    final Context context;
    final List<Param> params = new ArrayList<>();

    Training(Config config) {
      context = new Context(config);
      Group group =
          context.addGroup(Optimizer.builder(Optimizer.Kind.SGD).lr(0.5).momentum(0.9).build());
      params.add(context.addParam(group, "w", data[0], LARGE));
      params.add(context.addParam(group, "b", data[1], 5));
    }

    StepResult window(int number) {
      context.accumulate(1, numbers(LARGE, number), numbers(5, number));
      try (MicroBatch micro = context.beginMicroBatch(-1, 1, MicroOptions.LAST)) {
        micro.accumulate(params.get(1), numbers(5, number + 1));
        context.ready(params.get(1));
        micro.accumulate(params.get(0), numbers(LARGE, number + 1));
        context.ready(params.get(0));
        micro.end();
      }
      return context.step();
    }

    @Override
    public void close() {
      context.close();
    }
  }

  private static Config.Builder eager() {
    return Config.builder().eager(true);
  }

  private static Config.Builder inPlace() {
    return eager().nonfinite(Config.Nonfinite.IGNORE);
  }

  @Test
  void parametersAreThoseOfTheStep() {
    for (Config.GradientLife life : Config.GradientLife.values()) {
      for (boolean inPlace : new boolean[] {false, true}) {
        for (int threads = 0; threads < 2; ++threads) {
          List<Param> done = Collections.synchronizedList(new ArrayList<>());
          List<Thread> on = Collections.synchronizedList(new ArrayList<>());
          Config config =
              (inPlace ? inPlace() : eager())
                  .gradientLife(life)
                  .eagerThreads(threads)
                  .onParamDone(
                      param -> {
                        done.add(param);
                        on.add(Thread.currentThread());
                      })
                  .build();
          try (Training plain = new Training(config.toBuilder().eager(false).build());
              Training eager = new Training(config)) {
            assertEquals(0, plain.context.memory().eager());
            assertEquals(inPlace, eager.context.memory().eager() == 0);
            for (int number = 0; number < 4; ++number) {
              assertEquals(0, plain.window(number).eager());
              done.clear();
              on.clear();
              StepResult result = eager.window(number);
              // The step makes the updates that a thread has not begun with.
              assertTrue(threads == 0 ? result.eager() == 2 : result.eager() <= 2);
              assertEquals(0, result.eagerWaited());
              assertEquals(0, result.eagerRedone());
              assertEquals(List.of(eager.params.get(1), eager.params.get(0)), done);
              boolean own = !inPlace || threads == 0;
              for (Thread thread : on) {
                assertTrue(
                    thread == Thread.currentThread()
                        || (!own && thread.isDaemon() && thread.getName().equals("gradaccum")));
              }
              for (int i = 0; i < 2; ++i) {
                assertArrayEquals(
                    Buffers.values(plain.data[i]), Buffers.values(eager.data[i]));
              }
            }
          }
        }
      }
    }
  }

  @Test
  void whatWaitsAndWhatIsMadeAnew() {
    try (Training little = new Training(eager().eagerBytes(1 << 10).build());
        Training clipped = new Training(eager().build())) {
      StepResult result = little.window(1);
      assertEquals(1, result.eager());
      assertEquals(1, result.eagerWaited());
      long bytes = little.context.memory().eager();
      assertTrue(bytes > 0 && bytes <= 1 << 10, bytes + " bytes");
      clipped.context.setClip(Clip.builder(Clip.Scope.GLOBAL).maxNorm(0.5).build());
      result = clipped.window(1);
      assertTrue(result.clipFactor() < 1);
      assertEquals(2, result.eager());
      assertEquals(2, result.eagerRedone());
    }
  }

  @Test
  void whatIsUpdatedInPlaceIsThereAtOnce() {
    FloatBuffer w = floats(1, 2);
    try (Context context = new Context(inPlace().build())) {
      Param param = context.addParam(context.addGroup(sgd(1)), "w", w, 2);
      try (MicroBatch micro = context.beginMicroBatch(-1, 1, MicroOptions.LAST)) {
        micro.accumulate(param, floats(3, 3));
        context.ready(param);
        assertArrayEquals(new float[] {-2, -1}, Buffers.values(w));
        GradAccumException e = assertThrows(GradAccumException.class, context::discard);
        assertEquals(Status.INVALID_STATE, e.status());
        micro.end();
      }
      assertTrue(context.step().applied());
    }
  }

  @Test
  void aParameterThatMayBeWrittenEarly() {
    long[] bytes = new long[2];
    for (int early = 0; early < 2; ++early) {
      ByteBuffer w = Buffers.bytes(2 * LARGE);
      try (Context context = new Context(eager().build())) {
        ParamOptions options = ParamOptions.builder().writeEarly(early == 1).build();
        Param param =
            context.addParam(
                context.addGroup(sgd(1)),
                "w",
                Tensor.of(w.asShortBuffer(), Dtype.BF16),
                options,
                LARGE);
        bytes[early] = context.memory().eager();
        ByteBuffer ones = Buffers.bytes(2 * LARGE);
        while (ones.hasRemaining()) {
          ones.putShort((short) 0x3f80);
        }
        try (MicroBatch micro = context.beginMicroBatch(-1, 1, MicroOptions.LAST)) {
          micro.accumulate(param, Tensor.of(ones.flip().asShortBuffer(), Dtype.BF16));
          context.ready(param);
          micro.end();
        }
        assertEquals(1, context.step().eager());
        assertEquals((short) 0xbf80, w.getShort(0));
        assertEquals((short) 0xbf80, w.getShort(2 * LARGE - 2));
      }
    }
    assertTrue(bytes[1] < bytes[0], bytes[1] + " bytes in place of " + bytes[0]);
  }

  /** Runs a window in which the listener is called while this thread is in no call. */
  private static void train(Context context, CountDownLatch called) throws Exception {
    Param param = context.addParam(context.addGroup(sgd(1)), "w", floats(1), 1);
    try (MicroBatch micro = context.beginMicroBatch(-1, 1, MicroOptions.LAST)) {
      micro.accumulate(param, floats(1));
      context.ready(param);
      assertTrue(called.await(20, TimeUnit.SECONDS));
      micro.end();
    }
    context.step();
  }

  @Test
  void aListenerMustNotUseItsContext() throws Exception {
    for (int threads = 0; threads < 2; ++threads) {
      List<Throwable> thrown = Collections.synchronizedList(new ArrayList<>());
      CountDownLatch called = new CountDownLatch(1);
      Config config =
          inPlace()
              .eagerThreads(threads)
              .onParamDone(
                  param -> {
                    Context own = param.context();
                    thrown.add(assertThrows(IllegalStateException.class, own::step));
                    thrown.add(assertThrows(IllegalStateException.class, own::close));
                    called.countDown();
                  })
              .build();
      try (Context context = new Context(config)) {
        train(context, called);
        assertEquals(1, context.window().steps());
      }
      assertEquals(2, thrown.size());
      assertEquals(
          "a callback used the context that it was called for", thrown.get(0).getMessage());
      assertEquals(
          "a callback closed the context that it was called for", thrown.get(1).getMessage());
    }
  }

  @Test
  void whatAListenerThrowsComesOut() {
    for (int threads = 0; threads < 2; ++threads) {
      RuntimeException thrown = new RuntimeException("in the listener");
      CountDownLatch called = new CountDownLatch(1);
      Config config =
          inPlace()
              .eagerThreads(threads)
              .onParamDone(
                  param -> {
                    called.countDown();
                    throw thrown;
                  })
              .build();
      try (Context context = new Context(config)) {
        assertSame(
            thrown, assertThrows(RuntimeException.class, () -> train(context, called)));
      }
    }
  }

  // Nothing but the library uses the buffers of the parameter and of its gradient any more.
  @Test
  void aContextIsLeftToTheCollectorWhileItsThreadWorks() throws Exception {
    CountDownLatch called = new CountDownLatch(1);
    CountDownLatch goOn = new CountDownLatch(1);
    Config config =
        inPlace()
            .eagerThreads(1)
            .gradientLife(Config.GradientLife.LIVE)
            .onParamDone(
                param -> {
                  called.countDown();
                  try {
                    goOn.await(20, TimeUnit.SECONDS);
                  } catch (InterruptedException e) {
                    throw new IllegalStateException(e);
                  }
                })
            .build();
    List<WeakReference<?>> left = new ArrayList<>();
    leave(config, left);
    assertTrue(called.await(20, TimeUnit.SECONDS));
    // The listener's call refers to the context.
    assertFalse(KeptTest.goes(left.get(0)));
    goOn.countDown();
    for (WeakReference<?> reference : left) {
      assertTrue(KeptTest.goes(reference));
    }
  }

  private static void leave(Config config, List<WeakReference<?>> left) {
    FloatBuffer w = floats(numbers(LARGE, 1));
    FloatBuffer gradient = floats(numbers(LARGE, 2));
    Context context = new Context(config);
    Param param = context.addParam(context.addGroup(sgd(1)), "w", w, LARGE);
    MicroBatch micro = context.beginMicroBatch(-1, 1, MicroOptions.LAST);
    micro.accumulate(param, gradient);
    context.ready(param);
    for (Object object : new Object[] {context, w, gradient}) {
      left.add(new WeakReference<>(object));
    }
  }
}
