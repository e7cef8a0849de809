#pragma once

#include <c10/core/DeviceType.h>

#include <string_view>

namespace tesserae::comm {

/// The backend of FabricOptions that moves tensors of such devices where they lie, on streams; "" if there is none. All
/// that is known of kinds of devices: elsewhere a device is the CPU, or has streams, events and an allocator of c10's.
std::string_view device_transport(c10::DeviceType type);

}  // namespace tesserae::comm
