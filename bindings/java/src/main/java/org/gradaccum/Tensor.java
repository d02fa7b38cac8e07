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
import java.util.Collections;
import java.util.EnumSet;

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
    Kind kind = Kind.of(buffer);
    if (kind.dtypes.size() != 1) {
      throw refuse(
          role,
          null,
          "a %s does not tell the dtype of its elements; use Tensor.of(buffer, dtype)",
          kind.type);
    }
    return kind.dtypes.iterator().next();
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
      throw refuse(role, owner, "the dtype was %s, expected %s", dtype, expected);
    }
    if (buffer != null) {
      return address(buffer, expected, count, written, role, owner);
    }
    check(bytes, count, expected, role, owner);
    checkAligned(address, expected, role, owner);
    return address;
  }

  /** What the types of buffers hold. */
  private enum Kind {
    FLOAT("FloatBuffer", 4, Dtype.F32),
    DOUBLE("DoubleBuffer", 8, Dtype.F64),
    INT("IntBuffer", 4, Dtype.I32),
    LONG("LongBuffer", 8, Dtype.I64),
    SHORT("ShortBuffer", 2, Dtype.F16, Dtype.BF16),
    BYTE("ByteBuffer", 1, Dtype.values()),
    CHAR("CharBuffer", 2);  // a char is no number

    final String type;
    final int unit;  // bytes
    final EnumSet<Dtype> dtypes = EnumSet.noneOf(Dtype.class);

    Kind(String type, int unit, Dtype... dtypes) {
      this.type = type;
      this.unit = unit;
      Collections.addAll(this.dtypes, dtypes);
    }

    static Kind of(Buffer buffer) {
      return buffer instanceof FloatBuffer ? FLOAT
          : buffer instanceof ByteBuffer ? BYTE
          : buffer instanceof ShortBuffer ? SHORT
          : buffer instanceof DoubleBuffer ? DOUBLE
          : buffer instanceof IntBuffer ? INT
          : buffer instanceof LongBuffer ? LONG
          : CHAR;
    }

    ByteOrder order(Buffer buffer) {
      return switch (this) {
        case FLOAT -> ((FloatBuffer) buffer).order();
        case BYTE -> ((ByteBuffer) buffer).order();
        case SHORT -> ((ShortBuffer) buffer).order();
        case DOUBLE -> ((DoubleBuffer) buffer).order();
        case INT -> ((IntBuffer) buffer).order();
        case LONG -> ((LongBuffer) buffer).order();
        case CHAR -> ByteOrder.nativeOrder();
      };
    }
  }

  static long address(
      Buffer buffer, Dtype expected, long count, boolean written, String role, Object owner) {
    Kind kind = Kind.of(buffer);
    if (!buffer.isDirect()) {
      throw refuse(
          role, owner, "the %s is on the heap of Java, expected a direct buffer", kind.type);
    }
    if (written && buffer.isReadOnly()) {
      throw refuse(role, owner, "the %s is read-only, but it is written", kind.type);
    }
    if (!kind.dtypes.contains(expected)) {
      throw refuse(role, owner, "the %s does not hold elements of %s", kind.type, expected);
    }
    if (kind.order(buffer) != ByteOrder.nativeOrder() && expected.bytes() > 1) {
      throw refuse(
          role,
          owner,
          "the %s has the byte order %s, expected that of the machine: order(ByteOrder.nativeOrder())",
          kind.type,
          kind.order(buffer));
    }
    check((long) buffer.remaining() * kind.unit, count, expected, role, owner);
    long address = Raw.buffer_address(buffer) + (long) buffer.position() * kind.unit;
    checkAligned(address, expected, role, owner);
    return address;
  }

  /** The bytes between position and limit. */
  static long bytes(Buffer buffer) {
    return (long) buffer.remaining() * Kind.of(buffer).unit;
  }

  private static void check(long bytes, long count, Dtype dtype, String role, Object owner) {
    int size = dtype.bytes();
    // Not count * size, which may be more than a long holds.
    if (bytes % size != 0 || bytes / size != count) {
      throw refuse(
          role,
          owner,
          "there are %s bytes between position and limit, expected %s elements of %s",
          bytes,
          count,
          dtype);
    }
  }

  private static void checkAligned(long address, Dtype dtype, String role, Object owner) {
    if (address % dtype.bytes() != 0) {
      throw refuse(
          role,
          owner,
          "the address is no multiple of %s, the size of an element of %s",
          dtype.bytes(),
          dtype);
    }
  }

  /** What is wrong with a tensor: a format with its values. */
  static IllegalArgumentException refuse(String role, Object owner, String why, Object... values) {
    return new IllegalArgumentException(
        (owner == null ? role : owner + ": " + role) + ": " + String.format(why, values));
  }

  static IllegalArgumentException refuseFloats(Param param, Dtype dtype) {
    return refuse("gradient", param, "a float[] does not hold elements of %s", dtype);
  }

  /** The number of elements of a tensor with these dimensions. */
  static long elements(String role, Object owner, long... shape) {
    long count = 1;
    boolean overflow = false;
    for (int axis = 0; axis < shape.length; ++axis) {
      if (shape[axis] < 0) {
        throw refuse(role, owner, "dimension %s was %s, expected >= 0", axis, shape[axis]);
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
