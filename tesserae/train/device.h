#pragma once

#include <c10/core/Device.h>

#include <string>

namespace tesserae::train {

/// The device of a rank: `wanted` is run.device. Of an accelerator, the one numbered `local_rank`.
/// Throws config::ConfigError if there is no such device.
c10::Device choose_device(const std::string& wanted, int local_rank);

/// Why the ranks of this host cannot be `local_ranks`: there is no device for the last of them. Empty: they can.
std::string lacks_device(const std::string& wanted, int local_ranks);

/// How many accelerators this process can use.
int accelerators();

/// Which of `devices` that a rank sees is its own. `chosen`: somebody has chosen what ranks see (CUDA_VISIBLE_DEVICES):
/// if each is shown one (srun --gpus-per-task=1), that is it. Throws config::ConfigError where there is none left.
int device_index(int local_rank, int devices, bool chosen);

/// Whether the device multiplies bf16 matrices in hardware: what precision "auto" asks. Every accelerator counts.
bool has_bf16(c10::Device device);

}  // namespace tesserae::train
