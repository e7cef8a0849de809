#include "tesserae/checkpoint/manifest_text.h"

#include <utility>

#include "tesserae/base/checksum.h"
#include "tesserae/checkpoint/fault.h"
#include "tesserae/checkpoint/json_reader.h"
#include "tesserae/checkpoint/split_json.h"

namespace tesserae::checkpoint {
namespace {

constexpr std::string_view format_name = "tesserae-checkpoint";
constexpr const char* function = "parse_manifest";

// The end of the text: everything before it is what the checksum is of.
constexpr std::string_view tail_begin = ",\n\"checksum\":\"";
constexpr std::string_view tail_end = "\"}\n";
constexpr size_t tail_size = tail_begin.size() + 16 + tail_end.size();

std::string hex_of(const std::vector<uint64_t>& checksums) {
  std::string text;
  text.reserve(checksums.size() * 16);
  for (const uint64_t checksum : checksums) text += to_hex(checksum);
  return text;
}

std::string quoted(const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    throw InvalidArgument("to_text", cat("a name of ", text.size(), " bytes is not UTF-8"));
  }
}

/// The schema of a manifest, and what it has taken so far.
class Reader {
 public:
  explicit Reader(Manifest& manifest) : manifest_(manifest) {
    format_.text = [](std::string& name) {
      if (name != format_name) throw json::Refusal{cat("expected \"", format_name, "\"")};
    };
    version_node_.integer = [this](int64_t version) {
      if (version > format_version) throw NewerVersion{version};
      if (version < 1) throw json::Refusal{cat("there was no version ", version)};
      version_ = version;
    };
    step_ = json::integer_into(manifest.step);
    attempt_ = json::text_into(manifest.attempt);
    training_.anything = &manifest.training;
    block_bytes_.integer = [this](int64_t bytes) { manifest_.block_bytes = static_cast<uint64_t>(bytes); };
    checksum_.text = [](std::string&) {};  // of the text: looked at before
    define_layout();
    define_files();
    define_tensors();
    root_ = json::object_of({{"format", &format_},
                             {"version", &version_node_},
                             {"step", &step_},
                             {"attempt", &attempt_},
                             {"layout", &layout_},
                             {"training", &training_},
                             {"block_bytes", &block_bytes_},
                             {"files", &files_},
                             {"tensors", &tensors_},
                             {"checksum", &checksum_}});
  }

  struct NewerVersion {
    int64_t version;
  };

  json::Node& root() { return root_; }
  int64_t version() const { return version_; }
  std::string tensor() const { return manifest_.tensors.empty() ? "" : manifest_.tensors.back().name; }

 private:
  void define_layout() {
    const char* keys[] = {"ranks", "parameters", "gradients", "optimizer", "tensor", "context", "expert"};
    std::vector<json::Field> fields;
    for (size_t i = 0; i < std::size(keys); ++i) {
      degrees_[i].integer = [this, i](int64_t value) { degree_[i] = number_of_ranks(value); };
      fields.push_back({keys[i], &degrees_[i], /*optional=*/i >= 4});
    }
    layout_ = json::object_of(fields, {}, [this] {
      try {
        manifest_.layout = mesh::Layout(degree_[0], {degree_[1], degree_[2], degree_[3]});
        manifest_.axes = {.tensor = degree_[4], .context = degree_[5], .expert = degree_[6]};
        manifest_.mesh();
      } catch (const InvalidArgument& error) {
        throw json::Refusal{error.what()};
      }
    });
  }

  void define_files() {
    file_name_.text = [this](std::string& name) { manifest_.files.back().name = std::move(name); };
    file_bytes_.integer = [this](int64_t bytes) { manifest_.files.back().bytes = static_cast<uint64_t>(bytes); };
    file_checksum_.text = [this](std::string& text) { file_sum_ = checksum_of(text); };
    file_blocks_.text = [this](std::string& text) {
      if (text.size() % 16 != 0) throw json::Refusal{"expected 16 digits for each block"};
      auto& blocks = manifest_.files.back().blocks;
      blocks.reserve(text.size() / 16);
      for (size_t i = 0; i < text.size(); i += 16) blocks.push_back(checksum_of(std::string_view(text).substr(i, 16)));
    };
    file_ = json::object_of(
        {{"name", &file_name_}, {"bytes", &file_bytes_}, {"checksum", &file_checksum_}, {"blocks", &file_blocks_}},
        [this] { manifest_.files.emplace_back(); },
        [this] {
          if (checksum_of_blocks(manifest_.files.back().blocks) == file_sum_) return;
          throw json::Refusal{"the file's checksum is not that of its blocks"};
        });
    files_.element = [this](size_t) { return &file_; };
  }

