// SPDX-License-Identifier: Apache-2.0
// Has the part of NVIDIA's header that the library's module for NCCL and the tests use, with its names,
// values and rules, on simulated devices (simulator.hpp). The ranks are threads of one process, each with a
// device, which several ranks may share.
//
// A collective waits in its stream until those of all other ranks have come as far, and is then done on all
// of them at once. Collectives of a rank take place in the order of its calls, and match those of the other
// ranks by this order; a group, of at most 2048 calls, is one, in which all ranks take part. It can be captured in a
// graph. Sums are added in reverse order of the ranks. If the ranks do not call the same, the collective never ends and all
// of them have the asynchronous error ncclInvalidUsage. A call with a communicator that has been destroyed
// or aborted ends the process.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

extern "C" {

typedef struct ncclComm* ncclComm_t;
typedef struct {
  char internal[128];
} ncclUniqueId;

typedef enum {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7
} ncclResult_t;

typedef enum {
  ncclInt8 = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclFloat32 = 7,
  ncclFloat64 = 8,
  ncclBfloat16 = 9
} ncclDataType_t;

typedef enum { ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclMin = 3, ncclAvg = 4 } ncclRedOp_t;

typedef struct {
  size_t size;
  unsigned magic;
  unsigned version;
  int blocking;  // the fake reads no more
} ncclConfig_t;

ncclResult_t ncclGetVersion(int* version);
ncclResult_t ncclGetUniqueId(ncclUniqueId* id);
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank);
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config);
ncclResult_t ncclCommFinalize(ncclComm_t comm);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error);
ncclResult_t ncclCommCount(ncclComm_t comm, int* count);
ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank);
ncclResult_t ncclCommCuDevice(ncclComm_t comm, int* device);
const char* ncclGetErrorString(ncclResult_t result);
const char* ncclGetLastError(ncclComm_t comm);
ncclResult_t ncclGroupStart();
ncclResult_t ncclGroupEnd();
ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclRecv(void* recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream);
ncclResult_t ncclBroadcast(const void* send, void* recv, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclAllGather(const void* send, void* recv, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclAllReduce(const void* send, void* recv, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclReduceScatter(const void* send, void* recv, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);

// ---- For tests ---------------------------------------------------------------------------------------

// The n-th call of this function from now on, of any rank, does nothing and returns result.
void ga_fake_nccl_fail(const char* function, int64_t n, ncclResult_t result);
// The n-th collective from now on never ends on a rank, but by its ncclCommAbort.
void ga_fake_nccl_hang(int64_t n);
// From now on, ncclCommGetAsyncError of this rank of any communicator has this result.
void ga_fake_nccl_async_error(int rank, ncclResult_t result);
// From now on, what a call on a non-blocking communicator begins, creation included, is in progress for as
// many calls of ncclCommGetAsyncError, and takes place at the last of them; < 0: is in progress for ever.
void ga_fake_nccl_in_progress(int64_t polls);
// ncclGetVersion's. [GA_FAKE_NCCL_VERSION] in the environment sets the initial one.
void ga_fake_nccl_version(int version);
// Calls of this function since the last reset.
int64_t ga_fake_nccl_calls(const char* function);
// Collectives that ranks have queued since then; a group is one for each of its ranks.
int64_t ga_fake_nccl_collectives();
// Communicators that were neither destroyed nor aborted.
int64_t ga_fake_nccl_communicators();
// Aborts all communicators, and restores the state of a new process. Before ga::sim::reset().
void ga_fake_nccl_reset();

}  // extern "C"
