#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>
#include <vector>

#include "tesserae/comm/group.h"
#include "tesserae/comm/wire.h"

namespace tesserae::comm {

/// Messages of one exchange that travel packed, all in one way (exact included: then the tensors themselves do). Used
/// by one thread, once.
class PackedMessages {
 public:
  explicit PackedMessages(Wire wire) : wire_(wire) {}

  void send(int peer, const at::Tensor& data) { send_packed(peer, pack(data, wire_)); }
  /// What is sent to several peers is packed once.
  void send_packed(int peer, at::Tensor packed);
  /// What comes from `peer` belongs in `data`.
  void receive(int peer, const at::Tensor& data);
  /// What comes from `peer` is as large as `like`, and is asked for by arrived().
  void expect(int peer, const at::Tensor& like);
  using Exchange = std::function<void(const std::vector<Message>& sends, const std::vector<Message>& receives)>;
  /// Calls `exchange` with what travels, then unpacks what was to be received.
  void run(const Exchange& exchange);

  /// After run(), the messages that were expected: as they are, or unpacked into `scratch`, until the next one is.
  int expected() const { return static_cast<int>(expected_.size()); }
  at::Tensor arrived(int index, const at::Tensor& scratch) const;

 private:
  at::Tensor packed_like(const at::Tensor& data) const;

  Wire wire_;
  std::vector<Message> sends_, receives_;
  std::vector<std::pair<at::Tensor, at::Tensor>> arrivals_;  // what travels, and where it goes
  std::vector<at::Tensor> expected_;
};

}  // namespace tesserae::comm
