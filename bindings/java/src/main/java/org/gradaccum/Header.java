// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.io.ByteArrayOutputStream;
import java.nio.ByteBuffer;

/**
 * The header of a state, which the library writes last, at offset 0: everything in front of the
 * first byte that it has written.
 */
final class Header {
  private final ByteArrayOutputStream bytes = new ByteArrayOutputStream();
  private long size = -1;

  /** Takes what is written; all but the header passes by. */
  void take(long offset, ByteBuffer written) {
    if (size < 0) {
      size = offset;
    }
    if (offset < size || size == 0) {
      byte[] part = new byte[written.remaining()];
      written.get(part);
      bytes.writeBytes(part);
    }
  }

  long size() {
    return size;
  }

  byte[] bytes() {
    return bytes.toByteArray();
  }
}
