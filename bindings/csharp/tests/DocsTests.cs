// SPDX-License-Identifier: Apache-2.0
using System;
using System.Diagnostics;
using System.IO;
using System.Text.RegularExpressions;

namespace GradAccum.Tests {
  /// <summary>Programs of the documentation are compiled and print what the text says.</summary>
  public sealed class DocsTests {
    public void TheProgramRuns() {
      string text = File.ReadAllText(Path.Combine(Children.Variable("GA_TEST_ROOT"), "docs/csharp.md"));
      Match program = Regex.Match(text, @"```csharp\n(.*?)```", RegexOptions.Singleline);
      Match printed = Regex.Match(text, @"It prints `(.*?)`");
      Expect.True(program.Success && printed.Success, "a program and what it prints are in the text");
      Expect.Equal(printed.Groups[1].Value, Printed(program.Groups[1].Value));
    }

    public void TheFirstProgramRuns() {
      string text = File.ReadAllText(Path.Combine(Children.Variable("GA_TEST_ROOT"), "examples/first/First.cs"));
      Expect.Equal("w = 0.876761 0.913732 0.901408", Printed(text));
    }

    private static string Printed(string program) {
      string from = Path.GetDirectoryName(Children.Variable("GA_TEST_RUNNER"));
      string folder = Path.Combine(Path.GetTempPath(), "gradaccum-" + Guid.NewGuid());
      Directory.CreateDirectory(folder);
      try {
        bool core = File.Exists(Path.Combine(from, "GradAccumTests.runtimeconfig.json"));
        string name = Path.Combine(folder, core ? "program.dll" : "program.exe");
        File.Copy(Path.Combine(from, "GradAccum.dll"), Path.Combine(folder, "GradAccum.dll"));
        if (core) {
          File.Copy(Path.Combine(from, "GradAccumTests.runtimeconfig.json"), Path.Combine(folder, "program.runtimeconfig.json"));
        }
        File.WriteAllText(Path.Combine(folder, "program.cs"), program);
        string compiled = Output(Children.Variable("GA_TEST_MCS"), Children.Variable("GA_TEST_MCS_OPTIONS") +
                                 " -warnaserror -target:exe -r:" + folder + "/GradAccum.dll -out:" + name + " " + folder + "/program.cs");
        Expect.True(File.Exists(name), "the program was compiled: " + compiled);
        return Output("timeout", "-s KILL 50 " + Children.Variable("GA_TEST_HOST") + " " + name).Trim();
      } finally {
        Directory.Delete(folder, true);
      }
    }

    private static string Output(string command, string arguments) {
      using (Process process = Process.Start(new ProcessStartInfo {
               FileName = command, Arguments = arguments, UseShellExecute = false, RedirectStandardOutput = true
             })) {
        string output = process.StandardOutput.ReadToEnd();
        process.WaitForExit();
        return output;
      }
    }
  }
}
