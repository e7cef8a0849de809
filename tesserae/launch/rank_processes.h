#pragma once

#include <optional>
#include <vector>

#include "tesserae/comm/membership.h"
#include "tesserae/comm/other_hosts.h"
#include "tesserae/launch/host_ranks.h"
#include "tesserae/launch/inheritance.h"
#include "tesserae/os/signal_numbers.h"

namespace tesserae::launch {

/// The processes of a job's ranks for the launcher that decides on them: of this host, and of others, whose launchers
/// do what they are told (comm/other_hosts.h). Used from the launcher's thread.
class RankProcesses {
 public:
  /// Both outlive it. `membership`: null where no loss is survived: then only this host's processes are handled.
  RankProcesses(HostRanks& host, comm::MembershipServer* membership);
  /// Of a launcher that has taken over.
  RankProcesses(HostRanks& host, comm::MembershipServer& membership, const Inheritance& inherited);

  /// Those of the job's start: this host's are started, the others' launchers start theirs.
  void start();
  /// Of a launcher that has taken over: those of this host that run, and of the others that have come. Waits for all
  /// hosts that are not known to be gone, for LocalJob::host_patience at most; those that have not come are given up.
  void gather();
  /// A process for the rank of that number, in the epoch of the meeting: on that host, and with the local rank of the
  /// process that it replaces, if that is free, else the lowest that no running rank of that host has. Throws IoError.
  LaunchedRank start_one(int number, int host, const std::vector<LaunchedRank>& ranks);
  /// It has this number in the job from now on.
  void number(LaunchedRank& rank, int number);
  /// With what it has started.
  void kill(LaunchedRank& rank);
  /// How it ended, if it did.
  std::optional<os::Exit> exit_of(LaunchedRank& rank) const;

  /// Hears of other hosts.
  void look();
  /// The host that decides in this one's place; see comm::OtherHosts.
  std::optional<int> deposed_by() const { return others_ ? others_->deposed_by() : std::nullopt; }
  bool has_other_hosts() const { return others_.has_value(); }
  /// Nothing was heard of it for too long.
  bool is_given_up(int host) const { return others_ && others_->given_up(host); }
  /// No process starts there any more.
  bool starts_none(int host) const { return others_ && others_->starts_none(host); }
  /// The job is over, with that status.
  void end(int status);

 private:
  /// Nothing more is told of its processes.
  bool is_lost(int host) const { return others_ && others_->is_gone(host); }

  HostRanks& host_;
  comm::MembershipServer* const membership_;
  std::optional<comm::OtherHosts> others_;
  int next_number_;  // of the next process of another host
};

/// How a rank ends of which nothing more is heard.
inline constexpr os::Exit given_up{.code = 0, .signal = os::signal_kill};

}  // namespace tesserae::launch
