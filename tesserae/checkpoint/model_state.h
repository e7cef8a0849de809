#pragma once

#include <vector>

#include "tesserae/checkpoint/state.h"

namespace tesserae::shard {
class Flat;
class Sharded;
}  // namespace tesserae::shard
namespace tesserae::optim {
class Optimizer;
}

namespace tesserae::checkpoint {

class Checkpoint;
class Handover;

/// True if `rank` writes its part of that flat buffer: several ranks may hold the same, and one of them does.
bool writes_part(const shard::Flat& flat, int rank);

/// This rank's pieces of a sharded model: masters ("model/NAME") and, with an optimizer, its state as far as
/// it exists ("optimizer/exp_avg/NAME"; counters as "optimizer/step/NAME", one for each parameter). Of a parameter that
/// is split among tensor-parallel ranks each has its part, with the whole tensor's shape. The first replica writes;
/// what is not split, of the first tensor-parallel rank. Valid until the shards are cut anew. No collective.
/// `as_first_replica`: what is written is said as if this one were of the first replica.
std::vector<Piece> model_pieces(shard::Sharded& sharded, optim::Optimizer* optimizer, bool as_first_replica = false);

/// Fills the model and, if there is one, the optimizer from a checkpoint of any layout, tensor-parallel degree and
/// world size, in this rank's part only. State that the checkpoint does not have of a parameter starts at zero, as it
/// does before the parameter's first gradient. No collective: publish_model follows when all ranks are done. Throws
/// what load() throws; InvalidArgument if the state is another optimizer's, if the checkpoint has a parameter that the
/// model lacks, or if parameters that share a flat buffer here have different step counters there. `more`: what else is
/// to be filled, for example from weights of others, where buffers are parameters ("model/NAME").
void load_model(const Checkpoint& checkpoint, shard::Sharded& sharded, optim::Optimizer* optimizer,
                std::vector<Piece> more = {});

/// The same from what the ranks of the job have now, in another layout. `more`: what else is to be filled. Collective.
void take_over_model(const Handover& from, shard::Sharded& sharded, optim::Optimizer* optimizer,
                     std::vector<Piece> more = {});

/// Makes the values that load_model() or take_over_model() filled in what the next forward sees. All ranks call it.
void publish_model(shard::Sharded& sharded);

}  // namespace tesserae::checkpoint
