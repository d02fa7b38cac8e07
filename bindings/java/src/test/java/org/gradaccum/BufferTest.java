// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import static org.gradaccum.Buffers.bytes;
import static org.gradaccum.Buffers.floats;
import static org.gradaccum.Buffers.sgd;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.Buffer;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.DoubleBuffer;
import java.nio.FloatBuffer;
import java.nio.LongBuffer;
import java.nio.ShortBuffer;
import java.util.Arrays;
import java.util.List;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;

/** What memory is taken, from where to where, and what is refused with which words. */
class BufferTest {
  private Context context;
  private Group group;
  private FloatBuffer w;
  private Param param;

  @BeforeEach
  void open() {
    context = new Context();
    group = context.addGroup(sgd(1));
    w = floats(1, 2);
    param = context.addParam(group, "w", w, 2);
  }

  @AfterEach
  void close() {
    context.close();
  }

  private void refused(Buffer gradient, String why) {
    Exception e =
        assertThrows(IllegalArgumentException.class, () -> context.accumulate(1, gradient));
    assertEquals("parameter \"w\": gradient: " + why, e.getMessage());
    assertEquals(Window.State.EMPTY, context.window().state());
    try (MicroBatch micro = context.beginMicroBatch(1)) {
      e = assertThrows(IllegalArgumentException.class, () -> micro.accumulate(param, gradient));
      assertEquals("parameter \"w\": gradient: " + why, e.getMessage());
      e =
          assertThrows(
              IllegalArgumentException.class, () -> micro.accumulate(param, Tensor.of(gradient)));
      assertEquals("parameter \"w\": gradient: " + why, e.getMessage());
    }
  }

  @Test
  void positionAndLimitAreHonoured() {
    FloatBuffer gradient = floats(9, 1, 2, 9);
    gradient.position(1).limit(3);
    context.accumulate(1, gradient);
    assertEquals(1, gradient.position());
    assertEquals(3, gradient.limit());
    context.step();
    assertArrayEquals(new float[] {0, 0}, Buffers.values(w));
  }

  @Test
  void slicesAndViewsAreHonoured() {
    context.accumulate(1, floats(9, 1, 2, 9).slice(1, 2));
    context.step();
    assertArrayEquals(new float[] {0, 0}, Buffers.values(w));
    ByteBuffer raw = bytes(16);
    raw.asFloatBuffer().put(new float[] {9, 3, 4, 9});
    context.accumulate(1, raw.position(4).limit(12));
    context.step();
    assertArrayEquals(new float[] {-3, -4}, Buffers.values(w));
    context.accumulate(1, raw.slice().asReadOnlyBuffer().order(ByteOrder.nativeOrder()));
    context.step();
    assertArrayEquals(new float[] {-6, -8}, Buffers.values(w));
  }

  @Test
  void readOnlyGradientsAreTakenAndParametersNot() {
    context.accumulate(1, floats(1, 2).asReadOnlyBuffer());
    context.step();
    assertArrayEquals(new float[] {0, 0}, Buffers.values(w));
    Exception e =
        assertThrows(
            IllegalArgumentException.class,
            () -> context.addParam(group, "v", floats(1).asReadOnlyBuffer(), 1));
    assertEquals(
        "data of parameter \"v\": the FloatBuffer is read-only, but it is written",
        e.getMessage());
    e =
        assertThrows(
            IllegalArgumentException.class, () -> param.bind(floats(1, 2).asReadOnlyBuffer()));
    assertEquals(
        "parameter \"w\": data: the FloatBuffer is read-only, but it is written", e.getMessage());
  }

  @Test
  void heapBuffersAreRefused() {
    refused(
        FloatBuffer.allocate(2),
        "the FloatBuffer is on the heap of Java, expected a direct buffer");
    refused(
        ByteBuffer.wrap(new byte[8]),
        "the ByteBuffer is on the heap of Java, expected a direct buffer");
  }

  @Test
  void theWrongByteOrderIsRefused() {
    ByteOrder other =
        ByteOrder.nativeOrder() == ByteOrder.BIG_ENDIAN
            ? ByteOrder.LITTLE_ENDIAN
            : ByteOrder.BIG_ENDIAN;
    String why =
        " has the byte order "
            + other
            + ", expected that of the machine: order(ByteOrder.nativeOrder())";
    refused(bytes(8).order(other).asFloatBuffer(), "the FloatBuffer" + why);
    refused(ByteBuffer.allocateDirect(8).order(other), "the ByteBuffer" + why);
  }

