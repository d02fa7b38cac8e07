// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import static org.gradaccum.Buffers.bytes;
import static org.gradaccum.Buffers.floats;
import static org.gradaccum.Buffers.sgd;
import static org.gradaccum.Buffers.values;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.sun.management.ThreadMXBean;
import java.lang.management.ManagementFactory;
import java.nio.Buffer;
import java.nio.ByteBuffer;
import java.nio.DoubleBuffer;
import java.nio.FloatBuffer;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.stream.Collectors;
import org.junit.jupiter.api.Test;

/** Windows, and what one step makes of them; expected values are computed by hand. */
class WindowTest {
  @Test
  void stepAppliesTheWeightedMean() {
    FloatBuffer w = floats(1, 2);
    FloatBuffer b = floats(10);
    try (Context context = new Context()) {
      Group group = context.addGroup(sgd(0.5));
      context.addParam(group, "w", w, 1, 2);
      context.addParam(group, "b", b, 1);
      context.accumulate(1, floats(1, 2), floats(4));
      context.accumulate(3, floats(5, 6), null);
      StepResult result = context.step();
      assertTrue(result.applied());
      assertEquals(StepResult.Outcome.APPLIED, result.outcome());
      assertEquals(2, result.microBatches());
      assertEquals(4, result.weight());
      assertEquals(1, result.steps());
      assertEquals(1, result.windows());
      assertEquals(0.5, result.lr());
      // (1 1 + 3 5) / 4 = 4, (1 2 + 3 6) / 4 = 5, (1 4) / 4 = 1
      assertArrayEquals(new float[] {1 - 0.5f * 4, 2 - 0.5f * 5}, values(w));
      assertArrayEquals(new float[] {10 - 0.5f}, values(b));
      assertEquals(result, context.stepResult(0, true));
    }
  }

  @Test
  void listsArraysAndTensorsGiveTheSameBits() {
    float[] start = {0.3f, -0.7f, 1.1f};
    float[] gradient = {0.25f, 1e-3f, -3f};
    float[][] ends = new float[4][];
    for (int way = 0; way < ends.length; ++way) {
      FloatBuffer w = floats(start);
      try (Context context = new Context()) {
        Group group =
            context.addGroup(Optimizer.builder(Optimizer.Kind.ADAMW).lr(0.01).build());
        context.addParam(group, "w", w, 3);
        for (int step = 0; step < 3; ++step) {
          FloatBuffer direct = floats(gradient);
          switch (way) {
            case 0 -> context.accumulate(2, direct);
            case 1 -> context.accumulate(2, List.of(direct));
            case 2 -> context.accumulate(2, gradient);
            default ->
                context.accumulate(2, Tensor.ofAddress(Raw.buffer_address(direct), 12, Dtype.F32));
          }
          context.step();
        }
      }
      ends[way] = values(w);
      assertNotEquals(start[0], ends[way][0]);
      assertArrayEquals(ends[0], ends[way]);
    }
  }

  @Test
  void aFullWindowRefusesMore() {
    FloatBuffer w = floats(1);
    try (Context context = new Context(Config.builder().accumSteps(1).build())) {
      context.addParam(context.addGroup(sgd(1)), "w", w, 1);
      context.accumulate(1, floats(1));
      assertEquals(Window.State.FULL, context.window().state());
      GradAccumException e =
          assertThrows(GradAccumException.class, () -> context.accumulate(1, floats(1)));
      assertEquals(Status.WINDOW_FULL, e.status());
      assertTrue(e.getMessage().startsWith("GA_ERROR_WINDOW_FULL: "), e.getMessage());
      assertTrue(context.step().applied());
    }
  }

  @Test
  void theLastMicroBatchFillsTheWindow() {
    try (Context context = new Context()) {
      context.addParam(context.addGroup(sgd(1)), "w", floats(1), 1);
      context.accumulate(MicroOptions.LAST, 1, floats(1));
      assertEquals(Window.State.FULL, context.window().state());
    }
  }

  @Test
  void aLossScaleIsDividedOut() {
    FloatBuffer w = floats(1);
    try (Context context = new Context()) {
      context.addParam(context.addGroup(sgd(1)), "w", w, 1);
      context.accumulate(new MicroOptions(8, false), 1, floats(4));
      context.step();
      assertEquals(0.5f, w.get(0));
    }
  }

