// SPDX-License-Identifier: Apache-2.0
// From the text of a function to instructions.
#include <algorithm>
#include <cstring>
#include <set>

#include "ptx.hpp"
#include "text.hpp"

namespace ga::ptx {
namespace {

bool parse_number(std::string_view s, uint64_t& bits) {
  const std::string text(s);
  if (text.rfind("0f", 0) == 0 || text.rfind("0d", 0) == 0) {
    char* end;
    bits = std::strtoull(text.c_str() + 2, &end, 16);
    return *end == 0 && text.size() == (text[1] == 'f' ? 10 : 18);
  }
  if (text.empty() || (text[0] != '-' && std::isdigit(static_cast<unsigned char>(text[0])) == 0))
    return false;
  char* end;
  bits = text[0] == '-' ? static_cast<uint64_t>(std::strtoll(text.c_str(), &end, 0))
                        : std::strtoull(text.c_str(), &end, 0);
  if (*end == 'U') ++end;
  return *end == 0;
}

}  // namespace

class Compiler {
 public:
  explicit Compiler(const Module& module) : module_(module), kernel_(new Kernel) {}

  std::unique_ptr<Kernel> compile(const std::string& name) {
    kernel_->name = name;
    kernel_->entry = function(name).start;
    return std::move(kernel_);
  }

 private:
  enum class Where { kRegister, kArgument, kLane, kShared };
  struct Symbol {
    Where where;
    uint64_t at;  // the number of the register, or the offset
    size_t size = 0;
  };
  struct Parameter {
    std::string name;
    size_t at, size;
  };
  struct Compiled {
    uint32_t start = 0;
    uint32_t back = 0;  // the register with the address to return to
    std::vector<Parameter> results, parameters;
  };
  using Scope = std::map<std::string, Symbol, std::less<>>;
  struct Range {
    std::string prefix;
    uint64_t first, count;
  };

  [[noreturn]] void fail(const std::string& what) const {
    throw Error(kernel_->name + ": " + what + ": " + std::string(statement_));
  }

  // ---- Functions ----

  const Compiled& function(const std::string& name) {
    if (const auto done = compiled_.find(name); done != compiled_.end()) return done->second;
    const auto found = module_.functions_.find(name);
    if (found == module_.functions_.end()) throw Error("the PTX has no function " + name);
    if (!open_.insert(name).second) throw Error(name + " calls itself");
    const auto& [header, body, entry] = found->second;

    // A function has a lower address than those that call it, which the machine relies on.
    auto text = std::make_shared<const std::string>(without_comments(body));
    kernel_->texts.push_back(text);
    for (const std::string& callee : calls(*text)) function(callee);

    Compiled self;
    self.back = new_register();
    Scope symbols;
    declare_parameters(header, entry, self, symbols);
    self.start = static_cast<uint32_t>(kernel_->code.size());
    scopes_ = {std::move(symbols)};
    ranges_.clear();
    labels_.clear();
    jumps_.clear();
    back_ = self.back;
    is_entry_ = entry;
    statements(*text);
    for (const auto& [at, label] : jumps_) {
      const auto target = labels_.find(label);
      if (target == labels_.end()) throw Error(kernel_->name + ": there is no label " + label);
      kernel_->code[at].target = target->second;
    }
    open_.erase(name);
    return compiled_.emplace(name, std::move(self)).first->second;
  }

  static std::string without_comments(std::string_view body) {
    std::string text;
    text.reserve(body.size());
    for (size_t k = 0; k < body.size(); ++k) {
      if (body.substr(k, 2) == "//") {
        k = std::min(body.find('\n', k), body.size()) - 1;
      } else {
        text += body[k];
      }
    }
    return text;
  }

  std::set<std::string> calls(std::string_view text) const {
    std::set<std::string> names;
    for (size_t at = text.find("call.uni"); at != text.npos; at = text.find("call.uni", at + 1)) {
      std::string_view s = text.substr(at + 8);
      s = trim(take_until(s, ";"));
      for (const std::string_view part : split(s))
        if (part[0] != '(') names.insert(std::string(part));
    }
    return names;
  }

