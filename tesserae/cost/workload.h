#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "tesserae/cost/facts.h"
#include "tesserae/cost/machine.h"
#include "tesserae/cost/step_time.h"
#include "tesserae/cost/transformer.h"
#include "tesserae/model/config.h"

namespace tesserae::cost {

/// What is trained, as far as a plan asks: sizes, activations, and what computing takes, for any layout. A micro-batch
/// has Execution::micro_batch of what its batches consist of: sequences, or rows of a script's batch.
class Workload {
 public:
  virtual ~Workload() = default;

  /// For people: "10.2 B parameters: 24 layers of ...".
  virtual std::string text() const = 0;
  virtual nlohmann::ordered_json json() const = 0;
  /// What a batch is counted in: "sequences of 4096 tokens".
  virtual std::string unit_of_batch(const Execution& run) const = 0;

  /// Whether `tensor` ranks can split its layers, `context` ranks its sequences.
  virtual bool can_split(int tensor) const = 0;
  virtual bool can_cut(int context) const = 0;
  /// Experts of a layer, between which a router chooses; 0: the model has none.
  virtual int64_t experts() const { return 0; }
  /// Facts of the model, as one of `tensor` tensor-parallel ranks has it, and of `expert` that share out its experts.
  virtual void set_sizes(Facts& facts, int tensor, int expert) const = 0;
  /// Bytes of one rank at the fullest moment of a step.
  virtual Activations activations(const Execution& run) const = 0;
  /// Seconds that one rank computes for one micro-batch. Throws as Machine::of() does.
  virtual ComputeTime compute_time(const Execution& run, const Machine& machine, const std::string& dtype) const = 0;
  virtual AxisTraffic tensor_traffic(const Execution& run) const = 0;
  virtual AxisTraffic context_traffic(const Execution& run) const = 0;
  virtual AxisTraffic expert_traffic(const Execution& /*run*/) const { return {}; }
  /// Bytes of a rank's process beside its model, where ranks compute on the host; 0: what the machine's probe measured.
  virtual double process() const { return 0; }
  /// Bytes that a rank's libraries keep for products; 0: process() has them.
  virtual double workspace(const Execution& /*run*/, const Machine::Workspaces& /*kept*/) const { return 0; }
};

/// The transformer of model/, dense or a mixture of experts, by formulas.
class Transformer final : public Workload {
 public:
  explicit Transformer(const model::GptConfig& model);

  std::string text() const override;
  nlohmann::ordered_json json() const override;
  std::string unit_of_batch(const Execution& run) const override;
  bool can_split(int tensor) const override;
  bool can_cut(int /*context*/) const override { return true; }
  int64_t experts() const override { return model_.experts; }
  void set_sizes(Facts& facts, int tensor, int expert) const override;
  Activations activations(const Execution& run) const override;
  ComputeTime compute_time(const Execution& run, const Machine& machine, const std::string& dtype) const override;
  AxisTraffic tensor_traffic(const Execution& run) const override;
  AxisTraffic context_traffic(const Execution& run) const override;
  AxisTraffic expert_traffic(const Execution& run) const override;
  double workspace(const Execution& run, const Machine::Workspaces& kept) const override;

 private:
  model::GptConfig model_;
};

}  // namespace tesserae::cost
