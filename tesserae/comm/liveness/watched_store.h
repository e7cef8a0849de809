#pragma once

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tesserae/comm/liveness/liveness.h"

namespace tesserae::comm {

/// The part of the job's store through which a group is made. Its waits end when a member is gone, so that nobody waits
/// until the deadline for what a dead rank was to say; that holds for whatever library is given the store.
class WatchedStore final : public c10d::PrefixStore {
 public:
  /// Whose group it is.
  struct Party {
    std::string name;
    std::vector<int> members;            ///< job ranks
    std::chrono::milliseconds deadline;  ///< of each wait
    std::shared_ptr<Liveness> liveness;
    std::shared_ptr<TimeLimiter> limiter;  ///< for questions to the store
  };
  WatchedStore(Party party, const std::string& prefix, c10::intrusive_ptr<c10d::Store> store);

  /// Throws PeerLost if a member is lost or has left, Timeout once the deadline has passed. With that of the party it
  /// looks for some seconds more who is missing, and names them.
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  void wait(const std::vector<std::string>& keys) override { wait(keys, party_.deadline); }
  std::vector<uint8_t> get(const std::string& key) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  c10::intrusive_ptr<c10d::Store> clone() override;

 private:
  template <class Request>
  auto ask(Request request);
  template <class Request>
  auto find(const Request& request, std::chrono::milliseconds timeout);
  [[noreturn]] void give_up(std::chrono::milliseconds timeout);

  Party party_;
};

/// Whether `store` is a watched one, or a part of one.
bool is_watched(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace tesserae::comm