  // `.param .align 8 .b8 name[24]`, or `.param .b64 name`
  static std::pair<std::string, size_t> declaration(std::string_view s, size_t& align) {
    size_t size = 0;
    align = 1;
    while (!(s = trim(s)).empty()) {
      std::string_view word = take_name(s);
      if (word == ".align") {
        s = trim(s);
        align = std::strtoull(std::string(take_name(s)).c_str(), nullptr, 10);
      } else if (word.starts_with(".")) {
        size = std::max(size, size_of(word.substr(1)));
      } else {
        align = std::max(align, size);
        if (s.starts_with("[")) {
          s.remove_prefix(1);
          size *= std::strtoull(std::string(s).c_str(), nullptr, 10);
        }
        return {std::string(word), size};
      }
    }
    return {"", 0};
  }

  static size_t place(size_t& used, size_t size, size_t align) {
    used = (used + align - 1) / align * align;
    const size_t at = used;
    used += size;
    return at;
  }

  void declare_parameters(std::string_view header, bool entry, Compiled& self, Scope& symbols) {
    if (const size_t at = header.find(".maxntid"); at != header.npos)
      kernel_->threads = static_cast<unsigned>(std::strtoul(header.data() + at + 8, nullptr, 10));
    std::vector<std::vector<Parameter>*> lists = {&self.parameters};
    std::string_view rest =
        header.substr(header.find(entry ? ".entry" : ".func") + (entry ? 6 : 5));
    if (trim(rest).starts_with("(")) lists = {&self.results, &self.parameters};
    for (auto* list : lists) {
      const size_t open = rest.find('(');
      if (open == rest.npos) return;
      rest.remove_prefix(open + 1);
      for (const std::string_view part : split(take_until(rest, ")"))) {
        size_t align;
        const auto [name, size] = declaration(part, align);
        size_t& used = entry ? kernel_->argument_bytes : kernel_->lane_bytes;
        const size_t at = place(used, size, align);
        list->push_back({name, at, size});
        symbols[name] = {entry ? Where::kArgument : Where::kLane, at, size};
      }
    }
    if (kernel_->argument_bytes > kMostArguments)
      throw Error(kernel_->name + " has too many arguments");
  }

  // ---- Statements ----

  void statements(std::string_view text) {
    while (!(text = trim(text)).empty()) {
      if (text[0] == '{') {
        scopes_.emplace_back();
        text.remove_prefix(1);
      } else if (text[0] == '}') {
        scopes_.pop_back();
        text.remove_prefix(1);
      } else {
        std::string_view after = text;
        const std::string_view name = take_name(after);
        if (after.starts_with(":") && !name.empty()) {
          labels_[std::string(name)] = static_cast<uint32_t>(kernel_->code.size());
          text = after.substr(1);
          continue;
        }
        statement_ = take_until(text, ";");
        if (!text.empty()) text.remove_prefix(1);
        if (statement_[0] == '.') {
          directive(statement_);
        } else {
          instruction(statement_);
        }
      }
    }
  }

  void directive(std::string_view s) {
    const std::string_view what = take_name(s);
    if (what == ".reg") {
      take_name(s);  // the type
      for (std::string_view part : split(s)) {
        const std::string name(take_until(part, "<"));
        if (part.empty()) {
          scopes_.back()[name] = {Where::kRegister, new_register()};
        } else {
          const uint64_t count = std::strtoull(std::string(part.substr(1)).c_str(), nullptr, 10);
          ranges_.push_back({name, kernel_->registers, count});
          kernel_->registers += static_cast<uint32_t>(count);
        }
      }
    } else if (what == ".param" || what == ".local" || what == ".shared") {
      size_t align;
      const auto [name, size] = declaration(s, align);
      const bool shared = what == ".shared";
      size_t& used = shared ? kernel_->shared_bytes : kernel_->lane_bytes;
      scopes_.back()[name] = {shared ? Where::kShared : Where::kLane, place(used, size, align),
                              size};
    } else if (what != ".pragma" && what != ".loc") {
      fail("the directive is not known");
    }
  }

  // ---- Operands ----

