// SPDX-License-Identifier: Apache-2.0
// Instructions on memory, on vectors of registers and between the lanes of a warp, as the PTX ISA defines them
// (chapter 9.7).
#include <cstring>

#include "ptx.hpp"
#include "registers.hpp"

namespace ga::ptx {
namespace {

// ---- Memory --------------------------------------------------------------------------------------------

template <Space space>
char* address(Warp& warp, const Instruction& i, int lane, size_t size) {
  const u64 at = warp.lanes(i.from[0])[lane] + static_cast<u64>(i.number);
  char* p;
  if constexpr (space == Space::kGlobal) {
    p = reinterpret_cast<char*>(at);
  } else {
    const u64 offset = space == Space::kShared ? u64{static_cast<u32>(at)} : at;
    const size_t limit =
        space == Space::kShared ? warp.kernel->shared_bytes : warp.kernel->lane_bytes;
    if (offset > limit || size > limit - offset) warp.fail(i, lane, "is out of bounds");
    p = (space == Space::kShared ? warp.shared : warp.memory[lane]) + offset;
  }
  if ((reinterpret_cast<uintptr_t>(p) & (size - 1)) != 0) warp.fail(i, lane, "is not aligned");
  return p;
}

template <Space space, class T>
void load(Warp& warp, const Instruction& i, u32 lanes) {
  each(lanes, [&](int l) {
    const char* p = address<space>(warp, i, l, sizeof(T) * i.count);
    for (int k = 0; k < i.count; ++k) {
      T x;
      std::memcpy(&x, p + k * sizeof(T), sizeof(T));
      warp.lanes(i.to[k])[l] = bits_of(x);
    }
  });
}

std::vector<Store>* journal = nullptr;

template <class T>
void write(char* p, T x) {
  if (journal) {
    T before;
    std::memcpy(&before, p, sizeof before);
    journal->push_back({p, sizeof before, before});
  }
  std::memcpy(p, &x, sizeof x);
}

template <Space space, class T>
void store(Warp& warp, const Instruction& i, u32 lanes) {
  each(lanes, [&](int l) {
    char* p = address<space>(warp, i, l, sizeof(T) * i.count);
    for (int k = 0; k < i.count; ++k) {
      const auto x = value<T>(warp.lanes(i.from[1 + k])[l]);
      if constexpr (space == Space::kGlobal) {
        write(p + k * sizeof(T), static_cast<std::make_unsigned_t<T>>(x));
      } else {
        std::memcpy(p + k * sizeof(T), &x, sizeof(T));
      }
    }
  });
}

struct Type {
  std::string_view name;
  size_t size;
  Run load[3], store[3];
};
template <class T>
constexpr Type type(std::string_view name) {
  return {name,
          sizeof(T),
          {load<Space::kGlobal, T>, load<Space::kShared, T>, load<Space::kLane, T>},
          {store<Space::kGlobal, T>, store<Space::kShared, T>, store<Space::kLane, T>}};
}
constexpr Type kTypes[] = {type<u8>("b8"),   type<u8>("u8"),   type<s8>("s8"),   type<u16>("b16"),
                           type<u16>("u16"), type<s16>("s16"), type<u32>("b32"), type<u32>("u32"),
                           type<s32>("s32"), type<u32>("f32"), type<u64>("b64"), type<u64>("u64"),
                           type<s64>("s64"), type<u64>("f64")};

const Type* find_type(std::string_view name) {
  for (const Type& t : kTypes)
    if (t.name == name) return &t;
  return nullptr;
}

// The old value; counts from 0 to from[1] and then from 0 again.
void atomic_inc(Warp& warp, const Instruction& i, u32 lanes) {
  each(lanes, [&](int l) {
    char* p = address<Space::kGlobal>(warp, i, l, 4);
    u32 old;
    std::memcpy(&old, p, 4);
    const u32 now = old >= value<u32>(warp.lanes(i.from[1])[l]) ? 0 : old + 1;
    write(p, now);
    warp.lanes(i.to[0])[l] = old;
  });
}

// The memory of a lane from from[0] on is copied to to[0].
void copy_lane_memory(Warp& warp, const Instruction& i, u32 lanes) {
  each(lanes, [&](int l) {
    std::memcpy(warp.memory[l] + i.to[0], warp.memory[l] + i.from[0],
                static_cast<size_t>(i.number));
  });
}

// Between generic addresses, which are the host's, and offsets.
template <Space space, int sign>
void convert_address(Warp& warp, const Instruction& i, u32 lanes) {
  each(lanes, [&](int l) {
    const auto base = reinterpret_cast<u64>(space == Space::kShared ? warp.shared : warp.memory[l]);
    const u64 x = warp.lanes(i.from[0])[l];
    warp.lanes(i.to[0])[l] = sign > 0 ? x + base : x - base;
  });
}

// ---- Vectors of registers ------------------------------------------------------------------------------

template <int piece_bits>
void pack(Warp& warp, const Instruction& i, u32 lanes) {
  each(lanes, [&](int l) {
    u64 x = 0;
    for (int k = 0; k < i.count; ++k) {
      const u64 piece = warp.lanes(i.from[k])[l] & ((u64{1} << piece_bits) - 1);
      x |= piece << (k * piece_bits);
    }
    warp.lanes(i.to[0])[l] = x;
  });
}

template <int piece_bits>
void unpack(Warp& warp, const Instruction& i, u32 lanes) {
  each(lanes, [&](int l) {
    const u64 x = warp.lanes(i.from[0])[l];
    for (int k = 0; k < i.count; ++k) {
      if (i.to[k] != 0)
        warp.lanes(i.to[k])[l] = x >> (k * piece_bits) & ((u64{1} << piece_bits) - 1);
    }
  });
}

// ---- Warps ---------------------------------------------------------------------------------------------

// shfl.sync.bfly: from the lane whose number differs in from[1], within the segment that from[2] describes. The
// last source is the mask.
void shuffle(Warp& warp, const Instruction& i, u32 lanes) {
  const u64* from = warp.lanes(i.from[0]);
  u64 result[kLanes];
  bool within[kLanes];
  each(lanes, [&](int l) {
    const u32 b = value<u32>(warp.lanes(i.from[1])[l]) & 31,
              c = value<u32>(warp.lanes(i.from[2])[l]);
    const int segment = static_cast<int>(c >> 8 & 31), clamp = static_cast<int>(c & 31);
    const int most = (l & segment) | (clamp & ~segment);
    const int other = l ^ static_cast<int>(b);
    within[l] = other <= most;
    const int source = within[l] ? other : l;
    if ((lanes >> source & 1) == 0) warp.fail(i, l, "reads a lane that the mask does not name");
    result[l] = value<u32>(from[source]);
  });
  each(lanes, [&](int l) {
    warp.lanes(i.to[0])[l] = result[l];
    if (i.to[1] != 0) warp.lanes(i.to[1])[l] = within[l];
  });
}

void ballot(Warp& warp, const Instruction& i, u32 lanes) {
  u32 result = 0;
  each(lanes, [&](int l) { result |= u32{warp.lanes(i.from[0])[l] != 0} << l; });
  each(lanes, [&](int l) { warp.lanes(i.to[0])[l] = result; });
}

}  // namespace

void set_journal(std::vector<Store>* to) { journal = to; }

size_t size_of(std::string_view type) {
  const Type* t = find_type(type);
  return t ? t->size : 0;
}
Run load_of(Space space, std::string_view type) {
  const Type* t = find_type(type);
  return t ? t->load[static_cast<int>(space)] : nullptr;
}
Run store_of(Space space, std::string_view type) {
  const Type* t = find_type(type);
  return t ? t->store[static_cast<int>(space)] : nullptr;
}
Run pack_of(size_t bits, size_t pieces) {
  return bits == 64 && pieces == 2   ? pack<32>
         : bits == 64 && pieces == 4 ? pack<16>
         : bits == 32 && pieces == 2 ? pack<16>
                                     : nullptr;
}
Run unpack_of(size_t bits, size_t pieces) {
  return bits == 64 && pieces == 2   ? unpack<32>
         : bits == 64 && pieces == 4 ? unpack<16>
         : bits == 32 && pieces == 2 ? unpack<16>
                                     : nullptr;
}

const Run kAtomicInc = atomic_inc;
const Run kCopyLaneMemory = copy_lane_memory;
const Run kToLane = convert_address<Space::kLane, -1>, kFromLane = convert_address<Space::kLane, 1>;
const Run kToShared = convert_address<Space::kShared, -1>,
          kFromShared = convert_address<Space::kShared, 1>;
const Run kShuffle = shuffle, kBallot = ballot;

}  // namespace ga::ptx
