#include "tesserae/train/training_state.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"
#include "tesserae/base/pattern.h"
#include "tesserae/checkpoint/handover.h"
#include "tesserae/checkpoint/load.h"
#include "tesserae/checkpoint/model_state.h"
#include "tesserae/checkpoint/random_state.h"
#include "tesserae/comm/agree.h"
#include "tesserae/cost/transformer.h"
#include "tesserae/model/init.h"
#include "tesserae/offload/memory_limit.h"
#include "tesserae/optim/adamw.h"
#include "tesserae/optim/sgd.h"
#include "tesserae/shard/activation_offload.h"
#include "tesserae/snapshot/snapshot_set.h"

namespace tesserae::train {
namespace {

model::Gpt make_model(const config::Config& config, const JobSetup& setup, const tensor::ParallelPtr& parallel,
                      const context::ParallelPtr& context) {
  model::GptConfig shape = setup.model;
  shape.parallel = parallel;
  shape.context = context;
  shape.sequence_parallel = config.sharding.sequence_parallel && parallel->size() > 1;
  shape.device = c10::kMeta;  // no rank ever holds the whole model: the engine fills it parameter by parameter
  model::Gpt model(shape);
  model->checkpoint_activations_of_blocks(config.checkpoint_activations);
  return model;
}

shard::Sharded shard(const model::Gpt& model, const std::shared_ptr<comm::MeshFabric>& mesh,
                     const std::shared_ptr<offload::Disk>& disk, const config::Config& config, const JobSetup& setup,
                     TrainingState::Values values) {
  shard::Options options = options_of(config, setup);
  options.initialize = model::initialize(model->config());
  if (values == TrainingState::Values::zeros) {
    // One zero that stands for all: memory for whole parameters, of which a rank keeps a part, is not touched.
    options.initialize = [](const std::string& /*name*/, at::Tensor& value) {
      value = at::zeros({1}, value.options()).expand(value.sizes());
    };
  }
  options.mesh = mesh;
  options.disk = disk;
  return shard::shard_model(model, mesh->over(mesh::axes::state), std::move(options));
}

/// What tensors do not show by their shapes. Throws InvalidArgument where the weights would mean something else; of
/// what may be changed on purpose (a longer context by another rope_base) there is a warning. `training`: what the
/// checkpoint says; one of weights, or of another program, says nothing.
void require_same_model(const nlohmann::json& training, const config::Config& config, int64_t step, bool warns) {
  const auto described = training.find("config");
  if (described == training.end() || !described->is_object() || !described->contains("model")) return;
  const nlohmann::json &before = described->at("model"), &now = config.resolved.at("model");
  const auto value = [](const nlohmann::json& model, const char* key) {
    const nlohmann::json found = model.value(key, nlohmann::json());
    const bool as_many_as_heads = found.is_null() && std::string_view(key) == "kv_heads";
    return as_many_as_heads ? model.value("heads", nlohmann::json()) : found;
  };
  for (const char* key :
       {"heads", "kv_heads", "experts_per_token", "window", "document_end", "norm_epsilon", "rope_base"}) {
    const nlohmann::json was = value(before, key), is = value(now, key);
    if (was == is || was.is_null()) continue;  // older ones do not have every key
    const std::string text = cat("the checkpoint of step ", step, " was trained with model.", key, " ", was.dump(),
                                 ", this job has ", is.dump());
    if (std::string_view(key).ends_with("heads")) {
      throw InvalidArgument("TrainingState::load", cat(text, ": its weights are of other heads"));
    }
    if (warns) log(LogLevel::warning, text);
  }
}

/// Null where nothing lies on a disk. What may be in memory of it is for offload::MemoryLimit to say, once a step was
/// seen.
std::shared_ptr<offload::Disk> make_disk(const config::Config& config, const offload::Tiers& tiers) {
  if (!tiers.uses(offload::Tier::disk)) return {};
  return std::make_shared<offload::Disk>(
      offload::DiskOptions{.folder = config.offload.folder, .memory = offload::MemoryLimit::at_first});
}

void require_units(const std::vector<std::string>& patterns, const shard::Engine& engine) {
  for (const std::string& pattern : patterns) {
    std::string names;
    bool fits = false;
    for (const auto& unit : engine.units()) {
      fits |= matches(pattern, unit->name());
      names += (names.empty() ? "" : ", ") + unit->name();
    }
    if (!fits) {
      throw InvalidArgument("train",
                            cat("offload.activation_units: \"", pattern, "\" fits no unit; there are ", names));
    }
  }
}

std::shared_ptr<offload::Activations> offload_activations(const model::Gpt& model, shard::Sharded& sharded,
                                                          const config::Config& config, const JobSetup& setup) {
  const config::Config::Offload& offload = config.offload;
  if (!offload.activations) return nullptr;
  if (offload.units) require_units(*offload.units, sharded.engine());
  auto activations =
      offload::Activations::make({.horizon = offload.horizon, .smallest = offload.smallest, .folder = offload.folder});
  // In the first forward, all that units save; that of experts is not known.
  cost::Leaving leaving = leaving_of(config);
  leaving.horizon = 0;
  const double expected =
      setup.model.experts > 0 ? 0 : cost::leaving_bytes(setup.model, execution_of(config, setup), leaving);
  activations->open(sharded.engine().root().sharding().device, static_cast<int64_t>(expected));
  for (const at::Tensor& buffer : model->buffers()) activations->keep(buffer);
  shard::offload_activations(sharded.engine(), activations,
                             [offload](const std::string& unit) { return offload.leaves(unit); });
  return activations;
}

std::unique_ptr<optim::Optimizer> make_optimizer(shard::Sharded& sharded, const config::Config::Optimizer& o) {
  if (o.name == "sgd") {
    return std::make_unique<optim::Sgd>(
        sharded, optim::SgdOptions{.lr = o.lr, .momentum = o.momentum, .weight_decay = o.weight_decay});
  }
  return std::make_unique<optim::AdamW>(
      sharded, optim::AdamWOptions{
                   .lr = o.lr, .beta1 = o.beta1, .beta2 = o.beta2, .eps = o.epsilon, .weight_decay = o.weight_decay});
}

/// "NAME" of "model/NAME" and "optimizer/STATE/NAME".
std::string parameter_of(const std::string& piece) {
  const size_t slash = piece.find('/');
  return piece.substr((piece.starts_with("optimizer/") ? piece.find('/', slash + 1) : slash) + 1);
}

}  // namespace

TrainingState::TrainingState(const config::Config& config, const JobSetup& setup,
                             std::shared_ptr<comm::Fabric> the_fabric, Values values)
    : fabric(std::move(the_fabric)),
      mesh(std::make_shared<comm::MeshFabric>(fabric, setup.mesh)),
      parallel(std::make_shared<const tensor::Parallel>(mesh)),
      context(std::make_shared<const context::Parallel>(mesh, config.sharding.context_parallel_method)),
      loader(make_loader(config, setup, fabric->rank())),
      model(make_model(config, setup, parallel, context)),
      disk(make_disk(config, setup.tiers)),
      sharded(shard(model, mesh, disk, config, setup, values)),
      activations(offload_activations(model, sharded, config, setup)),
      optimizer(make_optimizer(sharded, config.optimizer)),
      bad_steps(config.bad_steps.loss_spike),
      config_(config),
      setup_(setup),
      setting_{setup.strategy.degrees, setup.tiers} {
  if (setup.precision.parameters == at::kHalf) scaler.emplace();
  // All of it is taken from the disk now: one that is too small ends the run before it begins.
  if (setup.tiers.optimizer == offload::Tier::disk) optimizer->allocate_state();
  seed_random();
}

checkpoint::State TrainingState::to_save() {
  checkpoint::State state{.step = step,
                          .layout = layout(),
                          .axes = mesh->mesh().degrees(),
                          .pieces = checkpoint::model_pieces(sharded, optimizer.get()),
                          .training = description()};
  for (checkpoint::Piece& piece : checkpoint::random_pieces(fabric->rank(), fabric->device())) {
    state.pieces.push_back(std::move(piece));
  }
  for (checkpoint::Piece& piece : buffers()) state.pieces.push_back(std::move(piece));
  return state;
}

checkpoint::State TrainingState::to_save_of(const std::vector<bool>& left) {
  const int own = fabric->rank();
  const auto writes = [&](bool experts) {
    return snapshot::first_holder(mesh->mesh(), layout(), own, experts, left) == own;
  };
  const bool writes_shared = writes(false), writes_experts = writes(true);
  checkpoint::State state{.step = step,
                          .pieces = checkpoint::model_pieces(sharded, optimizer.get(), /*as_first_replica=*/true),
                          .training = description()};
  std::set<std::string, std::less<>> of_experts;
  for (const checkpoint::Piece& piece : state.pieces) {
    if (!piece.split.along(mesh::Axis::expert).whole()) of_experts.insert(parameter_of(piece.name));
  }
  for (checkpoint::Piece& piece : state.pieces) {
    piece.written = piece.written && (of_experts.contains(parameter_of(piece.name)) ? writes_experts : writes_shared);
  }
  const auto first = static_cast<int>(std::ranges::find(left, true) - left.begin());
  for (checkpoint::Piece& piece : buffers()) {
    piece.written = own == first;
    state.pieces.push_back(std::move(piece));
  }
  return state;
}

std::vector<checkpoint::Piece> TrainingState::buffers() const {
  std::vector<checkpoint::Piece> pieces;
  for (const auto& item : model->named_buffers()) {
    pieces.push_back(checkpoint::replicated("buffer/" + item.key(), item.value(), fabric->rank()));
    pieces.back().optional = true;  // a checkpoint from before there were any need not have them
  }
  return pieces;
}

mesh::Layout TrainingState::layout() const {
  return {mesh->degree(mesh::axes::state), setting_.degrees};
}

nlohmann::json TrainingState::description() const {
  nlohmann::json result = {{"config", config_.resolved},
                           {"data",
                            {{"epoch", position.epoch},
                             {"offset", position.offset},
                             {"samples", loader.training_samples()},
                             {"files", loader.fingerprints()},
                             {"sequence_length", config_.data.sequence_length},
                             {"seed", config_.run.seed}}}};
  if (!config_.data.weights.empty()) result["data"]["weights"] = config_.data.weights;
  result["bad_steps"] = bad_steps.description();
  if (!run.empty()) result["run"] = run;
  if (scaler) result["loss_scale"] = {{"scale", scaler->state().scale}, {"good_steps", scaler->state().good_steps}};
  return result;
}

void TrainingState::load(const checkpoint::Checkpoint& checkpoint) {
  std::vector<checkpoint::Piece> stored_buffers = buffers();
  for (checkpoint::Piece& piece : stored_buffers) {
    // Files of weights do not tell them from parameters.
    const std::string as_weight = "model/" + piece.name.substr(std::string_view("buffer/").size());
    const checkpoint::Manifest& manifest = checkpoint.manifest();
    if (manifest.find(piece.name) == nullptr && manifest.find(as_weight) != nullptr) piece.name = as_weight;
  }
  require_same_model(checkpoint.manifest().training, config_, checkpoint.step(), fabric->rank() == 0);
  checkpoint::load_model(checkpoint, sharded, optimizer.get(), std::move(stored_buffers));
  take_over(checkpoint.manifest().training, checkpoint.step());
  // Tensor-parallel ranks draw alike: what other groups of them drew fits none of these.
  const bool same_groups = checkpoint.manifest().axes == mesh->mesh().degrees();
  if (!same_groups || !checkpoint::load_random(checkpoint, fabric->rank(), fabric->device())) seed_random();
}

void TrainingState::take_over(TrainingState& before, const at::Tensor& window) {
  const at::NoGradGuard no_grad;
  const checkpoint::State held = before.to_save();
  const checkpoint::Handover handover(*fabric, window, held.pieces);
  checkpoint::take_over_model(handover, sharded, optimizer.get(), buffers());
  take_over(held.training, before.step);
  seed_random();  // what ranks of the other mesh drew fits none of these
  publish();
}

void TrainingState::take_over(const nlohmann::json& description, int64_t at_step) {
  step = at_step;
  try {
    if (const auto found = description.find("data"); found == description.end()) {
      position = loader.after(step);
    } else if (found->at("samples") == loader.training_samples() && found->at("seed") == config_.run.seed &&
               found->at("sequence_length") == config_.data.sequence_length &&
               found->value("weights", std::vector<double>()) == config_.data.weights &&
               found->value("files", loader.fingerprints()) == loader.fingerprints()) {  // older ones do not say
      const data::Position there{.epoch = found->at("epoch"), .offset = found->at("offset")};
      if (there.epoch < 0 || there.offset < 0 || there.offset >= loader.training_samples()) {
        throw InvalidArgument("TrainingState::take_over", cat("sample ", there.offset, " of epoch ", there.epoch,
                                                              " of ", loader.training_samples(), " samples"));
      }
      position = there;
    } else {
      position = {};
      if (fabric->rank() == 0) {
        log(LogLevel::warning,
            cat("the checkpoint of step ", step, " was trained on other data (", found->at("samples"), " samples of ",
                found->at("sequence_length"), ", seed ", found->at("seed"), "): the data start from the beginning"));
      }
    }
    if (const auto found = description.find("bad_steps"); found != description.end()) bad_steps.take_over(*found);
    if (const auto found = description.find("loss_scale"); found != description.end() && scaler) {
      scaler->load_state({.scale = found->at("scale"), .good_steps = found->at("good_steps")});
    }
  } catch (const nlohmann::json::exception& error) {
    throw InvalidArgument("TrainingState::take_over",
                          cat("what the checkpoint of step ", step, " says of its training cannot be: ", error.what()));
  }
}

shard::Resharding TrainingState::turn(const shard::Setting& to) {
  const bool on_disk = to.tiers.uses(offload::Tier::disk);
  std::shared_ptr<offload::Disk> made;
  std::string failure;
  try {
    if (on_disk && disk == nullptr) made = make_disk(config_, to.tiers);
  } catch (const IoError& error) {
    failure = error.what();
  }
  if (const int failed = comm::lowest_rank_with(*fabric, !failure.empty()); failed >= 0) {
    throw InvalidArgument("TrainingState::turn", cat("rank ", failed, ": ", comm::text_of(*fabric, failure, failed)));
  }
  // What the first updates would make moves along: its room is taken with the rest.
  if (to.tiers.optimizer == offload::Tier::disk) optimizer->allocate_state();
  sharded.zero_grad();  // gradients of a step that is over need not move
  const shard::Resharding change = sharded.turn(to, made);
  if (made != nullptr) disk = std::move(made);
  if (!on_disk) disk = nullptr;
  setting_ = to;
  return change;
}

void TrainingState::seed_random() {
  // Dropout differs where tokens do; tensor::dropout does the rest.
  const auto rank = static_cast<uint64_t>(mesh->index(mesh::axes::loss));
  at::manual_seed(step == 0 ? config_.run.seed + rank
                            : model::seed_of(config_.run.seed, cat("step ", step, " rank ", rank)));
}

void TrainingState::rejoin() {
  parallel->reconnect();
  context->reconnect();
  sharded.rejoin();
}

bool TrainingState::fill(const std::vector<bool>& whole, int reference, bool keeps_own) {
  if (!sharded.can_fill(whole, keeps_own)) return false;
  const at::NoGradGuard no_grad;
  if (step > 0) optimizer->allocate_state();
  sharded.fill(whole);
  std::vector<at::Tensor> alike;
  optimizer->visit_state([&alike](const shard::Shard& /*shard*/, std::string_view /*name*/, at::Tensor& tensor) {
    if (tensor.dim() == 0) alike.push_back(tensor);
  });
  for (const auto& buffer : model->buffers()) alike.push_back(buffer);
  for (const at::Tensor& tensor : alike) {
    const at::Tensor there = tensor.to(fabric->device()).contiguous();
    fabric->everyone().broadcast(there, reference);
    if (!there.is_same(tensor)) at::Tensor(tensor).copy_(there);
  }
  // On a device all of that may be queued still: who hears from all ranks knows that it was done.
  comm::lowest_rank_with(*fabric, false);
  return true;
}

void TrainingState::publish() {
  checkpoint::publish_model(sharded);
}

}  // namespace tesserae::train
