// SPDX-License-Identifier: Apache-2.0
using System;
using System.Collections.Generic;
using System.Runtime.CompilerServices;
using System.Threading;

namespace GradAccum.Tests {
  /// <summary>Updates ahead of the step: Config.Eager, and the listener of parameters that are done.</summary>
  public sealed class EagerTests {
    private const int Large = 70001;

    private static float[] Numbers(int count, int seed) {
      float[] values = new float[count];
      for (int i = 0; i < count; ++i) values[i] = (i * 31 + seed * 17) % 23 - 11;
      return values;
    }

    /// <summary>Two parameters under momentum. The second one is ready first, as in a backward pass.</summary>
    private sealed class Training : IDisposable {
      internal readonly float[][] Data = {Numbers(Large, 1), Numbers(5, 2)};
      internal readonly Context Context;
      internal readonly Param W, B;

      internal Training(Config config) {
        Context = new Context(config);
        Group group = Context.AddGroup(new Optimizer(OptimizerKind.Sgd) {Lr = 0.5, Momentum = 0.9});
        W = Context.AddParam(group, "w", Data[0], Large);
        B = Context.AddParam(group, "b", Data[1], 5);
      }

      internal StepResult Window(int number) {
        Context.Accumulate(new Tensor[] {Numbers(Large, number), Numbers(5, number)}, 1);
        using (MicroBatch micro = Context.BeginMicroBatch(1, -1, 0, true)) {
          micro.Accumulate(B, Numbers(5, number + 1));
          Context.Ready(B);
          micro.Accumulate(W, Numbers(Large, number + 1));
          Context.Ready(W);
          micro.End();
        }
        return Context.Step();
      }

      public void Dispose() {
        Context.Dispose();
      }
    }

    public void ParametersAreThoseOfTheStep() {
      foreach (GradientLife life in new[] {GradientLife.Consumed, GradientLife.Live}) {
        foreach (Nonfinite nonfinite in new[] {Nonfinite.SkipStep, Nonfinite.Ignore}) {
          for (int threads = 0; threads < 2; ++threads) {
            List<Param> done = new List<Param>();
            List<int> on = new List<int>();
            Config config = new Config {
              Eager = true, EagerThreads = threads, Nonfinite = nonfinite, GradientLife = life,
              OnParamDone = param => {
                done.Add(param);
                on.Add(Thread.CurrentThread.ManagedThreadId);
              }
            };
            bool inPlace = nonfinite == Nonfinite.Ignore;
            using (Training plain = new Training(new Config {Nonfinite = nonfinite, GradientLife = life}))
            using (Training eager = new Training(config)) {
              Expect.Equal(0L, plain.Context.Memory.Eager);
              Expect.Equal(inPlace, eager.Context.Memory.Eager == 0);
              for (int number = 0; number < 4; ++number) {
                Expect.Equal(0L, plain.Window(number).Eager);
                done.Clear();
                on.Clear();
                StepResult result = eager.Window(number);
                // The step makes the updates that a thread has not begun with.
                Expect.True(threads == 0 ? result.Eager == 2 : result.Eager <= 2, "updated ahead");
                Expect.Equal(0L, result.EagerWaited);
                Expect.Equal(0L, result.EagerRedone);
                Expect.Equal(2, done.Count);
                Expect.True(done[0].Id == eager.B.Id && done[1].Id == eager.W.Id, "the first to be ready is done first");
                foreach (int thread in on) {
                  bool ownThread = thread == Thread.CurrentThread.ManagedThreadId;
                  Expect.True(ownThread || (inPlace && threads > 0), "thread");
                }
                for (int i = 0; i < 2; ++i) Expect.Same(plain.Data[i], eager.Data[i], "parameters");
              }
            }
          }
        }
      }
    }

    public void WhatWaitsAndWhatIsMadeAnew() {
      using (Training little = new Training(new Config {Eager = true, EagerBytes = 1 << 10}))
      using (Training clipped = new Training(new Config {Eager = true})) {
        StepResult result = little.Window(1);
        Expect.Equal(1L, result.Eager);
        Expect.Equal(1L, result.EagerWaited);
        long bytes = little.Context.Memory.Eager;
        Expect.True(bytes > 0 && bytes <= 1 << 10, bytes + " bytes");
        clipped.Context.SetClip(new Clip {Scope = ClipScope.Global, MaxNorm = 0.5});
        result = clipped.Window(1);
        Expect.True(result.ClipFactor < 1, "clipped");
        Expect.Equal(2L, result.Eager);
        Expect.Equal(2L, result.EagerRedone);
      }
    }

    private static Context InPlace(int threads, Action<Param> listener, float[] w) {
      Context context = new Context(
          new Config {Eager = true, EagerThreads = threads, Nonfinite = Nonfinite.Ignore, OnParamDone = listener});
      context.AddParam(context.AddGroup(new Optimizer(OptimizerKind.Sgd) {Lr = 1}), "w", w, w.Length);
      return context;
    }

