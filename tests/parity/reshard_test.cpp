// The dial on real processes that share memory, and on threads: values stay the same to the bit, no more is sent than
// is lacking, and training goes on as if the degrees had always been those.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstdio>
#include <random>

#include "tesserae/comm/error.h"
#include "tesserae/comm/fabric.h"
#include "tesserae/optim/adamw.h"
#include "tesserae/optim/sgd.h"
#include "tesserae/os/memory.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/sharded.h"
#include "tests/shard/net.h"
#include "tests/support/counting_allocator.h"
#include "tests/support/ranks.h"

namespace tesserae::testing {
namespace {

using mesh::Degrees;
using shard::Engine;
using shard::testing::batch_of;
using shard::testing::Net;
using shard::testing::NetOptions;

struct Kind {
  std::string name;
  NetOptions net;
  bool bf16 = false;
  int micro = 1;  ///< backwards in a step; the dial is turned before the last
  shard::Accumulation accumulation = shard::Accumulation::local;
  bool momentum = false;  ///< SGD with momentum in place of AdamW
  shard::CutBy cut_by = shard::CutBy::elements;
};

std::vector<Kind> kinds() {
  std::vector<Kind> all;
  all.push_back({.name = "plain", .net = {}});
  all.push_back({.name = "frozen, tied, nested", .net = {.tied = true, .nested = true, .frozen_block = 1}});
  all.push_back({.name = "half frozen, unused", .net = {.frozen_matrix = true, .unused = true}, .momentum = true});
  all.push_back({.name = "by rows", .net = {}, .cut_by = shard::CutBy::rows});
  all.push_back({.name = "bf16", .net = {}, .bf16 = true});
  all.push_back({.name = "accumulating", .net = {}, .micro = 2});
  all.push_back(
      {.name = "accumulating in two hops", .net = {}, .micro = 2, .accumulation = shard::Accumulation::two_hop});
  return all;
}

/// Every ordered pair of different layouts is a step of this path.
std::vector<Degrees> every_pair(const std::vector<Degrees>& nodes) {
  std::vector<Degrees> path;
  for (size_t i = 0; i < nodes.size(); ++i) {
    path.push_back(nodes[i]);
    for (size_t j = i + 1; j < nodes.size(); ++j) {
      path.push_back(nodes[j]);
      path.push_back(nodes[i]);
    }
  }
  return path;
}

std::vector<Degrees> random_walk(int ranks, int length, unsigned seed) {
  const auto nodes = mesh::all_degrees(ranks);
  std::mt19937 random(seed);
  std::vector<Degrees> path;
  for (int i = 0; i < length; ++i) path.push_back(nodes[random() % nodes.size()]);
  return path;
}

class Job {
 public:
  Job(comm::Fabric& fabric, const Kind& kind, const Degrees& degrees)
      : kind_(kind), fabric_(fabric), net_(kind.net), sharded_(shard(degrees)) {
    if (kind.momentum) {
      optimizer_ = std::make_unique<optim::Sgd>(sharded_, optim::SgdOptions{.lr = 0.01, .momentum = 0.9});
    } else {
      optimizer_ = std::make_unique<optim::AdamW>(sharded_, optim::AdamWOptions{.lr = 1e-3});
    }
  }

  shard::Sharded& sharded() { return sharded_; }

  /// One step; `between` is called before the last backward. Returns the mean loss.
  double step(const std::function<void()>& between = {}) {
    double total = 0;
    for (int part = 0; part < kind_.micro; ++part) {
      const bool last = part + 1 == kind_.micro;
      if (last && between) between();
      const auto batch =
          batch_of(kind_.net, steps_, part * fabric_.size() + fabric_.rank(), kind_.micro * fabric_.size(), 16);
      const auto backward = [&] {
        at::Tensor loss = net_(batch.tokens, batch.targets) / kind_.micro;
        loss.backward();
        total += loss.item<double>();
      };
      if (last) {
        backward();
      } else {
        const shard::NoSync scope = sharded_.no_sync();
        backward();
      }
    }
    ++steps_;
    optimizer_->step({.clip_norm = 1});
    return sharded_.sum_over_ranks(total) / fabric_.size();
  }
  void zero_grad() { optimizer_->zero_grad(); }

