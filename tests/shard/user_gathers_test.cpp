// Gathers that the user's code takes part in: extensions (ExtendedGather), and collectives in place of the engine's.

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <new>
#include <string>
#include <vector>

#include "tesserae/comm/fabric.h"
#include "tesserae/mesh/world.h"
#include "tesserae/offload/disk.h"
#include "tesserae/shard/discover.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/extended_gather.h"
#include "tesserae/shard/rejoin.h"
#include "tesserae/shard/user_collectives.h"
#include "tests/os/scratch.h"
#include "tests/shard/net.h"
#include "tests/support/ranks.h"

namespace tesserae::shard::testing {
namespace {

using ::testing::HasSubstr;

/// While it lives, no tensor on the CPU gets more than so many bytes.
class Limited final : public c10::Allocator {
 public:
  explicit Limited(size_t most) : most_(most), before_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this, 1); }
  ~Limited() override { c10::SetCPUAllocator(before_, 1); }
  Limited(const Limited&) = delete;
  Limited& operator=(const Limited&) = delete;
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes > most_) throw std::bad_alloc();
    return before_->allocate(bytes);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return before_->raw_deleter(); }

 private:
  size_t most_;
  c10::Allocator* before_;
};

/// Computes with what arrives.
class TwoInputs final : public GatherExtension {
 public:
  std::vector<at::Tensor> inputs() override { return {small, large}; }
  std::vector<at::Tensor> make(const std::vector<at::Tensor>& outputs, bool /*first*/) override {
    made = outputs;
    return {};
  }

  at::Tensor small = at::ones({2}), large = at::arange(1000, at::kFloat);
  std::vector<at::Tensor> made;
};

Flat one_parameter() {
  std::vector<Slot> slots;
  slots.push_back({{"weight"}, {1000}, 0, 0});
  return {"block", slots, {at::kFloat, at::kFloat, at::kFloat}, true, mesh::Layout(1, {1, 1, 1}), 0, CutBy::rows};
}

template <class Impl>
constexpr bool opens_again = requires(Impl& storage) {
  storage.clear_data_ptr_access_error_msg_();
};

void gather_once(ExtendedGather& gather) {
  gather.begin();
  for (const at::Tensor& buffer : gather.write_inputs()) gather.group().all_gather(buffer);
  gather.finish();
}

TEST(ExtendedGather, BeginsAnewAfterMemoryWasNotThereForAllInputs) {
  comm::run_local(1, [](comm::Fabric& fabric) {
    const Flat flat = one_parameter();
    const auto extension = std::make_shared<TwoInputs>();
    ExtendedGather gather(extension, fabric.everyone(), flat);
    {
      const Limited limited(1000);
      EXPECT_THROW(gather.begin(), std::bad_alloc);
    }
    gather_once(gather);
    ASSERT_EQ(extension->made.size(), 2U);
    EXPECT_TRUE(extension->made[1].equal(extension->large));
  });
}

TEST(ExtendedGather, WhatIsReadWhileItIsShardedIsAnErrorThatNamesParameterAndUnit) {
  if (!opens_again<c10::StorageImpl>) GTEST_SKIP() << "this torch cannot open such a storage again";
  comm::run_local(1, [](comm::Fabric& fabric) {
    const Flat flat = one_parameter();
    const auto extension = std::make_shared<TwoInputs>();
    const auto error = [&] {
      try {
        extension->made[1].sum().item<float>();
      } catch (const std::exception& thrown) {
        return std::string(thrown.what());
      }
      return std::string("no error");
    };
    {
      ExtendedGather gather(extension, fabric.everyone(), flat);
      for (int step = 0; step < 2; ++step) {
        gather_once(gather);
        EXPECT_EQ(error(), "no error");
        gather.free();
        EXPECT_THAT(error(), HasSubstr("parameter weight of unit \"block\" was read while it is sharded"));
      }
      gather_once(gather);
    }
    EXPECT_THAT(error(), HasSubstr("parameter weight of unit \"block\" was read while it is sharded"));
  });
}

class Gathers final : public UserCollective {
 public:
  explicit Gathers(comm::Fabric& fabric) : group_(fabric.group(fabric.everyone().members(), comm::Traffic::gather)) {}
  void run(const std::vector<at::Tensor>& buffers, int /*index*/, int /*pieces*/) override {
    ++calls;
    for (const at::Tensor& buffer : buffers) group_.all_gather(buffer);
  }

  int calls = 0;

 private:
  comm::Group& group_;
};

/// Before it is prepared, as the user of Python finds it.
struct GatheredByUser {
  GatheredByUser(const std::shared_ptr<comm::Fabric>& fabric, const Options& options)
      : net(NetOptions{.blocks = 1}), gathers(std::make_shared<Gathers>(*fabric)) {
    fill_all(*net);
    engine = std::make_shared<Engine>(discover_units(*net), fabric, options);
    for (const auto& unit : engine->units()) unit->set_gatherer(gathers);
  }

  Net net;
  std::shared_ptr<Gathers> gathers;
  std::shared_ptr<Engine> engine;
};

class UserGathers : public os::Scratch {};

TEST_F(UserGathers, GradientsOnADiskHaveRoomBeforeTheFirstStep) {
  comm::run_local(2, [this](comm::Fabric& fabric) {
    Options options{.strategy = mesh::preset("FULL_SHARD", 2)};
    options.tiers.gradients = offload::Tier::disk;
    options.disk = std::make_shared<offload::Disk>(offload::DiskOptions{folder_});
    const GatheredByUser model(share(fabric), options);
    model.engine->prepare();
    for (const FlatBuffer* buffer : model.engine->buffers()) EXPECT_TRUE(buffer->gradient()->has_memory());
  });
}

RANK_MAIN(user_gathers_after_a_loss) {
  const auto fabric = comm::Fabric::connect(mesh::World::from_environment());
  GatheredByUser model(fabric, {.strategy = mesh::preset("FULL_SHARD", 2)});
  const auto step = [&](int number) {
    const int before = model.gathers->calls;
    const Batch batch = batch_of(model.net->options, number, fabric->rank(), 2);
    model.net(batch.tokens, batch.targets).backward();
    EXPECT_GT(model.gathers->calls, before);
    for (const FlatBuffer* buffer : model.engine->buffers()) EXPECT_FALSE(buffer->parameter().shared());
  };
  step(0);
  Rejoin(*model.engine).connect();  // what a rank does that is left when another one was lost
  step(1);
}

TEST(UserGathersAfterALoss, AreStillTheUsers) {
  const auto results = tesserae::testing::run_ranks("user_gathers_after_a_loss", 2);
  EXPECT_TRUE(results.all_succeeded()) << results.text();
}

}  // namespace
}  // namespace tesserae::shard::testing
