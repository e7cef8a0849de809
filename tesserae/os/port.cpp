#include "tesserae/os/port.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <memory>

#include "tesserae/base/error.h"
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

std::string own_address_towards(const std::string& address) {
  constexpr std::string_view function = "own_address_towards";
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_DGRAM;  // connecting one asks for the way, and sends nothing
  addrinfo* first = nullptr;
  const int error = ::getaddrinfo(address.c_str(), "9", &wanted, &first);
  if (error != 0) throw IoError(function, cat("'", address, "' is no host: ", ::gai_strerror(error)));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> found(first, &::freeaddrinfo);
  const Descriptor socket(::socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  if (!socket || ::connect(socket.get(), found->ai_addr, found->ai_addrlen) != 0 ||
      ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &size) != 0) {
    throw failure(function, address, "there is no way to it");
  }
  char text[NI_MAXHOST] = "";
  const int unknown =
      ::getnameinfo(reinterpret_cast<sockaddr*>(&own), size, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  if (unknown != 0) throw IoError(function, cat("this host has no address towards ", address));
  return text;
}

}  // namespace tesserae::os
