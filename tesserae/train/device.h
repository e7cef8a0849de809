#pragma once

#include <c10/core/Device.h>

#include <string>

namespace tesserae::train {

/// The device of a rank: `wanted` is run.device. With cuda, the GPU numbered `local_rank`.
/// Throws config::ConfigError if there is no such GPU.
c10::Device choose_device(const std::string& wanted, int local_rank);

/// Whether the device multiplies bf16 matrices in hardware: what precision "auto" asks. Every CUDA device counts.
bool has_bf16(c10::Device device);

}  // namespace tesserae::train
