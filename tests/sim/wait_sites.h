#pragma once

#include <string>
#include <vector>

#include "tests/sim/waits.h"

namespace tesserae::sim {

/// A line of the engine that waits, or makes another wait: `tesserae/shard/flat_parameter.cpp:128 block`. What several
/// share (Ticket::wait) is no line of its own; those that call it are.
struct WaitSite {
  std::string file;  ///< from the root of the project
  int line = 0;
  Wait wait{};
  std::vector<void*> through, at;  ///< as leave_out() takes them

  std::string name() const;
};

/// Those of `calls`; what tests wait for themselves is left away. By file and line. Runs addr2line, and throws Error
/// where that says nothing: this program must have been built with line numbers (cmake/Layers.cmake).
std::vector<WaitSite> wait_sites(const std::vector<WaitCall>& calls);

/// Lines of the sources under `root` that are written as such waits are, and not among `sites`: those that wait for
/// other things than devices (listed in wait_sites.cpp, with the reason) left away.
std::vector<std::string> never_met(const std::vector<WaitSite>& sites, const std::string& root);

}  // namespace tesserae::sim
