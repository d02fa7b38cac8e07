// SPDX-License-Identifier: Apache-2.0
#include "races.hpp"

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "../host/engine.hpp"

namespace ga::sim {
namespace {

// ---- Stamps -----------------------------------------------------------------------------

// A thread gets a new stamp at each barrier, fence and atomic operation. Stamps grow in the order of execution, so
// "all accesses of a thread before a stamp" is one number.
using Stamp = uint32_t;
using Stamps = std::vector<Stamp>;  // by thread of a block

// What is known to have happened: by block, the stamp of each thread before which all is known. NULL: nothing.
using Known = std::map<unsigned, std::shared_ptr<const Stamps>>;
using History = std::shared_ptr<const Known>;

History joined(const History& a, const History& b) {
  if (!a || a == b) return b;
  if (!b) return a;
  auto result = std::make_shared<Known>(*a);
  for (const auto& [block, stamps] : *b) {
    std::shared_ptr<const Stamps>& mine = (*result)[block];
    if (!mine) {
      mine = stamps;
    } else if (mine != stamps) {
      auto both = std::make_shared<Stamps>(*mine);
      for (size_t t = 0; t < both->size(); ++t) (*both)[t] = std::max((*both)[t], (*stamps)[t]);
      mine = both;
    }
  }
  return result;
}

struct Thread {
  Stamp stamp = 0;
  History known;           // of other threads, beyond what the last barrier of the block orders
  History read;            // what atomic operations have read; known after a fence
  History fenced;          // what an atomic operation makes known to those that read it
  Stamp fence = 0;         // of the last fence since the barrier; 0: none
  Stamp system_fence = 0;  // of the last one in this launch
};

// ---- Shadow memory ---------------------------------------------------------------------------------

struct Access {
  Stamp stamp = 0;
  uint32_t code = 0;  // in the module; the highest bit: atomic
};
constexpr uint32_t kAtomic = 0x80000000u;

// Of bytes that are accessed alike.
struct Shadow {
  Access write;
  Access reads[2];  // the last one, and the last one of another thread, of the same block
  Access foreign;   // the last read of a block before
};

// Most accesses are of whole words; one of a part of it gives each byte a shadow of its own.
constexpr uintptr_t kWord = 4;
struct Word {
  Shadow all;
  std::unique_ptr<Shadow[]> bytes;
};

constexpr uintptr_t kPage = 4096;
struct ShadowPage {
  Word words[kPage / kWord];
};

// The shadow of all pages that a launch touches. What earlier launches have left is older than any stamp that counts.
class Shadows {
 public:
  ShadowPage* take() {
    if (used_ % kMost == 0 && used_ / kMost == blocks_.size()) {
      void* const block = mmap(nullptr, kMost * sizeof(ShadowPage), PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (block == MAP_FAILED) std::abort();
      madvise(block, kMost * sizeof(ShadowPage), MADV_HUGEPAGE);
      blocks_.push_back(static_cast<ShadowPage*>(block));
    }
    ShadowPage* const result = blocks_[used_ / kMost] + used_ % kMost;
    ++used_;
    return result;
  }
  void take_back_all() { used_ = 0; }

 private:
  static constexpr size_t kMost = 1024;  // pages of a block
  std::vector<ShadowPage*> blocks_;
  size_t used_ = 0;
};

// ---- State -----------------------------------------------------------------------------------------

struct Owner {
  unsigned block, thread;
};

struct Late {  // a store that is a race unless it leaves what was there
  const char* at;
  std::vector<char> before;
  const void* code;
  uint32_t other;
  std::string text;
};

struct State {
  Grid grid = {};
  unsigned block = 0, thread = 0;
  Stamp next = 1;
  Stamp launch = 1, entry = 1, barrier = 1;  // the first stamps of the launch, block and interval
  std::vector<Owner> owners;                 // of the stamps of the launch
  std::vector<Thread> threads;
  std::map<const void*, History> atomics;
  std::vector<Late> late;
  const char *published = nullptr,
             *published_end = nullptr;  // host memory with a volatile store that no fence follows
  Owner publisher = {};

