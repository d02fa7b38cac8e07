// same_bits.c in C#: see there.
// SPDX-License-Identifier: Apache-2.0
using System;
using System.Globalization;
using System.IO;
using System.IO.Compression;
using GradAccum;

/// <summary>A parameter and its gradient, which is the mean of sums in double.</summary>
sealed class Layer {
  public readonly int Columns;
  public readonly float[] Values, Gradient;
  public readonly double[] Sums;

  public Layer(int rows, int columns) {
    Columns = columns;
    Values = new float[rows * columns];
    Gradient = new float[rows * columns];
    Sums = new double[rows * columns];
  }

  // Uniform in [-scale / 2, scale / 2), in steps that a float holds.
  public void Fill(double scale, ref ulong state) {
    for (int i = 0; i < Values.Length; ++i) {
      state = unchecked(state * 6364136223846793005UL + 1442695040888963407UL);
      Values[i] = (float)(((double)(state >> 40) / 16777216 - 0.5) * scale);
    }
  }

  public void Mean(int samples) {
    for (int i = 0; i < Sums.Length; ++i) Gradient[i] = (float)(Sums[i] / samples);
  }
}

sealed class SameBits {
  const int Images = 500, Pixels = 784, Hidden = 32, Classes = 10, WindowSize = 64, Micro = 16, Epochs = 3;

  readonly byte[] pixels, labels;
  readonly Layer w1 = new Layer(Hidden, Pixels), b1 = new Layer(1, Hidden);
  readonly Layer w2 = new Layer(Classes, Hidden), b2 = new Layer(1, Classes);
  readonly Layer[] layers;

  SameBits(string folder) {
    pixels = ReadFile(Path.Combine(folder, "train-images-idx3-ubyte.gz"), 16, Images * Pixels);
    labels = ReadFile(Path.Combine(folder, "train-labels-idx1-ubyte.gz"), 8, Images);
    layers = new[] {w1, b1, w2, b2};
    ulong state = 1;
    w1.Fill(0.125, ref state);
    w2.Fill(0.5, ref state);
  }

  static byte[] ReadFile(string path, int header, int size) {
    using (BinaryReader reader = new BinaryReader(new GZipStream(File.OpenRead(path), CompressionMode.Decompress))) {
      reader.ReadBytes(header);
      byte[] data = reader.ReadBytes(size);
      if (data.Length != size) throw new EndOfStreamException(path + " could not be read");
      return data;
    }
  }

  // Stores the mean gradients of samples [first, end), and returns the sum of their losses.
  double Backward(int first, int end) {
    double loss = 0;
    foreach (Layer layer in layers) Array.Clear(layer.Sums, 0, layer.Sums.Length);
    double[] x = new double[Pixels], h = new double[Hidden], dh = new double[Hidden];
    for (int i = first; i < end; ++i) {
      Array.Clear(dh, 0, Hidden);
      for (int p = 0; p < Pixels; ++p) x[p] = pixels[i * Pixels + p] / 256.0;
      for (int j = 0; j < Hidden; ++j) {
        double sum = b1.Values[j];
        for (int p = 0; p < Pixels; ++p) sum += w1.Values[j * Pixels + p] * x[p];
        h[j] = sum > 0 ? sum : 0;
      }
      for (int c = 0; c < Classes; ++c) {
        double y = b2.Values[c];
        for (int j = 0; j < Hidden; ++j) y += w2.Values[c * Hidden + j] * h[j];
        double error = y - (c == labels[i] ? 1 : 0);
        loss += error * error;
        b2.Sums[c] += 2 * error;
        for (int j = 0; j < Hidden; ++j) {
          w2.Sums[c * Hidden + j] += 2 * error * h[j];
          dh[j] += 2 * error * w2.Values[c * Hidden + j];
        }
      }
      for (int j = 0; j < Hidden; ++j) {
        if (!(h[j] > 0)) continue;
        b1.Sums[j] += dh[j];
        for (int p = 0; p < Pixels; ++p) w1.Sums[j * Pixels + p] += dh[j] * x[p];
      }
    }
    foreach (Layer layer in layers) layer.Mean(end - first);
    return loss;
  }

  void Train() {
    using (Context context = new Context()) {
      Group group = context.AddGroup(new Optimizer(OptimizerKind.AdamW) {Lr = 1.0 / 512});
      context.SetClip(new Clip {Scope = ClipScope.Global, MaxNorm = 1});
      context.AddParam(group, "fc1.weight", w1.Values, Hidden, Pixels);
      context.AddParam(group, "fc1.bias", b1.Values, Hidden);
      context.AddParam(group, "fc2.weight", w2.Values, Classes, Hidden);
      context.AddParam(group, "fc2.bias", b2.Values, Classes);
      Tensor[] gradients = {w1.Gradient, b1.Gradient, w2.Gradient, b2.Gradient};

      for (int epoch = 1; epoch <= Epochs; ++epoch) {
        double loss = 0;
        for (int window = 0; window < Images; window += WindowSize) {
          int end = Math.Min(window + WindowSize, Images);
          for (int first = window; first < end; first += Micro) {
            int last = Math.Min(first + Micro, end);
            loss += Backward(first, last);
            context.Accumulate(gradients, last - first);
          }
          context.Step();
        }
        Console.WriteLine("epoch " + epoch + ": loss " + (loss / Images).ToString("F4", CultureInfo.InvariantCulture));
      }
    }
  }

  static int Main(string[] arguments) {
    if (arguments.Length != 2) {
      Console.Error.WriteLine("usage: SameBits <folder of Fashion-MNIST> <file>");
      return 1;
    }
    SameBits run = new SameBits(arguments[0]);
    run.Train();
    using (BinaryWriter writer = new BinaryWriter(File.Create(arguments[1]))) {
      foreach (Layer layer in run.layers) {
        foreach (float value in layer.Values) writer.Write(value);
      }
    }
    return 0;
  }
}
