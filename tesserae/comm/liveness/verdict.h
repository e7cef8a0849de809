#pragma once

#include <string>
#include <vector>

namespace tesserae::comm {

/// Why an operation cannot go on.
struct Verdict {
  enum class Kind { lost, timeout, mismatch, absent };  ///< absent: a timeout whose ranks are alive
  Kind kind = Kind::lost;
  std::vector<int> ranks;  ///< job ranks: lost (the first in front), silent or absent (comm::Timeout)
  std::string text;        ///< what is known besides the ranks

  bool is_timeout() const { return kind == Kind::timeout || kind == Kind::absent; }
  /// Of a timeout: for whom one has waited, in words; empty: nobody can be named.
  std::string missing() const;

  /// Throws PeerLost, Timeout or Mismatch; `what` describes the operation.
  [[noreturn]] void raise(const std::string& what) const;
};

}  // namespace tesserae::comm
