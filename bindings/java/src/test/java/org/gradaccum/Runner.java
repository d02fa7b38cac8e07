// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import static org.junit.platform.engine.discovery.DiscoverySelectors.selectMethod;
import static org.junit.platform.engine.discovery.DiscoverySelectors.selectPackage;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import org.junit.platform.engine.DiscoverySelector;
import org.junit.platform.engine.TestExecutionResult;
import org.junit.platform.engine.support.descriptor.MethodSource;
import org.junit.platform.launcher.TestExecutionListener;
import org.junit.platform.launcher.TestIdentifier;
import org.junit.platform.launcher.core.LauncherDiscoveryRequestBuilder;
import org.junit.platform.launcher.core.LauncherFactory;

/**
 * Runs tests of JUnit with the arguments and the output of GoogleTest, which tests/cases reads: one
 * process runs many tests, and each of them counts.
 *
 * <p>Arguments: {@code --gtest_filter=Class.method:...}, or {@code --count=N}, which runs nothing
 * and fails unless there are N tests.
 */
final class Runner implements TestExecutionListener {
  private static final String FILTER = "--gtest_filter=";
  private static final String COUNT = "--count=";

  private int found;
  private int failed;
  private long start;

  private Runner() {}

  public static void main(String[] arguments) {
    List<DiscoverySelector> selectors = new ArrayList<>();
    long expected = -1;
    for (String argument : arguments) {
      if (argument.startsWith(FILTER)) {
        List<String> names = Arrays.asList(argument.substring(FILTER.length()).split(":"));
        for (String name : names) {
          String[] parts = name.split("\\.");
          selectors.add(selectMethod("org.gradaccum." + parts[0] + "#" + parts[1]));
        }
        expected = names.size();
      } else if (argument.startsWith(COUNT)) {
        expected = Long.parseLong(argument.substring(COUNT.length()));
        selectors.add(selectPackage("org.gradaccum"));
      }
    }
    var request = LauncherDiscoveryRequestBuilder.request().selectors(selectors).build();
    var launcher = LauncherFactory.create();
    Runner runner = new Runner();
    if (arguments[0].startsWith(COUNT)) {
      runner.found = (int) launcher.discover(request).countTestIdentifiers(TestIdentifier::isTest);
    } else {
      launcher.execute(request, runner);
    }
    if (runner.found != expected || expected == 0) {
      System.out.println(runner.found + " tests were found, expected " + expected);
      System.exit(2);
    }
    System.exit(runner.failed > 0 ? 1 : 0);
  }

  private static String name(TestIdentifier test) {
    MethodSource source = (MethodSource) test.getSource().orElseThrow();
    return source.getJavaClass().getSimpleName() + "." + source.getMethodName();
  }

  @Override
  public void executionStarted(TestIdentifier test) {
    if (test.isTest()) {
      System.out.println("[ RUN      ] " + name(test));
      start = System.nanoTime();
    }
  }

  @Override
  public void executionSkipped(TestIdentifier test, String reason) {
    if (test.isTest()) {
      ++found;
      System.out.println("[ RUN      ] " + name(test));
      System.out.println("skipped: " + reason);
      System.out.println("[  SKIPPED ] " + name(test) + " (0 ms)");
    }
  }

  @Override
  public void executionFinished(TestIdentifier test, TestExecutionResult result) {
    result.getThrowable().ifPresent(t -> print(test, t, result.getStatus()));
    if (!test.isTest()) {
      // A class whose preparation failed: its tests do not run, and are found missing.
      return;
    }
    ++found;
    String outcome = "       OK ";
    if (result.getStatus() == TestExecutionResult.Status.FAILED) {
      ++failed;
      outcome = "  FAILED  ";
    } else if (result.getStatus() == TestExecutionResult.Status.ABORTED) {
      outcome = "  SKIPPED ";
    }
    long millis = (System.nanoTime() - start) / 1_000_000;
    System.out.println("[" + outcome + "] " + name(test) + " (" + millis + " ms)");
  }

  private static void print(TestIdentifier test, Throwable t, TestExecutionResult.Status status) {
    if (status == TestExecutionResult.Status.ABORTED) {
      String reason = String.valueOf(t.getMessage()).replaceFirst("^Assumption failed: ", "");
      System.out.println("skipped: " + reason);
    } else {
      t.setStackTrace(
          Arrays.stream(t.getStackTrace())
              .filter(frame -> frame.getClassName().startsWith("org.gradaccum"))
              .toArray(StackTraceElement[]::new));
      t.printStackTrace(System.out);
    }
  }
}