  @Test
  void microBatchesByPartAddUp() {
    FloatBuffer w = floats(1, 1);
    FloatBuffer b = floats(1);
    try (Context context = new Context()) {
      Group group = context.addGroup(sgd(1));
      Param pw = context.addParam(group, "w", w, 2);
      Param pb = context.addParam(group, "b", b, 1);
      try (MicroBatch micro = context.beginMicroBatch(2)) {
        assertEquals(0, context.window().openMicro());
        micro.accumulate(pb, floats(3));
        micro.accumulate(pw, new float[] {1, 2});
        micro.accumulate(pw, Tensor.of(floats(1, 1)));
        micro.end();
      }
      assertEquals(-1, context.window().openMicro());
      context.step();
      assertArrayEquals(new float[] {-1, -2}, values(w));
      assertArrayEquals(new float[] {-2}, values(b));
    }
  }

  @Test
  void aMicroBatchThatWasNotEndedIsDiscarded() {
    FloatBuffer w = floats(1);
    try (Context context = new Context()) {
      Param pw = context.addParam(context.addGroup(sgd(1)), "w", w, 1);
      assertThrows(
          ArithmeticException.class,
          () -> {
            try (MicroBatch micro = context.beginMicroBatch(1)) {
              micro.accumulate(pw, floats(1));
              throw new ArithmeticException("in the backward pass");
            }
          });
      assertEquals(Window.State.EMPTY, context.window().state());
      assertFalse(context.step().applied());
      assertEquals(1f, w.get(0));
    }
  }

  @Test
  void anEndedMicroBatchTakesNoMore() {
    try (Context context = new Context()) {
      Param w = context.addParam(context.addGroup(sgd(1)), "w", floats(1), 1);
      MicroBatch micro = context.beginMicroBatch(1);
      micro.accumulate(w, floats(1));
      micro.end();
      assertThrows(IllegalStateException.class, micro::end);
      assertThrows(IllegalStateException.class, () -> micro.accumulate(w, floats(1)));
      micro.close();
      assertEquals(1, context.window().microBatches());
      MicroBatch aborted = context.beginMicroBatch(1);
      aborted.abort();
      aborted.close();
      assertEquals(1, context.window().microBatches());
    }
  }

  @Test
  void microBatchesMayBeOpenedAgain() {
    FloatBuffer w = floats(0, 0);
    try (Context context = new Context()) {
      Group group = context.addGroup(sgd(1));
      Param a = context.addParam(group, "a", w.slice(0, 1), 1);
      Param b = context.addParam(group, "b", w.slice(1, 1), 1);
      for (Param param : List.of(a, b)) {
        for (int i = 0; i < 2; ++i) {
          try (MicroBatch micro = context.beginMicroBatch(i, 1, null)) {
            micro.accumulate(param, floats(i + 1));
            micro.end();
          }
        }
      }
      context.step();
      assertArrayEquals(new float[] {-1.5f, -1.5f}, values(w));
    }
  }

  @Test
  void rowsAndScheduleOfK() {
    FloatBuffer table = floats(0, 0, 0, 0, 0, 0);
    try (Context context = new Context()) {
      Group group = context.addGroup(sgd(1));
      Param param =
          context.addParam(
              group,
              "embedding",
              Tensor.of(table),
              ParamOptions.builder().rows(ParamOptions.Rows.LAZY).build(),
              3,
              2);
      context.setAccumSchedule(new long[] {0, 1}, new long[] {1, 2});
      try (MicroBatch micro = context.beginMicroBatch(1)) {
        micro.accumulateRows(
            param,
            Buffers.bytes(8).asIntBuffer().put(2).put(2).flip(),
            floats(1, 2, 3, 4));
        micro.end();
      }
      assertEquals(Window.State.FULL, context.window().state());
      context.step();
      assertArrayEquals(new float[] {0, 0, 0, 0, -4, -6}, values(table));
      try (MicroBatch micro = context.beginMicroBatch(1)) {
        Tensor indices =
            Tensor.of(Buffers.bytes(8).asLongBuffer().put(0, 0));
        micro.accumulateRows(param, indices, Tensor.of(floats(1, 1)));
        micro.end();
      }
      assertEquals(2, context.window().accumSteps());
      assertEquals(Window.State.OPEN, context.window().state());
      context.discard();
      context.setAccumSchedule(new long[0], new long[0]);
      context.setAccumSteps(5);
      assertEquals(5, context.window().accumSteps());
      assertThrows(
          IllegalArgumentException.class,
          () -> context.setAccumSchedule(new long[] {0, 1}, new long[] {1}));
    }
  }

