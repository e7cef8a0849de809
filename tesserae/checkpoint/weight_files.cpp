#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "tesserae/checkpoint/fault.h"
#include "tesserae/checkpoint/json_reader.h"
#include "tesserae/checkpoint/names.h"
#include "tesserae/checkpoint/weights.h"

namespace tesserae::checkpoint {
namespace {

constexpr const char* open_function = "WeightFiles::open";
constexpr uint64_t largest_index = 64 << 20;

/// Which tensor is in which file, from the text of an index.
std::map<std::string, std::string> parse_index(const os::Path& path) {
  if (os::files().status(path).size > largest_index) {
    throw Damaged(open_function, {path.native(), "", {}, "the index is larger than 64 MiB"});
  }
  std::map<std::string, std::string> map;
  nlohmann::json metadata;
  std::string tensor;
  json::Node ignored, file, entries;
  ignored.anything = &metadata;
  file.text = [&](std::string& name) {
    if (const std::string defect = file_name_defect(name); !defect.empty()) {
      throw json::Refusal{cat("file \"", name.substr(0, 80), "\": ", defect)};
    }
    if (!map.emplace(tensor, std::move(name)).second) throw json::Refusal{"key occurs twice"};
  };
  entries.member = [&](std::string& name) {
    tensor = std::move(name);
    return &file;
  };
  json::Node root = json::object_of({{"metadata", &ignored, true}, {"weight_map", &entries}});
  try {
    json::read(os::files().read(path), root);
  } catch (const json::Malformed& malformed) {
    throw Damaged(open_function, {path.native(), tensor, malformed.offset, malformed.what});
  }
  return map;
}

/// The file that says what there is: weights, or an index.
os::Path find_entry(const os::Path& path) {
  if (os::files().status(path).kind != os::FileKind::directory) return path;
  for (const char* name : {"model.safetensors", "model.safetensors.index.json"}) {
    if (os::files().exists(path / name)) return path / name;
  }
  throw InvalidArgument(open_function, cat(path.native(),
                                           " has neither model.safetensors nor its index.json; other formats "
                                           "(pickles) are not read"));
}

}  // namespace

struct WeightFiles::Impl {
  struct File {
    os::Path path;
    std::unique_ptr<os::ReadableFile> file;
    SafetensorsHeader header;
  };
  std::vector<std::unique_ptr<File>> files;
  std::map<std::string, FileTensor> tensors;
  std::map<std::string, const File*> file_of;

  File& add(const os::Path& path) {
    const os::FileStatus status = os::files().status(path);
    if (status.kind != os::FileKind::file) throw Damaged(open_function, {path.native(), "", {}, "the file is missing"});
    auto file = std::make_unique<File>();
    file->path = path;
    file->file = os::files().open(path);
    file->header = read_safetensors_header(*file->file, status.size, path.native());
    files.push_back(std::move(file));
    return *files.back();
  }

  void add_all(const File& file) {
    for (const FileTensor& tensor : file.header.tensors) {
      tensors[tensor.name] = tensor;
      file_of[tensor.name] = &file;
    }
  }

  void add_indexed(const os::Path& index) {
    std::map<std::string, std::set<std::string>> wanted;  // tensors by file
    for (const auto& [tensor, file] : parse_index(index)) wanted[file].insert(tensor);
    for (const auto& [name, names] : wanted) {
      const File& file = add(index.parent_path() / name);
      size_t found = 0;
      for (const FileTensor& tensor : file.header.tensors) {
        if (!names.contains(tensor.name)) continue;
        tensors[tensor.name] = tensor;
        file_of[tensor.name] = &file;
        ++found;
      }
      if (found == names.size()) continue;
      const auto missing = std::ranges::find_if(names, [this](const std::string& t) { return !tensors.contains(t); });
      throw Damaged(open_function,
                    {file.path.native(), *missing, {}, cat("not there, though ", index.native(), " says so")});
    }
  }
};

WeightFiles::WeightFiles(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
WeightFiles::~WeightFiles() = default;
WeightFiles::WeightFiles(WeightFiles&&) noexcept = default;

WeightFiles WeightFiles::open(const os::Path& path) {
  if (!os::files().exists(path)) throw InvalidArgument(open_function, cat(path.native(), " does not exist"));
  const os::Path entry = find_entry(path);
  auto impl = std::make_unique<Impl>();
  if (entry.native().ends_with(".json")) {
    impl->add_indexed(entry);
  } else {
    impl->add_all(impl->add(entry));
  }
  return WeightFiles(std::move(impl));
}

const std::map<std::string, FileTensor>& WeightFiles::tensors() const {
  return impl_->tensors;
}

void WeightFiles::read(const std::string& name, uint64_t begin, std::span<char> bytes) const {
  const auto found = impl_->tensors.find(name);
  if (found == impl_->tensors.end()) throw InvalidArgument("WeightFiles::read", cat("no tensor \"", name, "\""));
  const FileTensor& tensor = found->second;
  if (begin > tensor.end - tensor.begin || bytes.size() > tensor.end - tensor.begin - begin) {
    throw InvalidArgument("WeightFiles::read", cat("bytes [", begin, ", ", begin + bytes.size(), ") of tensor \"", name,
                                                   "\", which has ", tensor.end - tensor.begin));
  }
  const Impl::File& file = *impl_->file_of.at(name);
  const uint64_t offset = file.header.data_begin + tensor.begin + begin;
  if (file.file->read_at(offset, bytes) != bytes.size()) {
    throw Damaged("WeightFiles::read", {file.path.native(), name, offset, "the file ends within the tensor"});
  }
}

}  // namespace tesserae::checkpoint
