// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.nio.Buffer;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.DoubleBuffer;
import java.nio.FloatBuffer;
import java.nio.IntBuffer;
import java.nio.LongBuffer;
import java.nio.ShortBuffer;

/**
 * Memory of the program that the library reads or writes in place: the elements of a direct buffer
 * from its position to its limit, or an address with a length, such as a {@code MemorySegment}
 * gives.
 *
 * <p>A {@link FloatBuffer} holds F32, a {@link DoubleBuffer} F64, a {@link ShortBuffer} F16 or
 * BF16, an {@link IntBuffer} I32, a {@link LongBuffer} I64, and a {@link ByteBuffer} any of these,
 * or U8. All buffers are direct and in the byte order of the machine, which {@code
 * ByteBuffer.allocateDirect(bytes).order(ByteOrder.nativeOrder())} makes.
 */
public final class Tensor {
  private final Buffer buffer;
  private final long address;
  private final long bytes;
  private final Dtype dtype;

  private Tensor(Buffer buffer, long address, long bytes, Dtype dtype) {
    this.buffer = buffer;
    this.address = address;
    this.bytes = bytes;
    this.dtype = dtype;
  }

  /**
   * The elements of a buffer, whose type gives their dtype as far as it can.
   *
   * @param buffer a direct buffer, kept reachable as long as the library uses its memory
   * @return the tensor
   */
  public static Tensor of(Buffer buffer) {
    return of("buffer", buffer);
  }

  /** As above, where a parameter of this name is the buffer. */
  static Tensor of(String role, Buffer buffer) {
    return new Tensor(Check.notNull(buffer, role), 0, 0, null);
  }

  /**
   * The elements of a buffer.
   *
   * @param buffer a direct buffer, kept reachable as long as the library uses its memory
   * @param dtype the type of its elements
   * @return the tensor
   */
  public static Tensor of(Buffer buffer, Dtype dtype) {
    return new Tensor(
        Check.notNull(buffer, "buffer"), 0, 0, Check.notNull(dtype, "dtype"));
  }

  /**
   * Elements at an address. The program keeps the memory in place as long as the library uses it.
   *
   * @param address of the first element, in the memory of the device of the context
   * @param bytes the length of the memory
   * @param dtype the type of the elements
   * @return the tensor
   */
  public static Tensor ofAddress(long address, long bytes, Dtype dtype) {
    if (bytes < 0) {
      throw new IllegalArgumentException("bytes was " + bytes + ", expected >= 0");
    }
    if (address == 0 && bytes > 0) {
      throw new IllegalArgumentException("address was 0, but it has " + bytes + " bytes");
    }
    return new Tensor(null, address, bytes, Check.notNull(dtype, "dtype"));
  }

  /** What the caller has to keep reachable: the buffer, or nothing. */
  Buffer buffer() {
    return buffer;
  }

  /** The dtype that was given, or that of the buffer; refuses a buffer that has none. */
  Dtype dtype(String role) {
    if (dtype != null) {
      return dtype;
    }
    Dtype only = onlyDtype(buffer);
    if (only == null) {
      throw new IllegalArgumentException(
          role
              + ": a "
              + kind(buffer)
              + " does not tell the dtype of its elements; use Tensor.of(buffer, dtype)");
    }
    return only;
  }

  /** The dtype of an array of state in it: that of the array, or F32 for numbers of codes. */
  Dtype dtypeOf(StateInfo array) {
    boolean hasNumbers = dtype == Dtype.F32 || (dtype == null && buffer instanceof FloatBuffer);
    return array.dtype() == Dtype.U8 && hasNumbers ? Dtype.F32 : array.dtype();
  }

  /** The elements of the dtype between position and limit. */
  long elements(Dtype of) {
    return (buffer == null ? bytes : bytes(buffer)) / of.bytes();
  }

  /**
   * The address of exactly {@code count} elements.
   *
   * @param owner whose tensor it is, for messages, or null
   */
  long address(Dtype expected, long count, boolean written, String role, Object owner) {
    if (dtype != null && dtype != expected) {
      throw refuse(role, owner, "the dtype was " + dtype + ", expected " + expected);
    }
    if (buffer != null) {
      return address(buffer, expected, count, written, role, owner);
    }
    check(bytes, count, expected, role, owner);
    if (address % expected.bytes() != 0) {
      throw misaligned(expected, role, owner);
    }
    return address;
  }

