// same_bits.c in Java: see there.
// SPDX-License-Identifier: Apache-2.0
import java.io.DataInputStream;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.Arrays;
import java.util.List;
import java.util.zip.GZIPInputStream;
import org.gradaccum.Clip;
import org.gradaccum.Context;
import org.gradaccum.Group;
import org.gradaccum.Optimizer;

final class SameBits {
  private static final int IMAGES = 500;
  private static final int PIXELS = 784;
  private static final int HIDDEN = 32;
  private static final int CLASSES = 10;
  private static final int WINDOW = 64;
  private static final int MICRO = 16;
  private static final int EPOCHS = 3;

  /** A parameter and its gradient, which is the mean of sums in double. */
  private static final class Layer {
    final int columns;
    final ByteBuffer bytes;
    final FloatBuffer values;
    final FloatBuffer gradient;
    final double[] sums;

    Layer(int rows, int columns) {
      this.columns = columns;
      sums = new double[rows * columns];
      bytes = direct(sums.length);
      values = bytes.asFloatBuffer();
      gradient = direct(sums.length).asFloatBuffer();
    }

    private static ByteBuffer direct(int floats) {
      return ByteBuffer.allocateDirect(4 * floats).order(ByteOrder.nativeOrder());
    }

    /** Uniform in [-scale / 2, scale / 2), in steps that a float holds. */
    long fill(double scale, long state) {
      for (int i = 0; i < sums.length; ++i) {
        state = state * 6364136223846793005L + 1442695040888963407L;
        values.put(i, (float) (((double) (state >>> 40) / 16777216 - 0.5) * scale));
      }
      return state;
    }

    void mean(int samples) {
      for (int i = 0; i < sums.length; ++i) {
        gradient.put(i, (float) (sums[i] / samples));
      }
    }

    double at(int row, int column) {
      return values.get(row * columns + column);
    }

    void add(int row, int column, double value) {
      sums[row * columns + column] += value;
    }
  }

  private final byte[] pixels;
  private final byte[] labels;
  private final Layer w1 = new Layer(HIDDEN, PIXELS);
  private final Layer b1 = new Layer(1, HIDDEN);
  private final Layer w2 = new Layer(CLASSES, HIDDEN);
  private final Layer b2 = new Layer(1, CLASSES);
  private final List<Layer> layers = List.of(w1, b1, w2, b2);

  private SameBits(Path folder) throws IOException {
    pixels = read(folder.resolve("train-images-idx3-ubyte.gz"), 16, IMAGES * PIXELS);
    labels = read(folder.resolve("train-labels-idx1-ubyte.gz"), 8, IMAGES);
    w2.fill(0.5, w1.fill(0.125, 1));
  }

  private static byte[] read(Path path, int header, int size) throws IOException {
    try (DataInputStream in =
        new DataInputStream(new GZIPInputStream(Files.newInputStream(path)))) {
      in.readFully(new byte[header]);
      byte[] bytes = new byte[size];
      in.readFully(bytes);
      return bytes;
    }
  }

  /** Stores the mean gradients of samples [first, end), and returns the sum of their losses. */
  private double backward(int first, int end) {
    double loss = 0;
    layers.forEach(layer -> Arrays.fill(layer.sums, 0));
    for (int i = first; i < end; ++i) {
      double[] x = new double[PIXELS];
      double[] h = new double[HIDDEN];
      double[] dh = new double[HIDDEN];
      for (int p = 0; p < PIXELS; ++p) {
        x[p] = (pixels[i * PIXELS + p] & 0xff) / 256.0;
      }
      for (int j = 0; j < HIDDEN; ++j) {
        double sum = b1.at(0, j);
        for (int p = 0; p < PIXELS; ++p) {
          sum += w1.at(j, p) * x[p];
        }
        h[j] = sum > 0 ? sum : 0;
      }
      for (int c = 0; c < CLASSES; ++c) {
        double y = b2.at(0, c);
        for (int j = 0; j < HIDDEN; ++j) {
          y += w2.at(c, j) * h[j];
        }
        double error = y - (c == labels[i] ? 1 : 0);
        loss += error * error;
        b2.add(0, c, 2 * error);
        for (int j = 0; j < HIDDEN; ++j) {
          w2.add(c, j, 2 * error * h[j]);
          dh[j] += 2 * error * w2.at(c, j);
        }
      }
      for (int j = 0; j < HIDDEN; ++j) {
        if (h[j] > 0) {
          b1.add(0, j, dh[j]);
          for (int p = 0; p < PIXELS; ++p) {
            w1.add(j, p, dh[j] * x[p]);
          }
        }
      }
    }
    layers.forEach(layer -> layer.mean(end - first));
    return loss;
  }

  private void train() {
    try (Context context = new Context()) {
      Group group =
          context.addGroup(
              Optimizer.builder(Optimizer.Kind.ADAMW).lr(1.0 / 512).build());
      context.setClip(Clip.builder(Clip.Scope.GLOBAL).maxNorm(1).build());
      context.addParam(group, "fc1.weight", w1.values, HIDDEN, PIXELS);
      context.addParam(group, "fc1.bias", b1.values, HIDDEN);
      context.addParam(group, "fc2.weight", w2.values, CLASSES, HIDDEN);
      context.addParam(group, "fc2.bias", b2.values, CLASSES);
      for (int epoch = 1; epoch <= EPOCHS; ++epoch) {
        double loss = 0;
        for (int window = 0; window < IMAGES; window += WINDOW) {
          int end = Math.min(window + WINDOW, IMAGES);
          for (int first = window; first < end; first += MICRO) {
            int last = Math.min(first + MICRO, end);
            loss += backward(first, last);
            context.accumulate(last - first, w1.gradient, b1.gradient, w2.gradient, b2.gradient);
          }
          context.step();
        }
        System.out.printf("epoch %d: loss %.4f%n", epoch, loss / IMAGES);
      }
    }
  }

  public static void main(String[] arguments) throws IOException {
    if (arguments.length != 2) {
      System.err.println("usage: SameBits <folder of Fashion-MNIST> <file>");
      System.exit(1);
    }
    SameBits run = new SameBits(Path.of(arguments[0]));
    run.train();
    try (FileChannel out =
        FileChannel.open(
            Path.of(arguments[1]),
            StandardOpenOption.CREATE,
            StandardOpenOption.TRUNCATE_EXISTING,
            StandardOpenOption.WRITE)) {
      for (Layer layer : run.layers) {
        while (layer.bytes.hasRemaining()) {
          out.write(layer.bytes);
        }
      }
    }
  }
}
