#include "tesserae/checkpoint/writer.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "tesserae/checkpoint/folder.h"
#include "tesserae/checkpoint/verify.h"
#include "tesserae/os/faulty_files.h"
#include "tests/checkpoint/memory_files.h"
#include "tests/checkpoint/sample.h"

namespace tesserae::checkpoint {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::save_sample;

class WriterTest : public ::testing::Test {
 protected:
  std::vector<std::string> committed() const {
    std::vector<std::string> names;
    for (const Committed& found : list_checkpoints("/f")) names.push_back(found.path.filename());
    return names;
  }

  testing::MemoryFiles memory_;
  os::ScopedFiles scoped_{memory_};
};

TEST_F(WriterTest, WhatIsSavedCanBeRead) {
  for (const int ranks : {1, 2, 3, 8}) {
    for (const uint64_t block : {512, 4096, 1 << 20}) {
      const os::Path path =
          save_sample({.folder = cat("/f", ranks, "-", block), .step = 5, .ranks = ranks, .block_bytes = block});
      EXPECT_EQ(path.filename(), "step-5");
      EXPECT_EQ(testing::difference_from_sample(Checkpoint::open(path)), "");
      EXPECT_THAT(verify(path).faults, IsEmpty());
      EXPECT_THAT(testing::strays_in(path.parent_path()), IsEmpty());
    }
  }
}

TEST_F(WriterTest, RanksMayFinishInAnyOrderAndAtTheSameTime) {
  const auto tensors = testing::sample_tensors(1);
  const testing::SampleSave save{.folder = "/f", .ranks = 8};
  std::vector<std::jthread> ranks;
  for (int rank = 0; rank < save.ranks; ++rank) {
    ranks.emplace_back([&, rank] {
      write_part(testing::sample_job(save, rank), testing::sample_sources(tensors, rank, save.ranks));
      if (rank == 0) commit(testing::sample_job(save, 0), {{"step", 1}});
    });
  }
  ranks.clear();
  EXPECT_EQ(testing::difference_from_sample(Checkpoint::open("/f/step-1")), "");
}

TEST_F(WriterTest, ARankWithNothingToWriteLeavesNoFile) {
  const testing::SampleSave save{.folder = "/f", .ranks = 2};
  const auto tensors = testing::sample_tensors(1);
  write_part(testing::sample_job(save, 1), {});
  write_part(testing::sample_job(save, 0), testing::sample_sources(tensors, 0, 1));
  commit(testing::sample_job(save, 0), {{"step", 1}});
  EXPECT_EQ(testing::difference_from_sample(Checkpoint::open("/f/step-1")), "");
  EXPECT_FALSE(memory_.exists("/f/step-1/rank-1.safetensors"));
}

TEST_F(WriterTest, WhatIsWrittenWholeCanBeCommittedByOthers) {
  const testing::SampleSave save{.folder = "/f", .step = 7, .ranks = 3};
  const auto tensors = testing::sample_tensors(7);
  const nlohmann::json training{{"step", 7}, {"seed", 1234}};
  EXPECT_FALSE(commit_left_behind("/f", 2)) << "there is no such folder";
  save_sample({.folder = "/f", .step = 6});
  EXPECT_FALSE(commit_left_behind("/f", 2));
  write_part(testing::sample_job(save, 0), testing::sample_sources(tensors, 0, 3), {}, &training);
  write_part(testing::sample_job(save, 2), testing::sample_sources(tensors, 2, 3));
  EXPECT_FALSE(commit_left_behind("/f", 2)) << "of rank 1 there is nothing";
  write_part(testing::sample_job(save, 1), testing::sample_sources(tensors, 1, 3));
  EXPECT_EQ(commit_left_behind("/f", 2), "/f/step-7");
  EXPECT_EQ(testing::difference_from_sample(Checkpoint::open("/f/step-7")), "");
  EXPECT_EQ(Checkpoint::open("/f/step-7").manifest().training, training);
  EXPECT_THAT(committed(), ElementsAre("step-6", "step-7"));
  EXPECT_FALSE(commit_left_behind("/f", 2)) << "it is committed";
}

TEST_F(WriterTest, WhereverItsFirstRankEnded) {
  const auto tensors = testing::sample_tensors(7);
  const nlohmann::json training{{"step", 7}, {"seed", 1234}};
  int committed_later = 0;
  bool ended = false;
  for (int operation = 1; !ended; ++operation) {
    testing::MemoryFiles memory;
    const os::ScopedFiles fresh(memory);
    const testing::SampleSave save{.folder = "/f", .step = 7, .ranks = 2};
    for (const int rank : {1, 0}) {
      write_part(testing::sample_job(save, rank), testing::sample_sources(tensors, rank, 2), {}, &training);
    }
    try {
      os::FaultyFiles faulty(memory);
      faulty.fail_at(operation, {.lasting = true});
      const os::ScopedFiles scoped(faulty);
      commit(testing::sample_job(save, 0), training);
      ended = true;
    } catch (const IoError&) {
    }
    const bool there = !committed().empty();
    EXPECT_EQ(commit_left_behind("/f", 2).has_value(), !there) << operation;
    if (!there) ++committed_later;
    EXPECT_EQ(testing::difference_from_sample(Checkpoint::open("/f/step-7")), "") << operation;
    EXPECT_EQ(Checkpoint::open("/f/step-7").manifest().training, training);
    EXPECT_THAT(testing::strays_in("/f"), IsEmpty());
  }
  EXPECT_GT(committed_later, 5);
}

TEST_F(WriterTest, KeepsTheNewest) {
  for (int step = 1; step <= 5; ++step) save_sample({.folder = "/f", .step = step, .keep = 2});
  EXPECT_THAT(committed(), ElementsAre("step-4", "step-5"));
  EXPECT_THAT(testing::strays_in("/f"), IsEmpty());
  save_sample({.folder = "/f", .step = 6, .keep = 0});
  EXPECT_THAT(committed(), ElementsAre("step-4", "step-5", "step-6"));
}

TEST_F(WriterTest, ARunThatWentBackKeepsItsOwn) {
  for (const int step : {10, 20, 30}) save_sample({.folder = "/f", .step = step});
  save_sample({.folder = "/f", .step = 15, .keep = 2});
  EXPECT_THAT(committed(), ElementsAre("step-10", "step-15", "step-20", "step-30"));
  save_sample({.folder = "/f", .step = 18, .keep = 2});
  EXPECT_THAT(committed(), ElementsAre("step-15", "step-18", "step-20", "step-30"));
}

TEST_F(WriterTest, TheLastOfAStepIsFound) {
  EXPECT_EQ(last_of_step("/f", 20), std::nullopt);
  for (const char* attempt : {"a", "b"}) save_sample({.folder = "/f", .step = 20, .attempt = attempt});
  save_sample({.folder = "/f", .step = 30});
  EXPECT_EQ(last_of_step("/f", 20)->path, "/f/step-20.1");
}

TEST_F(WriterTest, AStepThatIsThereAlreadyGetsAVersion) {
  save_sample({.folder = "/f", .step = 3, .attempt = "a"});
  EXPECT_EQ(save_sample({.folder = "/f", .step = 3, .attempt = "b"}), "/f/step-3.1");
  EXPECT_EQ(save_sample({.folder = "/f", .step = 3, .keep = 2, .attempt = "c"}), "/f/step-3.2");
  EXPECT_THAT(committed(), ElementsAre("step-3.1", "step-3.2"));
}

TEST_F(WriterTest, StraysOfDeadJobsGo) {
  memory_.make_directories("/f/step-1.dead-0.tmp");
  memory_.write("/f/step-1.dead-0.tmp/rank-0.safetensors", "half");
  memory_.write("/f/step-1.dead-0.tmp/rank-1.done", "x");
  memory_.write("/f/notes.txt", "not ours");
  save_sample({.folder = "/f", .step = 1});
  EXPECT_THAT(memory_.list("/f"), ElementsAre("notes.txt", "step-1"));
}

TEST_F(WriterTest, AFailedRankEndsTheSaveWithItsReason) {
  save_sample({.folder = "/f", .step = 1});
  const auto tensors = testing::sample_tensors(2);
  const testing::SampleSave save{.folder = "/f", .step = 2, .ranks = 2};
  auto wrong = testing::sample_sources(tensors, 1, 2);
  wrong[0].elements.end += 100'000;
  EXPECT_THROW(write_part(testing::sample_job(save, 1), wrong), InvalidArgument);
  write_part(testing::sample_job(save, 0), testing::sample_sources(tensors, 0, 2));
  try {
    commit(testing::sample_job(save, 0), {});
    FAIL() << "committed";
  } catch (const IoError& failure) {
    EXPECT_THAT(failure.what(), HasSubstr("rank 1 failed: [write_data_file]"));
  }
  discard(testing::sample_job(save, 0));
  EXPECT_THAT(memory_.list("/f"), ElementsAre("step-1"));
}

/// Keeps another bit than was written to the file of that name.
class DamagingFiles : public testing::MemoryFiles {
 public:
  explicit DamagingFiles(const testing::MemoryFiles& other) : MemoryFiles(other) {}
  std::unique_ptr<os::ReadableFile> open(const os::Path& path) override {
    if (path.filename() == "rank-1.safetensors") bytes(path)[600] ^= 4;
    return MemoryFiles::open(path);
  }
};

TEST_F(WriterTest, WhatStorageDamagesIsNotCommittedIfItIsReadBack) {
  save_sample({.folder = "/f", .step = 1});
  DamagingFiles damaging(memory_);
  const os::ScopedFiles scoped(damaging);
  const testing::SampleSave save{.folder = "/f", .step = 2, .ranks = 2, .read_back = true};
  const auto tensors = testing::sample_tensors(2);
  write_part(testing::sample_job(save, 0), testing::sample_sources(tensors, 0, 2));
  try {
    write_part(testing::sample_job(save, 1), testing::sample_sources(tensors, 1, 2));
    FAIL() << "said that it is there";
  } catch (const IoError& failure) {
    EXPECT_THAT(failure.what(), HasSubstr("rank-1.safetensors is not what was written, at byte 512 of step 2"));
  }
  EXPECT_THROW(commit(testing::sample_job(save, 0), {}), IoError);
  EXPECT_EQ(list_checkpoints("/f").back().step, 1);
}

TEST_F(WriterTest, AMissingRankIsNamedAtTheDeadline) {
  const testing::SampleSave save{.folder = "/f", .ranks = 3, .deadline = std::chrono::milliseconds(50)};
  const auto tensors = testing::sample_tensors(1);
  write_part(testing::sample_job(save, 0), testing::sample_sources(tensors, 0, 3));
  write_part(testing::sample_job(save, 1), testing::sample_sources(tensors, 1, 3));
  try {
    commit(testing::sample_job(save, 0), {});
    FAIL() << "committed";
  } catch (const IoError& failure) {
    EXPECT_THAT(failure.what(), HasSubstr("the first is rank 2"));
  }
}

TEST_F(WriterTest, WhatIsMissingOrDoubledIsNotCommitted) {
  const testing::SampleSave save{.folder = "/f", .ranks = 2};
  const auto tensors = testing::sample_tensors(1);
  write_part(testing::sample_job(save, 0), testing::sample_sources(tensors, 0, 2));
  write_part(testing::sample_job(save, 1), testing::sample_sources(tensors, 0, 2));
  EXPECT_THROW(commit(testing::sample_job(save, 0), {{"step", 1}}), InvalidArgument);
  EXPECT_THAT(committed(), IsEmpty());
}

TEST_F(WriterTest, WhatNoReaderWouldTakeIsNotCommitted) {
  const testing::SampleSave save{.folder = "/f", .ranks = 1};
  const auto tensors = testing::sample_tensors(1);
  nlohmann::json deep = 1;
  for (int i = 0; i < 40; ++i) deep = {{"deeper", deep}};
  for (const nlohmann::json& training : {deep, nlohmann::json(3)}) {
    write_part(testing::sample_job(save, 0), testing::sample_sources(tensors, 0, 1));
    EXPECT_THROW(commit(testing::sample_job(save, 0), training), InvalidArgument);
  }
  EXPECT_THAT(committed(), IsEmpty());
}

TEST_F(WriterTest, StopsWhenTold) {
  const testing::SampleSave save{.folder = "/f", .ranks = 2};
  const auto tensors = testing::sample_tensors(1);
  std::stop_source stop;
  stop.request_stop();
  EXPECT_THROW(write_part(testing::sample_job(save, 0), testing::sample_sources(tensors, 0, 2), stop.get_token()),
               Cancelled);
  write_part(testing::sample_job({.folder = "/f", .ranks = 2, .attempt = "b"}, 0),
             testing::sample_sources(tensors, 0, 2));
  EXPECT_THROW(commit(testing::sample_job({.folder = "/f", .ranks = 2, .attempt = "b"}, 0), {}, stop.get_token()),
               Cancelled);
}

TEST_F(WriterTest, SourcesThatAreMadeWhileTheyAreWrittenComeInBlocks) {
  const std::string bytes(5000, 'q');
  uint64_t next = 0;
  size_t largest = 0;
  Source source{.name = "x", .dtype = Dtype::U8, .shape = {5000}, .elements = {0, 5000}};
  source.fill = [&](uint64_t offset, std::span<char> target) {
    EXPECT_EQ(offset, next);
    next += target.size();
    largest = std::max(largest, target.size());
    bytes.copy(target.data(), target.size(), offset);
  };
  const testing::SampleSave save{.folder = "/f", .ranks = 1};
  write_part(testing::sample_job(save, 0), {source});
  commit(testing::sample_job(save, 0), nlohmann::json::object());
  EXPECT_EQ(Checkpoint::open("/f/step-1").read("x"), bytes);
  EXPECT_LE(largest, 512u);
}

// Each single operation of the system fails once, as a disk that has a bad moment or is full.
TEST_F(WriterTest, AnyFailureLeavesOlderCheckpointsAndTheNextSaveWorks) {
  save_sample({.folder = "/f", .step = 1});
  save_sample({.folder = "/f", .step = 2, .read_back = true});
  int operations = 0;
  {
    testing::MemoryFiles copy(memory_);
    os::FaultyFiles faulty(copy);
    const os::ScopedFiles scoped(faulty);
    save_sample({.folder = "/f", .step = 3, .keep = 2, .read_back = true});
    operations = faulty.operations();
  }
  ASSERT_GT(operations, 40);
  for (int k = 1; k <= operations; ++k) {
    for (const bool lasting : {false, true}) {
      testing::MemoryFiles copy(memory_);
      os::FaultyFiles faulty(copy);
      faulty.fail_at(k, {.error = ENOSPC, .written = 0.5, .lasting = lasting});
      bool saved = false;
      {
        const os::ScopedFiles scoped(faulty);
        try {
          save_sample(
              {.folder = "/f", .step = 3, .keep = 2, .read_back = true, .deadline = std::chrono::milliseconds(1)});
          saved = true;
        } catch (const IoError&) {
        }
      }
      const os::ScopedFiles scoped(copy);
      const auto found = list_checkpoints("/f");
      ASSERT_FALSE(found.empty()) << k;
      EXPECT_GE(found.back().step, saved ? 3 : 2) << k;
      EXPECT_EQ(testing::difference_from_sample(Checkpoint::open(found.back().path)), "") << k;
      if (!saved) {
        EXPECT_EQ(testing::difference_from_sample(Checkpoint::open("/f/step-2")), "") << k;
      }
      save_sample({.folder = "/f", .step = 4, .keep = 2});
      EXPECT_THAT(testing::strays_in("/f"), IsEmpty()) << k;
      EXPECT_EQ(list_checkpoints("/f").size(), 2u) << k;
    }
  }
}

}  // namespace
}  // namespace tesserae::checkpoint
