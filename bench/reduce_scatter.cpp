// How ranks of one host move bytes over Gloo: the collectives that this library builds from point-to-point messages
// against those that come with Gloo, and against other ways to build them.
//
//   bench_reduce_scatter --ranks 4 [--megabytes 64] [--repeats 7] [--chunk-megabytes 4] [--json FILE]
//
// Every way moves the same buffer, they take turns within a repeat, and each result is compared with the exact sum.
// Times are the slowest rank's, milliseconds, the median over repeats. "GB/s" is what each rank sends divided by the
// time.
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "bench/measure.h"
#include "tesserae/comm/transports/gloo_group.h"
#include "tesserae/os/clock.h"
#include "tesserae/os/port.h"
#include "tesserae/os/process.h"
#include "tesserae/os/program.h"

namespace tesserae::bench {
namespace {

using comm::GlooGroup;
using Bytes = int64_t;

struct Options {
  int ranks = 2, repeats = 7, rank = -1, port = 0;
  double megabytes = 64, chunk_megabytes = 0;
  std::string json;
};

struct Way {
  std::string verb, name;
  std::function<void(const at::Tensor&)> run;
  std::vector<double> milliseconds = {}, cpu_milliseconds = {};
};

class Rank {
 public:
  explicit Rank(const Options& options) : options_(options) {
    c10d::TCPStoreOptions how;
    how.port = static_cast<uint16_t>(options.port);
    how.isServer = options.rank == 0;
    how.waitWorkers = false;
    store_ = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", how);
    const auto chunk = static_cast<int64_t>(options.chunk_megabytes * (1 << 20));
    group_ = make_group("ours", chunk);
    auto gloo = c10d::ProcessGroupGloo::Options::create(std::chrono::minutes(2));
    gloo->devices.push_back(comm::make_gloo_device(true));
    raw_ = c10::make_intrusive<c10d::ProcessGroupGloo>(prefix("raw"), options.rank, options.ranks, gloo);
    elements_ = static_cast<int64_t>(options.megabytes * (1 << 20)) / 4 / options.ranks * options.ranks;
  }

  nlohmann::json run() {
    auto ways = all_ways();
    const auto buffer = at::empty({elements_});
    for (int repeat = -1; repeat < options_.repeats; ++repeat) {  // the first one warms up and checks
      for (auto& way : ways) {
        buffer.copy_(at::arange(elements_).remainder_(1000).add_(options_.rank));
        group_->barrier();
        const Stopwatch watch;
        way.run(buffer);
        const double cpu_ms = watch.cpu_us() / 1000, wall_ms = watch.wall_us() / 1000;
        if (repeat < 0) check(way, buffer);
        const double cpu = agree(cpu_ms, c10d::ReduceOp::SUM) / options_.ranks;
        const double wall = agree(wall_ms, c10d::ReduceOp::MAX);
        if (repeat < 0) continue;
        way.milliseconds.push_back(wall);
        way.cpu_milliseconds.push_back(cpu);
      }
    }
    return report(ways);
  }

 private:
  c10::intrusive_ptr<c10d::Store> prefix(const std::string& name) {
    return c10::make_intrusive<c10d::PrefixStore>(name, store_);
  }

  double agree(double value, c10d::ReduceOp how) {
    std::vector<at::Tensor> one{at::empty({1}, at::kDouble).fill_(value)};
    c10d::AllreduceOptions options;
    options.reduceOp = how;
    raw_->allreduce(one, options)->wait();
    return one[0].item<double>();
  }

  std::unique_ptr<GlooGroup> make_group(const std::string& name, int64_t chunk) {
    std::vector<int> members;
    for (int i = 0; i < options_.ranks; ++i) members.push_back(i);
    GlooGroup::Options options{std::chrono::minutes(1), std::chrono::minutes(2), comm::make_gloo_device(true)};
    options.chunk_bytes = chunk;
    return std::make_unique<GlooGroup>(name, members, options_.rank, prefix(name), options);
  }

  at::Tensor piece(const at::Tensor& buffer) const {
    const int64_t length = elements_ / options_.ranks;
    return buffer.narrow(0, options_.rank * length, length);
  }

  std::vector<Way> all_ways() {
    std::vector<Way> ways;
    ways.push_back({"reduce_scatter", "pairwise exchange (ours)", [&](const auto& b) { group_->reduce_scatter(b); }});
    ways.push_back({"reduce_scatter", "Gloo's reduce_scatter", [&](const auto& b) {
                      auto in = b, out = piece(b).clone();
                      raw_->_reduce_scatter_base(out, in)->wait();
                      piece(b).copy_(out);
                    }});
    ways.push_back({"reduce_scatter", "Gloo's all-reduce, keep a piece", [&](const auto& b) {
                      std::vector<at::Tensor> one{b};
                      raw_->allreduce(one)->wait();
                    }});
    ways.push_back({"reduce_scatter", "Gloo's all-to-all, then add", [&](const auto& b) {
                      auto in = b;
                      if (!scratch_.defined()) scratch_ = at::empty_like(b);
                      std::vector<int64_t> none;
                      raw_->alltoall_base(scratch_, in, none, none)->wait();
                      const auto copies = scratch_.view({options_.ranks, -1});
                      auto own = piece(b);
                      own.copy_(copies[0]);
                      for (int i = 1; i < options_.ranks; ++i) own.add_(copies[i]);
                    }});
    ways.push_back({"all_gather", "direct messages (ours)", [&](const auto& b) { group_->all_gather(b); }});
    ways.push_back({"all_gather", "Gloo's all-gather", [&](const auto& b) {
                      auto out = b, in = piece(b).clone();
                      raw_->_allgather_base(out, in)->wait();
                    }});
    ways.push_back({"all_reduce", "pairwise exchange + direct (ours)", [&](const auto& b) { group_->all_reduce(b); }});
    ways.push_back({"all_reduce", "Gloo's all-reduce", [&](const auto& b) {
                      std::vector<at::Tensor> one{b};
                      raw_->allreduce(one)->wait();
                    }});
    return ways;
  }

