#include <gmock/gmock.h>

#include <random>

#include "tesserae/checkpoint/fault.h"
#include "tesserae/checkpoint/folder.h"
#include "tesserae/checkpoint/verify.h"
#include "tests/checkpoint/memory_files.h"
#include "tests/checkpoint/sample.h"

namespace tesserae::checkpoint {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

class Damage : public ::testing::Test {
 protected:
  Damage() {
    testing::save_sample({.folder = "/f", .step = 4});
    for (const std::string& name : memory_.list("/f/step-4")) files_.push_back("/f/step-4/" + name);
  }

  /// Reads everything. False if the damage was detected; every byte that was handed out before must be right.
  bool load() {
    try {
      const Checkpoint checkpoint = Checkpoint::open("/f/step-4");
      std::vector<Wanted> wanted;
      for (const testing::SampleTensor& tensor : tensors_) {
        Wanted want{tensor.name, {0, checkpoint.manifest().find(tensor.name)->elements()}};
        want.take = [&tensor](int64_t first, std::string_view bytes) {
          const auto offset = static_cast<size_t>(first * element_bytes(tensor.dtype));
          ASSERT_EQ(std::string_view(tensor.bytes).substr(offset, bytes.size()), bytes) << tensor.name;
        };
        wanted.push_back(want);
      }
      checkpoint.read(wanted);
      return true;
    } catch (const Damaged& damaged) {
      EXPECT_THAT(damaged.fault().file, HasSubstr("/f/step-4/"));
      return false;
    }
  }

  std::vector<Fault> faults() { return verify("/f/step-4").faults; }

  testing::MemoryFiles memory_;
  os::ScopedFiles scoped_{memory_};
  std::vector<testing::SampleTensor> tensors_ = testing::sample_tensors(4);
  std::vector<std::string> files_;
};

TEST_F(Damage, TenThousandBitFlipsAreAllDetected) {
  ASSERT_TRUE(load());
  size_t total = 0;
  for (const std::string& file : files_) total += memory_.bytes(file).size();
  std::mt19937_64 random(1);
  for (int i = 0; i < 10'000; ++i) {
    uint64_t place = random() % (total * 8);
    auto file = files_.begin();
    while (place >= memory_.bytes(*file).size() * 8) place -= memory_.bytes(*file++).size() * 8;
    char& byte = memory_.bytes(*file)[place / 8];
    byte = static_cast<char>(byte ^ (1 << place % 8));
    ASSERT_FALSE(load()) << *file << " bit " << place;
    if (i % 10 == 0) {
      ASSERT_FALSE(faults().empty()) << *file << " bit " << place;
    }
    byte = static_cast<char>(byte ^ (1 << place % 8));
  }
  EXPECT_TRUE(load());
}

TEST_F(Damage, EveryTruncationIsDetected) {
  for (const std::string& file : files_) {
    const std::string whole = memory_.bytes(file);
    for (size_t size = 0; size < whole.size(); ++size) {
      memory_.bytes(file).resize(size);
      ASSERT_FALSE(load()) << file << " cut to " << size;
      memory_.bytes(file) = whole;
    }
    memory_.bytes(file) += '\0';
    ASSERT_FALSE(load()) << file << " one byte longer";
    memory_.bytes(file) = whole;
  }
  EXPECT_TRUE(load());
}

TEST_F(Damage, MissingAndSwappedFilesAreDetected) {
  for (const std::string& file : files_) {
    memory_.rename(file, file + ".away");
    ASSERT_FALSE(load()) << file;
    EXPECT_THAT(faults().at(0).text(), HasSubstr("missing")) << file;
    memory_.rename(file + ".away", file);
  }
  for (size_t i = 0; i < files_.size(); ++i) {
    for (size_t j = i + 1; j < files_.size(); ++j) {
      std::swap(memory_.bytes(files_[i]), memory_.bytes(files_[j]));
      ASSERT_FALSE(load()) << files_[i] << " and " << files_[j];
      std::swap(memory_.bytes(files_[i]), memory_.bytes(files_[j]));
    }
  }
}

TEST_F(Damage, AFileOfAnotherStepIsDetected) {
  testing::save_sample({.folder = "/f", .step = 5});
  for (const std::string& file : files_) {
    const std::string name = os::Path(file).filename();
    const std::string own = memory_.bytes(file);
    memory_.bytes(file) = memory_.bytes("/f/step-5/" + name);
    // The manifest of another step is whole by itself; then it is the data files that do not fit.
    ASSERT_FALSE(load()) << file;
    memory_.bytes(file) = own;
  }
}

TEST_F(Damage, VerifyNamesEachFault) {
  const Checkpoint checkpoint = Checkpoint::open("/f/step-4");
  const StoredTensor& tensor = *checkpoint.manifest().find("model/embedding");
  std::vector<uint64_t> blocks;
  for (const Extent& extent : tensor.extents) {
    const std::string file = "/f/step-4/" + checkpoint.manifest().files[static_cast<size_t>(extent.file)].name;
    memory_.bytes(file)[extent.offset] = static_cast<char>(memory_.bytes(file)[extent.offset] ^ 1);
    blocks.push_back(extent.offset / 512 * 512);
  }
  const auto found = faults();
  ASSERT_THAT(found, SizeIs(tensor.extents.size()));
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].offset, blocks[i]);
    EXPECT_THAT(found[i].what, HasSubstr("checksum"));
    EXPECT_FALSE(found[i].tensor.empty());
  }
}

TEST_F(Damage, NeighbouringBadBlocksAreOneFault) {
  std::string& bytes = memory_.bytes(files_.back());
  ASSERT_GT(bytes.size(), 1536u);
  for (size_t i = 512; i < 1536; ++i) bytes[i] = static_cast<char>(~bytes[i]);
  ASSERT_THAT(faults(), SizeIs(1));
  EXPECT_EQ(faults()[0].offset, 512u);
}

TEST_F(Damage, AStrangerAmongTheDataFilesIsAFault) {
  memory_.write("/f/step-4/rank-7.safetensors", "x");
  ASSERT_THAT(faults(), SizeIs(1));
  EXPECT_THAT(faults()[0].text(), HasSubstr("rank-7.safetensors"));
  EXPECT_TRUE(load());
}

TEST_F(Damage, AFailedReadIsNoCorruption) {
  const Checkpoint checkpoint = Checkpoint::open("/f/step-4");
  EXPECT_THROW(checkpoint.read("nope"), InvalidArgument);
  EXPECT_THROW(checkpoint.read({{"model/embedding", {0, 1'000'000}}}), InvalidArgument);
  EXPECT_THROW(Checkpoint::open("/f/step-99"), InvalidArgument);
}

}  // namespace
}  // namespace tesserae::checkpoint
