#include <gtest/gtest.h>

#include "tesserae/os/files.h"
#include "tests/checkpoint/header_cases.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size);

namespace tesserae::checkpoint {
namespace {

void run(const std::string& input) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
}

// The fuzzer aborts on what it does not like.
TEST(Corpus, Replays) {
  const auto paths = os::files().walk(os::Path(TESSERAE_SOURCE_DIR) / "tests/checkpoint/fuzz/corpus");
  EXPECT_GE(paths.size(), 20u);
  for (const os::Path& path : paths) run(os::files().read(path));
}

TEST(Corpus, MutatedHeadersReplay) {
  const auto seeds = testing::seed_files();
  for (uint64_t seed = 0; seed < 20'000; ++seed) {
    const std::string file = testing::mutated_file(seeds, seed);
    if (file.size() < 8) continue;
    const size_t brace = file.rfind('}');
    const size_t data = brace == std::string::npos ? 0 : file.size() - brace - 1;
    run(std::string({'\0', static_cast<char>(data), '\0'}) + file.substr(8, file.size() - 8 - data));
  }
}

}  // namespace
}  // namespace tesserae::checkpoint
