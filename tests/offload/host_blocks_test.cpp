#include "tesserae/offload/host_blocks.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace tesserae::offload {
namespace {

class HostBlocks : public testing::Test {
 protected:
  HostBlocks() : before_(c10::GetCPUAllocator()) { use_reusable_host_blocks(); }
  ~HostBlocks() override { c10::SetCPUAllocator(before_, 1); }

 private:
  c10::Allocator* before_;
};

TEST_F(HostBlocks, AreAlignedAsTorchsAre) {
  for (const int64_t bytes : {1, 63, 64, 1000, 1 << 20, 100 << 20}) {
    const at::Tensor block = at::empty({bytes}, at::kByte);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(block.data_ptr()) % 64, 0u) << bytes;
  }
  EXPECT_EQ(at::empty({0}).numel(), 0);
  at::Tensor grown = at::arange(10);
  grown.resize_({100'000});
  EXPECT_TRUE(grown.narrow(0, 0, 10).equal(at::arange(10)));
}

// What is freed between blocks that stay has room for another one of its size, step after step.
TEST_F(HostBlocks, FitWhereOneOfTheSameSizeWas) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__GLIBC__)
  GTEST_SKIP() << "malloc is another one here, which reuses nothing at once";
#endif
  constexpr int64_t bytes = 96 << 10;  // below what malloc maps by itself
  std::vector<at::Tensor> blocks;
  for (int i = 0; i < 9; ++i) blocks.push_back(at::empty({bytes}, at::kByte));
  for (const size_t i : {1, 3, 5, 7}) {
    const void* const place = blocks[i].data_ptr();
    blocks[i] = at::Tensor();
    blocks[i] = at::empty({bytes}, at::kByte);
    EXPECT_EQ(blocks[i].data_ptr(), place);
  }
}

TEST_F(HostBlocks, RefuseWhatIsTooLarge) {
  EXPECT_THROW((void)c10::GetCPUAllocator()->allocate(size_t{1} << 62), c10::OutOfMemoryError);
  EXPECT_THROW((void)c10::GetCPUAllocator()->allocate(SIZE_MAX), c10::OutOfMemoryError);
}

}  // namespace
}  // namespace tesserae::offload