  @Test
  void theWrongLengthIsRefused() {
    for (int bytes : new int[] {0, 4, 12}) {
      refused(
          bytes(bytes).asFloatBuffer(),
          "there are " + bytes + " bytes between position and limit, expected 2 elements of F32");
    }
    refused(
        bytes(9), "there are 9 bytes between position and limit, expected 2 elements of F32");
    refused(
        floats(1, 2).position(1),
        "there are 4 bytes between position and limit, expected 2 elements of F32");
    Exception e =
        assertThrows(
            IllegalArgumentException.class,
            () -> context.accumulate(1, Tensor.ofAddress(4096, 4, Dtype.F32)));
    assertEquals(
        "parameter \"w\": gradient: there are 4 bytes between position and limit, expected 2"
            + " elements of F32",
        e.getMessage());
    e = assertThrows(IllegalArgumentException.class, () -> context.accumulate(1, new float[3]));
    assertTrue(e.getMessage().contains("there are 12 bytes"), e.getMessage());
  }

  @Test
  void misalignedMemoryIsRefused() {
    ByteBuffer raw = bytes(12);
    refused(
        raw.position(2).limit(10),
        "the address is no multiple of 4, the size of an element of F32");
    Exception e =
        assertThrows(
            IllegalArgumentException.class,
            () -> context.accumulate(1, Tensor.ofAddress(4098, 8, Dtype.F32)));
    assertTrue(e.getMessage().contains("no multiple of 4"), e.getMessage());
  }

  @Test
  void theWrongTypeIsRefused() {
    refused(bytes(16).asDoubleBuffer(), "the DoubleBuffer does not hold elements of F32");
    refused(bytes(8).asIntBuffer(), "the IntBuffer does not hold elements of F32");
    refused(bytes(8).asCharBuffer(), "the CharBuffer does not hold elements of F32");
    Exception e =
        assertThrows(
            IllegalArgumentException.class,
            () -> context.accumulate(1, Tensor.ofAddress(4096, 8, Dtype.F16)));
    assertEquals(
        "parameter \"w\": gradient: the dtype was F16, expected F32", e.getMessage());
    e =
        assertThrows(
            IllegalArgumentException.class,
            () -> context.addParam(group, "h", bytes(4).asShortBuffer(), 2));
    assertEquals(
        "data of parameter \"h\": a ShortBuffer does not tell the dtype of its elements; use"
            + " Tensor.of(buffer, dtype)",
        e.getMessage());
    e =
        assertThrows(
            IllegalArgumentException.class,
            () ->
                context.addParam(
                    group, "h", Tensor.of(floats(1, 2), Dtype.F64), null, 1));
    assertEquals(
        "data of parameter \"h\": the FloatBuffer does not hold elements of F64", e.getMessage());
  }

  @Test
  void everyDtypeIsTaken() {
    try (Context other = new Context()) {
      Group sgd = other.addGroup(sgd(1));
      DoubleBuffer doubles = bytes(8).asDoubleBuffer().put(0, 4.0);
      ShortBuffer halves = bytes(2).asShortBuffer().put(0, (short) 0x4400);  // 4 as F16
      ShortBuffer brains = bytes(2).asShortBuffer().put(0, (short) 0x4080);  // 4 as BF16
      ByteBuffer raw = bytes(4).putFloat(0, 4);
      other.addParam(sgd, "f64", doubles, 1);
      other.addParam(sgd, "f16", Tensor.of(halves, Dtype.F16), null, 1);
      other.addParam(sgd, "bf16", Tensor.of(brains, Dtype.BF16), null, 1);
      other.addParam(sgd, "raw", Tensor.of(raw, Dtype.F32), null, 1);
      other.accumulate(
          1,
          bytes(8).asDoubleBuffer().put(0, 2.0),
          bytes(2).asShortBuffer().put(0, (short) 0x4000),
          bytes(2).asShortBuffer().put(0, (short) 0x4000),
          bytes(4).putFloat(0, 2));
      other.step();
      assertEquals(2.0, doubles.get(0));
      assertEquals(0x4000, halves.get(0));
      assertEquals(0x4000, brains.get(0));
      assertEquals(2f, raw.getFloat(0));
    }
  }

