#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tesserae/comm/fabric.h"

namespace tesserae::shard {

class Engine;

// A sharded model as a whole, between steps.

/// Sharded::visit_parameters.
void visit_parameters(Engine& engine, const std::function<void(const std::string& name, at::Tensor parameter)>& visit,
                      bool writeback = false);

/// Elements of all parameters, split ones whole; tied parameters count once.
int64_t parameter_count(const Engine& engine);

/// Degrees, units, parameters: what ranks must agree on, as lines.
std::string describe(const Engine& engine);

/// The ranks of all that is asked of the model, also where its root is on fewer (experts by themselves).
comm::Fabric& state_ranks(const Engine& engine);
/// Over all ranks that shard the root's state, on the control lane. Collective.
double sum_over_ranks(const Engine& engine, double value);
std::vector<double> sums_over_ranks(const Engine& engine, const std::vector<double>& values);
double max_over_ranks(const Engine& engine, double value);  ///< NaN if one is

}  // namespace tesserae::shard
