// SPDX-License-Identifier: Apache-2.0
using System;

namespace GradAccum {
  /// <summary>
  /// How a context works. A context keeps its configuration; only K and the loss scale may be set anew.
  /// </summary>
  public sealed class Config {
    internal readonly ga_config Native;

    /// <summary>The defaults of the library.</summary>
    public Config() {
      Native = Natives.First(() => new ga_config());
    }

    /// <summary>Where the context computes; default <see cref="GradAccum.Device.Cpu"/>.</summary>
    public Device Device {
      get { return (Device)Native.device; }
      set { Native.device = (int)value; }
    }

    /// <summary>Which device of that kind; default 0.</summary>
    public int DeviceOrdinal {
      get { return Native.device_ordinal; }
      set { Native.device_ordinal = value; }
    }

    /// <summary>The CUDA stream that all work is queued on, which must outlive the context, unless Context.SetStream replaces it; default 0: the legacy default stream.</summary>
    public IntPtr Stream {
      get { return Native.stream; }
      set { Native.stream = value; }
    }

    /// <summary>Threads of the CPU kernels; default 0: as many as OpenMP would use.</summary>
    public int NumThreads {
      get { return Native.num_threads; }
      set { Native.num_threads = value; }
    }

    /// <summary>K, the micro-batches of a full window; default 0: any number.</summary>
    public long AccumSteps {
      get { return Native.accum_steps; }
      set { Native.accum_steps = value; }
    }

    /// <summary>What gradients are; default <see cref="GradAccum.GradientKind.Mean"/>.</summary>
    public GradientKind GradientKind {
      get { return (GradientKind)Native.gradient_kind; }
      set { Native.gradient_kind = (int)value; }
    }

    /// <summary>What the optimizer sees; default <see cref="GradAccum.Reduce.Mean"/>.</summary>
    public Reduce Reduce {
      get { return (Reduce)Native.reduce; }
      set { Native.reduce = (int)value; }
    }

    /// <summary>What happens without a gradient; default <see cref="GradAccum.Missing.Skip"/>.</summary>
    public Missing Missing {
      get { return (Missing)Native.missing; }
      set { Native.missing = (int)value; }
    }

    /// <summary>What happens with infinities and NaN; default <see cref="GradAccum.Nonfinite.SkipStep"/>.</summary>
    public Nonfinite Nonfinite {
      get { return (Nonfinite)Native.nonfinite; }
      set { Native.nonfinite = (int)value; }
    }

    /// <summary>How long gradients stay in place; default <see cref="GradAccum.GradientLife.Consumed"/>.</summary>
    public GradientLife GradientLife {
      get { return (GradientLife)Native.gradient_life; }
      set { Native.gradient_life = (int)value; }
    }

    /// <summary>How gradients add up; default <see cref="GradAccum.Accumulation.Plain"/>.</summary>
    public Accumulation Accumulation {
      get { return (Accumulation)Native.accumulation; }
      set { Native.accumulation = (int)value; }
    }

    /// <summary>What the loss was multiplied by, which is divided out again; finite, not 0; default 1.</summary>
    public double LossScale {
      get { return Native.loss_scale; }
      set { Native.loss_scale = value; }
    }

    /// <summary>Of stochastic rounding; default 0.</summary>
    public ulong Seed {
      get { return Native.seed; }
      set { Native.seed = value; }
    }

    /// <summary>Whether the gradient noise scale is estimated; default false.</summary>
    public bool NoiseScale {
      get { return Native.noise_scale != 0; }
      set { Native.noise_scale = value ? 1 : 0; }
    }

    /// <summary>Smoothing of the noise scale over steps, in [0, 1); default 0.9.</summary>
    public double NoiseSmoothing {
      get { return Native.noise_smoothing; }
      set { Native.noise_smoothing = value; }
    }

    /// <summary>Whether every result of a step has the norm, also where only an extra pass tells it; default false.</summary>
    public bool MeasureNorm {
      get { return Native.measure_norm != 0; }
      set { Native.measure_norm = value ? 1 : 0; }
    }

