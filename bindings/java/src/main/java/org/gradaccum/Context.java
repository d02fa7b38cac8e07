// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.lang.ref.Reference;
import java.nio.Buffer;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;

/**
 * Adds up the gradients of micro-batches and makes optimizer steps on parameters in the program's
 * own memory.
 *
 * <pre>{@code
 * try (Context context = new Context()) {
 *   Group group = context.addGroup(Optimizer.builder(Optimizer.Kind.ADAMW).lr(3e-4).build());
 *   Param w = context.addParam(group, "fc1.weight", weight, 512, 784);
 *   Param b = context.addParam(group, "fc1.bias", bias, 512);
 *   for (each window) {
 *     for (each micro-batch of the window) {
 *       backward();                           // writes dw and db: means over the micro-batch
 *       context.accumulate(samples, dw, db);
 *     }
 *     context.step();                         // updates weight and bias in place
 *   }
 * }
 * }</pre>
 *
 * <p>Memory: tensors are direct buffers or {@linkplain Tensor#ofAddress addresses}. The context
 * keeps the buffers of parameters reachable until they are bound anew or it is closed, and those of
 * gradients as long as the library reads them, which is to say for the call, but with {@link
 * Config.GradientLife#LIVE}, {@link Config.GradientLife#LENT}, {@link Config.Nonfinite#DROP_MICRO} and {@link Clip.When#MICRO}. An
 * address is the program's to keep valid for as long.
 *
 * <p>Threads: one thread at a time uses a context. A call while another one runs is an {@link
 * IllegalStateException} and changes nothing, with {@link Config#eager} too, but {@link #close},
 * which waits. A context may move between threads. Different contexts are independent.
 *
 * <p>Every method throws a {@link GradAccumException} if the library refuses the call, an {@link
 * IllegalArgumentException} for memory of the wrong kind or length, an {@link
 * IllegalStateException} once the context is closed, and a {@link NullPointerException} that names
 * the parameter for null where it is not said to be legal. A call that fails has changed nothing,
 * unless the status is {@link Status#FAULT}.
 */
public final class Context extends ContextWindow {
  /** Creates a context with the default configuration. */
  public Context() {
    this(Config.builder().build());
  }

  /**
   * Creates a context.
   *
   * @param config its configuration
   * @throws GradAccumException {@link Status#UNSUPPORTED}: the device cannot be used; the message
   *     says why
   */
  public Context(Config config) {
    super(Check.notNull(config, "config"));
  }

  // ---- Groups

  /**
   * Adds a group: parameters that share an optimizer. Legal while the window is empty.
   *
   * @param optimizer the optimizer and its hyper-parameters
   * @return the group
   * @throws GradAccumException {@link Status#UNSUPPORTED}: no such flavor, or MUON without a
   *     library for matrix products
   */
  public Group addGroup(Optimizer optimizer) {
    Check.notNull(optimizer, "optimizer");
    return call(c -> {
      try (ga_optimizer fields = new ga_optimizer(0, 0)) {
        optimizer.write(fields);
        int[] id = new int[1];
        Raw.ga_group_add(c, fields, id);
        return new Group(this, id[0]);
      }
    });
  }

  // ---- Parameters

  /**
   * Adds a parameter. Legal while the window is empty.
   *
   * @param group its group
   * @param name not empty, unique in the context
   * @param data the tensor, read and written in place by {@link #step}: a direct {@link
   *     java.nio.FloatBuffer} or {@link java.nio.DoubleBuffer}. {@link Tensor} has other dtypes
   * @param shape its dimensions, row-major; none for a scalar
   * @return the parameter
   */
  public Param addParam(Group group, String name, Buffer data, long... shape) {
    return addParam(group, name, Tensor.of("data", data), null, shape);
  }

