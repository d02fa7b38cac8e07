// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

/** Where a context computes. */
public enum Device implements Numbered {
  /** The processor. */
  CPU(RawConstants.GA_DEVICE_CPU),
  /** An NVIDIA GPU. */
  CUDA(RawConstants.GA_DEVICE_CUDA);

  private final int value;

  Device(int value) {
    this.value = value;
  }

  @Override
  public int value() {
    return value;
  }

  static Device of(int value) {
    return Numbered.of(values(), value);
  }
}
