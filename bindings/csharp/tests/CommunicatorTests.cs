// SPDX-License-Identifier: Apache-2.0
using System;
using System.Threading;

namespace GradAccum.Tests {
  /// <summary>Threads as ranks.</summary>
  public sealed class CommunicatorTests {
    private static Context WithOne(float[] values) {
      Context context = new Context();
      context.AddParam(context.AddGroup(new Optimizer(OptimizerKind.Sgd) {Lr = 1}), "p", values, values.Length);
      return context;
    }

    /// <summary>Runs the body as each of two ranks, in a thread of its own.</summary>
    private static void OnTwoRanks(Action<int, Communicator> body) {
      byte[] id = Communicator.NewId();
      Exception thrown = null;
      Thread[] threads = new Thread[2];
      for (int i = 0; i < 2; ++i) {
        int rank = i;
        threads[i] = new Thread(() => {
          try {
            using (Communicator comm = Communicator.Local(id, rank, 2, 60)) body(rank, comm);
          } catch (Exception exception) {
            thrown = exception;
          }
        });
        threads[i].Start();
      }
      foreach (Thread thread in threads) thread.Join();
      if (thrown != null) throw new Exception("in a rank", thrown);
    }

    public void TwoThreadsAreTwoRanks() {
      float[][] ended = {new float[2], new float[2]};
      OnTwoRanks((rank, comm) => {
        using (Context context = WithOne(ended[rank])) {
          Expect.Equal(rank, comm.Rank, "Rank");
          Expect.Equal(2, comm.Ranks, "Ranks");
          CommunicatorOptions options = new CommunicatorOptions {CheckEvery = 1, HandOut = true, Wire = Wire.BF16};
          Expect.True(options.CheckEvery == 1 && options.HandOut && options.Wire == Wire.BF16, "options");
          context.SetCommunicator(comm, options);
          context.Accumulate(new Tensor[] {new float[] {4, 8}}, rank == 0 ? 1 : 3);
          Expect.Equal(4.0, context.Step().Weight, "Weight");
          context.SetCommunicator(null);
        }
      });
      foreach (float[] values in ended) Expect.True(values[0] == -4 && values[1] == -8, "the step of both");
    }

    public void BatchNormalisationOverTheWindowOfTwoRanks() {
      OnTwoRanks((rank, comm) => {
        using (Context context = WithOne(new float[1])) {
          BatchNorm layer = context.AddBatchNorm("bn", 1, null, null, new BatchNormOptions {Mode = BatchNormMode.Window});
          context.SetCommunicator(comm);
          float[] x = rank == 0 ? new float[] {1, 3} : new float[] {5, 7};
          float[] dy = rank == 0 ? new float[] {1, 0} : new float[] {0, 1};
          float[] y = new float[2], dx = new float[2];
          layer.Accumulate(x, 2, 1);
          layer.FinalizeStats();
          layer.Forward(x, 2, 1, y);
          // The mean is 4 and the variance 5.
          Expect.Near((x[0] - 4) / Math.Sqrt(5), y[0], 1e-4);
          using (MicroBatch micro = context.BeginMicroBatch(1, 0)) {
            micro.BackwardAccumulate(layer, x, dy, 2, 1);
            micro.End();
          }
          layer.BackwardFinalize();
          using (MicroBatch micro = context.BeginMicroBatch(1, 0)) {
            micro.Backward(layer, x, dy, 2, 1, dx);
            micro.End();
          }
          // The sums of dy and of dy times the normalised x are 2 and 0.
          for (int i = 0; i < 2; ++i) Expect.Near((dy[i] - 0.5) / Math.Sqrt(5), dx[i], 1e-4);
          Expect.Equal(StepOutcome.Applied, context.Step().Outcome, "Outcome");
        }
      });
    }

    public void ARankThatDoesNotCome() {
      using (Communicator comm = Communicator.Local(Communicator.NewId(), 0, 2, 0.2))
      using (Context context = WithOne(new float[1])) {
        try {
          context.SetCommunicator(comm);
          Expect.True(false, "no exception");
        } catch (GradAccumException exception) {
          Expect.Equal(Status.Communication, exception.Status, "Status");
          Expect.True(exception.Message.Contains("for rank 1"), exception.Message);
        }
      }
    }

    public void AbortFreesAThreadThatWaits() {
      using (Communicator comm = Communicator.Local(Communicator.NewId(), 0, 2)) {
        Status status = Status.Internal;
        Thread waiting = new Thread(() => {
          using (Context context = WithOne(new float[1])) {
            try {
              context.SetCommunicator(comm);
            } catch (GradAccumException exception) {
              status = exception.Status;
            }
          }
        });
        waiting.Start();
        Thread.Sleep(100);
        comm.Abort();
        waiting.Join();
        Expect.Equal(Status.Communication, status, "Status");
      }
    }

    public void DisposedTwiceAndUsedAfterwards() {
      byte[] id = Communicator.NewId();
      Communicator comm = Communicator.Local(id, 0, 1);
      using (Context context = WithOne(new float[1])) {
        context.SetCommunicator(comm);
        comm.Dispose();
        comm.Dispose();
        context.Accumulate(new Tensor[] {new float[] {1}});
        Expect.Equal(StepOutcome.Applied, context.Step().Outcome, "Outcome");  // it keeps what it needs
        foreach (Action use in new Action[] {
                   () => { int rank = comm.Rank; }, () => comm.Abort(), () => context.SetCommunicator(comm)
                 }) {
          Expect.Throws<ObjectDisposedException>(use, "Communicator");
        }
      }
      Expect.Throws<ArgumentException>(() => Communicator.Local(new byte[3], 0, 1), "3 bytes");
      Expect.Throws<GradAccumException>(() => Communicator.Local(id, 2, 2), "rank was 2");
      Expect.Throws<GradAccumException>(() => Communicator.Local(id, 0, 2, 0), "timeout was 0");
      Expect.Throws<GradAccumException>(() => Communicator.Mpi(0), "");  // no module, or no MPI_Init
    }
  }
}
