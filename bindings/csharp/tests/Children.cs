// SPDX-License-Identifier: Apache-2.0
using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.IO;

namespace GradAccum.Tests {
  /// <summary>Parts of tests that need a process of their own.</summary>
  internal static class Children {
    internal static int Run(string[] arguments) {
      try {
        switch (arguments[1]) {
          case "version":
            Console.WriteLine("version " + Library.Version);
            foreach (string line in File.ReadAllLines("/proc/self/maps")) {
              int path = line.IndexOf('/');
              if (path >= 0 && line.Contains("libgradaccum")) Console.WriteLine("loaded " + line.Substring(path));
            }
            return 0;
          case "undisposed":
            EagerTests.EndUndisposed();
            return 0;
          case "domains":
            DomainTests.UnloadDomains(arguments[2], int.Parse(arguments[3]));
            return 0;
          default:
            Console.WriteLine("unknown child " + arguments[1]);
            return 2;
        }
      } catch (GradAccumException exception) {
        Console.WriteLine(exception.Status + " " + exception.Message);
        return 3;
      }
    }

    /// <summary>Runs a child of this runner, or of a copy of it, and returns what it has printed.</summary>
    internal static string Start(string runner, IDictionary<string, string> environment, params string[] arguments) {
      ProcessStartInfo start = new ProcessStartInfo {
        FileName = "timeout",
        Arguments = "-s KILL 50 " + Variable("GA_TEST_HOST") + " " + (runner ?? Variable("GA_TEST_RUNNER")) +
                    " --child " + string.Join(" ", arguments),
        UseShellExecute = false,
        RedirectStandardOutput = true,
      };
      foreach (KeyValuePair<string, string> variable in environment) {
        start.EnvironmentVariables[variable.Key] = variable.Value;
      }
      using (Process process = Process.Start(start)) {
        string output = process.StandardOutput.ReadToEnd();
        process.WaitForExit();
        return output + "exit status " + process.ExitCode;
      }
    }

    internal static string Variable(string name) {
      string value = Environment.GetEnvironmentVariable(name);
      if (string.IsNullOrEmpty(value)) throw new SkipException(name + " is not set");
      return value;
    }
  }
}
