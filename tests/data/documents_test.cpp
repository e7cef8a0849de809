#include "tesserae/data/documents.h"

#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include "tesserae/base/error.h"

namespace tesserae::data {
namespace {

std::vector<int64_t> values(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.contiguous();
  return {flat.const_data_ptr<int64_t>(), flat.const_data_ptr<int64_t>() + flat.numel()};
}

at::Tensor rows(std::vector<int64_t> tokens, int64_t count) {
  return at::tensor(tokens, at::kLong).view({count, -1});
}

TEST(Documents, PositionsBeginAgainAfterEachEnd) {
  const auto found = find_documents(rows({5, 9, 7, 7, 9, 9, 4, 4}, 1), 9);
  EXPECT_EQ(values(found.positions), (std::vector<int64_t>{0, 1, 0, 1, 2, 0, 0, 1}));
  EXPECT_EQ(values(found.starts), (std::vector<int64_t>{0, 2, 5, 6}));
  EXPECT_EQ(found.positions.sizes(), at::IntArrayRef({1, 8}));
}

TEST(Documents, ARowBeginsOneWhateverEndsBeforeIt) {
  const auto found = find_documents(rows({5, 5, 9, 5, 9, 9, 5, 5, 5}, 3), 9);
  EXPECT_EQ(values(found.positions), (std::vector<int64_t>{0, 1, 2, 0, 1, 0, 0, 1, 2}));
  EXPECT_EQ(values(found.starts), (std::vector<int64_t>{0, 3, 5, 6}));
}

TEST(Documents, TensorsThatAreNotContiguous) {
  const auto found = find_documents(rows({9, 1, 2, 9}, 2).t(), 9);
  EXPECT_EQ(values(found.starts), (std::vector<int64_t>{0, 1, 2})) << "of the rows 9 2 and 1 9";
}

TEST(Documents, OtherTensorsAreRefused) {
  EXPECT_THROW(find_documents(at::tensor({1, 2}, at::kLong), 0), InvalidArgument);
  EXPECT_THROW(find_documents(at::tensor({1.0F}, at::kFloat).view({1, 1}), 0), InvalidArgument);
}

}  // namespace
}  // namespace tesserae::data
