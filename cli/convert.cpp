#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "cli/checkpoints.h"
#include "cli/verbs.h"
#include "tesserae/checkpoint/weights.h"
#include "tesserae/config/json.h"

namespace tesserae::cli {
namespace {

struct ConvertArguments {
  std::string from, to, names;
  std::optional<c10::ScalarType> dtype;
  uint64_t file_bytes = 5'000'000'000;
};

const std::map<std::string, c10::ScalarType> dtypes{
    {"fp32", c10::ScalarType::Float}, {"bf16", c10::ScalarType::BFloat16}, {"fp16", c10::ScalarType::Half}};

checkpoint::NameMap read_names(const std::string& path) {
  if (path.empty()) return {};
  const auto rules = nlohmann::ordered_json::parse(os::files().read(path), nullptr, /*allow_exceptions=*/false,
                                                   /*ignore_comments=*/true);
  try {
    return checkpoint::NameMap::from_json(rules);
  } catch (const InvalidArgument& error) {
    throw config::ConfigError("--names", cat(path, ": ", config::without_function(error)));
  }
}

bool has_checkpoints(const os::Path& path) {
  try {
    checkpoints_at(path);
    return true;
  } catch (const InvalidArgument&) {
    return false;
  }
}

/// The files that a conversion left, for people.
void report(const os::Path& folder) {
  uint64_t bytes = 0;
  size_t files = 0;
  for (const std::string& name : os::files().list(folder)) {
    if (!name.ends_with(".safetensors")) continue;
    ++files;
    bytes += os::files().status(folder / name).size;
  }
  std::printf("%s: %zu %s, %s\n", folder.c_str(), files, files == 1 ? "file" : "files", readable_bytes(bytes).c_str());
}

int run_convert(const ConvertArguments& arguments) {
  checkpoint::NameMap names = read_names(arguments.names);
  if (has_checkpoints(arguments.from)) {
    const auto source = checkpoint::Checkpoint::open(checkpoints_at(arguments.from).back());
    checkpoint::export_weights(source, arguments.to,
                               {.dtype = arguments.dtype,
                                .file_bytes = static_cast<int64_t>(arguments.file_bytes),
                                .names = std::move(names)});
    report(arguments.to);
    return 0;
  }
  if (arguments.dtype) {
    throw config::ConfigError("--dtype", cat("is for weights that are written; ", arguments.from,
                                             " is no checkpoint, and types are converted when one is loaded"));
  }
  const auto weights = checkpoint::WeightFiles::open(arguments.from);
  report(checkpoint::checkpoint_from_weights(weights, arguments.to, names));
  return 0;
}

}  // namespace

void add_convert(CLI::App& program, int& status) {
  auto arguments = std::make_shared<ConvertArguments>();
  CLI::App* verb = program.add_subcommand("convert", "Convert between checkpoints and Hugging Face's weight files");
  verb->add_option("FROM", arguments->from,
                   "A checkpoint (or a folder of them: the newest), or weights: a .safetensors file, an index or a "
                   "folder with one of these")
      ->required()
      ->check(CLI::ExistingPath);
  verb->add_option("TO", arguments->to,
                   "From a checkpoint: a folder for model.safetensors. From weights: a folder of checkpoints, where "
                   "they become step-0")
      ->required();
  verb->add_option("--dtype", arguments->dtype, "Type of the weights that are written (default: as they are)")
      ->transform(CLI::CheckedTransformer(dtypes).description(""))
      ->type_name("fp32|bf16|fp16");
  verb->add_option("--names", arguments->names, "A JSON object that renames tensors, {\"ours\": \"theirs\", ...}")
      ->check(CLI::ExistingFile)
      ->type_name("FILE");
  verb->add_option("--file-size", arguments->file_bytes,
                   "Several files and an index when the weights are larger (default: 5GB)")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true))
      ->type_name("SIZE");
  verb->footer(
      "Which way is told by what FROM is. Weights are parameters and buffers; a checkpoint made from them trains on "
      "with\n"
      "`tesserae train --resume TO`, with an optimizer that starts anew.\n"
      "A rule of --names may have stars, each of which stands for one part of a name between dots:\n"
      "{\"blocks.*.norm.weight\": \"model.layers.*.input_layernorm.weight\"}\n"
      "The first rule that fits counts; other names stay. The same file serves both ways.\n"
      "Nothing is overwritten. Checksums of a checkpoint are verified on the way.");
  verb->callback([arguments, &status] { status = run_convert(*arguments); });
}

}  // namespace tesserae::cli
