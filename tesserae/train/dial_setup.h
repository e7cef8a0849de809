#pragma once

#include <functional>
#include <optional>
#include <string>

#include "tesserae/config/config.h"
#include "tesserae/dial/dial.h"
#include "tesserae/train/job_setup.h"
#include "tesserae/train/training_state.h"

namespace tesserae::train {

/// With hybrid_shard_degree "auto": the degrees to begin with, before there is a model to measure; on hosts whose
/// memory no degree is enough for, also the tiers. Collective; the same on all ranks.
void choose_degrees(JobSetup& setup, const config::Config& config, const std::shared_ptr<comm::Fabric>& fabric,
                    const cost::Links& links);

/// The dial of a run as its configuration says. `links`: if they are measured already. `say`: rank 0's.
dial::DialOptions dial_options(const config::Config& config, TrainingState& state, const os::Path& run_folder,
                               std::optional<cost::Links> links, std::function<void(const std::string&)> say);

}  // namespace tesserae::train
