#include "tesserae/checkpoint/load.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "tesserae/checkpoint/fault.h"
#include "tests/checkpoint/memory_files.h"
#include "tests/checkpoint/sample.h"
#include "tests/checkpoint/trained.h"

namespace tesserae::checkpoint {
namespace {

using ::testing::HasSubstr;

class LoadTest : public ::testing::Test {
 protected:
  /// Makes one bit of a tensor's first part wrong.
  void damage(const os::Path& path, const std::string& tensor) {
    const Checkpoint checkpoint = Checkpoint::open(path);
    const Extent& extent = checkpoint.manifest().find(tensor)->extents.front();
    char& byte =
        memory_.bytes(path / checkpoint.manifest().files[static_cast<size_t>(extent.file)].name)[extent.offset];
    byte = static_cast<char>(byte ^ 4);
  }

  /// Step that all ranks of a job of two load; -1: there is none. Rank r reads only tensor r of two.
  int64_t newest() {
    std::vector<int64_t> steps(2);
    comm::run_local(2, [&](comm::Fabric& fabric) {
      const auto loaded = load_newest(fabric, "/f", [&](const Checkpoint& checkpoint) {
        checkpoint.read(fabric.rank() == 0 ? "model/embedding" : "random/0/cpu");
      });
      steps[static_cast<size_t>(fabric.rank())] = loaded ? loaded->step() : -1;
    });
    EXPECT_EQ(steps[0], steps[1]);
    return steps[0];
  }

  testing::MemoryFiles memory_;
  os::ScopedFiles scoped_{memory_};
};

TEST_F(LoadTest, TakesTheNewestThatAllRanksCanRead) {
  EXPECT_EQ(newest(), -1);
  for (const int step : {1, 2, 3}) testing::save_sample({.folder = "/f", .step = step, .ranks = 1, .block_bytes = 512});
  EXPECT_EQ(newest(), 3);
  damage("/f/step-3", "random/0/cpu");  // rank 1 alone meets it
  EXPECT_EQ(newest(), 2);
  memory_.bytes("/f/step-2/manifest.json")[100] ^= 1;
  EXPECT_EQ(newest(), 1);
  memory_.remove("/f/step-1/rank-0.safetensors");
  EXPECT_THROW(newest(), Corruption);
}

TEST_F(LoadTest, TellsWhichAreDamaged) {
  for (const int step : {1, 2, 3, 4}) {
    testing::save_sample({.folder = "/f", .step = step, .ranks = 1, .block_bytes = 512});
  }
  damage("/f/step-4", "random/0/cpu");
  damage("/f/step-3", "model/embedding");
  std::vector<std::vector<os::Path>> damaged(2);
  comm::run_local(2, [&](comm::Fabric& fabric) {
    load_newest(
        fabric, "/f",
        [&](const Checkpoint& checkpoint) {
          if (checkpoint.step() == 2 && fabric.rank() == 0) throw IoError("test", "the disk is busy");
          checkpoint.read(fabric.rank() == 0 ? "model/embedding" : "random/0/cpu");
        },
        &damaged[static_cast<size_t>(fabric.rank())]);
  });
  for (const auto& told : damaged) {
    EXPECT_THAT(told, ::testing::ElementsAre("/f/step-4", "/f/step-3")) << "that of step 2 may well be whole";
  }
}

TEST_F(LoadTest, OtherFailuresAreNotHeldAgainstTheCheckpoint) {
  for (const int step : {1, 2}) testing::save_sample({.folder = "/f", .step = step});
  std::vector<int> calls(2, 0);
  EXPECT_THROW(comm::run_local(2,
                               [&](comm::Fabric& fabric) {
                                 load_newest(fabric, "/f", [&](const Checkpoint&) {
                                   ++calls[static_cast<size_t>(fabric.rank())];
                                   if (fabric.rank() == 1) throw InvalidArgument("test", "another model");
                                 });
                               }),
               InvalidArgument);
  EXPECT_EQ(calls, (std::vector<int>{1, 1}));
}

TEST_F(LoadTest, AChosenCheckpointIsLoadedOrNothing) {
  for (const int step : {1, 2}) testing::save_sample({.folder = "/f", .step = step});
  auto load = [](const os::Path& path) {
    int64_t step = 0;
    comm::run_local(2, [&](comm::Fabric& fabric) {
      const Checkpoint loaded =
          load_chosen(fabric, path, [](const Checkpoint& checkpoint) { checkpoint.read("model/embedding"); });
      if (fabric.rank() == 0) step = loaded.step();
    });
    return step;
  };
  EXPECT_EQ(load("/f"), 2);
  EXPECT_EQ(load("/f/step-1"), 1);
  damage("/f/step-2", "model/embedding");
  EXPECT_THROW(load("/f"), Damaged);
  EXPECT_THROW(load("/nowhere"), InvalidArgument);
}

TEST_F(LoadTest, FillsPiecesAndConverts) {
  const os::Path path = testing::save_sample({.folder = "/f", .step = 2});
  const Checkpoint checkpoint = Checkpoint::open(path);
  const auto tensors = testing::sample_tensors(2);
  const at::Tensor bf16 = at::from_blob(const_cast<char*>(tensors[1].bytes.data()), {29 * 7}, at::kBFloat16);
  at::Tensor floats = at::zeros({50});
  load(checkpoint, {{.name = "model/blocks.0.weight", .shape = {29, 7}, .elements = {11, 61}, .data = floats}});
  // As bits: random bytes have NaNs among them.
  EXPECT_TRUE(floats.view(at::kInt).equal(bf16.narrow(0, 11, 50).to(at::kFloat).view(at::kInt)));

  auto refusal = [&](const Piece& piece) -> std::string {
    try {
      load(checkpoint, {piece});
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  };
  const at::Tensor longs = at::zeros({1}, at::kLong);
  EXPECT_EQ(refusal({.name = "model/one", .shape = {1}, .elements = {0, 1}, .data = longs}), "");
  EXPECT_THAT(refusal({.name = "model/one", .shape = {1}, .elements = {0, 1}, .data = at::zeros({1})}),
              HasSubstr("has type I64"));
  EXPECT_THAT(refusal({.name = "model/one", .shape = {1, 1}, .elements = {0, 1}, .data = longs}),
              HasSubstr("has shape [1]"));
  EXPECT_THAT(refusal({.name = "model/two", .shape = {1}, .elements = {0, 1}, .data = longs}), HasSubstr("is missing"));
  EXPECT_EQ(refusal({.name = "model/two", .shape = {1}, .elements = {0, 1}, .data = longs, .optional = true}), "");
}

}  // namespace
}  // namespace tesserae::checkpoint
