// SPDX-License-Identifier: Apache-2.0
using System;
using System.Runtime.InteropServices;

namespace GradAccum {
  /// <summary>
  /// The memory of a tensor: an array or a part of one, or an address with a length. An array is pinned
  /// for as long as the library keeps its address; memory at an address is the program's to keep in
  /// place. <c>default(Tensor)</c> is no tensor: in a list of gradients, a parameter without one.
  /// </summary>
  public struct Tensor {
    internal readonly object Owner;    // an array to pin, an IPinnedArray, or null: only an address
    internal readonly IntPtr Address;  // 0 for an array to pin
    private readonly long start;       // elements

    /// <summary>Memory at an address, of the host or of a device.</summary>
    /// <param name="address">The address of the first element.</param>
    /// <param name="length">How many elements there are.</param>
    /// <param name="dtype">Their type.</param>
    public Tensor(IntPtr address, long length, DType dtype) : this(null, address, 0, length, dtype) {
      if (DTypes.Size(dtype) == 0) throw GradAccumException.Invalid("a tensor has no dtype " + (int)dtype);
      if (length < 0) throw GradAccumException.Invalid("a tensor has a length of " + length);
      if (address == IntPtr.Zero && length > 0) {
        throw GradAccumException.Invalid("a tensor of " + length + " elements has the address 0");
      }
    }

    internal Tensor(IPinnedArray owner, IntPtr address, long length, DType dtype)
        : this(owner, address, 0, length, dtype) {}

    private Tensor(Array array, long start, long length, DType dtype)
        : this(array, IntPtr.Zero, start, length, dtype) {
      if (array == null) throw new ArgumentNullException("array");
      if (start < 0 || length < 0 || start > array.LongLength || length > array.LongLength - start) {
        throw GradAccumException.Invalid("elements " + start + " to " + start + " + " + length +
                                         " are not within an array of " + array.LongLength);
      }
    }

    private Tensor(object owner, IntPtr address, long start, long length, DType dtype) {
      Owner = owner;
      Address = address;
      this.start = start;
      Length = length;
      DType = dtype;
    }

    /// <summary>How many elements there are.</summary>
    public long Length { get; }

    /// <summary>The type of the elements; <see cref="GradAccum.DType.Default"/> for no tensor.</summary>
    public DType DType { get; }

    internal bool IsNone {
      get { return DType == DType.Default; }
    }

    internal IntPtr AddressIn(IntPtr pinned) {
      return new IntPtr(pinned.ToInt64() + start * DTypes.Size(DType));
    }

    /// <summary>A part of an array of numbers whose type says their dtype.</summary>
    /// <typeparam name="T">float, double, int or long.</typeparam>
    /// <param name="array">The array.</param>
    /// <param name="start">The index of the first element.</param>
    /// <param name="length">How many elements there are.</param>
    /// <returns>The tensor.</returns>
    public static Tensor Of<T>(T[] array, long start, long length) where T : struct {
      return new Tensor((Array)array, start, length, DTypes.Of<T>());
    }

    /// <summary>IEEE binary16 in an array.</summary>
    /// <param name="bits">The bits of the numbers.</param>
    /// <returns>The tensor.</returns>
    public static Tensor F16(ushort[] bits) {
      return new Tensor((Array)bits, 0, bits == null ? 0 : bits.LongLength, DType.F16);
    }

    /// <summary>IEEE binary16 in a part of an array.</summary>
    /// <param name="bits">The bits of the numbers.</param>
    /// <param name="start">The index of the first element.</param>
    /// <param name="length">How many elements there are.</param>
    /// <returns>The tensor.</returns>
    public static Tensor F16(ushort[] bits, long start, long length) {
      return new Tensor((Array)bits, start, length, DType.F16);
    }

    /// <summary>Upper halves of floats in an array.</summary>
    /// <param name="bits">The bits of the numbers.</param>
    /// <returns>The tensor.</returns>
    public static Tensor BF16(ushort[] bits) {
      return new Tensor((Array)bits, 0, bits == null ? 0 : bits.LongLength, DType.BF16);
    }

    /// <summary>Upper halves of floats in a part of an array.</summary>
    /// <param name="bits">The bits of the numbers.</param>
    /// <param name="start">The index of the first element.</param>
    /// <param name="length">How many elements there are.</param>
    /// <returns>The tensor.</returns>
    public static Tensor BF16(ushort[] bits, long start, long length) {
      return new Tensor((Array)bits, start, length, DType.BF16);
    }

    /// <summary>Bytes in an array: the codes of state in 8 bits.</summary>
    /// <param name="codes">The bytes.</param>
    /// <returns>The tensor.</returns>
    public static Tensor U8(byte[] codes) {
      return new Tensor((Array)codes, 0, codes == null ? 0 : codes.LongLength, DType.U8);
    }

    /// <summary>A whole array of floats; null is no tensor.</summary>
    /// <param name="array">The array.</param>
    public static implicit operator Tensor(float[] array) {
      return array == null ? default(Tensor) : new Tensor((Array)array, 0, array.LongLength, DType.F32);
    }

    /// <summary>A whole array of doubles; null is no tensor.</summary>
    /// <param name="array">The array.</param>
    public static implicit operator Tensor(double[] array) {
      return array == null ? default(Tensor) : new Tensor((Array)array, 0, array.LongLength, DType.F64);
    }

    /// <summary>A whole array of indices; null is no tensor.</summary>
    /// <param name="array">The array.</param>
    public static implicit operator Tensor(int[] array) {
      return array == null ? default(Tensor) : new Tensor((Array)array, 0, array.LongLength, DType.I32);
    }

