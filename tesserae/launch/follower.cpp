#include "tesserae/launch/follower.h"

#include <algorithm>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/comm/host_links.h"
#include "tesserae/launch/ending.h"
#include "tesserae/launch/launched_rank.h"
#include "tesserae/launch/rank_processes.h"
#include "tesserae/launch/ranks_output.h"
#include "tesserae/launch/spare_ranks.h"
#include "tesserae/launch/waiting_ranks.h"
#include "tesserae/os/process.h"

// How a host's part of a job ends:
//  1. Its ranks end, each of which is told to the first host's launcher.
//  2. The launcher waits for the job's status: others may go on without the ranks of this host, and it may be told to
//     start new ones.
//  3. It does not wait if it was asked to end (leaves()), or if there is nobody who would tell it: this host was cut
//     off, which kills its ranks, or the job survives no loss (FirstHost::is_alone).

namespace tesserae::launch {
namespace {

class Follower {
 public:
  explicit Follower(const LocalJob& job)
      : job_(job),
        waiting_(job.body ? job.ranks : 0, job.body),
        first_(job.address, job.port, job.host, job.host_patience),
        meeting_{.port = job.port, .epoch = 0, .ranks = job.hosts * job.ranks},
        spares_(job, meeting_, waiting_) {
    for (int local = 0; local < job.ranks; ++local) {
      const Place place{.rank = job.host * job.ranks + local, .local_rank = local};
      ranks_.push_back(start_rank(job, place, meeting_, waiting_));
    }
  }

  int run() {
    while (std::ranges::any_of(ranks_, is_running) || waits_for_status()) {
      output_.wait(ranks_, spares_, ending_.descriptor());
      follow();
      for (LaunchedRank& rank : ranks_) look_at(rank);
      look_at_signals();
      keep_spares();
      if (ending_.grace_has_passed()) kill_all();
    }
    spares_.keep(0);
    for (LaunchedRank& rank : ranks_) output_.drain(rank);
    if (ending_.has_begun()) kill_all();  // what the ranks started themselves
    return status();
  }

 private:
  static bool is_running(const LaunchedRank& rank) { return !rank.exit; }

  bool waits_for_status() const {
    return !leaves() && !first_.status() && !first_.is_alone() && first_.cut_off().empty();
  }

  /// This launcher was asked to end, and none of its ranks has ended the job well since: others may go on without them.
  bool leaves() const {
    const auto well = [this](const LaunchedRank& rank) {
      return rank.asked_to_end && rank.exit && rank.ended_well(job_);
    };
    return ending_.is_asked() && std::ranges::none_of(ranks_, well);
  }

  void follow() {
    first_.look();
    for (const comm::Order& order : first_.orders()) obey(order);
    const std::string cut_off = first_.cut_off();
    if (cut_off.empty() || cut_off_) return;
    cut_off_ = true;
    output_.print(cat("tesserae: ", cut_off, "; the ranks of this host are killed"));
    kill_all();
  }

  void obey(const comm::Order& order) {
    if (order.kind == comm::Order::Kind::start) return start(order);
    const auto found = std::ranges::find(ranks_, order.process, &LaunchedRank::number);
    if (found == ranks_.end()) return;
    order.kind == comm::Order::Kind::kill ? kill(*found) : void(found->rank = order.rank);
  }

  void start(const comm::Order& order) {
    if (cut_off_) return;
    const auto before = std::ranges::find(ranks_, order.local_rank, &LaunchedRank::local_rank);
    // It was told before it heard that this launcher is to end; or this host was started with fewer ranks.
    if (ending_.is_asked() || before == ranks_.end()) return first_.report(order.process, given_up);
    if (meeting_.epoch != order.epoch) ++replaced_;
    meeting_.epoch = order.epoch;
    meeting_.ranks = order.ranks;
    spares_.pause();
    const Place place{.rank = order.rank, .local_rank = order.local_rank};
    try {
      if (auto spare = spares_.take(place)) {
        first_.give_place(spare->number, order);
        *before = std::move(spare->process);
      } else {
        *before = start_rank(job_, place, meeting_, waiting_);
      }
      before->number = order.process;
    } catch (const IoError& error) {
      output_.print(cat("tesserae: rank ", order.rank, " cannot be started: ", error.what()));
      first_.report(order.process, {.code = 1});
    }
  }

  void look_at(LaunchedRank& rank) {
    if (rank.exit || !(rank.exit = rank.process->poll())) return;
    output_.drain(rank);
    first_.report(rank.number, *rank.exit);
  }

  void look_at_signals() {
    const Ending::News news = ending_.look();
    if (news == Ending::News::asked_again) return ending_.cut_short();
    if (news == Ending::News::none) return;
    output_.print(stopping);
    for (LaunchedRank& rank : ranks_) rank.asked_to_end = !rank.exit;
    first_.close();
    ending_.ask(ranks_, ending_.passed_on(), job_.stop_grace);
  }

  void keep_spares() {
    const bool replaces = !first_.status() && !cut_off_ && !ending_.is_asked();
    spares_.keep(replaces ? job_.replacements - replaced_ : 0);
  }

  static void kill(LaunchedRank& rank) { rank.process->signal_group(os::signal_kill); }
  void kill_all() { std::ranges::for_each(ranks_, kill); }

  int status() const {
    const auto is_unusable = [](const LaunchedRank& rank) { return rank.exit->code == exit_unusable; };
    const bool unusable = first_.is_alone() && std::ranges::any_of(ranks_, is_unusable);
    const int otherwise = leaves() ? 128 + ending_.signal() : unusable ? exit_unusable : exit_peer_lost;
    const int result = first_.status().value_or(otherwise);
    if (result != 0 && !cut_off_ && !first_.is_alone() && !leaves()) {
      output_.print(cat("tesserae: the job ends with status ", result, ", its first host says why"));
    }
    return result;
  }

  const LocalJob& job_;
  WaitingRanks waiting_;  // made before anything that a copy must not have
  Ending ending_;
  comm::FirstHost first_;
  Meeting meeting_;
  SpareRanks spares_;
  RanksOutput output_;
  std::vector<LaunchedRank> ranks_;
  bool cut_off_ = false;
  int replaced_ = 0;  // how often ranks of this host were
};

}  // namespace

int follow_first_host(const LocalJob& job) {
  return Follower(job).run();
}

}  // namespace tesserae::launch
