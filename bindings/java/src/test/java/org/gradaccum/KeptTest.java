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

import java.lang.ref.WeakReference;
import java.nio.Buffer;
import java.nio.ByteBuffer;
import java.nio.FloatBuffer;
import java.util.List;
import org.junit.jupiter.api.Test;

/** How long buffers are kept: as long as the library reads or writes them, and no longer. */
class KeptTest {
  /** Whether what it refers to goes in a few collections. */
  static boolean goes(WeakReference<?> reference) {
    for (int i = 0; i < 20; ++i) {
      System.gc();
      if (reference.refersTo(null)) {
        return true;
      }
      try {
        Thread.sleep(1);
      } catch (InterruptedException e) {
        throw new AssertionError(e);
      }
    }
    return false;
  }

  private static Param add(Context context, WeakReference<?>[] out) {
    FloatBuffer w = floats(1);
    out[0] = new WeakReference<>(w);
    return context.addParam(context.addGroup(sgd(1)), "w", w, 1);
  }

  @Test
  void parametersUntilTheyAreBoundAnew() {
    WeakReference<?>[] w = new WeakReference<?>[1];
    try (Context context = new Context()) {
      Param param = add(context, w);
      assertFalse(goes(w[0]));
      param.bind(floats(2));
      assertTrue(goes(w[0]));
    }
  }

  @Test
  void parametersUntilTheyAreRemovedOrTheContextIsClosed() {
    WeakReference<?>[] w = new WeakReference<?>[1];
    Context context = new Context();
    Param param = add(context, w);
    param.remove();
    assertTrue(goes(w[0]));
    FloatBuffer v = floats(1);
    Param other = context.addParam(context.addGroup(sgd(1)), "v", v, 1);
    w[0] = new WeakReference<>(v);
    v = null;
    assertFalse(goes(w[0]));
    context.close();
    assertTrue(goes(w[0]));
    assertEquals("v", other.name());
  }

  private static WeakReference<Buffer> accumulate(Context context, double weight, float value) {
    FloatBuffer gradient = floats(value);
    context.accumulate(weight, gradient);
    return new WeakReference<>(gradient);
  }

  @Test
  void consumedGradientsForTheCall() {
    try (Context context = new Context()) {
      context.addParam(context.addGroup(sgd(1)), "w", floats(1), 1);
      assertTrue(goes(accumulate(context, 1, 1)));
      assertEquals(0, context.kept().count());
    }
  }

  private static Context live(Config.Nonfinite nonfinite) {
    return new Context(
        Config.builder()
            .gradientLife(Config.GradientLife.LIVE)
            .nonfinite(nonfinite)
            .build());
  }

  @Test
  void lentGradientsUntilTheStep() {
    FloatBuffer w = floats(0);
    Config lending = Config.builder().gradientLife(Config.GradientLife.LENT).build();
    try (Context context = new Context(lending)) {
      Param param = context.addParam(context.addGroup(sgd(1)), "w", w, 1);
      WeakReference<Buffer> first = accumulate(context, 1, 1);
      WeakReference<Buffer> second = accumulate(context, 1, 2);
      assertTrue(goes(second));
      assertFalse(goes(first));
      context.accumulate(2, new float[] {4});
      context.step();
      assertEquals(-2.75f, w.get(0));
      assertTrue(goes(first));
      FloatBuffer readOnly = floats(1).asReadOnlyBuffer();
      IllegalArgumentException refused =
          assertThrows(IllegalArgumentException.class, () -> context.accumulate(1, readOnly));
      assertTrue(refused.getMessage().contains("read-only"), refused.getMessage());
      try (MicroBatch micro = context.beginMicroBatch(1)) {
        assertThrows(IllegalArgumentException.class, () -> micro.accumulate(param, readOnly));
        micro.end();
      }
    }
  }

  @Test
  void liveGradientsUntilTheSecondOrTheStep() {
    FloatBuffer w = floats(0);
    try (Context context = live(Config.Nonfinite.SKIP_STEP)) {
      context.addParam(context.addGroup(sgd(1)), "w", w, 1);
      WeakReference<Buffer> first = accumulate(context, 1, 1);
      assertFalse(goes(first));
      WeakReference<Buffer> second = accumulate(context, 1, 2);
      assertTrue(goes(first));
      assertTrue(goes(second));
      context.step();
      assertEquals(-1.5f, w.get(0));
      first = accumulate(context, 1, 4);
      assertFalse(goes(first));
      context.step();
      assertEquals(-5.5f, w.get(0));
      assertTrue(goes(first));
      first = accumulate(context, 1, 4);
      context.discard();
      assertTrue(goes(first));
    }
  }

  @Test
  void whatWasNotReadIsNotTheFirst() {
    FloatBuffer w = floats(0);
    try (Context context = live(Config.Nonfinite.SKIP_STEP)) {
      context.addParam(context.addGroup(sgd(1)), "w", w, 1);
      assertTrue(goes(accumulate(context, 0, 1)));
      WeakReference<Buffer> first = accumulate(context, 1, 2);
      assertFalse(goes(first));
      context.step();
      assertEquals(-2f, w.get(0));
    }
    w.put(0, 0);
    try (Context context = live(Config.Nonfinite.DROP_MICRO)) {
      context.addParam(context.addGroup(sgd(1)), "w", w, 1);
      accumulate(context, 1, Float.NaN);
      assertTrue(goes(accumulate(context, 1, 2)));
      context.step();
      assertEquals(-2f, w.get(0));
    }
  }

  private static WeakReference<Buffer> part(MicroBatch micro, Param param, float value) {
    FloatBuffer gradient = floats(value);
    micro.accumulate(param, gradient);
    return new WeakReference<>(gradient);
  }

