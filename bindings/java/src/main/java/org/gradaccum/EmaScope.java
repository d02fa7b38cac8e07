// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

/**
 * While it is open, parameters hold their moving averages, to evaluate or save them. Made by {@link
 * Context#swapEma}.
 */
public final class EmaScope implements AutoCloseable {
  private final Context context;
  private boolean open = true;

  EmaScope(Context context) {
    this.context = context;
  }

  /** Swaps back. A second call, and one after the context was closed, does nothing. */
  @Override
  public void close() {
    if (open && !context.isClosed()) {
      context.swapEma(false);
    }
    open = false;
  }
}
