#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tesserae::mesh {

/// The hosts that Slurm means by "node[01-03,07],login1", in that order: node01 node02 node03 node07 login1.
/// Ranges keep their leading zeros; a name may have several brackets. Throws InvalidArgument quoting a malformed list
/// or one of more than a million hosts.
std::vector<std::string> expand_host_list(std::string_view list);

/// Slurm's "4(x2),3" (tasks on each host, with repeats) as 4 4 3. Throws InvalidArgument quoting a malformed one.
std::vector<int> expand_task_counts(std::string_view counts);

}  // namespace tesserae::mesh
