// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.lang.ref.Cleaner;
import java.lang.ref.Reference;
import java.util.function.LongConsumer;
import java.util.function.LongFunction;

/** A context of C, and who may be in it. The rest of {@link Context} is in its subclasses. */
abstract class ContextCalls implements AutoCloseable {
  private static final Cleaner CLEANER = Cleaner.create();

  final Handle handle;
  private final Cleaner.Cleanable cleanable;
  private final Callback log;
  private final Callback done;
  private long moves;

  ContextCalls(Config config) {
    log = config.log() == null ? null : Callback.ofLog(config.log());
    done =
        config.onParamDone() == null
            ? null
            : Callback.ofParamDone(id -> config.onParamDone().accept(param(id)));
    handle =
        new Handle(config, log == null ? 0 : log.relay(), done == null ? 0 : done.relay());
    cleanable = CLEANER.register(this, handle);
    Reference.reachabilityFence(log);
    Reference.reachabilityFence(done);
  }

  /** The parameter with this number. */
  abstract Param param(int id);

  /** Begins a call; every one ends with {@link #exit}. Returns the context of C. */
  long enter() {
    if (done != null && done.isDoneOnThisThread()) {
      throw new IllegalStateException("a callback used the context that it was called for");
    }
    if (!handle.lock.tryLock()) {
      throw new IllegalStateException(
          "the context is in use by a call of another thread; one thread at a time uses a context");
    }
    if (handle.lock.getHoldCount() > 1) {
      handle.lock.unlock();
      throw new IllegalStateException("a callback used the context whose call it was called from");
    }
    if (handle.context == 0) {
      handle.lock.unlock();
      throw new IllegalStateException("the context is closed");
    }
    return handle.context;
  }

  void exit() {
    handle.lock.unlock();
    Reference.reachabilityFence(this);
    if (log != null) {
      log.rethrow();
    }
    if (done != null) {
      done.rethrow();
    }
  }

  /** Makes a call that returns something. What it uses stays reachable until it has returned. */
  <T> T call(LongFunction<T> body, Object... used) {
    long c = enter();
    try {
      return body.apply(c);
    } finally {
      exit();
      Reference.reachabilityFence(used);
    }
  }

  /** Makes a call that returns nothing. */
  void run(LongConsumer body, Object... used) {
    call(c -> {
      body.accept(c);
      return null;
    }, used);
  }

  /**
   * Frees what the library owns for the context, and lets go of its buffers. Waits for a call of
   * another thread. A second call does nothing.
   */
  @Override
  public void close() {
    if (done != null && done.isDoneOnThisThread()) {
      throw new IllegalStateException("a callback closed the context that it was called for");
    }
    if (handle.lock.isHeldByCurrentThread()) {
      throw new IllegalStateException(
          "a callback closed the context whose call it was called from");
    }
    handle.lock.lock();
    try {
      cleanable.clean();
    } finally {
      exit();
    }
  }

  boolean isClosed() {
    handle.lock.lock();
    try {
      return handle.context == 0;
    } finally {
      handle.lock.unlock();
    }
  }

  void checkOwn(ContextObject object) {
    if (object.context != this) {
      throw new IllegalArgumentException(object + " belongs to another context");
    }
  }

  Kept kept() {
    return handle.kept;
  }

  // Views of gradients and accumulators live as long as this number stays.
  long moves() {
    return moves;
  }

  void move() {
    ++moves;
  }

  void checkMoves(long then, String what) {
    if (moves != then) {
      throw new IllegalStateException(
          "the " + what + " is no longer alive: the context has moved on since it was handed out");
    }
  }

  void checkHost(String what) {
    if (handle.onDevice) {
      throw new IllegalStateException(
          "the " + what + " is in the memory of a device, which Java cannot read; use address()");
    }
  }
}
