#pragma once

#include "tesserae/cost/facts.h"
#include "tesserae/model/config.h"
#include "tesserae/shard/options.h"

namespace tesserae::cost {

/// Sizes of the transformer of model/, as one of `tensor` tensor-parallel ranks has it, and of `expert` that share out
/// experts. Throws as part_sizes() does.
void set_model(Facts& facts, const model::GptConfig& model, int tensor, int expert);

/// What an engine with these options does at P > 1: its limits, the lifetimes and the accumulation.
void set_options(Facts& facts, const shard::Options& options);

}  // namespace tesserae::cost
