#include "tests/support/ranks.h"

#include <algorithm>
#include <cstdio>
#include <sstream>
#include <stdexcept>

#include "tesserae/base/error.h"
#include "tesserae/os/descriptor.h"
#include "tesserae/os/port.h"
#include "tesserae/os/program.h"
#include "tests/support/child.h"
#include "tests/support/rank_main.h"

namespace tesserae::testing {

namespace {

struct Running {
  Child process;
  os::Descriptor output;
  RankResult result;
  bool ended = false;
};

std::map<std::string, std::string> environment_of(const RankJob& job, int rank, uint16_t port) {
  const std::string ranks = std::to_string(job.ranks), self = std::to_string(rank);
  std::map<std::string, std::string> environment = {{"RANK", self},
                                                    {"LOCAL_RANK", self},
                                                    {"WORLD_SIZE", ranks},
                                                    {"LOCAL_WORLD_SIZE", ranks},
                                                    {"MASTER_ADDR", "127.0.0.1"},
                                                    {"MASTER_PORT", std::to_string(port)},
                                                    {"OMP_NUM_THREADS", "1"}};
  for (const auto& [name, value] : job.environment) environment[name] = value;
  return environment;
}

Running start(const RankJob& job, int rank, uint16_t port) {
  auto pipe = os::make_pipe();
  const auto environment = environment_of(job, rank, port);
  std::vector<std::string> program = {os::program_path(), "--rank-main=" + job.main};
  program.insert(program.end(), job.args.begin(), job.args.end());
  // What is in a job's environment may be read as a program begins.
  auto child = job.environment.empty() && !job.own_memory && may_go_on_as_a_copy()
                   ? Child::copy(environment, pipe.write.get(), [&] { return run_rank(job.main, job.args); })
                   : Child::program(environment, pipe.write.get(), program);
  return {std::move(child), std::move(pipe.read), {}, false};
}

// Takes what a rank has written; notices its end.
void attend(Running& rank) {
  if (rank.output) {
    if (os::wait_readable({rank.output.get()}, os::Deadline(std::chrono::seconds(0))).empty()) return;
    const auto text = os::read_some(rank.output.get());
    rank.result.output += text;
    if (!text.empty()) return;
    rank.output.reset();
  }
}

struct RunningJob {
  const RankJob& job;
  std::vector<Running> ranks;
  os::Deadline deadline;  // until the ranks are killed; then, until their output is given up
  bool ending = false;

  bool may_stay(size_t rank) const {
    return std::ranges::find(job.left_behind, static_cast<int>(rank)) != job.left_behind.end();
  }

  bool works() const {
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      if (!ranks[rank].ended && !may_stay(rank)) return true;
    }
    return false;
  }

  void end() {
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      if (ranks[rank].ended) continue;
      ranks[rank].result.out_of_time = !may_stay(rank);
      ranks[rank].process.signal(9);
    }
    deadline = os::Deadline(std::chrono::seconds(10));
    ending = true;
  }

  // Whether there is nothing more to wait for.
  bool has_ended() {
    if (!ending && (!works() || deadline.passed())) end();
    const auto open = [](const Running& rank) { return rank.output || !rank.ended; };
    return ending && (std::ranges::none_of(ranks, open) || deadline.passed());
  }
};

RunningJob start(const RankJob& job) {
  const uint16_t port = os::free_port();
  std::vector<Running> ranks;
  for (int rank = 0; rank < job.ranks; ++rank) ranks.push_back(start(job, rank, port));
  return {job, std::move(ranks), os::Deadline(job.deadline)};
}

void drain(std::vector<RunningJob>& jobs) {
  std::vector<int> descriptors;
  for (const auto& job : jobs) {
    for (const auto& rank : job.ranks) {
      if (rank.output) descriptors.push_back(rank.output.get());
    }
  }
  os::wait_readable(descriptors, os::Deadline(std::chrono::milliseconds(20)));
  for (auto& job : jobs) {
    for (auto& rank : job.ranks) {
      attend(rank);
      if (const auto exit = rank.process.poll(); exit && !rank.ended) {
        rank.ended = true;
        rank.result.exit = *exit;
      }
    }
  }
}

}  // namespace

double RankResult::value(const std::string& key) const {
  std::istringstream lines(output);
  std::string found;
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind(key + "=", 0) == 0) found = line.substr(key.size() + 1);
  }
  if (found.empty()) throw std::runtime_error(cat("a rank did not report ", key, "; it wrote:\n", output));
  return std::stod(found);
}

bool RankResults::all_succeeded() const {
  return std::all_of(ranks.begin(), ranks.end(),
                     [](const auto& rank) { return rank.exit.success() && !rank.out_of_time; });
}

std::string RankResults::text() const {
  std::string text;
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += cat("--- rank ", i, ": ", ranks[i].out_of_time ? "still ran at the deadline, " : "", ranks[i].exit.text(),
                "\n", ranks[i].output, "\n");
  }
  return text;
}

std::vector<RankResults> run_side_by_side(const std::vector<RankJob>& jobs) {
  std::vector<RunningJob> running;
  for (const auto& job : jobs) running.push_back(start(job));
  const auto ended = [](RunningJob& job) { return job.has_ended(); };
  while (std::ranges::count_if(running, ended) < std::ssize(running)) drain(running);
  std::vector<RankResults> results(jobs.size());
  for (size_t i = 0; i < jobs.size(); ++i) {
    for (auto& rank : running[i].ranks) results[i].ranks.push_back(std::move(rank.result));
  }
  return results;
}

RankResults run_ranks(const RankJob& job) {
  return run_side_by_side({job}).front();
}

RankResults run_ranks(const std::string& main, int ranks, const RankArgs& args, std::chrono::seconds deadline) {
  RankJob job;
  job.main = main;
  job.ranks = ranks;
  job.args = args;
  job.deadline = deadline;
  return run_ranks(job);
}

void report(const std::string& key, double value) {
  std::printf("\n%s=%.9f\n", key.c_str(), value);
  std::fflush(stdout);
}

}  // namespace tesserae::testing
