#include "tesserae/shard/flat_buffer.h"

#include <ATen/ops/empty.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/offload/paged_tensor.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/initial_values.h"
#include "tesserae/shard/local_state.h"

namespace tesserae::shard {
namespace {

Flat::Dtypes dtypes_of(const FlatSpec& spec, const Precision& precision) {
  if (!c10::isFloatingType(spec.dtype)) return {spec.dtype, spec.dtype, spec.dtype};
  const auto compute = precision.parameters.value_or(spec.dtype);
  // What nobody updates is kept as it came.
  const auto master = spec.trainable ? precision.masters.value_or(spec.dtype) : spec.dtype;
  return {compute, precision.reduce.value_or(compute), master};
}

bool overlaps(const Slot& slot, const mesh::Range& range) {
  return std::max(slot.begin, range.begin) < std::min(slot.end(), range.end);
}

// Copies what of `values` (the slot's, flattened) lies in `range` of the flat buffer to `destination`, which holds
// exactly that range.
void copy_part(const Slot& slot, const at::Tensor& values, const mesh::Range& range, const at::Tensor& destination) {
  const int64_t begin = std::max(slot.begin, range.begin);
  const int64_t end = std::min(slot.end(), range.end);
  if (begin >= end) return;
  offload::copy(destination.narrow(0, begin - range.begin, end - begin),
                values.narrow(0, begin - slot.begin, end - begin));
}

// This rank's rows are there already. A piece of more than these is refreshed before the first step.
void take_local(const Slot& slot, const at::Tensor& local, const at::Tensor& master) {
  if (local.numel() > 0) offload::copy(master.narrow(0, 0, local.numel()), slot.flattened(local));
}

// `master`, which has the values of `local` already, in the storage of that: others may show it (state dicts that were
// made before), and follow what happens to it.
at::Tensor in_storage_of(const at::Tensor& local, const at::Tensor& master) {
  if (offload::is_paged(master) || local.numel() == 0 || local.device() != master.device() ||
      local.scalar_type() != master.scalar_type() || !local.is_contiguous() || local.storage_offset() != 0 ||
      local.nbytes() != local.storage().nbytes() || master.storage_offset() != 0) {
    return master;
  }
  c10::StorageImpl* const made = master.storage().unsafeGetStorageImpl();
  c10::StorageImpl* const kept = local.storage().unsafeGetStorageImpl();
  const size_t bytes = made->nbytes();
  kept->set_data_ptr_noswap(made->set_data_ptr(c10::DataPtr(nullptr, master.device())));
  kept->set_nbytes(bytes);
  return at::empty({0}, master.options()).set_(local.storage(), 0, master.sizes(), master.strides());
}

}  // namespace

FlatBuffer::FlatBuffer(ShardedUnit& unit, const FlatSpec& spec) : unit_(unit), tensors_(spec.parameters) {
  const UnitContext& context = unit.context();
  const Sharding& sharding = unit.sharding();
  const auto dtypes = dtypes_of(spec, sharding.options.precision);
  flat_ = std::make_unique<Flat>(unit.name(), spec.slots, dtypes, spec.trainable, sharding.layout,
                                 sharding.fabric->rank(), spec.cut_by);
  // Padding must be finite: it travels with the rest.
  at::Tensor master = new_local(context, *flat_, dtypes.master, master_tier(sharding.options.tiers, *flat_));
  if (!offload::is_paged(master)) master.zero_();
  for (const at::Tensor& local : spec.local) {
    take_local(flat_->slots().front(), local, master);
    if (spec.local.size() == 1) master = in_storage_of(local, master);
  }
  const at::Tensor piece = piece_for(context, *flat_, master);
  for (size_t i = spec.local.size(); i < tensors_.size(); ++i) {
    const Slot& slot = flat_->slots()[i];
    const bool in_piece = piece.defined() && !flat_->master_is_piece();
    const bool wanted = overlaps(slot, flat_->chunk_range()) || (in_piece && overlaps(slot, flat_->parameter_range()));
    const at::Tensor values = initial_values(sharding, slot, tensors_[i], dtypes.master, wanted);
    if (!wanted) continue;
    copy_part(slot, values, flat_->chunk_range(), master);
    if (in_piece) copy_part(slot, values, flat_->parameter_range(), piece);
  }
  parameter_ = std::make_unique<FlatParameter>(context, *flat_, ComputeStorage(*flat_, sharding.device, tensors_),
                                               master, piece);
  if (flat_->trainable()) take_gradients();
}

void FlatBuffer::take_gradients() {
  shard_ = shard_of(parameter_->local());
  gradient_ = std::make_unique<FlatGradient>(unit_.context(), *flat_, shard_);
  hooks_ = std::make_unique<autograd::GradientHooks>(
      tensors_, [this](int slot, const at::Tensor& gradient) { unit_.engine().on_gradient(*this, slot, gradient); },
      [this](int slot) { return unit_.engine().gradient_destination(*this, slot); });
}

Shard FlatBuffer::shard_of(const at::Tensor& master) const {
  return {shard_.index, master, {}, flat_->slices(flat_->chunk_range()), flat_->layout().replicas()};
}

void FlatBuffer::rename(const std::string& prefix) {
  flat_->rename(prefix);
  if (gradient_) shard_.slices = flat_->slices(flat_->chunk_range());
}

void FlatBuffer::set_master_dtype(c10::ScalarType dtype) {
  flat_->set_master_dtype(dtype);
  parameter_->cast_master();
  shard_.master = parameter_->local();
  shard_.grad = at::Tensor();
}

bool FlatBuffer::is_thawing() const {
  return !gradient_ && std::ranges::any_of(tensors_, &at::Tensor::requires_grad);
}

void FlatBuffer::require_can_thaw() const {
  const Options& options = unit_.sharding().options;
  Flat flat = flat_->with(flat_->layout());
  flat.set_trainable();
  const bool same_master = master_tier(options.tiers, flat) == master_tier(options.tiers, *flat_) &&
                           options.precision.masters.value_or(flat.dtypes().master) == flat.dtypes().master;
  if (flat.cut_by() == CutBy::rows && same_master) return;
  const auto thawed = std::ranges::find_if(tensors_, &at::Tensor::requires_grad) - tensors_.begin();
  throw InvalidArgument("Engine", cat("parameter ", flat_->slots()[static_cast<size_t>(thawed)].names.front(),
                                      " was frozen when the model was sharded and has requires_grad now: it has no "
                                      "gradient buffer. Unfreeze it before the model is sharded"));
}

void FlatBuffer::thaw() {
  flat_->set_trainable();
  take_gradients();
  take_room();
}

void FlatBuffer::replace(State state) {
  ComputeStorage storage(parameter_->take_storage(), *state.flat);
  // What was there goes before what comes is looked at: memory for both may not be there.
  parameter_.reset();
  const bool trainable = gradient_ != nullptr;
  gradient_.reset();
  flat_ = std::move(state.flat);
  shard_ = trainable ? shard_of(state.master) : Shard();
  parameter_ = std::make_unique<FlatParameter>(unit_.context(), *flat_, std::move(storage), std::move(state.master),
                                               std::move(state.piece));
  if (extension_ != nullptr) parameter_->extend(extension_);
  parameter_->share(std::move(state.shared));
  if (!trainable) return;
  shard_.grad = state.grad;
  gradient_ = std::make_unique<FlatGradient>(unit_.context(), *flat_, shard_);
  gradient_->set_memory(std::move(state.grad));
}

void FlatBuffer::extend(std::shared_ptr<GatherExtension> extension) {
  parameter_->extend(extension);
  extension_ = std::move(extension);
}

void FlatBuffer::take_room() {
  if (gradient_ && unit_.sharding().options.tiers.gradients == offload::Tier::disk) gradient_->memory();
}

}  // namespace tesserae::shard
