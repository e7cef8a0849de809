#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tesserae/base/error.h"

namespace tesserae::comm {

/// Who asks for an operation: names in errors and logs. Set by the engine; empty strings are left out of texts.
struct Label {
  std::string_view unit;  ///< must outlive the operation
  int64_t step = -1;      ///< the step of the job; -1: none has begun
  /// Of what the data are, where sizes alone do not tell: a hash, on which members must agree. NCCL cannot compare it.
  uint32_t contents = 0;
};

/// A collective operation failed. The text names operation (with its sequence number), group, rank, unit and step.
/// After any CommError the group that threw it is unusable; the job ends or restarts from a checkpoint.
class CommError : public Error {
 public:
  using Error::Error;
};

/// A rank of the job is gone: its process ended, or its connection broke. `ranks` are job ranks, those lost first in
/// front.
class PeerLost : public CommError {
 public:
  PeerLost(std::string_view function, const std::string& message, std::vector<int> lost)
      : CommError(function, message), ranks(std::move(lost)) {}
  std::vector<int> ranks;  ///< those that were lost, ascending
};

/// Of a group that is not made, because these of its members ended or left the job meanwhile.
PeerLost lost_while_made(const std::string& group, std::vector<int> gone);

/// The deadline passed. Job ranks that others have waited for, ascending; both are empty where it cannot be told.
class Timeout : public CommError {
 public:
  Timeout(std::string_view function, const std::string& message, std::vector<int> silent_ranks,
          std::vector<int> absent_ranks = {})
      : CommError(function, message), silent(std::move(silent_ranks)), absent(std::move(absent_ranks)) {}
  /// Both together.
  std::vector<int> missing() const;
  std::vector<int> silent;  ///< no sign of life for a while: stopped, swapped out, or never come
  std::vector<int> absent;  ///< alive, and in no operation for some seconds while others wait
};

/// Thrown in a child that was forked from a rank: what `function` needs, threads and connections, are the parent's.
class ForkedChild : public CommError {
 public:
  explicit ForkedChild(std::string_view function)
      : CommError(function,
                  "this process was forked from a rank, and threads and connections are the rank's alone; use "
                  "the model in the rank, or start the process by spawn instead of fork") {}
};

/// Ranks disagree on what they do (another operation, size, dtype or model). The text gives both sides.
class Mismatch : public CommError {
 public:
  using CommError::CommError;
};

/// What an exception says; of one of torch's, without where in torch it was thrown.
std::string reason_of(const std::exception& failure);

}  // namespace tesserae::comm
