#include <gmock/gmock.h>
#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "tesserae/checkpoint/fault.h"
#include "tesserae/checkpoint/manifest_text.h"
#include "tesserae/checkpoint/safetensors.h"
#include "tests/checkpoint/header_cases.h"
#include "tests/checkpoint/memory_files.h"

// Counts what operator new hands out in this program.
namespace {
std::atomic<size_t> in_use{0};
std::atomic<size_t> peak{0};
}  // namespace

void* operator new(size_t size) {
  void* memory = std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  const size_t now = in_use += ::malloc_usable_size(memory);
  size_t seen = peak.load();
  while (seen < now && !peak.compare_exchange_weak(seen, now)) {
  }
  return memory;
}
void operator delete(void* memory) noexcept {
  if (memory != nullptr) in_use -= ::malloc_usable_size(memory);
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept {
  operator delete(memory);
}

namespace tesserae::checkpoint {
namespace {

constexpr size_t mebibyte = 1 << 20;

/// Bytes allocated at most while `action` ran, beyond what there was before. It must throw Damaged.
template <class Action>
size_t memory_to_refuse(const Action& action) {
  const size_t before = in_use;
  peak = before;
  EXPECT_THROW(action(), Damaged);
  return peak - before;
}

std::string repeated(const std::string& text, size_t bytes) {
  std::string all;
  all.reserve(bytes + text.size());
  while (all.size() < bytes) all += text;
  return all;
}

/// Names that differ: `count` times `head`, a number, `tail`.
std::string numbered(const std::string& head, const std::string& tail, size_t count) {
  std::string all;
  for (size_t i = 0; i < count; ++i) all += head + std::to_string(i) + tail;
  return all;
}

TEST(Hostile, ClaimedSizesCostNothing) {
  for (const uint64_t length : {~uint64_t{0}, uint64_t{1} << 63, uint64_t{1} << 40, uint64_t{99'999'999}}) {
    std::string file(8, '\0');
    for (size_t i = 0; i < 8; ++i) file[i] = static_cast<char>(length >> (8 * i));
    file += "{}";
    testing::MemoryFiles memory;
    memory.write("/x", file);
    const auto open = memory.open("/x");
    EXPECT_LT(memory_to_refuse([&] { read_safetensors_header(*open, file.size(), "x"); }), mebibyte);
  }
}

TEST(Hostile, HeadersCostTheirSizeOnceMoreAnd64MiBAtMost) {
  const std::string tensor = "\":{\"dtype\":\"U8\",\"shape\":[";
  const std::string end = "],\"data_offsets\":[0,0]},";
  const std::vector<std::string> texts{
      "{" + numbered("\"", tensor + "0" + end, 600'000),
      "{" + numbered("\"", tensor + repeated("1,", 126) + "0" + end, 100'000),
      "{" + numbered("\"" + repeated("n", 200), tensor + "0" + end, 270'000),
      "{\"a" + tensor + repeated("1,", 20 * mebibyte),
      "{\"" + repeated("n", 30 * mebibyte) + tensor + "0" + end,
      "{\"__metadata__\":{" + numbered("\"", "\":\"\",", 1'000'000) + "\"x\":1}}",
      "{\"__metadata__\":{\"a\":" + repeated("[", 20 * mebibyte),
      repeated("{\"a\":", 20 * mebibyte),
      repeated("[", 20 * mebibyte),
      "{\"a\":\"" + repeated("\\u0041", 20 * mebibyte),
  };
  for (const std::string& text : texts) {
    EXPECT_LE(memory_to_refuse([&] { parse_safetensors_header(text, 0, "x"); }), text.size() + 64 * mebibyte)
        << text.substr(0, 60);
  }
}

TEST(Hostile, ManifestsCostAFewTimesTheirSizeAtMost) {
  const std::string head = R"({"format":"tesserae-checkpoint","version":1,)";
  const std::vector<std::string> texts{
      head + "\"files\":[" +
          repeated("{\"name\":\"a\",\"bytes\":0,\"checksum\":\"2d06800538d394c2\",\"blocks\":\"\"},", 8 * mebibyte),
      head + "\"tensors\":[" + repeated("{\"name\":\"a\",\"dtype\":\"F32\",\"shape\":[],\"parts\":[]},", 8 * mebibyte),
      head + "\"tensors\":[{\"name\":\"a\",\"dtype\":\"F32\",\"shape\":[],\"parts\":[" +
          repeated("[0,0,1,0],", 8 * mebibyte),
      head + "\"tensors\":[{\"name\":\"a\",\"parts\":" + repeated("[", 8 * mebibyte),
      head + "\"training\":{\"a\":[" + repeated("[],", 8 * mebibyte),
      head + "\"training\":{\"a\":[" + repeated("{},", 8 * mebibyte),
      head + "\"training\":" + repeated("{\"a\":", 8 * mebibyte),
      head + "\"training\":{" + numbered("\"", "\":0,", 700'000),
  };
  for (const std::string& text : texts) {
    EXPECT_LE(memory_to_refuse([&] { parse_manifest_unchecked(text, "m", Coverage::checkpoint); }),
              8 * text.size() + 64 * mebibyte)
        << text.substr(0, 120);
  }
}

}  // namespace
}  // namespace tesserae::checkpoint