  void define_tensors() {
    name_.text = [this](std::string& name) { manifest_.tensors.back().name = std::move(name); };
    dtype_.text = [this](std::string& name) {
      const auto dtype = dtype_from_name(name);
      if (!dtype) throw json::Refusal{cat("unknown type \"", name.substr(0, 40), "\"")};
      manifest_.tensors.back().dtype = *dtype;
    };
    size_.integer = [this](int64_t size) { manifest_.tensors.back().shape.push_back(size); };
    shape_.element = [this](size_t index) { return index < ManifestLimits::dimensions ? &size_ : nullptr; };
    number_.integer = [this](int64_t number) { part_[filled_++] = number; };
    part_node_.begin = [this] { filled_ = 0; };
    part_node_.element = [this](size_t index) { return index < 4 ? &number_ : nullptr; };
    part_node_.end = [this] {
      if (filled_ != 4) throw json::Refusal{"expected [file, begin, end, offset]"};
      if (part_[0] > (1 << 24)) throw json::Refusal{cat("file ", part_[0])};
      manifest_.tensors.back().extents.push_back(
          {static_cast<int>(part_[0]), {part_[1], part_[2]}, static_cast<uint64_t>(part_[3])});
    };
    parts_.element = [this](size_t) { return &part_node_; };
    define_split(first_, &then_.object, [this] {
      manifest_.tensors.back().split = {first_.split, then_.split};
      then_.split = {};
    });
    define_split(then_, nullptr, [] {});
    tensor_ = json::object_of({{"name", &name_},
                               {"dtype", &dtype_},
                               {"shape", &shape_},
                               {"split", &first_.object, /*optional=*/true},
                               {"parts", &parts_}},
                              [this] { manifest_.tensors.emplace_back(); });
    tensors_.element = [this](size_t) { return &tensor_; };
  }

  struct SplitNode {
    json::Node dim, parts, blocks, axis, object;
    mesh::Split split;
  };

  /// `then`: the node of what may follow, or nullptr.
  static void define_split(SplitNode& node, json::Node* then, const std::function<void()>& end) {
    node.dim.integer = [&node](int64_t dim) {
      if (dim >= static_cast<int64_t>(ManifestLimits::dimensions)) throw json::Refusal{cat("dimension ", dim)};
      node.split.dim = static_cast<int>(dim);
    };
    node.parts.integer = [&node](int64_t parts) { node.split.parts = number_of_ranks(parts); };
    node.blocks.integer = [&node](int64_t blocks) { node.split.blocks = number_of_ranks(blocks); };
    node.axis.text = [&node](std::string& name) {
      try {
        node.split.axis = axis_named(name);
      } catch (const InvalidArgument& error) {
        throw json::Refusal{error.what()};
      }
    };
    std::vector<json::Field> fields{
        {"dim", &node.dim}, {"parts", &node.parts}, {"blocks", &node.blocks}, {"axis", &node.axis, /*optional=*/true}};
    if (then != nullptr) fields.push_back({"then", then, /*optional=*/true});
    node.object = json::object_of(
        std::move(fields), [&node] { node.split = {}; },
        [&node, end] {
          if (node.split.whole()) throw json::Refusal{"a split in one part"};
          end();
        });
  }

  static int number_of_ranks(int64_t value) {
    if (value < 1 || value > ManifestLimits::ranks) throw json::Refusal{cat(value, " ranks")};
    return static_cast<int>(value);
  }

  static uint64_t checksum_of(std::string_view text) {
    const auto value = from_hex(text);
    if (!value) throw json::Refusal{"expected 16 lower-case hexadecimal digits"};
    return *value;
  }

  Manifest& manifest_;
  json::Node format_, version_node_, step_, attempt_, training_, block_bytes_, checksum_;
  json::Node degrees_[7], layout_;
  json::Node file_name_, file_bytes_, file_checksum_, file_blocks_, file_, files_;
  json::Node name_, dtype_, size_, shape_, number_, part_node_, parts_, tensor_, tensors_;
  SplitNode first_, then_;
  json::Node root_;
  int64_t version_ = 1;
  int degree_[7] = {1, 1, 1, 1, 1, 1, 1};
  uint64_t file_sum_ = 0;
  int64_t part_[4] = {0, 0, 0, 0};
  size_t filled_ = 0;
};

}  // namespace

