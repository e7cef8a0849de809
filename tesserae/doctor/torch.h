#pragma once

#include <string>
#include <vector>

#include "tesserae/doctor/finding.h"

namespace tesserae::doctor {

/// What this build has of torch, and what torch finds. Fields are public, so that tests describe machines that they
/// have not.
struct TorchFacts {
  struct Devices {
    std::string type;  ///< "cuda", "xpu", ...
    int count = 0;
  };

  std::string built_against;  ///< torch's version
  bool torch_has_cuda = false;
  bool has_nccl = false;
  std::vector<Devices> devices;  ///< of each kind that torch knows here
  int local_ranks = 1;

  static TorchFacts look(int local_ranks);
};

Findings examine(const TorchFacts& torch);

}  // namespace tesserae::doctor
