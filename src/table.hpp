// SPDX-License-Identifier: Apache-2.0
// Arrays of plain structs between the host and the loops: a Table is written by the host, a State
// where the arrays are.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "backend/backend.hpp"

namespace ga {

// Both classes write their assignments out. Where the compiler makes the assignment, gcc 12 at -O1 and
// -O2 has x = y.grown() write its result straight into x, which holds garbage if grown() throws.

template <class T>
class Table {
 public:
  Table() = default;
  Table(const Table&) = default;
  Table& operator=(const Table& other) noexcept {
    mirror_ = other.mirror_;
    size_ = other.size_;
    first_ = other.first_;
    last_ = other.last_;
    return *this;
  }

  size_t size() const { return size_; }
  const T& operator[](size_t i) const { return host()[i]; }
  T& edit(size_t i) {
    first_ = std::min(first_, i);
    last_ = std::max(last_, i + 1);
    return host()[i];
  }
  // Edits it where it is not like that already.
  template <class Member>
  void set(size_t i, Member T::*member, const Member& value) {
    if (!(host()[i].*member == value)) edit(i).*member = value;
  }
  // Writes a pointer in it, which no flush will send: the word is for Backend::upload.
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

  // Room for size elements in all, in a table that takes this one's place when it is swapped in.
  Table grown(Backend& backend, size_t size) const {
    Table t;
    t.mirror_ = backend.mirror(std::max<size_t>(size, 1) * sizeof(T));
    t.size_ = size;
    if (size_ > 0) std::memcpy(t.mirror_.host, mirror_.host, size_ * sizeof(T));
    t.first_ = 0;
    t.last_ = size;
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
  void release(Backend& backend) noexcept {
    backend.free(mirror_);
    *this = Table();
  }

 private:
  T* host() const { return static_cast<T*>(mirror_.host); }

  Mirror mirror_;
  size_t size_ = 0;
  size_t first_ = static_cast<size_t>(-1), last_ = 0;  // edited since the last flush
};

template <class T>
class State {
 public:
  State() = default;
  State(const State&) = default;
  State& operator=(const State& other) noexcept {
    data_ = other.data_;
    size_ = other.size_;
    capacity_ = other.capacity_;
    return *this;
  }

  T* at(size_t i = 0) const { return data_ + i; }
  int64_t bytes() const { return static_cast<int64_t>(capacity_ * sizeof(T)); }

  // As Table::grown; what is new is zeros.
  State grown(Backend& backend, size_t size) const {
    State s;
    s.capacity_ = std::max<size_t>(size, 1);
    s.data_ = static_cast<T*>(backend.allocate(s.capacity_ * sizeof(T)));
    s.size_ = size;
    try {
      if (size_ > 0) backend.copy(s.data_, data_, size_ * sizeof(T));
    } catch (...) {
      s.release(backend);
      throw;
    }
    return s;
  }
  void release(Backend& backend) noexcept {
    backend.free(data_, capacity_ * sizeof(T));
    *this = State();
  }

 private:
  T* data_ = nullptr;
  size_t size_ = 0, capacity_ = 0;
};

}  // namespace ga
