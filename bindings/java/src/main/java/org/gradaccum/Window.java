// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

/**
 * The state of a window.
 *
 * @param state empty, open, full or invalid
 * @param microBatches micro-batches in this window, the open one included
 * @param openMicro index of the open micro-batch; -1: none is open
 * @param accumSteps K of this window; 0: any number
 * @param weight sum of the weights so far
 * @param windows windows that a step has ended, since the context was created
 * @param steps applied steps, unless {@link Context#setSteps} has set it
 */
public record Window(
    State state,
    long microBatches,
    long openMicro,
    long accumSteps,
    double weight,
    long windows,
    long steps) {

  static Window read(ga_window_info from) {
    return new Window(
        State.of(from.getState()),
        from.getMicro_batches(),
        from.getOpen_micro(),
        from.getAccum_steps(),
        from.getWeight(),
        from.getWindows(),
        from.getSteps());
  }

  /** What may be called next. */
  public enum State implements Numbered {
    /** No micro-batch. */
    EMPTY(RawConstants.GA_WINDOW_EMPTY),
    /** Some micro-batches. */
    OPEN(RawConstants.GA_WINDOW_OPEN),
    /** K micro-batches: {@link Context#step} must be called next. */
    FULL(RawConstants.GA_WINDOW_FULL),
    /** Accumulating failed half-way: {@link Context#discard} must be called next. */
    INVALID(RawConstants.GA_WINDOW_INVALID);

    private final int value;

    State(int value) {
      this.value = value;
    }

    @Override
    public int value() {
      return value;
    }

    static State of(int value) {
      return Numbered.of(values(), value);
    }
  }
}