    public void WhatIsUpdatedInPlaceIsThereAtOnce() {
      float[] w = {1, 2};
      using (Context context = InPlace(0, null, w)) {
        Param param = context.FindParam("w");
        MicroBatch micro = context.BeginMicroBatch(1, -1, 0, true);
        using (micro) {
          micro.Accumulate(param, new float[] {3, 3});
          context.Ready(param);
          Expect.Same(new float[] {-2, -1}, w, "in place");
          Expect.Fails(Status.InvalidState, () => context.Discard(), "in place");
        }
        micro.End();  // could not be discarded
        Expect.Equal(StepOutcome.Applied, context.Step().Outcome);
      }
    }

    public void AParameterThatMayBeWrittenEarly() {
      long[] bytes = new long[2];
      for (int early = 0; early < 2; ++early) {
        ushort[] w = new ushort[Large], ones = new ushort[Large];
        for (int i = 0; i < Large; ++i) ones[i] = 0x3f80;
        using (Context context = new Context(new Config {Eager = true})) {
          Param param = context.AddParam(context.AddGroup(new Optimizer(OptimizerKind.Sgd) {Lr = 1}), "w",
                                         Tensor.BF16(w), new ParamOptions {WriteEarly = early == 1}, Large);
          bytes[early] = context.Memory.Eager;
          using (MicroBatch micro = context.BeginMicroBatch(1, -1, 0, true)) {
            micro.Accumulate(param, Tensor.BF16(ones));
            context.Ready(param);
            micro.End();
          }
          Expect.Equal(1L, context.Step().Eager);
          Expect.True(w[0] == 0xbf80 && w[Large - 1] == 0xbf80, "the step");
        }
      }
      Expect.True(bytes[1] < bytes[0], bytes[1] + " bytes in place of " + bytes[0]);
    }

    /// <summary>Makes a window in which the listener is called while this thread is in no call.</summary>
    private static void Train(Context context, ManualResetEvent called) {
      Param param = context.FindParam("w");
      using (MicroBatch micro = context.BeginMicroBatch(1, -1, 0, true)) {
        micro.Accumulate(param, new float[] {1});
        context.Ready(param);
        Expect.True(called.WaitOne(20000), "the listener is called");
        micro.End();
      }
      context.Step();
    }

    public void AListenerMustNotUseItsContext() {
      for (int threads = 0; threads < 2; ++threads) {
        List<Exception> thrown = new List<Exception>();
        ManualResetEvent called = new ManualResetEvent(false);
        Context own = null;
        Action<Param> listener = param => {
          foreach (Action use in new Action[] {() => own.Step(), () => own.Dispose()}) {
            try {
              use();
            } catch (GradAccumException exception) {
              thrown.Add(exception);
            }
          }
          called.Set();
        };
        using (Context context = InPlace(threads, listener, new float[1])) {
          own = context;
          Train(context, called);
          Expect.Equal(1L, context.Window.Steps);
        }
        Expect.Equal(2, thrown.Count);
        Expect.True(thrown[1].Message.Contains("must not close the context"), thrown[1].Message);
      }
    }

    public void WhatAListenerThrows() {
      for (int threads = 0; threads < 2; ++threads) {
        ManualResetEvent called = new ManualResetEvent(false);
        Action<Param> listener = param => {
          called.Set();
          throw new InvalidOperationException("mine: " + param.Id);
        };
        using (Context context = InPlace(threads, listener, new float[1])) {
          Expect.Throws<InvalidOperationException>(() => Train(context, called), "mine: 0");
        }
      }
    }

    private static Context undisposed;

    /// <summary>A context with a thread that has called the listener.</summary>
    internal static Context Trained() {
      ManualResetEvent called = new ManualResetEvent(false);
      Context context = InPlace(1, param => called.Set(), new float[1]);
      Train(context, called);
      return context;
    }

    /// <summary>Ends the process while the context has such a thread.</summary>
    internal static void EndUndisposed() {
      undisposed = Trained();
      if (undisposed.Window.Windows == 1) Console.WriteLine("trained");
    }

    public void AProgramEndsWithoutDisposing() {
      string output = Children.Start(null, new Dictionary<string, string>(), "undisposed");
      Expect.Equal("trained\nexit status 0", output);
    }

    [MethodImpl(MethodImplOptions.NoInlining)]
    private static WeakReference Leave(ManualResetEvent called, ManualResetEvent goOn) {
      Action<Param> listener = param => {
        called.Set();
        goOn.WaitOne(20000);
      };
      Context context = InPlace(1, listener, new float[1]);
      MicroBatch micro = context.BeginMicroBatch(1, -1, 0, true);
      micro.Accumulate(context.FindParam("w"), new float[] {1});
      context.Ready(context.FindParam("w"));
      return new WeakReference(context);
    }

    public void AContextIsLeftToTheCollectorWhileItsThreadWorks() {
      ManualResetEvent called = new ManualResetEvent(false), goOn = new ManualResetEvent(false);
      WeakReference left = null;
      Thread thread = new Thread(() => left = Leave(called, goOn));
      thread.Start();
      thread.Join();
      Expect.True(called.WaitOne(20000), "the listener is called");
      GC.Collect();
      goOn.Set();
      for (int i = 0; i < 200 && left.IsAlive; ++i) {
        GC.Collect();
        GC.WaitForPendingFinalizers();
        Thread.Sleep(10);
      }
      // Mono reads stacks conservatively, that of the library's thread too.
      if (Type.GetType("Mono.Runtime") == null) Expect.True(!left.IsAlive, "the context was collected");
    }
  }
}
