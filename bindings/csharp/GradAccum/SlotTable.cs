// SPDX-License-Identifier: Apache-2.0
using System;
using System.Collections.Generic;
using System.Runtime.InteropServices;

namespace GradAccum {
  /// <summary>What the library says of the gradients of a context, for checks of their lengths.</summary>
  internal sealed class SlotTable {
    private readonly long[] bytes;    // of a gradient
    private readonly DType[] dtypes;  // Default: there are several in a block, or the parameter is removed
    private readonly int[][] paramsOf;
    private readonly ParamInfo[] infos;  // null: removed

    internal SlotTable(Context owner, IntPtr context, int slotCount, int paramCount) {
      bytes = new long[slotCount];
      dtypes = new DType[slotCount];
      infos = new ParamInfo[paramCount];
      List<int>[] lists = new List<int>[slotCount];
      for (int slot = 0; slot < slotCount; ++slot) lists[slot] = new List<int>();
      for (int param = 0; param < paramCount; ++param) {
        ParamInfo info;
        try {
          info = owner.Describe(context, param);
        } catch (GradAccumException exception) {
          if (exception.Status != Status.InvalidArgument) throw;
          continue;
        }
        infos[param] = info;
        int size = DTypes.Size(info.GradientDType);
        bytes[info.Slot] = Math.Max(bytes[info.Slot], (info.Offset + info.Count) * size);
        dtypes[info.Slot] = lists[info.Slot].Count == 0 || dtypes[info.Slot] == info.GradientDType
                                ? info.GradientDType
                                : DType.Default;
        lists[info.Slot].Add(param);
      }
      paramsOf = new int[slotCount][];
      for (int slot = 0; slot < slotCount; ++slot) paramsOf[slot] = lists[slot].ToArray();
    }

    internal int Length {
      get { return bytes.Length; }
    }

    internal DType DTypeOf(int slot) {
      return dtypes[slot];
    }

    internal ParamInfo Info(int param) {
      return param >= 0 && param < infos.Length ? infos[param] : null;
    }

    internal void Require(int slot, ref Tensor gradient) {
      if (gradient.IsNone || paramsOf[slot].Length == 0) return;
      if (dtypes[slot] != DType.Default && gradient.DType != dtypes[slot]) {
        throw GradAccumException.Invalid(Name(slot) + ": gradient has dtype " + gradient.DType + ", expected " + dtypes[slot]);
      }
      int size = DTypes.Size(gradient.DType);
      long expected = bytes[slot] / size + (bytes[slot] % size == 0 ? 0 : 1);
      if (gradient.Length < expected) {
        throw GradAccumException.Invalid(Name(slot) + ": gradient has " + gradient.Length + " elements, fewer than the " +
                                         expected + " expected");
      }
    }

    private string Name(int slot) {
      string name = "parameter \"" + infos[paramsOf[slot][0]].Name + "\"";
      return paramsOf[slot].Length > 1 ? "the block that begins with " + name : name;
    }
  }

  /// <summary>Checks of lengths, before C sees an address.</summary>
  internal static class Lengths {
    internal static long Product(string what, params long[] factors) {
      long product = 1;
      bool empty = false;
      foreach (long factor in factors) {
        if (factor < 0) throw GradAccumException.Invalid(what + " has a dimension of " + factor);
        empty |= factor == 0;
      }
      if (empty) return 0;
      foreach (long factor in factors) {
        if (product > long.MaxValue / factor) throw GradAccumException.Invalid(what + " has 2^63 elements or more");
        product *= factor;
      }
      return product;
    }

    internal static long Sum(string what, long first, long second) {
      if (first > long.MaxValue - second) throw GradAccumException.Invalid(what + " ends beyond 2^63 elements");
      return first + second;
    }

    internal static void Require(string what, Tensor tensor, long count) {
      if (tensor.Length < count) {
        throw GradAccumException.Invalid(what + " has " + tensor.Length + " elements, fewer than the " + count + " expected");
      }
    }

    internal static void Require(string what, Tensor tensor, long count, DType dtype) {
      if (tensor.IsNone) throw GradAccumException.Invalid(what + " is missing; " + count + " elements were expected");
      if (tensor.DType != dtype) {
        throw GradAccumException.Invalid(what + " has dtype " + tensor.DType + ", expected " + dtype);
      }
      Require(what, tensor, count);
    }
  }

  /// <summary>Addresses of spans.</summary>
  internal static class Spans {
    internal static ref byte Address<T>(ReadOnlySpan<T> span) where T : struct {
      // Of the first element alone: the bytes of all may be more than a span counts.
      return ref MemoryMarshal.GetReference(MemoryMarshal.AsBytes(span.Slice(0, Math.Min(span.Length, 1))));
    }

    // An empty span may have no address.
    internal static Tensor Tensor(IntPtr address, long length, DType dtype) {
      return length == 0 ? default(Tensor) : new Tensor(address, length, dtype);
    }
  }
}
