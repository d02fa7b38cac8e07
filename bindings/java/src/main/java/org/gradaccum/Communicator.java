// SPDX-License-Identifier: Apache-2.0
package org.gradaccum;

import java.lang.ref.Cleaner;
import java.lang.ref.Reference;
import java.nio.ByteBuffer;
import java.util.concurrent.locks.ReentrantReadWriteLock;
import java.util.function.LongConsumer;

/**
 * One rank of several that hold one window: threads of this process, processes of an MPI program, or
 * GPUs. Each rank has a {@link Context} of its own, to which {@link Context#setCommunicator} gives the
 * communicator.
 *
 * <pre>{@code
 * byte[] id = Communicator.newId();                            // one thread
 * try (Communicator rank = Communicator.local(id, 0, 2);       // each thread, with its number
 *     Context context = new Context()) {
 *   // groups and parameters, the same on every rank
 *   context.setCommunicator(rank, null);
 *   // training as ever
 * }
 * }</pre>
 *
 * <p>Any thread may call any method. A context keeps the communicator as long as it needs it, also
 * when this object is closed.
 */
public final class Communicator implements AutoCloseable {
  private static final Cleaner CLEANER = Cleaner.create();
  private static final double TIMEOUT = 600;

  // What the collector may free; holds no reference to the communicator.
  private static final class Owned implements Runnable {
    private long comm;

    @Override
    public void run() {
      Raw.ga_comm_destroy(comm);
      comm = 0;
    }
  }

  private final Owned owned = new Owned();
  private final Cleaner.Cleanable cleanable;
  // Closing waits for the calls that read the address.
  private final ReentrantReadWriteLock lock = new ReentrantReadWriteLock();

  private Communicator(
      CommKind kind, byte[] id, int rank, int ranks, int mpi, long nccl, double timeout) {
    try (ga_comm_config fields = new ga_comm_config(kind.value())) {
      fields.setTimeout(timeout);
      fields.setRank(rank);
      fields.setRanks(ranks);
      fields.setMpi_comm(mpi);
      fields.setNccl_comm(nccl);
      ByteBuffer bytes = null;
      if (id != null) {
        if (id.length != RawConstants.GA_COMM_ID_SIZE) {
          throw new IllegalArgumentException(
              "the id has " + id.length + " bytes, expected " + RawConstants.GA_COMM_ID_SIZE);
        }
        bytes = ByteBuffer.allocateDirect(id.length).put(id);
        fields.setId(Raw.buffer_address(bytes));
      }
      long[] out = new long[1];
      Raw.ga_comm_create(fields, out);
      owned.comm = out[0];
      Reference.reachabilityFence(bytes);
    }
    cleanable = CLEANER.register(this, owned);
  }

  /**
   * Makes what tells one set of local ranks from any other. One thread makes it and gives it to the
   * others.
   *
   * @return the id
   */
  public static byte[] newId() {
    return newId(CommKind.LOCAL);
  }

  /**
   * As {@link #newId} for {@link #nccl(byte[], int, int, double)}: for one communicator, on all
   * machines. The rank that makes it goes on living until all have joined.
   *
   * @return the id
   * @throws GradAccumException {@link Status#UNSUPPORTED}: libgradaccum_nccl.so could not be loaded,
   *     or there is no libnccl.so.2
   */
  public static byte[] newNcclId() {
    return newId(CommKind.NCCL);
  }

  private static byte[] newId(CommKind kind) {
    ByteBuffer bytes = ByteBuffer.allocateDirect(RawConstants.GA_COMM_ID_SIZE);
    Raw.ga_comm_unique_id(kind.value(), Raw.buffer_address(bytes), bytes.capacity());
    byte[] id = new byte[bytes.capacity()];
    bytes.get(id);
    return id;
  }

  /**
   * Joins the threads of this process that have the same id. Does not wait for them. A call waits
   * for other ranks for up to 600 seconds.
   *
   * @param id of {@link #newId}
   * @param rank the number of this rank, from 0
   * @param ranks how many there are
   * @return the communicator
   */
  public static Communicator local(byte[] id, int rank, int ranks) {
    return local(id, rank, ranks, TIMEOUT);
  }

