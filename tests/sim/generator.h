#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

#include <cstdint>

namespace tesserae::sim {

/// Random numbers of a device. An operator that draws takes one number of it when it is enqueued, the seed of all that
/// it draws when it runs: so numbers follow the order of the host, and nobody waits for the device. They are not those
/// of the CPU for the same seed, as CUDA's are not.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex device);

  /// The seed of the next operator.
  uint64_t draw();

  void set_current_seed(uint64_t seed) override { engine_->set_current_seed(seed); }
  uint64_t current_seed() const override { return engine_->current_seed(); }
  uint64_t seed() override { return engine_->seed(); }
  void set_offset(uint64_t offset) override { engine_->set_offset(offset); }
  uint64_t get_offset() const override { return engine_->get_offset(); }
  void set_state(const c10::TensorImpl& state) override { engine_->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return engine_->get_state(); }
  static c10::DeviceType device_type() { return c10::kPrivateUse1; }

 private:
  Generator* clone_impl() const override;
  c10::intrusive_ptr<at::CPUGeneratorImpl> engine_;
};

/// That of a device, used where an operator is given none.
const at::Generator& default_generator(c10::DeviceIndex device);

}  // namespace tesserae::sim
