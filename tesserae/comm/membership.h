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
#include "tesserae/comm/open_store.h"
#include "tesserae/comm/succession.h"
#include "tesserae/mesh/world.h"
#include "tesserae/os/clock.h"

namespace tesserae::comm {

/// By which claim a launcher decides on which job (succession.h).
struct Mandate {
  std::string job;
  int64_t generation = 0;
  int host = 0;
};

/// What our launcher tells the ranks that it started, and they tell it: which of them are lost, how many there are to
/// be, and when they meet again. membership.cpp opens with the protocol. Ranks are the launcher's.
class MembershipServer {
 public:
  /// Serves the job's store at that port; 0: at a free one. Of a later generation than 0 it waits for the first epoch
  /// of its own to be begun. Throws IoError.
  explicit MembershipServer(uint16_t port = 0, const Mandate& mandate = {}, Serve to = Serve::network);

  uint16_t port() const { return port_; }
  const Mandate& mandate() const { return mandate_; }
  /// What it serves, for what launchers tell each other.
  c10::intrusive_ptr<c10d::Store> store() const { return served_; }
  int epoch() const { return epoch_; }
  struct Missing {
    int by = 0, rank = 0;
  };
  /// Ranks for which others have waited in vain, in this epoch, each with who says so.
  std::vector<Missing> missing();
  /// How many ranks have said that their operations failed, in this epoch.
  int failed();
  /// How many ranks the next epoch is to have, if anybody asked for another number.
  std::optional<int> asked_ranks();
  /// The next epoch begins, with so many ranks: each has a process.
  void begin_epoch(int ranks);
  /// The same with those of this epoch's ranks alone, in ascending order: others are lost, and not replaced. From then
  /// on they are numbered in this order.
  void begin_epoch_of(const std::vector<int>& left);
  /// The first epoch of a launcher that has taken over: of these processes (process_variable), numbered in this order,
  /// which were ranks of whatever epoch.
  void begin_epoch_of(const std::vector<std::string>& processes);
  /// In that epoch a spare process has this place. Before it begins.
  void give_place(int64_t spare, int rank, int ranks);
  /// There will be none: the job ends.
  void end();
  /// What a rank has told by Membership::remember().
  std::string remembered(const std::string& key);
  /// What ranks told the launcher that decided before.
  void remember(const std::map<std::string, std::string>& told);

 private:
  void announce(const std::string& what);

  const Mandate mandate_;
  std::set<std::string> told_;  // keys that were remembered
  c10::intrusive_ptr<c10d::Store> served_, store_;
  uint16_t port_ = 0;
  int epoch_ = 0;
};

/// Tells a spare process, through the job's store, that it is this rank of the epoch that begins.
void give_place(c10::intrusive_ptr<c10d::Store> store, int64_t spare, int epoch, int rank, int ranks);

/// The same for whoever has a connection to that store: what ranks remember, how often they have told something, and
/// the mandate of its launcher, once it serves.
std::map<std::string, std::string> all_remembered(c10::intrusive_ptr<c10d::Store> store);
int64_t count_remembered(c10::intrusive_ptr<c10d::Store> store);
std::optional<Mandate> mandate_of(c10::intrusive_ptr<c10d::Store> store);

/// The side of a rank. Used from the training thread.
class Membership {
 public:
  /// `survives`: whether the launcher was told to go on after losses. In a spare process it waits until that has a
  /// place. Throws IoError if the launcher cannot be reached (any more).
  Membership(const mesh::Launch& launch, bool survives);

  /// Whether the launcher is ours, and so can begin another epoch.
  bool served() const { return store_ != nullptr; }
  /// Whether it may begin one after a loss.
  bool recovers() const { return served() && survives_; }
  /// In which the ranks meet next, how many they are there, and which of them this one is: those of higher numbers have
  /// no place in it.
  int epoch() const { return epoch_; }
  int ranks() const { return ranks_; }
  int rank() const { return rank_; }
  bool has_place() const { return rank_ < ranks_; }
  /// This process's place in that epoch. All else is as our launcher said, or the one that has taken over since.
  mesh::World world() const;
  /// Those that meet are what is left of the ranks before: nobody has the place of the lost ones.
  bool is_of_those_left() const { return of_those_left_; }
  /// An operation failed because of a lost rank, or at its deadline because of the `missing` ones (Timeout::missing()),
  /// which the launcher will end. Waits for it to begin the next epoch; where that of another host may take over
  /// (succession_variable), and this one is not reached, for the first epoch of that. False: there will be none, now or
  /// within the deadline, or a loss ends the job.
  bool next_epoch(const std::vector<int>& missing, std::chrono::milliseconds deadline);
  /// The same where nothing was lost: after ask_for_ranks().
  bool wait_for_epoch(std::chrono::milliseconds deadline);
  /// The next epoch is to have so many ranks, and to begin at once. Rank 0 asks; all of them leave this one.
  void ask_for_ranks(int ranks);
  /// Whether the launcher has begun a later epoch than epoch(), or ends the job: nobody meets in this one any more.
  bool is_over();

  /// What those must know who come when all who knew are gone; rank 0 tells it. Where another launcher may take over,
  /// remember(), remembered() and ask_for_ranks() throw PeerLost if this one is lost.
  void remember(const std::string& key, const std::string& value);
  std::string remembered(const std::string& key);  ///< empty: nothing was

 private:
  void wait_for_place(const std::string& spare);
  void take_store(c10::intrusive_ptr<c10d::Store> store);
  bool wait_for_epoch(const os::Deadline& patience);
  bool turn_to_successor(const std::string& reason, const os::Deadline& patience);
  bool is_successor(const Claim& claim) const;
  bool follow(const Claim& claim);
  bool take_place(const std::string& told);
  void begin_succession();
  template <class Request>
  auto ask(Request request, const os::Deadline* patience);
  template <class Request>
  auto require(Request request);
  std::optional<Claim> successor() const;

  c10::intrusive_ptr<c10d::Store> served_, store_;  // null: the launcher is none of ours
  bool survives_;
  int ranks_, rank_;
  int epoch_ = 0;
  bool of_those_left_ = false;
  std::string address_;
  uint16_t port_;
  std::optional<Succession> succession_;   // unset: the job ends with its launcher
  Mandate mandate_;                        // of the launcher that this one follows
  std::chrono::milliseconds deadline_{0};  // of the last wait
  std::set<std::string> told_;             // keys that were remembered
  std::unique_ptr<TimeLimiter> limiter_;   // with a succession: a host that is lost answers nothing
};

/// In the environment of a rank whose launcher has a MembershipServer: the epoch in which it begins.
inline constexpr const char* epoch_variable = "TESSERAE_EPOCH";
/// The same of a process that waits for a place: its number among these. What else it is told of a rank does not hold.
inline constexpr const char* spare_variable = "TESSERAE_SPARE";
/// Where the launcher of another host may take over: the folder of the Succession, and a name that no other process of
/// the job has.
inline constexpr const char* succession_variable = "TESSERAE_SUCCESSION";
inline constexpr const char* process_variable = "TESSERAE_PROCESS";

}  // namespace tesserae::comm
