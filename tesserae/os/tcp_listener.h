#pragma once

#include <cstdint>
#include <string>

#include "tesserae/os/descriptor.h"
#include "tesserae/os/local_socket.h"

namespace tesserae::os {

/// Listens at a TCP port for connections from browsers and the like. Used from one thread.
class TcpListener {
 public:
  /// `host`: an address or a name of this host ("127.0.0.1", "localhost", "::1", "0.0.0.0"). Port 0: the system
  /// chooses. Throws AddressInUse if the port is taken, IoError if this host has no such address or may not use the
  /// port.
  TcpListener(const std::string& host, uint16_t port);

  /// Somebody who has connected; none if there is nobody. Never blocks, and neither does what it returns. Readable
  /// (wait_readable on descriptor()) once there is somebody. Throws IoError: this process has no descriptor left, say.
  Descriptor accept();
  int descriptor() const { return socket_.get(); }
  /// For somebody else to accept from, and to close.
  int release() { return socket_.release(); }

  uint16_t port() const { return port_; }
  const std::string& address() const { return address_; }  ///< in numbers: "127.0.0.1", "::1"
  bool loopback() const { return loopback_; }              ///< only processes of this host can connect

 private:
  std::string address_;
  uint16_t port_ = 0;
  bool loopback_ = false;
  Descriptor socket_;
};

}  // namespace tesserae::os
