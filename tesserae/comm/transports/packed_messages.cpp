#include "tesserae/comm/transports/packed_messages.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

namespace tesserae::comm {

void PackedMessages::send_packed(int peer, at::Tensor packed) {
  sends_.push_back({peer, std::move(packed)});
}

at::Tensor PackedMessages::packed_like(const at::Tensor& data) const {
  return at::empty({packed_bytes(data.numel(), data.element_size(), wire_)}, data.options().dtype(at::kByte));
}

void PackedMessages::receive(int peer, const at::Tensor& data) {
  const at::Tensor bytes = wire_ == Wire::exact ? data : packed_like(data);
  receives_.push_back({peer, bytes});
  arrivals_.emplace_back(bytes, data);
}

void PackedMessages::expect(int peer, const at::Tensor& like) {
  const at::Tensor bytes = wire_ == Wire::exact ? at::empty_like(like) : packed_like(like);
  receives_.push_back({peer, bytes});
  expected_.push_back(bytes);
}

at::Tensor PackedMessages::arrived(int index, const at::Tensor& scratch) const {
  const at::Tensor& bytes = expected_[static_cast<size_t>(index)];
  if (wire_ == Wire::exact) return bytes;
  unpack(bytes, wire_, scratch);
  return scratch;
}

void PackedMessages::run(const Exchange& exchange) {
  exchange(sends_, receives_);
  for (const auto& [bytes, data] : arrivals_) unpack(bytes, wire_, data);
}

}  // namespace tesserae::comm
