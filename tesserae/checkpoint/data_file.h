#pragma once

#include <stop_token>
#include <vector>

#include "tesserae/checkpoint/manifest.h"
#include "tesserae/checkpoint/writer.h"

namespace tesserae::checkpoint {

/// Writes `sources` as the safetensors file of this rank in `directory`, synced and closed, and returns what a manifest
/// says of it: one file, or none where there is nothing to write. Tensors that are written whole keep name and shape;
/// of others the file has the run "NAME[begin:end]" of the stored order, as one dimension. Memory: one block. Throws
/// IoError, InvalidArgument naming the tensor, Cancelled.
Manifest write_data_file(const SaveJob& job, const os::Path& directory, const std::vector<Source>& sources,
                         const std::stop_token& stop);

}  // namespace tesserae::checkpoint
