// SPDX-License-Identifier: Apache-2.0
// The interpreter of PTX against numbers that the definitions of the PTX ISA give, worked out by hand.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "ptx/ptx.hpp"

namespace ga::ptx {
namespace {

// Runs the body of an entry in one block; %rd is the address of `memory`.
void execute(const std::string& body, void* memory, unsigned threads = 1,
             const std::string& before = "", std::map<std::string, std::string> changes = {}) {
  const Module module(".version 9.0\n" + before +
                          "\n.visible .entry test(\n\t.param .u64 test_param_0\n)\n.maxntid " +
                          std::to_string(threads) +
                          ", 1, 1\n{\n.reg .pred %p<9>;\n.reg .b64 %x<9>;\n.reg .b64 %rd;\n"
                          "ld.param.u64 %rd, [test_param_0];\ncvta.to.global.u64 %rd, %rd;\n" +
                          body + "\nret;\n}\n",
                      std::move(changes));
  std::memcpy(arguments(), &memory, sizeof memory);
  run(*module.kernel("test"), 1);
}

struct Case {
  const char* instruction;
  std::vector<uint64_t> in;
  uint64_t out;
};

uint64_t result_of(const Case& c) {
  std::string body, operands = "%x8";
  for (size_t k = 0; k < c.in.size(); ++k) {
    const std::string number = std::to_string(k);
    body += "ld.global.u64 %x" + number + ", [%rd+" + std::to_string(8 * k + 8) + "];\n";
    operands += ", %x" + number;
  }
  std::vector<uint64_t> memory = {0x5555555555555555};
  memory.insert(memory.end(), c.in.begin(), c.in.end());
  execute(body + c.instruction + " " + operands + ";\nst.global.u64 [%rd], %x8;", memory.data());
  return memory[0];
}

// The bits of a register that the type of the result has; the others are not defined.
uint64_t defined(const std::string& instruction) {
  const bool wide = instruction.find(".wide") != std::string::npos;
  std::string type = instruction.substr(instruction.rfind('.') + 1);
  if (instruction.rfind("setp", 0) == 0 || type == "pred") return 1;
  if (instruction.rfind("cvt", 0) == 0) {
    const size_t end = instruction.rfind('.');
    type = instruction.substr(instruction.rfind('.', end - 1) + 1,
                              end - 1 - instruction.rfind('.', end - 1));
  }
  const int bits = std::stoi(type.substr(type.find_first_of("123468"))) * (wide ? 2 : 1);
  return bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
}

void expect(const std::vector<Case>& cases) {
  for (const Case& c : cases) {
    std::string in;
    char text[20];
    for (const uint64_t x : c.in) {
      std::snprintf(text, sizeof text, " %llx", static_cast<unsigned long long>(x));
      in += text;
    }
    EXPECT_EQ(result_of(c) & defined(c.instruction), c.out) << c.instruction << in;
  }
}

std::string error_of(const std::string& body, void* memory, unsigned threads = 1,
                     const std::string& before = "") {
  try {
    execute(body, memory, threads, before);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

constexpr uint64_t kInf32 = 0x7f800000, kNaN32 = 0x7fffffff;
constexpr uint64_t kInf64 = 0x7ff0000000000000, kNaN64 = 0x7ff8000000000000,
                   kMinus64 = uint64_t{1} << 63;

TEST(Ptx, RoundsToNearestEven) {
  expect({
      {"add.rn.f32", {0x3f800000, 0x33800000}, 0x3f800000},  // 1 + 2^-24
      {"add.rn.f32", {0x3f800001, 0x33800000}, 0x3f800002},
      {"sub.rn.f32", {0x3f800000, 0x33800000}, 0x3f7fffff},
      {"mul.rn.f32", {0x3f800001, 0x3f800001}, 0x3f800002},
      {"div.rn.f32", {0x3f800000, 0x40400000}, 0x3eaaaaab},  // 1/3
      {"sqrt.rn.f32", {0x40000000}, 0x3fb504f3},
      {"add.rn.f64", {0x3ff0000000000000, 0x3ca0000000000000}, 0x3ff0000000000000},
      {"add.rn.f64", {0x3ff0000000000001, 0x3ca0000000000000}, 0x3ff0000000000002},
      {"sub.rn.f64", {0x3ff0000000000000, 0x3ca0000000000000}, 0x3fefffffffffffff},
      {"mul.rn.f64", {0x3ff0000000000001, 0x3ff0000000000001}, 0x3ff0000000000002},
      {"div.rn.f64", {0x3ff0000000000000, 0x4008000000000000}, 0x3fd5555555555555},
      {"rcp.rn.f64", {0x4008000000000000}, 0x3fd5555555555555},
      {"sqrt.rn.f64", {0x4000000000000000}, 0x3ff6a09e667f3bcd},
      // (1 + 2^-52) (1 - 2^-52) - 1 = -2^-104, rounded once.
      {"fma.rn.f64",
       {0x3ff0000000000001, 0x3feffffffffffffe, 0xbff0000000000000},
       0xb970000000000000},
      {"fma.rn.f32", {0x3f800001, 0x3f7ffffe, 0xbf800000}, 0xa8800000},  // -2^-46
  });
}

TEST(Ptx, RoundsTowardZero) {
  expect({
      {"mul.rz.f32", {0x3f7fffff, 0x3f7fffff}, 0x3f7ffffe},  // 1 - 2^-23 + 2^-48
      {"mul.rz.f32", {0xbf800003, 0x3f800003}, 0xbf800006},  // of -(1 + 6 2^-23 + 9 2^-46)
      {"mul.rz.f32", {0x3fc00001, 0x3f800001}, 0x3fc00002},  // of 1.5 + 2.5 2^-23
      {"mul.rn.f32", {0x3fc00001, 0x3f800001}, 0x3fc00003},
      {"cvt.rz.f32.f64", {0x3ff0000ffff00000}, 0x3f80007f},
      {"cvt.rn.f32.f64", {0x3ff0000ffff00000}, 0x3f800080},
      {"cvt.rz.f32.f64", {0x47efffffffffffff}, 0x7f7fffff},
  });
}

TEST(Ptx, SubnormalNumbersAreKept) {
  expect({
      {"mul.rn.f32", {0x00800000, 0x3f000000}, 0x00400000},
      {"mul.rn.f32", {0x00000001, 0x3f000000}, 0},
      {"mul.rn.f32", {0x00000003, 0x3f000000}, 0x00000002},
      {"add.rn.f32", {0x00000001, 0x00000001}, 0x00000002},
      {"mul.rn.f64", {0x0010000000000000, 0x3fe0000000000000}, 0x0008000000000000},
      {"cvt.f64.f32", {0x00000001}, 0x36a0000000000000},
      {"cvt.rn.f32.f64", {0x36a0000000000000}, 0x00000001},
      {"cvt.rn.f32.f64", {0x3690000000000000}, 0},
  });
}

TEST(Ptx, NaNAndInfinity) {
  expect({
      {"add.rn.f32", {kInf32, 0xff800000}, kNaN32},
      {"add.rn.f32", {0xffc00001, 0x3f800000}, kNaN32},
      {"mul.rn.f32", {kInf32, 0}, kNaN32},
      {"sqrt.rn.f32", {0xbf800000}, kNaN32},
      {"div.rn.f32", {0x3f800000, 0x80000000}, 0xff800000},
      {"cvt.rn.f32.f64", {kNaN64}, kNaN32},
      {"cvt.rn.f32.f64", {0x47efffffffffffff}, kInf32},
      {"min.f64", {kNaN64, 0x3ff0000000000000}, 0x3ff0000000000000},
      {"max.f64", {0x3ff0000000000000, kNaN64}, 0x3ff0000000000000},
      {"min.f64", {0, kMinus64}, kMinus64},
      {"max.f64", {kMinus64, 0}, 0},
      {"min.f32", {0x3f800000, 0xff800000}, 0xff800000},
      {"neg.f32", {0x3f800000}, 0xbf800000},
      {"abs.f64", {kMinus64}, 0},
      {"neg.f64", {0}, kMinus64},
  });
}

TEST(Ptx, Comparisons) {
  expect({
      {"setp.lt.s32", {0xffffffff, 0}, 1},
      {"setp.lt.u32", {0xffffffff, 0}, 0},
      {"setp.gt.s64", {0, ~uint64_t{0}}, 1},
      {"setp.gt.u64", {0, ~uint64_t{0}}, 0},
      {"setp.eq.s16", {0x10005, 5}, 1},
      {"setp.ne.b64", {0x10005, 5}, 1},
      {"setp.le.u16", {0x1ffff, 0}, 0},
      {"setp.eq.f32", {0, 0x80000000}, 1},
      {"setp.eq.f32", {kNaN32, kNaN32}, 0},
      {"setp.ne.f32", {kNaN32, kNaN32}, 0},
      {"setp.neu.f32", {kNaN32, 0}, 1},
      {"setp.equ.f64", {kNaN64, 0}, 1},
      {"setp.lt.f64", {kNaN64, 0}, 0},
      {"setp.ltu.f64", {kNaN64, 0}, 1},
      {"setp.leu.f64", {0, kNaN64}, 1},
      {"setp.gtu.f64", {0x3ff0000000000000, 0x4000000000000000}, 0},
      {"setp.geu.f32", {0x3f800000, 0x3f800000}, 1},
      {"setp.ge.f32", {kNaN32, 0}, 0},
      {"setp.nan.f32", {0, kNaN32}, 1},
      {"setp.nan.f64", {0, kInf64}, 0},
      {"setp.num.f64", {0, kNaN64}, 0},
      {"selp.f32", {1, 2, 1}, 1},
      {"selp.b64", {1, 2, 0}, 2},
      {"xor.pred", {1, 1}, 0},
      {"not.pred", {0}, 1},
  });
}

TEST(Ptx, Integers) {
  expect({
      {"add.s32", {0x7fffffff, 1}, 0x80000000},
      {"sub.s64", {0, 1}, ~uint64_t{0}},
      {"mul.lo.s32", {0x10000, 0x10000}, 0},
      {"mul.lo.s64", {0x100000001, 0x100000001}, 0x200000001},
      {"mul.wide.s32", {0xffffffff, 2}, ~uint64_t{0} - 1},
      {"mul.wide.u32", {0xffffffff, 2}, 0x1fffffffe},
      {"mul.wide.u16", {0xffff, 0xffff}, 0xfffe0001},
      {"mul.hi.u64", {~uint64_t{0}, ~uint64_t{0}}, ~uint64_t{0} - 1},
      {"mul.hi.s32", {0xffffffff, 2}, 0xffffffff},
      {"mad.lo.s32", {3, 5, 7}, 22},
      {"div.s32", {0xfffffff9, 2}, 0xfffffffd},
      {"rem.s32", {0xfffffff9, 2}, 0xffffffff},
      {"div.u32", {0xfffffff9, 2}, 0x7ffffffc},
      {"div.s64", {kMinus64, ~uint64_t{0}}, kMinus64},
      {"min.s32", {0xffffffff, 1}, 0xffffffff},
      {"min.u32", {0xffffffff, 1}, 1},
      {"max.s64", {~uint64_t{0}, 1}, 1},
      {"neg.s64", {1}, ~uint64_t{0}},
      {"shl.b32", {1, 31}, 0x80000000},
      {"shl.b32", {1, 32}, 0},
      {"shl.b64", {1, 32}, 0x100000000},
      {"shl.b64", {1, 0x100000000}, 1},  // 32 bits of the amount are read
      {"shl.b64", {1, 200}, 0},
      {"shr.u32", {0x80000000, 31}, 1},
      {"shr.u32", {0x80000000, 40}, 0},
      {"shr.s32", {0x80000000, 40}, 0xffffffff},
      {"shr.s64", {kMinus64, 4}, 0xf800000000000000},
      {"and.b32", {0xff00ff00ff, 0xffff}, 0xff},
      {"not.b32", {0}, 0xffffffff},
      {"bfi.b64", {0xff, 0, 60, 8}, 0xf000000000000000},
      {"bfi.b32", {0, 0xffffffff, 4, 8}, 0xfffff00f},
      {"bfi.b32", {0xf, 7, 4, 0}, 7},
      {"prmt.b32", {0x33221100, 0x77665544, 0x7604}, 0x77660044},
      {"prmt.b32", {0x33228100, 0x77665544, 0xb98a}, 0x00ff0000},
      {"bfind.shiftamt.u32", {1}, 31},
      {"bfind.shiftamt.u32", {0}, 0xffffffff},
      {"brev.b32", {1}, 0x80000000},
      {"popc.b32", {0xff00ff}, 16},
      {"clz.b32", {0}, 32},
  });
}

TEST(Ptx, Conversions) {
  expect({
      {"cvt.u32.u64", {0x123456789}, 0x23456789},
      {"cvt.s64.s32", {0xffffffff}, ~uint64_t{0}},
      {"cvt.u64.u32", {0xffffffff}, 0xffffffff},
      {"cvt.u32.u16", {0x12345}, 0x2345},
      {"cvt.rn.f32.u16", {0xffff}, 0x477fff00},
      {"cvt.rn.f64.s64", {0x7fffffffffffffff}, 0x43e0000000000000},
      {"cvt.rn.f64.s32", {0xffffffff}, 0xbff0000000000000},
      {"cvt.rn.f64.u32", {0xffffffff}, 0x41efffffffe00000},
      {"cvt.rzi.s64.f64", {0xc00e000000000000}, static_cast<uint64_t>(-3)},  // -3.75
      {"cvt.rni.s32.f32", {0x40200000}, 2},                                  // 2.5
      {"cvt.rzi.s64.f64", {0x7fe0000000000000}, 0x7fffffffffffffff},
      {"cvt.rzi.s64.f64", {0xffe0000000000000}, kMinus64},
      {"cvt.rzi.s64.f64", {kNaN64}, kMinus64},
      {"cvt.rzi.s32.f32", {kNaN32}, 0},
      {"cvt.rzi.u32.f32", {0xbf800000}, 0},
      {"cvt.rzi.u32.f32", {0x5f800000}, 0xffffffff},
      {"cvt.rzi.f64.f64", {0xc00e000000000000}, 0xc008000000000000},
      {"cvt.rmi.f64.f64", {0xc00a000000000000}, 0xc010000000000000},
      {"cvt.rni.f64.f64", {0x4004000000000000}, 0x4000000000000000},
      {"cvt.rpi.f32.f32", {0x3f000000}, 0x3f800000},
  });
}

TEST(Ptx, SixteenBits) {
  expect({
      {"cvt.rn.f16.f32", {0x3f800000}, 0x3c00},
      {"cvt.rn.f16.f32", {0x477fefff}, 0x7bff},  // below 65520
      {"cvt.rn.f16.f32", {0x477ff000}, 0x7c00},
      {"cvt.rn.f16.f32", {0x3f801000}, 0x3c00},  // halfway
      {"cvt.rn.f16.f32", {0x3f803000}, 0x3c02},
      {"cvt.rn.f16.f32", {0x3fffffff}, 0x4000},
      {"cvt.rn.f16.f32", {0x33000000}, 0},  // 2^-25
      {"cvt.rn.f16.f32", {0x33000001}, 1},
      {"cvt.rn.f16.f32", {0x387fffff}, 0x0400},  // the largest subnormal number is below 2^-14
      {"cvt.rn.f16.f32", {0x80000000}, 0x8000},
      {"cvt.rn.f16.f32", {0xff800000}, 0xfc00},
      {"cvt.rn.f16.f32", {0xffc00000}, 0x7fff},
      {"cvt.f32.f16", {0x3c01}, 0x3f802000},
      {"cvt.f32.f16", {0x8001}, 0xb3800000},
      {"cvt.f32.f16", {0x7bff}, 0x477fe000},
      {"cvt.f32.f16", {0xfc00}, 0xff800000},
      {"cvt.f32.f16", {0x8000}, 0x80000000},
      {"cvt.f32.f16", {0x7c01}, kNaN32},
      {"cvt.rn.bf16.f32", {0x3f808000}, 0x3f80},
      {"cvt.rn.bf16.f32", {0x3f818000}, 0x3f82},
      {"cvt.rn.bf16.f32", {0x3f808001}, 0x3f81},
      {"cvt.rn.bf16.f32", {0x7f7fffff}, 0x7f80},
      {"cvt.rn.bf16.f32", {0xff800001}, 0x7fff},
      {"cvt.rn.bf16.f32", {0x80000001}, 0x8000},
  });
}

TEST(Ptx, MemoryAndVectors) {
  alignas(16) uint32_t memory[16] = {1, 2, 3, 0xfffffff0};
  execute(R"(ld.global.v4.u32 {%x0, %x1, %x2, %x3}, [%rd];
st.global.v2.b32 [%rd+16], {%x3, %x0};
ld.s8 %x4, [%rd+12];
st.u64 [%rd+24], %x4;
ld.global.u8 %x4, [%rd+12];
st.volatile.u32 [%rd+32], %x4;
mov.b64 {%x5, %x6}, 0x1122334455667788;
mov.b32 %x7, {%x5, %x6};
st.global.u32 [%rd+36], %x5;
st.global.u32 [%rd+40], %x6;
st.global.u32 [%rd+44], %x7;
mov.b64 %x7, {%x6, %x5};
st.global.u64 [%rd+48], %x7;)",
          memory);
  EXPECT_EQ(memory[4], 0xfffffff0);
  EXPECT_EQ(memory[5], 1u);
  EXPECT_EQ(memory[6], 0xfffffff0);
  EXPECT_EQ(memory[7], 0xffffffff);
  EXPECT_EQ(memory[8], 0xf0u);
  EXPECT_EQ(memory[9], 0x55667788u);
  EXPECT_EQ(memory[10], 0x11223344u);
  EXPECT_EQ(memory[11], 0x33447788u);
  EXPECT_EQ(memory[12], 0x11223344u);
  EXPECT_EQ(memory[13], 0x55667788u);
  EXPECT_NE(error_of("ld.global.v2.u32 {%x0, %x1}, [%rd+4];", memory).find("is not aligned"),
            std::string::npos);
}

TEST(Ptx, LocalAndSharedMemory) {
  uint64_t memory[2] = {};
  execute(R"(.local .align 8 .b8 depot[16];
.shared .align 8 .b8 own[8];
mov.u64 %x0, depot;
cvta.local.u64 %x1, %x0;
st.u64 [%x1+8], 7;
ld.local.u64 %x2, [depot+8];
cvta.to.local.u64 %x3, %x1;
ld.local.u32 %x4, [%x3+8];
add.s64 %x2, %x2, %x4;
st.shared.u64 [of_module], %x2;
mov.u32 %x5, of_module;
cvta.shared.u64 %x6, %x5;
ld.u64 %x7, [%x6];
st.global.u64 [%rd], %x7;
ld.shared.u64 %x7, [own];
st.global.u64 [%rd+8], %x7;)",
          memory, 1, ".weak .shared .align 8 .u64 of_module;");
  EXPECT_EQ(memory[0], 14u);
  EXPECT_EQ(memory[1], 0xcdcdcdcdcdcdcdcd);  // not written
  const std::string shared = ".shared .align 8 .b8 own[8];\n";
  EXPECT_NE(error_of(shared + "ld.shared.u64 %x0, [own+8];", memory).find("is out of bounds"),
            std::string::npos);
}

TEST(Ptx, BranchesAndGuards) {
  uint32_t memory[40] = {};
  // Thread t counts down from t, the odd ones through another way.
  execute(R"(mov.u32 %x0, %tid.x;
mul.wide.u32 %x1, %x0, 4;
add.s64 %x1, %x1, %rd;
and.b32 %x2, %x0, 1;
setp.ne.s32 %p1, %x2, 0;
mov.u32 %x3, 0;
mov.u32 %x4, %x0;
loop:
setp.eq.s32 %p2, %x4, 0;
@%p2 bra done;
sub.s32 %x4, %x4, 1;
@%p1 bra odd;
add.s32 %x3, %x3, 1;
bra.uni loop;
odd:
add.s32 %x3, %x3, 100;
bra.uni loop;
done:
@!%p1 add.s32 %x3, %x3, 1000;
setp.eq.s32 %p3, %x0, 33;
@%p3 exit;
st.global.u32 [%x1], %x3;)",
          memory, 40);
  for (uint32_t t = 0; t < 40; ++t)
    EXPECT_EQ(memory[t], t == 33 ? 0 : t % 2 ? 100 * t : t + 1000) << t;
}

TEST(Ptx, Functions) {
  uint64_t memory[64] = {};
  // twice(x) calls add(x, x); two threads in three call it.
  const char* functions = R"(.func (.param .align 8 .b8 r[16]) add(
.param .b64 a,
.param .b64 b
)
;
.func (.param .align 8 .b8 r[16]) add(
.param .b64 a,
.param .b64 b
)
{
.reg .b64 %x<4>;
ld.param.u64 %x0, [a];
ld.param.u64 %x1, [b];
add.s64 %x2, %x0, %x1;
st.param.v2.b64 [r+0], {%x2, %x0};
ret;
}
.func (.param .b64 r) twice(
.param .b64 a
)
{
.reg .pred %p<2>;
.reg .b64 %x<4>;
ld.param.u64 %x0, [a];
setp.eq.s64 %p1, %x0, 5;
@%p1 bra five;
{ // callseq 0, 0
.param .b64 param0;
st.param.b64 [param0+0], %x0;
.param .b64 param1;
st.param.b64 [param1+0], %x0;
.param .align 8 .b8 retval0[16];
call.uni (retval0), 
add, 
(
param0, 
param1
);
ld.param.b64 %x1, [retval0+0];
ld.param.b64 %x2, [retval0+8];
	}
add.s64 %x1, %x1, %x2;
st.param.b64 [r+0], %x1;
ret;
five:
st.param.b64 [r+0], 55;
ret;
}
)";
  const std::string body = R"(mov.u32 %x0, %tid.x;
