// SPDX-License-Identifier: Apache-2.0
using System;

namespace GradAccum {
  /// <summary>
  /// A failure of the library. The message is the library's, with the names and values involved.
  /// </summary>
  public sealed class GradAccumException : Exception {
    private GradAccumException(Status status, string message)
        : base(Raw.ga_status_name((int)status) + ": " + message) {
      Status = status;
    }

    // For failures that are found before the library is called, or without it.
    private GradAccumException(string message, Status status) : base(message) {
      Status = status;
    }

    /// <summary>The failure of the call that this thread has just made.</summary>
    internal static GradAccumException Of(int status) {
      return new GradAccumException((Status)status, Raw.ga_last_error());
    }

    internal static GradAccumException Invalid(string message) {
      return new GradAccumException("GA_ERROR_INVALID_ARGUMENT: " + message, Status.InvalidArgument);
    }

    internal static GradAccumException State(string message) {
      return new GradAccumException("GA_ERROR_INVALID_STATE: " + message, Status.InvalidState);
    }

    internal static GradAccumException Unsupported(string message) {
      return new GradAccumException("GA_ERROR_UNSUPPORTED: " + message, Status.Unsupported);
    }

    /// <summary>The status of the call that has failed. A later library may return others.</summary>
    public Status Status { get; }
  }
}
