// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

/**
 * What a step did.
 *
 * @param outcome applied, or why not
 * @param windows windows, this one included
 * @param steps applied steps, this one included if applied
 * @param microBatches of this window
 * @param weight sum of their weights
 * @param norm 2-norm of the whole reduced gradient before clipping; NaN if nothing measured it, see
 *     {@link Config#measureNorm}
 * @param clipFactor the least factor of a clip by norm; else 1
 * @param lr of the first group in this step; 0 if skipped
 * @param lossScale that {@link Context#lossScale} returned in this window
 * @param skipped windows that were not applied so far
 * @param dropped micro-batches that DROP_MICRO dropped so far
 * @param windowDropped micro-batches that it dropped in this window
 * @param noiseScale with {@link Config#noiseScale}: the simple noise scale of McCandlish et al.
 *     2018; NaN before the first estimate
 * @param noiseTrace the variance of one sample's gradient
 * @param noiseSignal the square of the norm of the gradient of the whole data
 * @param droppedMicros bit i: micro-batch i of this window was dropped; i &lt; 64
 * @param eager with {@link Config#eager}: parameters that {@link Context#ready} has updated
 * @param eagerWaited those that waited for the step, because there was no memory for a second set
 *     of their arrays
 * @param eagerRedone of eager, those that the step updated once more, since it was clipped or an
 *     option has changed
 */
public record StepResult(
    Outcome outcome,
    long windows,
    long steps,
    long microBatches,
    double weight,
    double norm,
    double clipFactor,
    double lr,
    double lossScale,
    long skipped,
    long dropped,
    long windowDropped,
    double noiseScale,
    double noiseTrace,
    double noiseSignal,
    long droppedMicros,
    long eager,
    long eagerWaited,
    long eagerRedone) {

  static StepResult read(ga_step_result from) {
    return new StepResult(
        Outcome.of(from.getOutcome()),
        from.getWindows(),
        from.getSteps(),
        from.getMicro_batches(),
        from.getWeight(),
        from.getNorm(),
        from.getClip_factor(),
        from.getLr(),
        from.getLoss_scale(),
        from.getSkipped(),
        from.getDropped(),
        from.getWindow_dropped(),
        from.getNoise_scale(),
        from.getNoise_trace(),
        from.getNoise_signal(),
        from.getDropped_micros(),
        from.getEager(),
        from.getEager_waited(),
        from.getEager_redone());
  }

  /** As {@link #read}, from what {@code ga_step_result.copy} has copied. */
  static StepResult of(long[] fields) {
    return new StepResult(
        Outcome.of((int) fields[0]),
        fields[1],
        fields[2],
        fields[3],
        Double.longBitsToDouble(fields[4]),
        Double.longBitsToDouble(fields[5]),
        Double.longBitsToDouble(fields[6]),
        Double.longBitsToDouble(fields[7]),
        Double.longBitsToDouble(fields[8]),
        fields[9],
        fields[10],
        fields[11],
        Double.longBitsToDouble(fields[12]),
        Double.longBitsToDouble(fields[13]),
        Double.longBitsToDouble(fields[14]),
        fields[15],
        fields[16],
        fields[17],
        fields[18]);
  }

  /**
   * Whether the step was applied.
   *
   * @return true if parameters and state have moved
   */
  public boolean applied() {
    return outcome == Outcome.APPLIED;
  }

  /** How a window has ended. */
  public enum Outcome implements Numbered {
    /** Parameters and state have moved. */
    APPLIED(RawConstants.GA_STEP_APPLIED),
    /** No micro-batch, or the sum of the weights is 0. */
    SKIPPED_EMPTY(RawConstants.GA_STEP_SKIPPED_EMPTY),
    /** An accumulated gradient is infinite or NaN. */
    SKIPPED_NONFINITE(RawConstants.GA_STEP_SKIPPED_NONFINITE),
    /** On a device: indices of rows were out of range, or ranks did not agree. */
    SKIPPED_ERROR(RawConstants.GA_STEP_SKIPPED_ERROR),
    /** On a device: not known yet, see {@link Context#stepResult}. */
    PENDING(RawConstants.GA_STEP_PENDING),
    /** The sum of the weights is too small or too large to divide by. */
    SKIPPED_WEIGHT(RawConstants.GA_STEP_SKIPPED_WEIGHT),
    /** Another rank has discarded the window, and so has this call; it is not counted. */
    SKIPPED_DISCARD(RawConstants.GA_STEP_SKIPPED_DISCARD);

    private final int value;

    Outcome(int value) {
      this.value = value;
    }

    @Override
    public int value() {
      return value;
    }

    static Outcome of(int value) {
      return Numbered.of(values(), value);
    }
  }
}
