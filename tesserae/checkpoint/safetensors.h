#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tesserae/checkpoint/dtype.h"
#include "tesserae/os/files.h"

namespace tesserae::checkpoint {

/// One tensor of a safetensors file.
struct FileTensor {
  std::string name;
  Dtype dtype = Dtype::U8;
  std::vector<int64_t> shape;
  uint64_t begin = 0;  ///< its first byte, counted from the end of the header
  uint64_t end = 0;

  int64_t elements() const;  ///< checked when the header was parsed
};

/// The header of a safetensors file: 8 bytes of length (little-endian), JSON, then the data of all tensors without a
/// gap. https://github.com/huggingface/safetensors describes the format.
struct SafetensorsHeader {
  std::vector<FileTensor> tensors;  ///< in the order of their data; names are unique
  std::map<std::string, std::string> metadata;
  uint64_t data_begin = 0;  ///< where the data begin in the file
};

/// What is refused though the format has no rule against it. Everything that the Python package `safetensors` 0.8
/// takes is taken, except: a name or metadata key that occurs twice; names that are empty, hold control characters or
/// a component ".." or start with a slash; unknown keys of a tensor; a tensor given as a list; `"__metadata__": null`;
/// sizes from 2^63 on; strings of more than 1 MiB; more tensors, dimensions or metadata than below. tests/checkpoint
/// holds the two against each other.
struct SafetensorsLimits {
  static constexpr uint64_t header_bytes = 100'000'000;  ///< as the package has it
  static constexpr size_t tensors = 262'144;
  static constexpr size_t dimensions = 64;
  static constexpr size_t metadata = 65'536;
};

/// `text`: the JSON; `data_bytes`: what follows it in the file; `file` names it in errors. Throws Damaged naming the
/// tensor and the byte. Memory: twice the text and 64 MiB at most, whatever the text says.
SafetensorsHeader parse_safetensors_header(std::string_view text, uint64_t data_bytes, const std::string& file);

/// Reads and parses the header of a file of `bytes` bytes. Throws Damaged, or IoError if it cannot be read.
SafetensorsHeader read_safetensors_header(os::ReadableFile& file, uint64_t bytes, const std::string& path);

/// The first bytes of a file that will hold `tensors` in this order, begin and end not yet set: sets them, and returns
/// the header padded with spaces so that the data begin at a multiple of 64 bytes. Order by descending element size and
/// every element is aligned. Throws InvalidArgument for names that the parser would refuse, or a header too large.
std::string compose_safetensors_header(std::vector<FileTensor>& tensors,
                                       const std::map<std::string, std::string>& metadata);

}  // namespace tesserae::checkpoint
