// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.util.List;

/** Checks of arguments, which name the parameter. */
final class Check {
  private Check() {}

  static <T> T notNull(T value, String name) {
    if (value == null) {
      throw new NullPointerException(name + " is null");
    }
    return value;
  }

  /** As above, for a list and all its elements. */
  static void noneNull(List<?> list, String name) {
    notNull(list, name);
    for (int i = 0; i < list.size(); ++i) {
      notNull(list.get(i), name, i);
    }
  }

  /** As above, for an element of a list or an array. */
  static <T> T notNull(T element, String name, int index) {
    if (element == null) {
      throw new NullPointerException(name + "[" + index + "] is null");
    }
    return element;
  }
}
