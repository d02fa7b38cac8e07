// SPDX-License-Identifier: Apache-2.0
//
// The header of a safetensors file (src/files/safetensors.hpp): what write() writes, parse() reads, and
// what parse() refuses. tests/oracle/safetensors_oracle.py compares both with the reference
// implementation.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "core/error.hpp"
#include "files/safetensors.hpp"
#include "same_header.hpp"

namespace ga::safetensors {
namespace {

using test::json_of;
using test::same;

int64_t data_bytes(const Header& header) {
  return header.tensors.empty() ? 0 : header.tensors.back().end;
}

void expect_round_trip(const Header& header) {
  const std::string written = write(header);
  ASSERT_GE(written.size(), size_t{kLengthBytes});
  EXPECT_EQ(written.size() % 64, 0u);
  EXPECT_LT(written.size() - written.rfind('}') - 1, 64u);
  uint64_t length = 0;
  for (size_t i = 8; i-- > 0;) length = length << 8 | static_cast<unsigned char>(written[i]);
  EXPECT_EQ(length, written.size() - 8);
  EXPECT_TRUE(same(parse(json_of(written), data_bytes(header)), header)) << json_of(written);
}

// The message of the error that parse() must throw.
std::string refusal(std::string_view text, int64_t data = 0) {
  try {
    parse(text, data);
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), GA_ERROR_FORMAT);
    EXPECT_TRUE(is_utf8(error.what())) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "parsed: " << text.substr(0, 200);
  return "";
}

void expect_refusal(const std::string& message, std::string_view text, int64_t data = 0) {
  EXPECT_EQ(refusal(text, data), message) << text.substr(0, 200);
}

// The JSON parser words what is wrong with its syntax, in other words in other versions.
void expect_not_json(std::string_view text) {
  const std::string message = refusal(text);
  EXPECT_EQ(message.find("the header was not JSON at byte "), 0u) << message;
}

// A header with the tensor "w", whose entry is given.
std::string entry(const std::string& text) { return "{\"w\":" + text + "}"; }

std::string tensor(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return entry("{\"dtype\":" + dtype + ",\"shape\":" + shape + ",\"data_offsets\":" + offsets +
               "}");
}

std::string repeated(std::string_view text, int64_t times) {
  std::string result;
  for (int64_t i = 0; i < times; ++i) result += text;
  return result;
}

std::string encoded(uint32_t code) {
  const auto byte = [](uint32_t x) { return static_cast<char>(x); };
  if (code < 0x80) return {byte(code)};
  if (code < 0x800) return {byte(0xC0 | code >> 6), byte(0x80 | (code & 63))};
  if (code < 0x10000)
    return {byte(0xE0 | code >> 12), byte(0x80 | (code >> 6 & 63)), byte(0x80 | (code & 63))};
  return {byte(0xF0 | code >> 18), byte(0x80 | (code >> 12 & 63)), byte(0x80 | (code >> 6 & 63)),
          byte(0x80 | (code & 63))};
}

// ---- Writing -----------------------------------------------------------------------------------

TEST(SafetensorsWrite, Bytes) {
  const Header header = {{{"format", "1"}, {"a\"b", "\\\n"}},
                         {{"w", "F32", {2, 3}, 0, 24}, {"\x01\x1f\x7fü", "I8", {}, 24, 25}}};
  const std::string json =
      R"({"__metadata__":{"format":"1","a\"b":"\\\u000a"},)"
      R"("w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
      "\"\\u0001\\u001f\x7fü\":{\"dtype\":\"I8\",\"shape\":[],\"data_offsets\":[24,25]}}";
  const std::string written = write(header);
  ASSERT_EQ(written.size(), 192u);
  EXPECT_EQ(written.substr(0, 8), std::string("\xb8\0\0\0\0\0\0\0", 8));
  EXPECT_EQ(written.substr(8), json + std::string(184 - json.size(), ' '));
}

