#include "tesserae/train/job_setup.h"

#include <numeric>

#include "tesserae/comm/device_transport.h"
#include "tesserae/config/state_ranks.h"
#include "tesserae/experts/dispatch.h"
#include "tesserae/tensor/product.h"
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

std::shared_ptr<data::TokenStream> open_stream(const config::Config& config, const std::string& key,
                                               const std::vector<std::string>& paths) {
  data::StreamOptions options{.paths = {},
                              .format = data::format_from_name(config.data.format),
                              .suffixes = config.data.suffixes,
                              .vocabulary = config.vocabulary.value_or(0)};
  for (const std::string& path : resolve_data_paths(paths)) options.paths.emplace_back(path);
  try {
    return std::make_shared<data::TokenStream>(options);
  } catch (const Error& error) {
    throw config::ConfigError(key, config::without_function(error));
  }
}

std::vector<data::Source> open_sources(const config::Config& config) {
  check_vocabulary(config);
  const config::Config::Data& data = config.data;
  if (data.weights.empty()) return {{open_stream(config, "data.path", data.path)}};
  std::vector<data::Source> sources;
  for (size_t i = 0; i < data.path.size(); ++i) {
    sources.push_back({open_stream(config, cat("data.path[", i, "]"), {data.path[i]}), data.weights[i]});
  }
  return sources;
}

