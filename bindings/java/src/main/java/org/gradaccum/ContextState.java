// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.io.IOException;
import java.io.OutputStream;
import java.nio.ByteBuffer;
import java.nio.channels.SeekableByteChannel;
import java.nio.channels.WritableByteChannel;
import java.nio.file.Path;

/** The state of a run on disk and in memory. */
abstract class ContextState extends ContextMembers {
  ContextState(Config config) {
    super(config);
  }

  /**
   * Saves the state of the run to a file, as a whole or not at all.
   *
   * @param path the file
   */
  public void save(Path path) {
    save(path, StateOptions.builder().build());
  }

  /**
   * Saves the state of the run to a file, as a whole or not at all.
   *
   * @param path the file
   * @param options what is saved
   * @throws GradAccumException {@link Status#IO}: the message has the reason of the system
   */
  public void save(Path path, StateOptions options) {
    Check.notNull(path, "path");
    with(options, (c, state) -> state.call(fields -> Raw.ga_save(c, path.toString(), fields)));
  }

  /**
   * Loads what was saved to a file, as a whole or not at all. While the window is empty.
   *
   * @param path the file
   */
  public void load(Path path) {
    load(path, StateOptions.builder().build());
  }

  /**
   * Loads what was saved to a file, as a whole or not at all. While the window is empty.
   *
   * @param path the file
   * @param options what is loaded, and what about settings that differ
   * @throws GradAccumException {@link Status#INVALID_ARGUMENT}: what the file holds is not what the
   *     context has; {@link Status#FORMAT}: the file is damaged; {@link Status#IO}
   */
  public void load(Path path, StateOptions options) {
    Check.notNull(path, "path");
    with(options, (c, state) -> {
      state.call(fields -> Raw.ga_load(c, path.toString(), fields));
      move();
    });
  }

  /**
   * Saves the state of the run to memory.
   *
   * @param options what is saved
   * @return a direct buffer with the bytes
   */
  public ByteBuffer saveToBuffer(StateOptions options) {
    Check.notNull(options, "options");
    return call(c -> {
      try (State state = new State(options)) {
        long[] size = new long[1];
        state.call(fields -> Raw.ga_save_to_memory(c, fields, 0, 0, size));
        if (size[0] > Integer.MAX_VALUE) {
          throw new IllegalStateException(
              "the state takes " + size[0] + " bytes, more than a buffer; save it to a channel");
        }
        ByteBuffer bytes = ByteBuffer.allocateDirect((int) size[0]);
        long address = Raw.buffer_address(bytes);
        state.call(fields -> Raw.ga_save_to_memory(c, fields, address, bytes.capacity(), size));
        return bytes;
      }
    });
  }

  /**
   * Loads the state of a run from memory. While the window is empty.
   *
   * @param bytes a direct buffer, read from its position to its limit, which do not move
   * @param options what is loaded, and what about settings that differ
   */
  public void load(ByteBuffer bytes, StateOptions options) {
    Check.notNull(bytes, "bytes");
    if (!bytes.isDirect()) {
      throw Tensor.refuse(
          "bytes", null, "the ByteBuffer is on the heap of Java, expected a direct buffer");
    }
    with(options, (c, state) -> {
      long address = Raw.buffer_address(bytes) + bytes.position();
      state.call(fields -> Raw.ga_load_from_memory(c, address, bytes.remaining(), fields));
      move();
    }, bytes);
  }

  /**
   * Saves the state of the run to a channel, such as a {@link java.nio.channels.FileChannel}, from
   * its position on.
   *
   * @param channel where to write
   * @param options what is saved
   * @throws IOException that the channel has thrown
   */
  public void save(SeekableByteChannel channel, StateOptions options) throws IOException {
    Check.notNull(channel, "channel");
    long start = channel.position();
    write(
        options,
        (offset, bytes) -> {
          channel.position(start + offset);
          writeAll(channel, bytes);
        });
  }

  /**
   * Saves the state of the run to a stream. The library brings the header last, so it is made to
   * write the state twice, the first time to find the header out.
   *
   * @param stream where to write; it is not closed
   * @param options what is saved
   * @throws IOException that the stream has thrown
   */
  public void save(OutputStream stream, StateOptions options) throws IOException {
    Check.notNull(stream, "stream");
    Header header = new Header();
    write(options, header::take);
    byte[] piece = new byte[1 << 16];
    writeAll(stream, ByteBuffer.wrap(header.bytes()), piece);
    if (header.size() == 0) {
      return;  // there is nothing else
    }
    write(
        options,
        (offset, bytes) -> {
          if (offset >= header.size()) {
            writeAll(stream, bytes, piece);
          }
        });
  }

  private static void writeAll(WritableByteChannel channel, ByteBuffer bytes) throws IOException {
    while (bytes.hasRemaining()) {
      channel.write(bytes);
    }
  }

  private static void writeAll(OutputStream stream, ByteBuffer bytes, byte[] piece)
      throws IOException {
    while (bytes.hasRemaining()) {
      int size = Math.min(piece.length, bytes.remaining());
      bytes.get(piece, 0, size);
      stream.write(piece, 0, size);
    }
  }

  private void write(StateOptions options, Callback.Transfer transfer) {
    with(options, (c, state) -> {
      state.transfer(
          transfer,
          (fields, relay) -> Raw.ga_state_write(c, Raw.write_function(), relay, fields));
    });
  }

  /** A save or a load. */
  private interface Call {
    void run(long c, State state);
  }

  private void with(StateOptions options, Call call, Object... used) {
    Check.notNull(options, "options");
    run(c -> {
      try (State state = new State(options)) {
        call.run(c, state);
      }
    }, used);
  }

  /**
   * Loads the state of a run from a channel, from its position to its end. While the window is
   * empty.
   *
   * @param channel where to read
   * @param options what is loaded, and what about settings that differ
   * @throws IOException that the channel has thrown
   */
  public void load(SeekableByteChannel channel, StateOptions options) throws IOException {
    Check.notNull(channel, "channel");
    long start = channel.position();
    long size = channel.size() - start;
    with(options, (c, state) -> {
      state.transfer(
          (offset, bytes) -> {
            channel.position(start + offset);
            while (bytes.hasRemaining()) {
              if (channel.read(bytes) < 0) {
                throw new IOException(
                    "the channel ended after " + (channel.size() - start) + " bytes");
              }
            }
          },
          (fields, relay) -> Raw.ga_state_read(c, Raw.read_function(), relay, size, fields));
      move();
    });
  }
}