TEST(SafetensorsWrite, NoTensors) {
  EXPECT_EQ(write({}), std::string("\x38\0\0\0\0\0\0\0{}", 10) + std::string(54, ' '));
  expect_round_trip({});
  expect_round_trip({{{"a", ""}}, {}});
}

TEST(SafetensorsWrite, PadsEveryLength) {
  for (size_t n = 0; n < 200; ++n)
    expect_round_trip({{}, {{std::string(n, 'x'), "U8", {1}, 0, 1}}});
}

TEST(SafetensorsWrite, RandomHeaders) {
  std::mt19937 random(1);
  const auto below = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
  const auto text = [&] {
    std::string result;
    for (uint32_t n = below(12); n > 0; --n) {
      const uint32_t most[] = {0x20, 0x80, 0x800, 0x10000, 0x110000};
      const uint32_t code = below(most[below(5)]);
      if (code < 0xD800 || code > 0xDFFF) result += encoded(code);
    }
    return result;
  };
  const char* const dtypes[] = {"F64", "F32", "BF16", "U8", "BOOL", "C64"};
  for (int round = 0; round < 2000; ++round) {
    Header header;
    for (uint32_t i = 0, n = below(4); i < n; ++i)
      header.metadata.emplace_back(text() + std::to_string(i), text());
    int64_t end = 0;
    for (uint32_t i = 0, n = below(6); i < n; ++i) {
      Tensor tensor = {text() + std::to_string(i), dtypes[below(6)], {}, end, end};
      int64_t bytes = element_size(tensor.dtype);
      for (uint32_t rank = below(5); rank > 0; --rank) {
        tensor.shape.push_back(below(5));
        bytes *= tensor.shape.back();
      }
      tensor.end = end += bytes;
      header.tensors.push_back(tensor);
    }
    // Empty tensors before others at the same place, as parse() returns them.
    std::stable_sort(header.tensors.begin(), header.tensors.end(), [](auto& a, auto& b) {
      return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    });
    expect_round_trip(header);
  }
}

TEST(SafetensorsWrite, EveryCharacter) {
  Header header;
  for (uint32_t code = 0; code < 0x110000; code += code < 0x3000 ? 1 : 97) {
    if (code >= 0xD800 && code <= 0xDFFF) continue;
    header.metadata.emplace_back(encoded(code), "x" + encoded(code));
    header.tensors.push_back({encoded(code), "F32", {0}, 0, 0});
  }
  expect_round_trip(header);
}

void expect_not_written(const std::string& message, const Header& header) {
  try {
    write(header);
    ADD_FAILURE() << "written";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), GA_ERROR_UNSUPPORTED);
    EXPECT_EQ(error.what(), message);
  }
}

TEST(SafetensorsWrite, Refusals) {
  const auto named = [](const std::string& name) { return Header{{}, {{name, "U8", {0}, 0, 0}}}; };
  expect_not_written("tensor \"a?b\": the name was not UTF-8", named("a\xff"
                                                                     "b"));
  expect_not_written("tensor \"__metadata__\": the name is reserved in safetensors files",
                     named("__metadata__"));
  expect_not_written("tensor \"" + std::string(100, 'n') +
                         "...\": the name had 16385 bytes, expected at most 16384",
                     named(std::string(16385, 'n')));
  expect_round_trip(named(std::string(16384, 'n')));
  Header twice = named("a");
  twice.tensors.push_back(twice.tensors[0]);
  expect_not_written("tensor \"a\": the name occurred twice", twice);
  expect_not_written("metadata \"a\": the name occurred twice", {{{"a", ""}, {"a", "b"}}, {}});
  expect_not_written("metadata \"?\": the name or the value was not UTF-8", {{{"\xc0", ""}}, {}});
  expect_not_written("metadata \"a\": the name or the value was not UTF-8", {{{"a", "\xc0"}}, {}});
  expect_not_written("the header had 100000056 bytes, expected at most 100000000",
                     {{{"a", std::string(99999999, 'v')}}, {}});
}

// ---- Parsing -----------------------------------------------------------------------------------

