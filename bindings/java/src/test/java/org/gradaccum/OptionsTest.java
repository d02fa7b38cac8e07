// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import static org.gradaccum.Buffers.floats;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.lang.reflect.RecordComponent;
import java.util.List;
import java.util.Locale;
import java.util.Optional;
import java.util.Set;
import org.junit.jupiter.api.Test;

/** Builders, records and enumerators against the structs of C. */
class OptionsTest {
  // What is no number in C, and is tested where it is used.
  private static final Set<String> OTHERS =
      Set.of("table", "log", "onParamDone", "progress", "note", "newtonSchulz", "nsTable");

  /** Sets every component to a value of its own, and finds it in the field of that name. */
  private static void fieldsOf(Record record, Object builder, AutoCloseable struct)
      throws Exception {
    Class<?> type = record.getClass();
    int number = 1;
    for (RecordComponent component : type.getRecordComponents()) {
      if (OTHERS.contains(component.getName())) {
        continue;
      }
      ++number;
      Object value = other(component, component.getAccessor().invoke(record), number);
      for (Method method : builder.getClass().getMethods()) {
        if (method.getName().equals(component.getName()) && method.getParameterCount() == 1) {
          method.invoke(builder, value);
        }
      }
    }
    Record built = (Record) builder.getClass().getMethod("build").invoke(builder);
    Method write = type.getDeclaredMethod("write", struct.getClass());
    write.invoke(built, struct);
    for (RecordComponent component : type.getRecordComponents()) {
      if (OTHERS.contains(component.getName())) {
        continue;
      }
      Object value = component.getAccessor().invoke(built);
      Object found = field(struct, component.getName());
      assertEquals(number(value), ((Number) found).doubleValue(), component.getName());
    }
    // Read back, they are the same again.
    Object read = type.getDeclaredMethod("read", struct.getClass()).invoke(null, struct);
    Record again = (Record) read.getClass().getMethod("build").invoke(read);
    for (RecordComponent component : type.getRecordComponents()) {
      if (!OTHERS.contains(component.getName())) {
        assertEquals(
            component.getAccessor().invoke(built),
            component.getAccessor().invoke(again),
            component.getName());
      }
    }
    Object copy = type.getMethod("toBuilder").invoke(built);
    assertEquals(
        built.toString(), copy.getClass().getMethod("build").invoke(copy).toString());
  }

  private static Object field(AutoCloseable struct, String name)
      throws ReflectiveOperationException {
    String field = name.replaceAll("([A-Z])", "_$1").toLowerCase(Locale.ROOT);
    String property = field.substring(0, 1).toUpperCase(Locale.ROOT) + field.substring(1);
    Method getter = struct.getClass().getMethod("get" + property);
    getter.setAccessible(true);
    return getter.invoke(struct);
  }

  private static Object other(RecordComponent component, Object value, int number) {
    Class<?> type = component.getType();
    if (type == boolean.class) {
      return !(Boolean) value;
    }
    if (type == double.class) {
      return number + 0.25;
    }
    if (type == long.class) {
      return (1L << 40) + number;
    }
    if (type == int.class) {
      return number;
    }
    if (type == Optional.class) {
      return Optional.of(
          component.getName().equals("reduce") ? Config.Reduce.MAX : Dtype.BF16);
    }
    Object[] enumerators = type.getEnumConstants();
    return enumerators[enumerators.length - 1];
  }

  private static double number(Object value) {
    if (value instanceof Optional<?> enumerator) {
      return ((Numbered) enumerator.orElseThrow()).value();
    }
    if (value instanceof Boolean flag) {
      return flag ? 1 : 0;
    }
    return value instanceof Numbered enumerator
        ? enumerator.value()
        : ((Number) value).doubleValue();
  }

