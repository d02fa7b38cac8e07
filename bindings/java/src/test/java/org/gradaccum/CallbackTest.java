// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import static org.gradaccum.Buffers.floats;
import static org.gradaccum.Buffers.sgd;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.OutputStream;
import java.nio.ByteBuffer;
import java.nio.FloatBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.ArrayList;
import java.util.List;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;

/** Listeners, streams and channels, and state that goes through them. */
class CallbackTest {
  private static final StateOptions DEFAULTS = StateOptions.builder().build();

  private Path file;

  @BeforeEach
  void open() throws IOException {
    file = Files.createTempFile("gradaccum ä", ".safetensors");
  }

  @AfterEach
  void close() throws IOException {
    Files.delete(file);
  }

  private static Context run(FloatBuffer w, int steps) {
    Context context = new Context();
    context.addParam(
        context.addGroup(Optimizer.builder(Optimizer.Kind.ADAM).lr(0.1).build()), "w", w, 2);
    for (int i = 0; i < steps; ++i) {
      context.accumulate(1, floats(i + 1, -i));
      context.step();
    }
    return context;
  }

  @Test
  void aListenerHearsEveryCall() {
    List<String> lines = new ArrayList<>();
    List<Thread> threads = new ArrayList<>();
    Config config =
        Config.builder()
            .log(
                line -> {
                  lines.add(line);
                  threads.add(Thread.currentThread());
                })
            .build();
    try (Context context = new Context(config)) {
      context.addParam(context.addGroup(sgd(1)), "wä", floats(1), 1);
      context.accumulate(1, floats(1));
      lines.clear();
      context.step();
      assertEquals(1, lines.size());
      assertTrue(lines.get(0).startsWith("gradaccum,cpu,ga_step,outcome:0"), lines.get(0));
    }
    assertTrue(threads.stream().allMatch(thread -> thread == Thread.currentThread()));
  }

  @Test
  void whatAListenerThrowsComesOut() {
    RuntimeException thrown = new RuntimeException("in the listener");
    boolean[] throwing = {false};
    Config config =
        Config.builder()
            .log(
                line -> {
                  if (throwing[0]) {
                    throw thrown;
                  }
                })
            .build();
    try (Context context = new Context(config)) {
      throwing[0] = true;
      assertSame(thrown, assertThrows(RuntimeException.class, context::step));
      throwing[0] = false;
      assertEquals(1, context.window().windows());
    }
  }

  @Test
  void aListenerMustNotUseItsContext() {
    Context[] own = new Context[1];
    boolean[] using = {false};
    Config config =
        Config.builder()
            .log(
                line -> {
                  if (using[0]) {
                    own[0].window();
                  }
                })
            .build();
    try (Context context = new Context(config)) {
      own[0] = context;
      using[0] = true;
      Exception e = assertThrows(IllegalStateException.class, context::step);
      assertTrue(e.getMessage().startsWith("a callback used the context"), e.getMessage());
      using[0] = false;
    }
  }

  @Test
  void aCallbackMustNotCloseItsContext() {
    FloatBuffer w = floats(1, 2);
    try (Context context = run(w, 1)) {
      StateOptions options =
          StateOptions.builder().progress((done, total) -> context.close()).build();
      Exception e =
          assertThrows(IllegalStateException.class, () -> context.save(file, options));
      assertTrue(e.getMessage().startsWith("a callback closed the context"), e.getMessage());
      assertEquals(1, context.window().steps());
    }
  }

  @Test
  void progressOfASaveAndWhatItThrows() {
    FloatBuffer w = floats(1, 2);
    try (Context context = run(w, 3)) {
      long[] last = new long[2];
      context.save(
          file,
          StateOptions.builder()
              .note("epoch 3, größer 😀")
              .progress(
                  (done, total) -> {
                    last[0] = done;
                    last[1] = total;
                  })
              .build());
      assertTrue(last[0] > 0);
      assertEquals(last[1], last[0]);
      assertEquals("epoch 3, größer 😀", Library.stateNote(file));
      Error thrown = new StackOverflowError("in the progress");
      StateOptions throwing =
          StateOptions.builder()
              .progress(
                  (done, total) -> {
                    throw thrown;
                  })
              .build();
      assertSame(thrown, assertThrows(Error.class, () -> context.save(file, throwing)));
      assertSame(thrown, assertThrows(Error.class, () -> context.load(file, throwing)));
      assertEquals("epoch 3, größer 😀", Library.stateNote(file));
    }
  }

