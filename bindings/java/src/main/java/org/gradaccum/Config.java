// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.util.function.Consumer;

/**
 * The configuration of a context.
 *
 * @param device where the context computes; default CPU
 * @param numThreads threads of the CPU kernels, up to 4096; default 0: as many as OpenMP would use
 * @param accumSteps K, micro-batches of a full window; default 0: any number
 * @param gradientKind what gradients are; default MEAN
 * @param reduce what the optimizer sees; default MEAN
 * @param missing what happens to a parameter without a gradient; default SKIP
 * @param nonfinite what happens if a gradient is infinite or NaN; default SKIP_STEP
 * @param gradientLife how long the program leaves a gradient in place; default CONSUMED
 * @param accumulation how gradients add up; default PLAIN
 * @param lossScale what the loss was multiplied by, divided out again; finite, not 0; default 1
 * @param seed of stochastic rounding, 64 bits without a sign; default 0
 * @param noiseScale estimate the gradient noise scale; default false
 * @param measureNorm every {@link StepResult} has the norm; default false: not where only an extra
 *     pass would tell
 * @param noiseSmoothing of the noise scale over steps; [0, 1); default 0.9
 * @param deviceOrdinal which device of that kind; default 0
 * @param stream the cudaStream_t that all work is queued on, which must outlive the context,
 *     unless {@link Context#setStream} replaces it; default 0: the legacy default stream
 * @param eager {@link Context#ready} begins with the update of parameters, in place of {@link
 *     Context#step}; on the CPU; default false
 * @param eagerThreads threads of the library that make these updates while the program goes on;
 *     default 0: {@link Context#ready} makes them
 * @param eagerBytes the most bytes for the second set of arrays that these updates may take;
 *     default 0: no limit
 * @param log receives a line for each call that the context has taken up, on the thread of the
 *     call, when it ends; must not use the context; null, the default: none. What it throws comes
 *     out of the call, which has been made all the same
 * @param onParamDone receives each parameter that {@link Context#ready} has named, once in a
 *     window, when it is up to date and its gradient is not read any more; must not use the
 *     context; null, the default: none. With eagerThreads it is called on a thread of the library
 *     if the parameter is updated in place, else on the thread of the call. What it throws comes
 *     out of that call, or of the next one on the context
 */