TEST(SafetensorsParse, Accepts) {
  const Header w = {{}, {{"w", "F32", {2, 3}, 0, 24}}};
  for (const char* text : {
           R"({"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}})",
           R"({"w":{"data_offsets":[0,24],"shape":[2,3],"dtype":"F32"}}    )",
           R"({ "w" : { "dtype" : "F32" , "shape" : [ 2 , 3 ] , "data_offsets" : [ 0 , 24 ] } } )",
           R"({"__metadata__":{},"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}})",
           R"({"\u0077":{"\u0064type":"F3\u0032","shape":[2,3],"data_offsets":[0,24]}})",
       })
    EXPECT_TRUE(same(parse(text, 24), w)) << text;
  EXPECT_TRUE(same(parse("{}", 0), {}));
  EXPECT_TRUE(
      same(parse(R"({"__metadata__":{"b":"1","a":""}})", 0), {{{"b", "1"}, {"a", ""}}, {}}));
}

TEST(SafetensorsParse, MetadataAnywhere) {
  const Header header = parse(R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                              R"("__metadata__":{"k":"v"},)"
                              R"("c":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                              2);
  EXPECT_TRUE(same(header, {{{"k", "v"}}, {{"b", "U8", {1}, 0, 1}, {"c", "U8", {1}, 1, 2}}}));
}

// A tensor may have the name of a field or of another place.
TEST(SafetensorsParse, NamesOfFields) {
  expect_round_trip({{{"dtype", "shape"}, {"__metadata__", "x"}},
                     {{"", "U8", {1}, 0, 1}, {"dtype", "U8", {1}, 1, 2}}});
}

TEST(SafetensorsParse, OrdersByData) {
  const Header header = parse(R"({"c":{"dtype":"U8","shape":[1],"data_offsets":[4,5]},)"
                              R"("e2":{"dtype":"F32","shape":[7,0],"data_offsets":[4,4]},)"
                              R"("b":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
                              R"("e0":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},)"
                              R"("e1":{"dtype":"I8","shape":[0],"data_offsets":[4,4]},)"
                              R"("e3":{"dtype":"I8","shape":[0],"data_offsets":[5,5]}})",
                              5);
  EXPECT_TRUE(same(header, {{},
                            {{"e0", "F32", {0}, 0, 0},
                             {"b", "F32", {}, 0, 4},
                             {"e2", "F32", {7, 0}, 4, 4},
                             {"e1", "I8", {0}, 4, 4},
                             {"c", "U8", {1}, 4, 5},
                             {"e3", "I8", {0}, 5, 5}}}));
}

// Elements of 4 and 6 bits, and whatever comes: nothing is known of the size.
TEST(SafetensorsParse, UnknownDtype) {
  EXPECT_TRUE(same(parse(tensor("\"F4\"", "[9223372036854775807,9]", "[0,3]"), 3),
                   {{}, {{"w", "F4", {INT64_MAX, 9}, 0, 3}}}));
  expect_refusal("tensor \"w\": data_offsets were 3 and 0, expected the smaller one first",
                 tensor("\"F4\"", "[9]", "[3,0]"));
}

TEST(SafetensorsParse, LargestNumbers) {
  const Header header =
      parse(tensor("\"U8\"", "[9223372036854775807]", "[0,9223372036854775807]"), INT64_MAX);
  EXPECT_EQ(header.tensors[0].end, INT64_MAX);
}

TEST(SafetensorsParse, Limits) {
  const std::string ones = repeated("1,", 63) + "1";
  EXPECT_EQ(parse(tensor("\"U8\"", "[" + ones + "]", "[0,1]"), 1).tensors[0].shape.size(), 64u);
  expect_refusal("tensor \"w\": shape had more than 64 dimensions",
                 tensor("\"U8\"", "[" + ones + ",1]", "[0,1]"), 1);
  expect_refusal("tensor \"w\": shape had more than 64 dimensions",
                 tensor("\"U8\"", "[" + repeated("0,", 1000000) + "1]", "[0,0]"));
  const auto named = [](size_t n) {
    return "{\"" + std::string(n, 'n') + R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})";
  };
  EXPECT_EQ(parse(named(16384), 0).tensors.size(), 1u);
  expect_refusal("tensor \"" + std::string(100, 'n') +
                     "...\": the name had 16385 bytes, expected at most 16384",
                 named(16385));
  EXPECT_TRUE(same(parse("{}" + std::string(99999998, ' '), 0), {}));
  expect_refusal("the header had 100000001 bytes, expected at most 100000000",
                 "{}" + std::string(99999999, ' '));
}

