#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tesserae/base/error.h"

namespace tesserae::checkpoint {

/// One place at which a checkpoint is not what was written.
struct Fault {
  std::string file;                ///< path as the caller would open it
  std::string tensor;              ///< the first tensor concerned; empty: none, or unknown
  std::optional<uint64_t> offset;  ///< byte of the file at which the damaged run begins, if it is known
  std::string what;                ///< "block 3 has checksum 0123..., the manifest says 89ab..."

  std::string text() const;  ///< on one line: file, tensor, offset, what
};

/// Bytes of a checkpoint are not what was written, or cannot have been: never thrown for a failed system call, and
/// always before a byte of the block concerned counts as loaded.
class Damaged : public Corruption {
 public:
  Damaged(std::string_view function, Fault fault);
  const Fault& fault() const { return fault_; }

 private:
  Fault fault_;
};

}  // namespace tesserae::checkpoint
