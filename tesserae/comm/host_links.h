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
#include "tesserae/comm/succession.h"
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

/// A process of a rank, as its launcher tells the one that it follows from now on.
struct RankProcess {
  int number = 0, rank = 0, local_rank = 0;
  std::string name;  ///< process_variable (membership.h)

  bool operator==(const RankProcess&) const = default;
};

/// Of a job on several hosts whose ranks survive losses: what the launcher of the host that decides (the first, unless
/// another one has taken over), and those of the others tell each other through the store that it serves.
/// host_links.cpp opens with the protocol. Each is used from the thread of its launcher, and does not wait for the
/// network once it is made, but for the storage of a Succession.
class OtherHosts {
 public:
  /// `store`: of this process. A host of which nothing is heard for `patience` is given up for good. `succession`:
  /// where another host may take over; then `own`, the claim by which this one decides, says what is claimed next, and
  /// `gone` which hosts have no part in the job any more.
  OtherHosts(c10::intrusive_ptr<c10d::Store> store, int hosts, std::chrono::milliseconds patience,
             std::optional<Succession> succession = std::nullopt, Claim own = {}, const std::vector<int>& gone = {});

  void look();
  /// Which host decides in the place of this one; unset: this one does.
  std::optional<int> deposed_by() const { return deposed_by_; }
  /// The ranks' processes of a host that follows this one now; nothing: it has not come yet.
  std::optional<std::vector<RankProcess>> come_over(int host);
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
  /// It has no part in the job any more.
  void give_up(int host);
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

  bool is_gone(int host) const { return given_up(host) || has_left(host); }
  bool claim(Claim next);
  void mark_given_up(int host);
  void tell_who_is_gone();

  c10::intrusive_ptr<c10d::Store> store_;
  const std::chrono::milliseconds patience_;
  std::vector<Host> hosts_;  // that of this process too
  std::optional<Succession> succession_;
  Claim own_;  // the newest of this host
  std::optional<int> deposed_by_;
  bool failed_ = false;  // the last claim was neither granted nor refused
  std::map<int, os::Exit> exits_;
  std::set<int> killed_;
  Clock::time_point next_look_;
};

/// The same seen from another host: what its launcher tells the first one, and hears from it. Requests run on a thread
/// of this object.
class FirstHost {
 public:
  /// Waits until that launcher is there, for so long at most. `processes`: to one that has taken over, those of this
  /// host's ranks. Throws IoError if it does not come, or if this host has followed it before.
  FirstHost(const std::string& address, uint16_t port, int host, std::chrono::milliseconds patience,
            std::chrono::milliseconds to_come = std::chrono::minutes(2),
            const std::optional<std::vector<RankProcess>>& processes = std::nullopt);
  /// Says goodbye, if there is still somebody to hear it.
  ~FirstHost();

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
  Known known() const;

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
