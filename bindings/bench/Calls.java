// calls.c in Java: see there. With the argument "memory", two other figures: bytes that an
// accumulate allocates on the heap of Java, and bytes of resident memory that are left of a context
// that was closed.
// SPDX-License-Identifier: Apache-2.0
import com.sun.management.ThreadMXBean;
import java.io.IOException;
import java.lang.management.ManagementFactory;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import org.gradaccum.Config;
import org.gradaccum.Context;
import org.gradaccum.Group;
import org.gradaccum.Optimizer;

final class Calls {
  private static final int CALLS = 200_000;
  private static final int TENSORS = 300;
  private static final int LARGE = 4 << 20;
  private static final int ROUNDS = 7;

  private static FloatBuffer floats(int count) {
    FloatBuffer floats =
        ByteBuffer.allocateDirect(4 * count).order(ByteOrder.nativeOrder()).asFloatBuffer();
    while (floats.hasRemaining()) {
      floats.put(1);
    }
    return floats.flip();
  }

  /** A context on one thread with that many parameters of that many elements. */
  private static Context make(int tensors, int elements) {
    Context context = new Context(Config.builder().numThreads(1).build());
    Group group = context.addGroup(Optimizer.builder(Optimizer.Kind.SGD).build());
    for (int i = 0; i < tensors; ++i) {
      context.addParam(group, "w" + i, floats(elements), elements);
    }
    return context;
  }

  private static final ThreadMXBean THREADS =
      (ThreadMXBean) ManagementFactory.getThreadMXBean();

  private static long now() {
    return THREADS.getCurrentThreadCpuTime();
  }

  private static double median(double[] rounds) {
    Arrays.sort(rounds);
    return rounds[rounds.length / 2];
  }

  /** Nanoseconds of an accumulate. */
  private static double accumulates(int tensors, int elements, int calls) {
    FloatBuffer[] gradients = new FloatBuffer[tensors];
    Arrays.setAll(gradients, i -> floats(elements));
    double[] rounds = new double[ROUNDS];
    try (Context context = make(tensors, elements)) {
      for (int round = -3; round < ROUNDS; ++round) {
        long start = now();
        for (int i = 0; i < calls; ++i) {
          context.accumulate(1, gradients);
        }
        if (round >= 0) {
          rounds[round] = (double) (now() - start) / calls;
        }
        context.discard();
      }
    }
    return median(rounds);
  }

  private static double steps() {
    FloatBuffer gradient = floats(1);
    double[] rounds = new double[ROUNDS];
    try (Context context = make(1, 1)) {
      for (int round = -3; round < ROUNDS; ++round) {
        long start = now();
        for (int i = 0; i < CALLS; ++i) {
          context.accumulate(1, gradient);
          context.step();
        }
        if (round >= 0) {
          rounds[round] = (double) (now() - start) / CALLS;
        }
      }
    }
    return median(rounds);
  }

  private static double allocated() {
    FloatBuffer gradient = floats(1);
    try (Context context = make(1, 1)) {
      long before = 0;
      for (int i = 0; i < 2 * CALLS; ++i) {
        if (i == CALLS) {
          before = THREADS.getCurrentThreadAllocatedBytes();
        }
        context.accumulate(1, gradient);
      }
      return (double) (THREADS.getCurrentThreadAllocatedBytes() - before) / CALLS;
    }
  }

  /** The slope of resident memory over contexts, by least squares. */
  private static double contexts() throws IOException {
    int points = 20;
    int each = 5_000;
    double[] resident = new double[points];
    for (int i = 0; i < 2 * each; ++i) {
      make(1, 1).close();
    }
    double mean = 0;
    for (int point = 0; point < points; ++point) {
      for (int i = 0; i < each; ++i) {
        make(1, 1).close();
      }
      System.gc();
      for (String line : Files.readAllLines(Path.of("/proc/self/status"))) {
        if (line.startsWith("VmRSS:")) {
          resident[point] = 1024.0 * Long.parseLong(line.replaceAll("[^0-9]", ""));
        }
      }
      mean += resident[point] / points;
    }
    double above = 0;
    double below = 0;
    for (int point = 0; point < points; ++point) {
      double x = point - (points - 1) / 2.0;
      above += x * (resident[point] - mean);
      below += x * x;
    }
    return above / below / each;
  }

  public static void main(String[] arguments) throws IOException {
    if (arguments.length > 0 && arguments[0].equals("memory")) {
      System.out.printf("allocated %.1f%n", allocated());
      System.out.printf("contexts %.1f%n", contexts());
      return;
    }
    System.out.printf("accumulate %.1f%n", accumulates(1, 1, CALLS));
    System.out.printf("accumulate_step %.1f%n", steps());
    System.out.printf("tensors %.1f%n", accumulates(TENSORS, 1, 2000));
    System.out.printf("large %.1f%n", accumulates(1, LARGE, 20));
  }
}
