#include "tesserae/comm/transports/nccl.h"

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

namespace tesserae::comm {

bool has_nccl() {
  return true;
}

c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                            const NcclOptions& options) {
  // Communication is short and others wait for it: its kernels go before those of computation.
  auto nccl = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/true);
  nccl->timeout = options.deadline;
  nccl->group_name = options.name;
  nccl->global_ranks_in_group.assign(options.members.begin(), options.members.end());
  auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, std::move(nccl));
  // Without it, barrier() would guess the device from the rank.
  backend->setBoundDeviceId(options.device);
  return backend;
}

}  // namespace tesserae::comm
