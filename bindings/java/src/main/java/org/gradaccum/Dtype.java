// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.util.Optional;

/** The type of elements. */
public enum Dtype implements Numbered {
  /** IEEE binary32: a {@code float}. */
  F32(RawConstants.GA_F32),
  /** IEEE binary64: a {@code double}. */
  F64(RawConstants.GA_F64),
  /** IEEE binary16, as the 16 bits of a {@code short}. */
  F16(RawConstants.GA_F16),
  /** The upper half of an F32, as the 16 bits of a {@code short}. */
  BF16(RawConstants.GA_BF16),
  /** An {@code int}, of indices. */
  I32(RawConstants.GA_I32),
  /** A {@code long}, of indices. */
  I64(RawConstants.GA_I64);

  private final int value;

  Dtype(int value) {
    this.value = value;
  }

  @Override
  public int value() {
    return value;
  }

  /**
   * The size of an element.
   *
   * @return bytes
   */
  public int bytes() {
    return switch (this) {
      case F16, BF16 -> 2;
      case F32, I32 -> 4;
      case F64, I64 -> 8;
    };
  }

  static Dtype of(int value) {
    return Numbered.of(values(), value);
  }

  /** Where 0 is a default that depends on something else. */
  static Optional<Dtype> ofOptional(int value) {
    return value == 0 ? Optional.empty() : Optional.of(of(value));
  }

  static int value(Optional<Dtype> dtype) {
    return dtype.map(Dtype::value).orElse(0);
  }
}
