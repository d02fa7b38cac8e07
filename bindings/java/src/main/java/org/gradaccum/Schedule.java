// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

/**
 * The learning rate of a group as a function of applied steps. With s: steps since firstStep, W =
 * warmupSteps and T = totalSteps, all kinds but TABLE and BERT begin with a linear warm-up, lr (s +
 * 1) / W, while s &lt; W.
 *
 * @param kind the function
 * @param warmupSteps W; &gt;= 0; default 0
 * @param totalSteps T, warm-up included; LINEAR, COSINE, POLYNOMIAL: &gt; W; BERT: &gt;= max(W, 1);
 *     else not read
 * @param endFactor the learning rate ends with endFactor times its peak; &gt;= 0; default 0
 * @param power POLYNOMIAL; &gt;= 0; default 1
 * @param gamma STEP, EXPONENTIAL; &gt;= 0; default 0.1 for STEP, 1 for EXPONENTIAL
 * @param stepSize STEP; &gt; 0
 * @param table TABLE: learning rates, finite, &gt;= 0; copied
 * @param firstStep applied steps before the schedule begins; &gt;= 0; default 0
 */
public record Schedule(
    Kind kind,
    long warmupSteps,
    long totalSteps,
    double endFactor,
    double power,
    double gamma,
    long stepSize,
    double[] table,
    long firstStep) {

  /**
   * Begins with the defaults.
   *
   * @param kind the function
   * @return the builder
   */
  public static Builder builder(Kind kind) {
    try (ga_schedule defaults = new ga_schedule(Check.notNull(kind, "kind").value())) {
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
    builder.warmupSteps = warmupSteps;
    builder.totalSteps = totalSteps;
    builder.endFactor = endFactor;
    builder.power = power;
    builder.gamma = gamma;
    builder.stepSize = stepSize;
    builder.table = table;
    builder.firstStep = firstStep;
    return builder;
  }

  static Builder read(ga_schedule from) {
    Builder builder = new Builder();
    builder.kind = Kind.of(from.getKind());
    builder.warmupSteps = from.getWarmup_steps();
    builder.totalSteps = from.getTotal_steps();
    builder.endFactor = from.getEnd_factor();
    builder.power = from.getPower();
    builder.gamma = from.getGamma();
    builder.stepSize = from.getStep_size();
    builder.table = new double[0];
    builder.firstStep = from.getFirst_step();
    return builder;
  }

  /** Refuses null, in a builder and where a record is used that was made without one. */
  private Schedule checked() {
    Check.notNull(kind, "kind");
    Check.notNull(table, "table");
    return this;
  }

  void write(ga_schedule to) {
    checked();
    to.setKind(kind.value());
    to.setWarmup_steps(warmupSteps);
    to.setTotal_steps(totalSteps);
    to.setEnd_factor(endFactor);
    to.setPower(power);
    to.setGamma(gamma);
    to.setStep_size(stepSize);
    to.set_table(table);
    to.setFirst_step(firstStep);
  }

  /** Collects the values of a Schedule. */
  public static final class Builder {
    private Kind kind;
    private long warmupSteps;
    private long totalSteps;
    private double endFactor;
    private double power;
    private double gamma;
    private long stepSize;
    private double[] table;
    private long firstStep;

    private Builder() {}

    /**
     * Sets kind.
     *
     * @param kind the function
     * @return this builder
     */
    public Builder kind(Kind kind) {
      this.kind = kind;
      return this;
    }

    /**
     * Sets warmupSteps.
     *
     * @param warmupSteps W; &gt;= 0; default 0
     * @return this builder
     */
    public Builder warmupSteps(long warmupSteps) {
      this.warmupSteps = warmupSteps;
      return this;
    }

    /**
     * Sets totalSteps.
     *
     * @param totalSteps T, warm-up included; LINEAR, COSINE, POLYNOMIAL: &gt; W; BERT: &gt;= max(W,
     *     1); else not read
     * @return this builder
     */
    public Builder totalSteps(long totalSteps) {
      this.totalSteps = totalSteps;
      return this;
    }

    /**
     * Sets endFactor.
     *
     * @param endFactor the learning rate ends with endFactor times its peak; &gt;= 0; default 0
     * @return this builder
     */
    public Builder endFactor(double endFactor) {
      this.endFactor = endFactor;
      return this;
    }

    /**
     * Sets power.
     *
     * @param power POLYNOMIAL; &gt;= 0; default 1
     * @return this builder
     */
    public Builder power(double power) {
      this.power = power;
      return this;
    }

    /**
     * Sets gamma.
     *
     * @param gamma STEP, EXPONENTIAL; &gt;= 0; default 0.1 for STEP, 1 for EXPONENTIAL
     * @return this builder
     */
    public Builder gamma(double gamma) {
      this.gamma = gamma;
      return this;
    }

    /**
     * Sets stepSize.
     *
     * @param stepSize STEP; &gt; 0
     * @return this builder
     */
    public Builder stepSize(long stepSize) {
      this.stepSize = stepSize;
      return this;
    }

    /**
     * Sets table.
     *
     * @param table TABLE: learning rates, finite, &gt;= 0; copied
     * @return this builder
     */
    public Builder table(double[] table) {
      this.table = Check.notNull(table, "table").clone();
      return this;
    }

    /**
     * Sets firstStep.
     *
     * @param firstStep applied steps before the schedule begins; &gt;= 0; default 0
     * @return this builder
     */
    public Builder firstStep(long firstStep) {
      this.firstStep = firstStep;
      return this;
    }

    /**
     * Makes an immutable value of what was set.
     *
     * @return the value
     */
    public Schedule build() {
      return new Schedule(
          kind,
          warmupSteps,
          totalSteps,
          endFactor,
          power,
          gamma,
          stepSize,
          table,
          firstStep).checked();
    }
  }

  /**
   * A function of applied steps, with x = (s - W) / (T - W), clamped to [0, 1], and end = endFactor
   * lr.
   */
  public enum Kind implements Numbered {
    /** lr. */
    CONSTANT(RawConstants.GA_SCHEDULE_CONSTANT),
    /** end + (lr - end) (1 - x). */
    LINEAR(RawConstants.GA_SCHEDULE_LINEAR),
    /** end + (lr - end) (1 + cos(pi x)) / 2. */
    COSINE(RawConstants.GA_SCHEDULE_COSINE),
    /** end + (lr - end) (1 - x)^power. */
    POLYNOMIAL(RawConstants.GA_SCHEDULE_POLYNOMIAL),
    /** lr sqrt(c / (c + s - W)), c = max(W, 1). */
    INVERSE_SQRT(RawConstants.GA_SCHEDULE_INVERSE_SQRT),
    /** lr gamma^floor((s - W) / stepSize). */
    STEP(RawConstants.GA_SCHEDULE_STEP),
    /** lr gamma^(s - W). */
    EXPONENTIAL(RawConstants.GA_SCHEDULE_EXPONENTIAL),
    /** table[s]; beyond its end the last value. */
    TABLE(RawConstants.GA_SCHEDULE_TABLE),
    /** lr s / W for s &lt; W, else lr (1 - min(s, T) / T): the first is 0. */
    BERT(RawConstants.GA_SCHEDULE_BERT);

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