    /// <summary>A whole array of indices; null is no tensor.</summary>
    /// <param name="array">The array.</param>
    public static implicit operator Tensor(long[] array) {
      return array == null ? default(Tensor) : new Tensor((Array)array, 0, array.LongLength, DType.I64);
    }

    /// <summary>A part of an array of floats.</summary>
    /// <param name="part">The part.</param>
    public static implicit operator Tensor(ArraySegment<float> part) {
      return part.Array == null ? default(Tensor) : new Tensor((Array)part.Array, part.Offset, part.Count, DType.F32);
    }

    /// <summary>A part of an array of doubles.</summary>
    /// <param name="part">The part.</param>
    public static implicit operator Tensor(ArraySegment<double> part) {
      return part.Array == null ? default(Tensor) : new Tensor((Array)part.Array, part.Offset, part.Count, DType.F64);
    }
  }

  /// <summary>
  /// An array that stays pinned until it is disposed of. The other arrays are pinned by every call anew,
  /// which takes some tens of nanoseconds for each.
  /// </summary>
  /// <typeparam name="T">float, double, int or long, or ushort for the two dtypes of 16 bits.</typeparam>
  public sealed class PinnedArray<T> : IPinnedArray, IDisposable where T : struct {
    private GCHandle handle;
    private readonly Tensor tensor;

    /// <summary>Pins an array whose type says its dtype.</summary>
    /// <param name="array">The array.</param>
    public PinnedArray(T[] array) : this(array, DTypes.Of<T>()) {}

    /// <summary>Pins an array.</summary>
    /// <param name="array">The array.</param>
    /// <param name="dtype">The type of its elements.</param>
    public PinnedArray(T[] array, DType dtype) {
      if (array == null) throw new ArgumentNullException("array");
      DTypes.RequireSize<T>(dtype);
      Array = array;
      handle = GCHandle.Alloc(array, GCHandleType.Pinned);
      tensor = new Tensor(this, handle.AddrOfPinnedObject(), array.LongLength, dtype);
    }

    /// <summary>Unpins the array if it was not disposed of.</summary>
    ~PinnedArray() {
      if (handle.IsAllocated) handle.Free();
    }

    /// <summary>The array.</summary>
    public T[] Array { get; }

    Array IPinnedArray.Managed {
      get { return Array; }
    }

    /// <summary>
    /// The memory of the array, for the library. The pinned array must not be disposed of during a call;
    /// where the library keeps the address longer, the context pins the array itself.
    /// </summary>
    public Tensor Tensor {
      get {
        if (!handle.IsAllocated) throw new ObjectDisposedException("PinnedArray");
        return tensor;
      }
    }

    /// <summary>The memory of the array, as <see cref="Tensor"/>.</summary>
    /// <param name="array">The pinned array; null is no tensor.</param>
    public static implicit operator Tensor(PinnedArray<T> array) {
      return array == null ? default(Tensor) : array.Tensor;
    }

    /// <summary>Unpins the array.</summary>
    public void Dispose() {
      if (handle.IsAllocated) handle.Free();
      GC.SuppressFinalize(this);
    }
  }

  internal interface IPinnedArray {
    Array Managed { get; }
  }

  internal static class DTypes {
    // Bytes of an element; 0: there is no such type.
    internal static int Size(DType dtype) {
      switch (dtype) {
        case DType.F32:
        case DType.I32:
          return 4;
        case DType.F64:
        case DType.I64:
          return 8;
        case DType.F16:
        case DType.BF16:
          return 2;
        case DType.U8:
          return 1;
        default:
          return 0;
      }
    }

    internal static DType Of<T>() where T : struct {
      if (typeof(T) == typeof(float)) return DType.F32;
      if (typeof(T) == typeof(double)) return DType.F64;
      if (typeof(T) == typeof(int)) return DType.I32;
      if (typeof(T) == typeof(long)) return DType.I64;
      throw GradAccumException.Invalid("the type " + typeof(T).Name + " does not say its dtype");
    }

    // The dtype of T where this one is expected: a ushort may be either of the dtypes of 16 bits, and a byte a code.
    internal static DType Of<T>(DType expected) where T : struct {
      if (typeof(T) == typeof(ushort) && Size(expected) == 2) return expected;
      if (typeof(T) == typeof(byte) && expected == DType.U8) return expected;
      return Of<T>();
    }

    internal static void RequireSize<T>(DType dtype) where T : struct {
      if (dtype == Of<T>(dtype)) return;
      throw GradAccumException.Invalid("elements of type " + typeof(T).Name + " are not of dtype " + dtype);
    }
  }

  /// <summary>Keeps an array in place until every user of its address has disposed of it.</summary>
  internal sealed class Pin : IDisposable {
    private GCHandle handle;
    private int users = 1;

    internal Pin(Tensor tensor) {
      IPinnedArray pinned = tensor.Owner as IPinnedArray;
      Array array = pinned != null ? pinned.Managed : tensor.Owner as Array;
      if (array == null) {
        Address = tensor.Address;
      } else {
        handle = GCHandle.Alloc(array, GCHandleType.Pinned);
        Address = tensor.AddressIn(handle.AddrOfPinnedObject());
      }
    }

    internal IntPtr Address { get; }

    internal void Share() {
      ++users;
    }

    public void Dispose() {
      if (--users == 0 && handle.IsAllocated) handle.Free();
    }
  }
}
