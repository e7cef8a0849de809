#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/comm/host_links.h"
#include "tesserae/comm/liveness/time_limiter.h"
#include "tesserae/os/process.h"

namespace tesserae::comm {

/// The host that decides as another one's launcher sees it: what it tells that one's, and hears from it (host_links.cpp
/// has the protocol; OtherHosts is the other side). Used from the thread of the launcher, which waits for the network
/// only while this is made; requests run on a thread of this object.
class DecidingHost {
 public:
  /// Waits until that launcher is there, for so long at most. `processes`: to one that has taken over, those of this
  /// host's ranks. Throws IoError if it does not come, or if this host has followed it before.
  DecidingHost(const std::string& address, uint16_t port, int host, std::chrono::milliseconds patience,
               std::chrono::milliseconds to_come = std::chrono::minutes(2),
               const std::optional<std::vector<RankProcess>>& processes = std::nullopt);
  /// Says goodbye, if there is still somebody to hear it.
  ~DecidingHost();

  /// Nothing more is said to it, not even goodbye: the job goes on without it.
  void abandon();
  void report(int process, const os::Exit& exit);
  /// This host starts no process any more.
  void close();
  /// Tells and hears what there is.
  void look();
  /// What is to be done, in this order; each once.
  std::vector<Order> orders();
  /// A spare process of this host has the place of one that is to be started (membership.h).
  void give_place(int64_t spare, const Order& order);
  /// The job's status, once it is over.
  std::optional<int> status() const;
  /// The store is gone, and never was a first launcher's that knew of this one: it was told that the job survives no
  /// loss. There is no status then, and nobody goes on without this host.
  bool is_alone() const;
  /// Why this host has no part in the job any more: it was given up, or nothing was heard of the first one for so long
  /// that it may have been. Its ranks must not run any more. Empty: it has.
  std::string cut_off() const;
  /// That launcher has said itself that the job goes on without this host.
  bool given_up() const;
  /// Nothing was heard of it for so long that it has claimed by now what it goes on with, if it lives.
  bool may_be_succeeded() const;
  /// The connection to it is gone.
  bool is_broken() const;

  /// What a launcher must know of the job that takes over.
  struct Known {
    int host = 0;                                   ///< of the launcher that tells it
    std::string job;                                ///< its name; empty: that launcher was not heard yet
    std::vector<int> gone;                          ///< hosts that have no part in it any more
    std::map<std::string, std::string> remembered;  ///< what ranks have told that launcher
  };
  /// From the first call on that launcher is asked for it, with what is told and heard.
  std::shared_ptr<const Known> known() const;

 private:
  struct Heard;

  const std::shared_ptr<Heard> heard_;
  const std::chrono::milliseconds patience_;
  TimeLimiter limiter_;
};

/// Whether a store answers there, within so long.
bool is_reached(const std::string& address, uint16_t port, std::chrono::milliseconds limit);

/// Beyond a host's patience with the one that decides, until it may take over: the other one's claim comes first.
inline constexpr std::chrono::milliseconds to_be_succeeded{4000};

}  // namespace tesserae::comm
