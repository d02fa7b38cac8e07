// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

/** A failure of the library. The message is the library's, with the names and values involved. */
public final class GradAccumException extends RuntimeException {
  private static final long serialVersionUID = 1;

  /** The {@code ga_status}. */
  private final int code;

  // Called by the raw layer, in the native call that has failed.
  GradAccumException(int code, byte[] message) {
    super(Raw.ga_status_name(code) + ": " + Text.decode(message));
    this.code = code;
  }

  /**
   * The status of the call that has failed.
   *
   * @return the status; {@link Status#UNKNOWN} if only a later version of this package knows it
   */
  public Status status() {
    return Status.of(code);
  }
}
