// NCCL with one rank: NCCL starts, takes its work on the current stream, and ends. Needs a CUDA GPU.

#include "tesserae/comm/transports/nccl.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tests/device/device.h"

namespace tesserae::comm {

TEST(NcclOfOneRank, MovesWhatIsOnTheStream) {
  const c10::Device device = testing::test_device();
  ASSERT_TRUE(has_nccl()) << "this build has no NCCL: CMake's output says what it did not find";
  const auto backend =
      make_nccl(c10::make_intrusive<c10d::HashStore>(), 0, 1, {"one", {0}, std::chrono::seconds(60), device});
  const at::Tensor numbers = at::arange(1009, at::TensorOptions().dtype(at::kFloat));
  for (int repeat = 0; repeat < 10; ++repeat) {
    at::Tensor input = at::zeros({1009}, at::TensorOptions().device(device));
    testing::keep_busy(device);
    input.copy_(numbers);
    at::Tensor gathered = at::empty_like(input), reduced = at::empty_like(input);
    c10d::AllgatherOptions gather;
    c10d::ReduceScatterOptions reduce;
    c10d::AllreduceOptions all_reduce;
    gather.asyncOp = reduce.asyncOp = all_reduce.asyncOp = false;  // as C10dGroup asks: on the current stream
    if (auto work = backend->_allgather_base(gathered, input, gather)) work->wait();
    if (auto work = backend->_reduce_scatter_base(reduced, gathered, reduce)) work->wait();
    std::vector<at::Tensor> summed{reduced};
    if (auto work = backend->allreduce(summed, all_reduce)) work->wait();
    EXPECT_TRUE(at::equal(gathered.cpu(), numbers)) << "repeat " << repeat;
    EXPECT_TRUE(at::equal(reduced.cpu(), numbers)) << "repeat " << repeat;
  }
  backend->shutdown();
}

}  // namespace tesserae::comm
