// SPDX-License-Identifier: Apache-2.0
using System;
using System.IO;
using System.Runtime.InteropServices;
using System.Threading;

namespace GradAccum {
  /// <summary>
  /// Functions that C calls. Each finds its object by the address that it is given, and lets no exception
  /// through: see <see cref="Guard.Callback"/>.
  /// </summary>
  internal static class Callbacks {
    [UnmanagedFunctionPointer(CallingConvention.Cdecl)]
    private delegate void LogFunction(IntPtr user, IntPtr line);

    [UnmanagedFunctionPointer(CallingConvention.Cdecl)]
    private delegate void ParamDoneFunction(IntPtr user, int param);

    [UnmanagedFunctionPointer(CallingConvention.Cdecl)]
    private delegate int ProgressFunction(IntPtr user, long done, long total);

    [UnmanagedFunctionPointer(CallingConvention.Cdecl)]
    private delegate int TransferFunction(IntPtr user, long offset, IntPtr data, UIntPtr size);

    // C has their addresses for ever.
    private static readonly LogFunction log = OnLog;
    private static readonly ParamDoneFunction paramDone = OnParamDone;
    private static readonly ProgressFunction progress = OnProgress;
    private static readonly TransferFunction write = OnWrite;
    private static readonly TransferFunction read = OnRead;

    internal static readonly IntPtr Log = Marshal.GetFunctionPointerForDelegate(log);
    internal static readonly IntPtr ParamDone = Marshal.GetFunctionPointerForDelegate(paramDone);
    internal static readonly IntPtr Progress = Marshal.GetFunctionPointerForDelegate(progress);
    internal static readonly IntPtr Write = Marshal.GetFunctionPointerForDelegate(write);
    internal static readonly IntPtr Read = Marshal.GetFunctionPointerForDelegate(read);

    private static void OnLog(IntPtr user, IntPtr line) {
      Listener listener = (Listener)GCHandle.FromIntPtr(user).Target;
      listener.Guard.Callback(() => listener.Receive(Text.Decode(line)));
    }

    private static void OnParamDone(IntPtr user, int param) {
      Listener listener = (Listener)GCHandle.FromIntPtr(user).Target;
      Context context;
      if (!listener.Context.TryGetTarget(out context)) return;
      listener.Guard.DoneCallback(() => listener.ReceiveDone(new Param(context, param)));
    }

    private static int OnProgress(IntPtr user, long done, long total) {
      Transfer transfer = (Transfer)GCHandle.FromIntPtr(user).Target;
      bool goOn = true;
      bool returned = transfer.Guard.Callback(() => goOn = transfer.Progress(done, total));
      return returned && goOn ? 0 : 1;
    }

    private static int OnWrite(IntPtr user, long offset, IntPtr data, UIntPtr size) {
      Transfer transfer = (Transfer)GCHandle.FromIntPtr(user).Target;
      return transfer.Guard.Callback(() => transfer.Write(offset, data, (long)size.ToUInt64())) ? 0 : 1;
    }

    private static int OnRead(IntPtr user, long offset, IntPtr data, UIntPtr size) {
      Transfer transfer = (Transfer)GCHandle.FromIntPtr(user).Target;
      return transfer.Guard.Callback(() => transfer.Read(offset, data, (long)size.ToUInt64())) ? 0 : 1;
    }
  }

  /// <summary>What a context calls. It does not keep the context alive, which may be collected.</summary>
  internal sealed class Listener {
    internal readonly Guard Guard;
    internal readonly WeakReference<Context> Context;
    internal readonly Action<string> Receive;
    internal readonly Action<Param> ReceiveDone;

    internal Listener(Guard guard, Context context, Config config) {
      Guard = guard;
      Context = new WeakReference<Context>(context);
      Receive = config.Log;
      ReceiveDone = config.OnParamDone;
    }
  }

  /// <summary>One call that saves or loads: its options, and the stream if there is one.</summary>
  internal sealed class Transfer : IDisposable {
    internal readonly Guard Guard;
    internal readonly Func<long, long, bool> Progress;
    private readonly ga_state_options options;
    private readonly Stream stream;
    private readonly long start;
    private long end;
    private byte[] buffer;
    private GCHandle self;

    internal Transfer(Guard guard, StateOptions options, Stream stream) {
      Guard = guard;
      this.stream = stream;
      if (stream != null) start = stream.Position;
      self = GCHandle.Alloc(this);
      if (options == null) return;
      this.options = options.Native;
      Progress = options.Progress;
      if (Progress == null) return;
      Monitor.Enter(this.options);  // two calls may share options
      this.options.progress = Callbacks.Progress;
      this.options.progress_user = User;
    }

    internal IntPtr User {
      get { return GCHandle.ToIntPtr(self); }
    }

    /// <summary>Where the state ends in the stream that it was written to.</summary>
    internal long End {
      get { return end; }
    }

    internal ga_state_options Options {
      get { return options; }
    }

    internal void Write(long offset, IntPtr data, long size) {
      stream.Position = start + offset;
      for (long done = 0; done < size;) {
        int part = Take(size - done);
        Marshal.Copy(new IntPtr(data.ToInt64() + done), buffer, 0, part);
        stream.Write(buffer, 0, part);
        done += part;
      }
      end = Math.Max(end, stream.Position);
    }

    internal void Read(long offset, IntPtr data, long size) {
      stream.Position = start + offset;
      for (long done = 0; done < size;) {
        int part = Take(size - done);
        part = stream.Read(buffer, 0, part);
        if (part <= 0) throw new EndOfStreamException("the stream ended before the state");
        Marshal.Copy(buffer, 0, new IntPtr(data.ToInt64() + done), part);
        done += part;
      }
    }

    public void Dispose() {
      if (Progress != null) {
        options.progress = IntPtr.Zero;
        options.progress_user = IntPtr.Zero;
        Monitor.Exit(options);
      }
      self.Free();
    }

    private const int BufferSize = 1 << 16;

    private int Take(long size) {
      if (buffer == null) buffer = new byte[BufferSize];
      return (int)Math.Min(size, BufferSize);
    }
  }
}
