#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "tesserae/checkpoint/fault.h"
#include "tesserae/os/files.h"

namespace tesserae::checkpoint {

struct VerifyResult {
  std::vector<Fault> faults;  ///< empty: every byte is what was written
  uint64_t bytes = 0;         ///< that were checked
  int files = 0;
};

/// Checks a checkpoint's manifest, every block of every data file, the header of each data file against the manifest,
/// and that there is no data file which the manifest does not name. Goes on after a fault; neighbouring bad blocks are
/// one. `progress` is called with the bytes checked so far, once for each block. Throws IoError for what cannot be
/// read though it is there.
VerifyResult verify(const os::Path& checkpoint, const std::function<void(uint64_t bytes)>& progress = {});

}  // namespace tesserae::checkpoint
