// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.util.concurrent.locks.ReentrantLock;

/**
 * A context of C and what belongs to it. The collector calls {@link #run} if the program has not
 * closed the {@link Context}, so nothing here leads to that object.
 */
final class Handle implements Runnable {
  /** Held by the thread that is in a call. */
  final ReentrantLock lock = new ReentrantLock();

  // Structs that calls use again and again.
  final ga_step_result result = new ga_step_result();
  final ga_micro_options micro = new ga_micro_options();

  /** The {@code ga_context}; 0 once it is destroyed. */
  long context;

  /** Whether the memory of the library is out of the reach of Java. */
  final boolean onDevice;

  private final long relay;

  /** Creates the context. relay: of the log, or 0. */
  Handle(Config config, long relay) {
    this.relay = relay;
    this.onDevice = config.device() != Device.CPU;
    try (ga_config fields = new ga_config()) {
      config.write(fields);
      if (relay != 0) {
        fields.setLog(Raw.log_function());
        fields.setLog_user(relay);
      }
      long[] out = new long[1];
      Raw.ga_context_create(fields, out);
      context = out[0];
    } catch (Throwable t) {
      free();
      throw t;
    }
  }

  @Override
  public void run() {
    if (context != 0) {
      Raw.ga_context_destroy(context);
      context = 0;
      free();
    }
  }

  private void free() {
    Raw.relay_destroy(relay);
    result.close();
    micro.close();
  }
}
