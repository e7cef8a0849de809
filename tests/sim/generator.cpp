#include "tests/sim/generator.h"

#include <array>

#include "tests/sim/device.h"

namespace tesserae::sim {

Generator::Generator(c10::DeviceIndex device)
    : GeneratorImpl(sim::device(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      engine_(c10::make_intrusive<at::CPUGeneratorImpl>()) {}

uint64_t Generator::draw() {
  const std::lock_guard lock(mutex_);
  return engine_->random64();
}

Generator* Generator::clone_impl() const {
  auto* const clone = new Generator(device().index());
  clone->engine_->set_state(*engine_->get_state());
  return clone;
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static const auto all = [] {
    std::array<at::Generator, device_count> made;
    for (c10::DeviceIndex index = 0; index < device_count; ++index) {
      made[static_cast<size_t>(index)] = at::make_generator<Generator>(index);
    }
    return new std::array(made);
  }();
  return all->at(static_cast<size_t>(device < 0 ? current_device() : device));
}

}  // namespace tesserae::sim
