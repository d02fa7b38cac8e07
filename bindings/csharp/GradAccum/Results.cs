// SPDX-License-Identifier: Apache-2.0
// What results have beyond the header: the rest is generated.
namespace GradAccum {
  public sealed partial class ParamInfo {
    private long[] shape;

    private void ReadArrays(ga_param_info native) {
      shape = new long[native.rank];
      for (int axis = 0; axis < shape.Length; ++axis) shape[axis] = native.dimension(axis);
    }

    /// <summary>Its dimensions.</summary>
    public long[] Shape {
      get { return (long[])shape.Clone(); }
    }

    // Elements of a row, which is what dimension 0 counts.
    internal long RowLength {
      get {
        long length = 1;
        for (int axis = 1; axis < shape.Length; ++axis) length *= shape[axis];
        return length;
      }
    }

    internal long RowCount {
      get { return shape.Length == 0 ? 1 : shape[0]; }
    }
  }
}