  @Test
  void everyFieldReachesItsOwn() throws Exception {
    Optimizer.Builder adam = Optimizer.builder(Optimizer.Kind.ADAM);
    fieldsOf(adam.build(), adam, new ga_optimizer(1, 0));
    Schedule.Builder schedule = Schedule.builder(Schedule.Kind.COSINE);
    fieldsOf(schedule.build(), schedule, new ga_schedule(2));
    fieldsOf(Clip.builder().build(), Clip.builder(), new ga_clip());
    fieldsOf(LossScaler.builder().build(), LossScaler.builder(), new ga_loss_scaler());
    fieldsOf(Ema.builder().build(), Ema.builder(), new ga_ema());
    BatchNormOptions.Builder bn = BatchNormOptions.builder(Flavor.KERAS);
    fieldsOf(bn.build(), bn, new ga_bn_options(0));
    fieldsOf(ParamOptions.builder().build(), ParamOptions.builder(), new ga_param_options());
    fieldsOf(Config.builder().build(), Config.builder(), new ga_config());
    fieldsOf(StateOptions.builder().build(), StateOptions.builder(), new ga_state_options());
    fieldsOf(
        CommunicatorOptions.builder().build(),
        CommunicatorOptions.builder(),
        new ga_comm_options());
  }

  @Test
  void everyFieldOfAResultIsCopied() throws Exception {
    try (ga_step_result fields = new ga_step_result()) {
      int number = 0;
      for (Method method : ga_step_result.class.getMethods()) {
        if (method.getName().startsWith("set")) {
          method.setAccessible(true);
          ++number;
          if (method.getParameterTypes()[0] == double.class) {
            method.invoke(fields, number + 0.5);
          } else if (method.getParameterTypes()[0] == long.class) {
            method.invoke(fields, (1L << 40) + number);
          } else {
            method.invoke(fields, StepResult.Outcome.SKIPPED_WEIGHT.value());
          }
        }
      }
      assertEquals(StepResult.class.getRecordComponents().length, number);
      long[] copied = new long[StepResult.WORDS];
      fields.copy(copied);
      assertEquals(StepResult.read(fields), StepResult.of(copied));
    }
  }

  @Test
  void newtonSchulzCoefficients() {
    Optimizer muon = Optimizer.builder(Optimizer.Kind.MUON).build();
    assertEquals(new Optimizer.NewtonSchulz(3.4445, -4.7750, 2.0315), muon.newtonSchulz());
    try (ga_optimizer fields = new ga_optimizer(0, 0)) {
      muon.toBuilder().newtonSchulz(new Optimizer.NewtonSchulz(1, 2, 3)).build().write(fields);
      assertEquals(new Optimizer.NewtonSchulz(1, 2, 3), Optimizer.NewtonSchulz.read(fields));
    }
  }

  @Test
  void newtonSchulzTable() {
    List<Optimizer.NewtonSchulz> table =
        List.of(new Optimizer.NewtonSchulz(3, -3.5, 1.25), new Optimizer.NewtonSchulz(2, -1.5, 0.5));
    Optimizer muon = Optimizer.builder(Optimizer.Kind.MUON).nsTable(table).build();
    assertEquals(List.of(), Optimizer.builder(Optimizer.Kind.MUON).build().nsTable());
    try (Context context = new Context(Config.builder().build())) {
      Group group = context.addGroup(muon);
      assertEquals(table, group.optimizer().nsTable());
      assertEquals(muon, group.optimizer());
      group.setOptimizer(
          muon.toBuilder().nsTable(List.of()).nsPreset(Optimizer.NewtonSchulzPreset.YOU).build());
      assertEquals(List.of(), group.optimizer().nsTable());
      assertEquals(Optimizer.NewtonSchulzPreset.YOU, group.optimizer().nsPreset());
    }
  }

  @Test
  void defaultsAreThoseOfTheFramework() {
    Optimizer adam = Optimizer.builder(Optimizer.Kind.ADAM).build();
    assertEquals(1e-3, adam.lr());
    assertEquals(0.9, adam.beta1());
    assertEquals(1e-8, adam.eps());
    assertEquals(1e-7, Optimizer.builder(Optimizer.Kind.ADAM, Flavor.KERAS).build().eps());
    assertEquals(Double.POSITIVE_INFINITY, Clip.builder().build().maxValue());
    assertEquals(
        Clip.builder().scope(Clip.Scope.AGC).build(), Clip.builder(Clip.Scope.AGC).build());
    assertEquals(Config.Nonfinite.SKIP_STEP, Config.builder().build().nonfinite());
    GradAccumException e =
        assertThrows(
            GradAccumException.class, () -> Optimizer.builder(Optimizer.Kind.SGD, Flavor.BERT));
    assertEquals(Status.UNSUPPORTED, e.status());
  }

