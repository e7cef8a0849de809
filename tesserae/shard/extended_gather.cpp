#include "tesserae/shard/extended_gather.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <utility>

#include "tesserae/base/error.h"

namespace tesserae::shard {
namespace {

void open(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  if (impl->nbytes() == bytes) return;
  const auto options = at::TensorOptions().dtype(at::kByte).device(impl->device());
  auto* memory = new at::Tensor(at::empty({static_cast<int64_t>(bytes)}, options));
  const auto drop = [](void* tensor) { delete static_cast<at::Tensor*>(tensor); };
  impl->set_data_ptr_noswap(c10::DataPtr(memory->data_ptr(), memory, drop, impl->device()));
  impl->set_nbytes(bytes);
}

void close(const c10::Storage& storage) {
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(c10::DataPtr(nullptr, impl->device()));
  impl->set_nbytes(size_t{0});
}

}  // namespace

ExtendedGather::ExtendedGather(std::shared_ptr<GatherExtension> extension, comm::Group& group, std::string name)
    : extension_(std::move(extension)), group_(group), name_(std::move(name)) {}

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

void ExtendedGather::make_outputs() {
  for (const at::Tensor& input : inputs_) {
    auto shape = input.sizes().vec();
    if (shape.empty()) shape = {1};
    shape.front() *= group_.size();
    flat_.push_back(at::empty({group_.size() * input.numel()}, input.options()));
    // No view of the other: autograd would take each gather for a change of what it has saved.
    outputs_.push_back(at::empty({0}, input.options()));
    outputs_.back().set_(flat_.back().storage(), 0, shape, c10::contiguous_strides(shape));
    add_room(flat_.back());
  }
}

void ExtendedGather::require_same() const {
  const auto differs = [](const at::Tensor& input, const at::Tensor& output, int64_t members) {
    return input.numel() * members != output.numel() || input.scalar_type() != output.scalar_type();
  };
  bool same = inputs_.size() == flat_.size();
  for (size_t i = 0; same && i < flat_.size(); ++i) same = !differs(inputs_[i], flat_[i], group_.size());
  if (same) return;
  throw InvalidArgument("fully_shard", cat("fsdp_pre_all_gather of parameter ", name_, " returned ", inputs_.size(),
                                           " tensors for the all-gather, of other sizes or dtypes than the ",
                                           flat_.size(), " of its first call: return the same each time"));
}

void ExtendedGather::add_room(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  const auto known = [&](const Room& room) {
    return room.storage.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
  };
  if (storage.nbytes() > 0 && std::ranges::none_of(rooms_, known)) rooms_.push_back({storage, storage.nbytes()});
}

void ExtendedGather::travel(const comm::Label& label) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < flat_.size(); ++i) {
    flat_[i].narrow(0, group_.rank() * inputs_[i].numel(), inputs_[i].numel()).copy_(inputs_[i].view(-1));
    group_.all_gather(flat_[i], label);
  }
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
  for (const Room& room : rooms_) close(room.storage);
}

}  // namespace tesserae::shard
