#include "tesserae/shard/unit.h"

#include "tesserae/shard/sharded_unit.h"

namespace tesserae::shard {

void UnitBase::before_forward() {
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

}  // namespace tesserae::shard
