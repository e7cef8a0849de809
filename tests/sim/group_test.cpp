#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <exception>
#include <thread>

#include "tests/sim/fixture.h"
#include "tests/sim/process_group.h"

namespace tesserae::sim {
namespace {

class SimGroup : public Sim {
 protected:
  using Body = std::function<void(ProcessGroup& group, int rank)>;

  /// What each rank threw, null for none.
  static std::vector<std::exception_ptr> failures(int ranks, const Body& body, int64_t milliseconds = 5000) {
    const auto room = std::make_shared<Room>("test", ranks);
    std::vector<std::exception_ptr> thrown(static_cast<size_t>(ranks));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        const c10::DeviceGuard here(device(static_cast<c10::DeviceIndex>(rank)));
        auto group = c10::make_intrusive<ProcessGroup>(
            room, rank, static_cast<c10::DeviceIndex>(rank),
            ProcessGroup::Options{.deadline = std::chrono::milliseconds(milliseconds)});
        try {
          body(*group, rank);
        } catch (...) {
          thrown[static_cast<size_t>(rank)] = std::current_exception();
        }
      });
    }
    for (auto& thread : threads) thread.join();
    return thrown;
  }

  static void run(int ranks, const Body& body) {
    for (const auto& failure : failures(ranks, body)) {
      if (failure) std::rethrow_exception(failure);
    }
  }

  template <class Expected>
  static bool is(const std::exception_ptr& failure, const std::string& text = "") {
    try {
      if (failure) std::rethrow_exception(failure);
    } catch (const Expected& error) {
      return std::string(error.what()).find(text) != std::string::npos;
    } catch (...) {
    }
    return false;
  }
};

at::TensorOptions of_rank(int rank, at::ScalarType dtype = at::kFloat) {
  return on_device(static_cast<c10::DeviceIndex>(rank), dtype);
}

void all_reduce(ProcessGroup& group, at::Tensor tensor) {
  std::vector<at::Tensor> one{std::move(tensor)};
  group.allreduce(one, {})->wait();
}

void synchronize(int rank) {
  backend().synchronizeDevice(static_cast<c10::DeviceIndex>(rank));
}

}  // namespace

TEST_F(SimGroup, CollectivesMoveData) {
  EXPECT_EQ(right([] {
              run(3, [](ProcessGroup& group, int rank) {
                const auto options = of_rank(rank);
                const at::Tensor sum = at::full({4}, rank + 1, options);
                all_reduce(group, sum);
                EXPECT_TRUE(at::equal(sum.cpu(), at::full({4}, 6.0f)));

                std::vector<at::Tensor> sent{at::full({2}, rank, options)};
                c10d::BroadcastOptions from;
                from.rootRank = 2;
                group.broadcast(sent, from)->wait();
                EXPECT_TRUE(at::equal(sent[0].cpu(), at::full({2}, 2.0f)));

                at::Tensor whole = at::zeros({6}, options), piece = whole.narrow(0, 2 * rank, 2);
                piece.fill_(rank);
                group._allgather_base(whole, piece, {})->wait();
                EXPECT_TRUE(at::equal(whole.cpu(), at::arange(6, at::kFloat).div(2).floor()));

                at::Tensor input = at::arange(6, options).add(rank), output = at::zeros({2}, options);
                group._reduce_scatter_base(output, input, {})->wait();
                EXPECT_TRUE(at::equal(output.cpu(), at::arange(2 * rank, 2 * rank + 2, at::kFloat).mul(3).add(3)));

                at::Tensor out = at::zeros({3}, options), in = at::arange(3, options).add(10 * rank);
                std::vector<int64_t> equal;
                group.alltoall_base(out, in, equal, equal, {})->wait();
                EXPECT_TRUE(at::equal(out.cpu(), at::arange(3, at::kFloat).mul(10).add(rank)));

                group.barrier({})->wait();
              });
              return !HasFailure();
            }),
            seeds);
}

TEST_F(SimGroup, MessagesThatAreSentTogetherCross) {
  run(3, [](ProcessGroup& group, int rank) {
    std::vector<at::Tensor> sent{at::full({5}, rank, of_rank(rank))}, received{at::zeros({5}, of_rank(rank))};
    group.startCoalescing();
    group.send(sent, (rank + 1) % 3, 0);
    group.recv(received, (rank + 2) % 3, 0);
    group.endCoalescing()->wait();
    EXPECT_TRUE(at::equal(received[0].cpu(), at::full({5}, static_cast<float>((rank + 2) % 3))));
  });
}

TEST_F(SimGroup, AMessageAloneIsBetweenTwo) {
  run(3, [](ProcessGroup& group, int rank) {
    std::vector<at::Tensor> data{at::full({5}, rank, of_rank(rank))};
    if (rank == 0) group.send(data, 2, 0)->wait();
    if (rank == 2) group.recv(data, 0, 0)->wait();
    EXPECT_TRUE(at::equal(data[0].cpu(), at::full({5}, static_cast<float>(rank == 2 ? 0 : rank))));
  });
}

