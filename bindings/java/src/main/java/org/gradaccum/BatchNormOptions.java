// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

/**
 * Options of a layer of batch normalisation.
 *
 * @param mode whose mean and variance normalise; default MICRO
 * @param layout the order of dimensions; default CHANNELS_FIRST, of KERAS CHANNELS_LAST
 * @param dtype of x, y and their gradients; default F32
 * @param biased the running variance averages the biased variance, as Keras does, and not the
 *     unbiased one, as torch does
 * @param momentum running += momentum (window's - running); [0, 1]; default 0.1, of KERAS 0.01
 * @param eps &gt; 0; default 1e-5, of KERAS 1e-3
 */
public record BatchNormOptions(
    Mode mode,
    Layout layout,
    Dtype dtype,
    boolean biased,
    double momentum,
    double eps) {

  /**
   * Begins with the defaults.
   *
   * @param flavor TORCH or KERAS
   * @return the builder
   */
  public static Builder builder(Flavor flavor) {
    try (ga_bn_options defaults = new ga_bn_options(Check.notNull(flavor, "flavor").value())) {
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
    builder.mode = mode;
    builder.layout = layout;
    builder.dtype = dtype;
    builder.biased = biased;
    builder.momentum = momentum;
    builder.eps = eps;
    return builder;
  }

  static Builder read(ga_bn_options from) {
    Builder builder = new Builder();
    builder.mode = Mode.of(from.getMode());
    builder.layout = Layout.of(from.getLayout());
    builder.dtype = Dtype.of(from.getDtype());
    builder.biased = from.getBiased() != 0;
    builder.momentum = from.getMomentum();
    builder.eps = from.getEps();
    return builder;
  }

  /** Refuses null, in a builder and where a record is used that was made without one. */
  private BatchNormOptions checked() {
    Check.notNull(mode, "mode");
    Check.notNull(layout, "layout");
    Check.notNull(dtype, "dtype");
    return this;
  }

  void write(ga_bn_options to) {
    checked();
    to.setMode(mode.value());
    to.setLayout(layout.value());
    to.setDtype(dtype.value());
    to.setBiased(biased ? 1 : 0);
    to.setMomentum(momentum);
    to.setEps(eps);
  }

  /** Collects the values of a BatchNormOptions. */
  public static final class Builder {
    private Mode mode;
    private Layout layout;
    private Dtype dtype;
    private boolean biased;
    private double momentum;
    private double eps;

    private Builder() {}

    /**
     * Sets mode.
     *
     * @param mode whose mean and variance normalise; default MICRO
     * @return this builder
     */
    public Builder mode(Mode mode) {
      this.mode = mode;
      return this;
    }

    /**
     * Sets layout.
     *
     * @param layout the order of dimensions; default CHANNELS_FIRST, of KERAS CHANNELS_LAST
     * @return this builder
     */
    public Builder layout(Layout layout) {
      this.layout = layout;
      return this;
    }

    /**
     * Sets dtype.
     *
     * @param dtype of x, y and their gradients; default F32
     * @return this builder
     */
    public Builder dtype(Dtype dtype) {
      this.dtype = dtype;
      return this;
    }

    /**
     * Sets biased.
     *
     * @param biased the running variance averages the biased variance, as Keras does, and not the
     *     unbiased one, as torch does
     * @return this builder
     */
    public Builder biased(boolean biased) {
      this.biased = biased;
      return this;
    }

    /**
     * Sets momentum.
     *
     * @param momentum running += momentum (window's - running); [0, 1]; default 0.1, of KERAS 0.01
     * @return this builder
     */
    public Builder momentum(double momentum) {
      this.momentum = momentum;
      return this;
    }

    /**
     * Sets eps.
     *
     * @param eps &gt; 0; default 1e-5, of KERAS 1e-3
     * @return this builder
     */
    public Builder eps(double eps) {
      this.eps = eps;
      return this;
    }

    /**
     * Makes an immutable value of what was set.
     *
     * @return the value
     */
    public BatchNormOptions build() {
      return new BatchNormOptions(
          mode,
          layout,
          dtype,
          biased,
          momentum,
          eps).checked();
    }
  }

  /** Whose statistics a layer normalises by. docs/batch-normalization.md has the protocols. */
  public enum Mode implements Numbered {
    /** The statistics of the micro-batch, which frameworks use. */
    MICRO(RawConstants.GA_BN_MICRO),
    /** The statistics of the whole window, so that gradients are those of one batch. */
    WINDOW(RawConstants.GA_BN_WINDOW),
    /** The statistics of the window's micro-batches so far. */
    CUMULATIVE(RawConstants.GA_BN_CUMULATIVE);

    private final int value;

    Mode(int value) {
      this.value = value;
    }

    @Override
    public int value() {
      return value;
    }

    static Mode of(int value) {
      return Numbered.of(values(), value);
    }
  }

  /** The order of the dimensions of x, y and their gradients. */
  public enum Layout implements Numbered {
    /** [samples, channels, positions]. */
    CHANNELS_FIRST(RawConstants.GA_BN_CHANNELS_FIRST),
    /** [samples, positions, channels]. */
    CHANNELS_LAST(RawConstants.GA_BN_CHANNELS_LAST);

    private final int value;

    Layout(int value) {
      this.value = value;
    }

    @Override
    public int value() {
      return value;
    }

    static Layout of(int value) {
      return Numbered.of(values(), value);
    }
  }
}