  uint32_t new_register() { return kernel_->registers++; }

  uint32_t constant(uint64_t bits) {
    const auto [found, is_new] = constants_.emplace(bits, 0);
    if (is_new) {
      found->second = new_register();
      kernel_->constants.emplace_back(found->second, bits);
    }
    return found->second;
  }

  const Symbol* find_symbol(std::string_view name) {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (const auto found = scope->find(name); found != scope->end()) return &found->second;
    }
    if (const auto found = shared_.find(name); found != shared_.end()) return &found->second;
    for (const std::string_view line : module_.shared_) {
      size_t align;
      const auto [declared, size] = declaration(line.substr(0, line.find(';')), align);
      if (declared != name) continue;
      const size_t at = place(kernel_->shared_bytes, size, align);
      return &(shared_[declared] = {Where::kShared, at, size});
    }
    return nullptr;
  }

  uint32_t special(std::string_view name) {
    static constexpr std::pair<std::string_view, Special> kNames[] = {
        {"%tid.x", Special::kThread},
        {"%ctaid.x", Special::kBlock},
        {"%ntid.x", Special::kThreads},
        {"%nctaid.x", Special::kBlocks},
        {"%laneid", Special::kLane}};
    for (const auto& [known, what] : kNames) {
      if (known != name) continue;
      const auto [found, is_new] = specials_.emplace(what, 0);
      if (is_new) {
        found->second = new_register();
        kernel_->specials.emplace_back(found->second, what);
      }
      return found->second;
    }
    return 0;
  }

  // The register that holds the operand.
  uint32_t source(std::string_view s) {
    uint64_t bits;
    if (parse_number(s, bits)) return constant(bits);
    if (const Symbol* symbol = find_symbol(s)) {
      if (symbol->where == Where::kRegister) return static_cast<uint32_t>(symbol->at);
      if (symbol->where == Where::kArgument)
        return constant(reinterpret_cast<uintptr_t>(arguments()) + symbol->at);
      return constant(symbol->at);
    }
    size_t digits = s.size();
    while (digits > 0 && std::isdigit(static_cast<unsigned char>(s[digits - 1])) != 0) --digits;
    for (const Range& range : ranges_) {
      if (s.substr(0, digits) != range.prefix || digits == s.size()) continue;
      const uint64_t n = std::strtoull(std::string(s.substr(digits)).c_str(), nullptr, 10);
      if (n < range.count) return static_cast<uint32_t>(range.first + n);
    }
    if (const uint32_t found = special(s)) return found;
    fail("the operand " + std::string(s) + " is not known");
  }

  uint32_t destination(std::string_view s) { return s == "_" ? 0 : source(s); }

  std::vector<std::string_view> elements(std::string_view s) const {
    if (s[0] != '{') return {s};
    return split(s.substr(1, s.size() - 2));
  }

  // `[%rd1+8]`, `[name]`: the register and the offset. The space of a parameter depends on whose it is.
  void address(std::string_view s, Instruction& i, Space& space) {
    if (s[0] != '[') fail("an address is wanted");
    s = s.substr(1, s.size() - 2);
    const std::string_view base = take_name(s);
    s = trim(s);
    if (!s.empty()) {
      uint64_t offset;
      if (s[0] != '+' || !parse_number(trim(s.substr(1)), offset)) fail("the address is not known");
      i.number = static_cast<int64_t>(offset);
    }
    const Symbol* symbol = find_symbol(base);
    if (symbol && symbol->where == Where::kLane) space = Space::kLane;
    i.from[0] = source(base);
  }

  // ---- Instructions ----

  Instruction& emit(Instruction i) {
    i.text = statement_.data();
    kernel_->code.push_back(i);
    return kernel_->code.back();
  }

