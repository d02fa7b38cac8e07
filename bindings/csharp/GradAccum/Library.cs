// SPDX-License-Identifier: Apache-2.0
using System;

namespace GradAccum {
  /// <summary>The native library.</summary>
  public static class Library {
    /// <summary>The version of the library that is loaded: 10000 * major + 100 * minor + patch.</summary>
    public static int Version {
      get {
        return Natives.First(() => Raw.ga_version());
      }
    }

    /// <summary>Version, compiler, CPU kernels, threads and modules, in one line.</summary>
    public static string BuildInfo {
      get {
        return Natives.First(() => Raw.ga_build_info());
      }
    }

    /// <summary>What BuildInfo says, as fields.</summary>
    /// <returns>The build.</returns>
    public static Build DescribeBuild() {
      return Natives.First(() => {
        using (ga_build native = new ga_build()) {
          Raw.ga_build_describe(native);
          return new Build(native);
        }
      });
    }

    /// <summary>How many devices of a kind contexts can be made on.</summary>
    /// <param name="device">The kind.</param>
    /// <returns>The number. 0 is an answer, not an error.</returns>
    public static int DeviceCount(Device device) {
      string reason;
      return DeviceCount(device, out reason);
    }

    /// <summary>How many devices of a kind contexts can be made on, and why there is none.</summary>
    /// <param name="device">The kind.</param>
    /// <param name="reason">If there is none, the reason, such as a missing driver; else null.</param>
    /// <returns>The number. 0 is an answer, not an error.</returns>
    public static int DeviceCount(Device device, out string reason) {
      string why = null;
      int count = Natives.First(() => {
        int devices;
        Raw.ga_device_count((int)device, out devices);
        if (devices == 0) why = Raw.ga_last_error();
        return devices;
      });
      reason = why;
      return count;
    }

    /// <summary>The note in a file that was saved.</summary>
    /// <param name="path">The file.</param>
    /// <returns>The note; null: there is none.</returns>
    public static string StateNote(string path) {
      if (path == null) throw new ArgumentNullException("path");
      return Natives.First(() => ReadNote(path));
    }

    private static unsafe string ReadNote(string path) {
      UIntPtr size;
      Raw.ga_state_note(path, IntPtr.Zero, 0, out size);
      if (size == UIntPtr.Zero) return null;
      byte[] text = new byte[size.ToUInt64()];
      fixed (byte* address = text) {
        Raw.ga_state_note(path, (IntPtr)address, size.ToUInt64(), out size);
        return size == UIntPtr.Zero ? null : Text.Decode((IntPtr)address);
      }
    }
  }
}
