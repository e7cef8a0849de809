#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tesserae/mesh/launch.h"

namespace tesserae::mesh {

/// A job whose platform starts one process on each host, and leaves it to that process to start the ranks there.
struct HostJob {
  std::string platform;  ///< "sagemaker" or "kubernetes"
  int hosts = 1;
  int host = 0;         ///< which of them this is
  int ranks = 0;        ///< of each host; 0: the platform says nothing
  std::string address;  ///< where ranks meet: the first host
  uint16_t port = 0;
};

/// A training job of SageMaker: SM_HOSTS and SM_CURRENT_HOST, or SM_RESOURCE_CONFIG, which has both; SM_NUM_GPUS ranks.
/// Ranks meet at the first host, at port 7777 as under SageMaker's training toolkit; MASTER_ADDR and MASTER_PORT, else
/// SM_MASTER_ADDR and SM_MASTER_PORT, are stronger. Nothing where no variable names hosts.
///
/// Where a launcher has started this process (read_launch), what that says counts instead. Throws InvalidArgument
/// naming the variable that is missing, malformed or contradicts another one, and for a cluster of several instance
/// groups, of which nobody says how many ranks the other hosts have.
std::optional<HostJob> read_sagemaker(const Lookup& lookup);

/// A pod of Kubernetes' PyTorchJob, or of any job that sets what torchrun reads by itself: PET_NNODES, PET_NODE_RANK,
/// PET_NPROC_PER_NODE (a number; anything else says nothing) and MASTER_ADDR, MASTER_PORT. Nothing where torchrun has
/// started this process (LOCAL_RANK) or these are not set. RANK, which counts pods there, is not read.
/// Throws InvalidArgument as above, and for an elastic job (PET_NNODES=1:4), which is torchrun's.
std::optional<HostJob> read_pod(const Lookup& lookup);

}  // namespace tesserae::mesh