  @Test
  void partsUntilTheMicroBatchEndsWhereTheyAreReadThen() {
    for (boolean clips : new boolean[] {false, true}) {
      Config config =
          Config.builder()
              .nonfinite(clips ? Config.Nonfinite.SKIP_STEP : Config.Nonfinite.DROP_MICRO)
              .build();
      FloatBuffer w = floats(0);
      try (Context context = new Context(config)) {
        Group group = context.addGroup(sgd(1));
        Param param = context.addParam(group, "w", w, 1);
        if (clips) {
          group.setClip(
              Clip.builder(Clip.Scope.GLOBAL)
                  .maxNorm(100)
                  .when(Clip.When.MICRO)
                  .build());
        }
        try (MicroBatch micro = context.beginMicroBatch(1)) {
          WeakReference<Buffer> part = part(micro, param, 3);
          // Copies of arrays are kept too, each in its own buffer. Clipping takes only one part.
          if (!clips) {
            micro.accumulate(param, new float[] {4});
            micro.accumulate(param, new float[] {5});
          }
          assertFalse(goes(part));
          micro.end();
          assertTrue(goes(part));
        }
        try (MicroBatch micro = context.beginMicroBatch(1)) {
          WeakReference<Buffer> part = part(micro, param, 100);
          micro.abort();
          assertTrue(goes(part));
        }
        context.step();
        assertEquals(clips ? -3f : -12f, w.get(0), 1e-4);
      }
    }
  }

  /** A context with one parameter, and a clip of its own or of its group. */
  private static Context clipped(Clip.When when, boolean ofGroup) {
    Context context = new Context();
    Group group = context.addGroup(sgd(1));
    context.addParam(group, "w", floats(1), 1);
    Clip clip = Clip.builder(Clip.Scope.GLOBAL).maxNorm(1).when(when).build();
    if (ofGroup) {
      group.setClip(clip);
    } else {
      context.setClip(clip);
    }
    return context;
  }

  /** Whether a part is kept until its micro-batch ends. */
  private static boolean isKept(Context context) {
    try (MicroBatch micro = context.beginMicroBatch(1)) {
      return !goes(part(micro, context.findParam("w"), 1));
    }
  }

  @Test
  void partsAfterAClipWasCleared() {
    Clip micro = Clip.builder().maxValue(1).when(Clip.When.MICRO).build();
    try (Context context = new Context()) {
      Group group = context.addGroup(sgd(1));
      context.addParam(group, "w", floats(1), 1);
      context.setClip(micro);
      assertTrue(isKept(context));
      // No group has the clip of the context.
      group.setClip(Clip.builder().build());
      assertTrue(isKept(context));
      context.clearClip();
      assertFalse(isKept(context));
      group.setClip(micro);
      assertTrue(isKept(context));
      group.clearClip();
      assertFalse(isKept(context));
    }
  }

  @Test
  void partsAfterALoadOfClips() {
    StateOptions.Builder options = StateOptions.builder();
    for (boolean ofGroup : new boolean[] {false, true}) {
      for (Clip.When when : Clip.When.values()) {
        Clip.When before = when == Clip.When.MICRO ? Clip.When.STEP : Clip.When.MICRO;
        try (Context saved = clipped(when, ofGroup);
            Context context = clipped(before, ofGroup)) {
          ByteBuffer state = saved.saveToBuffer(options.build());
          context.load(state, options.settings(StateOptions.Settings.KEEP).build());
          assertEquals(before == Clip.When.MICRO, isKept(context));
          context.load(state, options.settings(StateOptions.Settings.TAKE).build());
          assertEquals(when == Clip.When.MICRO, isKept(context));
        }
      }
    }
  }

  @Test
  void partsForTheCallElsewhere() {
    try (Context context = new Context()) {
      Param param = context.addParam(context.addGroup(sgd(1)), "w", floats(1), 1);
      try (MicroBatch micro = context.beginMicroBatch(1)) {
        assertTrue(goes(part(micro, param, 1)));
        micro.end();
      }
    }
  }

  @Test
  void livePartsAndPartsOfMicroBatchesThatAreOpenedAgain() {
    FloatBuffer w = floats(0);
    try (Context context = live(Config.Nonfinite.SKIP_STEP)) {
      Param param = context.addParam(context.addGroup(sgd(1)), "w", w, 1);
      WeakReference<Buffer> first;
      try (MicroBatch micro = context.beginMicroBatch(1)) {
        first = part(micro, param, 1);
        micro.end();
      }
      assertFalse(goes(first));
      try (MicroBatch micro = context.beginMicroBatch(0, 1, null)) {
        micro.accumulate(param, new float[] {2});
        micro.end();
      }
      context.step();
      assertEquals(-3f, w.get(0));
      assertTrue(goes(first));
    }
  }

  // Copies of arrays: the library still reads the first one when the next are copied.
  @Test
  void arraysUnderLive() {
    for (Config.Nonfinite nonfinite :
        List.of(Config.Nonfinite.SKIP_STEP, Config.Nonfinite.DROP_MICRO)) {
      FloatBuffer w = floats(0, 0);
      FloatBuffer v = floats(0);
      try (Context context = live(nonfinite)) {
        Group group = context.addGroup(sgd(1));
        context.addParam(group, "w", w, 2);
        context.addParam(group, "v", v, 1);
        for (int window = 0; window < 3; ++window) {
          w.put(0, 0).put(1, 0);
          v.put(0, 0);
          context.accumulate(1, new float[] {1, 2}, new float[] {3});
          context.accumulate(1, new float[] {10, 20}, new float[] {30});
          context.accumulate(1, new float[] {100, 200}, null);
          context.step();
          assertArrayEquals(new float[] {-37, -74}, values(w), 1e-5f);
          assertEquals(-11f, v.get(0), 1e-5);
        }
      }
    }
  }
}
