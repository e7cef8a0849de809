#include "tesserae/comm/sub_fabric.h"

#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tesserae/mesh/mesh.h"
#include "tests/comm/borrowed.h"

namespace tesserae::comm {
namespace {

TEST(SubFabric, RanksAreThoseOfTheSubWorld) {
  run_local(4, [](Fabric& job) {
    const mesh::Mesh mesh(4, {.tensor = 2});
    const std::vector<int> members = mesh.members(mesh::axes::state, job.rank());
    const auto data = sub_fabric(borrowed(job), members);
    EXPECT_EQ(data->size(), 2);
    EXPECT_EQ(data->rank(), job.rank() / 2);
    Group& all = data->everyone();
    EXPECT_EQ(all.members(), members) << "errors name ranks of the job";
    const at::Tensor sum = at::full({3}, static_cast<double>(job.rank()));
    data->lane(Traffic::control).submit([&] { all.all_reduce(sum); }).wait();
    EXPECT_EQ(sum[0].item<double>(), job.rank() % 2 == 0 ? 0 + 2 : 1 + 3);
    EXPECT_EQ(data->counters().all_reduce.calls, 1U);
    job.everyone().barrier();
    EXPECT_EQ(data->counters().barrier.calls, 0U) << "another group's";
    EXPECT_THROW(data->group({0, 2}, Traffic::gather), InvalidArgument);
    EXPECT_EQ(&data->lane(Traffic::gather), &job.lane(Traffic::gather));
  });
}

TEST(SubFabric, OfAllRanksIsTheFabricItself) {
  const std::shared_ptr<Fabric> whole = Fabric::null(mesh::World::single_host(1, 3));
  EXPECT_EQ(sub_fabric(whole, {0, 1, 2}), whole);
  EXPECT_THROW(sub_fabric(whole, {0, 2}), InvalidArgument);
  EXPECT_THROW(sub_fabric(nullptr, {0}), InvalidArgument);
}

TEST(SubFabric, ALostPeerIsNamedByItsRankInTheJob) {
  std::vector<int> lost;
  const auto body = [&lost](Fabric& job) {
    if (job.rank() == 2) throw std::runtime_error("out of memory");
    if (job.rank() != 0) return;
    const auto data = sub_fabric(borrowed(job), {0, 2});
    try {
      data->everyone().barrier();
    } catch (const PeerLost& error) {
      lost = error.ranks;
    }
  };
  EXPECT_THROW(run_local(4, body), std::runtime_error);
  EXPECT_THAT(lost, ::testing::ElementsAre(2));
}

}  // namespace
}  // namespace tesserae::comm
