#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>
#include <map>
#include <optional>
#include <string>

#include "tesserae/os/clock.h"
#include "tesserae/os/descriptor.h"
#include "tesserae/os/local_socket.h"

namespace tesserae::watch {

/// A connection of a test to a server of this host, which sends what it is told to, HTTP or not.
class Talk {
 public:
  explicit Talk(uint16_t port, const char* host = "127.0.0.1")
      : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    ::inet_pton(AF_INET, host, &address.sin_addr);
    connected_ = ::connect(socket_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  }
  bool connected() const { return connected_; }

  /// False: the other side has hung up.
  bool send(std::string_view bytes) {
    const os::Deadline end(std::chrono::seconds(30));
    try {
      while (!bytes.empty() && !end.passed()) {
        const size_t sent = os::send_some(socket_.get(), bytes);
        bytes.remove_prefix(sent);
        if (sent == 0) os::sleep_for(std::chrono::milliseconds(1));
      }
    } catch (const IoError&) {
      return false;
    }
    return bytes.empty();
  }

  struct Answer {
    int status = 0;  ///< 0: none came
    std::map<std::string, std::string> headers;
    std::string body;
  };
  /// The next answer, at most until the deadline.
  Answer answer(std::chrono::seconds patience = std::chrono::seconds(30), bool head = false) {
    const os::Deadline end(patience);
    size_t stop;
    while ((stop = in_.find("\r\n\r\n")) == std::string::npos) {
      if (!more(end)) return {};
    }
    Answer answer{.status = std::stoi(in_.substr(9, 3)), .headers = {}, .body = {}};
    for (size_t at = in_.find("\r\n") + 2; at < stop + 2;) {
      const size_t next = in_.find("\r\n", at), colon = in_.find(": ", at);
      answer.headers[in_.substr(at, colon - at)] = in_.substr(colon + 2, next - colon - 2);
      at = next + 2;
    }
    in_.erase(0, stop + 4);
    const auto length = answer.headers.find("Content-Length");
    const size_t wanted = head || length == answer.headers.end() ? 0 : std::stoul(length->second);
    while (in_.size() < wanted) {
      if (!more(end)) return {};
    }
    answer.body = in_.substr(0, wanted);
    in_.erase(0, wanted);
    return answer;
  }

  /// True once the other side has closed the connection.
  bool closed(std::chrono::seconds patience = std::chrono::seconds(30)) {
    const os::Deadline end(patience);
    while (more(end)) {
    }
    return closed_;
  }

 private:
  bool more(const os::Deadline& end) {
    try {
      if (os::wait_readable({socket_.get()}, end).empty()) return false;
      const std::string bytes = os::read_some(socket_.get());
      in_ += bytes;
      closed_ = bytes.empty();
    } catch (const IoError&) {
      closed_ = true;
    }
    return !closed_;
  }

  os::Descriptor socket_;
  std::string in_;
  bool connected_ = false, closed_ = false;
};

}  // namespace tesserae::watch
