#pragma once

#include <string_view>

#include "tesserae/base/error.h"
#include "tesserae/os/descriptor.h"
#include "tesserae/os/files.h"

namespace tesserae::os {

/// Somebody listens at that path already.
class AddressInUse : public IoError {
 public:
  using IoError::IoError;
};

/// A Unix domain socket: a file through which processes of the same user and host talk to this one. No network, and no
/// other rights than those of the file, which has mode 0600 from its first moment on.
///
/// The path may be longer than the 107 bytes that the system takes for a socket. Used from one thread.
class LocalListener {
 public:
  /// Listens at `path`, in a directory that exists. The file of a listener that has died is replaced. Throws
  /// AddressInUse if one is alive, IoError where the file cannot be made or is no socket.
  explicit LocalListener(const Path& path);
  /// Takes the file away, unless it is another listener's by now.
  ~LocalListener();
  LocalListener(const LocalListener&) = delete;
  LocalListener& operator=(const LocalListener&) = delete;

  /// Somebody who has connected; none if there is nobody. Never blocks, and neither does what it returns. Readable
  /// (wait_readable on descriptor()) once there is somebody.
  Descriptor accept();
  int descriptor() const { return socket_.get(); }
  const Path& path() const { return path_; }

 private:
  Path path_;
  Descriptor socket_;
  uint64_t device_ = 0, inode_ = 0;  // of the file that this listener made
};

/// A connection to who listens at `path`; none if nobody does: no such file, or one that was left behind. Throws
/// IoError for any other reason (the file belongs to another user).
Descriptor connect_local(const Path& path);

/// Sends what a connection takes at once and returns how many bytes that was; 0 if the other side does not read. Never
/// raises SIGPIPE. Throws IoError if the other side is gone.
size_t send_some(int connection, std::string_view bytes);

}  // namespace tesserae::os
