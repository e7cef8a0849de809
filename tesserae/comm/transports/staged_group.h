#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <string>
#include <vector>

#include "tesserae/comm/group.h"

namespace tesserae::comm {

/// A group for tensors of a device that no transport of its own serves: ranks that share one GPU (NCCL refuses two
/// ranks on a device), or an accelerator for which torch has no collectives. What another group carries between hosts'
/// memory is carried for the device:
///
///  1. what this member contributes is copied to pinned memory, on the current stream, and the host waits for that;
///  2. the group behind this one moves it, which blocks the host;
///  3. what came is copied to the device on the current stream: who uses it later on that stream need not wait.
///
/// So the rules for callers are NCCL's, and the numbers are those of the group behind, to the bit. Slow on purpose:
/// each byte crosses the bus twice, and nothing of a verb runs beside the host. Hence also what NCCL does not ask for:
/// all ranks give their lanes tasks in one order over all lanes, as the engine does; otherwise they meet the deadline.
class StagedGroup final : public Group {
 public:
  /// `host`: moves tensors of the CPU. `device` has streams and events of c10's, and copies from pinned memory.
  StagedGroup(std::unique_ptr<Group> host, c10::Device device);
  ~StagedGroup() override;

  bool blocks_host() const override { return false; }
  at::Tensor share(int64_t bytes) override { return host_->share(bytes); }
  bool can_share() const override { return host_->can_share(); }
  void close() override { host_->close(); }

 protected:
  void do_all_gather(const at::Tensor& buffer) override;
  void do_all_gather_to(const at::Tensor& output, const at::Tensor& input) override;
  void do_reduce_scatter(const at::Tensor& buffer, Reduction how) override;
  void do_reduce_scatter_to(const at::Tensor& output, const at::Tensor& input, Reduction how) override;
  void do_reduce_scatter_scaled(const at::Tensor& output, const at::Tensor& buffer, double scale) override;
  void do_all_reduce(const at::Tensor& buffer, Reduction how) override;
  void do_broadcast(const at::Tensor& buffer, int root) override;
  void do_exchange(const std::vector<Message>& sends, const std::vector<Message>& receives) override;
  void do_barrier(std::string_view what) override;
  Wire travels_as(Wire /*asked*/) const override { return Wire::exact; }
  [[noreturn]] void rethrow(const std::string& what, const std::exception& cause) override;

 private:
  class Call;  // one verb from begin to end

  c10::Stream current_stream() const;
  Label label() const { return {.contents = contents()}; }  ///< of a verb of host_

  const std::unique_ptr<Group> host_;
  const c10::Device device_;
  at::Tensor pinned_;  // as much as the largest verb so far took
  c10::Event copied_;  // what the last verb left on its stream has been read from pinned_
};

}  // namespace tesserae::comm
