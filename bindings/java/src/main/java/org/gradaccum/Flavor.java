// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

/** Whose definition counts where frameworks differ. */
public enum Flavor implements Numbered {
  /** PyTorch's and timm's. */
  TORCH(RawConstants.GA_FLAVOR_TORCH),
  /** Keras's. */
  KERAS(RawConstants.GA_FLAVOR_KERAS),
  /** That of AdamWeightDecay in the BERT release; ADAMW only. */
  BERT(RawConstants.GA_FLAVOR_BERT);

  private final int value;

  Flavor(int value) {
    this.value = value;
  }

  @Override
  public int value() {
    return value;
  }

  static Flavor of(int value) {
    return Numbered.of(values(), value);
  }
}
