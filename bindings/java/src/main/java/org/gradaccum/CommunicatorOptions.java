// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

/**
 * What ranks exchange and check, for {@link Context#setCommunicator}.
 *
 * @param wire what travels from rank to rank; default EXACT
 * @param handOut whether rank 0's parameters and state become those of every rank; default false:
 *     they must agree already
 * @param checkEvery every so many windows, {@link Context#step} compares parameters and state over
 *     the ranks; default 0: never
 */
public record CommunicatorOptions(Wire wire, boolean handOut, long checkEvery) {

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
    return builder;
  }

  static Builder read(ga_comm_options from) {
    Builder builder = new Builder();
    builder.wire = Wire.of(from.getWire());
    builder.handOut = from.getHand_out() != 0;
    builder.checkEvery = from.getCheck_every();
    return builder;
  }

  void write(ga_comm_options to) {
    to.setWire(wire.value());
    to.setHand_out(handOut ? 1 : 0);
    to.setCheck_every(checkEvery);
  }

  /** Collects the values of a CommunicatorOptions. */
  public static final class Builder {
    private Wire wire;
    private boolean handOut;
    private long checkEvery;

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
     * @param checkEvery every so many windows, parameters and state are compared; 0: never
     * @return this builder
     */
    public Builder checkEvery(long checkEvery) {
      this.checkEvery = checkEvery;
      return this;
    }

    /**
     * Makes an immutable value of what was set.
     *
     * @return the value
     */
    public CommunicatorOptions build() {
      return new CommunicatorOptions(wire, handOut, checkEvery);
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
}
