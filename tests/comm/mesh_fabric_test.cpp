#include "tesserae/comm/mesh_fabric.h"

#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tesserae/base/error.h"
#include "tests/comm/borrowed.h"

namespace tesserae::comm {
namespace {

namespace axes = mesh::axes;

// 8 ranks, rank = t + 2 c + 4 d: every group moves data among its own ranks only, at the same time as the others.
TEST(MeshFabric, GroupsAndFabricsAreThoseOfTheAxes) {
  run_local(8, [](Fabric& job) {
    MeshFabric mesh(borrowed(job), mesh::Mesh(8, {.tensor = 2, .context = 2, .expert = 2}));
    const int rank = job.rank();
    auto sum_over = [&](mesh::AxisSet axes) {
      const at::Tensor sum = at::full({1}, static_cast<double>(rank));
      Group& group = mesh.group(axes, Traffic::control);
      EXPECT_EQ(group.rank(), mesh.index(axes));
      EXPECT_EQ(group.size(), mesh.degree(axes));
      group.all_reduce(sum);
      return static_cast<int>(sum.item<double>());
    };
    const int t = rank % 2, c = rank / 2 % 2, d = rank / 4;
    EXPECT_EQ(sum_over(axes::tensor), 2 * rank - t + (1 - t));
    EXPECT_EQ(sum_over(mesh::Axis::context), 2 * t + 8 * d + 2);
    EXPECT_EQ(sum_over(axes::batch), 2 * t + 4 * c + 4);
    EXPECT_EQ(sum_over(axes::state), t == 0 ? 0 + 2 + 4 + 6 : 1 + 3 + 5 + 7);
    EXPECT_EQ(sum_over(axes::expert_state), 2 * t + 4 * c + 4);
    EXPECT_EQ(sum_over(axes::job), 28);
    EXPECT_EQ(mesh.writes_unsplit(), t == 0);

    const std::shared_ptr<Fabric>& state = mesh.over(axes::state);
    EXPECT_EQ(state->rank(), c + 2 * d);
    EXPECT_EQ(state->size(), 4);
    EXPECT_EQ(mesh.over(axes::loss), state) << "made once";
    EXPECT_EQ(mesh.over(axes::job).get(), &job);
    EXPECT_EQ(mesh.part(mesh::Split{.dim = 1, .parts = 2}).first().index, t);
  });
}

TEST(MeshFabric, WithoutAxesIsTheJob) {
  const std::shared_ptr<Fabric> job = Fabric::null(mesh::World::single_host(2, 3));
  MeshFabric mesh(job);
  EXPECT_EQ(mesh.over(axes::state), job);
  EXPECT_EQ(mesh.index(axes::batch), 2);
  EXPECT_EQ(mesh.degree(axes::tensor), 1);
  EXPECT_TRUE(mesh.writes_unsplit());
  EXPECT_THROW(MeshFabric(job, mesh::Mesh(4)), InvalidArgument);
  EXPECT_THROW(MeshFabric(nullptr, mesh::Mesh(1)), InvalidArgument);
  EXPECT_THROW(MeshFabric{nullptr}, InvalidArgument);
}

}  // namespace
}  // namespace tesserae::comm
