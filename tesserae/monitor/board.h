#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/monitor/report.h"
#include "tesserae/monitor/slow_links.h"
#include "tesserae/monitor/slow_ranks.h"
#include "tesserae/os/clock.h"

namespace tesserae::monitor {

using Json = nlohmann::ordered_json;

/// Something that happened, for events.jsonl.
struct Event {
  int64_t step = 0;
  std::string kind;  ///< slow, slow_over, slow_link, silent, heard, hang, ...; see docs/monitor.md
  int rank = -1;     ///< -1: of no rank
  std::string text;
};

/// What rank 0 knows of all ranks, from their reports. Used by one thread.
class Board {
 public:
  /// `rest`: seconds for which nothing may happen outside of steps.
  explicit Board(int ranks, double rest = 60);

  /// The newest report of a rank; one with the same number as before is no sign of life.
  void take(int rank, Report report);
  /// After a round of reports: what has happened since the last.
  std::vector<Event> look();

  size_t ranks() const { return ranks_.size(); }
  /// The last step of which all ranks have told; 0: none.
  int64_t step() const { return step_; }
  double step_seconds() const { return step_seconds_; }
  /// Nothing has happened on any rank for longer than that allows, and some wait for others: ten seconds and twenty
  /// steps within a step, a minute between steps, where ranks save and evaluate, and in the first one, once all have
  /// begun with it.
  bool hangs() const { return hangs_; }

  /// What now.json says of ranks, without what only the job knows. `units`: names by index.
  Json now(const std::vector<std::string>& units) const;
  /// The newest step of which all ranks have shown their timelines; 0: none yet.
  int64_t timeline_step() const;
  /// timeline.json, of that step; null: there is none. Of many spans the longest of each rank.
  Json timeline(const std::vector<std::string>& units) const;
  /// How many steps a timeline should be apart from the next, so that reports show the same one.
  int64_t timeline_every(double report_seconds) const;

  /// The timelines that Wish::keep_first asked for, by rank; empty until all have sent theirs. Who heard of it too late
  /// sent fewer, or none.
  std::vector<std::vector<Timeline>> take_kept(int64_t first);
  /// Stacks that came for wish `number`, by rank; empty text: not yet.
  std::vector<std::string> stacks(int64_t number) const;
  void forget_stacks();
  /// Spans of the newest timeline of a rank, of the one that has most: what a step of a trace takes.
  size_t spans_of_step() const;

 private:
  struct Rank {
    std::optional<Report> report;
    os::TimePoint heard;  // when it changed
    bool silent = false;
    std::map<int64_t, Timeline> timelines;
    std::vector<Timeline> kept;
    int64_t kept_of = 0;
  };
  static const std::vector<comm::LinkUse>& links_of(const Rank& rank);
  Json load() const;
  Json links() const;
  std::string longest_hop() const;
  void go_back(int64_t step);
  void read_steps(std::vector<Event>& events);
  void find_silence(std::vector<Event>& events);
  void find_hang(std::vector<Event>& events);
  int64_t next_step() const;
  std::string describe_hang(double seconds) const;

  std::vector<Rank> ranks_;
  const double rest_;
  std::map<int64_t, std::map<int, StepTimes>> open_;  // steps that not all have told of
  std::deque<std::vector<StepTimes>> complete_;       // the newest steps, by rank
  SlowRanks slow_;
  SlowLinks slow_links_;
  int64_t step_ = 0;
  double step_seconds_ = 0;
  int64_t progress_ = 0;      // of all ranks together ...
  os::TimePoint progressed_;  // ... and when it last grew
  bool hangs_ = false;
};

}  // namespace tesserae::monitor
