// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.lang.ref.Reference;
import java.nio.ByteBuffer;
import java.util.List;
import java.util.function.LongConsumer;

/**
 * An open micro-batch, whose gradients come by part. Made by {@link Context#beginMicroBatch}, for a
 * try statement with resources:
 *
 * <pre>{@code
 * try (MicroBatch micro = context.beginMicroBatch(samples)) {
 *   backwardOfBias();
 *   micro.accumulate(b, db);
 *   backwardOfWeight();
 *   micro.accumulate(w, dw);
 *   micro.end();
 * }
 * }</pre>
 *
 * <p>If an exception leaves the block before {@link #end}, the window is discarded: half a
 * micro-batch never reaches a step.
 */
public final class MicroBatch extends MicroBatchMembers implements AutoCloseable {
  private final ContextWindow context;
  private boolean open = true;

  MicroBatch(ContextWindow context) {
    this.context = context;
  }

  private long enter() {
    long c = context.enter();
    if (!open) {
      context.exit();
      throw new IllegalStateException("the micro-batch has ended");
    }
    return c;
  }

  private long enter(Param param) {
    context.checkOwn(Check.notNull(param, "param"));
    return enter();
  }

  /** Makes a call. What it uses stays reachable until it has returned. */
  private void run(LongConsumer body, Object... used) {
    long c = enter();
    try {
      body.accept(c);
    } finally {
      context.exit();
      Reference.reachabilityFence(used);
    }
  }

  /** Makes a call on the argument of that name, which belongs to the context. */
  void run(String name, ContextObject object, LongConsumer body, Object... used) {
    context.checkOwn(Check.notNull(object, name));
    run(body, used);
  }

  /**
   * Adds a gradient to one parameter; several add up.
   *
   * @param param the parameter
   * @param gradient as many elements. With {@link Config.Nonfinite#DROP_MICRO} and {@link
   *     Clip.When#MICRO} it is read by {@link #end}, and the context keeps it reachable
   */
  public void accumulate(Param param, Tensor gradient) {
    Check.notNull(gradient, "gradient");
    long c = enter(param);
    try {
      long address =
          gradient.address(
              param.gradientDtype(),
              param.count(),
              context.kept().areLent(),
              "gradient",
              param);
      Raw.ga_accumulate_part(c, param.id(), address);
      context.kept().added(c, gradient, false);
    } finally {
      context.exit();
      Reference.reachabilityFence(gradient);
    }
  }

  /**
   * Adds a gradient to one parameter, copied through a buffer of the context's own.
   *
   * @param param the parameter, whose gradient is F32
   * @param gradient as many elements
   */
  public void accumulate(Param param, float[] gradient) {
    Check.notNull(gradient, "gradient");
    long c = enter(param);
    try {
      if (param.gradientDtype() != Dtype.F32) {
        throw Tensor.refuseFloats(param, param.gradientDtype());
      }
      ByteBuffer copy = context.kept().copy(gradient);
      long address = Tensor.address(copy, Dtype.F32, param.count(), false, "gradient", param);
      Raw.ga_accumulate_part(c, param.id(), address);
      context.kept().added(c, copy, true);
    } finally {
      context.exit();
    }
  }

  /**
   * Adds a gradient that has only some rows. Needs {@link ParamOptions#rows}.
   *
   * @param param the parameter
   * @param indices the rows, I32 or I64, as an {@link java.nio.IntBuffer} or {@link
   *     java.nio.LongBuffer} is, in any order; repeated ones add up
   * @param values a row for each index
   */
  public void accumulateRows(Param param, Tensor indices, Tensor values) {
    Check.notNull(indices, "indices");
    Check.notNull(values, "values");
    run("param", param, c -> {
      Dtype dtype = indices.dtype("indices");
      if (dtype != Dtype.I32 && dtype != Dtype.I64) {
        throw Tensor.refuse("indices", param, "the dtype was %s, expected I32 or I64", dtype);
      }
      long count = indices.elements(dtype);
      List<Long> shape = param.shape();
      long[] block = shape.stream().mapToLong(Long::longValue).toArray();
      if (block.length > 0) {
        block[0] = count;
      }
      long elements = Tensor.elements("values", param, block);
      Raw.ga_accumulate_rows(
          c,
          param.id(),
          indices.address(dtype, count, false, "indices", param),
          dtype.value(),
          count,
          values.address(param.gradientDtype(), elements, false, "values", param));
      context.kept().added(c, List.of(indices, values), false);
    }, indices, values);
  }

