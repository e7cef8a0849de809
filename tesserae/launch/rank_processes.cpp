#include "tesserae/launch/rank_processes.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"
#include "tesserae/os/clock.h"

namespace tesserae::launch {
namespace {

LaunchedRank of_another_host(int host, const Place& place, int number) {
  LaunchedRank rank;
  rank.host = host;
  rank.local_rank = place.local_rank;
  rank.rank = place.rank;
  rank.number = number;
  return rank;
}

/// That of the rank which `number` had, if it was there and is free, else the lowest. Less than the number of ranks:
/// a host cannot have more of them than the job.
int free_local_rank(int number, int host, const std::vector<LaunchedRank>& ranks) {
  const auto is_taken = [&](int local_rank) {
    return std::ranges::any_of(ranks, [&](const LaunchedRank& rank) {
      return rank.is_running() && rank.host == host && rank.local_rank == local_rank;
    });
  };
  if (number < static_cast<int>(ranks.size())) {
    const LaunchedRank& before = ranks[static_cast<size_t>(number)];
    const bool fits = before.local_rank < static_cast<int>(ranks.size());
    if (before.host == host && fits && !is_taken(before.local_rank)) return before.local_rank;
  }
  int local_rank = 0;
  while (is_taken(local_rank)) ++local_rank;
  return local_rank;
}

}  // namespace

RankProcesses::RankProcesses(HostRanks& host, comm::MembershipServer* membership)
    : host_(host), membership_(membership), next_number_(host.job.hosts * host.job.ranks) {
  const LocalJob& job = host.job;
  if (membership == nullptr || job.hosts == 1) return;
  std::optional<comm::Succession> succession;
  comm::Claim first{.address = job.address, .port = membership->port()};
  if (!job.succession.empty()) {
    succession.emplace(job.succession, membership->mandate().job);
    try {
      succession->claim(first);
    } catch (const IoError& error) {
      if (!succession->newest()) {  // else it is there all the same; if that cannot be told the job does not begin
        log(LogLevel::warning, cat(error.what(), ": no other host takes over if this one is lost"));
        succession.reset();
      }
    }
  }
  others_.emplace(membership->store(), job.hosts, job.host_patience, std::move(succession), std::move(first));
}

RankProcesses::RankProcesses(HostRanks& host, comm::MembershipServer& membership, const Inheritance& inherited)
    : host_(host),
      membership_(&membership),
      next_number_(static_cast<int>(inherited.claim.generation) << 20) {  // above those of whoever decided before
  others_.emplace(membership.store(), host.job.hosts, host.job.host_patience, inherited.succession, inherited.claim,
                  inherited.claim.without);
}

void RankProcesses::gather() {
  std::vector<LaunchedRank>& ranks = host_.ranks;
  std::vector<LaunchedRank> theirs;
  const os::Deadline patience(host_.job.host_patience);
  const auto wait = [this] { host_.output.wait(host_.ranks, host_.spares, -1); };
  for (int host = 0; host < host_.job.hosts; ++host) {
    if (host == host_.job.host || is_lost(host)) continue;
    auto come = others_->come_over(host);
    for (; !come && !patience.passed() && !host_.ending.has_news(); come = others_->come_over(host)) wait();
    for (; !come && !is_lost(host) && !deposed_by() && !host_.ending.has_news(); wait()) others_->give_up(host);
    for (const comm::RankProcess& each : come.value_or(std::vector<comm::RankProcess>())) {
      theirs.push_back(of_another_host(host, {.rank = each.rank, .local_rank = each.local_rank}, each.number));
      theirs.back().name = each.name;
    }
  }
  std::erase_if(ranks, [](const LaunchedRank& rank) { return !rank.is_running(); });
  std::ranges::move(theirs, std::back_inserter(ranks));
  // Each keeps its place among those that are left, but rank 0, which alone writes what counts, is with who decides.
  std::ranges::stable_sort(
      ranks, {}, [this](const LaunchedRank& rank) { return std::pair(rank.host != host_.job.host, rank.rank); });
}

void RankProcesses::start() {
  host_.start_ranks();
  for (int number = host_.job.ranks; others_ && number < host_.meeting.ranks; ++number) {
    const Place place{.rank = number, .local_rank = number % host_.job.ranks};
    host_.ranks.push_back(of_another_host(number / host_.job.ranks, place, number));
  }
}

LaunchedRank RankProcesses::start_one(int number, int host, const std::vector<LaunchedRank>& ranks) {
  const Place place{.rank = number, .local_rank = free_local_rank(number, host, ranks)};
  if (host != host_.job.host) {
    others_->tell(host, {.kind = comm::Order::Kind::start,
                         .process = next_number_,
                         .rank = number,
                         .local_rank = place.local_rank,
                         .ranks = host_.meeting.ranks,
                         .epoch = *host_.meeting.epoch});
    return of_another_host(host, place, next_number_++);
  }
  auto spare = host_.spares.take(place);
  if (!spare) return start_rank(host_.job, place, host_.meeting, host_.sources);
  membership_->give_place(spare->number, number, host_.meeting.ranks);
  return std::move(spare->process);
}

void RankProcesses::number(LaunchedRank& rank, int number) {
  rank.rank = number;
  if (rank.process) return;
  others_->tell(rank.host, {.kind = comm::Order::Kind::number, .process = rank.number, .rank = number});
}

void RankProcesses::kill(LaunchedRank& rank) {
  if (rank.process) return rank.process->signal_group(os::signal_kill);
  others_->tell(rank.host, {.kind = comm::Order::Kind::kill, .process = rank.number});
}

std::optional<os::Exit> RankProcesses::exit_of(LaunchedRank& rank) const {
  if (rank.process) return rank.process->poll();
  if (const auto told = others_->exit_of(rank.number)) return told;
  return is_lost(rank.host) ? std::optional(given_up) : std::nullopt;
}

void RankProcesses::look() {
  if (others_) others_->look();
}

void RankProcesses::end(int status) {
  if (others_) others_->end(status);
}

}  // namespace tesserae::launch
