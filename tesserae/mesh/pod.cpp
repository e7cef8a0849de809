#include <algorithm>
#include <cctype>

#include "tesserae/base/error.h"
#include "tesserae/mesh/host_job.h"
#include "tesserae/mesh/variables.h"

namespace tesserae::mesh {

std::optional<HostJob> read_pod(const Lookup& lookup) {
  const Variables variables(lookup);
  if (variables.has("LOCAL_RANK") || !variables.has("PET_NNODES")) return std::nullopt;
  HostJob job{.platform = "kubernetes", .address = "127.0.0.1"};
  if (const std::string nodes = variables.text("PET_NNODES"); nodes.find(':') != std::string::npos) {
    fail_launch(cat("PET_NNODES=", nodes, " makes this an elastic job: start its ranks by torchrun, which is elastic"));
  }
  job.hosts = variables.number("PET_NNODES", job.platform);
  job.host = job.hosts == 1 && !variables.has("PET_NODE_RANK") ? 0 : variables.number("PET_NODE_RANK", job.platform);
  if (job.host < 0 || job.host >= job.hosts) {
    fail_launch(cat("PET_NODE_RANK=", job.host, " contradicts PET_NNODES=", job.hosts));
  }
  // "auto", "gpu" and "cpu" leave it to the pod.
  const std::string ranks = variables.text("PET_NPROC_PER_NODE");
  if (!ranks.empty() && std::ranges::all_of(ranks, [](unsigned char c) { return std::isdigit(c) != 0; })) {
    job.ranks = variables.number("PET_NPROC_PER_NODE", job.platform);
  }
  for (const char* name : {"PET_MASTER_ADDR", "MASTER_ADDR"}) {
    if (variables.has(name)) job.address = variables.text(name);
  }
  for (const char* name : {"PET_MASTER_PORT", "MASTER_PORT"}) {
    if (variables.has(name)) job.port = variables.port(name);
  }
  if (job.hosts > 1 && (job.port == 0 || job.address == "127.0.0.1")) {
    fail_launch(cat("PET_NNODES=", job.hosts,
                    ", but nothing says where the pods meet: set MASTER_ADDR to the name of "
                    "the first one, and MASTER_PORT"));
  }
  return job;
}

}  // namespace tesserae::mesh
