// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

/** Parameters that share an optimizer. Made by {@link Context#addGroup}. */
public final class Group extends GroupMembers {
  Group(Context context, int id) {
    super(context, id);
  }

  /**
   * The context of the group.
   *
   * @return the context
   */
  public Context context() {
    return context;
  }

  @Override
  public String toString() {
    return "group " + id;
  }
}
