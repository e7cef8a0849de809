#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tesserae/os/descriptor.h"

namespace tesserae::os {

/// Two ends of a connection between this process and one that it starts: what is sent comes as it was sent, or not at
/// all, and may carry descriptors. Neither end is inherited (Command::kept hands one on).
struct PacketPair {
  Descriptor ours, theirs;
};
PacketPair make_packet_pair();

/// Sends `bytes` and copies of `descriptors` (at most 8). False: the other side is gone, or does not take so much at
/// once (some 200 kB). Never raises SIGPIPE.
bool send_packet(int connection, std::string_view bytes, const std::vector<int>& descriptors);

/// What the other side sent, waiting for it; the first 64 KiB of it, without descriptors. Nothing: it is gone.
std::optional<std::string> receive_packet(int connection);

}  // namespace tesserae::os