  std::unordered_map<uintptr_t, ShadowPage*> pages;
  Shadows shadows;
  uintptr_t last_page = 0;
  ShadowPage* last_shadow = nullptr;

  const char *module = nullptr, *data = nullptr,
             *data_end = nullptr;  // its base, and what it writes to
  std::string path;                // of the module
  const char *stacks = nullptr, *stacks_end = nullptr;
  size_t stack_size = 1;
};
State& state = *new State;  // never destroyed: needed to the very end of the process

Stamp new_stamp(State& s, unsigned thread) {
  s.owners.push_back({s.block, thread});
  return s.next++;
}

Owner owner_of(const State& s, Stamp stamp) { return s.owners[stamp - s.launch]; }

Word& word_of(State& s, uintptr_t address) {
  const uintptr_t page = address / kPage;
  if (page != s.last_page) {
    ShadowPage*& found = s.pages[page];
    if (!found) found = s.shadows.take();
    s.last_page = page;
    s.last_shadow = found;
  }
  return s.last_shadow->words[address % kPage / kWord];
}

// f(shadow) for all bytes of [begin, end), for those that have one in common once.
template <class F>
void each_shadow(State& s, uintptr_t begin, uintptr_t end, F f) {
  for (uintptr_t a = begin; a < end;) {
    Word& word = word_of(s, a);
    const uintptr_t next = std::min(end, a / kWord * kWord + kWord);
    if (!word.bytes) {
      if (next - a == kWord) {
        f(word.all);
        a = next;
        continue;
      }
      word.bytes = std::make_unique<Shadow[]>(kWord);
      std::fill_n(word.bytes.get(), kWord, word.all);
    }
    for (; a < next; ++a) f(word.bytes[a % kWord]);
  }
}

// ---- Reports ---------------------------------------------------------------------------------------

constexpr int kMostPrinted = 10;
int reports = 0;

uint32_t offset_of(const State& s, const void* code) {
  return static_cast<uint32_t>(static_cast<const char*>(code) - s.module);
}

// The lines of the source that an instruction is compiled from, the innermost inlined one first.
std::string lines_of(const State& s, uint32_t offset) {
  char command[4096];
  std::snprintf(command, sizeof command, "addr2line -i -e '%s' 0x%x 2>/dev/null", s.path.c_str(),
                offset - 1);
  std::string lines;
  if (FILE* pipe = popen(command, "r")) {
    char line[1024];
    while (std::fgets(line, sizeof line, pipe)) {
      std::string text(line);
      if (const size_t at = text.find("/src/"); at != std::string::npos) text = text.substr(at + 1);
      text = text.substr(0, text.find_first_of(" \n"));
      lines += (lines.empty() ? "" : " < ") + text;
    }
    pclose(pipe);
  }
  return lines;
}

// other: where the other access is.
void report(const void* code, const char* text, uint32_t other = 0) {
  State& s = state;
  static std::set<std::tuple<const void*, uint32_t>> known;
  if (reports == 0) {
    std::atexit([] {
      std::fflush(nullptr);
      std::fprintf(stderr, "executor: %d found\n", reports);
      _exit(66);
    });
  }
  ++reports;
  if (!known.insert({code, other}).second || static_cast<int>(known.size()) > kMostPrinted) return;
  std::fprintf(stderr, "executor: %s\n    in block %u, thread %u of %s\n", text, s.block, s.thread,
               s.grid.kernel);
  if (code) std::fprintf(stderr, "    at %s\n", lines_of(s, offset_of(s, code)).c_str());
  if (other) std::fprintf(stderr, "    and at %s\n", lines_of(s, other).c_str());
  static const bool halts = std::getenv("GA_EXECUTOR_HALT") != nullptr;
  if (halts) _exit(66);
}

const char* name_of(Space space) {
  return space == Space::kShared ? "shared" : space == Space::kLocal ? "local" : "global";
}

std::string conflict(const State& s, const char* what, size_t size, const void* at,
                     const char* other, Access access) {
  const Owner by = owner_of(s, access.stamp);
  char text[512];
  std::snprintf(text, sizeof text,
                "data race: a %s of %zu bytes of %s memory, after a %s in block %u, thread %u",
                what, size, name_of(space_of(at)), other, by.block, by.thread);
  return text;
}

// ---- Accesses --------------------------------------------------------------------------------------

bool is_ordered(const State& s, const Thread& me, Stamp stamp) {
  const Owner by = owner_of(s, stamp);
  if (by.block == s.block && (by.thread == s.thread || stamp < s.barrier)) return true;
  if (!me.known) return false;
  const auto found = me.known->find(by.block);
  return found != me.known->end() && stamp < (*found->second)[by.thread];
}

// Reports the stores that turn out to change what another thread has stored.
void settle(State& s) {
  for (const Late& late : s.late) {
    if (std::memcmp(late.at, late.before.data(), late.before.size()) != 0)
      report(late.code, late.text.c_str(), late.other);
  }
  s.late.clear();
}

// An access to `size` bytes, of which a byte is checked at a time.
struct Check {
  State& s;
  const Thread& me;
  const void* at;
  size_t size;
  const void* code;
  Stamp first;  // accesses before are in order
  Access access;
  bool told = false;        // what is found is reported once
  bool unwritten = false;   // a byte is read that was not written
  Access overwritten = {};  // a store without order before this one