  // The values are integers below 2^24, so every order of summation gives the same.
  void check(const Way& way, const at::Tensor& buffer) const {
    const int ranks = options_.ranks;
    const auto base = at::arange(elements_).remainder_(1000);
    const auto sum = (base * ranks).add_(ranks * (ranks - 1) / 2);
    bool right = false;
    if (way.verb == "all_reduce") right = at::equal(buffer, sum);
    if (way.verb == "reduce_scatter") right = at::equal(piece(buffer), piece(sum));
    if (way.verb == "all_gather") {
      const auto owners = at::arange(elements_).div_(elements_ / ranks, "floor");
      right = at::equal(buffer, base + owners);
    }
    if (!right) throw std::runtime_error(way.verb + " by " + way.name + " gave a wrong result");
  }

  nlohmann::json report(const std::vector<Way>& ways) const {
    auto rows = nlohmann::json::array();
    const double piece_bytes = static_cast<double>(elements_) * 4 / options_.ranks;
    for (const auto& way : ways) {
      const double ms = median(way.milliseconds);
      const double sent = piece_bytes * (options_.ranks - 1) * (way.verb == "all_reduce" ? 2 : 1);
      rows.push_back({{"verb", way.verb},
                      {"way", way.name},
                      {"ms", ms},
                      {"cpu_ms", median(way.cpu_milliseconds)},
                      {"gb_per_s", sent / ms / 1e6}});
    }
    return rows;
  }

  Options options_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::unique_ptr<GlooGroup> group_;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> raw_;
  int64_t elements_ = 0;
  at::Tensor scratch_;
};

void show(const Options& options, const nlohmann::json& rows) {
  std::printf("%d ranks, %.1f MiB\n", options.ranks, options.megabytes);
  for (const auto& row : rows) {
    std::printf("  %-15s %-36s %9.2f ms  %9.2f ms CPU  %5.2f GB/s\n", row["verb"].get<std::string>().c_str(),
                row["way"].get<std::string>().c_str(), row["ms"].get<double>(), row["cpu_ms"].get<double>(),
                row["gb_per_s"].get<double>());
  }
  if (options.json.empty()) return;
  std::ofstream(options.json)
      << nlohmann::json{{"ranks", options.ranks}, {"megabytes", options.megabytes}, {"rows", rows}}.dump(2) << "\n";
}

int launch(const Options& options, const std::vector<std::string>& arguments) {
  const auto port = std::to_string(os::free_port());
  std::vector<os::Process> processes;
  for (int rank = 0; rank < options.ranks; ++rank) {
    os::Command command;
    command.arguments = {os::program_path()};
    command.arguments.insert(command.arguments.end(), arguments.begin(), arguments.end());
    for (const auto& more : {std::string("--rank"), std::to_string(rank), std::string("--port"), port}) {
      command.arguments.push_back(more);
    }
    command.environment["OMP_NUM_THREADS"] = "1";
    command.die_with_parent = true;
    processes.push_back(os::Process::spawn(command));
  }
  bool well = true;
  const os::Deadline deadline(std::chrono::minutes(10));
  for (auto& process : processes) {
    const auto exit = process.wait(deadline);
    well = well && exit && exit->success();
  }
  return well ? 0 : 1;
}

}  // namespace
}  // namespace tesserae::bench

int main(int argc, char** argv) {
  using namespace tesserae::bench;
  Options options;
  CLI::App app("Collectives over Gloo on one host");
  app.add_option("--ranks", options.ranks, "ranks to start")->check(CLI::Range(2, 64));
  app.add_option("--megabytes", options.megabytes, "size of the whole buffer, MiB");
  app.add_option("--chunk-megabytes", options.chunk_megabytes, "chunk of the pairwise exchange, MiB; 0: the default");
  app.add_option("--repeats", options.repeats, "measured repeats");
  app.add_option("--json", options.json, "write the figures to this file");
  app.add_option("--rank", options.rank)->group("");
  app.add_option("--port", options.port)->group("");
  CLI11_PARSE(app, argc, argv);
  if (options.rank < 0) return launch(options, {argv + 1, argv + argc});
  at::set_num_threads(1);
  try {
    const auto rows = Rank(options).run();
    if (options.rank == 0) show(options, rows);
    return 0;
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "rank %d: %s\n", options.rank, failure.what());
    return 1;
  }
}