    /// <summary>
    /// Whether <see cref="Context.Ready"/> begins with the update of parameters, in place of
    /// <see cref="Context.Step"/>; on the CPU; default false.
    /// </summary>
    public bool Eager {
      get { return Native.eager != 0; }
      set { Native.eager = value ? 1 : 0; }
    }

    /// <summary>
    /// Threads of the library that make these updates while the program goes on; default 0:
    /// <see cref="Context.Ready"/> makes them.
    /// </summary>
    public int EagerThreads {
      get { return Native.eager_threads; }
      set { Native.eager_threads = value; }
    }

    /// <summary>
    /// The most bytes for the second set of arrays that these updates may take; default 0: no limit.
    /// </summary>
    public long EagerBytes {
      get { return Native.eager_bytes; }
      set { Native.eager_bytes = value; }
    }

    /// <summary>
    /// Receives a line for each call, when it ends, on the thread of the call; it must not use the context.
    /// What it throws comes out of the call. Default null: none.
    /// </summary>
    public Action<string> Log { get; set; }

    /// <summary>
    /// Receives each parameter that <see cref="Context.Ready"/> has named, once in a window, when it is up to date
    /// and its gradient is not read any more; it must not use the context. With <see cref="EagerThreads"/> it is
    /// called on a thread of the library if the parameter is updated in place, else on the thread of the call. What
    /// it throws comes out of that call, or of the next one on the context. Default null: none.
    /// </summary>
    public Action<Param> OnParamDone { get; set; }
  }

  /// <summary>
  /// The optimizer of a group and its hyper-parameters.
  /// </summary>
  public sealed class Optimizer {
    internal readonly ga_optimizer Native;

    /// <summary>The defaults of a framework for an optimizer.</summary>
    /// <param name="kind">The optimizer.</param>
    /// <param name="flavor">The framework.</param>
    public Optimizer(OptimizerKind kind, Flavor flavor = Flavor.Torch) {
      Native = Natives.First(() => new ga_optimizer((int)kind, (int)flavor));
    }

    internal Optimizer(ga_optimizer native) {
      Native = native;
    }

    /// <summary>The rule.</summary>
    public OptimizerKind Kind {
      get { return (OptimizerKind)Native.kind; }
      set { Native.kind = (int)value; }
    }

    /// <summary>Whose definition of it.</summary>
    public Flavor Flavor {
      get { return (Flavor)Native.flavor; }
      set { Native.flavor = (int)value; }
    }

    /// <summary>The learning rate, or its peak under a schedule; not negative.</summary>
    public double Lr {
      get { return Native.lr; }
      set { Native.lr = value; }
    }

    /// <summary>Weight decay; not negative.</summary>
    public double WeightDecay {
      get { return Native.weight_decay; }
      set { Native.weight_decay = value; }
    }

    /// <summary>SGD, RMSProp, LARS, Muon; not negative.</summary>
    public double Momentum {
      get { return Native.momentum; }
      set { Native.momentum = value; }
    }

    /// <summary>SGD, LARS; in [0, 1].</summary>
    public double Dampening {
      get { return Native.dampening; }
      set { Native.dampening = value; }
    }

    /// <summary>Adam and its kin, Lion; in [0, 1).</summary>
    public double Beta1 {
      get { return Native.beta1; }
      set { Native.beta1 = value; }
    }

    /// <summary>Adam and its kin, Lion; in [0, 1).</summary>
    public double Beta2 {
      get { return Native.beta2; }
      set { Native.beta2 = value; }
    }

    /// <summary>Added to a denominator; not negative.</summary>
    public double Eps {
      get { return Native.eps; }
      set { Native.eps = value; }
    }

    /// <summary>SGD, LARS, Muon.</summary>
    public bool Nesterov {
      get { return Native.nesterov != 0; }
      set { Native.nesterov = value ? 1 : 0; }
    }

