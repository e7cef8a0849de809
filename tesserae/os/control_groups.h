#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "tesserae/os/files.h"

namespace tesserae::os {

/// A control group of Linux, of version 1 or 2, which have different files.
struct ControlGroup {
  Path folder;
  bool second = false;

  /// The number that a file of it begins with; nothing if there is no such file, or another word in it ("max").
  std::optional<int64_t> number(std::string_view file) const;
};

/// The group of `controller` ("memory", "cpu") that this process is in, and those around it: each may limit it.
std::vector<ControlGroup> control_groups(std::string_view controller);

/// Of how many processors a group may use the time; nothing if it does not say. That of containers which were given
/// some (`docker run --cpus`, a limit of Kubernetes), and may run on all.
std::optional<double> processor_quota(const ControlGroup& group);

}  // namespace tesserae::os
