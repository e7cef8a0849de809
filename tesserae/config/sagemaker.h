#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tesserae/config/config.h"
#include "tesserae/config/json.h"
#include "tesserae/mesh/launch.h"

namespace tesserae::config {

/// The environment of a training job of SageMaker. Its training toolkit sets SM_* variables; in a container without it
/// they are answered from what SageMaker itself mounts under /opt/ml (SAGEMAKER_BASE_DIR names another folder, as it
/// does for the toolkit): input/config/{resourceconfig,hyperparameters}.json, input/data, model, output/data. On other
/// machines it is `environment` unchanged. Throws ConfigError for a file there that cannot be read.
mesh::Lookup sagemaker_environment(const mesh::Lookup& environment);
/// Of this process.
mesh::Lookup sagemaker_environment();

/// load_config for `tesserae train`, weakest first:
///  1. in a job of SageMaker: runs go to SM_OUTPUT_DATA_DIR, weights to SM_MODEL_DIR, checkpoints to
///     /opt/ml/checkpoints where the job has one host (several hosts do not share that folder);
///  2. the file;
///  3. in such a job, the modelparallel parameters of its estimator (SM_HP_MP_PARAMETERS) and its other
///     hyperparameters (SM_HPS), which are keys with dots, as in {"train.steps": 100};
///  4. `assignments`.
/// Wherever it runs, a path that reads channel:NAME or channel:NAME/more is in the folder of that channel,
/// SM_CHANNEL_NAME. Throws ConfigError: also for a hyperparameter that is no key, a channel that is not there, and for
/// checkpoints of several hosts without a folder.
Config load_train_config(const std::string& path, const std::vector<std::string>& assignments,
                         const mesh::Lookup& environment);

/// The modelparallel parameters that an estimator gave (SM_HP_MP_PARAMETERS), checked as a configuration of tsm.init;
/// nothing where there are none. Throws ConfigError naming the variable.
std::optional<Json> sagemaker_parameters(const mesh::Lookup& environment);

}  // namespace tesserae::config
