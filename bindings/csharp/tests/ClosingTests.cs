// SPDX-License-Identifier: Apache-2.0
using System;
using System.IO;
using System.Threading;

namespace GradAccum.Tests {
  public sealed class ClosingTests {
    private static Context WithOne(Config config = null) {
      Context context = new Context(config);
      context.AddParam(context.AddGroup(new Optimizer(OptimizerKind.Sgd) {Lr = 1}), "w", new float[4], 4);
      return context;
    }

    public void TwiceAndAfterwards() {
      Context context = WithOne();
      Group group = context.Groups[0];
      Param param = context.FindParam("w");
      MicroBatch micro = context.BeginMicroBatch();
      Accumulator accumulator = micro.Acquire(param);
      context.Dispose();
      context.Dispose();
      foreach (Action use in new Action[] {
                 () => context.Step(), () => context.Accumulate(new float[4]), () => context.Discard(),
                 () => { Window window = context.Window; }, () => context.AddGroup(new Optimizer(OptimizerKind.Sgd)),
                 () => context.Save("nowhere"), () => group.SetLr(1), () => { double lr = group.Lr; },
                 () => { ParamInfo info = param.Info; }, () => param.Bind(new float[4]), () => context.BeginMicroBatch(),
                 () => micro.End(), () => micro.Accumulate(param, new float[4]), () => context.Ready(param),
                 () => accumulator.Write<float>(elements => {}), () => context.Accumulate(new ReadOnlySpan<float>(new float[4]))
               }) {
        Expect.Throws<ObjectDisposedException>(use, "Context");
      }
      micro.Dispose();
    }

    /// <summary>A stream whose first write waits for a signal: a call that takes as long as a test wants.</summary>
    private sealed class SlowStream : MemoryStream {
      internal readonly ManualResetEvent Entered = new ManualResetEvent(false);
      internal readonly ManualResetEvent Leave = new ManualResetEvent(false);

      public override void Write(byte[] buffer, int offset, int count) {
        Entered.Set();
        Leave.WaitOne(20000);
        base.Write(buffer, offset, count);
      }
    }

    public void WhileAnotherThreadIsInACall() {
      Context context = WithOne();
      SlowStream stream = new SlowStream();
      Exception thrown = null;
      bool closed = false;
      Thread saving = new Thread(() => {
        try {
          context.Save(stream);
        } catch (Exception exception) {
          thrown = exception;
        }
      });
      saving.Start();
      stream.Entered.WaitOne();
      // Two threads at once.
      Expect.Fails(Status.InvalidState, () => context.Step(), "another call");
      Expect.Fails(Status.InvalidState, () => context.Accumulate(new float[4]), "another call");
      Thread closing = new Thread(() => {
        context.Dispose();
        Volatile.Write(ref closed, true);
      });
      closing.Start();
      Thread second = new Thread(() => context.Dispose());
      second.Start();
      Thread.Sleep(100);
      Expect.True(!Volatile.Read(ref closed), "Dispose waits for the call");
      Expect.Throws<ObjectDisposedException>(() => context.Step());
      stream.Leave.Set();
      saving.Join();
      closing.Join();
      second.Join();
      Expect.True(thrown == null, "the call that ran has ended well: " + thrown);
      Expect.True(stream.Length > 0 && Volatile.Read(ref closed), "saved and closed");
    }

    public void WhileManyThreadsCall() {
      for (int round = 0; round < 50; ++round) {
        Context context = WithOne();
        int unexpected = 0;
        Thread[] threads = new Thread[3];
        for (int i = 0; i < threads.Length; ++i) {
          threads[i] = new Thread(() => {
            while (true) {
              try {
                context.Accumulate(new float[4]);
                context.Step();
              } catch (ObjectDisposedException) {
                return;
              } catch (GradAccumException exception) {
                if (exception.Status != Status.InvalidState) Interlocked.Increment(ref unexpected);
              } catch (Exception) {
                Interlocked.Increment(ref unexpected);
              }
            }
          });
          threads[i].Start();
        }
        Thread.Sleep(1);
        context.Dispose();
        foreach (Thread thread in threads) thread.Join();
        Expect.Equal(0, unexpected, "other exceptions");
      }
    }

    /// <summary>A context may be handed from thread to thread.</summary>
    public void HandedOver() {
      using (Context context = WithOne()) {
        for (int i = 0; i < 20; ++i) {
          Exception thrown = null;
          Thread thread = new Thread(() => {
            try {
              context.Accumulate(new float[4]);
              context.Step();
            } catch (Exception exception) {
              thrown = exception;
            }
          });
          thread.Start();
          thread.Join();
          Expect.True(thrown == null, "in another thread: " + thrown);
        }
        Expect.Equal(20L, context.Window.Steps);
      }
    }

    public void ErrorsOfTwoThreadsStayApart() {
      int wrong = 0;
      Thread[] threads = new Thread[2];
      for (int i = 0; i < threads.Length; ++i) {
        string name = "thread" + i;
        threads[i] = new Thread(() => {
          using (Context context = WithOne()) {
            for (int round = 0; round < 2000; ++round) {
              try {
                context.FindParam(name);
                Interlocked.Increment(ref wrong);
              } catch (GradAccumException exception) {
                if (!exception.Message.Contains(name)) Interlocked.Increment(ref wrong);
              }
            }
          }
        });
        threads[i].Start();
      }
      foreach (Thread thread in threads) thread.Join();
      Expect.Equal(0, wrong);
    }

    public void MicroBatchesThatWereNotEnded() {
      using (Context context = WithOne()) {
        Param param = context.FindParam("w");
        using (MicroBatch micro = context.BeginMicroBatch()) micro.Accumulate(param, new float[4]);
        Expect.Equal(WindowState.Empty, context.Window.State);
        Expect.Throws<InvalidOperationException>(() => {
          using (MicroBatch micro = context.BeginMicroBatch()) throw new InvalidOperationException("mine");
        }, "mine");
        Expect.Equal(-1L, context.Window.OpenMicro);
        MicroBatch first = context.BeginMicroBatch();
        first.End();
        Expect.Fails(Status.InvalidState, () => first.End(), "closed");
        MicroBatch second = context.BeginMicroBatch();
        Expect.Fails(Status.InvalidState, () => first.Accumulate(param, new float[4]), "closed");
        first.Dispose();
        Expect.Equal(1L, context.Window.OpenMicro);
        second.Abort();
        MicroBatch third = context.BeginMicroBatch();
        third.Discard();
        Expect.Equal(WindowState.Empty, context.Window.State);
        third.Dispose();
        MicroBatch fourth = context.BeginMicroBatch();
        context.Discard();
        Expect.Fails(Status.InvalidState, () => fourth.End(), "closed");
      }
    }
  }
}
