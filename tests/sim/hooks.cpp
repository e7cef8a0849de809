#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceType.h>

#include <mutex>

#include "tests/sim/device.h"
#include "tests/sim/generator.h"
#include "tests/sim/guard.h"
#include "tests/sim/operators.h"

namespace tesserae::sim {
namespace {

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return Device::find(device) != nullptr; }

  c10::DeviceIndex deviceCount() const override { return device_count; }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device() : device);
  }

  at::Device getDeviceFromPtr(void* address) const override {
    for (c10::DeviceIndex index = 0; index < device_count; ++index) {
      const Device* const known = Device::find(index);
      if (known && known->memory().holds(address)) return device(index);
    }
    TORCH_CHECK(false, "[sim] ", address, " is no address of a device");
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getHostAllocator(c10::kPrivateUse1); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), bytes);
  }
};

}  // namespace

void install_hooks() {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

void install() {
  static std::once_flag once;
  std::call_once(once, [] {
    c10::register_privateuse1_backend("sim");
    install_guard();
    install_allocators();
    install_hooks();
    install_operators();
    report_faults();
  });
}

}  // namespace tesserae::sim
