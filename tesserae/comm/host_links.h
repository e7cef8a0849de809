#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tesserae/comm/liveness/time_limiter.h"
#include "tesserae/os/process.h"

namespace tesserae::comm {

/// Of a job on several hosts whose ranks survive losses: what the launcher of the first host, which decides, and those
/// of the others tell each other through the store that the first one serves. host_links.cpp opens with the protocol.
/// Ranks are those of the job's start. Each is used from the thread of its launcher, and never waits for the network.
class OtherHosts {
 public:
  /// `store`: of this process. A host of which nothing is heard for `patience` is given up for good.
  OtherHosts(c10::intrusive_ptr<c10d::Store> store, int hosts, std::chrono::milliseconds patience);

  void look();
  bool given_up(int host) const { return hosts_[static_cast<size_t>(host)].given_up; }
  /// Its launcher has ended: no more of its ranks is told.
  bool has_left(int host) const { return hosts_[static_cast<size_t>(host)].left; }
  /// How a rank of another host ended, if its launcher has said so.
  std::optional<os::Exit> exit_of(int rank) const;
  /// The launcher of `host` is to kill that rank and what it started. Only the first call does something.
  void kill(int host, int rank);
  /// The job is over, with this status. Waits a moment for the others to hear of it.
  void end(int status);

 private:
  using Clock = std::chrono::steady_clock;
  struct Host {
    int64_t beats = 0;
    Clock::time_point changed;  ///< when `beats` was seen to grow
    bool given_up = false, left = false;
    int orders = 0;
  };

  c10::intrusive_ptr<c10d::Store> store_;
  const std::chrono::milliseconds patience_;
  std::vector<Host> hosts_;  // that of this process too
  std::map<int, os::Exit> exits_;
  std::set<int> killed_;
  Clock::time_point next_look_;
};

/// The same seen from another host: what its launcher tells the first one, and hears from it. Requests run on a thread
/// of this object.
class FirstHost {
 public:
  /// Waits until the first launcher is there. Throws IoError if it does not come, or if this host has been in the job
  /// before.
  FirstHost(const std::string& address, uint16_t port, int host, std::chrono::milliseconds patience);
  /// Says goodbye, if there is still somebody to hear it.
  ~FirstHost();

  void report(int rank, const os::Exit& exit);
  /// Tells and hears what there is.
  void look();
  /// Ranks that are to be killed; each once.
  std::vector<int> to_kill();
  /// The job's status, once it is over.
  std::optional<int> status() const;
  /// The store is gone, and never was a first launcher's that knew of this one: it was told that the job survives no
  /// loss. There is no status then, and nobody goes on without this host.
  bool is_alone() const;
  /// Why this host has no part in the job any more: it was given up, or nothing was heard of the first one for so long
  /// that it may have been. Its ranks must not run any more. Empty: it has.
  std::string cut_off() const;

 private:
  struct Heard;

  const std::shared_ptr<Heard> heard_;
  const std::chrono::milliseconds patience_;
  TimeLimiter limiter_;
};

}  // namespace tesserae::comm
