#include "tesserae/checkpoint/reader.h"

#include <gmock/gmock.h>

#include <random>

#include "tests/checkpoint/memory_files.h"
#include "tests/checkpoint/sample.h"

namespace tesserae::checkpoint {
namespace {

/// Counts the bytes that are read, and the largest read.
class CountingFiles : public testing::MemoryFiles {
 public:
  std::unique_ptr<os::ReadableFile> open(const os::Path& path) override {
    class Counted : public os::ReadableFile {
     public:
      Counted(CountingFiles& files, std::unique_ptr<os::ReadableFile> under)
          : files_(files), under_(std::move(under)) {}
      size_t read_at(uint64_t offset, std::span<char> bytes) override {
        files_.bytes_read += bytes.size();
        files_.largest_read = std::max(files_.largest_read, bytes.size());
        return under_->read_at(offset, bytes);
      }

     private:
      CountingFiles& files_;
      std::unique_ptr<os::ReadableFile> under_;
    };
    return std::make_unique<Counted>(*this, MemoryFiles::open(path));
  }

  size_t bytes_read = 0;
  size_t largest_read = 0;
};

TEST(Reader, AnyRangesInAnyOrder) {
  CountingFiles memory;
  const os::ScopedFiles scoped(memory);
  const auto tensors = testing::sample_tensors(2);
  for (const int ranks : {1, 3, 5}) {
    const Checkpoint checkpoint =
        Checkpoint::open(testing::save_sample({.folder = cat("/f", ranks), .step = 2, .ranks = ranks}));
    std::mt19937_64 random(static_cast<uint64_t>(ranks));
    for (int round = 0; round < 300; ++round) {
      std::vector<Wanted> wanted;
      std::vector<std::string> filled(1 + random() % 6), expected(filled.size());
      for (size_t i = 0; i < filled.size(); ++i) {
        const testing::SampleTensor& tensor = tensors[random() % tensors.size()];
        const int64_t width = element_bytes(tensor.dtype);
        const auto elements = static_cast<int64_t>(tensor.bytes.size()) / width;
        int64_t begin = static_cast<int64_t>(random() % static_cast<uint64_t>(elements + 1));
        int64_t end = static_cast<int64_t>(random() % static_cast<uint64_t>(elements + 1));
        if (begin > end) std::swap(begin, end);
        const auto bytes = static_cast<size_t>((end - begin) * width);
        expected[i] = tensor.bytes.substr(static_cast<size_t>(begin * width), bytes);
        filled[i].resize(bytes);
        Wanted want{tensor.name, {begin, end}};
        if (random() % 2 == 0) {
          want.destination = filled[i].data();
        } else {
          want.take = [&target = filled[i], begin, width](int64_t first, std::string_view run) {
            run.copy(target.data() + (first - begin) * width, run.size());
          };
        }
        wanted.push_back(std::move(want));
      }
      checkpoint.read(wanted);
      ASSERT_EQ(filled, expected);
    }
  }
}

TEST(Reader, ReadsEachBlockOnceAndNoMoreThanABlockAtATime) {
  CountingFiles memory;
  const os::ScopedFiles scoped(memory);
  const Checkpoint checkpoint = Checkpoint::open(testing::save_sample({.folder = "/f", .step = 2}));
  std::vector<Wanted> everything, again;
  for (const StoredTensor& tensor : checkpoint.manifest().tensors)
    everything.push_back({tensor.name, {0, tensor.elements()}});
  memory.bytes_read = memory.largest_read = 0;
  checkpoint.read(everything);
  EXPECT_EQ(memory.bytes_read, checkpoint.manifest().bytes());
  EXPECT_LE(memory.largest_read, 512u);

  memory.bytes_read = 0;
  checkpoint.read({{"model/one", {0, 1}}});
  EXPECT_LE(memory.bytes_read, 1536u);  // the header and one block
}

}  // namespace
}  // namespace tesserae::checkpoint
