// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.nio.Buffer;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/**
 * Memory in Java's hands. Keeps the buffers of parameters reachable, and those of gradients that
 * the library reads after the call that brought them, and copies arrays into buffers of its own. It
 * belongs to the {@link Handle}, since threads of the library may use the buffers until the context
 * of C is destroyed, and nothing here leads to the {@link Context}.
 */
final class Kept {
  /** In place of a first gradient: the library has read it, and the ones after it. */
  private static final Object READ = new Object();

  private final boolean live;
  private final boolean drops;

  /** Whether parts are read when the micro-batch ends. */
  private boolean late;

  private final Map<Integer, Buffer> parameters = new HashMap<>();
  private Object[] first = {};
  private final List<Object> untilStep = new ArrayList<>();
  private final List<Object> untilEnd = new ArrayList<>();

  // Of accumulate(), for each slot: under GA_GRADIENTS_LIVE two, of which the library may have one.
  private ByteBuffer[] staging = {};
  private ByteBuffer part;

  Kept(Config config) {
    live = config.gradientLife() == Config.GradientLife.LIVE;
    drops = config.nonfinite() == Config.Nonfinite.DROP_MICRO;
    late = drops;
  }

  /** Sets whether micro-batches are clipped: their parts are then read when they end. */
  void clipsMicros(boolean clips) {
    late = drops || clips;
  }

  // ---- Keeping

  void setParameter(int id, Buffer data) {
    parameters.put(id, data);
  }

  void removeParameter(int id) {
    parameters.remove(id);
  }

  /** After the context was destroyed. */
  void closed() {
    parameters.clear();
    windowEnded();
  }

  /** After a micro-batch of all gradients was added. */
  void added(List<Slot> slots, Object[] gradients, double weight) {
    if (!live || weight == 0) {
      return;
    }
    for (int slot = 0; slot < gradients.length; ++slot) {
      if (gradients[slot] != null) {
        for (Param param : slots.get(slot).params()) {
          keepFirst(param.id(), gradients[slot], true);
        }
      }
    }
  }

  /**
   * After a part was added.
   *
   * @param counts whether the micro-batch is known to have a weight other than 0
   */
  void addedPart(Param param, Object gradient, boolean counts) {
    if (late) {
      untilEnd.add(gradient);
    }
    if (live) {
      keepFirst(param.id(), gradient, counts);
    }
  }

  /** After what belongs to one part in several buffers was added. */
  void addedAll(Object... buffers) {
    if (late) {
      untilEnd.addAll(Arrays.asList(buffers));
    }
    if (live) {
      untilStep.addAll(Arrays.asList(buffers));
    }
  }

  // The library does not read what has the weight 0 or is dropped, so the one after it may be the
  // first that it reads. What is not known is kept until the step.
  private void keepFirst(int param, Object gradient, boolean counts) {
    if (drops || !counts) {
      untilStep.add(gradient);
      return;
    }
    if (param >= first.length) {
      first = Arrays.copyOf(first, Math.max(param + 1, 2 * first.length));
    }
    first[param] = first[param] == null ? gradient : READ;
  }

  void microEnded() {
    untilEnd.clear();
  }

  void windowEnded() {
    untilEnd.clear();
    untilStep.clear();
    Arrays.fill(first, null);
  }

  /** How many buffers are kept, for tests. */
  int count() {
    int kept = untilStep.size() + untilEnd.size();
    for (Object gradient : first) {
      kept += gradient != null && gradient != READ ? 1 : 0;
    }
    return kept;
  }

  // ---- Copying

  /** A copy of the gradient of a slot, which stays as it is as long as the library reads it. */
  ByteBuffer stage(List<Slot> slots, int slot, float[] gradient) {
    if (drops && live) {
      return copy(allocate(gradient.length), gradient);
    }
    int index = live ? 2 * slot : slot;
    if (index + 1 >= staging.length) {
      staging = Arrays.copyOf(staging, 2 * (index + 2));
    }
    if (live && isFirst(slots.get(slot), staging[index])) {
      ++index;
    }
    staging[index] = fit(staging[index], gradient.length);
    return copy(staging[index], gradient);
  }

  /** A copy of a part. */
  ByteBuffer stagePart(float[] gradient) {
    if (late || live) {
      return copy(allocate(gradient.length), gradient);
    }
    part = fit(part, gradient.length);
    return copy(part, gradient);
  }

  private boolean isFirst(Slot slot, ByteBuffer staged) {
    for (Param param : slot.params()) {
      if (staged != null && param.id() < first.length && first[param.id()] == staged) {
        return true;
      }
    }
    return false;
  }

  private static ByteBuffer fit(ByteBuffer buffer, int floats) {
    return buffer != null && buffer.capacity() >= 4L * floats ? buffer : allocate(floats);
  }

  private static ByteBuffer allocate(int floats) {
    if (floats > Integer.MAX_VALUE / 4) {
      throw new IllegalArgumentException(
          "a float[] of "
              + floats
              + " elements is too long to be copied; use a Tensor of an address");
    }
    return ByteBuffer.allocateDirect(4 * floats).order(ByteOrder.nativeOrder());
  }

  private static ByteBuffer copy(ByteBuffer to, float[] gradient) {
    to.clear().asFloatBuffer().put(gradient);
    return to.limit(4 * gradient.length);
  }
}
