#pragma once

#include <gloo/transport/unbound_buffer.h>

namespace gloo::transport {

/// See [Note: Gloo's binary interface] in gloo/context.h.
class Device;

}  // namespace gloo::transport
