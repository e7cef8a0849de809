#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace tesserae::launch {

/// A job's ranks on this host, started without a launcher. A job of several hosts has one of these on each.
struct LocalJob {
  int ranks = 1;
  int hosts = 1, host = 0;            ///< each with so many ranks, and which of them this one is
  std::string address = "127.0.0.1";  ///< of several hosts: where the first rank of the first one serves the store
  uint16_t port = 0;                  ///< the same; with one host it is a free port
  std::vector<std::string> command;   ///< the program of every rank and its arguments
  /// The same as a function, which returns the exit status: the first ranks are then copies of this process where that
  /// is possible (waiting_ranks.h). Empty: they are not, as must be where this process has used an accelerator, whose
  /// drivers do not survive it.
  std::function<int()> body = {};
  /// The command of a process that makes ranks by copying itself, so that what all of them need is loaded once
  /// (fork_server.cpp has the protocol). Empty, or where it does not work: each rank is `command`.
  std::vector<std::string> fork_server = {};
  std::map<std::string, std::string> environment;  ///< for every rank, beside torchrun's variables
  /// Between a rank's failure and the end of the others: they are asked to end (SIGTERM) and then killed.
  std::chrono::milliseconds failure_grace{2000};
  /// The same after this process was asked to end: time to finish a step, and to save it. A second signal cuts it
  /// short.
  std::chrono::milliseconds stop_grace{20'000};
  int early_exit_code = 0;  ///< a rank that returns it ended well, before its work was done: so does the job then
  /// So many times the job goes on after ranks were lost (killed, or failed by themselves), with new processes in their
  /// places: comm/membership.h. Then, and where a rank says that its configuration cannot work, a loss ends the job. On
  /// several hosts (the same number on all) the launcher of the lost one's host starts the new one; those of a host
  /// that is lost itself are not replaced.
  int replacements = 0;
  /// So many processes wait, while there are replacements left, with all done that needs no place in the job
  /// (comm::Membership): one of them takes the place of a lost rank of its host at once, or of one that was asked for.
  int spares = 0;
  /// The one that follows is started so long after that: until then the processors are those of the ranks that go on.
  std::chrono::milliseconds spare_pause{10'000};
  /// Where lost ranks are not replaced (any more), those that are left go on, if they are so many. They are numbered
  /// anew, and ask for a number of ranks that their job can have. 0: the loss ends the job. On several hosts (the same
  /// number on all) the first one's launcher serves the store and decides.
  int min_ranks = 0;
  /// With min_ranks, of several hosts: a folder that all of them see. If the host that decides is lost another one
  /// takes over, as comm/succession.h says; empty: the job ends.
  std::string succession = {};
  /// Where ranks of a script keep what others go on from, in a folder that they name (Membership::remember "memory"):
  /// that one is removed when the job ends.
  std::string memory = "/dev/shm";
  /// Of several hosts that survive losses: one of which nothing is heard for so long is lost, with its ranks.
  std::chrono::milliseconds host_patience{300'000};
};

/// Starts the ranks with the variables that torchrun sets, waits for their end and returns the job's exit status. On
/// one host the ranks may ask for another number of them (comm::Membership::ask_for_ranks): those that are missing are
/// started, those that are too many are given `stop_grace` to end, in whatever way, and count no more.
///  - 0 if every rank returned 0; early_exit_code if ranks returned that;
///  - of several hosts that survive losses: on all of them the job's, as the first host knows it; on one that was cut
///    off (comm/deciding_host.h), whose ranks are killed, exit_peer_lost; on one that was asked to end, and whose ranks
///    did not end well, 128 + signal: the others may go on; where the first host was told that they survive none,
///    exit_unusable if a rank of this one ended so;
///  - that of the rank that failed first and was not replaced, or 128 + the signal that killed it. The other ranks of
///    this host are ended (those of other hosts lose a peer, and end by that), and the last lines on stderr name that
///    rank and repeat what it wrote last;
///  - 128 + signal if this process was asked to end (SIGINT, SIGTERM, SIGUSR1) and the ranks did not end well. They get
///    that signal; SIGTERM for SIGINT, which a terminal may have sent them itself.
///
/// The first rank here has this process's standard output, and nobody after it; what the others write, and everything
/// written to standard error, is passed on line by line to standard error. Where nobody reads that any more it is lost,
/// and the job goes on (from then on writing there does not end this process by SIGPIPE). No rank outlives this
/// process, not even if it is killed by SIGKILL. Throws IoError if a rank cannot be started (after ending those that
/// were), InvalidArgument for several hosts without a port.
int run_local_job(const LocalJob& job);

/// The same, with what whoever begins the job again must know.
struct JobEnd {
  int status = 0;          ///< the job's exit status
  bool failed = false;     ///< by the failure or loss of a rank that may go well another time; known on one host
  std::string error = {};  ///< the last line of the rank that failed first; empty: it was killed
  std::string run = {};    ///< what ranks remembered (comm::Membership) of "run", the folder that they write, ...
  std::string saved = {};  ///< ... and of "saved", the step of its newest checkpoint; empty: there is none
};
JobEnd run_job(const LocalJob& job);

/// The exit status of a rank that failed because another one was lost: never the first cause of a job's end.
inline constexpr int exit_peer_lost = 3;
/// The same of one whose command line or configuration cannot work: it would fail again.
inline constexpr int exit_unusable = 2;

/// In the environment of each rank: with how many ranks the job began.
inline constexpr const char* configured_ranks_variable = "TESSERAE_CONFIGURED_RANKS";
/// In that of LocalJob::fork_server: the number of the descriptor from which it reads orders.
inline constexpr const char* fork_server_variable = "TESSERAE_FORK_SERVER";

}  // namespace tesserae::launch
