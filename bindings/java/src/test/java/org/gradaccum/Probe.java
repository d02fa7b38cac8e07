// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.nio.file.Path;

/**
 * What LoaderTest runs in a JVM of its own: loads the library, and says what it finds. An argument
 * "matmul" multiplies matrices, "hang" waits to be killed, and a number asks for contexts.
 */
public final class Probe {
  private Probe() {}

  public static void main(String[] arguments) throws Exception {
    System.out.println("version " + Library.version());
    try (Context context = new Context()) {
      var w = Buffers.floats(1, 1);
      Param param = context.addParam(context.addGroup(Buffers.sgd(1)), "w", w, 1, 2);
      if (arguments.length > 0 && arguments[0].equals("matmul")) {
        try (MicroBatch micro = context.beginMicroBatch(1)) {
          micro.accumulateMatmul(
              param,
              1,
              Buffers.floats(2),
              1,
              Transpose.NO_TRANSPOSE,
              Buffers.floats(3, 4),
              2,
              Transpose.NO_TRANSPOSE);
          micro.end();
        }
      } else {
        context.accumulate(1, Buffers.floats(6, 8));
      }
      context.step();
      System.out.println("values " + w.get(0) + " " + w.get(1));
    }
    System.out.println("maps " + libraries());
    if (arguments.length > 0 && arguments[0].equals("hang")) {
      Thread.sleep(60_000);
    }
  }

  /** The files of the library that this process has mapped. */
  static String libraries() throws Exception {
    return java.nio.file.Files.readAllLines(Path.of("/proc/self/maps")).stream()
        .map(line -> line.replaceAll(".* (?=/)", ""))
        .filter(line -> line.contains("libgradaccum"))
        .distinct()
        .sorted()
        .toList()
        .toString();
  }
}
