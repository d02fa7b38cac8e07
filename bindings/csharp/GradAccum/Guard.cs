// SPDX-License-Identifier: Apache-2.0
using System;
using System.Runtime.ExceptionServices;
using System.Runtime.InteropServices;
using System.Threading;

namespace GradAccum {
  /// <summary>
  /// Lets one call at a time into a context. Closing waits for a call that runs, and lets no other one in.
  /// </summary>
  internal sealed class Guard {
    private const int Free = 0;
    private const int InCall = 1;
    private const int ClosingInCall = 2;
    private const int Closed = 3;

    private int state;
    private int callbackThread;  // the thread that runs code of the program within the call; 0: none
    private int doneThread;      // the thread, maybe one of the library, that tells that a parameter is done; 0: none
    private int callThread;      // if hasDone: the thread of the last call
    private bool hasDone;        // whether the context tells that parameters are done
    private ExceptionDispatchInfo thrown;

    internal void Enter() {
      int before = Interlocked.CompareExchange(ref state, InCall, Free);
      if (before != Free) Refuse(before);
      if (hasDone) Volatile.Write(ref callThread, Environment.CurrentManagedThreadId);
    }

    /// <summary>Before the first call on a context that tells that parameters are done.</summary>
    internal void ExpectDone() {
      hasDone = true;
    }

    internal void Exit() {
      if (Interlocked.CompareExchange(ref state, Free, InCall) != InCall) Volatile.Write(ref state, Closed);
      if (Volatile.Read(ref thrown) != null) Rethrow();
    }

    /// <summary>Returns true to the caller that is to destroy the context, once.</summary>
    internal bool Close() {
      int thread = Environment.CurrentManagedThreadId;
      if (Volatile.Read(ref callbackThread) == thread || Volatile.Read(ref doneThread) == thread) {
        throw GradAccumException.State("a callback of a context must not close the context");
      }
      SpinWait wait = new SpinWait();
      while (true) {
        int before = Interlocked.CompareExchange(ref state, Closed, Free);
        if (before == Free) return true;
        if (before == InCall) before = Interlocked.CompareExchange(ref state, ClosingInCall, InCall);
        if (before == InCall) {
          while (Volatile.Read(ref state) != Closed) wait.SpinOnce();
          return true;
        }
        if (before == Closed) return false;
        wait.SpinOnce();  // another thread is closing
      }
    }

    /// <summary>As Close(), unless a call runs.</summary>
    internal bool TryClose() {
      return Interlocked.CompareExchange(ref state, Closed, Free) == Free;
    }

    internal bool IsClosed {
      get { return Volatile.Read(ref state) >= ClosingInCall; }
    }

    /// <summary>
    /// Runs code of the program within a call of C, which no exception may leave: it comes out of Exit().
    /// </summary>
    internal bool Callback(Action body) {
      return Run(ref callbackThread, body);
    }

    /// <summary>
    /// As Callback(), but the callback may also come from a thread of the library. What it throws there comes out of
    /// Exit() of the call that runs meanwhile, or of the next one.
    /// </summary>
    internal void DoneCallback(Action body) {
      // Before the process ends, mono waits for every thread that is not in the background.
      if (Volatile.Read(ref callThread) != Environment.CurrentManagedThreadId) Thread.CurrentThread.IsBackground = true;
      Run(ref doneThread, body);
    }

    private bool Run(ref int thread, Action body) {
      int before = thread;
      Volatile.Write(ref thread, Environment.CurrentManagedThreadId);
      try {
        body();
        return true;
      } catch (Exception exception) {
        Interlocked.CompareExchange(ref thrown, ExceptionDispatchInfo.Capture(exception), null);
        return false;
      } finally {
        Volatile.Write(ref thread, before);
      }
    }

    private static void Refuse(int before) {
      if (before >= ClosingInCall) throw new ObjectDisposedException("Context");
      throw GradAccumException.State(
          "another call runs on this context: one thread at a time uses a context, and a callback must not use its own");
    }

    private void Rethrow() {
      ExceptionDispatchInfo first = Interlocked.Exchange(ref thrown, null);
      if (first != null) first.Throw();
    }
  }

  /// <summary>A call on a context, which ends with its scope.</summary>
  internal struct Call : IDisposable {
    private readonly Guard guard;
    internal readonly IntPtr Context;

    internal Call(Guard guard, SafeHandle handle) {
      guard.Enter();
      this.guard = guard;
      Context = handle.DangerousGetHandle();
    }

    public void Dispose() {
      guard.Exit();
    }
  }

  /// <summary>Owns a context of C, and keeps what must live as long.</summary>
  internal sealed class ContextHandle : SafeHandle {
    internal readonly KeptMemory Kept = new KeptMemory();
    private GCHandle listener;
    private EventHandler exit;

    internal ContextHandle(IntPtr context, GCHandle listener) : base(IntPtr.Zero, true) {
      SetHandle(context);
      this.listener = listener;
    }

    /// <summary>
    /// Ends the context with the process or its AppDomain, if the program has not done that. Mono waits for every
    /// thread that has run managed code, and a thread of the library that has called a listener ends with its
    /// context.
    /// </summary>
    internal void EndWithDomain(Guard guard) {
      WeakReference<ContextHandle> self = new WeakReference<ContextHandle>(this, true);
      exit = (sender, arguments) => {
        ContextHandle handle;
        if (guard.TryClose() && self.TryGetTarget(out handle)) handle.Dispose();
      };
      AppDomain.CurrentDomain.ProcessExit += exit;
      AppDomain.CurrentDomain.DomainUnload += exit;
    }

    public override bool IsInvalid {
      get { return handle == IntPtr.Zero; }
    }

    protected override bool ReleaseHandle() {
      if (exit != null) {
        AppDomain.CurrentDomain.ProcessExit -= exit;
        AppDomain.CurrentDomain.DomainUnload -= exit;
      }
      Raw.ga_context_destroy(handle);
      Kept.ReleaseAll();
      if (listener.IsAllocated) listener.Free();
      return true;
    }
  }
}
