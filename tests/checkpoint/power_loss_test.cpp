#include <gmock/gmock.h>

#include "tesserae/checkpoint/folder.h"
#include "tesserae/checkpoint/verify.h"
#include "tesserae/os/faulty_files.h"
#include "tests/checkpoint/memory_files.h"
#include "tests/checkpoint/sample.h"

namespace tesserae::checkpoint {
namespace {

using testing::MemoryFiles;
using testing::save_sample;
using Unsynced = testing::MemoryFiles::Unsynced;

// The power fails after the k-th operation of a save, for every k; what was not synced is lost, kept, or partly there.
// Afterwards the newest checkpoint must load, be no older than what a save had returned, and the next save must clear
// up.
struct Situation {
  const char* name;
  int saves_before;
  int keep;
};

class PowerLoss : public ::testing::TestWithParam<Situation> {};

void expect_recovery(MemoryFiles& memory, int64_t at_least, int keep, const std::string& when) {
  const os::ScopedFiles scoped(memory);
  const auto found = list_checkpoints("/runs/f");
  ASSERT_GE(found.empty() ? 0 : found.back().step, at_least) << when;
  if (!found.empty()) {
    ASSERT_EQ(testing::difference_from_sample(Checkpoint::open(found.back().path)), "") << when;
    ASSERT_TRUE(verify(found.back().path).faults.empty()) << when;
  }
  const os::Path path = save_sample({.folder = "/runs/f", .step = 9, .keep = keep});
  ASSERT_EQ(testing::difference_from_sample(Checkpoint::open(path)), "") << when;
  ASSERT_TRUE(testing::strays_in("/runs/f").empty()) << when;
  if (keep > 0) {
    ASSERT_LE(list_checkpoints("/runs/f").size(), static_cast<size_t>(keep)) << when;
  }
}

TEST_P(PowerLoss, AfterEveryOperation) {
  const auto [name, saves_before, keep] = GetParam();
  MemoryFiles before;
  before.make_directory("/runs");
  before.sync_directory("/");
  {
    const os::ScopedFiles scoped(before);
    for (int step = 1; step <= saves_before; ++step) save_sample({.folder = "/runs/f", .step = step, .keep = keep});
  }
  const int64_t step = saves_before + 1;
  auto save = [&] {
    save_sample({.folder = "/runs/f", .step = step, .keep = keep, .deadline = std::chrono::milliseconds(1)});
  };
  int operations = 0;
  {
    MemoryFiles copy(before);
    os::FaultyFiles counted(copy);
    const os::ScopedFiles scoped(counted);
    save();
    operations = counted.operations();
  }
  ASSERT_GT(operations, 30);
  int power_failures = 0;
  for (int k = 1; k <= operations + 1; ++k) {
    for (const Unsynced unsynced : {Unsynced::lost, Unsynced::kept, Unsynced::mixed}) {
      for (uint64_t seed = 0; seed < (unsynced == Unsynced::mixed ? 8u : 1u); ++seed) {
        MemoryFiles memory(before);
        os::FaultyFiles power(memory);
        power.fail_at(k, {.written = 0.5, .lasting = true});
        bool saved = false;
        try {
          const os::ScopedFiles scoped(power);
          save();
          saved = true;
        } catch (const IoError&) {
        }
        memory.lose_power(unsynced, seed);
        ++power_failures;
        expect_recovery(memory, saved ? step : saves_before, keep,
                        cat(name, ", operation ", k, " of ", operations, ", unsynced ", static_cast<int>(unsynced),
                            ", seed ", seed));
        if (HasFatalFailure()) return;
      }
    }
  }
  RecordProperty("operations", operations);
  RecordProperty("power_failures", power_failures);
}

INSTANTIATE_TEST_SUITE_P(Saves, PowerLoss,
                         ::testing::Values(Situation{"first", 0, 0}, Situation{"second", 1, 0},
                                           Situation{"third of two kept", 2, 2}, Situation{"second of one kept", 1, 1}),
                         [](const auto& test) {
                           return cat("After", test.param.saves_before, "Keep", test.param.keep);
                         });

// The twin itself: what is not synced is gone.
TEST(MemoryFiles, LosesWhatWasNotSynced) {
  MemoryFiles memory;
  memory.make_directory("/d");
  memory.sync_directory("/");
  const auto file = memory.create("/d/synced");
  file->write("one");
  file->sync();
  file->write("two");
  memory.write("/d/nameless", "x");
  memory.sync_directory("/d");
  memory.rename("/d/nameless", "/d/renamed");
  MemoryFiles kept(memory);
  memory.lose_power(Unsynced::lost);
  EXPECT_EQ(memory.read("/d/synced"), "one");
  EXPECT_EQ(memory.read("/d/nameless"), "");
  kept.lose_power(Unsynced::kept);
  EXPECT_EQ(kept.read("/d/synced"), "onetwo");
}

}  // namespace
}  // namespace tesserae::checkpoint