std::string to_text(const Manifest& manifest) {
  if (const std::string bad = defect(manifest, Coverage::fragment); !bad.empty()) throw InvalidArgument("to_text", bad);
  const mesh::Degrees& degrees = manifest.layout.degrees();
  std::string text = cat("{\"format\":\"", format_name, "\",\n\"version\":", version_of(manifest),
                         ",\n\"step\":", manifest.step, ",\n\"attempt\":", quoted(manifest.attempt),
                         ",\n\"layout\":{\"ranks\":", manifest.layout.ranks(), ",\"parameters\":", degrees.parameters,
                         ",\"gradients\":", degrees.gradients, ",\"optimizer\":", degrees.optimizer);
  const std::pair<mesh::Axis, int> axes[] = {{mesh::Axis::tensor, manifest.axes.tensor},
                                             {mesh::Axis::context, manifest.axes.context},
                                             {mesh::Axis::expert, manifest.axes.expert}};
  for (const auto& [axis, degree] : axes) {
    if (degree != 1) text += cat(",\"", to_string(axis), "\":", degree);
  }
  text += "},\n\"training\":";
  try {
    text += manifest.training.dump();
  } catch (const nlohmann::json::exception& failure) {
    throw InvalidArgument("to_text", cat("the training state is no JSON: ", failure.what()));
  }
  text += cat(",\n\"block_bytes\":", manifest.block_bytes, ",\n\"files\":[");
  const char* separator = "\n";
  for (const DataFile& file : manifest.files) {
    text += cat(separator, "{\"name\":", quoted(file.name), ",\"bytes\":", file.bytes, ",\"checksum\":\"",
                to_hex(checksum_of_blocks(file.blocks)), "\",\"blocks\":\"", hex_of(file.blocks), "\"}");
    separator = ",\n";
  }
  text += "],\n\"tensors\":[";
  separator = "\n";
  for (const StoredTensor& tensor : manifest.tensors) {
    text += cat(separator, "{\"name\":", quoted(tensor.name), ",\"dtype\":\"", to_string(tensor.dtype),
                "\",\"shape\":", nlohmann::json(tensor.shape).dump());
    if (!tensor.split.whole()) text += cat(",\"split\":", json_of(tensor.split).dump());
    text += ",\"parts\":[";
    separator = ",\n";
    const char* comma = "";
    for (const Extent& extent : tensor.extents) {
      text +=
          cat(comma, "[", extent.file, ",", extent.elements.begin, ",", extent.elements.end, ",", extent.offset, "]");
      comma = ",";
    }
    text += "]}";
  }
  text += "]";
  if (text.size() + tail_size > ManifestLimits::text_bytes) {
    throw InvalidArgument("to_text", cat("a manifest of ", text.size(), " bytes; use larger blocks or fewer tensors"));
  }
  return cat(text, tail_begin, to_hex(checksum(text)), tail_end);
}

Manifest parse_manifest(std::string_view text, const std::string& file, Coverage coverage) {
  auto refuse = [&file](uint64_t offset, const std::string& what) {
    throw Damaged(function, {file, "", offset, what});
  };
  if (text.size() < tail_size) refuse(text.size(), "the file ends too early");
  const std::string_view body = text.substr(0, text.size() - tail_size);
  std::string_view tail = text.substr(body.size());
  const auto stored = from_hex(tail.substr(tail_begin.size(), 16));
  if (!stored || !tail.starts_with(tail_begin) || !tail.ends_with(tail_end)) {
    refuse(body.size(), "the file does not end with a checksum");
  }
  if (const uint64_t actual = checksum(body); actual != *stored) {
    refuse(0, cat("the text has checksum ", to_hex(actual), ", its end says ", to_hex(*stored)));
  }
  return parse_manifest_unchecked(text, file, coverage);
}

Manifest parse_manifest_unchecked(std::string_view text, const std::string& file, Coverage coverage) {
  Manifest manifest;
  Reader reader(manifest);
  try {
    json::read(text, reader.root(), text.size());  // the checksums of a large file are one long string
  } catch (const json::Malformed& malformed) {
    throw Damaged(function, {file, reader.tensor(), malformed.offset, malformed.what});
  } catch (const Reader::NewerVersion& newer) {
    throw InvalidArgument(function, cat(file, " has format version ", newer.version, ", this program reads up to ",
                                        format_version, "; use a newer Tesserae"));
  }
  if (const int64_t needed = version_of(manifest); needed > reader.version()) {
    throw Damaged(function, {file, "", {}, cat("it says version ", reader.version(), " and is version ", needed)});
  }
  if (const std::string bad = defect(manifest, coverage); !bad.empty()) throw Damaged(function, {file, "", {}, bad});
  return manifest;
}

}  // namespace tesserae::checkpoint
