// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

/**
 * A layer of batch normalisation, y = gamma (x - mean) / sqrt(variance + eps) + beta for each
 * channel. Made by {@link Context#addBatchNorm}. The backward calls are those of {@link
 * MicroBatch}. docs/batch-normalization.md has the protocol of each mode.
 *
 * <p>Tensors x, y and their gradients are [samples, channels, positions] or [samples, positions,
 * channels], of the dtype of the layer. Buffers are read and written in place within the call.
 */
public final class BatchNorm extends BatchNormMembers {
  /** What a spread is. */
  public enum Spread implements Numbered {
    /** The mean squared deviation from the mean. */
    VARIANCE(RawConstants.GA_BN_VARIANCE),
    /** The sum of squared deviations. */
    M2(RawConstants.GA_BN_M2);

    private final int value;

    Spread(int value) {
      this.value = value;
    }

    @Override
    public int value() {
      return value;
    }
  }

  // What never changes, as the library describes it.
  private final String name;
  private final long channels;
  private final Dtype dtype;

  // Within a call of the context c.
  BatchNorm(Context context, long c, int id) {
    super(context, id);
    BatchNormInfo info = describe(c);
    name = info.name();
    channels = info.channels();
    dtype = info.dtype();
  }

  private BatchNormInfo describe(long c) {
    try (ga_bn_info fields = new ga_bn_info()) {
      Raw.ga_bn_describe(c, id, fields);
      return BatchNormInfo.read(fields);
    }
  }

  /**
   * What the library knows of the layer.
   *
   * @return its name, channels, options and so on, as they are now
   */
  public BatchNormInfo info() {
    return context.call(c -> describe(c));
  }

  long address(Tensor tensor, long samples, long positions, boolean written, String role) {
    Check.notNull(tensor, role);
    long count = Tensor.elements(role, this, samples, channels, positions);
    return tensor.address(dtype, count, written, role, this);
  }

  /**
   * Takes statistics that the program has computed itself.
   *
   * @param count elements of each channel; &gt;= 0
   * @param mean [channels], F32 or F64
   * @param spread [channels], of the same dtype
   * @param kind what spread is
   */
  public void accumulateStats(long count, Tensor mean, Tensor spread, BatchNorm.Spread kind) {
    Check.notNull(mean, "mean");
    Check.notNull(spread, "spread");
    Check.notNull(kind, "kind");
    context.run(c -> {
      Dtype of = mean.dtype("mean");
      Raw.ga_bn_accumulate_stats(
          c,
          id,
          count,
          mean.address(of, channels, false, "mean", this),
          spread.address(of, channels, false, "spread", this),
          kind.value(),
          of.value());
    }, mean, spread);
  }

  /**
   * Reads the running statistics.
   *
   * @param mean [channels], F32 or F64, in the host's memory
   * @param variance [channels], of the same dtype
   * @return how often they have moved
   */
  public long running(Tensor mean, Tensor variance) {
    return query(Raw::ga_bn_running, mean, variance);
  }

  /**
   * Sets the running statistics. Between windows.
   *
   * @param mean [channels], F32 or F64, in the host's memory
   * @param variance [channels], of the same dtype, &gt;= 0
   * @param steps how often they have moved; &gt;= 0
   */
  public void setRunning(Tensor mean, Tensor variance, long steps) {
    Check.notNull(mean, "mean");
    Check.notNull(variance, "variance");
    context.run(c -> {
      Dtype of = mean.dtype("mean");
      Raw.ga_bn_running_set(
          c,
          id,
          mean.address(of, channels, false, "mean", this),
          variance.address(of, channels, false, "variance", this),
          of.value(),
          steps);
    }, mean, variance);
  }

  /**
   * Reads the statistics that the layer normalises by now, with the biased variance.
   *
   * @param mean [channels], F32 or F64, in the host's memory
   * @param variance [channels], of the same dtype
   * @return the elements of a channel that they are of
   */
  public long statistics(Tensor mean, Tensor variance) {
    return query(Raw::ga_bn_statistics, mean, variance);
  }

  /** A function of C that writes a mean and a variance for each channel, and a number. */
  private interface Query {
    void call(long c, int id, long mean, long variance, int dtype, long[] number);
  }

  private long query(Query query, Tensor mean, Tensor variance) {
    Check.notNull(mean, "mean");
    Check.notNull(variance, "variance");
    return context.call(c -> {
      Dtype of = mean.dtype("mean");
      long[] number = new long[1];
      query.call(
          c,
          id,
          mean.address(of, channels, true, "mean", this),
          variance.address(of, channels, true, "variance", this),
          of.value(),
          number);
      return number[0];
    }, mean, variance);
  }

  /** Whether both are the same layer of the same context. */
  @Override
  public boolean equals(Object other) {
    return other instanceof BatchNorm layer && layer.context == context && layer.id == id;
  }

  @Override
  public int hashCode() {
    return id;
  }

  @Override
  public String toString() {
    return "layer \"" + name + "\"";
  }
}
