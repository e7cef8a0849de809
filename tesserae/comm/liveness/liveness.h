#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "tesserae/comm/error.h"
#include "tesserae/comm/liveness/asked_store.h"
#include "tesserae/comm/liveness/missing_ranks.h"
#include "tesserae/comm/liveness/process_waits.h"
#include "tesserae/comm/liveness/verdict.h"
#include "tesserae/comm/liveness/watched.h"
#include "tesserae/mesh/world.h"
#include "tesserae/os/process_watch.h"

namespace tesserae::comm {

/// Knows which ranks of the job live, and says why an operation that blocks cannot go on.
///
/// [Note: liveness] One thread per rank, with a connection of its own to the store:
/// 1. it beats: a counter in the store shows that this process runs (one that is stopped or swapped out does not);
/// 2. it watches the processes of the ranks on its host; one that ends without a goodbye is reported lost at once;
/// 3. it reads who is lost and who has left, so a loss on another host is known a beat later;
/// 4. it looks at the operations that block: if a member is lost, the deadline has passed or the members are in
///    different operations, it decides the verdict, tells it to the other members, and aborts the operation;
/// 5. it tells whether this process waits for others, so that after a deadline those are found that let others wait.
///
/// Transports tell of broken sockets first (judge). Who is lost is decided by the order of reports in the store,
/// not by whose socket broke: when ranks give up one after the other, all of them name the first. While the rank that
/// serves the store is silent there is no such order, and that rank is the one to name.
class Liveness {
 public:
  /// Tells the others where this process can be watched. Before the ranks meet: who has met need not wait for it.
  /// `rank`: the launcher's.
  static void introduce(int rank, const c10::intrusive_ptr<c10d::Store>& store);

  /// All ranks of `world` have introduced themselves through `store`, a connection for this object alone. `server`: the
  /// rank whose process serves the store, or -1.
  Liveness(const mesh::World& world, c10::intrusive_ptr<c10d::Store> store, int server);
  /// Says goodbye, if leave() has not.
  ~Liveness();

  void watch(Watched* group);
  /// After it returns the channel no longer touches the group.
  void forget(Watched* group);

  /// Why an operation of `group` failed whose transport blames `suspect`. Waits for the answer, a few seconds at most.
  Verdict judge(const Watched& group, int suspect, const std::string& symptom);

  /// Tells all members of `group` that it has failed with this verdict, which one member alone can give (it read what
  /// another one brought). Returns the first that any member gave.
  Verdict dispute(const Watched& group, const Verdict& verdict);

  /// Ranks that ended without a goodbye, the first in front.
  std::vector<int> lost() const;
  /// Those of `members`, but for this rank, that are lost or have left.
  std::vector<int> gone_among(const std::vector<int>& members) const;

  /// For which ranks others waited when operations of any group failed at their deadline: Timeout::missing().
  std::vector<int> missing() const;

  /// From its making to its end this rank waits for others in something that is no operation of a group.
  class Wait {
   public:
    explicit Wait(Liveness& liveness) : liveness_(liveness) { ++liveness_.waits_; }
    ~Wait() { --liveness_.waits_; }
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;
    /// It ends without what was waited for.
    void fail() { liveness_.has_failed_ = true; }

   private:
    Liveness& liveness_;
  };
  /// Throws the Timeout of something that `members` of the job did together, and that has failed at such a deadline.
  /// Looks for some seconds who of them is missing.
  [[noreturn]] void time_out(std::string_view function, const std::string& message, const std::vector<int>& members,
                             std::chrono::milliseconds deadline);
  /// The last one that it threw since this function was called: a library may have made another exception of it.
  std::optional<Timeout> take_time_out();

  /// Says goodbye: from now on this process may end without being taken for lost. Before its sockets close.
  void leave();
  /// The same, for a process that goes on without the groups that are watched: what blocks in any group of the job,
  /// here and on other ranks, is aborted as soon as they hear of it.
  void give_up();
  /// Waits until every rank has left or is lost: the rank that serves the store stays that long.
  void wait_for_others(std::chrono::milliseconds at_most);

 private:
  using Clock = std::chrono::steady_clock;

  /// What is known of one watched group.
  struct Case {
    Clock::time_point next_look;   ///< at the store, for an operation that is merely slow
    Clock::time_point next_check;  ///< of its connections
    std::string reported;          ///< the slow operation that the others were told of
    Clock::time_point deserted;    ///< beginning of the operation that was seen to block after a member had left ...
    int looks = 0;                 ///< ... and how often it was
    std::optional<Clock::time_point> asked;
    int suspect = -1;
    std::string symptom;
    std::optional<Verdict> dispute;  ///< one that a member gave
    std::optional<Verdict> verdict;
  };
  struct LocalPeer {
    int rank;
    os::ProcessWatch watch;
  };

  void run();
  void watch_processes();
  void tell_of_lost();
  void exchange_news();
  /// Whether an operation of it blocks.
  bool examine(Watched* group);
  void tell_of_waiting();
  void look_for_missing();
  void note_missing(const Verdict& verdict);
  std::optional<Verdict> decide(Watched* group, Case& state, const std::optional<Watched::Pending>& pending);
  Verdict without_this_rank(Verdict verdict) const;
  std::optional<Verdict> find_mismatch(Watched* group, Case& state, const Watched::Pending& pending);
  Verdict conclude(Watched* group, Verdict verdict);
  void mark_lost(int rank, const std::string& how);
  std::vector<int> living() const;
  std::vector<int> others_among(const std::vector<int>& members, const std::vector<int>& ranks) const;

  const mesh::World world_;
  const int server_;
  const std::chrono::milliseconds beat_;
  AskedStore store_;            // of the channel's thread, once it runs
  MissingRanks missing_ranks_;  // of the channel's thread
  std::vector<LocalPeer> local_;
  std::vector<int> ended_;            // of this host, not yet known whether with a goodbye; of the channel's thread
  std::vector<int> untold_;           // of those lost, what the store has not been told; of the channel's thread
  WaitsForOthers waits_for_others_;   // of the channel's thread
  Clock::time_point last_pending_;    // when an operation of any group was seen to block; of the channel's thread
  std::optional<bool> told_waiting_;  // of the channel's thread
  Clock::time_point next_beat_;       // of the channel's thread

  std::atomic<int> waits_ = 0;
  std::atomic<bool> has_failed_ = false;  // an operation or wait here: this rank may not come to others any more
  std::mutex asking_;                     // one at a time asks who is missing
  mutable std::mutex mutex_;              // guards all below
  std::condition_variable changed_;
  std::map<Watched*, Case> cases_;
  Watched* examined_ = nullptr;
  std::vector<int> lost_, left_, missing_;
  Clock::time_point lost_since_;
  struct Question {
    int64_t number = 0;
    std::vector<int> members;
    std::chrono::milliseconds deadline;
  };
  int64_t questions_ = 0;
  std::optional<Question> question_;  // who is missing, ...
  std::optional<Verdict> found_;      // ... and the answer
  std::optional<Timeout> timed_out_;  // what time_out() threw last
  bool leaving_ = false;              // asked for
  Clock::time_point leaving_since_;
  bool giving_up_ = false;  // this rank, ...
  bool given_up_ = false;   // ... or another: no group of the job is of use any more
  bool has_left_ = false;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace tesserae::comm
