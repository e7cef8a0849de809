#include "cli/start.h"

#include <ATen/DeviceAccelerator.h>

#include <utility>

#include "cli/verbs.h"
#include "tesserae/base/error.h"
#include "tesserae/config/json.h"
#include "tesserae/mesh/host_job.h"
#include "tesserae/train/device.h"

namespace tesserae::cli {
namespace {

Start start_ranks(std::string by, int ranks, int hosts, int host, std::string address, uint16_t port) {
  const bool alone = hosts * ranks == 1;
  Start start{.is_rank = alone, .alone = alone, .ranks = hosts * ranks, .job = {}, .by = std::move(by)};
  start.job.ranks = ranks;
  start.job.hosts = hosts;
  start.job.host = host;
  start.job.address = std::move(address);
  start.job.port = port;
  return start;
}

Start start_on_host(const mesh::HostJob& host, int nproc, int otherwise) {
  const int accelerators = train::accelerators();
  const int ranks = nproc > 0 ? nproc : host.ranks > 0 ? host.ranks : accelerators > 0 ? accelerators : otherwise;
  return start_ranks(host.platform, ranks, host.hosts, host.host, host.address, host.port);
}

}  // namespace

Start find_start(int nproc, int otherwise, const mesh::Lookup& environment) {
  const std::optional<mesh::HostJob> pod = mesh::read_pod(environment);
  if (pod) return start_on_host(*pod, nproc, otherwise);
  const mesh::Launch launch = mesh::read_launch(environment);
  if (launch.launcher == "single") {
    const std::optional<mesh::HostJob> sagemaker = mesh::read_sagemaker(environment);
    if (sagemaker) return start_on_host(*sagemaker, nproc, otherwise);
    return start_ranks(launch.launcher, nproc > 0 ? nproc : otherwise, 1, 0, launch.address, 0);
  }
  // torchrun's own variables would reach the new ranks beside ours.
  if (nproc > 1 && launch.local_size == 1 && launch.launcher != "torchrun") {
    return start_ranks(launch.launcher, nproc, launch.size, launch.rank, launch.address, launch.port);
  }
  if (nproc > 0 && nproc != launch.local_size) {
    const std::string one = launch.local_size == 1 ? "1 rank" : cat(launch.local_size, " ranks");
    throw config::ConfigError("", cat("--nproc ", nproc, " contradicts ", launch.launcher, ", which started ", one,
                                      " on this host: leave it out"));
  }
  return {.is_rank = true,
          .ranks = launch.size,
          .job = {},
          .by = launch.launcher,
          .world = mesh::World::from_environment(environment)};
}

void run_in_ranks(launch::LocalJob& job, std::vector<std::string> command) {
  job.command = std::move(command);
  if (at::getAccelerator()) return;
  job.body = [words = job.command] {
    std::vector<const char*> arguments;
    for (const std::string& word : words) arguments.push_back(word.c_str());
    return run_program(static_cast<int>(arguments.size()), arguments.data());
  };
}

}  // namespace tesserae::cli