TEST(SafetensorsParse, ManyTensors) {
  constexpr int64_t kMany = 100000;
  Header header;
  for (int64_t i = 0; i < kMany; ++i)
    header.tensors.push_back({"layer." + std::to_string(i), "U8", {1}, i, i + 1});
  const Header ordered = header;
  std::shuffle(header.tensors.begin(), header.tensors.end(), std::mt19937(1));
  const std::string written = write(header);
  EXPECT_TRUE(same(parse(json_of(written), kMany), ordered));
}

// ---- Refusals ----------------------------------------------------------------------------------

TEST(SafetensorsRefusal, NotAnObject) {
  for (const char* text : {"", " ", " {}", "[]", "\"{}\"", "1", "null", "\xef\xbb\xbf{}", "//\n{}"})
    expect_refusal("the header did not begin with '{'", text);
  expect_refusal("the header did not begin with '{'", std::string_view("\0{}", 3));
}

TEST(SafetensorsRefusal, BehindTheObject) {
  for (const char* text : {"{", "{}x", "{}\n", "{},", "{}[]", "{} //", "{}\xc2\xa0"})
    expect_refusal("the header did not end with '}' and spaces", text);
  for (const char* text : {"{}}", "{}{}", "{} {}", "{},{}", "{}[{}", "{}\"}"})
    expect_not_json(text);
  expect_refusal("the header did not end with '}' and spaces", std::string_view("{}\0", 3));
}

TEST(SafetensorsRefusal, ControlCharacters) {
  expect_refusal("the header had the control character 0x00 at byte 3",
                 std::string_view("{}\0}", 4));
  expect_refusal("the header had the control character 0x00 at byte 3",
                 std::string_view("{\"\0\":{}}", 8));
  expect_refusal("the header had the control character 0x0a at byte 2", "{\n}");
  expect_refusal("the header had the control character 0x09 at byte 2", "{\t}");
  expect_refusal("the header had the control character 0x1f at byte 3", "{\"\x1f\"}");
}

TEST(SafetensorsRefusal, Syntax) {
  for (const char* text : {"{}}",
                           "{{}}",
                           "{,}",
                           "{:}",
                           "{\"}",
                           "{\"a\"}",
                           "{\"a\":}",
                           "{\"a\" {}}",
                           "{a:{}}",
                           "{'a':{}}",
                           "{\"__metadata__\":{},}",
                           "{\"__metadata__\":{}]}",
                           "{\"__metadata__\":{]}",
                           "{\"a\":{\"dtype\":\"F32\",}}",
                           "{/**/}",
                           "{//}",
                           "{\"\\x\":{}}",
                           "{\"\\u12\":{}}",
                           "{\"a\":nul}",
                           "{\"a\":NaN}",
                           "{\"a\":+1}",
                           "{\"a\":.5}"})
    expect_not_json(text);
  expect_not_json(tensor("\"U8\"", "[01]", "[0,1]"));
  expect_not_json(tensor("\"U8\"", "[1,]", "[0,1]"));
  expect_not_json(tensor("\"U8\"", "[0x1]", "[0,1]"));
}

