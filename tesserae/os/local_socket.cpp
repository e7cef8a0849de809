#include "tesserae/os/local_socket.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tesserae/os/failure.h"

namespace tesserae::os {
namespace {

/// A path as the system takes it for a socket. A long one goes through a descriptor of its directory, which the address
/// keeps open.
struct Address {
  sockaddr_un value{};
  Descriptor directory;

  Address(std::string_view function, const Path& path) {
    std::string name = path.native();
    if (name.size() >= sizeof value.sun_path) {
      const Path parent = path.has_parent_path() ? path.parent_path() : Path(".");
      directory = Descriptor(::open(parent.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
      if (!directory) throw failure(function, path.native(), "cannot open its directory");
      name = cat("/proc/self/fd/", directory.get(), "/", path.filename().native());
    }
    if (name.size() >= sizeof value.sun_path) {
      throw failure(function, path.native(), "the name of the file is too long for a socket", ENAMETOOLONG);
    }
    value.sun_family = AF_UNIX;
    std::memcpy(value.sun_path, name.c_str(), name.size() + 1);
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&value); }
};

Descriptor make_socket(std::string_view function, const Path& path) {
  Descriptor made(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!made) throw failure(function, path.native(), "cannot make a socket");
  return made;
}

bool is_socket_file(const Path& path) {
  struct stat found {};
  return ::lstat(path.c_str(), &found) == 0 && S_ISSOCK(found.st_mode);
}

}  // namespace

LocalListener::LocalListener(const Path& path) : path_(std::filesystem::absolute(path)) {
  constexpr std::string_view function = "LocalListener";
  const Address address(function, path_);
  socket_ = make_socket(function, path_);
  // The file takes the mode that the socket has when it is bound: it is never open to others, not even for a moment.
  if (::fchmod(socket_.get(), S_IRUSR | S_IWUSR) != 0) throw failure(function, path_.native(), "cannot set its mode");
  int bound = ::bind(socket_.get(), address.get(), sizeof address.value);
  if (bound != 0 && errno == EADDRINUSE && is_socket_file(path_)) {
    if (connect_local(path_)) {
      throw AddressInUse(function,
                         cat(path_.native(), ": another process listens there; end it, or use another folder"));
    }
    ::unlink(path_.c_str());
    bound = ::bind(socket_.get(), address.get(), sizeof address.value);
  }
  if (bound != 0) throw failure(function, path_.native(), "cannot bind a socket to it");
  struct stat made {};
  if (::lstat(path_.c_str(), &made) == 0) {
    device_ = made.st_dev;
    inode_ = made.st_ino;
  }
  if (::listen(socket_.get(), 16) != 0) throw failure(function, path_.native(), "cannot listen");
}

LocalListener::~LocalListener() {
  struct stat found {};
  if (::lstat(path_.c_str(), &found) != 0 || found.st_dev != device_ || found.st_ino != inode_) return;
  ::unlink(path_.c_str());
}

Descriptor LocalListener::accept() {
  int connection;
  do {
    connection = ::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  } while (connection < 0 && errno == EINTR);
  if (connection >= 0) return Descriptor(connection);
  // One that hung up before it was seen is nobody.
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ECONNABORTED) return {};
  throw failure("LocalListener::accept", path_.native(), "cannot accept");
}

Descriptor connect_local(const Path& path) {
  constexpr std::string_view function = "connect_local";
  if (!files().exists(path)) return {};
  const Address address(function, path);
  Descriptor connection = make_socket(function, path);
  int done;
  do {
    done = ::connect(connection.get(), address.get(), sizeof address.value);
  } while (done != 0 && errno == EINTR);
  if (done == 0) return connection;
  if (errno == ECONNREFUSED || errno == ENOENT) return {};
  throw failure(function, path.native(), errno == EAGAIN ? "too many others are waiting there" : "cannot connect");
}

size_t send_some(int connection, std::string_view bytes) {
  ssize_t count;
  do {
    count = ::send(connection, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (count < 0 && errno == EINTR);
  if (count >= 0) return static_cast<size_t>(count);
  if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
  throw failure("send_some", cat("descriptor ", connection), "the other side is gone");
}

}  // namespace tesserae::os
