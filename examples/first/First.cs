// first.c in C#: see there.
// SPDX-License-Identifier: Apache-2.0
using System;
using System.Globalization;
using GradAccum;

static class First {
  static readonly float[][] x = new float[71][];
  static readonly float[] y = new float[71];

  static float[] Backward(int first, int end, float[] w) {
    var dw = new float[3];
    for (int i = first; i < end; ++i) {
      float error = w[0] * x[i][0] + w[1] * x[i][1] + w[2] * x[i][2] - y[i];
      for (int j = 0; j < 3; ++j) dw[j] += 2 * error * x[i][j] / (end - first);
    }
    return dw;
  }

  static int Main() {
    for (int i = 0; i < 71; ++i) {
      y[i] = i % 5;
      x[i] = new float[3];
      for (int j = 0; j < 3; ++j) x[i][j] = i * (j + 2) % 7 / 4F;
    }
    float[] w = {1, 1, 1};
    float[] batch = Backward(0, 71, w);
    for (int j = 0; j < 3; ++j) batch[j] = 1 - 0.1F * batch[j];

    // begin
    using (var context = new Context()) {
      Group group = context.AddGroup(new Optimizer(OptimizerKind.Sgd) { Lr = 0.1 });
      context.AddParam(group, "w", w, 3);
      for (int first = 0; first < 71; first += 32) {  // 32, 32 and 7 samples
        int end = Math.Min(first + 32, 71);
        float[] dw = Backward(first, end, w);  // your code: a mean over the micro-batch
        context.Accumulate(new Tensor[] { dw }, end - first);
      }
      context.Step();  // updates w as one batch of 71 would
    }
    // end

    Console.WriteLine(string.Format(CultureInfo.InvariantCulture, "w = {0:F6} {1:F6} {2:F6}", w[0], w[1], w[2]));
    for (int j = 0; j < 3; ++j) {
      if (!(Math.Abs(w[j] - batch[j]) <= 1e-6F)) return 1;
    }
    return 0;
  }
}