  @Test
  void aFlatBlockHasOneGradient() {
    FloatBuffer block = floats(1, 2, 3, 4, 5);
    try (Context context = new Context()) {
      Group group = context.addGroup(sgd(1));
      List<Param> params =
          context.addFlat(
              block,
              List.of(new FlatEntry(group, "a", 0, 2), new FlatEntry(group, "b", 3, 1, 2)));
      assertEquals(1, context.slotCount());
      assertEquals(2, context.paramCount());
      assertEquals(1, context.groupCount());
      assertEquals(3, params.get(1).info().offset());
      assertEquals(List.of(1L, 2L), params.get(1).info().shape());
      context.accumulate(1, floats(1, 1, 1, 1, 1));
      context.step();
      assertArrayEquals(new float[] {0, 1, 3, 3, 4}, values(block));
      Exception e =
          assertThrows(
              IllegalArgumentException.class, () -> context.accumulate(1, floats(1, 1, 1, 1)));
      assertTrue(e.getMessage().contains("expected 5 elements of F32"), e.getMessage());
    }
  }

  @Test
  void anEmptyBlockHasAGradientThatIsNotRead() {
    FloatBuffer w = floats(1);
    try (Context context = new Context()) {
      Group group = context.addGroup(sgd(1));
      assertEquals(List.of(), context.addFlat(floats(), List.of()));
      context.addParam(group, "w", w, 1);
      assertEquals(2, context.slotCount());
      context.accumulate(1, null, floats(0.5f));
      context.accumulate(1, floats(7), floats(0.5f));
      context.step();
      assertArrayEquals(new float[] {0.5f}, values(w));
    }
  }

  @Test
  void matrixProductsOrAPlainAnswer() {
    FloatBuffer w = floats(0, 0, 0, 0, 0, 0);
    try (Context context = new Context()) {
      Param param = context.addParam(context.addGroup(sgd(1)), "w", w, 2, 3);
      // y = x W^T with a batch of 2: the gradient is dy^T x.
      FloatBuffer dy = floats(1, 2, 3, 4);
      FloatBuffer x = floats(1, 0, 1, 0, 1, 1);
      try (MicroBatch micro = context.beginMicroBatch(1)) {
        Runnable multiply =
            () ->
                micro.accumulateMatmul(
                    param, 2, dy, 2, Transpose.TRANSPOSE, x, 3, Transpose.NO_TRANSPOSE);
        multiply.run();
        IllegalArgumentException e =
            assertThrows(
                IllegalArgumentException.class,
                () ->
                    micro.accumulateMatmul(
                        param, 3, dy, 2, Transpose.TRANSPOSE, x, 3, Transpose.NO_TRANSPOSE));
        assertTrue(e.getMessage().startsWith("parameter \"w\": a: there are 16"), e.getMessage());
        for (long huge : new long[] {Long.MAX_VALUE, 1L << 62, -1}) {
          assertThrows(
              IllegalArgumentException.class,
              () ->
                  micro.accumulateMatmul(
                      param, 2, dy, huge, Transpose.TRANSPOSE, x, 3, Transpose.NO_TRANSPOSE));
          assertThrows(
              IllegalArgumentException.class,
              () ->
                  micro.accumulateMatmul(
                      param, huge, dy, huge, Transpose.NO_TRANSPOSE, x, 3, Transpose.NO_TRANSPOSE));
        }
        micro.end();
      }
      context.step();
      assertArrayEquals(new float[] {-1, -3, -4, -2, -4, -6}, values(w));
    }
  }

