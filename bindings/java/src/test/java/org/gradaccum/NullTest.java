// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import static org.gradaccum.Buffers.floats;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.ByteArrayOutputStream;
import java.io.OutputStream;
import java.lang.reflect.Array;
import java.lang.reflect.Constructor;
import java.lang.reflect.Executable;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.lang.reflect.Modifier;
import java.lang.reflect.Parameter;
import java.net.URI;
import java.net.URL;
import java.net.URLClassLoader;
import java.nio.Buffer;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.channels.SeekableByteChannel;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Optional;
import java.util.Set;
import java.util.TreeSet;
import java.util.function.Consumer;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;

/** Null for every parameter of the package that is a reference, one at a time. */
class NullTest {
  /** Class.method.parameter where null is documented to be legal. */
  private static final Set<String> TAKES_NULL =
      Set.of(
          "Config.Config.log",
          "Config.Config.onParamDone",
          "Config.Builder.log.log",
          "Config.Builder.onParamDone.onParamDone",
          "Context.accumulate.options",
          "Context.accumulate.gradients[0]",
          "Context.addBatchNorm.beta",
          "Context.addBatchNorm.gamma",
          "Context.addFlat.options",
          "Context.addParam.options",
          "Context.beginMicroBatch.options",
          "Context.setCommunicator.communicator",
          "Context.setCommunicator.options",
          "FlatEntry.FlatEntry.options",
          "StateOptions.StateOptions.note",
          "StateOptions.StateOptions.progress",
          "StateOptions.Builder.note.note",
          "StateOptions.Builder.progress.progress");

  /** Records that the library fills; a program has no reason to make one. */
  private static final Set<Class<?>> RESULTS =
      Set.of(
          BatchNormInfo.class,
          Build.class,
          Library.Devices.class,
          ParamInfo.class,
          StateInfo.class,
          StepResult.class,
          Window.class);

  /** A context with a parameter, a layer and so on, from which every argument comes. */
  private static final class World implements AutoCloseable {
    final Context context = new Context();
    final Group group;
    final Param param;
    final BatchNorm layer;
    private final Path file = Files.createTempFile("gradaccum-null", ".safetensors");
    private final List<AutoCloseable> open = new ArrayList<>();

    /** The group is external if the receiver of the call is the gradient of a step. */
    World(boolean external) throws Exception {
      Optimizer.Kind kind = external ? Optimizer.Kind.EXTERNAL : Optimizer.Kind.ADAM;
      group = context.addGroup(Optimizer.builder(kind).build());
      ParamOptions.Rows rows = external ? ParamOptions.Rows.NONE : ParamOptions.Rows.DENSE;
      ParamOptions options = ParamOptions.builder().rows(rows).build();
      param = context.addParam(group, "w", Tensor.of(floats(1, 2)), options, 2);
      layer = context.addBatchNorm("bn", 2, null, null);
      if (external) {
        context.accumulate(1, floats(3, 4));
        context.step();
      }
      context.save(file);
    }

    private <T extends AutoCloseable> T keep(T resource) {
      open.add(resource);
      return resource;
    }

    /** What a failed call leaves as it was. It fails if a lock was left held. */
    String state() {
      return context.window()
          + " " + context.groupCount()
          + " " + context.paramCount()
          + " " + context.batchNormCount()
          + " " + context.slotCount()
          + " " + context.clip()
          + " " + context.lossScale()
          + " " + group.optimizer()
          + " " + group.clip()
          + " " + param.info()
          + " " + layer.info();
    }

