#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace tesserae {

/// Base of every error that this library throws. The text reads "[function] what happened, the values, what to do".
class Error : public std::runtime_error {
 public:
  /// `function`: the public name of the call that failed, for example "Layout".
  Error(std::string_view function, const std::string& message);
};

/// The caller passed something that cannot work (a degree that does not divide, an empty model). Nothing was changed.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// The operating system refused something: the text names the path and the reason.
class IoError : public Error {
 public:
  using Error::Error;
};

/// Bytes were read but are not what was written. Never thrown for a failed system call.
class Corruption : public Error {
 public:
  using Error::Error;
};

/// There is not enough memory for what was asked. Nothing was changed.
class OutOfMemory : public Error {
 public:
  using Error::Error;
};

/// Joins its arguments into one string with operator<<.
template <class... Parts>
std::string cat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace tesserae
