#include "tesserae/os/packet_socket.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "tesserae/base/error.h"
#include "tesserae/os/failure.h"

namespace tesserae::os {
namespace {

constexpr size_t most_descriptors = 8;
constexpr size_t longest = 65536;

}  // namespace

PacketPair make_packet_pair() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    throw failure("make_packet_pair", "a pair of sockets", "cannot be made");
  }
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

bool send_packet(int connection, std::string_view bytes, const std::vector<int>& descriptors) {
  if (descriptors.size() > most_descriptors) {
    throw InvalidArgument("send_packet", cat(descriptors.size(), " descriptors, at most ", most_descriptors));
  }
  iovec content{const_cast<char*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char space[CMSG_SPACE(most_descriptors * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &content;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    const size_t size = descriptors.size() * sizeof(int);
    message.msg_control = space;
    message.msg_controllen = CMSG_SPACE(size);
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(size);
    std::memcpy(CMSG_DATA(header), descriptors.data(), size);
  }
  ssize_t sent = -1;
  do sent = ::sendmsg(connection, &message, MSG_NOSIGNAL);
  while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(bytes.size());
}

std::optional<std::string> receive_packet(int connection) {
  std::string bytes(longest, '\0');
  ssize_t received = -1;
  do received = ::recv(connection, bytes.data(), bytes.size(), 0);
  while (received < 0 && errno == EINTR);
  if (received <= 0) return std::nullopt;
  bytes.resize(static_cast<size_t>(received));
  return bytes;
}

}  // namespace tesserae::os
