// How replicas are compared:
//
//  1. Each rank hashes what it holds, a slice of a parameter in a tensor of state at a time. Padding does not count.
//  2. Sharding by sharding (experts have one of their own), the ranks that hold the same chunk gather one hash a
//  buffer.
//  3. Where these differ, and all of them see that alike, they gather those of the buffer's slices: which tensor it is.
//  4. The job hears of it.

#include "tesserae/shard/replica_check.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "tesserae/base/checksum.h"
#include "tesserae/base/error.h"
#include "tesserae/comm/agree.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/replicas.h"
#include "tesserae/shard/value_hash.h"

namespace tesserae::shard {
namespace {

/// A buffer's hashes, and of which parameter each is.
struct Hashes {
  std::vector<uint64_t> values;
  std::vector<std::string> names;
};

Hashes hashes_of(FlatBuffer& buffer, const std::vector<Companion*>& companions) {
  Hashes hashes;
  for (const at::Tensor& value : replicated_values(buffer, companions)) {
    if (buffer.shard() == nullptr) {
      hashes.values.push_back(hash_of(value, 0, value.numel()));
      hashes.names.push_back(buffer.flat().unit());
      continue;
    }
    for (const Slice& slice : buffer.shard()->slices) {
      hashes.values.push_back(hash_of(value, slice.begin, slice.end));
      hashes.names.push_back(slice.name);
    }
  }
  return hashes;
}

/// The hashes of all members, a row each.
std::vector<std::vector<uint64_t>> from_replicas(const Sharding& sharding, const std::vector<uint64_t>& own) {
  comm::Group& group = sharding.replica_group;
  const auto columns = static_cast<int64_t>(own.size());
  at::Tensor table = at::zeros({group.size(), columns}, at::kLong);
  for (int64_t i = 0; i < columns; ++i) table[group.rank()][i] = static_cast<int64_t>(own[static_cast<size_t>(i)]);
  table = table.to(sharding.device);
  sharding.reduce_lane.submit([&] { group.all_gather(table.view(-1), {"replicas"}); }).wait();
  table = group.to_host(table);
  std::vector<std::vector<uint64_t>> rows;
  for (int member = 0; member < group.size(); ++member) {
    const int64_t* const row = table.const_data_ptr<int64_t>() + member * columns;
    rows.emplace_back(row, row + columns);
  }
  return rows;
}

/// Members that are not of the majority; all of them, and `decided` becomes false, where there is none.
std::vector<int> outvoted(const std::vector<std::vector<uint64_t>>& rows, size_t column, bool& decided) {
  std::map<uint64_t, size_t> votes;
  for (const auto& row : rows) ++votes[row[column]];
  std::vector<int> members;
  if (votes.size() == 1) return members;
  bool majority = false;
  for (size_t member = 0; member < rows.size(); ++member) {
    const bool most = 2 * votes[rows[member][column]] > rows.size();
    majority = majority || most;
    if (!most) members.push_back(static_cast<int>(member));
  }
  decided = decided && majority;
  return members;
}

std::string text_of(const std::set<std::string>& names) {
  if (names.empty()) return "";
  return names.size() == 1 ? *names.begin() : cat(*names.begin(), " and ", names.size() - 1, " more");
}

}  // namespace

bool has_replicas(const Engine& engine) {
  return std::ranges::any_of(engine.units(),
                             [](const auto& unit) { return unit->sharding().replica_group.size() > 1; });
}

ReplicaReport compare_replicas(Engine& engine) {
  const at::NoGradGuard no_grad;
  std::vector<std::pair<const Sharding*, std::vector<FlatBuffer*>>> shardings;
  for (FlatBuffer* buffer : engine.buffers()) {
    const Sharding* const sharding = &buffer->unit().sharding();
    if (sharding->replica_group.size() == 1) continue;
    auto found = std::ranges::find(shardings, sharding, [](const auto& entry) { return entry.first; });
    if (found == shardings.end()) found = shardings.insert(found, {sharding, {}});
    found->second.push_back(buffer);
  }
  bool decided = true;
  std::set<std::string> own;  // what of this rank differs
  for (const auto& [sharding, buffers] : shardings) {
    std::vector<Hashes> hashes;
    std::vector<uint64_t> digests;
    for (FlatBuffer* buffer : buffers) {
      hashes.push_back(hashes_of(*buffer, engine.companions()));  // 1
      digests.push_back(checksum_of_blocks(hashes.back().values));
    }
    const auto rows = from_replicas(*sharding, digests);  // 2
    for (size_t i = 0; i < buffers.size(); ++i) {
      bool ignored = true;
      if (outvoted(rows, i, ignored).empty()) continue;
      const auto of_slices = from_replicas(*sharding, hashes[i].values);  // 3
      for (size_t k = 0; k < hashes[i].values.size(); ++k) {
        for (const int member : outvoted(of_slices, k, decided)) {
          if (member == sharding->replica_group.rank()) own.insert(hashes[i].names[k]);
        }
      }
    }
  }
  // 4.
  comm::Fabric& job = *engine.root().sharding().mesh->job();
  ReplicaReport report;
  report.decided = comm::lowest_rank_with(job, !decided) < 0;
  const std::vector<double> suspected = comm::from_all_ranks(job, own.empty() ? 0 : 1);
  for (size_t rank = 0; rank < suspected.size(); ++rank) {
    if (suspected[rank] == 0) continue;
    report.suspects.push_back(static_cast<int>(rank));
    report.here = report.here || static_cast<int>(rank) == job.rank();
    const std::string names = comm::text_of(job, text_of(own), static_cast<int>(rank));
    report.text += cat(report.text.empty() ? "" : "; ", "rank ", rank, ": ", names);
  }
  return report;
}

}  // namespace tesserae::shard
