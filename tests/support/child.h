#pragma once

#include <sys/types.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/os/process.h"

namespace tesserae::testing {

/// A child of a test. As a copy of the test's own process it is there in a hundredth of the time (0.25 s of a
/// processor) that a program takes to load libtorch. Unlike os::Process it may be such a copy, which only a process
/// that never had a second thread can bear. It dies with the thread that started it, and with its owner.
class Child {
 public:
  using Environment = std::map<std::string, std::string>;  ///< added to this process's own

  /// `output`: the descriptor that becomes its standard output and error. It exits with what `main` returns.
  static Child copy(const Environment& environment, int output, const std::function<int()>& main);
  static Child program(const Environment& environment, int output, std::vector<std::string> words);

  ~Child();
  Child(Child&& other) noexcept;
  Child& operator=(Child&&) = delete;

  std::optional<os::Exit> poll();  ///< how it ended, or nothing if it still runs
  void signal(int number);

 private:
  explicit Child(pid_t id) : id_(id) {}

  pid_t id_ = -1;
  std::optional<os::Exit> exit_;
};

/// Whether this process has never had a second thread, and OpenMP is told to add none: a copy of it is as good as a new
/// one. (Threads that have ended leave something behind in libraries: of ranks that were copies of such a process one
/// in fourteen ended with std::terminate, or did not go on.)
bool may_go_on_as_a_copy();

}  // namespace tesserae::testing
