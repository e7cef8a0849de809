#include "tesserae/snapshot/snapshot_buffer.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <string_view>

#include "tesserae/os/files.h"

namespace tesserae::snapshot {
namespace {

class Buffer : public testing::Test {
 protected:
  ~Buffer() override { buffer_.remove(); }

  std::vector<checkpoint::Piece> pieces(float scale, int64_t elements = 300) const {
    return {{.name = "model/weight",
             .shape = {elements * 2},
             .elements = {100, 100 + elements},
             .data = at::arange(elements, at::kFloat).mul_(scale)},
            {.name = "model/empty", .shape = {4}, .elements = {2, 2}, .data = at::full({0}, 1.0f)},
            {.name = "optimizer/0/step", .shape = {}, .elements = {0, 1}, .data = at::full({}, scale)},
            {.name = "random/0/cpu", .shape = {5}, .elements = {0, 5}, .data = at::full({5}, 9, at::kByte)}};
  }

  void write(float scale, int64_t step, int64_t elements = 300) {
    checkpoint::Manifest manifest;
    manifest.step = step;
    manifest.attempt = "0123456789abcdef";
    manifest.training = {{"note", step}};
    manifest.block_bytes = 512;
    buffer_.prepare(manifest, pieces(scale, elements));
    buffer_.fill();
  }

  const std::string name_ = "tesserae-buffer-test-" + std::to_string(::getpid());
  SnapshotBuffer buffer_{name_};
};

TEST_F(Buffer, GivesBackWhatWasWrittenAlsoToAnotherProcess) {
  EXPECT_FALSE(buffer_.read().has_value()) << "nobody made it yet";
  write(1.5f, 7);
  SnapshotBuffer other(name_);
  const auto snapshot = other.read();
  ASSERT_TRUE(snapshot.has_value());
  EXPECT_EQ(snapshot->manifest.step, 7);
  EXPECT_EQ(snapshot->manifest.attempt, "0123456789abcdef");
  EXPECT_EQ(snapshot->manifest.training["note"], 7);
  for (const checkpoint::Piece& piece : pieces(1.5f)) {
    const std::string_view put(static_cast<const char*>(piece.data.const_data_ptr()), piece.data.nbytes());
    EXPECT_TRUE(snapshot->find(piece) == put) << piece.name;
  }
  checkpoint::Piece wrong = pieces(1)[0];
  wrong.elements = {0, 300};
  EXPECT_TRUE(snapshot->find(wrong).empty()) << "other elements of the same tensor";
}

TEST_F(Buffer, IsUsedAgainAndGrows) {
  write(1, 7);
  write(2, 9);
  EXPECT_EQ(buffer_.read()->manifest.step, 9);
  write(3, 11, 30000);
  const auto snapshot = buffer_.read();
  ASSERT_TRUE(snapshot.has_value());
  EXPECT_EQ(snapshot->find(pieces(3, 30000)[0]).size(), 120000u);
}

TEST_F(Buffer, HoldsNothingWhileItIsWritten) {
  write(1, 7);
  checkpoint::Manifest manifest;
  manifest.attempt = "0";
  buffer_.prepare(manifest, pieces(2));
  EXPECT_FALSE(SnapshotBuffer(name_).read().has_value());
  buffer_.remove();
  EXPECT_FALSE(SnapshotBuffer(name_).read().has_value());
  EXPECT_FALSE(os::files().exists("/dev/shm/" + name_));
}

TEST_F(Buffer, EveryChangedBitAndEveryTruncationIsFound) {
  write(1.5f, 7);
  const std::string good(buffer_.bytes());
  const auto snapshot = parse_snapshot(good, "good");
  ASSERT_TRUE(snapshot.has_value());
  const size_t begin = static_cast<size_t>(snapshot->data.data() - good.data());
  const size_t end = begin + snapshot->data.size();
  size_t accepted = 0;
  const auto count = [&](std::string_view bytes, const std::vector<checkpoint::Piece>& wanted) {
    // What is behind text and data, or between them, belongs to nobody: then all must still be as it was.
    const auto changed = parse_snapshot(bytes, "changed");
    if (!changed) return;
    ++accepted;
    ASSERT_TRUE(changed->data == snapshot->data);
    ASSERT_EQ(changed->manifest.step, 7);
    for (const auto& piece : wanted) ASSERT_EQ(changed->find(piece), snapshot->find(piece));
  };
  const auto wanted = pieces(1.5f);
  for (size_t at = 0; at < good.size(); ++at) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ (1 << (at % 8)));
    const size_t before = accepted;
    count(bad, wanted);
    if (at < 24 || (at >= begin && at < end)) EXPECT_EQ(accepted, before) << "byte " << at;
  }
  for (size_t size = 0; size < end; ++size) {
    const size_t before = accepted;
    count(std::string_view(good).substr(0, size), wanted);
    EXPECT_EQ(accepted, before) << size << " bytes";
  }
}

}  // namespace
}  // namespace tesserae::snapshot
