#include "tests/sim/memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "tests/sim/fixture.h"

namespace tesserae::sim {
namespace {

class SimMemory : public Sim {};
using SimMemoryDeathTest = SimMemory;

bool reads_what_was_freed(bool records) {
  const auto side = side_stream();
  at::Tensor made = at::ones({1000}, on_device());
  order(current(), side);
  at::Tensor seen;
  {
    const c10::StreamGuard on(side);
    const at::Tensor busy = at::zeros({10}, on_device());
    for (int i = 0; i < 8; ++i) busy.add_(1);
    seen = made.mul(3);
  }
  if (records) made.record_stream(side);
  made.reset();
  const at::Tensor next = at::full({1000}, 7.0f, on_device());  // on the stream that the block was made on
  backend().synchronizeDevice(0);
  return at::equal(seen.cpu(), at::full({1000}, 3.0f));
}

void touch(const at::Tensor& tensor) {
  *static_cast<volatile float*>(tensor.mutable_data_ptr()) = 1;
}

}  // namespace

TEST_F(SimMemory, AUseAfterFreeAcrossStreamsIsFoundBySomeSeed) {
  EXPECT_LT(right([] { return reads_what_was_freed(/*records=*/false); }), seeds);
}

TEST_F(SimMemory, ARecordedStreamKeepsTheBlock) {
  EXPECT_EQ(right([] { return reads_what_was_freed(/*records=*/true); }), seeds);
}

TEST_F(SimMemory, AFreedBlockGoesToTheNextOnItsStreamAtOnce) {
  at::Tensor first = at::empty({5000}, on_device());
  void* const address = first.mutable_data_ptr();
  first.reset();
  {
    const c10::StreamGuard on(side_stream());
    EXPECT_NE(at::empty({5000}, on_device()).mutable_data_ptr(), address) << "another stream";
  }
  EXPECT_EQ(at::empty({5000}, on_device()).mutable_data_ptr(), address);
}

TEST_F(SimMemory, WhatWasNotWrittenIsNaN) {
  EXPECT_TRUE(at::isnan(at::empty({3000}, on_device()).cpu()).all().item<bool>());
  at::Tensor used = at::ones({3000}, on_device());
  used.reset();
  EXPECT_TRUE(at::isnan(at::empty({3000}, on_device()).cpu()).all().item<bool>());
}

TEST_F(SimMemory, DevicesHaveMemoryOfTheirOwn) {
  const at::Tensor there = at::full({4}, 2.0f, on_device(3));
  const at::Tensor here = there.to(device(1));
  EXPECT_EQ(here.device(), device(1));
  EXPECT_TRUE(at::equal(here.cpu(), at::full({4}, 2.0f)));
  EXPECT_THROW(here.add(there), c10::Error);
}

TEST_F(SimMemory, CountsWhatIsUsed) {
  auto* const allocator = c10::getDeviceAllocator(c10::kPrivateUse1);
  const auto used = [&] { return allocator->getDeviceStats(5).allocated_bytes[0].current; };
  const int64_t before = used();
  at::Tensor tensor = at::empty({256}, on_device(5));
  EXPECT_EQ(used() - before, 1024);
  tensor.reset();
  EXPECT_EQ(used(), before);
}

// From pinned memory a copy is read when it runs; from other memory, when it is asked for.
TEST_F(SimMemory, PinnedMemoryIsReadLate) {
  std::atomic<bool> go = false;
  auto& stream = Device::at(0).stream(0);
  const at::Tensor pinned = at::ones({4}, at::TensorOptions().pinned_memory(true)), pageable = at::ones({4});
  ASSERT_TRUE(pinned.is_pinned());
  const at::Tensor late = at::empty({4}, on_device()), early = at::empty({4}, on_device());
  stream.enqueue("a gate", [&] { go.wait(false); });
  late.copy_(pinned, /*non_blocking=*/true);
  early.copy_(pageable, /*non_blocking=*/true);
  pinned.fill_(2);
  pageable.fill_(2);
  go = true;
  go.notify_all();
  EXPECT_TRUE(at::equal(late.cpu(), at::full({4}, 2.0f)));
  EXPECT_TRUE(at::equal(early.cpu(), at::full({4}, 1.0f)));
}

TEST_F(SimMemory, ACopyToPinnedMemoryIsNotThereYet) {
  std::atomic<bool> go = false;
  const at::Tensor source = at::ones({4}, on_device());
  Device::at(0).stream(0).enqueue("a gate", [&] { go.wait(false); });
  const Counters before = counters(0);
  const at::Tensor host = source.to(c10::kCPU, /*non_blocking=*/true);
  EXPECT_TRUE(host.is_pinned());
  EXPECT_TRUE(at::isnan(host).all().item<bool>());
  EXPECT_EQ((counters(0) - before).synchronizations, 0);
  go = true;
  go.notify_all();
  backend().synchronizeStream(current());
  EXPECT_TRUE(at::equal(host, at::ones({4})));
}

TEST_F(SimMemoryDeathTest, TheHostThatTouchesItEndsWithAReport) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const at::Tensor tensor = at::ones({100}, on_device(2));
  EXPECT_DEATH(touch(tensor.narrow(0, 4, 8)),
               "host touched memory of device 2, after aten::.*: byte 16 of a block of 400 bytes of stream 0, made by "
               "aten::empty");
}

}  // namespace tesserae::sim
