// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

/**
 * One parameter within a block of memory.
 *
 * @param group its group
 * @param name its name
 * @param offset elements from the start of the block, of parameters and of gradients alike
 * @param options options of its own; null: those of the block
 * @param shape its dimensions
 */
public record FlatEntry(
    Group group, String name, long offset, ParamOptions options, long... shape) {

  /**
   * An entry with options of its own.
   *
   * @param group its group
   * @param name its name
   * @param offset elements from the start of the block, of parameters and of gradients alike
   * @param options options of its own; null: those of the block
   * @param shape its dimensions
   */
  public FlatEntry {
    Check.notNull(group, "group");
    Check.notNull(name, "name");
    Check.notNull(shape, "shape");
  }

  /**
   * An entry with the options of the block.
   *
   * @param group its group
   * @param name its name
   * @param offset elements from the start of the block, of parameters and of gradients alike
   * @param shape its dimensions
   */
  public FlatEntry(Group group, String name, long offset, long... shape) {
    this(group, name, offset, null, shape);
  }
}
