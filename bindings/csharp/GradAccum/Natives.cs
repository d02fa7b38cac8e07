// SPDX-License-Identifier: Apache-2.0
using System;
using System.Collections.Generic;
using System.IO;
using System.Runtime.CompilerServices;
using System.Runtime.InteropServices;

namespace GradAccum {
  /// <summary>
  /// Finds and loads the native library: in the folder that GRADACCUM_NATIVE_PATH names, else beside the
  /// assembly, where a package has it, else where the system looks. The first one found is the one: if it
  /// cannot be loaded, no other one is tried in its place.
  /// </summary>
  internal static class Natives {
    internal const string Variable = "GRADACCUM_NATIVE_PATH";
    private static readonly bool isMac = RuntimeInformation.IsOSPlatform(OSPlatform.OSX);
    private static readonly bool isWindows = RuntimeInformation.IsOSPlatform(OSPlatform.Windows);
    private static readonly string File = isWindows ? "gradaccum_csharp.dll"
                                          : isMac ? "libgradaccum_csharp.dylib" : "libgradaccum_csharp.so";

    // The file is opened by its path, and the runtime must then take that one. Mono would search by name
    // again, beginning beside the assembly; so it is given the symbols of the whole process.
#if NETCOREAPP
    internal const string Import = "gradaccum_csharp";
#else
    internal const string Import = "__Internal";
#endif

    // Null: the library is loaded.
    private static readonly string failure = Load();

    internal static bool TryLoad() {
      return failure == null;
    }

    /// <summary>
    /// Calls native code that may be the first. It is in a delegate because mono looks for the functions that
    /// a method calls when it compiles the method.
    /// </summary>
    internal static T First<T>(Func<T> call) {
      if (failure != null) throw GradAccumException.Unsupported(failure);
      return call();
    }

    private static string Load() {
      List<string> tried = new List<string>();
      IntPtr library = IntPtr.Zero;
      try {
        foreach (string path in Candidates()) {
          if (!System.IO.File.Exists(path)) {
            tried.Add(path + " (no such file)");
            continue;
          }
          string error = Open(path, out library);
          if (error != null) return "the native library " + path + " was not loaded: " + Explain(path, error);
          break;
        }
        if (library == IntPtr.Zero) {
          string error = Open(File, out library);
          if (error != null) {
            tried.Add("the folders of the system (" + error + ")");
            return "the native library was not found. Tried: " + string.Join("; ", tried.ToArray()) + ". " + Variable +
                   " names a folder that has it.";
          }
        }
      } catch (DllNotFoundException) {
        return isWindows ? "this is the assembly for mono (lib/net40); on Windows, use lib/netcoreapp3.1"
                         : "the native library needs Linux with glibc" + (IsMusl() ? "; this system has musl" : "");
      }
#if NETCOREAPP
      NativeLibrary.SetDllImportResolver(
          typeof(Natives).Assembly,
          (name, assembly, search) => name == Import ? library : IntPtr.Zero);
#endif
      return CheckVersion();
    }

    // A method of its own, so that it is compiled when the library is loaded: see First().
    [MethodImpl(MethodImplOptions.NoInlining)]
    private static string CheckVersion() {
      int version = ga_version();
      // A minor release of version 0 may change the interface.
      int compatible = Raw.GA_VERSION_MAJOR == 0 ? 100 : 10000;
      if (version / compatible != Raw.GA_VERSION / compatible) {
        return "the native library has version " + Describe(version) + ", which does not fit version " +
               Describe(Raw.GA_VERSION) + " of this assembly";
      }
      return null;
    }

    private static IEnumerable<string> Candidates() {
      string chosen = Environment.GetEnvironmentVariable(Variable);
      if (!string.IsNullOrEmpty(chosen)) yield return Path.GetFullPath(Path.Combine(chosen, File));
      string folder = Path.GetDirectoryName(typeof(Natives).Assembly.Location);
      if (string.IsNullOrEmpty(folder)) folder = AppDomain.CurrentDomain.BaseDirectory;
      string natives = Path.Combine("runtimes", Rid(), "native", File);
      yield return Path.Combine(folder, natives);                                    // of an application
      yield return Path.GetFullPath(Path.Combine(folder, "..", "..", natives));      // of an unpacked package
      yield return Path.Combine(folder, File);                                       // published for one platform
    }

    private static string Rid() {
      string architecture = RuntimeInformation.ProcessArchitecture == Architecture.Arm64 ? "arm64" : "x64";
      return (isWindows ? "win-" : isMac ? "osx-" : IsMusl() ? "linux-musl-" : "linux-") + architecture;
    }

    // What the message of the loader means.
    private static string Explain(string path, string error) {
      string why = "";
      int machine = Machine(path);
      int expected = Machine("/proc/self/exe");
      if (machine != expected) {
        why = machine < 0 ? "the file is not a library of this kind of system"
                          : "the library is for another architecture than this process, " +
                                RuntimeInformation.ProcessArchitecture;
      } else if (error.Contains("failed to map segment")) {
        why = "its folder seems to be on a file system that is mounted noexec; set " + Variable + " to another folder";
      } else if (error.Contains("libgomp")) {
        why = "the library needs libgomp, OpenMP of GCC (libgomp1 in Debian)";
      } else if (error.Contains("GLIBC_")) {
        why = "the library needs a newer glibc than that of this system";
      } else if (IsMusl()) {
        why = "the library needs glibc, and this system has musl";
      }
      return why.Length > 0 ? why + " (" + error + ")" : error;
    }

    // The field e_machine of an ELF file; -1: it is none.
    private static int Machine(string path) {
      try {
        using (FileStream file = System.IO.File.OpenRead(path)) {
          byte[] head = new byte[20];
          if (file.Read(head, 0, head.Length) < head.Length) return -1;
          if (head[0] != 0x7f || head[1] != 'E' || head[2] != 'L' || head[3] != 'F') return -1;
          return head[18] | head[19] << 8;
        }
      } catch (IOException) {
        return -1;
      } catch (UnauthorizedAccessException) {
        return -1;
      }
    }

    // Whether this process runs on musl: a system may have both C libraries.
    private static bool IsMusl() {
      try {
        return System.IO.File.ReadAllText("/proc/self/maps").Contains("/ld-musl-");
      } catch (IOException) {
        return false;
      }
    }

    private static string Describe(int version) {
      return version / 10000 + "." + version / 100 % 100 + "." + version % 100;
    }

    // Null, or why the library was not opened.
#if NETCOREAPP
    private static string Open(string path, out IntPtr library) {
      library = IntPtr.Zero;
      try {
        library = NativeLibrary.Load(path);
        return null;
      } catch (DllNotFoundException e) {
        return e.Message;
      } catch (BadImageFormatException e) {
        return e.Message;
      }
    }
#else
    private static string Open(string path, out IntPtr library) {
      dlerror();  // binds the function, which would otherwise clear the error that it is to tell
      library = dlopen(Terminated(path), 0x102);  // RTLD_NOW | RTLD_GLOBAL
      return library == IntPtr.Zero ? Text.Decode(dlerror()) ?? "no reason given" : null;
    }

    // Paths of the system have any bytes; those of .NET are UTF-16.
    private static byte[] Terminated(string path) {
      return System.Text.Encoding.UTF8.GetBytes(path + "\0");
    }

    [DllImport("libdl.so.2")]
    private static extern IntPtr dlopen(byte[] path, int flags);

    [DllImport("libdl.so.2")]
    private static extern IntPtr dlerror();
#endif

    [DllImport(Import, EntryPoint = "CSharp_GradAccum_ga_version")]
    private static extern int ga_version();
  }
}
