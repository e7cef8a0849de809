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

data::LoaderOptions loader_options(const config::Config& config, int rank, int ranks) {
  return {.sequence_length = config.data.sequence_length,
          .batch_per_rank = config.train.batch_per_rank,
          .accumulate = config.train.accumulate,
          .rank = rank,
          .ranks = ranks,
          .seed = config.run.seed,
          .validation_fraction = config.data.validation_fraction};
}

void check_backend(const config::Config& config, c10::Device device) {
  const std::string& backend = config.run.backend;
  if (((backend == "gloo" || backend == "shm") && device.is_cuda()) || (backend == "nccl" && device.is_cpu())) {
    throw config::ConfigError("run.backend",
                              cat(backend, " can not carry what lies on ", c10::DeviceTypeName(device.type(), true)));
  }
}

/// Of heads, heads of keys and values, and feed-forward width: its divisors can be tensor-parallel degrees.
int64_t common_divisor(const model::GptConfig& shape) {
  return std::gcd(std::gcd(shape.heads, shape.kv_heads), shape.feed_forward);
}

// The degree, if it divides the ranks and what is split.
int tensor_degree(const config::Config& config, int ranks) {
  const int degree = config.sharding.tensor_parallel_degree;
  try {
    const mesh::Axes axes(ranks, degree);
  } catch (const InvalidArgument& error) {
    throw config::ConfigError("tensor_parallel_degree", config::without_function(error));
  }
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
  return degree;
}

/// What `check` gives for the data-parallel ranks. Where it refuses degrees: what N is, and which tensor-parallel
/// degrees leave an N that they fit.
template <class Check>
auto fitting(const config::Config& config, const mesh::Axes& axes, const Check& check) {
  try {
    return check(axes.data_ranks());
  } catch (const config::ConfigError& error) {
    if (axes.tensor_degree() == 1) throw;
    const int64_t common = common_divisor(model::resolved(config.model));
    std::string good;
    for (int degree = 1; degree <= axes.ranks(); ++degree) {
      if (axes.ranks() % degree != 0 || common % degree != 0) continue;
      try {
        check(axes.ranks() / degree);
        good += cat(good.empty() ? "; this fits tensor_parallel_degree " : ", ", degree);
      } catch (const config::ConfigError&) {
      }
    }
    throw config::ConfigError("", cat(config::without_function(error), "; N = ", axes.data_ranks(), " = ", axes.ranks(),
                                      " ranks / tensor_parallel_degree ", axes.tensor_degree(), good));
  }
}

}  // namespace

Plan plan_job(const config::Config& config, int ranks, int local_ranks, int local_rank) {
  Plan plan;
  plan.ranks = ranks;
  plan.tensor = tensor_degree(config, ranks);
  const int data_ranks = plan.axes().data_ranks();
  plan.strategy = fitting(config, plan.axes(), [&](int count) { return config::strategy_of(config, count); });
  // Throws what can not be followed.
  fitting(config, plan.axes(), [&](int count) { return config::dial_schedule(config.resolved, count); });
  choose_device(config.run.device, local_ranks - 1);  // the last one is the first that finds no GPU
  plan.device = choose_device(config.run.device, local_rank);
  check_backend(config, plan.device);
  plan.precision = config::precision_of(config, has_bf16(plan.device));
  plan.stream = open_stream(config);
  plan.model = config.model;
  plan.model.vocabulary = plan.stream->vocabulary();
  plan.parameters = model::sizes(plan.model).total;
  try {
    const data::Loader loader(plan.stream, loader_options(config, 0, data_ranks));
    plan.training_samples = loader.training_samples();
    plan.validation_samples = loader.validation_samples();
    plan.tokens_per_step = loader.global_batch() * config.data.sequence_length;
  } catch (const Error& error) {
    throw config::ConfigError("data.sequence_length", config::without_function(error));
  }
  return plan;
}

data::Loader make_loader(const config::Config& config, const Plan& plan, int data_rank) {
  return {plan.stream, loader_options(config, data_rank, plan.axes().data_ranks())};
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
  return cat(short_number(static_cast<double>(plan.parameters)), " parameters in ", dtype_name(precision), " on ",
             plan.ranks, plan.ranks == 1 ? " rank" : " ranks", " (", c10::DeviceTypeName(plan.device.type(), true),
             "), ", plan.tensor > 1 ? cat("layers split over ", plan.tensor, ", ") : "", degrees, "\n",
             short_number(static_cast<double>(plan.stream->size())), " tokens in ", plan.stream->files(),
             plan.stream->files() == 1 ? " file" : " files", ": ", plan.training_samples, " samples of ",
             config.data.sequence_length, " to train on, ", plan.validation_samples, " held out; ",
             short_number(static_cast<double>(plan.tokens_per_step)), " tokens a step");
}

}  // namespace tesserae::train
