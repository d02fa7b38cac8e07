// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.util.function.Consumer;

/** Options of a save or a load for the time of the call, with what is called back. */
final class State implements AutoCloseable {
  /** A call with options and the relay of a transfer. */
  interface Call {
    void run(ga_state_options options, long relay);
  }

  private final ga_state_options fields = new ga_state_options();
  private final Callback progress;
  private final long relay;

  State(StateOptions options) {
    progress = options.progress() == null ? null : Callback.ofProgress(options.progress());
    relay = progress == null ? 0 : progress.relay();
    try {
      options.write(fields);
      if (relay != 0) {
        fields.setProgress(Raw.progress_function());
        fields.setProgress_user(relay);
      }
    } catch (Throwable t) {
      close();
      throw t;
    }
  }

  /** Makes the call; what the listener has thrown comes out in place of the failure it caused. */
  void call(Consumer<ga_state_options> call) {
    try {
      call.accept(fields);
    } finally {
      if (progress != null) {
        progress.rethrow();
      }
    }
  }

  void transfer(Callback.Transfer transfer, Call call) {
    Callback callback = Callback.ofTransfer(transfer);
    long transferRelay = callback.relay();
    try {
      call(options -> call.run(options, transferRelay));
    } finally {
      Raw.relay_destroy(transferRelay);
      callback.rethrow();
    }
  }

  @Override
  public void close() {
    Raw.relay_destroy(relay);
    fields.close();
  }
}
