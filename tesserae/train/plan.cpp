#include "tesserae/train/plan.h"

#include <numeric>

#include "tesserae/train/data_paths.h"
#include "tesserae/train/device.h"
#include "tesserae/train/progress.h"

namespace tesserae::train {
namespace {

void check_vocabulary(const config::Config& config) {
  const int64_t text_tokens = data::end_of_file_token + 1;
  if (config.data.format == "text" && config.vocabulary.value_or(text_tokens) < text_tokens) {
    throw config::ConfigError("model.vocabulary", cat("must be at least ", text_tokens,
                                                      " for data of format text, but is ", *config.vocabulary));
  }
  if (config.data.format == "uint32" && !config.vocabulary) {
    throw config::ConfigError("model.vocabulary", "must be given for data of format uint32, which do not tell it");
  }
}

std::shared_ptr<data::TokenStream> open_stream(const config::Config& config) {
  check_vocabulary(config);
  data::StreamOptions options{.paths = {},
                              .format = data::format_from_name(config.data.format),
                              .suffixes = config.data.suffixes,
                              .vocabulary = config.vocabulary.value_or(0)};
  for (const std::string& path : resolve_data_paths(config.data.path)) options.paths.emplace_back(path);
  try {
    return std::make_shared<data::TokenStream>(options);
  } catch (const Error& error) {
    throw config::ConfigError("data.path", config::without_function(error));
  }
}

data::LoaderOptions loader_options(const config::Config& config, const mesh::Mesh& mesh, int rank) {
  return {.sequence_length = config.data.sequence_length,
          .batch_per_rank = config.train.batch_per_rank,
          .accumulate = config.train.accumulate,
          .rank = mesh.index(mesh::axes::batch, rank),
          .ranks = mesh.degree(mesh::axes::batch),
          .seed = config.run.seed,
          .validation_fraction = config.data.validation_fraction};
}

void check_backend(const config::Config& config, c10::Device device) {
  const std::string& backend = config.run.backend;
  if (((backend == "gloo" || backend == "shm") && device.is_cuda()) || (backend == "nccl" && device.is_cpu())) {
    throw config::ConfigError("run.backend",
                              cat(backend, " cannot carry what lies on ", c10::DeviceTypeName(device.type(), true)));
  }
}

/// Of heads, heads of keys and values, and feed-forward width: its divisors can be tensor-parallel degrees.
int64_t common_divisor(const model::GptConfig& shape) {
  return std::gcd(std::gcd(shape.heads, shape.kv_heads), shape.feed_forward);
}

mesh::Mesh mesh_of(const config::Config& config, int ranks) {
  try {
    return mesh::Mesh(ranks, {.tensor = config.sharding.tensor_parallel_degree});
  } catch (const InvalidArgument& error) {
    throw config::ConfigError("tensor_parallel_degree", config::without_function(error));
  }
}

void check_what_is_split(const config::Config& config) {
  const int degree = config.sharding.tensor_parallel_degree;
  const model::GptConfig shape = model::resolved(config.model);
  const std::pair<const char*, int64_t> sizes[] = {
      {"heads", shape.heads}, {"kv_heads", shape.kv_heads}, {"feed_forward", shape.feed_forward}};
  for (const auto& [name, size] : sizes) {
    if (size % degree == 0) continue;
    throw config::ConfigError(
        "tensor_parallel_degree",
        cat("must divide model.", name, " = ", size, ", but is ", degree, "; heads, kv_heads and ",
            "feed_forward can all be split over the divisors of ", common_divisor(shape)));
  }
}

/// What `check` gives for the ranks that shard state. Where it refuses degrees: what N is, and which tensor-parallel
/// degrees leave an N that they fit.
template <class Check>
auto fitting(const config::Config& config, const mesh::Mesh& mesh, const Check& check) {
  const int tensor = mesh.degree(mesh::axes::tensor), state = mesh.degree(mesh::axes::state);
  try {
    return check(state);
  } catch (const config::ConfigError& error) {
    if (tensor == 1) throw;
    const int64_t common = common_divisor(model::resolved(config.model));
    std::string good;
    for (int degree = 1; degree <= mesh.ranks(); ++degree) {
      if (mesh.ranks() % degree != 0 || common % degree != 0) continue;
      try {
        check(mesh.ranks() / degree);
        good += cat(good.empty() ? "; this fits tensor_parallel_degree " : ", ", degree);
      } catch (const config::ConfigError&) {
      }
    }
    throw config::ConfigError("", cat(config::without_function(error), "; N = ", state, " = ", mesh.ranks(),
                                      " ranks / tensor_parallel_degree ", tensor, good));
  }
}

}  // namespace

Plan plan_job(const config::Config& config, int ranks, int local_ranks, int local_rank) {
  Plan plan;
  plan.mesh = mesh_of(config, ranks);
  check_what_is_split(config);
  plan.strategy = fitting(config, plan.mesh, [&](int count) { return config::strategy_of(config, count); });
  // Throws what cannot be followed.
  fitting(config, plan.mesh, [&](int count) { return config::dial_schedule(config.resolved, count); });
  choose_device(config.run.device, local_ranks - 1);  // the last one is the first that finds no GPU
  plan.device = choose_device(config.run.device, local_rank);
  check_backend(config, plan.device);
  plan.precision = config::precision_of(config, has_bf16(plan.device));
  plan.stream = open_stream(config);
  plan.model = config.model;
  plan.model.vocabulary = plan.stream->vocabulary();
  plan.parameters = model::sizes(plan.model).total;
  try {
    const data::Loader loader(plan.stream, loader_options(config, plan.mesh, 0));
    plan.training_samples = loader.training_samples();
    plan.validation_samples = loader.validation_samples();
    plan.tokens_per_step = loader.global_batch() * config.data.sequence_length;
  } catch (const Error& error) {
    throw config::ConfigError("data.sequence_length", config::without_function(error));
  }
  return plan;
}

data::Loader make_loader(const config::Config& config, const Plan& plan, int rank) {
  return {plan.stream, loader_options(config, plan.mesh, rank)};
}

std::string dtype_name(c10::ScalarType dtype) {
  return dtype == at::kBFloat16 ? "bf16" : dtype == at::kHalf ? "fp16" : "fp32";
}

std::string describe(const Plan& plan, const config::Config& config) {
  std::string degrees = mesh::to_string(plan.strategy.degrees);
  if (config.sharding.automatic) {
    degrees = plan.choice.empty() ? "degrees are chosen at the start" : cat(degrees, " (auto; ", plan.choice, ")");
  }
  const auto precision = plan.precision.parameters.value_or(at::kFloat);
  const int ranks = plan.mesh.ranks(), tensor = plan.mesh.degree(mesh::axes::tensor);
  return cat(short_number(static_cast<double>(plan.parameters)), " parameters in ", dtype_name(precision), " on ",
             ranks, ranks == 1 ? " rank" : " ranks", " (", c10::DeviceTypeName(plan.device.type(), true), "), ",
             tensor > 1 ? cat("layers split over ", tensor, ", ") : "", degrees, "\n",
             short_number(static_cast<double>(plan.stream->size())), " tokens in ", plan.stream->files(),
             plan.stream->files() == 1 ? " file" : " files", ": ", plan.training_samples, " samples of ",
             config.data.sequence_length, " to train on, ", plan.validation_samples, " held out; ",
             short_number(static_cast<double>(plan.tokens_per_step)), " tokens a step");
}

}  // namespace tesserae::train
