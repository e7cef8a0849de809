#include "tesserae/checkpoint/weight_folder.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"

namespace tesserae::checkpoint {
namespace {

constexpr const char* export_function = "export_weights";

uint64_t bytes_of(const FileTensor& tensor) {
  return static_cast<uint64_t>(tensor.elements() * element_bytes(tensor.dtype));
}

std::string numbered(size_t index, size_t count) {
  char name[64];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", index + 1, count);
  return name;
}

void refuse_other_weights(const os::Path& folder) {
  if (!os::files().exists(folder)) return;
  for (const std::string& name : os::files().list(folder)) {
    if (!name.starts_with("model") || name.find(".safetensors") == std::string::npos || name.ends_with(".tmp"))
      continue;
    throw InvalidArgument(export_function,
                          cat(folder.native(), " has weights already (", name, "); choose another folder"));
  }
}

}  // namespace

WeightFolder::WeightFolder(os::Path folder, std::vector<FileTensor> tensors, int64_t file_bytes)
    : folder_(std::move(folder)) {
  if (file_bytes <= 0) throw InvalidArgument(export_function, cat("files of ", file_bytes, " bytes"));
  refuse_other_weights(folder_);
  std::set<std::string> names;
  for (FileTensor& tensor : tensors) {
    if (!names.insert(tensor.name).second) {
      throw InvalidArgument(export_function,
                            cat("two tensors would be named \"", tensor.name, "\"; correct the name map"));
    }
    const uint64_t bytes = bytes_of(tensor);
    // What is empty needs no file of its own: one is opened when its first bytes come.
    if (files_.empty() ||
        (files_.back().bytes > 0 && bytes > 0 && files_.back().bytes + bytes > static_cast<uint64_t>(file_bytes))) {
      files_.emplace_back();
    }
    files_.back().bytes += bytes;
    files_.back().tensors.push_back(std::move(tensor));
  }
  if (files_.empty()) throw InvalidArgument(export_function, "there are no tensors");
  for (size_t i = 0; i < files_.size(); ++i) {
    files_[i].name = files_.size() == 1 ? "model.safetensors" : numbered(i, files_.size());
  }
  os::files().make_directories(folder_);
  open_next();
}

WeightFolder::~WeightFolder() {
  file_.reset();
  for (size_t i = 0; i < opened_; ++i) {
    try {
      if (os::files().exists(draft(files_[i]))) os::files().remove(draft(files_[i]));
    } catch (const std::exception& failure) {
      log(LogLevel::warning, failure.what());
    }
  }
}

void WeightFolder::open_next() {
  File& file = files_[opened_];
  file_ = os::files().create(draft(file));
  ++opened_;
  file_->write(compose_safetensors_header(file.tensors, {{"format", "pt"}}));
  left_ = file.bytes;
  if (left_ == 0) close();
}

void WeightFolder::close() {
  file_->sync();
  file_->close();
  file_.reset();
}

void WeightFolder::write(std::string_view bytes) {
  while (!bytes.empty()) {
    if (!file_) {
      if (opened_ == files_.size()) throw InvalidArgument(export_function, "more data than were announced");
      open_next();
      continue;
    }
    const std::string_view head = bytes.substr(0, left_);
    file_->write(head);
    bytes.remove_prefix(head.size());
    left_ -= head.size();
    if (left_ == 0) close();
  }
}

void WeightFolder::finish() {
  if (file_ || opened_ != files_.size()) throw InvalidArgument(export_function, "fewer data than were announced");
  for (const File& file : files_) os::files().rename(draft(file), folder_ / file.name);
  if (files_.size() > 1) {
    nlohmann::ordered_json index;
    uint64_t total = 0;
    for (const File& file : files_) total += file.bytes;
    index["metadata"]["total_size"] = total;
    nlohmann::json map = nlohmann::json::object();
    for (const File& file : files_) {
      for (const FileTensor& tensor : file.tensors) map[tensor.name] = file.name;
    }
    index["weight_map"] = std::move(map);
    const os::Path path = folder_ / "model.safetensors.index.json";
    const os::Path unfinished = path.native() + ".tmp";
    const auto file = os::files().create(unfinished);
    file->write(index.dump(2) + "\n");
    file->sync();
    file->close();
    os::files().rename(unfinished, path);
  }
  os::files().sync_directory(folder_);
}

}  // namespace tesserae::checkpoint
