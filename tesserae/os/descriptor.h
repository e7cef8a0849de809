#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tesserae/os/clock.h"

namespace tesserae::os {

/// Owns a file descriptor and closes it. Move-only; -1 is none.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept;

  int get() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }
  void reset();                                         ///< closes it now
  int release() { return std::exchange(number_, -1); }  ///< gives it up without closing

 private:
  int number_ = -1;
};

/// A pipe whose ends are not inherited by child processes (Command hands on the ones that it is told to).
struct Pipe {
  Descriptor read, write;
};
Pipe make_pipe();

/// What can be read at once, at most `limit` bytes; waits for the first byte. Empty: the other side closed, or the
/// descriptor does not block and has nothing.
std::string read_some(int descriptor, size_t limit = 65536);

/// The descriptors that can be read (or whose other side closed), waiting for the first one. Empty: the deadline
/// passed. Negative descriptors are skipped.
std::vector<int> wait_readable(const std::vector<int>& descriptors, const Deadline& deadline);

/// A descriptor to wait for, and what became of it. A side that closed counts as readable and writable.
struct Waited {
  int descriptor = -1;  ///< negative: skipped
  bool to_read = false, to_write = false;
  bool readable = false, writable = false;
};
/// Waits for the first one, at most until the deadline, and fills in what each can do.
void wait_ready(std::vector<Waited>& waited, const Deadline& deadline);

}  // namespace tesserae::os
