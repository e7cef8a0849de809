#include "tesserae/optim/whole_matrices.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "tesserae/base/error.h"
#include "tesserae/comm/fabric.h"

namespace tesserae::optim {
namespace {

using Shapes = std::vector<WholeMatrices::Shape>;

at::Tensor numbered(const WholeMatrices::Shape& shape, size_t matrix) {
  return at::arange(shape.rows * shape.columns, at::kFloat).view({shape.rows, shape.columns}).add_(1000.0 * matrix);
}

/// What torch.chunk gives that member.
at::Tensor rows_for(const at::Tensor& matrix, int member, int members) {
  const int64_t rows = matrix.size(0), most = (rows + members - 1) / members;
  const int64_t begin = std::min<int64_t>(rows, member * most);
  return matrix.narrow(0, begin, std::min(rows, begin + most) - begin).contiguous();
}

// Rows that members do not divide, members without rows, matrices without elements.
const Shapes kShapes = {{7, 5}, {1, 9}, {16, 4}, {0, 3}, {2, 2}, {12, 12}, {5, 0}};

TEST(WholeMatrices, OwnersGetThemWholeAndAllGetTheirRowsBack) {
  for (const int ranks : {1, 2, 3, 4}) {
    comm::run_local(ranks, [](comm::Fabric& fabric) {
      comm::Group& group = fabric.everyone();
      const WholeMatrices matrices(group, kShapes);
      std::vector<at::Tensor> rows;
      for (size_t i = 0; i < kShapes.size(); ++i) {
        rows.push_back(rows_for(numbered(kShapes[i], i), group.rank(), group.size()));
      }
      auto whole = matrices.collect(rows);
      size_t next = 0;
      for (size_t i = 0; i < kShapes.size(); ++i) {
        if (matrices.owners()[i] != group.rank()) continue;
        ASSERT_LT(next, whole.size());
        EXPECT_TRUE(at::equal(whole[next], numbered(kShapes[i], i))) << i;
        whole[next++].mul_(2);
      }
      EXPECT_EQ(next, whole.size());
      const auto back = matrices.distribute(whole, rows.front().options());
      for (size_t i = 0; i < kShapes.size(); ++i) EXPECT_TRUE(at::equal(back[i], rows[i] * 2)) << i;
    });
  }
}

TEST(WholeMatrices, WorkIsSharedOutByWhatItIs) {
  comm::run_local(3, [](comm::Fabric& fabric) {
    // By elements the long one would weigh as much as the square ones; it is a hundredth of their work.
    const WholeMatrices matrices(fabric.everyone(), {{10000, 1}, {100, 100}, {100, 100}, {100, 100}});
    EXPECT_EQ(matrices.owners(), (std::vector<int>{0, 0, 1, 2}));
    EXPECT_NEAR(matrices.imbalance(), 1.01e6 / (3.01e6 / 3), 1e-9);
  });
}

TEST(WholeMatrices, MembersThatBringOtherShapesGetMismatch) {
  comm::run_local(2, [](comm::Fabric& fabric) {
    const Shapes shapes = {{4, 4}, {fabric.rank() == 0 ? 4 : 6, 2}};
    EXPECT_THROW(WholeMatrices(fabric.everyone(), shapes), comm::Mismatch);
  });
}

TEST(WholeMatrices, RowsThatAreNotThisMembersAreRefused) {
  comm::run_local(1, [](comm::Fabric& fabric) {
    const WholeMatrices matrices(fabric.everyone(), {{4, 2}});
    EXPECT_THROW(matrices.collect({}), InvalidArgument);
    EXPECT_THROW(matrices.collect({at::zeros({3, 2})}), InvalidArgument);
    EXPECT_THROW(matrices.collect({at::zeros({2, 4}).t()}), InvalidArgument);
    EXPECT_THROW(matrices.distribute({}, at::kFloat), InvalidArgument);
    EXPECT_THROW(matrices.distribute({at::zeros({4, 2}, at::kDouble)}, at::kFloat), InvalidArgument);
  });
}

}  // namespace
}  // namespace tesserae::optim
