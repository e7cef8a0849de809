#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "tesserae/mesh/launch.h"

namespace tesserae::train {

/// What a launcher that replaces lost ranks tells those that are left, and they tell it. membership.cpp opens with the
/// protocol. Ranks are the launcher's.
class MembershipServer {
 public:
  /// Serves the job's store at a free port. Throws IoError.
  MembershipServer();

  uint16_t port() const { return port_; }
  int epoch() const { return epoch_; }
  /// Ranks that others have heard nothing of, in this epoch.
  std::vector<int> silent();
  /// How many ranks have said that their operations failed, in this epoch.
  int failed();
  /// The next epoch begins: lost ranks have been replaced.
  void begin_epoch();
  /// There will be none: the job ends.
  void end();

 private:
  void announce(const std::string& what);

  c10::intrusive_ptr<c10d::Store> store_;
  uint16_t port_ = 0;
  int epoch_ = 0;
};

/// The side of a rank. Used from the training thread.
class Membership {
 public:
  /// Throws IoError if the launcher cannot be reached.
  explicit Membership(const mesh::Launch& launch);

  /// Whether the launcher replaces lost ranks.
  bool recovers() const { return store_ != nullptr; }
  /// In which the ranks meet next.
  int epoch() const { return epoch_; }
  /// An operation failed because of a lost rank, and nothing was heard of `silent`. Waits for the launcher to begin the
  /// next epoch. False: there will be none, now or within the deadline, or the launcher does not replace ranks.
  bool next_epoch(const std::vector<int>& silent, std::chrono::milliseconds deadline);
  /// Whether the launcher has begun a later epoch than epoch(), or ends the job: nobody meets in this one any more.
  bool is_over();

  /// What those must know who come when all who knew are gone; rank 0 tells it.
  void remember(const std::string& key, const std::string& value);
  std::string remembered(const std::string& key);  ///< empty: nothing was

 private:
  c10::intrusive_ptr<c10d::Store> store_;  // null: a loss ends the job
  int epoch_ = 0;
};

/// In the environment of a rank whose launcher replaces lost ranks: the epoch in which it begins.
inline constexpr const char* epoch_variable = "TESSERAE_EPOCH";

}  // namespace tesserae::train
