// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

/** What a context counts: a group, a parameter or a layer. */
abstract class ContextObject {
  final Context context;
  final int id;

  ContextObject(Context context, int id) {
    this.context = context;
    this.id = id;
  }

  /**
   * The number of the object: 0, 1, 2, ... in the order in which those of its kind were added.
   *
   * @return the number
   */
  public int id() {
    return id;
  }
}