  /**
   * Adds the matrix product A B to a parameter that is taken as a matrix [m, n], m being its first
   * dimension: the weight gradient of a dense layer, which then is never in memory as a whole.
   *
   * @param param the parameter
   * @param k columns of A and rows of B, after transposition
   * @param a A, [m, k] after transposition; F32, F16 or BF16
   * @param lda elements from row to row of A as stored
   * @param transposeA whether A is stored as [k, m]
   * @param b B, [k, n] after transposition, of the same dtype
   * @param ldb elements from row to row of B as stored
   * @param transposeB whether B is stored as [n, k]
   * @throws GradAccumException {@link Status#UNSUPPORTED}: no library for matrix products could be
   *     loaded; everything else keeps working
   */
  public void accumulateMatmul(
      Param param,
      long k,
      Tensor a,
      long lda,
      Transpose transposeA,
      Tensor b,
      long ldb,
      Transpose transposeB) {
    Check.notNull(a, "a");
    Check.notNull(transposeA, "transposeA");
    Check.notNull(b, "b");
    Check.notNull(transposeB, "transposeB");
    run("param", param, c -> {
      Dtype dtype = a.dtype("a");
      long m = param.shape().isEmpty() ? 1 : param.shape().get(0);
      long n = m == 0 ? 0 : param.count() / m;
      boolean turnA = transposeA == Transpose.TRANSPOSE;
      boolean turnB = transposeB == Transpose.TRANSPOSE;
      Raw.ga_accumulate_matmul(
          c,
          param.id(),
          k,
          matrix(a, dtype, turnA ? k : m, turnA ? m : k, lda, "a", param),
          lda,
          transposeA.value(),
          matrix(b, dtype, turnB ? n : k, turnB ? k : n, ldb, "b", param),
          ldb,
          transposeB.value(),
          dtype.value());
      context.kept().added(c, List.of(a, b), false);
    }, a, b);
  }

  // A matrix may be part of a larger one, so there may be more elements than it needs.
  private static long matrix(
      Tensor matrix, Dtype dtype, long rows, long columns, long stride, String role, Param param) {
    long count = 0;
    if (rows < 0 || columns < 0 || stride < columns) {
      throw Tensor.refuse(
          role,
          param,
          "a matrix of %s rows and %s columns cannot have %s elements from row to row",
          rows,
          columns,
          stride);
    }
    if (rows > 0 && columns > 0) {
      // All rows, less what follows the columns of the last one.
      count = Tensor.elements(role, param, rows, stride) - (stride - columns);
    }
    return matrix.address(dtype, Math.max(count, matrix.elements(dtype)), false, role, param);
  }

  /**
   * Hands out the accumulator of a parameter, whose every element is then to be written, for a
   * kernel of the program's own. Until {@link Accumulator#release}, no other call for this
   * parameter is legal, nor {@link #end}.
   *
   * @param param the parameter
   * @return the accumulator
   */
  public Accumulator acquire(Param param) {
    long c = enter(param);
    try (ga_accumulator fields = new ga_accumulator()) {
      Raw.ga_accumulator_acquire(c, param.id(), fields);
      return new Accumulator(param, fields);
    } finally {
      context.exit();
    }
  }

  /** Closes the micro-batch: its gradients are in the window. */
  public void end() {
    finish(Raw::ga_micro_end);
  }

  /**
   * Drops the micro-batch as if it had never been opened, as long as nothing of it was added.
   *
   * @throws GradAccumException {@link Status#INVALID_STATE}: something has been added; {@link
   *     Context#discard} drops the window
   */
  public void abort() {
    finish(Raw::ga_micro_abort);
  }

  private void finish(LongConsumer how) {
    run(c -> {
      how.accept(c);
      open = false;
      context.kept().release(c);
      context.move();
    });
  }

  /**
   * Discards the window if the micro-batch was neither ended nor aborted. A second call does
   * nothing.
   */
  @Override
  public void close() {
    if (open && !context.isClosed()) {
      context.discard();
    }
    open = false;
  }
}
