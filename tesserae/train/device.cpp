#include "tesserae/train/device.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>

#include <cstdlib>
#include <optional>
#include <sstream>

#include "tesserae/comm/device_transport.h"
#include "tesserae/config/json.h"
#include "tesserae/os/files.h"

namespace tesserae::train {
namespace {

// What libtorch computes on, if it is what was asked for and a transport knows it.
std::optional<c10::DeviceType> accelerator(const std::string& wanted) {
  const auto type = at::getAccelerator();
  if (!type || comm::device_transport(*type).empty()) return std::nullopt;
  return wanted == "auto" || c10::Device(wanted).type() == *type ? type : std::nullopt;
}

}  // namespace

c10::Device choose_device(const std::string& wanted, int local_rank) {
  if (wanted == "cpu") return c10::kCPU;
  const auto type = accelerator(wanted);
  const int devices = type ? at::accelerator::deviceCount() : 0;
  if (wanted == "auto" && devices == 0) return c10::kCPU;
  const int index = device_index(local_rank, devices, std::getenv("CUDA_VISIBLE_DEVICES") != nullptr);
  at::globalContext().lazyInitDevice(*type);  // the allocator cannot be asked for memory before
  return {*type, static_cast<c10::DeviceIndex>(index)};
}

std::string lacks_device(const std::string& wanted, int local_ranks) {
  try {
    choose_device(wanted, local_ranks - 1);
    return "";
  } catch (const config::ConfigError& error) {
    return config::without_function(error);
  }
}

int accelerators() {
  return accelerator("auto") ? at::accelerator::deviceCount() : 0;
}

int device_index(int local_rank, int devices, bool chosen) {
  if (local_rank < devices) return local_rank;
  if (devices == 1 && chosen) return 0;
  throw config::ConfigError(
      "run.device", cat("local rank ", local_rank, " has no GPU: this host has ", devices, " that libtorch can use"));
}

bool has_bf16(c10::Device device) {
  if (!device.is_cpu()) return true;
  try {
    // The kernel's names: x86's flags, and bf16 for ARM. torch's own query differs between its versions.
    std::istringstream words(os::files().read("/proc/cpuinfo"));
    for (std::string word; words >> word;) {
      if (word == "avx512_bf16" || word == "amx_bf16" || word == "bf16") return true;
    }
  } catch (const IoError&) {
    // Not Linux: fp32 is right everywhere.
  }
  return false;
}

}  // namespace tesserae::train
