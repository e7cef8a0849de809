// Copies of device memory for a save beside training (checkpoint/snapshot.h): what is copied are the values of begin(),
// though the host goes on and the copies run on another stream, from another thread.

#include "tesserae/checkpoint/snapshot.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <thread>

#include "tests/sim/fixture.h"

namespace tesserae::sim {
namespace {

class SimSnapshot : public Sim {};

checkpoint::Piece piece(const std::string& name, const at::Tensor& data, bool changes) {
  checkpoint::Piece piece = checkpoint::replicated(name, data, 0);
  piece.changes_in_forward = changes;
  return piece;
}

at::Tensor values(const checkpoint::Source& source) {
  if (source.data != nullptr) return at::from_blob(const_cast<char*>(source.data), source.shape).clone();
  at::Tensor read = at::empty(source.shape);
  source.fill(0, {static_cast<char*>(read.mutable_data_ptr()), read.nbytes()});
  return read;
}

}  // namespace

TEST_F(SimSnapshot, HoldsTheValuesOfItsBeginning) {
  checkpoint::Snapshot snapshot;
  EXPECT_EQ(right([&] {
              const at::Tensor master = at::zeros({3000}, on_device()), buffer = at::zeros({50}, on_device());
              for (int i = 0; i < 4; ++i) master.add_(1);
              buffer.fill_(2);
              snapshot.begin({piece("master", master, false), piece("buffer", buffer, true)});
              buffer.fill_(9);  // a forward
              std::thread copying([&] { snapshot.copy(); });
              const at::Tensor forward = master.mul(2);  // which reads, and is queued meanwhile
              copying.join();
              master.fill_(7);  // the optimizer step
              const auto& sources = snapshot.sources();
              return at::equal(values(sources[0]), at::full({3000}, 4.0f)) &&
                     at::equal(values(sources[1]), at::full({50}, 2.0f)) &&
                     at::equal(forward.cpu(), at::full({3000}, 8.0f));
            }),
            seeds);
}

// Nothing in begin() waits for the device or pins memory: only an event orders the copy after what computes the values.
TEST_F(SimSnapshot, ComesAfterWhatIsStillQueued) {
  checkpoint::Snapshot snapshot;
  EXPECT_EQ(right([&] {
              const at::Tensor master = at::zeros({3000}, on_device()), buffer = at::zeros({50}, on_device());
              for (int i = 0; i < 8; ++i) master.add_(1);
              buffer.add_(2);
              const Counters before = counters(0);
              const size_t pinned = pinned_bytes();
              snapshot.begin({piece("master", master, false), piece("buffer", buffer, true)});
              buffer.fill_(9);  // a forward
              EXPECT_EQ((counters(0) - before).synchronizations, 0);
              EXPECT_EQ(pinned_bytes(), pinned);
              std::thread([&] { snapshot.copy(); }).join();
              return at::equal(values(snapshot.sources()[0]), at::full({3000}, 8.0f)) &&
                     at::equal(values(snapshot.sources()[1]), at::full({50}, 2.0f));
            }),
            seeds);
}

// Each piece but the last lies in several blocks of pinned memory, or beside another one.
TEST_F(SimSnapshot, TakesHardlyMorePinnedMemoryThanItHolds) {
  const std::vector<int64_t> sizes{90'001, 31'000, 70'123, 17};
  int64_t bytes = 0;
  std::vector<checkpoint::Piece> pieces;
  for (const int64_t size : sizes) {
    pieces.push_back(piece(std::to_string(size), at::arange(size, on_device()), false));
    bytes += size * 4;
  }
  const size_t before = pinned_bytes();
  checkpoint::Snapshot snapshot;
  for (int save = 0; save < 2; ++save) {
    snapshot.begin(pieces);
    snapshot.copy();
    for (size_t i = 0; i < sizes.size(); ++i) {
      EXPECT_TRUE(at::equal(values(snapshot.sources()[i]), at::arange(sizes[i], at::kFloat))) << sizes[i];
    }
    EXPECT_LE(pinned_bytes() - before, static_cast<size_t>(bytes) + (64U << 10)) << "save " << save;
  }
}

// On whatever stream the program computes: who reads does so on another thread, whose stream is the usual one.
TEST_F(SimSnapshot, LiveSourcesReadWhatWasQueued) {
  EXPECT_EQ(
      right([] {
        const c10::StreamGuard on_stream(side_stream());
        const at::Tensor master = at::zeros({3000}, on_device());
        for (int i = 0; i < 4; ++i) master.add_(1);
        const auto sources = checkpoint::live_sources({piece("master", master, false)});
        at::Tensor read = at::zeros({3000});
        std::thread([&] { sources[0].fill(0, {static_cast<char*>(read.mutable_data_ptr()), read.nbytes()}); }).join();
        return at::equal(read, at::full({3000}, 4.0f));
      }),
      seeds);
}

}  // namespace tesserae::sim
