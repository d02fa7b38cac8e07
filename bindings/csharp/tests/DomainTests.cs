// SPDX-License-Identifier: Apache-2.0
using System;
using System.Collections.Generic;

namespace GradAccum.Tests {
  /// <summary>What one AppDomain leaves behind does not reach the others.</summary>
  public sealed class DomainTests {
    public void ErrorsAfterADomainHasGone() {
      Run("errors", 50);
    }

    public void ContextsThatADomainHasNotDisposed() {
      Run("contexts", 5);
    }

    private static void Run(string what, int rounds) {
      if (Type.GetType("Mono.Runtime") == null) throw new SkipException("only mono has AppDomains");
      string output = Children.Start(null, new Dictionary<string, string>(), "domains", what, rounds.ToString());
      Expect.Equal(rounds + " rounds\nexit status 0", output);
    }

#if NETCOREAPP
    internal static void UnloadDomains(string what, int rounds) {}
#else
    /// <summary>Two domains, and that of the process: one goes, and the others make errors.</summary>
    internal static void UnloadDomains(string what, int rounds) {
      User inSecond = In(Create("second")), here = new User();
      for (int round = 0; round < rounds; ++round) {
        AppDomain first = Create("first");
        User inFirst = In(first);
        inSecond.MakeErrors();
        inFirst.MakeErrors();
        if (what == "contexts") inFirst.Leave();
        AppDomain.Unload(first);
        inSecond.MakeErrors();
        here.MakeErrors();
      }
      Console.WriteLine(rounds + " rounds");
    }

    private static AppDomain Create(string name) {
      return AppDomain.CreateDomain(name, null, AppDomain.CurrentDomain.SetupInformation);
    }

    private static User In(AppDomain domain) {
      return (User)domain.CreateInstanceAndUnwrap(typeof(User).Assembly.FullName, typeof(User).FullName);
    }

    /// <summary>What a domain does with the library.</summary>
    internal sealed class User : MarshalByRefObject {
      private readonly List<Context> left = new List<Context>();

      /// <summary>Failures of calls and of a constructor.</summary>
      public void MakeErrors() {
        using (Context context = new Context()) {
          Expect.Equal(Status.InvalidArgument, Throws(() => context.SetAccumSteps(-1)).Status);
          GradAccumException failure = Throws(() => context.FindParam("nothing"));
          Expect.True(failure.Message.Contains("\"nothing\""), failure.Message);
        }
        Throws(() => new Optimizer((OptimizerKind)999));
      }

      /// <summary>
      /// Contexts that nobody has disposed: one that calls a listener when it is destroyed, and one with a thread
      /// that calls another listener.
      /// </summary>
      public void Leave() {
        left.Add(new Context(new Config {Log = line => {}}));
        left.Add(EagerTests.Trained());
      }

      private static GradAccumException Throws(Action body) {
        return Expect.Throws<GradAccumException>(body);
      }
    }
#endif
  }
}
