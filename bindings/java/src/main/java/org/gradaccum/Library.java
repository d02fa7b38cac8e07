// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;

/** The library as a whole. */
public final class Library {
  private Library() {}

  /**
   * Devices of one kind.
   *
   * @param count how many contexts can be made on
   * @param why if there is none, why; else ""
   */
  public record Devices(int count, String why) {}

  /**
   * The version of the library that is loaded.
   *
   * @return 10000 major + 100 minor + patch
   */
  public static int version() {
    return Raw.ga_version();
  }

  /**
   * The version of the library that this package was made for. A library fits if it has the same
   * major version, before 1.0 the same minor version too.
   *
   * @return 10000 major + 100 minor + patch
   */
  public static int expectedVersion() {
    return RawConstants.GA_VERSION;
  }

  /**
   * The build in one line: version, compiler, CPU kernels, threads, modules.
   *
   * @return the line
   */
  public static String buildInfo() {
    return Raw.ga_build_info();
  }

  /**
   * The build in parts. Loads the modules that can be loaded.
   *
   * @return the build
   */
  public static Build build() {
    try (ga_build build = new ga_build()) {
      Raw.ga_build_describe(build);
      return Build.read(build);
    }
  }

  /**
   * The devices that contexts can be made on. That there is none is an answer, not a failure.
   *
   * @param device the kind
   * @return their number, and why there is none
   */
  public static Devices devices(Device device) {
    int[] count = new int[1];
    Raw.ga_device_count(Check.notNull(device, "device").value(), count);
    return new Devices(count[0], count[0] == 0 ? Raw.ga_last_error() : "");
  }

  /**
   * The note in a file that was saved.
   *
   * @param path the file
   * @return the note; "" if there is none
   * @throws GradAccumException {@link Status#IO} or {@link Status#FORMAT}: there is no such file
   */
  public static String stateNote(Path path) {
    Check.notNull(path, "path");
    long[] size = new long[1];
    Raw.ga_state_note(path.toString(), 0, 0, size);
    if (size[0] == 0) {
      return "";
    }
    ByteBuffer note = ByteBuffer.allocateDirect(Math.toIntExact(size[0]));
    Raw.ga_state_note(path.toString(), Raw.buffer_address(note), note.capacity(), size);
    return StandardCharsets.UTF_8.decode(note.limit(note.capacity() - 1)).toString();
  }
}
