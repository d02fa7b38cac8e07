// SPDX-License-Identifier: Apache-2.0
using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.IO;

namespace GradAccum.Tests {
  /// <summary>Which native library is loaded, and what is said where none can be.</summary>
  public sealed class NativesTests {
    private const string Module = "libgradaccum_csharp.so";

    private static string Load(string runner, string folder, string libraryPath = "") {
      return Children.Start(runner, new Dictionary<string, string> {
        {"GRADACCUM_NATIVE_PATH", folder}, {"LD_LIBRARY_PATH", libraryPath}
      }, "version");
    }

    private static void Contains(string output, params string[] words) {
      foreach (string word in words) Expect.True(output.Contains(word), "\"" + word + "\" is not in: " + output);
    }

    /// <summary>A folder of its own, with the runner and the assembly if there is to be something beside it.</summary>
    private sealed class Folder : IDisposable {
      internal readonly string Path;

      internal Folder() {
        Path = System.IO.Path.Combine(System.IO.Path.GetTempPath(), "gradaccum-" + Guid.NewGuid());
        Directory.CreateDirectory(Path);
      }

      internal string Runner(string within = "") {
        string from = System.IO.Path.GetDirectoryName(Children.Variable("GA_TEST_RUNNER"));
        string to = System.IO.Path.Combine(Path, within);
        Directory.CreateDirectory(to);
        foreach (string file in Directory.GetFiles(from)) {
          File.Copy(file, System.IO.Path.Combine(to, System.IO.Path.GetFileName(file)), true);
        }
        return System.IO.Path.Combine(to, System.IO.Path.GetFileName(Children.Variable("GA_TEST_RUNNER")));
      }

      internal void Natives(string within) {
        string to = System.IO.Path.Combine(Path, within);
        Directory.CreateDirectory(to);
        foreach (string name in new[] {Module, "libgradaccum.so.0"}) {
          File.Copy(System.IO.Path.Combine(Children.Variable("GA_TEST_LIBRARIES"), name), System.IO.Path.Combine(to, name));
        }
      }

      public void Dispose() {
        Directory.Delete(Path, true);
      }
    }

    public void FolderThenBundledThenSystem() {
      using (Folder folder = new Folder()) {
        string libraries = Children.Variable("GA_TEST_LIBRARIES");
        string runner = folder.Runner();
        Contains(Load(runner, "", libraries), "loaded " + libraries + "/" + Module, "exit status 0");
        folder.Natives("");
        Contains(Load(runner, "", libraries), "loaded " + folder.Path + "/" + Module, "exit status 0");
        folder.Natives("runtimes/" + Rid + "/native");
        Contains(Load(runner, "", libraries), "loaded " + folder.Path + "/runtimes/" + Rid + "/native/" + Module);
        Contains(Load(runner, libraries), "loaded " + libraries + "/" + Module);
        // A folder without the library is passed over.
        Contains(Load(runner, folder.Path + "/none"), "loaded " + folder.Path + "/runtimes/");
      }
    }

    public void NowhereListsAllThatWasTried() {
      using (Folder folder = new Folder()) {
        Contains(Load(folder.Runner(), folder.Path + "/größe"), "Unsupported", "was not found",
                 folder.Path + "/größe/" + Module, folder.Path + "/runtimes/" + Rid + "/native/" + Module,
                 "the folders of the system", "GRADACCUM_NATIVE_PATH", "exit status 3");
      }
    }

    /// <summary>The first one found is the one: another one is not loaded in its place.</summary>
    public void WhatCannotBeLoadedIsExplained() {
      using (Folder folder = new Folder()) {
        string runner = folder.Runner();
        folder.Natives("runtimes/" + Rid + "/native");
        string broken = folder.Path + "/broken";
        Directory.CreateDirectory(broken);
        File.WriteAllText(broken + "/" + Module, "no library, but a text that is long enough to be one");
        Contains(Load(runner, broken), "not a library of this kind", broken, "exit status 3");
        byte[] elf = File.ReadAllBytes(Path.Combine(Children.Variable("GA_TEST_LIBRARIES"), Module));
        elf[18] = (byte)(elf[18] == 62 ? 183 : 62);
        File.WriteAllBytes(broken + "/" + Module, elf);
        Contains(Load(runner, broken), "another architecture", "exit status 3");
        Contains(Load(runner, Children.Variable("GA_TEST_STUBS") + "/version"), "version 9.9.9", "does not fit", "exit status 3");
        Contains(Load(runner, Children.Variable("GA_TEST_STUBS") + "/gomp"), "libgomp1", "exit status 3");
      }
    }

    public void FoldersThatAreMountedNoexec() {
      using (Folder folder = new Folder()) {
        string mounted = folder.Path + "/noexec";
        Directory.CreateDirectory(mounted);
        if (Run("mount", "-t tmpfs -o noexec,size=256m none " + mounted) != 0) {
          throw new SkipException("no file system can be mounted");
        }
        try {
          folder.Natives("noexec");
          Contains(Load(folder.Runner(), mounted), "noexec", "GRADACCUM_NATIVE_PATH", "exit status 3");
        } finally {
          Run("umount", mounted);
        }
      }
    }

    public void FoldersThatAreReadOnly() {
      using (Folder folder = new Folder()) {
        folder.Natives("natives");
        string natives = folder.Path + "/natives";
        Run("chmod", "-R a-w " + natives);
        try {
          Contains(Load(null, natives), "loaded " + natives, "exit status 0");
        } finally {
          Run("chmod", "-R u+w " + natives);
        }
      }
    }

    /// <summary>The package as it is unpacked, with nothing else at hand.</summary>
    public void ThePackage() {
      string package = Children.Variable("GA_TEST_PACKAGE");
      using (Folder folder = new Folder()) {
        Expect.Equal(0, Run(Children.Variable("GA_TEST_CMAKE"), "-E chdir " + folder.Path + " " +
                                                                     Children.Variable("GA_TEST_CMAKE") + " -E tar xf " + package));
        foreach (string file in new[] {"GradAccum.nuspec", "[Content_Types].xml", "_rels/.rels", "LICENSE", "README.md",
                                       "lib/net40/GradAccum.xml", "lib/netcoreapp3.1/GradAccum.dll"}) {
          Expect.True(File.Exists(Path.Combine(folder.Path, file)), file + " is in the package");
        }
        string framework = "lib/" + Path.GetFileName(Path.GetDirectoryName(Children.Variable("GA_TEST_RUNNER")));
        byte[] packed = File.ReadAllBytes(Path.Combine(folder.Path, framework, "GradAccum.dll"));
        string runner = folder.Runner(framework);
        Expect.Same(packed, File.ReadAllBytes(Path.Combine(folder.Path, framework, "GradAccum.dll")), "the assembly");
        Contains(Load(runner, ""), "loaded " + folder.Path + "/runtimes/" + Rid + "/native/" + Module,
                 "loaded " + folder.Path + "/runtimes/" + Rid + "/native/libgradaccum.so.0", "exit status 0");
      }
    }

    private static string Rid {
      get { return Children.Variable("GA_TEST_RID"); }
    }

    private static int Run(string command, string arguments) {
      using (Process process = Process.Start(new ProcessStartInfo {
               FileName = command, Arguments = arguments, UseShellExecute = false, RedirectStandardError = true
             })) {
        process.StandardError.ReadToEnd();
        process.WaitForExit();
        return process.ExitCode;
      }
    }
  }
}
