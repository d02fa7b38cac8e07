// SPDX-License-Identifier: Apache-2.0
using System;
using System.Collections.Generic;
using System.IO;
using System.Threading;

namespace GradAccum.Tests {
  public sealed class CallbackTests {
    private static Context WithOne(Config config = null) {
      Context context = new Context(config);
      context.AddParam(context.AddGroup(new Optimizer(OptimizerKind.Sgd) {Lr = 1}), "w", new float[1 << 18], 1 << 18);
      return context;
    }

    public void LinesOfTheLog() {
      List<string> lines = new List<string>();
      int thread = 0;
      Config config = new Config {
        Log = line => {
          lines.Add(line);
          thread = Thread.CurrentThread.ManagedThreadId;
        }
      };
      using (Context context = WithOne(config)) {
        context.AddGroup(new Optimizer(OptimizerKind.Sgd));
        context.Step();
      }
      Expect.True(lines.Exists(line => line.StartsWith("gradaccum,cpu,ga_context_create,")), "a line for the creation");
      Expect.True(lines.Exists(line => line.StartsWith("gradaccum,cpu,ga_step,")), "a line for the step");
      Expect.Equal(Thread.CurrentThread.ManagedThreadId, thread, "thread");
    }

    public void WhatAListenerThrows() {
      bool angry = false;
      Config config = new Config { Log = line => { if (angry) throw new InvalidOperationException("mine: " + line); } };
      using (Context context = WithOne(config)) {
        angry = true;
        Expect.Throws<InvalidOperationException>(() => context.Step(), "mine: gradaccum,cpu,ga_step");
        Expect.Throws<InvalidOperationException>(() => context.FindParam("nothing"), "ga_param_find");
        angry = false;
        Expect.Equal(1L, context.Window.Windows);
      }
      angry = true;
      Expect.Throws<InvalidOperationException>(() => new Context(config), "ga_context_create");
    }

    public void ListenersMustNotUseTheContext() {
      Context context = null;
      List<Exception> thrown = new List<Exception>();
      Config config = new Config {
        Log = line => {
          if (context == null) return;
          foreach (Action use in new Action[] {() => context.Step(), () => context.Dispose()}) {
            try {
              use();
            } catch (GradAccumException exception) {
              thrown.Add(exception);
            }
          }
        }
      };
      context = WithOne(config);
      context.Step();
      Expect.Equal(2, thrown.Count);
      Expect.True(thrown[0].Message.Contains("callback") && thrown[1].Message.Contains("callback"), thrown[1].Message);
      context.Dispose();
    }

    public void ProgressAndCancelling() {
      using (Context context = WithOne()) {
        long last = 0, all = 0;
        byte[] state = context.SaveToMemory(new StateOptions {
          Progress = (done, total) => {
            Expect.True(done >= last && done <= total, "progress goes on");
            last = done;
            all = total;
            return true;
          }
        });
        Expect.True(all > 0 && last == all, "all was done: " + last + " of " + all);
        Expect.Fails(Status.Cancelled, () => context.SaveToMemory(new StateOptions {Progress = (done, total) => false}));
        Expect.Throws<InvalidOperationException>(() => context.SaveToMemory(new StateOptions {
          Progress = (done, total) => { throw new InvalidOperationException("mine"); }
        }), "mine");
        Expect.Throws<InvalidOperationException>(() => context.LoadFromMemory(state, new StateOptions {
          Progress = (done, total) => { throw new InvalidOperationException("mine too"); }
        }), "mine too");
        Expect.Fails(Status.InvalidState, () => context.SaveToMemory(new StateOptions {
          Progress = (done, total) => { context.Step(); return true; }
        }), "callback");
        context.Step();
      }
    }

    private sealed class FailingStream : MemoryStream {
      private int calls;

      internal FailingStream() {}

      internal FailingStream(byte[] bytes) : base(bytes) {}

      public override void Write(byte[] buffer, int offset, int count) {
        if (++calls > 2) throw new IOException("the disk is mine");
        base.Write(buffer, offset, count);
      }

      public override int Read(byte[] buffer, int offset, int count) {
        if (++calls > 2) throw new IOException("the disk was mine");
        return base.Read(buffer, offset, count);
      }
    }

    private sealed class OneWay : MemoryStream {
      public override bool CanSeek {
        get { return false; }
      }
    }

    public void StreamsThatFail() {
      using (Context context = WithOne()) {
        Expect.Throws<IOException>(() => context.Save(new FailingStream()), "the disk is mine");
        MemoryStream whole = new MemoryStream();
        context.Save(whole);
        FailingStream failing = new FailingStream(whole.ToArray());
        Expect.Throws<IOException>(() => context.Load(failing), "the disk was mine");
        MemoryStream half = new MemoryStream(whole.ToArray(), 0, (int)whole.Length / 2);
        Expect.Fails(Status.Format, () => context.Load(half));
        Expect.Fails(Status.InvalidArgument, () => context.Save(new OneWay()), "seek");
        Expect.Fails(Status.InvalidArgument, () => context.Load(new OneWay()), "seek");
        Expect.Throws<ArgumentNullException>(() => context.Save((Stream)null));
        whole.Position = 0;
        context.Load(whole);
      }
    }
  }
}
