// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.nio.file.Path;

/** Loads the library. */
final class Natives {
  private Natives() {}

  /** Called when {@code RawJNI} is initialised, so once for a class loader. */
  static void load() {
    String folder = System.getProperty("gradaccum.native.path");
    if (folder == null) {
      System.loadLibrary("gradaccum_jni");
    } else {
      System.load(Path.of(folder, "libgradaccum_jni.so").toAbsolutePath().toString());
    }
  }
}
