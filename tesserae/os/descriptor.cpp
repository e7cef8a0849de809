#include "tesserae/os/descriptor.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include "tesserae/os/failure.h"

namespace tesserae::os {

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    reset();
    number_ = std::exchange(other.number_, -1);
  }
  return *this;
}

void Descriptor::reset() {
  if (number_ >= 0) ::close(std::exchange(number_, -1));
}

Pipe make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw failure("make_pipe", "pipe", "cannot create");
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

std::string read_some(int descriptor, size_t limit) {
  std::string bytes(limit, '\0');
  ssize_t count;
  do {
    count = ::read(descriptor, bytes.data(), bytes.size());
  } while (count < 0 && errno == EINTR);
  if (count < 0 && errno != EAGAIN && errno != EWOULDBLOCK) {
    throw failure("read_some", cat("descriptor ", descriptor), "cannot read");
  }
  bytes.resize(count < 0 ? 0 : static_cast<size_t>(count));
  return bytes;
}

std::vector<int> wait_readable(const std::vector<int>& descriptors, const Deadline& deadline) {
  std::vector<pollfd> polled;
  polled.reserve(descriptors.size());
  for (const int descriptor : descriptors) polled.push_back({.fd = descriptor, .events = POLLIN, .revents = 0});
  int ready;
  do {
    ready = ::poll(polled.data(), polled.size(), deadline.poll_milliseconds());
  } while ((ready < 0 && errno == EINTR) || (ready == 0 && !deadline.passed()));
  if (ready < 0) throw failure("wait_readable", cat(descriptors.size(), " descriptors"), "cannot poll");
  std::vector<int> readable;
  for (const pollfd& entry : polled) {
    if (entry.revents != 0) readable.push_back(entry.fd);
  }
  return readable;
}

void wait_ready(std::vector<Waited>& waited, const Deadline& deadline) {
  std::vector<pollfd> polled;
  polled.reserve(waited.size());
  for (const Waited& entry : waited) {
    const int events = (entry.to_read ? POLLIN : 0) | (entry.to_write ? POLLOUT : 0);
    polled.push_back({.fd = entry.descriptor, .events = static_cast<short>(events), .revents = 0});
  }
  int ready;
  do {
    ready = ::poll(polled.data(), polled.size(), deadline.poll_milliseconds());
  } while (ready < 0 && errno == EINTR);
  if (ready < 0) throw failure("wait_ready", cat(waited.size(), " descriptors"), "cannot poll");
  for (size_t i = 0; i < waited.size(); ++i) {
    const bool over = (polled[i].revents & (POLLERR | POLLHUP | POLLNVAL)) != 0;
    waited[i].readable = over || (polled[i].revents & POLLIN) != 0;
    waited[i].writable = over || (polled[i].revents & POLLOUT) != 0;
  }
}

}  // namespace tesserae::os