TEST(SafetensorsRefusal, NotUtf8) {
  for (const char* name :
       {"\x80", "\xff", "\xc0\x80", "\xc1\xbf", "\xe0\x80\x80", "\xed\xa0\x80", "\xed\xbf\xbf",
        "\xf0\x80\x80\x80", "\xf4\x90\x80\x80", "\xc3", "\xe2\x82"})
    expect_not_json("{\"" + std::string(name) +
                    R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})");
  for (const char* name :
       {R"(\ud800)", R"(\udfff)", R"(\ud800x)", R"(\ud800\ud800)", R"(\udc00\ud800)"})
    expect_not_json("{\"" + std::string(name) +
                    R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})");
  expect_not_json("{\xc3\xbc}");
  EXPECT_EQ(parse(R"({"\ud83d\ude00\u0000":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})", 0)
                .tensors[0]
                .name,
            std::string("\xf0\x9f\x98\x80\0", 5));
}

TEST(SafetensorsRefusal, Depth) {
  expect_refusal("tensor \"w\": the field \"x\" was unknown",
                 "{\"w\":{\"x\":" + repeated("[", 1000000) + repeated("]", 1000000) + "}}");
  expect_refusal("tensor \"w\": shape held an array, expected integers from 0 to 2^63 - 1",
                 tensor("\"U8\"", repeated("[", 1000000) + repeated("]", 1000000), "[0,0]"));
  expect_refusal("tensor \"w\": shape was an object, expected an array",
                 tensor("\"U8\"", repeated("{\"shape\":", 100000), "[0,0]"));
  expect_refusal("tensor \"a\": the field \"a\" was unknown",
                 repeated("{\"a\":", 1000000) + "{}" + repeated("}", 1000000));
  expect_refusal("metadata \"a\": the value was an object, expected a string",
                 "{\"__metadata__\":" + repeated("{\"a\":", 1000000) + repeated("}", 1000001));
}

TEST(SafetensorsRefusal, Twice) {
  const std::string field = R"({"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  for (const char* name : {"w", R"(\u0077)"})
    expect_refusal("tensor \"w\": the name occurred twice",
                   "{\"w\":" + field + ",\"x\":" + field + ",\"" + name + "\":" + field + "}");
  for (const char* name : {"__metadata__", R"(__metad\u0061ta__)"})
    expect_refusal("__metadata__ occurred twice",
                   std::string(R"({"__metadata__":{},")") + name + "\":{}}");
  for (const char* name : {"k", R"(\u006B)"})
    expect_refusal("metadata \"k\": the name occurred twice",
                   std::string(R"({"__metadata__":{"k":"","l":"",")") + name + "\":\"\"}}");
  for (const char* again : {R"("dtype":"U8")", R"("d\u0074ype":"U8")"})
    expect_refusal("tensor \"w\": dtype occurred twice",
                   entry(std::string(R"({"dtype":"U8",)") + again + "}"));
  expect_refusal("tensor \"w\": shape occurred twice", entry(R"({"shape":[],"shape":[]})"));
  expect_refusal("tensor \"w\": data_offsets occurred twice",
                 entry(R"({"data_offsets":[0,1],"data_offsets":[0,1]})"));
}

TEST(SafetensorsRefusal, Fields) {
  expect_refusal("tensor \"w\": dtype was missing", entry("{}"));
  expect_refusal("tensor \"w\": dtype was missing", entry(R"({"shape":[],"data_offsets":[0,1]})"));
  expect_refusal("tensor \"w\": shape was missing",
                 entry(R"({"dtype":"U8","data_offsets":[0,1]})"));
  expect_refusal("tensor \"w\": data_offsets was missing", entry(R"({"dtype":"U8","shape":[]})"));
  expect_refusal("tensor \"w\": the field \"Dtype\" was unknown", entry(R"({"Dtype":"U8"})"));
  expect_refusal("tensor \"w\": the field \"\" was unknown", entry(R"({"":0})"));
  expect_refusal("tensor \"w\": data_offsets had 0 numbers, expected two",
                 tensor("\"U8\"", "[]", "[]"));
  expect_refusal("tensor \"w\": data_offsets had 1 numbers, expected two",
                 tensor("\"U8\"", "[]", "[0]"));
  expect_refusal("tensor \"w\": data_offsets had more than two numbers",
                 tensor("\"U8\"", "[]", "[0,1,2]"));
}

