#pragma once

#include "tesserae/doctor/finding.h"
#include "tesserae/os/host.h"
#include "tesserae/os/limits.h"
#include "tesserae/os/memory.h"

namespace tesserae::doctor {

/// What is known of the host that this process runs on. Fields are public, so that tests describe hosts that they have
/// not.
struct HostFacts {
  os::System system;
  int processors = 1;
  int threads = 0;      ///< OMP_NUM_THREADS; 0: not set
  int local_ranks = 1;  ///< of the job, on this host
  bool has_bf16 = false;
  os::HostMemory memory;
  os::Space shared_memory;           ///< /dev/shm; total 0: there is none
  std::string private_memory_fault;  ///< why memory without a name cannot be shared; empty: it can
  os::Limits limits;
  bool has_infiniband = false;
  std::optional<bool> clock_is_synchronised;

  /// Of this host. Tries memory files out.
  static HostFacts look(int local_ranks);
};

Findings examine(const HostFacts& host);

}  // namespace tesserae::doctor