mul.wide.u32 %x1, %x0, 8;
add.s64 %x1, %x1, %rd;
rem.u32 %x2, %x0, 3;
setp.eq.s32 %p1, %x2, 0;
cvt.u64.u32 %x3, %x0;
@%p1 bra done;
{
.param .b64 param0;
st.param.b64 [param0+0], %x3;
.param .b64 retval0;
call.uni (retval0), twice, (param0);
ld.param.b64 %x3, [retval0+0];
	}
done:
st.global.u64 [%x1], %x3;)";
  execute(body, memory, 64, functions);
  for (uint64_t t = 0; t < 64; ++t) EXPECT_EQ(memory[t], t % 3 == 0 ? t : t == 5 ? 55 : 3 * t) << t;
}

TEST(Ptx, Shuffles) {
  uint32_t memory[64] = {};
  const std::string begin = R"(mov.u32 %x0, %tid.x;
mul.wide.u32 %x1, %x0, 4;
add.s64 %x1, %x1, %rd;
)";
  execute(begin + R"(shfl.sync.bfly.b32 %x2|%p1, %x0, 5, 31, -1;
st.global.u32 [%x1], %x2;)",
          memory, 64);
  for (uint32_t t = 0; t < 64; ++t) EXPECT_EQ(memory[t], t ^ 5);
  // Segments of 8 lanes, of which each 8 come on their own; lanes beyond the segment read their own number.
  execute(begin + R"(shr.u32 %x3, %x0, 3;
shl.b32 %x3, %x3, 3;
mov.u32 %x4, 255;
and.b32 %x5, %x3, 31;
shl.b32 %x4, %x4, %x5;
setp.lt.u32 %p2, %x0, 8;
@%p2 bra few;
shfl.sync.bfly.b32 %x2|%p1, %x0, 4, 6175, %x4;
bra.uni done;
few:
shfl.sync.bfly.b32 %x2|%p1, %x0, 8, 6175, %x4;
done:
selp.u32 %x5, 1000, 0, %p1;
add.s32 %x2, %x2, %x5;
st.global.u32 [%x1], %x2;)",
          memory, 64);
  for (uint32_t t = 0; t < 64; ++t) EXPECT_EQ(memory[t], t < 8 ? t : (t ^ 4) + 1000) << t;

  execute(begin + R"(setp.gt.u32 %p1, %x0, 3;
mov.u32 %x3, 255;
setp.lt.u32 %p2, %x0, 8;
@!%p2 bra done;
vote.sync.ballot.b32 %x2, %p1, %x3;
st.global.u32 [%x1], %x2;
done:)",
          memory, 32);
  EXPECT_EQ(memory[0], 0xf0u);
  EXPECT_EQ(memory[7], 0xf0u);
  EXPECT_NE(error_of(begin + R"(setp.lt.u32 %p2, %x0, 8;
@!%p2 bra done;
shfl.sync.bfly.b32 %x2|%p1, %x0, 1, 31, -1;
done:)",
                     memory, 32)
                .find("waits for lanes that do not come"),
            std::string::npos);
  EXPECT_NE(error_of(begin + R"(mov.u32 %x3, 1;
setp.eq.u32 %p2, %x0, 0;
@!%p2 bra done;
shfl.sync.bfly.b32 %x2|%p1, %x0, 1, 31, %x3;
done:)",
                     memory, 32)
                .find("reads a lane that the mask does not name"),
            std::string::npos);
}