  /// All state, whole, in the order of flat buffers: masters (frozen: what is gathered), optimizer, gradients. The last
  /// not where a change first brings to its owners what was accumulated.
  std::vector<at::Tensor> state() {
    std::vector<at::Tensor> all;
    for (const shard::FlatBuffer* buffer : sharded_.engine().buffers()) {
      const shard::FlatParameter& parameter = buffer->parameter();
      const auto whole = [&](const at::Tensor& part) {
        return buffer->parameter().whole_values(part).narrow(0, 0, buffer->flat().elements()).clone();
      };
      all.push_back(whole(parameter.local()));
      if (buffer->shard() == nullptr) continue;
      if (kind_.micro == 1 && buffer->shard()->grad.defined()) all.push_back(whole(buffer->shard()->grad));
      optimizer_->visit_state([&](const shard::Shard& shard, std::string_view, at::Tensor& tensor) {
        if (&shard == buffer->shard()) all.push_back(tensor.dim() == 0 ? tensor.clone() : whole(tensor));
      });
    }
    return all;
  }

  /// Bytes that a change to `to` must move: what each rank will own and does not, counted rank by rank.
  double lacking(const Degrees& to) {
    double bytes = 0;
    for (const shard::FlatBuffer* buffer : sharded_.engine().buffers()) {
      const shard::Flat& flat = buffer->flat();
      const shard::Shard* const shard_of_buffer = buffer->shard();
      const mesh::Layout layout = flat.with({fabric_.size(), to}).layout();
      int64_t elements = 0;
      for (int rank = 0; rank < fabric_.size(); ++rank) {
        const auto wants = mesh::owned(layout, flat.elements(), flat.alignment(), rank);
        const auto has = mesh::owned(flat.layout(), flat.elements(), flat.alignment(), rank);
        const int64_t common = std::min(wants.end, has.end) - std::max(wants.begin, has.begin);
        elements += wants.size() - std::max(common, int64_t{0});
      }
      int64_t width = buffer->parameter().local().element_size();
      if (shard_of_buffer != nullptr) {
        if (shard_of_buffer->grad.defined()) width += shard_of_buffer->grad.element_size();
        optimizer_->visit_state([&](const shard::Shard& shard, std::string_view, at::Tensor& tensor) {
          if (&shard == shard_of_buffer && tensor.dim() > 0) width += tensor.element_size();
        });
      }
      bytes += static_cast<double>(elements * width);
    }
    return bytes;
  }

 private:
  shard::Sharded shard(const Degrees& degrees) {
    shard::testing::fill_all(*net_);
    shard::Options options;
    options.strategy.degrees = degrees;
    options.accumulation = kind_.accumulation;
    options.cut_by = kind_.cut_by;
    if (kind_.bf16) options.precision = shard::Precision::bf16();
    return shard::shard_model(net_, std::shared_ptr<comm::Fabric>(&fabric_, [](comm::Fabric*) {}), options);
  }