  void instruction(std::string_view s) {
    Instruction i;
    if (s[0] == '@') {
      s.remove_prefix(1);
      i.negated = s[0] == '!';
      if (i.negated) s.remove_prefix(1);
      i.guard = source(take_name(s));
    }
    std::string opcode(take_name(s));
    if (const auto change = module_.changes_.find(opcode); change != module_.changes_.end())
      opcode = change->second;
    const auto operands = split(s);
    const auto parts = split_dots(opcode);
    if (parts[0] == "call") return call(i, operands);
    if (parts[0] == "ld" || parts[0] == "st") return memory(i, parts, operands);
    if (parts[0] == "bra") {
      i.kind = Kind::kBranch;
      jumps_.emplace_back(kernel_->code.size(), std::string(operands.at(0)));
    } else if (opcode == "ret" || opcode == "exit") {
      i.kind = Kind::kReturn;
      i.from[0] = is_entry_ || opcode == "exit" ? 0 : back_;
    } else if (parts[0] == "membar" || opcode == "fence.acq_rel.gpu") {
      return;  // one thread runs at a time
    } else if (!warp_operation(i, opcode, operands) && !move_of_vector(i, opcode, operands)) {
      const Operation* operation = find_operation(opcode);
      if (!operation) fail("the instruction is not known");
      if (operands.size() != 1 + static_cast<size_t>(operation->sources))
        fail("has other operands");
      i.run = operation->run;
      i.to[0] = source(operands[0]);
      for (size_t k = 1; k < operands.size(); ++k) i.from[k - 1] = source(operands[k]);
    }
    emit(i);
  }

  bool warp_operation(Instruction& i, const std::string& opcode,
                      const std::vector<std::string_view>& operands) {
    Space space = Space::kGlobal;
    if (opcode == "bar.sync" || opcode == "bar.red.or.pred") {
      i.kind = Kind::kBarrier;
      const bool reduces = opcode != "bar.sync";
      if (operands.size() != (reduces ? 3u : 1u) || operands[reduces ? 1 : 0] != "0")
        fail("only barrier 0 for all threads is known");
      if (reduces) {
        i.to[0] = source(operands[0]);
        i.from[0] = source(operands[2]);
      }
    } else if (opcode == "shfl.sync.bfly.b32") {
      i.kind = Kind::kWarp;
      i.run = kShuffle;
      std::string_view to = operands.at(0);
      i.to[0] = source(take_until(to, "|"));
      if (!to.empty()) i.to[1] = destination(to.substr(1));
      for (size_t k = 1; k < 5; ++k) i.from[k - 1] = source(operands.at(k));
      i.from[4] = i.from[3];
    } else if (opcode == "vote.sync.ballot.b32") {
      i.kind = Kind::kWarp;
      i.run = kBallot;
      i.to[0] = source(operands.at(0));
      i.from[0] = source(operands.at(1));
      i.from[4] = source(operands.at(2));
    } else if (opcode == "bar.warp.sync") {
      i.kind = Kind::kWarp;
      i.from[4] = source(operands.at(0));
    } else if (opcode == "atom.global.inc.u32") {
      i.run = kAtomicInc;
      i.to[0] = destination(operands.at(0));
      address(operands.at(1), i, space);
      i.from[1] = source(operands.at(2));
    } else if (opcode == "cvta.local.u64" || opcode == "cvta.to.local.u64" ||
               opcode == "cvta.shared.u64" || opcode == "cvta.to.shared.u64") {
      const bool to = opcode.find(".to.") != opcode.npos,
                 local = opcode.find("local") != opcode.npos;
      i.run = local ? (to ? kToLane : kFromLane) : (to ? kToShared : kFromShared);
      i.to[0] = source(operands.at(0));
      i.from[0] = source(operands.at(1));
    } else {
      return false;
    }
    return true;
  }

  // mov.b64 {%r1, %r2}, %rd1 and the reverse
  bool move_of_vector(Instruction& i, const std::string& opcode,
                      const std::vector<std::string_view>& operands) {
    if (!opcode.starts_with("mov.b") || operands.size() != 2) return false;
    const auto to = elements(operands[0]), from = elements(operands[1]);
    if (to.size() == 1 && from.size() == 1) return false;
    const size_t bits = std::strtoull(opcode.c_str() + 5, nullptr, 10);
    i.run = to.size() > 1 ? unpack_of(bits, to.size()) : pack_of(bits, from.size());
    if (!i.run) fail("the instruction is not known");
    i.count = static_cast<uint8_t>(std::max(to.size(), from.size()));
    for (size_t k = 0; k < to.size(); ++k) i.to[k] = destination(to[k]);
    for (size_t k = 0; k < from.size(); ++k) i.from[k] = source(from[k]);
    return true;
  }

