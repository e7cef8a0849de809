#include "tests/sim/guard.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "tests/sim/device.h"
#include "tests/sim/waits.h"

namespace tesserae::sim {
namespace {

Device& device_of(const c10::Stream& stream) {
  return Device::at(stream.device_index());
}

Stream& queue_of(const c10::Stream& stream) {
  return device_of(stream).stream(stream.id());
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kPrivateUse1; }

  c10::Device exchangeDevice(c10::Device wanted) const override {
    const c10::Device before = getDevice();
    setDevice(wanted);
    return before;
  }
  c10::Device getDevice() const override { return device(current_device()); }
  void setDevice(c10::Device wanted) const override {
    TORCH_CHECK(wanted.is_privateuseone() && wanted.index() >= 0 && wanted.index() < device_count,
                "[sim] there is no device ", wanted, ", only sim:0 to sim:", static_cast<int>(device_count) - 1);
    exchange_device(wanted.index());
  }
  void uncheckedSetDevice(c10::Device wanted) const noexcept override { exchange_device(wanted.index()); }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count; }
  c10::DeviceCapability getDeviceCapability(c10::Device /*device*/) const override { return {}; }

  c10::Stream getStream(c10::Device device) const override { return stream(device, current_stream(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return stream(device, Device::at(index_of(device)).next_stream(high_priority));
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return getStreamFromGlobalPool(device, priority < 0);  // as in CUDA: lower numbers go first
  }
  c10::Stream exchangeStream(c10::Stream wanted) const override {
    return stream(wanted.device(), exchange_stream(wanted.device_index(), wanted.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &queue_of(stream); }
  bool queryStream(const c10::Stream& stream) const override { return queue_of(stream).idle(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    if (!left_out(Wait::synchronize)) device_of(stream).synchronize(queue_of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { Device::at(device).synchronize(); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    c10::getDeviceAllocator(c10::kPrivateUse1)->recordStream(pointer, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device,
              const c10::EventFlag /*flag*/) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "[sim] an event of device ", device,
                " is recorded on a stream of device ", stream.device_index(), "; events stay with their device");
    if (!*event) *event = new DeviceEvent{{}, stream.device_index()};
    if (!left_out(Wait::record)) as_event(*event).event.record(queue_of(stream).record());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event && !left_out(Wait::block)) queue_of(stream).wait_for(as_event(event).event.last());
  }
  bool queryEvent(void* event) const override {
    const MomentPtr moment = event ? as_event(event).event.last() : nullptr;
    return !moment || left_out(Wait::query) || moment->reached();
  }
  void synchronizeEvent(void* event) const override {
    if (!event || left_out(Wait::synchronize)) return;
    if (const MomentPtr moment = as_event(event).event.last()) Device::at(as_event(event).device).synchronize(*moment);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex /*device*/) const override {
    const auto duration = as_event(to).event.last()->when() - as_event(from).event.last()->when();
    return std::chrono::duration<double, std::milli>(duration).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<DeviceEvent*>(event);
  }

 private:
  struct DeviceEvent {
    Event event;
    c10::DeviceIndex device;
  };
  static DeviceEvent& as_event(void* event) { return *static_cast<DeviceEvent*>(event); }
  static c10::DeviceIndex index_of(c10::Device device) {
    return device.has_index() ? device.index() : current_device();
  }
  static c10::Stream stream(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, sim::device(index_of(device)), id);
  }
};

}  // namespace

void install_guard() {
  c10::impl::registerDeviceGuard(c10::kPrivateUse1, new Guard);
}

}  // namespace tesserae::sim