  @Test
  void groupsHaveSettingsOfTheirOwn() {
    try (Context context = new Context()) {
      Group group = context.addGroup(Optimizer.builder(Optimizer.Kind.ADAMW).build());
      context.addParam(group, "w", floats(1), 1);
      group.setLr(0.25);
      group.setWeightDecay(0.125);
      Optimizer now = group.optimizer();
      assertEquals(0.25, now.lr());
      assertEquals(0.125, now.weightDecay());
      assertEquals(Optimizer.Kind.ADAMW, now.kind());
      group.setOptimizer(now.toBuilder().lr(1).build());
      assertEquals(1, group.lr());
      assertEquals(0, group.lastLr());
      group.setSchedule(
          Schedule.builder(Schedule.Kind.TABLE).table(new double[] {0.5, 0.25}).build());
      assertEquals(0.5, group.lr());
      context.accumulate(1, floats(1));
      context.step();
      assertEquals(0.5, group.lastLr());
      assertEquals(0.25, group.lr());
      group.clearSchedule();
      assertEquals(1, group.lr());
      context.setSteps(7);
      assertEquals(7, context.window().steps());
    }
  }

  @Test
  void clipsLossScaleAndAverages() {
    FloatBuffer w = floats(0, 0);
    try (Context context = new Context()) {
      Group group = context.addGroup(sgd(1));
      Param param = context.addParam(group, "w", w, 2);
      context.setEma(Ema.builder().decay(0.5).build());
      context.setClip(Clip.builder(Clip.Scope.GLOBAL).maxNorm(1).build());
      context.setLossScaler(LossScaler.builder().initialScale(4).build());
      assertEquals(4, context.lossScale());
      assertThrows(GradAccumException.class, context::deviceLossScale);
      context.accumulate(1, floats(12, 16));
      StepResult result = context.step();
      assertEquals(5, result.norm());
      assertEquals(1 / (5 + 1e-6), result.clipFactor(), 1e-9);
      assertEquals(-0.6f, w.get(0), 1e-6);
      context.clearClip();
      context.clearLossScaler();
      assertEquals(1, context.lossScale());
      group.setClip(Clip.builder().maxValue(0.5).build());
      context.accumulate(1, floats(1, 0));
      context.step();
      group.clearClip();
      assertEquals(-1.1f, w.get(0), 1e-6);
      FloatBuffer average = floats(0, 0);
      param.copyEmaTo(average);
      assertEquals((-0.6 - 1.1) / 2, average.get(0), 1e-6);
      try (EmaScope scope = context.swapEma()) {
        assertEquals(average.get(0), w.get(0));
        scope.close();
        assertEquals(-1.1f, w.get(0), 1e-6);
      }
      assertThrows(GradAccumException.class, context::clearEma);
    }
  }

  @Test
  void clipsAreReadBack() {
    Clip none = Clip.builder().build();
    Clip clip =
        Clip.builder(Clip.Scope.GLOBAL)
            .maxNorm(2)
            .flavor(Flavor.KERAS)
            .when(Clip.When.MICRO)
            .build();
    Clip own =
        Clip.builder(Clip.Scope.AGC)
            .maxValue(0.5)
            .agcFactor(0.25)
            .agcEps(0.125)
            .agcUnits(Clip.AgcUnits.TORCH)
            .build();
    try (Context context = new Context();
        Context loaded = new Context()) {
      Group group = context.addGroup(sgd(1));
      Group other = context.addGroup(sgd(1));
      assertEquals(none, context.clip());
      assertEquals(none, group.clip());
      context.setClip(clip);
      group.setClip(own);
      assertEquals(clip, context.clip());
      assertEquals(own, group.clip());
      assertEquals(clip, other.clip());
      Group first = loaded.addGroup(sgd(1));
      Group second = loaded.addGroup(sgd(1));
      loaded.load(
          context.saveToBuffer(StateOptions.builder().build()),
          StateOptions.builder().settings(StateOptions.Settings.TAKE).build());
      assertEquals(clip, loaded.clip());
      assertEquals(own, first.clip());
      assertEquals(clip, second.clip());
      context.clearClip();
      assertEquals(none, context.clip());
      assertEquals(own, group.clip());
      assertEquals(none, other.clip());
      group.clearClip();
      assertEquals(none, group.clip());
    }
  }

