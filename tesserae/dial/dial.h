#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tesserae/comm/fabric.h"
#include "tesserae/cost/facts.h"
#include "tesserae/cost/links.h"
#include "tesserae/cost/place_memory.h"
#include "tesserae/dial/record.h"
#include "tesserae/dial/server.h"
#include "tesserae/dial/tuner.h"
#include "tesserae/os/files.h"
#include "tesserae/shard/resharding.h"

namespace tesserae::dial {

/// From the edge after `step` on, these degrees.
struct Scheduled {
  int64_t step = 0;
  mesh::Degrees degrees;
};

struct DialOptions {
  std::vector<Scheduled> schedule;  ///< ascending steps, of degrees that the job can have
  bool automatic = false;           ///< the tuner chooses; not with a schedule, and not without facts
  TunerOptions tuner;
  cost::Facts facts;                 ///< of the job, for the tuner: facts_of(); none: requests for "auto" are refused
  std::optional<cost::Links> links;  ///< unset: measured where they are needed: with a folder, or a tuner
  /// Of the run, for dial.sock and dial.jsonl; made where it is missing. Empty: no requests from outside, no record.
  os::Path folder;
  std::function<void(const std::string&)> say;  ///< rank 0's, a line for people; unset: the log
  /// Rank 0's: why the job cannot have so many ranks (empty: it can); unset: it cannot change their number.
  std::function<std::string(int ranks)> cannot_scale = {};
  int experts = 0;  ///< over how many ranks experts are shared out; 0: the model has none
  /// Rank 0's: why they cannot be over so many (empty: they can); unset: the job cannot change it.
  std::function<std::string(int degree)> cannot_share_out = {};
  std::shared_ptr<Server> server = {};  ///< that a dial of other ranks handed over; null: made where there is a folder
};

/// When a job changes its degrees, or where its state lies: by its schedule, by requests through dial.sock, or as the
/// tuner finds; a request is stronger than the schedule, and alone knows of tiers. All ranks have one and ask it at
/// each step edge; rank 0 decides, and all hear the same. A request takes the dial from the tuner until one gives it
/// back.
///
///   optimizer.step();
///   if (auto to = dial.at_step_edge(step, seconds)) {
///     try {
///       dial.changed(sharded.turn(*to));
///     } catch (const InvalidArgument& error) {  // on all ranks, as OutOfMemory: nothing was changed
///       dial.refused(error.what());
///     }
///   }
///
/// Used from the training thread.
class Dial {
 public:
  /// Collective if there is a folder. `now`: the setting in use. Throws os::AddressInUse on all ranks if a live run
  /// has that folder; a folder where there can be no socket is a warning.
  /// InvalidArgument for a schedule that cannot be followed.
  Dial(std::shared_ptr<comm::Fabric> fabric, const shard::Setting& now, DialOptions options);
  ~Dial();

  /// After step `step`, which took `seconds`: the setting to change to, the same on all ranks; nothing: as it is.
  /// Collective, one all-reduce of a few numbers. The caller changes it (shard::Sharded::turn) and says changed().
  std::optional<shard::Setting> at_step_edge(int64_t step, double seconds);

  /// The same in two halves, for callers that sum something over ranks at each step anyway: what this rank adds (the
  /// same count on all), and what came of it.
  std::vector<double> to_sum(int64_t step, double seconds);
  std::optional<shard::Setting> from_sums(int64_t step, std::span<const double> sums);

  /// Another number of ranks, or of ranks that share out experts, that was asked for.
  struct Scaling {
    int ranks = 0;       ///< 0: as it is
    int experts = 0;     ///< the same
    int64_t client = 0;  ///< rank 0's
  };
  /// What the last sums said of it: the same on all ranks. For the caller to do once, with hand_over() or refuse().
  const std::optional<Scaling>& scaling() const { return scaling_; }
  /// It is not done, and why.
  void refuse(const Scaling& scaling, const std::string& why);
  /// Rank 0's: who waits for answers is served by another dial from now on, or by the caller. Elsewhere null.
  std::shared_ptr<Server> hand_over() { return std::move(server_); }

  /// The change is done, whoever asked for it. Collective: adds up what all ranks sent.
  void changed(const shard::Resharding& change);
  /// It could not be done, and nothing was changed: rank 0 tells people and who asked.
  void refused(const std::string& why);

  const shard::Setting& setting() const { return setting_; }
  bool automatic() const { return automatic_; }

  /// Of the last step, over all ranks; bytes.
  struct Seen {
    double seconds = 0;  ///< of the slowest rank
    double memory = 0;   ///< the most that any rank held
    double place = 0;    ///< size of the fullest place, a host or a device; 0: unknown
    double free = 0;     ///< the least that was free of it during the step
  };
  const Seen& seen() const { return seen_; }
  /// Of this rank, at the last step edge.
  const cost::PlaceMemory& here() const { return here_; }

  /// Of this process.
  struct Figures {
    int64_t changes = 0;
    double seconds = 0;
    double bytes = 0;        ///< that all ranks sent for changes
    double steps_spent = 0;  ///< by the tuner on trying
  };
  Figures figures() const;

 private:
  /// A change that somebody asked for.
  struct Turn {
    shard::Setting setting;
    std::string why;
    int64_t client = 0;  // who waits for it; 0: nobody
  };

  bool leads() const { return fabric_->rank() == 0; }
  void open();
  void take_requests();
  void want_tuner(int64_t client);
  void want_ranks(const Scaling& asked);
  void want_experts(const Scaling& asked);
  void want(const Scaling& asked, const std::string& why_not);
  void tell_of_no_change(int client, const char* event, int now);
  std::string no_room_for_experts(int degree) const;
  void follow_schedule(int64_t step);
  void learn();
  void begin_tuning();
  void read_sums(std::span<const double> sums);
  void tune(int64_t step);
  void time(int64_t step);
  void tell(int64_t client, const Json& event);
  void say(const std::string& line) const;
  Json status(int64_t step) const;
  /// What of a step depends on the degrees, by formula: what others would take is told by the difference.
  struct Layout {
    mesh::Degrees degrees;
    double memory = 0;
    double seconds = 0;
  };
  Layout layout_of(const mesh::Degrees& degrees) const;
  Json layouts() const;

  std::shared_ptr<comm::Fabric> fabric_;
  shard::Setting setting_;
  DialOptions options_;
  bool automatic_;
  size_t next_scheduled_ = 0;
  Seen seen_;
  cost::PlaceMemory here_;
  Figures figures_;
  double change_seconds_ = 0;  // of a change since the last step
  std::optional<Scaling> scaling_;
  int64_t step_ = 0;

  // Rank 0's.
  std::shared_ptr<Server> server_;
  std::unique_ptr<Record> record_;
  std::vector<Layout> layouts_;  // that status tells of
  std::optional<Tuner> tuner_;
  bool tuner_wanted_ = false;  // it begins at the next edge, on all ranks together
  std::optional<Scaling> scaling_wanted_;
  std::optional<Turn> wanted_, deciding_;  // what is to be done; what all ranks are being told
  struct Timing {
    int64_t client = 0;
    int64_t at_step = 0;
    double before = 0;
  };
  std::vector<Timing> timings_;
  Json last_change_;
};

}  // namespace tesserae::dial
