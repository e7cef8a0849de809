#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tesserae/comm/fabric.h"
#include "tesserae/cost/machine.h"

namespace tesserae::probe {

struct ProbeOptions {
  std::string name;                            ///< of the machine; empty: the name of the host
  std::vector<std::string> dtypes = {"fp32"};  ///< "fp32", "bf16", "fp16"
  double window = 0.05;                        ///< seconds of one measurement: longer ones are less noisy
  /// Told what is measured next, on every rank.
  std::function<void(const std::string&)> say = [](const std::string&) {};
};

/// Measures what a step of training consists of, on all ranks at once, for some seconds: cost::Machine says what.
/// Collective; the same on all ranks. Throws InvalidArgument for a dtype that is none of the above, and what Group's
/// verbs throw.
cost::Machine probe(const std::shared_ptr<comm::Fabric>& fabric, const ProbeOptions& options);

}  // namespace tesserae::probe
