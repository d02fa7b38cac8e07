// SPDX-License-Identifier: Apache-2.0
// Large arrays between the device and the host, through two pinned buffers: one is on its way while the
// host works on the other.
#pragma once

#include <vector>

#include "backend/cuda/runtime.hpp"

namespace ga::cuda {

class Transfer {
 public:
  explicit Transfer(Runtime& runtime) : runtime_(runtime) {}
  ~Transfer();
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  // As in Backend. The program's functions run with the device that was current.
  void read(Span<const Region> regions, const TakePiece& take);
  void write(Span<const Region> regions, const FillPiece& fill);

 private:
  struct Piece {
    char* data;  // on the device
    size_t bytes;
  };
  // A buffer with the pieces that lie in it, one behind the other.
  struct Half {
    char* host = nullptr;
    cudaEvent_t done = nullptr;
    std::vector<Piece> pieces;
  };

  void open();
  void cut(Half& half);
  void queue_copies(Half& half, bool to_device);
  void wait_for(Half& half);
  template <class F>
  static void each_piece(Half& half, F&& f);

  Runtime& runtime_;
  Half halves_[2];
  // What is left to be cut into pieces.
  Span<const Region> regions_ = {};
  size_t region_ = 0, offset_ = 0;
};

}  // namespace ga::cuda
