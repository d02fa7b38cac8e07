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

  final Kept kept;

  /** The {@code ga_context}; 0 once it is destroyed. */
  long context;

  /** Whether the memory of the library is out of the reach of Java. */
  final boolean onDevice;

  private final long logRelay;
  private final long doneRelay;

  /** Creates the context. Relays: of the log and of parameters that are done, or 0. */
  Handle(Config config, long logRelay, long doneRelay) {
    this.kept = new Kept(config);
    this.logRelay = logRelay;
    this.doneRelay = doneRelay;
    this.onDevice = config.device() != Device.CPU;
    try (ga_config fields = new ga_config()) {
      config.write(fields);
      if (logRelay != 0) {
        fields.setLog(Raw.log_function());
        fields.setLog_user(logRelay);
      }
      if (doneRelay != 0) {
        fields.setOn_param_done(Raw.param_done_function());
        fields.setOn_param_done_user(doneRelay);
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
    kept.closed();
    Raw.relay_destroy(logRelay);
    Raw.relay_destroy(doneRelay);
    result.close();
    micro.close();
  }
}
