#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "tesserae/os/faulty_files.h"

namespace tesserae::os {

/// Files of a host that says of its memory what a test wants: the text of /proc/meminfo. To be put in place by
/// ScopedFiles.
class MemoryOfHost : public FaultyFiles {
 public:
  MemoryOfHost(Files& files, std::string meminfo) : FaultyFiles(files), meminfo_(std::move(meminfo)) {}
  std::unique_ptr<ReadableFile> open(const Path& path) override {
    if (path == "/proc/meminfo") return std::make_unique<Text>(meminfo_);
    return FaultyFiles::open(path);
  }

 private:
  struct Text : ReadableFile {
    explicit Text(std::string all) : text(std::move(all)) {}
    size_t read_at(uint64_t offset, std::span<char> bytes) override {
      const std::string_view rest = std::string_view(text).substr(std::min<size_t>(offset, text.size()), bytes.size());
      std::memcpy(bytes.data(), rest.data(), rest.size());
      return rest.size();
    }
    std::string text;
  };

  std::string meminfo_;
};

}  // namespace tesserae::os