  const Kind& kind_;
  comm::Fabric& fabric_;
  Net net_;
  shard::Sharded sharded_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  int steps_ = 0;
};

void turn(const Kind& kind, Job& job, const Degrees& to, const std::string& where) {
  const bool same = to == job.sharded().options().strategy.degrees;
  const auto before = job.state();
  const double lacking = job.lacking(to);
  const auto result = job.sharded().reshard(to);
  EXPECT_EQ(job.sharded().options().strategy.degrees, to) << where;
  EXPECT_EQ(result.to.degrees, to);
  const auto after = job.state();
  ASSERT_EQ(after.size(), before.size()) << where;
  for (size_t i = 0; i < before.size(); ++i) ASSERT_TRUE(at::equal(before[i], after[i])) << where << ", tensor " << i;
  const double sent = job.sharded().sum_over_ranks(static_cast<double>(result.bytes));
  if (kind.micro == 1) {
    EXPECT_EQ(sent, same ? 0 : lacking) << where;
  }
}

/// Walks the path, with a training step between turns, beside a run that stays where it is.
void walk(comm::Fabric& fabric, const Kind& kind, const std::vector<Degrees>& path) {
  Job moving(fabric, kind, path.front());
  Job staying(fabric, kind, {fabric.size(), fabric.size(), fabric.size()});
  double worst = 0;
  for (size_t i = 1; i < path.size(); ++i) {
    const std::string where =
        cat(kind.name, ": ", to_string(path[i - 1]), " -> ", to_string(path[i]), " after step ", i);
    const auto change = [&] { turn(kind, moving, path[i], where); };
    if (kind.micro == 1) change();
    const double loss = moving.step(kind.micro > 1 ? std::function<void()>(change) : std::function<void()>());
    const double expected = staying.step();
    worst = std::max(worst, std::abs(loss - expected) / std::abs(expected));
    if (::testing::Test::HasFatalFailure()) return;
    // With the gradients of the step there, a turn moves them, too.
    if (i % 3 == 0) continue;
    moving.zero_grad();
    staying.zero_grad();
  }
  if (fabric.rank() == 0) std::printf("%s: worst loss %.1e\n", kind.name.c_str(), worst);
  EXPECT_LT(worst, kind.bf16 ? 2e-2 : 1e-5) << kind.name;
}

RANK_MAIN(every_pair_of_layouts) {
  const auto fabric = comm::Fabric::connect(mesh::World::from_environment());
  for (const Kind& kind : kinds()) walk(*fabric, kind, every_pair(mesh::all_degrees(fabric->size())));
}

TEST(Reshard, EveryPairOfLayoutsOfFourRanks) {
  const auto results = run_ranks("every_pair_of_layouts", 4, {}, std::chrono::seconds(400));
  EXPECT_TRUE(results.all_succeeded()) << results.text();
}

TEST(Reshard, RandomWalksOfEightRanks) {
  unsigned seed = 0;
  for (const Kind& kind : kinds()) {
    ++seed;
    comm::run_local(8, [&](comm::Fabric& fabric) { walk(fabric, kind, random_walk(8, 25, seed)); });
  }
}

// Gloo, and one host for each rank: nobody shares memory.
RANK_MAIN(between_hosts) {
  comm::FabricOptions options;
  options.host = cat("host", std::getenv("RANK"));
  const auto fabric = comm::Fabric::connect(mesh::World::from_environment(), options);
  walk(*fabric, kinds().front(), random_walk(fabric->size(), 12, 5));
}

TEST(Reshard, BetweenHosts) {
  const auto results = run_ranks("between_hosts", 4);
  EXPECT_TRUE(results.all_succeeded()) << results.text();
}

/// What a leak, also of shared memory, would make grow; libraries are not part of it, whose share other programs
/// change.
double memory_in_use() {
  const os::ProcessMemory memory = os::process_memory();
  return static_cast<double>(memory.proportional - memory.of_files);
}

RANK_MAIN(five_hundred_changes) {
  const auto fabric = comm::Fabric::connect(mesh::World::from_environment());
  const Kind kind{.name = "memory", .net = {.dimension = 128, .hidden = 512}};
  Job job(*fabric, kind, {1, 1, 1});
  const std::vector<Degrees> cycle = {{4, 4, 4}, {2, 2, 2}, {1, 2, 4}, {1, 1, 1}, {2, 4, 4}};
  double early = 0;
  for (int i = 0; i < 500; ++i) {
    job.step();
    job.zero_grad();
    job.sharded().reshard(cycle[static_cast<size_t>(i) % cycle.size()]);
    if (i == 99) early = memory_in_use();
  }
  report("early", job.sharded().sum_over_ranks(early));
  report("late", job.sharded().sum_over_ranks(memory_in_use()));
}

TEST(Reshard, FiveHundredChangesLeakNothing) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "malloc is another one here, which keeps what is freed for a while";
#endif
  const auto results = run_ranks({.main = "five_hundred_changes",
                                  .ranks = 4,
                                  .args = {},
                                  .deadline = std::chrono::seconds(300),
                                  .environment = {},
                                  .own_memory = true,
                                  .left_behind = {}});
  ASSERT_TRUE(results.all_succeeded()) << results.text();
  const double early = results[0].value("early"), late = results[0].value("late");
  std::printf("memory of 4 ranks after 100 changes: %.1f MB, after 500: %.1f MB\n", early / 1e6, late / 1e6);
  EXPECT_LT(late, early * 1.01);
}

// Between hosts, so that all memory is the rank's own.
RANK_MAIN(peak_of_changes) {
  const Counting counting;
  comm::FabricOptions options;
  options.host = cat("host", std::getenv("RANK"));
  const auto fabric = comm::Fabric::connect(mesh::World::from_environment(), options);
  const Kind kind{.name = "peak", .net = {.dimension = 128, .hidden = 512, .blocks = 8}};
  Job job(*fabric, kind, {4, 4, 4});
  job.step();
  job.zero_grad();
  double unit = 0;  // bytes of the largest one's state: master and two moments
  for (const auto& sharded : job.sharded().engine().units()) {
    double elements = 0;
    for (const auto& buffer : sharded->buffers()) elements += static_cast<double>(buffer->flat().elements());
    unit = std::max(unit, 3 * 4 * elements);
  }
  double worst = 0;
  for (const Degrees& to : every_pair(mesh::all_degrees(4))) {
    const int64_t before = CountingAllocator::alive;
    CountingAllocator::peak = before;
    job.sharded().reshard(to);
    const int64_t more = CountingAllocator::peak - std::max<int64_t>(before, CountingAllocator::alive);
    worst = std::max(worst, static_cast<double>(more) / unit);
    EXPECT_LE(static_cast<double>(more), 2 * unit) << "to " << to_string(to);
    job.step();
    job.zero_grad();
  }
  report("worst", worst);
}

TEST(Reshard, TakesLittleMoreThanTheLargerOfTheTwoLayouts) {
  const auto results = run_ranks("peak_of_changes", 4, {}, std::chrono::seconds(300));
  ASSERT_TRUE(results.all_succeeded()) << results.text();
  std::printf("beyond the larger layout a change took at most %.2f of the largest unit's state\n",
              results[0].value("worst"));
}

// A rank dies while state is on its way.
class Killer : public shard::Companion {
 public:
  explicit Killer(bool deadly) : deadly_(deadly) {}
  std::vector<c10::ScalarType> dtypes(const shard::Shard&) override { return {}; }
  std::vector<at::Tensor> take(const shard::Shard& shard) override {
    if (deadly_ && shard.index == 2) std::raise(SIGKILL);
    return {};
  }
  void put(const shard::Shard&, std::vector<at::Tensor>) override {}

