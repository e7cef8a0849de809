#include "tesserae/shard/unit.h"

#include "tesserae/base/error.h"
#include "tesserae/shard/sharded_unit.h"

namespace tesserae::shard {

void UnitBase::before_forward() {
  for (const auto& buffer : unit_->buffers()) buffer->parameter().require_views(buffer->tensors());
  unit_->before_forward();
}

void UnitBase::after_forward() {
  unit_->after_forward();
}

void UnitBase::cancel_forward() {
  if (unit_ != nullptr) unit_->cancel_forward();
}

at::Tensor UnitBase::on_input(const at::Tensor& input) {
  return unit_->on_input(input);
}

void UnitBase::on_output(const at::Tensor& output) {
  unit_->on_output(output);
}

void UnitBase::zero_gradients() {
  unit_->zero_grad();
}

void UnitBase::before_move(const torch::nn::Module& module, std::optional<c10::Device> device,
                           std::optional<c10::ScalarType> dtype) const {
  for (const auto& parameter : module.named_parameters()) {
    const at::Tensor& now = parameter.value();
    const bool moves = device && (device->type() != now.device().type() ||
                                  (device->has_index() && device->index() != now.device().index()));
    if (!moves && (!dtype || *dtype == now.scalar_type())) continue;
    throw InvalidArgument(
        "Unit::to",
        cat("parameter ", parameter.key(), " of unit \"", unit_->name(), "\" is sharded, and stays on ",
            now.device().str(), " in ", c10::toString(now.scalar_type()),
            ": move or convert the model before shard_model(); what it computes with is ", "Options::precision"));
  }
}

}  // namespace tesserae::shard
