#include "tesserae/shard/pool.h"

#include <gtest/gtest.h>

#include <limits>

#include "tesserae/shard/pool_plan.h"

namespace tesserae::shard {
namespace {

TEST(Pool, AnOwnersBufferIsForNobodyElse) {
  Pool pool(at::kCPU);
  int root = 0;
  pool.reserve(100, 1, &root);
  pool.reserve(200, 2);
  const auto a = pool.acquire(90), b = pool.acquire(90);
  EXPECT_EQ(pool.view(a, 200, at::kByte).numel() + pool.view(b, 200, at::kByte).numel(), 400) << "not the root's";
  pool.acquire(100, &root);
  EXPECT_EQ(pool.misses(), 0);
  pool.release(a);
  EXPECT_EQ(pool.acquire(200, &root), a) << "beyond its own it takes one of nobody's";
  EXPECT_EQ(pool.misses(), 0);
}

TEST(Pool, HandsOutTheSmallestBufferThatFits) {
  Pool pool(at::kCPU);
  pool.reserve(1000, 1);
  pool.reserve(100, 1);
  const auto small = pool.acquire(50);
  EXPECT_EQ(pool.bytes(small).numel(), 100);
  const auto large = pool.acquire(50);
  EXPECT_EQ(pool.bytes(large).numel(), 1000);
  EXPECT_EQ(pool.misses(), 0);
}

TEST(Pool, AddressesStayTheSame) {
  Pool pool(at::kCPU);
  pool.reserve(256, 1);
  const auto first = pool.acquire(256);
  const void* address = pool.bytes(first).data_ptr();
  for (int i = 0; i < 100; ++i) {
    pool.release(first);
    ASSERT_EQ(pool.acquire(200), first);
    ASSERT_EQ(pool.bytes(first).data_ptr(), address);
  }
}

TEST(Pool, AMissAllocatesOnceAndIsCounted) {
  Pool pool(at::kCPU);
  pool.reserve(256, 1);
  for (int i = 0; i < 10; ++i) {
    const auto a = pool.acquire(256);
    const auto b = pool.acquire(256);
    EXPECT_NE(a, b);
    pool.release(a);
    pool.release(b);
  }
  EXPECT_EQ(pool.misses(), 1);
  EXPECT_EQ(pool.reserved_bytes(), 512);
}

TEST(Pool, AnElasticOneHasMemoryOnlyForWhatIsTaken) {
  Pool pool(at::kCPU, /*elastic=*/true);
  pool.reserve(int64_t{8} << 20, 2);
  EXPECT_EQ(pool.held_bytes(), 0);
  const auto a = pool.acquire(100), b = pool.acquire(100);
  EXPECT_EQ(pool.held_bytes(), int64_t{16} << 20);
  const at::Tensor view = pool.view(a, 64, at::kFloat);
  pool.release(a, /*keep=*/false);
  EXPECT_EQ(pool.held_bytes(), int64_t{8} << 20);
  pool.release(b);
  EXPECT_EQ(pool.held_bytes(), int64_t{8} << 20);
  EXPECT_EQ(pool.acquire(100), b) << "one that has memory goes first";
  EXPECT_EQ(pool.acquire(100), a);
  pool.bytes(a).fill_(1);
  EXPECT_EQ(view[63].item<float>(), 0x1.020202p-125f) << "the view shows the memory that the buffer has now";
  pool.release(a);
  pool.release(b);
  pool.give_back();
  EXPECT_EQ(pool.held_bytes(), 0);
  EXPECT_EQ(pool.reserved_bytes(), int64_t{16} << 20);
  EXPECT_EQ(pool.misses(), 0);
}

TEST(Pool, ViewsHaveTheDtypeAndTheMemoryOfTheBuffer) {
  Pool pool(at::kCPU);
  pool.reserve(256, 1);
  const auto buffer = pool.acquire(256);
  const at::Tensor view = pool.view(buffer, 100, at::kBFloat16);
  EXPECT_EQ(view.numel(), 100);
  EXPECT_EQ(view.scalar_type(), at::kBFloat16);
  EXPECT_EQ(view.data_ptr(), pool.bytes(buffer).data_ptr());
}

TEST(PoolPlan, NoLimitIsAsManyAsThereAreUnits) {
  const UnitNeeds unit{.name = "", .buffers = {{.gathered = 8, .reduced = 4}}};
  constexpr int none = std::numeric_limits<int>::max();
  EXPECT_EQ(plan_pool({unit, unit, unit, unit}, none, none), plan_pool({unit, unit, unit, unit}, 3, 3));
}

}  // namespace
}  // namespace tesserae::shard
