#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tesserae/comm/host_links.h"
#include "tesserae/comm/succession.h"
#include "tesserae/os/process.h"

namespace tesserae::comm {

/// Of a job on several hosts whose ranks survive losses: what the launcher of the host that decides (the first, unless
/// another one has taken over) tells those of the others, and hears from them, through the store that it serves.
/// host_links.cpp opens with the protocol; DecidingHost is the other side. Used from the thread of the launcher; waits
/// for nothing but the storage of a Succession.
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
  /// Its launcher has ended.
  bool has_left(int host) const { return hosts_[static_cast<size_t>(host)].left; }
  /// Either: nothing more is told of its processes.
  bool is_gone(int host) const { return given_up(host) || has_left(host); }
  /// That, or it is to end: no process starts there any more.
  bool starts_none(int host) const { return is_gone(host) || hosts_[static_cast<size_t>(host)].closes; }
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

}  // namespace tesserae::comm
