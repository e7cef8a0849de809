#include "tesserae/shard/sharded.h"

#include <torch/nn/module.h>

#include "tesserae/base/error.h"
#include "tesserae/shard/agreement.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/rejoin.h"
#include "tesserae/shard/whole_model.h"

namespace tesserae::shard {

NoSync::NoSync(Engine& engine) : engine_(engine) {
  if (!engine_.boundary()) throw InvalidArgument("no_sync", "a no_sync scope of this model is open already");
  engine_.set_boundary(false);
}

NoSync::~NoSync() {
  engine_.set_boundary(true);
}

Sharded::Sharded(std::unique_ptr<Engine> engine, std::string description)
    : engine_(std::move(engine)), description_(std::move(description)) {}
Sharded::~Sharded() = default;
Sharded::Sharded(Sharded&&) noexcept = default;

const ShardList& Sharded::shards() {
  return engine_->shards();
}

void Sharded::publish(int index) {
  engine_->publish(index);
}

void Sharded::zero_grad() {
  engine_->zero_grad();
}

NoSync Sharded::no_sync() {
  return NoSync(*engine_);
}

void Sharded::visit_parameters(const std::function<void(const std::string&, at::Tensor)>& visit, bool writeback) {
  shard::visit_parameters(*engine_, visit, writeback);
}

Resharding Sharded::reshard(const mesh::Degrees& degrees) {
  return engine_->reshard(degrees);
}

Resharding Sharded::turn(const Setting& setting, std::shared_ptr<offload::Disk> disk) {
  return engine_->turn(setting, std::move(disk));
}

Setting Sharded::setting() const {
  return engine_->setting();
}

void Sharded::rejoin() {
  const Sharding& root = engine_->root().sharding();
  require_agreement(*root.fabric, cat(to_string(root.layout.degrees()), "\n", description_));
  Rejoin(*engine_).connect();
}

bool Sharded::can_fill(const std::vector<bool>& whole, bool keeps_own) {
  return Rejoin(*engine_).can_fill(whole, keeps_own);
}

uint64_t Sharded::fill(const std::vector<bool>& whole) {
  return Rejoin(*engine_).fill(whole);
}

ReplicaReport Sharded::compare_replicas() {
  return shard::compare_replicas(*engine_);
}

bool Sharded::whole() const {
  return engine_->phase() != Engine::Phase::torn;
}

double Sharded::sum_over_ranks(double value) {
  return shard::sum_over_ranks(*engine_, value);
}

comm::Fabric& Sharded::fabric() {
  return *engine_->root().sharding().fabric;
}

comm::MeshFabric& Sharded::mesh() {
  return *engine_->root().sharding().mesh;
}

const Options& Sharded::options() const {
  return engine_->root().sharding().options;
}

int64_t Sharded::parameter_count() const {
  return shard::parameter_count(*engine_);
}

Statistics Sharded::statistics() const {
  return engine_->statistics();
}

Engine& Sharded::engine() {
  return *engine_;
}

Sharded shard_model(std::shared_ptr<torch::nn::Module> model, std::shared_ptr<comm::Fabric> fabric, Options options) {
  if (model == nullptr) throw InvalidArgument("shard_model", "the model is null");
  if (fabric == nullptr) throw InvalidArgument("shard_model", "the fabric is null; see comm::Fabric::connect");
  auto units = discover_units(*model, options.cut_by);
  std::string description = cat(text_of(options), describe(units));
  require_agreement(*fabric, cat(to_string(options.strategy.degrees), "\n", description));
  auto engine = std::make_unique<Engine>(std::move(units), std::move(fabric), std::move(options), std::move(model));
  engine->prepare();
  return Sharded(std::move(engine), std::move(description));
}

}  // namespace tesserae::shard
