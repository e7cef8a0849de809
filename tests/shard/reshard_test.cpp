// When a change of degrees is refused, and that nothing has changed then. What it does: tests/parity/reshard_test.cpp.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "tesserae/base/error.h"
#include "tesserae/comm/error.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/user_parameters.h"
#include "tests/os/memory_of_host.h"
#include "tests/shard/net.h"

namespace tesserae::shard::testing {
namespace {

using ::testing::HasSubstr;

struct Trained {
  explicit Trained(comm::Fabric& fabric, const std::string& preset = "FULL_SHARD", Options options = {})
      : rank(fabric.rank()), ranks(fabric.size()) {
    fill_all(*net);
    options.strategy = mesh::preset(preset, ranks);
    sharded.emplace(shard_model(net, share(fabric), options));
  }
  at::Tensor loss(int64_t step) {
    const Batch batch = batch_of(net->options, step, rank, ranks);
    return net(batch.tokens, batch.targets);
  }
  void step(int64_t number) {
    loss(number).backward();
    sgd(*sharded, 0.1);
  }
  Values values() {
    Values found;
    sharded->visit_parameters([&](const std::string& name, const at::Tensor& value) { found[name] = value.clone(); });
    return found;
  }

  int rank, ranks;
  Net net{NetOptions{}};
  std::optional<Sharded> sharded;
};

constexpr const char* next_to_none = "MemTotal: 4096 kB\nMemAvailable: 1 kB\n";

TEST(Reshard, MemoryThatIsNotThereIsAnErrorOfAllRanksBeforeAnythingMoves) {
  comm::run_local(4, [](comm::Fabric& fabric) {
    Trained run(fabric);
    run.step(0);
    const Values before = run.values();
    fabric.everyone().barrier();
    {
      static os::MemoryOfHost small(os::files(), next_to_none);
      std::optional<os::ScopedFiles> scope;
      if (fabric.rank() == 0) scope.emplace(small);
      fabric.everyone().barrier();
      const std::string text = error_of<OutOfMemory>([&] { run.sharded->reshard({1, 1, 1}); });
      EXPECT_THAT(text, HasSubstr("Nothing was changed"));
      EXPECT_THAT(text, HasSubstr("P=4 G=4 O=4 to P=1 G=1 O=1"));
      fabric.everyone().barrier();
    }
    fabric.everyone().barrier();
    EXPECT_EQ(run.sharded->options().strategy.degrees, (mesh::Degrees{4, 4, 4}));
    EXPECT_EQ(worst_difference(run.values(), before), 0);
    run.step(1);
    run.sharded->reshard({1, 1, 1});  // there is memory again
    run.step(2);
  });
}

// Of what is gathered, too: four buffers of the size of the large unit, where its parameters lay before.
TEST(Reshard, RoomForTheBuffersOfGathersIsAskedFor) {
  comm::run_local(2, [](comm::Fabric& fabric) {
    Uneven model;
    fill_all(*model);
    Options options;
    options.strategy = {{1, 1, 2}, false, false};
    options.limit_all_gathers = 4;
    auto sharded = shard_model(model, share(fabric), options);
    model(at::ones({2, 64})).sum().backward();
    sharded.zero_grad();
    const int64_t large = 4 * 2 * 64 * 1024;  // bytes of its matrices
    const auto has = [&](int64_t kilobytes) {
      return os::MemoryOfHost(os::files(), cat("MemTotal: 99999999 kB\nMemAvailable: ", kilobytes, " kB\n"));
    };
    static os::MemoryOfHost small = has(2 * 2 * large / 1024), enough = has(2 * 5 * large / 1024);
    for (const bool fits : {false, true}) {
      fabric.everyone().barrier();
      std::optional<os::ScopedFiles> scope;
      if (fabric.rank() == 0) scope.emplace(fits ? enough : small);
      fabric.everyone().barrier();
      std::string text = error_of<OutOfMemory>([&] { sharded.reshard({2, 2, 2}); });
      EXPECT_EQ(text == "no error", fits) << text;
      fabric.everyone().barrier();
    }
  });
}

TEST(Reshard, GroupsOfDegreesThatWereLeftEnd) {
  comm::run_local(4, [](comm::Fabric& fabric) {
    Trained run(fabric);
    int most = 0, after_first_round = 0;
    for (int round = 0; round < 3; ++round) {
      for (const auto& degrees : mesh::all_degrees(4)) {
        run.sharded->reshard(degrees);
        run.step(round);
        most = std::max(most, fabric.group_count());
      }
      if (round == 0) after_first_round = most;
    }
    EXPECT_EQ(most, after_first_round);
    EXPECT_LE(most, 2 + 5) << "of the host, of all, and what one layout needs";
  });
}

// What was accumulated is brought to its owners before memory is looked at: the user must see it, or his next backward
// would take it for dropped.
TEST(Reshard, ARefusalInTheMiddleOfAnAccumulationLosesNothing) {
  comm::run_local(2, [](comm::Fabric& fabric) {
    Trained run(fabric);
    Engine& engine = run.sharded->engine();
    std::vector<at::Tensor> shown;
    for (const auto& unit : engine.units()) {
      std::vector<std::vector<at::Tensor>> local;
      for (size_t i = 0; i < unit->buffers().size(); ++i) {
        local.push_back({at::empty({0}).set_requires_grad(true)});
        shown.push_back(local.back().front());
      }
      UserParameters::attach(*unit, local);
    }
    {
      const NoSync scope = run.sharded->no_sync();
      run.loss(0).backward();
    }
    {
      static os::MemoryOfHost small(os::files(), next_to_none);
      fabric.everyone().barrier();
      std::optional<os::ScopedFiles> scope;
      if (fabric.rank() == 0) scope.emplace(small);
      fabric.everyone().barrier();
      EXPECT_THROW(run.sharded->reshard({1, 1, 1}), OutOfMemory);
      fabric.everyone().barrier();
    }
    for (const at::Tensor& tensor : shown) {
      ASSERT_TRUE(tensor.grad().defined());
      EXPECT_GT(tensor.grad().abs().sum().item<double>(), 0);
    }
  });
}

/// An optimizer without state whose rank 1 fails at the second shard that moves.
class Clumsy : public Companion {
 public:
  explicit Clumsy(int rank) : rank_(rank) {}
  std::vector<c10::ScalarType> dtypes(const Shard& /*shard*/) override { return {}; }
  std::vector<at::Tensor> take(const Shard& /*shard*/) override {
    if (++taken_ == 2 && rank_ == 1) throw std::runtime_error("it was dropped");
    return {};
  }
  void put(const Shard& /*shard*/, std::vector<at::Tensor> /*tensors*/) override { ++put_; }
  int put_count() const { return put_; }

