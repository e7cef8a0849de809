#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tesserae/checkpoint/reader.h"
#include "tesserae/checkpoint/writer.h"
#include "tesserae/os/files.h"

namespace tesserae::testing {

/// A training state without torch: tensors of odd sizes and several types whose bytes follow from the step.
struct SampleTensor {
  std::string name;
  checkpoint::Dtype dtype = checkpoint::Dtype::F32;
  std::vector<int64_t> shape;
  std::string bytes;
};
std::vector<SampleTensor> sample_tensors(int64_t step);

/// What rank `rank` of `ranks` writes of them: each tensor is cut in as many runs as there are ranks, some of them
/// empty. `tensors` outlive it.
std::vector<checkpoint::Source> sample_sources(const std::vector<SampleTensor>& tensors, int rank, int ranks);

struct SampleSave {
  os::Path folder;
  int64_t step = 1;
  int ranks = 3;
  int keep = 0;
  bool read_back = false;
  std::string attempt = "";  ///< empty: from the step
  uint64_t block_bytes = 512;
  std::chrono::milliseconds deadline = std::chrono::seconds(10);
};
checkpoint::SaveJob sample_job(const SampleSave& save, int rank);

/// All ranks of a save, one after the other, in this thread. Returns the checkpoint's directory.
os::Path save_sample(const SampleSave& save);

/// What is wrong with a checkpoint of the sample: everything in it is read and compared. Empty: nothing.
std::string difference_from_sample(const checkpoint::Checkpoint& checkpoint);

/// What is in `folder` besides committed checkpoints.
std::vector<std::string> strays_in(const os::Path& folder);

}  // namespace tesserae::testing