  void read(Shadow& shadow);
  void write(Shadow& shadow);

 private:
  bool conflicts(Access with) const {
    return with.stamp >= first && !(with.code & access.code & kAtomic) &&
           !is_ordered(s, me, with.stamp);
  }
  void tell(const char* what, const char* other, Access with) {
    if (!told) report(code, conflict(s, what, size, at, other, with).c_str(), with.code & ~kAtomic);
    told = true;
  }
};

void Check::read(Shadow& shadow) {
  if (conflicts(shadow.write)) tell("read", "write", shadow.write);
  unwritten = unwritten || shadow.write.stamp < first;
  Access& last = shadow.reads[0];
  if (last.stamp >= first && last.stamp != access.stamp) {
    const Owner by = owner_of(s, last.stamp);
    if (by.block != s.block) {
      shadow.foreign = last;
      shadow.reads[1] = {};
    } else if (by.thread != s.thread) {
      shadow.reads[1] = last;
    }
  }
  last = access;
}

void Check::write(Shadow& shadow) {
  for (const Access& read : {shadow.reads[0], shadow.reads[1], shadow.foreign}) {
    if (conflicts(read)) tell("write", "read", read);
  }
  if (conflicts(shadow.write)) overwritten = shadow.write;
  shadow.write = access;
}

// Host code of the module is compiled in the same way, and runs in other threads too.
bool in_kernel(const State& s) {
  const auto* const here = static_cast<const char*>(__builtin_frame_address(0));
  return here >= s.stacks && here < s.stacks_end;
}

void note(const void* at, size_t size, bool writes, bool atomic, const void* code) {
  State& s = state;
  if (!in_kernel(s)) return;
  if (!s.late.empty()) settle(s);
  const auto* const p = static_cast<const char*>(at);
  if (p >= s.stacks && p < s.stacks_end) {
    if (static_cast<size_t>(p - s.stacks) / s.stack_size != s.thread)
      report(code, "an access to local memory of another thread");
    return;
  }
  const bool shared = space_of(at) == Space::kShared;
  Check check = {s,
                 s.threads[s.thread],
                 at,
                 size,
                 code,
                 shared ? s.entry : s.launch,
                 {s.threads[s.thread].stamp, offset_of(s, code) | (atomic ? kAtomic : 0)}};
  const auto begin = reinterpret_cast<uintptr_t>(at);
  if (writes)
    each_shadow(s, begin, begin + size, [&](Shadow& shadow) { check.write(shadow); });
  else
    each_shadow(s, begin, begin + size, [&](Shadow& shadow) { check.read(shadow); });
  if (!writes && shared && check.unwritten)
    report(code, "a read of shared memory that its block has not written");
  if (check.overwritten.stamp != 0 && !check.told)
    s.late.push_back({p, std::vector<char>(p, p + size), code, check.overwritten.code & ~kAtomic,
                      conflict(s, "write", size, at, "write of another value", check.overwritten)});
  if (writes && p >= s.published && p < s.published_end)
    report(code, "a store to host memory after a volatile one, without a system fence between");
}

// Stores to host memory must not pass the fence of the volatile one that tells the host about them.
void note_volatile_store(const void* at, size_t size, const void* code) {
  State& s = state;
  if (!in_kernel(s)) return;
  s.published = s.published_end = nullptr;
  note(at, size, true, true, code);
  if (space_of(at) != Space::kGlobal) return;
  const Allocation* const a = Engine::get().find(at);
  if (!a || a->memory == Memory::kDevice) return;
  const Thread& me = s.threads[s.thread];
  bool passes = false;
  const auto begin = reinterpret_cast<uintptr_t>(a->begin);
  each_shadow(s, begin, begin + a->size, [&](const Shadow& shadow) {
    const Access& write = shadow.write;
    if (write.stamp < std::max(s.launch, me.system_fence) || (write.code & kAtomic)) return;
    const Owner by = owner_of(s, write.stamp);
    passes = passes || (by.block == s.block && by.thread == s.thread);
  });
  if (passes)
    report(code,
           "a volatile store to host memory after another one, without a system fence between");
  s.published = a->begin;
  s.published_end = a->begin + a->size;
}

void find_module(State& s, const void* code) {
  Dl_info info;
  if (!dladdr(code, &info) || info.dli_fbase == s.module) return;
  s.module = static_cast<const char*>(info.dli_fbase);
  s.path = info.dli_fname;
  dl_iterate_phdr(
      [](dl_phdr_info* object, size_t, void* data) {
        State& s = *static_cast<State*>(data);
        if (reinterpret_cast<const char*>(object->dlpi_addr) != s.module) return 0;
        for (int i = 0; i < object->dlpi_phnum; ++i) {
          const auto& segment = object->dlpi_phdr[i];
          if (segment.p_type != PT_LOAD || !(segment.p_flags & PF_W)) continue;
          s.data = s.module + segment.p_vaddr;
          s.data_end = s.data + segment.p_memsz;
        }
        return 1;
      },
      &s);
}

void report_as(const void* code, const char* format, va_list arguments) {
  char text[512];
  std::vsnprintf(text, sizeof text, format, arguments);
  report(code, text);
}

}  // namespace

void found(const void* code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  report_as(code, format, arguments);
  va_end(arguments);
}

void found_fatal(const void* code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  report_as(code, format, arguments);
  va_end(arguments);
  std::fflush(nullptr);
  _exit(66);
}

void set_stacks(const char* begin, size_t each, unsigned count) {
  State& s = state;
  s.stacks = begin;
  s.stacks_end = begin + each * count;
  s.stack_size = each;
}

uintptr_t module_offset(const void* code) { return offset_of(state, code); }

// What the module writes to outside of kernels is not accessed by kernels.
Space space_of(const void* p) {
  const State& s = state;
  const auto* const c = static_cast<const char*>(p);
  if (c >= s.stacks && c < s.stacks_end) return Space::kLocal;
  return c >= s.data && c < s.data_end ? Space::kShared : Space::kGlobal;
}

void begin_grid(const Grid& grid) {
  State& s = state;
  s.grid = grid;
  find_module(s, grid.code);
  if (s.pages.size() > 4096) {
    s.pages.clear();
    s.shadows.take_back_all();
    s.last_page = 0;
  }
  if (s.next > 0xf0000000u) {
    std::fprintf(stderr, "executor: a process has executed too much\n");
    std::abort();
  }
  s.launch = s.next;
  s.owners.clear();
  s.atomics.clear();
  s.threads.assign(grid.threads, {});
}

void begin_block(unsigned block) {
  State& s = state;
  s.block = block;
  s.entry = s.barrier = s.next;
  for (unsigned t = 0; t < s.grid.threads; ++t) {
    s.threads[t] = {};
    s.threads[t].stamp = new_stamp(s, t);
  }
}

void enter_thread(unsigned thread) {
  State& s = state;
  s.thread = thread;
}

void leave_thread() {
  State& s = state;
  settle(s);
  s.published = s.published_end = nullptr;
}

// What a thread has fenced, the threads of its block may tell after a barrier.
void pass_barrier() {
  State& s = state;
  History known, read, fenced;
  auto stamps = std::make_shared<Stamps>(s.grid.threads, 0);
  bool any = false;
  for (unsigned t = 0; t < s.grid.threads; ++t) {
    const Thread& thread = s.threads[t];
    known = joined(known, thread.known);
    read = joined(read, thread.read);
    fenced = joined(fenced, thread.fenced);
    if (thread.fence == 0) continue;
    any = true;
    fenced = joined(fenced, thread.known);
    for (Stamp& stamp : *stamps) stamp = std::max(stamp, s.barrier);
    (*stamps)[t] = thread.fence;
  }
  if (any) fenced = joined(fenced, std::make_shared<const Known>(Known{{s.block, stamps}}));
  s.barrier = s.next;
  for (unsigned t = 0; t < s.grid.threads; ++t) {
    Thread& thread = s.threads[t];
    thread = {new_stamp(s, t), known, read, fenced, 0, thread.system_fence};
  }
}

void pass_fence(bool system) {
  State& s = state;
  settle(s);
  Thread& me = s.threads[s.thread];
  me.known = joined(me.known, me.read);
  me.read = nullptr;
  me.stamp = me.fence = new_stamp(s, s.thread);
  if (!system) return;
  me.system_fence = me.stamp;
  s.published = s.published_end = nullptr;
}

void pass_atomic(const void* at, const void* code) {
  State& s = state;
  note(at, sizeof(unsigned), true, true, code);
  Thread& me = s.threads[s.thread];
  History& told = s.atomics[at];
  me.read = joined(me.read, told);
  told = joined(told, me.fenced);
  if (me.fence != 0) {
    auto stamps = std::make_shared<Stamps>(s.grid.threads, s.barrier);
    (*stamps)[s.thread] = me.fence;
    told = joined(told, joined(me.known, std::make_shared<const Known>(Known{{s.block, stamps}})));
  }
  me.stamp = new_stamp(s, s.thread);
}

void note_access(const void* at, size_t size, bool writes, const void* code) {
  note(at, size, writes, false, code);
}

}  // namespace ga::sim

// ---- What the compiler calls -------------------------------------------------------------------------

#define GA_HERE __builtin_return_address(0)
#define GA_ACCESSES(size)                                                                      \
  void __tsan_read##size(const void* p) { ga::sim::note_access(p, size, false, GA_HERE); }     \
  void __tsan_write##size(void* p) { ga::sim::note_access(p, size, true, GA_HERE); }           \
  void __tsan_unaligned_read##size(const void* p) {                                            \
    ga::sim::note_access(p, size, false, GA_HERE);                                             \
  }                                                                                            \
  void __tsan_unaligned_write##size(void* p) { ga::sim::note_access(p, size, true, GA_HERE); } \
  void __tsan_volatile_read##size(const void* p) {                                             \
    ga::sim::note_access(p, size, false, GA_HERE);                                             \
  }                                                                                            \
  void __tsan_volatile_write##size(void* p) { ga::sim::note_volatile_store(p, size, GA_HERE); }

extern "C" {
GA_ACCESSES(1)
GA_ACCESSES(2)
GA_ACCESSES(4)
GA_ACCESSES(8)
GA_ACCESSES(16)
void __tsan_init() {}
// Only host code has these, but for the guards of shared variables whose constructor is empty.
uint8_t __tsan_atomic8_load(const volatile uint8_t* p, int order) {
  return __atomic_load_n(p, order);
}
uint32_t __tsan_atomic32_fetch_add(volatile uint32_t* p, uint32_t x, int) {
  return __atomic_fetch_add(p, x, __ATOMIC_SEQ_CST);
}
uint32_t __tsan_atomic32_fetch_sub(volatile uint32_t* p, uint32_t x, int) {
  return __atomic_fetch_sub(p, x, __ATOMIC_SEQ_CST);
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_read_range(const void* p, size_t size) {
  ga::sim::note_access(p, size, false, GA_HERE);
}
void __tsan_write_range(void* p, size_t size) { ga::sim::note_access(p, size, true, GA_HERE); }
}