  @Test
  void parametersMoveFreezeAndGo() {
    FloatBuffer w = floats(1);
    try (Context context = new Context()) {
      Group group = context.addGroup(sgd(1));
      Param param = context.addParam(group, "w", w, 1);
      Param other = context.addParam(group, "v", floats(1), 1);
      FloatBuffer moved = floats(5);
      param.bind(moved);
      param.changed();
      context.accumulate(1, floats(1), floats(1));
      context.step();
      assertEquals(1f, w.get(0));
      assertEquals(4f, moved.get(0));
      param.setFrozen(true);
      assertTrue(param.info().frozen());
      context.accumulate(1, floats(1), floats(1));
      context.step();
      assertEquals(4f, moved.get(0));
      group.setFrozen(false);
      param.setLrScale(0.5);
      param.setWeightDecayScale(0.25);
      assertEquals(0.5, param.info().lrScale());
      assertEquals(0.25, param.info().weightDecayScale());
      context.accumulate(1, floats(1), floats(1));
      context.step();
      assertEquals(3.5f, moved.get(0));
      assertEquals(1, other.slot());
      assertEquals(param, context.findParam("w"));
      param.remove();
      // The gradient of a parameter that was removed is not read, whatever it is.
      context.accumulate(1, floats(1, 2, 3), floats(1));
      context.step();
      assertThrows(GradAccumException.class, param::info);
      assertThrows(GradAccumException.class, () -> context.findParam("w"));
    }
  }

  @Test
  void stateByName() {
    try (Context context = new Context()) {
      Param param =
          context.addParam(
              context.addGroup(Optimizer.builder(Optimizer.Kind.ADAM).build()), "w", floats(1), 1);
      context.prepare();
      context.synchronize();
      GradAccumException onCpu =
          assertThrows(GradAccumException.class, () -> context.setStream(0));
      assertEquals(Status.UNSUPPORTED, onCpu.status());
      assertTrue(context.memory().optimizerState() > 0);
      context.accumulate(1, floats(1));
      context.step();
      assertEquals(
          List.of("exp_avg", "exp_avg_sq", "step"),
          param.state().stream().map(StateInfo::name).sorted().toList());
      FloatBuffer average = floats(0);
      param.getState("exp_avg", average);
      assertEquals(0.1f, average.get(0), 1e-7);
      param.setState("exp_avg", floats(7));
      param.getState("exp_avg", average);
      assertEquals(7f, average.get(0));
      GradAccumException e =
          assertThrows(GradAccumException.class, () -> param.getState("momentum", average));
      assertTrue(e.getMessage().contains("exp_avg"), e.getMessage());
      assertThrows(
          IllegalArgumentException.class, () -> param.getState("exp_avg", floats(0, 0)));
      assertThrows(IllegalArgumentException.class, () -> param.getState("step", floats(0)));
      param.resetState();
      param.getState("exp_avg", average);
      assertEquals(0f, average.get(0));
    }
  }

  /** Steps of ADAMW on a parameter that is large enough for state in 8 bits. */
  private static void stepsOfCodes(Context context, int steps) {
    FloatBuffer gradient = bytes(4 * 5000).asFloatBuffer();
    for (int step = 0; step < steps; ++step) {
      for (int i = 0; i < 5000; ++i) {
        gradient.put(i, (float) Math.sin(0.7 * i + step));
      }
      context.accumulate(1, gradient);
      context.step();
    }
  }

  private static Param paramOfCodes(Context context, FloatBuffer w) {
    Optimizer optimizer =
        Optimizer.builder(Optimizer.Kind.ADAMW)
            .lr(0.01)
            .stateDtype(Optional.of(Dtype.STATE_8BIT))
            .build();
    return context.addParam(context.addGroup(optimizer), "w", w, 50, 100);
  }

