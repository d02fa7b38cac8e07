// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/transfer.hpp"

#include <algorithm>

namespace ga::cuda {

constexpr size_t kHalf = size_t{4} << 20;

Transfer::~Transfer() {
  const DeviceScope scope(runtime_.context());
  for (const Half& half : halves_)
    if (half.done && cudaEventDestroy(half.done) != cudaSuccess) cudaGetLastError();
}

// Makes the buffers, and waits until the device has no use of them.
void Transfer::open() {
  runtime_.call([&] {
    runtime_.wait();
    for (Half& half : halves_) {
      void* at = nullptr;
      if (!half.host) half.host = static_cast<char*>(runtime_.allocate_pinned(kHalf, &at));
      if (!half.done)
        runtime_.check(cudaEventCreateWithFlags(&half.done, cudaEventDisableTiming), "an event");
    }
  });
}

// Gives a buffer as many of the next pieces as it has room for; none: there are no more.
void Transfer::cut(Half& half) {
  half.pieces.clear();
  for (size_t room = kHalf; room > 0 && region_ < regions_.size;) {
    const Region& r = regions_.data[region_];
    const size_t bytes = std::min(room, r.bytes - offset_);
    if (bytes > 0) half.pieces.push_back({static_cast<char*>(r.data) + offset_, bytes});
    room -= bytes;
    offset_ += bytes;
    if (offset_ < r.bytes) continue;
    ++region_;
    offset_ = 0;
  }
}

template <class F>
void Transfer::each_piece(Half& half, F&& f) {
  char* host = half.host;
  for (const Piece& piece : half.pieces) {
    f(piece, host);
    host += piece.bytes;
  }
}

void Transfer::queue_copies(Half& half, bool to_device) {
  runtime_.call([&] {
    each_piece(half, [&](const Piece& piece, char* host) {
      runtime_.check(cudaMemcpyAsync(to_device ? piece.data : host, to_device ? host : piece.data,
                                     piece.bytes, cudaMemcpyDefault, runtime_.stream()),
                     to_device ? "a copy to the device" : "a copy from the device");
    });
    runtime_.check(cudaEventRecord(half.done, runtime_.stream()), "an event");
  });
}

void Transfer::wait_for(Half& half) {
  runtime_.call([&] { runtime_.check(cudaEventSynchronize(half.done), "a copy"); });
}

void Transfer::read(Span<const Region> regions, const TakePiece& take) {
  open();
  regions_ = regions;
  region_ = offset_ = 0;
  cut(halves_[0]);
  queue_copies(halves_[0], false);
  for (int k = 0; !halves_[k].pieces.empty(); k = 1 - k) {
    cut(halves_[1 - k]);
    queue_copies(halves_[1 - k], false);
    wait_for(halves_[k]);
    each_piece(halves_[k], [&](const Piece& piece, char* host) { take(host, piece.bytes); });
  }
}

void Transfer::write(Span<const Region> regions, const FillPiece& fill) {
  open();
  regions_ = regions;
  region_ = offset_ = 0;
  for (int k = 0;; k = 1 - k) {
    wait_for(halves_[k]);  // an event that was never recorded is done
    cut(halves_[k]);
    if (halves_[k].pieces.empty()) break;
    each_piece(halves_[k], [&](const Piece& piece, char* host) { fill(host, piece.bytes); });
    queue_copies(halves_[k], true);
  }
  runtime_.call([&] { runtime_.wait(); });
}

}  // namespace ga::cuda
