#include "tesserae/train/folder_owner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/os/scratch.h"

namespace tesserae::train {
namespace {

using testing::AllOf;
using testing::HasSubstr;

using FolderOwners = os::Scratch;

std::string refusal(const os::Path& folder) {
  try {
    const FolderOwner owner(folder);
  } catch (const FolderInUse& error) {
    return error.what();
  }
  return "";
}

TEST_F(FolderOwners, OneAtATimeAndTheNextKeepsTheIdentity) {
  const os::Path folder = folder_ / "a" / "run";
  std::string identity;
  {
    const FolderOwner first(folder);
    identity = first.identity();
    EXPECT_EQ(identity.size(), 32u);
    EXPECT_EQ(first.generation(), 1);
    EXPECT_THAT(refusal(folder), AllOf(HasSubstr("a live run has the folder " + folder.native()), HasSubstr("process "),
                                       HasSubstr("choose another run.folder")));
    EXPECT_NO_THROW(first.require()) << "who was refused has changed nothing";
  }
  const FolderOwner second(folder);
  EXPECT_EQ(second.identity(), identity);
  EXPECT_EQ(second.generation(), 2);
}

TEST_F(FolderOwners, ARemovedFolderIsAnother) {
  std::string identity = FolderOwner(folder_ / "run").identity();
  os::files().remove_all(folder_ / "run");
  EXPECT_NE(FolderOwner(folder_ / "run").identity(), identity);
}

TEST_F(FolderOwners, WhoHasLostItIsTold) {
  const FolderOwner first(folder_);
  os::files().remove(folder_ / "owner.lock");  // as if locks did not reach the other host
  const FolderOwner second(folder_);
  EXPECT_THROW(first.require(), FolderInUse);
  EXPECT_NO_THROW(second.require());
}

/// As on storage that keeps the locks of a host that has lost its power.
TEST_F(FolderOwners, ALockThatALostRankHadIsDoneWithoutAfterAWhile) {
  const FolderOwner of_lost_rank(folder_);
  const FolderOwner::Lost lost{.generation = of_lost_rank.generation(), .patience = std::chrono::milliseconds(200)};
  const FolderOwner after(folder_, lost);
  EXPECT_EQ(after.generation(), 2);
  EXPECT_EQ(after.identity(), of_lost_rank.identity());
  EXPECT_NO_THROW(after.require());
  EXPECT_THROW(of_lost_rank.require(), FolderInUse) << "if it lives after all";
  EXPECT_THROW(FolderOwner(folder_, lost), FolderInUse) << "another run has claimed it since";
}

TEST_F(FolderOwners, WhatIsNotReadableIsReplaced) {
  os::files().write(folder_ / "owner.json", "{\"generation\":");
  const FolderOwner owner(folder_);
  EXPECT_EQ(owner.generation(), 1);
  EXPECT_NO_THROW(owner.require());
}

}  // namespace
}  // namespace tesserae::train
