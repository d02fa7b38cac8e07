// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.nio.Buffer;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.ArrayDeque;
import java.util.HashMap;
import java.util.Iterator;
import java.util.Map;

/**
 * Memory in Java's hands. Keeps the buffers of parameters reachable, and those of gradients for as
 * long as the library says that it may read them, and copies arrays into buffers of its own. It
 * belongs to the {@link Handle}, since threads of the library may use the buffers until the context
 * of C is destroyed, and nothing here leads to the {@link Context}.
 */
final class Kept {
  /** A gradient by the number that the library gives it. */
  private record Gradient(long number, Object memory, boolean isCopy) {}

  private final Map<Integer, Buffer> parameters = new HashMap<>();
  private final ArrayDeque<Gradient> gradients = new ArrayDeque<>();
  private final ArrayDeque<ByteBuffer> spare = new ArrayDeque<>();
  private final ga_kept_info info = new ga_kept_info();
  private long oldest;

  private final boolean live;
  private final boolean lent;

  /** Whether parts of the open micro-batch are read when it ends. */
  private boolean late;

  Kept(Config config) {
    live = config.gradientLife() != Config.GradientLife.CONSUMED;
    lent = config.gradientLife() == Config.GradientLife.LENT;
  }

  /** Whether the library writes to gradients. */
  boolean areLent() {
    return lent;
  }

  /** After the context was destroyed. */
  void closed() {
    parameters.clear();
    gradients.clear();
    spare.clear();
    info.close();
  }

  // ---- Keeping

  void setParameter(int id, Buffer data) {
    parameters.put(id, data);
  }

  void removeParameter(int id) {
    parameters.remove(id);
  }

  /** After a micro-batch was opened. */
  void opened(long c) {
    ask(c, 0);
    late = info.getUntil_micro_end() != 0;
  }

  /** After a gradient by part was added. */
  void added(long c, Object memory, boolean isCopy) {
    if (live || late) {
      Gradient first = gradients.peek();
      ask(c, first == null ? 0 : first.number);
      gradients.add(new Gradient(info.getLatest(), memory, isCopy));
      while (!gradients.isEmpty() && !isRead(c, gradients.peek())) {
        letGo(gradients.remove());
      }
    } else if (isCopy) {
      spare.add((ByteBuffer) memory);
    }
  }

  /** After a micro-batch was added as a whole; memory: of each gradient, or null. */
  void addedAll(long c, Object[] memory, boolean areCopies) {
    if (live) {
      ask(c, 0);
      long number = info.getLatest() - memory.length;
      for (Object gradient : memory) {
        ++number;
        if (gradient != null) {
          gradients.add(new Gradient(number, gradient, areCopies));
        }
      }
      release(c);
    } else if (areCopies) {
      for (Object copy : memory) {
        if (copy != null) {
          spare.add((ByteBuffer) copy);
        }
      }
    }
  }

  /** After a call that reads gradients, or drops them. */
  void release(long c) {
    if (!gradients.isEmpty()) {
      ask(c, gradients.peek().number);
      gradients.removeIf(gradient -> !isRead(c, gradient) && letGo(gradient));
    }
  }

  // Asks for the first of the gradients from this one on that may still be read.
  private void ask(long c, long from) {
    Raw.ga_gradients_kept(c, from, info);
    oldest = info.getOldest();
  }

  // For one gradient after the other.
  private boolean isRead(long c, Gradient gradient) {
    if (oldest < gradient.number) {
      ask(c, gradient.number);
    }
    return oldest == gradient.number;
  }

  private boolean letGo(Gradient gradient) {
    return !gradient.isCopy || spare.add((ByteBuffer) gradient.memory);
  }

  /** How many gradients are kept, for tests. */
  int count() {
    return gradients.size();
  }

  // ---- Copying

  /**
   * A copy of a gradient. Buffers come back in the order in which they were taken, so mostly the
   * first one fits. Where none does, a larger one takes the place of the first.
   */
  ByteBuffer copy(float[] gradient) {
    for (Iterator<ByteBuffer> buffers = spare.iterator(); buffers.hasNext(); ) {
      ByteBuffer buffer = buffers.next();
      if (buffer.capacity() >= 4L * gradient.length) {
        buffers.remove();
        return copy(buffer, gradient);
      }
    }
    if (gradient.length > Integer.MAX_VALUE / 4) {
      throw new IllegalArgumentException(
          "a float[] of %s elements is too long to be copied; use a Tensor of an address"
              .formatted(gradient.length));
    }
    spare.poll();
    return copy(
        ByteBuffer.allocateDirect(4 * gradient.length).order(ByteOrder.nativeOrder()), gradient);
  }

  private static ByteBuffer copy(ByteBuffer to, float[] gradient) {
    to.clear().asFloatBuffer().put(gradient);
    return to.limit(4 * gradient.length);
  }
}
