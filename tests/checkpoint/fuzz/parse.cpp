// The fuzzer's entry: the first byte chooses a parser, the rest is its text. Built two ways (CMakeLists.txt): by clang
// with libFuzzer, ASan and UBSan as `fuzz_checkpoint`, and into the ordinary tests, which replay corpus/.
//
//   ninja -C build/release fuzz_checkpoint
//   build/release/tests/checkpoint/fuzz_checkpoint -max_total_time=60 tests/checkpoint/fuzz/corpus
//
// Besides not crashing: what a parser takes, the composer writes so that the parser takes it again, unchanged.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "tesserae/checkpoint/fault.h"
#include "tesserae/checkpoint/manifest_text.h"
#include "tesserae/checkpoint/safetensors.h"

namespace {

using namespace tesserae;
using namespace tesserae::checkpoint;

void require(bool condition) {
  if (!condition) std::abort();
}

/// Two bytes of data size, then the JSON.
void parse_header(std::string_view input) {
  if (input.size() < 2) return;
  const uint64_t data =
      static_cast<unsigned char>(input[0]) | static_cast<uint64_t>(static_cast<unsigned char>(input[1])) << 8;
  SafetensorsHeader header;
  try {
    header = parse_safetensors_header(input.substr(2), data, "fuzz");
  } catch (const Damaged& damaged) {
    require(!damaged.fault().what.empty());
    return;
  }
  std::vector<FileTensor> tensors = header.tensors;
  const std::string composed = compose_safetensors_header(tensors, header.metadata);
  const SafetensorsHeader again = parse_safetensors_header(std::string_view(composed).substr(8), data, "fuzz");
  require(again.tensors.size() == header.tensors.size() && again.metadata == header.metadata);
  for (size_t i = 0; i < again.tensors.size(); ++i) {
    const FileTensor &a = header.tensors[i], &b = again.tensors[i];
    require(a.name == b.name && a.dtype == b.dtype && a.shape == b.shape && a.begin == b.begin && a.end == b.end);
  }
}

void parse_text(std::string_view input, Coverage coverage) {
  Manifest manifest;
  try {
    manifest = parse_manifest_unchecked(input, "fuzz", coverage);
  } catch (const Damaged& damaged) {
    require(!damaged.fault().what.empty());
    return;
  } catch (const InvalidArgument&) {
    return;  // a newer version
  }
  const std::string text = to_text(manifest);
  require(to_text(parse_manifest(text, "fuzz", coverage)) == text);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  if (size == 0) return 0;
  const std::string_view input(reinterpret_cast<const char*>(bytes) + 1, size - 1);
  switch (bytes[0] % 3) {
    case 0:
      parse_header(input);
      break;
    case 1:
      parse_text(input, Coverage::checkpoint);
      break;
    default:
      parse_text(input, Coverage::fragment);
  }
  return 0;
}
