#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tesserae/comm/fabric.h"
#include "tesserae/shard/flat.h"
#include "tesserae/shard/shard.h"
#include "tesserae/shard/sharding.h"

namespace tesserae::shard {

class Engine;

// What a rank holds of a flat buffer between steps: its chunk of the master, in the dtype that the parameters had (of
// what is frozen, too, which is gathered from there).

/// Where the master lies between its uses: with the parameters if it is what is gathered, else with the optimizer.
offload::Tier master_tier(const offload::Tiers& tiers, const Flat& flat);

/// Memory for such a chunk (a master, a gradient, an optimizer's state) on a tier; the content is undefined, but for
/// zeros behind the last element of the flat buffer.
/// `travels`: see Sharding::allocate().
at::Tensor new_local(const UnitContext& context, const Flat& flat, c10::ScalarType dtype, offload::Tier tier,
                     bool travels = true);

/// Zeros of the shape and dtype of the shard's master on the optimizer's tier.
at::Tensor new_state(const Engine& engine, const Shard& shard);

/// The master's, inside a copy that the ranks of P share (FlatParameter::shared_memory), if that is where it lies
/// anyway.
at::Tensor new_local(const UnitContext& context, const Flat& flat, const at::Tensor& shared);

/// The piece that is gathered, beside that master: the master itself where it can be, undefined where gathering casts
/// the master, else memory of zeros.
at::Tensor piece_for(const UnitContext& context, const Flat& flat, const at::Tensor& master);

/// Fills `after` (what ranks hold under `to`) with the elements of `before` (under `from`): pairs of one dtype, the
/// same number on all ranks, on whatever tiers. `from` and `to` differ in their layouts only. Each rank sends what
/// others lack and the transfer plan says that they get from it; returns how many bytes. Collective over the job.
///
/// Ranks of a host exchange theirs in a group of their own, which may have memory where one that spans hosts has a
/// wire.
uint64_t move_local(comm::Fabric& fabric, const Flat& from, const Flat& to, const std::vector<at::Tensor>& before,
                    const std::vector<at::Tensor>& after);

}  // namespace tesserae::shard
