// SPDX-License-Identifier: Apache-2.0
// Row-sparse contributions: the rows that have a gradient in the window, and their update.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/backend.hpp"
#include "backend/cpu/kernels.hpp"
#include "backend/cpu/lists.hpp"
#include "backend/cpu/threads.hpp"

namespace ga::cpu {

class Rows {
 public:
  Rows(const Kernels& kernels, Threads& threads, Lists& lists)
      : kernels_(kernels), threads_(threads), lists_(lists) {}

  // As in Backend.
  int64_t check(const RowsTask& task) const;
  void prepare(const RowsTask& task, int64_t waiting);
  void accumulate(const RowsTask& task);
  void free(RowSet* set) noexcept;
  // Updates the rows with a gradient, as many at a time as there is room for, then the EMA.
  void update(const UpdateTask& task);

  int64_t entry_bytes() const {  // of all sets
    return capacity_ * static_cast<int64_t>(sizeof(RowEntry));
  }
  int64_t bytes() const {
    return static_cast<int64_t>(chains_.capacity() * sizeof(Chain) +
                                next_.capacity() * sizeof(int64_t) +
                                order_.capacity() * sizeof(Touched));
  }

 private:
  // The contributions of one call to a row.
  struct Chain {
    int64_t first, last;
  };
  struct Touched {
    uint32_t slot;
    bool keep;  // the row has a gradient already
  };

  void make_room(RowSet& set, int64_t capacity);
  void add(const RowsTask& task, int64_t index);
  void add_means(const UpdateTask& task, Span<const RowEntry> rows);

  const Kernels& kernels_;
  Threads& threads_;
  Lists& lists_;
  int64_t capacity_ = 0;  // of all sets
  // Of accumulate(): the chain of each entry of the set, the next contribution after each one, and
  // the entries of the call.
  std::vector<Chain> chains_;
  std::vector<int64_t> next_;
  std::vector<Touched> order_;
};

}  // namespace ga::cpu
