#pragma once

#include "tesserae/comm/fabric.h"
#include "tesserae/config/config.h"
#include "tesserae/train/job_setup.h"

namespace tesserae::train {

/// The ranks of a job may have been told different things where each host reads a configuration of its own. Whatever
/// decides what they compute, which steps they take, and what they do about a loss must be the same, and so must their
/// data, wherever these lie; paths and what watches a run may differ. Collective. Throws ConfigError on all ranks, with
/// the first key that differs and what two hosts say of it.
void require_same_config(comm::Fabric& fabric, const config::Config& config, const JobSetup& setup);

}  // namespace tesserae::train
