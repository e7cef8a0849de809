#pragma once

namespace gloo::transport {

/// See [Note: Gloo's binary interface] in gloo/context.h.
class UnboundBuffer {
 public:
  virtual ~UnboundBuffer() = 0;
};

}  // namespace gloo::transport
