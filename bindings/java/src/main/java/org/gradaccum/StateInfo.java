// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

/**
 * An array of state that the library keeps for a parameter.
 *
 * @param name its name, such as "exp_avg"
 * @param dtype of its elements
 * @param count elements
 */
public record StateInfo(
    String name,
    Dtype dtype,
    long count) {

  static StateInfo read(ga_state_info from) {
    return new StateInfo(
        from.getName(),
        Dtype.of(from.getDtype()),
        from.getCount());
  }
}
