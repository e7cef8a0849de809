// fp16 with loss scaling and clipping on simulated accelerators: which steps are skipped, the scales and the norms are
// what threads on the CPU have, on all ranks, and the same to the bit whatever the timing.

#include <ATen/ATen.h>

#include <algorithm>

#include "tesserae/optim/adamw.h"
#include "tesserae/optim/loss_scaler.h"
#include "tests/shard/net.h"
#include "tests/sim/fabric.h"
#include "tests/sim/fixture.h"

namespace tesserae::sim {
namespace {

namespace net = shard::testing;

constexpr int ranks = 4;
constexpr int64_t steps = 10;

struct Scaled {
  bool skipped = false;
  double scale = 0;  // after the step
  double norm = 0;   // before clipping
  double loss = 0;
  bool operator==(const Scaled&) const = default;
};

// Steps with a scale that first is too large for fp16, is halved until it is not, and grows until it is again.
std::vector<Scaled> train(comm::Fabric& fabric, const mesh::Degrees& degrees, bool elastic) {
  const net::NetOptions options;
  net::Net model(options);
  net::fill_all(*model);
  shard::Options sharding;
  sharding.strategy = {degrees, true, true};
  sharding.precision = shard::Precision::fp16();
  sharding.elastic = elastic;
  auto sharded = shard::shard_model(model, net::share(fabric), sharding);
  optim::AdamW optimizer(sharded, optim::AdamWOptions{.lr = 1e-2});
  optim::LossScaler scaler({.initial = 1 << 20, .growth = 16, .growth_interval = 3});
  std::vector<Scaled> all;
  for (int64_t step = 0; step < steps; ++step) {
    const auto batch = net::batch_of(options, step, fabric.rank(), fabric.size());
    const at::Tensor loss = model(batch.tokens.to(fabric.device()), batch.targets.to(fabric.device()));
    scaler.scale(loss.to(at::kFloat)).backward();
    const double mean = sharded.sum_over_ranks(loss.item<double>()) / fabric.size();
    const optim::StepResult result = optimizer.step({.clip_norm = 0.05, .scaler = &scaler});
    optimizer.zero_grad();
    all.push_back({result.skipped, scaler.scale(), result.skipped ? 0 : result.norm, mean});
  }
  return all;
}

class SimScaling : public Sim {
 protected:
  // Of rank 0; all others have the same.
  template <class Job>
  static std::vector<Scaled> of_all_ranks(const Job& job, const mesh::Degrees& degrees, bool elastic) {
    std::vector<std::vector<Scaled>> results(ranks);
    job([&](comm::Fabric& fabric) { results[static_cast<size_t>(fabric.rank())] = train(fabric, degrees, elastic); });
    for (const auto& result : results) EXPECT_EQ(result, results.front());
    return results.front();
  }

  static std::vector<Scaled> on_devices(uint64_t seed, const mesh::Degrees& degrees, bool elastic) {
    restart({.seed = seed});
    return of_all_ranks([](const auto& body) { run_on_devices(ranks, body); }, degrees, elastic);
  }
  static std::vector<Scaled> on_the_cpu(const mesh::Degrees& degrees) {
    return of_all_ranks([](const auto& body) { comm::run_local(ranks, body); }, degrees, /*elastic=*/false);
  }
};

}  // namespace

TEST_F(SimScaling, SkipsAndClipsTheStepsThatThreadsOnTheCpuDo) {
  const std::vector<Scaled> expected = on_the_cpu({4, 4, 4});
  const auto skipped = std::ranges::count(expected, true, &Scaled::skipped);
  ASSERT_GT(skipped, 1) << "the scale was never too large";
  ASSERT_GT(steps - skipped, 3) << "nothing was trained";
  for (const mesh::Degrees& degrees : {mesh::Degrees{4, 4, 4}, {2, 2, 4}, {1, 1, 1}}) {
    std::vector<Scaled> first;
    for (uint64_t seed = 0; seed < 6; ++seed) {
      const std::vector<Scaled> scaled = on_devices(seed, degrees, /*elastic=*/seed % 2 != 0);
      if (first.empty()) first = scaled;
      EXPECT_EQ(scaled, first) << to_string(degrees) << ", other numbers with seed " << seed;
    }
    for (size_t step = 0; step < first.size(); ++step) {
      EXPECT_EQ(first[step].skipped, expected[step].skipped) << to_string(degrees) << ", step " << step;
      EXPECT_EQ(first[step].scale, expected[step].scale) << to_string(degrees) << ", step " << step;
      // fp16 has 11 bits, and sums are rounded at each member.
      EXPECT_NEAR(first[step].norm, expected[step].norm, 2e-2 * expected[step].norm) << "step " << step;
      EXPECT_NEAR(first[step].loss, expected[step].loss, 1e-2 * expected[step].loss) << "step " << step;
    }
  }
}

}  // namespace tesserae::sim
