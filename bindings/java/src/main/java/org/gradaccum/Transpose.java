// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

/** Whether a matrix is used as stored or transposed. */
public enum Transpose implements Numbered {
  /** As stored. */
  NO_TRANSPOSE(RawConstants.GA_NO_TRANSPOSE),
  /** Transposed. */
  TRANSPOSE(RawConstants.GA_TRANSPOSE);

  private final int value;

  Transpose(int value) {
    this.value = value;
  }

  @Override
  public int value() {
    return value;
  }

  static Transpose of(int value) {
    return Numbered.of(values(), value);
  }
}