TEST(SafetensorsRefusal, Types) {
  const std::pair<const char*, const char*> values[] = {
      {"null", "null"},
      {"true", "a boolean"},
      {"false", "a boolean"},
      {"-1", "a negative number"},
      {"-0", "a negative number"},
      {"1.0", "a number with a fraction or an exponent, or too large a number"},
      {"1e3", "a number with a fraction or an exponent, or too large a number"},
      {"18446744073709551616", "a number with a fraction or an exponent, or too large a number"},
      {"\"s\"", "a string"},
      {"[]", "an array"},
      {"{}", "an object"},
      {"7", "a number"},
  };
  const std::string integers = ", expected integers from 0 to 2^63 - 1";
  for (const auto& [text, found] : values) {
    const std::string was = std::string("was ") + found, held = std::string("held ") + found;
    if (*text != '{') {
      expect_refusal("tensor \"w\": the entry " + was + ", expected an object", entry(text));
      expect_refusal("__metadata__ " + was + ", expected an object",
                     std::string("{\"__metadata__\":") + text + "}");
    }
    if (*text != '"') {
      expect_refusal("tensor \"w\": dtype " + was + ", expected a string",
                     tensor(text, "[]", "[0,1]"));
      expect_refusal("metadata \"k\": the value " + was + ", expected a string",
                     std::string(R"({"__metadata__":{"k":)") + text + "}}");
    }
    if (*text != '[') {
      expect_refusal("tensor \"w\": shape " + was + ", expected an array",
                     tensor("\"U8\"", text, "[0,1]"));
      expect_refusal("tensor \"w\": data_offsets " + was + ", expected an array",
                     tensor("\"U8\"", "[]", text));
    }
    if (*text != '7') {
      const std::string list = "[7," + std::string(text) + "]";
      expect_refusal("tensor \"w\": shape " + held + integers, tensor("\"U8\"", list, "[0,1]"));
      expect_refusal("tensor \"w\": data_offsets " + held + integers, tensor("\"U8\"", "[]", list));
    }
  }
  for (const char* number : {"9223372036854775808", "18446744073709551615"}) {
    const std::string list = "[0," + std::string(number) + "]";
    expect_refusal("tensor \"w\": shape held too large a number" + integers,
                   tensor("\"U8\"", list, "[0,0]"));
    expect_refusal("tensor \"w\": data_offsets held too large a number" + integers,
                   tensor("\"U8\"", "[]", list));
  }
  expect_not_json(entry("1e400"));
  expect_not_json(entry(repeated("9", 1000000)));
}

TEST(SafetensorsRefusal, Sizes) {
  expect_refusal("tensor \"w\": data_offsets held 23 bytes, expected 24 for the shape in F32",
                 tensor("\"F32\"", "[2,3]", "[0,23]"), 23);
  expect_refusal("tensor \"w\": data_offsets held 0 bytes, expected 8 for the shape in F64",
                 tensor("\"F64\"", "[]", "[0,0]"));
  expect_refusal("tensor \"w\": data_offsets held 2 bytes, expected 0 for the shape in BF16",
                 tensor("\"BF16\"", "[5,0]", "[0,2]"), 2);
  const std::string overflow = "tensor \"w\": the bytes of its shape were more than 2^63 - 1";
  expect_refusal(overflow, tensor("\"F32\"", "[4611686018427387904]", "[0,0]"));
  expect_refusal(overflow, tensor("\"U8\"", "[4294967296,4294967296]", "[0,0]"));
  expect_refusal(overflow, tensor("\"U8\"", "[4294967296,4294967296,4294967296]", "[0,0]"));
  expect_refusal(overflow, tensor("\"I64\"", "[1152921504606846976]", "[0,0]"));
  expect_refusal(
      "tensor \"w\": data_offsets were 9223372036854775807 and 0, expected the smaller "
      "one first",
      tensor("\"U8\"", "[1]", "[9223372036854775807,0]"));
}

