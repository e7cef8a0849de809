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

/// What the first host's launcher tells another to do with a process. Processes have numbers over all hosts: those of
/// the job's start have their rank's.
struct Order {
  enum class Kind { kill, start, number };
  Kind kind = Kind::kill;
  int process = 0;
  int rank = 0;  ///< which it is from now on; unused by `kill`
  // To start it: in the place of one that has ended there, in the epoch that begins.
  int local_rank = 0, ranks = 0, epoch = 0;

  bool operator==(const Order&) const = default;
};

/// Of a job on several hosts whose ranks survive losses: what the launcher of the first host, which decides, and those
/// of the others tell each other through the store that the first one serves. host_links.cpp opens with the protocol.
/// Each is used from the thread of its launcher, and never waits for the network.
class OtherHosts {
 public:
  /// `store`: of this process. A host of which nothing is heard for `patience` is given up for good.
  OtherHosts(c10::intrusive_ptr<c10d::Store> store, int hosts, std::chrono::milliseconds patience);

  void look();
  bool given_up(int host) const { return hosts_[static_cast<size_t>(host)].given_up; }
  /// Its launcher has ended: no more of its processes is told.
  bool has_left(int host) const { return hosts_[static_cast<size_t>(host)].left; }
  /// That, or it was given up, or it is to end: no process starts there any more.
  bool starts_none(int host) const {
    const Host& of = hosts_[static_cast<size_t>(host)];
    return of.given_up || of.left || of.closes;
  }
  /// How a process of another host ended, if its launcher has said so.
  std::optional<os::Exit> exit_of(int process) const;
  /// The launcher of `host` is to do that, after what it was told before. A process is killed, with what it started,
  /// once: later calls do nothing. That it cannot be started is told as its end.
  void tell(int host, const Order& order);
  /// The job is over, with this status. Waits a moment for the others to hear of it.
  void end(int status);

 private:
  using Clock = std::chrono::steady_clock;
  struct Host {
    int64_t beats = 0;
    Clock::time_point changed;  ///< when `beats` was seen to grow
    bool given_up = false, left = false, closes = false;
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

 private:
  struct Heard;

  const std::shared_ptr<Heard> heard_;
  const std::chrono::milliseconds patience_;
  TimeLimiter limiter_;
};

}  // namespace tesserae::comm