  @Test
  void fieldsOutOfRangeAreRefusedByTheLibrary() {
    try (Context context = new Context()) {
      for (Optimizer.Builder wrong :
          List.of(
              Optimizer.builder(Optimizer.Kind.ADAM).beta1(1),
              Optimizer.builder(Optimizer.Kind.ADAM).lr(Double.NaN),
              Optimizer.builder(Optimizer.Kind.SGD).momentum(-1),
              Optimizer.builder(Optimizer.Kind.MUON).nsSteps(0))) {
        GradAccumException e =
            assertThrows(GradAccumException.class, () -> context.addGroup(wrong.build()));
        assertEquals(Status.INVALID_ARGUMENT, e.status());
        assertTrue(e.getMessage().contains(" was "), e.getMessage());
      }
      Group group = context.addGroup(Buffers.sgd(1));
      assertThrows(GradAccumException.class, () -> group.setLr(-1));
      assertThrows(
          GradAccumException.class,
          () -> group.setSchedule(Schedule.builder(Schedule.Kind.TABLE).build()));
      assertThrows(
          GradAccumException.class,
          () -> context.setClip(Clip.builder(Clip.Scope.GLOBAL).build()));
      assertThrows(
          NullPointerException.class,
          () -> context.addGroup(Optimizer.builder(Optimizer.Kind.SGD).kind(null).build()));
    }
    for (Config.Builder wrong :
        List.of(
            Config.builder().numThreads(-1),
            Config.builder().accumSteps(-1),
            Config.builder().lossScale(0),
            Config.builder().noiseSmoothing(1))) {
      assertThrows(GradAccumException.class, () -> new Context(wrong.build()));
    }
  }

  @Test
  void numbersThatNoEnumeratorHas() throws Exception {
    Exception e = assertThrows(IllegalStateException.class, () -> Dtype.of(99));
    assertEquals(
        "the library returned Dtype number 99, which this version of the package does not know",
        e.getMessage());
    assertEquals(Status.UNKNOWN, new GradAccumException(99, new byte[0]).status());
    for (Class<?> type :
        List.of(Optimizer.Kind.class, Window.State.class, StepResult.Outcome.class)) {
      Method of = type.getDeclaredMethod("of", int.class);
      of.setAccessible(true);
      assertThrows(InvocationTargetException.class, () -> of.invoke(null, -7));
    }
  }

  @Test
  void noDeviceIsAnAnswer() {
    Library.Devices cuda = Library.devices(Device.CUDA);
    if (cuda.count() == 0) {
      assertTrue(!cuda.why().isEmpty());
      GradAccumException e =
          assertThrows(
              GradAccumException.class,
              () -> new Context(Config.builder().device(Device.CUDA).build()));
      assertEquals(Status.UNSUPPORTED, e.status());
    }
    assertEquals(new Library.Devices(1, ""), Library.devices(Device.CPU));
  }

  @Test
  void theBuild() {
    assertEquals(Library.version(), Library.build().version());
    assertTrue(Library.buildInfo().startsWith("libgradaccum "));
    assertTrue(Library.build().compiler().length() > 3);
    assertTrue(Library.build().cpuLoops().contains("scalar"));
    assertTrue(Library.expectedVersion() > 0);
    assertEquals(
        "GA_ERROR_INVALID_STATE: m\u00e4ssig",
        new GradAccumException(2, "m\u00e4ssig".getBytes(java.nio.charset.StandardCharsets.UTF_8))
            .getMessage());
    assertEquals(4, floats(1).order() == java.nio.ByteOrder.nativeOrder() ? Dtype.F32.bytes() : 0);
  }
}