 private:
  int rank_, taken_ = 0, put_ = 0;
};

TEST(Reshard, WhatFailsOnOneRankInTheMiddleStopsAllForGood) {
  comm::run_local(4, [](comm::Fabric& fabric) {
    Trained run(fabric);
    run.step(0);
    Clumsy companion(fabric.rank());
    const auto added = run.sharded->engine().add_companion(companion);
    const std::string text = error_of<comm::CommError>([&] { run.sharded->reshard({2, 2, 2}); });
    EXPECT_EQ(companion.put_count(), 1) << "one part has moved";
    EXPECT_THAT(text, HasSubstr("rank 1 could not make its part of unit \""));
    EXPECT_THAT(text, HasSubstr(fabric.rank() == 1 ? ": it was dropped. " : "; its own error says why. "));
    EXPECT_THAT(text, HasSubstr("start the job again from its last checkpoint"));
    const std::string refused = "an earlier change of degrees failed half-way";
    EXPECT_THAT(error_of<comm::CommError>([&] { run.loss(1); }), HasSubstr(refused));
    EXPECT_THAT(error_of<comm::CommError>([&] { run.sharded->reshard({2, 2, 2}); }), HasSubstr(refused));
  });
}

TEST(Reshard, DegreesThatDoNotDivideNameTheNearest) {
  comm::run_local(4, [](comm::Fabric& fabric) {
    Trained run(fabric);
    EXPECT_THAT(error_of<InvalidArgument>([&] { run.sharded->reshard({3, 3, 3}); }), HasSubstr("P=2 G=2 O=2"));
    run.step(0);
  });
}

TEST(Reshard, RanksThatAskForDifferentDegreesAreToldSo) {
  comm::run_local(4, [](comm::Fabric& fabric) {
    Trained run(fabric);
    const int degree = fabric.rank() == 3 ? 1 : 2;
    const std::string text = error_of<comm::Mismatch>([&] { run.sharded->reshard({degree, degree, degree}); });
    EXPECT_THAT(text, HasSubstr("rank 3"));
    run.step(0);
  });
}

TEST(Reshard, NotInsideABackward) {
  comm::run_local(2, [](comm::Fabric& fabric) {
    Trained run(fabric);
    std::string text;
    const at::Tensor loss = run.loss(0);
    loss.register_hook([&](const at::TensorBase&) {
      text = error_of<InvalidArgument>([&] { run.sharded->reshard({1, 1, 1}); });
    });
    loss.backward();
    EXPECT_THAT(text, HasSubstr("between steps"));
  });
}

// Saved tensors show the storage of the parameters, which stays.
TEST(Reshard, AGraphFromBeforeStillGoesBackward) {
  Values gradients[2];
  for (const bool turned : {false, true}) {
    comm::run_local(2, [&](comm::Fabric& fabric) {
      Trained run(fabric);
      const at::Tensor loss = run.loss(0);
      if (turned) run.sharded->reshard({1, 1, 1});
      loss.backward();
      sgd(*run.sharded, 0.1);
      const Values values = run.values();
      if (fabric.rank() == 0) gradients[turned] = values;
    });
  }
  EXPECT_LT(worst_difference(gradients[1], gradients[0]), 1e-6);
}

TEST(Reshard, AStepThatWasCutShortIsForgottenFirst) {
  comm::run_local(2, [](comm::Fabric& fabric) {
    Trained run(fabric), fresh(fabric);
    const at::Tensor loss = run.loss(7);
    run.net->scale.register_hook([](const at::TensorBase&) { throw std::runtime_error("cut"); });
    EXPECT_THROW(loss.backward(), std::exception);
    run.sharded->reshard({1, 1, 1});
    EXPECT_EQ(worst_difference(run.values(), fresh.values()), 0);
    for (const auto& shard : run.sharded->shards()) EXPECT_FALSE(shard.grad.defined());
  });
}

TEST(Reshard, WhatNeverFreedBecausePWasOneFreesAfterwards) {
  comm::run_local(2, [](comm::Fabric& fabric) {
    Trained run(fabric, "NO_SHARD");
    EXPECT_FALSE(run.sharded->options().strategy.free_after_forward);
    run.sharded->reshard({2, 2, 2});
    EXPECT_TRUE(run.sharded->options().strategy.free_after_forward);
    EXPECT_TRUE(run.sharded->options().strategy.free_after_backward);
    run.step(0);
    EXPECT_GT(run.sharded->statistics().gathers, 0);
  });
}

}  // namespace
}  // namespace tesserae::shard::testing