  @Test
  void stateIn8Bits() {
    FloatBuffer w = bytes(4 * 5000).asFloatBuffer();
    FloatBuffer other = bytes(4 * 5000).asFloatBuffer();
    try (Context context = new Context();
        Context second = new Context()) {
      Param param = paramOfCodes(context, w);
      Param loaded = paramOfCodes(second, other);
      stepsOfCodes(context, 3);
      assertEquals(
          Map.of(
              "exp_avg", Dtype.U8, "exp_avg_scale", Dtype.F32, "exp_avg_sq", Dtype.U8,
              "exp_avg_sq_scale", Dtype.F32, "step", Dtype.I64),
          param.state().stream().collect(Collectors.toMap(StateInfo::name, StateInfo::dtype)));
      ByteBuffer codes = bytes(5000);
      FloatBuffer numbers = bytes(4 * 5000).asFloatBuffer();
      ByteBuffer sameNumbers = bytes(4 * 5000);
      FloatBuffer scale = bytes(4 * 20).asFloatBuffer();
      param.getState("exp_avg", codes);
      param.getState("exp_avg", numbers);
      param.getState("exp_avg", Tensor.of(sameNumbers, Dtype.F32));
      param.getState("exp_avg_scale", scale);
      assertEquals(numbers, sameNumbers.asFloatBuffer());
      float largest = 0;
      for (int i = 0; i < 256; ++i) {
        largest = Math.max(largest, Math.abs(numbers.get(i)));
      }
      assertEquals(scale.get(0), largest);
      // Numbers of codes become the same codes, and codes are written as they are.
      for (Buffer written : new Buffer[] {numbers, codes}) {
        param.resetState();
        stepsOfCodes(context, 1);
        param.setState("exp_avg", written);
        param.setState("exp_avg_scale", scale);
        ByteBuffer again = bytes(5000);
        param.getState("exp_avg", again);
        assertEquals(codes, again);
      }
      assertThrows(
          IllegalArgumentException.class, () -> param.getState("exp_avg", bytes(4 * 5000)));
      DoubleBuffer doubles = bytes(8 * 5000).asDoubleBuffer();
      assertThrows(IllegalArgumentException.class, () -> param.getState("exp_avg", doubles));

      StateOptions all = StateOptions.builder().build();
      second.load(context.saveToBuffer(all), all);
      stepsOfCodes(context, 2);
      stepsOfCodes(second, 2);
      assertEquals(w, other);
      for (StateInfo array : param.state()) {
        ByteBuffer mine = bytes((int) array.count() * array.dtype().bytes());
        ByteBuffer theirs = bytes(mine.capacity());
        param.getState(array.name(), mine);
        loaded.getState(array.name(), theirs);
        assertEquals(mine, theirs, array.name());
      }
    }
  }

  @Test
  void nonfiniteWindowsAreSkippedOrFail() {
    try (Context context = new Context()) {
      context.addParam(context.addGroup(sgd(1)), "w", floats(1), 1);
      context.accumulate(1, floats(Float.NaN));
      assertEquals(StepResult.Outcome.SKIPPED_NONFINITE, context.step().outcome());
    }
    try (Context context =
        new Context(Config.builder().nonfinite(Config.Nonfinite.FAIL).build())) {
      context.addParam(context.addGroup(sgd(1)), "w", floats(1), 1);
      context.accumulate(1, floats(Float.NaN));
      GradAccumException e = assertThrows(GradAccumException.class, context::step);
      assertEquals(Status.NONFINITE, e.status());
      context.discard();
    }
  }

  @Test
  void anAccumulateAllocatesNothing() {
    // What com.sun.management counts is exact for a thread that allocates nothing.
    var threads = (ThreadMXBean) ManagementFactory.getThreadMXBean();
    try (Context context = new Context()) {
      Group group = context.addGroup(sgd(1));
      Buffer[] gradients = new Buffer[8];
      for (int i = 0; i < gradients.length; ++i) {
        gradients[i] = floats(1);
        context.addParam(group, "w" + i, floats(1), 1);
      }
      for (int i = 0; i < 30_000; ++i) {
        context.accumulate(1, gradients);
      }
      long before = threads.getCurrentThreadAllocatedBytes();
      for (int i = 0; i < 1000; ++i) {
        context.accumulate(1, gradients);
      }
      long bytes = threads.getCurrentThreadAllocatedBytes() - before;
      assertTrue(bytes < 1000 * 64, bytes + " bytes in 1000 calls");
    }
  }

  @Test
  void tooFewAndTooManyGradients() {
    try (Context context = new Context()) {
      context.addParam(context.addGroup(sgd(1)), "w", floats(1), 1);
      FloatBuffer[] none = {};
      FloatBuffer[] two = {floats(1), floats(1)};
      assertThrows(GradAccumException.class, () -> context.accumulate(1, none));
      GradAccumException e =
          assertThrows(GradAccumException.class, () -> context.accumulate(1, two));
      assertEquals(Status.INVALID_ARGUMENT, e.status());
      assertThrows(
          NullPointerException.class, () -> context.accumulate(1, (List<FloatBuffer>) null));
      assertThrows(NullPointerException.class, () -> context.accumulate(1, (Buffer[]) null));
      context.accumulate(1, Arrays.asList(new FloatBuffer[] {null}));
      assertThrows(GradAccumException.class, () -> context.accumulate(-1, floats(1)));
    }
  }
}