    /// <summary>Adam, AdamW.</summary>
    public bool Amsgrad {
      get { return Native.amsgrad != 0; }
      set { Native.amsgrad = value ? 1 : 0; }
    }

    /// <summary>Ascend in place of descend.</summary>
    public bool Maximize {
      get { return Native.maximize != 0; }
      set { Native.maximize = value ? 1 : 0; }
    }

    /// <summary>The type of the state; default: f32, or f64 for f64 parameters; or bf16.</summary>
    public DType StateDType {
      get { return (DType)Native.state_dtype; }
      set { Native.state_dtype = (int)value; }
    }

    /// <summary>RMSProp, Adadelta; in [0, 1).</summary>
    public double Rho {
      get { return Native.rho; }
      set { Native.rho = value; }
    }

    /// <summary>Adagrad; not negative.</summary>
    public double LrDecay {
      get { return Native.lr_decay; }
      set { Native.lr_decay = value; }
    }

    /// <summary>Adagrad: the initial sum of squares; not negative.</summary>
    public double InitialAccumulator {
      get { return Native.initial_accumulator; }
      set { Native.initial_accumulator = value; }
    }

    /// <summary>NAdam; not negative.</summary>
    public double MomentumDecay {
      get { return Native.momentum_decay; }
      set { Native.momentum_decay = value; }
    }

    /// <summary>LARS; positive.</summary>
    public double TrustCoefficient {
      get { return Native.trust_coefficient; }
      set { Native.trust_coefficient = value; }
    }

    /// <summary>LAMB; not negative; 0: no limit.</summary>
    public double MaxGradNorm {
      get { return Native.max_grad_norm; }
      set { Native.max_grad_norm = value; }
    }

    /// <summary>Adafactor; not negative.</summary>
    public double Eps2 {
      get { return Native.eps2; }
      set { Native.eps2 = value; }
    }

    /// <summary>Adafactor; not positive.</summary>
    public double Beta2Decay {
      get { return Native.beta2_decay; }
      set { Native.beta2_decay = value; }
    }

    /// <summary>Adafactor; positive.</summary>
    public double ClipThreshold {
      get { return Native.clip_threshold; }
      set { Native.clip_threshold = value; }
    }

    /// <summary>Muon: iterations, 1 to 99.</summary>
    public int NewtonSchulzSteps {
      get { return Native.ns_steps; }
      set { Native.ns_steps = value; }
    }

    /// <summary>Muon: how the learning rate follows the shape.</summary>
    public AdjustLr AdjustLr {
      get { return (AdjustLr)Native.adjust_lr; }
      set { Native.adjust_lr = (int)value; }
    }

    /// <summary>RMSProp: divide by the standard deviation.</summary>
    public bool Centered {
      get { return Native.centered != 0; }
      set { Native.centered = value ? 1 : 0; }
    }

    /// <summary>NAdam, RAdam, ADOPT: decoupled weight decay.</summary>
    public bool Decoupled {
      get { return Native.decoupled != 0; }
      set { Native.decoupled = value ? 1 : 0; }
    }

    /// <summary>LAMB, LARS: adapt also without weight decay.</summary>
    public bool AlwaysAdapt {
      get { return Native.always_adapt != 0; }
      set { Native.always_adapt = value ? 1 : 0; }
    }

    /// <summary>AdEMAMix: of the slow moving average; in [0, 1).</summary>
    public double Beta3 {
      get { return Native.beta3; }
      set { Native.beta3 = value; }
    }

    /// <summary>AdEMAMix: the weight of the slow moving average; not negative.</summary>
    public double Alpha {
      get { return Native.alpha; }
      set { Native.alpha = value; }
    }

    /// <summary>AdEMAMix: steps until alpha has grown from 0.</summary>
    public long AlphaWarmup {
      get { return Native.alpha_warmup; }
      set { Native.alpha_warmup = value; }
    }

