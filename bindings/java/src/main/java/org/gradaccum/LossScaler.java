// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

/**
 * A dynamic loss scale, by the rule of PyTorch's GradScaler: non-finite windows back it off,
 * applied steps in a row without one let it grow.
 *
 * @param initialScale in [minScale, maxScale]; default 65536
 * @param growthFactor &gt; 1; default 2
 * @param backoffFactor in (0, 1); default 0.5
 * @param minScale &gt; 0; default 2^-126
 * @param maxScale finite as a float; default 2^127
 * @param growthInterval &gt; 0; default 2000
 * @param hysteresis non-finite windows since the scale last grew until one backs it off; &gt; 0;
 *     default 1
 */
public record LossScaler(
    double initialScale,
    double growthFactor,
    double backoffFactor,
    double minScale,
    double maxScale,
    long growthInterval,
    int hysteresis) {

  /**
   * Begins with the defaults.
   *
   * @return the builder
   */
  public static Builder builder() {
    try (ga_loss_scaler defaults = new ga_loss_scaler()) {
      return read(defaults);
    }
  }

  /**
   * Makes a builder that begins with these values.
   *
   * @return the builder
   */
  public Builder toBuilder() {
    Builder builder = new Builder();
    builder.initialScale = initialScale;
    builder.growthFactor = growthFactor;
    builder.backoffFactor = backoffFactor;
    builder.minScale = minScale;
    builder.maxScale = maxScale;
    builder.growthInterval = growthInterval;
    builder.hysteresis = hysteresis;
    return builder;
  }

  static Builder read(ga_loss_scaler from) {
    Builder builder = new Builder();
    builder.initialScale = from.getInitial_scale();
    builder.growthFactor = from.getGrowth_factor();
    builder.backoffFactor = from.getBackoff_factor();
    builder.minScale = from.getMin_scale();
    builder.maxScale = from.getMax_scale();
    builder.growthInterval = from.getGrowth_interval();
    builder.hysteresis = from.getHysteresis();
    return builder;
  }

  void write(ga_loss_scaler to) {
    to.setInitial_scale(initialScale);
    to.setGrowth_factor(growthFactor);
    to.setBackoff_factor(backoffFactor);
    to.setMin_scale(minScale);
    to.setMax_scale(maxScale);
    to.setGrowth_interval(growthInterval);
    to.setHysteresis(hysteresis);
  }

  /** Collects the values of a LossScaler. */
  public static final class Builder {
    private double initialScale;
    private double growthFactor;
    private double backoffFactor;
    private double minScale;
    private double maxScale;
    private long growthInterval;
    private int hysteresis;

    private Builder() {}

    /**
     * Sets initialScale.
     *
     * @param initialScale in [minScale, maxScale]; default 65536
     * @return this builder
     */
    public Builder initialScale(double initialScale) {
      this.initialScale = initialScale;
      return this;
    }

    /**
     * Sets growthFactor.
     *
     * @param growthFactor &gt; 1; default 2
     * @return this builder
     */
    public Builder growthFactor(double growthFactor) {
      this.growthFactor = growthFactor;
      return this;
    }

    /**
     * Sets backoffFactor.
     *
     * @param backoffFactor in (0, 1); default 0.5
     * @return this builder
     */
    public Builder backoffFactor(double backoffFactor) {
      this.backoffFactor = backoffFactor;
      return this;
    }

    /**
     * Sets minScale.
     *
     * @param minScale &gt; 0; default 2^-126
     * @return this builder
     */
    public Builder minScale(double minScale) {
      this.minScale = minScale;
      return this;
    }

    /**
     * Sets maxScale.
     *
     * @param maxScale finite as a float; default 2^127
     * @return this builder
     */
    public Builder maxScale(double maxScale) {
      this.maxScale = maxScale;
      return this;
    }

    /**
     * Sets growthInterval.
     *
     * @param growthInterval &gt; 0; default 2000
     * @return this builder
     */
    public Builder growthInterval(long growthInterval) {
      this.growthInterval = growthInterval;
      return this;
    }

    /**
     * Sets hysteresis.
     *
     * @param hysteresis non-finite windows since the scale last grew until one backs it off; &gt;
     *     0; default 1
     * @return this builder
     */
    public Builder hysteresis(int hysteresis) {
      this.hysteresis = hysteresis;
      return this;
    }

    /**
     * Makes an immutable value of what was set.
     *
     * @return the value
     */
    public LossScaler build() {
      return new LossScaler(
          initialScale,
          growthFactor,
          backoffFactor,
          minScale,
          maxScale,
          growthInterval,
          hysteresis);
    }
  }
}
