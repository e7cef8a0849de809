#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tesserae/checkpoint/safetensors.h"
#include "tesserae/os/files.h"

namespace tesserae::checkpoint {

/// Writes tensors to a folder as Hugging Face lays weights out, in the order in which they were announced:
///  1. each file is written as NAME.tmp and synced; when all are complete they get their names;
///  2. last comes the index, if there are several files.
/// A writer that goes before the end takes its unfinished files away.
class WeightFolder {
 public:
  /// `tensors`: names, types and shapes, in the order in which they will come. Throws InvalidArgument if the folder has
  /// weights already, or a name occurs twice.
  WeightFolder(os::Path folder, std::vector<FileTensor> tensors, int64_t file_bytes);
  ~WeightFolder();
  WeightFolder(const WeightFolder&) = delete;
  WeightFolder& operator=(const WeightFolder&) = delete;

  /// The next bytes of the data, tensor after tensor.
  void write(std::string_view bytes);
  /// All data have come: gives the files their names.
  void finish();

 private:
  struct File {
    std::string name;
    std::vector<FileTensor> tensors;
    uint64_t bytes = 0;  ///< of data
  };

  os::Path draft(const File& file) const { return folder_ / (file.name + ".tmp"); }
  void open_next();
  void close();

  os::Path folder_;
  std::vector<File> files_;
  size_t opened_ = 0;  // how many files have been begun
  std::unique_ptr<os::WritableFile> file_;
  uint64_t left_ = 0;  // bytes of data that the open file still takes
};

}  // namespace tesserae::checkpoint
