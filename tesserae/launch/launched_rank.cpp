#include "tesserae/launch/launched_rank.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <utility>

#include "tesserae/comm/membership.h"
#include "tesserae/os/host.h"
#include "tesserae/os/random_name.h"

namespace tesserae::launch {
namespace {

std::map<std::string, std::string> rank_environment(const LocalJob& job, const Place& place, const Meeting& meeting) {
  std::map<std::string, std::string> environment = environment_of_all(job);
  // Of several hosts none gets more ranks than it began with, and the job may have fewer than that.
  const int local_ranks = job.hosts > 1 ? std::min(job.ranks, meeting.ranks) : meeting.ranks;
  environment["RANK"] = std::to_string(place.rank);
  environment["LOCAL_RANK"] = std::to_string(place.local_rank);
  environment["WORLD_SIZE"] = std::to_string(meeting.ranks);
  environment["LOCAL_WORLD_SIZE"] = std::to_string(local_ranks);
  environment["GROUP_RANK"] = std::to_string(job.host);
  environment["GROUP_WORLD_SIZE"] = std::to_string(job.hosts);
  environment["ROLE_NAME"] = "default";
  environment["ROLE_RANK"] = environment["RANK"];
  environment["ROLE_WORLD_SIZE"] = environment["WORLD_SIZE"];
  environment["TORCHELASTIC_RUN_ID"] = "tesserae";  // by which libraries know that a launcher counts hosts
  environment["MASTER_ADDR"] = job.hosts > 1 ? job.address : "127.0.0.1";
  environment["MASTER_PORT"] = std::to_string(meeting.port);
  environment["TORCHELASTIC_USE_AGENT_STORE"] = meeting.epoch ? "True" : "False";
  if (meeting.epoch) {
    environment[comm::epoch_variable] = std::to_string(*meeting.epoch);
    environment[configured_ranks_variable] = std::to_string(job.hosts * job.ranks);
    if (!job.succession.empty()) environment[comm::succession_variable] = job.succession;
  }
  return environment;
}

}  // namespace

std::map<std::string, std::string> environment_of_all(const LocalJob& job) {
  std::map<std::string, std::string> environment = job.environment;
  // The same for ranks that come later: who computes the same as others must do it with as many threads.
  if (std::getenv("OMP_NUM_THREADS") == nullptr) {
    environment["OMP_NUM_THREADS"] = std::to_string(std::max(1, os::processors() / job.ranks));
  }
  return environment;
}

std::vector<std::string> LaunchedRank::read() {
  const std::string bytes = os::read_some(output.get());
  if (bytes.empty()) output.reset();
  return bytes.empty() ? lines.rest() : lines.add(bytes);
}

bool LaunchedRank::ended_well(const LocalJob& job) const {
  return exit->success() || (exit->signal == 0 && exit->code == job.early_exit_code);
}

LaunchedRank start_rank(const LocalJob& job, const Place& place, const Meeting& meeting, const RankSources& sources,
                        std::optional<int64_t> spare) {
  LaunchedRank started;
  started.host = job.host;
  started.local_rank = place.local_rank;
  started.rank = started.number = place.rank;
  started.name = os::random_name();
  auto environment = rank_environment(job, place, meeting);
  environment[comm::process_variable] = started.name;
  if (spare) environment[comm::spare_variable] = std::to_string(*spare);
  if (auto copy = sources.waiting.call(environment)) {
    started.process = std::move(copy->process);
    started.output = std::move(copy->output);
    return started;
  }
  os::Pipe pipe = os::make_pipe();
  const bool writes_ours = place.rank == job.host * job.ranks && !spare;
  started.process = sources.server.make(environment, pipe.write.get(), !writes_ours);
  if (!started.process) {
    started.process = os::Process::spawn({.arguments = job.command,
                                          .environment = environment,
                                          .die_with_parent = true,
                                          .new_group = true,
                                          .output = writes_ours ? -1 : pipe.write.get(),
                                          .errors = pipe.write.get()});
  }
  started.output = std::move(pipe.read);
  return started;
}

}  // namespace tesserae::launch