  @Test
  void aRunGoesOnWithTheSameBits() throws IOException {
    FloatBuffer straight = floats(1, 2);
    run(straight, 6).close();
    for (int way = 0; way < 5; ++way) {
      FloatBuffer before = floats(1, 2);
      ByteArrayOutputStream stream = new ByteArrayOutputStream();
      ByteBuffer bytes = null;
      try (Context context = run(before, 3);
          FileChannel channel = FileChannel.open(file, StandardOpenOption.WRITE)) {
        switch (way) {
          case 0 -> context.save(file);
          case 1 -> bytes = context.saveToBuffer(DEFAULTS);
          case 2 -> {
            channel.position(7);
            context.save(channel, DEFAULTS);
          }
          default -> context.save(stream, DEFAULTS);
        }
      }
      FloatBuffer after = floats(0, 0);
      try (Context context = run(after, 0);
          FileChannel channel = FileChannel.open(file, StandardOpenOption.READ)) {
        switch (way) {
          case 0 -> context.load(file);
          case 1 -> context.load(bytes, DEFAULTS);
          case 2 -> {
            channel.position(7);
            context.load(channel, DEFAULTS);
          }
          default -> {
            byte[] array = stream.toByteArray();
            context.load(Buffers.bytes(array.length).put(array).flip(), DEFAULTS);
          }
        }
        for (int i = 3; i < 6; ++i) {
          context.accumulate(1, floats(i + 1, -i));
          context.step();
        }
      }
      assertArrayEquals(Buffers.values(straight), Buffers.values(after), "way " + way);
      Files.write(file, new byte[7]);
    }
  }

  @Test
  void aStreamGetsTheBytesOfAFile() throws IOException {
    FloatBuffer w = floats(1, 2);
    try (Context context = run(w, 2)) {
      context.save(file);
      ByteArrayOutputStream stream = new ByteArrayOutputStream();
      context.save(stream, DEFAULTS);
      assertArrayEquals(Files.readAllBytes(file), stream.toByteArray());
      ByteBuffer bytes = context.saveToBuffer(DEFAULTS);
      assertEquals(ByteBuffer.wrap(stream.toByteArray()), bytes);
    }
  }

  @Test
  void whatAStreamThrowsComesOut() throws IOException {
    FloatBuffer w = floats(1, 2);
    IOException thrown = new IOException("the disk of the stream is full");
    try (Context context = run(w, 2)) {
      OutputStream full =
          new OutputStream() {
            @Override
            public void write(int b) throws IOException {
              throw thrown;
            }
          };
      assertSame(thrown, assertThrows(IOException.class, () -> context.save(full, DEFAULTS)));
      try (FileChannel closed = FileChannel.open(file, StandardOpenOption.READ)) {
        assertThrows(
            java.nio.channels.NonWritableChannelException.class,
            () -> context.save(closed, DEFAULTS));
        assertThrows(GradAccumException.class, () -> context.load(closed, DEFAULTS));
      }
      assertEquals(2, context.window().steps());
    }
  }

  @Test
  void filesThatCannotBeLoaded() throws IOException {
    FloatBuffer w = floats(1, 2);
    try (Context context = run(w, 1)) {
      GradAccumException e =
          assertThrows(
              GradAccumException.class, () -> context.load(Path.of("/no/such/folder/state")));
      assertEquals(Status.IO, e.status());
      Files.writeString(file, "not a state of anything");
      e = assertThrows(GradAccumException.class, () -> context.load(file));
      assertEquals(Status.FORMAT, e.status());
      assertThrows(GradAccumException.class, () -> Library.stateNote(file));
      context.save(file);
      assertEquals("", Library.stateNote(file));
      Exception heap =
          assertThrows(
              IllegalArgumentException.class,
              () -> context.load(ByteBuffer.wrap(new byte[8]), DEFAULTS));
      assertTrue(heap.getMessage().contains("on the heap"), heap.getMessage());
    }
    try (Context context = new Context()) {
      GradAccumException e = assertThrows(GradAccumException.class, () -> context.load(file));
      assertEquals(Status.INVALID_ARGUMENT, e.status());
      StateOptions.Builder extra = StateOptions.builder().allowExtra(true);
      assertThrows(GradAccumException.class, () -> context.load(file, extra.build()));
      context.load(file, extra.settings(StateOptions.Settings.KEEP).build());
    }
  }
}
