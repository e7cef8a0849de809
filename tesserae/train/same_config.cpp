#include "tesserae/train/same_config.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>

#include "tesserae/base/error.h"
#include "tesserae/comm/agree.h"
#include "tesserae/config/json.h"
#include "tesserae/os/host.h"

namespace tesserae::train {
namespace {

/// A host's own affair: where things lie on it, how it is watched, and when it is told to end. Data are compared by
/// what they are.
constexpr std::array<std::string_view, 10> of_hosts = {
    "$comment",  "memory_limit", "run",         "monitor",           "preemption",
    "data.path", "data.weights", "data.format", "checkpoint.folder", "offload.folder"};

bool may_differ(const std::string& key) {
  return std::ranges::find(of_hosts, key) != of_hosts.end();
}

config::Json what_must_be_same(const config::Config& config, const JobSetup& setup) {
  config::Json told;
  for (const auto& [key, value] : config.resolved.items()) {
    if (may_differ(key)) continue;
    if (!value.is_object()) {
      told[key] = value;
      continue;
    }
    for (const auto& [inner, of_inner] : value.items()) {
      if (const std::string both = cat(key, ".", inner); !may_differ(both)) told[both] = of_inner;
    }
  }
  const auto dtype = [](const std::optional<c10::ScalarType>& type) {
    return c10::toString(type.value_or(at::kFloat));
  };
  const shard::Precision& precision = setup.precision;  // "auto" is what a host's processors have
  told["precision"] =
      cat(dtype(precision.parameters), ", sums ", dtype(precision.reduce), ", masters ", dtype(precision.masters));
  for (const data::Source& source : setup.sources) {
    told["data"].push_back(
        cat(source.weight, " of ", source.stream->size(), " tokens, #", source.stream->fingerprint()));
  }
  return told;
}

}  // namespace

void require_same_config(comm::Fabric& fabric, const config::Config& config, const JobSetup& setup) {
  const std::string own = what_must_be_same(config, setup).dump(), of_first = comm::text_of(fabric, own, 0);
  const int other = comm::lowest_rank_with(fabric, own != of_first);
  if (other < 0) return;
  const config::Json first = config::Json::parse(of_first);
  config::Json second = config::Json::parse(comm::text_of(fabric, own, other));
  const std::string first_host = comm::text_of(fabric, os::host_name(), 0);
  const std::string other_host = comm::text_of(fabric, os::host_name(), other);
  for (const auto& [key, value] : first.items()) {
    if (second[key] == value) continue;
    throw config::ConfigError(
        key, cat("host ", first_host, " (rank 0) has ", config::brief(value), ", host ", other_host, " (rank ", other,
                 ") has ", config::brief(second[key]), ": start all hosts with the same configuration"));
  }
  throw config::ConfigError("", cat("host ", other_host, " (rank ", other, ") has keys that host ", first_host,
                                    " (rank 0) does not know: start all hosts with the same version"));
}

}  // namespace tesserae::train