TEST(SafetensorsRefusal, Tiling) {
  const auto two = [](int begin, int end) {
    return R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[)" +
           std::to_string(end - begin) + R"(],"data_offsets":[)" + std::to_string(begin) + "," +
           std::to_string(end) + "]}}";
  };
  EXPECT_EQ(parse(two(8, 12), 12).tensors.size(), 2u);
  expect_refusal(
      "tensor \"b\": its data began at byte 7, expected 8, because ranges must not overlap",
      two(7, 12), 12);
  expect_refusal(
      "tensor \"b\": its data began at byte 4, expected 8, because ranges must not overlap",
      two(4, 4), 8);
  expect_refusal(
      "tensor \"b\": its data began at byte 0, expected 8, because ranges must not overlap",
      two(0, 8), 8);
  expect_refusal(
      "tensor \"b\": its data began at byte 9, expected 8, because there must be no holes",
      two(9, 12), 12);
  expect_refusal(
      "tensor \"b\": its data began at byte 9, expected 8, because there must be no holes",
      two(9, 9), 8);
  expect_refusal(
      "tensor \"w\": its data began at byte 1, expected 0, because there must be no holes",
      tensor("\"U8\"", "[1]", "[1,2]"), 2);
  expect_refusal("the tensors had 12 bytes, but the file has 13 bytes of data", two(8, 12), 13);
  expect_refusal("the tensors had 12 bytes, but the file has 11 bytes of data", two(8, 12), 11);
  expect_refusal("the tensors had 0 bytes, but the file has 1 bytes of data", "{}", 1);
  expect_refusal("the tensors had 0 bytes, but the file has -1 bytes of data", "{}", -1);
}

// A message shows at most 100 bytes of a name, and only what can be printed.
TEST(SafetensorsRefusal, NamesInMessages) {
  const auto named = [](const std::string& name) { return "{\"" + name + "\":0}"; };
  const std::string rest = "\": the entry was a number, expected an object";
  expect_refusal("tensor \"a?b?c" + rest, named(R"(a\u0000b\u007fc)"));
  expect_refusal("tensor \"ü€" + rest, named("ü€"));
  const std::string n(98, 'n');
  expect_refusal("tensor \"" + n + "ü" + rest, named(n + "ü"));
  expect_refusal("tensor \"" + n + "ü..." + rest, named(n + "üx"));
  expect_refusal("tensor \"" + n + "..." + rest, named(n + "€"));
  expect_refusal("tensor \"" + n + "..." + rest, named(n + "\xf0\x9f\x98\x80"));
}

// ---- Damaged texts -----------------------------------------------------------------------------

const std::string kSmall =
    R"({"__metadata__":{"format":"1","k\u00e9\n":"v"},"a.b":{"dtype":"F32","shape":[2,3],)"
    R"("data_offsets":[0,24]},"ü":{"dtype":"BF16","shape":[],"data_offsets":[24,26]},)"
    R"("e":{"dtype":"U8","shape":[0,7],"data_offsets":[26,26]}}   )";
constexpr int64_t kSmallData = 26;

// Whether the text is parsed; if so, to what write() can write.
bool parses(std::string_view text) {
  try {
    expect_round_trip(parse(text, kSmallData));
    return true;
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), GA_ERROR_FORMAT);
    return false;
  }
}

TEST(SafetensorsDamage, EveryTruncation) {
  ASSERT_TRUE(parses(kSmall));
  for (size_t n = 0; n < kSmall.size(); ++n) {
    const std::string text = kSmall.substr(0, n);  // so that a sanitizer knows its end
    EXPECT_EQ(parses(text), n >= kSmall.size() - 3) << text;
  }
}

TEST(SafetensorsDamage, EveryBit) {
  int parsed = 0;
  for (size_t i = 0; i < 8 * kSmall.size(); ++i) {
    std::string text = kSmall;
    text[i / 8] = static_cast<char>(text[i / 8] ^ 1 << i % 8);
    parsed += parses(text);
  }
  // Bits of names and of metadata.
  EXPECT_GT(parsed, 50);
  EXPECT_LT(parsed, static_cast<int>(kSmall.size()));
}

