#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/os/files.h"

namespace tesserae::comm {

/// That the launcher of a host decides on the job from now on, or that the job is over.
struct Claim {
  int64_t generation = 0;  ///< 0: the one with which the job began
  int host = 0;
  std::string address = {};  ///< where it serves the job's store
  uint16_t port = 0;
  std::vector<int> without = {};   ///< hosts that have no part in the job any more
  std::optional<int> status = {};  ///< the job is over, with it

  bool operator==(const Claim&) const = default;
};

/// A job has no more claims than these.
inline constexpr int64_t generations_of_a_job = 1000;

/// Which launcher of a job on several hosts decides, where that can change: whose claim is the newest in a folder that
/// all hosts see. A generation has one claim: whoever comes later is refused. succession.cpp opens with the protocol.
class Succession {
 public:
  /// `job`: a name that no other job has. Nothing is done.
  Succession(os::Path folder, std::string job);

  /// Nothing: there is none, so this host does not see the job's folder. Throws IoError.
  std::optional<Claim> newest() const;
  /// False: that generation has another claim already, or the one before has none any more. What was granted lasts when
  /// this returns. Throws IoError; whether it was granted is then told to who claims the same again.
  bool claim(const Claim& claim) const;
  /// Removes all of them: the job is over, and everybody knows. What cannot be removed is left.
  void clear() const noexcept;

 private:
  os::Path path_of(int64_t generation) const;
  bool link(const std::string& text, const os::Path& name) const;
  std::vector<int64_t> generations() const;  // ascending

  os::Path folder_;
  std::string prefix_;
};

}  // namespace tesserae::comm