    /** A legal argument of a method, or the receiver of a call (then with the name ""). */
    Object value(String method, Class<?> type, String generic, String name) throws Exception {
      if (type == MicroBatch.class) {
        return keep(context.beginMicroBatch(1));
      } else if (type == Accumulator.class) {
        return keep(context.beginMicroBatch(1)).acquire(param);
      } else if (type == Gradient.class) {
        return param.gradient();
      } else if (type.getSimpleName().equals("Builder")) {
        Object built = value(method, type.getEnclosingClass(), "", name);
        return built.getClass().getMethod("toBuilder").invoke(built);
      } else if (type == List.class) {
        Class<?> element =
            generic.contains("FlatEntry")
                ? FlatEntry.class
                : generic.contains("NewtonSchulz")
                    ? Optimizer.NewtonSchulz.class
                    : generic.contains("Param") ? Param.class : Buffer.class;
        return List.of(value(method, element, "", name));
      } else if (type.isArray() && !type.getComponentType().isPrimitive()) {
        Object array = Array.newInstance(type.getComponentType(), 1);
        Array.set(array, 0, value(method, type.getComponentType(), "", name));
        return array;
      } else if (type.isEnum()) {
        return type.getEnumConstants()[0];
      }
      return switch (type.getSimpleName()) {
        case "boolean" -> false;
        case "int" -> name.equals("rank") ? 0 : 1;
        case "long" ->
            switch (name) {
              case "index" -> -1L;
              case "from" -> 0L;
              case "channels" -> 2L;
              default -> 1L;
            };
        case "double" -> 1.0;
        case "byte[]" -> Communicator.newId();
        case "double[]" -> new double[] {1};
        case "float[]" -> new float[] {3, 4};
        case "long[]" ->
            new long[] {name.equals("shape") ? 2 : name.equals("fromSteps") ? 0 : 1};
        case "String" ->
            switch (method) {
              case "findParam" -> "w";
              case "findBatchNorm" -> "bn";
              case "getState", "setState" -> "exp_avg";
              default -> "new";
            };
        case "Buffer" ->
            name.equals("indices")
                ? Buffers.bytes(8).asIntBuffer().put(1, 1)
                : floats(3, 4);
        case "Tensor" -> Tensor.of((Buffer) value(method, Buffer.class, "", name));
        case "ByteBuffer" -> context.saveToBuffer(StateOptions.builder().build());
        case "Path" -> file;
        case "SeekableByteChannel" ->
            keep(FileChannel.open(file, StandardOpenOption.READ, StandardOpenOption.WRITE));
        case "OutputStream" -> new ByteArrayOutputStream();
        case "Optional" -> Optional.empty();
        case "Consumer" -> (Consumer<Object>) ignored -> {};
        case "Progress" -> (StateOptions.Progress) (done, total) -> {};
        case "Context" -> context;
        case "Group" -> group;
        case "Param" -> param;
        case "BatchNorm" -> layer;
        case "Communicator" -> keep(Communicator.local(Communicator.newId(), 0, 1));
        case "FlatEntry" -> new FlatEntry(group, "flat", 0, 2);
        case "MicroOptions" -> new MicroOptions(0, false);
        case "NewtonSchulz" -> new Optimizer.NewtonSchulz(1, 2, 3);
        case "Optimizer" -> group.optimizer();
        case "Schedule" -> Schedule.builder(Schedule.Kind.CONSTANT).build();
        case "BatchNormOptions" -> BatchNormOptions.builder(Flavor.TORCH).build();
        default -> {
          Object builder = type.getMethod("builder").invoke(null);
          yield builder.getClass().getMethod("build").invoke(builder);
        }
      };
    }

    @Override
    public void close() throws Exception {
      for (AutoCloseable resource : open) {
        resource.close();
      }
      context.close();
      Files.delete(file);
    }
  }

  private static List<Class<?>> publicClasses() throws Exception {
    List<Class<?>> classes = new ArrayList<>();
    URI facade = Context.class.getProtectionDomain().getCodeSource().getLocation().toURI();
    try (Stream<Path> files = Files.list(Path.of(facade).resolve("org/gradaccum"))) {
      for (Path file : files.sorted().toList()) {
        String name = file.getFileName().toString();
        if (name.endsWith(".class")) {
          Class<?> type = Class.forName("org.gradaccum." + name.replace(".class", ""));
          if (Modifier.isPublic(type.getModifiers())) {
            classes.add(type);
          }
        }
      }
    }
    return classes;
  }

