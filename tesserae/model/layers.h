#pragma once

#include "tesserae/model/config.h"
#include "tesserae/tensor/layers.h"

namespace tesserae::model {

/// What the layers of a model have in common; `config` is resolved. The sequence is dimension 1 of [batch, time, ...].
inline tensor::LayerOptions layer_options(const GptConfig& config) {
  return {config.parallel, config.sequence_parallel ? 1 : tensor::no_sequence,
          at::TensorOptions().device(config.device).dtype(config.dtype)};
}

}  // namespace tesserae::model