    /// <summary>AdEMAMix: steps until beta3 has grown from beta1.</summary>
    public long Beta3Warmup {
      get { return Native.beta3_warmup; }
      set { Native.beta3_warmup = value; }
    }

    /// <summary>ADOPT: step t clips to (t - 1)^ClipExponent; not negative.</summary>
    public double ClipExponent {
      get { return Native.clip_exponent; }
      set { Native.clip_exponent = value; }
    }

    /// <summary>Muon: the three coefficients of a Newton-Schulz iteration.</summary>
    public double[] NewtonSchulzCoefficients {
      get { return new[] {Native.ns_coefficient(0), Native.ns_coefficient(1), Native.ns_coefficient(2)}; }
      set {
        if (value == null) throw new ArgumentNullException("value");
        if (value.Length != 3) {
          throw GradAccumException.Invalid("there were " + value.Length + " Newton-Schulz coefficients in place of 3");
        }
        for (int i = 0; i < 3; ++i) Native.set_ns_coefficient(i, value[i]);
      }
    }
  }

  /// <summary>
  /// The learning rate of a group as a function of the applied steps.
  /// </summary>
  public sealed class Schedule {
    internal readonly ga_schedule Native;

    /// <summary>The defaults of a kind of schedule.</summary>
    /// <param name="kind">The kind.</param>
    public Schedule(ScheduleKind kind) {
      Native = Natives.First(() => new ga_schedule((int)kind));
    }

    /// <summary>The formula.</summary>
    public ScheduleKind Kind {
      get { return (ScheduleKind)Native.kind; }
      set { Native.kind = (int)value; }
    }

    /// <summary>W, the steps of a linear warm-up; default 0.</summary>
    public long WarmupSteps {
      get { return Native.warmup_steps; }
      set { Native.warmup_steps = value; }
    }

    /// <summary>T, the steps of the schedule, the warm-up included.</summary>
    public long TotalSteps {
      get { return Native.total_steps; }
      set { Native.total_steps = value; }
    }

    /// <summary>The last learning rate, as a factor of the first; default 0.</summary>
    public double EndFactor {
      get { return Native.end_factor; }
      set { Native.end_factor = value; }
    }

    /// <summary>Of a polynomial; default 1.</summary>
    public double Power {
      get { return Native.power; }
      set { Native.power = value; }
    }

    /// <summary>The factor of steps and exponentials.</summary>
    public double Gamma {
      get { return Native.gamma; }
      set { Native.gamma = value; }
    }

    /// <summary>After how many steps gamma is multiplied in.</summary>
    public long StepSize {
      get { return Native.step_size; }
      set { Native.step_size = value; }
    }

    /// <summary>Applied steps before the schedule begins; default 0.</summary>
    public long FirstStep {
      get { return Native.first_step; }
      set { Native.first_step = value; }
    }

    private double[] table;

    /// <summary>The learning rates of a table; copied when it is set.</summary>
    public double[] Table {
      get { return table == null ? null : (double[])table.Clone(); }
      set {
        if (value == null) throw new ArgumentNullException("value");
        Native.set_table(value);
        table = (double[])value.Clone();
      }
    }
  }

  /// <summary>
  /// How the reduced gradient is clipped: first by value, then by norm.
  /// </summary>
  public sealed class Clip {
    internal readonly ga_clip Native;

    /// <summary>The defaults of the library.</summary>
    public Clip() {
      Native = Natives.First(() => new ga_clip());
    }

    internal Clip(ga_clip native) {
      Native = native;
    }

    /// <summary>Which gradients share a norm; default <see cref="ClipScope.None"/>.</summary>
    public ClipScope Scope {
      get { return (ClipScope)Native.scope; }
      set { Native.scope = (int)value; }
    }

    /// <summary>Whose formula; default <see cref="GradAccum.Flavor.Torch"/>.</summary>
    public Flavor Flavor {
      get { return (Flavor)Native.flavor; }
      set { Native.flavor = (int)value; }
    }

