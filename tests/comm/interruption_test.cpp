// Ranks whose stacks are asked for again and again, which interrupts all of their threads.
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "tesserae/comm/fabric.h"
#include "tesserae/os/clock.h"
#include "tesserae/os/stacks.h"
#include "tests/support/ranks.h"

namespace tesserae::comm {
namespace {

using tesserae::testing::report;
using tesserae::testing::run_ranks;

/// Asks while it lives.
class Asker {
 public:
  Asker()
      : thread_([this] {
          while (!stop_) {
            for (const os::ThreadStack& stack : os::thread_stacks(std::chrono::seconds(60))) {
              if (!stack.frames.empty()) ++frames_;
            }
            ++times_;
          }
        }) {}
  ~Asker() { stop_ = true; }
  int times() const { return times_; }
  int frames() const { return frames_; }

 private:
  std::atomic<bool> stop_{false};
  std::atomic<int> times_{0}, frames_{0};
  std::jthread thread_;
};

}  // namespace

// args: the backend.
RANK_MAIN(is_asked_for_its_stacks) {
  const auto world = mesh::World::from_environment();
  const Asker asker;
  FabricOptions options;
  options.backend = args[0];
  // It serves the store: all others try to reach what is not there yet.
  if (world.rank() == 0) os::sleep_for(std::chrono::milliseconds(1500));
  const auto fabric = Fabric::connect(world, options);
  const int size = fabric->size(), rank = fabric->rank();
  Group& gather = fabric->group(fabric->everyone().members(), Traffic::gather);
  Group& reduce = fabric->group(fabric->everyone().members(), Traffic::reduce);
  constexpr int64_t elements = 50'003;
  const int begin = asker.times();
  for (int round = 0;; ++round) {
    const at::Tensor gathered = at::full({elements * size}, -1.0);
    gathered.narrow(0, rank * elements, elements).fill_(rank + round);
    const at::Tensor summed = at::full({elements}, rank + round);
    Ticket first = fabric->lane(Traffic::gather).submit([&] { gather.all_gather(gathered); });
    Ticket second = fabric->lane(Traffic::reduce).submit([&] { reduce.all_reduce(summed); });
    if (round % 20 == rank) os::sleep_for(std::chrono::milliseconds(5));
    first.wait();
    second.wait();
    for (int member = 0; member < size; ++member) {
      const at::Tensor piece = gathered.narrow(0, member * elements, elements);
      ASSERT_TRUE(piece.eq(member + round).all().item<bool>()) << "round " << round << ", member " << member;
    }
    ASSERT_TRUE(summed.eq(size * (size - 1) / 2 + size * round).all().item<bool>()) << "round " << round;
    // They leave together.
    const at::Tensor more = at::full({1}, asker.times() < begin + 200 ? 1.0 : 0.0);
    fabric->everyone().all_reduce(more);
    if (more.item<double>() == 0 && round >= 100) break;
  }
  report("frames", asker.frames());
}

class Interruption : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Backend, Interruption, ::testing::Values("gloo", "shm"),
                         [](const auto& info) { return info.param; });

TEST_P(Interruption, NothingFailsAndTheNumbersAreRight) {
  const auto results = run_ranks("is_asked_for_its_stacks", 3, {GetParam()}, std::chrono::seconds(200));
  ASSERT_TRUE(results.all_succeeded()) << results.text();
  for (int rank = 0; rank < 3; ++rank) EXPECT_GT(results[rank].value("frames"), 400);
}

}  // namespace tesserae::comm
