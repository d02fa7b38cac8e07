// SPDX-License-Identifier: Apache-2.0
// What options have beyond the header: the rest is generated.
using System;

namespace GradAccum {
  public sealed partial class Config {
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

  public sealed partial class Optimizer {
    /// <summary>The defaults of a framework for an optimizer.</summary>
    /// <param name="kind">The optimizer.</param>
    /// <param name="flavor">The framework.</param>
    public Optimizer(OptimizerKind kind, Flavor flavor = Flavor.Torch) {
      Native = Natives.First(() => new ga_optimizer((int)kind, (int)flavor));
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

    /// <summary>
    /// Muon: three coefficients for each iteration, one row behind the other; iterations beyond the last row have
    /// that one. Default, empty: <see cref="NewtonSchulzCoefficients"/> in every iteration.
    /// </summary>
    public double[] NewtonSchulzTable {
      get {
        var table = new double[Native.ns_table_size()];
        for (int i = 0; i < table.Length; ++i) table[i] = Native.ns_table_number(i);
        return table;
      }
      set {
        if (value == null) throw new ArgumentNullException("value");
        if (value.Length % 3 != 0) {
          throw GradAccumException.Invalid(
              "there were " + value.Length + " numbers in a table of Newton-Schulz coefficients, which has three a row");
        }
        Native.set_ns_table(value);
      }
    }
  }

  public sealed partial class Schedule {
    /// <summary>The defaults of a kind of schedule.</summary>
    /// <param name="kind">The kind.</param>
    public Schedule(ScheduleKind kind) {
      Native = Natives.First(() => new ga_schedule((int)kind));
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

  public sealed partial class ParamOptions {
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
  }

  public sealed partial class BatchNormOptions {
    /// <summary>The defaults of a framework.</summary>
    /// <param name="flavor">The framework: PyTorch or Keras.</param>
    public BatchNormOptions(Flavor flavor = Flavor.Torch) {
      Native = Natives.First(() => new ga_bn_options((int)flavor));
    }
  }

  public sealed partial class StateOptions {
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