    /// <summary>The largest norm; must be set where a norm is clipped.</summary>
    public double MaxNorm {
      get { return Native.max_norm; }
      set { Native.max_norm = value; }
    }

    /// <summary>The largest absolute value of an element; default infinity.</summary>
    public double MaxValue {
      get { return Native.max_value; }
      set { Native.max_value = value; }
    }

    /// <summary>The factor of adaptive clipping; default 0.01.</summary>
    public double AgcFactor {
      get { return Native.agc_factor; }
      set { Native.agc_factor = value; }
    }

    /// <summary>The least norm of a parameter in adaptive clipping; default 1e-3.</summary>
    public double AgcEps {
      get { return Native.agc_eps; }
      set { Native.agc_eps = value; }
    }

    /// <summary>The units of adaptive clipping; default <see cref="GradAccum.AgcUnits.Tf"/>.</summary>
    public AgcUnits AgcUnits {
      get { return (AgcUnits)Native.agc_units; }
      set { Native.agc_units = (int)value; }
    }

    /// <summary>What is clipped; default <see cref="ClipWhen.Step"/>.</summary>
    public ClipWhen When {
      get { return (ClipWhen)Native.when; }
      set { Native.when = (int)value; }
    }
  }

  /// <summary>
  /// A loss scale that follows the gradients, for f16.
  /// </summary>
  public sealed class LossScaler {
    internal readonly ga_loss_scaler Native;

    /// <summary>The defaults of the library.</summary>
    public LossScaler() {
      Native = Natives.First(() => new ga_loss_scaler());
    }

    /// <summary>The first scale; default 65536.</summary>
    public double InitialScale {
      get { return Native.initial_scale; }
      set { Native.initial_scale = value; }
    }

    /// <summary>More than 1; default 2.</summary>
    public double GrowthFactor {
      get { return Native.growth_factor; }
      set { Native.growth_factor = value; }
    }

    /// <summary>In (0, 1); default 0.5.</summary>
    public double BackoffFactor {
      get { return Native.backoff_factor; }
      set { Native.backoff_factor = value; }
    }

    /// <summary>The least scale; default 2^-126.</summary>
    public double MinScale {
      get { return Native.min_scale; }
      set { Native.min_scale = value; }
    }

    /// <summary>The largest scale; default 2^127.</summary>
    public double MaxScale {
      get { return Native.max_scale; }
      set { Native.max_scale = value; }
    }

    /// <summary>Applied steps in a row after which the scale grows; default 2000.</summary>
    public long GrowthInterval {
      get { return Native.growth_interval; }
      set { Native.growth_interval = value; }
    }

    /// <summary>Non-finite windows after which the scale backs off; default 1.</summary>
    public int Hysteresis {
      get { return Native.hysteresis; }
      set { Native.hysteresis = value; }
    }
  }

  /// <summary>
  /// A moving average of every parameter.
  /// </summary>
  public sealed class Ema {
    internal readonly ga_ema Native;

    /// <summary>The defaults of the library.</summary>
    public Ema() {
      Native = Natives.First(() => new ga_ema());
    }

    /// <summary>How the decay depends on the step; default <see cref="EmaKind.Torch"/>.</summary>
    public EmaKind Kind {
      get { return (EmaKind)Native.kind; }
      set { Native.kind = (int)value; }
    }

    /// <summary>The type of the average; default: f32, or f64 for f64 parameters; or bf16.</summary>
    public DType DType {
      get { return (DType)Native.dtype; }
      set { Native.dtype = (int)value; }
    }

    /// <summary>Of <see cref="EmaKind.Torch"/>, in [0, 1]; default 0.999.</summary>
    public double Decay {
      get { return Native.decay; }
      set { Native.decay = value; }
    }

    /// <summary>Of <see cref="EmaKind.Karras"/>; default 6.94.</summary>
    public double Gamma {
      get { return Native.gamma; }
      set { Native.gamma = value; }
    }
  }