// Each rank's own work is behind: without wait() it reads what has not come.
TEST_F(SimGroup, WithoutWaitTheResultIsNotThereForSomeSeed) {
  const auto once = [](bool waits) {
    std::atomic<bool> good = true;
    run(2, [&](ProcessGroup& group, int rank) {
      all_reduce(group, at::zeros({1}, of_rank(rank)));
      std::vector<at::Tensor> one{at::full({100}, 1, of_rank(rank))};
      const auto work = group.allreduce(one, {});
      if (waits) work->wait();
      const at::Tensor doubled = one[0].mul(2);
      synchronize(rank);
      if (!at::equal(doubled.cpu(), at::full({100}, 4.0f))) good = false;
    });
    return good.load();
  };
  EXPECT_LT(right([&] { return once(/*waits=*/false); }), seeds);
  EXPECT_EQ(right([&] { return once(/*waits=*/true); }), seeds);
}

TEST_F(SimGroup, TheHostDoesNotWaitForPeers) {
  run(2, [](ProcessGroup& group, int rank) {
    const at::Tensor data = at::zeros({10}, of_rank(rank));
    all_reduce(group, data);  // makes the communicator
    const auto index = static_cast<c10::DeviceIndex>(rank);
    const Counters before = counters(index);
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 10; ++i) all_reduce(group, data);
    if (rank == 0) {
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(45));
    }
    EXPECT_EQ((counters(index) - before).synchronizations, 0);
    EXPECT_EQ((counters(index) - before).collectives, 10);
  });
}

TEST_F(SimGroup, AnotherOrderIsSaidOnAllRanks) {
  const auto thrown = failures(2, [](ProcessGroup& group, int rank) {
    const at::Tensor data = at::zeros({10}, of_rank(rank));
    all_reduce(group, data);
    std::vector<at::Tensor> one{data};
    if (rank == 0) {
      group.broadcast(one, {})->wait();
    } else {
      group.allreduce(one, {})->wait();
    }
    synchronize(rank);
  });
  EXPECT_TRUE(is<OrderMismatch>(thrown[0], "all_reduce of 10 elements of Float"));
  EXPECT_TRUE(is<OrderMismatch>(thrown[1], "broadcast of 10 elements of Float"));
}

TEST_F(SimGroup, OtherSizesAreSaid) {
  const auto thrown = failures(2, [](ProcessGroup& group, int rank) {
    all_reduce(group, at::zeros({10 + rank}, of_rank(rank)));
    synchronize(rank);
  });
  EXPECT_TRUE(is<OrderMismatch>(thrown[0], "11 elements"));
  EXPECT_TRUE(is<OrderMismatch>(thrown[1], "10 elements"));
}

TEST_F(SimGroup, ACommunicatorThatNotAllEnterIsReported) {
  const auto thrown = failures(
      3,
      [](ProcessGroup& group, int rank) {
        if (rank != 1) all_reduce(group, at::zeros({10}, of_rank(rank)));
      },
      100);
  EXPECT_TRUE(is<NotEntered>(thrown[0], "members 1 never used it"));
  EXPECT_FALSE(thrown[1]);
  EXPECT_TRUE(is<NotEntered>(thrown[2]));
}

TEST_F(SimGroup, ACollectiveThatPeersNeverRunIsReported) {
  const auto thrown = failures(
      2,
      [](ProcessGroup& group, int rank) {
        const at::Tensor data = at::zeros({10}, of_rank(rank));
        all_reduce(group, data);
        if (rank == 1) return;
        all_reduce(group, data);  // the host goes on
        synchronize(rank);
      },
      100);
  EXPECT_TRUE(is<CollectiveTimeout>(thrown[0], "members 1 did not run it"));
  EXPECT_FALSE(thrown[1]);
}

TEST_F(SimGroup, AnAbortEndsWhatThisRankWaitsFor) {
  const auto thrown = failures(2, [](ProcessGroup& group, int rank) {
    const at::Tensor data = at::zeros({10}, of_rank(rank));
    all_reduce(group, data);
    synchronize(rank);
    if (rank == 1) return;
    std::vector<at::Tensor> one{data};
    const auto start = std::chrono::steady_clock::now();
    const auto work = group.allreduce(one, {});
    group.abort();
    synchronize(rank);
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
    work->wait();
  });
  EXPECT_TRUE(is<Aborted>(thrown[0]));
  EXPECT_FALSE(thrown[1]);
}

// torch finds the backend by the device of the tensors.
TEST_F(SimGroup, IsABackendOfTorchsProcessGroup) {
  const auto room = std::make_shared<Room>("torch", 2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto index = static_cast<c10::DeviceIndex>(rank);
      const c10::DeviceGuard here(device(index));
      auto group = c10::make_intrusive<c10d::ProcessGroup>(rank, 2);
      group->setBackend(c10::kPrivateUse1, c10d::ProcessGroup::BackendType::CUSTOM,
                        c10::make_intrusive<ProcessGroup>(room, rank, index));
      std::vector<at::Tensor> one{at::full({3}, rank + 1, of_rank(rank))};
      group->allreduce(one)->wait();
      EXPECT_TRUE(at::equal(one[0].cpu(), at::full({3}, 3.0f)));
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace tesserae::sim
