// Groups that are borrowed, and their end (fabric.h).
//
// Whether a group is held is each rank's own affair: a graph of one of them may keep it a little longer. So ranks tell
// each other which groups they hold no more, and a group ends if all of its members say so. Those that a rank ends come
// in the order of the table, which is the same for all groups on all ranks: nobody waits in one for somebody in
// another.

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>

#include "tesserae/comm/agree.h"
#include "tesserae/comm/group_table.h"

namespace tesserae::comm {
namespace {

// Of a name, the same on every machine.
int64_t number_of(const std::string& name) {
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return static_cast<int64_t>(hash | 1u);  // not 0, which stands for nothing
}

// What each rank's `own` are, by rank.
std::vector<std::set<int64_t>> all_numbers(Fabric& fabric, const std::vector<int64_t>& own) {
  const auto most = static_cast<int64_t>(max_over_ranks(fabric, static_cast<double>(own.size())));
  std::vector<std::set<int64_t>> all(static_cast<size_t>(fabric.size()));
  if (most == 0) return all;
  at::Tensor numbers = at::zeros({fabric.size(), most}, at::kLong);
  std::ranges::copy(own, numbers.mutable_data_ptr<int64_t>() + fabric.rank() * most);
  const at::Tensor moved = numbers.to(fabric.device());
  fabric.everyone().all_gather(moved, {"unused groups"});
  numbers = fabric.everyone().to_host(moved);
  const int64_t* const data = numbers.const_data_ptr<int64_t>();
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const int64_t* const begin = data + static_cast<int64_t>(rank) * most;
    all[rank].insert(begin, begin + most);
  }
  return all;
}

}  // namespace

std::shared_ptr<Group> Fabric::borrow(const std::vector<int>& members, Traffic traffic) {
  GroupTable* const groups = table();
  if (groups == nullptr) return {std::shared_ptr<void>(), &group(members, traffic)};
  return groups->borrow([&]() -> Group& { return group(members, traffic); });
}

int Fabric::release_unused() {
  GroupTable* const groups = table();
  if (groups == nullptr) return 0;
  const std::vector<int>& ranks = everyone().members();  // of the job
  const std::vector<Group*> mine = groups->unused(ranks);
  std::vector<int64_t> numbers;
  for (const Group* group : mine) numbers.push_back(number_of(group->name()));
  const auto all = size() == 1 ? std::vector{std::set(numbers.begin(), numbers.end())} : all_numbers(*this, numbers);
  std::map<int, const std::set<int64_t>*> by_job_rank;
  for (size_t rank = 0; rank < ranks.size(); ++rank) by_job_rank[ranks[rank]] = &all[rank];
  int ended = 0;
  for (size_t i = 0; i < mine.size(); ++i) {
    const auto agrees = [&](int member) { return by_job_rank.at(member)->contains(numbers[i]); };
    if (!std::ranges::all_of(mine[i]->members(), agrees)) continue;
    groups->end(*mine[i]);
    ++ended;
  }
  return ended;
}

int Fabric::group_count() const {
  const GroupTable* const groups = table();
  return groups == nullptr ? 0 : groups->size();
}

}  // namespace tesserae::comm