TEST(SafetensorsDamage, EveryByteRemovedRepeatedOrReplaced) {
  for (size_t i = 0; i < kSmall.size(); ++i) {
    parses(kSmall.substr(0, i) + kSmall.substr(i + 1));
    parses(kSmall.substr(0, i + 1) + kSmall.substr(i));
    for (const char c :
         {'\0', '"', '\\', '{', '}', '[', ']', ',', ':', '-', '.', 'e', '9', '\xff'}) {
      std::string text = kSmall;
      text[i] = c;
      parses(text);
    }
  }
}

// ---- The small functions -----------------------------------------------------------------------

TEST(SafetensorsDtype, Sizes) {
  for (const char* dtype : {"F64", "I64", "U64", "C64"}) EXPECT_EQ(element_size(dtype), 8) << dtype;
  for (const char* dtype : {"F32", "I32", "U32"}) EXPECT_EQ(element_size(dtype), 4) << dtype;
  for (const char* dtype : {"F16", "BF16", "I16", "U16"})
    EXPECT_EQ(element_size(dtype), 2) << dtype;
  for (const char* dtype : {"I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"})
    EXPECT_EQ(element_size(dtype), 1) << dtype;
  for (const char* dtype : {"", "F", "f32", "F32 ", "F4", "F6_E2M3", "F128", "C128"})
    EXPECT_EQ(element_size(dtype), 0) << dtype;
}

// Decodes by the forms of the bytes, and asks whether this is how the code is encoded.
bool utf8_by_decoding(const std::string& text) {
  for (size_t i = 0; i < text.size();) {
    const auto byte = [&](size_t k) -> uint32_t {
      return k < text.size() ? static_cast<unsigned char>(text[k]) : 0;
    };
    const uint32_t first = byte(i);
    const size_t length = first < 0x80 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
    uint32_t code = length == 1 ? first : first & (0x7Fu >> length);
    for (size_t k = 1; k < length; ++k) code = code << 6 | (byte(i + k) & 63);
    if (code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) return false;
    if (text.compare(i, length, encoded(code)) != 0) return false;
    i += length;
  }
  return true;
}

TEST(SafetensorsUtf8, EverySequence) {
  int valid = 0;
  const auto check = [&](const std::string& text) {
    const bool expected = utf8_by_decoding(text);
    valid += expected;
    if (is_utf8(text) != expected) ADD_FAILURE() << testing::PrintToString(text);
  };
  const char edges[] = {0x00, 0x7F, '\x80', '\x8F', '\x90', '\x9F', '\xA0', '\xBF', '\xC0', '\xFF'};
  check("");
  for (int a = 0; a < 256; ++a) {
    const auto first = static_cast<char>(a);
    check({first});
    for (int b = 0; b < 256; ++b) {
      const auto second = static_cast<char>(b);
      check({first, second});
      for (const char third : edges) {
        check({first, second, third});
        if (a < 0xE0) continue;
        for (const char fourth : edges) check({first, second, third, fourth});
      }
    }
  }
  EXPECT_GT(valid, 16384);
}

TEST(SafetensorsUtf8, EveryCode) {
  for (uint32_t code = 0; code < 0x110000; ++code) {
    if (is_utf8(encoded(code)) != (code < 0xD800 || code > 0xDFFF)) ADD_FAILURE() << code;
  }
  EXPECT_FALSE(is_utf8("\xf4\x90\x80\x80"));
  // The bytes behind the text would complete the character.
  for (const std::string_view text : {"ü", "€", "\xf0\x9f\x98\x80"}) {
    for (size_t n = 1; n < text.size(); ++n) EXPECT_FALSE(is_utf8(text.substr(0, n))) << text;
  }
}

}  // namespace
}  // namespace ga::safetensors
