#include "tesserae/comm/packed_messages.h"

#include <ATen/ops/empty.h>

namespace tesserae::comm {

void PackedMessages::send_packed(int peer, at::Tensor packed) {
  sends_.push_back({peer, std::move(packed)});
}

void PackedMessages::receive(int peer, const at::Tensor& data) {
  const at::Tensor bytes =
      wire_ == Wire::exact ? data : at::empty({packed_bytes(data, wire_)}, data.options().dtype(at::kByte));
  receives_.push_back({peer, bytes});
  arrivals_.emplace_back(bytes, data);
}

void PackedMessages::run(
    const std::function<void(const std::vector<Message>& sends, const std::vector<Message>& receives)>& exchange) {
  exchange(sends_, receives_);
  for (const auto& [bytes, data] : arrivals_) unpack(bytes, wire_, data);
}

}  // namespace tesserae::comm
