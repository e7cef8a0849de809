#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tesserae::launch {

/// Cuts a stream of bytes in lines; one of more than 1 MiB becomes several. A carriage return starts the line anew, as
/// on a terminal.
class LineReader {
 public:
  /// The lines that `bytes` complete, without their ends.
  std::vector<std::string> add(std::string_view bytes);
  /// What is left when the stream has ended: one line or none.
  std::vector<std::string> rest();

 private:
  std::string begun_;
};

}  // namespace tesserae::launch
