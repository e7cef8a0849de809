#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/os/descriptor.h"
#include "tesserae/os/process.h"

namespace tesserae {

/// A program that a test started, with what it writes. Killed when it goes out of scope.
class Program {
 public:
  explicit Program(std::vector<std::string> arguments, std::map<std::string, std::string> environment = {})
      : Program(std::move(arguments), std::move(environment), os::make_pipe(), os::make_pipe()) {}

  os::Process& process() { return process_; }

  /// Reads until `text` was written to either stream or the deadline passed.
  bool wait_for(const std::string& text, std::chrono::seconds deadline = std::chrono::seconds(60)) {
    const os::Deadline end(deadline);
    while (!end.passed()) {
      if (output.find(text) != std::string::npos || errors.find(text) != std::string::npos) return true;
      if (!read(end)) return false;
    }
    return false;
  }

  /// Reads both streams to their ends and returns how it ended; nothing if it still runs at the deadline.
  std::optional<os::Exit> finish(std::chrono::seconds deadline = std::chrono::seconds(120)) {
    const os::Deadline end(deadline);
    while (!end.passed() && read(end)) {
    }
    return process_.wait(end);
  }

  /// From now on nobody reads its standard output, or nothing that it writes.
  void stop_reading_output() { output_.reset(); }
  void stop_reading() {
    output_.reset();
    errors_.reset();
  }

  std::string output, errors;

 private:
  Program(std::vector<std::string> arguments, std::map<std::string, std::string> environment, os::Pipe output,
          os::Pipe errors)
      : output_(std::move(output.read)),
        errors_(std::move(errors.read)),
        process_(os::Process::spawn({.arguments = std::move(arguments),
                                     .environment = std::move(environment),
                                     .die_with_parent = true,
                                     .new_group = true,
                                     .output = output.write.get(),
                                     .errors = errors.write.get()})) {}

  /// False: both streams have ended.
  bool read(const os::Deadline& deadline) {
    if (!output_ && !errors_) return false;
    for (const int ready : os::wait_readable({output_.get(), errors_.get()}, deadline)) {
      os::Descriptor& from = ready == output_.get() ? output_ : errors_;
      const std::string bytes = os::read_some(ready);
      (&from == &output_ ? output : errors) += bytes;
      if (bytes.empty()) from.reset();
    }
    return true;
  }

  os::Descriptor output_, errors_;
  os::Process process_;
};

}  // namespace tesserae
