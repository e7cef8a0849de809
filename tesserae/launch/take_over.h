#pragma once

#include <memory>
#include <optional>
#include <string>
#include <variant>

#include "tesserae/comm/deciding_host.h"
#include "tesserae/comm/succession.h"
#include "tesserae/launch/host_ranks.h"
#include "tesserae/launch/inheritance.h"
#include "tesserae/os/clock.h"

namespace tesserae::launch {

/// What the launcher of a host does when the one that it follows is lost, where another may take over: follow that one,
/// or be it (comm/succession.cpp, 3). Used from the launcher's thread.
class TakeOver {
 public:
  explicit TakeOver(HostRanks& host);

  /// Whether it can, as far as is known; note() finds out.
  bool possible() const { return succession_.has_value(); }
  /// While that launcher is heard: what it tells of the job.
  void note(const comm::DecidingHost& first);

  struct Over {
    int status = 0;
  };
  struct GivenUp {
    std::string why;
  };
  /// What there is to do: nothing now; follow this one, which knows of this host's ranks; decide; end with the job;
  /// end, since it goes on without this host.
  using Next = std::variant<std::monostate, std::unique_ptr<comm::DecidingHost>, Inheritance, Over, GivenUp>;
  /// That launcher is lost, and `why`; empty: it is heard again.
  Next next(const comm::DecidingHost& first, const std::string& why);
  /// It is not known whether this host's claim was granted: next() finds out, also if that launcher is heard again.
  bool is_pending() const { return served_ != nullptr; }

 private:
  Next look(bool is_heard);
  Next follow(const comm::Claim& claim);
  Next decide(const comm::Claim& last);
  std::optional<Next> without_ranks() const;
  void cannot(const std::string& reason);

  HostRanks& host_;
  std::optional<comm::Succession> succession_;
  std::string own_address_;  // by which others reach this host; empty: not known yet
  int followed_ = 0;         // the host whose launcher decides, as far as this one knows
  std::shared_ptr<const comm::DecidingHost::Known> known_;
  std::string why_;                           // that one is lost
  std::optional<os::Deadline> unseen_until_;  // the first claim may take a moment to be seen
  // One store over all tries: what was claimed is what is served.
  std::unique_ptr<comm::MembershipServer> served_;
  int64_t unreached_ = -1;  // the claim of this generation, whose launcher is not reached, until then
  std::optional<os::Deadline> reach_until_;
  std::optional<os::Deadline> gone_at_;  // until then one whose connection broke may live
  bool asked_whether_gone_ = false;
  bool said_ = false;  // why there is nothing to do now
};

}  // namespace tesserae::launch
