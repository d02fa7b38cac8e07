// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

/**
 * How gradients are clipped: first by value, then by norm.
 *
 * @param scope whose norm; default NONE
 * @param flavor the factor, for norm n and C = maxNorm. TORCH, the default: min(1, C / (n + 1e-6));
 *     KERAS, TensorFlow's: C / max(n, C)
 * @param maxNorm C &gt;= 0; must be set for GLOBAL and PER_TENSOR
 * @param maxValue clamps elements to [-maxValue, maxValue]; &gt; 0; default infinity
 * @param agcFactor AGC; &gt; 0; default 0.01
 * @param agcEps AGC; &gt; 0; default 1e-3
 * @param agcUnits AGC: which axes a unit spans; default TF
 * @param when what is clipped; default STEP
 */
public record Clip(
    Scope scope,
    Flavor flavor,
    double maxNorm,
    double maxValue,
    double agcFactor,
    double agcEps,
    AgcUnits agcUnits,
    When when) {

  /**
   * Begins with the defaults.
   *
   * @return the builder
   */
  public static Builder builder() {
    try (ga_clip defaults = new ga_clip()) {
      return read(defaults);
    }
  }

  /**
   * Begins with the defaults and a scope.
   *
   * @param scope whose norm
   * @return the builder
   */
  public static Builder builder(Scope scope) {
    return builder().scope(Check.notNull(scope, "scope"));
  }

  /**
   * Makes a builder that begins with these values.
   *
   * @return the builder
   */
  public Builder toBuilder() {
    Builder builder = new Builder();
    builder.scope = scope;
    builder.flavor = flavor;
    builder.maxNorm = maxNorm;
    builder.maxValue = maxValue;
    builder.agcFactor = agcFactor;
    builder.agcEps = agcEps;
    builder.agcUnits = agcUnits;
    builder.when = when;
    return builder;
  }

  static Builder read(ga_clip from) {
    Builder builder = new Builder();
    builder.scope = Scope.of(from.getScope());
    builder.flavor = Flavor.of(from.getFlavor());
    builder.maxNorm = from.getMax_norm();
    builder.maxValue = from.getMax_value();
    builder.agcFactor = from.getAgc_factor();
    builder.agcEps = from.getAgc_eps();
    builder.agcUnits = AgcUnits.of(from.getAgc_units());
    builder.when = When.of(from.getWhen());
    return builder;
  }

  /** Refuses null, in a builder and where a record is used that was made without one. */
  private Clip checked() {
    Check.notNull(scope, "scope");
    Check.notNull(flavor, "flavor");
    Check.notNull(agcUnits, "agcUnits");
    Check.notNull(when, "when");
    return this;
  }

  void write(ga_clip to) {
    checked();
    to.setScope(scope.value());
    to.setFlavor(flavor.value());
    to.setMax_norm(maxNorm);
    to.setMax_value(maxValue);
    to.setAgc_factor(agcFactor);
    to.setAgc_eps(agcEps);
    to.setAgc_units(agcUnits.value());
    to.setWhen(when.value());
  }

  /** Collects the values of a Clip. */
  public static final class Builder {
    private Scope scope;
    private Flavor flavor;
    private double maxNorm;
    private double maxValue;
    private double agcFactor;
    private double agcEps;
    private AgcUnits agcUnits;
    private When when;

    private Builder() {}

    /**
     * Sets scope.
     *
     * @param scope whose norm; default NONE
     * @return this builder
     */
    public Builder scope(Scope scope) {
      this.scope = scope;
      return this;
    }

    /**
     * Sets flavor.
     *
     * @param flavor the factor, for norm n and C = maxNorm. TORCH, the default: min(1, C / (n +
     *     1e-6)); KERAS, TensorFlow's: C / max(n, C)
     * @return this builder
     */
    public Builder flavor(Flavor flavor) {
      this.flavor = flavor;
      return this;
    }

    /**
     * Sets maxNorm.
     *
     * @param maxNorm C &gt;= 0; must be set for GLOBAL and PER_TENSOR
     * @return this builder
     */
    public Builder maxNorm(double maxNorm) {
      this.maxNorm = maxNorm;
      return this;
    }

    /**
     * Sets maxValue.
     *
     * @param maxValue clamps elements to [-maxValue, maxValue]; &gt; 0; default infinity
     * @return this builder
     */
    public Builder maxValue(double maxValue) {
      this.maxValue = maxValue;
      return this;
    }

    /**
     * Sets agcFactor.
     *
     * @param agcFactor AGC; &gt; 0; default 0.01
     * @return this builder
     */
    public Builder agcFactor(double agcFactor) {
      this.agcFactor = agcFactor;
      return this;
    }

    /**
     * Sets agcEps.
     *
     * @param agcEps AGC; &gt; 0; default 1e-3
     * @return this builder
     */
    public Builder agcEps(double agcEps) {
      this.agcEps = agcEps;
      return this;
    }

    /**
     * Sets agcUnits.
     *
     * @param agcUnits AGC: which axes a unit spans; default TF
     * @return this builder
     */
    public Builder agcUnits(AgcUnits agcUnits) {
      this.agcUnits = agcUnits;
      return this;
    }

    /**
     * Sets when.
     *
     * @param when what is clipped; default STEP
     * @return this builder
     */
    public Builder when(When when) {
      this.when = when;
      return this;
    }

    /**
     * Makes an immutable value of what was set.
     *
     * @return the value
     */
    public Clip build() {
      return new Clip(
          scope,
          flavor,
          maxNorm,
          maxValue,
          agcFactor,
          agcEps,
          agcUnits,
          when).checked();
    }
  }

  /** Whose norm a gradient is clipped by. */
  public enum Scope implements Numbered {
    /** None: only maxValue counts. */
    NONE(RawConstants.GA_CLIP_NONE),
    /**
     * One norm over all parameters of the groups without a clip of their own; in a clip of a group,
     * over those of the group.
     */
    GLOBAL(RawConstants.GA_CLIP_GLOBAL),
    /** Each parameter by its own norm. */
    PER_TENSOR(RawConstants.GA_CLIP_PER_TENSOR),
    /**
     * Adaptive gradient clipping (Brock et al. 2021): each unit of a parameter, a filter or a
     * neuron, by its norm against the parameter's.
     */
    AGC(RawConstants.GA_CLIP_AGC);

    private final int value;

    Scope(int value) {
      this.value = value;
    }

    @Override
    public int value() {
      return value;
    }

    static Scope of(int value) {
      return Numbered.of(values(), value);
    }
  }

  /** Which axes a unit of AGC spans; docs/reference.md has the table by rank. */
  public enum AgcUnits implements Numbered {
    /** For weights [in, out] and [height, width, in, out]. */
    TF(RawConstants.GA_AGC_TF),
    /** As the NFNets release, for the same weights. */
    NFNETS(RawConstants.GA_AGC_NFNETS),
    /** For weights [out, in] and [out, in, height, width]. */
    TORCH(RawConstants.GA_AGC_TORCH);

    private final int value;

    AgcUnits(int value) {
      this.value = value;
    }

    @Override
    public int value() {
      return value;
    }

    static AgcUnits of(int value) {
      return Numbered.of(values(), value);
    }
  }

  /** What is clipped. */
  public enum When implements Numbered {
    /** The reduced gradient, as that of the one large batch. */
    STEP(RawConstants.GA_CLIP_WHEN_STEP),
    /**
     * The gradient of every micro-batch, before it is added. Gradients by part are then read when
     * the micro-batch ends; the context keeps their buffers until then.
     */
    MICRO(RawConstants.GA_CLIP_WHEN_MICRO);

    private final int value;

    When(int value) {
      this.value = value;
    }

    @Override
    public int value() {
      return value;
    }

    static When of(int value) {
      return Numbered.of(values(), value);
    }
  }
}
