#include "tesserae/shard/extended_gather.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/shard/compute_storage.h"

namespace tesserae::shard {
namespace {

void open(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  if (impl->nbytes() == bytes) return;
  const auto options = at::TensorOptions().dtype(at::kByte).device(impl->device());
  auto* memory = new at::Tensor(at::empty({static_cast<int64_t>(bytes)}, options));
  const auto drop = [](void* tensor) { delete static_cast<at::Tensor*>(tensor); };
  open_storage(*impl, c10::DataPtr(memory->data_ptr(), memory, drop, impl->device()), bytes);
}

}  // namespace

ExtendedGather::ExtendedGather(std::shared_ptr<GatherExtension> extension, comm::Group& group, const Flat& flat)
    : extension_(std::move(extension)), group_(group), flat_(flat) {}

ExtendedGather::~ExtendedGather() {
  free();
}

void ExtendedGather::begin() {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> inputs = extension_->inputs();
  for (at::Tensor& input : inputs) input = input.contiguous();
  inputs_ = std::move(inputs);
  outputs_.empty() ? make_outputs() : require_same();
  for (const Room& room : rooms_) open(room.storage, room.bytes);
}

// All or none: memory may not be there for the last of them.
void ExtendedGather::make_outputs() {
  std::vector<at::Tensor> buffers, outputs;
  for (const at::Tensor& input : inputs_) {
    auto shape = input.sizes().vec();
    if (shape.empty()) shape = {1};
    shape.front() *= group_.size();
    buffers.push_back(at::empty({group_.size() * input.numel()}, input.options()));
    // No view of the other: autograd would take each gather for a change of what it has saved.
    outputs.push_back(at::empty({0}, input.options()));
    outputs.back().set_(buffers.back().storage(), 0, shape, c10::contiguous_strides(shape));
  }
  buffers_ = std::move(buffers);
  outputs_ = std::move(outputs);
  for (const at::Tensor& buffer : buffers_) add_room(buffer);
}

void ExtendedGather::require_same() const {
  const auto differs = [](const at::Tensor& input, const at::Tensor& output, int64_t members) {
    return input.numel() * members != output.numel() || input.scalar_type() != output.scalar_type();
  };
  bool same = inputs_.size() == buffers_.size();
  for (size_t i = 0; same && i < buffers_.size(); ++i) same = !differs(inputs_[i], buffers_[i], group_.size());
  if (same) return;
  throw InvalidArgument("fully_shard", cat("fsdp_pre_all_gather of parameter ", name(), " returned ", inputs_.size(),
                                           " tensors for the all-gather, of other sizes or dtypes than the ",
                                           buffers_.size(), " of its first call: return the same each time"));
}

void ExtendedGather::add_room(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  const auto known = [&](const Room& room) {
    return room.storage.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
  };
  if (storage.nbytes() > 0 && std::ranges::none_of(rooms_, known)) rooms_.push_back({storage, storage.nbytes()});
}

const std::vector<at::Tensor>& ExtendedGather::write_inputs() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    buffers_[i].narrow(0, group_.rank() * inputs_[i].numel(), inputs_[i].numel()).copy_(inputs_[i].view(-1));
  }
  return buffers_;
}

void ExtendedGather::finish() {
  const at::NoGradGuard no_grad;
  inputs_.clear();
  const auto further = extension_->make(outputs_, !made_);
  if (std::exchange(made_, true)) return;
  for (const at::Tensor& tensor : further) add_room(tensor);
}

void ExtendedGather::free() {
  inputs_.clear();
  if (rooms_.empty()) return;
  const std::string message =
      cat("[ExtendedGather] parameter ", name(), " of unit \"", flat_.unit(),
          "\" was read while it is sharded: it holds memory only during the unit's forward and backward, and what a "
          "forward saved ends with the unit and at a change of degrees");
  for (const Room& room : rooms_) close_storage(*room.storage.unsafeGetStorageImpl(), message);
}

}  // namespace tesserae::shard
