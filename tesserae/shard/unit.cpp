#include "tesserae/shard/unit.h"

#include "tesserae/shard/engine.h"

namespace tesserae::shard {

void UnitBase::before_forward() {
  engine_->before_forward(unit_);
}

void UnitBase::after_forward() {
  engine_->after_forward(unit_);
}

at::Tensor UnitBase::on_input(const at::Tensor& input) {
  return engine_->on_input(unit_, input);
}

void UnitBase::on_output(const at::Tensor& output) {
  engine_->on_output(unit_, output);
}

}  // namespace tesserae::shard
