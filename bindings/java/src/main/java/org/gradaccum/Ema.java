// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.util.Optional;

/**
 * An exponential moving average of the parameters.
 *
 * @param kind how the decay follows the steps; default TORCH
 * @param dtype the dtype of the average; empty: F32, or F64 for F64 parameters; or BF16, rounded
 *     stochastically
 * @param decay TORCH; [0, 1]; default 0.999
 * @param gamma KARRAS; &gt;= 0; default 6.94
 */
public record Ema(
    Kind kind,
    Optional<Dtype> dtype,
    double decay,
    double gamma) {

  /**
   * Begins with the defaults.
   *
   * @return the builder
   */
  public static Builder builder() {
    try (ga_ema defaults = new ga_ema()) {
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
    builder.kind = kind;
    builder.dtype = dtype;
    builder.decay = decay;
    builder.gamma = gamma;
    return builder;
  }

  static Builder read(ga_ema from) {
    Builder builder = new Builder();
    builder.kind = Kind.of(from.getKind());
    builder.dtype = Dtype.ofOptional(from.getDtype());
    builder.decay = from.getDecay();
    builder.gamma = from.getGamma();
    return builder;
  }

  /** Refuses null, in a builder and where a record is used that was made without one. */
  private Ema checked() {
    Check.notNull(kind, "kind");
    Check.notNull(dtype, "dtype");
    return this;
  }

  void write(ga_ema to) {
    checked();
    to.setKind(kind.value());
    to.setDtype(Dtype.value(dtype));
    to.setDecay(decay);
    to.setGamma(gamma);
  }

  /** Collects the values of an Ema. */
  public static final class Builder {
    private Kind kind;
    private Optional<Dtype> dtype;
    private double decay;
    private double gamma;

    private Builder() {}

    /**
     * Sets kind.
     *
     * @param kind how the decay follows the steps; default TORCH
     * @return this builder
     */
    public Builder kind(Kind kind) {
      this.kind = kind;
      return this;
    }

    /**
     * Sets dtype.
     *
     * @param dtype the dtype of the average; empty: F32, or F64 for F64 parameters; or BF16,
     *     rounded stochastically
     * @return this builder
     */
    public Builder dtype(Optional<Dtype> dtype) {
      this.dtype = dtype;
      return this;
    }

    /**
     * Sets decay.
     *
     * @param decay TORCH; [0, 1]; default 0.999
     * @return this builder
     */
    public Builder decay(double decay) {
      this.decay = decay;
      return this;
    }

    /**
     * Sets gamma.
     *
     * @param gamma KARRAS; &gt;= 0; default 6.94
     * @return this builder
     */
    public Builder gamma(double gamma) {
      this.gamma = gamma;
      return this;
    }

    /**
     * Makes an immutable value of what was set.
     *
     * @return the value
     */
    public Ema build() {
      return new Ema(
          kind,
          dtype,
          decay,
          gamma).checked();
    }
  }

  /** The decay d at the t-th step. */
  public enum Kind implements Numbered {
    /** d = decay. */
    TORCH(RawConstants.GA_EMA_TORCH),
    /** d = (1 - 1 / t)^(gamma + 1) (Karras et al. 2024): the window grows with t. */
    KARRAS(RawConstants.GA_EMA_KARRAS);

    private final int value;

    Kind(int value) {
      this.value = value;
    }

    @Override
    public int value() {
      return value;
    }

    static Kind of(int value) {
      return Numbered.of(values(), value);
    }
  }
}
