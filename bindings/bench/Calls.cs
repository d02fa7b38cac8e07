// calls.c in C#: see there. With the argument "memory", two other figures: bytes that an accumulate
// allocates on the heap of the run time, and bytes of resident memory that are left of a context that
// was closed.
// SPDX-License-Identifier: Apache-2.0
using System;
using System.Globalization;
using System.IO;
using System.Runtime.InteropServices;
using GradAccum;

static class Calls {
  const int CallCount = 200000, Tensors = 300, Large = 4 << 20, Rounds = 7;

  struct Time {
    public long Seconds, Nanoseconds;
  }

  [DllImport("libc")]
  static extern int clock_gettime(int clock, out Time time);

  static double Now() {
    Time time;
    clock_gettime(3, out time);  // CLOCK_THREAD_CPUTIME_ID
    return time.Seconds * 1e9 + time.Nanoseconds;
  }

  static PinnedArray<float> Floats(int count) {
    float[] floats = new float[count];
    for (int i = 0; i < count; ++i) floats[i] = 1;
    return new PinnedArray<float>(floats);
  }

  // A context on one thread with that many parameters of that many elements.
  static Context Make(int tensors, int elements) {
    Context context = new Context(new Config {NumThreads = 1});
    Group group = context.AddGroup(new Optimizer(OptimizerKind.Sgd));
    for (int i = 0; i < tensors; ++i) {
      float[] parameter = new float[elements];
      for (int k = 0; k < elements; ++k) parameter[k] = 1;
      context.AddParam(group, "w" + i, parameter, elements);
    }
    return context;
  }

  static double Median(double[] rounds) {
    Array.Sort(rounds);
    return rounds[rounds.Length / 2];
  }

  // Nanoseconds of an accumulate.
  static double Accumulates(int tensors, int elements, int calls) {
    Tensor[] gradients = new Tensor[tensors];
    for (int i = 0; i < tensors; ++i) gradients[i] = Floats(elements);
    double[] rounds = new double[Rounds];
    using (Context context = Make(tensors, elements)) {
      for (int round = -3; round < Rounds; ++round) {
        double start = Now();
        for (int i = 0; i < calls; ++i) context.Accumulate(gradients);
        if (round >= 0) rounds[round] = (Now() - start) / calls;
        context.Discard();
      }
    }
    return Median(rounds);
  }

  static double Steps() {
    Tensor[] gradients = {Floats(1)};
    double[] rounds = new double[Rounds];
    using (Context context = Make(1, 1)) {
      for (int round = -3; round < Rounds; ++round) {
        double start = Now();
        for (int i = 0; i < CallCount; ++i) {
          context.Accumulate(gradients);
          context.Step();
        }
        if (round >= 0) rounds[round] = (Now() - start) / CallCount;
      }
    }
    return Median(rounds);
  }

  // So few calls that no collection runs meanwhile.
  static double Allocated() {
    const int calls = 20000;
    Tensor[] gradients = {Floats(1)};
    using (Context context = Make(1, 1)) {
      for (int i = 0; i < calls; ++i) context.Accumulate(gradients);
      GC.Collect();
      long before = GC.GetTotalMemory(false);
      for (int i = 0; i < calls; ++i) context.Accumulate(gradients);
      return Math.Max(0, GC.GetTotalMemory(false) - before) / (double)calls;
    }
  }

  // The slope of resident memory over contexts, by least squares.
  static double Contexts() {
    const int points = 20, each = 5000;
    double[] resident = new double[points];
    for (int i = 0; i < 2 * each; ++i) Make(1, 1).Dispose();
    double mean = 0;
    for (int point = 0; point < points; ++point) {
      for (int i = 0; i < each; ++i) Make(1, 1).Dispose();
      GC.Collect();
      GC.WaitForPendingFinalizers();
      GC.Collect();
      resident[point] = 4096.0 * long.Parse(File.ReadAllText("/proc/self/statm").Split(' ')[1]);
      mean += resident[point] / points;
    }
    double above = 0, below = 0;
    for (int point = 0; point < points; ++point) {
      double x = point - (points - 1) / 2.0;
      above += x * (resident[point] - mean);
      below += x * x;
    }
    return above / below / each;
  }

  static void Print(string figure, double value) {
    Console.WriteLine(figure + " " + value.ToString("F1", CultureInfo.InvariantCulture));
  }

  static void Main(string[] arguments) {
    if (arguments.Length > 0 && arguments[0] == "memory") {
      Print("allocated", Allocated());
      Print("contexts", Contexts());
      return;
    }
    Print("accumulate", Accumulates(1, 1, CallCount));
    Print("accumulate_step", Steps());
    Print("tensors", Accumulates(Tensors, 1, 2000));
    Print("large", Accumulates(1, Large, 20));
  }
}
