// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

/**
 * What ranks exchange and check, for {@link Context#setCommunicator}.
 *
 * @param wire what travels from rank to rank; default EXACT
 * @param handOut whether rank 0's parameters and state become those of every rank; default false:
 *     they must agree already
 * @param checkEvery every so many windows, {@link Context#step} compares parameters, and state that
 *     every rank has, over the ranks; default 0: never
 * @param shard what each rank keeps of optimizer state, master weights and moving averages; default
 *     NONE
 * @param adder who adds gradients up; default AUTO
 * @param overlap whether {@link Context#ready} has gradients exchanged while backward goes on, by a
 *     thread of the library; every window exchanges all parameters then; default false
 */
public record CommunicatorOptions(
    Wire wire, boolean handOut, long checkEvery, Shard shard, Adder adder, boolean overlap) {

  /**
   * Begins with the defaults.
   *
   * @return the builder
   */
  public static Builder builder() {
    try (ga_comm_options defaults = new ga_comm_options()) {
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
    builder.wire = wire;
    builder.handOut = handOut;
    builder.checkEvery = checkEvery;
    builder.shard = shard;
    builder.adder = adder;
    builder.overlap = overlap;
    return builder;
  }

  static Builder read(ga_comm_options from) {
    Builder builder = new Builder();
    builder.wire = Wire.of(from.getWire());
    builder.handOut = from.getHand_out() != 0;
    builder.checkEvery = from.getCheck_every();
    builder.shard = Shard.of(from.getShard());
    builder.adder = Adder.of(from.getAdder());
    builder.overlap = from.getOverlap() != 0;
    return builder;
  }

  /** Refuses null, in a builder and where a record is used that was made without one. */
  private CommunicatorOptions checked() {
    Check.notNull(wire, "wire");
    Check.notNull(shard, "shard");
    Check.notNull(adder, "adder");
    return this;
  }

  void write(ga_comm_options to) {
    checked();
    to.setWire(wire.value());
    to.setHand_out(handOut ? 1 : 0);
    to.setCheck_every(checkEvery);
    to.setShard(shard.value());
    to.setAdder(adder.value());
    to.setOverlap(overlap ? 1 : 0);
  }

  /** Collects the values of a CommunicatorOptions. */
  public static final class Builder {
    private Wire wire;
    private boolean handOut;
    private long checkEvery;
    private Shard shard;
    private Adder adder;
    private boolean overlap;

    private Builder() {}

    /**
     * Sets wire.
     *
     * @param wire what travels from rank to rank; default EXACT
     * @return this builder
     */
    public Builder wire(Wire wire) {
      this.wire = wire;
      return this;
    }

    /**
     * Sets handOut.
     *
     * @param handOut whether rank 0's parameters and state become those of every rank
     * @return this builder
     */
    public Builder handOut(boolean handOut) {
      this.handOut = handOut;
      return this;
    }

    /**
     * Sets checkEvery.
     *
     * @param checkEvery every so many windows, parameters, and state that every rank has, are
     *     compared; 0: never
     * @return this builder
     */
    public Builder checkEvery(long checkEvery) {
      this.checkEvery = checkEvery;
      return this;
    }

    /**
     * Sets shard.
     *
     * @param shard what each rank keeps of optimizer state, master weights and moving averages;
     *     default NONE
     * @return this builder
     */
    public Builder shard(Shard shard) {
      this.shard = shard;
      return this;
    }

    /**
     * Sets adder.
     *
     * @param adder who adds gradients up; default AUTO
     * @return this builder
     */
    public Builder adder(Adder adder) {
      this.adder = adder;
      return this;
    }

    /**
     * Sets overlap.
     *
     * @param overlap whether {@link Context#ready} has gradients exchanged while backward goes on
     * @return this builder
     */
    public Builder overlap(boolean overlap) {
      this.overlap = overlap;
      return this;
    }

    /**
     * Makes an immutable value of what was set.
     *
     * @return the value
     */
    public CommunicatorOptions build() {
      return new CommunicatorOptions(wire, handOut, checkEvery, shard, adder, overlap).checked();
    }
  }

  /** What travels from rank to rank. */
  public enum Wire implements Numbered {
    /** Gradients as the accumulators have them. */
    EXACT(RawConstants.GA_COMM_WIRE_EXACT),
    /** Gradients of F32 rounded to BF16; they are added in F32. */
    BF16(RawConstants.GA_COMM_WIRE_BF16);

    private final int value;

    Wire(int value) {
      this.value = value;
    }

    @Override
    public int value() {
      return value;
    }

    static Wire of(int value) {
      return Numbered.of(values(), value);
    }
  }

  /**
   * What each rank keeps of optimizer state, master weights and moving averages. It is chosen
   * before the library makes its arrays, and holds until the context is closed.
   */
  public enum Shard implements Numbered {
    /** All of it. */
    NONE(RawConstants.GA_SHARD_NONE),
    /**
     * A part of about one in as many as there are ranks: the rank updates that part of the
     * parameters and gets the others' (ZeRO-1). {@link Param#getState}, {@link Param#setState},
     * {@link Param#copyEmaTo} and {@link Context#swapEma(boolean)} are then called by every rank in
     * the same order.
     */
    OPTIMIZER(RawConstants.GA_SHARD_OPTIMIZER);

    private final int value;

    Shard(int value) {
      this.value = value;
    }

    @Override
    public int value() {
      return value;
    }

    static Shard of(int value) {
      return Numbered.of(values(), value);
    }
  }

  /** Who adds gradients up. */
  public enum Adder implements Numbered {
    /** The library, in the order of the ranks, with the same bits on every transport. */
    LIBRARY(RawConstants.GA_COMM_ADDER_LIBRARY),
    /** MPI or NCCL, in its own order. Local ranks have no such transport. */
    TRANSPORT(RawConstants.GA_COMM_ADDER_TRANSPORT),
    /** NCCL, unless gradients travel as bf16; with others the library. */
    AUTO(RawConstants.GA_COMM_ADDER_AUTO);

    private final int value;

    Adder(int value) {
      this.value = value;
    }

    @Override
    public int value() {
      return value;
    }

    static Adder of(int value) {
      return Numbered.of(values(), value);
    }
  }
}
