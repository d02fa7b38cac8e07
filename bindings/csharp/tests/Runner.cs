// SPDX-License-Identifier: Apache-2.0
using System;
using System.Collections.Generic;
using System.Reflection;

namespace GradAccum.Tests {
  /// <summary>Thrown by a test that is not possible here.</summary>
  public sealed class SkipException : Exception {
    public SkipException(string reason) : base(reason) {}
  }

  /// <summary>
  /// Runs the public methods without parameters of the classes whose names end with Tests: all, or those
  /// that the arguments name, as Class or Class.Method. The last line is "N passed, N failed, N skipped".
  /// </summary>
  public static class Runner {
    public static int Main(string[] arguments) {
      if (arguments.Length > 0 && arguments[0] == "--child") return Children.Run(arguments);
      int passed = 0, failed = 0, skipped = 0;
      foreach (Type type in Classes()) {
        foreach (MethodInfo method in Methods(type)) {
          string name = type.Name + "." + method.Name;
          if (arguments.Length > 0 && Array.IndexOf(arguments, type.Name) < 0 && Array.IndexOf(arguments, name) < 0) {
            continue;
          }
          Exception exception = Run(type, method);
          if (exception == null) {
            ++passed;
            Console.WriteLine("passed: " + name);
          } else if (exception is SkipException) {
            ++skipped;
            Console.WriteLine("skipped: " + name + ": " + exception.Message);
          } else {
            ++failed;
            Console.WriteLine("failed: " + name + ": " + exception);
          }
        }
      }
      if (passed + failed + skipped == 0) Console.WriteLine("no test was found");
      Console.WriteLine(passed + " passed, " + failed + " failed, " + skipped + " skipped");
      Console.Out.Flush();
      if (failed > 0 || passed + skipped == 0) return 1;
      return passed == 0 ? 77 : 0;
    }

    private static Exception Run(Type type, MethodInfo method) {
      try {
        method.Invoke(Activator.CreateInstance(type), null);
        return null;
      } catch (TargetInvocationException exception) {
        return exception.InnerException;
      }
    }

    private static List<Type> Classes() {
      List<Type> classes = new List<Type>();
      foreach (Type type in typeof(Runner).Assembly.GetTypes()) {
        if (type.IsPublic && type.IsClass && type.Name.EndsWith("Tests")) classes.Add(type);
      }
      classes.Sort((a, b) => string.CompareOrdinal(a.Name, b.Name));
      return classes;
    }

    private static List<MethodInfo> Methods(Type type) {
      List<MethodInfo> methods = new List<MethodInfo>();
      foreach (MethodInfo method in type.GetMethods(BindingFlags.Public | BindingFlags.Instance |
                                                    BindingFlags.DeclaredOnly)) {
        if (method.GetParameters().Length == 0 && !method.IsSpecialName) methods.Add(method);
      }
      return methods;
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
