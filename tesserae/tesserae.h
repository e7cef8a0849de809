#pragma once

/// Everything that a training program needs, without the layers' namespaces.

#include "tesserae/base/error.h"
#include "tesserae/comm/error.h"
#include "tesserae/comm/fabric.h"
#include "tesserae/mesh/layout.h"
#include "tesserae/mesh/strategy.h"
#include "tesserae/mesh/world.h"
#include "tesserae/model/generate.h"
#include "tesserae/model/gpt.h"
#include "tesserae/model/init.h"
#include "tesserae/optim/adamw.h"
#include "tesserae/optim/loss_scaler.h"
#include "tesserae/optim/optimizer.h"
#include "tesserae/optim/schedule.h"
#include "tesserae/optim/sgd.h"
#include "tesserae/shard/options.h"
#include "tesserae/shard/resharding.h"
#include "tesserae/shard/sequential.h"
#include "tesserae/shard/shard.h"
#include "tesserae/shard/sharded.h"
#include "tesserae/shard/statistics.h"
#include "tesserae/shard/unit.h"

namespace tesserae {

using comm::Fabric;
using comm::FabricOptions;
using mesh::Degrees;
using mesh::from_hybrid_shard_degree;
using mesh::preset;
using mesh::Strategy;
using mesh::World;
using model::Gpt;
using model::GptConfig;
using optim::AdamW;
using optim::LossScaler;
using optim::Sgd;
using shard::Accumulation;
using shard::Options;
using shard::Precision;
using shard::shard_model;
using shard::Sharded;
using shard::Unit;

}  // namespace tesserae
