#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tesserae::testing {

/// A safetensors file, what the Python package `safetensors` 0.8.0 says of it, and what we do. The recorded verdicts
/// are compared with the package itself where it is installed (package_test.cpp).
struct HeaderCase {
  std::string name;
  std::string file;
  bool package_takes;
  bool we_take;
};

/// Hand-made cases: ordinary files, each rule of the format, each difference that safetensors.h documents.
std::vector<HeaderCase> header_cases();

/// 8 bytes of length, the JSON, the data.
std::string safetensors_file(const std::string& json, const std::string& data = "");

/// Well-formed files, to be changed at random.
std::vector<std::string> seed_files();
/// One of `seeds` after a few random changes: of bytes, of numbers, of pieces of JSON, of the length.
std::string mutated_file(const std::vector<std::string>& seeds, uint64_t seed);

}  // namespace tesserae::testing
