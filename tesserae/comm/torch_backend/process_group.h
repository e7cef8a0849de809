#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tesserae/comm/fabric.h"
#include "tesserae/comm/torch_backend/lane_work.h"
#include "tesserae/os/fork.h"

namespace tesserae::comm {

/// A process group of torch on our transports: shared memory among the ranks of a host, Gloo between hosts. FSDP, DDP,
/// DTensor and distributed checkpoints of torch run on it.
///
/// CPU tensors of any layout in memory; results are those of torch's Gloo group, and all ranks get the same bits.
/// Operations run in the order of their calls, on a thread of the group, beside the caller: tensors are the group's
/// until the Work has ended. Collectives are called by all ranks in the same order; send and recv match by rank and
/// tag.
///
/// A call that cannot work throws InvalidArgument at once. An operation that fails throws PeerLost, Timeout or
/// Mismatch from Work::wait, and so does every later one. Ranks in these errors are global ranks. Not so send and recv:
/// their Work is of torch's Gloo, throws torch's errors, and leaves other operations as they are.
class ProcessGroup final : public c10d::Backend {
 public:
  struct Setup {
    std::string name;                   ///< in errors
    std::vector<int64_t> global_ranks;  ///< by rank of this group; empty: the same
    std::chrono::milliseconds timeout;  ///< to connect, and of an operation
    bool served = false;                ///< the store does not end with rank 0
  };

  /// Collective: the ranks that share `store`, whose keys belong to this group alone, meet.
  static c10::intrusive_ptr<c10d::Backend> connect(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                   Setup setup);
  ProcessGroup(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Setup setup);
  ~ProcessGroup() override;

  /// Ends all groups of this process: what was submitted is finished, and peers do not take this rank for lost. For a
  /// process that is about to end.
  static void shutdown_all();
  /// For which ranks (torch's global ones) others waited when operations of any of them failed at their deadline; see
  /// comm/meeting_store.h.
  static std::vector<int> all_missing_ranks();
  void shutdown() override;
  /// After an operation failed, for a process that goes on without this group: what blocks is aborted (give_up.h).
  void abort() override;

  const std::string getBackendName() const override { return "tesserae"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setSequenceNumberForGroup() override {}  // all ranks count from 0
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options = {}) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options = {}) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options = {}) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options = {}) override;

  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options = {}) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options = {}) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options = {}) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options = {}) override;

  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options = {}) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options = {}) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options = {}) override;

  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options = {}) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options = {}) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options = {}) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_rows,
                        std::vector<int64_t>& input_rows, const c10d::AllToAllOptions& options = {}) override;

  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options = {}) override;

 private:
  /// What an operation is besides the function that does it.
  struct Operation {
    c10d::OpType type;
    const char* title;
    Tensors inputs, outputs;
    std::chrono::milliseconds timeout;
  };
  WorkPtr submit(Operation operation, std::function<void()> body);
  /// Throws what is going on, with global ranks.
  [[noreturn]] void rethrow_with_global_ranks() const;
  void check_connected() const;
  /// Throws Mismatch on all ranks unless rank i sends rank j as many elements as that expects.
  void check_counts(const char* title, const std::vector<int64_t>& sent, const std::vector<int64_t>& received) const;

  const Setup setup_;
  std::atomic<uint64_t> sequence_ = 0;
  std::exception_ptr failure_;         // of the lane's thread
  std::vector<int64_t> global_ranks_;  // by rank of the fabric
  os::ForkGuard made_;
  c10::intrusive_ptr<c10d::Backend> messages_;
  Group* group_ = nullptr;
  Lane* lane_ = nullptr;
  std::shared_ptr<Fabric> fabric_;  // last: its end finishes what the lane was given
};

}  // namespace tesserae::comm
