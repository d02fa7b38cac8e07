// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/update.hpp"

namespace ga::cuda {
namespace {

UpdateLaunches launches_of(bool f64) { return f64 ? double_launches() : float_launches(); }

}  // namespace

void update(const Queue& queue, int op, bool f64, const UpdateTask* tasks, const ChunkRef* chunks,
            int64_t count) {
  const int64_t blocks = blocks_for(queue, count);
  if (op >= 0)
    launches_of(f64).updates[op](queue, tasks, chunks, count);
  else if (f64)
    launch(Follow<double>{tasks, chunks, count}, blocks, queue.stream);
  else
    launch(Follow<float>{tasks, chunks, count}, blocks, queue.stream);
}

void measure(const Queue& queue, int op, bool f64, const UpdateTask* tasks, const ChunkRef* chunks,
             int64_t count, const ScalarTables& tables, const ga_param* params,
             int64_t param_count) {
  launches_of(f64).measures[op](queue, tasks, chunks, count, tables, params, param_count);
}

void update_rows(const Queue& queue, int op, bool f64, const UpdateTask* tasks,
                 const ga_param* params, int64_t count) {
  launches_of(f64).rows[op](queue, tasks, params, count);
}

}  // namespace ga::cuda
