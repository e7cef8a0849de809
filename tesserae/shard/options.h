#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "tesserae/comm/wire.h"
#include "tesserae/mesh/strategy.h"
#include "tesserae/offload/tier.h"

namespace at {
class Tensor;
}
namespace torch::nn {
class Module;
}
namespace tesserae::comm {
class MeshFabric;
}
namespace tesserae::offload {
class Disk;
}

namespace tesserae::shard {

/// The dtypes of a run. Unset fields: `parameters` keep the dtype they have when the model is sharded; `reduce` follows
/// `parameters`; `masters` keep the dtype that the parameters had.
struct Precision {
  std::optional<c10::ScalarType> parameters;  ///< what forward and backward compute in
  std::optional<c10::ScalarType> reduce;      ///< what gradients are summed in
  std::optional<c10::ScalarType> masters;     ///< what the optimizer updates
  bool cast_inputs = true;                    ///< floating point inputs of each unit are cast to `parameters`

  /// Leaves every dtype as the model has it, which is fp32 unless it was cast.
  static Precision fp32() { return {}; }
  /// Computes in bf16, sums gradients and keeps masters in fp32.
  static Precision bf16() { return {at::kBFloat16, at::kFloat, at::kFloat}; }
  /// Computes and sums in fp16, keeps masters in fp32; needs optim::LossScaler.
  static Precision fp16() { return {at::kHalf, at::kHalf, at::kFloat}; }
};

/// What happens to gradients inside no_sync().
enum class Accumulation {
  local,    ///< whole gradients stay on the rank; nothing is sent until the boundary (FSDP's no_sync)
  two_hop,  ///< gradients are reduced over G at each backward; the other hops wait for the boundary (MiCS)
};

/// How the parameters of a unit lie in flat buffers, and where those are cut.
enum class CutBy {
  elements,  ///< parameters of a kind one after the other in one buffer, cut in equal runs of elements
  rows,      ///< each parameter in a buffer of its own, cut in equal runs of whole rows (of its first dimension) as
             ///< torch.chunk cuts it: the last ranks have fewer rows, or none. What a DTensor with Shard(0) shows
};

/// How a model is sharded. The same on all ranks, except `disk`.
struct Options {
  mesh::Strategy strategy;  ///< default: NO_SHARD. See mesh::preset and mesh::from_hybrid_shard_degree.
  Precision precision;      ///< default: the dtypes of the model
  Accumulation accumulation = Accumulation::local;  ///< inside no_sync()
  CutBy cut_by = CutBy::elements;                   ///< where flat buffers are cut

  /// At most so many units are gathered or being gathered at once because of prefetching (>= 1; 1: no prefetch). Those
  /// that were read and stay gathered, because the strategy does not free them, do not count.
  int limit_all_gathers = 2;
  /// The gradients of at most so many units are being reduced at once (>= 1).
  int limit_reductions = 2;

  /// How gathered parameters and gradients that are being summed travel between hosts (comm/wire.h); inside a host they
  /// are exact where ranks share memory. Masters, optimizer state and what is saved are never rounded. What travels
  /// packed takes memory of its own meanwhile: up to half of the unit's buffer (int8). Exact with a tensor axis.
  comm::Wire parameter_wire = comm::Wire::exact;
  comm::Wire gradient_wire = comm::Wire::exact;  ///< of the hops of gradients

  /// Memory goes back to the allocator between its uses: buffers when the rest of the step needs no more, the memory of
  /// gradients that were zeroed or, where an optimizer does not keep it, set to none. A lower peak, at allocator calls
  /// in every step. false: all of it stays, at stable addresses, and the peak is known before the first step.
  bool elastic = false;

  /// Where each part of the training state lies between its uses; what is gathered and reduced is on the device
  /// whatever this says. On an accelerator the three leave the device together.
  offload::Tiers tiers = {};
  /// The scratch file of this rank, where a tier is the disk.
  std::shared_ptr<offload::Disk> disk = nullptr;

  /// Parameters take rank 0's values, so that ranks may be built with different random numbers.
  bool sync_module_states = false;

  /// Fills a parameter that is on the meta device: called for one after the other, with it alone in memory, whole, and
  /// on each rank only for those that it holds a part of. So the numbers must come from the name alone, not from what
  /// was drawn before: a generator for each parameter, as model/init.h has it. Of a parameter that is split it is given
  /// the whole tensor too, of which the rank keeps its part.
  std::function<void(const std::string& name, at::Tensor& parameter)> initialize = {};

  /// The job by axes, of which the fabric that shards the state is a part: says which ranks hold the other parts of
  /// split parameters. They call what is collective over the job together, and sums over the model (gradient norms)
  /// include their parts. Null: the fabric is the job, and nothing is split.
  std::shared_ptr<comm::MeshFabric> mesh = nullptr;
};

}  // namespace tesserae::shard