  /**
   * Adds a parameter. Legal while the window is empty.
   *
   * @param group its group
   * @param name not empty, unique in the context
   * @param data the tensor, read and written in place by {@link #step}
   * @param options may be null
   * @param shape its dimensions, row-major; none for a scalar
   * @return the parameter
   * @throws GradAccumException {@link Status#UNSUPPORTED}: dtypes or options that do not go
   *     together, or not with the optimizer
   */
  public Param addParam(
      Group group, String name, Tensor data, ParamOptions options, long... shape) {
    checkOwn(Check.notNull(group, "group"));
    Check.notNull(name, "name");
    Check.notNull(data, "data");
    Check.notNull(shape, "shape");
    return call(c -> {
      try (ga_param_options fields = options == null ? null : new ga_param_options()) {
        if (options != null) {
          options.write(fields);
        }
        String role = "data of parameter \"" + name + "\"";
        Dtype dtype = data.dtype(role);
        long address =
            data.address(dtype, Tensor.elements(role, null, shape), true, role, null);
        int[] id = new int[1];
        Raw.ga_param_add(c, group.id(), name, address, dtype.value(), shape, fields, id);
        Param param = new Param(this, c, id[0], data.buffer());
        params.add(param);
        slots.add(new Slot(List.of(param), false));
        return param;
      }
    }, data);
  }

  /**
   * Adds the parameters in one block of memory, which may have gaps: all of them or none. The block
   * has one gradient in {@link #accumulate}: a block with the same offsets.
   *
   * @param data the block: a direct {@link java.nio.FloatBuffer} or {@link java.nio.DoubleBuffer}
   * @param entries the parameters
   * @return the parameters
   */
  public List<Param> addFlat(Buffer data, List<FlatEntry> entries) {
    return addFlat(Tensor.of("data", data), null, entries);
  }

  /**
   * Adds the parameters in one block of memory, which may have gaps: all of them or none. The block
   * has one gradient in {@link #accumulate}: a block with the same offsets.
   *
   * @param data the block
   * @param options of the entries that have none of their own; may be null
   * @param entries the parameters
   * @return the parameters
   */
  public List<Param> addFlat(Tensor data, ParamOptions options, List<FlatEntry> entries) {
    Check.notNull(data, "data");
    Check.notNull(entries, "entries");
    long c = enter();
    List<Runnable> structs = new ArrayList<>();  // what closes them
    try {
      Dtype dtype = data.dtype("data");
      long end = 0;
      long[] proxies = new long[entries.size()];
      for (int i = 0; i < proxies.length; ++i) {
        FlatEntry entry = Check.notNull(entries.get(i), "entries", i);
        checkOwn(entry.group());
        ga_flat_entry fields = new ga_flat_entry();
        structs.add(fields::close);
        proxies[i] = ga_flat_entry.getCPtr(fields);
        fields.set_name(entry.name());
        fields.setGroup(entry.group().id());
        fields.set_shape(entry.shape());
        fields.setOffset(entry.offset());
        if (entry.options() != null) {
          ga_param_options own = new ga_param_options();
          structs.add(own::close);
          entry.options().write(own);
          fields.setOptions(own);
        }
        String role = "data of parameter \"" + entry.name() + "\"";
        long count = Tensor.elements(role, null, entry.shape());
        if (entry.offset() < 0 || entry.offset() > Long.MAX_VALUE - count) {
          throw Tensor.refuse(role, null, "offset was %s", entry.offset());
        }
        end = Math.max(end, entry.offset() + count);
      }
      ga_param_options fields = null;
      if (options != null) {
        fields = new ga_param_options();
        structs.add(fields::close);
        options.write(fields);
      }
      long address =
          data.address(dtype, Math.max(end, data.elements(dtype)), true, "data", null);
      int[] first = new int[1];
      Raw.ga_params_add_flat(c, address, dtype.value(), proxies, fields, first);
      List<Param> added = new ArrayList<>();
      for (int i = 0; i < proxies.length; ++i) {
        added.add(new Param(this, c, first[0] + i, data.buffer()));
      }
      params.addAll(added);
      slots.add(new Slot(added, true));
      return Collections.unmodifiableList(added);
    } finally {
      structs.forEach(Runnable::run);
      exit();
      Reference.reachabilityFence(data);
    }
  }

  /**
   * The parameter of a name.
   *
   * @param name the name
   * @return the parameter
   * @throws GradAccumException {@link Status#INVALID_ARGUMENT}: there is none
   */
  public Param findParam(String name) {
    Check.notNull(name, "name");
    return call(c -> {
      int[] id = new int[1];
      Raw.ga_param_find(c, name, id);
      return params.get(id[0]);
    });
  }

  // ---- Clipping, loss scale, EMA

