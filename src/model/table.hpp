// SPDX-License-Identifier: Apache-2.0
// Memory of a backend that frees itself, and arrays of plain structs in it that the host and the
// kernels share: a Table is written by the host, a State where the kernels run.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "backend/backend.hpp"

namespace ga {

// The classes here write their assignments out. Where the compiler makes the assignment, gcc 12 at -O1
// and -O2 has x = y.grown() write its result straight into x, which holds garbage if grown() throws.

class Buffer {
 public:
  Buffer() = default;
  // Zeros; throws std::bad_alloc.
  Buffer(Backend& backend, size_t bytes)
      : backend_(&backend), data_(backend.allocate(bytes)), bytes_(bytes) {}
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Buffer() {
    if (data_) backend_->free(data_, bytes_);
  }

  void swap(Buffer& other) noexcept {
    std::swap(backend_, other.backend_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  Backend* backend_ = nullptr;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

template <class T>
class Table {
 public:
  Table() = default;
  // Zeros, nothing of which flush() would send.
  Table(Backend& backend, size_t size)
      : backend_(&backend),
        mirror_(backend.mirror(std::max<size_t>(size, 1) * sizeof(T))),
        size_(size) {}
  Table(Table&& other) noexcept { swap(other); }
  Table& operator=(Table&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Table() {
    if (backend_) backend_->free(mirror_);
  }

  void swap(Table& other) noexcept {
    std::swap(backend_, other.backend_);
    std::swap(mirror_, other.mirror_);
    std::swap(size_, other.size_);
    std::swap(first_, other.first_);
    std::swap(last_, other.last_);
  }
  size_t size() const { return size_; }
  const T& operator[](size_t i) const { return host()[i]; }
  T& edit(size_t i) {
    first_ = std::min(first_, i);
    last_ = std::max(last_, i + 1);
    return host()[i];
  }
  // Edits the member of an entry unless it has that value already.
  template <class Member, class Entry = T>
  void set(size_t i, Member Entry::*member, const Member& value) {
    if (!(host()[i].*member == value)) edit(i).*member = value;
  }
  // Writes a pointer that no flush() will send into an entry: the word is for Backend::upload.
  // field(T&): that pointer.
  template <class Field>
  Word put(size_t i, Field&& field, const void* value) {
    const void*& pointer = field(host()[i]);
    pointer = value;
    const auto offset = reinterpret_cast<char*>(&pointer) - static_cast<char*>(mirror_.host);
    return {reinterpret_cast<uint64_t*>(static_cast<char*>(mirror_.at) + offset),
            reinterpret_cast<uint64_t>(value)};
  }
  const T* host_data() const { return host(); }
  T* at(size_t i = 0) const { return static_cast<T*>(mirror_.at) + i; }
  int64_t bytes() const { return static_cast<int64_t>(mirror_.bytes); }

  // A table with room for size elements that takes this one's place when it is swapped in.
  Table grown(Backend& backend, size_t size) const {
    Table t(backend, size);
    if (size_ > 0) std::memcpy(t.mirror_.host, mirror_.host, size_ * sizeof(T));
    t.edit_all();
    return t;
  }
  void edit_all() {
    first_ = 0;
    last_ = size_;
  }
  void flush(Backend& backend) {
    if (first_ >= last_) return;
    backend.upload(mirror_, first_ * sizeof(T), (last_ - first_) * sizeof(T));
    first_ = static_cast<size_t>(-1);
    last_ = 0;
  }

 private:
  T* host() const { return static_cast<T*>(mirror_.host); }

  Backend* backend_ = nullptr;
  Mirror mirror_;
  size_t size_ = 0;
  size_t first_ = static_cast<size_t>(-1), last_ = 0;  // edited since the last flush
};

template <class T>
class State {
 public:
  State() = default;
  State(State&& other) noexcept { swap(other); }
  State& operator=(State&& other) noexcept {
    swap(other);
    return *this;
  }

  void swap(State& other) noexcept {
    buffer_.swap(other.buffer_);
    std::swap(size_, other.size_);
  }
  T* at(size_t i = 0) const { return static_cast<T*>(buffer_.data()) + i; }
  int64_t bytes() const { return static_cast<int64_t>(buffer_.bytes()); }

  // As Table::grown; what is new is zeros.
  State grown(Backend& backend, size_t size) const {
    State s;
    s.buffer_ = Buffer(backend, std::max<size_t>(size, 1) * sizeof(T));
    s.size_ = size;
    if (size_ > 0) backend.copy(s.at(), at(), size_ * sizeof(T));
    return s;
  }
  // The host has written nothing of a State that would have to be sent.
  void edit_all() {}
  void flush(Backend&) {}

 private:
  Buffer buffer_;
  size_t size_ = 0;
};

}  // namespace ga
