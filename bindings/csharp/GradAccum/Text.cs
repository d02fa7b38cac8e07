// SPDX-License-Identifier: Apache-2.0
using System;
using System.Runtime.InteropServices;
using System.Text;

namespace GradAccum {
  /// <summary>Strings of C, which are UTF-8 and end with a NUL.</summary>
  internal static class Text {
    private static readonly UTF8Encoding Strict = new UTF8Encoding(false, true);

    internal static byte[] Encode(string text) {
      if (text == null) return null;
      if (text.IndexOf('\0') >= 0) {
        throw GradAccumException.Invalid(
            "the text \"" + text.Replace("\0", "\\0") + "\" contains a NUL, where a text of C would end");
      }
      try {
        byte[] bytes = new byte[Strict.GetByteCount(text) + 1];
        Strict.GetBytes(text, 0, text.Length, bytes, 0);
        return bytes;
      } catch (EncoderFallbackException) {
        throw GradAccumException.Invalid("a text contains half of a surrogate pair, which has no UTF-8");
      }
    }

    internal static string Decode(IntPtr text) {
      if (text == IntPtr.Zero) return null;
      int size = 0;
      while (Marshal.ReadByte(text, size) != 0) ++size;
      byte[] bytes = new byte[size];
      Marshal.Copy(text, bytes, 0, size);
      return Encoding.UTF8.GetString(bytes);
    }
  }
}
