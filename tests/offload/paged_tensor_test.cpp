#include "tesserae/offload/paged_tensor.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/os/scratch.h"

namespace tesserae::offload {
namespace {

class PagedTensorTest : public os::Scratch {
 protected:
  std::shared_ptr<Disk> disk_ = std::make_shared<Disk>(DiskOptions{folder_, int64_t{8} << 20});
};

TEST_F(PagedTensorTest, IsATensorWhileItIsUsed) {
  const at::Tensor tensor = paged_tensor(disk_, 3'000'001, at::kFloat);
  const at::Tensor values = at::arange(3'000'001, at::kFloat);
  ASSERT_TRUE(is_paged(tensor));
  ASSERT_FALSE(is_paged(values));
  copy(tensor, values);
  const at::Tensor view = tensor.narrow(0, 1'000'000, 1000);
  ASSERT_TRUE(is_paged(view));
  {
    const Use use(view, Access::read);
    EXPECT_TRUE(at::equal(view, values.narrow(0, 1'000'000, 1000)));
  }
  const at::Tensor back = at::empty_like(values);
  copy(back, tensor);
  EXPECT_TRUE(at::equal(back, values));
  EXPECT_GT(disk_->counters().written, 0U);
}

TEST_F(PagedTensorTest, ViewsMayHaveStrides) {
  const at::Tensor tensor = paged_tensor(disk_, 4'000'000, at::kFloat), values = at::arange(4'000'000, at::kFloat);
  copy(tensor, values);
  const auto column = [](const at::Tensor& of) { return of.view({2000, 2000}).select(1, 1999); };
  const at::Tensor view = column(tensor);
  const Use use(view, Access::read);
  EXPECT_TRUE(at::equal(view, column(values)));
}

TEST_F(PagedTensorTest, OutlivesWhoMadeIt) {
  at::Tensor view;
  {
    const at::Tensor tensor = paged_tensor(std::exchange(disk_, nullptr), 1'000'000, at::kDouble);
    view = tensor.narrow(0, 500'000, 10);
    const Use use(view, Access::fill);
    view.fill_(3);
  }
  const Use use(view, Access::read);
  EXPECT_EQ(view.sum().item<double>(), 30);
}

TEST_F(PagedTensorTest, UsesTakeWhatIsNotPagedToo) {
  Use use(std::vector<at::Tensor>{at::Tensor(), at::empty({3})}, Access::update);
  use.add(paged_tensor(disk_, 0, at::kFloat), Access::fill);
  use.end();
  EXPECT_EQ(disk_->counters().resident, 0);
}

TEST_F(PagedTensorTest, RunsCoverEverythingOnce) {
  const at::Tensor paged = paged_tensor(disk_, 1'300'000, at::kFloat), plain = at::empty({1'300'000});
  for (const auto& tensors : {std::vector<Worked>{{plain}}, std::vector<Worked>{{plain}, {paged, Access::fill}}}) {
    int64_t reached = 0, runs = 0;
    in_runs(tensors, 1'300'000, [&](int64_t begin, int64_t end) {
      EXPECT_EQ(begin, reached);
      reached = end;
      ++runs;
    });
    EXPECT_EQ(reached, 1'300'000);
    EXPECT_EQ(runs, tensors.size() == 1 ? 1 : 3);
  }
}

std::vector<std::string> operators;

/// A step copies once or twice for each unit: what that costs the host is torch's call and nothing beside it.
TEST(PagedTensor, CopiesOfWhatIsNotPagedAreOneOperator) {
  const at::Tensor from = at::arange(10, at::kFloat), to = at::zeros({10});
  operators.clear();
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
        operators.emplace_back(function.name());
        return nullptr;
      }));
  copy(to, from);
  at::removeCallback(handle);
  EXPECT_EQ(operators, std::vector<std::string>{"aten::copy_"});
  EXPECT_TRUE(at::equal(to, from));
}

}  // namespace
}  // namespace tesserae::offload
