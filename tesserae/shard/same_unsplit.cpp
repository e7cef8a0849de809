#include "tesserae/shard/same_unsplit.h"

#include <ATen/core/grad_mode.h>

#include <string>
#include <utility>
#include <vector>

#include "tesserae/base/error.h"
#include "tesserae/comm/error.h"
#include "tesserae/shard/agreement.h"
#include "tesserae/shard/sharded_unit.h"
#include "tesserae/shard/value_hash.h"

namespace tesserae::shard {

void SameUnsplit::before_forward(ShardedUnit& unit) {
  if (std::exchange(compared_, true)) return;
  const at::NoGradGuard no_grad;
  std::vector<std::string> names;
  std::vector<double> hashes;  // two a name, of which the largest are asked for: h and -h
  for (const auto& buffer : unit.buffers()) {
    const Flat& flat = buffer->flat();
    for (const Slice& slice : flat.slices(flat.chunk_range())) {
      if (!slice.split.along(mesh::Axis::tensor).whole()) continue;
      const auto hash =
          static_cast<double>(hash_of(buffer->parameter().local(), slice.begin, slice.end) >> 12);  // exact
      names.push_back(slice.name);
      hashes.push_back(hash);
      hashes.push_back(-hash);
    }
  }
  if (names.empty()) return;
  comm::MeshFabric& mesh = *unit.sharding().mesh;
  over_tensor_ranks(mesh, hashes, comm::Reduction::maximum, {unit.name()});
  std::string first;
  int more = -1;
  for (size_t i = 0; i < names.size(); ++i) {
    if (hashes[2 * i] == -hashes[2 * i + 1]) continue;
    if (first.empty()) first = names[i];
    ++more;
  }
  if (first.empty()) return;
  throw comm::Mismatch(
      "forward",
      cat("parameter \"", first, "\"", more > 0 ? cat(" (and ", more, " more of unit \"", unit.name(), "\")") : "",
          " is not split among the ", mesh.degree(mesh::axes::tensor),
          " tensor-parallel ranks, and has other values on some of them: build the model under the same seed on all of "
          "them, or give all of them rank 0's values (tsm.transform(..., load_state_dict_from_rank0=True)). FSDP's "
          "sync_module_states does not reach across them"));
}

}  // namespace tesserae::shard
