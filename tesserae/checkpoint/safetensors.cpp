#include "tesserae/checkpoint/safetensors.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>

#include "tesserae/base/checked.h"
#include "tesserae/checkpoint/fault.h"
#include "tesserae/checkpoint/json_reader.h"
#include "tesserae/checkpoint/names.h"

namespace tesserae::checkpoint {
namespace {

constexpr uint64_t length_bytes = 8;
constexpr uint64_t data_alignment = 64;
constexpr const char* parse_function = "parse_safetensors_header";

/// Bytes of the data of `tensor`; nothing if the shape overflows or the elements do not fill whole bytes.
std::optional<uint64_t> data_bytes_of(const FileTensor& tensor) {
  int64_t count = 1;
  for (const int64_t size : tensor.shape) {
    if (__builtin_mul_overflow(count, size, &count)) return std::nullopt;
  }
  uint64_t total = 0;
  if (__builtin_mul_overflow(static_cast<uint64_t>(count), static_cast<uint64_t>(bits(tensor.dtype)), &total)) {
    return std::nullopt;
  }
  if (total % 8 != 0) return std::nullopt;
  return total / 8;
}

/// The schema of a header, and what it has taken so far.
class SafetensorsReader {
 public:
  SafetensorsReader() {
    dtype_.text = [this](std::string& name) {
      const std::optional<Dtype> dtype = dtype_from_name(name);
      if (!dtype) throw json::Refusal{cat("unknown type \"", name.substr(0, 40), "\"")};
      current().dtype = *dtype;
    };
    size_.integer = [this](int64_t size) { current().shape.push_back(size); };
    shape_.element = [this](size_t index) { return index < SafetensorsLimits::dimensions ? &size_ : nullptr; };
    offset_.integer = [this](int64_t offset) {
      (offsets_++ == 0 ? current().begin : current().end) = static_cast<uint64_t>(offset);
    };
    range_.begin = [this] { offsets_ = 0; };
    range_.element = [this](size_t index) { return index < 2 ? &offset_ : nullptr; };
    range_.end = [this] {
      if (offsets_ != 2) throw json::Refusal{"expected two offsets"};
    };
    tensor_ = json::object_of({{"dtype", &dtype_}, {"shape", &shape_}, {"data_offsets", &range_}});
    note_.text = [this](std::string& value) { header_.metadata[note_key_] = std::move(value); };
    metadata_.member = [this](std::string& key) {
      if (header_.metadata.size() == SafetensorsLimits::metadata) throw json::Refusal{"too much metadata"};
      note_key_ = std::move(key);
      if (!header_.metadata.emplace(note_key_, "").second) throw json::Refusal{"key occurs twice"};
      return &note_;
    };
    root_.member = [this](std::string& key) { return member(key); };
  }

  json::Node& root() { return root_; }
  SafetensorsHeader& header() { return header_; }
  /// The tensor at hand when the reading stopped.
  std::string tensor() const { return header_.tensors.empty() ? "" : header_.tensors.back().name; }

 private:
  FileTensor& current() { return header_.tensors.back(); }

  json::Node* member(std::string& key) {
    if (key == "__metadata__") {
      if (std::exchange(has_metadata_, true)) throw json::Refusal{"key occurs twice"};
      return &metadata_;
    }
    if (header_.tensors.size() == SafetensorsLimits::tensors) {
      throw json::Refusal{cat("more than ", SafetensorsLimits::tensors, " tensors")};
    }
    header_.tensors.emplace_back().name = std::move(key);
    if (const std::string defect = tensor_name_defect(current().name); !defect.empty()) throw json::Refusal{defect};
    return &tensor_;
  }

