// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.util.Optional;

/** An enumerator with the number that C has for it. */
interface Numbered {
  /**
   * The number of this enumerator in gradaccum.h.
   *
   * @return the number
   */
  int value();

  /** The enumerator with a number that the library has returned. */
  static <E extends Enum<E> & Numbered> E of(E[] enumerators, int value) {
    for (E enumerator : enumerators) {
      if (enumerator.value() == value) {
        return enumerator;
      }
    }
    throw new IllegalStateException(
        "the library returned %s number %s, which this version of the package does not know"
            .formatted(enumerators[0].getDeclaringClass().getSimpleName(), value));
  }

  /** Where 0 leaves the choice to something else. */
  static <E extends Enum<E> & Numbered> Optional<E> ofOptional(E[] enumerators, int value) {
    return value == 0 ? Optional.empty() : Optional.of(of(enumerators, value));
  }
}
