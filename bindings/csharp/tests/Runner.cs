// SPDX-License-Identifier: Apache-2.0
using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.Reflection;

namespace GradAccum.Tests {
  /// <summary>Thrown by a test that is not possible here.</summary>
  public sealed class SkipException : Exception {
    public SkipException(string reason) : base(reason) {}
  }

  /// <summary>
  /// Runs the public methods without parameters of the classes whose names end with Tests, with the
  /// arguments and the output of GoogleTest, which tests/cases reads: one process runs many tests, and each
  /// of them counts.
  ///
  /// Arguments: --gtest_filter=Class.Method:..., or --count=N, which runs nothing and fails unless there are
  /// N tests; none: all tests. The last line is "N passed, N failed, N skipped".
  /// </summary>
  public static class Runner {
    private const string Filter = "--gtest_filter=";
    private const string Count = "--count=";

    public static int Main(string[] arguments) {
      if (arguments.Length > 0 && arguments[0] == "--child") return Children.Run(arguments);
      List<MethodInfo> tests = Tests();
      string[] wanted = null;
      foreach (string argument in arguments) {
        if (argument.StartsWith(Count)) {
          Console.WriteLine(tests.Count + " tests were found, " + argument.Substring(Count.Length) + " expected");
          return tests.Count.ToString() == argument.Substring(Count.Length) ? 0 : 1;
        }
        if (!argument.StartsWith(Filter)) {
          Console.WriteLine("unknown argument " + argument);
          return 2;
        }
        wanted = argument.Substring(Filter.Length).Split(':');
      }
      int passed = 0, failed = 0, skipped = 0;
      foreach (MethodInfo test in tests) {
        string name = test.DeclaringType.Name + "." + test.Name;
        if (wanted != null && Array.IndexOf(wanted, name) < 0) continue;
        Console.WriteLine("[ RUN      ] " + name);
        Console.Out.Flush();
        Stopwatch watch = Stopwatch.StartNew();
        Exception exception = Run(test);
        string end = " (" + watch.ElapsedMilliseconds + " ms)";
        if (exception == null) {
          ++passed;
          Console.WriteLine("[       OK ] " + name + end);
        } else if (exception is SkipException) {
          ++skipped;
          Console.WriteLine("skipped: " + exception.Message);
          Console.WriteLine("[  SKIPPED ] " + name + end);
        } else {
          ++failed;
          Console.WriteLine(exception);
          Console.WriteLine("[  FAILED  ] " + name + end);
        }
      }
      Console.WriteLine(passed + " passed, " + failed + " failed, " + skipped + " skipped");
      if (wanted != null && passed + failed + skipped < wanted.Length) {
        Console.WriteLine("some of the tests were not found");
        return 1;
      }
      return failed > 0 || passed + skipped == 0 ? 1 : 0;
    }

    private static Exception Run(MethodInfo test) {
      try {
        test.Invoke(Activator.CreateInstance(test.DeclaringType), null);
        return null;
      } catch (TargetInvocationException exception) {
        return exception.InnerException;
      }
    }

    private static List<MethodInfo> Tests() {
      List<MethodInfo> tests = new List<MethodInfo>();
      foreach (Type type in typeof(Runner).Assembly.GetTypes()) {
        if (!type.IsPublic || !type.IsClass || !type.Name.EndsWith("Tests")) continue;
        foreach (MethodInfo method in type.GetMethods(BindingFlags.Public | BindingFlags.Instance |
                                                      BindingFlags.DeclaredOnly)) {
          if (method.GetParameters().Length == 0 && !method.IsSpecialName) tests.Add(method);
        }
      }
      return tests;
    }
  }

  public static class Expect {
    public static void True(bool condition, string what) {
      if (!condition) throw new Exception(what);
    }

    public static void Equal<T>(T expected, T actual, string what = "value") {
      if (!EqualityComparer<T>.Default.Equals(expected, actual)) {
        throw new Exception(what + ": expected " + expected + ", was " + actual);
      }
    }

    public static void Near(double expected, double actual, double tolerance, string what = "value") {
      if (!(Math.Abs(expected - actual) <= tolerance)) {
        throw new Exception(what + ": expected " + expected + " within " + tolerance + ", was " + actual);
      }
    }

    public static void Same<T>(T[] expected, T[] actual, string what = "array") {
      Equal(expected.Length, actual.Length, what + ": length");
      for (int i = 0; i < expected.Length; ++i) Equal(expected[i], actual[i], what + "[" + i + "]");
    }

    /// <summary>The exception that the body throws, whose message has these words.</summary>
    public static T Throws<T>(Action body, params string[] words) where T : Exception {
      try {
        body();
      } catch (T exception) {
        foreach (string word in words) {
          True(exception.Message.Contains(word), "the message lacks \"" + word + "\": " + exception.Message);
        }
        return exception;
      }
      throw new Exception("no " + typeof(T).Name + " was thrown");
    }

    public static GradAccumException Fails(Status status, Action body, params string[] words) {
      GradAccumException exception = Throws<GradAccumException>(body, words);
      Equal(status, exception.Status, "status of: " + exception.Message);
      return exception;
    }
  }
}
