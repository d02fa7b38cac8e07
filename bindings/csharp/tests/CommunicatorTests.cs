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

    /// <summary>What a rank has after two windows.</summary>
    private sealed class Ended {
      internal readonly float[] Large = Fill(70000, 1);
      internal readonly float[] Small = Fill(3, 1);
      internal float[] Average;
      internal long StateBytes;
    }

    private static float[] Fill(int count, float value) {
      float[] values = new float[count];
      for (int i = 0; i < count; ++i) values[i] = value;
      return values;
    }

    /// <summary>
    /// Trains two parameters, the first of which ranks divide, in two micro-batches a window. Backward comes to the
    /// second parameter first.
    /// </summary>
    private static void TrainInParts(Ended ended, int rank, Communicator comm, CommunicatorOptions options) {
      using (Context context = new Context()) {
        Group group = context.AddGroup(new Optimizer(OptimizerKind.Adam));
        Param large = context.AddParam(group, "large", ended.Large, ended.Large.Length);
        Param small = context.AddParam(group, "small", ended.Small, ended.Small.Length);
        context.SetCommunicator(comm, options);
        float[] gradient = new float[ended.Large.Length], few = new float[3];
        for (int k = 0; k < 4; ++k) {
          for (int j = 0; j < gradient.Length; ++j) gradient[j] = j % 7 - 3 + k + rank;
          Array.Copy(gradient, few, few.Length);
          bool last = k % 2 == 1;
          using (MicroBatch micro = context.BeginMicroBatch(1 + rank, -1, 0, last)) {
            micro.Accumulate(small, few);
            if (last) context.Ready(small);
            micro.Accumulate(large, gradient);
            if (last) {
              context.Ready(small, large);
              Expect.Fails(Status.InvalidState, () => micro.Accumulate(large, gradient), "\"large\"");
            }
            micro.End();
          }
          if (!last) continue;
          if (options.Overlap) Expect.Fails(Status.InvalidState, () => context.SaveToMemory(), "being exchanged");
          Expect.Equal(StepOutcome.Applied, context.Step().Outcome, "Outcome");
        }
        ended.Average = large.GetState<float>("exp_avg");
        ended.StateBytes = context.Memory.OptimizerState;
      }
    }

    public void RanksThatShardAndOverlap() {
      Ended[] plain = {new Ended(), new Ended()}, divided = {new Ended(), new Ended()};
      OnTwoRanks((rank, comm) => TrainInParts(plain[rank], rank, comm, new CommunicatorOptions()));
      Expect.True(plain[0].Large[0] != 1, "the parameters have moved");
      OnTwoRanks((rank, comm) => {
        CommunicatorOptions options = new CommunicatorOptions {Shard = Shard.Optimizer, Overlap = true};
        Expect.True(options.Shard == Shard.Optimizer && options.Overlap && options.Adder == Adder.Auto, "options");
        TrainInParts(divided[rank], rank, comm, options);
      });
      foreach (Ended ended in divided) {
        Expect.Same(plain[0].Large, ended.Large, "large");
        Expect.Same(plain[0].Small, ended.Small, "small");
        Expect.Same(plain[0].Average, ended.Average, "exp_avg");
        Expect.True(ended.StateBytes < plain[0].StateBytes * 3 / 5, ended.StateBytes + " bytes of state");
      }
    }

    /// <summary>Each rank has a row of a matrix of two, whose gradient the program has reduced.</summary>
    public void RanksWithParametersOfTheirOwn() {
      float[][] rows = {new float[2], new float[2]};
      OnTwoRanks((rank, comm) => {
        using (Context context = new Context(new Config {GradientKind = GradientKind.Sum})) {
          Group group = context.AddGroup(new Optimizer(OptimizerKind.Sgd) {Lr = 1});
          Param param = context.AddParam(group, "p", rows[rank], 1, 2);
          Expect.Throws<GradAccumException>(() => param.SetPart(new long[] {2}, new long[] {0}));
          param.SetPart(new long[] {2, 2}, new long[] {rank, 0});
          context.SetCommunicator(comm, new CommunicatorOptions {Shard = Shard.Parameters, Reduced = Reduced.Sum});
          context.Accumulate(new Tensor[] {new float[] {4 + 8 * rank, 8 + 8 * rank}}, 1 + 2 * rank);
          StepResult result = context.Step();
          Expect.Equal(4.0, result.Weight, "Weight");
          Expect.True(Math.Abs(result.Norm - Math.Sqrt(30)) < 1e-12, "Norm");
        }
      });
      Expect.True(rows[0][0] == -1 && rows[0][1] == -2 && rows[1][0] == -3 && rows[1][1] == -4, "the step of both");
    }

    public void LocalRanksDoNotAdd() {
      using (Communicator comm = Communicator.Local(Communicator.NewId(), 0, 1))
      using (Context context = WithOne(new float[1])) {
        CommunicatorOptions options = new CommunicatorOptions {Adder = Adder.Transport};
        Expect.Equal(Adder.Transport, options.Adder, "Adder");
        Expect.Fails(Status.Unsupported, () => context.SetCommunicator(comm, options), "adder");
      }
    }

    public void WhatIsReadyTakesNoMoreGradients() {
      float[] values = {1};
      using (Context context = WithOne(values)) {
        Param param = context.FindParam("p");
        context.Ready();
        context.Accumulate(new float[] {2});
        context.Ready(param);
        Expect.Fails(Status.InvalidState, () => context.Accumulate(new float[] {2}), "\"p\"");
        context.Step();
        context.Accumulate(new float[] {2});
        context.Step();
        Expect.Equal(-3f, values[0], "p");
        Expect.Throws<ArgumentNullException>(() => context.Ready(param, null), "param");
        Expect.Throws<ArgumentNullException>(() => context.Ready(null), "parameters");
      }
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
      Expect.Throws<ArgumentException>(() => Communicator.Nccl(new byte[3], 0, 1), "3 bytes");
      Expect.Throws<GradAccumException>(() => Communicator.Nccl(id, 2, 2), "rank was 2");
      Expect.Throws<ArgumentNullException>(() => Communicator.Nccl(IntPtr.Zero), "comm");
      Expect.Throws<GradAccumException>(() => Communicator.Nccl((IntPtr)8), "");  // no module, or no NCCL is loaded
    }
  }
}
