// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.util.function.Consumer;
import java.util.function.IntConsumer;

/**
 * What the library calls, on the thread that has called the library, or, for parameters that are
 * done, on a thread of its own. Whatever a listener throws stays here while the frames of C are
 * left, and is thrown when the call, or the next one, has returned.
 */
final class Callback {
  /** Reads or writes bytes of a state. */
  interface Transfer {
    void transfer(long offset, ByteBuffer bytes) throws IOException;
  }

  private final Consumer<String> log;
  private final StateOptions.Progress progress;
  private final Transfer transfer;
  private final IntConsumer done;
  private volatile Thread doneOn;
  private volatile Throwable thrown;

  private Callback(
      Consumer<String> log, StateOptions.Progress progress, Transfer transfer, IntConsumer done) {
    this.log = log;
    this.progress = progress;
    this.transfer = transfer;
    this.done = done;
  }

  static Callback ofLog(Consumer<String> log) {
    return new Callback(log, null, null, null);
  }

  static Callback ofProgress(StateOptions.Progress progress) {
    return new Callback(null, progress, null, null);
  }

  static Callback ofTransfer(Transfer transfer) {
    return new Callback(null, null, transfer, null);
  }

  static Callback ofParamDone(IntConsumer done) {
    return new Callback(null, null, null, done);
  }

  /**
   * The user pointer of the C callback. It does not keep the callback of a context alive: that of a
   * log, or of parameters that are done.
   */
  long relay() {
    if (done != null) {
      return Raw.relay_create(this, "done", "(I)V", true);
    }
    if (log != null) {
      return Raw.relay_create(this, "line", "([B)V", true);
    }
    return progress != null
        ? Raw.relay_create(this, "progress", "(JJ)I", false)
        : Raw.relay_create(this, "transfer", "(JLjava/nio/ByteBuffer;)I", false);
  }

  // Called by the raw layer.
  private void line(byte[] line) {
    try {
      log.accept(Text.decode(line));
    } catch (Throwable t) {
      keep(t);
    }
  }

  // Called by the raw layer.
  private int progress(long done, long total) {
    try {
      progress.progress(done, total);
      return 0;
    } catch (Throwable t) {
      keep(t);
      return 1;
    }
  }

  // Called by the raw layer, with memory that is valid for this call.
  private int transfer(long offset, ByteBuffer bytes) {
    try {
      transfer.transfer(offset, bytes);
      return 0;
    } catch (Throwable t) {
      keep(t);
      return 1;
    }
  }

  // Called by the raw layer, on a thread of the library too.
  private void done(int param) {
    doneOn = Thread.currentThread();
    try {
      done.accept(param);
    } catch (Throwable t) {
      keep(t);
    } finally {
      doneOn = null;
    }
  }

  /** Whether this thread hears that a parameter is done. */
  boolean isDoneOnThisThread() {
    return doneOn == Thread.currentThread();
  }

  private synchronized void keep(Throwable t) {
    if (thrown == null) {
      thrown = t;
    } else if (thrown != t) {
      thrown.addSuppressed(t);
    }
  }

  /** Throws what the listener has thrown, as it is. */
  void rethrow() {
    Throwable t = thrown == null ? null : take();
    if (t != null) {
      Callback.<RuntimeException>rethrow(t);
    }
  }

  private synchronized Throwable take() {
    Throwable t = thrown;
    thrown = null;
    return t;
  }

  // Checked exceptions are those of the transfers, which the methods that make them declare.
  @SuppressWarnings("unchecked")
  private static <T extends Throwable> void rethrow(Throwable t) throws T {
    throw (T) t;
  }
}