/// For people: what there is to read.
std::string describe_data(const JobSetup& setup) {
  int64_t tokens = 0, files = 0;
  for (const data::Source& source : setup.sources) {
    tokens += source.stream->size();
    files += source.stream->files();
  }
  const std::string mixed = setup.sources.size() > 1 ? cat(", a mixture of ", setup.sources.size()) : "";
  return cat(short_number(static_cast<double>(tokens)), " tokens in ", files, files == 1 ? " file" : " files", mixed);
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

/// So that nothing that counts tokens overflows, over any number of steps that can be trained.
void check_tokens_per_step(const config::Config& config, const mesh::Mesh& mesh) {
  constexpr double most = 1e12;
  const int ranks = mesh.degree(mesh::axes::batch);
  const double tokens = static_cast<double>(config.train.batch_per_rank) *
                        static_cast<double>(config.train.accumulate) * ranks *
                        static_cast<double>(config.data.sequence_length);
  if (tokens <= most) return;
  throw config::ConfigError("train.batch_per_rank",
                            cat("batch_per_rank * accumulate * ", ranks, " ranks * data.sequence_length is ", tokens,
                                " tokens a step, more than ", most));
}

void check_backend(const config::Config& config, c10::Device device) {
  const std::string& backend = config.run.backend;
  const bool for_host = backend == "gloo" || backend == "shm";
  if ((for_host && !device.is_cpu()) || (backend == "staged" && device.is_cpu()) ||
      (backend == "nccl" && comm::device_transport(device.type()) != backend)) {
    throw config::ConfigError("run.backend",
                              cat(backend, " cannot carry what lies on ", c10::DeviceTypeName(device.type(), true)));
  }
}

/// Of heads, heads of keys and values, and feed-forward width: its divisors can be tensor-parallel degrees.
int64_t common_divisor(const model::GptConfig& shape) {
  return std::gcd(std::gcd(shape.heads, shape.kv_heads), shape.feed_forward);
}

mesh::Mesh mesh_of(const config::Config& config, int ranks) {
  const auto& sharding = config.sharding;
  const char* key = "tensor_parallel_degree";
  try {
    mesh::AxisDegrees degrees{.tensor = sharding.tensor_parallel_degree};
    (void)mesh::Mesh(ranks, degrees);
    key = "context_parallel_degree";
    degrees.context = sharding.context_parallel_degree;
    (void)mesh::Mesh(ranks, degrees);
    key = "expert_parallel_degree";
    degrees.expert = sharding.expert_parallel_degree;
    const mesh::Mesh mesh(ranks, degrees);
    if (config.model.experts > 0) experts::experts_of_rank(config.model.experts, degrees.expert);
    return mesh;
  } catch (const InvalidArgument& error) {
    throw config::ConfigError(key, config::without_function(error));
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
  const int context = config.sharding.context_parallel_degree;
  const int64_t heads = shape.heads / degree, kv_heads = shape.kv_heads / degree;
  const bool by_heads = config.sharding.context_parallel_method == context::Method::all_to_all;
  if (by_heads && (heads % context != 0 || kv_heads % context != 0)) {
    throw config::ConfigError(
        "context_parallel_method",
        cat("all_to_all shares out heads, but ", context, " ranks do not divide the ", heads, " and ", kv_heads,
            " (of keys and values) of a tensor index; take p2p or all_gather"));
  }
}

}  // namespace

JobSetup set_up_job(const config::Config& config, int ranks, c10::Device device) {
  JobSetup setup;
  setup.tiers = config.offload.tiers;
  setup.mesh = mesh_of(config, ranks);
  check_what_is_split(config);
  config::check_state_ranks(setup.mesh, common_divisor(model::resolved(config.model)), [&](int count) {
    setup.strategy = config::strategy_of(config, count);
    config::dial_schedule(config.resolved, count);  // throws what cannot be followed
  });
  setup.device = device;
  check_backend(config, device);
  setup.precision = config::precision_of(config, has_bf16(setup.device));
  setup.sources = open_sources(config);
  setup.model = config.model;
  setup.model.vocabulary = setup.sources[0].stream->vocabulary();
  if (setup.model.document_end >= setup.model.vocabulary) {
    throw config::ConfigError(
        "model.document_end",
        cat("is ", setup.model.document_end, ", but the data have the tokens 0 to ", setup.model.vocabulary - 1));
  }
  setup.parameters = model::sizes(setup.model).total;
  check_tokens_per_step(config, setup.mesh);
  try {
    const data::Loader loader(setup.sources, loader_options(config, setup.mesh, 0));
    setup.training_samples = loader.training_samples();
    setup.validation_samples = loader.validation_samples();
    setup.tokens_per_step = loader.global_batch() * config.data.sequence_length;
  } catch (const Error& error) {
    throw config::ConfigError("data.sequence_length", config::without_function(error));
  }
  return setup;
}

shard::Options options_of(const config::Config& config, const JobSetup& setup) {
  return {.strategy = setup.strategy,
          .precision = setup.precision,
          .accumulation = config.train.accumulation,
          .limit_all_gathers = config.sharding.limit_all_gathers,
          .limit_reductions = config.sharding.limit_reductions,
          .parameter_wire = config.sharding.parameter_wire,
          .gradient_wire = config.sharding.gradient_wire,
          // Where memory is short, buffers do not stay between their uses.
          .elastic = config.offload.memory_limit.has_value(),
          .tiers = setup.tiers};
}

cost::Execution execution_of(const config::Config& config, const JobSetup& setup) {
  const at::ScalarType compute = setup.precision.parameters.value_or(setup.model.dtype);
  const bool adds_up_whole = config.train.accumulate > 1 && config.train.accumulation == shard::Accumulation::local;
  return {.sequence = config.data.sequence_length,
          .micro_batch = config.train.batch_per_rank,
          .tensor = setup.mesh.degree(mesh::Axis::tensor),
          .context = setup.mesh.degree(mesh::Axis::context),
          .expert = setup.mesh.degree(mesh::Axis::expert),
          .compute_bytes = static_cast<int>(c10::elementSize(compute)),
          .recompute = config.checkpoint_activations,
          .sequence_parallel = config.sharding.sequence_parallel,
          .composed_norms = setup.device.is_cpu(),
          .widened = setup.device.is_cpu() && tensor::widens_products(compute),
          .gradients_apart = adds_up_whole || setup.precision.reduce.value_or(compute) != compute};
}

cost::Leaving leaving_of(const config::Config& config) {
  return {.horizon = config.offload.horizon,
          .smallest = static_cast<double>(config.offload.smallest),
          .of = [&config](const std::string& unit) { return config.offload.leaves(unit); }};
}

data::Loader make_loader(const config::Config& config, const JobSetup& setup, int rank) {
  return {setup.sources, loader_options(config, setup.mesh, rank)};
}

std::string dtype_name(c10::ScalarType dtype) {
  return dtype == at::kBFloat16 ? "bf16" : dtype == at::kHalf ? "fp16" : "fp32";
}

std::string describe(const JobSetup& setup, const config::Config& config) {
  std::string degrees = mesh::to_string(setup.strategy.degrees);
  if (config.sharding.automatic) {
    degrees = setup.choice.empty() ? "degrees are chosen at the start" : cat(degrees, " (auto; ", setup.choice, ")");
  }
  const auto precision = setup.precision.parameters.value_or(at::kFloat);
  const int ranks = setup.mesh.ranks(), tensor = setup.mesh.degree(mesh::axes::tensor);
  const int context = setup.mesh.degree(mesh::Axis::context), expert = setup.mesh.degree(mesh::Axis::expert);
  return cat(short_number(static_cast<double>(setup.parameters)), " parameters in ", dtype_name(precision), " on ",
             ranks, ranks == 1 ? " rank" : " ranks", " (", c10::DeviceTypeName(setup.device.type(), true), "), ",
             tensor > 1 ? cat("layers split over ", tensor, ", ") : "",
             context > 1 ? cat("sequences cut over ", context, ", ") : "",
             expert > 1 ? cat("experts shared out over ", expert, ", ") : "", degrees, "\n", describe_data(setup), ": ",
             setup.training_samples, " samples of ", config.data.sequence_length, " to train on, ",
             setup.validation_samples, " held out; ", short_number(static_cast<double>(setup.tokens_per_step)),
             " tokens a step");
}

}  // namespace tesserae::train
