// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

/**
 * Options of a micro-batch.
 *
 * @param lossScale what its loss was multiplied by; finite; 0: the scale of the loss scaler if
 *     there is one, else {@link Config#lossScale}
 * @param last whether this micro-batch ends the window, which then is full whatever K is
 */
public record MicroOptions(double lossScale, boolean last) {
  /** The default loss scale, and the last micro-batch of the window. */
  public static final MicroOptions LAST = new MicroOptions(0, true);

  void write(ga_micro_options to) {
    to.setLoss_scale(lossScale);
    to.setFlags(last ? RawConstants.GA_MICRO_LAST : 0);
  }
}
