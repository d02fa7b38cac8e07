// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import java.util.ArrayList;
import java.util.List;
import org.junit.jupiter.api.Test;

/** The JVM unloads the natives with the class loader that has loaded them, in a JVM of its own. */
class UnloadTest {
  private static final String CLASSES = System.getProperty("gradaccum.test.classes");

  private static void reload(int rounds, String classes, String... options) throws Exception {
    List<String> command = new ArrayList<>();
    command.add(System.getProperty("java.home") + "/bin/java");
    command.addAll(List.of("-Xcheck:jni", "-Xmx256m"));
    if (Runtime.version().feature() >= 24) {
      command.add("--enable-native-access=ALL-UNNAMED");
    }
    command.addAll(List.of(options));
    command.addAll(List.of("-cp", CLASSES, "org.gradaccum.Reload"));
    command.addAll(List.of(String.valueOf(rounds), CLASSES, classes));
    ProcessBuilder builder = new ProcessBuilder(command).redirectErrorStream(true);
    builder.environment().remove("GRADACCUM_NATIVE_PATH");
    // OpenMP's threads wait in a loop, as they do for a while by default, and not in the kernel.
    builder.environment().put("OMP_WAIT_POLICY", "active");
    Process process = builder.start();
    String output = new String(process.getInputStream().readAllBytes());
    int status = process.waitFor();
    assertTrue(output.contains(rounds + " class loaders were collected"), output);
    assertFalse(output.contains("WARNING in native method"), output);
    assertEquals(0, status, output);
  }

  @Test
  void classLoadersAreCollected() throws Exception {
    reload(
        12,
        System.getProperty("gradaccum.test.plain"),
        "-Dgradaccum.native.path=" + System.getProperty("gradaccum.native.path"));
  }

  @Test
  void classLoadersOfTheJarAreCollected() throws Exception {
    String jar = System.getProperty("gradaccum.test.jar", "");
    assumeTrue(!jar.isEmpty(), "there is no jar: a sanitized library is not packed");
    reload(5, jar);
  }
}