TEST(Ptx, BarriersAndAtomics) {
  uint32_t memory[101] = {};
  execute(R"(.shared .align 4 .b8 part[400];
mov.u32 %x0, %tid.x;
shl.b32 %x1, %x0, 2;
mov.u32 %x2, part;
add.s32 %x2, %x2, %x1;
st.shared.u32 [%x2], %x0;
bar.sync 0;
mov.u32 %x3, part;
sub.s32 %x4, 396, %x1;
add.s32 %x3, %x3, %x4;
ld.shared.u32 %x5, [%x3];
cvt.u64.u32 %x6, %x1;
add.s64 %x6, %x6, %rd;
setp.eq.s32 %p1, %x0, 77;
bar.red.or.pred %p2, 0, %p1;
selp.u32 %x7, 1000, 0, %p2;
add.s32 %x5, %x5, %x7;
st.global.u32 [%x6], %x5;
atom.global.inc.u32 %x8, [%rd+400], 59;)",
          memory, 100);
  for (uint32_t t = 0; t < 100; ++t) EXPECT_EQ(memory[t], 1099 - t);
  EXPECT_EQ(memory[100], 40u);  // 100 counts of 60
  EXPECT_NE(error_of(R"(mov.u32 %x0, %tid.x;
setp.eq.s32 %p1, %x0, 3;
@%p1 exit;
bar.sync 0;)",
                     memory, 8)
                .find("some threads have ended"),
            std::string::npos);
}