 private:
  bool deadly_;
};

RANK_MAIN(killed_half_way) {
  const auto fabric = comm::Fabric::connect(mesh::World::from_environment());
  const Kind kind{.name = "killed", .net = {}};
  Job job(*fabric, kind, {4, 4, 4});
  job.step();
  Killer killer(fabric->rank() == 1);
  const auto attached = job.sharded().engine().add_companion(killer);
  try {
    job.sharded().reshard({2, 2, 2});
    ADD_FAILURE() << "nobody noticed";
  } catch (const comm::PeerLost& lost) {
    EXPECT_EQ(lost.ranks.front(), 1);
  }
  try {
    job.step();
    ADD_FAILURE() << "a step between two layouts";
  } catch (const comm::CommError& error) {
    EXPECT_NE(std::string(error.what()).find("half-way"), std::string::npos) << error.what();
  }
  EXPECT_THROW(job.sharded().reshard({4, 4, 4}), comm::CommError);
}

TEST(Reshard, APeerThatDiesHalfWayIsNamedAndNoStepIsTakenAfterwards) {
  const auto results = run_ranks("killed_half_way", 4);
  for (const int rank : {0, 2, 3}) EXPECT_EQ(results[rank].exit.code, 0) << results.text();
  EXPECT_EQ(results[1].exit.signal, SIGKILL);
}

}  // namespace
}  // namespace tesserae::testing
