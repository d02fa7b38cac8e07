// SPDX-License-Identifier: Apache-2.0
using System;
using System.IO;
using System.Runtime.InteropServices;

namespace GradAccum {
  // State on disk and in memory.
  public sealed partial class Context {
    /// <summary>Saves to a file, as a whole or not at all. No micro-batch may be open.</summary>
    /// <param name="path">The file.</param>
    /// <param name="options">What is saved; null: everything.</param>
    public void Save(string path, StateOptions options = null) {
      if (path == null) throw new ArgumentNullException("path");
      using (Call call = Begin())
      using (Transfer transfer = new Transfer(guard, options, null)) {
        Raw.ga_save(call.Context, path, transfer.Options);
      }
    }

    /// <summary>Loads from a file, as a whole or not at all. Between windows.</summary>
    /// <param name="path">The file.</param>
    /// <param name="options">What is loaded; null: everything.</param>
    public void Load(string path, StateOptions options = null) {
      if (path == null) throw new ArgumentNullException("path");
      using (Call call = Begin())
      using (Transfer transfer = new Transfer(guard, options, null)) {
        ++generation;
        Raw.ga_load(call.Context, path, transfer.Options);
      }
    }

    /// <summary>Saves to a stream that can seek, from its position on.</summary>
    /// <param name="stream">The stream, whose position is then behind the state.</param>
    /// <param name="options">What is saved; null: everything.</param>
    public void Save(Stream stream, StateOptions options = null) {
      if (stream == null) throw new ArgumentNullException("stream");
      if (!stream.CanSeek || !stream.CanWrite) {
        throw GradAccumException.Invalid("the stream cannot seek and write: the header of a state is written last");
      }
      using (Call call = Begin())
      using (Transfer transfer = new Transfer(guard, options, stream)) {
        Raw.ga_state_write(call.Context, Callbacks.Write, transfer.User, transfer.Options);
        stream.Position = transfer.End;
      }
    }

    /// <summary>Loads from a stream that can seek, from its position to its end.</summary>
    /// <param name="stream">The stream.</param>
    /// <param name="options">What is loaded; null: everything.</param>
    public void Load(Stream stream, StateOptions options = null) {
      if (stream == null) throw new ArgumentNullException("stream");
      if (!stream.CanSeek || !stream.CanRead) {
        throw GradAccumException.Invalid("the stream cannot seek and read: most of a state is read twice");
      }
      using (Call call = Begin())
      using (Transfer transfer = new Transfer(guard, options, stream)) {
        ++generation;
        long size = stream.Length - stream.Position;
        Raw.ga_state_read(call.Context, Callbacks.Read, transfer.User, size, transfer.Options);
      }
    }

    /// <summary>Saves to memory. A state of 2 GiB or more needs a file or a stream.</summary>
    /// <param name="options">What is saved; null: everything.</param>
    /// <returns>The state.</returns>
    public unsafe byte[] SaveToMemory(StateOptions options = null) {
      using (Call call = Begin())
      using (Transfer transfer = new Transfer(guard, options, null)) {
        UIntPtr size;
        Raw.ga_save_to_memory(call.Context, transfer.Options, IntPtr.Zero, 0, out size);
        if (size.ToUInt64() > int.MaxValue) {
          throw GradAccumException.Invalid("the state takes " + size + " bytes, more than an array has; save it to a file or stream");
        }
        byte[] state = new byte[(int)size.ToUInt64()];
        fixed (byte* address = state) {
          Raw.ga_save_to_memory(call.Context, transfer.Options, (IntPtr)address, (ulong)state.Length, out size);
        }
        return state;
      }
    }

    /// <summary>Loads from memory.</summary>
    /// <param name="state">What <see cref="SaveToMemory"/> has returned.</param>
    /// <param name="options">What is loaded; null: everything.</param>
    public void LoadFromMemory(byte[] state, StateOptions options = null) {
      if (state == null) throw new ArgumentNullException("state");
      LoadFromMemory(new ReadOnlySpan<byte>(state), options);
    }

    /// <summary>Loads from memory.</summary>
    /// <param name="state">The bytes of a state.</param>
    /// <param name="options">What is loaded; null: everything.</param>
    public unsafe void LoadFromMemory(ReadOnlySpan<byte> state, StateOptions options = null) {
      byte none = 0;
      using (Call call = Begin())
      using (Transfer transfer = new Transfer(guard, options, null)) {
        ++generation;
        fixed (byte* address = &MemoryMarshal.GetReference(state)) {
          // An empty array has no address, and C takes none.
          IntPtr data = state.Length > 0 ? (IntPtr)address : (IntPtr)(&none);
          Raw.ga_load_from_memory(call.Context, data, (ulong)state.Length, transfer.Options);
        }
      }
    }
  }
}
