// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.util.Optional;

/**
 * Options of a parameter.
 *
 * @param gradientDtype dtype of its gradients; empty: the parameter's. F64 only for F64 parameters,
 *     which take any
 * @param accumulatorDtype dtype of its accumulator; empty: F32, or F64 for F64 parameters, which
 *     have no other
 * @param master whether a 16-bit parameter has master weights; default F32
 * @param rounding how a 16-bit parameter is rounded; default NEAREST
 * @param rows whether gradients may have only some rows; default NONE
 * @param agcAxes bit d: a unit of AGC spans axis d; default 0: as {@link Clip#agcUnits} says
 * @param reduce MAX: the parameter, of an EXTERNAL group, collects maxima in place of sums; empty:
 *     {@link Config#reduce} holds for it
 * @param writeEarly with {@link Config#eager}: the parameter, which has 16 bits and master weights
 *     and is rounded to nearest, may be written from {@link Context#ready} on, so that {@link
 *     Context#step} makes no copy; default false
 * @param followData master weights follow what the program writes to the parameter, element by
 *     element, so that {@link Param#changed} is needless; not with STOCHASTIC; default false
 */
public record ParamOptions(
    Optional<Dtype> gradientDtype,
    Optional<Dtype> accumulatorDtype,
    Master master,
    Rounding rounding,
    Rows rows,
    int agcAxes,
    Optional<Config.Reduce> reduce,
    boolean writeEarly,
    boolean followData) {

  /**
   * Begins with the defaults.
   *
   * @return the builder
   */
  public static Builder builder() {
    try (ga_param_options defaults = new ga_param_options()) {
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
    builder.gradientDtype = gradientDtype;
    builder.accumulatorDtype = accumulatorDtype;
    builder.master = master;
    builder.rounding = rounding;
    builder.rows = rows;
    builder.agcAxes = agcAxes;
    builder.reduce = reduce;
    builder.writeEarly = writeEarly;
    builder.followData = followData;
    return builder;
  }

  static Builder read(ga_param_options from) {
    Builder builder = new Builder();
    builder.gradientDtype = Dtype.ofOptional(from.getGradient_dtype());
    builder.accumulatorDtype = Dtype.ofOptional(from.getAccumulator_dtype());
    builder.master = Master.of(from.getMaster());
    builder.rounding = Rounding.of(from.getRounding());
    builder.rows = Rows.of(from.getRows());
    builder.agcAxes = from.getAgc_axes();
    builder.reduce =
        from.getReduce() == 0
            ? Optional.empty()
            : Optional.of(Config.Reduce.of(from.getReduce()));
    builder.writeEarly = from.getWrite_early() != 0;
    builder.followData = from.getFollow_data() != 0;
    return builder;
  }

  /** Refuses null, in a builder and where a record is used that was made without one. */
  private ParamOptions checked() {
    Check.notNull(gradientDtype, "gradientDtype");
    Check.notNull(accumulatorDtype, "accumulatorDtype");
    Check.notNull(master, "master");
    Check.notNull(rounding, "rounding");
    Check.notNull(rows, "rows");
    Check.notNull(reduce, "reduce");
    return this;
  }

  void write(ga_param_options to) {
    checked();
    to.setGradient_dtype(Dtype.value(gradientDtype));
    to.setAccumulator_dtype(Dtype.value(accumulatorDtype));
    to.setMaster(master.value());
    to.setRounding(rounding.value());
    to.setRows(rows.value());
    to.setAgc_axes(agcAxes);
    if (reduce.isPresent() && reduce.get() != Config.Reduce.MAX) {
      throw new IllegalArgumentException(
          "reduce was " + reduce.get() + ", expected MAX, or empty for that of the context");
    }
    to.setReduce(reduce.isPresent() ? reduce.get().value() : 0);
    to.setWrite_early(writeEarly ? 1 : 0);
    to.setFollow_data(followData ? 1 : 0);
  }

  /** Collects the values of a ParamOptions. */
  public static final class Builder {
    private Optional<Dtype> gradientDtype;
    private Optional<Dtype> accumulatorDtype;
    private Master master;
    private Rounding rounding;
    private Rows rows;
    private int agcAxes;
    private Optional<Config.Reduce> reduce;
    private boolean writeEarly;
    private boolean followData;

    private Builder() {}

    /**
     * Sets gradientDtype.
     *
     * @param gradientDtype dtype of its gradients; empty: the parameter's. F64 only for F64
     *     parameters, which take any
     * @return this builder
     */
    public Builder gradientDtype(Optional<Dtype> gradientDtype) {
      this.gradientDtype = gradientDtype;
      return this;
    }

    /**
     * Sets accumulatorDtype.
     *
     * @param accumulatorDtype dtype of its accumulator; empty: F32, or F64 for F64 parameters,
     *     which have no other
     * @return this builder
     */
    public Builder accumulatorDtype(Optional<Dtype> accumulatorDtype) {
      this.accumulatorDtype = accumulatorDtype;
      return this;
    }

    /**
     * Sets master.
     *
     * @param master whether a 16-bit parameter has master weights; default F32
     * @return this builder
     */
    public Builder master(Master master) {
      this.master = master;
      return this;
    }

    /**
     * Sets rounding.
     *
     * @param rounding how a 16-bit parameter is rounded; default NEAREST
     * @return this builder
     */
    public Builder rounding(Rounding rounding) {
      this.rounding = rounding;
      return this;
    }

    /**
     * Sets rows.
     *
     * @param rows whether gradients may have only some rows; default NONE
     * @return this builder
     */
    public Builder rows(Rows rows) {
      this.rows = rows;
      return this;
    }

    /**
     * Sets agcAxes.
     *
     * @param agcAxes bit d: a unit of AGC spans axis d; default 0: as {@link Clip#agcUnits} says
     * @return this builder
     */
    public Builder agcAxes(int agcAxes) {
      this.agcAxes = agcAxes;
      return this;
    }

    /**
     * Sets reduce.
     *
     * @param reduce MAX: the parameter, of an EXTERNAL group, collects maxima in place of sums;
     *     empty: {@link Config#reduce} holds for it
     * @return this builder
     */
    public Builder reduce(Optional<Config.Reduce> reduce) {
      this.reduce = reduce;
      return this;
    }

    /**
     * Sets writeEarly.
     *
     * @param writeEarly with {@link Config#eager}: the parameter, which has 16 bits and master
     *     weights and is rounded to nearest, may be written from {@link Context#ready} on, so that
     *     {@link Context#step} makes no copy; default false
     * @return this builder
     */
    public Builder writeEarly(boolean writeEarly) {
      this.writeEarly = writeEarly;
      return this;
    }

    /**
     * Sets followData.
     *
     * @param followData master weights follow what the program writes to the parameter, element by
     *     element, so that {@link Param#changed} is needless; not with STOCHASTIC; default false
     * @return this builder
     */
    public Builder followData(boolean followData) {
      this.followData = followData;
      return this;
    }

    /**
     * Makes an immutable value of what was set.
     *
     * @return the value
     */
    public ParamOptions build() {
      return new ParamOptions(
          gradientDtype,
          accumulatorDtype,
          master,
          rounding,
          rows,
          agcAxes,
          reduce,
          writeEarly,
          followData).checked();
    }
  }

  /** Master weights of a 16-bit parameter. */
  public enum Master implements Numbered {
    /**
     * The library keeps an F32 copy that the optimizer updates and the parameter is rounded from.
     */
    F32(RawConstants.GA_MASTER_F32),
    /** The optimizer reads and rounds the parameter itself. */
    NONE(RawConstants.GA_MASTER_NONE);

    private final int value;

    Master(int value) {
      this.value = value;
    }

    @Override
    public int value() {
      return value;
    }

    static Master of(int value) {
      return Numbered.of(values(), value);
    }
  }

  /** How a 16-bit parameter is rounded. */
  public enum Rounding implements Numbered {
    /** To nearest. */
    NEAREST(RawConstants.GA_ROUND_NEAREST),
    /** Up or down at random, by {@link Config#seed}. */
    STOCHASTIC(RawConstants.GA_ROUND_STOCHASTIC);

    private final int value;

    Rounding(int value) {
      this.value = value;
    }

    @Override
    public int value() {
      return value;
    }

    static Rounding of(int value) {
      return Numbered.of(values(), value);
    }
  }

  /** What a step does to rows that {@link MicroBatch#accumulateRows} has brought nothing for. */
  public enum Rows implements Numbered {
    /** That method is not legal for the parameter. */
    NONE(RawConstants.GA_ROWS_NONE),
    /** A step with a gradient of zeros. */
    DENSE(RawConstants.GA_ROWS_DENSE),
    /**
     * The rows and their state stay as they are; for SGD, ADAM, ADAMW, ADAGRAD and ROWWISE_ADAGRAD.
     */
    LAZY(RawConstants.GA_ROWS_LAZY);

    private final int value;

    Rows(int value) {
      this.value = value;
    }

    @Override
    public int value() {
      return value;
    }

    static Rows of(int value) {
      return Numbered.of(values(), value);
    }
  }
}
