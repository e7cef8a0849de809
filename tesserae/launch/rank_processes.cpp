#include "tesserae/launch/rank_processes.h"

#include <algorithm>
#include <utility>

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

/// That of the rank which `number` had, if it was there and is free, else the lowest.
int free_local_rank(int number, int host, const std::vector<LaunchedRank>& ranks) {
  const auto is_taken = [&](int local_rank) {
    return std::ranges::any_of(ranks, [&](const LaunchedRank& rank) {
      return !rank.exit && rank.host == host && rank.local_rank == local_rank;
    });
  };
  if (number < static_cast<int>(ranks.size())) {
    const LaunchedRank& before = ranks[static_cast<size_t>(number)];
    if (before.host == host && !is_taken(before.local_rank)) return before.local_rank;
  }
  int local_rank = 0;
  while (is_taken(local_rank)) ++local_rank;
  return local_rank;
}

}  // namespace

RankProcesses::RankProcesses(const LocalJob& job, const Meeting& meeting, WaitingRanks& waiting, SpareRanks& spares,
                             comm::MembershipServer* membership)
    : job_(job),
      meeting_(meeting),
      waiting_(waiting),
      spares_(spares),
      membership_(membership),
      next_number_(job.hosts * job.ranks) {
  if (membership != nullptr && job.hosts > 1) others_.emplace(membership->store(), job.hosts, job.host_patience);
}

std::vector<LaunchedRank> RankProcesses::start() {
  std::vector<LaunchedRank> ranks;
  for (int local = 0; local < job_.ranks; ++local) {
    const Place place{.rank = job_.host * job_.ranks + local, .local_rank = local};
    ranks.push_back(start_rank(job_, place, meeting_, waiting_));
  }
  for (int number = job_.ranks; others_ && number < meeting_.ranks; ++number) {
    const Place place{.rank = number, .local_rank = number % job_.ranks};
    ranks.push_back(of_another_host(number / job_.ranks, place, number));
  }
  return ranks;
}

LaunchedRank RankProcesses::start_one(int number, int host, const std::vector<LaunchedRank>& ranks) {
  const Place place{.rank = number, .local_rank = free_local_rank(number, host, ranks)};
  if (host != job_.host) {
    others_->tell(host, {.kind = comm::Order::Kind::start,
                         .process = next_number_,
                         .rank = number,
                         .local_rank = place.local_rank,
                         .ranks = meeting_.ranks,
                         .epoch = *meeting_.epoch});
    return of_another_host(host, place, next_number_++);
  }
  auto spare = spares_.take(place);
  if (!spare) return start_rank(job_, place, meeting_, waiting_);
  membership_->give_place(spare->number, number, meeting_.ranks);
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
