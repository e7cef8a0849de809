#include "tesserae/train/same_config.h"

#include <string>

#include "tesserae/base/error.h"
#include "tesserae/comm/agree.h"
#include "tesserae/config/json.h"
#include "tesserae/os/host.h"

namespace tesserae::train {
namespace {

config::Json what_must_be_same(const config::Config& config) {
  config::Json told;
  for (const char* section : {"train", "optimizer", "bad_steps", "recovery"}) {
    const auto found = config.resolved.find(section);
    if (found == config.resolved.end()) continue;
    for (const auto& [key, value] : found->items()) told[cat(section, ".", key)] = value;
  }
  return told;
}

}  // namespace

void require_same_config(comm::Fabric& fabric, const config::Config& config) {
  const std::string own = what_must_be_same(config).dump(), of_first = comm::text_of(fabric, own, 0);
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