  SafetensorsHeader header_;
  json::Node dtype_, size_, shape_, offset_, range_, tensor_, note_, metadata_, root_;
  int offsets_ = 0;
  std::string note_key_;
  bool has_metadata_ = false;
};

void check_names(const std::vector<FileTensor>& tensors, const std::string& file) {
  std::vector<const FileTensor*> sorted;
  sorted.reserve(tensors.size());
  for (const FileTensor& tensor : tensors) sorted.push_back(&tensor);
  std::ranges::sort(sorted, {}, [](const FileTensor* tensor) -> const std::string& { return tensor->name; });
  const auto twice = std::ranges::adjacent_find(
      sorted, {}, [](const FileTensor* tensor) -> const std::string& { return tensor->name; });
  if (twice != sorted.end()) throw Damaged(parse_function, {file, (*twice)->name, {}, "the name occurs twice"});
}

/// Sorts by place and insists that the data follow each other without gap or overlap and fill the file.
void check_places(SafetensorsHeader& header, uint64_t data_bytes, const std::string& file) {
  std::ranges::stable_sort(header.tensors, {}, [](const FileTensor& t) { return std::pair(t.begin, t.end); });
  uint64_t expected = 0;
  for (const FileTensor& tensor : header.tensors) {
    auto refuse = [&](const std::string& what) {
      throw Damaged(parse_function, {file, tensor.name, header.data_begin + expected, what});
    };
    if (tensor.begin != expected || tensor.end < tensor.begin) {
      refuse(cat("data at [", tensor.begin, ", ", tensor.end, "), expected to begin at ", expected));
    }
    const std::optional<uint64_t> needed = data_bytes_of(tensor);
    if (!needed || *needed != tensor.end - tensor.begin) {
      refuse(cat(tensor.end - tensor.begin, " bytes of data do not fit type and shape"));
    }
    if (tensor.end > data_bytes) refuse(cat("data end at ", tensor.end, ", the file's at ", data_bytes));
    expected = tensor.end;
  }
  if (expected != data_bytes) {
    throw Damaged(parse_function, {file, "", header.data_begin + expected,
                                   cat("the file has ", data_bytes, " bytes of data, its tensors ", expected)});
  }
}

}  // namespace

int64_t FileTensor::elements() const {
  int64_t count = 1;
  for (const int64_t size : shape) count = checked_mul(count, size);
  return count;
}

SafetensorsHeader parse_safetensors_header(std::string_view text, uint64_t data_bytes, const std::string& file) {
  SafetensorsReader reader;
  try {
    json::read(text, reader.root());
  } catch (const json::Malformed& malformed) {
    throw Damaged(parse_function,
                  {file, reader.tensor(), length_bytes + malformed.offset, cat("header: ", malformed.what)});
  }
  SafetensorsHeader header = std::move(reader.header());
  header.data_begin = length_bytes + text.size();
  check_names(header.tensors, file);
  check_places(header, data_bytes, file);
  return header;
}

SafetensorsHeader read_safetensors_header(os::ReadableFile& file, uint64_t bytes, const std::string& path) {
  auto refuse = [&path](const std::string& what) { throw Damaged("read_safetensors_header", {path, "", 0, what}); };
  char encoded[length_bytes];
  if (file.read_at(0, encoded) != length_bytes) refuse(cat("the file has ", bytes, " bytes: no room for a header"));
  uint64_t length = 0;
  for (size_t i = length_bytes; i-- > 0;) length = length << 8 | static_cast<unsigned char>(encoded[i]);
  if (length > SafetensorsLimits::header_bytes) {
    refuse(cat("a header of ", length, " bytes; ", SafetensorsLimits::header_bytes, " is the most"));
  }
  if (length > bytes - std::min(bytes, length_bytes)) {
    refuse(cat("a header of ", length, " bytes in a file of ", bytes));
  }
  std::string text(length, '\0');
  if (file.read_at(length_bytes, text) != length) refuse("the file ends within its header");
  return parse_safetensors_header(text, bytes - length_bytes - length, path);
}

std::string compose_safetensors_header(std::vector<FileTensor>& tensors,
                                       const std::map<std::string, std::string>& metadata) {
  constexpr const char* composer = "compose_safetensors_header";
  uint64_t at = 0;
  for (FileTensor& tensor : tensors) {
    std::string defect = tensor_name_defect(tensor.name);
    if (tensor.name == "__metadata__") defect = "the format reserves the name";
    const std::optional<uint64_t> bytes = data_bytes_of(tensor);
    if (!bytes) defect = "the elements do not fill whole bytes, or are too many";
    if (!defect.empty()) throw InvalidArgument(composer, cat("tensor \"", tensor.name, "\": ", defect));
    tensor.begin = at;
    tensor.end = at += *bytes;
  }
  std::string text;
  try {
    // Joined from parts: a JSON object of the library would forget the order of the tensors.
    text = "{";
    if (!metadata.empty()) text += cat("\"__metadata__\":", nlohmann::json(metadata).dump(), ",");
    for (const FileTensor& tensor : tensors) {
      text += cat(nlohmann::json(tensor.name).dump(), ":{\"dtype\":\"", to_string(tensor.dtype),
                  "\",\"shape\":", nlohmann::json(tensor.shape).dump(), ",\"data_offsets\":[", tensor.begin, ",",
                  tensor.end, "]},");
    }
    if (text.back() == ',') text.pop_back();
    text += "}";
  } catch (const nlohmann::json::exception& failure) {
    throw InvalidArgument(composer, cat("a name is not UTF-8: ", failure.what()));
  }
  text.append(data_alignment - (length_bytes + text.size() - 1) % data_alignment - 1, ' ');
  if (text.size() > SafetensorsLimits::header_bytes || tensors.size() > SafetensorsLimits::tensors) {
    throw InvalidArgument(composer, cat(tensors.size(), " tensors need a header of ", text.size(),
                                        " bytes, which readers refuse; use more files"));
  }
  std::string file(length_bytes, '\0');
  for (size_t i = 0; i < length_bytes; ++i) file[i] = static_cast<char>(static_cast<uint64_t>(text.size()) >> (8 * i));
  return file + text;
}

}  // namespace tesserae::checkpoint
