#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

#include "tesserae/model/config.h"

namespace tesserae::model {

/// A seed of its own for each name: a pure function, equal on every machine.
uint64_t seed_of(uint64_t seed, const std::string& name);

/// The initial values of a model of that configuration, for shard::Options::initialize. Each parameter has its own
/// generator, seeded with config.seed and its name, so its numbers depend neither on the order in which parameters are
/// filled nor on how many ranks or units there are, nor on device and dtype (but for rounding).
///
/// Matrices: normal(0, 0.02); those that write into the residual stream (attention.output, feed_forward.down, that of
/// experts): that divided by sqrt(2 * layers), so that its size does not grow with depth (GPT-2). Norms: 1.
std::function<void(const std::string& name, at::Tensor& parameter)> initialize(const GptConfig& config);

}  // namespace tesserae::model
