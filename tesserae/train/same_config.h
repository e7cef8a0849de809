#pragma once

#include "tesserae/comm/fabric.h"
#include "tesserae/config/config.h"

namespace tesserae::train {

/// The ranks of a job may have been told different things where each host reads a configuration of its own. What
/// decides which steps they take, and what they do about a loss, must be the same: the sections train, optimizer,
/// bad_steps and recovery. Collective. Throws ConfigError on all ranks, with the first key that differs and what two
/// hosts say of it.
void require_same_config(comm::Fabric& fabric, const config::Config& config);

}  // namespace tesserae::train
