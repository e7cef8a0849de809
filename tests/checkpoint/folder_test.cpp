#include "tesserae/checkpoint/folder.h"

#include <gmock/gmock.h>

#include "tests/checkpoint/memory_files.h"

namespace tesserae::checkpoint {
namespace {

TEST(Folder, KnowsTheNamesOfCommittedCheckpoints) {
  for (const char* name : {"step-0", "step-12", "step-9223372036854775807", "step-3.1", "step-3.27"}) {
    EXPECT_TRUE(parse_committed("/f", name)) << name;
  }
  for (const char* name :
       {"step-", "step--1", "step-01", "step-1.", "step-1.0", "step-1.01", "step-1x", "step-1.2.3", "Step-1",
        "step-1.tmp", "step-1.abc-0.tmp", "step-9223372036854775808", "step- 1", "step-+1", "xstep-1", ""}) {
    EXPECT_FALSE(parse_committed("/f", name)) << name;
  }
  EXPECT_TRUE(is_stray("step-1.abc-0.tmp"));
  EXPECT_FALSE(is_stray("notes.tmp"));
  EXPECT_FALSE(is_stray("step-1"));
}

TEST(Folder, ListsByStepAndVersion) {
  testing::MemoryFiles memory;
  const os::ScopedFiles scoped(memory);
  EXPECT_TRUE(list_checkpoints("/missing").empty());
  for (const char* name : {"/f", "/f/step-9", "/f/step-10", "/f/step-9.2", "/f/step-100.x.tmp", "/f/other"}) {
    memory.make_directory(name);
  }
  memory.write("/f/step-11", "a file is no checkpoint");
  std::vector<std::string> names;
  for (const Committed& found : list_checkpoints("/f")) names.push_back(found.path.native());
  EXPECT_THAT(names, ::testing::ElementsAre("/f/step-9", "/f/step-9.2", "/f/step-10"));
}

TEST(Folder, WhatIsSetAsideIsListedNoMore) {
  testing::MemoryFiles memory;
  const os::ScopedFiles scoped(memory);
  for (const char* name : {"/f", "/f/step-1", "/f/step-2"}) memory.make_directory(name);
  EXPECT_EQ(set_aside("/f/step-2"), "/f/step-2.damaged");
  memory.make_directory("/f/step-2");
  EXPECT_EQ(set_aside("/f/step-2"), "/f/step-2.damaged.2");
  ASSERT_EQ(list_checkpoints("/f").size(), 1u);
  EXPECT_EQ(list_checkpoints("/f").front().step, 1);
  EXPECT_FALSE(is_stray("step-2.damaged")) << "the next save leaves it alone";
  EXPECT_THROW(set_aside("/f/step-3"), IoError);
}

}  // namespace
}  // namespace tesserae::checkpoint
