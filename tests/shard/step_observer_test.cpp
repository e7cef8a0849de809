#include "tesserae/shard/step_observer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tesserae/base/error.h"
#include "tests/shard/net.h"

namespace tesserae::shard::testing {
namespace {

using ::testing::HasSubstr;

class Reducer : public StepObserver {
 public:
  bool reduces() const override { return true; }
};

std::string refusal(comm::Fabric& fabric, const Options& options, int reducers) {
  const NetOptions shape{.blocks = 1};
  Net net(shape);
  fill_all(*net);
  const Sharded sharded = shard_model(net, share(fabric), options);
  try {
    for (int i = 0; i < reducers; ++i) sharded.engine().root().attach(std::make_shared<Reducer>());
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

TEST(StepObserver, AReducerIsRefusedWhereItCannotStandForAllHops) {
  comm::run_local(2, [](comm::Fabric& fabric) {
    Options options{.strategy = mesh::preset("FULL_SHARD", 2)};
    EXPECT_EQ(refusal(fabric, options, 1), "");
    EXPECT_THAT(refusal(fabric, options, 2), HasSubstr("has a hook in place of its reduction already"));
    // What no_sync() kept over G would be lost: the reducer starts from whole gradients.
    options.accumulation = Accumulation::two_hop;
    EXPECT_THAT(refusal(fabric, options, 1), HasSubstr("two_hop"));
    options.accumulation = Accumulation::local;
    options.strategy = mesh::preset("ZERO_1", 2);
    EXPECT_THAT(refusal(fabric, options, 1), HasSubstr("all three degrees must be 1 or 2"));
  });
}

}  // namespace
}  // namespace tesserae::shard::testing