public record Config(
    Device device,
    int numThreads,
    long accumSteps,
    GradientKind gradientKind,
    Reduce reduce,
    Missing missing,
    Nonfinite nonfinite,
    GradientLife gradientLife,
    Accumulation accumulation,
    double lossScale,
    long seed,
    boolean noiseScale,
    boolean measureNorm,
    double noiseSmoothing,
    int deviceOrdinal,
    long stream,
    boolean eager,
    int eagerThreads,
    long eagerBytes,
    Consumer<String> log,
    Consumer<Param> onParamDone) {

  /**
   * Begins with the defaults.
   *
   * @return the builder
   */
  public static Builder builder() {
    try (ga_config defaults = new ga_config()) {
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
    builder.device = device;
    builder.numThreads = numThreads;
    builder.accumSteps = accumSteps;
    builder.gradientKind = gradientKind;
    builder.reduce = reduce;
    builder.missing = missing;
    builder.nonfinite = nonfinite;
    builder.gradientLife = gradientLife;
    builder.accumulation = accumulation;
    builder.lossScale = lossScale;
    builder.seed = seed;
    builder.noiseScale = noiseScale;
    builder.measureNorm = measureNorm;
    builder.noiseSmoothing = noiseSmoothing;
    builder.deviceOrdinal = deviceOrdinal;
    builder.stream = stream;
    builder.eager = eager;
    builder.eagerThreads = eagerThreads;
    builder.eagerBytes = eagerBytes;
    builder.log = log;
    builder.onParamDone = onParamDone;
    return builder;
  }

  static Builder read(ga_config from) {
    Builder builder = new Builder();
    builder.device = Device.of(from.getDevice());
    builder.numThreads = from.getNum_threads();
    builder.accumSteps = from.getAccum_steps();
    builder.gradientKind = GradientKind.of(from.getGradient_kind());
    builder.reduce = Reduce.of(from.getReduce());
    builder.missing = Missing.of(from.getMissing());
    builder.nonfinite = Nonfinite.of(from.getNonfinite());
    builder.gradientLife = GradientLife.of(from.getGradient_life());
    builder.accumulation = Accumulation.of(from.getAccumulation());
    builder.lossScale = from.getLoss_scale();
    builder.seed = from.getSeed();
    builder.noiseScale = from.getNoise_scale() != 0;
    builder.measureNorm = from.getMeasure_norm() != 0;
    builder.noiseSmoothing = from.getNoise_smoothing();
    builder.deviceOrdinal = from.getDevice_ordinal();
    builder.stream = from.getStream();
    builder.eager = from.getEager() != 0;
    builder.eagerThreads = from.getEager_threads();
    builder.eagerBytes = from.getEager_bytes();
    builder.log = null;
    builder.onParamDone = null;
    return builder;
  }

  /** Refuses null, in a builder and where a record is used that was made without one. */
  private Config checked() {
    Check.notNull(device, "device");
    Check.notNull(gradientKind, "gradientKind");
    Check.notNull(reduce, "reduce");
    Check.notNull(missing, "missing");
    Check.notNull(nonfinite, "nonfinite");
    Check.notNull(gradientLife, "gradientLife");
    Check.notNull(accumulation, "accumulation");
    return this;
  }

  void write(ga_config to) {
    checked();
    to.setDevice(device.value());
    to.setNum_threads(numThreads);
    to.setAccum_steps(accumSteps);
    to.setGradient_kind(gradientKind.value());
    to.setReduce(reduce.value());
    to.setMissing(missing.value());
    to.setNonfinite(nonfinite.value());
    to.setGradient_life(gradientLife.value());
    to.setAccumulation(accumulation.value());
    to.setLoss_scale(lossScale);
    to.setSeed(seed);
    to.setNoise_scale(noiseScale ? 1 : 0);
    to.setMeasure_norm(measureNorm ? 1 : 0);
    to.setNoise_smoothing(noiseSmoothing);
    to.setDevice_ordinal(deviceOrdinal);
    to.setStream(stream);
    to.setEager(eager ? 1 : 0);
    to.setEager_threads(eagerThreads);
    to.setEager_bytes(eagerBytes);
    // Context sets log and on_param_done: each with a relay, which it owns.
  }

  /** Collects the values of a Config. */
  public static final class Builder {
    private Device device;
    private int numThreads;
    private long accumSteps;
    private GradientKind gradientKind;
    private Reduce reduce;
    private Missing missing;
    private Nonfinite nonfinite;
    private GradientLife gradientLife;
    private Accumulation accumulation;
    private double lossScale;
    private long seed;
    private boolean noiseScale;
    private boolean measureNorm;
    private double noiseSmoothing;
    private int deviceOrdinal;
    private long stream;
    private boolean eager;
    private int eagerThreads;
    private long eagerBytes;
    private Consumer<String> log;
    private Consumer<Param> onParamDone;

    private Builder() {}

    /**
     * Sets device.
     *
     * @param device where the context computes; default CPU
     * @return this builder
     */
    public Builder device(Device device) {
      this.device = device;
      return this;
    }

    /**
     * Sets numThreads.
     *
     * @param numThreads threads of the CPU kernels, up to 4096; default 0: as many as OpenMP would
     *     use
     * @return this builder
     */
    public Builder numThreads(int numThreads) {
      this.numThreads = numThreads;
      return this;
    }

    /**
     * Sets accumSteps.
     *
     * @param accumSteps K, micro-batches of a full window; default 0: any number
     * @return this builder
     */
    public Builder accumSteps(long accumSteps) {
      this.accumSteps = accumSteps;
      return this;
    }

    /**
     * Sets gradientKind.
     *
     * @param gradientKind what gradients are; default MEAN
     * @return this builder
     */
    public Builder gradientKind(GradientKind gradientKind) {
      this.gradientKind = gradientKind;
      return this;
    }

    /**
     * Sets reduce.
     *
     * @param reduce what the optimizer sees; default MEAN
     * @return this builder
     */
    public Builder reduce(Reduce reduce) {
      this.reduce = reduce;
      return this;
    }

    /**
     * Sets missing.
     *
     * @param missing what happens to a parameter without a gradient; default SKIP
     * @return this builder
     */
    public Builder missing(Missing missing) {
      this.missing = missing;
      return this;
    }

    /**
     * Sets nonfinite.
     *
     * @param nonfinite what happens if a gradient is infinite or NaN; default SKIP_STEP
     * @return this builder
     */
    public Builder nonfinite(Nonfinite nonfinite) {
      this.nonfinite = nonfinite;
      return this;
    }

    /**
     * Sets gradientLife.
     *
     * @param gradientLife how long the program leaves a gradient in place; default CONSUMED
     * @return this builder
     */
    public Builder gradientLife(GradientLife gradientLife) {
      this.gradientLife = gradientLife;
      return this;
    }

    /**
     * Sets accumulation.
     *
     * @param accumulation how gradients add up; default PLAIN
     * @return this builder
     */
    public Builder accumulation(Accumulation accumulation) {
      this.accumulation = accumulation;
      return this;
    }

    /**
     * Sets lossScale.
     *
     * @param lossScale what the loss was multiplied by, divided out again; finite, not 0; default 1
     * @return this builder
     */
    public Builder lossScale(double lossScale) {
      this.lossScale = lossScale;
      return this;
    }

    /**
     * Sets seed.
     *
     * @param seed of stochastic rounding, 64 bits without a sign; default 0
     * @return this builder
     */
    public Builder seed(long seed) {
      this.seed = seed;
      return this;
    }

    /**
     * Sets noiseScale.
     *
     * @param noiseScale estimate the gradient noise scale; default false
     * @return this builder
     */
    public Builder noiseScale(boolean noiseScale) {
      this.noiseScale = noiseScale;
      return this;
    }

    /**
     * Sets measureNorm.
     *
     * @param measureNorm every {@link StepResult} has the norm; default false: not where only an
     *     extra pass would tell
     * @return this builder
     */
    public Builder measureNorm(boolean measureNorm) {
      this.measureNorm = measureNorm;
      return this;
    }

    /**
     * Sets noiseSmoothing.
     *
     * @param noiseSmoothing of the noise scale over steps; [0, 1); default 0.9
     * @return this builder
     */
    public Builder noiseSmoothing(double noiseSmoothing) {
      this.noiseSmoothing = noiseSmoothing;
      return this;
    }

    /**
     * Sets deviceOrdinal.
     *
     * @param deviceOrdinal which device of that kind; default 0
     * @return this builder
     */
    public Builder deviceOrdinal(int deviceOrdinal) {
      this.deviceOrdinal = deviceOrdinal;
      return this;
    }

    /**
     * Sets stream.
     *
     * @param stream the cudaStream_t that all work is queued on, which must outlive the context,
     *     unless {@link Context#setStream} replaces it; default 0: the legacy default stream
     * @return this builder
     */
    public Builder stream(long stream) {
      this.stream = stream;
      return this;
    }

    /**
     * Sets eager.
     *
     * @param eager {@link Context#ready} begins with the update of parameters, in place of {@link
     *     Context#step}; on the CPU; default false
     * @return this builder
     */
    public Builder eager(boolean eager) {
      this.eager = eager;
      return this;
    }

    /**
     * Sets eagerThreads.
     *
     * @param eagerThreads threads of the library that make these updates while the program goes
     *     on; default 0: {@link Context#ready} makes them
     * @return this builder
     */
    public Builder eagerThreads(int eagerThreads) {
      this.eagerThreads = eagerThreads;
      return this;
    }

    /**
     * Sets eagerBytes.
     *
     * @param eagerBytes the most bytes for the second set of arrays that these updates may take;
     *     default 0: no limit
     * @return this builder
     */
    public Builder eagerBytes(long eagerBytes) {
      this.eagerBytes = eagerBytes;
      return this;
    }

    /**
     * Sets log.
     *
     * @param log receives a line for each call that the context has taken up, on the thread of the
     *     call, when it ends; must not use the context; null, the default: none. What it throws
     *     comes out of the call, which has been made all the same
     * @return this builder
     */
    public Builder log(Consumer<String> log) {
      this.log = log;
      return this;
    }

    /**
     * Sets onParamDone.
     *
     * @param onParamDone receives each parameter that {@link Context#ready} has named, once in a
     *     window, when it is up to date and its gradient is not read any more; must not use the
     *     context; null, the default: none. With eagerThreads it is called on a thread of the
     *     library if the parameter is updated in place, else on the thread of the call. What it
     *     throws comes out of that call, or of the next one on the context
     * @return this builder
     */
    public Builder onParamDone(Consumer<Param> onParamDone) {
      this.onParamDone = onParamDone;
      return this;
    }

    /**
     * Makes an immutable value of what was set.
     *
     * @return the value
     */
    public Config build() {
      return new Config(
          device,
          numThreads,
          accumSteps,
          gradientKind,
          reduce,
          missing,
          nonfinite,
          gradientLife,
          accumulation,
          lossScale,
          seed,
          noiseScale,
          measureNorm,
          noiseSmoothing,
          deviceOrdinal,
          stream,
          eager,
          eagerThreads,
          eagerBytes,
          log,
          onParamDone).checked();
    }
  }

  /** What gradients are. */
  public enum GradientKind implements Numbered {
    /** Means over their micro-batch, each then multiplied by its weight. */
    MEAN(RawConstants.GA_GRADIENT_MEAN),
    /** Sums, taken as they are. */
    SUM(RawConstants.GA_GRADIENT_SUM);

    private final int value;

    GradientKind(int value) {
      this.value = value;
    }

    @Override
    public int value() {
      return value;
    }

    static GradientKind of(int value) {
      return Numbered.of(values(), value);
    }
  }

  /** What the optimizer sees. */
  public enum Reduce implements Numbered {
    /** The sum over the window, divided by the sum of the weights. */
    MEAN(RawConstants.GA_REDUCE_MEAN),
    /** The sum over the window. */
    SUM(RawConstants.GA_REDUCE_SUM),
    /**
     * The largest number that each element has had in the window; for single parameters: {@link
     * ParamOptions#reduce}.
     */
    MAX(RawConstants.GA_REDUCE_MAX);

    private final int value;

    Reduce(int value) {
      this.value = value;
    }

    @Override
    public int value() {
      return value;
    }

    static Reduce of(int value) {
      return Numbered.of(values(), value);
    }
  }

  /** What happens to a parameter without a gradient in the window. */
  public enum Missing implements Numbered {
    /** Nothing. */
    SKIP(RawConstants.GA_MISSING_SKIP),
    /** A step with a gradient of zero, in which momentum and weight decay still move it. */
    ZERO(RawConstants.GA_MISSING_ZERO);

    private final int value;

    Missing(int value) {
      this.value = value;
    }

    @Override
    public int value() {
      return value;
    }

    static Missing of(int value) {
      return Numbered.of(values(), value);
    }
  }

  /** What happens if a gradient is infinite or NaN. */
  public enum Nonfinite implements Numbered {
    /** The step is skipped, and the window is empty. */
    SKIP_STEP(RawConstants.GA_NONFINITE_SKIP_STEP),
    /**
     * {@link Context#step} fails with {@link Status#NONFINITE}, and the window is kept until {@link
     * Context#discard}.
     */
    FAIL(RawConstants.GA_NONFINITE_FAIL),
    /**
     * A micro-batch that is not finite counts with weight 0. Gradients by part are then read when
     * the micro-batch ends; the context keeps their buffers until then.
     */
    DROP_MICRO(RawConstants.GA_NONFINITE_DROP_MICRO),
    /** Nothing is checked. */
    IGNORE(RawConstants.GA_NONFINITE_IGNORE);

    private final int value;

    Nonfinite(int value) {
      this.value = value;
    }

    @Override
    public int value() {
      return value;
    }

    static Nonfinite of(int value) {
      return Numbered.of(values(), value);
    }
  }

  /** How gradients add up in an accumulator; the last two matter for 16-bit accumulators alone. */
  public enum Accumulation implements Numbered {
    /** A + g, rounded to the accumulator's dtype. */
    PLAIN(RawConstants.GA_ACCUMULATE_PLAIN),
    /** A is the mean so far, so that no 16-bit accumulator overflows. */
    RUNNING_MEAN(RawConstants.GA_ACCUMULATE_RUNNING_MEAN),
    /** A pair: the sum and what its rounding lost. */
    COMPENSATED(RawConstants.GA_ACCUMULATE_COMPENSATED),
    /** Rounded up or down at random, the same for the same seed. */
    STOCHASTIC(RawConstants.GA_ACCUMULATE_STOCHASTIC);

    private final int value;

    Accumulation(int value) {
      this.value = value;
    }

    @Override
    public int value() {
      return value;
    }

    static Accumulation of(int value) {
      return Numbered.of(values(), value);
    }
  }

  /** How long the program leaves a gradient in place. */
  public enum GradientLife implements Numbered {
    /** The library has read it when the call returns. */
    CONSUMED(RawConstants.GA_GRADIENTS_CONSUMED),
    /**
     * The buffer of a parameter's first gradient in a window stays unchanged until the call that
     * brings the second one has returned, else until the step. The context keeps the buffer
     * reachable until then.
     */
    LIVE(RawConstants.GA_GRADIENTS_LIVE);

    private final int value;

    GradientLife(int value) {
      this.value = value;
    }

    @Override
    public int value() {
      return value;
    }

    static GradientLife of(int value) {
      return Numbered.of(values(), value);
    }
  }
}
