#include "tesserae/os/tcp_listener.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <memory>

#include "tesserae/os/failure.h"

namespace tesserae::os {
namespace {

using Found = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

Found look_up(std::string_view function, const std::string& host, uint16_t port) {
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  wanted.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* first = nullptr;
  const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &wanted, &first);
  if (error != 0) {
    throw IoError(function, cat("host '", host, "' is no address of this host: ", ::gai_strerror(error)));
  }
  return {first, &::freeaddrinfo};
}

bool is_loopback(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET) {
    return ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr) >> 24 == 127;
  }
  return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
}

}  // namespace

TcpListener::TcpListener(const std::string& host, uint16_t port) {
  constexpr std::string_view function = "TcpListener";
  const Found found = look_up(function, host, port);
  const std::string where = cat(host, ":", port);
  socket_ = Descriptor(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket_) throw failure(function, where, "cannot make a socket");
  const int yes = 1;  // a port whose last listener ended a moment ago is free
  ::setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (::bind(socket_.get(), found->ai_addr, found->ai_addrlen) != 0 || ::listen(socket_.get(), 128) != 0) {
    if (errno == EADDRINUSE) {
      throw AddressInUse(function, cat("port ", port, " of ", host, " is in use: give another, or 0 for a free one"));
    }
    throw failure(function, where, "cannot listen");
  }
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  char text[INET6_ADDRSTRLEN] = {};
  char number[8] = {};
  if (::getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&bound), &size) != 0 ||
      ::getnameinfo(reinterpret_cast<sockaddr*>(&bound), size, text, sizeof text, number, sizeof number,
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    throw failure(function, where, "cannot tell its address");
  }
  address_ = text;
  port_ = static_cast<uint16_t>(std::stoi(number));
  loopback_ = is_loopback(bound);
}

Descriptor TcpListener::accept() {
  int connection;
  do {
    connection = ::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  } while (connection < 0 && errno == EINTR);
  if (connection >= 0) {
    const int yes = 1;  // answers are small and somebody waits for them
    ::setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    return Descriptor(connection);
  }
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ECONNABORTED) return {};
  throw failure("TcpListener::accept", cat(address_, ":", port_), "cannot accept");
}

}  // namespace tesserae::os