  /// <summary>
  /// Options of a parameter: for 16 bits, for embeddings, for adaptive clipping.
  /// </summary>
  public sealed class ParamOptions {
    internal readonly ga_param_options Native;

    /// <summary>The defaults of the library.</summary>
    public ParamOptions() {
      Native = Natives.First(() => new ga_param_options());
    }

    /// <summary>The type of gradients; default: the parameter's.</summary>
    public DType GradientDType {
      get { return (DType)Native.gradient_dtype; }
      set { Native.gradient_dtype = (int)value; }
    }

    /// <summary>The type of the accumulator; default: f32, or f64 for f64 parameters.</summary>
    public DType AccumulatorDType {
      get { return (DType)Native.accumulator_dtype; }
      set { Native.accumulator_dtype = (int)value; }
    }

    /// <summary>Whether a parameter of 16 bits has master weights; default <see cref="GradAccum.Master.F32"/>.</summary>
    public Master Master {
      get { return (Master)Native.master; }
      set { Native.master = (int)value; }
    }

    /// <summary>How a parameter of 16 bits is rounded; default <see cref="GradAccum.Rounding.Nearest"/>.</summary>
    public Rounding Rounding {
      get { return (Rounding)Native.rounding; }
      set { Native.rounding = (int)value; }
    }

    /// <summary>Whether gradients may come by row; default <see cref="GradAccum.Rows.None"/>.</summary>
    public Rows Rows {
      get { return (Rows)Native.rows; }
      set { Native.rows = (int)value; }
    }

    /// <summary>Bit d: a unit of adaptive clipping spans axis d; default 0: as the clip says.</summary>
    public uint AgcAxes {
      get { return Native.agc_axes; }
      set { Native.agc_axes = value; }
    }

    /// <summary>
    /// <see cref="GradAccum.Reduce.Max"/>: the parameter, of an external group, collects maxima in place of sums;
    /// null, the default: <see cref="Config.Reduce"/> holds for it.
    /// </summary>
    public Reduce? Reduce {
      get { return Native.reduce == 0 ? null : (Reduce?)Native.reduce; }
      set {
        if (value != null && value != GradAccum.Reduce.Max) {
          throw new ArgumentException("Reduce was " + value + ", expected Max, or null for that of the context");
        }
        Native.reduce = value == null ? 0 : (int)value;
      }
    }

    /// <summary>
    /// With <see cref="Config.Eager"/>: the parameter, which has 16 bits and master weights and is rounded to nearest,
    /// may be written from <see cref="Context.Ready"/> on, so that <see cref="Context.Step"/> makes no copy; default
    /// false.
    /// </summary>
    public bool WriteEarly {
      get { return Native.write_early != 0; }
      set { Native.write_early = value ? 1 : 0; }
    }

    /// <summary>
    /// Master weights follow what the program writes to the parameter, element by element, so that
    /// <see cref="Param.Changed"/> is needless; not with <see cref="GradAccum.Rounding.Stochastic"/>; default false.
    /// </summary>
    public bool FollowData {
      get { return Native.follow_data != 0; }
      set { Native.follow_data = value ? 1 : 0; }
    }
  }

  /// <summary>
  /// Options of a batch-normalisation layer.
  /// </summary>
  public sealed class BatchNormOptions {
    internal readonly ga_bn_options Native;

    /// <summary>The defaults of a framework.</summary>
    /// <param name="flavor">The framework: PyTorch or Keras.</param>
    public BatchNormOptions(Flavor flavor = Flavor.Torch) {
      Native = Natives.First(() => new ga_bn_options((int)flavor));
    }

    /// <summary>Whose statistics the layer normalises by; default <see cref="BatchNormMode.Micro"/>.</summary>
    public BatchNormMode Mode {
      get { return (BatchNormMode)Native.mode; }
      set { Native.mode = (int)value; }
    }

