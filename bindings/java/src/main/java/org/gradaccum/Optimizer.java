// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.util.Optional;

/**
 * An optimizer and its hyper-parameters. The defaults are those of the framework that the flavor
 * names; the guide docs/reference.md says which fields each optimizer reads.
 *
 * @param kind the optimizer
 * @param flavor whose definition of it
 * @param lr learning rate, or its peak under a schedule; &gt;= 0
 * @param weightDecay weight decay; &gt;= 0
 * @param momentum SGD, RMSPROP, LARS, MUON; &gt;= 0
 * @param dampening SGD, LARS; [0, 1]
 * @param beta1 ADAM and its kin, LION; [0, 1)
 * @param beta2 ADAM and its kin, LION; [0, 1)
 * @param eps added to denominators; &gt;= 0
 * @param nesterov SGD, LARS (momentum &gt; 0, dampening 0), MUON: Nesterov momentum
 * @param amsgrad ADAM, ADAMW: the AMSGrad variant
 * @param maximize ascend in place of descending; undone by a negative loss scale
 * @param stateDtype the dtype of the optimizer state; empty: F32, or F64 for F64 parameters; or
 *     BF16
 * @param rho RMSPROP (torch's alpha), ADADELTA; [0, 1)
 * @param lrDecay ADAGRAD; &gt;= 0
 * @param initialAccumulator ADAGRAD, ROWWISE_ADAGRAD: initial sum of squares; &gt;= 0
 * @param momentumDecay NADAM; &gt;= 0
 * @param trustCoefficient LARS; &gt; 0
 * @param maxGradNorm LAMB; &gt;= 0; 0: no limit
 * @param eps2 ADAFACTOR; &gt;= 0
 * @param beta2Decay ADAFACTOR; &lt;= 0
 * @param clipThreshold ADAFACTOR; &gt; 0
 * @param newtonSchulz MUON: the coefficients of an iteration
 * @param nsSteps MUON: Newton-Schulz iterations; 1 to 99
 * @param adjustLr MUON: the factor of the learning rate for a matrix
 * @param centered RMSPROP: divide by the standard deviation
 * @param decoupled NADAM, RADAM, ADOPT: decoupled weight decay
 * @param alwaysAdapt LAMB, LARS: adapt also without weight decay
 * @param beta3 ADEMAMIX: of the slow moving average; [0, 1)
 * @param alpha ADEMAMIX: weight of the slow moving average; &gt;= 0
 * @param alphaWarmup ADEMAMIX: steps until alpha has grown from 0; &gt;= 0
 * @param beta3Warmup ADEMAMIX: steps until beta3 has grown from beta1; &gt;= 0
 * @param clipExponent ADOPT: step t clips to (t - 1)^clipExponent; &gt;= 0
 */
