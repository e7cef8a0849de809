#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/checkpoints.h"
#include "cli/token_files.h"
#include "cli/verbs.h"
#include "tesserae/base/error.h"
#include "tesserae/checkpoint/reader.h"
#include "tesserae/checkpoint/split_json.h"
#include "tesserae/config/json.h"

namespace tesserae::cli {
namespace {

using checkpoint::Checkpoint;
using checkpoint::StoredTensor;
using Json = nlohmann::ordered_json;
using Row = std::vector<std::string>;

struct InspectArguments {
  std::string path;
  bool json = false;
  bool config = false;
};

uint64_t bytes_of(const StoredTensor& tensor) {
  return static_cast<uint64_t>(tensor.elements() * bits(tensor.dtype) / 8);
}

std::string shape_of(const StoredTensor& tensor) {
  std::string text;
  for (const int64_t size : tensor.shape) text += cat(text.empty() ? "" : " x ", size);
  if (text.empty()) return "scalar";
  return tensor.split.whole() ? text : cat(text, " (", mesh::to_string(tensor.split), ")");
}

std::string layout_of(const checkpoint::Manifest& manifest) {
  const std::string degrees = mesh::to_string(manifest.layout.degrees());
  const auto named = [](const char* name, int degree) {
    return degree == 1 ? std::string() : cat(name, "=", degree, " ");
  };
  const auto& [tensor, context, expert] = manifest.axes;
  return cat(named("T", tensor), named("C", context), named("E", expert), degrees);
}

/// Columns of the same width; `right`: those that hold numbers.
void print_table(const std::vector<Row>& rows, const std::vector<bool>& right) {
  std::vector<size_t> widths(right.size(), 0);
  for (const Row& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const Row& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string blanks(widths[i] - row[i].size(), ' ');
      line.append(i == 0 ? "  " : "   ").append(right[i] ? blanks : row[i]).append(right[i] ? row[i] : blanks);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    std::printf("%s\n", line.c_str());
  }
}

/// Elements under a name's first component: "model", "optimizer", ...
uint64_t elements_under(const checkpoint::Manifest& manifest, std::string_view prefix) {
  uint64_t sum = 0;
  for (const StoredTensor& tensor : manifest.tensors) {
    if (tensor.name.starts_with(prefix)) sum += static_cast<uint64_t>(tensor.elements());
  }
  return sum;
}

/// What the trainer of this program says; other programs may say other things, or nothing.
void print_training(const nlohmann::json& training) {
  if (const auto data = training.find("data"); data != training.end() && data->is_object()) {
    std::printf("data      epoch %s, sample %s of %s\n", data->value("epoch", Json()).dump().c_str(),
                data->value("offset", Json()).dump().c_str(), data->value("samples", Json()).dump().c_str());
  }
  if (const auto scale = training.find("loss_scale"); scale != training.end() && scale->is_object()) {
    std::printf("loss      scaled by %s\n", scale->value("scale", Json()).dump().c_str());
  }
  for (const auto& [key, value] : training.items()) {
    if (key == "data" || key == "loss_scale" || key == "config") continue;
    std::printf("%-9s %s\n", key.c_str(), value.dump().substr(0, 200).c_str());
  }
}

void print(const Checkpoint& checkpoint) {
  const checkpoint::Manifest& manifest = checkpoint.manifest();
  std::printf("%s\n", checkpoint.path().c_str());
  std::printf("step      %s\n", grouped(static_cast<uint64_t>(manifest.step)).c_str());
  const int ranks = manifest.mesh().ranks();
  std::printf("saved by  %d %s, %s\n", ranks, ranks == 1 ? "rank" : "ranks", layout_of(manifest).c_str());
  std::printf("holds     %s parameters, %s elements of optimizer state\n",
              grouped(elements_under(manifest, "model/")).c_str(),
              grouped(elements_under(manifest, "optimizer/")).c_str());
  std::printf("files     %zu, %s, checksums for blocks of %s\n", manifest.files.size(),
              readable_bytes(manifest.bytes()).c_str(), readable_bytes(manifest.block_bytes).c_str());
  print_training(manifest.training);
  std::vector<Row> rows{{"tensor", "type", "shape", "bytes", "parts"}};
  for (const StoredTensor& tensor : manifest.tensors) {
    rows.push_back({tensor.name, std::string(to_string(tensor.dtype)), shape_of(tensor), grouped(bytes_of(tensor)),
                    std::to_string(tensor.extents.size())});
  }
  std::printf("\n");
  print_table(rows, {false, false, false, true, true});
}

Json describe(const Checkpoint& checkpoint) {
  const checkpoint::Manifest& manifest = checkpoint.manifest();
  const mesh::Degrees& degrees = manifest.layout.degrees();
  Json result = {{"path", checkpoint.path().native()},
                 {"step", manifest.step},
                 {"layout",
                  {{"ranks", manifest.layout.ranks()},
                   {"parameters", degrees.parameters},
                   {"gradients", degrees.gradients},
                   {"optimizer", degrees.optimizer},
                   {"tensor", manifest.axes.tensor}}},
                 {"training", Json::parse(manifest.training.dump())},
                 {"bytes", manifest.bytes()},
                 {"files", Json::array()},
                 {"tensors", Json::array()}};
  if (manifest.axes.context > 1) result["layout"]["context"] = manifest.axes.context;
  if (manifest.axes.expert > 1) result["layout"]["expert"] = manifest.axes.expert;
  for (const checkpoint::DataFile& file : manifest.files) {
    result["files"].push_back({{"name", file.name}, {"bytes", file.bytes}});
  }
  for (const StoredTensor& tensor : manifest.tensors) {
    Json entry = {{"name", tensor.name},
                  {"dtype", to_string(tensor.dtype)},
                  {"shape", tensor.shape},
                  {"bytes", bytes_of(tensor)},
                  {"parts", tensor.extents.size()}};
    if (!tensor.split.whole()) entry["split"] = checkpoint::json_of(tensor.split);
    result["tensors"].push_back(std::move(entry));
  }
  return result;
}

/// A line for each of several checkpoints; one that cannot be read says why. False if there is such a one.
bool print_list(const std::vector<os::Path>& paths) {
  bool good = true;
  std::vector<Row> rows{{"checkpoint", "step", "bytes", "files", "ranks", "layout"}};
  for (const os::Path& path : paths) {
    try {
      const Checkpoint checkpoint = Checkpoint::open(path);
      const checkpoint::Manifest& manifest = checkpoint.manifest();
      rows.push_back({path.native(), grouped(static_cast<uint64_t>(manifest.step)), grouped(manifest.bytes()),
                      std::to_string(manifest.files.size()), std::to_string(manifest.mesh().ranks()),
                      layout_of(manifest)});
    } catch (const Error& error) {
      good = false;
      rows.push_back({path.native(), "?", "?", "?", "?", error.what()});
    }
  }
  print_table(rows, {false, true, true, true, true, false});
  return good;
}

int run_inspect(const InspectArguments& arguments) {
  if (os::files().status(arguments.path).kind == os::FileKind::file) {
    if (arguments.config)
      throw config::ConfigError("--config", "is for checkpoints; a token file has no configuration");
    return inspect_token_file(arguments.path, arguments.json);
  }
  const std::vector<os::Path> paths = checkpoints_at(arguments.path);
  if (arguments.json) {
    Json all = Json::array();
    for (const os::Path& path : paths) all.push_back(describe(Checkpoint::open(path)));
    std::printf("%s\n", (paths.size() == 1 ? all[0] : all).dump(2).c_str());
    return 0;
  }
  if (arguments.config) {
    const Checkpoint checkpoint = Checkpoint::open(paths.back());
    std::printf("%s\n", checkpoint.manifest().training.value("config", nlohmann::json::object()).dump(2).c_str());
    return 0;
  }
  if (paths.size() > 1) return print_list(paths) ? 0 : exit_failure;
  print(Checkpoint::open(paths.front()));
  return 0;
}

}  // namespace

void add_inspect(CLI::App& program, int& status) {
  auto arguments = std::make_shared<InspectArguments>();
  CLI::App* verb = program.add_subcommand("inspect", "Show what is in a checkpoint or a token file");
  verb->add_option("PATH", arguments->path, "A checkpoint, a folder of checkpoints, a run folder or a token file")
      ->required()
      ->check(CLI::ExistingPath);
  auto* json = verb->add_flag("--json", arguments->json, "Print JSON: an object, or a list for several checkpoints");
  auto* config = verb->add_flag("--config", arguments->config,
                                "Print the configuration that the (newest) checkpoint was trained with");
  json->excludes(config);
  verb->footer(
      "Of one checkpoint: step, layout, and every tensor with the number of parts in which it was written. Of several: "
      "a\n"
      "line each. Only manifests are read (and checked); `tesserae verify` reads everything.");
  verb->callback([arguments, &status] { status = run_inspect(*arguments); });
}

}  // namespace tesserae::cli
