// SPDX-License-Identifier: Apache-2.0
// An interpreter of PTX, for the code that nvcc makes of this library's kernels. It executes what the PTX ISA
// defines to the bit and refuses everything else by its name. It is no model of a device's memory: the blocks of a
// grid run one after the other, and the threads of a block take turns at barriers and in warp operations.
//
// Registers hold 64 bits for each of the 32 lanes of a warp; an instruction reads as many of them as its type has.
// Constants, addresses and special registers such as %tid.x are registers too, which are filled before the grid
// runs. No function calls itself, so each has registers and local memory of its own, whoever calls it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ga::ptx {

constexpr int kLanes = 32;  // of a warp

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Warp;
struct Instruction;
using Run = void (*)(Warp&, const Instruction&, uint32_t lanes);  // lanes: a bit for each

// What the machine does with an instruction: it runs kPlain; the others decide which one comes next, or wait.
enum class Kind : uint8_t { kPlain, kBranch, kCall, kReturn, kBarrier, kWarp };

struct Instruction {
  Run run = nullptr;
  Kind kind = Kind::kPlain;
  bool negated = false;  // the guard
  uint8_t count = 1;     // elements of a vector
  uint32_t guard = 0;    // the predicate that a lane needs, or 0
  uint32_t to[4] = {};   // registers; 0: none
  uint32_t from[5] = {};
  int64_t number = 0;   // the offset of an address, or a size
  uint32_t target = 0;  // of a branch or call
  const char* text = nullptr;
};

enum class Special : uint8_t { kThread, kBlock, kThreads, kBlocks, kLane };

struct Kernel {
  std::string name;
  std::vector<Instruction> code;
  uint32_t entry = 0;
  uint32_t registers = 1;
  std::vector<std::pair<uint32_t, uint64_t>> constants;
  std::vector<std::pair<uint32_t, Special>> specials;
  size_t argument_bytes = 0;
  size_t lane_bytes = 0;  // local memory of a thread, and the parameters of functions
  size_t shared_bytes = 0;
  unsigned threads = 0;  // of a block, by .maxntid
  std::vector<std::shared_ptr<const std::string>> texts;
};

// Memory of a kernel that has an address in the kernel's code.
char* arguments();
constexpr size_t kMostArguments = 32764;

// The functions of a PTX file, which are compiled on demand. Opcodes of `changes` are replaced by others.
class Module {
 public:
  explicit Module(std::string text, std::map<std::string, std::string> changes = {});

  std::vector<std::string> entries() const;  // mangled
  std::unique_ptr<Kernel> kernel(const std::string& entry) const;

 private:
  friend class Compiler;
  struct Function {
    std::string_view header, body;
    bool entry;
  };
  std::string text_;
  std::map<std::string, Function, std::less<>> functions_;
  std::vector<std::string_view> shared_;  // declarations
  std::map<std::string, std::string> changes_;
};

// The instruction that is called name (`add.rn.f32`) and how many registers it reads. NULL: none.
struct Operation {
  Run run;
  int sources;
};
const Operation* find_operation(std::string_view name);
// Instructions that the compiler builds by hand.
enum class Space { kGlobal, kShared, kLane };
Run load_of(Space space, std::string_view type);  // NULL: no such type
Run store_of(Space space, std::string_view type);
size_t size_of(std::string_view type);  // 0: no such type
Run pack_of(size_t bits, size_t pieces);
Run unpack_of(size_t bits, size_t pieces);
extern const Run kAtomicInc, kCopyLaneMemory, kToLane, kFromLane, kToShared, kFromShared, kShuffle,
    kBallot;

// What a store of the kernel has written to global memory.
struct Store {
  char* at;
  size_t size;
  uint64_t before;
};
// Where stores are listed in their order, or NULL.
void set_journal(std::vector<Store>* journal);

// Executes a grid, one at a time; the arguments are at arguments(). Throws an Error.
void run(const Kernel& kernel, unsigned blocks);

// A warp, while it runs.
class Warp {
 public:
  uint64_t* lanes(uint32_t reg) { return registers + size_t{reg} * kLanes; }
  [[noreturn]] void fail(const Instruction& i, int lane, const std::string& what) const;

  const Kernel* kernel = nullptr;
  uint64_t* registers = nullptr;
  char* memory[kLanes] = {};  // of each lane
  char* shared = nullptr;
  unsigned index = 0;
};

}  // namespace ga::ptx
