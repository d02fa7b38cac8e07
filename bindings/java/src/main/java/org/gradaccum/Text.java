// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.nio.ByteBuffer;
import java.nio.CharBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;

/** Texts between Java and C: UTF-8, which ends with a NUL on the way to C. */
final class Text {
  private Text() {}

  static byte[] encode(String text) {
    if (text == null) {
      return null;
    }
    if (text.indexOf('\0') >= 0) {
      throw new IllegalArgumentException(
          "the text \"" + text.replace("\0", "\\0") + "\" contains a NUL, which ends a text in C");
    }
    try {
      ByteBuffer bytes = StandardCharsets.UTF_8.newEncoder().encode(CharBuffer.wrap(text));
      byte[] ended = new byte[bytes.remaining() + 1];
      bytes.get(ended, 0, bytes.remaining());
      return ended;
    } catch (CharacterCodingException e) {
      throw new IllegalArgumentException(
          "the text \"" + text + "\" contains half of a surrogate pair, which UTF-8 cannot hold",
          e);
    }
  }

  static String decode(byte[] text) {
    return text == null ? null : new String(text, StandardCharsets.UTF_8);
  }
}
