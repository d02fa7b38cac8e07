// SPDX-License-Identifier: Apache-2.0
using System;
using System.Runtime.InteropServices;

namespace GradAccum {
  /// <summary>
  /// One rank of several that hold one window: threads of this process, processes of an MPI program, or GPUs. Each
  /// rank has a <see cref="Context"/> of its own, to which <see cref="Context.SetCommunicator"/> gives the
  /// communicator. Any thread may call any method. A context keeps what it needs, also when this object is
  /// disposed of.
  /// </summary>
  public sealed class Communicator : IDisposable {
    private readonly CommHandle handle;

    private unsafe Communicator(CommunicatorKind kind, byte[] id, int rank, int ranks, int mpi, IntPtr nccl,
                                double timeout) {
      if (id != null && id.Length != Raw.GA_COMM_ID_SIZE) {
        throw new ArgumentException("the id has " + id.Length + " bytes, expected " + Raw.GA_COMM_ID_SIZE, "id");
      }
      using (ga_comm_config native = Natives.First(() => new ga_comm_config((int)kind))) {
        native.rank = rank;
        native.ranks = ranks;
        native.mpi_comm = mpi;
        native.nccl_comm = nccl;
        native.timeout = timeout;
        IntPtr comm;
        fixed (byte* address = id) {
          native.id = (IntPtr)address;
          Raw.ga_comm_create(native, out comm);
        }
        handle = new CommHandle(comm);
      }
    }

    /// <summary>
    /// Makes what tells one set of local ranks from any other. One thread makes it and gives it to the others.
    /// </summary>
    /// <returns>The id.</returns>
    public static byte[] NewId() {
      return MakeId(CommunicatorKind.Local);
    }

    /// <summary>
    /// As <see cref="NewId"/> for <see cref="Nccl(byte[], int, int, double)"/>: for one communicator, on all
    /// machines. The rank that makes it goes on living until all have joined.
    /// </summary>
    /// <returns>The id.</returns>
    public static byte[] NewNcclId() {
      return MakeId(CommunicatorKind.Nccl);
    }

    private static unsafe byte[] MakeId(CommunicatorKind kind) {
      return Natives.First(() => {
        byte[] id = new byte[Raw.GA_COMM_ID_SIZE];
        fixed (byte* address = id) {
          Raw.ga_comm_unique_id((int)kind, (IntPtr)address, (ulong)id.Length);
        }
        return id;
      });
    }

    /// <summary>Joins the threads of this process that have the same id. Does not wait for them.</summary>
    /// <param name="id">Of <see cref="NewId"/>.</param>
    /// <param name="rank">The number of this rank, from 0.</param>
    /// <param name="ranks">How many there are.</param>
    /// <param name="timeout">Seconds that a call waits for other ranks; may be infinite.</param>
    /// <returns>The communicator.</returns>
    public static Communicator Local(byte[] id, int rank, int ranks, double timeout = 600) {
      if (id == null) throw new ArgumentNullException("id");
      return new Communicator(CommunicatorKind.Local, id, rank, ranks, 0, IntPtr.Zero, timeout);
    }

    /// <summary>
    /// Joins the ranks, with a GPU each, that have the same id, and waits for them. The rank gets the calling
    /// thread's current CUDA device.
    /// </summary>
    /// <param name="id">Of <see cref="NewNcclId"/>.</param>
    /// <param name="rank">The number of this rank, from 0.</param>
    /// <param name="ranks">How many there are.</param>
    /// <param name="timeout">Seconds that a call waits for other ranks; may be infinite.</param>
    /// <returns>The communicator.</returns>
    public static Communicator Nccl(byte[] id, int rank, int ranks, double timeout = 600) {
      if (id == null) throw new ArgumentNullException("id");
      return new Communicator(CommunicatorKind.Nccl, id, rank, ranks, 0, IntPtr.Zero, timeout);
    }

    /// <summary>
    /// Is a rank of a communicator of the program's, which must live as long as this one. <see cref="Abort"/>, and
    /// a failure that leaves this one of no further use, end it with ncclCommAbort.
    /// </summary>
    /// <param name="comm">The program's ncclComm_t.</param>
    /// <param name="timeout">Seconds that a call waits for other ranks; may be infinite.</param>
    /// <returns>The communicator.</returns>
    public static Communicator Nccl(IntPtr comm, double timeout = 600) {
      if (comm == IntPtr.Zero) throw new ArgumentNullException("comm");
      return new Communicator(CommunicatorKind.Nccl, null, 0, 0, 0, comm, timeout);
    }

    /// <summary>Joins the processes of an MPI program, for which it waits.</summary>
    /// <param name="comm">The number of the program's communicator, as MPI_Comm_c2f gives it.</param>
    /// <param name="timeout">Seconds that a call waits for other ranks; may be infinite.</param>
    /// <returns>The communicator.</returns>
    public static Communicator Mpi(int comm, double timeout = 600) {
      return new Communicator(CommunicatorKind.Mpi, null, 0, 0, comm, IntPtr.Zero, timeout);
    }

    /// <summary>The number of this rank, from 0.</summary>
    public int Rank {
      get {
        int rank = 0, ranks = 0;
        Use(comm => Raw.ga_comm_size(comm, out rank, out ranks));
        return rank;
      }
    }

    /// <summary>How many ranks there are.</summary>
    public int Ranks {
      get {
        int rank = 0, ranks = 0;
        Use(comm => Raw.ga_comm_size(comm, out rank, out ranks));
        return ranks;
      }
    }

    /// <summary>
    /// Has calls that wait for other ranks fail now, with <see cref="Status.Communication"/>, and all later
    /// ones; of local ranks those of every rank. Other threads may be in such calls.
    /// </summary>
    public void Abort() {
      Use(comm => Raw.ga_comm_abort(comm));
    }

    /// <summary>Leaves, as soon as no context needs the communicator any more.</summary>
    public void Dispose() {
      handle.Dispose();
    }

    /// <summary>Calls f with the communicator of C, which stays until it returns.</summary>
    internal void Use(Action<IntPtr> f) {
      bool added = false;
      try {
        try {
          handle.DangerousAddRef(ref added);
        } catch (ObjectDisposedException) {
          throw new ObjectDisposedException("Communicator", "the communicator is disposed of");
        }
        f(handle.DangerousGetHandle());
      } finally {
        if (added) handle.DangerousRelease();
      }
    }

    private sealed class CommHandle : SafeHandle {
      internal CommHandle(IntPtr comm) : base(IntPtr.Zero, true) {
        SetHandle(comm);
      }

      public override bool IsInvalid {
        get { return handle == IntPtr.Zero; }
      }

      protected override bool ReleaseHandle() {
        Raw.ga_comm_destroy(handle);
        return true;
      }
    }
  }
}
