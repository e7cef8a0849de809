#include "bench/training.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <numeric>

#include "tesserae/model/init.h"

namespace tesserae::bench {
namespace {

model::Gpt on_meta(model::GptConfig config) {
  config.device = c10::kMeta;
  return model::Gpt(config);
}

model::GptConfig shape_of(const TrainingOptions& options) {
  model::GptConfig config = options.model;
  config.max_sequence = options.sequence;
  return config;
}

shard::Options how(const TrainingOptions& options, const mesh::Strategy& strategy) {
  shard::Options how;
  how.strategy = strategy;
  if (options.precision == "bf16") how.precision = shard::Precision::bf16();
  how.initialize = model::initialize(shape_of(options));
  return how;
}

}  // namespace

void TrainingOptions::add_to(CLI::App& app) {
  model.tied = false;
  app.add_option("--dimension", model.dimension)->required();
  app.add_option("--layers", model.layers)->required();
  app.add_option("--heads", model.heads)->required();
  app.add_option("--vocabulary", model.vocabulary)->required();
  app.add_option("--sequence", sequence)->check(CLI::PositiveNumber);
  app.add_option("--batch", batch, "sequences a rank and step")->check(CLI::PositiveNumber);
  app.add_option("--precision", precision)->check(CLI::IsMember({"fp32", "bf16"}));
}

Training::Training(const TrainingOptions& options, std::shared_ptr<comm::Fabric> fabric, const mesh::Strategy& strategy)
    : options_(options),
      fabric_(std::move(fabric)),
      model_(on_meta(shape_of(options))),
      sharded_(shard::shard_model(model_, fabric_, how(options, strategy))),
      optimizer_(sharded_) {}

at::Tensor Training::forward() {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(
      1000 + static_cast<uint64_t>(steps_++ * fabric_->size() + fabric_->rank()));
  const auto tokens =
      at::randint(options_.model.vocabulary, {options_.batch, options_.sequence + 1}, generator, at::kLong);
  const c10::Device device = fabric_->device();
  return model_->forward(tokens.slice(1, 0, -1).contiguous().to(device), tokens.slice(1, 1).contiguous().to(device));
}

at::Tensor Training::backward() {
  const at::Tensor loss = forward();
  loss.backward();
  return loss.detach();
}

void Training::update() {
  optimizer_.step({.measure_norm = false});  // the peers do not compute it either
  optimizer_.zero_grad();
}

at::Tensor Training::step() {
  at::Tensor loss = backward();
  update();
  return loss;
}

std::vector<double> Training::of_all_ranks(double value) {
  const at::Tensor own = at::full({fabric_->size()}, value, at::kDouble).to(fabric_->device());
  fabric_->everyone().all_gather(own);
  const at::Tensor all = own.cpu();
  const auto* const values = all.const_data_ptr<double>();
  return {values, values + fabric_->size()};
}

double Training::largest(double value) {
  const auto all = of_all_ranks(value);
  return *std::max_element(all.begin(), all.end());
}

double Training::sum(double value) {
  const auto all = of_all_ranks(value);
  return std::accumulate(all.begin(), all.end(), 0.0);
}

}  // namespace tesserae::bench
