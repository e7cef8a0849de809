#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/checkpoint/reader.h"
#include "tesserae/checkpoint/state.h"
#include "tesserae/comm/mesh_fabric.h"
#include "tesserae/config/config.h"
#include "tesserae/context/parallel.h"
#include "tesserae/data/loader.h"
#include "tesserae/model/gpt.h"
#include "tesserae/offload/activations.h"
#include "tesserae/offload/disk.h"
#include "tesserae/optim/bad_steps.h"
#include "tesserae/optim/loss_scaler.h"
#include "tesserae/optim/optimizer.h"
#include "tesserae/shard/resharding.h"
#include "tesserae/shard/sharded.h"
#include "tesserae/tensor/functions.h"
#include "tesserae/train/job_setup.h"

namespace tesserae::train {

/// All of a rank that changes while it trains, and so all that a checkpoint keeps: parameters, the optimizer's state,
/// the loss scale, the step, the position in the data and torch's random numbers. What else a step needs (the learning
/// rate, the order of the data) is a function of these and of the configuration.
///
/// `config` and `setup` outlive it. Used from the training thread.
class TrainingState {
 public:
  enum class Values {
    initial,  ///< of the state before the first step
    zeros,    ///< until they come from elsewhere
  };

  /// Collective.
  TrainingState(const config::Config& config, const JobSetup& setup, std::shared_ptr<comm::Fabric> fabric,
                Values values = Values::initial);

  const std::shared_ptr<comm::Fabric> fabric;    ///< of the job
  const std::shared_ptr<comm::MeshFabric> mesh;  ///< the same by axes; the engine's fabric is that over axes::state
  const tensor::ParallelPtr parallel;            ///< the ranks of this one's tensor group
  const context::ParallelPtr context;            ///< and of its context group
  data::Loader loader;
  model::Gpt model;
  std::shared_ptr<offload::Disk> disk;  ///< of this rank; null where nothing lies on one
  shard::Sharded sharded;
  const std::shared_ptr<offload::Activations> activations;  ///< null: they stay where they are
  std::unique_ptr<optim::Optimizer> optimizer;
  std::optional<optim::LossScaler> scaler;  ///< with fp16
  optim::BadSteps bad_steps;                ///< and what is a bad one
  int64_t step = 0;                         ///< how many are done
  data::Position position;                  ///< where the next one begins
  std::string run;                          ///< of which it is: RunFolders::run_identity; empty: nobody has said

  /// This rank's part, with the memory that it lives in (checkpoint/saver.h says how long that must stay as it is).
  checkpoint::State to_save();
  /// The same where ranks are lost that had this state: `left`, by rank, hold everything (snapshot_set.h), and each
  /// writes what it is the first of them to hold. Without random numbers: step() seeds them. For another fabric, whose
  /// layout is the caller's to say.
  checkpoint::State to_save_of(const std::vector<bool>& left);
  /// The model's buffers, which every rank has; rank 0 writes them.
  std::vector<checkpoint::Piece> buffers() const;
  mesh::Layout layout() const;  ///< as it is now: the dial may have changed it
  /// What is said in a checkpoint beside the tensors, as docs/format.md shows it.
  nlohmann::json description() const;

  /// Fills this rank's part from a checkpoint of any layout and world size. No collective: a checkpoint::LoadInto. The
  /// model computes with what was loaded after publish(). Throws what load_model throws, InvalidArgument for a
  /// description that cannot be.
  void load(const checkpoint::Checkpoint& checkpoint);
  /// Takes over all that `before` has, on the same ranks, in another mesh: bit for bit, what to_save() and load() would
  /// do. `window`: of Handover (checkpoint/handover.h). Collective.
  void take_over(TrainingState& before, const at::Tensor& window);
  /// Takes over what description() said at that step; also of a checkpoint of another program, which may say nothing.
  void take_over(const nlohmann::json& description, int64_t at_step);
  /// Changes degrees and tiers, between steps, when nobody reads or copies the state. Throws InvalidArgument and
  /// OutOfMemory on all ranks where that cannot be; then nothing was changed. Collective.
  shard::Resharding turn(const shard::Setting& to);
  const shard::Setting& setting() const { return setting_; }
  /// The random numbers of the next step are a function of the seed, the step and what the rank's data are: a step that
  /// is done again, in whatever process, draws the same.
  void seed_random();
  /// On a rank whose values are whole, after Fabric::reconnect(): makes the groups again, in the constructor's order.
  /// Collective: new ranks construct theirs meanwhile, with Values::zeros.
  void rejoin();
  /// What new ranks lack comes from replicas that have it; what all ranks hold alike from rank `reference`. `whole`: by
  /// rank, who has it. False, and nothing has moved: some part has no replica left; with `keeps_own` (rejoin.h) parts
  /// that never had one do not count. Collective.
  bool fill(const std::vector<bool>& whole, int reference, bool keeps_own = false);
  /// All ranks, after all have loaded.
  void publish();

 private:
  const config::Config& config_;
  const JobSetup& setup_;
  shard::Setting setting_;
};

}  // namespace tesserae::train