  static long address(
      Buffer buffer, Dtype expected, long count, boolean written, String role, Object owner) {
    if (!buffer.isDirect()) {
      throw refuse(
          role,
          owner,
          "the " + kind(buffer) + " is on the heap of Java, expected a direct buffer");
    }
    if (written && buffer.isReadOnly()) {
      throw refuse(role, owner, "the " + kind(buffer) + " is read-only, but it is written");
    }
    int size = expected.bytes();
    int unit = unit(buffer);
    boolean fits =
        unit == 1
            || (unit == size
                && (buffer instanceof FloatBuffer
                    ? expected == Dtype.F32
                    : buffer instanceof DoubleBuffer
                        ? expected == Dtype.F64
                        : buffer instanceof ShortBuffer
                            ? expected == Dtype.F16 || expected == Dtype.BF16
                            : buffer instanceof IntBuffer
                                ? expected == Dtype.I32
                                : expected == Dtype.I64 && buffer instanceof LongBuffer));
    if (!fits) {
      throw refuse(role, owner, "the " + kind(buffer) + " does not hold elements of " + expected);
    }
    if (order(buffer) != ByteOrder.nativeOrder() && size > 1) {
      throw refuse(
          role,
          owner,
          "the "
              + kind(buffer)
              + " has the byte order "
              + order(buffer)
              + ", expected that of the machine: order(ByteOrder.nativeOrder())");
    }
    check((long) buffer.remaining() * unit, count, expected, role, owner);
    long address = Raw.buffer_address(buffer) + (long) buffer.position() * unit;
    if (address % size != 0) {
      throw misaligned(expected, role, owner);
    }
    return address;
  }

  /** The bytes between position and limit. */
  static long bytes(Buffer buffer) {
    return (long) buffer.remaining() * unit(buffer);
  }

  /** The dtype of a buffer that can hold only one, or null. */
  private static Dtype onlyDtype(Buffer buffer) {
    return buffer instanceof FloatBuffer
        ? Dtype.F32
        : buffer instanceof DoubleBuffer
            ? Dtype.F64
            : buffer instanceof IntBuffer
                ? Dtype.I32
                : buffer instanceof LongBuffer ? Dtype.I64 : null;
  }

  // A char is no number: a CharBuffer holds nothing of the library's.
  private static int unit(Buffer buffer) {
    return buffer instanceof FloatBuffer || buffer instanceof IntBuffer
        ? 4
        : buffer instanceof ByteBuffer
            ? 1
            : buffer instanceof DoubleBuffer || buffer instanceof LongBuffer ? 8 : 2;
  }

  private static ByteOrder order(Buffer buffer) {
    return buffer instanceof FloatBuffer floats
        ? floats.order()
        : buffer instanceof ByteBuffer all
            ? all.order()
            : buffer instanceof ShortBuffer shorts
                ? shorts.order()
                : buffer instanceof DoubleBuffer doubles
                    ? doubles.order()
                    : buffer instanceof IntBuffer ints
                        ? ints.order()
                        : buffer instanceof LongBuffer longs
                            ? longs.order()
                            : ByteOrder.nativeOrder();
  }

  private static String kind(Buffer buffer) {
    return onlyDtype(buffer) != null
        ? switch (onlyDtype(buffer)) {
          case F32 -> "FloatBuffer";
          case F64 -> "DoubleBuffer";
          case I32 -> "IntBuffer";
          default -> "LongBuffer";
        }
        : buffer instanceof ByteBuffer
            ? "ByteBuffer"
            : buffer instanceof ShortBuffer ? "ShortBuffer" : "CharBuffer";
  }

  private static void check(long bytes, long count, Dtype dtype, String role, Object owner) {
    int size = dtype.bytes();
    // Not count * size, which may be more than a long holds.
    if (bytes % size != 0 || bytes / size != count) {
      throw refuse(
          role,
          owner,
          "there are "
              + bytes
              + " bytes between position and limit, expected "
              + count
              + " elements of "
              + dtype);
    }
  }

  private static IllegalArgumentException misaligned(Dtype dtype, String role, Object owner) {
    return refuse(
        role,
        owner,
        "the address is no multiple of " + dtype.bytes() + ", the size of an element of " + dtype);
  }

  static IllegalArgumentException refuse(String role, Object owner, String why) {
    return new IllegalArgumentException((owner == null ? role : owner + ": " + role) + ": " + why);
  }

  /** The number of elements of a tensor with these dimensions. */
  static long elements(String role, Object owner, long... shape) {
    long count = 1;
    boolean overflow = false;
    for (int axis = 0; axis < shape.length; ++axis) {
      if (shape[axis] < 0) {
        throw refuse(
            role, owner, "dimension " + axis + " was " + shape[axis] + ", expected >= 0");
      }
      // A product of which a factor is 0 is 0, however large the others are.
      if (shape[axis] == 0 || count == 0) {
        count = 0;
      } else if (count > Long.MAX_VALUE / 8 / shape[axis]) {
        overflow = true;
        count = 1;
      } else {
        count *= shape[axis];
      }
    }
    if (overflow && count != 0) {
      throw refuse(role, owner, "a tensor of these dimensions does not fit into memory");
    }
    return count;
  }

  @Override
  public String toString() {
    return buffer != null
        ? "Tensor of " + buffer
        : "Tensor of " + bytes + " bytes at 0x" + Long.toHexString(address);
  }
}
