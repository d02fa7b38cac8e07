// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

/** How a call of the library has ended. */
public enum Status {
  /** The call has succeeded. */
  OK(RawConstants.GA_OK),
  /** A required argument was missing, an id unknown, a number illegal. */
  INVALID_ARGUMENT(RawConstants.GA_ERROR_INVALID_ARGUMENT),
  /** The call is not legal now. */
  INVALID_STATE(RawConstants.GA_ERROR_INVALID_STATE),
  /** There is not enough memory. */
  OUT_OF_MEMORY(RawConstants.GA_ERROR_OUT_OF_MEMORY),
  /** Not in this build, on this machine or with these options. */
  UNSUPPORTED(RawConstants.GA_ERROR_UNSUPPORTED),
  /** The window holds infinities or NaN, under {@link Config.Nonfinite#FAIL}. */
  NONFINITE(RawConstants.GA_ERROR_NONFINITE),
  /** A device, a library for matrix products or a load failed half-way. */
  FAULT(RawConstants.GA_ERROR_FAULT),
  /** A defect of the library: please report the message. */
  INTERNAL(RawConstants.GA_ERROR_INTERNAL),
  /** The window holds all its micro-batches: {@link Context#step} must be called next. */
  WINDOW_FULL(RawConstants.GA_ERROR_WINDOW_FULL),
  /** A file could not be read or written. */
  IO(RawConstants.GA_ERROR_IO),
  /** A file or buffer is not a state of this library, or is damaged. */
  FORMAT(RawConstants.GA_ERROR_FORMAT),
  /** Other ranks did not take part, failed, or differ from this one. */
  COMMUNICATION(RawConstants.GA_ERROR_COMMUNICATION),
  /** A callback of the program asked to stop. */
  CANCELLED(RawConstants.GA_ERROR_CANCELLED),
  /** A status that a newer library has and this package does not know: a failure. */
  UNKNOWN(-1);

  private final int value;

  Status(int value) {
    this.value = value;
  }

  int value() {
    return value;
  }

  static Status of(int value) {
    for (Status status : values()) {
      if (status.value == value) {
        return status;
      }
    }
    return UNKNOWN;
  }
}
