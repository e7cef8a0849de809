#include "tesserae/tensor/whole.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include "tesserae/base/error.h"
#include "tesserae/comm/fabric.h"
#include "tesserae/tensor/split_parameters.h"

namespace tesserae::tensor {
namespace {

at::Tensor counted(at::IntArrayRef shape, uint64_t seed) {
  return at::randn(shape, at::detail::createCPUGenerator(seed), at::TensorOptions().dtype(at::kDouble));
}

mesh::Split split_of(const comm::Group& group, int dim, int blocks = 1) {
  return {dim, group.size(), group.rank(), blocks};
}

TEST(WholeOf, IsTheReverseOfPartOf) {
  comm::run_local(3, [](comm::Fabric& fabric) {
    comm::Group& group = fabric.everyone();
    for (const auto& [dim, blocks] : {std::pair{0, 1}, {1, 1}, {1, 2}, {2, 3}}) {
      const at::Tensor whole = counted({6, 12, 18}, 1);
      const mesh::Split split = split_of(group, dim, blocks);
      EXPECT_TRUE(tensor::whole_of(part_of(whole, split), split, whole.sizes().vec(), group).equal(whole))
          << dim << ", " << blocks << " blocks";
    }
    // Seven rows on three ranks: the last part ends with padding.
    const at::Tensor whole = counted({7, 2}, 2);
    const mesh::Split split = split_of(group, 0);
    EXPECT_TRUE(tensor::whole_of(part_of(whole, split), split, {7, 2}, group).equal(whole));
  });
}

TEST(WholeOf, APartOfSomethingElseIsRefused) {
  comm::run_local(2, [](comm::Fabric& fabric) {
    comm::Group& group = fabric.everyone();
    const at::Tensor part = counted({3, 4}, 1);
    EXPECT_THROW(tensor::whole_of(part, split_of(group, 0), {8, 4}, group), InvalidArgument);
    EXPECT_THROW(tensor::whole_of(part, {0, 4, group.rank()}, {12, 4}, group), InvalidArgument);
    EXPECT_TRUE(tensor::whole_of(part, {}, {3, 4}, group).equal(part)) << "no split: nothing to put together";
  });
}

}  // namespace
}  // namespace tesserae::tensor
