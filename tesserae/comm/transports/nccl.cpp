#include "tesserae/comm/transports/nccl.h"

#include <cstdlib>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

namespace tesserae::comm {
namespace {

// By default torch's watchdog ends the process where an operation fails or takes too long, and another thread eight
// minutes after such a failure. Here the ranks that are left go on: communicators are aborted, and C10dGroup asks what
// has failed. Whoever sets these variables has them as they are.
void keep_process() {
  static const bool set = [] {
    constexpr int if_unset = 0;
    return ::setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2", if_unset) == 0 &&  // CleanUpOnly
           ::setenv("TORCH_NCCL_ENABLE_MONITORING", "0", if_unset) == 0;
  }();
  static_cast<void>(set);
}

}  // namespace

bool has_nccl() {
  return true;
}

c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                            const NcclOptions& options) {
  keep_process();
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
