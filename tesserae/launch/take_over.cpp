#include "tesserae/launch/take_over.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"
#include "tesserae/os/port.h"

namespace tesserae::launch {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds to_be_seen(10'000), to_reach(2000);

}  // namespace

TakeOver::TakeOver(HostRanks& host) : host_(host) {}

void TakeOver::cannot(const std::string& reason) {
  log(LogLevel::warning, cat(reason, ": this host takes over nothing if the one that decides is lost"));
  host_.job.succession.clear();
}

void TakeOver::note(const comm::DecidingHost& first) {
  if (host_.job.succession.empty()) return;
  known_ = first.known();
  if (known_->job.empty()) return;  // not heard yet
  if (succession_) return;
  if (!unseen_until_) unseen_until_.emplace(to_be_seen);
  try {
    comm::Succession found(host_.job.succession, known_->job);
    const std::optional<comm::Claim> newest = found.newest();
    if (!newest && !unseen_until_->passed()) return;
    if (!newest) return cannot(cat("what the first host has written to ", host_.job.succession, " is not to be seen"));
    // Now, since names may not be known any more when their host is lost.
    own_address_ = os::own_address_towards(host_.job.address);
    followed_ = known_->host;
    succession_.emplace(std::move(found));
    log(LogLevel::info, "this host may take over if the one that decides is lost");
  } catch (const IoError& error) {
    if (unseen_until_->passed()) cannot(error.what());
  }
}

TakeOver::Next TakeOver::next(const comm::DecidingHost& first, const std::string& why) {
  const bool is_heard = why.empty();  // again, after this host has claimed
  if (!is_heard) why_ = why;
  if (first.given_up()) return GivenUp{why_};
  if (!is_heard && !first.may_be_succeeded()) {
    // The connection may have broken alone: then the other one is waited for until it has claimed without this host.
    if (!first.is_broken()) return {};
    if (!asked_whether_gone_) {
      asked_whether_gone_ = true;
      const bool is_reached = comm::is_reached(host_.job.address, host_.job.port, to_reach);
      log(LogLevel::info, cat(why, is_reached ? ", but it is reached" : ", and it is not reached anew"));
      gone_at_.emplace(is_reached ? host_.job.host_patience + comm::to_be_succeeded : milliseconds(0));
    }
    if (!gone_at_->passed()) return {};
  }
  try {
    Next next = look(is_heard);
    said_ = false;
    return next;
  } catch (const IoError& error) {
    if (!std::exchange(said_, true)) log(LogLevel::warning, cat(why_, ", and for now ", error.what()));
    if (auto end = without_ranks()) return std::move(*end);
    return {};
  }
}

TakeOver::Next TakeOver::look(bool is_heard) {
  const std::optional<comm::Claim> newest = succession_->newest();
  if (!newest) return GivenUp{why_};  // all that was to be heard is over
  if (newest->status) return Over{*newest->status};
  if (std::ranges::find(newest->without, host_.job.host) != newest->without.end()) return GivenUp{why_};
  const bool by_this = newest->host == host_.job.host;
  if (!by_this && newest->host != followed_) return follow(*newest);
  if (is_heard && !by_this) {  // what this one tried was not granted
    served_.reset();
    return {};
  }
  if (auto end = without_ranks()) return std::move(*end);
  return decide(*newest);
}

/// With no rank left here there is nothing to go on with.
std::optional<TakeOver::Next> TakeOver::without_ranks() const {
  const auto& ranks = host_.ranks;
  if (std::ranges::any_of(ranks, &LaunchedRank::is_running)) return std::nullopt;
  int status = 0;
  for (const LaunchedRank& rank : ranks) {
    if (!rank.ended_well(host_.job)) return Over{exit_peer_lost};
    status = std::max(status, rank.exit->code);
  }
  return Over{status};
}

TakeOver::Next TakeOver::follow(const comm::Claim& claim) {
  if (unreached_ != claim.generation) {
    unreached_ = claim.generation;
    reach_until_.emplace(host_.job.host_patience + comm::to_be_succeeded);
  }
  std::vector<comm::RankProcess> processes;
  for (const LaunchedRank& rank : host_.ranks) {
    if (rank.is_running()) processes.push_back({rank.number, rank.rank, rank.local_rank, rank.name});
  }
  LocalJob& job = host_.job;
  try {
    auto other = std::make_unique<comm::DecidingHost>(claim.address, claim.port, job.host, job.host_patience, to_reach,
                                                      std::move(processes));
    followed_ = claim.host;
    job.address = claim.address;
    host_.meeting.port = job.port = claim.port;
    host_.spares.keep(0);  // they wait where nobody tells them anything
    host_.output.print(cat("tesserae: ", why_, "; host ", claim.host, " decides from now on"));
    asked_whether_gone_ = false;
    served_.reset();
    said_ = false;
    return other;
  } catch (const IoError& error) {
    if (!reach_until_->passed()) throw;
    if (auto end = without_ranks()) return std::move(*end);
    why_ = cat("host ", claim.host, " had taken over, and is lost, too");
    return decide(claim);
  }
}

TakeOver::Next TakeOver::decide(const comm::Claim& last) {
  comm::Claim next{.generation = last.generation + 1, .host = host_.job.host, .address = own_address_};
  const bool granted_before = last.host == host_.job.host;  // it was not known whether
  if (granted_before) next.generation = last.generation;
  if (!served_ || served_->mandate().generation != next.generation) {
    const comm::Mandate mandate{.job = known_->job, .generation = next.generation, .host = next.host};
    served_ = std::make_unique<comm::MembershipServer>(uint16_t{0}, mandate);
    served_->remember(known_->remembered);
  }
  next.port = served_->port();
  next.without = last.without;
  if (!granted_before) next.without.push_back(last.host);
  for (const int host : known_->gone) {
    if (std::ranges::find(next.without, host) == next.without.end()) next.without.push_back(host);
  }
  if (!succession_->claim(next)) return {};  // another was quicker: it is followed
  host_.spares.keep(0);
  return Inheritance{.membership = std::move(served_), .succession = *succession_, .claim = next, .why = why_};
}

}  // namespace tesserae::launch