  /**
   * Joins the threads of this process that have the same id. Does not wait for them.
   *
   * @param id of {@link #newId}
   * @param rank the number of this rank, from 0
   * @param ranks how many there are
   * @param timeout seconds that a call waits for other ranks; may be infinite
   * @return the communicator
   */
  public static Communicator local(byte[] id, int rank, int ranks, double timeout) {
    Check.notNull(id, "id");
    return new Communicator(CommKind.LOCAL, id.clone(), rank, ranks, 0, 0, timeout);
  }

  /**
   * Joins the ranks, with a GPU each, that have the same id, and waits for them. The rank gets the
   * calling thread's current CUDA device.
   *
   * @param id of {@link #newNcclId}
   * @param rank the number of this rank, from 0
   * @param ranks how many there are
   * @param timeout seconds that a call waits for other ranks; may be infinite
   * @return the communicator
   * @throws GradAccumException {@link Status#UNSUPPORTED}: libgradaccum_nccl.so could not be loaded,
   *     or there is no libnccl.so.2
   */
  public static Communicator nccl(byte[] id, int rank, int ranks, double timeout) {
    Check.notNull(id, "id");
    return new Communicator(CommKind.NCCL, id.clone(), rank, ranks, 0, 0, timeout);
  }

  /**
   * Is a rank of a communicator of the program's, which must live as long as this one. {@link
   * #abort}, and a failure that leaves this one of no further use, end it with {@code
   * ncclCommAbort}.
   *
   * @param comm the address that the program's {@code ncclComm_t} is
   * @param timeout seconds that a call waits for other ranks; may be infinite
   * @return the communicator
   * @throws GradAccumException {@link Status#UNSUPPORTED}: libgradaccum_nccl.so could not be loaded,
   *     or this process has not loaded libnccl.so.2
   */
  public static Communicator nccl(long comm, double timeout) {
    if (comm == 0) throw new IllegalArgumentException("comm was 0");
    return new Communicator(CommKind.NCCL, null, 0, 0, 0, comm, timeout);
  }

  /**
   * Joins the processes of an MPI program, for which it waits.
   *
   * @param comm the number of a communicator that has been initialised in this process, as {@code
   *     MPI_Comm_c2f} gives it; it is duplicated
   * @param timeout seconds that a call waits for other ranks; may be infinite
   * @return the communicator
   * @throws GradAccumException {@link Status#UNSUPPORTED}: libgradaccum_mpi.so could not be loaded,
   *     or the program runs another MPI
   */
  public static Communicator mpi(int comm, double timeout) {
    return new Communicator(CommKind.MPI, null, 0, 0, comm, 0, timeout);
  }

  /** Calls body with the communicator of C, which stays until it returns. */
  void use(LongConsumer body) {
    lock.readLock().lock();
    try {
      if (owned.comm == 0) {
        throw new IllegalStateException("the communicator is closed");
      }
      body.accept(owned.comm);
    } finally {
      lock.readLock().unlock();
      Reference.reachabilityFence(this);
    }
  }

  /**
   * The number of this rank.
   *
   * @return its number, from 0
   */
  public int rank() {
    int[] rank = new int[1];
    use(comm -> Raw.ga_comm_size(comm, rank, null));
    return rank[0];
  }

  /**
   * How many ranks there are.
   *
   * @return their number
   */
  public int ranks() {
    int[] ranks = new int[1];
    use(comm -> Raw.ga_comm_size(comm, null, ranks));
    return ranks[0];
  }

  /**
   * Has calls that wait for other ranks fail now, with {@link Status#COMMUNICATION}, and all later
   * ones; of local ranks those of every rank. Other threads may be in such calls.
   */
  public void abort() {
    use(Raw::ga_comm_abort);
  }

  /** Leaves, as soon as no context needs the communicator any more. A second call does nothing. */
  @Override
  public void close() {
    lock.writeLock().lock();
    try {
      cleanable.clean();
    } finally {
      lock.writeLock().unlock();
    }
  }
}
