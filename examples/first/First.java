// first.c in Java: see there.
// SPDX-License-Identifier: Apache-2.0
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.util.Locale;
import org.gradaccum.Context;
import org.gradaccum.Group;
import org.gradaccum.Optimizer;

final class First {
  private static final float[][] x = new float[71][3];
  private static final float[] y = new float[71];

  private static float[] backward(int first, int end, FloatBuffer w) {
    float[] dw = new float[3];
    for (int i = first; i < end; ++i) {
      float error = w.get(0) * x[i][0] + w.get(1) * x[i][1] + w.get(2) * x[i][2] - y[i];
      for (int j = 0; j < 3; ++j) dw[j] += 2 * error * x[i][j] / (end - first);
    }
    return dw;
  }

  public static void main(String[] arguments) {
    for (int i = 0; i < 71; ++i) {
      y[i] = i % 5;
      for (int j = 0; j < 3; ++j) x[i][j] = i * (j + 2) % 7 / 4F;
    }
    FloatBuffer w = ByteBuffer.allocateDirect(12).order(ByteOrder.nativeOrder()).asFloatBuffer();
    for (int j = 0; j < 3; ++j) w.put(j, 1);
    float[] batch = backward(0, 71, w);
    for (int j = 0; j < 3; ++j) batch[j] = 1 - 0.1F * batch[j];

    // begin
    try (Context context = new Context()) {
      Group group = context.addGroup(Optimizer.builder(Optimizer.Kind.SGD).lr(0.1).build());
      context.addParam(group, "w", w, 3);
      for (int first = 0; first < 71; first += 32) {  // 32, 32 and 7 samples
        int end = Math.min(first + 32, 71);
        float[] dw = backward(first, end, w);  // your code: a mean over the micro-batch
        context.accumulate(end - first, dw);
      }
      context.step();  // updates w as one batch of 71 would
    }
    // end

    System.out.printf(Locale.ROOT, "w = %.6f %.6f %.6f%n", w.get(0), w.get(1), w.get(2));
    for (int j = 0; j < 3; ++j) {
      if (!(Math.abs(w.get(j) - batch[j]) <= 1e-6F)) System.exit(1);
    }
  }
}