TEST(Ptx, WhatItDoesNotKnowIsNamed) {
  uint64_t memory = 0;
  for (const char* unknown :
       {"ex2.approx.f32 %x0, %x1;", "add.rz.f32 %x0, %x1, %x2;", "add.rn.ftz.f32 %x0, %x1, %x2;",
        "mov.u32 %x0, %clock;", "ld.const.u32 %x0, [%rd];", "bar.sync 1;", "bra nowhere;",
        "mov.u32 %x99, 0;", "add.s32 %x0, %x1;", "red.global.add.f32 [%rd], %x0;",
        "shfl.sync.up.b32 %x0|%p1, %x1, 1, 0, -1;"}) {
    EXPECT_NE(error_of(unknown, &memory), "") << unknown;
  }
  EXPECT_NE(error_of("ex2.approx.f32 %x0, %x1;", &memory).find("ex2.approx.f32"),
            std::string::npos);
  EXPECT_NE(error_of("call.uni self;", &memory, 1, ".func self()\n{\ncall.uni self;\nret;\n}\n")
                .find("calls itself"),
            std::string::npos);
}

TEST(Ptx, InstructionsCanBeChanged) {
  uint64_t memory = 0;
  const char* body = "add.s64 %x0, 5, 3;\nst.global.u64 [%rd], %x0;";
  execute(body, &memory);
  EXPECT_EQ(memory, 8u);
  execute(body, &memory, 1, "", {{"add.s64", "sub.s64"}});
  EXPECT_EQ(memory, 2u);
}

}  // namespace
}  // namespace ga::ptx
