#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>
#include <vector>

#include "tesserae/comm/group.h"
#include "tesserae/comm/wire.h"

namespace tesserae::comm {

/// Messages of one exchange that travel packed, all in one way (exact included: then the tensors themselves do). Used by
/// one thread, once.
class PackedMessages {
 public:
  explicit PackedMessages(Wire wire) : wire_(wire) {}

  void send(int peer, const at::Tensor& data) { send_packed(peer, pack(data, wire_)); }
  /// What is sent to several peers is packed once.
  void send_packed(int peer, at::Tensor packed);
  void receive(int peer, const at::Tensor& data);
  /// Calls `exchange` with what travels, then unpacks what came.
  void run(const std::function<void(const std::vector<Message>& sends, const std::vector<Message>& receives)>& exchange);

 private:
  Wire wire_;
  std::vector<Message> sends_, receives_;
  std::vector<std::pair<at::Tensor, at::Tensor>> arrivals_;  // what travels, and where it goes
};

}  // namespace tesserae::comm
