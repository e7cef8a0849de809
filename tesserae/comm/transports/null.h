#pragma once

#include "tesserae/comm/group.h"

namespace tesserae::comm {

/// Moves nothing: its verbs cost what the layers above them cost, and count what would have been sent.
class NullGroup final : public Group {
 public:
  NullGroup(std::string name, std::vector<int> members, int rank) : Group(std::move(name), std::move(members), rank) {}

  bool blocks_host() const override { return false; }

 protected:
  void do_all_gather(const at::Tensor&) override {}
  void do_reduce_scatter(const at::Tensor&, Reduction) override {}
  void do_all_gather_to(const at::Tensor&, const at::Tensor&) override {}
  void do_reduce_scatter_to(const at::Tensor&, const at::Tensor&, Reduction) override {}
  void do_all_reduce(const at::Tensor&, Reduction) override {}
  void do_broadcast(const at::Tensor&, int) override {}
  void do_exchange(const std::vector<Message>&, const std::vector<Message>&) override {}
  void do_barrier(std::string_view) override {}
  void do_packed_all_gather(const at::Tensor&, Wire) override {}
  void do_packed_reduce_scatter(const at::Tensor&, Reduction, Wire) override {}
  [[noreturn]] void rethrow(const std::string& what, const std::exception& cause) override {
    throw CommError("Group", what + ": " + cause.what());
  }
};

}  // namespace tesserae::comm