public record Optimizer(
    Kind kind,
    Flavor flavor,
    double lr,
    double weightDecay,
    double momentum,
    double dampening,
    double beta1,
    double beta2,
    double eps,
    boolean nesterov,
    boolean amsgrad,
    boolean maximize,
    Optional<Dtype> stateDtype,
    double rho,
    double lrDecay,
    double initialAccumulator,
    double momentumDecay,
    double trustCoefficient,
    double maxGradNorm,
    double eps2,
    double beta2Decay,
    double clipThreshold,
    NewtonSchulz newtonSchulz,
    int nsSteps,
    AdjustLr adjustLr,
    boolean centered,
    boolean decoupled,
    boolean alwaysAdapt,
    double beta3,
    double alpha,
    long alphaWarmup,
    long beta3Warmup,
    double clipExponent) {

  /**
   * Begins with PyTorch's defaults of an optimizer.
   *
   * @param kind the optimizer
   * @return the builder
   */
  public static Builder builder(Kind kind) {
    return builder(kind, Flavor.TORCH);
  }

  /**
   * Begins with the defaults that a framework has for an optimizer.
   *
   * @param kind the optimizer
   * @param flavor the framework
   * @return the builder
   * @throws GradAccumException {@link Status#UNSUPPORTED}: the optimizer has no such flavor
   */
  public static Builder builder(Kind kind, Flavor flavor) {
    Check.notNull(kind, "kind");
    Check.notNull(flavor, "flavor");
    try (ga_optimizer defaults = new ga_optimizer(kind.value(), flavor.value())) {
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
    builder.flavor = flavor;
    builder.lr = lr;
    builder.weightDecay = weightDecay;
    builder.momentum = momentum;
    builder.dampening = dampening;
    builder.beta1 = beta1;
    builder.beta2 = beta2;
    builder.eps = eps;
    builder.nesterov = nesterov;
    builder.amsgrad = amsgrad;
    builder.maximize = maximize;
    builder.stateDtype = stateDtype;
    builder.rho = rho;
    builder.lrDecay = lrDecay;
    builder.initialAccumulator = initialAccumulator;
    builder.momentumDecay = momentumDecay;
    builder.trustCoefficient = trustCoefficient;
    builder.maxGradNorm = maxGradNorm;
    builder.eps2 = eps2;
    builder.beta2Decay = beta2Decay;
    builder.clipThreshold = clipThreshold;
    builder.newtonSchulz = newtonSchulz;
    builder.nsSteps = nsSteps;
    builder.adjustLr = adjustLr;
    builder.centered = centered;
    builder.decoupled = decoupled;
    builder.alwaysAdapt = alwaysAdapt;
    builder.beta3 = beta3;
    builder.alpha = alpha;
    builder.alphaWarmup = alphaWarmup;
    builder.beta3Warmup = beta3Warmup;
    builder.clipExponent = clipExponent;
    return builder;
  }

  static Builder read(ga_optimizer from) {
    Builder builder = new Builder();
    builder.kind = Kind.of(from.getKind());
    builder.flavor = Flavor.of(from.getFlavor());
    builder.lr = from.getLr();
    builder.weightDecay = from.getWeight_decay();
    builder.momentum = from.getMomentum();
    builder.dampening = from.getDampening();
    builder.beta1 = from.getBeta1();
    builder.beta2 = from.getBeta2();
    builder.eps = from.getEps();
    builder.nesterov = from.getNesterov() != 0;
    builder.amsgrad = from.getAmsgrad() != 0;
    builder.maximize = from.getMaximize() != 0;
    builder.stateDtype = Dtype.ofOptional(from.getState_dtype());
    builder.rho = from.getRho();
    builder.lrDecay = from.getLr_decay();
    builder.initialAccumulator = from.getInitial_accumulator();
    builder.momentumDecay = from.getMomentum_decay();
    builder.trustCoefficient = from.getTrust_coefficient();
    builder.maxGradNorm = from.getMax_grad_norm();
    builder.eps2 = from.getEps2();
    builder.beta2Decay = from.getBeta2_decay();
    builder.clipThreshold = from.getClip_threshold();
    builder.newtonSchulz = NewtonSchulz.read(from);
    builder.nsSteps = from.getNs_steps();
    builder.adjustLr = AdjustLr.of(from.getAdjust_lr());
    builder.centered = from.getCentered() != 0;
    builder.decoupled = from.getDecoupled() != 0;
    builder.alwaysAdapt = from.getAlways_adapt() != 0;
    builder.beta3 = from.getBeta3();
    builder.alpha = from.getAlpha();
    builder.alphaWarmup = from.getAlpha_warmup();
    builder.beta3Warmup = from.getBeta3_warmup();
    builder.clipExponent = from.getClip_exponent();
    return builder;
  }

  /** Refuses null, in a builder and where a record is used that was made without one. */
  private Optimizer checked() {
    Check.notNull(kind, "kind");
    Check.notNull(flavor, "flavor");
    Check.notNull(stateDtype, "stateDtype");
    Check.notNull(newtonSchulz, "newtonSchulz");
    Check.notNull(adjustLr, "adjustLr");
    return this;
  }

  void write(ga_optimizer to) {
    checked();
    to.setKind(kind.value());
    to.setFlavor(flavor.value());
    to.setLr(lr);
    to.setWeight_decay(weightDecay);
    to.setMomentum(momentum);
    to.setDampening(dampening);
    to.setBeta1(beta1);
    to.setBeta2(beta2);
    to.setEps(eps);
    to.setNesterov(nesterov ? 1 : 0);
    to.setAmsgrad(amsgrad ? 1 : 0);
    to.setMaximize(maximize ? 1 : 0);
    to.setState_dtype(Dtype.value(stateDtype));
    to.setRho(rho);
    to.setLr_decay(lrDecay);
    to.setInitial_accumulator(initialAccumulator);
    to.setMomentum_decay(momentumDecay);
    to.setTrust_coefficient(trustCoefficient);
    to.setMax_grad_norm(maxGradNorm);
    to.setEps2(eps2);
    to.setBeta2_decay(beta2Decay);
    to.setClip_threshold(clipThreshold);
    newtonSchulz.write(to);
    to.setNs_steps(nsSteps);
    to.setAdjust_lr(adjustLr.value());
    to.setCentered(centered ? 1 : 0);
    to.setDecoupled(decoupled ? 1 : 0);
    to.setAlways_adapt(alwaysAdapt ? 1 : 0);
    to.setBeta3(beta3);
    to.setAlpha(alpha);
    to.setAlpha_warmup(alphaWarmup);
    to.setBeta3_warmup(beta3Warmup);
    to.setClip_exponent(clipExponent);
  }

  /** Collects the values of an Optimizer. */
  public static final class Builder {
    private Kind kind;
    private Flavor flavor;
    private double lr;
    private double weightDecay;
    private double momentum;
    private double dampening;
    private double beta1;
    private double beta2;
    private double eps;
    private boolean nesterov;
    private boolean amsgrad;
    private boolean maximize;
    private Optional<Dtype> stateDtype;
    private double rho;
    private double lrDecay;
    private double initialAccumulator;
    private double momentumDecay;
    private double trustCoefficient;
    private double maxGradNorm;
    private double eps2;
    private double beta2Decay;
    private double clipThreshold;
    private NewtonSchulz newtonSchulz;
    private int nsSteps;
    private AdjustLr adjustLr;
    private boolean centered;
    private boolean decoupled;
    private boolean alwaysAdapt;
    private double beta3;
    private double alpha;
    private long alphaWarmup;
    private long beta3Warmup;
    private double clipExponent;

    private Builder() {}

    /**
     * Sets kind.
     *
     * @param kind the optimizer
     * @return this builder
     */
    public Builder kind(Kind kind) {
      this.kind = kind;
      return this;
    }

    /**
     * Sets flavor.
     *
     * @param flavor whose definition of it
     * @return this builder
     */
    public Builder flavor(Flavor flavor) {
      this.flavor = flavor;
      return this;
    }

    /**
     * Sets lr.
     *
     * @param lr learning rate, or its peak under a schedule; &gt;= 0
     * @return this builder
     */
    public Builder lr(double lr) {
      this.lr = lr;
      return this;
    }

    /**
     * Sets weightDecay.
     *
     * @param weightDecay weight decay; &gt;= 0
     * @return this builder
     */
    public Builder weightDecay(double weightDecay) {
      this.weightDecay = weightDecay;
      return this;
    }

    /**
     * Sets momentum.
     *
     * @param momentum SGD, RMSPROP, LARS, MUON; &gt;= 0
     * @return this builder
     */
    public Builder momentum(double momentum) {
      this.momentum = momentum;
      return this;
    }

    /**
     * Sets dampening.
     *
     * @param dampening SGD, LARS; [0, 1]
     * @return this builder
     */
    public Builder dampening(double dampening) {
      this.dampening = dampening;
      return this;
    }

    /**
     * Sets beta1.
     *
     * @param beta1 ADAM and its kin, LION; [0, 1)
     * @return this builder
     */
    public Builder beta1(double beta1) {
      this.beta1 = beta1;
      return this;
    }

    /**
     * Sets beta2.
     *
     * @param beta2 ADAM and its kin, LION; [0, 1)
     * @return this builder
     */
    public Builder beta2(double beta2) {
      this.beta2 = beta2;
      return this;
    }

    /**
     * Sets eps.
     *
     * @param eps added to denominators; &gt;= 0
     * @return this builder
     */
    public Builder eps(double eps) {
      this.eps = eps;
      return this;
    }

    /**
     * Sets nesterov.
     *
     * @param nesterov SGD, LARS (momentum &gt; 0, dampening 0), MUON: Nesterov momentum
     * @return this builder
     */
    public Builder nesterov(boolean nesterov) {
      this.nesterov = nesterov;
      return this;
    }

    /**
     * Sets amsgrad.
     *
     * @param amsgrad ADAM, ADAMW: the AMSGrad variant
     * @return this builder
     */
    public Builder amsgrad(boolean amsgrad) {
      this.amsgrad = amsgrad;
      return this;
    }

    /**
     * Sets maximize.
     *
     * @param maximize ascend in place of descending; undone by a negative loss scale
     * @return this builder
     */
    public Builder maximize(boolean maximize) {
      this.maximize = maximize;
      return this;
    }

    /**
     * Sets stateDtype.
     *
     * @param stateDtype the dtype of the optimizer state; empty: F32, or F64 for F64 parameters; or
     *     BF16
     * @return this builder
     */
    public Builder stateDtype(Optional<Dtype> stateDtype) {
      this.stateDtype = stateDtype;
      return this;
    }

    /**
     * Sets rho.
     *
     * @param rho RMSPROP (torch's alpha), ADADELTA; [0, 1)
     * @return this builder
     */
    public Builder rho(double rho) {
      this.rho = rho;
      return this;
    }

    /**
     * Sets lrDecay.
     *
     * @param lrDecay ADAGRAD; &gt;= 0
     * @return this builder
     */
    public Builder lrDecay(double lrDecay) {
      this.lrDecay = lrDecay;
      return this;
    }

    /**
     * Sets initialAccumulator.
     *
     * @param initialAccumulator ADAGRAD, ROWWISE_ADAGRAD: initial sum of squares; &gt;= 0
     * @return this builder
     */
    public Builder initialAccumulator(double initialAccumulator) {
      this.initialAccumulator = initialAccumulator;
      return this;
    }

    /**
     * Sets momentumDecay.
     *
     * @param momentumDecay NADAM; &gt;= 0
     * @return this builder
     */
    public Builder momentumDecay(double momentumDecay) {
      this.momentumDecay = momentumDecay;
      return this;
    }

    /**
     * Sets trustCoefficient.
     *
     * @param trustCoefficient LARS; &gt; 0
     * @return this builder
     */
    public Builder trustCoefficient(double trustCoefficient) {
      this.trustCoefficient = trustCoefficient;
      return this;
    }

    /**
     * Sets maxGradNorm.
     *
     * @param maxGradNorm LAMB; &gt;= 0; 0: no limit
     * @return this builder
     */
    public Builder maxGradNorm(double maxGradNorm) {
      this.maxGradNorm = maxGradNorm;
      return this;
    }

    /**
     * Sets eps2.
     *
     * @param eps2 ADAFACTOR; &gt;= 0
     * @return this builder
     */
    public Builder eps2(double eps2) {
      this.eps2 = eps2;
      return this;
    }

    /**
     * Sets beta2Decay.
     *
     * @param beta2Decay ADAFACTOR; &lt;= 0
     * @return this builder
     */
    public Builder beta2Decay(double beta2Decay) {
      this.beta2Decay = beta2Decay;
      return this;
    }

    /**
     * Sets clipThreshold.
     *
     * @param clipThreshold ADAFACTOR; &gt; 0
     * @return this builder
     */
    public Builder clipThreshold(double clipThreshold) {
      this.clipThreshold = clipThreshold;
      return this;
    }

    /**
     * Sets newtonSchulz.
     *
     * @param newtonSchulz MUON: the coefficients of an iteration
     * @return this builder
     */
    public Builder newtonSchulz(NewtonSchulz newtonSchulz) {
      this.newtonSchulz = newtonSchulz;
      return this;
    }

    /**
     * Sets nsSteps.
     *
     * @param nsSteps MUON: Newton-Schulz iterations; 1 to 99
     * @return this builder
     */
    public Builder nsSteps(int nsSteps) {
      this.nsSteps = nsSteps;
      return this;
    }

    /**
     * Sets adjustLr.
     *
     * @param adjustLr MUON: the factor of the learning rate for a matrix
     * @return this builder
     */
    public Builder adjustLr(AdjustLr adjustLr) {
      this.adjustLr = adjustLr;
      return this;
    }

    /**
     * Sets centered.
     *
     * @param centered RMSPROP: divide by the standard deviation
     * @return this builder
     */
    public Builder centered(boolean centered) {
      this.centered = centered;
      return this;
    }

    /**
     * Sets decoupled.
     *
     * @param decoupled NADAM, RADAM, ADOPT: decoupled weight decay
     * @return this builder
     */
    public Builder decoupled(boolean decoupled) {
      this.decoupled = decoupled;
      return this;
    }

    /**
     * Sets alwaysAdapt.
     *
     * @param alwaysAdapt LAMB, LARS: adapt also without weight decay
     * @return this builder
     */
    public Builder alwaysAdapt(boolean alwaysAdapt) {
      this.alwaysAdapt = alwaysAdapt;
      return this;
    }

    /**
     * Sets beta3.
     *
     * @param beta3 ADEMAMIX: of the slow moving average; [0, 1)
     * @return this builder
     */
    public Builder beta3(double beta3) {
      this.beta3 = beta3;
      return this;
    }

    /**
     * Sets alpha.
     *
     * @param alpha ADEMAMIX: weight of the slow moving average; &gt;= 0
     * @return this builder
     */
    public Builder alpha(double alpha) {
      this.alpha = alpha;
      return this;
    }

    /**
     * Sets alphaWarmup.
     *
     * @param alphaWarmup ADEMAMIX: steps until alpha has grown from 0; &gt;= 0
     * @return this builder
     */
    public Builder alphaWarmup(long alphaWarmup) {
      this.alphaWarmup = alphaWarmup;
      return this;
    }

    /**
     * Sets beta3Warmup.
     *
     * @param beta3Warmup ADEMAMIX: steps until beta3 has grown from beta1; &gt;= 0
     * @return this builder
     */
    public Builder beta3Warmup(long beta3Warmup) {
      this.beta3Warmup = beta3Warmup;
      return this;
    }

    /**
     * Sets clipExponent.
     *
     * @param clipExponent ADOPT: step t clips to (t - 1)^clipExponent; &gt;= 0
     * @return this builder
     */
    public Builder clipExponent(double clipExponent) {
      this.clipExponent = clipExponent;
      return this;
    }

    /**
     * Makes an immutable value of what was set.
     *
     * @return the value
     */
    public Optimizer build() {
      return new Optimizer(
          kind,
          flavor,
          lr,
          weightDecay,
          momentum,
          dampening,
          beta1,
          beta2,
          eps,
          nesterov,
          amsgrad,
          maximize,
          stateDtype,
          rho,
          lrDecay,
          initialAccumulator,
          momentumDecay,
          trustCoefficient,
          maxGradNorm,
          eps2,
          beta2Decay,
          clipThreshold,
          newtonSchulz,
          nsSteps,
          adjustLr,
          centered,
          decoupled,
          alwaysAdapt,
          beta3,
          alpha,
          alphaWarmup,
          beta3Warmup,
          clipExponent).checked();
    }
  }

  /** An optimizer. docs/reference.md names the papers. */
  public enum Kind implements Numbered {
    /** Momentum, dampening, Nesterov; Sutskever et al. 2013. */
    SGD(RawConstants.GA_OPTIMIZER_SGD),
    /** Kingma &amp; Ba 2015, algorithm 1; AMSGrad: Reddi et al. 2018. */
    ADAM(RawConstants.GA_OPTIMIZER_ADAM),
    /** Loshchilov &amp; Hutter 2019, algorithm 2. */
    ADAMW(RawConstants.GA_OPTIMIZER_ADAMW),
    /** The program's own, which reads {@link Param#gradient}. */
    EXTERNAL(RawConstants.GA_OPTIMIZER_EXTERNAL),
    /** Tieleman &amp; Hinton 2012; centered: Graves 2013. */
    RMSPROP(RawConstants.GA_OPTIMIZER_RMSPROP),
    /** Duchi et al. 2011. */
    ADAGRAD(RawConstants.GA_OPTIMIZER_ADAGRAD),
    /** Zeiler 2012. */
    ADADELTA(RawConstants.GA_OPTIMIZER_ADADELTA),
    /** Kingma &amp; Ba 2015, algorithm 2. */
    ADAMAX(RawConstants.GA_OPTIMIZER_ADAMAX),
    /** Dozat 2016. */
    NADAM(RawConstants.GA_OPTIMIZER_NADAM),
    /** Liu et al. 2020. */
    RADAM(RawConstants.GA_OPTIMIZER_RADAM),
    /** Chen et al. 2023. */
    LION(RawConstants.GA_OPTIMIZER_LION),
    /** You et al. 2020, as in timm. */
    LAMB(RawConstants.GA_OPTIMIZER_LAMB),
    /** You et al. 2017, as in timm. */
    LARS(RawConstants.GA_OPTIMIZER_LARS),
    /** Shazeer &amp; Stern 2018, as torch.optim.Adafactor. */
    ADAFACTOR(RawConstants.GA_OPTIMIZER_ADAFACTOR),
    /** Jordan et al. 2024, as torch.optim.Muon; matrices only. */
    MUON(RawConstants.GA_OPTIMIZER_MUON),
    /** Taniguchi et al. 2024, algorithm 2; step 1 moves nothing. */
    ADOPT(RawConstants.GA_OPTIMIZER_ADOPT),
    /** Pagliardini et al. 2024: ADAMW and a slow moving average. */
    ADEMAMIX(RawConstants.GA_OPTIMIZER_ADEMAMIX),
    /** FBGEMM's EXACT_ROWWISE_ADAGRAD, for embeddings. */
    ROWWISE_ADAGRAD(RawConstants.GA_OPTIMIZER_ROWWISE_ADAGRAD);

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

  /** MUON's factor of the learning rate for a matrix [R, C]. */
  public enum AdjustLr implements Numbered {
    /** The root of max(1, R / C). */
    ORIGINAL(RawConstants.GA_ADJUST_ORIGINAL),
    /** 0.2 times the root of max(R, C), which makes steps as large as ADAMW's. */
    MATCH_RMS(RawConstants.GA_ADJUST_MATCH_RMS),
    /** 1. */
    NONE(RawConstants.GA_ADJUST_NONE);

    private final int value;

    AdjustLr(int value) {
      this.value = value;
    }

    @Override
    public int value() {
      return value;
    }

    static AdjustLr of(int value) {
      return Numbered.of(values(), value);
    }
  }

  /**
   * The coefficients of a Newton-Schulz iteration.
   *
   * @param a of X
   * @param b of X X^T X
   * @param c of X X^T X X^T X
   */
  public record NewtonSchulz(double a, double b, double c) {
    static NewtonSchulz read(ga_optimizer from) {
      return new NewtonSchulz(
          from.ns_coefficient(0), from.ns_coefficient(1), from.ns_coefficient(2));
    }

    void write(ga_optimizer to) {
      to.set_ns_coefficient(0, a);
      to.set_ns_coefficient(1, b);
      to.set_ns_coefficient(2, c);
    }
  }
}