    /// <summary>The order of axes.</summary>
    public BatchNormLayout Layout {
      get { return (BatchNormLayout)Native.layout; }
      set { Native.layout = (int)value; }
    }

    /// <summary>The type of activations and their gradients; default f32.</summary>
    public DType DType {
      get { return (DType)Native.dtype; }
      set { Native.dtype = (int)value; }
    }

    /// <summary>Whether the running variance averages biased variances, as in Keras.</summary>
    public bool Biased {
      get { return Native.biased != 0; }
      set { Native.biased = value ? 1 : 0; }
    }

    /// <summary>How far the running statistics move in a step, in [0, 1].</summary>
    public double Momentum {
      get { return Native.momentum; }
      set { Native.momentum = value; }
    }

    /// <summary>Added to the variance; positive.</summary>
    public double Eps {
      get { return Native.eps; }
      set { Native.eps = value; }
    }
  }

  /// <summary>
  /// Options of saving and loading.
  /// </summary>
  public sealed class StateOptions {
    internal readonly ga_state_options Native;

    /// <summary>The defaults of the library.</summary>
    public StateOptions() {
      Native = Natives.First(() => new ga_state_options());
    }

    /// <summary>What is saved or loaded; default <see cref="StateParts.All"/>.</summary>
    public StateParts Parts {
      get { return (StateParts)Native.parts; }
      set { Native.parts = (int)value; }
    }

    /// <summary>What a load does about settings; default <see cref="StateSettings.Compare"/>.</summary>
    public StateSettings Settings {
      get { return (StateSettings)Native.settings; }
      set { Native.settings = (int)value; }
    }

    /// <summary>A load leaves what the file has nothing of as it is; default false.</summary>
    public bool AllowMissing {
      get { return Native.allow_missing != 0; }
      set { Native.allow_missing = value ? 1 : 0; }
    }

    /// <summary>A load skips what the context has no place for; default false.</summary>
    public bool AllowExtra {
      get { return Native.allow_extra != 0; }
      set { Native.allow_extra = value ? 1 : 0; }
    }

    /// <summary>A load takes a safetensors file of another program; default false.</summary>
    public bool Unmarked {
      get { return Native.unmarked != 0; }
      set { Native.unmarked = value ? 1 : 0; }
    }

    /// <summary>A text of the program's own that is saved too; default null: none.</summary>
    public string Note {
      get { return Native.note; }
      set { Native.SetNote(value); }
    }

    /// <summary>
    /// Called now and then with the bytes that are done and with all bytes, on the thread of the call. If
    /// it returns false, the call ends with <see cref="Status.Cancelled"/>; what it throws ends the call
    /// and comes out of it. It must not use the context. Default null.
    /// </summary>
    public Func<long, long, bool> Progress { get; set; }
  }

  /// <summary>One parameter within a block of memory: see <see cref="Context.AddFlat"/>.</summary>
  public sealed class FlatEntry {
    internal readonly ga_flat_entry Native;

    /// <summary>A parameter in a block.</summary>
    /// <param name="group">Its group.</param>
    /// <param name="name">Its name.</param>
    /// <param name="offset">Elements from the start of the block.</param>
    /// <param name="shape">Its dimensions.</param>
    public FlatEntry(Group group, string name, long offset, params long[] shape) {
      if (group == null) throw new ArgumentNullException("group");
      if (name == null) throw new ArgumentNullException("name");
      if (shape == null) throw new ArgumentNullException("shape");
      Native = Natives.First(() => new ga_flat_entry());
      Native.group = group.Id;
      Native.SetName(name);
      Native.set_shape(shape);
      Native.offset = offset;
      Group = group;
      Shape = (long[])shape.Clone();
    }

    internal Group Group { get; }

    internal long[] Shape { get; }

    private ParamOptions options;

    /// <summary>Options of this parameter alone; default null: those of the block.</summary>
    public ParamOptions Options {
      get { return options; }
      set {
        options = value;
        Native.options = value == null ? null : value.Native;
      }
    }
  }
}