  /** What a program can call with a reference; not what the compiler or Object brings. */
  private static List<Executable> executables(Class<?> type) {
    List<Executable> found = new ArrayList<>();
    if (!RESULTS.contains(type)) {
      found.addAll(Arrays.asList(type.getConstructors()));
    }
    List<Method> methods = new ArrayList<>(Arrays.asList(type.getDeclaredMethods()));
    for (Class<?> part = type.getSuperclass();
        part != null && ContextCalls.class.isAssignableFrom(part);
        part = part.getSuperclass()) {
      methods.addAll(Arrays.asList(part.getDeclaredMethods()));
    }
    for (Method method : methods) {
      boolean compilers = type.isEnum() && method.getName().equals("valueOf");
      if (Modifier.isPublic(method.getModifiers())
          && !method.isSynthetic()
          && !method.getName().equals("equals")
          && !compilers) {
        found.add(method);
      }
    }
    found.removeIf(e -> Stream.of(e.getParameterTypes()).allMatch(Class::isPrimitive));
    return found;
  }

  /**
   * The parameters of a constructor or method with their names, which only the copy of the package
   * has that was compiled with -parameters.
   */
  private static Parameter[] named(Executable executable, ClassLoader names) throws Exception {
    Class<?> type = Class.forName(executable.getDeclaringClass().getName(), false, names);
    Executable[] all =
        executable instanceof Constructor ? type.getConstructors() : type.getDeclaredMethods();
    for (Executable other : all) {
      if (other.toString().equals(executable.toString())) {
        assertTrue(other.getParameters()[0].isNamePresent(), other.toString());
        return other.getParameters();
      }
    }
    throw new AssertionError(executable + " was not found");
  }

  /** The class that a program calls it on. */
  private static Class<?> typeOf(Executable executable) {
    Class<?> type = executable.getDeclaringClass();
    return ContextCalls.class.isAssignableFrom(type) ? Context.class : type;
  }

  private static String nameOf(Executable executable) {
    String type = typeOf(executable).getName();
    String method =
        executable instanceof Constructor
            ? executable.getDeclaringClass().getSimpleName()
            : executable.getName();
    return type.replace("org.gradaccum.", "").replace('$', '.') + "." + method;
  }

  /** A record of options is checked at the latest where a call writes it to a struct of C. */
  private static void use(Record made) throws Exception {
    for (Method write : made.getClass().getDeclaredMethods()) {
      if (write.getName().equals("write")) {
        for (Constructor<?> constructor : write.getParameterTypes()[0].getConstructors()) {
          Object[] zeros = new Object[constructor.getParameterCount()];
          Arrays.fill(zeros, 0);
          constructor.setAccessible(true);
          try (AutoCloseable struct = (AutoCloseable) constructor.newInstance(zeros)) {
            write.invoke(made, struct);
          }
        }
      }
    }
  }

  private static void call(Executable executable, Object receiver, Object[] arguments)
      throws Throwable {
    Object result;
    try {
      if (executable instanceof Constructor<?> constructor) {
        result = constructor.newInstance(arguments);
        if (result instanceof Record) {
          use((Record) result);
        }
      } else {
        result = ((Method) executable).invoke(receiver, arguments);
      }
      if (receiver != null && result == receiver) {
        result = result.getClass().getMethod("build").invoke(result);  // a builder checks there
      }
    } catch (InvocationTargetException e) {
      throw e.getCause();
    }
    if (result instanceof AutoCloseable resource) {
      resource.close();
    }
  }

