#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>
#include <vector>

namespace tesserae::comm {

struct NcclOptions {
  std::string name;                    ///< of the group, for NCCL's logs
  std::vector<int> members;            ///< job ranks by member index
  std::chrono::milliseconds deadline;  ///< torch's watchdog aborts an operation that takes longer
  c10::Device device;                  ///< of this rank
};

/// Whether this build has NCCL (nccl.cpp) or not (no_nccl.cpp); CMake chooses by what torch and the machine have.
bool has_nccl();

/// An NCCL communicator of `size` members. Throws InvalidArgument in a build without NCCL.
c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                            const NcclOptions& options);

}  // namespace tesserae::comm
