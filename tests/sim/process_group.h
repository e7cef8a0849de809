#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/sim/device.h"
#include "tests/sim/room.h"

namespace tesserae::sim {

/// A c10d backend for ranks that are threads of one process, each with a device of its own, that goes by NCCL's rules:
///
///  - A collective is enqueued on a stream of the group's own, after what is on the current stream, and returns. Only
///    what comes after Work::wait() on the then current stream comes after it; the host waits for nothing but barrier.
///    If it is not to be asynchronous (asyncOp), it is enqueued on the current stream itself, and there is no Work.
///  - All members call the same collectives in one order: others are OrderMismatch, at the call that differs and at
///    whatever waits for the other members' devices.
///  - Communicators are made by their first use, which blocks the host until all members have come (NotEntered says
///    who did not): that of all members, and for messages outside of startCoalescing() one of each pair.
///  - A member whose peers never come waits on the device until the deadline, and its device fails with
///    CollectiveTimeout.
///  - abort() ends what this member waits for, and nothing of the others.
///
/// Tensors stay alive until Work::wait(), or, if nobody calls that, until the collective has run.
/// One thread at a time; abort() from any.
class ProcessGroup final : public c10d::Backend {
 public:
  struct Options {
    std::chrono::milliseconds deadline{10'000};  ///< of the making of a communicator, and of a collective on the device
  };

  /// `room`: the same object for all members.
  ProcessGroup(std::shared_ptr<Room> room, int rank, c10::DeviceIndex device, Options options);
  ProcessGroup(std::shared_ptr<Room> room, int rank, c10::DeviceIndex device);
  ~ProcessGroup() override;

  const std::string getBackendName() const override { return "sim"; }

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  // One after the other; the work is the last one's, which ends after the others.
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  /// Makes the communicator of all members now, while all of them are here: a later message of some is no first use.
  void eagerConnectSingleDevice(at::Device device) override;

  void abort() override;
  /// As ncclCommDestroy: nothing is in flight, and no verb is called afterwards.
  void shutdown() override;

 private:
  struct Channel;  // a communicator and the stream of its work
  class Work;
  using Move = std::function<void(Communicator::Offers&)>;
  enum class Place { own_stream, current_stream };

  Channel& all();
  Channel& pair(int peer);
  Channel& enter(std::shared_ptr<Communicator> communicator, int member);
  WorkPtr collective(c10d::OpType type, const char* name, const std::string& what, Tensors inputs, Tensors outputs,
                     std::chrono::milliseconds timeout, bool async, Move move, bool blocks_host = false);
  WorkPtr messages(Channel& channel, int member, std::vector<Communicator::Message> sends,
                   std::vector<Communicator::Message> receives);
  WorkPtr message(bool sends, Tensors& tensors, int peer);
  WorkPtr enqueue(Channel& channel, c10d::OpType type, const char* name, Tensors tensors, std::function<void()> task,
                  Place place, bool blocks_host);
  void check_device(const Tensors& tensors) const;
  static const at::Tensor& only_one(const char* verb, const Tensors& tensors);

  std::shared_ptr<Room> room_;  // until shutdown()
  const c10::DeviceIndex device_;
  const Options options_;
  std::mutex mutex_;  // of channels_, which abort() reads
  std::map<std::string, std::unique_ptr<Channel>> channels_;
  bool coalescing_ = false;
  std::vector<Communicator::Message> sends_;
  std::vector<Communicator::Message> receives_;
};

}  // namespace tesserae::sim