  /** Calls with null for one parameter, or for the element of one; -1: for none. */
  private static String call(
      Executable executable, Parameter[] parameters, int which, boolean element, Set<String> met)
      throws Exception {
    String method = executable.getName();
    Class<?> type = typeOf(executable);
    try (World world = new World(type == Gradient.class)) {
      boolean none =
          executable instanceof Constructor || Modifier.isStatic(executable.getModifiers());
      Object receiver = none ? null : world.value("", type, "", "");
      Object[] arguments = new Object[parameters.length];
      for (int i = 0; i < arguments.length; ++i) {
        String generic = executable.getGenericParameterTypes()[i].getTypeName();
        Class<?> wanted = executable.getParameterTypes()[i];
        if (i != which) {
          arguments[i] = world.value(method, wanted, generic, parameters[i].getName());
        } else if (element) {
          arguments[i] =
              wanted.isArray()
                  ? Array.newInstance(wanted.getComponentType(), 1)
                  : Collections.singletonList(null);
        }
      }
      String name = which < 0 ? "nothing" : parameters[which].getName() + (element ? "[0]" : "");
      String where = nameOf(executable) + "." + name;
      boolean legal = which < 0 || TAKES_NULL.contains(where);
      met.add(where);
      String before = world.state();
      String problem = legal ? "" : "nothing was thrown";
      try {
        call(executable, receiver, arguments);
      } catch (GradAccumException e) {
        // With legal arguments the library may refuse the call in this state of the context.
        problem = which < 0 ? "" : e.toString();
      } catch (Throwable t) {
        boolean expected = !legal && t instanceof NullPointerException;
        problem = expected && (name + " is null").equals(t.getMessage()) ? "" : t.toString();
      }
      String after = world.state();
      if (problem.isEmpty() && !legal && !after.equals(before)) {
        problem = "the context was " + before + " and is " + after;
      }
      return problem.isEmpty() ? "" : where + ": " + problem;
    }
  }

  @Test
  void everyNullHasItsName() throws Exception {
    List<String> problems = new ArrayList<>();
    Set<String> met = new TreeSet<>();
    int calls = 0;
    URL copy = Path.of(System.getProperty("gradaccum.test.named")).toUri().toURL();
    try (URLClassLoader names =
        new URLClassLoader(new URL[] {copy}, ClassLoader.getPlatformClassLoader())) {
      for (Class<?> type : publicClasses()) {
        for (Executable executable : executables(type)) {
          Parameter[] parameters = named(executable, names);
          problems.add(call(executable, parameters, -1, false, met));
          for (int i = 0; i < parameters.length; ++i) {
            Class<?> wanted = executable.getParameterTypes()[i];
            if (!wanted.isPrimitive()) {
              ++calls;
              problems.add(call(executable, parameters, i, false, met));
            }
            boolean references = wanted.isArray() && !wanted.getComponentType().isPrimitive();
            if (references || wanted == List.class) {
              ++calls;
              problems.add(call(executable, parameters, i, true, met));
            }
          }
        }
      }
    }
    problems.removeIf(String::isEmpty);
    assertEquals("", String.join("\n", problems), problems.size() + " of " + calls + " calls");
    assertTrue(calls > 200, calls + " calls");
    assertTrue(met.containsAll(TAKES_NULL), "TAKES_NULL has what there is not");
  }

  private static void assertNamed(String name, org.junit.jupiter.api.function.Executable call) {
    Exception e = assertThrows(NullPointerException.class, call);
    assertEquals(name + " is null", e.getMessage());
  }

  @Test
  void elementsHaveTheirIndex() {
    try (Context context = new Context()) {
      Group group = context.addGroup(Buffers.sgd(1));
      Param w = context.addParam(group, "w", floats(1), 1);
      assertNamed("params[1]", () -> context.ready(w, null));
      assertNamed("params[2]", () -> context.ready(Arrays.asList(w, w, null)));
      FlatEntry a = new FlatEntry(group, "a", 0, 1);
      FlatEntry b = new FlatEntry(group, "b", 1, ParamOptions.builder().build(), 1);
      assertNamed("entries[2]", () -> context.addFlat(floats(1, 2), Arrays.asList(a, b, null)));
      assertEquals(1, context.paramCount());
      assertEquals(2, context.addFlat(floats(1, 2), List.of(a, b)).size());
    }
  }
}
