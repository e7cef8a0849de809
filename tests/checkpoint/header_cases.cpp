#include "tests/checkpoint/header_cases.h"

#include <algorithm>
#include <random>

#include "tesserae/base/error.h"

namespace tesserae::testing {
namespace {

std::string length_of(uint64_t length) {
  std::string bytes;
  for (int shift = 0; shift < 64; shift += 8) bytes.push_back(static_cast<char>(length >> shift));
  return bytes;
}

std::string tensor(const std::string& name, const std::string& dtype, const std::string& shape,
                   const std::string& offsets, const std::string& more = "") {
  return cat("\"", name, "\":{\"dtype\":\"", dtype, "\",\"shape\":", shape, ",\"data_offsets\":", offsets, more, "}");
}

std::string one(const std::string& tensors, size_t data_bytes = 1) {
  return safetensors_file("{" + tensors + "}", std::string(data_bytes, 'd'));
}

}  // namespace

std::string safetensors_file(const std::string& json, const std::string& data) {
  return length_of(json.size()) + json + data;
}

std::vector<HeaderCase> header_cases() {
  const std::string a = tensor("a", "U8", "[1]", "[0,1]");
  const std::string deep = std::string(100, '[') + std::string(100, ']');
  const std::string zero_byte("\0", 1);
  std::vector<HeaderCase> cases{
      // Both take it.
      {"no tensors", safetensors_file("{}"), true, true},
      {"one tensor", one(a), true, true},
      {"scalar", one(tensor("a", "F32", "[]", "[0,4]"), 4), true, true},
      {"no elements", one(tensor("a", "F32", "[0,3]", "[0,0]"), 0), true, true},
      {"no elements between others",
       one(tensor("a", "U8", "[1]", "[0,1]") + "," + tensor("e", "U8", "[0]", "[1,1]") + "," +
               tensor("b", "U8", "[1]", "[1,2]"),
           2),
       true, true},
      {"order of names is not that of data", one(tensor("b", "U8", "[1]", "[1,2]") + "," + a, 2), true, true},
      {"unaligned data", one(a + "," + tensor("b", "F32", "[1]", "[1,5]"), 5), true, true},
      {"metadata", safetensors_file("{\"__metadata__\":{\"format\":\"pt\"}}"), true, true},
      {"spaces before and behind", safetensors_file(" {} \n\t"), true, true},
      {"half bytes", one(tensor("a", "F4", "[4]", "[0,2]"), 2), true, true},
      {"six bits", one(tensor("a", "F6_E2M3", "[4]", "[0,3]"), 3), true, true},
      {"escaped name", one(tensor("a\\u00e9\\\"", "U8", "[1]", "[0,1]")), true, true},
      {"name with slashes", one(tensor("a/b/./c..d", "U8", "[1]", "[0,1]")), true, true},
      {"64 dimensions",
       one(tensor(
           "a", "U8",
           "[1" +
               [] {
                 std::string s;
                 for (int i = 1; i < 64; ++i) s += ",1";
                 return s;
               }() +
               "]",
           "[0,1]")),
       true, true},

      // Both refuse it.
      {"empty file", "", false, false},
      {"seven bytes", "1234567", false, false},
      {"no JSON", safetensors_file(""), false, false},
      {"a list", safetensors_file("[]"), false, false},
      {"length of 2^64-1", length_of(~uint64_t{0}) + "{}", false, false},
      {"length of 2^63", length_of(uint64_t{1} << 63) + "{}", false, false},
      {"length above the limit", length_of(100'000'001) + "{}", false, false},
      {"length beyond the file", length_of(3) + "{}", false, false},
      {"JSON cut off", safetensors_file("{" + a), false, false},
      {"text behind the JSON", safetensors_file("{}x"), false, false},
      {"zero bytes behind the JSON", safetensors_file("{}" + zero_byte + zero_byte), false, false},
      {"byte order mark", safetensors_file("\xEF\xBB\xBF{}"), false, false},
      {"bad UTF-8", one(tensor("\xff", "U8", "[1]", "[0,1]")), false, false},
      {"overlong UTF-8", one(tensor("\xc0\xaf", "U8", "[1]", "[0,1]")), false, false},
      {"lone surrogate", one(tensor("\\ud800", "U8", "[1]", "[0,1]")), false, false},
      {"raw control character", one(tensor("a\x01", "U8", "[1]", "[0,1]")), false, false},
      {"comment", safetensors_file("{/* */}"), false, false},
      {"trailing comma", safetensors_file("{" + a + ",}", "d"), false, false},
      {"unknown type", one(tensor("a", "F31", "[1]", "[0,1]")), false, false},
      {"type in lower case", one(tensor("a", "u8", "[1]", "[0,1]")), false, false},
      {"shape that is no list", one(tensor("a", "U8", "1", "[0,1]")), false, false},
      {"negative size", one(tensor("a", "U8", "[-1]", "[0,1]")), false, false},
      {"minus zero", one(tensor("a", "U8", "[1]", "[-0,1]")), false, false},
      {"size with a fraction", one(tensor("a", "U8", "[1.0]", "[0,1]")), false, false},
      {"size with an exponent", one(tensor("a", "U8", "[1e0]", "[0,1]")), false, false},
      {"size of 2^64", one(tensor("a", "U8", "[18446744073709551616]", "[0,1]")), false, false},
      {"shape that overflows", one(tensor("a", "U8", "[4294967296,4294967296,4294967296]", "[0,1]")), false, false},
      {"shape that overflows to the right size",
       one(tensor("a", "U8", "[4294967297,4294967295,18446744073709551615]", "[0,1]")), false, false},
      {"bytes do not fit the shape", one(tensor("a", "F32", "[1]", "[0,1]")), false, false},
      {"half a byte too many", one(tensor("a", "F4", "[3]", "[0,1]")), false, false},
      {"one offset", one(tensor("a", "U8", "[1]", "[0]")), false, false},
      {"three offsets", one(tensor("a", "U8", "[1]", "[0,1,2]")), false, false},
      {"offsets backwards", one(tensor("a", "U8", "[1]", "[1,0]")), false, false},
      {"offsets beyond the file", one(tensor("a", "U8", "[9]", "[0,9]")), false, false},
      {"gap", one(tensor("a", "U8", "[1]", "[1,2]"), 2), false, false},
      {"overlap", one(tensor("a", "U8", "[2]", "[0,2]") + "," + tensor("b", "U8", "[2]", "[1,3]"), 3), false, false},
      {"same data twice", one(a + "," + tensor("b", "U8", "[1]", "[0,1]")), false, false},
      {"data that no tensor has", one(a, 2), false, false},
      {"no shape", one("\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}"), false, false},
      {"shape twice", one(tensor("a", "U8", "[1]", "[0,1]", ",\"shape\":[1]")), false, false},
      {"tensor is null", one("\"a\":null", 0), false, false},
      {"metadata twice", safetensors_file("{\"__metadata__\":{},\"__metadata__\":{}}"), false, false},
      {"metadata with a number", safetensors_file("{\"__metadata__\":{\"a\":1}}"), false, false},
      {"deep", safetensors_file(std::string(100'000, '[')), false, false},

      // We are stricter.
      {"name twice", one(a + "," + a), true, false},
      {"metadata key twice", safetensors_file("{\"__metadata__\":{\"a\":\"b\",\"a\":\"c\"}}"), true, false},
      {"metadata is null", safetensors_file("{\"__metadata__\":null}"), true, false},
      {"name leads upwards", one(tensor("../a", "U8", "[1]", "[0,1]")), true, false},
      {"name leads upwards later", one(tensor("a/../../b", "U8", "[1]", "[0,1]")), true, false},
      {"name from the root", one(tensor("/etc/a", "U8", "[1]", "[0,1]")), true, false},
      {"empty name", one(tensor("", "U8", "[1]", "[0,1]")), true, false},
      {"name with a zero", one(tensor("a\\u0000", "U8", "[1]", "[0,1]")), true, false},
      {"name with a line break", one(tensor("a\\n", "U8", "[1]", "[0,1]")), true, false},
      {"unknown key of a tensor", one(tensor("a", "U8", "[1]", "[0,1]", ",\"x\":" + deep)), true, false},
      {"tensor as a list", one("\"a\":[\"U8\",[1],[0,1]]"), true, false},
      {"size of 2^63 times zero", one(tensor("a", "U8", "[0,9223372036854775808]", "[0,0]"), 0), true, false},
      {"shape of 2^63 times zero", one(tensor("a", "U8", "[4294967296,2147483648,0]", "[0,0]"), 0), true, false},
      {"65 dimensions",
       one(tensor(
           "a", "U8",
           "[1" +
               [] {
                 std::string s;
                 for (int i = 1; i < 65; ++i) s += ",1";
                 return s;
               }() +
               "]",
           "[0,1]")),
       true, false},
  };
  return cases;
}

std::vector<std::string> seed_files() {
  std::vector<std::string> seeds;
  for (const HeaderCase& header : header_cases()) {
    if (header.we_take) seeds.push_back(header.file);
  }
  seeds.push_back(one("\"__metadata__\":{\"k\":\"v\"}," + tensor("x.y", "BF16", "[2,3]", "[0,12]") + "," +
                          tensor("z", "I64", "[1]", "[12,20]"),
                      20));
  return seeds;
}

std::string mutated_file(const std::vector<std::string>& seeds, uint64_t seed) {
  static const std::vector<std::string> pieces{
      "0",     "1",    "-", "9",    "[",       "]",   "{",   "}",
      "\"",    ",",    ":", "null", "\\u0000", "../", "1e9", "18446744073709551615",
      "\"a\"", "\xff", " ", ".5"};
  std::mt19937_64 random(seed);
  std::string file = seeds[random() % seeds.size()];
  for (uint64_t changes = 1 + random() % 3; changes > 0; --changes) {
    if (file.size() <= 8) break;
    const size_t at = 8 + random() % (file.size() - 8);
    switch (random() % 5) {
      case 0:
        file[at] = static_cast<char>(file[at] ^ (1 << random() % 8));
        break;
      case 1:
        file.erase(at, 1 + random() % 3);
        break;
      case 2:
        file.insert(at, pieces[random() % pieces.size()]);
        break;
      case 3:
        if (file[at] >= '0' && file[at] <= '9') file[at] = static_cast<char>('0' + random() % 10);
        break;
      default:
        file.insert(at, file.substr(at, random() % 12));
    }
  }
  // Most of the time the length is made to fit again, so that the JSON is what is looked at.
  if (random() % 8 != 0) {
    const size_t brace = file.rfind('}');
    if (brace != std::string::npos && brace >= 8) file.replace(0, 8, length_of(brace + 1 - 8));
  }
  return file;
}

}  // namespace tesserae::testing
