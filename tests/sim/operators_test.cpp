#include "tests/sim/operators.h"

#include <ATen/Context.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

#include "tests/sim/fixture.h"

namespace tesserae::sim {
namespace {

class SimOperators : public Sim {};

at::Tensor there(const at::Tensor& tensor) {
  return tensor.to(device(0));
}

}  // namespace

TEST_F(SimOperators, AreTheCpusToTheBit) {
  const at::Tensor a = at::randn({7, 5}), b = at::randn({5, 3}), c = at::randn({5});
  const at::Tensor x = there(a), y = there(b), z = there(c);
  const Counters before = counters(0);
  const auto same = [](const at::Tensor& ours, const at::Tensor& cpus) { return at::equal(ours.cpu(), cpus); };
  EXPECT_TRUE(same(x.mm(y), a.mm(b)));
  EXPECT_TRUE(same(x.add(z, 2), a.add(c, 2)));
  EXPECT_TRUE(same(x.sum(0), a.sum(0)));
  EXPECT_TRUE(same(x.t().contiguous(), a.t().contiguous()));
  EXPECT_TRUE(same(at::cat({x, x.mul(2)}, 1), at::cat({a, a.mul(2)}, 1)));
  EXPECT_TRUE(same(at::stack({z, z}), at::stack({c, c})));
  EXPECT_TRUE(same(x.to(at::kBFloat16).to(at::kFloat), a.to(at::kBFloat16).to(at::kFloat)));
  EXPECT_TRUE(same(at::linalg_vector_norm(x), at::linalg_vector_norm(a)));
  EXPECT_TRUE(same(x.gt(0), a.gt(0)));
  EXPECT_TRUE(same(x.abs(), a.abs())) << "a kernel that makes an empty output larger";
  EXPECT_TRUE(same(at::arange(10, on_device()), at::arange(10, at::kFloat)));
  EXPECT_TRUE(same(x.max(), a.max()));
  EXPECT_TRUE(same(x.index_select(1, there(at::arange(2))), a.index_select(1, at::arange(2))));
  EXPECT_EQ((counters(0) - before).unknown_shapes, 0);
}

TEST_F(SimOperators, ViewsShareMemory) {
  const at::Tensor whole = at::zeros({4, 6}, on_device());
  whole.narrow(1, 2, 3).t().select(0, 1).fill_(5);
  whole.view(-1).narrow(0, 0, 2).add_(1);
  at::Tensor expected = at::zeros({4, 6});
  expected.narrow(1, 2, 3).t().select(0, 1).fill_(5);
  expected.view(-1).narrow(0, 0, 2).add_(1);
  EXPECT_TRUE(at::equal(whole.cpu(), expected));
}

TEST_F(SimOperators, LazyConjugatesAreCopied) {
  const at::Tensor turns = at::view_as_complex(at::randn({4, 2})), device_turns = there(turns);
  EXPECT_TRUE(at::equal(device_turns.conj().cpu(), turns.conj().resolve_conj()));
  EXPECT_TRUE(at::equal(there(turns.conj()).cpu(), turns.conj().resolve_conj()));
  EXPECT_TRUE(at::equal(device_turns.conj().mul(device_turns).cpu(), turns.conj().mul(turns)));
  EXPECT_TRUE(at::equal(at::view_as_real(device_turns).cpu(), at::view_as_real(turns)));
}

TEST_F(SimOperators, WhatDependsOnValuesWaitsAndIsCounted) {
  const at::Tensor values = there(at::arange(6).remainder(2));
  const Counters before = counters(0);
  const at::Tensor found = at::nonzero(values);
  EXPECT_EQ((counters(0) - before).unknown_shapes, 1);
  EXPECT_EQ((counters(0) - before).synchronizations, 1);
  EXPECT_TRUE(at::equal(found.cpu(), at::nonzero(values.cpu())));
  EXPECT_TRUE(at::equal(values, values));
}

TEST_F(SimOperators, AStepCountsWhatItDoes) {
  const at::Tensor a = at::zeros({16}, on_device(4));
  const Counters before = counters(4);
  const at::Tensor b = a.add(1);
  Counters step = counters(4) - before;
  EXPECT_EQ(step.launches, 1);
  EXPECT_EQ(step.allocations, 1);
  EXPECT_EQ(step.allocated_bytes, 64);
  EXPECT_EQ(step.synchronizations, 0);
  EXPECT_EQ(b.select(0, 3).item<float>(), 1.0f);
  step = counters(4) - before;
  EXPECT_EQ(step.synchronizations, 1);
  EXPECT_EQ(step.copied_bytes, 4);
}

TEST_F(SimOperators, RandomNumbersFollowTheHost) {
  const auto draw = [] {
    at::Generator generator = at::globalContext().defaultGenerator(device(0));
    generator.set_current_seed(5);
    const at::Tensor first = at::randn({50}, on_device()), second = at::rand({50}, on_device());
    const at::Tensor order = at::randperm(9, on_device(0, at::kLong));
    return at::cat({first.cpu(), second.cpu(), order.cpu().to(at::kFloat)});
  };
  const at::Tensor numbers = draw();
  EXPECT_EQ(right([&] { return at::equal(draw(), numbers); }), seeds);
  EXPECT_FALSE(at::equal(numbers.narrow(0, 0, 50), at::randn({50})));
}

TEST_F(SimOperators, WrongShapesAreSaidByTheHost) {
  const at::Tensor a = at::zeros({3}, on_device()), b = at::zeros({4}, on_device());
  EXPECT_THROW(a.add(b), c10::Error);
  EXPECT_THROW(a.add(at::zeros({3})), c10::Error) << "a tensor of the host";
  EXPECT_NO_THROW(a.add(at::zeros({})));
}

TEST_F(SimOperators, WrongValuesAreFoundByTheDevice) {
  const at::Tensor table = at::zeros({3, 2}, on_device()), rows = there(at::arange(4, 6));
  at::Tensor taken = table.index_select(0, rows);  // the host goes on
  EXPECT_THROW(backend().synchronizeDevice(0), DeviceFailure);
  EXPECT_THROW(taken.cpu(), DeviceFailure) << "until restart()";
  restart();
  EXPECT_NO_THROW(table.cpu());
}

TEST_F(SimOperators, StoragesGrowAndAreExchanged) {
  const at::Tensor tensor = there(at::arange(4));
  tensor.resize_({8});
  EXPECT_TRUE(at::equal(tensor.narrow(0, 0, 4).cpu(), at::arange(4)));
  at::Tensor other = at::zeros({0}, on_device(0, at::kLong));
  other.set_(tensor.storage(), 1, {3}, {1});
  EXPECT_TRUE(other.is_alias_of(tensor));
  EXPECT_TRUE(at::equal(other.cpu(), at::arange(1, 4)));
}

}  // namespace tesserae::sim