  void memory(Instruction& i, const std::vector<std::string_view>& parts,
              const std::vector<std::string_view>& operands) {
    Space space = Space::kGlobal;
    size_t count = 1;
    for (size_t k = 1; k + 1 < parts.size(); ++k) {
      if (parts[k] == "shared") {
        space = Space::kShared;
      } else if (parts[k] == "local") {
        space = Space::kLane;
      } else if (parts[k] == "v2" || parts[k] == "v4") {
        count = parts[k] == "v2" ? 2 : 4;
      } else if (parts[k] != "global" && parts[k] != "param" && parts[k] != "volatile") {
        fail("the instruction is not known");
      }
    }
    const bool loads = parts[0] == "ld";
    if (operands.size() != 2) fail("has other operands");
    address(operands[loads ? 1 : 0], i, space);
    i.run = loads ? load_of(space, parts.back()) : store_of(space, parts.back());
    const auto data = elements(operands[loads ? 0 : 1]);
    if (!i.run || data.size() != count) fail("the instruction is not known");
    i.count = static_cast<uint8_t>(count);
    for (size_t k = 0; k < count; ++k) {
      if (loads) {
        i.to[k] = destination(data[k]);
      } else {
        i.from[1 + k] = source(data[k]);
      }
    }
    emit(i);
  }

  void copy(size_t to, size_t from, size_t size) {
    Instruction i;
    i.run = kCopyLaneMemory;
    i.to[0] = static_cast<uint32_t>(to);
    i.from[0] = static_cast<uint32_t>(from);
    i.number = static_cast<int64_t>(size);
    emit(i);
  }

  // call.uni (results), name, (parameters)
  void call(Instruction& i, const std::vector<std::string_view>& operands) {
    std::vector<std::string_view> lists[2];
    std::string name;
    for (const std::string_view part : operands) {
      if (part[0] != '(') {
        name = part;
      } else {
        lists[name.empty() ? 0 : 1] = split(part.substr(1, part.size() - 2));
      }
    }
    if (i.guard != 0) fail("a call with a guard is not known");
    const Compiled& callee = compiled_.at(name);
    if (lists[0].size() != callee.results.size() || lists[1].size() != callee.parameters.size())
      fail("has other parameters");
    const auto at = [&](std::string_view own, const Parameter& of) {
      const Symbol* symbol = find_symbol(own);
      if (!symbol || symbol->where != Where::kLane || symbol->size != of.size)
        fail("has other parameters");
      return symbol->at;
    };
    for (size_t k = 0; k < lists[1].size(); ++k) {
      const Parameter& p = callee.parameters[k];
      copy(p.at, at(lists[1][k], p), p.size);
    }
    i.kind = Kind::kCall;
    i.target = callee.start;
    i.to[0] = callee.back;
    emit(i);
    for (size_t k = 0; k < lists[0].size(); ++k) {
      const Parameter& p = callee.results[k];
      copy(at(lists[0][k], p), p.at, p.size);
    }
  }

  const Module& module_;
  std::unique_ptr<Kernel> kernel_;
  std::map<std::string, Compiled> compiled_;
  std::set<std::string> open_;
  std::map<uint64_t, uint32_t> constants_;
  std::map<Special, uint32_t> specials_;
  Scope shared_;  // of the module, as far as the kernel uses it
  // Of the function that is compiled.
  std::string_view statement_;
  std::vector<Scope> scopes_;
  std::vector<Range> ranges_;
  std::map<std::string, uint32_t> labels_;
  std::vector<std::pair<size_t, std::string>> jumps_;
  uint32_t back_ = 0;
  bool is_entry_ = false;
};

std::unique_ptr<Kernel> Module::kernel(const std::string& entry) const {
  return Compiler(*this).compile(entry);
}

}  // namespace ga::ptx
