#include "tesserae/os/port.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "tesserae/os/descriptor.h"
#include "tesserae/os/failure.h"

namespace tesserae::os {

uint16_t free_port() {
  const Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket) throw failure("free_port", "loopback", "cannot make a socket");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  // Port 0 asks the kernel to choose.
  if (::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    throw failure("free_port", "loopback", "cannot bind");
  }
  return ntohs(address.sin_port);
}

}  // namespace tesserae::os
