#include "tesserae/train/job_size.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <ranges>

#include "tesserae/base/error.h"
#include "tesserae/launch/launcher.h"
#include "tesserae/mesh/mesh.h"

namespace tesserae::train {
namespace {

mesh::Mesh mesh_for(const config::Config& config, int ranks) {
  const auto& sharding = config.sharding;
  return mesh::Mesh(ranks, {.tensor = sharding.tensor_parallel_degree,
                            .context = sharding.context_parallel_degree,
                            .expert = sharding.expert_parallel_degree});
}

/// Samples that each of the ranks that read different ones takes in a step. Throws InvalidArgument where axes do not
/// divide the ranks, or the ranks the samples.
int64_t samples_of_reader(const config::Config& written, int from, int to) {
  const auto& sharding = written.sharding;
  const int multiple =
      sharding.tensor_parallel_degree * std::lcm(sharding.context_parallel_degree, sharding.expert_parallel_degree);
  if (to < 1 || to % multiple != 0) {
    throw InvalidArgument("scale", cat("a job with these axes has a multiple of ", multiple, " ranks, not ", to));
  }
  const int64_t samples =
      written.train.batch_per_rank * written.train.accumulate * mesh_for(written, from).degree(mesh::axes::batch);
  const int readers = mesh_for(written, to).degree(mesh::axes::batch);
  if (samples % readers == 0) return samples / readers;
  throw InvalidArgument("scale", cat("the ", samples, " samples of a step are no multiple of ", readers,
                                     readers == to ? " ranks" : " ranks that read different ones"));
}

bool can_be(const config::Config& written, int from, int to) {
  try {
    samples_of_reader(written, from, to);
    return true;
  } catch (const InvalidArgument&) {
    return false;
  }
}

config::Json to_json(const mesh::Degrees& degrees) {
  return {{"parameters", degrees.parameters}, {"gradients", degrees.gradients}, {"optimizer", degrees.optimizer}};
}

/// What names degrees, at the start and in the dial's schedule, names those that `to` state ranks allow.
void fit_degrees(config::Json& resolved, const config::Config& written, int from, int to) {
  const auto fits = [to](const mesh::Degrees& degrees) { return nearest_degrees(degrees, to) == degrees; };
  const auto schedule = config::dial_schedule(written.resolved, from);
  for (size_t i = 0; i < schedule.size(); ++i) {
    const mesh::Degrees& degrees = schedule[i].second;
    if (fits(degrees)) continue;
    resolved["dial"]["schedule"][i]["hybrid_shard_degree"] = nullptr;
    resolved["dial"]["schedule"][i]["degrees"] = to_json(nearest_degrees(degrees, to));
  }
  const bool by_name = written.sharding.hybrid_shard_degree == 0 && !written.sharding.degrees;  // has those of any N
  const mesh::Strategy strategy = config::strategy_of(written, from);
  if (by_name || fits(strategy.degrees)) return;
  resolved["degrees"] = to_json(nearest_degrees(strategy.degrees, to));
  resolved["hybrid_shard_degree"] = 0;
  resolved["sharding"]["strategy"] = nullptr;
  resolved["sharding"]["free_after_forward"] = strategy.free_after_forward;
  resolved["sharding"]["free_after_backward"] = strategy.free_after_backward;
}

}  // namespace

int configured_ranks(int ranks) {
  const char* const began_with = std::getenv(launch::configured_ranks_variable);
  return began_with != nullptr ? std::atoi(began_with) : ranks;
}

mesh::Degrees nearest_degrees(const mesh::Degrees& wanted, int ranks) {
  const auto factor = [](int a, int b) { return std::abs(std::log2(static_cast<double>(a) / b)); };
  const auto distance = [&](const mesh::Degrees& degrees) {
    return factor(degrees.parameters, wanted.parameters) + factor(degrees.gradients, wanted.gradients) +
           factor(degrees.optimizer, wanted.optimizer);
  };
  const std::vector<mesh::Degrees> all = mesh::all_degrees(ranks);
  return *std::ranges::min_element(all | std::views::reverse, {}, distance);
}

config::Config for_ranks(const config::Config& written, int from, int to) {
  if (from == to) return written;
  const int64_t samples = samples_of_reader(written, from, to);
  int64_t batch = std::min(written.train.batch_per_rank, samples);
  while (samples % batch != 0) --batch;  // ends at 1
  const mesh::Mesh before = mesh_for(written, from), now = mesh_for(written, to);
  const int64_t evaluated =
      written.train.eval_batches * written.train.batch_per_rank * before.degree(mesh::axes::batch);
  const int64_t at_once = batch * now.degree(mesh::axes::batch);
  config::Json resolved = written.resolved;
  resolved["train"]["batch_per_rank"] = batch;
  resolved["train"]["accumulate"] = samples / batch;
  resolved["train"]["eval_batches"] = (evaluated + at_once - 1) / at_once;
  fit_degrees(resolved, written, before.degree(mesh::axes::state), now.degree(mesh::axes::state));
  return config::make_config(resolved, "");  // the run folder has its name
}

config::Config with_experts(const config::Config& written, int degree) {
  config::Json resolved = written.resolved;
  resolved["expert_parallel_degree"] = degree;
  return config::make_config(resolved, "");
}

std::string why_not(const config::Config& written, int from, int to) {
  try {
    samples_of_reader(written, from, to);
    return "";
  } catch (const config::ConfigError& error) {
    return config::without_function(error);
  } catch (const InvalidArgument& error) {
    // The job has some number of ranks that can be: one of the two is found.
    int below = to - 1, above = std::max(to + 1, 1);
    while (below > 0 && !can_be(written, from, below)) --below;
    const int most = std::max(to, from * static_cast<int>(written.train.batch_per_rank * written.train.accumulate));
    while (above <= most && !can_be(written, from, above)) ++above;
    const std::string near = below <= 0 ? cat(above) : above > most ? cat(below) : cat(below, " and ", above);
    return cat(config::without_function(error), "; nearest possible: ", near);
  }
}

}  // namespace tesserae::train