  @Test
  void shapesThatNoMemoryHas() {
    String role = "data of parameter \"v\": ";
    Exception e =
        assertThrows(
            IllegalArgumentException.class,
            () -> context.addParam(group, "v", floats(1), 1L << 62, 4));
    assertEquals(role + "a tensor of these dimensions does not fit into memory", e.getMessage());
    e =
        assertThrows(
            IllegalArgumentException.class,
            () -> context.addParam(group, "v", floats(1), 1L << 32, 1L << 32));
    assertEquals(role + "a tensor of these dimensions does not fit into memory", e.getMessage());
    e =
        assertThrows(
            IllegalArgumentException.class, () -> context.addParam(group, "v", floats(1), 1, -1));
    assertEquals(role + "dimension 1 was -1, expected >= 0", e.getMessage());
    // No elements, whatever the other dimensions are; and a scalar.
    context.addParam(group, "empty", floats(), Long.MAX_VALUE / 16, 0);
    context.addParam(group, "scalar", floats(1));
    assertThrows(
        GradAccumException.class, () -> context.addParam(group, "65", floats(1), ones(65)));
    assertThrows(
        IllegalArgumentException.class,
        () -> context.addFlat(floats(1), List.of(new FlatEntry(group, "f", -1, 1))));
    assertThrows(
        IllegalArgumentException.class,
        () -> context.addFlat(floats(1), List.of(new FlatEntry(group, "f", 1, 1))));
    assertThrows(
        IllegalArgumentException.class,
        () ->
            context.addFlat(
                floats(1), List.of(new FlatEntry(group, "f", Long.MAX_VALUE, 1))));
  }

  private static long[] ones(int rank) {
    long[] shape = new long[rank];
    Arrays.fill(shape, 1);
    return shape;
  }

  @Test
  void rowsOfTheWrongKind() {
    try (Context other = new Context()) {
      Param table =
          other.addParam(
              other.addGroup(sgd(1)),
              "table",
              Tensor.of(floats(0, 0, 0, 0)),
              ParamOptions.builder().rows(ParamOptions.Rows.DENSE).build(),
              2,
              2);
      try (MicroBatch micro = other.beginMicroBatch(1)) {
        LongBuffer indices = bytes(8).asLongBuffer().put(0, 1);
        Exception e =
            assertThrows(
                IllegalArgumentException.class,
                () -> micro.accumulateRows(table, floats(1), floats(1, 2)));
        assertTrue(e.getMessage().contains("the dtype was F32"), e.getMessage());
        e =
            assertThrows(
                IllegalArgumentException.class,
                () -> micro.accumulateRows(table, indices, floats(1)));
        assertTrue(e.getMessage().contains("expected 2 elements"), e.getMessage());
        indices.put(0, 2);
        assertThrows(
            GradAccumException.class, () -> micro.accumulateRows(table, indices, floats(1, 2)));
      }
    }
  }

  @Test
  void whatBelongsToAnotherContextIsRefused() {
    try (Context other = new Context()) {
      Exception e =
          assertThrows(
              IllegalArgumentException.class, () -> other.addParam(group, "v", floats(1), 1));
      assertEquals("group 0 belongs to another context", e.getMessage());
      try (MicroBatch micro = other.beginMicroBatch(1)) {
        e =
            assertThrows(
                IllegalArgumentException.class, () -> micro.accumulate(param, floats(1, 2)));
        assertEquals("parameter \"w\" belongs to another context", e.getMessage());
      }
      assertThrows(IllegalArgumentException.class, () -> other.ready(param));
      assertThrows(
          IllegalArgumentException.class, () -> other.addBatchNorm("bn", 2, param, null));
    }
  }

  @Test
  void names() {
    for (String name : new String[] {"gewöhnlich", "😀 weight", "\u00e4\u4e2d"}) {
      Param named = context.addParam(group, name, floats(1), 1);
      assertEquals(name, named.info().name());
      assertEquals(named, context.findParam(name));
      GradAccumException e =
          assertThrows(
              GradAccumException.class, () -> context.addParam(group, name, floats(1), 1));
      assertTrue(e.getMessage().contains(name), e.getMessage());
    }
    Exception e =
        assertThrows(
            IllegalArgumentException.class, () -> context.addParam(group, "a\0b", floats(1), 1));
    assertEquals(
        "the text \"a\\0b\" contains a NUL, which ends a text in C", e.getMessage());
    assertThrows(
        IllegalArgumentException.class, () -> context.addParam(group, "\ud83d", floats(1), 1));
    assertThrows(GradAccumException.class, () -> context.addParam(group, "", floats(1), 1));
  }

  @Test
  void addresses() {
    assertThrows(IllegalArgumentException.class, () -> Tensor.ofAddress(0, 4, Dtype.F32));
    assertThrows(IllegalArgumentException.class, () -> Tensor.ofAddress(4096, -1, Dtype.F32));
    assertThrows(NullPointerException.class, () -> Tensor.of(null));
    context.addParam(group, "none", Tensor.ofAddress(0, 0, Dtype.F32), null, 0);
  }
}
