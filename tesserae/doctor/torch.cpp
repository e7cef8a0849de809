#include "tesserae/doctor/torch.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/version.h>

#include "tesserae/comm/transports/nccl.h"
#include "tesserae/doctor/text.h"

namespace tesserae::doctor {

TorchFacts TorchFacts::look(int local_ranks) {
  TorchFacts torch;
  torch.built_against = TORCH_VERSION;
  torch.torch_has_cuda = at::hasCUDA() || c10::impl::hasDeviceGuardImpl(c10::kCUDA);
  torch.has_nccl = comm::has_nccl();
  torch.local_ranks = local_ranks;
  for (const auto type : {c10::kCUDA, c10::kXPU, c10::kHPU, c10::kMTIA, c10::kPrivateUse1}) {
    if (!c10::impl::hasDeviceGuardImpl(type)) continue;
    torch.devices.push_back(
        {c10::DeviceTypeName(type, /*lower_case=*/true), c10::impl::VirtualGuardImpl(type).deviceCount()});
  }
  return torch;
}

Findings examine(const TorchFacts& torch) {
  Findings found = {{"torch", Verdict::good, cat("built against ", torch.built_against), ""}};
  int devices = 0;
  for (const auto& each : torch.devices) devices += each.count;
  if (devices == 0) {
    const bool expected = !torch.torch_has_cuda;
    found.push_back({"accelerators", expected ? Verdict::good : Verdict::warning,
                     expected ? "none: this torch is for the CPU alone" : "none that torch can use",
                     expected ? "" : "look at nvidia-smi, CUDA_VISIBLE_DEVICES and the driver's version"});
  }
  for (const auto& each : torch.devices) {
    if (each.count == 0) continue;
    // One visible device a rank is the other usual way: every rank then uses device 0.
    const bool few = each.count < torch.local_ranks && each.count != 1;
    found.push_back(
        {"accelerators", few ? Verdict::wrong : Verdict::good,
         cat(each.count, " of type ", each.type, " for ", counted(torch.local_ranks, "rank"), " of this host"),
         few ? cat("start at most ", each.count, " ranks on this host, or show each rank one device") : ""});
  }
  if (torch.torch_has_cuda) {
    found.push_back({"NCCL", torch.has_nccl ? Verdict::good : Verdict::wrong,
                     torch.has_nccl ? "in this build" : "not in this build: ranks on GPUs cannot communicate",
                     torch.has_nccl ? "" : "build tesserae again where the headers of CUDA and NCCL are (CUDA_HOME)"});
  }
  return found;
}

}  // namespace tesserae::doctor