  /**
   * The factor that the program multiplies its loss by until the next step.
   *
   * @return the factor
   */
  public double lossScale() {
    return call(c -> {
      double[] scale = new double[1];
      Raw.ga_loss_scale(c, scale, null);
      return scale[0];
    });
  }

  /**
   * The address of that factor, a float in the memory of the device, for work on the stream.
   *
   * @return the address
   * @throws GradAccumException {@link Status#INVALID_ARGUMENT}: the context is on the CPU
   */
  public long deviceLossScale() {
    return call(c -> {
      long[] address = new long[1];
      Raw.ga_loss_scale(c, null, address);
      return address[0];
    });
  }

  /**
   * Makes the context one of the communicator's ranks. Every rank calls it, between windows, with
   * the same groups, parameters and options; the first difference is named in an exception. From
   * then on every rank calls {@link #step}, {@link #discard}, and what saves and loads, in the same
   * order; with {@link CommunicatorOptions.Shard#OPTIMIZER} also what reads and writes state and
   * moving averages. docs/devices.md has the rest.
   *
   * @param communicator null: the context is alone again
   * @param options may be null
   * @throws GradAccumException {@link Status#COMMUNICATION}: ranks differ, or did not come; {@link
   *     Status#UNSUPPORTED}: a context on a device, {@link CommunicatorOptions.Adder#TRANSPORT}
   *     with local ranks; {@link Status#INVALID_STATE}: it is too late to shard
   */
  public void setCommunicator(Communicator communicator, CommunicatorOptions options) {
    run(c -> {
      try (ga_comm_options fields = options == null ? null : new ga_comm_options()) {
        if (options != null) {
          options.write(fields);
        }
        if (communicator == null) {
          Raw.ga_context_set_comm(c, 0, fields);
        } else {
          communicator.use(comm -> Raw.ga_context_set_comm(c, comm, fields));
        }
      }
    });
  }

  /**
   * Exchanges parameters and their moving averages until the scope is closed. Between windows; with
   * {@link CommunicatorOptions.Shard#OPTIMIZER}, on every rank, and so is the end of the scope.
   *
   * @return the scope
   */
  public EmaScope swapEma() {
    swapEma(true);
    return new EmaScope(this);
  }

  // ---- Batch normalisation

  /**
   * Adds a layer of batch normalisation with torch's defaults. Between windows.
   *
   * @param name unique among layers
   * @param channels &gt;= 1
   * @param gamma a parameter [channels]; null: none, as with 1
   * @param beta a parameter [channels]; null: none, as with 0
   * @return the layer
   */
  public BatchNorm addBatchNorm(String name, long channels, Param gamma, Param beta) {
    return addBatchNorm(
        name, channels, gamma, beta, BatchNormOptions.builder(Flavor.TORCH).build());
  }

  /**
   * Adds a layer of batch normalisation. Between windows.
   *
   * @param name unique among layers
   * @param channels &gt;= 1
   * @param gamma a parameter [channels]; null: none, as with 1
   * @param beta a parameter [channels]; null: none, as with 0
   * @param options mode, layout and so on
   * @return the layer
   */
  public BatchNorm addBatchNorm(
      String name, long channels, Param gamma, Param beta, BatchNormOptions options) {
    Check.notNull(name, "name");
    Check.notNull(options, "options");
    for (Param param : new Param[] {gamma, beta}) {
      if (param != null) {
        checkOwn(param);
      }
    }
    return call(c -> {
      try (ga_bn_options fields = new ga_bn_options(Flavor.TORCH.value())) {
        options.write(fields);
        int[] id = new int[1];
        Raw.ga_bn_add(
            c,
            name,
            channels,
            gamma == null ? -1 : gamma.id(),
            beta == null ? -1 : beta.id(),
            fields,
            id);
        return new BatchNorm(this, c, id[0]);
      }
    });
  }

  /**
   * The layer of batch normalisation of a name.
   *
   * @param name the name
   * @return the layer
   * @throws GradAccumException {@link Status#INVALID_ARGUMENT}: there is none
   */
  public BatchNorm findBatchNorm(String name) {
    Check.notNull(name, "name");
    return call(c -> {
      int[] id = new int[1];
      Raw.ga_bn_find(c, name, id);
      return new BatchNorm(this, c, id[0]);
    });
  }

  // ---- Memory and devices
}
