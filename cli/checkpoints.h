#pragma once

#include <string>
#include <vector>

#include "tesserae/checkpoint/folder.h"
#include "tesserae/os/files.h"

namespace tesserae::cli {

/// The checkpoints that a person means by `path`: itself if it is one, else those in it, oldest first; of a run folder,
/// those in its folder "checkpoints". Throws InvalidArgument if there are none.
std::vector<os::Path> checkpoints_at(const os::Path& path);

/// 1234567 as "1,234,567".
std::string grouped(uint64_t number);
/// 1'288'490'188 as "1.20 GiB".
std::string readable_bytes(uint64_t bytes);

}  // namespace tesserae::cli
